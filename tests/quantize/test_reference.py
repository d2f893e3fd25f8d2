"""Quantizers against slow loops over documents, blocks and groups, written with numpy and ml_dtypes alone."""

import math

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flamia.quantize import reference
from flamia.quantize.payloads import (
    COLUMN_ORDERS,
    E2M1Tokens,
    E4M3Payload,
    GroupedPayload,
    NVFP4Columns,
    NVFP4Rows,
    Spec,
    TensorPayload,
)
from flamia.quantize.reference import TokenMap, prepare

# ------------------------------------------------------------------------------------------- the loops' own formats


def exponent_of(amax, largest, rounding="up", least=-126):
    """Shared exponent of a block from its definition; None for a broken block."""
    if not math.isfinite(amax):
        return None
    if amax == 0:
        return least
    e = math.frexp(amax)[1] - 1 - (math.frexp(largest)[1] - 1)
    if rounding == "up" and math.ldexp(amax, -e) > largest:
        e += 1
    return max(e, least)


def e8m0(e):
    return 255 if e is None else e + 127


def e4m3_codes(x):
    x = np.asarray(x, np.float32)
    codes = np.clip(x, -448, 448).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    return np.where(np.isfinite(x), codes, 0x7F)


def e4m3_values(codes):
    return np.asarray(codes, np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)


def e2m1_codes(x):
    return np.clip(np.asarray(x, np.float32), -6, 6).astype(ml_dtypes.float4_e2m1fn).view(np.uint8) & 15


def e2m1_values(codes):
    return np.asarray(codes, np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float32)


def scaled(x, e):
    """x * 2^-e, exact in FP64 and back to FP32; NaN for a broken block."""
    return np.full_like(x, np.nan) if e is None else np.ldexp(x.astype(np.float64), -e).astype(np.float32)


def e4m3_block(x, rounding="up", least=-126):
    """Codes of a block and its UE8M0 code."""
    e = exponent_of(float(np.abs(x).max()), 448.0, rounding, least)
    return e4m3_codes(scaled(x, e)), e8m0(e)


def nvfp4_group(x):
    """E2M1 codes of 16 numbers and the UE4M3 code of their scale."""
    scale = e4m3_codes(np.abs(x).max() / np.float32(6))
    s = e4m3_values(scale)
    return (np.zeros(16, np.uint8) if s == 0 else e2m1_codes(x / s)), int(scale)


def unpacked(packed):
    packed = np.asarray(packed)
    return np.stack((packed & 15, packed >> 4), -1).reshape(*packed.shape[:-1], 2 * packed.shape[-1])


def column_layout(lengths):
    """First column of each document, and the end of the last."""
    starts = [0]
    for n in lengths:
        starts.append(starts[-1] + -(-n // 32) * 32)
    return starts


class Case:
    """A packed row: lengths, a tail of NaN, and numbers of many magnitudes, zeros of both signs among them."""

    def __init__(self, lengths, tail=0, heads=2, dim=32, seed=0, spread=12):
        rng = np.random.default_rng(seed)
        self.lengths, self.heads, self.dim = list(lengths), heads, dim
        self.cu = np.concatenate(([0], np.cumsum(self.lengths, dtype=np.int64)))
        self.used, self.total = int(self.cu[-1]), int(self.cu[-1]) + tail
        shape = (self.total, heads, dim)
        magnitude = np.exp2(rng.integers(-spread, spread + 1, (self.total, heads, 1)))
        x = (rng.standard_normal(shape) * magnitude).astype(np.float32)
        x[rng.random(shape) < 0.1] = 0.0
        x[rng.random(shape) < 0.05] = -0.0
        x[rng.random((self.total, heads)) < 0.1] = 0.0
        x[rng.random((self.total, heads)) < 0.05] *= 1e-36
        x[self.used :] = np.nan
        self.x = x
        self.tokens = TokenMap.build(torch.from_numpy(self.cu.astype(np.int32)), self.total)
        self.starts = column_layout(self.lengths)

    def prepared(self):
        return prepare(torch.from_numpy(self.x), self.tokens)

    def documents(self):
        return [(int(a), int(b)) for a, b in zip(self.cu[:-1], self.cu[1:], strict=True)]


CASES = {
    "one": Case([64]),
    "odd": Case([1, 31, 33, 70, 5], tail=3, heads=3, dim=64),
    "empty": Case([0, 17, 0, 0, 40, 0], tail=9),
    "heads": Case([45, 20], heads=40),
    "tiny": Case([1] * 7, heads=1),
    "only-tail": Case([0, 0], tail=6),
    "no-documents": Case([], tail=4),
    "no-tokens": Case([0]),
    "wide": Case([50, 3], tail=1, dim=128, heads=1, spread=60),
}
every_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES)
lengths_and_tail = given(st.lists(st.integers(0, 75), max_size=5), st.integers(0, 9), st.integers(0, 2**16))
few = settings(max_examples=20)

# ---------------------------------------------------------------------------------------------------- token maps


def check_map(case):
    tokens = case.tokens
    capacity = -(-(case.total + 31 * len(case.lengths)) // 32) * 32
    assert (tokens.capacity, tokens.documents) == (capacity, len(case.lengths))
    position, document, valid = [], [], []
    for i, n in enumerate(case.lengths):
        for t in range(n):
            position.append(case.starts[i] + t)
            document.append(i)
            valid.append(True)
    assert tokens.document.tolist()[: case.used] == document
    tail = case.total - case.used
    assert tokens.position.tolist() == position + [capacity] * tail
    assert tokens.valid.tolist() == valid + [False] * tail
    assert all(0 <= d < max(len(case.lengths), 1) for d in tokens.document.tolist())

    x = torch.arange(1, case.total * 3 + 1, dtype=torch.int32).view(case.total, 3)
    padded = tokens.pad(x)
    assert padded.shape == (capacity, 3)
    expected = torch.zeros(capacity, 3, dtype=torch.int32)
    for t, p in enumerate(position):
        expected[p] = x[t]
    assert torch.equal(padded, expected)
    x[case.used :] = 0
    assert torch.equal(tokens.unpad(padded), x)


@every_case
def test_token_map(case):
    check_map(case)


@lengths_and_tail
def test_token_map_of_any_lengths(lengths, tail, seed):
    check_map(Case(lengths, tail, heads=1, seed=seed))


def test_token_map_pads_nan_of_no_document_away():
    tokens = TokenMap.build(torch.tensor([0, 3], dtype=torch.int32), 5)
    x = torch.tensor([1.0, 2.0, 3.0, torch.nan, torch.nan])
    assert tokens.pad(x).tolist() == [1, 2, 3] + [0] * 61
    assert tokens.unpad(tokens.pad(x)).tolist() == [1, 2, 3, 0, 0]


# ------------------------------------------------------------------------------------------------------ prepared


@every_case
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_prepare(case, dtype):
    x = torch.from_numpy(np.clip(case.x, -6e4, 6e4)).to(dtype)
    offset = torch.from_numpy(np.random.default_rng(5).standard_normal((case.heads, case.dim)).astype(np.float32))
    wide = x.to(torch.float32)
    for o in (None, offset):
        y = prepare(x, case.tokens, offset=o)
        assert y.dtype == torch.float32
        assert torch.equal(y[: case.used], wide[: case.used] - (0 if o is None else o))
        assert (y[case.used :] == 0).all(), "tokens of no document are zeros, NaN or not, offset or not"
        rotated = prepare(x, case.tokens, rotate=True, offset=o)
        i = np.arange(case.dim)
        sign = np.array([[(-1.0) ** bin(a & b).count("1") for b in i] for a in i])
        expected = y.double().numpy() @ sign / math.sqrt(case.dim)
        size = np.abs(y.numpy()).sum(-1, keepdims=True) + 1e-30
        assert (np.abs(rotated.numpy() - expected) <= 1e-6 * size).all()


def test_prepare_leaves_its_input_alone():
    x = torch.randn(4, 1, 32)
    kept = x.clone()
    y = prepare(x, TokenMap.build(torch.tensor([0, 4], dtype=torch.int32), 4), offset=torch.ones(1, 32))
    y.zero_()
    assert torch.equal(x, kept)


@every_case
def test_token_amax(case):
    amax = reference.token_amax(case.prepared())
    assert amax.shape == (case.heads, case.total)
    assert amax.is_contiguous()
    assert np.array_equal(amax.numpy()[:, : case.used], np.abs(case.x[: case.used]).max(-1).T)
    assert (amax[:, case.used :] == 0).all()


# -------------------------------------------------------------------------------------------------- token blocks


def check_token_blocks(case, per_token, rounding, least=-126):
    x, starts = case.x, case.starts
    natural = reference.token_blocks(
        case.prepared(), case.tokens, per_token=per_token, columns="natural", rounding=rounding, least=least
    )
    codes = np.zeros(x.shape, np.uint8)
    exponents = np.zeros((case.heads, case.total), np.uint8)
    columns = np.zeros((case.heads, case.dim, case.tokens.capacity), np.uint8)
    step = 1 if per_token else 32
    for i, (a, b) in enumerate(case.documents()):
        for t in range(a, b, step):
            rows = slice(t, min(t + step, b))
            for n in range(case.heads):
                codes[rows, n], exponents[n, rows] = e4m3_block(x[rows, n], rounding, least)
                at = starts[i] + t - a
                columns[n, :, at : at + rows.stop - t] = codes[rows, n].T
    assert np.array_equal(natural.codes.numpy(), codes)
    assert np.array_equal(natural.exponents.numpy()[:, : case.used], exponents[:, : case.used])
    assert (natural.exponents[:, case.used :] != 255).all()
    assert np.array_equal(natural.columns.numpy(), columns), "padding is zero codes"
    return natural


@pytest.mark.parametrize("rounding", ["up", "floor"])
@pytest.mark.parametrize("per_token", [False, True], ids=["blocks", "tokens"])
@every_case
def test_token_blocks(case, per_token, rounding):
    natural = check_token_blocks(case, per_token, rounding)
    for name, order in COLUMN_ORDERS.items():
        y = reference.token_blocks(case.prepared(), case.tokens, per_token=per_token, columns=name, rounding=rounding)
        assert torch.equal(y.codes, natural.codes)
        assert torch.equal(y.exponents, natural.exponents)
        for start in range(0, case.tokens.capacity, 32):
            for place, token in enumerate(order):
                assert torch.equal(y.columns[..., start + place], natural.columns[..., start + token])
    assert reference.token_blocks(case.prepared(), case.tokens, per_token=per_token).columns.numel() == 0


@pytest.mark.parametrize("per_token", [False, True], ids=["blocks", "tokens"])
@pytest.mark.parametrize("least", [-64, -7, 3])
@every_case
def test_token_blocks_with_a_least_exponent(case, least, per_token):
    p = check_token_blocks(case, per_token, "up", least)
    assert (p.exponents[:, : case.used] >= least + 127).all()


def test_values_have_a_least_exponent_of_their_own():
    case = Case([40, 3], spread=90)
    x, m = case.prepared(), case.tokens
    for source, least in (("v", -64), ("q", -126), ("k", -126), ("do", -126)):
        p = reference.make(Spec("a", E4M3Payload, source), x, m, per_token=True, rounding="up")
        want = reference.token_blocks(x, m, per_token=True, least=least)
        assert torch.equal(p.exponents, want.exponents), source
        assert torch.equal(p.codes, want.codes), source
        assert p.exponents.min() == least + 127


@lengths_and_tail
@few
def test_token_blocks_of_any_lengths(lengths, tail, seed):
    check_token_blocks(Case(lengths, tail, seed=seed), bool(seed & 1), "up")


@pytest.mark.parametrize("per_token", [False, True], ids=["blocks", "tokens"])
def test_rounding_up_clamps_nothing_and_down_does(per_token):
    case = Case([40, 900, 7], dim=64, seed=3)
    x = case.prepared()
    largest = {}
    for rounding in ("up", "floor"):
        p = reference.token_blocks(x, case.tokens, per_token=per_token, rounding=rounding)
        e = p.exponents.numpy().astype(int).T[..., None] - 127
        largest[rounding] = np.abs(np.ldexp(x.double().numpy(), -e)).max()
        if rounding == "up":
            # the largest element of a block is in (224, 448]; the rest lies at half a step of its code or less
            values = np.ldexp(e4m3_values(p.codes.numpy()).astype(np.float64), e)
            step = np.exp2(np.maximum(np.floor(np.log2(np.abs(np.ldexp(x.double().numpy(), -e)) + 1e-300)), -6) - 3 + e)
            assert (np.abs(values - x.double().numpy()) <= step / 2).all()
    assert largest["up"] <= 448
    assert largest["floor"] > 464, "some element is clamped by more than rounding would"


# --------------------------------------------------------------------------------------------------------- NVFP4


def check_nvfp4_rows(case, second_level):
    p = reference.nvfp4_rows(case.prepared(), second_level)
    codes = np.zeros(case.x.shape, np.uint8)
    scales = np.zeros((*case.x.shape[:2], case.dim // 16), np.uint8)
    exponents = np.zeros((case.heads, case.total), np.uint8)
    for t in range(case.used):
        for n in range(case.heads):
            row = case.x[t, n]
            if second_level:
                e = exponent_of(float(np.abs(row).max()), 2688.0)
                row, exponents[n, t] = scaled(row, e), e8m0(e)
            for g in range(case.dim // 16):
                part = slice(16 * g, 16 * g + 16)
                codes[t, n, part], scales[t, n, g] = nvfp4_group(row[part])
    assert p.codes.dtype == p.scales.dtype == p.exponents.dtype == torch.uint8
    assert np.array_equal(unpacked(p.codes), codes)
    assert np.array_equal(p.scales.numpy(), scales)
    if second_level:
        assert np.array_equal(p.exponents.numpy()[:, : case.used], exponents[:, : case.used])
        assert (p.exponents[:, case.used :] != 255).all()
    else:
        assert p.exponents.numel() == 0


def check_nvfp4_columns(case, second_level):
    p = reference.nvfp4_columns(case.prepared(), case.tokens, second_level)
    capacity = case.tokens.capacity
    codes = np.zeros((case.heads, case.dim, capacity), np.uint8)
    scales = np.zeros((case.heads, case.dim, capacity // 16), np.uint8)
    exponents = np.zeros((case.heads, len(case.lengths)), np.uint8)
    for i, (a, b) in enumerate(case.documents()):
        for n in range(case.heads):
            x = case.x[a:b, n]
            if second_level:
                e = exponent_of(float(np.abs(x).max(initial=0)), 2688.0)
                x, exponents[n, i] = scaled(x, e), e8m0(e)
            for t in range(0, b - a, 16):
                at = case.starts[i] + t
                for d in range(case.dim):
                    group = np.zeros(16, np.float32)
                    part = x[t : t + 16, d]
                    group[: len(part)] = part
                    codes[n, d, at : at + 16], scales[n, d, at // 16] = nvfp4_group(group)
    assert np.array_equal(unpacked(p.codes), codes), "padding is zero codes"
    assert np.array_equal(p.scales.numpy(), scales)
    assert p.exponents.numel() == (exponents.size if second_level else 0)
    if second_level:
        assert np.array_equal(p.exponents.numpy(), exponents)


levels = pytest.mark.parametrize("second_level", [False, True], ids=["one-level", "two-levels"])


@levels
@every_case
def test_nvfp4_rows(case, second_level):
    check_nvfp4_rows(case, second_level)


@levels
@every_case
def test_nvfp4_columns(case, second_level):
    check_nvfp4_columns(case, second_level)


@lengths_and_tail
@few
def test_nvfp4_of_any_lengths(lengths, tail, seed):
    case = Case(lengths, tail, heads=1, seed=seed)
    check_nvfp4_rows(case, bool(seed & 1))
    check_nvfp4_columns(case, bool(seed & 1))


@pytest.mark.parametrize("size", [1e-30, 1e-6, 1.0, 1e6, 1e30])
def test_second_level_holds_any_magnitude(size):
    x = torch.from_numpy(np.random.default_rng(0).standard_normal((64, 1, 32)).astype(np.float32)) * size
    tokens = TokenMap.build(torch.tensor([0, 64], dtype=torch.int32), 64)
    p = reference.nvfp4_rows(x, True)
    error = ((reference.dequantize(p) - x).double().norm() / x.double().norm()).item()
    assert error < 0.12
    columns = reference.nvfp4_columns(x, tokens, True)
    values = e2m1_values(unpacked(columns.codes)) * e4m3_values(columns.scales.numpy()).repeat(16, -1)
    e = columns.exponents.numpy().astype(int)[..., None] - 127
    y = np.ldexp(values.astype(np.float64), e)[..., :64].transpose(2, 0, 1)
    assert np.linalg.norm(y - x.double().numpy()) / np.linalg.norm(x.double().numpy()) < 0.12


# ------------------------------------------------------------------------------------------------ E2M1 per token


def check_e2m1_tokens(case):
    p = reference.e2m1_tokens(case.prepared())
    codes = np.zeros(case.x.shape, np.uint8)
    exponents = np.zeros((case.heads, case.total), np.uint8)
    for t in range(case.used):
        for n in range(case.heads):
            e = exponent_of(float(np.abs(case.x[t, n]).max()), 6.0)
            codes[t, n], exponents[n, t] = e2m1_codes(scaled(case.x[t, n], e)), e8m0(e)
            assert np.abs(scaled(case.x[t, n], e)).max() <= 6, "nothing is clamped"
    assert np.array_equal(unpacked(p.codes), codes)
    assert np.array_equal(p.exponents.numpy()[:, : case.used], exponents[:, : case.used])
    assert (p.exponents[:, case.used :] != 255).all()


@every_case
def test_e2m1_tokens(case):
    check_e2m1_tokens(case)


# ------------------------------------------------------------------------------------------------------ ablations


@pytest.mark.parametrize("rounding", ["up", "floor"])
@every_case
def test_grouped(case, rounding):
    p = reference.grouped(case.prepared(), case.tokens, rounding)
    codes = np.zeros(case.x.shape, np.uint8)
    scales = np.ones((*case.x.shape[:2], case.dim // 32), np.uint8)
    columns = np.zeros((case.heads, case.dim, case.tokens.capacity), np.uint8)
    column_scales = np.ones((case.heads, case.dim, case.tokens.capacity // 32), np.uint8)
    for i, (a, b) in enumerate(case.documents()):
        for n in range(case.heads):
            for t in range(a, b):
                for g in range(case.dim // 32):
                    part = slice(32 * g, 32 * g + 32)
                    codes[t, n, part], scales[t, n, g] = e4m3_block(case.x[t, n, part], rounding)
            for t in range(a, b, 32):
                at, end = case.starts[i] + t - a, min(t + 32, b)
                for d in range(case.dim):
                    block, scale = e4m3_block(case.x[t:end, n, d], rounding)
                    columns[n, d, at : at + end - t], column_scales[n, d, at // 32] = block, scale
    assert np.array_equal(p.codes.numpy(), codes)
    assert np.array_equal(p.scales.numpy(), scales)
    assert np.array_equal(p.columns.numpy(), columns)
    assert np.array_equal(p.column_scales.numpy(), column_scales)


@every_case
def test_per_tensor(case):
    p = reference.per_tensor(case.prepared())
    x = np.where(np.isnan(case.x), np.float32(0), case.x)
    scale = np.abs(x).max(initial=0) / np.float32(448)
    assert p.scale.dtype == torch.float32
    assert p.scale.tolist() == [scale]
    assert np.array_equal(p.codes.numpy(), e4m3_codes(x / scale if scale > 0 else x))


# ------------------------------------------------------------------------- a document and its neighbours

QUANTIZERS = {
    "blocks": lambda x, m: reference.token_blocks(x, m, columns="mma"),
    "blocks-pairs": lambda x, m: reference.token_blocks(x, m, columns="pairs"),
    "tokens": lambda x, m: reference.token_blocks(x, m, per_token=True, columns="natural"),
    "blocks-floor": lambda x, m: reference.token_blocks(x, m, columns="mma", rounding="floor"),
    "nvfp4-rows": lambda x, m: reference.nvfp4_rows(x),
    "nvfp4-rows-2": lambda x, m: reference.nvfp4_rows(x, True),
    "nvfp4-columns": lambda x, m: reference.nvfp4_columns(x, m),
    "nvfp4-columns-2": lambda x, m: reference.nvfp4_columns(x, m, True),
    "e2m1-tokens": lambda x, m: reference.e2m1_tokens(x),
    "grouped-up": lambda x, m: reference.grouped(x, m, "up"),
    "grouped-floor": lambda x, m: reference.grouped(x, m, "floor"),
}
every_quantizer = pytest.mark.parametrize("quantizer", QUANTIZERS.values(), ids=QUANTIZERS)


def of_document(payload, a, b, start, index):
    """A payload's tensors of one document of tokens a..b, columns from ``start`` on."""
    end = start + -(-(b - a) // 32) * 32
    tokens, table = slice(a, b), (slice(None), slice(a, b))
    if isinstance(payload, E4M3Payload):
        return payload.codes[tokens], payload.exponents[table], payload.columns[..., start:end]
    if isinstance(payload, E2M1Tokens):
        return payload.codes[tokens], payload.exponents[table]
    if isinstance(payload, NVFP4Rows):
        return payload.codes[tokens], payload.scales[tokens], payload.exponents.view(-1, payload.codes.shape[0])[table]
    if isinstance(payload, NVFP4Columns):
        second = payload.exponents[:, index] if payload.exponents.numel() else payload.exponents
        return payload.codes[..., start // 2 : end // 2], payload.scales[..., start // 16 : end // 16], second
    assert isinstance(payload, GroupedPayload)
    columns, scales = payload.columns[..., start:end], payload.column_scales[..., start // 32 : end // 32]
    return payload.codes[tokens], payload.scales[tokens], columns, scales


@pytest.mark.parametrize("neighbours", ["large", "nan", "inf"])
@pytest.mark.parametrize("lengths", [[3, 45, 70], [31, 64, 1], [0, 33, 5], [7, 1, 0]], ids=str)
@every_quantizer
def test_a_document_does_not_depend_on_its_neighbours_or_offset(quantizer, lengths, neighbours):
    case = Case(lengths, tail=4, seed=9)
    a, b = case.documents()[1]
    alone = Case([b - a])
    alone.x = case.x[a:b]
    x = case.x.copy()
    fill = {"large": 1e30, "nan": np.nan, "inf": -np.inf}[neighbours]
    x[:a], x[b:] = fill, fill
    packed = quantizer(prepare(torch.from_numpy(x), case.tokens, rotate=True), case.tokens)
    single = quantizer(prepare(torch.from_numpy(alone.x), alone.tokens, rotate=True), alone.tokens)
    parts = of_document(packed, a, b, case.starts[1], 1)
    expected = of_document(single, 0, b - a, 0, 0)
    assert sum(t.numel() for t in expected) > 0
    for left, right in zip(parts, expected, strict=True):
        assert torch.equal(left, right)


@every_quantizer
def test_the_tail_is_never_read(quantizer):
    case = Case([20, 50], tail=11, seed=2)
    results = []
    for fill in (0.0, np.nan, np.inf, 1e38):
        x = case.x.copy()
        x[case.used :] = fill
        results.append(quantizer(prepare(torch.from_numpy(x), case.tokens, rotate=True), case.tokens))
    for other in results[1:]:
        for name, tensor in vars(results[0]).items():
            assert torch.equal(tensor, getattr(other, name)), name


# ---------------------------------------------------------------------------------------------- broken inputs

BROKEN = {"nan": 0x7FC00000, "negative-nan": 0xFFFFFFFF, "inf": 0x7F800000, "negative-inf": 0xFF800000}


def poisoned(case, value, token, head, channel):
    x = case.x.copy()
    x[token, head, channel] = np.array([value], np.uint32).view(np.float32)[0]
    return prepare(torch.from_numpy(x), case.tokens)


@pytest.mark.parametrize("value", BROKEN.values(), ids=BROKEN)
@pytest.mark.parametrize("heads", [1, 3, 8, 33, 64])
@pytest.mark.parametrize("per_token", [False, True], ids=["blocks", "tokens"])
def test_a_broken_number_poisons_its_block_only(per_token, heads, value):
    case = Case([40, 70], tail=2, heads=heads, seed=4)
    token, head = 40 + 35, heads - 1  # the second block of the second document: tokens 72..103
    clean = reference.token_blocks(case.prepared(), case.tokens, per_token=per_token, columns="natural")
    broken = reference.token_blocks(
        poisoned(case, value, token, head, 6), case.tokens, per_token=per_token, columns="natural"
    )
    hit = slice(token, token + 1) if per_token else slice(72, 104)
    assert (broken.codes[hit, head] == 0).all()  # what other documents' tiles reach into
    assert (broken.exponents[head, hit] == 255).all()
    start = case.starts[1] + hit.start - 40
    columns = slice(start, start + hit.stop - hit.start)
    assert (broken.columns[head, :, columns] == 0).all()

    broken.codes[hit, head] = clean.codes[hit, head]
    broken.exponents[head, hit] = clean.exponents[head, hit]
    broken.columns[head, :, columns] = clean.columns[head, :, columns]
    for name, tensor in vars(clean).items():
        assert torch.equal(tensor, getattr(broken, name)), name


def decoded_columns(p):
    values = e2m1_values(unpacked(p.codes)) * e4m3_values(p.scales.numpy()).repeat(16, -1)
    return torch.from_numpy(values)


@pytest.mark.parametrize("value", BROKEN.values(), ids=BROKEN)
@pytest.mark.parametrize("heads", [1, 3, 33])
def test_a_broken_number_poisons_its_nvfp4_group_only(heads, value):
    case = Case([40, 70], heads=heads, seed=4)
    token, head, channel = 75, heads - 1, 20
    x = poisoned(case, value, token, head, channel)

    clean, broken = (reference.dequantize(reference.nvfp4_rows(y)) for y in (case.prepared(), x))
    assert broken[token, head, 16:32].isnan().all()
    broken[token, head, 16:32] = clean[token, head, 16:32]
    assert torch.equal(broken, clean)

    clean, broken = (decoded_columns(reference.nvfp4_columns(y, case.tokens)) for y in (case.prepared(), x))
    at = case.starts[1] + 32
    assert broken[head, channel, at : at + 16].isnan().all()
    broken[head, channel, at : at + 16] = clean[head, channel, at : at + 16]
    assert torch.equal(broken, clean)


@pytest.mark.parametrize("value", BROKEN.values(), ids=BROKEN)
@pytest.mark.parametrize("heads", [1, 3, 33])
def test_a_broken_number_poisons_its_token_or_document_at_the_second_level(heads, value):
    case = Case([40, 70], heads=heads, seed=4)
    token, head = 75, heads - 1
    x = poisoned(case, value, token, head, 20)
    for quantize in (lambda y: reference.nvfp4_rows(y, True), reference.e2m1_tokens):
        clean, broken = quantize(case.prepared()), quantize(x)
        assert broken.exponents[head, token] == 255
        left, right = reference.dequantize(broken), reference.dequantize(clean)
        assert left[token, head].isnan().all()
        left[token, head] = right[token, head]
        assert torch.equal(left, right)

    clean, broken = (reference.nvfp4_columns(y, case.tokens, True) for y in (case.prepared(), x))
    assert broken.exponents[head].tolist() == [clean.exponents[head, 0].item(), 255]
    assert torch.equal(broken.exponents[:head], clean.exponents[:head])
    left, right = decoded_columns(broken), decoded_columns(clean)
    own = slice(case.starts[1], case.starts[1] + 70)
    assert left[head, :, own].isnan().all()
    left[head, :, case.starts[1] : case.starts[2]] = right[head, :, case.starts[1] : case.starts[2]]
    assert torch.equal(left, right)


@pytest.mark.parametrize("value", BROKEN.values(), ids=BROKEN)
def test_a_broken_number_poisons_a_whole_tensor_under_one_scale(value):
    case = Case([40, 70], seed=4)
    broken = reference.dequantize(reference.per_tensor(poisoned(case, value, 75, 1, 20)))
    assert broken.isnan().all()


# ---------------------------------------------------------------------------------------- values and dispatch


@every_case
def test_dequantize(case):
    x, m = case.prepared(), case.tokens

    def power(table):
        return np.ldexp(1.0, np.asarray(table).astype(int) - 127)

    def check(payload, expected):
        values = reference.dequantize(payload)
        assert values.dtype == torch.float32
        assert values.shape == case.x.shape
        used = slice(0, case.used)
        assert np.array_equal(values.numpy()[used], expected[used].astype(np.float32))
        assert (values[case.used :] == 0).all()

    for per_token in (False, True):
        p = reference.token_blocks(x, m, per_token=per_token)
        check(p, e4m3_values(p.codes) * power(p.exponents).T[..., None])
    p = reference.nvfp4_rows(x)
    check(p, e2m1_values(unpacked(p.codes)) * e4m3_values(p.scales).repeat(16, -1))
    p = reference.nvfp4_rows(x, True)
    check(p, e2m1_values(unpacked(p.codes)) * e4m3_values(p.scales).repeat(16, -1) * power(p.exponents).T[..., None])
    p = reference.e2m1_tokens(x)
    check(p, e2m1_values(unpacked(p.codes)) * power(p.exponents).T[..., None])
    p = reference.grouped(x, m, "up")
    check(p, e4m3_values(p.codes) * power(p.scales).repeat(32, -1))
    p = reference.per_tensor(x)
    check(p, e4m3_values(p.codes) * p.scale.numpy())


def test_columns_alone_cannot_be_dequantized():
    case = CASES["odd"]
    with pytest.raises(TypeError, match="NVFP4Columns holds no copy along the head dimension"):
        reference.dequantize(reference.nvfp4_columns(case.prepared(), case.tokens))


@pytest.mark.parametrize("rounding", ["up", "floor"])
@pytest.mark.parametrize("per_token", [False, True], ids=["blocks", "tokens"])
@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        (Spec("a", E4M3Payload, "q", "mma"), lambda x, m, t, r: _blocks(x, m, t, r, "mma")),
        (Spec("a", E4M3Payload, "q"), lambda x, m, t, r: _blocks(x, m, t, r, None)),
        (Spec("a", NVFP4Rows, "q"), lambda x, m, t, r: reference.nvfp4_rows(x)),
        (Spec("a", NVFP4Rows, "q", None, True), lambda x, m, t, r: reference.nvfp4_rows(x, True)),
        (Spec("a", NVFP4Columns, "q"), lambda x, m, t, r: reference.nvfp4_columns(x, m)),
        (Spec("a", NVFP4Columns, "q", None, True), lambda x, m, t, r: reference.nvfp4_columns(x, m, True)),
        (Spec("a", E2M1Tokens, "q"), lambda x, m, t, r: reference.e2m1_tokens(x)),
        (Spec("a", GroupedPayload, "q"), lambda x, m, t, r: reference.grouped(x, m, r)),
        (Spec("a", TensorPayload, "q"), lambda x, m, t, r: reference.per_tensor(x)),
    ],
    ids=["e4m3-mma", "e4m3", "rows", "rows-2", "columns", "columns-2", "e2m1", "grouped", "tensor"],
)
def test_make_follows_its_spec(spec, expected, per_token, rounding):
    case = CASES["odd"]
    x, m = case.prepared(), case.tokens
    other = {"q": x, "k": x * 0}
    made = reference.make_all([spec], other, {"q": m, "k": m}, per_token=per_token, rounding=rounding)
    assert list(made) == ["a"]
    want = expected(x, m, per_token, rounding)
    assert type(made["a"]) is spec.kind is type(want)
    for name, tensor in vars(want).items():
        assert torch.equal(getattr(made["a"], name), tensor), name


def _blocks(x, m, per_token, rounding, columns):
    return reference.token_blocks(x, m, per_token=per_token, rounding=rounding, columns=columns)
