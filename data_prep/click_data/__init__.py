"""Click logs -> the common form that rankers train on: histories and samples as Parquet.

prepare("synthetic", out="build/data/synthetic")
dataset = open_dataset("build/data/synthetic")
dataset.histories.item; dataset.samples("train").prefix; dataset.info
"""

from click_data.errors import DataError
from click_data.prepare import prepare
from click_data.sources import SOURCES
from click_data.store import ClickDataset, HistoryColumns, SampleColumns, open_dataset

__all__ = [
    "SOURCES",
    "ClickDataset",
    "DataError",
    "HistoryColumns",
    "SampleColumns",
    "open_dataset",
    "prepare",
]
