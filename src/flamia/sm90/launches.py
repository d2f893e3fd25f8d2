"""Small launches before the Hopper kernels: which documents need the careful forward, and numbers of NVFP4 codes.

Twins: ``bounds.uneven_documents``, ``quantize.reference.dequantize``.
"""

# Kernels take pointers and tiles, which have no Python types.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from flamia.bounds import FOLD_RANGE
from flamia.documents import TOKEN_BLOCK
from flamia.quantize.payloads import NVFP4Rows
from flamia.quantize.triton_formats import bits, decode_e2m1, decode_e4m3

_DOCUMENTS, _WIDTH = 8, 256  # a program compares so many exponents of so many documents at a time
_WORDS = 1024  # words of eight codes that a program decodes, of one token or several


@triton.jit(do_not_specialize=["total", "documents"])
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


def uneven_documents(
    exponents: Tensor, cu_seqlens: Tensor, count: Tensor, *, per_token: bool = False
) -> tuple[Tensor, Tensor]:
    """Documents that the careful kernel has to do, and how many items it has to look at.

    exponents: V's, UE8M0 [kv heads, Tk], equal over 32 tokens of a document unless per_token. cu_seqlens: int32
    [documents + 1]. count: int32 [1], items of the work list.

    Returns:
        uint8 [kv heads, documents]: 1 where exponents vary by more than ``FOLD_RANGE``; int32 [1]: ``count`` if there
        is such a document, else 0.
    """
    heads, total = exponents.shape
    documents = cu_seqlens.shape[0] - 1
    flags = torch.empty((heads, documents), dtype=torch.uint8, device=exponents.device)
    careful = torch.zeros(1, dtype=torch.int32, device=exponents.device)
    if heads and documents:
        grid = (triton.cdiv(documents, _DOCUMENTS), heads)
        _uneven_kernel[grid](
            exponents, cu_seqlens, count, flags, careful, total, documents, FOLD_RANGE, 1 if per_token else TOKEN_BLOCK,
            _DOCUMENTS, _WIDTH, num_warps=4,
        )  # fmt: skip
    return flags, careful


@triton.jit
def _two_values(codes, scale, PLACE: tl.constexpr):
    # Of two codes of a word, as BF16 bits: nothing is cut off.
    low = decode_e2m1((codes >> PLACE) & 15) * scale
    high = decode_e2m1((codes >> (PLACE + 4)) & 15) * scale
    return ((bits(low) >> 16) & 0xFFFF) | (bits(high) & -65536)


@triton.jit(do_not_specialize=["total"])
def _decode_kernel(
    codes_ptr, codes_stride, scales_ptr, scales_stride, out_ptr, total, width, FINITE: tl.constexpr,
    WORDS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    first, left = tl.program_id(0).to(tl.int64) * (WORDS // WIDTH), tl.program_id(1) * WIDTH
    token, word = first + tl.arange(0, WORDS) // WIDTH, left + tl.arange(0, WORDS) % WIDTH
    inside = (token < total) & (word < width)
    codes = tl.load(codes_ptr + token * codes_stride + word, inside, 0)
    scale = decode_e4m3(tl.load(scales_ptr + token * scales_stride + word // 2, inside, 0), False)
    if FINITE:
        scale = tl.where(scale == scale, scale, 0.0)
    # Words, not bytes, where another thread stores what one has decoded.
    even = tl.join(_two_values(codes, scale, 0), _two_values(codes, scale, 16))
    odd = tl.join(_two_values(codes, scale, 8), _two_values(codes, scale, 24))
    token, word = first + tl.arange(0, 4 * WORDS) // (4 * WIDTH), 4 * left + tl.arange(0, 4 * WORDS) % (4 * WIDTH)
    inside = (token < total) & (word < 4 * width)
    tl.store(out_ptr + token * (4 * width) + word, tl.reshape(tl.join(even, odd), (4 * WORDS,)), inside)


def decode_nvfp4(payload: NVFP4Rows, *, finite: bool = False) -> Tensor:
    """The numbers that codes and scales stand for, BF16 [T, N, D]: exact, since they have six significant bits.

    A scale of NaN makes its 16 numbers NaN, or, with ``finite``, zero: as E4M3 codes of such tokens are, for a product
    whose tiles reach into the next document and whose NaNs come from elsewhere. The payload may be some heads of one.
    """
    total, heads, half = payload.codes.shape
    out = torch.empty((total, heads, 2 * half), dtype=torch.bfloat16, device=payload.codes.device)
    width = heads * half // 4
    if total and width:
        block = min(_WORDS, triton.next_power_of_2(width))
        words = payload.codes.view(torch.int32)
        _decode_kernel[triton.cdiv(total, _WORDS // block), triton.cdiv(width, block)](
            words, words.stride(0), payload.scales, payload.scales.stride(0), out.view(torch.int32), total, width,
            finite, _WORDS, block, num_warps=4,
        )  # fmt: skip
    return out
