"""Whether a schedule serves a call of `jagged_attention`."""

from __future__ import annotations

import torch

from jagged_kernels.core.contents import can_be_read, checking
from jagged_kernels.schedule.dense import DenseShape
from jagged_kernels.schedule.keys.lists import KeyLists
from jagged_kernels.schedule.keys.rules import KeyRule
from jagged_kernels.schedule.offsets import check_versions, compare_offsets, stale
from jagged_kernels.schedule.schedule import AttentionSchedule, build_tables
from jagged_kernels.schedule.window import NO_BAND
from jagged_kernels.tensors.jagged import JaggedTensor


def check_schedule(
    schedule: AttentionSchedule,
    q: JaggedTensor,
    k: JaggedTensor,
    v: JaggedTensor,
    window: tuple[int, int],
    dense: DenseShape | None,
    keys: KeyRule | KeyLists | None,
) -> None:
    """Whether a schedule serves a call; `dense` if its queries came so.

    Raises:
        ValueError: it was built for another batch or mask, as far as that is known without waiting
            for the device, its offsets changed since, or it is on another device.

    A GPU compares offsets of a call that are others than the schedule's for itself, once for each
    of them, and stops where they differ.
    """
    tokens = (q.values.shape[0], k.values.shape[0])
    check_fit(schedule, *tokens, len(q), window, dense, q.device, keys)
    if torch.compiler.is_compiling():  # nothing in a trace has contents, nor a version
        return
    check_versions(schedule.versions)
    compare_offsets("q", schedule.q_offsets, q.offsets, schedule.compared)
    compare_offsets("k", schedule.k_offsets, k.offsets, schedule.compared)
    if v.offsets is not k.offsets:
        compare_offsets("v", schedule.k_offsets, v.offsets, schedule.compared)
    if checking():
        _check_tables(schedule)


def check_fit(
    schedule: AttentionSchedule,
    q_tokens: int,
    k_tokens: int,
    users: int,
    window: tuple[int, int],
    dense: DenseShape | None,
    device: torch.device,
    keys: KeyRule | KeyLists | None,
) -> None:
    """The part of `check_schedule` that looks at no offsets."""
    built = (schedule.q_tokens, schedule.k_tokens, schedule.users, schedule.window)
    wanted = (q_tokens, k_tokens, users, window)
    if built != wanted:
        raise ValueError(
            "the schedule was built for another batch or mask: (q tokens, k tokens, users, window) "
            f"is {built} in the schedule and {wanted} in the call"
        )
    # A rule with tensors, and lists, are themselves alone.
    if schedule.keys is not keys and schedule.keys != keys:
        alike = "; with tensors in them they must be one object"
        raise ValueError(
            f"the schedule was built for keys={schedule.keys} and the call has keys={keys}"
            f"{alike if repr(schedule.keys) == repr(keys) else ''}"
        )
    # Heads and dtype decide how a partition cuts rows; rows alone serve any.
    fields = 1 if schedule.partition is None else None
    built, wanted = (None if shape is None else shape[:fields] for shape in (schedule.dense, dense))
    if built != wanted:
        raise ValueError(
            f"the schedule was built for {_described(schedule.dense)} and the call has "
            f"{_described(dense)}"
        )
    if schedule.rows.device != device:
        raise ValueError(f"the schedule is on {schedule.rows.device} and q on {device}")


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
        schedule.window if schedule.lists is None else NO_BAND,
        split=schedule.split,
        shared=schedule.offsets is not None,
    )
    for built, now in zip((schedule.rows, schedule.rows_t), tables, strict=True):
        if not torch.equal(built, now):
            raise ValueError(stale("the offsets of q or k"))
