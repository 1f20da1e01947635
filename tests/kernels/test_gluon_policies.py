"""Policies of one's own that Gluon does not compile: the plain kernels take them, on Hopper too."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import score_policies
import torch
from attention_cases import DEVICE
from choice_cases import CALLS, on_hopper, pass_for_hopper
from launch_keys import record_launches, watch_launches
from processes import run_python
from score_policies import GLUON_COMPILES, GLUON_HAS_NEITHER, GLUON_HAS_NO_D_SCORE
from torch import Tensor

from jagged_kernels import (
    JaggedTensor,
    attention_schedule,
    jagged_attention,
    lengths_to_offsets,
)
from jagged_kernels.attention.scores import gluon_policies
from jagged_kernels.schedule.policy.hopper import HOPPER_TILES

ASK = (
    "import sys; sys.path.append(sys.argv[1]); "
    "import gluon_policies_compile; gluon_policies_compile.main()"
)
EVERY = ["hopper forward", "hopper dq", "hopper dkv"]
NONE = ["general"] * 3


@pytest.fixture(scope="module")
def asked(tmp_path_factory) -> dict[str, Any]:
    support = str(Path(score_policies.__file__).parent)
    cache = str(tmp_path_factory.mktemp("triton"))
    result = run_python(ASK, support, TRITON_CACHE_DIR=cache)
    assert result.returncode == 0, result.stderr[-2000:]
    return json.loads(result.stdout)


@pytest.mark.parametrize(
    ("policy", "takers", "compiled"),
    [
        ("arithmetic", EVERY, 2),
        ("functions", EVERY, 1),
        ("zeros_like", NONE, 1),
        ("arange", NONE, 1),
        ("zeros_like in a helper", NONE, 1),
        ("no number", NONE, 1),
        ("d_score", ["hopper forward", "general", "general"], 1),
        ("both", NONE, 0),
    ],
)
def test_who_takes_it(policy, takers, compiled, asked):
    """And each function is compiled once, whatever asks, and whichever policies have it."""
    found = asked["found"][policy]
    assert found["takers"] == takers
    assert found["compiled"] == compiled
    assert [not said for said in found["said"]] == ["hopper" in taker for taker in takers]


def test_why_hoppers_kernels_do_not(asked):
    no_layout = "its {} cannot be compiled by Gluon: GluonSemantic.{}() missing 1 required "
    no_layout += "positional argument: 'layout'"
    weight, d_score = no_layout.format("weight", "full"), no_layout.format("d_score", "full")
    said = {name: found["said"] for name, found in asked["found"].items()}
    assert said["zeros_like"] == said["zeros_like in a helper"] == [[weight]] * 3
    assert said["arange"] == [[no_layout.format("weight", "arange")]] * 3
    assert said["d_score"] == [[], [d_score], [d_score]]
    assert said["both"] == [[weight], [weight, d_score], [weight, d_score]]
    (why,) = said["no number"][0]
    assert why.endswith("by Gluon: weights must be floating point numbers")


def test_the_small_kernel_compiles_where_theirs_do(asked):
    takers = {name: found["takers"] for name, found in asked["found"].items()}
    for of_pass, number in (("forward", 0), ("dkv", 2)):
        refused = [name for name, names in takers.items() if "hopper" not in names[number]]
        assert asked["failing"][of_pass] == refused


def test_what_is_wrong_with_a_cache_is_not_the_policy(monkeypatch):
    def fail(*_arguments: Any, **_options: Any) -> None:
        raise PermissionError("a cache that cannot be written")

    gluon_policies._refusal.cache_clear()  # another test of this process may have asked
    monkeypatch.setattr(gluon_policies.triton, "compile", fail)
    weight = score_policies.as_compiled(score_policies.squared)
    with pytest.raises(PermissionError, match="cannot be written"):
        gluon_policies.weight_refusal(weight)
    monkeypatch.undo()
    assert gluon_policies.weight_refusal(weight) is None


@pytest.mark.parametrize(
    ("scores", "forward"),
    [(GLUON_COMPILES, "hopper"), (GLUON_HAS_NO_D_SCORE, "hopper"), (GLUON_HAS_NEITHER, "plain")],
    ids=lambda value: getattr(value, "name", value),
)
def test_compiled_by_torch(scores, forward, monkeypatch):
    """The choice is the operator's, not the trace's."""
    keys = record_launches(monkeypatch)
    pass_for_hopper(monkeypatch)
    arguments, options = CALLS["long, scores of one's own"].arguments()

    def attend(*qkv: JaggedTensor) -> Tensor:
        return jagged_attention(*qkv, **{**options, "scores": scores}).values

    torch.compile(attend, fullgraph=True, backend="aot_eager")(*arguments).sum().backward()
    launched = {module.removeprefix("jagged_kernels.attention.") for _, module, *_ in keys}
    assert f"{forward}.forward" in launched
    backward = "hopper" if scores is GLUON_COMPILES else "plain"
    assert {f"{backward}.dq", f"{backward}.dkv"} <= launched
    assert len({"hopper.forward", "plain.forward"} & launched) == 1
    assert len({"hopper.dkv", "plain.dkv"} & launched) == 1


# --- on the device --------------------------------------------------------------------------------


def _attend(scores: Any, dim: int) -> dict[str, Tensor]:
    generator = torch.Generator(DEVICE).manual_seed(0)
    offsets = lengths_to_offsets(torch.tensor([4200, 4000, 4300])).to(DEVICE)
    given = torch.randn(
        4, 12_500, 2, dim, dtype=torch.bfloat16, device=DEVICE, generator=generator
    )  # fmt: skip
    q, k, v = (x.clone().requires_grad_() for x in given[:3])
    jagged = [JaggedTensor(x, offsets) for x in (q, k, v)]
    tile = HOPPER_TILES[dim]
    # Its tiles are those for Hopper whoever takes it.
    schedule = attention_schedule(*jagged[:2], causal=True, tile_q=tile, tile_k=tile)
    out = jagged_attention(*jagged, causal=True, scores=scores, schedule=schedule).values
    gradients = torch.autograd.grad(out, (q, k, v), given[3])
    return dict(zip(("o", "dq", "dk", "dv"), (out.detach(), *gradients), strict=True))


@on_hopper
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("scores", [GLUON_HAS_NEITHER, GLUON_HAS_NO_D_SCORE], ids=lambda s: s.name)
def test_long_users_have_the_plain_kernels_results(scores, dim, monkeypatch):
    keys = watch_launches(monkeypatch)
    ours = _attend(scores, dim)
    launched = {module for _, module in keys}
    of_hopper = _attend(GLUON_COMPILES, dim)
    pass_for_hopper(monkeypatch, hopper=False)
    expected = _attend(scores, dim)
    if scores is GLUON_HAS_NO_D_SCORE:
        assert "jagged_kernels.attention.hopper.forward" in launched
        expected["o"] = of_hopper["o"]
    else:
        assert not any(".hopper." in module for module in launched), launched
    assert "jagged_kernels.attention.plain.dkv" in launched
    for name, result in expected.items():
        assert result.count_nonzero(), name
        assert torch.equal(ours[name], result), name
