"""Who takes a call: what each family of attention's kernels can do, and the choice among them.

`FAMILIES` is the table, the fastest first. It is asked before a launch, where as much is known: by
the public function for a backend (`pick_backend`) and an operator (`pick_operator`), by the
operator for the kernels of its forward, and of its backward when gradients come (`pick`). Why a
family does not take a call is said in words (`refusals`, `batch_refusals`): the choice is made by
them, and `explain_attention` shows them.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping
from functools import lru_cache
from itertools import product
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from jagged_kernels.attention.scores.policy import functions_of, is_own
from jagged_kernels.core.backends import Backend, choose_backend, or_native
from jagged_kernels.schedule.policy.hopper import (
    BACKWARD_PAYS_FROM,
    DKV_LISTED,
    DQ_LISTED,
    FORWARD_LISTED,
    FORWARD_PAYS_FROM,
    FORWARD_TILES,
    HOPPER_TILES,
    NEVER,
    ONE_PASS_OF_GROUPS_PAYS_BELOW,
    ONE_PASS_PAYS_FROM,
    TMA_NUMBERS,
    box,
    is_hopper,
    paying_length,
    tma_reads,
)
from jagged_kernels.schedule.policy.plain import MAX_HEAD_DIM, MOSTLY_SHORT
from jagged_kernels.schedule.row_layout import NO_LIMIT, SHORT_USER
from jagged_kernels.schedule.rows import users_of_rows
from jagged_kernels.schedule.window import MASKS, Mask, mask_of

# The launches that are chosen apart: of a backward, dQ may have another family than dK and dV.
Pass = Literal["forward", "dq", "dkv"]
# An operator of `attention.operators`; backends without kernels are one each.
Operator = Literal["plain", "general", "split", "native", "reference"]
Scores = Literal["softmax", "pointwise"]
Keys = Literal["ranges", "lists"]
# Of a schedule: a program walks a whole row, or rows are cut among programs.
Rows = Literal["whole", "cut"]

_HALF = (torch.float16, torch.bfloat16)
_SINGLE = (*_HALF, torch.float32)
_EVERY = (*_SINGLE, torch.float64)
_ANY_DIM = range(1, sys.maxsize)


class Family(NamedTuple):
    """What one family of kernels can do.

    Fields:
        about: what it is, in words.
        operator: which operator launches it. What pays for some batches alone stands beside a
            family that takes any, in that one's operator.
        passes: the launches that it has.
        dtypes: of q, k and v.
        head_dims: of q and of v.
        boxes: what both are padded to in shared memory, where TMA brings them.
        scores, keys, rows: what scores become, how keys are given, and which rows it walks.
        bias, dropout: whether it has them; it also takes calls without.
        masks: which it takes.
        hopper: it needs such a GPU, and what TMA can read.
        shared: queries and keys must have the same offsets.
        tile_q, tile_k: for a box, the tile of a schedule that it must have.
        listed: for a box, the tiles that it must have where keys are lists: their blocks.
        least_tile: both tiles must have more tokens.
        pays_from: for what scores become, or "lists" where keys are (behind the scores where these
            matter), where needed with the mask behind it, and a head_dim, tokens of a user's
            queries, on average, from which it is faster than those after it; a window counts as no
            more of them than it is wide. `pays_below`: below which; `grouped_pays_below`: below
            which where query heads share key heads.
    """

    name: str
    about: str
    operator: Operator
    passes: tuple[Pass, ...] = ("forward", "dq", "dkv")
    dtypes: tuple[torch.dtype, ...] = _SINGLE
    head_dims: range = range(1, MAX_HEAD_DIM + 1)
    boxes: tuple[int, ...] | None = None
    scores: tuple[Scores, ...] = ("softmax",)
    keys: tuple[Keys, ...] = ("ranges",)
    rows: tuple[Rows, ...] = ("whole",)
    bias: bool = False
    dropout: bool = False
    masks: tuple[Mask, ...] = MASKS
    hopper: bool = False
    shared: bool = False
    tile_q: Mapping[int, int] | None = None
    tile_k: Mapping[int, int] | None = None
    listed: Mapping[int, tuple[int, ...]] | None = None
    least_tile: int = 0
    pays_from: Mapping[str, Mapping[int, int]] | None = None
    pays_below: int | None = None
    grouped_pays_below: int | None = None


SPLIT = Family(
    "split",
    "rows cut among programs, merged by a second launch",
    "split",
    scores=("softmax", "pointwise"),
    keys=("ranges", "lists"),
    rows=("cut",),
    bias=True,
    dropout=True,
)
HOPPER_FORWARD = Family(
    "hopper forward",
    "Gluon, for long users in half precision",
    "plain",
    passes=("forward",),
    dtypes=_HALF,
    boxes=(64, 128, 256),
    scores=("softmax", "pointwise"),
    keys=("ranges", "lists"),
    hopper=True,
    tile_q=FORWARD_TILES,
    listed=FORWARD_LISTED,
    pays_from=FORWARD_PAYS_FROM,
)
HOPPER_DKV = HOPPER_FORWARD._replace(
    name="hopper dkv", passes=("dkv",), boxes=(64, 128), tile_q=HOPPER_TILES, tile_k=HOPPER_TILES,
    listed=DKV_LISTED, pays_from=BACKWARD_PAYS_FROM,
)  # fmt: skip
# Beside `HOPPER_DKV` alone. In boxes of 64 the plain one is faster.
HOPPER_DQ = HOPPER_DKV._replace(name="hopper dq", passes=("dq",), boxes=(128,), listed=DQ_LISTED)
# Before both, which a backward of dQ alone has all the same. Of a window a block of dQ is seen by
# few tiles, which follow each other: they queue.
HOPPER_ONE_PASS = HOPPER_DKV._replace(
    name="hopper one pass", about="Gluon, dQ, dK and dV at a time", passes=("dq", "dkv"),
    scores=("softmax",), keys=("ranges",), masks=("none", "causal"), shared=True, listed=None,
    pays_from=ONE_PASS_PAYS_FROM, grouped_pays_below=ONE_PASS_OF_GROUPS_PAYS_BELOW,
)  # fmt: skip
SHORT = Family(
    "short",
    f"a warp for each user of up to {SHORT_USER} tokens, the plain kernels for longer ones",
    "plain",
    scores=("softmax", "pointwise"),
    bias=True,
    dropout=True,
    shared=True,
    least_tile=SHORT_USER,
    pays_below=MOSTLY_SHORT,
)
PLAIN = Family("plain", "Triton, a program for each tile", "plain")
GENERAL = PLAIN._replace(
    name="general", about="the plain kernels with all that a call can ask for", operator="general",
    scores=("softmax", "pointwise"), keys=("ranges", "lists"), rows=("whole", "cut"),
    bias=True, dropout=True,
)  # fmt: skip
NATIVE = Family(
    "native", "vectorised PyTorch", "native",
    dtypes=_EVERY, head_dims=_ANY_DIM, scores=("softmax", "pointwise"), keys=("ranges", "lists"),
    rows=("whole", "cut"), bias=True, dropout=True,
)  # fmt: skip
REFERENCE = NATIVE._replace(
    name="reference", about="the specification, a loop over users", operator="reference"
)

TRITON = (
    SPLIT, HOPPER_FORWARD, HOPPER_ONE_PASS, HOPPER_DKV, HOPPER_DQ, SHORT, PLAIN, GENERAL
)  # fmt: skip
FAMILIES = (*TRITON, NATIVE, REFERENCE)


class Asked(NamedTuple):
    """What of a call decides who can take a pass of it; whether that pays, its batch decides.

    Fields:
        head_dim, head_dim_v: of q and k, and of v.
        tile_q, tile_k: of the schedule.
        shared: queries and keys are known to have the same offsets.
        bias, dropout, rows, scores, keys, mask: as in `Family`.
        policy: its key, where scores become weights by one.
        grouped: query heads share a key head.
    """

    of_pass: Pass
    device: torch.device
    dtype: torch.dtype
    head_dim: int
    head_dim_v: int
    tile_q: int
    tile_k: int
    shared: bool
    bias: bool = False
    dropout: bool = False
    rows: Rows = "whole"
    scores: Scores = "softmax"
    keys: Keys = "ranges"
    policy: str = ""
    mask: Mask = "none"
    grouped: bool = False


def width_of(left: int, right: int, keys: Keys) -> int:
    """The keys that a window is wide; 0 where it is none, or lists say what is seen of it."""
    is_window = mask_of(left, right) == "window" and keys == "ranges"
    return left + right + 1 if is_window else 0


def pick_backend(backend: Backend, q: Tensor, v: Tensor) -> str:
    """`choose_backend`, which does not know what head_dims the kernels take."""
    chosen, dims = choose_backend(backend, q), (q.shape[2], v.shape[2])
    if chosen == "triton" and max(dims) > MAX_HEAD_DIM:
        limit = f"the triton backend goes to head_dim {MAX_HEAD_DIM}, got {dims[0]} of q and "
        chosen = or_native(backend, f"{limit}{dims[1]} of v; use backend='native' or 'auto'")
    return chosen


# All that can be asked for, looked up: each look at a family takes time, and `torch.compile` looks
# past a cache.
_OPERATORS: dict[tuple[bool, ...], Operator] = {
    (bias, dropout, pointwise, lists, cut): next(
        family.operator
        for family in TRITON
        if (family.pays_from, family.pays_below) == (None, None)  # whatever the batch is
        and family.bias >= bias
        and family.dropout >= dropout
        and ("pointwise" if pointwise else "softmax") in family.scores
        and ("lists" if lists else "ranges") in family.keys
        and ("cut" if cut else "whole") in family.rows
    )
    for bias, dropout, pointwise, lists, cut in product((False, True), repeat=5)
}


def pick_operator(
    *, bias: bool, dropout: bool, pointwise: bool, lists: bool, cut: bool
) -> Operator:
    """The operator of the triton backend for a call.

    Args:
        pointwise, lists: scores become weights of their own; keys are given so.
        cut: the rows of its schedule are.
    """
    return _OPERATORS[bias, dropout, pointwise, lists, cut]


def pick(
    of_pass: Pass,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rows: Tensor,
    tile_q: int,
    tile_k: int,
    offsets: Tensor | None,
    *,
    bias: bool = False,
    dropout: bool = False,
    policy: str = "",
    keys: Keys = "ranges",
    left: int = NO_LIMIT,
    right: int = NO_LIMIT,
) -> Family:
    """Which family takes a pass of a call whose rows are not cut.

    Args:
        q, k, v: [T, H, D], as `rows_of_dims` gives them.
        rows, tile_q, tile_k, offsets: of the `AttentionSchedule`.
        bias, dropout, keys: as in `Family`.
        policy: the key of a policy of scores, "" for softmax.
        left, right: how far keys may be from a query.
    """
    tokens, heads, dim = q.shape
    shared, mask, grouped = offsets is not None, mask_of(left, right), heads != k.shape[1]
    asked = (of_pass, q.device, q.dtype, dim, v.shape[2], tile_q, tile_k, shared)
    # The defaults of `Asked` are looked up faster.
    if bias or dropout or policy or keys != "ranges" or mask != "none" or grouped:
        scores = "pointwise" if policy else "softmax"
        asked = (*asked, bias, dropout, "whole", scores, keys, policy, mask, grouped)
    able = able_families(*asked)
    users = users_of_rows(rows, tokens, tile_q)
    return first_that_pays(
        able, tokens, users, lambda: hopper_reads(q, k, v), width_of(left, right, keys)
    )


@lru_cache
def able_families(*asked: object) -> tuple[tuple[Family, int, float], ...]:
    """The families of the triton backend that can take what is `Asked`, the fastest first, each
    with the tokens of a user from which and below which it pays. The last takes any batch.

    Raises:
        NotImplementedError: there is none.
    """
    call = Asked(*asked)  # pyright: ignore[reportArgumentType]
    able = [family for family in TRITON if not refusals(family, call)]
    if not able:
        raise NotImplementedError(f"the triton backend: {'; '.join(refusals(GENERAL, call))}")
    return tuple((family, *_pays_between(family, call)) for family in able)


def first_that_pays(
    able: tuple[tuple[Family, int, float], ...],
    tokens: int,
    users: int,
    tma: Callable[[], bool],
    width: int = 0,
) -> Family:
    """Of `able_families` the first that `batch_refusals` has no word against.

    Args:
        width: of a window, 0 where there is none.
    """
    seen = min(tokens, width * users) if width else tokens
    for family, least, limit in able:
        # Without users there are no tokens, and nothing to be long or short.
        pays = least * users <= seen and (limit == math.inf or tokens < limit * users)
        if pays and (not family.hopper or tma()):
            return family
    return able[-1][0]


def hopper_reads(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether Hopper's kernels read these: none is empty, and TMA can."""
    return q.shape[0] > 0 and k.shape[0] > 0 and all(map(tma_reads, (q, k, v)))


def _pays_between(family: Family, asked: Asked) -> tuple[int, float]:
    least = 0
    if family.pays_from is not None:
        kind = (asked.scores, asked.keys, asked.mask)
        least = paying_length(family.pays_from, *kind, asked.head_dim) or 0
    limits = (family.pays_below, family.grouped_pays_below if asked.grouped else None)
    return least, min((limit for limit in limits if limit is not None), default=math.inf)


def refusals(family: Family, asked: Asked) -> list[str]:
    """Why a family cannot take a pass of a call whatever its batch is, in words; none if it can."""
    said = []
    if asked.of_pass not in family.passes:
        said.append(f"it has no {asked.of_pass}")
    if asked.bias and not family.bias:
        said.append("it takes no bias")
    if asked.dropout and not family.dropout:
        said.append("it takes no dropout")
    if asked.scores not in family.scores:
        said.append(f"scores are {asked.scores}, it takes {_either(family.scores)}")
    if asked.keys not in family.keys:
        said.append(f"keys are {asked.keys}, it takes {_either(family.keys)}")
    if asked.mask not in family.masks:
        said.append(f"its mask is {asked.mask}, it takes {_either(family.masks)}")
    if asked.rows not in family.rows:
        said.append(f"rows are {asked.rows}, not {_either(family.rows)}")
    if family.hopper and not is_hopper(asked.device):
        said.append("the tensors are not on a Hopper GPU")
    elif family.hopper and asked.scores in family.scores and is_own(asked.policy):
        said += _policy_refusals(asked)
    if asked.dtype not in family.dtypes:
        said.append(f"{_short(asked.dtype)} is not {_either(map(_short, family.dtypes))}")
    said += _dim_refusals(family, asked)
    if family.shared and not asked.shared:
        said.append("queries and keys are not known to have the same offsets")
    said += _tile_refusals(family, asked)
    return said


def _policy_refusals(asked: Asked) -> list[str]:
    from jagged_kernels.attention.scores.gluon_policies import d_score_refusal, weight_refusal

    weight, d_score = functions_of(asked.policy)
    said = [weight_refusal(weight)]
    if asked.of_pass != "forward":
        # Of all of a backward's launches: dQ and the others come together.
        said.append(d_score_refusal(d_score))
    return [reason for reason in said if reason is not None]


def _dim_refusals(family: Family, asked: Asked) -> list[str]:
    said = []
    dims = {"head_dim": asked.head_dim, "v's head_dim": asked.head_dim_v}
    if asked.head_dim_v == asked.head_dim:
        del dims["v's head_dim"]
    largest = max(dims.values())
    if largest not in family.head_dims:
        said.append(f"head_dim {largest} is above {family.head_dims[-1]}")
    if family.boxes is None:
        return said
    for name, dim in dims.items():
        if box(dim) not in family.boxes:
            boxes = _either(map(str, family.boxes))
            said.append(f"{name} {dim} is padded to {box(dim)}, it takes {boxes}")
        elif box(dim) != box(asked.head_dim):
            said.append(f"{name} {dim} is padded to {box(dim)}, q's to {box(asked.head_dim)}")
        if dim % TMA_NUMBERS:
            said.append(f"{name} {dim} is no multiple of {TMA_NUMBERS}")
    return said


def _tile_refusals(family: Family, asked: Asked) -> list[str]:
    if asked.keys == "lists" and family.listed is not None:
        blocks = family.listed.get(box(asked.head_dim))
        if blocks is None:
            return [f"it takes no lists at head_dim {asked.head_dim}"]
        if {asked.tile_q, asked.tile_k} <= set(blocks):
            return []
        return [f"lists are of blocks of {asked.tile_q} keys, it takes {_either(map(str, blocks))}"]
    said = []
    for name, tile, takes in (
        ("queries", asked.tile_q, family.tile_q),
        ("keys", asked.tile_k, family.tile_k),
    ):
        if takes is not None and tile != (wanted := takes.get(box(asked.head_dim), tile)):
            said.append(f"tiles have {tile} {name}, it takes {wanted}")
    least = family.least_tile
    if least and min(asked.tile_q, asked.tile_k) <= least:
        said.append(f"a tile has {min(asked.tile_q, asked.tile_k)} tokens, it needs over {least}")
    return said


def batch_refusals(
    family: Family, asked: Asked, tokens: int, users: int, *, tma: bool, width: int = 0
) -> list[str]:
    """Why a family that can take a call does not take its batch, in words; see
    `first_that_pays`."""
    least, limit = _pays_between(family, asked)
    said = []
    # Rounded down, so that it is on the side of a limit that it is on.
    mean = f"users have {math.floor(10 * tokens / max(users, 1)) / 10:g} queries on average"
    pays_from = f"at head_dim {asked.head_dim} it pays from {least}"
    if tokens < least * users and least == NEVER:
        said.append(f"at head_dim {asked.head_dim} it does not pay for {asked.keys} and this mask")
    elif tokens < least * users:
        said.append(f"{mean}, {pays_from}")
    elif width and width * users < least * users:
        said.append(f"the window is {width} wide, {pays_from}")
    if limit != math.inf and tokens >= limit * users:
        said.append(f"{mean}, it pays below {limit}")
    if family.hopper and not tma:
        said.append("TMA cannot read q, k or v: they are empty, not aligned, or overlap")
    return said


def _either(names: object) -> str:
    *rest, last = names  # pyright: ignore[reportGeneralTypeIssues]
    return f"{', '.join(rest)} or {last}" if rest else last


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
