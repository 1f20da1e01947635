"""Arguments that are no tensors, containers or functions: one line that names them."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch
from attention_cases import DEVICE

from jagged_kernels import (
    ALiBi,
    JaggedMultiheadAttention,
    JaggedTensor,
    RelativePositionBias,
    RelativeTimeBias,
    StepGraphs,
    attention_schedule,
    explain_attention,
    jagged_attention,
    jagged_cat,
    jagged_collate,
    jagged_varlen_attention,
)

OFFSETS = torch.tensor([0, 2, 2, 3], device=DEVICE)
X = JaggedTensor(torch.ones(3, 1, 4, device=DEVICE), OFFSETS)
DENSE = torch.ones(3, 1, 1, 4, device=DEVICE)
anything: Any = JaggedTensor  # names without a look at types by pyright
bias: Any = ALiBi
multihead: Any = JaggedMultiheadAttention
position: Any = RelativePositionBias
time: Any = RelativeTimeBias
graphs: Any = StepGraphs
schedule: Any = attention_schedule
explain: Any = explain_attention
attend: Any = jagged_attention
cat: Any = jagged_cat
varlen: Any = jagged_varlen_attention
wrong: Any = "x"

CASES: dict[str, tuple[Any, type[Exception], str]] = {
    "from_list of lists": (
        lambda: anything.from_list([[1], [2]]),
        TypeError,
        "from_list takes a list of tensors, got list at 0",
    ),
    "from_list of arrays": (
        lambda: anything.from_list([torch.ones(1), np.ones(2)]),
        TypeError,
        "from_list takes a list of tensors, got ndarray at 1",
    ),
    "from_list of a generator": (
        lambda: anything.from_list(torch.ones(n) for n in (1, 2)),
        TypeError,
        "from_list takes a list of tensors, one for each user, got generator",
    ),
    "from_list of a tensor": (
        lambda: anything.from_list(torch.ones(2, 3)),
        TypeError,
        "from_list takes a list of tensors, one for each user, got Tensor",
    ),
    "from_list of numbers": (
        lambda: anything.from_list([torch.ones(()), torch.ones(())]),
        ValueError,
        "tensor 0 must be [n, ...], got one without dimensions",
    ),
    "with_values": (
        lambda: anything.with_values(X, [1]),
        TypeError,
        "values must be a tensor, got list",
    ),
    "from_nested": (
        lambda: anything.from_nested(None),
        TypeError,
        "nested must be a torch.nested tensor, got NoneType",
    ),
    "ALiBi": (lambda: bias(3), TypeError, "ALiBi's slopes must be a tensor, got int"),
    "RelativePositionBias": (
        lambda: position(None),
        TypeError,
        "RelativePositionBias's table must be a tensor, got NoneType",
    ),
    "RelativeTimeBias": (
        lambda: time([1.0], X),
        TypeError,
        "RelativeTimeBias's table must be a tensor, got list",
    ),
    "schedule": (
        lambda: attend(X, X, X, schedule=wrong),
        TypeError,
        "schedule must be an AttentionSchedule, got str",
    ),
    "schedule, dense queries": (
        lambda: attend(DENSE, X, X, schedule=wrong),
        TypeError,
        "schedule must be an AttentionSchedule, got str",
    ),
    "dropout_p": (
        lambda: attend(X, X, X, dropout_p=None),
        TypeError,
        "dropout_p must be a number, got NoneType",
    ),
    "dropout_p of explain": (
        lambda: explain(X, X, X, dropout_p=None),
        TypeError,
        "dropout_p must be a number, got NoneType",
    ),
    "dropout of the module": (
        lambda: multihead(8, 2, dropout=None),
        TypeError,
        "dropout must be a number, got NoneType",
    ),
    "backend of the module": (
        lambda: multihead(8, 2, backend="foo"),
        ValueError,
        "backend must be one of auto, triton, native, reference; got 'foo'",
    ),
    "varlen's offsets": (
        lambda: varlen(X.values, X.values, X.values, [0, 3], [0, 3], 3, 3),
        TypeError,
        "cu_seq_q must be a tensor, got list",
    ),
    "varlen's keys": (
        lambda: varlen(X.values, None, X.values, OFFSETS, OFFSETS, 3, 3),
        TypeError,
        "key must be a tensor, got NoneType",
    ),
    "a step": (lambda: graphs(3), TypeError, "step must be a function, got int"),
    "a step's batch": (
        lambda: graphs(lambda inputs, real: None)([1]),
        TypeError,
        "a batch must map names to tensors, got list",
    ),
    "queries of a schedule": (
        lambda: schedule(None),
        TypeError,
        "q must be a JaggedTensor or a tensor, got NoneType",
    ),
    "keys of a schedule": (
        lambda: schedule(X, 3),
        TypeError,
        "k must be a JaggedTensor, got int",
    ),
    "users": (
        lambda: X[[-9]],
        IndexError,
        "users must lie in [-3, 3), got -9 to -9",
    ),
    "more users": (
        lambda: X[[0, 3]],
        IndexError,
        "users must lie in [-3, 3), got 0 to 3",
    ),
    "jagged_cat": (
        lambda: cat(X),
        TypeError,
        "parts must be a list of JaggedTensors and tensors, got JaggedTensor",
    ),
    "jagged_collate": (
        lambda: jagged_collate([[1, 2], [3]]),
        ValueError,
        "samples must have one structure, but the numbers of values are 2 in sample 0 and 1 in "
        "sample 1; a history must be a tensor or an array, not a list of numbers",
    ),
    "jagged_collate, in a dict": (
        lambda: jagged_collate([{"item": [1, 2]}, {"item": [3]}]),
        ValueError,
        "samples must have one structure, but the numbers of values are 2 in sample 0 and 1 in "
        "sample 1; a history must be a tensor or an array, not a list of numbers",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_what_is_of_another_kind_is_one_line(name: str) -> None:
    call, error, line = CASES[name]
    if "users" in name and DEVICE == "cuda":
        pytest.skip("users on a GPU are not looked at")
    with pytest.raises(error, match=f"^{re.escape(line)}$"):
        call()
