"""What retrieval is asked for."""

from __future__ import annotations

from typing import NamedTuple

from jagged_kernels.schedule.row_layout import NO_LIMIT


class Asked(NamedTuple):
    """Fields:
    best: blocks that each entry takes by score, at most.
    newest: blocks that it takes besides.
    most: blocks from a user's first on that can be scored.
    causal: whether a tile sees nothing behind its last query.
    """

    best: int
    newest: int
    most: int
    causal: bool

    @property
    def width(self) -> int:
        """Blocks of an entry, at most."""
        return self.best + self.newest

    @property
    def window(self) -> tuple[int, int]:
        """The band of the calls that the lists are for."""
        return NO_LIMIT, 0 if self.causal else NO_LIMIT
