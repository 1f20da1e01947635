"""Tensors on "meta", which have shapes and no contents."""

from __future__ import annotations

import pytest
import torch
from attention_calls import ALL, differentiable
from operation_cases import DEVICE, flat
from torch import nn

import jagged_kernels as jk
from jagged_kernels import JaggedTensor, jagged_attention

LENGTHS = (3, 0, 4)
# How many tokens there are in the result is in the offsets of the input.
BY_CONTENTS = ("slice", "recent", "select")


def on(device, case, dtype):
    return {
        name: t.to(device, dtype if t.is_floating_point() else t.dtype).requires_grad_(
            t.is_floating_point()
        )
        for name, t in case(LENGTHS).items()
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("backend", ["auto", "native", "triton"])
@pytest.mark.parametrize("name", [name for name in ALL if name not in BY_CONTENTS])
def test_shapes_without_contents(name, backend, dtype):
    call, case = ALL[name]
    if (backend, dtype) == ("triton", torch.float64):
        with pytest.raises(NotImplementedError, match="no float64"):
            call(backend, **on("meta", case, dtype))
        return
    expected = flat(call("native", **on(DEVICE, case, dtype)))
    leaves = on("meta", case, dtype)
    found = flat(call(backend, **leaves))
    for ours, theirs in zip(found, expected, strict=True):
        assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)
        assert ours.device.type == "meta"
    wanted = [leaf for leaf in leaves.values() if leaf.requires_grad]
    outs = differentiable(found)
    gradients = torch.autograd.grad(
        outs, wanted, [torch.empty_like(out) for out in outs], materialize_grads=True
    )
    for gradient, leaf in zip(gradients, wanted, strict=True):
        assert (gradient.shape, gradient.dtype, gradient.device) == (
            leaf.shape, leaf.dtype, leaf.device
        )  # fmt: skip


@pytest.mark.parametrize("name", ALL)
def test_the_reference_says_that_it_reads_contents(name):
    call, case = ALL[name]
    with pytest.raises(ValueError, match=r"backend='reference' reads.*meta have no contents"):
        call("reference", **on("meta", case, torch.float32))


X = JaggedTensor(
    torch.empty(7, 3, device="meta"), torch.empty(4, device="meta").long(), validate=False
)
IDS = X.with_values(torch.empty(7, device="meta").long())
TIMES = X.with_values(torch.empty(7, device="meta"))
LENGTHS_OF_X = X.offsets.diff()


@pytest.mark.parametrize(
    ("call", "message"),
    {
        "slice": (lambda: jk.jagged_slice(X, 1, 3), "without total"),
        "recent": (lambda: jk.jagged_recent(X, 3), "without total"),
        "select": (lambda: jk.jagged_index_select(X, IDS.values), "without total"),
        "from padded": (
            lambda: jk.from_padded(X.values.new_empty(3, 4, 2), LENGTHS_OF_X),
            "without total",
        ),
        "from_padded": (
            lambda: JaggedTensor.from_padded(X.values.new_empty(3, 4, 2), LENGTHS_OF_X),
            "lengths are read",
        ),
        "to_padded": (X.to_padded, "without max_len"),
        "unbind": (X.unbind, "unbind"),
        "unique": (lambda: jk.jagged_unique(IDS), "ids are read"),
        "layout": (lambda: jk.jagged2_like(X), "without the total of a layout"),
        "outer": (lambda: jk.jagged_outer(X, X), "without like"),
        "difference": (lambda: jk.jagged_self_difference(TIMES), "without the total of a layout"),
    }.values(),
)
def test_where_a_size_is_in_the_contents(call, message):
    with pytest.raises(ValueError, match=f"{message}.*tensors on meta have no contents"):
        call()


def test_sizes_that_are_given():
    assert jk.jagged_slice(X, 1, 3, total=5).values.shape == (5, 3)
    assert jk.jagged_recent(X, 3, total=5).values.shape == (5, 3)
    assert jk.jagged_index_select(X, IDS.values, total=9).values.shape == (9, 3)
    like = jk.jagged2_like(X, 25)
    assert jk.jagged_outer(X, X, like=like).values.shape == (25,)
    assert jk.jagged_self_difference(TIMES, like=like).values.shape == (25,)
    assert X.to_padded(4).shape == (3, 4, 3)


@pytest.mark.parametrize("backend", ["auto", "triton"])
@pytest.mark.parametrize("dense", [False, True])
def test_attention_with_all_that_there_is(backend, dense):
    x = X.with_values(torch.empty(7, 2, 16, device="meta"))
    q = torch.empty(3, 5, 2, 16, device="meta") if dense else x
    bias = None
    if not dense:
        table = torch.empty(8, 2, device="meta")
        scores = torch.empty(25, 2, device="meta")
        times = jk.RelativeTimeBias(table, TIMES)
        bias = (jk.RelativePositionBias(table, max_distance=9), times, scores)
    schedule = jk.attention_schedule(q, x, window=(3, 1))
    out, lse = jagged_attention(
        q, x, x, window=(3, 1), bias=bias, schedule=schedule, dropout_p=0.1, return_lse=True,
        backend=backend,
    )  # fmt: skip
    (out,) = flat(out)
    assert (out.shape, lse.shape) == ((3, 5, 2, 16), (3, 5, 2)) if dense else ((7, 2, 16), (7, 2))
    assert {out.device.type, lse.device.type} == {"meta"}


def test_a_module_on_meta():
    with torch.device("meta"):
        project = nn.Linear(3, 32)
        offsets = torch.empty(4, dtype=torch.int64)
    q = JaggedTensor(project(X.values).view(7, 2, 16), offsets)
    jagged_attention(q, q, q, causal=True).values.sum().backward()
    assert project.weight.grad is not None
    assert project.weight.grad.shape == (32, 3)
