"""Registration with PyTorch: opcheck, fake tensors, `torch.compile` without graph breaks."""

from __future__ import annotations

import pytest
import torch
from attention_cases import DEVICE, TILE, Case
from combinations import combined

from jagged_kernels import (
    JaggedTensor,
    SemiLocalKeys,
    StridedKeys,
    attention_schedule,
    jagged_attention,
)
from jagged_kernels.attention.meeting import MeetTerms
from jagged_kernels.attention.operators import native as ops_native
from jagged_kernels.attention.operators import plain as ops
from jagged_kernels.attention.scores.bias_terms import BiasTerms

COMPILER = "inductor" if DEVICE == "cuda" else "aot_eager"


LAYOUTS = ["tokens first", "heads first"]


@pytest.fixture(params=LAYOUTS)
def inputs(request):
    inputs = Case([5, 0, TILE + 2], heads=4, kv_heads=2).inputs(torch.float32)
    if request.param == "heads first":
        # What a fake says of the results' strides is what the compiler's code relies on.
        for name in ("q", "k", "v", "d_o"):
            heads_first = getattr(inputs, name).transpose(0, 1).contiguous()
            setattr(inputs, name, heads_first.transpose(0, 1))
    return inputs


@pytest.mark.parametrize(
    ("inputs", "lse_gradient", "tile"),
    combined(LAYOUTS, [False, True], [TILE, 64]),
    indirect=["inputs"],
)
def test_opcheck_triton(inputs, lse_gradient, tile):
    """The larger tile: users of few tokens have kernels of their own."""
    q = JaggedTensor(inputs.q, inputs.q_offsets)
    schedule = attention_schedule(q, tile_q=tile, tile_k=tile)
    rest = (schedule.rows, schedule.rows_t, tile, tile, -1, 0, 0.25, inputs.q_offsets)
    leaves = [t.requires_grad_() for t in (inputs.q, inputs.k, inputs.v)]
    detached = [t.detach() for t in leaves]
    torch.library.opcheck(ops.attention_triton, (*detached, False, *rest))
    torch.library.opcheck(ops.attention_triton, (*leaves, True, *rest))
    o, lse = ops.attention_triton(*leaves, True, *rest)
    d_lse = inputs.d_lse if lse_gradient else None
    backward = (inputs.d_o, d_lse, *(t.detach() for t in (*leaves, o, lse)), *rest)
    for wanted_kv in (True, False):
        torch.library.opcheck(ops.attention_triton_backward, (*backward, wanted_kv))


def test_opcheck_native(inputs):
    leaves = [t.requires_grad_() for t in (inputs.q, inputs.k, inputs.v)]
    rest = (inputs.q_offsets, inputs.k_offsets, -1, 0, 0.25, None, 0.0, 0)
    rest = (*rest, *MeetTerms(), *BiasTerms())
    torch.library.opcheck(ops_native.native_op, (*leaves, *rest))
    results = ops_native.native_op(*leaves, *rest)
    detached = [t.detach() for t in (*leaves, *results)]
    backward = (inputs.d_o, inputs.d_lse, *detached, *rest)
    torch.library.opcheck(ops_native.native_backward_op, backward)


@pytest.mark.parametrize("backend", ["native", "triton"])
@pytest.mark.parametrize("kind", ["self", "dense queries", "dense queries, scheduled"])
def test_compiles_whole_and_for_other_batches(backend, kind):
    """One graph, also when lengths, users and the longest user change."""
    torch._dynamo.reset()

    def attend(values, offsets, queries):
        x = JaggedTensor(values, offsets)
        if kind == "self":
            schedule = attention_schedule(x, causal=True, tile_q=16, tile_k=16)
            out = jagged_attention(x, x, x, causal=True, schedule=schedule, backend=backend)
            return out.values
        schedule = attention_schedule(queries, x) if kind == "dense queries, scheduled" else None
        return jagged_attention(queries, x, x, schedule=schedule, backend=backend)

    compiled = torch.compile(attend, fullgraph=True, backend=COMPILER, dynamic=True)
    queries = torch.randn(2, 2, 16, device=DEVICE)
    for number, lengths in enumerate(([4, 0, 19], [7, 3], [30, 1, 2, 9, 5], [16, 17, 2])):
        inputs = Case(lengths).inputs(torch.float32)
        results = []
        for function in (attend, compiled):
            values = inputs.q.detach().clone().requires_grad_()
            with torch.compiler.set_stance("fail_on_recompile" if number else "default"):
                out = function(values, inputs.q_offsets, queries)
            (out * out).sum().backward()
            results.append((out.detach(), values.grad))
        for eager, graph in zip(*results, strict=True):
            torch.testing.assert_close(graph, eager)


@pytest.mark.parametrize("frozen", [(1, 2), (0,)], ids=["histories", "queries"])
def test_compiles_with_frozen_inputs(inputs, frozen):
    torch._dynamo.reset()

    def attend(q, k, v):
        keys = JaggedTensor(k, inputs.k_offsets)
        return jagged_attention(
            keys.with_values(q), keys, keys.with_values(v), backend="triton"
        ).values

    leaves = [
        x.requires_grad_(i not in frozen) for i, x in enumerate((inputs.q, inputs.k, inputs.v))
    ]
    wanted = [x for x in leaves if x.requires_grad]
    compiled = torch.compile(attend, fullgraph=True, backend=COMPILER)
    eager, graph = (
        torch.autograd.grad(function(*leaves), wanted, inputs.d_o)
        for function in (attend, compiled)
    )
    torch.testing.assert_close(graph, eager)


@pytest.mark.parametrize("backend", ["native", "triton"])
@pytest.mark.parametrize("kind", ["self", "dense queries"])
def test_sizes_become_dynamic_by_themselves(backend, kind):
    """Without `dynamic=True`: at most one more compilation after the first two batches."""
    torch._dynamo.reset()
    graphs = []

    def count(graph, _inputs):
        graphs.append(graph)
        return graph

    def attend(values, offsets, queries):
        x = JaggedTensor(values, offsets)
        if kind == "self":
            return jagged_attention(x, x, x, causal=True, backend=backend).values
        return jagged_attention(queries, x, x, backend=backend)

    compiled = torch.compile(attend, fullgraph=True, backend=count)
    after = []
    for lengths in ([4, 0, 19], [7, 3], [30, 1, 2, 9, 5], [16, 17, 2], [8] * 7, [1], [40, 3]):
        inputs = Case(lengths).inputs(torch.float32)
        queries = torch.randn(len(lengths), 2, 2, 16, device=DEVICE)
        arguments = (inputs.q.detach(), inputs.q_offsets, queries)
        torch.testing.assert_close(compiled(*arguments), attend(*arguments))
        after.append(len(graphs))
    assert after[0] == 1
    assert after[-1] - after[1] <= 1, after


@pytest.mark.parametrize("rule", [StridedKeys(2, 1, block=16), SemiLocalKeys(20, 5, block=16)])
@pytest.mark.parametrize("inside", [False, True])
def test_a_rule_compiles_whole_with_a_schedule_that_knows_the_longest(rule, inside):
    inputs = Case((40, 0, 23)).inputs(torch.float32)
    x = JaggedTensor(inputs.k.detach(), inputs.k_offsets)

    def attend(x, schedule):
        if inside:
            schedule = attention_schedule(x, keys=rule, longest=40)
        return jagged_attention(x, x, x, keys=rule, schedule=schedule).values

    schedule = attention_schedule(x, keys=rule, longest=40)
    torch.compiler.reset()
    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x, schedule), jagged_attention(x, x, x, keys=rule).values)
    meta = JaggedTensor(x.values.to("meta"), x.offsets.to("meta"), validate=False)
    told = r"build attention_schedule\(q, k, keys=\.\.\., longest=\.\.\.\) and pass it as schedule="
    with pytest.raises(ValueError, match=told):
        jagged_attention(meta, meta, meta, keys=rule)
    assert attend(meta, attention_schedule(meta, keys=rule, longest=40)).shape == x.values.shape
