"""Every rule for tiles fits the shared memory of the GPUs that there are."""

from __future__ import annotations

import pytest
import torch
from processes import run_python

from jagged_kernels import backends
from jagged_kernels.attention.tiles import parts_of_tile

# Of a multiprocessor, what a program can have: A100, and GPUs of compute capability 8.6 and 8.9.
MEMORY = {80: 163 * 1024, 89: 99 * 1024}

COMPILE = """
import sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from jagged_kernels.attention import tiles, triton_backward, triton_forward
from jagged_kernels.attention.bias_launch import BiasShape
from jagged_kernels.attention.triton_blocks import AttentionShape

dtype, dim, capability, small = sys.argv[1], *map(int, sys.argv[2:])
size, precision = (4, "bf16x6") if dtype == "fp32" else (2, "ieee")
rows = 64 // tiles.parts_of_tile(64, dim, size, bool(small))
kernels = {
    triton_forward._forward_kernel: tiles.forward_config,
    triton_backward._dq_kernel: tiles.dq_config,
    triton_backward._dkv_kernel: tiles.small_dkv_config if small else tiles.dkv_config,
}
for kernel, rule in kernels.items():
    config = rule(dim, size, precision)
    strides = [4 * dim, dim] * 4
    shape = AttentionShape(
        4, 1, dim, dim, dim, dim, rows, 1, config.block, False, False, precision, *strides
    )
    names = kernel.arg_names
    constants = {"S": shape, "NEGATE": False, "BIAS": BiasShape()}
    constants |= dict.fromkeys(("bias", "slots", "d_lse2_ptr"))
    constants = {name: value for name, value in constants.items() if name in names}
    pointers = {"lse2_ptr": "*fp32", "delta_ptr": "*fp32", "rows_ptr": "*i32"}

    def kind(name):
        if name in constants:
            return "constexpr"
        if name.endswith("_ptr"):
            return pointers.get(name, "*" + dtype)
        return "fp32" if name.startswith("scale") else "i32"

    source = ASTSource(
        fn=kernel,
        signature={name: kind(name) for name in names},
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={
            (place,): [["tt.divisibility", 16]]
            for place, name in enumerate(names)
            if kind(name).startswith("*")
        },
    )
    target = GPUTarget("cuda", capability, 32)
    print(triton.compile(source, target=target, options=config.options()).metadata.shared)
"""


@pytest.mark.parametrize(
    ("dtype", "dim", "capability"),
    [("bf16", 128, 89), ("bf16", 256, 89), ("fp32", 128, 89), ("fp32", 256, 89), ("fp32", 128, 80)],
)
def test_the_largest_heads_fit(dtype, dim, capability, tmp_path):
    arguments = (dtype, str(dim), str(capability), str(int(capability == 89)))
    result = run_python(COMPILE, *arguments, TRITON_CACHE_DIR=str(tmp_path))
    assert result.returncode == 0, result.stderr[-2000:]
    sizes = [int(line) for line in result.stdout.split()]
    assert len(sizes) == 3
    assert max(sizes) <= MEMORY[capability]


@pytest.mark.parametrize(("memory", "small"), [(227, False), (163, False), (99, True)])
def test_a_device_is_asked_for_its_memory(memory, small, monkeypatch):
    class Properties:
        shared_memory_per_block_optin = memory * 1024

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _device: Properties)
    ask = backends.has_small_memory.__wrapped__
    assert ask(torch.device("cuda")) == small
    assert not ask(torch.device("cpu"))


@pytest.mark.parametrize(
    ("tile", "dim", "element_size", "small", "parts"),
    [
        (64, 256, 2, False, 1),
        (64, 256, 2, True, 2),
        (64, 128, 2, True, 1),
        (64, 128, 4, False, 1),
        (64, 128, 4, True, 2),
        (64, 256, 4, False, 4),
        (16, 256, 4, False, 1),
        (128, 64, 2, False, 2),
    ],
)
def test_parts_of_a_tile(tile, dim, element_size, small, parts):
    assert parts_of_tile(tile, dim, element_size, small) == parts
