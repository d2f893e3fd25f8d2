"""P and dS of 64 keys x 64 queries per warpgroup, in registers: the twin of ``reference.folded``'s backward.

Scores are transposed: a thread holds two keys, g and g + 8 of its warp's sixteen, and ``tile[column in pair, key, group
of 8 queries]``, columns 8j + 2t and 8j + 2t + 1, t = lane % 4. Numbers of queries lie in shared memory so that a thread
reads its sixteen with four loads: ``place``. Blocks are those of 32 queries, two to a tile.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from flamia.sm90.instructions import (
    as_bits,
    as_float,
    exp2,
    max_abs,
    pack_e4m3,
    pack_half,
    permute_bytes,
    raise_to,
    store_matrices,
)
from flamia.sm90.key_work import STEP

STRIDE = 20  # 32-bit words between the numbers of neighbouring thread-columns
# dS 2^-e is computed with an exponent e at most so far below what operands make likely: after rows whose dS is next to
# nothing, the exponent in force would take dP out of FP32's range.
HEADROOM = 80
LOWEST, E4M3_MAX = 28.0, 448.0  # a dS exponent is kept while the scaled maximum lies between, as in the twin


def view(accumulator: cute.Tensor) -> cute.Tensor:
    """An accumulator of 64 columns as [column in pair, row, group of 8 columns]."""
    return cute.make_tensor(accumulator.iterator, cute.make_layout((2, 2, 8)))


def place(query: Any) -> Any:
    """Where the number of query 0 ... 63 of a step lies.

    Thread-column t = query % 8 // 2 reads 16 in a row, from banks of its own.
    """
    return query % 8 // 2 * STRIDE + query // 8 * 2 + query % 2


@cute.jit
def per_query(table: Any, kind: cutlass.Constexpr, column: Any, lane: Any) -> Any:
    """Numbers of the thread's 16 queries, [2, 8], from a column of a table in shared memory; kind: where they begin."""
    numbers = cute.make_rmem_tensor((2, 8), table.element_type)
    cute.autovec_copy(_numbers_at(table, kind, column, lane, 16), numbers)
    return numbers


def loader(table: Any, kind: Any, column: Any, lane: Any) -> Any:
    """A function of k that loads four of what ``per_query`` does, those of columns 2k and 2k + 1."""

    def load(k: int) -> Any:
        numbers = cute.make_rmem_tensor((2, 2), table.element_type)
        cute.autovec_copy(_numbers_at(table, kind + 4 * k, column, lane, 4), numbers)
        return numbers

    return load


def _numbers_at(table: Any, start: Any, column: Any, lane: Any, count: int) -> Any:
    rows = cute.size(table.shape[0])
    source = (table.iterator + (column * rows + start + lane % 4 * STRIDE)).align(16)
    return cute.make_tensor(source, cute.make_layout((2, count // 2)))


def power(e: Int32) -> Float32:
    """2^e, e held to normal FP32 numbers."""
    return as_float((cutlass.min(cutlass.max(e, -126), 127) + 127) << 23)


@cute.jit
def weights(s: cute.Tensor, factor: Any, addends: cute.Tensor) -> None:
    """Scores -> 2^(x - M + e_T - C + 8), in place. factor: per block; addends: [2, 8], of the thread's queries."""
    for j in cutlass.range_constexpr(8):
        for c in cutlass.range_constexpr(2):
            for r in cutlass.range_constexpr(2):
                s[c, r, j] = exp2(s[c, r, j] * factor[j // 4] + addends[c, j])


@cute.jit
def mask(p: cute.Tensor, key: Int32, q0: Int32, shift: Int32, len_k: Int32, left: Int32, right: Int32, masks: Any):
    """Zero for pairs that do not see each other. key: the thread's first; q0: first query of the step."""
    lane = cute.arch.lane_idx()
    for r in cutlass.range_constexpr(2):
        first = Int32(0)
        if const_expr(masks.right):
            first = key + 8 * r - shift - right - q0 - 2 * (lane % 4)
        first = first if key + 8 * r < len_k else Int32(STEP)
        last = key + 8 * r - shift + left - q0 - 2 * (lane % 4)
        for j in cutlass.range_constexpr(8):
            for c in cutlass.range_constexpr(2):
                x = p[c, r, j]
                x = x if 8 * j + c >= first else Float32(0.0)
                if const_expr(masks.left):
                    x = x if 8 * j + c <= last else Float32(0.0)
                p[c, r, j] = x


@cute.jit
def scores_gradient(dp: cute.Tensor, p: cute.Tensor, scale: Any, b: cute.Tensor, b_scale: Float32) -> Any:
    """dP codes -> p (dP scale - B b_scale), in place; returns the largest magnitude of each block in this thread."""
    tops = [Float32(0.0), Float32(0.0)]
    for j in cutlass.range_constexpr(8):
        for c in cutlass.range_constexpr(2):
            less = b[c, j] * b_scale
            for r in cutlass.range_constexpr(2):
                x = p[c, r, j] * (dp[c, r, j] * scale[j // 4] - less)
                dp[c, r, j] = x
                tops[j // 4] = max_abs(tops[j // 4], x)
    return tops


def exact_weights(s: cute.Tensor, row_factor: Any, factors: Any, addends: Any) -> None:
    """Scores -> 2^(x - M) where every token has its own exponent, in place.

    row_factor: 2^e_K of the thread's keys; factors: c 2^e_Q of its queries, addends: -M of them, functions of k that
    load those of columns 2k and 2k + 1: registers are scarce.
    """
    for k in range(4):
        f, m = factors(k), addends(k)
        for i in range(4):
            for r in range(2):
                c, j = i % 2, 2 * k + i // 2
                s[c, r, j] = exp2(s[c, r, j] * row_factor[r] * f[i] + m[i])


def exact_gradient(dp: cute.Tensor, p: cute.Tensor, row_scale: Any, row_v: Any, a: Any, b: Any) -> Any:
    """dP codes -> p row_scale (dP a row_v - b), in place; returns the largest magnitude of each block in this thread.

    row_scale: 2^(e_K - E), row_v: 2^e_V of the thread's keys. a, b: 2^(e_T + e_Q) and B 2^(e_T - C + 8), loaded as in
    ``exact_weights``.
    """
    tops = [Float32(0.0), Float32(0.0)]
    for k in range(4):
        scale, less = a(k), b(k)
        for i in range(4):
            for r in range(2):
                c, j = i % 2, 2 * k + i // 2
                x = p[c, r, j] * row_scale[r] * (dp[c, r, j] * scale[i] * row_v[r] - less[i])
                dp[c, r, j] = x
                tops[j // 4] = max_abs(tops[j // 4], x)
    return tops


@cute.jit
def raise_row_maxima(ds: cute.Tensor, maxima: Any) -> None:
    """Raise ``maxima``, words of shared memory in the order of ``place``, to each query's largest |dS| in this warp."""
    lane = cute.arch.lane_idx()
    tops = [max_abs(max_abs(Float32(0.0), ds[i % 2, 0, i // 2]), ds[i % 2, 1, i // 2]) for i in range(16)]
    # Eight threads hold the same queries: each stage sends half of them away, and two are left.
    for stage in cutlass.range_constexpr(3):
        upper = lane & (16 >> stage) != 0
        half = len(tops) // 2
        kept = [tops[half + i] if upper else tops[i] for i in range(half)]
        sent = [tops[i] if upper else tops[half + i] for i in range(half)]
        tops = [cute.arch.fmax(kept[i], cute.arch.shuffle_sync_bfly(sent[i], 16 >> stage)) for i in range(half)]
    first = lane % 4 * STRIDE + (lane & 16) // 2 + (lane & 8) // 2 + (lane & 4) // 2
    for i in cutlass.range_constexpr(2):
        raise_to(maxima + (first + i), as_bits(tops[i]))


@cute.jit
def row_exponent(top: Int32, e: Int32) -> Int32:
    """Exponent, relative to e, of a query whose largest |dS 2^-e| has these bits."""
    return cutlass.max(_own_exponent(as_float(top)), -126 - e)


def row_codes(s: cute.Tensor, tops: Any, e: Int32, words: cute.Tensor) -> None:
    """``codes`` of dS 2^-e with an exponent per query; tops: bits of their largest magnitudes, loaded as above."""

    def factors(k: int) -> Any:
        top = tops(k)
        return [power(-row_exponent(top[i], e)) for i in range(4)]

    column_codes(s, factors, words)


def column_codes(s: cute.Tensor, factors: Any, words: cute.Tensor) -> None:
    """``codes`` of s times a factor per query, loaded as above."""
    for k in range(4):
        f, j = factors(k), 2 * k
        for r in range(2):
            words[r + 2 * k] = pack_e4m3(
                s[0, r, j] * f[0], s[1, r, j] * f[1], s[0, r, j + 1] * f[2], s[1, r, j + 1] * f[3]
            )


@cute.jit
def codes(s: cute.Tensor, words: cute.Tensor) -> None:
    """E4M3 register operand, as 32-bit words, whose contraction runs along queries in "mma" order."""
    for r in cutlass.range_constexpr(2):
        for k in cutlass.range_constexpr(4):
            j = 2 * k
            words[r + 2 * k] = pack_e4m3(s[0, r, j], s[1, r, j], s[0, r, j + 1], s[1, r, j + 1])


@cute.jit
def scaled_codes(s: cute.Tensor, factors: Any, words: cute.Tensor) -> None:
    """``codes`` of s times a factor per block."""
    for r in cutlass.range_constexpr(2):
        for k in cutlass.range_constexpr(4):
            j, f = 2 * k, factors[k // 2]
            words[r + 2 * k] = pack_e4m3(s[0, r, j] * f, s[1, r, j] * f, s[0, r, j + 1] * f, s[1, r, j + 1] * f)


@cute.jit
def store_codes(words: cute.Tensor, address: Int32) -> None:
    """Words of ``codes`` -> dS [64 queries, 128 keys] in shared memory, keys in "pairs" order.

    address: of this lane's query and this warp's 16 keys; queries 32 further on lie 4096 bytes behind.
    """
    for half in cutlass.range_constexpr(2):
        four = []
        for k in cutlass.range_constexpr(2):
            low, high = words[4 * half + 2 * k], words[4 * half + 2 * k + 1]
            four += [permute_bytes(low, high, 0x5140), permute_bytes(low, high, 0x7362)]
        store_matrices(address + 4096 * half, *four, transposed=True)


@cute.jit
def _own_exponent(top: Float32) -> Int32:
    # formats.e8m0_exponent of a positive number for E4M3, not held to its smallest
    bits = as_bits(top)
    return (bits >> 23) - 135 + (Int32(1) if (bits & 0x7FFFFF) > 0x600000 else Int32(0))


def serves(top: Float32) -> Any:
    """Whether an exponent is kept for a block whose largest magnitude, scaled by it, is top."""
    return (top > LOWEST) & (top <= E4M3_MAX)


@cute.jit
def kept_exponents(tops: Any, e: Int32, held: Int32, known: Int32) -> Any:
    """Exponents of the two blocks of a step, and for dK that of both.

    tops: largest |dS 2^-e| of each block over all keys of the tile. held: the exponent in force; known: 0 while it is a
    guess because no gradient has been seen. Returns (first, second, both, known).
    """
    one, two = tops
    serves_one = known != 0 and serves(one * power(e - held))
    first = held if one == 0.0 or serves_one else cutlass.max(e + _own_exponent(one), -126)
    seen = known if one == 0.0 else Int32(1)
    scaled = two * power(e - first)
    second = first if two == 0.0 or (seen != 0 and serves(scaled)) else cutlass.max(e + _own_exponent(two), -126)
    seen = seen if two == 0.0 else Int32(1)
    both = second if one == 0.0 else cutlass.max(first, second)
    return first, second, both, seen


@cute.jit
def pack_dq(first: cute.Tensor, second: cute.Tensor, scale: Any) -> Any:
    """dQ of a warp's 16 queries and its warpgroup's channels: both halves of the keys in one scale, FP16.

    first, second: accumulators over 64 keys each; scale: per half of the keys and row of the thread. Returns 32-bit
    words [4, channels / 16] in ``fragment_order``.
    """
    groups = cute.size(first) // 4
    parts = [cute.make_tensor(x.iterator, cute.make_layout((2, 2, groups))) for x in (first, second)]
    packed = cute.make_rmem_tensor((4, groups // 2), Int32)
    for k in cutlass.range_constexpr(groups // 2):
        for i in cutlass.range_constexpr(4):
            r, g = i % 2, 2 * k + i // 2
            low, high = (parts[0][c, r, g] * scale[0][r] + parts[1][c, r, g] * scale[1][r] for c in range(2))
            packed[i, k] = pack_half(low, high, "f16")
    return packed


@cute.jit
def rotate_back(x: cute.Tensor) -> None:
    """``formats.hadamard`` of the rows of an accumulator [2, 2, 8, D / 64] spread over a quad, in place."""
    lane = cute.arch.lane_idx()
    halves = cute.size(x.shape[3])
    signs = [Float32(1.0) if lane & (1 << bit) == 0 else Float32(-1.0) for bit in range(2)]
    for r in cutlass.range_constexpr(2):
        for h in cutlass.range_constexpr(halves):
            for j in cutlass.range_constexpr(8):
                x[0, r, j, h], x[1, r, j, h] = x[0, r, j, h] + x[1, r, j, h], x[0, r, j, h] - x[1, r, j, h]
                for bit in cutlass.range_constexpr(2):
                    for c in cutlass.range_constexpr(2):
                        mine = x[c, r, j, h]
                        other = cute.arch.shuffle_sync_bfly(mine, 1 << bit)
                        x[c, r, j, h] = mine * signs[bit] + other  # exact: rounded once, as a sum
            for bit in cutlass.range_constexpr(3):
                for j in cutlass.range_constexpr(8):
                    if const_expr(j & (1 << bit) == 0):
                        for c in cutlass.range_constexpr(2):
                            a, b = x[c, r, j, h], x[c, r, j | 1 << bit, h]
                            x[c, r, j, h], x[c, r, j | 1 << bit, h] = a + b, a - b
        if const_expr(halves == 2):
            for j in cutlass.range_constexpr(8):
                for c in cutlass.range_constexpr(2):
                    a, b = x[c, r, j, 0], x[c, r, j, 1]
                    x[c, r, j, 0], x[c, r, j, 1] = a + b, a - b
        for h in cutlass.range_constexpr(halves):
            for j in cutlass.range_constexpr(8):
                for c in cutlass.range_constexpr(2):
                    x[c, r, j, h] = x[c, r, j, h] * ((64 * halves) ** -0.5)
