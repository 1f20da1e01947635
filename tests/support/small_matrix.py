"""Every kernel once, on small batches: what `make sanitize` runs under compute-sanitizer.

    compute-sanitizer --tool memcheck python tests/support/small_matrix.py [part ...]

Results are checked elsewhere; here a tool looks at every access to memory.
"""

from __future__ import annotations

import math
import sys
from typing import Any

import interaction_cases
import product_cases
import torch
from attention_cases import Case, Inputs, run
from operation_cases import Call, results

from jagged_kernels import JaggedTensor, RelativePositionBias, jagged_attention

# Empty users, one token, block edges; the long ones' lengths are odd on purpose.
SHORT = [3, 0, 1, 64, 65, 130]
LONG = {64: [1027, 1024], 128: [259, 300]}  # lengths from which Hopper's own kernels take over
MASKS = ({}, {"causal": True}, {"window": (20, 5)})
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
INTERACTION = (3, 0, 40, 1, 130)


def short() -> None:
    for dtype, dim, mask in zip(DTYPES, (32, 64, 80), MASKS, strict=True):
        inputs = Case(SHORT, heads=4, kv_heads=2, dim=dim, mask=mask).inputs(dtype)
        _run_twice(inputs, mask)
        # The same offsets of queries and keys: users of a few tokens have kernels of their own.
        _run_twice(inputs.with_shared_offsets(), mask)


def long() -> None:
    for dim, lengths in LONG.items():
        for mask in MASKS:
            case = Case(lengths, heads=2, kv_heads=1, dim=dim, mask=mask)
            _run_twice(case.inputs(torch.bfloat16), mask)


def _run_twice(inputs: Inputs, mask: dict[str, Any]) -> None:
    """Then with NaN in a key, so that what it touches is computed again."""
    run("triton", inputs, tile=None, **mask)
    inputs.k[inputs.k.shape[0] // 2] = math.nan
    run("triton", inputs, tile=None, **mask)


def target() -> None:
    lengths = [700, 0, 5, 64]
    for dtype, dim in zip(DTYPES, (32, 64, 128), strict=True):
        inputs = Case(lengths, dim=dim).inputs(dtype)
        k = JaggedTensor(inputs.k.requires_grad_(), inputs.k_offsets)
        v = k.with_values(inputs.v.requires_grad_())
        queries = torch.randn(len(lengths), 3, 2, dim, device="cuda", dtype=dtype)
        jagged_attention(queries.requires_grad_(), k, v).sum().backward()


def bias() -> None:
    inputs = Case(SHORT, dim=32).inputs(torch.float32)
    q = JaggedTensor(inputs.q.requires_grad_(), inputs.q_offsets)
    table = torch.randn(8, 2, device="cuda", requires_grad=True)
    position = RelativePositionBias(table, max_distance=20)
    jagged_attention(q, q, q, bias=position, dropout_p=0.1).values.sum().backward()


def elementwise() -> None:
    for operation in interaction_cases.OPERATIONS.values():
        _run(operation.call, operation.tensors(INTERACTION, columns=24))


def products() -> None:
    for call, tensors in product_cases.OPERATIONS.values():
        _run(call, tensors(INTERACTION))


def _run(call: Call, tensors: dict[str, torch.Tensor]) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        cast = {
            name: t.to("cuda", dtype if t.is_floating_point() else t.dtype)
            for name, t in tensors.items()
        }
        results(call, "triton", cast)


PARTS = {part.__name__: part for part in (short, long, target, bias, elementwise, products)}

if __name__ == "__main__":
    for name in sys.argv[1:] or PARTS:
        PARTS[name]()
        torch.cuda.synchronize()
        print("done:", name)
