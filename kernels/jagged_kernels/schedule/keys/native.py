"""Lists in PyTorch, vectorised: for training on a CPU. The formulas are those of `triton_lists`."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from jagged_kernels.schedule.keys.blocks import first_tiles, tile_count
from jagged_kernels.schedule.row_layout import NO_LIMIT

# (start, count, distance) of ascending blocks, for each entry.
_Run = tuple[Tensor, Tensor, Tensor | int]


def native_lists(
    q_offsets: Tensor,
    k_offsets: Tensor,
    targets: Tensor | None,
    contexts: Tensor | None,
    *,
    q_tokens: int,
    k_tokens: int,
    block: int,
    groups: int,
    most: int,
    capacity: int,
    strided: tuple[int, int, int, int] | None,
    band: tuple[int, int],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What `build.key_lists` returns."""
    tables: list[Tensor] = []
    for transposed in (False, True):
        own, other, tokens = q_offsets, k_offsets, q_tokens
        if transposed:
            own, other, tokens = k_offsets, q_offsets, k_tokens
        entries = _entries(own, other, tokens, block, groups)
        if strided is None:
            mask: _Strided | _Tokens = _Tokens.of(
                entries, transposed, targets, contexts, band, block
            )
        else:
            mask = _Strided(*strided, block)
        runs = mask.tiles(entries) if transposed else mask.keys(entries)
        exists = (entries.tile * block < entries.own) & (entries.tile < most)
        runs = [
            (start, _cut(start, count, step, exists, most), step) for start, count, step in runs
        ]
        tables += _fill(runs, entries, mask, transposed, block, capacity)
    row_ptr, col, row_ptr_t, col_t = tables
    return row_ptr, col, row_ptr_t, col_t


@dataclass
class _Entries:
    """[N] int64 each: of tiles and groups, or of some of them with another tile each."""

    user: Tensor
    tile: Tensor  # of its user
    group: Tensor
    own: Tensor  # tokens of the user on this side
    other: Tensor  # and on the other one

    def __getitem__(self, index: Tensor) -> _Entries:
        return _Entries(*(getattr(self, field.name)[index] for field in fields(self)))


def _entries(own: Tensor, other: Tensor, tokens: int, block: int, groups: int) -> _Entries:
    users = own.shape[0] - 1
    entry = torch.arange(tile_count(tokens, users, block) * groups, device=own.device)
    number = entry // groups
    first = first_tiles(own, block)
    user = torch.searchsorted(first, number, right=True) - 1
    lengths = (x.diff().long()[user] for x in (own, other))
    return _Entries(user, number - first[user], entry % groups, *lengths)


def _cut(start: Tensor, count: Tensor, step: Tensor | int, exists: Tensor, most: int) -> Tensor:
    """A run's blocks below `most`, of tiles that exist."""
    room = (most - start + (step - 1)) // step
    return torch.where(exists, torch.minimum(count, room).clamp(min=0), 0)


def _fill(
    runs: list[_Run],
    entries: _Entries,
    mask: _Strided | _Tokens,
    transposed: bool,
    block: int,
    capacity: int,
) -> tuple[Tensor, Tensor]:
    counts = torch.stack([count for _, count, _ in runs])
    row_ptr = torch.nn.functional.pad(counts.sum(0).cumsum(0), (1, 0))
    entry = torch.arange(counts.shape[1], device=row_ptr.device).repeat_interleave(row_ptr.diff())
    place = torch.arange(entry.shape[0], device=row_ptr.device) - row_ptr[entry]
    found = torch.zeros_like(place)
    for start, count, step in runs:
        inside = (place >= 0) & (place < count[entry])
        step = step[entry] if isinstance(step, Tensor) else step
        found = torch.where(inside, start[entry] + place * step, found)
        place = place - count[entry]
    listed = entries[entry]
    partial = (found + 1) * block > listed.other
    partial |= mask.hides(listed, found, transposed, entry)
    col = row_ptr.new_zeros(capacity, dtype=torch.int32)
    col[: entry.shape[0]] = 2 * found + partial
    return row_ptr.int(), col


@dataclass
class _Strided:
    """`StridedKeys`, in blocks."""

    stride: int
    local: int
    step: int
    offset: int
    block: int

    def keys(self, x: _Entries) -> list[_Run]:
        """Of a query tile: strided blocks before the local ones, and those."""
        begin = (x.tile - (self.local - 1)).clamp(min=0)
        first = (-self._phase(x.group)) % self.stride
        strided = (begin - first + self.stride - 1) // self.stride
        return [(first, strided.clamp(min=0), self.stride), (begin, x.tile + 1 - begin, 1)]

    def tiles(self, x: _Entries) -> list[_Run]:
        """Of a key block."""
        end = cdiv_of(x.other, self.block)
        strided = (x.tile + self._phase(x.group)) % self.stride == 0
        end = torch.where(strided, end, torch.minimum(end, x.tile + self.local))
        return [(x.tile, end - x.tile, 1)]

    def hides(self, x: _Entries, found: Tensor, transposed: bool, entry: Tensor) -> Tensor:
        return found == x.tile

    def _phase(self, group: Tensor) -> Tensor:
        return (group * self.step + self.offset) % self.stride


@dataclass
class _Tokens:
    """A `TokenRule`, of the users that entries belong to ([N] int64 each)."""

    keys_of_user: Tensor
    shift: Tensor
    history: Tensor
    contexts: Tensor
    left: int
    first: int
    block: int

    @classmethod
    def of(
        cls,
        x: _Entries,
        transposed: bool,
        targets: Tensor | None,
        contexts: Tensor | None,
        band: tuple[int, int],
        block: int,
    ) -> _Tokens:
        queries, keys = (x.other, x.own) if transposed else (x.own, x.other)
        none = torch.zeros_like(keys)
        after = none if targets is None else targets.long()[x.user].clamp(min=0)
        history = (keys - after).clamp(min=0)
        before = none if contexts is None else contexts.long()[x.user].clamp(min=0)
        before = torch.minimum(before, history)
        left, first = band
        return cls(keys, keys - queries, history, before, left, first, block)

    def keys(self, x: _Entries) -> list[_Run]:
        """Of a query tile: what all see or contexts do, what is near, and targets."""
        begin, end = self._queries(x.tile)
        seen_from = self._lowest(torch.minimum(torch.maximum(begin, self.contexts), self.history))
        seen_to = torch.minimum(end, self.history)
        sees_all = (begin < self.contexts) & (self.contexts > 0)
        first = torch.where(sees_all, self.history, seen_to.clamp(max=self.first, min=0))
        return self._disjoint(
            cdiv_of(first, self.block),
            (seen_from, seen_to),
            (torch.maximum(begin, self.history), end),
        )

    def tiles(self, x: _Entries) -> list[_Run]:
        """Of a key block: contexts, the history, and targets that see one of its keys."""
        begin = x.tile * self.block
        end = torch.minimum(begin + self.block, self.keys_of_user)
        seen_by_many = begin < self.history
        newest = torch.maximum(torch.minimum(end, self.history) - 1, self._last_context)
        always = begin < self.first
        if self.left == NO_LIMIT:
            always = torch.ones_like(always)
        reach = torch.where(always, self.history, newest + (self.left + 1))
        to = torch.where(seen_by_many, torch.minimum(self.history, reach), 0)
        since = torch.maximum(torch.maximum(begin, self.contexts), self.shift)
        by_targets = seen_by_many & (always | (self.history - newest <= self.left))
        target = torch.where(by_targets, self.history, torch.maximum(begin, self.history))
        last = torch.where(by_targets, self.keys_of_user, end)
        return self._disjoint(
            torch.where(seen_by_many, cdiv_of(self.contexts, self.block), 0),
            (since - self.shift, to - self.shift),
            (target - self.shift, last - self.shift),
        )

    def hides(self, x: _Entries, found: Tensor, transposed: bool, entry: Tensor) -> Tensor:
        """Whether a query of the tile does not see a key of the block."""
        of_user = (self.keys_of_user, self.shift, self.history, self.contexts)
        keys, shift, history, contexts = (x[entry] for x in of_user)
        mine = _Tokens(keys, shift, history, contexts, self.left, self.first, self.block)
        tile, block = (found, x.tile) if transposed else (x.tile, found)
        return mine._hides(tile, block)

    def _hides(self, tile: Tensor, block: Tensor) -> Tensor:
        begin, end = self._queries(tile)
        key = block * self.block
        keys_end = torch.minimum(key + self.block, self.keys_of_user)
        # Whether contexts do not, the history, targets.
        behind = keys_end > self.history
        hidden = (begin < self.contexts) & behind
        # Not 0 for queries before the first key, which see nothing.
        oldest = torch.where(begin < 0, begin, torch.maximum(begin, self.contexts))
        newest = torch.minimum(end, self.history) - 1
        hides = (keys_end - 1 > oldest) | self._between(key, keys_end, newest)
        hidden |= (oldest <= newest) & hides
        return hidden | ((end > self.history) & (behind | self._between(key, keys_end, None)))

    def _between(self, begin: Tensor, end: Tensor, query: Tensor | None) -> Tensor:
        """Whether a key is behind the first ones and too far before a query, or before targets."""
        lowest = self._lowest(self.history if query is None else query)
        return begin.clamp(min=self.first) < torch.minimum(lowest, end)

    def _queries(self, tile: Tensor) -> tuple[Tensor, Tensor]:
        """Where among the keys a tile's queries begin and end."""
        begin = tile * self.block + self.shift
        return begin, torch.minimum(begin + self.block, self.keys_of_user)

    def _lowest(self, place: Tensor) -> Tensor:
        """The first key that a token at a place sees for being near."""
        if self.left == NO_LIMIT:
            return torch.zeros_like(place)
        lowest = place - self.left
        return torch.where(lowest > self._last_context, lowest, 0)

    @property
    def _last_context(self) -> Tensor:
        return (self.contexts - 1).clamp(min=0)

    def _disjoint(
        self, blocks: Tensor, near: tuple[Tensor, Tensor], last: tuple[Tensor, Tensor]
    ) -> list[_Run]:
        """The first `blocks`, and those of two ranges of tokens that are not among the ones
        before; the second range does not begin before the first one does."""
        runs: list[_Run] = [(torch.zeros_like(blocks), blocks, 1)]
        done = blocks
        for begin, end in (near, last):
            start = torch.maximum(begin // self.block, done)
            stop = torch.where(begin < end, cdiv_of(end, self.block), 0)
            runs.append((start, (stop - start).clamp(min=0), 1))
            done = torch.maximum(done, stop)
        return runs


def cdiv_of(total: Tensor, each: int) -> Tensor:
    return (total + (each - 1)) // each
