"""Problems of the products: tokens times matrices, tokens times tokens, the unit of DIN."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from jagged_kernels import (
    jagged2_matmul,
    jagged_dense_bmm,
    jagged_jagged_bmm,
    jagged_linear,
    jagged_outer,
    target_interaction,
)
from jagged_ranking.measure.interaction.catalogue import GROUPS
from jagged_ranking.measure.interaction.layout import SAME, Layout
from jagged_ranking.measure.interaction.problem import Peer, Problem, fbgemm


def _allow_tf32() -> bool:
    return torch.backends.cuda.matmul.fp32_precision == "tf32"


def _dense_bmm(b: Layout) -> Problem:
    d, users = b.columns, b.users
    token, small = b.tokens * d * b.size, users * d * d * b.size
    padded = (b.padded(), SAME)
    return Problem(
        call=lambda backend, x, w: jagged_dense_bmm(b.jagged(x), w, backend=backend).values,
        inputs=(b.random(b.tokens, d), b.random(users, d, d)),
        bytes=(2 * token + small, 3 * token + 2 * small),
        flops=_product(b),
        peers={
            "padded": Peer(torch.bmm, padded, (b.padded(),)),
            "njt": Peer(torch.matmul, (b.nested(), SAME), (b.nested(),)),
            "fbgemm_sll": fbgemm(
                b,
                "jagged_dense_bmm",
                lambda f: Peer(lambda x, w: f(x, w, b.offsets, b.longest, _allow_tf32(), False)),
            ),
        },
    )


def _jagged_bmm(b: Layout) -> Problem:
    d = b.columns
    token, small = b.tokens * d * b.size, b.users * d * d * b.size
    return Problem(
        call=lambda backend, x, y: jagged_jagged_bmm(b.jagged(x), b.jagged(y), backend=backend),
        inputs=(b.random(b.tokens, d), b.random(b.tokens, d)),
        bytes=(2 * token + small, 4 * token + small),
        flops=_product(b),
        peers={
            "padded": Peer(lambda x, y: x.mT @ y, (b.padded(), b.padded())),
            "fbgemm_sll": fbgemm(
                b,
                "jagged_jagged_bmm",
                lambda f: Peer(lambda x, y: f(x, y, b.offsets, b.longest, _allow_tf32(), False)),
            ),
        },
    )


def _linear(b: Layout) -> Problem:
    d, users = b.columns, b.users
    token, small = b.tokens * d * b.size, users * d * (d + 1) * b.size

    def call(backend: Any, x: Tensor, w: Tensor, bias: Tensor) -> Tensor:
        options: dict[str, Any] = {"activation": "gelu", "backend": backend}
        return jagged_linear(b.jagged(x), w, bias=bias, **options).values

    return Problem(
        call=call,
        inputs=(b.random(b.tokens, d), b.random(users, d, d), b.random(users, d)),
        bytes=(2 * token + small, 3 * token + 2 * small),
        flops=_product(b, again=True),
        peers={
            "padded": Peer(
                lambda x, w, bias: F.gelu(torch.baddbmm(bias[:, None], x, w)),
                (b.padded(), SAME, SAME),
                (b.padded(),),
            )
        },
    )


def _grouped_linear(b: Layout) -> Problem:
    d = b.columns
    token, small = b.tokens * d * b.size, GROUPS * d * (d + 1) * b.size
    groups = b.integers(GROUPS, b.users)

    def call(backend: Any, x: Tensor, w: Tensor, bias: Tensor) -> Tensor:
        options: dict[str, Any] = {"groups": groups, "activation": "silu", "backend": backend}
        return jagged_linear(b.jagged(x), w, bias=bias, **options).values

    return Problem(
        call=call,
        inputs=(b.random(b.tokens, d), b.random(GROUPS, d, d), b.random(GROUPS, d)),
        bytes=(2 * token + small, 3 * token + 2 * small),
        flops=_product(b, again=True),
        peers={
            "padded": Peer(
                lambda x, w, bias: F.silu(torch.baddbmm(bias[groups][:, None], x, w[groups])),
                (b.padded(), SAME, SAME),
                (b.padded(),),
            )
        },
    )


def _target(b: Layout) -> Problem:
    d = b.columns
    token, small = b.tokens * d * b.size, (b.users + 4 * d + 1) * d * b.size
    # About as large as what they are added to.
    weight = b.random(d, 4 * d) / 8

    def call(backend: Any, k: Tensor, q: Tensor, w: Tensor, bias: Tensor) -> Tensor:
        options: dict[str, Any] = {"activation": "gelu", "backend": backend}
        return target_interaction(b.jagged(k), q, w, bias=bias, **options).values

    def concatenated(k: Tensor, q: Tensor, w: Tensor, bias: Tensor) -> Tensor:
        return F.gelu(F.linear(torch.cat([k, q, k - q, k * q], -1), w, bias))

    def flat(k: Tensor, q: Tensor, w: Tensor, bias: Tensor) -> Tensor:
        return concatenated(k, q.repeat_interleave(b.lengths, 0, output_size=b.tokens), w, bias)

    return Problem(
        call=call,
        inputs=(b.random(b.tokens, d), b.random(b.users, d), weight, b.random(d)),
        bytes=(2 * token + small, 3 * token + 2 * small),
        # With a matrix for each user, which costs its making and, backward, its gradient.
        flops=_product(b, again=True),
        peers={
            "padded": Peer(
                lambda k, q, w, bias: concatenated(k, q[:, None].expand_as(k), w, bias),
                (b.padded(), SAME, SAME, SAME),
                (b.padded(),),
            ),
            "flat": Peer(flat),
        },
    )


def _outer(b: Layout) -> Problem:
    d = b.columns
    token, scores = b.tokens * d * b.size, b.scores * b.size
    like = b.scores_like()

    def call(backend: Any, x: Tensor, y: Tensor) -> Tensor:
        return jagged_outer(b.jagged(x), b.jagged(y), like=like, backend=backend).values

    def theirs(f: Any) -> Peer:
        bounds = (b.lengths, b.offsets, b.lengths, b.offsets, b.lengths**2, b.matrix_offsets)
        return Peer(lambda x, y: f(x, y, *bounds, b.longest, _allow_tf32()))

    return Problem(
        call=call,
        inputs=(b.random(b.tokens, d), b.random(b.tokens, d)),
        bytes=(2 * token + scores, 4 * token + scores),
        flops=(2.0 * b.scores * d, 4.0 * b.scores * d),
        peers={
            "padded": Peer(
                lambda x, y: x @ y.mT, (b.padded(), b.padded()), (b.squares(),), b.squares_bytes(2)
            ),
            "fbgemm_sll": fbgemm(b, "jagged_jagged_bmm_jagged_out", theirs),
        },
    )


def _matmul2(b: Layout) -> Problem:
    d = b.columns
    token, scores = b.tokens * d * b.size, b.scores * b.size

    def call(backend: Any, m: Tensor, x: Tensor) -> Tensor:
        return jagged2_matmul(b.jagged2(m), b.jagged(x), backend=backend).values

    def theirs(f: Any) -> Peer:
        bounds = (b.lengths**2, b.matrix_offsets, b.lengths, b.offsets, b.lengths, b.offsets)
        return Peer(lambda m, x: f(m, x, *bounds, b.longest, _allow_tf32()))

    return Problem(
        call=call,
        inputs=(b.random(b.scores) / 8, b.random(b.tokens, d)),
        bytes=(2 * token + scores, 3 * token + 2 * scores),
        flops=(2.0 * b.scores * d, 4.0 * b.scores * d),
        peers={
            "padded": Peer(torch.bmm, (b.squares(), b.padded()), (b.padded(),), b.squares_bytes(2)),
            "fbgemm_sll": fbgemm(b, "array_jagged_bmm_jagged_out", theirs),
        },
    )


def _product(b: Layout, *, again: bool = False) -> tuple[float, float]:
    """FLOP of tokens [T, D] times [D, D], forward and backward; `again`: the backward needs the
    product once more, since keeping it would cost memory."""
    once = 2.0 * b.tokens * b.columns**2
    return once, (3 if again else 2) * once


PROBLEMS = {
    "jagged_dense_bmm": _dense_bmm,
    "jagged_jagged_bmm": _jagged_bmm,
    "jagged_linear": _linear,
    "jagged_linear_groups": _grouped_linear,
    "target_interaction": _target,
    "jagged_outer": _outer,
    "jagged2_matmul": _matmul2,
}
