"""Which items a CTA works on: its own position first, then whatever comes next in the walk, claimed by a counter.

Sections of heads each begin with long items. Dealt out in turns, the longest share of documents of a few thousand
tokens is a quarter longer than the mean; claimed in order, longest first, all end together, if the last section has
enough heads (``worklists.last_section``). One producer warp claims positions and posts what stands there, with every
number that the other warps need to begin, so that none of them waits for a chain of loads between two items. It claims
when the loads of the item before are under way: an item earlier, and short items would be waiting behind a long one.
"""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr

from flamia.worklists import last_section, number_at

BOARDS = 2
BLOCKS = 16  # words before those of an item's four blocks of 32 rows: whether there is an item, and its fields


class Board(NamedTuple):
    """Shared memory for claimed items.

    Attributes:
        posted, taken: mbarriers [BOARDS]. asked: mbarrier [1]. words: int32 [BLOCKS + 4, BOARDS].
        last: int32 [1], heads of the last section: the warp that claims has no register for it.
    """

    posted: Any
    taken: Any
    asked: Any
    words: Any
    last: Any


@cute.struct
class BoardStorage:
    """What a ``Board`` needs."""

    posted: cute.struct.MemRange[Int64, BOARDS]
    taken: cute.struct.MemRange[Int64, BOARDS]
    asked: cute.struct.MemRange[Int64, 1]
    last: cute.struct.MemRange[Int32, 1]
    words: cute.struct.Align[cute.struct.MemRange[Int32, (BLOCKS + 4) * BOARDS], 16]


def board_in(storage: Any) -> Board:
    """The board in a ``BoardStorage``."""
    words = cute.make_tensor(storage.words.data_ptr(), cute.make_layout((BLOCKS + 4, BOARDS)))
    last = cute.make_tensor(storage.last.data_ptr(), cute.make_layout(1))
    return Board(storage.posted.data_ptr(), storage.taken.data_ptr(), storage.asked.data_ptr(), words, last)


def init_board(board: Board, takers: int) -> None:
    """One thread's work. takers: warps that ``take``."""
    for slot in range(BOARDS):
        cute.arch.mbarrier_init(board.posted + slot, 1)
        cute.arch.mbarrier_init(board.taken + slot, takers)
    cute.arch.mbarrier_init(board.asked, 1)


@cute.jit
def claim_items(
    board: Board, limit: Int32, heads: Int32, section: Int32, tables: Any, describe: cutlass.Constexpr
) -> None:
    """Claim and post items until there are none. A warp's work.

    limit: count * heads. tables: with the fields of a ``worklists.WorkList``. describe: a function of item * heads +
    head to the item, a tuple of at most ``BLOCKS`` - 1 Int32, and, of lanes 0 to 3, the word of their block.
    """
    ctas, longest = cute.arch.grid_dim()[0], tables.items[0, 3] + 1
    board.last[0] = last_section(section, heads, ctas, longest, tables.total[0])
    at, n = cute.arch.block_idx()[0], Int32(0)
    while at < limit:
        item, word = describe(number_at(at, tables.count[0], heads, section, board.last[0]))
        _post(board, n, item, word)
        cute.arch.mbarrier_wait(board.asked, n & 1)
        n += 1
        taken = Int32(0)
        if cute.arch.lane_idx() == 0:
            taken = cute.arch.atomic_add(tables.claims.iterator, Int32(1))
        at = cute.arch.make_warp_uniform(ctas + cute.arch.shuffle_sync(taken, 0))
    _post(board, n, (), Int32(0))
    # The last CTA to leave puts the counters back to zero, for another launch.
    if cute.arch.lane_idx() == 0:
        gone = cute.arch.atomic_add(tables.claims.iterator + 1, Int32(1))
        if gone == ctas - 1:
            tables.claims[0], tables.claims[1] = Int32(0), Int32(0)


@cute.jit
def _post(board: Board, n: Int32, item: Any, word: Int32) -> None:
    # This CTA's n-th item, () if there is none.
    slot, lane = n % BOARDS, cute.arch.lane_idx()
    cute.arch.mbarrier_wait(board.taken + slot, (n // BOARDS + 1) & 1)
    if lane < 4:
        board.words[BLOCKS + lane, slot] = word
    if lane == 0:
        board.words[0, slot] = Int32(1 if const_expr(len(item) > 0) else 0)
        for i in cutlass.range_constexpr(len(item)):
            board.words[1 + i, slot] = item[i]
    cute.arch.sync_warp()
    if lane == 0:
        cute.arch.mbarrier_arrive(board.posted + slot)


@cute.jit
def posted(board: Board, n: Int32) -> Any:
    """Whether this CTA has an n-th item. A warp's work; ``take`` must follow if it has."""
    slot = n % BOARDS
    cute.arch.mbarrier_wait(board.posted + slot, (n // BOARDS) & 1)
    return cute.arch.make_warp_uniform(board.words[0, slot]) != 0


@cute.jit
def take(board: Board, n: Int32, count: cutlass.Constexpr, block: Int32) -> Any:
    """The ``count`` fields of this CTA's n-th item, and the word of one of its blocks. A warp's work."""
    slot = n % BOARDS
    fields = [cute.arch.make_warp_uniform(board.words[1 + i, slot]) for i in range(count)]
    word = cute.arch.make_warp_uniform(board.words[BLOCKS + block, slot])
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive(board.taken + slot)
    return fields, word


@cute.jit
def ask(board: Board) -> None:
    """For the item after the one that was taken. The work of one of the warps that take."""
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive(board.asked)
