"""What of an attention call its kernels are compiled for, and what follows from that for a launch.

Layouts, dtype and mask repeat from batch to batch: a launcher makes its plan for a `Call` once and
looks it up from then on.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from jagged_kernels.attention.meeting import MeetShape
from jagged_kernels.core.sizes import padded_dim
from jagged_kernels.device.arithmetic import LOG2_E, product_precision
from jagged_kernels.schedule.policy.plain import MAX_HEAD_DIM
from jagged_kernels.schedule.row_layout import NO_LIMIT

# Plans that are kept of each kernel: one for each layout and mask in use.
PLANS = 256
_NO_LISTS = MeetShape()


class AttentionShape(NamedTuple):
    """What an attention kernel is compiled for beside its bias; nothing that a batch changes.

    Fields:
        HEADS, GROUP: of queries, and how many of them share keys.
        D, DV, PAD_D, PAD_DV: of q and k, and of v; padded to a power of two.
        TILE, BLOCK: tokens that a program holds, and of a block that they meet.
        PARTS: programs that share a row, each with TILE tokens of its tile.
        SKIPS: users of up to `SHORT_USER` tokens are left to `plain.short`.
        *_STRIDE_T, *_STRIDE_H: of tokens and heads.
        GROUPS, FIRST, RULED: of `MeetShape`.
    """

    HEADS: int
    GROUP: int
    D: int
    DV: int
    PAD_D: int
    PAD_DV: int
    TILE: int
    PARTS: int
    BLOCK: int
    HAS_LEFT: bool
    HAS_RIGHT: bool
    PRECISION: str
    Q_STRIDE_T: int
    Q_STRIDE_H: int
    K_STRIDE_T: int
    K_STRIDE_H: int
    V_STRIDE_T: int
    V_STRIDE_H: int
    DO_STRIDE_T: int = 0
    DO_STRIDE_H: int = 0
    SKIPS: bool = False
    GROUPS: int = 0
    FIRST: int = 0
    RULED: bool = False

    @property
    def MASKED(self) -> bool:
        return self.HAS_LEFT or self.HAS_RIGHT or self.GROUPS > 0

    @property
    def NARROWS_LEFT(self) -> bool:
        """Whether a part of a tile sees a part of the tile's range."""
        return self.HAS_LEFT and self.GROUPS == 0

    @property
    def NARROWS_RIGHT(self) -> bool:
        return self.HAS_RIGHT and self.GROUPS == 0

    @property
    def PAD_GROUP(self) -> int:
        return 1 << (self.GROUP - 1).bit_length()


class LaunchPlan(NamedTuple):
    """What of a launch follows from layouts and options alone, kept for the next one.

    Fields:
        programs: for each row.
        constants, options: as `launch` takes them.
    """

    programs: int
    scale_log2: float
    constants: dict[str, Any]
    options: dict[str, int]


# Of [T, H, D] what kernels are compiled for: heads, dim, and strides of tokens and heads.
Layout = tuple[int, int, int, int]


def layout_of(x: Tensor) -> Layout:
    """Where there is one head or token, its stride says nothing, and must not compile another
    kernel."""
    tokens, heads, dim = x.shape
    stride_t, stride_h, _ = x.stride()
    return heads, dim, stride_t if tokens > 1 else heads * dim, stride_h if heads > 1 else dim


class Call(NamedTuple):
    """What of a call decides its launches: nothing that a batch changes.

    Fields:
        precision: of products, as `product_precision` says it.
        limits: has the mask a left and a right one.
    """

    q: Layout
    k: Layout
    v: Layout
    d_o: Layout | None
    element_size: int
    precision: str
    limits: tuple[bool, bool]
    scale: float

    @classmethod
    def of(
        cls, q: Tensor, k: Tensor, v: Tensor, d_o: Tensor | None = None,
        *, left: int, right: int, scale: float,
    ) -> Call:  # fmt: skip
        """q, k, v and d_o as `rows_of_dims` gives them."""
        return cls(
            layout_of(q), layout_of(k), layout_of(v), None if d_o is None else layout_of(d_o),
            q.element_size(), product_precision(q), (left != NO_LIMIT, right != NO_LIMIT), scale,
        )  # fmt: skip

    @property
    def mirrored(self) -> Call:
        """From the keys' side, where the band's sides are exchanged."""
        return self._replace(limits=self.limits[::-1])

    @property
    def pad_dim(self) -> int:
        """The larger head_dim of k and v, padded to a power of two."""
        return padded_dim(max(self.k[1], self.v[1]))

    def shape(
        self,
        *,
        tile: int,
        block: int,
        parts: int = 1,
        skips: bool = False,
        meets: MeetShape = _NO_LISTS,
    ) -> AttentionShape:
        """`tile`: tokens of a row, which `parts` programs share."""
        heads, dim, *q_strides = self.q
        kv_heads, _, *k_strides = self.k
        _, dim_v, *v_strides = self.v
        if max(dim, dim_v) > MAX_HEAD_DIM:
            raise NotImplementedError(
                f"the triton backend goes to head_dim {MAX_HEAD_DIM}, got {max(dim, dim_v)}"
            )
        pad_d, pad_dv = padded_dim(dim), padded_dim(dim_v)
        if self.d_o is None and self.precision == "bf16x6":
            # A forward. Parts of a narrower v stand where k's stood in shared memory, swizzled
            # differently. ptxas (of Triton 3.6, for an H100) then made the descriptors of their
            # later tokens from the start of shared memory, not of the part: results were wrong,
            # or addresses.
            pad_dv = max(pad_d, pad_dv)
        return AttentionShape(
            heads, heads // kv_heads, dim, dim_v, pad_d, pad_dv,
            tile // parts, parts, block, *self.limits, self.precision,
            *q_strides, *k_strides, *v_strides, *(() if self.d_o is None else self.d_o[2:]),
            SKIPS=skips, GROUPS=meets.groups, FIRST=meets.first, RULED=meets.ruled,
        )  # fmt: skip

    def plan(
        self, programs: int, shape: AttentionShape, options: dict[str, int], **constants: Any
    ) -> LaunchPlan:
        """`programs`: for each row; `constants`: beside the shape and NEGATE, in their order."""
        scale_log2, negate = scale_argument(self.scale)
        constants = {"S": shape, "NEGATE": negate, **constants}
        return LaunchPlan(programs, scale_log2, constants, options)


def empty_lse(q: Tensor) -> Tensor:
    """[T, H] float32."""
    return torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)


def scale_argument(scale: float) -> tuple[float, bool]:
    """(scale in base 2, negate q): the kernels work in base 2 and with a positive scale.

    Not quite 0, so that a masked score stays -inf when it is scaled.
    """
    return max(abs(scale) * LOG2_E, 1e-37), scale < 0
