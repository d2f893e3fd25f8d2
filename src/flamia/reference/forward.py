"""Forward of the "block" variant: the paper's arithmetic for MXFP8, mixed NVFP4/FP8 and all-4-bit (3.1-3.4, B.1).

Online softmax over tiles of 128 keys with conditional rescaling. Scores, maxima, sums and outputs are FP32; products
are exact sums rounded once to FP32; each tile's partial output is added in FP32, tiles ascending.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from flamia.documents import Documents
from flamia.plan import Plan
from flamia.quantize.payloads import Payloads
from flamia.reference.chunks import Chunk, chunks
from flamia.reference.exponentials import exp2
from flamia.reference.geometry import TILE, Geometry, Run, padded_length
from flamia.reference.weights import EightBitWeights, FourBitWeights, weights

RUN_ELEMENTS = 1 << 20  # scores held at a time


@dataclass
class Forward:
    """Result of a forward: o FP32 [T, heads, D]; lse2 (base 2) and row reference, FP32 [heads, T].

    The row reference is the last retained maximum ("block") or the integer-stepped M ("folded").
    """

    o: Tensor
    lse2: Tensor
    row_max: Tensor


def scaled_scores(q: Tensor, k: Tensor, scale: float, run_visible: Tensor | None) -> Tensor:
    """Base-2 scores FP64 [N, m, n]: FP32(q k^T) times FP32(scale), exact; -inf where masked."""
    factor = float(torch.tensor(scale, dtype=torch.float32))
    s = torch.bmm(q, k.transpose(1, 2)).to(torch.float32).to(torch.float64) * factor
    return s if run_visible is None else s.masked_fill(~run_visible, -torch.inf)


def tiles_per_run(chunk: Chunk) -> int:
    """Tiles to process together so that about ``RUN_ELEMENTS`` scores are held."""
    return max(1, RUN_ELEMENTS // (chunk.count * TILE * TILE))


def forward(plan: Plan, payloads: Payloads, documents: Documents) -> Forward:
    """Attention of every document. Rows that see no key: o = 0, lse2 = -inf."""
    device = documents.cu_seqlens_q.device
    o = torch.zeros(documents.total_q, plan.heads_q, plan.head_dim, device=device)
    lse2 = torch.full((plan.heads_q, documents.total_q), -torch.inf, device=device)
    row_max = torch.zeros(plan.heads_q, documents.total_q, device=device)
    for chunk in chunks(documents, plan.heads_kv, plan.ratio, plan.head_dim, plan.left, plan.right):
        q, k = chunk.head_values(payloads["q"], "q"), chunk.head_values(payloads["k"], "k")
        quantizer = weights(plan, chunk, payloads)
        results = [
            _rows(plan, q[:, q0 : q0 + TILE], k, quantizer, chunk.geometry, q0, tiles_per_run(chunk))
            for q0 in range(0, padded_length(chunk.group.len_q), TILE)
        ]
        for out, parts in zip((o, lse2, row_max), zip(*results, strict=True), strict=True):
            whole = torch.cat(parts, 1)
            if out is o:
                chunk.scatter(out, whole, "q")
            else:
                chunk.scatter_table(out, whole, "q")
    return Forward(o, lse2, row_max)


def _rows(
    plan: Plan,
    q: Tensor,
    k: Tensor,
    quantizer: EightBitWeights | FourBitWeights,
    geometry: Geometry,
    q0: int,
    most: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """One tile of queries [N, m, D] against its keys -> o [N, m, D], lse2 [N, m], row maximum [N, m]."""
    n, m, d = q.shape
    maximum = torch.full((n, m), -torch.inf, device=q.device)
    total = torch.zeros(n, m, device=q.device)
    out = torch.zeros(n, m, d, device=q.device)
    for run in geometry.key_runs(q0, q0 + m, most, q.device):
        s = scaled_scores(q, k[:, run.start : run.stop], plan.score_scale, run.visible)
        maxima = retained_maxima(s, maximum, plan.recipe.tau or 0.0, run, quantizer.bump(run))
        reference = torch.where(maxima == -torch.inf, 0.0, maxima)
        p, sums = quantizer(s, reference, run)
        v = quantizer.operand(run)
        width = p.shape[-1] // run.tiles
        for t in range(run.tiles):
            keys = slice(t * width, (t + 1) * width)
            now = maxima[..., t]
            if not torch.equal(now, maximum):
                factor = torch.where(now == maximum, 1.0, exp2(maximum - now))
                out, total = out * factor.unsqueeze(-1), total * factor
            out = out + torch.bmm(p[..., keys], v[:, keys]).to(torch.float32)
            total = total + sums[..., t]
            maximum = now
    seen = total > 0
    inverse = torch.where(seen, 1.0 / torch.where(seen, total, 1.0), 0.0)
    inverse = torch.where(total.isnan(), total, inverse)
    shift = plan.recipe.p_shift if isinstance(quantizer, EightBitWeights) else 0
    lse2 = torch.where(seen, maximum + (log2(total) - shift), -torch.inf)
    lse2 = torch.where(total.isnan(), total, lse2)
    return out * inverse.unsqueeze(-1), lse2, torch.where(maximum == -torch.inf, 0.0, maximum)


def log2(x: Tensor) -> Tensor:
    """log2 rounded to FP32, through FP64; zero and below give an unspecified finite value."""
    return torch.log2(x.to(torch.float64).clamp(min=1e-300)).to(torch.float32)


def retained_maxima(s: Tensor, start: Tensor, tau: float, run: Run, bump: Tensor | None) -> Tensor:
    """Row references [N, m, t], FP32: the maximum so far, replaced only when a tile's exceeds it by more than tau."""
    tops = s.unflatten(-1, (run.tiles, -1)).amax(-1).to(torch.float32)
    current, result = start, []
    for top in tops.unbind(-1):
        if bump is not None:
            top = torch.maximum(top, current) + bump
        current = torch.where(top - current > tau, top, current)
        result.append(current)
    return torch.stack(result, -1)
