"""What autograd and profilers call an operator: by its name."""

from __future__ import annotations

import pytest
import torch
from attention_calls import ALL, differentiable, leaves_of
from operation_cases import DEVICE, flat
from torch.profiler import ProfilerActivity, profile

from jagged_kernels import JaggedTensor, jagged_attention

LENGTHS = (3, 0, 4)


def nodes_behind(outs):
    """Names of the nodes of a graph."""
    waiting, seen = [out.grad_fn for out in outs], set()
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            waiting.extend(following for following, _ in node.next_functions)
    return {node.name() for node in seen}


@pytest.mark.parametrize("name", ALL)
def test_nodes_of_autograd_have_the_names_of_operators(name):
    leaves = leaves_of(ALL[name][1], LENGTHS, DEVICE)
    names = nodes_behind(differentiable(flat(ALL[name][0]("triton", **leaves))))
    of_operators = {f"{operator}Backward" for operator in dir(torch.ops.jagged_kernels)}
    of_pytorch = {n for n in names if n.endswith(("Backward0", "Backward1")) or "Accumulate" in n}
    assert names - of_pytorch <= of_operators
    # Two jagged operands, and a dense one without positions, are no work for an operator.
    assert names - of_pytorch or name in ("add jagged", "mul jagged", "mul2 jagged")


@pytest.fixture
def x():
    offsets = torch.tensor([0, 3, 7], device=DEVICE)
    return JaggedTensor(torch.randn(7, 2, 16, device=DEVICE, requires_grad=True), offsets)


def events(function):
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
        function()
    return [(event.name, event.input_shapes) for event in profiler.events() or ()]


@pytest.mark.parametrize(("backend", "operator"), [("native", "native"), ("triton", "triton")])
def test_profilers_show_operators(x, backend, operator):
    def attend():
        return jagged_attention(x, x, x, backend=backend).values

    forward, shape = f"jagged_kernels::attention_{operator}", list(x.values.shape)
    with torch.no_grad():
        found = [shapes for name, shapes in events(attend) if name == forward]
    assert len(found) == 1
    assert found[0][:3] == [shape] * 3
    out = attend()
    names = [name for name, _ in events(lambda: out.sum().backward())]
    assert names.count(f"attention_{operator}Backward") == 1
    assert names.count(f"{forward}_backward") == 1
    names = [name for name, _ in events(attend)]
    assert names.count(forward) == 1
    assert "Gradient" not in names
