"""Schedules of calls that bring none: the layers of a model share tables that one of them built.

Tables are kept with the offsets that they are of, for as long as somebody has these, and are built
anew when they have changed in place. What is kept does not hold the offsets, which it would keep
alive.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import TensorWeakRef, WeakTensorKeyDictionary

from jagged_kernels.core.contents import checking
from jagged_kernels.schedule.dense import DenseShape
from jagged_kernels.schedule.keys.lists import KeyLists
from jagged_kernels.schedule.keys.rules import KeyRule
from jagged_kernels.schedule.schedule import AttentionSchedule, build_schedule
from jagged_kernels.schedule.spans import Partition
from jagged_kernels.tensors.moving import counts_changes


class _Tables(NamedTuple):
    """Of a schedule, and what it was built of, besides the keys' offsets."""

    k_version: int
    jagged_queries: tuple[TensorWeakRef, int] | None  # their offsets, and the version of these
    rows: Tensor
    rows_t: Tensor
    tile_q: int
    tile_k: int
    split: str
    partition: Partition | None
    partition_t: Partition | None


# The keys' offsets -> what was asked for -> the tables built last.
_kept = WeakTensorKeyDictionary()
# Tables of one tensor of offsets, at most: those of a history that is kept meet queries of another
# number in each call.
_MOST = 16


def schedule_of_call(
    q_offsets: Tensor,
    k_offsets: Tensor,
    *,
    q_tokens: int,
    k_tokens: int,
    dense: DenseShape | None,
    window: tuple[int, int],
    head_dim: int,
    keys: KeyRule | KeyLists | None,
    lists: KeyLists | None,
    tile_q: int | None = None,
) -> AttentionSchedule:
    """`build_schedule` for offsets that are the same where they are one tensor, with the tables of
    an earlier call on them.

    They are built anew for lists of keys, on another stream, where PyTorch does not count changes
    of offsets, while a CUDA graph is captured, whose replay finds other offsets, while something
    traces, and with JAGGED_CHECK=1. Changes behind PyTorch's back, as by the replay of a graph that
    writes offsets or by a collective, are not noticed otherwise.
    """
    shared = k_offsets if q_offsets is k_offsets else None

    def build() -> AttentionSchedule:
        return build_schedule(
            q_offsets, k_offsets, q_tokens=q_tokens, k_tokens=k_tokens, offsets=shared,
            dense=dense, window=window, head_dim=head_dim, keys=keys, lists=lists, tile_q=tile_q,
        )  # fmt: skip

    if lists is not None or checking():
        return build()
    # Offsets of dense queries are new in each call, and say no more than their shape does.
    if not (counts_changes(k_offsets) and (dense is not None or counts_changes(q_offsets))):
        return build()
    stream = None
    if k_offsets.is_cuda:
        if torch.cuda.is_current_stream_capturing():
            return build()
        stream = torch.cuda.current_stream(k_offsets.device).cuda_stream
    what = (q_tokens, k_tokens, dense, window, head_dim, tile_q, stream)
    known: dict[Hashable, _Tables] | None = _kept.get(k_offsets)
    tables = None if known is None else known.get(what)
    if tables is not None and _are_of(tables, q_offsets, k_offsets):
        return AttentionSchedule(
            tables.rows, tables.rows_t, window, tables.tile_q, tables.tile_k, q_offsets, k_offsets,
            q_tokens, k_tokens, q_offsets.shape[0] - 1, shared, dense, tables.split,
            tables.partition, tables.partition_t,
        )  # fmt: skip
    # Others may train with what inference mode would make for itself.
    with torch.inference_mode(False):
        schedule = build()
    queries = None if dense is not None else (TensorWeakRef(q_offsets), q_offsets._version)
    tables = _Tables(
        k_offsets._version, queries, schedule.rows, schedule.rows_t, schedule.tile_q,
        schedule.tile_k, schedule.split, schedule.partition, schedule.partition_t,
    )  # fmt: skip
    others = [(asked, kept) for asked, kept in (known or {}).items() if asked != what]
    useful = [pair for pair in others if _can_serve(pair[1], k_offsets)]
    _kept[k_offsets] = {**dict(useful[1 - _MOST :]), what: tables}
    return schedule


def _can_serve(tables: _Tables, k_offsets: Tensor) -> bool:
    """Whether there still are offsets that tables are of."""
    if tables.k_version != k_offsets._version:
        return False
    if tables.jagged_queries is None:
        return True
    built, version = tables.jagged_queries
    q_offsets = built()
    return q_offsets is not None and version == q_offsets._version


def _are_of(tables: _Tables, q_offsets: Tensor, k_offsets: Tensor) -> bool:
    """Whether these are the offsets that tables were built of, and have not changed since."""
    queries = tables.jagged_queries
    same = queries is None or queries[0]() is q_offsets
    return same and _can_serve(tables, k_offsets)
