"""Which implementation of an operation runs: what `backend` means, for all of them."""

from __future__ import annotations

import functools
import os
from typing import Any, Literal

import torch
from torch import Tensor

from jagged_kernels.core.contents import refuse_meta

Backend = Literal["auto", "triton", "native", "reference"]
_BACKENDS = ("auto", "triton", "native", "reference")
# Dtypes that the kernels do not have.
_NATIVE_ALONE = frozenset((torch.float64, torch.complex32, torch.complex64, torch.complex128))
# The interpreter has no multiprocessors; enough to cut work in small batches.
_INTERPRETED_MULTIPROCESSORS = 4


def check_backend(backend: str) -> None:
    """Raises ValueError for an unknown name."""
    if backend not in _BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(_BACKENDS)}; got {backend!r}")


def choose_backend(backend: str, x: Tensor) -> str:
    """ "triton", "native" or "reference" for an operation on `x`.

    "auto": Triton for CUDA tensors of up to float32, else native, for complex ones too. On "meta"
    there is nothing to run: "native" and "triton" give shapes.

    Raises:
        ValueError: an unknown name, "triton" where it cannot run, or "reference" on "meta".
        NotImplementedError: "triton" for float64 or a complex dtype.
    """
    check_backend(backend)
    if backend == "auto":
        return "triton" if x.is_cuda and x.dtype not in _NATIVE_ALONE else "native"
    if backend == "triton":
        _check_triton_runs(x)
    if backend == "reference":
        refuse_meta(x, "backend='reference' reads offsets, unlike 'native'")
    return backend


def or_native(backend: str, limit: str) -> str:
    """The backend for what is beyond a limit of the kernels, in place of "triton".

    Args:
        backend: as the caller of the operation gave it.
        limit: what is beyond it, in words.

    Raises:
        NotImplementedError: backend is "triton".
    """
    if backend == "triton":
        raise NotImplementedError(limit)
    return "native"


def triton_runs(x: Tensor) -> bool:
    """Whether Triton kernels can run where this tensor is: on CUDA, or in the interpreter."""
    return x.is_cuda or os.environ.get("TRITON_INTERPRET") == "1"


def multiprocessors(device: torch.device) -> int:
    """How many programs a device runs beside each other, at one a multiprocessor."""
    if device.type != "cuda":
        return _INTERPRETED_MULTIPROCESSORS
    return _properties(device).multi_processor_count


def has_small_memory(device: torch.device) -> bool:
    """Whether a multiprocessor has 99 KiB of shared memory, as in most GPUs for inference and games
    (compute capabilities 8.6, 8.9 and 12.0), and not 163 KiB (A100) or 227."""
    if device.type != "cuda":
        return False
    # PyTorch for ROCm does not say; there it is 64 KiB.
    return getattr(_properties(device), "shared_memory_per_block_optin", 0) < 160 * 1024


def _properties(device: torch.device) -> Any:
    # `torch.compile` looks past a cache, with a warning.
    compiling = torch.compiler.is_compiling()
    return (torch.cuda.get_device_properties if compiling else _known_properties)(device)


@functools.cache
def _known_properties(device: torch.device) -> Any:
    return torch.cuda.get_device_properties(device)


def _check_triton_runs(x: Tensor) -> None:
    if x.dtype in _NATIVE_ALONE:
        dtype = str(x.dtype).removeprefix("torch.")
        raise NotImplementedError(
            f"the triton backend has no {dtype}; use backend='native' or 'auto'"
        )
    if x.is_meta:
        return
    if not triton_runs(x):
        raise ValueError(
            f"the triton backend needs CUDA tensors, got one on {x.device} (for Triton's "
            "interpreter, set TRITON_INTERPRET=1 before starting Python)"
        )
    if not x.is_cuda and x.dtype == torch.bfloat16:
        raise ValueError("Triton's interpreter computes bfloat16 products wrongly; use float32")


# Of a token, for kernels that take whole ones.
_MAX_TRITON_COLUMNS = 8192


def choose_backend_for_rows(backend: str, x: Tensor) -> str:
    """`choose_backend` for an operation that sums along the rows of x [..., C].

    Raises:
        NotImplementedError: also "triton" for more than 8192 columns; "auto" is native there.
    """
    chosen, columns = choose_backend(backend, x), x.shape[-1]
    if chosen == "triton" and columns > _MAX_TRITON_COLUMNS:
        limit = f"the triton backend goes to {_MAX_TRITON_COLUMNS} columns, got {columns}"
        chosen = or_native(backend, limit)
    return chosen
