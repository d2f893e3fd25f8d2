"""Compile a subject in a process of its own and read what came out: machine code, PTX, sizes.

A process of its own, because compilers read the target from the environment when they are imported.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from flamia.inspect.sass import Code


@dataclass(frozen=True)
class Binary:
    """One compiled kernel.

    Attributes:
        symbol: its name in the binary. registers: per thread at launch. stack_bytes: per thread.
        smem_bytes: per CTA, static and dynamic. threads: per CTA. tmem_columns: allocated tensor memory, 0 for none.
        roles: registers that ``setmaxnreg`` gives to warps, in order of appearance, without repetitions.
    """

    symbol: str
    code: Code
    registers: int
    stack_bytes: int
    smem_bytes: int
    threads: int
    tmem_columns: int
    roles: tuple[int, ...]


def build(function: str, arch: str) -> list[Binary]:
    """Everything that ``function`` ("module:function", called with the target) compiles, in order.

    Raises:
        RuntimeError: compiling failed; with the last lines that it printed.
    """
    with tempfile.TemporaryDirectory(prefix="flamia-inspect-") as name:
        folder = Path(name)
        environment = {
            **os.environ,
            "CUTE_DSL_ARCH": arch,
            "CUTE_DSL_DISABLE_FILE_CACHING": "1",
            # FlashAttention-4's own switches for compiling without a GPU
            "FLASH_ATTENTION_ARCH": arch,
            "FLASH_ATTENTION_NUM_SMS": "132" if arch == "sm_90a" else "148",
        }
        start = f"from {__name__} import compile_here; import sys; compile_here(*sys.argv[1:])"
        command = [sys.executable, "-c", start, function, arch, name]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"compiling {function} for {arch} failed:\n{done.stderr.strip()[-2000:]}")
        return [_read(path) for path in sorted(folder.glob("*.cubin"))]


def _read(cubin: Path) -> Binary:
    ptx = cubin.with_suffix(".ptx").read_text()
    dynamic = json.loads(cubin.with_suffix(".json").read_text())["dynamic_smem_bytes"]
    usage = _run("cuobjdump", "--dump-resource-usage", str(cubin))
    symbol = re.search(r"Function (\S+):", usage)
    sizes = dict(re.findall(r"\b(REG|STACK|SHARED):(\d+)", usage))
    threads = re.search(r"\.reqntid (\d+)(?:, (\d+))?(?:, (\d+))?", ptx)
    if not symbol or len(sizes) != 3 or not threads:
        raise RuntimeError(f"cuobjdump's account of {cubin.name} is not understood: {usage[-500:]}")
    count = 1
    for n in threads.groups():
        count *= int(n or 1)
    return Binary(
        symbol=symbol[1],
        code=Code(_run("nvdisasm", "-c", str(cubin))),
        registers=int(sizes["REG"]),
        stack_bytes=int(sizes["STACK"]),
        smem_bytes=int(sizes["SHARED"]) + dynamic,
        threads=count,
        tmem_columns=tensor_memory(ptx),
        roles=tuple(dict.fromkeys(int(n) for n in re.findall(r"setmaxnreg\.\w+\.sync\.aligned\.u32\s+(\d+)", ptx))),
    )


def tensor_memory(ptx: str) -> int:
    """Columns that a kernel allocates, the most of its ``tcgen05.alloc`` instructions; 0 where it has none."""
    most = 0
    for operand in re.findall(r"tcgen05\.alloc\.[^;]*\],\s*([^;\s]+)\s*;", ptx):
        if operand.isdigit():
            most = max(most, int(operand))
        else:
            values = [int(v) for v in re.findall(rf"mov\.[bu]32\s+{re.escape(operand)},\s*(\d+);", ptx)]
            if not values:
                raise ValueError(f"ptx allocates {operand} tensor-memory columns, which is no constant")
            most = max(most, *values)
    return most


def dynamic_shared(ir: str) -> int:
    """Dynamic shared memory of the only launch in the host code, bytes: the last constant of its configuration.

    Raises:
        ValueError: there is no launch, or what is stored there is no size.
    """
    at = ir.find("@_cudaLaunchKernelEx(%")
    host = ir[ir.rfind("llvm.func @", 0, at) : at] if at >= 0 else ""
    constants = dict(re.findall(r"(%\w+) = llvm\.mlir\.constant\((\d+) : i64\)", host))
    stored = re.findall(r"llvm\.store (%\w+), %\w+ : i64, !llvm\.ptr", host)
    found = [int(constants[name]) for name in stored if name in constants]
    if not found or found[-1] > 232448:
        raise ValueError("ir has no launch with a constant amount of shared memory")
    return found[-1]


@lru_cache(maxsize=4)
def _tool(name: str) -> str:
    """nvdisasm or cuobjdump: those that triton brings, which know every target here, or those on the path."""
    import triton

    bundled = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name
    found = str(bundled) if bundled.is_file() else shutil.which(name)
    if not found:
        raise RuntimeError(f"{name} is needed: it comes with triton and with the CUDA toolkit")
    return found


def _run(tool: str, *arguments: str) -> str:
    return subprocess.run([_tool(tool), *arguments], check=True, capture_output=True, text=True).stdout


class _Keep:
    """Stands in for ``cute.compile``: keeps the binary of everything that is compiled."""

    def __init__(self, original: Any, arch: str, folder: Path):
        self._original, self._arch, self._folder, self._count = original, arch, folder, 0

    def __call__(self, *arguments: Any, options: str = "", **named: Any) -> Any:
        flags = f"{options} --gpu-arch {self._arch} --keep-ptx --keep-cubin --dump-dir={self._folder / 'dump'}"
        if "--enable-tvm-ffi" not in flags:
            flags += " --enable-tvm-ffi"
        (self._folder / "dump").mkdir(exist_ok=True)
        compiled = self._original(*arguments, options=flags.strip(), **named)
        target = self._folder / f"{self._count:02d}.cubin"
        self._count += 1
        target.write_bytes(compiled.artifacts.CUBIN)
        target.with_suffix(".ptx").write_text(compiled.artifacts.PTX.rstrip("\0"))
        size = dynamic_shared(str(compiled.ir_module))
        target.with_suffix(".json").write_text(json.dumps({"dynamic_smem_bytes": size}))
        return compiled

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)


def compile_here(function: str, arch: str, folder: str) -> None:
    """Compile in this process and leave the binaries in a folder; what ``build`` starts."""
    import importlib

    from cutlass import cute

    cute.compile = _Keep(cute.compile, arch, Path(folder))
    module, _, name = function.partition(":")
    getattr(importlib.import_module(module), name)(arch)
