"""`fp8_keys` and `fp8_attention`: keys and values in FP8, and queries that look at them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal, overload

import torch
from torch import Tensor

from jagged_kernels.attention.api import jagged_attention
from jagged_kernels.attention.fp8_numbers import (
    dequantise,
    in_order,
    of_tokens,
    quantise_queries,
    scales_of,
)
from jagged_kernels.attention.operators import fp8 as ops
from jagged_kernels.core.autocast import without_autocast
from jagged_kernels.core.backends import Backend, check_backend
from jagged_kernels.core.contents import checking, known_to_differ
from jagged_kernels.core.layouts import rows_of_dims
from jagged_kernels.core.operators import call, wants_gradient
from jagged_kernels.schedule.check import check_schedule
from jagged_kernels.schedule.kept import schedule_of_call
from jagged_kernels.schedule.offsets import check_contents
from jagged_kernels.schedule.policy.hopper import fp8_config, is_hopper
from jagged_kernels.schedule.schedule import AttentionSchedule, check_users
from jagged_kernels.schedule.window import resolve_window
from jagged_kernels.tensors.checks import as_scale
from jagged_kernels.tensors.jagged import JaggedTensor
from jagged_kernels.tensors.nested import takes_nested

HEAD_DIMS = (64, 128)
_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


@dataclass(frozen=True, eq=False, repr=False)
class FP8Keys:
    """Keys and values of B users in FP8 (e4m3), as `fp8_keys` makes them for `fp8_attention`.

    Attributes:
        k: [T, Hk, D] float8_e4m3fn. NaN where k, or the key's v, is not finite.
        v_t: [Hk, D, T rounded up to 16] float8_e4m3fn, values with tokens side by side. Of every 16
            those of keys 2c, 2c + 1, 8 + 2c and 9 + 2c (c = 0 ... 3) follow each other, as Hopper's
            tensor cores read them.
        k_scale, v_scale: [B, Hk] float32: a number is its e4m3 times that of its user and head.
        offsets: [B + 1], of k and v as they came.

    >>> k = JaggedTensor(torch.randn(5, 2, 64), torch.tensor([0, 3, 3, 5]))
    >>> fp8_keys(k, k)
    FP8Keys(users=3, tokens=5, heads=2, head_dim=64, device=cpu)
    """

    k: Tensor
    v_t: Tensor
    k_scale: Tensor
    v_scale: Tensor
    offsets: Tensor

    def dequantised(self) -> tuple[JaggedTensor, JaggedTensor]:
        """k and v [T, Hk, D], float32: what FP8 has kept of them."""
        tokens = self.k.shape[0]
        k_scale, v_scale = (
            of_tokens(scale, self.offsets, tokens) for scale in (self.k_scale, self.v_scale)
        )
        k = dequantise(self.k, k_scale)
        v = dequantise(in_order(self.v_t, tokens), v_scale)
        return JaggedTensor._trusted(k, self.offsets), JaggedTensor._trusted(v, self.offsets)

    def __repr__(self) -> str:
        tokens, heads, dim = self.k.shape
        return (
            f"FP8Keys(users={self.offsets.shape[0] - 1}, tokens={tokens}, heads={heads}, "
            f"head_dim={dim}, device={self.k.device})"
        )


@takes_nested
def fp8_keys(
    k: JaggedTensor,
    v: JaggedTensor,
    *,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> FP8Keys:
    """Keys and values in FP8 (e4m3), once for all queries that will look at them.

    Args:
        k: keys, `JaggedTensor` [T, Hk, D] of float16, bfloat16 or float32. D is 64 or 128.
        v: values, `JaggedTensor` [T, Hk, D] with the offsets and dtype of `k`.
        k_scale, v_scale: float32 [Hk] or [B, Hk], positive: what numbers are divided by before they
            are rounded, as calibrated; those that then are beyond 448 become 448. None: the largest
            of each user and head divided by 448, so that a user does not depend on others.

    Returns:
        `FP8Keys`, a quarter of the size of k and v in float32. A key that is not finite is NaN to
        whoever sees it, and so is one whose value is not.

    Raises:
        TypeError: of other kinds or dtypes.
        ValueError: of other shapes or devices, or offsets of v that are not those of k.
        NotImplementedError: another head_dim, or k or v wants a gradient: there is none.

    >>> k = JaggedTensor(torch.randn(5, 2, 64), torch.tensor([0, 3, 3, 5]))
    >>> keys = fp8_keys(k, k)
    >>> keys.k.dtype, tuple(keys.v_t.shape), tuple(keys.k_scale.shape)
    (torch.float8_e4m3fn, (2, 64, 16), (3, 2))
    """
    _check_floats(k=k, v=v)
    if k.values.shape != v.values.shape:
        shapes = f"{tuple(k.values.shape)} and {tuple(v.values.shape)}"
        raise ValueError(f"k and v must have the same shape, got {shapes}")
    if k.dtype != v.dtype:
        raise TypeError(f"k and v must be of one dtype, got {k.dtype} and {v.dtype}")
    if k.device != v.device:
        raise ValueError(f"k and v must be on one device, got {k.device} and {v.device}")
    if v.offsets is not k.offsets:
        if len(v) != len(k):
            raise ValueError(f"k has {len(k)} users and v has {len(v)}")
        if known_to_differ(v.offsets, k.offsets):
            raise ValueError("k and v must have the same offsets")
    k_scale = _scale("k_scale", k_scale, k)
    v_scale = _scale("v_scale", v_scale, v)
    tokens = k.values.shape[0]
    by_token = (of_tokens(scale, k.offsets, tokens) for scale in (k_scale, v_scale))
    values = (rows_of_dims(x.values) for x in (k, v))
    quantised, v_t = call(ops.fp8_keys, *values, *by_token)
    return FP8Keys(quantised, v_t, k_scale, v_scale, k.offsets)


@overload
def fp8_attention(
    q: JaggedTensor,
    keys: FP8Keys,
    *,
    causal: bool = ...,
    window: tuple[int, int] | None = ...,
    scale: float | None = ...,
    schedule: AttentionSchedule | None = ...,
    backend: Backend = ...,
    return_lse: Literal[False] = ...,
) -> JaggedTensor: ...
@overload
def fp8_attention(
    q: JaggedTensor,
    keys: FP8Keys,
    *,
    causal: bool = ...,
    window: tuple[int, int] | None = ...,
    scale: float | None = ...,
    schedule: AttentionSchedule | None = ...,
    backend: Backend = ...,
    return_lse: Literal[True],
) -> tuple[JaggedTensor, Tensor]: ...
@takes_nested
def fp8_attention(
    q: JaggedTensor,
    keys: FP8Keys,
    *,
    causal: bool = False,
    window: tuple[int, int] | None = None,
    scale: float | None = None,
    schedule: AttentionSchedule | None = None,
    backend: Backend = "auto",
    return_lse: bool = False,
) -> JaggedTensor | tuple[JaggedTensor, Tensor]:
    """`jagged_attention` of keys and values in FP8, for serving on Hopper GPUs.

    Queries are rounded to FP8, each token's of a head by a scale of its own, and both products are
    of FP8 (FlashAttention-3, arXiv 2407.08608, section 3.3). The kernel also rounds the weights of
    a block of keys to e4m3, each by up to a sixteenth of itself, after their float32 sum is taken;
    elsewhere attention of the same FP8 numbers is computed in float32.

    Args:
        q: queries, `JaggedTensor` [Tq, H, D] of float16, bfloat16 or float32, of as many users as
            the keys. Its offsets may be others than the keys'.
        keys: of `fp8_keys`. Hk divides H; head h reads key head h // (H / Hk).
        causal, window, scale, schedule: as in `jagged_attention`. The kernel takes a schedule of
            its tiles (of 64 queries at head_dim 64, of 128 at 128); where it has others, tables are
            built and kept as in a call without.
        backend: "triton" (the kernel, on a Hopper GPU), "native", "reference" (both attend to what
            FP8 has kept, in float32), or "auto": the kernel on Hopper, elsewhere what
            `jagged_attention` takes.
        return_lse: also return the natural log of each query's sum of exponentials.

    Returns:
        `JaggedTensor` [Tq, H, D] in q's dtype, and with `return_lse` lse [Tq, H], float32. A query
        that sees no key gets 0 (lse -inf). What the mask hides touches nothing, be it NaN or inf,
        but for its part in the scale of its own user and head, of keys and values. Scores are good
        up to a million in size.

    Raises:
        TypeError: of other kinds or dtypes.
        ValueError: of other shapes or devices, a schedule of another batch or mask, or "triton"
            where there is no Hopper GPU.
        NotImplementedError: another head_dim, or q wants a gradient: there is none.

    >>> x = JaggedTensor(torch.randn(5, 2, 64), torch.tensor([0, 3, 3, 5]))
    >>> keys = fp8_keys(x, x)  # once
    >>> fp8_attention(x, keys, causal=True)
    JaggedTensor(users=3, values=[5, 2, 64], dtype=torch.float32, device=cpu)
    """
    check_backend(backend)
    _check_floats(q=q)
    _check_keys(q, keys)
    k = JaggedTensor._trusted(keys.k, keys.offsets)
    check_users(q, k)
    if checking():
        check_contents(q=q, k=k)
    band = resolve_window(causal, window)
    if schedule is not None:
        if not isinstance(schedule, AttentionSchedule):
            raise TypeError(f"schedule must be an AttentionSchedule, got {type(schedule).__name__}")
        check_schedule(schedule, q, k, k, band, None, None)
    scale = as_scale(scale, q.values.shape[2])
    on_hopper = is_hopper(q.device)
    if backend == "triton" and not on_hopper:
        raise ValueError(f"backend='triton' needs a Hopper GPU for FP8, got tensors on {q.device}")
    if backend == "native" or backend == "reference" or not on_hopper:
        q_kept = q.with_values(dequantise(*quantise_queries(q.values)))
        o, lse = without_autocast(jagged_attention)(
            q_kept, *keys.dequantised(), window=band, scale=scale, schedule=schedule,
            backend=backend, return_lse=True,
        )  # fmt: skip
        out = o.with_values(o.values.to(q.dtype))
        return (out, lse) if return_lse else out

    tile = fp8_config(q.values.shape[2]).tile_q
    if schedule is None or schedule.tile_q != tile:
        schedule = schedule_of_call(
            q.offsets, keys.offsets, q_tokens=q.values.shape[0], k_tokens=keys.k.shape[0],
            dense=None, window=band, head_dim=q.values.shape[2], keys=None, lists=None, tile_q=tile,
        )  # fmt: skip
    o, lse2 = call(
        ops.attention_fp8, rows_of_dims(q.values), keys.k, keys.v_t, keys.k_scale, keys.v_scale,
        schedule.rows, *band, scale, return_lse,
    )  # fmt: skip
    out = JaggedTensor._trusted(o, q.offsets)
    return (out, lse2 * math.log(2)) if return_lse else out


def _check_floats(**given: Any) -> None:
    for name, x in given.items():
        if not isinstance(x, JaggedTensor):
            raise TypeError(f"{name} must be a JaggedTensor, got {type(x).__name__}")
        if x.dtype not in _DTYPES:
            raise TypeError(f"{name} must be float16, bfloat16 or float32, got {x.dtype}")
        if x.values.dim() != 3 or x.values.shape[1] == 0:
            raise ValueError(f"{name} must be [T, H, D], got {tuple(x.values.shape)}")
        if x.values.shape[2] not in HEAD_DIMS:
            raise NotImplementedError(
                f"FP8 goes with a head_dim of 64 or 128, got {x.values.shape[2]} of {name}"
            )
        if wants_gradient(x.values):
            raise NotImplementedError(
                f"attention in FP8 has no gradient, and {name} wants one: detach it, or call under "
                "torch.no_grad()"
            )


def _check_keys(q: JaggedTensor, keys: FP8Keys) -> None:
    if not isinstance(keys, FP8Keys):
        raise TypeError(f"keys must be FP8Keys, as fp8_keys makes them, got {type(keys).__name__}")
    (_, heads, dim), (_, kv_heads, k_dim) = q.values.shape, keys.k.shape
    if dim != k_dim:
        raise ValueError(f"q and keys must have the same head_dim, got {dim} and {k_dim}")
    if heads % kv_heads:
        raise ValueError(f"q's heads must be a multiple of the keys', got {heads} and {kv_heads}")
    if q.device != keys.k.device:
        raise ValueError(f"q and keys must be on one device, got {q.device} and {keys.k.device}")


def _scale(name: str, scale: Tensor | None, x: JaggedTensor) -> Tensor:
    """[B, H] float32, contiguous."""
    if scale is None:
        return scales_of(x)
    users, heads = len(x), x.values.shape[1]
    if not isinstance(scale, Tensor) or scale.dtype != torch.float32:
        got = scale.dtype if isinstance(scale, Tensor) else type(scale).__name__
        raise TypeError(f"{name} must be a tensor of float32, got {got}")
    if scale.shape not in ((heads,), (users, heads)):
        raise ValueError(f"{name} must be [{heads}] or [{users}, {heads}], got {list(scale.shape)}")
    if scale.device != x.device:
        raise ValueError(f"{name} must be on {x.device}, got {scale.device}")
    return scale.expand(users, heads).contiguous()
