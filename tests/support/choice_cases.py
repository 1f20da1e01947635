"""Who takes a call of attention: calls with what they should get, what is said of them, and a CPU
that passes for Hopper."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from attention_cases import DEVICE
from score_policies import GLUON_COMPILES, GLUON_HAS_NEITHER, GLUON_HAS_NO_D_SCORE
from torch import Tensor

from jagged_kernels import (
    ALiBi,
    JaggedTensor,
    SemiLocalKeys,
    Sigmoid,
    SiLU,
    StridedKeys,
    attention_schedule,
    lengths_to_offsets,
)
from jagged_kernels.attention import choice, explain, fp8
from jagged_kernels.attention.operators import fp8 as fp8_operators
from jagged_kernels.schedule import tiles
from jagged_kernels.schedule.policy.hopper import (
    BACKWARD_PAYS_FROM,
    FORWARD_PAYS_FROM,
    HOPPER_TILES,
    HOPPER_TILES_FROM,
    ONE_PASS_OF_GROUPS_PAYS_BELOW,
    ONE_PASS_PAYS_FROM,
    box,
)
from jagged_kernels.schedule.policy.plain import MOSTLY_SHORT
from jagged_kernels.schedule.row_layout import SHORT_USER

# Families of the forward, dQ, and dK and dV.
Picks = tuple[str, str, str]
HALF, SINGLE = torch.float16, torch.float32
SHORT: Picks = ("short", "short", "short")
PLAIN: Picks = ("plain", "plain", "plain")
GENERAL: Picks = ("general", "general", "general")
SPLIT: Picks = ("split", "split", "split")
EVERY_HOPPER = ("hopper forward", "hopper dq", "hopper dkv")


@dataclass(frozen=True)
class Call:
    """A call of `jagged_attention`, and who takes it: on most GPUs, and on Hopper if others do.

    Fields:
        length: of each of two users.
        queries: dense ones a user; None for jagged ones.
        layout: of q, k and v in memory.
        schedule: options of `attention_schedule`; None to leave it to the call.
    """

    length: int
    dim: int
    picks: Picks
    hopper: Picks | None = None
    dtype: torch.dtype = HALF
    dim_v: int | None = None
    queries: int | None = None
    own_offsets: bool = False
    layout: str = "contiguous"
    schedule: dict[str, Any] | None = None
    bias: bool = False
    grouped: bool = False
    options: dict[str, Any] = field(default_factory=dict)

    def arguments(self) -> tuple[tuple[Any, JaggedTensor, JaggedTensor], dict[str, Any]]:
        offsets = lengths_to_offsets(torch.tensor([self.length] * 2)).to(DEVICE)
        k, v = (
            JaggedTensor(self._laid_out(2 * self.length, dim).requires_grad_(), offsets)
            for dim in (self.dim, self.dim_v or self.dim)
        )
        if self.grouped:
            k, v = (x.with_values(x.values[:, :1]) for x in (k, v))
        if self.queries is not None:
            q = self._laid_out(2 * self.queries, self.dim).requires_grad_()
            q = q.view(2, self.queries, 2, self.dim)
        else:
            q = self._laid_out(2 * self.length, self.dim).requires_grad_()
            q = JaggedTensor(q, offsets.clone() if self.own_offsets else offsets)
        schedule = None
        if self.schedule is not None:
            schedule = attention_schedule(q, k, **self.schedule)
        bias = ALiBi(torch.ones(2, device=DEVICE)) if self.bias else None
        rest = {"bias": bias, "schedule": schedule, "backend": "triton"}
        return (q, k, v), {**self.options, **rest}

    def _laid_out(self, tokens: int, dim: int) -> Tensor:
        if self.layout == "heads first":
            return torch.zeros(2, tokens, dim, dtype=self.dtype, device=DEVICE).transpose(0, 1)
        if self.layout == "packed":
            return torch.zeros(tokens, 3, 2, dim, dtype=self.dtype, device=DEVICE)[:, 1]
        if self.layout == "not aligned":
            numbers = torch.zeros(tokens * 2 * dim + 1, dtype=self.dtype, device=DEVICE)
            return numbers[1:].view(tokens, 2, dim)
        return torch.zeros(tokens, 2, dim, dtype=self.dtype, device=DEVICE)

    @property
    def picks_on_hopper(self) -> Picks:
        return self.hopper or self.picks


LISTS = StridedKeys(4, 2)
LARGE_LISTS, SMALL_LISTS = StridedKeys(4, 2, block=128), StridedKeys(4, 2, block=32)
LONG_LISTS = {
    dim: max(FORWARD_PAYS_FROM["lists"][dim], n) for dim, n in BACKWARD_PAYS_FROM["lists"].items()
}
LONG, LONG_BACKWARD = FORWARD_PAYS_FROM["softmax"], BACKWARD_PAYS_FROM["softmax"]
LONG_POINTWISE = FORWARD_PAYS_FROM["pointwise"]
LONG_CAUSAL = {
    dim: max(FORWARD_PAYS_FROM["softmax, causal"][dim], n)
    for dim, n in BACKWARD_PAYS_FROM["softmax, causal"].items()
}
ONE_PASS_CAUSAL = ONE_PASS_PAYS_FROM["softmax, causal"]
LONG_WINDOW = FORWARD_PAYS_FROM["softmax, window"]
LONG_CAUSAL_POINTWISE = FORWARD_PAYS_FROM["pointwise, causal"]
CALLS = {
    "short users": Call(20, 16, SHORT),
    "short users at a head_dim of Hopper's": Call(MOSTLY_SHORT - 1, 64, SHORT),
    "short users, offsets of their own": Call(20, 16, PLAIN, own_offsets=True),
    "short users, tiles as short": Call(
        20, 16, PLAIN, schedule={"tile_q": SHORT_USER, "tile_k": SHORT_USER}
    ),
    "short users, dropout": Call(20, 16, SHORT, options={"dropout_p": 0.5}),
    "no longer short, dropout": Call(MOSTLY_SHORT, 16, GENERAL, options={"dropout_p": 0.5}),
    "short users, bias": Call(20, 16, SHORT, bias=True),
    "no longer short, bias": Call(MOSTLY_SHORT, 16, GENERAL, bias=True),
    "short users, bias, offsets of their own": Call(20, 16, GENERAL, own_offsets=True, bias=True),
    "short users, bias, dropout and pointwise scores": Call(
        20, 64, SHORT, bias=True, options={"dropout_p": 0.5, "scores": SiLU()}
    ),
    "short users, bias and lists of keys": Call(
        20, 16, GENERAL, bias=True, options={"keys": LISTS}
    ),
    "no longer short": Call(MOSTLY_SHORT, 16, PLAIN),
    "long enough for the backward": Call(
        LONG_BACKWARD[64], 64, PLAIN, ("plain", "plain", "hopper dkv")
    ),
    "too short for the backward": Call(LONG_BACKWARD[64] - 1, 64, PLAIN),
    "too short for the forward": Call(
        LONG[64] - 1, 64, PLAIN, ("plain", "plain", "hopper dkv")
    ),
    "long": Call(LONG[64], 64, PLAIN, ("hopper forward", "plain", "hopper dkv")),
    "long, head_dim 128": Call(LONG[128], 128, PLAIN, EVERY_HOPPER),
    "long enough for the backward, head_dim 128": Call(
        LONG[128] - 1, 128, PLAIN, ("plain", "hopper dq", "hopper dkv")
    ),
    "not long, head_dim 128": Call(LONG_BACKWARD[128] - 1, 128, PLAIN),
    "not long, causal, head_dim 128": Call(
        HOPPER_TILES_FROM[128]["causal"] - 1, 128, PLAIN, options={"causal": True}
    ),
    "long, causal": Call(LONG_CAUSAL[128], 128, PLAIN, EVERY_HOPPER, options={"causal": True}),
    "long enough for one pass, causal": Call(
        ONE_PASS_CAUSAL[128], 128, PLAIN,
        ("hopper forward", "hopper one pass", "hopper one pass"), options={"causal": True},
    ),
    "long enough for one pass, causal, offsets of their own": Call(
        ONE_PASS_CAUSAL[128], 128, PLAIN, EVERY_HOPPER, own_offsets=True,
        options={"causal": True},
    ),
    "too long for one pass, causal, heads that share keys": Call(
        ONE_PASS_OF_GROUPS_PAYS_BELOW, 128, PLAIN, EVERY_HOPPER, grouped=True,
        options={"causal": True},
    ),
    "not too long for one pass, causal, heads that share keys": Call(
        ONE_PASS_CAUSAL[128], 128, PLAIN,
        ("hopper forward", "hopper one pass", "hopper one pass"), grouped=True,
        options={"causal": True},
    ),
    "long, a wide window": Call(
        LONG_WINDOW[128], 128, PLAIN, EVERY_HOPPER, options={"window": (LONG_WINDOW[128], 0)}
    ),
    "long, a narrow window": Call(LONG_WINDOW[128], 128, PLAIN, options={"window": (64, 0)}),
    "long, packed": Call(LONG[128], 128, PLAIN, EVERY_HOPPER, layout="packed"),
    "long, copied": Call(LONG[128], 128, PLAIN, EVERY_HOPPER, layout="heads first"),
    "long, not aligned": Call(LONG[128], 128, PLAIN, layout="not aligned"),
    "long, offsets of their own": Call(LONG[128], 128, PLAIN, EVERY_HOPPER, own_offsets=True),
    "long, float32": Call(LONG[128], 128, PLAIN, dtype=SINGLE),
    "long, a narrower head": Call(LONG[128], 96, PLAIN, EVERY_HOPPER),
    "long, narrower values": Call(LONG[128], 128, PLAIN, EVERY_HOPPER, dim_v=72),
    "long, values that are much narrower": Call(LONG[128], 128, PLAIN, dim_v=64),
    "long, a small head": Call(LONG[64], 32, PLAIN),
    "long, a head of 16-byte pieces and a half": Call(LONG[128], 100, PLAIN),
    "long, bias": Call(LONG[128], 128, GENERAL, bias=True),
    "long, a small tile": Call(LONG[128], 128, PLAIN, schedule={"tile_q": 64, "tile_k": 64}),
    "long, a small tile of keys": Call(
        LONG[128], 128, PLAIN, ("hopper forward", "plain", "plain"),
        schedule={"tile_q": 128, "tile_k": 64},
    ),
    "few dense queries": Call(200, 64, SPLIT, queries=3),
    "few dense queries, a schedule": Call(200, 64, SPLIT, queries=3, schedule={"split": "split"}),
    "few dense queries, whole rows": Call(200, 64, PLAIN, queries=3, schedule={"split": "rows"}),
    "few dense queries, bias": Call(200, 64, SPLIT, queries=3, bias=True),
    "few dense queries, cut rows, bias, dropout and pointwise scores": Call(
        200, 64, SPLIT, queries=3, schedule={"split": "stream"}, bias=True,
        options={"dropout_p": 0.5, "scores": SiLU()},
    ),
    "few dense queries, whole rows and bias": Call(
        200, 64, GENERAL, queries=3, schedule={"split": "rows"}, bias=True
    ),
    "many dense queries": Call(200, 64, PLAIN, queries=65),
    "short users, pointwise scores": Call(20, 16, SHORT, options={"scores": SiLU()}),
    "no longer short, pointwise scores": Call(
        MOSTLY_SHORT, 16, GENERAL, options={"scores": SiLU()}
    ),
    "long, pointwise scores": Call(
        LONG_POINTWISE[128], 128, GENERAL, EVERY_HOPPER, options={"scores": Sigmoid()}
    ),
    "long, pointwise scores, head_dim 64": Call(
        LONG_CAUSAL_POINTWISE[64], 64, GENERAL, ("hopper forward", "general", "hopper dkv"),
        options={"scores": SiLU(), "causal": True},
    ),
    "long, pointwise scores and bias": Call(
        LONG_POINTWISE[128], 128, GENERAL, bias=True, options={"scores": SiLU()}
    ),
    "long, scores of one's own": Call(
        LONG_POINTWISE[128], 128, GENERAL, EVERY_HOPPER, options={"scores": GLUON_COMPILES}
    ),
    "long, scores of one's own whose d_score Gluon does not compile": Call(
        LONG_POINTWISE[128], 128, GENERAL, ("hopper forward", "general", "general"),
        options={"scores": GLUON_HAS_NO_D_SCORE},
    ),
    "long, scores of one's own that Gluon does not compile": Call(
        LONG_POINTWISE[128], 128, GENERAL, options={"scores": GLUON_HAS_NEITHER}
    ),
    "long enough for lists of keys, scores of one's own that Gluon does not compile": Call(
        LONG_LISTS[64], 64, GENERAL, options={"keys": LISTS, "scores": GLUON_HAS_NEITHER}
    ),
    "long, lists of keys": Call(
        LONG[128], 128, GENERAL, ("hopper forward", "general", "general"), options={"keys": LISTS}
    ),
    "long, lists of keys, a schedule": Call(
        LONG[128], 128, GENERAL, ("hopper forward", "general", "general"),
        schedule={"keys": LISTS}, options={"keys": LISTS},
    ),
    "long enough for lists of keys": Call(
        LONG_LISTS[64], 64, GENERAL, ("hopper forward", "general", "hopper dkv"),
        options={"keys": LISTS},
    ),
    "too short for lists of keys": Call(
        LONG_LISTS[64] - 1, 64, GENERAL, options={"keys": LISTS}
    ),
    "long enough for lists of keys, within a window": Call(
        LONG_LISTS[64], 64, GENERAL, options={"keys": SemiLocalKeys(64, 8)}
    ),
    "long enough for lists of keys, pointwise scores": Call(
        LONG_LISTS[64], 64, GENERAL, ("hopper forward", "general", "hopper dkv"),
        options={"keys": LISTS, "scores": SiLU()},
    ),
    "long enough for lists of keys, bias": Call(
        LONG_LISTS[64], 64, GENERAL, bias=True, options={"keys": LISTS}
    ),
    "long enough for lists of keys, head_dim 128": Call(
        LONG_LISTS[128], 128, GENERAL, ("hopper forward", "general", "general"),
        options={"keys": LISTS},
    ),
    "long enough for lists of large blocks, head_dim 128": Call(
        LONG_LISTS[128], 128, GENERAL, EVERY_HOPPER, schedule={"keys": LARGE_LISTS},
        options={"keys": LARGE_LISTS},
    ),
    "long enough for lists of small blocks": Call(
        LONG_LISTS[64], 64, GENERAL, options={"keys": SMALL_LISTS}
    ),
    "few dense queries, pointwise scores": Call(
        200, 64, SPLIT, queries=3, options={"scores": SiLU()}
    ),
    "few dense queries, whole rows and pointwise scores": Call(
        200, 64, GENERAL, queries=3, schedule={"split": "rows"}, options={"scores": SiLU()}
    ),
    "few dense queries, keys of a rule": Call(
        200, 64, GENERAL, queries=3, options={"keys": SemiLocalKeys(64, 8)}
    ),
    # The rule of heads that have lists of their own, and none for tokens.
    "few dense queries, keys of a rule for blocks": Call(
        12, 64, SPLIT, queries=12, options={"keys": StridedKeys(2, 1, block=16)}
    ),
    "no key": Call(0, 64, PLAIN, queries=1),
}  # fmt: skip
EACH_CALL = pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)


def said_picks(text: str) -> Picks:
    """What `explain_attention` says of the forward, dQ, and dK and dV."""
    lines = dict(line.split(": ", 1) for line in text.splitlines())
    named = re.compile(r"(?:^|, )([a-z ]+?) \([^)]*\)(?: for (dk and dv|dq))?")
    if (both := lines.get("forward and backward")) is not None:
        ((name, _),) = named.findall(both)
        return name, name, name
    ((forward, _),) = named.findall(lines["forward"])
    backward = {passes: name for name, passes in named.findall(lines["backward"])}
    if (same := backward.get("")) is not None:
        return forward, same, same
    return forward, backward["dq"], backward["dk and dv"]


def hopper_fits(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether Hopper's kernels can take these, in a schedule with their tiles."""
    dim = q.shape[2]
    tile = HOPPER_TILES.get(box(dim), 64)
    asked = choice.Asked("forward", q.device, q.dtype, dim, v.shape[2], tile, tile, shared=True)
    said = [
        *choice.refusals(choice.HOPPER_FORWARD, asked),
        *choice.refusals(choice.HOPPER_DKV, asked._replace(of_pass="dkv")),
    ]
    return not said and choice.hopper_reads(q, k, v)


def on_hopper(test: Any) -> Any:
    """A test that needs a Hopper GPU."""
    hopper = DEVICE == "cuda" and torch.cuda.get_device_capability()[0] == 9
    return pytest.mark.gpu(pytest.mark.skipif(not hopper, reason="needs a Hopper GPU")(test))


def pass_for_hopper(monkeypatch: pytest.MonkeyPatch, hopper: bool = True) -> None:
    """In the choice of kernels and of tiles every device does, or none."""
    for module in (choice, tiles, fp8, fp8_operators):
        monkeypatch.setattr(module, "is_hopper", lambda _device: hopper)
    # Nothing of this is remembered.
    able_families = choice.able_families.__wrapped__
    for module in (choice, explain):
        monkeypatch.setattr(module, "able_families", able_families)
