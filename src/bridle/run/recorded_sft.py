"""Supervised fine-tuning on recorded sessions, as a run of their store."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict

from bridle.reconstruct.samples.builders import BUILDER_VERSION
from bridle.reconstruct.samples.rules import SampleRules
from bridle.reconstruct.samples.sample import Conservation
from bridle.run.attempts import attempt
from bridle.store.records import RunRecord, new_id
from bridle.store.schema.accounts import TRAINED
from bridle.store.trained import SessionFates
from bridle.store.writing.writer import Writer
from bridle.trainer.config import SftConfig

Account = Callable[[Mapping[str, Conservation], int], None]
"""A function that records where the tokens of each session went, and after how many updates, once
the policy is on disk."""


@contextmanager
def sft_run(store: str, name: str, rules: SampleRules, config: SftConfig) -> Iterator[Account]:
    """Record a run of the kind ``sft`` while the context is open. Yield its account."""
    run = RunRecord(
        new_id("run"),
        "sft",
        time.time(),
        name=name,
        config={
            "samples": {
                "builder": "tree",
                "builder_version": BUILDER_VERSION,
                "rules": rules.as_data(),
            },
            "settings": asdict(config),
        },
    )

    def account(taken: Mapping[str, Conservation], updates: int) -> None:
        now = time.time()
        with Writer(store) as writer:
            writer.add_sync(
                *(
                    SessionFates(session_id, run.id, table.by_fate(TRAINED), updates - 1, None, now)
                    for session_id, table in taken.items()
                )
            )

    with attempt(store, run):
        yield account
