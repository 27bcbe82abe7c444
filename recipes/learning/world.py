"""A task made by rule, small enough that a table of logits is the whole policy.

The policy sees a *place* and chooses one of some *ways*, of which one is right and differs from
place to place. A session has several such steps:

- In a corridor, places lie in a row before a goal. The right way leads on, and the others stay. The
  only reward is 1 for a session that reaches the goal, which ends it.
- In a quiz, each step shows a place that is drawn anew. The reward is the share of right ways.

A :class:`World` also states what makes a task hard for an algorithm: prompts that keep the history,
an agent that writes on after a wrong way, a summary from which the session goes on, rewards of
steps, two roles with rewards of their own, a policy that is older than the one in training, and an
engine whose distribution differs from the trainer's.

Places recur within a session and among the sessions of a group, so that a step can be compared with
others at its place. A token is its own id: places first, then the choices of a row of the table.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from bridle.reconstruct.samples.sample import Conservation, Episode, Sample, Turn
from bridle.store.records import CallKind, CallStatus, SessionRecord
from bridle.store.reward import Reward, RewardSource
from bridle.trainer.batch.packing import Pack
from bridle.trainer.credit.distillation import gap_of
from bridle.trainer.policy.model import TokenScores

ROLES: Final = ("planner", "worker")


@dataclass(frozen=True, slots=True)
class World:
    """A task, and the conditions under which its sessions are played and trained."""

    name: str
    about: str
    places: int = 4
    """Number of places."""
    ways: int = 4
    steps: int = 6
    """The largest number of steps in a session."""
    quiz: bool = False
    history: bool = False
    """True if prompts keep the history, so that a session is one branch."""
    wordy: int = 0
    """Number of tokens that the policy writes after a wrong way; they change nothing."""
    summary_at: int | None = None
    """The step before which the agent writes a summary of one choice. After a wrong one the session
    starts over. The summary begins a new branch and is a call of the kind ``compaction``."""
    step_rewards: bool = False
    """True if a step that leads on has a reward of its own, besides the session's."""
    roles: bool = False
    """True if a planner and a worker take the steps in turn, with a reward for each role alone: the
    share of its right ways."""
    lag: int = 0
    """Number of versions by which the sampling policy is older than the trained one."""
    noise: float = 0.0
    """Standard deviation of what the engine adds to the logits that it samples from."""
    failing: float = 0.0
    """Share of the sessions in which the engine fails a call."""
    minibatches: int = 1
    epochs: int = 1
    hint: float = 0.0
    """The probability with which the policy of the beginning takes the right way if it reads a
    hint. It then teaches the methods that have a teacher; with 0 there are no hints."""
    groups: int = 2
    group_size: int = 8
    rate: float = 0.1
    rates: tuple[float, ...] = ()
    """Rates of which each method learns at its own best one, in place of ``rate``; none if all
    methods learn at ``rate``."""
    most: int = 150
    """Number of steps of training after which a run counts as not having reached the goal."""

    @property
    def rows(self) -> int:
        """Number of rows of the policy's table: places, the summary, words after a wrong way."""
        return self.places + 2

    @property
    def summary(self) -> int:
        """The row, and the token, of the question for a summary."""
        return self.places

    @property
    def words(self) -> int:
        """The row that draws a word; what it sees is a choice of another row."""
        return self.places + 1


@dataclass(slots=True)
class Step:
    """One reply of a session: what it saw, and the tokens that it sampled."""

    seen: int
    tokens: list[int]
    logprobs: list[float]
    kind: CallKind
    role: str | None
    right: bool
    word: int | None = None
    """The last word after a wrong way. With 0 the reply ends at the token limit, with 1 it has no
    text."""

    @property
    def finish_reason(self) -> str:
        return "length" if self.word == 0 else "stop"

    @property
    def text(self) -> str:
        return "" if self.word == 1 else f"way {self.tokens[0]}"


@dataclass(slots=True)
class Played:
    """One session as it was played."""

    steps: list[Step]
    solved: bool
    """True if it reached the goal of a corridor."""
    failed: bool = False
    """True if the engine failed a call."""

    def right(self, role: str | None = None) -> float:
        """Return the share of right ways among the steps of a role, or of all roles."""
        own = [one.right for one in self.steps if role is None or one.role == role]
        return sum(own) / max(len(own), 1)


class TablePolicy(nn.Module):
    """A policy with one row of logits for each place, for the summary, and for words."""

    def __init__(self, world: World, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.rows = world.rows
        self.logits = nn.Parameter(torch.zeros(world.rows, world.ways, dtype=dtype))

    def forward(self, pack: Pack) -> TokenScores:
        seen = torch.from_numpy(pack.token_ids[pack.sources])
        choices = torch.from_numpy(pack.targets) - self.rows
        scores = self.logits[seen.clamp(max=self.rows - 1)].log_softmax(-1)
        entropies = torch.special.entr(scores.exp()).sum(-1)
        return TokenScores(scores.gather(1, choices[:, None]).squeeze(1), entropies)


def engine_scores(world: World, logits: Tensor, rng: np.random.Generator) -> NDArray[np.float64]:
    """Return the log probabilities that the engine samples from, ``float64[rows, ways]``."""
    drawn = logits.detach().double()
    if world.noise:
        drawn = drawn + torch.from_numpy(rng.normal(0.0, world.noise, tuple(logits.shape)))
    scores: NDArray[np.float64] = drawn.log_softmax(-1).numpy()
    return scores


def hinted_gaps(
    world: World, right: NDArray[np.int64], samples: Sequence[Sample]
) -> list[NDArray[np.float32]]:
    """Return the differences of a teacher that reads a hint from what was sampled.

    They are those of :meth:`bridle.trainer.credit.distillation.Teacher.gaps`. The teacher's other
    ways, and its words, are as likely as each other, as those of the policy of the beginning are.
    """
    scores = np.full((world.rows, world.ways), (1 - world.hint) / (world.ways - 1))
    scores[np.arange(world.rows), right] = world.hint
    scores[world.words] = 1 / world.ways

    def score(ids: NDArray[np.uint32]) -> NDArray[np.float32]:
        seen = np.minimum(ids[:-1], world.rows - 1).astype(np.int64)
        chosen = np.maximum(ids[1:].astype(np.int64) - world.rows, 0)
        found: NDArray[np.float32] = np.log(scores[seen, chosen]).astype(np.float32)
        return found

    return [gap_of(sample, score) for sample in samples]


def play(
    world: World,
    scores: NDArray[np.float64],
    right: NDArray[np.int64],
    sessions: int,
    rng: np.random.Generator,
) -> list[Played]:
    """Play ``sessions`` sessions side by side.

    ``scores`` are those of :func:`engine_scores`, and ``right`` is the right choice of each row.
    """
    played = [Played([], False) for _ in range(sessions)]
    at = rng.integers(0, world.places, sessions)
    for number in range(world.steps):
        if number == world.summary_at:
            at = _summarize(world, scores, right, at, played, rng)
        walking = np.flatnonzero(at < world.places)
        seen = at[walking]
        chosen = _draw(scores, seen, rng)
        words = _draw(scores, np.full(len(seen) * world.wordy, world.words), rng)
        for place, (member, row, way) in enumerate(
            zip(walking.tolist(), seen.tolist(), chosen.tolist(), strict=True)
        ):
            is_right = way == right[row]
            rest = [] if is_right else words[place * world.wordy :][: world.wordy].tolist()
            role = ROLES[number % 2] if world.roles else None
            step = _step(world, scores, row, [way, *rest], CallKind.MAIN, role, bool(is_right))
            played[member].steps.append(step)
        if world.quiz:
            at = rng.integers(0, world.places, sessions)
        else:
            at[walking] += chosen == right[seen]
    failed = rng.random(sessions) < world.failing
    for one, place, fails in zip(played, at.tolist(), failed.tolist(), strict=True):
        one.solved = not world.quiz and place == world.places
        one.failed = fails
    return played


def _summarize(
    world: World,
    scores: NDArray[np.float64],
    right: NDArray[np.int64],
    at: NDArray[np.int64],
    played: Sequence[Played],
    rng: np.random.Generator,
) -> NDArray[np.int64]:
    """Write the summary of each session that goes on; return the places from which they do."""
    chosen = _draw(scores, np.full(len(at), world.summary), rng)
    going = at < world.places
    for member in np.flatnonzero(going).tolist():
        way = int(chosen[member])
        is_right = way == int(right[world.summary])
        kind = CallKind.COMPACTION
        step = _step(world, scores, world.summary, [way], kind, None, is_right)
        played[member].steps.append(step)
    return np.where(going & (chosen != right[world.summary]), 0, at)


def _draw(
    scores: NDArray[np.float64], rows: NDArray[np.int64], rng: np.random.Generator
) -> NDArray[np.int64]:
    """Draw one choice of each row: the largest of log probability and Gumbel noise."""
    chosen: NDArray[np.int64] = (
        scores[rows] + rng.gumbel(size=(len(rows), scores.shape[1]))
    ).argmax(1)
    return chosen


def _step(
    world: World,
    scores: NDArray[np.float64],
    row: int,
    choices: list[int],
    kind: CallKind,
    role: str | None,
    right: bool,
) -> Step:
    logprobs = [float(scores[row, choices[0]])]
    logprobs += [float(scores[world.words, word]) for word in choices[1:]]
    word = choices[-1] if len(choices) > 1 else None
    return Step(row, [world.rows + one for one in choices], logprobs, kind, role, right, word)


def rewards_of(world: World, session: str, played: Played) -> tuple[Reward, ...]:
    """Return the rewards of one session, at their places."""

    def reward(name: str, value: float, **at: Any) -> Reward:
        return Reward(session, name, value, 0.0, source=RewardSource.VERIFIER, **at)

    if world.roles:
        return tuple(reward(role, played.right(role)) for role in ROLES)
    given = [reward("reward", played.right() if world.quiz else float(played.solved))]
    if world.step_rewards:
        given += [
            reward("step", 1 / world.places, call_id=f"{session}/{number}")
            for number, step in enumerate(played.steps)
            if step.right and step.kind is CallKind.MAIN
        ]
    return tuple(given)


def episode(
    world: World,
    session: str,
    group: str,
    played: Played,
    version: int,
    kinds: Sequence[str] = ("main",),
) -> Episode:
    """Return a session as the trainer takes it; calls of ``kinds`` are trained."""
    branches: list[list[int]] = []
    for number in range(len(played.steps)):
        after_summary = number > 0 and played.steps[number - 1].kind is CallKind.COMPACTION
        if not branches or not world.history or after_summary:
            branches.append([])
        branches[-1].append(number)
    sampled = sum(len(step.tokens) for step in played.steps)
    trained = sum(len(step.tokens) for step in played.steps if step.kind.value in kinds)
    samples = tuple(_sample(session, played, one, version, kinds, trained) for one in branches)
    masked = {"kind": sampled - trained} if sampled > trained else {}
    return Episode(
        SessionRecord(session, 0.0, group_id=group, outcome="completed"),
        samples,
        rewards_of(world, session, played),
        Conservation(captured=sampled, trained=trained, masked=masked),
        tuple(_turns(session, played, world.quiz)),
    )


def refusals(played: Played, quiz: bool = False) -> list[str]:
    """Return the reasons of a session's failed calls: its budget's, and the engine's.

    A session that does not reach the goal ends with a call that its budget refuses; in a quiz none
    is refused.
    """
    return [*["budget"] * (not quiz and not played.solved), *["engine_error"] * played.failed]


def _turns(session: str, played: Played, quiz: bool) -> Iterator[Turn]:
    for number, step in enumerate(played.steps):
        yield Turn(
            f"{session}/{number}",
            step.kind,
            CallStatus.COMPLETE,
            finish_reason=step.finish_reason,
            has_text=bool(step.text),
            role=step.role,
        )
    for number, reason in enumerate(refusals(played, quiz), len(played.steps)):
        yield Turn(f"{session}/{number}", CallKind.MAIN, CallStatus.FAILED, reason=reason)


def _sample(
    session: str,
    played: Played,
    numbers: Sequence[int],
    version: int,
    kinds: Sequence[str],
    trained: int,
) -> Sample:
    """Return the branch of some replies of a session."""
    ids, calls, logprobs, mask = [], [], [], []
    for place, number in enumerate(numbers):
        step = played.steps[number]
        own = len(step.tokens)
        ids += [step.seen, *step.tokens]
        calls += [-1, *[place] * own]
        logprobs += [0.0, *step.logprobs]
        mask += [False, *[step.kind.value in kinds] * own]
    at = np.asarray(calls, np.int32)
    return Sample(
        session_id=session,
        leaf_call_id=f"{session}/{numbers[-1]}",
        kind=played.steps[numbers[-1]].kind,
        role=played.steps[numbers[-1]].role,
        token_ids=np.asarray(ids, np.uint32),
        mask=np.asarray(mask),
        logprobs=np.asarray(logprobs, np.float32),
        versions=np.where(at >= 0, version, -1),
        calls=at,
        call_ids=tuple(f"{session}/{number}" for number in numbers),
        weight=sum(mask) / max(trained, 1),
        roles=tuple(played.steps[number].role for number in numbers),
    )
