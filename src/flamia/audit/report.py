"""Results as terminal tables (rich) and as JSON objects, one a line."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from .accuracy import Accuracy
from .causality import CAUSAL_TENSORS, ORDER, PERTURBED, CausalityReport
from .isolation import TENSORS, IsolationReport
from .measures import Distance

if TYPE_CHECKING:
    from rich.console import RenderableType

__all__ = [
    "accuracy_lines",
    "accuracy_tables",
    "causality_lines",
    "causality_table",
    "describe",
    "isolation_lines",
    "isolation_table",
]

SPIKES = tuple(name for name in PERTURBED if name != "all")
GRADIENTS = ("dq", "dk", "dv")
STYLES = {"exact": "bold green", "noise": "green", "confined": "yellow", "leaks": "bold red"}
LEGEND = (
    "Largest relative change of an earlier row when a later token is spiked or all later tokens are replaced, "
    "and in brackets how many rows back it reaches; 0: no bit changed; –: not measured."
)


def describe(report: CausalityReport) -> str:
    """The verdict in words, with the results that it is for."""
    worst = report.verdict
    if worst == "exact":
        return "bitwise"
    if worst == "noise":
        return "noise"
    tensors = " ".join(tensor for tensor, verdict in report.verdicts.items() if verdict == worst)
    return f"{'LEAKS' if worst == 'leaks' else 'confined'} {tensors}"


def cell(report: CausalityReport, inputs: str, tensor: str, perturbed: Sequence[str]) -> tuple[str, str]:
    """The worst of these leaks as text and its verdict."""
    leaks = [x for x in report.leaks if (x.inputs, x.tensor) == (inputs, tensor) and x.perturbed in perturbed]
    if not leaks:
        return "–", ""
    verdict = max((report.judge(leak) for leak in leaks), key=ORDER.index)
    if verdict == "exact":
        return "0", verdict
    size, reach = max(x.max_rel_change for x in leaks), max(x.rows_reached for x in leaks)
    return f"{scientific(size)} ({reach})", verdict


def scientific(x: float) -> str:
    """Two digits and a short exponent: 4.3e-3."""
    digits, _, exponent = f"{x:.1e}".partition("e")
    return f"{digits}e{int(exponent)}" if exponent else digits


def causality_rows(
    reports: Sequence[CausalityReport], columns: Sequence[Sequence[str]]
) -> Iterator[tuple[CausalityReport, str, list[tuple[str, str]]]]:
    """One row for each target and kind of inputs; `columns` groups the perturbations, three cells for each group."""
    for report in reports:
        for inputs in dict.fromkeys(leak.inputs for leak in report.leaks):
            cells = [cell(report, inputs, tensor, group) for group in columns for tensor in CAUSAL_TENSORS]
            yield report, inputs, cells


def causality_table(reports: Sequence[CausalityReport]) -> RenderableType:
    """A table of the leaks of every target, narrow enough for 80 columns."""
    from rich.markup import escape

    table = _table("Does the past see the future?", LEGEND)
    table.add_column("target", no_wrap=True)
    table.add_column("inputs", overflow="fold")
    for tensor in CAUSAL_TENSORS:
        table.add_column(tensor, justify="right", no_wrap=True)
    table.add_column("verdict")
    previous = None
    for report, inputs, cells in causality_rows(reports, [PERTURBED]):
        first = report is not previous
        previous = report
        verdict = styled(describe(report), report.verdict) if first else ""
        if first and not report.as_promised:
            verdict += " [bold red]✗[/]"
        table.add_row(escape(report.target) if first else "", inputs, *(styled(text, v) for text, v in cells), verdict)
    return table


def _table(title: str, caption: str) -> Any:
    """A rule under the head and little else, so that eighty columns hold every table."""
    from rich import box
    from rich.table import Table

    return Table(
        title=title,
        title_style="bold",
        caption=caption,
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
    )


def styled(text: str, verdict: str) -> str:
    """Text in the colour of a verdict, as rich markup; unchanged without one."""
    return f"[{STYLES[verdict]}]{text}[/]" if verdict else text


def isolation_table(reports: Sequence[IsolationReport]) -> RenderableType:
    """A table of what crossed between documents."""
    table = _table(
        "Do documents see their neighbours?",
        "Largest relative change of the other documents' rows when one document is scaled by 1000.",
    )
    table.add_column("target", overflow="fold")
    for tensor in TENSORS:
        table.add_column(tensor, justify="right")
    table.add_column("verdict")
    for report in reports:
        verdict = "[bold green]isolated[/]" if report.isolated else "[bold red]LEAKS[/]"
        table.add_row(
            report.target,
            *(isolation_cell(report, tensor) for tensor in TENSORS),
            verdict + ("" if report.layout == "packed" else " (batch)"),
        )
    return table


def isolation_cell(report: IsolationReport, tensor: str) -> str:
    """Largest change of the other documents' ``tensor``; 0: no bit changed, –: not measured."""
    crossings = [c for c in report.crossings if c.tensor == tensor]
    if not crossings:
        return "–"
    if all(c.bitwise_zero for c in crossings):
        return "0"
    return scientific(max(c.max_rel_change for c in crossings))


def accuracy_tables(rows: Sequence[Accuracy]) -> Iterator[RenderableType]:
    """One table for every kind of inputs."""
    for inputs in dict.fromkeys(row.inputs for row in rows):
        chosen = [row for row in rows if row.inputs == inputs]
        size = f"{chosen[0].heads} heads × {chosen[0].tokens} tokens × {chosen[0].head_dim}"
        table = _table(
            f"Distance from exact attention: {inputs} inputs, {size}",
            "Cosine to FP64 on the same BF16 operands; relative RMS error; share of dS rounded to zero. "
            "Biases are in --html and --json.",
        )
        table.add_column("recipe", no_wrap=True)
        table.add_column("mask")
        for name in ("o", *GRADIENTS):
            table.add_column(f"cosine\n{name}", justify="right")
        table.add_column("error\no", justify="right")
        table.add_column("error\ndq", justify="right")
        table.add_column("dS→0", justify="right")
        previous = None
        for row in chosen:
            if previous is not None and previous != row.mask:
                table.add_section()
            previous = row.mask
            table.add_row(
                row.recipe,
                row.mask,
                *(cosine(getattr(row, name)) for name in ("o", *GRADIENTS)),
                percent(row.o.relative_error),
                "–" if row.dq is None else percent(row.dq.relative_error),
                "–" if row.ds_zero_fraction is None else percent(row.ds_zero_fraction),
            )
        yield table


def cosine(distance: Distance | None) -> str:
    """A cosine without its leading zero, – for none."""
    return "–" if distance is None else f"{distance.cosine:.4f}".lstrip("0")


def percent(share: float) -> str:
    """A share in percent, with two decimals below 10 %."""
    return f"{share:.2%}" if share < 0.1 else f"{share:.0%}"


def causality_lines(report: CausalityReport) -> Iterator[str]:
    """JSON objects, one for each kind of inputs, perturbation and tensor.

    `target`, `perturbed`, `tensor`, `max_rel_change` (null where it is not finite), `rows_reached`,
    `bitwise_zero`; then `inputs`, `position` and `tokens` of the largest change, `verdict` (of this line:
    exact, noise, confined or leaks) and `target_verdict` (the worst of the target's lines).
    """
    for leak in report.leaks:
        yield _line(
            {
                "target": leak.target,
                "perturbed": leak.perturbed,
                "tensor": leak.tensor,
                "max_rel_change": leak.max_rel_change,
                "rows_reached": leak.rows_reached,
                "bitwise_zero": leak.bitwise_zero,
                "inputs": leak.inputs,
                "position": leak.position,
                "tokens": leak.tokens,
                "verdict": report.judge(leak),
                "target_verdict": report.verdict,
            }
        )


def isolation_lines(report: IsolationReport) -> Iterator[str]:
    """JSON objects with the keys of :func:`causality_lines`; `perturbed` is "document", and `rows_reached`
    counts the rows of other documents that changed."""
    for crossing in report.crossings:
        yield _line(
            {
                "target": crossing.target,
                "perturbed": "document",
                "tensor": crossing.tensor,
                "max_rel_change": crossing.max_rel_change,
                "rows_reached": crossing.rows_reached,
                "bitwise_zero": crossing.bitwise_zero,
                "inputs": crossing.inputs,
                "layout": report.layout,
            }
        )


def accuracy_lines(rows: Sequence[Accuracy]) -> Iterator[str]:
    """JSON objects, one for each recipe, mask and kind of inputs.

    `recipe`, `mask`, the cosines `o`, `dq`, `dk`, `dv` (null for gradients that a target lacks), then
    `inputs`, `relative_error`, `bias`, `gain` and `worst_head` (objects by tensor), `row_sum`, `offsets`,
    `ds_zero_fraction`, `tokens`, `heads`, `head_dim`, `seconds`.
    """
    for row in rows:
        distances = {name: getattr(row, name) for name in ("o", *GRADIENTS)}
        line: dict[str, Any] = {"recipe": row.recipe, "mask": row.mask}
        line |= {name: None if d is None else d.cosine for name, d in distances.items()}
        line["inputs"] = row.inputs
        for measure in ("relative_error", "bias", "gain", "worst_head"):
            line[measure] = {name: getattr(d, measure) for name, d in distances.items() if d is not None}
        for name in ("row_sum", "offsets", "ds_zero_fraction", "tokens", "heads", "head_dim", "seconds"):
            line[name] = getattr(row, name)
        yield _line(line)


def _line(values: dict[str, Any]) -> str:
    """Strict JSON, which knows neither infinity nor NaN: null stands for them."""

    def finite(x: Any) -> Any:
        if isinstance(x, dict):
            return {key: finite(value) for key, value in x.items()}
        return None if isinstance(x, float) and not math.isfinite(x) else x

    return json.dumps(finite(values), allow_nan=False)
