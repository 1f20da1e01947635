"""Figure, table and goals of training from disk, from made-up results."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from made_up_rankers import throughput_results
from made_up_results import MANIFEST
from made_up_streaming import streaming_results
from matplotlib.text import Text

from jagged_ranking import results
from jagged_ranking.figures import streaming_figures, tables
from jagged_ranking.figures.streaming_goals import streaming_rows

ID = "10_training_throughput"


def changed(metric: str, workload: str, value: float) -> pd.DataFrame:
    table = streaming_results()
    at = results.select(table, metric=metric, workload=workload).index
    assert len(at) == 1
    table.loc[at, "value"] = value
    return table


def test_the_figure_shows_every_log_with_limit_and_goal(drawn: dict[str, Any]) -> None:
    streaming_figures.draw(streaming_results(), {**MANIFEST, "id": ID}, Path("nowhere"))
    assert list(drawn) == [f"{ID}_streaming"]
    figure = drawn[f"{ID}_streaming"]
    said = "\n".join(text.get_text() for text in figure.findobj(Text))
    for wanted in ("limit: 4 GiB", "goal: below 5%", "HSTU, 512 requests", "the log's columns"):
        assert wanted in said
    for panel in figure.axes:
        assert [label.get_text() for label in panel.get_xticklabels()] == ["1M", "10M", "50M"]
    memory = figure.axes[0].get_lines()[0]
    assert list(memory.get_ydata()) == pytest.approx([1.0, 1.05, 1.3])
    assert list(memory.get_xdata()) == [1e6, 1e7, 5e7]


def test_nothing_is_drawn_of_other_results(drawn: dict[str, Any]) -> None:
    streaming_figures.draw(throughput_results(), {**MANIFEST, "id": ID}, Path("nowhere"))
    assert not drawn
    assert streaming_rows(throughput_results()) == []
    assert tables.streaming(throughput_results()).empty


def test_memory_and_waiting_are_held_against_their_limits() -> None:
    rows = {row["events"]: row for row in streaming_rows(streaming_results())}
    assert [row["met"] for row in rows.values()] == ["yes"] * 3
    longest = rows["50,000,000"]
    assert longest["memory (GiB)"] == "1.30"
    assert longest["waits"] == "3.0%"
    assert longest["bytes an event more"] == f"{0.3 * 2**30 / 49e6:.1f}"
    assert rows["1,000,000"]["bytes an event more"] == ""
    for metric, value in (("validated_memory", 4.5 * 2**30), ("wait_share", 0.05)):
        worse = streaming_rows(changed(metric, "50,000,000 events", value))
        assert [row["met"] for row in worse] == ["yes", "yes", "**no**"]
    growing = streaming_rows(changed("validated_memory", "10,000,000 events", 1.2 * 2**30))
    assert [row["met"] for row in growing] == ["yes", "**no**", "yes"]


def test_a_cpu_says_nothing_about_waiting_and_short_logs_nothing_about_growth() -> None:
    rows = streaming_rows(streaming_results(device="CPU (some)", device_type="cpu"))
    assert {row["below"] for row in rows} == {""}
    assert [row["met"] for row in rows] == ["yes"] * 3
    table = streaming_results()
    short = results.select(table, workload="1,000,000 events")
    config = short["config"].str.replace('"events": 1000000', '"events": 5000')
    rows = streaming_rows(pd.concat([short.assign(config=config, workload="5,000 events")]))
    assert (rows[0]["events"], rows[0]["bytes an event more"]) == ("5,000", "")
    assert rows[-1] == {"events": "50,000,000", "met": "not measured"}


def test_a_log_that_failed_is_a_row_that_says_nothing_of_its_goals(drawn: dict[str, Any]) -> None:
    table = results.select(streaming_results(), workload=["1,000,000 events", "10,000,000 events"])
    lost = results.row(
        op="streaming", provider="from_disk", workload="50,000,000 events", mode="train",
        metric="samples_per_second", unit="1/s", status="error", message="prepare: no space",
        config={"events": 50_000_000, "model": "hstu", "device": MANIFEST["device"]},
    )  # fmt: skip
    table = pd.concat([table, results.frame([lost])], ignore_index=True)
    assert streaming_rows(table)[-1]["met"] == "not measured"
    streaming_figures.draw(table, {**MANIFEST, "id": ID}, Path("nowhere"))
    assert len(drawn[f"{ID}_streaming"].axes[0].get_lines()[0].get_xdata()) == 2


@pytest.mark.parametrize(
    ("share", "said"),
    [(0.0494, ("4.9%", "yes")), (0.0496, ("5.0%", "**no**")), (0.05, ("5.0%", "**no**"))],
)
def test_waiting_is_judged_as_it_is_shown(share: float, said: tuple[str, str]) -> None:
    *_, row = streaming_rows(changed("wait_share", "50,000,000 events", share))
    assert (row["waits"], row["met"]) == said
    on_cpu = streaming_results(device="CPU (some)", device_type="cpu")
    on_cpu.loc[on_cpu["metric"] == "wait_share", "value"] = share
    assert {row["met"] for row in streaming_rows(on_cpu)} == {"yes"}


def test_limits_hold_up_to_50_million_events_and_growth_from_one() -> None:
    """A log of 5,000 events is no measure of what each event more takes."""
    table = streaming_results()
    short = results.select(table, workload="1,000,000 events")
    config = short["config"].str.replace('"events": 1000000', '"events": 5000')
    short = short.assign(config=config, workload="5,000 events")
    rows = streaming_rows(pd.concat([table.iloc[::-1], short]))  # in no order
    assert [row["events"] for row in rows] == ["5,000", "1,000,000", "10,000,000", "50,000,000"]
    more = [row["bytes an event more"] for row in rows]
    assert more == ["", "", f"{0.05 * 2**30 / 9e6:.1f}", f"{0.3 * 2**30 / 49e6:.1f}"]
    assert [row["limit"] for row in rows] == ["4.00"] * 4
    longer = table["config"].str.replace('"events": 50000000', '"events": 50000001')
    assert streaming_rows(table.assign(config=longer))[-1]["limit"] == ""


def test_sizes_are_in_gibibytes(drawn: dict[str, Any]) -> None:
    """60 bytes an event; a limit of 4 GiB."""
    streaming_figures.draw(streaming_results(), {**MANIFEST, "id": ID}, Path("nowhere"))
    _, size, limit = drawn[f"{ID}_streaming"].axes[0].get_lines()
    assert list(size.get_ydata()) == pytest.approx([60 * n / 2**30 for n in (1e6, 1e7, 5e7)])
    assert set(limit.get_ydata()) == {4.0}
    assert [row["on disk (GiB)"] for row in streaming_rows(streaming_results())] == [
        "0.0559", "0.559", "2.79"
    ]  # fmt: skip
