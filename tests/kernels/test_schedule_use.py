"""A schedule in use: what it is of, and what it no longer is of."""

from __future__ import annotations

import copy
import pickle
from functools import partial

import pytest
import torch
from attention_cases import DEVICE, Case
from processes import run_python
from torch._subclasses.fake_tensor import FakeTensorMode

from jagged_kernels import (
    JaggedTensor,
    SemiLocalKeys,
    attention_schedule,
    jagged_attention,
    lengths_to_offsets,
)
from jagged_kernels.attention.plain import forward as triton_forward
from jagged_kernels.core import contents as contents_module
from jagged_kernels.schedule import offsets as schedule_offsets
from jagged_kernels.schedule.rows import reference_rows, schedule_rows

LENGTHS = [3, 0, 20, 5]
BACKENDS = pytest.mark.parametrize("backend", ["reference", "native", "triton"])


def offsets_of(lengths=LENGTHS, dtype=torch.int64):
    return lengths_to_offsets(torch.tensor(lengths, dtype=dtype)).to(DEVICE)


def jagged(offsets, tokens=28):
    values = torch.randn(tokens, 2, 16, device=DEVICE)
    return JaggedTensor(values, offsets, validate=False)


def move_an_end(offsets):
    """In place, as many tokens as before."""
    offsets[2] += 1


@pytest.fixture
def checks(monkeypatch):
    monkeypatch.setattr(contents_module, "_CHECKING", True)


@pytest.fixture
def unreadable(monkeypatch):
    """As on a GPU: contents are not read where nobody wants to wait. Counts its comparisons."""
    comparisons = []
    compare = contents_module.demand_equal

    def counted(*arguments):
        comparisons.append(arguments)
        return compare(*arguments)

    monkeypatch.setattr(contents_module, "readable", lambda x: False)
    monkeypatch.setattr(schedule_offsets, "demand_equal", counted)
    return comparisons


# --- offsets that change in place -----------------------------------------------------------------


@BACKENDS
@pytest.mark.parametrize("kind", ["self", "queries", "keys", "dense queries"])
def test_offsets_that_changed_in_place(kind, backend):
    offsets, others = offsets_of(), offsets_of([8, 5, 5, 10])
    k = jagged(offsets)
    q = {"self": k, "dense queries": torch.randn(4, 2, 2, 16, device=DEVICE)}.get(kind)
    q = jagged(others) if q is None else q
    schedule = attention_schedule(q, k)
    attend = partial(jagged_attention, q, k, k, backend=backend)
    attend(schedule=schedule)
    move_an_end(others if kind == "queries" else offsets)
    side = "q" if kind == "queries" else "k"
    with pytest.raises(ValueError, match=f"offsets of {side} changed in place .* build it again"):
        attend(schedule=schedule)
    out, expected = attend(schedule=attention_schedule(q, k)), attend()
    if isinstance(out, JaggedTensor):
        out, expected = out.values, expected.values
    torch.testing.assert_close(out, expected)


def test_changes_before_a_schedule_is_built_are_in_it():
    offsets = offsets_of([5, 5, 8, 10])
    offsets.copy_(offsets_of())
    x = jagged(offsets)
    out = jagged_attention(x, x, x, schedule=attention_schedule(x), backend="triton")
    expected = jagged_attention(x, x, x, backend="reference")
    torch.testing.assert_close(out.values, expected.values)


@pytest.mark.parametrize("way", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_a_copy_is_not_stale(way):
    """Versions count anew in a copy."""
    offsets = offsets_of([5, 5, 8, 10])
    for _ in range(3):  # a copy is written once or twice, too
        offsets.copy_(offsets_of())
    x = jagged(offsets)
    schedule = way(attention_schedule(x))
    out = jagged_attention(x, x, x, schedule=schedule, backend="triton")
    assert torch.equal(out.values, jagged_attention(x, x, x, backend="triton").values)


@pytest.mark.parametrize("built", ["inside", "outside"])
def test_schedules_in_a_graph(built):
    """Versions are no part of a graph, nor do they break it."""
    torch._dynamo.reset()
    x = jagged(offsets_of())
    outside = attention_schedule(x, causal=True, tile_q=16, tile_k=16)

    def attend(values):
        x = JaggedTensor(values, outside.k_offsets)
        schedule = outside
        if built == "inside":
            schedule = attention_schedule(x, causal=True, tile_q=16, tile_k=16)
        return jagged_attention(x, x, x, causal=True, schedule=schedule, backend="triton").values

    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x.values), attend(x.values))


@pytest.mark.gpu
def test_a_schedule_of_a_cuda_graph_is_as_new_as_its_replay():
    offsets = offsets_of()
    x = jagged(offsets)
    attention_schedule(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        schedule = attention_schedule(x)
    for _ in range(2):
        move_an_end(offsets)
        graph.replay()
        out = jagged_attention(x, x, x, schedule=schedule)
        assert torch.equal(out.values, jagged_attention(x, x, x).values)


@pytest.mark.parametrize(("tile_q", "tile_k"), [(16, 32), (32, 16)])
def test_tiles_of_queries_and_keys_may_differ(tile_q, tile_k):
    """One table serves both sides of self-attention where both have the same tiles alone."""
    x = jagged(offsets_of([40, 0, 3]), tokens=43)
    schedule = attention_schedule(x, tile_q=tile_q, tile_k=tile_k)
    gradients = []
    for backend in ("triton", "reference"):
        y = x.with_values(x.values.clone().requires_grad_())
        out = jagged_attention(y, y, y, schedule=schedule, backend=backend)
        out.values.square().sum().backward()
        gradients.append(y.values.grad)
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-5)


# --- offsets of a call that are others than the schedule's ----------------------------------------


@pytest.mark.skipif(DEVICE == "cuda", reason="a device-side assertion ends the process")
def test_a_device_compares_other_offsets_once(unreadable):
    x = jagged(offsets_of())
    schedule = attention_schedule(x)
    attend = partial(jagged_attention, schedule=schedule, backend="native")
    attend(x, x, x)
    assert not unreadable
    others = offsets_of()
    v = jagged(others)
    for _ in range(3):
        attend(x, x, v)
    assert len(unreadable) == 1
    move_an_end(others)
    with pytest.raises(RuntimeError, match="built for other offsets of v; run with JAGGED_CHECK"):
        attend(x, x, v)
    k = jagged(offsets_of())
    for _ in range(3):
        attend(x, k, k)
    assert len(unreadable) == 3


@pytest.mark.gpu
@pytest.mark.parametrize("wrong", ["q", "k", "v"])
def test_other_offsets_stop_a_gpu(wrong):
    """In a process of its own: CUDA has no use for a device that stopped."""
    code = f"""
import torch
from jagged_kernels import JaggedTensor, attention_schedule, jagged_attention
def jagged(*ends):
    return JaggedTensor(torch.zeros(7, 2, 16, device="cuda"), torch.tensor(ends, device="cuda"))
x = jagged(0, 3, 7)
schedule = attention_schedule(x)
sides = {{name: jagged(0, 3, 7) for name in "qkv"}}
print(jagged_attention(*sides.values(), schedule=schedule).values.sum().item(), flush=True)
sides["{wrong}"] = jagged(0, 2, 7)
print(jagged_attention(*sides.values(), schedule=schedule).values.sum().item())
"""
    result = run_python(code)
    assert result.returncode != 0
    assert result.stdout == "0.0\n"
    what = f"the schedule was built for other offsets of {wrong}"
    assert what in result.stderr
    result = run_python(code, JAGGED_CHECK="1")
    of_queries = f"{what}: offsets[1] is 3 in the schedule and 2 in the call"
    said = of_queries if wrong == "q" else "k and v must have the same offsets"
    assert f"ValueError: {said}" in result.stderr


# --- one table for queries and keys ---------------------------------------------------------------


@pytest.fixture
def short_launches(monkeypatch):
    launches = []
    real = triton_forward.launch_short_forward

    def watched(*arguments, **options):
        launches.append(arguments)
        return real(*arguments, **options)

    monkeypatch.setattr(triton_forward, "launch_short_forward", watched)
    return launches


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32], ids=str)
def test_equal_offsets_are_those_of_one_tensor(dtype, short_launches):
    """As after moving q, k and v to a device one by one."""
    one = jagged(offsets_of())
    q, k, v = (JaggedTensor(torch.randn_like(one.values), offsets_of(dtype=d))
               for d in (torch.int64, dtype, dtype))  # fmt: skip
    schedule = attention_schedule(q, k)
    assert schedule.rows_t is schedule.rows
    assert torch.equal(schedule.rows, attention_schedule(one).rows)
    out = jagged_attention(q, k, v, schedule=schedule, backend="triton")
    assert len(short_launches) == 1
    expected = jagged_attention(*map(one.with_values, (q.values, k.values, v.values)),
                                backend="triton")  # fmt: skip
    assert torch.equal(out.values, expected.values)
    native = jagged_attention(q, k, v, schedule=schedule, backend="native")
    torch.testing.assert_close(out.values, native.values)


@pytest.mark.parametrize("shared", [None, True, False])
def test_what_the_caller_says_of_offsets(shared):
    q, k = jagged(offsets_of()), jagged(offsets_of())
    schedule = attention_schedule(q, k, shared_offsets=shared)
    assert (schedule.rows_t is schedule.rows) == (shared is not False)
    assert torch.equal(schedule.rows, schedule.rows_t)


def test_offsets_that_differ():
    q = jagged(offsets_of())
    other, fewer = jagged(offsets_of([8, 5, 5, 10])), jagged(offsets_of([3, 0, 20, 4]), tokens=27)
    for k in (other, fewer):
        schedule = attention_schedule(q, k)
        assert schedule.offsets is None
        out = jagged_attention(q, k, k, schedule=schedule, backend="triton")
        expected = jagged_attention(q, k, k, backend="reference")
        torch.testing.assert_close(out.values, expected.values)
    with pytest.raises(ValueError, match="q has 28 tokens and k 27"):
        attention_schedule(q, fewer, shared_offsets=True)
    with pytest.raises(ValueError, match="dense queries have offsets of their own"):
        attention_schedule(q.values[:2], q, shared_offsets=True)


@pytest.mark.skipif(DEVICE == "cuda", reason="a device-side assertion ends the process")
def test_the_caller_is_wrong_of_offsets():
    q, k = jagged(offsets_of()), jagged(offsets_of([8, 5, 5, 10]))
    with pytest.raises(ValueError, match=r"they differ: offsets\[1\] is 3 in q and 8 in k"):
        attention_schedule(q, k, shared_offsets=True)


@pytest.mark.skipif(DEVICE == "cuda", reason="a device-side assertion ends the process")
def test_the_caller_is_wrong_of_offsets_on_a_device(unreadable):
    q, k = jagged(offsets_of()), jagged(offsets_of([8, 5, 5, 10]))
    with pytest.raises(RuntimeError, match="shared_offsets=True, but they differ"):
        attention_schedule(q, k, shared_offsets=True)


@pytest.mark.gpu
def test_only_a_schedule_that_compares_offsets_waits():
    inputs = Case([40, 0, 5, 19], dim=64).inputs(torch.bfloat16)
    values = (inputs.q, inputs.k, inputs.v)
    q, k, v = (JaggedTensor(x, inputs.q_offsets.clone()) for x in values)
    longer = JaggedTensor(torch.cat([inputs.k, inputs.k]), 2 * inputs.q_offsets)
    queries = torch.randn(4, 2, 2, 64, device="cuda", dtype=torch.bfloat16)

    def without_waiting():
        jagged_attention(q, k, v)
        jagged_attention(queries, k, v)
        for shared in (True, False):
            schedule = attention_schedule(q, k, shared_offsets=shared)
            jagged_attention(q, k, v, schedule=schedule)
        jagged_attention(q, longer, longer, schedule=attention_schedule(q, longer))
        attention_schedule(q)
        attention_schedule(queries, k)

    without_waiting()
    compared = attention_schedule(q, k)
    assert compared.rows_t is compared.rows
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        without_waiting()
        jagged_attention(q, k, v, schedule=compared)
        with pytest.raises(RuntimeError, match="synchronizing"):
            attention_schedule(q, k)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_one_tensor_of_offsets_for_users_in_batch_order():
    """The tables of queries and keys differ, however alike the offsets are."""
    offsets = offsets_of([20, 20, 20])
    tables = [
        rows(q, offsets, q_tokens=60, k_tokens=60, tile_q=32, tile_k=16, left=-1, right=-1,
             sort=False, transpose=True)
        for rows in (schedule_rows, reference_rows) for q in (offsets, offsets.clone())
    ]  # fmt: skip
    assert all(torch.equal(table, tables[0]) for table in tables)


# --- what contents are not read of, and what they are read of all the same ------------------------


@pytest.mark.parametrize("checking", [False, True])
@pytest.mark.parametrize("kind", ["meta", "fake"])
@pytest.mark.parametrize("shared", [None, True, False])
def test_contents_that_are_not_there(kind, shared, checking, monkeypatch):
    monkeypatch.setattr(contents_module, "_CHECKING", checking)
    device = "meta" if kind == "meta" else "cpu"
    with FakeTensorMode() if kind == "fake" else torch.device("meta"):
        q, k = (
            JaggedTensor(torch.empty(10, 2, 16, device=device),
                         torch.empty(4, device=device, dtype=torch.int64), validate=False)
            for _ in "qk"
        )  # fmt: skip
        schedule = attention_schedule(q, k, shared_offsets=shared)
        assert schedule.rows.shape == (3, 8)
        assert (schedule.rows_t is schedule.rows) == bool(shared)
        assert not schedule.versions


@pytest.mark.parametrize("way", ["inference", "data"])
def test_checks_see_what_versions_do_not(way, checks):
    with torch.inference_mode(way == "inference"):
        x = jagged(offsets_of())
    schedule = attention_schedule(x)
    jagged_attention(x, x, x, schedule=schedule)
    with torch.inference_mode(way == "inference"):
        move_an_end(x.offsets.data if way == "data" else x.offsets)
    with pytest.raises(ValueError, match="changed in place after the schedule was built"):
        jagged_attention(x, x, x, schedule=schedule)


@BACKENDS
@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_checks_of_offsets_that_were_trusted(name, backend, checks):
    sides = {side: jagged(offsets_of()) for side in "qkv"}
    sides[name] = jagged(torch.tensor([0, 3, 2, 23, 28], device=DEVICE))
    with pytest.raises(ValueError, match=rf"{name}: offsets must not decrease, got offsets\[1\]"):
        jagged_attention(*sides.values(), backend=backend)
    if name != "v":
        with pytest.raises(ValueError, match=f"{name}: offsets must not decrease"):
            attention_schedule(sides["q"], sides["k"])


def test_checks_are_asked_for_in_the_environment():
    code = f"""
import torch
from jagged_kernels import JaggedTensor, jagged_attention
values, ends = torch.zeros(7, 2, 16), torch.tensor([0, 3, 6])
x = JaggedTensor(*(y.to({DEVICE!r}) for y in (values, ends)), validate=False)
jagged_attention(x, x, x, backend="native")
"""
    assert run_python(code).returncode == 0
    for value, fails in (("1", True), ("0", False)):
        result = run_python(code, JAGGED_CHECK=value)
        assert (result.returncode != 0) == fails
        assert ("q: offsets must end at the number of tokens" in result.stderr) == fails


def test_checks_take_a_schedule_of_lists(checks):
    """Its rows have no band: the lists do."""
    x, keys = jagged(offsets_of()), SemiLocalKeys(window=3, first=1, block=16)
    schedule = attention_schedule(x, keys=keys)
    for backend in ("native", "triton"):
        out = jagged_attention(x, x, x, keys=keys, schedule=schedule, backend=backend)
        expected = jagged_attention(x, x, x, keys=keys, backend="reference")
        torch.testing.assert_close(out.values, expected.values)


# --- limits, modes, and what it looks like --------------------------------------------------------


@pytest.mark.parametrize("tokens", [2**31, 2**31 - 2**29 + 1])
def test_more_tokens_than_rows_can_count(tokens):
    """Nothing is launched, nor as much as allocated."""
    many = torch.zeros(1, 1, 1, device=DEVICE).expand(tokens, 1, 1)
    k = JaggedTensor(many, torch.tensor([0, tokens], device=DEVICE))
    q = JaggedTensor(many[:1], torch.tensor([0, 1], device=DEVICE))
    schedule = partial(attention_schedule, tile_q=2**20, tile_k=2**20)
    message = f"up to 1610612736 queries and keys in int32, got {tokens} and {tokens}"
    with pytest.raises(ValueError, match=message):
        schedule(k)
    with pytest.raises(ValueError, match=f"got 1 and {tokens}"):
        schedule(q, k)
    with pytest.raises(ValueError, match=f"got {tokens} and 1"):
        jagged_attention(k, q, q, backend="triton")


@pytest.mark.parametrize("kind", ["self", "dense queries"])
@pytest.mark.parametrize("offsets_in", ["inference", "training"])
def test_a_schedule_made_in_inference_mode_serves_training(kind, offsets_in):
    with torch.inference_mode(offsets_in == "inference"):
        x = jagged(offsets_of())
    dense = torch.randn(4, 2, 2, 16, device=DEVICE)
    with torch.inference_mode():
        schedule = attention_schedule(x if kind == "self" else dense, x, causal=True)
        assert torch.is_inference_mode_enabled()
    results = []
    values = torch.randn(28, 2, 16, device=DEVICE)
    for chosen, offsets in ((schedule, x.offsets), (None, offsets_of())):
        k = JaggedTensor(values.clone().requires_grad_(), offsets)
        q = k if kind == "self" else dense
        out = jagged_attention(q, k, k, causal=True, schedule=chosen, backend="triton")
        out = out.values if isinstance(out, JaggedTensor) else out
        out.sum().backward()
        results.append((out.detach(), k.values.grad))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_schedules_are_equal_if_they_are_one():
    x = jagged(offsets_of())
    one, other = attention_schedule(x.values[:2], x), attention_schedule(x.values[:2], x)
    assert one == one
    assert one != other
    assert one.partition == one.partition
    assert one.partition != other.partition
    assert len({one: 1, other: 2, one.partition: 3}) == 3


def test_a_schedule_says_what_it_is_of_in_a_line():
    x = jagged(offsets_of())
    assert repr(attention_schedule(x, causal=True)) == (
        "AttentionSchedule(users=4, tokens=(28, 28), tiles=(64, 64), split='rows', "
        f"window=(-1, 0), device={x.device})"
    )
    schedule = attention_schedule(x.values[:2], x)
    assert "2 dense queries a user" in repr(schedule)
    assert "split='stream'" in repr(schedule)
    assert repr(schedule.partition).startswith("Partition(programs=")
    assert "\n" not in repr((schedule, schedule.partition))


@pytest.mark.gpu
def test_a_schedule_of_two_devices():
    x = jagged(offsets_of())
    with pytest.raises(ValueError, match="on one device, got cpu and cuda"):
        attention_schedule(x.to("cpu"), x)
