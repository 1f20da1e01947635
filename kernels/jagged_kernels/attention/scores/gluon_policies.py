"""Whether Gluon compiles a policy of a user's own: asked before Hopper's kernels are chosen.

A policy is written in Triton, where blocks have no layout. In Gluon each new one needs one, so that
`tl.zeros_like`, `tl.full` or `tl.arange` compile in the plain kernels alone; and which kernels take
a call depends on how long its users are.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource

from jagged_kernels.schedule.policy.hopper import forward_config

# Also where there is no such GPU: no driver is asked.
_TARGET = GPUTarget("cuda", 90, 32)
# Of head_dim 64. Other tiles differ in sizes, which a function of each score does not see.
_CONFIG = forward_config(64)


def weight_refusal(weight: Any) -> str | None:
    """Why the kernels that call a policy's `weight` cannot be compiled, in words; None if they
    can."""
    return _refusal("weight", weight, None)


def d_score_refusal(d_score: Any) -> str | None:
    """The same of `d_score`."""
    return _refusal("d_score", None, d_score)


@cache
def _refusal(name: str, weight: Any, d_score: Any) -> str | None:
    """Compiles once in a process, and what compiles is in Triton's cache for the next ones."""
    signature = {"out_ptr": "*fp32", "number": "fp32"}
    constants = {"C": _CONFIG, "WEIGHT": weight, "D_SCORE": d_score}
    source = GluonASTSource(
        fn=_policy_kernel,
        signature={**signature, **dict.fromkeys(constants, "constexpr")},
        constexprs=constants,
    )
    try:
        triton.compile(source, target=_TARGET, options={"num_warps": _CONFIG.warps})
    except OSError:
        # Of Triton's cache on disk: it says nothing of the policy.
        raise
    except Exception as error:
        # The compiler's, its passes', the assembler's, or what a constant of the policy raises. If
        # the plain kernels cannot compile it either, the call raises.
        return f"its {name} cannot be compiled by Gluon: {_first_line(error)}"
    return None


def _first_line(error: BaseException) -> str:
    """Of what went wrong: errors around it say where, line by line of source."""
    while error.__cause__ is not None:
        error = error.__cause__
    said = getattr(error, "error_message", None) or str(error)
    return said.strip().split("\n")[0] or type(error).__name__


@gluon.jit
def _policy_kernel(
    out_ptr, number, C: gl.constexpr, WEIGHT: gl.constexpr, D_SCORE: gl.constexpr
):  # fmt: skip
    """Calls a policy's functions on a consumer's scores, and uses what comes, as the kernels do. It
    is compiled, and never launched."""
    ROWS: gl.constexpr = C.part_q
    BLOCK: gl.constexpr = C.block
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [C.warps, 1], [16, BLOCK, 16])
    FACTOR: gl.constexpr = gl.DotOperandLayout(0, SCORES, 2)
    scores = gl.full([ROWS, BLOCK], number, gl.float32, SCORES)
    if WEIGHT is not None:
        results = WEIGHT(scores)
        masked = gl.where(scores < number, results, 0.0)
        # Blocks with a mask and those without take turns in a loop.
        gl.static_assert(masked.dtype == results.dtype, "weights must be floating point numbers")
        # As a product with V takes them.
        results = gl.convert_layout(results.to(gl.bfloat16), FACTOR)
        results = gl.convert_layout(results, SCORES)
    else:
        results = D_SCORE(scores, gl.full_like(scores, number)) * scores
    query = gl.expand_dims(gl.arange(0, ROWS, gl.SliceLayout(1, SCORES)), 1)
    key = gl.expand_dims(gl.arange(0, BLOCK, gl.SliceLayout(0, SCORES)), 0)
    gl.store(out_ptr + query * BLOCK + key, results.to(gl.float32))
