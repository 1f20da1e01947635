"""Statistics of a data set, made in pieces: those of NumPy, to the bit."""

import numpy as np
import pytest

from click_data import ClickDataset
from jagged_ranking.data import data_shape
from jagged_ranking.data.data_shape import Scale


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
