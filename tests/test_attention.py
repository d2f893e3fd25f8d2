"""The public calls: FlashAttention's conventions, accuracy against FP64, gradients, offsets, and refusals."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import torch
from torch import Tensor

import flamia
from flamia import Recipe, flash_attn_func, flash_attn_varlen_func, operators
from flamia.reference.exact import exact_attention, exact_attention_backward

BF16 = torch.bfloat16
NAMES = ("o", "dq", "dk", "dv")

# Smallest cosine to FP64 of (o, dq, dk, dv) at a few hundred tokens. E4M3 keeps 3 mantissa bits, a relative error of
# about 2.6 % per operand: a cosine of .9985 for one product of two, .998 for a gradient made of three. NVFP4's E2M1
# keeps one bit (9 %), felt by scores only in the mixed route and everywhere in fp4, whose dq adds the noise of
# stochastic rounding. Means over long rows are in docs/numerics.md; short rows average fewer errors, hence the slack.
COSINES = {
    "mxfp8": (0.9970, 0.9950, 0.9950, 0.9970),
    "nvfp4": (0.9750, 0.9700, 0.9700, 0.9750),
    "fp4": (0.9550, 0.9000, 0.9000, 0.9550),
}
# Largest error of lse with N(0, 1) inputs: that of the worst score among a few hundred rows, where a row sees few keys.
LSE_ERRORS = {"mxfp8": 0.25, "nvfp4": 0.8, "fp4": 0.8}
MASKS = {"full": {}, "causal": dict(causal=True), "window": dict(window_size=(40, 17))}
LENGTHS = {"equal": (160, 160), "more keys": (50, 187), "more queries": (130, 40)}


def random(*shapes: tuple[int, ...], seed: int = 0, dtype: torch.dtype = BF16, mean: float = 0.0) -> list[Tensor]:
    g = torch.Generator().manual_seed(seed)
    return [(torch.randn(s, generator=g) + mean).to(dtype) for s in shapes]


def inputs(len_q: int, len_k: int, heads: int = 2, kv: int = 1, d: int = 32, batch: int = 1, **kwargs: Any):
    """q, k, v, do of a batched call."""
    q, k = (batch, len_q, heads, d), (batch, len_k, kv, d)
    return random(q, k, k, q, **kwargs)


def cosine(a: Tensor, b: Tensor) -> float:
    return torch.cosine_similarity(a.double().flatten(), b.double().flatten(), 0).item()


def gradients(
    q: Tensor, k: Tensor, v: Tensor, do: Tensor | None, dlse: Tensor | None = None, call=flash_attn_func, **kw
):
    """o, lse, dq, dk, dv."""
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    o, lse = call(q, k, v, return_lse=True, **kw)
    pairs = [(y, dy) for y, dy in ((o, do), (lse, dlse)) if dy is not None]
    grads = torch.autograd.grad([y for y, _ in pairs], (q, k, v), [dy for _, dy in pairs])
    return o.detach(), lse.detach(), *grads


def check_accuracy(recipe: str, q: Tensor, k: Tensor, v: Tensor, do: Tensor, **mask: Any) -> None:
    o, lse, *grads = gradients(q, k, v, do, recipe=recipe, **mask)
    o64, lse64 = exact_attention(q, k, v, **mask)
    expected = (o64, *exact_attention_backward(q, k, v, do, **mask))
    form = flamia.get_recipe(recipe).format
    for name, x, y, least in zip(NAMES, (o, *grads), expected, COSINES[form], strict=True):
        assert x.dtype == q.dtype
        assert x.isfinite().all(), name
        assert cosine(x, y) >= least, f"{name}: cosine {cosine(x, y):.4f} is below {least}"
        assert x.double().norm() == pytest.approx(y.norm().item(), rel=0.15 if form == "fp4" else 0.05), name
    assert lse.dtype == torch.float32
    unseen = lse64 == -math.inf
    assert torch.equal(lse == -math.inf, unseen)
    assert (lse - lse64)[~unseen].abs().max() < LSE_ERRORS[form]
    assert abs((lse - lse64)[~unseen].mean()) < LSE_ERRORS[form] / 8, "lse is biased"


# ----------------------------------------------------------------------------------------------------- accuracy


@pytest.mark.parametrize("recipe", flamia.recipes())
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("lengths", LENGTHS)
def test_accuracy(recipe: str, mask: str, lengths: str):
    check_accuracy(recipe, *inputs(*LENGTHS[lengths], d=64), **MASKS[mask])


@pytest.mark.parametrize("recipe", ["mxfp8", "nvfp4", "fp4", "mxfp8-folded", "mxfp8-exact"])
@pytest.mark.parametrize("d", [16, 32, 64, 96, 128, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_head_dims_and_dtypes(recipe: str, d: int, dtype: torch.dtype):
    check_accuracy(recipe, *inputs(140, 140, d=d, dtype=dtype, seed=d), causal=True)


@pytest.mark.parametrize("recipe", ["mxfp8", "nvfp4", "fp4", "nvfp4-folded"])
@pytest.mark.parametrize(("heads", "kv"), [(2, 2), (4, 2), (3, 1), (9, 3), (8, 1)])
def test_head_ratios(recipe: str, heads: int, kv: int):
    """MHA, GQA with even and odd ratios, MQA: each query head uses its own key head."""
    check_accuracy(recipe, *inputs(90, 90, heads, kv, batch=2, seed=heads), causal=True)


@pytest.mark.parametrize("scale", [0.05, 1.0, 1])
def test_softmax_scale(scale: float):
    q, k, v, do = inputs(100, 100)
    if scale == 1:  # scores of a few units, as a trained model has them
        q = q * 0.25
    check_accuracy("mxfp8", q, k, v, do, softmax_scale=scale, causal=True)


@pytest.mark.parametrize("recipe", ["mxfp8", "nvfp4-exact", "fp4", "mxfp8-folded"])
def test_packed_accuracy(recipe: str):
    lengths_q, lengths_k = torch.tensor([0, 1, 65, 0, 130]), torch.tensor([0, 3, 65, 9, 200])
    cu_q, cu_k = lengths_q.cumsum(0).to(torch.int32), lengths_k.cumsum(0).to(torch.int32)
    q, k, v, do = random((196, 4, 64), (277, 2, 64), (277, 2, 64), (196, 4, 64))
    call = dict(cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, causal=True)
    o, _, *grads = gradients(q, k, v, do, call=flash_attn_varlen_func, recipe=recipe, **call)
    expected = (exact_attention(q, k, v, **call)[0], *exact_attention_backward(q, k, v, do, **call))
    for name, x, y, least in zip(NAMES, (o, *grads), expected, COSINES[flamia.get_recipe(recipe).format], strict=True):
        assert cosine(x, y) >= least, name


# -------------------------------------------------------------------------------------------------- conventions


def test_bottom_right_alignment():
    """The last query sits on the last key; with more queries than keys the first rows see none."""
    v = torch.zeros(1, 5, 1, 32, dtype=BF16)
    v[0, torch.arange(5), 0, torch.arange(5)] = 1.0  # o shows which keys a row saw
    zeros = torch.zeros(1, 3, 1, 32, dtype=BF16)
    o = flash_attn_func(zeros, torch.zeros_like(v), v, causal=True)
    seen = o[0, :, 0, :5] > 0
    assert seen.tolist() == [[True] * 3 + [False] * 2, [True] * 4 + [False], [True] * 5]
    o, lse = flash_attn_func(torch.zeros(1, 7, 1, 32, dtype=BF16), v, v, causal=True, return_lse=True)
    assert (o[0, :2] == 0).all()
    assert (lse[0, 0, :2] == -math.inf).all()
    assert (o[0, 2:, 0, :5] > 0).tolist() == [[j <= i for j in range(5)] for i in range(5)]
    assert lse[0, 0, 2:].tolist() == pytest.approx([math.log(i + 1) for i in range(5)], abs=1e-6)


@pytest.mark.parametrize(
    ("window", "causal", "left", "right"),
    [((1, 0), False, 1, 0), ((2, 1), False, 2, 1), ((0, 0), False, 0, 0), ((1, -1), True, 1, 0), ((1, 3), True, 1, 0)],
)
def test_window_sides(window: tuple[int, int], causal: bool, left: int, right: int):
    v = torch.zeros(1, 6, 1, 32, dtype=BF16)
    v[0, torch.arange(6), 0, torch.arange(6)] = 1.0
    o = flash_attn_func(torch.zeros_like(v), torch.zeros_like(v), v, window_size=window, causal=causal)
    assert (o[0, :, 0, :6] > 0).tolist() == [[i - left <= j <= i + right for j in range(6)] for i in range(6)]


def test_unbounded_windows_are_one():
    q, k, v, do = inputs(70, 70)
    plain = gradients(q, k, v, do)
    for window in (None, (-1, -1), (None, None), [-1, None], (70, 70)):
        assert all(map(torch.equal, plain, gradients(q, k, v, do, window_size=window)))
    causal = gradients(q, k, v, do, causal=True)
    for window in ((-1, 0), (None, 0), (70, 0)):
        assert all(map(torch.equal, causal, gradients(q, k, v, do, window_size=window)))
    assert not torch.equal(plain[0], causal[0])


def test_default_scale_and_recipe():
    q, k, v, do = inputs(70, 70, d=64)
    for same in (dict(softmax_scale=0.125), dict(recipe=Recipe()), dict(backend="reference"), dict(deterministic=True)):
        assert all(map(torch.equal, gradients(q, k, v, do), gradients(q, k, v, do, **same)))
    assert not torch.equal(flash_attn_func(q, k, v), flash_attn_func(q, k, v, softmax_scale=0.13))


def test_return_lse_and_its_layouts():
    q, k, v, _ = inputs(20, 33, heads=4, kv=2, batch=3)
    o = flash_attn_func(q, k, v)
    assert isinstance(o, Tensor)
    assert o.shape == q.shape
    o2, lse = flash_attn_func(q, k, v, return_lse=True)
    assert torch.equal(o, o2)
    assert lse.shape == (3, 4, 20)
    _, lse64 = exact_attention(q, k, v)
    assert cosine(lse, lse64) > 0.9999
    cu_q, cu_k = (torch.arange(4, dtype=torch.int32) * n for n in (20, 33))
    packed, lse_packed = flash_attn_varlen_func(*(x.flatten(0, 1) for x in (q, k, v)), cu_q, cu_k, return_lse=True)
    assert torch.equal(packed, o.flatten(0, 1))
    assert lse_packed.shape == (4, 60)
    assert torch.equal(lse_packed.view(4, 3, 20).transpose(0, 1), lse)


def test_kinds_of_offsets_and_lengths():
    q, k, v = random((50, 2, 32), (50, 1, 32), (50, 1, 32))
    cu = torch.tensor([0, 20, 20, 47], dtype=torch.int32)
    expected = flash_attn_varlen_func(q, k, v, cu, causal=True)
    wide = torch.stack((cu, cu + 1), 1)[:, 0]
    assert not wide.is_contiguous()
    lengths: list[Any] = [27, 1000, torch.tensor(27), torch.tensor([27], dtype=torch.int64), None]
    for offset in (cu.long(), wide):
        assert torch.equal(flash_attn_varlen_func(q, k, v, offset, causal=True), expected)
        assert torch.equal(flash_attn_varlen_func(q, k, v, cu, offset, causal=True), expected)
    for longest in lengths:
        assert torch.equal(flash_attn_varlen_func(q, k, v, cu, None, longest, longest, causal=True), expected)


def test_strides_do_not_matter():
    """Projections cut from one tensor, heads first in memory, expanded key heads."""
    packed = random((2, 30, 3, 4, 32))[0]
    q, k, v = packed.unbind(2)
    assert not q.is_contiguous()
    expected = flash_attn_func(q.contiguous(), k.contiguous(), v.contiguous(), causal=True)
    assert torch.equal(flash_attn_func(q, k, v, causal=True), expected)
    turned = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    assert torch.equal(flash_attn_func(*turned, causal=True), expected)
    shared = k[:, :, :1].expand(-1, -1, 4, -1)
    one = gradients(q, shared.contiguous(), v, q)
    assert all(map(torch.equal, gradients(q, shared, v, q), one))


@pytest.mark.parametrize("recipe", flamia.recipes())
@pytest.mark.parametrize("shape", [(0, 5, 5), (2, 0, 5), (2, 5, 0), (2, 0, 0)])
def test_empty_batches(recipe: str, shape: tuple[int, int, int]):
    batch, len_q, len_k = shape
    q, k, v, do = inputs(len_q, len_k, batch=batch)
    o, lse, dq, dk, dv = gradients(q, k, v, do, torch.ones(batch, 2, len_q), recipe=recipe)
    assert o.shape == q.shape
    assert lse.shape == (batch, 2, len_q)
    assert (lse == -math.inf).all()
    for x, like in ((o, q), (dq, q), (dk, k), (dv, v)):
        assert x.shape == like.shape
        assert (x == 0).all()


@pytest.mark.parametrize("recipe", flamia.recipes())
def test_no_document_at_all(recipe: str):
    q, k, v = (x.squeeze(0) for x in inputs(6, 6)[:3])
    cu = torch.zeros(1, dtype=torch.int32)
    o, _, *grads = gradients(q, k, v, torch.ones_like(q), call=flash_attn_varlen_func, cu_seqlens_q=cu, recipe=recipe)
    assert all((x == 0).all() for x in (o, *grads))


def test_inputs_are_left_alone():
    tensors = inputs(40, 40)
    copies = [x.clone() for x in tensors]
    gradients(*tensors, causal=True)
    assert all(map(torch.equal, tensors, copies))


# ---------------------------------------------------------------------------------------------------- gradients


@pytest.mark.parametrize("recipe", flamia.recipes())
@pytest.mark.parametrize("both", [False, True], ids=["lse alone", "o and lse"])
def test_gradient_through_lse(recipe: str, both: bool):
    """Alone, too: in the folded variant do = 0 must not take the gradient of lse with it."""
    q, k, v, do = inputs(70, 90, heads=4, kv=2, batch=2)
    dlse = torch.randn(2, 4, 70, generator=torch.Generator().manual_seed(1)) * 2
    _, _, *grads = gradients(q, k, v, do if both else None, dlse, recipe=recipe, causal=True)
    expected = exact_attention_backward(q, k, v, do * float(both), dlse=dlse, causal=True)
    least = {"mxfp8": 0.995, "nvfp4": 0.97, "fp4": 0.89}[flamia.get_recipe(recipe).format]
    for name, x, y in zip(("dq", "dk", "dv")[: 3 if both else 2], grads, expected, strict=False):
        assert cosine(x, y) >= least, f"{name}: {cosine(x, y):.4f}"
        assert x.double().norm() == pytest.approx(y.norm().item(), rel=0.2)
    if not both:
        assert (grads[2] == 0).all()


@pytest.mark.parametrize("recipe", ["mxfp8", "mxfp8-exact", "fp4", "mxfp8-folded", "mxfp8-folded-exact"])
def test_gradient_through_lse_of_some_rows(recipe: str):
    """Rows with do = 0 among others: neither kind may silence, or set the scale of, the other."""
    q, k, v, do = inputs(300, 300, d=64)
    do[:, ::3] = 0
    do[:, 1::3] *= 100
    dlse = torch.randn(1, 2, 300, generator=torch.Generator().manual_seed(1))
    dlse[..., 1::3] = 0
    _, _, *grads = gradients(q, k, v, do, dlse, recipe=recipe, causal=True)
    expected = exact_attention_backward(q, k, v, do, dlse=dlse, causal=True)
    # A tile's blocks of dS hold rows of both kinds: small rows keep what E4M3's 17 binades leave them.
    least = {"mxfp8": 0.98, "fp4": 0.85}[flamia.get_recipe(recipe).format]
    for rows in (slice(0, None, 3), slice(1, None, 3), slice(2, None, 3)):
        assert cosine(grads[0][:, rows], expected[0][:, rows]) >= least


@pytest.mark.parametrize("recipe", flamia.recipes())
def test_gradient_of_an_infinite_lse_is_dropped(recipe: str):
    """Merging attention over parts of the keys gives NaN gradients where lse is -inf: the constant has none."""
    q, k, v, do = inputs(20, 8)
    extra: dict[str, Any] = dict(recipe=recipe, causal=True)
    dlse = torch.randn(1, 2, 20, generator=torch.Generator().manual_seed(1))
    for offset in (None, torch.ones(1, 32)):
        zero = gradients(q, k, v, do, dlse.index_fill(2, torch.arange(12), 0.0), k_offset=offset, **extra)
        assert (zero[1][..., :12] == -math.inf).all()
        assert (zero[2][:, :12] == 0).all()
        for value in (math.nan, math.inf, 1e30):
            garbage = dlse.index_fill(2, torch.arange(12), value)
            assert all(map(torch.equal, zero, gradients(q, k, v, do, garbage, k_offset=offset, **extra)))


@pytest.mark.parametrize("needed", ["q", "k", "v", "qv", "kv"])
def test_gradient_only_for_inputs_that_need_one(needed: str):
    tensors = dict(zip("qkv", inputs(40, 40)[:3], strict=True))
    everything = dict(zip("qkv", gradients(*tensors.values(), torch.ones_like(tensors["q"]))[2:], strict=True))
    leaves = {n: x.clone().requires_grad_(n in needed) for n, x in tensors.items()}
    flash_attn_func(**leaves).sum().backward()
    for name, leaf in leaves.items():
        if name in needed:
            assert torch.equal(leaf.grad, everything[name])
        else:
            assert leaf.grad is None


def test_unused_lse_or_output_has_no_gradient():
    q, k, v, do = inputs(40, 40)
    both = gradients(q, k, v, do, torch.zeros(1, 2, 40))
    assert all(map(torch.equal, both, gradients(q, k, v, do)))


@pytest.mark.parametrize("recipe", flamia.recipes())
def test_without_gradients_nothing_is_kept(recipe: str, monkeypatch: pytest.MonkeyPatch):
    kept: list[int] = []
    original = operators.attention_forward

    def spy(*args: Any) -> list[Tensor]:
        result = original(*args)
        kept.append(len(result))
        return result

    monkeypatch.setattr(flamia.attention, "attention_forward", spy)
    q, k, v, _ = inputs(40, 40)
    plain = flash_attn_func(q, k, v, recipe=recipe, causal=True)
    assert plain.grad_fn is None
    for x in (q, k, v):
        x.requires_grad_()
    with torch.no_grad():
        quiet = flash_attn_func(q, k, v, recipe=recipe, causal=True)
    with torch.inference_mode():
        inference = flash_attn_func(q, k, v, recipe=recipe, causal=True)
    assert not quiet.requires_grad
    assert kept == [2, 2, 2]
    recorded = flash_attn_func(q, k, v, recipe=recipe, causal=True)
    assert recorded.requires_grad
    assert kept[-1] > 4
    assert torch.equal(plain, quiet)
    assert torch.equal(plain, inference)
    assert torch.equal(plain, recorded), "training and inference must give the same output"


def test_payloads_are_freed_with_the_graph():
    q, k, v, do = inputs(40, 40)
    q.requires_grad_()
    o = flash_attn_func(q, k, v)
    o.backward(do)
    with pytest.raises(RuntimeError, match="second time"):
        o.backward(do)


# ----------------------------------------------------------------------------------------------------- inference


@pytest.mark.parametrize(
    "recipe",
    [
        Recipe(exponential="schraudolph", training=False),
        Recipe(format="nvfp4", exponential="schraudolph", training=False),
        Recipe(variant="folded", exponential="schraudolph", training=False),
        Recipe(format="fp4", exponential="mitchell", training=False),
    ],
    ids=lambda r: f"{r.format}-{r.variant}-{r.exponential}",
)
def test_inference_recipes(recipe: Recipe):
    q, k, v, _ = inputs(200, 200, d=64)
    o, lse = flash_attn_func(q, k, v, recipe=recipe, causal=True, return_lse=True)
    o64, lse64 = exact_attention(q, k, v, causal=True)
    assert cosine(o, o64) >= COSINES[recipe.format][0] - 0.002
    assert (lse - lse64).abs().max() < LSE_ERRORS[recipe.format] + 0.05
    for name in "qkv":
        tensors = {n: x.clone().requires_grad_(n == name) for n, x in zip("qkv", (q, k, v), strict=True)}
        with pytest.raises(ValueError, match=r"training=False.*torch\.no_grad\(\).*training=True"):
            flash_attn_func(**tensors, recipe=recipe)
        with torch.no_grad():
            assert torch.equal(flash_attn_func(**tensors, recipe=recipe, causal=True), o)


def test_inference_only_recipe_with_the_exact_exponential_refuses_gradients_too():
    q, k, v, _ = inputs(8, 8)
    with pytest.raises(ValueError, match="training=False"):
        flash_attn_func(q.requires_grad_(), k, v, recipe=Recipe(training=False))


# ------------------------------------------------------------------------------------------------------- offsets


def offset_case(recipe: str, *, k_offset: bool, v_offset: bool, causal: bool, dlse: Tensor | None):
    q, k, v, do = inputs(192, 192, heads=4, kv=2, d=64, seed=3)
    k = (k.float() + torch.linspace(-8, 8, 64)).to(BF16)  # channels with large means
    v = (v.float() * 0.1 + 1).to(BF16)
    do = (do.float() * 0.1 + 1).to(BF16)
    other = inputs(192, 192, heads=4, kv=2, d=64, seed=4)
    kappa = (other[1].float() + torch.linspace(-8, 8, 64)).mean((0, 1))  # means of another sample: nothing can leak
    mu = (other[2].float() * 0.1 + 1).mean((0, 1))
    offsets = dict(k_offset=kappa if k_offset else None, v_offset=mu if v_offset else None)
    o, lse, *grads = gradients(q, k, v, do, dlse, recipe=recipe, causal=causal, **offsets)
    o64, lse64 = exact_attention(q, k, v, causal=causal)
    grads64 = exact_attention_backward(q, k, v, do, dlse=dlse, causal=causal)
    pairs = zip(("o", "lse", "dq", "dk", "dv"), (o, lse, *grads), (o64, lse64, *grads64), strict=True)
    return {n: ((x - y).norm() / y.norm()).item() for n, x, y in pairs}


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("recipe", ["mxfp8", "mxfp8-exact", "nvfp4", "fp4", "mxfp8-folded", "nvfp4-folded-exact"])
def test_offsets_bring_results_closer_to_fp64(recipe: str, causal: bool):
    """FP64 attention of the original inputs stays the target: the offsets are removed and added back exactly."""
    plain = offset_case(recipe, k_offset=False, v_offset=False, causal=causal, dlse=None)
    only_v = offset_case(recipe, k_offset=False, v_offset=True, causal=causal, dlse=None)
    only_k = offset_case(recipe, k_offset=True, v_offset=False, causal=causal, dlse=None)
    both = offset_case(recipe, k_offset=True, v_offset=True, causal=causal, dlse=None)
    assert only_v["o"] < plain["o"]
    assert only_v["dq"] < plain["dq"]
    assert only_k["lse"] < plain["lse"] / 2
    assert both["o"] < plain["o"] / 2
    assert both["dq"] < plain["dq"] / 2
    assert both["dk"] < plain["dk"] / 2
    # v_offset reaches lse through the weights that V's exponents are folded into, at the scale of one rounding.
    assert both["lse"] == pytest.approx(only_k["lse"], rel=1e-3)
    bound = {"mxfp8": 0.1, "nvfp4": 0.25, "fp4": 0.6}[flamia.get_recipe(recipe).format]
    assert max(both[n] for n in ("dq", "dk", "dv")) < bound
    assert both["o"] < 0.02


@pytest.mark.parametrize("recipe", ["mxfp8", "mxfp8-exact", "nvfp4", "mxfp8-folded"])
def test_gradient_through_lse_with_k_offset(recipe: str):
    """lse of the original keys depends on q through q . kappa as well: dq gains dlse * kappa * softmax_scale."""
    dlse = torch.randn(1, 4, 192, generator=torch.Generator().manual_seed(9)) + 3
    plain = offset_case(recipe, k_offset=False, v_offset=True, causal=True, dlse=dlse)
    both = offset_case(recipe, k_offset=True, v_offset=True, causal=True, dlse=dlse)
    assert both["dq"] < 0.02  # the large part of dq is exact
    assert both["dk"] < {"mxfp8": 0.1, "nvfp4": 0.25}[flamia.get_recipe(recipe).format]
    assert both["dq"] < plain["dq"] / 2
    assert both["dk"] < plain["dk"]


@pytest.mark.parametrize("recipe", flamia.recipes())
def test_zero_offsets_change_nothing(recipe: str):
    q, k, v, do = inputs(70, 20)
    zero = torch.zeros(1, 32)
    dlse = torch.randn(1, 2, 70, generator=torch.Generator().manual_seed(1))
    a = gradients(q, k, v, do, dlse, recipe=recipe, causal=True)
    b = gradients(q, k, v, do, dlse, recipe=recipe, causal=True, k_offset=zero, v_offset=zero.to(torch.float64))
    assert all(map(torch.equal, a, b))


def test_offsets_leave_rows_without_a_key_alone():
    q, k, v, do = inputs(9, 4)
    ones = torch.ones(1, 32)
    o, lse, dq, _, _ = gradients(q, k, v, do, torch.ones(1, 2, 9), causal=True, k_offset=ones, v_offset=ones)
    assert (o[:, :5] == 0).all()
    assert (lse[..., :5] == -math.inf).all()
    assert (dq[:, :5] == 0).all()
    assert (dq[:, 5:] != 0).any()


# ------------------------------------------------------------------------------------------------------ bad input


def bad(**changes: Any) -> dict[str, Any]:
    q, k, v = random((2, 8, 4, 32), (2, 8, 2, 32), (2, 8, 2, 32))
    return {**dict(q=q, k=k, v=v), **changes}


def shaped(*shape: int, dtype: torch.dtype = BF16, device: str = "cpu") -> Tensor:
    return torch.zeros(shape, dtype=dtype, device=device)


KV = (2, 8, 2, 32)
BAD_CALLS: dict[str, tuple[dict[str, Any], type[Exception], list[str]]] = {
    # what changes, the error, and what its message must hold: argument, value, what is allowed
    "rank 3": (dict(q=shaped(8, 4, 32)), ValueError, ["q must", "[batch, tokens, heads, head_dim]", "(8, 4, 32)"]),
    "rank 5": (dict(v=shaped(1, *KV)), ValueError, ["v must", "[batch, tokens, heads, head_dim]", "(1, 2, 8, 2, 32)"]),
    "no tensor": (dict(k=[1.0]), ValueError, ["k must be a tensor", "list"]),
    "batch": (dict(k=shaped(3, 8, 2, 32)), ValueError, ["k", "batch size 2", "3"]),
    "v unlike k": (dict(v=shaped(2, 9, 2, 32)), ValueError, ["v", "(2, 8, 2, 32)", "(2, 9, 2, 32)"]),
    "float64": (dict(q=shaped(2, 8, 4, 32, dtype=torch.float64)), TypeError, ["q", "float64", "bfloat16", "float16"]),
    "float32 v": (dict(v=shaped(*KV, dtype=torch.float32)), TypeError, ["v", "float32", "bfloat16", "float16"]),
    "int8 k": (dict(k=shaped(*KV, dtype=torch.int8)), TypeError, ["k", "int8", "bfloat16"]),
    "mixed dtypes": (dict(k=shaped(*KV, dtype=torch.float16)), TypeError, ["k", "float16", "q's dtype torch.bfloat16"]),
    "k elsewhere": (dict(k=shaped(*KV, device="meta")), ValueError, ["k", "cpu", "meta"]),
    "v elsewhere": (dict(v=shaped(*KV, device="meta")), ValueError, ["v", "cpu", "meta"]),
    "odd head dim": (
        {n: shaped(2, 8, 2, 80) for n in "qkv"},
        ValueError,
        ["head_dim=80", "(16, 32, 64, 96, 128, 256)"],
    ),
    "head dims differ": (dict(k=shaped(2, 8, 2, 64), v=shaped(2, 8, 2, 64)), ValueError, ["k", "head_dim 32", "64"]),
    "head ratio": (
        dict(k=shaped(2, 8, 3, 32), v=shaped(2, 8, 3, 32)),
        ValueError,
        ["multiple", "4 query", "3 key/value"],
    ),
    "more key heads": (
        dict(k=shaped(2, 8, 8, 32), v=shaped(2, 8, 8, 32)),
        ValueError,
        ["multiple", "4 query", "8 key/value"],
    ),
    "no key heads": (
        dict(k=shaped(2, 8, 0, 32), v=shaped(2, 8, 0, 32)),
        ValueError,
        ["multiple", "4 query", "0 key/value"],
    ),
    "no query heads": (dict(q=shaped(2, 8, 0, 32)), ValueError, ["multiple", "0 query"]),
    "scale 0": (dict(softmax_scale=0.0), ValueError, ["softmax_scale", "0.0", "above 0"]),
    "scale below 0": (dict(softmax_scale=-1.0), ValueError, ["softmax_scale", "-1.0", "above 0"]),
    "scale nan": (dict(softmax_scale=math.nan), ValueError, ["softmax_scale", "nan", "finite"]),
    "scale inf": (dict(softmax_scale=math.inf), ValueError, ["softmax_scale", "inf", "finite"]),
    "scale text": (dict(softmax_scale="1"), ValueError, ["softmax_scale", "'1'", "number"]),
    "window below -1": (dict(window_size=(-2, 0)), ValueError, ["window_size", "(-2, 0)", "-1 or None"]),
    "window fraction": (dict(window_size=(0.5, 0)), ValueError, ["window_size", "0.5", "integers"]),
    "window bool": (dict(window_size=(True, 0)), ValueError, ["window_size", "True", "integers"]),
    "window of one": (dict(window_size=(3,)), ValueError, ["window_size", "(3,)", "(left, right)"]),
    "window number": (dict(window_size=128), ValueError, ["window_size", "128", "(left, right)"]),
    "recipe name": (dict(recipe="mxfp9"), ValueError, ["recipe='mxfp9'", *flamia.recipes()]),
    "recipe kind": (dict(recipe=None), TypeError, ["recipe", "NoneType", "flamia.Recipe"]),
    "backend": (dict(backend="cuda"), ValueError, ["backend='cuda'", "'auto'", "'reference'"]),
    "rotation": (
        dict({n: shaped(2, 8, 2, 96) for n in "qkv"}, recipe=Recipe(rotate=True)),
        ValueError,
        ["rotate=True", "power-of-two", "96"],
    ),
    "groups": (
        dict({n: shaped(2, 8, 2, 16) for n in "qkv"}, recipe="leaky-up-1x32"),
        ValueError,
        ["operand_scale='groups'", "multiple of 32", "16"],
    ),
    "k_offset shape": (dict(k_offset=torch.zeros(4, 32)), ValueError, ["k_offset", "(2, 32)", "(4, 32)"]),
    "v_offset kind": (dict(v_offset=1.0), ValueError, ["v_offset", "[kv heads, head_dim]", "float"]),
    "v_offset dtype": (
        dict(v_offset=torch.zeros(2, 32, dtype=torch.int32)),
        ValueError,
        ["v_offset", "floating point", "int32"],
    ),
    "k_offset elsewhere": (
        dict(k_offset=torch.zeros(2, 32, device="meta")),
        ValueError,
        ["k_offset", "cpu", "meta"],
    ),
    "k_offset with gradient": (
        dict(k_offset=torch.zeros(2, 32, requires_grad=True)),
        ValueError,
        ["k_offset", "constant", "k_offset.detach()"],
    ),
}


@pytest.mark.parametrize("kind", BAD_CALLS)
def test_bad_input(kind: str):
    changes, error, words = BAD_CALLS[kind]
    with pytest.raises(error) as caught:
        flash_attn_func(**bad(**changes))
    assert type(caught.value) is error
    for word in words:
        assert word in str(caught.value), str(caught.value)


def test_device_without_a_backend_is_named():
    with pytest.raises(ValueError, match=r"q must be on a CPU or CUDA device, got meta"):
        flash_attn_func(*(shaped(2, 8, 2, 32, device="meta") for _ in range(3)))


INT = torch.int32
BAD_OFFSETS: dict[str, tuple[dict[str, Any], type[Exception], list[str]]] = {
    "list": (dict(cu_seqlens_q=[0, 8]), ValueError, ["cu_seqlens_q", "[documents + 1]", "list"]),
    "rank 2": (
        dict(cu_seqlens_q=torch.zeros(1, 2, dtype=INT)),
        ValueError,
        ["cu_seqlens_q", "[documents + 1]", "(1, 2)"],
    ),
    "empty": (dict(cu_seqlens_q=torch.zeros(0, dtype=INT)), ValueError, ["cu_seqlens_q", "[documents + 1]", "(0,)"]),
    "float": (dict(cu_seqlens_q=torch.tensor([0.0, 8.0])), TypeError, ["cu_seqlens_q", "int32", "int64", "float32"]),
    "int16 keys": (
        dict(cu_seqlens_k=torch.tensor([0, 8], dtype=torch.int16)),
        TypeError,
        ["cu_seqlens_k", "int32", "int16"],
    ),
    "elsewhere": (
        dict(cu_seqlens_q=torch.zeros(2, dtype=INT, device="meta")),
        ValueError,
        ["cu_seqlens_q", "cpu", "meta"],
    ),
    "first not 0": (dict(cu_seqlens_q=torch.tensor([1, 8])), ValueError, ["cu_seqlens_q[0] is 1", "start at 0"]),
    "first below 0": (dict(cu_seqlens_q=torch.tensor([-3, 8])), ValueError, ["cu_seqlens_q[0]", "start at 0"]),
    "decreasing": (
        dict(cu_seqlens_q=torch.tensor([0, 5, 3, 8])),
        ValueError,
        ["cu_seqlens_q[2] = 3", "cu_seqlens_q[1] = 5", "must not decrease"],
    ),
    "past the end": (dict(cu_seqlens_q=torch.tensor([0, 9])), ValueError, ["cu_seqlens_q[-1] is 9", "8 tokens"]),
    "keys past the end": (
        dict(cu_seqlens_k=torch.tensor([0, 12])),
        ValueError,
        ["cu_seqlens_k[-1] is 12", "8 tokens"],
    ),
    "past int32": (dict(cu_seqlens_q=torch.tensor([0, 2**32 + 8])), ValueError, ["cu_seqlens_q[-1]", "8 tokens"]),
    "far below int32": (dict(cu_seqlens_q=torch.tensor([-(2**32), 8])), ValueError, ["cu_seqlens_q[0]", "start at 0"]),
    "counts differ": (
        dict(cu_seqlens_k=torch.tensor([0, 4, 8])),
        ValueError,
        ["cu_seqlens_k", "cu_seqlens_q, 1", "got 2"],
    ),
    "keys without offsets": (
        dict(k=shaped(9, 2, 32), v=shaped(9, 2, 32)),
        ValueError,
        ["cu_seqlens_k=None", "9 tokens", "q 8"],
    ),
    "max_seqlen too small": (dict(max_seqlen_q=7), ValueError, ["max_seqlen_q=7", "8 tokens"]),
    "max_seqlen_k too small": (dict(max_seqlen_k=3), ValueError, ["max_seqlen_k=3", "8 tokens"]),
    "max_seqlen below 0": (dict(max_seqlen_q=-1), ValueError, ["max_seqlen_q", "-1", ">= 0"]),
    "max_seqlen fraction": (dict(max_seqlen_k=8.0), ValueError, ["max_seqlen_k", "8.0", "integer"]),
    "max_seqlen of two": (dict(max_seqlen_q=torch.tensor([8, 8])), ValueError, ["max_seqlen_q", "one element", "(2,)"]),
    "rank 4": (dict(q=shaped(1, 8, 4, 32)), ValueError, ["q must", "[tokens, heads, head_dim]", "(1, 8, 4, 32)"]),
    "v unlike k": (dict(v=shaped(8, 1, 32)), ValueError, ["v", "(8, 2, 32)", "(8, 1, 32)"]),
    "recipe": (dict(recipe="fp8"), ValueError, ["recipe='fp8'", "mxfp8"]),
}


@pytest.mark.parametrize("kind", BAD_OFFSETS)
@pytest.mark.parametrize("training", [False, True])
def test_bad_packed_input(kind: str, training: bool):
    changes, error, words = BAD_OFFSETS[kind]
    q, k, v = random((8, 4, 32), (8, 2, 32), (8, 2, 32))
    call = dict(q=q.requires_grad_(training), k=k, v=v, cu_seqlens_q=torch.tensor([0, 8], dtype=INT))
    call.update(changes)
    with pytest.raises(error) as caught:
        flash_attn_varlen_func(**call)
    assert type(caught.value) is error
    for word in words:
        assert word in str(caught.value), str(caught.value)


def test_positional_options_are_refused():
    """Only tensors go by position, as documented: a scale in the wrong place must not become something else."""
    q, k, v, _ = inputs(4, 4)
    with pytest.raises(TypeError, match=re.escape("positional")):
        flash_attn_func(q, k, v, 0.1)  # type: ignore[misc]
