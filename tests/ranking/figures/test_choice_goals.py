"""What attention picks against the fastest that could take a call, from made-up times."""

from pathlib import Path

import pandas as pd
import pytest
from kept_figures import goals_before_and_after
from made_up_results import MANIFEST

from jagged_ranking import results
from jagged_ranking.figures.choice_goals import CHOICE, choice_rows, slow_picks
from jagged_ranking.figures.tables import summaries

TITLE = "Attention: the pick against the fastest that could take a call"


def _timed(slow: int, batches: int = 10) -> pd.DataFrame:
    """Forward and backward of each batch by two kernels; the pick of `slow` backwards is slower,
    by a tenth more from batch to batch."""
    return results.frame(
        results.row(
            op=CHOICE,
            provider=provider,
            workload=f"call {batch}",
            mode=of_pass,
            metric="latency",
            unit="ms",
            value=2.0 + 0.2 * batch * (picked and of_pass == "backward" and batch <= slow),
            config={"batch": batch, "picked": picked},
        )
        for batch in range(1, batches + 1)
        for of_pass in ("forward", "backward")
        for provider, picked in (("plain", False), ("general", True))
    )


@pytest.mark.parametrize(("slow", "share", "met"), [(1, "95.0%", "yes"), (2, "90.0%", "**no**")])
def test_the_goal_is_of_both_passes(slow: int, share: str, met: str) -> None:
    forward, backward, both = choice_rows(_timed(slow))
    assert (forward["at most 3% slower"], forward["met"]) == ("100.0%", "")
    assert forward["the slowest pick"] == "1.00x"
    assert (both["timed"], both["at most 3% slower"], both["met"]) == ("20", share, met)
    for row in (backward, both):
        assert (row["the slowest pick"], row["on"]) == (f"1.{slow}0x", f"call {slow}")


def test_slow_picks_are_named_the_slowest_first() -> None:
    found = slow_picks(_timed(3))
    assert list(found["call"]) == ["call 3", "call 2", "call 1"]
    assert list(found["slower"]) == ["1.30x", "1.20x", "1.10x"]
    assert set(found["pick"]) == {"general"}
    assert set(found["fastest"]) == {"plain"}
    ((caption, shown),) = summaries(_timed(3))
    assert "more than 3% slower" in caption
    assert len(shown) == 3


def test_the_page_of_goals_has_it(tmp_path: Path) -> None:
    made_by = {**MANIFEST, "id": CHOICE}
    before, after = goals_before_and_after(_timed(2), made_by, TITLE, tmp_path)
    assert "Not measured." in before.split("###")[0]
    assert "| 20 | 90.0% | 95% | 1.20x | call 2 | **no** |" in after


def test_other_results_have_no_picks() -> None:
    other = results.frame([])
    assert choice_rows(other) == []
    assert slow_picks(other).empty


def test_of_some_kernels_alone_there_are_no_picks() -> None:
    table = _timed(2)
    assert slow_picks(table.loc[table["provider"] == "plain", :]).empty
    assert not summaries(table.loc[table["provider"] == "plain", :])


@pytest.mark.parametrize(("slower", "share"), [(1.03, "100.0%"), (1.031, "50.0%")])
def test_a_pick_that_is_3_percent_slower_is_near(slower: float, share: str) -> None:
    table = _timed(0, batches=1)
    backward = results.select(table, mode="backward", provider="general").index
    table["value"] = 1.0
    table.loc[backward, "value"] = slower
    *_, both = choice_rows(table)
    assert both["at most 3% slower"] == share


def test_the_share_is_judged_as_it_is_shown() -> None:
    """949.6 of 1,000 are 95.0%, and 949 are not."""
    for slow, share, met in ((252, "95.0%", "yes"), (255, "94.9%", "**no**")):
        table = _timed(0, batches=2500)
        backward = results.select(table, mode="backward", provider="general").index[:slow]
        table.loc[backward, "value"] *= 2
        *_, both = choice_rows(table)
        assert (both["at most 3% slower"], both["met"]) == (share, met)
