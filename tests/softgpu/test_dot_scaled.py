"""Triton's block-scaled products for sm_100a: right against float64, in every schedule order, faults answered."""

from __future__ import annotations

import contextlib
import itertools

import pytest

pytest.importorskip("triton.backends.compiler")

import dot_scaled
from faults import SCALE_FAULTS, replace

from softgpu import AsyncRace, Checks, Device

pytestmark = pytest.mark.slow

SHAPES = [(128, 128, 256, 128, 128, 128), (256, 128, 512, 128, 64, 128), (256, 256, 512, 128, 256, 256)]


FEW = {("mxfp8", SHAPES[2]), ("mxfp4", SHAPES[1]), ("nvfp4", SHAPES[0])}  # the others are for the matrix


@pytest.mark.parametrize(
    ("recipe", "shape"),
    [
        pytest.param(*case, marks=() if case in FEW else pytest.mark.matrix)
        for case in itertools.product(("mxfp8", "mxfp4", "nvfp4"), SHAPES)
    ],
    ids=lambda x: x if isinstance(x, str) else "x".join(map(str, x)),
)
def test_product_is_right(recipe, shape):
    results = []
    for seed in (None, 1, 2):
        difference, c = dot_scaled.run(Device(seed=seed), recipe, *shape)
        # exact operands, float32 accumulation
        assert difference < 2e-5
        results.append(c)
    assert all((c == results[0]).all() for c in results)


@pytest.mark.parametrize("name", SCALE_FAULTS)
def test_scale_fault_is_answered(name):
    edit, answers = SCALE_FAULTS[name]
    with contextlib.suppress(*answers):
        difference, _ = dot_scaled.run(Device(), "mxfp8", *SHAPES[0], edit=edit)
        assert difference > 0.05


def test_dropped_wait_for_tensor_memory_loads_is_answered():
    checks = Checks(tensor_loads=True)
    assert dot_scaled.run(Device(checks=checks), "mxfp8", *SHAPES[0])[0] < 2e-5
    dropped = replace(r"tcgen05\.wait::ld\.sync\.aligned;", "", None)
    with pytest.raises(AsyncRace, match="waited for"):
        dot_scaled.run(Device(checks=checks), "mxfp8", *SHAPES[0], edit=dropped)
