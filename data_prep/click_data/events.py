"""From a log of events to histories, samples and vocabularies: the path that all sources take."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
from numpy.typing import NDArray

from click_data.errors import DataError
from click_data.negatives import refuse_draws, sample_negatives
from click_data.schema import SAMPLE_COLUMNS, Prepared
from click_data.split import SPLITS, split_times
from click_data.statistics import length_quantiles, padding_waste

MAX_EVENTS = 2**31 - 1  # list offsets in histories.parquet are int32

Columns = dict[str, NDArray[Any]]


@dataclass(frozen=True)
class EventLog:
    """A checked log, in any order.

    events: user_id and item_id (Int64 or String), time (Int64), label (Int8, 0 or 1), category
        (Int64 or String, null = unknown; all null if the source has none), and one Float32 column
        `signal_column(name)` for each name in `signals`, so that a signal may be called like one
        of the others. Events of one user at one time keep their order.
    time_unit: "s", "ms", "us" or "ns".
    inputs: files read, as {"file": name, "sha256": ...}.
    negatives: items to draw per positive event as label-0 samples that no history holds. If any,
        events of items that the training period does not have are no samples.
    options: what the source was asked for, to be recorded.
    read: what was read of the input: "columns" by our names, and more where it helps to see it.
    dropped: how many "rows" the input has, and how many of them were left out, by the reason;
        empty if the source was not asked to leave any out.
    """

    name: str
    events: pl.DataFrame
    time_unit: str = "s"
    signals: tuple[str, ...] = ()
    inputs: tuple[dict[str, str], ...] = ()
    negatives: int = 0
    options: dict[str, Any] = field(default_factory=dict)
    read: dict[str, Any] = field(default_factory=dict)
    dropped: dict[str, Any] = field(default_factory=dict)


def signal_column(name: str) -> str:
    """What the column of a signal is called among the events."""
    return f"signal {name}"


def build(
    log: EventLog, *, split: tuple[float, float, float], min_history: int, seed: int
) -> Prepared:
    """Sort, split by time, map ids to train vocabularies, and cut samples out of histories.

    Every event is a sample whose history is the user's events at strictly earlier times, so a
    history holds neither its target nor the target's twins of the same instant. Samples with
    fewer than `min_history` such events are left out.

    Where negatives are drawn, events of unknown items are left out of the samples too, not out of
    the histories: draws are of known items only, so "unknown" alone would give the label away.
    """
    if len(log.events) > MAX_EVENTS:
        raise DataError(f"{len(log.events)} events: more than {MAX_EVENTS} are not supported")
    events = log.events.sort("user_id", "time", maintain_order=True)
    time = events["time"].to_numpy()
    bounds = split_times(time, split)

    train = events.filter(pl.col("time") < bounds[0]).sort("time", maintain_order=True)
    categories = _vocabulary(train.filter(pl.col("category").is_not_null()), "category")
    items = _vocabulary(train, "item_id", pl.col("category").drop_nulls().first())
    item_category = np.concatenate([[0], _encode(items, categories, "category")]).astype(np.int32)
    tokens = {
        "item": _encode(events, items, "item_id"),
        "category": _encode(events, categories, "category"),
        "time": time,
        "label": events["label"].to_numpy(),
    }
    user, offsets, prefix = _prefixes(events["user_id"], time)
    samples: Columns = {"user": user, "prefix": prefix, **tokens}
    given_up = 0
    if log.negatives:
        drawn_for = (samples["label"] == 1) & (samples["item"] != 0)
        wanted = log.negatives * int(drawn_for.sum())
        refuse_draws(log.negatives, total=len(time) + wanted, items=len(items))
        rng = np.random.Generator(np.random.PCG64(seed))
        samples = _with_negatives(samples, item_category, log.negatives, rng)
        given_up = wanted - (len(samples["label"]) - len(time))
    keep = samples["prefix"] >= min_history
    long_enough = np.bincount(np.digitize(time[keep[: len(time)]], bounds), minlength=len(SPLITS))
    left_out: dict[str, Any] = {"negatives_given_up": given_up} if given_up else {}
    if log.negatives:
        known = samples["item"] != 0
        logged = np.flatnonzero(keep[: len(time)])  # drawn samples come behind
        logged_period = np.digitize(samples["time"][logged], bounds)
        left_out["unknown_left_out"] = _split_means(logged_period, ~known[logged])
        keep &= known
    keep = np.flatnonzero(keep)
    # Stable: at one time, users in order; within a user, history order, drawn negatives last.
    keep = keep[np.lexsort((samples["user"][keep], samples["time"][keep]))]
    samples = {name: samples[name][keep] for name in SAMPLE_COLUMNS}
    period = np.digitize(samples["time"], bounds).astype(np.int8)

    signals = {name: events[signal_column(name)].to_numpy() for name in log.signals}
    lengths = np.diff(offsets)
    info = {
        "num_items": len(items) + 1,
        "num_categories": len(categories) + 1,
        "counts": {
            "users": len(lengths),
            "items": events["item_id"].n_unique(),
            "categories": events["category"].drop_nulls().n_unique(),
            "events": len(events),
            **_count_splits(
                period, samples["label"], long_enough, len(items) if log.negatives else None
            ),
        },
        **({"read": log.read} if log.read else {}),
        **({"dropped": log.dropped} if log.dropped else {}),
        **left_out,
        "split_times": {"valid": bounds[0], "test": bounds[1]},
        "time_unit": log.time_unit,
        "history_length": length_quantiles(lengths),
        "padding_waste": padding_waste(lengths),
        "signals": list(log.signals),
    }
    return Prepared(
        histories=_histories_table(events["user_id"], offsets, {**tokens, **signals}),
        samples=pa.table(
            {**samples, "split": pa.DictionaryArray.from_arrays(pa.array(period), list(SPLITS))}
        ),
        items=_items_table(items, item_category),
        info=info,
    )


def _with_negatives(
    samples: Columns, item_category: NDArray[np.int32], per_event: int, rng: np.random.Generator
) -> Columns:
    """Append drawn label-0 samples; each has its positive's user, time and prefix."""
    rows, drawn = sample_negatives(
        user=samples["user"],
        item=samples["item"],
        positive=samples["label"] == 1,
        num_items=len(item_category),
        per_event=per_event,
        rng=rng,
    )
    added = {name: values[rows] for name, values in samples.items()}
    added |= {
        "item": drawn,
        "category": item_category[drawn],
        "label": np.zeros_like(rows, np.int8),
    }
    return {name: np.concatenate([values, added[name]]) for name, values in samples.items()}


def _vocabulary(train: pl.DataFrame, column: str, *more: pl.Expr) -> pl.DataFrame:
    """Distinct values, most frequent first, with their `train_count`; ids 1, 2, ... in order."""
    grouped = train.group_by(column).agg(pl.len().cast(pl.Int64).alias("train_count"), *more)
    grouped = grouped.sort("train_count", column, descending=[True, False])
    return grouped.with_columns(pl.int_range(1, pl.len() + 1, dtype=pl.Int32).alias("id"))


def _encode(frame: pl.DataFrame, vocabulary: pl.DataFrame, column: str) -> NDArray[np.int32]:
    """Vocabulary ids of one column, 0 for what is not in the vocabulary."""
    joined = frame.select(column).join(
        vocabulary.select(column, "id"), on=column, how="left", maintain_order="left"
    )
    return joined["id"].fill_null(0).to_numpy()


def _prefixes(
    user_id: pl.Series, time: NDArray[np.int64]
) -> tuple[NDArray[np.int32], NDArray[np.int64], NDArray[np.int32]]:
    """For events sorted by user and time: user index [T], offsets [U+1], and prefix [T].

    An event's prefix is the number of its user's events at strictly earlier times: the position
    in the history of the first event of the same time.
    """
    position = np.arange(len(time))
    new_user = user_id.ne_missing(user_id.shift(1)).to_numpy()
    new_user[0] = True
    new_time = new_user | (np.diff(time, prepend=time[0]) != 0)
    user = np.cumsum(new_user) - 1
    offsets = np.append(np.flatnonzero(new_user), len(time)).astype(np.int64)
    first_of_time = np.maximum.accumulate(np.where(new_time, position, 0))
    prefix = first_of_time - offsets[user]
    return user.astype(np.int32), offsets, prefix.astype(np.int32)


def _split_means(period: NDArray[np.int64], true: NDArray[np.bool_]) -> dict[str, float]:
    """The share of each split for which something is true."""
    each = {name: true[period == index] for index, name in enumerate(SPLITS)}
    return {name: float(mine.mean()) if len(mine) else 0.0 for name, mine in each.items()}


def _count_splits(
    period: NDArray[np.int8],
    label: NDArray[np.int8],
    long_enough: NDArray[np.int64],
    drawn_from: int | None,
) -> dict[str, dict[str, int]]:
    """Samples and positives of each split; raises if one cannot be trained or tested on.

    long_enough: logged events of each split with the history asked for; drawn_from: the number of
    items that negatives are drawn from, None where none are.
    """
    counts: dict[str, dict[str, int]] = {"samples": {}, "positives": {}}
    for index, name in enumerate(SPLITS):
        labels = label[period == index]
        counts["samples"][name] = len(labels)
        counts["positives"][name] = int(labels.sum())
        if len(labels) == 0:
            hint = "no event there has as long a history; a smaller min_history would help"
            if long_enough[index]:
                hint = "events of items not seen in training were left out; another split may help"
            raise DataError(f"no samples in the {name} period: {hint}")
    positives, total = counts["positives"]["train"], counts["samples"]["train"]
    if positives == total and drawn_from is not None:
        raise DataError(
            f"no item could be drawn as label 0: the users of the training period touch (nearly) "
            f"all of its {drawn_from:,} items; more users and items, or labels, are needed"
        )
    if positives in (0, total):
        raise DataError(
            f"every label in the training period is {int(positives > 0)}: nothing to tell apart"
        )
    return counts


def _histories_table(user_id: pl.Series, offsets: NDArray[np.int64], tokens: Columns) -> pa.Table:
    """One row per user: the id, and every token column cut into lists at `offsets`."""
    cuts = pa.array(offsets.astype(np.int32))
    lists = {n: pa.ListArray.from_arrays(cuts, pa.array(values)) for n, values in tokens.items()}
    return pa.table({"user_id": _arrow(user_id).take(pa.array(offsets[:-1])), **lists})


def _items_table(items: pl.DataFrame, item_category: NDArray[np.int32]) -> pa.Table:
    """Row i describes item id i; row 0 is the unknown item, whose item_id is null."""
    unknown = pl.DataFrame({"item_id": [None], "train_count": [0], "category_id": [None]})
    described = items.select("item_id", "train_count", pl.col("category").alias("category_id"))
    table = pl.concat([unknown.cast(described.schema), described])
    return pa.table(
        {
            "item_id": _arrow(table["item_id"]),
            "category": item_category,
            "category_id": _arrow(table["category_id"]),
            "train_count": _arrow(table["train_count"]),
        }
    )


def _arrow(series: pl.Series) -> pa.Array:
    """As a plain int64 or string array (polars exports large or view strings)."""
    return series.to_arrow().cast(pa.string() if series.dtype == pl.String else pa.int64())
