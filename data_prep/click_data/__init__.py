"""Click logs -> the common form that rankers train on: histories and samples as Parquet.

prepare("synthetic", out="build/data/synthetic")
dataset = open_dataset("build/data/synthetic")
dataset.histories.item; dataset.samples("train").prefix; dataset.info
"""

from typing import TYPE_CHECKING, Any

from click_data.errors import DataError
from click_data.lengths import history_lengths
from click_data.store import ClickDataset, HistoryColumns, SampleColumns, open_dataset

if TYPE_CHECKING:
    from click_data.preparation import prepare
    from click_data.sources import SOURCES

__all__ = [
    "SOURCES",
    "ClickDataset",
    "DataError",
    "HistoryColumns",
    "SampleColumns",
    "history_lengths",
    "open_dataset",
    "prepare",
]


def __getattr__(name: str) -> Any:
    """`prepare` and `SOURCES` on first use: who only reads a dataset needs no polars."""
    if name == "prepare":
        from click_data.preparation import prepare

        return prepare
    if name == "SOURCES":
        from click_data.sources import SOURCES

        return SOURCES
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
