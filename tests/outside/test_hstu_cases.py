"""The cases of HSTU's own tests of its attention, run against ours.

From `generative_recommenders/ops/tests/hstu_attention_test.py` of
github.com/facebookresearch/generative-recommenders: sizes, dtypes and how lengths, targets and
`max_attn_len` are drawn, with its names. What is right is said by `hstu_adapter.plain_hstu_mha`.
Without a GPU the kernels run in Triton's interpreter with the smallest of the sizes.

    HSTU_TESTS=<checkout>/generative_recommenders/ops/tests pytest tests/outside/test_hstu_cases.py

runs that file itself, too, with `tests/support/hstu_adapter.py` in place of their functions.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import TestCase, mock

import hypothesis
import pytest
import torch
from attention_cases import DEVICE, assert_no_worse
from hstu_adapter import delta_hstu_mha, hstu_mha, plain_hstu_mha, plain_mask
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

ON_GPU = DEVICE == "cuda"
RESULTS = ("o", "dq", "dk", "dv")

one_of = st.sampled_from
SIZES: dict[str, Any] = {
    "batch_size": st.integers(4, 8),
    "heads": st.integers(1, 4),
    "max_uih_len": one_of([20, 100, 128, 256]),
    "max_targets": one_of([20, 512]),
    "attn_dim": one_of([16, 32, 64, 128]),
    "hidden_dim": one_of([16, 32, 64, 128]),
    "has_multiple_targets": one_of([True, False]),
    "has_max_attn_len": one_of([True, False]),
    "dtype": one_of([torch.bfloat16, torch.float32]),
    "contextual_seq_len": one_of([0, 10]),
}
# In the interpreter a block of scores takes milliseconds, and bfloat16 products are wrong.
SMALL: dict[str, Any] = {
    **SIZES,
    "batch_size": st.just(4),
    "heads": st.integers(1, 2),
    "max_uih_len": st.just(20),
    "max_targets": st.just(20),
    "attn_dim": one_of([16, 32]),
    "hidden_dim": one_of([16, 32]),
    "dtype": one_of([torch.float16, torch.float32]),
}
DELTA = {"delta_size": one_of([20, 512])}
# PyTorch on a CPU: their sizes of hundreds are no other case than these.
MIDDLE: dict[str, Any] = {
    **SIZES,
    "batch_size": st.just(4),
    "max_uih_len": one_of([20, 100]),
    "max_targets": one_of([20, 60]),
    "attn_dim": one_of([16, 32]),
    "hidden_dim": one_of([16, 32]),
}
BEFORE_DELTA = {**SIZES, **DELTA, "max_uih_len": one_of([100, 128, 256])}
SMALL_DELTA = {"delta_size": st.just(20)}


def some(examples: int) -> Any:
    """They draw 200; here the same ones in each run."""
    return settings(max_examples=examples, deadline=None, derandomize=True, database=None)


@dataclass
class Batch:
    """Arguments of `hstu_mha`, and the gradient of its result."""

    arguments: dict[str, Any]
    d_o: Tensor
    delta_size: int

    def __call__(self, function: Any, dtype: torch.dtype, **options: Any) -> dict[str, Tensor]:
        """Result and gradients, of q, k and v in a dtype."""
        leaves = {n: self.arguments[n].to(dtype).requires_grad_() for n in ("q", "k", "v")}
        out = function(**{**self.arguments, **leaves}, **options)
        grads = torch.autograd.grad(out, tuple(leaves.values()), self.d_o.to(dtype))
        return dict(zip(RESULTS, (out.detach(), *grads), strict=True))


def drawn(
    *, batch_size: int, heads: int, max_uih_len: int, attn_dim: int, hidden_dim: int,
    has_multiple_targets: bool, has_max_attn_len: bool, dtype: torch.dtype,
    contextual_seq_len: int = 0, max_targets: int = 0, delta_size: int = 0, full: bool = False,
) -> Batch:  # fmt: skip
    """As they draw it: targets behind the events, or among `delta_size` newest tokens."""
    torch.manual_seed(0)
    random.seed(0)
    shape = (batch_size,)
    lengths = torch.full(shape, max_uih_len) if full else torch.randint(max_uih_len + 1, shape)
    num_targets = torch.randint(1, (delta_size or max_targets) + 1, shape)
    lengths = lengths + (delta_size or num_targets) + contextual_seq_len
    seq_offsets = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).to(DEVICE)
    tokens = int(seq_offsets[-1])

    def uniform(columns: int) -> Tensor:
        return torch.empty(tokens, heads, columns, device=DEVICE, dtype=dtype).uniform_(-0.1, 0.1)

    arguments = {
        "max_seq_len": max_uih_len + (delta_size or max_targets) + contextual_seq_len,
        "alpha": attn_dim**-0.5,
        "q": uniform(attn_dim),
        "k": uniform(attn_dim),
        "v": uniform(hidden_dim),
        "seq_offsets": seq_offsets,
        "num_targets": num_targets.to(DEVICE) if has_multiple_targets else None,
        "max_attn_len": random.randint(1, max_uih_len // 5) if has_max_attn_len else 0,
        "contextual_seq_len": contextual_seq_len,
    }
    return Batch(arguments, torch.randn_like(arguments["v"]), delta_size)


def assert_right(batch: Batch, **options: Any) -> None:
    """Ours is as exact as the plain statement in the same precision."""
    dtype = batch.d_o.dtype
    exact = batch(plain_hstu_mha, torch.float64)
    same = batch(plain_hstu_mha, dtype)
    assert_no_worse(batch(hstu_mha, dtype, **options), same, exact, name=str(options))


def assert_delta_right(batch: Batch, **options: Any) -> None:
    """Of the newest queries alone; and that is the end of what all queries get."""
    arguments = batch.arguments
    ends = arguments["seq_offsets"][1:, None]
    newest = (ends + torch.arange(-batch.delta_size, 0, device=ends.device)).flatten()
    rest = {name: value for name, value in arguments.items() if name != "q"}
    double = {name: arguments[name].double() for name in ("q", "k", "v")}
    ours = delta_hstu_mha(delta_q=arguments["q"][newest], **rest, **options)
    exact = plain_hstu_mha(**{**arguments, **double})[newest]
    same = plain_hstu_mha(**arguments)[newest]
    assert_no_worse({"o": ours}, {"o": same}, {"o": exact}, name="newest")


@some(20)
@given(**(SIZES if ON_GPU else MIDDLE))
def test_attn_without_kernels(**sizes: Any) -> None:
    assert_right(drawn(**sizes), backend="native")


@some(12 if ON_GPU else 5)
@given(**SMALL)
def test_attn_small(**sizes: Any) -> None:
    assert_right(drawn(**sizes), backend="triton", block=16)


def each_group(test: Callable[[Batch], None], sizes: dict[str, Any]) -> Any:
    """40 examples as 8 tests, which several processes share: a head dim and a dtype each."""

    @pytest.mark.gpu
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
    @pytest.mark.parametrize("attn_dim", [16, 32, 64, 128])
    def group(attn_dim: int, dtype: torch.dtype) -> None:
        fixed = {"attn_dim": st.just(attn_dim), "dtype": st.just(dtype)}

        @hypothesis.seed(attn_dim + dtype.itemsize)  # else other sizes are the same in each group
        @some(5)
        @given(**{**sizes, **fixed})
        def examples(**sizes: Any) -> None:
            test(drawn(**sizes))

        examples()

    return group


test_attn = each_group(assert_right, SIZES)


@some(10)
@given(**(BEFORE_DELTA if ON_GPU else {**MIDDLE, "delta_size": one_of([20, 60])}))
def test_delta_attn_without_kernels(**sizes: Any) -> None:
    assert_delta_right(drawn(**sizes), backend="native")


@some(3)
@given(**{**SMALL, **SMALL_DELTA})
def test_delta_attn_small(**sizes: Any) -> None:
    assert_delta_right(drawn(**sizes), backend="triton", block=16)


test_delta_attn = each_group(assert_delta_right, BEFORE_DELTA)


@pytest.mark.gpu
@pytest.mark.parametrize("has_max_attn_len", [False, True])
@pytest.mark.parametrize("has_multiple_targets", [False, True])
def test_attn_long_seqs(has_multiple_targets: bool, has_max_attn_len: bool) -> None:
    """64 users of 32768 events. They compare nothing here; of the last queries of some users the
    result is known."""
    batch = drawn(
        batch_size=64, heads=4, max_uih_len=32768, max_targets=32, attn_dim=128, hidden_dim=128,
        has_multiple_targets=has_multiple_targets, has_max_attn_len=has_max_attn_len,
        dtype=torch.bfloat16, full=True,
    )  # fmt: skip
    found = batch(hstu_mha, torch.bfloat16)
    assert all(x.isfinite().all() for x in found.values())
    arguments = batch.arguments
    starts = arguments["seq_offsets"].tolist()
    for user in (0, 63):
        start, end = starts[user], starts[user + 1]
        targets = 0 if not has_multiple_targets else int(arguments["num_targets"][user])
        seen = plain_mask(end - start, end - start - targets, arguments["max_attn_len"], 0)
        last = seen[-48:].to(DEVICE)
        q, k, v = (arguments[name][start:end].double().transpose(0, 1) for name in "qkv")
        scores = arguments["alpha"] * q[:, -48:] @ k.mT
        weights = torch.nn.functional.silu(scores) / arguments["max_seq_len"] * last
        exact = (weights @ v).transpose(0, 1)
        error = (found["o"][end - 48 : end].double() - exact).norm() / exact.norm()
        assert error < 0.01


class HammerKernel(Enum):
    """Theirs, of which each test names two."""

    TRITON = 0
    PYTORCH = 1


THEIRS = ("test_attn_triton", "test_attn_triton_long_seqs", "test_cache", "test_delta_attn_triton")


@pytest.mark.parametrize("name", THEIRS)
def test_their_file(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    place = Path(os.environ.get("HSTU_TESTS", ""), "hstu_attention_test.py")
    if not place.is_file():
        pytest.skip("HSTU_TESTS does not name the folder with hstu_attention_test.py")
    if "long" in name and not ON_GPU:
        pytest.skip("64 users of 32768 events need a GPU")
    case = load(monkeypatch, place)
    assert sorted(n for n in dir(case) if n.startswith("test")) == sorted(THEIRS)
    getattr(case(name), name)()


def load(monkeypatch: pytest.MonkeyPatch, place: Path) -> type[TestCase]:
    """Their test case, with stand-ins for what it imports, now and when it runs."""

    def of_kernel(ours: Any, plain: Any) -> Any:
        def attention(*, kernel: Any = HammerKernel.PYTORCH, enable_tma: Any = 0, **given: Any):
            if kernel is HammerKernel.TRITON:
                return ours(**given)
            unused = ("causal", "dropout_pr")
            return plain(**{name: x for name, x in given.items() if name not in unused})

        return attention

    def newest(
        *, values: Tensor, max_len_right: int, offsets_left: Tensor, **unused: Any
    ) -> tuple[None, Tensor]:
        steps = torch.arange(len(offsets_left), device=values.device) * max_len_right
        index = (offsets_left + steps)[1:, None]
        return None, values[
            (index + torch.arange(-max_len_right, 0, device=index.device)).flatten()
        ]

    plain_delta = functools.partial(delta_hstu_mha, attention=plain_hstu_mha)
    root = "generative_recommenders"
    stand_ins: dict[str, dict[str, Any]] = {
        root: {},
        f"{root}.common": {
            "generate_sparse_seq_len": lambda size, max_seq_len, sparsity, device: torch.full(
                (size,), max_seq_len, device=device
            ),
            "gpu_unavailable": (False, ""),
            "HammerKernel": HammerKernel,
            "set_dev_mode": lambda on: None,
        },
        f"{root}.ops": {},
        f"{root}.ops.jagged_tensors": {"split_2D_jagged": newest},
        f"{root}.ops.hstu_attention": {
            "hstu_mha": of_kernel(hstu_mha, plain_hstu_mha),
            "delta_hstu_mha": of_kernel(delta_hstu_mha, plain_delta),
        },
    }
    for module, contents in stand_ins.items():
        made = ModuleType(module)
        made.__path__ = []
        vars(made).update(contents)
        monkeypatch.setitem(sys.modules, module, made)

    def fewer(*arguments: Any, max_examples: int, **options: Any) -> Any:
        return some(min(max_examples, 25 if ON_GPU else 5))

    spec = importlib.util.spec_from_file_location("hstu_attention_test", place)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Bound as the file is read: its decorators and its functions see these.
    with (
        mock.patch.object(hypothesis, "settings", fewer),
        mock.patch.dict(sys.modules, torch=_Torch()),
    ):
        spec.loader.exec_module(module)
    return module.HSTUAttentionTest


class _Torch(ModuleType):
    """PyTorch, whose CUDA devices are this machine's."""

    def __init__(self) -> None:
        super().__init__("torch")
        cumsum = lambda lengths: torch.nn.functional.pad(lengths.cumsum(0), (1, 0))  # noqa: E731
        self.ops = mock.Mock(fbgemm=mock.Mock(asynchronous_complete_cumsum=cumsum))
        self.cuda = mock.Mock(get_device_capability=lambda device: (9, 0))

    def device(self, name: str) -> torch.device:
        return torch.device(DEVICE)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)
