"""One launch for the output gradient: payloads, delta, norms, the backward's constants, a cleared accumulator.

Twins: ``reference.backend.run_backward`` up to the backend's call, ``reference.backward.prescale`` and the constants of
``reference.folded._ChunkBackward``. A program owns 256 tokens of one document and head, the group that shares C in the
folded backward, and walks over it in steps; what depends on the whole group is finished after the last step.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from flamia.bounds import ACCUMULATOR_TARGET, lost_weight
from flamia.documents import Documents, column_capacity
from flamia.launch import head_grid, launch
from flamia.plan import Plan
from flamia.quantize.operands import (
    ORDERS,
    ROWS,
    check_tensor,
    chunk_warps,
    chunk_width,
    scale_words,
)
from flamia.quantize.payloads import E4M3Payload, NVFP4Columns, NVFP4Rows, Payload, backward_specs
from flamia.worklists import GROUP, UNBOUNDED, WorkLists

_SCAN = 4096  # tokens that one program takes at a time; there are few programs, which wait for each load


@dataclass
class Gradients:
    """What the attention backward reads about do. N query heads, T queries, C column capacity.

    Attributes:
        payloads: of do (folded: of do 2^(M - lse)), by name.
        delta: FP32 [N, T], do . o of the quantized do in do's units, minus dlse.
        norm: FP32 [N, T], ||do||_1.
        maxima: FP32 [2, N, documents], the largest norm and |dlse| of each document.
        prescale: int32 [N, T], exponent of the accumulator's causal scale; empty for the sequence scale, which follows
            from the maxima.
        accumulator: zeros [N, C, D] in the dtype of the dQ sums, laid out as column payloads lay out tokens.
        addend: folded, FP32 [N, T]: e_T - C + 8 - M, the addend of the exponent (exact operands: -M); -inf in dead
            rows, those whose T and delta are zero. Where only T is zero, C stands for e_T here and below.
        unit: folded, int32 [N, T]: C - 8 + e_Q, 0 in dead rows.
        b: folded, FP32 [N, T]: delta 2^(C - 8 - e_T + M - lse + e_Q), 0 in dead rows.
        power: folded with exact operands, int32 [N, T]: e_T - C + 8, to apply outside of the exponential.
    """

    payloads: dict[str, Payload]
    delta: Tensor
    norm: Tensor
    maxima: Tensor
    prescale: Tensor
    accumulator: Tensor
    addend: Tensor
    unit: Tensor
    b: Tensor
    power: Tensor


def lost_line(plan: Plan) -> tuple[float, float]:
    """``bounds.lost_weight`` as base and slope over the number of keys, both exact in FP32."""
    base, one = lost_weight(plan, torch.tensor([0.0, 1.0])).tolist()
    return base, one - base


def running_maxima(documents: Documents, k_amax: Tensor, v_amax: Tensor) -> tuple[Tensor, Tensor]:
    """Running maxima over the keys of each document of two tables FP32 [kv heads, Tk], in one launch."""
    k_out, v_out = torch.empty_like(k_amax), torch.empty_like(v_amax)
    heads, total = k_amax.shape
    count = documents.count
    if heads and total:
        launch(
            "flamia.quantize.triton_gradients:_running_kernel",
            (heads, 2),
            (documents.cu_seqlens_k, k_amax, v_amax, k_out, v_out, total, count, count.bit_length()),
            warps=16,
            BLOCK=_SCAN,
        )
    return k_out, v_out


def quantize_gradient(
    plan: Plan,
    do: Tensor,
    o: Tensor,
    dlse: Tensor | None,
    lse2: Tensor,
    row_max: Tensor,
    documents: Documents,
    lists: WorkLists,
    *,
    q_exponents: Tensor | None = None,
    running: tuple[Tensor, Tensor] | None = None,
    columns: bool = False,
) -> Gradients:
    """Everything the backward needs to know about do.

    One launch, after one that clears 8 bytes per document and head, and for NVFP4 columns another one (the document's
    maximum, their second level).

    Args:
        do, o: BF16 or FP16 [T, N, D], contiguous along D. o is the output without v_offset.
        dlse: FP32 [N, T] or None. lse2, row_max: of the forward, FP32 [N, T].
        lists: of these documents.
        q_exponents: UE8M0 [N, T] of q's E4M3 payload, for the folded variant.
        running: ``running_maxima`` of K and V, for the causal scale.
        columns: write the transposed E4M3 codes too.

    Raises:
        ValueError: an input or a recipe that the device quantizers do not make.
    """
    check_tensor("do", do)
    check_tensor("o", o)
    recipe = plan.recipe
    if recipe.is_ablation:
        raise ValueError("ablations of the scales are not made by the device quantizers: use the reference backend")
    total, heads, dim = do.shape
    count, folded, four = documents.count, recipe.variant == "folded", recipe.format == "fp4"
    capacity = column_capacity(total, count)
    fp16, causal = recipe.accumulator == "fp16", recipe.accumulator_scale == "causal" and recipe.accumulator == "fp16"

    def new(*shape: int, dtype: torch.dtype = torch.uint8) -> Tensor:
        return do.new_empty(shape, dtype=dtype)

    def table(wanted: bool = True, dtype: torch.dtype = torch.float32) -> Tensor:
        return new(heads, total, dtype=dtype) if wanted else new(0, dtype=dtype)

    names = {spec.kind: spec.name for spec in backward_specs(recipe, columns)}
    zeros = torch.zeros(3 if four else 2, heads, count, dtype=torch.float32, device=do.device)
    if four:
        rows4 = NVFP4Rows(new(total, heads, dim // 2), new(total, heads, dim // 16), new(heads, total))
        columns4 = NVFP4Columns(new(heads, dim, capacity // 2), new(heads, dim, capacity // 16), new(heads, count))
        # The exponent of documents without queries, which no program writes.
        columns4.exponents.fill_(1)
        made: dict[str, Payload] = {names[NVFP4Rows]: rows4, names[NVFP4Columns]: columns4}
    else:
        eight = E4M3Payload(new(total, heads, dim), new(heads, total), new(heads, dim, capacity) if columns else new(0))
        made = {names[E4M3Payload]: eight}
    result = Gradients(
        payloads=made,
        delta=table(),
        norm=table(),
        maxima=zeros[:2],
        prescale=table(causal, torch.int32),
        accumulator=new(heads, capacity, dim, dtype=torch.float16 if fp16 else torch.float32),
        addend=table(folded),
        unit=table(folded, torch.int32),
        b=table(folded),
        power=table(folded and bool(recipe.exact_operands), torch.int32),
    )
    if folded and q_exponents is None:
        raise ValueError("q_exponents is None: the folded variant needs the exponents of q's E4M3 payload")
    k_running = v_running = result.delta
    if causal:
        if running is None:
            raise ValueError("running is None: accumulator_scale='causal' needs the running maxima of K and V")
        k_running, v_running = running
    groups = lists.q.groups
    tiles = groups.shape[0]
    if tiles == 0 or heads == 0:
        return result
    grid = head_grid(tiles, heads)
    maxima = zeros.view(torch.int32)
    warps, width = chunk_warps(dim), chunk_width(dim)
    if four:
        launch(
            "flamia.quantize.triton_gradients:_document_maxima_kernel",
            grid,
            (do, do.stride(0), do.stride(1), groups, maxima[2], tiles, count),
            warps=warps,
            D=dim,
            W=width,
            R=ROWS,
        )
        outputs = (
            rows4.codes.view(torch.int32), scale_words(rows4.scales), rows4.exponents,
            columns4.codes.view(torch.int32), columns4.scales, columns4.exponents,
        )  # fmt: skip
    else:  # empty payloads cannot be viewed as words, hence not above
        rows, cols = eight.codes.view(torch.int32), eight.columns.view(torch.int32)
        outputs = (rows, eight.codes, eight.exponents, cols, eight.codes, eight.exponents)
    launch(
        "flamia.quantize.triton_gradients:_gradient_kernel",
        grid,
        (
            do, do.stride(0), do.stride(1), o, o.stride(0), o.stride(1), lse2, row_max, lse2 if dlse is None else dlse,
            q_exponents if q_exponents is not None else result.delta, groups, *outputs, maxima[2 if four else 0],
            result.delta, result.norm, maxima, result.prescale, result.accumulator, result.addend, result.unit,
            result.b, result.power, documents.cu_seqlens_q, documents.cu_seqlens_k, k_running, v_running, tiles,
            total, documents.total_k, capacity // 32, count, UNBOUNDED if plan.right is None else plan.right,
            *lost_line(plan), heads, plan.ratio,
        ),
        warps=warps, D=dim, W=width, R=ROWS, FOLDED=folded, PER_TOKEN=plan.per_token or folded, FOUR=four,
        WITH_COLUMNS=columns and not four, ORDER=ORDERS["mma"] if columns and not four else 0, DLSE=dlse is not None,
        CAUSAL=causal, OUTSIDE=bool(recipe.exact_operands), CLEAR=True, TARGET=ACCUMULATOR_TARGET[recipe.format],
        GROUP=GROUP,
    )  # fmt: skip
    return result
