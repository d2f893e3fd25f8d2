"""Column payloads from row payloads: the transposed codes of tensors that have been quantized without them.

Twin: ``quantize.reference.columns_of``. A program works on one block of 32 tokens of a document and one head, as in
``triton_operands``: its rows are the tokens in the order of the columns.
"""

# Kernels take pointers and tiles, which have no Python types.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from flamia.quantize.triton_formats import column_token
from flamia.quantize.triton_operands import ORDERS, ROWS, store_columns
from flamia.worklists import TokenTables


@triton.jit(do_not_specialize=["capacity_blocks"])
def _columns_kernel(
    codes_ptr, token_stride, head_stride, blocks_ptr, columns_ptr, capacity_blocks,
    HEADS: tl.constexpr, D: tl.constexpr, Q: tl.constexpr, R: tl.constexpr, ORDER: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0) % HEADS
    block = tl.program_id(0) // HEADS
    first, valid = tl.load(blocks_ptr + block * 4), tl.load(blocks_ptr + block * 4 + 1)
    position = column_token(tl.arange(0, R), ORDER)
    token, q = (first + position).to(tl.int64)[:, None], tl.arange(0, Q)[None, :]
    source = codes_ptr + head.to(tl.int64) * head_stride + token * token_stride + q
    words = tl.load(source, (position < valid)[:, None] & (q < D // 4), 0)
    stride = capacity_blocks.to(tl.int64) * (R // 4)
    store_columns(words, columns_ptr + head.to(tl.int64) * D * stride + block * (R // 4), stride, D)


def columns_of(codes: Tensor, tables: TokenTables, order: str) -> Tensor:
    """The columns of an ``E4M3Payload`` with these rows, in one launch.

    Args:
        codes: uint8 [T, N, D], contiguous along D; other strides are multiples of four.
        tables: of the packed row that they belong to.
        order: of ``payloads.COLUMN_ORDERS``.

    Returns:
        uint8 [N, D, C].
    """
    _, heads, dim = codes.shape
    blocks = tables.blocks.shape[0]
    out = codes.new_empty((heads, dim, blocks * ROWS))
    if blocks and heads:
        words = codes.view(torch.int32)
        _columns_kernel[(blocks * heads,)](
            words, words.stride(0), words.stride(1), tables.blocks, out.view(torch.int32), blocks, HEADS=heads, D=dim,
            Q=triton.next_power_of_2(dim // 4), R=ROWS, ORDER=ORDERS[order], num_warps=1,
        )  # fmt: skip
    return out
