"""Lists of key blocks in the Gluon kernels: what the loading warp reads of them, and what consumers
then know.

The loading warp alone reads lists. Beside a buffer of its ring it leaves a note for each part that
it brings into it: the part's first token t, or -1 - t where some of it is hidden from somebody. A
listed block is one part, or several where it has more tokens than the kernel takes at a time; where
it has fewer, a block of the kernel has two parts. Consumers read notes when they have waited for
the buffer: where a block stands, and whether it needs the mask. What is no block of the range is
noted at its end, where nobody sees it, and read as zeros.

Rows' tiles have as many tokens as a listed block: S.TILE.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from jagged_kernels.attention import blocks as triton_blocks
from jagged_kernels.attention import triton_meeting
from jagged_kernels.attention.hopper import notes as triton_notes
from jagged_kernels.attention.hopper.blocks import mask_block
from jagged_kernels.schedule.keys import triton_token_rule

# They take no layouts, and so they are the same in Gluon.
_list_ends = gluon.jit(triton_meeting.list_ends.fn)
_rule_of_row = gluon.jit(triton_meeting.rule_of_row.fn)
_token_visible = gluon.jit(triton_token_rule.token_visible.fn)
_band = gluon.jit(triton_blocks.band.fn)
note_of_part = gluon.jit(triton_notes.note_of_part.fn)
parts_of_list = gluon.jit(triton_notes.parts_of_list.fn)
token_of_note = gluon.jit(triton_notes.token_of_note.fn)
token_to_load = gluon.jit(triton_notes.token_to_load.fn)
is_tail = gluon.jit(triton_notes.is_tail.fn)

# Notes of a tile, behind those of the ring: the blocks that it walks, and of the rule for its
# tokens the first key, the keys, from a query to its place among them, history and contexts.
_OF_TILE = gl.constexpr(6)


@gluon.jit
def ring_of_notes(STAGES: gl.constexpr, PARTS: gl.constexpr):
    """For PARTS of a block, and of a tile."""
    return gl.allocate_shared_memory(
        gl.int32, [STAGES * PARTS + _OF_TILE, 1], gl.SwizzledSharedLayout(1, 1, 1, [0])
    )


@gluon.jit
def write_note(notes, place, number):
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    notes.index(place).store(gl.full([1], number, gl.int32, LAYOUT))


@gluon.jit
def read_note(notes, place):
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    return gl.max(notes.index(place).load(LAYOUT), 0)


# --- the loading warp -----------------------------------------------------------------------------


@gluon.jit
def ends_of_list(meets, rows_ptr, place, count, tile_start, range_end, shift, head,
                 HEADS: gl.constexpr, S: gl.constexpr):  # fmt: skip
    """[begin, end) in `meets.col` of a tile, whose fields are those of `row_fields`; HEADS: of the
    places. Nothing from `count` on.

    head: of queries.
    """
    begin, end = _list_ends(
        meets, rows_ptr, gl.minimum(place, count - 1) // HEADS, tile_start, range_end, shift, head,
        S,
    )  # fmt: skip
    return begin, gl.where(place < count, end, begin)


@gluon.jit
def note_blocks(notes, blocks):
    """How many blocks the tile walks."""
    write_note(notes, notes.shape[0] - _OF_TILE, blocks)


@gluon.jit
def note_rule(
    notes, meets, rows_ptr, place, count, range_start, range_end, shift,
    HEADS: gl.constexpr, OF_KEYS: gl.constexpr,
):  # fmt: skip
    """The rule for the tokens of a tile; HEADS: of the places."""
    row = gl.minimum(place, count - 1) // HEADS
    rule = _rule_of_row(meets, rows_ptr, row, range_start, range_end, shift, OF_KEYS)
    for number in gl.static_range(5):
        write_note(notes, notes.shape[0] - 5 + number, rule[number])


# --- consumers ------------------------------------------------------------------------------------


@gluon.jit
def blocks_to_walk(notes):
    return read_note(notes, notes.shape[0] - _OF_TILE)


@gluon.jit
def read_rule(notes):
    """The rule of the tile's user, as `triton_meeting.rule_of_row` has it."""
    return (
        read_note(notes, notes.shape[0] - 5),
        read_note(notes, notes.shape[0] - 4),
        read_note(notes, notes.shape[0] - 3),
        read_note(notes, notes.shape[0] - 2),
        read_note(notes, notes.shape[0] - 1),
    )


@gluon.jit
def mask_listed(
    scores, tile_start, starts, row, rule, left, right,
    S: gl.constexpr, PART: gl.constexpr, OF_KEYS: gl.constexpr, HIDDEN: gl.constexpr,
):  # fmt: skip
    """HIDDEN where the query does not see the key; see `triton_meeting.inside_block`.

    Args:
        tile_start: the tile's first token of this consumer.
        starts: of the block's first part, and of its second, if there is one.
        row: (end of the range, shift).
    """
    layout: gl.constexpr = scores.type.layout
    range_end, shift = row
    tile = gl.expand_dims(tile_start + gl.arange(0, scores.shape[0], gl.SliceLayout(1, layout)), 1)
    column = gl.arange(0, scores.shape[1], gl.SliceLayout(0, layout))
    token = starts[0] + column
    if scores.shape[1] > PART:
        token = gl.where(column < PART, token, starts[1] + column - PART)
    token = gl.expand_dims(token, 0)
    if S.RULED:
        first, length, places, history, contexts = rule
        if OF_KEYS:
            inside = _token_visible(
                token + places, tile - first, length, right, S.FIRST, history, contexts
            )
        else:
            inside = _token_visible(
                tile + places, token - first, length, left, S.FIRST, history, contexts
            )
    else:
        inside = _band(tile + shift, token, range_end, left, right, S.HAS_LEFT, S.HAS_RIGHT)
    return gl.where(inside, scores, HIDDEN)


@gluon.jit
def noted_block(notes, stage):
    """(start, does it need the mask) of the block in buffer `stage`."""
    note = read_note(notes, stage)
    return token_of_note(note), note < 0


@gluon.jit
def hide(
    numbers, start, band, S: gl.constexpr, OF_KEYS: gl.constexpr,
    HIDDEN: gl.constexpr = float("-inf"),
):  # fmt: skip
    """HIDDEN where the query does not see the key, of ranges and of lists.

    Args:
        band: (first token of the tile, end of the range, from where to where blocks are whole,
            shift, left, right); of a list (first token of the tile, end of the range, rule,
            shift, left, right).
    """
    if S.GROUPS:
        tile_start, range_end, rule, shift, left, right = band
        numbers = mask_listed(
            numbers, tile_start, (start,), (range_end, shift), rule, left, right, S, S.BLOCK,
            OF_KEYS, HIDDEN,
        )  # fmt: skip
    else:
        tile_start, range_end, _, _, shift, left, right = band
        numbers = mask_block(
            numbers, tile_start, start, range_end, shift, left, right, S.HAS_LEFT, S.HAS_RIGHT,
            HIDDEN,
        )  # fmt: skip
    return numbers
