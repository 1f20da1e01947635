"""The backward for Hopper: long histories in half precision, head_dims from 40 to 128.

Two passes as in `plain.backward`: dQ over the rows (3 products a block), then dK and dV over the
rows of the transpose (4 products). In both, probabilities and their gradients go from one product
to the next in registers, so that consumers write no shared memory, and nothing is summed by two
programs. dQ up to head_dim 64 is the plain one, which is faster. With a mask, a third launch looks
for what has to be computed again (`hopper.exact_backward`). Weights by a policy make their slopes
from the scores: they have no lse and no delta.

Or one pass of 5 products, where programs add to dQ (`hopper.one_pass`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from jagged_kernels.attention.choice import HOPPER_DQ
from jagged_kernels.attention.hopper.delta import launch_delta
from jagged_kernels.attention.hopper.dkv import launch_dkv
from jagged_kernels.attention.hopper.dq import launch_dq
from jagged_kernels.attention.hopper.exact_backward import launch_exact_backward
from jagged_kernels.attention.hopper.one_pass import launch_one_pass
from jagged_kernels.attention.meeting import RANGES, Meeting
from jagged_kernels.attention.plain import dq as plain_dq
from jagged_kernels.attention.plans import Call
from jagged_kernels.schedule.policy.hopper import (
    DQ_CONFIG,
    HopperConfig,
    box,
    dkv_config,
    for_tma,
    forward_config,
    one_pass_config,
)
from jagged_kernels.schedule.rows import schedule_rows


def launch_backward(
    d_o: Tensor,
    d_lse2: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse2: Tensor,
    rows: Tensor,
    rows_t: Tensor,
    *,
    left: int,
    right: int,
    scale: float,
    wanted_kv: bool = True,
    meeting: Meeting = RANGES,
    listed: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    """`plain.backward.launch_backward` for what `choice.HOPPER_DKV` takes.

    Args:
        lse2: [0] where weights are by a policy.
        rows, rows_t: of tiles of `dkv_config(head_dim, listed).tile_q` queries and keys.
        listed: tokens of a listed block, as many as of a tile; 0 where rows see ranges.
        wanted_kv: False leaves out dk and dv: [0].
    """
    d_o = for_tma(d_o)
    softmax = meeting.constants.weight is None
    d_lse2 = d_lse2.contiguous() if softmax and d_lse2 is not None else None
    call = Call.of(q, k, v, d_o, left=left, right=right, scale=scale)
    band: dict[str, Any] = {"left": left, "right": right, "meeting": meeting}
    dim = q.shape[2]
    of_keys = dkv_config(dim, listed)
    gluon_dq = box(dim) in (HOPPER_DQ.boxes or ())
    alarm = None
    if (any(call.limits) or listed) and (gluon_dq or wanted_kv):
        alarm = torch.zeros((), dtype=torch.int32, device=q.device)
    if gluon_dq:
        dq, delta = launch_dq(d_o, d_lse2, q, k, v, o, lse2, rows, call, alarm, **band)
    else:
        given = lse2 if softmax else None
        dq, delta = plain_dq.launch_dq(
            d_o, d_lse2, q, k, v, o, given, rows, call, tile=of_keys.tile_q, **band
        )
    dkv = None
    if wanted_kv:
        dkv = launch_dkv(d_o, q, k, v, lse2, delta, rows_t, call, alarm, **band, listed=listed)
    if alarm is not None:
        launch_exact_backward(
            # The plain dq is right.
            d_o, q, k, v, lse2, delta, dq if gluon_dq else None, dkv, rows, rows_t, call, alarm,
            tile=of_keys.tile_q, part_q=DQ_CONFIG.part_q, part_k=of_keys.part_q, **band,
        )  # fmt: skip
    return dq, *(dkv or (k.new_empty(0), v.new_empty(0)))


def launch_backward_in_one_pass(
    d_o: Tensor,
    d_lse2: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse2: Tensor,
    rows: Tensor,
    rows_t: Tensor,
    offsets: Tensor,
    *,
    left: int,
    right: int,
    scale: float,
    config: HopperConfig | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """`launch_backward` for what `choice.HOPPER_ONE_PASS` takes: all three gradients.

    Args:
        offsets: of queries and keys alike.
        config: in place of the rule's.
    """
    d_o = for_tma(d_o)
    d_lse2 = None if d_lse2 is None else d_lse2.contiguous()
    call = Call.of(q, k, v, d_o, left=left, right=right, scale=scale)
    band: dict[str, Any] = {"left": left, "right": right}
    dim = q.shape[2]
    tile, config = forward_config(dim).tile_q, config or one_pass_config(dim)
    alarm = torch.zeros((), dtype=torch.int32, device=q.device) if any(call.limits) else None
    delta = torch.empty_like(lse2)
    launch_delta(d_o, d_lse2, o, delta)
    tiles = rows_t
    if config.tile_q != tile:
        # Sides are exchanged: these are rows of keys.
        sizes = (k.shape[0], q.shape[0], config.tile_q, config.tile_q)
        tiles = schedule_rows(offsets, offsets, *sizes, right, left, True, False)
    dq, dk, dv = launch_one_pass(
        d_o, q, k, v, lse2, delta, tiles, offsets, call, alarm,
        **band, config=config,
    )  # fmt: skip
    if alarm is not None:
        launch_exact_backward(
            d_o, q, k, v, lse2, delta, dq, (dk, dv), rows, rows_t, call, alarm,
            tile=tile, part_q=DQ_CONFIG.part_q, part_k=dkv_config(dim).part_q, **band,
        )  # fmt: skip
    return dq, dk, dv
