"""Every rule for tiles fits the shared memory of the GPUs that there are."""

from __future__ import annotations

import json

import pytest
import torch
from processes import run_python

from jagged_kernels.core import backends
from jagged_kernels.schedule.policy.plain import parts_of_tile

# Of a multiprocessor, what a program can have: A100, compute capability 8.6 and 8.9, Hopper.
MEMORY = {80: 163 * 1024, 89: 99 * 1024, 90: 227 * 1024}

# In one process, which starts for longer than it compiles: (dtype, capability, head_dim, ...) each.
COMPILE = """
import json
import sys

import torch
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import compiler
from triton.compiler import ASTSource

from jagged_kernels.attention.plans import AttentionShape


class NoOptimisation:  # of what has no code: shared memory is laid out before
    def __getattr__(self, name):
        return getattr(llvm, name)

    def optimize_module(self, *arguments, **options):
        if makes_code():
            llvm.optimize_module(*arguments, **options)


llvm, compiler.llvm = compiler.llvm, NoOptimisation()


def makes_code():
    # Others' takes the longest to make, and shared memory is laid out before.
    return dtype != "fp32" and dim <= 128


def perhaps_no_code(_backend=None, stages=None, *_):
    if stages and not makes_code():
        stages["ptx"] = lambda _module, metadata: metadata.update(name="") or ""
        stages["cubin"] = lambda _module, _metadata: b""
    return str(makes_code()), str(makes_code())


knobs.runtime.add_stages_inspection_hook = perhaps_no_code


def shape(rows, block, precision):
    strides = [4 * dim, dim] * 4
    return AttentionShape(
        4, 1, dim, dim, dim, dim, rows, 1, block, False, False, precision, *strides
    )


def shared(kernel, config, kinds=None, **constants):
    names, kinds = kernel.arg_names, kinds or {}
    nothing = ("bias", "slots", "d_lse2_ptr", "pages_ptr", "page_count", "page_limit")
    nothing += ("meets", "WEIGHT", "D_SCORE")
    constants = dict.fromkeys(nothing) | constants
    constants = {name: value for name, value in constants.items() if name in names}
    constants = {name: value for name, value in constants.items() if name not in kinds}
    floats = ("lse2_ptr", "delta_ptr", "states_ptr", "partial_ptr")
    pointers = dict.fromkeys(floats, "*fp32") | dict.fromkeys(("rows_ptr", "spans_ptr"), "*i32")

    def kind(name):
        if name in constants:
            return "constexpr"
        if name in kinds:
            return kinds[name]
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
            if str(kind(name)).startswith("*")
        },
    )
    target = GPUTarget("cuda", capability, 32)
    return triton.compile(source, target=target, options=config.options()).metadata.shared
"""

EACH = """
for dtype, capability, dim, *numbers in json.loads(sys.argv[1]):
    size, precision = (4, "bf16x6") if dtype == "fp32" else (2, "ieee")
    print(json.dumps(sizes()))
"""

PLAIN = """
from jagged_kernels.attention.plain import dkv, dq, forward
from jagged_kernels.schedule.policy import plain as tiles
from jagged_kernels.attention.scores.bias_launch import BiasShape


def sizes():
    small = capability == 89
    rows = 64 // tiles.parts_of_tile(64, dim, size, small)
    kernels = {
        forward._forward_kernel: tiles.forward_config,
        dq._dq_kernel: tiles.dq_config,
        dkv._dkv_kernel: tiles.small_dkv_config if small else tiles.dkv_config,
    }
    constants = {"NEGATE": False, "BIAS": BiasShape()}
    configs = {kernel: rule(dim, size, precision) for kernel, rule in kernels.items()}
    return [
        shared(kernel, config, S=shape(rows, config.block, precision), **constants)
        for kernel, config in configs.items()
    ]
"""

# Of all that a bias may have; position buckets that are summed in registers, and in memory.
EVERY_BIAS = """
from jagged_kernels.attention.scores.bias_launch import BiasArguments, BiasShape, BiasSlots

floats = dict.fromkeys(("time_rate", "time_steps", "drop_below", "keep_scale"), "fp32")
floats |= dict.fromkeys(("by_distance", "time", "slopes", "scores"), "*fp32")
bias = {name: floats.get(name, "*i64") for name in BiasArguments._fields} | {"buckets": "*i32"}
kinds = {
    "offsets_ptr": "*i64", "first_slot": "i32",
    "bias": BiasArguments(**bias), "slots": BiasSlots(*["*fp32"] * len(BiasSlots._fields)),
}


def every():
    positions = 8192 if size == 2 else 32
    return BiasShape(positions, MAX_DISTANCE=8192, TIMES=64, ADDS=True, DROPS=True)


"""

# With the walk for what is hidden.
SHORT = """
from jagged_kernels.attention.plain import short
from jagged_kernels.core.sizes import LaunchConfig
from jagged_kernels.schedule.policy.plain import short_warps


def sizes():
    config = LaunchConfig(32, num_warps=short_warps(dim * size, biased=True), num_stages=1)
    constants = {"NEGATE": False, "BIAS": every()}
    masked = shape(32, config.block, precision)._replace(HAS_RIGHT=True)
    return [
        shared(kernel, config, kinds, S=masked, **constants)
        for kernel in (short._short_forward_kernel, short._short_backward_kernel)
    ]
"""

SPLIT = """
from jagged_kernels.attention.split import backward as triton_split_backward
from jagged_kernels.attention.split import forward as triton_split_forward
from jagged_kernels.attention.scores.bias_launch import BiasShape
from jagged_kernels.schedule import spans as partition

partition.is_hopper = lambda _device: capability == 90
partition.has_small_memory = lambda _device: capability == 89


def sizes():
    (pack,) = numbers
    assert partition.split_backward_fits(1, 1, pack, dim, size, torch.device("cuda"))
    kernels = {
        triton_split_forward._split_forward_kernel: partition.split_forward_config,
        triton_split_backward._split_backward_kernel: partition.split_backward_config,
    }
    constants = {"NEGATE": False, "MEMBERS": 1, "PACK": pack, "PAGE": 0, "LISTS": 0}
    constants |= {"BIAS": BiasShape()}
    nothing = dict.fromkeys(("queries", "k_tokens", "d_scores_ptr"))
    configs = {kernel: rule(dim, size, pack) for kernel, rule in kernels.items()}
    return [
        shared(kernel, config, S=shape(pack, config.block, precision), **constants, **nothing)
        for kernel, config in configs.items()
    ]
"""

# With weights by a policy, whose gradients leave those of scores.
SPLIT_WITH_ALL = """
from jagged_kernels.attention.meeting import MeetArguments
from jagged_kernels.attention.scores.bias_launch import launch_options
from jagged_kernels.attention.scores.triton_policies import silu_d_score, silu_weight
from jagged_kernels.attention.split import backward, bias_sums, forward
from jagged_kernels.core.sizes import LaunchConfig
from jagged_kernels.schedule import spans as partition

partition.is_hopper = lambda _device: capability == 90
partition.has_small_memory = lambda _device: capability == 89
kinds |= {
    "meets": MeetArguments("*i64", *["*i32"] * 3, "*i64", "fp32"),
    "d_scores_ptr": "*fp32", "queries": "i32", "k_tokens": "i32",
}


def sizes():
    (pack,) = numbers
    assert partition.split_backward_fits(1, 1, pack, dim, size, torch.device("cuda"))
    constants = {"NEGATE": False, "MEMBERS": 1, "PACK": pack, "PAGE": 0, "LISTS": 0}
    constants |= {"BIAS": every(), "WEIGHT": silu_weight, "D_SCORE": silu_d_score}
    rules = {
        forward._split_forward_kernel: partition.split_forward_config,
        backward._split_backward_kernel: partition.split_backward_config,
    }
    found = []
    for kernel, rule in rules.items():
        config = rule(dim, size, pack)
        block = config.block
        config = LaunchConfig(block, **launch_options(every(), config, size))
        masked = shape(pack, block, precision)._replace(HAS_RIGHT=True)
        found.append(shared(kernel, config, kinds, S=masked, **constants))
    sums = {"BIAS": every(), "S": masked}
    config = LaunchConfig(block, num_warps=4, num_stages=1)
    return [*found, shared(bias_sums._bias_sums_kernel, config, kinds, **sums)]
"""

# Over lists of key blocks.
SPLIT_LISTED = """
from jagged_kernels.attention.meeting import MeetArguments
from jagged_kernels.attention.scores.bias_launch import BiasShape
from jagged_kernels.attention.split import backward, forward
from jagged_kernels.schedule import spans as partition

partition.is_hopper = lambda _device: capability == 90
partition.has_small_memory = lambda _device: capability == 89
kinds = {"meets": MeetArguments("*i64", *["*i32"] * 3, "*i64", "fp32")}


def sizes():
    pack, listed = numbers
    assert partition.split_backward_fits(1, 1, pack, dim, size, torch.device("cuda"))
    constants = {"NEGATE": False, "MEMBERS": 1, "PACK": pack, "PAGE": 0, "LISTS": 0}
    constants |= {"BIAS": BiasShape()} | dict.fromkeys(("queries", "k_tokens", "d_scores_ptr"))
    configs = {
        forward._split_forward_kernel: partition.split_forward_config(dim, size, pack),
        backward._split_backward_kernel: partition.split_backward_config(
            dim, size, pack, listed=True
        ),
    }
    found = []
    for kernel, config in configs.items():
        block = min(config.block, listed)
        listed_shape = shape(pack, block, precision)._replace(GROUPS=1, PARTS=listed // pack)
        found.append(shared(kernel, config, kinds, S=listed_shape, **constants))
    return found
"""

CACHED = """
from jagged_kernels.attention.scores.bias_launch import BiasShape
from jagged_kernels.attention.split import forward as triton_split_forward
from jagged_kernels.schedule import spans as partition


partition.is_hopper = lambda _device: capability == 90
partition.has_small_memory = lambda _device: capability == 89


def sizes():
    (pack,) = numbers
    assert partition.paged_fits(8, 1, pack // 8, dim, size, torch.device("cuda"))
    config = partition.split_forward_config(dim, size, pack)
    config = partition.paged_config(config, size, pack, capability == 89)
    constants = {"NEGATE": False, "MEMBERS": 1, "PACK": pack, "LISTS": 1}
    constants |= {"BIAS": BiasShape()}
    pages = {"pages_ptr": "*i32", "page_count": "i32", "page_limit": "i32"}
    return [
        shared(
            triton_split_forward._split_forward_kernel, config, pages, PAGE=page,
            S=shape(pack, config.block, precision), **constants,
        )
        for page in (16, 128)
    ]
"""


def test_the_largest_heads_fit(tmp_path):
    cases = [
        ("bf16", 89, 128),
        ("bf16", 89, 256),
        ("fp32", 89, 128),
        ("fp32", 89, 256),
        ("fp32", 80, 128),
    ]
    assert _too_large(PLAIN, 3, cases, tmp_path) == {}


def test_users_of_a_few_tokens_with_every_bias_fit(tmp_path):
    cases = [("bf16", 90, 64), ("fp32", 89, 256)]
    assert _too_large(EVERY_BIAS + SHORT, 2, cases, tmp_path) == {}


def test_the_largest_tiles_of_few_queries_fit(tmp_path):
    cases = [
        ("bf16", 89, 64, 64),
        ("bf16", 80, 256, 32),
        ("bf16", 90, 256, 64),
        ("fp32", 89, 128, 16),
        ("fp32", 80, 64, 64),
        ("fp32", 90, 256, 32),
    ]
    assert _too_large(SPLIT, 2, cases, tmp_path) == {}


def test_the_largest_tiles_of_few_queries_with_all_they_can_have_fit(tmp_path):
    cases = [("bf16", 90, 256, 64), ("bf16", 89, 64, 64)]
    assert _too_large(EVERY_BIAS + SPLIT_WITH_ALL, 3, cases, tmp_path) == {}


def test_the_largest_tiles_of_few_queries_over_lists_fit(tmp_path):
    cases = [
        ("bf16", 89, 64, 64, 64),
        ("bf16", 80, 256, 32, 64),
        ("bf16", 90, 256, 64, 64),
        ("bf16", 90, 128, 64, 64),
        ("fp32", 89, 64, 32, 64),
        ("fp32", 80, 64, 64, 64),
        ("fp32", 90, 128, 64, 64),
        ("fp32", 90, 256, 32, 64),
    ]
    assert _too_large(SPLIT_LISTED, 2, cases, tmp_path) == {}


def test_the_largest_tiles_over_a_cache_fit(tmp_path):
    cases = [
        ("bf16", 89, 64, 128),
        ("bf16", 89, 256, 32),
        ("bf16", 90, 256, 128),
        ("fp32", 89, 128, 64),
        ("fp32", 80, 128, 128),
        ("fp32", 90, 256, 128),
    ]
    assert _too_large(CACHED, 2, cases, tmp_path) == {}


def _too_large(script, count, cases, cache):
    """case -> bytes of each of `count` kernels, where one takes more than there are."""
    result = run_python(COMPILE + script + EACH, json.dumps(cases), TRITON_CACHE_DIR=str(cache))
    assert result.returncode == 0, result.stderr[-2000:]
    found = dict(zip(cases, map(json.loads, result.stdout.splitlines()), strict=True))
    assert all(len(sizes) == count for sizes in found.values())
    return {case: sizes for case, sizes in found.items() if max(sizes) > MEMORY[case[1]]}


@pytest.mark.parametrize(("memory", "small"), [(227, False), (163, False), (99, True)])
def test_a_device_is_asked_for_its_memory(memory, small, monkeypatch):
    class Properties:
        shared_memory_per_block_optin = memory * 1024

    monkeypatch.setattr(backends, "_known_properties", lambda _device: Properties)
    assert backends.has_small_memory(torch.device("cuda")) == small
    assert not backends.has_small_memory(torch.device("cpu"))


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
