"""Jagged attention in vectorised PyTorch: users of similar length are padded together.

Fast enough to train on a CPU, and the fallback wherever there is no Triton. Waste is bounded: a
bucket pads neither queries nor keys of a user by more than a quarter (and a few tokens). Memory
is: a user with too many scores for one bucket has its queries cut into chunks. Softmax
probabilities are recomputed in the backward (FlashAttention-2, section 3.1.2), so that what is
kept between the passes does not grow with the square of a history.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from jagged_kernels.attention.scores.bias_terms import (
    BiasGradients,
    BiasTerms,
    Places,
    bias_scores,
    scores_before,
)
from jagged_kernels.attention.scores.dropout import keep_mask
from jagged_kernels.attention.scores.policy import d_scores as score_gradients
from jagged_kernels.attention.scores.policy import reference_of
from jagged_kernels.attention.seen.products import is_finite, seen_product
from jagged_kernels.schedule.keys.lists import KeyLists
from jagged_kernels.schedule.keys.token_rule import token_visible

# Scores that one bucket may hold at a time: 64 MB in float32. Those of one query are not cut.
_MAX_SCORES = 1 << 24
# By which a user may be padded besides a quarter: the shortest histories are one class.
_SLACK_TOKENS = 9


@dataclass(frozen=True)
class Mask:
    """Everything that changes the scores besides q and k (see `attention_reference`)."""

    window: tuple[int, int]
    scale: float
    bias: BiasTerms | None
    dropout_p: float
    dropout_seed: Tensor | None
    scores: str = ""  # the key of a policy, "" for softmax
    divide_by: float = 0.0  # its n, 0 for the number of the user's keys
    lists: KeyLists | None = None


@dataclass
class _Bucket:
    """b users padded to N queries and M keys; or N queries of one user, from its query `first`."""

    users: Tensor  # [b]
    first: int
    q_index: Tensor  # [b, N] token of each padded place, 0 where there is none
    k_index: Tensor  # [b, M]
    q_valid: Tensor  # [b, N]
    k_valid: Tensor  # [b, M]
    visible: Tensor | None  # [b, 1 or H, N, M], None when everything is visible
    places: Places | None  # [b, N, M] with a bias
    keys: Tensor  # [b, 1, 1, 1] how many each user has

    def seen(self) -> Tensor:
        """[b, 1 or H, N, M]: `visible`, and not by a place without a query."""
        seen = (self.q_valid[:, :, None] & self.k_valid[:, None, :])[:, None]
        return seen if self.visible is None else seen & self.visible


def attention_native_forward(
    q: Tensor, k: Tensor, v: Tensor, q_offsets: Tensor, k_offsets: Tensor, mask: Mask
) -> tuple[Tensor, Tensor]:
    """Same arguments and results as `attention_reference`."""
    compute = torch.promote_types(q.dtype, torch.float32)
    o = q.new_zeros((q.shape[0], q.shape[1], v.shape[2]))
    lse = q.new_full((q.shape[0], q.shape[1]), -math.inf, dtype=compute)
    for bucket in _buckets(q_offsets, k_offsets, q.shape[1], mask):
        values = _gather(v, bucket.k_index, bucket.k_valid, compute)
        scores = _scores(
            _gather(q, bucket.q_index, bucket.q_valid, compute),
            _gather(k, bucket.k_index, bucket.k_valid, compute),
            bucket,
            mask,
        )
        if mask.scores:
            top, total = 0.0, torch.ones_like(scores[..., :1])
            weights = _weights(scores, bucket, mask)
        else:
            top = scores.amax(-1, keepdim=True)
            top.masked_fill_(top == -math.inf, 0.0)
            weights = scores.sub_(top).exp_()
            total = weights.sum(-1, keepdim=True)
        if mask.dropout_p:
            weights = weights * _kept(bucket, q.shape[1], mask)
        out = _by_group(weights, values)
        if not is_finite(out):
            out = seen_product(weights, values, bucket.seen(), _by_group)
        # A query that sees nothing has weights 0 and total 0.
        out /= total.clamp(min=torch.finfo(compute).tiny)
        o[bucket.q_index[bucket.q_valid]] = _tokens(out, bucket.q_valid).to(o.dtype)
        lse[bucket.q_index[bucket.q_valid]] = _tokens(top + total.log(), bucket.q_valid)[..., 0]
    return o, lse


def attention_native_backward(
    d_o: Tensor,
    d_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    q_offsets: Tensor,
    k_offsets: Tensor,
    mask: Mask,
) -> tuple[Tensor, Tensor, Tensor, list[Tensor | None]]:
    """Gradients of q, k, v and of `BiasTerms.learned` (None where there is none)."""
    compute = lse.dtype
    # Contiguous, as the operator's fake says: `zeros_like` would keep the inputs' strides.
    dq, dk, dv = (x.new_zeros(x.shape) for x in (q, k, v))
    d_bias = None if mask.bias is None else BiasGradients(mask.bias)
    dk_pad = dv_pad = q.new_empty(0)
    # Each score's gradient is p * (dp - delta), and lse passes on p times its own gradient.
    # Of weights by a policy neither is asked for.
    delta = (d_o.to(compute) * o.to(compute)).sum(-1)
    if d_lse is not None:
        delta = delta - d_lse
    for bucket in _buckets(q_offsets, k_offsets, q.shape[1], mask):
        q_pad = _gather(q, bucket.q_index, bucket.q_valid, compute)
        k_pad = _gather(k, bucket.k_index, bucket.k_valid, compute)
        v_pad = _gather(v, bucket.k_index, bucket.k_valid, compute)
        do_pad = _gather(d_o, bucket.q_index, bucket.q_valid, compute)
        lse_pad = _gather(lse[..., None], bucket.q_index, bucket.q_valid, compute)
        delta_pad = _gather(delta[..., None], bucket.q_index, bucket.q_valid, compute)

        scores = _scores(q_pad, k_pad, bucket, mask)
        if mask.scores:
            weights = _weights(scores, bucket, mask)
        else:
            # A place without a query has no lse, and its scores may be anything: probability 0.
            lse_pad = lse_pad.masked_fill(lse_pad == -math.inf, 0.0)
            lse_pad.masked_fill_(~bucket.q_valid[:, None, :, None], math.inf)
            weights = scores.sub_(lse_pad).exp_()
        d_weights = _by_group(do_pad, v_pad.transpose(-1, -2))
        if mask.dropout_p:
            kept = _kept(bucket, q.shape[1], mask)
            d_weights = d_weights * kept
            dropped = weights * kept
        else:
            dropped = weights
        if mask.scores:
            d_weights = d_weights.div_(_divisor(bucket, mask)).masked_fill_(~bucket.seen(), 0.0)
            d_scores = score_gradients(mask.scores, scores, d_weights)
        else:
            d_scores = weights * d_weights.sub_(delta_pad)
        valid_q, valid_k = bucket.q_valid, bucket.k_valid
        dk_before, dv_before = dk_pad, dv_pad
        dq_pad = _by_group(d_scores, k_pad)
        dk_pad = _sum_group(d_scores.transpose(-1, -2) @ q_pad, k.shape[1])
        dv_pad = _sum_group(dropped.transpose(-1, -2) @ do_pad, v.shape[1])
        if not is_finite(dq_pad, dk_pad, dv_pad):
            seen = bucket.seen()
            seen_t = seen.transpose(-1, -2)
            d_scores = d_scores.masked_fill(~seen, 0.0)
            d_scores_t, dropped_t = d_scores.transpose(-1, -2), dropped.transpose(-1, -2)
            dq_pad = seen_product(d_scores, k_pad, seen, _by_group)
            dk_pad = _sum_group(seen_product(d_scores_t, q_pad, seen_t), k.shape[1])
            dv_pad = _sum_group(seen_product(dropped_t, do_pad, seen_t), v.shape[1])
        dq_pad, dk_pad = dq_pad * mask.scale, dk_pad * mask.scale
        if d_bias is not None and bucket.places is not None:
            inside = valid_q[:, None, :, None] & valid_k[:, None, None, :]
            d_bias.add(d_scores.masked_fill(~inside, 0.0).movedim(1, 3), bucket.places)
        if bucket.first:  # a later chunk of a user, whose keys the chunks before have seen too
            dk_pad, dv_pad = dk_pad + dk_before, dv_pad + dv_before
        dq[bucket.q_index[valid_q]] = _tokens(dq_pad, valid_q).to(dq.dtype)
        dk[bucket.k_index[valid_k]] = _tokens(dk_pad, valid_k).to(dk.dtype)
        dv[bucket.k_index[valid_k]] = _tokens(dv_pad, valid_k).to(dv.dtype)
    return dq, dk, dv, [None] * 4 if d_bias is None else d_bias.results()


def _buckets(q_offsets: Tensor, k_offsets: Tensor, heads: int, mask: Mask) -> Iterator[_Bucket]:
    """Users with queries and keys, in groups of similar lengths."""
    n_host, m_host = q_offsets.diff().tolist(), k_offsets.diff().tolist()
    present = [u for u, (n, m) in enumerate(zip(n_host, m_host, strict=True)) if n and m]
    classes = {u: (_length_class(m_host[u]), _length_class(n_host[u])) for u in present}
    present.sort(key=lambda u: (classes[u], m_host[u], n_host[u]), reverse=True)
    first_scores = None
    if mask.bias is not None and mask.bias.scores is not None:
        first_scores = scores_before(q_offsets, k_offsets)

    begin = 0
    while begin < len(present):
        keys, alike = m_host[present[begin]], classes[present[begin]]
        queries, end = 0, begin
        while end < len(present) and classes[present[end]] == alike:
            longest = max(queries, n_host[present[end]])
            if end > begin and (end - begin + 1) * longest * keys * heads > _MAX_SCORES:
                break
            queries, end = longest, end + 1
        users = torch.tensor(present[begin:end], device=q_offsets.device)
        chunk = max(1, _MAX_SCORES // (keys * heads)) if end == begin + 1 else queries
        for first in range(0, queries, chunk):
            rows = (first, min(first + chunk, queries))
            yield _bucket(users, rows, keys, heads, q_offsets, k_offsets, first_scores, mask)
        begin = end


def _length_class(tokens: int) -> int:
    """The longest of a class has less than 5/4 of the shortest's tokens and `_SLACK_TOKENS`."""
    return int(math.log1p(tokens / (4 * _SLACK_TOKENS)) / math.log(5 / 4))


def _bucket(
    users: Tensor,
    rows: tuple[int, int],
    keys: int,
    heads: int,
    q_offsets: Tensor,
    k_offsets: Tensor,
    first_scores: Tensor | None,
    mask: Mask,
) -> _Bucket:
    """Of the users' queries from rows[0] to rows[1]."""
    q_index, q_valid = _places(users, *rows, q_offsets)
    k_index, k_valid = _places(users, 0, keys, k_offsets)
    n, m = (offsets.diff()[users, None, None] for offsets in (q_offsets, k_offsets))
    left, right = mask.window
    row = torch.arange(*rows, device=users.device)[:, None]
    column = torch.arange(keys, device=users.device)

    distance = column - row - (m - n)
    visible = k_valid[:, None, :]
    if left >= 0:
        visible = visible & (distance >= -left)
    if right >= 0:
        visible = visible & (distance <= right)
    visible = visible[:, None]
    if mask.lists is not None:
        shown = _listed(mask.lists, users, rows, row, column, n, m, q_offsets)
        visible = visible & shown.repeat_interleave(heads // mask.lists.groups, 1)
    places = None
    if mask.bias is not None:
        elapsed, score = None, None
        if mask.bias.q_times is not None and mask.bias.k_times is not None:
            q_times, k_times = mask.bias.q_times[q_index], mask.bias.k_times[k_index]
            elapsed = (q_times[:, :, None] - k_times[:, None, :]).abs()
        if first_scores is not None:
            inside = q_valid[:, :, None] & k_valid[:, None, :]
            score = torch.where(inside, first_scores[users][:, None, None] + row * m + column, 0)
        places = Places(distance, elapsed, score)
    everything = left < 0 and right < 0 and mask.lists is None and bool(k_valid.all())
    return _Bucket(
        users,
        rows[0],
        q_index,
        k_index,
        q_valid,
        k_valid,
        None if everything else visible,
        places,
        m[..., None],
    )


def _listed(
    lists: KeyLists,
    users: Tensor,
    rows: tuple[int, int],
    row: Tensor,
    column: Tensor,
    n: Tensor,
    m: Tensor,
    q_offsets: Tensor,
) -> Tensor:
    """[b, groups, N, M]: the pairs that lists show, of queries rows[0] to rows[1]."""
    block, groups = lists.block, lists.groups
    first = rows[0] // block
    tiles, blocks = -(-rows[1] // block) - first, -(-column.shape[0] // block)
    tile = torch.arange(first, first + tiles, device=users.device)
    number = (q_offsets[:-1][users] // block + users)[:, None] + tile
    # Numbers behind a user's last tile are other users'.
    exists = tile * block < n[:, :, 0]
    entry = number[:, :, None] * groups + torch.arange(groups, device=users.device)
    entry = torch.where(exists[:, :, None], entry, 0)
    begin, end = lists.row_ptr[entry].long(), lists.row_ptr[entry + 1].long()
    counts = torch.where(exists[:, :, None], end - begin, 0).flatten()
    shown = torch.zeros((counts.shape[0], blocks), dtype=torch.bool, device=users.device)
    owner = torch.arange(counts.shape[0], device=users.device).repeat_interleave(counts)
    place = torch.arange(owner.shape[0], device=users.device)
    place = place - (counts.cumsum(0) - counts)[owner] + begin.flatten()[owner]
    shown[owner, lists.col[place].long() // 2] = True
    shown = shown.view(users.shape[0], tiles, groups, blocks).transpose(1, 2)
    shown = shown[:, :, row[:, 0] // block - first][..., column // block]
    if lists.rule is None:
        return shown
    left, limit, *counted = lists.rule
    targets, contexts = (0 if x is None else x[users][:, None, None].long() for x in counted)
    return shown & token_visible(row + (m - n), column, m, left, limit, targets, contexts)[:, None]


def _places(users: Tensor, first: int, last: int, offsets: Tensor) -> tuple[Tensor, Tensor]:
    start, end = offsets[:-1][users, None], offsets[1:][users, None]
    index = start + torch.arange(first, last, device=users.device)
    valid = index < end
    return torch.where(valid, index, 0), valid


def _gather(x: Tensor, index: Tensor, valid: Tensor, dtype: torch.dtype) -> Tensor:
    """[T, H, D] -> [b, H, L, D], zero where there is no token."""
    padded = x[index].masked_fill(~valid[:, :, None, None], 0.0)
    return padded.to(dtype).transpose(1, 2)


def _tokens(padded: Tensor, valid: Tensor) -> Tensor:
    """[b, H, L, D] -> [tokens, H, D]."""
    return padded.transpose(1, 2)[valid]


def _scores(q: Tensor, k: Tensor, bucket: _Bucket, mask: Mask) -> Tensor:
    """[b, H, N, M], -inf (0 for a policy) where a query does not see a key."""
    scores = _by_group(q, k.transpose(-1, -2)).mul_(mask.scale)
    if mask.bias is not None and bucket.places is not None:
        scores += bias_scores(mask.bias, bucket.places, scores.dtype).movedim(3, 1)
    if bucket.visible is not None:
        # A function of one score need not stand infinity.
        scores.masked_fill_(~bucket.visible, 0.0 if mask.scores else -math.inf)
    return scores


def _weights(scores: Tensor, bucket: _Bucket, mask: Mask) -> Tensor:
    """By a policy, 0 where nothing is seen."""
    weights = reference_of(mask.scores)(scores) / _divisor(bucket, mask)
    return weights.masked_fill(~bucket.seen(), 0.0)


def _divisor(bucket: _Bucket, mask: Mask) -> Tensor | float:
    return mask.divide_by or bucket.keys


def _kept(bucket: _Bucket, heads: int, mask: Mask) -> Tensor:
    """[b, H, N, M]: 1 / (1 - p) where a probability is kept, 0 where it is dropped."""
    assert mask.dropout_seed is not None
    device = bucket.users.device
    keep = keep_mask(
        mask.dropout_seed,
        bucket.users[:, None, None, None],
        torch.arange(heads, device=device)[:, None, None],
        torch.arange(bucket.first, bucket.first + bucket.q_index.shape[1], device=device)[:, None],
        torch.arange(bucket.k_index.shape[1], device=device),
        mask.dropout_p,
    )
    return keep / (1 - mask.dropout_p)


def _by_group(per_head: Tensor, per_kv_head: Tensor) -> Tensor:
    """[b, H, N, K] @ [b, Hk, K, M], each key head serving the H / Hk heads of its group."""
    if per_head.shape[1] == per_kv_head.shape[1]:
        return per_head @ per_kv_head
    grouped = per_head.unflatten(1, (per_kv_head.shape[1], -1))
    return (grouped @ per_kv_head[:, :, None]).flatten(1, 2)


def _sum_group(per_head: Tensor, kv_heads: int) -> Tensor:
    """[b, H, M, D] -> [b, Hk, M, D], the sum over each group of heads."""
    if per_head.shape[1] == kv_heads:
        return per_head
    return per_head.unflatten(1, (kv_heads, -1)).sum(2)
