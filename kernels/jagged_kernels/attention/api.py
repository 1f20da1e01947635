"""`jagged_attention`: the public function, its checks, and the choice of a backend."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal, TypedDict, Unpack, overload

import torch
from torch import Tensor

from jagged_kernels.attention.choice import pick_backend, pick_operator
from jagged_kernels.attention.meeting import MeetTerms
from jagged_kernels.attention.operators import general as ops_general
from jagged_kernels.attention.operators import native as ops_native
from jagged_kernels.attention.operators import plain as ops
from jagged_kernels.attention.operators import split as ops_split
from jagged_kernels.attention.operators import split_general as ops_split_general
from jagged_kernels.attention.reference import attention_reference
from jagged_kernels.attention.scores.bias import Bias, bias_terms
from jagged_kernels.attention.scores.bias_terms import BiasTerms
from jagged_kernels.attention.scores.policy import Scores, check_scores
from jagged_kernels.core.autocast import as_autocast
from jagged_kernels.core.backends import Backend
from jagged_kernels.core.contents import checking, known_to_differ
from jagged_kernels.core.layouts import rows_of_dims
from jagged_kernels.core.operators import call, wants_gradient
from jagged_kernels.schedule.band import band_of, check_groups, lists_of
from jagged_kernels.schedule.check import check_schedule
from jagged_kernels.schedule.dense import DenseShape
from jagged_kernels.schedule.kept import schedule_of_call
from jagged_kernels.schedule.keys.lists import KeyLists
from jagged_kernels.schedule.keys.rules import KeyRule
from jagged_kernels.schedule.offsets import check_contents
from jagged_kernels.schedule.schedule import (
    AttentionSchedule,
    check_users,
    dense_queries,
)
from jagged_kernels.schedule.window import NO_BAND
from jagged_kernels.tensors.checks import as_scale, check_dropout
from jagged_kernels.tensors.jagged import JaggedTensor
from jagged_kernels.tensors.nested import takes_nested

_RANGES = MeetTerms()
_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class _Options(TypedDict, total=False):
    """The options of `jagged_attention` that do not change what it returns."""

    causal: bool
    window: tuple[int, int] | None
    scale: float | None
    bias: Bias | Sequence[Bias] | None
    dropout_p: float
    scores: Scores | None
    keys: KeyRule | KeyLists | None
    schedule: AttentionSchedule | None
    backend: Backend
    deterministic: bool


@overload
def jagged_attention(
    q: JaggedTensor,
    k: JaggedTensor,
    v: JaggedTensor,
    *,
    return_lse: Literal[False] = ...,
    **options: Unpack[_Options],
) -> JaggedTensor: ...
@overload
def jagged_attention(
    q: Tensor,
    k: JaggedTensor,
    v: JaggedTensor,
    *,
    return_lse: Literal[False] = ...,
    **options: Unpack[_Options],
) -> Tensor: ...
@overload
def jagged_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    return_lse: Literal[False] = ...,
    **options: Unpack[_Options],
) -> Tensor: ...
@overload
def jagged_attention(
    q: JaggedTensor,
    k: JaggedTensor,
    v: JaggedTensor,
    *,
    return_lse: Literal[True],
    **options: Unpack[_Options],
) -> tuple[JaggedTensor, Tensor]: ...
@overload
def jagged_attention(
    q: Tensor,
    k: JaggedTensor,
    v: JaggedTensor,
    *,
    return_lse: Literal[True],
    **options: Unpack[_Options],
) -> tuple[Tensor, Tensor]: ...
@overload
def jagged_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    return_lse: Literal[True],
    **options: Unpack[_Options],
) -> tuple[Tensor, Tensor]: ...
@takes_nested
def jagged_attention(
    q: JaggedTensor | Tensor,
    k: JaggedTensor | Tensor,
    v: JaggedTensor | Tensor,
    *,
    causal: bool = False,
    window: tuple[int, int] | None = None,
    scale: float | None = None,
    bias: Bias | Sequence[Bias] | None = None,
    dropout_p: float = 0.0,
    scores: Scores | None = None,
    keys: KeyRule | KeyLists | None = None,
    schedule: AttentionSchedule | None = None,
    backend: Backend = "auto",
    deterministic: bool = True,
    return_lse: bool = False,
) -> JaggedTensor | Tensor | tuple[JaggedTensor | Tensor, Tensor]:
    """Softmax attention inside each user, without padding: softmax(scale * q k^T + bias) v.

    Args:
        q: queries, a `JaggedTensor` [Tq, H, D] (its offsets may differ from those of `k`: cross
            attention), or dense [B, N, H, D], or [N, H, D] for the same queries at every user.
        k: keys, `JaggedTensor` [Tk, Hk, D]. Hk divides H; head h reads key head h // (H / Hk).
        v: values, `JaggedTensor` [Tk, Hk, Dv] with the offsets of `k`.
            Each may be a nested tensor of PyTorch (jagged layout): [B, n*, H, D], or [B, H, n*, D]
            as `transpose(1, 2)` makes it for SDPA. The result then is nested, laid out as the
            first of them; of dense q it is dense.
        causal: query i of n sees keys up to i + m - n of m: aligned to the end, as in flash-attn.
        window: (left, right); query i sees keys i + (m - n) - left ... i + (m - n) + right, -1
            for no limit on a side. `causal` sets right to 0.
        scale: of the scores, 1 / sqrt(D) when None: a Python or NumPy number. No tensor: it would
            get no gradient, and reading it waits for the device; multiply q by it instead.
        bias: added to the scaled scores: a `RelativePositionBias`, `RelativeTimeBias` or `ALiBi`,
            or a finite number for each score, [sum of n_b * m_b, H]: user b's [n_b, m_b] scores
            row by row, users in order. Or a tuple of them, at most one of each kind: their sum.
            What they learn gets a gradient.
        dropout_p: chance to drop a probability (after the softmax; lse does not see it). The mask
            depends on a seed (drawn from torch's generator), user, head, query and key, not on
            packing, and is the same in all backends.
        scores: what a score becomes in place of its share of a softmax: `SiLU`, `Sigmoid`, or a
            `PointwiseScores` of your own. o then is the sum of weight(score) / n * v over the
            visible keys, and there is no lse.
        keys: which keys a query sees, in place of `window` (all rules are causal): `StridedKeys`,
            `SemiLocalKeys`, `RequestKeys`, or `KeyLists`, as `retrieved_blocks` makes them. Blocks
            that are not listed are not read. A schedule is for the same `keys` and, where heads
            see others, for as many heads; without one, a rule waits once for a GPU to read the
            longest user (`attention_schedule` has `longest`).
        schedule: from `attention_schedule` for the same offsets and mask (of dense queries also
            the same heads and dtype), to share its construction between layers. None: one is
            built here and kept for as long as these offsets live and do not change; q and k then
            have the same offsets only if these are one tensor. Of offsets that are written without
            PyTorch's counting it (by a CUDA graph's replay, a collective, a kernel of your own, or
            through `Tensor.data`), build one yourself after each write. A GPU compares
            offsets that are others than the schedule's for itself, once for each of them, and stops
            at its next operation where they differ: nobody waits for it.
        backend: "triton" (CUDA, or Triton's interpreter), "native" (vectorised PyTorch),
            "reference" (the specification, a loop over users) or "auto": triton for what it
            covers on CUDA tensors (D and Dv up to 256, no float64), native otherwise.
        deterministic: False allows kernels whose gradients differ from run to run, in the order of
            their sums, where these are faster: none of those there are is.
        return_lse: also return lse [Tq, H] (dense queries: [B, N, H]), the natural log of the sum
            of exponentials, float32 (float64 for float64 inputs); differentiable.

    Returns:
        A `JaggedTensor` [Tq, H, Dv] with q's offsets, or dense [B, N, H, Dv] for dense q, in the
        dtype of the inputs. A query that sees no key returns 0, and lse -inf. What the mask hides
        touches nothing, forward and backward, be it NaN or inf; what sees one has it.

        Under `torch.autocast` q, k and v are cast to its dtype, as those of
        `torch.nn.functional.scaled_dot_product_attention` are (float64 is not), and may differ
        in theirs; biases, which are added to float32 scores, stay as they are.

    Raises:
        TypeError, ValueError: arguments of wrong kind, dtype, shape or device, or a schedule of
            another batch or of offsets that changed since, before any launch.
        NotImplementedError: float64, or D or Dv above 256, on the triton backend.

    Tensors may have any strides. Triton reads packed QKV and slices of heads in place, and copies
    what has its heads first in memory ([H, T, D]) once.

    Triton accumulates in float32; float32 inputs use TF32 only if
    `torch.backends.cuda.matmul.fp32_precision` is "tf32". Results do not change from run to run,
    but for `deterministic`.
    The derivative of a gradient raises, except with backend="reference".

    With JAGGED_CHECK=1 in the environment, set before Python starts, contents of offsets and of the
    schedule are looked at in each call, on a GPU too, and what is wrong is a ValueError.

    Source: Jagged Flash Attention, arXiv 2409.15373; FlashAttention-2, arXiv 2307.08691.

    >>> x = JaggedTensor(torch.randn(5, 2, 8), torch.tensor([0, 3, 3, 5]))
    >>> jagged_attention(x, x, x, causal=True)
    JaggedTensor(users=3, values=[5, 2, 8], dtype=torch.float32, device=cpu)
    """
    if torch._C._is_any_autocast_enabled():
        q, k, v = as_autocast(q, k, v)
    k, v = _keys_and_values(k, v)
    if not (schedule is None or isinstance(schedule, AttentionSchedule)):
        raise TypeError(f"schedule must be an AttentionSchedule, got {type(schedule).__name__}")
    q_jagged = q if isinstance(q, JaggedTensor) else dense_queries(q, k, schedule)
    _check_inputs(q_jagged, k, v)
    terms = bias_terms(bias, q_jagged, k, dense=q_jagged is not q)
    check_dropout("dropout_p", dropout_p)
    band = band_of(keys, causal, window)
    if scores is not None:
        check_scores(scores, return_lse)
    dense = None if isinstance(q, JaggedTensor) else DenseShape.of(q, k)
    if schedule is not None:
        check_schedule(schedule, q_jagged, k, v, band, dense, keys)
    scale = as_scale(scale, q_jagged.values.shape[2])
    chosen = pick_backend(backend, q_jagged.values, v.values)
    seed = torch.randint(2**31, (), device=q_jagged.device) if dropout_p else None

    lists = None
    if keys is not None:
        if schedule is not None:
            lists = schedule.lists
        else:
            tokens = (q_jagged.values.shape[0], k.values.shape[0])
            lists = lists_of(keys, q_jagged.offsets, k.offsets, tokens, q_jagged.values.shape[1])
        if lists is not None:
            check_groups(keys, lists, q_jagged.values.shape[1])
    meets = _RANGES if lists is None and scores is None else MeetTerms.of(lists, scores)

    if chosen == "triton":
        if schedule is None:
            # Short of a schedule of the caller's, rows are enough for what takes them.
            schedule = schedule_of_call(
                q_jagged.offsets,
                k.offsets,
                q_tokens=q_jagged.values.shape[0],
                k_tokens=k.values.shape[0],
                dense=dense,
                window=band,
                head_dim=max(q_jagged.values.shape[2], v.values.shape[2]),
                keys=keys,
                lists=lists,
            )
        # Here, so that the backward has the copies of what kernels cannot read, if there are any.
        qkv = [rows_of_dims(x) for x in (q_jagged.values, k.values, v.values)]
        learned = () if terms is None else terms.learned()
        training = wants_gradient(*qkv, *(x for x in learned if x is not None))
        with_lse = return_lse or training
        rows = (schedule.rows, schedule.rows_t)
        mask = (schedule.tile_q, schedule.tile_k, *band, scale)
        partition, partition_t = schedule.partition, schedule.partition_t
        # A backward of rows that are cut goes by the lists of tiles alone.
        if training and lists is not None and lists.row_ptr_t is None and partition is None:
            row_ptr_t, col_t = lists.transposed(q_jagged.values.shape[0], k.values.shape[0])
            meets = meets._replace(row_ptr_t=row_ptr_t, col_t=col_t)
        operator = pick_operator(
            bias=terms is not None,
            dropout=seed is not None,
            pointwise=scores is not None,
            lists=lists is not None,
            cut=partition is not None,
        )
        if operator == "general":
            o, lse2 = call(
                ops_general.attention_triton_general,
                *qkv,
                with_lse,
                *rows,
                *mask,
                q_jagged.offsets,
                k.offsets,
                schedule.offsets,
                seed,
                dropout_p,
                *meets,
                *(BiasTerms() if terms is None else terms),
            )
        elif operator == "split":
            assert partition is not None
            assert partition_t is not None
            spans = (partition.spans, partition.block)
            spans_t = (partition_t.spans, partition_t.block)
            rest = (*spans, *rows, *spans_t, *mask)
            if terms is None and seed is None and meets is _RANGES:
                o, lse2 = call(ops_split.attention_split, *qkv, with_lse, *rest)
            else:
                o, lse2 = call(
                    ops_split_general.attention_split_general,
                    *qkv,
                    with_lse,
                    *rest,
                    q_jagged.offsets,
                    k.offsets,
                    seed,
                    dropout_p,
                    *meets,
                    *(BiasTerms() if terms is None else terms),
                )
        else:
            o, lse2 = call(ops.attention_triton, *qkv, with_lse, *rows, *mask, schedule.offsets)
        lse = lse2 * math.log(2) if return_lse else lse2
    else:
        offsets = (q_jagged.offsets, k.offsets)
        inputs = (q_jagged.values, k.values, v.values, *offsets)
        options: dict[str, Any] = {
            "window": band,
            "scale": scale,
            "bias": terms,
            "dropout_p": dropout_p,
            "dropout_seed": seed,
        }
        if chosen == "reference":
            if keys is not None and not (isinstance(keys, KeyLists) and keys.rule is None):
                options["window"] = NO_BAND  # a rule says all of the mask
            o, lse = attention_reference(*inputs, **options, scores=scores, keys=keys)
        else:
            block = 0 if lists is None else lists.block
            o, lse = ops_native.attention_native(*inputs, **options, block=block, meets=meets)

    if isinstance(q, JaggedTensor):
        out = JaggedTensor._trusted(o, q.offsets)
    else:
        batch = (len(k), q.shape[-3])
        out = o.view(*batch, *o.shape[1:])
        lse = lse.view(*batch, lse.shape[1]) if return_lse else lse
    return (out, lse) if return_lse else out


def _keys_and_values(
    k: JaggedTensor | Tensor, v: JaggedTensor | Tensor
) -> tuple[JaggedTensor, JaggedTensor]:
    if not isinstance(k, JaggedTensor) or not isinstance(v, JaggedTensor):
        kinds = f"{type(k).__name__} and {type(v).__name__}"
        raise TypeError(f"k and v must be JaggedTensors, got {kinds}")
    return k, v


def _check_inputs(q: JaggedTensor, k: JaggedTensor, v: JaggedTensor) -> None:
    # Each look at a tensor takes time, and short batches are bound by the host's.
    shapes = q.values.shape, k.values.shape, v.values.shape
    if not (len(shapes[0]) == len(shapes[1]) == len(shapes[2]) == 3):
        raise ValueError(f"q, k and v must be [T, H, D], got {_named(shapes)}")
    (_, heads, dim), (k_tokens, kv_heads, k_dim), (v_tokens, v_heads, v_dim) = shapes
    if k_tokens != v_tokens or kv_heads != v_heads:
        raise ValueError(f"k and v must have the same tokens and heads, got {_named(shapes)}")
    if dim != k_dim:
        raise ValueError(f"q and k must have the same head_dim, got {_named(shapes)}")
    if 0 in (heads, kv_heads, dim, v_dim):
        raise ValueError(f"heads and head_dim must be at least 1, got {_named(shapes)}")
    if heads % kv_heads:
        raise ValueError(f"q's heads must be a multiple of k's, got {_named(shapes)}")
    if checking():
        check_contents(q=q, k=k, v=v)
    if not (q.offsets is k.offsets is v.offsets):
        check_users(q, k)
        if len(v) != len(k):
            raise ValueError(f"k has {len(k)} users and v has {len(v)}")
        # Contents are not compared where that would wait for the device.
        if known_to_differ(v.offsets, k.offsets):
            raise ValueError("k and v must have the same offsets")
    q_dtype, k_dtype, v_dtype = q.values.dtype, k.values.dtype, v.values.dtype
    if not (q_dtype == k_dtype == v_dtype) or q_dtype not in _DTYPES:
        raise TypeError(
            f"q, k and v must be of one floating dtype, got {q_dtype}, {k_dtype}, {v_dtype}"
        )
    _check_devices(q.values.device, k.values.device, v.values.device)


def _check_devices(q: torch.device, k: torch.device, v: torch.device) -> None:
    if not (q == k == v):
        raise ValueError(f"q, k and v must be on one device, got {q}, {k}, {v}")


def _named(shapes: Sequence[torch.Size]) -> str:
    named = zip("qkv", shapes, strict=True)
    return ", ".join(f"{name} {tuple(shape)}" for name, shape in named)
