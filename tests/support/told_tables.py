"""A table that a measurement tells as it grows: of a run that is cut off, what there is stays."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pandas as pd

from jagged_ranking import results


class ToldTable:
    """Prints each part when it is added, and writes all parts so far.

    Args:
        out: a .csv; None: nothing is written.
    """

    def __init__(self, out: Path | None) -> None:
        self.out = out
        self._parts: list[pd.DataFrame] = []

    def add(self, rows: Iterable[dict[str, Any]]) -> None:
        self._parts.append(pd.DataFrame(rows))
        print(self._parts[-1].to_string(index=False, float_format="{:.4g}".format), flush=True)
        if self.out:
            with results.atomic(self.out) as path:
                self.whole().to_csv(path, index=False)

    def whole(self) -> pd.DataFrame:
        return pd.concat(self._parts, ignore_index=True)
