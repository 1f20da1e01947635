"""The public MovieLens sets, where they are at hand: counts as published, no leaks."""

from pathlib import Path

import numpy as np
import polars as pl
import pyarrow.parquet as pq
import pytest
from sklearn.metrics import roc_auc_score

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
    assert ml_100k.histories.signals["label"].sum() == 34174 + 21201
    lengths = info["history_length"]
    assert (lengths["min"], lengths["p50"], lengths["p99"], lengths["max"]) == (20, 65, 442.54, 737)
    assert info["padding_waste"] == pytest.approx(0.825, abs=0.002)


def test_ml_latest_small_counts_are_the_published_ones(data_dir: Path, tmp_path: Path) -> None:
    info = _open(data_dir, "ml_latest_small", tmp_path).info
    counts = info["counts"]
    assert (counts["users"], counts["items"], counts["events"]) == (610, 9724, 100_836)
    assert info["padding_waste"] == pytest.approx(0.925, abs=0.003)


def test_splits_are_in_order_of_time_and_of_the_size_asked_for(ml_100k: ClickDataset) -> None:
    train, valid, test = (ml_100k.requests(split) for split in ("train", "valid", "test"))
    assert train.time.max() < valid.time.min()
    assert valid.time.max() < test.time.min()
    # Ties at a boundary move an event or a few, never more.
    sizes = tuple(len(requests.item) for requests in (train, valid, test))
    assert sizes == (79_999, 10_001, 10_000)


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
        requests = ml_100k.requests(split)
        for index in rng.choice(len(requests), 100, replace=False):
            user, time = requests.user[index], requests.time[index]
            mine = raw.filter(pl.col("user_id") == users[user])
            earlier = mine.filter(pl.col("timestamp") < time).sort("timestamp", "item_id")
            start = histories.offsets[user]
            window = slice(start, start + requests.prefix[index])
            ids = [known[item] for item in earlier["item_id"]]
            assert histories.item[window].tolist() == ids
            assert histories.time[window].tolist() == earlier["timestamp"].to_list()
            assert histories.signals["label"][window].tolist() == (earlier["rating"] >= 4).to_list()
            shown = requests.item[slice(*requests.offsets[index : index + 2])]
            target = mine.filter(pl.col("timestamp") == time).sort("item_id")
            assert shown.tolist() == [known[item] for item in target["item_id"]]
            # Nobody rates a movie twice here, so a candidate in its history would be a leak.
            assert not set(shown) & set(histories.item[window])


def test_every_rating_is_one_candidate(ml_100k: ClickDataset) -> None:
    splits = [ml_100k.requests(split) for split in ("train", "valid", "test")]
    label = np.concatenate([requests.labels["label"] for requests in splits])
    user = np.concatenate([np.repeat(of.user, np.diff(of.offsets)) for of in splits])
    assert label.sum() == ml_100k.histories.signals["label"].sum()
    assert (np.bincount(user) == np.diff(ml_100k.histories.offsets)).all()


def test_vocabularies_are_of_the_training_period_only(
    ml_100k: ClickDataset, data_dir: Path
) -> None:
    raw = pq.read_table(data_dir / "ml_100k" / "interactions.parquet").to_pandas()
    train = raw[raw["timestamp"] < ml_100k.info["split_times"]["valid"]]
    item_ids = ml_100k.items["item_id"].to_pylist()
    assert set(item_ids[1 : ml_100k.num_items]) == set(train["item_id"])
    assert set(item_ids[1:]) == set(raw["item_id"])
    assert ml_100k.item_features["category"] == train["category_id"].nunique() + 1
    assert ml_100k.requests("train").item.min() == 1
    for split in ("valid", "test"):
        period = ml_100k.requests(split)
        first, last = period.time.min(), period.time.max()
        shown = raw[(raw["timestamp"] >= first) & (raw["timestamp"] <= last)]
        new = (period.item >= ml_100k.num_items).sum()
        assert new == (~shown["item_id"].isin(train["item_id"])).sum() > 0


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
    assert sum(info["counts"]["positives"].values()) == 575_281
    assert sum(info["counts"]["candidates"].values()) == 2 * 575_281
    assert 0 < info["counts"]["new_items"]["valid"] < info["counts"]["new_items"]["test"] < 0.05


@pytest.mark.parametrize("name", ["globo_clicks", "foursquare_nyc_stan"])
def test_nothing_known_before_tells_clicks_from_draws(
    name: str, data_dir: Path, tmp_path: Path
) -> None:
    if not (data_dir / name).is_dir():
        pytest.skip(f"no {name} in {data_dir}")
    unit, share = {"globo_clicks": ("ms", 10), "foursquare_nyc_stan": ("s", 1)}[name]
    log = pl.scan_parquet(data_dir / name / "interactions.parquet")
    log.filter(pl.col("user_id") % share == 0).sink_parquet(tmp_path / "some.parquet")
    options = {"time_unit": unit, "drop_duplicates": True}
    out = prepare("log", from_path=tmp_path / "some.parquet", out=tmp_path / name, **options)
    dataset = open_dataset(out)
    test = dataset.requests("test")
    label = test.labels["label"]
    known = {**test.features, "new": test.item >= dataset.num_items}
    for feature, value in known.items():
        # Draws are never of the positive's own item: where a few items are most of the clicks of
        # a time, these are a little more often positives.
        assert roc_auc_score(label, value) == pytest.approx(0.5, abs=0.015), feature
