"""Offsets on their way to another device: what shared them before goes on sharing them.

That two jagged tensors have one offsets object says that they have the same users, and spares
comparing them. So a copy of offsets on another device is kept in mind, for as long as somebody has
it, and is what the next jagged tensor over the same offsets gets.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable

import torch
from torch import Tensor
from torch.utils.weak import TensorWeakRef, WeakTensorKeyDictionary

from jagged_kernels.core.contents import is_tracing

# Offsets -> where they were moved -> (their version then, the copy, its version then). Neither is
# kept alive.
_copies = WeakTensorKeyDictionary()


def move_offsets(offsets: Tensor, device: torch.device, *, non_blocking: bool = False) -> Tensor:
    """`offsets.to(device, non_blocking)`, the same object for the same offsets.

    A copy is new where the offsets or it were changed in place since, where PyTorch does not count
    changes (tensors of `torch.inference_mode`), on another stream, and where a CUDA graph is
    captured or something traces. Changes behind PyTorch's back, as through `Tensor.numpy`, are not
    noticed.
    """
    if offsets.device == device:
        return offsets
    if not counts_changes(offsets):
        return offsets.to(device, non_blocking=non_blocking)
    cuda = next((end for end in (device, offsets.device) if end.type == "cuda"), None)
    if cuda is not None and torch.cuda.is_current_stream_capturing():
        return offsets.to(device, non_blocking=non_blocking)
    # Work on another stream does not wait for the copy.
    stream = None if cuda is None else torch.cuda.current_stream(cuda).cuda_stream
    where = (device, non_blocking, stream)
    return _shared(offsets, where, lambda: offsets.to(device, non_blocking=non_blocking))


def pin_offsets(offsets: Tensor) -> Tensor:
    """`offsets.pin_memory()`, the same object for the same offsets, as in `move_offsets`."""
    if not counts_changes(offsets):
        return offsets.pin_memory()
    return _shared(offsets, "pinned", offsets.pin_memory)


def counts_changes(offsets: Tensor) -> bool:
    """Whether they are numbers, not those of a trace, whose changes PyTorch counts: what is made of
    them can be kept."""
    return not (
        is_tracing(offsets) or torch._C._len_torch_dispatch_stack() or offsets.is_inference()
    )


def _shared(offsets: Tensor, where: Hashable, copied: Callable[[], Tensor]) -> Tensor:
    copies = _copies.get(offsets)
    if copies is not None and where in copies:
        version, reference, copy_version = copies[where]
        copy = reference()
        if copy is not None and (version, copy_version) == (offsets._version, copy._version):
            return copy
    # In inference mode a copy too would be without a version.
    with torch.inference_mode(False):
        copy = copied()
    if copy is not offsets:
        entry = (offsets._version, TensorWeakRef(copy), copy._version)
        _copies[offsets] = {**(copies or {}), where: entry}
    return copy
