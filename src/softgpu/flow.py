"""Basic blocks of a kernel, and which registers live inside of a single block.

A block is the unit of translation. It ends at a branch, after an arrival, before a branch target, and before an
instruction that may have to wait (so that a warp that waits can simply run its block again).
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

from .ptx import Instr, Kernel, Mem, Not, Pair, Reg, Vec

#: Opcodes that may suspend the warp; each starts a block of its own.
_WAITING = (
    ("mbarrier", "try_wait"), ("mbarrier", "test_wait"), ("barrier", "cluster", "wait"), ("bar", "sync"),
    ("barrier", "sync"), ("barrier", "cta", "sync"), ("bar", "red"), ("barrier", "red"),
    ("barrier", "cta", "red"), ("bar", "warp", "sync"), ("tcgen05", "alloc"), ("nanosleep",),
)  # fmt: skip

#: Opcodes whose lanes of a warp must arrive together (``sync`` with a member mask, or ``.aligned``).
_WARP_SYNC = ("shfl", "vote", "elect", "match", "redux", "ldmatrix", "stmatrix", "activemask", "mma")


def waits(instr: Instr) -> bool:
    """True when the instruction may suspend its warp."""
    if instr.parts[:2] == ("barrier", "cluster"):
        return "wait" in instr.parts
    return any(instr.parts[: len(w)] == w for w in _WAITING)


def convergence(instr: Instr) -> int:
    """Lanes that must arrive together: 0 none, 1 a warp, 4 a warpgroup (PTX ISA 9.7.15, wgmma)."""
    if instr.parts[0] == "wgmma":
        return 4
    if instr.parts[0] in _WARP_SYNC or (instr.parts[0] == "tcgen05" and "sync" in instr.parts):
        return 1
    return 0


@dataclass
class Block:
    """Instructions [start, end) of the kernel; ``together`` as in ``convergence``, the largest of the block."""

    index: int
    start: int
    end: int
    together: int = 0
    instrs: list[Instr] = field(default_factory=list)


def registers(operand: object) -> list[Reg]:
    """Every register named in an operand, an address base and coordinates included."""
    if isinstance(operand, Reg):
        return [operand]
    if isinstance(operand, Not):
        return [operand.reg] if isinstance(operand.reg, Reg) else []
    if isinstance(operand, Vec):
        return [r for x in operand.items for r in registers(x)]
    if isinstance(operand, Pair):
        return registers(operand.first) + registers(operand.second)
    if isinstance(operand, Mem):
        return registers(operand.base) + [r for x in operand.coords for r in registers(x)]
    return []


_NO_DESTINATION = frozenset(
    [
        "st",
        "bra",
        "ret",
        "exit",
        "bar",
        "barrier",
        "fence",
        "membar",
        "red",
        "cp",
        "prefetch",
        "prefetchu",
        "griddepcontrol",
        "setmaxnreg",
        "nanosleep",
        "trap",
        "brkpt",
        "stmatrix",
        "applypriority",
        "discard",
        "stackrestore",
        "pmevent",
    ]
)


def destinations(instr: Instr) -> list[Reg]:
    """Registers an instruction writes."""
    head, ops = instr.parts[0], instr.operands
    if head == "wgmma":
        return registers(ops[0]) if instr.parts[1] == "mma_async" else []
    if head == "mbarrier":
        return registers(ops[0]) if ops and not isinstance(ops[0], Mem) else []
    if head == "tcgen05":
        return [r for o in ops if not isinstance(o, Mem) for r in registers(o)] if instr.parts[1] == "ld" else []
    if head == "clusterlaunchcontrol":
        return registers(ops[0]) if "query_cancel" in instr.parts else []
    if (head == "bar" and "red" in instr.parts) or (head == "barrier" and "red" in instr.parts):
        return registers(ops[0])
    if head in _NO_DESTINATION or not ops:
        return []
    if head == "setp" and len(ops) > 1 and isinstance(ops[0], Pair):
        return registers(ops[0])
    return registers(ops[0]) if not isinstance(ops[0], Mem) else []


def sources(instr: Instr) -> list[Reg]:
    """Registers an instruction reads, its guard included."""
    out = [instr.guard[0]] if instr.guard else []
    written = destinations(instr)
    head = instr.parts[0]
    for n, operand in enumerate(instr.operands):
        first = n == 0 or (head == "tcgen05" and instr.parts[1] == "ld" and not isinstance(operand, Mem))
        if first and written and not isinstance(operand, Mem):
            continue
        out += registers(operand)
    if head == "wgmma" and instr.parts[1] == "mma_async":
        out += written
    return out


def split(kernel: Kernel) -> tuple[list[Block], dict[str, int]]:
    """Blocks in text order, and label → block index."""
    starts = {0}
    for n, instr in enumerate(kernel.instrs):
        if instr.parts[0] in ("bra", "ret", "exit", "trap"):
            starts.add(n + 1)
        elif waits(instr):
            starts.add(n)
        elif "arrive" in instr.parts:
            # a place where others may go first, so that shuffled orders can part an arrival from what follows
            starts.add(n + 1)
    targets = {i.operands[0].name for i in kernel.instrs if i.parts[0] == "bra"}
    starts.update(kernel.labels[name] for name in targets)
    edges = [*sorted(s for s in starts if s < len(kernel.instrs)), len(kernel.instrs)]
    blocks = []
    at = {}
    for n, (a, b) in enumerate(itertools.pairwise(edges)):
        body = kernel.instrs[a:b]
        blocks.append(Block(n, a, b, max(map(convergence, body), default=0), body))
        at[a] = n
    labels = {name: at.get(kernel.labels[name], len(blocks)) for name in targets}
    return blocks, labels


def block_local(blocks: list[Block]) -> set[str]:
    """Names of registers that one block defines, without a guard, before it reads them, and no other block uses.

    Results of asynchronous instructions (wgmma) are excluded: they are written later.
    """
    home: dict[str, int] = {}
    spoilt: set[str] = set()
    for block in blocks:
        for instr in block.instrs:
            for reg in sources(instr):
                if home.get(reg.name) != block.index:
                    spoilt.add(reg.name)
            for reg in destinations(instr):
                if instr.parts[0] == "wgmma":
                    spoilt.add(reg.name)
                elif reg.name not in home and instr.guard is None:
                    home[reg.name] = block.index
                elif home.get(reg.name) != block.index:
                    spoilt.add(reg.name)
            if instr.parts[0] == "wgmma":
                # operands of an asynchronous product must stay where the product can find them
                spoilt.update(r.name for o in instr.operands for r in registers(o) if r.bits == 32)
    return set(home) - spoilt
