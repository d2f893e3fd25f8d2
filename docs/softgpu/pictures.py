"""Draw the layout pictures of docs/softgpu.md: ``PYTHONPATH=src python docs/softgpu/pictures.py``."""

from __future__ import annotations

from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np

from softgpu.execute.tcgen05 import _pattern
from softgpu.layouts import (
    MatrixDescriptor,
    a_fragment,
    accumulator_fragment,
    operand_bytes,
    scale_positions,
    swizzle_chunks,
    tensor_rows,
)

HERE = Path(__file__).parent
plt.switch_backend("svg")
plt.rcParams.update({"svg.hashsalt": "softgpu", "svg.fonttype": "none"})


def grid(ax, values, labels, title, xlabel, ylabel, size=7, cmap="tab20"):
    """A table of coloured cells with text."""
    values = np.asarray(values)
    ax.imshow(values, cmap=cmap, aspect="auto", alpha=0.55)
    if labels is not None:
        for (r, c), text in np.ndenumerate(np.asarray(labels)):
            ax.text(c, r, str(text), ha="center", va="center", fontsize=size)
    ax.set_title(title, fontsize=9)
    ax.set_xlabel(xlabel, fontsize=8)
    ax.set_ylabel(ylabel, fontsize=8)
    ax.tick_params(labelsize=7)


def save(fig, name):
    fig.tight_layout()
    fig.savefig(HERE / f"{name}.svg", metadata={"Date": None})
    plt.close(fig)


def swizzles():
    fig, axes = plt.subplots(1, 4, figsize=(13, 3.2))
    for ax, mode in zip(axes, ("none", "32B", "64B", "128B"), strict=True):
        place = swizzle_chunks(np.arange(64), mode)
        logical = np.empty(64, int)
        logical[place] = np.arange(64)
        table = logical.reshape(8, 8)
        grid(ax, table % 8, table, f"swizzle {mode}", "16-byte chunk of a 128-byte line", "128-byte line")
    save(fig, "swizzles")


def operands():
    fig, axes = plt.subplots(1, 3, figsize=(15, 5))
    cases = [
        ("K-major, 128B, BF16: chunk of (row, k)", MatrixDescriptor(0, 0, 1024, "128B"), False, 16, 16),
        ("MN-major, 128B, BF16: chunk of (k, row)", MatrixDescriptor(0, 0, 1024, "128B"), True, 64, 16),
        ("K-major, no swizzle (scale factors for tcgen05.cp)", MatrixDescriptor(0, 128, 256, "none"), False, 16, 16),
    ]
    for ax, (title, desc, mn, rows, depth) in zip(axes, cases, strict=True):
        chunk = operand_bytes(desc, rows, depth * 2, mn, 2) // 16
        step = 8
        table = chunk[::step, :].T if mn else chunk[:, ::step]
        labels = table
        grid(ax, table % 20, labels, title, "row / 8" if mn else "k / 8", "k" if mn else "row")
    save(fig, "operands")


def fragments():
    fig, axes = plt.subplots(1, 2, figsize=(14, 6))
    row, col = accumulator_fragment(16)
    owner = np.full((16, 16), "", dtype=object)
    value = np.zeros((16, 16))
    for i in range(8):
        for lane in range(32):
            owner[row[i, lane], col[i, lane]] = f"{lane}:{i}"
            value[row[i, lane], col[i, lane]] = lane % 20
    grid(axes[0], value, owner, "wgmma accumulator, rows of warp 0, 16 columns (lane:register)", "column", "row", 6)
    row, k = a_fragment(2)
    owner, value = np.full((16, 16), "", dtype=object), np.zeros((16, 16))
    for i in range(4):
        for lane in range(32):
            for e in range(2):
                owner[row[i, lane], k[i, lane] + e] = f"{lane}:{i}"
                value[row[i, lane], k[i, lane] + e] = lane % 20
    grid(axes[1], value, owner, "wgmma A operand in registers, BF16, warp 0 (lane:register)", "k", "row", 6)
    save(fig, "fragments")


def tensor_memory():
    fig, axes = plt.subplots(1, 6, figsize=(15, 5))
    cases = [(128, 1, 0), (64, 1, 0), (256, 2, 0), (256, 2, 1), (128, 2, 0), (128, 2, 1)]
    for ax, (m, group, rank) in zip(axes, cases, strict=True):
        rows, lanes, halves = tensor_rows(m, group, rank)
        table = np.full((128, 2), np.nan)
        for half in range(2):
            if halves == 1:
                table[lanes, half] = rows
            else:
                table[lanes + 64 * half, :] = rows[:, None]
        ax.imshow(table, aspect="auto", cmap="viridis", vmin=0, vmax=255)
        for lane in range(4, 128, 8):
            if not np.isnan(table[lane, 0]):
                text = f"row {int(table[lane, 0])}" + (f"\ncols half {lane // 64}" if halves == 2 else "")
                ax.text(0.5, lane, text, ha="center", va="center", fontsize=6, color="white")
        ax.set_title(f"M={m}, cta_group::{group}" + (f"\nCTA {rank} of the pair" if group == 2 else ""), fontsize=8)
        ax.set_xticks([])
        ax.set_ylabel("lane", fontsize=7)
        ax.tick_params(labelsize=6)
    save(fig, "tensor_memory")


def loads():
    fig, axes = plt.subplots(1, 4, figsize=(15, 5))
    for ax, (shape, repeat) in zip(axes, (("32x32b", 4), ("16x128b", 2), ("16x256b", 1), ("16x32bx2", 2)), strict=True):
        lanes, cols = _pattern(shape, repeat, 4)
        height, width = int(lanes.max()) + 1, int(cols.max()) + 1
        owner, value = np.full((height, width), "", dtype=object), np.zeros((height, width))
        for i in range(lanes.shape[0]):
            for t in range(32):
                owner[lanes[i, t], cols[i, t]] = f"{t}:{i}"
                value[lanes[i, t], cols[i, t]] = t % 20
        grid(ax, value, owner, f"tcgen05.ld {shape}.x{repeat} (thread:register)", "column", "lane of the warp's 32", 6)
    save(fig, "loads")


def scales():
    fig, ax = plt.subplots(figsize=(11, 6))
    lane, col = scale_positions(128)
    table, text = np.zeros((32, 16)), np.full((32, 16), "", dtype=object)
    for row in range(128):
        for byte in range(4):
            table[lane[row], col[row] * 4 + byte] = row // 32
            text[lane[row], col[row] * 4 + byte] = f"{row}.{byte}"
    grid(
        ax,
        table,
        text,
        "scale-factor atom of 128 rows: row.k-block of each byte (repeated in lanes 32–127)",
        "byte of columns c … c+3",
        "lane",
        6,
    )
    save(fig, "scales")


_SHARED = [(0, 14, "start / 16"), (16, 14, "leading / 16"), (32, 14, "stride / 16")]
_COMMON = [
    (2, 1, "sp"),
    (7, 3, "A"),
    (10, 3, "B"),
    (13, 2, "neg"),
    (15, 2, "major"),
    (17, 6, "N / 8"),
    (24, 5, "M / 16"),
]
#: name → (bits, [(first bit, bits, field)])
FIELDS = {
    "wgmma matrix descriptor": (64, [*_SHARED, (49, 3, "base"), (62, 2, "swizzle")]),
    "tcgen05 matrix descriptor": (
        64,
        [*_SHARED, (46, 3, "0b001"), (49, 3, "base"), (52, 1, "abs"), (61, 3, "swizzle")],
    ),
    "instruction descriptor, plain": (32, [*_COMMON, (4, 2, "D"), (30, 2, "ws")]),
    "instruction descriptor, block-scaled": (
        32,
        [*_COMMON, (4, 2, "B id"), (23, 1, "UE8M0"), (29, 2, "A id"), (31, 1, "K96")],
    ),
}


def descriptors():
    fig, axes = plt.subplots(4, 1, figsize=(14, 5))
    for ax, (title, (bits, fields)) in zip(axes, FIELDS.items(), strict=True):
        for n, (at, size, name) in enumerate(fields):
            ax.add_patch(plt.Rectangle((at, 0), size, 1, color=plt.cm.tab20(n * 2 % 20), alpha=0.6))
            ax.text(at + size / 2, 0.5, name, ha="center", va="center", fontsize=7, rotation=0 if size > 2 else 90)
        ax.set_xlim(0, bits)
        ax.set_ylim(0, 1)
        ax.set_yticks([])
        ax.set_xticks(sorted({x for a, s, _ in fields for x in (a, a + s)}))
        ax.tick_params(labelsize=6)
        ax.set_title(title, fontsize=9, loc="left")
    save(fig, "descriptors")


if __name__ == "__main__":
    for draw in (swizzles, operands, fragments, tensor_memory, loads, scales, descriptors):
        draw()
