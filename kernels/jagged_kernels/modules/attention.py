"""`JaggedMultiheadAttention`: projections, `jagged_attention`, and the output projection."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, overload

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from jagged_kernels.attention.api import jagged_attention
from jagged_kernels.attention.scores.bias import Bias
from jagged_kernels.core.backends import Backend, check_backend
from jagged_kernels.schedule.schedule import AttentionSchedule
from jagged_kernels.schedule.window import resolve_window
from jagged_kernels.tensors.checks import check_dropout
from jagged_kernels.tensors.jagged import JaggedTensor
from jagged_kernels.tensors.nested import takes_nested


class JaggedMultiheadAttention(nn.Module):
    """`torch.nn.MultiheadAttention` over users of different lengths, without padding.

    Args:
        embed_dim: E, of queries and results; D = E / num_heads.
        num_heads: H.
        dropout: chance to drop a probability, while training.
        bias: whether the four projections have one.
        kdim, vdim: dimensions of keys and of values, E when None.
        num_kv_heads: Hk, which divides H: each key head serves H / Hk query heads (GQA, arXiv
            2305.13245); H when None.
        causal, window: as for `jagged_attention`.
        backend: as for `jagged_attention`.

    Parameters have the names and shapes of `torch.nn.MultiheadAttention`, and with the same seed
    the same numbers: `in_proj_weight` [(H + 2 Hk) D, E], of queries, keys and values below each
    other, or, where kdim or vdim is not E, `q_proj_weight`, `k_proj_weight` and `v_proj_weight`;
    `in_proj_bias`; `out_proj`. Its `state_dict` loads here, but for `add_bias_kv`; and the results
    are its results for `key_padding_mask`, but for a query without keys: there NaN, here
    `out_proj` of zeros. There are no weights to return.

    One product projects what comes from one tensor: [T, 3 E] in self-attention. The kernels read
    q, k and v where they lie in it.

    Raises:
        TypeError, ValueError: numbers that do not divide each other or that are out of range, or
            an unknown backend.

    >>> attention = JaggedMultiheadAttention(16, 4, causal=True)
    >>> x = JaggedTensor(torch.randn(5, 16), torch.tensor([0, 3, 3, 5]))
    >>> attention(x)
    JaggedTensor(users=3, values=[5, 16], dtype=torch.float32, device=cpu)
    >>> attention(torch.randn(3, 1, 16), x).shape  # a query for each user
    torch.Size([3, 1, 16])
    """

    in_proj_weight: nn.Parameter | None
    q_proj_weight: nn.Parameter | None
    k_proj_weight: nn.Parameter | None
    v_proj_weight: nn.Parameter | None
    in_proj_bias: nn.Parameter | None

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        *,
        kdim: int | None = None,
        vdim: int | None = None,
        num_kv_heads: int | None = None,
        causal: bool = False,
        window: tuple[int, int] | None = None,
        backend: Backend = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        if min(embed_dim, num_heads, num_kv_heads) < 1:
            raise ValueError(
                "embed_dim, num_heads and num_kv_heads must be at least 1, "
                f"got {embed_dim}, {num_heads} and {num_kv_heads}"
            )
        if embed_dim % num_heads:
            raise ValueError(f"num_heads must divide embed_dim {embed_dim}, got {num_heads}")
        if num_heads % num_kv_heads:
            raise ValueError(f"num_kv_heads must divide num_heads {num_heads}, got {num_kv_heads}")
        check_dropout("dropout", dropout)
        check_backend(backend)
        resolve_window(causal, window)
        self.embed_dim, self.num_heads, self.num_kv_heads = embed_dim, num_heads, num_kv_heads
        self.head_dim = embed_dim // num_heads
        self.kdim = embed_dim if kdim is None else kdim
        self.vdim = embed_dim if vdim is None else vdim
        if min(self.kdim, self.vdim) < 1:
            raise ValueError(f"kdim and vdim must be at least 1, got {self.kdim} and {self.vdim}")
        self.dropout, self.causal, self.window = dropout, causal, window
        self.backend: Backend = backend

        rows = self._rows()
        factory = {"device": device, "dtype": dtype}
        shapes: dict[str, tuple[int, int] | None] = dict.fromkeys(
            ("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight")
        )
        if self.kdim == self.vdim == embed_dim:
            shapes["in_proj_weight"] = (sum(rows), embed_dim)
        else:
            columns = (embed_dim, self.kdim, self.vdim)
            for name, row, column in zip("qkv", rows, columns, strict=True):
                shapes[f"{name}_proj_weight"] = (row, column)
        for name, shape in shapes.items():
            weight = None if shape is None else nn.Parameter(torch.empty(shape, **factory))
            self.register_parameter(name, weight)
        empty = nn.Parameter(torch.empty(sum(rows), **factory)) if bias else None
        self.register_parameter("in_proj_bias", empty)
        self.out_proj = nn.Linear(embed_dim, embed_dim, bias=bias, **factory)
        self._reset_projections()

    def reset_parameters(self) -> None:
        """As `torch.nn.MultiheadAttention` starts."""
        self.out_proj.reset_parameters()
        self._reset_projections()

    def _reset_projections(self) -> None:
        for weight in (
            self.in_proj_weight,
            self.q_proj_weight,
            self.k_proj_weight,
            self.v_proj_weight,
        ):
            if weight is not None:
                nn.init.xavier_uniform_(weight)
        if self.in_proj_bias is not None:
            nn.init.zeros_(self.in_proj_bias)
            nn.init.zeros_(self.out_proj.bias)

    def extra_repr(self) -> str:
        parts = [f"{self.embed_dim}, num_heads={self.num_heads}"]
        if self.num_kv_heads != self.num_heads:
            parts.append(f"num_kv_heads={self.num_kv_heads}")
        if self.in_proj_weight is None:
            parts.append(f"kdim={self.kdim}, vdim={self.vdim}")
        options = {"dropout": 0.0, "causal": False, "window": None, "backend": "auto"}
        for name, default in options.items():
            if (value := getattr(self, name)) != default:
                parts.append(f"{name}={value!r}")
        if self.in_proj_bias is None:
            parts.append("bias=False")
        return ", ".join(parts)

    @overload
    def forward(
        self,
        query: JaggedTensor,
        key: JaggedTensor | None = ...,
        value: JaggedTensor | None = ...,
        *,
        bias: Bias | Sequence[Bias] | None = ...,
        schedule: AttentionSchedule | None = ...,
    ) -> JaggedTensor: ...
    @overload
    def forward(
        self,
        query: Tensor,
        key: JaggedTensor | Tensor | None = ...,
        value: JaggedTensor | Tensor | None = ...,
        *,
        bias: Bias | Sequence[Bias] | None = ...,
        schedule: AttentionSchedule | None = ...,
    ) -> Tensor: ...
    @takes_nested
    def forward(
        self,
        query: JaggedTensor | Tensor,
        key: JaggedTensor | Tensor | None = None,
        value: JaggedTensor | Tensor | None = None,
        *,
        bias: Bias | Sequence[Bias] | None = None,
        schedule: AttentionSchedule | None = None,
    ) -> JaggedTensor | Tensor:
        """Each query's mixture of the values of its user.

        Args:
            query: a `JaggedTensor` [Tq, E], or dense [B, N, E], or [N, E] for every user alike.
            key: a `JaggedTensor` [Tk, kdim]; the query when None: self-attention.
            value: a `JaggedTensor` [Tk, vdim] with the offsets of `key`; the key when None.
            bias, schedule: as for `jagged_attention`.

        Returns:
            In the form of `query`; of [N, E] [B, N, E].

        Raises:
            TypeError, ValueError: arguments of wrong kind or shape, and what `jagged_attention`
                raises.
        """
        key = query if key is None else key
        value = key if value is None else value
        if not isinstance(key, JaggedTensor) or not isinstance(value, JaggedTensor):
            kinds = f"{type(key).__name__} and {type(value).__name__}"
            raise TypeError(f"key and value must be JaggedTensors, got {kinds}")
        tokens = query.values if isinstance(query, JaggedTensor) else query
        _check_last("query", tokens, self.embed_dim)
        _check_last("key", key.values, self.kdim)
        _check_last("value", value.values, self.vdim)
        q, k, v = self._project(tokens, key.values, value.values)
        out = jagged_attention(
            query.with_values(q) if isinstance(query, JaggedTensor) else q,
            key.with_values(k),
            value.with_values(v),
            causal=self.causal,
            window=self.window,
            bias=bias,
            dropout_p=self.dropout if self.training else 0.0,
            schedule=schedule,
            backend=self.backend,
        )
        if isinstance(out, JaggedTensor):
            return out.with_values(self.out_proj(out.values.flatten(1)))
        return self.out_proj(out.flatten(-2))

    def _rows(self) -> tuple[int, int, int]:
        """Numbers in a token's q, k and v."""
        kv = self.num_kv_heads * self.head_dim
        return self.embed_dim, kv, kv

    def _project(self, query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
        """q [..., H, D], k [Tk, Hk, D] and v [Tk, Hk, D], views of as few products as can be."""
        packed, bias, rows = self.in_proj_weight, self.in_proj_bias, self._rows()
        if packed is not None and query is key is value:
            parts = linear(query, packed, bias).split_with_sizes(rows, -1)
        else:
            biases = (None, None, None) if bias is None else bias.split_with_sizes(rows)
            if packed is not None and key is value:
                q = linear(query, packed[: rows[0]], biases[0])
                both = None if bias is None else bias[rows[0] :]
                kv = linear(key, packed[rows[0] :], both)
                parts = (q, *kv.split_with_sizes(rows[1:], -1))
            else:
                own = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
                weights: Any = own if packed is None else packed.split_with_sizes(rows)
                parts = map(linear, (query, key, value), weights, biases)
        heads = (self.num_heads, self.num_kv_heads, self.num_kv_heads)
        return [x.unflatten(-1, (n, -1)) for x, n in zip(parts, heads, strict=True)]


def _check_last(name: str, tokens: Tensor, dim: int) -> None:
    if not isinstance(tokens, Tensor):
        raise TypeError(f"{name} must be a JaggedTensor or a tensor, got {type(tokens).__name__}")
    if tokens.shape[-1:] != (dim,):
        raise ValueError(f"{name} must be [..., {dim}], got {tuple(tokens.shape)}")
