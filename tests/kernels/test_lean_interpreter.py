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


@triton.jit
def _keep(out_ptr, number, place, values):
    """As bits, since 0.0 is -0.0 and no NaN is itself."""
    tl.store(out_ptr + number * 128 + place, values.to(tl.float64).to(tl.int64, bitcast=True))


@triton.jit
def _promote_kernel(x_ptr, out_ptr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    row, column = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    place = row[:, None] * COLUMNS + column[None, :]
    for _ in range(2):  # the second time types are known
        x = tl.load(x_ptr + place)
        half, byte, positive = x.to(tl.float16), x.to(tl.uint8), x > 0
        _keep(out_ptr, 0, place, half * 3 + x)
        _keep(out_ptr, 1, place, half / 3)
        _keep(out_ptr, 2, place, x / 3)
        _keep(out_ptr, 3, place, half * 1e4)
        _keep(out_ptr, 4, place, byte + 200)
        _keep(out_ptr, 5, place, x + row[:, None].to(tl.int16) * 7)
        _keep(out_ptr, 6, place, tl.where(positive, -0.0, half))
        _keep(out_ptr, 7, place, tl.where(positive, float("nan"), float("-inf")))
        _keep(out_ptr, 8, place, positive & (row % 2 == 0)[:, None])
        _keep(out_ptr, 9, place, column + positive)
        _keep(out_ptr, 10, place, x * True - 2**40)
        first = tl.load(x_ptr)
        _keep(out_ptr, 11, place, first * half - first * 0.5)
        _keep(out_ptr, 12, place, x * tl.load(1 + x_ptr + column))
        _keep(out_ptr, 16, place, -x + tl.load(x_ptr + 20 - column))
        large = first > -20  # of one number
        _keep(out_ptr, 13, place, (positive & large) + ((large | positive) ^ positive) * 2)
        _keep(out_ptr, 14, place, (half >= x) + (x != 1) * 2 + (x / 2 <= half) * 4 - large)
        _keep(out_ptr, 15, place, (byte < 250) + (column == row[:, None]) * x)


@triton.jit
def _add_kernel(x_ptr, out_ptr, NUMBER: tl.constexpr):
    place = tl.arange(0, 16)
    tl.store(out_ptr + place, tl.load(x_ptr + place).to(tl.uint8) + NUMBER)


def results() -> dict[str, Tensor]:
    """Of custom reductions and scans, of operands of many types, and of attention, whose kernels
    call device functions."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(-9, 9, (ROWS, COLUMNS), generator=generator)
    out = torch.zeros(640, dtype=torch.int64)
    _combine_kernel[(1,)](x, out, ROWS, COLUMNS)
    promoted = torch.zeros(17 * 128, dtype=torch.int64)
    _promote_kernel[(1,)](x, promoted, ROWS, COLUMNS)
    inputs = Case([20, 0, 3], [5, 4, 33], heads=2, kv_heads=1).inputs(torch.float32)
    return {"combined": out, "promoted": promoted, **run("triton", inputs, window=(7, 2))}


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
    assert (plain["promoted"].view(17, -1) != 0).any(1).all()


@pytest.mark.skipif(DEVICE == "cuda", reason="kernels are compiled here")
def test_a_number_too_large_for_its_type_is_refused_whatever_was_before():
    x, out = torch.arange(16), torch.zeros(16, dtype=torch.uint8)
    _add_kernel[(1,)](x, out, 255)
    assert out.tolist() == [255, *range(15)]
    for number in (256, -1):
        with pytest.raises(triton.runtime.interpreter.InterpreterError, match="ValueError"):
            _add_kernel[(1,)](x, out, number)
