"""Metrics as rows of results."""

import json
import math
from typing import Any

import numpy as np
import pytest

from jagged_ranking.evaluation.bootstrap import difference, redrawn
from jagged_ranking.evaluation.evaluate import Evaluation
from jagged_ranking.evaluation.metrics import METRICS
from jagged_ranking.evaluation.rows import ORDER_ALONE, Differences, metric_row
from jagged_ranking.models.model_config import LOSSES

WHERE: dict[str, Any] = {"op": "ranking", "provider": "din", "workload": "log", "mode": "test"}
NEEDS = "needs both labels, of one user or one request"


def scored(rng: np.random.Generator, *, label: np.ndarray) -> Evaluation:
    user = np.arange(len(label)) // 4
    return Evaluation("test", rng.random(len(label)), user, user, label, dict.fromkeys(METRICS, 0))


def test_a_row_says_its_unit_and_why_there_is_no_number() -> None:
    row = metric_row("log_loss", 0.5, config={"seed": 3}, **WHERE)
    assert (row["value"], row["unit"], row["status"], row["message"]) == (0.5, "nats", "ok", "")
    assert json.loads(row["config"]) == {"seed": 3}
    assert metric_row("auc", 0.5, **WHERE)["unit"] == "1"
    assert metric_row("seconds", 0.5, unit="s", **WHERE)["unit"] == "s"
    row = metric_row("gauc", math.nan, **WHERE)
    assert (row["status"], row["message"]) == ("unsupported", NEEDS)


def test_differences_are_those_of_the_bootstrap() -> None:
    rng = np.random.default_rng(0)
    label = rng.integers(0, 2, 40)
    ours, theirs = [scored(rng, label=label) for _ in range(3)], [scored(rng, label=label)]
    metrics, options = ("gauc", "log_loss", "ne"), {"replicates": 20, "train_ctr": 0.3}
    rows = Differences(theirs, metrics, name="gain", **options).rows(
        ours, config={"cap": 5}, **WHERE
    )
    of = (metrics, ours[0].user, ours[0].request, label)
    a = redrawn(*of, np.stack([one.probability for one in ours]), **options)
    b = redrawn(*of, theirs[0].probability, **options)
    for metric, row in zip(metrics, rows, strict=True):
        expected = difference(a[metric], b[metric])
        assert (row["metric"], row["status"]) == (f"{metric}_gain", "ok")
        assert row["value"] == expected.value
        assert row["unit"] == ("nats" if metric == "log_loss" else "1")
        assert json.loads(row["config"]) == {
            "cap": 5, "level": 0.95, "low": expected.low, "high": expected.high, "replicates": 20,
            "seeds": 3,
        }  # fmt: skip


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_difference_of_what_does_not_exist_has_no_bounds() -> None:
    one = [scored(np.random.default_rng(0), label=np.ones(8, np.int64))]
    (row,) = Differences(one, ["gauc"], replicates=5).rows(one, config={}, **WHERE)
    assert math.isnan(row["value"])
    assert (row["status"], row["message"]) == ("unsupported", NEEDS)
    said = json.loads(row["config"])
    assert (said["low"], said["high"]) == (None, None)


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("loss", LOSSES)
def test_what_is_trained_on_order_has_no_metric_of_probabilities(metric: str, loss: str) -> None:
    one = [scored(np.random.default_rng(0), label=np.arange(8) % 2)]
    rows = [
        metric_row(metric, 0.5, losses=[loss], **WHERE),
        *Differences(one, [metric], replicates=5, train_ctr=0.5).rows(
            one, losses=["pointwise", loss], config={}, **WHERE
        ),
    ]
    left_out = loss != "pointwise" and metric in ("ne", "log_loss")
    for row in rows:
        assert row["message"] == (ORDER_ALONE if left_out else "")
        assert row["status"] == ("unsupported" if left_out else "ok")
        assert math.isnan(row["value"]) == left_out
        assert row["unit"] == ("nats" if metric == "log_loss" else "1")
