"""Operations of two operands in Triton's interpreter, in less time.

What becomes of two types is decided once. Triton's own code decides it, in dozens of calls, and
raises what it has to say of types that do not go together; here the types of its results are kept.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from triton.language import core

# Those that NumPy has, too.
_FLOATS = ("fp16", "fp32", "fp64")
# By the name of the method; what they do with pointers is left to Triton.
_OPERATIONS = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "less_than": np.less,
    "less_equal": np.less_equal,
    "greater_than": np.greater,
    "greater_equal": np.greater_equal,
    "equal": np.equal,
    "not_equal": np.not_equal,
    "and_": np.bitwise_and,
    "or_": np.bitwise_or,
    "xor_": np.bitwise_xor,
}


def make_operands_lean(interpreter: Any) -> None:
    """Change `triton.runtime.interpreter`, whose types have `sizes` (see `lean_interpreter`)."""
    semantic = interpreter.interpreter_semantic
    semantic.binary_op_type_checking_impl = promoted = _Promoted(interpreter)
    semantic.broadcast_impl_value = _Broadcast(interpreter)
    if not interpreter.interpreter_builder.options.sanitize_overflow:
        for name, ufunc in _OPERATIONS.items():
            setattr(semantic, name, _Operation(interpreter, promoted, name, ufunc))


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
        # Triton 3.6 has no function for that.
        self.type_of_number = getattr(
            self.semantic, "to_tensor_type", lambda x: self.semantic.to_tensor(x).type
        )

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
        return f"number {self.type_of_number(x).name}"

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


@dataclass(frozen=True)
class _Plan:
    """What an operation does with two types: the type of both operands, then of its result."""

    operand: Any
    result: Any
    handle: Any
    data: np.dtype


class _Operation(_Lean):
    """A method of `_OPERATIONS`."""

    def __init__(self, interpreter: Any, promoted: _Promoted, name: str, ufunc: np.ufunc) -> None:
        super().__init__(interpreter)
        self.promoted, self.ufunc = promoted, ufunc
        self.plain = getattr(self.semantic, name)
        self.plans: dict[tuple[str, str], _Plan | None] = {}

    def __call__(self, lhs: Any, rhs: Any, *options: Any, **named: Any) -> Any:
        key = self.promoted.name(lhs), self.promoted.name(rhs)
        if key not in self.plans:
            result = self.plain(lhs, rhs, *options, **named)
            self.plans[key] = self.plan(lhs, rhs, result)
            return result
        plan = self.plans[key]
        if plan is None:
            return self.plain(lhs, rhs, *options, **named)
        left, right = self.numbers(lhs, plan.operand), self.numbers(rhs, plan.operand)
        if left is None or right is None:
            return self.plain(lhs, rhs, *options, **named)
        data = self.ufunc(left, right)
        if data.dtype != plan.data:  # a comparison's, whose numbers have the dtype of its operands
            return self.plain(lhs, rhs, *options, **named)
        return core.tensor(self.handle(data, plan.handle), plan.result)

    def plan(self, lhs: Any, rhs: Any, result: Any) -> _Plan | None:
        """None: always as Triton does it."""
        if any(isinstance(x, core.tensor) and x.dtype.is_ptr() for x in (lhs, rhs)):
            return None
        left, right = (x.type.scalar for x in self.promoted(lhs, rhs))
        # What NumPy does with numbers of one dtype, Triton does, too.
        known = left.is_int() or left.name in _FLOATS
        if left.name != right.name or not known:
            return None
        return _Plan(left, result.type, result.handle.dtype, result.handle.data.dtype)

    def numbers(self, x: Any, wanted: Any) -> np.ndarray | None:
        """Of an operand; NumPy broadcasts. None of a number that Triton has a word for."""
        if not isinstance(x, core.tensor):
            if not self.promoted.fits(x, wanted):
                return None
            return np.array([0 if x == 0 else x], dtype=self.numpy_dtype(wanted))
        if x.dtype.name != wanted.name:
            x = self.semantic.cast(x, wanted)
        return x.handle.data
