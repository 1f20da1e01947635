"""MIND (Wu et al., ACL 2020), as Microsoft publishes it: train/ and dev/, or one of them.

behaviors.tsv  impression id, user id, time such as 11/15/2019 8:55:22 AM, the user's earlier
    clicks, and the news shown, each with -1 (clicked) or -0; without a header
news.tsv       news id, category, subcategory, title and more; may be absent

Clicks of the history have an order and no times, and precede all requests: the lists of one user
are one list, of which each is a beginning.
"""

from dataclasses import dataclass, replace
from pathlib import Path

import polars as pl

from click_data import columns
from click_data.events import ClickLog
from click_data.schema import file_digest
from click_data.sources.candidates import same_ids, shown_once
from click_data.sources.lists import elements
from click_data.sources.official import folders, official_split
from click_data.table import Table, concatenate
from click_data.text import read_text

_BEHAVIORS = ("impression_id", "user_id", "time", "history", "impressions")
_NEWS = ("news_id", "category", "subcategory", "title", "abstract", "url", "entities", "mentions")
_CLOCK = "%m/%d/%Y %I:%M:%S %p"
_WORDS = r"\S+"


@dataclass(frozen=True)
class MindOptions:
    """by_time: split all requests by time, not dev/ from train/ (dev/ gives valid and test)."""

    by_time: bool = False


def load(path: Path | None, options: MindOptions, seed: int) -> ClickLog:
    """Read impressions, histories and categories. Raises DataError about all bad lines at once."""
    del seed  # nothing here is random
    assert path is not None
    found = folders(path, "behaviors.tsv")
    files = [folder / "behaviors.tsv" for _, folder in found]
    read = {"separator": "\t", "names": _BEHAVIORS, "wanted": _BEHAVIORS}
    table = concatenate([read_text(file, **read) for file in files])
    user = columns.ids(table, "user_id")
    time = _times(table)
    history = table.frame["history"].fill_null("").str.extract_all(_WORDS)
    _note_other_histories(table, user, history)
    shown = table.frame["impressions"].fill_null("").str.extract_all(_WORDS)
    empty = (shown.list.len() == 0).arg_true()
    table.note("no news was shown: a list without candidates", column="impressions", rows=empty)
    table.refuse()

    lists = pl.DataFrame({"history": history, "impressions": shown})
    table = replace(table, frame=lists)
    inner, row = elements(table, ["impressions"])
    pair = inner.frame["impressions"].str.extract_groups(r"^(\S+)-([01])$").struct
    candidates = pl.DataFrame(
        {
            "request": row,
            "user_id": user.gather(row),
            "time": time.gather(row),
            "item_id": pair.field("1"),
            "label label": pair.field("2").cast(pl.Int8),
            "prefix": history.list.len().cast(pl.Int64).gather(row),
        }
    )
    message = "is not a news id and its label, as N123-1 is (a test set has no labels to use)"
    bad, raw = candidates["item_id"].is_null().arg_true(), inner.frame["impressions"]
    inner.note(message, column="impressions", rows=bad, raw=raw)
    inner.refuse()
    roles = [role for role, _ in found]
    split = official_split(roles, [part.rows for part in table.parts], time)
    if split is not None and not options.by_time:
        candidates = candidates.with_columns(split=split.gather(row))

    candidates, dropped = shown_once(candidates)
    news = [folder / "news.tsv" for _, folder in found if (folder / "news.tsv").is_file()]
    items = _items(news) if news else None
    candidates, events, items = same_ids(candidates, _events(user, history), items)
    return ClickLog(
        name=path.resolve().name,
        events=events,
        candidates=candidates,
        items=items,
        timed="requests",
        inputs=tuple({"file": f.name, "sha256": file_digest(f)} for f in (*files, *news)),
        read={"columns": {name: name for name in _BEHAVIORS}, "unread": []},
        dropped=dropped,
    )


def _times(table: Table) -> pl.Series:
    """Unix seconds; the log's clock is read as UTC."""
    raw = table.frame["time"]
    clock = raw.str.to_datetime(_CLOCK, strict=False, time_unit="us")
    message = "is not a time, as 11/15/2019 8:55:22 AM is"
    table.note(message, column="time", rows=clock.is_null().arg_true(), raw=raw)
    return clock.dt.epoch("s")


def _note_other_histories(table: Table, user: pl.Series, history: pl.Series) -> None:
    """Note the rows whose history does not begin the longest one of their user."""
    rows = pl.DataFrame({"user": user, "said": history, "length": history.list.len()})
    longest = pl.col("said").get(pl.col("length").arg_max()).over("user")
    begins = rows.with_columns(longest.alias("longest")).select(
        pl.col("longest").list.head(pl.col("length")) == pl.col("said")
    )
    message = "does not begin like the longest history of the same user"
    table.note(message, column="history", rows=(~begins.to_series()).arg_true())


def _events(user: pl.Series, history: pl.Series) -> pl.DataFrame:
    """The longest history of each user, with the position in it as time."""
    rows = pl.DataFrame({"user_id": user, "item_id": history, "length": history.list.len()})
    longest = rows.sort("length", descending=True, maintain_order=True)
    longest = longest.unique("user_id", keep="first").filter(pl.col("length") > 0).sort("user_id")
    events = longest.select("user_id", "item_id").explode("item_id")
    place = pl.int_range(pl.len(), dtype=pl.Int64).over("user_id")
    return events.with_columns(place.alias("time"))


def _items(files: list[Path]) -> pl.DataFrame:
    """Categories of all news, by the first file that has it."""
    wanted = _NEWS[:3]
    read = {"separator": "\t", "names": _NEWS, "wanted": wanted}
    table = concatenate([read_text(file, **read) for file in files])
    out = {"item_id": columns.ids(table, "news_id")}
    for name in wanted[1:]:
        out[f"item {name}"] = columns.ids(table, name, optional=True)
    table.refuse()
    return pl.DataFrame(out).unique("item_id", keep="first", maintain_order=True)
