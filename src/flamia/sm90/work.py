"""What a CTA works on: an item of the list of query tiles, for one head, and the key tiles that it sees."""

from typing import Any, NamedTuple

import cutlass
from cutlass import Int32, const_expr

TILE = 128


class Masks(NamedTuple):
    """The kind of mask a kernel is compiled for: whether either side of the window is bounded."""

    left: bool
    right: bool


class Tables(NamedTuple):
    """Where the work is listed (``worklists``), int32 tensors.

    Attributes:
        items: [n, 4]: document, first query of the tile, queries, cost. count: [1], items in use.
        claims: [2], total: [1], of ``worklists.WorkList``.
        cu_q, cu_k: [documents + 1], offsets. columns: [documents + 1], the keys' first positions in column payloads.
        uneven: uint8 [kv heads, documents]: V's exponents vary too much for the quick row sums.
    """

    items: Any
    count: Any
    claims: Any
    total: Any
    cu_q: Any
    cu_k: Any
    columns: Any
    uneven: Any


class Item(NamedTuple):
    """One tile of queries of one document and head, on the device.

    Attributes:
        head: query head. kv: its kv head.
        q_start, k_start: first tokens of the document; len_q, len_k: its lengths; shift: keys less queries.
        q0: first query of the tile within the document. column: first position of its keys in column payloads.
        first, stop: key tiles seen, none where the item is not this kernel's. Of these, [clear, clouded) need no mask.
        mine: whether this kernel is to write the item. uneven: of ``Tables``.
    """

    head: Any
    kv: Any
    q_start: Any
    k_start: Any
    len_q: Any
    len_k: Any
    shift: Any
    q0: Any
    column: Any
    first: Any
    stop: Any
    clear: Any
    clouded: Any
    mine: Any
    uneven: Any


def item_at(
    work: Int32,
    heads: Int32,
    ratio: int,
    left: Int32,
    right: Int32,
    tables: Tables,
    masks: Masks,
    kind: str,
) -> Item:
    """Number ``work`` of count * heads: item * heads + head.

    kind: "even" or "uneven" documents are this kernel's, or "all".
    """
    n = work // heads
    head = work - n * heads
    document, q0 = tables.items[n, 0], tables.items[n, 1]
    q_start, k_start = tables.cu_q[document], tables.cu_k[document]
    len_q, len_k = tables.cu_q[document + 1] - q_start, tables.cu_k[document + 1] - k_start
    shift = len_k - len_q
    end = cutlass.min(q0 + TILE, len_q)
    first, stop = Int32(0), len_k
    clear, clouded = Int32(0), len_k // TILE
    if const_expr(masks.left):
        first = cutlass.max(q0 + shift - left, 0) // TILE
        clear = (cutlass.max(end - 1 + shift - left, 0) + TILE - 1) // TILE
    if const_expr(masks.right):
        stop = cutlass.min(len_k, cutlass.max(end + shift + right, 0))
        clouded = cutlass.min(clouded, cutlass.max(q0 + shift + right + 1, 0) // TILE)
    uneven = Int32(tables.uneven[head // ratio, document])
    mine = {"even": 1 - uneven, "uneven": uneven, "all": Int32(1)}[kind]
    stop = first + ((stop + TILE - 1) // TILE - first) * mine
    column = tables.columns[document]
    return Item(
        head,
        head // ratio,
        q_start,
        k_start,
        len_q,
        len_k,
        shift,
        q0,
        column,
        first,
        stop,
        clear,
        clouded,
        mine,
        uneven,
    )
