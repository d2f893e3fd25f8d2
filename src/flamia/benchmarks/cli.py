"""The command `flamia bench`."""

from __future__ import annotations

import dataclasses
import json
from enum import Enum
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table

from flamia.benchmarks.prepare import RECIPES, Row, iterate
from flamia.benchmarks.workloads import PACKINGS
from flamia.recipe import get_recipe


class Subject(str, Enum):
    """What to time."""

    prepare = "prepare"


def bench(
    subject: Annotated[Subject, typer.Argument(help="prepare: quantizers, finishing launches, work lists.")],
    recipes: Annotated[str, typer.Option(help="Names of recipes, with commas.")] = ",".join(RECIPES),
    packings: Annotated[str, typer.Option(help="one, web, tiny, with commas.")] = "one,web",
    tokens: Annotated[int, typer.Option(help="Tokens of the packed row.", min=1)] = 65536,
    heads: Annotated[int, typer.Option(help="Heads of every tensor.", min=1)] = 16,
    head_dim: Annotated[int, typer.Option(help="Head dimension.")] = 128,
    separate: Annotated[bool, typer.Option(help="Also time the same work as separate torch operations.")] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object a line and nothing else.")] = False,
) -> None:
    """Time row preparation on this machine's GPU, beside a device copy in the same run.

    Times are medians over replays of a CUDA graph. A share is bytes read plus bytes written, each tensor once, per
    second, over the same figure of a 1 GiB copy. Exit status 2 without a CUDA device.
    """
    if not torch.cuda.is_available():
        raise ValueError("`flamia bench` needs a CUDA device, and torch sees none")
    names = tuple(name.strip() for name in recipes.split(",") if name.strip())
    kinds = tuple(name.strip() for name in packings.split(",") if name.strip())
    for name in names:
        if get_recipe(name).is_ablation:
            raise ValueError(f"recipes={name!r} is an ablation, which the device does not run")
    for kind in kinds:
        if kind not in PACKINGS:
            raise ValueError(f"packings={kind!r} is unknown: it must be one of {', '.join(PACKINGS)}")
    rows = iterate(names, kinds, tokens, heads, head_dim, separate)
    if as_json:
        for row in rows:
            print(json.dumps(dataclasses.asdict(row)), flush=True)
    else:
        Console().print(render(list(rows), torch.cuda.get_device_name()))


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
