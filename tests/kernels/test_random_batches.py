"""`random_batches.py` finds what is not exact, and says which batch it was."""

from __future__ import annotations

import math
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import random_batches
import torch
from attention_cases import FACTOR
from random_batches import DTYPES, as_results, draw, look_at, main

from jagged_ranking import provenance, results
from jagged_ranking.figures.exactness_goals import EXACTNESS, exactness_rows
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
    assert "3 batches, 0 wrong" in out
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
    assert "batch 7: ours dv: error " in out
    assert "batch 8: dq is another the second time" in out
    assert "Case(q_lengths=" in out
    assert "3 batches, 2 wrong" in out


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
    assert "2 batches, 0 wrong" in out


def test_a_row_has_the_errors_of_both() -> None:
    rows = look_at(8)
    assert [row["result"] for row in rows] == list(random_batches.RESULTS)
    assert all(row["ours"] >= 0 and row["PyTorch"] >= 0 for row in rows)
    # By PyTorch's, or by a rounding.
    for row in rows:
        assert row["times"] <= row["ours"] / max(row["PyTorch"], 1) * (1 + 1e-12)
        assert row["times"] <= FACTOR


def test_an_error_without_a_size_is_inf(monkeypatch: pytest.MonkeyPatch) -> None:
    right = random_batches.run

    def wrong(*args: Any, **options: Any) -> dict[str, torch.Tensor]:
        found = right(*args, **options)
        found["dk"] = torch.full_like(found["dk"], math.nan)
        return found

    monkeypatch.setattr(random_batches, "run", wrong)
    rows = {row["result"]: row for row in look_at(8)}
    assert rows["dk"]["ours"] == rows["dk"]["times"] == math.inf
    assert "NaN" in rows["dk"]["wrong"]
    assert rows["dv"]["times"] <= FACTOR
    assert not rows["dv"]["wrong"]


def _row(batch: int, ours: float, times: float, *, dtype: str = "float16", bits: bool = False):
    of_both = {"result": "dq", "ours": ours, "PyTorch": 2 * ours, "times": times}
    return {"batch": batch, "dtype": dtype, "other bits": bits, "wrong": "", **of_both}


def test_results_have_the_median_and_the_worst_batch() -> None:
    rows = [_row(3, 1.0, 2.0), _row(4, 3.0, 0.5, bits=True), _row(5, 2.0, 1.0)]
    found = as_results([*rows, _row(6, 9.0, math.inf, dtype="float32")])
    found = results.with_config(found, "batches", "worst", "worst_of", "times", "times_of",
                                "other_bits")  # fmt: skip
    ours, peer, other, _ = found.to_dict("records")
    assert (ours["workload"], ours["mode"], ours["provider"]) == ("float16", "dq", "ours")
    assert (ours["value"], ours["batches"], ours["other_bits"]) == (2.0, 3, 1)
    assert (ours["worst"], ours["worst_of"]) == (3.0, 4)
    assert (ours["times"], ours["times_of"]) == (2.0, 3)
    assert (peer["provider"], peer["value"], peer["worst"]) == ("PyTorch", 4.0, 6.0)
    assert (other["workload"], other["times"]) == ("float32", math.inf)


def test_a_run_leaves_results_with_a_manifest(tmp_path: Path) -> None:
    out = tmp_path / "new" / EXACTNESS
    assert main([*FEW, "--out", str(out)]) == 0
    run = read_results(out)
    assert run.manifest["id"] == EXACTNESS
    assert run.manifest["parameters"] == {"count": 3, "first": 7}
    assert not run.manifest["code_changed"]
    *rows, of_all = exactness_rows(run.table)
    assert {row["result"] for row in rows} == set(random_batches.RESULTS)
    assert (of_all["batches"], of_all["met"]) == ("3", "**no**")  # too few
    assert {path.name for path in out.iterdir()} == {results.RESULTS, provenance.MANIFEST}


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
