"""Numbers in FP8 (e4m3), as `hopper.fp8_forward` reads them: the specification, in PyTorch.

A number x becomes e4m3(x / scale). Keys and values have one scale for each user and head
(FlashAttention-3 has one for each batch element and head of keys, arXiv 2407.08608, section 3.3),
queries one for each token and head, which a single pass over them finds: what a user gets does not
depend on others in the batch. What is not finite becomes NaN, since e4m3 has no infinity.
"""

from __future__ import annotations

import torch
from torch import Tensor

from jagged_kernels.ops.pooling.pooling import jagged_max
from jagged_kernels.tensors.jagged import JaggedTensor

E4M3 = torch.float8_e4m3fn
# e4m3's largest number.
LARGEST = 448.0
# Of so many keys, from token 0 on, V^T has its own order: `ordered`.
ORDERED_KEYS = 16
# For users whose largest number is 0, or so small that dividing by its scale would overflow.
SMALLEST_SCALE = 2.0**-126


def scales_of(x: JaggedTensor) -> Tensor:
    """[B, H] float32: each user's largest |number| of a head, as 448. Tokens with numbers that are
    not finite do not count."""
    sizes = torch.linalg.vector_norm(x.values, float("inf"), dim=2, dtype=torch.float32)
    sizes = torch.where(sizes < float("inf"), sizes, 0.0)
    return (jagged_max(x.with_values(sizes)) / LARGEST).clamp(min=SMALLEST_SCALE)


def of_tokens(scales: Tensor, offsets: Tensor, tokens: int) -> Tensor:
    """[T, H]: for each token the scales [B, H] of its user."""
    return scales.repeat_interleave(offsets.diff(), dim=0, output_size=tokens)


def quantise(x: Tensor, scales: Tensor) -> Tensor:
    """[T, H, D] e4m3 of x [T, H, D] by scales [T, H]. What is beyond a scale that the caller gave
    becomes 448."""
    numbers = x.float() / scales[:, :, None]
    finite = numbers.isfinite()
    return torch.where(finite, numbers.clamp(-LARGEST, LARGEST), float("nan")).to(E4M3)


def quantise_queries(q: Tensor) -> tuple[Tensor, Tensor]:
    """(e4m3 of q [T, H, D], its scales [T, H] float32): each token's largest |number| of a head, as
    448; what is not finite does not count."""
    sizes = q.float().abs()
    largest = torch.where(sizes < float("inf"), sizes, 0.0).amax(2)
    # Not divided by 448: on a GPU PyTorch multiplies by the reciprocal, on a CPU it does not.
    scales = (largest * (1.0 / LARGEST)).clamp(min=SMALLEST_SCALE)
    return quantise(q, scales), scales


def dequantise(x: Tensor, scales: Tensor) -> Tensor:
    """[T, H, D] float32 of `quantise`."""
    return x.float() * scales[:, :, None]


def quantise_keys(
    k: Tensor, v: Tensor, k_scales: Tensor, v_scales: Tensor
) -> tuple[Tensor, Tensor]:
    """(k [T, Hk, D] e4m3, V^T [Hk, D, T rounded up to ORDERED_KEYS] e4m3) by scales [T, Hk].

    Where some of a head's v is not finite its k is NaN, and these numbers of V^T are 0: who sees
    the key gets NaN, and for others 0 times V^T is 0. So is V^T behind T.
    """
    finite = v.isfinite()
    quantised = quantise(k, k_scales)
    # As bytes: FP8 has hardly any operations of its own.
    k_bytes = quantised.view(torch.uint8)
    k_bytes.masked_fill_(~finite.all(2, keepdim=True), 0x7F)
    return quantised, ordered(quantise(torch.where(finite, v, 0.0), v_scales))


def ordered(v: Tensor) -> Tensor:
    """V^T [Hk, D, T rounded up] of v [T, Hk, D] e4m3: of every 16 keys 2c, 2c + 1, 8 + 2c and
    9 + 2c stand side by side (c = 0 ... 3)."""
    tokens, heads, dim = v.shape
    groups = -(-tokens // ORDERED_KEYS)
    padded = v.new_zeros((groups * ORDERED_KEYS, heads, dim), dtype=torch.uint8)
    padded[:tokens] = v.view(torch.uint8)
    parts = padded.view(groups, 2, 4, 2, heads, dim).permute(4, 5, 0, 2, 1, 3)
    return parts.reshape(heads, dim, groups * ORDERED_KEYS).view(E4M3)


def in_order(v_t: Tensor, tokens: int) -> Tensor:
    """v [T, Hk, D] e4m3 of what `ordered` gave."""
    heads, dim, padded = v_t.shape
    parts = v_t.view(torch.uint8).view(heads, dim, padded // ORDERED_KEYS, 4, 2, 2)
    v = parts.permute(2, 4, 3, 5, 0, 1).reshape(padded, heads, dim)
    return v[:tokens].contiguous().view(E4M3)
