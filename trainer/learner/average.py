"""The exponential moving average of a policy, a teacher of the policy itself.

After each step that changed the policy's trained weights ``w``, the average ``a`` becomes
``decay * a + (1 - decay) * w``. It begins as the policy at the start of the run. It has the type of
the trained weights, float32; weights that are not trained are the policy's own tensors.

Sources: Mean Teacher, arXiv 1703.01780; as a teacher of agents, TT-OPD.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn

from bridle.reconstruct.samples.sample import Sample
from bridle.trainer.credit.distillation import gap_of
from bridle.trainer.policy.weights import ModelWeights


class Average(ModelWeights):
    """The average of a model's trained weights, as a model that computes."""

    def __init__(self, model: nn.Module, decay: float) -> None:
        named = [*model.named_parameters(), *model.named_buffers()]
        shared = {id(tensor): tensor for _, tensor in named if not tensor.requires_grad}
        super().__init__(copy.deepcopy(model, shared))
        own = dict(self.model.named_parameters())
        self._trained = {name: own[name] for name, tensor in named if tensor.requires_grad}
        for tensor in self._trained.values():
            tensor.requires_grad_(False)
            tensor.grad = None
        self._average = get_ema_multi_avg_fn(decay)  # type: ignore[no-untyped-call]

    def update(self, model: nn.Module) -> None:
        """Move the average towards the present weights of ``model``."""
        present = dict(model.named_parameters())
        self._average([*self._trained.values()], [present[name] for name in self._trained], 0)

    def gaps(self, samples: Sequence[Sample]) -> list[NDArray[np.float32]]:
        """Return what :meth:`bridle.trainer.credit.distillation.Teacher.gaps` does."""
        return [gap_of(one, lambda ids: self.scores([ids.astype(np.int64)])[0]) for one in samples]

    def state(self) -> dict[str, Tensor]:
        """Return the averaged weights by name."""
        return dict(self._trained)

    @torch.no_grad()
    def load(self, state: Mapping[str, Tensor]) -> None:
        """Put averaged weights in place. Raise :class:`ValueError` if they are of other tensors."""
        if state.keys() != self._trained.keys():
            raise ValueError(
                "it has no average of this policy's weights: set distillation.teacher as it was, "
                "or begin a new run"
            )
        for name, tensor in self._trained.items():
            tensor.copy_(state[name])
