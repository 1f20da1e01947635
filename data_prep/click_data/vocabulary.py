"""The ids of items, and the one table of what is known of each.

While a data set is made, an item is a number in the order of item ids. What a ranker sees are ids:
0 is the unknown item; 1 to V the training vocabulary, most frequent first; behind V the new items,
which first occur later.
"""

from dataclasses import dataclass

import numpy as np
import polars as pl
import pyarrow as pa
from numpy.typing import NDArray

from click_data.arrays import as_arrow, frequent_first
from click_data.checks import parts
from click_data.histories import Histories
from click_data.requests import Requests
from click_data.split import SPLITS

_TRAIN = SPLITS.index("train")


def order_items(events: pl.DataFrame, candidates: pl.DataFrame | None) -> pl.Series:
    """All item ids of a log, ascending."""
    ids = [events["item_id"]] + ([] if candidates is None else [candidates["item_id"]])
    return pl.concat([one.unique() for one in ids]).unique().sort()


def items_seen(histories: Histories, asked: Requests, before: int | None) -> NDArray[np.bool_]:
    """The events [T] that the training period has: those before a time.

    Where there is none (splits that the log brings, histories without times), those that training
    requests may see.
    """
    if before is not None:
        return histories.time < before
    train = asked.period == _TRAIN
    reach = np.zeros(len(histories.users), np.int64)
    np.maximum.at(reach, asked.user[train], asked.prefix[train])
    return histories.among_first(reach)


@dataclass(frozen=True)
class Vocabulary:
    """id_of: int32, the id of each item; train_count: int64, its clicks in the training period;
    known: V."""

    id_of: NDArray[np.int32]
    train_count: NDArray[np.int64]
    known: int

    @classmethod
    def of(
        cls,
        histories: Histories,
        asked: Requests,
        seen: NDArray[np.bool_],
        items: int,
        timed: str,
        *,
        given: bool,
    ) -> "Vocabulary":
        """Ids by how often an item is in the training period.

        seen: the events of that period. Where the log has `given` candidates, positives of the
        period's requests count as well, but for those that are among these events; where all
        events have times, only those that are events at all.
        """
        count = np.bincount(histories.item[seen], minlength=items).astype(np.int64)
        shown = np.repeat(asked.period, asked.lengths) == _TRAIN
        if given:
            positive = shown & (next(iter(asked.labels.values())) == 1)
            more = _unseen(histories, asked, seen, positive, events_only=timed == "all")
            count += np.bincount(more, minlength=items)
        known = count > 0
        known[asked.item[shown]] = True
        order = np.lexsort((np.arange(items), -count, ~known))
        id_of = np.empty(items, np.int32)
        id_of[order] = np.arange(1, items + 1, dtype=np.int32)
        return cls(id_of, count, int(known.sum()))


def _unseen(
    histories: Histories,
    asked: Requests,
    seen: NDArray[np.bool_],
    positive: NDArray[np.bool_],
    *,
    events_only: bool,
) -> NDArray[np.int32]:
    """Items of those positives that are no events of the training period."""
    keys = ("user", "item", "time")
    user, time = (np.repeat(of, asked.lengths)[positive] for of in (asked.user, asked.time))
    shown = pl.DataFrame(dict(zip(keys, (user, asked.item[positive], time), strict=True)))
    columns = (histories.user, histories.item, histories.time, seen)
    events = pl.DataFrame(dict(zip((*keys, "seen"), columns, strict=True)))
    shown = shown.join(events.filter("seen"), on=keys, how="anti")
    if events_only:
        shown = shown.join(events, on=keys, how="semi").unique()
    return shown["item"].to_numpy()


def item_table(
    items: pl.Series,
    vocabulary: Vocabulary,
    categories: dict[str, pl.Series],
    told: pl.DataFrame | None,
) -> tuple[pa.Table, dict[str, int], list[str]]:
    """items.parquet, the number of codes of each categorical feature, and the dense ones' names.

    categories: what `item_categories` found; told: what the log says of items.
    """
    order = np.argsort(vocabulary.id_of)
    known = vocabulary.id_of <= vocabulary.known
    columns: dict[str, pa.Array] = {
        "item_id": _under_unknown(as_arrow(items[order])),
        "train_count": pa.array(np.concatenate([[0], vocabulary.train_count[order]])),
    }
    codes: dict[str, int] = {}
    for name, values in categories.items():
        coded, codes[name] = frequent_first(values, vocabulary.train_count, known)
        columns[name] = pa.array(np.concatenate([[0], coded[order]]).astype(np.int32))
        columns[f"original {name}"] = _under_unknown(as_arrow(values[order]))
    dense: list[str] = []
    for column in () if told is None else told.columns:
        if column.startswith("dense "):
            dense.append(column.removeprefix("dense "))
            assert told is not None
            values = _of_items(items, told, column).fill_null(0.0).to_numpy()
            columns[dense[-1]] = pa.array(np.concatenate([[0], values[order]]).astype(np.float32))
    return pa.table(columns), codes, dense


def item_categories(
    items: pl.Series, events: pl.DataFrame, told: pl.DataFrame | None
) -> dict[str, pl.Series]:
    """Each categorical feature's value of each item, null where nobody says it.

    told: what the log says of items; what it does not, the first event that says it does.
    """
    found: dict[str, pl.Series] = {}
    for frame in (events,) if told is None else (told, events):
        for column in frame.columns:
            if column.startswith("item "):
                name = column.removeprefix("item ")
                values = _of_items(items, frame, column)
                found[name] = found[name].fill_null(values) if name in found else values
    return found


def _of_items(items: pl.Series, frame: pl.DataFrame, column: str) -> pl.Series:
    """The value of a column of each item: the first in time that is not null, of events."""
    order = [name for name in ("time", "user_id") if name in frame.columns]
    first = []
    for part in parts(frame, "item_id", "item_id", column, *order):
        said = part.drop_nulls(("item_id", column))
        said = said.sort(order, maintain_order=True) if order else said
        said = said.unique("item_id", keep="first", maintain_order=True)
        first.append(said.select("item_id", column))
    each = items.alias("item_id").to_frame()
    return each.join(pl.concat(first), on="item_id", how="left", maintain_order="left")[column]


def _under_unknown(values: pa.Array) -> pa.Array:
    return pa.concat_arrays([pa.nulls(1, values.type), values])
