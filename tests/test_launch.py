"""Launches of Triton kernels by name: which ones calls need, and how a folder serves them without Triton.

What the kernels compute is tested elsewhere; here they are a few lines of PTX on a software device.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json

import pytest
import torch

import softgpu
from flamia import backends, compiler, driver, launch
from flamia.backends import call_launches
from flamia.compiler import KernelError
from flamia.documents import Documents
from flamia.driver import DriverError
from flamia.launch import Launch
from flamia.plan import Plan
from flamia.recipe import Recipe, get_recipe
from softgpu.cuda import SoftDriver

ARCH, KERNEL = "sm_90a", "flamia.quantize.triton_tail:_clear_kernel"

# out[0] = value + stride + ADDED, for one thread; the stride is as wide as the variant says.
PTX = """
.version 8.8
.target sm_90a
.address_size 64
.visible .entry add(.param .u64 p0, .param .f32 p1, .param .{stride} p2, .param .u64 p3)
{{
    .reg .b64 %rd<3>;
    .reg .f32 %f<5>;
    .reg .{bits} %s;
    ld.param.u64 %rd1, [p0];
    ld.param.f32 %f1, [p1];
    ld.param.{stride} %s, [p2];
    cvt.rn.f32.{stride} %f2, %s;
    add.f32 %f3, %f1, %f2;
    add.f32 %f4, %f3, 0f{added};
    st.global.f32 [%rd1], %f4;
    ret;
}}
"""


def image(aligned: bool) -> bytes:
    narrow = dict(stride="s32", bits="b32", added="42C80000")  # 100
    text = PTX.format(**(narrow if aligned else dict(stride="s64", bits="b64", added="43480000")))  # 200
    where = dict(aligned=[0, 2], strides=[2]) if aligned else dict(aligned=[], strides=[])
    header = dict(function="add", threads=1, shared=64 << 10, format=f"Pf{'i' if aligned else 'q'}0P8x", **where)
    return json.dumps(header).encode() + b"\n" + text.encode()


ALIGNED = Launch(KERNEL, ARCH, ("*fp32", "float", "int"), (("TOKENS", 3),), 1, True)


@pytest.fixture
def soft(monkeypatch):
    """Launches go to a software device."""
    device = softgpu.Device()
    library = SoftDriver(device)
    monkeypatch.setattr(driver, "_library", lambda: library)
    monkeypatch.setattr(driver, "current", lambda: (0, 0))
    monkeypatch.setattr(driver, "target", lambda index: ARCH)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(launch, "_found", {})
    monkeypatch.setattr(launch, "_called", {})
    monkeypatch.setattr(compiler, "_statistics", compiler.Statistics())
    return device


@pytest.fixture
def folder(monkeypatch, tmp_path):
    """A folder that has both variants of one launch."""
    monkeypatch.setattr(Launch, "write", lambda self, path: path.write_bytes(image(self.aligned)))
    for made in (ALIGNED, dataclasses.replace(ALIGNED, aligned=False)):
        compiler.compile_to(made, tmp_path)
        compiler.write_index(tmp_path, [compiler.index_entry(made)])
    monkeypatch.setenv("FLAMIA_KERNELS", str(tmp_path))
    return tmp_path


def add(soft, out, value=1.0, stride=32, **options):
    soft.buffers.clear()
    soft.register(out)
    launch.launch(KERNEL, (1,), (out, value, stride), **{"warps": 1, "TOKENS": 3} | options)


# ------------------------------------------------------------------------------------------------------- folders


@pytest.mark.parametrize(
    ("start", "stride", "added"),
    [(0, 32, 100), (4, 32, 100), (1, 32, 200), (0, 33, 200), (0, 1, 200), (0, 1 << 31, 200), (3, 1 << 40, 200)],
)
def test_the_variant_fits_the_arguments(soft, folder, start, stride, added):
    memory = torch.zeros(8)
    assert memory.data_ptr() % 16 == 0
    add(soft, memory[start:], 1.5, stride)
    assert memory[start] == torch.tensor(1.5) + torch.tensor(float(stride)) + added
    assert memory.count_nonzero() == 1


def test_what_is_loaded_is_counted_once(soft, folder):
    memory = torch.zeros(8)
    for _ in range(3):
        add(soft, memory)
    assert dataclasses.asdict(compiler.statistics()) == dict(compiled=2, cached=0, ready=1, jit=0)
    add(soft, memory[1:])
    add(soft, memory[3:])
    assert compiler.statistics().ready == 2


def test_loading_ahead(soft, folder):
    plain = dataclasses.replace(ALIGNED, aligned=False)
    launch.preload([ALIGNED, plain])
    assert compiler.statistics().ready == 2
    add(soft, torch.zeros(8))
    add(soft, torch.zeros(8)[1:])
    assert compiler.statistics().ready == 2


def test_numbers_that_do_not_fit_are_named(soft, folder):
    with pytest.raises(ValueError, match=r"triton_tail._clear_kernel.* cannot take its numbers .*9223372036854775808"):
        add(soft, torch.zeros(8), stride=1 << 63)


@pytest.mark.parametrize("change", ["sources", "file", "image", "function", "shared"])
def test_a_folder_that_does_not_fit_is_refused(soft, folder, change):
    path = compiler.ready_file(ALIGNED, folder)
    index = json.loads((folder / compiler.INDEX).read_text())
    header, _, ptx = path.read_bytes().partition(b"\n")
    description = json.loads(header)
    if change in ("sources", "file"):
        for entry in index["kernels"]:
            entry[change] = "0" * 16
        (folder / compiler.INDEX).write_text(json.dumps(index))
        compiler._parse_index.cache_clear()
    elif change == "image":
        path.write_bytes(header + b"\nnothing")
    elif change == "function":
        path.write_bytes(json.dumps(description | {"function": "other"}).encode() + b"\n" + ptx)
    else:
        path.write_bytes(json.dumps(description | {"format": "Pfi"}).encode() + b"\n" + ptx)
    error, said = {
        "sources": (KernelError, r"stale: its quantize.triton_tail._clear_kernel.*`flamia compile --arch sm_90a"),
        "file": (KernelError, r"incomplete: 0{16}, which its index.json names"),
        "image": (DriverError, r"cuLibraryLoadData of add failed: not PTX \(CUDA error 200\)"),
        "function": (DriverError, r"cuLibraryGetKernel of other failed: named symbol not found \(CUDA error 500\)"),
        "shared": (DriverError, r"cuLaunchKernel of add failed: invalid argument \(CUDA error 1\)"),
    }[change]
    with pytest.raises(error, match=said):
        add(soft, torch.zeros(8))


def test_a_launch_that_the_folder_lacks_is_left_to_triton_and_said(soft, folder, monkeypatch):
    ran = []

    class Kernel:
        def __getitem__(self, grid):
            return lambda *arguments, **options: ran.append((grid, arguments, options))

    monkeypatch.setattr(launch, "_jit", lambda kernel: Kernel())
    memory = torch.zeros(8)
    with pytest.warns(RuntimeWarning, match=r"FLAMIA_KERNELS=.* has no quantize.triton_tail._clear_kernel.*TOKENS=5"):
        add(soft, memory, TOKENS=5, exact=False)
    add(soft, memory, TOKENS=5, exact=False)  # said once
    assert ran == [((1,), (memory, 1.0, 32), dict(TOKENS=5, num_warps=1, enable_fp_fusion=True))] * 2
    assert not memory.any()


def test_without_triton_it_is_an_error(soft, folder, monkeypatch):
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "triton" else real(name))
    with pytest.raises(
        KernelError, match=r"has no quantize.*TOKENS=5.*, and triton is not installed: .*flamia compile"
    ):
        add(soft, torch.zeros(8), TOKENS=5)
    monkeypatch.delenv("FLAMIA_KERNELS")
    launch._jit.cache_clear()
    with pytest.raises(KernelError, match=r"row preparation needs triton: pip install .*FLAMIA_KERNELS"):
        add(soft, torch.zeros(8))


def test_an_old_driver_is_named(monkeypatch):
    monkeypatch.setattr(driver, "_library", object)
    with pytest.raises(DriverError, match=r"the CUDA driver has no cuLibraryLoadData: .* CUDA 12"):
        driver.load(b"", "add")


# ----------------------------------------------------------------------------------------------- what calls need

PLANS = [
    ("sm90", "sm_90a", Recipe(variant="folded"), True),
    ("sm90", "sm_90a", Recipe(variant="folded"), False),
    ("sm90", "sm_90a", get_recipe("mxfp8-folded-exact"), True),
    ("sm90", "sm_90a", get_recipe("nvfp4-folded"), True),
    ("sm100", "sm_100a", get_recipe("mxfp8"), True),
    ("sm100", "sm_100a", get_recipe("mxfp8-exact"), True),
]


def plan_of(backend, recipe, training, heads=(2, 1), window=(None, 0), deterministic=False):
    return Plan(recipe, backend, (), 64, *heads, 0.1, *window, deterministic, training)


def recorded(plan, arch, len_q, len_k, documents, monkeypatch):
    """Launches of a whole call of this size, on tensors without memory, as the backend's door makes them."""
    door = backends.door(plan.backend)
    monkeypatch.setattr(door, "load", lambda kernel: lambda *arguments: None)
    monkeypatch.setattr(door, "device_sizes", lambda index: (3, 1 << 19))
    monkeypatch.setattr(torch.cuda, "device", lambda device: torch.no_grad())
    if plan.backend == "sm100":
        monkeypatch.setattr(door, "target", lambda index: arch)

    def new(*shape, dtype=torch.bfloat16):
        return torch.empty(shape, dtype=dtype, device="meta")

    q, k, v = new(len_q, plan.heads_q, 64), new(len_k, plan.heads_kv, 64), new(len_k, plan.heads_kv, 64)
    cu = new(documents + 1, dtype=torch.int32)
    packed = Documents(cu, cu, len_q, len_k)
    with launch.recording(arch) as launches:
        o, lse, result, kept = door.run_forward(plan, q, k, v, packed)
        if plan.training:
            for dlse in (None, lse):
                door.run_backward(plan, o, dlse, o, result.lse2, result.row_max, kept, packed)
    return set(launches)


@pytest.mark.parametrize(("backend", "arch", "recipe", "training"), PLANS, ids=str)
def test_calls_of_all_sizes_find_their_launches(monkeypatch, backend, arch, recipe, training):
    announced = set(call_launches(plan_of(backend, recipe, training), torch.bfloat16, arch))
    used = set()
    for heads, window, sizes in (
        ((2, 1), (None, 0), (100, 100, 1)),
        ((12, 3), (None, None), (1, 5000, 4)),
        ((1, 1), (64, 0), (70_000, 70_000, 3000)),
        ((32, 8), (None, 0), (40_000, 1 << 21, 5)),
        ((2, 2), (5, 5), (1 << 24, 1 << 24, 100_000)),
    ):
        for deterministic in (False, True):
            plan = plan_of(backend, recipe, training, heads, window, deterministic)
            used |= recorded(plan, arch, *sizes, monkeypatch)
    assert used <= announced
    alone = set(call_launches(plan_of(backend, recipe, False), torch.bfloat16, arch))
    # All that is announced is used, here or in calls without a gradient.
    assert used | alone >= announced


def test_two_variants_of_each():
    launches = call_launches(plan_of(*("sm90", Recipe(variant="folded"), True)), torch.bfloat16, ARCH)
    assert {x for x in launches if x.aligned} == {
        dataclasses.replace(x, aligned=True) for x in launches if not x.aligned
    }
    assert len({x.name for x in launches}) == len(launches)


def test_recording_does_not_depend_on_an_interpreter(monkeypatch):
    """Folders are made for calls that compile, even where launches are interpreted."""
    found = []
    for value in ("0", "1"):
        monkeypatch.setenv("TRITON_INTERPRET", value)
        found.append(call_launches(plan_of("sm100", get_recipe("mxfp8"), True), torch.bfloat16, "sm_100a"))
    assert found[0] == found[1]
