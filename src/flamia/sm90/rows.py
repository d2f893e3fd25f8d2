"""Rows of an accumulator to global memory, in whole lines: dk, dv and o."""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Int32, const_expr

from flamia.sm90.instructions import lane_here, pack_half, store_matrices

SLAB = 512  # words of shared memory in which a warp lays out what it writes


@cute.jit
def write_rows(x: cute.Tensor, start: Any, stride: Int32, count: Int32, slab: Any) -> None:
    """A warp's 16 rows of an accumulator [2, 2, 8, D / 64] to global memory, from ``start`` on, ``stride`` apart.

    count: rows to write at most. slab: 2 kB of shared memory. 64 channels at a time, in 16-byte pieces moved so that no
    bank is asked twice.
    """
    kind = "bf16" if const_expr(start.dtype is BFloat16) else "f16"
    lane = lane_here()
    base, row = Int32(slab.toint()), lane % 16
    for h in cutlass.range_constexpr(cute.size(x.shape[3])):
        for j in cutlass.range_constexpr(0, 8, 2):
            four = [pack_half(x[0, n % 2, j + n // 2, h], x[1, n % 2, j + n // 2, h], kind) for n in range(4)]
            store_matrices(base + row * 128 + (((j + lane // 16) ^ row % 8) << 4), *four)
        cute.arch.sync_warp()
        for n in cutlass.range_constexpr(4):
            line, piece = 4 * n + lane // 8, lane % 8
            words = cute.make_rmem_tensor((4,), Int32)
            source = (slab + (line * 32 + ((piece ^ line % 8) << 2))).align(16)
            cute.autovec_copy(cute.make_tensor(source, cute.make_layout((4,))), words)
            if line < count:
                spot = cute.recast_ptr((start + (line * stride + 64 * h + 8 * piece)).align(16), dtype=Int32)
                cute.autovec_copy(words, cute.make_tensor(spot, cute.make_layout((4,))))
        cute.arch.sync_warp()
