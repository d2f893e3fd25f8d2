"""The command `flamia`: parses and dispatches. What a command does lives in the part of flamia it belongs to.

Only the module of the command that was asked for is imported, so that a package that one command lacks cannot
break the others.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Sequence
from typing import Any

from flamia.compiler import KernelError

# name: (module, function, one line of help). The function's parameters, annotated for typer, are the options.
COMMANDS: dict[str, tuple[str, str, str]] = {
    "doctor": ("flamia.doctor.cli", "doctor", "What this machine can run, what is missing, and a self-test."),
    "accuracy": ("flamia.audit.cli", "accuracy", "How far each recipe is from exact attention."),
    "audit": (
        "flamia.audit.cli",
        "audit",
        "Does information flow backwards in time? Ours, torch's or yours.",
    ),
    "train": ("flamia.training.cli", "train", "Train a byte-level GPT on real text with any recipe."),
    "bench": ("flamia.benchmarks.cli", "bench", "How fast the device kernels are on this machine's GPU."),
    "compile": ("flamia.precompile", "compile_kernels", "Ready kernel libraries, for machines without the compiler."),
    "inspect": ("flamia.inspect.cli", "inspect", "What compiled kernels cost each unit of the chip, counted; no GPU."),
    "demo": ("flamia.demo", "demo", "All of these on this machine in minutes, ending in one HTML report."),
}


def build(asked: str | None = None) -> Any:
    """The typer application: every command by name and help line, the one in `asked` with its options."""
    import typer

    app = typer.Typer(
        help="Low-precision softmax attention that people train with.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
    )

    @app.callback()
    def options(
        version: bool = typer.Option(False, "--version", is_eager=True, callback=_version, help="Print the version."),
        traceback: bool = typer.Option(False, "--traceback", help="Show where in the code an error arose."),
    ) -> None:
        """Low-precision softmax attention that people train with."""

    for name, (module, function, summary) in COMMANDS.items():
        command: Callable[..., Any] = _placeholder
        if name == asked:
            command = getattr(importlib.import_module(module), function)
        app.command(name, short_help=summary)(command)
    return app


def _placeholder() -> None:
    """Stands in the list of commands for those that were not asked for."""


def _version(wanted: bool) -> None:
    if wanted:
        from flamia import __version__

        print(f"flamia {__version__}")
        sys.exit(0)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line (`sys.argv` unless given) and leave through SystemExit.

    Exit status: the command's own; 2 for bad usage and bad input, said in one line on standard error; 1 for a
    package that is missing, with the extra that brings it. `flamia --traceback COMMAND` shows the traceback.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    # The options before a command take no values, so the first word that is not an option is the command.
    asked = next((word for word in words if not word.startswith("-")), None)
    before = words[: words.index(asked)] if asked else words
    try:
        build(asked)(args=words, prog_name="flamia")
    except (ModuleNotFoundError, ValueError, TypeError, KernelError) as error:
        explained = _explain(error)
        if explained is None or "--traceback" in before:
            raise
        message, status = explained
        print(f"flamia: {message}", file=sys.stderr)
        sys.exit(status)


def _explain(error: Exception) -> tuple[str, int] | None:
    """One line and an exit status for an error that the user can mend; None for one that is ours."""
    if not isinstance(error, ModuleNotFoundError):
        return str(error), 2
    from flamia.doctor.packages import extra_that_brings

    missing = (error.name or "").partition(".")[0]
    extra = extra_that_brings(missing)
    if extra is None:
        return None
    return f"this needs {missing}, which is not installed: pip install 'flamia[{extra}]'", 1
