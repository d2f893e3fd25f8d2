"""What the figures share: one look, and files that are the same bytes for the same picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

COLOURS = ("#2563eb", "#dc2626", "#059669", "#d97706", "#7c3aed", "#64748b")


def pyplot() -> Any:
    """matplotlib.pyplot with this look and no display.

    Raises:
        ModuleNotFoundError: matplotlib is missing; the extra ``audit`` brings it.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plt.rcParams.update(
        {
            "axes.grid": True,
            "axes.prop_cycle": plt.cycler(color=COLOURS),
            "axes.spines.right": False,
            "axes.spines.top": False,
            "figure.constrained_layout.use": True,
            "figure.facecolor": "white",
            "font.size": 9,
            "grid.alpha": 0.3,
            "legend.frameon": False,
            "svg.fonttype": "none",
            "svg.hashsalt": "flamia",
        }
    )
    return plt


def save(figure: Any, folder: Path, name: str) -> Path:
    """Write ``name``.svg into the folder, without a date, and close the figure."""
    path = folder / f"{name}.svg"
    figure.savefig(path, metadata={"Date": None})
    pyplot().close(figure)
    return path
