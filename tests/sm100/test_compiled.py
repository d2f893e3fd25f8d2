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
OPTIONS = [{}, {"per_token": True}, {"dynamic": True}, {"row_sum": "weights"}]
MASKS = {"full": Masks(False, False), "causal": Masks(False, True), "window": Masks(True, True)}


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
@pytest.mark.parametrize("masks", MASKS)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_compiles_without_spills(arch, head_dim, masks, options, tmp_path, monkeypatch):
    said, sass = machine_code(Forward(head_dim, 2, MASKS[masks], arch=arch, **options), tmp_path, monkeypatch)
    ((stores, loads),) = re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", said)
    # The exception holds numbers that are needed once per item, outside of the loops over tiles.
    allowed = 32 if (arch, head_dim, masks, options) == ("sm_100a", 128, "causal", {"dynamic": True}) else 0
    assert max(int(stores), int(loads)) <= allowed
    # Either tile of queries: two halves of scores, of head_dim / 32 steps each, and four steps of values.
    products = re.findall(r"\bUTC(\w*MMA)\b", sass)
    assert products == ["QMMA"] * (2 * (2 * head_dim // 32 + 4))
    assert len(re.findall(r"\bUTCCP\b", sass)) == 4
    assert ("LDTM.STAT" in sass) == (arch == "sm_103a" and options != {"per_token": True})
