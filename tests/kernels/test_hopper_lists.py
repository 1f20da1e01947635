"""Lists of key blocks on Hopper's kernels, as far as a CPU can show them: what the loading warp
notes of a list, and what is computed again. test_hopper.py compiles them."""

from __future__ import annotations

import math
from typing import Any

import pytest
import score_policies
import torch
import triton
import triton.language as tl
from attention_cases import DEVICE, FACTOR, Case
from hypothesis import given, settings
from hypothesis import strategies as st
from key_cases import offsets_of
from meeting_cases import run
from torch import Tensor

from jagged_kernels import KeyLists, RequestKeys, SemiLocalKeys, StridedKeys
from jagged_kernels.attention.hopper.exact import launch_exact
from jagged_kernels.attention.hopper.exact_backward import launch_exact_backward
from jagged_kernels.attention.hopper.notes import (
    is_tail,
    note_of_part,
    parts_of_list,
    token_of_note,
    token_to_load,
)
from jagged_kernels.attention.meeting import MeetTerms, meeting_of
from jagged_kernels.attention.plans import Call, scale_argument
from jagged_kernels.attention.triton_meeting import list_ends
from jagged_kernels.schedule.band import band_of
from jagged_kernels.schedule.keys.build import build_lists
from jagged_kernels.schedule.keys.lists import expand_lists
from jagged_kernels.schedule.row_access import load_row
from jagged_kernels.schedule.rows import build_rows

# Parts of blocks that a tile walks here, at most.
_MOST = 12
# No note.
_NONE = -(2**31)


@triton.jit
def _walk_kernel(
    rows_ptr, meets, notes_ptr, S: tl.constexpr, PART: tl.constexpr, PARTS: tl.constexpr,
    MOST: tl.constexpr,
):  # fmt: skip
    """What the loading warps do for a tile and a head: with two PARTS as that of the forward, from
    the last to the first, else as those of the backward."""
    row, head = tl.program_id(0) // S.HEADS, tl.program_id(0) % S.HEADS
    start, _, range_start, range_end, shift = load_row(rows_ptr, row)
    begin, end = list_ends(meets, rows_ptr, row, start, range_end, shift, head, S)
    blocks = tl.cdiv(parts_of_list(begin, end, S.TILE, PART), PARTS)
    notes_ptr += tl.program_id(0) * MOST * 3
    for number in range(0, MOST):
        if number < blocks * PARTS:
            part = number
            if PARTS == 2:
                part = blocks * PARTS - 1 - number
            note = note_of_part(meets.col, begin, end, part, range_start, range_end, S.TILE, PART)
            token = token_of_note(note)
            tl.store(notes_ptr + number * 3, note)
            tl.store(notes_ptr + number * 3 + 1, token_to_load(token, range_end, PART))
            tl.store(notes_ptr + number * 3 + 2, is_tail(token, range_end, PART).to(tl.int32))


def noted(rows: Tensor, arguments: Any, shape: Any, part: int, parts: int) -> Tensor:
    """[rows, heads, parts of blocks, 3]: note, first token that is loaded, is it a tail; `_NONE`
    where a list is shorter."""
    size = (rows.shape[0], shape.HEADS, _MOST, 3)
    notes = torch.full(size, _NONE, dtype=torch.int32, device=DEVICE)
    _walk_kernel[(rows.shape[0] * shape.HEADS,)](
        rows, arguments, notes, S=shape, PART=part, PARTS=parts, MOST=_MOST
    )
    return notes.cpu()


def shape_of(lists: KeyLists, heads: int) -> Any:
    q = torch.empty(1, heads, 16, device=DEVICE)
    meets = meeting_of(MeetTerms.of(lists, None), offsets_of([1])).constants
    call = Call.of(q, q, q, left=-1, right=-1, scale=1.0)
    return call.shape(tile=lists.block, block=lists.block, meets=meets)


def assert_walk(
    lists: KeyLists, lengths: tuple[list[int], list[int]], heads: int, part: int, parts: int,
    *, window: tuple[int, int], transposed: bool,
) -> None:  # fmt: skip
    """The parts that are noted show each pair of tokens that the lists show, as often as they do,
    and no other; those without the mask are visible whole."""
    sides = [offsets_of(one, torch.int64, DEVICE) for one in lengths]
    q_offsets, k_offsets = sides
    tables = lists.transposed() if transposed else (lists.row_ptr, lists.col)
    given_lists = MeetTerms.of(lists, None)._replace(row_ptr=tables[0], col=tables[1])
    arguments = meeting_of(given_lists, k_offsets).arguments
    own, other = (k_offsets, q_offsets) if transposed else (q_offsets, k_offsets)
    rows = build_rows(own, other, tokens=int(own[-1]), tile=lists.block, left=-1, right=-1)
    notes = noted(rows, arguments, shape_of(lists, heads), part, parts)
    left, right = window
    for row, of_row in zip(rows.tolist(), notes, strict=True):
        start, end, range_start, range_end, _, user = row[:6]
        if start == end:
            continue
        queries, keys = ((int(side[user]), int(side[user + 1])) for side in (q_offsets, k_offsets))
        n, m = queries[1] - queries[0], keys[1] - keys[0]
        i, j = torch.arange(m - n, m)[:, None], torch.arange(m)
        band = torch.ones(n, m, dtype=torch.bool)
        band &= (j >= i - left) if left >= 0 else band
        band &= (j <= i + right) if right >= 0 else band
        shown = expand_lists(lists, user, queries, keys).cpu()
        if lists.rule is None:
            shown = shown & band
            mask = band
        else:
            mask = expand_lists(_all_listed(lists, user, n, m), 0, (0, n), (0, m)).cpu()[0]
        for head, of_head in enumerate(of_row):
            seen = torch.zeros(n, m, dtype=torch.int64)
            view, allowed = (seen.T, mask.T) if transposed else (seen, mask)
            mine = slice(start - int(own[user]), end - int(own[user]))
            for note, loaded, tail in of_head[of_head[:, 0] != _NONE].tolist():
                token = -1 - note if note < 0 else note
                theirs = slice(token - range_start, min(token + part, range_end) - range_start)
                assert loaded == (token if token < range_end else -part)
                assert tail == (token < range_end < token + part)
                if token < range_end:
                    assert range_start <= token
                    assert note < 0 or bool(allowed[mine, theirs].all())
                    assert note < 0 or token + part <= range_end
                    view[mine, theirs] += allowed[mine, theirs].long()
                else:
                    assert note < 0
            expected = shown[head * lists.groups // heads].long()
            part_of = (slice(None), mine) if transposed else (mine, slice(None))
            assert torch.equal(seen[part_of], expected[part_of])


def _all_listed(lists: KeyLists, user: int, n: int, m: int) -> KeyLists:
    """Every block of one user, by the rule of the lists."""
    blocks, tiles = -(-m // lists.block), -(-n // lists.block)
    row_ptr = (torch.arange(tiles + 2, device=DEVICE).clamp(max=tiles) * blocks).int()
    col = 2 * torch.arange(blocks, device=DEVICE).repeat(max(tiles, 1)).int() + 1
    assert lists.rule is not None
    left, first, *counts = lists.rule
    counts = [None if x is None else x[user : user + 1] for x in counts]
    rule = type(lists.rule)(left, first, *counts)
    return KeyLists(row_ptr, col, None, None, lists.block, 1, rule)


LENGTHS = st.lists(
    st.one_of(st.integers(0, 150), st.sampled_from([0, 1, 31, 32, 33, 64, 128])),
    min_size=1, max_size=4,
)  # fmt: skip
# Tokens of a listed block, and of a part; a block of the kernel is one part of each.
WALKS = st.sampled_from([(32, 32, 1), (32, 16, 1), (32, 32, 2), (16, 16, 2), (64, 16, 1)])


@settings(max_examples=15, deadline=None)
@given(q_lengths=LENGTHS, walk=WALKS, transposed=st.booleans(), data=st.data())
def test_random_lists_are_noted_as_they_are(q_lengths, walk, transposed, data):
    block, part, parts = walk
    k_lengths = [data.draw(st.integers(0, 130)) for _ in q_lengths]
    groups = data.draw(st.sampled_from([1, 2]))
    window = data.draw(st.sampled_from([(-1, -1), (-1, 0), (40, 5)]))
    users = len(q_lengths)
    entries = (sum(q_lengths) // block + users) * groups
    counts, col = [0] * entries, []
    number = 0
    for user, (n, m) in enumerate(zip(q_lengths, k_lengths, strict=True)):
        first = sum(q_lengths[:user]) // block + user
        for tile in range(-(-n // block)):
            for group in range(groups):
                chosen = data.draw(st.sets(st.integers(0, max(-(-m // block) - 1, 0))))
                number = (first + tile) * groups + group
                counts[number] = len(chosen) if m else 0
                col.append((number, sorted(chosen) if m else []))
    flat = [block for _, some in sorted(col) for block in some]
    row_ptr = torch.tensor([0, *counts], device=DEVICE).cumsum(0)
    offsets = [offsets_of(x, torch.int64, DEVICE) for x in (q_lengths, k_lengths)]
    lists = KeyLists.from_rows(
        row_ptr, torch.tensor(flat, dtype=torch.int64, device=DEVICE), *offsets,
        block=block, groups=groups, window=window,
    )  # fmt: skip
    assert_walk(lists, (q_lengths, k_lengths), 2, part, parts, window=window, transposed=transposed)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize(
    "rule",
    [
        StridedKeys(3, 1, block=16),
        SemiLocalKeys(40, 17, block=16),
        RequestKeys(targets=5, contexts=2, window=60, block=16),
    ],
    ids=lambda rule: type(rule).__name__,
)
def test_the_lists_of_rules_are_noted_as_they_are(rule, parts, transposed):
    lengths = [70, 0, 129, 16, 33]
    offsets = offsets_of(lengths, torch.int64, DEVICE)
    tokens = sum(lengths)
    lists = build_lists(rule, offsets, offsets, q_tokens=tokens, k_tokens=tokens, heads=4)
    assert_walk(
        lists, (lengths, lengths), 4, 16, parts,
        window=band_of(rule, False, None), transposed=transposed,
    )  # fmt: skip


@pytest.mark.parametrize("parts", [1, 2])
def test_what_is_no_block_is_noted_behind_the_end(parts):
    """In tables that nobody has looked at; what is listed twice is noted twice, and a short block
    needs the mask whatever its entry says."""
    lengths, block = [40], 16
    offsets = offsets_of(lengths, torch.int64, DEVICE)
    entries = [[0, 4, -2, 2 * 2**29], [0, 0, 6], [2**30, 5]]
    row_ptr = torch.tensor([0, 4, 7, 9], dtype=torch.int32, device=DEVICE)
    col = torch.tensor([x for one in entries for x in one], dtype=torch.int32, device=DEVICE)
    lists = KeyLists(row_ptr, col, None, None, block, 1, None)
    rows = build_rows(offsets, offsets, tokens=40, tile=block, left=-1, right=-1)
    arguments = meeting_of(MeetTerms.of(lists, None), offsets).arguments
    notes = noted(rows, arguments, shape_of(lists, 1), block, parts)[..., 0]
    behind = -1 - 40
    expected = [[0, -1 - 32, behind, behind], [0, 0, behind], [behind, -1 - 32]]
    for row, (start, *_) in enumerate(rows.tolist()[:3]):
        found = [x for x in notes[row, 0].tolist() if x != _NONE]
        wanted = expected[start // block]
        if parts == 2:
            wanted = [*[behind] * (len(wanted) % 2), *wanted[::-1]]
        assert found == wanted


# --- what is computed again, on any device --------------------------------------------------------

RULES = {
    "strided": StridedKeys(2, 1, block=32),
    "semi-local": SemiLocalKeys(20, 6, block=32),
    "request": RequestKeys(targets=3, contexts=1, block=32),
}


def _listed(rule: Any, inputs: Any, scores: Any = None) -> tuple[Any, tuple[int, int], Any, Any]:
    """(meeting, band, rows, rows_t) of a call over the keys of a rule."""
    q_offsets, k_offsets = inputs.q_offsets, inputs.k_offsets
    q_tokens, k_tokens, heads = inputs.q.shape[0], inputs.k.shape[0], inputs.q.shape[1]
    lists = build_lists(
        rule, q_offsets, k_offsets, q_tokens=q_tokens, k_tokens=k_tokens, heads=heads
    )
    lists.transposed()
    of_tile = {"tile": rule.block, "left": -1, "right": -1}
    rows = build_rows(q_offsets, k_offsets, tokens=q_tokens, **of_tile)
    rows_t = build_rows(k_offsets, q_offsets, tokens=k_tokens, **of_tile)
    meeting = meeting_of(MeetTerms.of(lists, scores), k_offsets)
    return meeting, band_of(rule, False, None), rows, rows_t


@pytest.mark.parametrize("policy", [None, "silu"])
@pytest.mark.parametrize("rule", RULES)
def test_marked_parts_are_computed_again(rule, policy):
    scores, part = None if policy is None else score_policies.POLICIES[policy][0], 16
    inputs = Case([70, 0, 33, 16, 4], heads=2, kv_heads=1).inputs(torch.float32)
    inputs = inputs.with_shared_offsets()
    inputs.v[3, 0, 2] = math.nan
    meeting, (left, right), rows, _ = _listed(RULES[rule], inputs, scores)
    band: dict[str, Any] = {"left": left, "right": right}
    call = Call.of(inputs.q, inputs.k, inputs.v, scale=inputs.q.shape[2] ** -0.5, **band)
    scale_log2, negate = scale_argument(call.scale)
    o = torch.full_like(inputs.q, 7.0)
    marks = torch.zeros((rows.shape[0], 32 // part, 2), dtype=torch.int8, device=DEVICE)
    marks[:, :, 1] = 1
    shape = call._replace(precision="ieee").shape(tile=32, block=64, meets=meeting.constants)
    launch_exact(
        inputs.q, inputs.k, inputs.v, o, None, marks, rows,
        shape=shape, part_q=part, scale_log2=scale_log2, negate=negate, meeting=meeting, **band,
    )  # fmt: skip
    exact = run("reference", inputs.double(), keys=RULES[rule], scores=scores)["o"]
    assert (o[:, 0] == 7.0).all()
    assert exact.isnan().any()
    torch.testing.assert_close(o[:, 1].double(), exact[:, 1], rtol=1e-4, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize("place", ["q", "k", "v", "d_o"])
@pytest.mark.parametrize("rule", RULES)
def test_parts_of_gradients_that_are_not_finite_are_computed_again(rule, place):
    from jagged_kernels.attention.plain.dq import launch_dq
    from jagged_kernels.attention.plain.forward import launch_forward

    part = 16
    inputs = Case([45, 0, 20], heads=4, kv_heads=2).inputs(torch.float16).with_shared_offsets()
    getattr(inputs, place)[17, 1] = math.nan
    exact = run("reference", inputs.double(), keys=RULES[rule])
    meeting, (left, right), rows, rows_t = _listed(RULES[rule], inputs)
    band: dict[str, Any] = {"left": left, "right": right, "meeting": meeting}
    q, k, v, d_o = inputs.q, inputs.k, inputs.v, inputs.d_o
    scale = q.shape[2] ** -0.5
    call = Call.of(q, k, v, d_o, left=left, right=right, scale=scale)
    o, lse2 = launch_forward(q, k, v, rows, tile_q=32, scale=scale, **band)
    assert lse2 is not None
    _, delta = launch_dq(d_o, None, q, k, v, o, lse2, rows, call, tile=32, **band)
    found = [torch.full_like(x, math.inf) for x in (q, k, v)]
    launch_exact_backward(
        d_o, q, k, v, lse2, delta, found[0], (found[1], found[2]), rows, rows_t, call,
        torch.tensor(1, dtype=torch.int32, device=DEVICE),
        tile=32, part_q=part, part_k=part, **band,
    )  # fmt: skip
    for name, again in zip(("dq", "dk", "dv"), found, strict=True):
        expected = exact[name]
        assert torch.equal(again.isnan(), expected.isnan()), name
        error = (again.double() - expected).nan_to_num(0.0).abs().max()
        largest = expected.nan_to_num(0.0).abs().max()
        assert error <= FACTOR * torch.finfo(torch.float16).eps * largest, (name, error)
