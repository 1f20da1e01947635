"""Launching a Triton kernel in a quarter of the time that `kernel[grid](...)` takes.

To find the compiled kernel, Triton looks at every argument of every launch: 20 microseconds for
thirty of them, longer than a kernel on a small batch runs. Here one dictionary look-up finds it,
and tensors go in as addresses, which the driver is not asked about again.
"""

from __future__ import annotations

from types import NoneType
from typing import Any

import torch
from torch import Tensor
from triton import knobs

# By what kernels are compiled for. That follows from models, not from batches (see `layouts`; sizes
# are arguments that Triton does not specialise), so that this does not grow as batches go by.
_COMPILED: dict[tuple[Any, ...], Any] = {}
# What types alone say all about.
_KINDS = frozenset((float, bool, NoneType))


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
            tuples of such without integers.
        constants: the constexpr parameters.
        options: Triton's: num_warps, num_stages, maxnreg.
    """
    index = arguments[0].get_device()
    if index < 0:  # on the CPU: Triton's interpreter
        kernel[_two(grid)](*arguments, **constants, **options)
        return
    if index != torch._C._cuda_getDevice():
        with torch.cuda.device(index):
            launch(kernel, grid, arguments, constants, **options)
        return
    # What Triton compiles a kernel for, beside the constants: of a tensor its dtype and whether
    # it is aligned, of most else the type. And its device, because the launcher does not look where
    # an address lies: what is not where it was goes the long way, and Triton refuses it.
    kinds: list[Any] = []
    passed: list[Any] = []
    for argument in arguments:
        kind = type(argument)
        if kind is Tensor:
            address = argument.data_ptr()
            kinds += argument.dtype, argument.get_device(), address % 16 == 0
            passed.append(address)
        elif kind is int:
            kinds.append(-(2**31) <= argument < 2**31)  # int32 or int64
            passed.append(argument)
        elif kind in _KINDS:
            kinds.append(kind)
            passed.append(argument)
        else:
            passed.append(_look(argument, kinds))
    values = constants.values()
    key = (kernel.fn, *values, *options, *options.values(), *kinds)
    compiled = _COMPILED.get(key)
    if compiled is None:
        _check(kernel, arguments, constants)
        _COMPILED[key] = kernel[_two(grid)](*arguments, **constants, **options)
    elif _is_watched():
        compiled[(*_two(grid), 1)](*arguments, *values)
    else:
        x, y = _two(grid)
        stream = torch._C._cuda_getCurrentRawStream(index)
        compiled.run(
            x, y, 1, stream, compiled.function, compiled.packed_metadata,
            None, None, None, *passed, *values,
        )  # fmt: skip


def _two(grid: int | tuple[int, int]) -> tuple[int, int]:
    return grid if isinstance(grid, tuple) else (grid, 1)


def _is_watched() -> bool:
    """Whether a profiler wants to hear of every launch, by Triton's hooks."""
    before, after = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
    # Each is a chain of hooks, one hook, or None.
    return bool(getattr(before, "calls", before) or getattr(after, "calls", after))


def _look(argument: Any, kinds: list[Any]) -> Any:
    """What the launcher takes for an argument. Adds to `kinds` what Triton compiles for."""
    if isinstance(argument, Tensor):
        address = argument.data_ptr()
        kinds += argument.dtype, argument.get_device(), address % 16 == 0
        return address
    if isinstance(argument, tuple):
        kinds += type(argument), len(argument)
        return tuple([_look(x, kinds) for x in argument])
    if hasattr(argument, "block_shape"):  # of a TMA descriptor the blocks that it brings
        kinds += argument.base.dtype, *argument.block_shape, argument.layout
    else:
        kinds.append(type(argument))
    return argument


def _check(kernel: Any, arguments: tuple[Any, ...], constants: dict[str, Any]) -> None:
    parameters = kernel.params
    assert [p.name for p in parameters[len(arguments) :]] == list(constants), kernel
    for parameter, argument in zip(parameters, arguments, strict=False):
        if isinstance(argument, int):
            assert parameter.do_not_specialize, f"{kernel}: {parameter.name}"
        if isinstance(argument, tuple):
            assert not any(isinstance(x, int) for x in argument), f"{kernel}: {parameter.name}"
