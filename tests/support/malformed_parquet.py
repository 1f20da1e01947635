"""Logs in Parquet: broken files, columns of types that no log has, and folders of several files."""

import datetime as dt
import io
import random
from collections.abc import Callable, Sequence
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
from malformed_inputs import BAD, HEADER, ROWS, SEED, Case, Write, file, log, prepare, text

USER, ITEM, TIME, LABEL = (list(column) for column in zip(*ROWS, strict=True))
COLUMNS: dict[str, pa.Array] = {
    "user_id": pa.array(USER),
    "item_id": pa.array(ITEM),
    "timestamp": pa.array([int(time) for time in TIME]),
    "label": pa.array([int(label) for label in LABEL], pa.int8()),
}
COUNT = len(ROWS)


def cases() -> list[Case]:
    """All of this file."""
    return [*_broken(), *_ids(), *_times(), *_labels(), *_folders()]


def packed(columns: dict[str, pa.Array] = COLUMNS, **options: Any) -> bytes:
    """A log as Parquet."""
    buffer = io.BytesIO()
    pq.write_table(pa.table(columns), buffer, **options)
    return buffer.getvalue()


def with_column(name: str, values: Any, kind: pa.DataType | None = None) -> bytes:
    """A log one of whose columns is another."""
    column = values if isinstance(values, pa.Array) else pa.array(values, kind)
    return packed({**COLUMNS, name: column})


def among(values: Sequence[Any], bad: Any) -> list[Any]:
    """The values, one of which is another."""
    return [bad if n == BAD else value for n, value in enumerate(values)]


def _parquet(name: str, content: bytes, expected: str, *options: str) -> Case:
    return log(name, content, expected, *options, path="log.parquet")


def _broken() -> list[Case]:
    whole = packed(compression="none")
    drawn = random.Random(SEED)
    page = bytearray(packed(compression="zstd"))
    for place in range(4, len(page) // 3):
        page[place] = drawn.randrange(256)
    ipc = io.BytesIO()
    pl.DataFrame(dict(COLUMNS)).write_ipc(ipc)
    twice = io.BytesIO()
    names = ["user_id", "item_id", "timestamp", "item_id"]
    pq.write_table(pa.Table.from_arrays([pa.array(TIME)] * 4, names=names), twice)
    nested = pa.array([dict(zip(HEADER, row, strict=True)) for row in ROWS])
    truncated = "not a readable Parquet file, truncated?"
    return [
        _parquet("Parquet of no bytes", b"", truncated),
        _parquet("Parquet's first bytes alone", b"PAR1", truncated),
        _parquet("Parquet cut in its footer", whole[:-7], truncated),
        _parquet("Parquet cut in its middle", whole[: len(whole) // 2], truncated),
        _parquet("Parquet with another end", whole[:-4] + b"PAR2", truncated),
        _parquet("encrypted Parquet", b"PARE" + whole[4:-4] + b"PARE", truncated),
        _parquet("a footer said to be longer than the file",
                 whole[:-8] + b"\xff\xff\xff\x7f" + whole[-4:], truncated),
        _parquet("Parquet with drawn bytes in a page", bytes(page), truncated),
        _parquet("a name in Parquet that is not UTF-8", whole.replace(b"item_id", b"item\xffid"),
                 truncated),
        _parquet("CSV called Parquet", text().encode(), truncated),
        _parquet("Arrow called Parquet", ipc.getvalue(), truncated),
        log("Parquet called CSV", whole, "is no text, but by its first bytes Parquet"),
        _parquet("Parquet without rows", packed({n: c[:0] for n, c in COLUMNS.items()}),
                 "the file is empty: it has no rows"),
        _parquet("Parquet without columns", packed({}), "the file is empty: it has no rows"),
        _parquet("columns in a struct", packed({"event": nested}), "column user_id: missing, and "
                 "so are: item_id, timestamp; the file has: event"),
        _parquet("a column twice in Parquet", twice.getvalue(), "column item_id: 2 columns have"),
        _parquet("Parquet with a separator", whole, "is Parquet, which needs no --separator",
                 "--separator", "tab"),
        _parquet("Parquet with an encoding", whole, "is Parquet, which needs no --encoding",
                 "--encoding", "utf-8"),
    ]  # fmt: skip


def _ids() -> list[Case]:
    def case(
        name: str, values: Any, expected: str, kind: pa.DataType | None = None, *,
        column: str = "user_id",
    ) -> Case:  # fmt: skip
        content = with_column(column, values, kind)
        return _parquet(name, content, f"column {column}{expected}")

    numbers = list(range(COUNT))
    one = [n + 0.0 for n in numbers]
    not_ids = ": ids must be integers or strings, not"
    dictionary = pa.array(among(USER, None)).dictionary_encode()
    # Entries of a dictionary of three are numbers of two bits, the last ones of the column.
    entries = {**COLUMNS, "user_id": pa.array(USER).dictionary_encode()}
    beyond = bytearray(packed(entries, compression="none"))
    chunk = pq.read_metadata(io.BytesIO(beyond)).row_group(0).column(0)
    beyond[chunk.dictionary_page_offset + chunk.total_compressed_size - 1] = 0xFF
    return [
        case("a null among users", among(USER, None), ", row 4: no id"),
        case("a null among items in a dictionary", dictionary, ", row 4: no id", column="item_id"),
        _parquet("an entry that a dictionary has not", bytes(beyond),
                 "column user_id: cannot be read as dictionary<"),
        case("an empty word among users", among(USER, ""), ", row 4: no id"),
        case("a user that is no whole number", among(one, 2.5), ", row 4: 2.5 is not an integer"),
        case("a user that is not a number", among(one, float("nan")), ", row 4: no id"),
        case("an infinite user", among(one, float("inf")), ", row 4: inf is not an integer id"),
        case("a user beyond 64 bits with a sign", among(numbers, 2**63),
             ", row 4: 9223372036854775808 is not an integer id", pa.uint64()),
        case("a user in parts of one", among([Decimal(n) for n in numbers], Decimal("2.5")),
             ", row 4: Decimal('2.50') is not an integer id", pa.decimal128(12, 2)),
        case("users in lists", [[n] for n in numbers], f"{not_ids} List"),
        case("users in structs", [{"id": n} for n in numbers], f"{not_ids} Struct"),
        case("users in maps", [[("id", n)] for n in numbers], not_ids,
             pa.map_(pa.string(), pa.int64())),
        case("users that are true or false", [n % 2 == 0 for n in numbers], f"{not_ids} Boolean"),
        case("users in bytes", [user.encode() for user in USER], f"{not_ids} Binary"),
        case("users in 16 bytes", [bytes(16)] * COUNT, f"{not_ids} Binary", pa.binary(16)),
        case("users that are days", [dt.date(2020, 1, 1)] * COUNT, f"{not_ids} Date"),
        case("users that are nothing", pa.nulls(COUNT), ", row 0: no id: the value is missing (and "
             "23 more rows)"),
    ]  # fmt: skip


def _of_column(
    column: str, name: str, values: Any, expected: str, kind: pa.DataType | None = None
) -> Case:
    """A log one column of which holds other values."""
    return _parquet(name, with_column(column, values, kind), f"column {column}{expected}")


def _times() -> list[Case]:
    case = partial(_of_column, "timestamp")
    numbers = [int(time) for time in TIME]
    days = [dt.datetime.fromtimestamp(time, dt.UTC) for time in numbers]
    not_times = ": times must be numbers or dates, not"
    zoned = pa.timestamp("us", tz="America/New_York")
    unknown_zone = pa.timestamp("us", tz="Mars/Olympus")
    early = [dt.datetime(1969, 12, 31, 23, tzinfo=dt.UTC)]
    return [
        case("a null among times", among(numbers, None), ", row 4: no time"),
        case("a float that is no time", among([t + 0.5 for t in numbers], float("nan")),
             ", row 4: nan is not a time"),
        case("an infinite float for a time", among([t + 0.5 for t in numbers], float("-inf")),
             ", row 4: -inf is not a time"),
        case("a time beyond 64 bits with a sign", among(numbers, 2**64 - 1),
             ", row 4: 18446744073709551615 is after the year 2100", pa.uint64()),
        case("milliseconds in Parquet", [1000 * time for time in numbers],
             ", row 0: 1600000000000 is after the year 2100 as s since 1970; it is 2020-09-13"),
        case("a time with a zone before 1970", [*early, *days[1:]], ", row 0: datetime"
             ".datetime(1969, 12, 31, 18, 0, tzinfo=", zoned),
        case("a zone that there is not", days, ": cannot be read as timestamp[us, tz="
             "Mars/Olympus] (", unknown_zone),
        case("a day after 2100", among([day.date() for day in days], dt.date(2101, 1, 1)),
             ", row 4: datetime.date(2101, 1, 1) is after the year 2100"),
        case("times that are how long", [dt.timedelta(seconds=n) for n in range(COUNT)],
             f"{not_times} Duration"),
        case("times of a day without the day", [dt.time(2, n) for n in range(COUNT)],
             f"{not_times} Time"),
        case("times that are true or false", [True] * COUNT, f"{not_times} Boolean"),
        case("times in lists", [[time] for time in numbers], f"{not_times} List"),
        case("times in bytes", [time.encode() for time in TIME], f"{not_times} Binary"),
        case("a time in words in a dictionary", pa.array(among(TIME, "soon")).dictionary_encode(),
             ", row 4: 'soon' is neither a number"),
    ]  # fmt: skip


def _labels() -> list[Case]:
    case = partial(_of_column, "label")
    numbers = [int(label) for label in LABEL]
    as_decimals = [Decimal(label) for label in numbers]
    return [
        case("a null among labels", among(numbers, None), ", row 4: no number"),
        case("a label beyond 1 in Parquet", among(numbers, 3), ", row 4: 3 is not a label"),
        case("labels in words in Parquet", among(LABEL, "one"), ", row 4: 'one' is not a finite"),
        case("labels in structs", [{"click": n} for n in numbers], ": values must be numbers"),
        case("labels that are days", [dt.date(2020, 1, 1 + n) for n in numbers],
             ": values must be numbers"),
        case("a label in a decimal", among(as_decimals, Decimal("0.5")),
             ", row 4: Decimal('0.50') is not a label",
             pa.decimal128(4, 2)),
        case("labels in half precision with one of inf", among([float(n) for n in numbers],
             float("inf")), ", row 4: inf is not a finite number", pa.float16()),
        _parquet("a signal in lists", with_column("price", [[n] for n in numbers]),
                 "column price: values must be numbers", "--signal", "price"),
    ]  # fmt: skip


def _folders() -> list[Case]:
    first = packed({name: column[:12] for name, column in COLUMNS.items()})
    rest = {name: column[12:] for name, column in COLUMNS.items()}

    def case(
        name: str, second: bytes, expected: str, *options: str, at: str = "log/part-1.parquet"
    ) -> Case:
        def write(folder: Path) -> None:
            file("log/part-0.parquet", first)(folder)
            file("log/part-1.parquet", second)(folder)

        return Case(name, prepare("log", "log", *options), f"{{in}}/{at}: {expected}", write)

    def changed(name: str, change: Callable[[list[Any]], list[Any]], kind: Any = None) -> bytes:
        return packed({**rest, name: pa.array(change(rest[name].to_pylist()), kind)})

    def folder_called_parquet(folder: Path) -> None:
        file("log/part-0.parquet", first)(folder)
        (folder / "log/part-1.parquet").mkdir()

    lacking = packed({name: column for name, column in rest.items() if name != "item_id"})
    others: list[Case] = [
        Case("a folder among the files of a folder", prepare("log", "log"),
             "{in}/log/part-1.parquet: not a readable Parquet file", folder_called_parquet),
        Case("a dangling link among the files of a folder", prepare("log", "log"),
             "{in}/log/part-1.parquet: not a readable Parquet file", _with_link(first)),
    ]  # fmt: skip
    return [
        case("another type in the second file", changed("item_id", lambda v: list(range(12))),
             "columns or their types differ from those of {in}/log/part-0.parquet"),
        case("a label column in one of two files", packed({n: rest[n] for n in HEADER[:3]}),
             "columns or their types differ from those of {in}/log/part-0.parquet"),
        case("a column missing in the second file", lacking, "holds several tables; name the one "
             "of events", at="log"),
        case("the second file cut off", first[:-20], "not a readable Parquet file, truncated?"),
        case("the second file without rows", packed({n: c[:0] for n, c in rest.items()}),
             "the file is empty: it has no rows"),
        case("a bad row in the second file", changed("timestamp", lambda v: [-1, *v[1:]]),
             "column timestamp, row 0: -1 is a negative time"),
        case("time backwards from file to file", changed("timestamp", lambda v: [5] * 12),
             "column timestamp, row 0: time goes backwards"),
        case("a file twice under two names", first, "row 0: the same user, item and time",
             "--sort"),
        *others,
    ]  # fmt: skip


def _with_link(first: bytes) -> Write:
    def write(folder: Path) -> None:
        file("log/part-0.parquet", first)(folder)
        (folder / "log/part-1.parquet").symlink_to("gone.parquet")

    return write
