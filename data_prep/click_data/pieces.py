"""Long columns a few million rows at a time: what is made on the way needs little memory."""

from collections.abc import Iterator
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

PIECE = 2**22  # rows that are worked on at once


def pieces(rows: int) -> Iterator[slice]:
    """All rows, `PIECE` at a time."""
    for start in range(0, rows, PIECE):
        yield slice(start, min(start + PIECE, rows))


def pieces_of(offsets: NDArray[np.int64]) -> Iterator[slice]:
    """All lists, so many at a time that they hold about `PIECE` values; offsets: int64 [N+1]."""
    marks = np.arange(offsets[0] + PIECE, offsets[-1], PIECE)
    cuts = [0, *np.unique(np.searchsorted(offsets, marks)).tolist(), len(offsets) - 1]
    for start, stop in pairwise(cuts):
        if start < stop:
            yield slice(start, stop)
