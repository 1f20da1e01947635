"""Every kernel once, on small batches: what `make sanitize` runs under compute-sanitizer.

    compute-sanitizer --tool memcheck python tests/support/small_matrix.py [attention|interaction]

Results are checked elsewhere; here a tool looks at every access to memory.
"""

from __future__ import annotations

import sys

import interaction_cases
import product_cases
import torch
from attention_cases import Case, run
from operation_cases import results

from jagged_kernels import JaggedTensor, RelativePositionBias, jagged_attention

# Empty users, one token, block edges; the long ones' lengths are odd on purpose.
SHORT = [3, 0, 1, 64, 65, 130]
LONG = {64: [1027, 1024], 128: [259, 300]}  # lengths from which Hopper's own kernels take over
MASKS = ({}, {"causal": True}, {"window": (20, 5)})


def attention() -> None:
    for dtype, dim in ((torch.float32, 32), (torch.float16, 64), (torch.bfloat16, 80)):
        for mask in MASKS:
            case = Case(SHORT, heads=4, kv_heads=2, dim=dim, mask=mask)
            run("triton", case.inputs(dtype), tile=None, **mask)
    for dim, lengths in LONG.items():
        for mask in MASKS:
            case = Case(lengths, heads=2, kv_heads=1, dim=dim, mask=mask)
            run("triton", case.inputs(torch.bfloat16), tile=None, **mask)
    _target()
    _bias()


def _target() -> None:
    lengths = [700, 0, 5, 64]
    for dtype, dim in ((torch.float32, 32), (torch.bfloat16, 64), (torch.bfloat16, 128)):
        inputs = Case(lengths, dim=dim).inputs(dtype)
        k = JaggedTensor(inputs.k.requires_grad_(), inputs.k_offsets)
        v = k.with_values(inputs.v.requires_grad_())
        queries = torch.randn(len(lengths), 3, 2, dim, device="cuda", dtype=dtype)
        jagged_attention(queries.requires_grad_(), k, v).sum().backward()


def _bias() -> None:
    inputs = Case(SHORT, dim=32).inputs(torch.float32)
    q = JaggedTensor(inputs.q.requires_grad_(), inputs.q_offsets)
    table = torch.randn(8, 2, device="cuda", requires_grad=True)
    bias = RelativePositionBias(table, max_distance=20)
    out = jagged_attention(q, q, q, bias=bias, dropout_p=0.1)
    out.values.sum().backward()


def interaction() -> None:
    lengths = (3, 0, 40, 1, 130)
    cases = {
        name: (operation.call, operation.tensors(lengths, columns=24))
        for name, operation in interaction_cases.OPERATIONS.items()
    }
    cases |= {
        name: (call, tensors(lengths)) for name, (call, tensors) in product_cases.OPERATIONS.items()
    }
    for call, tensors in cases.values():
        for dtype in (torch.float32, torch.bfloat16):
            cast = {
                name: t.to("cuda", dtype if t.is_floating_point() else t.dtype)
                for name, t in tensors.items()
            }
            results(call, "triton", cast)


if __name__ == "__main__":
    wanted = sys.argv[1:] or ["attention", "interaction"]
    for part in wanted:
        {"attention": attention, "interaction": interaction}[part]()
    torch.cuda.synchronize()
    print("done:", *wanted)
