"""Number formats of the tensor cores: BF16, E4M3, E5M2, E2M3, E3M2, E2M1, UE8M0, UE4M3 (PTX ISA 5.2.3).

Vectors in, vectors out; encoders round to nearest, ties to even, and saturate to the largest finite value unless
said otherwise.
"""

from __future__ import annotations

import numpy as np

# name → (exponent bits, mantissa bits, bias, has infinity, largest finite value)
MINIFLOATS = {
    "e4m3": (4, 3, 7, False, 448.0),
    "e5m2": (5, 2, 15, True, 57344.0),
    "e2m3": (2, 3, 1, False, 7.5),
    "e3m2": (3, 2, 3, False, 28.0),
    "e2m1": (2, 1, 1, False, 6.0),
}


def bf16_to_f32(raw):
    """uint16 codes to float32."""
    return (raw.astype(np.uint32) << np.uint32(16)).view(np.float32)


def f32_to_bf16(value):
    """float32 to uint16 codes, round to nearest even; every NaN becomes 0x7FFF."""
    bits = value.view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    return np.where(np.isnan(value), np.uint32(0x7FFF), rounded).astype(np.uint16)


def decode_table(name: str) -> np.ndarray:
    """Every code's value as float32: 256 entries for 8-bit formats, 64 and 16 for 6 and 4 bits."""
    exponent_bits, mantissa_bits, bias, infinite, _ = MINIFLOATS[name]
    bits = 1 + exponent_bits + mantissa_bits
    code = np.arange(1 << bits)
    sign = np.where(code >> (bits - 1), -1.0, 1.0)
    exponent = (code >> mantissa_bits) & ((1 << exponent_bits) - 1)
    mantissa = code & ((1 << mantissa_bits) - 1)
    scale = np.exp2(np.maximum(exponent, 1).astype(np.float64) - bias - mantissa_bits)
    value = sign * (mantissa + np.where(exponent > 0, 1 << mantissa_bits, 0)) * scale
    if infinite:
        top = exponent == (1 << exponent_bits) - 1
        value = np.where(top, np.where(mantissa == 0, sign * np.inf, np.nan), value)
    elif name == "e4m3":
        value = np.where((code & 0x7F) == 0x7F, np.nan, value)
    return value.astype(np.float32)


DECODE = {name: decode_table(name) for name in MINIFLOATS}
DECODE["ue8m0"] = np.where(np.arange(256) == 255, np.nan, np.exp2(np.arange(256.0) - 127)).astype(np.float32)
DECODE["ue4m3"] = np.concatenate([DECODE["e4m3"][:128]] * 2)


def encode(value, name: str):
    """float32 to codes (uint8), round to nearest even, saturating; NaN gives the format's NaN or its maximum."""
    exponent_bits, mantissa_bits, bias, _infinite, largest = MINIFLOATS[name]
    bits = 1 + exponent_bits + mantissa_bits
    magnitude = np.abs(value).astype(np.float64)
    _, exponent = np.frexp(np.where(magnitude > 0, magnitude, 1.0))
    exponent = np.maximum(exponent - 1, 1 - bias)
    quantum = np.exp2((exponent - mantissa_bits).astype(np.float64))
    rounded = np.minimum(np.rint(magnitude / quantum) * quantum, largest)
    _, exponent = np.frexp(np.where(rounded > 0, rounded, 1.0))
    exponent = np.maximum(exponent - 1, 1 - bias)
    steps = np.rint(rounded / np.exp2((exponent - mantissa_bits).astype(np.float64))).astype(np.int64)
    normal = steps >= 1 << mantissa_bits
    field = np.where(normal, exponent + bias, 0)
    code = (field << mantissa_bits) + np.where(normal, steps - (1 << mantissa_bits), steps)
    code |= np.signbit(value).astype(np.int64) << (bits - 1)
    if name in ("e4m3", "e5m2"):
        code = np.where(np.isnan(value), 0x7F, code)
    else:
        code = np.where(np.isnan(value), (1 << (bits - 1)) - 1, code)
    return code.astype(np.uint8)


def encode_ue8m0(value, up: bool):
    """float32 to the exponent code of 2**(code − 127): towards zero, or up to the next power of two."""
    magnitude = np.abs(value).astype(np.float64)
    mantissa, exponent = np.frexp(np.where((magnitude > 0) & np.isfinite(magnitude), magnitude, 1.0))
    code = exponent - 1 + 127 + (np.where(mantissa > 0.5, 1, 0) if up else 0)
    code = np.clip(code, 0, 254)
    code = np.where(magnitude == 0, 0, code)
    code = np.where(np.isinf(magnitude), 254, code)
    return np.where(np.isnan(value), 255, code).astype(np.uint8)
