"""A task whose sessions can all be enumerated, and a store with many of them.

The exact policy gradient of a table of logits ``θ`` is that of

    ``J(θ) = Σ over all sessions of P(session; θ) × reward(session)``

computed in float64, session by session, with nothing sampled. The store holds sessions that were
drawn with one table ``θ_μ``. Estimators, losses, corrections and filters that compute from the
store can therefore be compared with the exact gradient, at ``θ_μ`` and at other tables.

The store also has what filters look for. A word of a wrong reply decides whether it ends at the
token limit, and whether it has text. A session that does not reach the goal ends with a call that
its budget refuses. A call of one session
in ten fails by the engine's fault.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bridle.recipes.learning.world import ROLES, Played, World, play, refusals
from bridle.reconstruct.episodes import episodes
from bridle.reconstruct.samples.sample import Episode
from bridle.store.call import CallBegun, CallEnded
from bridle.store.reading.queries import Reader
from bridle.store.records import (
    CallKind,
    CallStatus,
    Choice,
    Conversation,
    Message,
    Sampler,
    SessionRecord,
    VersionRun,
)
from bridle.store.reward import Reward, RewardSource
from bridle.store.schema.database import migrate
from bridle.store.tree import TokenTree
from bridle.store.writing.batch import Patch, Record
from bridle.store.writing.writer import Writer

TREE: Final = World(
    "tree",
    "Every session is enumerated.",
    places=2,
    ways=3,
    steps=3,
    history=True,
    wordy=1,
    failing=0.1,
)
RIGHT: Final = np.asarray([1, 2, 0, 0])
"""The right choice of each row."""
TRANSACTION: Final = 64
"""Number of sessions that are written at a time."""


@dataclass(frozen=True, slots=True)
class Enumerated:
    """All sessions of :data:`TREE`, ``N`` of them, with at most ``D`` choices each."""

    rows: NDArray[np.int64]
    """``int64[N, D]``: the row of each choice, -1 behind the session's last."""
    choices: NDArray[np.int64]
    """``int64[N, D]``"""
    starts: NDArray[np.float64]
    """``float64[N]``: the probability of the session's first place."""
    solved: NDArray[np.float64]
    """``float64[N]``: the reward of the session as a whole."""
    steps: NDArray[np.float64]
    """``float64[N]``: the sum of the rewards of its steps."""

    def probabilities(self, logits: Tensor) -> Tensor:
        """Return the probability of each session under a table of logits, ``float64[N]``."""
        scores = logits.log_softmax(-1)
        rows, choices = torch.from_numpy(self.rows), torch.from_numpy(self.choices)
        each = torch.where(rows >= 0, scores[rows.clamp(min=0), choices], 0.0)
        return torch.from_numpy(self.starts) * each.sum(1).exp()

    def gradient(self, logits: Tensor, *, with_steps: bool) -> Tensor:
        """Return the exact gradient of the expected reward, ``float64[rows * ways]``."""
        table = logits.detach().double().requires_grad_()
        rewards = self.solved + self.steps if with_steps else self.solved
        expected = (self.probabilities(table) * torch.from_numpy(rewards)).sum()
        (found,) = torch.autograd.grad(expected, table)
        return found.flatten()


def enumerated() -> Enumerated:
    """Enumerate the sessions of :data:`TREE`."""
    found = [one for place in range(TREE.places) for one in _continued(place, 0, (), 0)]
    longest = max(len(path) for path, _, _ in found)
    rows = np.full((len(found), longest), -1)
    choices = np.zeros((len(found), longest), np.int64)
    for number, (path, _, _) in enumerate(found):
        rows[number, : len(path)] = [row for row, _ in path]
        choices[number, : len(path)] = [choice for _, choice in path]
    return Enumerated(
        rows,
        choices,
        np.full(len(found), 1 / TREE.places),
        np.asarray([float(solved) for _, solved, _ in found]),
        np.asarray([right / TREE.places for _, _, right in found]),
    )


Path_ = tuple[tuple[int, int], ...]


def _continued(place: int, step: int, path: Path_, right: int) -> Iterator[tuple[Path_, bool, int]]:
    """Yield the sessions that go on from a place: choices, whether solved, number of right ways."""
    if place == TREE.places or step == TREE.steps:
        yield path, place == TREE.places, right
        return
    for way in range(TREE.ways):
        chosen = (*path, (place, way))
        if way == RIGHT[place]:
            yield from _continued(place + 1, step + 1, chosen, right + 1)
        else:
            for word in range(TREE.ways):
                longer = (*chosen, (TREE.words, word))
                yield from _continued(place, step + 1, longer, right)


def record(store: Path, logits: Tensor, sessions: int, group_size: int, seed: int) -> None:
    """Write ``sessions`` sessions that are drawn with a table of logits to a new store."""
    rng = np.random.default_rng(seed)
    scores: NDArray[np.float64] = logits.detach().double().log_softmax(-1).numpy()
    migrate(str(store))
    written = [
        (f"tree{number:06}", f"group{number // group_size:06}", played)
        for number, played in enumerate(play(TREE, scores, RIGHT, sessions, rng))
    ]
    with Writer(str(store)) as writer:
        for start in range(0, sessions, TRANSACTION):
            part = written[start : start + TRANSACTION]
            calls = [one for name, _, played in part for one in _calls(name, played)]
            writer.add_sync(
                *(
                    SessionRecord(name, 0.0, group_id=group, outcome="completed")
                    for name, group, _ in part
                ),
                *calls,
            )
            kinds = [_kind(one) for one in calls if isinstance(one, CallBegun)]
            rewards = [one for name, _, played in part for one in _rewards(name, played)]
            writer.add_sync(*kinds, *rewards)


def _rewards(session: str, played: Played) -> Iterator[Reward]:
    """Yield the verifier's reward of a session, and a scorer's of each step that leads on."""
    solved = float(played.solved)
    yield Reward(session, "reward", solved, 0.0, source=RewardSource.VERIFIER)
    for number, step in enumerate(played.steps):
        if step.right:
            call, value = f"{session}.{number}", 1 / TREE.places
            yield Reward(session, "step", value, 0.0, source=RewardSource.SCORER, call_id=call)


def _calls(session: str, played: Played) -> Iterator[Record]:
    """Yield the records of a session's calls, those that are refused and that fail included."""
    tree, prompt = TokenTree(session), np.empty(0, np.uint32)
    for number, step in enumerate(played.steps):
        prompt = np.append(prompt, np.uint32(step.seen))
        ids, logprobs = np.asarray(step.tokens, np.uint32), np.asarray(step.logprobs, np.float32)
        choice = Choice(ids, logprobs, (VersionRun(0, 0),), step.finish_reason)
        ended = CallEnded(
            id=f"{session}.{number}",
            session_id=session,
            status=CallStatus.COMPLETE,
            ended_at=number + 0.5,
            prompt_token_ids=prompt,
            choices=(choice,),
            growth=tree.grow(f"{session}.{number}", prompt, (choice,)),
            sampler=Sampler(),
            usage={"prompt_tokens": len(prompt), "completion_tokens": len(ids)},
            replies=(Message("assistant", step.text),),
        )
        yield from _call(number, step.seen, ended)
        prompt = np.concatenate([prompt, ids])
    for number, reason in enumerate(refusals(played), len(played.steps)):
        name, ended_at = f"{session}.{number}", number + 0.5
        yield from _call(
            number,
            0,
            CallEnded(
                id=name,
                session_id=session,
                status=CallStatus.FAILED,
                ended_at=ended_at,
                reason=reason,
            ),
        )


def _call(number: int, seen: int, ended: CallEnded) -> Iterator[Record]:
    """Yield a call in which the agent sees a place, with its end."""
    yield CallBegun(
        id=ended.id,
        session_id=ended.session_id,
        dialect="chat",
        started_at=float(number),
        request_body=b"{}",
        stream=False,
        model_requested="policy",
        parent_call_id=f"{ended.session_id}.{number - 1}" if number else None,
        conversation=Conversation((Message("user", f"place {seen}"),), length=2 * number + 1),
    )
    yield ended


def _kind(begun: CallBegun) -> Patch:
    """Return the decision on a call: it is the agent's, in the role whose turn it is."""
    role = ROLES[int(begun.started_at) % 2]
    decided = {"kind_set": CallKind.MAIN.value, "role_set": role, "kind_by": "tree"}
    return Patch("calls", begun.id, decided)


def recorded(store: Path) -> list[Episode]:
    """Return the sessions of a store as the trainer takes them."""
    with Reader(str(store)) as reader:
        return sorted(episodes(reader), key=lambda one: one.session.id)
