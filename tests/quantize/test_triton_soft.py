"""Row preparation as Triton compiles it for Hopper, run on the software device: the twins' bits.

Triton's interpreter never sees layouts, shuffles or inline assembly; the compiled kernels have nothing else.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

HERE = Path(__file__).parent
OUTPUTS = {
    "mxfp8-folded": {"q.codes", "q.exponents", "q.columns", "k.columns", "v.columns", "do.codes", "do.columns"},
    "nvfp4": {"q.codes", "q.scales", "q8.codes", "q8.columns", "k8.columns", "v.codes", "do.codes", "decoded."},
    "fp4": {"q.codes", "q_columns.codes", "k_tokens.codes", "v_columns.scales", "do.codes", "do_columns.codes"},
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "head_dim"), [("mxfp8-folded", 128), ("nvfp4", 32), pytest.param("fp4", 64, marks=pytest.mark.matrix)]
)
def test_compiled_kernels_give_the_twins_bits(recipe, head_dim, tmp_path):
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(HERE.parents[1] / "src")}
    command = [sys.executable, str(HERE / "run_kernels.py"), recipe, str(head_dim)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    different = json.loads(done.stdout.splitlines()[-1])
    assert different.keys() >= OUTPUTS[recipe] | {"delta.", "norm.", "dq.", "dk.", "dv.", "columns_of.", "accumulator"}
    assert not any(different.values()), {k: n for k, n in different.items() if n}
