"""Measure the table of docs/softgpu.md: ``PYTHONPATH=src:tests/softgpu python docs/softgpu/results.py``.

Needs flash-attn-4, nvidia-cutlass-dsl, apache-tvm-ffi, triton and a C compiler.
"""

from __future__ import annotations

import warnings

import dot_scaled
import fa4
import flash_attn.cute.utils as flags
import torch
from test_dot_scaled import SHAPES
from test_flash_attention import CASES, MORE

from softgpu import Device


def attention(arch: str, name: str, case: dict) -> None:
    recorded = fa4.Recorded(arch, **case)
    again = fa4.Recorded.again(recorded)
    assert set(again.values()) == {0.0}
    seconds = [r.seconds for r in recorded.reports]
    errors = ", ".join(f"{n} {e:.1e}" for n, e in recorded.errors.items())
    kind = "forward + backward" if case.get("backward") else "forward"
    lengths = "+".join(map(str, case["lengths_q"]))
    size = f"{lengths} tokens, {case['heads']}/{case['heads_kv']} heads"
    print(f"| FlashAttention-4 {kind}, {name} | {arch} | {size} | {errors} | {sum(seconds):.1f} |", flush=True)


def main() -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    print("| kernels | target | size | error | seconds |\n|---|---|---|---|---|")
    for arch in ("sm_90a", "sm_100a"):
        for name, case in CASES.items():
            attention(arch, name, case)
    for name, (arch, flag, case) in MORE.items():
        if flag:
            setattr(flags, flag, True)
        attention(arch, name, case)
        if flag:
            setattr(flags, flag, False)
    for recipe in dot_scaled.RECIPES:
        for shape in SHAPES:
            device = Device()
            difference, _ = dot_scaled.run(device, recipe, *shape)
            m, n, k, bm, bn, bk = shape
            size = f"{m}×{n}×{k}, tiles {bm}×{bn}×{bk}"
            seconds = device.reports[0].seconds
            print(
                f"| Triton `dot_scaled`, {recipe} | sm_100a | {size} | {difference:.1e} | {seconds:.1f} |", flush=True
            )


if __name__ == "__main__":
    main()
