"""Labels of reference lines, put where they hide nothing of what is drawn."""

import itertools

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.text import Annotation
from matplotlib.transforms import Bbox

_MARK = "label of a reference line"
_GAP = 2.5  # points between a line and its label
_MARGIN = 3.0  # pixels around a label that a curve should leave free
_STEPS = 200  # points that a piece of a curve is looked at


def reference_line(axes: Axes, value: float, label: str, *, color: str) -> None:
    """A line across the axes; where its label comes to stand, `place_labels` says."""
    axes.axhline(value, color=color, linewidth=0.9, linestyle=(0, (4, 2)), zorder=1.5)
    axes.annotate(
        label,
        (0.0, value),
        xycoords=("axes fraction", "data"),
        xytext=(0, 0),
        textcoords="offset points",
        color=color,
        fontsize=6,
        bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.75, "pad": 0.6},
        zorder=6,
        gid=_MARK,
    )


def place_labels(figure: Figure) -> None:
    """Move the label of each reference line to where the fewest of the curves run.

    To be called when the axes stand where they will be drawn, and have their limits.
    """
    for axes in figure.axes:
        drawn = _drawn(axes)
        for label in axes.texts:
            if isinstance(label, Annotation) and label.get_gid() == _MARK:
                _place(label, drawn)


def _place(label: Annotation, drawn: np.ndarray) -> None:
    """The first of the places that covers least: ends before the middle, above before below."""
    value = label.xy[1]
    places = [(x, up) for x in (0.995, 0.005, 0.5, 0.25, 0.75) for up in (True, False)]
    found = []
    for number, (x, up) in enumerate(places):
        _move(label, x, value, up=up)
        found.append((_inside(label.get_window_extent().padded(_MARGIN), drawn), number))
    x, up = places[min(found)[1]]
    _move(label, x, value, up=up)


def _move(label: Annotation, x: float, value: float, *, up: bool) -> None:
    label.xy = (x, value)
    label.set_position((0, _GAP if up else -_GAP))
    label.set_verticalalignment("bottom" if up else "top")
    label.set_horizontalalignment("right" if x > 0.9 else "left" if x < 0.1 else "center")


def _drawn(axes: Axes) -> np.ndarray:
    return np.concatenate([np.empty((0, 2)), *(_points(axes, line) for line in axes.lines)])


def _points(axes: Axes, line: Line2D) -> np.ndarray:
    """A curve as many points, in pixels; none for a straight line across the axes."""
    if line.get_transform() != axes.transData:
        return np.empty((0, 2))
    corners = axes.transData.transform(np.asarray(line.get_xydata(), float))
    corners = corners[np.isfinite(corners).all(axis=1)]
    if len(corners) < 2 or line.get_linestyle() == "None":
        return corners
    share = np.linspace(0, 1, _STEPS)[:, None]
    return np.concatenate([a + share * (b - a) for a, b in itertools.pairwise(corners)])


def _inside(box: Bbox, points: np.ndarray) -> int:
    (left, low), (right, high) = box.get_points()
    x, y = points.T
    return int(((x >= left) & (x <= right) & (y >= low) & (y <= high)).sum())
