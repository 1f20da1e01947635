"""No kernel reads a uniform register that nobody has written (see the script): those that did, and
what the script says of made-up instructions."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import undefined_registers
from processes import run_python
from undefined_registers import undefined_registers as look_at

# In a process of its own: compiled for an H100, without one.
COMPILE = """
import json
import sys

sys.path.append(sys.argv[1])

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from ptxas_mistakes import disassembled
from undefined_registers import undefined_registers

from jagged_kernels.attention.meeting import MeetShape
from jagged_kernels.attention.plain import dq
from jagged_kernels.attention.plain.backward_plan import backward_plan
from jagged_kernels.attention.plans import Call
from jagged_kernels.attention.scores.bias_launch import BiasArguments, BiasShape, BiasSlots
from jagged_kernels.attention.split import forward
from jagged_kernels.schedule.policy.plain import dq_config

DIM = 16
LOOKED_UP = {
    "position": (BiasShape(POSITIONS=8, MAX_DISTANCE=20, ADDS=True), ("by_distance", "buckets")),
    "every": (
        BiasShape(POSITIONS=8, MAX_DISTANCE=20, TIMES=12, ADDS=True),
        tuple(name for name in BiasArguments._fields if name not in ("seed", "drop_below")),
    ),
}
SUMMED = ("position",)  # gradients in `BiasSlots`
POINTERS = {"rows_ptr": "*i32", "spans_ptr": "*i32", "buckets": "*i32"}
POINTERS |= dict.fromkeys(
    ("time_starts", "q_times", "k_times", "scores_before", "q_offsets", "k_offsets"), "*i64"
)
NUMBERS = ("time_rate", "time_steps", "drop_below", "keep_scale")


def heads(count):
    return count, DIM, count * DIM, DIM


def split(BIAS, limits):
    call = Call(heads(3), heads(1), heads(1), None, 4, "bf16x6", limits, 0.25)
    plan, _ = forward._plan(call, (16, 1), 64, None, BIAS, MeetShape(), None)
    return forward._split_forward_kernel, plan


def plain_dq(BIAS, limits):
    call = Call(heads(2), heads(2), heads(2), heads(2), 4, "bf16x6", limits, 0.25)
    rest = (2, 64, BIAS, MeetShape(), None, False, False)
    return dq._dq_kernel, backward_plan(call, dq_config, *rest)


def fields(of, given):
    return of(*(
        "fp32" if name in NUMBERS else POINTERS.get(name, "*fp32") if name in given
        else "constexpr"
        for name in of._fields
    ))


def found(which, kind, limits, warps):
    BIAS, given = LOOKED_UP[kind]
    kernel, plan = {"split": split, "dq": plain_dq}[which](BIAS, tuple(limits))
    constants = dict(plan.constants)
    constants |= dict.fromkeys(("meets", "pages_ptr", "page_count", "page_limit"))
    tuples = {"bias": fields(BiasArguments, given), "slots": fields(BiasSlots, SUMMED)}
    names = kernel.arg_names
    signature = {
        name: "constexpr" if name in constants
        else tuples[name] if name in tuples
        else POINTERS.get(name, "*fp32") if name.endswith("_ptr")
        else "fp32" if name.startswith("scale") else "i32"
        for name in names
    }
    values = {(names.index(name),): value for name, value in constants.items() if name in names}
    pointers = [(i,) for i, k in enumerate(signature.values()) if str(k).startswith("*")]
    for name in tuples.keys() & set(names):
        place = names.index(name)
        kinds = list(enumerate(tuples[name]))
        values |= {(place, i): None for i, k in kinds if k == "constexpr"}
        pointers += [(place, i) for i, k in kinds if k.startswith("*")]
    source = ASTSource(
        fn=kernel, signature=signature, constexprs=values,
        attrs={path: [["tt.divisibility", 16]] for path in pointers},
    )
    options = {**plan.options, **({"num_warps": warps} if warps else {})}
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    sass = disassembled(made.asm["cubin"])
    return {"wgmma": sass.count("HGMMA"), "undefined": undefined_registers(sass)}


print(json.dumps([found(*one) for one in json.loads(sys.argv[2])]))
"""
CAUSAL, WINDOW = (False, True), (True, True)
SUPPORT = Path(undefined_registers.__file__).parent


@pytest.mark.parametrize(
    ("kernel", "said"),
    # Three heads of few queries, 64 rows; and a tile of 64 queries.
    [("split", "UIADD3"), ("dq", "HGMMA")],
    ids=["split", "dq"],
)
def test_look_ups_behind_a_mask_at_head_dim_16(kernel, said):
    """With 8 warps ptxas of Triton's makes the error still."""
    asked = [("position", CAUSAL, 0), ("every", WINDOW, 0), ("position", CAUSAL, 8)]
    ran = run_python(COMPILE, str(SUPPORT), json.dumps([(kernel, *one) for one in asked]))
    assert ran.returncode == 0, ran.stderr
    *ours, broken = json.loads(ran.stdout)
    for one in ours:
        assert one["wgmma"] > 10
        assert one["undefined"] == []
    assert any(said in line for line in broken["undefined"])


@pytest.mark.parametrize(
    ("instructions", "found"),
    [
        (["S2UR UR4, SR_CTAID.X", "UIADD3 UR4, UR4, 0x1, URZ"], None),
        (["UIADD3 UR20, UP0, UR20, 0x1, URZ", "UMOV UR20, 0x1"], "0000"),
        (["R2UR UR4, R0", "UIADD3.64 UR6, UR4, 0x1f, URZ"], "0010"),
        (["UIMAD.WIDE UR4, UR3, 0x40, URZ"], "0000"),
        (["UMOV UR3, 0x1", "UIMAD.WIDE UR4, UR3, 0x40, URZ", "IMAD.X R2, RZ, RZ, UR5, P4"], None),
        (["ULDC.64 UR6, c[0x0][0x210]", "@!P0 LDG.E R6, desc[UR6][R2.64+0x14]"], None),
        (["UMOV UR6, 0x1", "@P1 LDG.E R6, desc[UR6][R2.64]"], "0010"),
        (["ULDC.64 UR6, c[0x0][0x210]", "HGMMA.64x8x16.F32 R4, R8, gdesc[UR4].tnspB, R4"], None),
        (["ULDC.64 UR4, c[0x0][0x210]", "HGMMA.64x8x16.F32 R4, R8, gdesc[UR4], R4"], "0010"),
        (["IMAD R4, R2, 0x4, UR9"], "0000"),
        (["VOTEU.ANY UR10, UPT, PT", "FLO.U32 R3, UR10"], None),
        (["IMAD.U32 R7, RZ, RZ, UR9", "FADD R8, -R8, UR9", "MOV R131, UR51"], None),
        (["UMOV UR13, UR47", "UIADD3 UR13, UR4, 0x1, URZ"], "0010"),
        (
            ["UMOV UR4, 0x1", "UMOV UR13, UR47", "UMOV UR13, UR4", "UIADD3 UR6, UR13, UR4, URZ"],
            None,
        ),
        (["UMOV UR13, 0x1", "UMOV UR13, UR47", "UIADD3 UR6, UR13, 0x1, URZ"], "0020"),
        (["R2UR UR4, R63", "UMOV UR5, 0x1", "UIADD3.64 UR6, UR4, 0x1, URZ"], "0020"),
        (
            ["IADD3 R63, P0, R63, 0x1, RZ", "R2UR UR4, R63", "IMAD R2, R3, 0x4, UR4"],
            "0020",
        ),
        (
            [
                "LDS.64 R62, [R1]",
                "IADD3 R63, R63, 0x1, RZ",
                "R2UR UR4, R63",
                "IMAD R2, R3, 0x4, UR4",
            ],
            None,
        ),
        (["SHFL.BFLY PT, R63, R2, 0x1, 0x1f", "R2UR UR4, R63", "IMAD R2, R3, 0x4, UR4"], None),
    ],
    ids=lambda value: value[-1] if isinstance(value, list) else value,
)
def test_what_is_read_before_it_is_written(instructions, found):
    lines = [f"        /*{16 * i:04x}*/   {line} ;" for i, line in enumerate(instructions)]
    said = look_at("\n".join([".section .text", *lines]))
    assert [line.partition(":")[0] for line in said] == ([] if found is None else [found])
