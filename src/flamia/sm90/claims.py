"""Which items a CTA works on: its own position first, then whatever comes next in the walk, claimed by a counter.

Sections of heads each begin with long items. Dealt out in turns, the longest share of documents of a few thousand
tokens is a quarter longer than the mean; claimed in order, longest first, all end together, if the last section has
enough heads (``worklists.last_section``). One producer warp claims positions and posts what stands there, numbers
item * heads + head, up to ``BOARDS`` ahead; the other warps take them, and need not know about sections.
"""

from typing import Any, NamedTuple

import cutlass.cute as cute
from cutlass import Int32, Int64

from flamia.worklists import last_section, number_at

BOARDS = 2


class Board(NamedTuple):
    """Shared memory for claimed items.

    Attributes:
        posted, taken: mbarriers [BOARDS]. numbers: int32 [BOARDS].
        last: int32 [1], heads of the last section: the warp that claims has no register for it.
    """

    posted: Any
    taken: Any
    numbers: Any
    last: Any


@cute.struct
class BoardStorage:
    """What a ``Board`` needs."""

    posted: cute.struct.MemRange[Int64, BOARDS]
    taken: cute.struct.MemRange[Int64, BOARDS]
    numbers: cute.struct.MemRange[Int32, BOARDS]
    last: cute.struct.MemRange[Int32, 1]


def board_in(storage: Any) -> Board:
    """The board in a ``BoardStorage``."""
    numbers, last = (
        cute.make_tensor(x.data_ptr(), cute.make_layout(n)) for x, n in ((storage.numbers, BOARDS), (storage.last, 1))
    )
    return Board(storage.posted.data_ptr(), storage.taken.data_ptr(), numbers, last)


def init_board(board: Board, takers: int) -> None:
    """One thread's work. takers: warps that ``take``."""
    for slot in range(BOARDS):
        cute.arch.mbarrier_init(board.posted + slot, 1)
        cute.arch.mbarrier_init(board.taken + slot, takers)


@cute.jit
def post(board: Board, n: Int32, at: Int32) -> None:
    """Post number ``at`` as this CTA's n-th. A warp's work."""
    slot = n % BOARDS
    cute.arch.mbarrier_wait(board.taken + slot, (n // BOARDS + 1) & 1)
    if cute.arch.lane_idx() == 0:
        board.numbers[slot] = at
        cute.arch.mbarrier_arrive(board.posted + slot)


@cute.jit
def take(board: Board, n: Int32) -> Int32:
    """This CTA's n-th number, past the list's end if there is none. A warp's work."""
    slot = n % BOARDS
    cute.arch.mbarrier_wait(board.posted + slot, (n // BOARDS) & 1)
    at = cute.arch.make_warp_uniform(board.numbers[slot])
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive(board.taken + slot)
    return at


@cute.jit
def plan_sections(board: Board, tables: Any, heads: Int32, section: Int32) -> None:
    """Before the first ``number_of``, by the warp that claims. tables: fields of a ``worklists.WorkList``."""
    ctas, longest = cute.arch.grid_dim()[0], tables.items[0, 3] + 1
    board.last[0] = last_section(section, heads, ctas, longest, tables.total[0])


def number_of(at: Int32, board: Board, tables: Any, heads: Int32, section: Int32) -> Int32:
    """What stands at a position of the walk, as item * heads + head."""
    return number_at(at, tables.count[0], heads, section, board.last[0])


@cute.jit
def claim(claims: cute.Tensor) -> Int32:
    """The next position that no CTA works on. A warp's work. claims: ``worklists.WorkList.claims``."""
    taken = Int32(0)
    if cute.arch.lane_idx() == 0:
        taken = cute.arch.atomic_add(claims.iterator, Int32(1))
    return cute.arch.grid_dim()[0] + cute.arch.shuffle_sync(taken, 0)


@cute.jit
def leave(claims: cute.Tensor) -> None:
    """After this CTA's last claim. The last CTA to leave puts the counters back to zero, for another launch."""
    if cute.arch.lane_idx() == 0:
        gone = cute.arch.atomic_add(claims.iterator + 1, Int32(1))
        if gone == cute.arch.grid_dim()[0] - 1:
            claims[0], claims[1] = Int32(0), Int32(0)
