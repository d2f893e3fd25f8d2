"""`flamia demo`: this machine, accuracy, causality and short training runs, ending in one HTML report."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from flamia.audit import page, report
from flamia.audit.accuracy import Accuracy, iterate_accuracy
from flamia.audit.causality import CausalityReport, causality, runs
from flamia.audit.isolation import LENGTHS, IsolationReport, isolation
from flamia.doctor.cli import render as render_doctor
from flamia.doctor.machine import collect
from flamia.training import Evaluation, Report, Result, TrainConfig, compare, load_corpus, run

AUDITED = ("torch-sdpa", "mxfp8", "mxfp8-exact", "nvfp4-exact", "fp4-exact", "leaky-per-tensor", "leaky-fp4-keys")
MEASURED = ("mxfp8", "nvfp4", "fp4")
# The same model, data and steps through four attentions; and one made to find a leak fast (small context, many steps).
TRAINED = ("exact", "mxfp8", "nvfp4")
LEAKING = "leaky-fp4-keys"
STEPS = {"tiny": 150, "probe": 300}


def demo(
    out: Annotated[Path, typer.Option(help="Folder of the report.", file_okay=False)] = Path("flamia-demo"),
    tokens: Annotated[int, typer.Option(help="Tokens of the accuracy table.")] = 1024,
    steps: Annotated[
        int | None, typer.Option(help="Steps of every training run; by default what fits minutes.")
    ] = None,
) -> None:
    """Doctor, accuracy, causality and four short training runs on real text; minutes on two cores.

    Writes OUT/report.html and prints a summary. Exits with 1 if the self-test fails or a promise is broken: exact
    recipes must not change a bit of the past, leaky ones must be caught.
    """
    # Tensors this small gain nothing from a second thread, and lose much where the cores are shared.
    torch.set_num_threads(1)
    start = time.monotonic()
    console = Console(highlight=False)
    out.mkdir(parents=True, exist_ok=True)
    console.rule("1 of 4: this machine")
    machine = collect(True)
    render_doctor(machine, console)
    console.rule("2 of 4: how far from exact attention?")
    accuracies = _accuracies(console, tokens)
    console.rule("3 of 4: does the past see the future?")
    audits, isolations = _audits(console)
    console.rule("4 of 4: training a byte-level GPT on Python's standard library")
    results, probe = _train(console, steps)
    sections = [
        page.accuracy_section(accuracies),
        page.causality_section(audits, isolations),
        training_section(results, probe),
    ]
    title = "flamia on this machine"
    subtitle = f"flamia {machine['flamia']}, torch {machine['torch']['version']}, {machine['system']['processor']}"
    target = out / "report.html"
    target.write_text(page.page(title, sections, subtitle), encoding="utf-8")
    broken = [r.target for r in audits if not r.as_promised]
    broken += [r.target for r in isolations if not r.isolated and not r.target.startswith("leaky")]
    _summary(console, machine, accuracies, audits, results, probe)
    console.print(f"{time.monotonic() - start:.0f} s; report: [bold]{target}[/]")
    if broken or not machine["ok"]:
        console.print(f"[red]not as promised: {', '.join(dict.fromkeys(broken)) or 'the self-test'}[/]")
        raise typer.Exit(1)


@contextmanager
def _bar(console: Console, description: str, total: int) -> Iterator[Any]:
    """A progress bar that vanishes; yields a function that advances it and may rename it."""
    columns = (TextColumn("{task.description:34}"), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(description, total=total)

        def advance(steps: float = 1, name: str | None = None) -> None:
            progress.update(task, advance=steps, description=name)

        yield advance


def _accuracies(console: Console, tokens: int) -> list[Accuracy]:
    rows = []
    with _bar(console, "exact attention", 2 * len(MEASURED) + 3) as advance:
        for row in iterate_accuracy(MEASURED, tokens=tokens, heads=2):
            rows.append(row)
            advance(1, f"{row.recipe}, {row.mask}")
        for row in iterate_accuracy(None, inputs="mean", masks="causal", tokens=tokens, heads=2):
            if row.recipe.startswith("mxfp8"):
                rows.append(row)
                advance(1, f"{row.recipe}, inputs with a mean")
    for table in report.accuracy_tables(rows):
        console.print(table)
    return rows


def _audits(console: Console) -> tuple[list[CausalityReport], list[IsolationReport]]:
    audits, isolations = [], []
    tokens = 192
    with _bar(console, "audit", len(AUDITED) * (runs(("gaussian",), tokens) + len(LENGTHS) + 2)) as advance:
        for name in AUDITED:
            advance(0, name)
            audits.append(causality(name, inputs="gaussian", tokens=tokens, heads=1, advance=advance))
            isolations.append(isolation(name, heads=1, advance=advance))
    console.print(report.causality_table(audits))
    console.print(report.isolation_table(isolations))
    return audits, isolations


def _train(console: Console, steps: int | None) -> tuple[list[Result], Result]:
    """The comparable runs, and the one that looks for a leak."""
    corpus = load_corpus()
    chosen = [("tiny", recipe) for recipe in TRAINED] + [("probe", LEAKING)]
    configs = [TrainConfig.of(preset, recipe=recipe, steps=steps or STEPS[preset]) for preset, recipe in chosen]
    results = []
    with _bar(console, "training", sum(c.steps for c in configs)) as advance:
        for config in configs:
            done = 0

            def told(now: Report, name: str = config.recipe) -> None:
                nonlocal done
                advance(now.step - done, f"{name}: step {now.step}, loss {now.loss:.3f}")
                done = now.step

            results.append(run(config, told, corpus=corpus))
    console.print(_training_table(results))
    return results[:-1], results[-1]


def _training_table(results: list[Result]) -> Table:
    title = "Validation loss, nats per byte, of the same weights through both attentions"
    table = Table(title=title, title_justify="left", title_style="bold")
    for name in ("trained through", "own attention", "exact attention", "own - exact", "tokens/s"):
        table.add_column(name, justify="left" if name == "trained through" else "right")
    for result in results:
        e = result.final
        table.add_row(result.config.recipe, f"{e.own:.4f}", f"{e.exact:.4f}", _gap(e), f"{result.tokens_per_s:.0f}")
    return table


def _gap(e: Evaluation) -> str:
    return f"{e.gap:+.4f} ± {e.gap_standard_error:.4f}"


TRAINING = """<h2>Does a model train as well?</h2>
<p>{{ count }} steps of a byte-level GPT ({{ parameters }} parameters) on {{ corpus }}. The same weights are then
evaluated through the attention that they were trained with and through exact attention: a model that has found a leak
does better through its own. The last row is another model, made to find a leak within minutes (one layer, one head,
short documents), trained through a scheme that leaks.</p>
{{ figure }}
<div class="scroll"><table><tr><th class="name">trained through</th><th>own attention</th><th>exact attention</th>
<th>own - exact</th><th>loss over exact training</th></tr>
{% for r, gap, over in rows %}<tr><td class="name">{{ r.config.recipe }}</td><td>{{ "%.4f"|format(r.final.own) }}</td>
<td>{{ "%.4f"|format(r.final.exact) }}</td><td>{{ gap }}</td><td>{{ over }}</td></tr>
{% endfor %}</table></div>
"""


def training_section(results: list[Result], probe: Result) -> str:
    """Loss curves and the table of evaluations, as an HTML section."""
    exact = results[0].final
    rows = []
    for result in (*results, probe):
        over = "–"
        if result is not probe and result is not results[0]:
            over = "{:+.4f} ± {:.4f}".format(*compare(exact, result.final))
        rows.append((result, _gap(result.final), over))
    first = results[0]
    return page.render(
        TRAINING,
        count=first.config.steps,
        parameters=f"{first.parameters:,}",
        corpus=first.corpus,
        figure=page.safe(_loss_figure(results, probe)),
        rows=rows,
    )


def _loss_figure(results: list[Result], probe: Result) -> str:
    figure, (curves, gaps) = page.subplots(width=9, height=6.4, panels=2)
    for result, colour in zip(results, page.SERIES, strict=False):
        losses = result.losses
        width = max(1, len(losses) // 30)
        smooth = [
            sum(losses[max(0, i - width) : i + 1]) / len(losses[max(0, i - width) : i + 1]) for i in range(len(losses))
        ]
        curves.plot(smooth, color=colour, label=result.config.recipe, linewidth=1.2)
    curves.set_ylabel("training loss, nats per byte")
    curves.set_xlabel("step")
    curves.legend(fontsize=8, frameon=False)
    everything = [*results, probe]
    values = [r.final.gap for r in everything]
    errors = [2 * r.final.gap_standard_error for r in everything]
    colours = [page.COLOURS["leaks"] if r is probe else page.COLOURS["exact"] for r in everything]
    gaps.barh(range(len(values)), values, 0.5, xerr=errors, color=colours)
    gaps.set_yticks(range(len(values)), [r.config.recipe for r in everything])
    gaps.invert_yaxis()
    gaps.axvline(0, color="#444", linewidth=0.8)
    gaps.set_xlabel("loss through its own attention minus loss through exact attention, with two standard errors")
    return page.svg(figure)


def _summary(
    console: Console,
    machine: dict[str, Any],
    accuracies: list[Accuracy],
    audits: list[CausalityReport],
    results: list[Result],
    probe: Result,
) -> None:
    console.rule("summary")
    table = Table(show_header=False, box=None, pad_edge=False)
    runs_here = [b["name"] for b in machine["backends"] if b["runs_here"]]
    table.add_row("backends here", ", ".join(runs_here))
    for row in accuracies:
        if row.inputs == "gaussian" and row.mask == "causal" and row.dq is not None:
            table.add_row(f"{row.recipe}, causal", f"cosine of o {row.o.cosine:.4f}, of dq {row.dq.cosine:.4f}")
    for audit in audits:
        table.add_row(f"{audit.target}", report.describe(audit))
    exact = results[0].final
    for result in results[1:]:
        over, error = compare(exact, result.final)
        table.add_row(f"trained through {result.config.recipe}", f"loss {over:+.4f} ± {error:.4f} over exact training")
    table.add_row(f"trained through {probe.config.recipe}", f"own minus exact attention {_gap(probe.final)}")
    console.print(table)
