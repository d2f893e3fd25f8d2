"""The kernel of ``columns``: codes of rows, transposed.

Twin: ``quantize.reference.columns_of``.
"""

# Kernels take pointers and tiles, which have no Python types.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls

from __future__ import annotations

import triton
import triton.language as tl

from flamia.quantize.triton_formats import column_token
from flamia.quantize.triton_operands import store_columns, tile_here


@triton.jit(do_not_specialize=["capacity_blocks"])
def _columns_kernel(
    codes_ptr, token_stride, head_stride, blocks_ptr, columns_ptr, capacity_blocks,
    D: tl.constexpr, Q: tl.constexpr, R: tl.constexpr, ORDER: tl.constexpr,
):  # fmt: skip
    head, block = tl.program_id(0), tile_here()
    if block >= capacity_blocks:
        return
    first, valid = tl.load(blocks_ptr + block * 4), tl.load(blocks_ptr + block * 4 + 1)
    position = column_token(tl.arange(0, R), ORDER)
    token, q = (first + position).to(tl.int64)[:, None], tl.arange(0, Q)[None, :]
    source = codes_ptr + head.to(tl.int64) * head_stride + token * token_stride + q
    words = tl.load(source, (position < valid)[:, None] & (q < D // 4), 0)
    stride = capacity_blocks.to(tl.int64) * (R // 4)
    store_columns(words, columns_ptr + head.to(tl.int64) * D * stride + block * (R // 4), stride, D)
