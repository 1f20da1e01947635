"""Arguments that are no tensors, containers or functions: one line that names them."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from attention_cases import DEVICE

from jagged_kernels import (
    ALiBi,
    HistoryCache,
    JaggedMultiheadAttention,
    JaggedTensor,
    KeyLists,
    RelativePositionBias,
    RelativeTimeBias,
    StepGraphs,
    attention_schedule,
    explain_attention,
    from_list_column,
    jagged2_like,
    jagged_attention,
    jagged_cat,
    jagged_collate,
    jagged_slice,
    jagged_varlen_attention,
    key_statistics,
    prefix_schedule,
    prefixed_attention,
    scissorhands,
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
collate: Any = jagged_collate
scissors: Any = scissorhands
prefixed: Any = prefixed_attention
of_prefix: Any = prefix_schedule
statistics: Any = key_statistics
lists: Any = KeyLists
wrong: Any = "x"
nothing: Any = None
CACHE = HistoryCache(3, 4, kv_heads=1, head_dim=4, page_size=1, device=DEVICE)

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
    "jagged_collate's dense": (
        lambda: collate([{"item": torch.ones(2), "label": torch.ones(3)}], dense="label"),
        TypeError,
        "dense must be a collection of keys, as ('label',), got str",
    ),
    "jagged_collate's dense, no collection": (
        lambda: collate([torch.ones(2)], dense=0),
        TypeError,
        "dense must be a collection of keys, as ('label',), got int",
    ),
    "jagged_collate's dense, a key too much": (
        lambda: collate([{"item": (torch.ones(2), 1)}], dense=("item", 1, "lable", 7)),
        ValueError,
        "dense has keys that no sample has: 'lable', 7",
    ),
    "from_list of several dtypes": (
        lambda: anything.from_list([torch.zeros(0), torch.tensor([7]), torch.ones(1)]),
        TypeError,
        "tokens must be of one dtype, got torch.int64 for user 1 and torch.float32 for user 2",
    ),
    "jagged_collate of several dtypes": (
        lambda: collate([{"item": torch.tensor([7])}, {"item": torch.ones(2)}]),
        TypeError,
        "tokens must be of one dtype, got torch.int64 for user 0 and torch.float32 for user 1",
    ),
    "jagged_collate of batches of several dtypes": (
        lambda: collate([X, X.with_values(X.values.half())]),
        TypeError,
        "tokens must be of one dtype, got torch.float32 for sample 0 and torch.float16 for sample "
        "1",
    ),
    "from_list_column of several dtypes": (
        lambda: from_list_column([np.array([7]), np.array([0.5])]),
        TypeError,
        "tokens must be of one dtype, got torch.int64 for user 0 and torch.float64 for user 1",
    ),
    "from_list_column of series": (
        lambda: from_list_column([pd.Series([1, 2])]),
        TypeError,
        "row 0 must be a list or an array, got Series",
    ),
    "scissorhands' seed": (
        lambda: scissors(CACHE, budget=2, policy="random", seed=2.0),
        TypeError,
        "seed must be an int, got float",
    ),
    "times": (
        lambda: time(torch.ones(4, 1), np.arange(3)),
        TypeError,
        "RelativeTimeBias's times must be a JaggedTensor or a tensor, got ndarray",
    ),
    "no times": (
        lambda: time(torch.ones(4, 1), None),
        TypeError,
        "RelativeTimeBias's times must be a JaggedTensor or a tensor, got NoneType",
    ),
    "query_times": (
        lambda: time(torch.ones(4, 1), X, query_times=[1, 2, 3]),
        TypeError,
        "RelativeTimeBias's query_times must be a JaggedTensor or a tensor, got list",
    ),
    "max_distance": (
        lambda: position(torch.ones(8, 1), max_distance=20.0),
        TypeError,
        "max_distance must be an int, got float",
    ),
    "prefix_schedule of a call": (
        lambda: prefixed(X, X, X, X.values, X.values, prefix_schedule=wrong),
        TypeError,
        "prefix_schedule must be an AttentionSchedule, got str",
    ),
    "queries of a prefix": (
        lambda: of_prefix(None, X.values),
        TypeError,
        "q must be a JaggedTensor or a tensor, got NoneType",
    ),
    "a prefix": (
        lambda: of_prefix(X, X),
        TypeError,
        "prefix_k must be a tensor, got JaggedTensor",
    ),
    "a flat prefix": (
        lambda: of_prefix(X, X.values[0]),
        ValueError,
        "prefix_k must be [P, H, D], got (1, 4)",
    ),
    "schedule of statistics": (
        lambda: statistics(X, X, torch.ones(3, 1, device=DEVICE), schedule=wrong),
        TypeError,
        "schedule must be an AttentionSchedule, got str",
    ),
    "lists of lists": (
        lambda: lists.from_rows([0, 1], torch.zeros(1), OFFSETS, OFFSETS, block=16),
        TypeError,
        "row_ptr must be a tensor, got list",
    ),
    "lists of such offsets": (
        lambda: lists.from_rows(OFFSETS, OFFSETS, OFFSETS, [0, 3], block=16),
        TypeError,
        "k_offsets must be a tensor, got list",
    ),
    "events to keep": (
        lambda: CACHE.keep(nothing),
        TypeError,
        "kept must be a tensor, got NoneType",
    ),
    "total": (
        lambda: jagged_slice(X, 0, 1, total=wrong),
        TypeError,
        "total must be an int or None, got str",
    ),
    "total, a tensor": (
        lambda: jagged_slice(X, 0, 1, total=torch.tensor(2)),  # pyright: ignore
        TypeError,
        "total must be an int or None, got Tensor",
    ),
    "q_tokens": (
        lambda: lists.from_rows(OFFSETS, OFFSETS, OFFSETS, OFFSETS, block=16, q_tokens=3.0),
        TypeError,
        "q_tokens must be an int or None, got float",
    ),
    "with_values of matrices": (
        lambda: jagged2_like(X).with_values(nothing),
        TypeError,
        "values must be a tensor, got NoneType",
    ),
    "sizes of steps": (
        lambda: graphs(print, per_octave=4.0),
        TypeError,
        "per_octave must be an int, got float",
    ),
    "numbers of graphs": (
        lambda: graphs(print, most_graphs=None),
        TypeError,
        "most_graphs must be an int, got NoneType",
    ),
    "kdim": (
        lambda: multihead(8, 2, kdim=-1),
        ValueError,
        "kdim and vdim must be at least 1, got -1 and 8",
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
