"""Bad input that takes more than a row of the table in `malformed_inputs`."""

from pathlib import Path

import polars as pl
import pytest
from refusal import Command, refused

HEADER = "user_id,item_id,timestamp,label"


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


@pytest.mark.parametrize("line", ['"1"x,3,4,1', '"1,3,4,1'])
@pytest.mark.parametrize("options", [(), ("--drop-bad-rows",)])
def test_quotes_that_do_not_match(
    line: str, options: tuple[str, ...], tmp_path: Path, prepare_command: Command
) -> None:
    path = tmp_path / "log.csv"
    path.write_text(f"{HEADER}\n1,2,3,0\n{line}\n")
    error = refused(prepare_command, tmp_path, "log", "--from", path, *options)
    assert error.startswith(f"jagged: {path}: not readable as text with columns (line 3: ")


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


def test_negatives_that_cannot_be_drawn(
    tmp_path: Path, prepare_command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "log.csv"
    rows = [f"{t % 7},{t % 10},{t}" for t in range(100)]
    path.write_text("\n".join(["user_id,item_id,timestamp", *rows]) + "\n")
    error = refused(prepare_command, tmp_path, "log", "--from", path, "--negatives", "100000000")
    assert "--negatives 100000000: the log has only 10 items, one of them the positive" in error
    with monkeypatch.context() as small:
        small.setattr("os.sysconf", {"SC_PHYS_PAGES": 5, "SC_PAGE_SIZE": 4096}.get)
        error = refused(prepare_command, tmp_path, "log", "--from", path, "--negatives", "2")
    assert (
        "--negatives 2: 300 candidates need about 0.0 GB of memory, and there are 0.0 GB" in error
    )
    one = [f"1,{t % 10},{t}" for t in range(100)]
    path.write_text("\n".join(["user_id,item_id,timestamp", *one]) + "\n")
    error = refused(prepare_command, tmp_path, "log", "--from", path)
    assert "no item could be drawn as label 0" in error
    path.write_text("\n".join(["user_id,item_id,timestamp", *rows]) + "\n")
    error = refused(prepare_command, tmp_path, "log", "--from", path, "--min-history", "50")
    assert "no requests in the train period: none there has as long a history" in error
    many = [f"{t % 7},{t},{t}" for t in range(100)]
    path.write_text("\n".join(["user_id,item_id,timestamp", *many]) + "\n")
    few = ("--negatives", "20", "--pool", "20")
    error = refused(prepare_command, tmp_path, "log", "--from", path, *few)
    assert "--negatives 20: more than one of 20 events can give; see --pool" in error
