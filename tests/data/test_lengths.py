"""History lengths: the same from a log, from a prepared data set and from a file of lengths."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

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


def test_users_without_events_do_not_count(tmp_path: Path) -> None:
    path = tmp_path / "l.parquet"
    pq.write_table(pa.table({"length": [0, 5, 0, 2]}), path)
    assert history_lengths(path).tolist() == [5, 2]


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
