"""Results as one self-contained HTML page: tables, and plots as inline SVG. Needs jinja2 and matplotlib."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Sequence
from typing import Any

from .accuracy import Accuracy
from .causality import CausalityReport
from .isolation import TENSORS, IsolationReport
from .report import (
    GRADIENTS,
    LEGEND,
    SPIKES,
    causality_rows,
    cosine,
    describe,
    isolation_cell,
    percent,
)

__all__ = [
    "COLOURS",
    "SERIES",
    "accuracy_figure",
    "accuracy_section",
    "causality_figure",
    "causality_section",
    "page",
    "render",
    "safe",
    "subplots",
    "svg",
]

COLOURS = {"exact": "#1a7f37", "noise": "#4a9e5c", "confined": "#b58900", "leaks": "#c0392b"}
SERIES = ("#2b6cb0", "#dd8452", "#55a868", "#8172b3")

PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width,
initial-scale=1"> <title>{{ title }}</title>
<style>
body { font: 15px/1.5 system-ui, sans-serif; color: #222; max-width: 72rem; margin: 2rem auto; padding: 0
1rem; } h1, h2 { line-height: 1.2; } h2 { margin-top: 2.5rem; }
table { border-collapse: collapse; margin: 1rem 0; font-variant-numeric: tabular-nums; }
th, td { padding: .25rem .7rem; border-bottom: 1px solid #ddd; text-align: right; }
th { border-bottom: 2px solid #999; } .scroll { overflow-x: auto; }
td.name, th.name { text-align: left; white-space: nowrap; } svg { max-width: 100%; height: auto; }
.exact, .noise { color: #1a7f37; } .confined { color: #8a6800; } .leaks { color: #c0392b; font-weight: 600; }
.note { color: #555; }
</style></head><body><h1>{{ title }}</h1>{% if subtitle %}<p class="note">{{ subtitle }}</p>{% endif %}
{% for section in sections %}{{ section }}{% endfor %}
</body></html>
"""

CAUSALITY = """<h2>Does the past see the future?</h2>
<p>One future token of q, k, v or do times 64 (spike), or every future token replaced (all), as it is and
times and divided by 64. {{ legend }}</p>
{{ figure }}
<div class="scroll"><table><tr><th class="name">target</th><th class="name">inputs</th>
<th>spike o</th><th>spike lse</th><th>spike dq</th><th>all o</th><th>all lse</th><th>all dq</th>
<th class="name">verdict</th></tr>
{% for report, inputs, cells in rows %}<tr><td class="name">{{ report.target }}</td><td class="name">{{ inputs
}}</td> {% for cell, verdict in cells %}<td class="{{ verdict }}">{{ cell }}</td>{% endfor %}
<td class="name {{ report.verdict }}">{{ describe(report) }}</td></tr>
{% endfor %}</table></div>
{% if isolations %}<h2>Do documents see their neighbours?</h2>
<p>Largest relative change of the other documents' rows when one document is scaled by 1000.</p>
<div class="scroll"><table><tr><th class="name">target</th>{% for t in tensors %}<th>{{ t }}</th>{% endfor %}
<th class="name">layout</th><th class="name">verdict</th></tr>
{% for report in isolations %}<tr><td class="name">{{ report.target }}</td>
{% for t in tensors %}<td>{{ isolation_cell(report, t) }}</td>{% endfor %}<td class="name">{{ report.layout
}}</td> <td class="name {{ 'exact' if report.isolated else 'leaks' }}">{{ 'isolated' if report.isolated else
'LEAKS' }}</td> </tr>{% endfor %}</table></div>{% endif %}
"""

ACCURACY = """<h2>How far from exact attention?</h2>
<p>Against FP64 on the same BF16 operands: cosine, relative RMS error, bias (mean error over mean size), and
the share of nonzero dS that rounds to zero.</p>
{{ figure }}
<div class="scroll"><table><tr><th class="name">recipe</th><th class="name">inputs</th><th
class="name">mask</th> {% for n in names %}<th>cosine {{ n }}</th>{% endfor %}{% for n in names %}<th>error {{
n }}</th>{% endfor %} <th>bias o</th><th>bias dv</th><th>dS→0</th></tr>
{% for row in rows %}<tr><td class="name">{{ row.recipe }}</td><td class="name">{{ row.inputs }}</td>
<td class="name">{{ row.mask }}</td>{% for n in names %}<td>{{ cosine(row[n]) }}</td>{% endfor %}
{% for n in names %}<td>{{ percent(row[n].relative_error) if row[n] else "–" }}</td>{% endfor %}
<td>{{ "%+.0e"|format(row.o.bias) }}</td><td>{{ "%+.0e"|format(row.dv.bias) if row.dv else "–" }}</td>
<td>{{ "–" if row.ds_zero_fraction is none else "%.2f %%"|format(100 * row.ds_zero_fraction) }}</td></tr>
{% endfor %}</table></div>
"""


def page(title: str, sections: Sequence[str], subtitle: str = "") -> str:
    """A whole HTML document around finished sections."""
    return render(PAGE, title=title, subtitle=subtitle, sections=[safe(s) for s in sections])


def causality_section(reports: Sequence[CausalityReport], isolations: Sequence[IsolationReport] = ()) -> str:
    """Plot and tables of an audit."""
    return render(
        CAUSALITY,
        figure=safe(causality_figure(reports)),
        rows=list(causality_rows(reports, [SPIKES, ("all",)])),
        describe=describe,
        legend=LEGEND,
        isolations=isolations,
        isolation_cell=isolation_cell,
        tensors=TENSORS,
    )


def accuracy_section(rows: Sequence[Accuracy]) -> str:
    """Plot and table of accuracies."""
    return render(
        ACCURACY,
        figure=safe(accuracy_figure(rows)),
        rows=rows,
        names=("o", *GRADIENTS),
        cosine=cosine,
        percent=percent,
    )


def causality_figure(reports: Sequence[CausalityReport]) -> str:
    """For every target the largest change of an earlier row of o and of dq, as SVG; bitwise zero has no
    bar."""
    figure, axes = subplots(width=9, height=1.2 + 0.36 * len(reports))
    floor, ceiling = 1e-6, 1e2
    for i, report in enumerate(reports):
        for shift, tensor, alpha in ((-0.19, "o", 1.0), (0.19, "dq", 0.55)):
            worst = report.worst(tensor)
            if worst is None:
                axes.text(floor * 1.2, i + shift, f"{tensor}: no backward", va="center", fontsize=7, color="#777")
            elif worst.max_rel_change == 0:
                axes.text(floor * 1.2, i + shift, f"{tensor}: 0", va="center", fontsize=7, color=COLOURS["exact"])
            else:
                size = min(max(worst.max_rel_change, floor * 2), ceiling / 4)
                axes.barh(i + shift, size, 0.34, left=0, color=COLOURS[report.judge(worst)], alpha=alpha)
                axes.text(size * 1.15, i + shift, f"{tensor}: {worst.max_rel_change:.1e}", va="center", fontsize=7)
    axes.set_xscale("log")
    axes.set_xlim(floor, ceiling)
    axes.set_ylim(-0.6, len(reports) - 0.4)
    axes.set_yticks(range(len(reports)), [report.target for report in reports])
    axes.invert_yaxis()
    axes.set_xlabel("largest relative change of an earlier row when the future changes")
    return svg(figure)


def accuracy_figure(rows: Sequence[Accuracy]) -> str:
    """1 - cosine of o, dq, dk, dv for every recipe, one panel for each kind of inputs and mask, as SVG."""
    panels = list(dict.fromkeys((row.inputs, row.mask) for row in rows))
    count = sum(len({row.recipe for row in rows if (row.inputs, row.mask) == panel}) for panel in panels)
    figure, grid = subplots(width=9, height=1 + 0.5 * len(panels) + 0.36 * count, panels=len(panels))
    lowest = 1e-6
    for axes, (inputs, mask) in zip(grid if len(panels) > 1 else [grid], panels, strict=True):
        here = {row.recipe: row for row in rows if (row.inputs, row.mask) == (inputs, mask)}
        shown = list(here)
        for j, name in enumerate(("o", *GRADIENTS)):
            distances = [getattr(here[recipe], name) for recipe in shown]
            gaps = [math.nan if d is None else max(1 - d.cosine, lowest) for d in distances]
            places = [i + (j - 1.5) * 0.2 for i in range(len(shown))]
            axes.barh(places, gaps, 0.18, color=SERIES[j], label=name)
        axes.set_xscale("log")
        axes.set_xlim(lowest, 1)
        axes.set_yticks(range(len(shown)), shown)
        axes.invert_yaxis()
        axes.set_title(f"{inputs}, {mask}", fontsize=9, loc="left")
    last = grid[-1] if len(panels) > 1 else grid
    last.set_xlabel("1 − cosine to exact attention (shorter is better)")
    figure.legend(*last.get_legend_handles_labels(), ncols=4, fontsize=8, frameon=False, loc="outside upper right")
    return svg(figure)


def svg(figure: Any) -> str:
    """A matplotlib figure as an SVG element to put into a page."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", bbox_inches="tight", metadata={"Date": None})
    text = buffer.getvalue()
    # Ids repeat from figure to figure, and within one page they must not.
    ids = f"f{abs(hash(text)):x}-"
    text = re.sub(r'(\bid="|url\(#|href="#)', lambda m: m.group(1) + ids, text)
    return text[text.index("<svg") :]


def subplots(width: float, height: float, panels: int = 1) -> tuple[Any, Any]:
    """A figure of ``panels`` axes one above the other, in inches; no window system, no global state."""
    from matplotlib.figure import Figure  # without pyplot: no window system, no global state

    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.subplots(panels, 1)
    for one in axes if panels > 1 else [axes]:
        one.tick_params(labelsize=8)
        one.spines[["top", "right"]].set_visible(False)
    return figure, axes


def render(template: str, **values: Any) -> str:
    """A jinja2 template filled in; values are escaped unless ``safe``."""
    from jinja2 import Environment

    return Environment(autoescape=True).from_string(template).render(**values)


def safe(html: str) -> Any:
    """Marks finished HTML, which a template then takes as it is."""
    from markupsafe import Markup

    return Markup(html)
