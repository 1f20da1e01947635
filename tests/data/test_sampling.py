"""Some users of a prepared data set: whole, as they were, and as many as were asked for."""

import json
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from small_log import SMALL

from click_data import DataError, open_dataset, prepare
from click_data.sampling import sample_users
from click_data.schema import TABLES
from click_data.split import SPLITS


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare("synthetic", out=tmp_path_factory.mktemp("log") / "whole", **SMALL)


def test_users_are_whole_and_as_they_were(whole: Path, tmp_path: Path) -> None:
    some = sample_users(whole, out=tmp_path / "some", requests=200, longest=10**6)
    before, after = (pq.read_table(folder / "histories.parquet") for folder in (whole, some))
    ids = after["user_id"].to_pylist()
    kept = np.isin(before["user_id"].to_numpy(), ids)
    assert after.equals(before.filter(kept))
    # Requests, told by the user's own id, in the order that they had.
    rows = [pq.read_table(folder / "requests.parquet").to_pylist() for folder in (whole, some)]
    names = [table["user_id"].to_pylist() for table in (before, after)]
    told = [
        [{**row, "user": of[row["user"]]} for row in table]
        for of, table in zip(names, rows, strict=True)
    ]
    assert told[1] == [row for row in told[0] if row["user"] in set(ids)]
    assert pq.read_table(some / "items.parquet") == pq.read_table(whole / "items.parquet")


def test_as_many_requests_as_asked_for_and_no_more_users_than_needed(
    whole: Path, tmp_path: Path
) -> None:
    some = open_dataset(sample_users(whole, out=tmp_path / "some", requests=200, longest=10**6))
    users = np.concatenate([some.requests(split).user for split in SPLITS])
    assert len(users) >= 200
    assert len(users) - np.bincount(users).max() < 200
    assert some.info["counts"]["users"] == some.num_users == users.max() + 1
    assert some.info["counts"]["events"] == len(some.histories.item)
    every = [some.requests(split) for split in SPLITS]
    touched = {*some.histories.item, *(item for requests in every for item in requests.item)}
    counts = some.info["counts"]
    assert counts["items"] == len(touched)
    assert counts.keys() == open_dataset(whole).info["counts"].keys()
    for split, requests in zip(SPLITS, every, strict=True):
        assert counts["requests"][split] == len(requests)
        assert counts["candidates"][split] == len(requests.item)
        assert counts["positives"][split] == requests.labels["label"].sum()
        new = (requests.item >= some.num_items).mean()
        assert counts["new_items"][split] == pytest.approx(new, abs=1e-6)
    assert some.name == f"synthetic ({some.num_users} of 40 users)"


def test_long_histories_are_taken_only_where_the_others_do_not_do(
    whole: Path, tmp_path: Path
) -> None:
    lengths = np.diff(open_dataset(whole).histories.offsets)
    longest = int(np.median(lengths))
    short = lengths[lengths <= longest]
    few = open_dataset(sample_users(whole, out=tmp_path / "few", requests=50, longest=longest))
    assert np.diff(few.histories.offsets).max() <= longest
    wanted = 2 * int(short.sum())  # more requests than they have: the least of the others, too
    more = open_dataset(
        sample_users(whole, out=tmp_path / "more", requests=wanted, longest=longest)
    )
    taken = np.diff(more.histories.offsets)
    assert taken.max() > longest
    assert sorted(taken) == sorted(lengths)[: len(taken)]


def test_each_split_is_there_even_if_little_is_asked_for(whole: Path, tmp_path: Path) -> None:
    some = open_dataset(sample_users(whole, out=tmp_path / "some", requests=1, longest=10**6))
    assert all(len(some.requests(split)) for split in SPLITS)
    assert set(some.requests("train").labels["label"]) == {0, 1}


def test_all_users_are_the_same_data(whole: Path, tmp_path: Path) -> None:
    every = sample_users(whole, out=tmp_path / "every", requests=10**9, longest=1)
    for name in TABLES:
        assert pq.read_table(every / name) == pq.read_table(whole / name)
    assert json.loads((every / "dataset.json").read_text())["name"] == "synthetic"


def test_what_is_no_data_set_is_refused(whole: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="not a prepared data set"):
        sample_users(tmp_path, out=tmp_path / "x", requests=1, longest=1)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").touch()
    with pytest.raises(DataError, match="not empty and not a prepared data set"):
        sample_users(whole, out=tmp_path / "mine", requests=1, longest=1)
