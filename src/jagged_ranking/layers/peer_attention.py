"""Attention by what PyTorch has itself, on padded and on nested tensors: the same results as
`jagged_attention`, so that a model can be trained by either.

None of them has a sink, the flash kernels take no mask, and those for nested tensors no user
without tokens. All of it is made of keys: queries get one more column, which is 1, and there a key
says what is added to its score: that of the sink, or so little that the key is hidden.
"""

from __future__ import annotations

from contextlib import nullcontext

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import embedding, pad, scaled_dot_product_attention, silu

from jagged_kernels import JaggedTensor, from_padded, jagged_cat, to_padded

COLUMNS = 8  # kernels want head dims by eights
# Times 1 / sqrt(D), of heads up to 256, its exponential is 0; float16 has it.
HIDDEN = -3e4


def padded_attention(
    q: JaggedTensor,
    k: JaggedTensor,
    v: JaggedTensor,
    *,
    causal: bool,
    sink: Tensor | None,
    longest: tuple[int, int],
    kind: str,
) -> JaggedTensor:
    """As `attend`, over [B, H, longest, D]."""
    flash = kind == "padded_flash"
    if flash and q.values.is_cuda and q.dtype not in (torch.float16, torch.bfloat16):
        raise ValueError(f"attention padded_flash needs half precision on a GPU, got {q.dtype}")
    dim = q.values.shape[2]
    queries, keys, values = (
        to_padded(x, length) for x, length in ((q, longest[0]), (k, longest[1]), (v, longest[1]))
    )
    place = torch.arange(longest[1], device=k.device)
    visible = place < k.lengths[:, None]
    if sink is not None or (flash and not causal):  # no causal query sees the padding behind it
        added = torch.where(visible, 0.0, HIDDEN)[..., None].expand(keys.shape[:3])
        queries, keys, values = _wider(queries, keys, values, added)
    if sink is not None:
        first = _first_key(sink * dim**0.5, keys)
        keys = torch.cat([first.expand(len(k), -1, -1, -1), keys], dim=1)
        values = pad(values, (0, 0, 0, 0, 1, 0))
        visible = pad(visible, (1, 0), value=True)
    mask = None
    if not flash:
        # A user without keys sees padding, whose values are 0: a softmax of nothing is no number.
        mask = (visible | ~visible.any(1, keepdim=True))[:, None, None]
        if causal:
            mask = mask & (place <= place[:, None])
    heads_first = (x.transpose(1, 2) for x in (queries, keys, values))
    if kind == "padded_dense":
        found = _dense(*heads_first, mask=mask, scale=dim**-0.5)
    else:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION) if flash else nullcontext():
            found = scaled_dot_product_attention(
                *heads_first, attn_mask=mask, is_causal=flash and causal, scale=dim**-0.5
            )
    found = found.transpose(1, 2)[..., :dim]
    return q.with_values(from_padded(found, offsets=q.offsets, total=len(q.values)).values)


def _dense(q: Tensor, k: Tensor, v: Tensor, *, mask: Tensor | None, scale: float) -> Tensor:
    """softmax(q k^T scale) v of [B, H, N, D], with a number in memory for every score."""
    scores = (q * scale) @ k.transpose(2, 3)
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    return scores.softmax(-1).to(v.dtype) @ v


def padded_pointwise_attention(
    q: JaggedTensor,
    k: JaggedTensor,
    v: JaggedTensor,
    *,
    position: Tensor,
    time: Tensor,
    age: JaggedTensor,
    longest: int,
    divide_by: int,
) -> JaggedTensor:
    """As `PointwiseAttention`, with a number in memory for every score and its biases."""
    if len(q.values) == 0:
        return q
    queries, keys, values = (to_padded(x, longest).transpose(1, 2) for x in (q, k, v))
    ages = to_padded(age, longest)
    place = torch.arange(longest, device=q.device)
    distance = place[:, None] - place
    elapsed = (ages[:, :, None] - ages[:, None, :]).abs()
    # begins of buckets in place of a logarithm, which is not exact
    begins = 2 ** torch.arange(len(time), device=q.device) - 1
    bucket = torch.bucketize(elapsed, begins, right=True, out_int32=True) - 1
    near = distance.clamp(min=0, max=len(position) - 1)
    biases = embedding(bucket, time) + embedding(near, position)
    scores = queries @ keys.transpose(2, 3) + biases.movedim(-1, 1)
    visible = (distance >= 0) & (place < k.lengths[:, None, None])
    weights = (silu(scores) / divide_by).masked_fill(~visible[:, None], 0.0)
    found = (weights.to(values.dtype) @ values).transpose(1, 2)
    return q.with_values(from_padded(found, offsets=q.offsets, total=len(q.values)).values)


def nested_attention(
    q: JaggedTensor,
    k: JaggedTensor,
    v: JaggedTensor,
    *,
    causal: bool,
    sink: Tensor | None,
    longest: tuple[int, int],
) -> JaggedTensor:
    """As `attend`, by SDPA over nested tensors."""
    if causal and not q.values.is_cuda:
        raise ValueError(
            "attention nested is causal on a GPU alone: PyTorch has no causal attention of nested "
            "tensors on a CPU"
        )
    dim, shared = q.values.shape[2], q.offsets is k.offsets
    queries, keys, values = _wider(
        q.values, k.values, v.values, k.values.new_zeros(k.values.shape[:2])
    )
    score = keys.new_full(keys.shape[1:2], HIDDEN) if sink is None else sink * dim**0.5
    first = _first_key(score, keys)
    keys = jagged_cat([first, k.with_values(keys)])
    values = keys.with_values(jagged_cat([torch.zeros_like(first), v.with_values(values)]).values)
    asked = q.with_values(queries)
    if shared:  # a query more, too, so that both go on having the same lengths
        more = jagged_cat([torch.zeros_like(first), asked])
        asked = keys.with_values(more.values)
    lengths = (longest[0] + shared, longest[1] + 1, longest[1] + 1)
    nested_q, nested_k, nested_v = (
        torch.nested.nested_tensor_from_jagged(
            x.values, x.offsets, min_seqlen=1, max_seqlen=most
        ).transpose(1, 2)
        for x, most in zip((asked, keys, values), lengths, strict=True)
    )
    found = scaled_dot_product_attention(
        nested_q, nested_k, nested_v, is_causal=causal, scale=dim**-0.5
    )
    tokens = found.transpose(1, 2).values()[..., :dim]
    if shared:
        count = len(q.values)
        user = torch.repeat_interleave(q.lengths, output_size=count)
        tokens = tokens[torch.arange(count, device=q.device) + user + 1]
    return q.with_values(tokens)


def _wider(q: Tensor, k: Tensor, v: Tensor, added: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """[..., D] -> [..., D + COLUMNS]; `added` [...] is what the product of a key with any query
    has more."""
    last = torch.cat([torch.ones_like(q[..., :1]), q.new_zeros((*q.shape[:-1], COLUMNS - 1))], -1)
    of_keys = pad(added.to(k.dtype)[..., None], (0, COLUMNS - 1))
    return torch.cat([q, last], -1), torch.cat([k, of_keys], -1), pad(v, (0, COLUMNS))


def _first_key(score: Tensor, keys: Tensor) -> Tensor:
    """[1, H, D + COLUMNS]: the key whose product with every query is `score` [H]."""
    width = keys.shape[-1]
    return pad(score.to(keys.dtype)[None, :, None], (width - COLUMNS, COLUMNS - 1))
