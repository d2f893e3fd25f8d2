"""`flamia train`."""

from __future__ import annotations

import math
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table

from .config import TrainConfig
from .data import load_corpus
from .evaluation import MATERIAL
from .loop import Result, run
from .progress import progress_bar


def train(
    preset: Annotated[
        str, typer.Option(help="tiny (a laptop), paper (six layers x 1024), 1b (a large GPU), probe (finds a leak).")
    ] = "tiny",
    recipe: Annotated[
        str, typer.Option(help="Attention to train through: exact, bf16, mxfp8, nvfp4, fp4, ...")
    ] = "mxfp8",
    steps: Annotated[int | None, typer.Option(help="Optimiser steps.")] = None,
    data: Annotated[
        list[str] | None,
        typer.Option(help="File or folder of text; repeatable. Default: Python's standard library."),
    ] = None,
    tokens: Annotated[int | None, typer.Option(help="Tokens in a step.")] = None,
    context: Annotated[int | None, typer.Option(help="Longest document in a step, in tokens.")] = None,
    seed: Annotated[int, typer.Option(help="Of the weights and the order of the data.")] = 0,
    lr: Annotated[float | None, typer.Option(help="Peak learning rate.")] = None,
    warmup: Annotated[int | None, typer.Option(help="Steps of linear warm-up.")] = None,
    weight_decay: Annotated[float | None, typer.Option(help="Of matrices.")] = None,
    clip: Annotated[float | None, typer.Option(help="Largest gradient norm.")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    backend: Annotated[str, typer.Option(help="auto, reference, sm90 or sm100.")] = "auto",
    autocast: Annotated[
        bool | None, typer.Option(help="BF16 outside of attention too. By default in 1b alone.", show_default=False)
    ] = None,
    out: Annotated[
        str | None,
        typer.Option(help="Folder of the log, the checkpoints and the result; nothing is written without it."),
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the checkpoint in --out.")] = False,
    eval_every: Annotated[int, typer.Option(help="Steps between evaluations; 0: only at the end.")] = 0,
    eval_rows: Annotated[int | None, typer.Option(help="Validation rows in one evaluation.")] = None,
    log_every: Annotated[int | None, typer.Option(help="Steps between reads of the device.")] = None,
    checkpoint_every: Annotated[int, typer.Option(help="Steps between checkpoints; 0: only at the end.")] = 0,
    threads: Annotated[int | None, typer.Option(help="Processor threads.")] = None,
) -> None:
    """Train a byte-level GPT on real text and evaluate it through its own attention and through exact attention.

    A loss that is lower through the model's own attention than through exact attention is the sign of a leak: the
    model reads something of later tokens in the scales of its attention.
    """
    if threads is not None:
        if threads < 1:
            raise ValueError(f"threads is {threads}; it must be at least 1")
        torch.set_num_threads(threads)
    config = TrainConfig.of(
        preset,
        recipe=recipe,
        steps=steps,
        data=tuple(data) if data else None,
        tokens=tokens,
        context=context,
        seed=seed,
        lr=lr,
        warmup=warmup,
        weight_decay=weight_decay,
        clip=clip,
        device=device,
        backend=backend,
        autocast=autocast,
        out=out,
        resume=resume,
        eval_every=eval_every,
        eval_rows=eval_rows,
        log_every=log_every,
        checkpoint_every=checkpoint_every,
    )
    corpus = load_corpus(config.data)
    Console(stderr=True).print(corpus.describe(), highlight=False)
    with progress_bar(f"train {recipe}", config.steps) as progress:
        try:
            result = run(config, progress, corpus=corpus)
        except FloatingPointError as error:
            typer.echo(f"flamia: {error}", err=True)
            raise typer.Exit(1) from None
    Console().print(table(result))


def table(result: Result) -> Table:
    """The evaluations of a run, and what they say about a leak."""
    config = result.config
    grid = Table(
        title=f"{config.recipe}: {result.parameters:,} parameters, {config.steps} steps x {config.tokens} tokens, "
        f"{result.tokens_per_s:,.0f} tokens/s",
        caption=verdict(result),
        title_justify="left",
        caption_justify="left",
    )
    for name in ("step", "loss, own attention", "loss, exact attention", "own - exact"):
        grid.add_column(name, justify="right")
    for e in result.evaluations:
        error = "" if math.isnan(e.gap_standard_error) else f" ± {e.gap_standard_error:.4f}"
        grid.add_row(str(e.step), f"{e.own:.4f}", f"{e.exact:.4f}", f"{e.gap:+.4f}{error}")
    return grid


def verdict(result: Result) -> str:
    """One sentence on the final gap: does it exceed three standard errors, and `MATERIAL`?"""
    final = result.final
    if result.config.recipe == "exact":
        return "Exact attention is its own reference."
    if math.isnan(final.gap_standard_error):
        return "One validation row tells nothing about the size of the noise."
    if abs(final.gap) < max(MATERIAL, 3 * final.gap_standard_error):
        return "No difference that matters."
    if final.gap < 0:
        return "Better through its own attention than through exact attention: it has learned to read a leak."
    return "Worse through its own attention than through exact attention: rounding noise, no sign of a leak."
