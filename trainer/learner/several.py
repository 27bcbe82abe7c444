"""Several optimizers that train one model as one, each on parameters of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch.optim import Optimizer


class Several(Optimizer):
    """Optimizers that step together; no parameter may belong to two of them.

    Its groups are theirs, so that a learning rate that is set in them is set in the optimizers. Its
    state is numbered as if it were one optimizer with these groups.
    """

    def __init__(self, *parts: Optimizer) -> None:
        """Join ``parts``. Raise ``ValueError`` for a parameter that belongs to two of them."""
        self.parts = parts
        self.defaults: dict[str, Any] = {}
        owned = [id(each) for group in self.param_groups for each in group["params"]]
        if len(set(owned)) < len(owned):
            raise ValueError("a parameter belongs to two optimizers: give it to one")

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return [group for part in self.parts for group in part.param_groups]

    @property
    def state(self) -> dict[Any, Any]:  # type: ignore[override]
        return {key: value for part in self.parts for key, value in part.state.items()}

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Step each optimizer. Raise ``ValueError`` for a closure, which is not supported."""
        if closure is not None:
            raise ValueError("several optimizers take no closure")
        for part in self.parts:
            part.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        for part in self.parts:
            part.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        groups: list[dict[str, Any]] = []
        state: dict[int, Any] = {}
        for first, part in self._numbered():
            own = part.state_dict()
            state |= {first + index: values for index, values in own["state"].items()}
            groups += [
                {**group, "params": [first + index for index in group["params"]]}
                for group in own["param_groups"]
            ]
        return {"state": state, "param_groups": groups}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what :meth:`state_dict` returned.

        Raise ``ValueError`` for the state of other groups.
        """
        groups = list(state_dict["param_groups"])
        if len(groups) != len(self.param_groups):
            raise ValueError(f"it has {len(groups)} groups, and {len(self.param_groups)} are here")
        for first, part in self._numbered():
            own = [groups.pop(0) for _ in part.param_groups]
            wanted = {index for group in own for index in group["params"]}
            part.load_state_dict(
                {
                    "state": {
                        index - first: values
                        for index, values in state_dict["state"].items()
                        if index in wanted
                    },
                    "param_groups": [
                        {**group, "params": [index - first for index in group["params"]]}
                        for group in own
                    ],
                }
            )

    def _numbered(self) -> Iterator[tuple[int, Optimizer]]:
        """Yield each part with the number of the parameters before its own."""
        first = 0
        for part in self.parts:
            yield first, part
            first += sum(len(group["params"]) for group in part.param_groups)
