"""Last launches of both passes: a natural lse, and zeros where a packed row has tokens of no document.

Twins: the rows of no document in ``reference.forward`` and ``reference.folded``, whose lse is natural here.
"""

# Kernels take pointers and tiles, which have no Python types.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls

from __future__ import annotations

import math

import triton
import triton.language as tl

_LN2 = tl.constexpr(math.log(2.0))


@triton.jit(do_not_specialize=["total", "documents"], do_not_specialize_on_alignment=["cu_ptr"])
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


@triton.jit(do_not_specialize=["total", "documents"], do_not_specialize_on_alignment=["cu_ptr"])
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
