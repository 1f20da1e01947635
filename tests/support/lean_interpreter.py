"""Triton's interpreter in a tenth of its time, with the same results.

Of what it does, this leaves out what no result needs. A call of a device function sets every
function of `triton.language` anew, although the launch has set them. Every sum and product of
integers is computed twice more, for an assertion that is only made with the option `debug`. After a
launch all tensors are copied back from where the interpreter had them: on a CPU onto themselves,
also memory that nobody has touched. Reductions and scans by a function of one's own go number by
number; here whole slices are combined, in pairs, as on a GPU. The type of every block is made and
checked anew, and so is its tensor's shape; here once for each shape and dtype. What two operands
become is decided anew (`lean_operands`), and whether their numbers are as wide as their type says.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np
from lean_operands import make_operands_lean
from triton import language
from triton.language import core


def make_lean(interpreter: Any) -> None:
    """Change `triton.runtime.interpreter` for the rest of this process, where tensors are on a
    CPU."""
    builder = interpreter.interpreter_builder
    if not builder.options.debug:
        builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)
    interpreter._patch_attr = _patch_attr(interpreter.interpreter_semantic)
    interpreter._patch_lang = _Once(interpreter._patch_lang)
    interpreter.GridExecutor._restore_args_dev = _nothing_to_restore
    interpreter.ReduceOps.generic_reduce = _reduce
    interpreter.ScanOps.generic_scan = _scan
    interpreter._get_np_dtype = _numpy_dtypes(interpreter._get_np_dtype)
    core.block_type.__init__ = _block_types(core.block_type.__init__)
    core.tensor.__init__ = _tensor
    core._unwrap_if_constexpr = _unwrap(core._unwrap_if_constexpr)
    interpreter.TensorHandle.__init__ = _handle
    make_operands_lean(interpreter)


class _Once:
    """`_patch_lang` of a whole launch: what is set stays so until its last program has run."""

    def __init__(self, patch: Callable[[Callable[..., Any]], Any]) -> None:
        self.patch = patch
        self.scopes: list[Any] = []
        self.patched: frozenset[str] = frozenset()

    def __call__(self, function: Callable[..., Any]) -> Any:
        """Set what `function` sees of the language, where it is not set yet.

        Returns:
            What a launch calls `restore` of. Device functions do not.
        """
        seen = _languages(function)
        if not self.scopes or not seen <= self.patched:
            self.scopes.append(self.patch(function))
            self.patched |= seen
        return self

    def restore(self) -> None:
        """The language as it was before the launch."""
        self.patched = frozenset()
        while self.scopes:
            self.scopes.pop().restore()


@cache
def _languages(function: Callable[..., Any]) -> frozenset[str]:
    modules = function.__globals__.values()
    return frozenset(
        module.__name__ for module in (language, core) if any(m is module for m in modules)
    )


def _patch_attr(semantic: Any) -> Callable[..., None]:
    """`_patch_attr`, without a function around the language's that looks for `_semantic`."""
    around = core.builtin(_nothing_to_restore).__code__

    def patch(owner: Any, name: str, member: Any, _builder: Any, scope: Any) -> None:
        function = member.__wrapped__ if member.__code__ is around else member

        def called(*arguments: Any, **options: Any) -> Any:
            options["_semantic"] = semantic
            return function(*arguments, **options)

        scope.set_attr(owner, name, called)

    return patch


def _nothing_to_restore(_executor: Any, *_arguments: Any) -> None:
    """The interpreter's tensors are those of the caller."""


def _numpy_dtypes(look_up: Callable[[Any], np.dtype]) -> Callable[[Any], np.dtype]:
    """`_get_np_dtype`, once for each type of a number."""
    found: dict[str, np.dtype] = {}

    def of(dtype: Any) -> np.dtype:
        name = dtype.scalar.name
        if name not in found:
            found[name] = look_up(dtype)
        return found[name]

    return of


def _block_types(make: Callable[..., None]) -> Callable[..., None]:
    """`block_type.__init__`, once for each shape and type of a number."""
    made: dict[Any, dict[str, Any]] = {}

    def init(self: Any, element_ty: Any, shape: Sequence[Any]) -> None:
        sizes = [size.value if isinstance(size, core.constexpr) else size for size in shape]
        # Not by the type itself: pointers have no hash.
        key = (element_ty.name, getattr(element_ty, "address_space", None), *sizes)
        if key not in made:
            make(self, element_ty, shape)
            known = {"sizes": tuple(sizes), "shape_and_numel": _shape_and_numel(sizes)}
            made[key] = vars(self) | known
        vars(self).update(made[key])

    return init


def _shape_and_numel(sizes: Sequence[int]) -> tuple[Any, Any]:
    """What `tensor.__init__` makes of them."""
    return core.tuple([core.constexpr(size) for size in sizes]), core.constexpr(math.prod(sizes))


_OF_A_NUMBER = _shape_and_numel([])


def _tensor(self: Any, handle: Any, type: Any) -> None:
    """`tensor.__init__`, with shapes that its type has made already."""
    self.handle = handle
    self.type = type
    self.dtype = type.scalar
    self.shape, self.numel = type.shape_and_numel if type.is_block() else _OF_A_NUMBER


def _unwrap(plain: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """`_unwrap_if_constexpr`, which is mostly asked of tensors and numbers."""
    nothing_within = frozenset([core.tensor, int, float, bool, str, type(None)])
    return lambda x: x if type(x) in nothing_within else plain(x)


def _handle(self: Any, data: np.ndarray, dtype: Any, attr: dict[str, Any] | None = None) -> None:
    """`TensorHandle.__init__`, without a look at how wide the numbers are."""
    self.data, self.dtype = data, dtype
    self.attr = {} if attr is None else attr


def _reduce(operation: Any, inputs: tuple[Any, ...]) -> list[Any]:
    """`ReduceOps.generic_reduce`: neighbours along the axis, until one is left."""
    rank = inputs[0].handle.data.ndim
    inputs, axis = operation.unravel(inputs, operation.axis)
    arrays = [x.handle.data for x in inputs]
    while arrays[0].shape[axis] > 1:
        first, second = (
            [x.take(range(start, x.shape[axis], 2), axis) for x in arrays] for start in (0, 1)
        )
        arrays = _combine(operation, inputs, first, second)
    if not operation.keep_dims:
        arrays = [x.squeeze(axis) for x in arrays]
    elif operation.axis is None:
        arrays = [x.reshape([1] * rank) for x in arrays]
    return [operation.to_tensor(x, like.dtype) for x, like in zip(arrays, inputs, strict=True)]


def _scan(operation: Any, inputs: tuple[Any, ...]) -> list[Any]:
    """`ScanOps.generic_scan`: with what stands 1, 2, 4, ... places before (Hillis and Steele)."""
    arrays, axis = [x.handle.data for x in inputs], operation.axis
    size = arrays[0].shape[axis]
    place = np.arange(size).reshape([-1 if dim == axis else 1 for dim in range(arrays[0].ndim)])
    step = 1
    while step < size:
        before = [np.roll(x, step, axis) for x in arrays]
        combined = _combine(operation, inputs, before, arrays)
        arrays = [np.where(place >= step, *x) for x in zip(combined, arrays, strict=True)]
        step *= 2
    return [operation.to_tensor(x, like.dtype) for x, like in zip(arrays, inputs, strict=True)]


def _combine(
    operation: Any,
    inputs: Sequence[Any],
    first: Sequence[np.ndarray],
    second: Sequence[np.ndarray],
) -> list[np.ndarray]:
    """The operation's function, of arrays as blocks of the dtypes of `inputs`."""
    types = [x.dtype for x in inputs] * 2
    blocks = [operation.to_tensor(x, t) for x, t in zip([*first, *second], types, strict=True)]
    results = operation.combine_fn.fn(*blocks)
    results = results if isinstance(results, tuple) else (results,)
    return [
        np.broadcast_to(x.handle.data, like.shape).astype(like.dtype)
        for x, like in zip(results, first, strict=True)
    ]
