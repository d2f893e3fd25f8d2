"""What a CTA of the backward works on: an item of the list of key tiles, for one kv head, and who sees it."""

from typing import Any, NamedTuple

import cutlass
from cutlass import Int32, const_expr

from flamia.sm90.work import TILE, Masks

STEP = 64  # queries per step


class KeyTables(NamedTuple):
    """Where the work is listed (``worklists``), int32 tensors.

    Attributes:
        items: [n, 4]: document, first key of the tile, keys, cost. count: [1], items in use.
        cu_q, cu_k: [documents + 1], offsets. columns_q, columns_k: [documents + 1], first positions in column payloads.
    """

    items: Any
    count: Any
    cu_q: Any
    cu_k: Any
    columns_q: Any
    columns_k: Any


class KeyItem(NamedTuple):
    """One tile of keys of one document and kv head, on the device.

    Attributes:
        kv: kv head. document: its index.
        q_start, k_start: first tokens of the document; len_q, len_k: its lengths; shift: keys less queries.
        k0: first key of the tile within the document. column_q, column_k: the document's first positions in column
            payloads.
        first, stop: steps of ``STEP`` queries that see a key of the tile. Of these, [clear, clouded) need no mask.
    """

    kv: Any
    document: Any
    q_start: Any
    k_start: Any
    len_q: Any
    len_k: Any
    shift: Any
    k0: Any
    column_q: Any
    column_k: Any
    first: Any
    stop: Any
    clear: Any
    clouded: Any


def key_item_at(work: Int32, section: Int32, left: Int32, right: Int32, tables: KeyTables, masks: Masks) -> KeyItem:
    """Item ``work`` of count * kv heads: heads in sections of ``section``, the list's items in order within a section.

    Queries past the document's end are no reason for a mask: their addends are -inf.
    """
    span = tables.count[0] * section
    part = work // span
    rest = work - part * span
    n = rest // section
    kv = part * section + (rest - n * section)
    document, k0 = tables.items[n, 0], tables.items[n, 1]
    q_start, k_start = tables.cu_q[document], tables.cu_k[document]
    len_q, len_k = tables.cu_q[document + 1] - q_start, tables.cu_k[document + 1] - k_start
    shift = len_k - len_q
    end = cutlass.min(k0 + TILE, len_k)
    first, stop = Int32(0), (len_q + STEP - 1) // STEP
    clear, clouded = Int32(0), stop
    if const_expr(masks.right):
        first = cutlass.max(k0 - shift - right, 0) // STEP
        clear = (cutlass.max(k0 + TILE - 1 - shift - right, 0) + STEP - 1) // STEP
    if const_expr(masks.left):
        last = end - 1 - shift + left  # last query that sees a key, before the document's end is minded
        stop = cutlass.min(stop, cutlass.max(last + STEP, 0) // STEP)
        clouded = cutlass.max(k0 - shift + left + 1, 0) // STEP
    clear = cutlass.max(clear, stop * Int32(k0 + TILE > len_k))  # keys past the end must be masked
    return KeyItem(
        kv, document, q_start, k_start, len_q, len_k, shift, k0, tables.columns_q[document],
        tables.columns_k[document], first, stop, clear, clouded,
    )  # fmt: skip
