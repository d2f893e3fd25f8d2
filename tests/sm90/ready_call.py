"""A training call of the Hopper backend from a folder, where no compiler can be imported. Run as a script.

``build FOLDER`` compiles: launches into images of PTX, as `flamia compile` would into cubins, and attention kernels for
the software device. ``call FOLDER`` runs calls on that device with what lies there, and compares with the reference.
"""

import contextlib
import dataclasses
import json
import os
import sys
import time
from importlib.abc import MetaPathFinder
from pathlib import Path

COMPILERS = ("triton", "cutlass", "nvidia_cutlass_dsl")


class Refuse(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in COMPILERS:
            raise ModuleNotFoundError(f"{name} is a compiler", name=name)


if sys.argv[1] == "call":
    sys.meta_path.insert(0, Refuse())
STARTED = set(sys.modules)  # a package may leave an empty one at Python's start

import torch  # noqa: E402

import flamia  # noqa: E402
import softgpu  # noqa: E402
from flamia import backends, compiler, launch  # noqa: E402
from flamia.documents import Documents  # noqa: E402
from flamia.plan import Plan  # noqa: E402
from flamia.quantize import lists  # noqa: E402
from flamia.sm90 import kernels, parts  # noqa: E402
from softgpu.cuda import SoftDriver  # noqa: E402

ARCH, HEADS, KV_HEADS, DIM = "sm_90a", 4, 2, 64
LENGTHS, TAIL = ([70, 0, 33], [80, 5, 33]), 6  # 109 queries: tables of two heads of four begin at odd addresses
# Sums of weights have one forward kernel instead of two: less to compile.
RECIPE = flamia.Recipe(variant="folded", products="hopper", row_sum="weights")
PLAN = Plan(RECIPE, "sm90", (), DIM, HEADS, KV_HEADS, DIM**-0.5, None, 0, deterministic=True, training=True)

# The kernel that counts smaller keys has local memory, which the software device lacks: as for many items.
lists._PLACED = 0


def build(folder):
    from flamia import triton_compiler
    from softgpu.cutedsl import compiling

    triton_compiler.IMAGE = "ptx"
    # Rows of millions of tokens are not run here, nor misaligned tensors but q, k, v and gradients.
    given = ("_operand_kernel", "_gradient_kernel")
    for made in backends.call_launches(PLAN, torch.bfloat16, ARCH):
        if "*i64" not in made.kinds and (made.aligned or made.kernel.endswith(given)):
            compiler.compile_to(made, folder)
            compiler.write_index(folder, [compiler.index_entry(made)])
    for n, kernel in enumerate(kernels.call_kernels(PLAN, torch.bfloat16)):
        with compiling(softgpu.Device(), ARCH):
            function = kernel.build()
        (folder / f"{n}.so").write_bytes(function._host.source.read_bytes())
        (folder / f"{n}.ptx").write_text(function.ptx)


def use(folder):
    """Let the backend run on a software device."""
    from flamia import driver
    from flamia.sm90 import backend

    # Layout conversions of Triton's may move what nobody uses.
    device = softgpu.Device(checks=dataclasses.replace(softgpu.ALL, uninitialised=False))
    attention = softgpu.Device()
    functions = {
        kernel: attention.load(folder / f"{n}.so", (folder / f"{n}.ptx").read_text())
        for n, kernel in enumerate(kernels.call_kernels(PLAN, torch.bfloat16))
    }
    backend.load = functions.__getitem__
    backend.device_sizes = lambda index: (3, 1 << 19)
    torch.cuda.device = lambda device: contextlib.nullcontext()
    driver._library = lambda: soft
    driver.current = lambda: (0, 0)
    driver.target = lambda device: ARCH
    soft = SoftDriver(device)
    run = launch._run

    def reach(variants, index, stream, grid, arguments):
        device.buffers.clear()
        storages = {x.untyped_storage().data_ptr(): x for x in arguments if isinstance(x, torch.Tensor) and x.numel()}
        for x in storages.values():
            device.register(x)
        run(variants, index, stream, grid, arguments)

    launch._run = reach
    return backend, device


def inputs():
    g = torch.Generator().manual_seed(0)
    total_q, total_k = (sum(n) + TAIL for n in LENGTHS)
    shapes = ((total_q, HEADS), (total_k, KV_HEADS), (total_k, KV_HEADS), (total_q, HEADS))
    tensors = [torch.randn(*shape, DIM, generator=g).to(torch.bfloat16) for shape in shapes]
    for x in tensors:
        x[-TAIL:] = torch.nan
    cu = [torch.tensor([0, *torch.tensor(n).cumsum(0)], dtype=torch.int32) for n in LENGTHS]
    return tensors, torch.randn(HEADS, total_q, generator=g), Documents(*cu, total_q, total_k)


def elsewhere(x):
    """The same numbers an odd number of elements past an aligned address, a row in steps of an odd stride."""
    tokens, heads, dim = x.shape
    flat = torch.full((tokens * (heads * dim + 3) + 1,), torch.nan, dtype=x.dtype)
    view = flat[1:].view(tokens, heads * dim + 3)[:, : heads * dim].unflatten(1, (heads, dim))
    view.copy_(x)
    return view


def call(folder):
    from flamia.reference import backend as reference

    os.environ["FLAMIA_KERNELS"] = str(folder)
    torch.use_deterministic_algorithms(True)  # fills what is allocated: NaN, or the largest integer
    backend, device = use(folder)
    (q, k, v, do), dlse, documents = inputs()

    def whole(q, k, v, do):
        o, lse, result, kept = backend.run_forward(PLAN, q, k, v, documents)
        gradients = backend.run_backward(PLAN, do, dlse, o, result.lse2, result.row_max, kept, documents)
        return o, lse, *gradients

    got = whole(q, k, v, do)
    first = dataclasses.asdict(compiler.statistics())
    ran = [report.kernel for report in device.reports]
    again = whole(*map(elsewhere, (q, k, v, do)))
    second = dataclasses.asdict(compiler.statistics())
    device.reports.clear()
    for module in (parts, backend):
        module.backward_parts = lambda plan, total_q, total_k: 2
    split = whole(q, k, v, do)
    want_o, _, want_lse, want, payloads = reference.run_forward(PLAN, q, k, v, documents, None, None)
    gradients = reference.run_backward(PLAN, do, dlse, want_o, want.lse2, want.row_max, payloads, documents, None)

    def error(x, y):
        seen = y.isfinite()
        assert torch.equal(x[~seen], y[~seen])
        return float((x[seen].double() - y[seen].double()).norm() / y[seen].double().norm())

    names = ("o", "lse", "dq", "dk", "dv")
    return {
        "errors": {name: error(x, y) for name, x, y in zip(names, got, (want_o, want_lse, *gradients), strict=True)},
        "elsewhere": {name: torch.equal(x, y) for name, x, y in zip(names, got, again, strict=True)},
        "first": first,
        "second": second,
        "ran": ran,
        "split": {name: torch.equal(x, y) for name, x, y in zip(names, got, split, strict=True)},
        "third": dataclasses.asdict(compiler.statistics()),
        "ran_split": [report.kernel for report in device.reports],
        "imported": sorted({name.partition(".")[0] for name in set(sys.modules) - STARTED} & set(COMPILERS)),
    }


if __name__ == "__main__":
    start = time.perf_counter()
    where = Path(sys.argv[2])
    said = build(where) if sys.argv[1] == "build" else call(where)
    print(json.dumps({"seconds": time.perf_counter() - start, "said": said}))
