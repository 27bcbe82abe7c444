"""LoRA adapters of a running vLLM: loaded and unloaded by name, beside the model below them.

vLLM keys its prefix cache by the name and the path of an adapter, not by its weights. An adapter
that is loaded again under the same name and path is served from blocks that the earlier one
computed, also with ``load_inplace``, of which vLLM itself warns. So each set of weights needs a
name and a path of its own. Unloading takes the name out of vLLM's list: calls in flight finish with
the adapter that they began with.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from bridle.engine.contract import contract
from bridle.engine.contract.client import EngineRefused
from bridle.engine.vllm.control import VllmControl

LOAD_LORA: Final = "/v1/load_lora_adapter"
UNLOAD_LORA: Final = "/v1/unload_lora_adapter"
RANKS: Final = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""The values that vLLM takes as ``--max-lora-rank``."""
_NO_ROUTE: Final = 404


class VllmLora(VllmControl):
    """The control client of a vLLM that serves LoRA adapters."""

    def require_lora(self, rank: int) -> None:
        """Raise ``EngineRefused`` unless vLLM takes adapters of ``rank`` while it runs."""
        remedy = (
            f"start it with `bridle engine vllm --set lora_rank={rank}`, or with --enable-lora "
            f"--max-lora-rank {served_rank(rank)} and VLLM_ALLOW_RUNTIME_LORA_UPDATING=1, or "
            "publish merged weights with training.publish.through=directory"
        )
        config = self.server_info().get("lora_config")
        if not isinstance(config, dict):
            raise EngineRefused(f"{self.base_url} serves no LoRA adapters: {remedy}")
        most = config.get("max_lora_rank")
        if isinstance(most, int) and most < rank:
            raise EngineRefused(
                f"{self.base_url} serves LoRA adapters up to rank {most}, and training.lora.rank "
                f"is {rank}: {remedy}"
            )
        try:
            self._request("POST", LOAD_LORA, json={})
        except EngineRefused as error:
            # A vLLM that has the route answers that the name is missing.
            if error.status == _NO_ROUTE:
                raise EngineRefused(
                    f"{self.base_url} takes no LoRA adapters while it runs: {remedy}"
                ) from error

    def load_lora(self, name: str, directory: str | Path) -> None:
        """Load the PEFT adapter in ``directory`` as the model ``name``.

        vLLM must see the same path. Raise ``EngineRefused`` if it cannot load the adapter, or has
        one of this name.
        """
        path = str(Path(directory).absolute())
        self._request("POST", LOAD_LORA, json={"lora_name": name, "lora_path": path})

    def unload_lora(self, name: str) -> None:
        """Take the adapter ``name`` from the models that calls can name.

        Raise ``EngineRefused`` if there is none.
        """
        self._request("POST", UNLOAD_LORA, json={"lora_name": name})

    def loras(self) -> list[str]:
        """Return the names of the loaded adapters, in the order in which they were loaded."""
        cards = self._send("GET", contract.MODELS).get("data") or []
        return [str(card["id"]) for card in cards if card.get("parent") is not None]


def served_rank(rank: int) -> int:
    """Return the smallest ``--max-lora-rank`` that takes adapters of ``rank``."""
    return next((most for most in RANKS if most >= rank), rank)
