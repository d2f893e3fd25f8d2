"""The probe finds every deliberate leak, names the result it is in, and accuses nobody else."""

import dataclasses

import pytest
import torch

import flamia
from flamia import audit
from flamia.audit.causality import PERTURBED, probes, runs

SMALL = {"inputs": "gaussian", "tokens": 96, "heads": 1, "head_dim": 32}


@pytest.mark.parametrize(
    ("name", "tensors", "perturbed"),
    [
        ("per_tensor_v", {"o", "dq"}, {"v", "all"}),
        ("leak_in_o", {"o"}, {"v", "all"}),
        ("leak_in_lse", {"lse"}, {"k", "all"}),
        ("leak_in_dq", {"dq"}, {"k", "v", "q", "do", "all"}),
    ],
)
def test_a_leak_is_flagged_where_it_is_and_only_there(attention, name, tensors, perturbed):
    report = audit.causality(attention[name], **SMALL)
    found = {leak.tensor for leak in report.leaks if not leak.bitwise_zero}
    sources = {leak.perturbed for leak in report.leaks if not leak.bitwise_zero}
    assert found == tensors
    assert sources <= perturbed
    assert "all" in sources
    assert report.verdict == "leaks"
    assert report.flagged
    assert not report.as_promised
    assert all(verdict == "exact" for tensor, verdict in report.verdicts.items() if tensor not in tensors)
    worst = report.worst(next(iter(tensors)))
    assert worst is not None
    assert worst.rows_reached > 31
    assert worst.max_rel_change > 0


def test_clean_attention_is_bitwise_zero_everywhere(attention):
    report = audit.causality(attention["clean"], **{**SMALL, "inputs": ("gaussian", "heavy", "mean", "flat")})
    assert report.verdict == "exact"
    assert report.deterministic
    assert not report.forward_only
    assert len(report.leaks) == 4 * len(PERTURBED) * 3
    assert all(leak.bitwise_zero and leak.max_rel_change == 0 for leak in report.leaks)


def test_reach_is_counted_in_rows(attention):
    report = audit.causality(attention["leak_next_row"], **SMALL)
    assert report.verdicts == {"o": "confined", "lse": "exact", "dq": "exact"}
    assert report.worst("o").rows_reached == 1
    assert report.as_promised


def test_forward_only_targets_are_audited_without_dq(attention):
    report = audit.causality(attention["forward_only"], **SMALL)
    assert report.forward_only
    assert {leak.tensor for leak in report.leaks} == {"o", "lse"}
    assert report.worst("dq") is None


def test_noise_between_two_runs_is_not_called_a_leak(attention):
    report = audit.causality(attention["noisy"], **SMALL)
    assert not report.deterministic
    assert report.verdict == "noise"
    assert not report.flagged
    assert any(not leak.bitwise_zero for leak in report.leaks)


@pytest.mark.parametrize("name", ["torch-sdpa", "exact"])
def test_unquantized_attention_is_causal(name):
    report = audit.causality(name, inputs=("gaussian", "heavy"), tokens=300, head_dim=64, kv_heads=1)
    assert report.verdict == "exact"


EXACT = [name for name in flamia.recipes() if name.endswith("-exact")]


@pytest.mark.parametrize("name", EXACT)
@pytest.mark.parametrize("inputs", ["gaussian", "heavy"])
def test_exact_recipes_change_no_bit_with_every_future_token_replaced(name, inputs):
    report = audit.causality(name, inputs=inputs, tokens=140, heads=1)
    assert len(report.leaks) == 15
    assert report.verdict == "exact"
    assert report.as_promised


@pytest.mark.slow
@pytest.mark.parametrize("name", EXACT)
def test_exact_recipes_change_no_bit_over_several_tiles(name):
    assert audit.causality(name, inputs="mean", tokens=280, heads=2, kv_heads=1, head_dim=64).verdict == "exact"


@pytest.mark.matrix
@pytest.mark.parametrize("name", EXACT)
def test_exact_recipes_change_no_bit_with_more_tiles_and_kinds_of_inputs(name):
    assert audit.causality(name, inputs="heavy", tokens=416, heads=2, kv_heads=1, seed=5).verdict == "exact"
    assert audit.causality(name, inputs=("mean", "flat"), tokens=300, heads=1, head_dim=64).verdict == "exact"


@pytest.mark.parametrize("name", ["mxfp8", "mxfp8-folded", "nvfp4"])
def test_default_recipes_confine_the_output_to_31_rows(name):
    report = audit.causality(name, inputs=("gaussian", "heavy"), tokens=140, heads=1)
    assert all(leak.rows_reached <= 31 for leak in report.leaks if leak.tensor in ("o", "lse"))
    assert any(not leak.bitwise_zero for leak in report.leaks if leak.tensor == "o")
    assert report.as_promised
    assert report.flagged


def test_the_default_reaches_further_only_through_the_accumulator_of_dq():
    recipe = flamia.get_recipe("mxfp8")
    wide = audit.causality(recipe, inputs="heavy", tokens=140, heads=1)
    causal = dataclasses.replace(recipe, accumulator_scale="causal")
    assert wide.worst("dq").rows_reached > 31
    assert all(leak.rows_reached <= 31 for leak in audit.causality(causal, inputs="heavy", tokens=140, heads=1).leaks)


@pytest.mark.parametrize(
    ("name", "reach"),
    [("leaky-per-tensor", 32), ("leaky-floor-1x32", 1), ("leaky-up-1x32", 1), ("leaky-fp4-keys", 1)],
)
def test_leaky_recipes_are_caught(name, reach):
    report = audit.causality(name, inputs="gaussian", tokens=140, heads=1)
    assert report.flagged
    assert report.as_promised
    assert max(leak.rows_reached for leak in report.leaks if leak.tensor == "o") >= reach


def test_constant_offsets_leak_nothing():
    k_offset, v_offset = torch.full((1, 32), 0.3), torch.full((1, 32), 1.0)

    def smoothed(q, k, v, *, causal, return_lse):
        offsets = {"k_offset": k_offset, "v_offset": v_offset}
        return flamia.flash_attn_func(q, k, v, causal=causal, return_lse=return_lse, recipe="mxfp8-exact", **offsets)

    report = audit.causality(smoothed, inputs=("mean", "heavy"), tokens=140, heads=1, head_dim=32)
    assert report.verdict == "exact"
    assert {leak.tensor for leak in report.leaks} == {"o", "lse", "dq"}


def test_probes_cover_blocks_tiles_and_odd_lengths():
    for tokens in (2, 3, 33, 64, 96, 128, 129, 384, 1000):
        plan = probes(tokens)
        assert all(0 < p < length <= tokens for length, positions in plan for p in positions)
    (aligned, positions), (odd, _) = probes(384)
    assert (aligned, odd % 32 != 0) == (384, True)
    assert {p % 32 for p in positions} >= {0, 31}
    assert {p % 128 for p in positions} >= {0, 127}
    with pytest.raises(ValueError, match="tokens is 1"):
        probes(1)


def test_runs_counts_the_calls(attention):
    calls = []
    audit.causality(attention["clean"], advance=lambda: calls.append(1), **SMALL)
    assert len(calls) == runs(["gaussian"], SMALL["tokens"])
