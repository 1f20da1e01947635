"""PyTorch's nested tensors in the place of `JaggedTensor`s."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from attention_cases import DEVICE
from operation_cases import COMPILER

import jagged_kernels as jk
from jagged_kernels import JaggedTensor, RelativeTimeBias, attention_schedule, jagged_attention

OFFSETS = torch.tensor([0, 3, 3, 8], device=DEVICE)
GENERATOR = torch.Generator().manual_seed(0)


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=GENERATOR).to(DEVICE)


def jagged(*shape: int) -> JaggedTensor:
    return JaggedTensor(random(8, *shape), OFFSETS)


def heads_first(x: JaggedTensor) -> torch.Tensor:
    return x.to_nested().transpose(1, 2)


X, Y, SCORES = jagged(2), jagged(2), jagged()
IDS = JaggedTensor(torch.tensor([1, 0, 1, 2, 2, 0, 1, 1], device=DEVICE), OFFSETS)
Q, K, V = jagged(2, 16), jagged(2, 16), jagged(2, 16)
M = jk.jagged_outer(X, Y)
CACHE = jk.HistoryCache(3, 8, kv_heads=2, head_dim=16, device=DEVICE)
CACHE.append(K, V)
PREFIX_K, PREFIX_V = random(3, 2, 16), random(3, 2, 16)
LONG_Q, LONG_K = jagged(2, 64), jagged(2, 64)
FP8_KEYS = jk.fp8_keys(LONG_K, LONG_K)
LSE = jk.jagged_attention(Q, K, V, causal=True, return_lse=True)[1]

# The arguments of each public operation that takes a `JaggedTensor`.
OPERATIONS: dict[str, tuple[Any, ...]] = {
    "attention_schedule": (Q, K),
    "cache_schedule": (Q, CACHE),
    "cached_attention": (Q, CACHE),
    "block_means": (X, 16),
    "fp8_attention": (LONG_Q, FP8_KEYS),
    "fp8_keys": (LONG_K, LONG_K),
    "jagged2_like": (X,),
    "jagged2_matmul": (M, X),
    "jagged_add": (X, Y),
    "jagged_attention": (Q, K, V),
    "jagged_cat": ([X, Y, random(3, 1, 2)],),
    "jagged_dense_bmm": (X, random(3, 2, 2)),
    "jagged_embedding": ([IDS, IDS], [random(3, 2), random(3, 2)]),
    "jagged_index_select": (X, torch.tensor([2, 0, 2], device=DEVICE)),
    "jagged_jagged_bmm": (X, Y),
    "jagged_last_k": (X, 2),
    "jagged_layer_norm": (X,),
    "jagged_linear": (X, random(3, 2, 2)),
    "jagged_max": (X,),
    "jagged_mean": (X,),
    "jagged_mul": (X, Y),
    "jagged_outer": (X, Y),
    "jagged_recent": (X, 2),
    "jagged_rms_norm": (X,),
    "jagged_self_difference": (SCORES,),
    "jagged_slice": (X, 1, 2),
    "jagged_softmax": (X,),
    "jagged_sum": (X,),
    "jagged_top_k": (SCORES, 2),
    "jagged_unique": (IDS,),
    "jagged_weighted_sum": (X, SCORES),
    "key_statistics": (Q, K, LSE),
    "persistence_ratio": (Q, K, LSE),
    "prefix_schedule": (Q, PREFIX_K),
    "prefixed_attention": (Q, K, V, PREFIX_K, PREFIX_V),
    "retrieved_blocks": (Q, K, 1),
    "target_interaction": (X, random(3, 2), random(4, 8)),
    "to_padded": (X, 2),
}


def places(arguments: Any) -> int:
    """How many `JaggedTensor`s there are in lists and tuples."""
    if isinstance(arguments, (list, tuple)):
        return sum(map(places, arguments))
    return isinstance(arguments, JaggedTensor)


def nest(arguments: Any, chosen: list[bool]) -> Any:
    """With those `JaggedTensor`s as nested tensors that are `chosen`, which is used up."""
    if isinstance(arguments, (list, tuple)):
        return [nest(x, chosen) for x in arguments]
    if not isinstance(arguments, JaggedTensor):
        return arguments
    return arguments.to_nested() if chosen.pop(0) else arguments


def tensors(result: Any) -> dict[str, Any]:
    """The tensors of a result by place; where a `JaggedTensor` or a nested one is, its parts."""
    if isinstance(result, tuple):
        found = {}
        for index, part in enumerate(result):
            found |= {f"{index}.{name}": x for name, x in tensors(part).items()}
        return found
    if isinstance(result, torch.Tensor) and result.is_nested:
        result = JaggedTensor.from_nested(result)
    if isinstance(result, JaggedTensor):
        return {"values": result.values, "offsets": result.offsets}
    if isinstance(result, torch.Tensor):
        return {"dense": result}
    if isinstance(result, jk.KeyStatistics):
        return {"unimportant": result.unimportant.values, "mass": result.mass.values}
    return {name: getattr(result, name) for name in TENSORS.get(type(result), ("values",))}


TENSORS = {
    jk.AttentionSchedule: ("rows", "rows_t"),
    jk.KeyLists: ("row_ptr", "col"),
    jk.CacheSchedule: ("rows", "k_offsets"),
    jk.FP8Keys: ("k_scale", "v_scale", "offsets"),
    jk.Persistence: ("ratio", "kept", "pivotal"),
}


def kinds(result: Any) -> list[Any]:
    """Of each part: nested, or else its type."""
    parts = result if isinstance(result, tuple) else (result,)
    return ["nested" if getattr(x, "is_nested", False) else type(x) for x in parts]


def test_no_operation_is_missing():
    takes = {
        name
        for name in jk.__all__
        if inspect.isfunction(function := getattr(jk, name))
        and any("JaggedTensor" in str(p) for p in inspect.signature(function).parameters.values())
    }
    # Whose results are another library's, or words: see their own tests.
    assert set(OPERATIONS) == takes - {"to_list_column", "to_torchrec", "explain_attention"}


@pytest.mark.parametrize("name", OPERATIONS)
def test_every_operation(name):
    """All arguments nested, and each alone."""
    function, arguments = getattr(jk, name), OPERATIONS[name]
    expected, count = function(*arguments), places(arguments)
    each = [[place == other for other in range(count)] for place in range(count)]
    for chosen in [[True] * count, *each]:
        result = function(*nest(arguments, list(chosen)))
        found, wanted = tensors(result), tensors(expected)
        assert found.keys() == wanted.keys()
        for part, tensor in wanted.items():
            equal = {"rtol": 0.0, "atol": 0.0, "equal_nan": True}
            torch.testing.assert_close(found[part], tensor, **equal, msg=f"{chosen} {part}")
        nested_for = [("nested" if kind is JaggedTensor else kind) for kind in kinds(expected)]
        assert kinds(result) == nested_for, chosen


def test_by_name():
    result = jk.jagged_layer_norm(x=X.to_nested(), residual=Y)  # pyright: ignore
    expected = jk.jagged_layer_norm(X, residual=Y)
    assert kinds(result) == ["nested", "nested"]
    for found, wanted in zip(result, expected, strict=True):
        assert torch.equal(found.values(), wanted.values)


def leaves(*layouts: Any) -> tuple[list[torch.Tensor], list[Any]]:
    """q, k and v as leaves, and in the given layouts."""
    values = [x.values.clone().requires_grad_() for x in (Q, K, V)]
    return values, [make(Q.with_values(x)) for make, x in zip(layouts, values, strict=True)]


@pytest.mark.parametrize("backend", ["native", "reference"])
@pytest.mark.parametrize(
    "layout",
    [JaggedTensor.to_nested, heads_first],
    ids=["tokens first", "heads first"],
)
def test_attention_and_its_gradients(layout, backend):
    d_o = random(8, 2, 16)
    expected_leaves, plain = leaves(*[lambda x: x] * 3)
    expected = jagged_attention(*plain, causal=True, backend=backend)
    expected.values.backward(d_o)

    ours, nested = leaves(*[layout] * 3)
    out = jagged_attention(*nested, causal=True, backend=backend)
    assert out.shape == nested[0].shape
    assert (out + nested[0]).shape == out.shape  # the same symbol for n*
    rows = out if layout is JaggedTensor.to_nested else out.transpose(1, 2)
    assert torch.equal(rows.values(), expected.values)
    rows.values().backward(d_o)
    for found, wanted in zip(ours, expected_leaves, strict=True):
        assert found.grad is not None
        assert wanted.grad is not None
        assert torch.equal(found.grad, wanted.grad)


def test_attention_as_sdpa():
    q, k, v = (heads_first(x) for x in (Q, K, V))
    out = jagged_attention(q, k, v)
    peer = torch.nn.functional.scaled_dot_product_attention(q, k, v)
    assert out.shape == peer.shape
    for found, wanted in zip(out.unbind(), peer.unbind(), strict=True):
        torch.testing.assert_close(found, wanted)


def test_layouts_mix_and_the_first_decides():
    expected = jagged_attention(Q, K, V).values
    out = jagged_attention(heads_first(Q), K.to_nested(), V)  # pyright: ignore
    assert torch.equal(out.transpose(1, 2).values(), expected)
    out, lse = jagged_attention(Q.to_nested(), heads_first(K), heads_first(V), return_lse=True)
    assert torch.equal(out.values(), expected)
    assert torch.equal(lse, jagged_attention(Q, K, V, return_lse=True)[1])


@pytest.mark.parametrize("shape", [(3, 1, 2, 16), (1, 2, 16)])
def test_dense_queries_get_dense_results(shape):
    queries = random(*shape)
    out = jagged_attention(queries, heads_first(K), heads_first(V))
    assert torch.equal(out, jagged_attention(queries, K, V))


def test_schedule_and_times_may_be_nested():
    schedule = attention_schedule(heads_first(Q), causal=True)
    assert torch.equal(schedule.rows, attention_schedule(Q, causal=True).rows)
    table, times = random(8, 2), IDS
    expected = jagged_attention(Q, K, V, bias=RelativeTimeBias(table, times), causal=True)
    out = jagged_attention(
        *(x.to_nested() for x in (Q, K, V)),
        bias=RelativeTimeBias(table, times.to_nested()),
        causal=True,
        schedule=schedule,
    )
    assert torch.equal(out.values(), expected.values)


def test_known_lengths_are_kept():
    """Else SDPA would wait for the device in every layer."""
    parts: Any = torch.nested.nested_tensor_from_jagged(
        Q.values, OFFSETS, min_seqlen=0, max_seqlen=5
    )
    out: Any = jagged_attention(parts, parts, parts)
    assert (out._maybe_min_seqlen, out._maybe_max_seqlen) == (0, 5)
    other: Any = jk.jagged_recent(parts, 2)
    assert (other._maybe_min_seqlen, other._maybe_max_seqlen) == (None, None)


@pytest.mark.parametrize("make", [JaggedTensor.to_nested, heads_first])
def test_compiles_whole(make):
    torch._dynamo.reset()

    def attend(q, k, v):
        return jagged_attention(q, k, v, causal=True)

    compiled = torch.compile(attend, fullgraph=True, backend=COMPILER)
    results = []
    for function in (attend, compiled):
        values, nested = leaves(*[make] * 3)
        out = function(*nested)
        (out * out).values().sum().backward()
        results.append([out.detach().values(), *(x.grad for x in values)])
    for eager, graph in zip(*results, strict=True):
        torch.testing.assert_close(graph, eager)


def test_wrong_nested_tensors():
    nested = Q.to_nested()
    holes = torch.nested.narrow(random(3, 4, 2, 16), 1, 0, torch.tensor([1, 2, 4], device=DEVICE),
                                layout=torch.jagged)  # fmt: skip
    strided = torch.nested.as_nested_tensor([random(2, 2), random(1, 2)])
    for wrong, message in [
        (holes, "nested has holes"),
        (strided, "nested must have the jagged layout"),
        (nested.transpose(1, 2).transpose(2, 3), "it is in dimension 3"),
    ]:
        with pytest.raises(ValueError, match=message):
            jk.jagged_sum(wrong)  # pyright: ignore


def test_errors_are_those_of_the_operation_alone():
    with pytest.raises(ValueError, match=r"window must be \(left, right\) of -1 or more") as error:
        jagged_attention(Q.to_nested(), K.to_nested(), V.to_nested(), window=(-2, 0))
    assert error.value.__context__ is None
    with pytest.raises(TypeError, match="k and v must be JaggedTensors, got list and list"):
        jagged_attention(Q, [1], [2])  # pyright: ignore
