"""From compiled functions, exported objects and libraries to runs."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import torch

import softgpu
from softgpu.cutedsl import compiling

cutlass = pytest.importorskip("cutlass")
cute = pytest.importorskip("cutlass.cute")

pytestmark = pytest.mark.slow


@cute.kernel
def add_kernel(a: cute.Tensor, b: cute.Tensor, c: cute.Tensor, n: cutlass.Int32):
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    i = block * 64 + thread
    if i < n:
        c[i] = a[i] + b[i]


@cute.jit
def add(a: cute.Tensor, b: cute.Tensor, c: cute.Tensor, n: cutlass.Int32, stream):
    add_kernel(a, b, c, n).launch(grid=[cute.ceil_div(n, 64), 1, 1], block=[64, 1, 1], stream=stream)


def fake():
    length = cute.sym_int()
    tensors = [cute.runtime.make_fake_compact_tensor(cutlass.Float32, (length,), assumed_align=16) for _ in range(3)]
    return (*tensors, cutlass.Int32(0), cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True))


def check(function, n=100):
    a, b, c = torch.randn(n), torch.randn(n), torch.zeros(n)
    function(a, b, c, n)
    assert torch.equal(c, a + b)


def test_compiled_in_the_context():
    device = softgpu.Device()
    with compiling(device, "sm_90a"):
        function = cute.compile(add, *fake())
    check(function)
    assert device.reports[-1].grid == (2, 1, 1)
    assert device.reports[-1].opcodes["add.f32"] == 4
    with pytest.raises(softgpu.OutOfBounds, match="argument"):
        function(torch.zeros(100), torch.zeros(100), torch.zeros(100), 10000)


def test_run_takes_objects_and_compiled_functions(exported, tmp_path):
    compiled = cute.compile(
        add, *fake(), options=f"--enable-tvm-ffi --gpu-arch sm_100a --keep-ptx --dump-dir={tmp_path}"
    )
    check(lambda *args: softgpu.run(compiled, *args))
    check(lambda *args: softgpu.run(exported, *args))
    with pytest.raises(TypeError, match="kernel must be"):
        softgpu.run(3)


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """An exported object, its PTX beside it."""
    folder = tmp_path_factory.mktemp("exported")
    compiled = cute.compile(add, *fake(), options=f"--enable-tvm-ffi --gpu-arch sm_90a --keep-ptx --dump-dir={folder}")
    target = folder / "add.o"
    compiled.export_to_c(object_file_path=str(target), function_name="func", export_only_tvm_ffi_symbols=True)
    text = compiled.artifacts.PTX
    target.with_suffix(".ptx").write_text((text if "\n" in text else Path(text).read_text()).rstrip("\0"))
    return target


#: what the DSL's static layer over the CUDA runtime lacks of what objects call, for a library that has no errors
SHIM = "void CuteDSLRT_TVMFFISetRaisedCudaError(void *raise, int code) {}"
DSL = Path(cutlass.__file__).parents[2] / "cu13" / "lib"


def cuda_runtime(name: str) -> Path:
    found = [p for folder in getattr(pytest.importorskip("nvidia"), "__path__", ()) for p in Path(folder).rglob(name)]
    if not found:
        pytest.skip("needs nvidia-cuda-runtime")
    return found[0]


def link(target: Path, *arguments) -> Path:
    subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-w", "-o", target, *arguments], check=True)
    return target


@pytest.mark.parametrize("runtime", ["libcute_dsl_runtime.so", "libcudart.so.13"])
def test_run_takes_libraries_with_a_shared_runtime(exported, tmp_path, runtime):
    if runtime.startswith("libcudart"):
        (tmp_path / "shim.c").write_text(SHIM)
        needed = [tmp_path / "shim.c", DSL / "libcuda_dialect_runtime_static.a", cuda_runtime(runtime)]
    else:
        needed = [DSL / runtime]
    library = link(tmp_path / "add.so", exported, *needed, "-Wl,--gc-sections", "-s")
    ptx = exported.with_suffix(".ptx").read_text()
    device = softgpu.Device()
    check(lambda *args: softgpu.run(library, *args, ptx=ptx, device=device))
    assert device.reports[-1].grid == (2, 1, 1)
    function = device.load(library, ptx)
    library.unlink()
    check(function.with_ptx(ptx))
    wrong = function.with_ptx(ptx.replace("add.rn.f32", "sub.rn.f32").replace("add.f32", "sub.f32"))
    a, b, c = torch.randn(100), torch.randn(100), torch.zeros(100)
    wrong(a, b, c, 100)
    assert torch.equal(c, a - b)


def test_libraries_that_cannot_be_run_say_why(exported, tmp_path):
    ptx = exported.with_suffix(".ptx").read_text()
    (tmp_path / "shim.c").write_text(SHIM)
    inside = [DSL / "libcuda_dialect_runtime_static.a", cuda_runtime("libcudart_static.a")]
    library = link(tmp_path / "static.so", tmp_path / "shim.c", exported, *inside, "-lpthread", "-ldl", "-lrt")
    with pytest.raises(softgpu.SoftGPUError, match="has NVIDIA's CUDA runtime inside"):
        softgpu.run(library, ptx=ptx)
    with pytest.raises(softgpu.SoftGPUError, match="needs no shared CUDA runtime"):
        softgpu.run(link(tmp_path / "alone.so", tmp_path / "shim.c"), ptx=ptx)
    with pytest.raises(softgpu.SoftGPUError, match="must be a 64-bit ELF object or shared library"):
        softgpu.run(tmp_path / "shim.c", ptx=ptx)
    (tmp_path / "more.c").write_text(
        "int cudaMalloc(void *, long); int __tvm_ffi_func() { cudaMalloc(0, 8); return 0; }"
    )
    more = link(tmp_path / "more.so", tmp_path / "more.c", cuda_runtime("libcudart.so.13"))
    with pytest.raises(softgpu.SoftGPUError, match="asks for cudaMalloc, which softgpu does not offer"):
        softgpu.run(more, ptx=ptx)


def test_unreadable_targets_are_refused():
    with pytest.raises(ValueError, match="arch must look like"), compiling(softgpu.Device(), "hopper"):
        pass


def test_launch_checks_its_arguments():
    device = softgpu.Device()
    text = ".version 9.0\n.target sm_90a\n.address_size 64\n.visible .entry k(.param .u64 p)\n.reqntid 32\n{ ret; }\n"
    with pytest.raises(ValueError, match="params has 4 bytes, the kernel takes 8"):
        device.launch(text, (1, 1, 1), (32, 1, 1), bytes(4))
    with pytest.raises(ValueError, match="'other' is not in the module"):
        device.launch(text, (1, 1, 1), (32, 1, 1), bytes(8), kernel="other")
    with pytest.raises(softgpu.SoftGPUError, match=r"\.reqntid"):
        device.launch(text, (1, 1, 1), (64, 1, 1), bytes(8))
    with pytest.raises(softgpu.SoftGPUError, match="multiple of cluster"):
        device.launch(text, (3, 1, 1), (32, 1, 1), bytes(8), cluster=(2, 1, 1))
    with pytest.raises(softgpu.SoftGPUError, match="shared memory requested"):
        device.launch(text, (1, 1, 1), (32, 1, 1), bytes(8), dynamic_shared=1 << 20)
    with pytest.raises(TypeError, match="buffer must be"):
        device.register([1, 2, 3])
