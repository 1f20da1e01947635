"""Who walks which key blocks: the rows of a schedule cut into spans of equal cost.

Where few queries meet long, skewed histories, one program a row leaves most of the machine waiting
for the longest user. A partition cuts the same rows at any key block instead, and a second small
launch merges the partial results of the rows that were cut. "stream" is LeanAttention (arXiv
2405.10480, section IV) with a cost for beginning a row beside that of its key blocks; "split" is
FlashDecoding's fixed split; "rows" is one program a row. All are one table for one kernel.

Heads do not appear in the table: every head has the same rows, so each head walks the same spans,
and programs that run side by side read neighbouring heads of the same tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from jagged_kernels.core.backends import has_small_memory, multiprocessors, triton_runs
from jagged_kernels.core.operators import call, define_op
from jagged_kernels.core.sizes import LaunchConfig, padded_dim
from jagged_kernels.schedule.keys.lists import KeyLists
from jagged_kernels.schedule.policy.hopper import is_hopper
from jagged_kernels.schedule.row_layout import ROW_FIELDS
from jagged_kernels.schedule.span_layout import SPAN_WIDTH

Policy = Literal["stream", "split", "rows"]

# What beginning a row costs, in key blocks: its queries in, its result out, an empty pipeline.
ROW_COST = 1
# Chunks of a row under "split".
SPLIT_CHUNKS = 8
# Keys of a row, on average, up to which rows are short.
SHORT_ROW = 256
# Rows of a query tile with all heads that share keys: more would not leave registers for scores.
MAX_PACK = 128
_USER = ROW_FIELDS.index("user")


@dataclass(frozen=True, eq=False, repr=False)
class Partition:
    """Built by `build_partition` once a batch; shared by layers and heads.

    Attributes:
        spans: [P + 1, 4] int32 (`span_layout.SPAN_FIELDS`). Program p of a head walks from (row,
            block) of entry p up to that of entry p + 1; blocks count from the row's range_start.
            Where a row begins in program p and does not end there, `pieces` programs from p on
            share it; elsewhere `pieces` is 0.
        block: keys in a block; the kernels must take as many at a time.
        cuts: whether a row can be cut at all; if not, nothing needs merging.
    """

    spans: Tensor
    block: int
    cuts: bool

    @property
    def programs(self) -> int:
        """Programs for each head (of those that a kernel walks together, one)."""
        return self.spans.shape[0] - 1

    def __repr__(self) -> str:
        return f"Partition(programs={self.programs}, block={self.block}, cuts={self.cuts})"


def build_partition(
    rows: Tensor,
    *,
    block: int,
    programs: int,
    policy: Policy = "stream",
    row_cost: int = ROW_COST,
) -> Partition:
    """Cuts rows into spans, on their device and without waiting for it.

    Args:
        rows: [R, 8] int32, as `build_rows` makes them: used rows first.
        block: keys in a block, a power of two of at least 16.
        programs: "stream": spans in all (`stream_programs`); those without work stay empty.
            "split": spans for each row. "rows": not used.
        row_cost: "stream": what beginning a row costs, in blocks.

    Raises:
        ValueError: an unknown policy, or `programs` or `row_cost` below 1.
    """
    return _build_partitions(rows, ((block, programs),), policy=policy, row_cost=row_cost)[0]


def _build_partitions(
    rows: Tensor,
    shapes: Sequence[tuple[int, int]],
    *,
    policy: Policy,
    row_cost: int = ROW_COST,
) -> tuple[Partition, ...]:
    """`build_partition` for each (block, programs)."""
    for _, programs in shapes:
        if programs < 1 or row_cost < 1:
            raise ValueError(f"programs and row_cost must be 1 or more, got {programs}, {row_cost}")
    if policy == "stream":
        blocks, counts = (list(numbers) for numbers in zip(*shapes, strict=True))
        tables = call(stream_spans, rows, blocks, counts, row_cost).split_with_sizes(
            [p + 1 for p in counts]
        )
    elif policy == "split":
        tables = [_spans(rows, *_equal_chunks(_blocks(rows, b), p)) for b, p in shapes]
    elif policy == "rows":
        row = torch.arange(rows.shape[0] + 1, device=rows.device)
        tables = [_spans(rows, row, torch.zeros_like(row))] * len(shapes)
    else:
        raise ValueError(f"policy must be stream, split or rows, got {policy!r}")
    return tuple(
        Partition(spans, block, policy != "rows")
        for spans, (block, _) in zip(tables, shapes, strict=True)
    )


def _stream_spans(
    rows: Tensor, blocks: Sequence[int], programs: Sequence[int], row_cost: int
) -> Tensor:
    """[sum of P + 1, 4] int32: the spans of each of one or two (block, programs), end to end."""
    if triton_runs(rows):
        from jagged_kernels.schedule.triton_spans import launch_stream_spans

        return launch_stream_spans(rows, blocks, programs, row_cost)
    shapes = zip(blocks, programs, strict=True)
    return torch.cat([reference_stream_spans(rows, *shape, row_cost) for shape in shapes])


def _empty_spans(
    rows: Tensor, blocks: Sequence[int], programs: Sequence[int], row_cost: int
) -> Tensor:
    return rows.new_empty((sum(programs) + len(programs), SPAN_WIDTH))


stream_spans = define_op(_stream_spans, fake=_empty_spans)


def reference_stream_spans(rows: Tensor, block: int, programs: int, row_cost: int) -> Tensor:
    """What `stream_spans` returns for one (block, programs), in PyTorch.

    A row is a strip of row_cost units and then one a block. A cut inside of its first units
    falls before the row, so that no program begins a row and leaves all blocks to the next.
    """
    span = torch.arange(programs + 1, device=rows.device)
    if rows.shape[0] == 0:
        return _spans(rows, torch.zeros_like(span), torch.zeros_like(span))
    cost = torch.where(_used(rows), _blocks(rows, block) + row_cost, 0).long()
    cost_up_to = cost.cumsum(0)
    total = cost_up_to[-1]
    # Fewer programs than asked for if there is not a row and a block for each: then two cuts
    # never fall on one block, and every program that goes on with a row has some of it.
    working = (total // (row_cost + 1)).clamp(min=1, max=programs)
    cut = torch.minimum(span * total // working, total)
    row = torch.searchsorted(cost_up_to, cut, right=True)
    inside = cut - (cost_up_to - cost)[row.clamp(max=rows.shape[0] - 1)]
    return _spans(rows, row, (inside - row_cost).clamp(min=0))


def _used(rows: Tensor) -> Tensor:
    return rows[:, 0] < rows[:, 1]


def _blocks(rows: Tensor, block: int) -> Tensor:
    return (rows[:, 3] - rows[:, 2] + (block - 1)) // block


def _spans(rows: Tensor, row: Tensor, first: Tensor) -> Tensor:
    """[P + 1, 4] int32 from the (row, block) at which each span starts, and the end."""
    row_count = _used(rows).sum()
    first = torch.where(row < row_count, first, 0)
    row = torch.minimum(row, row_count)
    spans = torch.stack([row, first, _pieces(row, first), torch.zeros_like(row)], dim=1)
    return spans.int()


def _equal_chunks(blocks: Tensor, chunks: int) -> tuple[Tensor, Tensor]:
    """(row, block) at which each chunk of each row starts, and the end."""
    span = torch.arange(blocks.shape[0] * chunks + 1, device=blocks.device)
    if blocks.shape[0] == 0:
        return span, span
    row, chunk = span // chunks, span % chunks
    in_row = blocks.long()[row.clamp(max=blocks.shape[0] - 1)]
    first = chunk * ((in_row + chunks - 1) // chunks)
    # A row with fewer blocks than chunks: the last chunks are empty and stand at the next row.
    empty = (chunk > 0) & (first >= in_row)
    return row + empty, torch.where(empty, 0, first)


def _pieces(row: Tensor, first: Tensor) -> Tensor:
    """For each span, how many spans share the row that it begins and does not end, or 0."""
    next_row, next_first = row[1:], first[1:]
    goes_on = (row[:-1] == next_row) & (first[:-1] > 0)
    begins_what_is_cut = (next_first > 0) & ~goes_on
    ends = torch.searchsorted(row, next_row.contiguous(), right=True)
    span = torch.arange(next_row.shape[0], device=row.device)
    pieces = torch.where(begins_what_is_cut, ends - span, 0)
    return torch.nn.functional.pad(pieces, (0, 1))


def split_partitions(
    rows: Tensor,
    *,
    heads: int,
    kv_heads: int,
    tile_q: int,
    head_dim: int,
    element_size: int,
    k_tokens: int,
    policy: Literal["stream", "split"] = "stream",
    listed: tuple[KeyLists, Tensor] | None = None,
) -> tuple[Partition, Partition]:
    """The partitions for `launch_split_forward` and `launch_split_backward`, by the rules below.

    Args:
        rows: [R, 8] int32, tiles of `tile_q` queries.
        head_dim: the larger of K's and V's. element_size: in bytes.
        k_tokens: tokens of k, a bound of the work that the host knows.
        listed: (lists, q_offsets), where rows have lists of key blocks: spans then count in blocks
            of these. Each row has one list for each group of heads (`tiles.list_cut_refusal`).
    """
    largest = None
    if listed is not None:
        lists, q_offsets = listed
        largest, k_tokens = lists.block, lists.col.shape[0] * lists.block
        rows = listed_rows(rows, lists, q_offsets)
    members = members_in_tile(heads, kv_heads, tile_q)
    pack = pack_size(members, tile_q)
    head_dim = padded_dim(head_dim)
    short = k_tokens < SHORT_ROW * rows.shape[0]
    shapes = []
    for config in (
        split_forward_config(head_dim, element_size, pack, short=short),
        split_backward_config(head_dim, element_size, pack, listed=listed is not None),
    ):
        programs = SPLIT_CHUNKS
        if policy == "stream":
            programs = stream_programs(
                multiprocessors(rows.device),
                groups=heads // members,
                rows=rows.shape[0],
                k_tokens=k_tokens,
                config=config,
            )
        block = config.block if largest is None else min(config.block, largest)
        shapes.append((block, programs))
    forward, backward = _build_partitions(rows, shapes, policy=policy)
    return forward, backward


def listed_rows(rows: Tensor, lists: KeyLists, q_offsets: Tensor) -> Tensor:
    """Rows with a range of as many keys as the longest of their lists shows: what a partition
    cuts."""
    start, used = rows[:, 0], _used(rows)
    user = torch.where(used, rows[:, _USER], 0)
    first = q_offsets[user.long()].int()
    number = first // lists.block + user + (start - first) // lists.block
    blocks = lists.row_ptr.diff().view(-1, lists.groups).amax(1)
    blocks = torch.where(used, blocks[torch.where(used, number, 0).long()], 0)
    rows = rows.clone()
    rows[:, 3] = rows[:, 2] + blocks * lists.block
    return rows


def pack_size(members: int, tile: int) -> int:
    """Rows of a query tile that holds `members` heads, a power of two."""
    return tile * (1 << (members - 1).bit_length())


def members_in_tile(heads: int, kv_heads: int, tile: int) -> int:
    """Heads walked together: all that share keys, or one if their tile would be too large."""
    group = heads // kv_heads
    return group if pack_size(group, tile) <= MAX_PACK else 1


def split_backward_fits(
    heads: int, kv_heads: int, tile_q: int, head_dim: int, element_size: int, device: torch.device
) -> bool:
    """Whether one tile holds all heads that share keys, as `launch_split_backward` needs it, and
    shared memory that tile; head_dim the larger of K's and V's."""
    members = members_in_tile(heads, kv_heads, tile_q)
    numbers = pack_size(members, tile_q) * padded_dim(head_dim)
    # float32 is multiplied in three parts of two bytes ("bf16x6").
    numbers *= 2 if element_size == 4 else 1
    return members == heads // kv_heads and numbers <= _most_numbers(device)


def _most_numbers(device: torch.device) -> int:
    """Of a query tile of two bytes a number: shared memory holds it, dO's, a block, and what is
    made of them."""
    if is_hopper(device) or device.type != "cuda":
        return 2**14
    return 2**12 if has_small_memory(device) else 2**13


@dataclass(frozen=True)
class SplitConfig(LaunchConfig):
    """Attributes beside those of `LaunchConfig`:
    resident: programs that one multiprocessor holds at once; registers and buffers decide.
    """

    resident: int = 1


def split_forward_config(
    head_dim: int, element_size: int, pack: int, *, short: bool = False
) -> SplitConfig:
    """Blocks of 32 KiB of K and V where they fit, one in flight beside the one in use.

    Args:
        head_dim: the larger of K's and V's, padded as the kernels do it.
        element_size: in bytes; shared memory holds the parts in which float32 is multiplied.
        pack: rows of the query tile, with the heads that share keys.
        short: rows of few keys: smaller blocks, for more programs beside each other. The launch
            options are the same.
    """
    if element_size == 4:
        if head_dim > 128:
            return SplitConfig(16, 8, num_stages=1, resident=1)
        if head_dim <= 64 and pack <= 16:
            return SplitConfig(32, 4, num_stages=3, resident=3)
        block = 64 if head_dim <= 64 or pack <= 16 else 32
        return SplitConfig(block, 4, num_stages=2, resident=2)
    if head_dim <= 64 and short:
        return SplitConfig(64, 4, num_stages=2, resident=4)
    if head_dim <= 64:
        return SplitConfig(128, 4, num_stages=2, resident=2)
    return SplitConfig(64 if head_dim <= 128 else 32, 4, num_stages=3, resident=2)


def paged_config(
    config: SplitConfig, element_size: int, pack: int, small_memory: bool
) -> SplitConfig:
    """`split_forward_config`'s for keys that lie in pages: where a block's keys lie must be known
    before they are asked for, so that with two stages nothing would be in flight. A third one where
    shared memory has room (`backends.has_small_memory`)."""
    if config.num_stages != 2 or small_memory or (element_size == 4 and pack > 32):
        return config
    return replace(config, num_stages=3)


def paged_fits(
    heads: int, kv_heads: int, tile_q: int, head_dim: int, element_size: int, device: torch.device
) -> bool:
    """Whether shared memory holds a query tile of `launch_split_forward` over pages, and blocks;
    head_dim the larger of K's and V's."""
    numbers = pack_size(members_in_tile(heads, kv_heads, tile_q), tile_q) * padded_dim(head_dim)
    if has_small_memory(device):
        return numbers <= 2**13
    large = is_hopper(device) or device.type != "cuda" or element_size == 2
    return large or numbers <= 2**14


def split_backward_config(
    head_dim: int, element_size: int, pack: int, *, listed: bool = False
) -> SplitConfig:
    """As `split_forward_config`; dK and dV of a block stand in registers beside its scores. Where
    keys are listed, the compiler keeps more of a block in shared memory."""
    if element_size == 4:
        if head_dim > 128:
            return SplitConfig(16, 8, num_stages=1, resident=1)
        block = 64
        if head_dim > 64 and (pack <= 32 or listed):
            block = 32 if pack <= 32 else 16
        resident = 2 if pack * head_dim <= (4096 if head_dim <= 64 else 2048) else 1
        return SplitConfig(block, 4, num_stages=1, resident=resident)
    if head_dim <= 64:
        num_warps = 4 if pack <= 16 else 8
        return SplitConfig(64, num_warps, num_stages=3, resident=2 if pack <= 16 else 1)
    return SplitConfig(64 if head_dim <= 128 else 32, 8, num_stages=2, resident=1)


def stream_programs(
    available: int, *, groups: int, rows: int, k_tokens: int, config: SplitConfig
) -> int:
    """Spans for each group of heads, so that all programs run at once and none waits for a place.

    Args:
        available: multiprocessors.
        groups: heads, or groups of heads that share keys and are walked together.
        rows, k_tokens: rows of the schedule and tokens of k: a bound of the work.
    """
    most = rows * max(-(-k_tokens // config.block), 1)
    return max(min(available * config.resident // groups, most), 1)
