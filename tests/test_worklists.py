"""Work lists: the twin against a plain enumeration, and the device's tables against the twin."""

import heapq
import itertools
import os
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before the kernels are defined

from flamia.benchmarks.workloads import packed_workloads
from flamia.documents import Documents, column_capacity
from flamia.worklists import (
    GROUP,
    Tiling,
    cost_cap,
    group_capacity,
    head_section,
    item_capacity,
    last_section,
    number_at,
    work_lists,
)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def offsets(lengths):
    return torch.tensor([0, *lengths], dtype=torch.int64).cumsum(0).to(torch.int32).to(DEVICE)


lengths = st.lists(st.one_of(st.integers(0, 3), st.integers(0, 300)), min_size=0, max_size=7)


@st.composite
def packings(draw):
    """Documents, a window and a tiling; query and key lengths may differ, and tokens may follow the last document."""
    q = draw(lengths)
    k = q if draw(st.booleans()) else [draw(st.integers(0, 300)) for _ in q]
    tail = draw(st.sampled_from([0, 1, 40]))
    left = draw(st.sampled_from([None, 0, 5, 200]))
    right = draw(st.sampled_from([None, 0, 0, 7]))
    tiling = draw(st.sampled_from([Tiling(), Tiling(256, 128, 128, 64), Tiling(64, 64, 32, 32)]))
    return Documents(offsets(q), offsets(k), sum(q) + tail, sum(k) + 2 * tail), left, right, tiling


def enumerate_items(own, other, tile, block, sees):
    """(document, first token, tokens, cost) of every tile, sorted as the list promises."""
    items = []
    for document, (n, m) in enumerate(zip(own, other, strict=True)):
        for begin in range(0, n, tile):
            size = min(tile, n - begin)
            blocks = {j // block for i in range(begin, begin + size) for j in range(m) if sees(i, j, n, m)}
            cost = max(blocks) - min(blocks) + 1 if blocks else 0
            items.append((document, begin, size, cost))
    return sorted(items, key=lambda item: -item[3])


@given(packings())
def test_twin_lists_every_tile_by_cost(packing):
    documents, left, right, tiling = packing
    small = Documents(documents.cu_seqlens_q, documents.cu_seqlens_k, documents.total_q, documents.total_k)
    q, k = (cu.diff().tolist() for cu in (small.cu_seqlens_q, small.cu_seqlens_k))
    lists = work_lists(small, left, right, tiling)

    def sees(i, j, n, m):
        near = left is None or j >= i + m - n - left
        return near and (right is None or j <= i + m - n + right)

    for work, expected in (
        (lists.forward, enumerate_items(q, k, tiling.forward, tiling.keys, sees)),
        (lists.backward, enumerate_items(k, q, tiling.backward, tiling.queries, lambda i, j, n, m: sees(j, i, m, n))),
    ):
        count = int(work.count)
        assert [tuple(row) for row in work.items[:count].tolist()] == expected
        assert (work.items[count:, 0] == -1).all()
        assert int(work.total) == sum(item[3] + 1 for item in expected)


@given(packings())
def test_twin_tables_cover_every_token_and_column_once(packing):
    documents = packing[0]
    lists = work_lists(*packing)
    for tables, cu, total in (
        (lists.q, documents.cu_seqlens_q, documents.total_q),
        (lists.k, documents.cu_seqlens_k, documents.total_k),
    ):
        capacity = column_capacity(total, documents.count)
        for table, unit in ((tables.blocks, 32), (tables.groups, GROUP)):
            written, owner = [0] * total, [-1] * total
            for token, valid, rows, document, *_ in table.tolist():
                assert 0 <= valid <= rows <= unit
                for t in range(token, token + rows):
                    written[t] += 1
                    owner[t] = document if t < token + valid else -1
            assert written == [1] * total
            for document, (a, b) in enumerate(zip(cu.tolist(), cu.tolist()[1:], strict=False)):
                assert owner[a:b] == [document] * (b - a)
            assert owner[int(cu[-1]) :] == [-1] * (total - int(cu[-1]))
        assert len(tables.blocks) * 32 == capacity
        columns = [0] * capacity
        for token, valid, _, document, column, width in tables.groups.tolist():
            for c in range(column, column + width):
                columns[c] += 1
            if valid:
                assert column == tables.column_starts[document] + token - cu[document]
        assert columns == [1] * capacity


def same(a, b):
    for field in ("q", "k"):
        for name in ("blocks", "groups", "column_starts"):
            assert torch.equal(getattr(getattr(a, field), name), getattr(getattr(b, field), name)), (field, name)
    for field in ("forward", "backward"):
        assert torch.equal(getattr(a, field).items, getattr(b, field).items), field
        assert torch.equal(getattr(a, field).count, getattr(b, field).count), field
        assert torch.equal(getattr(a, field).total, getattr(b, field).total), field
        assert not getattr(a, field).claims.any()


@settings(max_examples=30)
@given(packings())
def test_device_lists_are_the_twins(packing):
    from flamia.quantize import lists as device_lists

    lists = device_lists.work_lists(*packing)
    same(lists, work_lists(*packing))
    documents, _, _, tiling = packing
    words = device_lists.list_words(documents.total_q, documents.total_k, documents.count, tiling)
    assert lists.buffer.shape == (words,)
    same(device_lists.lists_in(lists.buffer.clone(), documents, tiling), lists)


@settings(max_examples=5)
@given(packings())
def test_very_many_items_are_sorted(packing):
    from flamia.quantize import lists as device_lists

    with mock.patch.object(device_lists, "_PLACED", 0):
        same(device_lists.work_lists(*packing), work_lists(*packing))


def test_device_lists_of_many_documents():
    """More documents than one step of the running sum, and keys that need 64 bits with long costs."""
    from flamia.quantize import lists as device_lists

    generator = torch.Generator().manual_seed(0)
    cu = offsets(torch.randint(0, 4, (2100,), generator=generator).tolist())
    documents = Documents(cu, cu, int(cu[-1]), int(cu[-1]))
    same(device_lists.work_lists(documents, None, 0), work_lists(documents, None, 0))


def test_costs_that_need_wide_keys():
    from flamia.quantize import lists as device_lists

    cu_q, cu_k = offsets([40, 70000]), offsets([3, 1 << 20])
    documents = Documents(cu_q, cu_k, 70040, (1 << 20) + 3)
    tiling = Tiling(forward=64, backward=1 << 20, keys=1, queries=1 << 20)
    device, twin = (f(documents, None, 0, tiling).forward for f in (device_lists.work_lists, work_lists))
    assert torch.equal(device.items, twin.items)
    # Costs to a million, of more than a thousand items: each counts in part, so that 32 bits hold the sum.
    used = twin.items[: int(twin.count), 3] + 1
    counted = used.clamp(max=cost_cap(twin.items.shape[0])).sum()
    assert device.total.item() == twin.total.item() == counted < used.sum()


def test_capacities_depend_on_totals_only():
    for total in (0, 1, 31, 1000):
        for documents in (1, 2, 50):
            worst = [1] * min(documents - 1, total)
            worst += [total - len(worst)] + [0] * (documents - len(worst) - 1)
            for unit, capacity in (
                (128, item_capacity(total, documents, 128)),
                (64, item_capacity(total, documents, 64)),
            ):
                assert sum(-(-n // unit) for n in worst) <= capacity
            columns = column_capacity(total, documents)
            used = [-(-n // 32) * 32 for n in worst]
            groups = sum(-(-n // GROUP) for n in used) + -(-(columns - sum(used)) // GROUP)
            assert groups <= group_capacity(total, documents)


@pytest.mark.parametrize(("cache", "expected"), [(0, 1), (10 * 100 * 256, 8), (10**9, 24), (3 * 100 * 256, 3)])
def test_head_sections_divide_the_heads(cache, expected):
    assert head_section(100, 24, 256, cache) == expected


@given(st.integers(1, 9), st.integers(1, 12), st.integers(1, 5), st.integers(1, 5))
def test_a_walk_takes_sections_of_heads_and_items_in_order(count, last, section, sections):
    """Every item of every head once, whatever the sections; behind them, numbers past the end."""
    heads = sections * section + last
    bounds = [*range(0, heads - last + 1, section), heads]
    expected = [
        item * heads + head
        for first, stop in itertools.pairwise(bounds)
        for item in range(count)
        for head in range(first, stop)
    ]
    assert sorted(expected) == list(range(count * heads))
    assert [number_at(at, count, heads, section, last) for at in range(count * heads)] == expected
    assert all(number_at(at, count, heads, section, last) >= count * heads for at in range(count * heads, 999))


@given(
    st.integers(1, 16),
    st.integers(1, 8),
    st.integers(1, 200),
    st.integers(1, 1 << 14),
    st.one_of(st.integers(0, 1 << 12), st.integers(0, 1 << 30)),
)
def test_the_last_section_outlasts_the_longest_item(sections, section, ctas, longest, more):
    heads, total = sections * section, longest + more
    last = last_section(section, heads, ctas, longest, total)
    assert section <= last <= heads
    assert (heads - last) % section == 0
    # For each CTA, half as much again as the longest item; a section less would not do.
    wanted = 3 * ctas * longest // 2
    assert last == heads or last * (total + 1) > wanted
    assert (last - section) * (total + 1) <= wanted


def test_a_list_without_items_has_a_last_section():
    assert last_section(2, 16, 132, 1, 0) == 16


def claimed(costs, heads, section, last, ctas=132):
    """When the last of ``ctas`` is done that claim items one by one, as long as they cost and one more."""
    free = [0] * ctas
    for at in range(len(costs) * heads):
        heapq.heapreplace(free, free[0] + costs[number_at(at, len(costs), heads, section, last) // heads] + 1)
    return max(free)


@pytest.mark.parametrize("right", [0, None], ids=["causal", "full"])
@pytest.mark.parametrize("row", packed_workloads(), ids=lambda row: row.name)
def test_claimed_sections_end_together(row, right):
    """Rows of the benchmarks: CTAs end as if all heads were one section, and hardly later than the mean."""
    cu = offsets(row.lengths).cpu()
    documents = Documents(cu, cu, row.tokens, row.tokens)
    lists = work_lists(documents, None, right)
    for work in (lists.forward, lists.backward):
        costs = work.items[: int(work.count), 3].tolist()
        for heads in (4, 16):
            whole, mean = claimed(costs, heads, heads, heads), int(work.total) * heads / 132
            for section in (1, 2):
                end = claimed(costs, heads, section, last_section(section, heads, 132, costs[0] + 1, int(work.total)))
                assert end <= 1.02 * whole
                assert end <= 1.06 * mean, (heads, section)


def test_equal_items_keep_small_sections():
    cu = offsets([8192] * 8).cpu()
    work = work_lists(Documents(cu, cu, 1 << 16, 1 << 16), None, 0).forward
    assert last_section(1, 16, 132, int(work.items[0, 3]) + 1, int(work.total)) == 1
