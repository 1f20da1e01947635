"""Users of a few tokens with an inf or NaN: token by token over what is seen, and nothing else.

What `plain.short` does again where its sums are not finite (see `triton_sums`). A warp that holds
all tokens of a user has no registers for a second walk over tiles; rows need few.
"""

from __future__ import annotations

import triton
import triton.language as tl

from jagged_kernels.attention.blocks import finite, lse2_of, probability
from jagged_kernels.attention.scores.triton_bias import add_bias, keep_block, place_of_user
from jagged_kernels.device.arithmetic import LN2, LOG2_E

_LOG2_E = tl.constexpr(LOG2_E)
_LN2 = tl.constexpr(LN2)


@triton.jit
def attend_by_token(
    q_ptr, k_ptr, v_ptr, o_ptr, lse2_ptr, start, end, head, by, scale_log2, left, right,
    S: tl.constexpr, NEGATE: tl.constexpr, BIAS: tl.constexpr, WEIGHT: tl.constexpr,
):  # fmt: skip
    """Writes o and lse2 (unless it is None) of one head of the tokens [start, end).

    by: (bias, place, meets).
    """
    PAD_DV: tl.constexpr = S.PAD_DV
    bias, place, meets = by
    of_bias = (bias, place, end, head)
    unit = scale_log2
    if BIAS.ANY:
        unit = 1.0
    for token in range(start, end):
        q = _load_token(q_ptr, token, S.Q_STRIDE_T, S.D, S.PAD_D)
        if NEGATE:
            q = -q
        first, last = _seen_from(token, start, end, left, right, S.HAS_LEFT, S.HAS_RIGHT)
        acc = tl.zeros([PAD_DV], tl.float32)
        top = tl.full([], float("-inf"), tl.float32)
        total = tl.full([], 0.0, tl.float32)
        for key in range(first, last):
            score = tl.sum(q * _load_token(k_ptr, key, S.K_STRIDE_T, S.D, S.PAD_D), 0)
            if BIAS.ANY:
                score = _biased(score * scale_log2, of_bias, token, key, BIAS, S.HEADS)
            if WEIGHT is None:
                new_top = tl.maximum(top, score)
                finite_top = finite(new_top)
                weight = tl.exp2((score - finite_top) * unit)
                correction = tl.exp2((top - finite_top) * unit)
                total = total * correction + weight
                v = _load_token(v_ptr, key, S.V_STRIDE_T, S.DV, PAD_DV)
                acc = acc * correction + _kept(weight, of_bias, token, key, BIAS) * v
                top = new_top
            else:
                v = _load_token(v_ptr, key, S.V_STRIDE_T, S.DV, PAD_DV)
                acc += _kept(WEIGHT(score * (unit * _LN2)), of_bias, token, key, BIAS) * v
        if WEIGHT is not None:
            acc = acc * factor_of(meets, start, end)
        else:
            acc = acc * (1.0 / tl.where(total == 0.0, 1.0, total))
        _store_token(o_ptr, acc, token, S.HEADS * S.DV, S.DV, PAD_DV)
        if lse2_ptr is not None:
            _store_number(lse2_ptr, lse2_of(top * unit, total), token, S.HEADS)


@triton.jit
def differentiate_by_token(
    q_ptr, k_ptr, v_ptr, do_ptr, lse2_ptr, d_lse2_ptr, dq_ptr, dk_ptr, dv_ptr,
    user, start, end, head, by, scale, scale_log2, left, right,
    S: tl.constexpr, NEGATE: tl.constexpr, BIAS: tl.constexpr, WEIGHT: tl.constexpr,
    D_SCORE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Writes dQ, and dK and dV unless they are None, of the tokens [start, end), at most TILE, for
    the heads of a group.

    Args:
        head: the first of the group.
        by: (bias, meets).
    """
    bias, meets = by
    KV_HEADS: tl.constexpr = S.HEADS // S.GROUP
    PAD_D: tl.constexpr = S.PAD_D
    PAD_DV: tl.constexpr = S.PAD_DV
    place = tl.arange(0, TILE * S.PAD_GROUP)
    deltas = tl.zeros([TILE * S.PAD_GROUP], tl.float32)
    factor_n = 1.0
    if WEIGHT is not None:
        factor_n = factor_of(meets, start, end)
    for member in range(S.GROUP):
        q_head = head + member
        of_bias = (bias, place_of_user(bias, user, q_head, BIAS), end, q_head)
        for token in range(start, end):
            query = _load_query(q_ptr, do_ptr, lse2_ptr, token, member, S, WEIGHT)
            first, last = _seen_from(token, start, end, left, right, S.HAS_LEFT, S.HAS_RIGHT)
            delta = tl.full([], 0.0, tl.float32)
            if WEIGHT is None:
                for key in range(first, last):
                    p, d_p, k = _meet(
                        query, k_ptr, v_ptr, token, key, of_bias, scale_log2,
                        S, NEGATE, BIAS, WEIGHT,
                    )  # fmt: skip
                    delta += p * d_p
                if d_lse2_ptr is not None:
                    delta -= _load_number(d_lse2_ptr + member, token, S.HEADS) * _LOG2_E
            dq = tl.zeros([PAD_D], tl.float32)
            for key in range(first, last):
                met, d_weight, k = _meet(
                    query, k_ptr, v_ptr, token, key, of_bias, scale_log2,
                    S, NEGATE, BIAS, WEIGHT,
                )  # fmt: skip
                _, d_score = _weigh(met, d_weight, delta, factor_n, WEIGHT, D_SCORE)
                dq += d_score * k
            _store_token(dq_ptr + member * S.D, dq * scale, token, S.HEADS * S.D, S.D, PAD_D)
            deltas = tl.where(place == member * TILE + (token - start), delta, deltas)
    if dk_ptr is not None:
        for key in range(start, end):
            # From the keys' side the band is mirrored.
            first, last = _seen_from(key, start, end, right, left, S.HAS_RIGHT, S.HAS_LEFT)
            dk = tl.zeros([PAD_D], tl.float32)
            dv = tl.zeros([PAD_DV], tl.float32)
            for member in range(S.GROUP):
                q_head = head + member
                of_bias = (bias, place_of_user(bias, user, q_head, BIAS), end, q_head)
                for token in range(first, last):
                    query = _load_query(q_ptr, do_ptr, lse2_ptr, token, member, S, WEIGHT)
                    met, d_weight, _ = _meet(
                        query, k_ptr, v_ptr, token, key, of_bias, scale_log2,
                        S, NEGATE, BIAS, WEIGHT,
                    )  # fmt: skip
                    here = place == member * TILE + (token - start)
                    delta = tl.sum(tl.where(here, deltas, 0.0), 0)
                    q, d_o, _ = query
                    weight, d_score = _weigh(met, d_weight, delta, factor_n, WEIGHT, D_SCORE)
                    dk += d_score * q
                    dv += _kept(weight, of_bias, token, key, BIAS) * d_o
            _store_token(dk_ptr, dk * scale, key, KV_HEADS * S.D, S.D, PAD_D)
            _store_token(dv_ptr, dv, key, KV_HEADS * S.DV, S.DV, PAD_DV)


@triton.jit
def factor_of(meets, start, end):
    """1 / n of a policy's weights, for the user of the tokens [start, end)."""
    return meets.factor if meets.k_offsets is None else 1.0 / (end - start).to(tl.float32)


@triton.jit
def _weigh(met, d_weight, delta, factor, WEIGHT: tl.constexpr, D_SCORE: tl.constexpr):
    """(weight, gradient of the score) of what `_meet` returns."""
    if WEIGHT is None:
        weight = met
        d_score = met * (d_weight - delta)
    else:
        weight = WEIGHT(met) * factor
        d_score = D_SCORE(met, d_weight * factor)
    return weight, d_score


@triton.jit
def _seen_from(
    token, start, end, left, right, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr
):  # fmt: skip
    """From which token to which a token sees those of its user."""
    first, last = start, end
    if HAS_LEFT:
        first = tl.maximum(start, token - left)
    if HAS_RIGHT:
        last = tl.minimum(end, token + right + 1)
    return first, last


@triton.jit
def _load_query(
    q_ptr, do_ptr, lse2_ptr, token, member, S: tl.constexpr, WEIGHT: tl.constexpr
):  # fmt: skip
    """(q, dO, lse2, 0 without a softmax) of a head of the group."""
    q = _load_token(q_ptr + member * S.Q_STRIDE_H, token, S.Q_STRIDE_T, S.D, S.PAD_D)
    d_o = _load_token(do_ptr + member * S.DO_STRIDE_H, token, S.DO_STRIDE_T, S.DV, S.PAD_DV)
    lse2 = 0.0
    if WEIGHT is None:
        lse2 = _load_number(lse2_ptr + member, token, S.HEADS)
    return q, d_o, lse2


@triton.jit
def _meet(
    query, k_ptr, v_ptr, token, key, of_bias, scale_log2, S: tl.constexpr, NEGATE: tl.constexpr,
    BIAS: tl.constexpr, WEIGHT: tl.constexpr,
):  # fmt: skip
    """(probability, or a policy's score; gradient of the weight; k)"""
    q, d_o, lse2 = query
    k = _load_token(k_ptr, key, S.K_STRIDE_T, S.D, S.PAD_D)
    score = tl.sum(q * k, 0) * scale_log2
    if NEGATE:
        score = -score
    if BIAS.ADDS:
        score = _biased(score, of_bias, token, key, BIAS, S.HEADS)
        lse2 = finite(lse2)
    v = _load_token(v_ptr, key, S.V_STRIDE_T, S.DV, S.PAD_DV)
    met = probability(score, lse2, True) if WEIGHT is None else score * _LN2
    return met, _kept(tl.sum(d_o * v, 0), of_bias, token, key, BIAS), k


@triton.jit
def _biased(score, of_bias, token, key, BIAS: tl.constexpr, HEADS: tl.constexpr):
    """A scaled score (base 2) with the biases; of_bias: (bias, place, end, head)."""
    bias, place, end, head = of_bias
    # A sum, because the interpreter's loops count in Python integers.
    zero = tl.full([], 0, tl.int32)
    score, _ = add_bias(
        score, bias, place, token + zero, key + zero, end, end, 0, head, BIAS, HEADS
    )
    return score


@triton.jit
def _kept(weight, of_bias, token, key, BIAS: tl.constexpr):
    """A weight, or the gradient of one, behind dropout."""
    if BIAS.DROPS:
        bias, place, _, _ = of_bias
        zero = tl.full([], 0, tl.int32)
        weight *= keep_block(bias, place, token + zero, key + zero)
    return weight


@triton.jit
def _load_token(ptr, token, stride, D: tl.constexpr, PAD_D: tl.constexpr):
    """[PAD_D] float32, 0 from D on."""
    dim = tl.arange(0, PAD_D)
    return tl.load(_at(ptr, token, stride) + dim, mask=dim < D, other=0.0).to(tl.float32)


@triton.jit
def _store_token(ptr, numbers, token, stride, D: tl.constexpr, PAD_D: tl.constexpr):
    dim = tl.arange(0, PAD_D)
    tl.store(_at(ptr, token, stride) + dim, numbers.to(ptr.dtype.element_ty), mask=dim < D)


@triton.jit
def _load_number(ptr, token, stride):
    return tl.load(_at(ptr, token, stride))


@triton.jit
def _store_number(ptr, number, token, stride):
    tl.store(_at(ptr, token, stride), number)


@triton.jit
def _at(ptr, token, stride):
    # A sum, because the interpreter's loops count in Python integers, which cannot be cast.
    return ptr + (token + tl.full([], 0, tl.int64)) * stride
