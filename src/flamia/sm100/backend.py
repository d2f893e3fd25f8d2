"""The Blackwell backend's door: quantize, attend, finish. No host synchronisation; nothing depends on lengths."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor

from flamia.compiler import load
from flamia.documents import TOKEN_BLOCK, Documents
from flamia.doors import along_channels, device_sizes, dry_run, e4m3
from flamia.plan import Plan
from flamia.quantize.finish import document_prescale, finish_dq
from flamia.quantize.gradients import Gradients
from flamia.quantize.lists import list_words, lists_in, work_lists
from flamia.quantize.payloads import E4M3Payload, Payloads, empty_payloads
from flamia.quantize.prepare import prepare_backward, prepare_forward
from flamia.quantize.tail import clear_tail, finish_forward
from flamia.reference.forward import Forward
from flamia.sm100.kernels import ARCHS, QUERIES, backward_kernels, claims, forward_kernels, keys_of_item, takes_pairs
from flamia.worklists import Tiling, WorkLists, head_section


@lru_cache(maxsize=64)
def target(index: int) -> str:
    """What kernels of a device are compiled for."""
    return ARCHS[torch.cuda.get_device_capability(index)]


def tiling(plan: Plan, documents: Documents) -> Tiling:
    """Of the work lists that these kernels read."""
    return Tiling(forward=QUERIES, backward=keys_of_item(_by_pairs(plan, documents)))


def _by_pairs(plan: Plan, documents: Documents) -> bool:
    return takes_pairs(plan, documents.total_q, documents.total_k)


def run_forward(
    plan: Plan, q: Tensor, k: Tensor, v: Tensor, documents: Documents
) -> tuple[Tensor, Tensor, Forward, list[Tensor]]:
    """Attention of packed q [T, heads, D], k, v [Tk, kv heads, D] on a Blackwell device.

    Returns:
        o [T, heads, D] in q's dtype; lse FP32 [heads, T], natural log; the ``Forward``, whose o is the same tensor; and
        what a backward needs, in the order of ``empty_kept``.
    """
    q, k, v = map(along_channels, (q, k, v))
    # Triton launches on the current device.
    with torch.cuda.device(q.device):
        lists = work_lists(documents, plan.left, plan.right, tiling(plan, documents))
        operands = prepare_forward(plan, q, k, v, lists)
        result = forward(plan, operands.payloads, documents, lists, q.dtype)
        lse = finish_forward(result.o, result.lse2, result.row_max, documents.cu_seqlens_q)
    assert lists.buffer is not None
    kept = [*operands.payloads.flatten(), operands.maxima, lists.buffer] if plan.training else []
    return result.o, lse, result, kept


def run_backward(
    plan: Plan,
    do: Tensor,
    dlse: Tensor | None,
    o: Tensor,
    lse2: Tensor,
    row_max: Tensor,
    kept: list[Tensor],
    documents: Documents,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv in do's dtype, from what ``run_forward`` returned. dlse FP32 [heads, T] or None."""
    *tensors, maxima, buffer = kept
    k_maxima, v_maxima = maxima
    payloads = Payloads.unflatten(plan.forward_specs, tensors)
    do = along_channels(do)
    with torch.cuda.device(do.device):
        lists = lists_in(buffer, documents, tiling(plan, documents))
        dlse = None if dlse is None else dlse.contiguous()
        gradients = prepare_backward(plan, do, dlse, o, lse2, row_max, payloads, documents, lists)
        bound = (payloads, gradients, lse2, k_maxima, v_maxima)
        dk, dv, launch = bind_backward(plan, *bound, documents, lists, do.dtype)
        launch()
        # The memory of the gradient's codes serves dq.
        del launch
        gradients.payloads.clear()
        clear_tail(dk, dv, documents.cu_seqlens_k)
        dq = torch.empty(do.shape, dtype=do.dtype, device=do.device)
        finish_dq(plan, gradients, k_maxima, v_maxima, documents, lists.q, dq, fragments=True)
    return dq, dk, dv


def empty_kept(plan: Plan, q: Tensor, k: Tensor, documents: int) -> list[Tensor]:
    """Uninitialised tensors like those that ``run_forward`` keeps for the backward: payloads, maxima of K and of V,
    work lists.
    """
    maxima = q.new_empty((2, k.shape[1], documents), dtype=torch.float32)
    tiles = Tiling(forward=QUERIES, backward=keys_of_item(takes_pairs(plan, q.shape[0], k.shape[0])))
    lists = q.new_empty(list_words(q.shape[0], k.shape[0], documents, tiles), dtype=torch.int32)
    payloads = empty_payloads(plan.forward_specs, q, k, documents, token_maxima=plan.reads_token_maxima)
    return [*payloads, maxima, lists]


def forward(plan: Plan, payloads: Payloads, documents: Documents, lists: WorkLists, dtype: torch.dtype) -> Forward:
    """Attention of quantized operands. o of ``dtype`` [T, heads, D]; lse2 and row_max FP32 [heads, T].

    Rows of no document are left unset, unless there is no key at all.
    """
    result, launch = bind_forward(plan, payloads, documents, lists, dtype)
    launch()
    return result


def bind_forward(
    plan: Plan, payloads: Payloads, documents: Documents, lists: WorkLists, dtype: torch.dtype
) -> tuple[Forward, Callable[[], None]]:
    """Unset outputs as ``forward`` returns them, and what launches the kernel that fills them."""
    q, k, v = (e4m3(payloads, name) for name in "qkv")
    device, heads = q.codes.device, plan.heads_q
    o = torch.empty((documents.total_q, heads, plan.head_dim), dtype=dtype, device=device)
    lse2, row_max = (torch.empty((heads, documents.total_q), dtype=torch.float32, device=device) for _ in range(2))
    result = Forward(o, lse2, row_max)
    (function,) = (load(kernel) for kernel in forward_kernels(plan, dtype, target(device.index)))
    if documents.total_q == 0 or documents.count == 0:
        return result, lambda: None
    if documents.total_k == 0:

        def fill() -> None:
            o.zero_(), lse2.fill_(-torch.inf), row_max.zero_()

        return result, fill
    multiprocessors, cache = device_sizes(device.index)
    bytes_per_token = 2 * plan.head_dim // plan.ratio  # K and V, shared by the query heads of a group
    section = head_section(documents.total_k, heads, bytes_per_token, cache)
    work = lists.forward
    arguments = (
        *(x.codes.view(torch.float8_e4m3fn) for x in (q, k, v)),
        *(o, lse2, row_max, q.exponents, k.exponents, v.exponents),
        *(work.items, work.count, documents.cu_seqlens_q, documents.cu_seqlens_k),
        *(plan.score_scale, plan.left or 0, plan.right or 0, section),
        len(work.items) * heads if claims(plan) else multiprocessors,
    )
    return result, lambda: function(*arguments)


def bind_backward(
    plan: Plan,
    payloads: Payloads,
    gradients: Gradients,
    lse2: Tensor,
    k_maxima: Tensor,
    v_maxima: Tensor,
    documents: Documents,
    lists: WorkLists,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Callable[[], None]]:
    """Unset dk and dv of ``dtype`` [Tk, kv heads, D], and what launches the kernel that fills them and adds up dq.

    lse2: FP32 [heads, T], of the forward. Keys of no document are left unset.
    """
    q, k, v = (e4m3(payloads, name) for name in "qkv")
    do = gradients.payloads["do"]
    assert isinstance(do, E4M3Payload)
    dk, dv = (torch.empty(v.codes.shape, dtype=dtype, device=v.codes.device) for _ in range(2))
    pairs = _by_pairs(plan, documents)
    (function,) = (load(kernel) for kernel in backward_kernels(plan, dtype, target(dk.device.index), pairs))
    if documents.total_k == 0 or documents.total_q == 0 or documents.count == 0:

        def fill() -> None:
            for x in (dk, dv, gradients.accumulator):
                x.zero_()

        return dk, dv, fill
    multiprocessors, cache = device_sizes(dk.device.index)
    causal = plan.recipe.accumulator_scale == "causal"
    scale = gradients.prescale if causal else document_prescale(plan, gradients, k_maxima, v_maxima, documents)
    slabs = (plan.heads_q, gradients.accumulator.shape[1] // TOKEN_BLOCK) if plan.deterministic else (1, 1)
    turns = torch.zeros(slabs, dtype=torch.int32, device=dk.device)
    bytes_per_token = 2 * plan.head_dim * plan.ratio  # Q and dO, of the heads of a group
    work = lists.backward
    arguments = (
        *(x.codes.view(torch.float8_e4m3fn) for x in (q, k, v, do)),
        *(dk, dv, gradients.accumulator, turns, lse2, gradients.delta),
        *(q.exponents, k.exponents, v.exponents, do.exponents, scale),
        *(work.items, work.count, documents.cu_seqlens_q, documents.cu_seqlens_k, lists.q.column_starts),
        *(plan.score_scale, plan.softmax_scale, plan.left or 0, plan.right or 0),
        head_section(documents.total_q, plan.heads_kv, bytes_per_token, cache),
        _backward_grid(plan, len(work.items), documents.total_k, work.tile, pairs, multiprocessors),
    )
    return dk, dv, lambda: function(*arguments)


def _backward_grid(plan: Plan, items: int, keys: int, tile: int, pairs: bool, multiprocessors: int) -> int:
    """CTAs of the backward: one, or a pair, for each tile that a row of so many keys has without documents.

    Documents that end within a tile make more items, up to ``items`` for each head; CTAs that are done take those over,
    since they are the last and shortest of the list (paper B.6, whose second launch this saves). In a fixed order of dq
    an item may wait for any before it, and each has a CTA of its own.
    """
    size = 2 if pairs else 1
    most = items * plan.heads_kv
    row = -(-keys // tile) * plan.heads_kv
    return size * (most if plan.deterministic else min(most, max(row, multiprocessors // size)))


def show_launches(plan: Plan, dtype: torch.dtype) -> None:
    """Every launch of a Triton kernel that a call with this plan, and its backward, may need: ``launch.recording``."""
    dry_run(plan, dtype, columns=False)


def kernel_names(plan: Plan, direction: str, x: Tensor, documents: Documents) -> tuple[str, ...]:
    """What ran, in order, for ``last_plan()``. x: q, or do in the backward."""
    arch = target(x.device.index)
    if direction == "forward":
        names = [kernel.name for kernel in forward_kernels(plan, x.dtype, arch)]
        return ("quantize.triton_lists", "quantize.triton_operands", *names, "quantize.triton_tail")
    names = [kernel.name for kernel in backward_kernels(plan, x.dtype, arch, _by_pairs(plan, documents))]
    return (
        "quantize.triton_lists",
        "quantize.triton_gradients",
        *names,
        "quantize.triton_tail",
        "quantize.triton_finish",
    )
