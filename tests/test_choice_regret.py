"""`choice_regret.py` compares what attention picks with all that could take a call."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from choice_regret import (
    COMPILED,
    PASSES,
    UNFINISHED,
    Batch,
    Draw,
    draw,
    main,
    rows,
    summary,
    taken_by,
)

from jagged_kernels import SiLU
from jagged_kernels.attention import choice
from jagged_kernels.attention.operators import general, plain
from jagged_ranking import provenance, results
from jagged_ranking.figures.choice_goals import CHOICE, picks
from jagged_ranking.figures.result_folder import read_results
from jagged_ranking.measure.timing import Effort

BRIEF = Effort(rounds=1, inner=1, seconds=0.001)
SOFTMAX = Draw((5, 0, 17), 2, 2, 16, torch.float32, {"causal": True})
SILU = Draw((5, 0, 17), 2, 1, 16, torch.float32, {"scores": SiLU(), "window": (9, 0)})


def test_a_number_is_one_batch_of_few_kernels() -> None:
    drawn = [draw(number) for number in range(3 * COMPILED)]
    # Two `RequestKeys` are never equal.
    assert [repr(x) for x in drawn] == [repr(draw(number)) for number in range(3 * COMPILED)]
    assert len({one.lengths for one in drawn}) > 2 * COMPILED
    for one, other in zip(drawn, drawn[COMPILED:], strict=False):
        of_both = [(x.dim, x.dtype, x.heads, x.kv_heads, set(x.options)) for x in (one, other)]
        assert of_both[0] == of_both[1]
    assert {"scores", "causal", "window", "keys"} == {name for x in drawn for name in x.options}


@pytest.mark.parametrize(("drawn", "takers"), [(SOFTMAX, ("short", "plain")),
                                               (SILU, ("short", "general"))])  # fmt: skip
@pytest.mark.parametrize("of_pass", PASSES)
def test_who_is_told_takes_the_pass(drawn: Draw, takers: tuple[str, ...], of_pass: str) -> None:
    batch = Batch(drawn)
    calls, rule = batch.calls(of_pass)
    assert {name.split(",")[0] for name in calls} >= set(takers)
    assert rule in calls
    expected = calls[rule]()
    assert len(expected) == {"forward": 1, "backward": 3}[of_pass]
    for name, call in calls.items():
        for one, other in zip(call(), expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3, msg=name)


def test_a_pass_is_taken_by_whom_it_is_told_and_no_longer() -> None:
    batch = Batch(SOFTMAX)
    before = choice.first_that_pays, plain.pick, general.pick
    for name in ("short", "plain"):
        with taken_by({"forward": name}) as seen:
            batch._forward(batch.schedules[0])
        assert [(of_pass, who) for of_pass, _, who in seen] == [("forward", name)]
    assert (choice.first_that_pays, plain.pick, general.pick) == before


@pytest.fixture
def softmax_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same small call whatever its number, timed briefly."""
    monkeypatch.setattr("choice_regret.draw", lambda _number: SOFTMAX)
    monkeypatch.setattr("choice_regret.rows", lambda number: rows(number, BRIEF))


@pytest.mark.usefixtures("softmax_alone")
def test_each_pass_has_all_that_could_take_it_and_one_pick() -> None:
    found = results.with_config(results.frame(rows(3, BRIEF)), "batch", "picked")
    assert set(found["batch"]) == {3}
    for _, timed in found.groupby("mode"):
        assert {"short", "plain"} <= {name.split(",")[0] for name in timed["provider"]}
        assert timed["picked"].sum() == 1
    assert [(row["batch"], row["pass"]) for row in picks(found).to_dict("records")] == [
        (3, name) for name in PASSES
    ]


@pytest.mark.usefixtures("softmax_alone")
def test_a_run_leaves_results_with_a_manifest(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "new" / CHOICE
    assert main(["--count", "2", "--first", "5", "-n", "1", "--out", str(out)]) == 0
    assert "of 4 passes within 1.03" in capsys.readouterr().out
    run = read_results(out)
    assert run.manifest["id"] == CHOICE
    assert run.manifest["parameters"] == {"count": 2, "first": 5}
    assert not run.manifest["code_changed"]
    assert list(picks(run.table)["batch"]) == [5, 5, 6, 6]
    assert {path.name for path in out.iterdir()} == {results.RESULTS, provenance.MANIFEST}


@pytest.mark.usefixtures("softmax_alone")
def test_some_batches_are_looked_at_in_full(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--look-at", "6", "3", "-n", "1"]) == 0
    said = capsys.readouterr().out.splitlines()
    first, second, *_ = (n for n, line in enumerate(said) if " users of " in line)
    for mode in ("forward", "backward"):
        lines = [line for line in said[first:second] if line.startswith(f"  {mode}, ")]
        times = [float(line.split()[-2]) for line in lines]
        assert len(times) > 1
        assert times == sorted(times)
    with pytest.raises(SystemExit):
        main(["--look-at", "6", "--out", str(tmp_path)])
    assert "--look-at leaves no results" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("softmax_alone")
def test_a_run_that_is_cut_off_leaves_an_older_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["-n", "1", "--out", str(tmp_path)]
    assert main([*words, "--count", "1"]) == 0
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    def cut_off(number: int) -> Iterator[dict[str, Any]]:
        if number == 1:
            raise KeyboardInterrupt
        return rows(number, BRIEF)

    monkeypatch.setattr("choice_regret.rows", cut_off)
    with pytest.raises(KeyboardInterrupt):
        main([*words, "--count", "2"])
    after = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert len(picks(results.read(tmp_path / UNFINISHED))) == len(PASSES)
    assert after.pop(UNFINISHED)
    assert after == before


@pytest.mark.parametrize(("slow", "met"), [(5, "met"), (6, "NOT met")])
def test_the_goal(slow: int, met: str) -> None:
    table = pd.DataFrame({"batch": range(100), "slower": [1.031] * slow + [1.03] * (100 - slow)})
    assert f"goal 95%: {met}), the worst 1.03" in summary(table)


@pytest.mark.gpu
@pytest.mark.parametrize("number", range(4))
def test_every_family_runs_on_random_batches(number: int) -> None:
    found = picks(results.frame(rows(number, BRIEF)))
    assert list(found["pass"]) == list(PASSES)
    assert (found["slower"] >= 1.0).all()
