"""Copies of tokens from computed places: cut, pad, select and concatenate users' rows.

A program writes an equal share of the output's tokens: it finds whose they are, and from that where
each comes from. A row is read and written once, whatever the lengths.
"""

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from jagged_kernels.core.launch import launch
from jagged_kernels.core.sizes import cdiv
from jagged_kernels.device.memory import as_rows, row_addresses, row_tiles
from jagged_kernels.device.search import user_of

# The last program's row numbers, up to 1023 beyond the last row, still fit into int32.
_MOST_INT32_ROWS = 2**31 - 1024
# Users that a program cuts; it sums up those before them, too.
_USERS = 2048


def launch_place_rows(
    values: Tensor,
    source_offsets: Tensor | None,
    out_offsets: Tensor | None,
    shift: Tensor | None,
    sign: int,
    *,
    users: int,
    tokens: int,
    source_len: int,
    out_len: int,
    source_end: bool,
    out_end: bool,
    value: float,
    select: Tensor | None = None,
) -> Tensor:
    """What `copies.place_rows` says; with `select` [users], output user b reads user select[b]."""
    out = values.new_empty((tokens, *values.shape[1:]))
    if out.numel() == 0:
        return out
    if values.shape[0] == 0:
        return out.fill_(value)
    source, target = as_rows(values), as_rows(out)
    grid, tiles = row_tiles(tokens, target.shape[1], target.element_size())
    launch(
        _place_rows_kernel, grid,
        (
            source, target, source_offsets, out_offsets, shift, select,
            float(value) if source.is_floating_point() else int(value),
            users, tokens, source_len, out_len,
        ),
        {
            "STRIDE": source.stride(0), "SIGN": sign, "SOURCE_END": source_end,
            "OUT_END": out_end, "WIDE": tokens > _MOST_INT32_ROWS, **tiles,
        },
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["value", "users", "tokens", "source_len", "out_len"])
def _place_rows_kernel(
    source_ptr, out_ptr, source_offsets_ptr, out_offsets_ptr, shift_ptr, select_ptr,
    value, users, tokens, source_len, out_len,
    STRIDE: tl.constexpr, SIGN: tl.constexpr, SOURCE_END: tl.constexpr, OUT_END: tl.constexpr,
    WIDE: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    # Padded rows can be more than a jagged tensor has tokens, but divide more slowly in int64.
    token = (program.to(tl.int64) if WIDE else program) * BLOCK + tl.arange(0, BLOCK)
    inside = token < tokens
    token = tl.minimum(token, tokens - 1)
    if out_offsets_ptr is None:
        user = token // out_len
        place = token - user * out_len
        length = out_len
    else:
        user = user_of(out_offsets_ptr, users, token)
        first = tl.load(out_offsets_ptr + user).to(tl.int32)
        place = token - first
        length = tl.load(out_offsets_ptr + user + 1).to(tl.int32) - first
    source_user = user
    if select_ptr is not None:
        source_user = tl.load(select_ptr + user).to(tl.int32)
    if source_offsets_ptr is None:
        source_first = source_user.to(tl.int64) * source_len
        source_length = source_len
    else:
        source_first = tl.load(source_offsets_ptr + source_user).to(tl.int64)
        source_end = tl.load(source_offsets_ptr + source_user + 1).to(tl.int64)
        source_length = (source_end - source_first).to(tl.int32)
    if shift_ptr is not None:
        place += SIGN * tl.load(shift_ptr + user).to(tl.int32)
    if SOURCE_END:
        place += tl.maximum(source_length - length, 0)
    if OUT_END:
        place -= tl.maximum(length - source_length, 0)
    exists = inside & (place >= 0) & (place < source_length)

    address, column = row_addresses(source_first + place, STRIDE, WIDTH, COLUMNS)
    block = tl.load(source_ptr + address, mask=exists[:, None] & column, other=value)
    address, column = row_addresses(token, WIDTH, WIDTH, COLUMNS)
    tl.store(out_ptr + address, block, mask=inside[:, None] & column)


def launch_cut_users(
    offsets: Tensor,
    select: Tensor | None,
    starts: Tensor | None,
    start: int | None,
    lengths: Tensor | None,
    length: int | None,
) -> tuple[Tensor, Tensor]:
    """What `slice.cut_users` says."""
    known = offsets.shape[0] - 1
    select, starts, lengths = (
        None if x is None else x.contiguous() for x in (select, starts, lengths)
    )
    users = known if select is None else select.shape[0]
    out_offsets, begins = offsets.new_empty(users + 1), offsets.new_empty(users)
    if users == 0:
        return out_offsets.zero_(), begins
    launch(
        _cut_users_kernel, cdiv(users, _USERS),
        (
            out_offsets, begins, offsets, select, starts, lengths, start or 0, length or 0, known,
            users,
        ),
        {"RECENT": starts is None and start is None, "USERS": _USERS}, num_warps=8,
    )  # fmt: skip
    return out_offsets, begins


@triton.jit(do_not_specialize=["start", "length", "known", "users"])
def _cut_users_kernel(
    out_offsets_ptr, begins_ptr, offsets_ptr, select_ptr, starts_ptr, lengths_ptr, start, length,
    known, users,
    RECENT: tl.constexpr, USERS: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0) * USERS
    before = tl.zeros([USERS], tl.int64)
    for other in range(0, first, USERS):
        _, count = _cut_user(
            offsets_ptr, select_ptr, starts_ptr, lengths_ptr, start, length, known, users,
            other + tl.arange(0, USERS), RECENT,
        )  # fmt: skip
        before += count
    user = first + tl.arange(0, USERS)
    begin, count = _cut_user(
        offsets_ptr, select_ptr, starts_ptr, lengths_ptr, start, length, known, users, user, RECENT
    )
    end = tl.sum(before, 0) + tl.cumsum(count, 0)
    dtype = out_offsets_ptr.dtype.element_ty
    tl.store(out_offsets_ptr + user, (end - count).to(dtype), mask=user < users)
    tl.store(out_offsets_ptr + user + 1, end.to(dtype), mask=user == users - 1)
    tl.store(begins_ptr + user, begin.to(dtype), mask=user < users)


@triton.jit
def _cut_user(
    offsets_ptr, select_ptr, starts_ptr, lengths_ptr, start, length, known, users, user,
    RECENT: tl.constexpr,
):  # fmt: skip
    """(start in the user, number of tokens) of each user's part, int64; 0 behind the last user."""
    inside = user < users
    source = user.to(tl.int64)
    if select_ptr is not None:
        source = tl.load(select_ptr + user, mask=inside, other=-1).to(tl.int64)
    exists = inside & (source >= 0) & (source < known)
    end = tl.load(offsets_ptr + source + 1, mask=exists, other=0).to(tl.int64)
    count = end - tl.load(offsets_ptr + source, mask=exists, other=0).to(tl.int64)
    begin = count * 0 + start
    if starts_ptr is not None:
        begin = tl.load(starts_ptr + user, mask=inside, other=0).to(tl.int64)
    wanted = count * 0 + length
    if lengths_ptr is not None:
        wanted = tl.load(lengths_ptr + user, mask=inside, other=0).to(tl.int64)
    wanted = tl.maximum(wanted, 0)
    if RECENT:
        begin = count - tl.minimum(wanted, count)
    begin = tl.minimum(tl.maximum(begin, 0), count)
    return begin, tl.minimum(wanted, count - begin)


def launch_cat_rows(
    parts: Sequence[Tensor], offsets: Sequence[Tensor], shared: Sequence[bool], out_offsets: Tensor,
    tokens: int,
) -> Tensor:  # fmt: skip
    """What `cat.cat_rows` says."""
    out = parts[0].new_empty((tokens, *parts[0].shape[1:]))
    if out.numel():
        sources = tuple(as_rows(part).contiguous() for part in parts)
        _walk_parts(as_rows(out), sources, tuple(offsets), tuple(shared), out_offsets, split=False)
    return out


def launch_cat_rows_backward(
    d_out: Tensor, offsets: Sequence[Tensor], shared: Sequence[bool], out_offsets: Tensor,
    rows: Sequence[int],
) -> list[Tensor]:  # fmt: skip
    """The gradient [rows[i], ...] of each part; of a shared one that of each user."""
    parts = [d_out.new_empty((n, *d_out.shape[1:])) for n in rows]
    if d_out.numel():
        targets = tuple(as_rows(part) for part in parts)
        _walk_parts(as_rows(d_out), targets, tuple(offsets), tuple(shared), out_offsets, split=True)
    return parts


def _walk_parts(
    whole: Tensor,
    parts: tuple[Tensor, ...],
    offsets: tuple[Tensor, ...],
    shared: tuple[bool, ...],
    out_offsets: Tensor,
    *,
    split: bool,
) -> None:
    tokens, columns = whole.shape
    grid, tiles = row_tiles(tokens, columns, whole.element_size())
    launch(
        _cat_rows_kernel, grid,
        (whole, parts, offsets, out_offsets, out_offsets.shape[0] - 1, tokens),
        {
            "STRIDE": whole.stride(0), "STEPS": tuple(0 if s else 1 for s in shared),
            "SPLIT": split, **tiles,
        },
    )  # fmt: skip


@triton.jit(do_not_specialize=["users", "tokens"])
def _cat_rows_kernel(
    whole_ptr, parts, offsets, out_offsets_ptr, users, tokens,
    STRIDE: tl.constexpr, STEPS: tl.constexpr, SPLIT: tl.constexpr,
    WIDTH: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """From the parts to the whole or, with SPLIT, back. STEPS[i] is 0 for a part that all users
    share: it has the offsets of one user."""
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = token < tokens
    token = tl.minimum(token, tokens - 1)
    user = user_of(out_offsets_ptr, users, token)
    place = token - tl.load(out_offsets_ptr + user).to(tl.int32)
    whole_address, column = row_addresses(token, STRIDE, WIDTH, COLUMNS)
    if SPLIT:
        block = tl.load(whole_ptr + whole_address, mask=inside[:, None] & column, other=0)
    else:
        block = tl.zeros([BLOCK, COLUMNS], whole_ptr.dtype.element_ty)
    for part in tl.static_range(len(parts)):
        first = tl.load(offsets[part] + user * STEPS[part]).to(tl.int32)
        length = tl.load(offsets[part] + user * STEPS[part] + 1).to(tl.int32) - first
        exists = (inside & (place >= 0) & (place < length))[:, None] & column
        row = first + place
        if SPLIT and STEPS[part] == 0:
            row += user * length
        address, _ = row_addresses(row, WIDTH, WIDTH, COLUMNS)
        if SPLIT:
            tl.store(parts[part] + address, block, mask=exists)
        else:
            # Another part's rows are not read: `other` keeps what is there.
            block = tl.load(parts[part] + address, mask=exists, other=block)
        place -= length
    if not SPLIT:
        tl.store(whole_ptr + whole_address, block, mask=inside[:, None] & column)
