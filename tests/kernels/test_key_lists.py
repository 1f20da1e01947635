"""Lists of key blocks: by formula as by the dense mask; both directions; of one's own."""

from __future__ import annotations

import dataclasses
import random

import pytest
import torch
from attention_cases import DEVICE
from hypothesis import given, settings
from hypothesis import strategies as st
from key_cases import (
    BLOCK,
    LENGTHS,
    SEMI_LOCAL,
    STRIDED,
    assert_same_lists,
    offsets_of,
    requests,
)
from launch_keys import Key, batches, record_launches
from processes import run_python

from jagged_kernels.schedule.keys import build
from jagged_kernels.schedule.keys.build import build_lists, key_lists
from jagged_kernels.schedule.keys.check import check_lists
from jagged_kernels.schedule.keys.lists import KeyLists, expand_lists
from jagged_kernels.schedule.keys.reference import reference_lists
from jagged_kernels.schedule.keys.rules import RequestKeys, SemiLocalKeys, StridedKeys

OFFSETS = st.sampled_from([torch.int32, torch.int64])
EVERY_RULE = [
    StridedKeys(3, 2, block=BLOCK),
    SemiLocalKeys(20, 5, block=BLOCK),
    RequestKeys(3, 2, 20, BLOCK),
]
# In the interpreter, and in PyTorch as on a CPU.
BACKENDS = pytest.mark.parametrize("backend", ["triton", "native"])


@pytest.fixture(autouse=True)
def _restored(monkeypatch):
    """What `_use` changes ends with the test."""
    monkeypatch.setattr(build, "triton_runs", build.triton_runs)


def _use(backend):
    build.triton_runs = lambda x: backend == "triton"


def _build(rule, q_offsets, k_offsets=None, *, heads=2, **options):
    k_offsets = q_offsets if k_offsets is None else k_offsets
    tokens = {"q_tokens": int(q_offsets[-1]), "k_tokens": int(k_offsets[-1])}
    return build_lists(rule, q_offsets, k_offsets, heads=heads, **tokens, **options)


# --- by rules -------------------------------------------------------------------------------------


def _assert_as_specified(rule, q_offsets, k_offsets, heads):
    lists = _build(rule, q_offsets, k_offsets, heads=heads)
    assert_same_lists(lists, reference_lists(rule, q_offsets, k_offsets, heads=heads))
    tokens = {"q_tokens": int(q_offsets[-1]), "k_tokens": int(k_offsets[-1])}
    check_lists(lists, q_offsets, k_offsets, **tokens)


def _examples(backend):
    return settings(max_examples=25 if backend == "triton" else 150, deadline=None)


@BACKENDS
@pytest.mark.parametrize("kind", ["strided", "semi-local", "requests"])
def test_lists_are_what_the_masks_show(backend, kind):
    @_examples(backend)
    @given(data=st.data(), lengths=LENGTHS, dtype=OFFSETS, heads=st.integers(1, 5))
    def run(data, lengths, dtype, heads):
        rules = {"strided": STRIDED, "semi-local": SEMI_LOCAL, "requests": requests(lengths)}
        offsets = offsets_of(lengths, dtype)
        _assert_as_specified(data.draw(rules[kind]), offsets, offsets, heads)

    _use(backend)
    run()


@BACKENDS
@pytest.mark.parametrize(("targets", "contexts"), [(0, 0), (3, 0), (20, 18)])
def test_every_window(backend, targets, contexts):
    """A token more or less changes which blocks are seen where it is the last of one."""
    _use(backend)
    offsets = offsets_of([55, 32])
    for window in (1, 2, 6, 7, 8, *range(BLOCK - 2, BLOCK + 3), 2 * BLOCK, 2 * BLOCK + 1):
        if targets:
            rule = RequestKeys(torch.tensor([targets, 1], device=DEVICE), contexts, window, BLOCK)
        else:
            rule = SemiLocalKeys(window, (3 * window) % 37, BLOCK)
        _assert_as_specified(rule, offsets, offsets, 1)


@BACKENDS
def test_lists_of_other_queries_than_keys(backend):
    @_examples(backend)
    @given(data=st.data(), lengths=LENGTHS, dtype=OFFSETS, rule=SEMI_LOCAL)
    def run(data, lengths, dtype, rule):
        queries = [data.draw(st.integers(0, 60)) for _ in lengths]
        _assert_as_specified(rule, offsets_of(queries, dtype), offsets_of(lengths, dtype), 1)

    _use(backend)
    run()


@BACKENDS
@pytest.mark.parametrize("rule", EVERY_RULE, ids=lambda rule: type(rule).__name__)
@pytest.mark.parametrize("lengths", [[], [0], [0, 0, 0], [1] * 3, [300, 7]], ids=str)
def test_few_tokens_and_many_blocks(backend, rule, lengths):
    if isinstance(rule, RequestKeys) and 1 in lengths:
        rule = dataclasses.replace(rule, targets=1, contexts=0)
    _use(backend)
    offsets = offsets_of(lengths)
    _assert_as_specified(rule, offsets, offsets, 3)


@BACKENDS
@pytest.mark.parametrize("rule", EVERY_RULE, ids=lambda rule: type(rule).__name__)
@pytest.mark.parametrize("longest", [0, 16, 40, 100, 101, 5000])
def test_users_longer_than_said(backend, rule, longest, monkeypatch):
    """Where nobody reads the offsets: what is beyond is not listed, in both directions."""
    _use(backend)
    monkeypatch.setattr(build, "readable", lambda x: False)
    offsets = offsets_of([30, 100, 0, 64])
    lists = _build(rule, offsets, longest=longest)
    assert_same_lists(lists, reference_lists(rule, offsets, offsets, heads=2, longest=longest))


@BACKENDS
def test_counts_that_do_not_fit_are_cut(backend, monkeypatch):
    _use(backend)
    monkeypatch.setattr(build, "readable", lambda x: False)
    offsets = offsets_of([30, 1, 0, 64])
    targets = torch.tensor([40, -3, 2, 10], device=DEVICE)
    contexts = torch.tensor([5, 2, 2, 100], device=DEVICE)
    rule = RequestKeys(targets, contexts, 20, BLOCK)
    assert_same_lists(_build(rule, offsets), reference_lists(rule, offsets, offsets, heads=2))


@settings(max_examples=60, deadline=None)
@given(data=st.data(), lengths=LENGTHS, heads=st.integers(1, 3))
def test_lists_expand_to_masks(data, lengths, heads):
    rule = data.draw(st.one_of(STRIDED, SEMI_LOCAL, requests(lengths)))
    offsets = offsets_of(lengths)
    lists = reference_lists(rule, offsets, offsets, heads=heads)
    bounds = list(zip(offsets.tolist(), offsets[1:].tolist(), strict=False))
    for user, (tokens, n) in enumerate(zip(bounds, lengths, strict=True)):
        seen = expand_lists(lists, user, tokens, tokens).cpu()
        assert seen.shape == (lists.groups, n, n)
        if lists.rule is None:
            seen &= torch.ones(n, n, dtype=torch.bool).tril()
        assert torch.equal(seen, rule.visible(n, heads, user=user).expand_as(seen))


def test_room_is_made_by_the_longest_user():
    """A bound, and not much more than there is where all users are as long."""
    _use("native")
    offsets = offsets_of([320] * 4)
    for rule in EVERY_RULE:
        lists = _build(rule, offsets)
        # 4 of 84 numbers are no tile's; a strided list may have one block less than another.
        assert lists.col.shape[0] <= 1.35 * int(lists.row_ptr[-1]), rule


@pytest.mark.parametrize(
    ("rule", "length"),
    [(RequestKeys(targets=64, window=16, block=16), 88), (StridedKeys(3, 1, block=16), 95)],
    ids=["targets with a block of their own", "strides that are no whole rounds"],
)
def test_there_is_room_for_every_block(rule, length):
    """Of one user, whose lists need all that there is."""
    _use("native")
    offsets = offsets_of([length])
    lists = build_lists(rule, offsets, offsets, q_tokens=length, k_tokens=length, heads=1)
    expected = reference_lists(rule, offsets, offsets, heads=1)
    assert lists.col.shape[0] == expected.col.shape[0]
    assert torch.equal(lists.col, expected.col)


def test_counts_of_more_than_any_history_has():
    for name in ("targets", "contexts"):
        rule = RequestKeys(**{name: 2**40}).token_rule(2, torch.device("cpu"))
        assert getattr(rule, name).tolist() == [2**29] * 2


def test_lists_too_long_to_count():
    offsets = offsets_of([30])
    with pytest.raises(ValueError, match="lists hold at most 2147483647 blocks, and these could"):
        build_lists(
            RequestKeys(block=16), offsets, offsets, q_tokens=2**23, k_tokens=2**23,
            heads=1, longest=2**23,
        )  # fmt: skip


# --- errors ---------------------------------------------------------------------------------------


def test_wrong_calls():
    """On a CPU, where offsets are read."""
    offsets, other = (offsets_of(x, device="cpu") for x in ([30, 5], [25, 10]))
    strided, requests_ = EVERY_RULE[0], EVERY_RULE[2]
    with pytest.raises(TypeError, match="keys must be a rule"):
        _build(3, offsets)
    with pytest.raises(ValueError, match="heads must be at least 1"):
        _build(strided, offsets, heads=0)
    for rule in (strided, requests_):
        with pytest.raises(ValueError, match="is for self-attention, and q has other offsets"):
            _build(rule, other, offsets)
        with pytest.raises(ValueError, match="is for self-attention, and q has other offsets"):
            _build(rule, offsets[:2], offsets)
    with pytest.raises(ValueError, match="longest is 29, but a user has 30 tokens"):
        _build(strided, offsets, longest=29)
    with pytest.raises(ValueError, match="longest must be at least 0"):
        _build(strided, offsets, longest=-1)
    with pytest.raises(TypeError, match="longest must be an int"):
        _build(strided, offsets, longest=2.0)
    message = "user 1 has 5 tokens, fewer than its 6 targets and contexts"
    with pytest.raises(ValueError, match=message):
        _build(RequestKeys(6), offsets)
    counts = torch.tensor([20, 2])
    with pytest.raises(ValueError, match=message):
        _build(RequestKeys(counts, 4), offsets)
    with pytest.raises(ValueError, match="targets must be of 2 users, got 1"):
        _build(RequestKeys(counts[:1]), offsets)
    with pytest.raises(ValueError, match="targets must be at least 0, got -20"):
        _build(RequestKeys(-counts), offsets)
    with pytest.raises(ValueError, match="targets must be on cpu, got meta"):
        _build(RequestKeys(counts.to("meta")), offsets)


def test_equal_offsets_may_be_two_tensors():
    offsets = offsets_of([30, 5])
    for rule in EVERY_RULE:
        assert_same_lists(_build(rule, offsets, offsets.clone()), _build(rule, offsets))


def test_empty_users_have_no_targets():
    offsets = offsets_of([0, 9, 0])
    lists = _build(RequestKeys(4, 5, block=BLOCK), offsets)
    assert lists.row_ptr.tolist() == [0, 0, 1, 1]


# --- operators ------------------------------------------------------------------------------------


@BACKENDS
@pytest.mark.parametrize("rule", EVERY_RULE, ids=lambda rule: type(rule).__name__)
def test_the_operator_is_one(backend, rule, monkeypatch):
    _use(backend)
    taken = []
    monkeypatch.setattr(build, "call", lambda op, *inputs: taken.append(inputs) or op(*inputs))
    _build(rule, offsets_of([40, 0, 9]))
    torch.library.opcheck(key_lists, taken[0])


@BACKENDS
@pytest.mark.parametrize("rule", EVERY_RULE, ids=lambda rule: type(rule).__name__)
def test_lists_are_built_in_a_compiled_function(backend, rule):
    _use(backend)

    @torch.compile(fullgraph=True, dynamic=True, backend="aot_eager")
    def run(offsets, values):
        tokens = values.shape[0]
        lists = build_lists(
            rule, offsets, offsets, q_tokens=tokens, k_tokens=tokens, heads=2, longest=128
        )
        return lists.row_ptr, lists.col, *lists.transposed()

    for lengths in ([40, 9], [100, 0, 20, 8]):
        offsets = offsets_of(lengths)
        row_ptr, col, row_ptr_t, col_t = run(offsets, torch.zeros(sum(lengths), device=DEVICE))
        expected = _build(rule, offsets, longest=128)
        assert torch.equal(row_ptr, expected.row_ptr)
        expected_ptr_t, expected_t = expected.transposed()
        assert torch.equal(row_ptr_t, expected_ptr_t)
        assert col.shape == expected.col.shape
        end = int(row_ptr[-1])
        assert torch.equal(col[:end], expected.col[:end])
        assert torch.equal(col_t[:end], expected_t[:end])


def test_offsets_that_cannot_be_read_need_longest():
    offsets = torch.zeros(3, dtype=torch.int64, device="meta")
    options = {"q_tokens": 100, "k_tokens": 100, "heads": 2}
    with pytest.raises(ValueError, match="without longest, offsets are read"):
        build_lists(EVERY_RULE[0], offsets, offsets, **options)
    lists = build_lists(EVERY_RULE[0], offsets, offsets, **options, longest=50)
    assert lists.row_ptr.shape == (2 * (100 // BLOCK + 2) + 1,)


def test_batches_compile_nothing_again(monkeypatch):
    """Not even where lengths, rules and `longest` change."""
    _use("triton")
    keys = record_launches(monkeypatch)
    seen: list[set[Key]] = []
    for count, lengths in enumerate(batches(12)):
        offsets = offsets_of(lengths)
        targets = torch.ones(len(lengths), dtype=torch.int32, device=DEVICE)
        # Of a user a token, one target; empty users have none.
        targets = torch.minimum(targets, offsets.diff().int())
        _build(StridedKeys(1 + count, 1 + count, count, count, BLOCK), offsets)
        _build(SemiLocalKeys(1 + count, count, BLOCK), offsets, longest=max(lengths) + count)
        _build(RequestKeys(targets, targets - targets, 1 + count, BLOCK), offsets)
        seen.append(set(keys))
    assert all(one == seen[0] for one in seen)
    assert len(seen[0]) == 6


COMPILE = """
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
import triton

from jagged_kernels.schedule.keys.triton_lists import _count_kernel, _fill_kernel

for kernel in (_count_kernel, _fill_kernel):
    for strided, targets, contexts in [(1, 0, 0), (0, 0, 0), (0, 1, 1)]:
        constants = {"BLOCK": 64, "GROUPS": 6 if strided else 1, "STRIDED": bool(strided)}
        if kernel is _count_kernel:
            constants["PADDED"] = 8 if strided else 1
        constants |= {} if targets else {"targets_ptr": None, "contexts_ptr": None}
        kinds = {}
        for name in kernel.arg_names:
            offsets = "*i64" if name.endswith("_offsets_ptr") else "*i32"
            pointer = name.endswith("_ptr") or name in ("row_ptr", "row_ptr_t")
            kinds[name] = "constexpr" if name in constants else offsets if pointer else "i32"
        places = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
        source = ASTSource(kernel, kinds, places)
        triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 1})
"""


def test_kernels_compile_for_a_gpu(tmp_path):
    """What the interpreter lets pass: types that change in a loop, and None where it must not."""
    result = run_python(COMPILE, TRITON_CACHE_DIR=str(tmp_path))
    assert result.returncode == 0, result.stderr[-2000:]


# --- of one's own ---------------------------------------------------------------------------------


def _rows(lists, rng):
    """Its tables as somebody else may bring them: shuffled, and with a block twice."""
    blocks, row_ptr = [], [0]
    for begin, end in zip(lists.row_ptr.tolist(), lists.row_ptr[1:].tolist(), strict=False):
        row = (lists.col[begin:end] // 2).tolist()
        row += row[:1]
        rng.shuffle(row)
        blocks += row
        row_ptr.append(len(blocks))
    return torch.tensor(row_ptr, device=DEVICE), torch.tensor(blocks, device=DEVICE).long()


@settings(max_examples=60, deadline=None)
@given(lengths=LENGTHS, rule=STRIDED, heads=st.integers(1, 3), seed=st.integers(0, 99))
def test_lists_of_ones_own(lengths, rule, heads, seed):
    offsets = offsets_of(lengths)
    expected = reference_lists(rule, offsets, offsets, heads=heads)
    row_ptr, col = _rows(expected, random.Random(seed))
    lists = KeyLists.from_rows(
        row_ptr, col.int(), offsets, offsets, block=BLOCK, groups=heads, window=(-1, 0)
    )
    assert_same_lists(lists, expected)
    assert lists.rule is None


@settings(max_examples=60, deadline=None)
@given(
    data=st.data(), lengths=LENGTHS, left=st.integers(-1, 40), right=st.integers(-1, 40),
)  # fmt: skip
def test_partial_is_what_a_band_cuts(data, lengths, left, right):
    """All blocks of every user, of other queries than keys."""
    queries = [data.draw(st.integers(0, 60)) for _ in lengths]
    q_offsets, k_offsets = offsets_of(queries), offsets_of(lengths)
    blocks, row_ptr = [], [0] * (1 + int(q_offsets[-1]) // BLOCK + len(lengths))
    for user, (n, m) in enumerate(zip(queries, lengths, strict=True)):
        first = int(q_offsets[user]) // BLOCK + user
        for tile in range(-(-n // BLOCK)):
            row_ptr[first + tile + 1] = -(-m // BLOCK)
            blocks += range(-(-m // BLOCK))
    lists = KeyLists.from_rows(
        torch.tensor(row_ptr, device=DEVICE).cumsum(0),
        torch.tensor(blocks, dtype=torch.int64, device=DEVICE),
        q_offsets, k_offsets, block=BLOCK, window=(left, right),
    )  # fmt: skip
    row_ptr_t, col_t = lists.transposed()
    assert int(lists.row_ptr[-1]) == int(row_ptr_t[-1]) == len(blocks)
    for user, (n, m) in enumerate(zip(queries, lengths, strict=True)):
        distance = torch.arange(m) - torch.arange(m - n, m)[:, None]
        visible = torch.ones(n, m, dtype=torch.bool)
        if left >= 0:
            visible &= distance >= -left
        if right >= 0:
            visible &= distance <= right
        for pointer, col, offsets, size, other, mask in (
            (lists.row_ptr, lists.col, q_offsets, n, m, visible),
            (row_ptr_t, col_t, k_offsets, m, n, visible.T),
        ):
            first = int(offsets[user]) // BLOCK + user
            for tile in range(-(-size // BLOCK)):
                begin, end = pointer[first + tile : first + tile + 2].tolist()
                for entry, block in zip(col[begin:end].tolist(), range(end - begin), strict=True):
                    part = mask[tile * BLOCK :, block * BLOCK :][:BLOCK, :BLOCK]
                    whole = (block + 1) * BLOCK <= other and bool(part.all())
                    assert entry == 2 * block + (not whole)


def test_lists_of_no_blocks():
    offsets = offsets_of([40, 3])
    row_ptr = torch.zeros(5, dtype=torch.int32, device=DEVICE)
    lists = KeyLists.from_rows(row_ptr, row_ptr[:0], offsets, offsets, block=BLOCK)
    row_ptr_t, col_t = lists.transposed()
    assert lists.row_ptr.tolist() == row_ptr_t.tolist() == [0] * 5
    assert lists.col.shape == col_t.shape == (0,)
    check_lists(lists, offsets, offsets, q_tokens=43, k_tokens=43)


def _from_rows(row_ptr, col, lengths, **options):
    """On a CPU, where tables are read."""
    row_ptr, col = torch.as_tensor(row_ptr), torch.as_tensor(col)
    offsets = offsets_of(lengths, device="cpu")
    return KeyLists.from_rows(row_ptr, col, offsets, offsets, **{"block": BLOCK, **options})


@pytest.mark.parametrize(
    ("row_ptr", "col", "message"),
    [
        ([0, 1, 1, 1, 1], [3], r"col\[0\] = 3 is no key block of the user"),
        ([0, 1, 1, 1, 1], [-1], r"col\[0\] = -1 is no key block of the user"),
        ([0, 0, 0, 0, 0, 1], [0], "row_ptr must be of 4 entries"),
        ([0, 2, 1, 1, 1], [0, 1], "row_ptr must ascend from 0 to at most 2"),
        ([0, 1, 1, 1, 2], [0], "row_ptr must ascend from 0 to at most 1"),
        ([1, 1, 1, 1, 1], [0], "row_ptr must ascend from 0 to at most 1"),
    ],
)
def test_lists_that_are_wrong(row_ptr, col, message):
    with pytest.raises(ValueError, match=message):
        _from_rows(row_ptr, col, [40, 3])


def test_an_entry_of_no_tile():
    # Tiles 0 to 2 are the first user's, 3 and 4 the second's, and 6 would be the third's.
    with pytest.raises(ValueError, match=r"col\[0\] = 0 is no key block .*, or the entry of no"):
        _from_rows([0, 0, 0, 0, 0, 0, 1, 1], [0], [40, 24, 0])


def test_wrong_arguments_of_lists():
    with pytest.raises(TypeError, match="col must be of int32 or int64"):
        _from_rows([0, 0, 0, 0, 0], [0.5], [40, 3])
    with pytest.raises(ValueError, match="row_ptr must have one dimension"):
        _from_rows([[0, 0, 0, 0, 0]], [0], [40, 3])
    with pytest.raises(ValueError, match="block must be a power of two"):
        _from_rows([0, 0, 0, 0, 0], [0], [40, 3], block=17)
    with pytest.raises(ValueError, match="groups must be at least 1"):
        _from_rows([0, 0, 0, 0, 0], [0], [40, 3], groups=0)
    with pytest.raises(ValueError, match=r"window must be .* of -1 or more, got \(-5, 0\)"):
        _from_rows([0, 0, 0, 0, 0], [0], [40, 3], window=(-5, 0))
    with pytest.raises(ValueError, match="q has 1 users and k has 2"):
        KeyLists.from_rows(
            torch.zeros(1), torch.zeros(1), offsets_of([3]), offsets_of([3, 3]), block=BLOCK
        )


def test_wrong_blocks_are_left_out_where_nobody_looks(monkeypatch):
    from jagged_kernels.schedule.keys import transpose

    monkeypatch.setattr(transpose, "readable", lambda x: False)
    lists = _from_rows([0, 3, 4, 4, 5], [0, 7, -1, 1, 4], [40, 3])
    expected = _from_rows([0, 1, 2, 2, 2], [0, 1], [40, 3])
    assert_same_lists(lists, expected)


# --- looked at ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "place", "number", "message"),
    [
        ("row_ptr", 1, 5, "row_ptr must ascend from 0"),
        ("row_ptr_t", 0, 1, "row_ptr_t must ascend from 0"),
        ("col", 0, 200, r"col\[0\] is no block of the user"),
        ("col_t", 0, 200, r"col_t\[0\] is no block of the user"),
        ("col", 1, 5, "col must ascend"),
        ("col", 2, 1, "col must ascend"),  # a block twice
        ("col_t", 3, 5, "col and col_t do not list the same pairs"),
        ("col", 0, 0, r"the block of col\[0\] is cut, not partial"),
    ],
)
def test_lists_are_looked_at(name, place, number, message):
    offsets = offsets_of([40, 3])
    tokens = {"q_tokens": 43, "k_tokens": 43}
    lists = build_lists(StridedKeys(2, 1, block=BLOCK), offsets, offsets, heads=1, **tokens)
    check_lists(lists, offsets, offsets, **tokens)
    assert lists.row_ptr.tolist() == [0, 1, 3, 5, 6]
    assert lists.col[:6].tolist() == [1, 0, 3, 0, 5, 1]
    table = getattr(lists, name).clone()
    table[place] = number
    with pytest.raises(ValueError, match=message):
        check_lists(dataclasses.replace(lists, **{name: table}), offsets, offsets, **tokens)


def test_lists_of_another_batch():
    offsets, other = offsets_of([40, 3]), offsets_of([40, 30])
    lists = _build(EVERY_RULE[0], offsets)
    with pytest.raises(ValueError, match="lists of another batch: row_ptr is of 8 entries"):
        check_lists(lists, other, other, q_tokens=70, k_tokens=70)
