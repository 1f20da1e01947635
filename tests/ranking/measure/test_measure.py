"""Measuring: nobody is timed wrong, failures are rows, time and memory are what they say."""

import math
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pandas as pd
import pytest
import torch
from torch import Tensor

from jagged_ranking import results
from jagged_ranking.measure import reference as reference_module
from jagged_ranking.measure.benchmark import measure_attention
from jagged_ranking.measure.ceilings import Ceilings
from jagged_ranking.measure.contest import CROWDED, explain
from jagged_ranking.measure.lineup import default_providers
from jagged_ranking.measure.peak_memory import allocated, peak_memory
from jagged_ranking.measure.providers import (
    MODES,
    PROVIDERS,
    TRAINING,
    Prepared,
    Provider,
    Unavailable,
    dense,
)
from jagged_ranking.measure.providers.block_mask import BLOCK, document_block_mask
from jagged_ranking.measure.providers.jagged import as_is
from jagged_ranking.measure.reference import compare, reference, tolerance
from jagged_ranking.measure.timing import Effort
from jagged_ranking.measure.workload_sets import with_options
from jagged_ranking.measure.workloads import Batch, Workload, setup

pytestmark = pytest.mark.usefixtures("objects_apart")

CPU = torch.device("cpu")
QUICK = Effort(rounds=2, inner=1, warmup=1, seconds=0.05)
CEILINGS = Ceilings(1e10, 1e11, "float32")
ON_CPU = ("jagged", "dense_eager", "dense_flash", "dense_sdpa", "njt_sdpa")

NO_KERNEL = ("njt_sdpa", True)


def small(**options: Any) -> Workload:
    given = [9, 1, 30, 17, 2]
    chosen = {"heads": 2, "head_dim": 16, "dtype": torch.float32, **options}
    return Workload.from_lengths("small", given, **chosen)


def measure(workload: Workload, **options: Any) -> pd.DataFrame:
    given = {"effort": QUICK, "ceilings": CEILINGS, "progress": False, **options}
    return measure_attention([workload], **given)


@pytest.mark.parametrize("numbers", [1, 10**9], ids=["alone", "together"])
@pytest.mark.parametrize(("causal", "queries"), [(False, None), (True, None), (False, 3)])
def test_reference_is_attention_in_float64(
    monkeypatch: pytest.MonkeyPatch, numbers: int, causal: bool, queries: int | None
) -> None:
    monkeypatch.setattr(reference_module, "GROUP_NUMBERS", numbers)
    given = [9, 1, 30, 17, 2, 0, 27, 90, 41]
    batch = setup(
        Workload.from_lengths(
            "w", given, heads=2, head_dim=16, dtype=torch.float32, causal=causal, queries=queries
        ),
        CPU,
    )
    found = reference(batch)
    q, k, v = (x.double().requires_grad_() for x in (batch.q, batch.k, batch.v))
    outs = []
    bounds = zip(batch.offsets[:-1].tolist(), batch.offsets[1:].tolist(), strict=True)
    for user, (start, end) in enumerate(bounds):
        mine = q[start:end] if queries is None else q[user]
        scores = torch.einsum("ihd,jhd->hij", mine, k[start:end]) / 4.0
        if causal:
            scores = scores + torch.full_like(scores, -math.inf).triu(1)
        outs.append(torch.einsum("hij,jhd->ihd", scores.softmax(-1), v[start:end]))
    out = torch.cat(outs).view(batch.q.shape)
    grads = torch.autograd.grad(out, (q, k, v), batch.dout.double())
    for got, expected in zip(found.parts(), (out, *grads), strict=True):
        torch.testing.assert_close(got.double(), expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("name", "causal"),
    # PyTorch has no causal kernel for nested tensors on a CPU.
    [(name, causal) for name in ON_CPU for causal in (False, True) if (name, causal) != NO_KERNEL],
)
def test_every_provider_agrees_with_its_reference(name: str, causal: bool) -> None:
    batch = setup(small(causal=causal), CPU)
    provider = PROVIDERS[name]
    ready = provider.prepare(batch)
    expected = reference(batch, padding_attends=provider.padding_attends)
    got = ready.compare_as(batch, "forward+backward")
    assert compare(list(zip(got, expected.parts(), strict=True))).relative < 1e-5
    assert len(ready.run("forward")) == 1


@pytest.mark.parametrize("name", ["jagged", "dense_eager", "dense_sdpa"])
@pytest.mark.parametrize("queries", [1, 30])  # the longest history has 30 events too
def test_every_provider_of_target_attention_agrees_with_the_reference(
    name: str, queries: int
) -> None:
    batch = setup(small(queries=queries), CPU)
    ready = PROVIDERS[name].prepare(batch)
    expected = reference(batch).parts()
    got = ready.compare_as(batch, "forward+backward")
    assert [x.shape for x in got] == [x.shape for x in expected]
    assert compare(list(zip(got, expected, strict=True))).relative < 1e-5


def test_target_attention_is_measured_by_whoever_takes_dense_queries() -> None:
    table = measure(small(queries=4, group="target"), providers=None)
    assert set(results.select(table, op="attention")["provider"]) == {"jagged", "dense_sdpa"}
    assert (table["status"] == "ok").all()
    config = results.with_config(results.select(table, op="attention"), "queries", "limit_ms")
    assert set(config["queries"]) == {4}
    # k and v of 59 events, q and o of 20 candidates; 32 float32 each.
    limit = config[config["mode"] == "forward"]["limit_ms"].iloc[0]
    assert limit == pytest.approx(2 * (59 + 20) * 32 * 4 / 1e10 * 1e3)
    others = measure(small(queries=4), providers=["njt_sdpa", "jagged_stream"])
    failed = results.select(others, op="attention")
    assert set(failed["status"]) == {"unsupported"}


def test_what_a_padded_model_needs_is_known_beforehand() -> None:
    sdpa, eager = PROVIDERS["dense_sdpa"], PROVIDERS["dense_eager"]
    both, target = small(), small(queries=3)
    padded, candidates, scores = 5 * 30 * 32 * 4, 5 * 3 * 32 * 4, 5 * 2 * 30 * 4
    assert sdpa.bytes_needed(both, "forward+backward") == 8 * padded
    assert sdpa.bytes_needed(target, "forward+backward") == 4 * (padded + candidates)
    assert eager.bytes_needed(target, "forward") == 2 * (padded + candidates) + 2 * 3 * scores


def test_padding_that_attends_is_not_the_same_thing() -> None:
    batch = setup(small(), CPU)
    masked, unmasked = reference(batch), reference(batch, padding_attends=True)
    assert compare([(unmasked.out, masked.out)]).relative > 0.05
    assert compare([(unmasked.out, masked.out)]).relative > tolerance(batch)


@pytest.mark.parametrize("name", ON_CPU)
def test_a_forward_keeps_nothing_for_a_backward(name: str) -> None:
    """That is time and memory of training."""
    ready = PROVIDERS[name].prepare(setup(small(), CPU))
    assert all(x.requires_grad for x in ready.inputs)
    assert not any(x.requires_grad for x in ready.run("forward"))


def test_rows_of_a_run() -> None:
    table = measure(small(), providers=ON_CPU, run_id="01_speed", run_key="k")
    assert (table["status"] == "ok").all(), table[table["status"] != "ok"]["message"].tolist()
    assert set(table["id"]) == {"01_speed"}
    attention = results.select(table, op="attention")
    metrics = {"latency", "useful_flops", "max_abs_error", "rel_error"}
    metrics |= {"peak_memory", "peak_memory_minus_inputs"}
    for name in ON_CPU:
        for mode in MODES:
            mine = results.select(attention, provider=name, mode=mode)
            assert set(mine["metric"]) == metrics
            assert len(mine) == len(metrics)
            (rates,), (took,) = (
                results.select(mine, metric=metric)["samples"]
                for metric in ("useful_flops", "latency")
            )
            useful = 4 * 2 * 16 * (9**2 + 1 + 30**2 + 17**2 + 2**2)
            useful *= 3.5 if mode == TRAINING else 1
            done = [rate * ms / 1e3 for rate, ms in zip(rates, took, strict=True)]
            assert done == pytest.approx([useful] * len(took))
    names = ("tokens", "waste", "limit_ms", "device", "threads")
    config = results.with_config(attention, *names).iloc[0]
    assert config["threads"] == 1
    assert config["tokens"] == 59
    assert config["waste"] == pytest.approx(1 - 59 / 150)
    # 4 tensors of 59 x 2 x 16 float32 at 10 GB/s are slower than the arithmetic at 100 GFLOP/s.
    assert config["limit_ms"] == pytest.approx(4 * 59 * 32 * 4 / 1e10 * 1e3)
    assert config["device"].startswith("CPU")
    assert set(results.select(table, op="ceiling")["metric"]) == {"bandwidth", "arithmetic"}


def test_memory_counts_the_scores_of_a_dense_model() -> None:
    # Padded to 64 keys: 3 users x 1 head x 64 x 64 scores of 4 bytes.
    workload = Workload.from_lengths("m", [64, 3, 3], heads=1, head_dim=8, dtype=torch.float32)
    table = measure(workload, providers=["jagged", "dense_eager"], metrics=["memory"])
    peak = table.set_index(["provider", "mode", "metric"])["value"].sort_index()
    scores, padded = 3 * 64 * 64 * 4, 3 * 64 * 8 * 4
    dense = peak["dense_eager", "forward"]
    assert dense["peak_memory_minus_inputs"] >= 2 * scores
    assert dense["peak_memory_minus_inputs"] < 3 * scores + 6 * padded
    held = dense["peak_memory"] - dense["peak_memory_minus_inputs"]
    assert held == 4 * padded + 3 * 64  # q, k, v, dout and the mask
    ours = peak["jagged", "forward"]
    assert ours["peak_memory"] - ours["peak_memory_minus_inputs"] == 4 * 70 * 8 * 4 + 4 * 4


def test_peak_is_of_what_lives_at_one_time() -> None:
    def call() -> None:
        for _ in range(3):
            big = torch.empty(100_000, dtype=torch.uint8)
            small_one = torch.empty(1_000, dtype=torch.uint8)
            del big, small_one

    kept = torch.empty(500, dtype=torch.uint8)
    peak = peak_memory(call, inputs=[kept, kept[:10]], device=CPU)
    assert peak.beyond_inputs == 101_000
    assert peak.total == 101_500


@pytest.mark.gpu
def test_peaks_of_backwards_are_the_same_every_time() -> None:
    """They were not: what the backward before still held counted as memory from before."""
    device = torch.device("cuda")
    x = torch.randn(2**20, device=device, requires_grad=True)

    def call() -> None:
        torch.autograd.grad(x.sin().cos(), x, torch.ones_like(x))

    own = allocated(device)
    peaks = {peak_memory(call, inputs=[x], device=device, floor=own) for _ in range(100)}
    assert len(peaks) == 1
    assert next(iter(peaks)).total == next(iter(peaks)).beyond_inputs >= 2 * 4 * 2**20


def _fake(name: str, change: Callable[[Tensor], Tensor]) -> Provider:
    """Ours, with something done to its output."""

    def prepare(batch: Batch) -> Prepared:
        ready = PROVIDERS["jagged"].prepare(batch)
        inner = ready.forward
        ready.forward = lambda: change(inner())
        ready.to_tokens = as_is
        return ready

    return Provider(name=name, description="", prepare=prepare)


def _raise(error: Exception) -> Callable[[Tensor], Tensor]:
    def change(out: Tensor) -> Tensor:
        raise error

    return change


@pytest.mark.parametrize(
    ("change", "status", "message"),
    [
        (lambda out: out * 1.01, "error", "wrong: relative error"),
        (lambda out: out + math.nan, "error", "wrong"),
        (lambda out: out.roll(1, 0), "error", "wrong"),
        (_raise(torch.OutOfMemoryError("CUDA out of memory. Tried")), "out_of_memory", "Tried"),
        (_raise(RuntimeError("cudnn: out of memory")), "out_of_memory", "cudnn"),
        (_raise(RuntimeError("No available kernel.")), "unsupported", "No available"),
        (_raise(RuntimeError("No viable backend for")), "unsupported", "No viable"),
        (_raise(NotImplementedError("later")), "unsupported", "later"),
        (_raise(ZeroDivisionError("oh\nno")), "error", "ZeroDivisionError: oh"),
        (_raise(Unavailable("missing", "not here")), "missing", "not here"),
    ],
)
def test_what_fails_is_a_row_and_never_timed(
    monkeypatch: pytest.MonkeyPatch,
    change: Callable[[Tensor], Tensor],
    status: str,
    message: str,
) -> None:
    monkeypatch.setitem(PROVIDERS, "fake", _fake("fake", change))
    table = measure(small(), providers=["fake", "dense_sdpa"])
    fake = results.select(table, provider="fake")
    failed = fake[~fake["metric"].isin(["max_abs_error", "rel_error"])]
    assert set(failed["status"]) == {status}
    assert set(failed["metric"]) == {"latency", "peak_memory", "peak_memory_minus_inputs"}
    assert set(failed["mode"]) == set(MODES)
    assert failed["value"].isna().all()
    assert all(message in text and "\n" not in text for text in failed["message"])
    assert (results.select(table, provider="dense_sdpa")["status"] == "ok").all()


def test_a_wrong_gradient_is_found_although_the_output_is_right(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def detour(out: Tensor) -> Tensor:
        return 2 * out - out.detach()

    monkeypatch.setitem(PROVIDERS, "fake", _fake("fake", detour))
    table = results.select(measure(small(), providers=["fake"]), metric="latency")
    by_mode = dict(zip(table["mode"], table["status"], strict=True))
    assert by_mode == {"forward": "ok", "forward+backward": "error"}


def test_what_cannot_fit_is_refused_before_it_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jagged_ranking.measure.contest.free_bytes", lambda device: 20_000)
    table = measure(small(), providers=["jagged", "dense_eager"], metrics=["latency"])
    dense = results.select(table, provider="dense_eager")
    assert set(dense["status"]) == {"out_of_memory"}
    assert dense["message"].str.startswith("refused: needs at least").all()
    assert (results.select(table, provider="jagged")["status"] == "ok").all()


class Device:
    """One on which a model finds no room while others hold some."""

    def __init__(self, *, alone: bool) -> None:
        self.alone, self.held = alone, 0

    def prepare(self, batch: Batch) -> Prepared:
        """Ours: with another one alive there is no room, or there is none at all."""
        ready = PROVIDERS["jagged"].prepare(batch)
        inner, ready.to_tokens = ready.forward, as_is
        self.held += 1
        weakref.finalize(ready, self._given_back)

        def forward() -> Tensor:
            if self.held > 1 or not self.alone:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 64.00 GiB")
            return inner()

        ready.forward = forward
        return ready

    def _given_back(self) -> None:
        self.held -= 1


@pytest.mark.parametrize("alone", [True, False])
@pytest.mark.parametrize("metrics", [["latency"], ["memory"]])
def test_memory_that_others_held_is_not_said_to_be_too_much(
    monkeypatch: pytest.MonkeyPatch, alone: bool, metrics: list[str]
) -> None:
    """Whoever runs out of it has not, unless it does alone, too."""
    device = Device(alone=alone)
    for name in ("fake", "other"):
        fake = Provider(name=name, description="", prepare=device.prepare)
        monkeypatch.setitem(PROVIDERS, name, fake)
    table = measure(small(), providers=["fake", "other"], metrics=metrics)
    failed = table[table["op"] == "attention"]
    assert set(failed["status"]) == {"unsupported" if alone else "out_of_memory"}
    assert set(failed["provider"]) == {"fake", "other"}
    assert failed["message"].eq(CROWDED).all() == alone


def test_a_peer_without_a_gradient_is_measured_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PROVIDERS, "fake", replace(PROVIDERS["jagged"], forward_only=True))
    table = measure(small(), providers=["fake"])
    for metric in ("latency", "peak_memory"):
        rows = results.select(table, metric=metric, op="attention").set_index("mode")
        assert rows.loc["forward", "status"] == "ok"
        assert rows.loc["forward+backward", "status"] == "unsupported"
        assert rows.loc["forward+backward", "message"] == "fake has no gradient"


def test_peers_that_need_a_gpu_or_an_installation_say_so() -> None:
    names = ["dense_cudnn", "flex", "varlen_attn", "varlen_attn_split"]
    names += ["fbgemm_sll", "flash_attn_4", "flashinfer"]
    table = results.select(measure(small(), providers=names), metric="latency")
    assert set(table["provider"]) == set(names)
    assert set(table["status"]) <= {"missing", "unsupported"}
    assert (table["message"] != "").all()


def test_padded_tensors_of_too_many_numbers_break_no_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fits, wide = small(), small(head_dim=32)
    numbers = wide.users * wide.heads * wide.max_len * wide.head_dim
    monkeypatch.setattr(dense, "MOST_NUMBERS", numbers)
    for workload, status in ((fits, "ok"), (wide, "unsupported")):
        table = measure(workload, providers=["jagged", "dense_flash"])
        rows = results.select(table, op="attention", provider="dense_flash", metric="latency")
        assert set(rows["status"]) == {status}
    assert rows["message"].str.contains("from 2**31 padded numbers on", regex=False).all()


def test_a_sweep_leaves_out_what_compiles_at_every_point() -> None:
    assert "flex" in default_providers("cuda")
    assert "flex" not in default_providers("cuda", group="length")
    # Who may be ahead of us is in every figure.
    assert all("flash_attn_4" in default_providers("cuda", group=g) for g in ("waste", "length"))
    assert set(default_providers("cuda", group="waste")) < set(default_providers("cuda"))
    assert "jagged_stream" in default_providers("cuda", group="skew")
    for group in ("target", "skew"):
        names = default_providers("cuda", group=group)
        assert all(PROVIDERS[name].dense_queries for name in names)
    assert "dense_cudnn" not in default_providers("cpu")


@pytest.mark.parametrize(
    "wrong", [{"providers": ["typo"]}, {"modes": ["typo"]}, {"metrics": ["typo"]}]
)
def test_unknown_names_are_refused_with_what_is_known(wrong: dict) -> None:
    with pytest.raises(ValueError, match=r"unknown .* 'typo'; known are"):
        measure(small(), **wrong)


@pytest.mark.parametrize("causal", [False, True])
def test_block_mask_is_the_document_mask(causal: bool) -> None:
    lengths = torch.tensor([5, 0, 3 * BLOCK + 7, BLOCK - 12, BLOCK, 1, 40])
    tokens = int(lengths.sum())
    offsets = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int()
    mask = document_block_mask(offsets, tokens=tokens, causal=causal)
    user = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
    index = torch.arange(tokens)
    visible = user[:, None] == user
    if causal:
        visible &= index[:, None] >= index
    assert mask.mask_mod is not None
    zero = torch.zeros((), dtype=torch.long)
    assert torch.equal(mask.mask_mod(zero, zero, index[:, None], index[None, :]), visible)

    blocks = -(-tokens // BLOCK)
    padded = torch.zeros(blocks * BLOCK, blocks * BLOCK, dtype=torch.bool)
    padded[:tokens, :tokens] = visible
    tiles = padded.view(blocks, BLOCK, blocks, BLOCK).transpose(1, 2).flatten(2)
    assert mask.full_kv_num_blocks is not None
    assert mask.full_kv_indices is not None
    listed = torch.zeros(2, blocks, blocks, dtype=torch.bool)
    pairs = (
        (mask.kv_num_blocks, mask.kv_indices),
        (mask.full_kv_num_blocks, mask.full_kv_indices),
    )
    for kind, (count, blocks_of) in enumerate(pairs):
        for row in range(blocks):
            listed[kind, row, blocks_of[0, 0, row, : int(count[0, 0, row])].long()] = True
    assert torch.equal(listed[0] | listed[1], tiles.any(-1))
    assert torch.equal(listed[1], tiles.all(-1))


def test_half_precision_has_a_tolerance_of_its_own() -> None:
    exact = tolerance(setup(small(), CPU))
    half = tolerance(setup(small(dtype=torch.bfloat16), CPU))
    assert exact == 1e-3
    assert 0.005 < half < 0.1


def latency_where_nobody_was_wrong(table: pd.DataFrame) -> pd.DataFrame:
    """Rows of latency; whoever has none could not be had."""
    latency = results.select(table, op="attention", metric="latency")
    wrong = latency[~latency["status"].isin(["ok", "missing", "unsupported"])]
    assert wrong.empty, wrong[["provider", "mode", "message"]].to_string()
    return latency


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [False, True])
def test_on_a_gpu_whoever_runs_is_right(causal: bool) -> None:
    workload = Workload.from_lengths("g", [300, 1, 64, 17, 129], heads=4, head_dim=64)
    table = measure_attention(
        with_options([workload], causal=causal), device="cuda", effort=QUICK, progress=False
    )
    latency = latency_where_nobody_was_wrong(table)
    ran = set(latency[latency["status"] == "ok"]["provider"])
    assert {"jagged", "dense_eager", "dense_flash", "njt_sdpa", "flex", "varlen_attn"} <= ran
    assert not results.select(table, op="schedule", provider="jagged", status="ok").empty
    assert not results.select(table, op="block_mask", provider="flex", status="ok").empty


@pytest.mark.gpu
def test_on_a_gpu_target_attention_is_right_under_every_policy() -> None:
    workload = Workload.from_lengths(
        "t", [3000, 1, 64, 17, 129], heads=4, head_dim=64, queries=8, group="skew"
    )
    table = measure_attention([workload], device="cuda", effort=QUICK, progress=False)
    latency = latency_where_nobody_was_wrong(table)
    assert set(latency["provider"]) == set(default_providers("cuda", group="skew"))
    names = ["jagged", "jagged_rows", "jagged_split", "jagged_stream", "varlen_attn"]
    # Others are there where somebody installed them; of these, every mode ran.
    known = latency[latency["provider"].isin(names)]
    assert set(known["provider"]) == set(names)
    bad = known[known["status"] != "ok"]
    assert bad.empty, bad[["provider", "mode", "message"]].to_string()


def test_an_error_says_what_it_comes_from() -> None:
    """Triton's outermost error says where a kernel was not compiled, its innermost why."""
    try:
        try:
            raise AttributeError("no such name")
        except AttributeError as error:
            raise ValueError("at 48:4:\n    some kernel") from error
    except ValueError as error:
        told = explain(error)
    assert told == ("error", "ValueError: at 48:4: (from AttributeError: no such name)")
    assert explain(ValueError("two\nlines")) == ("error", "ValueError: two")
