"""The global temporal split."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from click_data.errors import DataError

SPLITS = ("train", "valid", "test")


def check_fractions(fractions: Sequence[float]) -> tuple[float, float, float]:
    """Three positive fractions that sum to 1, or a `DataError`."""
    if len(fractions) != 3 or any(not 0 < part < 1 for part in fractions):
        raise DataError(f"split: three fractions between 0 and 1 are needed, not {fractions}")
    if abs(sum(fractions) - 1) > 1e-6:
        raise DataError(f"split: {' + '.join(map(str, fractions))} is not 1")
    train, valid, test = fractions
    return train, valid, test


def split_times(time: NDArray[np.int64], fractions: Sequence[float]) -> tuple[int, int]:
    """First times of the validation and of the test period.

    Each is the time of the event at that quantile of all events (any order), so that a period
    holds the share asked for except that events of one instant stay together, in the later period.
    """
    train, valid, _ = check_fractions(fractions)
    ordered = np.sort(time)
    # Rounded first: 0.8 + 0.1 is a hair below 0.9 and must not move a boundary by one event.
    ranks = [int(round(share * len(time), 6)) for share in (train, train + valid)]
    first_valid, first_test = (int(ordered[rank]) for rank in ranks)
    if ordered[0] == first_valid or first_valid == first_test:
        raise DataError(
            f"the {'training' if ordered[0] == first_valid else 'validation'} period is empty: "
            f"{len(time)} events at {len(np.unique(time))} distinct times cannot be split "
            f"{' / '.join(map(str, fractions))} by time"
        )
    return first_valid, first_test
