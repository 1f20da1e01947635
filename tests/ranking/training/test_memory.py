"""Of a long log a training holds nothing but the order of its requests."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from click_data import open_dataset, prepare
from jagged_ranking.training.config import TrainConfig

EVENTS = (100_000, 600_000)
# Passes over columns hold a piece of them, which is to be the same for both logs. A process that
# copies its columns takes some 100 bytes an event more; the order of an epoch takes 4 a request.
MOST = 8.0
CODE = """\
import json, sys
from jagged_ranking.data import columns
columns.PIECE = 2**14  # before others import it
from jagged_ranking.reproduce.streaming_worker import train_from_log
print(train_from_log(json.loads(sys.argv[1]))["anonymous_memory"])
"""


def anonymous_memory(folder: Path) -> int:
    """Bytes, at most, of a process that trains from a log."""
    options = TrainConfig(model="mean_pool", dim=8, heads=1, batch_size=64, max_history=20)
    asked: dict[str, Any] = {"data": str(folder), "options": options.to_dict(), "steps": 5}
    asked |= {"device": "cpu", "cpu_threads": 1}
    command = [sys.executable, "-c", CODE, json.dumps(asked)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return int(done.stdout.split()[-1])


def test_memory_does_not_grow_with_the_log(tmp_path: Path) -> None:
    memory = []
    for events in EVENTS:
        sizes: dict[str, Any] = {"users": events // 100, "items": 500, "categories": 20}
        folder = prepare("synthetic", out=tmp_path / str(events), events=events, **sizes)
        _ = open_dataset(folder).requests("train")  # lays columns flat, by pages of Parquet
        memory.append(anonymous_memory(folder))
    assert (memory[1] - memory[0]) / (EVENTS[1] - EVENTS[0]) < MOST


@pytest.mark.parametrize("split", ["train", "valid"])
def test_columns_of_a_training_on_a_cpu_are_those_of_the_files(tmp_path: Path, split: str) -> None:
    """No copy, of a column of any kind."""
    from jagged_ranking.data.batch import RequestTable
    from jagged_ranking.data.columns import Columns
    from jagged_ranking.data.store import HistoryStore

    sizes: dict[str, Any] = {"users": 9, "items": 9, "categories": 3, "events": 90}
    dataset = open_dataset(prepare("synthetic", out=tmp_path / "log", **sizes))
    columns, store = dataset.requests(split), HistoryStore.from_dataset(dataset)
    table = RequestTable.from_columns(columns, store.place)
    assert isinstance(table.features, Columns)
    assert isinstance(store.signals, Columns)
    pairs = [
        (table.user, columns.user),
        (table.time, columns.time),
        (table.offsets, columns.offsets),
        *zip(table.features.each, columns.features.values(), strict=True),
        (store.item, dataset.histories.item),
        *zip(store.signals.each, dataset.histories.signals.values(), strict=True),
    ]
    for ours, theirs in pairs:
        assert ours.data_ptr() == theirs.__array_interface__["data"][0]
    assert table.host_prefix.base is not None
