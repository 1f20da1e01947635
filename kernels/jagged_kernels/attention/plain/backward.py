"""The backward of the plain kernels: dQ over the rows, then dK and dV over those of the transpose.

Probabilities are recomputed from lse (FlashAttention-2, arXiv 2307.08691, section 3.1.2). Every
output element is written by one program in one order, so there are no atomics, no float32 copy
of dQ in memory, and results do not change from run to run.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from jagged_kernels.attention.meeting import RANGES, Meeting
from jagged_kernels.attention.plain.dkv import launch_dkv
from jagged_kernels.attention.plain.dq import launch_dq
from jagged_kernels.attention.plain.short import launch_short_backward
from jagged_kernels.attention.plans import Call
from jagged_kernels.attention.scores.bias_launch import BiasSlots
from jagged_kernels.core.layouts import rows_of_dims
from jagged_kernels.core.sizes import LaunchConfig


def launch_backward(
    d_o: Tensor,
    d_lse2: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse2: Tensor | None,
    rows: Tensor,
    rows_t: Tensor,
    *,
    tile_q: int,
    tile_k: int,
    left: int,
    right: int,
    scale: float,
    wanted_kv: bool = True,
    bias: dict[str, Any] | None = None,
    bias_slots: BiasSlots | None = None,
    meeting: Meeting = RANGES,
    short_offsets: Tensor | None = None,
    configs: tuple[LaunchConfig, LaunchConfig] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv), contiguous, in the dtypes of q, k and v. `o` and `lse2` are the forward's, and
    not read where weights are no softmax.

    Args:
        wanted_kv: False leaves out dk and dv: [0]. dq's launch also makes the delta of dk.
        bias: from `bias_launch.bias_arguments`, or None; its gradients are left in `bias_slots`.
        meeting: as the forward's.
        short_offsets: the users' offsets where `plain.short` takes the short ones, else None.
        configs: launch options of dQ and of dK and dV, in place of the rule's.
    """
    q_config, k_config = configs or (None, None)
    # Once for all launches: a gradient often comes in a layout that they cannot read.
    q, k, v, d_o = rows_of_dims(q), rows_of_dims(k), rows_of_dims(v), rows_of_dims(d_o)
    d_lse2 = None if d_lse2 is None else d_lse2.contiguous()
    call = Call.of(q, k, v, d_o, left=left, right=right, scale=scale)
    band: dict[str, Any] = {"left": left, "right": right}
    options: dict[str, Any] = {**band, "bias": bias, "meeting": meeting}
    options["skips"] = short_offsets is not None
    dq, delta = launch_dq(
        d_o, d_lse2, q, k, v, o, lse2, rows, call,
        tile=tile_q, **options, bias_slots=bias_slots, config=q_config,
    )  # fmt: skip
    dk = dv = None
    if wanted_kv:
        dk, dv = launch_dkv(
            d_o, d_lse2, q, k, v, lse2, delta, rows_t, call,
            tile=tile_k, **options, config=k_config,
        )  # fmt: skip
    if short_offsets is not None:
        launch_short_backward(
            d_o, d_lse2, q, k, v, lse2, dq, dk, dv, short_offsets, call,
            **band, bias=bias, bias_slots=bias_slots, meeting=meeting,
        )  # fmt: skip
    if dk is None or dv is None:
        return dq, k.new_empty(0), v.new_empty(0)
    return dq, dk, dv
