"""What a device can do at best: units, and what of two speeds is the limit."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from jagged_ranking.measure import ceilings
from jagged_ranking.measure.ceilings import Ceilings, measure_ceilings
from jagged_ranking.measure.timing import Timing


def test_speeds_are_of_all_that_a_copy_moves_and_a_product_computes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In a second: 64 MiB are read and as many written, and a product of 1024^3 adds, too."""

    def timed(calls: Any, **_: Any) -> dict[str, Timing]:
        assert list(calls) == ["copy", "matmul"]
        return {"copy": Timing([9.0, 4.0, 1.0]), "matmul": Timing([5.0, 2.0, 8.0])}

    monkeypatch.setattr(ceilings, "interleaved", timed)
    found = measure_ceilings("cpu", dtype=torch.bfloat16)
    assert found.bytes_per_second == pytest.approx(2 * 2**26 / 4e-3)
    assert found.flops_per_second == pytest.approx(2 * 1024**3 / 5e-3)
    assert found.dtype == "bfloat16"


def test_the_limit_is_that_of_the_slower_speed_for_the_mode() -> None:
    facts = {"bytes_forward": 3e6, "flops_forward": 1e6, "bytes_back": 1e6, "flops_back": 8e6}
    device = Ceilings(bytes_per_second=1e9, flops_per_second=2e9, dtype="float32")
    assert device.limit_ms(facts, "forward") == pytest.approx(3.0)
    assert device.limit_ms(facts, "back") == pytest.approx(4.0)
