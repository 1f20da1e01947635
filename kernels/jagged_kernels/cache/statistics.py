"""`key_statistics`: which keys the last queries of a user looked at, from scores made once more.

What is counted is small beside what it is made of: nothing of [queries, keys] is in memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from jagged_kernels.attention.flops import pairs_of_offsets
from jagged_kernels.core.autocast import without_autocast
from jagged_kernels.core.backends import Backend, choose_backend, or_native
from jagged_kernels.core.flops import define_flops
from jagged_kernels.core.operators import call, define_op
from jagged_kernels.core.sizes import as_int
from jagged_kernels.schedule.check import check_schedule
from jagged_kernels.schedule.policy.plain import MAX_HEAD_DIM
from jagged_kernels.schedule.schedule import (
    MOST_TOKENS,
    AttentionSchedule,
    attention_schedule,
    check_users,
)
from jagged_kernels.schedule.window import resolve_window
from jagged_kernels.tensors.checks import FLOATS, as_scale
from jagged_kernels.tensors.jagged import JaggedTensor
from jagged_kernels.tensors.nested import takes_nested

# A probability is below 1/n if it is so by more than rounding: of equal scores none is.
BELOW = 1 - 2.0**-10
# Scores that the native path has at a time.
_MAX_SCORES = 1 << 22


@dataclass(frozen=True, eq=False)
class KeyStatistics:
    """What `key_statistics` returns, of each key and key head, [Tk, Hk] over the keys' offsets.

    Attributes:
        unimportant: int32, queries in which the key had less than its share 1/n.
        mass: float32 (float64 for float64), the sum of its probabilities.

    Each counts the heads that share the key.

    >>> x = JaggedTensor(torch.zeros(3, 1, 4), torch.tensor([0, 3]))
    >>> _, lse = jagged_attention(x, x, x, causal=True, return_lse=True)
    >>> key_statistics(x, x, lse).mass.values[:, 0]
    tensor([1.8333, 0.8333, 0.3333])
    """

    unimportant: JaggedTensor
    mass: JaggedTensor


@takes_nested
def key_statistics(
    q: JaggedTensor,
    k: JaggedTensor,
    lse: Tensor,
    *,
    causal: bool = True,
    window: tuple[int, int] | None = None,
    scale: float | None = None,
    recent: int | None = 400,
    schedule: AttentionSchedule | None = None,
    backend: Backend = "auto",
) -> KeyStatistics:
    """What the last queries of each user made of its keys.

    Args:
        q, k: [Tq, H, D] and [Tk, Hk, D], as of the attention whose `lse` this is.
        lse: [Tq, H] natural, float32 (float64 for float64): from `jagged_attention` or
            `cached_attention`, with the same mask and scale.
        causal, window, scale, schedule: as in `jagged_attention`, but causal.
        recent: queries of a user that count, the last ones; None for all.
        backend: "triton", "native", "reference" or "auto" (triton on CUDA tensors). The reference
            makes probabilities without `lse`.

    Returns:
        For each key: in how many of these queries its probability was below 1/n, where n is how
        many keys the query sees (Scissorhands, arXiv 2305.17118, algorithm 2: the importance
        record), and the sum of its probabilities (H2O, arXiv 2306.14048). Summed over the H / Hk
        heads that share the key; a query that does not see it counts for neither.

        Below is by more than 0.1 percent: of n keys that are alike none is below 1/n, however they
        are rounded.

    Raises:
        TypeError, ValueError: arguments of wrong kind, dtype, shape or device, or a schedule of
            another batch.
        NotImplementedError: float64 or a head_dim above 256 on the triton backend.

    One pass over the keys, the queries that count and lse; without a gradient, without atomics.

    >>> q = JaggedTensor(torch.tensor([9.0, -9.0, 9.0]).view(3, 1, 1), torch.tensor([0, 3]))
    >>> _, lse = jagged_attention(q, q, q, causal=True, return_lse=True)
    >>> key_statistics(q, q, lse, recent=2).unimportant.values[:, 0].tolist()
    [1, 1, 0]
    """
    check_inputs(q, k, lse)
    recent = MOST_TOKENS if recent is None else as_int("recent", recent, otherwise=" or None")
    if recent < 1:
        raise ValueError(f"recent must be at least 1, got {recent}")
    recent = min(recent, MOST_TOKENS)
    band = resolve_window(causal, window)
    if schedule is not None:
        if not isinstance(schedule, AttentionSchedule):
            raise TypeError(f"schedule must be an AttentionSchedule, got {type(schedule).__name__}")
        check_schedule(schedule, q, k, k, band, None, None)
    dim = q.values.shape[2]
    scale = as_scale(scale, dim)
    chosen = choose_backend(backend, q.values)
    if chosen == "triton" and dim > MAX_HEAD_DIM:
        limit = f"the triton backend goes to head_dim {MAX_HEAD_DIM}, got {dim}"
        chosen = or_native(backend, limit)
    inputs = (q.values.detach(), k.values.detach(), lse.detach())
    rest = (q.offsets, k.offsets, *band, recent, scale)
    if chosen == "reference":
        counts, mass = _reference(*inputs, *rest)
    elif chosen == "native":
        counts, mass = call(key_statistics_native, *inputs, *rest)
    else:
        if schedule is None:
            schedule = attention_schedule(q, k, causal=causal, window=window)
        tiles = (schedule.rows_t, schedule.tile_k)
        counts, mass = call(key_statistics_triton, *inputs, *tiles, *rest)
    return KeyStatistics(k.with_values(counts), k.with_values(mass))


def check_inputs(q: JaggedTensor, k: JaggedTensor, lse: Tensor) -> None:
    """Whether there are statistics of these.

    Raises:
        TypeError, ValueError: not [Tq, H, D], [Tk, Hk, D] and [Tq, H] of the same users, of one
            dtype and device.
    """
    if not isinstance(q, JaggedTensor) or not isinstance(k, JaggedTensor):
        kinds = f"{type(q).__name__} and {type(k).__name__}"
        raise TypeError(f"q and k must be JaggedTensors, got {kinds}")
    shapes = tuple(q.values.shape), tuple(k.values.shape)
    (_, heads, dim), (_, kv_heads, k_dim) = (s if len(s) == 3 else (0, 0, 0) for s in shapes)
    if 0 in (heads, kv_heads, dim) or heads % kv_heads or dim != k_dim:
        raise ValueError(
            f"q and k must be [T, H, D] with q's heads a multiple of k's, got {shapes[0]} and "
            f"{shapes[1]}"
        )
    check_users(q, k)
    if q.dtype != k.dtype or q.dtype not in FLOATS:
        raise TypeError(f"q and k must be of one floating dtype, got {q.dtype} and {k.dtype}")
    if not isinstance(lse, Tensor) or lse.shape != q.values.shape[:2]:
        what = tuple(lse.shape) if isinstance(lse, Tensor) else type(lse).__name__
        raise ValueError(f"lse must be {tuple(q.values.shape[:2])}, of each query, got {what}")
    if lse.dtype != torch.promote_types(q.dtype, torch.float32):
        raise TypeError(f"lse must be float32, or float64 for float64, got {lse.dtype}")
    if not q.device == k.device == lse.device:
        raise ValueError(
            f"q, k and lse must be on one device, got {q.device}, {k.device}, {lse.device}"
        )


@without_autocast
def _reference(
    q: Tensor, k: Tensor, lse: Tensor, q_offsets: Tensor, k_offsets: Tensor,
    left: int, right: int, recent: int, scale: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(counts [Tk, Hk] int32, mass [Tk, Hk]): one user after another, by a softmax of its own."""
    compute = torch.promote_types(q.dtype, torch.float32)
    group = q.shape[1] // k.shape[1]
    counts = [torch.zeros(0, k.shape[1], dtype=torch.int32, device=q.device)]
    masses = [torch.zeros(0, k.shape[1], dtype=compute, device=q.device)]
    bounds = zip(q_offsets.tolist(), k_offsets.tolist(), strict=True)
    (q_start, k_start), *ends = bounds
    for q_end, k_end in ends:
        n, m = q_end - q_start, k_end - k_start
        queries = q[q_start:q_end].to(compute).transpose(0, 1)
        keys = k[k_start:k_end].to(compute).repeat_interleave(group, 1).transpose(0, 1)
        distance = torch.arange(m, device=q.device) - torch.arange(n, device=q.device)[:, None]
        distance = distance - (m - n)
        visible = torch.ones_like(distance, dtype=torch.bool)
        if left >= 0:
            visible &= distance >= -left
        if right >= 0:
            visible &= distance <= right
        scores = (scale * queries @ keys.mT).masked_fill(~visible, -math.inf)
        probabilities = scores.softmax(-1).masked_fill(~visible, 0.0)
        counted = visible.clone()
        counted[: max(n - recent, 0)] = False
        below = (probabilities * visible.sum(1, keepdim=True) < BELOW) & counted
        for parts, x in ((counts, below.int()), (masses, probabilities * counted)):
            parts.append(x.sum(1).view(k.shape[1], group, m).sum(1).t().to(parts[0].dtype))
        q_start, k_start = q_end, k_end
    return torch.cat(counts), torch.cat(masses)


def _key_statistics_native(
    q: Tensor, k: Tensor, lse: Tensor, q_offsets: Tensor, k_offsets: Tensor,
    left: int, right: int, recent: int, scale: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """As `_reference`, from `lse`: users of similar length are padded together."""
    compute, kv_heads = lse.dtype, k.shape[1]
    counts = torch.zeros(k.shape[:2], dtype=torch.int32, device=q.device)
    mass = torch.zeros(k.shape[:2], dtype=compute, device=q.device)
    for users, queries, keys in _groups(q_offsets, k_offsets, recent, q.shape[1]):
        n, m = (offsets.diff()[users, None, None] for offsets in (q_offsets, k_offsets))
        # Queries are counted from the last one back, keys from the first.
        back = torch.arange(queries, device=q.device)[None, :]
        key = torch.arange(keys, device=q.device)[None, :]
        q_there, k_there = back < n[:, 0], key < m[:, 0]
        q_index = torch.where(q_there, q_offsets[1:][users, None] - 1 - back, 0)
        k_index = torch.where(k_there, k_offsets[:-1][users, None] + key, 0)
        aligned = m - 1 - back[:, :, None]
        first = (aligned - left).clamp(min=0) if left >= 0 else torch.zeros_like(aligned)
        last = torch.minimum(aligned + right, m - 1) if right >= 0 else (m - 1).expand_as(aligned)
        visible = q_there[:, :, None] & k_there[:, None, :]
        visible = visible & (key[:, None] >= first) & (key[:, None] <= last)
        # [b, Hk, G, N, D] and [b, Hk, 1, D, M].
        rows = q[q_index].to(compute).unflatten(2, (kv_heads, -1)).permute(0, 2, 3, 1, 4)
        columns = k[k_index].to(compute).permute(0, 2, 3, 1)[:, :, None]
        norm = lse[q_index].unflatten(2, (kv_heads, -1)).permute(0, 2, 3, 1)[..., None]
        visible, share = visible[:, None, None], (last - first + 1)[:, None, None]
        probabilities = (scale * rows @ columns - norm).exp().masked_fill(~visible, 0.0)
        below = (probabilities * share < BELOW) & visible
        counts[k_index[k_there]] = below.int().sum((2, 3)).mT[k_there].int()
        mass[k_index[k_there]] = probabilities.sum((2, 3)).mT[k_there]
    return counts, mass


def _groups(
    q_offsets: Tensor, k_offsets: Tensor, recent: int, heads: int
) -> Iterator[tuple[Tensor, int, int]]:
    """(users, the most queries that count, the most keys): of similar lengths."""
    lengths = zip(q_offsets.diff().tolist(), k_offsets.diff().tolist(), strict=True)
    sizes = [(m, min(n, recent), user) for user, (n, m) in enumerate(lengths) if n and m]
    sizes.sort(reverse=True)
    while sizes:
        keys, queries, count = sizes[0][0], 0, 0
        for m, n, _ in sizes:
            most = max(queries, n)
            too_many = (count + 1) * most * keys * heads > _MAX_SCORES
            if count and (too_many or 4 * m < 3 * keys):
                break
            queries, count = most, count + 1
        users = torch.tensor([user for _, _, user in sizes[:count]], device=q_offsets.device)
        yield users, queries, keys
        sizes = sizes[count:]


def _key_statistics_triton(
    q: Tensor, k: Tensor, lse: Tensor, rows_t: Tensor, tile_k: int, q_offsets: Tensor,
    k_offsets: Tensor, left: int, right: int, recent: int, scale: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    from jagged_kernels.cache.triton_statistics import launch_statistics

    return launch_statistics(
        q, k, lse, rows_t, q_offsets, k_offsets,
        tile=tile_k, left=left, right=right, recent=recent, scale=scale, below=BELOW,
    )  # fmt: skip


def _empty(q: Tensor, k: Tensor, lse: Tensor, *rest: object) -> tuple[Tensor, Tensor]:
    return k.new_empty(k.shape[:2], dtype=torch.int32), lse.new_empty(k.shape[:2])


key_statistics_native = define_op(_key_statistics_native, fake=_empty)
key_statistics_triton = define_op(_key_statistics_triton, fake=_empty)


def _native_flops(
    q: Tensor, k: Tensor, lse: Tensor, q_offsets: Tensor, k_offsets: Tensor,
    left: int, right: int, recent: int, scale: float,
) -> Any:  # fmt: skip
    """q k^T alone."""
    pairs = pairs_of_offsets(q, k, q_offsets, k_offsets, left, right, recent=recent)
    return 2 * pairs * q.shape[1] * q.shape[2]


def _triton_flops(
    q: Tensor, k: Tensor, lse: Tensor, rows_t: Tensor, tile_k: int, *rest: Any
) -> Any:
    return _native_flops(q, k, lse, *rest)


define_flops(key_statistics_native, _native_flops)
define_flops(key_statistics_triton, _triton_flops)
