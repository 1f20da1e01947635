"""Tensors on a GPU that is not the current one: kernels run where their tensors are."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields

import pytest
import torch
from attention_cases import Case, Inputs, run
from every_operation import EVERY
from operation_cases import results

from jagged_kernels import JaggedTensor, attention_schedule, jagged_attention

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]


@pytest.fixture
def other() -> Iterator[torch.device]:
    """A GPU that is not the current one, and stays so."""
    current = torch.cuda.current_device()
    yield torch.device("cuda", (current + 1) % torch.cuda.device_count())
    assert torch.cuda.current_device() == current


def _moved(tensors: dict[str, torch.Tensor], device: torch.device | str) -> dict[str, torch.Tensor]:
    return {key: tensor.to(device) for key, tensor in tensors.items()}


@pytest.mark.parametrize("name", EVERY)
def test_operations(name, other):
    call, case = EVERY[name]
    tensors = case((3, 0, 6, 40))
    here = results(call, "triton", _moved(tensors, "cuda"))
    there = results(call, "triton", _moved(tensors, other))
    for key, result in there.items():
        assert result.device == other, key
        assert torch.equal(result.cpu(), here[key].cpu()), key


ATTENTION = {
    "plain": Case([0, 100, 64, 3], heads=4, kv_heads=2, dim=64),
    "short users": Case([0, 7, 20, 3], heads=4, kv_heads=2, dim=64),
    "Hopper": Case([0, 700, 641, 3], heads=4, kv_heads=2, dim=128),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ATTENTION)
def test_attention(name, dtype, other):
    inputs = ATTENTION[name].inputs(dtype).with_shared_offsets()
    here = run("triton", inputs, tile=None, causal=True)
    moved = Inputs(**{f.name: getattr(inputs, f.name).to(other) for f in fields(inputs)})
    there = run("triton", moved.with_shared_offsets(), tile=None, causal=True)
    for key, result in there.items():
        assert result.device == other, key
        assert torch.equal(result.cpu(), here[key].cpu()), key


@pytest.mark.parametrize("split", ["rows", "split", "stream"])
def test_target_attention(split, other):
    outs = []
    for device in ("cuda", other):
        torch.manual_seed(0)
        offsets = torch.tensor([0, 300, 300, 2000])
        q, k, v = (torch.randn(n, device="cpu") for n in ((3, 5, 4, 64), *[(2000, 4, 64)] * 2))
        q, k, v = (x.to(device).requires_grad_() for x in (q, k, v))
        jk = JaggedTensor(k, offsets.to(device))
        schedule = attention_schedule(q, jk, split=split)
        out = jagged_attention(q, jk, jk.with_values(v), schedule=schedule)
        outs.append([x.cpu() for x in (out, *torch.autograd.grad(out.square().sum(), (q, k, v)))])
    for here, there in zip(*outs, strict=True):
        assert torch.equal(here, there)
