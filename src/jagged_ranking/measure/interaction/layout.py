"""A jagged batch, and the forms that its tensors take for those who do not read it as it is."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from jagged_kernels import Jagged2Tensor, JaggedTensor, lengths_to_offsets
from jagged_kernels.tensors.jagged2 import jagged2_offsets
from jagged_ranking.measure.workloads import Workload


@dataclass(frozen=True)
class Form:
    """Another layout of a tensor: `to` makes it of ours, `back` is the way back."""

    to: Callable[[Tensor], Tensor]
    back: Callable[[Tensor], Tensor]


SAME = Form(lambda x: x, lambda x: x)


class Layout:
    """The users of a workload on a device; makes tensors, the same at every run.

    Attributes:
        users, tokens, longest: B, T and the longest history.
        columns: D.
        scores: the sum of n_b ** 2.
        size: bytes of a number.
        lengths: [B] int64 on the device.
        offsets: [B + 1] int64 on the device.
    """

    def __init__(self, workload: Workload, device: torch.device) -> None:
        lengths = workload.draw_lengths()
        self.users = workload.users
        self.longest = workload.max_len
        self.columns = workload.head_dim
        self.dtype = workload.dtype
        self.size = workload.dtype.itemsize
        self.tokens = int(lengths.sum())
        self.scores = int(lengths.square().sum())
        self.on_host = lengths
        self.lengths = lengths.to(device)
        self.offsets = lengths_to_offsets(lengths).to(device)
        self.matrix_offsets = jagged2_offsets(self.offsets)
        self.device = device
        self.generator = torch.Generator(device).manual_seed(workload.seed + 1)

    def random(self, *shape: int) -> Tensor:
        """Standard normal."""
        options: dict[str, Any] = {"generator": self.generator, "device": self.device}
        return torch.randn(*shape, dtype=torch.float32, **options).to(self.dtype)

    def integers(self, high: int, *shape: int) -> Tensor:
        """int64 from 0 to high - 1."""
        return torch.randint(0, high, shape, generator=self.generator, device=self.device)

    def distinct(self, columns: int) -> Tensor:
        """[T, columns] of which no two are equal in one column of a user: which of equal numbers
        is the largest, and so has the gradient, differs from peer to peer."""
        prime = self.longest
        while any(prime % factor == 0 for factor in range(2, math.isqrt(prime) + 1)):
            prime += 1
        user = self.user_of_token()
        place = torch.arange(self.tokens, device=self.device) - self.offsets[user]
        steps = 1 + self.integers(max(prime - 1, 1), self.users, columns)
        ranks = (1 + place)[:, None] * steps[user] % prime
        # Consecutive numbers of bfloat16 from 1 / 128 on.
        return (ranks + 0x3C00).to(torch.int16).view(torch.bfloat16).to(self.dtype)

    def user_of_token(self) -> Tensor:
        """[T]."""
        users = torch.arange(self.users, device=self.device)
        return users.repeat_interleave(self.lengths, output_size=self.tokens)

    def jagged(self, values: Tensor) -> JaggedTensor:
        return JaggedTensor(values, self.offsets, validate=False)

    def jagged2(self, values: Tensor) -> Jagged2Tensor:
        return Jagged2Tensor(values, self.offsets, self.matrix_offsets)

    def exists(self) -> Tensor:
        """[B, longest] bool: which positions of a padded batch are tokens."""
        return positions(self.lengths, self.longest)

    def padded(self, value: float = 0.0) -> Form:
        """[T, ...] as [B, longest, ...]."""
        return masked(self.exists, value)

    def squares(self, value: float = 0.0) -> Form:
        """[scores] as [B, longest, longest], by indices: a mask may have too many elements."""
        shape = (self.users, self.longest, self.longest)

        def index() -> Tensor:
            users = torch.arange(self.users, device=self.device)
            user = users.repeat_interleave(self.lengths**2, output_size=self.scores)
            place = torch.arange(self.scores, device=self.device) - self.matrix_offsets[user]
            n = self.lengths[user]
            return (user * self.longest + place // n) * self.longest + place % n

        def to(values: Tensor) -> Tensor:
            padded = values.new_full((math.prod(shape),), value)
            return padded.index_put_((index(),), values).view(shape)

        return Form(to, lambda padded: padded.reshape(-1)[index()])

    def squares_bytes(self, count: int) -> int:
        """Of `count` tensors [B, longest, longest]."""
        return count * self.users * self.longest**2 * self.size

    def scores_like(self) -> Jagged2Tensor:
        """The layout of scores, without memory for any."""
        return self.jagged2(
            torch.zeros((), dtype=self.dtype, device=self.device).expand(self.scores)
        )

    def nested(self) -> Form:
        """[T, ...] as PyTorch's nested tensor of jagged layout."""
        shortest, offsets = int(self.on_host.min()), self.offsets

        def to(values: Tensor) -> Tensor:
            return torch.nested.nested_tensor_from_jagged(
                values, offsets, min_seqlen=shortest, max_seqlen=self.longest
            )

        return Form(to, lambda nested: nested.values())


def positions(lengths: Tensor, longest: int) -> Tensor:
    """[B, longest] bool: which positions are below the length."""
    return torch.arange(longest, device=lengths.device) < lengths[:, None]


def masked(mask: Callable[[], Tensor], value: float = 0.0) -> Form:
    """Rows where a mask is true; `value` elsewhere. The mask is made where it is needed: whoever
    is weighed holds none."""

    def to(values: Tensor) -> Tensor:
        here = mask()
        padded = values.new_full((*here.shape, *values.shape[1:]), value)
        padded[here] = values
        return padded

    return Form(to, lambda padded: padded[mask()])
