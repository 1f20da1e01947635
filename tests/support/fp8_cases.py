"""Inputs for attention in FP8, and how far its kernel may be from float64 on the same numbers.

With weights p = 2 ** (score - top + 8), top the largest score so far of a query in base 2, the
kernel gives the sum of e4m3(p) v / the sum of p. What it rounds, and by how much:

- e4m3 has 3 bits behind its first: p becomes p (1 + r), |r| <= 2 ** -4, but below 2 ** -6, where
  its steps are 2 ** -9, p + s with |s| <= 2 ** -10. The sum of p is 2 ** 8 or more, since the
  largest score's weight is that; what was summed before the top rose is made smaller with it.
- An instruction of tensor cores adds 32 products and what was there, which are aligned to the
  largest, a, and cut off below 14 bits (arXiv 2412.19437, section 3.3.2): 33 * 2 ** -13 * a at
  most. Scores are D / 32 of them; for a block of 128 keys the product with v is four, whose a is at
  most the block's sum of |p v|.
- A score off by e moves weights, after their sum is divided out, by factors of at most 2 ** 2e.
- float32 sums, far below that, and the result's own rounding.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from attention_cases import Case
from torch import Tensor

from jagged_kernels import FP8Keys, JaggedTensor, jagged_attention
from jagged_kernels.attention.fp8_numbers import LARGEST, dequantise, quantise_queries
from jagged_kernels.schedule.window import resolve_window

_WEIGHT, _SMALL_WEIGHT = 2.0**-4, 2.0**-18  # the latter of a sum of 2 ** 8
_INSTRUCTION = 33 * 2.0**-13
_FLOAT32 = 2.0**-16  # of sums over thousands of keys, block by block


# Around blocks of 128 keys, which begin at a multiple of 16 tokens of the batch.
LENGTHS = [0, 1, 31, 33, 64, 129, 0, 1000, 15, 128]
MASKS: tuple[dict[str, Any], ...] = (
    {}, {"causal": True}, {"window": (64, 0)}, {"window": (300, 100)}, {"window": (5, -1)},
    {"window": (-1, 3)}, {"scale": -0.3}, {"causal": True, "scale": 0.0},
)  # fmt: skip

Sides = tuple[JaggedTensor, JaggedTensor, JaggedTensor]


def sides(
    lengths: list[int], k_lengths: list[int] | None = None, *, dim: int = 64, heads: int = 2,
    kv_heads: int = 2, dtype: torch.dtype = torch.float32,
) -> Sides:  # fmt: skip
    case = Case(lengths, k_lengths, heads=heads, kv_heads=kv_heads, dim=dim)
    inputs = case.inputs(dtype)
    k = JaggedTensor(inputs.k, inputs.k_offsets)
    q = JaggedTensor(inputs.q, inputs.q_offsets if k_lengths else inputs.k_offsets)
    return q, k, k.with_values(inputs.v)


class Bound(NamedTuple):
    """Of a call in float64: its results, and how far the kernel's may be from each number."""

    o: Tensor
    lse: Tensor
    o_error: Tensor
    lse_error: Tensor
    rounded: Tensor  # o as weights in e4m3 alone make it


def kept(q: JaggedTensor) -> Tensor:
    """What FP8 keeps of q [T, H, D], in float64."""
    return dequantise(*quantise_queries(q.values)).double()


def bound(
    q: JaggedTensor, keys: FP8Keys, *, causal: bool = False,
    window: tuple[int, int] | None = None, scale: float | None = None,
) -> Bound:  # fmt: skip
    """Of `fp8_attention` with these arguments."""
    band: dict[str, Any] = {"window": resolve_window(causal, window), "scale": scale}
    q_kept = q.with_values(kept(q))
    k, v = (x.with_values(x.values.double()) for x in keys.dequantised())
    o, lse = jagged_attention(q_kept, k, v, backend="reference", return_lse=True, **band)
    sizes = v.with_values(v.values.abs())
    size = jagged_attention(q_kept, k, sizes, backend="reference", **band).values
    scale = 1 / math.sqrt(q.values.shape[2]) if scale is None else scale
    left, right = band["window"]

    score_error, every = torch.zeros_like(lse), torch.zeros_like(o.values)
    rounded = torch.zeros_like(o.values)
    group = q.values.shape[1] // keys.k.shape[1]
    for user in range(len(q)):
        rows = slice(*q.offsets[user : user + 2].tolist())
        q_user = q_kept[user].transpose(0, 1)
        k_user, v_user = (x[user].repeat_interleave(group, 1).transpose(0, 1) for x in (k, v))
        n, m = q_user.shape[1], k_user.shape[1]
        if n == 0 or m == 0:
            continue
        factor = abs(scale) * math.log2(math.e)
        score_error[rows] = factor * _score_error(q_user, k_user).transpose(0, 1)
        every[rows] = v_user.abs().sum(1)
        # The weights' rounding by itself, against each query's largest score.
        place = torch.arange(n, device=o.device)[:, None] + m - n
        key = torch.arange(m, device=o.device)[None]
        seen = (left < 0) | (key >= place - left)
        seen = seen & ((right < 0) | (key <= place + right))
        scores = (q_user @ k_user.transpose(1, 2) * scale * math.log2(math.e)).masked_fill(
            ~seen, -math.inf
        )
        top = scores.amax(2, keepdim=True)
        p = (scores - top.masked_fill(top == -math.inf, 0.0) + 8).exp2()
        p_e4m3 = p.float().clamp(max=LARGEST).to(torch.float8_e4m3fn).double()
        mean = p_e4m3 @ v_user / p.sum(2, keepdim=True).clamp(min=1e-300)
        rounded[rows] = mean.transpose(0, 1)

    moved = (2 * score_error).exp2()[:, :, None]
    grown = (1 + _WEIGHT) * moved * (1 + 4 * _INSTRUCTION) * (1 + _FLOAT32)
    small = _SMALL_WEIGHT * moved * (1 + 4 * _INSTRUCTION)
    half_step = torch.finfo(q.dtype).eps / 2
    o_error = (grown - 1) * size + small * every
    o_error += half_step * (o.values.abs() + o_error)
    lse_error = math.log(2) * (score_error + _FLOAT32) + 2.0**-22 * lse.abs().nan_to_num(posinf=0)
    return Bound(o.values, lse, o_error, lse_error, rounded)


def _score_error(q: Tensor, k: Tensor) -> Tensor:
    """[H, n]: of each query the largest error of its scores q k^T, before they are scaled."""
    total, error = 0.0, 0.0
    for first in range(0, q.shape[2], 32):
        q_part, k_part = q[:, :, first : first + 32], k[:, :, first : first + 32]
        largest = q_part.abs().amax(2)[:, :, None] * k_part.abs().amax(2)[:, None]
        before = total.abs() if isinstance(total, Tensor) else torch.zeros_like(largest)
        error = error + _INSTRUCTION * torch.maximum(largest, before)
        total = total + q_part @ k_part.transpose(1, 2)
    assert isinstance(error, Tensor)
    return error.amax(2)


def assert_within(o: Tensor, lse: Tensor, bound: Bound) -> None:
    """Number by number; and as a whole not much farther than by the rounding of weights alone."""
    unseen = bound.lse == -math.inf
    assert torch.equal(lse == -math.inf, unseen)
    assert (o[unseen] == 0).all()
    error = (o.double() - bound.o).abs()
    assert (error <= bound.o_error).all(), (error - bound.o_error).max()
    lse_error = (lse.double() - bound.lse).abs()[~unseen]
    assert (lse_error <= bound.lse_error[~unseen]).all(), lse_error.max()
    own = (bound.rounded - bound.o).norm()
    rounding = torch.finfo(o.dtype).eps * bound.o.norm()
    assert error.norm() <= 2 * own + rounding, (error.norm(), own)
