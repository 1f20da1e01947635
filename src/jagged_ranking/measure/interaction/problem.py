"""What an operation is measured by: a problem, what it costs at least, who else solves it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from jagged_ranking.measure.interaction.layout import SAME, Form, Layout
from jagged_ranking.measure.providers.base import FORWARD, Unavailable, need_cuda
from jagged_ranking.measure.providers.optional import find

FBGEMM_MODULES = ("fbgemm_gpu.sll.triton", "fbgemm_gpu.sll.triton_sll")
Outputs = Tensor | tuple[Tensor, ...]


@dataclass(frozen=True)
class Peer:
    """Another way to compute the same.

    Args:
        forward: inputs in its forms -> its outputs. Nothing else happens in it.
        inputs: the form of each input; all as ours when empty.
        outputs: the form of each output; all as ours when empty.
        needs: a lower bound of bytes, to refuse in time.
        joined: it takes one tensor, all inputs one behind the other.
    """

    forward: Callable[..., Outputs]
    inputs: Sequence[Form] = ()
    outputs: Sequence[Form] = ()
    needs: int = 0
    joined: bool = False


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One operation on one batch.

    Args:
        call: (backend, *inputs) -> outputs: our operation.
        inputs: floating ones get gradients.
        outputs: the forms of our outputs, for the comparison.
        bytes: forward, backward: each input that is needed read once, each result written once.
        flops: forward, backward; 0 where memory alone sets the limit.
        peers: name -> peer, or why there is none.
        builds: op -> a call that builds what ours reads besides its inputs (a schedule), once a
            batch. Timed as rows of their own.
    """

    call: Callable[..., Outputs]
    inputs: tuple[Tensor, ...]
    outputs: Sequence[Form] = ()
    bytes: tuple[float, float]
    flops: tuple[float, float] = (0.0, 0.0)
    peers: Mapping[str, Peer | Unavailable] = field(default_factory=dict)
    builds: Mapping[str, Callable[[], object]] = field(default_factory=dict)

    def ours(self, backend: Any = "auto") -> Peer:
        """Our operation as one of those who are compared."""
        return Peer(lambda *inputs: self.call(backend, *inputs), outputs=self.outputs)


class Ready:
    """A peer with inputs and gradients of its outputs in its forms, ready to be timed.

    Args:
        peer: who computes.
        inputs: ours.
        gradients: of our outputs; for integers, what is there does not matter.
    """

    def __init__(self, peer: Peer, inputs: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
        self.forward = peer.forward
        self.rows = [len(x) for x in inputs] if peer.joined else None
        given = [torch.cat(list(inputs))] if peer.joined else inputs
        self.input_forms = list(peer.inputs) or [SAME] * len(given)
        self.output_forms = list(peer.outputs) or [SAME] * len(gradients)
        self.inputs = [
            form.to(x).detach().requires_grad_(x.is_floating_point())
            for form, x in zip(self.input_forms, given, strict=True)
        ]
        self.gradients = [f.to(g) for f, g in zip(self.output_forms, gradients, strict=True)]

    def run(self, mode: str) -> tuple[Tensor, ...]:
        """Do the work of `mode` once: outputs, or outputs and the gradients of the inputs."""
        if mode == FORWARD:
            with torch.no_grad():
                return several(self.forward(*self.inputs))
        outputs = several(self.forward(*self.inputs))
        found = torch.autograd.grad(outputs, self.inputs, self.gradients)
        return (*(out.detach() for out in outputs), *found)

    def compare_as(self, mode: str) -> list[Tensor]:
        """`run` in our layout, float32."""
        forms = [*self.output_forms, *self.input_forms]
        found = [f.back(x) for f, x in zip(forms, self.run(mode), strict=False)]
        if self.rows is not None and mode != FORWARD:
            found[-1:] = found[-1].split(self.rows)
        return [x.float() for x in found]

    def tensors(self) -> list[Tensor]:
        """What exists before a run."""
        return [*self.inputs, *self.gradients]


def several(outputs: Outputs) -> tuple[Tensor, ...]:
    """Outputs as a tuple."""
    return outputs if isinstance(outputs, tuple) else (outputs,)


def fbgemm(
    b: Layout, function: str, peer: Callable[[Callable[..., Outputs]], Peer]
) -> Peer | Unavailable:
    """A peer made of one of FBGEMM's Triton operators (fbgemm_gpu.sll), where it is installed."""
    try:
        found = find(function, FBGEMM_MODULES, "fbgemm_gpu")
        need_cuda(b.device, "FBGEMM sll")
    except Unavailable as error:
        return error
    return peer(found)
