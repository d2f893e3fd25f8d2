"""The reference backend's door: quantize, attend, and back, on tensors of any device that has FP64."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from flamia import formats
from flamia.documents import Documents
from flamia.plan import Plan
from flamia.quantize.payloads import Payloads
from flamia.quantize.reference import TokenMap, dequantize, make_all, prepare, token_amax
from flamia.reference import folded
from flamia.reference.backward import backward
from flamia.reference.exponentials import exp2
from flamia.reference.forward import Forward, forward

KERNELS = {
    ("block", "forward"): ("quantize.reference", "reference.forward"),
    ("block", "backward"): ("quantize.reference", "reference.backward"),
    ("folded", "forward"): ("quantize.reference", "reference.folded.forward"),
    ("folded", "backward"): ("quantize.reference", "reference.folded.backward"),
}


def run_forward(
    plan: Plan,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    documents: Documents,
    k_offset: Tensor | None,
    v_offset: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Forward, Payloads]:
    """Attention of packed q [T, heads, D], k, v [Tk, kv heads, D].

    Returns:
        o [T, heads, D] and o without v_offset (the same tensor where there is none), both in q's dtype; lse FP32
        [heads, T], natural log; the ``Forward`` and the ``Payloads`` for the backward.
    """
    maps = _maps(documents)
    sources = {
        "q": prepare(q, maps["q"], rotate=plan.rotates),
        "k": prepare(k, maps["k"], rotate=plan.rotates, offset=k_offset),
        "v": prepare(v, maps["v"], offset=v_offset),
    }
    items = make_all(plan.forward_specs, sources, maps, per_token=plan.per_token, rounding=plan.recipe.scale_rounding)
    empty = torch.empty(0, device=q.device)
    amax = {name: token_amax(sources[name]) if plan.training else empty for name in "kv"}
    payloads = Payloads(items, amax["k"], amax["v"])
    run = folded.forward if plan.recipe.variant == "folded" else forward
    result = run(plan, payloads, documents)
    lse = result.lse2 * math.log(2.0)
    centred = result.o.to(q.dtype)
    o = centred
    if v_offset is not None:
        seen = (result.lse2 != -torch.inf).t().unsqueeze(-1)
        shift = v_offset.to(torch.float32).repeat_interleave(plan.ratio, 0)
        o = (result.o + torch.where(seen, shift, 0.0)).to(q.dtype)
    if k_offset is not None:
        shift = k_offset.to(torch.float32).repeat_interleave(plan.ratio, 0)
        valid = maps["q"].valid.view(-1, 1, 1)
        lse = lse + formats.tree_sum(torch.where(valid, q, 0).to(torch.float32) * shift).t() * plan.softmax_scale
    return o, centred, lse, result, payloads


def run_backward(
    plan: Plan,
    do: Tensor,
    dlse: Tensor | None,
    o: Tensor,
    lse2: Tensor,
    row_max: Tensor,
    payloads: Payloads,
    documents: Documents,
    k_offset: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv in do's dtype. o is the output without v_offset; dlse FP32 [heads, T] or None."""
    maps = _maps(documents)
    source = prepare(do, maps["do"])
    norm = formats.tree_sum(source.abs()).t()
    scale = torch.ones_like(lse2)
    if plan.recipe.variant == "folded":
        scale = torch.where(lse2 == -torch.inf, 0.0, exp2(row_max - lse2))
    items = make_all(
        plan.backward_specs,
        {"do": source * scale.t().unsqueeze(-1)},
        maps,
        per_token=plan.per_token or plan.recipe.variant == "folded",
        rounding=plan.recipe.scale_rounding,
    )
    empty = torch.empty(0, device=do.device)
    do_payloads = Payloads(items, empty, empty)
    valid = maps["do"].valid.view(-1, 1, 1)
    delta = formats.tree_sum(dequantize(items["do"]) * torch.where(valid, o, 0).to(torch.float32)).t()
    # lse is the constant -inf where a row sees no key, so whatever gradient arrives there, NaN included, is dropped.
    dlse = torch.zeros_like(lse2) if dlse is None else torch.where(lse2 == -torch.inf, 0.0, dlse)
    do_norm = torch.stack((norm, dlse.abs()), -1)
    if plan.recipe.variant == "folded":
        # The payload holds do * 2^(M - lse): back to do's units.
        delta = delta * torch.where(lse2 == -torch.inf, 0.0, exp2(lse2 - row_max))
        dq, dk, dv = folded.backward(plan, payloads, do_payloads, documents, lse2, row_max, delta - dlse, do_norm)
    else:
        dq, dk, dv = backward(plan, payloads, do_payloads, documents, lse2, delta - dlse, do_norm)
    if plan.rotates:
        dq, dk = formats.hadamard(dq), formats.hadamard(dk)
    if k_offset is not None:
        shift = k_offset.to(torch.float32).repeat_interleave(plan.ratio, 0)
        dq = dq + torch.where(valid, dlse.t().unsqueeze(-1) * shift * plan.softmax_scale, 0.0)
    return dq.to(do.dtype), dk.to(do.dtype), dv.to(do.dtype)


def _maps(documents: Documents) -> dict[str, TokenMap]:
    q = TokenMap.build(documents.cu_seqlens_q, documents.total_q)
    k = TokenMap.build(documents.cu_seqlens_k, documents.total_k)
    return {"q": q, "do": q, "k": k, "v": k}
