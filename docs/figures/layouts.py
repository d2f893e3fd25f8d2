"""Where tokens lie in payloads: blocks that restart with documents, and the orders of column payloads."""

from __future__ import annotations

from pathlib import Path

import torch
from style import COLOURS, pyplot, save

from flamia.documents import TOKEN_BLOCK
from flamia.quantize.payloads import COLUMN_ORDERS
from flamia.quantize.reference import TokenMap, token_blocks

LENGTHS = (45, 20, 78)


def draw(folder: Path) -> list[Path]:
    return [_documents(folder), _orders(folder)]


def _documents(folder: Path) -> Path:
    """Exponents as the quantizer makes them for three documents, in the row table and in the column payload."""
    plt = pyplot()
    total = sum(LENGTHS)
    g = torch.Generator().manual_seed(3)
    cu = torch.tensor([0, *torch.tensor(LENGTHS).cumsum(0).tolist()], dtype=torch.int32)
    tokens = TokenMap.build(cu, total)
    x = torch.randn(total, 1, 32, generator=g) * 2.0 ** (torch.arange(total).view(-1, 1, 1) // 16)
    payload = token_blocks(x, tokens, columns="natural")
    exponents = payload.exponents[0].to(torch.int64) - 127
    figure, (top, bottom) = plt.subplots(2, 1, figsize=(9, 2.9), sharex=True)
    for axis, places, width, title in (
        (top, torch.arange(total), total, "row payload and exponent table: as the tokens lie"),
        (bottom, tokens.position, tokens.capacity, "column payload: every document starts at a multiple of 32"),
    ):
        axis.add_patch(plt.Rectangle((0, 0), width, 1, facecolor="#f1f5f9", edgecolor="#94a3b8", hatch="///", lw=0.5))
        start = 0
        for length, colour in zip(LENGTHS, COLOURS, strict=False):
            axis.add_patch(plt.Rectangle((int(places[start]), 0), length, 1, facecolor=colour, lw=0))
            for first in range(start, start + length, TOKEN_BLOCK):
                p, n = int(places[first]), min(TOKEN_BLOCK, start + length - first)
                axis.plot([p, p], [-0.25, 1.25], color="black", lw=1)
                axis.text(p + n / 2, 0.5, f"$2^{{{int(exponents[first])}}}$", ha="center", va="center", color="white")
            start += length
        axis.set_title(title, loc="left", fontsize=9)
        axis.set_ylim(-0.3, 1.3)
        axis.set_yticks([])
        axis.grid(False)
        axis.spines["left"].set_visible(False)
    bottom.set_xlim(-1, tokens.capacity + 1)
    bottom.set_xticks(range(0, tokens.capacity + 1, TOKEN_BLOCK))
    bottom.set_xlabel(f"position; documents of {', '.join(map(str, LENGTHS))} tokens, one exponent per 32 of them")
    return save(figure, folder, "documents")


def _orders(folder: Path) -> Path:
    plt = pyplot()
    figure, axes = plt.subplots(len(COLUMN_ORDERS), 1, figsize=(9, 2.6))
    for axis, (name, order) in zip(axes, COLUMN_ORDERS.items(), strict=True):
        axis.imshow([order], cmap="viridis", vmin=0, vmax=40, extent=(0, 32, 0, 1), aspect="auto")
        for position, token in enumerate(order):
            axis.text(position + 0.5, 0.5, str(token), ha="center", va="center", color="white", fontsize=7)
        axis.set_xlim(0, 32)
        axis.set_ylim(0, 1)
        axis.set_yticks([0.5], [f'"{name}"'])
        axis.set_xticks([i + 0.5 for i in range(0, 32, 4)], [])
        axis.grid(False)
        axis.spines[["left", "bottom"]].set_visible(False)
    axes[-1].set_xticks([i + 0.5 for i in range(0, 32, 4)], [str(i) for i in range(0, 32, 4)])
    axes[-1].set_xlabel("position within 32 tokens of a column payload; the number is the token stored there")
    return save(figure, folder, "column-orders")
