"""Whether a schedule serves a call of `jagged_attention`."""

from __future__ import annotations

import torch

from jagged_kernels.core.contents import can_be_read, checking
from jagged_kernels.schedule.dense import DenseShape
from jagged_kernels.schedule.offsets import check_versions, compare_offsets, stale
from jagged_kernels.schedule.schedule import AttentionSchedule, build_tables
from jagged_kernels.tensors.jagged import JaggedTensor


def check_schedule(
    schedule: AttentionSchedule,
    q: JaggedTensor,
    k: JaggedTensor,
    v: JaggedTensor,
    window: tuple[int, int],
    dense: DenseShape | None,
) -> None:
    """Whether a schedule serves a call; `dense` if its queries came so.

    Raises:
        ValueError: it was built for another batch or mask, as far as that is known without waiting
            for the device, its offsets changed since, or it is on another device.

    A GPU compares offsets of a call that are others than the schedule's for itself, once for each
    of them, and stops where they differ.
    """
    built = (schedule.q_tokens, schedule.k_tokens, schedule.users, schedule.window)
    wanted = (q.values.shape[0], k.values.shape[0], len(q), window)
    if built != wanted:
        raise ValueError(
            "the schedule was built for another batch or mask: (q tokens, k tokens, users, window) "
            f"is {built} in the schedule and {wanted} in the call"
        )
    # Heads and dtype decide how a partition cuts rows; rows alone serve any.
    fields = 1 if schedule.partition is None else None
    built, wanted = (None if shape is None else shape[:fields] for shape in (schedule.dense, dense))
    if built != wanted:
        raise ValueError(
            f"the schedule was built for {_described(schedule.dense)} and the call has "
            f"{_described(dense)}"
        )
    if schedule.rows.device != q.device:
        raise ValueError(f"the schedule is on {schedule.rows.device} and q on {q.device}")
    if torch.compiler.is_compiling():  # nothing in a trace has contents, nor a version
        return
    check_versions(schedule.versions)
    compare_offsets("q", schedule.q_offsets, q.offsets, schedule.compared)
    compare_offsets("k", schedule.k_offsets, k.offsets, schedule.compared)
    if v.offsets is not k.offsets:
        compare_offsets("v", schedule.k_offsets, v.offsets, schedule.compared)
    if checking():
        _check_tables(schedule)


def _described(dense: DenseShape | None) -> str:
    if dense is None:
        return "jagged queries"
    queries, heads, kv_heads, element_size = dense
    return (
        f"dense queries ({queries} a user, {heads} heads over {kv_heads}, "
        f"{element_size} bytes a number)"
    )


def _check_tables(schedule: AttentionSchedule) -> None:
    """Builds the tables again: they are of what the offsets hold now, however these changed."""
    if not can_be_read(schedule.rows):
        return
    tables = build_tables(
        schedule.q_offsets,
        schedule.k_offsets,
        (schedule.q_tokens, schedule.k_tokens),
        (schedule.tile_q, schedule.tile_k),
        schedule.window,
        split=schedule.split,
        shared=schedule.offsets is not None,
    )
    for built, now in zip((schedule.rows, schedule.rows_t), tables, strict=True):
        if not torch.equal(built, now):
            raise ValueError(stale("the offsets of q or k"))
