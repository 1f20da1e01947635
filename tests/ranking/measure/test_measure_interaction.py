"""Measuring the interaction operations: problems and peers agree, failures are rows."""

import dataclasses
import sys
from collections.abc import Sequence
from functools import partial
from types import ModuleType
from typing import Any

import fbgemm_adapter as adapter
import pandas as pd
import pytest
import torch
from torch import Tensor

import jagged_kernels
from jagged_ranking import results
from jagged_ranking.measure.ceilings import Ceilings
from jagged_ranking.measure.interaction import problem as problem_module
from jagged_ranking.measure.interaction.catalogue import OPERATIONS
from jagged_ranking.measure.interaction.layout import Form, Layout
from jagged_ranking.measure.interaction.measurement import PROBLEMS, measure_interaction
from jagged_ranking.measure.interaction.problem import Peer, Problem
from jagged_ranking.measure.providers.base import Unavailable
from jagged_ranking.measure.timing import Effort
from jagged_ranking.measure.workload_sets import token_sweep
from jagged_ranking.measure.workloads import Workload

pytestmark = pytest.mark.usefixtures("objects_apart")

CPU = torch.device("cpu")
QUICK = Effort(rounds=1, inner=1, warmup=1, seconds=0.01)
CEILINGS = Ceilings(1e10, 1e11, "float32")
LENGTHS = [9, 1, 30, 17, 2]
TRAINING = "forward+backward"
FBGEMM = {name for name in OPERATIONS if name.startswith(("jagged2_mat", "jagged2_soft"))} | {
    "jagged_dense_bmm",
    "jagged_jagged_bmm",
    "jagged_outer",
    "jagged_softmax",
    "jagged_softmax_narrow",
    "jagged_add",
    "jagged2_to_padded",
}
# What PyTorch 2.11 to 2.13 cannot do with nested tensors, or does wrongly.
NJT_GRADIENTS = ("jagged_sum", "jagged_mean", "jagged_softmax", "jagged_softmax_narrow")


def workload(**options: Any) -> Workload:
    chosen = {"heads": 1, "head_dim": 8, "dtype": torch.float32, "group": "tokens", **options}
    return Workload.from_lengths("w", LENGTHS, **chosen)


def measure(*operations: str, workloads: Sequence[Workload] = (), **options: Any) -> pd.DataFrame:
    given = {"effort": QUICK, "ceilings": CEILINGS, "progress": False, **options}
    return measure_interaction(operations, workloads or [workload()], **given)


@pytest.mark.parametrize("name", OPERATIONS)
def test_ours_and_every_peer_agree_with_the_specification(name: str) -> None:
    table = results.select(measure(name), op=name)
    modes = {"forward", TRAINING} if OPERATIONS[name].backward else {"forward"}
    assert set(table["mode"]) == modes
    said = table.set_index(["provider", "mode", "metric"])["status"]
    providers = set(table["provider"])
    assert len(providers) > 1
    for provider in providers:
        for mode in modes:
            status = said[provider, mode, "latency"]
            if provider == "fbgemm_sll":
                assert status in ("missing", "unsupported")
            elif provider == "njt" and name in NJT_GRADIENTS and mode == TRAINING:
                continue
            else:
                assert status == "ok", table["message"].tolist()
    errors = results.select(table, metric="rel_error", status="ok")
    errors = errors[errors["provider"] != "njt"]
    assert errors["value"].max() < 1e-5


@pytest.mark.parametrize("name", sorted(FBGEMM))
def test_fbgemm_is_called_as_its_operators_are_declared(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    stand_ins = {key.removeprefix("sll_"): partial(f, "auto") for key, f in adapter.SLL.items()}
    module = problem_module.FBGEMM_MODULES[0]
    for depth in range(1, module.count(".") + 2):
        fake = ModuleType(".".join(module.split(".")[:depth]))
        fake.__path__ = []
        monkeypatch.setitem(sys.modules, fake.__name__, fake)
    vars(sys.modules[module]).update(stand_ins)
    monkeypatch.setattr(problem_module, "need_cuda", lambda device, what: None)
    table = results.select(measure(name), op=name, provider="fbgemm_sll")
    assert set(table["status"]) == {"ok"}, table["message"].tolist()
    assert set(table["mode"]) == {"forward", TRAINING}


def test_every_operation_that_fbgemm_has_is_compared_with_it() -> None:
    here = {
        name
        for name, problem in PROBLEMS.items()
        if "fbgemm_sll" in problem(Layout(workload(), CPU)).peers
    }
    assert here == FBGEMM


def test_every_operation_of_the_catalogue_has_a_problem() -> None:
    assert set(PROBLEMS) == set(OPERATIONS)


@pytest.mark.parametrize("name", OPERATIONS)
def test_what_the_table_says_of_an_operation_is_so(name: str) -> None:
    operation = OPERATIONS[name]
    assert operation.function in jagged_kernels.__all__
    problem = PROBLEMS[name](Layout(workload(), CPU))
    if operation.traced:
        torch._dynamo.reset()
        call = torch.compile(problem.call, fullgraph=True, backend="eager")
        with torch.no_grad():
            got, expected = (f("native", *problem.inputs) for f in (call, problem.call))
        torch.testing.assert_close(got, expected)
    leaves = [x.clone().requires_grad_(x.is_floating_point()) for x in problem.inputs]
    out = problem.call("native", *leaves)
    first = out if isinstance(out, Tensor) else out[0]
    assert first.requires_grad == operation.backward


def test_every_public_operation_is_measured() -> None:
    functions = {
        name
        for name in jagged_kernels.__all__
        if callable(getattr(jagged_kernels, name)) and name[0].islower()
    }
    made = {"attention_schedule", "jagged_attention", "jagged2_like", "lengths_to_offsets"}
    made |= {"jagged_varlen_attention", "jagged_collate", "from_list_column", "to_list_column"}
    made |= {"from_torchrec", "to_torchrec", "prefixed_attention", "prefix_schedule"}
    made |= {"cached_attention", "cache_schedule", "key_statistics", "scissorhands"}
    made |= {"persistence_ratio", "explain_attention", "block_means"}
    made |= {"retrieved_blocks", "fp8_keys", "fp8_attention"}
    assert {op.function for op in OPERATIONS.values()} == functions - made


def test_rows_of_a_run() -> None:
    table = measure("jagged_sum", "jagged_dense_bmm", weighed=["w"], run_id="05", run_key="k")
    assert set(table["id"]) == {"05"}
    assert set(results.select(table, op="ceiling")["metric"]) == {"bandwidth", "arithmetic"}
    ours = results.select(table, op="jagged_sum", provider="jagged")
    metrics = {"latency", "max_abs_error", "rel_error", "peak_memory", "peak_memory_minus_inputs"}
    assert set(ours["metric"]) == metrics
    config = results.with_config(ours, "limit_ms", "tokens", "B", "D", "waste", "dtype", "threads")
    row = config[config["mode"] == TRAINING].iloc[0]
    assert (row["tokens"], row["B"], row["D"], row["dtype"]) == (59, 5, 8, "float32")
    assert row["waste"] == pytest.approx(1 - 59 / 150)
    # Forward 59 rows in and 5 out; backward 5 in and 59 out; 8 float32 each, at 10 GB/s.
    assert row["limit_ms"] == pytest.approx(2 * (59 + 5) * 8 * 4 / 1e10 * 1e3)
    peak = ours.set_index(["mode", "metric"])["value"]
    # Before the call: the tokens, and the gradient of the sums.
    held = peak["forward", "peak_memory"] - peak["forward", "peak_memory_minus_inputs"]
    assert held == (59 + 5) * 8 * 4
    padded = results.select(table, op="jagged_sum", provider="padded", mode="forward")
    peak = padded.set_index("metric")["value"]
    assert peak["peak_memory"] - peak["peak_memory_minus_inputs"] == (5 * 30 + 5) * 8 * 4


def test_memory_is_measured_on_the_named_batches_only() -> None:
    assert "peak_memory" not in set(measure("jagged_sum", weighed=["other"])["metric"])


def with_peer(
    monkeypatch: pytest.MonkeyPatch, peer: Any, dtype: torch.dtype = torch.float32
) -> pd.DataFrame:
    """The rows of a peer that is put beside ours in `jagged_sum`."""
    true = PROBLEMS["jagged_sum"]

    def problem(b: Layout) -> Problem:
        made = true(b)
        return dataclasses.replace(made, peers={**made.peers, "fake": peer})

    monkeypatch.setitem(PROBLEMS, "jagged_sum", problem)
    table = measure("jagged_sum", workloads=[workload(dtype=dtype)])
    assert (results.select(table, provider="jagged")["status"] == "ok").all()
    return results.select(table, provider="fake", metric="latency")


def test_what_is_wrong_missing_or_too_big_is_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    def sums(x: Tensor) -> Tensor:
        return torch.segment_reduce(x, "sum", lengths=torch.tensor(LENGTHS), axis=0)

    def detour(x: Tensor) -> Tensor:
        return 2 * sums(x) - sums(x).detach()

    def breaks(x: Tensor) -> Tensor:
        raise ZeroDivisionError("oh\nno")

    cases = {
        "wrong": (Peer(lambda x: 1.01 * sums(x)), {"error"}, "wrong: relative error"),
        "gradient": (Peer(detour), {"ok", "error"}, "wrong: relative error"),
        "shape": (Peer(lambda x: x), {"error"}, "shape"),
        "raises": (Peer(breaks), {"error"}, "ZeroDivisionError: oh"),
        "missing": (Unavailable("missing", "not here"), {"missing"}, "not here"),
        "too big": (Peer(sums, needs=10**18), {"out_of_memory"}, "refused: needs at least"),
    }
    for case, (peer, statuses, message) in cases.items():
        with monkeypatch.context() as patch:
            rows = with_peer(patch, peer)
        assert set(rows["status"]) == statuses, case
        failed = rows[rows["status"] != "ok"]
        assert failed["value"].isna().all()
        assert all(message in text for text in failed["message"]), case


@pytest.mark.parametrize(
    ("dtype", "error", "status"),
    [
        (torch.bfloat16, 0.03, "ok"),
        (torch.bfloat16, 0.05, "error"),
        (torch.float32, 0.03, "error"),
    ],
)
def test_a_peer_may_add_up_in_the_dtype_of_the_batch(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, error: float, status: str
) -> None:
    """Which is less exact, but the same thing; ours may not."""

    def sums(x: Tensor) -> Tensor:
        exact = torch.segment_reduce(x.float(), "sum", lengths=torch.tensor(LENGTHS), axis=0)
        return ((1 + error) * exact).to(x.dtype)

    assert set(with_peer(monkeypatch, Peer(sums), dtype)["status"]) == {status}
    true = PROBLEMS["jagged_sum"]

    def off(b: Layout) -> Problem:
        def call(backend: str, x: Tensor) -> Tensor:
            return (1 + error * (backend == "auto")) * sums(x) / (1 + error)

        return dataclasses.replace(true(b), call=call)

    monkeypatch.setitem(PROBLEMS, "jagged_sum", off)
    table = measure("jagged_sum", workloads=[workload(dtype=dtype)])
    rows = results.select(table, provider="jagged", metric="latency")
    assert set(rows["status"]) == {"error"}


def test_an_operation_without_a_reference_is_rows_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(b: Layout) -> Problem:
        return dataclasses.replace(PROBLEMS["jagged_mean"](b), call=lambda backend, x: 1 / 0)

    monkeypatch.setitem(PROBLEMS, "jagged_sum", broken)
    table = results.select(measure("jagged_sum"), op="jagged_sum")
    assert set(table["status"]) == {"error"}
    assert len(table) == 2 * 4  # modes, and ours with three peers


def test_unknown_names_are_refused_with_what_is_known() -> None:
    with pytest.raises(ValueError, match="unknown operation 'typo'; known are jagged_dense_bmm"):
        measure("typo")
    with pytest.raises(ValueError, match="unknown mode 'typo'"):
        measure("jagged_sum", modes=["typo"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_two_numbers_of_a_user_are_equal_where_that_matters(dtype: torch.dtype) -> None:
    b = Layout(workload(dtype=dtype), CPU)
    values = b.distinct(3)
    assert values.dtype == dtype
    assert values.isfinite().all()
    for user in values.split(LENGTHS):
        for column in user.T:
            assert len(column.unique()) == len(column)


def test_forms_lead_there_and_back() -> None:
    b = Layout(workload(), CPU)
    tokens, scores = b.random(b.tokens, 4), b.random(b.scores)
    pairs: list[tuple[Form, Tensor]] = [
        (b.padded(), tokens),
        (b.nested(), tokens),
        (b.squares(-1.0), scores),
    ]
    for form, values in pairs:
        assert torch.equal(form.back(form.to(values)), values)
    padded = b.padded(7.0).to(tokens)
    assert padded.shape == (5, 30, 4)
    assert torch.equal(padded[1, 0], tokens[9])
    assert (padded[1, 1:] == 7).all()
    square = b.squares(-1.0).to(scores)
    assert torch.equal(square[4, :2, :2].flatten(), scores[-4:])
    assert int((square == -1).sum()) == 5 * 900 - b.scores


def test_the_sweep_reaches_a_million_tokens_at_one_waste() -> None:
    facts = [batch.facts() for batch in token_sweep()]
    tokens = [fact["tokens"] for fact in facts]
    assert tokens[1] == 135_639  # the lengths of workload B
    assert tokens[-1] >= 1_000_000
    assert tokens == sorted(tokens)
    assert all(0.85 < fact["waste"] < 0.89 for fact in facts)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", OPERATIONS)
def test_on_a_gpu_whoever_runs_is_right(name: str, dtype: torch.dtype) -> None:
    batches = token_sweep([64], dtype=dtype)
    latency = results.select(measure(name, workloads=batches, device="cuda"), metric="latency")
    ours = results.select(latency, provider="jagged")
    bad = ours[ours["status"] != "ok"]
    assert bad.empty, bad[["op", "mode", "message"]].to_string()
    fbgemm = latency["provider"] == "fbgemm_sll"  # of which some have errors of their own
    others = latency[~latency["provider"].isin(["njt", "jagged"]) & ~fbgemm]
    bad = others[others["status"] != "ok"]
    assert bad.empty, bad[["op", "provider", "mode", "message"]].to_string()
