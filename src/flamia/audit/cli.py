"""The commands `flamia audit` and `flamia accuracy`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from .accuracy import MASKS, Accuracy, default_recipes, iterate_accuracy
from .causality import CausalityReport, causality, runs
from .inputs import input_names
from .isolation import LENGTHS, IsolationReport, isolation
from .targets import get_target

# Each route with and without its exact options, the schemes that leak (the probe must catch them), and SDPA.
TARGETS = (
    "mxfp8",
    "mxfp8-exact",
    "nvfp4",
    "nvfp4-exact",
    "fp4",
    "fp4-exact",
    "leaky-per-tensor",
    "leaky-floor-1x32",
    "leaky-up-1x32",
    "leaky-fp4-keys",
    "torch-sdpa",
)

Device = Annotated[str, typer.Option(help="torch device to run on.")]
Seed = Annotated[int, typer.Option(help="Seed of the inputs.")]
HeadDim = Annotated[int, typer.Option(help="Head dimension; captured inputs have 32.")]
KvHeads = Annotated[int | None, typer.Option(help="Heads of k and v; as many as of q when left out.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object a line and nothing else.")]
Html = Annotated[Path | None, typer.Option(help="Write a report with plots to this file.", dir_okay=False)]


def audit(
    targets: Annotated[
        list[str] | None,
        typer.Argument(help="Names of recipes, torch-sdpa, exact, or your own 'module:function'.", show_default=False),
    ] = None,
    inputs: Annotated[str, typer.Option(help="Kinds of inputs, with commas.")] = "gaussian,heavy",
    tokens: Annotated[int, typer.Option(help="Length of the sequence.")] = 384,
    heads: Annotated[int, typer.Option(help="Query heads.")] = 2,
    kv_heads: KvHeads = None,
    head_dim: HeadDim = 128,
    factor: Annotated[float, typer.Option(help="What changed tokens are multiplied by.")] = 64.0,
    documents: Annotated[
        bool | None,
        typer.Option(
            "--isolation/--no-isolation",
            help="Also test that packed documents do not mix (by default yes, except with --json).",
        ),
    ] = None,
    seed: Seed = 0,
    device: Device = "cpu",
    as_json: Json = False,
    html: Html = None,
) -> None:
    """Does information flow backwards in time, or between documents?

    Later tokens are changed and earlier rows of o, lse and dq compared, bit by bit. A result is bitwise safe, or
    confined (31 rows at most, o and lse by at most a tenth), or it LEAKS.

    Your own target is 'module:function', a function of q, k, v, each (batch, tokens, heads, head dim) in BF16,
    with a parameter causal and optionally softmax_scale. It returns o or (o, lse) and is differentiated by
    autograd. With a parameter cu_seqlens_q it is called like FlashAttention's varlen function instead.

    Exit status: 0 if every target keeps its promise, 1 if one does not, 2 for bad usage. Promised are: no changed
    bit (exact recipes); being caught (leaky ones); o and lse confined at worst (the other recipes, whose dq can
    reach further through the scale of the FP16 accumulator); o, lse and dq confined (SDPA and yours); and that
    documents do not mix.
    """
    chosen = [get_target(name) for name in targets or TARGETS]
    kinds = _names(inputs, "inputs", input_names())
    with_documents = documents if documents is not None else not as_json
    options: dict[str, Any] = {
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": head_dim,
        "seed": seed,
        "device": device,
    }
    _threads(tokens)
    reports: list[CausalityReport] = []
    isolations: list[IsolationReport] = []
    total = len(chosen) * (runs(kinds, tokens) + with_documents * (2 + len(LENGTHS)))
    with _progress() as progress:
        task = progress.add_task("audit", total=total)
        for i, target in enumerate(chosen):
            progress.update(task, description=target.name)

            def advance() -> None:
                progress.advance(task)

            reports.append(causality(target, inputs=kinds, tokens=tokens, factor=factor, advance=advance, **options))
            if with_documents:
                isolations.append(isolation(target, inputs=kinds[:1], advance=advance, **options))
            # Captured inputs can be shorter than asked, and then take fewer runs.
            progress.update(task, completed=total * (i + 1) // len(chosen))
            if as_json:
                _print_json(reports[-1], isolations[-1] if with_documents else None)
    if not as_json:
        _print_audit(reports, isolations)
    if html is not None:
        from .page import causality_section, page

        html.write_text(page("Audit of attention", [causality_section(reports, isolations)]), encoding="utf-8")
        print(f"report written to {html}", file=sys.stderr)
    broken = [r.target for r in reports if not r.as_promised]
    broken += [r.target for r in isolations if not r.as_promised]
    if broken:
        print(f"not as promised: {', '.join(dict.fromkeys(broken))}", file=sys.stderr)
        raise typer.Exit(1)


def accuracy(
    recipes: Annotated[
        str | None,
        typer.Option(
            help="Recipes or other targets, with commas; 'NAME+offsets' for constant k and v offsets. "
            "By default the three routes and torch-sdpa.",
            show_default=False,
        ),
    ] = None,
    inputs: Annotated[str, typer.Option(help="Kinds of inputs, with commas.")] = "gaussian",
    masks: Annotated[str, typer.Option(help="causal, full or both.")] = "causal,full",
    tokens: Annotated[int, typer.Option(help="Length of the sequence; captured inputs have at most 512.")] = 2048,
    heads: Annotated[
        int | None, typer.Option(help="Query heads; by default 4, and all 72 of captured inputs.", show_default=False)
    ] = None,
    kv_heads: KvHeads = None,
    head_dim: HeadDim = 128,
    seed: Seed = 0,
    device: Device = "cpu",
    as_json: Json = False,
    html: Html = None,
) -> None:
    """How far are o, dq, dk and dv from exact attention on the same operands?

    Kinds of inputs: gaussian; heavy (outlier channels and tokens); mean (v and do have means); flat (nearly
    uniform weights); captured (q, k, v of a trained model on real text) and captured-loss (with its
    gradients).
    """
    kinds = _names(inputs, "inputs", input_names())
    chosen_masks = _names(masks, "masks", MASKS)
    names = None if recipes is None else [name.strip() for name in recipes.split(",") if name.strip()]
    _threads(tokens)
    rows: list[Accuracy] = []
    total = sum(len(names or default_recipes(kind)) for kind in kinds) * len(chosen_masks)
    with _progress() as progress:
        task = progress.add_task("exact attention", total=total)
        for row in iterate_accuracy(
            names,
            inputs=kinds,
            masks=chosen_masks,
            tokens=tokens,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            seed=seed,
            device=device,
        ):
            rows.append(row)
            progress.update(task, advance=1, description=f"{row.recipe}, {row.inputs}, {row.mask}")
            if as_json:
                from .report import accuracy_lines

                print(*accuracy_lines([row]), sep="\n", flush=True)
    if not as_json:
        from rich.console import Console

        from .report import accuracy_tables

        console = Console()
        for table in accuracy_tables(rows):
            console.print(table)
    if html is not None:
        from .page import accuracy_section, page

        html.write_text(page("Accuracy of attention", [accuracy_section(rows)]), encoding="utf-8")
        print(f"report written to {html}", file=sys.stderr)


def _names(text: str, option: str, allowed: Sequence[str]) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in allowed:
            raise ValueError(f"--{option} {name!r} is unknown; allowed are {', '.join(allowed)}")
    if not names:
        raise ValueError(f"--{option} is empty; allowed are {', '.join(allowed)}")
    return names


def _threads(tokens: int) -> None:
    """One thread for short sequences: more gain nothing there, and on a busy machine they wait for one another."""
    if tokens <= 1024:
        torch.set_num_threads(1)


def _progress() -> Any:
    """A progress bar on standard error; nothing where that is not a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    return Progress(
        TextColumn("{task.description:28}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        transient=True,
        disable=not sys.stderr.isatty(),
    )


def _print_json(report: CausalityReport, documents: IsolationReport | None) -> None:
    from .report import causality_lines, isolation_lines

    lines = [*causality_lines(report), *(isolation_lines(documents) if documents else ())]
    print(*lines, sep="\n", flush=True)


def _print_audit(reports: Sequence[CausalityReport], isolations: Sequence[IsolationReport]) -> None:
    from rich.console import Console

    from .report import causality_table, isolation_table

    console = Console()
    console.print(causality_table(reports))
    if isolations:
        console.print(isolation_table(isolations))
