"""The Hopper backend's door: quantize, attend, finish. No host synchronisation; nothing depends on lengths."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor

from flamia.compiler import load
from flamia.documents import Documents
from flamia.plan import Plan
from flamia.quantize.payloads import E4M3Payload, Payloads, empty_payloads
from flamia.quantize.triton_lists import work_lists
from flamia.quantize.triton_prepare import prepare_forward
from flamia.reference.forward import Forward
from flamia.sm90.kernels import forward_kernels
from flamia.sm90.launches import finish_forward, uneven_documents
from flamia.worklists import WorkLists, head_section

L2_SHARE = 0.5  # of the L2 cache, for the keys and values that CTAs at work at the same time read


@lru_cache(maxsize=64)
def _device(index: int) -> tuple[int, int]:
    """Multiprocessors, and bytes of L2 cache."""
    properties = torch.cuda.get_device_properties(index)
    return properties.multi_processor_count, properties.L2_cache_size


def run_forward(
    plan: Plan, q: Tensor, k: Tensor, v: Tensor, documents: Documents
) -> tuple[Tensor, Tensor, Forward, list[Tensor]]:
    """Attention of packed q [T, heads, D], k, v [Tk, kv heads, D] on a Hopper device.

    Returns:
        o [T, heads, D] in q's dtype; lse FP32 [heads, T], natural log; the ``Forward``, whose o is the same tensor; and
        what a backward needs, in the order of ``empty_kept``.
    """
    q, k, v = (x if x.shape[2] == 1 or x.stride(2) == 1 else x.contiguous() for x in (q, k, v))
    # Triton launches on the current device.
    with torch.cuda.device(q.device):
        lists = work_lists(documents, plan.left, plan.right)
        operands = prepare_forward(plan, q, k, v, lists, columns=True)
        result = forward(plan, operands.payloads, documents, lists, q.dtype)
        lse = finish_forward(result.o, result.lse2, result.row_max, documents.cu_seqlens_q)
    kept = [*operands.payloads.flatten(), operands.k_maxima, operands.v_maxima] if plan.training else []
    return result.o, lse, result, kept


def empty_kept(plan: Plan, q: Tensor, k: Tensor, documents: int) -> list[Tensor]:
    """Uninitialised tensors like those that ``run_forward`` keeps for the backward: payloads, maxima of K and of V."""
    maxima = [q.new_empty((k.shape[1], documents), dtype=torch.float32) for _ in range(2)]
    return [*empty_payloads(plan.forward_specs, q, k, documents), *maxima]


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
    q, k, v = (_e4m3(payloads, name) for name in ("q", "k", "v"))
    device, heads = q.codes.device, plan.heads_q
    o = torch.empty(q.codes.shape, dtype=dtype, device=device)
    lse2, row_max = (torch.empty((heads, documents.total_q), dtype=torch.float32, device=device) for _ in range(2))
    result = Forward(o, lse2, row_max)
    functions = [load(kernel) for kernel in forward_kernels(plan, dtype)]
    if documents.total_q == 0 or documents.count == 0:
        return result, lambda: None
    if documents.total_k == 0:

        def fill() -> None:
            o.zero_(), lse2.fill_(-torch.inf), row_max.zero_()

        return result, fill
    ctas, cache = _device(device.index)
    f8 = torch.float8_e4m3fn
    bytes_per_token = 2 * plan.head_dim // plan.ratio  # K and V, shared by the query heads of a group
    cu_q, cu_k, count = documents.cu_seqlens_q, documents.cu_seqlens_k, lists.forward.count
    flags, careful = uneven_documents(v.exponents, cu_k, count, per_token=plan.per_token)
    before = (
        *(codes.view(f8) for codes in (q.codes, k.codes, v.columns)),
        *(o, lse2, row_max, q.exponents, k.exponents, v.exponents, flags, lists.forward.items),
    )
    section = head_section(documents.total_k, heads, bytes_per_token, int(cache * L2_SHARE))
    after = (cu_q, cu_k, lists.k.column_starts, plan.score_scale, plan.left or 0, plan.right or 0, section, ctas)
    # The second kernel is for uneven documents: where there are none it has no items.
    counts = (count, careful)

    def launch() -> None:
        for function, items in zip(functions, counts, strict=False):
            function(*before, items, *after)

    return result, launch


def _e4m3(payloads: Payloads, name: str) -> E4M3Payload:
    payload = payloads[name]
    assert isinstance(payload, E4M3Payload)
    return payload


def kernel_names(plan: Plan, direction: str, dtype: torch.dtype) -> tuple[str, ...]:
    """What ran, in order, for ``last_plan()``."""
    assert direction == "forward", direction
    attention = (kernel.name for kernel in forward_kernels(plan, dtype))
    return ("quantize.triton_lists", "quantize.triton_operands", *attention, "sm90.launches.finish_forward")
