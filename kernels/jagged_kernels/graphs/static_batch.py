"""The inputs of a captured step: tensors of a bucket's size that stay where they are, and what of a
batch is copied into them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from jagged_kernels.graphs.buckets import Bucket
from jagged_kernels.tensors.jagged import JaggedTensor

Inputs = Mapping[str, JaggedTensor | Tensor]
# Of a tensor that is jagged the number of its group, else:
_OF_USERS, _SCALAR = -1, -2


class Column(NamedTuple):
    """What all batches of a step have in common of one input.

    Fields:
        group: which offsets it has, by their number; negative where it is not jagged.
        dtype, shape: of its values, the shape without the first dimension.
    """

    group: int
    dtype: torch.dtype
    shape: tuple[int, ...]


class Form(NamedTuple):
    """What batches of one step have in common, and how large this one is.

    Fields:
        columns: of each input, by its name.
        offsets: of each group.
        tokens: of each group.
        users, device: of all inputs.
    """

    columns: dict[str, Column]
    offsets: tuple[Tensor, ...]
    tokens: tuple[int, ...]
    users: int
    device: torch.device


def form_of(batch: Inputs) -> Form:
    """Looks at a batch, at no contents of it.

    Raises:
        TypeError: an input is neither a `JaggedTensor` nor a tensor.
        ValueError: there is no jagged input, inputs differ in users or devices, jagged ones that
            share offsets differ in tokens, or one wants a gradient, which a step keeps to itself.
    """
    if not isinstance(batch, Mapping):
        raise TypeError(f"a batch must map names to tensors, got {type(batch).__name__}")
    columns: dict[str, Column] = {}
    groups: dict[int, int] = {}
    offsets: list[Tensor] = []
    tokens: list[int] = []
    first = next((x for x in batch.values() if isinstance(x, JaggedTensor)), None)
    if first is None:
        raise ValueError(f"a batch must have a JaggedTensor, got {', '.join(batch) or 'nothing'}")
    users, device = len(first), first.values.device
    for name, given in batch.items():
        if isinstance(given, JaggedTensor):
            values = given.values
            if (group := groups.setdefault(id(given.offsets), len(groups))) == len(offsets):
                offsets.append(given.offsets)
                tokens.append(values.shape[0])
            size, wanted, what = values.shape[0], tokens[group], "tokens, as others of its offsets"
            if len(given) != users:
                raise ValueError(f"{name} has {len(given)} users, and others have {users}")
        elif isinstance(given, Tensor):
            values, group = given, _OF_USERS if given.dim() else _SCALAR
            size, wanted = (values.shape[0], users) if values.dim() else (0, 0)
            what = "rows, one a user (or be a number without dimensions)"
        else:
            raise TypeError(f"{name} must be a JaggedTensor or a tensor, got {type(given)}")
        if size != wanted:
            raise ValueError(f"{name} must have {wanted} {what}, got {size}")
        if values.device != device:
            raise ValueError(f"{name} is on {values.device}, and others are on {device}")
        if values.requires_grad:
            raise ValueError(
                f"{name} wants a gradient, and none leaves a step: compute it inside of the step"
            )
        columns[name] = Column(group, values.dtype, tuple(values.shape[1:]))
    return Form(columns, tuple(offsets), tuple(tokens), users, device)


def check_form(columns: Mapping[str, Column], expected: Mapping[str, Column]) -> None:
    """ValueError, of the first input that is not as that of the first batch."""
    if columns == expected:
        return
    for name in [*expected, *columns]:
        here, there = columns.get(name), expected.get(name)
        if here != there:
            raise ValueError(f"{name} is {_said(here)}, and of the first batch {_said(there)}")


def _said(column: Column | None) -> str:
    if column is None:
        return "not there"
    dtype = str(column.dtype).removeprefix("torch.")
    if column.group == _SCALAR:
        return f"{dtype} []"
    of = "B" if column.group == _OF_USERS else f"T{column.group}"
    return f"{dtype} [{', '.join([of, *map(str, column.shape)])}]"


class StaticBatch:
    """Inputs of a bucket's size.

    Attributes:
        inputs: as those of a batch, of `bucket.users` users; padding users have zeros everywhere.
        real: bool [B], whether a user is one of the batch's.
    """

    # What inference mode makes could be filled in no other mode.
    @torch.inference_mode(False)
    def __init__(self, form: Form, bucket: Bucket) -> None:
        self.bucket = bucket
        device = form.device
        self._offsets = [torch.zeros(bucket.users + 1, dtype=x.dtype, device=device)
                         for x in form.offsets]  # fmt: skip
        # Where the offsets of padding users are, from the first one's start on.
        self._reached = [
            reach * torch.arange(1, bucket.users + 1, dtype=x.dtype, device=device)
            for reach, x in zip(bucket.reach, form.offsets, strict=True)
        ]
        self._values: dict[str, Tensor] = {}
        self.inputs: dict[str, JaggedTensor | Tensor] = {}
        for name, column in form.columns.items():
            rows = bucket.users if column.group < 0 else bucket.tokens[column.group]
            shape = () if column.group == _SCALAR else (rows, *column.shape)
            values = torch.zeros(shape, dtype=column.dtype, device=device)
            self._values[name] = values
            self.inputs[name] = values
            if column.group >= 0:
                offsets = self._offsets[column.group]
                self.inputs[name] = JaggedTensor(values, offsets, validate=False)
        self.real = torch.zeros(bucket.users, dtype=torch.bool, device=device)
        self._filled = 0, (0,) * len(bucket.tokens)

    @property
    def nbytes(self) -> int:
        """Of all its tensors."""
        tensors = [*self._values.values(), *self._offsets, *self._reached, self.real]
        return sum(x.nbytes for x in tensors)

    def versions(self) -> dict[str, tuple[int, ...]]:
        """Of each input, and of `real`: PyTorch counts what changes them in place."""
        found = {
            name: (x.values._version, x.offsets._version)
            if isinstance(x, JaggedTensor)
            else (x._version,)
            for name, x in self.inputs.items()
        }
        return {**found, "real": (self.real._version,)}

    @torch.no_grad()
    def fill(self, batch: Inputs, form: Form) -> None:
        """Copies a batch of this bucket, without waiting for the device."""
        users_before, tokens_before = self._filled
        pairs: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = {}
        zeros: dict[torch.dtype, list[Tensor]] = {}

        def copied(source: Tensor, target: Tensor) -> None:
            if source.numel():
                targets, sources = pairs.setdefault(source.dtype, ([], []))
                targets.append(target)
                sources.append(source)

        for name, column in form.columns.items():
            given, values = batch[name], self._values[name]
            source = given.values if isinstance(given, JaggedTensor) else given
            if column.group == _SCALAR:
                copied(source, values)
                continue
            size = source.shape[0]
            copied(source, values[:size])
            before = users_before if column.group == _OF_USERS else tokens_before[column.group]
            if (tail := values[size:before]).numel():
                zeros.setdefault(values.dtype, []).append(tail)
        for offsets, source in zip(self._offsets, form.offsets, strict=True):
            copied(source, offsets[: form.users + 1])
        for targets, sources in pairs.values():  # of one dtype, so that a launch copies many
            torch._foreach_copy_(targets, sources)  # pyright: ignore[reportPrivateImportUsage]
        for tails in zeros.values():
            torch._foreach_zero_(tails)  # pyright: ignore[reportPrivateImportUsage]
        if (form.users, form.tokens) != self._filled:
            self._pad(form)
        self._filled = form.users, form.tokens

    def _pad(self, form: Form) -> None:
        """The offsets of padding users: each has its reach, until there are no tokens left."""
        for offsets, reached, size, tokens in zip(
            self._offsets, self._reached, self.bucket.tokens, form.tokens, strict=True
        ):
            padding = offsets[form.users + 1 :]
            torch.clamp(reached[: len(padding)], max=size - tokens, out=padding)
            padding += tokens
        if form.users != self._filled[0]:
            self.real[: form.users] = True
            self.real[form.users :] = False
