"""torch.library operators under the public functions: forward and backward with fake and autograd registrations.

Operators take packed tensors and plain values only, and return every tensor that the backward needs, so that
``torch.compile`` sees the whole call as two opaque nodes and nothing is kept outside of autograd.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from flamia.backends import door
from flamia.documents import Documents
from flamia.plan import Plan
from flamia.quantize.payloads import Payloads, empty_payloads
from flamia.recipe import recipe_from_key
from flamia.reference import backend as reference

DEBUG = "FLAMIA_DEBUG"  # environment: check offsets on the host before every native call, which synchronises

_last_plan: Plan | None = None


def last_plan() -> Plan | None:
    """The ``Plan`` of the last attention call that ran in this process, forward or backward; None before the first."""
    return _last_plan


def _ran(plan: Plan, kernels: tuple[str, ...]) -> None:
    global _last_plan
    _last_plan = replace(plan, kernels=kernels)


def _plan(
    recipe: str,
    backend: str,
    shape: tuple[int, int, int],
    softmax_scale: float,
    left: int,
    right: int,
    deterministic: bool,
    training: bool,
) -> Plan:
    head_dim, heads_q, heads_kv = shape
    return Plan(
        recipe=recipe_from_key(recipe),
        backend=backend,
        kernels=(),
        head_dim=head_dim,
        heads_q=heads_q,
        heads_kv=heads_kv,
        softmax_scale=softmax_scale,
        left=None if left < 0 else left,
        right=None if right < 0 else right,
        deterministic=deterministic,
        training=training,
    )


def _operator(function: Callable[..., Any]) -> Callable[..., Any]:
    """The operator of this name on every device. A call of ``torch.library.custom_op``'s imports torch's compiler."""
    name = f"flamia::{function.__name__.removeprefix('_')}"
    torch.library.define(name, torch.library.infer_schema(function, mutates_args=()))
    torch.library.impl(name, "default", function)
    operator: Callable[..., Any] = getattr(torch.ops.flamia, name.split("::")[1]).default
    return operator


def _attention_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    k_offset: Tensor | None,
    v_offset: Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float,
    left: int,
    right: int,
    deterministic: bool,
    training: bool,
    recipe: str,
    backend: str,
) -> list[Tensor]:
    """Packed attention forward.

    q [T, heads, D], k and v [Tk, kv heads, D] BF16 or FP16; offsets of documents int32; max_seqlen -1: not given; left
    and right -1: unbounded. Returns o, lse (FP32 [heads, T]) and, for training, o without v_offset (only with one),
    lse2, the row reference, and the payloads' tensors.
    """
    shape = (q.shape[2], q.shape[1], k.shape[1])
    plan = _plan(recipe, backend, shape, softmax_scale, left, right, deterministic, training)
    documents = Documents(cu_seqlens_q, cu_seqlens_k, q.shape[0], k.shape[0])
    if backend == "reference" or os.environ.get(DEBUG):
        documents.check_host(max_seqlen_q, max_seqlen_k)
    extra: list[Tensor] = []
    if backend == "reference":
        o, centred, lse, result, payloads = reference.run_forward(plan, q, k, v, documents, k_offset, v_offset)
        kept = payloads.flatten() if training else []
        extra = [] if v_offset is None else [centred]
        _ran(plan, reference.KERNELS[plan.recipe.variant, "forward"])
    else:
        native = door(backend)
        o, lse, result, kept = native.run_forward(plan, q, k, v, documents)
        _ran(plan, native.kernel_names(plan, "forward", q, documents))
    return [o, lse, *extra, result.lse2, result.row_max, *kept] if training else [o, lse]


attention_forward = _operator(_attention_forward)


@torch.library.register_fake("flamia::attention_forward")
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    k_offset: Tensor | None,
    v_offset: Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float,
    left: int,
    right: int,
    deterministic: bool,
    training: bool,
    recipe: str,
    backend: str,
) -> list[Tensor]:
    def o() -> Tensor:
        return q.new_empty(q.shape)

    def row() -> Tensor:
        return q.new_empty((q.shape[1], q.shape[0]), dtype=torch.float32)

    if not training:
        return [o(), row()]
    plan = _plan(recipe, backend, (q.shape[2], q.shape[1], k.shape[1]), softmax_scale, left, right, deterministic, True)
    documents = cu_seqlens_q.shape[0] - 1
    if backend == "reference":
        kept = empty_payloads(plan.forward_specs, q, k, documents)
    else:
        kept = door(backend).empty_kept(plan, q, k, documents)
    return [o(), row(), *([] if v_offset is None else [o()]), row(), row(), *kept]


def _attention_backward(
    do: Tensor,
    dlse: Tensor | None,
    o: Tensor,
    lse2: Tensor,
    row_max: Tensor,
    kept: list[Tensor],
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    k_offset: Tensor | None,
    total_k: int,
    heads_kv: int,
    softmax_scale: float,
    left: int,
    right: int,
    deterministic: bool,
    recipe: str,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """Packed attention backward from what the forward returned: dq [T, heads, D], dk and dv [Tk, kv heads, D]."""
    shape = (do.shape[2], do.shape[1], heads_kv)
    plan = _plan(recipe, backend, shape, softmax_scale, left, right, deterministic, True)
    documents = Documents(cu_seqlens_q, cu_seqlens_k, do.shape[0], total_k)
    gradients: tuple[Tensor, Tensor, Tensor]
    if backend == "reference":
        payloads = Payloads.unflatten(plan.forward_specs, kept)
        gradients = reference.run_backward(plan, do, dlse, o, lse2, row_max, payloads, documents, k_offset)
        _ran(plan, reference.KERNELS[plan.recipe.variant, "backward"])
    else:
        native = door(backend)
        gradients = native.run_backward(plan, do, dlse, o, lse2, row_max, kept, documents)
        _ran(plan, native.kernel_names(plan, "backward", do, documents))
    return gradients


attention_backward = _operator(_attention_backward)


@torch.library.register_fake("flamia::attention_backward")
def _(
    do: Tensor,
    dlse: Tensor | None,
    o: Tensor,
    lse2: Tensor,
    row_max: Tensor,
    kept: list[Tensor],
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    k_offset: Tensor | None,
    total_k: int,
    heads_kv: int,
    softmax_scale: float,
    left: int,
    right: int,
    deterministic: bool,
    recipe: str,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor]:
    kv = (total_k, heads_kv, do.shape[2])
    return do.new_empty(do.shape), do.new_empty(kv), do.new_empty(kv)


def _save(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    (
        _,
        k,
        _,
        cu_q,
        cu_k,
        k_offset,
        v_offset,
        _,
        _,
        scale,
        left,
        right,
        deterministic,
        training,
        recipe,
        backend,
    ) = inputs
    ctx.set_materialize_grads(False)
    ctx.training = training
    if not training:
        return
    rest = output[2:] if v_offset is not None else [output[0], *output[2:]]
    ctx.save_for_backward(cu_q, cu_k, k_offset, *rest)
    ctx.arguments = (k.shape[0], k.shape[1], scale, left, right, deterministic, recipe, backend)


def _backward(ctx: Any, gradients: list[Tensor | None]) -> tuple[Tensor | None, ...]:
    do, dlse = gradients[0], gradients[1]
    if not ctx.training:
        raise RuntimeError("this attention call kept nothing for a backward: it ran with gradients disabled")
    cu_q, cu_k, k_offset, o, lse2, row_max, *kept = ctx.saved_tensors
    none = (None,) * 13
    if do is None and dlse is None:
        return (None, None, None, *none)
    if do is None:
        do = torch.zeros_like(o)
    dq, dk, dv = attention_backward(do, dlse, o, lse2, row_max, kept, cu_q, cu_k, k_offset, *ctx.arguments)
    grads = [g if need else None for g, need in zip((dq, dk, dv), ctx.needs_input_grad, strict=False)]
    return (*grads, *none)


def _no_second_backward(ctx: Any, *gradients: Tensor | None) -> None:
    raise RuntimeError("flamia's attention has no backward of its backward: call without create_graph=True")


torch.library.register_autograd("flamia::attention_forward", _backward, setup_context=_save)
torch.library.register_autograd("flamia::attention_backward", _no_second_backward)
