"""The machine code of the Hopper forward: registers hold everything, and the products are those meant."""

import re
import subprocess
from pathlib import Path

import pytest

pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")
pytest.importorskip("tvm_ffi", reason="needs apache-tvm-ffi")
pytest.importorskip("triton", reason="brings nvdisasm and cuobjdump")

import triton
from cutlass import cute
from cutlass.cutlass_dsl import CuTeDSL

from flamia.sm90.forward import Forward, compile_forward
from flamia.sm90.work import Masks

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
MASKS = {"full": Masks(False, False), "causal": Masks(False, True), "window": Masks(True, True)}
OPTIONS = [
    dict(),
    dict(exponential="schraudolph"),
    dict(format="nvfp4"),
    dict(exact=True),
    dict(exact=True, row_sum="weights"),
    dict(exact=True, exponential="schraudolph"),
    dict(exact=True, format="nvfp4"),
]
FEW = [(128, "causal", options) for options in (OPTIONS[0], OPTIONS[-1])]
ALL = [(head_dim, masks, options) for head_dim in (64, 128) for masks in MASKS for options in OPTIONS]


def machine_code(kernel, folder, monkeypatch):
    """(bytes of stack per thread, SASS) of a kernel, as the compiler delivers it."""
    monkeypatch.setenv("CUTE_DSL_DISABLE_FILE_CACHING", "1")
    monkeypatch.setattr(CuTeDSL._get_dsl().envar, "arch", "sm_90a")
    compiled = compile_forward(kernel, compile=cute.compile, options=f"--keep-cubin --dump-dir={folder}")
    cubin = folder / "kernel.cubin"
    cubin.write_bytes(compiled.artifacts.CUBIN)
    usage, sass = (
        subprocess.run([TOOLS / tool, option, cubin], capture_output=True, text=True, check=True).stdout
        for tool, option in (("cuobjdump", "--dump-resource-usage"), ("nvdisasm", "-c"))
    )
    (stack,) = re.findall(r"\bSTACK:(\d+)", usage)
    return int(stack), sass


@pytest.mark.parametrize(
    ("head_dim", "masks", "options"),
    [*FEW, *(pytest.param(*one, marks=pytest.mark.slow) for one in ALL if one not in FEW)],
    ids=str,
)
def test_nothing_is_spilled(head_dim, masks, options, tmp_path, monkeypatch):
    stack, sass = machine_code(Forward(head_dim, 2, MASKS[masks], **options), tmp_path, monkeypatch)
    assert stack == 0
    assert not re.search(r"\b(STL|LDL)\b", sass)
    # Scores of an item's first tile and of two or three loops over tiles (masks; all kinds of them), values of each
    # loop and of the last tile.
    scores, values = (re.findall(rf"\b([HQ]GMMA)\.64x{n}x", sass) for n in (128, head_dim + 8))
    loops = 3 if masks == "window" else 2
    wide = options.get("format") == "nvfp4"
    assert scores == ["HGMMA" if wide else "QGMMA"] * ((1 + loops) * head_dim // (16 if wide else 32))
    assert values == ["QGMMA"] * ((1 + loops) * 4)
    assert "HMMA" not in re.sub("HGMMA", "", sass)
    # A wait for the tensor core behind every product would be one more for each.
    assert len(re.findall(r"WARPGROUP\.DEPBAR", sass)) == 2 * (1 + loops)
