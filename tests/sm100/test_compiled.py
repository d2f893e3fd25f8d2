"""Every Blackwell kernel compiles for both targets without spills, and its machine code holds the products meant."""

import os
import re
import subprocess
from pathlib import Path

import pytest

pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")
pytest.importorskip("tvm_ffi", reason="needs apache-tvm-ffi")
pytest.importorskip("triton", reason="brings the assembler")

import triton
from cutlass import cute
from cutlass.cutlass_dsl import CuTeDSL

from flamia.sm100.forward import Forward, compile_forward
from flamia.sm100.work import Masks

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
MASKS = {"full": Masks(False, False), "causal": Masks(False, True), "window": Masks(True, True)}
OPTIONS = [{}, {"per_token": True}, {"row_sum": "weights"}]
# Items are dealt or, in causal calls, claimed: ``kernels.claims``.
VARIANTS = [(masks, options) for masks in MASKS for options in OPTIONS]
VARIANTS += [("causal", {**options, "dynamic": True}) for options in OPTIONS]


def machine_code(kernel, folder, monkeypatch):
    """(what the assembler says, SASS) of a kernel."""
    monkeypatch.setitem(os.environ, "CUTE_DSL_DISABLE_FILE_CACHING", "1")
    monkeypatch.setattr(CuTeDSL._get_dsl().envar, "arch", kernel.arch)
    compile_forward(kernel, compile=cute.compile, options=f"--keep-ptx --dump-dir={folder}")
    (text,) = folder.glob("*.ptx")
    text.write_bytes(text.read_bytes().rstrip(b"\0"))
    cubin = folder / "kernel.cubin"
    command = [TOOLS / "ptxas-blackwell", "-v", f"-arch={kernel.arch}", text, "-o", cubin]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    sass = subprocess.run([TOOLS / "nvdisasm", "-c", cubin], capture_output=True, text=True, check=True).stdout
    return said, sass


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_100a", "sm_103a"])
@pytest.mark.parametrize("head_dim", [128, 64])
@pytest.mark.parametrize(("masks", "options"), VARIANTS, ids=str)
def test_compiles_without_spills(arch, head_dim, masks, options, tmp_path, monkeypatch):
    said, sass = machine_code(Forward(head_dim, 2, MASKS[masks], arch=arch, **options), tmp_path, monkeypatch)
    assert "0 bytes spill stores, 0 bytes spill loads" in said
    assert not re.findall(r"\b(?:LDL|STL)\b", sass)
    # Either tile of queries: two halves of scores, of head_dim / 32 steps each, and four steps of values.
    assert set(re.findall(r"\bUTC(\w*MMA)\b", sass)) == {"QMMA"}
    products = [line for line in sass.splitlines() if re.search(r"\bUTCQMMA\b", line)]
    scaled = ["tmem[" in line.partition("idesc[")[2] for line in products]
    assert (scaled.count(False), scaled.count(True)) == (2 * (2 * head_dim // 32), 2 * 4)
    assert len(re.findall(r"\bUTCCP\b", sass)) == 4
    assert ("LDTM.STAT" in sass) == (arch == "sm_103a" and "per_token" not in options)
