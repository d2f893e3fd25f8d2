"""Documents that mix are caught, whole and clean ones are not."""

import pytest

from flamia import audit

SMALL = {"heads": 1, "head_dim": 32, "lengths": (33, 1, 40)}


def test_a_packed_target_that_mixes_documents_is_caught_in_o_alone(attention):
    report = audit.isolation(attention["mixes_documents"], **SMALL)
    assert report.layout == "packed"
    assert not report.isolated
    touched = {c.tensor: c.rows_reached for c in report.crossings if not c.bitwise_zero}
    assert touched == {"o": 73}  # every row of the others, when the document of one token is scaled


def test_a_fixed_target_is_given_a_batch(attention):
    report = audit.isolation(attention["mixes_batch"], **SMALL)
    assert report.layout == "batched"
    assert {c.tensor for c in report.crossings if not c.bitwise_zero} == {"lse"}
    assert not report.isolated


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("name", ["torch-sdpa", "exact", "mxfp8", "nvfp4", "fp4", "mxfp8-folded"])
def test_documents_do_not_mix(name, causal):
    report = audit.isolation(name, heads=2, kv_heads=1, head_dim=64, lengths=(33, 70, 1, 31), causal=causal)
    assert report.layout == "packed"
    assert report.isolated
    assert {c.tensor for c in report.crossings} >= {"o", "dq", "dk", "dv"}
    assert all(c.bitwise_zero for c in report.crossings)


def test_a_scale_of_the_whole_tensor_crosses_documents_and_that_is_what_it_is_there_for():
    report = audit.isolation("leaky-per-tensor", **SMALL)
    assert not report.isolated
    assert report.as_promised


def test_too_few_documents():
    with pytest.raises(ValueError, match="lengths"):
        audit.isolation("exact", lengths=(5,))
