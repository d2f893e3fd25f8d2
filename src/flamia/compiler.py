"""The one place that compiles kernels of the CuTe DSL: in-process and on-disk caches, and folders of ready kernels.

A kernel is named by what changes its code and by nothing else, so lengths, batches and head counts never compile. What
is compiled becomes a shared library that loads with apache-tvm-ffi alone; calls load libraries and nothing else, so a
machine without the DSL runs what another one compiled, from a folder that ``flamia compile`` made. Such a folder has
launches of Triton kernels, too (``launch``), under the same rules.

Environment:
    FLAMIA_KERNELS: a folder of ready kernels; then the DSL compiles nothing, and a kernel that it lacks is an error.
    FLAMIA_CACHE: where libraries compiled on first use are kept; default ``~/.cache/flamia`` (or XDG_CACHE_HOME's).
"""

from __future__ import annotations

import ast
import contextlib
import hashlib
import importlib
import importlib.metadata
import importlib.util
import json
import os
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

FUNCTION = "kernel"  # what a library exports
INDEX, FORMAT = "index.json", 2  # of a folder of ready kernels, and what it is written like
ROOT = Path(__file__).parent.parent  # of the packages
SHIM = Path(__file__).with_name("compiler_shim.c")
DSL = "nvidia-cutlass-dsl"
# The archives that a library is linked with: file, distribution that brings it, part of the path where it has several.
ARCHIVES = (
    ("libcuda_dialect_runtime_static.a", "nvidia-cutlass-dsl-libs-cu13", "cu13"),
    ("libcudart_static.a", "nvidia-cuda-runtime", "cu13"),
)

Function = Callable[..., Any]
Option = str | int | float | bool


class KernelError(RuntimeError):
    """A kernel that cannot be had here: the message says what is missing, or what is stale, and what to do."""


class Product(Protocol):
    """What a folder holds a file of: a ``Kernel``, or a ``launch.Launch``.

    Attributes:
        name: as messages, ``last_plan()`` and indexes spell it.
        source: module that it is made from. arch: what for. options: its (name, value).
        sources: hash of all that it is made from. toolchain: versions of what makes it.
        suffix: of its file.
    """

    suffix: str

    @property
    def name(self) -> str: ...
    @property
    def source(self) -> str: ...
    @property
    def arch(self) -> str: ...
    @property
    def options(self) -> tuple[tuple[str, Option], ...]: ...
    @property
    def sources(self) -> str: ...
    @property
    def toolchain(self) -> str: ...

    def write(self, path: Path) -> None:
        """Compile into a file."""


@dataclass(frozen=True)
class Kernel:
    """What changes a kernel's code, and nothing else.

    Attributes:
        builder: "module:function"; called with ``arch`` and the options, it compiles and returns what ``cute.compile``
            does (``--enable-tvm-ffi``).
        source: module that holds the kernel. It, what it imports of flamia, and the builder's module decide whether a
            library is stale.
        arch: what it is compiled for, such as "sm_90a".
        options: (name, value) in the order of names.
    """

    builder: str
    source: str
    arch: str
    options: tuple[tuple[str, Option], ...]

    suffix = ".so"

    @property
    def name(self) -> str:
        options = ", ".join(f"{name}={value}" for name, value in self.options)
        return f"{self.source.removeprefix('flamia.')}[{self.arch}]({options})"

    @property
    def sources(self) -> str:
        return source_version(self.source, self.builder)

    @property
    def toolchain(self) -> str:
        return _compiler_version()

    def write(self, path: Path) -> None:
        _build(self, path)

    def build(self) -> Any:
        """Compile. Imports the DSL."""
        module, _, function = self.builder.partition(":")
        return getattr(importlib.import_module(module), function)(self.arch, **dict(self.options))


def make_kernel(builder: str, source: str, arch: str, **options: Option) -> Kernel:
    """A ``Kernel`` whose options are in order."""
    return Kernel(builder, source, arch, tuple(sorted(options.items())))


@dataclass
class Statistics:
    """What this process did.

    Attributes:
        compiled: kernels compiled.
        cached, ready: kernels loaded from the cache, and from a folder, which serves launches of Triton kernels, too.
        jit: Triton kernels that were left to Triton's JIT, which compiles them or has them in a cache of its own.
    """

    compiled: int = 0
    cached: int = 0
    ready: int = 0
    jit: int = 0


_lock = threading.RLock()
_functions: dict[tuple[Kernel, str | None], Function] = {}
_modules: list[Any] = []  # libraries stay loaded
_statistics = Statistics()


def statistics() -> Statistics:
    """A copy of the counts so far; ``compiled`` does not move while only lengths change."""
    with _lock:
        return Statistics(**asdict(_statistics))


def load(kernel: Kernel) -> Function:
    """The kernel's function: from this process, a folder of ready libraries, the cache, or the compiler.

    Raises:
        KernelError: the folder lacks the kernel or is stale, or something that compiling needs is missing.
    """
    folder = os.environ.get("FLAMIA_KERNELS") or None
    found = _functions.get((kernel, folder))
    if found is not None:
        return found
    with _lock:
        found = _functions.get((kernel, folder))
        if found is None:
            path = ready_file(kernel, Path(folder)) if folder else _cached(kernel)
            found = _functions[kernel, folder] = _open(path)
        return found


def count_jit() -> None:
    """Count a Triton kernel that is left to Triton's JIT."""
    with _lock:
        _statistics.jit += 1


def compile_to(kernel: Product, folder: Path) -> Path:
    """Compile a kernel into a file in a folder, unless it is there; several processes may ask at once."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / _file_name(kernel)
    if path.exists():
        return path
    with _locked(folder / ".locks" / path.stem):
        if not path.exists():
            kernel.write(path)
            with _lock:
                _statistics.compiled += 1
    return path


def write_index(folder: Path, made: Iterable[dict[str, Any]]) -> None:
    """Add entries of kernels whose files lie in the folder to its index, in place of those of older sources."""
    with _locked(folder / ".locks" / "index"):
        entries = dict(_read_index(folder)) if (folder / INDEX).exists() else {}
        entries |= {entry["name"]: entry for entry in made}
        text = json.dumps({"format": FORMAT, "kernels": [entries[name] for name in sorted(entries)]}, indent=1)
        temporary = folder / f".{INDEX}.{os.getpid()}"
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(folder / INDEX)


def cache_folder() -> Path:
    """Where libraries compiled on first use are kept."""
    chosen = os.environ.get("FLAMIA_CACHE")
    if chosen:
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "flamia"


# ------------------------------------------------------------------------------------------------------- versions


@lru_cache(maxsize=64)
def source_version(source: str, builder: str = "") -> str:
    """Hash of a module's text and of every module of flamia that it imports, and of the builder's module."""
    files: dict[str, bytes] = {}
    waiting = [source]
    while waiting:
        module = waiting.pop()
        if module not in files:
            path = _module_file(module)
            if path is not None:
                files[module] = path.read_bytes()
                waiting += _imports(files[module])
    if builder:
        spec = importlib.util.find_spec(builder.partition(":")[0])
        assert spec is not None, builder
        assert spec.origin is not None, builder
        files["builder"] = Path(spec.origin).read_bytes()
    digest = hashlib.sha256(SHIM.read_bytes())
    for name in sorted(files):
        digest.update(name.encode() + b"\0" + files[name] + b"\0")
    return digest.hexdigest()[:16]


def _module_file(module: str) -> Path | None:
    # None for what is not a module: a name imported from one. Found without importing anything.
    path = ROOT.joinpath(*module.split("."))
    return next((p for p in (path.with_suffix(".py"), path / "__init__.py") if p.is_file()), None)


@lru_cache(maxsize=256)
def _imports(text: bytes) -> list[str]:
    # Kept, since kernels share modules: parsing them is most of a first call from a folder.
    found = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            found += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    return [name for name in found if name.startswith("flamia.")]


def _key(kernel: Product) -> str:
    return hashlib.sha256(kernel.name.encode()).hexdigest()[:12]


@lru_cache(maxsize=1)
def _compiler_version() -> str:
    names = (DSL, *(distribution for _, distribution, _ in ARCHIVES))
    return " ".join(f"{name} {installed(name)}" for name in names)


@lru_cache(maxsize=16)
def installed(distribution: str) -> str:
    """Version of a distribution, "missing" where there is none."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "missing"


def _file_name(kernel: Product) -> str:
    version = hashlib.sha256(f"{kernel.sources} {kernel.toolchain}".encode()).hexdigest()[:12]
    room = kernel.source.removeprefix("flamia.").replace(".", "-")
    return f"{room}-{_key(kernel)}-{version}{kernel.suffix}"


# --------------------------------------------------------------------------------------------- where libraries are


def index_entry(kernel: Product) -> dict[str, Any]:
    """What an index says about a kernel that this process has compiled, or could."""
    return {
        "name": kernel.name,
        "arch": kernel.arch,
        "options": dict(kernel.options),
        "sources": kernel.sources,
        "compiler": kernel.toolchain,
        "file": _file_name(kernel),
    }


def _read_index(folder: Path) -> dict[str, dict[str, Any]]:
    path = folder / INDEX
    try:
        return _parse_index(path, path.stat().st_mtime_ns)
    except (OSError, ValueError) as error:
        raise KernelError(
            f"FLAMIA_KERNELS={folder} has no readable {INDEX} ({error}): make it with `flamia compile`"
        ) from error


@lru_cache(maxsize=4)
def _parse_index(path: Path, modified: int) -> dict[str, dict[str, Any]]:
    # Once for all kernels of a call. modified: a folder may be added to.
    index = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(index, dict) or index.get("format") != FORMAT:
        raise KernelError(f"{path} has a format of another version of flamia: build the folder again")
    return {entry["name"]: entry for entry in index["kernels"]}


def in_index(kernel: Product, folder: Path) -> bool:
    """Whether a folder has a kernel, current or stale."""
    return kernel.name in _read_index(folder)


def ready_file(kernel: Product, folder: Path) -> Path:
    """A kernel's file in a folder.

    Raises:
        KernelError: the folder lacks it, or has it from other sources.
    """
    entry = _read_index(folder).get(kernel.name)
    if entry is None:
        raise KernelError(
            f"FLAMIA_KERNELS={folder} has no library for {kernel.name}: add it with "
            f"`flamia compile --arch {kernel.arch} --out {folder}` and the options of this call, or unset "
            "FLAMIA_KERNELS to compile on first use"
        )
    if entry["sources"] != kernel.sources:
        raise KernelError(
            f"FLAMIA_KERNELS={folder} is stale: its {kernel.name} was compiled from sources {entry['sources']}, this "
            f"flamia has {kernel.sources}; build it again with `flamia compile --arch {kernel.arch} --out {folder}`"
        )
    path = folder / str(entry["file"])
    if not path.is_file():
        raise KernelError(f"FLAMIA_KERNELS={folder} is incomplete: {path.name}, which its {INDEX} names, is missing")
    with _lock:
        _statistics.ready += 1
    return path


def _cached(kernel: Kernel) -> Path:
    before = _statistics.compiled
    path = compile_to(kernel, cache_folder())
    _statistics.cached += _statistics.compiled == before
    return path


def _open(path: Path) -> Function:
    try:
        import tvm_ffi
    except ModuleNotFoundError as error:
        raise KernelError("device kernels need apache-tvm-ffi: pip install 'flamia[gpu]'") from error
    module = tvm_ffi.load_module(str(path))
    _modules.append(module)
    function: Function = module[FUNCTION]
    return function


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    import fcntl

    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


# -------------------------------------------------------------------------------------------------------- linking


def _build(kernel: Kernel, path: Path) -> None:
    if importlib.util.find_spec("cutlass") is None:
        raise KernelError(
            f"{kernel.name} is not compiled yet and {DSL} is not installed: pip install 'flamia[gpu]', or set "
            "FLAMIA_KERNELS to a folder that `flamia compile` made elsewhere"
        )
    compiler, archives = _c_compiler(), [_archive(*archive) for archive in ARCHIVES]
    compiled = kernel.build()
    with tempfile.TemporaryDirectory(prefix=".build-", dir=path.parent) as name:
        folder = Path(name)
        object_file, library = folder / "kernel.o", folder / path.name
        compiled.export_to_c(
            object_file_path=str(object_file), function_name=FUNCTION, export_only_tvm_ffi_symbols=True
        )
        # Libraries share a process with one another and with torch's CUDA runtime: each binds to its own copy.
        hide = ["-Wl,--gc-sections", "-Wl,--exclude-libs,ALL", "-Wl,-Bsymbolic", "-s"]
        inputs = [str(file) for file in (SHIM, object_file, *archives)]
        command = [compiler, "-shared", "-fPIC", "-O2", "-o", str(library), *inputs, *hide]
        done = subprocess.run([*command, "-lpthread", "-ldl", "-lrt"], capture_output=True, text=True)
        if done.returncode:
            raise KernelError(f"linking {kernel.name} with {compiler} failed: {done.stderr.strip()}")
        library.replace(path)


def _c_compiler() -> str:
    chosen = os.environ.get("CC", "cc")
    found = shutil.which(chosen)
    if found is None:
        raise KernelError(f"compiling kernels needs a C compiler to link them: there is no {chosen!r} ($CC, or cc)")
    return found


def _archive(name: str, distribution: str, part: str) -> Path:
    try:
        files = importlib.metadata.files(distribution) or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    for file in files:
        if file.name == name and part in file.parts:
            return Path(str(file.locate()))
    raise KernelError(f"compiling kernels needs {name} of {distribution}: pip install 'flamia[gpu]'")
