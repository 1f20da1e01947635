"""Bad input: one line that names file, column and row, exit code 1, and nothing written."""

from pathlib import Path

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from refusal import Command, refused

HEADER = "user_id,item_id,timestamp,label"


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        (["1,2,3,0", "1,3,x,1"], "column timestamp, line 3: 'x' is neither a number nor an ISO"),
        (["1,2,3,0", "1,3,-4,1"], "column timestamp, line 3: '-4' is a negative time"),
        (["1,2,3,0", "1,3,-0.5,1"], "column timestamp, line 3: '-0.5' is a negative time"),
        (["1,2,3,0", "1,3,,1"], "column timestamp, line 3: no time"),
        (["1,2,3,0", "1,3,nan,1"], "column timestamp, line 3: 'nan' is neither"),
        (["1,2,3,0", "1,3,99999999999999999999,1"], "column timestamp, line 3: '9999"),
        (["1,2,5,0", "2,2,3,0", "1,3,4,1"], "column timestamp, line 4: time goes backwards"),
        (["1,2,5,0", "2,2,5,0", "1,2,5,1"], "line 4: the same user, item and time"),
        (["1,2,3,0", ",3,4,1"], "column user_id, line 3: no id"),
        (["1,2,3,0", "1,,4,1"], "column item_id, line 3: no id"),
        (["1,2,3,0", "1,3,4,2"], "column label, line 3: '2' is not a label: 0 or 1"),
        (["1,2,3,0", "1,3,4,yes"], "column label, line 3: 'yes' is not a finite number"),
        (["1,2,3,0", "1,3,4,"], "column label, line 3: no number"),
        (["1,2,3,0", "1,3,4"], "column label, line 3: no number"),
        (["1,2,3,0", "1,3,4,1,5"], "line 3: 5 fields where 4 belong"),
        (["", "1,2,3,0", " ", "1,,4,1"], "column item_id, line 5: no id"),
        (["1,2,3,1", "1,3,4,1"], "column label: every label is 1"),
        (['"1\n1",2,3,0', "1,3,x,1"], "column timestamp, line 4: 'x'"),
        (["1,2,3,0", "NaN,3,4,1"], "column user_id, line 3: 'NaN' is no id: it stands for a"),
        (["1,2,3,0", "1,null,4,1"], "column item_id, line 3: 'null' is no id: it stands for a"),
        (["1,2,3,0", "1,\\N,4,1"], r"column item_id, line 3: '\\N' is no id"),
        (["1,2,3,0", " 1,3,4,1"], "column user_id, line 3: ' 1' has spaces around it"),
        (["1,2,3,0", "1,3\xa0,4,1"], "column item_id, line 3: '3\\xa0' has spaces around it"),
        ([], "the file is empty: it has no rows"),
    ],
)
def test_csv_rows(
    lines: list[str], expected: str, tmp_path: Path, prepare_command: Command
) -> None:
    path = tmp_path / "my log.csv"
    path.write_text("\n".join([HEADER, *lines]) + "\n")
    error = refused(prepare_command, tmp_path, "log", "--from", path)
    assert error.startswith(f"jagged: {path}: {expected}")


def test_all_problems_of_a_file_in_one_error(tmp_path: Path, prepare_command: Command) -> None:
    path = tmp_path / "log.csv"
    lines = ["1,2,3,0", "1,,4,1", "1,3,x,2", "1,4,5,1,7", "1,5,2,0", "2,,6,1", "1,2,3,1"]
    path.write_text("\n".join([HEADER, *lines]) + "\n")
    error = refused(prepare_command, tmp_path, "log", "--from", path)
    assert error.split("; ") == [
        f"jagged: {path}: line 5: 5 fields where 4 belong",
        "column item_id, line 3: no id: the value is missing (and 1 more row)",
        "column timestamp, line 4: 'x' is neither a number nor an ISO 8601 date",
        "column label, line 4: '2' is not a label: 0 or 1",
        "column timestamp, line 6: time goes backwards within one user",
        "--sort accepts this",
        "line 8: the same user, item and time as in an earlier row",
        "--drop-duplicates keeps the first",
        "--drop-bad-rows leaves out the bad rows, 4 of 7",
    ]
    path.write_text("item,label\n1,1\n2,0\n")
    error = refused(prepare_command, tmp_path, "log", "--from", path)
    assert f"{path}: column user_id: missing, and so are: item_id, timestamp; the file" in error


def test_json_lines(tmp_path: Path, prepare_command: Command) -> None:
    line = '{"user_id": 1, "item_id": 2, "timestamp": 3}\n'
    path = tmp_path / "log.json"
    path.write_text(f"[{line}]")
    error = refused(prepare_command, tmp_path, "log", "--from", path)
    assert "polars.read_json(" in error
    for name in ("log.jsonl", "log.csv", "log.ndjson"):
        path = tmp_path / name
        path.write_text(line)
        error = refused(prepare_command, tmp_path, "log", "--from", path)
        assert error.startswith(f"jagged: {path}: ")
        assert "JSON" in error
        assert "polars.read_ndjson(" in error


def test_a_folder_of_several_tables(tmp_path: Path, prepare_command: Command) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    for name in ("clicks.csv", "users.tsv"):
        (folder / name).write_text("x\n")
    error = refused(prepare_command, tmp_path, "log", "--from", folder)
    assert f"{folder}: no Parquet files in this folder; name one of its files: clicks.c" in error
    assert "clicks.csv, users.tsv" in error
    pl.DataFrame({"item_id": [1], "name": ["a"]}).write_parquet(folder / "articles.parquet")
    events = pl.DataFrame({"user_id": [1], "item_id": [1], "timestamp": [1]})
    events.write_parquet(folder / "clicks.parquet")
    error = refused(prepare_command, tmp_path, "log", "--from", folder)
    assert f"{folder}: holds several tables" in error
    assert error.endswith(f"user_id: {folder / 'clicks.parquet'}")


@pytest.mark.parametrize("line", ['"1"x,3,4,1', '"1,3,4,1'])
@pytest.mark.parametrize("options", [(), ("--drop-bad-rows",)])
def test_quotes_that_do_not_match(
    line: str, options: tuple[str, ...], tmp_path: Path, prepare_command: Command
) -> None:
    path = tmp_path / "log.csv"
    path.write_text(f"{HEADER}\n1,2,3,0\n{line}\n")
    error = refused(prepare_command, tmp_path, "log", "--from", path, *options)
    assert error.startswith(f"jagged: {path}: not readable as text with columns (line 3: ")


def test_fields_too_long_for_naming_lines(tmp_path: Path, prepare_command: Command) -> None:
    path = tmp_path / "log.csv"
    path.write_text(f"{HEADER},text\n1,2,3,0,{'x' * 200_000}\n1,2,x,0,\n")
    error = refused(prepare_command, tmp_path, "log", "--from", path)
    assert f"{path}: column timestamp, row 1: 'x' is neither" in error


def test_csv_that_is_empty_or_not_text(tmp_path: Path, prepare_command: Command) -> None:
    path = tmp_path / "log.csv"
    path.write_bytes(b"")
    assert "log.csv: the file is empty" in refused(prepare_command, tmp_path, "log", "--from", path)
    path.write_bytes(f"{HEADER}\n1,2,3,0\n1,caf\xe9,4,1\n".encode("latin-1"))
    error = refused(prepare_command, tmp_path, "log", "--from", path)
    assert "log.csv: line 3: bytes that are not UTF-8" in error


@pytest.mark.parametrize("missing", ["user_id", "item_id", "timestamp"])
@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_missing_columns(
    missing: str, suffix: str, tmp_path: Path, prepare_command: Command
) -> None:
    path = tmp_path / f"log.{suffix}"
    frame = pl.DataFrame({"user_id": [1], "item_id": [2], "timestamp": [3]}).drop(missing)
    frame.write_csv(path) if suffix == "csv" else frame.write_parquet(path)
    error = refused(prepare_command, tmp_path, "log", "--from", path)
    assert error.startswith(f"jagged: {path}: column {missing}: missing; the file has: ")
    assert f"--column {'user_id'}=uid" in error


def test_columns_asked_for_by_name_must_be_there(tmp_path: Path, prepare_command: Command) -> None:
    path = tmp_path / "log.csv"
    path.write_text(f"{HEADER}\n1,2,3,0\n1,3,4,1\n")
    for option in ("--column=label=clicked", "--column=category=clicked", "--signal=clicked"):
        error = refused(prepare_command, tmp_path, "log", "--from", path, option)
        assert f"{path}: column clicked: missing" in error
    error = refused(prepare_command, tmp_path, "log", "--from", path, "--column", "colour=label")
    assert "--column colour" in error
    error = refused(prepare_command, tmp_path, "log", "--from", path, "--signal", "label")
    assert "--signal label" in error
    twice = ("--column", "category=label", "--column", "category=item_id")
    error = refused(prepare_command, tmp_path, "log", "--from", path, *twice)
    assert "--column category=...: given twice" in error
    twice = ("--signal", "item_id", "--signal", "item_id")
    error = refused(prepare_command, tmp_path, "log", "--from", path, *twice)
    assert "--signal item_id: given twice" in error


@pytest.mark.parametrize(
    ("time", "options", "expected"),
    [
        ("1588291200000", (), "it is 2020-05-01 with: jagged prepare log --time-unit ms"),
        ("1588291200000000", (), "it is 2020-05-01 with: jagged prepare log --time-unit us"),
        ("1588291200000000", ("--time-unit", "ms"), "as ms since 1970; it is 2020-05-01 with: "),
        ("1588291200000000000", (), "it is 2020-05-01 with: jagged prepare log --time-unit ns"),
        ("4133980800", (), "is after the year 2100 as s since 1970; --time-unit of"),
        (str(2**63), (), "is after the year 2100 as s since 1970"),
        (str(2**63), ("--time-unit", "ns"), "is after the year 2100 as ns since 1970"),
        ("2300-01-01", ("--time-unit", "ns"), "is after the year 2100"),
        ("1600-01-01", ("--time-unit", "ns"), "is a negative time"),
    ],
)
@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_times_in_another_unit(
    time: str,
    options: tuple[str, ...],
    expected: str,
    suffix: str,
    tmp_path: Path,
    prepare_command: Command,
) -> None:
    path = tmp_path / f"log.{suffix}"
    others = {"user_id": [1] * 4, "item_id": [1, 2, 3, 4], "label": [0, 1, 0, 1]}
    if "-" in time:
        known = pl.Series(["2020-01-01"] * 3 + [time]).str.to_date()
    else:
        known = pl.Series([1, 2, 3, int(time)], dtype=pl.UInt64)
    frame = pl.DataFrame({**others, "timestamp": known})
    frame.write_csv(path) if suffix == "csv" else frame.write_parquet(path)
    error = refused(prepare_command, tmp_path, "log", "--from", path, *options)
    place = "line 5" if suffix == "csv" else "row 3"
    assert error.startswith(f"jagged: {path}: column timestamp, {place}: ")
    assert expected in error
    assert time in error or "datetime.date" in error


def test_a_signal_must_be_finite(tmp_path: Path, prepare_command: Command) -> None:
    path = tmp_path / "log.csv"
    path.write_text(f"{HEADER},price\n1,2,3,0,1.5\n1,3,4,1,inf\n")
    error = refused(prepare_command, tmp_path, "log", "--from", path, "--signal", "price")
    assert f"{path}: column price, line 3: 'inf' is not a finite number" in error
    path.write_text(path.read_text().replace("inf", "1e300"))
    error = refused(prepare_command, tmp_path, "log", "--from", path, "--signal", "price")
    assert f"{path}: column price, line 3: '1e300' is beyond the range of float32" in error


@pytest.mark.parametrize(
    ("column", "values", "expected"),
    [
        ("user_id", [1, None, 2], "column user_id, row 1: no id"),
        ("user_id", [1.0, float("nan"), 2.0], "column user_id, row 1: no id"),
        ("user_id", [1.0, 2.5, 2.0], "column user_id, row 1: 2.5 is not an integer id"),
        ("user_id", [[1], [2], [3]], "column user_id: ids must be integers or strings"),
        ("user_id", [True, False, True], "column user_id: ids must be integers or strings"),
        ("item_id", ["a", "", "b"], "column item_id, row 1: no id"),
        ("timestamp", [1, -1, 2], "column timestamp, row 1: -1 is a negative time"),
        ("timestamp", [1.0, float("inf"), 2.0], "column timestamp, row 1: inf is not a time"),
        ("timestamp", [1, 2, None], "column timestamp, row 2: no time"),
        ("timestamp", [True, False, True], "column timestamp: times must be numbers or dates"),
        ("label", [0, 1, 3], "column label, row 2: 3 is not a label"),
        ("label", [[0], [1], [1]], "column label: values must be numbers"),
        ("label", ["0", "one", "1"], "column label, row 1: 'one' is not a finite number"),
    ],
)
def test_parquet_rows(
    column: str, values: list, expected: str, tmp_path: Path, prepare_command: Command
) -> None:
    good = {"user_id": [1, 2, 3], "item_id": [1, 2, 3], "timestamp": [1, 2, 3], "label": [0, 1, 0]}
    path = tmp_path / "log.parquet"
    pl.DataFrame(good | {column: values}).write_parquet(path)
    error = refused(prepare_command, tmp_path, "log", "--from", path)
    assert error.startswith(f"jagged: {path}: {expected}")


def test_a_bad_row_in_the_second_file_of_a_folder(tmp_path: Path, prepare_command: Command) -> None:
    folder = tmp_path / "log"
    folder.mkdir()
    good = pl.DataFrame({"user_id": [1, 2], "item_id": [1, 2], "timestamp": [10, 20]})
    good.write_parquet(folder / "part-0.parquet")
    backwards = pl.DataFrame({"user_id": [3, 1], "item_id": [1, 2], "timestamp": [10, 9]})
    backwards.write_parquet(folder / "part-1.parquet")
    error = refused(prepare_command, tmp_path, "log", "--from", folder)
    assert f"{folder / 'part-1.parquet'}: column timestamp, row 1: time goes backwards" in error
    good.cast({"item_id": pl.String}).write_parquet(folder / "part-1.parquet")
    error = refused(prepare_command, tmp_path, "log", "--from", folder)
    assert f"{folder / 'part-1.parquet'}: columns or their types differ" in error


@pytest.mark.parametrize("keep", [0.0, 0.01, 0.5, 0.99])
def test_truncated_parquet(keep: float, tmp_path: Path, prepare_command: Command) -> None:
    path = tmp_path / "interactions.parquet"
    names = ("user_id", "item_id", "timestamp", "rating")
    pl.DataFrame({name: list(range(2000)) for name in names}).write_parquet(path)
    whole = path.read_bytes()
    path.write_bytes(whole[: int(len(whole) * keep)])
    for source in ("log", "movielens"):
        error = refused(prepare_command, tmp_path, source, "--from", path)
        assert error.startswith(f"jagged: {path}: not a readable Parquet file, truncated?")


def test_parquet_without_rows(tmp_path: Path, prepare_command: Command) -> None:
    path = tmp_path / "log.parquet"
    pl.DataFrame({"user_id": [], "item_id": [], "timestamp": []}).write_parquet(path)
    assert "no rows" in refused(prepare_command, tmp_path, "log", "--from", path)


def test_columns_of_one_name(tmp_path: Path, prepare_command: Command) -> None:
    path = tmp_path / "log.csv"
    path.write_text("user_id,item_id,timestamp,label,label\n1,2,3,0,1\n1,3,4,1,0\n")
    error = refused(prepare_command, tmp_path, "log", "--from", path)
    assert f"{path}: column label: 2 columns have this name" in error
    path = tmp_path / "log.parquet"
    names = ["user_id", "item_id", "timestamp", "timestamp"]
    pq.write_table(pa.Table.from_arrays([pa.array([1, 2])] * 4, names=names), path)
    error = refused(prepare_command, tmp_path, "log", "--from", path)
    assert f"{path}: column timestamp: 2 columns have this name" in error


def test_negatives_that_cannot_be_drawn(
    tmp_path: Path, prepare_command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "log.csv"
    rows = [f"{t % 7},{t % 10},{t}" for t in range(100)]
    path.write_text("\n".join(["user_id,item_id,timestamp", *rows]) + "\n")
    error = refused(prepare_command, tmp_path, "log", "--from", path, "--negatives", "100000000")
    assert "--negatives 100000000: the training period has only 10 items" in error
    with monkeypatch.context() as small:
        small.setattr("os.sysconf", {"SC_PHYS_PAGES": 5, "SC_PAGE_SIZE": 4096}.get)
        error = refused(prepare_command, tmp_path, "log", "--from", path, "--negatives", "2")
    assert "--negatives 2: 300 samples need about 0.0 GB of memory, and there are 0.0 GB" in error
    one = [f"1,{t % 10},{t}" for t in range(100)]
    path.write_text("\n".join(["user_id,item_id,timestamp", *one]) + "\n")
    error = refused(prepare_command, tmp_path, "log", "--from", path)
    assert "no item could be drawn as label 0" in error
    path.write_text("\n".join(["user_id,item_id,timestamp", *rows]) + "\n")
    error = refused(prepare_command, tmp_path, "log", "--from", path, "--min-history", "50")
    assert "no samples in the train period: no event there has as long a history" in error
    new = [f"{t % 7},{t},{t}" for t in range(100)]
    path.write_text("\n".join(["user_id,item_id,timestamp", *new]) + "\n")
    error = refused(prepare_command, tmp_path, "log", "--from", path)
    assert "no samples in the valid period: events of items not seen in training" in error


def test_inputs_that_are_not_there(tmp_path: Path, prepare_command: Command) -> None:
    for source in ("log", "movielens"):
        error = refused(prepare_command, tmp_path, source, "--from", tmp_path / "none")
        assert f"{tmp_path / 'none'}: no such file or folder" in error
        assert "needs --from" in refused(prepare_command, tmp_path, source)
    empty = tmp_path / "empty"
    empty.mkdir()
    assert "no Parquet files" in refused(prepare_command, tmp_path, "log", "--from", empty)
    assert "ratings.csv" in refused(prepare_command, tmp_path, "movielens", "--from", empty)
    other = tmp_path / "notes.txt"
    other.write_text("x")
    assert "notes.txt: not" in refused(prepare_command, tmp_path, "log", "--from", other)
    assert "notes.txt: not" in refused(prepare_command, tmp_path, "movielens", "--from", other)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["clicks"], "no source 'clicks'; there are: synthetic, log, movielens"),
        (["synthetic", "--threshold", "4"], "synthetic has no option 'threshold'"),
        (["synthetic", "--from", "x"], "it takes no --from"),
        (["synthetic", "--users", "0"], "users"),
        (["synthetic", "--users", "10", "--events", "5"], "users"),
        (["synthetic", "--items", "5", "--categories", "6"], "categories"),
        (["synthetic", "--split", "0.9", "0.1", "0.1"], "split"),
        (["synthetic", "--min-history", "-1"], "min_history"),
        (["synthetic", "--min-history", "1000000"], "no samples in the train period"),
        (["synthetic", "--seed", "-1"], "seed"),
    ],
)
def test_options(
    arguments: list[str], expected: str, tmp_path: Path, prepare_command: Command
) -> None:
    assert expected in refused(prepare_command, tmp_path, *arguments)
