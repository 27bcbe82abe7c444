"""Control of a running vLLM: the engine client, and the routes that only vLLM has."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from bridle.engine.contract import contract
from bridle.engine.contract.client import EngineClient, EngineRefused

UPDATE_WEIGHT_VERSION: Final = "/update_weight_version"
SERVER_INFO: Final = "/server_info"
REMEMBER_VERSION: Final = "remember_version"
"""A method of ``inside/bridle_worker.py``."""
REMEMBER_DIRECTORY: Final = "remember_directory"
"""Another method of ``inside/bridle_worker.py``."""
WORLD_SIZE: Final = "/get_world_size"
ANNOUNCE_WEIGHTS: Final = "/init_weight_transfer_engine"
TAKE_WEIGHTS: Final = ("/start_weight_update", "/update_weights")
LOAD_WEIGHTS: Final = "/finish_weight_update"


class VllmControl(EngineClient):
    """The :class:`bridle.engine.contract.client.EngineClient` of a vLLM."""

    def stamp(self, version: int) -> None:
        """Set the policy version that vLLM reports. Call it while paused, after the reload.

        vLLM forgets the version when it dies, which reveals a restart that the caller did not make.
        Our worker records it for the next start. Another worker cannot, and its refusal is ignored.
        """
        self._send("POST", UPDATE_WEIGHT_VERSION, json={"new_version": str(version)})
        body = {"method": REMEMBER_VERSION, "args": [str(version)]}
        try:
            self._send("POST", contract.COLLECTIVE_RPC, json=body)
        except EngineRefused as error:
            if f"has no attribute '{REMEMBER_VERSION}'" not in str(error):
                raise

    def policy_version(self) -> int | None:
        """Return the version that was stamped, or ``None`` if none was since vLLM started."""
        version = self._send("GET", contract.WEIGHT_INFO).get("weight_version")
        return int(version) if isinstance(version, str) and version.isdecimal() else None

    def workers(self) -> int:
        """Return the number of processes that hold a part of the model."""
        return int(self._send("GET", WORLD_SIZE)["world_size"])

    def announce_weights(self, announcement: Mapping[str, Any]) -> None:
        """Prepare all workers for a transfer. Raise ``EngineRefused`` if it is of another model."""
        self._send("POST", ANNOUNCE_WEIGHTS, json={"init_info": announcement})

    def require_weights(self) -> None:
        """Raise ``EngineRefused`` unless all workers have received all of the announced weights."""
        start, update = TAKE_WEIGHTS
        self._send("POST", start)
        self._send("POST", update, json={"update_info": {}})

    def load_weights(self, version: int) -> None:
        """Replace the served weights by the received ones, as ``version``. Call it while paused.

        Afterwards the caller should verify with :meth:`score`.
        """
        self._send("POST", LOAD_WEIGHTS, json={"weight_version": str(version)})

    def remember_directory(self, directory: str | Path, version: int) -> None:
        """Record in our worker that ``directory`` holds the transferred weights that it serves.

        A restart then begins with them. Raise ``EngineRefused`` if the worker serves others.
        """
        path = str(Path(directory).absolute())
        body = {"method": REMEMBER_DIRECTORY, "args": [path, str(version)]}
        self._send("POST", contract.COLLECTIVE_RPC, json=body)

    def server_info(self) -> dict[str, Any]:
        """Return vLLM's whole configuration.

        Raise ``EngineRefused`` outside its development mode.
        """
        info = self._send("GET", SERVER_INFO, params={"config_format": "json"})
        config = info.get("vllm_config")
        if not isinstance(config, dict):
            raise EngineRefused(f"{self.base_url}{SERVER_INFO} tells no configuration")
        return config
