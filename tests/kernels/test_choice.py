"""Who takes a call of attention: the table, the choice from it, and what is then launched."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from choice_cases import (
    CALLS,
    EACH_CALL,
    HALF,
    LISTS,
    PLAIN,
    SINGLE,
    Call,
    Picks,
    pass_for_hopper,
    said_picks,
)
from launch_keys import ROWS, Key, record_launches, watch_launches

from jagged_kernels import JaggedTensor, SiLU, explain_attention, jagged_attention
from jagged_kernels.attention import api, choice
from jagged_kernels.schedule.policy.hopper import (
    FORWARD_PAYS_FROM,
    HOPPER_TILES,
    ONE_PASS_OF_GROUPS_PAYS_BELOW,
    ONE_PASS_PAYS_FROM,
    is_hopper,
    paying_length,
)

# The kernels of a family in each pass, below jagged_kernels.attention.
KERNELS = {
    "plain": ("plain.forward._forward_kernel", "plain.dq._dq_kernel", "plain.dkv._dkv_kernel"),
    "split": ("split.forward._split_forward_kernel", "split.backward._split_backward_kernel",
              "split.backward._split_backward_kernel"),
    "hopper forward": ("hopper.forward._forward_kernel", "", ""),
    "hopper one pass": ("", *["hopper.one_pass._one_pass_kernel"] * 2),
    "hopper dq": ("", "hopper.dq._dq_kernel", ""),
    "hopper dkv": ("", "", "hopper.dkv._dkv_kernel"),
}  # fmt: skip
SHORT_KERNELS = ("plain.short._short_forward_kernel", "plain.short._short_backward_kernel")


def kernels_of(picks: Picks) -> set[str]:
    found = set()
    for number, name in enumerate(picks):
        plain = {"short": "plain", "general": "plain"}.get(name, name)
        found.add(KERNELS[plain][number])
    return found | (set(SHORT_KERNELS) if "short" in picks else set())


ROOM = "jagged_kernels.attention."
# Of a family that takes all that a call can ask for: without and with any of it.
OPERATORS = {"split": ("attention_split", "attention_split_general")}
OTHERS = ("attention_triton", "attention_triton_general")
# Whose kernels an operator launches.
HOPPER = (choice.HOPPER_FORWARD, choice.HOPPER_ONE_PASS, choice.HOPPER_DKV, choice.HOPPER_DQ)
LAUNCHED = {
    "split": (choice.SPLIT,),
    "plain": (*HOPPER, choice.SHORT, choice.PLAIN),
    "general": (*HOPPER, choice.SHORT, choice.GENERAL),
}
EVERY_KERNEL = {name for names in KERNELS.values() for name in names if name} | set(SHORT_KERNELS)


@EACH_CALL
@pytest.mark.parametrize("hopper", [False, True], ids=["other GPUs", "Hopper"])
def test_what_is_said_is_what_is_launched(call, hopper, monkeypatch):
    keys = record_launches(monkeypatch, ROWS)
    pass_for_hopper(monkeypatch, hopper)
    check(call, call.picks_on_hopper if hopper else call.picks, keys, monkeypatch)


@pytest.mark.gpu
@EACH_CALL
def test_on_a_gpu_what_is_said_is_what_runs(call, monkeypatch):
    keys = watch_launches(monkeypatch)
    hopper = is_hopper(torch.device("cuda", torch.cuda.current_device()))
    check(call, call.picks_on_hopper if hopper else call.picks, keys, monkeypatch)


def check(call: Call, picks: Picks, keys: list[Key], monkeypatch: pytest.MonkeyPatch) -> None:
    arguments, options = call.arguments()
    assert said_picks(explain_attention(*arguments, **options)) == picks
    keys.clear()
    operators: list[str] = []
    real = api.call

    def watched(op: Any, *inputs: Any) -> Any:
        operators.append(op.name().removeprefix("jagged_kernels::"))
        return real(op, *inputs)

    monkeypatch.setattr(api, "call", watched)
    out = jagged_attention(*arguments, **options)
    values = out.values if isinstance(out, JaggedTensor) else out
    # Of a sum of squares: its gradient has a layout of its own.
    values.square().sum().backward()
    general = any(options.get(name) for name in ("bias", "dropout_p", "scores", "keys"))
    assert operators == [OPERATORS.get(picks[0], OTHERS)[general]]
    launched = {f"{module.removeprefix(ROOM)}.{name}" for name, module, *_ in keys}
    expected = kernels_of(picks)
    if not call.length:
        expected -= {"plain.dkv._dkv_kernel"}
    assert launched & EVERY_KERNEL == expected


def asked_for() -> Iterator[choice.Asked]:
    """Of every column of the table all that matters."""
    tiles = ((64, 64), (128, 128), (128, 64), (32, 64))
    devices = (torch.device("cpu"), torch.device("cuda", 0))
    columns: list[Any] = [
        ("forward", "dq", "dkv"), devices, (HALF, SINGLE), (48, 64, 128), (64, 128), tiles,
        *[(False, True)] * 3, ("whole", "cut"), ("softmax", "pointwise"), ("ranges", "lists"),
    ]  # fmt: skip
    for one, device, dtype, dim, dim_v, tile, *rest in itertools.product(*columns):
        asked = choice.Asked(one, device, dtype, dim, dim_v, *tile, *rest)
        for mask, grouped in (("none", False), ("causal", True), ("window", True)):
            yield asked._replace(mask=mask, grouped=grouped)
        yield asked._replace(mask="causal")


def test_the_choice_is_the_first_that_says_nothing(monkeypatch):
    """What is picked and what is said come from the same table, in two ways."""
    monkeypatch.setattr(choice, "is_hopper", lambda device: device.type == "cuda")
    able_families = choice.able_families.__wrapped__
    batches = [(0, 0), (0, 2), (5, 2), (159, 2), (160, 2), (256, 2), (512, 2), (2048, 2)]
    seen = set()
    for asked in asked_for():
        able = able_families(*asked)
        operator = choice.pick_operator(
            bias=asked.bias,
            dropout=asked.dropout,
            pointwise=asked.scores == "pointwise",
            lists=asked.keys == "lists",
            cut=asked.rows == "cut",
        )
        widths = (100, 1000) if asked.mask == "window" else (0,)
        for (tokens, users), tma, width in itertools.product(batches, (False, True), widths):
            expected = next(
                family
                for family in choice.TRITON
                if not choice.refusals(family, asked)
                and not choice.batch_refusals(family, asked, tokens, users, tma=tma, width=width)
            )
            picked = choice.first_that_pays(able, tokens, users, lambda tma=tma: tma, width)
            assert picked is expected
            any_batch = next(one for one, least, limit in able if (least, limit) == (0, math.inf))
            assert any_batch.operator == operator
            assert picked in LAUNCHED[operator]
            seen.add(picked.name)
    assert seen == {family.name for family in choice.TRITON}


@pytest.mark.parametrize(
    ("scores", "length", "forward"),
    [
        ("pointwise", 500, "hopper forward"),
        ("pointwise", 499, "general"),
        ("softmax", 500, "plain"),
    ],
)
def test_pointwise_scores_pay_from_lengths_of_their_own(scores, length, forward, monkeypatch):
    pass_for_hopper(monkeypatch)
    monkeypatch.setitem(FORWARD_PAYS_FROM["pointwise"], 64, 500)
    options = {"scores": SiLU()} if scores == "pointwise" else {}
    arguments, options = Call(length, 64, (forward,) * 3, options=options).arguments()
    assert said_picks(explain_attention(*arguments, **options))[0] == forward


@pytest.mark.parametrize(
    ("keys", "length", "forward"),
    [
        (LISTS, 500, "hopper forward"),
        (LISTS, 499, "general"),
        (None, 500, "plain"),
    ],
)
def test_lists_pay_from_lengths_of_their_own(keys, length, forward, monkeypatch):
    pass_for_hopper(monkeypatch)
    monkeypatch.setitem(FORWARD_PAYS_FROM["lists"], 64, 500)
    options = {} if keys is None else {"keys": keys}
    arguments, options = Call(length, 64, (forward,) * 3, options=options).arguments()
    assert said_picks(explain_attention(*arguments, **options))[0] == forward


def test_weights_over_lists_pay_from_lengths_of_their_own():
    """Where there are such; else from those of lists, and a mask's before those of any."""
    table = {"lists": {64: 5}, "lists, window": {64: 6}, "pointwise lists": {64: 7}}
    for scores, mask, length in (
        ("softmax", "none", 5), ("softmax", "window", 6), ("pointwise", "none", 7),
        ("pointwise", "window", 7), ("softmax", "causal", 5),
    ):  # fmt: skip
        assert paying_length(table, scores, "lists", mask, 64) == length
    assert paying_length(table, "softmax", "ranges", "none", 64) is None


def test_dq_of_hopper_comes_beside_dkv_alone(monkeypatch):
    """Its kernel is launched by the backward that dkv's launcher is part of."""
    monkeypatch.setattr(choice, "is_hopper", lambda device: device.type == "cuda")
    for asked in asked_for():
        if not choice.refusals(choice.HOPPER_DQ, asked._replace(of_pass="dq")):
            assert not choice.refusals(choice.HOPPER_DKV, asked._replace(of_pass="dkv"))
    assert choice.HOPPER_DQ.pays_from == choice.HOPPER_DKV.pays_from


@pytest.fixture
def one_pass_pays(monkeypatch):
    """From fewer tokens than it does; beside `pass_for_hopper`, with which nothing is kept."""
    for dim in (paying := ONE_PASS_PAYS_FROM["softmax"]):
        monkeypatch.setitem(paying, dim, 300)


@pytest.mark.usefixtures("one_pass_pays")
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("length", [299, 300])
def test_one_pass_where_it_pays(dim, length, monkeypatch):
    keys = record_launches(monkeypatch, ROWS)
    pass_for_hopper(monkeypatch)
    dq, one = "plain" if dim == 64 else "hopper dq", "hopper one pass"
    forward = "plain" if dim == 64 else "hopper forward"
    two: Picks = (forward, dq, "hopper dkv")
    picks: Picks = two if length < 300 else (forward, one, one)
    check(Call(length, dim, picks), picks, keys, monkeypatch)
    keys.clear()
    check(Call(length, dim, two, own_offsets=True), two, keys, monkeypatch)
    keys.clear()
    # Wide ones, which at head_dim 128 pay from longer users.
    wide = two if dim == 64 else PLAIN
    check(Call(length, dim, wide, options={"window": (600, 0)}), wide, keys, monkeypatch)


@pytest.mark.parametrize("kv_heads", [1, 2])
def test_heads_that_share_keys_are_walked_in_one_pass_up_to_a_length(kv_heads, monkeypatch):
    """Without a mask too, and whatever else a call asks for."""
    pass_for_hopper(monkeypatch)
    tile, tokens = HOPPER_TILES[128], ONE_PASS_OF_GROUPS_PAYS_BELOW
    q, k = (torch.zeros(tokens, heads, 128, dtype=HALF) for heads in (2, kv_heads))
    rows = torch.zeros(tokens // tile + 1, 8)
    offsets = torch.tensor([0, tokens])
    found = choice.pick("dkv", q, k, k, rows, tile, tile, offsets)
    assert found == (choice.HOPPER_ONE_PASS if kv_heads == 2 else choice.HOPPER_DKV)


def test_hopper_reads_nothing_that_is_empty():
    x = torch.zeros(2, 2, 64, dtype=HALF)
    assert choice.hopper_reads(x, x, x)
    assert not choice.hopper_reads(x[:0], x, x)
    assert not choice.hopper_reads(x, x[:0], x[:0])


def test_nobody_takes_what_the_triton_backend_has_not():
    cpu = torch.device("cpu")
    with pytest.raises(NotImplementedError, match="float64 is not float16, bfloat16 or float32"):
        choice.able_families("forward", cpu, torch.float64, 64, 64, 64, 64, True)
    with pytest.raises(NotImplementedError, match="head_dim 257 is above 256"):
        choice.able_families("forward", cpu, HALF, 257, 64, 64, 64, True)


def test_every_family_is_named_once():
    names = [family.name for family in choice.FAMILIES]
    assert not [name for name, count in Counter(names).items() if count > 1]
    assert {"reference", "native"} < set(names)
    arguments, options = CALLS["long, bias"].arguments()
    heads = [line.split(": ")[0] for line in explain_attention(*arguments, **options).splitlines()]
    said = [name for head in heads[2:] for name in head.split(", ")]
    assert Counter(["general", *said]) == Counter(family.name for family in choice.TRITON)
