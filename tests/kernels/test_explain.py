"""`explain_attention`: what is said of a call, and that nothing is done for it."""

from __future__ import annotations

import inspect
import re

import pytest
import torch
from attention_cases import DEVICE
from choice_cases import (
    CALLS,
    EACH_CALL,
    EVERY_HOPPER,
    HALF,
    PLAIN,
    SHORT,
    SINGLE,
    SPLIT,
    pass_for_hopper,
    said_picks,
)
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from jagged_kernels import (
    JaggedTensor,
    PointwiseScores,
    SiLU,
    StridedKeys,
    attention_schedule,
    explain_attention,
    jagged_attention,
)

NO_HOPPER = "the tensors are not on a Hopper GPU"
# Of `tl.full`.
NO_GLUON = (
    "its {} cannot be compiled by Gluon: "
    "GluonSemantic.full() missing 1 required positional argument: 'layout'"
)
# (call, whether Hopper takes it, a line of what is said of it)
LINES = [
    ("short users", False, "split: queries are jagged, it takes dense ones"),
    ("short users, offsets of their own", False,
     "short: queries and keys are not known to have the same offsets"),
    ("short users, tiles as short", False, "short: a tile has 32 tokens, it needs over 32"),
    ("short users, dropout", False,
     "split: queries are jagged, it takes dense ones"),
    ("no longer short, dropout", False,
     "short: users have 80 queries on average, it pays below 80"),
    ("no longer short, dropout", False, "plain: it takes no dropout"),
    ("no longer short, bias", False, "short: users have 80 queries on average, it pays below 80"),
    ("short users, bias, offsets of their own", False,
     "short: queries and keys are not known to have the same offsets"),
    ("short users, bias and lists of keys", False, "short: keys are lists, it takes ranges"),
    ("no longer short", False, "short: users have 80 queries on average, it pays below 80"),
    ("long", False, f"hopper forward, hopper dkv: {NO_HOPPER}"),
    ("long", False, f"hopper dq: {NO_HOPPER}; head_dim 64 is padded to 64, it takes 128"),
    ("long", True, "hopper dq: head_dim 64 is padded to 64, it takes 128"),
    ("too short for the forward", True,
     "hopper forward: users have 1023 queries on average, at head_dim 64 it pays from 1024"),
    ("too short for the backward", True,
     "hopper dkv: users have 127 queries on average, at head_dim 64 it pays from 128"),
    ("long, not aligned", True, "hopper forward, hopper dkv, hopper dq: TMA cannot read q, k or v: "
     "they are empty, not aligned, or overlap"),
    ("long, float32", True,
     "hopper forward, hopper dkv, hopper dq: float32 is not float16 or bfloat16"),
    ("long, a small head", True,
     "hopper forward: head_dim 32 is padded to 32, it takes 64, 128 or 256"),
    ("long, a small head", True,
     "hopper one pass, hopper dkv: head_dim 32 is padded to 32, it takes 64 or 128"),
    ("long, a head of 16-byte pieces and a half", True,
     "hopper forward, hopper dkv, hopper dq: head_dim 100 is no multiple of 8; "
     "TMA cannot read q, k or v: they are empty, not aligned, or overlap"),
    ("long", True,
     "hopper one pass: users have 1024 queries on average, at head_dim 64 it pays from 4096"),
    ("too long for one pass, causal, heads that share keys", True,
     "hopper one pass: users have 4097 queries on average, it pays below 4097"),
    ("long, values that are much narrower", True, "hopper forward, hopper dkv: "
     "v's head_dim 64 is padded to 64, q's to 128"),
    ("long, bias", True, "split: queries are jagged, it takes dense ones"),
    ("long, bias", True, "hopper forward, hopper dkv, hopper dq, plain: it takes no bias"),
    ("long, a small tile", True, "hopper forward: tiles have 64 queries, it takes 128"),
    ("long, a small tile of keys", True,
     "hopper dkv, hopper dq: tiles have 64 keys, it takes 128"),
    ("few dense queries, whole rows", False, "split: the schedule was built with split='rows'"),
    ("few dense queries, whole rows and bias", False,
     "split: the schedule was built with split='rows'"),
    ("few dense queries, whole rows and bias", False, "plain: it takes no bias"),
    ("many dense queries", False, "split: it takes 1 to 64 dense queries a user"),
    ("no longer short, pointwise scores", False, "plain: scores are pointwise, it takes softmax"),
    ("long, lists of keys", False, "plain: keys are lists, it takes ranges"),
    ("too short for lists of keys", True, "hopper forward, hopper dkv: users have 4095 queries on "
     "average, at head_dim 64 it pays from 4096"),
    ("long enough for lists of keys, within a window", True,
     "hopper forward: at head_dim 64 it does not pay for lists and this mask"),
    ("long, a narrow window", True, "hopper forward, hopper dkv, hopper dq: the window is 65 wide, "
     "at head_dim 128 it pays from 512"),
    ("long enough for lists of small blocks", True,
     "hopper forward, hopper dkv: lists are of blocks of 32 keys, it takes 64 or 128"),
    ("long enough for lists of keys, head_dim 128", True,
     "hopper dkv, hopper dq: lists are of blocks of 64 keys, it takes 128"),
    ("long, scores of one's own whose d_score Gluon does not compile", True,
     f"hopper dkv, hopper dq: {NO_GLUON.format('d_score')}"),
    ("long, scores of one's own that Gluon does not compile", True,
     f"hopper forward: {NO_GLUON.format('weight')}"),
    ("long, scores of one's own that Gluon does not compile", True,
     f"hopper dkv, hopper dq: {NO_GLUON.format('weight')}; {NO_GLUON.format('d_score')}"),
    ("few dense queries, whole rows and pointwise scores", False,
     "split: the schedule was built with split='rows'"),
    ("few dense queries, whole rows and pointwise scores", False,
     "plain: scores are pointwise, it takes softmax"),
    ("few dense queries, keys of a rule", False,
     "split: keys are those of a rule, it takes lists"),
    ("few dense queries, keys of a rule", False, "plain: keys are lists, it takes ranges"),
    ("no key", False, "split: there is no key"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "hopper", "line"), LINES)
def test_why_no_faster_kernel_takes_it(name, hopper, line, monkeypatch):
    arguments, options = CALLS[name].arguments()
    pass_for_hopper(monkeypatch, hopper)
    assert line in explain_attention(*arguments, **options).splitlines()


def x(dtype: torch.dtype = SINGLE, dim: int = 8, device: str = "cpu") -> JaggedTensor:
    values = torch.zeros(5, 2, dim, dtype=dtype, device=device)
    return JaggedTensor._trusted(values, torch.tensor([0, 3, 3, 5], device=device))


def test_of_a_cpu_it_is_not_said_what_a_gpu_would_do():
    assert explain_attention(x(), x(), x()).splitlines() == [
        "backend: native",
        "forward and backward: native (vectorised PyTorch)",
        "triton: the tensors are on cpu, not on a GPU",
    ]


def test_what_the_kernels_do_not_take_is_said_beside():
    said = explain_attention(*[x(torch.float64, 300)] * 3).splitlines()[-1]
    assert said == (
        "triton: the tensors are on cpu, not on a GPU; float64 is not float16, bfloat16 or "
        "float32; head_dim 300 is above 256"
    )


@pytest.mark.parametrize("backend", ["native", "reference"])
def test_a_backend_that_is_asked_for(backend):
    first, second, third = explain_attention(x(), x(), x(), backend=backend).splitlines()
    assert first == f"backend: {backend}"
    assert second.startswith(f"forward and backward: {backend} (")
    assert third == f"triton: backend='{backend}' is asked for"


def test_no_biases_are_no_bias():
    few = [x(device=DEVICE)] * 3
    said = explain_attention(*few, backend="triton")
    for bias in ((), []):
        assert explain_attention(*few, bias=bias, backend="triton") == said
    assert "bias" not in said


def test_values_wider_than_keys_are_said_to_be_too_wide_to_cut():
    q = torch.zeros(3, 2, 8, 8, device=DEVICE)
    narrow, wide = (
        JaggedTensor(torch.zeros(5, 1, dim, device=DEVICE), x(device=DEVICE).offsets)
        for dim in (8, 128)
    )
    assert said_picks(explain_attention(q, narrow, narrow, backend="triton")) == SPLIT
    said = explain_attention(q, narrow, wide, backend="triton")
    assert said_picks(said) == PLAIN
    assert "split: shared memory does not hold the queries of the heads that share keys" in said


def test_tensors_on_meta():
    assert "native" in explain_attention(*[x(device="meta")] * 3)
    assert said_picks(explain_attention(*[x(device="meta")] * 3, backend="triton")) == SHORT


def test_nested_tensors_and_autocast(monkeypatch):
    pass_for_hopper(monkeypatch)
    users = [torch.zeros(300, 2, 128, device=DEVICE) for _ in range(2)]
    nested = torch.nested.nested_tensor(users, layout=torch.jagged)
    assert said_picks(explain_attention(nested, nested, nested, backend="triton")) == PLAIN
    with torch.autocast(DEVICE, dtype=HALF):
        said = explain_attention(nested, nested, nested, backend="triton")
    assert said_picks(said) == EVERY_HOPPER
    dense = torch.zeros(2, 3, 2, 128, device=DEVICE)
    jagged = JaggedTensor.from_list(users)
    assert said_picks(explain_attention(dense, jagged, jagged, backend="triton")) == SPLIT
    assert said_picks(explain_attention(dense[0], jagged, jagged, backend="triton")) == SPLIT


OTHER = JaggedTensor(torch.zeros(5, 3, 8), torch.tensor([0, 5]))
REFUSED = {
    "keys that are no jagged tensor": ((x(), torch.zeros(5, 2, 8), x()), {}),
    "queries that are no tensor": (([1], x(), x()), {}),
    "dense queries of another batch": ((torch.zeros(2, 1, 2, 8), x(), x()), {}),
    "users": ((x(), OTHER, OTHER), {}),
    "head_dims": ((x(dim=16), x(), x()), {}),
    "dtypes": ((x(), x(), x(HALF)), {}),
    "devices": ((x(), x(device="meta"), x(device="meta")), {}),
    "dropout": ((x(), x(), x()), {"dropout_p": 1.0}),
    "scale": ((x(), x(), x()), {"scale": torch.tensor(1.0)}),
    "window": ((x(), x(), x()), {"window": (-2, 0)}),
    "a name of a backend": ((x(), x(), x()), {"backend": "cuda"}),
    "head_dim": ((x(dim=300),) * 3, {"backend": "triton"}),
    "float64": ((x(torch.float64),) * 3, {"backend": "triton"}),
    "an lse of pointwise scores": ((x(),) * 3, {"scores": SiLU(), "return_lse": True}),
    "scores that are none": ((x(),) * 3, {"scores": "silu"}),
    "scores without Triton functions": (
        (x(),) * 3, {"scores": PointwiseScores("relu", torch.relu), "backend": "triton"}
    ),
    "keys that are none": ((x(),) * 3, {"keys": 3}),
    "keys and a window": ((x(),) * 3, {"keys": StridedKeys(2, 1), "window": (1, 0)}),
    "a schedule of other keys": (
        (x(),) * 3,
        {"schedule": attention_schedule(x(), causal=True), "keys": StridedKeys(2, 1)},
    ),
    "a schedule of another mask": ((x(),) * 3, {"schedule": attention_schedule(x(), causal=True)}),
    "a schedule on another device": (
        (x(device="meta"),) * 3, {"schedule": attention_schedule(x())}
    ),
}  # fmt: skip


@pytest.mark.parametrize(("arguments", "options"), REFUSED.values(), ids=REFUSED)
def test_a_call_that_is_refused_is_not_explained(arguments, options):
    with pytest.raises((TypeError, ValueError, NotImplementedError)) as expected:
        jagged_attention(*arguments, **options)
    with pytest.raises(expected.type, match=f"^{re.escape(str(expected.value))}$"):
        explain_attention(*arguments, **options)


def test_it_takes_the_options_of_the_call():
    call, explained = (
        {name: (p.kind, p.default) for name, p in inspect.signature(f).parameters.items()}
        for f in (jagged_attention, explain_attention)
    )
    assert call == explained


class Untouched(TorchDispatchMode):
    """Fails where an operation meets a tensor that has numbers."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        tensors = [t for t in (*args, out) if isinstance(t, Tensor)]
        assert all(t.is_meta or not t.numel() for t in tensors), func
        return out


@EACH_CALL
@pytest.mark.parametrize("backend", ["auto", "triton"])
def test_no_number_is_read_or_made(call, backend):
    arguments, options = call.arguments()
    with Untouched():
        explain_attention(*arguments, **{**options, "backend": backend})


@pytest.mark.gpu
@EACH_CALL
def test_a_gpu_is_not_waited_for(call):
    arguments, options = call.arguments()
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        explain_attention(*arguments, **options)
    finally:
        torch.cuda.set_sync_debug_mode(before)
