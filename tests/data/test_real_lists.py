"""Real impression logs and sequences, where they are at hand: counts and baselines as published."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from numpy.typing import NDArray

from click_data import ClickDataset, RequestColumns, open_dataset, prepare

Opened = Callable[..., ClickDataset]


@pytest.fixture(scope="module")
def opened(data_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Opened:
    """Prepares a real set from its folder."""

    def prepared(source: str, name: str, **options: Any) -> ClickDataset:
        if not (data_dir / name).is_dir():
            pytest.skip(f"no {name} in {data_dir}")
        out = tmp_path_factory.mktemp("prepared") / name
        return open_dataset(prepare(source, from_path=data_dir / name, out=out, **options))

    return prepared


def totals(dataset: ClickDataset) -> tuple[int, int, int]:
    """Requests, candidates and positives of all splits."""
    counts = dataset.info["counts"]
    requests, candidates, positives = (
        sum(counts[name].values()) for name in ("requests", "candidates", "positives")
    )
    return requests, candidates, positives


def each_list(requests: RequestColumns) -> list[slice]:
    bounds = zip(requests.offsets, requests.offsets[1:], strict=False)
    return [slice(int(begin), int(end)) for begin, end in bounds]


def reciprocal_ranks(requests: RequestColumns, order_by: NDArray[Any]) -> float:
    """MRR of the lists that have a click, candidates in ascending order of `order_by`."""
    ranks = []
    for mine in each_list(requests):
        clicked = requests.labels["label"][mine][np.argsort(order_by[mine], kind="stable")]
        if clicked.any():
            ranks.append(1 / (1 + clicked.argmax()))
    return float(np.mean(ranks))


def test_mind_small_5k(opened: Opened, data_dir: Path) -> None:
    dataset = opened("impressions", "mind_small_5k", split_column="split_user")
    info = dataset.info
    assert totals(dataset) == (5_000, 189_359, 7_542)
    counts = info["counts"]
    assert (counts["users"], counts["items"], counts["events"]) == (4_637, 22_592, 138_932)
    assert (counts["requests"]["test"], counts["positives"]["test"]) == (504, 782)
    assert (info["timed"], info["split"]) == ("requests", "given")
    assert set(info["item_features"]) == {"category", "subcategory"}
    lengths = np.diff(dataset.histories.offsets)
    assert ((lengths == 0).sum(), lengths.max()) == (101, 425)
    # Every request sees the whole history of its user, as the log has it.
    held = pl.read_parquet(data_dir / "mind_small_5k" / "histories.parquet").sort("user_id")
    item_ids = np.array(dataset.items["item_id"].to_pylist(), dtype=object)
    mine = held["hist_items"].explode().drop_nulls().to_list()
    assert item_ids[dataset.histories.item].tolist() == mine
    test = dataset.requests("test")
    assert (test.prefix == lengths[test.user]).all()


def test_trivago_val100k(opened: Opened) -> None:
    dataset = opened(
        "impressions",
        "trivago_val100k",
        contexts=("device",),
        features=("price", "position"),
        signals=("action",),
    )
    assert totals(dataset) == (13_597, 312_539, 13_596)
    counts = dataset.info["counts"]
    assert counts["requests"] == {"train": 10_877, "valid": 1_359, "test": 1_361}
    assert (counts["users"], counts["items"], counts["events"]) == (6_593, 107_603, 87_608)
    signals = dataset.histories.signals
    actions = [int(signals[f"action={number}"].sum()) for number in range(6)]
    assert actions == [13_597, 68_538, 1_825, 1_445, 1_159, 1_044]
    assert set(dataset.context) == {"device"}
    test, histories = dataset.requests("test"), dataset.histories
    assert test.prefix.max() <= 884
    position = test.features["position"]
    assert reciprocal_ranks(test, position) == pytest.approx(0.434, abs=5e-4)
    # Hotels that the user has touched come first, the last one before all.
    touched = position.copy()
    for user, prefix, mine in zip(test.user, test.prefix, each_list(test), strict=True):
        begin = histories.offsets[user]
        place = {int(item): n for n, item in enumerate(histories.item[begin : begin + prefix])}
        for row in range(mine.start, mine.stop):
            if int(test.item[row]) in place:
                touched[row] = -1 - place[int(test.item[row])]
    assert reciprocal_ranks(test, touched) == pytest.approx(0.608, abs=5e-4)


@pytest.mark.parametrize("appended", [False, True])
def test_ebnerd_sample(appended: bool, opened: Opened) -> None:
    options: dict[str, Any] = {"contexts": ("device_type",), "append_clicks": appended}
    dataset = opened("impressions", "ebnerd_sample", **options)
    assert totals(dataset) == (1_046, 10_848, 1_047)
    counts = dataset.info["counts"]
    assert (counts["users"], counts["items"]) == (44, 3_376)
    assert counts["requests"] == {"train": 836, "valid": 104, "test": 106}
    assert counts["events"] == 8_303 + 1_047 * appended
    signals = dataset.histories.signals
    assert (signals["scroll known"] == 0).sum() == 1_280 + 1_047 * appended
    assert ("read_time known" in signals) == appended
    times, offsets = dataset.histories.time, dataset.histories.offsets
    for split in ("train", "valid", "test"):
        asked = dataset.requests(split)
        ends = offsets[asked.user] + asked.prefix
        assert (times[ends - 1] < asked.time).all()
        later = ends < offsets[asked.user + 1]
        assert (times[ends[later]] >= asked.time[later]).all()
        assert later.any() == appended


def test_lastfm_s3rec(opened: Opened, data_dir: Path) -> None:
    dataset = opened("sequences", "lastfm_s3rec")
    counts, users = dataset.info["counts"], 1_090
    assert (counts["users"], counts["items"], counts["events"]) == (users, 3_646, 52_551)
    assert counts["requests"] == {"train": 52_551 - 3 * users, "valid": users, "test": users}
    assert counts["candidates"]["test"] == counts["candidates"]["valid"] == 100 * users
    assert (dataset.info["timed"], dataset.info["split"]) == ("none", "given")
    test, lengths = dataset.requests("test"), np.diff(dataset.histories.offsets)
    assert (test.prefix == lengths[test.user] - 1).all()
    label = test.labels["label"].reshape(users, 100)
    assert (label[:, 0] == 1).all()
    assert label.sum() == users
    # PopRec, HR@10: of popularity in training, ties at worst and at best.
    popularity = test.features["popularity"].reshape(users, 100)
    above = (popularity[:, 1:] > popularity[:, :1]).sum(1)
    level = (popularity[:, 1:] == popularity[:, :1]).sum(1)
    assert ((above + level) < 10).mean() == pytest.approx(0.285, abs=5e-4)
    assert (above < 10).mean() == pytest.approx(0.299, abs=5e-4)
    assert (above < 5).mean() == pytest.approx(0.192, abs=5e-4)
    # Of popularity with the test items, as it was published; no cold count is left.
    count = np.bincount(dataset.histories.item, minlength=dataset.item_rows)
    score = count[test.item].reshape(users, 100)
    above = (score[:, 1:] > score[:, :1]).sum(1)
    level = (score[:, 1:] == score[:, :1]).sum(1)
    assert ((above + level) < 10).mean() == pytest.approx(0.2963, abs=5e-5)
    assert (above < 10).mean() == pytest.approx(0.3083, abs=5e-5)
    raw = pl.read_parquet(data_dir / "lastfm_s3rec" / "test.parquet").sort("user_id")
    item_ids = np.array(dataset.items["item_id"].to_pylist(), dtype=object)
    shown = item_ids[test.item.reshape(users, 100)]
    assert shown[:, 0].tolist() == raw["test_item"].gather(test.user).to_list()
    assert shown[:, 1:].tolist() == raw["negatives"].gather(test.user).to_list()
