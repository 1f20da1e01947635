"""`hopper_pays.py` says from which lengths on Hopper's kernels are faster than the plain ones."""

from __future__ import annotations

from typing import Any

import pandas as pd
import pytest
import torch
from attention_cases import DEVICE
from choice_cases import on_hopper
from hopper_pays import (
    KEYS,
    PASSES,
    RETILED,
    SCORES,
    SIDES,
    Batch,
    lay_out,
    main,
    pays_from,
    rows_of,
    said,
)
from old_and_new import difference

from jagged_kernels import JaggedTensor, jagged_attention
from jagged_kernels.schedule.policy.hopper import (
    BACKWARD_PAYS_FROM,
    FORWARD_PAYS_FROM,
    HopperConfig,
    paying_length,
)
from jagged_ranking.measure.timing import Effort


def small(dtype: torch.dtype, **shape: Any) -> Batch:
    options: dict[str, Any] = {"tokens": 300, "heads": 2, "dim": 16, **shape}
    return Batch(40, dtype=dtype, device=torch.device(DEVICE), **options)


MASKS = {"full": (False, None), "causal": (True, None), "window": (True, 7)}


@pytest.mark.parametrize("scores", SCORES)
@pytest.mark.parametrize("mask", MASKS)
def test_the_plain_side_is_attention(scores: str, mask: str) -> None:
    causal, before = MASKS[mask]
    batch = small(torch.float32)
    calls = batch.calls("plain", SCORES[scores], causal=causal, window=before)
    leaves = [x.clone().requires_grad_() for x in (batch.q, batch.k, batch.v)]
    q, k, v = (JaggedTensor(x, batch.offsets) for x in leaves)
    options: dict[str, Any] = {"scores": SCORES[scores], "backend": "reference"}
    options |= {"causal": causal} if before is None else {"window": (before, 0)}
    out = jagged_attention(q, k, v, **options).values
    gradients = torch.autograd.grad(out, leaves, batch.d_o)
    assert tuple(calls) == PASSES
    assert difference((out.detach(),), calls["forward"]()) < 1e-4
    for of_pass in PASSES[1:]:
        assert difference(gradients, calls[of_pass]()) < 1e-4


@pytest.mark.parametrize(
    ("spread", "shortest", "longest", "deviation"),
    [("uniform", 50, 150, 29), ("even", 100, 100, 0), ("lognormal", 1, 800, 150)],
)
def test_lengths_are_spread_around_their_mean(
    spread: str, shortest: int, longest: int, deviation: float
) -> None:
    shape: dict[str, Any] = {"heads": 1, "dim": 1, "dtype": torch.float32}
    batch = Batch(100, tokens=2**17, spread=spread, device=torch.device("cpu"), **shape)
    lengths = batch.offsets.diff().double()
    assert shortest <= lengths.min() <= lengths.max() <= longest
    assert 95 < lengths.mean() < 105
    assert float(lengths.std()) == pytest.approx(deviation, rel=0.3)


@pytest.mark.parametrize("keys", KEYS[1:])
def test_the_plain_side_over_lists_is_attention(keys: str) -> None:
    """Over as many keys as the lists show: what is compared is forward and backward alike."""
    candidates = 20 if keys == "retrieval" else None
    batch = small(torch.float32, candidates=candidates, spread="even")
    lists, _ = batch.lists(keys, 16)
    assert lists is not None
    calls = batch.calls("plain", None, causal=True, keys=keys, block=16)
    leaves = [x.clone().requires_grad_() for x in (batch.q, batch.k, batch.v)]
    q, k, v = (
        JaggedTensor(x, of)
        for x, of in zip(leaves, (batch.q_offsets, batch.offsets, batch.offsets), strict=True)
    )
    out = jagged_attention(q, k, v, keys=lists, backend="reference").values
    gradients = torch.autograd.grad(out, leaves, batch.d_o)
    assert difference((out.detach(),), calls["forward"]()) < 1e-4
    for of_pass in PASSES[1:]:
        assert difference(gradients, calls[of_pass]()) < 1e-4


@on_hopper
@pytest.mark.parametrize("block", [64, 128])
@pytest.mark.parametrize("keys", KEYS[1:])
@pytest.mark.parametrize("dim", [64, 128])
def test_both_sides_are_timed_over_lists_and_agree(dim: int, keys: str, block: int) -> None:
    candidates = 100 if keys == "retrieval" else None
    batch = small(torch.bfloat16, tokens=3000, dim=dim, candidates=candidates)
    effort = Effort(rounds=1, inner=1, warmup=1)
    found = list(rows_of(batch, None, effort, causal=True, keys=keys, block=block))
    assert [row["pass"] for row in found] == list(PASSES[: 1 if (dim, block) == (128, 64) else 3])
    for row in found:
        assert row["results differ"] < 2e-2


def test_a_layout_is_changed_in_words() -> None:
    table = {(64, 64): HopperConfig(consumers=1, warps=4, block=128, stages=3, residents=2)}
    lay_out(table, 64, 64, "block=64,residents=3")
    lay_out(table, 128, 64, "block=32")
    lay_out(table, 64, 64, None)
    changed = HopperConfig(consumers=1, warps=4, block=64, stages=3, residents=3)
    assert table == {(64, 64): changed}


@on_hopper
@pytest.mark.parametrize("scores", SCORES)
@pytest.mark.parametrize("dim", [64, 128])
def test_both_sides_are_timed_and_agree(scores: str, dim: int) -> None:
    batch = small(torch.bfloat16, tokens=3000, dim=dim)
    effort = Effort(rounds=1, inner=1, warmup=1)
    found = list(rows_of(batch, SCORES[scores], effort, causal=True))
    assert [row["pass"] for row in found] == list(PASSES)
    # At head_dim 64 tiles are the same.
    sides = (*SIDES, RETILED) if dim == 128 else SIDES
    for row in found:
        assert row["results differ"] < 2e-2
        assert all(row[f"{side}, ms"] > 0 for side in sides)
        assert (f"{RETILED}, ms" in row) == (RETILED in sides)


def test_it_pays_from_where_it_is_faster_at_all_that_follow() -> None:
    ratios = {"forward": [1.2, 0.9, 1.1, 1.3], "backward": [0.5, 0.6, 0.7, 1.0]}
    rows = [
        {"head_dim": 64, "length": length, "pass": of_pass, "plain / hopper": ratio}
        for of_pass, some in ratios.items()
        for length, ratio in zip((128, 256, 512, 1024), some, strict=True)
    ]
    rows.append({"head_dim": 128, "length": 128, "pass": "forward", "plain / hopper": 2.0})
    found = pays_from(pd.DataFrame(rows))
    assert found["pass"].tolist() == ["forward", "backward", "forward"]
    assert found["pays from"].tolist() == [512, None, 128]


def test_what_the_policy_says() -> None:
    assert said("silu", "forward", 64) == FORWARD_PAYS_FROM["pointwise"][64]
    assert said("softmax", "backward", 128) == BACKWARD_PAYS_FROM["softmax"][128]
    assert said("silu", "forward+backward", 64) is None
    assert said("softmax", "forward", 64, "strided") == FORWARD_PAYS_FROM["lists"][64]
    assert said("softmax", "backward", 64, "semi-local") == BACKWARD_PAYS_FROM["lists, window"][64]
    for of_pass, table in (("forward", FORWARD_PAYS_FROM), ("backward", BACKWARD_PAYS_FROM)):
        assert said("silu", of_pass, 128, causal=True) == table["pointwise, causal"][128]
        assert said("softmax", of_pass, 128, causal=True) == table["softmax, causal"][128]
    windows = BACKWARD_PAYS_FROM["softmax, window"]
    assert said("softmax", "backward", 64, causal=True, window=100) == windows[64]


def test_lists_may_have_lengths_of_their_own_for_scores() -> None:
    table = {"lists": {64: 1}, "lists, window": {64: 2}, "pointwise lists": {64: 3}}
    of = [("softmax", "causal"), ("softmax", "window"), ("pointwise", "causal")]
    assert [paying_length(table, scores, "lists", mask, 64) for scores, mask in of] == [1, 2, 3]
    assert paying_length(table, "pointwise", "lists", "causal", 128) is None
    assert paying_length(table, "softmax", "ranges", "none", 64) is None


def test_lists_have_no_other_window(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--keys", "strided", "--window", "64"])
    assert "--window is of ranges" in capsys.readouterr().err


def test_without_such_a_gpu_one_line_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hopper_pays.is_hopper", lambda device: False)
    with pytest.raises(SystemExit, match="hopper_pays: there is no Hopper GPU here"):
        main(["--lengths", "128"])
