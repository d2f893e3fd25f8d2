"""Run CuTe DSL kernels on a software device: ``cute.compile`` gives functions that take host tensors.

Nothing here needs a GPU or a CUDA driver; nvidia-cutlass-dsl, apache-tvm-ffi and a C compiler do the rest.
"""

from __future__ import annotations

import contextlib
import os
import re
import tempfile
from pathlib import Path

from .driver import Device, SoftFunction


def load_compiled(device: Device, compiled, edit=None) -> SoftFunction:
    """A function that ``cute.compile`` made with ``--enable-tvm-ffi --keep-ptx``, to run on ``device``.

    ``edit`` may change the PTX text before it is run (for fault injection).
    """
    found = compiled.artifacts.PTX
    if not found:
        raise ValueError("compiled has no PTX: compile it with --keep-ptx (or CUTE_DSL_KEEP=ptx)")
    text = found.decode() if isinstance(found, bytes) else str(found)
    if "\n" not in text:
        text = Path(text).read_text()
    # NUL bytes end the text that the compiler keeps
    text = text.rstrip("\0")
    with tempfile.TemporaryDirectory(prefix="softgpu-") as folder:
        target = Path(folder) / "kernel.o"
        compiled.export_to_c(object_file_path=str(target), function_name="func", export_only_tvm_ffi_symbols=True)
        return device.load(target, edit(text) if edit else text)


def compile_for(device: Device, arch: str, original, *args, options: str = "", edit=None, **kwargs) -> SoftFunction:
    """Compile with ``original`` (``cute.compile``) for ``arch`` such as ``sm_90a`` and load the result."""
    with tempfile.TemporaryDirectory(prefix="softgpu-") as folder:
        flags = f"{options} --gpu-arch {arch} --keep-ptx --dump-dir={folder}".strip()
        if "--enable-tvm-ffi" not in flags:
            flags = "--enable-tvm-ffi " + flags
        return load_compiled(device, original(*args, options=flags, **kwargs), edit)


class _Compile:
    """Stands in for ``cute.compile``."""

    def __init__(self, original, device: Device, arch: str, edit):
        self._original, self._device, self._arch, self._edit = original, device, arch, edit

    def __call__(self, *args, options: str = "", **kwargs):
        return compile_for(self._device, self._arch, self._original, *args, options=options, edit=self._edit, **kwargs)

    def __getattr__(self, name):
        return getattr(self._original, name)


@contextlib.contextmanager
def compiling(device: Device, arch: str, edit=None):
    """Within the context, ``cute.compile`` compiles for ``arch`` and its results run on ``device``."""
    if not re.fullmatch(r"sm_\d+[af]?", arch):
        raise ValueError(f"arch must look like sm_90a, not {arch!r}")
    saved = {k: os.environ.get(k) for k in ("CUTE_DSL_ARCH", "CUTE_DSL_DISABLE_FILE_CACHING")}
    os.environ["CUTE_DSL_ARCH"] = arch
    os.environ["CUTE_DSL_DISABLE_FILE_CACHING"] = "1"
    from cutlass import cute
    from cutlass.cutlass_dsl import CuTeDSL

    # kernels may ask for the target while they are built, before any compile option is seen
    settings = CuTeDSL._get_dsl().envar
    saved_arch, settings.arch = settings.arch, arch
    original = cute.compile
    cute.compile = _Compile(original, device, arch, edit)
    try:
        yield
    finally:
        cute.compile, settings.arch = original, saved_arch
        for k, v in saved.items():
            os.environ.pop(k, None) if v is None else os.environ.__setitem__(k, v)
