"""How far back later tokens reach, scheme by scheme, measured by running each."""

from __future__ import annotations

from pathlib import Path

import torch
from style import pyplot, save

import flamia

TOKENS, POSITION, HEADS, DIM = 192, 157, 1, 128
SCHEMES = ("leaky-per-tensor", "leaky-fp4-keys", "leaky-floor-1x32", "leaky-up-1x32", "mxfp8", "fp4", "mxfp8-exact")


def changes(recipe: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Largest relative change of every earlier row of O and of dQ.

    Changed are the tokens from POSITION on: one of k, v or do times 64; or all by another sample, also times 64.
    """
    worst = [torch.zeros(POSITION, dtype=torch.float64) for _ in range(2)]
    results = []
    for changed in (None, 1, 2, 3, "all", "all times 64"):
        g = torch.Generator().manual_seed(0)
        x, other = ([torch.randn(1, TOKENS, HEADS, DIM, generator=g) for _ in range(4)] for _ in range(2))
        if isinstance(changed, int):
            x[changed][:, POSITION] *= 64
        elif changed is not None:
            for t, y in zip(x, other, strict=True):
                t[:, POSITION:] = y[:, POSITION:] * (64 if "64" in changed else 1)
        q, k, v = (t.bfloat16().requires_grad_() for t in x[:3])
        o = flamia.flash_attn_func(q, k, v, causal=True, recipe=recipe)
        (dq,) = torch.autograd.grad(o, q, x[3].bfloat16())
        results.append([t.detach()[0, :POSITION, 0].double() for t in (o, dq)])
    for after in results[1:]:
        for i, (a, b) in enumerate(zip(results[0], after, strict=True)):
            size = (a - b).abs().amax(-1) / a.abs().amax(-1).clamp(min=1e-30)
            worst[i] = torch.maximum(worst[i], size)
    return worst[0], worst[1]


def draw(folder: Path) -> list[Path]:
    plt = pyplot()
    figure, axes = plt.subplots(len(SCHEMES), 2, figsize=(8, 7.6), sharex=True, sharey=True)
    floor = 1e-5
    for (left, right), recipe in zip(axes, SCHEMES, strict=True):
        for axis, size, colour in zip((left, right), changes(recipe), ("C0", "C1"), strict=True):
            rows = torch.arange(POSITION)
            hit = size > 0
            # One line with gaps: a path per row would make the file ten times larger.
            gap = torch.full_like(size, torch.nan)
            x = torch.stack((rows.double(), rows.double(), gap), -1).flatten()
            y = torch.stack((torch.full_like(size, floor), size.clamp(min=floor * 1.3), gap), -1)
            axis.plot(x, torch.where(hit.unsqueeze(-1), y, torch.nan).flatten(), color=colour, linewidth=1)
            axis.axvline(POSITION, color="black", linewidth=0.8)
            for edge in range(0, POSITION, 32):
                axis.axvline(edge, color="grey", linewidth=0.4, linestyle=":")
            axis.set_yscale("log")
            axis.set_ylim(floor, 10)
            axis.grid(False)
            if not hit.any():
                axis.text(POSITION / 2, 3e-3, "bitwise unchanged", ha="center", color="grey")
        left.set_ylabel(recipe, rotation=0, ha="right", va="center")
    axes[0][0].set_title("O")
    axes[0][1].set_title("dQ")
    for axis in axes[-1]:
        axis.set_xlabel(f"row; tokens from {POSITION} on change")
    return [save(figure, folder, "leaks")]
