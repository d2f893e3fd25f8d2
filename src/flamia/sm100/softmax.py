"""Softmax of one tile of 128 queries x 128 keys per warpgroup, a row per thread: the twin of ``reference.forward``."""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from flamia.bounds import FOLD_RANGE
from flamia.sm100.instructions import as_float, exp2, exp2_pair, max3, pack_e4m3, sum_codes, unpack_e4m3
from flamia.sm100.work import TILE

BLOCK = 32  # keys that share an exponent
BLOCKS = TILE // BLOCK
LEAST_FACTOR = 2.0**-100  # of codes' products to scores: keeps -inf a score where exponents underflow
FOLD_LIMIT = 120  # exponents of V that differ by more are held there
M, SUM = range(2)  # per-row registers: retained maximum, row sum


@cute.jit
def reset(row: cute.Tensor) -> None:
    """Start a tile of queries: nothing seen yet."""
    row[M], row[SUM] = -Float32.inf, Float32(0.0)


def ones(first: Int32, last: Int32) -> Int32:
    """Bits [first, last) of a word; bounds outside of 0 ... 32 are held there."""
    first, last = (cutlass.min(cutlass.max(x, 0), 32) for x in (first, last))
    # Below n: a shift by 32 gives no zero, so that one is put together.
    first, last = (((Int32(1) << cutlass.min(n, 31)) - 1) | -(n >> 5) for n in (first, last))
    return last & ~first


@cute.jit
def seen_keys(row: Int32, k0: Int32, shift: Int32, len_k: Int32, left: Int32, right: Int32, masks: Any) -> Any:
    """A bit per key k0 ... k0 + 127 that the row sees, a word for every 32. row: query within the document."""
    diagonal = row + shift - k0
    stop = len_k - k0
    if const_expr(masks.right):
        stop = cutlass.min(stop, diagonal + right + 1)
    start = Int32(0)
    if const_expr(masks.left):
        start = diagonal - left
    return [ones(start - BLOCK * b, stop - BLOCK * b) for b in range(BLOCKS)]


@cute.jit
def hide(s: list, seen: Int32) -> Any:
    """Scores of a block, -inf for keys that the row does not see."""
    return [x if (seen >> j) & 1 != 0 else -Float32.inf for j, x in enumerate(s)]


def block_maximum(s: list[Float32]) -> Float32:
    """Largest of 32 scores."""
    chains = [max3(*s[3 * i : 3 * i + 3]) for i in range(4)]
    for i in range(12, BLOCK, 2):
        n = i // 2 % 4
        chains[n] = max3(chains[n], s[i], s[i + 1])
    return cute.arch.fmax(max3(*chains[:3]), chains[3])


@cute.jit
def row_reference(tops: Any, factors: Any, row: cute.Tensor, tau: float, shift: int, fresh: cutlass.Constexpr) -> Any:
    """Move the retained maximum on; returns what earlier sums are multiplied by, and what a power adds.

    tops: of every block; factors: of codes' products to scores in base 2. shift: a, of P = 2^(s - m + a).
    fresh: the row may see its first key in this tile, or still none.
    """
    scaled = [tops[b] * factors[b] for b in range(BLOCKS)]
    top = cute.arch.fmax(max3(*scaled[:3]), scaled[3])
    old = row[M]
    new = top if top - old > tau else old
    row[M] = new
    moved = exp2(old - new)
    safe = new
    if const_expr(fresh):
        moved = moved if new != -Float32.inf else Float32(1.0)
        safe = new if new != -Float32.inf else Float32(0.0)
    row[SUM] = row[SUM] * moved
    return moved, shift - safe


def powers(s: list[Float32], factor: Float32, add: Float32, emulated: int) -> list[tuple[Float32, Float32]]:
    """Scores of a block -> weights 2^(s factor + add), in pairs.

    emulated: of the block's 16 pairs, those that multiply-adds compute.
    """
    pairs, weights = BLOCK // 2, []
    for n in range(pairs):
        x, y = cute.arch.fma_packed_f32x2(s[2 * n : 2 * n + 2], (factor, factor), (add, add))
        chosen = (n + 1) * emulated // pairs > n * emulated // pairs  # evenly spread
        weights.append(exp2_pair(x, y) if chosen else (exp2(x), exp2(y)))
    return weights


def codes(weights: list[tuple[Float32, Float32]]) -> list[Int32]:
    """Weights -> E4M3 codes, four to a word."""
    return [pack_e4m3(*weights[n], *weights[n + 1]) for n in range(0, len(weights), 2)]


def add(sums: tuple[Float32, Float32], pairs: list[tuple[Float32, Float32]]) -> tuple[Float32, Float32]:
    """Two sums, of the first and of the second numbers of pairs."""
    chains = pairs[:2]
    for n, pair in enumerate(pairs[2:]):
        chains[n % 2] = cute.arch.add_packed_f32x2(chains[n % 2], pair)
    return cute.arch.add_packed_f32x2(sums, cute.arch.add_packed_f32x2(*chains))


def sums(words: list[Int32]) -> list[tuple[Float32, Float32]]:
    """Sums of the values of E4M3 codes, every other one of eight: fours in FP16."""
    return [sum_codes(*words[n : n + 2]) for n in range(0, len(words), 2)]


def bytes_of(words: list[Int32]) -> list[Int32]:
    """Bytes of 32-bit words, the lowest first."""
    return [(word >> 8 * m) & 255 for word in words for m in range(4)]


@cute.jit
def largest_seen(exponents: list, seen: Int32) -> Int32:
    """Largest UE8M0 code among the keys of a block that the row sees; that of one where it sees none.

    exponents: the block's codes, four to a word.
    """
    top = Int32(0)
    for j, code in enumerate(bytes_of(exponents)):
        top = cutlass.max(top, code if (seen >> j) & 1 != 0 else Int32(0))
    return top if top != 0 else Int32(127)


@cute.jit
def folded_codes(weights: list, exponents: list, top: Int32) -> Any:
    """E4M3 codes of a block's weights times 2^(e_V - top), as words, and what the row sum counts, in pairs.

    exponents: UE8M0 codes of V, four keys to a word. A weight whose exponent is more than FOLD_RANGE below the largest
    counts unrounded (docs/numerics.md, "Folded exponents of V").
    """
    words: list[Any] = []
    counted: list[Any] = []
    one = (127 - top) << 23  # makes 2^(e - top) of e << 23
    for n, word in enumerate(exponents):
        held = [cutlass.min(cutlass.max(e, top - FOLD_LIMIT), top) for e in bytes_of([word])]
        up = [as_float((e << 23) + one) for e in held]
        down = [as_float((Int32(127 << 23) - one) + (Int32(127 << 23) - (e << 23))) for e in held]
        pairs = [cute.arch.mul_packed_f32x2(weights[2 * n + m], up[2 * m : 2 * m + 2]) for m in range(2)]
        words = [*words, pack_e4m3(*pairs[0], *pairs[1])]
        values = unpack_e4m3(words[n])
        for m in cutlass.range_constexpr(2):
            x, y = cute.arch.mul_packed_f32x2(values[2 * m : 2 * m + 2], down[2 * m : 2 * m + 2])
            x = x if held[2 * m] >= top - FOLD_RANGE else weights[2 * n + m][0]
            y = y if held[2 * m + 1] >= top - FOLD_RANGE else weights[2 * n + m][1]
            counted = [*counted, (x, y)]
    return words, counted
