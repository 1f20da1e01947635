"""`choice_regret.py` compares what attention picks with all that could take a call."""

from __future__ import annotations

import pandas as pd
import pytest
import torch
from choice_regret import COMPILED, PASSES, Batch, Draw, draw, rows, summary, taken_by

from jagged_kernels import SiLU
from jagged_kernels.attention import choice
from jagged_kernels.attention.operators import general, plain
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


def test_rows_say_how_much_slower_the_pick_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("choice_regret.draw", lambda _number: SOFTMAX)
    found = list(rows(3, BRIEF))
    assert [(row["batch"], row["pass"]) for row in found] == [(3, name) for name in PASSES]
    for row in found:
        assert row["slower"] == row["ms"] / row["its ms"] >= 1.0


@pytest.mark.parametrize(("slow", "met"), [(5, "met"), (6, "NOT met")])
def test_the_goal(slow: int, met: str) -> None:
    table = pd.DataFrame({"batch": range(100), "slower": [1.031] * slow + [1.03] * (100 - slow)})
    assert f"goal 95%: {met}), the worst 1.03" in summary(table)


@pytest.mark.gpu
@pytest.mark.parametrize("number", range(4))
def test_every_family_runs_on_random_batches(number: int) -> None:
    for row in rows(number, BRIEF):
        assert row["pick"]
        assert row["slower"] >= 1.0
