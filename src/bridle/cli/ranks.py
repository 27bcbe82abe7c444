"""Run a training command once for each of several devices, under torchrun."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import typer
from torch import distributed

from bridle.trainer.learner.launch import launch
from bridle.trainer.policy.compute import choose_devices


def run_on_each_device(names: str) -> None:
    """Run this command again for each device if ``names`` are several, and then end it.

    Its exit code is that of the first. Under torchrun, do nothing.

    Raise :class:`bridle.trainer.policy.compute.UnsupportedCompute` for devices that cannot be used.
    """
    if distributed.is_torchelastic_launched():
        return
    devices = choose_devices(names)
    if len(devices) > 1:
        raise typer.Exit(launch(len(devices), _command, sys.argv[1:]))


def _command(arguments: Sequence[str]) -> int:
    """Run ``bridle ARGUMENTS`` in this process, and return its exit code."""
    from bridle.cli.program import app

    try:
        app(list(arguments), prog_name="bridle")
    except SystemExit as leave:
        return leave.code if isinstance(leave.code, int) else int(leave.code is not None)
    return 0
