"""Scaling: two real processes, and the model of many."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from click_data import prepare
from jagged_ranking import results
from jagged_ranking.reproduce import scaling_study
from jagged_ranking.reproduce.scaling_model import (
    Assumptions,
    StepFit,
    fitted,
    lengths_of_skew,
    simulated,
)
from jagged_ranking.training.config import TrainConfig

OPTIONS: dict[str, Any] = {"model": "transformer", "dim": 8, "heads": 2, "max_history": 20}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("scaling") / "data"
    return str(prepare("synthetic", out=folder, users=30, items=40, categories=3, events=900))


@pytest.fixture
def measure(data: str) -> Any:
    """Two cores, whatever there is."""

    def measured(ranks: list[int], **options: Any) -> Any:
        return scaling_study.measured_ranks(
            data, ranks=ranks, there=2, options=TrainConfig(**{**OPTIONS, **options}).to_dict(),
            requests=4, steps=2, rounds=2, device="cpu", cpu_threads=1, seed=0, run_id="here",
        )  # fmt: skip

    return measured


def test_ranks_are_measured_in_turns_and_what_is_missing_is_a_row(measure: Any) -> None:
    table = measure([2, 4])
    gone = table[table["status"] == "missing"]
    assert list(gone["workload"]) == ["4 ranks"] * 2
    assert set(gone["message"]) == {"cores that are here: 2"}
    good = table[table["status"] == "ok"]
    assert set(good["provider"]) == {"by_tokens", "by_users"}
    for balance in ("by_tokens", "by_users"):
        mine = results.select(good, provider=balance).set_index("metric")
        assert len(mine.loc["throughput", "samples"]) == 2
        for part in scaling_study.PARTS:
            assert len(mine.loc[part, "samples"]) == 4
            assert min(mine.loc[part, "samples"]) >= 0
        facts = json.loads(mine.loc["compute", "config"])
        assert len(facts["tokens_of"]) == len(mine.loc["compute", "samples"]) == 8
        assert facts["squared"]
        assert facts["dense_bytes"] > 0
    # the same batches, once balanced
    balanced, users = (
        results.select(good, provider=name, metric="imbalance")["value"].iloc[0]
        for name in ("by_tokens", "by_users")
    )
    assert 1 <= balanced < users


def test_ranks_wait_for_the_slowest_and_answer_for_all_requests() -> None:
    """Two turns of a step of two ranks, of which the second comes first to an exchange and waits 3
    ms for the first in the one turn, 1 in the other."""

    def turn(seconds: float, forward: float, exchange: float, of: list[int]) -> dict[str, Any]:
        parts = [[1.0, forward, 2.0, exchange, 0.5]]
        return {"seconds": seconds, "parts": parts, "of": [of], "peak": 100 * seconds}

    found = [
        {"turns": {"by_tokens": turns}, "dense_bytes": 4, "table_bytes": 8}
        for turns in (
            [turn(0.2, 9.0, 1.0, [3, 30, 900]), turn(0.1, 5.0, 2.0, [4, 40, 1600])],
            [turn(0.1, 6.0, 4.0, [5, 10, 100]), turn(0.4, 4.0, 3.0, [6, 60, 3600])],
        )
    ]
    facts = {"model": "transformer", "device_type": "cuda"}
    where = {"op": "o", "provider": "p", "workload": "w", "mode": "train"}
    rows = scaling_study._rows(found, "by_tokens", where, facts, {"steps": 1})
    said = {row["metric"]: row["samples"] or row["value"] for row in rows}
    assert said["throughput"] == pytest.approx([8 / 0.2, 10 / 0.4])
    assert said["step"] == pytest.approx([200.0, 400.0])
    assert (said["exchange"], said["waiting"]) == ([1.0, 2.0], [1.5, 0.5])
    assert (said["forward"], said["update"]) == ([7.5, 4.5], [0.5, 0.5])
    assert said["imbalance"] == pytest.approx([900 / 500, 3600 / 2600])
    assert sorted(said["compute"]) == [6.0, 7.0, 8.0, 11.0]
    assert said["peak_memory"] == 40.0


def test_a_rank_that_fails_is_a_row(measure: Any) -> None:
    table = measure([2], dim=10**13)  # more than 64-bit processors address: refused at once
    assert set(table["status"]) == {"error"}
    assert table["message"].str.match(r"rank [01] of 2: .").all()


def test_ranks_that_were_missing_are_measured_where_there_are_more(
    data: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is kept does not say forever how many another machine had; nor is it of no use where
    there are more than are asked for."""
    keys: list[dict[str, Any]] = []

    def kept(function: Any, *args: Any, **options: Any) -> Any:
        keys.append(options)
        return results.frame([])

    monkeypatch.setattr(scaling_study, "cached", kept)
    for cores in (2, 4, 8):
        monkeypatch.setattr(scaling_study, "usable_cores", lambda cores=cores: cores)
        scaling_study.scaling(
            data, ranks=[2, 4], options=OPTIONS, requests=4, steps=1, rounds=1, device="cpu",
            cpu_threads=1, sizes=[8], sigmas=[None], assumptions={}, draws=1, seed=0, run_id="x",
        )  # fmt: skip
    two, four, eight = keys
    assert two != four == eight


def test_ranks_find_the_columns_laid_flat(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By one process, before any of them begins."""
    new = prepare("synthetic", out=tmp_path / "new", users=30, items=40, categories=3, events=900)
    assert not [*new.rglob("*.flat")]
    found: list[int] = []

    def run(count: int, asked: dict[str, Any]) -> tuple[list[dict[str, Any]], str]:
        found.append(len([*new.rglob("*.flat")]))
        return [], "not here"

    monkeypatch.setattr(scaling_study, "_run_ranks", run)
    scaling_study.measured_ranks(
        str(new), ranks=[2, 3], there=3, options=OPTIONS, requests=4, steps=1, rounds=1,
        device="cpu", cpu_threads=1, seed=0, run_id="here",
    )  # fmt: skip
    assert found[0] == found[1] > 0


def test_bad_numbers_are_refused_first(data: str) -> None:
    rest: dict[str, Any] = {
        "options": OPTIONS, "steps": 1, "rounds": 1, "device": "cpu", "cpu_threads": 1,
        "sizes": [8], "sigmas": [None], "assumptions": {}, "draws": 1, "seed": 0, "run_id": "x",
    }  # fmt: skip
    with pytest.raises(ValueError, match="must be at least 1"):
        scaling_study.scaling(data, ranks=[0], requests=4, **rest)
    with pytest.raises(ValueError, match="network_gb_s must be positive, got 0"):
        scaling_study.scaling(
            data, ranks=[1], requests=4, **{**rest, "assumptions": {"network_gb_s": 0}}
        )


def test_the_fit_finds_what_steps_were_made_of() -> None:
    rng = np.random.default_rng(0)
    tokens = rng.integers(100, 10_000, 200)
    squares = tokens * rng.integers(50, 500, 200)
    took = 3.0 + 0.01 * tokens + 1e-5 * squares
    fit = fitted(tokens.tolist(), squares.tolist(), took.tolist(), [2.0, 4.0])
    assert (fit.fixed, fit.per_token, fit.per_square) == pytest.approx((3.0, 0.01, 1e-5), rel=1e-6)
    assert fit.update == 3.0
    assert fit.error < 1e-9
    assert fit.compute(tokens, squares) == pytest.approx(took)


def run_model(ranks: int, sigma: float = math.nan, **options: Any) -> dict[str, dict[str, float]]:
    given: dict[str, Any] = {
        "requests": 32, "squared": True, "dense_bytes": 4e6, "draws": 3, "seed": 0,
        "assumed": Assumptions(),
    }  # fmt: skip
    logged = np.random.default_rng(1).lognormal(4, 1, 2000).astype(np.int64) + 1
    fit = StepFit(1.0, 1e-3, 1e-5, 2.0, 0.0)
    return dict(simulated(fit, logged, ranks=ranks, sigma=sigma, **{**given, **options}))


def test_one_rank_exchanges_nothing_and_waits_for_nobody() -> None:
    for parts in run_model(1).values():
        assert parts["dense"] == parts["rows"] == parts["waiting"] == 0
        assert parts["step"] == pytest.approx(parts["compute"] + parts["update"])
        assert parts["table_bytes"] == 1e9 * 129 * 4


def test_ranks_compute_on_average_what_one_does() -> None:
    """Else their efficiency would be that of the batches that were drawn."""
    one, many = run_model(1)["by_tokens"], run_model(256)["by_tokens"]
    assert one["compute"] == pytest.approx(many["compute"], rel=0.05)


def test_balance_by_tokens_waits_less_the_more_lengths_differ() -> None:
    losses = {}
    for sigma in (0.5, 2.0):
        parts = run_model(64, sigma)
        assert parts["by_tokens"]["waiting"] < parts["by_users"]["waiting"]
        losses[sigma] = parts["by_users"]["waiting"] / parts["by_users"]["compute"]
    assert losses[2.0] > losses[0.5]


def test_volume_follows_the_ring_and_the_network() -> None:
    near, far = run_model(8)["by_tokens"], run_model(16)["by_tokens"]
    assert near["dense_bytes"] == 2 * 7 / 8 * 4e6
    assert near["dense"] == pytest.approx(6 * 0.01 + near["dense_bytes"] / 200e9 * 1e3)
    assert far["dense"] == pytest.approx(8 * 0.01 + far["dense_bytes"] / 40e9 * 1e3)
    assert far["table_bytes"] == near["table_bytes"] / 2


def test_lengths_have_the_mean_of_the_log() -> None:
    logged = np.full(10, 100)
    rng = np.random.default_rng(0)
    assert (lengths_of_skew(logged, math.nan, 5, rng, 100) == 100).all()
    drawn = lengths_of_skew(logged, 1.0, 100_000, rng, 10**6)
    assert drawn.mean() == pytest.approx(100, rel=0.02)
    assert lengths_of_skew(logged, 3.0, 1000, rng, 150).max() == 150


def test_worker_is_found_by_its_name() -> None:
    path = Path(scaling_study.__file__).with_name("scaling_worker.py")
    assert scaling_study.WORKER.endswith(path.stem)
    assert path.is_file()
