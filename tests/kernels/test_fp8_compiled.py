"""The kernels for FP8 compiled for Hopper, without one, and looked through."""

from __future__ import annotations

import json
from pathlib import Path

import fp8_compile
import pytest
from fp8_compile import written_in_flight
from processes import run_python

COMPILE = "import sys; sys.path.append(sys.argv[1]); import fp8_compile; fp8_compile.main()"
PRODUCT = "QGMMA.64x128x32.F32.E4M3.E4M3 R24, R152, gdesc[UR12], RZ, !UPT"
WAIT = "WARPGROUP.DEPBAR.LE gsb0, 0x0"


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """What `fp8_compile.facts` says of each forward."""
    support = str(Path(fp8_compile.__file__).parent)
    cache = str(tmp_path_factory.mktemp("triton"))
    result = run_python(COMPILE, support, TRITON_CACHE_DIR=cache)
    assert result.returncode == 0, result.stderr[-2000:]
    return json.loads(result.stdout)


def test_both_products_are_of_fp8(compiled):
    """Of each consumer, and of a first block and of the others in their loop."""
    for name, facts in compiled.items():
        dim, consumers = (64, 1) if name.startswith("64") else (128, 2)
        # Instructions of 32 numbers to add up: of head_dim, and of 128 keys.
        assert facts["QGMMA"] == consumers * 2 * (dim // 32 + 128 // 32), name
        assert facts["HGMMA"] == 0, name


def test_weights_stay_in_their_registers(compiled):
    """What is exchanged between threads are the largest scores and the sums of rows, and tiles that
    are counted; results go through shared memory to be stored, and nothing is spilled."""
    for name, facts in compiled.items():
        consumers = 1 if name.startswith("64") else 2
        assert facts["SHFL"] <= consumers * 2 * 8 + 1, name
        assert facts["STS"] <= 20, name
        assert facts["LDS"] <= 3, name
        assert (facts["STL"], facts["LDL"]) == (0, 0), name


def test_products_run_beside_the_softmax(compiled):
    """ptxas waits for each of them where it cannot follow who has their registers."""
    for name, facts in compiled.items():
        consumers = 1 if name.startswith("64") else 2
        assert facts["waits"] <= consumers * 8, name


@pytest.mark.parametrize("mistake", ["undefined", "overwritten", "in flight"])
def test_what_ptxas_gets_wrong(compiled, mistake):
    assert {name: facts[mistake] for name, facts in compiled.items() if facts[mistake]} == {}


@pytest.mark.parametrize(
    ("lines", "found"),
    [
        ([PRODUCT, "FADD R155, R1, R2", WAIT], ["0010"]),
        ([PRODUCT, WAIT, "FADD R155, R1, R2"], []),
        ([PRODUCT, "FADD R156, R1, R2", "STG.E [R152], R155", WAIT], []),
    ],
    ids=["written", "afterwards", "others"],
)
def test_what_is_written_in_flight(lines, found):
    sass = "\n".join(f"        /*{16 * i:04x}*/   {line} ;" for i, line in enumerate(lines))
    assert [one.partition(":")[0] for one in written_in_flight(sass)] == found
