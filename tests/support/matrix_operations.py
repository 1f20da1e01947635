"""All operations but attention on small batches: parts of `small_matrix`."""

from __future__ import annotations

from collections.abc import Iterable

import interaction_cases
import product_cases
import torch
from attention_cases import DEVICE
from every_operation import EVERY
from matrix_attention import HALF, cast
from operation_cases import Call, results
from torch import Tensor

from jagged_kernels import JaggedTensor, jagged_unique, lengths_to_offsets

LENGTHS = (3, 0, 40, 1, 130)
# One user is cut into pieces, and there are more tokens than one launch sums up.
CUT = (2100, 0, 3)
DTYPES = (torch.float32, HALF)
_ELEMENTWISE, _PRODUCTS = interaction_cases.OPERATIONS, product_cases.OPERATIONS


def _run(call: Call, tensors: dict[str, Tensor], dtypes: Iterable[torch.dtype] = DTYPES) -> None:
    for dtype in dtypes:
        results(call, "triton", {name: cast(t, dtype) for name, t in tensors.items()})


def elementwise() -> None:
    for number, operation in enumerate(_ELEMENTWISE.values()):
        _run(operation.call, operation.tensors(LENGTHS, columns=24), [DTYPES[number % 2]])


def products() -> None:
    for call, tensors in _PRODUCTS.values():
        _run(call, tensors(LENGTHS))


def layout() -> None:
    """What is left: tokens that are moved, looked up and chosen."""
    done = {*_ELEMENTWISE, *(f"product: {name}" for name in _PRODUCTS)}
    for number, name in enumerate(name for name in EVERY if name not in done):
        call, case = EVERY[name]
        _run(call, case(LENGTHS), [DTYPES[number % 2]])


def unique() -> None:
    """Users who are sorted in registers, a longer one, and one who is too long for that."""
    for lengths in (LENGTHS, (3, 0, 1500), (4200,)):
        ids = torch.arange(sum(lengths), device=DEVICE) * 7919 % 1009
        offsets = lengths_to_offsets(torch.tensor(lengths)).to(DEVICE)
        jagged_unique(JaggedTensor(ids, offsets), backend="triton")


def cut() -> None:
    """Users who are cut into pieces, batches into spans; what they leave, second launches merge."""
    for name in ("sum", "max", "weighted sum, heads", "softmax", "softmax2 columns"):
        operation = _ELEMENTWISE[name]
        _run(operation.call, operation.tensors(CUT, columns=24), [HALF])
    for name in ("dense", "pair", "linear"):
        call, tensors = _PRODUCTS[name]
        _run(call, tensors(CUT), [HALF])


def many() -> None:
    """Of more groups of users, or tokens, than one launch looks through."""
    groups = [(7 * user) % 300 for user in range(500)]
    linear = product_cases.linear_case((1,) * 500, 300, groups)
    _run(product_cases.linear_call("silu"), linear, [HALF])
    call, tensors = _PRODUCTS["target"]
    _run(call, tensors((2**16 + 5, 1)), [HALF])


PARTS = (elementwise, products, layout, unique, cut, many)
