"""What attention kernels are launched with for a bias or dropout, and their gradients' memory."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from jagged_kernels.attention.scores.bias_terms import (
    BiasTerms,
    position_buckets,
    scores_before,
    time_bucket_starts,
)
from jagged_kernels.attention.scores.dropout import drop_below
from jagged_kernels.core.sizes import LaunchConfig

POSITION_WINDOW = 64  # buckets that a program looks for at once; a power of two


class BiasShape(NamedTuple):
    """What a kernel is compiled for; 0 and False where there is no such bias.

    Fields:
        POSITIONS, TIMES: buckets.
        MAX_DISTANCE: of the position bias.
        ADDS, DROPS: is there any bias, is there dropout.
    """

    POSITIONS: int = 0
    MAX_DISTANCE: int = 0
    TIMES: int = 0
    ADDS: bool = False
    DROPS: bool = False

    @property
    def ANY(self) -> bool:
        return self.ADDS or self.DROPS

    @property
    def LOOKS_UP(self) -> bool:
        return self.POSITIONS > 0 or self.TIMES > 0

    @property
    def POSITIONS_PADDED(self) -> int:
        return 1 << max(4, (self.POSITIONS - 1).bit_length())

    @property
    def MANY_POSITIONS(self) -> bool:
        """Whether a program sums its position bias' gradients in memory: to look for every bucket
        in every block would take longer than all else, as HSTU has one for each distance."""
        return self.POSITIONS > POSITION_WINDOW

    @property
    def TIMES_PADDED(self) -> int:
        return 1 << max(4, (self.TIMES - 1).bit_length())


class BiasArguments(NamedTuple):
    """What a kernel is launched with; None where there is no such bias.

    Fields:
        by_distance: [H, 2 * MAX_DISTANCE + 1], the position bias of each clamped distance.
        buckets: [2 * MAX_DISTANCE + 1] int32, the bucket of each.
        time: [TIMES, H]. time_starts: [TIMES] int64. q_times, k_times: int64, one a token.
        time_rate, time_steps: 1 / unit and 1 / log2(base).
        slopes: [H].
        scores: [sum of n_b * m_b, H]. scores_before: [B] int64, each user's first.
        q_offsets, k_offsets: [B + 1], for dropout and `scores`.
        seed: int64 scalar.
        drop_below, keep_scale: see `dropout.keep_mask`; 1 / (1 - p).
    """

    by_distance: Tensor | None
    buckets: Tensor | None
    time: Tensor | None
    time_starts: Tensor | None
    q_times: Tensor | None
    k_times: Tensor | None
    time_rate: float
    time_steps: float
    slopes: Tensor | None
    scores: Tensor | None
    scores_before: Tensor | None
    q_offsets: Tensor | None
    k_offsets: Tensor | None
    seed: Tensor | None
    drop_below: float
    keep_scale: float


class BiasSlots(NamedTuple):
    """Where kernels that make dQ leave gradients; None where none is wanted.

    Fields:
        position, time: [R, H, buckets] float32, the sums of one (row, head) program each; of
            `plain.short` those of one (user, head), the last ones; of `split` of one (span, head).
        slopes: [R, H] float32.
        scores: like `BiasArguments.scores`.
    """

    position: Tensor | None
    time: Tensor | None
    slopes: Tensor | None
    scores: Tensor | None

    @property
    def rows(self) -> int:
        """R, 0 where nothing is summed."""
        return next((slot.shape[0] for slot in self[:3] if slot is not None), 0)


NO_BIAS: dict[str, Any] = {"bias": None, "BIAS": BiasShape()}


def bias_arguments(
    terms: BiasTerms,
    q_offsets: Tensor,
    k_offsets: Tensor,
    dropout_seed: Tensor | None,
    dropout_p: float,
) -> dict[str, Any]:
    """The arguments `bias` and `BIAS` of the kernels."""
    device = q_offsets.device
    by_distance = buckets = starts = first = None
    positions = times = 0
    if terms.position is not None:
        positions = terms.position.shape[0]
        buckets = position_buckets(positions, terms.max_distance, terms.bidirectional, device)
        by_distance = terms.position.t().index_select(1, buckets).contiguous()
    if terms.time is not None:
        times = terms.time.shape[0]
        starts = time_bucket_starts(times, terms.time_unit, terms.time_base, device)
    if terms.scores is not None:
        first = scores_before(q_offsets, k_offsets)
    in_user = terms.scores is not None or dropout_seed is not None
    arguments = BiasArguments(
        by_distance=by_distance,
        buckets=buckets,
        time=None if terms.time is None else terms.time.contiguous(),
        time_starts=starts,
        q_times=terms.q_times,
        k_times=terms.k_times,
        time_rate=1 / terms.time_unit,
        time_steps=1 / math.log2(terms.time_base),
        slopes=None if terms.slopes is None else terms.slopes.contiguous(),
        scores=None if terms.scores is None else terms.scores.contiguous(),
        scores_before=first,
        q_offsets=q_offsets if in_user else None,
        k_offsets=k_offsets if in_user else None,
        seed=dropout_seed,
        drop_below=float(drop_below(dropout_p)),
        keep_scale=1 / (1 - dropout_p),
    )
    shape = BiasShape(
        POSITIONS=positions,
        MAX_DISTANCE=terms.max_distance if positions else 0,
        TIMES=times,
        ADDS=terms.adds,
        DROPS=dropout_seed is not None,
    )
    return {"bias": arguments, "BIAS": shape}


def bias_slots(terms: BiasTerms, wanted: list[bool], rows: int, heads: int) -> BiasSlots:
    """Memory for the gradients that are wanted (of `BiasTerms.learned`); rows: R."""

    def slots(tensor: Tensor | None, want: bool, *buckets: int) -> Tensor | None:
        if tensor is None or not want:
            return None
        return torch.empty((rows, heads, *buckets), dtype=torch.float32, device=tensor.device)

    position, time, slopes, scores = terms.learned()
    return BiasSlots(
        slots(position, wanted[0], 0 if position is None else position.shape[0]),
        slots(time, wanted[1], 0 if time is None else time.shape[0]),
        slots(slopes, wanted[2]),
        # Scores that nobody sees have gradient 0, and no program.
        None if scores is None or not wanted[3] else torch.zeros_like(scores).contiguous(),
    )


def reduce_slots(terms: BiasTerms, slots: BiasSlots) -> list[Tensor | None]:
    """Gradients of `BiasTerms.learned`: sums over the rows, in an order that does not vary."""
    sums: list[Tensor | None] = [
        None
        if slot is None or tensor is None
        else slot.sum(0).movedim(0, -1).contiguous().to(tensor.dtype)
        for slot, tensor in zip(slots[:3], terms.learned()[:3], strict=True)
    ]
    return [*sums, slots.scores]


def launch_options(BIAS: BiasShape, config: LaunchConfig, element_size: int) -> dict[str, int]:
    """`config`'s, but for look-ups in tables: pipelined they would go through shared memory one
    number at a time, and their addresses do not fit into the registers of four warps.

    float32 stays at the warps of `config`: for eight, behind a mask, ptxas 12.8 (of Triton 3.6 and
    3.7.1) makes descriptors from registers that nobody has written, and gradients are wrong, or
    addresses.
    """
    if BIAS.LOOKS_UP:
        return {"num_warps": config.num_warps if element_size == 4 else 8, "num_stages": 1}
    return config.options()
