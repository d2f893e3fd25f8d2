"""Does a document depend on its neighbours in a packed row? Scale one by 1000, compare the others.

Everything of another document must stay bitwise the same: o, lse, dq, and here dk and dv too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..recipe import Recipe
from .inputs import make_inputs
from .measures import change
from .targets import Result, Target, get_target

__all__ = ["Crossing", "IsolationReport", "isolation"]

TENSORS = ("o", "lse", "dq", "dk", "dv")
# Odd lengths and one token, so that no document but the first starts where a block or a tile does.
LENGTHS = (67, 128, 33, 1, 91)


@dataclass(frozen=True)
class Crossing:
    """The worst that scaling one document did to one result of the others, over all documents.

    Attributes:
        max_rel_change: the largest relative change of a row of another document (:class:`~.measures.Change`).
        rows_reached: how many rows of other documents are not bitwise what they were.
    """

    target: str
    inputs: str
    tensor: str
    max_rel_change: float
    rows_reached: int

    @property
    def bitwise_zero(self) -> bool:
        return self.rows_reached == 0


@dataclass(frozen=True)
class IsolationReport:
    """What crossed from one document to another.

    Attributes:
        layout: "packed", or "batched" for a target that takes no packed documents: there the documents are
            the sequences of a batch.
        noise: per tensor, the largest relative change between two runs on the same operands.
        promise: what the target's name promises (:class:`~.targets.Target`).
    """

    target: str
    layout: str
    crossings: tuple[Crossing, ...]
    noise: dict[str, float]
    promise: str = "confined"

    @property
    def isolated(self) -> bool:
        """Nothing crossed: bitwise, or within the noise of a target that is not deterministic."""
        return all(c.bitwise_zero or c.max_rel_change <= 2 * self.noise[c.tensor] for c in self.crossings)

    @property
    def as_promised(self) -> bool:
        """Isolated, which is asked of every target but those that are there to leak."""
        return self.isolated or self.promise == "leaky"


def isolation(
    target: str | Target | Recipe | Callable[..., Any],
    *,
    inputs: str | Sequence[str] = ("gaussian",),
    lengths: Sequence[int] = LENGTHS,
    heads: int | None = 2,
    kv_heads: int | None = None,
    head_dim: int = 128,
    factor: float = 1000.0,
    causal: bool = True,
    seed: int = 0,
    device: str = "cpu",
    advance: Callable[[], object] | None = None,
) -> IsolationReport:
    """Scale q, k, v and do of one document at a time and compare all results of the others.

    Args:
        target: a name, `module:function` or a callable. One without `cu_seqlens_q` is given a batch of
            sequences of the longest length instead of a packed row.
        inputs, heads, kv_heads, head_dim, seed, device: as in :func:`flamia.audit.causality`.
        lengths: tokens of the documents.
        factor: what a document is multiplied by.
        advance: called after every run of the target: two more than there are documents, for each kind of
            inputs.

    Raises:
        ValueError: as :func:`flamia.audit.causality`, or fewer than two documents.
    """
    audited = get_target(target)
    if len(lengths) < 2 or min(lengths) < 1:
        raise ValueError(f"lengths is {tuple(lengths)}; isolation needs two documents or more, none of them empty")
    packed = audited.packed is not None
    if not packed:
        lengths = [max(lengths)] * len(lengths)
    names = (inputs,) if isinstance(inputs, str) else tuple(inputs)
    crossings: dict[tuple[str, str], Crossing] = {}
    noise = dict.fromkeys(TENSORS, 0.0)

    for name in names:
        parts = [
            make_inputs(name, n, heads, head_dim, kv_heads=kv_heads, seed=seed + i, device=device).tensors()
            for i, n in enumerate(lengths)
        ]
        # What the inputs gave may be shorter than asked (captured ones end at the model's context).
        cu = torch.tensor([0, *(part[0].shape[1] for part in parts)], dtype=torch.int32, device=device)
        cu = cu.cumsum(0, dtype=torch.int32)
        operands = [torch.cat(x, dim=1)[0] for x in zip(*parts, strict=True)]  # [T, H, D]

        def run(operands: Sequence[Tensor], cu: Tensor = cu) -> Result:
            if packed:
                q, k, v, do = operands
                result = audited.run_packed(q, k, v, do, cu, causal=causal)
            else:
                q, k, v, do = (x.unflatten(0, (len(lengths), -1)) for x in operands)
                result = audited.run(q, k, v, do, causal=causal)
            if advance is not None:
                advance()
            return result

        before, again = run(operands), run(operands)
        for tensor in TENSORS:
            x, y = _rows(before, tensor), _rows(again, tensor)
            if x is not None and y is not None:
                noise[tensor] = max(noise[tensor], change(x, y, logarithm=tensor == "lse").max_rel_change)
        for start, end in zip(cu[:-1].tolist(), cu[1:].tolist(), strict=True):
            scaled = [x.clone() for x in operands]
            for x in scaled:
                x[start:end] *= factor
            after = run(scaled)
            for tensor in TENSORS:
                x, y = _rows(before, tensor), _rows(after, tensor)
                if x is None or y is None:
                    continue
                others = torch.ones(x.shape[1], dtype=torch.bool, device=x.device)
                others[start:end] = False
                seen = change(x[:, others], y[:, others], logarithm=tensor == "lse")
                old = crossings.get((name, tensor))
                crossings[name, tensor] = Crossing(
                    audited.name,
                    name,
                    tensor,
                    max(seen.max_rel_change, old.max_rel_change if old else 0.0),
                    max(len(seen.rows), old.rows_reached if old else 0),
                )
    return IsolationReport(
        audited.name, "packed" if packed else "batched", tuple(crossings.values()), noise, audited.promise
    )


def _rows(result: Result, tensor: str) -> Tensor | None:
    """[1, all tokens, H, D] of either layout."""
    x = getattr(result, tensor)
    return None if x is None else x.reshape(1, -1, *x.shape[-2:])
