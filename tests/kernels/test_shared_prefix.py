"""`prefixed_attention` against attention over keys that have the prefix in front of every user."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from attention_cases import DEVICE, TILE, Case, Inputs, assert_no_worse, sdpa, terms
from combinations import combined

from jagged_kernels import (
    JaggedTensor,
    attention_schedule,
    jagged_attention,
    jagged_cat,
    prefix_schedule,
    prefixed_attention,
)
from jagged_kernels.attention import merge_parts as merging
from jagged_kernels.attention import shared_prefix

COMPILER = "inductor" if DEVICE == "cuda" else "aot_eager"
BACKENDS: tuple[Any, ...] = ("native", "triton")
NAMES: tuple[str, ...] = ("o", "lse", "dq", "dk", "dv", "d_prefix_k", "d_prefix_v")


@dataclass
class Problem:
    """Attention inputs, and a prefix; `dense` queries have as many a user."""

    inputs: Inputs
    prefix_k: torch.Tensor
    prefix_v: torch.Tensor
    dense: int = 0

    @classmethod
    def of(cls, case: Case, prefix: int, dtype=torch.float32, dense: int = 0) -> Problem:
        inputs = case.inputs(dtype)
        generator = torch.Generator().manual_seed(7)
        shape = (prefix, case.kv_heads)
        k, v = (
            torch.randn(*shape, dim, generator=generator).to(DEVICE, dtype)
            for dim in (case.dim, case.dim_v or case.dim)
        )
        return cls(inputs, k, v, dense)

    def joined(self) -> Inputs:
        """With the prefix in front of every user's keys."""
        keys = JaggedTensor(self.inputs.k, self.inputs.k_offsets)
        k = jagged_cat([self.prefix_k, keys], backend="reference")
        v = jagged_cat([self.prefix_v, keys.with_values(self.inputs.v)], backend="reference")
        return replace(self.inputs, k=k.values, v=v.values, k_offsets=k.offsets)

    def apart(self, results: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Gradients of joined keys as those of own keys and of the prefix."""
        results, places = dict(results), self.prefix_places()
        for x in ("k", "v"):
            joined = results.pop(f"d{x}")
            results[f"d{x}"] = joined[~places]
            prefix = getattr(self, f"prefix_{x}")
            by_user = joined[places].unflatten(0, (-1, prefix.shape[0])) if len(prefix) else None
            total = torch.zeros_like(prefix) if by_user is None else by_user.double().sum(0)
            results[f"d_prefix_{x}"] = total.to(joined.dtype)
        return results

    def prefix_places(self) -> torch.Tensor:
        offsets = self.inputs.k_offsets
        parts = []
        for n in offsets.diff().tolist():
            parts += [torch.ones(len(self.prefix_k)), torch.zeros(n)]
        return torch.cat(parts).bool().to(DEVICE)

    def run(self, backend, *, cat=False, tile=TILE, leaves=None, **mask):
        """Output, lse and all gradients; `cat`: by attention over the joined keys."""
        given = self.inputs
        tensors = (given.q, given.k, given.v, self.prefix_k, self.prefix_v)
        q, k, v, pk, pv = leaves or [t.detach().requires_grad_() for t in tensors]
        jk = JaggedTensor(k, given.k_offsets)
        jv = jk.with_values(v)
        jq: Any = (
            q.unflatten(0, (-1, self.dense)) if self.dense else JaggedTensor(q, given.q_offsets)
        )
        if cat:
            keys, values = jagged_cat([pk, jk]), jagged_cat([pv, jv])
            values = keys.with_values(values.values)
            out, lse = jagged_attention(jq, keys, values, backend=backend, return_lse=True, **mask)
        else:
            schedule = None
            if not self.dense and tile is not None:
                band = {name: mask[name] for name in ("causal", "window") if name in mask}
                schedule = attention_schedule(jq, jk, tile_q=tile, tile_k=tile, **band)
            out, lse = prefixed_attention(
                jq, jk, jv, pk, pv, backend=backend, schedule=schedule, return_lse=True, **mask
            )
        o = out.flatten(0, 1) if self.dense else out.values
        lse = lse.flatten(0, 1) if self.dense else lse
        loss = (o * given.d_o).sum(dtype=torch.float64)
        loss = loss + (lse.masked_fill(lse == -math.inf, 0.0) * given.d_lse).sum()
        loss.backward()
        leaves = (q, k, v, pk, pv)
        grads = [torch.zeros_like(t) if t.grad is None else t.grad for t in leaves]
        return dict(zip(NAMES, [o.detach(), lse.detach(), *grads], strict=True))

    def double(self) -> Problem:
        return Problem(
            self.inputs.double(), self.prefix_k.double(), self.prefix_v.double(), self.dense
        )

    def assert_exact(self, *backends, **mask):
        double = self.double()
        exact = double.run("reference", cat=True, **mask)
        products = self.apart(terms(double.joined(), **mask))
        peer = self.apart(sdpa(self.joined(), **mask))
        for backend in backends:
            ours = self.run(backend, **mask)
            assert_no_worse(ours, peer, exact, terms=products, name=backend)


LENGTHS = [0, 1, TILE, TILE + 1, 2 * TILE + 5]
MASKS = {
    "full": {},
    "causal": {"causal": True},
    "right": {"window": (-1, 3)},
    "scale": {"scale": -0.3, "causal": True},
}


@pytest.mark.parametrize("prefix", [0, 1, TILE + 3])
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_as_with_the_prefix_in_front_of_every_user(mask, prefix):
    Problem.of(Case(LENGTHS), prefix).assert_exact(*BACKENDS, **mask)


@pytest.mark.parametrize("backend", [*BACKENDS, "reference"])
def test_a_prefix_of_nothing(backend):
    """More causal queries than keys: no prefix is hidden from them."""
    case = Case([3, 6], [3, 4])
    problem = Problem.of(case, 0)
    q = JaggedTensor(problem.inputs.q, problem.inputs.q_offsets)
    k = JaggedTensor(problem.inputs.k, problem.inputs.k_offsets)
    prefix = problem.prefix_k
    options = {"causal": True, "backend": backend}
    before = prefix_schedule(q, prefix)
    found = prefixed_attention(q, k, k, prefix, prefix, prefix_schedule=before, **options)
    assert torch.equal(found.values, jagged_attention(q, k, k, **options).values)


@pytest.mark.parametrize("offsets_dtype", [torch.int32, torch.int64], ids=str)
def test_users_without_keys_see_the_prefix_alone(offsets_dtype):
    case = Case([3, 0, 5, 2], [0, 4, 0, TILE], offsets_dtype=offsets_dtype)
    problem = Problem.of(case, 5)
    problem.assert_exact(*BACKENDS)
    lse = problem.run("triton")["lse"]
    assert lse.isfinite().all()


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 2), (3, 1)])
def test_grouped_query_heads(heads, kv_heads):
    case = Case([TILE + 1, 2, 0], heads=heads, kv_heads=kv_heads, dim=8, dim_v=24)
    Problem.of(case, 7).assert_exact(*BACKENDS, causal=True)


@pytest.mark.parametrize("backend", BACKENDS)
def test_float16(backend):
    Problem.of(Case(LENGTHS), TILE + 1, torch.float16).assert_exact(backend, causal=True)


@pytest.mark.parametrize("backend", BACKENDS)
def test_dense_queries(backend):
    case = Case([3, 3, 3], [TILE + 2, 0, 5], heads=4, kv_heads=2)
    Problem.of(case, 6, dense=3).assert_exact(backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_dense_queries_that_all_users_share(backend):
    problem = Problem.of(Case([2, 2, 2], [TILE + 2, 0, 5]), 6)
    keys = JaggedTensor(problem.inputs.k, problem.inputs.k_offsets)
    values = keys.with_values(problem.inputs.v)
    prefix = (problem.prefix_k.requires_grad_(), problem.prefix_v.requires_grad_())
    queries = problem.inputs.q[:2].requires_grad_()
    results = []
    for q in (queries, queries.expand(3, *queries.shape)):
        out, lse = prefixed_attention(q, keys, values, *prefix, backend=backend, return_lse=True)
        assert out.shape == (3, 2, 2, 16)
        assert lse.shape == (3, 2, 2)
        leaves = (queries, *prefix)
        results.append((out, lse, *torch.autograd.grad(out.square().sum() + lse.sum(), leaves)))
    for shared, apart in zip(*results, strict=True):
        torch.testing.assert_close(shared, apart)


@pytest.mark.parametrize("backend", BACKENDS)
def test_many_queries_are_dealt_to_groups(backend, monkeypatch):
    """Groups of few queries, of which the last has fewer or none; the result does not change."""
    problem = Problem.of(Case([150, 3, 120]), 5)
    results = []
    for queries in (1024, 50):
        monkeypatch.setattr(shared_prefix, "_GROUP_QUERIES", queries)
        results.append(problem.run(backend, tile=64))
    assert shared_prefix.groups_of(273, 5, 2, torch.device(DEVICE)) > 1
    for one, several in zip(*(r.values() for r in results), strict=True):
        torch.testing.assert_close(several, one)
    problem.assert_exact(backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_two_runs_are_equal(backend):
    problem = Problem.of(Case(LENGTHS), 20, torch.float16)
    first, second = problem.run(backend), problem.run(backend)
    assert all(torch.equal(first[name], second[name]) for name in NAMES)


def test_gradcheck_in_float64():
    problem = Problem.of(Case([3, 0, 2], dim=3, dim_v=2, heads=2, kv_heads=1), 2, torch.float64)
    inputs = problem.inputs

    def attend(q, k, v, pk, pv):
        keys = JaggedTensor(k, inputs.k_offsets)
        out, lse = prefixed_attention(
            keys.with_values(q), keys, keys.with_values(v), pk, pv, causal=True, return_lse=True
        )
        return out.values, lse

    leaves = (inputs.q, inputs.k, inputs.v, problem.prefix_k, problem.prefix_v)
    assert torch.autograd.gradcheck(attend, [x.requires_grad_() for x in leaves])


@pytest.mark.parametrize("backend", ["reference", *BACKENDS])
def test_schedules_serve_several_layers(backend):
    problem = Problem.of(Case([5, 0, TILE + 2]), 6)
    x = JaggedTensor(problem.inputs.q, problem.inputs.q_offsets)
    prefix = (problem.prefix_k, problem.prefix_v)
    own = attention_schedule(x, causal=True)
    before = prefix_schedule(x, problem.prefix_k)
    options = {"causal": True, "backend": backend}
    scheduled = prefixed_attention(
        x, x, x, *prefix, schedule=own, prefix_schedule=before, **options
    )
    torch.testing.assert_close(
        scheduled.values, prefixed_attention(x, x, x, *prefix, **options).values
    )


def test_errors():
    problem = Problem.of(Case([5, 2]), 6)
    x = JaggedTensor(problem.inputs.q, problem.inputs.q_offsets)
    prefix = (problem.prefix_k, problem.prefix_v)
    with pytest.raises(ValueError, match="left side of window must be -1"):
        prefixed_attention(x, x, x, *prefix, window=(3, 0))
    with pytest.raises(ValueError, match=r"prefix_k must be \[P, H, D\]"):
        prefixed_attention(x, x, x, prefix[0][:, :1], prefix[1])
    with pytest.raises(ValueError, match="same tokens, got 6 and 5"):
        prefixed_attention(x, x, x, prefix[0], prefix[1][:5])
    with pytest.raises(TypeError, match=r"prefix_v must be torch\.float32"):
        prefixed_attention(x, x, x, prefix[0], prefix[1].half())
    with pytest.raises(TypeError, match=r"^prefix_k must be a tensor, got JaggedTensor$"):
        prefixed_attention(x, x, x, x, prefix[1])  # pyright: ignore
    with pytest.raises(TypeError, match="k must be a JaggedTensor"):
        prefixed_attention(x, x.values, x, *prefix)  # pyright: ignore
    for wrong in (attention_schedule(x), prefix_schedule(x, prefix[0][:3])):
        with pytest.raises(ValueError, match=r"prefix_schedule must be .* 7 queries"):
            prefixed_attention(x, x, x, *prefix, prefix_schedule=wrong)


@pytest.mark.skipif(DEVICE == "cuda", reason="a GPU would stop")
def test_queries_that_would_not_see_the_whole_prefix_are_refused():
    problem = Problem.of(Case([3, 6], [3, 4]), 6)
    q = JaggedTensor(problem.inputs.q, problem.inputs.q_offsets)
    k = JaggedTensor(problem.inputs.k, problem.inputs.k_offsets)
    prefix = (problem.prefix_k, problem.prefix_v)
    with pytest.raises(ValueError, match="would not see the whole prefix: user 1"):
        prefixed_attention(q, k, k, *prefix, causal=True)
    with pytest.raises(ValueError, match="would not see the whole prefix: user 0"):
        prefixed_attention(torch.zeros(5, 2, 16), k, k, *prefix, causal=True)
    problem.assert_exact("native", window=(-1, 1))
    # As many queries as keys, of other users.
    q = JaggedTensor(problem.inputs.q[:7], torch.tensor([0, 2, 7], device=DEVICE))
    k = JaggedTensor(problem.inputs.k, torch.tensor([0, 4, 7], device=DEVICE))
    with pytest.raises(ValueError, match="would not see the whole prefix: user 1"):
        prefixed_attention(q, k, k, *prefix, causal=True)


def parts(seed=0, dtype=torch.float32):
    """o1, lse1, o2, lse2 with queries that see nothing in one part, the other, or both."""
    generator = torch.Generator().manual_seed(seed)
    tensors = []
    for hidden in ((1, 3), (2, 3)):
        o = torch.randn(6, 2, 12, generator=generator).to(DEVICE, dtype)
        lse = torch.randn(6, 2, generator=generator).to(DEVICE) * 4
        for token in hidden:
            o[token], lse[token] = 0.0, -math.inf
        tensors += [o, lse]
    return tensors


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_merged_parts(dtype):
    """The kernel against the specification in float64; NaN gradients of lse where it is -inf."""
    given = parts(dtype=dtype)
    results: dict[Any, list[torch.Tensor]] = {}
    backend: Any
    for backend, leaves in {
        "reference": [x.double().requires_grad_() for x in given],
        "native": [x.clone().requires_grad_() for x in given],
        "triton": [x.clone().requires_grad_() for x in given],
    }.items():
        o, lse = merging.merge_parts(*leaves, backend=backend)
        assert torch.equal(lse == -math.inf, (leaves[1] == -math.inf) & (leaves[3] == -math.inf))
        seen = lse.isfinite()
        loss = (o * torch.arange(12, device=DEVICE)).sum() + lse[seen].square().sum()
        results[backend] = [o, lse, *torch.autograd.grad(loss, leaves)]
        assert not any(x.isnan().any() for x in results[backend])
    for name in BACKENDS:
        for result, exact in zip(results[name], results["reference"], strict=True):
            torch.testing.assert_close(result, exact.to(result.dtype))
    leaves = [x.clone().requires_grad_() for x in given]
    o, lse = merging.merge_parts(*leaves, backend="triton")
    d_lse = torch.where(lse.isinf(), math.nan, 1.0)
    gradients = torch.autograd.grad((o, lse), leaves, (torch.ones_like(o), d_lse))
    assert not any(x.isnan().any() for x in gradients)


def test_merging_takes_any_strides():
    """Heads first in memory, gradients too."""

    def heads_first(x):
        return x.detach().transpose(0, 1).contiguous().transpose(0, 1)

    results = []
    for laid_out in (torch.Tensor.detach, heads_first):
        leaves = [laid_out(x).requires_grad_() for x in parts()]
        merged = merging.merge_parts(*leaves, backend="triton")
        d_o, _, _, d_lse = map(laid_out, parts(seed=1))
        d_lse = d_lse.masked_fill(d_lse.isinf(), 1.0)
        results.append([*merged, *torch.autograd.grad(merged, leaves, [d_o, laid_out(d_lse)])])
    for expected, result in zip(*results, strict=True):
        assert torch.equal(result, expected)


@pytest.mark.parametrize("lse_gradient", [False, True])
def test_opcheck(lse_gradient):
    given = parts()
    torch.library.opcheck(merging.merge_parts_op, tuple(x.requires_grad_() for x in given))
    detached = [x.detach() for x in given]
    gradients = (torch.ones_like(detached[0]), torch.ones_like(detached[1]))
    d_lse = gradients[1] if lse_gradient else None
    torch.library.opcheck(merging.merge_parts_backward_op, (gradients[0], d_lse, *detached))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", ["self", "dense queries"])
def test_compiles_whole_and_for_other_batches(backend, kind):
    torch._dynamo.reset()

    def attend(values, offsets, prefix):
        x = JaggedTensor(values, offsets)
        queries = (
            x if kind == "self" else values[: 2 * (offsets.shape[0] - 1)].unflatten(0, (-1, 2))
        )
        out = prefixed_attention(
            queries, x, x, prefix, prefix, causal=kind == "self", backend=backend
        )
        return out.values if isinstance(out, JaggedTensor) else out

    compiled = torch.compile(attend, fullgraph=True, backend=COMPILER, dynamic=True)
    for number, lengths in enumerate(([4, 0, 19], [7, 3], [30, 1, 2, 9, 5], [16, 17, 2])):
        problem = Problem.of(Case(lengths), 5 + number)
        results = []
        for function in (attend, compiled):
            leaves = [
                x.detach().clone().requires_grad_() for x in (problem.inputs.q, problem.prefix_k)
            ]
            with torch.compiler.set_stance("fail_on_recompile" if number else "default"):
                out = function(leaves[0], problem.inputs.q_offsets, leaves[1])
            out.square().sum().backward()
            results.append((out.detach(), *(x.grad for x in leaves)))
        for eager, graph in zip(*results, strict=True):
            torch.testing.assert_close(graph, eager)


@pytest.mark.parametrize("backend", BACKENDS)
def test_compiles_with_many_queries(backend):
    """Enough for groups, and then too few."""
    torch._dynamo.reset()

    def attend(values, offsets, prefix):
        x = JaggedTensor(values, offsets)
        return prefixed_attention(x, x, x, prefix, prefix, backend=backend).values

    compiled = torch.compile(attend, fullgraph=True, backend=COMPILER, dynamic=True)
    for lengths in ([40] * 60, [30, 4]):
        problem = Problem.of(Case(lengths, heads=1, kv_heads=1, dim=8), 3)
        arguments = (problem.inputs.q, problem.inputs.q_offsets, problem.prefix_k)
        torch.testing.assert_close(compiled(*arguments), attend(*arguments))


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("dtype", "dim", "prefix", "lengths"),
    combined(
        [torch.float32, torch.float16, torch.bfloat16],
        [32, 64, 128],
        [1, 100, 700],
        [[0, 1, 63, 64, 65, 130], [200] * 40, [900, 0, 2000]],
        whole=False,
    ),
)
def test_on_the_device(dtype, dim, prefix, lengths):
    case = Case(lengths, heads=4, kv_heads=2, dim=dim)
    Problem.of(case, prefix, dtype).assert_exact("triton", causal=True)


@pytest.mark.gpu
def test_never_waits_for_the_device():
    problem = Problem.of(Case([900, 0, 700, 64, 3]), 40, torch.bfloat16)
    inputs = problem.inputs
    leaves = (inputs.q, inputs.k, inputs.v, problem.prefix_k, problem.prefix_v)
    q, k, v, pk, pv = (x.requires_grad_() for x in leaves)
    keys = JaggedTensor(k, inputs.q_offsets)

    def step():
        x = keys.with_values(q)
        schedule = prefix_schedule(x, pk)
        for given in (None, schedule):
            out = prefixed_attention(
                x, keys, keys.with_values(v), pk, pv, causal=True, prefix_schedule=given
            )
            out.values.backward(inputs.d_o)

    step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
