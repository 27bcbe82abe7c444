"""The routers of a model with experts: the choices that they make, and choices that they are given.

Transformers' routers differ in how they score experts (softmax or sigmoid, groups, scaling), and
agree in the end: they take the ``top_k`` highest of a row of scores, one for each expert, and
return logits, weights and numbers of the chosen experts. Choices are read from that result. To
replay choices, the selection of the highest scores inside the router is replaced by the recorded
numbers: the weights are those that the router computes for them, with its gradient.

Experts are ``[positions, layers, top_k]``, with all layers of the model, as in vLLM. A layer
without experts has zeros there.

Rollout Routing Replay: Ma et al. 2025, arXiv 2510.11370.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from bridle.errors import BridleError

_ROUTER: Final = re.compile(r"top_?k_?router$", re.IGNORECASE)
_LAYER: Final = re.compile(r"(?:^|\.)layers\.(\d+)\.")
_PROBED: Final = 4
"""Number of hidden states for which a router is tried."""

UNKNOWN: Final = -1
"""The number in place of experts that are not recorded: the router chooses them itself."""


class Unreplayable(BridleError):
    """The model's routers cannot be given the experts that they choose."""


@dataclass(frozen=True, slots=True)
class Routers:
    """The routers of a model, by the index of their layer."""

    by_layer: Mapping[int, nn.Module]
    layers: int
    """Number of the model's layers, those without experts included."""
    top_k: int
    experts: int
    """Number of experts of a layer."""

    @classmethod
    def of(cls, model: nn.Module) -> Routers | None:
        """Return the routers of a causal LM of Transformers, or ``None`` if it has none."""
        found: dict[int, Any] = {}
        for name, module in model.named_modules():
            layer = _LAYER.search(f"{name}.")
            if layer is not None and _ROUTER.search(type(module).__name__.removeprefix("FSDP")):
                found[int(layer[1])] = module
        sizes = {(module.top_k, module.num_experts) for module in found.values()}
        if len(sizes) != 1:
            return None
        ((top_k, experts),) = sizes
        transformers: Any = model
        layers = int(transformers.config.get_text_config().num_hidden_layers)
        return cls(found, layers, int(top_k), int(experts))

    def record(self) -> Callable[[], Tensor | None]:
        """Note the experts of every forward pass from now on.

        Return a function that returns those of the latest pass, once: ``int16[positions, layers,
        top_k]``, or ``None`` if there was none since.
        """
        chosen: dict[int, Tensor] = {}

        def note(layer: int) -> Callable[..., None]:
            def hook(_module: nn.Module, _inputs: Any, output: tuple[Tensor, ...]) -> None:
                chosen[layer] = output[2]

            return hook

        for layer, router in self.by_layer.items():
            router.register_forward_hook(note(layer))

        def latest() -> Tensor | None:
            if not chosen:
                return None
            like = next(iter(chosen.values()))
            shape = (like.numel() // self.top_k, self.layers, self.top_k)
            experts = torch.zeros(shape, dtype=torch.int16, device=like.device)
            for layer, numbers in chosen.items():
                experts[:, layer] = numbers.reshape(-1, self.top_k).to(torch.int16)
            chosen.clear()
            return experts

        return latest

    def replayed(self, layer: int, experts: Tensor) -> AbstractContextManager[None]:
        """Return a context in which the router of ``layer`` chooses ``experts``.

        They are ``int64[positions, top_k]``, with :data:`UNKNOWN` where it chooses itself.
        """
        return _replayed(self.by_layer[layer], experts, self.experts)

    def check(self) -> None:
        """Raise :class:`Unreplayable` unless every router follows choices that are not its own."""
        for router in self.by_layer.values():
            _check(router, self.experts)


class _Given(TorchFunctionMode):
    """A mode in which the highest scores of all experts are those of given numbers."""

    def __init__(self, numbers: Tensor, experts: int) -> None:
        super().__init__()
        self._numbers = numbers
        self._experts = experts

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func not in (torch.topk, torch.Tensor.topk):
            return result
        scores = args[0] if args else kwargs["input"]
        if scores.shape[-1] != self._experts or result[1].shape != self._numbers.shape:
            return result
        numbers = torch.where(self._numbers < 0, result[1], self._numbers)
        return torch.return_types.topk((scores.gather(-1, numbers), numbers))


@contextmanager
def _replayed(router: nn.Module, numbers: Tensor, experts: int) -> Iterator[None]:
    own = router.forward

    def forward(*inputs: Any, **options: Any) -> Any:
        with _Given(numbers, experts):
            return own(*inputs, **options)

    vars(router)["forward"] = forward
    try:
        yield
    finally:
        del vars(router)["forward"]


@torch.no_grad()
def _check(router: nn.Module, experts: int) -> None:
    weight = next(router.parameters())
    states = torch.randn(_PROBED, weight.shape[-1], generator=torch.Generator().manual_seed(0))
    states = states.to(weight)
    given = (router(states)[2] + 1) % experts
    with _replayed(router, given, experts):
        _, weights, numbers = router(states)
    if not torch.equal(numbers, given) or not bool((weights.isfinite() & (weights != 0)).all()):
        raise Unreplayable(f"{type(router).__name__} does not weigh experts that it did not choose")
