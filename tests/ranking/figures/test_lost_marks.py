"""Who ran out of memory or failed has a mark in each figure where others have a number."""

from pathlib import Path
from typing import Any

import pandas as pd
from made_up_rankers import throughput_results
from made_up_results import (
    MANIFEST,
    attention_results,
    interaction_results,
    sparse_results,
    target_results,
)
from made_up_scaling import scaling_results
from matplotlib.text import Text

from jagged_ranking import results
from jagged_ranking.figures import (
    operation_figures,
    scaling_figures,
    sparse_figures,
    speed,
    style,
    target,
    throughput_figures,
)

NOWHERE = Path("nowhere")
OUT_OF_MEMORY, FAILED = "x", "1"  # the markers


def lost(table: pd.DataFrame, status: str, **where: Any) -> pd.DataFrame:
    """Where these rows have this status, and no numbers."""
    table = table.copy()
    at = results.select(table, **where).index
    assert len(at)
    table.loc[at, ["value", "q10", "q25", "q75", "q90"]] = float("nan")
    table.loc[at, "status"] = status
    return table


def marks(panel: Any, marker: str, color: str | None = None) -> list[tuple[float, float]]:
    """Where the marks of a panel stand, rounded to places of workloads."""
    edges = (panel.get_xaxis_transform(), panel.get_yaxis_transform())
    return [
        (round(float(x), 3), round(float(y), 3))
        for line in panel.lines
        if line.get_marker() == marker and line.get_transform() in edges
        if color in (None, line.get_color())
        for x, y in zip(line.get_xdata(), line.get_ydata(), strict=True)
    ]


def said_by(figure: Any) -> list[str]:
    return [text.get_text() for text in figure.findobj(Text)]


def test_parts_of_a_step_have_a_mark_where_a_bar_would_be(drawn: dict[str, Any]) -> None:
    throughput_figures.draw(throughput_results(), MANIFEST, NOWHERE)
    figure = drawn["01_speed_parts"]
    none, much = figure.axes  # every score fits in memory without padding alone
    assert not marks(none, OUT_OF_MEMORY)
    # Of SASRec ours, dense, flash, nested, and a gap of 0.7; of HSTU ours and dense; twice each.
    places = [1.0, 5.7, 10.4, 13.1]
    assert marks(much, OUT_OF_MEMORY) == [(place, 0.8) for place in places]
    kinds = zip(much.get_xticks(), much.get_xticklabels(), strict=True)
    assert [round(float(at), 3) for at, kind in kinds if kind.get_text() == "dense"] == places
    assert not [bar for bar in much.patches if 0.5 < bar.get_x() + bar.get_width() / 2 < 1.5]
    assert "out of memory" in said_by(figure)


def test_modes_have_a_mark_below_where_the_few_samples_are(drawn: dict[str, Any]) -> None:
    table = throughput_results()
    table = lost(table, "error", provider="jagged", mode="CUDA graph", op="throughput")
    throughput_figures.draw(table, MANIFEST, NOWHERE)
    figure = drawn["01_speed_modes"]
    sasrec, hstu = figure.axes
    dense, ours = (style.look_of(name).color for name in ("padded_dense", "jagged"))
    for panel in (sasrec, hstu):
        assert marks(panel, OUT_OF_MEMORY, dense) == [(0, 0.03)]  # eager
        assert marks(panel, FAILED, ours) == [(2, 0.03)]  # by a CUDA graph
    # Whoever has no number anywhere is in the legend, too: the mark has its colour.
    legend = [text.get_text() for text in figure.legends[0].get_texts()]
    assert {"padded dense", "out of memory", "failed"} <= set(legend)


def test_a_step_that_ours_did_not_take_is_marked(drawn: dict[str, Any]) -> None:
    table = throughput_results()
    where = {"provider": "jagged", "op": "throughput", "workload": "waste 85%"}
    throughput_figures.draw(lost(table, "error", **where), MANIFEST, NOWHERE)
    ours = style.look_of("jagged").color
    first, *_, last = drawn["01_speed_time"].axes
    batches = [label.get_text().replace("\n", " ") for label in last.get_xticklabels()]
    ((at, height),) = marks(first, FAILED, ours)
    assert batches[round(at)] == "waste 85% 85% waste"
    assert height == 0.97


def test_a_workload_that_ours_failed_on_stays_beside_the_others(drawn: dict[str, Any]) -> None:
    table = results.select(attention_results(), workload=["B", "C"])
    where = {"provider": "jagged", "workload": "C", "metric": "latency", "op": "attention"}
    speed.draw(lost(table, "out_of_memory", **where), MANIFEST, NOWHERE)
    forward, backward = drawn["01_speed_peers"].axes
    named = [label.get_text().splitlines()[0] for label in backward.get_xticklabels()]
    assert named == ["B", "C"]
    ((at, _),) = marks(forward, OUT_OF_MEMORY, style.look_of("jagged").color)
    assert round(at) == 1


def test_operations_have_a_mark_at_the_right(drawn: dict[str, Any]) -> None:
    table = results.select(interaction_results(), op=["jagged_sum", "jagged_mean"])
    of_mean = {"op": "jagged_mean", "workload": "users 8192"}
    table = lost(table, "out_of_memory", provider="padded", **of_mean)
    table = lost(table, "error", provider="jagged", op="jagged_sum", workload="users 8192")
    operation_figures.draw(table, MANIFEST, NOWHERE)
    for name in ("peers", "memory"):
        panel = drawn[f"01_speed_{name}"].axes[0]
        names = [label.get_text() for label in panel.get_yticklabels()]
        ((right, place),) = marks(panel, OUT_OF_MEMORY, style.look_of("padded").color)
        assert names[round(place)] == "jagged_mean"
        assert right > 0.95
        assert "out of memory" in said_by(drawn[f"01_speed_{name}"])
    panel = drawn["01_speed_limit"].axes[0]
    names = [label.get_text() for label in panel.get_yticklabels()]
    assert {names[round(place)] for _, place in marks(panel, FAILED)} == {"jagged_sum"}


def test_peers_over_few_queries_are_marked_beside_ratios(drawn: dict[str, Any]) -> None:
    table = target_results()
    where = {"workload": "T3", "mode": "forward", "metric": "latency"}
    table = lost(table, "out_of_memory", provider="varlen_attn", **where)
    target.draw(lost(table, "error", provider="jagged", **where), MANIFEST, NOWHERE)
    left, right, *later = drawn["01_speed_ratios"].axes
    place = [label.get_text() for label in later[0].get_xticklabels()].index("T3")
    assert marks(right, OUT_OF_MEMORY) == [(place, 0.97)]
    assert marks(left, FAILED) == [(place, 0.97)]
    assert not any(marks(panel, marker) for panel in later for marker in (OUT_OF_MEMORY, FAILED))


def test_who_ran_out_of_memory_beside_speedups_is_marked(drawn: dict[str, Any]) -> None:
    where = {"provider": "varlen_attn", "workload": "length 65536", "mode": "forward"}
    sparse_figures.draw(lost(sparse_results(), "out_of_memory", **where), MANIFEST, NOWHERE)
    forward, backward = drawn["01_speed_speedup"].axes
    color = style.look_of("varlen_attn").color
    assert marks(forward, OUT_OF_MEMORY, color) == [(2, 0.97)]  # the longest of three
    assert not marks(backward, OUT_OF_MEMORY)


def test_ranks_that_failed_are_marked_below(drawn: dict[str, Any]) -> None:
    where = {"provider": "by_users", "workload": "4 ranks", "op": "scaling"}
    table = lost(scaling_results(), "error", **where)
    scaling_figures.draw(table, MANIFEST, NOWHERE)
    color = style.look_of("by_users").color
    for panel in drawn["01_speed_efficiency"].axes:
        assert (4, 0.03) in marks(panel, FAILED, color)
