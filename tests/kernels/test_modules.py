"""`JaggedMultiheadAttention`, `JaggedLayerNorm`, `JaggedRMSNorm`: held against PyTorch's own."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from attention_cases import DEVICE
from operation_cases import COMPILER
from torch import Tensor, nn

from jagged_kernels import (
    ALiBi,
    JaggedLayerNorm,
    JaggedMultiheadAttention,
    JaggedRMSNorm,
    JaggedTensor,
    attention_schedule,
    jagged_attention,
    jagged_rms_norm,
)
from jagged_kernels.modules import attention as module

DIM, HEADS = 16, 4
LENGTHS, OTHERS = [3, 1, 6], [2, 7, 1]
OFFSETS = torch.tensor([0, 3, 4, 10], device=DEVICE)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def jagged(lengths: list[int], dim: int = DIM, *, seed: int = 0) -> JaggedTensor:
    values = random(sum(lengths), dim, seed=seed).requires_grad_()
    offsets = torch.tensor([0, *lengths], device=DEVICE).cumsum(0)
    return JaggedTensor(values, offsets)


def attention(*, seed: int = 0, **options: Any) -> JaggedMultiheadAttention:
    """With biases that are not 0, as after training."""
    torch.manual_seed(seed)
    made = JaggedMultiheadAttention(DIM, HEADS, **options, device=DEVICE)
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if name.endswith("bias"):
                parameter.normal_()
    return made


def peer_of(ours: JaggedMultiheadAttention, **options: Any) -> nn.MultiheadAttention:
    peer = nn.MultiheadAttention(DIM, HEADS, batch_first=True, **options, device=DEVICE)
    peer.load_state_dict(ours.state_dict())
    return peer


def padded_result(peer: nn.MultiheadAttention, *x: JaggedTensor, causal: bool = False) -> Tensor:
    """Of query, key and value, the queries' tokens of each user."""
    query, key, value = (part.to_padded() for part in x)
    positions = torch.arange(key.shape[1], device=DEVICE)
    mask = None
    if causal:
        mask = positions > torch.arange(query.shape[1], device=DEVICE)[:, None]
    padding = positions >= x[1].lengths[:, None]
    out, _ = peer(query, key, value, key_padding_mask=padding, attn_mask=mask)
    return torch.cat([row[:n] for row, n in zip(out, x[0].lengths.tolist(), strict=True)])


DIMS = {"one dim": {}, "kdim and vdim": {"kdim": 8, "vdim": 12}, "vdim": {"vdim": 12}}


@pytest.mark.parametrize("dims", DIMS.values(), ids=list(DIMS))
@pytest.mark.parametrize("bias", [True, False])
def test_parameters_are_pytorchs(dims, bias):
    """Names, order, shapes, and from one seed the numbers."""
    made: list[Any] = []
    for kind in (nn.MultiheadAttention, JaggedMultiheadAttention):
        torch.manual_seed(3)
        made.append(kind(DIM, HEADS, bias=bias, **dims, device=DEVICE))
    peer, ours = (dict(each.named_parameters()) for each in made)
    assert list(ours) == list(peer)
    for name, parameter in ours.items():
        assert torch.equal(parameter, peer[name]), name
    torch.manual_seed(3)
    made[1].reset_parameters()
    for name, parameter in ours.items():
        assert torch.equal(parameter, peer[name]), name
    made[0].load_state_dict(made[1].state_dict())


@pytest.mark.parametrize("backend", ["reference", "native", "triton"])
@pytest.mark.parametrize("causal", [False, True])
def test_self_attention_is_pytorchs_on_padded_input(causal, backend):
    ours, x = attention(causal=causal, backend=backend), jagged(LENGTHS)
    peer, given = peer_of(ours), jagged(LENGTHS)
    d_out = random(10, DIM, seed=5)
    out = ours(x).values
    expected = padded_result(peer, given, given, given, causal=causal)
    torch.testing.assert_close(out, expected)
    out.backward(d_out)
    expected.backward(d_out)
    torch.testing.assert_close(x.values.grad, given.values.grad)
    for (name, own), other in zip(ours.named_parameters(), peer.parameters(), strict=True):
        torch.testing.assert_close(own.grad, other.grad, msg=name)


@pytest.mark.parametrize("dims", DIMS.values(), ids=list(DIMS))
@pytest.mark.parametrize("bias", [True, False])
def test_cross_attention_is_pytorchs_on_padded_input(dims, bias):
    ours = attention(bias=bias, **dims)
    x = [
        jagged(LENGTHS),
        jagged(OTHERS, dims.get("kdim", DIM), seed=1),
        jagged(OTHERS, dims.get("vdim", DIM), seed=2),
    ]
    x[2] = x[1].with_values(x[2].values)
    expected = padded_result(peer_of(ours, bias=bias, **dims), *x)
    torch.testing.assert_close(ours(x[0], x[1], x[2]).values, expected)


def test_values_are_keys_where_none_are_given():
    ours, q, k = attention(), jagged(LENGTHS), jagged(OTHERS, seed=1)
    expected = padded_result(peer_of(ours), q, k, k)
    torch.testing.assert_close(ours(q, k).values, expected)
    torch.testing.assert_close(ours(q, k, k.with_values(k.values.clone())).values, expected)
    assert torch.equal(ours(q, q, q).values, ours(q).values)


@pytest.mark.parametrize("shape", [(3, 2, DIM), (2, DIM)])
def test_dense_queries(shape):
    ours, keys, queries = attention(), jagged(OTHERS, seed=1), random(*shape)
    out = ours(queries, keys)
    rows = queries.expand(3, 2, DIM).flatten(0, 1)
    each = JaggedTensor(rows, torch.tensor([0, 2, 4, 6], device=DEVICE))
    expected = padded_result(peer_of(ours), each, keys, keys)
    torch.testing.assert_close(out, expected.view(3, 2, DIM))


@pytest.mark.parametrize("form", ["tokens first", "dense queries"])
def test_nested(form):
    ours, keys = attention(), jagged(OTHERS, seed=1)
    query = jagged(LENGTHS) if form == "tokens first" else random(3, 2, DIM)
    expected = ours(query, keys)
    if isinstance(query, JaggedTensor):
        assert torch.equal(ours(query.to_nested(), keys.to_nested()).values(), expected.values)
        assert torch.equal(ours(query.to_nested()).values(), ours(query).values)
    else:
        assert torch.equal(ours(query, keys.to_nested()), expected)


def test_fewer_key_heads():
    """Each serves a group of query heads: as many heads with the same rows of the weight."""
    ours, whole = attention(num_kv_heads=2), attention()
    q, k, v = ours.in_proj_weight.split([DIM, 8, 8])  # pyright: ignore
    of_q, of_k, of_v = ours.in_proj_bias.split([DIM, 8, 8])  # pyright: ignore

    def repeated(rows: Tensor) -> Tensor:
        return rows.unflatten(0, (2, 4)).repeat_interleave(2, 0).flatten(0, 1)

    whole.load_state_dict({
        **ours.state_dict(),
        "in_proj_weight": torch.cat([q, repeated(k), repeated(v)]),
        "in_proj_bias": torch.cat([of_q, repeated(of_k), repeated(of_v)]),
    })  # fmt: skip
    x = jagged(LENGTHS)
    for keys in (x, jagged(OTHERS, seed=1)):
        torch.testing.assert_close(ours(x, keys).values, whole(x, keys).values)


def test_a_query_without_keys():
    ours, x = attention(), jagged([2, 1])
    nothing = JaggedTensor(x.values[:1], torch.tensor([0, 0, 1], device=DEVICE))
    out = ours(x, nothing).values
    assert torch.equal(out[:2], ours.out_proj.bias.expand(2, DIM))
    assert ours(JaggedTensor(x.values[:0], OFFSETS[:1].expand(3))).values.shape == (0, DIM)


@pytest.fixture
def calls(monkeypatch):
    """What `jagged_attention` is called with."""
    seen: list[Any] = []

    def spy(q, k, v, **options):
        seen.append(((q, k, v), options))
        return jagged_attention(q, k, v, **options)

    monkeypatch.setattr(module, "jagged_attention", spy)
    return seen


def test_projections_are_views_of_one_product(calls):
    """The kernels read them where they lie."""
    ours, x, keys = attention(num_kv_heads=2), jagged(LENGTHS), jagged(OTHERS, seed=1)
    ours(x)
    ours(x, keys)
    (first, _), ((q, *kv), _) = calls
    for parts, row in [(first, 2 * DIM), (kv, DIM)]:
        storage = {part.values.untyped_storage().data_ptr() for part in parts}
        assert len(storage) == 1
        assert {part.values.stride(0) for part in parts} == {row}
        assert all(part.offsets is parts[0].offsets for part in parts)
    assert [part.values.shape[1] for part in (q, *kv)] == [HEADS, 2, 2]


def test_what_is_handed_along(calls):
    x = jagged(LENGTHS)
    ours = attention(causal=True, window=(2, 0), dropout=0.25, backend="native")
    schedule = attention_schedule(x, causal=True, window=(2, 0), head_dim=DIM // HEADS)
    slopes = ALiBi(random(HEADS))
    ours(x, bias=slopes, schedule=schedule)
    ours.eval()
    ours(x)
    (_, training), (_, evaluating) = calls
    expected = {"causal": True, "window": (2, 0), "backend": "native"}
    assert training == {**expected, "bias": slopes, "schedule": schedule, "dropout_p": 0.25}
    assert evaluating == {**expected, "bias": None, "schedule": None, "dropout_p": 0.0}


def test_dropout_drops_while_training():
    ours, x = attention(dropout=0.5), jagged(LENGTHS)
    torch.manual_seed(1)
    once = ours(x).values
    torch.manual_seed(1)
    assert torch.equal(ours(x).values, once)
    ours.eval()
    assert not torch.allclose(ours(x).values, once)
    assert torch.equal(ours(x).values, ours(x).values)


@pytest.mark.parametrize("given", ["parts", "a JaggedTensor"])
@pytest.mark.parametrize("kind", ["attention", "norm", "RMS norm"])
def test_compiles_whole(kind, given):
    torch._dynamo.reset()
    made: Any = {
        "attention": lambda: attention(causal=True),
        "norm": lambda: JaggedLayerNorm(DIM, device=DEVICE),
        "RMS norm": lambda: JaggedRMSNorm(DIM, device=DEVICE),
    }[kind]()

    def of_parts(values, offsets):
        return made(JaggedTensor(values, offsets)).values

    function = of_parts if given == "parts" else made
    compiled: Any = torch.compile(function, fullgraph=True, backend=COMPILER)
    for lengths in (LENGTHS, OTHERS):
        x = jagged(lengths)
        out = compiled(x.values, x.offsets) if given == "parts" else compiled(x).values
        (found,) = torch.autograd.grad(out.square().sum(), x.values)
        expected = made(x).values
        (wanted,) = torch.autograd.grad(expected.square().sum(), x.values)
        torch.testing.assert_close(out, expected)
        torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("how", ["autocast", "module"])
def test_bfloat16(how):
    """With what PyTorch's own is off by on the same path."""
    ours, x = attention(), jagged(LENGTHS)
    exact, peer = ours(x).values, peer_of(ours)
    if how == "module":
        ours.to(torch.bfloat16)
        peer.to(torch.bfloat16)
        x = x.to(torch.bfloat16)
    with torch.autocast(DEVICE, torch.bfloat16, enabled=how == "autocast"):
        out, theirs = ours(x).values, padded_result(peer, x, x, x)
    assert out.dtype == theirs.dtype == torch.bfloat16
    error, allowed = ((y.float() - exact).abs().max() for y in (out, theirs))
    rounding = torch.finfo(torch.bfloat16).eps * exact.abs().max()
    assert error <= 3 * max(allowed, rounding)
    out.sum().backward()
    for name, parameter in ours.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name


@pytest.mark.parametrize(
    "make",
    [
        lambda: attention(num_kv_heads=2, causal=True),
        lambda: JaggedLayerNorm(DIM, device=DEVICE),
        lambda: JaggedRMSNorm(DIM, device=DEVICE),
    ],
    ids=["attention", "norm", "RMS norm"],
)
def test_copies_and_state_dicts(make):
    made, other, x = make(), make(), jagged(LENGTHS)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.normal_()
    copied = copy.deepcopy(made)
    other.load_state_dict(made.state_dict())
    for each in (copied, other):
        assert torch.equal(each(x).values, made(x).values)
    with torch.no_grad():
        next(copied.parameters()).zero_()
    assert not torch.equal(copied(x).values, made(x).values)


def test_repr():
    assert attention().extra_repr() == "16, num_heads=4"
    made = attention(num_kv_heads=2, kdim=8, causal=True, window=(3, 0), dropout=0.1, bias=False,
                     backend="native")  # fmt: skip
    assert made.extra_repr() == (
        "16, num_heads=4, num_kv_heads=2, kdim=8, vdim=16, dropout=0.1, causal=True, "
        "window=(3, 0), backend='native', bias=False"
    )
    assert JaggedLayerNorm(4).extra_repr() == nn.LayerNorm(4).extra_repr()
    assert JaggedRMSNorm(4, backend="native").extra_repr().endswith(", backend='native'")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_heads": 3}, "num_heads must divide embed_dim 16, got 3"),
        ({"num_heads": 4, "num_kv_heads": 3}, "num_kv_heads must divide num_heads 4, got 3"),
        ({"num_heads": 0}, "must be at least 1, got 16, 0 and 0"),
        ({"num_heads": 4, "dropout": 1.0}, r"dropout must be in \[0, 1\), got 1.0"),
        ({"num_heads": 4, "window": (-2, 0)}, r"window must be \(left, right\) of -1 or more"),
    ],
    ids=str,
)
def test_wrong_options(options, message):
    with pytest.raises(ValueError, match=message):
        JaggedMultiheadAttention(DIM, **options)


def test_wrong_arguments():
    ours: Any = attention(kdim=8)
    x, keys = jagged(LENGTHS), jagged(LENGTHS, 8)
    for arguments, error, message in [
        ((x,), ValueError, r"key must be \[..., 8\], got \(10, 16\)"),
        ((keys, keys), ValueError, r"query must be \[..., 16\], got \(10, 8\)"),
        ((x, keys), ValueError, r"value must be \[..., 16\], got \(10, 8\)"),
        ((x.values,), TypeError, "key and value must be JaggedTensors, got .* and"),
        ((x, keys, [x]), TypeError, "got JaggedTensor and list"),
        ((3, keys, x), TypeError, "query must be a JaggedTensor or a tensor, got int"),
    ]:
        with pytest.raises(error, match=message):
            ours(*arguments)


NORMS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "layer": (JaggedLayerNorm, nn.LayerNorm, {}),
    "layer, without bias": (JaggedLayerNorm, nn.LayerNorm, {"bias": False}),
    "layer, of an eps": (JaggedLayerNorm, nn.LayerNorm, {"eps": 0.1}),
    "layer, plain": (JaggedLayerNorm, nn.LayerNorm, {"elementwise_affine": False}),
    "RMS": (JaggedRMSNorm, nn.RMSNorm, {}),
    "RMS, of an eps": (JaggedRMSNorm, nn.RMSNorm, {"eps": 0.1}),
    "RMS, plain": (JaggedRMSNorm, nn.RMSNorm, {"elementwise_affine": False}),
}


@pytest.mark.parametrize("backend", ["native", "triton"])
@pytest.mark.parametrize("name", NORMS)
def test_norms_are_pytorchs(name, backend):
    ours, peer, options = NORMS[name]
    ours = ours(DIM, **options, backend=backend, device=DEVICE)
    peer = peer(DIM, **options, device=DEVICE)
    with torch.no_grad():
        for parameter in peer.parameters():
            parameter.normal_()
    ours.load_state_dict(peer.state_dict())
    x, residual = jagged(LENGTHS), jagged(LENGTHS, seed=1)
    torch.testing.assert_close(ours(x).values, peer(x.values))
    y, total = ours(x, residual=residual)
    torch.testing.assert_close(total.values, x.values + residual.values)
    torch.testing.assert_close(y.values, peer(total.values))
    nested = ours(x.to_nested())
    assert torch.equal(nested.values(), ours(x).values)
    torch.manual_seed(0)
    ours.reset_parameters()
    peer.reset_parameters()
    for own, other in zip(ours.parameters(), peer.parameters(), strict=True):
        assert torch.equal(own, other)


def test_norms_of_half_tokens_with_whole_parameters():
    """As under autocast, but for the dtype of the result, which is that of the tokens."""
    for kind in (JaggedLayerNorm, JaggedRMSNorm):
        x = jagged(LENGTHS).to(torch.bfloat16)
        with torch.autocast(DEVICE, torch.bfloat16):
            assert kind(DIM, device=DEVICE)(x).dtype == torch.bfloat16
        assert kind(DIM, device=DEVICE, dtype=torch.bfloat16)(x).dtype == torch.bfloat16


@pytest.mark.parametrize("backend", ["reference", "native", "triton"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_an_rms_norm_without_eps_is_pytorchs(dtype, backend):
    """Small tokens, to which an eps of float16 or bfloat16 would be large."""
    missing = dtype == torch.float64 or (DEVICE == "cpu" and dtype == torch.bfloat16)
    if backend == "triton" and missing:
        pytest.skip("the kernels do not have it here")
    x = jagged(LENGTHS).to(torch.float32)
    x = x.with_values(0.02 * x.values).to(dtype)
    peer = nn.RMSNorm(DIM, device=DEVICE, dtype=dtype)
    ours = JaggedRMSNorm(DIM, device=DEVICE, dtype=dtype, backend=backend)
    torch.testing.assert_close(ours(x).values, peer(x.values))
    found = jagged_rms_norm(x, eps=None, backend=backend)
    torch.testing.assert_close(found.values, nn.functional.rms_norm(x.values, (DIM,)))


@pytest.mark.parametrize("kind", [JaggedLayerNorm, JaggedRMSNorm])
def test_wrong_norms(kind):
    with pytest.raises(ValueError, match=r"normalized_shape must be D.*, got \(2, 3\)"):
        kind([2, 3])
    with pytest.raises(ValueError, match=r"x must be \[T, ..., 8\], got \(10, 16\)"):
        kind(8, elementwise_affine=False)(jagged(LENGTHS))
    with pytest.raises(TypeError, match="x must be a JaggedTensor, got Tensor"):
        kind(DIM, device=DEVICE)(random(3, DIM))
