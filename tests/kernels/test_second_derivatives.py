"""Derivatives of gradients: right, or an error; never a number with a part of it left out."""

from __future__ import annotations

import pytest
import torch
from attention_calls import ALL, differentiable, leaves_of
from operation_cases import DEVICE, flat
from torch.utils._python_dispatch import TorchDispatchMode

from jagged_kernels import JaggedTensor, jagged_attention, jagged_embedding, jagged_sum

LENGTHS = (3, 0, 4)


class Nothing(TorchDispatchMode):
    """Changes nothing, but sends calls through the dispatcher."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def first(name, backend, leaves, **options):
    """(a loss that is not linear in the outputs, its gradients)."""
    outputs = differentiable(flat(ALL[name][0](backend, **leaves)))
    # A query that sees nothing has an lse of -inf.
    sums = [out.nan_to_num(neginf=0.0).sin().sum() + out.exp().sum() for out in outputs]
    loss = torch.stack(sums).sum()
    wanted = [leaf for leaf in leaves.values() if leaf.requires_grad]
    return loss, torch.autograd.grad(loss, wanted, allow_unused=True, **options)


def of_penalised(name, backend, leaves):
    """Gradients of loss + |d loss|^2."""
    loss, found = first(name, backend, leaves, create_graph=True)
    penalty = torch.stack([d.square().sum() for d in found if d is not None]).sum()
    wanted = [leaf for leaf in leaves.values() if leaf.requires_grad]
    return torch.autograd.grad(loss + penalty, wanted, allow_unused=True)


@pytest.mark.parametrize("backend", ["native", "triton"])
@pytest.mark.parametrize("name", ALL)
def test_a_gradient_of_gradients_is_right_or_raises(name, backend):
    leaves = leaves_of(ALL[name][1], LENGTHS, DEVICE)
    expected = of_penalised(name, "reference", leaves)
    try:
        found = of_penalised(name, backend, leaves)
    except RuntimeError as error:
        assert "has no second derivatives; backend='reference' has" in str(error)  # noqa: PT017
    else:
        for ours, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("backend", ["native", "triton"])
@pytest.mark.parametrize("name", ALL)
def test_a_graph_of_gradients_that_nobody_differentiates(name, backend):
    leaves = leaves_of(ALL[name][1], LENGTHS, DEVICE)
    _, plain = first(name, backend, leaves)
    _, with_graph = first(name, backend, leaves, create_graph=True)
    for ours, theirs in zip(with_graph, plain, strict=True):
        # PyTorch has other formulas for activations where it may have to go on.
        torch.testing.assert_close(ours, theirs)


@pytest.fixture(params=["call", "dispatcher"])
def way(request):
    with Nothing() if request.param == "dispatcher" else torch.enable_grad():
        yield


OF_OPERATORS = ["attention", "attention of dense queries", "attention with biases", "sum", "cat"]


@pytest.mark.parametrize("name", [*OF_OPERATORS, "embedding"])
def test_every_way_to_an_input_raises(name, way):
    """The gradient of each input, with respect to each: none is left out, no list is."""
    leaves = leaves_of(ALL[name][1], LENGTHS, DEVICE)
    wanted = [leaf for leaf in leaves.values() if leaf.requires_grad]
    _, found = first(name, "triton", leaves, create_graph=True)
    for gradient in found:
        for to in wanted:
            with pytest.raises(RuntimeError, match="has no second derivatives"):
                torch.autograd.grad(gradient.sum(), to, retain_graph=True, allow_unused=True)


@pytest.mark.parametrize("name", [*OF_OPERATORS, "embedding"])
def test_a_gradient_of_a_gradient_of_the_output_raises(name, way):
    leaves = leaves_of(ALL[name][1], LENGTHS, DEVICE)
    out = differentiable(flat(ALL[name][0]("triton", **leaves)))[0]
    d_out = torch.ones_like(out, requires_grad=True)
    wanted = [leaf for leaf in leaves.values() if leaf.requires_grad]
    found = torch.autograd.grad(out, wanted, d_out, create_graph=True)
    with pytest.raises(RuntimeError, match="has no second derivatives"):
        torch.autograd.grad(found[-1].sum(), d_out, allow_unused=True)


def test_the_error_names_the_operator():
    x = JaggedTensor(torch.randn(3, 1, 16, device=DEVICE, requires_grad=True), offsets := ends(3))
    out = jagged_attention(x, x, x, backend="triton").values
    (found,) = torch.autograd.grad(out.sum(), x.values, create_graph=True)
    with pytest.raises(RuntimeError, match=r"^jagged_kernels::attention_triton has no second"):
        found.sum().backward()
    ids = JaggedTensor(torch.arange(3, device=DEVICE), offsets)
    table = torch.randn(4, 2, device=DEVICE, requires_grad=True)
    out = jagged_embedding([ids], [table], backend="triton").values
    (found,) = torch.autograd.grad(out.square().sum(), table, create_graph=True)
    with pytest.raises(RuntimeError, match=r"^jagged_kernels::embed has no second"):
        found.sum().backward()


@pytest.mark.parametrize("backend", ["native", "triton"])
def test_a_gradient_that_depends_on_nothing_is_a_constant(backend):
    x = torch.randn(3, 2, device=DEVICE, requires_grad=True)
    loss = jagged_sum(JaggedTensor(x, ends(3)), backend=backend).sum()
    (found,) = torch.autograd.grad(loss, x, create_graph=True)
    assert not found.requires_grad
    (again,) = torch.autograd.grad(loss + found.square().sum(), x)
    assert torch.equal(again, torch.ones_like(x))


def ends(tokens):
    return torch.tensor([0, tokens], device=DEVICE)
