"""`backward_passes.py`: what it says without a Hopper GPU, and what it compares."""

from __future__ import annotations

import pytest
import torch
from backward_passes import (
    ANYBODYS,
    DEFAULT,
    GROUPED,
    TWO,
    VARIANTS,
    cases,
    check,
    difference,
    main,
    measured_workloads,
    nobody_waits,
    takes,
)

from jagged_kernels.attention.hopper import one_pass
from jagged_kernels.attention.hopper.one_pass_warps import _DONE
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
    known = measured_workloads()
    assert {*DEFAULT, *GROUPED} <= set(known)
    assert all(known[name].heads % group == 0 for name, group in GROUPED.items())
    for dim in (64, 128):
        taken = [name for name, variant in VARIANTS.items() if takes(variant, dim)]
        assert taken[0] == TWO
        configs = [VARIANTS[name].configs for name in taken[1:]]
        assert one_pass_config(dim) in [config[dim] for config in configs if config]


def test_full_batches_are_what_their_names_say():
    known = measured_workloads()
    for name, length, head_dim, heads, causal in (
        ("128 x 64", 128, 64, 4, False),
        ("2842 x 64", 2842, 64, 8, False),
        ("grouped 9004 x 128", 9004, 128, 8, False),
        ("causal 65536 x 128", 65536, 128, 8, True),
        ("window 256 x 64", 4096, 64, 8, False),
    ):
        one = known[name]
        assert (one.max_len, one.head_dim, one.heads, one.causal) == (
            length, head_dim, heads, causal
        )  # fmt: skip
        assert one.distribution == "full"
        assert 131_072 - length < one.users * length <= 131_072
    assert known["causal N"].causal


def test_a_bound_is_not_checked(capsys):
    with pytest.raises(SystemExit):
        main(["--check", "one pass, no turns"])
    assert "invalid choice" in capsys.readouterr().err


def test_nobody_waits(monkeypatch):
    """Counts of adds are made up, that of tiles taken is not, and only inside."""
    seen = []
    kernel = one_pass._one_pass_kernel
    counts_at = kernel.arg_names.index("counts_ptr")
    monkeypatch.setattr(one_pass, "launch", lambda *given, **_: seen.append(given[2][counts_at]))
    arguments = [None] * counts_at + [torch.zeros(4, dtype=torch.int32)]
    with nobody_waits():
        one_pass.launch(kernel, 1, arguments, {}, num_warps=4)
    assert seen[0].tolist() == [0, ANYBODYS, ANYBODYS, ANYBODYS]
    # A tile's turn comes after fewer than that; the last one's count has room.
    longest = 2**24 // one_pass_config(64).tile_q
    assert longest < ANYBODYS < 2**31 - int(_DONE.value) - longest
    arguments[-1] = torch.zeros(4, dtype=torch.int32)
    one_pass.launch(kernel, 1, arguments, {})
    assert seen[1].tolist() == [0] * 4


def test_difference():
    x = torch.tensor([3.0, 4.0])
    assert difference((x, x, x), (x, x, x)) == 0
    assert difference((x, x, x), (x, 2 * x, x)) == pytest.approx(0.5)


@pytest.mark.parametrize("dim", [64, 128])
def test_what_is_checked_has_the_head_dim(dim):
    assert {case.dim for _, case in cases(dim)} == {dim}


@pytest.mark.long
@pytest.mark.gpu
@pytest.mark.parametrize("name", [TWO, "one pass"])
def test_what_is_in_use_passes_its_checks(name, capsys):
    if not is_hopper(torch.device("cuda", 0)):
        pytest.skip("they need a Hopper GPU")
    check(name)
    assert capsys.readouterr().out == "right\n"
