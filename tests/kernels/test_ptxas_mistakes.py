"""Compiled kernels are looked through for what ptxas gets wrong."""

from __future__ import annotations

import json
from pathlib import Path

import ptxas_mistakes
import pytest
from overwritten_operands import overwritten_operands
from processes import run_python
from ptxas_mistakes import main

# In a process of its own: dK and dV over lists at head_dim 64, which hold K and V in registers,
# compiled for an H100, without one; and as they were, with softmax's first block in the loop.
COMPILE = """
import json
import sys

sys.path.append(sys.argv[1])

from hopper_compile import always, compile_kernel, gluon_dkv
from overwritten_operands import overwritten_operands
from ptxas_mistakes import disassembled


def found(policy):
    sass = disassembled(compile_kernel("dkv", 64, policy, listed=64))
    assert sass.count("HGMMA") > 10
    return overwritten_operands(sass)


if sys.argv[2] == "as it was":
    gluon_dkv._first_in_loop = always
print(json.dumps([found(""), found("silu")]))
"""

PRODUCT = "HGMMA.64x64x16.F32.BF16 R56, R168, gdesc[UR20], RZ, !UPT"
LOAD, PACK = "LDSM.16.M88.4 R168, [R200+0x12000]", "F2FP.BF16.F32.PACK_AB R169, R0, R17"
LOOP, AGAIN = ".L_x_3:", "@P0 BRA `(.L_x_3)"


def _said(lines: list[str]) -> list[str]:
    """Addresses of what is found in a label or an instruction a line."""
    text = [
        line if line.startswith(".") else f"        /*{16 * i:04x}*/   {line} ;"
        for i, line in enumerate(lines)
    ]
    return [one.partition(":")[0] for one in overwritten_operands("\n".join(text))]


def test_what_is_held_over_a_loop_and_overwritten_there():
    assert _said([LOAD, LOOP, PRODUCT, PACK, AGAIN]) == ["0020"]
    assert _said([LOAD, LOOP, PRODUCT, PRODUCT, PACK, AGAIN]) == ["0020", "0030"]


@pytest.mark.parametrize(
    "lines",
    [
        [LOAD, LOOP, PRODUCT, AGAIN, PACK],
        [LOAD, LOOP, PACK, PRODUCT, AGAIN],
        [LOAD, LOOP, PRODUCT, LOAD, AGAIN],
        [PACK, LOOP, PRODUCT, PACK, AGAIN],
        [LOAD, LOOP, PACK, AGAIN, PRODUCT],
        [LOAD, PRODUCT, PACK],
        [LOAD, LOOP, PRODUCT, "F2FP.BF16.F32.PACK_AB R172, R0, R17", AGAIN],
        [LOAD, LOOP, PRODUCT, "STS.128 [R168], R4", "R2UR UR4, R168", AGAIN],
    ],
    ids=["behind the loop", "in front of it", "loaded again", "computed twice", "after all",
         "no loop", "other registers", "read"],
)  # fmt: skip
def test_what_is_right(lines):
    assert _said(lines) == []


def test_as_wide_as_it_is():
    for written in ("IMAD.WIDE R168, R2, 0x4, R4", "LDS.128 R168, [R2]", "CS2R R170, SRZ"):
        assert _said([LOAD, LOOP, PRODUCT, written, AGAIN]) == ["0020"]


@pytest.mark.parametrize("kind", ["as it is", "as it was"])
def test_what_stays_in_registers_over_lists(kind, tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    ran = run_python(COMPILE, str(Path(ptxas_mistakes.__file__).parent), kind)
    assert ran.returncode == 0, ran.stderr
    softmax, silu = json.loads(ran.stdout)
    assert bool(softmax) == (kind == "as it was")
    assert silu == []


def test_a_folder_without_kernels(tmp_path, capsys):
    with pytest.raises(SystemExit):
        main([str(tmp_path)])
    assert "there is no cubin" in capsys.readouterr().err


def test_cubins_of_a_folder(tmp_path, capsys, monkeypatch):
    for name in ("good", "bad"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "kernel.cubin").write_bytes(name.encode())
    lines = {b"good": " /*0000*/ EXIT ;", b"bad": " /*0010*/ UIADD3 UR4, UR5, 0x1, URZ ;"}
    monkeypatch.setattr(ptxas_mistakes, "disassembled", lines.__getitem__)
    assert main([str(tmp_path)]) == 1
    said = capsys.readouterr().out.splitlines()
    assert said == [
        f"{tmp_path / 'bad' / 'kernel.cubin'}: read, not written: 0010: UIADD3 UR4, UR5, 0x1, URZ",
        "2 kernels, 1 with a mistake",
    ]
    (tmp_path / "bad" / "kernel.cubin").unlink()
    assert main([str(tmp_path)]) == 0
