"""EB-NeRD (Kruse et al., RecSys 2024), as Ekstra Bladet publishes it: train/ and validation/.

behaviors.parquet  a row for each list shown: user_id, impression_time, article_ids_inview,
    article_ids_clicked, device_type and more
history.parquet    a row for each user: user_id and lists article_id_fixed, impression_time_fixed,
    read_time_fixed, scroll_percentage_fixed
articles.parquet   in the folder itself or in one of the two: category, article_type, premium; may
    be absent. Counts of views are not read: they hold what comes after a request.

A request may see the events of both folders' histories at strictly earlier times.
"""

from dataclasses import dataclass, replace
from pathlib import Path

import polars as pl

from click_data import columns
from click_data.errors import DataError
from click_data.events import ClickLog
from click_data.schema import file_digest
from click_data.sources import features
from click_data.sources.candidates import same_ids, shown_once, with_clicks
from click_data.sources.lists import elements
from click_data.sources.official import folders, official_split
from click_data.table import Table, concatenate, read_parquet

_BEHAVIORS = ("user_id", "impression_time", "article_ids_inview", "article_ids_clicked")
_HISTORY = {
    "article_id_fixed": "item_id",
    "impression_time_fixed": "time",
    "read_time_fixed": "signal read_time",
    "scroll_percentage_fixed": "signal scroll_percentage",
}
_ARTICLE = ("category", "article_type", "premium")


@dataclass(frozen=True)
class EbnerdOptions:
    """How to read the two folders, or one of them.

    contexts: columns of behaviors.parquet that describe a request.
    append_clicks: the clicked articles of earlier lists are events of the history, too, unless
        it has them.
    by_time: split all requests by time, not validation/ (which gives valid and test) from train/.
    """

    contexts: tuple[str, ...] = ("device_type",)
    append_clicks: bool = False
    by_time: bool = False


def load(path: Path | None, options: EbnerdOptions, seed: int) -> ClickLog:
    """Read lists, histories and categories. Raises DataError about all bad rows at once."""
    del seed  # nothing here is random
    assert path is not None
    found = folders(path, "behaviors.parquet")
    files = [folder / "behaviors.parquet" for _, folder in found]
    histories = [folder / "history.parquet" for _, folder in found]
    for file in histories:
        if not file.is_file():
            raise DataError("no such file, which behaviors.parquet needs beside it", file=file)
    wanted = (*_BEHAVIORS, *options.contexts)
    table = _read(files, wanted)
    user = columns.ids(table, "user_id")
    time = columns.times(table, "impression_time")
    contexts = {f"context {name}": features.context(table, name) for name in options.contexts}
    table.refuse()
    inner, row = elements(table, ["article_ids_inview"])
    empty = table.frame["article_ids_inview"].list.len().fill_null(0) == 0
    message = "no article was shown: a list without candidates"
    table.note(message, column="article_ids_inview", rows=empty.arg_true())
    table.refuse()
    shown = columns.ids(inner, "article_ids_inview")
    clicked, of_click = elements(table, ["article_ids_clicked"])
    clicks = {"request": of_click, "item_id": columns.ids(clicked, "article_ids_clicked")}
    clicked.refuse()
    clicks = pl.DataFrame(clicks).unique().with_columns(pl.lit(1, pl.Int8).alias("label label"))
    candidates = pl.DataFrame(
        {
            "request": row,
            "user_id": user.gather(row),
            "time": time.gather(row),
            "item_id": shown,
            **{name: values.gather(row) for name, values in contexts.items()},
        }
    )
    inner.refuse()
    candidates, dropped = shown_once(candidates)
    candidates = candidates.join(
        clicks, on=("request", "item_id"), how="left", maintain_order="left"
    ).with_columns(pl.col("label label").fill_null(0))
    roles = [role for role, _ in found]
    split = official_split(roles, [part.rows for part in table.parts], time)
    if split is not None and not options.by_time:
        candidates = candidates.with_columns(split=split.gather(candidates["request"]))

    events = _events(histories)
    articles = [folder / "articles.parquet" for folder in (path, *(folder for _, folder in found))]
    articles = [file for file in articles if file.is_file()][:1]
    items = features.items(articles[0], item_id="article_id", wanted=_ARTICLE) if articles else None
    candidates, events, items = same_ids(candidates, events, items)
    if options.append_clicks:
        events = with_clicks(events, candidates)
    if unseen := len(clicks) - int(candidates["label label"].sum()):
        dropped |= {"rows": len(row), "clicked_unseen": unseen}
    inputs = (*files, *histories, *articles)
    return ClickLog(
        name=path.resolve().name,
        events=features.with_known(events),
        candidates=candidates,
        items=items,
        inputs=tuple({"file": file.name, "sha256": file_digest(file)} for file in inputs),
        read={
            "columns": {name: name for name in _BEHAVIORS},
            "unread": [name for name in table.columns if name not in wanted],
        },
        dropped=dropped,
    )


def _events(files: list[Path]) -> pl.DataFrame:
    """Events of all histories, each once: the two folders' overlap."""
    table = _read(files, ("user_id", *_HISTORY))
    user = columns.ids(table, "user_id")
    table.refuse()
    inner, row = elements(table, tuple(_HISTORY))
    out = {"user_id": user.gather(row)}
    for column, name in _HISTORY.items():
        if name == "item_id":
            out[name] = columns.ids(inner, column)
        elif name == "time":
            out[name] = columns.times(inner, column)
        else:
            out[name] = features.numbers(inner, column)
    inner.refuse()
    events = pl.DataFrame(out).unique(("user_id", "item_id", "time"), maintain_order=True)
    return events.sort("user_id", "time", maintain_order=True)


def _read(files: list[Path], wanted: tuple[str, ...]) -> Table:
    """The wanted columns of all files, in one order."""
    tables = []
    for file in files:
        table = read_parquet(file, wanted=wanted)
        table.require(*wanted)
        tables.append(replace(table, frame=table.frame.select(wanted)))
    return concatenate(tables)
