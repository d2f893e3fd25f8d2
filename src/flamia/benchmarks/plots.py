"""Plots of `flamia bench`."""

from __future__ import annotations

from pathlib import Path

from flamia.benchmarks import train
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


def draw_speedups(rows: list[train.Row], path: Path, device: str) -> None:
    """Speed-ups over the fastest peer: a panel for each part and mask, a bar for each of ours and workload.

    Raises:
        ValueError: no row has a speed-up, since no peer ran.
    """
    from matplotlib.figure import Figure

    compared = [row for row in rows if row.speedup is not None]
    if not compared:
        raise ValueError("plot: there is nothing to draw, no peer ran on any of these workloads")
    places = list(dict.fromkeys((row.part, row.mask) for row in compared))
    means = {(s.group, s.mask, s.part, s.name): s.geometric_mean for s in train.summarize(rows)}
    figure = Figure(figsize=(12, 3.5 * len(places)), layout="constrained")
    panels = figure.subplots(len(places), 1, squeeze=False)[:, 0]
    for panel, (part, mask) in zip(panels, places, strict=True):
        mine = [row for row in compared if (row.part, row.mask) == (part, mask)]
        workloads, names = (
            [*dict.fromkeys(values)] for values in zip(*((r.workload, r.name) for r in mine), strict=True)
        )
        width = 0.8 / len(names)
        for n, name in enumerate(names):
            found = {row.workload: row.speedup for row in mine if row.name == name}
            spots = [i - 0.4 + (n + 0.5) * width for i, workload in enumerate(workloads) if workload in found]
            mean = means.get(("packed", mask, part, name))
            label = name if mean is None else f"{name}, geometric mean of packed rows {mean:.2f}"
            panel.bar(spots, [found[w] for w in workloads if w in found], width, label=label)
        panel.axhline(1, color="black", linewidth=0.8)
        panel.set_xticks(range(len(workloads)), workloads, rotation=20, ha="right")
        panel.set_ylabel("times as fast as the fastest peer")
        title = "Training call" if part == "training" else "Attention backward"
        panel.set_title(f"{title}, {mask}, {device}", loc="left")
        panel.legend(frameon=False)
        panel.spines[["top", "right"]].set_visible(False)
    figure.savefig(path)
