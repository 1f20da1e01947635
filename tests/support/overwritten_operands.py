"""What a kernel's products read of registers that hold something else by then.

Of a tensor that stays in registers over a loop, ptxas of CUDA 12.8 gives the registers away in the
loop (to the weights of a block, those of V) although the next turn's product reads them again: dK
of softmax over lists of blocks came out wrong so, at head_dim 64, with every batch.
"""

from __future__ import annotations

import re

from sass import INSTRUCTION

_LABEL = r"^\.(?P<label>L\w+):"
_LINE = re.compile(f"{_LABEL}|{INSTRUCTION}", re.MULTILINE)
_TARGET = re.compile(r"`\(\.(L\w+)\)")
_PRODUCT = re.compile(r"R\d+, R(\d+), gdesc")
_RESULT = re.compile(r"R(\d+)")
# Of half precision, and of FP8.
_PRODUCTS = ("HGMMA", "QGMMA")
# Not one of registers: it goes to memory, decides something, or waits.
_WRITES_NONE = (
    "ST", "RED", "UTMA", "SYNCS", "BAR", "BRA", "WARP", "ISETP", "FSETP", "PLOP", "R2P", "R2UR",
    "MEMBAR", "FENCE", *_PRODUCTS,
)  # fmt: skip


def overwritten_operands(sass: str) -> list[str]:
    """Products of a kernel, as nvdisasm prints it, in a loop in which their left factor's registers
    are written by another instruction than a load, but in front of the loop by one: "address:
    instruction", in order."""
    labels: dict[str, int] = {}
    lines: list[tuple[str, str, str]] = []
    for line in _LINE.finditer(sass):
        if line["label"]:
            labels[line["label"]] = len(lines)
        else:
            lines.append((line["address"], line["operation"], line["operands"] or ""))
    loops = [
        (labels[target[1]], last)
        for last, (_, operation, operands) in enumerate(lines)
        if operation == "BRA" and (target := _TARGET.search(operands))
        if labels.get(target[1], last + 1) <= last
    ]
    writers = _writers(lines)
    found = []
    for place, (address, operation, operands) in enumerate(lines):
        product = _PRODUCT.match(operands) if operation.startswith(_PRODUCTS) else None
        if product is None:
            continue
        first = int(product[1])
        if any(
            _given_away(writers.get(register, []), lines, place, loop)
            for register in range(first, first + 4)
            for loop in loops
        ):
            found.append(f"{address}: {operation} {operands}")
    return found


def _writers(lines: list[tuple[str, str, str]]) -> dict[int, list[int]]:
    """Which lines write a register, in order."""
    found: dict[int, list[int]] = {}
    for place, (_, operation, operands) in enumerate(lines):
        result = _RESULT.match(operands)
        if result is None or operation.startswith(_WRITES_NONE):
            continue
        first = int(result[1])
        for register in range(first, first + _width(operation)):
            found.setdefault(register, []).append(place)
    return found


def _width(operation: str) -> int:
    if ".128" in operation or (operation.startswith("LDSM") and operation.endswith(".4")):
        return 4
    return 2 if ".64" in operation or ".WIDE" in operation or operation == "CS2R" else 1


def _given_away(
    writers: list[int], lines: list[tuple[str, str, str]], place: int, loop: tuple[int, int]
) -> bool:
    start, last = loop
    inside = [one for one in writers if start <= one <= last]
    before = [one for one in writers if one < start]
    if not start <= place <= last or not inside or not before or inside[0] < place:
        return False
    return _loads(lines[before[-1]]) and not _loads(lines[inside[-1]])


def _loads(line: tuple[str, str, str]) -> bool:
    return line[1].startswith("LDSM")
