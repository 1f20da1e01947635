"""Other weights than softmax's and lists of keys, as only a GPU can show them: at size, in half
precision, without waiting, and compiled once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attention_cases import DEVICE, Case, seen_keys
from combinations import combined
from meeting_cases import assert_as_exact, pointwise, run, softmax

from jagged_kernels import (
    ALiBi,
    JaggedTensor,
    RequestKeys,
    SemiLocalKeys,
    SiLU,
    StridedKeys,
    attention_schedule,
    jagged_attention,
    lengths_to_offsets,
    retrieved_blocks,
)
from jagged_kernels.core import launch

pytestmark = pytest.mark.gpu
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
LENGTHS = [1500, 1, 0, 64, 65, 129, 17, 700]
SHORT = [17, 0, 5, 32, 1, 16, 33, 9] * 40
TARGETS = torch.tensor([40, 0, 0, 3, 64, 1, 16, 100], device=DEVICE)
RULES = {
    "strided": StridedKeys(5, 2),
    "strided, large blocks": StridedKeys(3, 1, block=128),
    "strided, small blocks": StridedKeys(7, 3, block=16),
    "semi-local": SemiLocalKeys(300, 20),
    "request": RequestKeys(targets=TARGETS, contexts=1, block=32),
    "request, window": RequestKeys(targets=TARGETS, window=200),
}
HEADS = [(4, 4), (4, 2), (8, 1)]
MASKS = [{}, {"causal": True}, {"window": (90, 7)}]
DIMS = [(32, 32), (64, 64), (64, 128), (80, 48), (128, 128), (256, 256)]


@pytest.mark.parametrize(
    ("dtype", "heads", "dims", "mask", "lengths"),
    combined(DTYPES, HEADS, DIMS, MASKS, [LENGTHS, SHORT], whole=False),
)
def test_pointwise_scores_at_size(dtype, heads, dims, mask, lengths):
    (q_heads, kv_heads), (dim, dim_v) = heads, dims
    case = Case(lengths, heads=q_heads, kv_heads=kv_heads, dim=dim, dim_v=dim_v)
    inputs = case.inputs(dtype).with_shared_offsets()

    def visible(_user, queries, keys):
        return seen_keys(queries, keys, **mask)[None]

    weigh = pointwise(torch.nn.functional.silu, None)
    assert_as_exact(inputs, "triton", visible, weigh, scores=SiLU(), **mask)


@pytest.mark.parametrize(
    ("rule", "dtype", "heads", "dims"), combined(RULES, DTYPES, HEADS, DIMS, whole=False)
)
def test_keys_at_size(rule, dtype, heads, dims):
    (q_heads, kv_heads), (dim, dim_v), keys = heads, dims, RULES[rule]
    case = Case(LENGTHS, heads=q_heads, kv_heads=kv_heads, dim=dim, dim_v=dim_v)
    inputs = case.inputs(dtype).with_shared_offsets()

    def visible(user, queries, _keys):
        return keys.visible(queries, q_heads, user=user)

    assert_as_exact(inputs, "triton", visible, softmax, keys=keys)


@pytest.mark.parametrize("dtype", DTYPES)
def test_everything_together(dtype):
    inputs, results = Case(LENGTHS, dim=64).inputs(dtype).with_shared_offsets(), []
    for which, given in (("reference", inputs.double()), ("triton", inputs)):
        torch.manual_seed(2)
        slopes = torch.tensor([0.1, 0.02], device=DEVICE, dtype=given.q.dtype, requires_grad=True)
        options: dict[str, Any] = {"keys": RULES["request"], "scores": SiLU(divide_by=200)}
        found = run(which, given, bias=ALiBi(slopes), dropout_p=0.2, **options)
        results.append([*found.values(), slopes.grad])
    close = 1e-4 if dtype == torch.float32 else 3e-2
    for exact, found in zip(*results, strict=True):
        largest = float(exact.abs().max())
        torch.testing.assert_close(found.double(), exact, rtol=close, atol=close * largest)


def _batch(lengths: torch.Tensor) -> tuple[JaggedTensor, JaggedTensor, JaggedTensor]:
    offsets = lengths_to_offsets(lengths).to(DEVICE)
    shape = (int(lengths.sum()), 4, 64)
    values = [torch.randn(shape, device=DEVICE, dtype=torch.bfloat16) for _ in range(3)]
    q, k, v = (JaggedTensor(x.requires_grad_(), offsets) for x in values)
    return q, k, v


def _step(q: JaggedTensor, k: JaggedTensor, v: JaggedTensor, most: int) -> None:
    rules = (StridedKeys(4, 2), SemiLocalKeys(100, 10), RequestKeys(window=50))
    lists = retrieved_blocks(q, k, 3, newest=2, causal=True, longest=most)
    kinds = torch.arange(q.values.shape[0], device=DEVICE) % 50
    held = retrieved_blocks(q, k, 3, causal=True, categories=(kinds, kinds), longest=most)
    for keys in (*rules, lists, held):
        schedule = attention_schedule(q, keys=keys, longest=most)
        out = jagged_attention(q, k, v, keys=keys, schedule=schedule)
        out.values.sum().backward()
    jagged_attention(q, k, v, causal=True, scores=SiLU(divide_by=most)).values.sum().backward()


def test_a_thousand_batches_compile_nothing_and_wait_for_nothing():
    """Of other lengths and other lists."""
    generator, most = torch.Generator().manual_seed(0), 700

    def lengths(users: int, longest: int) -> torch.Tensor:
        return torch.randint(0, longest + 1, (users,), generator=generator)

    # Few and many users, short and long ones: every rule for tiles.
    for users, longest in ((3, most), (40, 60), (60, 200), (200, 30), (16, 400)):
        _step(*_batch(lengths(users, longest)), most)
    _step(*_batch(torch.full((4,), most)), most)
    before = len(launch._COMPILED)
    torch.cuda.synchronize()
    for _ in range(1000):
        users = int(torch.randint(1, 100, (), generator=generator))
        longest = int(torch.randint(1, most + 1, (), generator=generator))
        batch = _batch(lengths(users, longest))
        torch.cuda.set_sync_debug_mode("error")
        try:
            _step(*batch, most)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert len(launch._COMPILED) == before


@pytest.mark.parametrize("rule", ["strided", "request"])
def test_the_same_from_run_to_run(rule):
    inputs = Case(LENGTHS, heads=8, kv_heads=2, dim=64).inputs(torch.bfloat16)
    inputs = inputs.with_shared_offsets()
    first = run("triton", inputs, keys=RULES[rule], scores=SiLU())
    for _ in range(3):
        for name, result in run("triton", inputs, keys=RULES[rule], scores=SiLU()).items():
            assert torch.equal(result, first[name]), name


@pytest.mark.usefixtures("much_memory")
def test_more_than_2_to_the_31_elements():
    """Addresses of listed blocks at the end of an enormous batch; both batches are long enough for
    the same kernels."""
    long, dim, heads = 2**31 // (64 * 8) + 9000, 64, 8
    offsets = torch.tensor([0, long - 5000, long], device=DEVICE)
    q, k, v = (
        torch.zeros((long, heads, dim), device=DEVICE, dtype=torch.bfloat16) for _ in range(3)
    )
    for x in (q, k, v):
        x[-5000:].normal_()
    keys = SemiLocalKeys(200, 10)
    last = JaggedTensor(q[-5000:], torch.tensor([0, 5000], device=DEVICE))
    rest = (last.with_values(k[-5000:]), last.with_values(v[-5000:]))
    expected = jagged_attention(last, *rest, keys=keys)
    x = JaggedTensor(q, offsets)
    found = jagged_attention(x, x.with_values(k), x.with_values(v), keys=keys)
    torch.testing.assert_close(found.values[-5000:], expected.values)
