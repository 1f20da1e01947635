"""HSTU's attention of a batch in plain PyTorch: what it is called, which pairs of events there are,
and what is added to their scores.

Weights are silu(q k / sqrt(D) + bias) / n for all visible pairs, n the longest history there can
be. Source: Zhai et al. 2024 (arXiv 2402.17152), sections 3.2 and 3.4; mask and n as in their code.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import embedding

# Buckets of distances, as T5 has them, and of times: floor(log2(1 + seconds)).
POSITIONS, FARTHEST, TIMES = 32, 128, 32
_MEAN_GAP = 3600.0  # seconds between two events of a made-up history


@dataclass(frozen=True, kw_only=True)
class HSTU:
    """Of a workload: that its attention is HSTU's, and which.

    Args:
        targets: so many newest tokens of each history are candidates, which see themselves and the
            history, and which nobody else sees; 0 for none.
        biased: learned biases of distance and time are added to the scores.
    """

    targets: int = 0
    biased: bool = False

    @property
    def op(self) -> str:
        """What results call it, see `lineup.HSTU_OPS`."""
        return "hstu" + "_targets" * (self.targets > 0) + "_bias" * self.biased

    def targets_of(self, lengths: Tensor) -> Tensor:
        """[B]: a history that is shorter consists of candidates alone."""
        return lengths.clamp(max=self.targets)

    def pairs(self, lengths: Tensor) -> float:
        """Visible (query, key) pairs of a batch."""
        targets = self.targets_of(lengths).double()
        history = lengths - targets
        return float((history * (history + 1) / 2 + targets * history + targets).sum())


def visible_pairs(place: Tensor, lengths: Tensor, targets: Tensor) -> Tensor:
    """[b, L, L] bool, query by key: what came before, which is no candidate, and oneself.

    Args:
        place: [L], 0 to L - 1.
        lengths, targets: [b], of the same users. What lies behind a length is not looked at.
    """
    history = (lengths - targets)[:, None, None]
    before = place < place[:, None]
    return (before & (place < history)) | (place == place[:, None])


@dataclass(frozen=True)
class Biases:
    """position [POSITIONS, H] and time [TIMES, H], float32; times [T] int64, seconds, ascending
    within a history."""

    position: Tensor
    time: Tensor
    times: Tensor

    @classmethod
    def draw(cls, tokens: int, heads: int, generator: torch.Generator) -> "Biases":
        """Standard normal tables, and events an hour apart on average."""
        device = generator.device
        shape: dict[str, Any] = {"device": device, "dtype": torch.float32}
        gaps = torch.empty(tokens, **shape).exponential_(1 / _MEAN_GAP, generator=generator)
        position, time = (
            torch.randn(buckets, heads, generator=generator, **shape)
            for buckets in (POSITIONS, TIMES)
        )
        return cls(position, time, gaps.long().cumsum(0))


def position_buckets(place: Tensor) -> Tensor:
    """[L, L] int32, query by key: T5's buckets (Raffel et al. 2020, section 2.1) of keys before the
    query; half of them are distances, the others grow with the logarithm up to FARTHEST."""
    distance = (place[:, None] - place).clamp(min=0)
    near = POSITIONS // 2
    # Exact in float64: near * (FARTHEST / near) ** (step / near) is whole at no step but the ends.
    steps = (distance.clamp(min=1).double() / near).log() / math.log(FARTHEST / near)
    far = (near + (steps * (POSITIONS - near)).floor().long()).clamp(max=POSITIONS - 1)
    return torch.where(distance < near, distance, far).int()


def time_buckets(times: Tensor) -> Tensor:
    """[b, L] seconds -> [b, L, L] int32."""
    elapsed = (times[:, :, None] - times[:, None, :]).abs()
    begins = 2 ** torch.arange(TIMES, device=times.device) - 1
    return torch.bucketize(elapsed, begins, right=True, out_int32=True) - 1


def added(tables: Sequence[Tensor], at: Sequence[Tensor]) -> Tensor:
    """[b, H, L, L], from the tables of positions and times, and the buckets [L, L] and [b, L, L] of
    every pair."""
    position, time = (_Lookup.apply(*pair) for pair in zip(tables, at, strict=True))
    return (time + position).movedim(-1, 1)


class _Lookup(torch.autograd.Function):
    """table[index]. PyTorch's gradient of that sorts all pairs, to add up those of a bucket one
    after another: for a handful of buckets a histogram takes a fraction of the time."""

    @staticmethod
    def forward(ctx: Any, table: Tensor, index: Tensor) -> Tensor:
        ctx.save_for_backward(index)
        ctx.buckets = len(table)
        return embedding(index, table)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (index,), (d_out,) = ctx.saved_tensors, gradients
        by_head = (d_out[..., head].double().flatten() for head in range(d_out.shape[-1]))
        sums = [torch.bincount(index.flatten(), d, ctx.buckets) for d in by_head]
        return torch.stack(sums, 1).to(d_out.dtype), None
