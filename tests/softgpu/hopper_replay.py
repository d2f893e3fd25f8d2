"""The same compiled Hopper kernels on a GPU and on softgpu.

``python hopper_replay.py record FOLDER`` (no GPU; needs flash-attn-4) runs FlashAttention-4 on softgpu and writes
objects, inputs and results. ``python hopper_replay.py play FOLDER LIBRARY...`` on an H100 or H200 (torch and
apache-tvm-ffi only) links the objects with the given sources and static libraries (a shim for two symbols,
``libcuda_dialect_runtime_static.a`` of the DSL, ``libcudart_static.a``), runs them on the same inputs, and prints the
differences.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import torch

CASES = {
    "causal, GQA": dict(lengths_q=[256], heads=2, heads_kv=1, causal=True, backward=True),
    "full, ragged, MHA": dict(lengths_q=[70, 1, 129, 200], heads=2, heads_kv=2, varlen=True, backward=True),
}


def record(folder: Path) -> None:
    sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[2] / "src")]
    import fa4

    from softgpu import driver

    objects: dict[int, str] = {}
    load = driver.Device.load

    def keep(self, object_file, ptx, function="func"):
        loaded = load(self, object_file, ptx, function)
        objects[id(loaded)] = f"kernel{len(objects)}.o"
        shutil.copy(object_file, folder / objects[id(loaded)])
        return loaded

    driver.Device.load = keep
    out = []
    for name, case in CASES.items():
        storages: dict[int, tuple] = {}
        calls = []

        def reference(a, storages=storages):
            if hasattr(a, "untyped_storage"):
                t = a.detach().as_subclass(torch.Tensor)
                raw = torch.empty(0, dtype=torch.uint8).set_(t.untyped_storage())
                number = storages.setdefault(t.untyped_storage().data_ptr(), (len(storages), raw.clone(), raw))[0]
                return ("tensor", number, str(t.dtype).split(".")[1], tuple(t.shape), t.stride(), t.storage_offset())
            return ("tuple", [reference(x) for x in a]) if isinstance(a, (tuple, list)) else ("value", a)

        original = driver.SoftFunction.__call__

        def call(self, *args, calls=calls, reference=reference, original=original):
            calls.append((objects[id(self)], [reference(a) for a in args]))
            return original(self, *args)

        driver.SoftFunction.__call__ = call
        try:
            errors, results = fa4.run_case(driver.Device(), "sm_90a", **case)
        finally:
            driver.SoftFunction.__call__ = original
        named = {n: reference(t) for n, t in results.items()}
        order = sorted(storages.values(), key=lambda x: x[0])
        out.append((name, errors, [x[1] for x in order], [x[2] for x in order], calls, named))
    torch.save(out, folder / "cases.pt")


def compare(x: torch.Tensor, y: torch.Tensor) -> tuple[float, float]:
    """Largest difference and share of equal elements; equal infinities are equal, a NaN anywhere is infinitely far."""
    equal = x == y
    difference = torch.where(equal, 0.0, (x.double() - y.double()).abs()).nan_to_num(nan=torch.inf, posinf=torch.inf)
    return float(difference.max()), float(equal.double().mean())


def play(folder: Path, libraries: list[str]) -> None:
    import tvm_ffi

    known = {}

    def function(name: str):
        if name not in known:
            target = folder / name.replace(".o", ".so")
            flags = ["-shared", "-fPIC", "-O1", "-Wl,--gc-sections", "-Wl,--exclude-libs,ALL", "-Wl,-Bsymbolic"]
            inputs = [x for x in libraries if x.endswith(".c")] + [str(folder / name)]
            archives = [x for x in libraries if not x.endswith(".c")]
            subprocess.run(
                ["cc", *flags, "-o", str(target), *inputs, *archives, "-lpthread", "-ldl", "-lrt"], check=True
            )
            known[name] = tvm_ffi.load_module(str(target))["func"]
        return known[name]

    def value(a, pool):
        if a[0] == "tensor":
            _, number, dtype, shape, stride, offset = a
            empty = torch.empty(0, dtype=getattr(torch, dtype), device=pool[number].device)
            return empty.set_(pool[number].untyped_storage(), offset, shape, stride)
        return tuple(value(x, pool) for x in a[1]) if a[0] == "tuple" else a[1]

    for name, _, before, after, calls, named in torch.load(folder / "cases.pt", weights_only=False):
        pool = [t.cuda() for t in before]
        for kernel, args in calls:
            function(kernel)(*[value(a, pool) for a in args])
        torch.cuda.synchronize()
        for n, a in named.items():
            gpu, soft = value(a, pool).cpu(), value(a, after)
            largest, equal = compare(gpu, soft)
            print(f"{name:20} {n:4} largest difference {largest:.3g}, equal {equal:.2%}")


if __name__ == "__main__":
    action, where, *rest = sys.argv[1:]
    if action == "record":
        Path(where).mkdir(parents=True, exist_ok=True)
        record(Path(where))
    else:
        play(Path(where), rest)
