"""Inputs and masks for heads that are narrower than their boxes in Hopper's kernels."""

from __future__ import annotations

from typing import Any

import torch
from attention_cases import Case, Inputs, seen_keys
from meeting_cases import Mask

# Around parts of 64 queries, and tiles and blocks of 64 and of 128 tokens, 200 on average.
LENGTHS = [0, 1, 63, 64, 65, 127, 128, 129, 1000, 0, 7, 800]
MASKS = {"none": {}, "causal": {"causal": True}, "window": {"window": (300, 100)}}


def inputs_of(dim: int, dim_v: int, dtype: torch.dtype = torch.bfloat16) -> Inputs:
    """Two query heads to each of two key heads."""
    case = Case(LENGTHS, heads=4, kv_heads=2, dim=dim, dim_v=dim_v)
    return case.inputs(dtype).with_shared_offsets()


def shown_by(**mask: Any) -> Mask:
    """What these options of `jagged_attention` show."""
    return lambda _user, queries, keys: seen_keys(queries, keys, **mask)[None]
