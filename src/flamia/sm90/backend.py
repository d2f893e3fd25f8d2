"""The Hopper backend's door: quantize, attend, finish. No host synchronisation; nothing depends on lengths."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor

from flamia.compiler import load
from flamia.documents import Documents
from flamia.doors import along_channels, device_sizes, dry_run, e4m3
from flamia.plan import Plan
from flamia.quantize.finish import document_prescale, finish_dq
from flamia.quantize.gradients import Gradients
from flamia.quantize.lists import list_words, lists_in, work_lists
from flamia.quantize.payloads import E4M3Payload, NVFP4Rows, Payload, Payloads, empty_payloads
from flamia.quantize.prepare import prepare_backward, prepare_forward, token_maxima
from flamia.quantize.tail import clear_tail, finish_forward
from flamia.reference.forward import Forward
from flamia.sm90.kernels import backward_kernels, forward_kernels
from flamia.sm90.launches import decode_nvfp4, uneven_documents
from flamia.sm90.parts import backward_parts, made_by_parts, made_later, part_of
from flamia.worklists import Tiling, WorkLists, head_section


def tiling(plan: Plan, documents: Documents) -> Tiling:
    """Of the work lists that these kernels read."""
    return Tiling()


def run_forward(
    plan: Plan, q: Tensor, k: Tensor, v: Tensor, documents: Documents
) -> tuple[Tensor, Tensor, Forward, list[Tensor]]:
    """Attention of packed q [T, heads, D], k, v [Tk, kv heads, D] on a Hopper device.

    Returns:
        o [T, heads, D] in q's dtype; lse FP32 [heads, T], natural log; the ``Forward``, whose o is the same tensor; and
        what a backward needs, in the order of ``empty_kept``.
    """
    q, k, v = map(along_channels, (q, k, v))
    # Triton launches on the current device.
    with torch.cuda.device(q.device):
        lists = work_lists(documents, plan.left, plan.right)
        later = made_later(plan, documents.total_q, documents.total_k)
        operands = prepare_forward(plan, q, k, v, lists, columns=True, later=later)
        result = forward(plan, operands.payloads, documents, lists, q.dtype)
        lse = finish_forward(result.o, result.lse2, result.row_max, documents.cu_seqlens_q)
    assert lists.buffer is not None
    if not plan.training:
        return result.o, lse, result, []
    less: dict[str, Payload] = {}
    for name, field in _unread(plan).items():
        payload = e4m3(operands.payloads, name)
        less[name] = dataclasses.replace(payload, **{field: payload.columns.new_empty(0)})
    payloads = dataclasses.replace(operands.payloads, items=operands.payloads.items | less)
    return result.o, lse, result, [*payloads.flatten(), operands.maxima, lists.buffer]


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
    parts = backward_parts(plan, documents.total_q, documents.total_k)
    later = made_later(plan, documents.total_q, documents.total_k)
    with torch.cuda.device(do.device):
        lists = lists_in(buffer, documents)
        shape = (documents.total_k, plan.heads_kv, plan.head_dim)
        dk, dv = (torch.empty(shape, dtype=do.dtype, device=do.device) for _ in range(2))
        running = token_maxima(plan, payloads, documents)  # one program a head: as slow for some of the heads
        for n in range(parts):
            part = part_of(plan, payloads, lists, later, parts, n)
            q, kv = part.q, part.kv
            rows = (along_channels(do[:, q]), None if dlse is None else dlse[q].contiguous(), o[:, q])
            gradients = prepare_backward(
                *(part.plan, *rows, lse2[q], row_max[q], part.payloads, documents, lists),
                columns=True,
                running=running and (running[0][kv], running[1][kv]),
            )
            bound = (part.payloads, gradients, lse2[q], k_maxima[kv], v_maxima[kv])
            out = (dk[:, kv], dv[:, kv])
            *_, launch = bind_backward(part.plan, *bound, documents, lists, do.dtype, out=out)
            launch()
            # The memory of the gradient's codes serves dq, that of the whole part the next one.
            del rows, launch, bound
            gradients.payloads.clear()
            if n == 0:
                dq = torch.empty(do.shape, dtype=do.dtype, device=do.device)
            finish_dq(part.plan, gradients, k_maxima[kv], v_maxima[kv], documents, lists.q, dq[:, q], fragments=True)
            del part, gradients
        clear_tail(dk, dv, documents.cu_seqlens_k)
    return dq, dk, dv


def _unread(plan: Plan) -> dict[str, str]:
    """Fields of payloads that the backward does not read: it multiplies by V along the head dimension alone.

    With scores of NVFP4, by the E4M3 codes of Q and K along the tokens alone.
    """
    return {"v": "columns"} | ({"q8": "codes", "k8": "codes"} if plan.recipe.format == "nvfp4" else {})


def empty_kept(plan: Plan, q: Tensor, k: Tensor, documents: int) -> list[Tensor]:
    """Uninitialised tensors like those that ``run_forward`` keeps for the backward.

    Payloads, of which fields that it does not read or makes again are of size 0; maxima of K and of V; work lists.
    """
    made = empty_payloads(plan.forward_specs, q, k, documents, token_maxima=plan.reads_token_maxima)
    payloads = Payloads.unflatten(plan.forward_specs, made)
    later = dict.fromkeys(made_later(plan, q.shape[0], k.shape[0]), "columns")
    for name, field in (_unread(plan) | later).items():
        setattr(payloads[name], field, q.new_empty(0, dtype=torch.uint8))
    maxima = q.new_empty((2, k.shape[1], documents), dtype=torch.float32)
    lists = q.new_empty(list_words(q.shape[0], k.shape[0], documents), dtype=torch.int32)
    return [*payloads.flatten(), maxima, lists]


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
    """Unset outputs as ``forward`` returns them, and what launches the kernels that fill them."""
    v = e4m3(payloads, "v")
    device, heads = v.codes.device, plan.heads_q
    o = torch.empty((documents.total_q, heads, plan.head_dim), dtype=dtype, device=device)
    lse2, row_max = (torch.empty((heads, documents.total_q), dtype=torch.float32, device=device) for _ in range(2))
    result = Forward(o, lse2, row_max)
    functions = [load(kernel) for kernel in forward_kernels(plan, dtype)]
    if documents.total_q == 0 or documents.count == 0:
        return result, lambda: None
    if documents.total_k == 0:

        def fill() -> None:
            o.zero_(), lse2.fill_(-torch.inf), row_max.zero_()

        return result, fill
    ctas, cache = device_sizes(device.index)
    wide = plan.recipe.format == "nvfp4"
    bytes_per_token = (3 if wide else 2) * plan.head_dim // plan.ratio  # K and V, shared by the query heads of a group
    cu_q, cu_k, count = documents.cu_seqlens_q, documents.cu_seqlens_k, lists.forward.count
    flags, careful = uneven_documents(v.exponents, cu_k, count, per_token=plan.per_token)
    f8 = torch.float8_e4m3fn
    if wide:
        q, k = (decode_nvfp4(x) for x in (payloads["q"], payloads["k"]) if isinstance(x, NVFP4Rows))
        exponents = (flags, flags)  # not read
    else:
        eight = [e4m3(payloads, name) for name in ("q", "k")]
        q, k = (x.codes.view(f8) for x in eight)
        exponents = (eight[0].exponents, eight[1].exponents)
    before = (
        *(q, k, v.columns.view(f8), o, lse2, row_max),
        *(*exponents, v.exponents, flags, lists.forward.items),
    )
    section = head_section(documents.total_k, heads, bytes_per_token, cache)
    after = (
        *(lists.forward.claims, lists.forward.total, cu_q, cu_k, lists.k.column_starts),
        *(plan.score_scale, plan.left or 0, plan.right or 0, section, ctas),
    )
    # The second kernel is for uneven documents: where there are none it has no items.
    counts = (count, careful)

    def launch() -> None:
        for function, items in zip(functions, counts, strict=False):
            function(*before, items, *after)

    return result, launch


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
    *,
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Callable[[], None]]:
    """Unset dk and dv of ``dtype`` [Tk, kv heads, D], and what launches the kernel that fills them and adds up dq.

    lse2: of the forward, which these kernels have in the gradient's constants. Keys of no document are left unset. Rows
    of payloads, and ``out``, the dk and dv to fill, may be views of some heads of more.
    """
    wide = plan.recipe.format == "nvfp4"
    q, k, v = (e4m3(payloads, name) for name in (("q8", "k8", "v") if wide else ("q", "k", "v")))
    (t,) = gradients.payloads.values()
    assert isinstance(t, E4M3Payload)
    dk, dv = out or (torch.empty(v.codes.shape, dtype=dtype, device=v.codes.device) for _ in range(2))
    (function,) = (load(kernel) for kernel in backward_kernels(plan, dtype))
    if documents.total_k == 0 or documents.total_q == 0 or documents.count == 0:

        def fill() -> None:
            for x in (dk, dv, gradients.accumulator):
                x.zero_()

        return dk, dv, fill
    ctas, cache = device_sizes(dk.device.index)
    causal = plan.recipe.accumulator_scale == "causal"
    scale = gradients.prescale if causal else document_prescale(plan, gradients, k_maxima, v_maxima, documents)
    slabs = (plan.heads_q, gradients.accumulator.shape[1] // 16, 2) if plan.deterministic else (1, 1, 2)
    turns = torch.zeros(slabs, dtype=torch.int32, device=dk.device)
    f8 = torch.float8_e4m3fn
    if wide:
        # Made again: kept from the forward, they would be 3.5 times the size of their codes and scales.
        scored = [decode_nvfp4(x, finite=True) for x in (payloads["q"], payloads["k"]) if isinstance(x, NVFP4Rows)]
    else:
        scored = [x.codes.view(f8) for x in (q, k)]
    codes = (v.codes, t.codes, q.columns, k.columns, t.columns)
    # Q and T, rows and columns, of the heads of a group.
    bytes_per_token = (5 if wide else 4) * plan.head_dim * plan.ratio
    section = head_section(documents.total_q, plan.heads_kv, bytes_per_token, cache)
    arguments = (
        *scored,
        *(x.view(f8) for x in codes),
        *(dk, dv, gradients.accumulator, turns, gradients.addend, gradients.b, gradients.unit),
        gradients.power if plan.per_token else gradients.unit,
        *(q.exponents, k.exponents, v.exponents, scale),
        *(lists.backward.items, lists.backward.count, lists.backward.claims, lists.backward.total),
        *(documents.cu_seqlens_q, documents.cu_seqlens_k, lists.q.column_starts, lists.k.column_starts),
        *(plan.score_scale, plan.softmax_scale, plan.left or 0, plan.right or 0, section, ctas),
    )
    return dk, dv, lambda: function(*arguments)


def show_launches(plan: Plan, dtype: torch.dtype) -> None:
    """Every launch of a Triton kernel that a call with this plan, and its backward, may need: ``launch.recording``."""
    payloads = dry_run(plan, dtype, columns=True, later=made_by_parts(plan))
    documents = torch.empty(2, dtype=torch.int32, device="meta")
    uneven_documents(e4m3(payloads, "v").exponents, documents, documents[:1], per_token=plan.per_token)
    if plan.recipe.format == "nvfp4":
        for finite in (False, True) if plan.training else (False,):
            q = payloads["q"]
            assert isinstance(q, NVFP4Rows)
            decode_nvfp4(q, finite=finite)


def kernel_names(plan: Plan, direction: str, x: Tensor, documents: Documents) -> tuple[str, ...]:
    """What ran, in order, for ``last_plan()``. x: q, or do in the backward."""
    dtype = x.dtype
    decoding = ["sm90.launches.decode_nvfp4"] if plan.recipe.format == "nvfp4" else []
    if direction == "forward":
        attention = [*decoding, *(kernel.name for kernel in forward_kernels(plan, dtype))]
        return ("quantize.triton_lists", "quantize.triton_operands", *attention, "quantize.triton_tail")
    attention = [*decoding, *(kernel.name for kernel in backward_kernels(plan, dtype))]
    again = ["quantize.triton_columns"] if made_later(plan, documents.total_q, documents.total_k) else []
    return (
        "quantize.triton_lists",
        *again,
        "quantize.triton_gradients",
        *attention,
        "quantize.triton_tail",
        "quantize.triton_finish",
    )
