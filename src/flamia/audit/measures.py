"""The numbers of the audit: how far one tensor is from another. Token layout: `[B, S, H, D]`, lse `[B, S, H,
1]`."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Change", "Distance", "change", "distance"]

# A row whose norm is below this share of its head's median row norm is compared with that floor instead: a dq
# that is zero but for rounding (the first causal row's, say) would otherwise make any change look infinite.
NORM_FLOOR = 1e-2


@dataclass(frozen=True)
class Change:
    """What changed in rows that should not have.

    Attributes:
        max_rel_change: the largest over rows and heads of |x' - x| / |x|, Euclidean norms over the head dim, with
            |x| at least :data:`NORM_FLOOR` of the median row norm of that head. For lse, a logarithm, the largest
            |lse' - lse| / max(1, |lse|). Infinite where x' is not finite and x is.
        rows: indices along the tokens of the rows that are not bitwise equal, in any head.
    """

    max_rel_change: float
    rows: tuple[int, ...]

    @property
    def bitwise_zero(self) -> bool:
        return not self.rows


def change(before: Tensor, after: Tensor, *, logarithm: bool = False) -> Change:
    """Compare two results for the same rows, `[B, rows, H, D]` (logarithm: an lse, `[B, rows, H, 1]`)."""
    differs = ~same_bits(before, after)
    touched = differs.flatten(2).any(2).any(0)
    rows = tuple(torch.nonzero(touched).flatten().tolist())
    if not rows:
        return Change(0.0, ())
    x, y = before.double(), after.double()
    # Equal entries (also -inf and NaN that stay what they were) have not changed.
    error = torch.where(differs, y - x, 0.0)
    if logarithm:
        relative = error.abs() / x.abs().clamp_min(1)
    else:
        norm = x.norm(dim=-1, keepdim=True)
        floor = NORM_FLOOR * norm.nanmedian(1, keepdim=True).values
        size = torch.maximum(norm, floor)
        # A head whose rows are all zero has no size to compare with: any change counts as 1.
        relative = torch.where(size > 0, error.norm(dim=-1, keepdim=True) / size, (error != 0).any(-1, True).double())
    largest = relative.max().item()
    return Change(largest if math.isfinite(largest) else math.inf, rows)


def same_bits(a: Tensor, b: Tensor) -> Tensor:
    """Elementwise equality of the bits: NaN equals the same NaN, +0 differs from -0."""
    integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    return a.contiguous().view(integers) == b.contiguous().view(integers)


@dataclass(frozen=True)
class Distance:
    """How far a result is from the exact one, over all of its entries.

    Attributes:
        cosine: <x, exact> / (|x| |exact|).
        relative_error: root mean square of x - exact, divided by that of exact.
        bias: mean of x - exact, divided by the mean of |exact|; what does not average out over entries.
        gain: <x, exact> / <exact, exact> - 1; negative where a result is shrunk.
        worst_head: the lowest cosine of one head.
    """

    cosine: float
    relative_error: float
    bias: float
    gain: float
    worst_head: float


def distance(x: Tensor, exact: Tensor) -> Distance:
    """Distance of `x` from `exact`, both `[B, S, H, D]`; NaN in x gives NaN."""
    a, b = x.double(), exact.double()
    dot, aa, bb = ((u * v).sum(dim=(0, 1, 3)) for u, v in ((a, b), (a, a), (b, b)))  # [H]
    heads = dot / (aa * bb).sqrt().clamp_min(torch.finfo(torch.float64).tiny)
    error = a - b
    tiny = torch.finfo(torch.float64).tiny
    return Distance(
        cosine=(dot.sum() / (aa.sum() * bb.sum()).sqrt().clamp_min(tiny)).item(),
        relative_error=(error.square().sum() / bb.sum().clamp_min(tiny)).sqrt().item(),
        bias=(error.mean() / b.abs().mean().clamp_min(tiny)).item(),
        gain=(dot.sum() / bb.sum().clamp_min(tiny)).item() - 1,
        worst_head=heads.min().item(),
    )
