"""Long columns a few million rows at a time: what is made on the way needs little memory."""

from collections.abc import Iterator
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

PIECE = 2**22  # rows that are worked on at once


def pieces(rows: int, size: int = 0) -> Iterator[slice]:
    """All rows, `size` at a time, where that is none, `PIECE`."""
    size = size or PIECE
    for start in range(0, rows, size):
        yield slice(start, min(start + size, rows))


def pieces_of(offsets: NDArray[np.int64], size: int = 0) -> Iterator[slice]:
    """All lists, so many at a time that they hold about `size` values, where that is none, `PIECE`;
    offsets: int64 [N+1]."""
    size = size or PIECE
    marks = np.arange(offsets[0] + size, offsets[-1], size)
    cuts = [0, *np.unique(np.searchsorted(offsets, marks)).tolist(), len(offsets) - 1]
    for start, stop in pairwise(cuts):
        if start < stop:
            yield slice(start, stop)
