"""The last launches of a backward: dq from its FP16 accumulator, dk and dv from FP32 partial sums (paper A.2, A.4).

Twins: ``reference.backward``'s ``finished_dq`` and ``prescale``, ``Chunk.sum_shared``, and the end of
``reference.backend.run_backward``.
"""

# Kernels take pointers and tiles, which have no Python types.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls

from __future__ import annotations

import triton
import triton.language as tl

from flamia.quantize.triton_formats import ceil_log2, hadamard, pow2, round_to
from flamia.quantize.triton_operands import tile_here


@triton.jit
def _sums(base, rows, START: tl.constexpr, R: tl.constexpr, W: tl.constexpr, D: tl.constexpr, FRAGMENTS: tl.constexpr):
    """Columns START ... START + W of a tile of R rows at base, FP32 [R, W]; rows: how many there are."""
    if FRAGMENTS:
        # In memory: slab, 16 channels, row % 8, channel pair, 8 channels, row half, channel. Every read is 16 bytes. A
        # warp reads a slab, 16 channels at a time, so that only the channel pairs of a row are in different threads.
        i = tl.arange(0, R * W)
        channels, slab, rest = i // (16 * R), i // 256 % (R // 16), i % 256
        place = slab * (16 * D) + START * 16 + channels * 256 + rest
        x = tl.load(base + place, slab * 16 < rows, 0.0).to(tl.float32)
        x = tl.reshape(x, (W // 16, R // 16, 8, 4, 2, 2, 2))
        return tl.reshape(tl.permute(x, (1, 5, 2, 0, 4, 3, 6)), (R, W))
    else:
        row, channel = tl.arange(0, R)[:, None], tl.arange(0, W)[None, :]
        return tl.load(base + row * D + START + channel, row < rows, 0.0).to(tl.float32)


@triton.jit
def _document_exponent(
    maxima_ptr, k_maxima_ptr, v_maxima_ptr, cu_k_ptr, head, document, known, documents, lost_base, lost_slope,
    heads, ratio, TARGET: tl.constexpr,
):  # fmt: skip
    """``reference.backward.prescale`` of documents under the sequence scale; loads where ``known``."""
    norm = tl.load(maxima_ptr + head * documents + document, known, 0.0)
    loss = tl.load(maxima_ptr + (heads + head) * documents + document, known, 0.0)
    shared = head // ratio * documents + document
    v_top = tl.load(v_maxima_ptr + shared, known, 0.0)
    k_top = tl.load(k_maxima_ptr + shared, known, 0.0)
    keys = tl.load(cu_k_ptr + document + 1, known, 0) - tl.load(cu_k_ptr + document, known, 0)
    weight = lost_base + keys.to(tl.float32) * lost_slope
    p = TARGET - ceil_log2((norm * v_top * weight + loss * weight) * k_top)
    return tl.minimum(tl.maximum(p, -126), 126)


@triton.jit(
    do_not_specialize=["documents", "lost_base", "lost_slope", "heads", "ratio"],
    do_not_specialize_on_alignment=["maxima_ptr", "k_maxima_ptr", "v_maxima_ptr", "cu_k_ptr"],
)
def _prescale_kernel(
    maxima_ptr, k_maxima_ptr, v_maxima_ptr, cu_k_ptr, out_ptr, documents, lost_base, lost_slope,
    heads, ratio, TARGET: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1)
    document = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    known = document < documents
    p = _document_exponent(
        maxima_ptr, k_maxima_ptr, v_maxima_ptr, cu_k_ptr, head, document, known, documents, lost_base, lost_slope,
        heads, ratio, TARGET,
    )  # fmt: skip
    tl.store(out_ptr + head * documents + document, p, known)


@triton.jit(
    do_not_specialize=[
        "total", "capacity_blocks", "documents", "softmax_scale", "lost_base", "lost_slope", "heads", "ratio"
    ],
    do_not_specialize_on_alignment=["maxima_ptr", "k_maxima_ptr", "v_maxima_ptr", "cu_k_ptr"],
)  # fmt: skip
def _dq_kernel(
    accumulator_ptr, blocks_ptr, prescale_ptr, maxima_ptr, k_maxima_ptr, v_maxima_ptr, cu_k_ptr, dq_ptr, dq_token,
    dq_head, total, capacity_blocks, documents, softmax_scale, lost_base, lost_slope,
    heads, ratio, D: tl.constexpr, W: tl.constexpr, R: tl.constexpr,
    ROTATE: tl.constexpr, SCALED: tl.constexpr, CAUSAL: tl.constexpr, TARGET: tl.constexpr, FRAGMENTS: tl.constexpr,
):  # fmt: skip
    head, tile = tl.program_id(0), tile_here()
    if tile * (R // 32) >= capacity_blocks:
        return
    r = tl.arange(0, R)
    d = tl.arange(0, W)
    block = tile * (R // 32) + r // 32
    exists = block < capacity_blocks
    first = tl.load(blocks_ptr + block * 4, exists, 0)
    written = r % 32 < tl.load(blocks_ptr + block * 4 + 2, exists, 0)
    token = first + r % 32
    scale = tl.zeros((R,), tl.float32) + softmax_scale
    if SCALED:
        if CAUSAL:
            p = tl.load(prescale_ptr + head.to(tl.int64) * total + token, written, 0)
        else:
            document = tl.load(blocks_ptr + block * 4 + 3, exists, -1)
            known = document >= 0
            p = _document_exponent(
                maxima_ptr, k_maxima_ptr, v_maxima_ptr, cu_k_ptr, head, document, known, documents, lost_base,
                lost_slope, heads, ratio, TARGET,
            )  # fmt: skip
        scale = pow2(-p) * softmax_scale
    mask, scale = written[:, None], scale[:, None]
    inside = capacity_blocks * 32 - tile * R
    base = accumulator_ptr + (head * capacity_blocks.to(tl.int64) * 32 + tile.to(tl.int64) * R) * D
    x0 = _sums(base, inside, 0, R, W, D, FRAGMENTS) * scale
    x1 = _sums(base, inside, W, R, W, D, FRAGMENTS) * scale
    x2 = tl.zeros((R, W), tl.float32)
    x3 = x2
    if D > 2 * W:
        x2 = _sums(base, inside, 2 * W, R, W, D, FRAGMENTS) * scale
    if D > 3 * W:
        x3 = _sums(base, inside, 3 * W, R, W, D, FRAGMENTS) * scale
    if ROTATE:
        x0, x1, x2, x3 = hadamard(x0, x1, x2, x3, R, W, D, D <= 128)
    out = dq_ptr + head.to(tl.int64) * dq_head + token.to(tl.int64)[:, None] * dq_token + d[None, :]
    _store(out, x0, x1, x2, x3, mask, W, D)


@triton.jit
def _store(out, x0, x1, x2, x3, mask, W: tl.constexpr, D: tl.constexpr):
    kind: tl.constexpr = out.dtype.element_ty
    tl.store(out, round_to(x0, kind), mask)
    tl.store(out + W, round_to(x1, kind), mask)
    if D > 2 * W:
        tl.store(out + 2 * W, round_to(x2, kind), mask)
    if D > 3 * W:
        tl.store(out + 3 * W, round_to(x3, kind), mask)


@triton.jit
def _summed(pointer, mask, scale, RATIO: tl.constexpr, STRIDE: tl.constexpr):
    total = tl.load(pointer, mask, 0.0) * scale
    for i in tl.static_range(1, RATIO):
        total = total + tl.load(pointer + i * STRIDE, mask, 0.0) * scale
    return total


@triton.jit(do_not_specialize=["total", "softmax_scale"])
def _dk_dv_kernel(
    dk_sums_ptr, dv_sums_ptr, dk_ptr, dk_token, dk_head, dv_ptr, dv_token, dv_head, total, softmax_scale,
    HEADS: tl.constexpr, RATIO: tl.constexpr, D: tl.constexpr, W: tl.constexpr, R: tl.constexpr, ROTATE: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0) % HEADS
    token = tl.program_id(0) // HEADS * R + tl.arange(0, R)
    d = tl.arange(0, W)
    mask = (token < total)[:, None]
    wide = token.to(tl.int64)[:, None]
    source = wide * (HEADS * RATIO * D) + head * (RATIO * D) + d[None, :]
    x2 = tl.zeros((R, W), tl.float32)
    x3 = x2
    if tl.program_id(1) == 0:
        sums = dk_sums_ptr + source
        x0 = _summed(sums, mask, softmax_scale, RATIO, D)
        x1 = _summed(sums + W, mask, softmax_scale, RATIO, D)
        if D > 2 * W:
            x2 = _summed(sums + 2 * W, mask, softmax_scale, RATIO, D)
        if D > 3 * W:
            x3 = _summed(sums + 3 * W, mask, softmax_scale, RATIO, D)
        if ROTATE:
            x0, x1, x2, x3 = hadamard(x0, x1, x2, x3, R, W, D, False)
        _store(dk_ptr + head.to(tl.int64) * dk_head + wide * dk_token + d[None, :], x0, x1, x2, x3, mask, W, D)
    else:
        sums = dv_sums_ptr + source
        x0 = _summed(sums, mask, 1.0, RATIO, D)
        x1 = _summed(sums + W, mask, 1.0, RATIO, D)
        if D > 2 * W:
            x2 = _summed(sums + 2 * W, mask, 1.0, RATIO, D)
        if D > 3 * W:
            x3 = _summed(sums + 3 * W, mask, 1.0, RATIO, D)
        _store(dv_ptr + head.to(tl.int64) * dv_head + wide * dv_token + d[None, :], x0, x1, x2, x3, mask, W, D)
