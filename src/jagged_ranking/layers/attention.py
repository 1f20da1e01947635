"""Softmax attention of the models: the one place where it is computed."""

from __future__ import annotations

from torch import Tensor

from jagged_kernels import AttentionSchedule, JaggedTensor, jagged_attention


def attend(
    q: JaggedTensor,
    k: JaggedTensor,
    v: JaggedTensor,
    *,
    causal: bool = False,
    sink: Tensor | None = None,
    schedule: AttentionSchedule | None = None,
) -> JaggedTensor:
    """softmax(q k^T / sqrt(D)) v inside each user.

    Args:
        q: queries [Tq, H, D].
        k, v: keys and values [Tk, H, D].
        causal: a query sees no later key.
        sink: [H], the score of one more key at every user, whose value is zero.
        schedule: what layers over the same offsets share; only kernels read it.

    Returns:
        [Tq, H, D]; zeros for a query without keys.
    """
    options = {"causal": causal, "schedule": schedule}
    if sink is None:
        return jagged_attention(q, k, v, **options)
    pooled, lse = jagged_attention(q, k, v, return_lse=True, **options)
    # Softmax over one more score is the result without it times this; 0 where lse is -inf.
    kept = (lse - sink).sigmoid()[..., None]
    return pooled.with_values(pooled.values * kept.to(pooled.values.dtype))
