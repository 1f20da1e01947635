"""Metrics of ranking, and their differences, as rows of `results`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jagged_ranking import results
from jagged_ranking.evaluation.evaluate import Evaluation
from jagged_ranking.evaluation.metrics import paired_bootstrap

LEVEL = 0.95  # of the intervals
UNITS = {"log_loss": "nats"}  # of all other metrics "1"
UNDEFINED = "needs both labels, of one user or one request"


def metric_row(
    metric: str, value: float, *, unit: str | None = None, **where: Any
) -> dict[str, Any]:
    """A row of one number: NaN is "unsupported", and says why.

    Args:
        metric: its name in the row.
        value: the number.
        unit: None is that of a metric of this name.
        where: the other fields of `results.row`.
    """
    known = not math.isnan(value)
    return results.row(
        metric=metric,
        unit=unit or UNITS.get(metric, "1"),
        value=value,
        status="ok" if known else "unsupported",
        message="" if known else UNDEFINED,
        **where,
    )


def difference_row(
    metric: str,
    name: str,
    ours: Sequence[Evaluation],
    theirs: Sequence[Evaluation],
    *,
    replicates: int,
    train_ctr: float | None = None,
    config: Mapping[str, Any],
    **where: Any,
) -> dict[str, Any]:
    """A row of the mean of a metric over seeds minus that of others on the same candidates.

    Args:
        metric: one that `paired_bootstrap` knows.
        name: of the difference, in the row.
        ours, theirs: one evaluation a seed, all of the same candidates.
        replicates: of the bootstrap over users and seeds.
        train_ctr: needed for "ne".
        config: behind it come "level", the bounds of the interval as "low" and "high" (None where
            there is none), "replicates" and "seeds".
        where: the other fields of `results.row`.
    """
    first = theirs[0]
    found = paired_bootstrap(
        metric,
        first.user,
        first.request,
        first.label,
        np.stack([one.probability for one in ours]),
        np.stack([one.probability for one in theirs]),
        train_ctr=train_ctr,
        replicates=replicates,
        level=LEVEL,
    )
    facts = {
        "level": LEVEL,
        "low": None if math.isnan(found.low) else found.low,
        "high": None if math.isnan(found.high) else found.high,
        "replicates": replicates,
        "seeds": len(ours),
    }
    unit = UNITS.get(metric, "1")
    return metric_row(name, found.value, unit=unit, config={**config, **facts}, **where)
