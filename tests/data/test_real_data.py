"""The public MovieLens sets, where they are at hand: counts as published, no leaks."""

from pathlib import Path

import numpy as np
import polars as pl
import pyarrow.parquet as pq
import pytest

from click_data import ClickDataset, DataError, open_dataset, prepare


@pytest.fixture(scope="module")
def ml_100k(data_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> ClickDataset:
    return _open(data_dir, "ml_100k", tmp_path_factory.mktemp("prepared"))


def _open(data_dir: Path, name: str, scratch: Path) -> ClickDataset:
    if not (data_dir / name).is_dir():
        pytest.skip(f"no {name} in {data_dir}")
    return open_dataset(prepare("movielens", from_path=data_dir / name, out=scratch / name))


def test_ml_100k_counts_are_the_published_ones(ml_100k: ClickDataset) -> None:
    info = ml_100k.info
    assert info["name"] == "ml_100k"
    counts = info["counts"]
    assert (counts["users"], counts["items"], counts["events"]) == (943, 1682, 100_000)
    stars = np.bincount(ml_100k.histories.signals["rating"].astype(int))
    assert stars.tolist() == [0, 6110, 11370, 27145, 34174, 21201]
    assert ml_100k.histories.label.sum() == 34174 + 21201
    lengths = info["history_length"]
    assert (lengths["min"], lengths["p50"], lengths["p99"], lengths["max"]) == (20, 65, 442.54, 737)
    assert info["padding_waste"] == pytest.approx(0.825, abs=0.002)


def test_ml_latest_small_counts_are_the_published_ones(data_dir: Path, tmp_path: Path) -> None:
    info = _open(data_dir, "ml_latest_small", tmp_path).info
    counts = info["counts"]
    assert (counts["users"], counts["items"], counts["events"]) == (610, 9724, 100_836)
    assert info["padding_waste"] == pytest.approx(0.925, abs=0.003)


def test_splits_are_in_order_of_time_and_of_the_size_asked_for(ml_100k: ClickDataset) -> None:
    train, valid, test = (ml_100k.samples(split) for split in ("train", "valid", "test"))
    assert train.time.max() < valid.time.min()
    assert valid.time.max() < test.time.min()
    # Ties at a boundary move an event or a few, never more.
    assert (len(train), len(valid), len(test)) == (79_999, 10_001, 10_000)


def test_histories_are_the_strictly_earlier_ratings_of_the_raw_file(
    ml_100k: ClickDataset, data_dir: Path
) -> None:
    raw = pl.read_parquet(data_dir / "ml_100k" / "interactions.parquet")
    users = pl.read_parquet(ml_100k.folder / "histories.parquet")["user_id"].to_list()
    item_ids = ml_100k.items["item_id"].to_pylist()
    known = {item: number for number, item in enumerate(item_ids) if item is not None}
    histories = ml_100k.histories
    rng = np.random.default_rng(0)
    for split in ("train", "valid", "test"):
        samples = ml_100k.samples(split)
        for index in rng.choice(len(samples), 100, replace=False):
            user, time = samples.user[index], samples.time[index]
            mine = raw.filter(pl.col("user_id") == users[user])
            earlier = mine.filter(pl.col("timestamp") < time).sort("timestamp", "item_id")
            start = histories.offsets[user]
            window = slice(start, start + samples.prefix[index])
            ids = [known.get(item, 0) for item in earlier["item_id"]]
            assert histories.item[window].tolist() == ids
            assert histories.time[window].tolist() == earlier["timestamp"].to_list()
            assert histories.label[window].tolist() == (earlier["rating"] >= 4).to_list()
            target = mine.filter(pl.col("timestamp") == time)
            assert samples.item[index] in [known.get(item, 0) for item in target["item_id"]]
            # Nobody rates a movie twice here, so a known target in its history would be a leak.
            assert samples.item[index] == 0 or samples.item[index] not in histories.item[window]


def test_every_rating_is_one_sample(ml_100k: ClickDataset) -> None:
    splits = [ml_100k.samples(split) for split in ("train", "valid", "test")]
    label = np.concatenate([samples.label for samples in splits])
    user = np.concatenate([samples.user for samples in splits])
    assert label.sum() == ml_100k.histories.label.sum()
    assert (np.bincount(user) == np.diff(ml_100k.histories.offsets)).all()


def test_vocabularies_are_of_the_training_period_only(
    ml_100k: ClickDataset, data_dir: Path
) -> None:
    raw = pq.read_table(data_dir / "ml_100k" / "interactions.parquet").to_pandas()
    train = raw[raw["timestamp"] < ml_100k.info["split_times"]["valid"]]
    assert set(ml_100k.items["item_id"].to_pylist()[1:]) == set(train["item_id"])
    assert ml_100k.num_categories == train["category_id"].nunique() + 1
    assert ml_100k.samples("train").item.min() == 1
    for split in ("valid", "test"):
        period = ml_100k.samples(split)
        first, last = period.time.min(), period.time.max()
        shown = raw[(raw["timestamp"] >= first) & (raw["timestamp"] <= last)]
        assert (period.item == 0).sum() == (~shown["item_id"].isin(train["item_id"])).sum() > 0


def test_likes_only_are_refused_or_ranked_against_drawn_items(
    data_dir: Path, tmp_path: Path
) -> None:
    if not (data_dir / "ml1m_ge4").is_dir():
        pytest.skip(f"no ml1m_ge4 in {data_dir}")
    with pytest.raises(DataError, match="prepare log"):
        _open(data_dir, "ml1m_ge4", tmp_path)
    likes = data_dir / "ml1m_ge4"
    out = prepare("log", from_path=likes, out=tmp_path / "likes", negatives=1)
    dataset = open_dataset(out)
    info = dataset.info
    assert (info["counts"]["users"], info["counts"]["events"]) == (6038, 575_281)
    known = int((dataset.histories.item > 0).sum())
    assert 0.99 * 575_281 < known < 575_281
    assert sum(info["counts"]["positives"].values()) == known
    assert sum(info["counts"]["samples"].values()) == pytest.approx(2 * known, rel=1e-3)
