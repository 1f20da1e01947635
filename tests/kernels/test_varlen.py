"""`jagged_varlen_attention`: the signature and the results of PyTorch's `varlen_attn`."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from attention_cases import DEVICE, Case, assert_no_worse
from operation_cases import COMPILER
from torch.nn.attention import varlen

from jagged_kernels import (
    JaggedTensor,
    attention_schedule,
    jagged_attention,
    jagged_varlen_attention,
)
from jagged_kernels.attention import varlen as ours

LSE: Any = varlen.AuxRequest(lse=True)
CASES = {
    "self": Case([5, 0, 17]),
    "cross": Case([5, 1, 3], [7, 0, 17]),
    "GQA": Case([5, 0, 17], heads=4, kv_heads=2),
    "wider values": Case([5, 2], dim_v=8),
}
WINDOWS = [(-1, -1), (-1, 0), (3, 0), (2, 1)]


def attend(*arguments: Any, **options: Any) -> Any:
    """Without a look at types by pyright."""
    return jagged_varlen_attention(*arguments, **options)


def arguments(case: Case, dtype: torch.dtype = torch.float32) -> tuple[Any, ...]:
    """The positional ones, offsets in int32 as FlashAttention wants them."""
    inputs = case.inputs(dtype)
    cu_seq_q = inputs.q_offsets.int()
    cu_seq_k = cu_seq_q if case.k_lengths is None else inputs.k_offsets.int()
    longest = max(case.q_lengths), max(case.k_lengths or case.q_lengths)
    return inputs.q, inputs.k, inputs.v, cu_seq_q, cu_seq_k, *longest


def documented(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seq_q: torch.Tensor,
    cu_seq_k: torch.Tensor,
    window: tuple[int, int],
    used: list[int] | None = None,
) -> torch.Tensor:
    """What the documentation of `varlen_attn` says, one sequence after another."""
    outputs = []
    for n in range(len(cu_seq_q) - 1):
        first, end = int(cu_seq_k[n]), int(cu_seq_k[n + 1])
        end = end if used is None else first + used[n]
        q, k, v = query[cu_seq_q[n] : cu_seq_q[n + 1]], key[first:end], value[first:end]
        group = q.shape[1] // k.shape[1]
        k, v = (x.repeat_interleave(group, 1) for x in (k, v))
        scores = torch.einsum("nhd,mhd->hnm", q, k) / q.shape[2] ** 0.5
        place = torch.arange(len(k), device=q.device) - (len(k) - len(q))
        distance = place - torch.arange(len(q), device=q.device)[:, None]
        unseen = (distance > window[1]) & (window[1] >= 0)
        unseen |= (distance < -window[0]) & (window[0] >= 0)
        p = scores.masked_fill(unseen, -torch.inf).softmax(-1).nan_to_num()
        outputs.append(torch.einsum("hnm,mhd->nhd", p, v))
    return torch.cat(outputs)


def test_every_option_of_varlen_attn_is_there():
    """And comes after the same positional ones."""
    peers = inspect.signature(varlen.varlen_attn).parameters.values()
    own = inspect.signature(jagged_varlen_attention).parameters
    assert {p.name for p in peers} <= set(own)
    positional = [p.name for p in peers if p.kind == p.POSITIONAL_OR_KEYWORD][:7]
    assert [p.name for p in own.values() if p.kind == p.POSITIONAL_OR_KEYWORD] == positional
    for peer in peers:
        assert own[peer.name].default == peer.default


@pytest.mark.parametrize("backend", ["reference", "native", "triton"])
@pytest.mark.parametrize("window", WINDOWS, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_results_are_the_documented_ones(name, window, backend):
    given = arguments(CASES[name])
    options: Any = {"window_size": window, "enable_gqa": name == "GQA", "backend": backend}
    out = attend(*given, **options)
    assert isinstance(out, torch.Tensor)
    torch.testing.assert_close(out, documented(*given[:5], window=window))


def test_lse_comes_by_heads():
    given = arguments(CASES["GQA"])
    q, k, v, cu_seq = given[:4]
    x = JaggedTensor(q, cu_seq)
    _, expected = jagged_attention(x, x.with_values(k), x.with_values(v), return_lse=True)
    result = attend(*given, return_aux=LSE, enable_gqa=True)
    assert isinstance(result, tuple)
    assert torch.equal(result[1], expected.t())
    for without in (None, varlen.AuxRequest(lse=False)):
        out = attend(*given, return_aux=without, enable_gqa=True)
        assert torch.equal(out, result[0])


def test_gradients_are_those_of_jagged_attention():
    q, k, v, cu_seq, _, *longest = arguments(CASES["self"])
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    out, lse = attend(*leaves, cu_seq, cu_seq, *longest, return_aux=LSE)
    found = torch.autograd.grad(out.sum() + lse.sum(), leaves)
    jq, jk, jv = (JaggedTensor(x, cu_seq) for x in leaves)
    result, lse = jagged_attention(jq, jk, jv, return_lse=True)
    expected = torch.autograd.grad(result.values.sum() + lse.sum(), leaves)
    for ours_, theirs in zip(found, expected, strict=True):
        assert torch.equal(ours_, theirs)


def test_the_same_offsets_stay_the_same(monkeypatch):
    """What the kernels of users of a few tokens go by, and nothing compares contents."""
    seen = []
    monkeypatch.setattr(ours, "jagged_attention", lambda q, k, v, **_: seen.append((q, k, v)) or q)
    q, k, v, cu_seq, _, *longest = arguments(CASES["self"])
    attend(q, k, v, cu_seq, cu_seq, *longest)
    (jq, jk, jv), = seen  # fmt: skip
    assert jq.offsets is cu_seq
    assert jk.offsets is jv.offsets is cu_seq


@pytest.mark.parametrize("backend", ["reference", "native", "triton"])
@pytest.mark.parametrize("window", [(-1, -1), (-1, 0)], ids=str)
def test_seqused_k(window, backend):
    used = [4, 0, 17]
    given = arguments(Case([5, 1, 3], [7, 2, 17]))
    seqused_k = torch.tensor(used, dtype=torch.int32, device=DEVICE)
    out = attend(*given, window_size=window, seqused_k=seqused_k, backend=backend)
    torch.testing.assert_close(out, documented(*given[:5], window=window, used=used))


def test_a_schedule_and_the_older_name_of_causal():
    given = arguments(CASES["self"])
    schedule = attention_schedule(JaggedTensor(given[0], given[3]), causal=True)
    expected = attend(*given, window_size=(-1, 0))
    assert torch.equal(attend(*given, window_size=[-1, 0], schedule=schedule), expected)
    assert torch.equal(attend(*given, is_causal=True, num_splits=1), expected)


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"block_table": torch.zeros(1)}, NotImplementedError, r"block_table \(paged keys\)"),
        ({"num_splits": 2}, NotImplementedError, "num_splits must be None or 1, got 2"),
        ({"cu_seq_k": None}, ValueError, r"cu_seq_k must be \[N \+ 1\]"),
        ({"key": torch.ones(22, 1, 16)}, ValueError, r"without enable_gqa=True, got \(22, 2, 16\)"),
        ({"seqused_k": torch.ones(2)}, ValueError, r"seqused_k must be integers \[3\], got torch"),
        ({"seqused_k": 3}, ValueError, r"seqused_k must be integers \[3\], got 3"),
        ({"window_size": (1,)}, TypeError, r"window must be \(left, right\)"),
        ({"query": None}, TypeError, "^query must be a tensor, got NoneType$"),
        ({"cu_seq_q": torch.tensor([0, 5, 5, 9])}, ValueError, r"offsets\[-1\] = 9 and values"),
    ],
    ids=str,
)
def test_what_is_refused(changed, error, message):
    names = list(inspect.signature(jagged_varlen_attention).parameters)
    given = dict(zip(names, arguments(CASES["self"]), strict=False))
    given = {name: x.cpu() if isinstance(x, torch.Tensor) else x for name, x in given.items()}
    with pytest.raises(error, match=message):
        attend(**(given | changed))


def test_compiles_whole():
    torch._dynamo.reset()
    given = arguments(CASES["GQA"])

    def with_lse(*given):
        return attend(*given, window_size=(-1, 0), enable_gqa=True, return_aux=LSE)

    compiled = torch.compile(with_lse, fullgraph=True, backend=COMPILER)
    torch.testing.assert_close(compiled(*given), with_lse(*given))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (64, 0)], ids=str)
@pytest.mark.parametrize(
    "case", [Case([300, 0, 17, 64], dim=64), Case([5, 30, 3], [70, 64, 300], dim=64)], ids=str
)
def test_as_varlen_attn(case, window, dtype):
    """Results, the shape of lse, and gradients of the thing itself."""
    given = arguments(case, dtype)
    d_o = case.inputs(dtype).d_o
    exact = [x.double() for x in given[:3]]

    def results(function: Any, tensors: Any, **options: Any) -> dict[str, torch.Tensor]:
        leaves = [x.clone().requires_grad_() for x in tensors]
        options |= {"window_size": window, "return_aux": LSE}
        out, lse = function(*leaves, *given[3:], **options)
        found = (out, lse, *torch.autograd.grad(out, leaves, d_o.to(out.dtype)))
        return dict(zip(["o", "lse", "dq", "dk", "dv"], found, strict=True))

    assert_no_worse(
        results(jagged_varlen_attention, given[:3]),
        results(varlen.varlen_attn, given[:3]),
        results(jagged_varlen_attention, exact, backend="reference"),
        name="jagged_varlen_attention",
    )
