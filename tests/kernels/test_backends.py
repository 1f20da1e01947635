"""Which implementation of an operation runs: what `backend` means."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from attention_cases import DEVICE

from jagged_kernels.core import backends
from jagged_kernels.core.backends import choose_backend, choose_backend_for_rows, has_small_memory


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.int64])
def test_auto_is_triton_on_cuda_for_dtypes_that_kernels_have(dtype):
    where: Any = SimpleNamespace(is_cuda=True, dtype=dtype)
    assert choose_backend("auto", where) == "triton"
    where.is_cuda = False
    assert choose_backend("auto", where) == "native"


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64, torch.complex128], ids=str)
def test_auto_is_native_for_dtypes_that_kernels_do_not_have(dtype):
    where: Any = SimpleNamespace(is_cuda=True, dtype=dtype)
    assert choose_backend("auto", where) == "native"
    with pytest.raises(NotImplementedError, match=f"has no {str(dtype)[6:]}; use backend='native'"):
        choose_backend("triton", where)


def test_rows_of_as_many_columns_as_kernels_take():
    assert choose_backend_for_rows("triton", torch.empty(2, 8192, device=DEVICE)) == "triton"
    with pytest.raises(NotImplementedError, match="goes to 8192 columns, got 8193"):
        choose_backend_for_rows("triton", torch.empty(2, 8193, device=DEVICE))


@pytest.mark.skipif(DEVICE == "cuda", reason="GPUs compute them as they should")
def test_the_interpreter_refuses_bfloat16():
    with pytest.raises(ValueError, match="computes bfloat16 products wrongly; use float32"):
        choose_backend("triton", torch.empty(1, dtype=torch.bfloat16))


@pytest.mark.parametrize(("kibibytes", "small"), [(99, True), (163, False), (227, False)])
def test_how_much_shared_memory_is_little(kibibytes, small, monkeypatch):
    has = SimpleNamespace(shared_memory_per_block_optin=kibibytes * 1024)
    monkeypatch.setattr(backends, "_properties", lambda device: has)
    assert has_small_memory(torch.device("cuda")) == small
    assert not has_small_memory(torch.device("cpu"))


def test_a_device_that_does_not_say_has_little_shared_memory(monkeypatch):
    monkeypatch.setattr(backends, "_properties", lambda device: SimpleNamespace())
    assert has_small_memory(torch.device("cuda"))
