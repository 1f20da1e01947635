"""Compiled kernels in which ptxas has made one of the mistakes that it is known for here.

    python tests/support/ptxas_mistakes.py [FOLDER]

`undefined_registers` and `overwritten_operands` say which. All cubins in FOLDER are looked through,
by default those in Triton's cache: after the tests ran on a GPU, every kernel that they have
compiled.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import triton
from overwritten_operands import overwritten_operands
from triton import knobs
from undefined_registers import undefined_registers

_DISASSEMBLER = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "nvdisasm"


def mistakes(sass: str) -> list[str]:
    """What of a kernel's instructions is wrong, "what: address: instruction"."""
    return [
        *(f"read, not written: {one}" for one in undefined_registers(sass)),
        *(f"held, overwritten: {one}" for one in overwritten_operands(sass)),
    ]


def disassembled(cubin: bytes) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(_DISASSEMBLER), "-c", file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path, nargs="?", default=Path(knobs.cache.dir))
    folder = parser.parse_args(arguments).folder
    cubins = sorted(folder.rglob("*.cubin"))
    if not cubins:
        parser.error(f"{folder}: there is no cubin")
    bad = 0
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        texts = pool.map(lambda path: disassembled(path.read_bytes()), cubins)
        for path, sass in zip(cubins, texts, strict=True):
            if found := mistakes(sass):
                bad += 1
                print(f"{path}: {found[0]}")
    print(f"{len(cubins)} kernels, {bad} with a mistake")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
