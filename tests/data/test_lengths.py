"""History lengths: the same from a log, from a prepared data set and from a file of lengths."""

import gzip
import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from small_log import SMALL

from click_data import DataError, history_lengths, open_dataset, prepare
from click_data.lengths import write_lengths
from jagged_ranking.cli import main

EVENTS = {"user_id": [7, 7, 7, 2, 9, 9], "item_id": [1, 2, 3, 1, 1, 2]}


@pytest.fixture
def log(tmp_path: Path) -> Path:
    folder = tmp_path / "clicks"
    folder.mkdir()
    pq.write_table(pa.table(EVENTS), folder / "interactions.parquet")
    return folder


def test_a_log_is_counted_user_by_user(log: Path, tmp_path: Path) -> None:
    assert history_lengths(log).tolist() == [3, 1, 2]
    assert history_lengths(log / "interactions.parquet").tolist() == [3, 1, 2]
    copy = tmp_path / "carried" / "clicks.parquet"
    assert write_lengths(log, copy).tolist() == [3, 1, 2]
    assert pq.read_schema(copy).names == ["length"]
    assert history_lengths(copy).tolist() == [3, 1, 2]


def test_a_prepared_data_set_says_the_same_as_its_histories(tmp_path: Path) -> None:
    folder = prepare("synthetic", out=tmp_path / "p", users=30, items=20, categories=4, events=400)
    expected = np.diff(open_dataset(folder).histories.offsets)
    assert history_lengths(folder).tolist() == expected[expected > 0].tolist()


def test_histories_of_another_data_set_are_refused(tmp_path: Path) -> None:
    folder = prepare("synthetic", out=tmp_path / "p", **SMALL)
    other = prepare("synthetic", out=tmp_path / "q", seed=1, **SMALL)
    shutil.copy(other / "histories.parquet", folder)
    with pytest.raises(DataError, match=r"p: histories\.parquet changed since"):
        history_lengths(folder)


def test_users_without_events_do_not_count(tmp_path: Path) -> None:
    path = tmp_path / "l.parquet"
    pq.write_table(pa.table({"length": [0, 5, 0, 2]}), path)
    assert history_lengths(path).tolist() == [5, 2]


@pytest.mark.parametrize("name", ["log.csv", "log.tsv", "log.csv.gz"])
def test_text_is_read_as_prepare_reads_it(name: str, tmp_path: Path) -> None:
    comma = "\t" if ".tsv" in name else ","
    rows = zip(*EVENTS.values(), strict=True)
    text = "".join(f"{user}{comma}{item}\n" for user, item in [tuple(EVENTS), *rows])
    path = tmp_path / name
    path.write_bytes(gzip.compress(text.encode()) if name.endswith(".gz") else text.encode())
    assert history_lengths(path).tolist() == [3, 1, 2]
    assert main(["lengths", str(path), "--out", str(tmp_path / "out")]) == 0
    assert history_lengths(tmp_path / "out" / "log.parquet").tolist() == [3, 1, 2]


def test_a_row_a_user_is_not_taken_for_a_row_an_event(tmp_path: Path) -> None:
    folder = prepare("synthetic", out=tmp_path / "p", users=30, items=20, categories=4, events=400)
    with pytest.raises(DataError, match=r"histories\.parquet: column item: .*lists.*a row a user"):
        history_lengths(folder / "histories.parquet")
    sessions = tmp_path / "sessions.parquet"
    pq.write_table(pa.table({"user_id": [1, 1, 2], "bought": [[1], [2, 3], [4]]}), sessions)
    with pytest.raises(DataError, match=r"column bought: .*lists"):
        history_lengths(sessions)
    users = tmp_path / "users.csv"
    users.write_text("user_id,items\n1,3 4 5\n2,6 7\n")
    with pytest.raises(DataError, match=r"users\.csv: every user has one row: .*a row a user"):
        history_lengths(users)


def test_the_length_of_something_else_is_not_a_users(tmp_path: Path) -> None:
    path = tmp_path / "videos.parquet"
    pq.write_table(pa.table({**EVENTS, "length": [30, 40, 50, 30, 30, 40]}), path)
    assert history_lengths(path).tolist() == [3, 1, 2]


def test_an_event_of_nobody_is_named(tmp_path: Path) -> None:
    path = tmp_path / "x.parquet"
    pq.write_table(pa.table({"user_id": [1, 1, None]}), path)
    with pytest.raises(DataError, match="column user_id, row 2: no id"):
        history_lengths(path)


@pytest.mark.parametrize("columns", [{"item_id": [1]}, {"length": [0]}])
def test_what_has_no_lengths_is_one_line(tmp_path: Path, columns: dict) -> None:
    path = tmp_path / "x.parquet"
    pq.write_table(pa.table(columns), path)
    with pytest.raises(DataError, match=r"neither a column|nobody"):
        history_lengths(path)
    with pytest.raises(DataError, match=r"nothing\.parquet"):
        history_lengths(tmp_path / "nothing.parquet")


def test_the_command_writes_one_file_a_source(log: Path, tmp_path: Path, capsys) -> None:
    out = tmp_path / "lengths"
    assert main(["lengths", str(log), "--out", str(out)]) == 0
    assert "clicks.parquet: 3 users, mean 2.0, longest 3" in capsys.readouterr().out
    assert history_lengths(out / "clicks.parquet").tolist() == [3, 1, 2]
    assert main(["lengths", str(tmp_path / "none"), "--out", str(out)]) == 1
    assert capsys.readouterr().err.count("\n") == 1


def test_no_file_is_written_over_another(log: Path, tmp_path: Path, capsys) -> None:
    events = log / "interactions.parquet"
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        shutil.copy(events, tmp_path / name / "interactions.parquet")
        shutil.copy(events, tmp_path / name / "may.parquet")
    out = tmp_path / "lengths"
    may = [str(tmp_path / name / "may.parquet") for name in ("one", "two")]
    assert main(["lengths", *may, "--out", str(out)]) == 1
    err = capsys.readouterr().err
    assert all(path in err for path in (*may, str(out / "may.parquet")))
    assert err.count("\n") == 1
    assert not out.exists()
    assert main(["lengths", may[0], "--out", str(tmp_path / "one")]) == 1
    assert "would be overwritten" in capsys.readouterr().err
    assert pq.read_schema(may[0]).names == list(EVENTS)
    both = [str(tmp_path / name / "interactions.parquet") for name in ("one", "two")]
    assert main(["lengths", *both, "--out", str(out)]) == 0
    assert sorted(path.name for path in out.iterdir()) == ["one.parquet", "two.parquet"]


def test_a_full_disk_names_the_file_and_leaves_none(
    log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(table: pa.Table, path: Path, **options: object) -> None:
        Path(path).write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(pq, "write_table", full)
    out = tmp_path / "out" / "clicks.parquet"
    with pytest.raises(DataError, match=r"clicks\.parquet: cannot be written .*No space left"):
        write_lengths(log, out)
    assert not list(out.parent.iterdir())


@pytest.mark.parametrize(
    ("name", "users", "mean", "longest"),
    [
        ("ml1m_ge4", 6038, 95.3, 1435),
        ("globo_clicks", 322_897, 9.254, 1232),
        ("foursquare_nyc_stan", 1083, 136.6, 2515),
    ],
)
def test_published_lengths(
    data_dir: Path, name: str, users: int, mean: float, longest: int
) -> None:
    if not (data_dir / name).is_dir():
        pytest.skip(f"no {name} in {data_dir}")
    lengths = history_lengths(data_dir / name)
    assert len(lengths) == users
    assert lengths.mean() == pytest.approx(mean, abs=0.05)
    assert lengths.max() == longest
