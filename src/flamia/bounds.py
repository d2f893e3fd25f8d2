"""Bounds that backends share with the reference: where sums may lose weight, and what that costs elsewhere."""

from __future__ import annotations

import torch
from torch import Tensor

from flamia.plan import Plan

# A folded weight whose V exponent is this far below the group's largest may be a subnormal code or zero while the
# weight itself is not small: it then enters the row sum unrounded.
FOLD_RANGE = 6
# Row sums by a tensor core that cuts off: weights are multiplied by 1 + m/8 for each of these m. Outputs are ratios of
# two such sums, and products with one bit fall less short than those with V's three or four. One comes twice: its two
# columns lie in one thread, which writes lse.
SUM_MANTISSAS = (0, 0, 1, 2, 3, 4, 5, 7)
# Exact operands, folded: a column of the value product sums the codes of keys whose V exponents lie in one window of so
# many, from the smallest that V's exponents have. Keys above the last window are summed apart.
SUM_WINDOW, SUM_WINDOWS = 16, 8
ACCUMULATOR_TARGET = {"mxfp8": 15, "nvfp4": 15, "fp4": 14}  # log2 of the bound of prescaled FP16 sums (paper A.4)


def lost_weight(plan: Plan, keys: Tensor) -> Tensor:
    """Bound of 1 + 2 lambda, FP32, for rows that see up to ``keys`` keys (FP32, any shape).

    lambda is the weight that a row's denominator misses, relative to the denominator. With row sums from the codes it
    is what rounds to nothing: in E4M3 less than 2^-10 of a key whose largest is 2^a, times 2^6 where V's exponents are
    folded in; in E2M1 a third of what a group keeps and more, and whole groups whose UE4M3 scale is zero.
    """
    recipe = plan.recipe
    if recipe.row_sum == "weights":
        return torch.ones_like(keys)
    if recipe.format == "fp4":
        return 5.0 + keys * 2.0 ** -(6 + recipe.p_shift)
    folds = plan.per_token or recipe.variant == "folded"
    return 1.0 + keys * 2.0 ** ((FOLD_RANGE if folds else 0) - 9 - recipe.p_shift)


def uneven_documents(exponents: Tensor, cu_seqlens: Tensor) -> Tensor:
    """uint8 [heads, documents]: 1 where exponents of a document, UE8M0 [heads, T], vary by more than ``FOLD_RANGE``.

    cu_seqlens: int32 [documents + 1]. Documents without tokens vary by nothing.
    """
    documents = cu_seqlens.shape[0] - 1
    tokens = torch.arange(exponents.shape[1], device=exponents.device)
    owner = torch.searchsorted(cu_seqlens[1:].to(torch.int64), tokens, right=True)  # of the tail: documents
    owner = owner.expand(exponents.shape)
    e = exponents.to(torch.int32)
    start = e.new_zeros((exponents.shape[0], documents + 1))
    top = start.scatter_reduce(1, owner, e, "amax")
    below = start.scatter_reduce(1, owner, 255 - e, "amax")
    return (top + below > 255 + FOLD_RANGE)[:, :documents].to(torch.uint8)
