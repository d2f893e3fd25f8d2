"""One launch per forward operand: q, k or v read once, every payload of the plan written (paper 3.5.1).

Twins: ``quantize.reference.prepare``, ``token_amax`` and the payload makers. A program works on one block of 32
tokens of a document and one head. Its rows are the tokens in the order of the column payload, so that the transposed
copy is a plain transpose; every statistic is over whole blocks and does not see the order. Small programs, because what
counts is how many of them have loads under way.
"""

# Kernels take pointers and tiles, which have no Python types.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls

from __future__ import annotations

import triton
import triton.language as tl

from flamia.quantize.triton_formats import (
    E2M1_EMAX,
    E2M1_LIMIT,
    E4M3_EMAX,
    E4M3_LIMIT,
    column_token,
    e2m1_words,
    e4m3_words,
    e8m0_exponent,
    eighths,
    eighths_amax,
    hadamard,
    nvfp4_columns,
    nvfp4_rows,
    over_tile,
    pow2,
    quarters,
    tile_amax,
    transpose_bytes,
    widen,
)


@triton.jit
def tile_here():
    """The tile of a program of a ``launch.head_grid``; in the last layer it may be past the last one."""
    return tl.program_id(2) * tl.num_programs(1) + tl.program_id(1)


@triton.jit
def load_chunks(pointer, mask, R: tl.constexpr, W: tl.constexpr, D: tl.constexpr):
    """A tile of BF16 or FP16 rows in chunks; pointer [R, W], or some of its columns, at chunk 0, mask [R, 1]."""
    x0 = tl.load(pointer, mask, 0.0)
    x1 = tl.load(pointer + W, mask, 0.0)
    x2 = tl.zeros(pointer.shape, pointer.dtype.element_ty)
    x3 = x2
    if D > 2 * W:
        x2 = tl.load(pointer + 2 * W, mask, 0.0)
    if D > 3 * W:
        x3 = tl.load(pointer + 3 * W, mask, 0.0)
    return x0, x1, x2, x3


@triton.jit
def _groups(a, b):
    """The chunk, FP32, whose columns are 8 of a and 8 of b [R, P] in turns: [R, 2 P]."""
    R: tl.constexpr = a.shape[0]
    P: tl.constexpr = a.shape[1]
    y = tl.join(tl.reshape(widen(a), (R, P // 8, 8)), tl.reshape(widen(b), (R, P // 8, 8)))
    return tl.reshape(tl.permute(y, (0, 1, 3, 2)), (R, 2 * P))


@triton.jit
def load_groups(pointer, mask, R: tl.constexpr, W: tl.constexpr, D: tl.constexpr):
    """A tile in FP32 chunks; pointer [R, W / 2] at the first 8 of every 16 columns of chunk 0, mask [R, 1].

    A load gives a thread 8 columns, 16 bytes. Two of them side by side are an NVFP4 group, whose maximum, scale and
    words then need no other thread, and the butterfly a stage of shuffles less. The loads of the first halves touch
    every sector: where the compiler keeps two of the others back, the cache has what they want.
    """
    a0, a1, a2, a3 = load_chunks(pointer, mask, R, W, D)
    b0, b1, b2, b3 = load_chunks(pointer + 8, mask, R, W, D)
    return _groups(a0, b0), _groups(a1, b1), _groups(a2, b2), _groups(a3, b3)


@triton.jit
def widen_chunks(x0, x1, x2, x3):
    """Chunks in FP32."""
    return widen(x0), widen(x1), widen(x2), widen(x3)


@triton.jit
def chunk_words(x, R: tl.constexpr, W: tl.constexpr):
    """E4M3 codes of a scaled chunk [R, W], four channels a word: int32 [R, W / 4]."""
    x0, x1, x2, x3 = quarters(x, R, W)
    return e4m3_words(x0, x1, x2, x3)


@triton.jit
def join_chunks(w0, w1, w2, w3, CHUNKS: tl.constexpr):
    """Parts [R, P] of the chunks of a tile side by side: [R, 2 P] or, for three chunks too, [R, 4 P]."""
    R: tl.constexpr = w0.shape[0]
    P: tl.constexpr = w0.shape[1]
    if CHUNKS == 2:
        return tl.reshape(tl.permute(tl.join(w0, w1), (0, 2, 1)), (R, 2 * P))
    else:
        return tl.reshape(tl.permute(tl.join(tl.join(w0, w1), tl.join(w2, w3)), (0, 3, 2, 1)), (R, 4 * P))


@triton.jit
def store_rows(x, pointer, mask, N: tl.constexpr):
    """The first N columns of a tile at pointer [R, 1]; mask [R, 1]."""
    i = tl.arange(0, x.shape[1])[None, :]
    tl.store(pointer + i, x.to(pointer.dtype.element_ty), mask & (i < N))


@triton.jit
def store_chunks(w0, w1, w2, w3, pointer, mask, CHUNKS: tl.constexpr):
    """Parts [R, P] of the chunks of a tile at pointer [R, 1], from the threads that hold them; mask [R, 1].

    Four threads write 32 bytes of a row, which a memory sector is.
    """
    P: tl.constexpr = w0.shape[1]
    pointer += tl.arange(0, P)[None, :]
    tl.store(pointer, w0, mask)
    tl.store(pointer + P, w1, mask)
    if CHUNKS > 2:
        tl.store(pointer + 2 * P, w2, mask)
    if CHUNKS > 3:
        tl.store(pointer + 3 * P, w3, mask)


@triton.jit
def spread(x):
    """x [R] itself. A gather does not keep the layout of x: words move, and what is made of them is stored in place.

    For bytes, which a store would otherwise move as bytes.
    """
    return tl.gather(x, tl.arange(0, x.shape[0]), 0)


@triton.jit
def store_scales(codes, pointer, row, mask, D: tl.constexpr):
    """The D / 16 scale codes, int32, of each row of a tile at pointer, the first one's of ``scale_words``.

    row: elements before each row of a payload with D elements a row, [R, 1]; mask [R, 1].
    """
    R: tl.constexpr = codes.shape[0]
    P: tl.constexpr = codes.shape[1]
    N: tl.constexpr = pointer.dtype.element_ty.primitive_bitwidth // 8
    shift = (tl.arange(0, P) % N * 8)[None, :]
    words = tl.sum(tl.reshape(codes << shift, (R, P // N, N)), 2)
    store_rows(words, pointer + row // (16 * N), mask, D // (16 * N))


@triton.jit
def store_columns(words, pointer, stride, D: tl.constexpr):
    """Transposed copy of the words [R, D / 4] of a tile.

    pointer: int32, at the first channel and position; stride: words between channels, int64.
    """
    R: tl.constexpr = words.shape[0]
    Q: tl.constexpr = words.shape[1]
    even, odd = tl.split(tl.permute(tl.reshape(words, (R // 4, 2, 2, Q)), (3, 0, 1, 2)))
    t0, t2 = tl.split(even)
    t1, t3 = tl.split(odd)
    c0, c1, c2, c3 = transpose_bytes(t0, t1, t2, t3)
    q = tl.arange(0, Q)[:, None]
    mask = 4 * q < D
    pointer += 4 * q * stride + tl.arange(0, R // 4)[None, :]
    tl.store(pointer, c0, mask)
    tl.store(pointer + stride, c1, mask)
    tl.store(pointer + 2 * stride, c2, mask)
    tl.store(pointer + 3 * stride, c3, mask)


@triton.jit
def _store_nvfp4_columns(x, pointer, scale_pointer, words, groups, SHORT: tl.constexpr):
    """NVFP4 along the rows of x [R, P] at the pointers of its first channel; words, groups: elements of a channel."""
    R: tl.constexpr = x.shape[0]
    P: tl.constexpr = x.shape[1]
    codes, scales = nvfp4_columns(x, R, P, SHORT)
    channel = tl.arange(0, P)[:, None]
    tl.store(pointer + channel * words + tl.arange(0, R // 8)[None, :], codes)
    tl.store(scale_pointer + channel * groups + tl.arange(0, R // 16)[None, :], scales.to(tl.uint8))


@triton.jit
def store_nvfp4_columns(
    x0, x1, x2, x3, pointer, scale_pointer, capacity, CHUNKS: tl.constexpr, SHORT: tl.constexpr
):  # fmt: skip
    """NVFP4 along the rows of a tile; the pointers (int32, uint8) at its first channel and position; capacity: C.

    Two chunks at a time have a group for every thread. SHORT: the numbers have at most 11 significant bits.
    """
    W: tl.constexpr = x0.shape[1]
    words, groups = capacity // 8, capacity // 16
    _store_nvfp4_columns(join_chunks(x0, x1, x2, x3, 2), pointer, scale_pointer, words, groups, SHORT)
    pointer += 2 * W * words
    scale_pointer += 2 * W * groups
    if CHUNKS == 3:
        _store_nvfp4_columns(x2, pointer, scale_pointer, words, groups, SHORT)
    if CHUNKS == 4:
        _store_nvfp4_columns(join_chunks(x2, x3, x0, x1, 2), pointer, scale_pointer, words, groups, SHORT)


@triton.jit
def _e2m1_words(x, scale, R: tl.constexpr, W: tl.constexpr, SHORT: tl.constexpr):
    """E2M1 codes of a chunk times scale [R, 1] in words [R, W / 8]."""
    x0, x1, x2, x3, x4, x5, x6, x7 = eighths(x, R, W)
    scale = tl.broadcast_to(scale, (R, W // 8))
    return tl.where(scale != scale, 0, e2m1_words(x0, x1, x2, x3, x4, x5, x6, x7, scale, SHORT))


@triton.jit
def _clear_columns(pointer, stride, C: tl.constexpr, N: tl.constexpr, D: tl.constexpr):
    """Zeros in N elements of each of D <= C channels; pointer: at the first one's; stride: elements from one on."""
    channel = tl.arange(0, C)[:, None]
    zeros = tl.zeros((C, N), pointer.dtype.element_ty)
    tl.store(pointer + channel * stride + tl.arange(0, N)[None, :], zeros, channel < D)


@triton.jit(
    do_not_specialize=["total", "capacity_blocks", "documents", "heads"], do_not_specialize_on_alignment=["maxima_ptr"]
)
def _operand_kernel(
    x_ptr, token_stride, head_stride, blocks_ptr, codes_ptr, exponents_ptr, columns_ptr, rows4_ptr, scales4_ptr,
    columns4_ptr, column_scales4_ptr, tokens4_ptr, token_exponents_ptr, amax_ptr, maxima_ptr,
    total, capacity_blocks, documents, heads,
    D: tl.constexpr, W: tl.constexpr, R: tl.constexpr, ROTATE: tl.constexpr,
    EIGHT: tl.constexpr, PER_TOKEN: tl.constexpr, WITH_COLUMNS: tl.constexpr, ORDER: tl.constexpr,
    ROWS4: tl.constexpr, COLUMNS4: tl.constexpr, TOKENS4: tl.constexpr, MAXIMA: tl.constexpr,
    TOKEN_MAXIMA: tl.constexpr, LEAST: tl.constexpr,
):  # fmt: skip
    CHUNKS: tl.constexpr = D // W
    head, block = tl.program_id(0), tile_here()
    if block >= capacity_blocks:
        return
    first, valid = tl.load(blocks_ptr + block * 4), tl.load(blocks_ptr + block * 4 + 1)
    rows, document = tl.load(blocks_ptr + block * 4 + 2), tl.load(blocks_ptr + block * 4 + 3)
    # Behind the last token there is only padding. E4M3 alone waits for memory, not for instructions.
    if (ROWS4 or COLUMNS4 or TOKENS4) and rows == 0:
        padded = capacity_blocks.to(tl.int64) * R
        place = head.to(tl.int64) * D * padded + block * R
        if EIGHT and WITH_COLUMNS:
            _clear_columns(columns_ptr + place // 4, padded // 4, 4 * W, R // 4, D)
        if COLUMNS4:
            _clear_columns(columns4_ptr + place // 8, padded // 8, 4 * W, R // 8, D)
            _clear_columns(column_scales4_ptr + place // 16, padded // 16, 4 * W, R // 16, D)
        return

    position = column_token(tl.arange(0, R), ORDER)
    token = first + position
    inside, written = position < valid, position < rows
    row_mask = written[:, None]
    capacity = capacity_blocks.to(tl.int64) * 32

    source = x_ptr + head.to(tl.int64) * head_stride + token.to(tl.int64)[:, None] * token_stride
    if ROWS4:
        i = tl.arange(0, W // 2)[None, :]
        source += i // 8 * 16 + i % 8
        x0, x1, x2, x3 = load_groups(source, inside[:, None], R, W, D)
        n0, n1, n2, n3 = x0, x1, x2, x3
    else:
        source += tl.arange(0, W)[None, :]
        n0, n1, n2, n3 = load_chunks(source, inside[:, None], R, W, D)
        x0, x1, x2, x3 = widen_chunks(n0, n1, n2, n3)
    if ROTATE:
        x0, x1, x2, x3 = hadamard(x0, x1, x2, x3, R, W, D)
        n0, n1, n2, n3 = x0, x1, x2, x3

    # Elements before this row in a [T, heads, D] buffer and before this head's channels in a [heads, D, C] one.
    row = token.to(tl.int64)[:, None] * (heads * D) + head * D
    table = head.to(tl.int64) * total + token
    channels = head.to(tl.int64) * D

    if ROWS4:
        m0, m1 = eighths_amax(x0, R, W), eighths_amax(x1, R, W)
        m2, m3 = m0, m1
        if CHUNKS > 2:
            m2, m3 = eighths_amax(x2, R, W), eighths_amax(x3, R, W)
        amax = tl.max(tl.maximum(tl.maximum(m0, m1), tl.maximum(m2, m3)), 1)
    else:
        amax = tile_amax(n0, n1, n2, n3, R)
    if TOKEN_MAXIMA:
        tl.store(amax_ptr + table, amax.to(tl.float32, bitcast=True), written)
    if TOKENS4:
        e = e8m0_exponent(amax, E2M1_EMAX, E2M1_LIMIT)
        # A row of no document holds zero codes and the exponent of zeros, as in the twin.
        tl.store(token_exponents_ptr + table, (spread(e) + 127).to(tl.uint8), written)
        scale = pow2(-e)[:, None]
        w0, w1 = _e2m1_words(x0, scale, R, W, not ROTATE), _e2m1_words(x1, scale, R, W, not ROTATE)
        w2, w3 = w0, w1
        if CHUNKS > 2:
            w2, w3 = _e2m1_words(x2, scale, R, W, not ROTATE), _e2m1_words(x3, scale, R, W, not ROTATE)
        store_rows(join_chunks(w0, w1, w2, w3, CHUNKS), tokens4_ptr + row // 8, row_mask, D // 8)
    if ROWS4:
        w0, s0 = nvfp4_rows(x0, m0, R, W, not ROTATE)
        w1, s1 = nvfp4_rows(x1, m1, R, W, not ROTATE)
        w2, s2, w3, s3 = w0, s0, w1, s1
        if CHUNKS > 2:
            w2, s2 = nvfp4_rows(x2, m2, R, W, not ROTATE)
            w3, s3 = nvfp4_rows(x3, m3, R, W, not ROTATE)
        store_rows(join_chunks(w0, w1, w2, w3, CHUNKS), rows4_ptr + row // 8, row_mask, D // 8)
        store_scales(join_chunks(s0, s1, s2, s3, CHUNKS), scales4_ptr, row, row_mask, D)
    if COLUMNS4:
        codes = columns4_ptr + channels * (capacity // 8) + block * (R // 8)
        scales = column_scales4_ptr + channels * (capacity // 16) + block * (R // 16)
        store_nvfp4_columns(x0, x1, x2, x3, codes, scales, capacity, CHUNKS, not ROTATE)
    if EIGHT:
        e = e8m0_exponent(amax if PER_TOKEN else over_tile(amax), E4M3_EMAX, E4M3_LIMIT)
        e = tl.maximum(e, LEAST)
        stored = spread(e) if PER_TOKEN else e
        tl.store(exponents_ptr + table, tl.where(inside, stored + 127, 0).to(tl.uint8), written)
        scale = pow2(-e)[:, None]
        w0, w1 = chunk_words(x0 * scale, R, W), chunk_words(x1 * scale, R, W)
        w2, w3 = w0, w1
        if CHUNKS > 2:
            w2 = chunk_words(x2 * scale, R, W)
        if CHUNKS > 3:
            w3 = chunk_words(x3 * scale, R, W)
        zero = (e == 128)[:, None]
        w0, w1, w2, w3 = tl.where(zero, 0, w0), tl.where(zero, 0, w1), tl.where(zero, 0, w2), tl.where(zero, 0, w3)
        store_chunks(w0, w1, w2, w3, codes_ptr + row // 4, row_mask, CHUNKS)
        if WITH_COLUMNS:
            words = join_chunks(w0, w1, w2, w3, CHUNKS)
            columns = columns_ptr + channels * (capacity // 4) + block * (R // 4)
            store_columns(words, columns, capacity // 4, D)
    if MAXIMA:
        largest = maxima_ptr + head * documents + document
        tl.atomic_max(largest, tl.max(amax, 0), document >= 0, sem="relaxed")
