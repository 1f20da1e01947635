"""Calls without a schedule share the tables that one of them built, while offsets are the same."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from attention_cases import DEVICE

from jagged_kernels import JaggedTensor, SemiLocalKeys, jagged_attention
from jagged_kernels.schedule import kept, schedule

ENDS = [0, 3, 3, 9, 20]


def offsets_of(ends: list[int] = ENDS) -> torch.Tensor:
    return torch.tensor(ends, device=DEVICE)


def jagged(offsets: torch.Tensor, *, dim: int = 16) -> JaggedTensor:
    return JaggedTensor(torch.randn(20, 2, dim, device=DEVICE), offsets, validate=False)


def attend(q: Any, k: JaggedTensor, **options: Any) -> torch.Tensor:
    out = jagged_attention(q, k, k, backend="triton", **options)
    expected = jagged_attention(q, k, k, backend="reference", **options)
    values = [x.values if isinstance(x, JaggedTensor) else x for x in (out, expected)]
    torch.testing.assert_close(*values, rtol=1e-4, atol=1e-5)
    return values[0]


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """The tokens of each pair of tables that was built."""
    found: list[tuple[int, int]] = []
    build = schedule.build_tables

    def counted(q_offsets, k_offsets, tokens, *rest, **options):
        found.append(tokens)
        return build(q_offsets, k_offsets, tokens, *rest, **options)

    monkeypatch.setattr(schedule, "build_tables", counted)
    return found


def test_layers_share_tables(built) -> None:
    x = jagged(offsets_of())
    for _ in range(3):
        attend(x, x.with_values(torch.randn_like(x.values)), causal=True)
    assert len(built) == 1
    attend(x, x)  # another mask
    attend(x, x, causal=True)
    assert len(built) == 2


def test_gradients_of_shared_tables(built) -> None:
    x = jagged(offsets_of())
    gradients = []
    for backend in ("triton", "triton", "reference"):
        leaf = x.values.clone().requires_grad_()
        y = x.with_values(leaf)
        jagged_attention(y, y, y, causal=True, backend=backend).values.square().sum().backward()
        gradients.append(leaf.grad)
    assert len(built) == 1
    assert torch.equal(gradients[0], gradients[1])
    torch.testing.assert_close(gradients[1], gradients[2], rtol=1e-4, atol=1e-5)


def test_what_changed_is_built_again(built) -> None:
    offsets = offsets_of()
    x = jagged(offsets)
    attend(x, x)
    offsets[3] -= 2
    attend(x, x)
    assert len(built) == 2


def test_queries_of_their_own(built) -> None:
    """Other offsets of queries than before have tables of their own, and the same ones do not."""
    k = jagged(offsets_of())
    q, other = jagged(offsets_of([0, 5, 6, 7, 20])), jagged(offsets_of([0, 1, 2, 3, 20]))
    for x in (q, q, other, other):
        attend(x, k)
    assert len(built) == 2
    q.offsets[1] -= 1
    attend(q, k)
    q.offsets[1] -= 1
    attend(q, k)
    assert len(built) == 4


def test_dense_queries(built) -> None:
    k = jagged(offsets_of())
    q = torch.randn(4, 2, 2, 16, device=DEVICE)
    attend(q, k)
    attend(q + 1, k)
    assert len(built) == 1
    attend(q[:, :1], k)  # fewer
    attend(q.repeat(1, 1, 2, 1), k)  # more heads: another cut
    assert len(built) == 3


def test_dense_queries_of_other_head_dims(built) -> None:
    """Wider ones are cut into other blocks."""
    offsets = offsets_of()
    for dim in (16, 256):
        attend(torch.randn(4, 2, 2, dim, device=DEVICE), jagged(offsets, dim=dim))
    assert len(built) == 2


def test_lists_of_keys_have_tables_of_their_own(built) -> None:
    """Tables of lists have no band, and lists may be others in each call."""
    x = jagged(offsets_of())
    keys = SemiLocalKeys(window=3, first=1, block=16)
    for options in ({"causal": True}, {"keys": keys}, {"causal": True}, {"keys": keys}):
        attend(x, x, **options)
    assert len(built) == 3


def test_tiles_that_are_asked_for() -> None:
    offsets = offsets_of()
    call = {"q_tokens": 20, "k_tokens": 20, "dense": None, "window": (-1, -1), "head_dim": 16}
    for tile in (16, 32, 16):
        found = kept.schedule_of_call(
            offsets, offsets, **call, keys=None, lists=None, tile_q=tile
        )  # fmt: skip
        assert found.tile_q == tile


def test_queries_that_count_no_changes(built) -> None:
    """What inference mode made, over keys whose tables could be kept."""
    k = jagged(offsets_of())
    with torch.inference_mode():
        q = jagged(offsets_of([0, 5, 6, 7, 20]))
        attend(q, k)
        q.offsets[1] -= 1
        attend(q, k)
    assert len(built) == 2


def test_inference_mode_leaves_tables_that_training_takes(built) -> None:
    x = jagged(offsets_of())
    with torch.inference_mode():
        jagged_attention(x, x, x, backend="triton")
    leaf = x.values.clone().requires_grad_()
    y = x.with_values(leaf)
    jagged_attention(y, y, y, backend="triton").values.sum().backward()
    assert leaf.grad is not None
    assert len(built) == 1
    with torch.inference_mode():  # such offsets do not count their changes
        z = jagged(offsets_of())
        for _ in range(2):
            jagged_attention(z, z, z, backend="triton")
    assert len(built) == 3


def test_inference_mode_shares_tables_of_dense_queries(built) -> None:
    """Their offsets are made in each call, in inference mode such that count no changes."""
    k = jagged(offsets_of())
    q = torch.randn(4, 2, 2, 16, device=DEVICE)
    with torch.inference_mode():
        for _ in range(2):
            jagged_attention(q, k, k, backend="triton")
    leaf = q.clone().requires_grad_()
    jagged_attention(leaf, k, k, backend="triton").sum().backward()
    assert leaf.grad is not None
    assert len(built) == 1


def test_nothing_outlives_the_offsets() -> None:
    x = jagged(offsets_of())
    attend(x, x)
    tables = weakref.ref(next(iter(kept._kept[x.offsets].values())).rows)
    assert tables() is not None
    gc.disable()  # there is no circle to be found
    try:
        del x
        assert tables() is None
    finally:
        gc.enable()


def test_tables_of_queries_that_are_gone_are_gone() -> None:
    """A history that is kept meets queries of other users' numbers in each call."""
    k = jagged(offsets_of())
    for count in range(1, 6):
        q = offsets_of([0, count, count, count, count])
        x = JaggedTensor(torch.randn(count, 2, 16, device=DEVICE), q)
        jagged_attention(x, k, k, backend="triton")
    assert len(kept._kept[k.offsets]) == 1
    jagged_attention(k, k, k, backend="triton")
    assert len(kept._kept[k.offsets]) == 2
    k.offsets[3] -= 1
    jagged_attention(k, k, k, causal=True, backend="triton")
    assert len(kept._kept[k.offsets]) == 1


def test_tables_of_one_tensor_are_few(built, monkeypatch) -> None:
    monkeypatch.setattr(kept, "_MOST", 3)
    x = jagged(offsets_of())
    windows = [(left, 0) for left in range(5)]
    for window in windows:
        attend(x, x, window=window)
    assert [what[3] for what in kept._kept[x.offsets]] == windows[-3:]
    attend(x, x, window=windows[-3])
    assert len(built) == 5


def test_all_is_built_anew_while_checking(built, monkeypatch) -> None:
    monkeypatch.setattr(kept, "checking", lambda: True)
    x = jagged(offsets_of())
    attend(x, x)
    attend(x, x)
    assert len(built) == 2


@pytest.mark.gpu
def test_a_stream_has_tables_of_its_own(built) -> None:
    x = jagged(offsets_of())
    attend(x, x)
    other = torch.cuda.Stream()
    other.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(other):
        attend(x, x)
        attend(x, x)
    torch.cuda.current_stream().wait_stream(other)
    assert len(built) == 2


@pytest.mark.gpu
def test_a_graph_finds_the_offsets_of_its_replay() -> None:
    offsets = offsets_of()
    x = jagged(offsets)
    attend(x, x)  # compiles, and leaves tables
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = jagged_attention(x, x, x, backend="triton").values
    for _ in range(2):
        offsets[3] -= 1
        graph.replay()
        assert torch.equal(out, attend(x, x))
