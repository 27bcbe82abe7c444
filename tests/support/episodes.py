"""Sessions made by hand, for tests of credit."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from bridle.reconstruct.samples.sample import Conservation, Episode, Sample
from bridle.store.records import CallKind, SessionRecord
from bridle.store.reward import Reward


def one_branch(
    name: str,
    calls: Sequence[tuple[Sequence[int], str | None]],
    rewards: Sequence[Reward],
    outcome: str | None = None,
) -> Episode:
    """Return a session of one branch, whose calls are ``(prompt ids, role)``.

    Call ``N`` is named ``{name}{N}``, and samples one token.
    """
    ids, places = [], []
    for number, (prompt, _) in enumerate(calls):
        ids += [*prompt, 90 + number]
        places += [*([-1] * len(prompt)), number]
    mask = np.asarray(places) >= 0
    call_ids = tuple(f"{name}{number}" for number in range(len(calls)))
    sample = Sample(
        session_id=name,
        leaf_call_id=call_ids[-1],
        kind=CallKind.MAIN,
        role=None,
        token_ids=np.asarray(ids, np.uint32),
        mask=mask,
        logprobs=np.zeros(len(ids), np.float32),
        versions=np.where(mask, 0, -1),
        calls=np.asarray(places, np.int32),
        call_ids=call_ids,
        weight=1.0,
        roles=tuple(role for _, role in calls),
    )
    record = SessionRecord(id=name, created_at=0.0, group_id="g", outcome=outcome)
    sampled = int(mask.sum())
    return Episode(record, (sample,), tuple(rewards), Conservation(sampled, sampled))
