"""Many calls at once: batched gradients, and functions that are mapped by `torch.func.vmap`."""

from __future__ import annotations

import pytest
import torch
from attention_calls import ALL, differentiable, leaves_of
from operation_cases import DEVICE, flat

from jagged_kernels import JaggedTensor, jagged_attention

LENGTHS, COUNT = (3, 0, 4), 2


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def assert_all_close(found, expected):
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("backend", ["native", "triton"])
@pytest.mark.parametrize("name", ALL)
def test_batched_gradients(name, backend):
    leaves = leaves_of(ALL[name][1], LENGTHS, DEVICE)
    outs = differentiable(flat(ALL[name][0](backend, **leaves)))
    wanted = [leaf for leaf in leaves.values() if leaf.requires_grad]
    d_outs = [torch.randn(COUNT, *out.shape, device=DEVICE) for out in outs]

    def gradients(given, **options):
        found = torch.autograd.grad(
            outs, wanted, given, retain_graph=True, allow_unused=True, **options
        )
        return [d for d in found if d is not None]

    one_by_one = [gradients([d[index] for d in d_outs]) for index in range(COUNT)]
    expected = [torch.stack(column) for column in zip(*one_by_one, strict=True)]
    assert_all_close(gradients(d_outs, is_grads_batched=True), expected)


@pytest.mark.parametrize("backend", ["native", "triton"])
def test_a_batch_of_gradients_of_some_outputs(backend):
    """Of two outputs, of which one has a gradient that is the same for the whole batch."""
    call, case = ALL["attention"]
    leaves = leaves_of(case, LENGTHS, DEVICE)
    out, lse = flat(call(backend, **leaves))
    d_out, d_lse = torch.randn(COUNT, *out.shape, device=DEVICE), torch.randn_like(lse)
    weighed = (out * out.detach()).sum((1, 2)) + (lse * d_lse).sum() * torch.ones_like(lse[:, 0])
    wanted = [leaves[name] for name in "qkv"]
    given = torch.randn(COUNT, *weighed.shape, device=DEVICE)
    batched = torch.autograd.grad(weighed, wanted, given, is_grads_batched=True, retain_graph=True)
    only = torch.autograd.grad(out, wanted, d_out, is_grads_batched=True, retain_graph=True)
    for index in range(COUNT):
        plain = torch.autograd.grad(weighed, wanted, given[index], retain_graph=True)
        assert_all_close([d[index] for d in batched], plain)
        plain = torch.autograd.grad(out, wanted, d_out[index], retain_graph=True)
        assert_all_close([d[index] for d in only], plain)


@pytest.mark.parametrize("backend", ["native", "triton"])
def test_a_jacobian_in_one_batch(backend):
    offsets = torch.tensor([0, 2, 3], device=DEVICE)
    values = torch.randn(3, 1, 16, device=DEVICE)

    def attend(q):
        x = JaggedTensor(values, offsets)
        return jagged_attention(x.with_values(q), x, x, backend=backend).values[..., :2]

    q = torch.randn_like(values)
    found = torch.autograd.functional.jacobian(attend, q, vectorize=True)
    torch.testing.assert_close(found, torch.autograd.functional.jacobian(attend, q))


@pytest.mark.parametrize("backend", ["native", "triton"])
def test_a_second_derivative_of_a_batch_raises(backend):
    call, case = ALL["attention"]
    leaves = leaves_of(case, LENGTHS, DEVICE)
    out, _ = flat(call(backend, **leaves))
    d_out = torch.randn(COUNT, *out.shape, device=DEVICE)
    options = {"is_grads_batched": True, "create_graph": True}
    (d_q,) = torch.autograd.grad(out, leaves["q"], d_out, **options)
    with pytest.raises(RuntimeError, match="no second derivatives"):
        torch.autograd.grad(d_q.sum(), leaves["k"], allow_unused=True)


@pytest.mark.parametrize("backend", ["reference", "native", "triton"])
@pytest.mark.parametrize("name", ALL)
def test_a_mapped_function(name, backend, recwarn):
    """Every floating tensor has a batch dimension, the first of them in another place."""
    call, case = ALL[name]
    tensors = {key: t.to(DEVICE) for key, t in case(LENGTHS).items()}
    floating = [key for key, t in tensors.items() if t.is_floating_point()]
    given = [torch.randn(COUNT, *tensors[key].shape, device=DEVICE) for key in floating]

    def function(*values):
        return tuple(flat(call(backend, **tensors | dict(zip(floating, values, strict=True)))))

    one_by_one = [function(*[x[index] for x in given]) for index in range(COUNT)]
    expected = [torch.stack(column) for column in zip(*one_by_one, strict=True)]
    found = torch.func.vmap(function, in_dims=(-1, *[0] * (len(given) - 1)))(
        given[0].movedim(0, -1), *given[1:]
    )
    assert_all_close(found, expected)
    missing = [str(w.message) for w in recwarn if "batching rule for jagged" in str(w.message)]
    assert not missing


@pytest.mark.parametrize("backend", ["native", "triton"])
def test_what_is_not_mapped_is_shared(backend):
    call, case = ALL["attention"]
    tensors = {key: t.to(DEVICE) for key, t in case(LENGTHS).items()}
    queries = torch.randn(COUNT, *tensors["q"].shape, device=DEVICE)

    def function(q):
        return call(backend, **tensors | {"q": q})[0].values

    found = torch.func.vmap(function)(queries)
    assert_all_close(found, [function(q) for q in queries])


@pytest.mark.parametrize("name", ["attention", "cat"])
def test_gradients_of_a_mapped_function(name):
    """By `torch.autograd`, through the batch."""
    call, case = ALL[name]
    tensors = {key: t.to(DEVICE) for key, t in case(LENGTHS).items()}
    floating = [key for key, t in tensors.items() if t.is_floating_point()]
    leaves = [
        torch.randn(COUNT, *tensors[key].shape, device=DEVICE, requires_grad=True)
        for key in floating
    ]

    def function(*values):
        return flat(call("triton", **tensors | dict(zip(floating, values, strict=True))))[0]

    loss = torch.func.vmap(function)(*leaves).square().sum()
    one_by_one = torch.stack([function(*[x[index] for x in leaves]) for index in range(COUNT)])
    expected = torch.autograd.grad(one_by_one.square().sum(), leaves)
    assert_all_close(torch.autograd.grad(loss, leaves), expected)


@pytest.mark.parametrize("name", [name for name in ALL if name.startswith("product: ")])
def test_gradients_of_a_function_that_has_no_operators(name):
    """Of native products, which are made of what `torch.func` knows."""
    call, case = ALL[name]
    leaves = leaves_of(case, LENGTHS, DEVICE)
    wanted = [key for key, leaf in leaves.items() if leaf.requires_grad]

    def loss(values):
        return flat(call("native", **leaves | values))[0].square().sum()

    plain = {key: leaves[key].detach() for key in wanted}
    found = torch.func.grad(loss)(plain)
    expected = torch.autograd.grad(loss({}), [leaves[key] for key in wanted])
    assert_all_close([found[key] for key in wanted], expected)
