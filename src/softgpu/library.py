"""Host code of kernels as something that can be loaded: its CUDA runtime exchanged for one that captures launches.

An exported object is linked with ``capture.c``. A shared library that needs a shared CUDA runtime
(``libcudart.so``, the CuTe DSL's ``libcute_dsl_runtime.so``) is copied, and the copy needs ``runtime.c`` instead.
A library that has NVIDIA's runtime inside cannot be run: that runtime verifies that its driver is NVIDIA's.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import re
import shutil
import struct
import subprocess
from pathlib import Path
from typing import NamedTuple

from .errors import SoftGPUError

_OBJECT, _SHARED = 1, 3  # ET_REL, ET_DYN
_DYNAMIC, _SYMBOLS, _VERSION_NEEDS = 6, 11, 0x6FFFFFFE  # section types
_NEEDED = 1  # tag of a dynamic entry
_RUNTIME = re.compile(rb"lib(cudart|cute_dsl_runtime|cuda_dialect_runtime)\.so[.\d]*")
#: what belongs to CUDA or to the DSL's layer over it
_CUDA_NAME = re.compile(r"_?cu(da)?[A-Z]\w*|cuda_dialect_\w+|CuteDSLRT_\w+")
_count = itertools.count()


class HostCode(NamedTuple):
    """A library to load, the launch capture that its CUDA calls go to, and a file to make the same from again."""

    library: Path
    capture: ctypes.CDLL
    source: Path


def host_code(path: Path, folder: Path) -> HostCode:
    """The host code of an object or shared library, in new files in ``folder`` that nobody else uses.

    Raises ``SoftGPUError`` for files that are neither, and for libraries whose CUDA runtime cannot be exchanged.
    """
    raw = path.read_bytes()
    kind = struct.unpack_from("<H", raw, 16)[0] if raw[:6] == b"\x7fELF\x02\x01" else 0
    if kind not in (_OBJECT, _SHARED):
        raise SoftGPUError(f"{path} must be a 64-bit ELF object or shared library")
    target = folder / "kernel.so"
    if kind == _OBJECT:
        # a process that has the CUDA runtime of the DSL loaded must not lend its symbols: bind to our own
        _compile(target, "capture.c", str(path), "-Wl,-Bsymbolic")
    elif b"\0softgpu_set_callback\0" in raw:
        shutil.copy(path, target)
    else:
        return _redirected(path, bytearray(raw), target)
    return HostCode(target, ctypes.CDLL(str(target)), target)


def _compile(target: Path, *arguments: str) -> None:
    compiler = shutil.which(os.environ.get("CC", "cc"))
    if compiler is None:
        raise SoftGPUError("a C compiler is needed to link the launch capture; none was found as $CC or cc")
    here = Path(__file__).parent
    command = [compiler, "-shared", "-fPIC", "-O1", "-w", f"-I{here}", "-o", str(target)]
    command += [str(here / a) if a in ("capture.c", "runtime.c") else a for a in arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SoftGPUError(f"linking {' '.join(arguments)} failed: {done.stderr.strip()}")


def _redirected(path: Path, raw: bytearray, target: Path) -> HostCode:
    """Let a copy of the library need our runtime, under a name that nothing else in the process has."""
    elf = _Elf(raw)
    found = [(at, name) for at, name in elf.needed() if _RUNTIME.fullmatch(elf.string(name))]
    if not found:
        if b"\0libcuda.so.1\0" in raw:
            raise SoftGPUError(
                f"{path} has NVIDIA's CUDA runtime inside, which works with NVIDIA's driver only: link it with the "
                "shared runtime (-lcudart), or give the object that it was made from"
            )
        raise SoftGPUError(f"{path} needs no shared CUDA runtime: softgpu has nothing to exchange in it")
    first = found[0][1]
    length = len(elf.string(first))
    name = f"softgpu{next(_count):0{length - 7}d}"
    refusals = target.with_name("refusals.c")
    missing = sorted(n for n in elf.undefined() if _CUDA_NAME.fullmatch(n))
    lines = ["extern const char *softgpu_refused;"]
    lines += [f'__attribute__((weak)) int {n}(void) {{ softgpu_refused = "{n}"; return 801; }}' for n in missing]
    refusals.write_text("\n".join(lines))
    runtime = target.with_name(name)
    # versioned like the runtime's own symbols, which carry its name
    _compile(runtime, "runtime.c", str(refusals), "-Wl,-Bsymbolic", f"-Wl,-soname,{name}", "-Wl,--default-symver")
    old = {elf.string(n) for _, n in found}
    for at, _ in found:
        struct.pack_into("<Q", raw, at, first)
    elf.rename_versions(old, first, name.encode())
    raw[elf.strings + first : elf.strings + first + length] = name.encode()
    target.write_bytes(raw)
    source = target.with_name("source.so")
    shutil.copy(path, source)
    capture = ctypes.CDLL(str(runtime))
    # bound to what it needs before anything that the process has loaded for all, such as the DSL's own runtime
    ctypes.CDLL(str(target), mode=os.RTLD_LOCAL | os.RTLD_DEEPBIND)
    return HostCode(target, capture, source)


class _Elf:
    """The few parts of a little-endian ELF64 shared library that say what it needs."""

    def __init__(self, raw: bytearray):
        self.raw = raw
        (start,) = struct.unpack_from("<Q", raw, 40)
        size, count = struct.unpack_from("<HH", raw, 58)
        # type, offset, size, index of the strings
        self._sections = [struct.unpack_from("<4xI16xQQI", raw, start + n * size) for n in range(count)]
        _, _, link = self._section(_DYNAMIC)
        self.strings = self._sections[link][1]

    def _section(self, kind: int) -> tuple[int, int, int]:
        return next((tuple(rest) for k, *rest in self._sections if k == kind), (0, 0, 0))

    def string(self, at: int) -> bytes:
        start = self.strings + at
        return bytes(self.raw[start : self.raw.index(0, start)])

    def needed(self) -> list[tuple[int, int]]:
        """(place of the entry's value in the file, place of the name among the strings) per needed library."""
        start, size, _ = self._section(_DYNAMIC)
        entries = [(at + 8, struct.unpack_from("<QQ", self.raw, at)) for at in range(start, start + size, 16)]
        return [(at, value) for at, (tag, value) in entries if tag == _NEEDED]

    def undefined(self) -> set[str]:
        """Names of the symbols that the library takes from others."""
        start, size, _ = self._section(_SYMBOLS)
        out = set()
        for at in range(start, start + size, 24):
            name, _, _, section = struct.unpack_from("<IBBH", self.raw, at)
            if section == 0 and name:
                out.add(self.string(name).decode())
        return out

    def rename_versions(self, files: set[bytes], place: int, name: bytes) -> None:
        """Symbol versions that are asked of ``files`` are asked of ``name`` (found at ``place``) under its name."""
        at, size, _ = self._section(_VERSION_NEEDS)
        while size:
            _, count, file, first, step = struct.unpack_from("<HHIII", self.raw, at)
            if self.string(file) in files:
                struct.pack_into("<I", self.raw, at + 4, place)
                version = at + first
                for _ in range(count):
                    (following,) = struct.unpack_from("<I", self.raw, version + 12)
                    struct.pack_into("<I", self.raw, version, _hash(name))
                    struct.pack_into("<I", self.raw, version + 8, place)
                    version += following
            if not step:
                return
            at += step


def _hash(name: bytes) -> int:
    """The hash of a symbol version's name (System V ABI, "Hash Table")."""
    h = 0
    for c in name:
        h = (h << 4) + c
        high = h & 0xF0000000
        h = (h ^ high >> 24) & ~high & 0xFFFFFFFF
    return h
