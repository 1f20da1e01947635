"""From how long users on Hopper's kernels are faster than the plain ones, by a measurement.

    python tests/support/hopper_pays.py [--scores silu] [--head-dims 64 128] [--lengths 128 256 ...]
    python tests/support/hopper_pays.py --scores softmax --keys strided [--block 64] ...
    python tests/support/hopper_pays.py [--spread even] ...

Both take turns on the same batches, forward, backward and the two together, each over tiles of its
own and the plain ones over Hopper's too, and their results are compared. Users have the given
lengths on average, spread as `--spread` says; a batch has `--tokens` in all. Last stands, for each
head_dim and pass, the first of the lengths from which on Hopper's are faster at all of them, beside
what `schedule/policy/hopper.py` says: that is where it belongs. Needs a Hopper GPU.

Queries see what is before them, all keys with `--full`, or as many before their own as `--window`
says. With `--keys` both walk lists of key blocks: S2-Attention's, semi-local ones, or those that
queries, `--candidates` of each user, retrieve. `--forward` and `--dkv` change how Hopper's kernels
are laid out for them, as in `--forward block=64,stages=4,residents=3`.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from old_and_new import difference
from told_tables import ToldTable
from torch import Tensor

from jagged_kernels import (
    JaggedTensor,
    KeyLists,
    SemiLocalKeys,
    Sigmoid,
    SiLU,
    StridedKeys,
    lengths_to_offsets,
    retrieved_blocks,
)
from jagged_kernels.attention.meeting import MeetTerms, meeting_of
from jagged_kernels.schedule.band import band_of, lists_of
from jagged_kernels.schedule.policy import hopper as policy
from jagged_kernels.schedule.policy.hopper import (
    BACKWARD_PAYS_FROM,
    DKV_LISTED,
    FORWARD_PAYS_FROM,
    FORWARD_TILES,
    HOPPER_TILES,
    is_hopper,
)
from jagged_kernels.schedule.policy.plain import DEFAULT_TILES
from jagged_kernels.schedule.rows import build_rows
from jagged_kernels.schedule.window import resolve_window
from jagged_ranking.measure import timing
from jagged_ranking.measure.length_distributions import lognormal
from jagged_ranking.measure.timing import Effort

SCORES = {"softmax": None, "silu": SiLU(), "sigmoid": Sigmoid()}
# S2-Attention as it is measured by length, ULTRA-HSTU's semi-local attention, retrieval.
KEYS = ("ranges", "strided", "semi-local", "retrieval")
# From half to three halves of the mean; the mean; the mean with most users far below it and up to
# eight times as long.
SPREADS = ("uniform", "even", "lognormal")
MEDIAN = math.exp(-(1.2**2) / 2)  # of `lognormal`, relative to its mean
SIDES = ("plain", "hopper")
RETILED = "plain, Hopper's tiles"
PASSES = ("forward", "backward", "forward+backward")
Call = Callable[[], tuple[Tensor, ...]]


class Batch:
    """q, k, v and dO [T, H, D] of users of `mean` tokens on average.

    Args:
        spread: of `SPREADS`.
        candidates: queries of each user, in place of one a token.
    """

    def __init__(
        self, mean: int, *, tokens: int, heads: int, dim: int, dtype: torch.dtype,
        device: torch.device, spread: str = "uniform", candidates: int | None = None,
    ) -> None:  # fmt: skip
        generator = torch.Generator().manual_seed(mean)
        users = max(1, tokens // mean)
        lengths = torch.randint(mean // 2, mean + mean // 2 + 1, (users,), generator=generator)
        if spread == "even":
            lengths = torch.full_like(lengths, mean)
        elif spread == "lognormal":
            lengths = lognormal(users, 8 * mean, mean * MEDIAN, generator)
        self.offsets = self.q_offsets = lengths_to_offsets(lengths).to(device)
        self.tokens, self.dim = int(lengths.sum()), dim
        self.queries = self.tokens
        if candidates is not None:
            self.queries = users * candidates
            self.q_offsets = lengths_to_offsets(torch.full_like(lengths, candidates)).to(device)
        self.q, self.k, self.v, self.d_o = (
            torch.randn(count, heads, dim, generator=generator).to(device, dtype)
            for count in (self.queries, self.tokens, self.tokens, self.queries)
        )

    def lists(self, keys: str, block: int) -> tuple[KeyLists | None, tuple[int, int]]:
        """(the lists of one of `KEYS`, with their transpose, and the band of their calls)."""
        rules = {
            "strided": StridedKeys(stride=16, local=4, block=block),
            "semi-local": SemiLocalKeys(window=1024, first=256, block=block),
        }
        if keys == "ranges":
            return None, (-1, -1)
        given: Any = rules.get(keys)
        if given is None:
            q, k = JaggedTensor(self.q, self.q_offsets), JaggedTensor(self.k, self.offsets)
            given = retrieved_blocks(q, k, 16, newest=4, block=block)
        counts = (self.queries, self.tokens)
        lists = lists_of(given, self.q_offsets, self.offsets, counts, self.q.shape[1])
        assert lists is not None
        lists.transposed(*counts)
        return lists, band_of(given, False, None)

    def calls(
        self, side: str, scores: Any, *, causal: bool, window: int | None = None,
        keys: str = "ranges", block: int = 64,
    ) -> dict[str, Call]:  # fmt: skip
        """pass -> a call of it by the kernels of one side, of `SIDES` or `RETILED`.

        Args:
            window: keys that a query sees before its own; None: all.
        """
        lists, (left, right) = self.lists(keys, block)
        if lists is None:
            left, right = resolve_window(causal, None if window is None else (window, 0))
        q, k, v = self.q, self.k, self.v
        meeting = meeting_of(MeetTerms.of(lists, scores), self.offsets)
        band: dict[str, Any] = {"left": left, "right": right, "scale": self.dim**-0.5}
        band["meeting"] = meeting
        of_queries: dict[str, Any] = {}
        of_both: dict[str, Any] = {}
        nothing = None
        if side == "hopper":
            from jagged_kernels.attention.hopper.backward import launch_backward
            from jagged_kernels.attention.hopper.forward import launch_forward

            tile = FORWARD_TILES[self.dim] if lists is None else block
            band["listed"] = 0 if lists is None else block
            nothing = torch.empty(0, dtype=torch.float32, device=q.device)
        else:
            from jagged_kernels.attention.plain.backward import launch_backward
            from jagged_kernels.attention.plain.forward import launch_forward

            tile = block
            if lists is None:
                tile = FORWARD_TILES[self.dim] if side == RETILED else DEFAULT_TILES[0]
            of_queries, of_both = {"tile_q": tile}, {"tile_q": tile, "tile_k": tile}
        # Rows with lists have ranges without limits.
        sides = (left, right) if lists is None else (-1, -1)
        rows, rows_t = (
            build_rows(own, other, tokens=tokens, tile=tile, left=before, right=after)
            for own, other, tokens, (before, after) in (
                (self.q_offsets, self.offsets, self.queries, sides),
                (self.offsets, self.q_offsets, self.tokens, sides[::-1]),
            )
        )

        def forward() -> tuple[Tensor, ...]:
            o, lse2 = launch_forward(q, k, v, rows, **band, **of_queries, with_lse=scores is None)
            return (o,) if lse2 is None else (o, lse2)

        def backward(o: Tensor, lse2: Any = nothing) -> tuple[Tensor, ...]:
            return launch_backward(
                self.d_o, None, q, k, v, o, lse2, rows, rows_t, **band, **of_both
            )

        made = forward()
        found: dict[str, Call] = {"forward": lambda: forward()[:1]}
        has_backward = self.dim in HOPPER_TILES or side != "hopper"
        if has_backward and (lists is None or block in DKV_LISTED.get(self.dim, (block,))):
            found["backward"] = lambda: backward(*made)
            found["forward+backward"] = lambda: backward(*forward())
        return found


def rows_of(batch: Batch, scores: Any, effort: Effort, **options: Any) -> Iterator[dict[str, Any]]:
    """A row for each pass: ms of both sides, their ratio, and how far results lie apart.

    Args:
        options: of `Batch.calls`.
    """
    named: list[str] = list(SIDES)
    if options.get("keys", "ranges") == "ranges" and FORWARD_TILES[batch.dim] != DEFAULT_TILES[0]:
        named.append(RETILED)
    sides = {side: batch.calls(side, scores, **options) for side in named}
    for of_pass in sides["hopper"]:
        calls = {side: sides[side][of_pass] for side in named}
        differ = difference(*(calls[side]() for side in SIDES))
        timed = timing.interleaved(calls, device=batch.q.device, effort=effort)
        for one in timed.values():
            if one.failure:
                raise one.failure
        took = {side: statistics.median(timed[side].samples) for side in named}
        yield {
            "pass": of_pass,
            **{f"{side}, ms": ms for side, ms in took.items()},
            "plain / hopper": took["plain"] / took["hopper"],
            "results differ": differ,
        }


def pays_from(table: pd.DataFrame) -> pd.DataFrame:
    """For each head_dim and pass the first length from which on Hopper's kernels are faster at all
    that were measured; None where they are not at the longest."""
    found = []
    for (dim, of_pass), mine in table.groupby(["head_dim", "pass"], sort=False):
        first = None
        for row in mine.sort_values("length", ascending=False).itertuples():
            if float(mine.loc[row.Index, "plain / hopper"]) <= 1.0:  # pyright: ignore[reportArgumentType]
                break
            first = int(str(row.length))
        found.append({"head_dim": dim, "pass": of_pass, "pays from": first})
    return pd.DataFrame(found, dtype=object)


def said(
    scores: str, of_pass: str, dim: int, keys: str = "ranges", *, causal: bool = False,
    window: int | None = None,
) -> int | None:  # fmt: skip
    """What the policy says of one pass alone."""
    table = {"forward": FORWARD_PAYS_FROM, "backward": BACKWARD_PAYS_FROM}.get(of_pass, {})
    of_scores = "softmax" if scores == "softmax" else "pointwise"
    of_keys = "ranges" if keys == "ranges" else "lists"
    of_ranges = "window" if window is not None else "causal" if causal else "none"
    mask = {"semi-local": "window", "ranges": of_ranges}.get(keys, "causal")
    return policy.paying_length(table, of_scores, of_keys, mask, dim)


def lay_out(table: dict[tuple[int, int], Any], dim: int, block: int, changes: str | None) -> None:
    """Changes one entry of the policy, by words as `block=64,stages=4`."""
    if changes and (dim, block) in table:
        given = dict(one.split("=") for one in changes.split(","))
        given = {name: int(number) for name, number in given.items()}
        table[dim, block] = replace(table[dim, block], **given)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--scores", choices=SCORES, default="silu")
    parser.add_argument(
        "--head-dims", type=int, nargs="+", choices=FORWARD_TILES, default=[64, 128]
    )
    lengths = [128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 4096]
    parser.add_argument("--lengths", type=int, nargs="+", default=lengths)
    parser.add_argument("--tokens", type=int, default=2**17, help="in a batch")
    parser.add_argument("--heads", type=int, default=4)
    masks = parser.add_mutually_exclusive_group()
    masks.add_argument("--full", action="store_true", help="every query sees all keys, not causal")
    masks.add_argument("--window", type=int, metavar="N", help="it sees N keys before its own")
    parser.add_argument("--keys", choices=KEYS, default="ranges")
    parser.add_argument("--block", type=int, choices=(64, 128), default=64, help="of the lists")
    parser.add_argument("--candidates", type=int, default=1024, help="of a user, for retrieval")
    parser.add_argument("--spread", choices=SPREADS, default="uniform", help="of the lengths")
    parser.add_argument("--forward", metavar="NAME=N,...", help="of the forward over lists")
    parser.add_argument("--dkv", metavar="NAME=N,...", help="of dK and dV over lists")
    parser.add_argument("--rounds", type=int, default=6, help="turns of each side")
    parser.add_argument("--repeats", type=int, default=10, help="timed calls in a turn")
    parser.add_argument("--out", type=Path, metavar="FILE.csv", help="the table as a file, too")
    options = parser.parse_args(arguments)
    if options.keys != "ranges" and options.window is not None:
        parser.error("--window is of ranges: lists have what their keys say")
    if not (torch.cuda.is_available() and is_hopper(torch.device("cuda", 0))):
        raise SystemExit("hopper_pays: there is no Hopper GPU here")
    device = torch.device("cuda", 0)
    effort = Effort(rounds=options.rounds, inner=options.repeats, seconds=1.0)
    shape: dict[str, Any] = {"tokens": options.tokens, "heads": options.heads, "device": device}
    shape["spread"] = options.spread
    if options.keys == "retrieval":
        shape["candidates"] = options.candidates
    seen = {"causal": not options.full, "window": options.window}
    listed = {"keys": options.keys, "block": options.block}
    mask = "all keys" if options.full else "causal"
    if options.window is not None:
        mask = f"{options.window} keys before"
    if options.keys != "ranges":
        mask = f"{options.keys}, blocks of {options.block}"
    of_heads, of_lengths = f"{options.heads} heads, bf16", f"{options.spread} lengths"
    name = torch.cuda.get_device_name(0)
    print(name, options.scores, mask, of_heads, of_lengths, sep=", ", flush=True)
    table = ToldTable(options.out)
    for dim in options.head_dims:
        lay_out(policy._LISTED_FORWARD, dim, options.block, options.forward)
        lay_out(policy._LISTED_DKV, dim, options.block, options.dkv)
        for mean in options.lengths:
            batch = Batch(mean, dim=dim, dtype=torch.bfloat16, **shape)
            passes = rows_of(batch, SCORES[options.scores], effort, **seen, **listed)
            table.add({"head_dim": dim, "length": mean, **row} for row in passes)
            timing.release(device)
    first = pays_from(table.whole())
    first["policy says"] = [
        said(options.scores, str(of_pass), int(dim), options.keys, **seen)
        for dim, of_pass in zip(first["head_dim"], first["pass"], strict=True)
    ]
    print(first.to_string(index=False))
    return 0


if __name__ == "__main__":
    sys.exit(main())
