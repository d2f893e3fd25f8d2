"""A whole training call where no compiler can be imported: everything comes from a folder that was made elsewhere."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

for module in ("cutlass", "tvm_ffi", "triton"):
    pytest.importorskip(module)

SCRIPT = Path(__file__).with_name("ready_call.py")
FORWARD = [
    "_scan_kernel",
    "_fill_kernel",
    "_gather_kernel",
    *["_operand_kernel"] * 3,
    "_uneven_kernel",
    "_finish_kernel",
]
BACKWARD = ["_gradient_kernel", "_prescale_kernel", "_dq_kernel", "_clear_kernel"]
PART = ["_columns_kernel"] * 2 + BACKWARD[:-1]


def run(what, folder):
    # Not interpreted, as Triton is in this process.
    environment = {k: v for k, v in os.environ.items() if k not in ("TRITON_INTERPRET", "FLAMIA_KERNELS")}
    environment |= {"TRITON_CACHE_DIR": str(folder / "cache"), "PYTHONPATH": str(SCRIPT.parents[2] / "src")}
    done = subprocess.run([sys.executable, SCRIPT, what, folder], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])["said"]


def test_a_training_call_without_any_compiler(tmp_path):
    run("build", tmp_path)
    said = run("call", tmp_path)
    assert said["ran"] == FORWARD + BACKWARD
    assert said["imported"] == []
    # The kernels add as their twins do: only the natural logarithm of lse is rounded another way.
    assert said["errors"].pop("lse") < 1e-6
    assert said["errors"] == dict.fromkeys(("o", "dq", "dk", "dv"), 0.0)
    assert said["first"] == {"compiled": 0, "cached": 0, "ready": len(FORWARD + BACKWARD), "jit": 0}
    # q, k, v and do at odd addresses take four variants that assume nothing, and give the same bits.
    assert set(said["elsewhere"].values()) == {True}
    assert said["second"] == said["first"] | {"ready": said["first"]["ready"] + 4}
    # In two parts Q and K are quantized without columns, which have launches of their own. Tables of some heads,
    # wherever they begin, need no other variant.
    assert said["ran_split"] == FORWARD + PART * 2 + BACKWARD[-1:]
    assert set(said["split"].values()) == {True}
    assert said["third"] == said["second"] | {"ready": said["second"]["ready"] + 4}
