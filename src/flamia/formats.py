"""Low-precision number formats: E4M3, E2M1 and their scales UE8M0 and UE4M3.

The only module that knows bit patterns. Element formats follow the OCP 8-bit floating point and Microscaling (MX)
specifications; NVFP4's UE4M3 scale is an E4M3 number without its sign. Rounding is to nearest, ties to even, and
saturates at the largest finite value, as ``cvt.rn.satfinite`` does; NaN stays NaN, and an infinite value becomes NaN
rather than a large finite number, so that a broken input is seen in the result.

Codes are ``uint8`` tensors, values FP32, exponents ``int32`` (unbiased). A scale exponent of ``NAN_EXPONENT`` stands
for UE8M0's NaN code 255.
"""

from __future__ import annotations

import torch
from torch import Tensor

E4M3_MAX = 448.0
E2M1_MAX = 6.0
NVFP4_MAX = E4M3_MAX * E2M1_MAX  # largest magnitude of an NVFP4 value: largest scale times largest code
MIN_EXPONENT = -126  # keeps both 2^e and 2^-e normal FP32 numbers
NAN_EXPONENT = 128
E8M0_BIAS = 127

# format -> exponent and significand of its largest value: 448 = 1.75 * 2^8, 6 = 1.5 * 2^2, 448 * 6 = 1.3125 * 2^11
_LARGEST = {"e4m3": (8, 1.75), "e2m1": (2, 1.5), "nvfp4": (11, 1.3125)}


def _bits(x: Tensor) -> Tensor:
    return x.to(torch.float32).contiguous().view(torch.int32)


# ------------------------------------------------------------------------------------------------- powers of two


def floor_log2(x: Tensor) -> Tensor:
    """floor(log2 x) of positive normal FP32 numbers from their exponent field; at most -127 for zero and subnormals."""
    return ((_bits(x) >> 23) & 255) - 127


def ceil_log2(x: Tensor) -> Tensor:
    """ceil(log2 x) of non-negative FP32 numbers, int32, clamped below at ``MIN_EXPONENT`` (zero and subnormals)."""
    bits = _bits(x)
    exponent = ((bits >> 23) & 255) - 127 + ((bits & 0x7FFFFF) != 0).to(torch.int32)
    return exponent.clamp(min=MIN_EXPONENT)


def pow2(exponent: Tensor) -> Tensor:
    """2^exponent, exact, FP32, for integers in [-126, 127]; ``NAN_EXPONENT`` and its negative give NaN."""
    e = exponent.to(torch.int32)
    value = ((e.clamp(MIN_EXPONENT, 127) + 127) << 23).view(torch.float32)
    return torch.where(e.abs() == NAN_EXPONENT, torch.nan, value)


# ------------------------------------------------------------------------------------------------------- E4M3


def encode_e4m3(x: Tensor) -> Tensor:
    """FP32 -> E4M3 codes (uint8, same shape), nearest even, saturating at ±448; NaN and infinity -> NaN (0x7F)."""
    x = torch.where(x.isfinite(), x.to(torch.float32), torch.nan)
    return x.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).view(torch.uint8)


def decode_e4m3(codes: Tensor) -> Tensor:
    """E4M3 codes (uint8) -> FP32."""
    c = codes.to(torch.int16)
    # E4M3 (bias 7) read as FP16 (bias 15) is the value times 2^-8, subnormals included.
    half = ((c & 0x7F) << 7) | ((c & 0x80) << 8)
    value = half.view(torch.float16).to(torch.float32) * 256.0
    return torch.where((c & 0x7F) == 0x7F, torch.nan, value)


def round_e4m3(x: Tensor) -> Tensor:
    """Nearest E4M3 value of an FP32 tensor, saturating at ±448, without going through codes; NaN or infinity -> NaN.

    This is the inner loop of the reference, hence the few passes over memory.
    """
    c = x.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).view(torch.uint8).to(torch.int16)
    half = ((c & 0x7F) << 7) | ((c & 0x80) << 8)
    return half.view(torch.float16).to(torch.float32) * 256.0 + x * 0.0


# ------------------------------------------------------------------------------------------------------- E2M1

_E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def round_e2m1(x: Tensor) -> Tensor:
    """Nearest value of {0, .5, 1, 1.5, 2, 3, 4, 6} with x's sign, ties to even, saturating; NaN stays NaN."""
    a = x.abs().clamp(max=E2M1_MAX)
    step = torch.where(a < 2.0, 0.5, torch.where(a < 4.0, 1.0, 2.0))
    return torch.copysign(torch.round(a / step) * step, x)


def round_e2m1_stochastic(x: Tensor, random: Tensor) -> Tensor:
    """Round to one of the two E2M1 neighbours, upwards with probability equal to the fraction between them.

    ``random``: int64 in [0, 2^24), same shape as x. Saturates at ±6 (paper A.5; numerics: all-4-bit dS).
    """
    a = x.abs().clamp(max=E2M1_MAX)
    step = torch.where(a < 2.0, 0.5, torch.where(a < 4.0, 1.0, 2.0))
    steps = a / step
    low = torch.floor(steps)
    up = ((steps - low) * 2.0**24).to(torch.int64) > random
    return torch.copysign((low + up) * step, x)


def encode_e2m1(values: Tensor) -> Tensor:
    """E2M1 values (as ``round_e2m1`` returns) -> codes 0..15 (uint8, one per element)."""
    a = values.abs()
    code = torch.where(a < 2.0, a * 2.0, torch.where(a < 4.0, a + 2.0, a * 0.5 + 4.0)).to(torch.uint8)
    return code | (torch.signbit(values).to(torch.uint8) << 3)


def decode_e2m1(codes: Tensor) -> Tensor:
    """E2M1 codes 0..15 (uint8, one per element) -> FP32."""
    magnitude = torch.tensor(_E2M1_VALUES, device=codes.device)[(codes & 7).to(torch.int64)]
    return torch.where((codes & 8) != 0, -magnitude, magnitude)


def pack_nibbles(codes: Tensor) -> Tensor:
    """Codes 0..15 [..., n] (n even) -> bytes [..., n/2], the even element in the low nibble."""
    pairs = codes.unflatten(-1, (-1, 2))
    return pairs[..., 0] | (pairs[..., 1] << 4)


def unpack_nibbles(packed: Tensor) -> Tensor:
    """Bytes [..., n/2] -> codes 0..15 [..., n], low nibble first."""
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)


# ------------------------------------------------------------------------------------------------------- scales


def e8m0_exponent(amax: Tensor, element: str, rounding: str = "up") -> Tensor:
    """Shared power-of-two exponent (int32) of a block whose largest magnitude is ``amax`` (FP32, >= 0).

    ``element``: "e4m3", "e2m1" or "nvfp4" (an E2M1 code times its UE4M3 scale). ``rounding="up"``: the smallest e with
    amax * 2^-e <= the format's largest value, so nothing is ever clamped (paper 3.2). ``"floor"``: floor(log2 amax) -
    emax, the OCP reference conversion, under which elements may be clamped; an ablation. Blocks of zeros get
    ``MIN_EXPONENT``; a block with an infinity or NaN gets ``NAN_EXPONENT``.
    """
    emax, significand = _LARGEST[element]
    bits = _bits(amax) & 0x7FFFFFFF  # a NaN out of a vectorised maximum may carry a sign
    e = ((bits >> 23) & 255) - 127 - emax
    if rounding == "up":
        limit = int((significand - 1.0) * 2**23)
        e = e + ((bits & 0x7FFFFF) > limit).to(torch.int32)
    elif rounding != "floor":
        raise ValueError(f"rounding must be 'up' or 'floor', got {rounding!r}")
    e = e.clamp(min=MIN_EXPONENT)
    return torch.where(bits >= 0x7F800000, NAN_EXPONENT, e)


def encode_e8m0(exponent: Tensor) -> Tensor:
    """Exponents (int32, [-127, 127], or ``NAN_EXPONENT``) -> UE8M0 codes (uint8)."""
    return (exponent + E8M0_BIAS).to(torch.uint8)


def decode_e8m0(codes: Tensor) -> Tensor:
    """UE8M0 codes (uint8) -> exponents (int32); code 255 gives ``NAN_EXPONENT``."""
    return codes.to(torch.int32) - E8M0_BIAS


def nvfp4_scale(amax: Tensor) -> Tensor:
    """UE4M3 scale (FP32 value) of an NVFP4 group: E4M3(amax / 6). The quotient is FP32 division."""
    # A tensor, since torch multiplies by the reciprocal of a Python number on CUDA.
    return round_ue4m3(amax / torch.full_like(amax, E2M1_MAX))


def round_ue4m3(x: Tensor) -> Tensor:
    """Nearest UE4M3 value of a non-negative FP32 tensor, saturating at 448; infinity and NaN give NaN."""
    return decode_e4m3(encode_e4m3(x))


# ------------------------------------------------------------------------------------------------ random counters


def counter_bits(seed: int, *counters: Tensor) -> Tensor:
    """24 random bits (int64 in [0, 2^24)) per element from a seed and broadcastable int64 counters.

    Each counter is mixed in by a 32-bit multiply-xorshift finaliser, so a bit depends on the counters and on nothing
    else: neither on the order of evaluation nor on the shape around it.
    """
    mask = 0xFFFFFFFF
    h: Tensor | int = (seed * 0x9E3779B1 + 0x7F4A7C15) & mask
    for c in counters:
        h = (c ^ h) & mask
        for multiplier, shift in ((0x85EBCA6B, 16), (0xC2B2AE35, 13), (0x27D4EB2F, 16)):
            h = ((h ^ (h >> shift)) * multiplier) & mask
        h = h ^ (h >> 15)
    return torch.as_tensor(h >> 8)


# ------------------------------------------------------------------------------------------------ fixed-order sums


def hadamard(x: Tensor) -> Tensor:
    """Normalised Hadamard transform of the last dimension (a power of two), FP32; its own inverse.

    A butterfly of adds with strides 1, 2, 4, ..., then one multiplication by FP32(1/sqrt(d)): the fixed order makes
    the twin and a kernel agree to the bit (paper 3.4, A.2).
    """
    d = x.shape[-1]
    if d & (d - 1):
        raise ValueError(f"the Hadamard rotation needs a power-of-two head dimension, got {d}")
    y = x.to(torch.float32)
    stride = 1
    while stride < d:
        y = y.unflatten(-1, (d // (2 * stride), 2, stride))
        a, b = y.unbind(-2)
        y = torch.stack((a + b, a - b), dim=-2).flatten(-3)
        stride *= 2
    return y * (1.0 / d**0.5)


def tree_sum(x: Tensor) -> Tensor:
    """Sum of the last dimension in FP32 by repeated halving (first half plus second half), odd rests left to right."""
    x = x.to(torch.float32)
    while x.shape[-1] > 1 and x.shape[-1] % 2 == 0:
        a, b = x.chunk(2, dim=-1)
        x = a + b
    total = x[..., 0]
    for i in range(1, x.shape[-1]):
        total = total + x[..., i]
    return total
