"""Attention in the form of `operation_cases`: the ways to compute it that are operators, and no
others; with those of `every_operation`, everything that is public and has a gradient."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import product_cases
import torch
from every_operation import EVERY, Case
from operation_cases import Call
from torch import Tensor

from jagged_kernels import (
    ALiBi,
    JaggedTensor,
    RelativePositionBias,
    jagged_attention,
    prefixed_attention,
)

_HEADS, _DIM = 2, 16


def _keys(k: Tensor, v: Tensor, offsets: Tensor) -> tuple[JaggedTensor, JaggedTensor]:
    keys = JaggedTensor(k, offsets)
    return keys, keys.with_values(v)


def _self(backend: Any, q: Tensor, k: Tensor, v: Tensor, offsets: Tensor) -> Any:
    keys, values = _keys(k, v, offsets)
    return jagged_attention(
        keys.with_values(q), keys, values, causal=True, backend=backend, return_lse=True
    )


def _dense(backend: Any, q: Tensor, k: Tensor, v: Tensor, offsets: Tensor) -> Any:
    return jagged_attention(q, *_keys(k, v, offsets), backend=backend)


def _biased(
    backend: Any,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    table: Tensor,
    slopes: Tensor,
    scores: Tensor,
    offsets: Tensor,
) -> Any:
    keys, values = _keys(k, v, offsets)
    bias = (RelativePositionBias(table, max_distance=8), ALiBi(slopes), scores)
    return jagged_attention(keys.with_values(q), keys, values, bias=bias, backend=backend)


def _prefixed(
    backend: Any,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    prefix_k: Tensor,
    prefix_v: Tensor,
    offsets: Tensor,
) -> Any:
    keys, values = _keys(k, v, offsets)
    prefix = (prefix_k, prefix_v)
    return prefixed_attention(
        keys.with_values(q), keys, values, *prefix, causal=True, backend=backend, return_lse=True
    )


def _self_case(lengths: Sequence[int]) -> dict[str, Tensor]:
    tokens = [product_cases.random(sum(lengths), _HEADS, _DIM, seed=seed) for seed in range(3)]
    return dict(zip("qkv", tokens, strict=True)) | {
        "offsets": product_cases.offsets_of(tuple(lengths))
    }


def _dense_case(lengths: Sequence[int]) -> dict[str, Tensor]:
    return _self_case(lengths) | {"q": product_cases.random(len(lengths), 3, _HEADS, _DIM, seed=4)}


def _biased_case(lengths: Sequence[int]) -> dict[str, Tensor]:
    scores = sum(n * n for n in lengths)
    return _self_case(lengths) | {
        "table": product_cases.random(4, _HEADS, seed=5),
        "slopes": product_cases.random(_HEADS, seed=6).abs(),
        "scores": product_cases.random(scores, _HEADS, seed=7),
    }


def _prefixed_case(lengths: Sequence[int]) -> dict[str, Tensor]:
    prefix = {name: product_cases.random(5, _HEADS, _DIM, seed=8) for name in ("k", "v")}
    return _self_case(lengths) | {f"prefix_{name}": x for name, x in prefix.items()}


ATTENTION: dict[str, tuple[Call, Case]] = {
    "attention": (_self, _self_case),
    "attention of dense queries": (_dense, _dense_case),
    "attention with biases": (_biased, _biased_case),
    "attention with a shared prefix": (_prefixed, _prefixed_case),
}
ALL = EVERY | ATTENTION


def leaves_of(case: Case, lengths: Sequence[int], device: str | torch.device) -> dict[str, Tensor]:
    """The tensors of a case on a device, the floating ones as leaves."""
    return {
        name: t.to(device).requires_grad_(t.is_floating_point())
        for name, t in case(lengths).items()
    }


def differentiable(outputs: Sequence[Tensor]) -> list[Tensor]:
    return [out for out in outputs if out.requires_grad]
