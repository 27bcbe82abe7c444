"""The launch of a command once for each device of this machine, as torchrun does.

To use several machines, start torchrun itself:
``torchrun --nnodes 2 --nproc-per-node 8 … -m bridle train …``.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final
from uuid import uuid4

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from bridle.errors import BridleError
from bridle.trainer.learner.world import RENDEZVOUS_VARIABLE

RESTARTS: Final = 3
"""Maximum number of times that all processes are started again after one has died."""
LEAVE_S: Final = 60
"""Seconds until the processes must have finished an update and written a checkpoint after a
signal."""
LOOPBACK: Final = "lo"
"""Linux's name of the only network interface that the processes use."""

Main = Callable[[Sequence[str]], int]
"""A command: a function from its arguments to its exit code. It is sent to the processes by its
name."""


class LearnerFailed(BridleError):
    """A process that trains died more often than the run is started again."""

    retryable = True


def launch(processes: int, main: Main, arguments: Sequence[str]) -> int:
    """Run ``main(arguments)`` in each of ``processes``; return the first one's exit code.

    If a process dies, the others are ended and all are started again, at most ``RESTARTS`` times;
    then :class:`LearnerFailed` is raised. Nothing listens beyond this machine. After a signal the
    exit code is 128 plus its number.
    """
    with tempfile.TemporaryDirectory() as folder:
        os.environ[RENDEZVOUS_VARIABLE] = str(Path(folder) / "ranks")
        # Otherwise the agent listens on every interface.
        os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = LOOPBACK
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=processes,
            run_id=uuid4().hex,
            rdzv_backend="c10d",
            rdzv_endpoint=str(Path(folder) / "agents"),
            rdzv_configs={"store_type": "file"},
            max_restarts=RESTARTS,
            shutdown_timeout=LEAVE_S,
        )
        try:
            codes: dict[int, int] = elastic_launch(config, main)(list(arguments))
        except SignalException as error:
            return 128 + error.sigval
        except ChildFailedError as error:
            rank, failure = error.get_first_failure()
            raise LearnerFailed(
                f"the process of rank {rank} ended with {failure.exitcode}, as did those started "
                f"in its place {RESTARTS} times: {failure.message}"
            ) from error
        return codes[0]
