"""The folded variant against plain.py (forward) and against the block variant (backward), and its own promises."""

import numpy as np
import plain_attention as plain
import pytest
import torch
from reference_cases import (
    EXACT,
    MASKS,
    SAME,
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
from flamia.reference.folded import _kept_column


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: f"{s[0]}x{s[1]}")
@pytest.mark.parametrize("exact", [False, True], ids=["default", "exact"])
def test_forward_equals_the_plain_loops(shape, mask, exact):
    len_q, len_k = shape
    left, right = MASKS[mask]
    q, k, v, do = one_head(len_q, len_k, len_k, len_q)
    plan = make_plan(flamia.Recipe(variant="folded", **(EXACT if exact else {})), 1, 1, 32, left, right)
    got = run(plan, q, k, v, do)
    visible = plain.mask(len_q, len_k, left, right)
    o, lse2, m = plain.folded_forward(numpy(q), numpy(k), numpy(v), visible, plan.softmax_scale, per_token=exact)
    assert relative_rms(got.o32[:, 0], o) < SAME
    seen = visible.any(1)
    np.testing.assert_array_equal(np.isfinite(got.lse2[0].numpy()), seen)
    np.testing.assert_allclose(got.lse2[0].numpy()[seen], lse2[seen], atol=2e-5, rtol=1e-6)
    np.testing.assert_array_equal(got.row_max[0].numpy()[seen], m[seen])


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("recipe", ["mxfp8", "nvfp4", "mxfp8-exact", "nvfp4-exact"])
def test_gradients_are_as_good_as_the_block_variant(recipe, mask):
    base = flamia.get_recipe(recipe)
    name = recipe.replace("mxfp8", "mxfp8-folded").replace("nvfp4", "nvfp4-folded")
    q, do = (tokens(300, 4, 64, seed) for seed in (0, 1))
    k, v = (tokens(340, 2, 64, seed) for seed in (2, 3))
    folded = run(make_plan(name, 4, 2, 64, *MASKS[mask]), q, k, v, do)
    block = run(make_plan(base, 4, 2, 64, *MASKS[mask]), q, k, v, do)
    for x in ("o", "dq", "dk", "dv"):
        # Both are one quantization away from the truth (mxfp8: cosine 0.998, nvfp4: shared score codes).
        assert cosine(getattr(folded, x), getattr(block, x)) > 0.9965, x


def test_largest_weight_is_a_power_of_two_above_the_reference():
    """R moves in whole steps above f, so M - f is an integer and the backward's significands equal the forward's."""
    q, k, v, do = one_head(64, 300, 300, 64)
    got = run(make_plan("mxfp8-folded", 1, 1, 32), q, k, v, do)
    assert torch.equal((got.row_max * 4096).round(), got.row_max * 4096)


def test_zero_values_and_zero_gradients():
    q, k, v, do = [tokens(200, 1, 64, seed).clone() for seed in range(4)]
    v[:100] = 0
    do[50:150] = 0
    for name in ("mxfp8-folded", "mxfp8-folded-exact"):
        got = run(make_plan(name, 1, 1, 64, None, 0), q, k, v, do)
        want = fp64(q, k, v, do, True)
        assert (got.o[:100] == 0).all()
        assert (got.dq[50:150] == 0).all()
        for x, y in zip((got.o, got.dq, got.dk, got.dv), want, strict=True):
            assert x.isfinite().all()
            assert cosine(x, y) > 0.996


def test_a_block_with_tiny_values_keeps_its_weight():
    """As for single tokens, where 32 tokens share the exponent: their weights vanish from the codes, not from l."""
    q, k, v, do = [tokens(160, 1, 64, seed).clone() for seed in range(4)]
    k[0], q[:, 0, :8] = 0, 6
    k[0, 0, :8] = 1.25
    v[:32] *= 2**-30
    want = fp64(q, k, v, do, True)[0]
    got = run(make_plan("mxfp8-folded", 1, 1, 64, None, 0), q, k, v, do)
    assert float(got.o[32:].double().norm() / want[32:].norm()) == pytest.approx(1, abs=0.05)


def test_tokens_of_very_different_size():
    """Block exponents of K, V, Q and dO that vary by 2^±8 must neither overflow nor lose a document's small part."""
    q, k, v, do = [tokens(256, 1, 64, seed, spread=0).clone() for seed in range(4)]
    for x, size in ((v, 256.0), (do, 2.0**-20)):
        x[64:96] *= size
    want = fp64(q, k, v, do, True)
    for name in ("mxfp8-folded", "mxfp8-folded-exact"):
        got = run(make_plan(name, 1, 1, 64, None, 0), q, k, v, do)
        for x, y in zip((got.o, got.dq, got.dk, got.dv), want, strict=True):
            assert cosine(x, y) > 0.995


def test_kept_column_follow_the_hysteresis():
    ds = torch.zeros(1, 6 * 32, 8)
    for block, top in enumerate((0.0, 448.0, 29.0, 28.0, 0.0, 449.0)):
        ds[0, block * 32 + 3, 2] = top
    rows, pairs, after = _kept_column(ds, torch.full((1,), -1000, dtype=torch.int32))
    # nothing yet; own exponent 0; 29 is kept; 28 falls out (28 = 1.75 * 2^4, its own is -4); zero keeps; 449 moves up
    assert rows[0, ::32].tolist() == [0, 0, 0, -4, -4, 1]
    # of 64 queries the larger one, but never that of a block of zeros
    assert pairs[0, ::32].tolist() == [0, 0, 0, 0, 1, 1]
    assert after.tolist() == [1]
