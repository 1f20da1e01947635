"""Kernels are compiled for layouts of a model, not of a batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from attention_cases import DEVICE, RESULTS, TILE, Case, run
from choice_cases import pass_for_hopper
from combinations import combined
from every_operation import EVERY
from launch_keys import Key, batches, record_launches
from operation_cases import flat
from torch import Tensor

from jagged_kernels import ALiBi, JaggedTensor, jagged_attention, lengths_to_offsets
from jagged_kernels.attention.operators import plain as ops
from jagged_kernels.core import launch
from jagged_kernels.core.layouts import empty_as, rows_of_dims
from jagged_kernels.schedule.policy.hopper import HOPPER_TILES
from jagged_kernels.schedule.rows import build_rows

# Batches that bring all rules for tiles, and batches that must bring nothing new.
BATCHES = batches(20)
KNOWN = 12


def _heads_first(x: Tensor) -> Tensor:
    return x.transpose(0, 1).contiguous().transpose(0, 1)


def _token_of_padded(x: Tensor) -> Tensor:
    """Each token the last of a padded user; users are as long as the batch has tokens."""
    return torch.stack([x] * (x.shape[0] % 40 + 17), dim=1)[:, -1]


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda x: x.contiguous(),
    "packed": lambda x: torch.stack([x] * 3, dim=1)[:, 1],
    "interleaved": lambda x: torch.stack([x] * 3, dim=2)[:, :, 1],
    "slice of heads": lambda x: torch.cat([x, x], dim=1)[:, x.shape[1] :],
    "heads first": _heads_first,
    "slice of heads first": lambda x: _heads_first(torch.cat([x, x]))[x.shape[0] :],
    "tokens of padded users": _token_of_padded,
    "same for all heads": lambda x: x[:, :1].expand(x.shape),
    "same for all tokens": lambda x: x[:1].expand(x.shape),
    "dims first": lambda x: x.movedim(2, 0).contiguous().movedim(0, 2),
}
LAYOUT = pytest.mark.parametrize("layout", LAYOUTS)


def _assert_bounded(attend: Callable[[list[int]], Any], keys: list[Key]) -> set[Key]:
    """The keys of all batches."""
    for lengths in BATCHES[:KNOWN]:
        attend(lengths)
    known = set(keys)
    for lengths in BATCHES[KNOWN:]:
        keys.clear()
        attend(lengths)
        assert set(keys) <= known, f"{sum(lengths)} tokens"
    return known


@pytest.mark.parametrize(
    ("layout", "heads", "kind"),
    combined(LAYOUTS, [(4, 4), (4, 2), (1, 1)], ["self", "dense queries", "bias"]),
    ids=str,
)
def test_no_batch_compiles_attention_again(layout, heads, kind, monkeypatch):
    keys = record_launches(monkeypatch)
    lay_out = LAYOUTS[layout]

    def attend(lengths):
        inputs = Case(lengths, heads=heads[0], kv_heads=heads[1]).inputs(torch.float32)
        q, k, v = leaves = [t.requires_grad_() for t in (inputs.q, inputs.k, inputs.v)]
        keys_of = JaggedTensor(lay_out(k), inputs.q_offsets)
        queries = keys_of.with_values(lay_out(q))
        if kind == "dense queries":
            count = 1 + len(lengths) % 2
            users = torch.randn(len(lengths) * count, heads[0], 16, device=DEVICE)
            queries = lay_out(users).view(len(lengths), count, heads[0], 16).requires_grad_()
        bias = ALiBi(torch.ones(heads[0], device=DEVICE)) if kind == "bias" else None
        options: Any = {"backend": "triton", "bias": bias}
        out = jagged_attention(queries, keys_of, keys_of.with_values(lay_out(v)), **options)
        values = out.values if isinstance(out, JaggedTensor) else out.flatten(0, 1)
        d_o = lay_out(torch.randn(values.shape, device=DEVICE)).view(values.shape)
        torch.autograd.grad(values, leaves[1:], d_o)

    assert _assert_bounded(attend, keys)


@LAYOUT
@pytest.mark.parametrize("dim", [64, 128])
def test_no_batch_compiles_hopper_kernels_again(layout, dim, monkeypatch):
    keys = record_launches(monkeypatch)
    pass_for_hopper(monkeypatch)
    lay_out, tile = LAYOUTS[layout], HOPPER_TILES[dim]

    def attend(lengths):
        # So long that these kernels pay. No kernel reads the numbers.
        lengths = torch.tensor([n + 4096 for n in lengths[:3]], device=DEVICE)
        offsets, tokens = lengths_to_offsets(lengths), int(lengths.sum())
        x = torch.zeros(tokens, 2, dim, dtype=torch.bfloat16, device=DEVICE)
        q, k, v = (rows_of_dims(lay_out(x)) for _ in "qkv")
        rows = build_rows(offsets, offsets, tokens=tokens, tile=tile, left=-1, right=0)
        rest = (rows, rows, tile, tile, -1, 0, 0.1, offsets)
        o, lse2 = ops.attention_triton(q, k, v, True, *rest)
        d_lse = torch.zeros(tokens, 2, device=DEVICE)
        ops.attention_triton_backward(lay_out(x), d_lse, q, k, v, o, lse2, *rest, True)

    known = _assert_bounded(attend, keys)
    # What TMA does not read goes to the plain kernels.
    assert any("attention.hopper" in key[1] for key in known) == (layout != "same for all tokens")


@pytest.mark.parametrize("layout", ["contiguous", "columns", "rows of padded users", "transposed"])
@pytest.mark.parametrize("name", EVERY)
def test_no_batch_compiles_an_operation_again(name, layout, monkeypatch):
    keys = record_launches(monkeypatch)
    call, case = EVERY[name]

    def lay_out(x: Tensor) -> Tensor:
        if layout == "columns" and x.dim() > 1:
            return torch.cat([x, x, x], dim=-1)[..., x.shape[-1] : 2 * x.shape[-1]]
        if layout == "rows of padded users":
            return _token_of_padded(x) if x.shape[0] else x
        if layout == "transposed" and x.dim() > 1:
            return x.transpose(0, 1).contiguous().transpose(0, 1)
        return x

    def operate(lengths):
        lengths = [min(n, 70) for n in lengths]  # matrices are squares of these
        leaves = {
            key: t.to(DEVICE).requires_grad_(t.is_floating_point() and key != "like")
            for key, t in case(lengths).items()
        }
        floats = {key: lay_out(t) if t.is_floating_point() else t for key, t in leaves.items()}
        outs = [out for out in flat(call("triton", **floats)) if out.requires_grad]
        wanted = [t for t in leaves.values() if t.requires_grad]
        gradients = [lay_out(torch.ones_like(out)) for out in outs]
        if outs:
            torch.autograd.grad(outs, wanted, gradients, allow_unused=True)

    _assert_bounded(operate, keys)


@pytest.mark.parametrize("kind", ["self", "dense queries"])
def test_a_layout_is_copied_once(kind, monkeypatch):
    """q, k and v in the forward, d_o in the backward; and nothing that is read in place."""
    copies: list[Tensor] = []
    clone = Tensor.clone
    monkeypatch.setattr(Tensor, "clone", lambda x, **how: copies.append(x) or clone(x, **how))
    record_launches(monkeypatch)
    for lay_out, expected in ((LAYOUTS["packed"], (0, 0)), (_heads_first, (3, 1))):
        inputs = Case([9, 0, 30, 2]).inputs(torch.float32)
        leaves = [lay_out(t).requires_grad_() for t in (inputs.q, inputs.k, inputs.v)]
        k = JaggedTensor(leaves[1], inputs.q_offsets)
        queries = k.with_values(leaves[0])
        if kind == "dense queries":
            leaves[0] = lay_out(torch.randn(4, 2, 16, device=DEVICE)).requires_grad_()
            queries = leaves[0].view(4, 1, 2, 16)
        out = jagged_attention(queries, k, k.with_values(leaves[2]), backend="triton")
        out = out.values if isinstance(out, JaggedTensor) else out.squeeze(1)
        forward = len(copies)
        torch.autograd.grad(out, leaves, lay_out(torch.randn(out.shape, device=DEVICE)))
        assert (forward, len(copies) - forward) == expected
        copies.clear()


@pytest.mark.parametrize("backend", ["reference", "native", "triton"])
@pytest.mark.parametrize("kind", ["self", "short users, grouped", "one token", "one head"])
@LAYOUT
def test_a_layout_changes_no_result(layout, kind, backend):
    lengths = [1] if kind == "one token" else [TILE + 2, 0, 5]
    heads, kv_heads = {"one head": (1, 1), "short users, grouped": (2, 1)}.get(kind, (2, 2))
    inputs = Case(lengths, heads=heads, kv_heads=kv_heads).inputs(torch.float32)
    inputs = inputs.with_shared_offsets()
    tile = None if kind == "short users, grouped" else TILE
    for name in ("q", "k", "v", "d_o"):
        setattr(inputs, name, LAYOUTS[layout](getattr(inputs, name)))
    found = run(backend, inputs, tile=tile, causal=True)
    for name in ("q", "k", "v", "d_o"):
        setattr(inputs, name, getattr(inputs, name).contiguous())
    expected = run(backend, inputs, tile=tile, causal=True)
    for name in RESULTS:
        torch.testing.assert_close(found[name], expected[name], msg=f"{layout}: {name}")


def test_what_results_are_written_to_is_contiguous():
    x = torch.empty(3, 4, 5)
    for like in (x, x.transpose(0, 1), x[:, :2], x[..., 1:], x[:1].expand(3, 4, 5)):
        made = empty_as(like)
        assert made.is_contiguous()
        assert (made.shape, made.dtype) == (like.shape, like.dtype)


def test_what_is_read_in_place():
    x = torch.randn(6, 4, 8)
    for layout in ("contiguous", "packed", "slice of heads", "same for all heads"):
        assert rows_of_dims(view := LAYOUTS[layout](x)) is view, layout
    for layout in ("heads first", "slice of heads first", "tokens of padded users", "dims first"):
        copy = rows_of_dims(view := LAYOUTS[layout](x))
        assert copy is not view, layout
        assert copy.is_contiguous(), layout
        assert torch.equal(copy, view), layout
    # Of one token, no stride tells what it is a part of.
    assert rows_of_dims(torch.randn(3, 9, 4, 8)[1:2, 5]).stride() == (32, 8, 1)


@pytest.mark.gpu
@pytest.mark.parametrize("layout", ["packed", "heads first", "tokens of padded users"])
@pytest.mark.parametrize(
    ("kind", "dim"), [("self", 64), ("self", 128), ("dense queries", 64), ("bias", 64)]
)
def test_no_batch_compiles_again_on_the_device(layout, dim, kind):
    """Entries of `launch._COMPILED`, of whatever kernels the batches get."""
    lay_out, counts = LAYOUTS[layout], []
    for lengths in BATCHES:
        inputs = Case(lengths, heads=4, kv_heads=4, dim=dim).inputs(torch.bfloat16)
        leaves = [lay_out(t).detach().requires_grad_() for t in (inputs.q, inputs.k, inputs.v)]
        k = JaggedTensor(leaves[1], inputs.q_offsets)
        queries: Any = k.with_values(leaves[0])
        if kind == "dense queries":
            queries = torch.randn(len(lengths), 2, 4, dim, device="cuda").bfloat16()
        bias = ALiBi(torch.ones(4, device="cuda")) if kind == "bias" else None
        out = jagged_attention(queries, k, k.with_values(leaves[2]), causal=True, bias=bias)
        values = out.values if isinstance(out, JaggedTensor) else out.flatten(0, 1)
        torch.autograd.grad(values, leaves[1:], lay_out(torch.randn_like(values)))
        counts.append(len(launch._COMPILED))
    assert counts[KNOWN] > 0
    assert counts[-1] == counts[KNOWN], counts
