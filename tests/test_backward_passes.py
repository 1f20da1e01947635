"""`backward_passes.py`: what it says without a Hopper GPU, and what it compares."""

from __future__ import annotations

import pytest
import torch
from backward_passes import DEFAULT, TWO, VARIANTS, difference, main, measured_workloads, takes

from jagged_kernels.schedule.policy.hopper import is_hopper, one_pass_config


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["Q"], "Q is no workload; there are A, B, C, "),
        (["--check", "three passes"], "argument --check: invalid choice: 'three passes'"),
    ],
)
def test_what_it_refuses(words, line, capsys):
    with pytest.raises(SystemExit):
        main(words)
    assert line in capsys.readouterr().err


@pytest.mark.skipif(
    torch.cuda.is_available() and is_hopper(torch.device("cuda", 0)), reason="there is one"
)
def test_without_a_hopper_gpu(capsys):
    with pytest.raises(SystemExit):
        main([])
    assert capsys.readouterr().err.endswith("this needs a Hopper GPU\n")


def test_variants():
    """Two passes take what any variant does, and one as the rule lays it out is among them."""
    assert set(DEFAULT) <= set(measured_workloads())
    for dim in (64, 128):
        taken = [name for name, variant in VARIANTS.items() if takes(variant, dim)]
        assert taken[0] == TWO
        configs = [VARIANTS[name].configs for name in taken[1:]]
        assert one_pass_config(dim) in [config[dim] for config in configs if config]


def test_difference():
    x = torch.tensor([3.0, 4.0])
    assert difference((x, x, x), (x, x, x)) == 0
    assert difference((x, x, x), (x, 2 * x, x)) == pytest.approx(0.5)
