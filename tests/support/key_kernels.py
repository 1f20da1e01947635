"""A kernel that writes down the mask of tokens."""

import triton
import triton.language as tl

from jagged_kernels.schedule.keys.triton_token_rule import load_rule, token_visible


@triton.jit(do_not_specialize=["length", "left", "first"])
def visible_kernel(
    out_ptr, targets_ptr, contexts_ptr, length, left, first, SIZE: tl.constexpr
):  # fmt: skip
    history, contexts = load_rule(targets_ptr, contexts_ptr, 0, length)
    i, j = tl.arange(0, SIZE)[:, None], tl.arange(0, SIZE)[None, :]
    seen = token_visible(i, j, length, left, first, history, contexts)
    tl.store(out_ptr + i * SIZE + j, seen.to(tl.int32))
