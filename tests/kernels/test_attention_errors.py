"""Wrong arguments raise before a launch, with the shapes in the message."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from jagged_kernels import JaggedTensor, attention_schedule, jagged_attention


def jagged(*shape, lengths=(3, 4), dtype=torch.float32):
    offsets = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()])
    return JaggedTensor(torch.randn(int(offsets[-1]), *shape).to(dtype), offsets)


WRONG = {
    "two dims": (lambda: (jagged(8), jagged(2, 8), jagged(2, 8)), r"q \(7, 8\), k \(7, 2, 8\)"),
    "k and v heads": (lambda: (jagged(2, 8), jagged(2, 8), jagged(1, 8)), "same tokens and heads"),
    "head_dim": (lambda: (jagged(2, 8), jagged(2, 16), jagged(2, 16)), "same head_dim"),
    "groups": (lambda: (jagged(3, 8), jagged(2, 8), jagged(2, 8)), "multiple of k's"),
    "no heads": (lambda: (jagged(0, 8), jagged(1, 8), jagged(1, 8)), "at least 1"),
    "users": (
        lambda: (jagged(2, 8), jagged(2, 8, lengths=(7,)), jagged(2, 8, lengths=(7,))),
        "q has 2 users and k has 1",
    ),
    "k and v offsets": (
        lambda: (jagged(2, 8), jagged(2, 8), jagged(2, 8, lengths=(2, 5))),
        "k and v must have the same offsets",
    ),
    "dense q of other batch": (
        lambda: (torch.zeros(3, 1, 2, 8), jagged(2, 8), jagged(2, 8)),
        r"B = 2 users, got \(3, 1, 2, 8\)",
    ),
}


@pytest.mark.parametrize(("inputs", "message"), WRONG.values(), ids=WRONG)
@pytest.mark.parametrize("backend", ["reference", "native", "triton"])
def test_wrong_shapes(inputs, message, backend):
    with pytest.raises(ValueError, match=message):
        jagged_attention(*inputs(), backend=backend)


def test_wrong_dtypes():
    x, half, whole = jagged(2, 8), jagged(2, 8, dtype=torch.float16), jagged(2, 8, dtype=torch.int)
    with pytest.raises(TypeError, match=r"torch.float32, torch.float16, torch.float32"):
        jagged_attention(x, half, x)
    with pytest.raises(TypeError, match="one floating dtype"):
        jagged_attention(whole, whole, whole)
    with pytest.raises(TypeError, match="Tensor and JaggedTensor"):
        jagged_attention(x, x.values, x)  # pyright: ignore
    with pytest.raises(TypeError, match="JaggedTensor or a tensor, got NoneType"):
        jagged_attention(None, x, x)  # pyright: ignore


@pytest.mark.parametrize("window", [5, (1.5, 0.5), (1, 2, 3), (None, 0), "ab"], ids=str)
def test_a_window_of_other_than_two_integers(window):
    x = jagged(2, 8)
    with pytest.raises(TypeError, match=r"window must be \(left, right\), two integers, got"):
        jagged_attention(x, x, x, window=window)
    with pytest.raises(TypeError, match="two integers, got"):
        attention_schedule(x, window=window)


def test_wrong_options():
    x = jagged(2, 8)
    with pytest.raises(ValueError, match="got 'cuda'"):
        jagged_attention(x, x, x, backend="cuda")  # pyright: ignore
    with pytest.raises(ValueError, match=r"\[0, 1\), got 1.0"):
        jagged_attention(x, x, x, dropout_p=1.0)
    with pytest.raises(ValueError, match=r"got \(-3, 0\)"):
        jagged_attention(x, x, x, window=(-3, 0))
    with pytest.raises(ValueError, match=r"H = 2\] on cpu, got \(5, 3\)"):
        jagged_attention(x, x, x, bias=torch.zeros(5, 3))
    with pytest.raises(ValueError, match="each of 25 scores, got 24"):
        jagged_attention(x, x, x, bias=torch.zeros(24, 2))


def test_schedule_of_another_batch_or_mask():
    x = jagged(2, 8)
    with pytest.raises(ValueError, match="another batch or mask"):
        jagged_attention(x, x, x, causal=True, schedule=attention_schedule(x))
    other = attention_schedule(jagged(2, 8, lengths=(3, 5)))
    with pytest.raises(ValueError, match=r"\(8, 8, 2, \(-1, -1\)\)"):
        jagged_attention(x, x, x, schedule=other)


def test_what_the_triton_backend_does_not_do():
    double = jagged(2, 8, dtype=torch.float64)
    with pytest.raises(NotImplementedError, match="no float64"):
        jagged_attention(double, double, double, backend="triton")


def _python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**kept, **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def test_triton_on_a_cpu_says_what_it_needs():
    code = """
import torch
from jagged_kernels import JaggedTensor, jagged_attention
x = JaggedTensor(torch.zeros(3, 1, 8), torch.tensor([0, 3]))
jagged_attention(x, x, x, backend="triton")
"""
    assert "needs CUDA tensors, got one on cpu" in _python(code).stderr


def test_importing_is_light():
    """Triton is loaded at the first launch: a CPU user never pays for it, nor needs it."""
    code = """
import sys
import jagged_kernels
assert "jagged_kernels.attention.triton_forward" not in sys.modules
for heavy in ("jagged_ranking", "click_data", "pandas", "datasets", "matplotlib"):
    assert heavy not in sys.modules, heavy
"""
    result = _python(code)
    assert result.returncode == 0, result.stderr
