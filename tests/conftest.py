"""What every test shares: one thread per worker; tests of devices skip themselves where there is none."""

import os
from pathlib import Path

WORKER = "PYTEST_XDIST_WORKER" in os.environ
if WORKER:
    # Set before torch is imported: workers that each start a thread per core slow one another down.
    for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        os.environ[variable] = "1"

import hypothesis  # noqa: E402
import pytest  # noqa: E402
import torch  # noqa: E402

if WORKER:
    torch.set_num_threads(1)

# Triton decides when it defines its own functions whether they are interpreted: once per process, before its import.
# Tests that compile do so in a process of their own.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

# How long an example takes on a shared machine says nothing; the examples must be the same on all of them.
hypothesis.settings.register_profile("flamia", deadline=None, derandomize=True)
hypothesis.settings.load_profile("flamia")

HERE = Path(__file__).parent
GPU_TESTS = HERE / "gpu"
KERNEL_TESTS = {HERE / "sm90", HERE / "sm100"}


def compiles(item: pytest.Item) -> bool:
    return "soft_device" in getattr(item, "fixturenames", ()) or item.path.stem.endswith("_compiled")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark tests by where they lie: `make check` leaves out `slow` and `matrix`, `make test` `matrix` alone.

    Under tests/gpu they are `gpu`, and skipped where torch sees no CUDA device. Tests of attention kernels that are
    marked slow are the combinations that belong to the `matrix`; the others are slow where they compile.
    """
    skip = None if torch.cuda.is_available() else pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if GPU_TESTS in item.path.parents:
            item.add_marker(pytest.mark.gpu)
        if KERNEL_TESTS & set(item.path.parents):
            if item.get_closest_marker("slow"):
                item.add_marker(pytest.mark.matrix)
            elif compiles(item):
                item.add_marker(pytest.mark.slow)
        if skip is not None and item.get_closest_marker("gpu"):
            item.add_marker(skip)
