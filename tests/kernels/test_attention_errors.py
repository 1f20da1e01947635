"""Wrong arguments raise before a launch, with the shapes in the message."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from attention_cases import DEVICE
from processes import run_python
from torch._subclasses.fake_tensor import FakeTensorMode

from jagged_kernels import JaggedTensor, attention_schedule, jagged_attention
from jagged_kernels.attention import api


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
    "users of v": (
        lambda: (*[jagged(2, 8)] * 2, jagged(2, 8, lengths=(7,))),
        "k has 2 users and v has 1",
    ),
    "v offsets beside those of q and k": (
        lambda: (*[jagged(2, 8)] * 2, jagged(2, 8, lengths=(2, 5))),
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


SCALES = {
    "parameter": (torch.nn.Parameter(torch.tensor(0.5)), "got a tensor.* multiply q by it"),
    "tensor": (torch.tensor(0.5), "got a tensor.* multiply q by it"),
    "text": ("0.5", "must be a number, got str"),
    "complex": (0.5j, "must be a number, got complex"),
}


@pytest.mark.parametrize(("scale", "message"), SCALES.values(), ids=SCALES)
@pytest.mark.parametrize("backend", ["reference", "native", "triton"])
def test_a_scale_that_is_no_number(scale, message, backend):
    """A gradient that it would not get is no silent one."""
    x = jagged(2, 8)
    with pytest.raises(TypeError, match=f"scale.*{message}"):
        jagged_attention(x, x, x, scale=scale, backend=backend)


@pytest.mark.parametrize("scale", [np.float32(0.5), np.float64(0.5), np.array(0.5)], ids=repr)
def test_a_scale_of_numpy(scale):
    x = jagged(2, 8)
    found = jagged_attention(x, x, x, scale=scale)
    assert torch.equal(found.values, jagged_attention(x, x, x, scale=0.5).values)
    found = jagged_attention(x, x, x, scale=np.int64(2))  # pyright: ignore
    assert torch.equal(found.values, jagged_attention(x, x, x, scale=2).values)


def test_schedule_of_another_batch_or_mask():
    x = jagged(2, 8)
    with pytest.raises(ValueError, match="another batch or mask"):
        jagged_attention(x, x, x, causal=True, schedule=attention_schedule(x))
    other = attention_schedule(jagged(2, 8, lengths=(3, 5)))
    with pytest.raises(ValueError, match=r"\(8, 8, 2, \(-1, -1\)\)"):
        jagged_attention(x, x, x, schedule=other)
    there = x.to("meta")
    with pytest.raises(ValueError, match="the schedule is on cpu and q on meta"):
        jagged_attention(there, there, there, schedule=attention_schedule(x))


@pytest.mark.parametrize("backend", ["reference", "native", "triton"])
def test_schedule_of_other_offsets(backend):
    """As many tokens and users, but others."""
    x, y = jagged(2, 8), jagged(2, 8, lengths=(2, 5))
    for schedule, q in (
        (attention_schedule(y), x),
        (attention_schedule(x, y), x),
        (attention_schedule(x.values[:2], y), x.values[:2]),
    ):
        with pytest.raises(
            ValueError, match=r"offsets\[1\] is 2 in the schedule and 3 in the call"
        ):
            jagged_attention(q, x, x, schedule=schedule, backend=backend)


@pytest.mark.parametrize("backend", ["reference", "native", "triton"])
def test_schedule_of_other_queries(backend):
    x, dense = jagged(8, 8), torch.randn(2, 3, 8, 8)
    other = jagged(8, 8, lengths=(1, 5))
    same = other.with_values(other.values)
    same.offsets = torch.tensor([0, 3, 6])
    options = {"backend": backend}
    for jagged_q in (other, same):
        with pytest.raises(ValueError, match=r"for jagged queries and .* dense queries \(3 a user"):
            jagged_attention(dense, x, x, schedule=attention_schedule(jagged_q, x), **options)
    with pytest.raises(ValueError, match=r"8 heads over 8, .* the call has jagged queries"):
        jagged_attention(same, x, x, schedule=attention_schedule(dense, x), **options)
    for q, name in ((dense[:, :, :1], "1 heads over 1"), (dense.half(), "2 bytes a number")):
        keys = jagged(q.shape[2], 8)
        with pytest.raises(ValueError, match=f"{name}.*8 heads over 8, 4 bytes a number"):
            jagged_attention(dense, x, x, schedule=attention_schedule(q, keys), **options)
    many = torch.randn(64, 8, 8)
    key, schedule = jagged(1, 8), attention_schedule(many[:, :1], jagged(1, 8))
    with pytest.raises(ValueError, match=r"64 a user, 1 heads over 1.*64 a user, 8 heads over 1"):
        jagged_attention(many, key, key, schedule=schedule, **options)


def test_schedule_of_rows_serves_other_heads():
    """Heads and dtype decide nothing but how a partition cuts rows."""
    x, dense = jagged(8, 8).to(DEVICE), torch.randn(2, 3, 8, 8, device=DEVICE)
    key = x.with_values(x.values[:, :1])
    schedule = attention_schedule(dense[:, :, :1].half(), key, split="rows")
    out = jagged_attention(dense, x, x, schedule=schedule, backend="triton")
    torch.testing.assert_close(out, jagged_attention(dense, x, x, backend="reference"))
    with pytest.raises(ValueError, match="another batch or mask"):
        jagged_attention(dense[:, :2], x, x, schedule=schedule)


@pytest.mark.parametrize("kind", ["self", "dense queries"])
def test_layers_share_a_schedule_without_reading_offsets(kind, monkeypatch):
    x = jagged(2, 8)
    queries = x if kind == "self" else torch.randn(3, 2, 8)
    schedule = attention_schedule(queries, x)

    def refuse(*_):
        raise AssertionError("contents were read")

    monkeypatch.setattr(torch, "equal", refuse)
    for _ in range(2):
        k = JaggedTensor(torch.randn(7, 2, 8), x.offsets, validate=False)
        q = k.with_values(torch.randn(7, 2, 8)) if kind == "self" else torch.randn(3, 2, 8)
        jagged_attention(q, k, k, schedule=schedule, backend="native")


def test_what_the_triton_backend_does_not_do():
    double = jagged(2, 8, dtype=torch.float64)
    with pytest.raises(NotImplementedError, match="no float64"):
        jagged_attention(double, double, double, backend="triton")


@pytest.mark.parametrize(("dim", "dim_v"), [(512, 512), (257, 8), (8, 300)])
def test_head_dims_beyond_the_triton_kernels(dim, dim_v, monkeypatch):
    """Nothing is launched, not even for a schedule; "auto" goes to the native backend."""
    q = k = jagged(2, dim).to(DEVICE)
    v = k.with_values(torch.randn(7, 2, dim_v, device=DEVICE))
    expected = jagged_attention(q, k, v, backend="reference")
    torch.testing.assert_close(jagged_attention(q, k, v).values, expected.values)

    def refuse(*_, **__):
        raise AssertionError("a schedule was built")

    monkeypatch.setattr(api, "schedule_of_call", refuse)
    message = f"goes to head_dim 256, got {dim} of q and {dim_v} of v"
    with pytest.raises(NotImplementedError, match=message):
        jagged_attention(q, k, v, backend="triton")
    if DEVICE == "cpu":
        # A GPU's tensors without a GPU.
        with FakeTensorMode():
            offsets = torch.empty(3, dtype=torch.int64, device="cuda")
            x, values, small = (
                JaggedTensor(torch.empty(7, 2, d, device="cuda"), offsets)
                for d in (dim, dim_v, 256)
            )
            assert jagged_attention(x, x, values).values.shape == (7, 2, dim_v)
            with pytest.raises(AssertionError, match="a schedule was built"):
                jagged_attention(small, small, small)


def test_triton_on_a_cpu_says_what_it_needs():
    code = """
import torch
from jagged_kernels import JaggedTensor, jagged_attention
x = JaggedTensor(torch.zeros(3, 1, 8), torch.tensor([0, 3]))
jagged_attention(x, x, x, backend="triton")
"""
    assert "needs CUDA tensors, got one on cpu" in run_python(code).stderr


def test_importing_is_light():
    """Triton is loaded at the first launch: a CPU user never pays for it, nor needs it."""
    code = """
import sys
import jagged_kernels
assert "jagged_kernels.attention.plain.forward" not in sys.modules
heavy_ones = ("jagged_ranking", "click_data", "pandas", "datasets", "matplotlib", "triton")
for heavy in heavy_ones:
    assert heavy not in sys.modules, heavy
"""
    result = run_python(code)
    assert result.returncode == 0, result.stderr
