"""One launch per forward operand: q, k or v read once, every payload of the plan written (paper 3.5.1).

Twins: ``quantize.reference.prepare``, ``token_amax`` and the payload makers. A program works on 64 consecutive
positions of the padded column layout of one head, two blocks of 32 tokens that may belong to two documents. Its rows
are the tokens in the order of the column payload, so that the transposed copy is a plain transpose; every statistic is
over whole blocks and does not see the order.
"""

# Kernels take pointers and tiles, which have no Python types.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from flamia.documents import column_capacity
from flamia.formats import MIN_EXPONENT
from flamia.quantize.payloads import E2M1Tokens, E4M3Payload, NVFP4Columns, NVFP4Rows, Payload, Spec
from flamia.quantize.reference import VALUE_MIN_EXPONENT
from flamia.quantize.triton_formats import (
    E2M1_EMAX,
    E2M1_LIMIT,
    E4M3_EMAX,
    E4M3_LIMIT,
    EXACT,
    column_token,
    e4m3_words,
    e8m0_exponent,
    encode_e2m1,
    hadamard,
    nvfp4,
    over_blocks,
    pow2,
    quarters,
    tile_amax,
    transpose_bytes,
)
from flamia.worklists import TokenTables

ORDERS = {None: 0, "natural": 0, "mma": 1, "pairs": 2}
HEAD_DIMS = (32, 64, 96, 128, 256)
ROWS = 64  # positions per program
WARPS = 4  # per program of up to 128 channels


def chunk_width(head_dim: int) -> int:
    """Columns of one chunk of a tile (triton_formats, "Tiles")."""
    return {32: 16, 64: 16, 96: 32, 128: 32, 256: 64}[head_dim]


@triton.jit
def load_chunks(pointer, mask, R: tl.constexpr, W: tl.constexpr, D: tl.constexpr):
    """A tile of BF16 or FP16 rows in FP32 chunks; pointer [R, W] at chunk 0, mask [R, 1]."""
    x0 = tl.load(pointer, mask, 0.0).to(tl.float32)
    x1 = tl.load(pointer + W, mask, 0.0).to(tl.float32)
    x2 = tl.zeros((R, W), tl.float32)
    x3 = x2
    if D > 2 * W:
        x2 = tl.load(pointer + 2 * W, mask, 0.0).to(tl.float32)
    if D > 3 * W:
        x3 = tl.load(pointer + 3 * W, mask, 0.0).to(tl.float32)
    return x0, x1, x2, x3


@triton.jit
def chunk_words(x, R: tl.constexpr, W: tl.constexpr):
    """E4M3 codes of a scaled chunk [R, W], four channels a word: int32 [R, W / 4]."""
    x0, x1, x2, x3 = quarters(x, R, W)
    return e4m3_words(x0, x1, x2, x3)


@triton.jit
def tile_words(w0, w1, w2, w3, R: tl.constexpr, W: tl.constexpr, D: tl.constexpr):
    """Words of all chunks, int32 [R, D / 4] (32 of them at D = 96)."""
    if D == 2 * W:
        return tl.reshape(tl.permute(tl.join(w0, w1), (0, 2, 1)), (R, W // 2))
    else:
        words = tl.permute(tl.join(tl.join(w0, w1), tl.join(w2, w3)), (0, 3, 2, 1))
        return tl.reshape(words, (R, W))


@triton.jit
def store_rows(words, pointer, mask, D: tl.constexpr):
    """Words [R, D / 4] at pointer [R, 1], int32; mask [R, 1]."""
    q = tl.arange(0, words.shape[1])[None, :]
    tl.store(pointer + q, words, mask & (4 * q < D))


@triton.jit
def store_columns(words, pointer, stride, blocks, D: tl.constexpr):
    """Transposed copy of the words [R, D / 4] of a tile.

    pointer: int32, at the first channel and position; stride: words between channels, int64; blocks: of 32 positions
    that exist from there on.
    """
    R: tl.constexpr = words.shape[0]
    Q: tl.constexpr = words.shape[1]
    even, odd = tl.split(tl.permute(tl.reshape(words, (R // 4, 2, 2, Q)), (3, 0, 1, 2)))
    t0, t2 = tl.split(even)
    t1, t3 = tl.split(odd)
    c0, c1, c2, c3 = transpose_bytes(t0, t1, t2, t3)
    q, r = tl.arange(0, Q)[:, None], tl.arange(0, R // 4)[None, :]
    mask = (r // 8 < blocks) & (4 * q < D)
    pointer += 4 * q * stride + r
    tl.store(pointer, c0, mask)
    tl.store(pointer + stride, c1, mask)
    tl.store(pointer + 2 * stride, c2, mask)
    tl.store(pointer + 3 * stride, c3, mask)


@triton.jit
def pack_rows(codes, R: tl.constexpr, W: tl.constexpr):
    """Codes 0..15 [R, W] -> bytes [R, W / 2], even column low."""
    low, high = tl.split(tl.reshape(codes, (R, W // 2, 2)))
    return (low | (high << 4)).to(tl.uint8)


@triton.jit
def pack_groups(codes, A: tl.constexpr, B: tl.constexpr):
    """Codes 0..15 of groups [16, A, B] -> bytes [A, 8 B], even element low."""
    pairs = tl.permute(tl.reshape(codes, (8, 2, A, B)), (2, 3, 0, 1))
    low, high = tl.split(pairs)
    return tl.reshape((low | (high << 4)).to(tl.uint8), (A, B * 8))


@triton.jit
def nvfp4_row_chunk(x, pointer, scale_pointer, mask, R: tl.constexpr, W: tl.constexpr):
    """NVFP4 along the columns of one chunk [R, W]: bytes at pointer [R, W / 2], scales at scale_pointer [R, W / 16]."""
    codes, scales = nvfp4(tl.permute(tl.reshape(x, (R, W // 16, 16)), (2, 0, 1)))
    tl.store(pointer, pack_groups(codes, R, W // 16), mask)
    tl.store(scale_pointer, scales, mask)


@triton.jit
def nvfp4_column_chunk(x, pointer, scale_pointer, mask, R: tl.constexpr, W: tl.constexpr):
    """NVFP4 along the rows of one chunk [R, W]: bytes at pointer [W, R / 2], scales at scale_pointer [W, R / 16].

    mask: positions to write [1, R / 32].
    """
    codes, scales = nvfp4(tl.permute(tl.reshape(x, (R // 16, 16, W)), (1, 2, 0)))
    wide = tl.reshape(tl.broadcast_to(mask[:, :, None], (1, R // 32, 16)), (1, R // 2))
    tl.store(pointer, pack_groups(codes, W, R // 16), wide)
    few = tl.reshape(tl.broadcast_to(mask[:, :, None], (1, R // 32, 2)), (1, R // 16))
    tl.store(scale_pointer, scales, few)


@triton.jit
def e2m1_row_chunk(x, scale, pointer, mask, R: tl.constexpr, W: tl.constexpr):
    """E2M1 codes of x times scale [R, 1], packed, at pointer [R, W / 2]."""
    codes = encode_e2m1(x * scale)
    bad = tl.broadcast_to(scale != scale, (R, W))
    tl.store(pointer, pack_rows(tl.where(bad, 0, codes), R, W), mask)


@triton.jit(do_not_specialize=["total", "capacity_blocks", "documents"], do_not_specialize_on_alignment=["maxima_ptr"])
def _operand_kernel(
    x_ptr, token_stride, head_stride, blocks_ptr, codes_ptr, exponents_ptr, columns_ptr, rows4_ptr, scales4_ptr,
    columns4_ptr, column_scales4_ptr, tokens4_ptr, token_exponents_ptr, amax_ptr, maxima_ptr,
    total, capacity_blocks, documents,
    HEADS: tl.constexpr, D: tl.constexpr, W: tl.constexpr, R: tl.constexpr, ROTATE: tl.constexpr,
    EIGHT: tl.constexpr, PER_TOKEN: tl.constexpr, WITH_COLUMNS: tl.constexpr, ORDER: tl.constexpr,
    ROWS4: tl.constexpr, COLUMNS4: tl.constexpr, TOKENS4: tl.constexpr, AMAX: tl.constexpr, LEAST: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0) % HEADS
    tile = tl.program_id(0) // HEADS
    r = tl.arange(0, R)
    d = tl.arange(0, W)
    block = tile * (R // 32) + r // 32
    block_exists = block < capacity_blocks
    first = tl.load(blocks_ptr + block * 4, block_exists, 0)
    valid = tl.load(blocks_ptr + block * 4 + 1, block_exists, 0)
    rows = tl.load(blocks_ptr + block * 4 + 2, block_exists, 0)
    position = column_token(r % 32, ORDER)
    token = first + position
    inside = position < valid
    written = position < rows
    row_mask = written[:, None]

    pointer = x_ptr + head.to(tl.int64) * head_stride + token.to(tl.int64)[:, None] * token_stride + d[None, :]
    x0, x1, x2, x3 = load_chunks(pointer, inside[:, None], R, W, D)
    if ROTATE:
        x0, x1, x2, x3 = hadamard(x0, x1, x2, x3, R, W, D)

    # Elements before this row in a [T, heads, D] buffer and before this tile in a [heads, D, C] one.
    row = token.to(tl.int64)[:, None] * (HEADS * D) + head * D
    table = head.to(tl.int64) * total + token
    capacity = capacity_blocks.to(tl.int64) * 32
    channel = (head * D + d).to(tl.int64)[:, None]

    amax = tile_amax(x0, x1, x2, x3, R)
    if AMAX:
        tl.store(amax_ptr + table, amax.to(tl.float32, bitcast=True), written)
        top = tl.max(tl.reshape(amax, (R // 32, 32)), 1)
        blocks = tile * (R // 32) + tl.arange(0, R // 32)
        exists = blocks < capacity_blocks
        document = tl.load(blocks_ptr + blocks * 4 + 3, exists, -1)
        tl.atomic_max(maxima_ptr + head * documents + document, top, exists & (document >= 0), sem="relaxed")
    if EIGHT:
        shared = amax if PER_TOKEN else over_blocks(amax, R, 32)
        e = tl.maximum(e8m0_exponent(shared, E4M3_EMAX, E4M3_LIMIT), LEAST)
        code = tl.where(inside, e + 127, 0).to(tl.uint8)
        tl.store(exponents_ptr + table, code, written)
        scale = pow2(-e)[:, None]
        w0, w1 = chunk_words(x0 * scale, R, W), chunk_words(x1 * scale, R, W)
        w2, w3 = w0, w1
        if D > 2 * W:
            w2, w3 = chunk_words(x2 * scale, R, W), chunk_words(x3 * scale, R, W)
        words = tile_words(w0, w1, w2, w3, R, W, D)
        store_rows(words, codes_ptr + row // 4, row_mask, D)
        if WITH_COLUMNS:
            stride = capacity // 4
            columns = columns_ptr + head * D * stride + tile * (R // 4)
            store_columns(words, columns, stride, capacity_blocks - tile * (R // 32), D)
    if TOKENS4:
        e = e8m0_exponent(amax, E2M1_EMAX, E2M1_LIMIT)
        # A row of no document holds zero codes and the exponent of zeros, as in the twin.
        tl.store(token_exponents_ptr + table, (e + 127).to(tl.uint8), written)
        half = tokens4_ptr + row // 2 + tl.arange(0, W // 2)[None, :]
        scale = pow2(-e)[:, None]
        e2m1_row_chunk(x0, scale, half, row_mask, R, W)
        e2m1_row_chunk(x1, scale, half + W // 2, row_mask, R, W)
        if D > 2 * W:
            e2m1_row_chunk(x2, scale, half + W, row_mask, R, W)
        if D > 3 * W:
            e2m1_row_chunk(x3, scale, half + 3 * W // 2, row_mask, R, W)
    if ROWS4:
        half = rows4_ptr + row // 2 + tl.arange(0, W // 2)[None, :]
        scales = scales4_ptr + row // 16 + tl.arange(0, W // 16)[None, :]
        nvfp4_row_chunk(x0, half, scales, row_mask, R, W)
        nvfp4_row_chunk(x1, half + W // 2, scales + W // 16, row_mask, R, W)
        if D > 2 * W:
            nvfp4_row_chunk(x2, half + W, scales + W // 8, row_mask, R, W)
        if D > 3 * W:
            nvfp4_row_chunk(x3, half + 3 * W // 2, scales + 3 * W // 16, row_mask, R, W)
    if COLUMNS4:
        half = columns4_ptr + channel * (capacity // 2) + tile * (R // 2) + tl.arange(0, R // 2)[None, :]
        scales = column_scales4_ptr + channel * (capacity // 16) + tile * (R // 16) + tl.arange(0, R // 16)[None, :]
        mask = (tile * (R // 32) + tl.arange(0, R // 32) < capacity_blocks)[None, :]
        nvfp4_column_chunk(x0, half, scales, mask, R, W)
        nvfp4_column_chunk(x1, half + W * (capacity // 2), scales + W * (capacity // 16), mask, R, W)
        if D > 2 * W:
            nvfp4_column_chunk(x2, half + 2 * W * (capacity // 2), scales + 2 * W * (capacity // 16), mask, R, W)
        if D > 3 * W:
            nvfp4_column_chunk(x3, half + 3 * W * (capacity // 2), scales + 3 * W * (capacity // 16), mask, R, W)


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
) -> tuple[dict[str, Payload], Tensor]:
    """All payloads of one of q, k, v in one launch.

    Args:
        specs: payloads of this tensor, at most one of each kind.
        x: BF16 or FP16 [T, N, D], contiguous along D.
        tables: of its packed row.
        rotate: normalised Hadamard rotation of D first.
        per_token: one exponent per token in E4M3 payloads.
        maxima: FP32 [N, documents] of zeros, to receive max |x| of each document and head; None: not wanted.

    Returns:
        The payloads by name, and max |x| per token, FP32 [N, T] (empty without ``maxima``).

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
    amax = new(heads, total, dtype=torch.float32) if maxima is not None else new(0, dtype=torch.float32)
    table = maxima if maxima is not None else amax
    least = VALUE_MIN_EXPONENT if eight and eight.source == "v" else MIN_EXPONENT
    order = ORDERS[eight.columns] if eight and not columns4 else 0
    if eight and columns4 and ORDERS[eight.columns] != 0:
        raise ValueError("permuted E4M3 columns and NVFP4 columns cannot come from one launch")

    if capacity and heads:
        tiles = triton.cdiv(capacity, ROWS)
        _operand_kernel[(tiles * heads,)](
            x, x.stride(0), x.stride(1), tables.blocks, e4m3.codes.view(torch.int32),
            e4m3.exponents, e4m3.columns.view(torch.int32), nv_rows.codes,
            nv_rows.scales, nv_columns.codes, nv_columns.scales, tokens.codes, tokens.exponents,
            amax, table.view(torch.int32), total, capacity // 32, documents,
            HEADS=heads, D=dim, W=chunk_width(dim), R=ROWS, ROTATE=rotate, EIGHT=eight is not None,
            PER_TOKEN=per_token, WITH_COLUMNS=eight is not None and eight.columns is not None, ORDER=order,
            ROWS4=rows4 is not None, COLUMNS4=columns4 is not None, TOKENS4=tokens4 is not None,
            AMAX=maxima is not None, LEAST=least, num_warps=WARPS if dim <= 128 else 2 * WARPS, **EXACT,
        )  # fmt: skip
    # In the order of the specs, which is that of Payloads.flatten.
    return {spec.name: made[spec.name] for spec in specs}, amax
