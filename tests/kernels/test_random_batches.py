"""`random_batches.py` finds what is not exact, and says which batch it was."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
import random_batches
import torch
from random_batches import DTYPES, draw, look_at, main

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
