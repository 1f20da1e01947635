"""Hopper's kernels compiled for such a GPU, without one.

    python -c "import hopper_compile; hopper_compile.main()" SUPPORT POLICY

POLICY: the key of a policy, "" for softmax. In a process of its own, without the interpreter.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import triton
from score_policies import OWN
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import compiler
from triton.compiler import ASTSource
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource

from jagged_kernels.attention.hopper import dkv as gluon_dkv
from jagged_kernels.attention.hopper import dq as gluon_dq
from jagged_kernels.attention.hopper import exact, exact_backward, one_pass
from jagged_kernels.attention.hopper import forward as gluon_forward
from jagged_kernels.attention.hopper.policies import in_gluon
from jagged_kernels.attention.meeting import MeetArguments, MeetShape
from jagged_kernels.attention.plans import AttentionShape, Call
from jagged_kernels.attention.scores.bias_launch import NO_BIAS
from jagged_kernels.attention.scores.policy import functions_of
from jagged_kernels.schedule.policy import hopper


class _NoOptimisation:
    """LLVM, which does not make code faster: a third of the time, and no kernel fails by it."""

    def __getattr__(self, name: str) -> Any:
        return getattr(_LLVM, name)

    def optimize_module(self, *_arguments: Any, **_options: Any) -> None:
        pass


_LLVM: Any = compiler.llvm
TARGET = GPUTarget("cuda", 90, 32)
_ARGUMENTS: Any = MeetArguments
BY_KEYS = _ARGUMENTS("constexpr", "constexpr", "constexpr", "constexpr", "*i64", "fp32")
# Of lists with a rule for their tokens: its counts; and what they have without one.
RULED = _ARGUMENTS("*i32", "*i32", "*i32", "*i32", "constexpr", "fp32")
LISTED = _ARGUMENTS("*i32", "*i32", "constexpr", "constexpr", "constexpr", "fp32")


@gluon.constexpr_function
def always(*_arguments: Any) -> bool:
    """In the place of what a kernel decides by when it is compiled."""
    return True


def _functions(policy: str) -> tuple[Any, Any]:
    return functions_of(policy) if policy else (None, None)


def _one_pass_config(dim: int, _listed: int) -> hopper.HopperConfig:
    return hopper.one_pass_config(dim)


def compile_kernel(
    name: str, dim: int, policy: str, *, listed: int = 0, ruled: bool = False, group: int = 1,
    counted: bool = False,
) -> bytes:  # fmt: skip
    """Its cubin. `listed`: tokens of a listed block, 0 for ranges; `ruled`: its tokens have a rule;
    `counted`: tiles are counted out."""
    kernel, config, tiles = {
        "forward": (gluon_forward._forward_kernel, hopper.forward_config, "q"),
        "dq": (gluon_dq._dq_kernel, lambda *_: hopper.DQ_CONFIG, ("q", "do", "o")),
        "dkv": (gluon_dkv._dkv_kernel, hopper.dkv_config, ("k", "v")),
        "one pass": (one_pass._one_pass_kernel, _one_pass_config, ("k", "v")),
    }[name]
    config = config(dim, listed)
    config = hopper.counted(config) if counted else config
    part = min(config.block, listed or config.block)

    def blocks(tokens: int) -> str:
        shape = [tokens, 1, hopper.box(dim)]
        layout = gl.NVMMASharedLayout.get_default_for(shape, gl.bfloat16)
        return f"tensordesc<bf16{shape},{layout!r}>"

    strides: list[Any] = [8 * dim, dim] * 4
    lists: dict[str, Any] = {}
    if listed:
        lists = {"GROUPS": 8, "FIRST": 4 * ruled, "RULED": ruled}
    box = hopper.box(dim)
    shape = AttentionShape(
        8, group, dim, dim, box, box, config.tile_q, 1, config.block, True, True, "ieee", *strides,
        **lists,
    )  # fmt: skip
    weight, d_score = map(in_gluon, _functions(policy))
    constants = {"S": shape, "C": config, "NEGATE": True, "WEIGHT": weight, "D_SCORE": d_score}
    softmax = ("lse2_ptr", "d_lse2_ptr", "delta_ptr", "o_blocks")
    constants |= dict.fromkeys(softmax if policy else () if listed else ("meets",))
    meets = BY_KEYS
    if listed:
        meets = RULED if ruled else LISTED
        meets = meets._replace(k_offsets="*i64" if policy else "constexpr")
    pointers = dict.fromkeys(("lse2_ptr", "d_lse2_ptr", "delta_ptr", "sums_ptr"), "*fp32")
    pointers |= dict.fromkeys(("rows_ptr", "counts_ptr", "alarm_ptr", "taken_ptr"), "*i32")
    if not config.counted:
        constants["taken_ptr"] = None
    pointers |= {"marks_ptr": "*i8", "offsets_ptr": "*i64"}

    def kind(argument: str) -> Any:
        if argument in constants:
            return "constexpr"
        if argument == "meets":
            return meets
        if argument.endswith("_blocks"):
            tile = argument.removesuffix("_blocks") in tiles
            return blocks(config.part_q if tile else part)
        if argument.endswith("_ptr"):
            return pointers.get(argument, "*bf16")
        return "fp32" if argument.startswith("scale") else "i32"

    names = kernel.arg_names
    source = GluonASTSource(
        fn=kernel,
        signature={argument: kind(argument) for argument in names},
        constexprs={(names.index(c),): value for c, value in constants.items() if c in names},
        # As PyTorch allocates it.
        attrs={
            (place,): [["tt.divisibility", 16]]
            for place, argument in enumerate(names)
            if argument == "sums_ptr"
        },
    )
    compiled = compiled_for(source, config)
    ptx = compiled.asm["ptx"]
    assert "wgmma.mma_async" in ptx
    if name == "one pass":
        # Four numbers at a time.
        assert ".add.v4.f32" in ptx, "how dQ is added"
    return compiled.asm["cubin"]


def compiled_for(source: GluonASTSource, config: hopper.HopperConfig) -> Any:
    """As it is launched, for `config.residents` programs on a multiprocessor."""
    options = {"num_warps": config.warps, "maxnreg": config.start_registers}
    compiled = triton.compile(source, target=TARGET, options=options)
    assert compiled.metadata.shared <= 227 * 1024 // config.residents
    return compiled


def compile_exact(module: Any, dim: int, policy: str, *, lists: bool = False) -> None:
    q, k = (torch.zeros(2, heads, dim, dtype=torch.bfloat16) for heads in (4, 2))
    call = Call.of(q, k, k, q, left=3, right=0, scale=-1.0)
    part = hopper.dkv_config(dim).part_q
    weight, d_score = _functions(policy)
    meets = MeetShape(2 * lists, 4 * lists, lists, weight, d_score)
    if module is exact:
        kernel = exact._exact_kernel
        whole = call.shape(tile=2 * part, block=64, meets=meets)
        shape, config, _ = exact._layout(whole, part, 2)
        constants = {"S": shape, "NEGATE": True, "WEIGHT": weight, "PARTS": 2, **NO_BIAS}
        options = config.options()
    else:
        kernel = exact_backward._exact_backward_kernel
        _, constants = exact_backward._constants(call, part, part, 2, 2, meets)
        options = {"num_warps": 4, "num_stages": 1}
    names = kernel.arg_names
    arguments = BY_KEYS
    if lists:
        arguments = RULED._replace(k_offsets="*i64" if policy else "constexpr")
    else:
        constants |= {"meets_t": None} if policy else {"meets": None, "meets_t": None}
    numbers = {"lse2_ptr": "*fp32", "delta_ptr": "*fp32", "scale": "fp32", "scale_log2": "fp32"}
    numbers |= dict.fromkeys(("rows_ptr", "rows_t_ptr", "alarm_ptr"), "*i32")
    numbers |= {"marks_ptr": "*i8", "meets": arguments, "meets_t": arguments}
    constants = {name: value for name, value in constants.items() if name in names}

    def kind(argument: str) -> Any:
        if argument in constants:
            return "constexpr"
        return numbers.get(argument, "*bf16" if argument.endswith("_ptr") else "i32")

    source = ASTSource(
        fn=kernel,
        signature={argument: kind(argument) for argument in names},
        constexprs={(names.index(c),): value for c, value in constants.items()},
    )
    assert triton.compile(source, target=TARGET, options=options).asm["cubin"]


# (kernel, dim, tokens of a listed block, whether of "" and of a policy). Each takes seconds: of
# listed blocks, not every size of either dim under both.
LISTS = (
    ("forward", 64, 64, (False, True)),
    ("forward", 64, 128, (True, False)),
    ("forward", 128, 64, (True, False)),
    ("forward", 128, 128, (False, True)),
    ("dkv", 64, 64, (True, True)),
    ("dkv", 64, 128, (True, False)),
    ("dkv", 128, 128, (True, True)),
    ("dq", 128, 128, (True, True)),
)


def main() -> None:
    policy = sys.argv[2]
    compiler.llvm = _NoOptimisation()
    takers = {"forward": hopper.FORWARD_LISTED, "dkv": hopper.DKV_LISTED, "dq": hopper.DQ_LISTED}
    every = {(name, dim, n) for name, dims in takers.items() for dim in dims for n in dims[dim]}
    assert every == {case[:3] for case in LISTS}
    for lists in (False, True):
        for module in (exact, exact_backward):
            compile_exact(module, 128, policy, lists=lists)
    for name, dim, size, taken in LISTS:
        if taken[bool(policy)]:
            print(name, dim, size, file=sys.stderr)
            ruled = (dim == 64) == (size == 64)
            group = 1 if ruled else 4
            compile_kernel(name, dim, policy, listed=size, ruled=ruled, group=group)
    for name, dim in (
        ("forward", 64), ("forward", 128), ("forward", 256), ("dq", 128), ("dkv", 64), ("dkv", 128),
    ):  # fmt: skip
        print(name, dim, file=sys.stderr)
        compile_kernel(name, dim, policy)
        compile_kernel(name, dim, policy, counted=True)
    if not policy:
        compile_kernel("one pass", 128, policy)
        compile_kernel("one pass", 64, policy)
        # Heads in two pieces, and in one that is narrower than its box.
        for name, dim in (
            ("forward", 96), ("dq", 80), ("dkv", 96), ("one pass", 80), ("dkv", 40),
            ("forward", 192), ("forward", 160),
        ):  # fmt: skip
            print(name, dim, file=sys.stderr)
            compile_kernel(name, dim, policy)
    if policy:
        for one in (OWN.key, "sigmoid"):
            compile_kernel("forward", 64, one)
            compile_kernel("dkv", 64, one)
