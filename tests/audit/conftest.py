"""Attentions with one deliberate fault each, for the probes to find: and only there."""

import pytest
import torch

from flamia.reference.exact import exact_attention


def clean(q, k, v, *, causal, softmax_scale=None):
    """Exact attention in FP32: no bit of an earlier row depends on the future."""
    return exact_attention(q, k, v, causal=causal, softmax_scale=softmax_scale, dtype=torch.float32)


def per_tensor_v(q, k, v, *, causal):
    """v in E4M3 with one scale for the whole tensor, straight through for the gradient of v."""
    scale = v.detach().abs().max() / 448
    rounded = (v.float() / scale).to(torch.float8_e4m3fn).float() * scale
    return exact_attention(q, k, v + (rounded - v.float()).detach(), causal=causal, dtype=torch.float32)


def leak_in_o(q, k, v, *, causal):
    """Every row of o sees the largest |v|, but the gradients do not."""
    o, lse = clean(q, k, v, causal=causal)
    return o + 1e-3 * v.detach().float().abs().amax(), lse


def leak_in_lse(q, k, v, *, causal):
    o, lse = clean(q, k, v, causal=causal)
    return o, lse + 1e-3 * k.detach().float().abs().amax()


class _ScaleGradient(torch.autograd.Function):
    """The identity, whose gradient at every token carries the size of the gradient at all tokens."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * (1 + 1e-3 * gradient.float().abs().amax()).to(gradient.dtype)


def leak_in_dq(q, k, v, *, causal):
    return clean(_ScaleGradient.apply(q.float()), k, v, causal=causal)


def leak_next_row(q, k, v, *, causal):
    """Every row of o sees a little of the next token's v: one row of reach."""
    o, lse = clean(q, k, v, causal=causal)
    following = torch.cat([v[:, 1:], v[:, -1:]], 1).detach().float()
    return o + 1e-6 * following, lse


def forward_only(q, k, v, *, causal):
    return clean(q.detach(), k.detach(), v.detach(), causal=causal)


def noisy(q, k, v, *, causal):
    o, lse = clean(q, k, v, causal=causal)
    return o * (1 + 1e-4 * torch.rand(o.shape)), lse


def mixes_documents(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, *, causal):
    o, lse = exact_attention(q, k, v, cu_seqlens_q, cu_seqlens_k, causal=causal, dtype=torch.float32)
    return o + 1e-3 * v.float().abs().amax().detach(), lse


def mixes_batch(q, k, v, *, causal):
    o, lse = clean(q, k, v, causal=causal)
    return o, lse + 1e-3 * q.detach().float().abs().amax()


FUNCTIONS = {
    f.__name__: f
    for f in (
        clean,
        per_tensor_v,
        leak_in_o,
        leak_in_lse,
        leak_in_dq,
        leak_next_row,
        forward_only,
        noisy,
        mixes_documents,
        mixes_batch,
    )
}


@pytest.fixture
def attention():
    """The faulty attentions by name."""
    return FUNCTIONS
