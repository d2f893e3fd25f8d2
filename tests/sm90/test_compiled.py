"""The machine code of the Hopper kernels: registers hold what they should, and the products are those meant."""

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

from flamia.sm90.backward import Backward, compile_backward
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


BACKWARD_OPTIONS = [
    {**recipe, **order, "format": form}
    for recipe in (dict(), dict(exact=True, causal_scale=True))
    for order in (dict(), dict(deterministic=True))
    for form in ("mxfp8", "nvfp4")
]
BACKWARD_FEW = [(128, "causal", dict(format="nvfp4")), (64, "window", dict(format="mxfp8"))]
BACKWARD_ALL = [(head_dim, masks, options) for head_dim in (64, 128) for masks in MASKS for options in BACKWARD_OPTIONS]


def machine_code(compile_kernel, kernel, folder, monkeypatch):
    """(bytes of stack per thread, SASS) of a kernel, as the compiler delivers it."""
    monkeypatch.setenv("CUTE_DSL_DISABLE_FILE_CACHING", "1")
    monkeypatch.setattr(CuTeDSL._get_dsl().envar, "arch", "sm_90a")
    compiled = compile_kernel(kernel, compile=cute.compile, options=f"--keep-cubin --dump-dir={folder}")
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
def test_the_forward_spills_nothing(head_dim, masks, options, tmp_path, monkeypatch):
    kernel = Forward(head_dim, 2, MASKS[masks], **options)
    stack, sass = machine_code(compile_forward, kernel, tmp_path, monkeypatch)
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


@pytest.mark.parametrize(
    ("head_dim", "masks", "options"),
    [*BACKWARD_FEW, *(pytest.param(*one, marks=pytest.mark.slow) for one in BACKWARD_ALL if one not in BACKWARD_FEW)],
    ids=str,
)
def test_the_backward_keeps_accumulators_in_registers(head_dim, masks, options, tmp_path, monkeypatch):
    kernel = Backward(head_dim, 2, MASKS[masks], rotate=head_dim == 128, **options)
    stack, sass = machine_code(compile_backward, kernel, tmp_path, monkeypatch)
    scarce = head_dim == 128 and (kernel.exact or kernel.deterministic)
    # Where registers are scarce, addresses and exponents of an item lie on the stack: an accumulator has 128 bytes. So
    # does where a walk without a mask begins, which is one number more.
    walks_around = head_dim == 128 and kernel.around
    assert stack <= (32 if scarce else 8 if walks_around else 0)
    # Each loop over steps (masks; all kinds of them) and the first step have scores and dP; each loop and the last step
    # have dV and dK of 64 queries and dQ of 128 keys, 64 channels or half of all at a time.
    parts = 4 if masks == "window" else 3
    wide = options["format"] == "nvfp4"
    scores = head_dim // (16 if wide else 32)
    eight = head_dim // 32 + (0 if wide else scores) + 2 * (head_dim // 64) * 2 + 4
    assert len(re.findall(r"\bHGMMA\b", sass)) == (parts * scores if wide else 0)
    assert len(re.findall(r"\bQGMMA\b", sass)) == parts * eight
    # For scores, dP, each 64 channels of dV and of dK, and dQ. Were it short of registers for the products under way,
    # the assembler would wait behind every one.
    assert len(re.findall(r"WARPGROUP\.DEPBAR", sass)) == parts * (3 + 2 * (head_dim // 64))
