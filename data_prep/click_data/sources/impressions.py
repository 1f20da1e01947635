"""Impression logs as a folder of Parquet: what was shown, what of it was clicked, what came before.

impressions.parquet   a row for each candidate shown: impression_id, user_id, timestamp, item_id,
    label (0 or 1); optionally split, hist_len, position, and further columns by option
interactions.parquet  the events that histories are made of: user_id, item_id, timestamp; or
histories.parquet     the same as lists, a row for each user: user_id, hist_items, optionally
    hist_timestamps, and further lists of numbers hist_NAME, which become signals NAME
items.parquet         item_id and features of the item; may be absent

`hist_len` says how many of a user's events, in time order, a request may see; where it is absent,
and where clicks are appended, these are the events at strictly earlier times. Lists without times
come before every request.
"""

from dataclasses import dataclass
from pathlib import Path

import polars as pl

from click_data import columns
from click_data.errors import DataError
from click_data.events import ClickLog
from click_data.plain import refuse_absent
from click_data.schema import file_digest
from click_data.sources import features
from click_data.sources.candidates import (
    note_prefixes,
    note_repeated,
    note_uneven,
    same_ids,
    splits,
    with_clicks,
)
from click_data.sources.lists import elements
from click_data.table import Table, read_parquet
from click_data.time_units import UNITS

_REQUIRED = ("impression_id", "user_id", "timestamp", "item_id", "label")
_EVENT = ("user_id", "item_id", "timestamp")
_ITEMS, _TIMES, _LISTS = "hist_items", "hist_timestamps", "hist_"


@dataclass(frozen=True)
class ImpressionOptions:
    """How to read impressions.

    contexts: columns of impressions.parquet that describe a request: categorical, or dense if of
        floats.
    features: numeric columns of it that describe a candidate.
    signals: columns of interactions.parquet to carry in the histories; each value of text and of
        integers is a 0/1 signal of its own. Lists of histories.parquet are all carried.
    split_column: the column of the official split; "" splits by time. None: `split` if there is
        one.
    append_clicks: the clicked items of earlier requests are events of the history, too, unless
        it has them; `hist_len` is then not read.
    time_unit: "s", "ms", "us" or "ns": what numeric timestamps count since 1970.
    """

    contexts: tuple[str, ...] = ()
    features: tuple[str, ...] = ()
    signals: tuple[str, ...] = ()
    split_column: str | None = None
    append_clicks: bool = False
    time_unit: str = "s"


def load(path: Path | None, options: ImpressionOptions, seed: int) -> ClickLog:
    """Read impressions and histories. Raises DataError about all bad rows of a file at once."""
    del seed  # nothing here is random
    assert path is not None
    if options.time_unit not in UNITS:
        raise DataError(f"--time-unit {options.time_unit}: not one of {', '.join(UNITS)}")
    refuse_absent(path)
    shown = path / "impressions.parquet"
    if not shown.is_file():
        raise DataError("not a folder with impressions.parquet", file=path)
    table, split = _read_shown(shown, options)
    candidates = _candidates(table, options, split)
    events, inputs, timed = _events(path, options)
    items = features.items(path / "items.parquet")
    inputs += [path / "items.parquet"] * (items is not None)
    candidates, events, items = same_ids(candidates, events, items)
    if "prefix" in candidates.columns:
        note_prefixes(table, candidates, events, "hist_len", timed=timed)
    table.refuse()
    if options.append_clicks:
        events = with_clicks(events, candidates)
    elif not timed and "prefix" not in candidates.columns:
        held = events.group_by("user_id").agg(pl.len().cast(pl.Int64).alias("prefix"))
        candidates = candidates.join(held, on="user_id", how="left", maintain_order="left")
        candidates = candidates.with_columns(pl.col("prefix").fill_null(0))
    counted = {
        "rows": len(candidates),
        "requests": candidates["request"].n_unique(),
        "positives": int(candidates["label label"].sum()),
        "users": candidates["user_id"].n_unique(),
    }
    read = {name: name for name in table.frame.columns if name != split}
    read |= {"split": split} if split else {}
    return ClickLog(
        name=path.resolve().name,
        events=features.with_known(events),
        candidates=candidates,
        items=items,
        time_unit=options.time_unit,
        timed="all" if timed else "requests",
        counted=counted,
        inputs=tuple({"file": f.name, "sha256": file_digest(f)} for f in (shown, *inputs)),
        read={"columns": read, "unread": [n for n in table.columns if n not in read.values()]},
    )


def _read_shown(path: Path, options: ImpressionOptions) -> tuple[Table, str]:
    """The wanted columns, lists whole and by position; the column of the split or ""."""
    names = features.parquet_schema(path).names
    split = options.split_column
    if split is None:
        split = "split" if "split" in names else ""
    asked = (*options.contexts, *options.features, *((split,) if split else ()))
    for name in asked:
        if asked.count(name) > 1 or name in _REQUIRED:
            raise DataError(f"{name}: taken for two things, or given twice")
    given = () if options.append_clicks else ("hist_len",)
    table = read_parquet(path, wanted={*_REQUIRED, *asked, *given})
    table.require(*_REQUIRED)
    table.require(*asked)
    return table, split


def _candidates(table: Table, options: ImpressionOptions, split: str) -> pl.DataFrame:
    """The candidates; what is wrong with them is noted in the table."""
    impression = columns.ids(table, "impression_id")
    out = {
        "request": impression.rank("dense").cast(pl.Int64),
        "user_id": columns.ids(table, "user_id"),
        "time": columns.times(table, "timestamp", unit=options.time_unit),
        "item_id": columns.ids(table, "item_id"),
        "label label": columns.labels(table, "label"),
    }
    whole = {"user_id": "user_id", "time": "timestamp"}
    if split:
        out["split"] = splits(table, split)
        whole["split"] = split
    if "hist_len" in table.frame.columns:
        out["prefix"] = columns.numbers(table, "hist_len").cast(pl.Int64)
        whole["prefix"] = "hist_len"
    for name in options.contexts:
        out[f"context {name}"] = features.context(table, name)
        whole[f"context {name}"] = name
    for name in options.features:
        out[f"feature {name}"] = columns.numbers(table, name).cast(pl.Float32)
    candidates = pl.DataFrame(out)
    note_uneven(table, candidates, whole)
    note_repeated(table, candidates, "item_id")
    return candidates


def _events(path: Path, options: ImpressionOptions) -> tuple[pl.DataFrame, list[Path], bool]:
    """Events by user and time, with signals that may be null; files; whether they have times."""
    logged, listed = path / "interactions.parquet", path / "histories.parquet"
    if logged.is_file() and listed.is_file():
        message = "has interactions.parquet and histories.parquet: take one of them away"
        raise DataError(message, file=path)
    if logged.is_file():
        table = read_parquet(logged, wanted={*_EVENT, *options.signals})
        table.require(*_EVENT)
        table.require(*options.signals)
        out = {
            "user_id": columns.ids(table, "user_id"),
            "item_id": columns.ids(table, "item_id"),
            "time": columns.times(table, "timestamp", unit=options.time_unit),
            **features.signals(table, options.signals),
        }
        table.refuse()
        return pl.DataFrame(out).sort("user_id", "time", maintain_order=True), [logged], True
    if options.signals:
        message = "no interactions.parquet in this folder to take it from"
        raise DataError(f"--signal {options.signals[0]}: {message}", file=path)
    if listed.is_file():
        events, timed = _listed(listed, options)
        return events, [listed], timed
    if not options.append_clicks:
        message = (
            "no interactions.parquet or histories.parquet in this folder; --append-clicks makes "
            "histories of the clicks alone"
        )
        raise DataError(message, file=path)
    none = {"user_id": pl.Int64, "item_id": pl.Int64, "time": pl.Int64}
    return pl.DataFrame(schema=none), [], True


def _listed(path: Path, options: ImpressionOptions) -> tuple[pl.DataFrame, bool]:
    """Events of histories.parquet; without times the position in the list is the time."""
    names = [n for n in features.parquet_schema(path).names if n.startswith(_LISTS)]
    table = read_parquet(path, wanted={"user_id", *names})
    table.require("user_id", _ITEMS)
    timed = _TIMES in names
    if options.append_clicks and not timed:
        table.fail("missing: --append-clicks needs the times of events", column=_TIMES)
    user = columns.ids(table, "user_id")
    again = ~user.is_first_distinct() & user.is_not_null()
    message = "is the user of an earlier row"
    table.note(message, column="user_id", rows=again.arg_true(), raw=table.frame["user_id"])
    table.refuse()
    inner, row = elements(table, names)
    user_id = user.gather(row)
    numbers = [name for name in names if name not in (_ITEMS, _TIMES)]
    out = {"user_id": user_id, "item_id": columns.ids(inner, _ITEMS)}
    if timed:
        out["time"] = columns.times(inner, _TIMES, unit=options.time_unit)
        back = pl.DataFrame(out).select((pl.col("time").diff() < 0).over("user_id")).to_series()
        inner.note("time goes backwards in one list", column=_TIMES, rows=back.arg_true())
    else:
        place = pl.int_range(pl.len(), dtype=pl.Int64).over("user_id")
        out["time"] = pl.DataFrame(out).select(place.alias("time")).to_series()
    out |= {
        f"signal {name.removeprefix(_LISTS)}": features.numbers(inner, name) for name in numbers
    }
    inner.refuse()
    return pl.DataFrame(out).sort("user_id", "time", maintain_order=True), timed
