"""Kernels that pay by measurement, made to pay from a length that a test chooses."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import pytest

from jagged_kernels.attention import choice
from jagged_kernels.schedule.policy.hopper import BACKWARD_PAYS_FROM, FORWARD_PAYS_FROM

TWO_PASSES = (FORWARD_PAYS_FROM, BACKWARD_PAYS_FROM)


@contextmanager
def paying_from(least: int, *tables: Mapping[str, dict[int, int]]) -> Iterator[None]:
    """Inside, all that is in the tables pays from users of `least` tokens on average."""
    with pytest.MonkeyPatch.context() as patch:
        for by_dim in (by_dim for table in tables for by_dim in table.values()):
            for dim in by_dim:
                patch.setitem(by_dim, dim, least)
        # What was looked up before says otherwise; where a test passes for Hopper, nothing is kept.
        kept = choice.able_families
        patch.setattr(choice, "able_families", getattr(kept, "__wrapped__", kept))
        yield
