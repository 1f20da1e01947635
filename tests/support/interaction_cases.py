"""The elementwise, softmax, pooling and norm operations, in the form of `operation_cases`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from operation_cases import Call
from torch import Tensor

import jagged_kernels as jk
from jagged_kernels import Jagged2Tensor, JaggedTensor
from jagged_kernels.tensors.jagged2 import jagged2_offsets

PADDED = 4  # L of padded operands: some users are longer, some shorter


@dataclass(frozen=True)
class Operation:
    """One operation and what its operands have a row for: a token, user, score or nothing."""

    call: Call
    operands: dict[str, tuple[str, tuple[int, ...]]]
    squares: bool = False

    def tensors(
        self,
        lengths: Sequence[int],
        columns: int = 5,
        *,
        offsets_dtype: torch.dtype = torch.int64,
        seed: int = 0,
    ) -> dict[str, Tensor]:
        """Random operands; -1 in an operand's shape stands for `columns`."""
        generator = torch.Generator().manual_seed(seed)
        counts = torch.tensor(list(lengths), dtype=torch.int64)
        tensors = {"offsets": jk.lengths_to_offsets(counts).to(offsets_dtype)}
        if self.squares:
            tensors["matrix_offsets"] = jagged2_offsets(tensors["offsets"])
        sizes = {"token": [sum(lengths)], "user": [len(lengths)], "parameter": []}
        sizes["score"] = [int(counts.square().sum())]
        for name, (kind, trailing) in self.operands.items():
            shape = sizes[kind] + [columns if size == -1 else size for size in trailing]
            tensors[name] = torch.randn(shape, generator=generator)
        return tensors

    def without_first_user(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """The same operands for the other users alone."""
        n = int(tensors["offsets"][1])
        behind = {"token": n, "user": 1, "score": n * n, "parameter": 0}
        rest = {"offsets": tensors["offsets"][1:] - n}
        if self.squares:
            rest["matrix_offsets"] = tensors["matrix_offsets"][1:] - n * n
        for name, (kind, _) in self.operands.items():
            rest[name] = tensors[name][behind[kind] :]
        return rest


def _jagged(function: Any, **options: Any) -> Call:
    """Of (x, offsets)."""

    def call(backend: Any, offsets: Tensor, x: Tensor) -> Any:
        return function(JaggedTensor(x, offsets), backend=backend, **options)

    return call


def _with_other(function: Any, *, jagged: bool = False) -> Call:
    """Of (x, offsets) and another operand."""

    def call(backend: Any, offsets: Tensor, x: Tensor, other: Tensor) -> Any:
        second = JaggedTensor(other, offsets) if jagged else other
        return function(JaggedTensor(x, offsets), second, backend=backend)

    return call


def _last_k(backend: Any, offsets: Tensor, x: Tensor) -> Any:
    return jk.jagged_last_k(JaggedTensor(x, offsets), PADDED, backend=backend)


def _layer_norm(backend: Any, offsets: Tensor, x: Tensor, weight: Tensor, bias: Tensor) -> Any:
    return jk.jagged_layer_norm(JaggedTensor(x, offsets), weight, bias, backend=backend)


def _layer_norm_sum(
    backend: Any, offsets: Tensor, x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor
) -> Any:
    added = JaggedTensor(residual, offsets)
    jagged = JaggedTensor(x, offsets)
    return jk.jagged_layer_norm(jagged, weight, bias, residual=added, backend=backend)


def _rms_norm_sum(
    backend: Any, offsets: Tensor, x: Tensor, residual: Tensor, weight: Tensor
) -> Any:
    added = JaggedTensor(residual, offsets)
    jagged = JaggedTensor(x, offsets)
    return jk.jagged_rms_norm(jagged, weight, residual=added, backend=backend)


def _softmax2(dim: int) -> Call:
    def call(backend: Any, offsets: Tensor, matrix_offsets: Tensor, x: Tensor) -> Any:
        m: Any = Jagged2Tensor(x, offsets, matrix_offsets)
        return jk.jagged2_softmax(m, dim=dim, backend=backend)  # pyright: ignore

    return call


def _mul2(*, jagged: bool) -> Call:
    def call(
        backend: Any, offsets: Tensor, matrix_offsets: Tensor, x: Tensor, other: Tensor
    ) -> Any:
        m = Jagged2Tensor(x, offsets, matrix_offsets)
        return jk.jagged2_mul(m, m.with_values(other) if jagged else other, backend=backend)

    return call


def _self_difference(
    backend: Any, offsets: Tensor, matrix_offsets: Tensor, x: Tensor, like: Tensor
) -> Any:
    layout = Jagged2Tensor(like.detach(), offsets, matrix_offsets)
    return jk.jagged_self_difference(JaggedTensor(x, offsets), like=layout, backend=backend)


_TOKENS = ("token", (-1,))
_PARAMETER = ("parameter", (-1,))
_SCORES = ("score", ())
OPERATIONS = {
    "sum": Operation(_jagged(jk.jagged_sum), {"x": _TOKENS}),
    "sum of numbers": Operation(_jagged(jk.jagged_sum), {"x": ("token", ())}),
    "mean": Operation(_jagged(jk.jagged_mean), {"x": ("token", (2, -1))}),
    "max": Operation(_jagged(jk.jagged_max, return_indices=True), {"x": _TOKENS}),
    "last k": Operation(_last_k, {"x": ("token", (-1, 2))}),
    "weighted sum": Operation(
        _with_other(jk.jagged_weighted_sum), {"x": _TOKENS, "other": ("token", ())}
    ),
    "weighted sum, heads": Operation(
        _with_other(jk.jagged_weighted_sum, jagged=True),
        {"x": _TOKENS, "other": ("token", (3,))},
    ),
    "softmax": Operation(_jagged(jk.jagged_softmax), {"x": _TOKENS}),
    "add jagged": Operation(
        _with_other(jk.jagged_add, jagged=True), {"x": _TOKENS, "other": _TOKENS}
    ),
    "mul jagged": Operation(
        _with_other(jk.jagged_mul, jagged=True), {"x": _TOKENS, "other": _TOKENS}
    ),
    "add user": Operation(
        _with_other(jk.jagged_add), {"x": ("token", (2, -1)), "other": ("user", (2, -1))}
    ),
    "mul user": Operation(_with_other(jk.jagged_mul), {"x": _TOKENS, "other": ("user", (-1,))}),
    "add padded": Operation(
        _with_other(jk.jagged_add), {"x": _TOKENS, "other": ("user", (PADDED, -1))}
    ),
    "mul padded": Operation(
        _with_other(jk.jagged_mul), {"x": ("token", ()), "other": ("user", (PADDED,))}
    ),
    "layer norm": Operation(
        _layer_norm, {"x": ("token", (2, -1)), "weight": _PARAMETER, "bias": _PARAMETER}
    ),
    "layer norm, plain": Operation(_jagged(jk.jagged_layer_norm, eps=0.1), {"x": _TOKENS}),
    "layer norm of a sum": Operation(
        _layer_norm_sum,
        {"x": _TOKENS, "residual": _TOKENS, "weight": _PARAMETER, "bias": _PARAMETER},
    ),
    "rms norm of a sum": Operation(
        _rms_norm_sum, {"x": _TOKENS, "residual": _TOKENS, "weight": _PARAMETER}
    ),
    "softmax2 rows": Operation(_softmax2(-1), {"x": _SCORES}, squares=True),
    "softmax2 columns": Operation(_softmax2(-2), {"x": _SCORES}, squares=True),
    "mul2 jagged": Operation(_mul2(jagged=True), {"x": _SCORES, "other": _SCORES}, squares=True),
    "mul2 padded": Operation(
        _mul2(jagged=False), {"x": _SCORES, "other": ("user", (PADDED, PADDED))}, squares=True
    ),
    "self difference": Operation(
        _self_difference, {"x": ("token", ()), "like": _SCORES}, squares=True
    ),
}
