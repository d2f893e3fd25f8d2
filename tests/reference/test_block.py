"""The block variant against plain.py, the same arithmetic written row by row."""

import dataclasses
import math

import numpy as np
import plain_attention as plain
import pytest
import torch
from reference_cases import (
    EXACT,
    MASKS,
    SAME,
    SAME_BF16,
    SHAPES,
    cosine,
    fp64,
    make_plan,
    numpy,
    one_head,
    relative_rms,
    run,
    tokens,
)

import flamia
from flamia.reference.counters import statistics


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: f"{s[0]}x{s[1]}")
@pytest.mark.parametrize("exact", [False, True], ids=["default", "exact"])
def test_mxfp8_equals_the_plain_loops(shape, mask, exact):
    len_q, len_k = shape
    left, right = MASKS[mask]
    q, k, v, do = one_head(len_q, len_k, len_k, len_q)
    plan = make_plan(flamia.Recipe(**(EXACT if exact else {})), 1, 1, 32, left, right)
    got = run(plan, q, k, v, do)
    visible = plain.mask(len_q, len_k, left, right)
    scale = plan.softmax_scale
    o, lse2 = plain.forward(numpy(q), numpy(k), numpy(v), visible, scale, per_token=exact)
    assert relative_rms(got.o32[:, 0], o) < SAME
    seen = visible.any(1)
    np.testing.assert_array_equal(np.isfinite(got.lse2[0].numpy()), seen)
    np.testing.assert_allclose(got.lse2[0].numpy()[seen], lse2[seen], atol=2e-5, rtol=1e-6)
    want = plain.backward(
        *(numpy(x) for x in (q, k, v, do)),
        numpy(got.o),
        got.lse2[0].double().numpy(),
        visible,
        scale,
        per_token=exact,
        row_exponents=exact,
        causal_scale=exact,
    )
    for name, x, y in zip(("dq", "dk", "dv"), (got.dq, got.dk, got.dv), want, strict=True):
        # dq and dk may vanish: rows with one visible key have none; then the sizes are compared with do's.
        error = np.linalg.norm(numpy(x) - y) / max(np.linalg.norm(y), 1e-6 * np.linalg.norm(numpy(do)))
        assert error < 2 * SAME_BF16 + 2**-9, name


@pytest.mark.parametrize("row_sum", ["codes", "weights"])
def test_row_sum_rule(row_sum):
    q, k, v, do = one_head(150, 150, 150, 150)
    plan = make_plan(flamia.Recipe(row_sum=row_sum), 1, 1, 32, None, 0)
    visible = plain.mask(150, 150, None, 0)
    o, lse2 = plain.forward(numpy(q), numpy(k), numpy(v), visible, plan.softmax_scale, row_sum=row_sum)
    got = run(plan, q, k, v, do)
    assert relative_rms(got.o32[:, 0], o) < SAME
    np.testing.assert_allclose(got.lse2[0].numpy(), lse2, atol=2e-5)
    other = plain.forward(
        numpy(q), numpy(k), numpy(v), visible, plan.softmax_scale, row_sum="weights" if row_sum == "codes" else "codes"
    )
    assert relative_rms(got.o32[:, 0], other[0]) > 100 * SAME / 20  # the rules differ by far more than SAME


@pytest.mark.parametrize(("a", "tau"), [(4, 4.0), (0, 8.0), (8, 0.0), (6, 2.5)])
def test_shift_and_threshold(a, tau):
    q, k, v, do = one_head(40, 400, 400, 40, spread=4)
    plan = make_plan(flamia.Recipe(p_shift=a, tau=tau), 1, 1, 32)
    o, lse2 = plain.forward(numpy(q), numpy(k), numpy(v), np.ones((40, 400), bool), plan.softmax_scale, a=a, tau=tau)
    got = run(plan, q, k, v, do)
    assert relative_rms(got.o32[:, 0], o) < SAME
    np.testing.assert_allclose(got.lse2[0].numpy(), lse2, atol=1e-4)


# Cosines of o, dq, dk, dv to FP64 on Gaussian inputs, the contract's table with the tolerance of the issue at 4096
# tokens widened for a smaller sample (2 heads, 1024 tokens).
TABLE = {
    ("mxfp8", True): (0.9988, 0.9979, 0.9979, 0.9987),
    ("nvfp4", True): (0.9920, 0.9908, 0.9907, 0.9919),
    ("fp4", True): (0.9803, 0.9491, 0.9524, 0.9819),
    ("mxfp8", False): (0.9986, 0.9978, 0.9978, 0.9985),
    ("nvfp4", False): (0.9899, 0.9890, 0.9891, 0.9897),
    ("fp4", False): (0.9801, 0.9513, 0.9521, 0.9796),
}


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("recipe", ["mxfp8", "nvfp4", "fp4", "mxfp8-folded", "mxfp8-exact", "nvfp4-exact", "fp4-exact"])
def test_accuracy_on_gaussian_inputs(recipe, causal):
    inputs = [tokens(1024, 2, 128, seed) for seed in range(4)]
    got = run(make_plan(recipe, 2, 2, 128, None, 0 if causal else None), *inputs)
    want = fp64(*inputs, causal)
    route = flamia.get_recipe(recipe).format
    slack = 0.004 if route == "fp4" else 0.0012
    for x, y, expected in zip((got.o, got.dq, got.dk, got.dv), want, TABLE[route, causal], strict=True):
        assert cosine(x, y) == pytest.approx(expected, abs=slack)


def test_four_bit_scale_never_saturates():
    """a4 + e > 11.39 would push the UE4M3 scale of P 2^e past 448: outliers of V on the diagonal must stay right."""
    q, k, v, do = [tokens(256, 1, 64, seed) for seed in range(4)]
    v = v.clone()
    v[::7] *= 512  # within NVFP4's own range, beyond what 2^4 2^e / 6 <= 448 allows
    got = run(make_plan("fp4", 1, 1, 64, None, 0), q, k, v, do)
    want = fp64(q, k, v, do, True)[0]
    small = run(make_plan("fp4", 1, 1, 64, None, 0), q, k, (v.float() / 512).bfloat16(), do)
    assert cosine(got.o, want) > 0.97
    assert cosine(got.o, want) == pytest.approx(cosine(small.o, want), abs=0.01)


def test_a_key_with_a_tiny_value_keeps_its_weight():
    """An attention sink: nearly all weight on a key whose V is tiny. Folded into P it rounds to zero; l must not."""
    length = 64
    q, k, v, do = [tokens(length, 1, 64, seed) for seed in range(4)]
    q, k, v = q.clone(), k.clone(), v.clone()
    k[0], q[:, 0, :8] = 0, 6
    k[0, 0, :8] = 1.25  # its score is 7.5 above the others': e^7.5 against 63 keys
    v[0] *= 2**-30
    want = fp64(q, k, v, do, True)
    for recipe in ("mxfp8", "mxfp8-exact", "nvfp4-exact", "mxfp8-folded-exact", "nvfp4-folded-exact", "fp4"):
        got = run(make_plan(recipe, 1, 1, 64, None, 0), q, k, v, do)
        ratio = float(got.o.double().norm() / want[0].norm())
        # Without the rule the ratio is above 8; NVFP4's own score error makes it 1.24.
        assert ratio == pytest.approx(1, abs=0.3), recipe


def test_statistics_count_what_rounding_did():
    q, k, v, do = [tokens(256, 2, 64, seed) for seed in range(4)]
    with statistics() as default:
        run(make_plan("mxfp8", 2, 2, 64, None, 0), q, k, v, do)
    with statistics() as small, statistics() as nested:
        run(make_plan("mxfp8", 2, 2, 64, None, 0), q, k, v, (do.float() * 2**-20).bfloat16())
    assert default.ds_total > 2 * 200 * 256 / 2 * 0.9
    assert 0 < default.ds_zero_fraction < 1e-3
    assert small == nested  # power-of-two scales: the size of do does not matter
    assert small.ds_zero == default.ds_zero
    assert default.accumulator_overflow == 0
    assert default.accumulator_total == 2 * 256 * 64


@pytest.mark.parametrize("scale", ["sequence", "causal"])
@pytest.mark.parametrize("multiplier", [1.0, 50.0])  # 50: 2500 where an outlier token meets an outlier channel
def test_the_fp16_accumulator_never_overflows(scale, multiplier):
    q, k, v, do = [tokens(384, 2, 64, seed).clone() for seed in range(4)]
    for x in (q, k, v, do):
        x[::50] *= multiplier
        x[..., :2] *= multiplier
    for recipe in (flamia.Recipe(accumulator_scale=scale), flamia.Recipe(variant="folded", accumulator_scale=scale)):
        with statistics() as counts:
            run(make_plan(recipe, 2, 2, 64, None, 0), q, k, v, do)
        assert counts.accumulator_overflow == 0


def test_adversarial_accumulator_is_bounded_by_its_scale():
    """Rows whose |dP - delta| all point the same way come closest to the bound: sums must stay below 2^16."""
    length = 512
    q = torch.zeros(length, 1, 64).bfloat16()  # flat scores
    sign = torch.where(torch.arange(length) % 2 == 0, 1.0, -1.0).view(-1, 1, 1)
    v = (sign * torch.ones(length, 1, 64)).bfloat16()
    k = (sign * torch.ones(length, 1, 64)).bfloat16()
    do = torch.ones(length, 1, 64).bfloat16()
    for scale in ("sequence", "causal"):
        plan = make_plan(flamia.Recipe(accumulator_scale=scale), 1, 1, 64)
        with statistics() as counts:
            got = run(plan, q, k, v, do)
        assert counts.accumulator_overflow == 0
        want = fp64(q, k, v, do, False)[1]
        assert cosine(got.dq, want) > 0.999


@pytest.mark.parametrize("scale", ["sequence", "causal"])
@pytest.mark.parametrize("recipe", ["mxfp8", "mxfp8-folded", "mxfp8-exact", "fp4"])
def test_accumulator_of_rows_whose_sum_misses_a_tail(recipe, scale):
    """One key 14.15 binades above 65,536 others: the others' codes are zero, their gradients are not."""
    keys, top = 65536, 14.15 * math.log(2.0) * 32**0.5
    q, k, v = torch.zeros(1, 1, 32), torch.zeros(keys, 1, 32), torch.full((keys, 1, 32), -1.5)
    q[..., 0], k[0, 0, 0], v[0], k[..., 1], k[0, 0, 1] = 1.0, top, 1.5, top, -top
    full = dataclasses.replace(flamia.get_recipe(recipe), accumulator_scale=scale)
    with statistics() as counts:
        got = run(make_plan(full, 1, 1, 32), *(x.bfloat16() for x in (q, k, v, torch.ones_like(q))))
    assert counts.accumulator_overflow == 0
    assert got.dq.isfinite().all()
    assert got.dq.abs().max() > 0


def test_random_rounding_draws_anew_when_the_inputs_change():
    q, k, v, do = [tokens(64, 1, 32, seed) for seed in range(4)]
    plan = make_plan("fp4", 1, 1, 32)
    first, again = run(plan, q, k, v, do), run(plan, q, k, v, do)
    assert torch.equal(first.dq, again.dq)
    seed = run(make_plan(flamia.Recipe(format="fp4", seed=2**31), 1, 1, 32), q, k, v, do)
    assert not torch.equal(first.dq, seed.dq)
    plain = run(make_plan(flamia.Recipe(format="fp4", stochastic_rounding=False), 1, 1, 32), q, k, v, do)
    assert not torch.equal(first.dq, plain.dq)


def test_fp32_accumulator_is_closer():
    q, k, v, do = [tokens(512, 2, 64, seed) for seed in range(4)]
    results = [run(make_plan(flamia.Recipe(accumulator=kind), 2, 2, 64), q, k, v, do).dq for kind in ("fp16", "fp32")]
    assert 0 < relative_rms(*results) < 2**-8  # four FP16 additions, relative to the largest partial
