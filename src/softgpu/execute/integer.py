"""Integer arithmetic, logic, shifts, comparison and selection (PTX ISA 9.7.1, 9.7.6, 9.7.8)."""

from __future__ import annotations

import numpy as np

from ..ptx import Pair, Sink
from ..translate import DTYPES, emits, type_code

_MODIFIERS = {"add": set(), "sub": set(), "mul": {"lo", "hi", "wide"}, "mad": {"lo", "hi", "wide"}}


def _wide(code: str) -> str:
    return code[0] + str(2 * int(code[1]))


def _check(g, allowed, parts) -> None:
    extra = [p for p in parts if p not in allowed]
    if extra:
        raise g.unsupported(f"modifier .{'.'.join(extra)} is not supported")


@emits("add", "sub")
def add_sub(g, i):
    """add and sub of integers, modulo 2^bits; float types go to ``floating``."""
    kind = i.parts[-1]
    if kind[0] in "us" or kind.startswith("b"):
        _check(g, (), i.parts[1:-1])
        code = type_code(kind)
        d, a, b = i.operands
        g.ufunc(d, code, f"np.{'add' if i.parts[0] == 'add' else 'subtract'}", g.src(a, code), g.src(b, code))
        return
    from .floating import arithmetic

    arithmetic(g, i)


@emits("mul", "mad")
def mul_mad(g, i):
    """mul and mad of integers: the low or high half of the product, or all of it (``.wide``)."""
    kind = i.parts[-1]
    if kind[0] == "f":
        from .floating import arithmetic

        arithmetic(g, i)
        return
    mode = i.parts[1]
    _check(g, ("lo", "hi", "wide"), i.parts[1:-1])
    code = type_code(kind)
    d, a, b = i.operands[:3]
    a, b = g.src(a, code), g.src(b, code)
    mad = i.parts[0] == "mad"
    if mode == "lo":
        if not mad:
            g.ufunc(d, code, "np.multiply", a, b)
        else:
            g.ufunc(d, code, "np.add", f"{a} * {b}", g.src(i.operands[3], code))
        return
    if mode == "hi" and code[1] == "8":
        product = f"{g.use(mul_hi64)}({a}, {b})"
    else:
        wide = np.dtype(DTYPES[_wide(code)]).name
        product = f"{a}.astype(np.{wide}) * {b}.astype(np.{wide})"
        if mode == "hi":
            bits = int(code[1]) * 8
            product = f"(({product}) >> {bits}).astype(np.{DTYPES[code].name})"
    out = code if mode == "hi" else _wide(code)
    if mad:
        product = f"{product} + {g.src(i.operands[3], out)}"
    g.dst(d, out, product)


def mul_hi64(a, b):
    """High 64 bits of the product of two 64-bit vectors."""
    signed = a.dtype.kind == "i"
    out = [(int(x) * int(y)) >> 64 for x, y in zip(*np.broadcast_arrays(a, b), strict=True)]
    return np.array([v & 0xFFFFFFFFFFFFFFFF for v in out], np.uint64).view(np.int64 if signed else np.uint64)


@emits("div", "rem")
def div_rem(g, i):
    """Quotient towards zero, and the remainder that belongs to it."""
    kind = i.parts[-1]
    if kind[0] == "f":
        from .floating import divide

        divide(g, i)
        return
    code = type_code(kind)
    d, a, b = i.operands
    g.dst(d, code, f"{g.use(int_div if i.parts[0] == 'div' else int_rem)}({g.src(a, code)}, {g.src(b, code)})")


def int_div(a, b):
    """Quotient rounded towards zero; division by zero gives all ones, as the ISA leaves it undefined."""
    safe = np.where(b == 0, np.ones_like(b), b)
    if a.dtype.kind == "u":
        q = a // safe
    else:
        q = np.where(((a < 0) != (safe < 0)) & (a % safe != 0), a // safe + 1, a // safe).astype(a.dtype)
    return np.where(b == 0, np.invert(np.zeros_like(q)), q)


def int_rem(a, b):
    """Remainder with the sign of the dividend."""
    return (a - int_div(a, b) * b).astype(a.dtype)


@emits("and", "or", "xor")
def logic(g, i):
    """Bitwise and, or, xor; on predicates too."""
    code = type_code(i.parts[-1])
    d, a, b = i.operands
    name = {"and": "np.bitwise_and", "or": "np.bitwise_or", "xor": "np.bitwise_xor"}[i.parts[0]]
    if code == "p":
        name = name.replace("bitwise", "logical")
    g.ufunc(d, code, name, g.src(a, code), g.src(b, code))


@emits("not", "cnot")
def invert(g, i):
    """not: bitwise. cnot: 1 where the source is zero, else 0."""
    code = type_code(i.parts[-1])
    d, a = i.operands
    if i.parts[0] == "cnot":
        g.dst(d, code, f"({g.src(a, code)} == 0).astype(np.{DTYPES[code].name})")
        return
    g.ufunc(d, code, "np.logical_not" if code == "p" else "np.invert", g.src(a, code))


@emits("neg", "abs")
def sign(g, i):
    """neg and abs, modulo 2^bits."""
    code = type_code(i.parts[-1]) if i.parts[-1] not in ("f16x2", "bf16x2", "bf16", "f16") else None
    if code is None or code[0] == "f":
        from .floating import sign as float_sign

        float_sign(g, i)
        return
    d, a = i.operands
    g.ufunc(d, code, "np.negative" if i.parts[0] == "neg" else "np.abs", g.src(a, code))


@emits("min", "max")
def min_max(g, i):
    """min and max of integers; float types go to ``floating``."""
    kind = i.parts[-1]
    if kind[0] in "fb":
        from .floating import min_max as float_min_max

        float_min_max(g, i)
        return
    _check(g, ("relu",) if kind == "s32" else (), i.parts[1:-1])
    code = type_code(kind)
    d, a, b = i.operands
    a, b = g.src(a, code), g.src(b, code)
    if "relu" in i.parts:  # a negative result becomes zero
        g.dst(d, code, f"np.maximum(np.{i.parts[0]}imum({a}, {b}), np.int32(0))")
        return
    g.ufunc(d, code, f"np.{i.parts[0]}imum", a, b)


@emits("shl", "shr")
def shift(g, i):
    """shl and shr: counts above the width count as the width; signed shr repeats the sign."""
    code = type_code(i.parts[-1])
    if i.parts[0] == "shl":
        code = "u" + code[1]
    bits = int(code[1]) * 8
    d, a, n = i.operands
    value = g.src(a, code)
    if hasattr(n, "value"):
        n = min(n.value, bits)
        if n == bits:
            if code[0] == "u":
                g.dst(d, code, f"{value} * 0")
                return
            n = bits - 1
        count = g.const(n, code)
        g.ufunc(d, code, "np.left_shift" if i.parts[0] == "shl" else "np.right_shift", value, count)
        return
    count = g.src(n, "u4")
    g.dst(d, code, f"{g.use(shift_left if i.parts[0] == 'shl' else shift_right)}({value}, {count})")


def shift_left(a, n):
    """Left shift with the amount clamped to the width (PTX ISA 9.7.8.7)."""
    bits = a.dtype.itemsize * 8
    return np.where(n >= bits, a.dtype.type(0), a << (n & (bits - 1)).astype(a.dtype))


def shift_right(a, n):
    """Right shift, arithmetic for signed types, with the amount clamped to the width."""
    bits = a.dtype.itemsize * 8
    if a.dtype.kind == "i":
        return a >> np.minimum(n, bits - 1).astype(a.dtype)
    return np.where(n >= bits, a.dtype.type(0), a >> (n & (bits - 1)).astype(a.dtype))


@emits("shf")
def funnel(g, i):
    """shf: 32 bits of a 64-bit pair shifted left or right; the count is taken modulo 32 or clamped to 32."""
    _, direction, mode, _ = i.parts
    d, *args = i.operands
    texts = ", ".join(g.src(x, "u4") for x in args)
    g.dst(d, "u4", f"{g.use(funnel_shift)}({texts}, {direction == 'l'}, {mode == 'clamp'})")


def funnel_shift(low, high, n, left, clamp):
    """``shf``: shift the 64-bit value high:low and keep one half."""
    n = (np.minimum(n, 32) if clamp else n & 31).astype(np.uint64)
    both = (high.astype(np.uint64) << np.uint64(32)) | low
    return ((both << n) >> np.uint64(32)).astype(np.uint32) if left else (both >> n).astype(np.uint32)


@emits("bfe")
def bit_extract(g, i):
    """bfe: ``length`` bits from bit ``start``, extended by their sign in signed types."""
    code = type_code(i.parts[-1])
    d, a, b, c = i.operands
    g.dst(d, code, f"{g.use(bfe)}({g.src(a, code)}, {g.src(b, 'u4')}, {g.src(c, 'u4')})")


def bfe(a, position, length):
    """Bit field of ``length`` bits at ``position``; signed types extend its top bit (PTX ISA 9.7.1.19)."""
    bits = a.dtype.itemsize * 8
    position, length = (position & 255).astype(np.int64), (length & 255).astype(np.int64)
    length = np.minimum(length, bits)
    raw = shift_right(a.view(f"u{a.dtype.itemsize}"), position.astype(np.uint32))
    ones = shift_left(np.ones(1, raw.dtype), length.astype(np.uint32)) - raw.dtype.type(1)
    field = raw & ones
    if a.dtype.kind == "i":
        top_at = np.minimum(position + length - 1, bits - 1)
        top = (shift_right(a.view(raw.dtype), np.maximum(top_at, 0).astype(np.uint32)) & 1).astype(bool) & (length > 0)
        field = np.where(top, field | ~ones, field)
    return field.astype(raw.dtype).view(a.dtype)


@emits("bfi")
def bit_insert(g, i):
    """bfi: the second source with ``length`` bits from bit ``start`` replaced by low bits of the first."""
    code = "u" + type_code(i.parts[-1])[1]
    f, a, b, c, d = i.operands
    g.dst(f, code, f"{g.use(bfi)}({g.src(a, code)}, {g.src(b, code)}, {g.src(c, 'u4')}, {g.src(d, 'u4')})")


def bfi(a, b, position, length):
    """Insert the low ``length`` bits of ``a`` into ``b`` at ``position``."""
    ones = shift_left(np.ones(1, a.dtype), length & 255) - a.dtype.type(1)
    mask = shift_left(ones, position & 255)
    return (b & ~mask) | (shift_left(a & ones, position & 255) & mask)


@emits("popc")
def popcount(g, i):
    """popc: the number of ones."""
    code = type_code(i.parts[-1])
    g.dst(i.operands[0], "u4", f"np.bitwise_count({g.src(i.operands[1], 'u' + code[1])}).astype(np.uint32)")


@emits("clz")
def leading_zeros(g, i):
    """clz: zeros above the highest one; the width for zero."""
    code = type_code(i.parts[-1])
    g.dst(i.operands[0], "u4", f"{g.use(clz)}({g.src(i.operands[1], 'u' + code[1])})")


def clz(a):
    """Count of leading zero bits."""
    bits = a.dtype.itemsize * 8
    a = a.copy()
    for s in (1, 2, 4, 8, 16, 32):
        if s < bits:
            a |= a >> a.dtype.type(s)
    return (bits - np.bitwise_count(a)).astype(np.uint32)


@emits("bfind")
def find_leading(g, i):
    """bfind: place of the highest bit unlike the sign, counted from the top with ``.shiftamt``; -1 if there is none."""
    code = type_code(i.parts[-1])
    shift = "shiftamt" in i.parts
    g.dst(i.operands[0], "u4", f"{g.use(bfind)}({g.src(i.operands[1], code)}, {shift})")


def bfind(a, shiftamt):
    """Position of the most significant non-sign bit, all ones when there is none."""
    bits = a.dtype.itemsize * 8
    if a.dtype.kind == "i":
        a = np.where(a < 0, ~a, a).view(f"u{a.dtype.itemsize}")
    n = bits - 1 - clz(a).astype(np.int64)
    out = np.where(n < 0, 0xFFFFFFFF, (bits - 1 - n) if shiftamt else n)
    return out.astype(np.uint32)


@emits("brev")
def reverse_bits(g, i):
    """brev: bit 0 becomes the highest."""
    code = "u" + type_code(i.parts[-1])[1]
    g.dst(i.operands[0], code, f"{g.use(brev)}({g.src(i.operands[1], code)})")


def brev(a):
    """Bits in reverse order."""
    one = a.dtype.type(1)
    out = np.zeros_like(a)
    for n in range(a.dtype.itemsize * 8):
        out = (out << one) | ((a >> a.dtype.type(n)) & one)
    return out


@emits("prmt")
def permute(g, i):
    """prmt: four bytes out of eight, chosen by the nibbles of the selector."""
    if len(i.parts) != 2:
        raise g.unsupported("only the default mode is supported")
    d, a, b, c = i.operands
    g.dst(d, "u4", f"{g.use(prmt)}({g.src(a, 'u4')}, {g.src(b, 'u4')}, {g.src(c, 'u4')})")


def prmt(a, b, selector):
    """Byte permute (PTX ISA 9.7.8.9): four selector nibbles pick bytes of b:a, bit 3 replicates the sign."""
    n = max(a.size, b.size, selector.size)
    both = (np.broadcast_to(b, n).astype(np.uint64) << np.uint64(32)) | np.broadcast_to(a, n)
    pool = np.ascontiguousarray(both).view(np.uint8).reshape(n, 8)
    out = np.empty((n, 4), np.uint8)
    selector = np.broadcast_to(selector, n)
    rows = np.arange(n)
    for k in range(4):
        nibble = (selector >> np.uint32(4 * k)) & np.uint32(15)
        byte = pool[rows, nibble & 7]
        out[:, k] = np.where(nibble & 8, np.where(byte & 0x80, 255, 0), byte)
    return out.view(np.uint32).reshape(n)


_COMPARE = {
    "eq": "np.equal", "ne": "np.not_equal", "lt": "np.less", "le": "np.less_equal", "gt": "np.greater",
    "ge": "np.greater_equal", "lo": "np.less", "ls": "np.less_equal", "hi": "np.greater", "hs": "np.greater_equal",
}  # fmt: skip


def _operand(g, operand, kind: str) -> str:
    if kind in ("f16", "bf16"):
        from .floating import half_source

        return half_source(g, operand, kind)
    return g.src(operand, type_code(kind))


def _comparison(g, i, cmp: str, kind: str) -> str:
    a, b = (_operand(g, x, kind) for x in i.operands[1:3])
    if "f" not in kind:
        if cmp not in _COMPARE:
            raise g.unsupported(f"comparison .{cmp} is not supported on .{kind}")
        return f"{_COMPARE[cmp]}({a}, {b})"
    if cmp == "num":
        return f"~(np.isnan({a}) | np.isnan({b}))"
    if cmp == "nan":
        return f"np.isnan({a}) | np.isnan({b})"
    if cmp == "ne":
        return f"({a} != {b}) & ~(np.isnan({a}) | np.isnan({b}))"
    if cmp in ("equ", "ltu", "leu", "gtu", "geu"):
        return f"{_COMPARE[cmp[:2]]}({a}, {b}) | np.isnan({a}) | np.isnan({b})"
    if cmp == "neu":
        return f"np.not_equal({a}, {b})"
    return f"{_COMPARE[cmp]}({a}, {b})"


@emits("setp")
def set_predicate(g, i):
    """setp: a comparison joined with a predicate where one is given; the second result has its complement joined."""
    parts = [p for p in i.parts[1:] if p != "ftz"]
    cmp, kind = parts[0], parts[-1]
    if kind in ("f16x2", "bf16x2"):
        raise g.unsupported(f"comparison of .{kind} is not supported")
    combine = parts[1] if len(parts) == 3 else None
    text = _comparison(g, i, cmp, kind)
    d = i.operands[0]
    if combine is None and not isinstance(d, Pair):
        if text.startswith("np.") and text.count("(") == 1:
            name, args = text[:-1].split("(", 1)
            g.ufunc(d, "p", name, args)
        else:
            g.dst(d, "p", text)
        return
    value = g.tmp()
    g.line(f"{value} = {text}")
    c = g.src(i.operands[3], "p") if combine else None
    op = {"and": "&", "or": "|", "xor": "^", None: None}[combine]
    first, second = (d.first, d.second) if isinstance(d, Pair) else (d, None)
    if not isinstance(first, Sink):
        g.dst(first, "p", f"{value} {op} {c}" if op else f"{value} & True")
    if second is not None and not isinstance(second, Sink):
        g.dst(second, "p", f"~{value} {op} {c}" if op else f"~{value}")


@emits("selp")
def select(g, i):
    """selp: the first source where the predicate holds, else the second."""
    code = type_code(i.parts[-1])
    d, a, b, p = i.operands
    g.dst(d, code, f"np.where({g.src(p, 'p')}, {g.src(a, code)}, {g.src(b, code)})")


@emits("lop3")
def logic3(g, i):
    """lop3: any function of three bits, by its truth table."""
    d, a, b, c, table = i.operands
    g.dst(d, "u4", f"{g.use(lop3)}({g.src(a, 'u4')}, {g.src(b, 'u4')}, {g.src(c, 'u4')}, {table.value})")


def lop3(a, b, c, table):
    """Any function of three bits, given by its truth table (PTX ISA 9.7.8.6)."""
    out = np.zeros(1, np.uint32)
    for n in range(8):
        if table >> n & 1:
            out = out | ((a if n & 4 else ~a) & (b if n & 2 else ~b) & (c if n & 1 else ~c))
    return out
