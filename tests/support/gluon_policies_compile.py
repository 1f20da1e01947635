"""Which kernels take policies of one's own on Hopper, asked where there is none.

    python -c "import gluon_policies_compile; gluon_policies_compile.main()"

In a process of its own, without the interpreter, which would be in the way of what Triton itself
has in Python.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
import triton
import triton.language as tl
from hopper_compile import compile_kernel
from score_policies import OWN, d_squared, squared
from triton.compiler.errors import CompilationError
from triton.language.extra import libdevice

from jagged_kernels import PointwiseScores, SiLU
from jagged_kernels.attention import choice

COMPILER = "jagged_kernels.attention.scores.gluon_policies"


@triton.jit
def of_zeros_like(score):
    return tl.maximum(score, tl.zeros_like(score))


@triton.jit
def of_arange(score):
    return score + 0.0 * tl.arange(0, score.shape[1])[None, :]


@triton.jit
def of_helper(score):
    return score + of_zeros_like(score)


@triton.jit
def tanh(score):
    return libdevice.tanh(score) + tl.sigmoid(score) * tl.where(score < 0.0, tl.exp(score), 1.0)


@triton.jit
def not_a_number(score):
    return score > 0.0


@triton.jit
def d_of_zeros_like(score, d_weight):
    return tl.where(score > 0.0, d_weight, tl.zeros_like(d_weight))


def _own(weight: Any, d_score: Any) -> PointwiseScores:
    return PointwiseScores(weight.__name__, torch.relu, weight, d_score)


# name: policy.
ASKED: dict[str, Any] = {
    "arithmetic": OWN,
    "functions": _own(tanh, d_squared),
    "zeros_like": _own(of_zeros_like, d_squared),
    "arange": _own(of_arange, d_squared),
    "zeros_like in a helper": _own(of_helper, d_squared),
    "no number": _own(not_a_number, d_squared),
    "d_score": _own(squared, d_of_zeros_like),
    "both": _own(of_zeros_like, d_of_zeros_like),
}


def main() -> None:
    """Prints, as JSON, of each policy who takes its passes, why, and how often it compiled; and the
    policies that Hopper's kernels themselves do not compile for, by pass."""
    choice.is_hopper = lambda device: device.type == "cuda"
    real, compiled = triton.compile, list[str]()

    def counted(source: Any, **options: Any) -> Any:
        compiled.append(source.name)
        return real(source, **options)

    triton.compile = counted
    for policy in ("", SiLU().key):
        _takers(policy)
    assert COMPILER not in sys.modules
    found = {}
    for name, scores in ASKED.items():
        compiled.clear()
        takers, said = _takers(scores.key), _refusals(scores.key)
        # Those for Hopper are no family of other GPUs.
        assert _takers(scores.key, "cpu") == ["general"] * 3
        found[name] = {"takers": takers, "said": said, "compiled": len(compiled)}
    assert COMPILER in sys.modules
    failing = {
        of_pass: [name for name in ASKED if _fails(of_pass, ASKED[name].key)]
        for of_pass in ("forward", "dkv")
    }
    print(json.dumps({"found": found, "failing": failing}))


def _asked(of_pass: choice.Pass, policy: str, dim: int, dtype: torch.dtype, device: str) -> Any:
    scores = "pointwise" if policy else "softmax"
    return choice.Asked(
        of_pass, torch.device(device), dtype, dim, dim, 128, 128, shared=False, scores=scores,
        policy=policy,
    )  # fmt: skip


def _takers(policy: str, device: str = "cuda:0") -> list[str]:
    """Of forward, dq and dkv, the first that would at any length; the same for both dtypes."""
    found = []
    for of_pass in ("forward", "dq", "dkv"):
        of_dtypes = {
            choice.able_families(*_asked(of_pass, policy, 128, dtype, device))[0][0].name
            for dtype in (torch.float16, torch.bfloat16)
        }
        found.append(*of_dtypes)
    return found


def _refusals(policy: str) -> list[list[str]]:
    families = (choice.HOPPER_FORWARD, choice.HOPPER_DQ, choice.HOPPER_DKV)
    return [
        choice.refusals(
            family, _asked(family.passes[0], policy, 128, torch.float16, "cuda:0")
        )
        for family in families
    ]  # fmt: skip


def _fails(of_pass: str, policy: str) -> bool:
    try:
        compile_kernel(of_pass, 64, policy)
    except CompilationError:
        return True
    return False
