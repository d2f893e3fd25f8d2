"""A kernel of one line, built as the attention kernels are, to test what is done around kernels."""

import cutlass
from cutlass import cute


@cute.kernel
def scale_kernel(x: cute.Tensor, y: cute.Tensor, n: cutlass.Int32, factor: cutlass.Constexpr):
    i = cute.arch.block_idx()[0] * 64 + cute.arch.thread_idx()[0]
    if i < n:
        y[i] = x[i] * cutlass.Float32(factor)


@cute.jit
def scale(x: cute.Tensor, y: cute.Tensor, n: cutlass.Int32, factor: cutlass.Constexpr, stream):
    scale_kernel(x, y, n, factor).launch(grid=[cute.ceil_div(n, 64), 1, 1], block=[64, 1, 1], stream=stream)


def build(arch, *, factor):
    length = cute.sym_int()
    x, y = (cute.runtime.make_fake_compact_tensor(cutlass.Float32, (length,), assumed_align=16) for _ in range(2))
    stream = cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True)
    options = f"--enable-tvm-ffi --gpu-arch {arch}"
    return cute.compile(scale, x, y, cutlass.Int32(0), factor, stream, options=options)
