"""`KeyLists`: for each tile of queries the key blocks that it sees, and the transpose."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from jagged_kernels.core.contents import can_be_read, total_of
from jagged_kernels.core.sizes import as_int
from jagged_kernels.schedule.keys.blocks import check_block
from jagged_kernels.schedule.keys.pairs import Batch
from jagged_kernels.schedule.keys.token_rule import TokenRule, token_visible
from jagged_kernels.schedule.keys.transpose import sorted_rows, transposed_lists
from jagged_kernels.schedule.offsets import Compared
from jagged_kernels.schedule.row_layout import NO_LIMIT
from jagged_kernels.schedule.window import resolve_window
from jagged_kernels.tensors.arguments import not_a_tensor


@dataclass(eq=False, repr=False)
class KeyLists:
    """Square blocks of `block` queries by `block` keys, each counted from its user's first token.

    Tile t of user b is number q_offsets[b] // block + b + t: there are q_tokens // block + B
    numbers, some of which are no tile's (`blocks`). So are key blocks numbered, by k_offsets.
    Entry x * groups + g is of tile number x and group g.

    A pair of tokens is visible if its block is listed and the mask of tokens says so: `rule`, or
    the band of the call. Both directions list the same blocks.

    Attributes:
        row_ptr: [Nq * groups + 1] int32, where the blocks of an entry begin in `col`; never beyond
            it. Entries of no tile are empty.
        col: [C] int32, ascending in an entry: 2 * the key block (of the user: 0 is its first) +
            partial. Partial is 1 if the mask of tokens must be looked at: the key block has fewer
            than `block` keys, or one of its keys is hidden from a query of the tile. What is
            behind row_ptr[-1] means nothing.
        row_ptr_t: [Nk * groups + 1] int32, of key blocks.
        col_t: [C] int32, the tiles of queries that see a key block: 2 * tile + partial. Partial is
            1 if the tile has fewer than `block` queries, or one of them does not see a key of the
            block.
            Both are None until a backward needs them, where no rule gave them (`transposed`).
        block: a power of two, 16 to 128.
        groups: head h of H has the lists of group h * groups // H.
        rule: the mask of tokens, None for the band of the call.
        window: (left, right), the band that a call must have (-1 for no limit) where `rule` is
            None.
        q_offsets, k_offsets: [B + 1], those that the lists were made for, and that calls must
            have; None where nobody said them.
        compared: of `schedule.offsets.compare_offsets`.
    """

    row_ptr: Tensor
    col: Tensor
    row_ptr_t: Tensor | None
    col_t: Tensor | None
    block: int
    groups: int
    rule: TokenRule | None
    window: tuple[int, int] = (NO_LIMIT, NO_LIMIT)
    q_offsets: Tensor | None = None
    k_offsets: Tensor | None = None
    compared: Compared = field(default_factory=dict)

    def __getstate__(self) -> dict[str, Any]:
        # A copy's offsets count their changes anew.
        return {**vars(self), "compared": {}}

    def __repr__(self) -> str:
        rule = "" if self.rule is None else "rule of tokens, "
        return (
            f"KeyLists(entries={self.row_ptr.shape[0] - 1}, block={self.block}, "
            f"groups={self.groups}, {rule}window={self.window}, device={self.row_ptr.device})"
        )

    @classmethod
    def from_rows(
        cls,
        row_ptr: Tensor,
        col: Tensor,
        q_offsets: Tensor,
        k_offsets: Tensor,
        *,
        block: int,
        groups: int = 1,
        window: tuple[int, int] = (NO_LIMIT, NO_LIMIT),
        q_tokens: int | None = None,
        k_tokens: int | None = None,
    ) -> KeyLists:
        """Lists of one's own, of any contents: from data, from scores, or learnt.

        Args:
            row_ptr: [Nq * groups + 1], int32 or int64: where the blocks of an entry begin.
            col: [C], int32 or int64: key blocks, counted from the user's first, in any order in an
                entry. What is there twice counts once.
            q_offsets, k_offsets: [B + 1].
            block: tokens, a power of two from 16 to 128.
            groups: lists of a tile; heads are dealt to them in order.
            window: (left, right), the band that the calls will have: causal is (-1, 0).
            q_tokens, k_tokens: what the offsets end at; None: read, which waits for a GPU.

        Raises:
            TypeError, ValueError: as `transpose.sorted_rows`, and as `resolve_window`.

        >>> x = JaggedTensor(torch.zeros(40, 1, 8), torch.tensor([0, 40]))
        >>> row_ptr, col = torch.tensor([0, 1, 2, 4]), torch.tensor([0, 1, 2, 0])
        >>> lists = KeyLists.from_rows(row_ptr, col, x.offsets, x.offsets, block=16)
        >>> lists.col.tolist(), lists.transposed()[0].tolist()
        ([0, 2, 0, 5], [0, 2, 3, 4])
        """
        for name, given in (
            ("row_ptr", row_ptr), ("col", col), ("q_offsets", q_offsets), ("k_offsets", k_offsets),
        ):  # fmt: skip
            if not isinstance(given, Tensor):
                raise not_a_tensor(name, given)
        block, groups = check_block(block), as_int("groups", groups)
        window = resolve_window(False, window)
        if groups < 1:
            raise ValueError(f"groups must be at least 1, got {groups}")
        if q_offsets.shape != k_offsets.shape:
            q_users, k_users = q_offsets.shape[0] - 1, k_offsets.shape[0] - 1
            raise ValueError(f"q has {q_users} users and k has {k_users}")
        q_tokens = total_of(q_offsets, q_tokens, argument="q_tokens")
        k_tokens = total_of(k_offsets, k_tokens, argument="k_tokens")
        batch = Batch(q_offsets, k_offsets, q_tokens, k_tokens, block, groups)
        rows = sorted_rows(row_ptr, col, batch, window)
        return cls(*rows, None, None, block, groups, None, window, q_offsets, k_offsets)

    def transposed(
        self, q_tokens: int | None = None, k_tokens: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """(row_ptr_t, col_t), made in a few launches where they are not there yet.

        Kept, but for what a trace or the capture of a CUDA graph makes: that is its own.

        Args:
            q_tokens, k_tokens: what the offsets end at; None: read, which waits for a GPU.
        """
        if self.row_ptr_t is not None and self.col_t is not None:
            return self.row_ptr_t, self.col_t
        assert self.q_offsets is not None
        assert self.k_offsets is not None
        q_tokens = total_of(self.q_offsets, q_tokens, argument="q_tokens")
        k_tokens = total_of(self.k_offsets, k_tokens, argument="k_tokens")
        batch = Batch(self.q_offsets, self.k_offsets, q_tokens, k_tokens, self.block, self.groups)
        tables = transposed_lists(self.row_ptr, self.col, batch, self.window)
        if can_be_read(self.row_ptr):
            self.row_ptr_t, self.col_t = tables
        return tables


def expand_lists(
    lists: KeyLists, user: int, queries: tuple[int, int], keys: tuple[int, int]
) -> Tensor:
    """[groups, n, m] bool: the pairs of a user that lists show; by `lists.rule`, and with none all
    of a listed block, which the band of the call still cuts.

    Waits for the device: for references.

    Args:
        queries, keys: where the user's tokens begin and end: offsets[user], offsets[user + 1].
    """
    n, m = queries[1] - queries[0], keys[1] - keys[0]
    block, groups, device = lists.block, lists.groups, lists.col.device
    tiles, blocks = -(-n // block), -(-m // block)
    first = (queries[0] // block + user) * groups
    starts = lists.row_ptr[first : first + tiles * groups + 1].long()
    listed = torch.zeros((tiles * groups, blocks), dtype=torch.bool, device=device)
    if tiles and blocks:
        begin, end = int(starts[0]), int(starts[-1])
        entries = torch.arange(tiles * groups, device=device).repeat_interleave(starts.diff())
        listed[entries, lists.col[begin:end].long() // 2] = True
    listed = listed.view(tiles, groups, blocks).transpose(0, 1)
    seen = listed.repeat_interleave(block, 1)[:, :n].repeat_interleave(block, 2)[:, :, :m]
    if lists.rule is None:
        return seen
    i = torch.arange(m - n, m, device=device)[:, None]
    j = torch.arange(m, device=device)
    return seen & token_visible(i, j, m, *lists.rule.of_user(user))
