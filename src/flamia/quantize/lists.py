"""``flamia.worklists`` on the device: three launches, no host read, any lengths of one capacity."""

from __future__ import annotations

import torch
from torch import Tensor

from flamia.documents import TOKEN_BLOCK, Documents, column_capacity
from flamia.launch import cdiv, interpreted, launch
from flamia.worklists import (
    UNBOUNDED,
    Tiling,
    TokenTables,
    WorkList,
    WorkLists,
    cost_cap,
    group_capacity,
    item_capacity,
)

_SCAN = 2048  # documents per step of the running sums
_PLACED = 8192  # items up to which counting smaller keys is faster than torch's sort
# Sizes of one document that show all launches: items counted, items sorted by keys of 32 bits, and of 64.
DRY_TOKENS = (1 << 7, 1 << 21, 1 << 24)


def _shapes(total_q: int, total_k: int, count: int, tiling: Tiling) -> dict[str, tuple[int, int]]:
    """Rows and columns of the tables of a packed row, in the order in which they lie in one buffer."""
    items = item_capacity(total_q, count, tiling.forward) + item_capacity(total_k, count, tiling.backward)
    return {
        "blocks_q": (column_capacity(total_q, count) // TOKEN_BLOCK, 4),
        "blocks_k": (column_capacity(total_k, count) // TOKEN_BLOCK, 4),
        "groups_q": (group_capacity(total_q, count), 6),
        "groups_k": (group_capacity(total_k, count), 6),
        "items": (items, 4),
        "starts": (6, count + 1),
        "columns": (2, count + 1),
        "counters": (2, 4),  # of each list: claims, total, nothing
    }


def _tables(buffer: Tensor, documents: Documents, tiling: Tiling) -> dict[str, Tensor]:
    tables, start = {}, 0
    shapes = _shapes(documents.total_q, documents.total_k, documents.count, tiling)
    for name, (rows, columns) in shapes.items():
        tables[name] = buffer[start : start + rows * columns].view(rows, columns)
        start += _aligned(rows * columns)
    return tables


def _aligned(words: int) -> int:
    return (words + 3) // 4 * 4  # 16 bytes


def list_words(total_q: int, total_k: int, documents: int, tiling: Tiling | None = None) -> int:
    """Words of ``WorkLists.buffer``, for numbers of tokens and of documents."""
    shapes = _shapes(total_q, total_k, documents, tiling or Tiling())
    return sum(_aligned(rows * columns) for rows, columns in shapes.values())


def lists_in(buffer: Tensor, documents: Documents, tiling: Tiling | None = None) -> WorkLists:
    """The lists that ``work_lists`` of the same documents wrote into buffer, int32 [``list_words``]: views of it."""
    tiling = tiling or Tiling()
    count, tables = documents.count, _tables(buffer, documents, tiling)
    items_q, starts = item_capacity(documents.total_q, count, tiling.forward), tables["starts"]
    items, counters = tables["items"], tables["counters"]
    return WorkLists(
        TokenTables(tables["blocks_q"], tables["groups_q"], tables["columns"][0]),
        TokenTables(tables["blocks_k"], tables["groups_k"], tables["columns"][1]),
        WorkList(items[:items_q], starts[4, count:], tiling.forward, counters[0, :2], counters[0, 2:3]),
        WorkList(items[items_q:], starts[5, count:], tiling.backward, counters[1, :2], counters[1, 2:3]),
        buffer,
    )


def work_lists(documents: Documents, left: int | None, right: int | None, tiling: Tiling | None = None) -> WorkLists:
    """``worklists.work_lists`` in three launches, and torch's sort for very many items; all of it in one buffer.

    cu_seqlens: int32, contiguous.
    """
    tiling = tiling or Tiling()
    cu_q, cu_k = documents.cu_seqlens_q.contiguous(), documents.cu_seqlens_k.contiguous()
    count, device = documents.count, cu_q.device
    total_q, total_k = documents.total_q, documents.total_k
    buffer = torch.empty(list_words(total_q, total_k, count, tiling), dtype=torch.int32, device=device)
    tables = _tables(buffer, documents, tiling)
    starts, columns, items = (tables[name] for name in ("starts", "columns", "items"))
    capacity_q, capacity_k = (tables[name].shape[0] * TOKEN_BLOCK for name in ("blocks_q", "blocks_k"))
    groups_q, groups_k = (tables[name].shape[0] for name in ("groups_q", "groups_k"))
    items_q = item_capacity(total_q, count, tiling.forward)
    items_k = items.shape[0] - items_q
    limit = max(-(-total_k // tiling.keys), -(-total_q // tiling.queries))
    shift_bits = max(items_q, items_k, 1).bit_length()
    wide = (2 * limit + 4).bit_length() + shift_bits > 31
    keys = torch.empty(items_q + items_k, dtype=torch.int64 if wide else torch.int32, device=device)
    unsorted = torch.empty_like(items)
    rows = 2048 if interpreted() else 128  # per program

    launch(
        "flamia.quantize.triton_lists:_scan_kernel",
        (6,),
        (cu_q, cu_k, starts, columns, tables["counters"], count, tiling.forward, tiling.backward),
        warps=8,
        BLOCK=_SCAN,
    )
    longest = max(capacity_q // TOKEN_BLOCK, capacity_k // TOKEN_BLOCK, groups_q, groups_k, items_q, items_k)
    if longest:
        launch(
            "flamia.quantize.triton_lists:_fill_kernel",
            (cdiv(longest, rows), 6),
            (
                cu_q, cu_k, starts, tables["blocks_q"], tables["groups_q"], tables["blocks_k"], tables["groups_k"],
                unsorted, keys, tables["counters"], count, total_q, total_k, capacity_q, capacity_k, groups_q, groups_k,
                items_q, items_k, count.bit_length(),
                UNBOUNDED if left is None else left, UNBOUNDED if right is None else right, limit, shift_bits,
                tiling.forward, tiling.backward, cost_cap(items_q), cost_cap(items_k),
            ),
            warps=4,
            KEYS=tiling.keys,
            QUERIES=tiling.queries,
            BLOCK=rows,
        )  # fmt: skip
    if 0 < items_q + items_k <= _PLACED:
        block, step = (512, 512) if interpreted() else (32, 512)
        launch(
            "flamia.quantize.triton_lists:_place_kernel",
            (cdiv(items_q + items_k, block),),
            (keys, unsorted, items, items_q + items_k),
            warps=4,
            BLOCK=block,
            STEP=step,
        )
    elif items_q + items_k:
        ordered = torch.sort(keys).values
        launch(
            "flamia.quantize.triton_lists:_gather_kernel",
            (cdiv(items_q + items_k, rows),),
            (ordered, unsorted, items, items_q, items_k, shift_bits),
            warps=4,
            BLOCK=rows,
        )
    return lists_in(buffer, documents, tiling)
