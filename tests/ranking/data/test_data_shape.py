"""Statistics of a data set, made in pieces: those of NumPy, to the bit."""

from pathlib import Path

import numpy as np
import polars as pl
import pytest

from click_data import ClickDataset, open_dataset, prepare
from jagged_ranking.data import data_shape
from jagged_ranking.data.data_shape import DataShape, Scale


@pytest.mark.parametrize("size", [1, 7, 128, 1000, 8193, 300_000])
@pytest.mark.parametrize("dtype", [np.float32, np.int8])
def test_moments_are_those_of_numpy(
    size: int, dtype: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data_shape, "PIECE", 999)
    values = (10 * np.random.default_rng(size).standard_normal(size)).astype(dtype)
    logs = np.sign(values) * np.log1p(np.abs(values))
    wanted = [
        float(of(dtype=np.float64))
        for x in (values, logs)
        for of in (x.mean, x.std)
    ]  # fmt: skip
    wanted[1::2] = [max(std, 1e-6) for std in wanted[1::2]]
    found = Scale.of(values)
    assert [found.mean, found.std, found.log_mean, found.log_std] == wanted


def test_signals_are_measured_where_train_requests_see_them(
    toy: ClickDataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data_shape, "PIECE", 37)
    train, columns = toy.requests("train"), toy.histories
    seen: dict[str, list[float]] = {name: [] for name in columns.signals}
    for user in range(toy.num_users):
        begin = columns.offsets[user]
        longest = max((int(p) for p in train.prefix[train.user == user]), default=0)
        for name, values in columns.signals.items():
            seen[name] += values[begin : begin + longest].tolist()
    found = data_shape._past_signals(toy, train)
    assert {name: values.tolist() for name, values in found.items()} == seen


def test_numbers_are_scaled_by_those_of_training(tmp_path: Path) -> None:
    """Prices of items, of requests and of candidates, all of them far higher from validation on,
    when other items are shown, of which more are clicked."""
    lists = [
        {
            "impression_id": row,
            "user_id": row % 3,
            "timestamp": 100 + row,
            "item_id": 2 * row + place,
            "label": int(place == 1 or row >= 18),
            "price": float(row + place) * (1 if row < 16 else 1000),
            "hour": float(row) * (1 if row < 16 else 1000),
        }
        for row in range(20)
        for place in (0, 1)
    ]
    shown = pl.DataFrame(lists)
    shown.write_parquet(tmp_path / "impressions.parquet")
    items = shown.select("item_id", worth=pl.col("price") + 1)
    items.write_parquet(tmp_path / "items.parquet")
    options = {"features": ("price",), "contexts": ("hour",), "append_clicks": True}
    folder = prepare("impressions", from_path=tmp_path, out=tmp_path / "prepared", **options)
    dataset = open_dataset(folder)
    asked = {split: len(dataset.requests(split)) for split in ("train", "valid", "test")}
    assert asked == {"train": 16, "valid": 2, "test": 2}
    found, train = DataShape.of(dataset), shown.filter(pl.col("impression_id") < 16)
    assert found.num_items == 32 + 1
    assert found.positive_rate == 0.5
    for scale, values in (
        (found.item_dense["worth"], train["price"] + 1),
        (found.features["price"], train["price"]),
        (found.context["hour"], train["hour"].gather_every(2)),
    ):
        assert isinstance(scale, Scale)
        assert scale.mean == pytest.approx(values.mean())
        assert scale.std == pytest.approx(values.std(ddof=0))
