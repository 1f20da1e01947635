"""Attention by the kernels for Hopper, on small batches that they are made to pay for: parts of
`small_matrix`."""

from __future__ import annotations

from typing import Any

import meeting_cases
import torch
from attention_cases import DEVICE, Case, Inputs
from matrix_attention import HALF, run, run_twice
from pays import TWO_PASSES, paying_from
from score_policies import GLUON_COMPILES

from jagged_kernels import (
    JaggedTensor,
    RequestKeys,
    SemiLocalKeys,
    SiLU,
    StridedKeys,
    fp8_attention,
    fp8_keys,
)
from jagged_kernels.attention import fp8
from jagged_kernels.schedule.policy.hopper import (
    COUNTED_FROM,
    HOPPER_TILES,
    HOPPER_TILES_FROM,
    ONE_PASS_PAYS_FROM,
)

# As short as users may be for a schedule of Hopper's tiles, whatever their mask.
MEAN = max(HOPPER_TILES_FROM[128].values())
MASKS = ({}, {"causal": True}, {"window": (MEAN, 5)})


# Heads that fill their box, and of q and of v others, in one piece and in two.
DIMS = (*((dim, dim) for dim in HOPPER_TILES), (40, 64), (80, 128), (128, 96))
FORWARD_DIMS = ((256, 256), (144, 192))


def _inputs(dim: int, dim_v: int | None = None) -> Inputs:
    """The last tile is not full."""
    case = Case((3 * MEAN + 2, 0, 1), heads=2, kv_heads=1, dim=dim, dim_v=dim_v)
    return case.inputs(HALF)


def hopper() -> None:
    with paying_from(MEAN, *TWO_PASSES):
        for dims in (*DIMS, *FORWARD_DIMS):
            for mask in MASKS:
                run_twice(run, _inputs(*dims), **mask)


def hopper_one_pass() -> None:
    with paying_from(MEAN, *TWO_PASSES, ONE_PASS_PAYS_FROM):
        for dims in DIMS:
            for mask in MASKS[:2]:
                run_twice(run, _inputs(*dims).with_shared_offsets(), **mask)


def hopper_scores() -> None:
    for tables in ((), (COUNTED_FROM,)):
        with paying_from(MEAN, *TWO_PASSES, *tables):
            for dim, policy in zip(HOPPER_TILES, (SiLU(), GLUON_COMPILES), strict=True):
                run_twice(meeting_cases.run, _inputs(dim), scores=policy, causal=True)


def hopper_lists() -> None:
    """Lists of key blocks, of every size of them that the kernels take."""
    targets = torch.tensor([70, 0, 0], device=DEVICE)
    request = RequestKeys(targets=targets, contexts=1, window=200, block=128)
    with paying_from(MEAN, *TWO_PASSES):
        for dim, keys, policy in (
            (64, StridedKeys(8, 3, block=64), None),
            (64, request, SiLU()),
            (128, request, None),
            (128, StridedKeys(4, 1, block=128), SiLU()),
            (128, SemiLocalKeys(150, 20, block=64), None),
        ):
            inputs = _inputs(dim).with_shared_offsets()
            run_twice(meeting_cases.run, inputs, keys=keys, scores=policy)


def hopper_fp8() -> None:
    for dim in fp8.HEAD_DIMS:
        for mask in MASKS:
            options: dict[str, Any] = mask
            inputs = _inputs(dim)
            q = JaggedTensor(inputs.q, inputs.q_offsets)
            k = JaggedTensor(inputs.k, inputs.k_offsets)
            keys = fp8_keys(k, k.with_values(inputs.v))
            fp8_attention(q, keys, return_lse=True, **options)


PARTS = (hopper, hopper_one_pass, hopper_scores, hopper_lists, hopper_fp8)
