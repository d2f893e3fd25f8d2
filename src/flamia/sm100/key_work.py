"""What a CTA of the backward works on: a tile of 128 keys of one document and kv head, and the queries that see it."""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

from flamia.sm100.work import TILE, Masks


class KeyTables(NamedTuple):
    """Where the work is listed (``worklists``), int32 tensors.

    Attributes:
        items: [n, 4]: document, first key of the tile, keys, cost. count: [1], items in use.
        cu_q, cu_k: [documents + 1], offsets. columns_q: [documents + 1], first positions in the dQ accumulator.
    """

    items: Any
    count: Any
    cu_q: Any
    cu_k: Any
    columns_q: Any


class KeyItem(NamedTuple):
    """One tile of keys of one document and kv head, on the device.

    Attributes:
        kv: kv head. document: its index.
        q_start, k_start: first tokens of the document; len_q, len_k: its lengths; shift: keys less queries.
        k0: first key of the tile within the document. column_q: the document's first position in the dQ accumulator.
        first, stop: steps of 128 queries that see a key of the tile. Of these, [clear, clouded) need no mask.
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
    first: Any
    clear: Any
    clouded: Any
    stop: Any


def key_item_at(
    work: Int32, section: Int32, left: Int32, right: Int32, tables: KeyTables, masks: Masks, keys: int = TILE
) -> KeyItem:
    """Item ``work`` of count * kv heads: heads in sections of ``section``, the list's items in order within a section.

    keys: of an item. Queries past the document's end are no reason for a mask: their weights are zero.
    """
    per_section = tables.count[0] * section
    part = work // per_section
    rest = work - part * per_section
    n = rest // section
    kv = part * section + (rest - n * section)
    document, k0 = tables.items[n, 0], tables.items[n, 1]
    q_start, k_start = tables.cu_q[document], tables.cu_k[document]
    len_q, len_k = tables.cu_q[document + 1] - q_start, tables.cu_k[document + 1] - k_start
    shift = len_k - len_q
    first, stop = steps_that_see(k0, len_q, len_k, left, right, masks, keys)
    clear, clouded = Int32(0), stop
    if const_expr(masks.right):
        clear = (cutlass.max(k0 + keys - 1 - shift - right, 0) + TILE - 1) // TILE
    if const_expr(masks.left):
        clouded = cutlass.max(k0 - shift + left + 1, 0) // TILE
    clear = cutlass.max(clear, stop * Int32(k0 + keys > len_k))  # keys past the end must be masked
    clear = cutlass.min(cutlass.max(clear, first), stop)
    clouded = cutlass.min(cutlass.max(clouded, clear), stop)
    column_q = tables.columns_q[document]
    return KeyItem(
        kv, document, q_start, k_start, len_q, len_k, shift, k0, column_q, first, clear, clouded, stop
    )  # fmt: skip


def steps_that_see(
    k0: Int32, len_q: Int32, len_k: Int32, left: Int32, right: Int32, masks: Masks, keys: int = TILE
) -> Any:
    """First and past-last step of queries that see one of ``keys`` keys from k0; the same twice where none does."""
    shift = len_k - len_q
    first, stop = Int32(0), (len_q + TILE - 1) // TILE
    if const_expr(masks.right):
        first = cutlass.max(k0 - shift - right, 0) // TILE
    if const_expr(masks.left):
        last = cutlass.min(k0 + keys, len_k) - 1 - shift + left  # before the document's end is minded
        stop = cutlass.min(stop, cutlass.max(last + TILE, 0) // TILE)
    return first, cutlass.max(first, stop)


@cute.jit
def turn(item: Any, j: Int32, left: Int32, right: Int32, masks: Any) -> Int32:
    """How many tiles of keys that step j sees come before this one in the list: they add to dQ first.

    A warp's work. The list is sorted by decreasing cost, which is the number of steps, then by key. An item waits for
    items before it in the list alone, which are at work or done.
    """
    rank = item.k0 // TILE
    if const_expr(masks.left):
        rank = Int32(0)
        mine = item.stop - item.first
        begin = cutlass.max(j * TILE + item.shift - left, 0) // TILE
        end = (item.len_k + TILE - 1) // TILE
        if const_expr(masks.right):
            end = cutlass.min(end, cutlass.max(j * TILE + TILE - 1 + item.shift + right, 0) // TILE + 1)
        for n in cutlass.range(begin, end, 32, unroll=1):
            other = (n + cute.arch.lane_idx()) * TILE
            first, stop = steps_that_see(other, item.len_q, item.len_k, left, right, masks)
            cost = stop - first
            sees = other < item.len_k and first <= j and j < stop
            before = sees and (cost > mine or (cost == mine and other < item.k0))
            rank = rank + cute.arch.popc(cute.arch.vote_ballot_sync(before))
    return rank
