"""The k best tokens of each user: pieces of users first, then the best of a user's pieces.

A score and its token are one int64, so that the highest is the answer and ties go to the earlier
token: no order of work can change the result.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from jagged_kernels.core.launch import launch
from jagged_kernels.core.sizes import cdiv, power_of_two
from jagged_kernels.device.arithmetic import ordered

# Tokens of a piece, and of a step of a program.
PIECE, _BLOCK = 1024, 256
# Values a program of the backward.
_SCATTERED = 512
_LOWEST = tl.constexpr(-(2**63))


def launch_top_k(scores: Tensor, offsets: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """(values [B, k] in the dtype of the scores, positions [B, k] int64)."""
    users, tokens = offsets.shape[0] - 1, scores.shape[0]
    values = scores.new_empty((users, k))
    positions = offsets.new_empty((users, k), dtype=torch.int64)
    if users == 0:
        return values, positions
    padded_k = max(power_of_two(k), 2)
    # Piece j of user b is number offsets[b] // PIECE + b + j: no two pieces have the same, and
    # none needs the lengths to be summed.
    pieces = tokens // PIECE + users
    best = offsets.new_empty((pieces, padded_k), dtype=torch.int64)
    scores = scores.contiguous()
    tiles = {"K": padded_k, "PIECE": PIECE, "BLOCK": max(_BLOCK, padded_k)}
    found = (scores, offsets, best, users)
    launch(_best_of_pieces_kernel, pieces, found, tiles, num_warps=2)
    found = (scores, offsets, best, values, positions)
    launch(_best_of_users_kernel, users, found, {"k": k, **tiles}, num_warps=2)
    return values, positions


def launch_top_k_backward(
    d_values: Tensor, offsets: Tensor, positions: Tensor, tokens: int
) -> Tensor:
    """[tokens]: each value's gradient where it was, 0 elsewhere."""
    d_scores = d_values.new_zeros(tokens)
    count = positions.numel()
    if count:
        arguments = (d_values.contiguous(), positions.contiguous(), offsets, d_scores, count)
        launch(
            _scatter_kernel, cdiv(count, _SCATTERED), arguments,
            {"K": positions.shape[1], "BLOCK": _SCATTERED},
        )  # fmt: skip
    return d_scores


@triton.jit(do_not_specialize=["count"])
def _scatter_kernel(
    d_values_ptr, positions_ptr, offsets_ptr, d_scores_ptr, count,
    K: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < count
    position = tl.load(positions_ptr + place, mask=inside, other=-1)
    d_value = tl.load(d_values_ptr + place, mask=inside, other=0.0)
    first = tl.load(offsets_ptr + place // K, mask=inside, other=0)
    # No token is there twice.
    tl.store(d_scores_ptr + first + position, d_value, mask=position >= 0)


@triton.jit(do_not_specialize=["users"])
def _best_of_pieces_kernel(
    scores_ptr, offsets_ptr, best_ptr, users,
    K: tl.constexpr, PIECE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    piece = tl.program_id(0)
    # The last user whose first piece is not behind this one.
    user, last, left = piece * 0, piece * 0 + users - 1, users
    while left > 1:
        middle = user + (last - user + 1) // 2
        behind = tl.load(offsets_ptr + middle) // PIECE + middle > piece
        last = tl.where(behind, middle - 1, last)
        user = tl.where(behind, user, middle)
        left = (left + 1) // 2
    first = tl.load(offsets_ptr + user).to(tl.int32)
    length = tl.load(offsets_ptr + user + 1).to(tl.int32) - first
    begin = (piece - first // PIECE - user) * PIECE
    end = tl.minimum(begin + PIECE, length)
    best = tl.full([K], _LOWEST, tl.int64)
    for start in range(begin, end, BLOCK):
        place = start + tl.arange(0, BLOCK)
        inside = place < end
        score = tl.load(scores_ptr + first + place, mask=inside, other=0.0)
        best = _best(best, tl.where(inside, _key(score, place), _LOWEST), K)
    tl.store(best_ptr + piece.to(tl.int64) * K + tl.arange(0, K), best)


@triton.jit
def _best_of_users_kernel(
    scores_ptr, offsets_ptr, best_ptr, values_ptr, positions_ptr, k: tl.constexpr,
    K: tl.constexpr, PIECE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    user = tl.program_id(0)
    first = tl.load(offsets_ptr + user).to(tl.int32)
    length = tl.load(offsets_ptr + user + 1).to(tl.int32) - first
    candidates = best_ptr + (first // PIECE + user).to(tl.int64) * K
    best = tl.load(candidates + tl.arange(0, K))
    count = tl.cdiv(length, PIECE) * K
    for start in range(K, count, BLOCK):
        place = start + tl.arange(0, BLOCK)
        best = _best(best, tl.load(candidates + place, mask=place < count, other=_LOWEST), K)
    position = tl.where(best == _LOWEST, -1, 0x7FFFFFFF - (best & 0x7FFFFFFF))
    exists = position >= 0
    score = tl.load(scores_ptr + first + position, mask=exists, other=float("-inf"))
    rank = tl.arange(0, K)
    out = user.to(tl.int64) * k + rank
    tl.store(values_ptr + out, score, mask=rank < k)
    tl.store(positions_ptr + out, position, mask=rank < k)


@triton.jit
def _key(score, place):
    """int64 that orders as (score, earlier place)."""
    return (ordered(score).to(tl.int64) << 31) | (0x7FFFFFFF - place).to(tl.int64)


@triton.jit
def _best(best, keys, K: tl.constexpr):
    """The K highest of best [K] and keys, in decreasing order."""
    top = tl.topk(keys, K)
    both = tl.reshape(tl.join(best, top), [2 * K])
    return tl.topk(both, K)
