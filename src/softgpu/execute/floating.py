"""Floating-point arithmetic (PTX ISA 9.7.3 to 9.7.5), scalar and packed ``.f32x2``.

float32 results are correctly rounded; fused multiply-adds are formed in float64 and rounded once more to float32.
Subnormals are kept where the ISA says ``.ftz``: flushing changes results by less than 2**-126.
"""

from __future__ import annotations

import numpy as np

from ..formats import bf16_to_f32, f32_to_bf16
from ..ptx import Imm
from ..translate import emits, type_code

_ROUNDING = ("rn", "rz", "rm", "rp")


def _modifiers(g, i, allowed=("ftz", "sat", "full", "approx")):
    rounding, sat = "rn", False
    for p in i.parts[1:-1]:
        if p in _ROUNDING:
            rounding = p
        elif p == "sat":
            sat = True
        elif p not in allowed and p not in ("f32", "bf16", "f16"):
            raise g.unsupported(f"modifier .{p} is not supported")
    return rounding, sat


def half_source(g, operand, kind: str) -> str:
    """A 16-bit float operand widened to float32."""
    if kind == "bf16":
        if isinstance(operand, Imm):
            return g.const((operand.value & 0xFFFF) << 16, "f4")
        return f"{g.use(bf16_to_f32)}({g.src(operand, 'u2')})"
    return f"{g.src(operand, 'u2')}.view(np.float16).astype(np.float32)"


def _round_to(rounding: str):
    return {"rm": round_down, "rp": round_up, "rz": round_zero}[rounding]


def round_down(wide):
    """float64 to float32, towards minus infinity."""
    near = wide.astype(np.float32)
    return np.where(near > wide, np.nextafter(near, np.float32(-np.inf)), near)


def round_up(wide):
    """float64 to float32, towards plus infinity."""
    near = wide.astype(np.float32)
    return np.where(near < wide, np.nextafter(near, np.float32(np.inf)), near)


def round_zero(wide):
    """float64 to float32, towards zero."""
    near = wide.astype(np.float32)
    return np.where(np.abs(near) > np.abs(wide), np.nextafter(near, np.float32(0)), near)


def fma32(a, b, c):
    """a·b + c with one visible rounding: the product of two float32 is exact in float64."""
    return (np.multiply(a, b, dtype=np.float64) + c).astype(np.float32)


def _expression(g, op: str, rounding: str, args: list[str]) -> str:
    if op == "fma":
        if rounding == "rn":
            return f"{g.use(fma32)}({', '.join(args)})"
        a, b, c = args
        return f"{g.use(_round_to(rounding))}(np.multiply({a}, {b}, dtype=np.float64) + {c})"
    name = {"add": "np.add", "sub": "np.subtract", "mul": "np.multiply"}[op]
    if rounding == "rn":
        return f"{name}({', '.join(args)})"
    return f"{g.use(_round_to(rounding))}({name}({', '.join(args)}, dtype=np.float64))"


def arithmetic(g, i):
    """add, sub, mul, mad and fma on float types."""
    op = "fma" if i.parts[0] == "mad" else i.parts[0]
    kind = i.parts[-1]
    rounding, sat = _modifiers(g, i)
    d, args = i.operands[0], i.operands[1:]
    if kind == "f32x2":
        pairs = [g.half_floats(a) for a in args]
        out = []
        for half in range(2):
            name = g.tmp()
            g.line(f"{name} = {_expression(g, op, rounding, [p[half] for p in pairs])}")
            out.append(name)
        g.define_halves(d, *out)
        return
    if kind in ("f16x2", "bf16x2"):
        sources = ", ".join(g.src(a, "u4") for a in args)
        g.dst(d, "u4", f"{g.use(packed16)}('{op}', {kind == 'bf16x2'}, {sources})")
        return
    if kind in ("f16", "bf16"):
        wide = "f32" in i.parts
        texts = [half_source(g, a, kind) for a in (args[:2] if wide else args)]
        if wide:
            texts += [g.src(a, "f4") for a in args[2:]]
            g.dst(d, "f4", _expression(g, op, rounding, texts))
            return
        text = _expression(g, op, "rn", texts)
        g.dst(
            d,
            "u2",
            f"{g.use(f32_to_bf16)}({text})" if kind == "bf16" else f"({text}).astype(np.float16).view(np.uint16)",
        )
        return
    if "bf16" in i.parts[1:-1] or "f16" in i.parts[1:-1]:
        raise g.unsupported("this mixed-precision form is not supported")
    code = type_code(kind)
    texts = [g.src(a, code) for a in args]
    if code == "f8":
        if rounding != "rn":
            raise g.unsupported("directed rounding is not supported on .f64")
        text = f"{texts[0]} * {texts[1]} + {texts[2]}" if op == "fma" else _expression(g, op, "rn", texts)
        g.dst(d, code, text)
        return
    text = _expression(g, op, rounding, texts)
    if sat:
        g.dst(d, code, f"np.clip(np.nan_to_num({text}, nan=0.0), np.float32(0), np.float32(1))")
    elif op != "fma" and rounding == "rn":
        name, inner = text[:-1].split("(", 1)
        g.ufunc(d, code, name, inner)
    else:
        g.dst(d, code, text)


# A NaN loses against a number, or with .NaN wins.
_PACKED = {
    **{"add": np.add, "sub": np.subtract, "mul": np.multiply, "max": np.fmax, "min": np.fmin},
    **{"max.NaN": np.maximum, "min.NaN": np.minimum},
}


def packed16(op, bf16, *args):
    """add, sub, mul, fma, min, max on packed pairs of 16-bit floats, computed in float32."""
    halves = []
    for shift in (0, 16):
        raw = [((a >> np.uint32(shift)) & np.uint32(0xFFFF)).astype(np.uint16) for a in args]
        wide = [bf16_to_f32(r) if bf16 else r.view(np.float16).astype(np.float32) for r in raw]
        value = fma32(*wide) if op == "fma" else _PACKED[op](*wide)
        halves.append((f32_to_bf16(value) if bf16 else value.astype(np.float16).view(np.uint16)).astype(np.uint32))
    return halves[0] | (halves[1] << np.uint32(16))


@emits("fma")
def fused(g, i):
    """fma: a·b + c rounded once; ``fma.rn.f32.bf16`` takes 16-bit factors with a float32 addend and result."""
    arithmetic(g, i)


def sign(g, i):
    """neg and abs on float types."""
    kind = i.parts[-1]
    d, a = i.operands
    negate = i.parts[0] == "neg"
    if kind in ("f16x2", "bf16x2", "f16", "bf16"):
        code = "u4" if kind.endswith("x2") else "u2"
        bit = 0x80008000 if kind.endswith("x2") else 0x8000
        const = g.const(bit if negate else bit ^ (0xFFFFFFFF if code == "u4" else 0xFFFF), code)
        g.ufunc(d, code, "np.bitwise_xor" if negate else "np.bitwise_and", g.src(a, code), const)
        return
    code = type_code(kind)
    g.ufunc(d, code, "np.negative" if negate else "np.abs", g.src(a, code))


def min_max(g, i):
    """min and max, two or three inputs; a NaN loses unless ``.NaN`` is given."""
    kind = i.parts[-1]
    op = i.parts[0]
    extra = [p for p in i.parts[1:-1] if p not in ("ftz", "NaN")]
    if extra:
        raise g.unsupported(f"modifier .{'.'.join(extra)} is not supported")
    d, args = i.operands[0], i.operands[1:]
    if kind in ("f16x2", "bf16x2", "f16", "bf16"):
        if len(args) > 2:
            raise g.unsupported(f"three inputs of .{kind} are not supported")
        op += ".NaN" if "NaN" in i.parts else ""
        packed = kind.endswith("x2")
        texts = [g.src(a, "u4") if packed else f"{g.src(a, 'u2')}.astype(np.uint32)" for a in args]
        text = f"{g.use(packed16)}('{op}', {kind.startswith('bf16')}, {', '.join(texts)})"
        g.dst(d, *(("u4", text) if packed else ("u2", f"{text}.astype(np.uint16)")))
        return
    code = type_code(kind)
    name = ("np.maximum" if op == "max" else "np.minimum") if "NaN" in i.parts else f"np.f{op}"
    texts = [g.src(a, code) for a in args]
    first = texts[0] if len(texts) == 2 else f"{name}({texts[0]}, {texts[1]})"
    g.ufunc(d, code, name, first, texts[-1])


def divide(g, i):
    """div on float types: the quotient, rounded to nearest."""
    _modifiers(g, i)
    code = type_code(i.parts[-1])
    d, a, b = i.operands
    g.ufunc(d, code, "np.divide", g.src(a, code), g.src(b, code))


@emits("ex2", "lg2", "rcp", "sqrt", "rsqrt", "sin", "cos", "tanh")
def transcendental(g, i):
    """Approximations on the chip; here NumPy's, correct to the last bit or so."""
    kind = i.parts[-1]
    _modifiers(g, i)
    d, a = i.operands
    simple = {
        "ex2": "np.exp2",
        "lg2": "np.log2",
        "sqrt": "np.sqrt",
        "sin": "np.sin",
        "cos": "np.cos",
        "tanh": "np.tanh",
    }
    if kind in ("f16x2", "bf16x2", "f16", "bf16"):
        raise g.unsupported(f".{kind} is not supported")
    code = type_code(kind)
    value = g.src(a, code)
    if i.parts[0] == "rcp":
        g.ufunc(d, code, "np.reciprocal", value)
    elif i.parts[0] == "rsqrt":
        g.dst(d, code, f"np.reciprocal(np.sqrt({value}))")
    else:
        g.ufunc(d, code, simple[i.parts[0]], value)


@emits("copysign")
def copy_sign(g, i):
    """The magnitude of the second source with the sign of the first."""
    d, a, b = i.operands
    code = type_code(i.parts[-1])
    # the sign comes from the first source (PTX ISA 9.7.3.15)
    g.ufunc(d, code, "np.copysign", g.src(b, code), g.src(a, code))


@emits("testp")
def test_property(g, i):
    """testp: a predicate that says whether the float is finite, infinite, a number or a NaN."""
    prop, kind = i.parts[1:3]
    text = {
        "finite": "np.isfinite({})",
        "infinite": "np.isinf({})",
        "notanumber": "np.isnan({})",
        "number": "~np.isnan({})",
    }
    if prop not in text:
        raise g.unsupported(f"property .{prop} is not supported")
    g.dst(i.operands[0], "p", text[prop].format(g.src(i.operands[1], type_code(kind))))
