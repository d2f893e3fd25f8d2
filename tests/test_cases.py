"""Inputs that broke other attention libraries, kind by kind. Head dimension 128, causal, unless a case says otherwise.

Three kinds need a device and belong to tests/gpu: replay of a captured graph, buffers past 2^31 elements (16 sequences
of 17,477 tokens with 64 heads), and documents of 262,144 tokens. What they share with a CPU is here: offsets padded
with their last entry, 131,072 documents, and one document of 16,384 tokens (32,768 in the matrix).
"""

from __future__ import annotations

import math
import resource
import time
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

import flamia
from flamia import Recipe, flash_attn_func, flash_attn_varlen_func
from flamia.reference.counters import statistics
from flamia.reference.exact import exact_attention, exact_attention_backward

BF16 = torch.bfloat16
ROUTES = ["mxfp8", "nvfp4", "fp4", "mxfp8-folded", "nvfp4-folded"]
EXACT = ["mxfp8-exact", "nvfp4-exact", "fp4-exact", "mxfp8-folded-exact", "nvfp4-folded-exact"]
LEAST = {"mxfp8": 0.994, "nvfp4": 0.96, "fp4": 0.88}  # cosines to FP64, of the worst tensor of a case
NAMES = ("o", "dq", "dk", "dv")


def normal(*shape: int, seed: int = 0, scale: float = 1.0, dtype: torch.dtype = BF16) -> Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale).to(dtype)


def cu(*offsets: int, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.tensor(offsets, dtype=dtype)


def packed(total_q: int, total_k: int | None = None, heads: int = 1, kv: int = 1, d: int = 128, seed: int = 0):
    """q, k, v, do."""
    total_k = total_q if total_k is None else total_k
    shapes = ((total_q, heads, d), (total_k, kv, d), (total_k, kv, d), (total_q, heads, d))
    return [normal(*s, seed=seed * 4 + i) for i, s in enumerate(shapes)]


def attend(q: Tensor, k: Tensor, v: Tensor, do: Tensor, *offsets: Tensor, causal: bool = True, **kwargs: Any):
    """o, lse, dq, dk, dv of a packed call, or of a batched one where there are no offsets."""
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    call = flash_attn_varlen_func if offsets else flash_attn_func
    o, lse = call(q, k, v, *offsets, causal=causal, return_lse=True, **kwargs)
    return o.detach(), lse.detach(), *torch.autograd.grad(o, (q, k, v), do)


def cosine(a: Tensor, b: Tensor) -> float:
    return torch.cosine_similarity(a.double().flatten(), b.double().flatten(), 0).item()


def assert_right(q: Tensor, k: Tensor, v: Tensor, do: Tensor, *offsets: Tensor, recipe: str = "mxfp8", **kwargs: Any):
    """Every tensor is finite and near FP64; rows that see no key are exactly o = 0, lse = -inf, dq = 0."""
    o, lse, *grads = attend(q, k, v, do, *offsets, recipe=recipe, **kwargs)
    kwargs = {"causal": True, **kwargs}
    o64, lse64 = exact_attention(q, k, v, *offsets, **kwargs)
    expected = (o64, *exact_attention_backward(q, k, v, do, *offsets, **kwargs))
    least = LEAST[flamia.get_recipe(recipe).format]
    for name, x, y in zip(NAMES, (o, *grads), expected, strict=True):
        assert x.isfinite().all(), name
        if y.any():
            assert cosine(x, y) >= least, f"{name}: {cosine(x, y):.4f}"
        # Rows of one key have dS = 0, but not in 4 bits, where o and dP read different copies of v (paper 3.4).
        if name in ("o", "dv") or not recipe.startswith("fp4"):
            assert (x[y.abs().amax(-1) == 0] == 0).all(), f"{name} is not zero where it must be"
    unseen = lse64 == -math.inf
    assert torch.equal(lse == -math.inf, unseen)
    assert not lse.isnan().any()
    rows = unseen.transpose(-1, -2)
    assert (o[rows] == 0).all()
    assert (grads[0][rows] == 0).all()
    return o, lse, *grads


# -------------------------------------------------------------------------------------------------- empty documents

EMPTY = {
    "as reported": (cu(0, 0, 1208, 2048, 2048), cu(0, 2538, 4280, 5120, 8192)),
    "leading": (cu(0, 0, 0, 33), cu(0, 0, 40, 73)),
    "trailing": (cu(0, 33, 33, 33), cu(0, 33, 66, 66)),
    "between": (cu(0, 31, 31, 31, 64), cu(0, 31, 31, 40, 73)),
    "no query anywhere": (cu(0, 0, 0), cu(0, 5, 70)),
    "no key anywhere": (cu(0, 5, 70), cu(0, 0, 0)),
    "nothing anywhere": (cu(0, 0, 0, 0), cu(0, 0, 0, 0)),
    "one of none": (cu(0, 0), cu(0, 0)),
    "alternating": (cu(0, 3, 3, 6, 6, 70), cu(0, 0, 4, 7, 9, 73)),
}


@pytest.mark.parametrize("recipe", ROUTES)
@pytest.mark.parametrize("kind", EMPTY)
def test_empty_documents(kind: str, recipe: str):
    cu_q, cu_k = EMPTY[kind]
    tensors = packed(int(cu_q[-1]), int(cu_k[-1]), d=32 if kind == "as reported" else 128)
    _, _, _, dk, dv = assert_right(*tensors, cu_q, cu_k, recipe=recipe)
    for (q0, q1), (k0, k1) in zip(pairwise(cu_q.tolist()), pairwise(cu_k.tolist()), strict=True):
        if q1 == q0:
            assert (dk[k0:k1] == 0).all()
            assert (dv[k0:k1] == 0).all()


@pytest.mark.parametrize("recipe", ROUTES)
@pytest.mark.parametrize("lengths", [(0, 1023, 1, 2044), (1, 100, 1, 300), (0, 5, 0, 5), (20, 0, 41, 0)])
def test_tiny_and_empty(lengths: tuple[int, int, int, int], recipe: str):
    a, b, c, e = lengths
    assert_right(*packed(a + b, c + e, d=32), cu(0, a, a + b), cu(0, c, c + e), recipe=recipe)


@pytest.mark.parametrize("recipe", ROUTES)
@pytest.mark.parametrize(("heads", "kv"), [(9, 3), (3, 1), (5, 5), (7, 1)])
def test_empty_and_odd_gqa(heads: int, kv: int, recipe: str):
    """max_seqlen 1: every document is one token or none."""
    offsets = cu(0, 1, 1, 2, 3, 3, 3, 4)
    q, k, v, do = packed(4, heads=heads, kv=kv)
    o, lse, dq, dk, dv = attend(q, k, v, do, offsets, None, 1, 1, recipe=recipe)
    for x in (o, lse, dq, dk, dv):
        assert x.isfinite().all()
    assert cosine(o, v.repeat_interleave(heads // kv, 1)) > LEAST[flamia.get_recipe(recipe).format]


# ------------------------------------------------------------------------------------------------------- odd shapes


@pytest.mark.parametrize("recipe", ROUTES)
@pytest.mark.parametrize("lengths", [((76, 34, 146), (1, 1, 1)), ((200, 3, 40), (130, 1, 7)), ((2, 33, 1), (1, 32, 1))])
def test_more_queries_than_keys(lengths: tuple[tuple[int, ...], tuple[int, ...]], recipe: str):
    cu_q, cu_k = (torch.tensor([0, *x]).cumsum(0).to(torch.int32) for x in lengths)
    tensors = packed(sum(lengths[0]), sum(lengths[1]), heads=2)
    o, lse, dq, _, _ = attend(*tensors, cu_q, cu_k, recipe=recipe)
    for (a, b), n in zip(pairwise(cu_q.tolist()), lengths[1], strict=True):
        blind = slice(a, b - n)  # bottom right aligned: the last n queries see 1 ... n keys
        assert (o[blind] == 0).all()
        assert (lse[:, blind] == -math.inf).all()
        assert (dq[blind] == 0).all()
        assert lse[:, b - n : b].isfinite().all()
    # A row of one key has dq = 0, and 4-bit P and dO of a few rows are too coarse for a cosine: o and dv tell enough.
    assert (
        cosine(o, exact_attention(*tensors[:3], cu_q, cu_k, causal=True)[0]) > LEAST[flamia.get_recipe(recipe).format]
    )


@pytest.mark.parametrize("recipe", ["mxfp8", "fp4", "mxfp8-folded"])
@pytest.mark.parametrize("window", [(5, 0), (5, 3), (0, 0), (None, 2)])
def test_windows_that_miss_every_key(window: tuple[int | None, int], recipe: str):
    """Rows before the first key, without `causal`: a window too far to the left of the keys."""
    assert_right(*packed(150, 40, d=32), cu(0, 150), cu(0, 40), causal=False, window_size=window, recipe=recipe)


@pytest.mark.parametrize("recipe", [r for r in flamia.recipes() if "1x32" not in r])  # those need 32 channels
def test_one_element(recipe: str):
    q, k, v, do = (normal(1, 1, 1, 16, seed=i) for i in range(4))
    o, lse, dq, dk, dv = attend(q, k, v, do, recipe=recipe)
    assert cosine(o, v) > 0.97
    assert cosine(dv, do) > 0.97
    score = (q.double() * k.double()).sum().item() / 4
    assert lse.item() == pytest.approx(score, abs=0.3)
    if flamia.get_recipe(recipe).format == "fp4" or recipe == "leaky-per-tensor":
        # In 4 bits o and dP read different copies of v (paper 3.4), and one FP32 scale leaves o to BF16's rounding:
        # dP - delta is the difference, within 1/8 of |do| |v| instead of zero.
        for gradient, other in ((dq, k), (dk, q)):
            bound = do.float().norm() * v.float().norm() * other.float().norm() / 4 / 8
            assert gradient.isfinite().all()
            assert gradient.float().norm() < bound
    else:
        assert (dq == 0).all()
        assert (dk == 0).all()


@pytest.mark.parametrize("recipe", ROUTES)
def test_odd_totals(recipe: str):
    """7,984 tokens: no multiple of a tile, in documents on both sides of every block and tile."""
    lengths = [1, 31, 33, 127, 129] * 24 + [280]
    offsets = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    assert offsets[-1] == 7984
    assert_right(*packed(7984, d=32), offsets, recipe=recipe)


@pytest.mark.matrix
def test_odd_total_in_one_document():
    assert_right(*packed(7984), cu(0, 7984))


@pytest.mark.parametrize("recipe", ROUTES)
@pytest.mark.parametrize("length", [1, 31, 33, 127, 129])
def test_odd_lengths_alone(length: int, recipe: str):
    q, k, v, do = (x.unsqueeze(0) for x in packed(length, heads=2))
    for causal in (False, True):
        o, lse, *grads = attend(q, k, v, do, recipe=recipe, causal=causal)
        expected = exact_attention(q, k, v, causal=causal)[0], *exact_attention_backward(q, k, v, do, causal=causal)
        assert all(x.isfinite().all() for x in (o, lse, *grads))
        for name, x, y in zip(NAMES, (o, *grads), expected, strict=True):
            if length > 1 or name in ("o", "dv"):  # one token has no dq and dk: see test_one_element
                assert cosine(x, y) > LEAST[flamia.get_recipe(recipe).format], name


# ------------------------------------------------------------------------------------------------ buffers and offsets


@pytest.mark.parametrize("recipe", ROUTES)
@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_poisoned_tail(poison: float, recipe: str):
    q, k, v, do = packed(140, 170, heads=2)
    offsets = cu(0, 33, 33, 101), cu(0, 50, 60, 133)
    clean = attend(q[:101], k[:133], v[:133], do[:101], *offsets, recipe=recipe)
    for x, end in ((q, 101), (k, 133), (v, 133), (do, 101)):
        x[end:] = poison
    o, lse, dq, dk, dv = attend(q, k, v, do, *offsets, recipe=recipe)
    assert torch.equal(lse[:, :101], clean[1])
    assert (lse[:, 101:] == -math.inf).all()
    for x, expected, end in ((o, clean[0], 101), (dq, clean[2], 101), (dk, clean[3], 133), (dv, clean[4], 133)):
        assert torch.equal(x[:end], expected)
        assert x.shape[0] > end
        assert (x[end:] == 0).all()


@pytest.mark.parametrize("recipe", ROUTES)
def test_padded_offsets_of_one_capacity(recipe: str):
    """What a captured graph is replayed with: the same buffers and as many offsets, the last one repeated."""
    q, k, v, do = packed(96)
    for lengths in ([40, 56], [1, 2, 3, 90], [96], [5]):
        exact = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
        padded = torch.cat((exact, exact[-1:].expand(6 - len(exact))))
        expected = attend(q, k, v, do, exact, recipe=recipe)
        assert all(map(torch.equal, expected, attend(q, k, v, do, padded, recipe=recipe)))


@pytest.mark.parametrize("longest", [40, 4096, torch.tensor(40), torch.tensor(40, dtype=torch.int32)], ids=repr)
def test_scalar_tensors(longest: int | Tensor):
    """max_seqlen is never needed; as a tensor it is not even read."""
    q, k, v, do = packed(60)
    offsets = cu(0, 40, 60)
    expected = attend(q, k, v, do, offsets)
    assert all(map(torch.equal, expected, attend(q, k, v, do, offsets, offsets, longest, longest)))


def test_bad_offsets():
    """int64 and strided ones work; everything else names the offset. (All refusals: test_attention.py.)"""
    q, k, v, do = packed(60)
    expected = attend(q, k, v, do, cu(0, 40, 60))
    strided = torch.stack((cu(0, 40, 60), cu(7, 7, 7)), 1)[:, 0]
    for offsets in (cu(0, 40, 60, dtype=torch.int64), strided, strided.long()):
        assert all(map(torch.equal, expected, attend(q, k, v, do, offsets)))
    for offsets, words in (
        (cu(0, 40, 30, 60), r"cu_seqlens_q\[2\] = 30 is below cu_seqlens_q\[1\] = 40"),
        (cu(4, 40, 60), r"cu_seqlens_q\[0\] is 4"),
        (cu(0, 40, 61), r"cu_seqlens_q\[-1\] is 61, past the 60 tokens"),
        (cu(0, -5, 60), r"cu_seqlens_q\[1\] = -5 is below"),
    ):
        with pytest.raises(ValueError, match=words):
            flash_attn_varlen_func(q, k, v, offsets)


def test_gaps_are_documents_of_their_own():
    """No argument gives lengths apart from offsets; a gap is a document that has no counterpart on the other side."""
    with pytest.raises(TypeError, match="seqused_k"):
        flash_attn_varlen_func(*packed(60)[:3], cu(0, 60), seqused_k=cu(50))  # type: ignore[call-arg]
    q, k, v, do = packed(100, 120)
    # Queries 30-45 and keys 50-64 belong to no document.
    o, lse, dq, dk, dv = attend(q, k, v, do, cu(0, 30, 45, 45, 100), cu(0, 50, 50, 64, 120))
    assert (o[30:45] == 0).all()
    assert (lse[:, 30:45] == -math.inf).all()
    assert (dq[30:45] == 0).all()
    assert (dk[50:64] == 0).all()
    assert (dv[50:64] == 0).all()
    rows, keys = (
        torch.cat((torch.arange(30), torch.arange(45, 100))),
        torch.cat((torch.arange(50), torch.arange(64, 120))),
    )
    close = attend(q[rows], k[keys], v[keys], do[rows], cu(0, 30, 85), cu(0, 50, 106))
    assert all(map(torch.equal, close, (o[rows], lse[:, rows], dq[rows], dk[keys], dv[keys])))


@pytest.mark.parametrize("recipe", ROUTES)
def test_strided_gradients(recipe: str):
    q, k, v, do = (x.view(2, 50, 4, 32) for x in packed(100, d=128))
    contiguous = attend(q, k, v, do, recipe=recipe)
    turned = do.transpose(1, 2).contiguous().transpose(1, 2)
    sliced = torch.stack((do, do), -1)[..., 0]
    for strided in (turned, sliced):
        assert not strided.is_contiguous()
        assert all(map(torch.equal, contiguous, attend(q, k, v, strided, recipe=recipe)))
    ones = attend(q, k, v, torch.ones_like(q), recipe=recipe)
    expanded = attend(q, k, v, torch.ones((), dtype=BF16).expand(q.shape), recipe=recipe)
    assert all(map(torch.equal, ones, expanded))
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    flash_attn_func(*leaves, causal=True, recipe=recipe).sum().backward()
    assert all(torch.equal(leaf.grad, g) for leaf, g in zip(leaves, ones[2:], strict=True))


@pytest.mark.parametrize("recipe", ROUTES)
def test_strided_gradient_of_lse(recipe: str):
    q, k, v, _ = packed(50, heads=2, d=32)
    grads = []
    for dlse in (torch.ones(2, 50), torch.ones(50, 2).t(), torch.ones(()).expand(2, 50)):
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        _, lse = flash_attn_varlen_func(*leaves, cu(0, 50), causal=True, return_lse=True, recipe=recipe)
        grads.append(torch.autograd.grad(lse, leaves, dlse))
    assert all(map(torch.equal, grads[0], grads[1]))
    assert all(map(torch.equal, grads[0], grads[2]))


# ------------------------------------------------------------------------------------------------------ future tokens


def eight_bit_v() -> tuple[Tensor, Tensor, Tensor]:
    q = k = torch.ones(128, 1, 128, dtype=BF16)
    v = torch.zeros(128, 1, 128, dtype=BF16)
    v[0], v[16], v[32] = 2.0**-20, 1.0, 1.0  # the same block of 32 as token 0, and the next one
    return q, k, v


def output(q: Tensor, k: Tensor, v: Tensor, recipe: str | Recipe) -> Tensor:
    return flash_attn_varlen_func(q, k, v, cu(0, q.shape[0]), causal=True, recipe=recipe)


@pytest.mark.parametrize("recipe", EXACT)
def test_future_token_in_eight_bit_v(recipe: str):
    q, k, v = eight_bit_v()
    before = output(q, k, v, recipe)
    changed = v.clone()
    changed[8:] = normal(120, 1, 128, scale=50.0)
    assert torch.equal(output(q, k, changed, recipe)[:8], before[:8])
    if recipe != "fp4-exact":  # whose UE4M3 scales end at 2^-9
        assert before[0].float().mean().item() == pytest.approx(2.0**-20, rel=0.07), "a small value keeps its own scale"


@pytest.mark.parametrize("recipe", ["mxfp8", "nvfp4", "mxfp8-folded", "nvfp4-folded"])
def test_future_token_in_eight_bit_v_by_default(recipe: str):
    """Only positions of the same 32-block may move: token 16 hides token 0's value, token 32 does not reach it."""
    q, k, v = eight_bit_v()
    before = output(q, k, v, recipe)
    later = v.clone()
    later[32:] = normal(96, 1, 128, scale=50.0)
    assert torch.equal(output(q, k, later, recipe)[:32], before[:32])
    same_block = v.clone()
    same_block[16] = 0.0
    assert not torch.equal(output(q, k, same_block, recipe)[:8], before[:8]), (
        "the shared exponent is the default's price"
    )


@pytest.mark.parametrize("recipe", ROUTES + EXACT)
def test_future_token_tensor_wide(recipe: str):
    q, k, v = eight_bit_v()
    v[:] = 0
    v[0], v[64] = 2.0**-10, 1024.0
    before = output(q, k, v, recipe)
    changed = v.clone()
    changed[64:] = normal(64, 1, 128)
    after = output(q, k, changed, recipe)
    assert torch.equal(after[:8], before[:8])
    if not recipe.startswith("fp4"):  # whose UE4M3 scales end at 2^-9
        assert before[0].float().mean().item() == pytest.approx(2.0**-10, rel=0.07)


def test_future_token_tensor_wide_counterexample():
    q, k, v = eight_bit_v()
    v[:] = 0
    v[0], v[64] = 2.0**-10, 1024.0
    changed = v.clone()
    changed[64:] = normal(64, 1, 128)
    assert not torch.equal(output(q, k, changed, "leaky-per-tensor")[:8], output(q, k, v, "leaky-per-tensor")[:8])


@pytest.mark.parametrize("recipe", EXACT)
@pytest.mark.parametrize("first", [1, 8, 33, 128, 131])
def test_every_future_token(first: int, recipe: str):
    """o, lse and dq of tokens before ``first`` keep their bits when everything from there on is replaced."""
    q, k, v, do = packed(200, heads=2)
    before = attend(q, k, v, do, cu(0, 200), recipe=recipe)
    for seed, scale in ((7, 1.0), (8, 64.0), (9, 0.01)):
        other = packed(200, heads=2, seed=seed)
        changed = [torch.cat((x[:first], y[first:] * scale)) for x, y in zip((q, k, v, do), other, strict=True)]
        after = attend(*changed, cu(0, 200), recipe=recipe)
        assert torch.equal(after[0][:first], before[0][:first])
        assert torch.equal(after[1][:, :first], before[1][:, :first])
        assert torch.equal(after[2][:first], before[2][:first])


# -------------------------------------------------------------------------------------------------------- magnitudes


@pytest.mark.parametrize(("shift", "tau"), [(4, 5.0), (8, 1.0), (5, 4.0), (0, 9.0), (4, 4.81)])
@pytest.mark.parametrize("form", ["mxfp8", "nvfp4"])
def test_saturating_probabilities(form: str, shift: int, tau: float):
    """2^(a + tau) > 448 would clamp the largest weights without a NaN: refused when the recipe is built."""
    with pytest.raises(ValueError, match=r"p_shift \+ tau.*448"):
        Recipe(format=form, p_shift=shift, tau=tau)


@pytest.mark.parametrize(("shift", "tau"), [(4, 4.0), (8, 0.0), (8, 0.8), (0, 8.8), (2, 6.0)])
@pytest.mark.parametrize("variant", ["block", "folded"])
def test_largest_safe_probabilities(shift: int, tau: float, variant: str):
    """Scores that rise from tile to tile: the retained maximum stays behind by up to tau, and nothing saturates."""
    q, k, v, _ = packed(512)
    k = k * torch.linspace(0.5, 3, 512).view(-1, 1, 1).to(BF16)
    o = output(q, k, v, Recipe(p_shift=shift, tau=tau, variant=variant))
    assert cosine(o, exact_attention(q, k, v, cu(0, 512), causal=True)[0]) > 0.99


@pytest.mark.parametrize("recipe", ROUTES + EXACT)
def test_large_logits(recipe: str):
    q, k, v, do = (x * 3 for x in packed(1024, d=32))
    o, lse, *grads = attend(q, k, v, do, cu(0, 1024), recipe=recipe)
    assert all(x.isfinite().all() for x in (o, lse, *grads))
    assert all((x != 0).any() for x in grads)


@pytest.mark.parametrize("recipe", ROUTES)
@pytest.mark.parametrize("scale", [30.0, 1000.0])
def test_logits_past_every_exponential(scale: float, recipe: str):
    """Scores of thousands: one key takes all, the others underflow, and nothing overflows."""
    q, k, v, do = packed(130, d=32)
    o, lse, *grads = attend(q * scale, k, v, do, cu(0, 130), recipe=recipe)
    assert all(x.isfinite().all() for x in (o, lse, *grads))
    rounding = 1.25 if recipe == "fp4" else 1.1  # of E2M1: 5 may become 6
    assert (o.abs().amax() <= v.abs().amax() * rounding).item()


@pytest.mark.parametrize("recipe", ROUTES + EXACT)
def test_outlier_channel(recipe: str):
    """Channel 5 of q and k times 100: no overflow of the FP16 accumulator of dQ."""
    q, k, v, do = packed(256, heads=2)
    q[..., 5] *= 100
    k[..., 5] *= 100
    with statistics() as counts:
        results = attend(q, k, v, do, cu(0, 256), recipe=recipe)
    assert counts.accumulator_total > 0
    assert counts.accumulator_overflow == 0
    assert all(x.isfinite().all() for x in results)


@pytest.mark.parametrize("recipe", ROUTES + EXACT)
@pytest.mark.parametrize("name", ["q", "k", "v", "do"])
def test_outlier_document(name: str, recipe: str):
    """One document times 1000: no overflow there, and the other documents keep every bit."""
    tensors = dict(zip(("q", "k", "v", "do"), packed(190, heads=2, d=32), strict=True))
    offsets = cu(0, 33, 100, 190)
    before = attend(*tensors.values(), offsets, recipe=recipe)
    tensors[name][33:100] *= 1000
    with statistics() as counts:
        after = attend(*tensors.values(), offsets, recipe=recipe)
    assert counts.accumulator_overflow == 0
    assert all(x.isfinite().all() for x in after)
    for x, y in zip((before[0], before[1].t(), *before[2:]), (after[0], after[1].t(), *after[2:]), strict=True):
        assert torch.equal(x[:33], y[:33])
        assert torch.equal(x[100:], y[100:])
    assert any(not torch.equal(x, y) for x, y in zip(before, after, strict=True))


@pytest.mark.parametrize("recipe", ROUTES + EXACT)
@pytest.mark.parametrize("name", ["q", "k", "v", "do"])
def test_outlier_tokens(name: str, recipe: str):
    """Magnitudes over 2^±20 from token to token, and over 2^±90 in do, stay finite."""
    tensors = dict(zip(("q", "k", "v", "do"), packed(160, d=32), strict=True))
    span = 90 if name == "do" else 20
    power = torch.randint(-span, span, (160, 1, 1), generator=torch.Generator().manual_seed(3))
    tensors[name] = (tensors[name].float() * torch.exp2(power.float())).to(BF16)
    assert all(x.isfinite().all() for x in attend(*tensors.values(), cu(0, 160), recipe=recipe))


@pytest.mark.parametrize("recipe", ROUTES + EXACT)
def test_zero_score_gradients_beside_any_exponent_of_q(recipe: str):
    """A row whose dS is zero has the smallest exponent there is: no sum of it with q's may pass for the NaN marker."""
    q, k, v, do = packed(260, d=32)
    power = torch.arange(260).view(-1, 1, 1) % 26 - 8
    q = (q.float().sign() * torch.exp2(power.float())).to(BF16)  # every exponent from -16 to 9
    v[:] = 1.0  # dP is the same for every key, and equals delta
    results = attend(q, k, v, do, cu(0, 260), recipe=recipe)
    assert all(x.isfinite().all() for x in results)
    if not recipe.startswith("fp4"):
        assert results[2].abs().max() < 1e-2 * do.float().norm(dim=-1).max() * k.abs().max()


@pytest.mark.parametrize("recipe", ROUTES + EXACT)
@pytest.mark.parametrize("name", ["q", "k", "v", "do", "all"])
def test_zeros(name: str, recipe: str):
    """Blocks of zeros have no exponent of their own; flat scores are uniform weights."""
    tensors = dict(zip(("q", "k", "v", "do"), packed(70, d=32), strict=True))
    for key in tensors:
        if name in (key, "all"):
            tensors[key][:] = 0
    o, lse, dq, dk, dv = attend(*tensors.values(), cu(0, 70), recipe=recipe)
    assert all(x.isfinite().all() for x in (o, lse, dq, dk, dv))
    if name in ("q", "k", "all"):
        assert torch.allclose(lse[0], torch.arange(1, 71).float().log(), atol=0.15)
    zero = {"q": [dk], "k": [dq], "v": [o], "do": [dq, dk, dv], "all": [o, dq, dk, dv]}[name]
    assert all((x == 0).all() for x in zero)


# ---------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize("name", ["q", "k", "v"])
@pytest.mark.parametrize(
    "recipe",
    [
        Recipe(exponential="schraudolph", training=False),
        Recipe(format="nvfp4", variant="folded", exponential="schraudolph", training=False),
        Recipe(format="fp4", exponential="mitchell", training=False),
        Recipe(training=False),
    ],
    ids=lambda r: f"{r.format}-{r.variant}-{r.exponential}",
)
def test_requires_grad_without_a_backward(recipe: Recipe, name: str):
    """An error at the forward call, never a missing gradient."""
    tensors = dict(zip("qkv", packed(20)[:3], strict=True))
    tensors[name].requires_grad_()
    with pytest.raises(ValueError, match=r"requires a gradient.*training=False"):
        flash_attn_varlen_func(*tensors.values(), cu(0, 20), recipe=recipe)
    with torch.no_grad():
        assert output(*tensors.values(), recipe).isfinite().all()


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        (lambda x: x[..., :80], ValueError, r"head_dim=80.*\(16, 32, 64, 96, 128, 256\)"),
        (lambda x: x[..., :1], ValueError, r"head_dim=1 is not supported"),
        (lambda x: x.double(), TypeError, r"q must be torch.bfloat16 or torch.float16, got torch.float64"),
        (lambda x: x.float(), TypeError, r"q must be torch.bfloat16 or torch.float16, got torch.float32"),
        (lambda x: x.to("meta"), ValueError, r"meta"),
    ],
    ids=["d 80", "d 1", "float64", "float32", "meta"],
)
def test_unsupported_head_dim_dtype_device(change: Any, error: type[Exception], words: str):
    q, k, v = (change(x) for x in packed(20)[:3])
    with pytest.raises(error, match=words):
        flash_attn_varlen_func(q, k, v, cu(0, 20).to(q.device), causal=True)


def test_mixed_devices():
    q, k, v, _ = packed(20)
    with pytest.raises(ValueError, match=r"v must be on q's device cpu, got meta"):
        flash_attn_varlen_func(q, k, v.to("meta"), cu(0, 20))


# -------------------------------------------------------------------------------------------------------------- size


def test_many_documents():
    """Two thousand short documents in a second or two: the cost of one must not be that of a call."""
    lengths = torch.randint(0, 6, (2000,), generator=torch.Generator().manual_seed(0))
    offsets = torch.cat((lengths.new_zeros(1), lengths.cumsum(0))).to(torch.int32)
    started = time.process_time()
    assert_right(*packed(int(offsets[-1]), d=32), offsets)
    assert time.process_time() - started < 10


@pytest.mark.parametrize("recipe", ["mxfp8", "mxfp8-folded"])
@pytest.mark.parametrize("d", [32, pytest.param(128, marks=pytest.mark.matrix)])
def test_very_many_documents_of_one_token(d: int, recipe: str):
    n = 131_072
    q, k, v, do = packed(n, d=d)
    o, lse, dq, dk, dv = attend(q, k, v, do, torch.arange(n + 1, dtype=torch.int32), recipe=recipe)
    assert cosine(o, v) > 0.9985
    assert cosine(dv, do) > 0.9985
    # Zero but for the FP32 rounding of delta, which few of so many documents show.
    assert dq.abs().max() < 1e-5
    assert dk.abs().max() < 1e-5
    assert cosine(lse[0], (q.float() * k.float()).sum(-1).flatten() / math.sqrt(d)) > 0.998
    for i in (0, 1, 65_535, 65_536, n - 1):
        one = slice(i, i + 1)
        alone = attend(q[one], k[one], v[one], do[one], cu(0, 1), recipe=recipe)
        assert all(map(torch.equal, alone, (o[one], lse[:, one], dq[one], dk[one], dv[one])))


@pytest.mark.slow
@pytest.mark.parametrize("d", [32, pytest.param(64, marks=pytest.mark.matrix)])
def test_very_many_short_documents(d: int):
    lengths = torch.randint(0, 40, (15_000,), generator=torch.Generator().manual_seed(0))
    offsets = torch.cat((lengths.new_zeros(1), lengths.cumsum(0))).to(torch.int32)
    q, k, v, do = packed(int(offsets[-1]), d=d)
    o, lse, dq, dk, dv = attend(q, k, v, do, offsets)
    for i in (0, 1, 7_500, 14_998, 14_999):
        part = slice(int(offsets[i]), int(offsets[i + 1]))
        alone = attend(q[part], k[part], v[part], do[part], cu(0, part.stop - part.start))
        assert all(map(torch.equal, alone, (o[part], lse[:, part], dq[part], dk[part], dv[part])))
    first = offsets[:1001]
    end = int(first[-1])
    o64, _ = exact_attention(q[:end], k[:end], v[:end], first, causal=True)
    grads = exact_attention_backward(q[:end], k[:end], v[:end], do[:end], first, causal=True)
    for x, y in zip((o, dq, dk, dv), (o64, *grads), strict=True):
        assert cosine(x[:end], y) > LEAST["mxfp8"]


@pytest.mark.slow
@pytest.mark.parametrize("n", [16_384, pytest.param(32_768, marks=pytest.mark.matrix)])
def test_one_long_document(n: int):
    """Memory grows with tokens (their square would be 1 or 4 GiB in FP32), the last rows and keys are right."""
    tail = 64
    q, k, v, do = packed(n, d=16)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    o, lse, dq, dk, dv = attend(q, k, v, do, cu(0, n))
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 2**20
    assert grown < n / 32_768, f"{grown:.1f} GiB"
    assert all(x.isfinite().all() for x in (o, lse, dq, dk, dv))
    offsets = cu(0, tail), cu(0, n)  # bottom right aligned: the last queries of the document alone
    last = q[-tail:], k, v
    o64, lse64 = exact_attention(*last, *offsets, causal=True)
    dq64, dk64, dv64 = exact_attention_backward(*last, do[-tail:], *offsets, causal=True)
    # Flat rows of so many keys: P 2^8 lies three binades short of E4M3's top, dv loses a little (docs/numerics.md).
    for name, x, y, least in (
        ("o", o, o64, 0.99),
        ("dq", dq, dq64, 0.99),
        ("dk", dk, dk64, 0.98),
        ("dv", dv, dv64, 0.98),
    ):
        assert cosine(x[-tail:], y[-tail:]) > least, name
    assert (lse[:, -tail:] - lse64).abs().max() < 0.1
