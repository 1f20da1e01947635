"""`prefixed_attention`: keys that all users share, in front of those of each.

A prompt, a context or a summary of a catalogue that every history begins with is stored once, not
once a user: all queries of the batch meet it as those of a few users, whose keys stay in cache, and
the two parts of each query are put together by their lse (`merge_parts`).
"""

from __future__ import annotations

from typing import Any, Literal, TypedDict, Unpack, overload

import torch
from torch import Tensor

from jagged_kernels.attention.api import jagged_attention
from jagged_kernels.attention.merge_parts import merge_parts
from jagged_kernels.core.autocast import as_autocast
from jagged_kernels.core.backends import Backend, multiprocessors
from jagged_kernels.core.contents import can_be_read, readable
from jagged_kernels.core.sizes import cdiv
from jagged_kernels.ops.layout.cat import jagged_cat
from jagged_kernels.schedule.policy.plain import DEFAULT_TILES
from jagged_kernels.schedule.schedule import (
    AttentionSchedule,
    attention_schedule,
)
from jagged_kernels.schedule.window import resolve_window
from jagged_kernels.tensors.arguments import not_a_tensor
from jagged_kernels.tensors.jagged import JaggedTensor
from jagged_kernels.tensors.nested import takes_nested

# Queries of a group: as many as the kernels for long histories are made for.
_GROUP_QUERIES = 1024
# Groups begin at whole tiles of queries, of any size that kernels have.
_STEP = 128
# Programs a multiprocessor that the gradients of keys are spread over.
_WAVES = 2


class _Options(TypedDict, total=False):
    """The options that do not change what is returned."""

    causal: bool
    window: tuple[int, int] | None
    scale: float | None
    schedule: AttentionSchedule | None
    prefix_schedule: AttentionSchedule | None
    backend: Backend


@overload
def prefixed_attention(
    q: JaggedTensor, k: JaggedTensor, v: JaggedTensor, prefix_k: Tensor, prefix_v: Tensor,
    *, return_lse: Literal[False] = ..., **options: Unpack[_Options],
) -> JaggedTensor: ...  # fmt: skip
@overload
def prefixed_attention(
    q: Tensor, k: JaggedTensor, v: JaggedTensor, prefix_k: Tensor, prefix_v: Tensor,
    *, return_lse: Literal[False] = ..., **options: Unpack[_Options],
) -> Tensor: ...  # fmt: skip
@overload
def prefixed_attention(
    q: JaggedTensor, k: JaggedTensor, v: JaggedTensor, prefix_k: Tensor, prefix_v: Tensor,
    *, return_lse: Literal[True], **options: Unpack[_Options],
) -> tuple[JaggedTensor, Tensor]: ...  # fmt: skip
@overload
def prefixed_attention(
    q: Tensor, k: JaggedTensor, v: JaggedTensor, prefix_k: Tensor, prefix_v: Tensor,
    *, return_lse: Literal[True], **options: Unpack[_Options],
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
@takes_nested
def prefixed_attention(
    q: JaggedTensor | Tensor,
    k: JaggedTensor,
    v: JaggedTensor,
    prefix_k: Tensor,
    prefix_v: Tensor,
    *,
    causal: bool = False,
    window: tuple[int, int] | None = None,
    scale: float | None = None,
    schedule: AttentionSchedule | None = None,
    prefix_schedule: AttentionSchedule | None = None,
    backend: Backend = "auto",
    return_lse: bool = False,
) -> JaggedTensor | Tensor | tuple[JaggedTensor | Tensor, Tensor]:
    """`jagged_attention` with the same keys in front of those of every user, without copying them.

    The result is that of attention over `jagged_cat([prefix_k, k])` and
    `jagged_cat([prefix_v, v])`; every query sees the whole prefix. No bias and no dropout.

    Args:
        q, k, v: as in `jagged_attention`.
        prefix_k: [P, Hk, D], P of 0 or more. prefix_v: [P, Hk, Dv].
        causal, window, scale: as in `jagged_attention`, of each user's own keys; the left side of
            `window` must be -1.
        schedule: of the users' own keys, as in `jagged_attention`.
        prefix_schedule: from `prefix_schedule(q, prefix_k)`, to share its construction between
            layers.
        backend: as in `jagged_attention`; "reference" puts the prefix in front of every user.
        return_lse: also return lse, over prefix and own keys.

    Returns:
        As `jagged_attention`. A user without keys of its own attends to the prefix. The gradients
        of prefix_k and prefix_v are sums over all users in a fixed order: they do not change from
        run to run. Does not wait for a GPU.

    Raises:
        TypeError, ValueError: as `jagged_attention`; a prefix of another shape, dtype or device; a
            window with a left side; a schedule of other queries or another prefix; under `causal`
            or a right side of `window`, a user whose first queries stand so far before its keys
            that they would not see the end of the prefix (a GPU stops at its next operation).

    Source: prefix sharing as in Hydragen, arXiv 2402.05099; FlashAttention-2, arXiv 2307.08691.

    >>> x = JaggedTensor(torch.randn(5, 2, 8), torch.tensor([0, 3, 3, 5]))
    >>> prompt = torch.randn(4, 2, 8)
    >>> out = prefixed_attention(x, x, x, prompt, prompt, causal=True)
    >>> joined = jagged_cat([prompt, x])
    >>> same = jagged_attention(x, joined, joined, causal=True)
    >>> torch.allclose(out.values, same.values, atol=1e-6)
    True
    """
    if torch._C._is_any_autocast_enabled():
        q, k, v, prefix_k, prefix_v = as_autocast(q, k, v, prefix_k, prefix_v)
    either: Any = q  # what is jagged or dense alike
    left, right = resolve_window(causal, window)
    if left >= 0:
        raise ValueError(f"the left side of window must be -1 with a prefix, got {window}")
    _check_prefix(k, v, prefix_k, prefix_v)
    options: dict[str, Any] = {"scale": scale, "backend": backend}
    if right >= 0 and prefix_k.shape[0]:
        _demand_whole_prefix(q, k, right)
    if backend == "reference" or prefix_k.shape[0] == 0:
        keys, values = k, v
        if prefix_k.shape[0]:
            keys, values = (jagged_cat(x, backend=backend) for x in ([prefix_k, k], [prefix_v, v]))
            schedule = None
        return jagged_attention(
            either, keys, values, causal=causal, window=window, schedule=schedule,
            return_lse=return_lse, **options,
        )  # fmt: skip

    own, own_lse = jagged_attention(
        either, k, v, causal=causal, window=window, schedule=schedule, return_lse=True, **options
    )
    of_prefix = _attend_prefix(q, prefix_k, prefix_v, prefix_schedule, options)
    if isinstance(own, JaggedTensor):
        o, lse = merge_parts(own.values, own_lse, *of_prefix, backend=backend)
        out = own.with_values(o)
    else:
        if either.dim() == 3:  # the same queries at every user have one part in common
            of_prefix = [x.expand(len(k), *x.shape).flatten(0, 1) for x in of_prefix]
        of_own = (own.flatten(0, 1), own_lse.flatten(0, 1))
        o, lse = merge_parts(*of_own, *of_prefix, backend=backend)
        out, lse = o.view(own.shape), lse.view(own_lse.shape)
    return (out, lse) if return_lse else out


@takes_nested
def prefix_schedule(q: JaggedTensor | Tensor, prefix_k: Tensor) -> AttentionSchedule:
    """What `prefixed_attention` builds for the keys that users share: once a batch, for all layers.

    Built without waiting for a GPU. Queries are dealt to a few users (`groups_of`), because the
    gradients of keys are computed by one program for each tile of keys of a user: a short prefix
    alone would leave most of a GPU idle.

    Args:
        q: [T, H, D] jagged, or dense [B, N, H, D] or [N, H, D].
        prefix_k: [P, Hk, D].

    Raises:
        TypeError, ValueError: arguments of wrong kind or shape.

    >>> x = JaggedTensor(torch.randn(5, 2, 8), torch.tensor([0, 3, 3, 5]))
    >>> prompt = torch.randn(4, 2, 8)
    >>> schedule = prefix_schedule(x, prompt)  # once a batch, for all layers
    >>> for layer in range(2):
    ...     x = prefixed_attention(x, x, x, prompt, prompt, prefix_schedule=schedule)
    >>> x
    JaggedTensor(users=3, values=[5, 2, 8], dtype=torch.float32, device=cpu)
    """
    if not isinstance(q, JaggedTensor | Tensor):
        raise TypeError(f"q must be a JaggedTensor or a tensor, got {type(q).__name__}")
    if not isinstance(prefix_k, Tensor):
        raise not_a_tensor("prefix_k", prefix_k)
    if prefix_k.dim() != 3:
        raise ValueError(f"prefix_k must be [P, H, D], got {tuple(prefix_k.shape)}")
    jagged_q, jagged_k, _ = _grouped(_all_queries(q), prefix_k, prefix_k, None)
    return attention_schedule(jagged_q, jagged_k, shared_offsets=False)


def groups_of(queries: int, prefix: int, kv_heads: int, device: torch.device) -> int:
    """Users that all queries are dealt to, each with a copy of the prefix: as many as it takes to
    give every multiprocessor gradients of keys to compute, but of no fewer than a thousand queries.

    The copies are small: together about one tile of keys for each program.
    """
    programs = max(cdiv(prefix, DEFAULT_TILES[1]) * kv_heads, 1)
    most = cdiv(_WAVES * multiprocessors(device), programs)
    return max(1, min(most, queries // _GROUP_QUERIES))


def _attend_prefix(
    q: JaggedTensor | Tensor,
    prefix_k: Tensor,
    prefix_v: Tensor,
    schedule: AttentionSchedule | None,
    options: dict[str, Any],
) -> list[Tensor]:
    """o [T, H, Dv] and lse [T, H] of all queries over the prefix."""
    jagged = _grouped(_all_queries(q), prefix_k, prefix_v, schedule)
    o, lse = jagged_attention(*jagged, schedule=schedule, return_lse=True, **options)
    return [o.values, lse]


def _all_queries(q: JaggedTensor | Tensor) -> Tensor:
    """[T, H, D]; those that all users share once."""
    if isinstance(q, JaggedTensor):
        return q.values
    return q.flatten(0, 1) if q.dim() == 4 else q


def _grouped(
    queries: Tensor, prefix_k: Tensor, prefix_v: Tensor, schedule: AttentionSchedule | None
) -> tuple[JaggedTensor, JaggedTensor, JaggedTensor]:
    """All queries as those of a few users, each with the whole prefix.

    Raises:
        TypeError: what is given for a schedule is none.
        ValueError: the schedule is of other queries or another prefix.
    """
    tokens, prefix = queries.shape[0], prefix_k.shape[0]
    device = queries.device
    groups = groups_of(tokens, prefix, prefix_k.shape[1], device)
    # Made there: a list of numbers would be copied to a GPU, and waited for.
    steps = torch.arange(groups + 1, device=device)
    each = cdiv(cdiv(tokens, groups), _STEP) * _STEP
    q_offsets, k_offsets = (steps * each).clamp(max=tokens), steps * prefix
    if schedule is not None:
        q_offsets, k_offsets = _offsets_of(schedule, q_offsets, k_offsets, tokens, prefix)
    q = JaggedTensor._trusted(queries, q_offsets)
    k, v = (x.expand(groups, *x.shape).flatten(0, 1) for x in (prefix_k, prefix_v))
    k = JaggedTensor._trusted(k, k_offsets)
    return q, k, k.with_values(v)


def _offsets_of(
    schedule: AttentionSchedule, q_offsets: Tensor, k_offsets: Tensor, tokens: int, prefix: int
) -> tuple[Tensor, Tensor]:
    """The schedule's own offsets, so that no GPU compares them with others."""
    if not isinstance(schedule, AttentionSchedule):
        kind = type(schedule).__name__
        raise TypeError(f"prefix_schedule must be an AttentionSchedule, got {kind}")
    users = q_offsets.shape[0] - 1
    built = (schedule.q_tokens, schedule.k_tokens, schedule.users)
    fits = built == (tokens, users * prefix, users) and schedule.window == (-1, -1)
    if fits and readable(q_offsets) and readable(schedule.q_offsets):
        fits = torch.equal(schedule.q_offsets, q_offsets)
        fits = fits and torch.equal(schedule.k_offsets, k_offsets)
    if not fits:
        raise ValueError(
            f"prefix_schedule must be that of prefix_schedule(q, prefix_k) for {tokens} queries "
            f"and a prefix of {prefix} tokens, got {schedule!r}"
        )
    return schedule.q_offsets, schedule.k_offsets


def _check_prefix(k: JaggedTensor, v: JaggedTensor, prefix_k: Tensor, prefix_v: Tensor) -> None:
    for name, prefix, own in (("k", prefix_k, k), ("v", prefix_v, v)):
        if not isinstance(own, JaggedTensor):
            raise TypeError(f"{name} must be a JaggedTensor, got {type(own).__name__}")
        if not isinstance(prefix, Tensor) or prefix.is_nested:
            raise not_a_tensor(f"prefix_{name}", prefix)
        if prefix.dim() != 3 or prefix.shape[1:] != own.values.shape[1:]:
            raise ValueError(
                f"prefix_{name} must be [P, H, D] for {name} {tuple(own.values.shape)}, "
                f"got {tuple(prefix.shape)}"
            )
        if prefix.dtype != own.values.dtype or prefix.device != own.device:
            raise TypeError(
                f"prefix_{name} must be {own.values.dtype} on {own.device} as {name} is, got "
                f"{prefix.dtype} on {prefix.device}"
            )
    if prefix_k.shape[0] != prefix_v.shape[0]:
        raise ValueError(
            "prefix_k and prefix_v must have the same tokens, "
            f"got {prefix_k.shape[0]} and {prefix_v.shape[0]}"
        )


def _demand_whole_prefix(q: JaggedTensor | Tensor, k: JaggedTensor, right: int) -> None:
    """The mask is aligned to the end: a user's first query must reach the end of the prefix."""
    if isinstance(q, JaggedTensor):
        if q.offsets is k.offsets or len(q) != len(k):
            return
        queries: Tensor | int = q.lengths
    else:
        queries = q.shape[-3]
    if not can_be_read(k.offsets):
        return
    reaches = k.lengths + (right + 1) >= queries
    what = f"a user has more queries than keys and {right + 1}, so that"
    what += " the first would not see the whole prefix"
    if not readable(k.offsets):
        torch._assert_async(reaches.all(), what)  # pyright: ignore[reportPrivateImportUsage]
    elif not reaches.all():
        raise ValueError(f"{what}: user {int((~reaches).nonzero()[0])}")
