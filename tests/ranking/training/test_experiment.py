"""The floors, the comparison of models, and the two commands."""

from __future__ import annotations

import argparse
import json
import os
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from click_data import ClickDataset
from click_data.split import SPLITS
from jagged_ranking import results
from jagged_ranking.evaluation.floors import (
    FLOORS,
    count_features,
    evaluate_floor,
    repeat_features,
    running_counts,
)
from jagged_ranking.evaluation.metrics import METRICS
from jagged_ranking.evaluation.rows import ORDER_ALONE
from jagged_ranking.training import experiment, runs, train_commands
from jagged_ranking.training.config import TrainConfig
from jagged_ranking.training.experiment import Plan, compare_models
from jagged_ranking.training.outcome import Outcome, read_outcome, write_outcome
from jagged_ranking.training.search import Search

TINY = TrainConfig(dim=8, hidden=(8,), max_history=10, batch_size=512, epochs=2, learning_rate=0.01)
TINY_OPTIONS = (
    "--dim=8",
    "--hidden=8",
    "--max-history=10",
    "--batch-size=512",
    "--learning-rate=0.01",
)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 4), st.integers(0, 1)), max_size=30))
def test_running_counts_are_strictly_earlier(events: list[tuple[int, int, int]]) -> None:
    key, time, label = np.array(events, np.int64).reshape(-1, 3).T
    found, positive = running_counts(key, time, label)
    earlier = [[e for e in events if e[0] == k and e[1] < t] for k, t, _ in events]
    assert found.tolist() == [len(e) for e in earlier]
    assert positive.tolist() == [sum(label for *_, label in e) for e in earlier]


def test_floors(toy: ClickDataset) -> None:
    for split, values in count_features(toy).items():
        columns = toy.requests(split)
        assert values.shape == (len(columns.item), 6)
        # in a data set where every event is a candidate, a user's count is the prefix
        prefix = np.repeat(columns.prefix, np.diff(columns.offsets))
        np.testing.assert_allclose(values[:, 1], np.log1p(prefix))
    for name in FLOORS:
        (found,) = evaluate_floor(name, toy)
        assert evaluate_floor(name, toy)[0].probability.tolist() == found.probability.tolist()
        assert found.metrics["auc"] > (0.6 if name == "counts" else 0.4)


def test_repeats_are_of_the_whole_prefix(toy: ClickDataset) -> None:
    histories = toy.histories
    for split, values in repeat_features(toy).items():
        columns = toy.requests(split)
        for row in range(0, len(columns), 29):
            first = histories.offsets[columns.user[row]]
            seen = histories.item[first : first + columns.prefix[row]]
            for candidate in range(*columns.offsets[row : row + 2]):
                places = np.flatnonzero(seen == columns.item[candidate])
                recency = 1 / (len(seen) - places[-1]) if len(places) else 0
                expected = [np.log1p(len(places)), float(len(places) > 0), recency]
                assert values[candidate] == pytest.approx(expected, rel=1e-6)


def test_a_floor_does_not_extrapolate(toy: ClickDataset, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counts that tell everything of the train period, and later lie far beyond it."""

    def drifting(dataset: ClickDataset) -> dict[str, np.ndarray]:
        rng = np.random.default_rng(0)
        label = np.asarray(dataset.requests("train").labels["label"])[:, None]
        sizes = {split: len(dataset.requests(split).item) for split in SPLITS[1:]}
        later = {s: 20 * rng.standard_normal((size, 6)) for s, size in sizes.items()}
        return {"train": label + 0.2 * rng.standard_normal((len(label), 6)), **later}

    monkeypatch.setitem(FLOORS, "counts", drifting)
    assert evaluate_floor("counts", toy)[0].metrics["ne"] < 1.1


def test_counts_reach_the_published_floor(data_dir: Path, tmp_path: Path) -> None:
    from click_data import open_dataset, prepare

    source = data_dir / "ml_100k"
    if not source.is_dir():
        pytest.skip(f"{source} is not there")
    dataset = open_dataset(prepare("movielens", from_path=source, out=tmp_path / "ml_100k"))
    metrics = evaluate_floor("counts", dataset)[0].metrics
    assert metrics["auc"] == pytest.approx(0.7446, abs=0.002)
    assert metrics["gauc"] == pytest.approx(0.7042, abs=0.002)


@pytest.fixture(scope="module")
def compared(toy: ClickDataset) -> pd.DataFrame:
    return compare_models(
        [Plan(toy.folder, models=("mean_pool", "target_attention"), seeds=(0, 1), config=TINY)],
        replicates=200,
        device="cpu",
        workers=1,
        progress=False,
    )


def test_compare_models_is_tidy_and_complete(compared: pd.DataFrame, tmp_path: Path) -> None:
    table = results.with_config(compared, "seed", "baseline", "low", "high", "model")
    assert set(compared["op"]) == {"ranking"}
    for provider, seeds in (
        ("mean_pool", [0, 1]),
        ("target_attention", [0, 1]),
        *((floor, [None]) for floor in FLOORS),
    ):
        for mode in ("valid", "test"):
            for metric in METRICS:
                rows = results.select(table, provider=provider, mode=mode, metric=metric)
                assert [None if pd.isna(s) else int(s) for s in rows["seed"]] == seeds
    names = [f"{metric}_difference" for metric in METRICS]
    differences = results.select(table, metric=names).to_dict("records")
    assert len(differences) == 4 * len(METRICS)
    assert {row["provider"] for row in differences} == {"target_attention", *FLOORS}
    for row in differences:
        assert row["low"] <= row["value"] <= row["high"]
        metric = row["metric"].removesuffix("_difference")
        means = [
            results.select(table, provider=p, mode="test", metric=metric)["value"].mean()
            for p in (row["provider"], "mean_pool")
        ]
        assert row["value"] == pytest.approx(means[0] - means[1])
    assert set(results.select(table, metric="seconds")["unit"]) == {"s"}
    written = results.read(results.write(compared, tmp_path / "results.parquet"))
    pd.testing.assert_frame_equal(written, compared, check_dtype=False)


def test_what_is_trained_on_lists_is_not_judged_as_a_probability(toy: ClickDataset) -> None:
    config = replace(TINY, epochs=1, loss="listwise", select="gauc")
    plan = Plan(toy.folder, models=("mean_pool", "din"), seeds=(0,), config=config)
    table = compare_models([plan], replicates=20, device="cpu", workers=1, progress=False)
    of_one, differences = ["ne", "log_loss"], ["ne_difference", "log_loss_difference"]
    odd = table["metric"].isin(of_one) & ~table["provider"].isin(list(FLOORS))
    odd |= table["metric"].isin(differences)
    assert set(table["message"][odd]) == {ORDER_ALONE}
    assert set(table["status"][odd]) == {"unsupported"}
    assert set(table["status"][~odd]) == {"ok"}
    assert {"auc", "auc_difference", "gauc", "gauc_difference", *of_one} <= set(
        table["metric"][~odd]
    )


def test_a_plan_that_makes_no_sense(toy: ClickDataset) -> None:
    with pytest.raises(ValueError, match=r"model must be one of .*, mean_pool, .*, got 'dnn'"):
        Plan(toy.folder, models=("dnn",))
    with pytest.raises(ValueError, match="at least one model and one seed"):
        Plan(toy.folder, seeds=())
    with pytest.raises(ValueError, match="seed must lie in"):
        Plan(toy.folder, seeds=(0, -1))


def test_plans_side_by_side_give_what_each_gives_alone(
    toy: ClickDataset, songs: ClickDataset
) -> None:
    """Of two data sets, of which each has models, seeds and trials of its own."""
    search = Search(trials=2, space={"learning_rate": [0.001, 0.02]})
    following = replace(TINY, epochs=1, loss="next_item", select="ndcg@10", head="dot")
    models = ("mean_pool", "sasrec")
    plans = [
        Plan(toy.folder, models=models[:1], seeds=(0, 1), config=TINY),
        Plan(songs.folder, models=models, seeds=(2,), config=following, search=search),
    ]
    how: dict[str, Any] = {"replicates": 20, "device": "cpu", "progress": False}
    together = compare_models(plans, workers=2, **how)
    alone = pd.concat([compare_models([one], workers=1, **how) for one in plans])
    assert set(together["workload"]) == {toy.name, songs.name}
    assert (together["mode"] == "trial").sum() == 4
    numbers = [t.query("metric != 'seconds'").reset_index(drop=True) for t in (together, alone)]
    pd.testing.assert_frame_equal(numbers[0], numbers[1])


def command(name: str, *arguments: str | Path) -> int:
    parser = argparse.ArgumentParser()
    getattr(train_commands, f"add_{name}_arguments")(parser)
    parsed = parser.parse_args([str(a) for a in arguments])
    return getattr(train_commands, f"run_{name}")(parsed)


def test_an_unknown_model_is_answered_by_the_known_ones(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        command("train", "--data", "data", "--out", "run", "--model", "dnn")
    assert "model must be one of " in capsys.readouterr().err


def test_train_and_evaluate_commands(
    toy: ClickDataset, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    where = ("--data", toy.folder, "--out", out, "--device", "cpu")
    assert command("train", *where, *TINY_OPTIONS, "--epochs", "1", "--model", "mean_pool") == 0
    assert "best epoch: 0" in capsys.readouterr().out
    with pytest.raises(ValueError, match="already holds a run: --resume goes on with it"):
        command("train", *where, *TINY_OPTIONS)
    # options not given are the run's own
    assert command("train", *where, "--resume", "--epochs", "2") == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[:3]] == ["epoch", "0", "1"]
    with pytest.raises(
        ValueError, match="was written with model='mean_pool', not 'target_attention'"
    ):
        command("train", *where, "--resume", "--model", "target_attention")

    assert command("evaluate", "--data", toy.folder, "--run", out) == 0
    capsys.readouterr()
    assert command("evaluate", "--data", toy.folder, "--run", out, "--split", "valid") == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[0].split() == ["model", "split", "candidates", *METRICS]
    assert json.loads((out / "metrics.json").read_text())["split"] == "test"
    written = json.loads((out / "metrics_valid.json").read_text())
    assert written["split"] == "valid"
    assert written["digest"] == toy.digest
    shown = [float(x) for x in printed[1].split()[3:]]
    assert shown == pytest.approx([written["metrics"][m] for m in METRICS], abs=5e-5)
    assert written["candidates"] == len(toy.requests("valid").item)
    assert (
        command("evaluate", "--data", toy.folder, "--run", out, "--split", "valid", "--json") == 0
    )
    facts = json.loads(capsys.readouterr().out)
    assert facts == written
    assert facts.keys() == train_commands.EVALUATION_KEYS.keys()


def test_of_what_was_trained_on_order_no_probability_is_judged(
    toy: ClickDataset, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    where = ("--data", toy.folder, "--out", out, "--device", "cpu", "--model", "mean_pool")
    by_order = ("--loss", "listwise", "--select", "gauc", "--epochs", "1")
    assert command("train", *where, *TINY_OPTIONS, *by_order) == 0
    head = capsys.readouterr().out.splitlines()[0].split()
    assert "valid_gauc" in head
    assert not {"valid_ne", "valid_log_loss"} & set(head)
    assert command("evaluate", "--data", toy.folder, "--run", out) == 0
    assert not {"ne", "log_loss"} & set(capsys.readouterr().out.splitlines()[0].split())
    written = json.loads((out / "metrics.json").read_text())["metrics"]
    assert written.keys() == set(METRICS) - {"ne", "log_loss"}


def test_command_errors_are_one_line(
    toy: ClickDataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # None of these gets as far as an epoch.
    trained = "jagged_ranking.training.trainer._Run.go"
    monkeypatch.setattr(trained, lambda *given, **options: pytest.fail("it trained"))
    (tmp_path / "file").touch()
    for arguments, message in (
        (("--data", toy.folder, "--out", tmp_path / "a", "--dim", "7"), "divisible by heads"),
        (("--data", toy.folder, "--out", tmp_path / "a", "--device", "tpu9"), "--device tpu9: "),
        (("--data", tmp_path / "none", "--out", tmp_path / "a"), "none"),
        (("--data", toy.folder, "--out", tmp_path / "a", "--seed", "-1"), "seed must lie in"),
        (("--data", toy.folder, "--out", tmp_path / "file"), "file: cannot be the run's folder"),
        (("--data", toy.folder, "--out", tmp_path / "file" / "a"), "a: cannot be the run's folder"),
    ):
        with pytest.raises(ValueError, match=message) as why:
            command("train", *arguments)
        assert "\n" not in str(why.value)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ValueError, match="--tensorboard needs the package tensorboard: pip inst"):
        command("train", "--data", toy.folder, "--out", tmp_path / "a", "--tensorboard")
    with pytest.raises(ValueError, match=r"model\.pt: no such checkpoint"):
        command("evaluate", "--data", toy.folder, "--run", tmp_path)
    assert not (tmp_path / "a").exists()


class Kept:
    """A store that may be cut off behind so many outcomes."""

    def __init__(self, most: int = 99) -> None:
        self.most = most
        self.outcomes: dict[tuple[TrainConfig, tuple[str, ...]], Outcome] = {}

    def put(self, outcome: Outcome) -> None:
        if len(self.outcomes) == self.most:
            raise InterruptedError("cut off")
        self.outcomes[outcome.config, tuple(one.split for one in outcome.evaluations)] = outcome

    def get(self, config: TrainConfig, splits: tuple[str, ...]) -> Outcome | None:
        return self.outcomes.get((config, splits))


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1)])
def test_a_comparison_that_was_cut_off_goes_on_where_it_stopped(
    compared: pd.DataFrame,
    toy: ClickDataset,
    monkeypatch: pytest.MonkeyPatch,
    before: int,
    after: int,
) -> None:
    """Side by side (2) first in a thread of this process, later in processes, which take long to
    start."""
    options: dict[str, Any] = {"replicates": 200, "device": "cpu", "progress": False}
    store = Kept(most=2)
    models = ("mean_pool", "target_attention")
    plans = [Plan(toy.folder, models=models, seeds=(0, 1), config=TINY, store=store)]
    with monkeypatch.context() as patched:
        patched.setattr(runs, "ProcessPoolExecutor", one_thread)
        with pytest.raises(InterruptedError):
            compare_models(plans, **options, workers=before)
    assert len(store.outcomes) == 2
    first = dict(store.outcomes)
    store.most = 4
    table = compare_models(plans, **options, workers=after)
    assert len(store.outcomes) == 4
    assert all(store.outcomes[key] is outcome for key, outcome in first.items())
    # Two side by side give what one after another gave.
    numbers = [t.query("metric != 'seconds'").reset_index(drop=True) for t in (table, compared)]
    pd.testing.assert_frame_equal(numbers[0], numbers[1])

    monkeypatch.setattr(runs, "_train_one", lambda *given, **options: pytest.fail("trained"))
    again = compare_models(plans, **options, workers=after)
    pd.testing.assert_frame_equal(again, table)  # the seconds, too


def one_thread(
    most: int, *, mp_context: Any, initializer: Any, initargs: Any
) -> ThreadPoolExecutor:
    """In the place of a pool of `most` processes."""
    assert initializer is runs._begin_worker
    assert not initargs[0].get()  # no GPU for a CPU
    return ThreadPoolExecutor(1)


def test_a_worker_ends_with_its_parent_and_has_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """How it ends is in tests/notebooks/test_interrupts.py."""
    begun: list[object] = []
    monkeypatch.setattr(runs, "end_worker_with_parent", lambda: begun.append("with its parent"))
    monkeypatch.setattr(runs.torch, "set_num_threads", begun.append)
    gpus = get_context("spawn").SimpleQueue()
    gpus.put("")
    runs._begin_worker(gpus)
    assert begun == ["with its parent", 1]


def test_a_single_training_has_one_thread_of_this_process(
    toy: ClickDataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever else runs with it, its bits are the same."""
    during: list[int] = []

    def train(*given: Any, **options: Any) -> Outcome:
        during.append(torch.get_num_threads())
        return Outcome(TINY, [], 0, 0.0)

    monkeypatch.setattr(runs, "_train_one", train)
    monkeypatch.setattr(runs, "ProcessPoolExecutor", lambda *given, **options: pytest.fail("made"))
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        runs.train_all(
            [runs.Run(toy, TINY)], splits=("test",), device="cpu", workers=2, progress=False
        )
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(threads)
    assert during == [1]


def test_data_sets_that_share_options_have_trainings_of_their_own(
    toy: ClickDataset, songs: ClickDataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[ClickDataset] = []

    def train(dataset: ClickDataset, config: TrainConfig, *given: Any, **options: Any) -> Outcome:
        done.append(dataset)
        return Outcome(config, [], len(done), 0.0)

    monkeypatch.setattr(runs, "_train_one", train)
    wanted = [runs.Run(data, TINY) for data in (toy, songs, toy)]
    how: dict[str, Any] = {"device": "cpu", "workers": 1, "progress": False}
    found = runs.train_all(wanted, splits=("test",), **how)
    assert done == [toy, songs]
    assert [outcome.best_epoch for outcome in found] == [1, 2, 1]


def test_seconds_are_those_of_training_alone(
    toy: ClickDataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]

    def train(*given: Any, **options: Any) -> SimpleNamespace:
        now[0] += 5
        return SimpleNamespace(model=None, best_epoch=3)

    def score(*given: Any) -> list:
        now[0] += 7
        return []

    monkeypatch.setattr(runs, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    monkeypatch.setattr(runs, "train", train)
    found = runs._train_one(toy, TINY, ("test",), "cpu", progress=False, score=score)
    assert (found.seconds, found.best_epoch) == (5.0, 3)


@pytest.mark.parametrize(
    ("device", "visible", "gpus"),
    [
        ("cuda", None, ["0", "1", "2"]),
        ("cuda", "5,GPU-7,6", ["5", "GPU-7", "6"]),
        ("cuda:1", "5,6,7", []),
        ("cpu", None, []),
    ],
)
def test_trainings_take_turns_on_the_gpus_that_cuda_may_mean(
    device: str, visible: str | None, gpus: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert runs.visible_gpus(device) == gpus


def test_a_process_has_its_gpu_before_cuda_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "visible_gpus", lambda _device: ["7", "8"])
    with runs._pool(1, "cuda") as pool:
        assert pool.submit(os.getenv, "CUDA_VISIBLE_DEVICES").result() == "7"


def test_what_runs_beside_a_training_that_fails_is_kept(
    toy: ClickDataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = threading.Event()

    def train(
        folder: Path, config: TrainConfig, splits: tuple[str, ...], device: str, score: Any
    ) -> Outcome:
        if config.seed == 0:
            good.wait(60)  # it fails while the other is at work
            raise ValueError("no good")
        good.set()
        time.sleep(0.5)
        return runs._train_one(toy, config, splits, device, progress=False)

    monkeypatch.setattr(runs, "_train_folder", train)
    # Threads, which see what is patched.
    monkeypatch.setattr(
        runs, "ProcessPoolExecutor", lambda most, **options: ThreadPoolExecutor(most)
    )
    store = Kept()
    plan = Plan(toy.folder, models=("mean_pool",), seeds=(0, 1), config=TINY, store=store)
    with pytest.raises(ValueError, match="no good"):
        compare_models([plan], workers=2, device="cpu", progress=False)
    assert [config.seed for config, _ in store.outcomes] == [1]


def test_an_outcome_is_read_as_it_was_written(toy: ClickDataset, tmp_path: Path) -> None:
    store = Kept()
    plan = Plan(toy.folder, models=("mean_pool",), seeds=(3,), config=TINY, store=store)
    compare_models([plan], workers=1, device="cpu", progress=False)
    (((config, _), outcome),) = store.outcomes.items()
    path = tmp_path / "one.npz"
    write_outcome(outcome, path)
    found = read_outcome(path)
    assert (found.config, found.best_epoch) == (config, outcome.best_epoch)
    assert found.seconds == outcome.seconds
    for one, other in zip(found.evaluations, outcome.evaluations, strict=True):
        assert (one.split, one.metrics) == (other.split, other.metrics)
        for name in ("probability", "user", "label"):
            read, written = getattr(one, name), getattr(other, name)
            assert read.dtype == written.dtype
            np.testing.assert_array_equal(read, written)
    for content in (path.read_bytes()[:-100], b"", b"other"):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"one\.npz: is damaged"):
            read_outcome(path)


@pytest.mark.parametrize("replicates", [-5, 0])
def test_too_few_replicates_are_said_before_anything_is_done(
    toy: ClickDataset, monkeypatch: pytest.MonkeyPatch, replicates: int
) -> None:
    monkeypatch.setattr(experiment, "train_all", lambda *given, **options: pytest.fail("ran"))
    with pytest.raises(ValueError, match=f"replicates must be at least 1, got {replicates}"):
        compare_models([Plan(toy.folder)], replicates=replicates)
