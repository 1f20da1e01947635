"""Tokens beyond the reach of 32 bits, in few pages of memory that the others leave untouched."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from attention_cases import DEVICE

from jagged_kernels.attention.scores.triton_bias import _score_index
from jagged_kernels.device.memory import load_block, load_numbers, store_block, store_numbers

WIDTH = 16
BLOCK = 16
# An address that is cut to 32 bits is one of the first tokens.
FAR = 2**32 // WIDTH


@triton.jit(do_not_specialize=["source", "target"])
def _move_kernel(x_ptr, source, target, BLOCK: tl.constexpr, WIDTH: tl.constexpr):
    block = load_block(x_ptr, source, source + BLOCK, WIDTH, BLOCK, WIDTH, WIDTH)
    store_block(x_ptr, block, target, target + BLOCK, WIDTH, BLOCK, WIDTH, WIDTH)


@triton.jit(do_not_specialize=["source", "target"])
def _move_numbers_kernel(x_ptr, source, target, BLOCK: tl.constexpr, WIDTH: tl.constexpr):
    numbers = load_numbers(x_ptr, source, source + BLOCK, WIDTH, BLOCK)
    store_numbers(x_ptr, numbers, target, target + BLOCK, WIDTH, BLOCK)


@triton.jit(do_not_specialize=["token", "keys"])
def _score_kernel(out_ptr, token, keys, BLOCK: tl.constexpr):
    query = token + tl.arange(0, BLOCK)
    place = (token * 0, token * 0, keys, token * 0, 0)
    tl.store(out_ptr + tl.arange(0, BLOCK), _score_index(place, query, query, 1, 2))


def test_scores_beyond_32_bits():
    """The number of a score of a bias, of a user whose history has more than 46,340 tokens."""
    found = torch.empty(BLOCK, dtype=torch.int64, device=DEVICE)
    _score_kernel[(1,)](found, 70_000, 80_000, BLOCK)
    token = torch.arange(70_000, 70_000 + BLOCK, device=DEVICE)
    assert torch.equal(found, (token * 80_000 + token) * 2 + 1)


@pytest.mark.parametrize(
    ("kernel", "columns"),
    [(_move_kernel, WIDTH), (_move_numbers_kernel, 1)],
    ids=["blocks", "numbers"],
)
def test_tokens_beyond_32_bits(kernel, columns):
    x = torch.empty(FAR + 2 * BLOCK, WIDTH, dtype=torch.int8, device=DEVICE)
    near, far = x[: 2 * BLOCK], x[FAR:]
    near.fill_(-1)
    far.fill_(-2)
    far[:BLOCK] = torch.arange(BLOCK * WIDTH, device=DEVICE).view(BLOCK, WIDTH) % 100
    moved = far[:BLOCK, :columns].clone()
    kernel[(1,)](x, FAR, FAR + BLOCK, BLOCK, WIDTH)
    assert torch.equal(far[BLOCK:, :columns], moved)
    kernel[(1,)](x, FAR, 0, BLOCK, WIDTH)
    assert torch.equal(near[:BLOCK, :columns], moved)
    assert (near[BLOCK:] == -1).all()
    assert (near[:BLOCK, columns:] == -1).all()
