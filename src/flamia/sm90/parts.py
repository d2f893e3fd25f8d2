"""How many heads a backward works on at a time: what it needs beside its results exists for those alone.

Each part quantizes its heads of do, launches the kernel and finishes its heads of dq; the next one takes the same
memory. Heads do not meet in a backward, so no number depends on how many parts there are. Sizes alone decide, which the
host knows, and never lengths: the forward has to know as well, since it leaves out columns that a part makes again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

from flamia.plan import Plan
from flamia.quantize.columns import columns_of
from flamia.quantize.payloads import E4M3Payload, NVFP4Rows, Payload, Payloads
from flamia.worklists import WorkLists

PART_BYTES = 256 << 20  # below, memory saved is not worth launches of their own
# Items of 128 keys, some eight for each multiprocessor: with fewer, those that end first wait too long for the others.
PART_ITEMS = 1024
TILE = 128


class Part(NamedTuple):
    """Some heads of a backward.

    Attributes:
        plan: of a call with these heads alone.
        q, kv: which query heads and which kv heads they are.
        payloads: of these heads, views as far as they are kept.
    """

    plan: Plan
    q: slice
    kv: slice
    payloads: Payloads


def backward_parts(plan: Plan, total_q: int, total_k: int) -> int:
    """Of how many parts with as many kv heads each, and their query heads, a backward consists.

    The fewest whose codes of do, sums of dQ and operands made again take at most ``PART_BYTES``; if those would be
    shorter than ``PART_ITEMS``, as many as are not. Short calls are one part.
    """
    wide = plan.recipe.format == "nvfp4"
    # Bytes a number: of T rows, columns and FP16 sums, and of Q columns or numbers in BF16; of K likewise.
    of_query, of_key = (6, 2) if wide else (5, 1)
    size = plan.head_dim * (of_query * total_q * plan.heads_q + of_key * total_k * plan.heads_kv)
    items = plan.heads_kv * ((total_k + TILE - 1) // TILE)
    found = 1
    for n in range(2, plan.heads_kv + 1):
        if size > found * PART_BYTES and plan.heads_kv % n == 0 and items >= n * PART_ITEMS:
            found = n
    return found


def made_later(plan: Plan, total_q: int, total_k: int) -> tuple[str, ...]:
    """Payloads whose columns the forward leaves out because each part of the backward makes its own.

    Those of ``made_by_parts`` where there are several parts.
    """
    return made_by_parts(plan) if backward_parts(plan, total_q, total_k) > 1 else ()


def made_by_parts(plan: Plan) -> tuple[str, ...]:
    """Payloads whose columns calls of some sizes make later: the E4M3 codes of the scores.

    With NVFP4 nothing would be gained: columns of Q and K are all that is kept in eight bits.
    """
    return ("q", "k") if plan.training and plan.recipe.format == "mxfp8" else ()


def part_of(plan: Plan, payloads: Payloads, lists: WorkLists, later: Sequence[str], parts: int, n: int) -> Part:
    """Part n of ``parts``. later: ``made_later``, payloads whose columns are made here."""
    heads_q, heads_kv = plan.heads_q // parts, plan.heads_kv // parts
    q, kv = (slice(n * heads, (n + 1) * heads) for heads in (heads_q, heads_kv))
    items = {name: _of_heads(x, q if name.startswith("q") else kv) for name, x in payloads.items.items()}
    for spec in plan.forward_specs:
        if spec.name in later:
            eight = items[spec.name]
            assert isinstance(eight, E4M3Payload)
            assert spec.columns is not None
            tables = lists.q if spec.source == "q" else lists.k
            items[spec.name] = dataclasses.replace(eight, columns=columns_of(eight.codes, tables, spec.columns))
    amax = (x[kv] for x in (payloads.k_amax, payloads.v_amax))
    return Part(dataclasses.replace(plan, heads_q=heads_q, heads_kv=heads_kv), q, kv, Payloads(items, *amax))


def _of_heads(payload: Payload, heads: slice) -> Payload:
    """Views. Fields that are not kept have no elements and stay as they are."""
    assert isinstance(payload, E4M3Payload | NVFP4Rows)
    fields = {field.name: getattr(payload, field.name) for field in dataclasses.fields(payload)}
    by_token = ("codes", "scales")  # [T, N, ...]; the others are [N, ...]
    views = {name: x if x.dim() == 1 else x[:, heads] if name in by_token else x[heads] for name, x in fields.items()}
    return dataclasses.replace(payload, **views)
