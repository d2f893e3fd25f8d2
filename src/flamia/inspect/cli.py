"""`flamia inspect`: the static report as a table or as JSON lines."""

from __future__ import annotations

import json

import typer

from flamia.inspect.report import Report, inspect_kernel
from flamia.inspect.subjects import SUBJECTS

TARGETS = {"sm90": "sm_90a", "sm100": "sm_100a", "sm103": "sm_103a"}
_COLUMNS = ("mma", "mufu", "fma", "alu", "conversion", "shared", "issue")


def inspect(
    target: str = typer.Argument(..., help="sm90, sm100 or sm103."),
    kernels: str = typer.Option("", "--kernels", help="Only kernels whose name contains this."),
    peers: bool = typer.Option(True, "--peers/--no-peers", help="FlashAttention-4's kernels, read in the same way."),
    as_json: bool = typer.Option(False, "--json", help="One JSON object a line instead of a table."),
) -> None:
    """Compile kernels, without a GPU, and say what one 128×128 tile costs each unit of the chip."""
    if target not in TARGETS:
        raise ValueError(f"target {target!r} is none of {', '.join(TARGETS)}")
    arch = TARGETS[target]
    chosen = [s for s in SUBJECTS if arch in s.archs and kernels in s.name and (peers or not s.peer)]
    if not chosen:
        names = ", ".join(s.name for s in SUBJECTS if arch in s.archs)
        raise ValueError(f"--kernels {kernels!r} matches none of: {names}")
    reports = []
    for subject in chosen:
        reports.append(inspect_kernel(subject, arch))
        if as_json:
            print(json.dumps(reports[-1].as_dict()), flush=True)
    if not as_json:
        _table(reports)


def _table(reports: list[Report]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    sizes = Table(title="Per kernel", title_justify="left")
    for name in ("kernel", "registers", "by role", "spills [B]", "in the loop", "smem [B]", "tmem columns", "threads"):
        sizes.add_column(name, justify="left" if name == "kernel" else "right")
    tile = Table(title=f"Cycles per 128×128 tile and SM ({reports[0].chip})", title_justify="left")
    tile.add_column("kernel")
    for name in (*_COLUMNS, "bound [TFLOP/s]", "by"):
        tile.add_column(name, justify="right")
    for r in reports:
        roles = " ".join(map(str, r.roles)) or "-"
        row = (r.registers, roles, r.spill_bytes, r.loop_spill_bytes, r.smem_bytes, r.tmem_columns, r.threads)
        sizes.add_row(r.kernel, *map(str, row))
        tile.add_row(r.kernel, *(f"{r.cycles[c]:.0f}" for c in _COLUMNS), f"{r.bound:.0f}", r.unit)
    console.print(sizes)
    console.print(tile)
    console.print("Counted instructions against rates on paper: upper bounds, not measurements.")
