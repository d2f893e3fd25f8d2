"""Powers of two: the exact one, and the two bit-level approximations for inference (paper 3.7, C)."""

from __future__ import annotations

import math

import torch
from torch import Tensor

MITCHELL_OFFSET = 0.0695  # centres the ratio of Mitchell's approximation to 2^x in [0.9530, 1.0116]
SCHRAUDOLPH_OFFSET = 0.0575327  # log2(1 / (2 ln^2 2)): the ratio averages one
_LN2 = math.log(2.0)


def exp2(x: Tensor) -> Tensor:
    """2^x rounded to FP32, through FP64 so that the result is the same on every machine. x: FP64 or FP32."""
    return torch.exp(x.to(torch.float64) * _LN2).to(torch.float32)


def mitchell(x: Tensor) -> Tensor:
    """Mitchell's piecewise-linear 2^x as built in the bits of an FP32 number (paper C.1).

    x: FP64, the exact value of the fused multiply-add before its offset, at most a few units above zero. The add of
    252 - offset rounds to 16 fractional bits; a shift moves them into exponent and mantissa. Below -124 the integer
    maximum holds the result at its smallest value.
    """
    y = (x + float(torch.tensor(252.0 - MITCHELL_OFFSET))).to(torch.float32)
    bits = y.view(torch.int32).clamp(min=0x43000000).to(torch.int64)
    shifted = ((bits << 7) + 0x81800000) & 0xFFFFFFFF
    return shifted.to(torch.int32).view(torch.float32)


def schraudolph(x: Tensor) -> Tensor:
    """Schraudolph's 2^x: a BF16 number whose bits are 128 (x - offset) plus the exponent bias (paper C.2).

    x: FP64 or FP32. One integer maximum clamps before the shift, so any score range is safe: below about -127 the
    result is zero.
    """
    t = x.to(torch.float64) - SCHRAUDOLPH_OFFSET
    y = (t * 128.0 + 12599168.0).to(torch.float32)  # 1.5 * 2^23 + 127 * 128
    bits = y.view(torch.int32).clamp(min=0x4B400000)
    return ((bits & 0xFFFF) << 16).view(torch.float32)


def schraudolph_mix(x: Tensor, together: int = 2) -> Tensor:
    """Schraudolph on five of every eight groups of ``together`` neighbouring columns, the exact power on the others."""
    group = torch.arange(x.shape[-1], device=x.device) // together % 8
    return torch.where(group * 5 % 8 < 5, schraudolph(x), exp2(x))
