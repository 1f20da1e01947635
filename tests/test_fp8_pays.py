"""`fp8_pays.py`: what it says without a Hopper GPU, and that what it times is there."""

from __future__ import annotations

import math
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import fp8_pays
import pytest
import torch
from choice_cases import on_hopper
from fp8_pays import calls_of, check, errors_of, known_workloads, main

from jagged_ranking import results
from jagged_ranking.figures.fp8_goals import BF16, KEPT, KERNEL, WHOLE, fp8_speed_rows
from jagged_ranking.measure.workloads import Workload, setup

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def small(head_dim: int = 64) -> Workload:
    dtype = torch.bfloat16 if DEVICE.type == "cuda" else torch.float32
    return Workload(
        name="small", users=3, heads=2, head_dim=head_dim, max_len=300, distribution="uniform",
        causal=True, dtype=dtype,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("words", "said"),
    [(["A"], "fp8_pays: there is no Hopper GPU here"), (["no such"], "no such is no workload")],
)
def test_bad_words_are_a_line(words: list[str], said: str, capsys, monkeypatch) -> None:
    monkeypatch.setattr("fp8_pays.is_hopper", lambda device: False)
    with pytest.raises(SystemExit) as error:
        main(words)
    assert said in f"{error.value} {capsys.readouterr().err}"


def test_errors_are_of_numbers_as_they_came() -> None:
    errors = errors_of(setup(small(), DEVICE))
    assert errors[BF16] < 0.01 < errors[KERNEL] < 0.1


@pytest.mark.parametrize(
    ("off", "bf16", "said"),
    [
        (0.05, 0.002, None),
        (0.5, 0.002, "fp8_pays: fp8 on G is off by 0.5, not 0.1"),
        (math.nan, 0.002, "fp8 on G is off by nan"),
        (0.05, 0.02, "bf16 on G is off by 0.02, not 0.01"),
    ],
)
def test_who_is_wrong_is_not_timed(off: float, bf16: float, said: str | None) -> None:
    exact = torch.ones(4)
    calls = {BF16: lambda: (exact, None), KERNEL: lambda: (exact * (1 + off), None)}
    with nullcontext() if said is None else pytest.raises(SystemExit, match=said):
        check(calls, {BF16: bf16}, "G")


def test_who_rounds_what_in_each_call(monkeypatch) -> None:
    """Keys are kept in all calls but that which rounds everything."""
    rounded: list[str] = []
    for name in ("attention_schedule", "build_rows"):
        monkeypatch.setattr(fp8_pays, name, lambda *_, **__: None)
    keys, attend = fp8_pays.fp8_keys, fp8_pays.fp8_attention

    def noted(*given):
        rounded.append("keys")
        return keys(*given)

    def noted_queries(*given, **options):
        rounded.append("queries")
        return attend(*given, **options)

    monkeypatch.setattr(fp8_pays, "fp8_keys", noted)
    monkeypatch.setattr(fp8_pays, "fp8_attention", noted_queries)
    calls = calls_of(setup(small(), DEVICE))
    for name, expected in ((BF16, []), (KEPT, ["queries"]), (WHOLE, ["keys", "queries"])):
        rounded.clear()
        calls[name]()
        assert rounded == expected, name


@on_hopper
@pytest.mark.parametrize("head_dim", [64, 128])
def test_all_that_is_timed_runs(head_dim: int) -> None:
    calls = calls_of(setup(small(head_dim), DEVICE))
    assert list(calls) == [BF16, KERNEL, KEPT, WHOLE]
    exact, *others = (call() for call in calls.values())
    for one in others:
        values = one[0] if isinstance(one, tuple) else one.values
        assert (values - exact.values).norm() < 0.1 * exact.values.norm()


@on_hopper
def test_it_leaves_a_result_that_the_page_shows(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("fp8_pays.known_workloads", lambda: {"G": replace(small(128), name="G")})
    assert main(["G", "--rounds", "1", "--repeats", "1", "--out", str(tmp_path)]) == 0
    (row,) = fp8_speed_rows(results.read(tmp_path / results.RESULTS))
    assert (row["workload"], row["at least"]) == ("G", "1.40")


def test_workloads_have_head_dims_of_the_kernel() -> None:
    known = known_workloads()
    assert {"G", "F"} <= set(known)
    assert {one.head_dim for one in known.values()} == {64, 128}
