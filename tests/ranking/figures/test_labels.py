"""What is written into figures can be read: it lies over nothing, and nothing over it."""

import itertools
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from made_up_results import MANIFEST, target_results
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.text import Annotation

from jagged_ranking.figures import memory, speed, style, target
from jagged_ranking.figures.labels import place_labels, reference_line
from jagged_ranking.figures.result_folder import read_results
from jagged_ranking.figures.sweeps import Quantity, figures_of

COMMITTED = Path(__file__).parents[3] / "figures"


def _covered(label: Annotation, axes: Axes) -> int:
    """How many curves a label lies over; lines across the axes are none."""
    box, data = label.get_window_extent(), axes.transData
    curves = [line.get_path() for line in axes.lines if line.get_transform() == data]
    return sum(path.transformed(data).intersects_bbox(box, filled=False) for path in curves)


def _labels(figure: Figure) -> list[tuple[str, int]]:
    return [
        (text.get_text(), _covered(text, axes))
        for axes in figure.axes
        for text in axes.texts
        if isinstance(text, Annotation) and text.get_text().startswith("paper")
    ]


@pytest.mark.parametrize(
    ("height", "expected"),
    [
        # Nothing near; a curve above the right end; about it; all along the line, and above it.
        (lambda x: 0 * x + 9.5, ("right", "bottom")),
        (lambda x: 5.4 + 4 * (1 - x), ("right", "top")),
        (lambda x: 9 - 8 * (x > 0.5) * (np.arange(len(x)) % 2), ("left", "bottom")),
        (lambda x: 5.2 + 0.6 * (np.arange(len(x)) % 2), ("right", "top")),
    ],
)
def test_a_label_goes_where_no_curve_is(
    height: Callable[[np.ndarray], np.ndarray], expected: tuple[str, str]
) -> None:
    figure = Figure(figsize=(3, 2))
    axes = figure.subplots()
    x = np.linspace(0, 1, 41)
    axes.plot(x, height(x))
    axes.set_ylim(0, 10)
    axes.set_xlim(0, 1)
    reference_line(axes, 5.0, "paper: up to 5x", color=style.PAPER_COLOR)
    place_labels(figure)
    label = axes.texts[0]
    assert (label.get_horizontalalignment(), label.get_verticalalignment()) == expected
    assert _labels(figure) == [("paper: up to 5x", 0)]


def test_a_label_that_cannot_but_cover_a_curve_covers_least() -> None:
    figure = Figure(figsize=(3, 2))
    axes = figure.subplots()
    for y in np.linspace(0, 10, 200):
        axes.plot([0, 1] if not 4 < y < 5 else [0, 0.6], [y, y])
    axes.set_ylim(0, 10)
    axes.set_xlim(0, 1)
    reference_line(axes, 5.0, "paper: 5x", color=style.PAPER_COLOR)
    place_labels(figure)
    assert axes.texts[0].get_verticalalignment() == "top"
    assert axes.texts[0].get_horizontalalignment() == "right"


@pytest.mark.parametrize(
    ("quantity", "notebook"), [(speed.LATENCY, "01_speed"), (memory.MEMORY, "02_memory")]
)
def test_no_claim_hides_a_committed_result(quantity: Quantity, notebook: str) -> None:
    read = read_results(COMMITTED / notebook)
    with style.look():
        figure = figures_of(quantity, read.table, read.manifest)[quantity.ratio]
        figure.draw_without_rendering()
        place_labels(figure)
        labels = _labels(figure)
    assert len(labels) == 4
    assert all(hidden == 0 for _, hidden in labels), labels


@pytest.mark.parametrize(
    ("low", "high", "said"),
    [
        (0.19, 0.62, ["0.2", "0.3", "0.5"]),
        (0.78, 3.9, ["1", "1.5", "2", "3"]),
        (0.55, 3.6, ["0.7", "1", "1.5", "2", "3"]),  # 1, 2 alone would leave most to be guessed
        (0.4, 30, ["0.5", "1", "2", "5", "10", "20"]),
        (0.4, 300, ["1", "3", "10", "30", "100", "300"]),
        (0.4, 3000, ["1", "10", "100", "1000"]),
    ],
)
def test_an_axis_has_ticks_enough_to_read(low: float, high: float, said: list[str]) -> None:
    axes = Figure(figsize=(3, 2)).subplots()
    style.log_y_axis(axes, low, high)
    ticks = zip(axes.get_yticks(), axes.get_yticklabels(), strict=True)
    assert [label.get_text() for at, label in ticks if low <= at <= high] == said


@pytest.mark.parametrize(
    ("name", "lines"),
    [
        ("T1", ["T1"]),
        ("ml1m_ge4", ["ml1m_ge4"]),
        ("foursquare_nyc_stan", ["foursquare", "nyc_stan"]),
        ("ml_latest_small (139 of 610 users)", ["ml_latest", "small (139", "of 610", "users)"]),
        ("onewordthatislongerthanthat", ["onewordthatislongerthanthat"]),
    ],
)
def test_long_names_are_broken_where_they_can_be(name: str, lines: list[str]) -> None:
    assert style.broken(name).split("\n") == lines


def test_names_of_data_sets_do_not_run_into_each_other(drawn: dict[str, Figure]) -> None:
    table = target_results().replace({"workload": {"T5": "ml_latest_small (139 of 610 users)"}})
    assert target.draw(table, {**MANIFEST, "id": "03_target_attention"}, Path("nowhere")) == []
    for name in ("latency", "ratios", "memory"):
        figure = drawn[f"03_target_attention_{name}"]
        figure.draw_without_rendering()
        for axes in figure.axes:
            boxes = [text.get_window_extent() for text in axes.get_xticklabels() if text.get_text()]
            assert all(left.x1 < right.x0 for left, right in itertools.pairwise(boxes)), name
