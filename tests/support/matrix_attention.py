"""Attention on small batches by all kernels but those for Hopper: parts of `small_matrix`."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import attention_calls
import attention_cases
import meeting_cases
import torch
from attention_cases import DEVICE, Case, Inputs
from bias_cases import Biases, run_biased
from cache_cases import filled
from operation_cases import results
from retrieval_cases import categories_of
from score_policies import OWN

from jagged_kernels import (
    ALiBi,
    JaggedTensor,
    RequestKeys,
    SemiLocalKeys,
    SiLU,
    StridedKeys,
    block_means,
    cached_attention,
    jagged_attention,
    key_statistics,
    retrieved_blocks,
    scissorhands,
)

# The interpreter computes bfloat16 products wrongly.
HALF = torch.bfloat16 if DEVICE == "cuda" else torch.float16
DTYPES = (torch.float32, torch.float16, HALF)
# Empty users, one token, block edges.
SHORT = (3, 0, 1, 64, 65, 130)
MASKS: tuple[dict[str, Any], ...] = ({}, {"causal": True}, {"window": (20, 5)})
# Few queries of each user, as rankers ask for candidates, over histories that are cut.
FEW, HISTORIES = (3,) * 4, (700, 0, 5, 64)
EVERY_BIAS = Biases(position=8, time=12, alibi=True, scores=True)


def run_twice(run: Callable[..., Any], inputs: Inputs, **options: Any) -> None:
    """Then with NaN in a key, so that what it touches is computed again."""
    run("triton", inputs, **options)
    inputs.k[inputs.k.shape[0] // 2] = math.nan
    run("triton", inputs, **options)


def run(backend: str, inputs: Inputs, **options: Any) -> None:
    """With the schedule of the call itself, which has the tiles that its kernels want."""
    attention_cases.run(backend, inputs, tile=None, **options)


def _self_attention(dtype: torch.dtype, dim: int = 32) -> tuple[Inputs, Inputs]:
    """For the kernels of tiles, and for those of users of a few tokens, which want to know that
    queries and keys have the same offsets."""
    inputs = Case(SHORT, heads=4, kv_heads=2, dim=dim).inputs(dtype)
    return inputs, replace(inputs, k=inputs.k.clone()).with_shared_offsets()


def _few_queries(dtype: torch.dtype, dim: int = 32) -> Inputs:
    return Case(FEW, HISTORIES, heads=4, kv_heads=2, dim=dim).inputs(dtype)


def _sides(inputs: Inputs) -> tuple[JaggedTensor, JaggedTensor, JaggedTensor]:
    k = JaggedTensor(inputs.k, inputs.k_offsets)
    return JaggedTensor(inputs.q, inputs.q_offsets), k, k.with_values(inputs.v)


def short() -> None:
    for dtype, dim, mask in zip(DTYPES, (32, 64, 80), MASKS, strict=True):
        for inputs in _self_attention(dtype, dim):
            run_twice(run, inputs, **mask)


def target() -> None:
    """Dense queries: rows that are cut among programs, in both ways, and whole ones."""
    ways = zip(DTYPES, (32, 64, 128), MASKS, ("split", "stream", "rows"), strict=True)
    for dtype, dim, mask, split in ways:
        run_twice(run, _few_queries(dtype, dim), split=split, **mask)


def bias() -> None:
    for inputs in _self_attention(torch.float32):
        run_biased("triton", inputs, EVERY_BIAS, tile=None, causal=True, dropout_p=0.1)
    run_biased("triton", _few_queries(HALF), EVERY_BIAS, split="stream", dropout_p=0.1)


def scores() -> None:
    """What scores become: SiLU of them beside a bias, and a policy of one's own."""
    added = Biases(position=80, bidirectional=False, max_distance=41)
    each = [(inputs, None) for inputs in _self_attention(HALF)]
    for inputs, split in (*each, (_few_queries(HALF), "stream")):
        table = added.values(inputs, added.leaves(inputs))
        meeting_cases.run("triton", inputs, split=split, scores=SiLU(), bias=table)
        run_twice(meeting_cases.run, inputs, split=split, scores=OWN, causal=True)


def lists() -> None:
    """Lists of key blocks by rules: for blocks alone, and for tokens too."""
    targets = torch.tensor([1, 0, 0, 10, 0, 40], device=DEVICE)
    request = RequestKeys(targets=targets, contexts=1, window=50, block=16)
    cross, shared = _self_attention(HALF)
    run_twice(meeting_cases.run, shared, keys=StridedKeys(3, 1, block=16))
    run_twice(meeting_cases.run, shared, keys=request, scores=SiLU())
    run_twice(meeting_cases.run, cross, keys=SemiLocalKeys(40, 9, block=32))


def retrieved() -> None:
    """Lists of the key blocks that fit a query, for whole rows and for rows that are cut."""
    _, whole = _self_attention(HALF)
    for inputs, split in ((whole, None), (_few_queries(HALF), "stream")):
        q, k, _ = _sides(inputs)
        means = block_means(k.with_values(k.values.clone().requires_grad_()), 16)
        means.values.sum().backward()
        of_queries, of_keys = categories_of(q, k)
        keys = retrieved_blocks(
            q, k, 2, newest=1, block=16, categories=(of_queries, of_keys), key_means=means
        )
        run_twice(meeting_cases.run, inputs, split=split, keys=keys)


def caches() -> None:
    """Keys and values that are kept, in pages of one event and of several, until they are full."""
    case = Case((2, 0, 1, 20), (90, 0, 3, 33), heads=4, kv_heads=2, dim=32)
    inputs = case.inputs(HALF)
    q, k, v = _sides(inputs)
    slopes = ALiBi(torch.full((case.heads,), 0.5, device=DEVICE))
    # A GPU drops what is beyond it; where lengths can be read, that is refused.
    capacity = 117 if DEVICE == "cuda" else 180
    for page_size in (1, 16):
        cache = filled(inputs, page_size, capacity=capacity)
        cached_attention(q, cache, backend="triton")
        cache.append(k, v, backend="triton")
        cached_attention(q, cache, bias=slopes, scores=SiLU(), causal=False, backend="triton")
    _, lse = jagged_attention(q, k, v, causal=True, return_lse=True, backend="triton")
    cache = filled(inputs, 1)
    scissorhands(cache, key_statistics(q, k, lse, recent=8, backend="triton"), budget=20)
    cached_attention(q, cache, backend="triton")


def prefix() -> None:
    """Keys that all users share, whose part of the answer is merged with that of their own."""
    call, case = attention_calls.ATTENTION["attention with a shared prefix"]
    for dtype in (torch.float32, HALF):
        tensors = case(SHORT)
        results(call, "triton", {name: cast(t, dtype) for name, t in tensors.items()})


def cast(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return tensor.to(DEVICE, dtype if tensor.is_floating_point() else tensor.dtype)


PARTS = (short, target, bias, scores, lists, retrieved, caches, prefix)
