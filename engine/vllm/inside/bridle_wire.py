"""The format that both ends of a weight transfer share: the announcement, the bytes, and the group.

A checkpoint goes over the wire as one row of bytes. It is cut into *buckets* of one size, whatever
the tensors' sizes are. Each bucket is one broadcast of a torch.distributed group. The group is made
for one transfer through a store of its own: it is nobody's default group, no port listens between
transfers, and an end that was restarted has nothing to remember.

vLLM's worker imports this file as ``bridle_wire``, the trainer as
``bridle.engine.vllm.inside.bridle_wire``, so that the two cannot differ. It uses nothing but torch.
"""

from __future__ import annotations

import math
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

BACKENDS = ("gloo", "nccl")
ALIGNMENT = 64
"""Bytes of which each tensor begins at a multiple, so that its bytes can be viewed as its own
type."""
POLL_SECONDS = 0.0005
KEYS = "weights"


class TransferBroken(Exception):
    """The other end is gone, or silent for too long; what came so far is of no use."""


@dataclass(frozen=True)
class Announcement:
    """A transfer that is about to begin, as the sender announces it to every worker."""

    tensors: Sequence[tuple[str, str, Sequence[int]]]
    """Name, type (``float32``) and shape of each tensor of the checkpoint, in the order sent."""
    address: str
    """The address at which the sender's store listens."""
    port: int
    world_size: int
    """The number of members: the sender, which is rank 0, and all workers."""
    backend: str
    bucket_bytes: int
    stall_seconds: float
    """Maximum seconds to wait for the others to join, and for one bucket."""

    def __post_init__(self) -> None:
        if self.backend not in BACKENDS:
            raise ValueError(f"transfers go through {' or '.join(BACKENDS)}, not {self.backend!r}")
        for name, kind, _ in self.tensors:
            if not isinstance(getattr(torch, kind, None), torch.dtype):
                raise ValueError(f"{name} is announced as {kind!r}, which torch does not have")

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(shape) for name, _, shape in self.tensors}

    @property
    def offsets(self) -> list[int]:
        """The first byte of each tensor in the row of bytes, and the end of the last tensor."""
        offsets = [0]
        for _, kind, shape in self.tensors:
            end = offsets[-1] + math.prod(shape) * getattr(torch, kind).itemsize
            offsets.append(-(-end // ALIGNMENT) * ALIGNMENT)
        return offsets

    def spans(self) -> list[tuple[int, int]]:
        """Return the first byte and the end of each bucket."""
        total = self.offsets[-1]
        return list(pairwise([*range(0, total, self.bucket_bytes), total]))


def buckets(
    announcement: Announcement, tensors: Iterable[Tensor], device: torch.device
) -> Iterator[Tensor]:
    """Yield the buckets of ``tensors``, ``uint8`` on ``device``.

    Each is valid until the next is requested.

    ``tensors`` must be the announced ones, in that order, on any device.
    """
    size, total = announcement.bucket_bytes, announcement.offsets[-1]
    buffer = torch.zeros(min(size, total), dtype=torch.uint8, device=device)
    begin = 0
    for tensor, offset in zip(tensors, announcement.offsets[:-1], strict=True):
        data = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        while len(data):
            if offset >= begin + size:
                yield buffer
                begin += size
                continue
            part = data[: begin + size - offset]
            buffer[offset - begin :][: len(part)] = part
            data, offset = data[len(part) :], offset + len(part)
    while begin < total:
        yield buffer[: total - begin]
        begin += size


def unpacked(announcement: Announcement, row: Tensor) -> list[tuple[str, Tensor]]:
    """Return the tensors whose bytes are ``row``, by name; they share its memory."""
    found = []
    for (name, kind, shape), offset in zip(
        announcement.tensors, announcement.offsets[:-1], strict=True
    ):
        dtype: torch.dtype = getattr(torch, kind)
        data = row[offset : offset + math.prod(shape) * dtype.itemsize]
        found.append((name, data.view(dtype).reshape(tuple(shape))))
    return found


def open_store(address: str, stall_seconds: float) -> tuple[TCPStore, int]:
    """Open the sender's store, which listens on ``address`` alone. Return it and its port."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.create_server((address, 0), family=family)
    port = int(listener.getsockname()[1])
    # Left to itself, a store listens on every address of the machine.
    store = TCPStore(
        address,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=stall_seconds),
        master_listen_fd=listener.detach(),
    )
    return store, port


def find_store(announcement: Announcement) -> TCPStore:
    """Connect a worker to the sender's store."""
    return TCPStore(
        announcement.address,
        announcement.port,
        wait_for_workers=False,
        timeout=timedelta(seconds=announcement.stall_seconds),
    )


class Group:
    """The members of one transfer, of which rank 0 sends.

    All of them create it at the same time.
    """

    def __init__(
        self, announcement: Announcement, rank: int, store: Store, device: torch.device
    ) -> None:
        self._stall_seconds = announcement.stall_seconds
        self.on_host = announcement.backend == "gloo"
        """True if buckets must be in the host's memory; if not, they must be in that of
        ``device``."""
        keys = PrefixStore(KEYS, store)
        members = keys, rank, announcement.world_size
        make = _nccl if announcement.backend == "nccl" else _gloo
        try:
            self._backend = make(members, announcement, device)
        except RuntimeError as error:
            raise TransferBroken(f"the group did not form: {_first_line(error)}") from error

    def broadcast(self, bucket: Tensor, cancelled: Callable[[], bool] = lambda: False) -> None:
        """Send ``bucket`` from rank 0, or fill it elsewhere.

        Raise :class:`TransferBroken` if that fails, is cancelled or takes too long.
        """
        try:
            work = self._backend.broadcast(bucket, 0)
            deadline = time.monotonic() + self._stall_seconds
            # Polled, because waiting for NCCL has no limit but that of its watchdog, which ends
            # the whole process.
            while not work.is_completed():
                if cancelled():
                    raise TransferBroken("it was given up for a later one")
                if time.monotonic() > deadline:
                    raise TransferBroken(f"no bucket within {self._stall_seconds:.0f} s")
                time.sleep(POLL_SECONDS)
            work.wait()
        except RuntimeError as error:
            raise TransferBroken(_first_line(error)) from error

    def close(self, *, broken: bool) -> None:
        if broken:
            self._backend.abort()
        else:
            self._backend.shutdown()


def _gloo(
    members: tuple[Store, int, int], announcement: Announcement, _device: torch.device
) -> Any:
    from torch._C._distributed_c10d import ProcessGroupGloo

    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # not in the stubs
    # By default gloo listens on whatever address the machine's name stands for.
    own = _own_address(announcement.address, announcement.port)
    options._devices = [ProcessGroupGloo.create_device(hostname=own)]
    options._timeout = timedelta(seconds=announcement.stall_seconds)
    return ProcessGroupGloo(*members, options)


def _nccl(members: tuple[Store, int, int], announcement: Announcement, device: torch.device) -> Any:
    from torch._C._distributed_c10d import ProcessGroupNCCL

    torch.cuda.set_device(device)
    options = ProcessGroupNCCL.Options()
    # Longer than our own limit: its watchdog, which would end the process, must not come first.
    options._timeout = timedelta(seconds=announcement.stall_seconds * 2 + 60)
    return ProcessGroupNCCL(*members, options)


def _own_address(address: str, port: int) -> str:
    """Return this machine's address on the way to ``address``."""
    family, kind, _, _, target = socket.getaddrinfo(address, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        # Connecting a datagram socket sends nothing; it picks the address of the way out.
        probe.connect(target)
        return str(probe.getsockname()[0])


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0][:300]
