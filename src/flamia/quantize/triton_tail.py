"""Last launches of both passes: a natural lse, and zeros where a packed row has tokens of no document.

Twins: the rows of no document in ``reference.forward`` and ``reference.folded``, whose lse is natural here.
"""

# Kernels take pointers and tiles, which have no Python types.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

_TOKENS = 128  # per program
_LN2 = tl.constexpr(math.log(2.0))


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


@triton.jit(do_not_specialize=["total", "documents"])
def _clear_kernel(a_ptr, b_ptr, cu_ptr, total, documents, D: tl.constexpr, TOKENS: tl.constexpr):
    head, heads = tl.program_id(1), tl.num_programs(1)
    start = tl.program_id(0) * TOKENS
    end = tl.load(cu_ptr + documents)
    if start + TOKENS > end:
        token = start + tl.arange(0, TOKENS)
        tail = ((token >= end) & (token < total))[:, None]
        place = (token.to(tl.int64)[:, None] * heads + head) * D + tl.arange(0, D)[None, :]
        tl.store(a_ptr + place, tl.zeros((TOKENS, D), a_ptr.dtype.element_ty), tail)
        tl.store(b_ptr + place, tl.zeros((TOKENS, D), b_ptr.dtype.element_ty), tail)


def clear_tail(a: Tensor, b: Tensor, cu_seqlens: Tensor) -> None:
    """Zeros where a and b, both [T, heads, D], have tokens of no document; cu_seqlens: int32 [documents + 1]."""
    total, heads, dim = a.shape
    if total and heads:
        grid = (triton.cdiv(total, _TOKENS), heads)
        _clear_kernel[grid](a, b, cu_seqlens, total, cu_seqlens.shape[0] - 1, dim, _TOKENS, num_warps=4)
