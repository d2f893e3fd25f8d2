"""The command `flamia bench`."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

from flamia.benchmarks import forward, model, prepare, train
from flamia.benchmarks.peers import PEERS
from flamia.benchmarks.prepare import RECIPES, Row
from flamia.benchmarks.training_peers import PARTS
from flamia.benchmarks.workloads import PACKINGS, named_workloads
from flamia.recipe import get_recipe
from flamia.training import MODELS


class Subject(str, Enum):
    """What to time."""

    prepare = "prepare"
    forward = "forward"
    train = "train"
    model = "model"


def bench(
    subject: Annotated[
        Subject,
        typer.Argument(
            help="prepare: quantizers, finishing launches, work lists. forward: attention, beside others. train: "
            "attention forward and backward, and the backward alone, beside others. model: whole training steps."
        ),
    ],
    recipes: Annotated[
        str | None, typer.Option(help="Names, with commas; but for prepare one.", show_default=False)
    ] = None,
    packings: Annotated[str, typer.Option(help="prepare: one, web, tiny, with commas.")] = "one,web",
    tokens: Annotated[int, typer.Option(help="prepare: tokens of the packed row.", min=1)] = 65536,
    heads: Annotated[int, typer.Option(help="prepare: heads of every tensor.", min=1)] = 16,
    head_dim: Annotated[int, typer.Option(help="prepare: head dimension.")] = 128,
    separate: Annotated[bool, typer.Option(help="prepare: also the same work as separate torch operations.")] = True,
    workloads: Annotated[
        str | None,
        typer.Option(
            help="forward, train, model: names with commas, or packed, batched, all. By default all; model: "
            f"{','.join(model.WORKLOADS)}.",
            show_default=False,
        ),
    ] = None,
    masks: Annotated[str, typer.Option(help="forward, train: causal, full, with commas.")] = "causal,full",
    peers: Annotated[
        str | None,
        typer.Option(
            help=f"Whom to time beside ours, with commas. forward, train: {', '.join(PEERS)}; model: "
            f"{', '.join(model.PEERS)}. By default all.",
            show_default=False,
        ),
    ] = None,
    rounds: Annotated[int, typer.Option(help="forward, train, model: rounds of turns.", min=1)] = 20,
    parts: Annotated[str, typer.Option(help="train: training, backward (alone), with commas.")] = ",".join(PARTS),
    causal_scale: Annotated[bool, typer.Option(help="train: ours with accumulator_scale='causal', too.")] = False,
    models: Annotated[str, typer.Option(help="model: presets of `flamia train`, with commas.")] = "paper,1b",
    graphs: Annotated[
        bool, typer.Option("--graphs", help="model: replay steps from CUDA graphs; else launch them as usual.")
    ] = False,
    plot: Annotated[Path | None, typer.Option(help="forward: draw TFLOP/s, train: speed-ups into this file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object a line and nothing else.")] = False,
) -> None:
    """Time the device kernels on this machine's GPU.

    Times are medians, over replays of CUDA graphs unless said otherwise. prepare: beside a device copy in the same run;
    a share is bytes read plus bytes written, each tensor once, per second, over the same figure of a 1 GiB copy.
    forward, train: ours and others take turns on the same inputs, after every result has been held against exact
    attention. model: steps of AdamW with BF16 autocast, after gradients have been held against those through torch's
    attention. Exit status 2 without a CUDA device.
    """
    if not torch.cuda.is_available():
        raise ValueError("`flamia bench` needs a CUDA device, and torch sees none")
    if subject is Subject.prepare:
        rows = _prepare_rows(recipes or ",".join(RECIPES), packings, tokens, heads, head_dim, separate)
        _show(rows, as_json, render)
        return
    chosen = recipes or "mxfp8"
    if get_recipe(chosen).format not in train.FLOORS:
        raise ValueError(f"recipes={chosen!r} has no kernels to time: its format must be {' or '.join(train.FLOORS)}")
    rivals = tuple(model.PEERS if subject is Subject.model else PEERS)
    named = _known("peers", peers, rivals) if peers is not None else rivals
    if subject is Subject.model:
        names = _known("models", models, tuple(MODELS))
        rows_of = named_workloads(workloads or ",".join(model.WORKLOADS))
        _show(model.iterate(names, rows_of, named, chosen, rounds, graphs=graphs), as_json, render_model)
        return
    chosen_masks = _known("masks", masks, ("causal", "full"))
    common = (named_workloads(workloads or "all"), chosen_masks, named, chosen, rounds)
    if subject is Subject.forward:
        shown = _show(forward.iterate(*common), as_json, render_forward)
    else:
        chosen_parts = _known("parts", parts, PARTS)
        shown = _show(train.iterate(*common, parts=chosen_parts, causal_scale=causal_scale), as_json, render_train)
        _show(iter(train.summarize(shown)), as_json, render_summaries)
    if plot is not None:
        from flamia.benchmarks import plots

        draw: Any = plots.draw_forward if subject is Subject.forward else plots.draw_speedups
        draw(shown, plot, torch.cuda.get_device_name())


def _show(rows: Iterator[Any], as_json: bool, table: Any) -> list[Any]:
    shown = []
    for row in rows:
        shown.append(row)
        if as_json:
            print(json.dumps(dataclasses.asdict(row)), flush=True)
    if not as_json:
        Console().print(table(shown, torch.cuda.get_device_name()))
    return shown


def _known(name: str, text: str, known: tuple[str, ...]) -> tuple[str, ...]:
    words = tuple(word.strip() for word in text.split(",") if word.strip())
    for word in words:
        if word not in known:
            raise ValueError(f"{name}={word!r} is unknown: it must be one of {', '.join(known)}")
    return words


def _prepare_rows(recipes: str, packings: str, tokens: int, heads: int, head_dim: int, separate: bool) -> Iterator[Row]:
    names = tuple(name.strip() for name in recipes.split(",") if name.strip())
    for name in names:
        if get_recipe(name).is_ablation:
            raise ValueError(f"recipes={name!r} is an ablation, which the device does not run")
    return prepare.iterate(names, _known("packings", packings, PACKINGS), tokens, heads, head_dim, separate)


def render_forward(rows: list[forward.Row], device: str) -> Table:
    """The measurements of the attention forward as a table."""
    table = Table(title=f"Attention forward on {device}", title_justify="left", title_style="bold")
    for name in ("workload", "mask", "documents", "heads", "what"):
        table.add_column(name)
    for name in ("time, ms", "TFLOP/s", "cosine", "of the best peer's time"):
        table.add_column(name, justify="right")
    before = None
    for row in rows:
        if row.refused is not None:
            table.add_row("", "", "", "", row.name, "-", "-", "-", row.refused)
            continue
        if before not in (None, (row.workload, row.mask)):
            table.add_section()
        before = (row.workload, row.mask)
        ratio = f"{row.ratio:.2f}" if row.ratio else ""
        figures = (f"{row.seconds * 1e3:.3f}", f"{row.tflops:.0f}", f"{row.cosine:.5f}", ratio)
        table.add_row(row.workload, row.mask, f"{row.documents:,}", row.heads, row.name, *figures)
    return table


def render_train(rows: list[train.Row], device: str) -> Table:
    """The measurements of attention forward and backward as a table."""
    table = Table(title=f"Attention in training on {device}", title_justify="left", title_style="bold")
    for name in ("workload", "mask", "heads", "part", "what"):
        table.add_column(name)
    for name in ("time, ms", "TFLOP/s", "cosines of o, dq, dk, dv", "memory, MiB", "speed-up", "cost"):
        table.add_column(name, justify="right")
    before = None
    for row in rows:
        group = (row.workload, row.mask, row.part)
        if before not in (None, group):
            table.add_section()
        before = group
        place = (row.workload, row.mask, row.heads, row.part)
        if row.refused is not None:
            table.add_row(*place, row.name, "-", "-", row.refused, "", "", "")
            continue
        cosines = " ".join(
            "-" if x is None else f"{x:.4f}" for x in (row.cosine_o, row.cosine_dq, row.cosine_dk, row.cosine_dv)
        )
        memory = "" if row.memory is None else f"{row.memory / 2**20:,.0f}"
        speedup = "" if row.speedup is None else f"{row.speedup:.2f}"
        cost = "" if row.cost is None else f"{row.cost:+.1%}"
        figures = (f"{row.seconds * 1e3:.3f}", f"{row.tflops:.0f}", cosines, memory, speedup, cost)
        table.add_row(*place, row.name, *figures)
    return table


def render_summaries(summaries: list[train.Summary], device: str) -> Table:
    """Geometric means of the speed-ups over the fastest peer as a table."""
    table = Table(title="Speed-ups over the fastest peer", title_justify="left", title_style="bold")
    for name in ("workloads", "mask", "part", "what"):
        table.add_column(name)
    for name in ("geometric mean", "least", "there"):
        table.add_column(name, justify="right")
    for s in summaries:
        figures = (f"{s.geometric_mean:.3f}", f"{s.least:.3f}", s.slowest)
        table.add_row(f"{s.workloads} {s.group}", s.mask, s.part, s.name, *figures)
    return table


def render_model(rows: list[model.Measurement], device: str) -> Table:
    """The measurements of training steps as a table."""
    table = Table(title=f"Training steps on {device}", title_justify="left", title_style="bold")
    for name in ("model", "row", "attention", "timing"):
        table.add_column(name)
    for name in ("time, ms", "tokens/s", "cosine of gradients", "memory, GiB", "speed-up"):
        table.add_column(name, justify="right")
    for row in rows:
        place = (f"{row.model}, {row.parameters / 1e6:,.0f} M", f"{row.workload}, {row.tokens:,} tokens", row.name)
        if row.refused is not None:
            table.add_row(*place, row.timing, "-", row.refused, "", "", "")
            continue
        speedup = "" if row.speedup is None else f"{row.speedup:.3f}"
        figures = (f"{row.seconds * 1e3:.1f}", f"{row.tokens_per_s:,.0f}", f"{row.cosine:.4f}")
        table.add_row(*place, row.timing, *figures, f"{row.memory / 2**30:.1f}", speedup)
    return table


def render(rows: list[Row], device: str) -> Table:
    """The measurements as a table."""
    table = Table(title=f"Row preparation on {device}", title_justify="left", title_style="bold")
    for name in ("recipe", "packing", "tokens", "documents", "work"):
        table.add_column(name)
    for name in ("time, µs", "GB/s", "of the copy", "apart, µs"):
        table.add_column(name, justify="right")
    for row in rows:
        rate = f"{row.bytes / row.seconds / 1e9:.0f}" if row.bytes else ""
        share = f"{row.share:.0%}" if row.share else ""
        apart = f"{row.separate * 1e6:.0f}" if row.separate else ""
        counts = (f"{row.tokens:,}", f"{row.documents:,}") if row.tokens else ("", "")
        table.add_row(row.recipe, row.packing, *counts, row.work, f"{row.seconds * 1e6:.1f}", rate, share, apart)
    return table
