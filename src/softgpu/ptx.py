"""PTX text to a small typed form.

The grammar is that of NVIDIA's PTX ISA document, section 4 (syntax) and 5 (state spaces and types), as far as
compilers emit it: one module with entry functions, register declarations, labels, predicated instructions, and
brace-enclosed blocks, which give inline assembly its own register and label scope.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from .errors import PTXSyntaxError, UnsupportedInstruction

#: Bits of every fundamental type (PTX ISA 5.2.1); predicates count as 1.
TYPE_BITS = {
    "pred": 1, "b8": 8, "u8": 8, "s8": 8, "b16": 16, "u16": 16, "s16": 16, "f16": 16, "bf16": 16,
    "b32": 32, "u32": 32, "s32": 32, "f32": 32, "f16x2": 32, "bf16x2": 32,
    "b64": 64, "u64": 64, "s64": 64, "f64": 64, "f32x2": 64, "b128": 128,
}  # fmt: skip


@dataclass(frozen=True)
class Reg:
    """A register; ``name`` is unique in its kernel, ``bits`` is 1 for predicates."""

    name: str
    bits: int


@dataclass(frozen=True)
class Imm:
    """An integer immediate, or the raw bits of a float one (``0f…``/``0d…``, ``is_float``)."""

    value: int
    is_float: bool = False


@dataclass(frozen=True)
class Sym:
    """A variable or label name."""

    name: str


@dataclass(frozen=True)
class Special:
    """A special register such as ``%tid.x`` (PTX ISA 10)."""

    name: str


@dataclass(frozen=True)
class Mem:
    """``[base + offset]`` in bytes, or ``[base, {coordinates}]`` for tensor copies."""

    base: Reg | Imm | Sym
    offset: int = 0
    coords: tuple = ()


@dataclass(frozen=True)
class Vec:
    """``{a, b, …}``."""

    items: tuple


@dataclass(frozen=True)
class Pair:
    """``d|p``: two destinations."""

    first: object
    second: object


@dataclass(frozen=True)
class Not:
    """``!p``."""

    reg: Reg


@dataclass(frozen=True)
class Sink:
    """``_``."""


@dataclass
class Instr:
    """One instruction: the full opcode, split at dots, its guard and operands, and where it stands."""

    op: str
    parts: tuple[str, ...]
    guard: tuple[Reg, bool] | None
    operands: list
    line: int
    text: str


@dataclass(frozen=True)
class Param:
    """A kernel parameter: bytes and alignment; ``offset`` is its place in the parameter buffer."""

    name: str
    size: int
    align: int
    offset: int


@dataclass(frozen=True)
class Variable:
    """A shared-memory variable; size 0 is the dynamic one (``.extern``)."""

    name: str
    size: int
    align: int


@dataclass
class Kernel:
    """An entry function: parameters, instructions, label → index of the instruction after it, variables."""

    name: str
    params: dict[str, Param]
    instrs: list[Instr] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)
    regs: dict[str, Reg] = field(default_factory=dict)
    shared: dict[str, Variable] = field(default_factory=dict)
    reqntid: tuple[int, int, int] | None = None
    reqnctapercluster: tuple[int, int, int] | None = None

    @property
    def param_bytes(self) -> int:
        return max((p.offset + p.size for p in self.params.values()), default=0)


@dataclass
class Module:
    """A PTX file: version such as ``9.4``, target such as ``sm_90a``, kernels by name."""

    version: str
    target: str
    kernels: dict[str, Kernel]


_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.S)
_LABEL = re.compile(r"\s*([A-Za-z_$%][\w$]*)\s*:(?!:)")
_SPECIAL = re.compile(r"%(tid|ntid|ctaid|nctaid|cluster_ctaid|cluster_nctaid|clusterid|nclusterid)\.[xyz]$")
_SPECIAL_PLAIN = frozenset(
    [
        "%laneid",
        "%warpid",
        "%nwarpid",
        "%smid",
        "%nsmid",
        "%gridid",
        "%cluster_ctarank",
        "%cluster_nctarank",
        "%is_explicit_cluster",
        "%lanemask_eq",
        "%lanemask_le",
        "%lanemask_lt",
        "%lanemask_ge",
        "%lanemask_gt",
        "%clock",
        "%clock64",
        "%globaltimer",
        "%globaltimer_lo",
        "%dynamic_smem_size",
        "%total_smem_size",
        "%aggr_smem_size",
    ]
)
_IGNORED = frozenset(
    [
        ".version",
        ".target",
        ".address_size",
        ".loc",
        ".file",
        ".section",
        ".pragma",
        ".maxntid",
        ".minnctapersm",
        ".maxnreg",
        ".weak",
        ".noreturn",
        ".explicitcluster",
        ".maxclusterrank",
        ".blocksareclusters",
        ".abi_preserve",
        ".callgraph",
    ]
)


def _blank(match: re.Match) -> str:
    return "\n" * match.group().count("\n")


def _number(text: str) -> Imm | None:
    t = text.lower()
    if t.startswith("0f"):
        return Imm(int(t[2:], 16), True)
    if t.startswith("0d") and len(t) == 18:
        return Imm(int(t[2:], 16), True)
    sign = 1
    while t[:1] in "+-" and t:
        sign, t = (-sign if t[0] == "-" else sign), t[1:].strip()
    if not t[:1].isdigit():
        return None
    t = t.rstrip("u")
    base = 16 if t.startswith("0x") else 2 if t.startswith("0b") else 8 if len(t) > 1 and t[0] == "0" else 10
    return Imm(sign * int(t, base))


def _split(text: str) -> list[str]:
    """Split at commas outside of brackets and braces."""
    out, depth, start = [], 0, 0
    for i, c in enumerate(text):
        if c in "[{(":
            depth += 1
        elif c in "]})":
            depth -= 1
        elif c == "," and depth == 0:
            out.append(text[start:i].strip())
            start = i + 1
    tail = text[start:].strip()
    if tail:
        out.append(tail)
    return out


class _Scope:
    """Registers and labels of one brace level."""

    def __init__(self, parent: _Scope | None, ident: int):
        self.parent, self.ident = parent, ident
        self.regs: dict[str, Reg] = {}
        self.ranges: dict[str, tuple[int, int]] = {}
        self.labels: set[str] = set()

    def find(self, name: str) -> Reg | None:
        scope: _Scope | None = self
        while scope:
            if name in scope.regs:
                return scope.regs[name]
            m = re.match(r"(.*?)(\d+)$", name)
            while m:
                # a name may end in digits that belong to the prefix, so every split is tried
                count_bits = scope.ranges.get(m.group(1))
                if count_bits and int(m.group(2)) < count_bits[0]:
                    reg = Reg(name if scope.ident == 0 else f"{name}@{scope.ident}", count_bits[1])
                    scope.regs[name] = reg
                    return reg
                m = re.match(rf"(.{{{len(m.group(1)) + 1},}}?)(\d+)$", name)
            scope = scope.parent
        return None


class _Parser:
    def __init__(self, text: str):
        self.raw_lines = text.split("\n")
        self.text = _COMMENT.sub(_blank, text)
        self.pos, self.line = 0, 1
        self.module_shared: dict[str, Variable] = {}

    def fail(self, message: str, line: int) -> PTXSyntaxError:
        return PTXSyntaxError(message, line=line, text=self.raw_lines[line - 1].strip())

    def skip_space(self) -> None:
        while self.pos < len(self.text) and self.text[self.pos].isspace():
            self.line += self.text[self.pos] == "\n"
            self.pos += 1

    def take(self, end: int) -> str:
        chunk = self.text[self.pos : end]
        self.line += chunk.count("\n")
        self.pos = end
        return chunk

    def parse(self) -> Module:
        version = re.search(r"^\s*\.version\s+([\d.]+)", self.text, re.M)
        target = re.search(r"^\s*\.target\s+(\w+)", self.text, re.M)
        if not version or not target:
            raise PTXSyntaxError("not a PTX module: no .version or no .target", line=1, text=self.raw_lines[0])
        kernels: dict[str, Kernel] = {}
        while True:
            self.skip_space()
            if self.pos >= len(self.text):
                break
            head = re.compile(r"\.[\w]+").match(self.text, self.pos)
            if not head:
                raise self.fail("a directive is expected at module level", self.line)
            word = head.group()
            if word in (".version", ".target", ".address_size", ".file"):
                end = self.text.find("\n", self.pos)
                self.take(end if end >= 0 else len(self.text))
                continue
            start_line = self.line
            brace, semi = self.text.find("{", self.pos), self.text.find(";", self.pos)
            stop = min(x for x in (brace, semi, len(self.text)) if x >= 0)
            declaration = self.text[self.pos : stop]
            if re.search(r"\.entry\b", declaration):
                self.take(brace + 1)
                kernel = self.entry(declaration, start_line)
                kernels[kernel.name] = kernel
            elif re.search(r"\.func\b", declaration):
                raise UnsupportedInstruction(
                    "device functions (.func) are not supported", line=start_line, text=declaration.strip()[:100]
                )
            elif word == ".section":
                self.take(self.text.find("}", self.pos) + 1)
            else:
                end = self.text.find(";", self.pos)
                self.variable(self.take(end + 1).rstrip(";"), self.module_shared, start_line)
        return Module(version.group(1), target.group(1), kernels)

    def variable(self, text: str, into: dict[str, Variable], line: int) -> None:
        """A state-space variable; only shared ones are kept, others fail when an instruction names them."""
        if not re.search(r"\.shared\b", text):
            return
        align = re.search(r"\.align\s+(\d+)", text)
        m = re.search(r"\.(\w+)\s+([\w$]+)\s*((?:\[\d*\])*)\s*$", text)
        if not m or m.group(1) not in TYPE_BITS:
            raise self.fail("cannot read this shared variable", line)
        size = TYPE_BITS[m.group(1)] // 8
        for n in re.findall(r"\[(\d*)\]", m.group(3)):
            size *= int(n or 0)
        into[m.group(2)] = Variable(m.group(2), size, int(align.group(1)) if align else TYPE_BITS[m.group(1)] // 8)

    def entry(self, declaration: str, line: int) -> Kernel:
        m = re.search(r"\.entry\s+([\w$]+)\s*(?:\((.*?)\))?(.*)$", declaration, re.S)
        if not m:
            raise self.fail("cannot read this entry declaration", line)
        params, offset = {}, 0
        for text in _split(m.group(2) or ""):
            p = re.search(r"\.param\s+(.*?)([\w$]+)\s*(\[(\d+)\])?\s*$", text, re.S)
            kinds = [w for w in re.findall(r"\.(\w+)", p.group(1)) if w in TYPE_BITS] if p else []
            if not kinds:
                raise self.fail("cannot read this parameter", line)
            unit = TYPE_BITS[kinds[0]] // 8
            size = unit * int(p.group(4) or 1)
            align_text = re.search(r"(?<!ptr )\.align\s+(\d+)", p.group(1)) if ".ptr" not in p.group(1) else None
            align = int(align_text.group(1)) if align_text else unit
            offset = -(-offset // align) * align
            params[p.group(2)] = Param(p.group(2), size, align, offset)
            offset += size
        kernel = Kernel(m.group(1), params)
        for name in ("reqntid", "reqnctapercluster"):
            r = re.search(rf"\.{name}\s+([\d,\s]+)", m.group(3))
            if r:
                dims = [int(x) for x in r.group(1).replace(",", " ").split()]
                setattr(kernel, name, tuple(dims + [1] * (3 - len(dims))))
        kernel.shared.update(self.module_shared)
        self.body(kernel)
        return kernel

    def body(self, kernel: Kernel) -> None:
        counter = 0
        scope = _Scope(None, 0)
        pending: list[tuple[Instr, _Scope, str]] = []
        last_label, tables = "", {}
        while True:
            self.skip_space()
            if self.pos >= len(self.text):
                raise self.fail("the entry function is not closed", len(self.raw_lines))
            c = self.text[self.pos]
            if c == "{":
                self.pos += 1
                counter += 1
                scope = _Scope(scope, counter)
                continue
            if c == "}":
                self.pos += 1
                if scope.parent is None:
                    break
                scope = scope.parent
                continue
            if c == ";":
                self.pos += 1
                continue
            label = _LABEL.match(self.text, self.pos)
            if label:
                self.take(label.end())
                name = label.group(1)
                scope.labels.add(name)
                kernel.labels[f"{name}@{scope.ident}"] = len(pending)
                last_label = name
                continue
            line = self.line
            if self.text.startswith(".branchtargets", self.pos):
                text = self.take(self.text.find(";", self.pos) + 1)
                tables[last_label] = text[:-1].split(None, 1)[1].replace(",", " ").split()
                continue
            if c == ".":
                end = self.text.find("\n" if self.text.startswith(".loc", self.pos) else ";", self.pos)
                self.directive(self.take(end + 1).strip().rstrip(";"), scope, kernel, line)
                continue
            end = self.text.find(";", self.pos)
            if end < 0:
                raise self.fail("a statement is not closed with ';'", line)
            statement = self.take(end + 1)[:-1].strip()
            for part in self.chain(statement, tables, scope, line) if statement.startswith("brx.idx") else [statement]:
                pending.append((self.instruction(part, scope, line), scope, part))
        # branch targets are looked up once every label of the enclosing scopes is known
        for instr, where, _ in pending:
            if instr.parts[0] in ("bra", "brx", "call"):
                instr.operands = [self.target(x, where, kernel, instr) for x in instr.operands]
        kernel.instrs = [p[0] for p in pending]

    def chain(self, statement: str, tables: dict[str, list[str]], scope: _Scope, line: int) -> list[str]:
        """An indexed branch as comparisons with one target after another; an index past the table traps."""
        m = re.fullmatch(r"brx\.idx(?:\.uni)?\s+([\w$%]+)\s*,\s*([\w$]+)", statement)
        if not m or m.group(2) not in tables:
            raise self.fail(f"cannot read {statement}, or its table does not come before it", line)
        scope.regs["%brx"] = Reg("%brx" if scope.ident == 0 else f"%brx@{scope.ident}", 1)
        parts = []
        for n, name in enumerate(tables[m.group(2)]):
            parts += [f"setp.eq.u32 %brx, {m.group(1)}, {n}", f"@%brx bra {name}"]
        return [*parts, "trap"]

    def target(self, operand: object, scope: _Scope | None, kernel: Kernel, instr: Instr) -> Sym:
        if instr.parts[0] != "bra":
            raise UnsupportedInstruction("only direct branches are supported", line=instr.line, text=instr.text)
        name = operand.name if isinstance(operand, Sym) else str(operand)
        while scope:
            if f"{name}@{scope.ident}" in kernel.labels:
                return Sym(f"{name}@{scope.ident}")
            scope = scope.parent
        raise self.fail(f"label {name} is not defined", instr.line)

    def directive(self, text: str, scope: _Scope, kernel: Kernel, line: int) -> None:
        word = text.split(None, 1)[0]
        if word == ".reg":
            m = re.match(r"\.reg\s+(?:\.v\d\s+)?\.(\w+)\s+(.*)$", text, re.S)
            if not m or m.group(1) not in TYPE_BITS:
                raise self.fail("cannot read this register declaration", line)
            bits = TYPE_BITS[m.group(1)]
            for name in (n.strip() for n in m.group(2).split(",")):
                r = re.match(r"([\w$%]+)<(\d+)>$", name)
                if r:
                    scope.ranges[r.group(1)] = (int(r.group(2)), bits)
                else:
                    scope.regs[name] = Reg(name if scope.ident == 0 else f"{name}@{scope.ident}", bits)
        elif word in (".shared", ".extern"):
            self.variable(text, kernel.shared, line)
        elif word not in _IGNORED:
            raise UnsupportedInstruction(f"directive {word} is not supported", line=line, text=text)

    def instruction(self, statement: str, scope: _Scope, line: int) -> Instr:
        text = " ".join(statement.split())
        guard, rest = None, text
        m = re.match(r"@(!?)\s*([\w$%]+)\s+(.*)$", text)
        if m:
            reg = scope.find(m.group(2))
            if reg is None or reg.bits != 1:
                raise self.fail(f"guard {m.group(2)} is not a predicate register", line)
            guard, rest = (reg, m.group(1) == "!"), m.group(3)
        op, _, tail = rest.partition(" ")
        instr = Instr(op, tuple(op.split(".")), guard, [], line, text)
        instr.operands = [self.operand(t, scope, line) for t in _split(tail)]
        return instr

    def operand(self, text: str, scope: _Scope, line: int):
        text = text.strip()
        if text == "_":
            return Sink()
        if text.startswith("!"):
            return Not(self.operand(text[1:], scope, line))
        if text.startswith("{"):
            return Vec(tuple(self.operand(t, scope, line) for t in _split(text[1:-1])))
        if text.startswith("["):
            inner = _split(text[1:-1])
            base, offset = inner[0], 0
            m = re.match(r"(.*?[\w$\]])\s*\+\s*(-?\s*(?:0x)?[\da-fA-F]+)$", base)
            if m:
                base, offset = m.group(1), _number(m.group(2).replace(" ", "")).value
            coords = tuple(self.operand(t, scope, line) for t in inner[1:])
            return Mem(self.operand(base, scope, line), offset, coords)
        if "|" in text:
            first, second = text.split("|")
            return Pair(self.operand(first, scope, line), self.operand(second, scope, line))
        number = _number(text)
        if number is not None:
            return number
        if not re.match(r"[\w$%.]+$", text):
            raise self.fail(f"cannot read operand {text!r}", line)
        reg = scope.find(text)
        if reg is not None:
            return reg
        if _SPECIAL.match(text) or text in _SPECIAL_PLAIN:
            return Special(text)
        if text.startswith("%"):
            raise self.fail(f"register {text} is not declared", line)
        return Sym(text)


def parse(text: str) -> Module:
    """Parse a PTX module.

    Raises PTXSyntaxError (with line and text) on anything outside of the grammar above, UnsupportedInstruction on
    device functions and indirect branches.
    """
    return _Parser(text).parse()
