"""Registers that belong to an asynchronous product: found before the kernel runs.

``wgmma.mma_async`` owns its accumulators and its A registers until a ``wgmma.wait_group`` that covers its group (PTX
ISA 9.7.15.7). On a chip an earlier access gives whatever is there. A forward data flow over the blocks finds every
such access on any path. Registers that ``tcgen05.ld`` fills are found in the same way, and told apart: shipped kernels
use them without ``tcgen05.wait::ld``, since the machine code tracks them.
"""

from __future__ import annotations

from .errors import AsyncRace
from .flow import Block, destinations, registers, sources
from .ptx import Instr, Vec

#: age of a product that is not committed yet; committed ones count the groups committed after them
_OPEN = -1
_OLDEST = 8


def _following(block: Block, labels: dict[str, int], count: int) -> list[int]:
    last = block.instrs[-1]
    out = []
    if last.parts[0] == "bra":
        out.append(labels[last.operands[0].name])
    if not (last.parts[0] in ("bra", "ret", "exit", "trap") and last.guard is None):
        out.append(block.index + 1)
    return [n for n in out if n < count]


def _step(state: dict, instr: Instr, complain: bool) -> dict:
    """State after an instruction: (kind, register) → age."""
    head, action = instr.parts[0], instr.parts[1] if len(instr.parts) > 1 else ""
    if head == "wgmma" and action == "commit_group":
        return {k: min(v + 1, _OLDEST) for k, v in state.items()}
    if head == "wgmma" and action == "wait_group":
        keep = instr.operands[0].value
        return {k: v for k, v in state.items() if v < keep}
    product = head == "wgmma" and action == "mma_async"
    written = [r.name for r in destinations(instr)]
    if complain:
        own = set(written) if product else set()
        for reg in sources(instr):
            if ("sum", reg.name) in state and reg.name not in own:
                raise AsyncRace(
                    f"register {reg.name} is read while a wgmma product that writes it is in flight",
                    line=instr.line, text=instr.text[:200],
                )  # fmt: skip
        if not product:
            for name in written:
                for kind in ("sum", "operand"):
                    if (kind, name) in state:
                        raise AsyncRace(
                            f"register {name} is written while a wgmma product in flight uses it",
                            line=instr.line, text=instr.text[:200],
                        )  # fmt: skip
    if product:
        state = dict(state)
        for name in written:
            state["sum", name] = _OPEN
        if isinstance(instr.operands[1], Vec):
            for reg in registers(instr.operands[1]):
                state["operand", reg.name] = _OPEN
    return state


def _entries(blocks: list[Block], labels: dict[str, int], step) -> dict[int, dict]:
    """State at the start of every block that can be reached."""
    entry: dict[int, dict] = {0: {}}
    work = [0]
    while work:
        n = work.pop()
        state = entry[n]
        for instr in blocks[n].instrs:
            state = step(state, instr)
        for m in _following(blocks[n], labels, len(blocks)):
            known = entry.get(m)
            # the younger age is the more pending one; a register in flight on one path is in flight
            joined = dict(known or {})
            for key, age in state.items():
                joined[key] = min(age, joined.get(key, age))
            if known is None or joined != known:
                entry[m] = joined
                work.append(m)
    return entry


def check_registers(blocks: list[Block], labels: dict[str, int]) -> None:
    """Raise AsyncRace at the first access to a register that a product in flight still owns."""
    if not any(i.parts[0] == "wgmma" for b in blocks for i in b.instrs):
        return
    entry = _entries(blocks, labels, lambda state, instr: _step(state, instr, False))
    for n in sorted(entry):
        state = entry[n]
        for instr in blocks[n].instrs:
            state = _step(state, instr, True)


def _load_step(state: dict, instr: Instr) -> dict:
    """State after an instruction: register → 0 for those that a ``tcgen05.ld`` fills."""
    head = instr.parts[:2]
    if head == ("tcgen05", "wait::ld"):
        return {}
    if head == ("tcgen05", "ld"):
        return state | dict.fromkeys((r.name for r in destinations(instr)), 0)
    return state


def unwaited_loads(blocks: list[Block], labels: dict[str, int]) -> list[tuple[Instr, str]]:
    """(instruction, register) of every access to a register that a ``tcgen05.ld`` fills, with no ``tcgen05.wait::ld``
    in between (PTX ISA 9.7.16.8.4), in text order; one register per instruction."""
    if not any(i.parts[:2] == ("tcgen05", "ld") for b in blocks for i in b.instrs):
        return []
    entry = _entries(blocks, labels, _load_step)
    found = []
    for n in sorted(entry):
        state = entry[n]
        for instr in blocks[n].instrs:
            if state:
                early = next((r.name for r in sources(instr) + destinations(instr) if r.name in state), None)
                if early is not None:
                    found.append((instr, early))
            state = _load_step(state, instr)
    return found
