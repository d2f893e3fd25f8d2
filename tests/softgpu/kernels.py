"""Small hand-written PTX kernels for the tests of single instructions."""

from __future__ import annotations

import numpy as np

from softgpu import Device

HEAD = """
.version 9.0
.target {target}
.address_size 64
.extern .shared .align 128 .b8 dynamic[];
.visible .entry kernel({params})
{{
	.reg .pred %p<20>;
	.reg .b16 %h<40>;
	.reg .b32 %r<80>;
	.reg .b64 %d<60>;
	.reg .b128 %q<4>;
"""


def source(body: str, pointers: int, target: str = "sm_90a", raw: str = "") -> str:
    """A module with one kernel; parameter n arrives in ``%d<n>``, ``%r0`` is the thread number."""
    params = ", ".join([f".param .u64 p{n}" for n in range(pointers)] + ([raw] if raw else []))
    loads = "".join(f"\tld.param.u64 %d{n}, [p{n}];\n" for n in range(pointers))
    return HEAD.format(params=params, target=target) + loads + "\tmov.u32 %r0, %tid.x;\n" + body + "\n\tret;\n}\n"


def run(body, *arrays, device=None, threads=32, grid=1, cluster=1, shared=0, target="sm_90a", raw=("", b"")):
    """Run a kernel body over NumPy arrays (changed in place); gives the report."""
    device = device or Device()
    params = b"".join(a.ctypes.data.to_bytes(8, "little") for a in arrays)
    if raw[0]:
        params += bytes(-len(params) % 64) + raw[1]
    return device.launch(
        source(body, len(arrays), target, raw[0]), (grid, 1, 1), (threads, 1, 1), params, buffers=arrays,
        cluster=(cluster, 1, 1), dynamic_shared=shared,
    )  # fmt: skip


def lanes(expression: str, *inputs, out=np.uint32, target="sm_90a"):
    """Evaluate one instruction sequence per lane: inputs arrive in ``%r10``, ``%r11``, … (32-bit, or ``%d10`` for
    64-bit), the result is taken from ``%r1`` (or ``%d20`` for 64-bit results)."""
    inputs = [np.ascontiguousarray(i) for i in inputs]
    n = inputs[0].size
    result = np.zeros(n, out)
    body = ["\tmul.wide.u32 %d40, %r0, 4;", "\tmul.wide.u32 %d41, %r0, 8;"]
    for k, a in enumerate(inputs):
        bits = a.dtype.itemsize * 8
        reg = f"%r{10 + k}" if bits == 32 else f"%d{10 + k}"
        body += [f"\tadd.s64 %d42, %d{k}, %d{40 if bits == 32 else 41};", f"\tld.global.b{bits} {reg}, [%d42];"]
    body.append(expression)
    bits = result.dtype.itemsize * 8
    body += [
        f"\tadd.s64 %d42, %d{len(inputs)}, %d{40 if bits == 32 else 41};",
        f"\tst.global.b{bits} [%d42], {'%r1' if bits == 32 else '%d20'};",
    ]
    run("\n".join(body), *inputs, result, threads=n, target=target)
    return result
