"""Column payloads from row payloads: the transposed codes of tensors that have been quantized without them.

Twin: ``quantize.reference.columns_of``. A program works on one block of 32 tokens of a document and one head, as in
``operands``: its rows are the tokens in the order of the columns.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flamia.launch import head_grid, launch
from flamia.quantize.operands import ORDERS, ROWS
from flamia.worklists import TokenTables


def columns_of(codes: Tensor, tables: TokenTables, order: str) -> Tensor:
    """The columns of an ``E4M3Payload`` with these rows, in one launch.

    Args:
        codes: uint8 [T, N, D], contiguous along D; other strides, and where it begins, are multiples of four bytes.
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
        launch(
            "flamia.quantize.triton_columns:_columns_kernel",
            head_grid(blocks, heads),
            (words, words.stride(0), words.stride(1), tables.blocks, out.view(torch.int32), blocks),
            warps=1,
            D=dim,
            Q=1 << (dim // 4 - 1).bit_length(),
            R=ROWS,
            ORDER=ORDERS[order],
        )
    return out
