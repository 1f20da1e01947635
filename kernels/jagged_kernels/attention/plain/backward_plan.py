"""How the two kernels of the plain backward are launched."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

from jagged_kernels.attention.meeting import MeetShape
from jagged_kernels.attention.plans import PLANS, Call, LaunchPlan
from jagged_kernels.attention.scores.bias_launch import BiasShape, launch_options
from jagged_kernels.core.sizes import LaunchConfig
from jagged_kernels.schedule.policy.plain import config_of, parts_of_tile


@lru_cache(PLANS)
def backward_plan(
    call: Call, rule: Callable[[int, int, str], LaunchConfig], heads: int, tile: int,
    BIAS: BiasShape, meets: MeetShape, config: LaunchConfig | None, small_memory: bool,
    skips: bool,
) -> LaunchPlan:  # fmt: skip
    """Of a kernel over rows.

    Args:
        rule: its launch options, from (padded head_dim, bytes a number, precision).
        heads: of what stands in the rows.
        config: in place of the rule's.
    """
    numbers = (call.pad_dim, call.element_size, call.precision)
    config = config or config_of(rule, *numbers, listed=bool(meets.groups))
    parts = parts_of_tile(tile, call.pad_dim, call.element_size, small_memory)
    block = meets.block_of(tile, config.block)
    shape = call.shape(tile=tile, parts=parts, block=block, skips=skips, meets=meets)
    constants = {"BIAS": BIAS, "WEIGHT": meets.weight, "D_SCORE": meets.d_score}
    options = launch_options(BIAS, config, call.element_size)
    return call.plan(parts * heads, shape, options, **constants)
