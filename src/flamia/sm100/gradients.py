"""P and dS of one row of queries and 32 keys: the twin of what ``reference.backward`` does between its products.

P is kept times 2^8, the factor that its operand of dV has (paper B.1), and dS with it.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from flamia.sm100.instructions import as_bits, as_float, exp2, exp2_pair, max_abs, pack_e4m3

BLOCK = 32  # queries, keys that share an exponent
SHIFT = 8  # P times 2^8
ONE = 127  # UE8M0 code of one
LEAST_WEIGHT = -60  # exponents that differ by more are held there

Pairs = list[tuple[Float32, Float32]]


def weights(s: Pairs, factor: Float32, add: Float32, emulated: int) -> Pairs:
    """Scores of a block -> 2^8 P = 2^(s factor + add).

    emulated: of the block's 16 pairs, those that multiply-adds compute; they turn -inf into 2^-127.
    """
    result = []
    for n, pair in enumerate(s):
        x, y = cute.arch.fma_packed_f32x2(pair, (factor, factor), (add, add))
        chosen = (n + 1) * emulated // len(s) > n * emulated // len(s)  # evenly spread
        result.append(exp2_pair(x, y) if chosen else (exp2(x), exp2(y)))
    return result


@cute.jit
def hide(p: list, seen: Int32) -> Any:
    """Weights of a block, zero for keys that the row does not see."""
    zero = Float32(0.0)
    return [
        (x if (seen >> 2 * n) & 1 != 0 else zero, y if (seen >> 2 * n + 1) & 1 != 0 else zero)
        for n, (x, y) in enumerate(p)
    ]


def scores_gradient(dp: Pairs, p: Pairs, factor: Float32, less: Float32) -> Pairs:
    """dP codes -> 2^8 dS = 2^8 P (dP factor - delta); less: -delta."""
    return [
        cute.arch.mul_packed_f32x2(weight, cute.arch.fma_packed_f32x2(pair, (factor, factor), (less, less)))
        for pair, weight in zip(dp, p, strict=True)
    ]


def scaled(x: Pairs, factor: Float32) -> Pairs:
    """All numbers times one factor."""
    return [cute.arch.mul_packed_f32x2(pair, (factor, factor)) for pair in x]


def weighted(x: Pairs, factors: list) -> Pairs:
    """Numbers times a factor each."""
    return [cute.arch.mul_packed_f32x2(pair, factors[2 * n : 2 * n + 2]) for n, pair in enumerate(x)]


def largest(x: Pairs) -> Int32:
    """Bits of the largest magnitude, which as integers are in order."""
    chains = [Float32(0.0)] * 4
    for n, pair in enumerate(x):
        for c in range(2):
            at = 2 * (n % 2) + c
            chains[at] = max_abs(chains[at], pair[c])
    return as_bits(cute.arch.fmax(cute.arch.fmax(*chains[:2]), cute.arch.fmax(*chains[2:])))


def exponent(top: Int32) -> Any:
    """UE8M0 code of the exponent of dS, rounded up (``formats.e8m0_exponent``), and what 2^8 dS is multiplied by.

    top: bits of the largest |2^8 dS|; an infinity gets the code of NaN.
    """
    # log2 of E4M3's largest binade is 8, and so is SHIFT
    code = (top + (Int32(0x7FFFFF) - 0x600000) >> 23) - 2 * SHIFT
    code = cutlass.max(code, 1)
    return cutlass.max(code, Int32(top >= 0x7F800000) * 255), as_float((Int32(2 * ONE - SHIFT) - code) << 23)


def relative(e: Int32, top: Int32) -> Float32:
    """2^(e - top) of two UE8M0 codes."""
    return as_float((cutlass.max(e - top, LEAST_WEIGHT) + ONE) << 23)


def codes(x: Pairs) -> list[Int32]:
    """E4M3 codes, four to a word."""
    return [pack_e4m3(*x[n], *x[n + 1]) for n in range(0, len(x), 2)]


def pairs(x: list) -> Pairs:
    """Neighbours of a flat list."""
    return [(x[n], x[n + 1]) for n in range(0, len(x), 2)]


def rotate_back(x: list) -> list:
    """``formats.hadamard`` of one row."""
    count, stride = len(x), 1
    while stride < count:
        x = [x[n ^ stride] - x[n] if n & stride else x[n] + x[n | stride] for n in range(count)]
        stride *= 2
    return [value * count**-0.5 for value in x]
