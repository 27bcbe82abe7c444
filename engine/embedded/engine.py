"""The embedded engine as a context manager: a model thread, and an HTTP server in front of it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Self

import torch

from bridle.engine.embedded.backend import EmbeddedBackend, EmbeddedSettings
from bridle.engine.serve.server import make_app
from bridle.engine.serve.transport import ServerThread


class EmbeddedEngine:
    """A server of the model in ``model_dir`` at :attr:`base_url` while the context is open."""

    def __init__(
        self,
        model_dir: str | Path,
        *,
        served_model_name: str | None = None,
        settings: EmbeddedSettings | None = None,
        parse_thinking: bool = False,
        api_key: str | None = None,
        host: str = "127.0.0.1",
        port: int = 0,
    ) -> None:
        self.backend = EmbeddedBackend(
            model_dir, served_model_name=served_model_name, settings=settings
        )
        app = make_app(self.backend, parse_thinking=parse_thinking, api_key=api_key)
        self._server = ServerThread(app, host=host, port=port, on_stop=self.backend.stop)

    @property
    def base_url(self) -> str:
        """The URL at which the engine listens, without ``/v1``."""
        return self._server.base_url

    @property
    def model(self) -> str:
        """The model name that requests use."""
        return self.backend.card.id

    @property
    def policy_version(self) -> int:
        return self.backend.policy_version

    def load_weights(self, state: Mapping[str, torch.Tensor]) -> int:
        """Serve ``state`` from memory. Return the new policy version."""
        return self.backend.load_weights(state)

    def __enter__(self) -> Self:
        self.backend.start()
        self._server.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._server.stop()
