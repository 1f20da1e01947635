"""Batches for Hopper's backwards, and what these need of a forward."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from attention_cases import TILE as PLAIN_TILE
from attention_cases import Case, Inputs, Standard
from torch import Tensor

from jagged_kernels.attention.hopper import dkv, dq, forward, fp8_forward
from jagged_kernels.attention.plain.forward import launch_forward
from jagged_kernels.schedule.policy.hopper import forward_config
from jagged_kernels.schedule.rows import build_rows

GRADIENTS = ("dq", "dk", "dv")
# Empty users, one token, around a block (64) and a tile (128), and starts that are odd.
ODD = [0, 1, 63, 64, 65, 129, 1000, 0, 128, 256, 7, 300]
CROSS = ([5, 0, 200, 64, 130, 300], [300, 10, 0, 64, 1000, 20])
CASES = {
    "one tile": Case([128]),
    "whole blocks": Case([1024, 1024]),
    "one short": Case([100]),
    "one token": Case([1]),
    "odd": Case(ODD),
    "odd, int32 offsets": Case(ODD, offsets_dtype=torch.int32),
    "ends in the middle of a tile": Case([700, 513], mask={"causal": True}),
    "causal": Case(ODD, mask={"causal": True}),
    "window": Case(ODD, mask={"window": (64, 0)}),
    "two-sided window": Case(ODD, mask={"window": (300, 100)}),
    "left window": Case(ODD, mask={"window": (5, -1)}),
    "cross": Case(*CROSS),
    "cross causal": Case(*CROSS, mask={"causal": True}),
    "grouped": Case(ODD, heads=4, kv_heads=2),
    "grouped causal": Case(ODD, heads=4, kv_heads=2, mask={"causal": True}),
    "grouped cross causal": Case(*CROSS, heads=4, kv_heads=2, mask={"causal": True}),
    "one key head": Case(ODD, heads=4, kv_heads=1),
    "negative scale": Case(ODD, mask={"scale": -0.3}),
    "large scores": Case(ODD, mask={"scale": 4.0}),
    "more tiles than programs": Case(list(range(1, 300, 3)), heads=4, kv_heads=4),
}


def inputs_of(case: Case, dim: int, dtype: torch.dtype = torch.bfloat16) -> Inputs:
    return replace(case, dim=dim).inputs(dtype)


def band_of(case: Case) -> dict[str, Any]:
    left, right = case.mask.get("window") or (-1, -1)
    return {"left": left, "right": 0 if case.mask.get("causal") else right}


def scale_of(inputs: Inputs, case: Case) -> float:
    return case.mask.get("scale", 1 / math.sqrt(inputs.q.shape[2]))


def forward_of(inputs: Inputs, case: Case) -> tuple[Tensor, Tensor]:
    band = band_of(case)
    rows = build_rows(
        inputs.q_offsets, inputs.k_offsets, tokens=inputs.q.shape[0], tile=PLAIN_TILE, **band
    )
    o, lse2 = launch_forward(
        inputs.q, inputs.k, inputs.v, rows,
        tile_q=PLAIN_TILE, left=band["left"], right=band["right"], scale=scale_of(inputs, case),
    )  # fmt: skip
    assert lse2 is not None
    return o, lse2


def tables_of(inputs: Inputs, case: Case) -> tuple[Tensor, Tensor]:
    left, right = band_of(case).values()
    q_offsets, k_offsets = inputs.q_offsets, inputs.k_offsets
    q_tokens, k_tokens = inputs.q.shape[0], inputs.k.shape[0]
    tile = forward_config(inputs.q.shape[2]).tile_q
    return (
        build_rows(q_offsets, k_offsets, tokens=q_tokens, tile=tile, left=left, right=right),
        build_rows(k_offsets, q_offsets, tokens=k_tokens, tile=tile, left=right, right=left),
    )


def leave_nan_in_free_memory(inputs: Inputs) -> None:
    """So that a number that nobody wrote is seen, in outputs and between the kernels."""
    tokens, heads, _ = inputs.q.shape
    for like in (inputs.q, inputs.k, inputs.v):
        torch.full_like(like, math.nan, memory_format=torch.contiguous_format)
    torch.full((heads, 2, tokens), math.nan, device="cuda")


def assert_exact(
    inputs: Inputs, case: Case, ours: dict[str, Tensor], *, d_lse: bool = True
) -> None:
    if not d_lse:
        inputs = replace(inputs, d_lse=torch.zeros_like(inputs.d_lse))
    Standard(inputs, **case.mask).assert_met(ours, "hopper")


def deal_out_beforehand(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a mask makes tiles unequal, too."""
    for module in (dkv, dq, forward, fp8_forward):
        monkeypatch.setattr(module, "for_mask", lambda config, *_: config)


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return all(torch.equal(a[name], b[name]) for name in GRADIENTS)
