"""Quality and costs over the history cap: a toy log, two caps."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from small_rankers import batch_of

from click_data import ClickDataset
from jagged_ranking import results
from jagged_ranking.data.batch import JaggedBatch
from jagged_ranking.data.data_shape import DataShape
from jagged_ranking.figures.affordability import by_cap, longest_caps
from jagged_ranking.measure.timing import Effort
from jagged_ranking.models.model_config import ATTENTIONS
from jagged_ranking.reproduce.history_study import budget_rows, used_caps
from jagged_ranking.reproduce.lab import costs_by_cap, history_folders, joined, quality_by_cap
from jagged_ranking.reproduce.step_cost import longest_history, step_costs
from jagged_ranking.reproduce.training_step import TrainingStep
from jagged_ranking.training import runs
from jagged_ranking.training.config import TrainConfig
from jagged_ranking.training.losses import loss_of

TINY: dict[str, Any] = {"dim": 8, "hidden": [8], "batch_size": 512, "epochs": 1}
PEAKS = ("peak_memory", "peak_memory_minus_inputs")
QUICK = Effort(rounds=2, inner=1, warmup=1, seconds=0.02)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty checkout, in which trainings run in this process."""
    home = tmp_path / "home"
    (home / "notebooks").mkdir(parents=True)
    (home / "pyproject.toml").touch()
    monkeypatch.setenv("JAGGED_HOME", str(home))
    monkeypatch.setenv("CLICK_DATA_DIR", str(tmp_path / "logs"))
    monkeypatch.setattr(runs, "usable_cores", lambda: 1)
    return home


def quality_of(folder: Path, **changes: Any) -> pd.DataFrame:
    given: dict[str, Any] = {
        "models": ["target_attention"],
        "caps": [5, 100_000],
        "seeds": [0, 1],
        "options": TINY,
        "replicates": 20,
        "device": "cpu",
    }
    return quality_by_cap([folder], **{**given, **changes})


def costs_of(folder: Path, **changes: Any) -> pd.DataFrame:
    given: dict[str, Any] = {
        "models": ["target_attention"],
        "attentions": ATTENTIONS,
        "caps": [5],
        "options": TINY,
        "requests": 8,
        "device": "cpu",
        "effort": QUICK,
        "budget_cap": 5,
    }
    return costs_by_cap([folder], **{**given, **changes})


def by_cap_and_kind(steps: pd.DataFrame, metric: str) -> dict[tuple[int, str], float]:
    mine = results.select(steps, metric=metric)
    return dict(zip(zip(mine["cap"], mine["provider"], strict=True), mine["value"], strict=True))


def test_two_caps_from_trainings_to_what_is_afforded(
    home: Path, toy: ClickDataset, capsys: pytest.CaptureFixture[str]
) -> None:
    longest = longest_history(toy)
    assert longest == max(int(toy.requests(s).prefix.max()) for s in ("train", "valid", "test"))
    quality = quality_of(toy.folder)
    test = results.with_config(results.select(quality, mode="test"), "cap", "longest", "seed")
    assert set(test["longest"]) == {longest}
    gauc = results.select(test, metric="gauc")
    assert sorted(zip(gauc["cap"], gauc["seed"], strict=True)) == [
        (cap, seed) for cap in (5, longest) for seed in (0, 1)
    ]
    assert set(quality["op"]) == {"ranking_by_cap"}
    (gain,) = results.select(test, metric="gauc_gain").to_dict("records")
    said = json.loads(gain["config"])
    assert (said["baseline_cap"], said["cap"], said["seeds"]) == (5, longest, 2)
    assert said["low"] <= gain["value"] <= said["high"]
    short, whole = (gauc["value"][gauc["cap"] == cap].mean() for cap in (5, longest))
    assert gain["value"] == pytest.approx(whole - short)
    capsys.readouterr()
    again = quality_of(toy.folder)
    assert capsys.readouterr().out.count("kept from") == 4
    pd.testing.assert_frame_equal(quality, again)

    found = joined(costs_of(toy.folder), quality)
    reached = longest_caps(found)
    assert list(zip(reached["metric"], reached["attention"], strict=True)) == [
        (metric, kind) for metric in ("latency", "peak_memory") for kind in ATTENTIONS
    ]
    flash = results.select(reached, attention="padded_flash")
    assert (flash["cap"] >= 5).all()
    assert by_cap(found)["cap"].tolist() == [5, longest]


def test_costs_are_of_the_same_batches_by_every_kind(home: Path, toy: ClickDataset) -> None:
    table = costs_of(toy.folder)
    steps = results.select(table, op="training_step")
    steps = results.with_config(steps, "cap", "tokens", "candidates", "B", "device", "attention")
    assert set(steps["status"]) == {"ok"}
    assert (steps["attention"] == steps["provider"]).all()
    for _, mine in steps.groupby("cap"):
        assert set(mine["provider"]) == set(ATTENTIONS)
        assert len(set(zip(mine["tokens"], mine["candidates"], mine["B"], strict=True))) == 1
    assert set(steps["metric"]) == {"latency", "rel_error", "loss_rel_error", *PEAKS}
    assert steps["device"].str.startswith("CPU").all()
    errors = results.select(steps, metric=["rel_error", "loss_rel_error"])
    assert (errors["value"] < 1e-5).all()
    assert results.select(steps, metric="latency")["samples"].map(len).ge(2).all()
    longest = longest_history(toy)
    peak, beyond = (by_cap_and_kind(steps, name) for name in PEAKS)
    # Weights, optimiser and batch are the same whoever attends; all that differs lies beyond.
    for cap in (5, longest):
        assert len({peak[cap, kind] - beyond[cap, kind] for kind in ATTENTIONS}) == 1
    assert beyond[longest, "padded_sdpa"] > beyond[longest, "jagged"]


def test_a_kind_that_is_wrong_fails_or_cannot_is_said_and_not_timed(
    home: Path, toy: ClickDataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    logits, after = TrainingStep.logits, TrainingStep.loss_after_a_step

    def wrong(step: TrainingStep, batch: JaggedBatch) -> torch.Tensor:
        if step.config.attention == "padded_flash":
            raise torch.OutOfMemoryError("full")
        return logits(step, batch) + (step.config.attention == "padded_sdpa")

    def wrong_later(step: TrainingStep, batch: JaggedBatch) -> torch.Tensor:
        return after(step, batch) + (step.config.attention == "padded_dense")

    monkeypatch.setattr(TrainingStep, "logits", wrong)
    monkeypatch.setattr(TrainingStep, "loss_after_a_step", wrong_later)
    table = step_costs(
        toy.folder,
        models=["transformer"],
        caps=[5],
        options=TINY,
        requests=4,
        device="cpu",
        effort=QUICK,
    )
    latency = results.select(table, metric="latency").set_index("provider")
    assert latency["status"].to_dict() == {
        "jagged": "ok",
        "padded_dense": "error",
        "padded_sdpa": "error",
        "padded_flash": "out_of_memory",
        "nested": "unsupported",
    }
    assert latency["message"]["padded_sdpa"].startswith("wrong: rel_error")
    assert latency["message"]["padded_dense"].startswith("wrong: loss_rel_error")
    assert "causal on a GPU alone" in latency["message"]["nested"]
    assert set(table["provider"][table["metric"] == "peak_memory"]) == set(ATTENTIONS)


def test_a_step_is_that_of_training(toy: ClickDataset) -> None:
    """The same loss falls, the weights move, and no gradient is left."""
    config = TrainConfig.from_dict({**TINY, "max_history": 5, "learning_rate": 0.05})
    batch = batch_of(toy, np.arange(64), max_history=5)
    step = TrainingStep(config, DataShape.of(toy), torch.device("cpu"))

    def loss() -> float:
        with torch.no_grad():
            return float(loss_of("pointwise", step.model.eval(), batch))

    before = loss()
    for _ in range(10):
        step(batch)
    assert loss() < before - 0.01
    assert all(parameter.grad is None for parameter in step.model.parameters())


def step_row(kind: str, cap: int, ms: float, *, model: str = "transformer") -> dict[str, Any]:
    config = {"model": model, "cap": cap, "device": "Imaginary GPU"}
    return results.row(
        op="training_step", provider=kind, workload="log", mode="train", metric="latency",
        unit="ms", value=ms, status="error" if math.isnan(ms) else "ok", config=config,
    )  # fmt: skip


def test_budgets_are_a_cost_at_a_cap_or_a_number() -> None:
    flash = [step_row("padded_flash", cap, ms) for cap, ms in ((10, 1.0), (50, 2.0), (200, 7.0))]
    table = results.frame([*flash, step_row("jagged", 10, 0.5), step_row("jagged", 200, 3.0)])

    def budgets(**options: Any) -> list[tuple[float, int | None]]:
        given: dict[str, Any] = {"of": "padded_flash", "cap": 100, "given": {}}
        rows = budget_rows(table, **{**given, **options})
        return [(row["value"], json.loads(row["config"])["cap"]) for row in rows]

    assert budgets() == [(2.0, 50)]
    assert budgets(cap=50) == [(2.0, 50)]
    assert budgets(cap=5) == [(1.0, 10)]
    assert budgets(of="jagged", cap=1000) == [(3.0, 200)]
    assert budgets(given={"latency": 4.5}) == [(4.5, None)]
    assert budgets(of="nested") == []
    failed = results.frame([step_row("padded_flash", 10, math.nan), step_row("jagged", 10, 1.0)])
    assert budget_rows(failed, of="padded_flash", cap=100, given={}) == []


def test_caps_end_with_all_of_the_history() -> None:
    assert used_caps([100, 10, 10, 50], 60) == [10, 50, 60]
    assert used_caps([60], 60) == [60]
    assert used_caps([], 7) == [7]
    with pytest.raises(ValueError, match="caps must be at least 1, got 0"):
        used_caps([0, 5], 60)


def test_nothing_to_study_is_said_before_any_work(
    home: Path, toy: ClickDataset, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ValueError, match="no data set: nothing in any of data, far, datasets"):
        history_folders(None, None, ["absent"])
    assert "no prepared absent" in capsys.readouterr().out
    assert history_folders(str(toy.folder), None, [str(toy.folder)]) == [toy.folder]
    for wrong, said in (
        ({"seeds": []}, "at least one model and one seed"),
        ({"replicates": 0}, "replicates must be at least 1"),
        ({"options": {"depth": 3}}, "unknown option 'depth'"),
        ({"models": ["nobody"]}, "model must be one of"),
        ({"own": {toy.name: {"caps": [0]}}}, "caps must be at least 1"),
        ({"own": {toy.name: {"models": []}}}, "at least one model and one seed"),
        (
            {"own": {toy.name: {"epochs": 3}}},
            f"own of {toy.name}: unknown 'epochs'; known: models, caps, seeds, options",
        ),
    ):
        for study in (quality_of, costs_of):
            if study is quality_of or "replicates" not in wrong:
                with pytest.raises(ValueError, match=said):
                    study(toy.folder, **wrong)
    assert not [*home.rglob("*.npz"), *home.rglob("*.parquet")]


def test_a_data_set_may_have_values_of_its_own(home: Path, toy: ClickDataset) -> None:
    """Of models, caps and seeds all, of options what differs; another data set's do not count."""
    own = {
        toy.name: {"models": ["mean_pool"], "caps": [3], "seeds": [7], "options": {"dim": 4}},
        "another": {"models": ["nobody"], "caps": [0]},
    }
    longest = longest_history(toy)
    quality = results.with_config(quality_of(toy.folder, own=own), "seed", "cap", "dim", "hidden")
    scored = results.select(quality, mode="valid", metric="auc")
    assert scored[["provider", "cap", "seed", "dim"]].values.tolist() == [
        ["mean_pool", cap, 7, 4] for cap in (3, longest)
    ]
    assert scored["hidden"].tolist() == [[8], [8]]
    table = costs_of(toy.folder, own=own, attentions=["jagged"])
    steps = results.select(table, op="training_step", metric="latency")
    steps = results.with_config(steps, "model", "cap", "seed", "dim", "hidden")
    assert steps[["model", "cap", "seed", "dim", "hidden"]].values.tolist() == [
        ["mean_pool", cap, 7, 4, [8]] for cap in (3, longest)
    ]


def test_steps_are_of_some_kind_of_attention(toy: ClickDataset) -> None:
    given: dict[str, Any] = {"models": ["transformer"], "caps": [5], "options": TINY}
    given |= {"requests": 4, "device": "cpu", "effort": QUICK}
    with pytest.raises(ValueError, match="at least one kind of attention"):
        step_costs(toy.folder, attentions=[], **given)


@pytest.mark.gpu
@pytest.mark.parametrize("model", ["target_attention", "transformer"])
def test_every_kind_is_measured_on_a_gpu(toy: ClickDataset, model: str) -> None:
    table = step_costs(
        toy.folder,
        models=[model],
        caps=[5, 40],
        options={**TINY, "dim": 32},
        requests=64,
        device="cuda",
        effort=QUICK,
    )
    assert set(table["status"]) == {"ok"}, table[["provider", "status", "message"]]
    assert set(table["metric"]) == {"latency", "host_time", "rel_error", "loss_rel_error", *PEAKS}
    assert set(table["provider"]) == set(ATTENTIONS)
    steps = results.with_config(table, "cap")
    peak, beyond = (by_cap_and_kind(steps, name) for name in PEAKS)
    assert len(peak) == 2 * len(ATTENTIONS)
    assert all(total > beyond[at] > 0 for at, total in peak.items())
