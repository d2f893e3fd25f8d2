"""What the doors of the kernel backends share: sizes of a device, how they look at tensors, a call's launches."""

from __future__ import annotations

from collections.abc import Collection
from functools import lru_cache

import torch
from torch import Tensor

from flamia.documents import Documents
from flamia.plan import Plan
from flamia.quantize.columns import columns_of
from flamia.quantize.finish import document_prescale, finish_dq
from flamia.quantize.lists import DRY_TOKENS, work_lists
from flamia.quantize.payloads import E4M3Payload, Payloads, forward_specs
from flamia.quantize.prepare import prepare_backward, prepare_forward
from flamia.quantize.tail import clear_tail, finish_forward

L2_SHARE = 0.5  # of the L2 cache, for what CTAs at work at the same time reread


@lru_cache(maxsize=64)
def device_sizes(index: int) -> tuple[int, int]:
    """Multiprocessors, and the bytes of L2 cache to count on."""
    properties = torch.cuda.get_device_properties(index)
    return properties.multi_processor_count, int(properties.L2_cache_size * L2_SHARE)


def along_channels(x: Tensor) -> Tensor:
    """x [T, heads, D] itself where channels are contiguous, as quantizers read them, else a copy."""
    return x if x.shape[2] == 1 or x.stride(2) == 1 else x.contiguous()


def e4m3(payloads: Payloads, name: str) -> E4M3Payload:
    """The payload of that name."""
    payload = payloads[name]
    assert isinstance(payload, E4M3Payload)
    return payload


def dry_run(plan: Plan, dtype: torch.dtype, *, columns: bool, later: Collection[str] = ()) -> Payloads:
    """Row preparation of a call with this plan, and of its backward where the plan trains, on tensors without memory.

    Within ``launch.recording``: it shows every launch that calls of any size may need. columns: of E4M3 payloads, as
    the door makes them. later: payloads whose columns calls of some sizes make at once, and others in the backward.

    Returns:
        The payloads of q, k and v, with all their columns.
    """
    dim, tokens = plan.head_dim, DRY_TOKENS[0]

    def new(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    cu = new(2, dtype=torch.int32)
    for size in DRY_TOKENS:
        work_lists(Documents(cu, cu, size, size), plan.left, plan.right)
    documents = Documents(cu, cu, tokens, tokens)
    lists = work_lists(documents, plan.left, plan.right)
    q, k, v = (new(tokens, heads, dim) for heads in (plan.heads_q, plan.heads_kv, plan.heads_kv))
    operands = prepare_forward(plan, q, k, v, lists, columns=columns)
    if later:
        rows = prepare_forward(plan, q, k, v, lists, columns=columns, later=later).payloads
        for spec in forward_specs(plan.recipe, plan.training, columns):
            if spec.name in later and spec.columns:
                columns_of(e4m3(rows, spec.name).codes, lists.q if spec.source == "q" else lists.k, spec.columns)
    table = new(plan.heads_q, tokens, dtype=torch.float32)
    finish_forward(q, table, table, cu)
    if plan.training:
        clear_tail(k, v, cu)
        for dlse in (None, table):
            gradients = prepare_backward(
                plan, q, dlse, q, table, table, operands.payloads, documents, lists, columns=columns
            )
            maxima = (operands.k_maxima, operands.v_maxima)
            if plan.recipe.accumulator_scale != "causal":
                document_prescale(plan, gradients, *maxima, documents)
            finish_dq(plan, gradients, *maxima, documents, lists.q, q, fragments=True)
    return operands.payloads
