"""Masks and runs of tiles against a mask written out: every visible pair in exactly one run, nothing mislabelled."""

import itertools

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from flamia.reference.geometry import BLOCK, TILE, Geometry, Run, padded_length

CPU = torch.device("cpu")
EXAMPLES = settings(max_examples=60)
# Lengths around the sizes at which something changes: a block, a tile, several tiles.
EDGES = [1, 2, 31, 32, 33, 63, 64, 65, 96, 127, 128, 129, 160, 255, 256, 257, 384, 400]
LENGTHS = st.one_of(st.integers(1, 420), st.sampled_from(EDGES))
SIDES = st.one_of(st.none(), st.sampled_from([0, 1, 31, 32, 127, 128, 129]), st.integers(0, 500))
GEOMETRIES = st.builds(Geometry, LENGTHS, LENGTHS, SIDES, SIDES)
CAUSAL = [
    Geometry(1, 1, None, 0),
    Geometry(400, 400, None, 0),
    Geometry(256, 3, None, 0),  # most rows see no key
    Geometry(3, 256, None, 0),
    Geometry(129, 385, 0, 0),  # one key a row
    Geometry(300, 20, 5, None),  # an open right side, and rows whose window lies before the first key
    Geometry(40, 400, 7, 3),
    Geometry(400, 40, None, None),
]


def mask(g: Geometry) -> torch.Tensor:
    """bool [len_q, len_k], written row by row from the definition in FlashAttention's documentation."""
    see = torch.zeros(g.len_q, g.len_k, dtype=torch.bool)
    for i in range(g.len_q):
        centre = i + g.len_k - g.len_q  # bottom right aligned: the last query sits on the last key
        first = 0 if g.left is None else max(0, centre - g.left)
        stop = g.len_k if g.right is None else max(0, centre + g.right + 1)
        see[i, first:stop] = True
    return see


def padded_mask(g: Geometry) -> torch.Tensor:
    """``mask`` padded with False to whole blocks, as chunks hold their operands."""
    see = torch.zeros(padded_length(g.len_q), padded_length(g.len_k), dtype=torch.bool)
    see[: g.len_q, : g.len_k] = mask(g)
    return see


def tiles_of(length: int) -> list[tuple[int, int]]:
    end = padded_length(length)
    return [(a, min(a + TILE, end)) for a in range(0, end, TILE)]


def check_runs(g: Geometry, runs: list[Run], block: torch.Tensor, most: int, rows_are_queries: bool, start: int):
    """``block``: the padded mask of one tile of queries [m, all keys], or of one tile of keys [all queries, w]."""
    axis = 1 if rows_are_queries else 0
    end = block.shape[axis]
    covered = torch.zeros(end, dtype=torch.int64)
    for run in runs:
        assert 0 <= run.start < run.stop <= end
        assert run.start % TILE == 0
        assert run.stop % TILE == 0 or run.stop == end
        covered[run.start : run.stop] += 1
        part = block.narrow(axis, run.start, run.stop - run.start)
        assert 1 <= run.tiles <= max(1, most)
        if run.visible is None:
            assert part.all(), "a run without a mask holds an invisible or padded pair"
            # What is split into tiles must be whole tiles, or a single one.
            assert run.tiles == 1 or (run.stop - run.start) == run.tiles * TILE
        else:
            assert run.tiles == 1
            assert run.stop - run.start <= TILE
            assert torch.equal(run.visible, part)
            assert not part.all(), "a mask that hides nothing costs time and makes results depend on the path"
        for t in range(run.tiles):
            a = run.start + t * TILE
            b = min(a + TILE, run.stop)
            queries, keys = (start, (a, b)) if rows_are_queries else (a, (start, start + block.shape[1]))
            # The first query sees the fewest later keys.
            reach = None if g.right is None else queries + g.len_k - g.len_q + g.right
            later = reach is not None and min(keys[1], g.len_k) - 1 > reach
            assert run.diagonal == later
    assert int(covered.amax()) <= 1, "a pair is in two runs"
    seen = block.any(1 - axis)
    assert (covered[seen] == 1).all(), "a visible pair is in no run"
    assert [r.start for r in runs] == sorted(r.start for r in runs)
    for a, b in itertools.pairwise(runs):
        assert a.stop == b.start, "what a tile sees is one interval"
        whole = a.visible is None and b.visible is None and (b.stop - b.start) % TILE == 0
        if whole and a.diagonal == b.diagonal:
            assert a.tiles == most, "unmasked neighbours are processed together"


@pytest.mark.parametrize(
    ("length", "expected"), [(0, 0), (1, 1), (31, 31), (32, 32), (33, 64), (64, 64), (65, 96), (127, 128), (129, 160)]
)
def test_padded_length(length: int, expected: int):
    assert padded_length(length) == expected
    assert expected <= BLOCK or expected % BLOCK == 0


@EXAMPLES
@given(GEOMETRIES, st.data())
def test_first_and_last_key(g: Geometry, data: st.DataObject):
    i = data.draw(st.integers(0, g.len_q - 1))
    keys = mask(g)[i].nonzero().flatten().tolist()
    first, last = g.first_key(i), g.last_key(i)
    assert list(range(first, last + 1)) == keys
    assert first >= 0
    assert last < g.len_k


@EXAMPLES
@given(GEOMETRIES, st.data())
def test_visible_is_the_mask_of_any_rectangle(g: Geometry, data: st.DataObject):
    whole = padded_mask(g)
    bounds = []
    for end in whole.shape:
        a = data.draw(st.integers(0, end - 1))
        bounds.append((a, data.draw(st.integers(a + 1, end))))
    (q0, q1), (k0, k1) = bounds
    expected = whole[q0:q1, k0:k1]
    visible = g.visible(q0, q1, k0, k1, CPU)
    if visible is None:
        assert expected.all()
    else:
        assert torch.equal(visible, expected)
        assert not expected.all(), "None is reserved for, and required of, rectangles that are wholly visible"


@EXAMPLES
@given(GEOMETRIES, st.sampled_from([1, 2, 64]))
@example(CAUSAL[0], 1)
@example(CAUSAL[1], 64)
@example(CAUSAL[2], 2)
@example(CAUSAL[3], 2)
@example(CAUSAL[4], 64)
@example(CAUSAL[5], 64)
@example(CAUSAL[6], 1)
@example(CAUSAL[7], 64)
def test_key_runs_cover_what_a_tile_of_queries_sees(g: Geometry, most: int):
    whole = padded_mask(g)
    for q0, q1 in tiles_of(g.len_q):
        check_runs(g, list(g.key_runs(q0, q1, most, CPU)), whole[q0:q1], most, True, q0)


@EXAMPLES
@given(GEOMETRIES, st.sampled_from([1, 2, 64]))
@example(CAUSAL[0], 1)
@example(CAUSAL[1], 64)
@example(CAUSAL[2], 2)
@example(CAUSAL[3], 2)
@example(CAUSAL[4], 64)
@example(CAUSAL[5], 64)
@example(CAUSAL[6], 1)
@example(CAUSAL[7], 64)
def test_query_runs_cover_the_queries_that_see_a_tile_of_keys(g: Geometry, most: int):
    whole = padded_mask(g)
    for k0, k1 in tiles_of(g.len_k):
        check_runs(g, list(g.query_runs(k0, k1, most, CPU)), whole[:, k0:k1], most, False, k0)


@pytest.mark.parametrize(("len_q", "first"), [(512, [0, 1, 2, 3, 0, 1]), (300, [0, 1, 2, 0, 1, 2]), (60, [0] * 6)])
def test_a_walk_around_starts_at_the_tile_of_the_keys(len_q: int, first: list[int]):
    g = Geometry(len_q, 6 * TILE, None, None)
    for n, k0 in enumerate(range(0, g.len_k, TILE)):
        straight, turned = ([*g.query_runs(k0, k0 + TILE, 64, CPU, around=around)] for around in (False, True))
        tiles, walked = ([q for run in runs for q in range(run.start, run.stop, TILE)] for runs in (straight, turned))
        assert walked == tiles[first[n] :] + tiles[: first[n]]


@EXAMPLES
@given(GEOMETRIES)
def test_both_directions_visit_the_same_tiles(g: Geometry):
    """The forward walks along keys and the backward along queries: a pair in one and not in the other is a bug."""
    whole = padded_mask(g)
    forward = {
        (q0, k)
        for q0, q1 in tiles_of(g.len_q)
        for run in g.key_runs(q0, q1, 64, CPU)
        for k in range(run.start, run.stop, TILE)
        if whole[q0:q1, k : k + TILE].any()
    }
    backward = {
        (q, k0)
        for k0, k1 in tiles_of(g.len_k)
        for run in g.query_runs(k0, k1, 64, CPU)
        for q in range(run.start, run.stop, TILE)
        if whole[q : q + TILE, k0:k1].any()
    }
    assert forward == backward


def test_full_and_far_windows_are_one_unmasked_run():
    """A window wider than the document costs nothing: it takes the path of full attention."""
    for left, right in ((None, None), (1000, None), (None, 1000), (1000, 1000)):
        runs = list(Geometry(256, 512, left, right).key_runs(0, TILE, 64, CPU))
        assert [(r.start, r.stop, r.visible, r.diagonal) for r in runs] == [(0, 512, None, False)]


def test_work_grows_with_the_window_not_with_the_length():
    g = Geometry(8192, 8192, 128, 0)
    assert max(len(list(g.key_runs(q0, q0 + TILE, 1, CPU))) for q0 in range(0, 8192, TILE)) == 2
    assert max(len(list(g.query_runs(k0, k0 + TILE, 1, CPU))) for k0 in range(0, 8192, TILE)) == 2
    causal = Geometry(8192, 8192, None, 0)
    assert sum(len(list(causal.key_runs(q0, q0 + TILE, 1, CPU))) for q0 in range(0, 8192, TILE)) == 64 * 65 // 2
