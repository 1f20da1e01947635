"""Which tensors Hopper's kernels read as they are: what is known of it without a GPU."""

from __future__ import annotations

import torch
from choice_cases import hopper_fits

from jagged_kernels.schedule.policy.hopper import for_tma, tma_reads


def test_cpu_tensors_do_not_fit():
    x = torch.zeros(3, 2, 64, dtype=torch.bfloat16)
    assert not hopper_fits(x, x, x)


def test_what_tma_cannot_read_is_copied():
    aligned = torch.randn(3, 2, 64).bfloat16()
    shifted = torch.empty(aligned.numel() + 1, dtype=torch.bfloat16)[1:].view(3, 2, 64)
    shifted.copy_(aligned)
    assert shifted.is_contiguous()
    heads_first = aligned.transpose(0, 1).contiguous().transpose(0, 1)
    one_for_all = aligned[:1].expand(3, 2, 64)
    for x in (shifted, aligned.repeat_interleave(2, -1)[..., ::2], one_for_all, heads_first):
        assert not tma_reads(x)
        copy = for_tma(x)
        assert tma_reads(copy)
        assert torch.equal(copy, x)
    for x in (aligned, torch.stack([aligned] * 3, dim=1)[:, 1], torch.cat([aligned] * 2, 1)[:, :2]):
        assert for_tma(x) is x
