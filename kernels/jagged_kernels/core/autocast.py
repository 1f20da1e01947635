"""`torch.autocast`: the casts of products' inputs, and keeping it out of what computes them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

P = ParamSpec("P")
R = TypeVar("R")


def as_autocast(*inputs: Any) -> tuple[Any, ...]:
    """Inputs of a product as autocast hands them to PyTorch's own: floating ones in its dtype.

    Of a `JaggedTensor` or `Jagged2Tensor` the values; what is no tensor, or None, stays as it is.
    A cast is a step of autograd, so that gradients have the dtypes that inputs have.

    To be called where `torch._C._is_any_autocast_enabled()`, which does not take long.
    """
    return tuple(_cast(x) for x in inputs)


def dtype_in_products(x: Tensor) -> torch.dtype:
    """In which `as_autocast` has this tensor; float64 stays float64, as in PyTorch."""
    device = x.device.type
    if (
        not torch._C._is_any_autocast_enabled()
        or not x.is_floating_point()
        or x.dtype == torch.float64
        or device == "meta"  # where nobody casts
        or not torch.is_autocast_enabled(device)
    ):
        return x.dtype
    return torch.get_autocast_dtype(device)


def _cast(x: Any) -> Any:
    if isinstance(x, Tensor):
        return x.to(dtype_in_products(x))
    values = getattr(x, "values", None)
    return x.with_values(_cast(values)) if isinstance(values, Tensor) else x


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
