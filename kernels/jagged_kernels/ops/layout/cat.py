"""`jagged_cat`: several features of a user one after another."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from jagged_kernels.core.backends import Backend, choose_backend
from jagged_kernels.core.contents import check_token_count
from jagged_kernels.core.operators import call, define_gradient, define_op
from jagged_kernels.ops.users import token_positions
from jagged_kernels.tensors.jagged import JaggedTensor
from jagged_kernels.tensors.nested import takes_nested


@takes_nested
def jagged_cat(
    parts: Sequence[JaggedTensor | Tensor], *, backend: Backend = "auto"
) -> JaggedTensor:
    """Concatenates inside each user: its tokens of parts[0], then those of parts[1], ...

    Args:
        parts: `JaggedTensor`s [T_i, ...] of the same users, at least one, and dense tensors
            [B, N, ...], or [N, ...] for the same N tokens at every user. All of one dtype (of
            those of `jagged_slice`) and one shape of a token.
        backend: "triton", "native", "reference" or "auto" (triton on CUDA tensors).

    Returns:
        [sum of T_i + B N, ...]; its offsets are the sum of the parts' offsets. Does not wait.

    Raises:
        TypeError, ValueError: parts of wrong kind, shape, dtype or device.
        NotImplementedError: float64 or a complex dtype on the triton backend.

    The gradient of a part [N, ...] is summed over the users from [B, N, ...].

    >>> x = JaggedTensor(torch.arange(3), torch.tensor([0, 2, 2, 3]))
    >>> [user.tolist() for user in jagged_cat([torch.tensor([7]), x, x]).unbind()]
    [[7, 0, 1, 0, 1], [7], [7, 2, 2]]
    """
    first = _check(parts)
    chosen = choose_backend(backend, first.values)
    users, dims = len(first), first.values.dim()
    shared = [isinstance(part, Tensor) and part.dim() == dims for part in parts]
    dense = [part for part in parts if isinstance(part, Tensor)]
    jagged = [part for part in parts if isinstance(part, JaggedTensor)]
    offsets = sum((part.offsets for part in jagged[1:]), jagged[0].offsets)
    tokens = sum(part.values.shape[0] for part in jagged)
    if dense:
        steps = torch.arange(users + 1, device=first.device, dtype=first.offsets.dtype)
        every = sum(part.shape[-dims] for part in dense)
        offsets, tokens = offsets + steps * every, tokens + users * every
        jagged = [_as_jagged(part, steps, dims) for part in parts]
    check_token_count(tokens, offsets.dtype)

    if chosen == "reference":
        values = _reference(jagged, shared, users)
    elif chosen == "native":
        values = _native(jagged, shared, offsets, tokens)
    else:
        values = call(
            cat_rows,
            [p.values for p in jagged],
            [p.offsets for p in jagged],
            shared,
            offsets,
            tokens,
        )
    return JaggedTensor._trusted(values, offsets)


def _check(parts: Sequence[JaggedTensor | Tensor]) -> JaggedTensor:
    """The first jagged part, to which the others fit."""
    if not isinstance(parts, Sequence):
        kind = type(parts).__name__
        raise TypeError(f"parts must be a list of JaggedTensors and tensors, got {kind}")
    jagged = [part for part in parts if isinstance(part, JaggedTensor)]
    if not jagged or not all(isinstance(part, JaggedTensor | Tensor) for part in parts):
        kinds = ", ".join(type(part).__name__ for part in parts)
        raise TypeError(f"parts must be JaggedTensors, at least one, and tensors; got [{kinds}]")
    first = jagged[0]
    token, users = first.values.shape[1:], len(first)
    for index, part in enumerate(parts):
        x = part.values if isinstance(part, JaggedTensor) else part
        # Dimensions in front of those of a token: 1, or 2 for [B, N, ...].
        lead = x.dim() - len(token)
        fits = x.shape[lead:] == token if lead in (1, 2) else False
        if isinstance(part, JaggedTensor):
            fits = fits and lead == 1 and len(part) == users
        elif lead == 2:
            fits = fits and x.shape[0] == users
        if not fits:
            what = f"{len(part)} users, " if isinstance(part, JaggedTensor) else ""
            rest = "".join(f", {n}" for n in token)
            raise ValueError(
                f"part {index} ({what}{tuple(x.shape)}) does not fit: parts must be jagged "
                f"[T{rest}] of {users} users, or dense [{users}, N{rest}] or [N{rest}]"
            )
        if x.dtype != first.dtype:
            raise TypeError(f"parts must be of one dtype, got {first.dtype} and {x.dtype}")
        if x.device != first.device:
            raise ValueError(f"parts must be on one device, got {first.device} and {x.device}")
    return first


def _as_jagged(part: JaggedTensor | Tensor, steps: Tensor, dims: int) -> JaggedTensor:
    """A dense part as the same number of tokens for every user; [N, ...] as that of one user.

    `steps`: 0, 1, ..., B.
    """
    if isinstance(part, JaggedTensor):
        return part
    if part.dim() == dims:
        return JaggedTensor._trusted(part, steps[:2] * part.shape[0])
    return JaggedTensor._trusted(part.flatten(0, 1), steps * part.shape[1])


def _reference(parts: Sequence[JaggedTensor], shared: Sequence[bool], users: int) -> Tensor:
    tokens = [part.unbind() for part in parts]
    rows = [
        own[0] if same else own[user]
        for user in range(users)
        for own, same in zip(tokens, shared, strict=True)
    ]
    nothing = [part.values[:0] for part in parts]
    return torch.cat([*nothing, *rows])


def _native(
    parts: Sequence[JaggedTensor], shared: Sequence[bool], out_offsets: Tensor, tokens: int
) -> Tensor:
    users = out_offsets.shape[0] - 1
    begin = out_offsets[:-1]
    values, places = [], []
    for part, same in zip(parts, shared, strict=True):
        count = part.values.shape[0]
        if same:
            values.append(part.values.expand(users, *part.values.shape).flatten(0, 1))
            places.append((begin[:, None] + torch.arange(count, device=begin.device)).flatten())
            begin = begin + count
        else:
            user, place = token_positions(part.offsets, count)
            values.append(part.values)
            places.append(begin[user] + place)
            begin = begin + part.lengths
    out = values[0].new_empty((tokens, *values[0].shape[1:]))
    return out.index_copy(0, torch.cat(places).long(), torch.cat(values))


def _cat_rows(
    values: Sequence[Tensor],
    offsets: Sequence[Tensor],
    shared: Sequence[bool],
    out_offsets: Tensor,
    tokens: int,
) -> Tensor:
    """[tokens, ...]; a shared part has the offsets of one user, [2]."""
    from jagged_kernels.ops.layout.triton_copies import launch_cat_rows

    return launch_cat_rows(values, offsets, shared, out_offsets, tokens)


def _cat_rows_backward(
    d_out: Tensor,
    offsets: Sequence[Tensor],
    shared: Sequence[bool],
    out_offsets: Tensor,
    rows: Sequence[int],
) -> list[Tensor]:
    """The gradients [rows[i], ...] of the parts."""
    from jagged_kernels.ops.layout.triton_copies import launch_cat_rows_backward

    users = out_offsets.shape[0] - 1
    every = [n * users if same else n for n, same in zip(rows, shared, strict=True)]
    parts = launch_cat_rows_backward(d_out, offsets, shared, out_offsets, every)
    return [
        part.unflatten(0, (users, n)).sum(0) if same else part
        for part, n, same in zip(parts, rows, shared, strict=True)
    ]


def _empty_cat(
    values: Sequence[Tensor],
    offsets: Sequence[Tensor],
    shared: Sequence[bool],
    out_offsets: Tensor,
    tokens: int,
) -> Tensor:
    return values[0].new_empty((tokens, *values[0].shape[1:]))


def _empty_parts(
    d_out: Tensor,
    offsets: Sequence[Tensor],
    shared: Sequence[bool],
    out_offsets: Tensor,
    rows: Sequence[int],
) -> list[Tensor]:
    return [d_out.new_empty((n, *d_out.shape[1:])) for n in rows]


cat_rows = define_op(_cat_rows, fake=_empty_cat)
cat_rows_backward = define_op(_cat_rows_backward, fake=_empty_parts)


def _save(inputs: tuple[Any, ...], output: Tensor) -> tuple[Any, ...]:
    values, offsets, shared, out_offsets, _ = inputs
    return (shared, [part.shape[0] for part in values], out_offsets, *offsets)


def _gradient(saved: Sequence[Any], wanted: Sequence[Any], d_out: Tensor) -> tuple[list[Tensor]]:
    shared, rows, out_offsets, *offsets = saved
    return (call(cat_rows_backward, d_out, offsets, shared, out_offsets, rows),)


define_gradient(cat_rows, save=_save, gradient=_gradient)
