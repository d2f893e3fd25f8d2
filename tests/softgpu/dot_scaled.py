"""Triton's block-scaled products (``tl.dot_scaled``) compiled for sm_100a without a GPU, on a software device."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys

import numpy as np
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget

from softgpu import Device
from softgpu.formats import DECODE


@triton.jit
def product(
    a, sa, b, sb, c, M, N, K,
    A_TYPE: tl.constexpr, B_TYPE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    BLOCK: tl.constexpr, PACK: tl.constexpr,
):  # fmt: skip
    rm = tl.program_id(0) * BM + tl.arange(0, BM)
    rn = tl.program_id(1) * BN + tl.arange(0, BN)
    acc = tl.zeros((BM, BN), tl.float32)
    for k in range(0, tl.cdiv(K, BK)):
        rk = k * (BK // PACK) + tl.arange(0, BK // PACK)
        rs = k * (BK // BLOCK) + tl.arange(0, BK // BLOCK)
        x = tl.load(a + rm[:, None] * (K // PACK) + rk[None, :])
        y = tl.load(b + rn[None, :] * (K // PACK) + rk[:, None])
        sx = tl.load(sa + rm[:, None] * (K // BLOCK) + rs[None, :])
        sy = tl.load(sb + rn[:, None] * (K // BLOCK) + rs[None, :])
        acc = tl.dot_scaled(x, sx, A_TYPE, y, sy, B_TYPE, acc)
    tl.store(c + rm[:, None] * N + rn[None, :], acc)


#: recipe → (Triton element type, elements per byte, scale block, scale format, pointer types)
RECIPES = {
    "mxfp8": ("e4m3", 1, 32, "ue8m0", ("*fp8e4nv", "*u8")),
    "mxfp4": ("e2m1", 2, 32, "ue8m0", ("*u8", "*u8")),
    "nvfp4": ("e2m1", 2, 16, "ue4m3", ("*u8", "*fp8e4nv")),
}


@functools.cache
def compile_product(recipe: str, bm: int, bn: int, bk: int, warps: int = 4):
    """(PTX text, shared bytes, kernel name), from a process of its own: this one may have Triton's interpreter on."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    command = [sys.executable, __file__, recipe, *(str(n) for n in (bm, bn, bk, warps))]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        raise RuntimeError(done.stderr[-3000:])
    return tuple(json.loads(done.stdout.splitlines()[-1]))


def _compile(recipe: str, bm: int, bn: int, bk: int, warps: int):
    element, pack, block, _, (data, scale) = RECIPES[recipe]
    constants = dict(A_TYPE=element, B_TYPE=element, BM=bm, BN=bn, BK=bk, BLOCK=block, PACK=pack)
    signature = dict(
        a=data,
        sa=scale,
        b=data,
        sb=scale,
        c="*fp32",
        M="i32",
        N="i32",
        K="i32",
        **dict.fromkeys(constants, "constexpr"),
    )
    attrs = {(n,): [["tt.divisibility", 16]] for n in range(8)}
    source = triton.compiler.ASTSource(fn=product, signature=signature, constexprs=constants, attrs=attrs)
    compiled = triton.compile(source, target=GPUTarget("cuda", 100, 32), options=dict(num_warps=warps, num_stages=3))
    return compiled.asm["ptx"], compiled.metadata.shared, compiled.metadata.name


def operands(recipe: str, rows: int, depth: int, rng):
    """(codes, scales, decoded float64 values) of a random operand [rows, depth]."""
    element, pack, block, scale_format, _ = RECIPES[recipe]
    if pack == 1:
        codes = rng.integers(0, 256, (rows, depth)).astype(np.uint8)
        codes[(codes & 0x7F) == 0x7F] = 0x38
        values = DECODE[element][codes]
    else:
        nibbles = rng.integers(0, 16, (rows, depth)).astype(np.uint8)
        codes = nibbles[:, 0::2] | nibbles[:, 1::2] << 4
        values = DECODE[element][nibbles]
    low, high = (120, 134) if scale_format == "ue8m0" else (0x20, 0x60)
    scales = rng.integers(low, high, (rows, depth // block)).astype(np.uint8)
    return codes, scales, values.astype(np.float64) * np.repeat(DECODE[scale_format][scales], block, 1)


def run(device: Device, recipe: str, m: int, n: int, k: int, bm: int, bn: int, bk: int, edit=None, seed: int = 0):
    """Largest error of the product over its root mean square, and the result."""
    rng = np.random.default_rng(seed)
    a, sa, av = operands(recipe, m, k, rng)
    b, sb, bv = operands(recipe, n, k, rng)
    c = np.zeros((m, n), np.float32)
    ptx, shared, name = compile_product(recipe, bm, bn, bk)
    if edit:
        ptx = edit(ptx)
    program = device.program(ptx, name)
    arrays = [a, sa, b, sb, c]
    values = [x.ctypes.data for x in arrays] + [m, n, k] + [0] * 8
    params = bytearray(program.kernel.param_bytes)
    for p, v in zip(program.kernel.params.values(), values, strict=False):
        params[p.offset : p.offset + p.size] = int(v).to_bytes(p.size, "little")
    threads = program.kernel.reqntid or (128, 1, 1)
    device.launch(
        ptx, (m // bm, n // bn, 1), threads, bytes(params), kernel=name, buffers=arrays, dynamic_shared=shared
    )
    want = av @ bv.T
    return float(np.abs(c - want).max() / np.sqrt((want**2).mean())), c


if __name__ == "__main__":
    print(json.dumps(_compile(sys.argv[1], *(int(n) for n in sys.argv[2:]))))
