"""Click-through sets as the BARS benchmark (reczoo) publishes them: train.csv and test.csv.

AmazonElectronics_x1, TaobaoAd_x1, KuaiVideo_x1 and MicroVideo1.7M_x1: each row has a user, an item,
labels, and the user's history as text such as 12^7^9; which set it is, its columns tell. valid.csv
is read if there is one; else the last tenth of each user's training rows is for validation.

The histories of one user are put together into one, so that a row may see more than the last 50 or
100 events that its own text holds. Where it cannot be told which of two came first, the row is
refused. Times of events are not known. TaobaoAd's histories are of categories and brands, not of
items: each pair of them is an item of its own.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import groupby
from operator import itemgetter
from pathlib import Path

import polars as pl

from click_data import columns
from click_data.errors import DataError
from click_data.events import ClickLog
from click_data.plain import refuse_absent
from click_data.schema import file_digest
from click_data.sources import features
from click_data.sources.candidates import same_ids
from click_data.sources.windows import put_together
from click_data.split import SPLITS
from click_data.table import Table, concatenate, read_parquet
from click_data.text import read_text

_BETWEEN = "^"


@dataclass(frozen=True)
class Layout:
    """Columns of one set.

    labels: the first one is what is ranked by. history: the file's lists by what each says of an
    event, "item_id", "item NAME" or "signal NAME". items: what rows say of their items.
    order: of rows in time; None: as they are in the file. pairs: rows of one history are one list.
    """

    user: str
    item: str
    labels: tuple[str, ...]
    history: Mapping[str, str]
    items: Mapping[str, str] = field(default_factory=dict)
    contexts: tuple[str, ...] = ()
    order: str | None = None
    pairs: bool = False

    @property
    def needed(self) -> tuple[str, ...]:
        order = (self.order,) if self.order else ()
        return (self.user, self.item, *self.labels, *self.history, *self.items, *order)


_CATE = {"cate_id": "item category"}
LAYOUTS = {
    "AmazonElectronics_x1": Layout(
        user="user_id",
        item="item_id",
        labels=("label",),
        history={"item_history": "item_id", "cate_history": "item category"},
        items=_CATE,
        pairs=True,
    ),
    "TaobaoAd_x1": Layout(
        user="userid",
        item="adgroup_id",
        labels=("clk",),
        history={
            "cate_his": "item category",
            "brand_his": "item brand",
            "btag_his": "signal btag",
        },
        items={
            **_CATE,
            "brand": "item brand",
            "campaign_id": "item campaign",
            "customer": "item customer",
            "price": "dense price",
        },
        contexts=(
            *("pid", "cms_segid", "cms_group_id", "final_gender_code", "age_level"),
            *("pvalue_level", "shopping_level", "occupation", "new_user_class_level"),
        ),
    ),
    "KuaiVideo_x1": Layout(
        user="user_id",
        item="item_id",
        labels=("is_click", "is_like", "is_follow"),
        history={"pos_items": "item_id"},
        order="timestamp",
    ),
    "MicroVideo1.7M_x1": Layout(
        user="user_id",
        item="item_id",
        labels=("is_click",),
        history={"clicked_items": "item_id", "clicked_categories": "item category"},
        items=_CATE,
        order="timestamp",
    ),
}


@dataclass(frozen=True)
class ReczooOptions:
    """Nothing is to be chosen."""


def load(path: Path | None, options: ReczooOptions, seed: int) -> ClickLog:
    """Read the rows of all files. Raises DataError about all bad rows at once."""
    del options, seed  # nothing here is random
    assert path is not None
    files = _files(path)
    wanted = {name for layout in LAYOUTS.values() for name in (*layout.needed, *layout.contexts)}
    tables = [_read(file, wanted) for file in files.values()]
    layout = _layout(tables[0])
    contexts = tuple(name for name in layout.contexts if name in tables[0].columns)
    for table in tables:
        table.require(*layout.needed, *contexts)
    table = concatenate(tables)
    rows = pl.DataFrame(
        {
            "user_id": columns.ids(table, layout.user),
            "item_id": columns.ids(table, layout.item),
            "split": _splits(files, tables),
            **{f"label {name}": columns.labels(table, name) for name in layout.labels},
            **{f"context {name}": features.ids(table, name) for name in contexts},
            "when": columns.numbers(table, layout.order)
            if layout.order
            else pl.int_range(len(table.frame), eager=True).cast(pl.Float64),
        }
    )
    items = {"item_id": rows["item_id"]} | {
        name: features.numbers(table, theirs).fill_null(0)
        if name.startswith("dense ")
        else features.ids(table, theirs)
        for theirs, name in layout.items.items()
    }
    table.refuse()
    events, rows = _histories(table, rows, layout)
    told = pl.DataFrame(items).unique("item_id", keep="first", maintain_order=True)
    candidates, events, told = same_ids(_requests(rows, layout), events, told)
    return ClickLog(
        name=path.resolve().name,
        events=events,
        candidates=candidates,
        items=told,
        tasks=layout.labels,
        timed="none",
        counted={"rows": len(rows), "users": rows["user_id"].n_unique()},
        inputs=tuple({"file": f.name, "sha256": file_digest(f)} for f in files.values()),
        read={"columns": {name: name for name in (*layout.needed, *contexts)}, "unread": []},
    )


def _files(path: Path) -> dict[str, Path]:
    """The file of each split."""
    refuse_absent(path)
    found: dict[str, Path] = {}
    for split in SPLITS:
        named = [path / f"{split}{kind}" for kind in (".csv", ".csv.gz", ".parquet")]
        file = next((file for file in named if file.is_file()), None)
        if file:
            found[split] = file
    for split in ("train", "test"):
        if split not in found:
            raise DataError(f"no {split}.csv or {split}.parquet in this folder", file=path)
    return found


def _read(file: Path, wanted: set[str]) -> Table:
    if file.suffix == ".parquet":
        return read_parquet(file, wanted=wanted)
    return read_text(file, wanted=wanted)


def _layout(table: Table) -> Layout:
    """The layout whose columns are there."""
    for layout in LAYOUTS.values():
        if {*layout.needed} <= {*table.columns}:
            return layout
    known = "; ".join(f"{name}: {', '.join(of.needed)}" for name, of in LAYOUTS.items())
    table.fail(f"not the columns of a set that is known ({known})")


def _splits(files: dict[str, Path], tables: list[Table]) -> pl.Series:
    each = pl.DataFrame({"split": list(files), "rows": [len(one.frame) for one in tables]})
    return each.select(pl.col("split").repeat_by("rows").explode()).to_series()


def _histories(
    table: Table, rows: pl.DataFrame, layout: Layout
) -> tuple[pl.DataFrame, pl.DataFrame]:
    """The events of all users, and the rows with the number of events that each may see."""
    said = [pl.col(name).cast(pl.String).fill_null("") for name in layout.history]
    texts = table.frame.select(said).rename({n: f"text {n}" for n in layout.history})
    names = texts.columns
    rows = pl.concat([rows, texts], how="horizontal").with_row_index("row")
    # Long lists come last: those of full length are windows, which move with time.
    lengths = [pl.col(name).str.count_matches(_BETWEEN, literal=True) for name in names]
    distinct = (
        rows.group_by("user_id", *names)
        .agg(pl.col("when").min(), pl.col("row").min(), rows="row")
        .with_columns(length=lengths[0], whole=pl.all_horizontal(n == lengths[0] for n in lengths))
        .sort("user_id", "length", "when", "row")
    )
    uneven = distinct.filter(~pl.col("whole"))["row"].sort()
    message = f"the list has another length than that in column {next(iter(layout.history))}"
    table.note(message, column=list(layout.history)[-1], rows=uneven)
    table.refuse()
    ends: list[int] = []
    users: list[int | str] = []
    events: list[tuple[str, ...]] = []
    each = distinct.select("user_id", "row", *names).iter_rows()
    for user, of_user in groupby(each, key=itemgetter(0)):
        mine = list(of_user)
        try:
            histories = [_split(texts) for _, _, *texts in mine]
            made, sees = put_together(histories, ordered=layout.order is not None)
        except ValueError as error:
            late = pl.Series([mine[error.args[0]][1]])
            message = "the history may be earlier than one of the same user before it"
            table.note(message, column=next(iter(layout.history)), rows=late)
            continue
        events += made
        users += [user] * len(made)
        ends += sees
    table.refuse()
    found = distinct.select("rows", prefix=pl.Series(ends, dtype=pl.Int64)).explode("rows")
    rows = rows.drop(names).with_columns(found.sort("rows")["prefix"])
    return _events(rows, users, events, layout), rows


def _split(texts: list[str]) -> list[tuple[str, ...]]:
    """The events of one history, with what each list says of them."""
    if not texts[0]:
        return []
    return list(zip(*(text.split(_BETWEEN) for text in texts), strict=True))


def _events(
    rows: pl.DataFrame, users: list[int | str], events: list[tuple[str, ...]], layout: Layout
) -> pl.DataFrame:
    kinds = dict.fromkeys(layout.history.values(), pl.String)
    told = pl.DataFrame(events, schema=kinds, orient="row")
    frame = told.with_columns(user_id=pl.Series(users, dtype=rows["user_id"].dtype))
    place = pl.int_range(pl.len(), dtype=pl.Int64).over("user_id")
    frame = frame.with_columns(place.alias("time"))
    if "item_id" not in frame.columns:
        pair = pl.format("category {} brand {}", "item category", "item brand")
        frame = frame.with_columns(item_id=pair)
    out = {"user_id": frame["user_id"], "item_id": frame["item_id"], "time": frame["time"]}
    for name in frame.columns:
        if name.startswith("item ") or name == "item_id":
            out[name] = columns.as_integers(frame[name])
        elif name.startswith("signal "):
            for value in frame[name].unique().sort():
                out[f"{name}={value}"] = (frame[name] == value).cast(pl.Float32)
    return pl.DataFrame(out)


def _requests(rows: pl.DataFrame, layout: Layout) -> pl.DataFrame:
    """Candidates; where no file is for validation, the last tenth of each user's training is."""
    whole = ("split", "user_id", "prefix") if layout.pairs else ("row",)
    request = pl.struct(whole).rank("dense").cast(pl.Int64)
    rows = rows.with_columns(request=request, time=pl.col("prefix"))
    if "valid" not in rows["split"].unique():
        each = rows.filter(pl.col("split") == "train").group_by("request")
        each = each.agg(pl.col("user_id", "prefix", "when").first())
        each = each.sort("user_id", "prefix", "when", "request")
        number = pl.col("user_id").rank("dense")
        left = pl.len().over("user_id") - pl.int_range(pl.len()).over("user_id")
        # Rounded up for some users and down for others, so that a tenth of all is held out.
        some = (pl.len().over("user_id") + number % 10) // 10
        held_out = each.filter(left <= some)["request"]
        valid = pl.col("request").is_in(held_out.implode())
        rows = rows.with_columns(
            split=pl.when(valid).then(pl.lit("valid")).otherwise(pl.col("split"))
        )
    return rows.drop("row", "when")
