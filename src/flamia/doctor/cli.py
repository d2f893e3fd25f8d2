"""`flamia doctor`: the doctor's findings as tables, or as JSON."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from flamia.doctor.machine import collect

TENSORS = ("o", "dq", "dk", "dv")


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")] = False,
    run_self_test: Annotated[bool, typer.Option("--self-test/--no-self-test", help="Run attention, too.")] = True,
) -> None:
    """Print what this machine can run and what is missing, and run a tiny self-test.

    Exits with 1 if the self-test fails.
    """
    report = collect(run_self_test)
    if as_json:
        print(json.dumps(report, indent=2))
    else:
        render(report)
    if not report["ok"]:
        raise typer.Exit(1)


def render(report: dict[str, Any], console: Console | None = None) -> None:
    """Print what `collect` returned, as tables."""
    console = console or Console(highlight=False)
    for table in (_machine(report), _backends(report), _packages(report)):
        console.print(table)
    if report["self_test"]:
        console.print(_self_test(report))
    for test in report["self_test"]:
        if test["error"]:
            console.print(f"{test['device']}: {test['error']}", style="red", markup=False)


def _table(title: str, *columns: str) -> Table:
    return Table(*columns, title=title, title_justify="left", title_style="bold", show_header=any(columns))


def _machine(report: dict[str, Any]) -> Table:
    system, build = report["system"], report["torch"]["cuda_build"]
    table = _table("This machine", "", "")
    table.add_row("flamia", report["flamia"])
    table.add_row("Python", report["python"]["version"])
    table.add_row("torch", f"{report['torch']['version']}, built " + (f"for CUDA {build}" if build else "without CUDA"))
    table.add_row("processor", system["processor"])
    table.add_row("cores", f"{system['cores']}, of which torch uses {report['torch']['threads']}")
    table.add_row("memory", f"{_gib(system['memory_gib'])}, {_gib(system['available_gib'])} available")
    for index, device in enumerate(report["cuda"]):
        capability, memory = device["compute_capability"], _gib(device["memory_gib"])
        table.add_row(f"cuda:{index}", f"{device['name']}, compute capability {capability}, {memory}")
    if not report["cuda"]:
        table.add_row("CUDA devices", "none")
    return table


def _gib(value: float | None) -> str:
    return "unknown" if value is None else f"{value:g} GiB"


def _backends(report: dict[str, Any]) -> Table:
    table = _table("Backends", "backend", "runs here", "what it is")
    for backend in report["backends"]:
        table.add_row(backend["name"], "[green]yes[/]" if backend["runs_here"] else "no", backend["note"])
    return table


def _packages(report: dict[str, Any]) -> Table:
    table = _table("Optional packages", "package", "version", "extra", "for")
    for package in report["packages"]:
        version = package["version"] or "[yellow]missing[/]"
        table.add_row(package["distribution"], version, package["extra"], package["purpose"])
    missing = sorted({package["extra"] for package in report["packages"] if not package["version"]})
    if missing:
        # The bracket is escaped: rich would read [gpu] as a style.
        table.caption = f"The missing ones come with: pip install 'flamia\\[{','.join(missing)}]'"
        table.caption_justify = "left"
    return table


def _self_test(report: dict[str, Any]) -> Table:
    title = "Self-test: 64 tokens, causal; MXFP8's cosines with FP64, mxfp8-exact's causality"
    table = _table(title, "device", *TENSORS, "causal", "seconds", "")
    for test in report["self_test"]:
        cosines = [f"{test['cosine'][name]:.5f}" if name in test["cosine"] else "-" for name in TENSORS]
        causal = {True: "bitwise", False: "[red]leaks[/]", None: "-"}[test["causal"]]
        verdict = "[green]pass[/]" if test["passed"] else "[red]FAIL[/]"
        table.add_row(test["device"], *cosines, causal, str(test["seconds"]), verdict)
    return table
