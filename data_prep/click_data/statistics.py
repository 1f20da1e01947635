"""How skewed history lengths are."""

import numpy as np
from numpy.typing import NDArray

_BATCH = 256
_DRAWS = 1000


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
        waste[draw] = 1 - batch.mean() / batch.max()
    return round(float(waste.mean()), 4)
