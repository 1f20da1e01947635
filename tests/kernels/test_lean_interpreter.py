"""The interpreter as the tests have it gives, to the bit, what Triton's own gives."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl
from attention_cases import DEVICE, Case, run
from processes import run_python
from torch import Tensor

ROWS, COLUMNS = 8, 16


@triton.jit
def _xor(a, b):
    return a ^ b


@triton.jit
def _first_of_largest(value, place, other, other_place):
    later = (other > value) | ((other == value) & (other_place < place))
    return tl.where(later, other, value), tl.where(later, other_place, place)


@triton.jit
def _compose(factor, summand, next_factor, next_summand):
    """Of x -> factor * x + summand: in another order it is another function."""
    return factor * next_factor, summand * next_factor + next_summand


@triton.jit
def _combine_kernel(x_ptr, out_ptr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    row, column = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    place = row[:, None] * COLUMNS + column[None, :]
    x = tl.load(x_ptr + place)
    tl.store(out_ptr + column, tl.reduce(x, 0, _xor))
    tl.store(out_ptr + 16 + row[:, None] + column[None, :] * 0, tl.reduce(x, 1, _xor, True))
    tl.store(out_ptr + 24, tl.reduce(x, None, _xor))
    largest, at = tl.reduce((x, place), 1, _first_of_largest)
    tl.store(out_ptr + 32 + row, largest)
    tl.store(out_ptr + 40 + row, at)
    sign = (x & 1) * 2 - 1
    factor, summand = tl.associative_scan((sign, place), 1, _compose)
    tl.store(out_ptr + 128 + place, factor)
    tl.store(out_ptr + 256 + place, summand)
    factor, _ = tl.associative_scan((sign, place), 0, _compose, True)
    tl.store(out_ptr + 384 + place, factor)
    some = tl.load(x_ptr + column)
    tl.store(out_ptr + 512 + column, tl.sort(some))
    tl.store(out_ptr + 528 + row, tl.topk(some, ROWS))


def results() -> dict[str, Tensor]:
    """Of custom reductions and scans, and of attention, whose kernels call device functions."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(-9, 9, (ROWS, COLUMNS), generator=generator)
    out = torch.zeros(640, dtype=torch.int64)
    _combine_kernel[(1,)](x, out, ROWS, COLUMNS)
    inputs = Case([20, 0, 3], [5, 4, 33], heads=2, kv_heads=1).inputs(torch.float32)
    return {"combined": out, **run("triton", inputs, window=(7, 2))}


@pytest.mark.skipif(DEVICE == "cuda", reason="kernels are compiled here")
def test_the_lean_interpreter_changes_no_result(tmp_path: Path):
    here, saved = Path(__file__).resolve(), tmp_path / "results.pt"
    code = (
        "import sys, torch\n"
        "sys.path[:0] = sys.argv[2:]\n"
        "from test_lean_interpreter import results\n"
        "torch.save(results(), sys.argv[1])"
    )
    folders = [str(here.parent), str(here.parents[1] / "support")]
    done = run_python(code, str(saved), *folders, TRITON_INTERPRET="1")
    assert done.returncode == 0, done.stderr[-2000:]
    plain = torch.load(saved)
    for name, result in results().items():
        assert torch.equal(result, plain[name]), name
    assert plain["combined"].count_nonzero() > 300
