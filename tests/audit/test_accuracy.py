"""Accuracy against exact attention: known distances, known recipes, and the paper's rule beside ours."""

import pytest

from flamia import audit
from flamia.audit.accuracy import default_recipes
from flamia.reference.exact import exact_attention


def test_a_known_error_is_measured():
    def shrunk(q, k, v, *, causal):
        return 0.5 * exact_attention(q, k, v, causal=causal)[0]

    (row,) = audit.accuracy(shrunk, masks="full", tokens=64, heads=2, head_dim=32)
    assert (row.recipe, row.mask, row.inputs) == ("shrunk", "full", "gaussian")
    assert (row.row_sum, row.offsets, row.ds_zero_fraction) == (None, False, None)
    for distance in (row.o, row.dq, row.dk, row.dv):
        assert distance.cosine == pytest.approx(1, abs=1e-4)
        assert distance.relative_error == pytest.approx(0.5, abs=1e-2)
        assert distance.gain == pytest.approx(-0.5, abs=1e-2)


def test_the_mask_is_passed_on():
    def always_causal(q, k, v, *, causal):
        return exact_attention(q, k, v, causal=True)

    causal, full = audit.accuracy(always_causal, tokens=64, heads=1, head_dim=32)
    assert causal.o.cosine > 0.9999
    assert full.o.cosine < 0.9


def test_forward_only():
    def inference(q, k, v, *, causal):
        return exact_attention(q.detach(), k.detach(), v.detach(), causal=causal)[0]

    row = audit.accuracy(inference, tokens=32, heads=1, head_dim=32)[0]
    assert row.o.cosine > 0.9999
    assert (row.dq, row.dk, row.dv) == (None, None, None)


# Cosines of the three routes at 512 tokens; the full table at 4096 is below.
@pytest.mark.parametrize(
    ("recipe", "o", "dq"), [("mxfp8", 0.998, 0.997), ("nvfp4", 0.989, 0.988), ("fp4", 0.977, 0.94)]
)
def test_routes_are_as_close_as_they_should_be(recipe, o, dq):
    for row in audit.accuracy(recipe, tokens=512, heads=2):
        assert o < row.o.cosine < 0.9999
        assert dq < row.dq.cosine < 0.9999
        assert 0 < row.ds_zero_fraction < 0.6


def test_means_and_what_rescues_them():
    rows = {r.recipe: r for r in audit.accuracy(inputs="mean", masks="causal", tokens=512, heads=2)}
    assert set(rows) == set(default_recipes("mean"))
    assert (rows["mxfp8"].row_sum, rows["mxfp8-paper"].row_sum) == ("codes", "weights")
    assert rows["mxfp8+offsets"].offsets
    assert rows["mxfp8-paper"].dq.cosine < rows["mxfp8"].dq.cosine - 0.05
    assert rows["mxfp8"].dq.cosine > 0.94
    assert rows["mxfp8+offsets"].dq.cosine > 0.997


def test_bad_names():
    with pytest.raises(ValueError, match="mask 'half' is unknown; allowed are causal, full"):
        audit.accuracy("mxfp8", masks="half")
    with pytest.raises(ValueError, match="only recipes take offsets"):
        audit.accuracy("torch-sdpa+offsets")
    with pytest.raises(ValueError, match="unknown"):
        audit.accuracy(["mxfp8", "nope"])


@pytest.mark.slow
# A head alone has few of the rows whose large dS decides fp4's dq: its cosine is up to 7e-3 off the table's.
@pytest.mark.parametrize(
    ("tokens", "heads", "fp4_dq"), [(2048, 1, 1e-2), pytest.param(4096, 4, 2e-3, marks=pytest.mark.matrix)]
)
def test_table_of_the_contract(tokens, heads, fp4_dq):
    """The table "Reproduced accuracy" of the numeric contract, in the matrix at its size: o within 5e-4, dq within
    1e-3 (2e-3)."""
    expected = {
        ("mxfp8", "causal"): (0.9988, 0.9979),
        ("nvfp4", "causal"): (0.9920, 0.9908),
        ("fp4", "causal"): (0.9803, 0.9491),
        ("mxfp8", "full"): (0.9986, 0.9978),
        ("nvfp4", "full"): (0.9899, 0.9890),
        ("fp4", "full"): (0.9801, 0.9513),
    }
    rows = audit.accuracy(("mxfp8", "nvfp4", "fp4"), tokens=tokens, heads=heads)
    assert {(row.recipe, row.mask) for row in rows} == set(expected)
    for row in rows:
        o, dq = expected[row.recipe, row.mask]
        assert row.o.cosine == pytest.approx(o, abs=1.5e-3 if row.recipe == "fp4" else 5e-4), (row.recipe, row.mask)
        assert row.dq.cosine == pytest.approx(dq, abs=fp4_dq if row.recipe == "fp4" else 1e-3), (row.recipe, row.mask)


@pytest.mark.matrix
def test_means_at_the_size_of_the_contract():
    rows = audit.accuracy(("mxfp8", "mxfp8+offsets"), inputs="mean", tokens=4096, heads=1)
    assert len(rows) == 4
    for row in rows:
        assert row.dq.cosine >= (0.997 if row.offsets else 0.95), (row.recipe, row.mask)
