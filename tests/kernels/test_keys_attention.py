"""Attention over the keys of rules and of lists, in every backend."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import replace

import pytest
import torch
from attention_cases import DEVICE, Case
from combinations import combined
from launch_keys import batches, launched_shapes, record_launches
from meeting_cases import assert_as_exact, pointwise, run, softmax

from jagged_kernels import (
    ALiBi,
    JaggedTensor,
    KeyLists,
    RequestKeys,
    SemiLocalKeys,
    SiLU,
    StridedKeys,
    attention_schedule,
    jagged_attention,
)
from jagged_kernels.schedule.keys.build import build_lists

BACKENDS = ("native", "triton")
# Of tensors on a CPU, which Triton reads in its interpreter alone.
ON_CPU = ("reference", "native") if torch.cuda.is_available() else ("reference", *BACKENDS)
DTYPES = [torch.float32, torch.float16]
LENGTHS = [70, 0, 5, 128, 1, 33]
COUNTS = torch.tensor([4, 0, 2, 40, 0, 0], device=DEVICE)
RULES = {
    "strided": StridedKeys(3, 1, block=16),
    "strided, more blocks": StridedKeys(4, 2, offset=1, block=32),
    "semi-local": SemiLocalKeys(9, 3, block=16),
    "semi-local, wide": SemiLocalKeys(40, 17, block=16),
    "request": RequestKeys(targets=COUNTS, block=16),
    "request, contexts": RequestKeys(targets=COUNTS, contexts=1, block=16),
    "request, window": RequestKeys(targets=COUNTS, contexts=1, window=20, block=32),
    "request, history alone": RequestKeys(block=16),
}
TABLES = ("row_ptr", "col", "row_ptr_t", "col_t")
HEADS = [(2, 2, 16), (4, 2, 24), (4, 1, 16)]


@pytest.mark.parametrize(
    ("rule", "heads", "backend", "dtype", "offsets"),
    combined(RULES, HEADS, BACKENDS, DTYPES, [torch.int64, torch.int32]),
)
def test_as_exact_as_the_formula(rule, heads, backend, dtype, offsets):
    keys, (q_heads, kv_heads, dim) = RULES[rule], heads
    case = Case(LENGTHS, heads=q_heads, kv_heads=kv_heads, dim=dim, offsets_dtype=offsets)
    inputs = case.inputs(dtype).with_shared_offsets()

    def visible(user, queries, _keys):
        return keys.visible(queries, q_heads, user=user)

    assert_as_exact(inputs, backend, visible, softmax, keys=keys)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("rule", ["semi-local", "semi-local, wide"])
def test_other_queries_than_keys(rule, backend):
    """Fewer and more of them, the first of which then see nothing; and users without either."""
    keys = RULES[rule]
    inputs = Case([20, 0, 40, 3, 50], [50, 7, 33, 0, 20], heads=4, kv_heads=2)

    def visible(user, queries, m):
        return keys.visible(queries, 4, user=user, keys=m)

    assert_as_exact(inputs.inputs(torch.float32), backend, visible, softmax, keys=keys)


@pytest.mark.parametrize("rule", ["strided, more blocks", "request, window"])
def test_programs_that_share_a_tile(rule):
    """Of heads so large, a program has a part of a tile, and its whole list."""
    keys, lengths = RULES[rule], [20, 70, 5]
    if isinstance(keys, RequestKeys):
        keys = replace(keys, targets=COUNTS[:3])
    inputs = Case(lengths, dim=144).inputs(torch.float32).with_shared_offsets()

    def visible(user, queries, _keys):
        return keys.visible(queries, 2, user=user)

    assert_as_exact(inputs, "triton", visible, softmax, keys=keys)


@pytest.mark.parametrize("rule", [
    StridedKeys(2, 1, block=128), RequestKeys(targets=COUNTS[:4], contexts=1, window=60, block=128),
])  # fmt: skip
@pytest.mark.parametrize(("dim", "dtype"), [(16, torch.float32), (144, torch.float16)])
def test_listed_blocks_are_walked_in_pieces(rule, dim, dtype, monkeypatch):
    """Of a block that memory does not hold at once; some pieces begin behind a user's end."""
    inputs = Case([150, 0, 60, 130], heads=4, kv_heads=2, dim=dim).inputs(dtype)
    inputs = inputs.with_shared_offsets()

    def visible(user, queries, _keys):
        return rule.visible(queries, 4, user=user)

    shapes = launched_shapes(monkeypatch)
    assert_as_exact(inputs, "triton", visible, softmax, keys=rule)
    assert len(shapes) == 3
    for shape in shapes:
        assert shape.PARTS > 1
        assert shape.BLOCK < shape.TILE * shape.PARTS == rule.block


def test_counts_with_strides():
    """A column of a table, and one count for all users."""
    inputs = Case(LENGTHS).inputs(torch.float32).with_shared_offsets()
    column = torch.stack([COUNTS, COUNTS + 7], 1).int()[:, 0]
    zeros = COUNTS[-1:].int().expand(len(LENGTHS))
    assert not column.is_contiguous()
    assert not zeros.is_contiguous()
    expected = run("triton", inputs, keys=RequestKeys(COUNTS, 0, 30, 16))
    for name, result in run("triton", inputs, keys=RequestKeys(column, zeros, 30, 16)).items():
        assert torch.equal(result, expected[name]), name


def _more_columns(row_ptr: torch.Tensor, col: torch.Tensor, more: list[int]) -> list[torch.Tensor]:
    """A table whose entries have these columns too."""
    parts = [
        torch.cat([col[begin:end], col.new_tensor(more)])
        for begin, end in zip(row_ptr.tolist(), row_ptr[1:].tolist(), strict=False)
    ]
    counts = torch.arange(row_ptr.shape[0], device=row_ptr.device, dtype=row_ptr.dtype)
    return [row_ptr + len(more) * counts, torch.cat(parts)]


@pytest.mark.parametrize(("block", "lengths"), [(16, [34, 19, 64]), (128, [130, 35, 128])])
def test_columns_that_are_no_block_are_not_read(block, lengths):
    """Of tables that nobody has looked at: of before the user, behind it, and beyond int32."""
    inputs = Case(lengths).inputs(torch.float32).with_shared_offsets()
    offsets, tokens = inputs.q_offsets, inputs.q.shape[0]
    lists = build_lists(
        StridedKeys(2, 1, block=block), offsets, offsets,
        q_tokens=tokens, k_tokens=tokens, heads=2,
    )  # fmt: skip
    expected = run("triton", inputs, keys=lists)
    for more in ([-2], [2 * 17, 2 * 1000], [2**31 - 2, 2**30, -(2**31)]):
        tables = (
            *_more_columns(lists.row_ptr, lists.col, more),
            *_more_columns(*lists.transposed(), more),
        )
        wrong = replace(lists, **dict(zip(TABLES, tables, strict=True)))
        for name, result in run("triton", inputs, keys=wrong).items():
            assert torch.equal(result, expected[name]), (name, more)


def test_entries_beyond_32_bits():
    """In few pages of memory that the others leave untouched. Pieces of so many are more."""
    inputs = Case([130, 35], dim=144).inputs(torch.float32).with_shared_offsets()
    offsets, tokens = inputs.q_offsets, inputs.q.shape[0]
    lists = build_lists(
        SemiLocalKeys(100, 9, block=128), offsets, offsets,
        q_tokens=tokens, k_tokens=tokens, heads=2,
    )  # fmt: skip
    far, tables = 2**29 + 5, []  # pieces of at most 32 tokens, 4 an entry
    for row_ptr, col in ((lists.row_ptr, lists.col), lists.transposed()):
        moved = torch.empty(far + len(col), dtype=torch.int32, device=DEVICE)
        moved[:64] = 1  # what an entry that wraps would be
        moved[far:] = col
        tables += [row_ptr + far, moved]
    moved = replace(lists, **dict(zip(TABLES, tables, strict=True)))
    expected = run("triton", inputs, keys=lists)
    for name, result in run("triton", inputs, keys=moved).items():
        assert torch.equal(result, expected[name]), name


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("rule", ["strided", "semi-local", "request, contexts"])
def test_with_other_weights_than_softmax(rule, backend):
    inputs = Case(LENGTHS).inputs(torch.float32).with_shared_offsets()
    keys = RULES[rule]

    def visible(user, queries, _keys):
        return keys.visible(queries, 2, user=user)

    weigh = pointwise(torch.nn.functional.silu, 30)
    assert_as_exact(inputs, backend, visible, weigh, keys=keys, scores=SiLU(divide_by=30))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("rule", ["strided", "request, window"])
def test_with_bias_and_dropout(rule, backend):
    inputs, results = Case(LENGTHS).inputs(torch.float32).with_shared_offsets(), []
    for which, given in (("reference", inputs.double()), (backend, inputs)):
        torch.manual_seed(2)
        slopes = torch.tensor([0.5, 0.1], device=DEVICE, dtype=given.q.dtype, requires_grad=True)
        options = {"keys": RULES[rule], "bias": ALiBi(slopes), "dropout_p": 0.3}
        found = run(which, given, **options)
        results.append([*found.values(), slopes.grad])
    for exact, found in zip(*results, strict=True):
        torch.testing.assert_close(found.double(), exact, rtol=1e-4, atol=5e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_lse_over_lists(backend):
    inputs = Case(LENGTHS).inputs(torch.float32).with_shared_offsets()
    x, k, v = (JaggedTensor(t, inputs.q_offsets) for t in (inputs.q, inputs.k, inputs.v))
    for keys in RULES.values():
        exact, found = (
            jagged_attention(x, k, v, keys=keys, backend=which, return_lse=True)[1]
            for which in ("reference", backend)
        )
        torch.testing.assert_close(found, exact, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("backend", ["reference", *BACKENDS])
@pytest.mark.parametrize(("causal", "case"), [
    (False, Case([20, 0, 40, 3], [50, 7, 33, 0])), (True, Case([50, 7, 33, 0])),
])  # fmt: skip
def test_ones_own_lists(backend, causal, case):
    """Any blocks at all; some tiles have none."""
    inputs = case.inputs(torch.float32)
    generator = torch.Generator().manual_seed(0)
    block, users = 16, len(case.q_lengths)
    q_offsets, k_offsets = inputs.q_offsets, inputs.k_offsets
    tiles, rows, chosen = int(q_offsets[-1]) // block + users, [], {}
    counts = torch.zeros(tiles + 1, dtype=torch.int32)
    for user in range(users):
        first = int(q_offsets[user]) // block + user
        n, m = (-(-int(x.diff()[user]) // block) for x in (q_offsets, k_offsets))
        for tile in range(n):
            shown = (torch.rand(m, generator=generator) < 0.5).nonzero().flatten().int()
            chosen[user, tile] = shown
            counts[first + tile + 1] = len(shown)
            rows.append(shown)
    col = torch.cat(rows)
    lists = KeyLists.from_rows(
        counts.cumsum(0, dtype=torch.int32).to(DEVICE), col.to(DEVICE),
        q_offsets, k_offsets, block=block, window=(-1, 0) if causal else (-1, -1),
    )  # fmt: skip

    def visible(user, queries, keys):
        seen = torch.zeros(queries, keys, dtype=torch.bool)
        for tile in range(-(-queries // block)):
            for one in chosen[user, tile].tolist():
                rows = slice(tile * block, tile * block + block)
                seen[rows, one * block : one * block + block] = True
        return (seen.tril() if causal else seen)[None]

    assert_as_exact(inputs, backend, visible, softmax, keys=lists, causal=causal)


@pytest.mark.parametrize("backend", ["reference", *BACKENDS])
@pytest.mark.parametrize("rule", ["strided", "semi-local", "request, contexts"])
def test_what_is_hidden_touches_nothing(backend, rule):
    keys, place = RULES[rule], 40
    inputs = Case(LENGTHS).inputs(torch.float32).with_shared_offsets()
    without = run(backend, inputs, keys=keys)
    inputs.k[place] = math.nan
    inputs.v[place] = math.inf
    found = run(backend, inputs, keys=keys)
    seen = keys.visible(LENGTHS[0], 2, user=0).expand(2, -1, -1)[:, :, place]
    bad = torch.zeros(inputs.q.shape[:2], dtype=torch.bool)
    bad[: LENGTHS[0]] = seen.t()
    bad = bad.to(DEVICE)
    assert torch.equal(~found["o"].isfinite().all(-1), bad)
    for name in ("o", "dq"):
        torch.testing.assert_close(found[name][~bad], without[name][~bad], rtol=0, atol=2e-5)
    for name in ("dk", "dv"):
        # Keys that no touched query sees.
        result, expected = found[name][LENGTHS[0] :], without[name][LENGTHS[0] :]
        torch.testing.assert_close(result, expected, rtol=0, atol=2e-5)


@pytest.mark.parametrize("backend", ["reference", *BACKENDS])
@pytest.mark.parametrize(
    "rule", [SemiLocalKeys(5, 1, block=16), RequestKeys(2, window=4, block=16)], ids=repr
)
def test_lists_of_a_rule_are_as_good_as_the_rule(rule, backend):
    inputs = Case([20, 3]).inputs(torch.float32).with_shared_offsets()
    lists = attention_schedule(JaggedTensor(inputs.q, inputs.q_offsets), keys=rule).lists
    found, expected = (run(backend, inputs, keys=keys) for keys in (lists, rule))
    for name, result in found.items():
        torch.testing.assert_close(result, expected[name])


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_schedule_is_shared(backend):
    inputs = Case(LENGTHS).inputs(torch.float32).with_shared_offsets()
    x = JaggedTensor(inputs.q, inputs.q_offsets)
    for name in ("strided", "request, contexts"):
        keys = RULES[name]
        schedule = attention_schedule(x, keys=keys)
        assert schedule.lists is not None
        assert (schedule.tile_q, schedule.tile_k) == (keys.block, keys.block)
        first = run(backend, inputs, keys=keys, schedule=schedule)
        for result, expected in run(backend, inputs, keys=keys).items():
            torch.testing.assert_close(first[result], expected, msg=f"{name} {result}")


@pytest.mark.parametrize("backend", BACKENDS)
def test_compiles_whole_and_for_other_batches(backend):
    torch._dynamo.reset()
    keys = StridedKeys(3, 1, block=16)

    def attend(values, offsets):
        x = JaggedTensor(values, offsets)
        schedule = attention_schedule(x, keys=keys, longest=64)
        return jagged_attention(x, x, x, keys=keys, schedule=schedule, backend=backend).values

    compiler = "inductor" if DEVICE == "cuda" else "aot_eager"
    compiled = torch.compile(attend, fullgraph=True, backend=compiler, dynamic=True)
    for number, lengths in enumerate(([4, 0, 59], [37, 3], [30, 1, 2, 9, 64])):
        inputs, results = Case(lengths).inputs(torch.float32), []
        for function in (attend, compiled):
            values = inputs.q.detach().clone().requires_grad_()
            with torch.compiler.set_stance("fail_on_recompile" if number else "default"):
                out = function(values, inputs.q_offsets)
            (out * out).sum().backward()
            results.append((out.detach(), values.grad))
        for eager, graph in zip(*results, strict=True):
            torch.testing.assert_close(graph, eager)


def test_no_batch_compiles_anything_again(monkeypatch):
    """Whatever lists and lengths are; counts are tensors or numbers."""
    given = [Case(lengths).inputs(torch.float32).with_shared_offsets() for lengths in batches(40)]
    rules = (StridedKeys(4, 2, block=16), SemiLocalKeys(20, 5, block=16))
    keys = record_launches(monkeypatch)
    for rule in rules:
        seen: set[object] = set()
        for number, inputs in enumerate(given):
            # What builders leave is not written here: attention only looks at its type.
            lists = build_lists(
                rule, inputs.q_offsets, inputs.q_offsets,
                q_tokens=inputs.q.shape[0], k_tokens=inputs.q.shape[0], heads=2,
            )  # fmt: skip
            run("triton", inputs, keys=lists)
            new = set(keys) - seen
            assert number < 6 or not new, f"batch {number} compiled {new}"
            seen |= new
            keys.clear()


def test_the_same_from_run_to_run():
    inputs = Case(LENGTHS, heads=4, kv_heads=2).inputs(torch.float32).with_shared_offsets()
    first, second = (run("triton", inputs, keys=RULES["strided"]) for _ in range(2))
    for name, result in first.items():
        assert torch.equal(result, second[name]), name


def test_flops_are_those_of_what_is_seen():
    from torch.utils.flop_counter import FlopCounterMode

    lengths = [33, 0, 5, 48]
    inputs = Case(lengths).inputs(torch.float32).with_shared_offsets()
    for backend in BACKENDS:
        for keys in (StridedKeys(3, 1, block=16), SemiLocalKeys(9, 3, block=16)):
            with FlopCounterMode(display=False) as counter:
                run(backend, inputs, keys=keys)
            pairs = sum(
                int(keys.visible(n, 2, user=user).expand(2, -1, -1).sum())
                for user, n in enumerate(lengths)
            )
            assert counter.get_total_flops() == 2 * pairs * 16 * (2 + 5)


def test_refusals():
    x = JaggedTensor(torch.randn(40, 2, 8), torch.tensor([0, 30, 40])).to(DEVICE)
    rule = StridedKeys(4, 2, block=16)
    with pytest.raises(ValueError, match="leave out window"):
        jagged_attention(x, x, x, keys=rule, window=(3, 0))
    with pytest.raises(TypeError, match="keys must be a rule or KeyLists, got str"):
        jagged_attention(x, x, x, keys="strided")  # pyright: ignore
    schedule = attention_schedule(x, keys=rule)
    with pytest.raises(ValueError, match=r"built for keys=StridedKeys\(.*and the call has keys=No"):
        jagged_attention(x, x, x, causal=True, schedule=schedule)
    with pytest.raises(ValueError, match=r"keys=None and the call has keys=StridedKeys"):
        jagged_attention(x, x, x, keys=rule, schedule=attention_schedule(x, causal=True))
    with pytest.raises(ValueError, match="a tile is a block of 16 tokens"):
        attention_schedule(x, keys=rule, tile_q=64)
    with pytest.raises(ValueError, match="split must be auto or rows"):
        attention_schedule(x, keys=rule, split="stream")
    lists = schedule.lists
    assert (
        repr(lists) == f"KeyLists(entries=8, block=16, groups=2, window=(-1, 0), device={x.device})"
    )
    requests = (RequestKeys(torch.tensor([1, 2], device=DEVICE)) for _ in range(2))
    with pytest.raises(
        ValueError, match=r"targets=tensor\[2\].*with tensors in them they must be one object"
    ):
        jagged_attention(
            x, x, x, keys=next(requests), schedule=attention_schedule(x, keys=next(requests))
        )
    three = JaggedTensor(x.values, torch.tensor([0, 10, 20, 40], device=DEVICE))
    with pytest.raises(ValueError, match="lists of another batch"):
        jagged_attention(three, three, three, keys=lists)
    with pytest.raises(ValueError, match="lists were made for the window"):
        jagged_attention(x, x, x, keys=lists, window=(4, 0))
    assert lists is not None
    whole = dataclasses.replace(lists, window=(-1, -1))
    with pytest.raises(ValueError, match=r"for the window \(-1, -1\), and the call has \(-1, 0\)"):
        jagged_attention(x, x, x, keys=whole, causal=True)
    elsewhere = dataclasses.replace(lists, row_ptr=lists.row_ptr.to("meta"))
    with pytest.raises(ValueError, match="the lists are on meta, and offsets on"):
        jagged_attention(x, x, x, keys=elsewhere)
    y = JaggedTensor(torch.randn(40, 3, 8, device=DEVICE), x.offsets)
    z = JaggedTensor(torch.randn(40, 4, 8, device=DEVICE), x.offsets)
    for backend in ("reference", *BACKENDS):
        with pytest.raises(ValueError, match="of 2 groups of heads, and q has 3 heads"):
            jagged_attention(y, y, y, keys=lists, backend=backend)
        with pytest.raises(ValueError, match=r"built for q of 2 heads, each .*, and q has 4 heads"):
            jagged_attention(z, z, z, keys=rule, schedule=schedule, backend=backend)


@pytest.mark.parametrize("backend", ON_CPU)
def test_lists_of_another_batch(backend):
    """Of as many tokens and users, so that shapes say nothing."""
    values, given = torch.randn(40, 2, 8), [torch.tensor([0, 30, 40]), torch.tensor([0, 7, 40])]
    x, other = (JaggedTensor(values, offsets) for offsets in given)
    own = KeyLists.from_rows(
        torch.zeros(5, dtype=torch.int32), given[0][:0], *given[:1] * 2, block=16
    )
    for lists in (attention_schedule(x, keys=StridedKeys(4, 2, block=16)).lists, own):
        jagged_attention(x, x, x.with_values(values), keys=lists, backend=backend)
        again = JaggedTensor(values, given[0].clone())
        jagged_attention(again, again, again, keys=lists, backend=backend)
        message = r"the list of keys was built for other offsets of q: offsets\[1\] is 30 in"
        with pytest.raises(ValueError, match=message):
            jagged_attention(other, other, other, keys=lists, backend=backend)
        with pytest.raises(ValueError, match=message):
            attention_schedule(other, keys=lists)
    # As many entries, and other users.
    less = JaggedTensor(torch.zeros(48, 2, 8), torch.tensor([0, 48]))
    with pytest.raises(ValueError, match="built for 2 users of q, and the call has 1"):
        jagged_attention(less, less, less, keys=own, backend=backend)


@pytest.mark.parametrize("backend", ON_CPU)
def test_rules_that_do_not_fit_are_refused_by_all(backend):
    """On a CPU, where offsets are read."""
    x, other = (JaggedTensor(torch.randn(40, 2, 8), torch.tensor([0, n, 40])) for n in (30, 7))
    with pytest.raises(ValueError, match="is for self-attention, and q has other offsets than k"):
        jagged_attention(other, x, x, keys=StridedKeys(4, 2, block=16), backend=backend)
    with pytest.raises(ValueError, match="targets must be of 2 users, got 1"):
        jagged_attention(x, x, x, keys=RequestKeys(torch.tensor([1])), backend=backend)
