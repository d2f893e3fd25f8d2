"""The model of Hopper's FP8 sums against the chip: equal to the bit. softgpu adds in the same way."""

from __future__ import annotations

import pytest
import torch

from flamia.reference.tensor_core import DEPTH, hopper_product
from softgpu.execute.wgmma import SMALLEST, add_eight_bit

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = pytest.mark.skipif(not HOPPER, reason="needs a Hopper device")

ROWS = 64


def codes(kind: str, depth: int, seed: int, dtype: torch.dtype = torch.float8_e4m3fn) -> torch.Tensor:
    g = torch.Generator("cuda").manual_seed(seed)
    shape = (ROWS, depth)
    if kind in ("bits", "subnormal"):
        raw = torch.randint(0, 256, shape, generator=g, device="cuda", dtype=torch.uint8)
        if kind == "subnormal":
            raw = raw & (0x87 if dtype == torch.float8_e4m3fn else 0x83)
        x = raw.view(dtype).float()
        return torch.where(x.isfinite(), x, 0.0).to(dtype)
    x = torch.randn(shape, generator=g, device="cuda")
    x = {"normal": x * 100, "positive": x.abs() + 0.01, "mean": 1 + 0.1 * x}[kind]
    return x.clamp(-448, 448).to(dtype)


def chip(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """cuBLAS with one accumulation over the whole depth."""
    one = torch.ones((), device="cuda")
    return torch._scaled_mm(a, b.t(), one, one, out_dtype=torch.float32, use_fast_accum=True)


@pytest.mark.parametrize("depth", [32, 64, 128, 512])
@pytest.mark.parametrize("kind", ["normal", "bits", "positive", "mean"])
def test_sums_of_e4m3_products(kind, depth):
    a, b = codes(kind, depth, depth), codes(kind, depth, depth + 1)
    model = hopper_product(a.double()[None], b.double().t()[None])[0]
    assert torch.equal(chip(a, b), model)
    exact = a.double() @ b.double().t()
    if (kind, depth) != ("mean", 32):  # its sums fit
        assert (model != exact).float().mean() > 0.05  # there was something to cut off


def test_subnormal_codes_have_the_smallest_normal_exponent():
    a, b = codes("subnormal", 128, 1), codes("bits", 128, 2)
    assert torch.equal(chip(a, b), hopper_product(a.double()[None], b.double().t()[None])[0])


@pytest.mark.parametrize("kind", ["normal", "bits", "subnormal"])
def test_e5m2_on_softgpu(kind):
    a, b = codes(kind, 128, 3, torch.float8_e5m2), codes("bits", 128, 4)
    total = 0.0
    x, y = a.float().cpu().numpy(), b.float().cpu().numpy()
    for k in range(0, 128, DEPTH):
        part = slice(k, k + DEPTH)
        total = add_eight_bit(x[:, part], y[:, part], total, SMALLEST["e5m2"], SMALLEST["e4m3"])
    assert torch.equal(chip(a, b).cpu(), torch.from_numpy(total))
