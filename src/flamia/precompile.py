"""`flamia compile`: a folder of ready kernels, for machines and jobs that should not compile."""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from itertools import product
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from flamia.backends import BY_ARCH, KERNELS, call_launches, native_recipe
from flamia.compiler import Kernel, Product, compile_to, index_entry, write_index
from flamia.launch import Launch
from flamia.plan import Plan

MASKS: dict[str, tuple[int | None, int | None]] = {
    "full": (None, None),
    "causal": (None, 0),
    "window": (1, 0),
    "left": (1, None),
}
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def compile_kernels(
    out: Annotated[Path, typer.Option(help="The folder. Kernels that are there and current are kept.")],
    arch: Annotated[str, typer.Option(help="sm_90a (Hopper), sm_100a (B200), sm_103a (B300), with commas.")] = "sm_90a",
    recipes: Annotated[str, typer.Option(help="Names of recipes, with commas.")] = "mxfp8",
    head_dims: Annotated[str, typer.Option(help="Head dimensions, with commas.")] = "64,128",
    ratios: Annotated[str, typer.Option(help="Query heads per key/value head, with commas.")] = "1,2,4,8",
    masks: Annotated[str, typer.Option(help="full, causal, window (both sides), left, with commas.")] = (
        "full,causal,window"
    ),
    dtypes: Annotated[str, typer.Option(help="bf16, fp16, with commas.")] = "bf16",
    backward: Annotated[bool, typer.Option(help="Also the backward's, of recipes that have one.")] = True,
    deterministic: Annotated[bool, typer.Option(help="Kernels of calls with deterministic=True.")] = False,
    causal_scale: Annotated[bool, typer.Option(help="Also backwards with accumulator_scale='causal'.")] = False,
    peers: Annotated[
        bool,
        typer.Option(
            help="Also Hopper's FlashAttention-4 with these shapes, for `flamia bench` to compare; --backward: its too."
        ),
    ] = False,
    jobs: Annotated[int, typer.Option(help="Processes, each of about 1 GiB. 0: one for each core.", min=0)] = 0,
) -> None:
    """Compile kernels for machines without the compiler, and for jobs that should not wait for it.

    Needs no GPU. Use the folder with FLAMIA_KERNELS=FOLDER; the calls made then need apache-tvm-ffi and no compiler,
    neither the DSL nor Triton.
    """
    dims, groups = _numbers("head_dims", head_dims), _numbers("ratios", ratios)
    options = (backward, deterministic, causal_scale)
    archs = _words(arch)
    words = (_words(recipes), dims, groups, masks, dtypes)
    kernels: list[Product] = [kernel for one in archs for kernel in select(one, *words, *options)]
    kernels += [launch for one in archs for launch in select_launches(one, *words, *options)]
    if peers:
        from flamia.benchmarks import flash_attention

        if flash_attention.ARCH not in archs:
            raise ValueError(
                f"arch={arch!r}: --peers makes libraries for {flash_attention.ARCH} alone; elsewhere `flamia bench` "
                "compares with flash-attn-4 as installed"
            )
        causal = [mask == "causal" for mask in _words(masks) if mask in ("causal", "full")]
        shapes = [(d, r, c) for d in dims for r in groups for c in causal]
        kernels += [flash_attention.forward_kernel(*shape) for shape in shapes]
        if backward:
            kernels += [kernel for shape in shapes for kernel in flash_attention.backward_kernels(*shape)]
    if not kernels:
        raise ValueError("nothing to compile: each of --arch, --recipes, --masks and --dtypes must name something")
    build(kernels, out, jobs or len(os.sched_getaffinity(0)))


def select(
    arch: str,
    recipes: list[str],
    head_dims: list[int],
    ratios: list[int],
    masks: str,
    dtypes: str,
    backward: bool = True,
    deterministic: bool = False,
    causal_scale: bool = False,
) -> Iterator[Kernel]:
    """The distinct kernels of these calls; with ``backward`` their backwards', where the recipe has one.

    ``causal_scale`` adds the backwards of the same recipes with ``accumulator_scale="causal"``.

    Raises:
        ValueError: a value that is unknown, or one that the architecture has no kernel for.
    """
    seen: dict[Kernel, None] = {}
    shapes = (arch, recipes, head_dims, ratios, masks, dtypes)
    for plan, dtype in _plans(*shapes, backward, deterministic, causal_scale):
        seen.update(dict.fromkeys(KERNELS[plan.backend].call_kernels(plan, dtype, arch)))
    yield from seen


def select_launches(
    arch: str,
    recipes: list[str],
    head_dims: list[int],
    ratios: list[int],
    masks: str,
    dtypes: str,
    backward: bool = True,
    deterministic: bool = False,
    causal_scale: bool = False,
) -> list[Launch]:
    """The distinct launches of Triton kernels around those of ``select``."""
    # What tells plans apart here is a small part of what tells attention kernels apart.
    shapes = (arch, recipes, head_dims, ratios[:1], masks, dtypes)
    seen: dict[Launch, None] = {}
    for plan, dtype in _plans(*shapes, backward, deterministic, causal_scale):
        seen.update(dict.fromkeys(call_launches(plan, dtype, arch)))
    return list(seen)


def _plans(
    arch: str,
    recipes: list[str],
    head_dims: list[int],
    ratios: list[int],
    masks: str,
    dtypes: str,
    backward: bool,
    deterministic: bool,
    causal_scale: bool,
) -> Iterator[tuple[Plan, torch.dtype]]:
    if arch not in BY_ARCH:
        raise ValueError(f"arch={arch!r} is unknown: it must be one of {', '.join(BY_ARCH)}")
    for name, words, known in (("masks", masks, MASKS), ("dtypes", dtypes, DTYPES)):
        for word in _words(words):
            if word not in known:
                raise ValueError(f"{name}={word!r} is unknown: it must be one of {', '.join(known)}")
    backend = BY_ARCH[arch]
    room = KERNELS[backend]
    shapes = product(head_dims, ratios, _words(masks), _words(dtypes))
    for name, (head_dim, ratio, mask, word) in product(recipes, shapes):
        recipe, dtype = native_recipe(name, backend), DTYPES[word]
        reason = room.unsupported(recipe, head_dim, dtype, training=False)
        if reason is not None:
            raise ValueError(f"recipes={name!r}, head_dims={head_dim}: {reason}")
        made = [recipe, dataclasses.replace(recipe, accumulator_scale="causal")] if causal_scale else [recipe]
        for each in made:
            training = backward and room.unsupported(each, head_dim, dtype, training=True) is None
            yield Plan(each, backend, (), head_dim, ratio, 1, 1.0, *MASKS[mask], deterministic, training), dtype


def build(kernels: Sequence[Product], out: Path, jobs: int, console: Console | None = None) -> None:
    """Compile into ``out`` in ``jobs`` processes and write its index. The index lists only what is complete."""
    console = console or Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with (
        ProcessPoolExecutor(min(jobs, len(kernels)), multiprocessing.get_context("spawn"), _compile_triton) as pool,
        Progress(*columns, console=console) as progress,
    ):
        bar = progress.add_task("kernels", total=len(kernels))
        waiting = [pool.submit(_compile, kernel, out) for kernel in kernels]
        try:
            for done in as_completed(waiting):
                write_index(out, [done.result()])
                progress.advance(bar)
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    size = sum(file.stat().st_size for pattern in ("*.so", "*.launch") for file in out.glob(pattern))
    console.print(f"{len(kernels)} kernels in {out}, {size / 2**20:.1f} MiB. Use them with FLAMIA_KERNELS={out}")


def _compile_triton() -> None:
    # Of the process that asks, whose launches may be interpreted; Triton looks when it is imported.
    os.environ.pop("TRITON_INTERPRET", None)


def _compile(kernel: Product, out: Path) -> dict[str, Any]:
    # The entry comes from the process that compiled, should sources change meanwhile.
    compile_to(kernel, out)
    return index_entry(kernel)


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


def _numbers(name: str, text: str) -> list[int]:
    words = _words(text)
    for word in words:
        if not word.isdigit() or int(word) == 0:
            raise ValueError(f"{name}={text!r} must be positive integers with commas, got {word!r}")
    return [int(word) for word in words]
