"""Both operands of an operation in Triton's interpreter, promoted and broadcast in less time.

What becomes of two types is decided once. Triton's own code decides it, in dozens of calls, and
raises what it has to say of types that do not go together; here the types of its results are kept.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from triton.language import core

# Those that NumPy has, too.
_FLOATS = ("fp16", "fp32", "fp64")


def make_operands_lean(interpreter: Any) -> None:
    """Change `triton.runtime.interpreter`, whose types have `sizes` (see `lean_interpreter`)."""
    semantic = interpreter.interpreter_semantic
    semantic.binary_op_type_checking_impl = _Promoted(interpreter)
    semantic.broadcast_impl_value = _Broadcast(interpreter)


class _Lean:
    """One method of the interpreter's `TritonSemantic`, and what it makes of two types."""

    def __init__(self, interpreter: Any) -> None:
        self.semantic = interpreter.interpreter_semantic
        self.handle = interpreter.TensorHandle
        self.numpy_dtype = interpreter._get_np_dtype
        self.types: dict[Any, tuple[Any, Any]] = {}

    def as_type(self, x: Any, wanted: Any) -> Any:
        """A tensor of type `wanted`, which has the size of `x` or one that it is broadcast to."""
        if x.type.name == wanted.name:
            return x
        if x.dtype.name != wanted.scalar.name:
            x = self.semantic.cast(x, wanted.scalar)
            if x.type.name == wanted.name:
                return x
        handle = x.handle
        if x.type.is_block():
            data = np.broadcast_to(handle.data, wanted.sizes)
        else:
            data = np.full(wanted.sizes, handle.data, dtype=self.numpy_dtype(handle.dtype))
        return core.tensor(self.handle(data, handle.dtype.scalar), wanted)


class _Broadcast(_Lean):
    """`broadcast_impl_value`."""

    def __init__(self, interpreter: Any) -> None:
        super().__init__(interpreter)
        self.plain = self.semantic.broadcast_impl_value

    def __call__(self, lhs: Any, rhs: Any) -> tuple[Any, Any]:
        key = lhs.type.name, rhs.type.name
        if key not in self.types:
            results = self.plain(lhs, rhs)
            self.types[key] = results[0].type, results[1].type
            return results
        left, right = self.types[key]
        return self.as_type(lhs, left), self.as_type(rhs, right)


class _Promoted(_Lean):
    """`binary_op_type_checking_impl`."""

    def __init__(self, interpreter: Any) -> None:
        super().__init__(interpreter)
        self.plain = self.semantic.binary_op_type_checking_impl
        self.limits: dict[str, tuple[float, float]] = {}

    def __call__(self, lhs: Any, rhs: Any, *options: Any, **named: Any) -> tuple[Any, Any]:
        key = self.name(lhs), self.name(rhs), options, *named.items()
        types = self.types.get(key)
        if types is None or not (self.fits(lhs, types[0]) and self.fits(rhs, types[1])):
            results = self.plain(lhs, rhs, *options, **named)
            self.types[key] = results[0].type, results[1].type
            return results
        return self.operand(lhs, types[0]), self.operand(rhs, types[1])

    def name(self, x: Any) -> str:
        """Of the type of a tensor, or of that of a Python number."""
        if isinstance(x, core.tensor):
            return x.type.name
        return f"number {self.semantic.to_tensor_type(x).name}"

    def fits(self, x: Any, wanted: Any) -> bool:
        """Is this no number, or one that Triton's own code has no complaint of?"""
        if isinstance(x, core.tensor):
            return True
        scalar = wanted.scalar
        if scalar.name not in self.limits:
            none = math.inf, -math.inf
            if scalar.is_int():
                limits = scalar.get_int_min_value(), scalar.get_int_max_value()
            else:
                limits = (-math.inf, math.inf) if scalar.name in _FLOATS else none
            self.limits[scalar.name] = limits
        low, high = self.limits[scalar.name]
        return low <= x <= high

    def operand(self, x: Any, wanted: Any) -> Any:
        if isinstance(x, core.tensor):
            return self.as_type(x, wanted)
        scalar = wanted.scalar
        sizes = wanted.sizes if wanted.is_block() else 1
        number = 0 if x == 0 else x  # what was -0.0, too
        data = np.full(sizes, number, dtype=self.numpy_dtype(scalar))
        return core.tensor(self.handle(data, scalar), wanted)
