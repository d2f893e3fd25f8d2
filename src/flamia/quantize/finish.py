"""The last launches of a backward: dq from its FP16 accumulator, dk and dv from FP32 partial sums (paper A.2, A.4).

Twins: ``reference.backward``'s ``finished_dq`` and ``prescale``, ``Chunk.sum_shared``, and the end of
``reference.backend.run_backward``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flamia.bounds import ACCUMULATOR_TARGET
from flamia.documents import Documents, column_capacity
from flamia.launch import cdiv, head_grid, launch
from flamia.plan import Plan
from flamia.quantize.gradients import Gradients, lost_line
from flamia.quantize.operands import chunk_width
from flamia.worklists import TokenTables

_ROWS = 64


_DOCUMENTS = 128  # per program


def fragment_order(head_dim: int) -> Tensor:
    """Place of (row, channel) within 16 rows of the accumulator in fragment order, int64 [16, D].

    The order in which the threads of a warp hold a 16-row slab of an FP32 ``wgmma`` or ``mma`` accumulator: thread
    (row % 8) * 4 + (channel % 8) / 2 writes 16 bytes for every 16 channels, so a warp's stores are contiguous.
    """
    row = torch.arange(16).view(16, 1)
    channel = torch.arange(head_dim).view(1, -1)
    lane = row % 8 * 4 + channel % 8 // 2
    return (channel // 16 * 32 + lane) * 8 + channel // 8 % 2 * 4 + row // 8 * 2 + channel % 2


def finish_dq(
    plan: Plan,
    gradients: Gradients,
    k_maxima: Tensor,
    v_maxima: Tensor,
    documents: Documents,
    tables: TokenTables,
    out: Tensor,
    *,
    fragments: bool = False,
) -> None:
    """dq from its accumulator in one launch: order, prescale and softmax scale undone, rotated back, rounded.

    Args:
        gradients: of the same backward; its accumulator holds the sums.
        k_maxima, v_maxima: FP32 [kv heads, documents], max |k| (rotated) and |v| of each document.
        documents, tables: of this call; the tables of its queries.
        out: BF16 or FP16 [T, N, D], contiguous along D; every token is written, those of no document with zeros.
        fragments: the accumulator's 16-row slabs are in ``fragment_order``.
    """
    total, heads, dim = out.shape
    capacity = column_capacity(total, documents.count)
    if capacity and heads:
        causal = gradients.prescale.numel() > 0
        rows = 32 if dim <= 128 else 64
        launch(
            "flamia.quantize.triton_finish:_dq_kernel",
            head_grid(cdiv(capacity, rows), heads),
            (
                gradients.accumulator, tables.blocks, gradients.prescale, gradients.maxima, k_maxima, v_maxima,
                documents.cu_seqlens_k, out, out.stride(0), out.stride(1), total, capacity // 32, documents.count,
                plan.softmax_scale, *lost_line(plan), heads, plan.ratio,
            ),
            warps=2 if dim <= 128 else 8, D=dim, W=chunk_width(dim), R=rows, ROTATE=plan.rotates,
            SCALED=plan.recipe.accumulator == "fp16", CAUSAL=causal, TARGET=ACCUMULATOR_TARGET[plan.recipe.format],
            FRAGMENTS=fragments,
        )  # fmt: skip


def document_prescale(
    plan: Plan, gradients: Gradients, k_maxima: Tensor, v_maxima: Tensor, documents: Documents
) -> Tensor:
    """Exponents of the dQ accumulator under the sequence scale, int32 [N, documents], in one launch.

    ``finish_dq`` finds the same ones by itself; a kernel that scales its partial sums reads them here.
    """
    heads, count = gradients.maxima.shape[1:]
    out = k_maxima.new_empty((heads, count), dtype=torch.int32)
    if heads and count:
        arguments = (gradients.maxima, k_maxima, v_maxima, documents.cu_seqlens_k, out, count)
        launch(
            "flamia.quantize.triton_finish:_prescale_kernel",
            (cdiv(count, _DOCUMENTS), heads),
            (*arguments, *lost_line(plan), heads, plan.ratio),
            warps=4,
            TARGET=ACCUMULATOR_TARGET[plan.recipe.format],
            BLOCK=_DOCUMENTS,
        )
    return out


def finish_dk_dv(plan: Plan, dk_sums: Tensor, dv_sums: Tensor, dk: Tensor, dv: Tensor) -> None:
    """dk and dv in one launch from partial sums per query head: softmax scale, sum over shared heads, dk rotated back.

    Args:
        dk_sums, dv_sums: FP32 [Tk, N, D] of N query heads (or of the kv heads, already summed), contiguous.
        dk, dv: BF16 or FP16 [Tk, kv heads, D], contiguous along D.
    """
    total, heads, dim = dk.shape
    ratio = dk_sums.shape[1] // heads
    if total and heads:
        outputs = (dk, dk.stride(0), dk.stride(1), dv, dv.stride(0), dv.stride(1))
        launch(
            "flamia.quantize.triton_finish:_dk_dv_kernel",
            (cdiv(total, _ROWS) * heads, 2),
            (dk_sums, dv_sums, *outputs, total, plan.softmax_scale),
            warps=4 if dim <= 128 else 8,
            HEADS=heads,
            RATIO=ratio,
            D=dim,
            W=chunk_width(dim),
            R=_ROWS,
            ROTATE=plan.rotates,
        )
