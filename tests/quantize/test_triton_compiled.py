"""Every launch of row preparation compiles for Hopper and both Blackwells from one source, spilling next to nothing."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

HERE = Path(__file__).parent
KERNELS = {
    "_scan_kernel",
    "_fill_kernel",
    "_gather_kernel",
    "_place_kernel",
    "_operand_kernel",
    "_gradient_kernel",
    "_dq_kernel",
    "_dk_dv_kernel",
    "_columns_kernel",
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("chip", "recipes"),
    [
        (90, "mxfp8-folded,mxfp8-folded-exact,nvfp4,nvfp4-folded,fp4"),
        pytest.param(90, "nvfp4:96", marks=pytest.mark.matrix),
        (100, "mxfp8"),
        pytest.param(100, "fp4:64", marks=pytest.mark.matrix),
        pytest.param(103, "mxfp8", marks=pytest.mark.matrix),
    ],
    ids=["sm_90a", "sm_90a-96", "sm_100a", "sm_100a-fp4", "sm_103a"],
)
def test_compiles_without_a_gpu(chip, recipes, tmp_path):
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(HERE.parents[1] / "src")}
    command = [sys.executable, str(HERE / "compile_kernels.py"), recipes, str(chip)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    records = [json.loads(line) for line in done.stdout.splitlines()]
    assert {r["kernel"] for r in records} >= KERNELS
    for r in records:
        assert r["target"] == f"sm_{chip}a"
        assert r["stack"] + r["local"] <= 64, r  # bytes per thread
        # The twins round after the product and after the sum: what the source does not fuse stays apart.
        assert r["fusible"] == 0, r
        # ptxas 12.8 loses codes that are stored as bytes for another thread, or that leave half a register undefined.
        assert r["byte_moves"] == 0, r
        assert r["undefined"] == 0, r
        # Rows of 24 words, those of columns at D = 96, are not whole multiples of a warp's pieces of 16 bytes.
        narrow = r["kernel"] == "_columns_kernel" and r["label"].endswith(":96")
        if r["kernel"] in ("_operand_kernel", "_gradient_kernel", "_dq_kernel", "_columns_kernel") and not narrow:
            assert r["wide_loads"], r  # 16 bytes at a time
        if r["kernel"] == "_operand_kernel" and r["label"] != "fp4:64":
            assert r["e4m3"], r
