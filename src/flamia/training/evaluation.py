"""The leakage test: the same weights and tokens, once through the training attention, once through the exact one.

A model that found a leak does better through its own attention than through exact attention, because only the
former shows it something of later tokens.  Rounding noise alone does the opposite.  Both losses are taken on the
same rows, so that the difference is known far better than either (paper sections 3.2 and 4.5).

A model also gets used to the rounding it was trained with, which moves the gap a little without any leak: after
300 steps of the probe preset it is -0.0004 ± 0.0001 for mxfp8-exact, which is bitwise causal, and -0.0006 ± 0.0001
for mxfp8.  Hence `MATERIAL`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .data import Row
from .model import GPT, Attend, document_positions

MATERIAL = 0.002  # nats per byte; a smaller gap is not called a leak
BLOCK = 32  # tokens in the largest group that shares a scale; positions in a document are counted modulo this


@dataclass(frozen=True)
class Evaluation:
    """Validation losses in nats per byte.

    Attributes:
        step: optimiser steps before it.
        own, exact: mean loss through the training attention and through exact attention.
        gap: own - exact; below zero is the sign of a leak.
        gap_standard_error: of the gap, from the spread of the rows' gaps.
        own_rows, exact_rows: mean loss of each validation row, to compare runs row by row.
        gap_by_position: mean gap of tokens by their position in the document modulo 32.  A scale shared by 16
            keys can tell the first 15 of them something, and the last one nothing.
    """

    step: int
    own: float
    exact: float
    gap: float
    gap_standard_error: float
    own_rows: tuple[float, ...]
    exact_rows: tuple[float, ...]
    gap_by_position: tuple[float, ...]


@torch.no_grad()
def evaluate(
    model: GPT, rows: Sequence[Row], max_seqlen: int, own: Attend, exact: Attend, *, step: int = 0
) -> Evaluation:
    """Evaluates `model` on packed rows through both attentions.  Gaps of positions no row has are NaN."""
    own_rows, exact_rows = [], []
    sums = torch.zeros(BLOCK, dtype=torch.float64, device=rows[0].tokens.device)
    counts = torch.zeros_like(sums)
    for row in rows:
        mine = model.loss(row.tokens, row.targets, row.cu_seqlens, max_seqlen, own).double()
        true = mine if own is exact else model.loss(row.tokens, row.targets, row.cu_seqlens, max_seqlen, exact).double()
        own_rows.append(mine.mean())
        exact_rows.append(true.mean())
        _, position = document_positions(row.cu_seqlens, row.tokens.numel())
        sums.index_add_(0, position % BLOCK, mine - true)
        counts.index_add_(0, position % BLOCK, torch.ones_like(mine))
    a, b = torch.stack(own_rows), torch.stack(exact_rows)
    gap, error = mean_and_error((a - b).tolist())
    return Evaluation(
        step=step,
        own=float(a.mean()),
        exact=float(b.mean()),
        gap=gap,
        gap_standard_error=error,
        own_rows=tuple(a.tolist()),
        exact_rows=tuple(b.tolist()),
        gap_by_position=tuple((sums / counts).tolist()),
    )


def mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    """Mean of `values` and its standard error; the error of a single value is NaN, for nothing is known of it."""
    mean = math.fsum(values) / len(values)
    if len(values) < 2:
        return mean, math.nan
    variance = math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1)
    return mean, math.sqrt(variance / len(values))


def compare(a: Evaluation, b: Evaluation) -> tuple[float, float]:
    """How much higher b's loss is than a's, each through its own attention, row by row, with the standard error.

    Both must have been evaluated on the same rows.  The error tells how well the difference is known on these two
    sets of weights; that another seed would have given other weights is not in it.
    """
    if len(a.own_rows) != len(b.own_rows):
        raise ValueError(f"b has {len(b.own_rows)} validation rows; a has {len(a.own_rows)}, and they must be the same")
    return mean_and_error([y - x for x, y in zip(a.own_rows, b.own_rows, strict=True)])
