"""Weight transfers from this process's memory to a running vLLM; the other end is in ``inside/``.

A transfer does not disturb what the engine serves. It ends with the weights beside the served ones,
in the memory of the engine's host, or with an error and nothing changed. Loading them is a step of
its own (:meth:`engine.vllm.control.VllmControl.load_weights`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor
from torch._C._distributed_c10d import Store

from bridle.engine.contract.client import EngineError, EngineRefused
from bridle.engine.vllm.control import VllmControl
from bridle.engine.vllm.flags import TRANSFER_BACKEND
from bridle.engine.vllm.inside.bridle_wire import (
    Announcement,
    Group,
    TransferBroken,
    buckets,
    open_store,
)

TransferBackend = Literal["gloo", "nccl"]


class TransferFailed(EngineError):
    """A transfer was not completed; the engine serves the same weights as before."""

    retryable = True


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferRoute:
    """The settings by which weights go from this machine to the engine's."""

    address: str = "127.0.0.1"
    """The address on which this end listens while it sends. Anyone who reaches it could take part,
    so it must be loopback or an address in a private network."""
    backend: TransferBackend = "gloo"
    """The medium of transfers: ``gloo`` goes through the hosts' memory, whatever the devices;
    ``nccl`` goes between the memories of different GPUs."""
    bucket_bytes: int = 64 << 20
    """Bytes of one broadcast."""
    stall_seconds: float = 60.0
    """Maximum seconds to wait for the engine to join, and for one bucket."""


class VllmTransfer(VllmControl):
    """The :class:`VllmControl` of a vLLM that receives weights by transfer."""

    def __init__(
        self,
        base_url: str,
        *,
        route: TransferRoute | None = None,
        timeout: float = 120.0,
        api_key: str | None = None,
    ) -> None:
        super().__init__(base_url, timeout=timeout, api_key=api_key)
        self.route = route or TransferRoute()

    def require_transfers(self) -> None:
        """Raise ``EngineError`` if this engine or machine cannot do transfers by this route."""
        backend = (self._info.get("weight_transfer_config") or {}).get("backend")
        if backend != TRANSFER_BACKEND:
            raise EngineRefused(
                f"{self.base_url} takes no weights by transfer: start it with `bridle engine "
                "vllm`, or publish through directories"
            )
        if self.route.address in ("0.0.0.0", "::"):  # noqa: S104 - this refuses it
            raise EngineRefused(
                f"the engine cannot reach {self.route.address}: name this machine's address in the "
                "private network"
            )
        self._open_store()
        on_gpu = str(self._info["device_config"]["device"]).startswith("cuda")
        if self.route.backend == "nccl" and not (on_gpu and torch.cuda.is_available()):
            raise EngineRefused("nccl needs a GPU on both sides: choose gloo")

    def send(self, tensors: Mapping[str, Tensor]) -> None:
        """Send a checkpoint's tensors to the engine, which keeps them beside the served ones.

        Raise :class:`TransferFailed`, or another ``EngineError``, with nothing changed.
        """
        route = self.route
        store, port = self._open_store()
        announcement = Announcement(
            tensors=[self._described(name, tensor) for name, tensor in tensors.items()],
            address=route.address,
            port=port,
            world_size=1 + self.workers(),
            backend=route.backend,
            bucket_bytes=route.bucket_bytes,
            stall_seconds=route.stall_seconds,
        )
        self.announce_weights(asdict(announcement))
        wire = (tensor.to(self._wire_type(tensor)) for tensor in tensors.values())
        try:
            broadcast(announcement, store, wire, self.require_weights)
        except TransferBroken as error:
            raise TransferFailed(
                f"the transfer broke: {error}; the weights were not changed"
            ) from error

    def _open_store(self) -> tuple[Store, int]:
        try:
            return open_store(self.route.address, self.route.stall_seconds)
        except OSError as error:
            raise TransferFailed(f"nothing can listen on {self.route.address}: {error}") from error

    @cached_property
    def _info(self) -> dict[str, Any]:
        return self.server_info()

    def _wire_type(self, tensor: Tensor) -> torch.dtype:
        """Return the type in which a tensor is sent: the type in which the engine serves it.

        The reason is that more bits would be dropped. Vectors keep their own type, since they are
        small and some models keep theirs in float32.
        """
        if tensor.dim() < 2 or not tensor.is_floating_point():
            return tensor.dtype
        name = str(self._info["model_config"]["dtype"]).removeprefix("torch.")
        served: torch.dtype = getattr(torch, name)
        return served

    def _described(self, name: str, tensor: Tensor) -> tuple[str, str, list[int]]:
        kind = str(self._wire_type(tensor)).removeprefix("torch.")
        return name, kind, list(tensor.shape)


def broadcast(
    announcement: Announcement,
    store: Store,
    tensors: Iterable[Tensor],
    confirm: Callable[[], None],
) -> None:
    """Send the tensors of an announced transfer. Raise :class:`TransferBroken` if that fails.

    ``confirm`` returns when all has come; until then the group stays open.
    """
    nccl = announcement.backend == "nccl"
    device = torch.device("cuda", torch.cuda.current_device()) if nccl else torch.device("cpu")
    group = Group(announcement, 0, store, device)
    try:
        for bucket in buckets(announcement, tensors, device):
            group.broadcast(bucket)
        confirm()
    except BaseException:
        group.close(broken=True)
        raise
    group.close(broken=False)
