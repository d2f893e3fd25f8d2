"""Where operands live: swizzles, matrix descriptors, fragments, tensor-memory maps, scale-factor atoms.

Sources: PTX ISA 9.7.15.5 (wgmma: fragments, matrix descriptor), 9.7.16.3 to 9.7.16.5 (tcgen05: descriptors, canonical
layouts, data path layouts, scale factors), 5.5 (tensor maps).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from .errors import DescriptorError

#: swizzle name → bytes of a row of the atom; the XOR takes address bits 7.. into bits 4..
SWIZZLE_BYTES = {"none": 16, "32B": 32, "64B": 64, "128B": 128}
#: 3-bit field of a tcgen05 descriptor (bits 61–63) and 2-bit field of a wgmma descriptor (bits 62–63)
TCGEN05_SWIZZLE = {0: "none", 2: "128B", 4: "64B", 6: "32B"}
WGMMA_SWIZZLE = {0: "none", 1: "128B", 2: "64B", 3: "32B"}


def swizzle(offset, mode: str):
    """Byte offsets after the XOR swizzle of a mode: 16-byte chunk index bits ^= row bits of the 8-row atom."""
    bits = {"none": 0, "32B": 1, "64B": 2, "128B": 3}[mode]
    return offset ^ (((offset >> 7) & ((1 << bits) - 1)) << 4)


def swizzle_chunks(chunk, mode: str):
    """The same on indices of 16-byte chunks."""
    bits = {"none": 0, "32B": 1, "64B": 2, "128B": 3}[mode]
    return chunk ^ ((chunk >> 3) & ((1 << bits) - 1))


@dataclass(frozen=True)
class MatrixDescriptor:
    """A shared-memory matrix descriptor; offsets in bytes."""

    start: int
    leading: int
    stride: int
    mode: str
    base_offset: int = 0

    @classmethod
    def wgmma(cls, bits: int) -> MatrixDescriptor:
        """64-bit descriptor of sm_90 (PTX ISA 9.7.15.5.1)."""
        return cls._fields(bits, WGMMA_SWIZZLE[(bits >> 62) & 3])

    @classmethod
    def tcgen05(cls, bits: int) -> MatrixDescriptor:
        """64-bit descriptor of sm_100 (PTX ISA 9.7.16.4.1): bits 46–48 are 0b001, bit 52 absolute leading mode."""
        if (bits >> 46) & 7 != 1:
            raise DescriptorError(f"matrix descriptor {bits:#018x}: bits 46 to 48 must be 0b001")
        if (bits >> 52) & 1:
            raise DescriptorError(
                f"matrix descriptor {bits:#018x}: absolute leading-dimension addresses are not supported"
            )
        field = (bits >> 61) & 7
        if field not in TCGEN05_SWIZZLE:
            raise DescriptorError(f"matrix descriptor {bits:#018x}: swizzle mode {field} is not supported")
        return cls._fields(bits, TCGEN05_SWIZZLE[field])

    @classmethod
    def _fields(cls, bits: int, mode: str) -> MatrixDescriptor:
        return cls(
            (bits & 0x3FFF) << 4, ((bits >> 16) & 0x3FFF) << 4, ((bits >> 32) & 0x3FFF) << 4, mode, (bits >> 49) & 7
        )


@lru_cache(maxsize=4096)
def operand_bytes(desc: MatrixDescriptor, rows: int, depth_bytes: int, mn_major: bool, unit: int) -> np.ndarray:
    """Shared-memory byte offsets [rows, depth] of an operand's elements of ``unit`` bytes.

    K-major: 8-row groups ``stride`` apart; within a group rows are one swizzle width apart and the depth runs along
    the row; without swizzle, 16-byte columns are ``leading`` apart. MN-major: 16-byte units run along the rows, one
    atom holds swizzle-width bytes of rows × 8 depths; atoms are ``leading`` apart along the rows and ``stride`` along
    the depth (the two swapped without swizzle). ``depth_bytes`` counts bytes of K-major depth, 32 in most products.
    """
    if desc.base_offset:
        raise DescriptorError("a matrix base offset other than 0 is not supported")
    depth = depth_bytes // unit
    width = SWIZZLE_BYTES[desc.mode]
    r, k = np.arange(rows)[:, None], np.arange(depth)[None, :]
    if not mn_major:
        kb = k * unit
        if desc.mode == "none":
            at = r // 8 * desc.stride + r % 8 * 16 + kb // 16 * desc.leading + kb % 16
        else:
            at = r // 8 * desc.stride + r % 8 * width + kb
    else:
        rb = r * unit
        if desc.mode == "none":
            at = rb // 16 * desc.stride + rb % 16 + k % 8 * 16 + k // 8 * desc.leading
        else:
            at = rb // width * desc.leading + rb % width + k % 8 * width + k // 8 * desc.stride
    out = swizzle(desc.start + at, desc.mode)
    out.setflags(write=False)
    return out


@lru_cache(maxsize=4096)
def operand_granules(desc: MatrixDescriptor, rows: int, depth_bytes: int, mn_major: bool, unit: int) -> np.ndarray:
    """The 16-byte granules an operand touches, without repeats."""
    out = np.unique(operand_bytes(desc, rows, depth_bytes, mn_major, unit) >> 4)
    out.setflags(write=False)
    return out


def accumulator_fragment(n: int) -> tuple[np.ndarray, np.ndarray]:
    """wgmma D fragment: (row, column) of register i and lane l, both [n/2, 128] (PTX ISA 9.7.15.5.1.1)."""
    i, lane = np.arange(n // 2)[:, None], np.arange(128)[None, :]
    row = lane // 32 * 16 + i // 2 % 2 * 8 + lane % 32 // 4
    col = i // 4 * 8 + lane % 4 * 2 + i % 2
    return row, col


def a_fragment(unit: int) -> tuple[np.ndarray, np.ndarray]:
    """wgmma A fragment in registers: (row, first k) of 32-bit register i (of 4) and lane l, both [4, 128].

    A register holds 4/unit consecutive depths.
    """
    i, lane = np.arange(4)[:, None], np.arange(128)[None, :]
    row = lane // 32 * 16 + i % 2 * 8 + lane % 32 // 4
    per = 4 // unit
    k = i // 2 * 4 * per + lane % 4 * per
    return row, k


def tensor_rows(m: int, cta_group: int, rank: int) -> tuple[np.ndarray, np.ndarray, int]:
    """Where D's rows live in one CTA's tensor memory: (global row, lane, column halves), dense A, no ``.ws``.

    Column halves 2 means lanes 64–127 hold the second half of the columns of the same rows (PTX ISA 9.7.16.10.5):
    layout D (M=128), F (M=64), A (M=256 over two CTAs), B (M=128 over two CTAs).
    """
    if cta_group == 1 and m == 128:
        return np.arange(128), np.arange(128), 1
    if cta_group == 1 and m == 64:
        row = np.arange(64)
        return row, row // 16 * 32 + row % 16, 1
    if cta_group == 2 and m == 256:
        return np.arange(128) + 128 * rank, np.arange(128), 1
    if cta_group == 2 and m == 128:
        return np.arange(64) + 64 * rank, np.arange(64), 2
    raise DescriptorError(f"M = {m} with cta_group::{cta_group} is not supported")


def scale_positions(rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Scale-factor atom in tensor memory: (lane of the first quarter, column) of each row.

    One 32-bit column holds four scales along K of one row; 32 rows go down the lanes, the next 32 take the next column.
    The same data stands in all four 32-lane quarters (PTX ISA 9.7.16.10.7).
    """
    row = np.arange(rows)
    return row % 32, row // 32


@dataclass(frozen=True)
class InstructionDescriptor:
    """32-bit instruction descriptor (PTX ISA 9.7.16.4.2), plain or block-scaled."""

    m: int
    n: int
    a_format: int
    b_format: int
    d_format: int
    a_major: int
    b_major: int
    a_negate: bool
    b_negate: bool
    scale_ue8m0: bool
    a_scale_id: int
    b_scale_id: int

    @classmethod
    def decode(cls, bits: int, block_scaled: bool) -> InstructionDescriptor:
        if bits & 4:
            raise DescriptorError("sparse products are not supported")
        if block_scaled and bits >> 31:
            raise DescriptorError("K = 96 products are not supported")
        if not block_scaled and bits >> 30:
            raise DescriptorError("the .ws maximum shift is not supported")
        return cls(
            m=((bits >> 24) & 31) << 4, n=((bits >> 17) & 63) << 3, a_format=(bits >> 7) & 7, b_format=(bits >> 10) & 7,
            d_format=1 if block_scaled else (bits >> 4) & 3, a_major=(bits >> 15) & 1, b_major=(bits >> 16) & 1,
            a_negate=bool(bits >> 13 & 1), b_negate=bool(bits >> 14 & 1), scale_ue8m0=bool(bits >> 23 & 1),
            a_scale_id=(bits >> 29) & 3 if block_scaled else 0, b_scale_id=(bits >> 4) & 3 if block_scaled else 0,
        )  # fmt: skip


#: element type of a tensor map → (bytes, kind)
MAP_TYPES = {
    0: (1, "u8"), 1: (2, "u16"), 2: (4, "u32"), 3: (4, "s32"), 4: (8, "u64"), 5: (8, "s64"), 6: (2, "f16"),
    7: (4, "f32"), 8: (4, "f32"), 9: (8, "f64"), 10: (2, "bf16"), 11: (1, "u4x2"),
}  # fmt: skip


@dataclass(frozen=True)
class TensorMap:
    """A tiled tensor map (128 bytes, opaque in CUDA; fields as the driver of CUDA 13 writes them)."""

    address: int
    dims: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    steps: tuple[int, ...]
    unit: int
    kind: str
    mode: str
    nan_fill: bool

    def place(self, coords: list[int]) -> list[int]:
        """Coordinates in units of ``unit`` bytes along the innermost dimension."""
        if self.kind != "u4x2":
            return coords
        if coords[0] % 2:
            raise DescriptorError(f"the innermost coordinate {coords[0]} of a 4-bit tensor is odd")
        return [coords[0] // 2, *coords[1:]]

    @classmethod
    def decode(cls, raw: bytes) -> TensorMap:
        w = np.frombuffer(raw, np.uint32)[:16].tolist()
        head = w[2]
        rank = ((head >> 4) & 7) + 1
        kind = (head >> 7) & 15
        if rank > 5 or kind not in MAP_TYPES:
            raise DescriptorError(f"tensor map: rank {rank}, element type {kind}; word 2 is {head:#x}")
        if (head >> 11) & 3:
            raise DescriptorError("tensor map: interleaved layouts are not supported")
        unit, name = MAP_TYPES[kind]
        dims = tuple(d + 1 for d in w[8 : 8 + rank])
        strides = tuple(((w[3 + n] | ((w[7] >> 4 * n & 15) << 32)) << 4) for n in range(rank - 1))
        sizes = [w[13] >> 24, w[14] & 255, w[14] >> 8 & 255, w[14] >> 16 & 255, w[14] >> 24]
        box = tuple(b + 1 for b in sizes[:rank])
        steps = tuple((w[13] >> 3 * n & 7) + 1 for n in range(rank))
        mode = ("none", "32B", "64B", "128B")[(head >> 13) & 3]
        if name == "u4x2":
            # packed 4-bit elements: kept as bytes, two elements each
            dims, box = (dims[0] // 2, *dims[1:]), (box[0] // 2, *box[1:])
        return cls(w[0] | w[1] << 32, dims, (unit, *strides), box, steps, unit, name, mode, bool(head >> 15 & 1))
