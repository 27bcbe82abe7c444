"""Control of a running vLLM: the engine client, and what only vLLM has."""

from __future__ import annotations

from typing import Any, Final

from engine import contract
from engine.client import EngineClient, EngineRefused

UPDATE_WEIGHT_VERSION: Final = "/update_weight_version"
SERVER_INFO: Final = "/server_info"
REMEMBER_VERSION: Final = "remember_version"
"""A method of ``inside/bridle_worker.py``."""


class VllmControl(EngineClient):
    """:class:`engine.client.EngineClient` of a vLLM."""

    def stamp(self, version: int) -> None:
        """Tell vLLM which policy version it serves; call it while paused, after the reload.

        vLLM forgets it when it dies, which is how a restart behind one's back is noticed. Our
        worker writes it down for the next start; another worker cannot, and is left alone.
        """
        self._send("POST", UPDATE_WEIGHT_VERSION, json={"new_version": str(version)})
        body = {"method": REMEMBER_VERSION, "args": [str(version)]}
        try:
            self._send("POST", contract.COLLECTIVE_RPC, json=body)
        except EngineRefused as error:
            if f"has no attribute '{REMEMBER_VERSION}'" not in str(error):
                raise

    def policy_version(self) -> int | None:
        """The version that was stamped; ``None`` when none was since vLLM started."""
        version = self._send("GET", contract.WEIGHT_INFO).get("weight_version")
        return int(version) if isinstance(version, str) and version.isdecimal() else None

    def server_info(self) -> dict[str, Any]:
        """vLLM's whole configuration; raises ``EngineRefused`` outside its development mode."""
        info = self._send("GET", SERVER_INFO, params={"config_format": "json"})
        config = info.get("vllm_config")
        if not isinstance(config, dict):
            raise EngineRefused(f"{self.base_url}{SERVER_INFO} tells no configuration")
        return config
