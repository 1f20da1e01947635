"""Rules of which keys a query sees: what their masks are."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from attention_cases import DEVICE
from hypothesis import given, settings
from hypothesis import strategies as st
from key_cases import BLOCK, requests

from jagged_kernels import JaggedTensor, attention_schedule, jagged_attention
from jagged_kernels.core.launch import launch
from jagged_kernels.schedule.keys.rules import RequestKeys, SemiLocalKeys, StridedKeys
from jagged_kernels.schedule.keys.token_rule import token_visible

NUMPYS: dict[str, tuple[Any, Any]] = {
    "strided": (StridedKeys(2, 1, 1, 3, 16), lambda n: StridedKeys(n(2), n(1), n(1), n(3), n(16))),
    "semi-local": (SemiLocalKeys(2, 1, 16), lambda n: SemiLocalKeys(n(2), n(1), n(16))),
    "request": (RequestKeys(2, 1, 3, 16), lambda n: RequestKeys(n(2), n(1), n(3), n(16))),
}


@pytest.mark.parametrize("kind", [np.int32, np.int64], ids=["int32", "int64"])
@pytest.mark.parametrize("name", NUMPYS)
def test_numbers_of_numpy(name, kind):
    rule, made = NUMPYS[name]
    given = made(kind)
    assert all(x is None or type(x) is int for x in vars(given).values())
    assert repr(given) == repr(rule)
    h = JaggedTensor(torch.randn(9, 2, 8, device=DEVICE), torch.tensor([0, 4, 9], device=DEVICE))
    built = attention_schedule(h, keys=given).lists
    expected = attention_schedule(h, keys=rule).lists
    assert built is not None
    assert expected is not None
    assert torch.equal(built.row_ptr, expected.row_ptr)
    for backend in ("reference", "native", "triton"):
        options: Any = {"backend": backend}
        found = jagged_attention(h, h, h, keys=given, **options)
        assert torch.equal(found.values, jagged_attention(h, h, h, keys=rule, **options).values)


def test_a_window_of_numpy():
    h = JaggedTensor(torch.randn(9, 2, 8, device=DEVICE), torch.tensor([0, 4, 9], device=DEVICE))
    window: Any = (np.int64(2), np.int64(1))
    found = jagged_attention(h, h, h, window=window)
    assert torch.equal(found.values, jagged_attention(h, h, h, window=(2, 1)).values)
    assert attention_schedule(h, window=window).window == (2, 1)


def test_a_request_of_numpy_that_a_user_is_too_short_for():
    h = JaggedTensor(torch.zeros(1, 1, 8), torch.tensor([0, 1]))
    two: Any = np.int64(2)
    with pytest.raises(ValueError, match="user 0 has 1 tokens, fewer than its 2 targets"):
        attention_schedule(h, keys=RequestKeys(two))


def _causal(n: int) -> torch.Tensor:
    return torch.ones(n, n, dtype=torch.bool).tril()


def _blocks(n: int) -> torch.Tensor:
    """[n]: the block of each token."""
    return torch.arange(n) // BLOCK


@settings(max_examples=60, deadline=None)
@given(
    n=st.integers(0, 200), heads=st.integers(1, 8), local=st.integers(1, 4),
    stride=st.integers(1, 8), offset=st.integers(-9, 9),
)  # fmt: skip
def test_heads_see_every_block_among_them(n, heads, local, stride, offset):
    """S2-Attention, section 3: where there are as many heads as strides."""
    rule = StridedKeys(min(stride, heads), local, offset=offset, block=BLOCK)
    visible = rule.visible(n, heads)
    assert visible.shape == (heads, n, n)
    assert torch.equal(visible.any(0), _causal(n))


def test_heads_share_the_blocks_before_the_local_ones():
    """As many heads as strides: each older block is one head's."""
    visible = StridedKeys(4, 2, block=BLOCK).visible(160, 4)
    older = (_blocks(160)[:, None] - _blocks(160)) >= 2
    assert torch.equal(visible.sum(0)[older], torch.ones(int(older.sum()), dtype=torch.int64))
    assert visible[:, ~older & _causal(160)].all()


@pytest.mark.parametrize("local", [1, 3])
def test_short_users_have_the_causal_mask(local):
    rule = StridedKeys(7, local, offset=1, block=BLOCK)
    for n in range(local * BLOCK + 1):
        visible = rule.visible(n, 2)
        assert torch.equal(visible, _causal(n).expand(2, n, n))
    n = local * BLOCK + 1
    assert not torch.equal(rule.visible(n, 1)[0], _causal(n))


def test_steps_move_heads_apart():
    visible = StridedKeys(8, 1, block=BLOCK).visible(160, 2)  # a step of 4
    seen = [visible[head, -1].nonzero().flatten()[::BLOCK] // BLOCK for head in range(2)]
    assert [blocks.tolist() for blocks in seen] == [[0, 8, 9], [4, 9]]
    moved = StridedKeys(8, 1, step=1, offset=2, block=BLOCK).visible(160, 2)
    seen = [moved[head, -1].nonzero().flatten()[::BLOCK] // BLOCK for head in range(2)]
    assert [blocks.tolist() for blocks in seen] == [[6, 9], [5, 9]]


@settings(max_examples=60, deadline=None)
@given(
    n=st.integers(0, 40), m=st.integers(0, 40), window=st.integers(1, 50), first=st.integers(0, 50)
)
def test_semi_local(n, m, window, first):
    visible = SemiLocalKeys(window, first).visible(n, 3, keys=m)
    assert visible.shape == (1, n, m)
    for query in range(n):
        i = query + m - n
        seen = {j for j in range(m) if j <= i and (i - window < j or j < first)}
        assert set(visible[0, query].nonzero().flatten().tolist()) == seen


def _hstu(n: int, targets: int, contexts: int, window: int | None) -> torch.Tensor:
    """HSTU's mask, pair by pair, as facebookresearch/generative-recommenders defines it: contexts
    stand at place 0, the history at 1 and on, and targets at the one behind."""
    last = n - targets - max(contexts - 1, 0)

    def place(token: int) -> int:
        return min(max(token - max(contexts - 1, 0), 0), last)

    visible = torch.zeros(n, n, dtype=torch.bool)
    for i in range(n):
        for j in range(n):
            far = place(i) - place(j)
            seen = i == j or (far > 0 and (window is None or far <= window))
            visible[i, j] = seen or (contexts > 0 and place(i) == 0 and place(j) < last)
    return visible


@settings(max_examples=100, deadline=None)
@given(data=st.data(), n=st.integers(0, 30), window=st.none() | st.integers(1, 30))
def test_requests_are_masked_as_by_hstu(data, n, window):
    targets = data.draw(st.integers(0, n))
    contexts = data.draw(st.integers(0, n - targets))
    visible = RequestKeys(targets, contexts, window).visible(n, 2)
    assert visible.shape == (1, n, n)
    assert torch.equal(visible[0], _hstu(n, targets, contexts, window))


def test_a_request():
    visible = RequestKeys(targets=2, contexts=2, window=1).visible(6, 1)[0]
    assert visible.int().tolist() == [
        [1, 1, 1, 1, 0, 0],  # contexts: all but targets
        [1, 1, 1, 1, 0, 0],
        [1, 1, 1, 0, 0, 0],  # both contexts are one place away
        [0, 0, 1, 1, 0, 0],
        [0, 0, 0, 1, 1, 0],  # targets: the newest of the history, and themselves
        [0, 0, 0, 1, 0, 1],
    ]
    tokens = torch.arange(6)
    assert torch.equal(token_visible(tokens[:, None], tokens, 6, 1, 0, 2, 2), visible)


@settings(max_examples=60, deadline=None)
@given(data=st.data(), n=st.integers(0, 90))
def test_the_mask_of_tokens_is_the_rules(data, n):
    other = data.draw(st.integers(0, 5))
    rule = data.draw(requests([other, n]) | st.builds(
        SemiLocalKeys, window=st.integers(1, 90), first=st.integers(0, 90)
    ))  # fmt: skip
    tokens = torch.arange(n)
    values = rule.token_rule(2, torch.device(DEVICE)).of_user(1)
    visible = token_visible(tokens[:, None], tokens, n, *values)
    assert torch.equal(visible, rule.visible(n, 1, user=1)[0])


@settings(max_examples=15, deadline=None)
@given(data=st.data(), n=st.integers(1, 60))
def test_kernels_have_the_same_mask(data, n):
    from key_kernels import visible_kernel

    rule = data.draw(requests([n]) | st.builds(
        SemiLocalKeys, window=st.integers(1, 90), first=st.integers(0, 90)
    ))  # fmt: skip
    token_rule = rule.token_rule(1, torch.device(DEVICE))
    out = torch.zeros(64, 64, dtype=torch.int32, device=DEVICE)
    launch(
        visible_kernel, 1, (out, token_rule.targets, token_rule.contexts, n, *token_rule[:2]),
        {"SIZE": 64},
    )  # fmt: skip
    assert torch.equal(out[:n, :n].bool().cpu(), rule.visible(n, 1)[0])
    assert not out[:, n:].any()
    assert not out[n:].any()


def test_users_too_short_lose_contexts_first():
    visible = RequestKeys(targets=3, contexts=3).visible(4, 1)[0]
    assert torch.equal(visible, RequestKeys(targets=3, contexts=1).visible(4, 1)[0])
    visible = RequestKeys(targets=3, contexts=3).visible(2, 1)[0]
    assert torch.equal(visible, torch.eye(2, dtype=torch.bool))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: StridedKeys(0, 1), "stride must be at least 1, got 0"),
        (lambda: StridedKeys(4, 0), "local must be at least 1, got 0"),
        (lambda: StridedKeys(4, 1, step=-1), "step must be at least 0, got -1"),
        (lambda: StridedKeys(2**20 + 1, 1), "stride must be at most"),
        (lambda: StridedKeys(4, 1, block=48), "block must be a power of two from 16 to 128"),
        (lambda: SemiLocalKeys(0, 1), "window must be at least 1, got 0"),
        (lambda: SemiLocalKeys(1, -1), "first must be at least 0, got -1"),
        (lambda: SemiLocalKeys(1, 1, block=8), "got 8"),
        (lambda: RequestKeys(-1), "targets must be at least 0, got -1"),
        (lambda: RequestKeys(contexts=-1), "contexts must be at least 0, got -1"),
        (lambda: RequestKeys(window=0), "window must be at least 1, got 0"),
        (lambda: RequestKeys(torch.zeros(2, 1, dtype=torch.int32)), r"targets must be \[B\]"),
        (lambda: RequestKeys(block=256), "got 256"),
    ],
)
def test_wrong_numbers(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: StridedKeys(1.5, 1), "stride must be an int, got float"),  # pyright: ignore
        (lambda: StridedKeys(1, 1, offset="1"), "offset must be an int, got str"),  # pyright: ignore
        (lambda: RequestKeys([3]), "targets must be an int or a tensor, got list"),  # pyright: ignore
        (lambda: RequestKeys(contexts=torch.ones(2)), "contexts must be of int32 or int64"),
    ],
)
def test_wrong_kinds(make, message):
    with pytest.raises(TypeError, match=message):
        make()
