"""`random_batches.py` finds what is not exact, and says which batch it was."""

from __future__ import annotations

import json
import math
import os
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attention_cases
import pytest
import random_batches
import torch
from attention_cases import FACTOR, Standard
from random_batches import DTYPES, as_results, draw, look_at, main
from torch import Tensor

from jagged_ranking import provenance, results
from jagged_ranking.figures.exactness_goals import (
    EXACTNESS,
    GOAL,
    ORDERS,
    OURS,
    PYTORCH,
    exactness_rows,
)
from jagged_ranking.figures.result_folder import read_results

FEW = ["--first", "7", "--count", "3"]


def test_batches_are_the_same_each_time_and_of_every_kind() -> None:
    drawn = [draw(number) for number in range(200)]
    assert drawn == [draw(number) for number in range(200)]
    cases = [case for case, _, _ in drawn]
    assert {dtype for _, dtype, _ in drawn} == set(DTYPES)
    assert {shared for _, _, shared in drawn} == {True, False}
    assert {case.offsets_dtype for case in cases} == {torch.int32, torch.int64}
    assert {frozenset(case.mask) - {"scale"} for case in cases} == {
        frozenset(), frozenset({"causal"}), frozenset({"window"})
    }  # fmt: skip
    assert any(0 in case.q_lengths for case in cases)
    assert any(case.k_lengths for case in cases)
    assert all(sum(case.q_lengths) <= random_batches.TOKENS for case in cases)


def test_what_is_exact_passes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(FEW) == 0
    out = capsys.readouterr().out
    assert "3 batches, 0 wrong, 0 with other bits" in out
    assert all(name in out for name in random_batches.RESULTS)


def test_what_is_not_exact_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    right, calls = random_batches.run, []

    def wrong(*args: Any, **options: Any) -> dict[str, torch.Tensor]:
        found = right(*args, **options)
        calls.append(found)
        found["dv"] = found["dv"] + (
            100.0 if len(calls) < 3 else 0.0
        )  # both runs of the first batch
        found["dq"] = found["dq"] * (1 + 0.5 * (len(calls) == 4))  # the second of the next
        return found

    monkeypatch.setattr(random_batches, "run", wrong)
    assert main(FEW) == 1
    out = capsys.readouterr().out
    one, other = (line for line in out.splitlines() if line.startswith("wrong: "))
    assert re.match(r"wrong: batch 7, float\d+ dv: \S+ times PyTorch's error; Case\(", one)
    assert re.match(r"wrong: batch 8, float\d+ dq: another the second time; Case\(", other)
    assert "3 batches, 1 wrong, 1 with other bits" in out
    worst = out.partition("the worst batches\n")[2].splitlines()[0]
    assert re.match(r"batch 7, float\d+ dv: jagged .*, times .*, by floor .*; Case\(", worst)


def test_who_is_told_to_end_tells_what_there_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    look = random_batches.look_at

    def told_to_end(number: int) -> list[dict[str, Any]]:
        if number == 9:
            os.kill(os.getpid(), signal.SIGTERM)
        return look(number)

    monkeypatch.setattr(random_batches, "look_at", told_to_end)
    before = signal.getsignal(signal.SIGTERM)
    try:
        assert main(FEW) == 1
    finally:
        signal.signal(signal.SIGTERM, before)
    out = capsys.readouterr().out
    assert "cut off: 3 batches were asked for" in out
    assert "2 batches, 0 wrong, 0 with other bits" in out


def test_what_is_compiled_alike_is_in_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    monkeypatch.setattr(random_batches, "look_at", lambda number: seen.append(number) or [])
    again = random_batches.COMPILED
    main(["--count", str(2 * again + 1)])
    assert sorted(seen) == list(range(2 * again + 1))
    assert seen[:5] == [0, again, 2 * again, 1, again + 1]


def test_a_row_has_the_errors_of_both() -> None:
    rows = look_at(8)
    assert [row["result"] for row in rows] == list(random_batches.RESULTS)
    for row in rows:
        assert min(row[OURS], row[PYTORCH]) >= 0
        assert row["times"] == pytest.approx(row[OURS] / max(row[PYTORCH], 1))
        assert row["by floor"] <= row["times"] <= GOAL
        assert row["by floor"] <= FACTOR


def _changed(
    monkeypatch: pytest.MonkeyPatch, name: str, result: str, change: Callable[[Tensor], Tensor]
) -> None:
    """Of what attention (`random_batches.run`) or PyTorch (`attention_cases.sdpa`, and
    `random_batches.sdpa_in_order`) makes, a result is another from now on."""
    module = attention_cases if name == "sdpa" else random_batches
    right = getattr(module, name)

    def changed(*args: Any, **options: Any) -> dict[str, Tensor]:
        found = right(*args, **options)
        return {**found, result: change(found[result])}

    monkeypatch.setattr(module, name, changed)


def _filled(value: float) -> Callable[[Tensor], Tensor]:
    return lambda x: torch.full_like(x, value)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_an_error_without_a_size_is_inf(monkeypatch: pytest.MonkeyPatch, value: float) -> None:
    _changed(monkeypatch, "run", "dk", _filled(value))
    rows = {row["result"]: row for row in look_at(8)}
    assert rows["dk"][OURS] == rows["dk"]["times"] == rows["dk"]["by floor"] == math.inf
    assert rows["dk"]["wrong"]
    assert math.isfinite(rows["dk"][PYTORCH])
    assert rows["dv"]["times"] <= GOAL
    assert not rows["dv"]["wrong"]


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_where_pytorch_has_no_number_a_rounding_counts(
    monkeypatch: pytest.MonkeyPatch, value: float
) -> None:
    _changed(monkeypatch, "sdpa", "o", _filled(value))
    row = look_at(8)[0]
    assert row[PYTORCH] == math.inf
    assert row["times"] == row[OURS] <= GOAL
    assert not row["wrong"]
    _changed(monkeypatch, "run", "o", lambda x: x + 1)
    row = look_at(8)[0]
    assert GOAL < row["times"] == row[OURS] < math.inf
    assert row["wrong"]
    _changed(monkeypatch, "run", "o", _filled(math.nan))
    row = look_at(8)[0]
    assert row["times"] == row["by floor"] == math.inf
    assert "NaN" in row["wrong"]


def test_a_sum_that_cancels_is_allowed_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where PyTorch is exact, dq of float32 that tests let pass is wrong here."""
    number = next(i for i in range(20) if draw(i)[1] == torch.float32)
    case, dtype, shared = draw(number)
    inputs = case.inputs(dtype, seed=number)
    exact = Standard(inputs.with_shared_offsets() if shared else inputs, **case.mask).exact["dq"]
    off = 6 * random_batches.rounding(exact, dtype)
    for name in ("sdpa", "sdpa_in_order"):
        _changed(monkeypatch, name, "dq", lambda _: exact.to(dtype))
    _changed(monkeypatch, "run", "dq", lambda _: (exact + off).to(dtype))
    row = look_at(number)[random_batches.RESULTS.index("dq")]
    assert row["by floor"] < FACTOR
    assert GOAL < row["times"] <= 7
    assert "times PyTorch's error" in row["wrong"]
    assert not row["lucky"]


def test_where_pytorch_is_close_by_its_order_alone_that_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And the batch is wrong. Each order has another error, of which the largest counts."""
    case, dtype, shared = draw(8)
    inputs = case.inputs(dtype, seed=8)
    exact = Standard(inputs.with_shared_offsets() if shared else inputs, **case.mask).exact["o"]
    one = random_batches.rounding(exact, torch.float64) * 2.0**20  # more digits than any dtype has
    monkeypatch.setattr(random_batches, "rounding", lambda *_: one)
    monkeypatch.setattr(random_batches, "FACTOR", math.inf)
    errors = iter([0.0, 3.0, math.nan, *[1.0] * (ORDERS - 3)] * 2)
    _changed(monkeypatch, "sdpa", "o", lambda _: exact)
    _changed(monkeypatch, "sdpa_in_order", "o", lambda _: exact + next(errors) * one)
    for times, lucky in ((11.0, True), (13.0, False)):
        with monkeypatch.context() as patch:
            _changed(patch, "run", "o", lambda _, off=times * one: exact + off)
            rows = look_at(8)
        assert rows[0][PYTORCH] == 0
        assert rows[0]["times"] == pytest.approx(times)
        assert rows[0]["wrong"] == f"{times:.3g} times PyTorch's error"
        assert rows[0]["lucky"] == lucky
        assert not any(row["lucky"] for row in rows[1:])
        assert random_batches.tell(rows) == 1
        assert f"with other bits, PyTorch lucky in {int(lucky)}" in capsys.readouterr().out


@pytest.mark.parametrize("mask", [{}, {"causal": True, "scale": -0.3}])
def test_another_order_is_of_the_same_sums(mask: dict[str, Any]) -> None:
    inputs = attention_cases.Case([3, 0, 17], mask=mask).inputs(torch.float32)
    order = torch.arange(16, device=inputs.q.device).flip(0).roll(3)
    found = attention_cases.sdpa(inputs, **mask)
    other = attention_cases.sdpa_in_order(inputs, order, **mask)
    assert found.keys() == other.keys()
    for name in found:
        torch.testing.assert_close(other[name], found[name])
    assert not torch.equal(other["lse"], found["lse"])


def test_what_tests_do_not_let_pass_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where PyTorch is far off, and so the goal is the wider bound."""
    case, dtype, shared = draw(8)
    inputs = case.inputs(dtype, seed=8)
    exact = Standard(inputs.with_shared_offsets() if shared else inputs, **case.mask).exact["o"]
    far = 100 * float(exact.abs().max()) * torch.finfo(dtype).eps
    _changed(monkeypatch, "sdpa", "o", lambda _: exact + far)
    for times, wrong in ((2.5, False), (3.5, True)):
        with monkeypatch.context() as patch:
            _changed(patch, "run", "o", lambda _, off=times * far: exact + off)
            row = look_at(8)[0]
        assert row["times"] == pytest.approx(times) == row["by floor"]
        assert times < GOAL
        assert row["wrong"] == ("3.5 times what tests judge by" if wrong else "")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_nothing_is_rounded_by_more_than_a_rounding(dtype: torch.dtype) -> None:
    """Of one number; below the normal ones, too."""
    numbers = torch.rand(500, generator=torch.Generator().manual_seed(0), dtype=torch.float64) + 1
    for scale in (1.0, 1024.0, torch.finfo(dtype).smallest_normal / 8):
        roundings = [
            abs(float(x.to(dtype).double() - x)) / random_batches.rounding(x, dtype)
            for x in numbers * scale
        ]
        assert 0.9 < max(roundings) <= 1
    assert random_batches.rounding(torch.zeros(3), dtype) > 0


def _row(batch: int, ours: float, times: float, *, result: str = "dq", dtype: str = "float16",
         wrong: str = "", bits: bool = False) -> dict[str, Any]:  # fmt: skip
    of_both = {"result": result, OURS: ours, PYTORCH: 2 * ours, "times": times}
    said = {"by floor": times / 2, "wrong": wrong, "other bits": bits, "case": f"case {batch}"}
    return {"batch": batch, "dtype": dtype, "lucky": batch == 4, **of_both, **said}


def test_results_have_the_median_and_the_worst_batch() -> None:
    rows = [_row(3, 1.0, 2.0), _row(4, 3.0, 0.5, bits=True), _row(5, 2.0, 1.0)]
    found = as_results([*rows, _row(6, 9.0, math.inf, dtype="float32", wrong="inf")])
    found = results.with_config(found, "batches", "worst", "worst_of", "times", "times_of",
                                "by_floor", "wrong", "other_bits", "lucky")  # fmt: skip
    ours, peer, other, *_ = found.to_dict("records")
    assert (ours["workload"], ours["mode"], ours["provider"]) == ("float16", "dq", "jagged")
    assert (ours["value"], ours["batches"], ours["other_bits"]) == (2.0, 3, 1)
    assert (ours["lucky"], other["lucky"]) == (1, 0)
    assert (ours["worst"], ours["worst_of"]) == (3.0, 4)
    assert (ours["times"], ours["times_of"], ours["by_floor"]) == (2.0, 3, 1.0)
    assert (peer["provider"], peer["value"], peer["worst"]) == ("PyTorch", 4.0, 6.0)
    assert (other["workload"], other["times"], other["wrong"]) == ("float32", "inf", 1)


def test_results_count_batches_and_keep_the_worst() -> None:
    """A batch of which two results are wrong is one."""
    rows = [
        _row(batch, 1.0, times, result=result, wrong="far" * (times > GOAL), bits=batch == 8)
        for batch, times in ((2, 5.0), (3, math.inf), (4, 1.0), (8, 2.0), (9, 0.5), (10, 3.0))
        for result in ("dk", "dv")
    ]
    *_, of_all = as_results(rows).to_dict("records")
    assert (of_all["workload"], of_all["mode"], of_all["metric"]) == ("all", "all", "wrong")
    config = json.loads(of_all["config"])
    assert of_all["value"] == config["wrong"] == 2
    assert (config["batches"], config["other_bits"]) == (6, 1)
    assert [row["batch"] for row in config["worst_batches"]] == [3, 2, 10, 8, 4]
    assert config["worst_batches"][1] == {
        "batch": 2, "dtype": "float16", "result": "dk", "times": 5.0, "by floor": 2.5,
        "case": "case 2",
    }  # fmt: skip


def test_configs_are_json() -> None:
    found = as_results([_row(6, math.inf, math.inf, wrong="NaN"), _row(7, 1.0, 1.0)])
    for config in found["config"]:
        json.dumps(json.loads(config), allow_nan=False)


def test_a_run_leaves_results_with_a_manifest(tmp_path: Path) -> None:
    out = tmp_path / "new" / EXACTNESS
    assert main([*FEW, "--out", str(out)]) == 0
    run = read_results(out)
    assert run.manifest["id"] == EXACTNESS
    assert run.manifest["parameters"] == {"count": 3, "first": 7}
    assert not run.manifest["code_changed"]
    *rows, of_all = exactness_rows(run.table)
    assert {row["result"] for row in rows} == set(random_batches.RESULTS)
    assert (of_all["batches"], of_all["met"]) == ("3", "yes, of those here")
    assert {path.name for path in out.iterdir()} == {results.RESULTS, provenance.MANIFEST}


def test_after_its_seconds_no_batch_is_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now, look = [0.0], random_batches.look_at

    def slow(number: int) -> list[dict[str, Any]]:
        now[0] += 6
        return look(number)

    monkeypatch.setattr(random_batches, "monotonic", lambda: now[0])
    monkeypatch.setattr(random_batches, "look_at", slow)
    words = [*FEW, "--out", str(tmp_path), "--seconds"]
    assert main([*words, "10"]) == 0
    assert "2 batches, 0 wrong, 0 with other bits" in capsys.readouterr().out
    run = read_results(tmp_path)
    assert run.manifest["parameters"] == {"count": 3, "first": 7, "seconds": 10}
    assert exactness_rows(run.table)[-1]["batches"] == "2"
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert main([*words, "0"]) == 1
    assert "no batch was looked at" in capsys.readouterr().out
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_run_that_is_cut_off_leaves_an_older_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["--out", str(tmp_path)]
    assert main([*FEW, *words]) == 0
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    look = random_batches.look_at

    def cut_off(number: int) -> list[dict[str, Any]]:
        if number == 1:
            raise KeyboardInterrupt
        return look(number)

    monkeypatch.setattr(random_batches, "look_at", cut_off)
    assert main(["--count", "2", *words]) == 1
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
