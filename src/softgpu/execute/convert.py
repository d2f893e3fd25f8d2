"""cvt between integers, floats, and the packed tensor-core formats (PTX ISA 9.7.9.21 and 22)."""

from __future__ import annotations

import numpy as np

from ..formats import DECODE, MINIFLOATS, bf16_to_f32, encode, encode_ue8m0, f32_to_bf16
from ..ptx import Imm, Reg
from ..translate import DTYPES, emits, type_code
from .floating import half_source, round_down, round_up, round_zero

_INT_ROUND = {"rni": "np.rint", "rzi": "np.trunc", "rmi": "np.floor", "rpi": "np.ceil"}
_X2 = {"e4m3x2": "e4m3", "e5m2x2": "e5m2", "e2m1x2": "e2m1", "e2m3x2": "e2m3", "e3m2x2": "e3m2", "ue8m0x2": "ue8m0"}
_KNOWN = {"rn", "rz", "rm", "rp", "rni", "rzi", "rmi", "rpi", "ftz", "sat", "satfinite", "relu", "rs", "rna"}


@emits("cvt")
def convert(g, i):
    """cvt: scalar, or to and from packed pairs and fours of 16-bit floats and of tensor-core formats."""
    if i.parts[1] == "pack":
        raise g.unsupported("cvt.pack is not supported")
    types = [p for p in i.parts[1:] if p not in _KNOWN]
    flags = set(i.parts[1:]) & _KNOWN
    if not 2 <= len(types) <= 3:
        raise g.unsupported("two types are expected")
    to, source = types[0], types[1]
    d, args = i.operands[0], i.operands[1:]
    if to in ("bf16x2", "f16x2") and source == "f32":
        _pack_halves(g, d, args, to, flags)
    elif to in _X2:
        _pack_mini(g, d, args, to, source, flags)
    elif source in _X2:
        _unpack_mini(g, d, args[0], to, source, flags)
    elif to in ("e4m3x4", "e5m2x4", "e2m1x4", "e2m3x4", "e3m2x4"):
        _pack_stochastic(g, d, args, to, flags)
    else:
        _scalar(g, d, args[0], to, source, flags)


def _pack_halves(g, d, args, to, flags):
    if "rs" in flags and not flags - {"rs", "relu"}:
        a, b, bits = g.src(args[0], "f4"), g.src(args[1], "f4"), g.src(args[2], "u4")
        text = f"{g.use(pack_halves_stochastic)}({a}, {b}, {bits}, {to == 'bf16x2'}, {'relu' in flags})"
        g.dst(d, "u4", text)
        return
    if flags - {"rn", "rz", "relu"} or (to == "f16x2" and "rz" in flags):
        raise g.unsupported("this rounding is not supported")
    a, b = (g.src(x, "f4") for x in args[:2])
    g.dst(d, "u4", f"{g.use(pack_halves)}({a}, {b}, {to == 'bf16x2'}, {'relu' in flags}, {'rz' in flags})")


def pack_halves(a, b, bf16, relu, towards_zero):
    """Two float32 to a packed pair; the first operand goes to the high half."""
    out = []
    for x in (b, a):
        if relu:
            x = np.fmax(x, np.float32(0))
        if bf16:
            raw = (x.view(np.uint32) >> np.uint32(16)) if towards_zero else f32_to_bf16(x).astype(np.uint32)
        else:
            raw = x.astype(np.float16).view(np.uint16).astype(np.uint32)
        out.append(raw)
    return out[0] | (out[1] << np.uint32(16))


def _pack_mini(g, d, args, to, source, flags):
    name = _X2[to]
    if source == "f32":
        a, b = (g.src(x, "f4") for x in args[:2])
    elif source in ("f16x2", "bf16x2"):
        whole = g.tmp()
        g.line(f"{whole} = {g.use(unpack_halves)}({g.src(args[0], 'u4')}, {source == 'bf16x2'})")
        b, a = f"{whole}[0]", f"{whole}[1]"
    else:
        raise g.unsupported(f"from .{source} is not supported")
    if name == "ue8m0":
        if not flags & {"rz", "rp"}:
            raise g.unsupported(".rz or .rp is expected")
        text = f"{g.use(pack_ue8m0)}({a}, {b}, {'rp' in flags})"
    else:
        if "rn" not in flags or "satfinite" not in flags:
            raise g.unsupported(".rn.satfinite is expected")
        text = f"{g.use(pack_mini)}({a}, {b}, '{name}', {'relu' in flags})"
    # .b8 results sit in the low half of a 16-bit register
    g.dst(d, "u2", text)


def unpack_halves(raw, bf16):
    """(low, high) halves as float32."""
    halves = [((raw >> np.uint32(s)) & np.uint32(0xFFFF)).astype(np.uint16) for s in (0, 16)]
    return [bf16_to_f32(h) if bf16 else h.view(np.float16).astype(np.float32) for h in halves]


def pack_mini(a, b, name, relu):
    """Two float32 to two codes; the first operand takes the high byte (high nibble for E2M1)."""
    if relu:
        a, b = np.fmax(a, np.float32(0)), np.fmax(b, np.float32(0))
    high, low = (encode(x, name).astype(np.uint16) for x in (a, b))
    return low | (high << np.uint16(4 if name == "e2m1" else 8))


def pack_ue8m0(a, b, up):
    """Two float32 to two scale exponents."""
    high, low = (encode_ue8m0(x, up).astype(np.uint16) for x in (a, b))
    return low | (high << np.uint16(8))


def _unpack_mini(g, d, a, to, source, flags):
    name = _X2[source]
    if to not in ("f16x2", "bf16x2"):
        raise g.unsupported(f"to .{to} is not supported")
    g.dst(d, "u4", f"{g.use(unpack_mini)}({g.src(a, 'u2')}, '{name}', {to == 'bf16x2'}, {'relu' in flags})")


def unpack_mini(raw, name, bf16, relu):
    """Two codes to a packed pair of 16-bit floats (exact)."""
    shift, mask = (4, 15) if name == "e2m1" else (8, 63 if name in ("e2m3", "e3m2") else 255)
    out = []
    for s in (0, shift):
        value = DECODE[name][(raw >> np.uint16(s)) & np.uint16(mask)]
        if relu:
            value = np.fmax(value, np.float32(0))
        code = f32_to_bf16(value) if bf16 else value.astype(np.float16).view(np.uint16)
        out.append(code.astype(np.uint32))
    return out[0] | (out[1] << np.uint32(16))


def _pack_stochastic(g, d, args, to, flags):
    if "rs" not in flags or "satfinite" not in flags:
        raise g.unsupported(".rs.satfinite is expected")
    values = [g.src(x, "f4") for x in args[0].items]
    bits = g.src(args[1], "u4")
    g.line(f"f.cta.launch.note({STOCHASTIC!r})")
    text = f"{g.use(pack_stochastic)}(({', '.join(values)}), {bits}, '{to[:-2]}', {'relu' in flags})"
    g.dst(d, "u2" if to == "e2m1x4" else "u4", text)


#: said in the report of a run that used one of these instructions
STOCHASTIC = "cvt.rs to four elements: which random bits an element uses is softgpu's own choice, not the chip's"


def pack_stochastic(values, bits, name, relu):
    """Four float32 to four codes with stochastic rounding (PTX ISA 9.7.9.22); the first takes the top.

    A value goes away from zero when its discarded fraction plus a random fraction reaches one. Two elements share each
    half of ``bits``: one takes all 16, the other the lower 8 of them.
    """
    each = 4 if name == "e2m1" else 8
    out = 0
    for n, value in enumerate(reversed(values)):
        if relu:
            value = np.fmax(value, np.float32(0))
        random = ((bits >> np.uint32(16 * (n // 2))) & np.uint32(0xFFFF)).astype(np.float64) / 65536
        if n % 2:
            random = (random * 256) % 1
        low, step = _floor_step(value, name)
        magnitude = np.abs(value).astype(np.float64)
        up = (magnitude - low) / step + random >= 1
        rounded = np.copysign(np.where(up, low + step, low), value).astype(np.float32)
        code = encode(np.where(np.isnan(value), value, rounded), name).astype(np.uint32)
        out = out | (code << np.uint32(each * n))
    return out.astype(np.uint16) if name == "e2m1" else out


def pack_halves_stochastic(a, b, bits, bf16, relu):
    """Two float32 to a packed pair with stochastic rounding; ``a`` uses the high half of the random bits.

    BF16 discards 16 bits of the significand, FP16 13: as many random bits are added to them (PTX ISA 9.7.9.21).
    """
    out = 0
    for shift, x in ((0, b), (16, a)):
        if relu:
            x = np.fmax(x, np.float32(0))
        random = (bits >> np.uint32(shift)) & np.uint32(0xFFFF if bf16 else 0x1FFF)
        if bf16:
            raw = (x.view(np.uint32) + random) >> np.uint32(16)
            raw = np.where(np.isfinite(x), raw, f32_to_bf16(x))
        else:
            magnitude = np.abs(x).astype(np.float64)
            _, exponent = np.frexp(np.where(magnitude > 0, magnitude, 1.0))
            step = np.exp2((np.maximum(exponent - 1, -14) - 10).astype(np.float64))
            low = np.floor(magnitude / step) * step
            up = (magnitude - low) / step + random / 8192 >= 1
            value = np.where(np.isfinite(x), np.copysign(np.where(up, low + step, low), x), x)
            raw = value.astype(np.float16).view(np.uint16)
        out = out | (raw.astype(np.uint32) << np.uint32(shift))
    return out


def _floor_step(value, name):
    """The representable magnitude at or below |value|, and the step from there."""
    _, mantissa_bits, bias, _, largest = MINIFLOATS[name]
    magnitude = np.minimum(np.abs(value).astype(np.float64), largest)
    _, exponent = np.frexp(np.where(magnitude > 0, magnitude, 1.0))
    step = np.exp2((np.maximum(exponent - 1, 1 - bias) - mantissa_bits).astype(np.float64))
    return np.floor(magnitude / step) * step, step


def _scalar(g, d, a, to, source, flags):
    if source in ("bf16", "f16"):
        value, have = half_source(g, a, source), "f4"
    elif source == "tf32" or to == "tf32":
        raise g.unsupported("tf32 is not supported")
    else:
        have = type_code(source)
        value = _narrow_source(g, a, have)
    if to in ("bf16", "f16"):
        if have[0] != "f" or have == "f8":
            value = f"{value}.astype(np.float32)"
        if "relu" in flags:
            value = f"np.fmax({value}, np.float32(0))"
        g.dst(
            d,
            "u2",
            f"{g.use(f32_to_bf16)}({value})" if to == "bf16" else f"({value}).astype(np.float16).view(np.uint16)",
        )
        return
    want = type_code(to)
    if have[0] == "f" and want[0] == "f":
        _float_to_float(g, d, value, have, want, flags)
    elif have[0] == "f":
        mode = next((_INT_ROUND[x] for x in flags if x in _INT_ROUND), None)
        if mode is None:
            raise g.unsupported("an integer rounding is expected")
        g.dst(d, want, f"{g.use(float_to_int)}({mode}({value}), np.{DTYPES[want].name})")
    elif want[0] == "f":
        directed = {"rm": round_down, "rp": round_up, "rz": round_zero}
        chosen = next((directed[x] for x in flags if x in directed), None)
        if chosen and want == "f4":
            g.dst(d, want, f"{g.use(chosen)}({value}.astype(np.float64))")
        else:
            g.dst(d, want, f"{value}.astype(np.{DTYPES[want].name})")
    elif "sat" in flags:
        g.dst(d, want, f"{g.use(saturate)}({value}, np.{DTYPES[want].name})")
    else:
        g.dst(d, want, f"{value}.astype(np.{DTYPES[want].name})")


def _narrow_source(g, a, have: str) -> str:
    """The source value; a narrower type than the register reads its low part."""
    if isinstance(a, Imm) or not isinstance(a, Reg):
        return g.src(a, have)
    size = int(have[1]) * 8
    if size < a.bits:
        raw = {16: "u2", 32: "u4", 64: "u8"}[a.bits]
        unsigned = f"{g.src(a, raw)}.astype(np.uint{size})"
        return unsigned if have[0] == "u" else f"{unsigned}.view(np.{DTYPES[have].name})"
    return g.src(a, have)


def _float_to_float(g, d, value, have, want, flags):
    mode = next((_INT_ROUND[x] for x in flags if x in _INT_ROUND), None)
    if mode:
        value = f"{mode}({value})"
    if have == "f8" and want == "f4":
        directed = next((f for n, f in (("rm", round_down), ("rp", round_up), ("rz", round_zero)) if n in flags), None)
        value = f"{g.use(directed)}({value})" if directed else f"{value}.astype(np.float32)"
    elif have != want:
        value = f"{value}.astype(np.{DTYPES[want].name})"
    elif not mode:
        value = f"{value} + {g.const(0x8000 << (8 * (int(want[1]) - 2)), want)}"
    if "sat" in flags:
        value = f"np.clip(np.nan_to_num({value}, nan=0.0), 0, 1)"
    g.dst(d, want, value)


def float_to_int(value, dtype):
    """Rounded floats to integers, clamped to the range; NaN gives zero."""
    info = np.iinfo(dtype)
    wide = value.astype(np.float64)
    top = wide >= float(info.max)
    low = wide <= float(info.min)
    safe = np.where(top | low | np.isnan(wide), 0, wide)
    out = safe.astype(dtype)
    return np.where(top, info.max, np.where(low, info.min, out)).astype(dtype)


def saturate(value, dtype):
    """Integer clamp to the range of the destination."""
    info, have = np.iinfo(dtype), np.iinfo(value.dtype)
    return np.clip(value, max(info.min, have.min), min(info.max, have.max)).astype(dtype)
