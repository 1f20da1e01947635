"""Every backend against the specification in float64: outputs, lse and all gradients."""

from __future__ import annotations

import pytest
import torch
from attention_cases import (
    DEVICE,
    DIFFERENT_DIMS,
    FACTOR,
    TILE,
    Case,
    Standard,
    assert_as_exact_as_sdpa,
    run,
)
from combinations import combined
from hypothesis import example, given, settings
from hypothesis import strategies as st

from jagged_kernels import JaggedTensor, SemiLocalKeys, jagged_attention, lengths_to_offsets
from jagged_kernels.attention.native import Mask, _buckets

LENGTHS = [0, 1, TILE - 1, TILE, TILE + 1, 3 * TILE + 5]
MASKS = {
    "full": {},
    "causal": {"causal": True},
    "window": {"window": (TILE + 3, 5)},
    "left": {"window": (7, -1)},
    "causal window": {"causal": True, "window": (TILE, -1)},
    "negative scale": {"scale": -0.3},
}
BACKENDS = ("native", "triton")


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_self_attention_over_every_length(mask):
    inputs = Case(LENGTHS).inputs(torch.float32)
    assert_as_exact_as_sdpa(inputs, *BACKENDS, **mask)


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_cross_attention_with_other_lengths(mask):
    q_lengths = [3, TILE + 1, 0, 2 * TILE, 1, 5]
    k_lengths = [TILE, 5, 4, 2 * TILE + 3, 0, TILE + 1]
    inputs = Case(q_lengths, k_lengths).inputs(torch.float32)
    assert_as_exact_as_sdpa(inputs, *BACKENDS, **mask)


@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (4, 2), (6, 1)])
def test_grouped_query_heads(heads, kv_heads):
    case = Case([TILE + 1, 2, 0], [5, TILE + 2, 3], heads=heads, kv_heads=kv_heads)
    assert_as_exact_as_sdpa(case.inputs(torch.float32), *BACKENDS)


@pytest.mark.parametrize(("dim", "dim_v"), [(8, 8), (16, 40), (72, 16), (96, 96), (256, 256)])
def test_any_head_dim(dim, dim_v):
    inputs = Case([TILE + 1, 3], heads=1, kv_heads=1, dim=dim, dim_v=dim_v).inputs(torch.float32)
    # 16: exact float32 products of large tiles take minutes to compile for a GPU.
    assert_as_exact_as_sdpa(inputs, *BACKENDS, tile=16, causal=True)


@pytest.mark.parametrize("mask", [{}, {"causal": True}], ids=["full", "causal"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_float16(backend, mask):
    assert_as_exact_as_sdpa(Case(LENGTHS).inputs(torch.float16), backend, **mask)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("dtype", "dim", "mask"),
    combined(
        [torch.float32, torch.float16, torch.bfloat16],
        [8, 32, 64, 80, 128, 256],
        [{}, {"causal": True}, {"window": (100, 30)}],
        whole=False,
    ),
    ids=str,
)
def test_default_tiles_on_the_device(dtype, dim, mask):
    case = Case([0, 1, 63, 64, 65, 700, 128, 0, 17], heads=4, kv_heads=2, dim=dim)
    assert_as_exact_as_sdpa(case.inputs(dtype), "triton", tile=None, **mask)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("dtype", "same_offsets"),
    [(torch.float32, True), (torch.bfloat16, True), (torch.bfloat16, False)],
    ids=str,
)
@pytest.mark.parametrize(("dim", "dim_v"), DIFFERENT_DIMS)
def test_head_dims_that_differ_on_the_device(dtype, same_offsets, dim, dim_v):
    """Users of one block and of several; with the same offsets, the short ones by kernels of their
    own beside those that all users get without."""
    case = Case([5, 16, 17, 20, 40, 0, 64, 70, 130], heads=4, kv_heads=2, dim=dim, dim_v=dim_v)
    inputs = case.inputs(dtype)
    if same_offsets:
        inputs = inputs.with_shared_offsets()
    assert_as_exact_as_sdpa(inputs, "triton", tile=None)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("mask", [{}, {"causal": True}, {"window": (400, 30)}], ids=str)
def test_long_histories_on_the_device(dtype, mask):
    """Of which dQ takes larger blocks."""
    case = Case([700, 1100, 513], heads=2, kv_heads=1, dim=64)
    assert_as_exact_as_sdpa(case.inputs(dtype), "triton", tile=None, **mask)


def test_native_in_bfloat16():
    assert_as_exact_as_sdpa(Case(LENGTHS).inputs(torch.bfloat16), "native", causal=True)


def test_native_splits_what_is_too_large_for_one_bucket(monkeypatch):
    monkeypatch.setattr("jagged_kernels.attention.native._MAX_SCORES", 200)
    assert_as_exact_as_sdpa(Case([9] * 5 + [30, 2]).inputs(torch.float32), "native")


@pytest.mark.parametrize("mask", [{"causal": True}, {"window": (9, 4), "dropout_p": 0.3}], ids=str)
def test_native_cuts_a_user_too_large_for_one_bucket(mask, monkeypatch):
    inputs = Case([30, 9, 12], [21, 40, 0], kv_heads=1).inputs(torch.float64)
    results = []
    for most in (1 << 24, 200):
        monkeypatch.setattr("jagged_kernels.attention.native._MAX_SCORES", most)
        torch.manual_seed(3)
        bias = torch.linspace(-1, 1, 2 * (30 * 21 + 9 * 40), device=DEVICE, dtype=torch.float64)
        leaf = bias.view(-1, 2).requires_grad_()
        results.append([*run("native", inputs, bias=leaf, tile=None, **mask).values(), leaf.grad])
    for whole, cut in zip(*results, strict=True):
        torch.testing.assert_close(cut, whole)


def test_native_cuts_a_user_within_a_tile_of_its_lists(monkeypatch):
    """Five queries at a time, of which some are of two tiles of 16."""
    monkeypatch.setattr("jagged_kernels.attention.native._MAX_SCORES", 400)
    inputs = Case([40, 9]).inputs(torch.float64)
    keys = SemiLocalKeys(window=6, first=3, block=16)
    cut, whole = (run(x, inputs, tile=None, keys=keys) for x in ("native", "reference"))
    for name, result in cut.items():
        torch.testing.assert_close(result, whole[name])


@pytest.mark.parametrize(
    ("q_lengths", "k_lengths"),
    [([1, 1000] * 100, [10] * 200), ([3] * 50, list(range(50))), ([6000], [6000])],
    ids=["queries", "keys", "one user"],
)
def test_native_pads_little_and_holds_few_scores(q_lengths, k_lengths):
    offsets = [lengths_to_offsets(torch.tensor(x)) for x in (q_lengths, k_lengths)]
    rows = torch.zeros(sum(q_lengths), dtype=torch.int64)
    for bucket in _buckets(offsets[0], offsets[1], 8, Mask((-1, -1), 1.0, None, 0.0, None)):
        users = bucket.users.tolist()
        for lengths, valid in ((q_lengths, bucket.q_valid), (k_lengths, bucket.k_valid)):
            for user in users:
                assert valid.shape[1] <= 1.25 * lengths[user] + 9
        assert 8 * len(users) * bucket.q_valid.shape[1] * bucket.k_valid.shape[1] <= 2**24
        rows[bucket.q_index[bucket.q_valid]] += 1
    seen = torch.repeat_interleave(torch.tensor(k_lengths) > 0, torch.tensor(q_lengths))
    assert torch.equal(rows, seen.long())


# On a CPU always the same: of a few batches in thousands the interpreter's roundings, which no GPU
# has, are further off than the factor below.
@settings(
    max_examples=12 if DEVICE == "cpu" else 60, deadline=None, derandomize=DEVICE == "cpu"
)  # fmt: skip
@given(
    lengths=st.lists(st.tuples(st.integers(0, 37), st.integers(0, 37)), min_size=1, max_size=5),
    # Each of these is a compilation on a GPU.
    heads=st.sampled_from([(1, 1), (2, 1), (2, 2)] if DEVICE == "cpu" else [(2, 1)]),
    dim=st.sampled_from([8, 16, 24] if DEVICE == "cpu" else [24]),
    causal=st.booleans(),
    window=st.one_of(st.none(), st.tuples(st.integers(-1, 20), st.integers(-1, 20))),
    seed=st.integers(0, 2**31),
)
# The interpreter's dv is 3.3 times as far off as PyTorch's.
@example(lengths=[(7, 28)], heads=(1, 1), dim=16, causal=False, window=(12, 1), seed=378695374)
def test_random_batches(lengths, heads, dim, causal, window, seed):
    q_lengths, k_lengths = zip(*lengths, strict=True)
    case = Case(q_lengths, k_lengths, heads=heads[0], kv_heads=heads[1], dim=dim)
    inputs = case.inputs(torch.float32, seed=seed)
    mask = {"causal": causal, "window": window}
    standard = Standard(inputs, **mask)
    standard.assert_met(run("native", inputs, tile=16, **mask), "native")
    # The interpreter rounds a product before it is added to, which a GPU does not.
    factor = FACTOR if DEVICE == "cuda" else 4.0
    standard.assert_met(run("triton", inputs, tile=16, **mask), "triton", factor=factor)


@pytest.mark.parametrize("mask", [{}, {"causal": True}, {"window": (20, 3)}], ids=str)
def test_tiles_that_programs_share(mask):
    """A row of 128 tokens is two programs' work, also where the second has none."""
    inputs = Case([150, 0, 70, 1], [100, 5, 130, 64]).inputs(torch.float32)
    assert_as_exact_as_sdpa(inputs, "triton", tile=128, **mask)


@pytest.mark.parametrize("backend", ["reference", "native"])
@pytest.mark.parametrize("mask", [{}, {"causal": True}, {"window": (2, 1)}], ids=str)
def test_gradcheck_in_float64(backend, mask):
    case = Case([3, 0, 5], [4, 2, 3], dim=2, dim_v=3, heads=2, kv_heads=1)
    inputs = case.inputs(torch.float64)
    bias = torch.randn(12 + 15, 2, dtype=torch.float64, device=DEVICE, requires_grad=True)

    def outputs(q, k, v, bias):
        return _attend(inputs, q, k, v, bias=bias, backend=backend, **mask)

    leaves = [t.requires_grad_() for t in (inputs.q, inputs.k, inputs.v)]
    assert torch.autograd.gradcheck(outputs, (*leaves, bias))


def _attend(inputs, q, k, v, **options):
    jk = JaggedTensor(k, inputs.k_offsets)
    out, lse = jagged_attention(
        JaggedTensor(q, inputs.q_offsets), jk, jk.with_values(v), return_lse=True, **options
    )
    return out.values, lse.masked_fill(lse.isinf(), 0.0)


def test_lse_is_the_log_of_the_sum_of_exponentials():
    inputs = Case([5, 2]).inputs(torch.float64)
    scores = torch.einsum("nhd,mhd->nhm", inputs.q[:5], inputs.k[:5]) / 4
    lse = run("reference", inputs, tile=None)["lse"]
    torch.testing.assert_close(lse[:5], scores.exp().sum(-1).log())


@pytest.mark.parametrize("backend", ["reference", *BACKENDS])
def test_causal_is_aligned_to_the_end(backend):
    """Two queries over four keys: the first sees three of them, the second all."""
    inputs = Case([2], [4], heads=1, kv_heads=1).inputs(torch.float32)
    causal = run(backend, inputs, causal=True)["o"]
    inputs.k, inputs.v = inputs.k[:3], inputs.v[:3]
    inputs.k_offsets = torch.tensor([0, 3], device=DEVICE)
    inputs.q, inputs.d_o, inputs.d_lse = inputs.q[:1], inputs.d_o[:1], inputs.d_lse[:1]
    inputs.q_offsets = torch.tensor([0, 1], device=DEVICE)
    torch.testing.assert_close(causal[:1], run(backend, inputs)["o"])


@pytest.mark.parametrize("backend", ["reference", *BACKENDS])
def test_queries_before_the_first_key_see_nothing(backend):
    result = run(backend, Case([6], [4]).inputs(torch.float32), causal=True)
    assert (result["o"][:2] == 0).all()
    assert (result["lse"][:2] == -torch.inf).all()
    assert (result["o"][2:] != 0).all()
    assert (result["dq"][:2] == 0).all()
