"""Warp instructions sorted by the unit that executes them, and the bytes and products they stand for."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable

from flamia.inspect.sass import Instruction

_MUFU_ALIKE = {"I2F", "F2I", "FRND", "I2I"}
_FMA = {"FFMA", "FMUL", "FADD", "IMAD", "HFMA2", "HADD2", "HMUL2", "FFMA32I", "FSWZADD"}
_FMA_PAIR = {"FFMA2", "FMUL2", "FADD2"}
_ALU = {
    "FMNMX", "FMNMX3", "FSEL", "FSETP", "FSET", "SEL", "ISETP", "LOP3", "LOP", "SHF", "SHL", "SHR", "IADD", "IADD3",
    "VIADD", "VIADDMNMX", "VIMNMX", "VIMNMX3", "IABS", "LEA", "PRMT", "MOV", "R2P", "P2R", "PLOP3", "BMSK", "SGXT",
    "HMNMX2", "HSETP2", "HSET2", "FCHK", "POPC", "IMNMX", "VHMNMX",
}  # fmt: skip
_CONVERSION = {"F2FP", "F2F"}
_WIDTH = re.compile(r"\.[US]?(8|16|32|64|128)\b")
_HOPPER = re.compile(r"\.64x(\d+)x(\d+)\b")
#: bits of the types that F2FP packs to, 16 for the others
_PACKED = {"E2M1": 4, "E2M3": 6, "E3M2": 6, "E4M3": 8, "E5M2": 8}
#: depth of one product by opcode; bits of an element of its operands
_BLACKWELL = {"UTCHMMA": (16, 16), "UTCQMMA": (32, 8), "UTCOMMA": (64, 4)}
_HOPPER_BITS = {"HGMMA": 16, "QGMMA": 8}

UNITS = ("exponentials", "mufu", "fma", "alu", "conversion")


def count(instructions: Iterable[Instruction]) -> Counter[str]:
    """What one warp executes.

    Returns:
        warp instructions by unit (``UNITS``; pairs count twice) and all together (``issue``); ``emulated``: the
        exponentials whose rounding step is on the FMA pipe; ``shared_bytes`` and ``local_bytes`` that the warp's own
        loads and stores move; ``columns``: tensor-memory columns loaded.
    """
    out: Counter[str] = Counter()
    for i in instructions:
        out["issue"] += 1
        head = i.head
        if head == "MUFU":
            out["exponentials" if ".EX2" in i.opcode else "mufu"] += 1
        elif head in _MUFU_ALIKE:
            out["mufu"] += 1
        elif head in _FMA_PAIR:
            out["fma"] += 2
        elif head in _FMA:
            out["fma"] += 1
        elif head in _ALU:
            out["alu"] += 1
        elif head in _CONVERSION:
            out["conversion"] += 1
        elif head in ("LDS", "STS", "ATOMS"):
            out["shared_bytes"] += 32 * _bits(i.opcode) // 8
        elif head in ("LDSM", "STSM"):
            # 8×8 matrices of 16 bits
            tail = i.opcode.rpartition(".")[2]
            out["shared_bytes"] += 128 * (int(tail) if tail.isdigit() else 1)
        elif head in ("LDL", "STL"):
            out["local_bytes"] += 32 * _bits(i.opcode) // 8
        elif head == "LDTM":
            out["columns"] += _columns(i.opcode)
        if head in ("FADD", "FADD2") and ".RM" in i.opcode:
            out["emulated"] += 1 + (head == "FADD2")
    return out


def packed(instructions: Iterable[Instruction]) -> int:
    """Elements per thread converted from FP32 to the narrowest type that these instructions convert to.

    That type is what operands of products are made of; a wider one beside it is a result on its way out.
    """
    out: Counter[int] = Counter()
    for i in instructions:
        if i.head == "F2FP" and "PACK_AB" in i.opcode and ".F32" in i.opcode:
            out[next((bits for name, bits in _PACKED.items() if f".{name}." in i.opcode), 16)] += 2
    return out[min(out)] if out else 0


def _bits(opcode: str) -> int:
    found = _WIDTH.search(opcode)
    return int(found[1]) if found else 32


def _columns(opcode: str) -> int:
    found = re.search(r"\.x(\d+)", opcode)
    return int(found[1]) if found else 1


def products(instructions: Iterable[Instruction]) -> Counter[tuple[int, int]]:
    """(bits of an element, multiply-adds of one instruction) → tensor-core instructions.

    A Hopper instruction says its shape. A Blackwell one has N in a run-time descriptor: it is taken as 128 rows of the
    SM by 128 columns, what attention at head dimension 128 issues.
    """
    out: Counter[tuple[int, int]] = Counter()
    for i in instructions:
        if i.head in _BLACKWELL:
            depth, bits = _BLACKWELL[i.head]
            out[bits, 128 * 128 * depth] += 1
        elif i.head in _HOPPER_BITS:
            shape = _HOPPER.search(i.opcode)
            if shape:
                out[_HOPPER_BITS[i.head], 64 * int(shape[1]) * int(shape[2])] += 1
    return out


def operand_bytes(instructions: Iterable[Instruction]) -> int:
    """Shared-memory bytes that the tensor core reads, by one SM, for these instructions.

    Both operands of a product come from shared memory unless the first is in registers or tensor memory. Every operand
    row is 32 bytes deep per instruction. A pair of CTAs splits the second operand.
    """
    total = 0
    for i in instructions:
        if i.head in _BLACKWELL:
            total += 4096 * i.operands.startswith("gdesc") + (2048 if "2CTA" in i.opcode else 4096)
        elif i.head in _HOPPER_BITS:
            shape = _HOPPER.search(i.opcode)
            if shape:
                # D, then gdesc for both operands, or a register for the first and gdesc for the second
                both = i.operands.split(", ")[1].startswith("gdesc")
                total += 32 * int(shape[1]) + 2048 * both
    return total
