"""A packed row gives, document by document, the bits of running that document alone, whatever its neighbours hold.

Uninitialised memory is filled with NaN throughout, so that a result that reads what nobody wrote is not one by luck.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import flamia
from flamia import flash_attn_func, flash_attn_varlen_func
from flamia.reference import chunks, forward

RECIPES = [name for name in flamia.recipes() if name != "leaky-per-tensor"]
NAMES = ("o", "lse", "dq", "dk", "dv")
MASKS = {"causal": dict(causal=True), "full": {}, "window": dict(window_size=(40, 9))}


@pytest.fixture(autouse=True)
def _poisoned_memory() -> Iterator[None]:
    was = torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(was[0])
    torch.utils.deterministic.fill_uninitialized_memory = was[1]


@dataclass
class Document:
    """One document's q, do [Sq, heads, D], k, v [Sk, kv heads, D] and dlse [heads, Sq]."""

    q: Tensor
    k: Tensor
    v: Tensor
    do: Tensor
    dlse: Tensor

    @classmethod
    def random(cls, len_q: int, len_k: int, seed: int, heads: int = 2, kv: int = 1, d: int = 32, scale: float = 1.0):
        g = torch.Generator().manual_seed(seed)

        def normal(tokens: int, n: int) -> Tensor:
            # Magnitudes differ from token to token, so that a scale shared with a neighbour would show.
            size = torch.exp2(torch.randint(-3, 4, (tokens, n, 1), generator=g).float())
            return (torch.randn(tokens, n, d, generator=g) * size * scale).to(torch.bfloat16)

        dlse = torch.randn(heads, len_q, generator=g)
        return cls(normal(len_q, heads), normal(len_k, kv), normal(len_k, kv), normal(len_q, heads), dlse)


def offsets(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


def run(documents: list[Document], tail: int = 0, recipe: str | flamia.Recipe = "mxfp8", **kwargs):
    """o, lse, dq, dk, dv of the documents packed in order, with ``tail`` NaN tokens behind the last."""

    def pack(name: str, axis: int = 0) -> Tensor:
        parts = [getattr(x, name) for x in documents]
        shape = list(parts[0].shape)
        shape[axis] = tail
        return torch.cat([*parts, torch.full(shape, torch.nan, dtype=parts[0].dtype)], axis)

    q, k, v = (pack(x).requires_grad_() for x in "qkv")
    cu_q = offsets([x.q.shape[0] for x in documents])
    cu_k = offsets([x.k.shape[0] for x in documents])
    o, lse = flash_attn_varlen_func(q, k, v, cu_q, cu_k, recipe=recipe, return_lse=True, **kwargs)
    grads = torch.autograd.grad((o, lse), (q, k, v), (pack("do"), pack("dlse", 1)))
    return dict(zip(NAMES, (o.detach(), lse.detach(), *grads), strict=True)), cu_q.tolist(), cu_k.tolist()


def cut(result: dict[str, Tensor], name: str, a: int, b: int) -> Tensor:
    return result[name][:, a:b] if name == "lse" else result[name][a:b]


def bits(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.int32 if x.dtype == torch.float32 else torch.int16)


def different(x: Tensor, y: Tensor) -> int:
    assert x.shape == y.shape
    assert x.dtype == y.dtype
    return int((bits(x) != bits(y)).sum())


def assert_alone(documents: list[Document], tail: int = 0, **kwargs) -> None:
    """Every document of the packed row has the bits of its own run, and tokens of no document are zero."""
    packed, cu_q, cu_k = run(documents, tail, **kwargs)
    for i, document in enumerate(documents):
        alone, _, _ = run([document], **kwargs)
        for name in NAMES:
            a, b = (cu_k if name in ("dk", "dv") else cu_q)[i : i + 2]
            found = different(cut(packed, name, a, b), alone[name])
            assert found == 0, f"{name} of document {i}, tokens {a} to {b}: {found} entries differ"
    for name in NAMES:
        end = (cu_k if name in ("dk", "dv") else cu_q)[-1]
        rest = cut(packed, name, end, end + tail)
        assert (rest == (-torch.inf if name == "lse" else 0)).all(), f"{name} of tokens past the last offset"


def mixed(heads: int = 2, kv: int = 1, d: int = 32) -> list[Document]:
    """Odd offsets, empty documents of every kind, lengths on both sides of blocks and tiles, neighbours times 1000."""
    lengths = [(1, 1), (31, 31), (0, 0), (33, 33), (0, 7), (130, 130), (5, 0), (33, 33), (3, 70), (65, 20), (0, 0)]
    scales = [1, 1000, 1, 1, 1000, 1, 1000, 0.001, 1, 1, 1]
    return [
        Document.random(q, k, i, heads, kv, d, s) for i, ((q, k), s) in enumerate(zip(lengths, scales, strict=True))
    ]


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("mask", MASKS)
def test_documents_at_odd_offsets(recipe: str, mask: str):
    assert_alone(mixed(), tail=11, recipe=recipe, **MASKS[mask])


@pytest.mark.parametrize("recipe", ["mxfp8", "nvfp4-exact", "fp4", "mxfp8-folded", "nvfp4-folded-exact"])
def test_rotated_heads_in_groups(recipe: str):
    """Head dimension 128, where q and k are rotated, with three query heads a key head."""
    assert_alone([x for x in mixed(6, 2, 128) if x.q.shape[0] < 100], recipe=recipe, causal=True)


@pytest.mark.parametrize(
    "recipe",
    [
        flamia.Recipe(accumulator="fp32"),
        flamia.Recipe(row_sum="weights", exact_operands=True),
        flamia.Recipe(exact_ds=True),
        flamia.Recipe(tau=0.0, p_shift=8),
        flamia.Recipe(format="fp4", stochastic_rounding=False),
        flamia.Recipe(format="fp4", seed=7, accumulator_scale="causal"),
        flamia.Recipe(variant="folded", accumulator="fp32", exact_ds=True),
    ],
    ids=repr,
)
def test_every_option(recipe: flamia.Recipe):
    assert_alone(mixed(), tail=3, recipe=recipe, causal=True)


@settings(max_examples=40)
@given(
    st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), min_size=1, max_size=5),
    st.sampled_from(RECIPES),
    st.sampled_from([*MASKS.values(), dict(window_size=(0, 0)), dict(causal=True, window_size=(3, None))]),
    st.integers(0, 3),
    st.integers(0, 1000),
)
def test_any_lengths(lengths: list[tuple[int, int]], recipe: str, mask: dict, tail: int, seed: int):
    documents = [Document.random(q, k, seed + i, scale=[1, 1000][(seed + i) % 2]) for i, (q, k) in enumerate(lengths)]
    assert_alone(documents, tail, recipe=recipe, **mask)


@pytest.mark.parametrize("recipe", RECIPES)
def test_order_of_documents_does_not_matter(recipe: str):
    """The same documents the other way round: every offset changes, and which of them are computed together."""
    documents = mixed()
    there, cu_q, cu_k = run(documents, recipe=recipe, causal=True)
    back, uc_q, uc_k = run(documents[::-1], recipe=recipe, causal=True)
    for name in NAMES:
        cu, uc = (cu_k, uc_k) if name in ("dk", "dv") else (cu_q, uc_q)
        for (a, b), (c, e) in zip(pairwise(cu), reversed(list(pairwise(uc))), strict=True):
            assert different(cut(there, name, a, b), cut(back, name, c, e)) == 0


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("value", [torch.nan, torch.inf], ids=str)
def test_a_broken_document_breaks_no_other(recipe: str, value: float):
    """NaN and infinity stay in their document: blocks, groups, maxima and prescales restart with each."""
    documents = mixed()
    clean, cu_q, cu_k = run(documents, recipe=recipe, causal=True)
    for name in ("q", "k", "v", "do"):
        setattr(documents[5], name, getattr(documents[5], name).index_fill(0, torch.tensor([3]), value))
    documents[5].dlse[0, 8] = value
    broken, _, _ = run(documents, recipe=recipe, causal=True)
    for name in NAMES:
        cu = cu_k if name in ("dk", "dv") else cu_q
        assert different(cut(clean, name, 0, cu[5]), cut(broken, name, 0, cu[5])) == 0, name
        assert different(cut(clean, name, cu[6], cu[-1]), cut(broken, name, cu[6], cu[-1])) == 0, name
        assert cut(broken, name, cu[5], cu[6]).isnan().any(), f"{name} of the broken document hides it"


@pytest.mark.parametrize("recipe", RECIPES)
def test_poisoned_tail_changes_no_bit(recipe: str):
    documents = mixed()
    exact, cu_q, cu_k = run(documents, 0, recipe=recipe, causal=True)
    longer, _, _ = run(documents, 37, recipe=recipe, causal=True)
    for name in NAMES:
        end = (cu_k if name in ("dk", "dv") else cu_q)[-1]
        assert different(cut(longer, name, 0, end), exact[name]) == 0, name
        rest = cut(longer, name, end, end + 37)
        assert rest.shape[1 if name == "lse" else 0] == 37
        assert (rest == (-torch.inf if name == "lse" else 0)).all(), name


@pytest.mark.parametrize("recipe", RECIPES)
def test_last_offset_repeated_changes_no_bit(recipe: str):
    """A list of offsets padded to a fixed capacity, as a captured graph needs it."""
    documents = mixed()
    exact, _, _ = run(documents, recipe=recipe, causal=True)
    padding = [Document.random(0, 0, 99) for _ in range(4)]
    padded, _, _ = run(documents + padding, recipe=recipe, causal=True)
    assert [name for name in NAMES if different(exact[name], padded[name])] == []


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize(("len_q", "len_k"), [(33, 33), (7, 70), (140, 20)])
def test_batched_is_packed(recipe: str, len_q: int, len_k: int):
    documents = [Document.random(len_q, len_k, i, 4, 2, scale=[1, 1000, 0.01][i]) for i in range(3)]
    packed, _, _ = run(documents, recipe=recipe, causal=True)
    q, k, v = (torch.stack([getattr(x, n) for x in documents]).requires_grad_() for n in "qkv")
    o, lse = flash_attn_func(q, k, v, recipe=recipe, causal=True, return_lse=True)
    gradients = torch.stack([x.do for x in documents]), torch.stack([x.dlse for x in documents])
    dq, dk, dv = torch.autograd.grad((o, lse), (q, k, v), gradients)
    assert lse.shape == (3, 4, len_q)
    batched = (o.flatten(0, 1), lse.transpose(0, 1).flatten(1), dq.flatten(0, 1), dk.flatten(0, 1), dv.flatten(0, 1))
    assert [n for n, x in zip(NAMES, batched, strict=True) if different(packed[n], x.detach())] == []


@pytest.mark.parametrize("recipe", RECIPES)
def test_how_work_is_cut_changes_no_bit(recipe: str, monkeypatch: pytest.MonkeyPatch):
    """Chunks of documents and heads, and runs of tiles, only bound memory."""
    documents = [*mixed(4, 2)[4:9], Document.random(270, 270, 50, 4, 2), Document.random(33, 33, 51, 4, 2)]
    whole, _, _ = run(documents, recipe=recipe, causal=True)
    monkeypatch.setattr(chunks, "_ELEMENTS", 1)
    monkeypatch.setattr(forward, "RUN_ELEMENTS", 1)
    pieces, _, _ = run(documents, recipe=recipe, causal=True)
    assert [name for name in NAMES if different(whole[name], pieces[name])] == []


@pytest.mark.parametrize("recipe", RECIPES)
def test_repeating_a_call_changes_no_bit(recipe: str):
    documents = mixed()
    first, _, _ = run(documents, recipe=recipe, causal=True)
    second, _, _ = run(documents, recipe=recipe, causal=True, deterministic=True)
    assert [name for name in NAMES if different(first[name], second[name])] == []


def test_one_scale_for_the_tensor_is_the_counterexample():
    """A neighbour times 1000 changes a document under leaky-per-tensor: the comparison above can fail."""
    documents = [Document.random(33, 33, 0), Document.random(20, 20, 1, scale=1000.0)]
    with pytest.raises(AssertionError, match="entries differ"):
        assert_alone(documents, recipe="leaky-per-tensor", causal=True)
