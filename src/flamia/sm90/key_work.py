"""What a CTA of the backward works on: an item of the list of key tiles, for one kv head, and who sees it."""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

from flamia.sm90.work import TILE, Masks

STEP = 64  # queries per step


class KeyTables(NamedTuple):
    """Where the work is listed (``worklists``), int32 tensors.

    Attributes:
        items: [n, 4]: document, first key of the tile, keys, cost. count: [1], items in use.
        claims: [2], total: [1], of ``worklists.WorkList``.
        cu_q, cu_k: [documents + 1], offsets. columns_q, columns_k: [documents + 1], first positions in column payloads.
    """

    items: Any
    count: Any
    claims: Any
    total: Any
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


def key_item_at(work: Int32, heads: Int32, left: Int32, right: Int32, tables: KeyTables, masks: Masks) -> KeyItem:
    """Number ``work`` of count * kv heads, which are ``heads``: item * heads + head.

    Queries past the document's end are no reason for a mask: their addends are -inf.
    """
    n = work // heads
    kv = work - n * heads
    document, k0 = tables.items[n, 0], tables.items[n, 1]
    q_start, k_start = tables.cu_q[document], tables.cu_k[document]
    len_q, len_k = tables.cu_q[document + 1] - q_start, tables.cu_k[document + 1] - k_start
    shift = len_k - len_q
    first, stop = steps_that_see(k0, len_q, len_k, left, right, masks)
    clear, clouded = Int32(0), stop
    if const_expr(masks.right):
        clear = (cutlass.max(k0 + TILE - 1 - shift - right, 0) + STEP - 1) // STEP
    if const_expr(masks.left):
        clouded = cutlass.max(k0 - shift + left + 1, 0) // STEP
    clear = cutlass.max(clear, stop * Int32(k0 + TILE > len_k))  # keys past the end must be masked
    return KeyItem(
        kv, document, q_start, k_start, len_q, len_k, shift, k0, tables.columns_q[document],
        tables.columns_k[document], first, stop, clear, clouded,
    )  # fmt: skip


def around(j: Int32, item: KeyItem) -> Int32:
    """The j-th step of a walk around all queries: tile n of keys starts at tile n modulo m of 128 queries, of m."""
    n = j + item.k0 // TILE % ((item.len_q + TILE - 1) // TILE) * (TILE // STEP)
    return n - item.stop * Int32(n >= item.stop)


def steps_that_see(k0: Int32, len_q: Int32, len_k: Int32, left: Int32, right: Int32, masks: Masks) -> Any:
    """First and past-last step of queries that see a key of the tile at k0."""
    shift = len_k - len_q
    first, stop = Int32(0), (len_q + STEP - 1) // STEP
    if const_expr(masks.right):
        first = cutlass.max(k0 - shift - right, 0) // STEP
    if const_expr(masks.left):
        last = cutlass.min(k0 + TILE, len_k) - 1 - shift + left  # before the document's end is minded
        stop = cutlass.min(stop, cutlass.max(last + STEP, 0) // STEP)
    return first, stop


def _cost(k0: Int32, len_q: Int32, len_k: Int32, left: Int32, right: Int32, masks: Masks) -> Int32:
    # as in the list: blocks of 128 queries that see the tile
    shift = len_k - len_q
    first, last = Int32(0), len_q - 1
    if const_expr(masks.right):
        first = cutlass.max(k0 - shift - right, 0)
    if const_expr(masks.left):
        last = cutlass.min(last, cutlass.min(k0 + TILE, len_k) - 1 - shift + left)
    return (last // TILE - first // TILE + 1) * Int32(last >= first)


@cute.jit
def turn(item: Any, j: Int32, left: Int32, right: Int32, masks: Any) -> Int32:
    """How many tiles of keys that step j sees come before this one in the list: they add to dQ first.

    A warp's work. An item waits for items before it in the list alone, which are at work or done.
    """
    rank = item.k0 // TILE
    if const_expr(masks.left):
        rank = Int32(0)
        mine = _cost(item.k0, item.len_q, item.len_k, left, right, masks)
        begin = cutlass.max(j * STEP + item.shift - left, 0) // TILE
        end = (item.len_k + TILE - 1) // TILE
        if const_expr(masks.right):
            end = cutlass.min(end, cutlass.max(j * STEP + STEP - 1 + item.shift + right, 0) // TILE + 1)
        for n in cutlass.range(begin, end, 32, unroll=1):
            other = (n + cute.arch.lane_idx()) * TILE
            first, stop = steps_that_see(other, item.len_q, item.len_k, left, right, masks)
            cost = _cost(other, item.len_q, item.len_k, left, right, masks)
            sees = other < item.len_k and first <= j and j < stop
            before = sees and (cost > mine or (cost == mine and other < item.k0))
            rank = rank + cute.arch.popc(cute.arch.vote_ballot_sync(before))
    return rank
