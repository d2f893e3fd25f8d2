"""The compiler: one compilation per kernel whoever asks, libraries that load without the DSL, folders that are checked.

Most of it is tested with a kernel of one line, which goes the same way as the attention kernels; one test takes those.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from flamia import cli, compiler, precompile
from flamia.compiler import INDEX, KernelError, make_kernel
from flamia.plan import Plan
from flamia.recipe import Recipe, get_recipe
from flamia.sm90 import kernels as sm90

KERNELS = str(Path(__file__).parent / "kernels")
SMALL = make_kernel("small_kernel:build", "flamia.bounds", "sm_90a", factor=3)
OTHER = make_kernel("small_kernel:build", "flamia.bounds", "sm_90a", factor=5)


def has_tools() -> bool:
    try:
        compiler._c_compiler()
        for archive in compiler.ARCHIVES:
            compiler._archive(*archive)
    except KernelError:
        return False
    return all(importlib.util.find_spec(name) for name in ("cutlass", "tvm_ffi"))


needs_tools = pytest.mark.skipif(not has_tools(), reason="needs the extra gpu and a C compiler")


@pytest.fixture(autouse=True)
def fresh(monkeypatch, tmp_path):
    """An empty cache, no ready folder, no functions and counts of earlier tests; the small kernel can be imported."""
    monkeypatch.setenv("FLAMIA_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("FLAMIA_KERNELS", raising=False)
    monkeypatch.setattr(compiler, "_functions", {})
    monkeypatch.setattr(compiler, "_statistics", compiler.Statistics())
    monkeypatch.syspath_prepend(KERNELS)


@pytest.fixture(scope="module")
def ready(tmp_path_factory):
    """A folder with the small kernel, as `flamia compile` leaves it."""
    folder = tmp_path_factory.mktemp("ready")
    sys.path.insert(0, KERNELS)
    try:
        compiler.compile_to(SMALL, folder)
        compiler.write_index(folder, [compiler.index_entry(SMALL)])
    finally:
        sys.path.remove(KERNELS)
    return folder


def counts() -> tuple[int, int, int]:
    """Kernels compiled, from the cache and from a folder; none is left to Triton's JIT."""
    *found, jit = dataclasses.astuple(compiler.statistics())
    assert jit == 0
    return tuple(found)


def start(code: str, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {KERNELS!r})\n{code}"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **environment},
    )


def output(process: subprocess.Popen[str]) -> str:
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    return out.strip()


LOAD_SMALL = """
from flamia import compiler
kernel = compiler.make_kernel("small_kernel:build", "flamia.bounds", "sm_90a", factor=3)
function = compiler.load(kernel)
"""


# ---------------------------------------------------------------------------------------------- what names a kernel


def forwards(recipe="mxfp8", head_dim=128, heads=(8, 2), left=None, right=0, dtype=torch.bfloat16, scale=0.1):
    recipe = get_recipe(recipe).with_variant("folded")
    return sm90.forward_kernels(Plan(recipe, "sm90", (), head_dim, *heads, scale, left, right, False, False), dtype)


def test_only_what_changes_code_names_a_kernel():
    base = forwards()
    # The key sees nothing of lengths or documents at all; of the rest, these are arguments.
    assert forwards(heads=(32, 8)) == base
    assert forwards(scale=1.0) == base
    assert forwards(left=100, right=0) == forwards(left=7, right=30)
    others = (
        forwards(heads=(8, 4)),
        forwards(head_dim=64),
        forwards(right=None),
        forwards(left=100),
        forwards(dtype=torch.float16),
        forwards(Recipe(row_sum="weights")),
        forwards(Recipe(p_shift=8, tau=0.0)),
    )
    assert len({base, *others}) == 1 + len(others)


def test_order_of_options_does_not_matter():
    assert make_kernel("a:b", "flamia.c", "sm_90a", x=1, y=2) == make_kernel("a:b", "flamia.c", "sm_90a", y=2, x=1)


def test_sources_are_the_module_and_what_it_imports(monkeypatch, tmp_path):
    room = tmp_path / "flamia" / "room"
    room.mkdir(parents=True)
    files = {
        "forward.py": "from flamia.room import softmax\nimport flamia.room.work\n",
        "softmax.py": "def f():\n    from flamia.room.deep import x\n",
        "work.py": "import math\n",
        "deep.py": "x = 1\n",
        "__init__.py": "",
        "unrelated.py": "y = 1\n",
    }
    for name, text in files.items():
        (room / name).write_text(text)
    monkeypatch.setattr(compiler, "ROOT", tmp_path)

    def version():
        compiler.source_version.cache_clear()
        return compiler.source_version("flamia.room.forward")

    before = version()
    assert version() == before
    (room / "unrelated.py").write_text("y = 2\n")
    assert version() == before
    for name in ("forward.py", "softmax.py", "work.py", "deep.py"):
        (room / name).write_text(files[name] + "# changed\n")
        assert version() != before, name
        (room / name).write_text(files[name])
    assert version() == before
    compiler.source_version.cache_clear()


# ------------------------------------------------------------------------------------------------ cache and folders


@needs_tools
def test_a_kernel_is_compiled_once_and_then_comes_from_the_cache(monkeypatch):
    function = compiler.load(SMALL)
    assert counts() == (1, 0, 0)
    assert compiler.load(SMALL) is function
    assert counts() == (1, 0, 0)
    monkeypatch.setattr(compiler, "_functions", {})  # as in a later process
    monkeypatch.setattr(compiler.Kernel, "build", None)
    compiler.load(SMALL)
    assert counts() == (1, 1, 0)


@needs_tools
def test_libraries_check_their_arguments():
    with pytest.raises(Exception, match=r"(?i)device"):
        compiler.load(SMALL)(torch.zeros(4), torch.zeros(4), 4)


@needs_tools
def test_a_library_loads_where_there_is_no_dsl_and_no_compiler(ready):
    blocked = "sys.modules.update(dict.fromkeys(('cutlass', 'triton', 'cuda')))\n"
    check = """
import time, torch
before = time.perf_counter()
assert compiler.load(kernel) is function
assert not [name for name in sys.modules if name.startswith("cutlass.")]
try:
    function(torch.zeros(4), torch.zeros(4), 4)
except Exception as error:
    print(type(error).__name__, compiler.statistics())
"""
    said = output(start(blocked + LOAD_SMALL + check, FLAMIA_KERNELS=str(ready), PATH="/nonexistent"))
    assert said.endswith("Statistics(compiled=0, cached=0, ready=1, jit=0)")


@needs_tools
def test_loading_imports_no_compiler(ready):
    code = LOAD_SMALL + "print(*sorted({n.partition('.')[0] for n in sys.modules} & {'cutlass', 'triton'}))"
    assert output(start(code, FLAMIA_KERNELS=str(ready))) == ""


@needs_tools
@pytest.mark.slow
def test_processes_that_ask_at_once_compile_once(tmp_path):
    code = LOAD_SMALL + "print(compiler.statistics().compiled)"
    processes = [start(code, FLAMIA_CACHE=str(tmp_path / "shared")) for _ in range(2)]
    assert sorted(output(process) for process in processes) == ["0", "1"]
    assert len(list((tmp_path / "shared").glob("*.so"))) == 1
    assert not list((tmp_path / "shared").glob(".build-*"))


@needs_tools
def test_a_failed_build_leaves_nothing(monkeypatch):
    bad = make_kernel("small_kernel:build", "flamia.bounds", "sm_90a", factor="x")
    with pytest.raises(Exception):  # noqa: B017, PT011 the DSL's own
        compiler.load(bad)
    monkeypatch.setenv("CC", "false")
    with pytest.raises(KernelError, match=r"linking bounds\[sm_90a\]\(factor=3\) with .*false failed"):
        compiler.load(SMALL)
    assert [path.name for path in compiler.cache_folder().iterdir()] == [".locks"]
    assert counts() == (0, 0, 0)


@needs_tools
@pytest.mark.parametrize("change", ["sources", "name", "file", "format", "index", "folder"])
def test_folders_that_do_not_fit_are_refused(monkeypatch, tmp_path, ready, change):
    folder = tmp_path / "folder"
    if change != "folder":
        folder.mkdir()
        index = json.loads((ready / INDEX).read_text())
        (entry,) = index["kernels"]
        if change == "format":
            index["format"] = 99
        elif change != "index":
            entry[change] = "0" * 16
        (folder / INDEX).write_text("{" if change == "index" else json.dumps(index))
    said = {
        "sources": r"stale: its bounds\[sm_90a\]\(factor=3\) was compiled from sources 0{16}.*flamia compile",
        "name": r"has no library for bounds\[sm_90a\]\(factor=3\).*flamia compile --arch sm_90a --out",
        "file": r"incomplete: 0{16}, which its index.json names",
        "format": r"another version of flamia",
        "index": r"no readable index.json .*flamia compile",
        "folder": r"no readable index.json .*flamia compile",
    }
    monkeypatch.setenv("FLAMIA_KERNELS", str(folder))
    with pytest.raises(KernelError, match=said[change]):
        compiler.load(SMALL)
    assert counts() == (0, 0, 0)
    assert not compiler.cache_folder().exists()


def test_what_is_missing_is_named(monkeypatch):
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "cutlass" else real(name))
    with pytest.raises(KernelError, match=r"nvidia-cutlass-dsl is not installed: pip install .*FLAMIA_KERNELS"):
        compiler.load(SMALL)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: real("json" if name == "cutlass" else name))
    monkeypatch.setenv("CC", "no-such-compiler")
    with pytest.raises(KernelError, match="there is no 'no-such-compiler'"):
        compiler.load(SMALL)
    monkeypatch.setenv("CC", sys.executable)
    monkeypatch.setattr(compiler, "ARCHIVES", (("libnothing.a", "no-such-distribution", "cu13"),))
    with pytest.raises(KernelError, match=r"libnothing.a of no-such-distribution"):
        compiler.load(SMALL)


# -------------------------------------------------------------------------------------------------- flamia compile


@needs_tools
@pytest.mark.slow
def test_folders_are_built_by_several_processes_and_added_to(tmp_path, monkeypatch, ready):
    shutil.copytree(ready, tmp_path, dirs_exist_ok=True)
    precompile.build([SMALL, OTHER], tmp_path, 2)
    names = [entry["name"] for entry in json.loads((tmp_path / INDEX).read_text())["kernels"]]
    assert names == [SMALL.name, OTHER.name]
    monkeypatch.setenv("FLAMIA_KERNELS", str(tmp_path))
    compiler.load(SMALL)
    compiler.load(OTHER)
    assert counts() == (0, 0, 2)


@needs_tools
@pytest.mark.slow
def test_attention_kernels_from_the_command_line(tmp_path, monkeypatch):
    words = f"compile --out {tmp_path} --head-dims 64 --ratios 2 --masks causal --no-backward --jobs 1"
    with pytest.raises(SystemExit) as left:
        cli.main(words.split())
    assert not left.value.code
    monkeypatch.setenv("FLAMIA_KERNELS", str(tmp_path))
    for kernel in forwards(head_dim=64, heads=(2, 1)):
        assert callable(compiler.load(kernel))
    assert counts() == (0, 0, 2)
    launches = precompile.select_launches("sm_90a", ["mxfp8"], [64], [2], "causal", "bf16", backward=False)
    for launch in launches:
        header, _, image = compiler.ready_file(launch, tmp_path).read_bytes().partition(b"\n")
        assert json.loads(header)["threads"] == 32 * launch.warps
        assert image.startswith(b"\x7fELF")
    assert counts() == (0, 0, 2 + len(launches))
    with pytest.raises(KernelError, match="ratio=4"):
        compiler.load(forwards(head_dim=64, heads=(4, 1))[0])


def select(arch="sm_90a", recipes=("mxfp8",), head_dims=(128,), ratios=(1,), masks="causal", dtypes="bf16", **options):
    return list(precompile.select(arch, list(recipes), list(head_dims), list(ratios), masks, dtypes, **options))


def test_selected_kernels_are_those_of_the_calls():
    assert set(select(head_dims=(64, 128), masks="causal,window", dtypes="bf16,fp16", backward=False)) == {
        kernel
        for d in (64, 128)
        for left in (None, 9)
        for dtype in (torch.bfloat16, torch.float16)
        for kernel in forwards(head_dim=d, heads=(1, 1), left=left, dtype=dtype)
    }
    assert select(backward=False) == list(forwards(heads=(1, 1)))
    (backward,) = set(select(backward=True)) - set(select(backward=False))
    assert backward.source == "flamia.sm90.backward"
    assert dict(backward.options)["deterministic"] is False
    (ordered,) = set(select(backward=True, deterministic=True)) - set(select(backward=False))
    assert dict(ordered.options)["deterministic"] is True
    assert select() == select(backward=True)
    # Two names of one recipe are compiled once.
    assert select(recipes=("mxfp8", "mxfp8-folded")) == select()


def test_selected_kernels_of_blackwell():
    """For either target the kernels of the calls, of which MHA may do the backward by pairs of CTAs."""
    for arch in ("sm_100a", "sm_103a"):
        chosen = select(arch=arch)
        assert {kernel.arch for kernel in chosen} == {arch}
        sources = [kernel.source.removeprefix("flamia.sm100.") for kernel in chosen]
        assert sources == ["forward", "backward", "backward_pair"]
        ordered = select(arch=arch, deterministic=True)
        assert [kernel.source for kernel in ordered] == ["flamia.sm100.forward", "flamia.sm100.backward"]
        assert dict(ordered[1].options)["deterministic"] is True
        assert select(arch=arch, backward=False) == chosen[:1]
        # One recipe by two names; a name that says folded is Hopper's.
        assert select(arch=arch, recipes=("mxfp8", "mxfp8")) == chosen
        with pytest.raises(ValueError, match=r"recipes='mxfp8-folded'.* variant='folded' has no Blackwell kernel"):
            select(arch=arch, recipes=("mxfp8-folded",))
        with pytest.raises(ValueError, match="format='nvfp4' has no Blackwell kernel"):
            select(arch=arch, recipes=("nvfp4",))


def test_the_command_takes_several_targets(monkeypatch, capsys):
    built = []
    monkeypatch.setattr(precompile, "build", lambda kernels, out, jobs: built.extend(kernels))
    monkeypatch.setattr(precompile, "select_launches", lambda arch, *shapes: [arch])
    words = ["compile", "--out", "nowhere", "--head-dims", "64", "--ratios", "2", "--masks", "causal", "--no-backward"]
    words.append("--arch")
    with pytest.raises(SystemExit) as left:
        cli.main([*words, "sm_90a, sm_100a,sm_103a"])
    assert not left.value.code
    assert [getattr(kernel, "arch", kernel) for kernel in built] == [
        *("sm_90a", "sm_90a", "sm_100a", "sm_103a"),
        *("sm_90a", "sm_100a", "sm_103a"),
    ]
    for arch, said in (("sm_100a,sm_80", "arch='sm_80' is unknown"), (",", "nothing to compile: each of --arch")):
        with pytest.raises(SystemExit) as left:
            cli.main([*words, arch])
        assert left.value.code == 2
        assert said in capsys.readouterr().err
    with pytest.raises(SystemExit):
        cli.main([*words, "sm_100a", "--peers"])
    assert "--peers makes libraries for sm_90a alone" in capsys.readouterr().err


@needs_tools
@pytest.mark.slow
def test_blackwell_kernels_from_the_command_line(tmp_path, monkeypatch):
    """A folder for both targets, which a machine without the compiler loads. Of launches, only the dearest."""
    select_launches = precompile.select_launches

    def few(*shapes):
        return [launch for launch in select_launches(*shapes) if "_gradient" in launch.kernel and launch.aligned]

    monkeypatch.setattr(precompile, "select_launches", few)
    words = f"compile --arch sm_100a,sm_103a --out {tmp_path} --head-dims 64 --ratios 1 --masks causal --jobs 1"
    with pytest.raises(SystemExit) as left:
        cli.main(words.split())
    assert not left.value.code
    monkeypatch.setenv("FLAMIA_KERNELS", str(tmp_path))
    monkeypatch.setattr(compiler.Kernel, "build", None)
    for arch in ("sm_100a", "sm_103a"):
        for kernel in select(arch=arch, head_dims=(64,)):
            assert callable(compiler.load(kernel))
        launches = few(arch, ["mxfp8"], [64], [1], "causal", "bf16")
        assert len(launches) == 2  # with a gradient of lse, and without
        assert all(compiler.ready_file(launch, tmp_path).is_file() for launch in launches)
    assert counts() == (0, 0, 10)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (dict(arch="sm_80"), "arch='sm_80' is unknown: it must be one of sm_90a, sm_100a, sm_103a"),
        (dict(masks="causal,diagonal"), "masks='diagonal' is unknown: it must be one of full, causal, window, left"),
        (dict(dtypes="fp64"), "dtypes='fp64' is unknown: it must be one of bf16, fp16"),
        (dict(head_dims=(96,)), "head_dim=96 has no Hopper kernel"),
        (dict(recipes=("fp4",)), "format='fp4' has no Hopper kernel"),
        (dict(recipes=("nothing",)), "recipe='nothing' is unknown"),
    ],
)
def test_what_cannot_be_compiled_is_refused(change, said):
    with pytest.raises(ValueError, match=said):
        select(**change)


def test_bad_numbers_are_refused(capsys):
    with pytest.raises(SystemExit) as left:
        cli.main(["compile", "--out", "nowhere", "--ratios", "1,x"])
    assert left.value.code == 2
    assert "ratios='1,x' must be positive integers" in capsys.readouterr().err
