"""Launching a Triton kernel in a third of the time that `kernel[grid](...)` takes.

To find the compiled kernel, Triton looks at every argument of every launch: 20 microseconds for
thirty of them, longer than a kernel on a small batch runs. Here one dictionary look-up finds it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_COMPILED: dict[tuple[Any, ...], Any] = {}


def launch(
    kernel: Any,
    grid: int | tuple[int, int],
    arguments: tuple[Any, ...],
    constants: dict[str, Any],
    **options: int,
) -> None:
    """`kernel[grid](*arguments, **constants, **options)`, on the first argument's device.

    Args:
        kernel: a `triton.jit` or `gluon.jit` function whose parameters are `arguments`, then
            `constants`, in these orders. Integers among the arguments must be in its
            `do_not_specialize`: Triton compiles other integers in where they are 1.
        grid: programs, in one or two dimensions.
        arguments: the first a tensor; further tensors, TMA descriptors, numbers, None, and named
            tuples of such.
        constants: the constexpr parameters.
        options: Triton's: num_warps, num_stages, maxnreg.
    """
    shape = grid if isinstance(grid, tuple) else (grid,)
    device = arguments[0].device
    if device.type != "cuda":  # Triton's interpreter
        kernel[shape](*arguments, **constants, **options)
        return
    if device.index != torch.cuda.current_device():
        with torch.cuda.device(device):
            launch(kernel, grid, arguments, constants, **options)
        return
    options_key = tuple(options.items())
    key = (kernel, device.index, *constants.values(), options_key, *map(_kind, arguments))
    compiled = _COMPILED.get(key)
    if compiled is not None:
        compiled[(*shape, 1, 1)[:3]](*arguments, *constants.values())
        return
    _check(kernel, arguments, constants)
    compiled = kernel[shape](*arguments, **constants, **options)
    # Fields of a tuple are specialised one by one; Triton's own look-up is right for them.
    if not any(isinstance(argument, tuple) for argument in arguments):
        _COMPILED[key] = compiled


def _kind(argument: Any) -> Any:
    """What Triton compiles a kernel for: of a tensor its dtype and whether it is aligned, of a TMA
    descriptor the blocks that it brings."""
    if isinstance(argument, Tensor):
        return argument.dtype, argument.data_ptr() % 16 == 0
    if hasattr(argument, "block_shape"):
        return argument.base.dtype, *argument.block_shape, argument.layout
    if type(argument) is int and not -(2**31) <= argument < 2**31:
        return "int64"
    return type(argument)


def _check(kernel: Any, arguments: tuple[Any, ...], constants: dict[str, Any]) -> None:
    parameters = kernel.params
    assert [p.name for p in parameters[len(arguments) :]] == list(constants), kernel
    for parameter, argument in zip(parameters, arguments, strict=False):
        if isinstance(argument, int):
            assert parameter.do_not_specialize, f"{kernel}: {parameter.name}"
