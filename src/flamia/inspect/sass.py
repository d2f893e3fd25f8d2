"""Machine code as ``nvdisasm -c`` prints it: instructions, basic blocks, loops."""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass
from functools import cached_property

_LABEL = re.compile(r"(\.L\w+):")
# /*01a0*/  @!P0 OPCODE.MODIFIERS operands ;
_INSTRUCTION = re.compile(r"\s+/\*[0-9a-f]+\*/\s+(?:@(!?U?P\w+)\s+)?([A-Z][\w.]*)\s*(.*?)\s*;?\s*$")
_TARGET = re.compile(r"\.L\w+")
_BRANCHES = {"BRA", "BRX", "JMP", "JMX"}
_ENDS = {*_BRANCHES, "RET", "EXIT"}


@dataclass(frozen=True)
class Instruction:
    """guard: predicate such as "!P0", or "" for none. opcode: with modifiers, "MUFU.EX2". operands: as printed."""

    guard: str
    opcode: str
    operands: str

    @property
    def head(self) -> str:
        """The opcode without modifiers."""
        return self.opcode.partition(".")[0]


@dataclass(frozen=True)
class Loop:
    """A natural loop without the loops inside of it.

    Attributes:
        header: block that every turn passes, by number.
        always: instructions of the blocks that every turn executes, in order.
        sometimes: those of the blocks that a turn may skip.
    """

    header: int
    always: tuple[Instruction, ...]
    sometimes: tuple[Instruction, ...]

    @property
    def all(self) -> tuple[Instruction, ...]:
        """Both, ``always`` first."""
        return self.always + self.sometimes


class Code:
    """One kernel's instructions and control flow.

    Args:
        text: listing of one kernel by ``nvdisasm -c``.

    Raises:
        ValueError: the listing has no instructions, or a branch to a label that it lacks.
    """

    def __init__(self, text: str):
        self.instructions: list[Instruction] = []
        self._labels: dict[str, int] = {}
        for line in text.splitlines():
            label = _LABEL.match(line)
            found = _INSTRUCTION.match(line)
            if label:
                self._labels[label[1]] = len(self.instructions)
            elif found:
                self.instructions.append(Instruction(found[1] or "", found[2], found[3]))
        if not self.instructions:
            raise ValueError("text has no instructions: a listing of `nvdisasm -c` is expected")

    @cached_property
    def starts(self) -> list[int]:
        """First instruction of every basic block."""
        starts = {0, *self._labels.values()}
        starts |= {n + 1 for n, i in enumerate(self.instructions) if i.head in _ENDS}
        return sorted(s for s in starts if s < len(self.instructions))

    def block(self, n: int) -> list[Instruction]:
        """Instructions of block n."""
        end = self.starts[n + 1] if n + 1 < len(self.starts) else len(self.instructions)
        return self.instructions[self.starts[n] : end]

    @cached_property
    def successors(self) -> list[list[int]]:
        """Blocks that may follow each block."""
        number = {start: n for n, start in enumerate(self.starts)}
        out: list[list[int]] = []
        for n in range(len(self.starts)):
            last = self.block(n)[-1]
            after: list[int] = []
            # a BRA may also depend on what stands before its target: a predicate, or divergence (BRA.DIV)
            condition = last.operands.partition("`")[0].strip() if last.head == "BRA" else ""
            certain = not last.guard and not condition
            # an indirect branch (BRX) lists its targets
            for target in _TARGET.findall(last.operands) if last.head in _BRANCHES else ():
                if target not in self._labels:
                    raise ValueError(f"text branches to {target}, which it does not have")
                at = self._labels[target]
                after += [number[at]] if at in number else []
            if not (last.head in _ENDS and certain) and n + 1 < len(self.starts):
                after.append(n + 1)
            out.append(after)
        return out

    @cached_property
    def _predecessors(self) -> dict[int, list[int]]:
        before = defaultdict(list)
        for n, after in enumerate(self.successors):
            for m in after:
                before[m].append(n)
        return before

    @cached_property
    def _dominators(self) -> dict[int, set[int]]:
        """For each block that can be reached, the blocks that every path to it passes."""
        order, seen, stack = [], {0}, [(0, iter(self.successors[0]))]
        while stack:
            n, rest = stack[-1]
            following = next((m for m in rest if m not in seen), None)
            if following is None:
                order.append(n)
                stack.pop()
            else:
                seen.add(following)
                stack.append((following, iter(self.successors[following])))
        order.reverse()
        above = {n: set(order) for n in order}
        above[0] = {0}
        changed = True
        while changed:
            changed = False
            for n in order[1:]:
                new = set.intersection(*(above[p] for p in self._predecessors[n] if p in above)) | {n}
                changed |= new != above[n]
                above[n] = new
        return above

    @cached_property
    def loops(self) -> list[Loop]:
        """Natural loops in order of their headers, each without the blocks of loops inside of it."""
        above = self._dominators
        bodies: dict[int, set[int]] = {}
        latches: dict[int, set[int]] = defaultdict(set)
        for n in above:
            for header in self.successors[n]:
                if header in above[n]:
                    body, waiting = {header}, [n]
                    while waiting:
                        m = waiting.pop()
                        if m not in body:
                            body.add(m)
                            waiting += self._predecessors[m]
                    bodies[header] = bodies.get(header, set()) | body
                    latches[header].add(n)
        out = []
        for header in sorted(bodies):
            inner = [b for h, b in bodies.items() if h != header and b < bodies[header]]
            own = sorted(bodies[header].difference(*inner))
            every = set.intersection(*(above[n] for n in latches[header]))
            parts: tuple[list[Instruction], list[Instruction]] = ([], [])
            for n in own:
                parts[n not in every].extend(self.block(n))
            out.append(Loop(header, tuple(parts[0]), tuple(parts[1])))
        return out
