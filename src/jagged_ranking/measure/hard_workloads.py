"""Batches on which a lead is hard to hold: K, L and W.

K has a head_dim between two powers of two, which kernels for Hopper may pad. L has histories up to
8,192, where a kernel's pace on whole blocks decides. W has one user of 16,384 among 512 short ones:
whoever gives a user's tile to one program waits for his last one.
"""

import torch

from jagged_ranking.measure.workloads import Workload

SHORT, LONG = 128, 16_384  # the longest of W's short users, and its long one
SMALL_SHORT, SMALL_LONG = 16, 256


def hard_workloads(*, dtype: torch.dtype = torch.bfloat16) -> list[Workload]:
    """K, L and W."""
    return [
        Workload(
            name="K", users=512, heads=4, head_dim=96, max_len=1024, distribution="uniform",
            dtype=dtype,
        ),
        Workload(
            name="L", users=256, heads=2, head_dim=128, max_len=8192, distribution="lognormal",
            dtype=dtype,
        ),
        _whale("W", 512, SHORT, LONG, heads=4, head_dim=64, dtype=dtype),
    ]  # fmt: skip


def small_hard_workloads(*, dtype: torch.dtype = torch.float32) -> list[Workload]:
    """The same distributions at a size that a CPU measures in seconds."""
    return [
        Workload(
            name="K-small", users=16, heads=2, head_dim=24, max_len=128, distribution="uniform",
            dtype=dtype,
        ),
        Workload(
            name="L-small", users=16, heads=1, head_dim=32, max_len=512, distribution="lognormal",
            dtype=dtype,
        ),
        _whale("W-small", 32, SMALL_SHORT, SMALL_LONG, heads=2, head_dim=16, dtype=dtype),
    ]  # fmt: skip


def _whale(
    name: str, others: int, short: int, longest: int, *, heads: int, head_dim: int,
    dtype: torch.dtype,
) -> Workload:  # fmt: skip
    """One user of `longest` tokens and `others` of 1 to `short`, uniformly; of one seed."""
    lengths = torch.randint(1, short + 1, (others,), generator=torch.Generator().manual_seed(0))
    return Workload.from_lengths(
        name,
        [longest, *lengths.tolist()],
        heads=heads,
        head_dim=head_dim,
        distribution="whale",
        dtype=dtype,
    )
