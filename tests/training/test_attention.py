"""Attention by name, and the exact one against its definition."""

import itertools
import math

import pytest
import torch

import flamia
from flamia.training import attention_names, exact_attention, get_attention


def naive(q, k, v, cu_seqlens, window=None):
    """Row by row, in FP64."""
    o = torch.zeros_like(q, dtype=torch.float64)
    offsets = cu_seqlens.tolist()
    for start, stop in itertools.pairwise(offsets):
        for i in range(start, stop):
            first = start if window is None else max(start, i - window + 1)
            s = torch.einsum("hd,khd->hk", q[i].double(), k[first : i + 1].double()) / math.sqrt(q.shape[-1])
            o[i] = torch.einsum("hk,khd->hd", s.softmax(-1), v[first : i + 1].double())
    return o


def inputs(tokens, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(tokens, 2, 32, generator=generator).to(dtype).requires_grad_() for _ in range(3)]


def cosine(a, b):
    return torch.nn.functional.cosine_similarity(a.double().flatten(), b.double().flatten(), dim=0).item()


@pytest.mark.parametrize("window", [None, 1, 5])
@pytest.mark.parametrize("lengths", [[40], [1, 17, 22], [0, 9, 0, 31, 0, 0]], ids=str)
def test_exact_attention_is_the_definition(lengths, window):
    cu = torch.tensor([0, *lengths]).cumsum(0).int()
    q, k, v = inputs(40)
    do = torch.randn(40, 2, 32, dtype=torch.float64)
    o = exact_attention(q, k, v, cu, 48, window=window)
    gradients = torch.autograd.grad((o.double() * do).sum(), (q, k, v))
    expected = naive(q, k, v, cu, window)
    wanted = torch.autograd.grad((expected * do).sum(), (q, k, v))
    torch.testing.assert_close(o.double(), expected, rtol=1e-4, atol=1e-5)
    for gradient, want in zip(gradients, wanted, strict=True):
        torch.testing.assert_close(gradient, want, rtol=1e-4, atol=1e-5)


def test_exact_attention_gains_from_fp32_whatever_the_inputs():
    q, k, v = inputs(40, torch.bfloat16)
    cu = torch.tensor([0, 40], dtype=torch.int32)
    o = exact_attention(q, k, v, cu, 40)
    assert o.dtype == torch.bfloat16
    assert torch.equal(o, exact_attention(q.float(), k.float(), v.float(), cu, 40).bfloat16())


def test_autocast_lowers_neither_exact_attention_nor_its_gradients():
    q, k, v = inputs(40)
    cu = torch.tensor([0, 17, 40], dtype=torch.int32)

    def run():
        o = exact_attention(q, k, v, cu, 23)
        return o, *torch.autograd.grad(o.sum(), (q, k, v))

    with torch.autocast("cpu", dtype=torch.bfloat16):
        lowered = run()
    for x, y in zip(lowered, run(), strict=True):
        assert torch.equal(x, y)


def test_bf16_is_torch_attention_in_bf16():
    q, k, v = inputs(40, torch.bfloat16)
    cu = torch.tensor([0, 40], dtype=torch.int32)
    o = get_attention("bf16")(q, k, v, cu, 40)
    batch = (x.transpose(0, 1)[None] for x in (q, k, v))
    expected = torch.nn.functional.scaled_dot_product_attention(*batch, is_causal=True)[0].transpose(0, 1)
    assert torch.equal(o, expected)
    assert not torch.equal(o, get_attention("exact")(q, k, v, cu, 40))


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("name", attention_names())
def test_every_name_computes_attention_with_gradients(name, window):
    lengths = [33, 1, 62]
    cu = torch.tensor([0, *lengths]).cumsum(0).int()
    q, k, v = inputs(96, torch.bfloat16)
    o = get_attention(name, window)(q, k, v, cu, 64)
    assert o.shape == q.shape
    assert o.dtype == torch.bfloat16
    expected = exact_attention(q, k, v, cu, 64, window=window)
    do = torch.randn(o.shape)
    gradients = torch.autograd.grad((o.float() * do).sum(), (q, k, v))
    wanted = torch.autograd.grad((expected.float() * do).sum(), (q, k, v))
    assert cosine(o, expected) > 0.97
    for gradient, want in zip(gradients, wanted, strict=True):
        assert cosine(gradient, want) > 0.9


def test_a_name_runs_its_own_recipe():
    q, k, v = inputs(64, torch.bfloat16)
    cu = torch.tensor([0, 64], dtype=torch.int32)
    outputs = {name: get_attention(name)(q, k, v, cu, 64) for name in ("mxfp8", "nvfp4", "fp4", "leaky-fp4-keys")}
    for name, o in outputs.items():
        direct = flamia.flash_attn_varlen_func(q, k, v, cu, causal=True, recipe=name)
        assert torch.equal(o, direct), name
    assert len({tuple(o.flatten().tolist()) for o in outputs.values()}) == len(outputs)


def test_unknown_names_are_refused_with_the_known_ones():
    with pytest.raises(ValueError, match=r"'mxfp9'.*exact.*mxfp8.*leaky-fp4-keys"):
        get_attention("mxfp9")
    with pytest.raises(ValueError, match="window is 0"):
        get_attention("exact", 0)
