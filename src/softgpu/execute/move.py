"""Data movement between registers, address conversion, control flow (PTX ISA 9.7.9, 9.7.12)."""

from __future__ import annotations

from ..errors import Deadlock
from ..memory import PARAM_WINDOW, SHARED_WINDOW
from ..ptx import Pair, Reg, Sink, Vec
from ..translate import DTYPES, RAW, Value, emits, type_code


def _copy(g, operand, code: str) -> str:
    """A source expression that is safe to keep: register rows are copied, they may be overwritten later."""
    text = g.src(operand, code)
    if isinstance(operand, Reg) and not g.is_local(operand) and text.isidentifier():
        return f"{text}.copy()"
    return text


@emits("mov")
def move(g, i):
    """mov between registers, of addresses and special values, and to and from tuples of narrower registers."""
    kind = i.parts[-1]
    d, a = i.operands
    if kind == "b128":
        if isinstance(d, Pair):
            for out, item in zip(
                (d.first, d.second), a.items if isinstance(a, Vec) else (a.first, a.second), strict=True
            ):
                g.dst(out, "u8", _copy(g, item, "u8"))
            return
        for out, item in zip(d.items, (a.first, a.second), strict=True):
            g.dst(out, "u8", _copy(g, item, "u8"))
        return
    if isinstance(d, Vec):
        _unpack(g, d.items, a, kind)
        return
    if isinstance(a, Vec):
        _pack(g, d, a.items, kind)
        return
    code = type_code(kind)
    if g.is_local(d) and g.is_local(a) and i.guard is None and d.bits == a.bits:
        value = g.env[a.name]
        g.env[d.name] = Value(dict(value.names), value.halves)
        return
    g.dst(d, code, _copy(g, a, code))


def _pack(g, d, items, kind: str) -> None:
    bits = DTYPES[type_code(kind)].itemsize * 8
    each = bits // len(items)
    if bits == 64 and each == 32:
        names = []
        for item in items:
            name = g.tmp()
            g.line(f"{name} = {_copy(g, item, 'u4')}")
            names.append(name)
        g.define_halves(d, *names, code="u4")
        return
    code, wide = RAW.get(each, "u1"), type_code(kind).replace("s", "u").replace("f", "u")
    dtype = DTYPES[wide].name
    parts = []
    for n, item in enumerate(items):
        text = f"{g.src(item, code)}.astype(np.{dtype})"
        parts.append(text if n == 0 else f"({text} << {g.const(n * each, wide)})")
    g.dst(d, wide, " | ".join(parts))


def _unpack(g, items, a, kind: str) -> None:
    bits = DTYPES[type_code(kind)].itemsize * 8
    each = bits // len(items)
    if bits == 64 and each == 32:
        low_high = g.halves(a)
        keep = isinstance(a, Reg) and not g.is_local(a)
        # both halves are read before either destination is written
        names = []
        for text in low_high:
            name = g.tmp()
            g.line(f"{name} = {text}{'.copy()' if keep else ''}")
            names.append(name)
        for item, name in zip(items, names, strict=True):
            if not isinstance(item, Sink):
                g.dst(item, "u4", name)
        return
    code, wide = RAW[each], type_code(kind).replace("s", "u").replace("f", "u")
    whole = g.tmp()
    g.line(f"{whole} = {g.src(a, wide)}{'.copy()' if isinstance(a, Reg) and not g.is_local(a) else ''}")
    for n, item in enumerate(items):
        if not isinstance(item, Sink):
            shifted = whole if n == 0 else f"({whole} >> {g.const(n * each, wide)})"
            g.dst(item, code, f"{shifted}.astype(np.{DTYPES[code].name})")


@emits("cvta")
def convert_address(g, i):
    """cvta: a state space's own address to a generic one, or back (``.to``)."""
    to = "to" in i.parts
    space = i.parts[2] if to else i.parts[1]
    kind = i.parts[-1]
    if kind not in ("u64", "u32"):
        raise g.unsupported("the address type must be .u64")
    d, a = i.operands
    window = {"shared": SHARED_WINDOW, "param": PARAM_WINDOW, "global": 0, "const": 0, "local": None}.get(
        space.split("::")[0]
    )
    if window is None:
        raise g.unsupported(f"state space .{space} is not supported")
    value = g.src(a, "u8") if not (isinstance(a, Reg) and a.bits == 32) else f"{g.src(a, 'u4')}.astype(np.uint64)"
    if window == 0:
        g.dst(d, "u8", f"{value} + {g.const(0, 'u8')}")
    elif to:
        g.dst(d, "u8", f"{value} & {g.const(window - 1, 'u8')}")
    else:
        g.dst(d, "u8", f"{value} | {g.const(window, 'u8')}")


@emits("isspacep")
def is_space(g, i):
    """isspacep: does the generic address lie in this state space?"""
    space = i.parts[1].split("::")[0]
    d, a = i.operands
    value = g.src(a, "u8")
    shift = g.const(56, "u8")
    texts = {
        "shared": f"({value} >> {shift}) == 1",
        "global": f"({value} >> {shift}) == 0",
        "param": f"({value} >> {shift}) == 2",
    }
    if space not in texts:
        raise g.unsupported(f"state space .{space} is not supported")
    g.dst(d, "p", texts[space])


@emits("bra")
def branch(g, i):
    """bra: lanes that part run as fragments of their own."""
    target = g.program.labels[i.operands[0].name]
    fall = g.block.index + 1
    if i.guard is None:
        g.line(f"return {target}")
    else:
        reg, negated = i.guard
        text = g.src(reg, "p")
        g.line(f"return f.branch({'~' if negated else ''}{text}, {target}, {fall})")
    g.done = True


@emits("ret", "exit")
def leave(g, i):
    """ret and exit: these lanes are done."""
    if i.guard is None:
        g.line("return f.leave(None)")
    else:
        g.line(f"return f.leave({g.mask})")
    g.done = True


@emits("trap")
def trap(g, i):
    """trap: the launch fails."""
    g.line(f"{g.use(raise_trap)}(f, {g.mask})")


def raise_trap(f, mask):
    """The kernel's own assertion failed."""
    from ..errors import SoftGPUError

    if f.select(mask).size:
        raise SoftGPUError("the kernel executed trap")


@emits(
    "prefetch",
    "prefetchu",
    "griddepcontrol",
    "applypriority",
    "discard",
    "pmevent",
    "membar",
    "nanosleep",
)
def no_effect(g, i):
    """Hints and launch order: no effect on results when kernels run one after another."""
    if i.parts[0] == "griddepcontrol" and i.parts[1] not in ("wait", "launch_dependents"):
        raise g.unsupported("unknown form")


@emits("setmaxnreg")
def register_budget(g, i):
    """No effect on results, but warps must not ask for more than the CTA has."""
    if i.parts[1] not in ("inc", "dec"):
        raise g.unsupported("unknown form")
    g.line(f"{g.use(set_registers)}(f, {i.operands[0].value})")


def set_registers(f, count):
    """``count`` registers per thread for these warps, from what the CTA's warps had at launch.

    At launch a thread has at most its share of 65,536, a multiple of 8. Once every warp has said what it needs, more
    than that means that one of them waits for ever.
    """
    cta = f.cta
    cta.registers.update(dict.fromkeys(f.lanes.warp_list, count))
    share = min(65536 // (32 * cta.warps), 255) // 8 * 8
    wanted = sum(cta.registers.values())
    if len(cta.registers) == cta.warps and wanted > share * cta.warps:
        raise Deadlock(
            f"setmaxnreg asks for {32 * wanted} registers, and the {cta.warps} warps of a CTA have {share} a thread, "
            f"{32 * share * cta.warps}, at most: a warp would wait for ever"
        )
