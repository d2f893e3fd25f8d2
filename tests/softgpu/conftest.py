"""Fixtures: software devices, and FlashAttention-4 cases recorded once per session."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

from softgpu.pytest_plugin import soft_device, soft_device_shuffled  # noqa: F401

CASES = {
    "hopper": ("sm_90a", dict(lengths_q=[512], heads=1, heads_kv=1, causal=True)),
    "blackwell": ("sm_100a", dict(lengths_q=[512], heads=1, heads_kv=1, causal=True)),
    "pair": ("sm_100a", dict(lengths_q=[256], heads=1, heads_kv=1, backward=True)),
}


@pytest.fixture(scope="session")
def recorded():
    """name → ``fa4.Recorded``, compiled and run on first use."""
    pytest.importorskip("flash_attn.cute")
    import fa4

    known = {}

    def get(name: str):
        if name not in known:
            arch, case = CASES[name]
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                known[name] = fa4.Recorded(arch, **case)
        return known[name]

    return get


@pytest.fixture(autouse=True)
def one_thread():
    """The machine's own vectors are small; more BLAS threads only cost."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
