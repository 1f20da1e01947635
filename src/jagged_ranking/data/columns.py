"""Columns of a data set as tensors: where they lie in files, mapped, not copied.

What is mapped belongs to the files: a training reads the rows of its batches, and the system drops
what it needs the memory for. On a GPU a column is a copy.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

# Rows that a pass over a long column works on at once: what it makes of them is memory.
PIECE = 2**19


@dataclass(frozen=True)
class Columns:
    """Columns [N] side by side, of which rows are asked for: `columns[rows]`, [R, len(columns)] of
    a dtype, whatever the columns' own is. `rows`: int64 [R] on the CPU."""

    each: tuple[Tensor, ...]
    dtype: torch.dtype

    def __getitem__(self, rows: Any) -> Tensor:
        found = torch.empty(len(rows), len(self.each), dtype=self.dtype)
        for position, one in enumerate(self.each):
            found[:, position] = one[rows]
        return found


Table = Tensor | Columns


def column(array: Any, dtype: torch.dtype, place: torch.device | str) -> Tensor:
    """A column: on the CPU, where it has the dtype, the array's own memory, never to be written."""
    with warnings.catch_warnings():  # what is mapped to be read cannot be written
        warnings.filterwarnings("ignore", "The given NumPy array is not writable")
        return torch.from_numpy(np.asarray(array)).to(place, dtype)


def table(columns: Mapping[str, Any], rows: int, dtype: torch.dtype, place: torch.device) -> Table:
    """Columns of `rows` numbers side by side, in their order: on a GPU a tensor of all of them."""
    if place.type == "cpu":
        return Columns(tuple(column(one, _own(one), "cpu") for one in columns.values()), dtype)
    return stacked(columns, rows, dtype).to(place)


def stacked(columns: Mapping[str, Any], rows: int, dtype: torch.dtype) -> Tensor:
    """The same as one tensor, [rows, len(columns)]."""
    found = torch.zeros(rows, len(columns), dtype=dtype)
    for position, one in enumerate(columns.values()):
        found[:, position] = column(one, _own(one), "cpu")
    return found


def _own(array: Any) -> torch.dtype:
    return torch.from_numpy(np.empty(0, np.asarray(array).dtype)).dtype
