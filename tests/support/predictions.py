"""Predictions made up to be judged."""

from __future__ import annotations

import numpy as np


def case(seed: int, rows: int = 300, users: int = 20, levels: int | None = None):
    """Random users, labels and probabilities; `levels` makes ties."""
    rng = np.random.default_rng(seed)
    user = rng.integers(0, users, rows) * 7 - 3
    score = rng.uniform(0.01, 0.99, rows)
    if levels:
        score = np.round(score * levels) / (levels + 1) + 0.01
    return user, (rng.uniform(size=rows) < score).astype(np.int8), score


def lists(user: np.ndarray, seed: int = 0) -> np.ndarray:
    """A request for each row, some 8 rows a request, each of one user."""
    each = max(1, len(user) // len(np.unique(user)) // 8)
    return user * 100 + np.random.default_rng(seed).integers(0, each, len(user))
