"""Launches of Triton kernels: ready ones from a folder, through the CUDA driver alone, all others by Triton's JIT.

Modules with kernels are named, not imported: what a folder serves needs no Triton. A launch says what changes code
(types, constants, warps) and what does not (sizes, head counts, strides); the folder has two variants of each, one for
pointers and strides that are multiples of 16, as the JIT assumes where it sees them, and one that assumes nothing.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import json
import os
import struct
import threading
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flamia import compiler, driver
from flamia.compiler import KernelError, Option

BUILDER = "flamia.triton_compiler:compile_launch"
TYPES = {
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float32: "*fp32",
    torch.int16: "*i16",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.uint8: "*u8",
}
ALIGNMENT = 16  # bytes of pointers, elements of strides
_NARROW = 1 << 31
LAYER = 65535  # most programs along the second number of a grid

Argument = Tensor | int | float


@dataclass(frozen=True)
class Launch:
    """What changes the code of a launch, and nothing else.

    Attributes:
        kernel: "module:function" of a Triton kernel.
        arch: such as "sm_90a".
        kinds: of its arguments, in order: "*bf16" and the like for tensors, "int", "float".
        constants: (name, value) of its ``tl.constexpr`` arguments, in the order of names.
        warps: of a program.
        exact: no product is fused into a sum.
        registers: most that a thread may have; 0 leaves it to the compiler.
        aligned: pointers and strides that the kernel is specialised on are multiples of 16, and strides below 2^31.
    """

    kernel: str
    arch: str
    kinds: tuple[str, ...]
    constants: tuple[tuple[str, Option], ...]
    warps: int
    exact: bool
    registers: int = 0
    aligned: bool = True

    suffix = ".launch"

    @property
    def source(self) -> str:
        return self.kernel.partition(":")[0]

    @property
    def name(self) -> str:
        """As messages and indexes spell it."""
        kernel = self.kernel.removeprefix("flamia.").replace(":", ".")
        options = ", ".join(f"{name}={value}" for name, value in self.options)
        return f"{kernel}[{self.arch}]({' '.join(self.kinds)}; {options})"

    @property
    def options(self) -> tuple[tuple[str, Option], ...]:
        limit = (("registers", self.registers),) if self.registers else ()
        return (*self.constants, ("warps", self.warps), *limit, ("exact", self.exact), ("aligned", self.aligned))

    @property
    def sources(self) -> str:
        """Hash of what the code is made from."""
        return compiler.source_version(self.source, BUILDER)

    @property
    def toolchain(self) -> str:
        """Versions of what compiles it."""
        return compiler.installed("triton")

    def write(self, path: Path) -> None:
        """Compile into a file. Imports Triton."""
        if importlib.util.find_spec("triton") is None:
            raise KernelError(f"compiling {self.name} needs triton: pip install 'flamia[gpu]'")
        module, _, function = BUILDER.partition(":")
        getattr(importlib.import_module(module), function)(self, path)


@dataclass
class Ready:
    """A launch of a folder, loaded: its name, the driver's handle, and what ``triton_compiler.compile_launch`` says."""

    name: str
    kernel: int
    function: str
    threads: int
    shared: int
    format: str
    aligned: list[int]
    strides: list[int]
    functions: dict[int, int] = field(default_factory=dict)

    def serves(self, values: Sequence[int | float]) -> bool:
        """Whether these arguments, tensors as addresses, are what the code was compiled for."""
        return all(values[i] % ALIGNMENT == 0 for i in self.aligned) and all(values[i] < _NARROW for i in self.strides)

    def on(self, device: int) -> int:
        """The function on a device, the current one."""
        found = self.functions.get(device)
        if found is None:
            found = self.functions[device] = driver.function(self.kernel, device, self.shared, self.function)
        return found


@dataclass
class Variants:
    """The two variants of one launch, for aligned arguments and for any; the second is loaded when it is needed."""

    launch: Launch
    folder: Path
    aligned: Ready
    plain: Ready | None = None

    def any(self) -> Ready:
        if self.plain is None:
            with _lock:
                self.plain = self.plain or _load(replace(self.launch, aligned=False), self.folder)
        return self.plain


_lock = threading.RLock()
_found: dict[tuple[Path, Launch], Variants | None] = {}  # None: left to the JIT
_called: dict[tuple[Any, ...], Variants | None] = {}  # the same by what a call says
_recorded: ContextVar[dict[Launch, None] | None] = ContextVar("recorded", default=None)
_recorded_arch: ContextVar[str] = ContextVar("recorded_arch", default="")


def launch(
    kernel: str,
    grid: tuple[int, ...],
    arguments: Sequence[Argument],
    *,
    warps: int,
    exact: bool = True,
    registers: int = 0,
    **constants: Option,
) -> None:
    """Launch a Triton kernel on the current device and stream.

    Args:
        kernel: "module:function"; its runtime arguments come first.
        grid: programs, at most three numbers, none of them zero.
        arguments: the runtime arguments, in order.
        warps: of a program.
        exact: fuse no product into a sum, for twins that round twice.
        registers: most that a thread may have; 0 leaves it to the compiler.
        constants: the ``tl.constexpr`` arguments. None may depend on lengths, documents or head counts.

    Raises:
        KernelError: the folder in FLAMIA_KERNELS has it from other sources, or lacks it where triton is not installed.
    """
    recorded = _recorded.get()
    if recorded is not None:
        made = _describe(kernel, _recorded_arch.get(), arguments, warps, exact, registers, constants)
        recorded.update(dict.fromkeys((made, replace(made, aligned=False))))
        return
    folder = os.environ.get("FLAMIA_KERNELS")
    if folder and not interpreted():
        device, stream = driver.current()
        key = (folder, device, kernel, warps, exact, registers, *map(_kind, arguments), *constants.items())
        try:
            found = _called[key]
        except KeyError:
            made = _describe(kernel, driver.target(device), arguments, warps, exact, registers, constants)
            found = _called[key] = _find(made, Path(folder))
        if found is not None:
            _run(found, device, stream, grid, arguments)
            return
    limit = {"maxnreg": registers} if registers else {}
    _jit(kernel)[grid](*arguments, **constants, num_warps=warps, enable_fp_fusion=not exact, **limit)


def cdiv(a: int, b: int) -> int:
    """a / b, rounded up."""
    return -(-a // b)


def head_grid(tiles: int, heads: int) -> tuple[int, int, int]:
    """Programs for each of ``tiles`` of each head, heads fastest, since they are neighbours in memory.

    The second number of a grid is at most ``LAYER``: many tiles take the third one too, and the last programs may have
    none. Kernels ask ``triton_operands.tile_here``. A division by the number of heads, which is an argument and not a
    constant, would be 20 to 30 instructions in front of every load.
    """
    layers = cdiv(tiles, LAYER)
    return heads, cdiv(tiles, layers), layers


def interpreted() -> bool:
    """Whether launches are interpreted here, which few large programs suit better than many small ones."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1" and _recorded.get() is None


@contextlib.contextmanager
def recording(arch: str) -> Iterator[dict[Launch, None]]:
    """Within the context nothing is launched: the keys say what would be, for ``arch``, in both variants."""
    launches: dict[Launch, None] = {}
    tokens = _recorded.set(launches), _recorded_arch.set(arch)
    try:
        yield launches
    finally:
        _recorded.reset(tokens[0])
        _recorded_arch.reset(tokens[1])


def preload(launches: Iterable[Launch]) -> None:
    """Load those of a folder, if FLAMIA_KERNELS names one, on the current device.

    For CUDA graphs, which should find everything loaded.
    """
    folder = os.environ.get("FLAMIA_KERNELS")
    if not folder:
        return
    device, _ = driver.current()
    for one in launches:
        if one.aligned:
            found = _find(one, Path(folder))
            if found is not None:
                found.aligned.on(device)
                found.any().on(device)


def _describe(
    kernel: str,
    arch: str,
    arguments: Sequence[Argument],
    warps: int,
    exact: bool,
    registers: int,
    constants: dict[str, Option],
) -> Launch:
    kinds = tuple(map(_kind, arguments))
    return Launch(kernel, arch, kinds, tuple(sorted(constants.items())), warps, exact, registers)


def _kind(argument: Argument) -> str:
    if isinstance(argument, Tensor):
        return TYPES[argument.dtype]
    return "float" if isinstance(argument, float) else "int"


def _find(made: Launch, folder: Path) -> Variants | None:
    with _lock:
        if (folder, made) not in _found:
            _found[folder, made] = _ready(made, folder)
        return _found[folder, made]


def _ready(made: Launch, folder: Path) -> Variants | None:
    if compiler.in_index(made, folder):
        return Variants(made, folder, _load(made, folder))
    if importlib.util.find_spec("triton") is None:
        raise KernelError(
            f"FLAMIA_KERNELS={folder} has no {made.name}, and triton is not installed: add it with `flamia compile "
            f"--arch {made.arch} --out {folder}` and the options of this call, or pip install 'flamia[gpu]'"
        )
    warnings.warn(f"FLAMIA_KERNELS={folder} has no {made.name}: Triton compiles it", RuntimeWarning, stacklevel=3)
    return None


def _load(made: Launch, folder: Path) -> Ready:
    header, _, image = compiler.ready_file(made, folder).read_bytes().partition(b"\n")
    description = json.loads(header)
    return Ready(made.name, driver.load(image, description["function"]), **description)


def _run(variants: Variants, device: int, stream: int, grid: tuple[int, ...], arguments: Sequence[Argument]) -> None:
    values = [x.data_ptr() if isinstance(x, Tensor) else x for x in arguments]
    ready = variants.aligned if variants.aligned.serves(values) else variants.any()
    try:
        parameters = struct.pack(ready.format, *values)
    except struct.error as error:
        raise ValueError(f"{ready.name} cannot take its numbers {values}: {error}") from error
    driver.launch(ready.on(device), grid, ready.threads, ready.shared, stream, parameters, ready.function)


@lru_cache(maxsize=64)
def _jit(kernel: str) -> Any:
    if importlib.util.find_spec("triton") is None:
        raise KernelError(
            "row preparation needs triton: pip install 'flamia[gpu]', or set FLAMIA_KERNELS to a folder that "
            "`flamia compile` made elsewhere"
        )
    module, _, function = kernel.partition(":")
    found = getattr(importlib.import_module(module), function)
    compiler.count_jit()
    return found
