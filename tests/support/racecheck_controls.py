"""Two kernels that are right beyond doubt, to see what racecheck says of them.

    compute-sanitizer --tool racecheck python tests/support/racecheck_controls.py

The kernels for Hopper have warps that load and warps that compute. `groups` is nothing but two
groups of warps: racecheck is silent. `ring` hands buffers over by cp.async and mbarriers: it
reports the buffers, and the arguments that Triton itself hands to the second group, as races
(compute-sanitizer of CUDA 13.0), which are the two reports that it makes of our kernels.
"""

from __future__ import annotations

import sys

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

BLOCKS, STAGES, BLOCK = 64, 2, 64


@gluon.jit
def _idle(args):
    pass


@gluon.jit
def _store(args):
    (out_ptr,) = args
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    lane = gl.arange(0, 128, LAYOUT)
    gl.store(out_ptr + lane, lane)


@gluon.jit
def _groups_kernel(out_ptr):
    """Groups of warps that share nothing: what is in shared memory is Triton's own."""
    gl.warp_specialize([(_store, ((out_ptr,),)), (_idle, ((out_ptr,),))], [1], [24])


@gluon.jit
def _load(args, BLOCKS: gl.constexpr, STAGES: gl.constexpr):
    x_ptr, _, ring, full, empty = args
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    lane = gl.arange(0, ring.shape[1], LAYOUT)
    for block in range(BLOCKS):
        stage = block % STAGES
        mbarrier.wait(empty.index(stage), ((block // STAGES) & 1) ^ 1)
        async_copy.async_copy_global_to_shared(
            ring.index(stage), x_ptr + block * ring.shape[1] + lane
        )
        async_copy.mbarrier_arrive(full.index(stage), increment_count=False)


@gluon.jit
def _add(args, BLOCKS: gl.constexpr, STAGES: gl.constexpr):
    _, out_ptr, ring, full, empty = args
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    total = gl.full([ring.shape[1]], 0.0, gl.float32, LAYOUT)
    for block in range(BLOCKS):
        stage = block % STAGES
        mbarrier.wait(full.index(stage), (block // STAGES) & 1)
        total += ring.index(stage).load(LAYOUT)
        mbarrier.arrive(empty.index(stage))
    gl.store(out_ptr + gl.arange(0, ring.shape[1], LAYOUT), total)


@gluon.jit
def _ring_kernel(x_ptr, out_ptr, BLOCKS: gl.constexpr, STAGES: gl.constexpr, BLOCK: gl.constexpr):
    """A ring of buffers that one warp fills by cp.async and others read: full, empty, full."""
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    ring = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK], PLAIN)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=32)
        mbarrier.init(empty.index(stage), count=1)
    args = (x_ptr, out_ptr, ring, full, empty)
    gl.warp_specialize([(_add, (args, BLOCKS, STAGES)), (_load, (args, BLOCKS, STAGES))], [1], [24])


def groups() -> None:
    out = torch.empty(128, dtype=torch.int32, device="cuda")
    _groups_kernel[(8,)](out, num_warps=4)
    assert torch.equal(out.cpu(), torch.arange(128, dtype=torch.int32))


def ring() -> None:
    x = torch.randint(-9, 10, (BLOCKS, BLOCK), device="cuda").float()
    out = torch.empty(BLOCK, device="cuda")
    _ring_kernel[(1,)](x, out, BLOCKS, STAGES, BLOCK, num_warps=4)
    assert torch.equal(out, x.sum(0))


CONTROLS = {control.__name__: control for control in (groups, ring)}

if __name__ == "__main__":
    for name in sys.argv[1:] or CONTROLS:
        CONTROLS[name]()
        torch.cuda.synchronize()
        print("done:", name)
