"""Prepared data sets that somebody broke, as `jagged lengths` and `jagged train` meet them."""

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pyarrow.parquet as pq
from malformed_inputs import Case, Write

INFO, HISTORIES, REQUESTS, ITEMS = (
    *("dataset.json", "histories.parquet"),
    *("requests.parquet", "items.parquet"),
)


@cache
def _prepared(seed: int = 0) -> dict[str, bytes]:
    """The files of a small data set."""
    from click_data import prepare

    with TemporaryDirectory() as place:
        sizes: dict[str, Any] = {"users": 9, "items": 9, "categories": 3, "events": 90}
        folder = prepare("synthetic", out=Path(place) / "data", seed=seed, **sizes)
        return {path.name: path.read_bytes() for path in folder.iterdir()}


def _lengths(name: str, expected: str, write: Write) -> Case:
    return Case(name, ("lengths", "{in}/data", "--out", "{out}"), expected, write)


def _train(name: str, expected: str, write: Write) -> Case:
    arguments = ("train", "--data", "{in}/data", "--model", "mean_pool", "--out", "{out}")
    return Case(name, arguments, expected, write)


def _with(changes: dict[str, bytes | None]) -> Write:
    """Writes the data set with other content of some files, None for no such file."""

    def write(folder: Path) -> None:
        (folder / "data").mkdir()
        for name, content in {**_prepared(), **changes}.items():
            if content is not None:
                (folder / "data" / name).write_bytes(content)

    return write


def _told(change: Callable[[dict[str, Any]], object]) -> Write:
    """Writes the data set with another dataset.json."""

    def write(folder: Path) -> None:
        info = json.loads(_prepared()[INFO])
        change(info)
        _with({INFO: json.dumps(info).encode()})(folder)

    return write


def cases() -> list[Case]:
    """All of this file."""
    return [*_descriptions(), *_tables(), *_lengths_of_logs()]


def _descriptions() -> list[Case]:
    info = f"{{in}}/data/{INFO}: "
    lacks = "prepare the data set again"

    def folder(place: Path) -> None:
        _with({INFO: None})(place)
        (place / "data" / INFO).mkdir()

    def lacking(what: str, change: Callable[[dict[str, Any]], object]) -> Case:
        return _train(f"dataset.json without {what}", f"{info}says nothing of {what}; {lacks}",
                      _told(change))  # fmt: skip

    return [
        _train("no dataset.json", "{in}/data: not a prepared data set (no dataset.json)",
               _with({INFO: None})),
        _train("a folder called dataset.json", "{in}/data: not a prepared data set", folder),
        _train("dataset.json of no bytes", f"{info}not readable as JSON", _with({INFO: b""})),
        _train("dataset.json cut off", f"{info}not readable as JSON",
               lambda place: _with({INFO: _prepared()[INFO][:-9]})(place)),
        _train("dataset.json in Latin-1", f"{info}not readable as JSON",
               _with({INFO: b'{"name": "caf\xe9"}'})),
        _train("dataset.json too deep", f"{info}not readable as JSON",
               _with({INFO: b"[" * 200_000})),
        _train("dataset.json that is a list", f"{info}not a data set of format 2; prepare it "
               "again: jagged prepare SOURCE --from ... --out {in}/data --force",
               _with({INFO: b"[1]"})),
        _train("dataset.json of another format", f"{info}not a data set of format 2; prepare it "
               "again: jagged prepare synthetic --users 9 --items 9 --categories 3 --events 90 "
               "--out {in}/data --force", _told(lambda told: told.update(format=99))),
        lacking("digest", lambda told: told.pop("digest")),
        lacking("counts.users", lambda told: told.update(counts=[9])),
        lacking("num_items", lambda told: told.update(num_items="ten")),
        lacking("counts.requests.train", lambda told: told["counts"].pop("requests")),
        lacking("tasks", lambda told: told.update(tasks=[])),
        lacking("context", lambda told: told.update(context={"hour": "24"})),
        lacking("item_features", lambda told: told.update(item_features={"category": None})),
        lacking("signals", lambda told: told.update(signals=None)),
        _train("signals that the tables have not", f"{info}names columns that "
               f"{HISTORIES} has not: price",
               _told(lambda told: told.update(signals=["price"]))),
        _train("features that the tables have not", f"{info}names columns that {REQUESTS} has "
               "not: feature mood", _told(lambda told: told["features"].append("mood"))),
        _train("categories that the tables have not", f"{info}names columns that {ITEMS} has "
               "not: shop", _told(lambda told: told["item_features"].update(shop=3))),
        _train("signals that are no names", f"{info}says nothing of signals",
               _told(lambda told: told.update(signals=[7]))),
        _train("files in dataset.json that are a list", f"{{in}}/data: one of {HISTORIES}, "
               f"{REQUESTS}, {ITEMS} changed since",
               _told(lambda told: told.update(files=["x"], digest="0"))),
        _train("a digest of another data set", f"{{in}}/data: {INFO} changed since",
               _told(lambda told: told.update(digest="0" * 64))),
        _train("more requests said than there are", f"{info}says 1,000,",
               _told(lambda told: told["counts"]["requests"].update(train=10**6))),
        _train("more candidates said than there are", f"{info}says 1,000,018 candidates where "
               f"{REQUESTS} has 90",
               _told(lambda told: told["counts"]["candidates"].update(train=10**6))),
        _train("fewer items said than there are", f"{info}says 2 where {ITEMS} has",
               _told(lambda told: told.update(item_rows=2))),
        _train("more items known than there are", f"{info}says 1,000 of 10 items are known",
               _told(lambda told: told.update(num_items=1000))),
        _train("users below none", f"{info}says -1 where {HISTORIES} has 9 rows",
               _told(lambda told: told["counts"].update(users=-1))),
    ]  # fmt: skip


def _tables() -> list[Case]:
    changed = "changed since the data set was prepared, or is of another one"

    def table_is_folder(place: Path) -> None:
        _with({ITEMS: None})(place)
        (place / "data" / ITEMS).mkdir()

    def table_is_link(place: Path) -> None:
        _with({HISTORIES: None})(place)
        (place / "data" / HISTORIES).symlink_to("gone.parquet")

    def other(name: str) -> Write:
        return lambda place: _with({name: _prepared(1)[name]})(place)

    def one_byte(place: Path) -> None:
        table = bytearray(_prepared()[REQUESTS])
        table[len(table) // 2] ^= 1
        _with({REQUESTS: bytes(table)})(place)

    def sorted_otherwise(place: Path) -> None:
        _with({})(place)
        path = place / "data" / REQUESTS
        table = pq.read_table(path)
        pq.write_table(table.take(list(range(len(table)))[::-1]), path)

    return [
        _train("no requests", f"{{in}}/data/{REQUESTS}: missing; prepare the data set again",
               _with({REQUESTS: None})),
        _train("a folder for a table", f"{{in}}/data/{ITEMS}: missing", table_is_folder),
        _train("a dangling link for a table", f"{{in}}/data/{HISTORIES}: missing", table_is_link),
        _train("a table of no bytes", f"{{in}}/data: {REQUESTS} {changed}", _with({REQUESTS: b""})),
        _train("a table of another data set", f"{{in}}/data: {ITEMS} {changed}", other(ITEMS)),
        _train("a table with one bit changed", f"{{in}}/data: {REQUESTS} {changed}", one_byte),
        _train("a table in another order", f"{{in}}/data: {REQUESTS} {changed}", sorted_otherwise),
        _lengths("lengths of a table of another data set", f"{{in}}/data: {HISTORIES} {changed}",
                 other(HISTORIES)),
        _lengths("lengths of a broken dataset.json", f"{{in}}/data/{INFO}: not readable as JSON",
                 _with({INFO: b"{"})),
    ]  # fmt: skip


def _lengths_of_logs() -> list[Case]:
    def case(name: str, file: str, content: bytes, expected: str) -> Case:
        def write(folder: Path) -> None:
            (folder / file).write_bytes(content)

        arguments = ("lengths", f"{{in}}/{file}", "--out", "{out}")
        return Case(name, arguments, f"{{in}}/{file}: {expected}", write)

    many = b"user_id\n" + b"1\n2\n" * 9
    return [
        case("lengths of nobody", "log.csv", b"user_id,item_id\n", "the file is empty"),
        case("lengths of users without a name", "log.csv", many + b"NaN\n", "column user_id, line "
             "20: 'NaN' is no id"),
        case("lengths of users once each", "log.csv", b"user_id\n1\n2\n", "every user has one row"),
        case("lengths without users", "log.csv", b"who,what\n1,2\n", "has neither a column"),
        case("lengths of a file that there is no more", "log.parquet", b"PAR1", "not a readable"),
    ]  # fmt: skip
