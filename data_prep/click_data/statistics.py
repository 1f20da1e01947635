"""What a data set holds, and how skewed its history lengths are."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from click_data.split import SPLITS

_BATCH = 256
_DRAWS = 1000


def count_splits(
    period: NDArray[Any],
    lengths: NDArray[np.int64],
    label: NDArray[np.int8],
    new: NDArray[np.bool_],
) -> dict[str, dict[str, Any]]:
    """Requests, candidates, positives and the share of candidates that are new items, by split.

    period: number of the split [R]; lengths: candidates of each request [R]; label, new: [C].
    """
    shown = np.repeat(period, lengths)
    told: dict[str, dict[str, Any]] = {
        name: {} for name in ("requests", "candidates", "positives", "new_items")
    }
    for index, name in enumerate(SPLITS):
        mine = shown == index
        told["requests"][name] = int((period == index).sum())
        told["candidates"][name] = int(mine.sum())
        told["positives"][name] = int((label[mine] == 1).sum())
        told["new_items"][name] = round(float(new[mine].mean()), 6) if mine.any() else 0.0
    return told


def length_quantiles(lengths: NDArray[np.int64]) -> dict[str, float]:
    """Mean, smallest, largest and quantiles of whole history lengths, in events."""
    quantiles = {f"p{q}": round(float(np.percentile(lengths, q)), 3) for q in (10, 50, 90, 99)}
    return {
        "mean": round(float(lengths.mean()), 3),
        "min": int(lengths.min()),
        **quantiles,
        "max": int(lengths.max()),
    }


def padding_waste(lengths: NDArray[np.int64]) -> float:
    """Share of a dense padded batch that is padding: mean of 1 - mean/max over random batches.

    Batches of 256 users (or all, if fewer) without replacement, 1,000 draws, fixed seed.
    """
    rng = np.random.Generator(np.random.PCG64(0))
    size = min(_BATCH, len(lengths))
    waste = np.empty(_DRAWS)
    for draw in range(_DRAWS):
        batch = lengths[rng.choice(len(lengths), size, replace=False, shuffle=False)]
        waste[draw] = 1 - batch.mean() / max(batch.max(), 1)
    return round(float(waste.mean()), 4)
