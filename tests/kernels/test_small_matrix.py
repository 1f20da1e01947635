"""What `make sanitize` runs leaves no kernel out. On a CPU, which here passes for a Hopper GPU,
launches are noted and hardly anything runs; on a GPU it does."""

from __future__ import annotations

import pytest
import small_matrix
import torch
from attention_cases import DEVICE
from choice_cases import pass_for_hopper
from launch_keys import Key, launched_kernels, named_kernels, record_launches, watch_launches

from jagged_kernels.core import backends
from jagged_kernels.schedule.policy.hopper import is_hopper

# Compiled alone, to see whether Gluon can call a policy of one's own.
COMPILED_ALONE = {("_policy_kernel", "jagged_kernels.attention.scores.gluon_policies")}
# Files of kernels whose results decide on the host what is launched next, or are places in memory.
READ_ON_THE_HOST = ("triton_rows", "triton_user_unique", "triton_unique", "triton_choice")
MULTIPROCESSORS = 132  # of an H100


@pytest.fixture
def keys(monkeypatch):
    if DEVICE == "cuda":
        return watch_launches(monkeypatch)
    pass_for_hopper(monkeypatch)
    monkeypatch.setattr(backends, "_INTERPRETED_MULTIPROCESSORS", MULTIPROCESSORS)
    return record_launches(monkeypatch, READ_ON_THE_HOST)


def for_hopper(kernels: set[Key]) -> set[Key]:
    room = "jagged_kernels.attention.hopper."
    return {(name, module) for name, module in kernels if module.startswith(room)}


def test_kernels_are_launched_in_one_way():
    """By `launch`, which the other tests watch."""
    assert launched_kernels() == named_kernels() - COMPILED_ALONE


@pytest.mark.long
def test_every_kernel_but_hoppers_is_launched(keys):
    """And none of these, which racecheck does without."""
    for part in small_matrix.WITHOUT_HOPPER.values():
        part()
    assert {key[:2] for key in keys} == launched_kernels() - for_hopper(launched_kernels())


@pytest.mark.long
@pytest.mark.skipif(
    DEVICE == "cuda" and not is_hopper(torch.device("cuda", torch.cuda.current_device())),
    reason="needs a Hopper GPU, or none",
)
def test_every_kernel_for_hopper_is_launched(keys):
    for part in small_matrix.HOPPER.values():
        part()
    assert for_hopper({key[:2] for key in keys}) == for_hopper(launched_kernels())
