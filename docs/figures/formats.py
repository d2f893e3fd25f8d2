"""The code grids of the formats, and what the two ways to round a scale do to a block's maximum."""

from __future__ import annotations

from pathlib import Path

import torch
from style import pyplot, save

from flamia import formats


def draw(folder: Path) -> list[Path]:
    plt = pyplot()
    figure, (top, bottom) = plt.subplots(2, 1, figsize=(8, 4.6), height_ratios=(1, 1.5))
    e4m3 = formats.decode_e4m3(torch.arange(127, dtype=torch.uint8))[1:]
    e2m1 = formats.decode_e2m1(torch.arange(8, dtype=torch.uint8))[1:]
    rows = (
        ("E4M3\n126 magnitudes", e4m3),
        ("E4M3, subnormal", e4m3[e4m3 < 2.0**-6]),
        ("E2M1\n7 magnitudes", e2m1),
    )
    for y, (_, values) in enumerate(rows):
        top.plot(values, [-y] * len(values), "|", markersize=14)
    top.set_yticks([0, -1, -2], [name for name, _ in rows])
    top.set_ylim(-2.6, 0.6)
    top.set_xscale("log", base=2)
    top.set_xlabel("magnitude (zero is a code of both)")

    amax = torch.logspace(0, 4, 1601, base=2.0)
    for element, largest in (("e4m3", formats.E4M3_MAX), ("e2m1", formats.E2M1_MAX)):
        for rounding, line in (("up", "-"), ("floor", ":")):
            scaled = amax * formats.pow2(-formats.e8m0_exponent(amax, element, rounding)) / largest
            bottom.plot(amax, scaled, line, label=f"{element.upper()}, rounded {'up' if rounding == 'up' else 'down'}")
    bottom.axhline(1.0, color="black", linewidth=0.8)
    bottom.text(1.02, 1.2, "above 1: clamped")
    bottom.set_ylim(0.15, 1.4)
    bottom.set_xscale("log", base=2)
    bottom.set_xlabel("largest magnitude of the block")
    bottom.set_ylabel("scaled maximum /\nlargest code")
    bottom.legend(ncols=2, loc="lower right")
    return [save(figure, folder, "formats")]
