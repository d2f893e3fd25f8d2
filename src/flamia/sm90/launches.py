"""Small launches around the Hopper forward: which documents need its careful kernel, and what no document covers.

Twins: ``bounds.uneven_documents``; the tail of ``reference.folded.forward``, whose lse is natural here.
"""

# Kernels take pointers and tiles, which have no Python types.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from flamia.bounds import FOLD_RANGE
from flamia.worklists import TokenTables

_BLOCKS = 64  # blocks of 32 tokens per program
_TOKENS = 128  # tokens per program
_LN2 = tl.constexpr(math.log(2.0))


@triton.jit(do_not_specialize=["total", "count", "documents"])
def _spread_kernel(exponents_ptr, blocks_ptr, extremes_ptr, total, count, documents, BLOCKS: tl.constexpr):
    head = tl.program_id(1)
    block = tl.program_id(0) * BLOCKS + tl.arange(0, BLOCKS)
    exists = block < count
    first = tl.load(blocks_ptr + block * 4, exists, 0)
    tokens = tl.load(blocks_ptr + block * 4 + 1, exists, 0)
    document = tl.load(blocks_ptr + block * 4 + 3, exists, -1)
    i = tl.arange(0, 32)[None, :]
    inside = i < tokens[:, None]
    e = tl.load(exponents_ptr + head.to(tl.int64) * total + first[:, None] + i, inside, 0).to(tl.int32)
    # Both start at zero: the largest e, and the largest 255 - e.
    target = extremes_ptr + head * documents + document
    tl.atomic_max(target, tl.max(e, 1), document >= 0, sem="relaxed")
    below = tl.max(tl.where(inside, 255 - e, 0), 1)
    tl.atomic_max(target + tl.num_programs(1) * documents, below, document >= 0, sem="relaxed")


def uneven_documents(exponents: Tensor, tables: TokenTables) -> Tensor:
    """uint8 [kv heads, documents]: 1 where V's exponents, UE8M0 [kv heads, Tk], vary by more than ``FOLD_RANGE``."""
    heads, total = exponents.shape
    documents, count = tables.column_starts.shape[0] - 1, tables.blocks.shape[0]
    extremes = torch.zeros((2, heads, documents), dtype=torch.int32, device=exponents.device)
    if count and heads and documents:
        grid = (triton.cdiv(count, _BLOCKS), heads)
        _spread_kernel[grid](exponents, tables.blocks, extremes, total, count, documents, _BLOCKS, num_warps=4)
    return (extremes[0] + extremes[1] > 255 + FOLD_RANGE).view(torch.uint8)


@triton.jit(do_not_specialize=["total", "documents"])
def _finish_kernel(
    o_ptr, lse_ptr, lse2_ptr, m_ptr, cu_ptr, total, documents, D: tl.constexpr, TOKENS: tl.constexpr
):  # fmt: skip
    head, heads = tl.program_id(1), tl.num_programs(1)
    start = tl.program_id(0) * TOKENS
    token = start + tl.arange(0, TOKENS)
    end = tl.load(cu_ptr + documents)
    row = head.to(tl.int64) * total + token
    exists, tail = token < total, (token >= end) & (token < total)
    lse2 = tl.load(lse2_ptr + row, token < end, float("-inf"))
    tl.store(lse_ptr + row, lse2 * _LN2, exists)
    if start + TOKENS > end:
        tl.store(lse2_ptr + row, tl.full((TOKENS,), float("-inf"), tl.float32), tail)
        tl.store(m_ptr + row, tl.zeros((TOKENS,), tl.float32), tail)
        out = o_ptr + (token.to(tl.int64)[:, None] * heads + head) * D + tl.arange(0, D)[None, :]
        tl.store(out, tl.zeros((TOKENS, D), o_ptr.dtype.element_ty), tail[:, None])


def finish_forward(o: Tensor, lse2: Tensor, row_max: Tensor, cu_seqlens_q: Tensor) -> Tensor:
    """lse FP32 [heads, T], natural logarithm; writes the rows of no document: o = 0, lse = lse2 = -inf, row_max = 0.

    o [T, heads, D], lse2 and row_max FP32 [heads, T] as the kernel leaves them, whose rows of no document are unset.
    """
    total, heads, dim = o.shape
    lse = torch.empty_like(lse2)
    if total and heads:
        _finish_kernel[(triton.cdiv(total, _TOKENS), heads)](
            o, lse, lse2, row_max, cu_seqlens_q, total, cu_seqlens_q.shape[0] - 1, dim, _TOKENS, num_warps=4
        )
    return lse
