"""How Hopper's tensor core adds E4M3 products, to the bit.

``wgmma`` multiplies 32 pairs at a time. The 32 products and the running sum are aligned to the largest exponent among
them, cut off (towards zero) 13 bits behind that exponent's bit, added exactly, and the result is cut off to 13 bits
behind its own leading bit. The exponent of a product is that of its factors added, whatever carries: 1.5 * 1.5 counts
as exponent 0. Found by comparison with an H200, which it equals bit for bit (``tests/gpu/test_tensor_core.py``).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

DEPTH = 32  # products per instruction
FRACTION = 13  # bits kept behind the leading one
_ELEMENTS = 1 << 22  # products held at a time
_NOTHING = -60  # an exponent below that of any product of E4M3 codes


def exact_product(a: Tensor, b: Tensor) -> Tensor:
    """a [N, m, K] times b [N, K, n], FP64 values of narrow formats: the exact sum rounded once to FP32 [N, m, n]."""
    return torch.bmm(a, b).to(torch.float32)


def hopper_product(a: Tensor, b: Tensor) -> Tensor:
    """What Hopper's FP8 tensor core makes of a [N, m, K] times b [N, K, n], FP32 [N, m, n].

    a and b hold values of E4M3 codes, without scales, FP64 or FP32. One accumulation over all of K, in steps of 32; the
    order within a step does not matter. A NaN makes its row or column NaN.
    """
    n, m, depth = a.shape
    width = b.shape[-1]
    a, b = a.to(torch.float32), b.transpose(1, 2).to(torch.float32)
    extra = -depth % DEPTH
    a, b = (pad(x, (0, extra)).unflatten(-1, (-1, DEPTH)) for x in (a, b))
    out = torch.empty(n, m, width, dtype=torch.float32, device=a.device)
    columns = max(1, _ELEMENTS // (max(n * m, 1) * DEPTH))
    e_a, e_b = _exponents(a), _exponents(b)
    for start in range(0, width, columns):
        part = slice(start, start + columns)
        total = torch.zeros_like(out[..., part])
        for k in range(a.shape[2]):
            products = a[:, :, None, k] * b[:, None, part, k]
            e = (e_a[:, :, None, k] + e_b[:, None, part, k]).amax(-1)
            total = _add(products, e, total)
        out[..., part] = total
    return out


def _exponents(x: Tensor) -> Tensor:
    # int16; subnormal codes have the smallest normal's
    e = torch.frexp(x)[1].clamp(min=-5) - 1
    return torch.where(x == 0, _NOTHING, e).to(torch.int16)


def _add(products: Tensor, top: Tensor, total: Tensor) -> Tensor:
    """products FP32 [..., 32], of whose exponents top int16 is the largest; total FP32 as this function returns it."""
    own = torch.where(total == 0, _NOTHING, torch.frexp(total)[1] - 1)
    top = torch.maximum(top.to(torch.int32), own).clamp(min=_NOTHING)
    unit = torch.ldexp(torch.ones_like(total), FRACTION - top)
    # Integers below 2^21: their sum is exact in FP32 in any order.
    cut = torch.trunc(products * unit.unsqueeze(-1)).sum(-1) + torch.trunc(total * unit)
    kept = (cut.view(torch.int32) & -(1 << (23 - FRACTION))).view(torch.float32)
    return kept * torch.ldexp(torch.ones_like(total), top - FRACTION)
