"""Keeping `torch.autocast` out of computations that choose their own dtypes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")


def without_autocast(function: Callable[P, R]) -> Callable[P, R]:
    """`function` with autocast off inside, for every device.

    Autocast would round the factors of matrix products to a half type, and what is written to a
    result of the caller's dtype would have another.
    """

    @functools.wraps(function)
    def exact(*args: P.args, **kwargs: P.kwargs) -> R:
        # Not `torch.autocast`, which takes microseconds, and asks for a device.
        if not torch._C._is_any_autocast_enabled():
            return function(*args, **kwargs)
        with torch._C._DisableAutocast():
            return function(*args, **kwargs)

    return exact
