"""The Blackwell backward compiles for both targets without spills, to the products meant; its memory plans hold."""

import os
import re
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest

from flamia.sm100.memory import SLACK, BackwardSharedMemory, BackwardTensorMemory, PairSharedMemory, PairTensorMemory

PAGE = (Path(__file__).parents[2] / "docs" / "kernels.md").read_text(encoding="utf-8")
EXACT = {"exact": True, "causal_scale": True, "deterministic": True}
SECTION = PAGE[PAGE.index("## The Blackwell backward") :]


def rows(heading):
    """Cells of the first table behind ``heading``, without its header."""
    lines = SECTION[SECTION.index(heading) :].splitlines()
    start = next(n for n, line in enumerate(lines) if line.startswith("|"))
    table = []
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            break
        table.append([cell.strip() for cell in line.strip("|").split("|")])
    return table


def spans(plan, pair):
    """Columns of the table's rows: first, and how many."""
    d = plan.head_dim
    codes = [] if pair else [(plan.ds_codes, 32)]
    scales = [(0, 8), (2, 16), (6, 8)] if pair else [(0, 8), (2, 8), (4, 8)]
    parts = [(plan.scores, 128), *codes, *((plan.scales(n), size) for n, size in scales), (plan.dp, 128)]
    return [*parts, (plan.dq, d // 2 if pair else d), (plan.dv, d), (plan.dk, d)]


@pytest.mark.parametrize(
    ("kind", "heading"),
    [(BackwardTensorMemory, "**Tensor memory.**"), (PairTensorMemory, "**Tensor memory of a pair.**")],
)
def test_tensor_memory_is_as_documented(kind, heading):
    columns = [
        [f"{start} to {start + size - 1}" for start, size in spans(kind(d), "pair" in heading)] for d in (128, 64)
    ]
    assert [cells[:2] for cells in rows(heading)] == [list(pair) for pair in zip(*columns, strict=True)]


@pytest.mark.parametrize(
    ("plans", "heading"),
    [
        ([BackwardSharedMemory(d, 3, exact) for d in (128, 64) for exact in (False, True)], "**Shared memory**"),
        ([PairSharedMemory(d, 3) for d in (128, 64)], "**Shared memory of a pair**"),
    ],
    ids=["one", "pair"],
)
def test_shared_memory_is_as_documented(plans, heading):
    table = {name: [int(x) for x in cells] for name, *cells in rows(heading)}
    assert table == {name: [plan.parts()[name] for plan in plans] for name in plans[0].parts()}


def test_plans_that_do_not_fit_are_refused(monkeypatch):
    with pytest.raises(ValueError, match="head_dim 256 needs more than 512 columns"):
        BackwardTensorMemory(256)
    monkeypatch.setattr(BackwardTensorMemory, "scales", lambda self, n: self.ds_codes + 33 + 4 * n)
    assert BackwardTensorMemory(128).dk == 384
    monkeypatch.setattr(BackwardTensorMemory, "scales", lambda self, n: self.ds_codes + 31 + 4 * n)
    with pytest.raises(ValueError, match="columns 64 to 96 of the scores overlap what follows at 95"):
        BackwardTensorMemory(128)
    with pytest.raises(ValueError, match="head_dim 256 needs more than 512 columns"):
        PairTensorMemory(256)
    monkeypatch.setattr(PairTensorMemory, "scales", lambda self, n: 64 + 3 * n)
    with pytest.raises(ValueError, match="columns 64 to 68 of the scores overlap what follows at 67"):
        PairTensorMemory(128)
    plan = BackwardSharedMemory(128, 3, False)
    with pytest.raises(ValueError, match="head_dim=128, stages=3 take 1000 bytes"):
        plan.check(SimpleNamespace(size_in_bytes=lambda: 1000))
    plan.check(SimpleNamespace(size_in_bytes=lambda: sum(plan.parts().values()) + SLACK))


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_100a", "sm_103a"])
@pytest.mark.parametrize("head_dim", [128, 64])
@pytest.mark.parametrize("mask", [(False, False), (False, True), (True, True)], ids=str)
@pytest.mark.parametrize("options", [{}, EXACT, {"deterministic": True}, {"pairs": True}], ids=str)
def test_compiles_without_spills(arch, head_dim, mask, options, tmp_path, monkeypatch):
    cute = pytest.importorskip("cutlass.cute", reason="needs nvidia-cutlass-dsl")
    pytest.importorskip("tvm_ffi", reason="needs apache-tvm-ffi")
    triton = pytest.importorskip("triton", reason="brings the assembler")
    from cutlass.cutlass_dsl import CuTeDSL

    from flamia.sm100.backward import Backward, compile_backward
    from flamia.sm100.backward_pair import PairBackward
    from flamia.sm100.work import Masks

    options = dict(options)
    pairs = options.pop("pairs", False)

    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    monkeypatch.setitem(os.environ, "CUTE_DSL_DISABLE_FILE_CACHING", "1")
    monkeypatch.setattr(CuTeDSL._get_dsl().envar, "arch", arch)
    kernel = (PairBackward if pairs else Backward)(
        head_dim, 2, Masks(*mask), rotate=head_dim == 128, arch=arch, **options
    )
    compile_backward(kernel, compile=cute.compile, options=f"--keep-ptx --dump-dir={tmp_path}")
    (text,) = tmp_path.glob("*.ptx")
    text.write_bytes(text.read_bytes().rstrip(b"\0"))
    cubin = tmp_path / "kernel.cubin"
    command = [tools / "ptxas-blackwell", "-v", f"-arch={arch}", text, "-o", cubin]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    sass = subprocess.run([tools / "nvdisasm", "-c", cubin], capture_output=True, text=True, check=True).stdout
    assert "0 bytes spill stores, 0 bytes spill loads" in said
    assert not re.findall(r"\b(?:LDL|STL)\b", sass)
    # Scores in two halves and dP, head_dim / 32 steps each, unscaled; dV, dK and dQ over 128 queries or keys, scaled (a
    # pair's dQ: 256).
    products = [line for line in sass.splitlines() if re.search(r"\bUTCQMMA\b", line)]
    scaled = ["tmem[" in line.partition("idesc[")[2] for line in products]
    assert (scaled.count(False), scaled.count(True)) == (3 * head_dim // 32, 16 if pairs else 12)
    assert all((".2CTA" in line) == pairs for line in products)
    assert len(re.findall(r"\bUTCCP\b", sass)) == (8 if pairs else 6)
    assert len(re.findall(r"\bUBLKRED\S*\.ADD\.F16", sass)) == (2 if pairs else 1)
