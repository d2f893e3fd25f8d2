"""Corpora and packing: nothing lost, nothing shared between training and validation, resumable."""

import itertools
import os
from collections import Counter
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import flamia
from flamia.training.data import BOS, PackedRows, load_corpus

texts = st.lists(st.binary(min_size=1, max_size=40), min_size=1, max_size=8)


def predictions(documents):
    """Every (token, target) pair that an epoch must hold."""
    pairs = Counter()
    for document in documents:
        stream = [BOS, *document, BOS]
        pairs.update(itertools.pairwise(stream))
    return pairs


@settings(max_examples=60)
@given(documents=texts, tokens=st.integers(1, 50), context=st.integers(1, 60), seed=st.integers(0, 5))
def test_an_epoch_holds_every_prediction_once(documents, tokens, context, seed):
    rows = PackedRows(documents, tokens=tokens, context=context, seed=seed)
    total = sum(len(document) + 1 for document in documents)
    assert rows.predictions == total
    seen = []
    while len(seen) < total:
        row = next(rows)
        seen += zip(row.tokens.tolist(), row.targets.tolist(), strict=True)
    assert Counter(seen[:total]) == predictions(documents)


@settings(max_examples=60)
@given(documents=texts, tokens=st.integers(1, 50), context=st.integers(1, 60))
def test_rows_are_full_and_pieces_lie_inside_one_document(documents, tokens, context):
    rows = PackedRows(documents, tokens=tokens, context=context)
    streams = [bytes(document) for document in documents]
    for _ in range(5):
        row = next(rows)
        offsets = row.cu_seqlens.tolist()
        assert row.cu_seqlens.dtype == torch.int32
        assert row.tokens.dtype == row.targets.dtype == torch.int64
        assert offsets[0] == 0
        assert offsets[-1] == row.tokens.numel() == row.targets.numel() == tokens
        for start, stop in itertools.pairwise(offsets):
            assert 1 <= stop - start <= context
            piece, target = row.tokens[start:stop].tolist(), row.targets[start:stop].tolist()
            assert piece[1:] == target[:-1]
            assert BOS not in piece[1:]
            assert any(bytes(b for b in piece if b != BOS) in stream for stream in streams)


def test_a_piece_that_does_not_fit_goes_on_in_the_next_row():
    rows = PackedRows([bytes(range(10))], tokens=4, context=100)
    pieces = [next(rows) for _ in range(3)]
    assert [row.tokens.tolist() for row in pieces[:2]] == [[BOS, 0, 1, 2], [3, 4, 5, 6]]
    assert pieces[2].tokens.tolist() == [7, 8, 9, BOS]
    assert pieces[2].cu_seqlens.tolist() == [0, 3, 4]


def test_seed_and_epoch_decide_the_order():
    documents = [bytes([i] * 5) for i in range(20)]

    def epochs(seed):
        rows = PackedRows(documents, tokens=120, context=8, seed=seed)
        return [next(rows).tokens.tolist() for _ in range(2)]

    assert epochs(1) == epochs(1)
    assert epochs(1) != epochs(2)
    first, second = epochs(1)
    assert first != second
    assert Counter(first) == Counter(second)


@settings(max_examples=25)
@given(skipped=st.integers(0, 30))
def test_a_saved_position_goes_on_with_the_same_rows(skipped):
    documents = [os.urandom(1) * n for n in range(1, 30)]
    rows = PackedRows(documents, tokens=37, context=11, seed=3)
    for _ in range(skipped):
        next(rows)
    other = PackedRows(documents, tokens=37, context=11, seed=3)
    other.load_state_dict(rows.state_dict())
    for _ in range(20):
        a, b = next(rows), next(other)
        assert torch.equal(a.tokens, b.tokens)
        assert torch.equal(a.targets, b.targets)
        assert torch.equal(a.cu_seqlens, b.cu_seqlens)


@pytest.mark.parametrize("change", [{"seed": 1}, {"tokens": 9}, {"context": 5}])
def test_a_saved_position_of_another_packing_is_refused(change):
    arguments = {"tokens": 8, "context": 4, "seed": 0}
    state = PackedRows([b"some text"], **arguments).state_dict()
    with pytest.raises(ValueError, match=next(iter(change))):
        PackedRows([b"some text"], **(arguments | change)).load_state_dict(state)


def test_a_saved_position_of_other_documents_is_refused():
    state = PackedRows([b"some text"], tokens=8, context=4).state_dict()
    with pytest.raises(ValueError, match="predictions"):
        PackedRows([b"some other text"], tokens=8, context=4).load_state_dict(state)


def write(folder: Path, contents: dict[str, bytes]) -> str:
    for name, content in contents.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return str(folder)


def test_documents_are_split_whole_and_whatever_their_names(tmp_path):
    contents = [b"document %d" % i for i in range(40)]
    names = [f"{i:03}.txt" for i in range(40)]
    one = load_corpus([write(tmp_path / "a", dict(zip(names, contents, strict=True)))])
    two = load_corpus([write(tmp_path / "b", dict(zip(reversed(names), contents, strict=True)))])
    assert len(one.validation) == 2
    assert not set(one.train) & set(one.validation)
    assert set(one.train) | set(one.validation) == set(contents)
    assert (one.train, one.validation, one.fingerprint) == (two.train, two.validation, two.fingerprint)


def test_copies_empty_and_hidden_files_are_dropped(tmp_path):
    folder = write(
        tmp_path, {"a": b"one", "sub/b": b"one", "c": b"", "d": b"two", ".hidden": b"three", "__pycache__/e": b"four"}
    )
    corpus = load_corpus([folder])
    assert sorted(corpus.train + corpus.validation) == [b"one", b"two"]


def test_the_end_of_a_single_document_validates(tmp_path):
    folder = write(tmp_path, {"a": bytes(range(200))})
    corpus = load_corpus([Path(folder, "a")])
    assert corpus.train == (bytes(range(190)),)
    assert corpus.validation == (bytes(range(190, 200)),)


def test_the_default_corpus_is_the_standard_library_alone():
    corpus = load_corpus()
    documents = set(corpus.train + corpus.validation)
    assert len(documents) > 100
    assert Path(os.__file__).read_bytes() in documents
    assert Path(torch.__file__).read_bytes() not in documents
    assert Path(flamia.__file__).read_bytes() not in documents
    tests = Path(os.__file__).parent / "test" / "__main__.py"
    assert not tests.exists() or tests.read_bytes() not in documents


def test_bad_data_is_refused_by_name(tmp_path):
    with pytest.raises(ValueError, match=r"nowhere.*does not exist"):
        load_corpus([tmp_path / "nowhere"])
    with pytest.raises(ValueError, match="holds no files"):
        load_corpus([tmp_path])
    with pytest.raises(ValueError, match="only empty files"):
        load_corpus([write(tmp_path, {"a": b""})])
    with pytest.raises(ValueError, match="single byte"):
        load_corpus([write(tmp_path, {"a": b"x"})])
    with pytest.raises(ValueError, match="validation_fraction is 1"):
        load_corpus([tmp_path], validation_fraction=1)


@pytest.mark.parametrize(
    ("arguments", "name"),
    [(([b"x"], 0, 1), "tokens is 0"), (([b"x"], 1, 0), "context is 0"), (([], 1, 1), "documents is empty")],
)
def test_bad_packing_is_refused_by_name(arguments, name):
    documents, tokens, context = arguments
    with pytest.raises(ValueError, match=name):
        PackedRows(documents, tokens=tokens, context=context)
