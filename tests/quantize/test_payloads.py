"""Payload layouts: which are made for which recipe, their shapes, and the orders of column payloads."""

import dataclasses

import pytest
import torch

from flamia.documents import column_capacity
from flamia.quantize.payloads import (
    COLUMN_ORDERS,
    E2M1Tokens,
    E4M3Payload,
    GroupedPayload,
    NVFP4Columns,
    NVFP4Rows,
    Payloads,
    Spec,
    TensorPayload,
    backward_specs,
    column_order,
    empty_payloads,
    forward_specs,
)
from flamia.quantize.reference import TokenMap, make_all, prepare, token_amax
from flamia.recipe import Recipe, get_recipe, recipes

# ------------------------------------------------------------------------------------------------- column orders


def fragment_mma():
    """From the tensor core's registers: what each thread of a quad holds after scores, where it must put it before PV.

    After an FP32 product, thread t of a quad holds columns 2t and 2t + 1 of every 8 columns. As the 8-bit operand of
    the next product it holds, in each of two registers, 4 neighbouring places of 16: 4t .. 4t + 3. Filling the first
    register from the first two groups of 8 columns and the second from the last two needs no exchange of data; the
    other operand must then lie in the order that results.
    """
    place = {}
    for register in (0, 1):
        for t in range(4):
            held = [16 * register + 8 * group + 2 * t + column for group in (0, 1) for column in (0, 1)]
            for byte, token in enumerate(held):
                place[16 * register + 4 * t + byte] = token
    return [place[i] for i in range(32)]


def fragment_pairs():
    """From a transposing 8x8 store of 16-bit elements: each holds one token g and its partner in the next 8 tokens."""
    order = []
    for sixteen in (0, 16):
        first, second = range(sixteen, sixteen + 8), range(sixteen + 8, sixteen + 16)
        for pair in zip(first, second, strict=True):
            order += pair
    return order


@pytest.mark.parametrize(
    ("name", "expected"),
    [("natural", list(range(32))), ("mma", fragment_mma()), ("pairs", fragment_pairs())],
    ids=["natural", "mma", "pairs"],
)
def test_column_order(name, expected):
    order = COLUMN_ORDERS[name]
    assert order == expected
    assert sorted(order) == list(range(32)), "a permutation of the block's own tokens"
    assert sorted(order[:16]) == list(range(16)), "halves of 16 tokens stay halves"
    index = column_order(name, torch.device("cpu"))
    assert index.dtype == torch.int64
    assert index.tolist() == order


def test_there_are_no_other_orders():
    assert set(COLUMN_ORDERS) == {"natural", "mma", "pairs"}
    assert len({tuple(order) for order in COLUMN_ORDERS.values()}) == 3


# --------------------------------------------------------------------------------------------------- what is made

EIGHT = {"block": E4M3Payload, "groups": GroupedPayload, "tensor": TensorPayload}


def described(specs):
    return {s.name: (s.kind, s.source, s.columns, s.second_level) for s in specs}


@pytest.mark.parametrize("columns", [False, True], ids=["rows", "columns"])
@pytest.mark.parametrize("scale", EIGHT)
@pytest.mark.parametrize("format", ["mxfp8", "nvfp4"])
def test_payloads_of_the_8_bit_formats(format, scale, columns):
    recipe, kind = Recipe(format=format, operand_scale=scale), EIGHT[scale]

    def eight(source, order=None):
        return kind, source, order if columns and scale == "block" else None, False

    if format == "mxfp8":
        scores = {"q": eight("q"), "k": eight("k")}
        training = {"q": eight("q", "mma"), "k": eight("k", "pairs")}
    else:
        scores = {"q": (NVFP4Rows, "q", None, False), "k": (NVFP4Rows, "k", None, False)}
        training = {**scores, "q8": eight("q", "mma"), "k8": eight("k", "pairs")}
    v = {"v": eight("v", "mma")}
    assert described(forward_specs(recipe, False, columns)) == {**scores, **v}
    assert described(forward_specs(recipe, True, columns)) == {**training, **v}
    assert described(backward_specs(recipe, columns)) == {"do": eight("do", "mma")}


@pytest.mark.parametrize("columns", [False, True], ids=["rows", "columns"])
def test_payloads_of_the_4_bit_format(columns):
    recipe = Recipe(format="fp4")
    forward = {
        "q": (NVFP4Rows, "q", None, False),
        "k": (NVFP4Rows, "k", None, False),
        "v_columns": (NVFP4Columns, "v", None, False),
        "v_tokens": (E2M1Tokens, "v", None, False),
    }
    training = {
        **forward,
        "v": (NVFP4Rows, "v", None, False),
        "k_columns": (NVFP4Columns, "k", None, False),
        "k_tokens": (E2M1Tokens, "k", None, False),
        "q_columns": (NVFP4Columns, "q", None, False),
    }
    assert described(forward_specs(recipe, False, columns)) == forward
    assert described(forward_specs(recipe, True, columns)) == training
    assert described(backward_specs(recipe, columns)) == {
        "do": (NVFP4Rows, "do", None, True),
        "do_columns": (NVFP4Columns, "do", None, True),
    }


# ------------------------------------------------------------------------------------------- shapes and flattening

HEADS, HEADS_KV, DIM = 4, 2, 64
LENGTHS_Q, LENGTHS_K, TAIL = [5, 0, 40], [33, 7, 0], 3


def made(specs, training):
    """Payloads of random tensors, and the packed q and k that they come from."""
    g = torch.Generator().manual_seed(0)

    def side(lengths, heads):
        cu = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
        total = sum(lengths) + TAIL
        return TokenMap.build(cu, total), torch.randn(total, heads, DIM, generator=g).to(torch.bfloat16)

    (map_q, q), (map_k, k) = side(LENGTHS_Q, HEADS), side(LENGTHS_K, HEADS_KV)
    maps = {"q": map_q, "do": map_q, "k": map_k, "v": map_k}
    sources = {n: prepare(k if n in "kv" else q, maps[n]) for n in maps}
    items = make_all(specs, sources, maps, per_token=False, rounding="up")
    amax = [token_amax(sources[n]) if training else torch.empty(0) for n in "kv"]
    return Payloads(items, *amax), q, k


def check_agreement(specs, training):
    payloads, q, k = made(specs, training)
    flat = payloads.flatten()
    empty = empty_payloads(specs, q, k, len(LENGTHS_Q))
    assert len(flat) == len(empty)
    for i, (real, fake) in enumerate(zip(flat, empty, strict=True)):
        if i < 2 and not training:
            assert real.numel() == 0
            continue
        assert real.dtype == fake.dtype, i
        assert real.shape == fake.shape, i
        assert real.stride() == fake.stride(), i

    again = Payloads.unflatten(specs, flat)
    assert again.k_amax is payloads.k_amax
    assert again.v_amax is payloads.v_amax
    assert list(again.items) == list(payloads.items) == [s.name for s in specs]
    for spec in specs:
        assert type(again[spec.name]) is spec.kind
        for field in dataclasses.fields(spec.kind):
            assert getattr(again[spec.name], field.name) is getattr(payloads[spec.name], field.name)


@pytest.mark.parametrize("columns", [False, True], ids=["rows", "columns"])
@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("name", recipes())
def test_flattened_forward_payloads(name, training, columns):
    check_agreement(forward_specs(get_recipe(name), training, columns), training)


@pytest.mark.parametrize("columns", [False, True], ids=["rows", "columns"])
@pytest.mark.parametrize("name", recipes())
def test_flattened_backward_payloads(name, columns):
    check_agreement(backward_specs(get_recipe(name), columns), training=False)


@pytest.mark.parametrize(
    ("spec", "shapes"),
    [
        (Spec("q", E4M3Payload, "q"), {"codes": "TND", "exponents": "NT", "columns": "0"}),
        (Spec("k", E4M3Payload, "k", "pairs"), {"codes": "TND", "exponents": "NT", "columns": "NDC"}),
        (Spec("do", NVFP4Rows, "do", None, True), {"codes": "TNd", "scales": "TNs", "exponents": "NT"}),
        (Spec("q", NVFP4Rows, "q"), {"codes": "TNd", "scales": "TNs", "exponents": "0"}),
        (Spec("v", NVFP4Columns, "v"), {"codes": "NDc", "scales": "NDp", "exponents": "0"}),
        (Spec("do", NVFP4Columns, "do", None, True), {"codes": "NDc", "scales": "NDp", "exponents": "NB"}),
        (Spec("v", E2M1Tokens, "v"), {"codes": "TNd", "exponents": "NT"}),
        (Spec("v", GroupedPayload, "v"), dict(codes="TND", scales="TNg", columns="NDC", column_scales="NDh")),
        (Spec("q", TensorPayload, "q"), {"codes": "TND", "scale": "1"}),
    ],
    ids=["e4m3", "e4m3-columns", "rows-2", "rows", "columns", "columns-2", "e2m1", "grouped", "tensor"],
)
def test_shapes_as_documented(spec, shapes):
    payloads, q, k = made([spec], False)
    x = k if spec.source in "kv" else q
    c = column_capacity(x.shape[0], 3)
    size = {"T": x.shape[0], "N": x.shape[1], "D": DIM, "d": DIM // 2, "s": DIM // 16, "g": DIM // 32, "B": 3}
    size |= {"C": c, "c": c // 2, "p": c // 16, "h": c // 32, "0": 0, "1": 1}
    payload = payloads[spec.name]
    assert {f.name for f in dataclasses.fields(payload)} == set(shapes)
    for name, letters in shapes.items():
        tensor = getattr(payload, name)
        assert tuple(tensor.shape) == tuple(size[x] for x in letters), name
        assert tensor.dtype == (torch.float32 if name == "scale" else torch.uint8), name
        assert tensor.is_contiguous(), name


def test_unflatten_refuses_tensors_too_many():
    specs = forward_specs(get_recipe("mxfp8"), True)
    flat = made(specs, True)[0].flatten()
    with pytest.raises(ValueError, match=r"1 tensors too many for payloads \['q', 'k', 'v'\]"):
        Payloads.unflatten(specs, [*flat, torch.empty(0)])


def test_unflatten_refuses_tensors_too_few():
    specs = forward_specs(get_recipe("mxfp8"), True)
    flat = made(specs, True)[0].flatten()
    with pytest.raises(TypeError, match="columns"):
        Payloads.unflatten(specs, flat[:-1])


def test_specs_are_immutable_and_hashable():
    spec = Spec("q", E4M3Payload, "q")
    assert hash(spec) == hash(Spec("q", E4M3Payload, "q"))
    with pytest.raises(dataclasses.FrozenInstanceError):
        spec.columns = "mma"
