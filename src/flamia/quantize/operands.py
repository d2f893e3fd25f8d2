"""One launch per forward operand: q, k or v read once, every payload of the plan written (paper 3.5.1).

Twins: ``quantize.reference.prepare``, ``token_amax`` and the payload makers. A program works on one block of 32
tokens of a document and one head. Its rows are the tokens in the order of the column payload, so that the transposed
copy is a plain transpose; every statistic is over whole blocks and does not see the order. Small programs, because what
counts is how many of them have loads under way.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from flamia.documents import column_capacity
from flamia.formats import MIN_EXPONENT
from flamia.launch import head_grid, launch
from flamia.quantize.payloads import E2M1Tokens, E4M3Payload, NVFP4Columns, NVFP4Rows, Payload, Spec
from flamia.quantize.reference import VALUE_MIN_EXPONENT
from flamia.worklists import TokenTables

ORDERS = {None: 0, "natural": 0, "mma": 1, "pairs": 2}


HEAD_DIMS = (32, 64, 96, 128, 256)


ROWS = 32  # tokens of a tile, a block


def chunk_width(head_dim: int) -> int:
    """Columns of one chunk of a tile (triton_formats, "Tiles")."""
    return {32: 16, 64: 16, 96: 32, 128: 32, 256: 64}[head_dim]


def chunk_warps(head_dim: int) -> int:
    """Warps for which every thread holds 8 columns, 16 bytes, of one row of each chunk."""
    return chunk_width(head_dim) // 8


def group_options(head_dim: int) -> tuple[int, int]:
    """Warps for which every thread holds 16 columns, an NVFP4 group, of one row of each chunk; a thread's registers.

    Registers are limited to what ten programs of 64 threads have: launches wait for memory, and a few spills cost less
    than a program (65,536 tokens of 16 heads on an H200: 196 us with nine, 193 with ten).
    """
    return chunk_width(head_dim) // 16, 96


def scale_words(scales: Tensor) -> Tensor:
    """Row scales [..., D / 16], uint8, as the integers that rows are whole multiples of: int32, or int16."""
    return scales.view(torch.int32 if scales.shape[-1] % 4 == 0 else torch.int16)


def check_tensor(name: str, x: Tensor) -> None:
    """Raise ValueError for a packed tensor that the launches cannot read."""
    if x.dim() != 3 or x.dtype not in (torch.bfloat16, torch.float16):
        raise ValueError(f"{name} must be a BF16 or FP16 tensor [tokens, heads, D], got {x.dtype} {tuple(x.shape)}")
    if x.shape[2] not in HEAD_DIMS:
        raise ValueError(f"{name} has head dimension {x.shape[2]}: the device quantizers take {HEAD_DIMS}")
    if x.shape[2] > 1 and x.stride(2) != 1:
        raise ValueError(f"{name} must be contiguous along the head dimension, got strides {x.stride()}")


def quantize_operand(
    specs: Sequence[Spec],
    x: Tensor,
    tables: TokenTables,
    *,
    rotate: bool,
    per_token: bool,
    maxima: Tensor | None = None,
    token_maxima: bool = False,
) -> tuple[dict[str, Payload], Tensor]:
    """All payloads of one of q, k, v in one launch.

    Args:
        specs: payloads of this tensor, at most one of each kind.
        x: BF16 or FP16 [T, N, D], contiguous along D.
        tables: of its packed row.
        rotate: normalised Hadamard rotation of D first.
        per_token: one exponent per token in E4M3 payloads.
        maxima: FP32 [N, documents] of zeros, to receive max |x| of each document and head; None: not wanted.
        token_maxima: also of each token.

    Returns:
        The payloads by name, and max |x| per token, FP32 [N, T] (empty without ``token_maxima``).

    Raises:
        ValueError: an input or payload that the device quantizers do not make.
    """
    check_tensor("x", x)
    total, heads, dim = x.shape
    documents = tables.column_starts.shape[0] - 1
    capacity = column_capacity(total, documents)
    kinds = {spec.kind: spec for spec in specs}
    supported = (E4M3Payload, NVFP4Rows, NVFP4Columns, E2M1Tokens)
    for spec in specs:
        if spec.kind not in supported or kinds[spec.kind] is not spec or spec.second_level:
            raise ValueError(f"payload {spec} is not made by the device quantizers: use the reference backend")

    def new(*shape: int, dtype: torch.dtype = torch.uint8) -> Tensor:
        return x.new_empty(shape, dtype=dtype)

    empty = new(0)
    eight, rows4 = kinds.get(E4M3Payload), kinds.get(NVFP4Rows)
    columns4, tokens4 = kinds.get(NVFP4Columns), kinds.get(E2M1Tokens)
    made: dict[str, Payload] = {}
    e4m3 = E4M3Payload(empty, empty, empty)
    if eight:
        columns = new(heads, dim, capacity) if eight.columns else new(0)
        made[eight.name] = e4m3 = E4M3Payload(new(total, heads, dim), new(heads, total), columns)
    nv_rows = NVFP4Rows(empty, empty, empty)
    if rows4:
        made[rows4.name] = nv_rows = NVFP4Rows(new(total, heads, dim // 2), new(total, heads, dim // 16), new(0))
    nv_columns = NVFP4Columns(empty, empty, empty)
    if columns4:
        nv_columns = NVFP4Columns(new(heads, dim, capacity // 2), new(heads, dim, capacity // 16), new(0))
        made[columns4.name] = nv_columns
    tokens = E2M1Tokens(empty, empty)
    if tokens4:
        made[tokens4.name] = tokens = E2M1Tokens(new(total, heads, dim // 2), new(heads, total))
    amax = new(heads, total, dtype=torch.float32) if token_maxima else new(0, dtype=torch.float32)
    table = maxima if maxima is not None else amax
    least = VALUE_MIN_EXPONENT if eight and eight.source == "v" else MIN_EXPONENT
    order = ORDERS[eight.columns] if eight and not columns4 else 0
    if eight and columns4 and ORDERS[eight.columns] != 0:
        raise ValueError("permuted E4M3 columns and NVFP4 columns cannot come from one launch")

    warps, registers = group_options(dim) if rows4 else (chunk_warps(dim), 0)
    if capacity and heads:
        launch(
            "flamia.quantize.triton_operands:_operand_kernel",
            head_grid(capacity // ROWS, heads),
            (
                x, x.stride(0), x.stride(1), tables.blocks, e4m3.codes.view(torch.int32), e4m3.exponents,
                e4m3.columns.view(torch.int32), nv_rows.codes.view(torch.int32),
                scale_words(nv_rows.scales), nv_columns.codes.view(torch.int32), nv_columns.scales,
                tokens.codes.view(torch.int32), tokens.exponents,
                amax, table.view(torch.int32), total, capacity // ROWS, documents, heads,
            ),
            warps=warps, registers=registers, D=dim, W=chunk_width(dim), R=ROWS, ROTATE=rotate, EIGHT=eight is not None,
            PER_TOKEN=per_token, WITH_COLUMNS=eight is not None and eight.columns is not None, ORDER=order,
            ROWS4=rows4 is not None, COLUMNS4=columns4 is not None, TOKENS4=tokens4 is not None,
            MAXIMA=maxima is not None, TOKEN_MAXIMA=token_maxima, LEAST=least,
        )  # fmt: skip
    # In the order of the specs, which is that of Payloads.flatten.
    return {spec.name: made[spec.name] for spec in specs}, amax
