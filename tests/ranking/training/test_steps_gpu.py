"""What only a GPU can show of training."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterator
from itertools import islice
from typing import Any

import pytest
import torch

from click_data import ClickDataset
from jagged_ranking.data import loader as loader_module
from jagged_ranking.data import store as store_module
from jagged_ranking.data.batch import JaggedBatch
from jagged_ranking.data.batch_clock import BatchClock
from jagged_ranking.data.prefetch import AHEAD, beside_the_step, tensors_of
from jagged_ranking.data.store import HistoryStore
from jagged_ranking.training.config import TrainConfig
from jagged_ranking.training.trainer import _Run, train

pytestmark = pytest.mark.gpu

MODELS = ("mean_pool", "din", "target_attention", "transformer")
SMALL = TrainConfig(dim=32, max_history=20, batch_size=64, epochs=1)


@pytest.mark.parametrize("from_disk", [False, True])
@pytest.mark.parametrize("table_optimizer", ["adamw", "rowwise_adagrad"])
@pytest.mark.parametrize("model", MODELS)
def test_a_step_does_not_wait_for_the_device(
    toy: ClickDataset, model: str, table_optimizer: str, from_disk: bool
) -> None:
    config = dataclasses.replace(SMALL, model=model, table_optimizer=table_optimizer)
    run = _Run(config, toy, device=torch.device("cuda"), out=None, from_disk=from_disk)
    batches = run.loader.batches()
    run.model.train()
    for _ in range(2):  # the first steps compile, and make the optimiser's state
        run._step(batches)
    torch.cuda.set_sync_debug_mode("error")
    try:
        run._step(batches)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    run.read_numbers()
    assert len(run.progress.losses) == 3


def test_a_log_in_files_makes_the_same_batches_and_losses(toy: ClickDataset) -> None:
    runs = [
        _Run(SMALL, toy, device=torch.device("cuda"), out=None, from_disk=from_disk)
        for from_disk in (False, True)
    ]
    places = [run.loader.store.place.type for run in runs]
    assert places == ["cuda", "cpu"]
    pairs = zip(*(run.loader.batches() for run in runs), strict=True)
    for copied, brought in islice(pairs, 5):
        assert copied.longest == brought.longest
        for one, other in zip(tensors_of(copied), tensors_of(brought), strict=True):
            assert one.device == other.device
            assert torch.equal(one, other)
    losses = [
        train(SMALL, toy, progress=False, device="cuda", from_disk=from_disk).losses
        for from_disk in (False, True)
    ]
    assert losses[0] == losses[1]


def test_a_long_log_stays_in_its_files(toy: ClickDataset, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "ON_THE_GPU", toy.nbytes - 1)
    store = HistoryStore.from_dataset(toy, "cuda")
    assert (store.place.type, store.device.type) == ("cpu", "cuda")
    monkeypatch.setattr(store_module, "ON_THE_GPU", toy.nbytes)
    assert HistoryStore.from_dataset(toy, "cuda").place.type == "cuda"


def test_waiting_is_seen_by_the_device(toy: ClickDataset) -> None:
    device = torch.device("cuda")
    run = _Run(SMALL, toy, device=device, out=None)
    clock = BatchClock(device)
    batches = clock(run.loader.batches())
    for _ in range(6):
        run._step(batches)
    wholes, waits, requests = clock.steps(2)
    assert len(wholes) == len(waits) == 3
    assert requests == [SMALL.batch_size] * 3
    assert all(0 <= wait <= whole for wait, whole in zip(waits, wholes, strict=True))


@pytest.mark.parametrize("table_optimizer", ["adamw", "rowwise_adagrad"])
def test_a_seed_decides_everything(toy: ClickDataset, table_optimizer: str) -> None:
    config = dataclasses.replace(SMALL, table_optimizer=table_optimizer, accumulate=2)
    runs = [train(config, toy, progress=False, device="cuda") for _ in range(2)]
    assert runs[0].losses == runs[1].losses
    for name, value in runs[0].model.state_dict().items():
        assert torch.equal(value, runs[1].model.state_dict()[name]), name


def test_batches_made_beside_steps_are_the_same(
    toy: ClickDataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = _Run(SMALL, toy, device=torch.device("cuda"), out=None)
    with monkeypatch.context() as patched:
        patched.setattr(loader_module, "beside_the_step", lambda batches, device: batches)
        wanted = list(run.loader.batches())
    assert len(wanted) > AHEAD + 2
    busy = torch.randn(4096, 4096, device="cuda")
    sums: list[Any] = []
    for batch in run.loader.batches():
        for _ in range(20):  # the device is far behind the host
            busy = (busy @ busy).clamp(-1, 1)
        sums.append([tensor.clone() for tensor in tensors_of(batch)])
        del batch
    for found, batch in zip(sums, wanted, strict=True):
        for one, other in zip(found, tensors_of(batch), strict=True):
            assert torch.equal(one, other)


def test_a_batch_that_cannot_be_made_stops_whoever_asks_for_it(toy: ClickDataset) -> None:
    run = _Run(SMALL, toy, device=torch.device("cuda"), out=None)
    good = list(islice(run.loader.batches(), 2))

    def broken() -> Iterator[JaggedBatch]:
        yield from good
        raise ValueError("no third batch")

    batches = beside_the_step(broken(), torch.device("cuda"))
    assert next(batches) is good[0]
    assert next(batches) is good[1]
    with pytest.raises(ValueError, match="no third batch"):
        next(batches)


def test_no_thread_is_left_where_an_epoch_is_not_finished(toy: ClickDataset) -> None:
    run = _Run(SMALL, toy, device=torch.device("cuda"), out=None)
    batches: Any = run.loader.batches()
    next(batches)
    assert any(thread.name.startswith("batches") for thread in threading.enumerate())
    batches.close()
    assert not any(thread.name.startswith("batches") for thread in threading.enumerate())


def test_the_products_are_as_precise_as_asked(toy: ClickDataset) -> None:
    logits = []
    for precision in ("bfloat16", "float32"):
        config = dataclasses.replace(SMALL, precision=precision)
        run = _Run(config, toy, device=torch.device("cuda"), out=None)
        with torch.no_grad():
            logits.append(run.model.eval()(next(run.loader.batches())))
    assert not torch.equal(*logits)
    torch.testing.assert_close(*logits, atol=0.05, rtol=0.05)
