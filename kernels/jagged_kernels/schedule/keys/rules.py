"""The rules that say which keys a query sees: what `attention_schedule` takes for `keys`.

Each has its specification, `visible`; `build.build_lists` makes lists of them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from jagged_kernels.core.sizes import as_int
from jagged_kernels.schedule.keys.blocks import check_block
from jagged_kernels.schedule.keys.token_rule import TokenRule
from jagged_kernels.schedule.row_layout import NO_LIMIT
from jagged_kernels.schedule.window import WIDEST_SIDE, limit_of

# No history is so long. Kernels add blocks to blocks in int32.
_MOST_BLOCKS = 2**27
_WIDEST_STRIDE = 2**20


@dataclass(frozen=True)
class StridedKeys:
    """S2-Attention (arXiv 2407.17678, section 3): each head sees the newest blocks and, of the
    older ones, every `stride`-th, another one than the next head.

    A tile of queries, q-th block of its user, sees block k <= q if q - k < local, or if
    (k + head * step + offset) % stride == 0; inside of the blocks it is causal. For self-attention.
    Heads see every block among them if step is 1 and there are `stride` of them or more.

    Attributes:
        stride: blocks, at least 1.
        local: blocks, at least 1: the query's own and those before it.
        step: blocks from a head's to the next head's; None: max(1, stride // heads).
        offset: blocks that all heads are moved by.
        block: tokens, a power of two from 16 to 128.

    >>> keys = StridedKeys(stride=2, local=1, block=16)
    >>> x = JaggedTensor(torch.zeros(64, 2, 8), torch.tensor([0, 64]))
    >>> seen = keys.visible(64, heads=2)  # by the last query of each head, in blocks
    >>> seen[:, -1].view(2, 4, 16).any(2).int().tolist()
    [[1, 0, 1, 1], [0, 1, 0, 1]]
    >>> jagged_attention(x, x, x, keys=keys)
    JaggedTensor(users=1, values=[64, 2, 8], dtype=torch.float32, device=cpu)
    """

    stride: int
    local: int
    step: int | None = None
    offset: int = 0
    block: int = 64

    def __post_init__(self) -> None:
        _set_block(self)
        for name in ("stride", "local"):
            _set_least(self, name, 1)
        if self.step is not None:
            _set_least(self, "step", 0)
        object.__setattr__(self, "offset", as_int("offset", self.offset))
        if self.stride > _WIDEST_STRIDE:
            raise ValueError(f"stride must be at most {_WIDEST_STRIDE} blocks, got {self.stride}")

    def numbers(self, heads: int) -> tuple[int, int, int, int]:
        """(stride, local, step, offset) as kernels take them."""
        step = self.step_of(heads) % self.stride
        return self.stride, min(self.local, _MOST_BLOCKS), step, self.offset % self.stride

    def step_of(self, heads: int) -> int:
        return max(1, self.stride // heads) if self.step is None else self.step

    def visible(
        self, queries: int, heads: int, *, user: int = 0, keys: int | None = None
    ) -> Tensor:
        """[heads, n, n] bool: what a user of n = `queries` tokens sees."""
        i, j = _places(queries, keys)
        q, k = i // self.block, j // self.block
        head = torch.arange(heads)[:, None, None]
        strided = (k + head * self.step_of(heads) + self.offset) % self.stride == 0
        return (j <= i) & ((q - k < self.local) | strided)


@dataclass(frozen=True)
class SemiLocalKeys:
    """ULTRA-HSTU's semi-local attention: a query sees the newest keys, and the first ones.

    Query i sees key j if i - window < j <= i, or j < first and j <= i.

    Attributes:
        window: tokens, at least 1, of which one is the query's own.
        first: tokens of the user's beginning, 0 for none.
        block: tokens, a power of two from 16 to 128.

    >>> SemiLocalKeys(window=2, first=1).visible(4, heads=1)[0].int().tolist()
    [[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 0, 1, 1]]
    """

    window: int
    first: int
    block: int = 64

    def __post_init__(self) -> None:
        _set_block(self)
        _set_least(self, "window", 1)
        _set_least(self, "first", 0)

    def visible(
        self, queries: int, heads: int, *, user: int = 0, keys: int | None = None
    ) -> Tensor:
        """[1, n, m] bool: what a user of n queries and m keys sees, the last query at the last key;
        m is n if `keys` is None."""
        i, j = _places(queries, keys)
        return ((j <= i) & ((i - self.window < j) | (j < self.first)))[None]

    def token_rule(self, users: int, device: torch.device) -> TokenRule:
        return TokenRule(limit_of(self.window - 1), min(self.first, WIDEST_SIDE), None, None)


@dataclass(frozen=True, eq=False)
class RequestKeys:
    """HSTU's mask of a request (arXiv 2402.17152): contexts, the history, and targets to rank.

    A target is seen by none but itself, and stands at the place right behind the history, as all
    of them do. A context sees contexts and history, and all of them stand at one place, too. A
    token sees itself and what stands before it, at most `window` places.

    Attributes:
        targets: the user's last tokens, an int or an integer tensor [B]; None for none.
        contexts: the user's first tokens, in the same way.
        window: places (HSTU's max_attn_len), at least 1; None for no limit.
        block: tokens, a power of two from 16 to 128.

    >>> RequestKeys(targets=2, contexts=1).visible(4, heads=1)[0].int().tolist()
    [[1, 1, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 0, 1]]
    """

    targets: int | Tensor | None = None
    contexts: int | Tensor | None = None
    window: int | None = None
    block: int = 64

    def __post_init__(self) -> None:
        _set_block(self)
        if self.window is not None:
            _set_least(self, "window", 1)
        for name, count in (("targets", self.targets), ("contexts", self.contexts)):
            if isinstance(count, Tensor):
                _check_counts(name, count)
            elif count is not None:
                _set_least(self, name, 0, otherwise=" or a tensor")

    def __repr__(self) -> str:
        targets, contexts = (
            f"tensor[{len(x)}]" if isinstance(x, Tensor) else x
            for x in (self.targets, self.contexts)
        )
        return (
            f"RequestKeys(targets={targets}, contexts={contexts}, window={self.window}, "
            f"block={self.block})"
        )

    def visible(
        self, queries: int, heads: int, *, user: int = 0, keys: int | None = None
    ) -> Tensor:
        """[1, n, n] bool: what user number `user` of n = `queries` tokens sees."""
        i, j = _places(queries, keys)
        targets, contexts = (_of_user(x, user) for x in (self.targets, self.contexts))
        # Of a user too short for them, the targets come first.
        history = max(queries - targets, 0)
        contexts = min(contexts, history)
        # Where tokens stand.
        at_i, at_j = (x.clamp(max(contexts - 1, 0), history) for x in (i, j))
        seen = at_j < at_i
        if self.window is not None:
            seen &= at_i - at_j <= self.window
        return (seen | (i == j) | ((i < contexts) & (j < history)))[None]

    def token_rule(self, users: int, device: torch.device) -> TokenRule:
        left = NO_LIMIT if self.window is None else limit_of(self.window)
        targets = _of_users(self.targets, users, device)
        return TokenRule(left, 0, targets, _of_users(self.contexts, users, device))


KeyRule = StridedKeys | SemiLocalKeys | RequestKeys


def _set_block(rule: KeyRule) -> None:
    object.__setattr__(rule, "block", check_block(rule.block))


def _set_least(rule: KeyRule, name: str, least: int, *, otherwise: str = "") -> None:
    """A field as an int: what NumPy compares and adds up is no bool and no int of Python."""
    number = as_int(name, getattr(rule, name), otherwise=otherwise)
    if number < least:
        raise ValueError(f"{name} must be at least {least}, got {number}")
    object.__setattr__(rule, name, number)


def _check_counts(name: str, counts: Tensor) -> None:
    if counts.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{name} must be of int32 or int64, got {counts.dtype}")
    if counts.dim() != 1:
        raise ValueError(f"{name} must be [B], one a user, got {tuple(counts.shape)}")


def _places(queries: int, keys: int | None) -> tuple[Tensor, Tensor]:
    """[n, 1] where queries stand among the keys, [m] keys."""
    keys = queries if keys is None else keys
    return torch.arange(keys - queries, keys)[:, None], torch.arange(keys)


def _of_user(count: int | Tensor | None, user: int) -> int:
    if isinstance(count, Tensor):
        return int(count[user])
    return 0 if count is None else count


def _of_users(count: int | Tensor | None, users: int, device: torch.device) -> Tensor | None:
    """[B] int32, None for none."""
    if isinstance(count, Tensor):
        # Kernels read them in place: a column of a table, or one count for all, is copied.
        return count.to(torch.int32).contiguous()
    return (
        None
        if not count
        else torch.full((users,), min(count, WIDEST_SIDE), dtype=torch.int32, device=device)
    )
