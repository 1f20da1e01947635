"""What a score becomes: weights of scores one by one, in place of the softmax.

A policy is a function of a score alone, so that a row of attention needs no maximum, no sum of
exponentials and no second pass: o = sum over visible keys of weight(score) / n * v, as in HSTU
(arXiv 2402.17152, section 3.2). It is said twice: in PyTorch, which is the specification and what
runs on a CPU, and as a pair of Triton functions that the kernels call on their blocks.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from numbers import Real
from typing import Any

import torch
from torch import Tensor

# Of operators, which take a policy by its key: those that users made, as long as a process lives.
_OWN: dict[str, PointwiseScores] = {}


@dataclass(frozen=True)
class PointwiseScores:
    """weight(score) / n in place of softmax; for `jagged_attention(scores=...)`.

    A score is scale * q k^T + bias. Made once, outside of what `torch.compile` traces.

    Attributes:
        name: of the policy, for people.
        reference: the weight of each score in PyTorch: elementwise, differentiable, any floating
            dtype.
        weight: the same as a `triton.jit` function, (score) -> weight on a float32 block. None
            where the triton backend is not used.
        d_score: a `triton.jit` function, (score, d_weight) -> the gradient of the score: d_weight
            times the derivative of `weight`. The kernels for Hopper, which long users have, call
            both through Gluon, where a block of one's own (`tl.zeros_like`, `tl.full`,
            `tl.arange`) needs a layout: what Gluon cannot compile, the plain kernels take, more
            slowly. `explain_attention` says so. Arithmetic and functions of the arguments compile
            in both.
        divide_by: n, at any query; None for the number of keys that the user has (seen or not),
            which does not depend on who else is in the batch.
        key: what operators know it by, the same for the same functions.

    A score of 0 is nothing special: the weight of a pair that the mask hides is 0 whatever
    `weight` says.

    Raises:
        TypeError: `reference` cannot be called, of `weight` and `d_score` there is only one, or
            `divide_by` is no number.
        ValueError: `divide_by` is not a positive number.

    >>> squared = PointwiseScores("squared relu", lambda score: score.relu().square())
    >>> x = JaggedTensor(torch.randn(5, 2, 8), torch.tensor([0, 3, 3, 5]))
    >>> jagged_attention(x, x, x, causal=True, scores=squared)
    JaggedTensor(users=3, values=[5, 2, 8], dtype=torch.float32, device=cpu)
    """

    name: str
    reference: Callable[[Tensor], Tensor]
    weight: Any = None
    d_score: Any = None
    divide_by: float | None = None
    key: str = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not callable(self.reference):
            raise TypeError(f"reference must be a function of scores, got {self.reference!r}")
        if (self.weight is None) != (self.d_score is None):
            raise TypeError(f"scores {self.name!r} need both weight and d_score, or neither")
        check_divisor(self.divide_by)
        # Here, because `torch.compile` cannot hash.
        functions = hash((self.reference, self.weight, self.d_score))
        object.__setattr__(self, "key", f"{self.name} {functions:x}")
        _OWN[self.key] = self

    def __reduce__(self) -> tuple[Any, ...]:
        # Its key is of this process alone.
        functions = (self.reference, self.weight, self.d_score)
        return PointwiseScores, (self.name, *functions, self.divide_by)

    def __deepcopy__(self, memo: dict[int, Any]) -> PointwiseScores:
        # Nothing of it changes, and Triton functions have no copies.
        return self

    def functions(self) -> tuple[Any, Any]:
        """(weight, d_score).

        Raises:
            NotImplementedError: it has none.
        """
        if self.weight is None:
            raise NotImplementedError(
                f"scores {self.name!r} have no Triton functions (weight, d_score); "
                "use backend='native'"
            )
        return self.weight, self.d_score


@dataclass(frozen=True)
class _Known:
    """A policy whose functions are here."""

    divide_by: float | None = None

    def __post_init__(self) -> None:
        check_divisor(self.divide_by)


@dataclass(frozen=True)
class SiLU(_Known):
    """score * sigmoid(score) / n: HSTU's attention (arXiv 2402.17152, equation 2).

    Attributes:
        divide_by: n; None for the number of keys that the user has. HSTU's own code divides by the
            longest length that a batch may have.

    >>> x = JaggedTensor(torch.randn(5, 2, 8), torch.tensor([0, 3, 3, 5]))
    >>> jagged_attention(x, x, x, causal=True, scores=SiLU(divide_by=200))
    JaggedTensor(users=3, values=[5, 2, 8], dtype=torch.float32, device=cpu)
    """

    @property
    def key(self) -> str:
        return "silu"


@dataclass(frozen=True)
class Sigmoid(_Known):
    """sigmoid(score) / n; with a bias of -log(n) and divide_by=1 that of arXiv 2409.04431.

    Attributes:
        divide_by: n; None for the number of keys that the user has.

    >>> x = JaggedTensor(torch.randn(5, 2, 8), torch.tensor([0, 3, 3, 5]))
    >>> jagged_attention(x, x, x, scores=Sigmoid())
    JaggedTensor(users=3, values=[5, 2, 8], dtype=torch.float32, device=cpu)
    """

    @property
    def key(self) -> str:
        return "sigmoid"


Scores = PointwiseScores | SiLU | Sigmoid
_REFERENCES = {"silu": torch.nn.functional.silu, "sigmoid": torch.sigmoid}
# (gradients of weights, scores) -> gradients of scores.
_DERIVATIVES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "silu": torch.ops.aten.silu_backward,
    "sigmoid": lambda d_weights, x: torch.ops.aten.sigmoid_backward(d_weights, x.sigmoid()),
}


def check_scores(scores: Scores, return_lse: bool) -> None:
    if not isinstance(scores, Scores):
        raise TypeError(f"scores must be SiLU, Sigmoid or PointwiseScores, got {scores!r}")
    if return_lse:
        raise ValueError("scores are weights of their own: there is no lse to return")


def check_divisor(divide_by: float | None) -> None:
    if divide_by is None:
        return
    # No tensor, which would be read, and get no gradient.
    if not isinstance(divide_by, Real):
        raise TypeError(f"divide_by must be a number or None, got {type(divide_by).__name__}")
    if not (divide_by > 0 and math.isfinite(divide_by)):
        raise ValueError(f"divide_by must be a positive number or None, got {divide_by}")


def reference_of(key: str) -> Callable[[Tensor], Tensor]:
    """The weight of each score in PyTorch."""
    return _REFERENCES[key] if key in _REFERENCES else _OWN[key].reference


def is_own(key: str) -> bool:
    """Whether a user made this policy, whose functions are not ours."""
    return key in _OWN


def functions_of(key: str) -> tuple[Any, Any]:
    """(weight, d_score) in Triton."""
    if key in _REFERENCES:
        from jagged_kernels.attention.scores import triton_policies

        return getattr(triton_policies, f"{key}_weight"), getattr(triton_policies, f"{key}_d_score")
    return _OWN[key].functions()


def d_scores(key: str, scores: Tensor, d_weights: Tensor) -> Tensor:
    """The gradients of scores from those of their weights, also below autograd."""
    if key in _DERIVATIVES:
        return _DERIVATIVES[key](d_weights, scores)
    backward: Any = torch.func.vjp(reference_of(key), scores)[1]
    return backward(d_weights)[0]
