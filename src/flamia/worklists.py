"""Who works on what: blocks of tokens for quantizers, items sorted by cost for attention kernels (paper B.6).

Everything is a function of cu_seqlens, computed on the device without a host read; the sizes of the tables depend on
the number of tokens and of documents, never on lengths, so one captured graph serves every packing of its capacity.
This file holds the tables, their capacities and the plain PyTorch twins; ``quantize.triton_lists`` builds the same
tables in three launches.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flamia.documents import TOKEN_BLOCK, Documents, column_capacity

GROUP = 256  # queries that share an exponent C in the folded backward, and the unit of the gradient's launch
UNBOUNDED = 1 << 30  # a window side without bound, as an integer


@dataclass(frozen=True)
class TokenTables:
    """Where the tokens of one packed row lie, in units that a launch works on.

    Attributes:
        blocks: int32 [C / 32, 4], one row per 32 positions of a column payload: first token; tokens of the document
            here, 0 to 32; rows to write here, which past the last document are zeros; document, -1 for none.
        groups: int32 [capacity, 6], one row per 256 tokens of a document: first token; tokens of the document here;
            rows to write; document; first position in column payloads; positions to write. Rows past the last document
            cover the rest of the buffers; unused rows are zeros with document -1.
        column_starts: int32 [documents + 1], first position of each document in column payloads.
    """

    blocks: Tensor
    groups: Tensor
    column_starts: Tensor


@dataclass(frozen=True)
class WorkList:
    """Items of attention work in decreasing order of cost, ties in the order of documents and tiles.

    Attributes:
        items: int32 [capacity, 4]: document, first token of the tile within it, tokens, cost. Document -1 past the end.
        count: int32 [1], items in use.
        tile: tokens per item.
        claims: int32 [2], zeros: counters for a kernel whose CTAs claim items, which it leaves as zeros.
        total: int32 [1], costs of all items and one more for each; at most ``cost_cap`` of a single item.
    """

    items: Tensor
    count: Tensor
    tile: int
    claims: Tensor
    total: Tensor


@dataclass(frozen=True)
class WorkLists:
    """All tables of one packed row of queries and keys.

    Attributes:
        q, k: token tables of the two sides.
        forward: tiles of queries; cost: key blocks that they see.
        backward: tiles of keys; cost: query blocks that see them.
        buffer: int32, the memory that all of them are views of; None where each has its own (the twin).
    """

    q: TokenTables
    k: TokenTables
    forward: WorkList
    backward: WorkList
    buffer: Tensor | None = None


@dataclass(frozen=True)
class Tiling:
    """Sizes in tokens.

    Attributes:
        forward: queries of a forward item. backward: keys of a backward item.
        keys: a key block, the unit of a forward item's cost. queries: a query block, that of a backward item's.
    """

    forward: int = 128
    backward: int = 128
    keys: int = 128
    queries: int = 128


def item_capacity(total: int, documents: int, tile: int) -> int:
    """Most tiles that documents of ``total`` tokens can have, whatever their lengths."""
    return (total + (tile - 1) * documents) // tile


def group_capacity(total: int, documents: int) -> int:
    """Rows of ``TokenTables.groups``: document lengths are padded to 32 before they are cut into groups."""
    capacity = column_capacity(total, documents)
    return (capacity + (GROUP - TOKEN_BLOCK) * (documents + 1)) // GROUP


def head_section(tokens: int, heads: int, bytes_per_token: int, cache: int) -> int:
    """Heads to work on at a time so that what they share stays in an L2 cache of ``cache`` bytes.

    tokens: of the operands that a section rereads; bytes_per_token: of one head. The largest divisor of ``heads`` that
    fits, at least 1. Position p of a list of n items and this section s stands for head
    ``p // (n * s) * s + p % s`` and item ``p % (n * s) // s``, but for a ``last_section``.
    """
    fitting = max(1, cache // max(1, tokens * bytes_per_token))
    return max(s for s in range(1, heads + 1) if heads % s == 0 and s <= fitting)


# Two functions of integers, in Python and in kernels: no branches, and no value above 32 bits.


def last_section(section: Any, heads: Any, ctas: Any, longest: Any, total: Any) -> Any:
    """Heads of the last section, where the earlier ones have ``section`` each and CTAs claim items, longest first.

    Every section begins with long items. Those of the last one are the last long items of all: where they take longer
    than all that is left for the other CTAs, these wait. So the last section is as many sections in one as give each
    CTA half as much again as the longest item, or all heads. The earlier ones stay as small as the cache wants them:
    what one leaves uneven, the next one fills.

    heads: a multiple of section. longest: cost of the first item, and one more. total: of ``WorkList``.
    """
    needed = 3 * ctas * longest // 2 // (total + 1) + 1
    before = (heads - needed) // section * section
    return heads - before * (before > 0)


def number_at(at: Any, count: Any, heads: Any, section: Any, last: Any) -> Any:
    """What stands at position ``at`` of a walk through ``count`` items of ``heads`` heads: item * heads + head.

    Heads in sections of ``section``, at last one of ``last``; within a section, items in order, and of each item all
    heads. heads - last: a multiple of section. Positions past the end stand for numbers past the end.
    """
    start = heads - last
    late = 1 * (at >= start * count)
    first = at // (count * section) * section * (1 - late) + start * late
    width = section + (last - section) * late
    rest = at - first * count
    item = rest // width
    return item * heads + first + rest - item * width


def cost_cap(capacity: int) -> int:
    """What an item of a list of ``capacity`` items counts at most in its ``total``: 32 bits hold the sum.

    None costs as much in rows of up to half a million tokens. A total cut short asks for a longer last section.
    """
    return (1 << 30) // max(1, capacity)


# ------------------------------------------------------------------------------------------------------- twins


def _starts(lengths: Tensor, unit: int) -> Tensor:
    # exclusive running count of units, int64 [documents + 1]
    counts = (lengths + unit - 1) // unit
    return torch.cat((counts.new_zeros(1), counts.cumsum(0)))


def _owner(starts: Tensor, index: Tensor) -> Tensor:
    # the document whose units hold each index; documents without units are skipped
    return torch.searchsorted(starts, index, right=True) - 1


def token_tables(cu_seqlens: Tensor, total: int) -> TokenTables:
    """Twin of the device's tables. cu_seqlens: int32 [documents + 1]; total: tokens of the buffer."""
    documents = cu_seqlens.shape[0] - 1
    cu = cu_seqlens.to(torch.int64)
    lengths = cu.diff()
    capacity = column_capacity(total, documents)

    starts = _starts(lengths, TOKEN_BLOCK)
    index = torch.arange(capacity // TOKEN_BLOCK, device=cu.device)
    owner = _owner(starts, index)
    offset = (index - starts[owner]) * TOKEN_BLOCK
    real = owner < documents
    token = cu[owner] + offset  # cu[documents] is the end of the last document
    valid = torch.where(real, (_length_of(lengths, owner) - offset).clamp(0, TOKEN_BLOCK), 0)
    rows = torch.where(real, valid, (total - token).clamp(0, TOKEN_BLOCK))
    token = torch.where(rows > 0, token, 0)
    blocks = torch.stack((token, valid, rows, torch.where(real, owner, -1)), 1).to(torch.int32)

    group_starts = _starts(lengths, GROUP)
    index = torch.arange(group_capacity(total, documents), device=cu.device)
    owner = _owner(group_starts, index)
    offset = (index - group_starts[owner]) * GROUP
    real = owner < documents
    token, column = cu[owner] + offset, starts[owner] * TOKEN_BLOCK + offset
    valid = torch.where(real, (_length_of(lengths, owner) - offset).clamp(0, GROUP), 0)
    rows = torch.where(real, valid, (total - token).clamp(0, GROUP))
    padded = (valid + TOKEN_BLOCK - 1) // TOKEN_BLOCK * TOKEN_BLOCK
    width = torch.where(real, padded, (capacity - column).clamp(0, GROUP))
    used = width > 0
    columns = [token * (rows > 0), valid, rows, torch.where(real, owner, -1), column * used, width]
    groups = torch.stack(columns, 1).to(torch.int32)
    return TokenTables(blocks, groups, (starts * TOKEN_BLOCK).to(torch.int32))


def _length_of(lengths: Tensor, owner: Tensor) -> Tensor:
    # 0 for the owner past the last
    return torch.cat((lengths, lengths.new_zeros(1)))[owner]


def _seen_blocks(first: Tensor, last: Tensor, block: int) -> Tensor:
    # blocks that hold tokens first ... last of a document
    return torch.where(last < first, 0, last // block - first // block + 1)


def _work_list(own: Tensor, other: Tensor, total: int, tile: int, block: int, before: int, after: int) -> WorkList:
    # Tiles of ``own`` tokens; token i sees tokens i + shift - before ... i + shift + after of ``other``.
    documents = own.shape[0] - 1
    lengths, others = own.to(torch.int64).diff(), other.to(torch.int64).diff()
    starts = _starts(lengths, tile)
    index = torch.arange(item_capacity(total, documents, tile), device=own.device)
    owner = _owner(starts, index)
    real = owner < documents
    length, seen = _length_of(lengths, owner), _length_of(others, owner)
    begin = (index - starts[owner]) * tile
    size = (length - begin).clamp(0, tile)
    shift = seen - length
    first = (begin + shift - before).clamp(min=0)
    last = torch.minimum(begin + size - 1 + shift + after, seen - 1)
    cost = _seen_blocks(first, last, block)
    order = torch.sort(torch.where(real, -cost, 1), stable=True).indices
    table = torch.stack((owner, begin, size, cost), 1)
    table = torch.where(real.unsqueeze(1), table, table.new_tensor([-1, 0, 0, 0]))
    claims = torch.zeros(2, dtype=torch.int32, device=own.device)
    counted = torch.where(real, cost + 1, 0).clamp(max=cost_cap(index.shape[0]))
    total_cost = counted.sum(0, keepdim=True).to(torch.int32)
    return WorkList(table[order].to(torch.int32), starts[-1:].to(torch.int32), tile, claims, total_cost)


def work_lists(documents: Documents, left: int | None, right: int | None, tiling: Tiling | None = None) -> WorkLists:
    """Twin of the device's lists. left, right: keys seen beside the bottom-right aligned diagonal, None unbounded."""
    tiling = tiling or Tiling()
    before = UNBOUNDED if left is None else left
    after = UNBOUNDED if right is None else right
    cu_q, cu_k = documents.cu_seqlens_q, documents.cu_seqlens_k
    return WorkLists(
        token_tables(cu_q, documents.total_q),
        token_tables(cu_k, documents.total_k),
        _work_list(cu_q, cu_k, documents.total_q, tiling.forward, tiling.keys, before, after),
        # A key sees the queries that see it: the window's sides change places.
        _work_list(cu_k, cu_q, documents.total_k, tiling.backward, tiling.queries, after, before),
    )
