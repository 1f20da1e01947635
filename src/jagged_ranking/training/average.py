"""The moving average of a model's weights, which is what is validated and kept."""

from __future__ import annotations

import copy
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

M = TypeVar("M", bound=nn.Module)


class Average(Generic[M]):
    """Exponential moving average, over few steps at first and more as they come.

    On little data single steps still move the metrics by more than models differ. What is not
    trained by gradients of its own (tables that are updated row by row), and with `decay` 0
    everything, is shared with the model and not copied.
    """

    def __init__(self, model: M, *, decay: float) -> None:
        own = [p for p in model.parameters() if decay and p.requires_grad]
        averaged = {id(p) for p in own}
        shared = {id(p): p for p in model.parameters() if id(p) not in averaged}
        self.decay = decay
        self.model = copy.deepcopy(model, shared)
        self._latest: list[Tensor] = [p.detach() for p in own]
        copies = zip(model.parameters(), self.model.parameters(), strict=True)
        self._kept: list[Tensor] = [kept.detach() for p, kept in copies if id(p) in averaged]

    def update(self, updates: int) -> None:
        """Takes in the weights behind a step that `updates` steps came before."""
        if self._kept:
            share = 1 - min(self.decay, (1 + updates) / (10 + updates)) if updates else 1.0
            lerp_all: Any = torch._foreach_lerp_  # pyright: ignore[reportPrivateImportUsage]
            lerp_all(self._kept, self._latest, share)

    def state_dict(self) -> dict[str, Tensor]:
        """The averaged weights alone."""
        kept = {tensor.data_ptr() for tensor in self._kept}
        return {n: p for n, p in self.model.state_dict().items() if p.data_ptr() in kept}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """The inverse of `state_dict`."""
        mine = self.state_dict()
        if mine.keys() != state.keys():
            raise KeyError("the average is of other weights")
        for name, tensor in mine.items():
            tensor.copy_(state[name])
