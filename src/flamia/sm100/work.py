"""What a CTA works on: 256 consecutive queries of one document and head, as two tiles, and the key tiles they see."""

from typing import Any, NamedTuple

import cutlass
from cutlass import Int32, const_expr

TILE = 128
ITEM = 2 * TILE  # queries of an item of the work list


class Masks(NamedTuple):
    """The kind of mask a kernel is compiled for: whether either side of the window is bounded."""

    left: bool
    right: bool


class Tables(NamedTuple):
    """Where the work is listed (``worklists``), int32 tensors.

    Attributes:
        items: [n, 4]: document, first query of the item, queries, cost. count: [1], items in use.
        cu_q, cu_k: [documents + 1], offsets.
    """

    items: Any
    count: Any
    cu_q: Any
    cu_k: Any


class Span(NamedTuple):
    """Key tiles [first, stop) of one tile of queries; of these, [clear, clouded) need no mask."""

    first: Any
    clear: Any
    clouded: Any
    stop: Any


class Item(NamedTuple):
    """Two tiles of queries of one document and head, on the device.

    Attributes:
        head: query head. kv: its kv head.
        q_start, k_start: first tokens of the document; len_q, len_k: its lengths; shift: keys less queries.
        q0: first query of the item within the document.
        first, stop: key tiles that either tile sees. spans: those that each sees.
    """

    head: Any
    kv: Any
    q_start: Any
    k_start: Any
    len_q: Any
    len_k: Any
    shift: Any
    q0: Any
    first: Any
    stop: Any
    spans: tuple[Span, ...]


def pick(spans: tuple[Span, ...], i: Int32) -> Span:
    """Span i, known on the device only."""
    return Span(*(a * (1 - i) + b * i for a, b in zip(*spans, strict=True)))


def position(turn: Int32, block: Int32, blocks: Int32) -> Int32:
    """Item of a block's ``turn``: items are dealt in alternating directions, so that long and short ones meet."""
    odd = turn & 1
    return turn * blocks + block * (1 - odd) + (blocks - 1 - block) * odd


def item_at(
    work: Int32,
    heads: Int32,
    ratio: int,
    section: Int32,
    left: Int32,
    right: Int32,
    tables: Tables,
    masks: Masks,
) -> Item:
    """Item ``work`` of count * heads: heads in sections of ``section``, the list's items in order within a section."""
    per_section = tables.count[0] * section
    part = work // per_section
    rest = work - part * per_section
    n = rest // section
    head = part * section + (rest - n * section)
    document, q0 = tables.items[n, 0], tables.items[n, 1]
    q_start, k_start = tables.cu_q[document], tables.cu_k[document]
    len_q, len_k = tables.cu_q[document + 1] - q_start, tables.cu_k[document + 1] - k_start
    shift = len_k - len_q
    spans = tuple(_span(q0 + TILE * i, len_q, len_k, shift, left, right, masks) for i in range(2))
    some = [cutlass.min(s.stop - s.first, 1) for s in spans]  # 0: no key tile
    first = spans[0].first * some[0] + spans[1].first * (1 - some[0])
    stop = cutlass.max(spans[0].stop * some[0], spans[1].stop * some[1])
    return Item(head, head // ratio, q_start, k_start, len_q, len_k, shift, q0, first, stop, spans)


def _span(q0: Int32, len_q: Int32, len_k: Int32, shift: Int32, left: Int32, right: Int32, masks: Masks) -> Span:
    end = cutlass.min(q0 + TILE, len_q)
    first, stop = Int32(0), len_k
    clear, clouded = Int32(0), len_k // TILE
    if const_expr(masks.left):
        first = cutlass.max(q0 + shift - left, 0) // TILE
        clear = (cutlass.max(end - 1 + shift - left, 0) + TILE - 1) // TILE
    if const_expr(masks.right):
        stop = cutlass.min(len_k, cutlass.max(end + shift + right, 0))
        clouded = cutlass.min(clouded, cutlass.max(q0 + shift + right + 1, 0) // TILE)
    rows = cutlass.min(cutlass.max(len_q - q0, 0), 1)  # 0: the item has no such tile
    stop = first + cutlass.max((stop + TILE - 1) // TILE - first, 0) * rows
    clear = cutlass.min(cutlass.max(clear, first), stop)
    return Span(first, clear, cutlass.min(cutlass.max(clouded, clear), stop), stop)
