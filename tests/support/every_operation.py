"""All operations with gradients in the form of `operation_cases`: (call, lengths -> tensors)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import interaction_cases
import product_cases
import torch
from operation_cases import Call
from torch import Tensor

import jagged_kernels as jk
from jagged_kernels import Jagged2Tensor, JaggedTensor
from jagged_kernels.tensors.jagged2 import jagged2_offsets

Case = Callable[[Sequence[int]], dict[str, Tensor]]


def _of_tokens(function: Any, *arguments: Any, **options: Any) -> Call:
    def call(backend: Any, x: Tensor, offsets: Tensor) -> Any:
        return function(JaggedTensor(x, offsets), *arguments, backend=backend, **options)

    return call


def _tokens(*shape: int) -> Case:
    def case(lengths: Sequence[int]) -> dict[str, Tensor]:
        offsets = product_cases.offsets_of(tuple(lengths))
        return {"x": product_cases.random(sum(lengths), *shape), "offsets": offsets}

    return case


def _every_user(backend: Any, x: Tensor, offsets: Tensor) -> Any:
    users = torch.arange(offsets.shape[0] - 1, device=x.device).repeat(2)
    return jk.jagged_index_select(JaggedTensor(x, offsets), users, backend=backend)


def _cat(backend: Any, x: Tensor, y: Tensor, dense: Tensor, shared: Tensor, offsets: Tensor) -> Any:
    parts = [JaggedTensor(x, offsets), dense, shared, JaggedTensor(y, offsets)]
    return jk.jagged_cat(parts, backend=backend)


def _cat_case(lengths: Sequence[int]) -> dict[str, Tensor]:
    random = product_cases.random
    more = {"y": random(sum(lengths), 3, seed=1), "dense": random(len(lengths), 2, 3, seed=2)}
    return _tokens(3)(lengths) | more | {"shared": random(1, 3, seed=3)}


def _from_padded(backend: Any, padded: Tensor, offsets: Tensor, total: Tensor) -> Any:
    return jk.from_padded(padded, offsets=offsets, total=total.shape[0], backend=backend)


def _from_padded_case(lengths: Sequence[int]) -> dict[str, Tensor]:
    case = {"padded": product_cases.random(len(lengths), 4, 3), "total": torch.ones(sum(lengths))}
    return case | {"total": case["total"].bool(), "offsets": _tokens()(lengths)["offsets"]}


def _pad_matrices(backend: Any, x: Tensor, offsets: Tensor) -> Any:
    m = Jagged2Tensor(x, offsets, jagged2_offsets(offsets))
    return jk.jagged2_to_padded(m, 4, value=-1.0, backend=backend)


def _pad_matrices_case(lengths: Sequence[int]) -> dict[str, Tensor]:
    return _tokens()(lengths) | {"x": product_cases.random(sum(n * n for n in lengths))}


def _embedding(backend: Any, ids: Tensor, first: Tensor, second: Tensor, offsets: Tensor) -> Any:
    features = [JaggedTensor(ids, offsets), ids]
    return jk.jagged_embedding(features, [first, second], backend=backend)


def _embedding_case(lengths: Sequence[int]) -> dict[str, Tensor]:
    tables = {"first": product_cases.random(5, 3), "second": product_cases.random(7, 3, seed=1)}
    return tables | {"ids": torch.arange(sum(lengths)) % 5} | {
        "offsets": _tokens()(lengths)["offsets"]
    }  # fmt: skip


def _operand_without_positions(function: Any) -> Call:
    def call(backend: Any, x: Tensor, other: Tensor, offsets: Tensor) -> Any:
        return function(JaggedTensor(x, offsets), other, backend=backend)

    return call


def _mul2(backend: Any, x: Tensor, other: Tensor, offsets: Tensor) -> Any:
    return jk.jagged2_mul(
        Jagged2Tensor(x, offsets, jagged2_offsets(offsets)), other, backend=backend
    )


def _with_empty(case: Case, *shape: int) -> Case:
    return lambda lengths: case(lengths) | {"other": torch.randn(len(lengths), *shape)}


EVERY: dict[str, tuple[Call, Case]] = {
    name: (operation.call, operation.tensors)
    for name, operation in interaction_cases.OPERATIONS.items()
}
EVERY |= {
    f"product: {name}": (call, lambda lengths, case=case: case(tuple(lengths)))
    for name, (call, case) in product_cases.OPERATIONS.items()
}
EVERY |= {
    "to padded": (_of_tokens(jk.to_padded, 4, value=-1.0), _tokens(3)),
    "from padded": (_from_padded, _from_padded_case),
    "slice": (_of_tokens(jk.jagged_slice, 1, 3), _tokens(3)),
    "recent": (_of_tokens(jk.jagged_recent, 3), _tokens(3)),
    "select": (_every_user, _tokens(3)),
    "cat": (_cat, _cat_case),
    "top k": (_of_tokens(jk.jagged_top_k, 3), _tokens()),
    "matrices to padded": (_pad_matrices, _pad_matrices_case),
    "embedding": (_embedding, _embedding_case),
    "add, L = 0": (_operand_without_positions(jk.jagged_add), _with_empty(_tokens(3), 0, 3)),
    "mul, L = 0": (_operand_without_positions(jk.jagged_mul), _with_empty(_tokens(3), 0, 3)),
    "mul2, L = 0": (_mul2, _with_empty(_pad_matrices_case, 0, 0)),
}
