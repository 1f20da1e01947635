"""Softmax attention of the models: the one place where it is computed, and by what."""

from __future__ import annotations

from torch import Tensor

from jagged_kernels import AttentionSchedule, JaggedTensor, jagged_attention
from jagged_ranking.layers.peer_attention import nested_attention, padded_attention


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
        kind: "jagged", or by PyTorch's own: "padded_sdpa" (a mask of the padding), "padded_flash"
            (the flash kernels of SDPA; on a GPU for half precision), "nested" (nested tensors;
            causal on a GPU alone).
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
        flash = kind == "padded_flash"
        return padded_attention(q, k, v, causal=causal, sink=sink, longest=longest, flash=flash)
    if sink is None:
        return jagged_attention(q, k, v, causal=causal, schedule=schedule)
    pooled, lse = jagged_attention(q, k, v, causal=causal, schedule=schedule, return_lse=True)
    # Softmax over one more score is the result without it times this; 0 where lse is -inf.
    kept = (lse - sink).sigmoid()[..., None]
    return pooled.with_values(pooled.values * kept.to(pooled.values.dtype))
