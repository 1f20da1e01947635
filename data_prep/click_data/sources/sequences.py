"""Next-item sequences: what a user did in order, the last items held out.

interactions.parquet  user_id, item_id, timestamp: what orders one user's events, read as no time
test.parquet          optional, a row for each user: user_id, negatives (items to rank the held out
    ones against), and optionally valid_item and test_item, which are checked
items.parquet         optional: item_id and features of the item

A user's last item is asked about in the test request and the one before it in the valid request,
each after all that came earlier, among the same given negatives. Every earlier position but the
first is a training request whose only candidate is the next item: what it is told apart from is
drawn in training. The next item is the first candidate of each list.

The layout of LastFM as published with S3-Rec (Zhou et al., CIKM 2020).
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
from click_data.sources.candidates import same_ids
from click_data.sources.lists import elements
from click_data.table import read_parquet

_EVENT = ("user_id", "item_id", "timestamp")


@dataclass(frozen=True)
class SequenceOptions:
    """holdout: how many of each user's last items are test requests, and as many before them valid
    ones, with the next item as their only candidate: to rank among all items. None: 1, with the
    negatives of test.parquet, which must be there.
    """

    holdout: int | None = None


def load(path: Path | None, options: SequenceOptions, seed: int) -> ClickLog:
    """Read sequences. Raises DataError about all bad rows of a file at once."""
    del seed  # nothing here is random
    assert path is not None
    holdout = 1 if options.holdout is None else options.holdout
    if holdout < 1:
        raise DataError(f"--holdout {holdout}: must be at least 1")
    refuse_absent(path)
    shown = path / "interactions.parquet"
    if not shown.is_file():
        raise DataError("not a folder with interactions.parquet", file=path)
    table = read_parquet(shown, wanted=_EVENT)
    table.require(*_EVENT)
    events = pl.DataFrame(
        {
            "user_id": columns.ids(table, "user_id"),
            "item_id": columns.ids(table, "item_id"),
            "timestamp": table.frame["timestamp"],
        }
    )
    missing = events["timestamp"].is_null().arg_true()
    table.note("no time: the value is missing", column="timestamp", rows=missing)
    if not table.frame["timestamp"].dtype.is_numeric():
        table.note("numbers are needed, to order by", column="timestamp")
    table.refuse()
    events = events.sort("user_id", "timestamp", maintain_order=True)
    place = pl.int_range(pl.len(), dtype=pl.Int64).over("user_id")
    events = events.select("user_id", "item_id", place.alias("time"))

    inputs = [shown]
    given = path / "test.parquet"
    requests = _requests(events, holdout)
    if options.holdout is None:
        if not given.is_file():
            message = "no test.parquet with negatives in this folder; --holdout 1 needs none"
            raise DataError(message, file=path)
        requests = _among_negatives(requests, given)
        inputs.append(given)
    items = features.items(path / "items.parquet")
    inputs += [path / "items.parquet"] * (items is not None)
    requests, events, items = same_ids(requests, events, items)
    counted = {
        "rows": len(events),
        "users": events["user_id"].n_unique(),
        "items": events["item_id"].n_unique(),
    }
    read = dict(zip(_EVENT, _EVENT, strict=True))
    return ClickLog(
        name=path.resolve().name,
        events=events,
        candidates=requests,
        items=items,
        timed="none",
        counted=counted,
        inputs=tuple({"file": f.name, "sha256": file_digest(f)} for f in inputs),
        read={"columns": read, "unread": [n for n in table.columns if n not in read]},
    )


def _requests(events: pl.DataFrame, holdout: int) -> pl.DataFrame:
    """A request for each event but a user's first, with that as its candidate."""
    left = pl.len().over("user_id") - pl.col("time")  # events from this one on
    split = pl.when(left <= holdout).then(pl.lit("test"))
    split = split.when(left <= 2 * holdout).then(pl.lit("valid")).otherwise(pl.lit("train"))
    asked = events.with_columns(split=split, prefix="time").filter(pl.col("time") > 0)
    if len(asked) == 0:
        raise DataError("no user has two events")
    return asked.select(
        pl.int_range(pl.len(), dtype=pl.Int64).alias("request"),
        "user_id",
        "time",
        "item_id",
        pl.lit(1, pl.Int8).alias("label label"),
        "split",
        "prefix",
    )


def _among_negatives(requests: pl.DataFrame, path: Path) -> pl.DataFrame:
    """The requests, those of valid and test with the negatives that the file gives for the user."""
    targets = {"valid": "valid_item", "test": "test_item"}
    table = read_parquet(path, wanted=("user_id", "negatives", *targets.values()))
    table.require("user_id", "negatives")
    user = columns.ids(table, "user_id")
    again = ~user.is_first_distinct() & user.is_not_null()
    message = "is the user of an earlier row"
    table.note(message, column="user_id", rows=again.arg_true(), raw=table.frame["user_id"])
    absent = table.frame["negatives"].is_null()
    table.note("no list: the value is missing", column="negatives", rows=absent.arg_true())
    table.refuse()
    held_out = requests.filter(pl.col("split") != "train")
    if held_out["user_id"].dtype != user.dtype:
        table.fail("ids are not of the type of those in interactions.parquet", column="user_id")
    # By row of the file: what the events say that the next items are.
    asked = pl.DataFrame({"user_id": user})
    for split, column in targets.items():
        mine = held_out.filter(pl.col("split") == split).select("user_id", item=pl.col("item_id"))
        asked = asked.join(mine, on="user_id", how="left", maintain_order="left")
        asked = asked.rename({"item": split})
        if column in table.columns:
            said = columns.ids(table, column)
            other = said.cast(pl.String).ne_missing(asked[split].cast(pl.String))
            message = "is not what the user's events end with"
            table.note(message, column=column, rows=other.arg_true(), raw=table.frame[column])
    lacking = held_out.join(asked, on="user_id", how="anti")
    if len(lacking):
        table.note(f"no row of user {lacking['user_id'][0]!r}, whose last item is asked about")
    table.refuse()
    inner, row = elements(table, ["negatives"])
    empty = ~pl.int_range(len(user), eager=True).is_in(row.implode())
    table.note("an empty list", column="negatives", rows=empty.arg_true())
    table.refuse()
    drawn = pl.DataFrame({"row": row, "item_id": columns.ids(inner, "negatives")})
    kind = held_out["item_id"].dtype
    if drawn["item_id"].dtype != kind:
        inner.note("ids are not of the type of those in interactions.parquet", column="negatives")
    inner.refuse()
    twice = ~drawn.select(pl.struct("row", "item_id").is_first_distinct()).to_series()
    raw = inner.frame["negatives"]
    inner.note("is in this list already", column="negatives", rows=twice.arg_true(), raw=raw)
    for split in targets:
        target = (drawn["item_id"] == asked[split].gather(row)).fill_null(False).arg_true()
        message = f"is the {split} item itself"
        inner.note(message, column="negatives", rows=target, raw=raw)
    inner.refuse()
    drawn = drawn.select(user_id=user.gather(row), item_id="item_id")
    negatives = held_out.drop("item_id").join(drawn, on="user_id", maintain_order="left_right")
    negatives = negatives.with_columns(pl.lit(0, pl.Int8).alias("label label"))
    both = pl.concat([requests, negatives.select(requests.columns)])
    return both.sort("request", maintain_order=True)
