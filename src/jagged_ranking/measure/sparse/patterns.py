"""Which keys a query sees, as the papers say it: what lists of blocks are held against.

A pattern is of blocks of `block` tokens, counted from a user's own first token. It says twice what
it is: as the `keys` of our attention (of queries and histories, whose longest is known), and as a
plain mask, which shares nothing with our lists.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from jagged_kernels import JaggedTensor, KeyLists, SemiLocalKeys, StridedKeys, retrieved_blocks
from jagged_ranking.measure.lineup import RANDOM, RETRIEVED, SEMI_LOCAL, STRIDED

Keys = StridedKeys | SemiLocalKeys | KeyLists


@dataclass(frozen=True, kw_only=True)
class Strided:
    """S2-Attention (arXiv 2407.17678): the newest blocks, and of the others every so many-th, those
    of each head a step further.

    Args:
        stride: v; every v-th block.
        local: w; blocks up to a query's own.
        block: tokens.
    """

    kind: ClassVar[str] = STRIDED
    stride: int
    local: int
    block: int = 64

    def keys(
        self, queries: JaggedTensor, history: JaggedTensor, *, causal: bool, longest: int
    ) -> Keys:
        """For `attention_schedule`."""
        return StridedKeys(stride=self.stride, local=self.local, block=self.block)

    def visible(self, rows: Tensor, keys: int, *, heads: int, user: int, causal: bool) -> Tensor:
        """[H, rows, keys] bool: which keys of a user the queries at `rows` see."""
        seen = self.blocks_seen(rows // self.block, -(-keys // self.block), heads)
        return _of_tokens(seen, rows, keys, self.block, causal=True)

    def blocks(self, queries: int, keys: int, *, heads: int, causal: bool) -> float:
        """How many blocks of keys the query blocks of a user see, mean of the heads."""
        count = -(-keys // self.block)
        everyone = torch.arange(count)
        return float(self.blocks_seen(everyone, count, heads).sum()) / heads

    def blocks_seen(self, rows: Tensor, count: int, heads: int) -> Tensor:
        """[H, rows, count] bool, of query blocks `rows`."""
        block = torch.arange(count, device=rows.device)
        step = max(1, self.stride // heads)
        head = torch.arange(heads, device=rows.device)[:, None, None]
        strided = (block + head * step) % self.stride == 0
        behind = rows[:, None] - block
        return (behind >= 0) & ((behind < self.local) | strided)


@dataclass(frozen=True, kw_only=True)
class SemiLocal:
    """ULTRA-HSTU's semi-local attention: a query sees the newest events up to itself, and the first
    of the history.

    Args:
        window: newest tokens, the query among them.
        first: tokens at the beginning.
        block: tokens.
    """

    kind: ClassVar[str] = SEMI_LOCAL
    window: int
    first: int
    block: int = 64

    def keys(
        self, queries: JaggedTensor, history: JaggedTensor, *, causal: bool, longest: int
    ) -> Keys:
        """For `attention_schedule`."""
        return SemiLocalKeys(window=self.window, first=self.first, block=self.block)

    def visible(self, rows: Tensor, keys: int, *, heads: int, user: int, causal: bool) -> Tensor:
        """[1, rows, keys] bool: which keys of a user the queries at `rows` see."""
        key = torch.arange(keys, device=rows.device)
        behind = rows[:, None] - key
        return ((behind >= 0) & ((behind < self.window) | (key < self.first)))[None]

    def blocks(self, queries: int, keys: int, *, heads: int, causal: bool) -> float:
        """How many blocks of keys the query blocks of a user see."""
        query = np.arange(-(-keys // self.block))
        oldest = np.maximum(query * self.block - self.window + 1, 0) // self.block
        first = np.minimum(-(-self.first // self.block), oldest)
        return float((query - oldest + 1 + first).sum())


@dataclass(frozen=True, kw_only=True)
class RandomBlocks:
    """A share of all blocks, drawn at random; those on the diagonal always, so that every query
    sees something. Block-sparse FlashAttention takes any (arXiv 2205.14135, section 3.3).

    Args:
        density: the share of the blocks that dense attention has.
        block: tokens.
        seed: of the draw.
    """

    kind: ClassVar[str] = RANDOM
    density: float
    block: int = 64
    seed: int = 0

    def keys(
        self, queries: JaggedTensor, history: JaggedTensor, *, causal: bool, longest: int
    ) -> Keys:
        """For `attention_schedule`. Made on the host, which waits for the lengths."""
        chosen = [
            self._blocks(user, -(-int(length) // self.block), causal=causal)
            for user, length in enumerate(history.lengths.tolist())
        ]
        return lists_of(chosen, history, block=self.block, causal=causal)

    def visible(self, rows: Tensor, keys: int, *, heads: int, user: int, causal: bool) -> Tensor:
        """[1, rows, keys] bool: which keys of a user the queries at `rows` see."""
        drawn = self._blocks(user, -(-keys // self.block), causal=causal).to(rows.device)
        return _of_tokens(drawn[rows // self.block][None], rows, keys, self.block, causal=causal)

    def blocks(self, queries: int, keys: int, *, heads: int, causal: bool) -> float:
        """How many blocks of keys the query blocks of a user see."""
        count = -(-keys // self.block)
        return float(self._wanted(count, count * (count + 1) // 2 if causal else count**2))

    def _wanted(self, count: int, possible: int) -> int:
        return max(count, round(self.density * possible))

    def _blocks(self, user: int, count: int, *, causal: bool) -> Tensor:
        """[count, count] bool."""
        rank = np.random.default_rng((self.seed, user)).random((count, count))
        np.fill_diagonal(rank, -1.0)
        possible = count**2
        if causal:
            rank[np.triu_indices(count, 1)] = 2.0
            possible = count * (count + 1) // 2
        first = np.argsort(rank, axis=None, kind="stable")[: self._wanted(count, possible)]
        chosen = np.zeros(count**2, dtype=bool)
        chosen[first] = True
        return torch.from_numpy(chosen.reshape(count, count))


@dataclass(frozen=True, kw_only=True)
class Retrieved:
    """Retrieval over long histories (SIM, ETA, TWIN): a tile of candidates takes the blocks whose
    mean key is nearest to its mean query, and the newest ones.

    Args:
        top_k: blocks that are retrieved.
        newest: blocks besides.
        block: tokens, and candidates in a tile.
    """

    kind: ClassVar[str] = RETRIEVED
    top_k: int
    newest: int = 1
    block: int = 64

    def keys(
        self, queries: JaggedTensor, history: JaggedTensor, *, causal: bool, longest: int
    ) -> KeyLists:
        """For `attention_schedule`."""
        return retrieved_blocks(
            queries,
            history,
            top_k=self.top_k,
            newest=self.newest,
            block=self.block,
            longest=longest,
        )

    def blocks(self, queries: int, keys: int, *, heads: int, causal: bool) -> float:
        """How many blocks of keys the query blocks of a user see."""
        tiles, count = -(-queries // self.block), -(-keys // self.block)
        return float(tiles * min(self.top_k + self.newest, count))


Pattern = Strided | SemiLocal | RandomBlocks | Retrieved


def dense_blocks(queries: int, keys: int, *, block: int, causal: bool) -> float:
    """How many blocks there are where a query sees all keys, or (causal, as many queries as keys)
    all up to itself."""
    tiles, count = -(-queries // block), -(-keys // block)
    return float(count * (count + 1) // 2 if causal else tiles * count)


def lists_of(
    chosen: Sequence[Tensor], history: JaggedTensor, *, block: int, causal: bool
) -> KeyLists:
    """Lists for self-attention, all heads alike.

    Args:
        chosen: for each user [blocks, blocks] bool: which blocks of keys a query block sees.
        history: of the users.
        block: tokens.
        causal: of the call.
    """
    tokens = len(history.values)
    counts = torch.zeros(tokens // block + len(chosen), dtype=torch.int64)
    begins = history.offsets.tolist()
    for user, blocks in enumerate(chosen):
        first = begins[user] // block + user
        counts[first : first + len(blocks)] = blocks.sum(1)
    row_ptr = torch.nn.functional.pad(counts.cumsum(0), (1, 0))
    col = torch.cat([blocks.nonzero()[:, 1] for blocks in chosen])
    return KeyLists.from_rows(
        row_ptr.to(history.device),
        col.to(history.device),
        history.offsets,
        history.offsets,
        block=block,
        window=(-1, 0 if causal else -1),
        q_tokens=tokens,
        k_tokens=tokens,
    )


def blocks_listed(lists: KeyLists, first: int, tiles: range, blocks: int) -> Tensor:
    """[groups, tiles, blocks] bool: which blocks of keys tiles of a user's queries see by lists.

    Args:
        first: the number of the user's first tile: offsets[user] // block + user.
        tiles: of the user.
        blocks: of the user's keys.
    """
    groups = lists.groups
    begin, end = ((first + tile) * groups for tile in (tiles.start, tiles.stop))
    starts = lists.row_ptr[begin : end + 1].long()
    listed = torch.zeros((end - begin, blocks), dtype=torch.bool, device=starts.device)
    entry = torch.arange(end - begin, device=starts.device).repeat_interleave(starts.diff())
    listed[entry, lists.col[int(starts[0]) : int(starts[-1])].long() // 2] = True
    return listed.view(len(tiles), groups, blocks).transpose(0, 1)


def _of_tokens(blocks: Tensor, rows: Tensor, keys: int, block: int, *, causal: bool) -> Tensor:
    """[.., rows, blocks] bool of blocks -> [.., rows, keys] of tokens."""
    key = torch.arange(keys, device=rows.device)
    seen = blocks[..., key // block]
    return seen & (key <= rows[:, None]) if causal else seen


def facts_of(pattern: Any) -> dict[str, Any]:
    """What a results row says of a pattern."""
    return {"rule": pattern.kind, **vars(pattern)}
