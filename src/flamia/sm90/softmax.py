"""Softmax of one tile of 64 queries x 128 keys per warpgroup, in registers: the twin of ``reference.folded``'s forward.

A thread holds two rows, g and g + 8 of its warp's sixteen: ``tile[column in pair, row, group of 8 keys]``. Scales are
those of 32-key blocks, four to a tile: ``k_scale[b]`` = 2^e_K and ``v_exponent[b]`` = e_V.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from flamia.bounds import FOLD_RANGE
from flamia.sm90.instructions import as_float, ceil, exp2, log2, pack_e4m3, quad_max, quad_sum, sum_e4m3
from flamia.sm90.work import TILE

GRID = 4096.0  # f lies on a grid of 2^-12, as in the twin
# Per-row registers: f, R, row sum, what to add to it, largest x, largest e_V seen, factors of the last and this tile.
F, R, SUM, EXTRA, TOP_X, TOP_E, LAST, NOW = range(8)


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
def mask(
    s: cute.Tensor, row: Int32, k0: Int32, shift: Int32, len_k: Int32, left: Int32, right: Int32, masks: Any
) -> Any:
    """-inf for keys that a row does not see; returns per row the first and the past-last visible column of the tile."""
    lane = cute.arch.lane_idx()
    bounds = []
    for r in cutlass.range_constexpr(2):
        diagonal = row + 8 * r + shift - k0
        stop = len_k - k0
        if const_expr(masks.right):
            stop = cutlass.min(stop, diagonal + right + 1)
        start = Int32(0)
        if const_expr(masks.left):
            start = diagonal - left
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
        if const_expr(fresh):
            f = ceil(quad_max(xs[r]) * GRID) * (1.0 / GRID)
            rows[r, F] = f if rows[r, F] == -Float32.inf else rows[r, F]
        old = rows[r, R]
        stepped = rows[r, F] + ceil(zs[r] - rows[r, F])
        new = stepped if zs[r] - old > tau else old
        rows[r, LAST] = rows[r, NOW]
        safe = new
        if const_expr(fresh):
            new = -Float32.inf if zs[r] == -Float32.inf and old == -Float32.inf else new
            safe = Float32(0.0) if new == -Float32.inf else new
            rows[r, NOW] = exp2(old - new) if old != -Float32.inf else Float32(0.0)
        else:
            rows[r, NOW] = exp2(old - new)
        rows[r, R] = new
        adds.append([(v_exponent[b] + shift) - safe for b in range(4)])
    return factor, adds


def _max4(v: list[Float32]) -> Float32:
    return cute.arch.fmax(cute.arch.fmax(v[0], v[1]), cute.arch.fmax(v[2], v[3]))


@cute.jit
def powers(s: cute.Tensor, factor: Any, adds: Any) -> None:
    """Scores -> weights 2^(z - R + a), in place."""
    for k in cutlass.range_constexpr(TILE // 16):
        for r in cutlass.range_constexpr(2):
            for j in cutlass.range_constexpr(2):
                for c in cutlass.range_constexpr(2):
                    s[c, r, 2 * k + j] = exp2(s[c, r, 2 * k + j] * factor[k // 2] + adds[r][k // 2])


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
def finish(rows: cute.Tensor, r: cutlass.Constexpr, shift: int) -> Any:
    """(1 / row sum, lse2, M) of row r; zero, -inf and zero where it has seen no key."""
    total = quad_sum(rows[r, SUM])
    top = quad_max(rows[r, TOP_X])
    seen = rows[r, F] != -Float32.inf
    inverse = 1.0 / total if seen else Float32(0.0)
    lse2 = rows[r, R] + log2(total) - shift if seen else -Float32.inf
    m = rows[r, F] + ceil(top - rows[r, F]) if seen else Float32(0.0)
    return inverse, lse2, m
