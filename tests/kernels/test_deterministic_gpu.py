"""Results have the same bits in every run, also while the device is busy with other work.

What runs beside changes which programs start when, and so in what order sums would be made.
"""

from __future__ import annotations

import random
from contextlib import nullcontext

import pytest
import torch
from attention_cases import RESULTS, Case, run
from pays import paying_from

from jagged_kernels.schedule.policy.hopper import ONE_PASS_PAYS_FROM

pytestmark = pytest.mark.gpu

RUNS = 100
SHORT = [random.Random(1).randint(0, 60) for _ in range(300)]
# Each is taken by other kernels: users of one tile; on Hopper the backward in two passes and in
# one; a user that many programs share; keys of their own, with many queries; float32.
CASES = {
    "short": (Case(SHORT, dim=64), torch.bfloat16),
    "two passes": (Case([600, 300, 0, 700, 450, 33] * 8, dim=128), torch.bfloat16),
    "one pass, head_dim 64": (Case([4096, 2000, 3000, 1025], dim=64), torch.bfloat16),
    "one pass, head_dim 128": (Case([2048, 1500, 0, 1999, 1025], dim=128), torch.float16),
    "a whale": (Case([16384, *[30] * 64], dim=64), torch.bfloat16),
    "candidates": (Case([8] * 64, [4096, *[100] * 63], heads=4, dim=64), torch.bfloat16),
    "float32": (Case([700, 64, 0, 900, 33], dim=64), torch.float32),
}


class _Neighbours:
    """Products and copies of changing sizes, in streams of their own."""

    def __init__(self) -> None:
        self.streams = [torch.cuda.Stream() for _ in range(3)]
        self.square = torch.randn(2048, 2048, device="cuda", dtype=torch.bfloat16)
        self.memory = torch.zeros(2**25, device="cuda")
        torch.cuda.synchronize()  # it is made in another stream than it is read in

    def begin(self, rng: random.Random) -> None:
        for stream in self.streams:
            size = 64 * rng.randint(1, 32)
            with torch.cuda.stream(stream):
                for _ in range(rng.randint(0, 4)):
                    torch.mm(self.square[:size], self.square)
                self.memory[: 2 ** rng.randint(10, 24)].clone()


@pytest.mark.parametrize("causal", [False, True], ids=["all", "causal"])
@pytest.mark.parametrize("name", CASES)
def test_a_hundred_runs_have_the_same_bits_on_a_busy_device(name: str, causal: bool) -> None:
    case, dtype = CASES[name]
    one_pass = paying_from(0, ONE_PASS_PAYS_FROM) if "one pass" in name else nullcontext()
    with one_pass:
        differ = _results_that_differ(case, dtype, {"causal": causal})
    assert differ == dict.fromkeys(RESULTS, 0), f"runs of {RUNS} that differ from the first"


def _results_that_differ(case: Case, dtype: torch.dtype, mask: dict[str, bool]) -> dict[str, int]:
    inputs = case.inputs(dtype)
    if case.k_lengths is None:
        inputs = inputs.with_shared_offsets()
    first = run("triton", inputs, tile=None, **mask)
    neighbours, rng = _Neighbours(), random.Random(0)
    differ: dict[str, int] = dict.fromkeys(RESULTS, 0)
    for _ in range(RUNS):
        neighbours.begin(rng)
        again = run("triton", inputs, tile=None, **mask)
        for result in RESULTS:
            differ[result] += not torch.equal(again[result], first[result])
    return differ
