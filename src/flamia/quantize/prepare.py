"""Row preparation of a call on the device: what ``reference.backend`` does around the backend's two calls."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from flamia.documents import Documents
from flamia.plan import Plan
from flamia.quantize.gradients import Gradients, quantize_gradient, running_maxima
from flamia.quantize.operands import quantize_operand
from flamia.quantize.payloads import E4M3Payload, Payload, Payloads, forward_specs
from flamia.worklists import WorkLists


@dataclass
class Operands:
    """Quantized q, k and v.

    Attributes:
        payloads: as ``quantize.reference`` makes them.
        maxima: FP32 [2, kv heads, documents], max |k| (rotated) and |v| of each document, for the sequence scale of the
            dQ accumulator; empty outside of training. One tensor: what a custom operator returns may share no memory.
    """

    payloads: Payloads
    maxima: Tensor

    @property
    def k_maxima(self) -> Tensor:
        return self.maxima[0]

    @property
    def v_maxima(self) -> Tensor:
        return self.maxima[1]


def prepare_forward(
    plan: Plan, q: Tensor, k: Tensor, v: Tensor, lists: WorkLists, *, columns: bool = False, later: Collection[str] = ()
) -> Operands:
    """q, k, v [T, heads, D] -> payloads, one launch each (and, for training, one that clears the maxima).

    ``columns`` adds the transposed E4M3 codes, as in ``payloads.forward_specs``, not to those named in ``later``.

    Raises:
        ValueError: tensors or a recipe that the device quantizers do not make.
    """
    recipe = plan.recipe
    if recipe.is_ablation:
        raise ValueError("ablations of the scales are not made by the device quantizers: use the reference backend")
    specs = forward_specs(recipe, plan.training, columns)
    specs = tuple(replace(spec, columns=None) if spec.name in later else spec for spec in specs)
    documents = lists.k.column_starts.shape[0] - 1
    shape = (2, k.shape[1], documents) if plan.training else (2, 0)
    maxima = torch.zeros(shape, dtype=torch.float32, device=q.device)
    made: dict[str, Payload] = {}
    amax: dict[str, Tensor] = {}
    for i, (name, x, tables) in enumerate((("k", k, lists.k), ("v", v, lists.k), ("q", q, lists.q))):
        items, amax[name] = quantize_operand(
            [spec for spec in specs if spec.source == name],
            x,
            tables,
            rotate=plan.rotates and name != "v",
            per_token=plan.per_token,
            maxima=maxima[i] if plan.training and i < 2 else None,
            token_maxima=plan.reads_token_maxima and i < 2,
        )
        made |= items
    payloads = Payloads({spec.name: made[spec.name] for spec in specs}, amax["k"], amax["v"])
    return Operands(payloads, maxima)


def prepare_backward(
    plan: Plan,
    do: Tensor,
    dlse: Tensor | None,
    o: Tensor,
    lse2: Tensor,
    row_max: Tensor,
    payloads: Payloads,
    documents: Documents,
    lists: WorkLists,
    *,
    columns: bool = False,
    running: tuple[Tensor, Tensor] | None = None,
) -> Gradients:
    """do and what the forward left -> everything that the attention backward reads; see ``quantize_gradient``.

    running: maxima that have been made already, as ``token_maxima`` makes them.
    """
    running = token_maxima(plan, payloads, documents) if running is None else running
    eight = payloads["q8"] if plan.recipe.format == "nvfp4" else payloads["q"]
    return quantize_gradient(
        plan,
        do,
        o,
        dlse,
        lse2,
        row_max,
        documents,
        lists,
        q_exponents=eight.exponents if isinstance(eight, E4M3Payload) else None,
        running=running,
        columns=columns,
    )


def token_maxima(plan: Plan, payloads: Payloads, documents: Documents) -> tuple[Tensor, Tensor] | None:
    """``running_maxima`` of K and V in one launch, where the backward reads them."""
    return running_maxima(documents, payloads.k_amax, payloads.v_amax) if plan.reads_token_maxima else None
