"""What a score becomes: SiLU, sigmoid and a user's own in place of softmax, in every backend."""

from __future__ import annotations

import copy
import importlib
import math
import pickle
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from attention_cases import DEVICE, Case, seen_keys
from combinations import combined
from launch_keys import batches, record_launches
from meeting_cases import assert_as_exact, pointwise, run
from score_policies import OWN, POLICIES

from jagged_kernels import (
    ALiBi,
    JaggedTensor,
    PointwiseScores,
    RelativePositionBias,
    Sigmoid,
    SiLU,
    attention_schedule,
    jagged_attention,
)
from jagged_kernels.attention.operators import general as ops_general
from jagged_kernels.attention.scores import policy

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "keys_and_scores.md"
BACKENDS = ("native", "triton")
DTYPES = [torch.float32, torch.float16]


MASKS = [{}, {"causal": True}, {"window": (7, 2)}, {"window": (-1, 1)}]
SELF, CROSS = Case([37, 0, 5, 64, 1]), Case([3, 40, 0, 17], [33, 8, 5, 17])
GROUPED = Case([20, 3], heads=4, kv_heads=2, dim=24, dim_v=40)


@pytest.mark.parametrize(
    ("policy", "backend", "mask", "case", "dtype"),
    combined(POLICIES, BACKENDS, MASKS, [SELF, CROSS, GROUPED], DTYPES),
)
def test_as_exact_as_the_formula(policy, backend, mask, case, dtype):
    scores, function = POLICIES[policy]
    inputs = case.inputs(dtype)

    def visible(_user, queries, keys):
        return seen_keys(queries, keys, **mask)[None]

    weigh = pointwise(function, scores.divide_by)
    assert_as_exact(inputs, backend, visible, weigh, scores=scores, **mask)


@pytest.mark.parametrize(
    ("policy", "mask", "heads", "dtype"),
    combined(POLICIES, MASKS, [(2, 2), (4, 2)], DTYPES, whole=False),
)
def test_users_of_a_few_tokens(policy, mask, heads, dtype, monkeypatch):
    """Who have kernels of their own; one user is longer."""
    scores, function = POLICIES[policy]
    q_heads, kv_heads = heads
    case = Case([17, 0, 5, 32, 1, 16, 33, 9], heads=q_heads, kv_heads=kv_heads)
    inputs = case.inputs(dtype).with_shared_offsets()

    def visible(_user, queries, keys):
        return seen_keys(queries, keys, **mask)[None]

    weigh = pointwise(function, scores.divide_by)
    assert_as_exact(inputs, "triton", visible, weigh, scores=scores, **mask)
    launches = record_launches(monkeypatch)
    run("triton", inputs, scores=scores, **mask)
    kernels = {str(key[0]) for key in launches}
    assert {"_short_forward_kernel", "_short_backward_kernel"} <= kernels


@pytest.mark.parametrize("place", ["q", "k", "v", "d_o"])
def test_what_is_hidden_touches_no_user_of_a_few_tokens(place):
    results = []
    for backend in ("native", "triton"):
        inputs = Case([17, 20], heads=4, kv_heads=2).inputs(torch.float32).with_shared_offsets()
        getattr(inputs, place)[10] = math.nan
        results.append(run(backend, inputs, scores=SiLU(), causal=True))
    for name, expected in results[0].items():
        found = results[1][name]
        assert torch.equal(found.isnan(), expected.isnan()), name
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize("backend", BACKENDS)
def test_with_a_bias_and_its_gradient(backend):
    inputs = SELF.inputs(torch.float32)
    results = []
    for which, dtype in (("reference", torch.float64), (backend, torch.float32)):
        generator = torch.Generator().manual_seed(3)
        table = torch.randn(8, 2, generator=generator).to(DEVICE, dtype).requires_grad_()
        slopes = torch.rand(2, generator=generator).to(DEVICE, dtype).requires_grad_()
        bias = (RelativePositionBias(table, max_distance=20), ALiBi(slopes))
        given = inputs.double() if dtype == torch.float64 else inputs
        found = run(which, given, scores=SiLU(), causal=True, bias=bias)
        results.append([*found.values(), table.grad, slopes.grad])
    for exact, found in zip(*results, strict=True):
        torch.testing.assert_close(found.double(), exact, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_with_dropout(backend):
    """The mask depends on a seed alone."""
    inputs, results = SELF.inputs(torch.float32), []
    for which, given in (("reference", inputs.double()), (backend, inputs)):
        torch.manual_seed(5)
        results.append(run(which, given, scores=SiLU(), causal=True, dropout_p=0.4))
    exact, found = results
    for name, result in found.items():
        torch.testing.assert_close(result.double(), exact[name], rtol=1e-4, atol=2e-5)
    assert not torch.allclose(found["o"], run(backend, inputs, scores=SiLU(), causal=True)["o"])


@pytest.mark.parametrize("backend", ["reference", *BACKENDS])
@pytest.mark.parametrize("place", ["q", "k", "v", "d_o"])
def test_what_is_hidden_touches_nothing(backend, place):
    """A NaN at a token reaches the same numbers as in the specification, which sums what is
    seen."""
    inputs = Case([37, 0, 20]).inputs(torch.float32)
    getattr(inputs, place)[30] = math.nan
    clean = Case([37, 0, 20]).inputs(torch.float32)
    found = run(backend, inputs, scores=SiLU(), causal=True)
    without = run(backend, clean, scores=SiLU(), causal=True)
    touched = {"q": slice(30, 31), "k": slice(30, 37), "v": slice(30, 37), "d_o": slice(0, 0)}
    expected = torch.zeros(57, dtype=torch.bool)
    expected[touched[place]] = True
    is_nan = found["o"].isnan().flatten(1).any(1).cpu()
    assert torch.equal(is_nan, expected)
    torch.testing.assert_close(found["o"][~is_nan], without["o"][~is_nan], rtol=0, atol=1e-6)
    for name in ("dq", "dk", "dv"):
        # Of the other user, and of tokens that neither see this one nor are seen.
        torch.testing.assert_close(found[name][37:], without[name][37:], rtol=0, atol=1e-6)
    if place == "v":
        assert not found["dv"].isnan().any(), "weights do not depend on v"
        torch.testing.assert_close(found["dk"][31:37].isnan(), without["dk"][31:37].isnan())


@pytest.mark.parametrize("backend", ["reference", *BACKENDS])
def test_an_enormous_score(backend):
    """No sum of exponentials that could pass what float32 holds."""
    inputs = Case([20]).inputs(torch.float32)
    inputs.q *= 1e4
    found = run(backend, inputs, scores=Sigmoid(), causal=True)
    assert all(result.isfinite().all() for result in found.values())


@pytest.mark.parametrize("backend", ["reference", *BACKENDS])
def test_a_result_does_not_depend_on_the_batch(backend):
    """Divided by the number of the user's own keys."""
    alone, both = Case([33]).inputs(torch.float32), Case([33, 90]).inputs(torch.float32)
    own = {name: getattr(both, name)[:33] for name in ("q", "k", "v", "d_o", "d_lse")}
    part = replace(alone, **own)
    first, second = (run(backend, x, scores=SiLU(), causal=True) for x in (part, both))
    for name, result in first.items():
        torch.testing.assert_close(second[name][:33], result)


@pytest.mark.parametrize("policy", ["silu", "own"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_compiles_whole_and_for_other_batches(backend, policy):
    torch._dynamo.reset()
    scores = POLICIES[policy][0]

    def attend(values, offsets):
        x = JaggedTensor(values, offsets)
        schedule = attention_schedule(x, causal=True, tile_q=16, tile_k=16)
        options = {"causal": True, "schedule": schedule, "backend": backend}
        return jagged_attention(x, x, x, scores=scores, **options).values

    compiler = "inductor" if DEVICE == "cuda" else "aot_eager"
    compiled = torch.compile(attend, fullgraph=True, backend=compiler, dynamic=True)
    for number, lengths in enumerate(([4, 0, 19], [7, 3], [30, 1, 2, 9, 5])):
        inputs, results = Case(lengths).inputs(torch.float32), []
        for function in (attend, compiled):
            values = inputs.q.detach().clone().requires_grad_()
            with torch.compiler.set_stance("fail_on_recompile" if number else "default"):
                out = function(values, inputs.q_offsets)
            (out * out).sum().backward()
            results.append((out.detach(), values.grad))
        for eager, graph in zip(*results, strict=True):
            torch.testing.assert_close(graph, eager)


def test_opcheck():
    inputs = GROUPED.inputs(torch.float32)
    leaves = [x.requires_grad_() for x in (inputs.q, inputs.k, inputs.v)]
    x = JaggedTensor(inputs.q, inputs.q_offsets)
    schedule = attention_schedule(x, causal=True, tile_q=16, tile_k=16)
    ranges = (None, None, None, None, None, None, 0, 0, False)
    no_bias = (None, None, None, None, None, None, 0, False, 1.0, 2.0)
    rest = (
        schedule.rows, schedule.rows_t, 16, 16, -1, 0, 0.25, inputs.q_offsets, inputs.k_offsets,
        inputs.q_offsets, None, 0.0, *ranges, "silu", 7.0, *no_bias,
    )  # fmt: skip
    forward = ops_general.attention_triton_general
    torch.library.opcheck(forward, (*leaves, True, *rest))
    results = forward(*leaves, True, *rest)
    detached = [t.detach() for t in (*leaves, *results)]
    backward = (inputs.d_o, None, *detached, [False] * 4, *rest)
    torch.library.opcheck(ops_general.attention_triton_general_backward, backward)


def test_no_batch_compiles_anything_again(monkeypatch):
    keys = record_launches(monkeypatch)
    seen: set[object] = set()
    for number, lengths in enumerate(batches(60)):
        inputs = Case(lengths).inputs(torch.float32)
        run("triton", inputs, scores=SiLU(), causal=True)
        new = {key for key in keys if "plain" in key[1]} - seen
        assert number < 6 or not new, f"{lengths} compiled {new}"
        seen |= new
        keys.clear()
    assert len(seen) >= 3


def test_the_same_from_run_to_run():
    inputs = SELF.inputs(torch.float32)
    first, second = (run("triton", inputs, scores=OWN, causal=True) for _ in range(2))
    for name, result in first.items():
        assert torch.equal(result, second[name]), name


def test_the_documented_policy_is_one(tmp_path, monkeypatch):
    """docs/keys_and_scores.md: a function of one's own takes ten lines."""
    text = DOCUMENT.read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    (code,) = (block for block in blocks if "@triton" in block)
    (check,) = (block for block in blocks if "requires_grad_" in block)
    functions = code[code.index("@triton") : code.index("x = Jagged")]
    assert len([line for line in functions.splitlines() if line.strip()]) <= 10
    # Triton reads the source of a function in its file.
    (tmp_path / "documented_policy.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    documented = importlib.import_module("documented_policy")
    assert documented.out.values.shape == (5, 2, 16)
    inputs = SELF.inputs(torch.float32)

    def visible(_user, queries, keys):
        return seen_keys(queries, keys, causal=True)[None]

    weigh = pointwise(lambda x: x.relu().square(), None)
    for backend in BACKENDS:
        options = {"scores": documented.squared_relu, "causal": True}
        assert_as_exact(inputs, backend, visible, weigh, **options)

    exec(check, dict(vars(documented)))
    (tmp_path / "mistaken_policy.py").write_text(code.replace("return 2.0 *", "return"))
    mistaken = importlib.import_module("mistaken_policy")
    with pytest.raises(AssertionError, match="not close"):
        exec(check, dict(vars(mistaken)))


def test_copies_are_the_same_policy(monkeypatch):
    """Of a model, say, or in another process, where a policy's functions have other names."""
    assert copy.deepcopy(OWN) is OWN
    own = PointwiseScores("in PyTorch", torch.relu, divide_by=3)
    pickled = pickle.dumps(own)
    monkeypatch.setattr(policy, "_OWN", {})
    x = JaggedTensor(torch.randn(5, 2, 8), torch.tensor([0, 5]))
    found = jagged_attention(x, x, x, scores=pickle.loads(pickled), backend="native")
    expected = jagged_attention(x, x, x, scores=own, backend="native")
    assert torch.equal(found.values, expected.values)


def test_policies_of_one_name_and_weight_may_differ_in_their_gradient():
    """A policy is known by all its functions: another one does not take its place."""
    other = replace(OWN, d_score=OWN.weight)
    assert other.key != OWN.key
    assert policy.functions_of(OWN.key) == (OWN.weight, OWN.d_score)


def test_refusals():
    x = JaggedTensor(torch.randn(5, 2, 8), torch.tensor([0, 5]))
    with pytest.raises(ValueError, match="no lse to return"):
        jagged_attention(x, x, x, scores=SiLU(), return_lse=True)
    with pytest.raises(TypeError, match=r"scores must be .*SiLU.*, got 'silu'"):
        jagged_attention(x, x, x, scores="silu")  # pyright: ignore
    for divide_by in (0, -1.0, math.inf, math.nan):
        with pytest.raises(ValueError, match="divide_by must be a positive number"):
            SiLU(divide_by=divide_by)
    for divide_by in ("7", torch.tensor(7.0)):
        with pytest.raises(TypeError, match="divide_by must be a number or None, got "):
            SiLU(divide_by=divide_by)  # pyright: ignore
    with pytest.raises(TypeError, match="both weight and d_score"):
        PointwiseScores("half", torch.relu, OWN.weight)
    with pytest.raises(TypeError, match="reference must be a function"):
        PointwiseScores("none", 3)  # pyright: ignore
    x = x.to(DEVICE)
    only_here = PointwiseScores("in PyTorch", torch.relu)
    jagged_attention(x, x, x, scores=only_here, backend="native")
    with pytest.raises(NotImplementedError, match="'in PyTorch' have no Triton functions"):
        jagged_attention(x, x, x, scores=only_here, backend="triton")
