"""The examples in the docstrings of converters and modules give what they say."""

from __future__ import annotations

import doctest
from importlib import import_module

import pytest


@pytest.mark.parametrize(
    "name",
    [
        "attention.varlen",
        "modules.attention",
        "modules.norm",
        "tensors.columns",
        "tensors.nested",
        "tensors.torchrec",
    ],
)
def test_examples(name):
    results = doctest.testmod(import_module(f"jagged_kernels.{name}"))
    assert results.attempted
    assert not results.failed
