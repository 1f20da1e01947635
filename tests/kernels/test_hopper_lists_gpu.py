"""Lists of key blocks on Hopper's kernels: against the specification in float64, beside neighbours
and behind what lists hide, and from run to run. All of it through `jagged_attention`, with the
lengths from which these kernels pay set to 0."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from attention_cases import DEVICE, RESULTS, Case, Inputs
from choice_cases import on_hopper
from combinations import combined
from launch_keys import watch_launches
from meeting_cases import Mask, assert_as_exact, pointwise, run, softmax
from pays import TWO_PASSES, paying_from
from score_policies import POLICIES
from torch import Tensor

from jagged_kernels import (
    JaggedTensor,
    KeyLists,
    RequestKeys,
    SemiLocalKeys,
    StridedKeys,
    jagged_attention,
    retrieved_blocks,
)
from jagged_kernels.attention import choice
from jagged_kernels.schedule.keys.lists import expand_lists
from jagged_kernels.schedule.policy.hopper import NEVER

# Around blocks of 64 and 128, and parts of 64; empty users; a list with many blocks.
LENGTHS = [0, 1, 63, 64, 65, 127, 128, 129, 1000, 0, 7, 300]
CROSS = ([5, 0, 200, 64, 130, 1, 300, 9], [300, 10, 0, 64, 1000, 129, 20, 1])
TARGETS = torch.tensor([0, 0, 3, 63, 1, 40, 0, 5, 100, 0, 6, 64], device=DEVICE)
BLOCKS = [64, 128]
DIMS = [64, 128]
DTYPES = [torch.bfloat16, torch.float16]
HEADS = [(4, 4), (4, 2), (4, 1)]
RULES = {
    "strided": lambda block: StridedKeys(5, 2, block=block),
    "strided, all see the same": lambda block: StridedKeys(3, 1, step=0, block=block),
    "semi-local": lambda block: SemiLocalKeys(150, 20, block=block),
    "request": lambda block: RequestKeys(targets=TARGETS, contexts=1, window=200, block=block),
}
KERNELS = {
    "forward": "jagged_kernels.attention.hopper.forward",
    "dq": "jagged_kernels.attention.hopper.dq",
    "dkv": "jagged_kernels.attention.hopper.dkv",
}


@pytest.fixture
def pays_always() -> Iterator[None]:
    with paying_from(0, *TWO_PASSES):
        yield


@pytest.fixture
def no_longer_pays() -> Iterator[Callable[[], None]]:
    """Called after `pays_always`, it leaves all to the plain kernels."""
    with ExitStack() as stack:
        yield lambda: stack.enter_context(paying_from(NEVER, *TWO_PASSES))


def random_lists(
    q_offsets: Tensor, k_offsets: Tensor, *, block: int, groups: int, window: tuple[int, int],
    chance: float = 0.4, seed: int = 0,
) -> KeyLists:  # fmt: skip
    """Each tile of a group sees each block with a chance; some see none."""
    generator = torch.Generator().manual_seed(seed)
    q_ends, k_ends = q_offsets.tolist(), k_offsets.tolist()
    entries = (q_ends[-1] // block + len(q_ends) - 1) * groups
    listed: list[list[int]] = [[] for _ in range(entries)]
    for user in range(len(q_ends) - 1):
        n, m = (ends[user + 1] - ends[user] for ends in (q_ends, k_ends))
        first = q_ends[user] // block + user
        for entry in range(first * groups, (first + -(-n // block)) * groups):
            chosen = torch.rand(-(-m // block), generator=generator) < chance
            listed[entry] = chosen.nonzero().flatten().tolist()
    counts = torch.tensor([0, *map(len, listed)])
    col = torch.tensor([x for one in listed for x in one], dtype=torch.int64)
    return KeyLists.from_rows(
        counts.cumsum(0).to(q_offsets.device), col.to(q_offsets.device), q_offsets, k_offsets,
        block=block, groups=groups, window=window,
    )  # fmt: skip


def mask_of(lists: KeyLists, inputs: Inputs, heads: int) -> Mask:
    """What lists without a rule show, in the form of `meeting_cases`."""
    q_ends, k_ends = inputs.q_offsets.tolist(), inputs.k_offsets.tolist()
    left, right = lists.window

    def visible(user: int, n: int, m: int) -> Tensor:
        queries, keys = (tuple(ends[user : user + 2]) for ends in (q_ends, k_ends))
        shown = expand_lists(lists, user, queries, keys)  # pyright: ignore[reportArgumentType]
        i = torch.arange(m - n, m, device=DEVICE)[:, None]
        j = torch.arange(m, device=DEVICE)
        if left >= 0:
            shown = shown & (j >= i - left)
        if right >= 0:
            shown = shown & (j <= i + right)
        return shown.repeat_interleave(heads // lists.groups, 0)

    return visible


def taken(dim: int, block: int) -> set[str]:
    """The passes that Hopper's kernels have for such lists."""
    families = {
        "forward": choice.HOPPER_FORWARD, "dq": choice.HOPPER_DQ, "dkv": choice.HOPPER_DKV,
    }  # fmt: skip
    return {
        of_pass
        for of_pass, family in families.items()
        if block in (family.listed or {}).get(dim, ()) and dim in (family.boxes or ())
    }


# --- results --------------------------------------------------------------------------------------


@on_hopper
@pytest.mark.usefixtures("pays_always")
@pytest.mark.parametrize(
    ("rule", "block", "dim", "dtype", "heads"),
    combined(RULES, BLOCKS, DIMS, DTYPES, HEADS, whole=False),
)
def test_the_keys_of_rules(rule, block, dim, dtype, heads, monkeypatch):
    (q_heads, kv_heads), keys = heads, RULES[rule](block)
    case = Case(LENGTHS, heads=q_heads, kv_heads=kv_heads, dim=dim)
    inputs = case.inputs(dtype).with_shared_offsets()
    launches = watch_launches(monkeypatch)

    def visible(user, queries, _keys):
        return keys.visible(queries, q_heads, user=user)

    assert_as_exact(inputs, "triton", visible, softmax, keys=keys)
    found = {of_pass for of_pass, module in KERNELS.items() if module in {m for _, m in launches}}
    assert found == taken(dim, block)


@on_hopper
@pytest.mark.usefixtures("pays_always")
@pytest.mark.parametrize(
    ("policy", "rule", "block", "dim", "dtype", "heads"),
    combined(
        ["silu", "silu by a number", "own"], ["strided", "semi-local"], BLOCKS, DIMS, DTYPES, HEADS,
        whole=False,
    ),
)  # fmt: skip
def test_pointwise_scores(policy, rule, block, dim, dtype, heads):
    (q_heads, kv_heads), keys = heads, RULES[rule](block)
    scores, function = POLICIES[policy]
    case = Case(LENGTHS, heads=q_heads, kv_heads=kv_heads, dim=dim)
    inputs = case.inputs(dtype).with_shared_offsets()

    def visible(user, queries, _keys):
        return keys.visible(queries, q_heads, user=user)

    weigh = pointwise(function, scores.divide_by)
    assert_as_exact(inputs, "triton", visible, weigh, keys=keys, scores=scores)


@on_hopper
@pytest.mark.usefixtures("pays_always")
@pytest.mark.parametrize(
    ("block", "dim", "dtype", "heads", "groups", "window"),
    combined(BLOCKS, DIMS, DTYPES, HEADS, [1, 2, 4], [(-1, -1), (-1, 0), (200, 30)], whole=False),
)
def test_random_lists(block, dim, dtype, heads, groups, window):
    q_heads, kv_heads = heads
    inputs = Case(*CROSS, heads=q_heads, kv_heads=kv_heads, dim=dim).inputs(dtype)
    lists = random_lists(
        inputs.q_offsets, inputs.k_offsets, block=block, groups=groups, window=window
    )
    assert_as_exact(inputs, "triton", mask_of(lists, inputs, q_heads), softmax, keys=lists)


@on_hopper
@pytest.mark.usefixtures("pays_always")
@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("dim", DIMS)
def test_retrieved_blocks(dim, block):
    case = Case([300, 64, 0, 200], [2000, 64, 300, 1111], heads=4, kv_heads=2, dim=dim)
    inputs = case.inputs(torch.bfloat16)
    q, k = JaggedTensor(inputs.q, inputs.q_offsets), JaggedTensor(inputs.k, inputs.k_offsets)
    lists = retrieved_blocks(q, k, 3, newest=1, block=block)
    assert_as_exact(inputs, "triton", mask_of(lists, inputs, 4), softmax, keys=lists)


@on_hopper
@pytest.mark.usefixtures("pays_always")
@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("dim", DIMS)
def test_more_tiles_than_programs(dim, block):
    """Rings of buffers and notes go on from tile to tile, also past empty lists and parts."""
    lengths = list(range(1, 420, 6))
    inputs = Case(lengths, heads=4, kv_heads=4, dim=dim).inputs(torch.bfloat16)
    for chance in (0.1, 0.6):
        lists = random_lists(
            inputs.q_offsets, inputs.k_offsets, block=block, groups=4, window=(-1, -1),
            chance=chance,
        )  # fmt: skip
        assert_as_exact(inputs, "triton", mask_of(lists, inputs, 4), softmax, keys=lists)


@on_hopper
@pytest.mark.usefixtures("pays_always")
@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("dim", DIMS)
def test_long_lists_and_lse(dim, block, no_longer_pays):
    """As the plain kernels have them, at a length that these are for."""
    keys = StridedKeys(8, 3, block=block)
    inputs = Case([5000, 3100, 4097], heads=8, kv_heads=8, dim=dim).inputs(torch.bfloat16)
    found = _with_lse(inputs, keys)
    no_longer_pays()
    expected = _with_lse(inputs, keys)
    for name, result in expected.items():
        size = float(result.abs().max())
        torch.testing.assert_close(found[name], result, rtol=3e-2, atol=1e-2 * size, msg=name)
    torch.testing.assert_close(found["lse"], expected["lse"], rtol=1e-4, atol=1e-3)


def _with_lse(inputs: Inputs, keys: Any) -> dict[str, Tensor]:
    leaves = [x.detach().requires_grad_() for x in (inputs.q, inputs.k, inputs.v)]
    q, k, v = (JaggedTensor(x, inputs.q_offsets) for x in leaves)
    out, lse = jagged_attention(q, k, v, keys=keys, backend="triton", return_lse=True)
    outputs = [out.values, lse]
    gradients = torch.autograd.grad(outputs, leaves, [inputs.d_o, inputs.d_lse])
    return dict(zip(RESULTS, [x.detach() for x in (*outputs, *gradients)], strict=True))


# --- neighbours, what is hidden, reruns -----------------------------------------------------------


@on_hopper
@pytest.mark.usefixtures("pays_always")
@pytest.mark.parametrize(
    ("dim", "block", "rule", "value"),
    combined(DIMS, BLOCKS, ["strided", "semi-local", "random"], [math.nan, math.inf], whole=False),
)
def test_a_user_does_not_depend_on_neighbours(dim, block, rule, value):
    inputs = Case(LENGTHS, dim=dim).inputs(torch.bfloat16).with_shared_offsets()
    if rule == "random":
        offsets = inputs.q_offsets
        keys: Any = random_lists(offsets, offsets, block=block, groups=2, window=(-1, -1))
    else:
        keys = RULES[rule](block)
    clean = run("triton", inputs, keys=keys)
    bounds = inputs.q_offsets.tolist()
    for user in (1, 3, 6, 8, 10):
        sick = slice(*bounds[user : user + 2])
        given = (inputs.q, inputs.k, inputs.v, inputs.d_o)
        kept = [tensor[sick].clone() for tensor in given]
        for tensor in given:
            tensor[sick] = value
        for name, result in run("triton", inputs, keys=keys).items():
            for healthy in (slice(0, sick.start), slice(sick.stop, None)):
                assert torch.equal(result[healthy], clean[name][healthy]), (user, name)
        for tensor, values in zip(given, kept, strict=True):
            tensor[sick] = values


@on_hopper
@pytest.mark.usefixtures("pays_always")
@pytest.mark.parametrize(
    ("dim", "block", "rule", "place"),
    combined(
        DIMS, BLOCKS, ["strided", "semi-local", "random"], ["q", "k", "v", "d_o"], whole=False
    ),
)
def test_nan_reaches_what_it_reaches_in_the_plain_kernels(dim, block, rule, place, no_longer_pays):
    case = Case([700, 5, 560], heads=4, kv_heads=2, dim=dim)
    results = []
    for plain in (False, True):
        inputs = case.inputs(torch.bfloat16).with_shared_offsets()
        offsets = inputs.q_offsets
        getattr(inputs, place)[400, 1] = math.nan
        keys: Any = (
            random_lists(offsets, offsets, block=block, groups=2, window=(-1, -1))
            if rule == "random"
            else RULES[rule](block)
        )
        if plain:
            no_longer_pays()
        results.append(run("triton", inputs, keys=keys))
    for name, expected in results[1].items():
        found = results[0][name]
        assert torch.equal(found.isnan(), expected.isnan()), name
        error = (found.double() - expected.double()).nan_to_num(0.0).abs().max()
        largest = expected.double().nan_to_num(0.0).abs().max()
        assert error <= 6 * torch.finfo(found.dtype).eps * largest, (name, error)


@on_hopper
@pytest.mark.usefixtures("pays_always")
@pytest.mark.parametrize("rule", ["strided", "semi-local"])
@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("dim", DIMS)
def test_reruns_are_bit_identical(dim, block, rule):
    """Also where a program's tiles follow each other so fast that their loads could overtake it."""
    case = Case([2048] * 8 + LENGTHS + [50] * 132, heads=4, kv_heads=4, dim=dim)
    inputs = case.inputs(torch.bfloat16).with_shared_offsets()
    keys = StridedKeys(5, 2, block=block) if rule == "strided" else RULES[rule](block)
    first = run("triton", inputs, keys=keys)
    for _ in range(20):
        for name, result in run("triton", inputs, keys=keys).items():
            assert torch.equal(result, first[name]), name


@on_hopper
@pytest.mark.usefixtures("pays_always")
def test_what_is_listed_twice_or_is_no_block_is_as_in_the_plain_kernels(no_longer_pays):
    """In tables that nobody has looked at."""
    inputs = Case([300, 130], dim=64).inputs(torch.bfloat16).with_shared_offsets()
    # Tiles of the first user have numbers 0 to 4, those of the other 5 to 7.
    listed = [[0, 2, 2], [-2, 4], [], [2**30, 6], [9, 0], [1, 3, 2 * 2**28], [5, 5], [2]]
    counts = torch.tensor([0, *map(len, listed)])
    row_ptr = counts.cumsum(0).int().to(DEVICE)
    col = torch.tensor([x for one in listed for x in one], dtype=torch.int32, device=DEVICE)
    lists = KeyLists(row_ptr, col, None, None, 64, 1, None)
    q = JaggedTensor(inputs.q, inputs.q_offsets)
    k, v = q.with_values(inputs.k), q.with_values(inputs.v)
    with torch.no_grad():
        found = jagged_attention(q, k, v, keys=lists, backend="triton").values
        no_longer_pays()
        expected = jagged_attention(q, k, v, keys=lists, backend="triton").values
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=1e-2)


@on_hopper
@pytest.mark.usefixtures("pays_always")
@pytest.mark.parametrize("dim", DIMS)
def test_it_never_waits_for_the_device(dim):
    inputs = Case([700, 0, 97, 3], heads=4, kv_heads=4, dim=dim).inputs(torch.bfloat16)
    leaves = [x.requires_grad_() for x in (inputs.q, inputs.k, inputs.v)]
    q, k, v = (JaggedTensor(x, inputs.q_offsets) for x in leaves)
    lists = random_lists(inputs.q_offsets, inputs.q_offsets, block=64, groups=1, window=(-1, -1))
    jagged_attention(q, k, v, keys=lists).values.sum().backward()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        jagged_attention(q, k, v, keys=lists).values.sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
