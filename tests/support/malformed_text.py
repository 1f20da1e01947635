"""Logs in CSV, and what is no CSV though it is called so."""

import bz2
import codecs
import gzip
import io
import json
import lzma
import os
import random
import sqlite3
import tarfile
import zipfile
from datetime import UTC, datetime
from pathlib import Path

from malformed_inputs import (
    BAD,
    HEADER,
    ROWS,
    SEED,
    Case,
    Write,
    file,
    log,
    prepare,
    rows_with,
    text,
)

PLAIN = text()


def cases() -> list[Case]:
    """All of this file."""
    return [*_files(), *_lines(), *_encodings(), *_packed(), *_values(), *_times(), *_json()]


def _files() -> list[Case]:
    def both(folder: Path) -> None:
        for name in ("clicks.csv", "users.tsv"):
            (folder / "log").mkdir(exist_ok=True)
            (folder / "log" / name).write_text(PLAIN)

    def linked(name: str, target: str) -> Write:
        return lambda folder: (folder / name).symlink_to(target)

    def unreadable(folder: Path) -> None:
        (folder / "log.csv").write_text(PLAIN)
        (folder / "log.csv").chmod(0)

    def case(name: str, path: str, expected: str, write: Write) -> Case:
        return Case(name, prepare("log", path), f"{{in}}/{path}: {expected}", write)

    absent = "no such file or folder"
    return [
        case("no file", "log.csv", absent, lambda folder: None),
        case("a dangling link", "log.csv", absent, linked("log.csv", "gone.csv")),
        case("a link to itself", "log.csv", absent, linked("log.csv", "log.csv")),
        case("a path through a file", "log.csv/x.csv", absent, file("log.csv", PLAIN)),
        Case("a name too long", prepare("log", "x" * 300 + ".csv"),
             f"File name too long: '{{in}}/{'x' * 300}.csv'", lambda folder: None),
        case("an empty folder called .csv", "log.csv", "no Parquet files in this folder",
             lambda folder: (folder / "log.csv").mkdir()),
        case("a folder of text", "log", "no Parquet files in this folder; name one of its files: "
             "clicks.csv, users.tsv", both),
        case("a folder of folders", "log", "no Parquet files in this folder",
             file("log/day=1/part-0.parquet", b"")),
        case("a named pipe", "log.csv", "neither a file nor a folder",
             lambda folder: os.mkfifo(folder / "log.csv")),
        case("no permission", "log.csv", "cannot be read (", unreadable),
        log("another ending", PLAIN, "not .parquet, .csv or .tsv (.gz)", path="log.txt"),
        log("no ending", PLAIN, "not .parquet, .csv or .tsv (.gz)", path="log"),
    ]  # fmt: skip


def _lines() -> list[Case]:
    lines = PLAIN.splitlines()

    def inserted(line: str) -> str:
        return "\n".join([*lines[: BAD + 1], line, *lines[BAD + 1 :]]) + "\n"

    return [
        log("nothing", "", "the file is empty"),
        log("a header alone", text([]), "the file is empty: it has no rows"),
        log("blank lines alone", "\n \r\n\n", "the file is empty"),
        log("a byte order mark alone", codecs.BOM_UTF8, "the file is empty"),
        log("a field too many", inserted("u1,i1,1600000250,1,9"), "line 6: 5 fields where 4"),
        log("a field too few", inserted("u1,i1"), "column timestamp, line 6: no time"),
        log("a quote that is not closed", inserted('"u1,i1,1,1'), "not readable as text with "
            "columns (line 6: "),
        log("text behind a quote", inserted('"u1"x,i1,1,1'), "not readable as text with columns "
            "(line 6: "),
        log("a quoted line break before", inserted('"u\n1",i1,1600000250,1').replace(
            "1600000300", "soon"), "column timestamp, line 9: 'soon'"),
        log("the header once more", inserted(",".join(HEADER)), "column timestamp, line 6: "
            "'timestamp' is neither"),
        log("a sum at the end", PLAIN + "Total,,24,\n", "column item_id, line 26: no id"),
        log("cut within a row", PLAIN[:-9], "column label, line 25: no number"),
        log("a column twice", text(header=("user_id", "item_id", "timestamp", "user_id")),
            "column user_id: 2 columns have this name"),
        log("a column missing", text([row[:3] for row in ROWS], ("user_id", "time", "label")),
            "column item_id: missing, and so are: timestamp; the file has: user_id, time, label"),
        log("names in capitals", text(header=[name.upper() for name in HEADER]),
            "column user_id: missing, and so are: item_id, timestamp; the file has: USER_ID"),
        log("names with spaces", text(header=[f" {name}" for name in HEADER]),
            "column user_id: missing, and so are: item_id, timestamp; the file has: ' user_id'"),
        log("no header", text(ROWS[1:], ROWS[0]), "column user_id: missing, and so are: item_id, "
            "timestamp; the file has: u0"),
        log("a remark before the header", "# export 7\n" + PLAIN, "column user_id: missing"),
        log("another separator than was said", PLAIN, "column user_id: missing, and so are: "
            "item_id, timestamp; the file has: user_id,item_id", "--separator", "tab"),
        log("a separator of two characters in it", text(by="::"), "column user_id: missing"),
        log("decimal commas", text(rows_with("timestamp", "1600000240,5"), by=";"),
            "column timestamp, line 6: '1600000240,5' is neither a number"),
        log("lines that end as on old Macs", PLAIN.replace("\n", "\r"), "its lines end in \\r "
            "alone"),
        log("a page of HTML", "<!DOCTYPE html>\n<html><body>Not found</body></html>\n",
            "column user_id: missing, and so are: item_id, timestamp; the file has: <!DOCTYPE"),
        log("a pointer of git LFS", "version https://git-lfs.github.com/spec/v1\noid sha256:0\n",
            "column user_id: missing"),
        log("a zero byte", text(rows_with("item_id", "i\0")), "holds zero bytes"),
        log("a huge field before the bad row",
            text([*rows_with("timestamp", "x"), ("x" * 200_000, "i", "1700000000", "1")][::-1]),
            "column timestamp, row 20: 'x' is neither", "--sort"),
    ]  # fmt: skip


def _encodings() -> list[Case]:
    latin = text(rows_with("item_id", "café")).encode("latin-1")
    wide = PLAIN.encode("utf-16-le")
    noise = random.Random(SEED).randbytes(3000)
    no_utf8 = "bytes that are not UTF-8; --encoding"
    return [
        log("Latin-1 in a row", latin, f"line 6: {no_utf8}"),
        log("Latin-1 in the header", text(header=(*HEADER[:3], "café")).encode("latin-1"),
            f"line 1: {no_utf8}"),
        log("half a surrogate pair in UTF-8", latin.replace(b"\xe9", b"\xed\xa0\x80"),
            f"line 6: {no_utf8}"),
        log("UTF-16 without its mark", wide, "holds zero bytes: not text, or UTF-16"),
        log("UTF-16 with half a character at its end", codecs.BOM_UTF16_LE + wide[:-1],
            "line 25: bytes that are not utf-16"),
        log("UTF-16 of the other end", wide, "column user_id: missing, and so are: item_id, "
            "timestamp; the file has: ", "--encoding", "utf-16-be"),
        log("UTF-16 that is called UTF-8", codecs.BOM_UTF16_LE + wide, "holds zero bytes",
            "--encoding", "utf-8"),
        log("UTF-8 that is called ASCII", text(rows_with("item_id", "café")),
            "line 6: bytes that are not ascii; --encoding", "--encoding", "ascii"),
        log("bytes drawn at random", b"\xe0" + noise, "holds zero bytes"),
        Case("an encoding that there is not", prepare("log", "log.csv", "--encoding", "utf-9"),
             "--encoding utf-9: not an encoding", file("log.csv", PLAIN)),
        Case("an encoding of bytes", prepare("log", "log.csv", "--encoding", "base64"),
             "--encoding base64: not an encoding of text", file("log.csv", PLAIN)),
    ]  # fmt: skip


def _packed() -> list[Case]:
    many = text(ROWS * 200).encode()
    packed = gzip.compress(many)
    middle = len(packed) // 2
    flipped = packed[:middle] + bytes(9) + packed[middle + 9 :]
    sums = packed[:-8] + bytes(4) + packed[-4:]
    spaces = gzip.compress(many + b" " * 9_000_000)
    archive, tape = io.BytesIO(), io.BytesIO()
    with zipfile.ZipFile(archive, "w") as folder:
        folder.writestr("log.csv", PLAIN)
    with tarfile.open(fileobj=tape, mode="w:gz") as folder:
        entry = tarfile.TarInfo("log.csv")
        entry.size = len(PLAIN)
        folder.addfile(entry, io.BytesIO(PLAIN.encode()))
    base = sqlite3.connect(":memory:")
    base.execute("create table log (user_id)")
    first = "is no text, but by its first bytes"
    inner = "log.csv.gz"
    return [
        log("gzip cut off", packed[:-20], "cannot be read (", path=inner),
        log("gzip with other bytes in it", flipped, "cannot be read (", path=inner),
        log("gzip with another checksum", sums, "cannot be read (CRC", path=inner),
        log("no gzip though called so", PLAIN, "cannot be read (Not a gzipped", path=inner),
        log("gzip of nothing", gzip.compress(b""), "the file is empty", path=inner),
        log("gzip of nothing at all", b"", "the file is empty", path=inner),
        log("gzip within gzip", gzip.compress(packed), f"{first} gzip", path=inner),
        log("gzip that fills the disk", spaces, "unpacks to more than", path=inner),
        log("a tape archive in gzip", tape.getvalue(), "holds zero bytes", path=inner),
        log("gzip not called so", packed, f"{first} gzip; name it so, as in .gz"),
        log("a zip", archive.getvalue(), f"{first} a zip"),
        log("xz", lzma.compress(many), f"{first} xz"),
        log("zstd", b"\x28\xb5\x2f\xfd" + bytes(20), f"{first} zstd"),
        log("a data base", base.serialize(), f"{first} SQLite"),
        log("bzip2", bz2.compress(many), f"{first} bzip2",
            path="log.csv.bz2"),
    ]  # fmt: skip


def _values() -> list[Case]:
    def value(
        name: str, column: str, value: str, expected: str, *options: str, by: str = "line 6: "
    ) -> Case:
        content = text(rows_with(column, value))
        return log(name, content, f"column {column}, {by}{expected}", *options)

    def extra(name: str, column: str, value: str, expected: str, *options: str) -> Case:
        rows = [(*row, value if n == BAD else "1") for n, row in enumerate(ROWS)]
        content = text(rows, (*HEADER, column))
        return log(name, content, f"column {column}, line 6: {expected}", *options)

    signal = ("--signal", "price")
    same = [row if n != BAD else ROWS[1] for n, row in enumerate(ROWS)]
    late = [
        row if n != BAD else (row[0], row[1], "1599999999", row[3]) for n, row in enumerate(ROWS)
    ]
    return [
        value("no user", "user_id", "", "no id: the value is missing"),
        value("no item", "item_id", "", "no id: the value is missing"),
        value("a user that stands for none", "user_id", "NaN", "'NaN' is no id"),
        value("an item that stands for none in Hive", "item_id", "\\N", r"'\\N' is no id"),
        value("a user with a space", "user_id", "u1 ", "'u1 ' has spaces around it"),
        value("an item with a space that is wide", "item_id", "i1\u3000", "'i1\\u3000' has spaces"),
        value("a label beyond 1", "label", "2", "'2' is not a label: 0 or 1"),
        value("a label below 0", "label", "-1", "'-1' is not a label: 0 or 1"),
        value("half a label", "label", "0.5", "'0.5' is not a label: 0 or 1"),
        value("a label in words", "label", "true", "'true' is not a finite number"),
        value("a label that is no number", "label", "nan", "'nan' is not a finite number"),
        value("no label", "label", "", "no number: the value is missing"),
        log("labels all 1", text([(*row[:3], "1") for row in ROWS]), "column label: every label "
            "is 1: nothing to tell apart; --negatives 1 draws"),
        log("labels all 0", text([(*row[:3], "0") for row in ROWS]), "column label: every label "
            "is 0: nothing to tell apart"),
        log("a row twice", text(same), "line 6: the same user, item and time as in an earlier row",
            "--sort"),
        log("time backwards", text(late), "column timestamp, line 6: time goes backwards within "
            "one user; --sort accepts this"),
        extra("an infinite signal", "price", "inf", "'inf' is not a finite number", *signal),
        extra("a signal too large", "price", "1e39", "'1e39' is beyond the range of", *signal),
        extra("a signal in words", "price", "dear", "'dear' is not a finite number", *signal),
        extra("no signal", "price", "", "no number: the value is missing", *signal),
        extra("a category with a space", "category", " a", "' a' has spaces around it"),
        log("bad rows alone", text([("", *row[1:]) for row in ROWS]), "column user_id, line 2: no "
            "id: the value is missing (and 23 more rows)", "--drop-bad-rows"),
        log("several problems of one file", text(
            [("", "", "soon", "7"), *ROWS]), "column user_id, line 2: no id: the value is missing; "
            "column item_id, line 2: no id: the value is missing; column timestamp, line 2: 'soon' "
            "is neither a number nor an ISO 8601 date; column label, line 2: '7' is not a label"),
    ]  # fmt: skip


def _times() -> list[Case]:
    days = [datetime.fromtimestamp(int(row[2]), UTC).strftime("%Y-%m-%d %H:%M:%S") for row in ROWS]
    dated = [(row[0], row[1], day, row[3]) for row, day in zip(ROWS, days, strict=True)]

    def number(name: str, value: str, expected: str, *options: str) -> Case:
        content = text(rows_with("timestamp", value))
        return log(name, content, f"column timestamp, line 6: {expected}", *options)

    def day(name: str, value: str, expected: str) -> Case:
        rows = [(*row[:2], value, row[3]) if n == BAD else row for n, row in enumerate(dated)]
        return log(name, text(rows), f"column timestamp, line 6: {expected}")

    no_date = "is not an ISO 8601 date"
    every = [(row[0], row[1], "31/03/2024 02:30", row[3]) for row in ROWS]
    clock = [(row[0], row[1], f"02:{n:02}:00", row[3]) for n, row in enumerate(ROWS)]
    return [
        number("a time in words", "soon", "'soon' is neither a number nor an ISO 8601 date"),
        number("no time", "", "no time: the value is missing"),
        number("a time below 0", "-1", "'-1' is a negative time"),
        number("a fraction of a second below 0", "-0.5", "'-0.5' is a negative time"),
        number("a time that is no number", "nan", "'nan' is neither a number"),
        number("an infinite time", "inf", "'inf' is neither a number"),
        number("a time beyond 64 bits", "9" * 20, f"'{'9' * 20}' is after the year 2100"),
        number("a time in milliseconds", "1600000240000", "'1600000240000' is after the year 2100 "
               "as s since 1970; it is 2020-09-13 with: jagged prepare log --time-unit ms"),
        number("hexadecimal", "0x5F5E1000", "'0x5F5E1000' is neither a number"),
        number("groups of digits", "1 600 000 240", "'1 600 000 240' is neither a number"),
        number("a date among numbers", "2020-09-13", "'2020-09-13' is neither"),
        day("a number among dates", "1600000240", f"'1600000240' {no_date}"),
        day("no such month", "2020-13-01 00:00:00", f"'2020-13-01 00:00:00' {no_date}"),
        day("no such day", "2023-02-29 00:00:00", f"'2023-02-29 00:00:00' {no_date}"),
        day("no such hour", "2020-09-13 25:00:00", f"'2020-09-13 25:00:00' {no_date}"),
        day("no such offset", "2020-09-13 12:00:00+99", f"'2020-09-13 12:00:00+99' {no_date}"),
        day("a zone by its name", "2020-09-13 12:00:00 Europe/Berlin",
            f"'2020-09-13 12:00:00 Europe/Berlin' {no_date}"),
        day("the day of a week", "2020-W37-7", f"'2020-W37-7' {no_date}"),
        day("before 1970", "1969-12-31 23:59:59", "'1969-12-31 23:59:59' is a negative time"),
        day("after 2100", "2101-01-01 00:00:00", "'2101-01-01 00:00:00' is after the year 2100"),
        log("days before years", text(every), "column timestamp, line 2: '31/03/2024 02:30' is "
            "neither a number nor an ISO 8601 date (and 23 more rows)"),
        log("times without days", text(clock), "column timestamp, line 2: '02:00:00' is neither"),
    ]  # fmt: skip


def _json() -> list[Case]:
    records = [dict(zip(HEADER, row, strict=True)) for row in ROWS]
    lines = "".join(json.dumps(record) + "\n" for record in records)
    ndjson = "holds JSON; write it as Parquet first, as with: "
    return [
        log("JSON lines", lines, ndjson, path="log.jsonl"),
        log("JSON lines in gzip", gzip.compress(lines.encode()), ndjson, path="log.ndjson.gz"),
        log("JSON lines called CSV", lines, ndjson),
        log("an array of JSON in one line", json.dumps(records), ndjson, path="log.json"),
        log("an array of JSON in many lines", json.dumps(records, indent=2), ndjson,
            path="log.json"),
        log("JSON without records", "[1, 2]", "not .parquet, .csv or .tsv", path="log.json"),
    ]  # fmt: skip
