"""Small launches before the Hopper kernels: which documents need the careful forward, and numbers of NVFP4 codes.

Twins: ``bounds.uneven_documents``, ``quantize.reference.dequantize``.
"""

# Kernels take pointers and tiles, which have no Python types.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls

from __future__ import annotations

import triton
import triton.language as tl

from flamia.quantize.triton_formats import bits, decode_e2m1, decode_e4m3
from flamia.quantize.triton_operands import tile_here


@triton.jit(do_not_specialize=["total", "documents"], do_not_specialize_on_alignment=["cu_ptr", "count_ptr"])
def _uneven_kernel(
    exponents_ptr, cu_ptr, count_ptr, flags_ptr, careful_ptr, total, documents, LIMIT: tl.constexpr,
    STEP: tl.constexpr, DOCUMENTS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1).to(tl.int64)
    document = tl.program_id(0) * DOCUMENTS + tl.arange(0, DOCUMENTS)
    exists = document < documents
    start, stop = tl.load(cu_ptr + document, exists, 0), tl.load(cu_ptr + document + 1, exists, 0)
    # The largest e, and the largest 255 - e.
    top, below = tl.zeros((DOCUMENTS,), tl.int32), tl.zeros((DOCUMENTS,), tl.int32)
    for i in range(0, tl.max(stop - start, 0), WIDTH * STEP):
        token = start[:, None] + i + tl.arange(0, WIDTH)[None, :] * STEP
        inside = token < stop[:, None]
        e = tl.load(exponents_ptr + head * total + token, inside, 0).to(tl.int32)
        top = tl.maximum(top, tl.max(e, 1))
        below = tl.maximum(below, tl.max(tl.where(inside, 255 - e, 0), 1))
    uneven = top + below > 255 + LIMIT
    tl.store(flags_ptr + head * documents + document, uneven.to(tl.uint8), exists)
    if tl.max(uneven.to(tl.int32), 0) > 0:
        tl.atomic_max(careful_ptr, tl.load(count_ptr), sem="relaxed")


@triton.jit
def _two_values(codes, scale, PLACE: tl.constexpr):
    # Of two codes of a word, as BF16 bits: nothing is cut off.
    low = decode_e2m1((codes >> PLACE) & 15) * scale
    high = decode_e2m1((codes >> (PLACE + 4)) & 15) * scale
    return ((bits(low) >> 16) & 0xFFFF) | (bits(high) & -65536)


# Scales of some heads begin anywhere, and are read a byte at a time.
@triton.jit(do_not_specialize=["scales_stride", "total", "heads"], do_not_specialize_on_alignment=["scales_ptr"])
def _decode_kernel(
    codes_ptr, codes_stride, scales_ptr, scales_stride, out_ptr, total, heads, FINITE: tl.constexpr, D: tl.constexpr,
    TOKENS: tl.constexpr,
):  # fmt: skip
    WIDTH: tl.constexpr = D // 8  # words of a row
    head, first = tl.program_id(0).to(tl.int64), tile_here().to(tl.int64) * TOKENS
    place = tl.arange(0, TOKENS * WIDTH)
    token, word = first + place // WIDTH, place % WIDTH
    inside = token < total
    codes = tl.load(codes_ptr + token * codes_stride + head * WIDTH + word, inside, 0)
    scale = tl.load(scales_ptr + token * scales_stride + head * (WIDTH // 2) + word // 2, inside, 0)
    scale = decode_e4m3(scale, False)
    if FINITE:
        scale = tl.where(scale == scale, scale, 0.0)
    # Words, not bytes, where another thread stores what one has decoded.
    even = tl.join(_two_values(codes, scale, 0), _two_values(codes, scale, 16))
    odd = tl.join(_two_values(codes, scale, 8), _two_values(codes, scale, 24))
    place = tl.arange(0, 4 * TOKENS * WIDTH)
    token, word = first + place // (4 * WIDTH), place % (4 * WIDTH)
    values = tl.reshape(tl.join(even, odd), (4 * TOKENS * WIDTH,))
    tl.store(out_ptr + (token * heads + head) * (4 * WIDTH) + word, values, token < total)
