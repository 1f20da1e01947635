"""delta on its own, as the backward in one pass needs it."""

from __future__ import annotations

import math

import pytest
import torch
from attention_cases import DEVICE

from jagged_kernels.attention.hopper.delta import launch_delta


@pytest.mark.parametrize("tokens", [1, 21, 64])
@pytest.mark.parametrize("layout", ["contiguous", "packed", "one gradient for all heads"])
@pytest.mark.parametrize("with_lse", [False, True])
def test_delta(tokens, layout, with_lse):
    generator = torch.Generator().manual_seed(tokens)
    o, d_o = torch.randn(2, tokens, 3, 16, generator=generator).bfloat16().to(DEVICE)
    if layout == "packed":
        d_o = torch.stack([o, d_o], dim=1)[:, 1]
    elif layout != "contiguous":
        d_o = d_o[:, :1].expand(-1, 3, -1)
    d_lse2 = torch.randn(tokens, 3, generator=generator).to(DEVICE) if with_lse else None
    delta = torch.full((tokens, 3), math.nan, device=DEVICE)
    launch_delta(d_o, d_lse2, o, delta)
    expected = (o.double() * d_o.double()).sum(-1)
    if d_lse2 is not None:
        # lse = ln(2) * lse2
        expected -= d_lse2.double() / math.log(2)
    torch.testing.assert_close(delta.double(), expected, rtol=1e-5, atol=1e-5)
