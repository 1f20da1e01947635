"""Problems of pooling, softmax, sums and products of elements, normalisation."""

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from jagged_kernels import (
    jagged2_mul,
    jagged2_softmax,
    jagged_add,
    jagged_last_k,
    jagged_layer_norm,
    jagged_max,
    jagged_mean,
    jagged_mul,
    jagged_rms_norm,
    jagged_self_difference,
    jagged_softmax,
    jagged_sum,
    jagged_weighted_sum,
)
from jagged_ranking.measure.interaction.catalogue import LAST, NARROW
from jagged_ranking.measure.interaction.layout import SAME, Layout
from jagged_ranking.measure.interaction.problem import Outputs, Peer, Problem, fbgemm

RMS_EPS = 1e-6


def _segments(b: Layout, reduction: str) -> Peer:
    return Peer(
        lambda x: torch.segment_reduce(x, reduction, offsets=b.offsets, axis=0, unsafe=True)
    )


def _sum(b: Layout) -> Problem:
    token, user = b.tokens * b.columns * b.size, b.users * b.columns * b.size
    return Problem(
        call=lambda backend, x: jagged_sum(b.jagged(x), backend=backend),
        inputs=(b.random(b.tokens, b.columns),),
        bytes=(token + user, token + user),
        peers={
            "padded": Peer(lambda x: x.sum(1), (b.padded(),)),
            "njt": Peer(lambda x: x.sum(1), (b.nested(),)),
            "segment_reduce": _segments(b, "sum"),
        },
    )


def _mean(b: Layout) -> Problem:
    token, user = b.tokens * b.columns * b.size, b.users * b.columns * b.size
    lengths = b.lengths[:, None]
    return Problem(
        call=lambda backend, x: jagged_mean(b.jagged(x), backend=backend),
        inputs=(b.random(b.tokens, b.columns),),
        bytes=(token + user, token + user),
        peers={
            "padded": Peer(lambda x: x.sum(1) / lengths, (b.padded(),)),
            "njt": Peer(lambda x: x.mean(1), (b.nested(),)),
            "segment_reduce": _segments(b, "mean"),
        },
    )


def _max(b: Layout) -> Problem:
    token, user = b.tokens * b.columns * b.size, b.users * b.columns * b.size
    place = b.users * b.columns * 8  # int64, for the gradient
    return Problem(
        call=lambda backend, x: jagged_max(b.jagged(x), backend=backend),
        inputs=(b.distinct(b.columns),),
        bytes=(token + user, token + user + place),
        peers={
            "padded": Peer(lambda x: x.max(1).values, (b.padded(-math.inf),)),
            "njt": Peer(lambda x: x.amax(1), (b.nested(),)),
            "segment_reduce": _segments(b, "max"),
        },
    )


def _last_k(b: Layout) -> Problem:
    row = b.columns * b.size
    kept = int(b.on_host.clamp(max=LAST).sum())
    place = b.lengths[:, None] - LAST + torch.arange(LAST, device=b.device)
    index = place.clamp(min=0)[..., None].expand(-1, -1, b.columns)
    missing = (place < 0)[..., None]
    return Problem(
        call=lambda backend, x: jagged_last_k(b.jagged(x), LAST, backend=backend)[0],
        inputs=(b.random(b.tokens, b.columns),),
        bytes=((kept + b.users * LAST) * row, (b.tokens + kept) * row),
        peers={"padded": Peer(lambda x: x.gather(1, index).masked_fill(missing, 0), (b.padded(),))},
    )


def _weighted_sum(b: Layout) -> Problem:
    d = b.columns
    token, user, weights = b.tokens * d * b.size, b.users * d * b.size, b.tokens * b.size
    return Problem(
        call=lambda backend, x, w: jagged_weighted_sum(b.jagged(x), w, backend=backend),
        inputs=(b.random(b.tokens, d), b.random(b.tokens)),
        bytes=(token + weights + user, 2 * token + 2 * weights + user),
        peers={
            "padded": Peer(lambda x, w: (w[:, None] @ x)[:, 0], (b.padded(), b.padded())),
        },
    )


def _softmax_of(b: Layout, columns: int) -> Problem:
    token = b.tokens * columns * b.size
    return Problem(
        call=lambda backend, x: jagged_softmax(b.jagged(x), backend=backend).values,
        inputs=(b.random(b.tokens, columns),),
        bytes=(2 * token, 3 * token),
        peers={
            "padded": Peer(lambda x: x.softmax(1), (b.padded(-math.inf),), (b.padded(),)),
            "njt": Peer(lambda x: torch.softmax(x, 1), (b.nested(),), (b.nested(),)),
            "fbgemm_sll": fbgemm(
                b, "jagged_softmax", lambda f: Peer(lambda x: f(x, b.offsets, b.longest, False))
            ),
        },
    )


def _softmax(b: Layout) -> Problem:
    return _softmax_of(b, b.columns)


def _narrow_softmax(b: Layout) -> Problem:
    return _softmax_of(b, NARROW)


def _add(b: Layout) -> Problem:
    token, dense = (n * b.columns * b.size for n in (b.tokens, b.users * b.longest))
    return Problem(
        call=lambda backend, x, y: jagged_add(b.jagged(x), y, backend=backend).values,
        inputs=(b.random(b.tokens, b.columns), b.random(b.users, b.longest, b.columns)),
        # The gradient of x is the one of the result.
        bytes=(3 * token, token + dense),
        peers={
            "padded": Peer(torch.add, (b.padded(), SAME), (b.padded(),)),
            "fbgemm_sll": fbgemm(
                b,
                "jagged_dense_elementwise_add",
                lambda f: Peer(lambda x, y: f(x, b.offsets, y, b.longest, False)),
            ),
        },
    )


def _mul(b: Layout) -> Problem:
    token, user = b.tokens * b.columns * b.size, b.users * b.columns * b.size

    def flat(x: Tensor, y: Tensor) -> Tensor:
        return x * y.repeat_interleave(b.lengths, 0, output_size=b.tokens)

    return Problem(
        call=lambda backend, x, y: jagged_mul(b.jagged(x), y, backend=backend).values,
        inputs=(b.random(b.tokens, b.columns), b.random(b.users, b.columns)),
        bytes=(2 * token + user, 3 * token + 2 * user),
        peers={
            "padded": Peer(lambda x, y: x * y[:, None], (b.padded(), SAME), (b.padded(),)),
            "njt": Peer(lambda x, y: x * y[:, None], (b.nested(), SAME), (b.nested(),)),
            "flat": Peer(flat),
        },
    )


def _softmax2(b: Layout) -> Problem:
    scores = b.scores * b.size
    return Problem(
        call=lambda backend, m: jagged2_softmax(b.jagged2(m), backend=backend).values,
        inputs=(b.random(b.scores),),
        bytes=(2 * scores, 3 * scores),
        peers={
            # Finite, so that rows of padding are not NaN.
            "padded": Peer(
                lambda m: m.softmax(-1), (b.squares(-1e9),), (b.squares(),), b.squares_bytes(2)
            ),
            "fbgemm_sll": fbgemm(
                b,
                "jagged2_softmax",
                lambda f: Peer(lambda m: f(m, b.offsets, b.matrix_offsets, b.longest, False)),
            ),
        },
    )


def _mul2(b: Layout) -> Problem:
    scores = b.scores * b.size

    def call(backend: Any, m: Tensor, y: Tensor) -> Tensor:
        return jagged2_mul(b.jagged2(m), b.jagged2(y), backend=backend).values

    return Problem(
        call=call,
        inputs=(b.random(b.scores), b.random(b.scores)),
        bytes=(3 * scores, 5 * scores),
        peers={
            "padded": Peer(
                torch.mul, (b.squares(), b.squares()), (b.squares(),), b.squares_bytes(3)
            ),
            "flat": Peer(torch.mul),
        },
    )


def _self_difference(b: Layout) -> Problem:
    token, scores = b.tokens * b.size, b.scores * b.size
    like = b.scores_like()

    def call(backend: Any, x: Tensor) -> Tensor:
        return jagged_self_difference(b.jagged(x), like=like, backend=backend).values

    return Problem(
        call=call,
        inputs=(b.random(b.tokens),),
        bytes=(token + scores, token + scores),
        peers={
            "padded": Peer(
                lambda x: x[:, :, None] - x[:, None, :],
                (b.padded(),),
                (b.squares(),),
                b.squares_bytes(1),
            )
        },
    )


def _layer_norm(b: Layout) -> Problem:
    d = b.columns
    token = b.tokens * d * b.size

    def call(backend: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return jagged_layer_norm(b.jagged(x), weight, bias, backend=backend).values

    def peer(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return F.layer_norm(x, (d,), weight, bias)

    return Problem(
        call=call,
        inputs=(b.random(b.tokens, d), b.random(d), b.random(d)),
        bytes=(2 * token, 3 * token),
        peers={
            "padded": Peer(peer, (b.padded(), SAME, SAME), (b.padded(),)),
            "njt": Peer(peer, (b.nested(), SAME, SAME), (b.nested(),)),
            "flat": Peer(peer),
        },
    )


def _rms_norm(b: Layout) -> Problem:
    d = b.columns
    token = b.tokens * d * b.size

    def call(backend: Any, x: Tensor, residual: Tensor, weight: Tensor) -> Outputs:
        added = b.jagged(residual)
        y, total = jagged_rms_norm(b.jagged(x), weight, residual=added, backend=backend)
        return y.values, total.values

    def peer(x: Tensor, residual: Tensor, weight: Tensor) -> Outputs:
        total = x + residual
        return F.rms_norm(total, (d,), weight, RMS_EPS), total

    both = (b.padded(), b.padded())
    return Problem(
        call=call,
        inputs=(b.random(b.tokens, d), b.random(b.tokens, d), b.random(d)),
        # Backward: the sum, the gradients of both results, and one gradient that both inputs have.
        bytes=(4 * token, 4 * token),
        peers={"padded": Peer(peer, (*both, SAME), both), "flat": Peer(peer)},
    )


PROBLEMS = {
    "jagged_sum": _sum,
    "jagged_mean": _mean,
    "jagged_max": _max,
    "jagged_last_k": _last_k,
    "jagged_weighted_sum": _weighted_sum,
    "jagged_softmax": _softmax,
    "jagged_softmax_narrow": _narrow_softmax,
    "jagged_add": _add,
    "jagged_mul": _mul,
    "jagged2_softmax": _softmax2,
    "jagged2_mul": _mul2,
    "jagged_self_difference": _self_difference,
    "jagged_layer_norm": _layer_norm,
    "jagged_rms_norm": _rms_norm,
}
