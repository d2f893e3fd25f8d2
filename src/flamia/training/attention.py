"""Attention by name, in the one shape the model uses: causal, packed, [T, H, D]."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

import flamia

from .model import Attend, document_positions

TORCH = {"exact": torch.float32, "bf16": torch.bfloat16}  # torch's own attention, and what it computes in


def attention_names() -> tuple[str, ...]:
    """`exact`, `bf16` and every recipe of flamia."""
    return ("exact", "bf16", *flamia.recipes())


def get_attention(name: str, window: int | None = None, *, backend: str = "auto") -> Attend:
    """The attention called `name`: `attend(q, k, v, cu_seqlens, max_seqlen) -> o`, causal and differentiable.

    Args:
        name: `exact` and `bf16`, torch's attention in FP32 and in BF16 whatever the inputs are, or a recipe of flamia.
        window: how many keys a query sees, its own included; None is all earlier ones.
        backend: of the recipes; see `flamia.flash_attn_varlen_func`.

    q, k, v and o are [T, H, D] of one dtype; cu_seqlens is int32 [documents + 1]; max_seqlen bounds the
    longest document.  Raises ValueError, with a list of what is allowed, for an unknown name.
    """
    if window is not None and window < 1:
        raise ValueError(f"window is {window}; it must be at least 1, or None for no limit")
    if name in TORCH:

        def attend(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_seqlen: int) -> Tensor:
            return exact_attention(q, k, v, cu_seqlens, max_seqlen, window=window, dtype=TORCH[name])

        return attend
    if name not in flamia.recipes():
        raise ValueError(f"recipe is {name!r}; allowed: {', '.join(attention_names())}")
    window_size = (-1, -1) if window is None else (window - 1, 0)

    def attend_in_low_precision(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_seqlen: int) -> Tensor:
        o = flamia.flash_attn_varlen_func(
            q,
            k,
            v,
            cu_seqlens,
            cu_seqlens,
            max_seqlen,
            max_seqlen,
            causal=True,
            window_size=window_size,
            recipe=name,
            backend=backend,
        )
        assert isinstance(o, Tensor)
        return o

    return attend_in_low_precision


def exact_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    *,
    window: int | None = None,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Causal softmax attention inside each document, in `dtype` through torch's own kernels; o has q's dtype.

    Autocast, which lowers torch's attention like its matrix products, has no say in it.
    Documents are laid out as a padded batch [documents, H, max_seqlen, D].  Padding follows a document's
    last token, where causality hides it, so it needs no mask.  The host reads nothing back.  A window adds
    a mask [max_seqlen, max_seqlen].
    """
    tokens, heads, head_dim = q.shape
    documents = cu_seqlens.numel() - 1
    document, position = document_positions(cu_seqlens, tokens)
    slot = document * max_seqlen + position

    def pad(x: Tensor) -> Tensor:
        empty = torch.zeros(documents * max_seqlen, heads, head_dim, dtype=dtype, device=x.device)
        return empty.index_copy(0, slot, x.to(dtype)).view(documents, max_seqlen, heads, head_dim).transpose(1, 2)

    visible = None
    if window is not None:
        visible = torch.ones(max_seqlen, max_seqlen, dtype=torch.bool, device=q.device).tril().triu(1 - window)
    with torch.autocast(q.device.type, enabled=False):
        o = F.scaled_dot_product_attention(pad(q), pad(k), pad(v), attn_mask=visible, is_causal=visible is None)
    return o.transpose(1, 2).reshape(-1, heads, head_dim).index_select(0, slot).to(q.dtype)
