"""Providers that read jagged tensors: ours, and those that come with PyTorch."""

import dataclasses
import functools
import inspect
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from jagged_kernels import (
    JaggedTensor,
    RelativePositionBias,
    RelativeTimeBias,
    RequestKeys,
    SiLU,
    attention_schedule,
    jagged_attention,
)
from jagged_ranking.measure.lineup import OURS
from jagged_ranking.measure.pointwise import FARTHEST
from jagged_ranking.measure.providers.base import (
    Prepared,
    Provider,
    Unavailable,
    leaves,
    need_cuda,
    need_half,
)
from jagged_ranking.measure.providers.block_mask import document_block_mask
from jagged_ranking.measure.workloads import Batch


def as_is(batch: Batch, values: Tensor) -> Tensor:
    """The layout is [T, H, D] already."""
    return values


def packed_queries(batch: Batch, values: Tensor) -> Tensor:
    """Queries (or what has their form) as [tokens, H, D]: dense ones one user after another."""
    return values.flatten(0, -3)


def like_queries(batch: Batch, values: Tensor) -> Tensor:
    """The way back from `packed_queries`."""
    return values.view(batch.q.shape)


def packed_bounds(batch: Batch) -> tuple[Tensor, int, int]:
    """(offsets of packed queries [B + 1] int32, most queries of a user, longest history)."""
    longest, queries = int(batch.lengths.max()), batch.workload.queries
    if queries is None:
        return batch.offsets, longest, longest
    users = torch.arange(len(batch.offsets), dtype=torch.int32, device=batch.device)
    return users * queries, queries, longest


def _prepare_ours(batch: Batch, split: str | None = None, *, softmax: bool = False) -> Prepared:
    """`split` names a policy of the schedule; None leaves it to the rule, as users do. `softmax`
    takes one where the workload has HSTU's attention."""
    w = batch.workload
    q, k, v = leaves(batch.q, batch.k, batch.v)
    histories = JaggedTensor(k, batch.offsets)
    values = histories.with_values(v)
    # Dense candidates go in as they are; a history's own events share its offsets.
    queries = histories.with_values(q) if w.queries is None else q
    tables = () if batch.biases is None else (batch.biases.position, batch.biases.time)
    learned = tuple(table.detach().requires_grad_() for table in tables)
    mask: dict[str, Any] = {"causal": w.causal}
    told: dict[str, Any] = {} if split is None else {"split": split}
    if (targets := batch.targets()) is not None:
        mask["keys"] = RequestKeys(targets=targets)
        # As whoever makes the batch knows it: else the schedule reads offsets, and waits.
        told["longest"] = w.max_len
    options: dict[str, Any] = {}
    if batch.biases is not None:
        position, time = learned
        options["bias"] = (
            RelativePositionBias(position, max_distance=FARTHEST, bidirectional=False),
            RelativeTimeBias(time, batch.biases.times),
        )
    if w.hstu is not None and not softmax:
        options["scores"] = SiLU(divide_by=w.max_len)
    given = () if batch.biases is None else (batch.biases.times,)
    shared: dict[str, Any] = {
        "inputs": (q, k, v),
        "learned": learned,
        "grad_output": batch.dout,
        "to_tokens": as_is,
    }
    if batch.device.type != "cuda":
        if split is not None:
            raise Unavailable("unsupported", "the native backend has no schedule to split")
        return Prepared(
            forward=lambda: _values(
                jagged_attention(queries, histories, values, **mask, **options)
            ),
            held=(batch.offsets, *given),
            config={"backend": "native"},
            **shared,
        )

    build = functools.partial(
        attention_schedule,
        *(queries, histories),
        head_dim=w.head_dim,
        **mask,
        **told,
    )
    schedule = build()
    return Prepared(
        forward=lambda: _values(
            jagged_attention(queries, histories, values, **mask, **options, schedule=schedule)
        ),
        held=(batch.offsets, *given, *tensors_of(schedule)),
        builds={"schedule": build},
        config={"backend": "triton", **_chosen(schedule)},
        **shared,
    )


def _values(out: JaggedTensor | Tensor) -> Tensor:
    return out.values if isinstance(out, JaggedTensor) else out


def _chosen(schedule: Any) -> dict[str, Any]:
    """What the schedule chose by its rules: tile shapes, policy. Not what the batch gave it."""
    given = ("q_tokens", "k_tokens", "users")
    return {
        name: value
        for name, value in vars(schedule).items()
        if isinstance(value, int | str) and name not in given
    }


def tensors_of(schedule: Any) -> list[Tensor]:
    """Those in the fields of a dataclass, and of dataclasses in it."""
    found = []
    for field in dataclasses.fields(schedule):
        value = getattr(schedule, field.name)
        if isinstance(value, Tensor):
            found.append(value)
        elif dataclasses.is_dataclass(value):
            found += tensors_of(value)
    return found


def _prepare_njt(batch: Batch) -> Prepared:
    longest, shortest = int(batch.lengths.max()), int(batch.lengths.min())
    # int64: the nested jagged layout compares its offsets by identity, so all share this one.
    offsets = batch.offsets.long()

    def nest(values: Tensor) -> Tensor:
        return torch.nested.nested_tensor_from_jagged(
            values.detach(), offsets, min_seqlen=shortest, max_seqlen=longest
        )

    q, k, v = leaves(nest(batch.q), nest(batch.k), nest(batch.v))
    causal = batch.workload.causal

    def forward() -> Tensor:
        out = scaled_dot_product_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=causal
        )
        return out.transpose(1, 2)

    return Prepared(
        forward=forward,
        inputs=(q, k, v),
        grad_output=nest(batch.dout),
        to_tokens=lambda batch, nested: nested.values(),
        held=(offsets,),
    )


@functools.cache
def _compiled_flex() -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    # One compilation for each shape, as the fastest static code; a silent fall-back to eager
    # after the default of eight would materialise [T, T] scores.
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 256)
    limit = torch._dynamo.config.accumulated_recompile_limit
    torch._dynamo.config.accumulated_recompile_limit = max(limit, 1024)
    return torch.compile(flex_attention, dynamic=False, fullgraph=True)


def _prepare_flex(batch: Batch) -> Prepared:
    need_cuda(batch.device, "compiled FlexAttention, as measured here,")
    if batch.workload.head_dim < 16:
        raise Unavailable("unsupported", "FlexAttention has head_dim >= 16")
    flex = _compiled_flex()
    tokens, causal = batch.q.shape[0], batch.workload.causal
    build = functools.partial(document_block_mask, batch.offsets, tokens=tokens, causal=causal)
    block_mask = build()
    # One sequence of T tokens: [1, H, T, D] views of the token layout.
    q, k, v = leaves(batch.q, batch.k, batch.v)

    def forward() -> Tensor:
        views = (x.transpose(0, 1)[None] for x in (q, k, v))
        out = flex(*views, block_mask=block_mask)
        return out[0].transpose(0, 1)

    return Prepared(
        forward=forward,
        inputs=(q, k, v),
        grad_output=batch.dout,
        to_tokens=as_is,
        held=(block_mask.kv_num_blocks, block_mask.kv_indices),
        builds={"block_mask": build},
    )


def _prepare_varlen(batch: Batch, *, cuts: bool = False) -> Prepared:
    """`cuts` asks for histories in as many parts as give every multiprocessor two programs."""
    need_cuda(batch.device, "varlen_attn")
    need_half(batch.q.dtype, "varlen_attn")
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        message = f"torch {torch.__version__} has no torch.nn.attention.varlen"
        raise Unavailable("missing", message) from None
    if batch.workload.head_dim > 256:
        raise Unavailable("unsupported", "varlen_attn has head_dim <= 256")
    q, k, v = leaves(packed_queries(batch, batch.q), batch.k, batch.v)
    offsets = batch.offsets
    query_offsets, most_queries, longest = packed_bounds(batch)
    known = inspect.signature(varlen_attn).parameters
    options: dict[str, Any] = {}
    if batch.workload.causal:
        # The name of the option changed between releases.
        options = {"window_size": (-1, 0)} if "window_size" in known else {"is_causal": True}
    if cuts:
        if "num_splits" not in known:
            message = f"varlen_attn of torch {torch.__version__} has no num_splits"
            raise Unavailable("unsupported", message)
        options["num_splits"] = _parts(batch)

    def forward() -> Tensor:
        out = varlen_attn(q, k, v, query_offsets, offsets, most_queries, longest, **options)
        assert isinstance(out, Tensor)  # a tuple only if the log-sum-exp was asked for
        return out

    return Prepared(
        forward=forward,
        inputs=(q, k, v),
        grad_output=packed_queries(batch, batch.dout),
        to_tokens=as_is,
        to_queries=like_queries,
        held=(offsets, query_offsets),
    )


def _parts(batch: Batch) -> int:
    """Parts of a history, 1 to 128 as FlashAttention has them, of 64 keys or more."""
    w = batch.workload
    processors = torch.cuda.get_device_properties(batch.device).multi_processor_count
    wanted = -(-2 * processors // (w.users * w.heads))
    return max(1, min(wanted, -(-int(batch.lengths.max()) // 64), 128))


JAGGED = Provider(
    name=OURS,
    description="ours: jagged_attention, the schedule of the batch handed along",
    prepare=_prepare_ours,
    dense_queries=True,
    hstu=True,
)
JAGGED_SOFTMAX = Provider(
    name="jagged_softmax",
    description="ours on a workload of HSTU's attention, but with a softmax",
    prepare=functools.partial(_prepare_ours, softmax=True),
    softmax=False,
    hstu=True,
    softmax_instead=True,
)
JAGGED_ROWS, JAGGED_SPLIT, JAGGED_STREAM = (
    Provider(
        name=f"jagged_{split}",
        description=f"ours, {what}, whatever the rule would choose",
        prepare=functools.partial(_prepare_ours, split=split),
        dense_queries=True,
    )
    for split, what in (
        ("rows", "one program a row"),
        ("split", "split-K: long rows cut into equal parts"),
        ("stream", "stream-K: all work cut into equal shares"),
    )
)
NJT_SDPA = Provider(
    name="njt_sdpa",
    description="torch.nested (jagged layout) and SDPA",
    prepare=_prepare_njt,
)
FLEX = Provider(
    name="flex",
    description="FlexAttention, compiled for the exact shape, document mask, block mask built "
    "beforehand",
    prepare=_prepare_flex,
)
VARLEN_ATTN = Provider(
    name="varlen_attn",
    description="torch.nn.attention.varlen.varlen_attn (FlashAttention-2)",
    prepare=_prepare_varlen,
    dense_queries=True,
)
VARLEN_ATTN_SPLIT = Provider(
    name="varlen_attn_split",
    description="varlen_attn with num_splits: histories in as many parts as give every "
    "multiprocessor two programs",
    prepare=functools.partial(_prepare_varlen, cuts=True),
    dense_queries=True,
)
