"""Weights from the trainer's memory, received by vLLM's weight transfer interface.

They are received whole before use.

The trainer announces a transfer (``/init_weight_transfer_engine``), sends, asks whether all of it
has come (``/start_weight_update``, ``/update_weights``), pauses, and has it loaded
(``/finish_weight_update``). Until that last call nothing that is served is touched: a thread
receives the weights into the host's memory while the engine serves on. So a transfer that ends
early leaves the old weights in service, whether the sender died or fell silent or the tensors are
of another model. A transfer costs one copy of the weights in each worker's host memory until they
are loaded.

Loading itself cannot be undone. If it fails half-way this process ends, and with it the engine:
half-loaded weights must not serve.
"""

from __future__ import annotations

import os
import signal
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from bridle_checkpoint import check_shapes
from bridle_packing import repack_shared_weights
from bridle_wire import Announcement, Group, TransferBroken, find_store, unpacked
from torch import Tensor
from vllm.distributed.weight_transfer.base import WeightTransferEngine
from vllm.logger import init_logger
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)

logger = init_logger("vllm.bridle_transfer")


@dataclass
class Arrived:
    """The body of ``/update_weights``. It has no fields, because everything was announced."""


class Incoming:
    """One transfer, received by a thread of its own into the host's memory."""

    def __init__(self, announcement: Announcement, rank: int, device: torch.device) -> None:
        self._announcement = announcement
        self._rank = rank
        self._device = device
        self._group: Group | None = None
        self._row: Tensor | None = None
        self._error: Exception | None = None
        self._given_up = threading.Event()
        self._thread = threading.Thread(target=self._run, name="weight transfer", daemon=True)
        self._thread.start()

    def give_up(self) -> None:
        """Stop waiting for the rest of the transfer."""
        self._given_up.set()

    def tensors(self) -> list[tuple[str, Tensor]]:
        """Return all tensors by name. Raise ValueError if they did not come whole.

        This waits for what the sender has sent already. It never waits long, since the thread ends
        when the sender is gone or silent.
        """
        self._thread.join()
        if self._group is not None:
            # Only now that the sender asks is it certainly done with its part.
            self._group.close(broken=False)
            self._group = None
        if self._row is None:
            raise ValueError(f"the transfer broke: {self._error}; the weights were not changed")
        tensors: list[tuple[str, Tensor]] = unpacked(self._announcement, self._row)
        return tensors

    def _run(self) -> None:
        try:
            self._row = self._received()
        except (TransferBroken, RuntimeError, OSError) as error:
            logger.warning("a weight transfer broke: %s", error)
            self._error = error

    def _received(self) -> Tensor:
        announcement = self._announcement
        row = torch.empty(announcement.offsets[-1], dtype=torch.uint8)
        group = Group(announcement, self._rank, find_store(announcement), self._device)
        try:
            for begin, end in announcement.spans():
                part = row[begin:end]
                # NCCL fills a GPU's memory, of which no more than a bucket is taken.
                bucket = part if group.on_host else torch.empty_like(part, device=self._device)
                group.broadcast(bucket, self._given_up.is_set)
                if not group.on_host:
                    part.copy_(bucket)
        except BaseException:
            group.close(broken=True)
            raise
        self._group = group
        return row


class BridleTransferEngine(WeightTransferEngine):  # type: ignore[misc]  # no vLLM where types are checked
    """The worker's end of transfers.

    ``--weight-transfer-config {"backend": "bridle"}`` selects it.
    """

    init_info_cls = Announcement
    update_info_cls = Arrived
    supports_draft_weight_update = False

    _incoming: Incoming | None = None

    def init_transfer_engine(self, init_info: Announcement) -> None:
        """Begin to receive.

        Raise ValueError if the tensors are not a version of the served model.
        """
        check_shapes(Path(self.vllm_config.model_config.model), init_info.shapes)
        self.shutdown()
        parallel = self.parallel_config
        worker = parallel.data_parallel_index * parallel.world_size + parallel.rank
        self._incoming = Incoming(init_info, 1 + worker, self.device)

    def start_weight_update(self) -> None:
        if self._incoming is None:
            raise ValueError("no transfer was announced; the weights were not changed")

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Receive the weights, but do not wait for an accelerator, which the base class does."""
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: Arrived) -> None:
        """Return when all has come. Forget the transfer and raise ValueError if it has not."""
        try:
            self._require().tensors()
        except ValueError:
            self._incoming = None
            raise

    def finish_weight_update(self) -> None:
        """Load the received weights. End the process if that fails half-way."""
        tensors = self._require().tensors()
        try:
            self._load(tensors)
        except BaseException:
            logger.exception("weights are half-loaded: the engine ends")
            os.kill(os.getpid(), signal.SIGKILL)
            raise
        self._incoming = None

    def shutdown(self) -> None:
        if self._incoming is not None:
            self._incoming.give_up()
            self._incoming = None

    def _require(self) -> Incoming:
        if self._incoming is None:
            raise ValueError("no transfer was announced; the weights were not changed")
        return self._incoming

    def _load(self, tensors: list[tuple[str, Tensor]]) -> None:
        with torch.no_grad():
            initialize_layerwise_reload(self.model)
            self.model.load_weights(tensors)
            finalize_layerwise_reload(self.model, self.model_config)
            if self.device.type == "cpu":
                repack_shared_weights(self.model)
        if self.device.type != "cpu":
            torch.accelerator.synchronize()
