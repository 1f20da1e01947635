"""Batches on which a lead is hard to hold: K, L and W.

K has a head_dim between two powers of two, which kernels for Hopper may pad. L has histories up to
8,192, where a kernel's pace on whole blocks decides. W has one user of 16,384 among 512 short ones:
whoever gives a user's tile to one program waits for his last one.
"""

import torch

from jagged_ranking.measure.workloads import Workload


def hard_workloads(*, dtype: torch.dtype = torch.bfloat16) -> list[Workload]:
    """K, L and W."""
    return [
        _drawn("K", "uniform", 512, 4, 96, 1024, dtype),
        _drawn("L", "lognormal", 256, 2, 128, 8192, dtype),
        _whale("W", 512, 128, 16_384, 4, 64, dtype),
    ]


def small_hard_workloads(*, dtype: torch.dtype = torch.float32) -> list[Workload]:
    """The same distributions at a size that a CPU measures in seconds."""
    return [
        _drawn("K-small", "uniform", 16, 2, 24, 128, dtype),
        _drawn("L-small", "lognormal", 16, 1, 32, 512, dtype),
        _whale("W-small", 32, 16, 256, 2, 16, dtype),
    ]


def _drawn(
    name: str, distribution: str, users: int, heads: int, head_dim: int, max_len: int,
    dtype: torch.dtype,
) -> Workload:  # fmt: skip
    return Workload(
        name=name, users=users, heads=heads, head_dim=head_dim, max_len=max_len,
        distribution=distribution, dtype=dtype,
    )  # fmt: skip


def _whale(
    name: str, others: int, short: int, longest: int, heads: int, head_dim: int,
    dtype: torch.dtype,
) -> Workload:  # fmt: skip
    """One user of `longest` tokens and `others` of 1 to `short`, uniformly; of one seed."""
    lengths = torch.randint(1, short + 1, (others,), generator=torch.Generator().manual_seed(0))
    return Workload.from_lengths(
        name, [longest, *lengths.tolist()], heads=heads, head_dim=head_dim,
        distribution="whale", dtype=dtype,
    )  # fmt: skip
