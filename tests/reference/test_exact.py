"""exact_attention against a naive softmax differentiated by torch, over every mask and layout it has."""

import math
import resource

import pytest
import torch

from flamia.reference.exact import exact_attention, exact_attention_backward


def naive(q, k, v, *, scale=None, causal=False, window=(-1, -1)):
    """One document, [S, H, D], with a dense mask: o [S, H, D], lse [H, S]."""
    len_q, len_k, groups = q.shape[0], k.shape[0], q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    s = torch.einsum("qhd,khd->hqk", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
    position = torch.arange(len_q)[:, None] + len_k - len_q
    key = torch.arange(len_k)[None]
    seen = torch.ones(len_q, len_k, dtype=torch.bool)
    if causal:
        seen &= key <= position
    if window[0] >= 0:
        seen &= key >= position - window[0]
    if window[1] >= 0:
        seen &= key <= position + window[1]
    empty = ~seen.any(-1)
    s = s.masked_fill(~(seen | empty[:, None]), -math.inf)
    p = torch.softmax(s, -1).masked_fill(empty[:, None], 0)
    lse = torch.logsumexp(s, -1).masked_fill(empty, -math.inf)
    return torch.einsum("hqk,khd->qhd", p, v), lse


def sample(len_q, len_k, hq, hkv, d, seed=0):
    g = torch.Generator().manual_seed(seed)
    shapes = [(len_q, hq, d), (len_k, hkv, d), (len_k, hkv, d), (len_q, hq, d)]
    return [torch.randn(s, generator=g, dtype=torch.float64) for s in shapes]


MASKS = [
    {},
    {"causal": True},
    {"window": (17, 5)},
    {"causal": True, "window": (40, -1)},
    {"causal": True, "scale": 0.37},
    {"window": (0, 0)},
]


@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize(
    ("len_q", "len_k", "hq", "hkv"),
    [(70, 70, 2, 2), (200, 200, 4, 2), (33, 160, 3, 1), (150, 40, 2, 1), (1, 1, 1, 1)],
)
def test_batched_matches_naive(len_q, len_k, hq, hkv, mask):
    docs = [sample(len_q, len_k, hq, hkv, 16, seed) for seed in (0, 1)]
    q, k, v, do = (torch.stack(x).requires_grad_() for x in zip(*docs, strict=True))
    kwargs = {
        "softmax_scale": mask.get("scale"),
        "causal": mask.get("causal", False),
        "window_size": mask.get("window", (-1, -1)),
    }
    o, lse = exact_attention(q, k, v, **kwargs)
    expected = [naive(q[b], k[b], v[b], **mask) for b in range(2)]
    o_naive, lse_naive = (torch.stack(x) for x in zip(*expected, strict=True))
    torch.testing.assert_close(o, o_naive)
    torch.testing.assert_close(lse, lse_naive)

    seen = torch.isfinite(lse)
    dlse = torch.randn(lse.shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    loss = (o_naive * do.detach()).sum() + (lse_naive.where(seen, torch.zeros(())) * dlse).sum()
    expected = torch.autograd.grad(loss, (q, k, v))
    garbage = dlse.where(seen, torch.full((), math.nan))  # gradients of lse = -inf must not matter
    direct = exact_attention_backward(q, k, v, do, dlse=garbage, **kwargs)
    through = torch.autograd.grad((o, lse), (q, k, v), (do.detach(), dlse))
    for name, a, b, c in zip(("dq", "dk", "dv"), expected, direct, through, strict=True):
        torch.testing.assert_close(b, a, msg=lambda m, name=name: f"{name}: {m}")
        torch.testing.assert_close(c, b, rtol=0, atol=0)


def test_packed_equals_each_document_alone_and_leaves_the_tail():
    lengths_q, lengths_k = [0, 31, 1, 129, 0, 7], [3, 31, 0, 200, 0, 2]
    cu_q, cu_k = (torch.tensor([0, *x]).cumsum(0).int() for x in (lengths_q, lengths_k))
    q, k, v, do = sample(sum(lengths_q) + 5, sum(lengths_k) + 9, 4, 2, 8)
    for x, cu in ((q, cu_q), (k, cu_k), (v, cu_k), (do, cu_q)):
        x[cu[-1] :] = math.nan
    o, lse = exact_attention(q, k, v, cu_q, cu_k, causal=True)
    grads = exact_attention_backward(q, k, v, do, cu_q, cu_k, causal=True)
    assert o.shape == q.shape
    assert lse.shape == (4, q.shape[0])
    for i in range(len(lengths_q)):
        a, b = slice(cu_q[i], cu_q[i + 1]), slice(cu_k[i], cu_k[i + 1])
        alone_o, alone_lse = exact_attention(q[None, a], k[None, b], v[None, b], causal=True)
        assert torch.equal(o[a], alone_o[0])
        assert torch.equal(lse[:, a], alone_lse[0])
        alone = exact_attention_backward(q[None, a], k[None, b], v[None, b], do[None, a], causal=True)
        for x, y, rows in zip(grads, alone, (a, b, b), strict=True):
            assert torch.equal(x[rows], y[0])
    assert torch.equal(o[cu_q[-1] :], torch.zeros_like(o[cu_q[-1] :]))
    for x, cu in zip(grads, (cu_q, cu_k, cu_k), strict=True):
        assert torch.equal(x[cu[-1] :], torch.zeros_like(x[cu[-1] :]))


def test_rows_without_keys():
    q, k, v, do = sample(5, 2, 1, 1, 4)
    o, lse = exact_attention(q[None], k[None], v[None], causal=True)
    dq, dk, dv = exact_attention_backward(q[None], k[None], v[None], do[None], causal=True)
    assert (lse[0, 0, :3] == -math.inf).all()
    assert torch.isfinite(lse[0, 0, 3:]).all()
    assert (o[0, :3] == 0).all()
    assert (dq[0, :3] == 0).all()
    assert all(torch.isfinite(x).all() for x in (o, dq, dk, dv))


def test_future_tokens_do_not_matter_bitwise():
    q, k, v, do = (x[None] for x in sample(200, 200, 2, 1, 16))
    q2, k2, v2, do2 = (x[None] for x in sample(200, 200, 2, 1, 16, seed=9))
    cut = 77
    mixed = [torch.cat([a[:, :cut], 1000 * b[:, cut:]], 1) for a, b in ((q, q2), (k, k2), (v, v2), (do, do2))]
    o, lse = exact_attention(q, k, v, causal=True)
    o2, lse2 = exact_attention(*mixed[:3], causal=True)
    assert torch.equal(o[:, :cut], o2[:, :cut])
    assert torch.equal(lse[..., :cut], lse2[..., :cut])
    dq = exact_attention_backward(q, k, v, do, causal=True)[0]
    assert torch.equal(dq[:, :cut], exact_attention_backward(*mixed, causal=True)[0][:, :cut])


def test_precision_and_dtypes():
    q, k, v, do = (x[None].bfloat16().requires_grad_() for x in sample(64, 64, 2, 2, 16))
    o, lse = exact_attention(q, k, v, dtype=torch.float32)
    assert o.dtype == lse.dtype == torch.float32
    (o * do).sum().backward()
    assert q.grad.dtype == torch.bfloat16
    assert exact_attention_backward(q, k, v, do)[0].dtype == torch.float64
    torch.testing.assert_close(o.double(), exact_attention(q, k, v)[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda a: a.update(q=a["q"][0, 0]), "q, k, v have shapes"),
        (lambda a: a.update(k=a["k"][..., :4]), "q, k, v have shapes"),
        (lambda a: a.update(q=a["q"][:, :, :3]), "3 heads"),
        (lambda a: a.update(cu_seqlens_q=torch.tensor([0, 8])), "cu_seqlens_q"),
        (lambda a: a.update({n: a[n][0] for n in "qkv"}), "cu_seqlens_q is missing"),
        (
            lambda a: a.update({n: a[n][0] for n in "qkv"}, cu_seqlens_q=torch.tensor([0, 5, 3])),
            "must not decrease",
        ),
        (lambda a: a.update({n: a[n][0] for n in "qkv"}, cu_seqlens_q=torch.tensor([0, 99])), "at most 8"),
        (
            lambda a: a.update(
                {n: a[n][0] for n in "qkv"},
                cu_seqlens_q=torch.tensor([0, 4]),
                cu_seqlens_k=torch.tensor([0, 4, 8]),
            ),
            "cu_seqlens_k has 3 entries",
        ),
    ],
)
def test_errors_name_the_argument(change, message):
    q, k, v, _ = (x[None] for x in sample(8, 8, 4, 2, 8))
    arguments = {"q": q, "k": k, "v": v}
    change(arguments)
    with pytest.raises(ValueError, match=message):
        exact_attention(**arguments)


def test_memory_grows_with_tokens():
    """The scores of 8192 tokens would fill 1/2 GiB in FP64; the peak rises by less than 1/4 GiB."""
    q = torch.randn(1, 8192, 1, 16, generator=torch.Generator().manual_seed(0)).bfloat16()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    exact_attention(q, q, q)
    exact_attention_backward(q, q, q, q)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**18  # KiB
