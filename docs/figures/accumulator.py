"""How much of FP16 the prescaled dQ sums use, with the sequence's scale and with the causal one."""

from __future__ import annotations

from pathlib import Path

import torch
from style import pyplot, save
from torch import Tensor

import flamia
from flamia.reference import counters

TOKENS, DIM = 192, 64


def accumulators(scale: str, outliers: bool) -> Tensor:
    """Finished FP16 sums of one head: largest magnitude of every row."""
    g = torch.Generator().manual_seed(0)
    x = [torch.randn(1, TOKENS, 1, DIM, generator=g) for _ in range(4)]
    if outliers:  # late tokens of V and dO, and one channel of K
        x[1][..., 3] *= 50
        x[2][:, 150] *= 50
        x[3][:, 170] *= 50
    q, k, v = (t.bfloat16().requires_grad_() for t in x[:3])
    o = flamia.flash_attn_func(q, k, v, causal=True, recipe=flamia.Recipe(accumulator_scale=scale))
    seen: list[Tensor] = []
    real = counters.count_accumulator
    counters.count_accumulator = seen.append
    try:
        torch.autograd.grad(o, q, x[3].bfloat16())
    finally:
        counters.count_accumulator = real
    return seen[0][0].float().abs().amax(-1)


def draw(folder: Path) -> list[Path]:
    plt = pyplot()
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.2), sharey=True)
    for axis, outliers in zip(axes, (False, True), strict=True):
        for scale in ("sequence", "causal"):
            axis.plot(accumulators(scale, outliers)[1:], linewidth=0.8, label=f"{scale} scale")
        axis.axhline(65504, color="black", linewidth=0.8)
        axis.axhline(2.0**-14, color="grey", linewidth=0.8, linestyle="--")
        axis.set_yscale("log", base=2)
        axis.set_xlabel("query row")
        title = "outliers x50: a channel of K, tokens 150 of V, 170 of dO" if outliers else "N(0, 1)"
        axis.set_title(title, fontsize=9)
    axes[0].text(2, 65504 * 1.2, "largest FP16 number")
    axes[0].text(2, 2.0**-14 * 1.2, "smallest normal FP16 number")
    axes[0].set_ylabel("largest entry of a row's\nprescaled dQ sum")
    axes[0].set_ylim(2.0**-18, 2.0**18)
    axes[0].legend(loc="lower right")
    return [save(figure, folder, "accumulator")]
