"""Weights from this process's memory to a running vLLM; its other end is ``inside/``.

A transfer does not disturb what the engine serves: it ends with the weights beside the served ones,
in the memory of the engine's host, or with an error and nothing changed. Loading them is a step of
its own (:meth:`engine.vllm.control.VllmControl.load_weights`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Literal

import torch
from torch import Tensor
from torch._C._distributed_c10d import Store

from engine.client import EngineError, EngineRefused
from engine.vllm.control import VllmControl
from engine.vllm.flags import TRANSFER_BACKEND
from engine.vllm.inside.bridle_wire import Announcement, Group, TransferBroken, buckets, open_store

Backend = Literal["gloo", "nccl"]


class TransferFailed(EngineError):
    """A transfer did not come to its end; the engine serves what it served before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """How weights go from this machine to the engine's."""

    address: str = "127.0.0.1"
    """Where this end listens while it sends; whoever reaches it there could take part, so it must
    be loopback or a private network's."""
    backend: Backend = "gloo"
    """``gloo``: through the hosts' memory, whatever the devices. ``nccl``: between the memories of
    different GPUs."""
    bucket_bytes: int = 64 << 20
    """Bytes of one broadcast."""
    stall_seconds: float = 60.0
    """Longest wait for the engine to join, and for one bucket."""


class VllmTransfer:
    """Transfers to the vLLM behind ``control``; raises ``EngineRefused`` when it takes none."""

    def __init__(self, control: VllmControl, route: Route | None = None) -> None:
        self.control = control
        self.route = route or Route()
        info = control.server_info()
        if (info.get("weight_transfer_config") or {}).get("backend") != TRANSFER_BACKEND:
            raise EngineRefused(
                f"{control.base_url} takes no weights by transfer: start it with `bridle engine "
                "vllm`, or publish through directories"
            )
        self._served = getattr(torch, str(info["model_config"]["dtype"]).removeprefix("torch."))

    def send(self, tensors: Mapping[str, Tensor]) -> None:
        """Bring a checkpoint's tensors to the engine, beside what it serves.

        Raises :class:`TransferFailed`, or another ``EngineError``, with nothing changed.
        """
        route = self.route
        store, port = open_store(route.address, route.stall_seconds)
        announcement = Announcement(
            tensors=[self._described(name, tensor) for name, tensor in tensors.items()],
            address=route.address,
            port=port,
            world_size=1 + self.control.workers(),
            backend=route.backend,
            bucket_bytes=route.bucket_bytes,
            stall_seconds=route.stall_seconds,
        )
        self.control.announce_weights(asdict(announcement))
        device = next(iter(tensors.values())).device
        wire = (tensor.to(self._wire_type(tensor)) for tensor in tensors.values())
        try:
            broadcast(announcement, store, wire, device)
        except TransferBroken as error:
            raise TransferFailed(f"the transfer broke: {error}") from error
        self.control.require_weights()

    def _wire_type(self, tensor: Tensor) -> torch.dtype:
        """What the engine makes of it anyway is not sent in more bits. Vectors are little to send,
        and some models keep theirs in float32."""
        return self._served if tensor.is_floating_point() and tensor.dim() > 1 else tensor.dtype

    def _described(self, name: str, tensor: Tensor) -> tuple[str, str, list[int]]:
        kind = str(self._wire_type(tensor)).removeprefix("torch.")
        return name, kind, list(tensor.shape)


def broadcast(
    announcement: Announcement, store: Store, tensors: Iterable[Tensor], device: torch.device
) -> None:
    """The sender's part of an announced transfer; raises :class:`TransferBroken`."""
    group = Group(announcement, 0, store, device)
    whole = False
    try:
        for bucket in buckets(announcement, tensors):
            group.broadcast(bucket if group.on_host else bucket.to(device))
        whole = True
    finally:
        group.close(broken=not whole)
