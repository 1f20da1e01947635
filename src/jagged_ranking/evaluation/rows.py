"""Metrics of ranking, and their differences, as rows of `results`.

What is trained on lists or on next items learns an order: its logits are free up to a constant in
each list, so that as probabilities they say nothing, and a metric of probabilities is left out.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from jagged_ranking import results
from jagged_ranking.evaluation.bootstrap import difference, redrawn
from jagged_ranking.evaluation.evaluate import Evaluation
from jagged_ranking.evaluation.metrics import OF_PROBABILITIES
from jagged_ranking.models.model_config import LOSSES_OF_ORDER

LEVEL = 0.95  # of the intervals
UNITS = {"log_loss": "nats"}  # of all other metrics "1"
UNDEFINED = "needs both labels, of one user or one request"
ORDER_ALONE = "trained on order alone: its scores are no probabilities"


def metric_row(
    metric: str,
    value: float,
    *,
    unit: str | None = None,
    losses: Collection[str] = (),
    **where: Any,
) -> dict[str, Any]:
    """A row of one number: "unsupported", and why, where it is NaN or says nothing.

    Args:
        metric: its name in the row.
        value: the number.
        unit: None is that of a metric of this name.
        losses: that the model behind it was trained with, none of a floor.
        where: the other fields of `results.row`.
    """
    if metric in OF_PROBABILITIES and order_alone(losses):
        return _row(metric, math.nan, unit, why=ORDER_ALONE, **where)
    return _row(metric, value, unit, why=UNDEFINED, **where)


def telling(metrics: Mapping[str, float], *, loss: str) -> dict[str, float]:
    """The metrics that say something of a model trained with this loss."""
    silent = OF_PROBABILITIES if order_alone([loss]) else ()
    return {name: value for name, value in metrics.items() if name not in silent}


def order_alone(losses: Collection[str]) -> bool:
    """Whether one of these losses, each one of `LOSSES`, teaches an order and no probability."""
    return any(loss in LOSSES_OF_ORDER for loss in losses)


def _row(metric: str, value: float, unit: str | None, *, why: str, **where: Any) -> dict[str, Any]:
    known = not math.isnan(value)
    return results.row(
        metric=metric,
        unit=unit or UNITS.get(metric, "1"),
        value=value,
        status="ok" if known else "unsupported",
        message="" if known else why,
        **where,
    )


class Differences:
    """Rows of what others are on average over seeds, minus a reference on the same candidates.

    Args:
        reference: one evaluation a seed, all of the same candidates.
        metrics: that are compared, of `METRICS` and `LIST_METRICS`.
        replicates: of the bootstrap over users.
        train_ctr: needed for "ne".
        paired: a seed's evaluations are of one training, scored in other ways.
        name: of the rows' metrics, behind that of the metric.
    """

    def __init__(
        self,
        reference: Sequence[Evaluation],
        metrics: Collection[str],
        *,
        replicates: int,
        train_ctr: float | None = None,
        paired: bool = False,
        name: str = "difference",
    ) -> None:
        self.reference, self.metrics, self.name = reference, tuple(metrics), name
        self.paired = paired
        self.replicates, self.train_ctr = replicates, train_ctr
        self._theirs = self._redrawn(reference)

    def rows(
        self,
        ours: Sequence[Evaluation],
        *,
        losses: Collection[str] = (),
        config: Mapping[str, Any],
        **where: Any,
    ) -> Iterator[dict[str, Any]]:
        """A row a metric.

        Args:
            ours: one evaluation a seed, of the reference's candidates.
            losses: that the models behind both were trained with.
            config: where there is a difference "level", the bounds of its interval as "low" and
                "high" (None where there is none), "replicates" and "seeds" come behind it.
            where: the other fields of `results.row`.
        """
        mine = self._redrawn(ours)
        for metric in self.metrics:
            unit, name = UNITS.get(metric, "1"), f"{metric}_{self.name}"
            if metric in OF_PROBABILITIES and order_alone(losses):
                yield _row(name, math.nan, unit, why=ORDER_ALONE, config=config, **where)
                continue
            found = difference(mine[metric], self._theirs[metric], paired=self.paired, level=LEVEL)
            facts = {
                "level": LEVEL,
                "low": None if math.isnan(found.low) else found.low,
                "high": None if math.isnan(found.high) else found.high,
                "replicates": self.replicates,
                "seeds": len(ours),
            }
            yield _row(name, found.value, unit, why=UNDEFINED, config={**config, **facts}, **where)

    def _redrawn(self, of: Sequence[Evaluation]) -> dict[str, np.ndarray]:
        first = self.reference[0]
        return redrawn(
            self.metrics,
            first.user,
            first.request,
            first.label,
            np.stack([one.probability for one in of]),
            train_ctr=self.train_ctr,
            replicates=self.replicates,
        )
