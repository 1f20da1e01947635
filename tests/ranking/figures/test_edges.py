"""That what the committed figures say is whole: no text leaves its figure or meets another."""

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from matplotlib import rcParams
from matplotlib.figure import Figure
from matplotlib.text import Text
from matplotlib.transforms import Bbox

from jagged_ranking import paths
from jagged_ranking.figures import style
from jagged_ranking.figures.redraw import redraw
from jagged_ranking.figures.result_folder import result_folders

COMMITTED = result_folders(paths.FIGURES)
EDGE, APART = 1.0, 4.0  # points to the edge of the figure, and between titles side by side


def _shown(figure: Figure) -> Iterator[tuple[Text, Bbox]]:
    """Every text that is drawn and its box in points; ticks beyond their axes are none."""
    hidden: set[Text] = set()
    for axes in figure.axes:
        for axis in (axes.xaxis, axes.yaxis):
            low, high = sorted(axis.get_view_interval())
            for tick in (*axis.get_major_ticks(), *axis.get_minor_ticks()):
                if not low <= tick.get_loc() <= high:
                    hidden |= {tick.label1, tick.label2}
    scale = 72 / figure.dpi
    for text in figure.findobj(Text):
        assert isinstance(text, Text)
        if text not in hidden and text.get_visible() and text.get_text().strip():
            yield text, Bbox(text.get_window_extent().get_points() * scale)


@pytest.mark.parametrize("folder", COMMITTED, ids=lambda folder: folder.name)
def test_no_text_leaves_its_figure_or_meets_the_next(folder: Path, drawn: dict[str, Any]) -> None:
    redraw(folder)
    for name, figure in drawn.items():
        with style.look():
            figure.draw_without_rendering()
            figure.set_layout_engine("none")
            figure.set_dpi(rcParams["savefig.dpi"])  # letters are as wide as pixels allow
            figure.draw_without_rendering()
            width, height = (72 * inches for inches in figure.get_size_inches())
            boxes = dict(_shown(figure))
        for text, box in boxes.items():
            assert box.x0 >= EDGE, (name, text.get_text())
            assert box.x1 <= width - EDGE, (name, text.get_text())
            assert box.y0 >= 0, (name, text.get_text())
            assert box.y1 <= height, (name, text.get_text())
        titles = [boxes[axes.title] for axes in figure.axes if axes.title in boxes]
        for one, other in itertools.combinations(titles, 2):
            if one.y0 < other.y1 and other.y0 < one.y1:  # in one row
                assert one.x1 + APART <= other.x0 or other.x1 + APART <= one.x0, name
