"""Operators that are called past the dispatcher, and those that must not be: of attention."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attention_cases import DEVICE, TILE, Case
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode

from jagged_kernels import JaggedTensor, attention_schedule, jagged_attention, jagged_sum
from jagged_kernels.attention.operators import plain as ops
from jagged_kernels.attention.plain import backward as triton_backward
from jagged_kernels.core.operators import call


class Seen(TorchDispatchMode):
    """Counts calls of an operator."""

    def __init__(self, op):
        super().__init__()
        self.op, self.count = op, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is self.op
        return func(*args, **(kwargs or {}))


@pytest.fixture(params=["self", "dense queries"])
def case(request):
    """(leaves, a call with them, the gradient of its output)."""
    inputs = Case([3, 0, TILE + 2], heads=2, kv_heads=1).inputs(torch.float32)
    q, k, v = inputs.q, inputs.k, inputs.v
    offsets = inputs.q_offsets
    if request.param == "dense queries":
        q = torch.randn(3, 2, *q.shape[1:], device=q.device)
    leaves = [t.requires_grad_() for t in (q, k, v)]

    def attend(q, k, v):
        keys = JaggedTensor(k, offsets)
        queries = keys.with_values(q) if request.param == "self" else q
        schedule = attention_schedule(queries, keys)
        out = jagged_attention(
            queries, keys, keys.with_values(v), schedule=schedule, backend="triton"
        )
        return out.values if isinstance(out, JaggedTensor) else out

    return leaves, attend, torch.randn(attend(*leaves).shape, device=q.device)


def gradients(case, *, wanted=(0, 1, 2), **options):
    leaves, attend, d_o = case
    out = attend(*leaves)
    return torch.autograd.grad(out, [leaves[i] for i in wanted], d_o, **options)


def test_the_short_way_gives_what_the_dispatcher_gives(case):
    leaves, attend, _ = case
    out, short = attend(*leaves), gradients(case)
    # A mode that looks at every operator sends calls the long way.
    with Seen(ops.attention_triton):
        assert torch.equal(attend(*leaves), out)
        long = gradients(case)
    assert all(torch.equal(a, b) for a, b in zip(short, long, strict=True))
    with torch.no_grad():
        assert torch.equal(attend(*leaves), out)


def test_a_mode_sees_operators():
    inputs = Case([3, 1], heads=1, kv_heads=1).inputs(torch.float32)
    x = JaggedTensor(inputs.q.requires_grad_(), inputs.q_offsets)
    schedule = attention_schedule(x)
    for op in (ops.attention_triton, ops.attention_triton_backward):
        with Seen(op) as seen:
            jagged_attention(x, x, x, schedule=schedule, backend="triton").values.sum().backward()
        assert seen.count == 1


def test_gradients_of_some_inputs(case):
    every = gradients(case)
    for wanted in ([0], [2, 1]):
        some = gradients(case, wanted=wanted)
        assert all(torch.equal(a, every[i]) for a, i in zip(some, wanted, strict=True))
    leaves, attend, d_o = case
    leaves[1].requires_grad_(False)
    attend(*leaves).backward(d_o)
    assert leaves[1].grad is None
    assert torch.equal(leaves[0].grad, every[0])
    assert torch.equal(leaves[2].grad, every[2])


@pytest.mark.parametrize("frozen", [(1, 2), (0,)], ids=["histories", "queries"])
def test_frozen_inputs(case, frozen):
    leaves, attend, d_o = case
    every = gradients(case)
    for place in frozen:
        leaves[place].requires_grad_(False)
    attend(*leaves).backward(d_o)
    for place, leaf in enumerate(leaves):
        assert (leaf.grad is None) == (place in frozen)
        assert leaf.grad is None or torch.equal(leaf.grad, every[place])


def test_frozen_histories_cost_no_gradients(monkeypatch):
    inputs = Case([3, 0, TILE + 2]).inputs(torch.float32)
    keys = JaggedTensor(inputs.k, inputs.k_offsets)
    values = keys.with_values(inputs.v)
    launch, launched = triton_backward.launch_dkv, []

    def seen(*arguments, **options):
        launched.append(options)
        return launch(*arguments, **options)

    monkeypatch.setattr(triton_backward, "launch_dkv", seen)
    for leaf, launches in ((inputs.q, 0), (inputs.v, 1)):
        leaf.requires_grad_()
        q = keys.with_values(inputs.q)
        jagged_attention(q, keys, values, backend="triton").values.backward(inputs.d_o)
        assert len(launched) == launches


def test_a_graph_that_is_kept_gives_the_same_twice(case):
    leaves, attend, d_o = case
    out = attend(*leaves)
    first = torch.autograd.grad(out, leaves, d_o, retain_graph=True)
    second = torch.autograd.grad(out, leaves, d_o)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(out, leaves, d_o)


@pytest.mark.parametrize("needed", [True, False], ids=["", "by no gradient of outputs"])
def test_a_second_derivative_raises(case, needed):
    leaves, attend, d_o = case
    d_o.requires_grad_(needed)
    out = attend(*leaves)
    first = torch.autograd.grad(out, leaves, d_o, create_graph=True)
    for ours, plain in zip(first, gradients(case), strict=True):
        assert torch.equal(ours, plain)
    with pytest.raises(RuntimeError, match="no second derivatives"):
        (out.sum() + first[0].square().sum()).backward()


def test_a_derivative_in_forward_mode_raises(case):
    leaves, attend, _ = case
    plain = [t.detach() for t in leaves]
    with pytest.raises(NotImplementedError, match="forward mode"):
        torch.func.jvp(attend, tuple(plain), tuple(plain))
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match="forward mode"):
        attend(forward_ad.make_dual(plain[0], plain[0]), *plain[1:])
    with forward_ad.dual_level():
        assert torch.equal(attend(*plain), attend(*leaves))


def test_gradients_of_transformed_functions_raise(case):
    leaves, attend, _ = case
    with pytest.raises(NotImplementedError, match=r"not torch\.func"):
        torch.func.grad(lambda *inputs: attend(*inputs).sum())(*leaves)


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore::DeprecationWarning")
def test_torch_jit_traces_operators_and_not_their_numbers():
    offsets = torch.tensor([0, 2, 3], device=DEVICE)

    def total(values):
        return jagged_sum(JaggedTensor(values, offsets, validate=False), backend="triton")

    values = torch.ones(3, 2, device=DEVICE)
    traced: Any = torch.jit.trace(total, (values,), check_trace=False)
    assert traced(3 * values).tolist() == [[6, 6], [3, 3]]


def test_changed_inputs_raise(case):
    leaves, attend, d_o = case
    out = attend(*leaves)
    with torch.no_grad():
        leaves[1].zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.backward(d_o)


def test_hooks_on_tensors_and_on_what_is_saved(case):
    expected = gradients(case)
    leaves, attend, d_o = case
    packed = []

    def pack(tensor):
        packed.append(tensor.data_ptr())
        return tensor.clone()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = attend(*leaves)
    assert {leaf.data_ptr() for leaf in leaves} <= set(packed)
    out.register_hook(lambda gradient: 2 * gradient)
    found = torch.autograd.grad(out, leaves, d_o / 2)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_what_is_not_a_plain_tensor_goes_through_the_dispatcher():
    class Marked(torch.Tensor):
        pass

    inputs = Case([3, 1], heads=1, kv_heads=1).inputs(torch.float32)
    schedule = attention_schedule(JaggedTensor(inputs.q, inputs.q_offsets))
    tiles = (schedule.tile_q, schedule.tile_k)
    rest = (schedule.rows, schedule.rows_t, *tiles, -1, -1, 0.25, None)
    q, k, v = inputs.q, inputs.k, inputs.v
    expected, _ = call(ops.attention_triton, q, k, v, False, *rest)
    marked, _ = call(ops.attention_triton, q.as_subclass(Marked), k, v, False, *rest)
    assert type(expected) is torch.Tensor
    assert type(marked) is Marked
    assert torch.equal(marked.as_subclass(torch.Tensor), expected)
    parameter, _ = call(ops.attention_triton, torch.nn.Parameter(q), k, v, True, *rest)
    assert parameter.requires_grad
    assert torch.equal(parameter, expected)
