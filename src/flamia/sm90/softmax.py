"""Softmax of one tile of 64 queries x 128 keys per warpgroup, in registers: the twin of ``reference.folded``'s forward.

A thread holds two rows, g and g + 8 of its warp's sixteen: ``tile[column in pair, row, group of 8 keys]``. Scales are
those of 32-key blocks, four to a tile: ``k_scale[b]`` = 2^e_K and ``v_exponent[b]`` = e_V.

Functions named ``token_...`` are for exact operands, where every token has scales of its own. A thread's 32 keys have
too many for registers: ``k_scale`` and ``v_exponent`` are functions of k there, which load from shared memory those of
the thread's four keys in groups 2k and 2k + 1.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from flamia.bounds import FOLD_RANGE, SUM_MANTISSAS, SUM_WINDOW, SUM_WINDOWS
from flamia.quantize.reference import VALUE_MIN_EXPONENT
from flamia.reference.exponentials import SCHRAUDOLPH_OFFSET
from flamia.sm90.instructions import (
    as_float,
    ceil,
    exp2,
    lane_here,
    log2,
    pack_e4m3,
    quad_max,
    quad_sum,
    schraudolph,
    sum_e4m3,
    unpack_e4m3,
)
from flamia.sm90.work import TILE

GRID = 4096.0  # f lies on a grid of 2^-12, as in the twin
# Per-row registers: f, R, row sum, what to add to it, largest x, largest e_V seen, factors of the last and this tile.
F, R, SUM, EXTRA, TOP_X, TOP_E, LAST, NOW = range(8)
# With exact operands, what no register is left for between tiles: c 2^e_Q, largest x, largest e_V seen.
HELD_Q, HELD_X, HELD_E = range(3)
STRIDE = 36  # 32-bit words between the numbers of neighbouring thread-columns: 16-byte loads of four share no bank
TOKEN_NUMBERS = 4 * STRIDE


def view(scores: cute.Tensor) -> cute.Tensor:
    """A score accumulator as [column in pair, row, group of 8 keys]."""
    return cute.make_tensor(scores.iterator, cute.make_layout((2, 2, TILE // 8)))


@cute.jit
def reset(rows: cute.Tensor) -> None:
    """Start a tile of queries: nothing seen yet."""
    for r in cutlass.range_constexpr(2):
        rows[r, F], rows[r, R], rows[r, TOP_X], rows[r, TOP_E] = (-Float32.inf,) * 4
        rows[r, SUM], rows[r, EXTRA] = Float32(0.0), Float32(0.0)
        rows[r, LAST], rows[r, NOW] = Float32(1.0), Float32(1.0)


@cute.jit
def visible(row: Int32, k0: Int32, shift: Int32, len_k: Int32, left: Int32, right: Int32, masks: Any) -> Any:
    """First and past-last column of a tile, whose first key is k0, that a query sees."""
    diagonal = row + shift - k0
    stop = len_k - k0
    if const_expr(masks.right):
        stop = cutlass.min(stop, diagonal + right + 1)
    start = Int32(0)
    if const_expr(masks.left):
        start = diagonal - left
    return start, stop


@cute.jit
def mask(
    s: cute.Tensor, row: Int32, k0: Int32, shift: Int32, len_k: Int32, left: Int32, right: Int32, masks: Any
) -> Any:
    """-inf for keys that a row does not see; returns ``visible`` of both rows."""
    lane = cute.arch.lane_idx()
    bounds = []
    for r in cutlass.range_constexpr(2):
        start, stop = visible(row + 8 * r, k0, shift, len_k, left, right, masks)
        bounds.append((start, stop))
        first, last = start - 2 * (lane % 4), stop - 2 * (lane % 4)
        for j in cutlass.range_constexpr(TILE // 8):
            for c in cutlass.range_constexpr(2):
                x = s[c, r, j]
                x = x if 8 * j + c < last else -Float32.inf
                if const_expr(masks.left):
                    x = x if 8 * j + c >= first else -Float32.inf
                s[c, r, j] = x
    return bounds


@cute.jit
def row_references(
    s: cute.Tensor,
    rows: cute.Tensor,
    k_scale: Any,
    v_exponent: Any,
    q_scale: Float32,
    tau: float,
    shift: int,
    fresh: bool,
) -> Any:
    """Move f and R of both rows on; returns the factor of each block and what its powers add, per row.

    fresh: rows may see their first key in this tile, or still none. shift: a, of P = 2^(z - R + a).
    """
    # Blocks of zeros have the smallest exponents, whose product is 0, and 0 * -inf is NaN.
    factor = [cute.arch.fmax(q_scale * k_scale[b], Float32(2.0**-100)) for b in range(4)]
    tops = [[s[0, r, 4 * b] for b in range(4)] for r in range(2)]
    for j in cutlass.range_constexpr(4):
        for c in cutlass.range_constexpr(2):
            if const_expr(j + c > 0):
                for r in cutlass.range_constexpr(2):
                    for b in cutlass.range_constexpr(4):
                        tops[r][b] = cute.arch.fmax(tops[r][b], s[c, r, 4 * b + j])
    xs, zs = [], []
    for r in cutlass.range_constexpr(2):
        x = [tops[r][b] * factor[b] for b in range(4)]
        z = [x[b] + v_exponent[b] for b in range(4)]
        xs.append(_max4(x))
        zs.append(quad_max(_max4(z)))
        rows[r, TOP_X] = cute.arch.fmax(rows[r, TOP_X], xs[r])
    adds = []
    for r in cutlass.range_constexpr(2):
        safe = _move(rows, r, xs[r], zs[r], tau, fresh)
        adds.append([(v_exponent[b] + shift) - safe for b in range(4)])
    return factor, adds


@cute.jit
def _move(
    rows: cute.Tensor, r: cutlass.Constexpr, top_x: Float32, top_z: Float32, tau: float, fresh: cutlass.Constexpr
) -> Float32:
    """Move f and R of row r on; returns R, 0 where there is none. top_x: of this thread; top_z: of the row."""
    if const_expr(fresh):
        f = ceil(quad_max(top_x) * GRID) * (1.0 / GRID)
        rows[r, F] = f if rows[r, F] == -Float32.inf else rows[r, F]
    old = rows[r, R]
    stepped = rows[r, F] + ceil(top_z - rows[r, F])
    new = stepped if top_z - old > tau else old
    rows[r, LAST] = rows[r, NOW]
    safe = new
    if const_expr(fresh):
        new = -Float32.inf if top_z == -Float32.inf and old == -Float32.inf else new
        safe = Float32(0.0) if new == -Float32.inf else new
        rows[r, NOW] = exp2(old - new) if old != -Float32.inf else Float32(0.0)
    else:
        rows[r, NOW] = exp2(old - new)
    rows[r, R] = new
    return safe


def _max4(v: list[Float32]) -> Float32:
    return cute.arch.fmax(cute.arch.fmax(v[0], v[1]), cute.arch.fmax(v[2], v[3]))


def approximated(j: int) -> bool:
    """Whether Schraudolph's powers are those of group j of eight keys: five groups of eight."""
    return j * 5 % 8 < 5


@cute.jit
def powers(s: cute.Tensor, factor: Any, adds: Any, approximate: bool) -> None:
    """Scores -> weights 2^(z - R + a), in place. approximate: Schraudolph's in some groups of keys."""
    for k in cutlass.range_constexpr(TILE // 16):
        for r in cutlass.range_constexpr(2):
            for j in cutlass.range_constexpr(2):
                for c in cutlass.range_constexpr(2):
                    if const_expr(approximate and approximated(2 * k + j)):
                        add = adds[r][k // 2] - SCHRAUDOLPH_OFFSET
                        s[c, r, 2 * k + j] = schraudolph(s[c, r, 2 * k + j] * factor[k // 2] + add)
                    else:
                        s[c, r, 2 * k + j] = exp2(s[c, r, 2 * k + j] * factor[k // 2] + adds[r][k // 2])


@cute.jit
def hold(held: cute.Tensor, q_scale: Any) -> None:
    """Start a tile of queries: c 2^e_Q of each row, and nothing seen yet."""
    for r in cutlass.range_constexpr(2):
        held[r, HELD_Q], held[r, HELD_X], held[r, HELD_E] = q_scale[r], -Float32.inf, -Float32.inf


@cute.jit
def take_back(rows: cute.Tensor, held: cute.Tensor) -> None:
    """What ``finish`` needs."""
    for r in cutlass.range_constexpr(2):
        rows[r, TOP_X] = held[r, HELD_X]


@cute.jit
def token_references(
    s: cute.Tensor,
    rows: cute.Tensor,
    held: cute.Tensor,
    k_scale: Any,
    v_exponent: Any,
    tau: float,
    shift: int,
    fresh: cutlass.Constexpr,
) -> Any:
    """Scores -> z + a, in place, and f and R of both rows move on; returns R per row, 0 where there is none.

    k_scale: None where keys have no exponents. v_exponent: e_V + a. shift: a. fresh: as in ``row_references``.
    """
    q_scale = [held[r, HELD_Q] for r in range(2)]
    xs: list[Any] = [[], []]  # two chains of maxima for each row
    zs: list[Any] = [[], []]
    for k in cutlass.range_constexpr(TILE // 16):
        scale: Any = None if const_expr(k_scale is None) else k_scale(k)
        e = v_exponent(k)
        for i in cutlass.range_constexpr(4):
            c, j = i % 2, 2 * k + i // 2
            for r in cutlass.range_constexpr(2):
                x = s[c, r, j] if const_expr(scale is None) else s[c, r, j] * scale[i]
                z = x * q_scale[r] + e[i]
                s[c, r, j] = z
                if const_expr(j == 0):
                    xs[r], zs[r] = [*xs[r], x], [*zs[r], z]
                else:
                    xs[r][c] = cute.arch.fmax(xs[r][c], x)
                    zs[r][c] = cute.arch.fmax(zs[r][c], z)
    moved = []
    for r in cutlass.range_constexpr(2):
        x = cute.arch.fmax(*xs[r]) * q_scale[r]
        z = quad_max(cute.arch.fmax(*zs[r])) - shift
        held[r, HELD_X] = cute.arch.fmax(held[r, HELD_X], x)
        moved.append(_move(rows, r, x, z, tau, fresh))
    return moved


@cute.jit
def token_powers(s: cute.Tensor, references: Any, approximate: bool) -> None:
    """z + a -> weights 2^(z - R + a), in place. references: R per row. approximate: as in ``powers``."""
    for j in cutlass.range_constexpr(TILE // 8):
        for r in cutlass.range_constexpr(2):
            for c in cutlass.range_constexpr(2):
                if const_expr(approximate and approximated(j)):
                    s[c, r, j] = schraudolph(s[c, r, j] - (references[r] + SCHRAUDOLPH_OFFSET))
                else:
                    s[c, r, j] = exp2(s[c, r, j] - references[r])


@cute.jit
def codes(s: cute.Tensor, p: cute.Tensor) -> None:
    """Weights -> E4M3 register operand of the value product, as 32-bit words.

    V's payload stores the tokens of every 32 so that what a thread holds is what it must deliver
    (``payloads.COLUMN_ORDERS["mma"]``).
    """
    for k in cutlass.range_constexpr(TILE // 16):
        for r in cutlass.range_constexpr(2):
            j = 2 * k
            p[r + 2 * k] = pack_e4m3(s[0, r, j], s[1, r, j], s[0, r, j + 1], s[1, r, j + 1])


@cute.jit
def note_exponents(rows: cute.Tensor, v_exponent: Any, bounds: Any) -> None:
    """Keep the largest V exponent among the blocks that each row has seen; bounds None: all of this tile's."""
    for r in cutlass.range_constexpr(2):
        for b in cutlass.range_constexpr(4):
            e = v_exponent[b]
            if const_expr(bounds is not None):
                start, stop = bounds[r]
                e = e if stop > 32 * b and start < 32 * (b + 1) else -Float32.inf
            rows[r, TOP_E] = cute.arch.fmax(rows[r, TOP_E], e)


@cute.jit
def slow_sums(s: cute.Tensor, rows: cute.Tensor, v_exponent: Any, weights: bool) -> None:
    """Row sums of a tile block by block, before its weights become codes: this thread's part of both rows,
    for ``EXTRA``.

    ``weights``: of the weights themselves. Otherwise of the codes, but of the weights in blocks whose V exponent is
    more than FOLD_RANGE below the largest that the row has seen (``bounds.FOLD_RANGE``).
    """
    for r in cutlass.range_constexpr(2):
        total = Float32(0.0)
        for b in cutlass.range_constexpr(4):
            plain, coded = Float32(0.0), Float32(0.0)
            for k in cutlass.range_constexpr(2):
                j = 4 * b + 2 * k
                four = (s[0, r, j], s[1, r, j], s[0, r, j + 1], s[1, r, j + 1])
                plain = plain + ((four[0] + four[1]) + (four[2] + four[3]))
                if const_expr(not weights):
                    coded = coded + sum_e4m3(pack_e4m3(*four))
            chosen = plain
            if const_expr(not weights):
                chosen = coded if v_exponent[b] >= rows[r, TOP_E] - FOLD_RANGE else plain
            total = total + chosen * as_float((127 - Int32(v_exponent[b])) << 23)
        rows[r, EXTRA] = total


@cute.jit
def token_weights(s: cute.Tensor, rows: cute.Tensor, v_exponent: Any, shift: int) -> None:
    """Add this thread's weights of both rows, not rounded, to their sums. v_exponent: e_V + a. shift: a."""
    for k in cutlass.range_constexpr(TILE // 16):
        e = v_exponent(k)
        for i in cutlass.range_constexpr(4):
            scale = _power_below(e[i] - shift)
            for r in cutlass.range_constexpr(2):
                rows[r, SUM] = rows[r, SUM] + s[i % 2, r, 2 * k + i // 2] * scale


@cute.jit
def token_corrections(
    s: cute.Tensor, p: cute.Tensor, rows: cute.Tensor, held: cute.Tensor, v_exponents: Any, shift: int, bounds: Any
) -> None:
    """Add what V's extra columns count wrong in this tile to row sums: exactly nothing in rows that need no correction.

    Weights whose V exponent is more than FOLD_RANGE below the largest that the row has seen count unrounded, and
    codes of keys that no column serves are missing. p: the weights' codes. v_exponents: e_V + a, twice. shift: a.
    bounds: as in ``note_exponents``.
    """
    lane = lane_here()
    tops = [held[r, HELD_E] for r in range(2)]
    for k in cutlass.range_constexpr(TILE // 16):
        e = v_exponents[0](k)
        for i in cutlass.range_constexpr(4):
            key = 8 * (2 * k + i // 2) + 2 * (lane % 4) + i % 2
            for r in cutlass.range_constexpr(2):
                seen = e[i] - shift
                if const_expr(bounds is not None):
                    start, stop = bounds[r]
                    seen = seen if key >= start and key < stop else -Float32.inf
                tops[r] = cute.arch.fmax(tops[r], seen)
    for r in cutlass.range_constexpr(2):
        tops[r] = quad_max(tops[r])
        held[r, HELD_E] = tops[r]
    for k in cutlass.range_constexpr(TILE // 16):
        e = v_exponents[1](k)
        values = [unpack_e4m3(p[r + 2 * k]) for r in range(2)]
        for i in cutlass.range_constexpr(4):
            own = e[i] - shift
            scale = _power_below(own)
            for r in cutlass.range_constexpr(2):
                code = values[r][i]
                wanted = s[i % 2, r, 2 * k + i // 2] if own < tops[r] - FOLD_RANGE else code
                counted = code if own < VALUE_MIN_EXPONENT + SUM_WINDOWS * SUM_WINDOW else Float32(0.0)
                rows[r, SUM] = rows[r, SUM] + (wanted - counted) * scale


def _power_below(e: Float32) -> Float32:
    """2^-e of an exponent of V."""
    return as_float((127 - Int32(e)) << 23)


def column_scale(lane: Int32, c: int) -> Float32:
    """What column c of this thread's two extra columns of the value product is multiplied by: ``token_column``."""
    return as_float((127 - VALUE_MIN_EXPONENT - SUM_WINDOW // 2 - SUM_WINDOW * (lane % 4 * 2 + c)) << 23)


def token_column(v: Int32) -> Any:
    """(extra column of V that serves a key with this UE8M0 exponent, E4M3 code there); no column where there is none.

    2^(8 - n) for the n-th exponent of the column's window: exact, and a subnormal for the last.
    """
    n = v - (127 + VALUE_MIN_EXPONENT)
    return n // SUM_WINDOW, cutlass.max((SUM_WINDOW - 1 - n % SUM_WINDOW) << 3, 4)


@cute.jit
def finish(rows: cute.Tensor, r: cutlass.Constexpr, shift: int, columns: cutlass.Constexpr) -> Any:
    """(1 / row sum, lse2, M) of row r; zero, -inf and zero where it has seen no key.

    columns: sums are those of ``bounds.SUM_MANTISSAS``, two columns a thread. lse2 is then right in the row's first.
    """
    total = quad_sum(rows[r, SUM])
    weighed, count = Float32(1.0), total
    if const_expr(columns):
        weighed, count = Float32(sum(1 + m / 8 for m in SUM_MANTISSAS)), rows[r, SUM] * 0.5
    top = quad_max(rows[r, TOP_X])
    seen = rows[r, F] != -Float32.inf
    inverse = weighed / total if seen else Float32(0.0)
    lse2 = rows[r, R] + log2(count) - shift if seen else -Float32.inf
    m = rows[r, F] + ceil(top - rows[r, F]) if seen else Float32(0.0)
    return inverse, lse2, m
