"""The processes that train one policy together, as torchrun starts them."""

from __future__ import annotations

import atexit
import os
from dataclasses import dataclass
from datetime import timedelta
from typing import Final, Self

import torch
from torch import distributed as dist
from torch._C._distributed_c10d import FileStore, Store

from bridle.trainer.policy.compute import UnsupportedCompute, choose_devices

RENDEZVOUS_VARIABLE: Final = "BRIDLE_RENDEZVOUS"
"""Name of the environment variable with the file through which the processes of one machine meet
(:mod:`bridle.trainer.learner.launch`). Without it they meet at torchrun's TCP address."""
STALL: Final = timedelta(minutes=30)
"""Maximum time that one process waits for another within a pass."""
BETWEEN_OPERATIONS: Final = timedelta(days=30)
"""Maximum time that the others wait for rank 0, which collects sessions meanwhile."""


@dataclass(frozen=True, slots=True)
class World:
    """This process's place among those that train the policy."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    """The rank among the processes of this machine."""
    local_size: int = 1

    @classmethod
    def current(cls) -> Self:
        """Return the place that torchrun states in the environment.

        Without torchrun it is that of a lone process.
        """
        if not dist.is_torchelastic_launched():
            return cls()
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
        return cls(*(int(os.environ[name]) for name in names))

    @property
    def is_first(self) -> bool:
        """Return whether this process runs the training run and writes its files."""
        return self.rank == 0

    def device(self, names: str) -> torch.device:
        """Return this process's device among those that :attr:`ComputeConfig.device` names.

        Raises :class:`UnsupportedCompute` if there are fewer devices than processes.
        """
        devices = choose_devices(names)
        if self.size == 1:
            return devices[0]
        if len(devices) == 1 and devices[0].type == "cpu":
            return devices[0]
        if len(devices) == 1:
            first = devices[0].index or 0
            devices = choose_devices(f"{devices[0].type}:{first}-{first + self.local_size - 1}")
        if len(devices) < self.local_size:
            raise UnsupportedCompute(
                f"{self.local_size} processes on this machine, and {len(devices)} devices "
                f"({names}): lower --nproc-per-node, or name more in compute.device"
            )
        return devices[self.local_rank]


def join(world: World, device: torch.device) -> dist.ProcessGroup:
    """Connect to every process of ``world``, for as long as this process lives.

    Returns the group that carries operations.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if not dist.is_initialized():
        dist.init_process_group(
            dist.get_default_backend_for_device(device),
            rank=world.rank,
            world_size=world.size,
            timeout=STALL,
            store=_store(world),
        )
        atexit.register(dist.destroy_process_group)
    control: dist.ProcessGroup = dist.new_group(backend="gloo", timeout=BETWEEN_OPERATIONS)
    return control


def _store(world: World) -> Store | None:
    file = os.environ.get(RENDEZVOUS_VARIABLE)
    if file is None:
        return None
    attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
    return FileStore(f"{file}.{attempt}", world.size)
