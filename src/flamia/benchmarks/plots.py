"""Plots of `flamia bench`."""

from __future__ import annotations

from pathlib import Path

from flamia.benchmarks.forward import Row


def draw_forward(rows: list[Row], path: Path, device: str) -> None:
    """TFLOP/s of everything that ran, a panel for each mask and a group of bars for each workload."""
    from matplotlib.figure import Figure

    ran = [row for row in rows if row.refused is None]
    masks = list(dict.fromkeys(row.mask for row in ran))
    names = list(dict.fromkeys(row.name for row in ran))
    figure = Figure(figsize=(12, 4 * max(1, len(masks))), layout="constrained")
    panels = figure.subplots(max(1, len(masks)), 1, squeeze=False)[:, 0]
    for panel, mask in zip(panels, masks, strict=False):
        workloads = list(dict.fromkeys(row.workload for row in ran if row.mask == mask))
        width = 0.8 / len(names)
        for n, name in enumerate(names):
            found = {row.workload: row.tflops for row in ran if row.mask == mask and row.name == name}
            places = [i - 0.4 + (n + 0.5) * width for i, workload in enumerate(workloads) if workload in found]
            panel.bar(places, [found[w] for w in workloads if w in found], width, label=name)
        panel.set_xticks(range(len(workloads)), workloads, rotation=20, ha="right")
        panel.set_ylabel("TFLOP/s")
        panel.set_title(f"Attention forward, {mask}, {device}", loc="left")
        panel.legend(frameon=False, ncols=len(names))
        panel.spines[["top", "right"]].set_visible(False)
    figure.savefig(path)
