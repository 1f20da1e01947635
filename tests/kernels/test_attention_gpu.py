"""What only a GPU can show: no waiting, CUDA graphs, no recompilation, very large batches."""

from __future__ import annotations

import pytest
import torch
from attention_cases import RESULTS, Case, run
from captured import captured

from jagged_kernels import JaggedTensor, attention_schedule, jagged_attention

pytestmark = pytest.mark.gpu


def _qkv(tokens, heads=4, dim=64, dtype=torch.bfloat16):
    return [torch.randn(tokens, heads, dim, device="cuda", dtype=dtype) for _ in range(3)]


def _random_offsets(users, longest, generator):
    lengths = torch.randint(0, longest + 1, (users,), generator=generator)
    return torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).cuda()


def test_forward_and_backward_never_wait_for_the_device():
    inputs = Case([0, 700, 64, 3], heads=4, kv_heads=2, dim=64).inputs(torch.bfloat16)
    q, k, v = (t.requires_grad_() for t in (inputs.q, inputs.k, inputs.v))
    jq, jk, jv = (JaggedTensor(t, inputs.q_offsets) for t in (q, k, v))
    jagged_attention(jq, jk, jv, causal=True).values.backward(inputs.d_o)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        jagged_attention(jq, jk, jv, causal=True).values.backward(inputs.d_o)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("kind", ["self", "target", "long"])
def test_a_training_step_in_a_cuda_graph_follows_new_offsets(kind):
    """Captured once at a token budget, replayed with other lengths: the schedule is rebuilt."""
    budget, users = 2048, 6
    # "long" is what Hopper's own kernels take: half precision at head_dim 128.
    dim, dtype = (128, torch.bfloat16) if kind == "long" else (64, torch.float32)
    leaves = [t.requires_grad_() for t in _qkv(budget, dim=dim, dtype=dtype)]
    if kind == "target":
        leaves[0] = torch.randn(users, 3, 4, dim, device="cuda", dtype=dtype, requires_grad=True)
    d_o = torch.randn_like(leaves[0])
    offsets = torch.tensor([0, 100, 100, 600, 900, 1000, 2048], device="cuda")

    def step():
        for leaf in leaves:
            leaf.grad = None
        q = leaves[0]
        k, v = (JaggedTensor(t, offsets, validate=False) for t in leaves[1:])
        if kind == "target":
            out = jagged_attention(q, k, v)
        else:
            out = jagged_attention(k.with_values(q), k, v, causal=True).values
        out.backward(d_o)
        return out

    graph, out = captured(step)
    written = [out.detach(), *(leaf.grad for leaf in leaves)]
    for new in ([0, 1, 2, 3, 4, 5, 2048], [0, 300, 600, 601, 800, 2048, 2048]):
        assert len(new) == users + 1
        offsets.copy_(torch.tensor(new))
        graph.replay()
        replayed = [tensor.clone() for tensor in written]
        expected = [step().detach(), *(leaf.grad for leaf in leaves)]
        assert all(torch.equal(a, b) for a, b in zip(replayed, expected, strict=True))


def test_other_batches_do_not_recompile():
    """200 batches of other sizes, after one of short and one of long histories: which kernel runs
    on Hopper follows from the tokens of a user, and each is compiled for its first batch."""
    from jagged_kernels.attention.hopper import dkv as gluon_dkv
    from jagged_kernels.attention.plain import dkv, dq
    from jagged_kernels.attention.plain import forward as triton_forward
    from jagged_kernels.attention.plain import short as triton_short
    from jagged_kernels.schedule import triton_rows
    from jagged_kernels.schedule import triton_spans as triton_partition

    kernels = (
        triton_rows._count_kernel,
        triton_rows._place_kernel,
        triton_rows._fill_kernel,
        triton_partition._cost_kernel,
        triton_partition._cut_kernel,
        triton_forward._forward_kernel,
        dq._dq_kernel,
        dkv._dkv_kernel,
        triton_short._short_forward_kernel,
        triton_short._short_backward_kernel,
        gluon_dkv._dkv_kernel,
    )

    def compiled():
        return sum(len(cache[0]) for kernel in kernels for cache in kernel.device_caches.values())

    generator = torch.Generator().manual_seed(0)
    queries = torch.zeros(8, 4, 64, device="cuda")

    def step(users, longest):
        offsets = _random_offsets(users, longest, generator)
        leaves = [t.requires_grad_() for t in _qkv(int(offsets[-1]))]
        q, k, v = (JaggedTensor(t, offsets) for t in leaves)
        out = jagged_attention(q, k, v).values
        out.backward(torch.randn_like(out))
        attention_schedule(queries, k)
        attention_schedule(q, causal=True)

    # Few tokens a user, too few for Hopper's kernels, and enough.
    step(10, 20)
    step(10, 200)
    step(10, 600)
    before = compiled()
    assert before > 0
    for _ in range(200):
        users = int(torch.randint(1, 200, (), generator=generator))
        step(users, int(torch.randint(1, 600, (), generator=generator)))
    assert compiled() == before


@pytest.mark.usefixtures("much_memory")
def test_more_than_2_to_the_31_elements():
    """T x H x D beyond int32: the last user is as exact as alone."""
    heads, dim, last = 8, 64, 300
    tokens = 2**31 // (heads * dim) + 5000
    lengths = [64] * ((tokens - last) // 64) + [last]
    offsets = torch.tensor([0, *lengths], device="cuda").cumsum(0)
    tokens = int(offsets[-1])
    leaves = [
        torch.empty(tokens, heads, dim, device="cuda", dtype=torch.bfloat16).normal_()
        for _ in range(3)
    ]
    for leaf in leaves:
        leaf.requires_grad_()
    q, k, v = (JaggedTensor(t, offsets) for t in leaves)
    out = jagged_attention(q, k, v).values
    assert out.numel() > 2**31
    out.backward(out.detach())
    part = slice(tokens - last, tokens)
    alone = Case([last], heads=heads, kv_heads=heads, dim=dim).inputs(torch.bfloat16)
    alone.q, alone.k, alone.v = (leaf[part].detach() for leaf in leaves)
    alone.d_o, alone.d_lse = out[part].detach(), torch.zeros(last, heads, device="cuda")
    expected = run("triton", alone, tile=None)
    grads = [leaf.grad[part] for leaf in leaves if leaf.grad is not None]
    for name, result in zip(("o", "dq", "dk", "dv"), [out[part], *grads], strict=True):
        assert torch.equal(result, expected[name]), name


def test_a_hundred_thousand_users():
    generator = torch.Generator().manual_seed(1)
    offsets = _random_offsets(100_000, 20, generator)
    q, k, v = (JaggedTensor(t, offsets) for t in _qkv(int(offsets[-1]), dtype=torch.float32))
    out = jagged_attention(q, k, v)
    for user in (0, 50_000, 99_999):
        start, end = offsets[user : user + 2].tolist()
        scores = torch.einsum("nhd,mhd->hnm", q.values[start:end], k.values[start:end]).double()
        exact = torch.einsum("hnm,mhd->nhd", (scores / 8).softmax(-1), v.values[start:end].double())
        torch.testing.assert_close(out.values[start:end].double(), exact, atol=1e-5, rtol=1e-5)


def test_float32_uses_tf32_only_where_it_is_allowed(matmul):
    inputs = Case([130], heads=1, kv_heads=1, dim=64).inputs(torch.float32)
    exact = run("reference", inputs.double(), tile=None)["o"]
    errors = {}
    for allowed in (False, True):
        matmul.fp32_precision = "tf32" if allowed else "ieee"
        errors[allowed] = float((run("triton", inputs)["o"] - exact).abs().max())
    assert errors[False] < 1e-5 < errors[True] < 1e-2


def test_reruns_are_bit_identical_at_size():
    generator = torch.Generator().manual_seed(2)
    lengths = torch.randint(0, 900, (200,), generator=generator).tolist()
    inputs = Case(lengths, heads=4, kv_heads=4, dim=64).inputs(torch.bfloat16)
    first, second = run("triton", inputs, tile=None), run("triton", inputs, tile=None)
    assert all(torch.equal(first[name], second[name]) for name in RESULTS)


@pytest.mark.parametrize("causal", [False, True])
def test_the_schedule_needs_no_wait_to_be_shared(causal):
    inputs = Case([300, 5, 64], heads=4, kv_heads=4, dim=64).inputs(torch.bfloat16)
    x = JaggedTensor(inputs.q, inputs.q_offsets)
    schedule = attention_schedule(x, causal=causal)
    shared = jagged_attention(x, x, x, causal=causal, schedule=schedule)
    assert torch.equal(shared.values, jagged_attention(x, x, x, causal=causal).values)
