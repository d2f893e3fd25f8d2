"""Which backend a call takes: on devices of any capability, seen through tensors without storage."""

from __future__ import annotations

import re
import types
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import flamia
from flamia import Recipe, attention, flash_attn_func, flash_attn_varlen_func
from flamia.sm90 import kernels

HOPPER, AMPERE, B200, B300 = (9, 0), (8, 0), (10, 0), (10, 3)


@pytest.fixture
def device(monkeypatch):
    """Sets the capability of every CUDA device; tensors made in the test are fake."""

    def of(capability: tuple[int, int]) -> None:
        card = types.SimpleNamespace(major=capability[0], minor=capability[1])
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: card)

    with FakeTensorMode():
        yield of


@pytest.fixture
def asked(monkeypatch):
    """(recipe, backend) of every call of the forward operator."""
    seen: list[tuple[Recipe, str]] = []
    original = attention.attention_forward

    def record(*arguments):
        seen.append((flamia.recipe.recipe_from_key(arguments[-2]), arguments[-1]))
        return original(*arguments)

    monkeypatch.setattr(attention, "attention_forward", record)
    return seen


def tensors(head_dim=128, dtype=torch.bfloat16, heads=(4, 2, 2), device="cuda:1"):
    return [torch.empty(2, 40, n, head_dim, dtype=dtype, device=device) for n in heads]


def test_auto_takes_hopper_kernels_on_hopper(device, asked):
    device(HOPPER)
    q, k, v = tensors()
    o, lse = flash_attn_func(q, k, v, causal=True, return_lse=True)
    assert (o.shape, o.dtype, o.device) == (q.shape, q.dtype, q.device)
    assert (lse.shape, lse.dtype) == ((2, 4, 40), torch.float32)
    flash_attn_func(*tensors(64, torch.float16), backend="sm90", window_size=(8, 3))
    cu = torch.empty(3, dtype=torch.int64, device="cuda:1")
    flash_attn_varlen_func(*(x.flatten(0, 1) for x in tensors()), cu)
    flash_attn_func(*tensors(), recipe="mxfp8-exact")
    fast = Recipe(variant="folded", exponential="schraudolph", training=False)
    flash_attn_func(*tensors(), recipe=fast)
    flash_attn_func(*tensors(), recipe="nvfp4")
    assert [backend for _, backend in asked] == ["sm90"] * 6
    nvfp4 = Recipe(format="nvfp4", variant="folded")
    assert [recipe for recipe, _ in asked[-3:]] == [Recipe(variant="folded").exact(), fast, nvfp4]


def test_names_stand_for_the_folded_variant_on_hopper_and_recipes_for_themselves(device, asked):
    device(HOPPER)
    for name in ("mxfp8", "mxfp8-folded", "mxfp8-paper"):
        flash_attn_func(*tensors(), recipe=name)
        flash_attn_func(*tensors(), recipe=name, backend="reference")
    folded = Recipe(variant="folded", p_shift=8, tau=0.0)
    flash_attn_func(*tensors(), recipe=folded)
    block = Recipe(row_sum="weights")
    expected = [
        (Recipe(variant="folded"), "sm90"),
        (Recipe(), "reference"),
        (Recipe(variant="folded"), "sm90"),
        (Recipe(variant="folded"), "reference"),
        (Recipe(variant="folded", row_sum="weights"), "sm90"),
        (block, "reference"),
        (folded, "sm90"),
    ]
    assert asked == expected
    with pytest.raises(ValueError, match="variant='block' needs a tensor core with block scales; variant='folded'"):
        flash_attn_func(*tensors(), recipe=block)


@pytest.mark.parametrize("capability", [B200, B300])
def test_auto_takes_blackwell_kernels_on_blackwell(device, asked, capability):
    device(capability)
    q, k, v = tensors()
    o, lse = flash_attn_func(q, k, v, causal=True, return_lse=True)
    assert (o.shape, o.dtype, o.device) == (q.shape, q.dtype, q.device)
    assert (lse.shape, lse.dtype) == ((2, 4, 40), torch.float32)
    flash_attn_func(*tensors(64, torch.float16), backend="sm100", window_size=(8, 3))
    cu = torch.empty(3, dtype=torch.int64, device="cuda:1")
    flash_attn_varlen_func(*(x.flatten(0, 1) for x in tensors()), cu)
    for recipe in ("mxfp8-exact", "mxfp8-paper", Recipe(p_shift=8, tau=0.0)):
        flash_attn_func(*tensors(), recipe=recipe)
    expected = [*[Recipe()] * 3, Recipe().exact(), Recipe(row_sum="weights"), Recipe(p_shift=8, tau=0.0)]
    assert asked == [(recipe, "sm100") for recipe in expected]


@pytest.mark.parametrize("backend", ["auto", "sm100"])
@pytest.mark.parametrize(
    ("options", "said"),
    [
        (dict(recipe="nvfp4"), "format='nvfp4' has no Blackwell kernel, 'mxfp8' has"),
        (dict(recipe="fp4"), "format='fp4' has no Blackwell kernel, 'mxfp8' has"),
        (dict(recipe="mxfp8-folded"), "variant='folded' has no Blackwell kernel, 'block' has"),
        (dict(recipe="leaky-per-tensor"), "ablations of the scales run on the reference alone"),
        (dict(k_offset=True), "k_offset and v_offset run on the reference alone"),
    ],
    ids=str,
)
def test_what_blackwell_kernels_lack_is_named(device, options, said, backend):
    device(B300)
    offsets = {name: torch.empty(2, 128, device="cuda:1") for name in options if name.endswith("_offset")}
    with pytest.raises(ValueError, match=re.escape(said)) as caught:
        flash_attn_func(*tensors(), backend=backend, **(options | offsets))
    assert "backend='reference' runs this" in str(caught.value)
    flash_attn_func(*tensors(), backend="reference", **(options | offsets))


UNSUPPORTED: dict[str, tuple[dict[str, Any], str]] = {
    "fp4": (dict(recipe="fp4"), "format='fp4' has no Hopper kernel, 'mxfp8' and 'nvfp4' have"),
    "ablation": (dict(recipe="leaky-per-tensor"), "ablations of the scales run on the reference alone"),
    "k_offset": (dict(k_offset=True), "k_offset and v_offset run on the reference alone"),
    "v_offset": (dict(v_offset=True), "k_offset and v_offset run on the reference alone"),
}


@pytest.mark.parametrize("backend", ["auto", "sm90"])
@pytest.mark.parametrize("kind", UNSUPPORTED)
def test_what_hopper_kernels_lack_is_named(device, kind, backend):
    device(HOPPER)
    options, said = UNSUPPORTED[kind]
    offsets = {name: torch.empty(2, 128, device="cuda:1") for name in options if name.endswith("_offset")}
    with pytest.raises(ValueError, match=re.escape(said)) as caught:
        flash_attn_func(*tensors(), backend=backend, **(options | offsets))
    assert "backend='reference' runs this" in str(caught.value)
    flash_attn_func(*tensors(), backend="reference", **(options | offsets))


@pytest.mark.parametrize("head_dim", [16, 32, 96, 256])
def test_head_dims_without_a_hopper_kernel_are_named(device, head_dim):
    device(HOPPER)
    with pytest.raises(ValueError, match=rf"head_dim={head_dim} has no Hopper kernel, \(64, 128\) have"):
        flash_attn_func(*tensors(head_dim))


@pytest.mark.parametrize("needed", [0, 1, 2])
def test_a_gradient_is_refused_at_the_forward_call_where_there_is_no_backward(monkeypatch, needed):
    # Autograd needs a real device: these are on the CPU and taken for Hopper's.
    calls = []

    def forward(q, *rest):
        calls.append(rest[-3])
        return [torch.zeros_like(q), torch.zeros(q.shape[1], q.shape[0])]

    monkeypatch.setattr(attention, "_backend", lambda backend, device: "sm90")
    monkeypatch.setattr(attention, "attention_forward", forward)
    inputs = tensors(device="cpu")
    inputs[needed].requires_grad_()
    half = Recipe(variant="folded", exact_operands=True)
    said = "exact_ds=False with exact_operands=True has no Hopper backward, both or neither has; .*no_grad"
    with pytest.raises(ValueError, match=said):
        flash_attn_func(*inputs, recipe=half)
    assert calls == []
    with torch.no_grad():
        flash_attn_func(*inputs, recipe=half)
    flash_attn_func(*inputs)
    flash_attn_func(*inputs, recipe="nvfp4")
    assert calls == [False, True, True]  # training


@pytest.mark.parametrize(
    ("recipe", "said"),
    [
        (Recipe(variant="folded"), None),
        (Recipe(variant="folded").exact(), None),
        (
            Recipe(variant="folded", exact_operands=True),
            "exact_ds=False with exact_operands=True has no Hopper backward",
        ),
        (Recipe(variant="folded", format="nvfp4"), None),
        (Recipe(variant="folded", format="nvfp4").exact(), None),
        (Recipe(variant="folded", accumulator="fp32"), "accumulator='fp32' has no Hopper backward, 'fp16' has"),
    ],
    ids=str,
)
def test_what_the_hopper_backward_lacks_is_named(recipe, said):
    got = kernels.unsupported(recipe, 128, torch.bfloat16, training=True)
    assert got is None if said is None else said in str(got)
    assert kernels.unsupported(recipe, 128, torch.bfloat16, training=False) is None


@pytest.mark.parametrize(
    ("capability", "backend"),
    [
        *((c, b) for c in (AMPERE, (12, 0)) for b in ("auto", "sm90", "sm100")),
        (B200, "sm90"),
        (B300, "sm90"),
        (HOPPER, "sm100"),
    ],
)
def test_other_devices_are_refused(device, capability, backend):
    device(capability)
    major, minor = capability
    said = (
        f"backend='{backend}' has no kernels for cuda:1 of compute capability {major}.{minor}: "
        "'sm90' serves Hopper (9.0), 'sm100' serves Blackwell (10.0, 10.3)"
    )
    with pytest.raises(ValueError, match=re.escape(said)) as caught:
        flash_attn_func(*tensors(), backend=backend)
    assert "backend='reference' runs this" in str(caught.value)


@pytest.mark.parametrize("backend", ["sm90", "sm100"])
def test_kernels_by_name_on_a_cpu_are_refused(backend):
    with pytest.raises(ValueError, match=f"backend='{backend}' has no kernels for device cpu: 'sm90' serves Hopper"):
        flash_attn_func(*tensors(device="cpu"), backend=backend)


def test_a_bad_argument_is_said_before_anything_about_devices(device):
    device(AMPERE)
    with pytest.raises(ValueError, match="head_dim=80 is not supported"):
        flash_attn_func(*tensors(80))


def test_warmup_runs_calls_of_that_kind(asked):
    flamia.warmup(4, 2, 64, device="cpu", causal=True, window_size=(5, 0), recipe="nvfp4")
    flamia.warmup(4, 2, 64, device="cpu", dtype=torch.float16, training=False)
    assert [(recipe.format, backend) for recipe, backend in asked] == [("nvfp4", "reference"), ("mxfp8", "reference")]
    plan = flamia.last_plan()
    assert (plan.heads_q, plan.heads_kv, plan.head_dim, plan.training) == (4, 2, 64, False)
    with pytest.raises(ValueError, match="head_dim=80"):
        flamia.warmup(4, 2, 80, device="cpu")
