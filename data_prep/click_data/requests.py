"""What a ranker is asked: a user, a time, how much of the history it may see, and candidates."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import polars as pl
import pyarrow as pa
from numpy.typing import NDArray

from click_data.arrays import encode, frequent_first, gather, lists, rows_of
from click_data.errors import DataError
from click_data.histories import Histories
from click_data.pieces import pieces_of
from click_data.schema import context_column, feature_column, label_column
from click_data.split import SPLITS

_WHOLE = ("user_id", "time", "split", "prefix")  # what rows of one request agree in


@dataclass
class Requests:
    """Requests [R] and their candidates [C], flat.

    user, prefix int32, time int64, period int8 (number of the split) [R]; offsets int64 [R+1];
    item int32 [C], labels int8 [C] by task, features float32 [C] by name;
    context [R] by name: as the log has it, and after `coded` int32 or float32; context_codes: how
        many codes, None of a dense one.
    """

    user: NDArray[np.int32]
    prefix: NDArray[np.int32]
    time: NDArray[np.int64]
    period: NDArray[np.int8]
    offsets: NDArray[np.int64]
    item: NDArray[np.int32]
    labels: dict[str, NDArray[np.int8]]
    features: dict[str, NDArray[np.float32]] = field(default_factory=dict)
    context: dict[str, pl.Series] = field(default_factory=dict)
    context_codes: dict[str, int | None] = field(default_factory=dict)

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Candidates of each request, [R]."""
        return np.diff(self.offsets)

    def take(self, chosen: NDArray[np.int64]) -> "Requests":
        """Some requests, in the order given."""
        offsets = _offsets(self.offsets[chosen + 1] - self.offsets[chosen])
        total = offsets[-1]
        item = np.empty(total, self.item.dtype)
        labels = {task: np.empty(total, values.dtype) for task, values in self.labels.items()}
        features = {name: np.empty(total, np.float32) for name in self.features}
        for some in pieces_of(offsets):
            rows = rows_of(self.offsets, chosen[some])
            shown = slice(offsets[some.start], offsets[some.stop])
            item[shown] = self.item[rows]
            for new, old in ((labels, self.labels), (features, self.features)):
                for name in new:
                    new[name][shown] = old[name][rows]
        return replace(
            self,
            user=gather(self.user, chosen),
            prefix=gather(self.prefix, chosen),
            time=gather(self.time, chosen),
            period=gather(self.period, chosen),
            offsets=offsets,
            item=item,
            labels=labels,
            features=features,
            context={name: values[chosen] for name, values in self.context.items()},
        )

    def with_drawn(self, rows: NDArray[np.int64], items: NDArray[np.int32]) -> "Requests":
        """Candidates of label 0 behind those at `rows`, which ascend."""
        # What is drawn for a row lies behind it and all that is drawn for rows before.
        new = np.zeros(len(self.item) + len(rows), bool)
        new[rows + np.arange(1, len(rows) + 1)] = True
        old = ~new
        item = np.empty(len(new), np.int32)
        item[old], item[new] = self.item, items
        labels = {task: np.zeros(len(new), np.int8) for task in self.labels}
        for task, values in labels.items():
            values[old] = self.labels[task]
        offsets = self.offsets + np.searchsorted(rows, self.offsets)
        return replace(self, offsets=offsets, item=item, labels=labels)

    def coded(self) -> "Requests":
        """Contexts as codes: 0 unknown, then values of the training requests, most frequent
        first. Dense ones are 0 where the log says nothing."""
        context, codes = {}, {}
        for name, values in self.context.items():
            if values.dtype.is_float():
                context[name], codes[name] = values.cast(pl.Float32).fill_null(0.0), None
                continue
            weight = (self.period == SPLITS.index("train")).astype(np.int64)
            coded, codes[name] = frequent_first(values, weight, weight > 0)
            context[name] = pl.Series(coded)
        return replace(self, context=context, context_codes=codes)

    def table(self) -> pa.Table:
        """requests.parquet."""
        each = {
            "item": self.item,
            **{label_column(task): values for task, values in self.labels.items()},
            **{feature_column(name): values for name, values in self.features.items()},
        }
        offsets = pa.array(self.offsets.astype(np.int32))
        return pa.table(
            {
                "user": self.user,
                "prefix": self.prefix,
                "time": self.time,
                "split": pa.DictionaryArray.from_arrays(pa.array(self.period), list(SPLITS)),
                **{name: lists(values, offsets) for name, values in each.items()},
                **{context_column(name): of.to_numpy() for name, of in self.context.items()},
            }
        )


def asked_by_events(histories: Histories, tasks: Sequence[str]) -> Requests:
    """Every event is a candidate; those of one user and instant are one request."""
    user, time = histories.user, histories.time
    new = np.ones(len(time), bool)
    new[1:] = (user[1:] != user[:-1]) | (time[1:] != time[:-1])
    first = np.flatnonzero(new)
    whose = user[first]
    return Requests(
        user=whose,
        prefix=(first - gather(histories.offsets, whose)).astype(np.int32),
        time=time[first],
        period=np.zeros(len(first), np.int8),
        offsets=np.append(first, len(time)),
        item=histories.item,
        labels={task: histories.labels[task] for task in tasks},
        context={name: values.gather(first) for name, values in histories.contexts.items()},
    )


def asked_by_candidates(
    candidates: pl.DataFrame,
    histories: Histories,
    items: pl.Series,
    tasks: Sequence[str],
    timed: str,
) -> Requests:
    """Requests as the log shows them.

    Raises DataError for a given prefix that reaches beyond the history, or (timed "all") into what
    is later than the request.
    """
    rows = candidates.sort("request", maintain_order=True)
    first = np.flatnonzero(rows.select(pl.col("request").is_first_distinct()).to_series())
    named = [name for name in rows.columns if name.startswith("context ")]
    whole = [name for name in _WHOLE if name in rows.columns]
    asked = rows.select("request", *whole, *named)[first]
    user, time = encode(asked["user_id"], histories.users), asked["time"].to_numpy()
    period = np.zeros(len(first), np.int8)
    if "split" in asked.columns:
        period = encode(asked["split"], pl.Series(SPLITS)).astype(np.int8)
        if (period < 0).any():
            raise ValueError(f"candidates: split is one of {', '.join(SPLITS)}")
    if "prefix" in asked.columns:
        prefix = asked["prefix"].to_numpy()
        _refuse_prefixes(asked, histories, user, prefix, time, timed)
    elif timed == "requests":
        prefix = np.diff(histories.offsets)[user]
    else:
        prefix = histories.earlier(user, time)
    features = {
        name.removeprefix("feature "): rows[name].to_numpy()
        for name in rows.columns
        if name.startswith("feature ")
    }
    return Requests(
        user=user,
        prefix=prefix.astype(np.int32),
        time=time,
        period=period,
        offsets=np.append(first, len(rows)).astype(np.int64),
        item=encode(rows["item_id"], items),
        labels={task: rows[label_column(task)].to_numpy() for task in tasks},
        features=features,
        context={name.removeprefix("context "): asked[name] for name in named},
    )


def seen_by_all(histories: Histories, asked: Requests) -> NDArray[np.bool_]:
    """The events [T] that every request of their user may see, and which so precede all of them."""
    least = np.diff(histories.offsets)
    np.minimum.at(least, asked.user, asked.prefix)
    return histories.among_first(least)


def _refuse_prefixes(
    asked: pl.DataFrame,
    histories: Histories,
    user: NDArray[np.int32],
    prefix: NDArray[np.int64],
    time: NDArray[np.int64],
    timed: str,
) -> None:
    whole = np.diff(histories.offsets)[user]
    bad = (prefix < 0) | (prefix > whole)
    message = "may see {} events of a user with {}"
    last = whole
    if not bad.any() and timed == "all" and len(histories.time):
        last = histories.time[np.maximum(histories.offsets[user] + prefix - 1, 0)]
        bad = (prefix > 0) & (last > time)
        message = "may see {} events, the last of them at {}, which is later"
    if bad.any():
        row = int(np.flatnonzero(bad)[0])
        name = f"request {asked['request'][row]} of user {asked['user_id'][row]} at {time[row]}"
        raise DataError(f"{name} {message.format(prefix[row], last[row])}")


def _offsets(lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets
