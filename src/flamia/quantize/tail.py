"""Last launches of both passes: a natural lse, and zeros where a packed row has tokens of no document.

Twins: the rows of no document in ``reference.forward`` and ``reference.folded``, whose lse is natural here.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flamia.launch import cdiv, launch

_TOKENS = 128  # per program


def finish_forward(o: Tensor, lse2: Tensor, row_max: Tensor, cu_seqlens_q: Tensor) -> Tensor:
    """lse FP32 [heads, T], natural logarithm; writes the rows of no document: o = 0, lse = lse2 = -inf, row_max = 0.

    o [T, heads, D], lse2 and row_max FP32 [heads, T] as the kernel leaves them, whose rows of no document are unset.
    """
    total, heads, dim = o.shape
    lse = torch.empty_like(lse2)
    if total and heads:
        launch(
            "flamia.quantize.triton_tail:_finish_kernel",
            (cdiv(total, _TOKENS), heads),
            (o, lse, lse2, row_max, cu_seqlens_q, total, cu_seqlens_q.shape[0] - 1),
            warps=4,
            exact=False,
            D=dim,
            TOKENS=_TOKENS,
        )
    return lse


def clear_tail(a: Tensor, b: Tensor, cu_seqlens: Tensor) -> None:
    """Zeros where a and b, both [T, heads, D], have tokens of no document; cu_seqlens: int32 [documents + 1]."""
    total, heads, dim = a.shape
    if total and heads:
        launch(
            "flamia.quantize.triton_tail:_clear_kernel",
            (cdiv(total, _TOKENS), heads),
            (a, b, cu_seqlens, total, cu_seqlens.shape[0] - 1),
            warps=4,
            exact=False,
            D=dim,
            TOKENS=_TOKENS,
        )
