"""A table of ids that can be trained without a gradient as large as itself.

`nn.Embedding` gives its weight a dense gradient [V, D], which the optimiser then walks through: a
step costs as much as the vocabulary is large. Where a table is trained `by_row`, each lookup is a
leaf of its own, [N, D]; what came back to the leaves is summed by id (sorted ids, then sums of
segments, so that a rerun gives the same bits), and only those rows are updated.

Where the rows are shared out among several processes, a table has none itself: lookups go to what
holds those that the batch asked for (`training/torchrec_tables.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from jagged_kernels import JaggedTensor, jagged_sum


@dataclass(frozen=True)
class RowGradient:
    """The gradient of the rows of a table that were looked up, M at most.

    rows: int64 [M], distinct at first and from then on the same ones again, in turns: how many
    there are is known to the device alone. sums: float [M, D], their gradients, 0 where a row is
    repeated. place: int64 [M], where in `sums` the gradient of each of `rows` is.
    """

    rows: Tensor
    sums: Tensor
    place: Tensor


class IdTable(nn.Embedding):
    """Rows [V, D] of ids: an `nn.Embedding` until it is trained `by_row`, or its rows are
    `elsewhere`.

    saved_apart: whether its rows are left out of state dicts, since they have files of their own.
    """

    def __init__(self, rows: int, dim: int, *, device: torch.device | str | None = None) -> None:
        super().__init__(rows, dim, device=device)
        self.by_row = self.saved_apart = False
        self.elsewhere: Callable[[Tensor], Tensor] | None = None
        self._lookups: list[tuple[Tensor, Tensor]] = []  # ids [N], what was looked up [N, D]

    def train_by_row(self) -> None:
        """From here on the weight has no gradient; `take_gradient` says what its rows got."""
        self.by_row = True
        self.weight.requires_grad_(False)

    def move_rows(self, elsewhere: Callable[[Tensor], Tensor]) -> None:
        """From here on the rows are those that `elsewhere` has, int [N] -> [N, D], and the weight
        has none."""
        self.weight = nn.Parameter(self.weight.detach().new_empty(0, self.embedding_dim), False)
        self.elsewhere = elsewhere

    @property
    def collects(self) -> bool:
        """Whether a lookup now is one to learn from."""
        return self.by_row and self.training and torch.is_grad_enabled()

    @property
    def by_lookup(self) -> bool:
        """Whether rows come from `forward` alone now, not from the weight."""
        return self.collects or self.elsewhere is not None

    def forward(self, input: Tensor) -> Tensor:
        """int [N] -> [N, D]."""
        if self.elsewhere is not None:
            return self.elsewhere(input)
        look_up: Any = self._collect if self.collects else super().forward
        return look_up(input)

    @torch.compiler.disable
    def _collect(self, ids: Tensor) -> Tensor:
        found = super().forward(ids).detach().requires_grad_()
        self._lookups.append((ids, found))
        return found

    def _save_to_state_dict(self, *args: Any, **kwargs: Any) -> None:
        if not self.saved_apart:
            super()._save_to_state_dict(*args, **kwargs)

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        if not self.saved_apart:
            super()._load_from_state_dict(*args, **kwargs)

    def take_gradient(self) -> RowGradient | None:
        """Sums by row what came back to all lookups since the last call, and forgets them; None
        where nothing did. Does not wait for the device."""
        used = [(ids, found.grad) for ids, found in self._lookups if found.grad is not None]
        self._lookups.clear()
        gradients = [gradient for _, gradient in used if gradient is not None]
        ids = torch.cat([ids.long() for ids, _ in used]) if used else self.weight.new_empty(0)
        if len(ids) == 0:
            return None
        return sum_by_row(ids, torch.cat(gradients), rows=len(self.weight))


def sum_by_row(ids: Tensor, gradients: Tensor, *, rows: int) -> RowGradient:
    """ids int64 [N], at least one, and their gradients [N, D], of a table of so many rows. Does not
    wait for the device."""
    ids, order = ids.sort(stable=True)
    segment = (ids.diff(prepend=ids[:1]) != 0).cumsum(0)
    most = min(len(ids), rows)  # a bound that the host knows
    numbers = torch.arange(most + 1, device=ids.device)
    offsets = torch.searchsorted(segment, numbers)
    by_id = JaggedTensor(gradients[order], offsets, validate=False)
    # In turns, since PyTorch's deterministic writes to one row go one behind the other: what is
    # left of 200,000 places would all wait for the last row.
    place = numbers[:-1] % (segment[-1] + 1)
    return RowGradient(ids[offsets[place]], jagged_sum(by_id), place)
