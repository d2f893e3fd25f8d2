"""Compiles one launch of a Triton kernel into a file, for ``launch`` to load. Needs no GPU."""

from __future__ import annotations

import importlib
import json
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flamia.compiler import KernelError

if TYPE_CHECKING:
    from flamia.launch import Launch

IMAGE = "cubin"  # what the driver is given: "cubin", or "ptx", which a device in software runs
FORMATS = {"i32": "i", "i64": "q", "fp32": "f"}  # of ``struct``; pointers: "P"


def compile_launch(launch: Launch, path: Path) -> None:
    """Write a line of JSON and the image. The line says how to launch it:

    function: name in the image; threads of a program; shared: bytes of dynamic shared memory; format: of the
    parameters, for ``struct.pack``; aligned: positions of arguments that must be multiples of 16; strides: positions of
    integers that must stay below 2^31.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.runtime.jit import JITFunction

    module, _, function = launch.kernel.partition(":")
    kernel = getattr(importlib.import_module(module), function)
    if not isinstance(kernel, JITFunction):
        raise KernelError(f"{launch.name} cannot be compiled while TRITON_INTERPRET=1")
    found = re.fullmatch(r"sm_(\d+)a", launch.arch)
    if found is None:
        raise KernelError(f"arch={launch.arch!r} is not one that launches are compiled for, such as sm_90a")
    signature, hints, aligned, strides = describe(kernel, launch)
    constants = dict(launch.constants)
    options: dict[str, Any] = {"num_warps": launch.warps, "enable_fp_fusion": not launch.exact}
    if launch.registers:
        options["maxnreg"] = launch.registers
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=hints)
    with triton.knobs.compilation.scope():
        triton.knobs.compilation.disable_line_info = True  # most of a cubin's bytes
        made = triton.compile(source, target=GPUTarget("cuda", int(found[1]), 32), options=options)
    types = [kind for kind in signature.values() if kind != "constexpr"]
    # Memory that Triton's launcher would allocate: these kernels ask for none, and get null pointers.
    scratch = _parameters(made.asm["ptx"]) - len(types)
    sizes = [getattr(made.metadata, f"{name}_scratch_size", 0) for name in ("global", "profile")]
    if any(sizes) or scratch < 0 or made.metadata.num_ctas != 1:
        raise KernelError(f"{launch.name} needs what `launch` does not give: scratch memory {sizes}, or clusters")
    description = {
        "function": made.metadata.name,
        "threads": 32 * made.metadata.num_warps,
        "shared": made.metadata.shared,
        "format": "".join("P" if kind[0] == "*" else FORMATS[kind] for kind in types) + "0P" + "8x" * scratch,
        "aligned": aligned,
        "strides": strides,
    }
    image = made.asm[IMAGE]
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_bytes(json.dumps(description).encode() + b"\n" + (image if IMAGE == "cubin" else image.encode()))
    temporary.replace(path)


def describe(kernel: Any, launch: Launch) -> tuple[dict[str, str], dict[tuple[int], Any], list[int], list[int]]:
    """Types by parameter, hints by position for ``ASTSource``, and which arguments are assumed to be what.

    What the JIT would not specialise on is assumed to be nothing, and an integer never to be 1.
    """
    signature: dict[str, str] = {}
    hints: dict[tuple[int], Any] = {}
    aligned, strides = [], []
    kinds = iter(enumerate(launch.kinds))
    constants = dict(launch.constants)
    for parameter in kernel.params:
        if parameter.is_constexpr:
            signature[parameter.name] = "constexpr"
            constants.pop(parameter.name)
            continue
        position, kind = next(kinds)
        special = not parameter.do_not_specialize
        if kind[0] == "*":
            special = special and not parameter.do_not_specialize_on_alignment
        elif kind == "float":
            special, kind = False, "fp32"
        else:
            kind = "i64" if special and not launch.aligned else "i32"
            if special and launch.aligned:
                strides.append(position)
        signature[parameter.name] = kind
        if special and launch.aligned:
            hints[(parameter.num,)] = [["tt.divisibility", 16]]
            aligned.append(position)
    if constants or next(kinds, None) is not None:
        raise TypeError(f"{launch.name} has more arguments than {launch.kernel} takes: {list(constants)}")
    return signature, hints, aligned, strides


def _parameters(ptx: str) -> int:
    found = re.search(r"\.entry\s+\w+\s*\((.*?)\)", ptx, re.DOTALL)
    assert found is not None
    return len(re.findall(r"\.param\b", found[1]))
