"""HSTU's attention functions (`generative_recommenders.ops.hstu_attention` of
github.com/facebookresearch/generative-recommenders, Apache-2.0) in terms of ours, for their tests.

Names and order of arguments are theirs. `max_seq_len` is what all weights are divided by; that it
sizes their padded tensors, and `sort_by_length`, does not matter here.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import silu

from jagged_kernels import JaggedTensor, RequestKeys, SiLU, jagged_attention


def hstu_mha(
    max_seq_len: int, alpha: float, q: Tensor, k: Tensor, v: Tensor, seq_offsets: Tensor,
    causal: bool = True, dropout_pr: float = 0.0, training: bool = True,
    num_targets: Tensor | None = None, max_attn_len: int = 0, contextual_seq_len: int = 0,
    min_full_attn_seq_len: int = 0, sort_by_length: bool = False,
    *, backend: Any = "auto", block: int = 64,
) -> Tensor:  # fmt: skip
    """[T, H, Dv]. `backend` and `block` are ours. Their Triton kernels have neither dropout nor
    `min_full_attn_seq_len`, nor attention that is not causal; nor has this."""
    assert causal
    assert (dropout_pr, min_full_attn_seq_len) == (0.0, 0)
    x = JaggedTensor(q, seq_offsets)
    keys = None
    if num_targets is not None or max_attn_len or contextual_seq_len:
        keys = RequestKeys(num_targets, contextual_seq_len, max_attn_len or None, block=block)
    out = jagged_attention(
        x, x.with_values(k), x.with_values(v),
        causal=True, keys=keys, scale=alpha, scores=SiLU(divide_by=max_seq_len), backend=backend,
    )  # fmt: skip
    return out.values


def delta_hstu_mha(
    max_seq_len: int, alpha: float, delta_q: Tensor, k: Tensor, v: Tensor, seq_offsets: Tensor,
    num_targets: Tensor | None = None, max_attn_len: int = 0, contextual_seq_len: int = 0,
    *, attention: Callable[..., Tensor] = hstu_mha, **options: Any,
) -> Tensor:  # fmt: skip
    """Of the same number of newest queries of each user, [B * delta, H, Dv]. Their mask is that of
    the whole history, in which the queries that are not asked for stand here as zeros."""
    users = len(seq_offsets) - 1
    delta = len(delta_q) // users
    newest = seq_offsets[1:, None] + torch.arange(-delta, 0, device=delta_q.device)
    q = delta_q.new_zeros(k.shape).index_copy(0, newest.flatten(), delta_q)
    out = attention(
        max_seq_len, alpha, q, k, v, seq_offsets, num_targets=num_targets,
        max_attn_len=max_attn_len, contextual_seq_len=contextual_seq_len, **options,
    )  # fmt: skip
    return out[newest.flatten()]


def plain_hstu_mha(
    max_seq_len: int, alpha: float, q: Tensor, k: Tensor, v: Tensor, seq_offsets: Tensor,
    num_targets: Tensor | None = None, max_attn_len: int = 0, contextual_seq_len: int = 0,
) -> Tensor:  # fmt: skip
    """What `hstu_mha` means, in plain PyTorch, one user after another."""
    outputs = [v[:0]]
    for user, (start, end) in enumerate(pairwise(seq_offsets.tolist())):
        mine, n = slice(start, end), end - start
        history = n - (0 if num_targets is None else int(num_targets[user]))
        seen = plain_mask(n, history, max_attn_len, contextual_seq_len).to(q.device)
        q_user, k_user, v_user = (x[mine].transpose(0, 1) for x in (q, k, v))
        weights = silu(alpha * q_user @ k_user.mT) / max_seq_len
        outputs.append((weights * seen @ v_user).transpose(0, 1))
    return torch.cat(outputs)


def plain_mask(n: int, history: int, max_attn_len: int, contextual_seq_len: int) -> Tensor:
    """[n, n] bool, query by key.

    Contexts, the first tokens, all have place 0, targets all the place behind the history, and
    the events between them places from 1 on. A token sees itself, and others at earlier places,
    no more than `max_attn_len` of them away (0: any). Contexts see all but targets.
    """
    token = torch.arange(n)
    first = max(contextual_seq_len - 1, 0)
    place = (token.clamp(max=history) - first).clamp(min=0)
    ahead = place[:, None] - place
    seen = ahead > 0
    if max_attn_len:
        seen &= ahead <= max_attn_len
    seen |= torch.eye(n, dtype=torch.bool)
    contexts = (token < contextual_seq_len)[:, None]
    return seen | (contexts & (token < history))
