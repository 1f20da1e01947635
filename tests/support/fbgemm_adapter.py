"""FBGEMM's `sll` operators (`torch.ops.fbgemm.sll_*`) in terms of ours, for their tests.

Signatures are theirs (fbgemm_gpu/sll/__init__.py); `backend` comes first. Where theirs is not the
standard operation, the function here makes up for it and says so. `max_seq_len`, which sizes their
grids, and `allow_tf32`, `use_fbgemm_kernel` are otherwise not used.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from jagged_kernels import (
    Jagged2Tensor,
    JaggedTensor,
    jagged2_matmul,
    jagged2_mul,
    jagged2_softmax,
    jagged2_to_padded,
    jagged_add,
    jagged_attention,
    jagged_cat,
    jagged_dense_bmm,
    jagged_jagged_bmm,
    jagged_outer,
    jagged_self_difference,
    jagged_softmax,
    lengths_to_offsets,
)


def fbgemm_operators(subject: str) -> SimpleNamespace:
    """What their tests find at `torch.ops.fbgemm`.

    The operator under test is ours; other `sll` operators, of which some of their references are
    built, are our plain PyTorch specifications, and the rest is written out below.
    """
    sll = {
        name: partial(function, "auto" if name == subject else "reference")
        for name, function in SLL.items()
    }
    return SimpleNamespace(
        **sll,
        jagged_to_padded_dense=_jagged_to_padded_dense,
        dense_to_jagged=_dense_to_jagged,
        asynchronous_complete_cumsum=lengths_to_offsets,
        pack_segments_v2=_pack_segments,
    )


def _jagged(values: Tensor, offsets: Tensor) -> JaggedTensor:
    return JaggedTensor(values, offsets, validate=not values.is_meta)


def _matrices(values: Tensor, lengths: Tensor, matrix_offsets: Tensor) -> Jagged2Tensor:
    return Jagged2Tensor(values, lengths_to_offsets(lengths), matrix_offsets.long())


def sll_jagged_dense_bmm(
    backend: Any, x: Tensor, y: Tensor, x_offsets: Tensor, N: int, allow_tf32: bool,
    use_fbgemm_kernel: bool = True,
) -> Tensor:  # fmt: skip
    return jagged_dense_bmm(_jagged(x, x_offsets), y, backend=backend).values


def sll_jagged_jagged_bmm(
    backend: Any, x: Tensor, y: Tensor, x_offsets: Tensor, N: int, allow_tf32: bool,
    use_fbgemm_kernel: bool = True,
) -> Tensor:  # fmt: skip
    return jagged_jagged_bmm(_jagged(x, x_offsets), _jagged(y, x_offsets), backend=backend)


def sll_dense_jagged_cat_jagged_out(
    backend: Any, a: Tensor, b: Tensor, a_offsets: Tensor, max_seq_len: int
) -> tuple[Tensor, Tensor]:
    out = jagged_cat([a[:, None], _jagged(b, a_offsets)], backend=backend)
    return out.values, out.offsets


def sll_jagged_self_substraction_jagged_out(
    backend: Any, a: Tensor, offsets_a: Tensor, offsets_b: Tensor, max_seq_len: int
) -> Tensor:
    """Theirs leaves out the last row and the first column of a user's differences."""
    m = jagged_self_difference(_jagged(a, offsets_a), backend=backend)
    n = m.lengths.repeat_interleave(m.matrix_offsets.diff())
    place = torch.arange(m.values.shape[0], device=a.device)
    place = place - m.matrix_offsets[:-1].repeat_interleave(m.matrix_offsets.diff())
    return m.values[(place // n < n - 1) & (place % n > 0)]


def sll_jagged2_to_padded_dense(
    backend: Any, values: Tensor, offsets: Tensor, max_length: int, padding_value: float
) -> Tensor:
    m = _matrices(values, offsets.diff().double().sqrt().long(), offsets)
    return jagged2_to_padded(m, max_length, value=padding_value, backend=backend)


def sll_jagged_dense_elementwise_mul_jagged_out(
    backend: Any, x: Tensor, y: Tensor, x_seq_lengths: Tensor, x_offsets: Tensor, max_seq_len: int
) -> Tensor:
    """Theirs has one matrix [L, L], which may be bool, for all users."""
    m = _matrices(x, x_seq_lengths, x_offsets)
    return jagged2_mul(m, y.to(x.dtype).expand(len(m), *y.shape), backend=backend).values


def sll_jagged_softmax(
    backend: Any, x: Tensor, x_offsets: Tensor, max_seq_len: int, use_fbgemm_kernel: bool = True
) -> Tensor:
    return jagged_softmax(_jagged(x, x_offsets), backend=backend).values


def sll_jagged2_softmax(
    backend: Any, x: Tensor, offsets: Tensor, offsets_total: Tensor, max_seq_len: int,
    transpose: bool,
) -> Tensor:  # fmt: skip
    m = Jagged2Tensor(x, offsets, offsets_total.long())
    return jagged2_softmax(m, dim=-2 if transpose else -1, backend=backend).values


def sll_array_jagged_bmm_jagged_out(
    backend: Any, x: Tensor, y: Tensor, x_lengths: Tensor, x_offsets: Tensor, y_lengths: Tensor,
    y_offsets: Tensor, z_lengths: Tensor, z_offsets: Tensor, max_seq_len: int, allow_tf32: bool,
    transpose: bool = False,
) -> Tensor:  # fmt: skip
    """Theirs cuts a user's matrix, and what it is multiplied with, after `max_seq_len`."""
    m = Jagged2Tensor(x, y_offsets, x_offsets.long())
    if not y.is_meta and int(y_lengths.max()) > max_seq_len:
        kept = _places(y_offsets, y.shape[0])[:, None] < max_seq_len
        out = jagged2_matmul(m, _jagged(y * kept, y_offsets), transpose=transpose, backend=backend)
        return out.values * kept
    return jagged2_matmul(m, _jagged(y, y_offsets), transpose=transpose, backend=backend).values


def sll_jagged_jagged_bmm_jagged_out(
    backend: Any, x: Tensor, y: Tensor, x_lengths: Tensor, x_offsets: Tensor, y_lengths: Tensor,
    y_offsets: Tensor, z_lengths: Tensor, z_offsets: Tensor, max_seq_len: int, allow_tf32: bool,
) -> Tensor:  # fmt: skip
    """Theirs takes y as [T, D] on a CPU and as [D, T] on CUDA."""
    y = y if y.shape == x.shape else y.t()
    like = Jagged2Tensor(x.new_zeros(int(z_offsets[-1])), x_offsets, z_offsets.long().to(x.device))
    out = jagged_outer(_jagged(x, x_offsets), _jagged(y, x_offsets), like=like, backend=backend)
    return out.values


def sll_jagged_dense_elementwise_add(
    backend: Any, x: Tensor, x_offsets: Tensor, y: Tensor, max_seq_len: int,
    use_fbgemm_kernel: bool = True,
) -> Tensor:  # fmt: skip
    return jagged_add(_jagged(x, x_offsets), y, backend=backend).values


def sll_jagged_flash_attention_basic(
    backend: Any, q_weights: Tensor, k_weights: Tensor, v_weights: Tensor, offsets: Tensor,
    max_seq_len: int, use_mask: bool = False, allow_tf32: bool = True,
) -> Tensor:  # fmt: skip
    """Theirs does not scale scores by 1 / sqrt(D) but divides the result by `max_seq_len`, and its
    mask leaves keys before the query out after the softmax, whose weights then sum to less."""
    q, k, v = (_jagged(t[:, None], offsets) for t in (q_weights, k_weights, v_weights))
    call = partial(jagged_attention, q, k, v, scale=1.0, return_lse=True, backend=backend)
    out, lse = call()
    values = out.values
    if use_mask:
        masked, masked_lse = call(window=(0, -1))
        values = masked.values * (masked_lse - lse).exp()[..., None]
    return values[:, 0] / max_seq_len


def sll_jagged_dense_flash_attention(
    backend: Any, q_weights: Tensor, k_weights: Tensor, v_weights: Tensor, attn_bias: Tensor,
    offsets: Tensor, max_seq_len: int, allow_tf32: bool = True,
) -> Tensor:  # fmt: skip
    """Attention of T dense queries: what they call q is the keys, and k [B, D, T] the queries."""
    queries = k_weights.transpose(1, 2)[:, :, None]
    keys, values = (_jagged(t[:, None], offsets) for t in (q_weights, v_weights))
    exists = torch.arange(max_seq_len, device=offsets.device) < offsets.diff()[:, None]
    bias = attn_bias.transpose(1, 2)
    scores = bias[exists[:, None].expand(bias.shape)][:, None]
    out = jagged_attention(queries, keys, values, scale=1.0, bias=scores, backend=backend)
    return out[:, :, 0]


def multi_head_jagged_flash_attention(
    backend: Any, q_weights: Tensor, k_weights: Tensor, v_weights: Tensor, offsets: Tensor,
    max_seq_len: int, allow_tf32: bool = True,
) -> Tensor:  # fmt: skip
    """[H, T, D]. Not scaled and divided by `max_seq_len`, as in theirs for one head; and its
    reference takes the softmax over the padding too, with score 0 and value 0."""
    q, k, v = (_jagged(t.transpose(0, 1), offsets) for t in (q_weights, k_weights, v_weights))
    out, lse = jagged_attention(q, k, v, scale=1.0, return_lse=True, backend=backend)
    lengths = offsets.diff()
    padding = (max_seq_len - lengths).repeat_interleave(lengths).to(lse.dtype).log()
    share = (lse - torch.logaddexp(lse, padding[:, None])).exp()
    return (out.values * share[..., None]).transpose(0, 1) / max_seq_len


SLL: dict[str, Callable[..., Any]] = {
    function.__name__: function
    for function in (
        sll_array_jagged_bmm_jagged_out,
        sll_dense_jagged_cat_jagged_out,
        sll_jagged2_softmax,
        sll_jagged2_to_padded_dense,
        sll_jagged_dense_bmm,
        sll_jagged_dense_elementwise_add,
        sll_jagged_dense_elementwise_mul_jagged_out,
        sll_jagged_dense_flash_attention,
        sll_jagged_flash_attention_basic,
        sll_jagged_jagged_bmm,
        sll_jagged_jagged_bmm_jagged_out,
        sll_jagged_self_substraction_jagged_out,
        sll_jagged_softmax,
    )
}


def triton_array_jagged_bmm_jagged_out(
    array_A: Tensor, jagged_B: Tensor, lengths_am: Tensor, lengths_bk: Tensor, lengths_cm: Tensor,
    offsets_am: Tensor, offsets_bk: Tensor, offsets_cm: Tensor, max_seq_len: int,
    allow_tf32: bool = False, transpose: int = 0,
) -> Tensor:  # fmt: skip
    """Their kernel's launch function, which some tests call directly."""
    return sll_array_jagged_bmm_jagged_out(
        "auto", array_A, jagged_B, lengths_am, offsets_am, lengths_bk, offsets_bk, lengths_cm,
        offsets_cm, max_seq_len, allow_tf32, bool(transpose),
    )  # fmt: skip


def triton_jagged_jagged_bmm_jagged_out(
    jagged_A: Tensor, jagged_B: Tensor, max_seq_len: int, lengths_m: Tensor, lengths_n: Tensor,
    lengths_mn: Tensor, offsets_m: Tensor, offsets_n: Tensor, offsets_mn: Tensor,
    allow_tf32: bool = False,
) -> Tensor:  # fmt: skip
    """Their kernel's launch function."""
    return sll_jagged_jagged_bmm_jagged_out(
        "auto", jagged_A, jagged_B, lengths_m, offsets_m, lengths_n, offsets_n, lengths_mn,
        offsets_mn, max_seq_len, allow_tf32,
    )  # fmt: skip


# What their tests import from `fbgemm_gpu.sll.triton`.
LAUNCHERS: dict[str, Callable[..., Any]] = {
    "multi_head_jagged_flash_attention": partial(multi_head_jagged_flash_attention, "auto"),
    "triton_array_jagged_bmm_jagged_out": triton_array_jagged_bmm_jagged_out,
    "triton_jagged_jagged_bmm_jagged_out": triton_jagged_jagged_bmm_jagged_out,
}


def _places(offsets: Tensor, tokens: int) -> Tensor:
    """[T]: which token of its user each is."""
    first = offsets[:-1].repeat_interleave(offsets.diff(), output_size=tokens)
    return torch.arange(tokens, device=offsets.device) - first


def _jagged_to_padded_dense(
    values: Tensor, offsets: Sequence[Tensor], max_lengths: Sequence[int], padding_value: float
) -> Tensor:
    (of_users,), (length,) = offsets, max_lengths
    place = torch.arange(length, device=values.device)
    exists = place < of_users.diff()[:, None]
    padded = values.new_full((*exists.shape, values.shape[1]), padding_value)
    padded[exists] = values
    return padded


def _dense_to_jagged(dense: Tensor, offsets: Sequence[Tensor]) -> tuple[Tensor, Sequence[Tensor]]:
    place = torch.arange(dense.shape[1], device=dense.device)
    return dense[place < offsets[0].diff()[:, None]], offsets


def _pack_segments(
    x: Tensor, lengths: Tensor, max_length: int, pad_minf: bool = False,
    return_presence_mask: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    offsets = lengths_to_offsets(lengths)
    presence = torch.arange(max_length, device=x.device) < lengths[:, None]
    value = -math.inf if pad_minf else 0.0
    return _jagged_to_padded_dense(x, [offsets], [max_length], value), presence
