"""Measuring cached and shared keys, on tiny batches."""

from typing import Any

import pandas as pd
import pytest
import torch

from jagged_ranking import results
from jagged_ranking.measure.cached import decoding, prefix, scoring
from jagged_ranking.measure.cached.cached_measurement import PROBLEMS, measure_cached
from jagged_ranking.measure.cached.cached_ops import APPEND, DECODE, PREFIX, SCORING
from jagged_ranking.measure.cached.cases import (
    Case,
    decoding_sweeps,
    prefix_sweep,
    scoring_sweep,
)
from jagged_ranking.measure.ceilings import Ceilings
from jagged_ranking.measure.interaction.problem import Ready
from jagged_ranking.measure.providers import Unavailable
from jagged_ranking.measure.timing import Effort

pytestmark = pytest.mark.usefixtures("objects_apart")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CEILINGS = Ceilings(10e9, 100e9, "float32")
SHAPE: dict[str, Any] = {"heads": 2, "head_dim": 16, "dtype": torch.float32}
DECODED = {"op": DECODE, "name": "w", "group": "users", "users": 3, "history": 40, "queries": 5}


def measure(*cases: Case, **options: Any) -> pd.DataFrame:
    effort = Effort(rounds=2, inner=1, warmup=1, seconds=0.01)
    given = {"device": DEVICE, "effort": effort, "ceilings": CEILINGS, "progress": False}
    return measure_cached(cases, **{**given, **options})


def case(op: str, **changes: Any) -> Case:
    extra = {"prefix": 7} if op == PREFIX else {"kept": 8, "recent": 10} if op == SCORING else {}
    return Case(**{**DECODED, "op": op, **SHAPE, **extra, **changes})


def test_sweeps_hold_what_they_say() -> None:
    cases = decoding_sweeps([64, 256], [1, 8], at_users=4, at_history=32, queries=3, **SHAPE)
    assert [(c.op, c.group, c.users, c.history) for c in cases] == [
        (op, *point)
        for op in (DECODE, APPEND)
        for point in (
            ("history", 4, 64),
            ("history", 4, 256),
            ("users", 1, 32),
            ("users", 8, 32),
        )
    ]
    assert [c.prefix for c in prefix_sweep([4, 8], users=2, history=9, **SHAPE)] == [4, 8]
    scored = scoring_sweep([50, 100], users=2, kept=0.2, recent=20, **SHAPE)
    assert [(c.kept, c.recent, c.name) for c in scored] == [
        (10, 20, "10 of 50"),
        (20, 20, "20 of 100"),
    ]
    assert scored[0].lengths().tolist() == [50, 50]


def test_new_events_are_of_different_counts_and_there() -> None:
    one = case(DECODE, users=50, history=30, queries=8)
    new, lengths = one.new(), one.lengths()
    assert (new >= 1).all()
    assert (new <= lengths).all()
    assert (new[0], lengths[0]) == (8, 30)
    assert len(set(new.tolist())) > 3
    facts = one.facts()
    assert (facts["queries"], facts["tokens"]) == (int(new.sum()), int(lengths.sum()))


@pytest.mark.parametrize("op", [DECODE, APPEND, PREFIX, SCORING])
def test_everybody_who_runs_here_is_right(op: str) -> None:
    table = measure(case(op), run_id="09", run_key="k")
    assert set(table["id"]) == {"09"}
    mine = results.select(table, op=op)
    assert set(mine["status"]) <= {"ok", "unsupported", "missing"}
    ran = set(results.select(mine, status="ok", metric="latency")["provider"])
    peers = {
        DECODE: {"dense_sdpa"},
        APPEND: {"padded", "cat"},
        PREFIX: {"cat"},
        SCORING: {"dense_scores"},
    }
    assert {"jagged"} | peers[op] <= ran
    errors = results.select(mine, metric="rel_error")
    assert (errors["value"] < 1e-3).all()
    modes = {"forward", "forward+backward"} if op == PREFIX else {"forward"}
    assert set(mine["mode"]) == modes
    weighed = results.select(mine, metric="peak_memory_minus_inputs")
    assert set(weighed["provider"]) == ({"jagged", "cat"} if op == PREFIX else set())
    built = {DECODE: {"cache_schedule"}, SCORING: {"scissorhands"}}.get(op, set())
    assert set(table["op"]) == {"ceiling", op} | built


def test_the_limit_reads_the_cache_once() -> None:
    one = case(DECODE)
    row = results.with_config(results.select(measure(one), op=DECODE), "limit_ms", "tokens").iloc[0]
    moved = 2 * (int(one.lengths().sum()) + int(one.new().sum())) * 2 * 16 * 4
    assert row["limit_ms"] == pytest.approx(moved / 10e9 * 1e3)


@pytest.mark.parametrize(
    ("op", "module", "name"),
    [
        (DECODE, decoding, "cached_attention"),
        (PREFIX, prefix, "prefixed_attention"),
        (SCORING, scoring, "key_statistics"),
    ],
)
def test_what_is_wrong_is_not_timed(
    op: str, module: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = getattr(module, name)

    def wrong(*arguments: Any, **options: Any) -> Any:
        if options.get("backend", "auto") != "auto":
            return right(*arguments, **options)
        first, *rest = arguments
        return right(first.with_values(first.values * 1.5), *rest, **options)

    monkeypatch.setattr(module, name, wrong)
    mine = results.select(measure(case(op)), op=op, provider="jagged", metric="latency")
    assert set(mine["status"]) == {"error"}
    assert mine["message"].str.startswith("wrong: relative error").all()


def test_a_cache_that_holds_something_else_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    class Loud(decoding.HistoryCache):
        def append(self, k: Any, v: Any, **options: Any) -> None:
            super().append(k, v.with_values(v.values * 1.5), **options)

    monkeypatch.setattr(decoding, "HistoryCache", Loud)
    mine = results.select(measure(case(DECODE)), op=DECODE, metric="latency")
    assert set(results.select(mine, provider="jagged")["status"]) == {"error"}
    assert set(results.select(mine, provider="dense_sdpa")["status"]) == {"ok"}


def test_events_that_are_not_appended_are_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the plain way wrote is not taken for ours."""
    made = decoding.HistoryCache
    filled = []

    class Lazy(made):
        def append(self, k: Any, v: Any, **options: Any) -> None:
            if self not in filled:  # the history, and nothing after it
                filled.append(self)
                super().append(k, v, **options)

    monkeypatch.setattr(decoding, "HistoryCache", Lazy)
    mine = results.select(measure(case(APPEND)), op=APPEND, metric="latency")
    assert set(results.select(mine, provider="jagged")["status"]) == {"error"}
    assert set(results.select(mine, provider=["padded", "cat"])["status"]) == {"ok"}


def test_what_was_written_hangs_on_no_gradient() -> None:
    problem = PROBLEMS[APPEND](case(APPEND), torch.device(DEVICE))
    for backend in ("auto", "native"):
        ready = Ready(problem.ours(backend), problem.inputs, problem.inputs[:1])
        (written,) = ready.compare_as("forward")
        assert not written.requires_grad
        assert written.shape == (*problem.inputs[0].shape[:2], 32)


def test_the_mask_of_sdpa_is_one_that_its_kernels_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not booleans, of which it would make another in each call."""
    masks = []
    attend = decoding.scaled_dot_product_attention

    def noted(*arguments: Any, attn_mask: torch.Tensor) -> torch.Tensor:
        masks.append(attn_mask)
        return attend(*arguments, attn_mask=attn_mask)

    monkeypatch.setattr(decoding, "scaled_dot_product_attention", noted)
    mine = results.select(measure(case(DECODE)), provider="dense_sdpa", metric="latency")
    assert set(mine["status"]) == {"ok"}
    assert len({mask.data_ptr() for mask in masks}) == 1
    assert {mask.dtype for mask in masks} == {torch.float32}


@pytest.mark.skipif(DEVICE == "cuda", reason="they run there")
def test_peers_that_need_a_gpu_say_so() -> None:
    problem = PROBLEMS[DECODE](case(DECODE), torch.device("cpu"))
    for name in ("varlen_paged", "varlen_gathered"):
        peer = problem.peers[name]
        assert isinstance(peer, Unavailable)
        assert "needs a CUDA device" in str(peer)


def test_nothing_to_measure_is_no_rows() -> None:
    assert measure().empty


@pytest.mark.gpu
def test_peers_with_pages_and_over_a_copy() -> None:
    """Those that are there, in half precision."""
    one = case(DECODE, users=6, history=700, queries=40, heads=4, head_dim=64, dtype=torch.bfloat16)
    mine = results.select(measure(one), op=DECODE, metric="latency")
    status = dict(zip(mine["provider"], mine["status"], strict=True))
    assert status["jagged"] == status["varlen_gathered"] == status["dense_sdpa"] == "ok"
    for name in ("varlen_paged", "flashinfer"):
        assert status[name] in ("ok", "missing"), mine["message"].tolist()
