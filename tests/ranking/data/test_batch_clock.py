"""What waiting for batches is taken for."""

import time
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from click_data import ClickDataset
from jagged_ranking.data.batch import JaggedBatch, RequestTable, make_batch
from jagged_ranking.data.batch_clock import BatchClock
from jagged_ranking.data.store import HistoryStore


def test_making_is_waiting_and_the_step_is_not(
    toy: ClickDataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    store, table = HistoryStore.from_dataset(toy), RequestTable.from_columns(toy.requests("train"))

    def made() -> Iterator[JaggedBatch]:
        for number in range(5):
            now[0] += 0.003
            yield make_batch(store, table, np.arange(number + 1), max_history=4)

    clock, seen = BatchClock(torch.device("cpu")), 0
    for batch in clock(made()):
        seen += len(batch)
        now[0] += 0.007
    assert seen == 15
    wholes, waits, requests = clock.steps(1)
    assert wholes == pytest.approx([10.0] * 3)
    assert waits == pytest.approx([3.0] * 3)
    assert requests == [2, 3, 4]
