"""``flamia.worklists`` on the device: three launches, no host read, any lengths of one capacity."""

# Kernels take pointers and tiles, which have no Python types.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(
    do_not_specialize=["documents", "forward", "backward"], do_not_specialize_on_alignment=["cu_q_ptr", "cu_k_ptr"]
)
def _scan_kernel(
    cu_q_ptr, cu_k_ptr, starts_ptr, columns_ptr, counters_ptr, documents, forward, backward, BLOCK: tl.constexpr
):  # fmt: skip
    """Running counts, int32 [6, documents + 1], one program each: blocks and groups of q, blocks and groups of k,
    forward tiles, backward tiles; the column starts of q and k [2, documents + 1]; and eight zeros."""
    table = tl.program_id(0)
    cu_ptr = cu_q_ptr if (table == 0) | (table == 1) | (table == 4) else cu_k_ptr
    unit = tl.where(table % 2 == 0, 32, 256)
    unit = tl.where(table == 4, forward, tl.where(table == 5, backward, unit))
    lane = tl.arange(0, BLOCK)
    out = starts_ptr + table * (documents + 1)
    columns = columns_ptr + table // 2 * (documents + 1)
    is_columns = (table == 0) | (table == 2)
    before = tl.zeros((), tl.int32)
    if table == 0:
        tl.store(counters_ptr + tl.arange(0, 8), tl.zeros((8,), tl.int32))
    tl.store(out, 0)
    tl.store(columns, 0, is_columns)
    for first in range(0, documents, BLOCK):
        document = first + lane
        inside = document < documents
        length = tl.load(cu_ptr + document + 1, inside, 0) - tl.load(cu_ptr + document, inside, 0)
        units = (length + unit - 1) // unit
        starts = tl.cumsum(units, 0) + before
        tl.store(out + 1 + document, starts, inside)
        if is_columns:
            tl.store(columns + 1 + document, starts * 32, inside)
        before += tl.sum(units, 0)


@triton.jit
def owner_of(starts_ptr, index, documents, steps):
    """Document that holds each index: the last whose first unit is at most it, ``documents`` past the last unit.

    starts_ptr: int32 [documents + 1], first unit of each document; steps: bits of ``documents``.
    """
    low = tl.zeros_like(index)
    high = low + documents
    for _ in range(steps):
        middle = (low + high + 1) // 2
        reached = tl.load(starts_ptr + middle) <= index
        low = tl.where(reached, middle, low)
        high = tl.where(reached, high, tl.maximum(middle - 1, low))
    return low


@triton.jit
def _span(cu_ptr, document, documents):
    # first token and length of a document; past the last: the end, and no length
    first = tl.load(cu_ptr + document)
    return first, tl.load(cu_ptr + tl.minimum(document + 1, documents)) - first


@triton.jit
def _fill_blocks(cu_ptr, starts_ptr, out_ptr, index, inside, total, documents, steps):
    owner = owner_of(starts_ptr, index, documents, steps)
    first, length = _span(cu_ptr, owner, documents)
    offset = (index - tl.load(starts_ptr + owner)) * 32
    real = owner < documents
    valid = tl.minimum(tl.maximum(length - offset, 0), 32)
    rows = tl.where(real, valid, tl.minimum(tl.maximum(total - first - offset, 0), 32))
    out = out_ptr + index * 4
    tl.store(out, tl.where(rows > 0, first + offset, 0), inside)
    tl.store(out + 1, valid, inside)
    tl.store(out + 2, rows, inside)
    tl.store(out + 3, tl.where(real, owner, -1), inside)


@triton.jit
def _fill_groups(cu_ptr, blocks_ptr, starts_ptr, out_ptr, index, inside, total, capacity, documents, steps):
    owner = owner_of(starts_ptr, index, documents, steps)
    first, length = _span(cu_ptr, owner, documents)
    offset = (index - tl.load(starts_ptr + owner)) * 256
    column = tl.load(blocks_ptr + owner) * 32 + offset
    real = owner < documents
    valid = tl.minimum(tl.maximum(length - offset, 0), 256)
    rows = tl.where(real, valid, tl.minimum(tl.maximum(total - first - offset, 0), 256))
    width = tl.where(real, (valid + 31) // 32 * 32, tl.minimum(tl.maximum(capacity - column, 0), 256))
    out = out_ptr + index * 6
    tl.store(out, tl.where(rows > 0, first + offset, 0), inside)
    tl.store(out + 1, valid, inside)
    tl.store(out + 2, rows, inside)
    tl.store(out + 3, tl.where(real, owner, -1), inside)
    tl.store(out + 4, tl.where(width > 0, column, 0), inside)
    tl.store(out + 5, width, inside)


@triton.jit
def _fill_items(
    own_ptr, other_ptr, starts_ptr, items_ptr, keys_ptr, total_ptr, index, inside, documents, steps, before, after,
    limit, shift_bits, prefix, tile, cap, BLOCK: tl.constexpr,
):  # fmt: skip
    owner = owner_of(starts_ptr, index, documents, steps)
    _, length = _span(own_ptr, owner, documents)
    _, seen = _span(other_ptr, owner, documents)
    begin = (index - tl.load(starts_ptr + owner)) * tile
    size = tl.minimum(tl.maximum(length - begin, 0), tile)
    shift = seen - length
    first = tl.maximum(begin + shift - before, 0)
    last = tl.minimum(begin + size - 1 + shift + after, seen - 1)
    cost = tl.where(last < first, 0, last // BLOCK - first // BLOCK + 1)
    real = owner < documents
    out = items_ptr + index * 4
    tl.store(out, tl.where(real, owner, -1), inside)
    tl.store(out + 1, tl.where(real, begin, 0), inside)
    tl.store(out + 2, tl.where(real, size, 0), inside)
    tl.store(out + 3, tl.where(real, cost, 0), inside)
    counted = tl.where(real & inside, tl.minimum(cost + 1, cap), 0)
    tl.atomic_add(total_ptr, tl.sum(counted, 0), sem="relaxed")
    # Ascending keys: list, decreasing cost, index. Unused items come after all others of their list.
    rank = (prefix + tl.where(real, limit - cost, limit + 1)).to(keys_ptr.dtype.element_ty)
    tl.store(keys_ptr + index, (rank << shift_bits) | index.to(keys_ptr.dtype.element_ty), inside)


@triton.jit(do_not_specialize=["documents", "total_q", "total_k", "capacity_q", "capacity_k", "items_q", "items_k",
                               "groups_q", "groups_k", "steps", "before", "after", "limit", "shift_bits", "forward",
                               "backward", "cap_q", "cap_k"],
            do_not_specialize_on_alignment=["cu_q_ptr", "cu_k_ptr"])  # fmt: skip
def _fill_kernel(
    cu_q_ptr, cu_k_ptr, starts_ptr, blocks_q_ptr, groups_q_ptr, blocks_k_ptr, groups_k_ptr, items_ptr, keys_ptr,
    counters_ptr, documents, total_q, total_k, capacity_q, capacity_k, groups_q, groups_k, items_q, items_k, steps,
    before, after, limit, shift_bits, forward, backward, cap_q, cap_k, KEYS: tl.constexpr, QUERIES: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    table, pid = tl.program_id(1), tl.program_id(0)
    index = pid * BLOCK + tl.arange(0, BLOCK)
    row = documents + 1
    if table == 0:
        if pid * BLOCK < capacity_q // 32:
            _fill_blocks(cu_q_ptr, starts_ptr, blocks_q_ptr, index, index < capacity_q // 32, total_q, documents, steps)
    elif table == 1:
        if pid * BLOCK < groups_q:
            starts = starts_ptr + row
            inside = index < groups_q
            _fill_groups(
                cu_q_ptr, starts_ptr, starts, groups_q_ptr, index, inside, total_q, capacity_q, documents, steps
            )
    elif table == 2:
        if pid * BLOCK < capacity_k // 32:
            starts = starts_ptr + 2 * row
            _fill_blocks(cu_k_ptr, starts, blocks_k_ptr, index, index < capacity_k // 32, total_k, documents, steps)
    elif table == 3:
        if pid * BLOCK < groups_k:
            blocks = starts_ptr + 2 * row
            starts = starts_ptr + 3 * row
            inside = index < groups_k
            _fill_groups(cu_k_ptr, blocks, starts, groups_k_ptr, index, inside, total_k, capacity_k, documents, steps)
    elif table == 4:
        if pid * BLOCK < items_q:
            starts = starts_ptr + 4 * row
            _fill_items(
                cu_q_ptr, cu_k_ptr, starts, items_ptr, keys_ptr, counters_ptr + 2, index, index < items_q, documents,
                steps, before, after, limit, shift_bits, 0, forward, cap_q, KEYS,
            )  # fmt: skip
    else:
        if pid * BLOCK < items_k:
            starts = starts_ptr + 5 * row
            _fill_items(
                cu_k_ptr, cu_q_ptr, starts, items_ptr + items_q * 4, keys_ptr + items_q, counters_ptr + 6, index,
                index < items_k, documents, steps, after, before, limit, shift_bits, limit + 2, backward, cap_k,
                QUERIES,
            )  # fmt: skip


@triton.jit(do_not_specialize=["count"])
def _place_kernel(keys_ptr, items_ptr, out_ptr, count, BLOCK: tl.constexpr, STEP: tl.constexpr):
    """Items in the order of their keys, which all differ: an item's place is the number of smaller keys."""
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = index < count
    own = tl.load(keys_ptr + index, inside, 0)
    place = tl.zeros((BLOCK,), tl.int32)
    for first in range(0, count, STEP):
        other = first + tl.arange(0, STEP)
        smaller = tl.load(keys_ptr + other, other < count, 0)[None, :] < own[:, None]
        place += tl.sum((smaller & (other < count)[None, :]).to(tl.int32), 1)
    field = tl.arange(0, 4)
    values = tl.load(items_ptr + index[:, None] * 4 + field[None, :], inside[:, None], 0)
    tl.store(out_ptr + place[:, None] * 4 + field[None, :], values, inside[:, None])


@triton.jit(do_not_specialize=["items_q", "items_k", "shift_bits"])
def _gather_kernel(keys_ptr, items_ptr, out_ptr, items_q, items_k, shift_bits, BLOCK: tl.constexpr):
    position = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = position < items_q + items_k
    key = tl.load(keys_ptr + position, inside, 0)
    mask = (tl.full((), 1, keys_ptr.dtype.element_ty) << shift_bits) - 1
    source = (key & mask).to(tl.int32) + tl.where(position < items_q, 0, items_q)
    field = tl.arange(0, 4)
    values = tl.load(items_ptr + source[:, None] * 4 + field[None, :], inside[:, None], 0)
    tl.store(out_ptr + position[:, None] * 4 + field[None, :], values, inside[:, None])
