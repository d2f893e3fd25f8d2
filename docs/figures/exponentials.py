"""Ratio of the two bit-level exponentials to the true power of two, and what is left after rounding to codes."""

from __future__ import annotations

from pathlib import Path

import torch
from style import pyplot, save

from flamia import formats
from flamia.reference.exponentials import exp2, mitchell, schraudolph


def draw(folder: Path) -> list[Path]:
    plt = pyplot()
    x = torch.linspace(-3.0, 0.0, 1537, dtype=torch.float64)
    true = torch.exp2(x)
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 2.9))
    for name, f in (("Mitchell", mitchell), ("Schraudolph (BF16)", schraudolph)):
        left.plot(x, f(x).double() / true, label=name, linewidth=1)
    left.axhline(1.0, color="black", linewidth=0.8)
    left.set_xlabel("x")
    left.set_ylabel("approximation / 2^x")
    left.set_ylim(0.945, 1.05)
    left.legend(ncols=2, loc="upper center")
    exact = formats.round_e2m1(exp2(x + 2.5))
    near = formats.round_e2m1(mitchell(x + 2.5))
    right.plot(x + 2.5, exact, label="E2M1 of 2^x", linewidth=2.5, alpha=0.5)
    right.plot(x + 2.5, near, "--", label="E2M1 of Mitchell's 2^x", linewidth=1)
    same = float((exact == near).double().mean())
    right.set_title(f"the same code on {100 * same:.1f} % of this range", fontsize=9)
    right.set_xlabel("x")
    right.legend()
    return [save(figure, folder, "exponentials")]
