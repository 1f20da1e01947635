"""Click logs -> the common form that rankers train on: histories and requests as Parquet.

prepare("synthetic", out="build/data/synthetic")
dataset = open_dataset("build/data/synthetic")
dataset.histories.item; dataset.requests("train").prefix; dataset.info
"""

import importlib
from typing import TYPE_CHECKING, Any

from click_data.errors import DataError

if TYPE_CHECKING:
    from click_data.lengths import history_lengths
    from click_data.opening import open_dataset
    from click_data.preparation import prepare
    from click_data.sources import SOURCES
    from click_data.store import ClickDataset, HistoryColumns, RequestColumns

__all__ = [
    "SOURCES",
    "ClickDataset",
    "DataError",
    "HistoryColumns",
    "RequestColumns",
    "history_lengths",
    "open_dataset",
    "prepare",
]

_ROOMS = {
    "SOURCES": "sources",
    "history_lengths": "lengths",
    "open_dataset": "opening",
    "prepare": "preparation",
    **dict.fromkeys(("ClickDataset", "HistoryColumns", "RequestColumns"), "store"),
}


def __getattr__(name: str) -> Any:
    """On first use: who only reads a data set needs no polars, who holds a folder no pyarrow."""
    if name in _ROOMS:
        return getattr(importlib.import_module(f"click_data.{_ROOMS[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
