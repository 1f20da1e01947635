"""What stands for what in figures and tables of quality, from a few numbers."""

from pathlib import Path
from typing import Any

import pytest
from made_up_results import MANIFEST
from matplotlib.patches import Rectangle

from jagged_ranking import results
from jagged_ranking.figures import quality, style, tables


def score(model: str, metric: str, value: float, **config: Any) -> dict[str, Any]:
    return results.row(
        op="ranking", provider=model, workload="w", mode="test", metric=metric, value=value,
        unit="1", config=config,
    )  # fmt: skip


def test_a_box_is_the_mean_and_a_sample_deviation_to_both_sides(drawn: dict[str, Any]) -> None:
    """Of 0.6 and 0.8: 0.7, and the root of 0.02."""
    rows = [score("din", "auc", value, seed=seed) for seed, value in enumerate((0.6, 0.8))]
    quality.draw(results.frame(rows), MANIFEST, Path("nowhere"))
    panel = drawn["01_speed_scores"].axes[0]
    (box,) = [patch for patch in panel.patches if isinstance(patch, Rectangle)]
    sd = 0.02**0.5
    assert (box.get_x(), box.get_width()) == pytest.approx((0.7 - sd, 2 * sd))
    seeds, mean, *_ = panel.lines
    assert list(seeds.get_xdata()) == [0.6, 0.8]
    assert list(mean.get_xdata()) == pytest.approx([0.7, 0.7])


def test_an_interval_reaches_from_end_to_end(drawn: dict[str, Any]) -> None:
    rows = [score("din", "auc", 0.7), score("din", "auc_difference", 0.2, low=-0.1, high=0.4)]
    quality.draw(results.frame(rows), MANIFEST, Path("nowhere"))
    panel = drawn["01_speed_difference"].axes[0]
    color = style.look_of("din").color
    interval, middle = [line for line in panel.lines if line.get_color() == color]
    assert list(interval.get_xdata()) == [-0.1, 0.4]
    assert list(middle.get_xdata()) == [0.2]


@pytest.mark.parametrize(
    ("low", "high", "side"),
    [(0.01, 0.2, 1), (0.0, 0.2, 0), (-0.2, 0.2, 0), (-0.2, 0.0, 0), (-0.2, -0.01, -1)],
)
def test_an_interval_that_touches_zero_is_on_no_side(low: float, high: float, side: int) -> None:
    rows = [score("din", "auc_difference", 0.0, low=low, high=high)]
    assert quality.differences(results.frame(rows))["side"].tolist() == [side]


def test_seeds_are_counted_of_models_alone() -> None:
    """Where a metric has fewer, the most count."""
    rows = [score("din", "auc", 0.7, seed=seed) for seed in range(3)]
    rows += [score("din", "gauc", 0.7, seed=0), score("counts", "auc", 0.6)]
    ((_, table),) = tables.quality(results.frame(rows))
    seeds = table.set_index("model")["seeds"].to_dict()
    assert seeds == {"floor: counts": "", "DIN": "3"}
