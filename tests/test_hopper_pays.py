"""`hopper_pays.py` says from which lengths on Hopper's kernels are faster than the plain ones."""

from __future__ import annotations

import pandas as pd
import pytest
import torch
from attention_cases import DEVICE
from choice_cases import on_hopper
from hopper_pays import PASSES, SCORES, SIDES, Batch, main, pays_from, rows_of, said
from old_and_new import difference

from jagged_kernels import JaggedTensor, jagged_attention
from jagged_kernels.schedule.policy.hopper import BACKWARD_PAYS_FROM, FORWARD_PAYS_FROM
from jagged_ranking.measure.timing import Effort


def small(dtype: torch.dtype, **shape: int) -> Batch:
    options = {"tokens": 300, "heads": 2, "dim": 16, **shape}
    return Batch(40, dtype=dtype, device=torch.device(DEVICE), **options)


@pytest.mark.parametrize("scores", SCORES)
@pytest.mark.parametrize("causal", [False, True])
def test_the_plain_side_is_attention(scores: str, causal: bool) -> None:
    batch = small(torch.float32)
    calls = batch.calls("plain", SCORES[scores], causal=causal)
    leaves = [x.clone().requires_grad_() for x in (batch.q, batch.k, batch.v)]
    q, k, v = (JaggedTensor(x, batch.offsets) for x in leaves)
    options = {"causal": causal, "scores": SCORES[scores], "backend": "reference"}
    out = jagged_attention(q, k, v, **options).values
    gradients = torch.autograd.grad(out, leaves, batch.d_o)
    assert tuple(calls) == PASSES
    assert difference((out.detach(),), calls["forward"]()) < 1e-4
    for of_pass in PASSES[1:]:
        assert difference(gradients, calls[of_pass]()) < 1e-4


@on_hopper
@pytest.mark.parametrize("scores", SCORES)
@pytest.mark.parametrize("dim", [64, 128])
def test_both_sides_are_timed_and_agree(scores: str, dim: int) -> None:
    batch = small(torch.bfloat16, tokens=3000, dim=dim)
    effort = Effort(rounds=1, inner=1, warmup=1)
    found = list(rows_of(batch, SCORES[scores], effort, causal=True))
    assert [row["pass"] for row in found] == list(PASSES)
    for row in found:
        assert row["results differ"] < 2e-2
        assert all(row[f"{side}, ms"] > 0 for side in SIDES)


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


def test_without_such_a_gpu_one_line_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hopper_pays.is_hopper", lambda device: False)
    with pytest.raises(SystemExit, match="hopper_pays: there is no Hopper GPU here"):
        main(["--lengths", "128"])
