"""`explain_attention`: who takes a call of `jagged_attention`, and why nothing faster does.

The call is gone through with tensors on "meta" in the place of its own, laid out as they are: what
the call would copy or cast is there copied or cast without a launch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from jagged_kernels.attention.api import (
    _check_devices,
    _check_inputs,
    _keys_and_values,
)
from jagged_kernels.attention.choice import (
    FAMILIES,
    GENERAL,
    SPLIT,
    TRITON,
    Asked,
    Family,
    Pass,
    able_families,
    batch_refusals,
    first_that_pays,
    hopper_reads,
    pick_backend,
    refusals,
    width_of,
)
from jagged_kernels.attention.scores.bias import Bias
from jagged_kernels.attention.scores.policy import PointwiseScores, Scores, check_scores
from jagged_kernels.core.autocast import dtype_in_products
from jagged_kernels.core.backends import Backend
from jagged_kernels.core.layouts import rows_of_dims
from jagged_kernels.schedule.band import band_of
from jagged_kernels.schedule.check import check_fit
from jagged_kernels.schedule.dense import DenseShape, check_dense
from jagged_kernels.schedule.keys.lists import KeyLists
from jagged_kernels.schedule.keys.rules import KeyRule
from jagged_kernels.schedule.schedule import AttentionSchedule, dense_queries
from jagged_kernels.schedule.tiles import choose_tiles, cut_refusal, list_cut_refusal, tile_to_cut
from jagged_kernels.schedule.window import mask_of
from jagged_kernels.tensors.checks import as_scale, check_dropout
from jagged_kernels.tensors.jagged import JaggedTensor
from jagged_kernels.tensors.nested import takes_nested

_PASSES: tuple[Pass, ...] = ("forward", "dq", "dkv")
# Bytes: TMA reads from addresses that are multiples of it.
_ALIGNMENT = 16


@takes_nested
def explain_attention(
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
) -> str:
    """Which kernels take this call of `jagged_attention`, and why no faster ones do, in words.

    Nothing is launched, built or waited for; on a Hopper GPU, functions of a `PointwiseScores` are
    compiled once, to see whether its kernels can call them. Contents of tensors are not looked at,
    nor are a bias and lists of keys: what is wrong with these, only the call itself says.

    Args:
        q, k, v, causal, window, scale, bias, dropout_p, scores, keys, schedule, backend,
            deterministic, return_lse: as in the call; without a schedule, it is explained with the
            one that would be built. `scale`, `deterministic` and `return_lse` choose no kernel.

    Returns:
        Lines: the backend; the kernels of the forward, and of the backward if there is one; and of
        those that would be faster, what they need that this call has not. Of a call on a CPU it is
        not said what a GPU would do.

    Raises:
        TypeError, ValueError, NotImplementedError: as `jagged_attention`, as far as shapes, dtypes,
            devices and options say it.

    >>> x = JaggedTensor(torch.randn(5, 2, 8), torch.tensor([0, 3, 3, 5]))
    >>> print(explain_attention(x, x, x, causal=True))
    backend: native
    forward and backward: native (vectorised PyTorch)
    triton: the tensors are on cpu, not on a GPU
    """
    k, v = _keys_and_values(k, v)
    q_like, k_like, v_like = _on_meta(q), _on_meta(k), _on_meta(v)
    dense = None
    if not isinstance(q, JaggedTensor):
        check_dense(q_like, len(k))
        q_like, dense = dense_queries(q_like, k_like), DenseShape.of(q_like, k_like)
    _check_inputs(q_like, k_like, v_like)
    _check_devices(q.device, k.device, v.device)
    check_dropout("dropout_p", dropout_p)
    band = band_of(keys, causal, window)
    if scores is not None:
        check_scores(scores, return_lse)
    as_scale(scale, q_like.values.shape[2])
    users, device = len(k_like), k.device
    tokens, k_tokens = q_like.values.shape[0], k_like.values.shape[0]
    if schedule is not None:
        check_fit(schedule, tokens, k_tokens, users, band, dense, device, keys)

    qkv = [rows_of_dims(x.values) for x in (q_like, k_like, v_like)]
    dtype, dim, dim_v = qkv[0].dtype, qkv[0].shape[2], qkv[2].shape[2]
    # A backend is chosen by where tensors are; these have no tokens, which need memory.
    there = [torch.empty(0, *x.shape[1:], dtype=dtype, device=device) for x in qkv]
    chosen = pick_backend(backend, there[0], there[2])
    has_bias = bias is not None and not (isinstance(bias, (tuple, list)) and not bias)
    has_dropout = dropout_p > 0.0
    sizes: dict[str, Any] = {"k_tokens": k_tokens, "users": users, "head_dim": max(dim, dim_v)}
    mask = mask_of(*band)
    if schedule is not None:
        cut, tile_q, tile_k = schedule.partition is not None, schedule.tile_q, schedule.tile_k
        shared = schedule.offsets is not None
    else:
        split, tile_q, tile_k = choose_tiles(
            dense, "auto", q_tokens=tokens, device=device, keys=keys, mask=mask, **sizes,
        )  # fmt: skip
        cut, shared = split != "rows", isinstance(q, JaggedTensor) and q.offsets is k.offsets
    asked = Asked(
        "forward", device, dtype, dim, dim_v, tile_q, tile_k, shared, has_bias, has_dropout,
        rows="cut" if cut else "whole",
        scores="softmax" if scores is None else "pointwise",
        keys="ranges" if keys is None else "lists",
        policy="" if scores is None else scores.key,
        mask=mask,
        grouped=there[0].shape[1] != there[1].shape[1],
    )  # fmt: skip
    said = [f"backend: {chosen}"]
    if chosen != "triton":
        return "\n".join([*said, *_without_kernels(chosen, backend, asked)])
    if isinstance(scores, PointwiseScores):
        scores.functions()
    uncut = cut_refusal(dense, tile_to_cut(dense), device=device, **sizes)
    uncut = uncut or list_cut_refusal(keys, dense)
    if uncut is None and schedule is not None:
        uncut = "the schedule was built with split='rows'"
    batch = (tokens, users, width_of(*band, asked.keys), None if cut else uncut)
    return "\n".join([*said, *_with_kernels(asked, qkv, *batch)])


def _without_kernels(chosen: str, backend: str, asked: Asked) -> list[str]:
    family = next(family for family in FAMILIES if family.name == chosen)
    if backend == "auto":
        on_gpu = asked.device.type == "cuda"
        why = [] if on_gpu else [f"the tensors are on {asked.device}, not on a GPU"]
        # Of the kernels these take the most.
        why += refusals(GENERAL, asked)
    else:
        why = [f"backend={backend!r} is asked for"]
    return [*_takers([family] * len(_PASSES)), f"triton: {'; '.join(why)}"]


def _with_kernels(
    asked: Asked, qkv: Sequence[Tensor], tokens: int, users: int, width: int, uncut: str | None
) -> list[str]:
    """
    Args:
        qkv: as kernels get them, on "meta".
        tokens, users: of q.
        width: of a window, 0 where there is none.
        uncut: why rows are not cut among programs.
    """
    tma = hopper_reads(*qkv)
    picked: list[Family] = []
    refused: dict[str, list[str]] = {}
    for of_pass in _PASSES:
        call = asked._replace(of_pass=of_pass)
        family = first_that_pays(able_families(*call), tokens, users, lambda: tma, width)
        picked.append(family)
        for faster in TRITON[: TRITON.index(family)]:
            if of_pass in faster.passes:
                refused[faster.name] = [
                    *refusals(faster, call),
                    *batch_refusals(faster, call, tokens, users, tma=tma, width=width),
                ]
    if SPLIT.name in refused:
        # Why rows are whole says more than that they are.
        others = refusals(SPLIT, asked._replace(rows="cut"))
        refused[SPLIT.name] = others if uncut is None else [*others, uncut]
    return [*_takers(picked), *_refusal_lines(refused)]


def _on_meta(x: Any) -> Any:
    """A tensor on "meta", or a `JaggedTensor` of such, laid out in memory as this one, in the dtype
    in which the call takes it; what is neither as it is, for others to refuse."""
    if isinstance(x, JaggedTensor):
        return JaggedTensor._trusted(_on_meta(x.values), _on_meta(x.offsets))
    if not isinstance(x, Tensor):
        return x
    # As far from an address that TMA takes.
    start = x.data_ptr() % _ALIGNMENT // x.element_size()
    end = start + 1 + sum((n - 1) * stride for n, stride in zip(x.shape, x.stride(), strict=True))
    memory = torch.empty(max(end, 0), dtype=x.dtype, device="meta")
    return memory.as_strided(x.shape, x.stride(), start).to(dtype_in_products(x))


def _takers(picked: Sequence[Family]) -> list[str]:
    """The lines of the families of the passes."""
    forward, dq, dkv = (f"{family.name} ({family.about})" for family in picked)
    if forward == dq == dkv:
        return [f"forward and backward: {forward}"]
    backward = dq if dq == dkv else f"{dkv} for dk and dv, {dq} for dq"
    return [f"forward: {forward}", f"backward: {backward}"]


def _refusal_lines(refused: dict[str, list[str]]) -> list[str]:
    """A line for each reason, of all families that have it."""
    names: dict[str, list[str]] = {}
    for name in (family.name for family in TRITON if family.name in refused):
        names.setdefault("; ".join(refused[name]), []).append(name)
    return [f"{', '.join(of)}: {reason}" for reason, of in names.items()]
