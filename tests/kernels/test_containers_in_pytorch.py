"""`JaggedTensor` and `Jagged2Tensor` as PyTorch sees them: pytrees, exported, compiled, saved."""

from __future__ import annotations

import copy
import dataclasses
import io
import pickle
import pickletools
from multiprocessing.reduction import ForkingPickler
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim
from torch.utils import _pytree as pytree

from jagged_kernels import (
    Jagged2Tensor,
    JaggedTensor,
    jagged2_like,
    jagged2_matmul,
    jagged_add,
    jagged_attention,
    jagged_mean,
)


def tokens(*lengths: int, width: int = 4) -> JaggedTensor:
    values = torch.randn(sum(lengths), width)
    return JaggedTensor.from_lengths(values, torch.tensor(lengths))


@pytest.fixture(params=[JaggedTensor, Jagged2Tensor])
def x(request) -> Any:
    x = tokens(2, 0, 3)
    return x if request.param is JaggedTensor else jagged2_like(x)


def parts(x: Any) -> list[Tensor]:
    return [getattr(x, field.name) for field in dataclasses.fields(x)]


def assert_same(found: Any, x: Any) -> None:
    assert type(found) is type(x)
    for part, expected in zip(parts(found), parts(x), strict=True):
        assert torch.equal(part, expected)


def test_leaves_are_the_parts(x):
    leaves, spec = pytree.tree_flatten({"x": [x]})
    assert all(leaf is part for leaf, part in zip(leaves, parts(x), strict=True))
    again = pytree.tree_unflatten(leaves, spec)["x"][0]
    assert_same(again, x)
    assert again.offsets is x.offsets
    paths = [pytree.keystr(path) for path, _ in pytree.tree_leaves_with_path(x)]
    assert paths == [f".{field.name}" for field in dataclasses.fields(x)]
    assert pytree.treespec_loads(pytree.treespec_dumps(spec)) == spec


@pytest.mark.parametrize(
    "function", [lambda part: part.shape, lambda part: None, torch.Tensor.half]
)
def test_leaves_may_become_anything(x, function):
    mapped = pytree.tree_map(function, x)
    assert type(mapped) is type(x)
    wanted = [function(part) for part in parts(x)]
    assert all(torch.equal(a, b) if isinstance(b, Tensor) else a == b
               for a, b in zip(parts(mapped), wanted, strict=True))  # fmt: skip
    assert type(x).__name__ in repr(mapped)


class Layer(nn.Module):
    """Takes jagged tensors and gives them back, of two kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(4, 8)

    def forward(self, x: JaggedTensor, weight: JaggedTensor) -> dict[str, Any]:
        y = x.with_values(self.project(x.values).unflatten(-1, (2, 4)))
        z = jagged_attention(y, y, y, causal=True)
        return {"z": z, "mean": (jagged_mean(z), weight.with_values(weight.values * 2))}


@pytest.mark.parametrize("strict", [False, True])
def test_exported_with_dynamic_tokens(strict):
    """As many users as there were; with `strict`, as many as come."""
    layer = Layer()

    def case(*lengths: int) -> tuple[JaggedTensor, JaggedTensor]:
        x = tokens(*lengths)
        return x, x.with_values(torch.randn(sum(lengths)))

    dynamic = [{0: Dim.DYNAMIC}, {0: Dim.DYNAMIC if strict else Dim.STATIC}]
    exported = torch.export.export(
        layer, case(2, 0, 3), dynamic_shapes=(dynamic, dynamic), strict=strict
    )
    file = io.BytesIO()
    torch.export.save(exported, file)
    file.seek(0)
    loaded = torch.export.load(file).module()
    for lengths in [(2, 0, 3), (4, 1, 7), *([(1, 2, 3, 4, 0)] if strict else [])]:
        inputs = case(*lengths)
        found, expected = loaded(*inputs), layer(*inputs)
        assert_close(found, expected)


def assert_close(found: Any, expected: Any) -> None:
    leaves, spec = pytree.tree_flatten(found)
    wanted, wanted_spec = pytree.tree_flatten(expected)
    assert spec == wanted_spec
    torch.testing.assert_close(leaves, wanted)


def test_compiled_whole_with_containers_in_and_out():
    def layer(x: JaggedTensor, m: Jagged2Tensor) -> tuple[JaggedTensor, Jagged2Tensor]:
        y = jagged2_matmul(m, jagged_add(x, x.with_values(x.values * 2)))
        return y, m.with_values(m.values + 1)

    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for lengths in [(2, 0, 3), (4, 1, 2), (1, 2, 3, 4)]:
        x = tokens(*lengths)
        m = jagged2_like(x)
        m.values.normal_()
        found = compiled(x, m)
        assert_close(found, layer(x, m))
        assert found[0].offsets is x.offsets


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_whole_to_the_longest_user(backend):
    compiled = torch.compile(lambda x: x.to_padded(value=-1.0), fullgraph=True, backend=backend)
    for lengths in [(2, 0, 3), (7, 1), (1, 1, 1, 9)]:
        x = tokens(*lengths)
        x.values.requires_grad_()
        found = compiled(x)
        assert torch.equal(found, x.to_padded(value=-1.0))
        (gradient,) = torch.autograd.grad(found.sum(), x.values)
        assert torch.equal(gradient, torch.ones_like(gradient))


@pytest.mark.parametrize("strict", [False, True])
def test_exported_to_the_longest_user(strict):
    class Padded(nn.Module):
        def forward(self, x: JaggedTensor) -> Tensor:
            return x.to_padded()

    dynamic = ([{0: Dim.DYNAMIC}, {0: Dim.STATIC}],)
    exported = torch.export.export(
        Padded(), (tokens(2, 0, 3),), dynamic_shapes=dynamic, strict=strict
    )
    x = tokens(1, 7, 2)
    assert torch.equal(exported.module()(x), x.to_padded())


def saved(x: Any, weights_only: bool) -> Any:
    file = io.BytesIO()
    torch.save({"x": x}, file)
    file.seek(0)
    return torch.load(file, weights_only=weights_only)["x"]


@pytest.mark.parametrize(
    "copied",
    [
        lambda x: saved(x, weights_only=True),
        lambda x: saved(x, weights_only=False),
        lambda x: pickle.loads(pickle.dumps(x)),
        lambda x: pickle.loads(ForkingPickler.dumps(x)),
        copy.deepcopy,
        copy.copy,
        dataclasses.replace,
    ],
    ids=["weights", "load", "pickle", "process", "deepcopy", "copy", "replace"],
)
def test_saved_and_copied(x, copied):
    assert_same(copied(x), x)
    y = x.with_values(x.values + 1)
    if copied not in (copy.copy, dataclasses.replace):
        again = copied((x, y))
        assert again[0].offsets is again[1].offsets


def test_pickles_name_the_package(x):
    """Not the file that a class is in, which may move."""
    named = {argument for op, argument, _ in pickletools.genops(pickle.dumps(x)) if op.arg}
    assert "jagged_kernels" in named
    assert not [name for name in named if str(name).startswith("jagged_kernels.")]


@pytest.mark.parametrize("weights_only", [True, False])
def test_offsets_from_a_file_are_checked(weights_only):
    x = JaggedTensor(torch.zeros(3), torch.tensor([0, 10**9]), validate=False)
    with pytest.raises(ValueError, match=r"got offsets\[-1\] = 1000000000 and values of 3 tokens"):
        saved(x, weights_only)
