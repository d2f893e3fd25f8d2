"""The list of Blackwell kernels: which call loads which, and why a call has none."""

import dataclasses
import re

import pytest
import torch
from reference_cases import make_plan

import flamia
from flamia.sm100 import kernels


def options(plan, dtype=torch.bfloat16):
    (kernel,) = kernels.call_kernels(plan, dtype, "sm_103a")
    assert kernel.arch == "sm_103a"
    return dict(kernel.options)


def test_a_kernel_is_what_changes_code():
    plan = make_plan(flamia.Recipe(), 8, 2, 128, None, 0, training=False)
    base = options(plan)
    assert (base["ratio"], base["left"], base["right"], base["per_token"]) == (4, False, True, False)
    assert options(dataclasses.replace(plan, softmax_scale=1.0, heads_q=16, heads_kv=4)) == base
    assert options(dataclasses.replace(plan, left=5)) == base | {"left": True, "dynamic": False}
    assert options(dataclasses.replace(plan, left=5)) == options(dataclasses.replace(plan, left=9))
    assert options(plan, torch.float16) == base | {"dtype": "Float16"}
    exact = dataclasses.replace(plan, recipe=flamia.Recipe(exact_operands=True))
    assert options(exact) == base | {"per_token": True}


def test_training_loads_a_backward():
    plan = make_plan(flamia.Recipe(), 8, 2, 128, None, 0, training=True)

    def backward(plan):
        forward, backward = kernels.call_kernels(plan, torch.bfloat16, "sm_100a")
        assert (forward,) == kernels.forward_kernels(plan, torch.bfloat16, "sm_100a")
        return dict(backward.options)

    base = backward(plan)
    assert (base["ratio"], base["left"], base["right"], base["rotate"]) == (4, False, True, True)
    assert not base["exact"] | base["causal_scale"]
    exact = dataclasses.replace(plan, recipe=flamia.Recipe().exact())
    assert backward(exact) == base | {"exact": True, "causal_scale": True}


def test_backwards_in_any_order_may_be_done_by_pairs():
    plan = dataclasses.replace(make_plan(flamia.Recipe(), 8, 2, 128, None, 0, training=True), deterministic=False)
    one, pair = (dict(k.options) for k in list(kernels.call_kernels(plan, torch.bfloat16, "sm_100a"))[1:])
    assert one == {name: pair.get(name, False) for name in one} | {"pairs": False}
    assert pair["pairs"]
    heads = dataclasses.replace(plan, heads_kv=8)
    rows = [(4096, 4096), (4096, 5000), (100, 32768)]
    assert [kernels.takes_pairs(heads, *row) for row in rows] == [True, False, True]
    assert [kernels.takes_pairs(plan, *row) for row in rows] == [False, False, True]
    for change in (dict(deterministic=True), dict(recipe=flamia.Recipe().exact())):
        other = dataclasses.replace(heads, **change)
        assert not kernels.takes_pairs(other, 1 << 20, 1 << 20)
        with pytest.raises(ValueError, match=r"pairs is True with deterministic=\w+ and exact_operands=\w+; pairs of"):
            kernels.backward_kernels(other, torch.bfloat16, "sm_100a", pairs=True)


@pytest.mark.parametrize(
    ("left", "right", "claimed"),
    [(None, None, False), (None, 0, True), (None, 3, True), (9, 0, False), (9, None, False)],
)
def test_causal_calls_claim_their_items(left, right, claimed):
    plan = make_plan(flamia.Recipe(), 2, 1, 64, left, right, training=False)
    assert options(plan)["dynamic"] is claimed is kernels.claims(plan)


@pytest.mark.parametrize(
    ("recipe", "change", "reason"),
    [
        (dict(format="nvfp4"), {}, "format='nvfp4' has no Blackwell kernel, 'mxfp8' has"),
        (dict(scale_rounding="floor"), {}, "ablations of the scales"),
        (dict(variant="folded"), {}, "variant='folded' has no Blackwell kernel, 'block' has"),
        (dict(exponential="schraudolph", training=False), {}, "exponential='schraudolph' has no Blackwell kernel"),
        ({}, dict(head_dim=96), r"head_dim=96 has no Blackwell kernel, \(64, 128\) have"),
        ({}, dict(dtype=torch.float32), "dtype torch.float32 has no Blackwell kernel"),
        ({}, dict(offsets=True), "k_offset and v_offset"),
        (dict(exact_ds=True), dict(training=True), "exact_ds=True with exact_operands=False has no Blackwell backward"),
        (dict(accumulator="fp32"), dict(training=True), "accumulator='fp32' has no Blackwell backward, 'fp16' has"),
    ],
    ids=str,
)
def test_calls_without_a_kernel_are_told_why(recipe, change, reason):
    call = dict(head_dim=128, dtype=torch.bfloat16, training=False) | change
    said = kernels.unsupported(flamia.Recipe(**recipe), call.pop("head_dim"), call.pop("dtype"), **call)
    assert said is not None
    assert re.search(reason, said)
    assert kernels.unsupported(flamia.Recipe(), 128, torch.bfloat16, training=False) is None
