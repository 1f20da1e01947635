"""Attention of the models: the one place where it is computed, and by what."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from jagged_kernels import (
    AttentionSchedule,
    JaggedTensor,
    RelativePositionBias,
    RelativeTimeBias,
    SiLU,
    jagged_attention,
)
from jagged_ranking.layers.peer_attention import (
    nested_attention,
    padded_attention,
    padded_pointwise_attention,
)

POINTWISE = ("jagged", "padded_dense")  # what computes attention without a softmax


class Attention(nn.Module):
    """`attend` of one kind. A module without weights: who measures a model hooks in where its
    attention begins and ends."""

    def __init__(self, kind: str, *, causal: bool = False) -> None:
        super().__init__()
        self.kind, self.causal = kind, causal

    def forward(
        self,
        q: JaggedTensor,
        k: JaggedTensor,
        v: JaggedTensor,
        *,
        sink: Tensor | None = None,
        longest: tuple[int, int] | None = None,
        schedule: AttentionSchedule | None = None,
    ) -> JaggedTensor:
        """As `attend`."""
        return attend(
            q,
            k,
            v,
            kind=self.kind,
            causal=self.causal,
            sink=sink,
            longest=longest,
            schedule=schedule,
        )


class PointwiseAttention(nn.Module):
    """HSTU's causal attention, a module as `Attention` is: the weight of an event is
    silu(q k + bias) / `divide_by` (Zhai et al., arXiv 2402.17152, section 3.2).

    Args:
        kind: one of `POINTWISE`.
        divide_by: n, the longest history there can be.

    Raises:
        ValueError: a kind that is a softmax.
    """

    def __init__(self, kind: str, *, divide_by: int) -> None:
        super().__init__()
        if kind not in POINTWISE:
            raise ValueError(
                f"attention {kind} is a softmax, of which hstu's layers have none: they take "
                f"{' or '.join(POINTWISE)}"
            )
        self.kind, self.divide_by = kind, divide_by

    def forward(
        self,
        q: JaggedTensor,
        k: JaggedTensor,
        v: JaggedTensor,
        *,
        position: Tensor,
        time: Tensor,
        age: JaggedTensor,
        longest: int | None = None,
        schedule: AttentionSchedule | None = None,
    ) -> JaggedTensor:
        """q, k, v [T, H, D] -> [T, H, D].

        Args:
            position: [divide_by, H], added to the score by how many events lie between.
            time: [buckets, H], added by floor(log2(1 + the difference of ages)).
            age: [T], integers.
            longest: events of the user with most of them, see `attend`.
            schedule: see `attend`.
        """
        if self.kind == "padded_dense":
            return padded_pointwise_attention(
                q,
                k,
                v,
                position=position,
                time=time,
                age=age,
                longest=int(q.lengths.max()) if longest is None else longest,
                divide_by=self.divide_by,
            )
        return jagged_attention(
            q,
            k,
            v,
            causal=True,
            scale=1.0,
            bias=(_by_distance(position), RelativeTimeBias(time, age)),
            scores=SiLU(divide_by=self.divide_by),
            schedule=schedule,
        )


def _by_distance(position: Tensor) -> RelativePositionBias:
    """A number for each distance: half of the buckets are single distances, and the others, which
    grow, have the last one's number."""
    longest = len(position)
    table = torch.cat([position, position[-1:].expand(longest, -1)])
    return RelativePositionBias(table, max_distance=longest + 1, bidirectional=False)


def attend(
    q: JaggedTensor,
    k: JaggedTensor,
    v: JaggedTensor,
    *,
    kind: str = "jagged",
    causal: bool = False,
    sink: Tensor | None = None,
    longest: tuple[int, int] | None = None,
    schedule: AttentionSchedule | None = None,
) -> JaggedTensor:
    """softmax(q k^T / sqrt(D)) v inside each user.

    Args:
        q: queries [Tq, H, D].
        k, v: keys and values [Tk, H, D].
        kind: "jagged", or by PyTorch's own: "padded_dense" (every score in memory), "padded_sdpa"
            (SDPA with a mask of the padding), "padded_flash" (the flash kernels of SDPA; on a GPU
            for half precision), "nested" (nested tensors; causal on a GPU alone).
        causal: a query sees no later key; for q and k of the same offsets.
        sink: [H], the score of one more key at every user, whose value is zero; not with `causal`.
        longest: queries and keys of the user with most of them, which what pads has to know. None:
            it waits for the device to say.
        schedule: what layers over the same offsets share; only the kernels of "jagged" read it.

    Returns:
        [Tq, H, D]; zeros for a query without keys.

    Raises:
        ValueError: this kind does not do that here.
    """
    if kind != "jagged":
        if len(q.values) == 0:
            return q
        if longest is None:
            longest = int(q.lengths.max()), int(k.lengths.max())
        if kind == "nested":
            return nested_attention(q, k, v, causal=causal, sink=sink, longest=longest)
        return padded_attention(q, k, v, kind=kind, causal=causal, sink=sink, longest=longest)
    if sink is None:
        return jagged_attention(q, k, v, causal=causal, schedule=schedule)
    pooled, lse = jagged_attention(q, k, v, causal=causal, schedule=schedule, return_lse=True)
    return with_sink(pooled, lse, sink)


def with_sink(pooled: JaggedTensor, lse: Tensor, sink: Tensor) -> JaggedTensor:
    """Attention [T, H, D] and its lse [T, H] with one more key, of score `sink` [H] and value 0."""
    # Softmax over one more score is the result without it times this; 0 where lse is -inf.
    kept = (lse - sink).sigmoid()[..., None]
    return pooled.with_values(pooled.values * kept.to(pooled.values.dtype))
