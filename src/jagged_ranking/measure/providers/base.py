"""What a provider is: a way to compute the attention of a batch, and what to know about it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from jagged_ranking.measure.workloads import Batch, Workload

FORWARD = "forward"
TRAINING = "forward+backward"
MODES = (FORWARD, TRAINING)


class Unavailable(Exception):
    """This provider cannot run here. `status` is "missing" or "unsupported"."""

    def __init__(self, status: str, message: str) -> None:
        super().__init__(message)
        self.status = status


@dataclass(kw_only=True)
class Prepared:
    """A batch in the form that one provider reads, ready to be timed.

    Args:
        forward: the attention; nothing else happens in it. Holds its own tensors and not the
            batch, so that the memory of a provider is the memory of its own inputs.
        inputs: the leaves q, k, v in the provider's layout.
        grad_output: the gradient of what `forward` returns, in its layout.
        to_tokens: (batch, a tensor of histories in the provider's layout) -> [T, H, D].
        to_queries: the same for output and dq, where queries have a layout of their own; as
            `to_tokens` when None.
        held: further tensors that exist before the call (masks, offsets).
        corrections: factors on output, dq, dk and dv before they are compared with the
            reference, for a provider that computes another normalisation.
        learned: further leaves that get a gradient: tables of biases.
        builds: op -> a call that builds what `forward` reads besides q, k, v (a schedule, a
            block mask). Timed as rows of their own.
        config: what a results row should say, e.g. tile sizes.
    """

    forward: Callable[[], Tensor]
    inputs: tuple[Tensor, Tensor, Tensor]
    grad_output: Tensor
    to_tokens: Callable[[Batch, Tensor], Tensor]
    to_queries: Callable[[Batch, Tensor], Tensor] | None = None
    held: tuple[Tensor, ...] = ()
    corrections: tuple[float, float, float, float] = (1.0, 1.0, 1.0, 1.0)
    learned: tuple[Tensor, ...] = ()
    builds: Mapping[str, Callable[[], object]] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)

    def run(self, mode: str) -> tuple[Tensor, ...]:
        """Do the work of `mode` once: (output,), or (output, dq, dk, dv), and of `learned`."""
        if mode == FORWARD:
            with torch.no_grad():
                return (self.forward(),)
        out = self.forward()
        leaves = (*self.inputs, *self.learned)
        return (out.detach(), *torch.autograd.grad(out, leaves, self.grad_output))

    def compare_as(self, batch: Batch, mode: str) -> tuple[Tensor, ...]:
        """`run` in the layout and the normalisation of the reference, float32."""
        to_queries = self.to_queries or self.to_tokens
        convert = (to_queries, to_queries, self.to_tokens, self.to_tokens)
        found = self.run(mode)
        parts = zip(found, convert, self.corrections, strict=False)
        of_tokens = (to(batch, result).float() * factor for result, to, factor in parts)
        return (*of_tokens, *found[len(convert) :])


@dataclass(frozen=True, kw_only=True)
class Provider:
    """One way to compute attention over a batch.

    Args:
        name: as in the results.
        description: one sentence on what it computes and on what it spends padding.
        prepare: batch -> Prepared; raises Unavailable.
        padded: it works on padded tensors.
        padding_attends: it has no mask, so that padded (zero) keys take part in the softmax.
        dense_queries: it is prepared for target attention too, not for self-attention only.
        softmax: it is prepared for softmax attention.
        hstu: it is prepared for HSTU's attention.
        softmax_instead: of HSTU's workloads it computes the softmax attention, and is checked
            against that.
        forward_only: it has no gradient.
        tried_apart: kernels of others that have been seen to break a GPU: see `measure.trial`.
        lacks: what a workload asks for that it does not have, in a line; "" where it has all.
        bytes_beyond_inputs: (workload, mode) -> a lower bound, to refuse in time.
    """

    name: str
    description: str
    prepare: Callable[[Batch], Prepared]
    padded: bool = False
    padding_attends: bool = False
    dense_queries: bool = False
    softmax: bool = True
    hstu: bool = False
    softmax_instead: bool = False
    forward_only: bool = False
    tried_apart: bool = False
    lacks: Callable[[Workload], str] = lambda workload: ""
    bytes_beyond_inputs: Callable[[Workload, str], int] = lambda workload, mode: 0

    def takes(self, workload: Workload) -> bool:
        """Whether it is prepared for this kind of attention."""
        if workload.hstu is not None:
            return self.hstu
        return self.softmax and (self.dense_queries or workload.queries is None)

    def bytes_needed(self, workload: Workload, mode: str) -> int:
        """A lower bound on what has to be allocated, padded inputs included."""
        inputs = 2 * (padded_bytes(workload) + query_bytes(workload)) if self.padded else 0
        return inputs + self.bytes_beyond_inputs(workload, mode)


def padded_bytes(workload: Workload) -> int:
    """Bytes of one padded tensor of histories [B, H, Lmax, D]."""
    w = workload
    return w.users * w.heads * w.max_len * w.head_dim * w.dtype.itemsize


def query_bytes(workload: Workload) -> int:
    """Bytes of the queries of a padded model: [B, H, Lmax, D], or [B, H, N, D]."""
    return padded_bytes(workload) * (workload.queries or workload.max_len) // workload.max_len


def leaves(*tensors: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v as leaves of a graph, sharing the storage of what they are made of."""
    q, k, v = (x.detach().requires_grad_() for x in tensors)
    return q, k, v


def need_cuda(device: torch.device, what: str) -> None:
    if device.type != "cuda":
        raise Unavailable("unsupported", f"{what} needs a CUDA device")


def need_half(dtype: torch.dtype, what: str) -> None:
    if dtype not in (torch.float16, torch.bfloat16):
        name = str(dtype).removeprefix("torch.")
        raise Unavailable("unsupported", f"{what} takes float16 or bfloat16, not {name}")
