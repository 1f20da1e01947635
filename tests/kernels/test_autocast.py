"""`torch.autocast`: attention and products cast as PyTorch's own do, all else stays as it is."""

from __future__ import annotations

import pytest
import torch
from attention_calls import ALL, ATTENTION, differentiable
from every_operation import EVERY
from operation_cases import COMPILER, DEVICE, flat, results
from torch.nn import functional as F

from jagged_kernels import JaggedTensor, attention_schedule, jagged_attention, jagged_linear

LENGTHS = (3, 0, 6)
BACKENDS = ["reference", "native", "triton"]
PRODUCTS = [name for name in EVERY if name.startswith("product: ")]
OTHERS = [name for name in EVERY if name not in PRODUCTS]
CASTING = [*PRODUCTS, *ATTENTION]
# Of biases, which are added to float32 scores.
NEVER_CAST = ("table", "slopes", "scores")
# Triton's interpreter has no bfloat16 products.
DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float16
MIXED = (torch.float32, torch.float16, torch.bfloat16)


def mixed(name, lengths=LENGTHS):
    """Inputs of different floating dtypes, which hold the same numbers in DTYPE."""
    floating = iter(range(99))
    return {
        key: t.to(DTYPE).to(MIXED[next(floating) % 3]).to(DEVICE)
        if t.is_floating_point()
        else t.to(DEVICE)
        for key, t in ALL[name][1](lengths).items()
    }


def forward_and_backward(call, backend, tensors, *, cast=False, inside=False):
    """(outputs, gradients); with `cast`, inputs are cast by hand, else by autocast."""
    leaves = {
        key: t.detach().clone().requires_grad_(t.is_floating_point()) for key, t in tensors.items()
    }
    given = leaves
    if cast:
        given = {
            key: t.to(DTYPE) if t.is_floating_point() and key not in NEVER_CAST else t
            for key, t in leaves.items()
        }
    wanted = [leaf for leaf in leaves.values() if leaf.requires_grad]
    with torch.autocast(DEVICE, DTYPE, enabled=not cast):
        outs = differentiable(flat(call(backend, **given)))
    generator = torch.Generator().manual_seed(3)
    d_outs = [torch.randn(out.shape, generator=generator).to(out) for out in outs]
    with torch.autocast(DEVICE, DTYPE, enabled=inside):
        return outs, torch.autograd.grad(outs, wanted, d_outs), wanted


@pytest.mark.parametrize("lengths", [LENGTHS, (0, 0)], ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", CASTING)
def test_inputs_of_mixed_dtypes_are_cast(name, backend, lengths):
    tensors = mixed(name, lengths)
    call = ALL[name][0]
    expected, by_hand, wanted = forward_and_backward(call, backend, tensors, cast=True)
    # The backward of attention's specification is autograd's, to be called outside of autocast.
    autograds = backend == "reference" and name in ATTENTION
    for inside in [False] if autograds else [False, True]:
        found, gradients, _ = forward_and_backward(call, backend, tensors, inside=inside)
        assert found[0].dtype == DTYPE
        for ours, theirs in zip([*found, *gradients], [*expected, *by_hand], strict=True):
            assert ours.dtype == theirs.dtype
            assert torch.equal(ours, theirs)
        assert [d.dtype for d in gradients] == [leaf.dtype for leaf in wanted]


@pytest.mark.parametrize("backend", ["native", "triton"])
@pytest.mark.parametrize(
    "name", ["product: linear", "product: outer", "product: target", *ATTENTION]
)
def test_casts_in_one_graph(name, backend):
    torch._dynamo.reset()
    compiled = torch.compile(ALL[name][0], fullgraph=True, backend=COMPILER)
    tensors = mixed(name)
    found, gradients, _ = forward_and_backward(compiled, backend, tensors)
    expected, eager, _ = forward_and_backward(ALL[name][0], backend, tensors)
    ours, theirs = [*found, *gradients], [*expected, *eager]
    if backend == "native" or "shared prefix" in name:
        # A compiler may leave out what eager PyTorch does, to round a product to the dtype of the
        # cast before it is cast back; or the sum of q's gradients by a prefix and by its own keys.
        ours, theirs = ([t.to(DTYPE) for t in each] for each in (ours, theirs))
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("lengths", [LENGTHS, (0, 0)], ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", OTHERS)
def test_autocast_changes_nothing_else(name, backend, lengths):
    call, case = EVERY[name]
    tensors = {key: t.to(DEVICE) for key, t in case(lengths).items()}
    expected = results(call, backend, tensors)
    with torch.autocast(DEVICE, torch.bfloat16):
        found = results(call, backend, tensors)
    for key, result in expected.items():
        assert found[key].dtype == result.dtype, key
        assert torch.equal(found[key], result), key


def attend(q, k, v, **options):
    offsets = torch.tensor([0, q.shape[0]], device=q.device)
    keys = JaggedTensor(k, offsets, validate=False)
    return jagged_attention(keys.with_values(q), keys, keys.with_values(v), **options).values


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "dtypes",
    [
        (torch.float32, torch.float32, torch.float32),
        (torch.float32, torch.float16, torch.bfloat16),
        (torch.bfloat16, torch.float32, torch.float32),
        (torch.float64, torch.float64, torch.float64),
    ],
    ids=str,
)
def test_dtypes_are_those_of_scaled_dot_product_attention(dtypes, dtype):
    leaves = [torch.randn(5, 2, 16, device=DEVICE, dtype=d, requires_grad=True) for d in dtypes]
    with torch.autocast(DEVICE, dtype):
        ours = attend(*leaves)
        q, k, v = (x.transpose(0, 1)[None] for x in leaves)
        theirs = F.scaled_dot_product_attention(q, k, v)
    assert ours.dtype == theirs.dtype
    for out in (ours, theirs):
        gradients = torch.autograd.grad(out.float().sum(), leaves)
        assert [d.dtype for d in gradients] == list(dtypes)


@pytest.mark.parametrize("enabled", [True, False])
def test_dtypes_that_stay_different_raise(enabled):
    """float64 is never cast; without autocast nothing is."""
    q, k = (torch.randn(5, 2, 16, device=DEVICE, dtype=d) for d in (torch.float64, torch.float32))
    q = q if enabled else q.half()
    with (
        torch.autocast(DEVICE, DTYPE, enabled=enabled),
        pytest.raises(TypeError, match="of one floating dtype"),
    ):
        attend(q, k, k)
    offsets = torch.tensor([0, 5], device=DEVICE)
    x = JaggedTensor(q[:, 0], offsets)
    with (
        torch.autocast(DEVICE, DTYPE, enabled=enabled),
        pytest.raises(TypeError, match="weight must have the dtype of x"),
    ):
        jagged_linear(x, torch.randn(1, 16, 4, device=DEVICE))


def test_integers_are_not_cast():
    """Ids that become float16 lose digits: they raise, as they do without."""
    ids = JaggedTensor.from_list([torch.arange(6, device=DEVICE).view(3, 2)])
    with torch.autocast(DEVICE, DTYPE), pytest.raises(TypeError, match=r"got torch\.int64"):
        jagged_linear(ids, torch.ones(1, 2, 2, device=DEVICE))


def test_what_is_no_tensor_raises_as_it_does_without():
    x = JaggedTensor(torch.randn(5, 2, 16, device=DEVICE), torch.tensor([0, 5], device=DEVICE))
    with torch.autocast(DEVICE, DTYPE):
        with pytest.raises(TypeError, match="must be JaggedTensors, got dict"):
            jagged_attention(x, {}, x)  # pyright: ignore[reportCallIssue, reportArgumentType]
        with pytest.raises(TypeError, match="weight must be a tensor"):
            jagged_linear(x.with_values(x.values[:, 0]), [1.0])  # pyright: ignore[reportArgumentType]


def test_meta_is_not_cast():
    q = torch.empty(5, 2, 16, device="meta")
    with torch.autocast(DEVICE, DTYPE):
        assert attend(q, q, q).dtype == torch.float32


def test_schedules_of_dense_queries_are_for_the_dtype_of_the_call():
    keys = JaggedTensor(
        torch.randn(40, 2, 16, device=DEVICE), torch.tensor([0, 9, 40], device=DEVICE)
    )
    q = torch.randn(2, 3, 2, 16, device=DEVICE)
    without = attention_schedule(q, keys)
    with torch.autocast(DEVICE, DTYPE):
        schedule = attention_schedule(q, keys)
        assert schedule.dense is not None
        assert schedule.dense.element_size == DTYPE.itemsize
        out = jagged_attention(q, keys, keys, schedule=schedule, backend="triton")
        with pytest.raises(ValueError, match=r"4 bytes a number.* 2 bytes a number"):
            jagged_attention(q, keys, keys, schedule=without, backend="triton")
    cast = keys.with_values(keys.values.to(DTYPE))
    assert torch.equal(out, jagged_attention(q.to(DTYPE), cast, cast, backend="triton"))
