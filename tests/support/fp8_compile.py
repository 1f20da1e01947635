"""The kernels for FP8 compiled for Hopper, without one.

    python -c "import fp8_compile; fp8_compile.main()"

prints what of each forward is of interest in what it was assembled to, as JSON. In a process of its
own, without the interpreter.
"""

from __future__ import annotations

import json
import re
from typing import Any

import triton
from hopper_compile import TARGET, compiled_for
from overwritten_operands import overwritten_operands
from ptxas_mistakes import disassembled
from sass import INSTRUCTION
from triton.compiler import ASTSource
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource
from undefined_registers import undefined_registers

from jagged_kernels.attention.hopper import fp8_forward, fp8_quantise
from jagged_kernels.attention.plans import AttentionShape
from jagged_kernels.schedule.policy import hopper

_INSTRUCTION = re.compile(INSTRUCTION)
_LEFT_FACTOR = re.compile(r"R\d+, R(\d+), gdesc")


def compile_forward(dim: int, limits: tuple[bool, bool]) -> bytes:
    """Its cubin. `limits`: has the mask a left and a right one; with one of them, tiles are counted
    out, and with both, heads share keys and scores are negated."""
    kernel: Any = fp8_forward._fp8_forward_kernel
    config = hopper.fp8_config(dim)
    counted = limits[0] != limits[1]
    config = hopper.counted(config) if counted else config
    group = 4 if all(limits) else 1
    strides: list[Any] = [8 * dim, dim] * 4
    shape = AttentionShape(
        8, group, dim, dim, dim, dim, config.tile_q, 1, config.block, *limits, "ieee", *strides
    )

    def blocks(*box: int) -> str:
        layout = gl.NVMMASharedLayout.get_default_for(list(box), gl.float8e4nv)
        return f"tensordesc<fp8e4nv{list(box)},{layout!r}>"

    kinds: dict[str, Any] = {
        "o_ptr": "*bf16", "lse2_ptr": "*fp32", "scales": ("*fp32",) * 3, "rows_ptr": "*i32",
        "row_count": "i32", "taken_ptr": "*i32", "q_blocks": blocks(config.part_q, 1, dim),
        "k_blocks": blocks(config.block, 1, dim), "v_blocks": blocks(dim, config.block),
        "scale_log2": "fp32", "left": "i32", "right": "i32",
    }  # fmt: skip
    constants = {"S": shape, "C": config, "NEGATE": all(limits)}
    if not counted:
        constants["taken_ptr"] = None
    names = kernel.arg_names
    source = GluonASTSource(
        fn=kernel,
        signature={name: "constexpr" if name in constants else kinds[name] for name in names},
        constexprs={(names.index(name),): value for name, value in constants.items()},
    )
    return compiled_for(source, config).asm["cubin"]


def compile_numbers(dim: int) -> None:
    """The kernels that make numbers in FP8."""
    for kernel in (fp8_quantise._quantise_queries_kernel, fp8_quantise._quantise_keys_kernel):
        names = kernel.arg_names
        constants = {name: 2 * dim for name in names if name.isupper()}
        constants |= {"HEADS": 2, "D": dim, "TOKENS": 128}
        constants = {name: value for name, value in constants.items() if name in names}
        outputs = {"out_ptr": "*fp8e4nv", "v_t_ptr": "*fp8e4nv"}

        def kind(name: str, constants: Any = constants, outputs: Any = outputs) -> str:
            if name in constants:
                return "constexpr"
            if name.endswith("scales_ptr"):
                return "*fp32"
            return outputs.get(name, "*bf16" if name.endswith("_ptr") else "i32")

        source = ASTSource(
            fn=kernel,
            signature={name: kind(name) for name in names},
            constexprs={(names.index(name),): value for name, value in constants.items()},
        )
        compiled = triton.compile(source, target=TARGET, options={"num_warps": 4})
        assert "cvt.rn.satfinite.e4m3x2" in compiled.asm["ptx"]


def facts(cubin: bytes) -> dict[str, Any]:
    """Of a forward: how often some instructions stand in it, and what is wrong with it."""
    sass = disassembled(cubin)
    operations = [line["operation"].split(".")[0] for line in _INSTRUCTION.finditer(sass)]
    names = ("QGMMA", "HGMMA", "SHFL", "STL", "LDL", "STS", "LDS")
    return {
        **{name: operations.count(name) for name in names},
        "undefined": undefined_registers(sass),
        "overwritten": overwritten_operands(sass),
        "in flight": written_in_flight(sass),
        # Tensor cores do not wait for each product: two waits, where the last but one and where the
        # last product is to be done, of both consumers, in the first block and in the loop.
        "waits": operations.count("WARPGROUP"),
    }


def written_in_flight(sass: str) -> list[str]:
    """Instructions that write to the left factor of a product that may not have ended."""
    held: set[int] = set()
    found = []
    for line in _INSTRUCTION.finditer(sass):
        operation, operands = line["operation"], line["operands"] or ""
        if operation.startswith("WARPGROUP.DEPBAR") and operands.endswith("0x0"):
            held.clear()
        elif operation.startswith("QGMMA"):
            if factor := _LEFT_FACTOR.match(operands):
                held |= set(range(int(factor[1]), int(factor[1]) + 4))
        elif not operation.startswith(("ST", "RED", "SYNCS", "BAR", "ISETP", "FSETP", "PLOP")):
            result = re.match(r"R(\d+)\b", operands)
            if result and int(result[1]) in held:
                found.append(f"{line['address']}: {operation} {operands}")
    return found


def main() -> None:
    found = {}
    for dim in (64, 128):
        compile_numbers(dim)
        for limits in ((False, False), (False, True), (True, True)):
            found[f"{dim}, limits {limits}"] = facts(compile_forward(dim, limits))
    print(json.dumps(found))
