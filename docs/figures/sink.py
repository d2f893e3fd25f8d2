"""What is left of a long flat tail beside one dominant key: the reach of E4M3 probability codes."""

from __future__ import annotations

import math
from pathlib import Path

import torch
from style import pyplot, save

import flamia


def draw(folder: Path) -> list[Path]:
    plt = pyplot()
    keys = [1 << n for n in range(8, 18)]
    figure, axis = plt.subplots(figsize=(7, 3))
    recipes = (
        ("mxfp8: p_shift=4, tau=4", flamia.get_recipe("mxfp8")),
        ("p_shift=8, tau=0", flamia.Recipe(p_shift=8, tau=0.0)),
        ("fp4", flamia.get_recipe("fp4")),
    )
    for name, recipe in recipes:
        axis.plot(keys, [_output(n, recipe) / 0.25 for n in keys], "o-", markersize=3, label=name)
    axis.axhline(1.0, color="black", linewidth=0.8)
    axis.set_xscale("log", base=2)
    axis.set_xlabel("keys that share half of the weight; one key has the other half and V = 0")
    axis.set_ylabel("O / exact O")
    axis.legend(loc="center left")
    return [save(figure, folder, "sink")]


def _output(keys: int, recipe: flamia.Recipe) -> float:
    q, k, v = torch.zeros(1, 1, 1, 32), torch.zeros(1, keys + 1, 1, 32), torch.full((1, keys + 1, 1, 32), 0.5)
    q[..., 0], k[0, 0, 0, 0], v[0, 0] = 1.0, math.log(keys), 0.0
    x = [t.bfloat16() for t in (q, k, v)]
    return float(flamia.flash_attn_func(*x, softmax_scale=1.0, recipe=recipe)[0, 0, 0, 0])
