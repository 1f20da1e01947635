"""A small click log for the ranking tests."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from click_data import ClickDataset, open_dataset, prepare
from jagged_ranking.measure import timing


@pytest.fixture(autouse=True, scope="package")
def one_thread() -> Iterator[None]:
    """Shapes are so small here that threads would only wait for one another."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def objects_apart() -> Iterator[None]:
    """What was imported and collected is not looked through for garbage at each measurement."""
    with timing.earlier_objects_apart():
        yield
    gc.freeze()  # as it was, see tests/conftest.py


@pytest.fixture(scope="session")
def toy(tmp_path_factory: pytest.TempPathFactory) -> ClickDataset:
    """60 users, about 2,700 ratings in the layout of GroupLens.

    Who likes what depends on the user and the genre, so that there is something to learn from a
    history; several ratings share a second, so that prefixes are not just 0, 1, 2, ....
    """
    folder = tmp_path_factory.mktemp("ratings")
    write_ratings(folder, seed=0)
    return open_dataset(prepare("movielens", from_path=folder, out=folder / "prepared"))


@pytest.fixture(scope="session")
def songs(tmp_path_factory: pytest.TempPathFactory) -> ClickDataset:
    """40 users' sequences of 30 items, none twice: each goes round a circle in steps of 1 or 2.

    The held out items stand among 12 given negatives.
    """
    rng = np.random.default_rng(0)
    folder = tmp_path_factory.mktemp("songs")
    events, given = [], []
    for user in range(40):
        places = rng.integers(30) + np.cumsum(rng.integers(1, 3, rng.integers(6, 13)))
        sequence = places % 30
        events += [(user, item + 1, time) for time, item in enumerate(sequence)]
        negatives = rng.permutation(np.setdiff1d(np.arange(30), sequence))[:12] + 1
        given.append((user, negatives.tolist()))
    _write(folder / "interactions.parquet", ("user_id", "item_id", "timestamp"), events)
    _write(folder / "test.parquet", ("user_id", "negatives"), given)
    return open_dataset(prepare("sequences", from_path=folder, out=folder / "prepared"))


def _write(path: Path, names: tuple[str, ...], rows: list[tuple]) -> None:
    pq.write_table(pa.table(dict(zip(names, zip(*rows, strict=True), strict=True))), path)


def write_ratings(folder: Path, *, seed: int, users: int = 60, items: int = 80) -> None:
    """ratings.csv and movies.csv; users overlap in time, and one second holds up to 3 ratings."""
    rng = np.random.default_rng(seed)
    genres = ("Action", "Comedy", "Drama", "Horror")
    genre = rng.integers(0, len(genres), items)
    taste = rng.normal(0, 1.0, (users, len(genres)))
    quality = rng.normal(0, 0.5, items)
    lines = ["userId,movieId,rating,timestamp"]
    for user in range(users):
        seen = rng.permutation(items)[: rng.integers(10, items)]
        seconds = np.sort(rng.integers(0, 2000, len(seen))) // 3 * 3 + 10**6
        score = 3.5 + taste[user, genre[seen]] + quality[seen] + rng.normal(0, 0.5, len(seen))
        for item, time, value in zip(seen, seconds, np.clip(score, 1, 5).round(), strict=True):
            lines.append(f"{user + 1},{item + 1},{value},{time}")
    (folder / "ratings.csv").write_text("\n".join(lines) + "\n")
    movies = ["movieId,title,genres"]
    movies += [f"{item + 1},Title {item + 1} (1990),{genres[genre[item]]}" for item in range(items)]
    (folder / "movies.csv").write_text("\n".join(movies) + "\n")
