"""The model of Hopper's FP8 sums: what it cuts off, where, and what a long sum loses. Against a chip: tests/gpu."""

import pytest
import torch
from reference_cases import make_plan, relative_rms, run, tokens

import flamia
from flamia.reference.tensor_core import exact_product, hopper_product
from softgpu.execute.wgmma import add_eight_bit

E4M3 = torch.float8_e4m3fn


def dot(a, b):
    a, b = torch.tensor([[a]], dtype=torch.float64), torch.tensor([b], dtype=torch.float64).unsqueeze(-1)
    return hopper_product(a, b).item()


def codes(shape, seed, scale=100.0):
    return (
        (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale).clamp(-448, 448).to(E4M3).double()
    )


def test_products_are_cut_13_bits_behind_the_largest_exponent():
    assert dot([1, 2.0**-6], [1, 2.0**-7]) == 1 + 2.0**-13
    assert dot([1, 2.0**-7], [1, 2.0**-7]) == 1.0
    assert dot([1, -(2.0**-7)], [1, 2.0**-7]) == 1.0  # towards zero
    assert dot([1, 1.5 * 2.0**-6], [1, 2.0**-7]) == 1 + 2.0**-13


def test_the_exponent_of_a_product_does_not_count_its_carry():
    # 1.5 * 1.5 = 2.25 is aligned as if below 2, so that it leaves room for 2^-13; the sum then keeps 13 bits: 2^-12.
    assert dot([1.5, 2.0**-6], [1.5, 2.0**-7]) == 2.25
    assert dot([1.5, 2.0**-6, 2.0**-6], [1.5, 2.0**-7, 2.0**-7]) == 2.25 + 2.0**-12


def test_a_step_is_32_products():
    small = [2.0**-7] * 31
    assert dot([1, *small, *small], [1, *small, *small]) == 1.0
    # Cut off one by one beside a large sum, added up before they meet it.
    assert dot([*small, 0, 1], [*small, 0, 1]) == 1 + 31 * 2.0**-14 - 2.0**-14


def test_subnormal_codes_and_nan():
    assert dot([2.0**-9] * 4, [2.0**-9] * 4) == 2.0**-16
    assert dot([float("nan"), 1], [1, 1]) != dot([float("nan"), 1], [1, 1])
    assert dot([0.0] * 40, [1.0] * 40) == 0.0


def test_sums_within_13_bits_are_exact():
    g = torch.Generator().manual_seed(0)
    a, b = (torch.randint(-3, 4, shape, generator=g).double() for shape in ((2, 9, 100), (2, 100, 7)))
    assert torch.equal(hopper_product(a, b), exact_product(a, b))


@pytest.mark.parametrize("shape", [(1, 1, 1), (2, 33, 70), (1, 64, 256)])
def test_two_implementations_agree_to_the_bit(shape):
    n, m, depth = shape
    a, b = codes((n, m, depth), 1), codes((n, depth, 40), 2, 1.0)
    got = hopper_product(a, b)
    extra = -depth % 32
    for i in range(n):
        x, y = (torch.nn.functional.pad(z, (0, extra)).float().numpy() for z in (a[i], b[i].t()))
        total = 0.0
        for k in range(0, depth + extra, 32):
            total = add_eight_bit(x[:, k : k + 32], y[:, k : k + 32], total, -6, -6)
        assert torch.equal(got[i], torch.from_numpy(total))


@pytest.mark.parametrize(("depth", "least", "most"), [(128, 1e-4, 1e-3), (4096, 0.03, 0.12)])
def test_long_sums_of_one_sign_fall_short(depth, least, most):
    a = (1 + 0.1 * torch.randn(1, 32, depth, generator=torch.Generator().manual_seed(3))).to(E4M3).double()
    b = a.flip(1).transpose(1, 2)
    short = 1 - (hopper_product(a, b).double() / torch.bmm(a, b)).mean().item()
    assert least < short < most


@pytest.mark.parametrize("mask", [(None, None), (None, 0), (20, 0)], ids=["full", "causal", "window"])
@pytest.mark.parametrize("dim", [64, 128])
def test_attention_with_these_sums_moves_by_single_codes(mask, dim):
    q, k, v, do = (tokens(200, heads, dim, seed) for seed, heads in enumerate((2, 1, 1, 2)))
    exact = run(make_plan("mxfp8-folded", 2, 1, dim, *mask), q, k, v, do)
    plan = make_plan(flamia.Recipe(variant="folded", products="hopper"), 2, 1, dim, *mask)
    got = run(plan, q, k, v, do)
    # A score is off by some 2^-13, which takes one weight in a hundred to the next code; on an H200: 2e-3 to 1.2e-2.
    for name in ("o32", "dq", "dk", "dv"):
        assert 1e-4 < relative_rms(getattr(got, name), getattr(exact, name)) < 2e-2, name
    assert relative_rms(got.lse2, exact.lse2) < 1e-3


def test_values_that_differ_in_size_are_summed_in_registers():
    q, k, v, do = (tokens(150, 1, 64, seed) for seed in range(4))
    v[40:60] *= 2.0**-20
    plan = make_plan(flamia.Recipe(variant="folded", products="hopper"), 1, 1, 64, None, 0)
    exact = run(make_plan("mxfp8-folded", 1, 1, 64, None, 0), q, k, v, do)
    assert relative_rms(run(plan, q, k, v, do).o32, exact.o32) < 1e-2


def test_outputs_do_not_fall_short_with_their_sums():
    """V = 1 + 0.1 N(0, 1): row sums by powers of two alone would leave o 3e-4 too small."""
    q, k, v = (tokens(n, 1, 128, seed) for seed, n in enumerate((32, 4096, 4096)))
    v = (1 + 0.1 * v.float()).to(v.dtype)
    ends = [torch.tensor([0, n], dtype=torch.int32) for n in (32, 4096)]
    options = dict(backend="reference", return_lse=True)
    want, exact_lse = flamia.flash_attn_varlen_func(q, k, v, *ends, recipe="mxfp8-folded", **options)
    recipe = flamia.Recipe(variant="folded", products="hopper")
    got, lse = flamia.flash_attn_varlen_func(q, k, v, *ends, recipe=recipe, **options)
    want, got = want.double(), got.double()
    assert abs((got * want).sum() / want.pow(2).sum() - 1) < 1.5e-4
    assert abs((lse - exact_lse).mean()) < 2e-4
