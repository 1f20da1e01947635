"""A prepared data set of some users of a larger one, to try things out on."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from click_data import schema
from click_data.output import refuse_foreign, write_whole
from click_data.split import SPLITS
from click_data.statistics import count_splits, length_quantiles, padding_waste


def sample_users(
    folder: str | Path, *, out: str | Path, requests: int, longest: int, seed: int = 0
) -> Path:
    """Prepare a data set of whole users of the one in `folder`, and return `out`.

    Users are drawn at random until they have at least so many requests, some in each split, and
    candidates of both labels (of the first task) in the training split; where all users together
    have less, all are taken. Their histories and requests are as they were, and so is
    items.parquet: ids mean what they meant. The name says how many users there are of how many.

    requests: at least so many, of all splits together.
    longest: users with longer histories, in events, are taken only where the others do not do.
    seed: of the draw.

    Raises DataError if `folder` is not a prepared data set, or `out` holds something else.
    """
    folder = Path(folder)
    info = schema.read_info(folder)
    schema.verify(folder, info)
    refuse_foreign(Path(out))
    histories, asked = (
        pq.read_table(folder / name) for name in (schema.HISTORIES, schema.REQUESTS)
    )
    lengths = _lengths(histories["item"])
    order = np.random.default_rng(seed).permutation(len(lengths))
    # Stable: at random among those that are short enough, the others by their lengths.
    order = order[np.argsort(np.maximum(lengths[order], longest), kind="stable")]
    chosen = np.sort(order[: _enough(asked, order, requests, info["tasks"][0])])
    items = pq.read_table(folder / schema.ITEMS)
    prepared = _restricted(schema.Prepared(histories, asked, items, info), chosen)
    drawn = {"of": info["digest"], "requests": requests, "longest": longest, "seed": seed}
    description = {**info, "sampled": drawn}
    write_whole(Path(out), True, lambda new: schema.write(prepared, new, description))
    return Path(out)


def _enough(asked: pa.Table, order: NDArray[np.int64], requests: int, task: str) -> int:
    """How many of the users, taken in this order, have what a training needs."""
    turn = np.empty_like(order)
    turn[order] = np.arange(len(order))
    turns, splits = turn[asked["user"].to_numpy()], _splits(asked)
    shown = np.repeat(np.arange(len(turns)), _lengths(asked["item"]))
    train = splits[shown] == SPLITS.index("train")
    label = _values(asked[schema.label_column(task)])
    needed = [turns[splits == index] for index in range(len(SPLITS))]
    needed += [turns[shown[train & (label == value)]] for value in (0, 1)]
    users = 1 + max((int(of.min()) for of in needed if len(of)), default=0)
    reached = np.cumsum(np.bincount(turns, minlength=len(order)))
    return max(users, 1 + int(np.searchsorted(reached[:-1], requests)))


def _splits(asked: pa.Table) -> NDArray[np.int32]:
    """The number of each request's split."""
    names = asked["split"].combine_chunks()
    numbers = np.array([SPLITS.index(name) for name in names.dictionary.to_pylist()], np.int32)
    return numbers[names.indices.to_numpy()]


def _lengths(lists: pa.ChunkedArray) -> NDArray[np.int64]:
    return lists.combine_chunks().value_lengths().to_numpy().astype(np.int64)


def _values(lists: pa.ChunkedArray) -> NDArray[Any]:
    return lists.combine_chunks().flatten().to_numpy()


def _restricted(whole: schema.Prepared, users: NDArray[np.int64]) -> schema.Prepared:
    """The tables of some users, ascending, and what dataset.json says otherwise of them."""
    histories = whole.histories.take(pa.array(users))
    asked = whole.requests.filter(pa.array(np.isin(whole.requests["user"].to_numpy(), users)))
    user = np.searchsorted(users, asked["user"].to_numpy()).astype(np.int32)
    asked = asked.set_column(asked.schema.get_field_index("user"), "user", pa.array(user))
    lengths = _lengths(histories["item"])
    touched = np.union1d(_values(histories["item"]), _values(asked["item"]))
    total, name = len(whole.histories), whole.info["name"]
    counted = count_splits(
        _splits(asked),
        _lengths(asked["item"]),
        _values(asked[schema.label_column(whole.info["tasks"][0])]),
        _values(asked["item"]) >= whole.info["num_items"],
    )
    info = {
        "name": f"{name} ({len(users):,} of {total:,} users)" if len(users) < total else name,
        "counts": {
            "users": len(users),
            "items": int((touched != 0).sum()),
            "events": int(lengths.sum()),
            **counted,
        },
        "history_length": length_quantiles(lengths),
        "padding_waste": padding_waste(lengths),
    }
    return schema.Prepared(histories, asked, whole.items, info)
