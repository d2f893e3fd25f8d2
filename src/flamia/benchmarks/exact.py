"""Exact attention and its gradients over whole packed rows, to hold what is timed against."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from flamia.benchmarks.workloads import offsets

SCORES = 1 << 27  # of a block that is held at a time


class Tensors(NamedTuple):
    """Output [T, heads, D] (None where only gradients are computed), and gradients with the shapes of q, k and v."""

    o: Tensor | None
    dq: Tensor
    dk: Tensor
    dv: Tensor


@torch.no_grad()
def exact_gradients(
    q: Tensor, k: Tensor, v: Tensor, do: Tensor, lengths: tuple[int, ...], causal: bool, block: int = SCORES
) -> Tensors:
    """Attention of packed q, do [T, heads, D], k, v [T, kv heads, D] and its gradients, in FP32 by textbook formulas.

    Chunks of queries against the keys that they can see, ``block`` scores at a time. Products are FP32 as long as
    ``torch.backends.cuda.matmul.allow_tf32`` is off, as it is unless someone turns it on.
    """
    documents = zip(q.split(lengths), k.split(lengths), v.split(lengths), do.split(lengths), strict=True)
    parts = [_document(a, b, c, g, causal, block) for a, b, c, g in documents]
    return Tensors(*(torch.cat(tensors) for tensors in zip(*parts, strict=True)))


def _document(
    q: Tensor, k: Tensor, v: Tensor, do: Tensor, causal: bool, block: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    (length, heads, dim), kv_heads = q.shape, k.shape[1]
    ratio, scale = heads // kv_heads, 1 / math.sqrt(dim)
    keys, values = (x.float().transpose(0, 1) for x in (k, v))
    o, dq = (torch.empty(q.shape, dtype=torch.float32, device=q.device) for _ in range(2))
    dk, dv = torch.zeros_like(keys), torch.zeros_like(values)
    rows = max(1, block // (heads * length))

    def grouped(x: Tensor) -> Tensor:
        # [rows, heads, D] -> [kv heads, ratio * rows, D]
        return x.float().transpose(0, 1).reshape(kv_heads, -1, dim)

    for start in range(0, length, rows):
        stop = min(length, start + rows)
        seen = stop if causal else length
        a, b, c, g = grouped(q[start:stop]), keys[:, :seen], values[:, :seen], grouped(do[start:stop])
        scores = a @ b.mT * scale
        if causal:
            token = torch.arange(seen, device=q.device)
            hidden = token[None, :] > token[start:stop, None]
            scores.view(kv_heads, ratio, stop - start, seen).masked_fill_(hidden, -math.inf)
        p = scores.softmax(-1)
        dp = g @ c.mT
        ds = p * (dp - (p * dp).sum(-1, keepdim=True)) * scale
        for out, result in ((o, p @ c), (dq, ds @ b)):
            out[start:stop] = result.view(heads, stop - start, dim).transpose(0, 1)
        dk[:, :seen] += ds.mT @ a
        dv[:, :seen] += p.mT @ g
    return o, dq, dk.transpose(0, 1), dv.transpose(0, 1)


class Agreement(NamedTuple):
    """How alike two tensors are.

    Attributes:
        cosine: of the whole.
        least: cosine of the document where it is least; NaN where just one of the two is zero.
        size: the largest relative difference of a document's norms.
    """

    cosine: float
    least: float
    size: float


@torch.no_grad()
def agreement(x: Tensor, truth: Tensor, lengths: tuple[int, ...]) -> Agreement:
    """Of two tensors [T, heads, D]; two documents that are zero agree."""
    ends = offsets(list(lengths), x.device).long()[1:]
    document = torch.bucketize(torch.arange(x.shape[0], device=x.device), ends, right=True)
    pairs = ((x, truth), (x, x), (truth, truth))
    tokens = torch.stack([(a.float() * b.float()).sum((1, 2)).double() for a, b in pairs])
    sums = torch.zeros((3, len(lengths)), dtype=torch.float64, device=x.device).index_add(1, document, tokens)
    dot, own, other = torch.cat((sums.sum(1, keepdim=True), sums), 1)
    both_zero = (own == 0) & (other == 0)
    cosine = torch.where(both_zero, 1.0, dot / (own * other).sqrt())
    size = torch.where(both_zero, 0.0, (own / other).sqrt() - 1).abs()
    return Agreement(cosine[0].item(), cosine[1:].min().item(), size[1:].max().item())
