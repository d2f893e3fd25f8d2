"""Document boundaries: what is refused, which documents look alike, and where they start in column payloads."""

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flamia.documents import TOKEN_BLOCK, Documents, Group, column_capacity, column_starts


def offsets(lengths):
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


def documents(lengths_q, lengths_k=None, tail=0):
    lengths_k = lengths_q if lengths_k is None else lengths_k
    return Documents(offsets(lengths_q), offsets(lengths_k), sum(lengths_q) + tail, sum(lengths_k) + tail)


def raw(q, k=(0, 4), total_q=4, total_k=4):
    return Documents(torch.tensor(q, dtype=torch.int32), torch.tensor(k, dtype=torch.int32), total_q, total_k)


LENGTHS = st.lists(st.integers(0, 130), min_size=0, max_size=9)


@given(LENGTHS, st.integers(0, 40))
def test_host_offsets_and_count(lengths, tail):
    d = documents(lengths, lengths[::-1], tail)
    q, k = d.host_offsets()
    assert d.count == len(lengths)
    assert q == [sum(lengths[:i]) for i in range(len(lengths) + 1)]
    assert k == [sum(lengths[::-1][:i]) for i in range(len(lengths) + 1)]


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (raw([1, 4]), r"cu_seqlens_q\[0\] is 1: offsets must start at 0"),
        (raw([-1, 4]), r"cu_seqlens_q\[0\] is -1"),
        (raw([0, 3, 2, 4], [0, 1, 2, 3]), r"cu_seqlens_q\[2\] = 2 is below cu_seqlens_q\[1\] = 3: .*not decrease"),
        (raw([0, 5]), r"cu_seqlens_q\[-1\] is 5, past the 4 tokens of its buffer"),
        (raw([0, 4], [2, 4]), r"cu_seqlens_k\[0\] is 2: offsets must start at 0"),
        (raw([0, 4, 4], [0, 4, 3]), r"cu_seqlens_k\[2\] = 3 is below cu_seqlens_k\[1\] = 4"),
        (raw([0, 4], [0, 9]), r"cu_seqlens_k\[-1\] is 9, past the 4 tokens"),
        (raw([0, -1]), r"cu_seqlens_q\[1\] = -1 is below"),
    ],
    ids=["q-start", "q-negative", "q-decreases", "q-past", "k-start", "k-decreases", "k-past", "q-below-0"],
)
def test_bad_offsets_are_named(bad, message):
    for check in (bad.host_offsets, bad.groups, lambda: bad.check_host(-1, -1)):
        with pytest.raises(ValueError, match=message):
            check()


@pytest.mark.parametrize(
    ("q", "k", "message"),
    [
        (6, 9, r"max_seqlen_q=6 is below the longest document, 7 tokens"),
        (7, 8, r"max_seqlen_k=8 is below the longest document, 9 tokens"),
        (0, -1, r"max_seqlen_q=0"),
        (-1, 0, r"max_seqlen_k=0"),
    ],
)
def test_stated_maxima_below_the_longest_are_refused(q, k, message):
    with pytest.raises(ValueError, match=message):
        documents([3, 7, 0], [9, 1, 2]).check_host(q, k)


@pytest.mark.parametrize(("q", "k"), [(7, 9), (100, 9), (-1, -1), (-1, 9), (7, -1)])
def test_stated_maxima_that_hold_are_accepted(q, k):
    assert documents([3, 7, 0], [9, 1, 2]).check_host(q, k) is None


def test_no_documents_need_no_maximum():
    assert documents([]).check_host(0, 0) is None


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 2)), max_size=12))
def test_groups_hold_every_document_once_by_its_lengths(pairs):
    d = documents([a for a, _ in pairs], [b for _, b in pairs], tail=5)
    groups = d.groups()
    q, k = d.host_offsets()
    assert len({(g.len_q, g.len_k) for g in groups}) == len(groups), "one group for each pair of lengths"
    assert sorted(i for g in groups for i in g.index) == list(range(len(pairs)))
    for g in groups:
        assert list(g.index) == sorted(g.index)
        for i, start_q, start_k in zip(g.index, g.starts_q, g.starts_k, strict=True):
            assert pairs[i] == (g.len_q, g.len_k)
            assert (start_q, start_k) == (q[i], k[i])


@pytest.mark.parametrize("size", [1, 2, 3, 5, 9])
def test_split_keeps_order_and_members(size):
    group = Group((0, 2, 3, 5, 8), (0, 20, 30, 50, 80), (1, 21, 31, 51, 81), 10, 7)
    parts = list(group.split(size))
    assert all(0 < len(p.index) <= size for p in parts)
    assert len(parts) == -(-5 // size)
    for name in ("index", "starts_q", "starts_k"):
        assert sum((getattr(p, name) for p in parts), ()) == getattr(group, name)
    assert {(p.len_q, p.len_k) for p in parts} == {(10, 7)}


@given(LENGTHS)
def test_column_starts_pad_each_document(lengths):
    starts = column_starts(offsets(lengths))
    assert starts.dtype == torch.int64
    expected, at = [], 0
    for n in lengths:
        expected.append(at)
        at += -(-n // 32) * 32
    assert starts.tolist() == [*expected, at]


@given(LENGTHS, st.integers(0, 70))
def test_column_capacity_holds_any_lengths(lengths, tail):
    total = sum(lengths) + tail
    capacity = column_capacity(total, len(lengths))
    assert capacity % TOKEN_BLOCK == 0
    assert capacity >= column_starts(offsets(lengths))[-1].item()
    # no more than the worst case rounded up: one token in the last block of every document
    assert capacity < total + 31 * len(lengths) + TOKEN_BLOCK


@pytest.mark.parametrize("count", [1, 2, 7, 100])
def test_column_capacity_is_reached_by_one_token_documents(count):
    assert column_capacity(count, count) == column_starts(offsets([1] * count))[-1].item() == 32 * count


def test_offsets_past_2_to_31_do_not_wrap_in_columns():
    for cu, starts in (([0, 2**30, 2**31 - 1], [0, 2**30, 2**31]), ([0, 2**31 - 1], [0, 2**31])):
        assert column_starts(torch.tensor(cu, dtype=torch.int32)).tolist() == starts


def test_documents_and_groups_are_immutable():
    with pytest.raises(dataclasses.FrozenInstanceError):
        documents([1]).total_q = 3
    with pytest.raises(dataclasses.FrozenInstanceError):
        Group((0,), (0,), (0,), 1, 1).len_q = 2
