"""PTX basic blocks to Python functions over NumPy vectors.

One Python function per block and variant (all lanes of a contiguous range active, or a mask). Registers that live
in one block become Python locals; the others are rows of the register file. A vector holds one value per lane; a
vector of one element stands for a value equal in all lanes. 64-bit pairs of packed halves (``.f32x2``) stay
apart as long as nothing needs the whole.
"""

from __future__ import annotations

import importlib

import numpy as np

from . import flow
from .dataflow import check_registers, unwaited_loads
from .errors import SoftGPUError, UnsupportedInstruction
from .ptx import Imm, Instr, Kernel, Mem, Not, Pair, Reg, Sink, Special, Sym

#: dtype code → NumPy dtype
DTYPES = {
    "p": np.dtype(bool), "u1": np.dtype("u1"), "s1": np.dtype("i1"), "u2": np.dtype("u2"), "s2": np.dtype("i2"),
    "f2": np.dtype("f2"), "u4": np.dtype("u4"), "s4": np.dtype("i4"), "f4": np.dtype("f4"),
    "u8": np.dtype("u8"), "s8": np.dtype("i8"), "f8": np.dtype("f8"),
}  # fmt: skip
#: bits of a register → dtype code of its raw value
RAW = {1: "p", 16: "u2", 32: "u4", 64: "u8"}

FAMILIES = ("integer", "floating", "convert", "move", "memory", "warp", "sync", "tma", "wgmma", "tcgen05", "launch")

_EMITTERS: dict[str, object] = {}


def emits(*heads: str):
    """Register an emitter for the opcodes whose first part is one of ``heads``."""

    def register(function):
        for head in heads:
            _EMITTERS[head] = function
        return function

    return register


def type_code(name: str) -> str:
    """PTX fundamental type to dtype code: s32 → s4, b16 → u2, f64 → f8."""
    if name == "pred":
        return "p"
    kind, bits = name[0], int(name[1:])
    return {"b": "u", "u": "u", "s": "s", "f": "f"}[kind] + str(bits // 8)


class Program:
    """A kernel with its blocks, register numbering and translated block functions (made on first use)."""

    def __init__(self, kernel: Kernel, target: str):
        for family in FAMILIES:
            importlib.import_module(f"{__package__}.execute.{family}")
        self.kernel, self.target = kernel, target
        _lower_b128(kernel)
        self.blocks, self.labels = flow.split(kernel)
        check_registers(self.blocks, self.labels)
        self.unwaited_loads = unwaited_loads(self.blocks, self.labels)
        self.local = flow.block_local(self.blocks)
        self.rows: dict[str, tuple[int, int]] = {}
        self.counts = {1: 0, 16: 0, 32: 0, 64: 0}
        for instr in kernel.instrs:
            for reg in flow.destinations(instr) + flow.sources(instr):
                if reg.name not in self.local and reg.name not in self.rows:
                    self.rows[reg.name] = (reg.bits, self.counts[reg.bits])
                    self.counts[reg.bits] += 1
        self.functions: dict[tuple[int, bool], tuple] = {}
        self.executed = np.zeros(len(self.blocks), np.int64)

    def function(self, block: int, masked: bool):
        """(callable, requirements) of a block; a requirement names a register view, special value or symbol."""
        key = (block, masked)
        found = self.functions.get(key)
        if found is None:
            found = self.functions[key] = Translation(self, self.blocks[block], masked).build()
        return found


def _lower_b128(kernel: Kernel) -> None:
    """128-bit registers become two 64-bit ones, so that only 1, 16, 32 and 64 bits remain."""

    def halves(reg: Reg) -> Pair:
        return Pair(Reg(reg.name + ".lo", 64), Reg(reg.name + ".hi", 64))

    for instr in kernel.instrs:
        instr.operands = [halves(o) if isinstance(o, Reg) and o.bits == 128 else o for o in instr.operands]


class Value:
    """A block-local value: Python names by dtype code, or two 32-bit halves of a 64-bit value."""

    __slots__ = ("halves", "names")

    def __init__(self, names: dict[str, str] | None = None, halves: tuple[Value, Value] | None = None):
        self.names, self.halves = names or {}, halves


class Translation:
    """Emits one block. Emitters call ``src``, ``dst``/``ufunc``, ``guard`` and ``line``."""

    def __init__(self, program: Program, block: flow.Block, masked: bool):
        self.program, self.block, self.masked = program, block, masked
        self.lines: list[str] = []
        self.needs: dict[tuple, str] = {}
        self.env: dict[str, Value] = {}
        self.space: dict[str, object] = {"np": np}
        self.counter = 0
        self.instr: Instr | None = None
        self.mask: str | None = None
        self.done = False

    # -- building ---------------------------------------------------------------------------------------------

    def build(self):
        marks: list[int] = []
        for instr in self.block.instrs:
            self.instr = instr
            emitter = _EMITTERS.get(instr.parts[0])
            if emitter is None:
                raise UnsupportedInstruction(f"opcode {instr.op} is not supported", line=instr.line, text=instr.text)
            self.mask = self._guard(instr)
            try:
                emitter(self, instr)
            except SoftGPUError as e:
                raise e.at(instr.line, instr.text) from None
            except (KeyError, IndexError, ValueError, TypeError, AttributeError) as e:
                raise UnsupportedInstruction(
                    f"{instr.op}: operands or modifiers are not supported ({type(e).__name__}: {e})",
                    line=instr.line, text=instr.text,
                ) from e  # fmt: skip
            marks += [instr.line] * (len(self.lines) - len(marks))
        if not self.done:
            self.lines.append(f"return {self.block.index + 1}")
            marks.append(self.block.instrs[-1].line)
        name = f"block{self.block.index}{'m' if self.masked else ''}"
        header = [f"def {name}(f, V):"]
        names = list(self.needs.values())
        if names:
            header.append(" (" + ", ".join(names) + ",) = V")
        if self.masked:
            header.append(" M = f.mask")
        source = "\n".join(header + [" " + line for line in self.lines])
        marks = [0] * len(header) + marks
        code = compile(source, f"<ptx {self.program.kernel.name[:40]} {name}>", "exec")
        exec(code, self.space)
        function = self.space[name]
        function.ptx_lines = marks
        return function, tuple(self.needs)

    def _guard(self, instr: Instr) -> str | None:
        if instr.guard is None or instr.parts[0] == "bra":
            return "M" if self.masked else None
        reg, negated = instr.guard
        text = self.src(reg, "p")
        if negated:
            text = f"~{text}"
        if self.masked:
            text = f"({text}) & M"
        name = self.tmp()
        self.line(f"{name} = {text}")
        return name

    # -- pieces -----------------------------------------------------------------------------------------------

    def line(self, text: str) -> None:
        self.lines.append(text)

    def tmp(self) -> str:
        self.counter += 1
        return f"t{self.counter}"

    def use(self, function) -> str:
        """Make a Python object callable from the block; gives its name there."""
        name = getattr(function, "__name__", None) or f"x{len(self.space)}"
        known = self.space.setdefault(name, function)
        if known is not function:
            name = f"{name}_{len(self.space)}"
            self.space[name] = function
        return name

    def const(self, value, code: str) -> str:
        """A one-element vector; floats are given by their bits."""
        dtype = DTYPES[code]
        if code == "p":
            array = np.array([bool(value)])
        else:
            array = np.array([int(value) & ((1 << 8 * dtype.itemsize) - 1)], f"u{dtype.itemsize}").view(dtype)
        array.setflags(write=False)
        name = f"K{code}_{int(value) & 0xFFFFFFFFFFFFFFFF:x}"
        self.space[name] = array
        return name

    def need(self, key: tuple) -> str:
        name = self.needs.get(key)
        if name is None:
            name = self.needs[key] = f"R{len(self.needs)}"
        return name

    def unsupported(self, why: str) -> UnsupportedInstruction:
        return UnsupportedInstruction(f"{self.instr.op}: {why}", line=self.instr.line, text=self.instr.text)

    def src(self, operand, code: str) -> str:
        """A Python expression for an operand as a vector of the dtype."""
        if isinstance(operand, Imm):
            value = operand.value
            if code == "f8" and operand.is_float and value < 1 << 32:
                value = int(np.array([value], "u4").view("f4").astype("f8").view("u8")[0])
            if code[0] == "f" and not operand.is_float:
                value = int(np.array([value], DTYPES[code]).view(f"u{code[1]}")[0])
            return self.const(value, code)
        if isinstance(operand, Not):
            return f"~{self.src(operand.reg, 'p')}"
        if isinstance(operand, Special):
            return self.need(("special", operand.name, code))
        if isinstance(operand, Sym):
            return self.need(("symbol", operand.name, code))
        if not isinstance(operand, Reg):
            raise self.unsupported(f"operand {operand!r} cannot be read here")
        if operand.name in self.program.local:
            return self._local(self.env[operand.name], code, operand.bits)
        bits, row = self.program.rows[operand.name]
        if DTYPES[code].itemsize * 8 < bits and code != "p":
            # the low part of a wider register
            raw = self.need(("row", bits, row, RAW[bits]))
            return f"{raw}.astype(np.{DTYPES['u' + code[1]].name}){_view('u' + code[1], code)}"
        if code != "p" and DTYPES[code].itemsize * 8 > bits:
            raise self.unsupported(f"a {bits}-bit register cannot be read as {code}")
        return self.need(("row", bits, row, code))

    def _local(self, value: Value, code: str, bits: int) -> str:
        if value.halves is not None:
            whole = self.tmp()
            low, high = (self._local(h, "u4", 32) for h in value.halves)
            self.line(f"{whole} = {self.use(pack64)}({low}, {high})")
            value.halves, value.names = None, {"u8": whole}
        if code in value.names:
            return value.names[code]
        known, name = next(iter(value.names.items()))
        size = DTYPES[code].itemsize
        if DTYPES[known].itemsize == size and "p" not in (known, code):
            view = self.tmp()
            self.line(f"{view} = {name}.view(np.{DTYPES[code].name})")
            value.names[code] = view
            return view
        if code == "p" or known == "p" or DTYPES[known].itemsize < size:
            raise self.unsupported(f"a {bits}-bit register cannot be read as {code}")
        raw = self._local(value, RAW[DTYPES[known].itemsize * 8], bits)
        narrow = self.tmp()
        self.line(f"{narrow} = {raw}.astype(np.{DTYPES['u' + code[1]].name}){_view('u' + code[1], code)}")
        return narrow

    def halves(self, operand) -> tuple[str, str] | None:
        """Names of the two 32-bit halves (u4) of a 64-bit operand, low first."""
        if isinstance(operand, Imm):
            return self.const(operand.value & 0xFFFFFFFF, "u4"), self.const((operand.value >> 32) & 0xFFFFFFFF, "u4")
        if operand.name in self.program.local:
            value = self.env[operand.name]
            if value.halves is None:
                whole = self._local(value, "u8", 64)
                low, high = self.tmp(), self.tmp()
                self.line(f"{low} = {whole}.view(np.uint32)[0::2]; {high} = {whole}.view(np.uint32)[1::2]")
                value.halves = (Value({"u4": low}), Value({"u4": high}))
            return tuple(self._local(h, "u4", 32) for h in value.halves)
        _, row = self.program.rows[operand.name]
        return self.need(("half", row, 0, "u4")), self.need(("half", row, 1, "u4"))

    def half_floats(self, operand) -> tuple[str, str]:
        """The two halves of a packed ``.f32x2`` operand as float32."""
        if isinstance(operand, Imm):
            return tuple(self.const((operand.value >> s) & 0xFFFFFFFF, "f4") for s in (0, 32))
        if operand.name in self.program.local:
            self.halves(operand)
            return tuple(self._local(h, "f4", 32) for h in self.env[operand.name].halves)
        _, row = self.program.rows[operand.name]
        return self.need(("half", row, 0, "f4")), self.need(("half", row, 1, "f4"))

    def is_local(self, operand) -> bool:
        return isinstance(operand, Reg) and operand.name in self.program.local

    def define_halves(self, operand: Reg, low: str, high: str, code: str = "f4") -> None:
        """Set a 64-bit register from its two 32-bit halves (fresh vectors)."""
        if self.is_local(operand) and self.instr.guard is None:
            self.env[operand.name] = Value(None, (Value({code: low}), Value({code: high})))
            return
        if self.is_local(operand):
            self.dst(operand, "u8", f"{self.use(pack64)}({low}.view(np.uint32), {high}.view(np.uint32))")
            return
        _, row = self.program.rows[operand.name]
        for n, name in enumerate((low, high)):
            out = self.need(("half", row, n, code))
            self._store(out, name)

    def _store(self, out: str, expr: str) -> None:
        if self.mask is None:
            self.line(f"{out}[...] = {expr}")
        else:
            self.line(f"np.copyto({out}, {expr}, where={self.mask})")

    def dst(self, operand, code: str, expr: str) -> None:
        """Assign a fresh vector (never an alias of a register row) to a destination register."""
        if isinstance(operand, Sink):
            self.line(expr)
            return
        if not isinstance(operand, Reg):
            raise self.unsupported(f"operand {operand!r} cannot be written")
        size = DTYPES[code].itemsize * 8 if code != "p" else 1
        if size < operand.bits:
            # PTX ISA 9.4.1: a narrower result is extended to the register's width by its own sign
            code = code[0] + str(operand.bits // 8)
            expr = f"({expr}).astype(np.{DTYPES[code].name})"
        if operand.name in self.program.local:
            name = self.tmp()
            if self.instr.guard is not None:
                old = self._local(self.env[operand.name], code, operand.bits)
                expr = f"np.where({self.mask}, {expr}, {old})"
            self.line(f"{name} = {expr}")
            self.env[operand.name] = Value({code: name})
            return
        bits, row = self.program.rows[operand.name]
        if size > bits:
            raise self.unsupported(f"a {size}-bit value does not fit a {bits}-bit register")
        self._store(self.need(("row", bits, row, code)), expr)

    def ufunc(self, operand, code: str, name: str, *args: str) -> None:
        """Assign ``name(*args)``, in place where the destination is a register row of that dtype."""
        joined = ", ".join(args)
        if isinstance(operand, Reg) and operand.name not in self.program.local:
            bits, row = self.program.rows[operand.name]
            if code == "p" or DTYPES[code].itemsize * 8 == bits:
                out = self.need(("row", bits, row, code))
                where = "" if self.mask is None else f", where={self.mask}"
                self.line(f"{name}({joined}, out={out}{where})")
                return
        self.dst(operand, code, f"{name}({joined})")

    def address(self, operand: Mem, code: str = "u4") -> str:
        """The byte address of ``[base + offset]`` as a vector."""
        base = operand.base
        if isinstance(base, Imm):
            return self.const(base.value + operand.offset, code)
        if isinstance(base, Reg) and base.bits == 64 and code == "u4":
            text = self.src(base, "u8")
            text = f"{text}.astype(np.uint32)"
        elif isinstance(base, Reg) and base.bits == 32 and code == "u8":
            text = f"{self.src(base, 'u4')}.astype(np.uint64)"
        else:
            text = self.src(base, code)
        if operand.offset:
            text = f"({text} + {self.const(operand.offset, code)})"
        return text


def _view(have: str, want: str) -> str:
    return "" if have == want else f".view(np.{DTYPES[want].name})"


def pack64(low, high):
    """Two uint32 vectors to one uint64 vector, low half first."""
    n = max(low.size, high.size)
    out = np.empty((n, 2), np.uint32)
    out[:, 0] = low
    out[:, 1] = high
    return out.view(np.uint64).reshape(n)
