"""Keeping `torch.autocast` out of computations that choose their own dtypes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")


def without_autocast(function: Callable[P, R]) -> Callable[P, R]:
    """`function` with autocast off inside, on the device of its first argument, a tensor.

    Autocast would round the factors of matrix products to a half type, and what is written to a
    result of the caller's dtype would have another.
    """

    @functools.wraps(function)
    def exact(*args: Any, **kwargs: Any) -> Any:
        device = args[0].device.type
        if not torch.is_autocast_enabled(device):
            return function(*args, **kwargs)
        with torch.autocast(device, enabled=False):
            return function(*args, **kwargs)

    return exact
