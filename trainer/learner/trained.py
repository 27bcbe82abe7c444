"""A policy of a run: its learner, and the destinations of its checkpoints and its weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from bridle.engine.contract.tokenizer import Tokenizer
from bridle.reconstruct.samples.sample import Episode
from bridle.store.records import DEFAULT_POLICY, PolicyRecord
from bridle.trainer.batch.own_tokens import of_policy
from bridle.trainer.batch.prepare import PreparedStep, prepare
from bridle.trainer.config import GrpoConfig
from bridle.trainer.credit.distillation import AskTeacher
from bridle.trainer.credit.privileged import Inform, plain
from bridle.trainer.learner.checkpoint import Progress
from bridle.trainer.learner.learner import AnyLearner
from bridle.trainer.learner.probe import Probe, Probing
from bridle.trainer.policy.weights import Policy


class Publish(Protocol):
    def __call__(self, policy: Policy, version: int) -> PolicyRecord | None:
        """Make the engine serve ``policy`` as ``version``; raise if it does not.

        :meth:`bridle.trainer.publish.publisher.Publisher.publish` is one.
        """


@dataclass(eq=False, slots=True)
class TrainedPolicy:
    """One of the policies that a run trains, each on the tokens that it sampled itself."""

    learner: AnyLearner
    directory: Path
    """Directory of its checkpoints."""
    publish: Publish | None = None
    tokenizer_from: Path | None = None
    """Model directory whose tokenizer is copied to checkpoints."""
    name: str = DEFAULT_POLICY
    memory: dict[str, float] = field(default_factory=dict)
    """State that estimators keep over the steps."""
    inform: Inform = plain
    """The insertion of a context into the prompts of a teacher."""
    kept_memory: Mapping[str, float] = field(default_factory=dict)
    """The value of ``memory`` as of the last completed step."""
    probing: Probing = field(default_factory=Probing)
    """The policy's divergence from itself before."""
    _tokenizer: Tokenizer | None = None

    def configured(self, config: GrpoConfig) -> GrpoConfig:
        """Return ``config`` with the packing that is exact for its model."""
        return replace(config, packing=self.learner.packing)

    def prepared(
        self,
        episodes: Sequence[Episode],
        version: int,
        config: GrpoConfig,
        teacher: AskTeacher | None,
        earlier: Sequence[Episode] = (),
    ) -> PreparedStep:
        """Prepare the policy's part of a step's sessions.

        See :func:`bridle.trainer.batch.prepare.prepare`. A policy with an average is its own
        teacher.
        """
        own, before = (
            [of_policy(episode, self.name) for episode in part] for part in (episodes, earlier)
        )
        if (average := self.learner.average) is not None:
            teacher = average.gaps
        return prepare(
            own, version, config, self.memory, teacher, self.inform, before, self.likelihoods
        )

    def likelihoods(self, asked: Sequence[tuple[bytes, str]]) -> list[NDArray[np.float32]]:
        """Score texts after prompts under the present weights.

        See :data:`bridle.trainer.credit.Likelihoods`. Raise
        :class:`bridle.engine.contract.tokenizer.TokenizerNotRead` if the policy has no tokenizer.
        """
        if self._tokenizer is None:
            self._tokenizer = Tokenizer(self.tokenizer_from or self.directory)
        prompts = [np.frombuffer(prompt, np.uint32).astype(np.int64) for prompt, _ in asked]
        texts = [np.asarray(self._tokenizer.encode(text), np.int64) for _, text in asked]
        pairs = [np.concatenate(pair) for pair in zip(prompts, texts, strict=True)]
        scores = self.learner.scores(pairs)
        return [one[len(one) - len(text) :] for one, text in zip(scores, texts, strict=True)]

    def load_checkpoint(self, name: str) -> Progress:
        """Load the checkpoint ``name``.

        Raises :class:`bridle.trainer.learner.checkpoint.CheckpointError`.
        """
        progress = self.learner.load_checkpoint(self.directory / name)
        self.kept_memory, self.memory = progress.memory, dict(progress.memory)
        self.probing.start = Probe.of_data(progress.probe)
        return progress

    def save_checkpoint(self, progress: Progress, keep: int) -> None:
        """Save a checkpoint with the policy's own memory as of the last completed step."""
        self.learner.save_checkpoint(
            self.directory,
            replace(progress, memory=self.kept_memory, probe=self.probing.start.as_data()),
            tokenizer_from=self.tokenizer_from,
            keep=keep,
        )
