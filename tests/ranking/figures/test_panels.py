"""Where points, bars and marks of a panel stand, from a few numbers."""

from typing import Any

import numpy as np
import pandas as pd
import pytest
from matplotlib.figure import Figure

from jagged_ranking.figures import panels, style, sweeps

GONE = float("nan")


@pytest.fixture
def axes() -> Any:
    return Figure().subplots()


def points(*rows: dict[str, Any]) -> pd.DataFrame:
    """Of ours in the sweep over waste, where rows say nothing else."""
    usual = {"provider": "jagged", "group": "waste", "status": "ok", "mode": "forward"}
    return pd.DataFrame([{**usual, **row} for row in rows])


def bars(axes: Any, which: int = 0) -> list[tuple[float, ...]]:
    """(x, low, high) of the error bars of a series."""
    (found,) = axes.containers[which][2]
    ends = [segment.round(6).tolist() for segment in found.get_segments()]
    return [(low[0], low[1], high[1]) for low, high in ends]


def marks(axes: Any, marker: str) -> list[list[float]]:
    """[x, y] of marks at an edge."""
    lines = [line for line in axes.lines if line.get_transform() == axes.get_xaxis_transform()]
    found = [line.get_xydata().round(6).tolist() for line in lines if line.get_marker() == marker]
    return [at for one in found for at in one]


def test_bars_of_a_sweep_reach_from_quartile_to_quartile(axes: Any) -> None:
    table = points(
        {"waste": 0.75, "value": 10.0, "q25": 9.0, "q75": 14.0},
        {"waste": 0.25, "value": 4.0, "q25": 3.0, "q75": 6.0},
        {"waste": 0.5, "value": GONE, "q25": GONE, "q75": GONE, "status": "out_of_memory"},
    )
    handles = panels.sweep_panel(axes, table, group="waste", scale=0.5)
    assert bars(axes) == [(25, 1.5, 3.0), (75, 4.5, 7.0)]  # percent, from the left
    assert marks(axes, "x") == [[50, 0.97]]
    assert list(handles) == [style.look_of("jagged").label, "out of memory"]


def test_dots_are_over_the_unit_of_their_workload(axes: Any) -> None:
    """Of three workloads, where the first was lost."""
    table = points(
        {"workload": "a", "value": GONE, "q25": GONE, "q75": GONE, "status": "error"},
        {"workload": "b", "value": 6.0, "q25": 5.0, "q75": 8.0},
        {"workload": "c", "value": 6.0, "q25": 6.0, "q75": 9.0},
    )
    names = {name: name.upper() for name in "abc"}
    unit = pd.Series([1.0, 2.0, 3.0])
    panels.dot_panel(axes, table, workloads=list(names), labels=names, unit=unit)
    assert bars(axes) == [(1, 2.5, 4.0), (2, 2.0, 3.0)]
    assert marks(axes, "1") == [[0, 0.97]]
    assert [label.get_text() for label in axes.get_xticklabels()] == ["A", "B", "C"]


@pytest.mark.parametrize(("more_is_better", "edge"), [(False, 0.97), (True, 0.03)])
def test_marks_stand_where_the_worst_are(axes: Any, more_is_better: bool, edge: float) -> None:
    table = points({"cap": 10, "value": 1.0, "q25": 1.0, "q75": 1.0})
    lost = points({"cap": 20, "value": GONE, "provider": "flex", "status": "out_of_memory"})
    handles = panels.lines_panel(
        axes, pd.concat([table, lost]), column="cap", order=[10, 20], more_is_better=more_is_better
    )
    assert marks(axes, "x") == [[1, edge]]
    # A mark has the colour of who is lost, which the legend explains.
    assert style.look_of("flex").label in handles


def test_ratios_have_bars_claim_and_marks(axes: Any) -> None:
    """A claim of two readings is a band from one to the other."""
    table = points(
        {"waste": 0.5, "ratio": 4.0, "ratio_low": 3.0, "ratio_high": 6.0, "baseline_status": "ok"},
        {
            **dict.fromkeys(("ratio", "ratio_low", "ratio_high"), GONE),
            **{"waste": 0.9, "baseline_status": "out_of_memory"},
        },
    )
    claim = panels.Claim(2.0, "paper", upper=2.5)
    panels.ratio_panel(axes, table, group="waste", claim=claim, title="t")
    assert bars(axes) == [(50, 3.0, 6.0)]
    assert marks(axes, "x") == [[90, 0.97]]
    (band,) = axes.patches
    assert (band.get_y(), band.get_y() + band.get_height()) == (2.0, 2.5)
    (line,) = [line for line in axes.lines if line.get_color() == style.PAPER_COLOR]
    assert set(line.get_ydata()) == {2.5}


def test_bytes_are_in_decimal_units() -> None:
    assert sweeps.bytes_unit(pd.DataFrame({"value": [1.0, 1e9]})) == (1e9, "GB")
    assert sweeps.bytes_unit(pd.DataFrame({"value": [np.nan, 9.9e8]})) == (1e6, "MB")


def test_the_limit_is_in_the_unit_of_the_values_and_of_its_mode() -> None:
    table = points(
        *(
            {
                **{"mode": mode, "workload": "waste 50%", "waste": 0.5, "limit_ms": limit},
                **{"value": 4.0, "q25": 4.0, "q75": 4.0, "dtype": "bfloat16", "B": 2, "H": 1},
                **{"D": 64, "max_len": 8, "tokens": 8, "distribution": "lognormal"},
            }
            for mode, limit in (("forward", 1.0), ("forward+backward", 3.0))
        )
    )
    with style.look():
        figure = sweeps.workloads_figure(table, {}, unit=1.0, ylabel="ms", limits=True)
    limits = [panel.collections[-1].get_segments() for panel in figure.axes]
    assert [{float(y) for _, y in one[0]} for one in limits] == [{1.0}, {3.0}]


def test_users_are_not_held_fixed_where_they_change() -> None:
    """But what they have together with padding may be."""
    facts = {"D": 64, "H": 1, "distribution": "lognormal", "waste": 0.5}
    table = pd.DataFrame([{**facts, "B": 4, "max_len": 8}, {**facts, "B": 2, "max_len": 16}])
    assert sweeps.held_fixed(table, "length") == (
        "held fixed: 32 tokens with padding, lognormal lengths (50% waste), 1 head, head_dim 64"
    )
    table = table.assign(max_len=8)
    assert "tokens" not in sweeps.held_fixed(table.assign(tokens=[7, 7]), "head_dim")
    assert sweeps.held_fixed(table.assign(B=4), "waste") == (
        "held fixed: 4 users, the longest 8, 1 head, head_dim 64"
    )
