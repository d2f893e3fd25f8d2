"""Layouts against their definitions written out by hand, and tensor maps against words that a driver wrote."""

from __future__ import annotations

import numpy as np
import pytest

import softgpu
from softgpu.layouts import (
    InstructionDescriptor,
    MatrixDescriptor,
    TensorMap,
    a_fragment,
    accumulator_fragment,
    operand_bytes,
    operand_granules,
    scale_positions,
    swizzle,
    tensor_rows,
)


@pytest.mark.parametrize(("mode", "bits"), [("none", 0), ("32B", 1), ("64B", 2), ("128B", 3)])
def test_swizzle_is_the_definition_and_its_own_inverse(mode, bits):
    for offset in range(0, 2048, 4):
        source = [(offset >> (7 + b)) & 1 for b in range(bits)]
        want = offset
        for b, s in enumerate(source):
            want ^= s << (4 + b)
        assert swizzle(offset, mode) == want
        assert swizzle(want, mode) == offset


@pytest.mark.parametrize("mode", ["32B", "64B", "128B"])
def test_k_major_rows_are_one_swizzle_width_apart(mode):
    width = int(mode[:-1])
    desc = MatrixDescriptor(4096, 0, 8 * width, mode)
    at = operand_bytes(desc, 24, 32, False, 2)
    for r in range(24):
        for k in range(16):
            assert at[r, k] == swizzle(4096 + r * width + 2 * k, mode)


def test_mn_major_atoms():
    desc = MatrixDescriptor(8192, 2048, 1024, "128B")
    at = operand_bytes(desc, 128, 32, True, 2)
    for r in (0, 7, 63, 64, 100):
        for k in (0, 5, 8, 15):
            assert at[r, k] == swizzle(8192 + r // 64 * 2048 + r % 64 * 2 + k // 8 * 1024 + k % 8 * 128, "128B")


def test_unswizzled_core_matrices_are_contiguous():
    desc = MatrixDescriptor(0, 128, 256, "none")
    at = operand_bytes(desc, 16, 32, False, 2)
    assert at[:8, :8].ravel().tolist() == list(range(0, 128, 2))
    assert at[0, 8] == 128
    assert at[8, 0] == 256


def test_granules_cover_every_byte_once():
    desc = MatrixDescriptor(1024, 0, 1024, "128B")
    assert operand_granules(desc, 64, 32, False, 2).size == 64 * 2


def test_fragments_cover_their_tiles():
    row, col = accumulator_fragment(32)
    assert sorted(zip(row.ravel().tolist(), col.ravel().tolist(), strict=True)) == [
        (r, c) for r in range(64) for c in range(32)
    ]
    for unit, depth in ((2, 16), (1, 32)):
        row, k = a_fragment(unit)
        cells = {
            (r, x + e) for r, x in zip(row.ravel().tolist(), k.ravel().tolist(), strict=True) for e in range(4 // unit)
        }
        assert cells == {(r, x) for r in range(64) for x in range(depth)}


def test_tensor_memory_rows():
    for m, group in ((128, 1), (64, 1), (256, 2), (128, 2)):
        rows = np.concatenate([tensor_rows(m, group, r)[0] for r in range(group)])
        assert sorted(rows.tolist()) == list(range(m))
    # layout F: sixteen rows at the start of every warp's 32 lanes
    assert tensor_rows(64, 1, 0)[1][[0, 15, 16, 63]].tolist() == [0, 15, 32, 111]
    with pytest.raises(softgpu.DescriptorError, match="M = 192"):
        tensor_rows(192, 1, 0)


def test_scale_atom():
    lane, col = scale_positions(128)
    assert (lane[33], col[33]) == (1, 1)
    assert len(set(zip(lane.tolist(), col.tolist(), strict=True))) == 128


def test_descriptor_fields():
    d = MatrixDescriptor.tcgen05((2 << 61) | (1 << 46) | ((1024 >> 4) << 32) | (1 << 16) | (0x8000 >> 4))
    assert d == MatrixDescriptor(0x8000, 16, 1024, "128B")
    with pytest.raises(softgpu.DescriptorError, match="46 to 48"):
        MatrixDescriptor.tcgen05(0)
    with pytest.raises(softgpu.DescriptorError, match="swizzle mode 3"):
        MatrixDescriptor.tcgen05((3 << 61) | (1 << 46))
    i = InstructionDescriptor.decode(0x8200490, False)
    assert (i.m, i.n, i.a_format, i.b_format, i.d_format, i.b_major) == (128, 128, 1, 1, 1, 0)
    with pytest.raises(softgpu.DescriptorError, match="sparse"):
        InstructionDescriptor.decode(0x8200494, False)


# the first 16 words that cuTensorMapEncodeTiled wrote on an H200 (driver 580), and what it was asked for
WORDS = {
    "bf16 64×100×7, box 64×32×2": (
        "00001000 00070000 00000520 00000008 00000320 0 0 0 3f 63 6 0 0 3f000000 0000011f 0",
        dict(dims=(64, 100, 7), strides=(2, 128, 12800), box=(64, 32, 2), steps=(1, 1, 1), kind="bf16", mode="none"),
    ),
    "swizzle 128B": (
        "00001000 00070000 00006520 00000008 00000320 0 0 0 3f 63 6 0 0 3f000000 0000011f 0",
        dict(dims=(64, 100, 7), strides=(2, 128, 12800), box=(64, 32, 2), steps=(1, 1, 1), kind="bf16", mode="128B"),
    ),
    "f16, NaN fill": (
        "00001000 00070000 00008320 00000008 00000320 0 0 0 3f 63 6 0 0 1f000000 0000011f 0",
        dict(dims=(64, 100, 7), strides=(2, 128, 12800), box=(32, 32, 2), steps=(1, 1, 1), kind="f16", nan_fill=True),
    ),
    "five dimensions, long strides, element strides": (
        "00001000 00070000 00000540 00000008 00000320 1 2 00002800 3f 63 6 4 7fffffff 3f004688 0302011f 0",
        dict(
            dims=(64, 100, 7, 5, 1 << 31), strides=(2, 128, 12800, (1 << 39) + 16, (1 << 37) + 32),
            box=(64, 32, 2, 3, 4),
            steps=(1, 2, 3, 4, 5), kind="bf16", mode="none",
        ),
    ),
    "one dimension": (
        "00001000 00070000 00000500 0 0 0 0 0 27f 0 0 0 0 3f000000 0 0",
        dict(dims=(640,), strides=(2,), box=(64,), steps=(1,), kind="bf16", mode="none"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WORDS)
def test_tensor_map_fields(name):
    words, want = WORDS[name]
    raw = b"".join(int(w, 16).to_bytes(4, "little") for w in words.split()) + bytes(64)
    got = TensorMap.decode(raw)
    assert got.address == 0x700000000100 * 16
    for field, value in want.items():
        assert getattr(got, field) == value, field


def test_interleaved_maps_are_refused():
    words = "00001000 00070000 00000d20 00000008 00000320 0 0 0 f 63 6 0 0 07000000 0000011f 0"
    with pytest.raises(softgpu.DescriptorError, match="interleaved"):
        TensorMap.decode(b"".join(int(w, 16).to_bytes(4, "little") for w in words.split()) + bytes(64))
