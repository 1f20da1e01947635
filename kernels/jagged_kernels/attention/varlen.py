"""`jagged_varlen_attention`: `jagged_attention` by the signature of PyTorch's `varlen_attn`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from jagged_kernels.attention.api import jagged_attention
from jagged_kernels.core.backends import Backend
from jagged_kernels.core.contents import readable
from jagged_kernels.ops.layout.slice import jagged_slice
from jagged_kernels.schedule.schedule import AttentionSchedule
from jagged_kernels.tensors.arguments import not_a_tensor
from jagged_kernels.tensors.jagged import JaggedTensor


def jagged_varlen_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    *,
    return_aux: Any = None,
    scale: float | None = None,
    window_size: Sequence[int] = (-1, -1),
    enable_gqa: bool = False,
    seqused_k: Tensor | None = None,
    block_table: Tensor | None = None,
    num_splits: int | None = None,
    is_causal: bool = False,
    schedule: AttentionSchedule | None = None,
    backend: Backend = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """In the place of `torch.nn.attention.varlen.varlen_attn` (of torch 2.13, or 2.11 by keyword).

    Args:
        query: [Tq, H, D]. key: [Tk, Hk, D]. value: [Tk, Hk, Dv].
        cu_seq_q, cu_seq_k: [N + 1], int32 or int64: `JaggedTensor.offsets`. Give the same tensor
            for both where they are the same: then nothing has to be made or compared twice.
        max_q, max_k: not read; the schedule knows how long sequences are.
        return_aux: an `AuxRequest`, or what has its `lse`: if that is true, also return lse.
        scale: of the scores, 1 / sqrt(D) when None.
        window_size: (left, right) as the `window` of `jagged_attention`; (-1, 0) is causal.
        enable_gqa: Hk may divide H; else they must be equal.
        seqused_k: [N], the keys of each sequence that take part, its first ones (at most those
            that it has). The keys and values in use are copied, and the device is waited for. By
            triton this is not one graph of `torch.compile`.
        num_splits: None or 1: keys of jagged queries are never split between programs.
        is_causal: what torch 2.9 has for a `window_size` of (-1, 0).
        schedule: from `attention_schedule` for these offsets and this mask, as for
            `jagged_attention`: what is built here for each call, else.
        backend: as for `jagged_attention`.

    Returns:
        [Tq, H, Dv], and with lse a tuple of that and lse, float32 [H, Tq]: the shape that
        `varlen_attn` returns, whatever its documentation says.

    Raises:
        TypeError, ValueError: arguments of wrong kind, dtype, shape or device, before any launch.
        NotImplementedError: `block_table`, or more than one of `num_splits`.

    What is different: float32, float64 and CPU tensors are taken, any D, and a Dv of its own;
    offsets must end at T (there they may end before padding; on a CPU that raises here); lse is
    differentiable, and -inf for a query that sees no key; forward and backward do not change from
    run to run, but bits of a sequence may depend on the others in its batch, whatever `num_splits`
    is. With `seqused_k` there are gradients, too.

    >>> x, cu_seq = torch.randn(5, 2, 8), torch.tensor([0, 3, 5], dtype=torch.int32)
    >>> jagged_varlen_attention(x, x, x, cu_seq, cu_seq, 3, 3, window_size=(-1, 0)).shape
    torch.Size([5, 2, 8])
    """
    if block_table is not None:
        raise NotImplementedError("block_table (paged keys): gather the pages before")
    if num_splits not in (None, 1):
        raise NotImplementedError(f"num_splits must be None or 1, got {num_splits}")
    if cu_seq_k is None:
        raise ValueError("cu_seq_k must be [N + 1]: None goes with a block_table")
    given = {
        "query": query, "key": key, "value": value, "cu_seq_q": cu_seq_q, "cu_seq_k": cu_seq_k,
    }  # fmt: skip
    for name, tensor in given.items():
        if not isinstance(tensor, Tensor):
            raise not_a_tensor(name, tensor)
    q = JaggedTensor(query, cu_seq_q, validate=readable(cu_seq_q))
    if cu_seq_k is cu_seq_q and key.shape[:1] == query.shape[:1]:
        k, v = q.with_values(key), q.with_values(value)
    else:
        k = JaggedTensor(key, cu_seq_k, validate=readable(cu_seq_k))
        v = k.with_values(value)
    if not enable_gqa and query.shape[1:2] != key.shape[1:2]:
        raise ValueError(
            "query and key must have the same heads without enable_gqa=True, "
            f"got {tuple(query.shape)} and {tuple(key.shape)}"
        )
    if seqused_k is not None:
        k, v = _first_keys(k, v, seqused_k, backend)
    options: Any = {
        "causal": is_causal,
        "window": window_size,
        "scale": scale,
        "schedule": schedule,
        "backend": backend,
    }
    if return_aux is not None and return_aux.lse:
        out, lse = jagged_attention(q, k, v, return_lse=True, **options)
        return out.values, lse.t()
    return jagged_attention(q, k, v, **options).values


def _first_keys(
    k: JaggedTensor, v: JaggedTensor, used: Tensor, backend: Backend
) -> tuple[JaggedTensor, JaggedTensor]:
    """The first `used` [N] keys and values of each sequence."""
    if not isinstance(used, Tensor) or used.shape != (len(k),) or used.dtype.is_floating_point:
        got = f"{used.dtype} {tuple(used.shape)}" if isinstance(used, Tensor) else repr(used)
        raise ValueError(f"seqused_k must be integers [{len(k)}], got {got}")
    k = jagged_slice(k, 0, used, backend=backend)
    v = jagged_slice(v, 0, used, total=k.values.shape[0], backend=backend)
    return k, k.with_values(v.values)
