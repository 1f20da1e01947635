"""FBGEMM's own tests of its jagged (`sll`) operators, run against ours.

    FBGEMM_SLL_TESTS=<checkout of pytorch/FBGEMM>/fbgemm_gpu/test/sll pytest tests/outside

Nothing of FBGEMM need be installed: its tests get `tests/support/fbgemm_adapter.py` in place of
`torch.ops.fbgemm`. Without a GPU they run on the CPU with smaller sizes.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import TestCase, mock

import hypothesis
import hypothesis.strategies as st
import pytest
import torch
from attention_cases import DEVICE
from operation_cases import COMPILER

# All of their tests: (file, test) -> the operator that it is about.
TESTS = {
    ("array_jagged_bmm_jagged_out_test", "test_triton_array_jagged_bmm_jagged_out"):
        "sll_array_jagged_bmm_jagged_out",
    ("array_jagged_bmm_jagged_out_test", "test_triton_array_jagged_bmm_jagged_out_with_grad"):
        "sll_array_jagged_bmm_jagged_out",
    ("array_jagged_bmm_jagged_out_test",
     "test_triton_array_jagged_bmm_jagged_out_meta_backend"):
        "sll_array_jagged_bmm_jagged_out",
    ("dense_jagged_cat_jagged_out_test", "test_dense_jagged_cat_jagged_out"):
        "sll_dense_jagged_cat_jagged_out",
    ("jagged2_to_padded_dense_test", "test_jagged2_to_padded_dense"):
        "sll_jagged2_to_padded_dense",
    ("jagged_dense_bmm_test", "test_triton_jagged_dense_bmm"):
        "sll_jagged_dense_bmm",
    ("jagged_dense_bmm_test", "test_triton_jagged_dense_bmm_with_grad"):
        "sll_jagged_dense_bmm",
    ("jagged_dense_elementwise_add_test", "test_triton_jagged_dense_add"):
        "sll_jagged_dense_elementwise_add",
    ("jagged_dense_elementwise_mul_jagged_out_test",
     "test_jagged_dense_elementwise_mul_jagged_out"):
        "sll_jagged_dense_elementwise_mul_jagged_out",
    ("jagged_dense_elementwise_mul_jagged_out_test",
     "test_jagged_dense_elementwise_mul_jagged_out_with_grad"):
        "sll_jagged_dense_elementwise_mul_jagged_out",
    ("jagged_dense_elementwise_mul_jagged_out_test",
     "test_jagged_dense_elementwise_mul_jagged_out_meta_backend"):
        "sll_jagged_dense_elementwise_mul_jagged_out",
    ("jagged_dense_flash_attention_test", "test_jagged_dense_flash_attention"):
        "sll_jagged_dense_flash_attention",
    ("jagged_flash_attention_basic_test", "test_triton_jagged_flash_attention_basic"):
        "sll_jagged_flash_attention_basic",
    ("jagged_jagged_bmm_jagged_out_test", "test_triton_jagged_jagged_bmm_jagged_out"):
        "sll_jagged_jagged_bmm_jagged_out",
    ("jagged_jagged_bmm_jagged_out_test",
     "test_triton_jagged_jagged_bmm_jagged_out_meta_backend"):
        "sll_jagged_jagged_bmm_jagged_out",
    ("jagged_jagged_bmm_test", "test_triton_jagged_jagged_bmm"):
        "sll_jagged_jagged_bmm",
    ("jagged_jagged_bmm_test", "test_triton_jagged_jagged_bmm_with_grad"):
        "sll_jagged_jagged_bmm",
    ("jagged_self_substraction_jagged_out_test",
     "test_triton_jagged_self_substraction_jagged_out"):
        "sll_jagged_self_substraction_jagged_out",
    ("jagged_softmax_test", "test_triton_jagged_softmax"):
        "sll_jagged_softmax",
    ("jagged_softmax_test", "test_triton_jagged2_softmax"):
        "sll_jagged2_softmax",
    ("jagged_softmax_test",
     "test_triton_jagged2_softmax_meta_backend"):
        "sll_jagged2_softmax",
    ("multi_head_jagged_flash_attention_test", "test_multi_head_jagged_flash_attention"):
        "multi_head_jagged_flash_attention",
}  # fmt: skip

# Without a GPU: the largest of any size that they draw, and how often they draw.
LARGEST, EXAMPLES = (None, 25) if DEVICE == "cuda" else (24, 5)
PACKAGE = "fbgemm_sll_tests"


@pytest.fixture(scope="module")
def folder() -> Path:
    place = os.environ.get("FBGEMM_SLL_TESTS")
    if not place:
        pytest.skip("FBGEMM_SLL_TESTS does not name the folder fbgemm_gpu/test/sll of FBGEMM")
    if not Path(place, "common.py").is_file():
        pytest.skip(f"no tests of FBGEMM in FBGEMM_SLL_TESTS={place}")
    return Path(place)


@pytest.mark.parametrize(("file", "name"), TESTS, ids=[name for _, name in TESTS])
def test_fbgemm(folder, monkeypatch, file, name):
    import fbgemm_adapter as adapter

    subject = TESTS[file, name]
    module = load(folder, file, adapter.LAUNCHERS)
    monkeypatch.setattr(torch.ops, "fbgemm", adapter.fbgemm_operators(subject), raising=False)
    compiled = functools.partial(torch.compile, backend=COMPILER)
    monkeypatch.setattr(torch, "compile", compiled)
    # It looks at how an operator is registered; for ours, tests/kernels do.
    monkeypatch.setattr(module, "opcheck", lambda *arguments: None, raising=False)
    if DEVICE == "cpu":
        monkeypatch.setattr(torch.Tensor, "cuda", torch.Tensor.cpu)
    torch.manual_seed(0)
    with torch._dynamo.config.patch(
        capture_dynamic_output_shape_ops=False, capture_scalar_outputs=False
    ):
        case = next(cls for cls in test_cases(module) if hasattr(cls, name))
        getattr(case(name), name)()


def test_all_of_their_tests_are_listed(folder):
    found = {
        (path.stem, name)
        for path in sorted(folder.glob("*_test.py"))
        for cls in test_cases(load(folder, path.stem, {}))
        for name in dir(cls)
        if name.startswith("test")
    }
    assert found == set(TESTS)


def test_cases(module: ModuleType) -> list[type[TestCase]]:
    found = [x for x in vars(module).values() if isinstance(x, type) and issubclass(x, TestCase)]
    return [cls for cls in found if cls.__module__ == module.__name__]


test_cases.__test__ = False  # pyright: ignore[reportFunctionMemberAccess]


def load(folder: Path, file: str, launchers: dict[str, Any]) -> ModuleType:
    """A test file of theirs, with stand-ins for what it imports."""
    stand_ins: dict[str, dict[str, Any]] = {
        "fbgemm_gpu": {"open_source": True},
        "fbgemm_gpu.sll": {},
        "fbgemm_gpu.sll.triton": launchers,
        "test_utils": {"gpu_unavailable": (False, ""), "running_on_rocm": (False, "")},
    }
    modules = {name: ModuleType(name) for name in stand_ins}
    for name, contents in stand_ins.items():
        vars(modules[name]).update(contents)
    spec = importlib.util.spec_from_loader(PACKAGE, None, is_package=True)
    assert spec is not None
    package = importlib.util.module_from_spec(spec)
    package.__path__ = [str(folder)]
    # By name: what of PyTorch they are the first to import has to stay.
    with pytest.MonkeyPatch.context() as patch, smaller_examples():
        for name, made in {**modules, PACKAGE: package}.items():
            patch.setitem(sys.modules, name, made)
        module = importlib.import_module(f"{PACKAGE}.{file}")
        for name in [name for name in sys.modules if name.startswith(f"{PACKAGE}.")]:
            del sys.modules[name]
    # They import these on a machine with a GPU only.
    vars(module).update(launchers)
    return module


@contextmanager
def smaller_examples() -> Iterator[None]:
    """Sizes and devices that this machine has; decorators read them as a file is imported."""
    integers, sampled_from = st.integers, st.sampled_from

    def some_integers(low: int, high: int) -> Any:
        return integers(low, high if LARGEST is None else max(low, min(high, LARGEST)))

    def some_of(values: list[Any]) -> Any:
        if DEVICE == "cpu" and "cuda" in values:
            values = ["cpu"]
        return sampled_from(values)

    hypothesis.settings.register_profile(
        PACKAGE, max_examples=EXAMPLES, deadline=None, derandomize=True, database=None
    )
    hypothesis.settings.load_profile(PACKAGE)
    try:
        with mock.patch.multiple(st, integers=some_integers, sampled_from=some_of):
            yield
    finally:
        hypothesis.settings.load_profile("default")
