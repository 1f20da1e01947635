"""Biases as arguments: errors before a launch, opcheck, `torch.compile` without graph breaks."""

from __future__ import annotations

import pytest
import torch
from attention_cases import DEVICE, TILE, Case
from bias_cases import Biases
from processes import run_python

from jagged_kernels import (
    ALiBi,
    JaggedTensor,
    RelativePositionBias,
    RelativeTimeBias,
    attention_schedule,
    jagged_attention,
)
from jagged_kernels.attention.meeting import MeetTerms
from jagged_kernels.attention.operators import general as ops_general
from jagged_kernels.attention.operators import native as ops_native
from jagged_kernels.attention.scores.bias import bias_terms
from jagged_kernels.attention.scores.bias_terms import BiasTerms, scores_before

COMPILER = "inductor" if DEVICE == "cuda" else "aot_eager"
SEED = 12


def jagged(*shape, lengths=(3, 4)):
    offsets = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()])
    return JaggedTensor(torch.randn(int(offsets[-1]), *shape), offsets)


def table(*shape, dtype=torch.float32):
    return torch.zeros(shape, dtype=dtype)


WRONG = {
    "table of one dim": (lambda: RelativePositionBias(table(8)), r"num_buckets, H.*got \(8,\)"),
    "whole numbers": (
        lambda: RelativeTimeBias(table(8, 2, dtype=torch.int), torch.arange(7)),
        "int32",
    ),
    "odd": (
        lambda: RelativePositionBias(table(7, 2)),
        r"even number of buckets, got table \(7, 2\)",
    ),
    "too few buckets": (lambda: RelativePositionBias(table(2, 2)), "4 buckets or more"),
    "too near": (
        lambda: RelativePositionBias(table(64, 2), max_distance=16),
        r"more than the 16 distances .* \(64, 2\), got 16",
    ),
    "unit": (lambda: RelativeTimeBias(table(8, 2), torch.arange(7), unit=0.0), "unit 0.0"),
    "base": (lambda: RelativeTimeBias(table(8, 2), torch.arange(7), base=1.05), "base 1.05"),
    "slopes": (lambda: ALiBi(table(8, 2)), r"\[H\], floating, got \(8, 2\)"),
    "heads": (lambda: RelativePositionBias(table(8, 3)), r"H = 2 columns on cpu, got \(8, 3\)"),
    "heads of slopes": (lambda: ALiBi(table(3)), r"H = 2 columns on cpu, got \(3,\)"),
    "device": (lambda: ALiBi(torch.zeros(2, device="meta")), "on cpu, got .* on meta"),
    "too many times": (
        lambda: RelativeTimeBias(table(8, 2), torch.arange(8)),
        r"each of 7 tokens on cpu, got \(8,\)",
    ),
    "times on another device": (
        lambda: RelativeTimeBias(table(8, 2), torch.arange(7, device="meta")),
        r"each of 7 tokens on cpu, got \(7,\) on meta",
    ),
    "times that are true or false": (
        lambda: RelativeTimeBias(table(8, 2), torch.arange(7) > 3),
        "must be integers or floating, got torch.bool",
    ),
    "query times": (
        lambda: RelativeTimeBias(table(8, 2), torch.arange(7), query_times=torch.arange(4)),
        r"query_times must have .* 7 tokens",
    ),
    "times of other users": (
        lambda: RelativeTimeBias(table(8, 2), jagged(lengths=(2, 5))),
        "times must have the offsets of the tokens",
    ),
    "query times of other users": (
        lambda: RelativeTimeBias(table(8, 2), jagged(), query_times=jagged(lengths=(7,))),
        "query_times must have the offsets of the tokens",
    ),
    "mixed times": (
        lambda: RelativeTimeBias(table(8, 2), torch.arange(7), query_times=torch.rand(7)),
        "int64 and torch.float32",
    ),
    "flat": (lambda: table(24, 2), "each of 25 scores, got 24"),
    "flat heads": (lambda: table(25, 3), r"H = 2\] on cpu, got \(25, 3\)"),
    "flat whole": (lambda: table(25, 2, dtype=torch.int), "floating, got torch.int32"),
    "two of a kind": (
        lambda: (ALiBi(table(2)), ALiBi(table(2))),
        "at most one bias of each kind, got two of ALiBi",
    ),
}


@pytest.mark.parametrize(("bias", "message"), WRONG.values(), ids=WRONG)
@pytest.mark.parametrize("backend", ["native", "triton"])
def test_wrong_biases(bias, message, backend):
    x = jagged(2, 8)
    with pytest.raises(ValueError, match=message):
        jagged_attention(x, x, x, bias=bias(), backend=backend)


def test_a_flat_bias_of_wrong_length_in_a_graph():
    """Where offsets are not read beforehand the device compares; it stops at the first kernel."""

    @torch.compile(fullgraph=True, backend="aot_eager")
    def attention(values, offsets, bias):
        x = JaggedTensor(values, offsets)
        return jagged_attention(x, x, x, bias=bias).values

    x = Case([3, 4]).inputs(torch.float32)
    bias = torch.zeros(25, x.q.shape[1])
    arguments = (x.q.cpu(), x.q_offsets.cpu())
    attention(*arguments, bias)
    for wrong in (bias[:24], torch.cat([bias, bias])):
        with pytest.raises(RuntimeError, match="bias must have a row for each score"):
            attention(*arguments, wrong)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [24, 26])
def test_a_flat_bias_of_wrong_length_on_a_gpu(rows):
    """In a process of its own: CUDA has no use for a device that stopped."""
    code = f"""
import torch
from jagged_kernels import JaggedTensor, jagged_attention
x = JaggedTensor(torch.zeros(7, 2, 16, device="cuda"), torch.tensor([0, 3, 7], device="cuda"))
print(jagged_attention(x, x, x, bias=torch.zeros({rows}, 2, device="cuda")).values.sum().item())
"""
    result = run_python(code)
    assert result.returncode != 0
    assert "bias must have a row for each score" in result.stderr


def test_scores_are_counted_beyond_32_bits():
    """Of offsets that are int32."""
    offsets = torch.tensor([0, 70_000, 70_003], dtype=torch.int32)
    assert scores_before(offsets, offsets).tolist() == [0, 70_000**2]
    x = JaggedTensor(torch.zeros(1, 1, 1).expand(70_003, 1, 1), offsets)
    with pytest.raises(ValueError, match="each of 4900000009 scores, got 1"):
        bias_terms(torch.zeros(1, 1), x, x)


def test_dense_queries_need_times_of_their_own():
    """As many queries as keys, and as many of each user: still other events."""
    k = jagged(2, 8, lengths=(1, 1))
    times = torch.arange(2)
    for q in (torch.zeros(2, 1, 2, 8), torch.zeros(1, 2, 8)):
        with pytest.raises(ValueError, match=r"needs query_times .*: dense q \(2, 2, 8\), k"):
            jagged_attention(q, k, k, bias=RelativeTimeBias(table(8, 2), times))
        for query_times in (times + 5, times[:, None] + 5):
            bias = RelativeTimeBias(table(8, 2), times, query_times=query_times)
            assert jagged_attention(q, k, k, bias=bias).shape == (2, 1, 2, 8)
    # Of jagged queries they are those of the keys, with other offsets of the same contents too.
    same = JaggedTensor(k.values, k.offsets.clone())
    bias = RelativeTimeBias(table(8, 2), times)
    assert jagged_attention(same, k, k, bias=bias).values.shape == (2, 2, 8)


def test_what_is_no_bias():
    x = jagged(2, 8)
    with pytest.raises(TypeError, match="got float"):
        jagged_attention(x, x, x, bias=0.5)  # pyright: ignore
    with pytest.raises(TypeError, match="got NoneType"):
        jagged_attention(x, x, x, bias=(ALiBi(table(2)), None))  # pyright: ignore


def test_cross_attention_needs_query_times():
    bias = RelativeTimeBias(table(8, 2), torch.arange(7))
    k = jagged(2, 8)
    for q in (jagged(2, 8, lengths=(4, 3)), jagged(2, 8, lengths=(4, 4))):
        with pytest.raises(ValueError, match=r"needs query_times .* q \(\d, 2, 8\), k \(7, 2, 8\)"):
            jagged_attention(q, k, k, bias=bias)


def test_no_biases_are_no_bias():
    x = jagged(2, 8)
    plain = jagged_attention(x, x, x)
    assert torch.equal(jagged_attention(x, x, x, bias=()).values, plain.values)


@pytest.mark.parametrize("biases", [Biases(), Biases(position=8, time=9, alibi=True, scores=True)])
@pytest.mark.parametrize("backend", ["native", "triton"])
def test_opcheck(backend, biases):
    inputs = Case([5, 0, TILE + 2], kv_heads=1).inputs(torch.float32)
    q, k = (JaggedTensor(t, inputs.q_offsets) for t in (inputs.q, inputs.k))
    terms = bias_terms(biases.values(inputs, biases.leaves(inputs)), q, k) or BiasTerms()
    leaves = [t.requires_grad_() for t in (inputs.q, inputs.k, inputs.v)]
    dropout = (inputs.q_offsets, inputs.k_offsets, None, torch.tensor(SEED, device=DEVICE), 0.2)
    wanted = [t is not None for t in terms.learned()]
    if backend == "triton":
        schedule = attention_schedule(q, causal=True, tile_q=TILE, tile_k=TILE)
        rows = (schedule.rows, schedule.rows_t, TILE, TILE, -1, 0, 0.25)
        rest, first, flags = (*rows, *dropout, *MeetTerms(), *terms), (True,), (wanted,)
        forward = ops_general.attention_triton_general
        backward = ops_general.attention_triton_general_backward
    else:
        q_offsets, k_offsets, _, *drop = dropout
        given = (q_offsets, k_offsets, -1, 0, 0.25, *drop, 0)
        rest, first, flags = (*given, *MeetTerms(), *terms), (), ()
        forward, backward = ops_native.native_op, ops_native.native_backward_op
    torch.library.opcheck(forward, (*leaves, *first, *rest))
    results = forward(*leaves, *first, *rest)
    arguments = (inputs.d_o, inputs.d_lse, *leaves, *results, *flags, *rest)
    detached = [x.detach() if isinstance(x, torch.Tensor) else x for x in arguments]
    torch.library.opcheck(backward, tuple(detached))


class Attention(torch.nn.Module):
    """As a user's module would hold what biases learn."""

    def __init__(self) -> None:
        super().__init__()
        self.position = torch.nn.Parameter(torch.randn(8, 2))
        self.time = torch.nn.Parameter(torch.randn(10, 2))
        self.slopes = torch.nn.Parameter(torch.rand(2))

    def forward(self, values, offsets, times, backend, dropout_p):
        x = JaggedTensor(values, offsets)
        bias = (
            RelativePositionBias(self.position, max_distance=20, bidirectional=False),
            RelativeTimeBias(self.time, x.with_values(times), unit=60.0),
            ALiBi(self.slopes),
        )
        schedule = attention_schedule(x, causal=True, tile_q=16, tile_k=16)
        out = jagged_attention(
            x,
            x,
            x,
            causal=True,
            bias=bias,
            dropout_p=dropout_p,
            schedule=schedule,
            backend=backend,
        )
        return out.values


@pytest.mark.parametrize("backend", ["native", "triton"])
@pytest.mark.parametrize("dropout_p", [0.0, 0.2])
def test_compiles_whole_and_for_other_batches(backend, dropout_p):
    """One graph, with gradients of what the biases learn."""
    torch._dynamo.reset()
    torch.manual_seed(1)
    module = Attention().to(DEVICE)
    compiled = torch.compile(module, fullgraph=True, backend=COMPILER, dynamic=True)
    for number, lengths in enumerate(([4, 0, 19], [7, 3], [30, 1, 2])):
        inputs = Case(lengths).inputs(torch.float32)
        times = torch.randint(0, 10_000, inputs.q.shape[:1], device=DEVICE)
        results = []
        for function in (module, compiled):
            module.zero_grad()
            values = inputs.q.detach().clone().requires_grad_()
            torch.manual_seed(2)
            with torch.compiler.set_stance("fail_on_recompile" if number else "default"):
                out = function(values, inputs.q_offsets, times, backend, dropout_p)
            (out * out).sum().backward()
            assert values.grad is not None
            grads = [p.grad.clone() for p in module.parameters() if p.grad is not None]
            assert len(grads) == 3
            results.append((out.detach(), values.grad, *grads))
        # Inductor draws other seeds than eager PyTorch.
        if not dropout_p or DEVICE == "cpu":
            for eager, graph in zip(*results, strict=True):
                torch.testing.assert_close(graph, eager)
