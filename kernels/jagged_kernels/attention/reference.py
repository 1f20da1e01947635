"""The specification of jagged attention: one user after another, in plain PyTorch.

Differentiable by autograd, any device, any dtype up to float64 (half types compute in float32,
and autocast changes nothing; the backward is autograd's, to be called outside of autocast).
Slow on purpose; the other backends are held against it.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from jagged_kernels.attention.scores.bias_terms import BiasTerms, Places, bias_scores
from jagged_kernels.attention.scores.dropout import keep_mask
from jagged_kernels.attention.scores.policy import Scores, reference_of
from jagged_kernels.attention.seen.products import scores_of, weighted_sum
from jagged_kernels.core.autocast import without_autocast
from jagged_kernels.ops.users import zeros_of
from jagged_kernels.schedule.keys.lists import KeyLists, expand_lists
from jagged_kernels.schedule.keys.rules import KeyRule


@without_autocast
def attention_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_offsets: Tensor,
    k_offsets: Tensor,
    *,
    window: tuple[int, int],
    scale: float,
    bias: BiasTerms | None = None,
    dropout_p: float = 0.0,
    dropout_seed: Tensor | None = None,
    scores: Scores | None = None,
    keys: KeyRule | KeyLists | None = None,
) -> tuple[Tensor, Tensor]:
    """softmax(scale * q k^T + bias) v for every user and head.

    Args:
        q: [Tq, H, D]. k: [Tk, Hk, D]. v: [Tk, Hk, Dv]. H is a multiple of Hk.
        bias: see `scores.bias_terms.BiasTerms`.
        dropout_p, dropout_seed: see `dropout.keep_mask`.
        scores: weight(score) / n in place of softmax.
        keys: what is visible beside `window`.

    Returns:
        o [Tq, H, Dv] in q's dtype and lse [Tq, H], the natural log of the sum of exponentials
        (float32, or float64 for float64 inputs), which says nothing with `scores`. A query that
        sees no key gives 0 and -inf.
    """
    compute = torch.promote_types(q.dtype, torch.float32)
    group = q.shape[1] // k.shape[1]
    left, right = window
    # Empty parts first, so that a batch of no users still has a result (and gradients).
    learned = () if bias is None else bias.learned()
    wanted = [x[:0] for x in (k, v, *learned) if x is not None]
    lses = [zeros_of((0, q.shape[1]), q[:0].to(compute), *wanted)]
    outputs = [lses[0][..., None].expand(-1, -1, v.shape[2])]
    first_score = 0
    bounds = zip(q_offsets.tolist(), k_offsets.tolist(), strict=True)
    (q_start, k_start), *ends = bounds
    for user, (q_end, k_end) in enumerate(ends):
        n, m = q_end - q_start, k_end - k_start
        # [H, n, D], [H, m, D] and [H, m, Dv].
        q_user = q[q_start:q_end].to(compute).transpose(0, 1)
        k_user, v_user = (
            x[k_start:k_end].to(compute).repeat_interleave(group, dim=1).transpose(0, 1)
            for x in (k, v)
        )
        # Aligned to the end: the last query stands at the last key.
        distance = torch.arange(m, device=q.device) - torch.arange(n, device=q.device)[:, None]
        distance = distance - (m - n)
        visible = torch.ones_like(distance, dtype=torch.bool)
        if left >= 0:
            visible &= distance >= -left
        if right >= 0:
            visible &= distance <= right
        if keys is not None:
            # [H or 1, n, m]
            shown = _shown(keys, user, (q_start, q_end), (k_start, k_end), q.shape[1])
            visible = visible & shown.to(q.device)

        logits = scale * scores_of(q_user, k_user, visible)
        if bias is not None:
            elapsed = None
            if bias.q_times is not None and bias.k_times is not None:
                q_times = bias.q_times[q_start:q_end]
                elapsed = (q_times[:, None] - bias.k_times[k_start:k_end]).abs()
            flat = torch.arange(n * m, device=q.device).view(n, m) + first_score
            added = bias_scores(bias, Places(distance, elapsed, flat), compute)
            logits = logits + added.movedim(2, 0)
        if scores is None:
            logits = logits.masked_fill(~visible, -math.inf)
            sees_something = visible.any(-1)
            # softmax of nothing is 0 here, not NaN; in its gradient too.
            weights = logits.masked_fill(~sees_something[..., None], 0.0).softmax(-1)
            weights = weights.masked_fill(~visible, 0.0)
            lse = logits.masked_fill(~sees_something[..., None], 0.0).logsumexp(-1)
            lse = lse.masked_fill(~sees_something, -math.inf)
        else:
            weights = reference_of(scores.key)(logits).masked_fill(~visible, 0.0)
            weights = weights / (max(m, 1) if scores.divide_by is None else scores.divide_by)
            lse = logits.new_zeros(logits.shape[:2])

        if dropout_p:
            assert dropout_seed is not None
            heads = torch.arange(q.shape[1], device=q.device)[:, None, None]
            rows = torch.arange(n, device=q.device)[:, None]
            columns = torch.arange(m, device=q.device)
            keep = keep_mask(dropout_seed, user, heads, rows, columns, dropout_p)
            weights = weights * keep / (1 - dropout_p)
        outputs.append(weighted_sum(weights, v_user, visible).transpose(0, 1))
        lses.append(lse.t())
        q_start, k_start, first_score = q_end, k_end, first_score + n * m
    return torch.cat(outputs).to(q.dtype), torch.cat(lses)


def _shown(
    keys: KeyRule | KeyLists,
    user: int,
    queries: tuple[int, int],
    of_keys: tuple[int, int],
    heads: int,
) -> Tensor:
    """[H or 1, n, m] bool: the pairs of a user that rules or lists show."""
    if isinstance(keys, KeyLists):
        shown = expand_lists(keys, user, queries, of_keys)
        return shown.repeat_interleave(heads // keys.groups, 0)
    n, m = queries[1] - queries[0], of_keys[1] - of_keys[0]
    return keys.visible(n, heads, user=user, keys=m)
