"""What every interaction operation holds to on every backend: batches without tokens."""

from __future__ import annotations

import pytest
import torch
from every_operation import EVERY
from operation_cases import DEVICE, flat, results

from jagged_kernels.ops.products.matmul import matmul

BACKENDS = ["reference", "native", "triton"]


@pytest.mark.parametrize("lengths", [(), (0, 0)], ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", EVERY)
def test_a_batch_without_tokens_trains(name, backend, lengths):
    """And its result can be written to."""
    call, case = EVERY[name]
    leaves = {
        key: t.to(DEVICE).requires_grad_(t.is_floating_point() and key != "like")
        for key, t in case(lengths).items()
    }
    with torch.no_grad():
        for out in flat(call(backend, **leaves)):
            out.add_(1)
    outs = [out for out in flat(call(backend, **leaves)) if out.is_floating_point()]
    torch.stack([out.sum() for out in outs]).sum().backward()
    for key, leaf in leaves.items():
        if leaf.requires_grad:
            assert leaf.grad is not None, key
            assert leaf.grad.shape == leaf.shape, key


@pytest.mark.parametrize("name", EVERY)
def test_more_users_than_a_search_looks_at_in_a_step(name):
    """128; most of them are short, and a longer one is behind those."""
    call, case = EVERY[name]
    lengths = [(7 * user) % 3 for user in range(133)]
    lengths[130] = 70
    tensors = {key: t.to(DEVICE) for key, t in case(lengths).items()}
    expected, found = (results(call, backend, tensors) for backend in ("reference", "triton"))
    for key, result in found.items():
        torch.testing.assert_close(result, expected[key], rtol=1e-4, atol=1e-4, msg=key)


def test_products_have_shapes_without_contents():
    a, b = (torch.empty(2, 3, 4, device="meta", requires_grad=True) for _ in range(2))
    out = matmul(a, b.mT)
    assert (out.shape, out.device.type) == ((2, 3, 3), "meta")
    assert [g.shape for g in torch.autograd.grad(out.sum(), (a, b))] == [a.shape, b.shape]
