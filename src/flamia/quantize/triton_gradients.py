"""The kernels of ``gradients``, which says what they make and names their twins."""

# Kernels take pointers and tiles, which have no Python types.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls

from __future__ import annotations

import triton
import triton.language as tl

from flamia.quantize.triton_formats import (
    E4M3_EMAX,
    E4M3_LIMIT,
    NVFP4_EMAX,
    NVFP4_LIMIT,
    bits,
    ceil_log2,
    column_token,
    e2m1_values,
    e4m3_values,
    e8m0_exponent,
    eighths_amax,
    exp2_exact,
    from_quarters,
    magnitude,
    nvfp4_rows,
    over_tile,
    pow2,
    tile_amax,
    tree_sum,
)
from flamia.quantize.triton_lists import owner_of
from flamia.quantize.triton_operands import (
    chunk_words,
    join_chunks,
    load_chunks,
    spread,
    store_chunks,
    store_columns,
    store_nvfp4_columns,
    store_rows,
    store_scales,
    tile_here,
    widen_chunks,
)


@triton.jit
def _powers(lse2_ptr, row_max_ptr, ratio_ptr, inverse_ptr, valid, GROUP: tl.constexpr):
    """2^(row reference - lse) of a group's rows and its inverse, 0 where a row sees no key.

    Each by one thread: in the steps all threads of a row would repeat the FP64 work.
    """
    i = tl.arange(0, GROUP)
    lse2 = tl.load(lse2_ptr + i, i < valid, float("-inf"))
    reference = tl.load(row_max_ptr + i, i < valid, 0.0)
    unseen = lse2 == float("-inf")
    tl.store(ratio_ptr + i, tl.where(unseen, 0.0, exp2_exact(reference - lse2)), i < valid)
    tl.store(inverse_ptr + i, tl.where(unseen, 0.0, exp2_exact(lse2 - reference)), i < valid)


@triton.jit
def _products(words, back, o, R: tl.constexpr, W: tl.constexpr):
    """Products of the dequantized values of one chunk's words with o."""
    v0, v1, v2, v3 = e4m3_values(words)
    return from_quarters(v0, v1, v2, v3, R, W) * back * o


@triton.jit
def _four(x, amax, scale, o, back, R: tl.constexpr, W: tl.constexpr, SHORT: tl.constexpr):
    """NVFP4 of a chunk times scale [R, 1]: code words [R, W / 8], scale codes [R, W / 16], dequantized values times o.

    amax: ``eighths_amax`` of x.
    """
    largest = magnitude(amax.to(tl.float32, bitcast=True) * scale)
    words, scale_codes = nvfp4_rows(x * scale, largest, R, W, SHORT)
    # A NaN scale decodes to NaN, whatever the codes.
    factor, _, _, _ = e4m3_values(scale_codes)
    values = tl.reshape(e2m1_values(words, R, W), (R, W // 16, 16)) * (factor * 64.0)[:, :, None]
    return words, scale_codes, tl.reshape(values, (R, W)) * back * o


@triton.jit(
    do_not_specialize=[
        "tiles", "total", "total_k", "capacity_blocks", "documents", "right", "lost_base", "lost_slope", "heads",
        "head_ratio",
    ],
    # Tables of some heads of a call begin anywhere.
    do_not_specialize_on_alignment=[
        "lse2_ptr", "row_max_ptr", "dlse_ptr", "q_exponents_ptr", "maxima_ptr", "document_max_ptr", "cu_q_ptr",
        "cu_k_ptr", "k_running_ptr", "v_running_ptr",
    ],
)  # fmt: skip
def _gradient_kernel(
    do_ptr, do_token, do_head, o_ptr, o_token, o_head, lse2_ptr, row_max_ptr, dlse_ptr, q_exponents_ptr, groups_ptr,
    codes_ptr, scales_ptr, exponents_ptr, columns_ptr, column_scales_ptr, document_exponents_ptr, document_max_ptr,
    delta_ptr, norm_ptr, maxima_ptr, prescale_ptr, accumulator_ptr, addend_ptr, unit_ptr, b_ptr, power_ptr,
    cu_q_ptr, cu_k_ptr, k_running_ptr, v_running_ptr, tiles, total, total_k, capacity_blocks, documents, right,
    lost_base, lost_slope, heads, head_ratio, D: tl.constexpr, W: tl.constexpr, R: tl.constexpr,
    FOLDED: tl.constexpr, PER_TOKEN: tl.constexpr, FOUR: tl.constexpr, WITH_COLUMNS: tl.constexpr,
    ORDER: tl.constexpr, DLSE: tl.constexpr, CAUSAL: tl.constexpr, OUTSIDE: tl.constexpr, CLEAR: tl.constexpr,
    TARGET: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    CHUNKS: tl.constexpr = D // W
    head, tile = tl.program_id(0), tile_here()
    if tile >= tiles:
        return
    group = groups_ptr + tile * 6
    first, valid, rows = tl.load(group), tl.load(group + 1), tl.load(group + 2)
    document, column, width = tl.load(group + 3), tl.load(group + 4), tl.load(group + 5)
    capacity = capacity_blocks.to(tl.int64) * 32
    r = tl.arange(0, R)
    channels = head.to(tl.int64) * D
    table = head.to(tl.int64) * total + first
    exists = document >= 0
    if FOUR:
        document_top = tl.load(document_max_ptr + head * documents + document, exists, 0)
        document_e = e8m0_exponent(document_top, NVFP4_EMAX, NVFP4_LIMIT)
        document_scale = pow2(-document_e)
    if CAUSAL:
        query0 = first - tl.load(cu_q_ptr + document, exists, 0)
        length_q = tl.load(cu_q_ptr + document + 1, exists, 0) - tl.load(cu_q_ptr + document, exists, 0)
        key0 = tl.load(cu_k_ptr + document, exists, 0)
        length_k = tl.load(cu_k_ptr + document + 1, exists, 0) - key0
    norm_top = tl.zeros((R,), tl.int32)
    dlse_top = tl.zeros((R,), tl.int32)
    e_top = tl.full((R,), -1000, tl.int32)

    d_row = tl.arange(0, W)[None, :]
    order = column_token(r, ORDER)
    start = (first + order).to(tl.int64)[:, None]
    do_source = do_ptr + head.to(tl.int64) * do_head + start * do_token + d_row
    o_source = o_ptr + head.to(tl.int64) * o_head + start * o_token + d_row
    n0, n1, n2, n3 = load_chunks(do_source, (order < valid)[:, None], R, W, D)
    if FOLDED:
        # These wait where b and the addends go in the end.
        _powers(lse2_ptr + table, row_max_ptr + table, b_ptr + table, addend_ptr + table, valid, GROUP)
        tl.debug_barrier()
        next_ratio = tl.load(b_ptr + table + order, order < valid, 0.0)
    for step in range(0, width, R):
        position = step + order
        token = first + position
        inside = position < valid
        written = position < rows
        row_mask = written[:, None]
        o0, o1, o2, o3 = load_chunks(o_source, inside[:, None], R, W, D)
        x0, x1, x2, x3 = widen_chunks(n0, n1, n2, n3)
        # The next step's rows are on their way while this one is worked on.
        do_source += R * do_token
        o_source += R * o_token
        n0, n1, n2, n3 = load_chunks(do_source, (position + R < valid)[:, None], R, W, D)
        norm = tree_sum(tl.abs(x0), tl.abs(x1), tl.abs(x2), tl.abs(x3), R, W, D)
        tl.store(norm_ptr + table + position, norm, written)
        norm_top = tl.maximum(norm_top, bits(norm))
        if FOLDED:
            ratio = next_ratio
            next_ratio = tl.load(b_ptr + table + position + R, position + R < valid, 0.0)
            inverse = tl.load(addend_ptr + table + position, inside, 0.0)
            x0, x1 = x0 * ratio[:, None], x1 * ratio[:, None]
            x2, x3 = x2 * ratio[:, None], x3 * ratio[:, None]
        if FOUR:
            m0, m1 = eighths_amax(x0, R, W), eighths_amax(x1, R, W)
            m2, m3 = m0, m1
            if CHUNKS > 2:
                m2, m3 = eighths_amax(x2, R, W), eighths_amax(x3, R, W)
            amax = tl.max(tl.maximum(tl.maximum(m0, m1), tl.maximum(m2, m3)), 1)
        else:
            amax = tile_amax(x0, x1, x2, x3, R)

        row = token.to(tl.int64)[:, None] * (heads * D) + head * D
        place = column + step
        if FOUR:
            e = e8m0_exponent(amax, NVFP4_EMAX, NVFP4_LIMIT)
            tl.store(exponents_ptr + table + position, (spread(e) + 127).to(tl.uint8), written)
            scale, back = pow2(-e)[:, None], pow2(e)[:, None]
            w0, s0, p0 = _four(x0, m0, scale, o0, back, R, W, not FOLDED)
            w1, s1, p1 = _four(x1, m1, scale, o1, back, R, W, not FOLDED)
            w2, s2, p2, w3, s3, p3 = w0, s0, x2, w1, s1, x3
            if CHUNKS > 2:
                w2, s2, p2 = _four(x2, m2, scale, o2, back, R, W, not FOLDED)
                w3, s3, p3 = _four(x3, m3, scale, o3, back, R, W, not FOLDED)
            store_rows(join_chunks(w0, w1, w2, w3, CHUNKS), codes_ptr + row // 8, row_mask, D // 8)
            store_scales(join_chunks(s0, s1, s2, s3, CHUNKS), scales_ptr, row, row_mask, D)
            codes = columns_ptr + channels * (capacity // 8) + place // 8
            scales = column_scales_ptr + channels * (capacity // 16) + place // 16
            store_nvfp4_columns(
                x0 * document_scale, x1 * document_scale, x2 * document_scale, x3 * document_scale, codes, scales,
                capacity, CHUNKS, not FOLDED,
            )  # fmt: skip
        else:
            e = e8m0_exponent(amax if PER_TOKEN else over_tile(amax), E4M3_EMAX, E4M3_LIMIT)
            stored = spread(e) if PER_TOKEN else e
            tl.store(exponents_ptr + table + position, tl.where(inside, stored + 127, 0).to(tl.uint8), written)
            scale, back = pow2(-e)[:, None], pow2(e)[:, None]
            w0, w1 = chunk_words(x0 * scale, R, W), chunk_words(x1 * scale, R, W)
            p0, p1 = _products(w0, back, o0, R, W), _products(w1, back, o1, R, W)
            w2, w3, p2, p3 = w0, w1, x2, x3
            if CHUNKS > 2:
                w2 = chunk_words(x2 * scale, R, W)
                p2 = _products(w2, back, o2, R, W)
            if CHUNKS > 3:
                w3 = chunk_words(x3 * scale, R, W)
                p3 = _products(w3, back, o3, R, W)
            zero = (e == 128)[:, None]
            w0, w1, w2, w3 = tl.where(zero, 0, w0), tl.where(zero, 0, w1), tl.where(zero, 0, w2), tl.where(zero, 0, w3)
            store_chunks(w0, w1, w2, w3, codes_ptr + row // 4, row_mask, CHUNKS)
            if WITH_COLUMNS:
                words = join_chunks(w0, w1, w2, w3, CHUNKS)
                store_columns(words, columns_ptr + channels * (capacity // 4) + place // 4, capacity // 4, D)

        delta = tree_sum(p0, p1, p2, p3, R, W, D)
        if FOLDED:
            delta = delta * inverse
        loss = tl.zeros((R,), tl.float32)
        if DLSE:
            # lse is the constant -inf where a row sees no key: whatever gradient arrives there is dropped.
            unseen = tl.load(lse2_ptr + table + position, inside, float("-inf")) == float("-inf")
            loss = tl.where(unseen, 0.0, tl.load(dlse_ptr + table + position, inside, 0.0))
            delta = delta - loss
            dlse_top = tl.maximum(dlse_top, magnitude(loss))
        tl.store(delta_ptr + table + position, delta, written)
        if FOLDED:
            # A token's codes are all zeros only if its largest element is: that one rounds up from 2^-10.
            largest = amax.to(tl.float32, bitcast=True) * pow2(-e)
            nonzero = inside & ((largest > 0.0009765625) | (largest != largest))
            e = tl.where(nonzero, e, -1000)
            e_top = tl.maximum(e_top, e)
            tl.store(unit_ptr + table + position, e, written)
            tl.store(b_ptr + table + position, delta * ratio, written)
        if CAUSAL:
            last = tl.maximum(tl.minimum(length_k - 1, query0 + position + (length_k - length_q) + right), 0)
            source = (head // head_ratio).to(tl.int64) * total_k + key0 + last
            known = inside & (last < length_k)
            v_top = tl.load(v_running_ptr + source, known, 0.0)
            k_top = tl.load(k_running_ptr + source, known, 0.0)
            weight = lost_base + (last + 1).to(tl.float32) * lost_slope
            p = TARGET - ceil_log2((norm * v_top * weight + tl.abs(loss) * weight) * k_top)
            tl.store(prescale_ptr + table + position, tl.minimum(tl.maximum(p, -126), 126), written)
        if CLEAR:
            zero = tl.zeros((R, W), accumulator_ptr.dtype.element_ty)
            spot = accumulator_ptr + (head * capacity + place + r)[:, None] * D + d_row
            tl.store(spot, zero)
            tl.store(spot + W, zero)
            if D > 2 * W:
                tl.store(spot + 2 * W, zero)
            if D > 3 * W:
                tl.store(spot + 3 * W, zero)

    # The document's first group writes its exponent (an empty document has none and keeps the zeros').
    if FOUR:  # noqa: SIM102 (compile time and run time)
        if exists & (first == tl.load(cu_q_ptr + document, exists, -1)):
            tl.store(document_exponents_ptr + head * documents + document, (document_e + 127).to(tl.uint8))
    if exists:
        tl.atomic_max(maxima_ptr + head * documents + document, tl.max(norm_top, 0), sem="relaxed")
        if DLSE:
            tl.atomic_max(maxima_ptr + (heads + head) * documents + document, tl.max(dlse_top, 0), sem="relaxed")
    if FOLDED:
        tl.debug_barrier()  # what other threads of this program stored above is read below
        top = tl.max(e_top, 0)
        c = tl.where(top == -1000, 0, top)
        position = tl.arange(0, GROUP)
        mask = position < rows
        e = tl.load(unit_ptr + table + position, mask, -1000)
        delta = tl.load(delta_ptr + table + position, mask, 0.0)
        product = tl.load(b_ptr + table + position, mask, 0.0)
        reference = tl.load(row_max_ptr + table + position, mask & (position < valid), 0.0)
        e_q = tl.load(q_exponents_ptr + table + position, mask, 0).to(tl.int32) - 127
        live = (e != -1000) | (delta != 0.0)
        e = tl.where(e == -1000, c, e)
        unit = c - 8 + e_q
        shift = tl.where(live, e - c, 0) + 8
        addend = -reference if OUTSIDE else shift.to(tl.float32) - reference
        tl.store(addend_ptr + table + position, tl.where(live, addend, float("-inf")), mask)
        # Through FP64: the power may pass FP32's range where T varies by more than 2^120.
        power = ((unit - e + 1023).to(tl.int64) << 52).to(tl.float64, bitcast=True)
        b = (product.to(tl.float64) * power).to(tl.float32)
        tl.store(b_ptr + table + position, tl.where(live, b, 0.0), mask)
        tl.store(unit_ptr + table + position, tl.where(live, unit, 0), mask)
        if OUTSIDE:
            tl.store(power_ptr + table + position, shift, mask)


@triton.jit(do_not_specialize=["tiles", "documents"], do_not_specialize_on_alignment=["maxima_ptr"])
def _document_maxima_kernel(
    x_ptr, token_stride, head_stride, groups_ptr, maxima_ptr, tiles, documents,
    D: tl.constexpr, W: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """max |x| of each document and head, as bits: the second level of NVFP4 columns, known before any code is."""
    head, tile = tl.program_id(0), tile_here()
    if tile >= tiles:
        return
    group = groups_ptr + tile * 6
    first, valid, document = tl.load(group), tl.load(group + 1), tl.load(group + 3)
    r, d = tl.arange(0, R), tl.arange(0, W)
    top = tl.zeros((R,), tl.int32)
    for step in range(0, valid, R):
        token = first + step + r
        pointer = x_ptr + head.to(tl.int64) * head_stride + token.to(tl.int64)[:, None] * token_stride + d[None, :]
        x0, x1, x2, x3 = load_chunks(pointer, (step + r < valid)[:, None], R, W, D)
        top = tl.maximum(top, tile_amax(x0, x1, x2, x3, R))
    if document >= 0:
        tl.atomic_max(maxima_ptr + head * documents + document, tl.max(top, 0), sem="relaxed")


@triton.jit
def _largest(a, b):
    return tl.maximum(a, b)


@triton.jit(
    do_not_specialize=["total", "documents", "steps"], do_not_specialize_on_alignment=["cu_ptr", "k_ptr", "v_ptr"]
)
def _running_kernel(cu_ptr, k_ptr, v_ptr, k_out_ptr, v_out_ptr, total, documents, steps, BLOCK: tl.constexpr):
    """Running maxima of both tables [heads, T] from each document's start (paper A.4, the causal scale)."""
    offset = tl.program_id(0).to(tl.int64) * total
    source = (k_ptr if tl.program_id(1) == 0 else v_ptr) + offset
    out = (k_out_ptr if tl.program_id(1) == 0 else v_out_ptr) + offset
    carry = tl.zeros((), tl.int64)
    for first in range(0, total, BLOCK):
        token = first + tl.arange(0, BLOCK)
        mask = token < total
        # Later documents have larger keys, so a plain running maximum starts anew with each of them.
        document = owner_of(cu_ptr, token, documents, steps).to(tl.int64)
        value = magnitude(tl.load(source + token, mask, 0.0)).to(tl.int64)
        keys = tl.maximum(tl.associative_scan((document << 32) | value, 0, _largest), carry)
        tl.store(out + token, (keys & 0x7FFFFFFF).to(tl.int32).to(tl.float32, bitcast=True), mask)
        carry = tl.max(keys, 0)
