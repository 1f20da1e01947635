"""A prepared data set of some users of a larger one, to try things out on."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from click_data import schema
from click_data.output import refuse_foreign, write_whole
from click_data.split import SPLITS
from click_data.statistics import length_quantiles, padding_waste


def sample_users(
    folder: str | Path, *, out: str | Path, samples: int, longest: int, seed: int = 0
) -> Path:
    """Prepare a data set of whole users of the one in `folder`, and return `out`.

    Users are drawn at random until they have at least so many samples, some in each split and of
    both labels in the training split; where all users together have less, all are taken. Their
    histories and samples are as they were, and so are the vocabularies and `train_count` in
    items.parquet: ids mean what they meant. The name says how many users there are of how many.

    samples: at least so many, of all splits together.
    longest: users with longer histories, in events, are taken only where the others do not do.
    seed: of the draw.

    Raises DataError if `folder` is not a prepared data set, or `out` holds something else.
    """
    folder = Path(folder)
    info = schema.read_info(folder)
    schema.verify(folder, info)
    refuse_foreign(Path(out))
    histories, asked = (pq.read_table(folder / name) for name in (schema.HISTORIES, schema.SAMPLES))
    lengths = _lengths(histories)
    order = np.random.default_rng(seed).permutation(len(lengths))
    # Stable: at random among those that are short enough, the others by their lengths.
    order = order[np.argsort(np.maximum(lengths[order], longest), kind="stable")]
    chosen = np.sort(order[: _enough(asked, order, samples)])
    items = pq.read_table(folder / schema.ITEMS)
    prepared = _restricted(schema.Prepared(histories, asked, items, info), chosen)
    drawn = {"of": info["digest"], "samples": samples, "longest": longest, "seed": seed}
    description = {**info, "sampled": drawn}
    write_whole(Path(out), True, lambda new: schema.write(prepared, new, description))
    return Path(out)


def _enough(asked: pa.Table, order: NDArray[np.int64], samples: int) -> int:
    """How many of the users, taken in this order, have what a training needs."""
    turn = np.empty_like(order)
    turn[order] = np.arange(len(order))
    turns, splits = turn[asked["user"].to_numpy()], _splits(asked)
    train = splits == SPLITS.index("train")
    label = asked["label"].to_numpy()
    needed = [turns[splits == index] for index in range(len(SPLITS))]
    needed += [turns[train & (label == value)] for value in (0, 1)]
    users = 1 + max((int(of.min()) for of in needed if len(of)), default=0)
    reached = np.cumsum(np.bincount(turns, minlength=len(order)))
    return max(users, 1 + int(np.searchsorted(reached[:-1], samples)))


def _splits(asked: pa.Table) -> NDArray[np.int32]:
    """The number of each sample's split."""
    names = asked["split"].combine_chunks()
    numbers = np.array([SPLITS.index(name) for name in names.dictionary.to_pylist()], np.int32)
    return numbers[names.indices.to_numpy()]


def _lengths(histories: pa.Table) -> NDArray[np.int64]:
    return histories["item"].combine_chunks().value_lengths().to_numpy().astype(np.int64)


def _distinct(histories: pa.Table, column: str) -> int:
    """How many are left of those that the vocabulary has."""
    found = np.unique(histories[column].combine_chunks().values.to_numpy())
    return int((found != 0).sum())


def _restricted(whole: schema.Prepared, users: NDArray[np.int64]) -> schema.Prepared:
    """The tables of some users, ascending, and what dataset.json says otherwise of them."""
    histories = whole.histories.take(pa.array(users))
    asked = whole.samples.filter(pa.array(np.isin(whole.samples["user"].to_numpy(), users)))
    user = np.searchsorted(users, asked["user"].to_numpy()).astype(np.int32)
    asked = asked.set_column(asked.schema.get_field_index("user"), "user", pa.array(user))
    splits, label = _splits(asked), asked["label"].to_numpy()
    lengths = _lengths(histories)
    total, name = len(whole.histories), whole.info["name"]
    info = {
        "name": f"{name} ({len(users):,} of {total:,} users)" if len(users) < total else name,
        "counts": {
            "users": len(users),
            "items": _distinct(histories, "item"),
            "categories": _distinct(histories, "category"),
            "events": int(lengths.sum()),
            "samples": {of: int((splits == i).sum()) for i, of in enumerate(SPLITS)},
            "positives": {of: int(label[splits == i].sum()) for i, of in enumerate(SPLITS)},
        },
        "history_length": length_quantiles(lengths),
        "padding_waste": padding_waste(lengths),
    }
    return schema.Prepared(histories, asked, whole.items, info)
