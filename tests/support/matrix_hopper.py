"""Attention by the kernels for Hopper, on the smallest batches for which they are chosen: parts of
`small_matrix`."""

from __future__ import annotations

import meeting_cases
import torch
from attention_cases import DEVICE, Case, Inputs
from choice_cases import LONG, LONG_LISTS, LONG_POINTWISE
from matrix_attention import HALF, MASKS, run, run_twice
from score_policies import GLUON_COMPILES

from jagged_kernels import RequestKeys, SemiLocalKeys, SiLU, StridedKeys
from jagged_kernels.schedule.policy.hopper import ONE_PASS_PAYS_FROM


def _inputs(dim: int, mean: int) -> Inputs:
    """Of users who have `mean` tokens on average, and one more; the last tile is not full."""
    return Case((3 * mean + 2, 0, 1), heads=2, kv_heads=1, dim=dim).inputs(HALF)


def hopper() -> None:
    for dim, mean in LONG.items():
        for mask in MASKS:
            run_twice(run, _inputs(dim, mean), **mask)


def hopper_one_pass() -> None:
    """The backward in one pass, whose sums come in order and as they come."""
    for dim, mean in ONE_PASS_PAYS_FROM["softmax"].items():
        for deterministic in (True, False):
            inputs = _inputs(dim, mean).with_shared_offsets()
            run_twice(run, inputs, causal=True, deterministic=deterministic)


def hopper_scores() -> None:
    for (dim, mean), policy in zip(LONG_POINTWISE.items(), (SiLU(), GLUON_COMPILES), strict=True):
        run_twice(meeting_cases.run, _inputs(dim, mean), scores=policy, causal=True)


def hopper_lists() -> None:
    """Lists of key blocks, of every size of them that the kernels take."""
    targets = torch.tensor([70, 0, 0], device=DEVICE)
    request = RequestKeys(targets=targets, contexts=1, window=200, block=128)
    for dim, keys, policy in (
        (64, StridedKeys(8, 3, block=64), None),
        (64, request, SiLU()),
        (128, request, None),
        (128, StridedKeys(4, 1, block=128), SiLU()),
        (128, SemiLocalKeys(150, 20, block=64), None),
    ):
        inputs = _inputs(dim, LONG_LISTS[dim]).with_shared_offsets()
        run_twice(meeting_cases.run, inputs, keys=keys, scores=policy)


PARTS = (hopper, hopper_one_pass, hopper_scores, hopper_lists)
