"""Which combinations of parameters a test takes: on a GPU all of them, on a CPU enough."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import combinations, product
from typing import Any

from attention_cases import DEVICE


def combined(*axes: Iterable[Any], whole: bool = DEVICE == "cuda") -> list[tuple[Any, ...]]:
    """Values of several parameters of a test, for `pytest.mark.parametrize`.

    Where there is no GPU, only so many that each value of each parameter stands beside each value
    of each other one at least once: what goes wrong goes wrong for a value or for two together,
    hardly ever for three, and the interpreter takes long. The choice is the same in every run.

    Args:
        axes: the values of each parameter.
        whole: all combinations, by default on a GPU.
    """
    values = [list(axis) for axis in axes]
    # By place in their axis, since values need not be hashable.
    left = list(product(*(range(len(axis)) for axis in values)))
    chosen = left
    if not whole:
        chosen = []
        missing = {pair for places in left for pair in _pairs(places)}
        while missing:
            best = max(left, key=lambda places: len(_pairs(places) & missing))
            chosen.append(best)
            missing -= _pairs(best)
        chosen.sort()
    return [tuple(axis[at] for axis, at in zip(values, places, strict=True)) for places in chosen]


def _pairs(places: Sequence[int]) -> set[tuple[tuple[int, int], ...]]:
    return set(combinations(enumerate(places), min(2, len(places))))
