"""A progress bar on the error stream: loss, tokens per second, time left."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from .loop import Progress, Report


@contextmanager
def progress_bar(title: str, steps: int) -> Iterator[Progress]:
    """A rich bar, gone when it is left; yields the callback for `run(config, progress=...)`.  Needs rich."""
    from rich import progress as rich_progress
    from rich.console import Console

    columns = (
        rich_progress.TextColumn("{task.description}"),
        rich_progress.BarColumn(),
        rich_progress.MofNCompleteColumn(),
        rich_progress.TextColumn("{task.fields[text]}"),
        rich_progress.TimeRemainingColumn(),
    )
    with rich_progress.Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(title, total=steps, text="")

        def update(report: Report) -> None:
            text = f"loss {report.loss:.3f}  {report.tokens_per_s:,.0f} tokens/s"
            if report.evaluation is not None:
                bar.console.print(
                    f"{title} step {report.step}: validation loss {report.evaluation.own:.4f}, "
                    f"through exact attention {report.evaluation.exact:.4f}",
                    highlight=False,
                )
            bar.update(task, completed=report.step, text=text)

        yield update
