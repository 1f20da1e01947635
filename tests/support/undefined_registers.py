"""What a kernel reads of uniform registers that nobody has written.

ptxas of CUDA 12.8 hoists the descriptors of `wgmma` out of the loops of some kernels, or in front
of other products, before what they are made from is there. Results are wrong then, or addresses,
for some of a warp group's columns, with every batch and on every GPU. ptxas 13.0 makes them right.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from sass import INSTRUCTION

_LINE = re.compile(INSTRUCTION)
_REGISTER = re.compile(r"\bUR(\d+)\b")
# Beside those whose names begin with U, what writes uniform registers.
_WRITES = ("U", "R2UR", "S2UR", "REDUX", "LDCU", "VOTEU")
_MOVES = ("UMOV", "MOV", "IMAD.U32", "IMAD.MOV")  # a product of zeros and a sum with one is a move
_FLOATS = re.compile(r"[FH](ADD|MUL|FMA|SET|MNMX|SEL|2F)|MUFU")
_GENERAL = re.compile(r"(?<![U\w])R(\d+)\b")
_RESULT = re.compile(r"(?:U?P[T\d]+, *)?R(\d+)\b")  # a shuffle's comes after a predicate
_WRITES_NO_GENERAL = ("ST", "RED", "ATOMS", "BAR", "BRA", "WARP", "R2P", "R2UR")
# Of integers; what others make of a number that is not there is their business, see below.
_HANDS_ON = ("IADD", "IMAD", "VIADD", "LOP3", "SHF.", "SGXT", "LEA", "MOV", "SEL", "PRMT")


def undefined_registers(sass: str) -> list[str]:
    """Instructions of a kernel, as nvdisasm prints it, that read a uniform register before any
    instruction above them has written it: "address: instruction", in order. One that is made from
    a general register counts as not written where that one is not, or made from such.

    ptxas also moves what is not there yet, half of a pair whose other half is, and writes it before
    it is used; and LLVM leaves the second of two numbers undefined where a thread has one. So a
    move hands on that nobody has written, and what computes on floats is passed over.
    """
    written: set[int] = set()
    general: set[int] = set()
    found = []
    for address, operation, operands in _LINE.findall(sass):
        first, *others = operands.split(",")
        writes = operation.startswith(_WRITES) and first.strip().startswith("UR")
        read = list(_read(operation, others if writes else [first, *others]))
        defined = written.issuperset(read)
        moves = operation.startswith(_MOVES) and operands.count("RZ") == len(others) - 1
        if not defined and not moves and not _FLOATS.match(operation):
            found.append(f"{address}: {operation} {operands}")
        results, sources = _general(operation, operands)
        given = general.issuperset(sources)
        if (given and defined) or not operation.startswith(_HANDS_ON):
            general.update(results)
        else:
            general.difference_update(results)
        if writes:
            registers = _registers(first, ".64" in operation or ".WIDE" in operation)
            moved = moves or operation.startswith("R2UR")
            if (defined and given) or not moved:
                written.update(registers)
            else:
                written.difference_update(registers)
    return found


def _general(operation: str, operands: str) -> tuple[range, list[int]]:
    """The general registers that an instruction writes, and those that it names as read."""
    found = None if operation.startswith(_WRITES_NO_GENERAL) else _RESULT.match(operands.strip())
    sources = operands.strip()[found.end() :] if found else operands
    read = [int(number) for number in _GENERAL.findall(sources)]
    if found is None:
        return range(0), read
    count = 1
    if product := re.match(r"[HQ]GMMA\.64x(\d+)", operation):
        count = int(product.group(1)) // 2
    elif ".128" in operation or operation.startswith(("LDSM", "HMMA")):
        count = 4
    elif ".64" in operation or ".WIDE" in operation or operation.startswith(("CS2R", "D")):
        count = 2
    first = int(found.group(1))
    return range(first, first + count), read


def _read(operation: str, operands: Sequence[str]) -> Iterator[int]:
    for operand in operands:
        if "gdesc" in operand:  # of A and of B; that of an A in registers is none
            yield from (number + 2 for number in _registers(operand, True))
        else:
            yield from _registers(operand, "desc[" in operand or operation == "UIADD3.64")


def _registers(operand: str, pair: bool) -> list[int]:
    found = _REGISTER.search(operand)
    if found is None:
        return []
    number = int(found.group(1))
    return [number, number + 1] if pair else [number]
