"""Number formats against exhaustive tables written from their definitions, torch's own types and ml_dtypes."""

import itertools
import math

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flamia import formats

LARGEST = {"e4m3": 448.0, "e2m1": 6.0, "nvfp4": 2688.0}
EMAX = {"e4m3": 8, "e2m1": 2, "nvfp4": 11}


def magnitudes(exponent_bits, mantissa_bits, bias, count):
    """Values of the first ``count`` non-negative codes of a small floating-point format, from its definition."""
    values = []
    for code in range(count):
        exponent, mantissa = code >> mantissa_bits, code & ((1 << mantissa_bits) - 1)
        assert exponent < 1 << exponent_bits
        fraction = mantissa / 2**mantissa_bits
        values.append(math.ldexp(fraction + (exponent > 0), max(exponent, 1) - bias))
    return np.array(values)


E4M3 = magnitudes(4, 3, 7, 127)  # code 127 is NaN
E2M1 = magnitudes(2, 1, 1, 8)


def nearest(x, table):
    """Index of the table value nearest to |x|, ties to the even index, saturating; x float64 without NaN."""
    middles = (table[1:] + table[:-1]) / 2
    below = np.searchsorted(middles, np.abs(x), side="left")
    tie = (below < len(middles)) & (middles[np.minimum(below, len(middles) - 1)] == np.abs(x))
    return below + (tie & (below % 2 == 1))


def bf16_values():
    return torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).to(torch.float32)


def fp16_values():
    return torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.float16).to(torch.float32)


def around(table):
    """Every value and every midpoint of a table, with its FP32 neighbours on both sides, of both signs."""
    points = np.concatenate((table, (table[1:] + table[:-1]) / 2, [table[-1] * 17 / 16, table[-1] * 1.25]))
    points = points.astype(np.float32)
    points = np.concatenate((points, np.nextafter(points, np.float32(np.inf)), np.nextafter(points, np.float32(-1))))
    return torch.from_numpy(np.concatenate((points, -points)))


def inputs(table):
    scaled = torch.from_numpy(np.random.default_rng(0).standard_normal(20000).astype(np.float32)) * float(table[-1]) / 2
    return {"bf16": bf16_values(), "fp16": fp16_values(), "around": around(table), "gauss": scaled}


KINDS = ("bf16", "fp16", "around", "gauss")


def bits(x):
    return x.contiguous().view(torch.int32)


def same(a, b):
    """Equal to the bit, up to which NaN it is."""
    assert a.shape == b.shape
    assert torch.equal(a.isnan(), b.isnan())
    assert torch.equal(bits(a)[~a.isnan()], bits(b)[~b.isnan()])


def negative_nans():
    return torch.tensor([-1, -4194304, -8388607], dtype=torch.int32).view(torch.float32)


# ------------------------------------------------------------------------------------------------------- E4M3


def test_tables_are_the_formats():
    assert E4M3[[1, 8, 56, 126]].tolist() == [2**-9, 2**-6, 1.0, 448.0]
    assert E2M1.tolist() == [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    assert (formats.E4M3_MAX, formats.E2M1_MAX, formats.NVFP4_MAX) == (448, 6, 2688)


def test_decode_e4m3_every_code():
    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8)
    expected = np.concatenate((E4M3, [np.nan], -E4M3, [np.nan])).astype(np.float32)
    decoded = formats.decode_e4m3(codes)
    assert decoded.dtype == torch.float32
    same(decoded, torch.from_numpy(expected))
    same(decoded, codes.view(torch.float8_e4m3fn).to(torch.float32))
    same(decoded, torch.from_numpy(codes.numpy().view(ml_dtypes.float8_e4m3fn).astype(np.float32)))


@pytest.mark.parametrize("kind", KINDS)
def test_encode_e4m3(kind):
    x = inputs(E4M3)[kind]
    finite = x.isfinite()
    codes = formats.encode_e4m3(x)
    assert codes.dtype == torch.uint8
    assert (codes[~finite] == 0x7F).all(), "NaN and infinity have one code"

    f, c = x[finite], codes[finite]
    expected = nearest(f.double().numpy(), E4M3) | (np.signbit(f.numpy()) * 128)
    assert np.array_equal(c.numpy(), expected)
    clipped = f.clamp(-448, 448)
    assert torch.equal(c, clipped.to(torch.float8_e4m3fn).view(torch.uint8))
    assert np.array_equal(c.numpy(), clipped.numpy().astype(ml_dtypes.float8_e4m3fn).view(np.uint8))


def test_encode_e4m3_inverts_decode():
    codes = torch.tensor([c for c in range(256) if c & 0x7F != 0x7F], dtype=torch.uint8)
    assert torch.equal(formats.encode_e4m3(formats.decode_e4m3(codes)), codes)


@pytest.mark.parametrize("count", [1, 7, 64, 100])
def test_encode_e4m3_of_any_nan_has_no_sign(count):
    # vectorised and scalar paths of a CPU differ in the sign of the NaN that they make
    for value in negative_nans():
        assert (formats.encode_e4m3(value.repeat(count)) == 0x7F).all()


def test_encode_e4m3_edges():
    x = torch.tensor([0.0, -0.0, 448, -448, 464, 1e30, -1e30, torch.inf, -torch.inf, 2.0**-10, 1.5 * 2.0**-9])
    assert formats.encode_e4m3(x).tolist() == [0, 128, 126, 254, 126, 126, 254, 127, 127, 0, 2]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_encode_e4m3_takes_half_precision(dtype):
    x = bf16_values().to(dtype)
    assert torch.equal(formats.encode_e4m3(x), formats.encode_e4m3(x.float()))


@pytest.mark.parametrize("kind", KINDS)
def test_round_e4m3_is_decode_of_encode(kind):
    x = inputs(E4M3)[kind]
    same(formats.round_e4m3(x), formats.decode_e4m3(formats.encode_e4m3(x)))


def test_codes_ignore_strides():
    x = torch.randn(12, 20).t()
    assert not x.is_contiguous()
    assert torch.equal(formats.encode_e4m3(x), formats.encode_e4m3(x.contiguous()))
    assert torch.equal(formats.decode_e4m3(formats.encode_e4m3(x)), formats.round_e4m3(x.contiguous()))
    assert torch.equal(formats.e8m0_exponent(x.abs(), "e4m3"), formats.e8m0_exponent(x.abs().contiguous(), "e4m3"))


# ------------------------------------------------------------------------------------------------------- E2M1


def test_decode_e2m1_every_code():
    codes = torch.arange(16, dtype=torch.int32).to(torch.uint8)
    decoded = formats.decode_e2m1(codes)
    same(decoded, torch.from_numpy(np.concatenate((E2M1, -E2M1)).astype(np.float32)))
    same(decoded, torch.from_numpy(codes.numpy().view(ml_dtypes.float4_e2m1fn).astype(np.float32)))
    assert torch.equal(formats.encode_e2m1(decoded), codes)


@pytest.mark.parametrize("kind", KINDS)
def test_round_and_encode_e2m1(kind):
    x = inputs(E2M1)[kind]
    x = x[~x.isnan()]
    rounded = formats.round_e2m1(x)
    index = nearest(x.double().numpy(), E2M1)
    same(rounded, torch.copysign(torch.from_numpy(E2M1.astype(np.float32))[torch.from_numpy(index)], x))

    codes = formats.encode_e2m1(rounded)
    assert codes.dtype == torch.uint8
    assert np.array_equal(codes.numpy(), index | (np.signbit(x.numpy()) * 8))
    clipped = x.clamp(-6, 6).numpy().astype(ml_dtypes.float4_e2m1fn).view(np.uint8)
    assert np.array_equal(codes.numpy(), clipped & 15)


def test_e2m1_edges():
    x = torch.tensor([0.0, -0.0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 7.0, torch.inf, -torch.inf])
    expected = torch.tensor([0.0, -0.0, 0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0, 6.0, 6.0, -6.0])
    same(formats.round_e2m1(x), expected)
    same(formats.round_e2m1(-x), -expected)


@pytest.mark.parametrize("count", [1, 7, 64])
def test_e2m1_nan_stays_nan_and_within_its_nibble(count):
    for value in (*negative_nans(), torch.tensor(torch.nan)):
        rounded = formats.round_e2m1(value.repeat(count))
        assert rounded.isnan().all()
        assert (formats.encode_e2m1(rounded) < 16).all(), "a code past 15 would change its neighbour when packed"


# ------------------------------------------------------------------------------------------ stochastic rounding


def test_stochastic_rounding_up_exactly_where_the_fraction_exceeds_the_random_number():
    x, random = [], []
    for low, high in itertools.pairwise(E2M1):
        for k in (1, 2, 3 * 2**21, 2**23, 2**24 - 1):
            value = np.float32(low + (high - low) * k / 2**24)
            if float(value) != low + (high - low) * k / 2**24:
                continue  # not an FP32 number: the fraction would be another
            x += [value, value]
            random += [k - 1, k]
    assert len(x) > 30
    up = formats.round_e2m1_stochastic(torch.tensor(np.array(x)), torch.tensor(random))[0::2]
    down = formats.round_e2m1_stochastic(torch.tensor(np.array(x)), torch.tensor(random))[1::2]
    v = torch.tensor(np.array(x[0::2]))
    table = torch.tensor(E2M1, dtype=torch.float32)
    above = table[torch.searchsorted(table, v, right=True)]
    below = table[torch.searchsorted(table, v, right=True) - 1]
    same(up, above)
    same(down, below)


def test_stochastic_rounding_stays_at_the_two_neighbours():
    x = torch.from_numpy(np.random.default_rng(1).uniform(-6, 6, 50000).astype(np.float32))
    y = formats.round_e2m1_stochastic(x, formats.counter_bits(3, torch.arange(50000)))
    table = torch.tensor(E2M1, dtype=torch.float32)
    a = x.abs()
    i = torch.searchsorted(table, a, right=True)
    below, above = table[i - 1], table[i.clamp(max=7)]
    assert ((y.abs() == below) | (y.abs() == above)).all()
    assert torch.equal(torch.signbit(y), torch.signbit(x))


@pytest.mark.parametrize("random", [0, 1, 2**24 - 1])
def test_stochastic_rounding_keeps_values_and_saturates(random):
    x = torch.cat((formats.decode_e2m1(torch.arange(16)), torch.tensor([6.5, -1e9, torch.inf])))
    y = formats.round_e2m1_stochastic(x, torch.full(x.shape, random))
    same(y, torch.cat((x[:16], torch.tensor([6.0, -6.0, 6.0]))))
    assert formats.round_e2m1_stochastic(torch.tensor([torch.nan]), torch.tensor([random])).isnan().all()


@pytest.mark.parametrize("value", [0.01, 0.125, 0.4, 0.8, 1.3, 1.99, 2.25, 2.9, 3.7, 4.1, 5.0, 5.9])
@pytest.mark.parametrize("sign", [1, -1], ids=["positive", "negative"])
def test_stochastic_rounding_is_unbiased(value, sign):
    n = 1 << 17
    x = torch.full((n,), sign * value)
    y = formats.round_e2m1_stochastic(x, formats.counter_bits(11, torch.arange(n), torch.tensor(5))).double()
    above = int(np.searchsorted(E2M1, value, side="right"))
    low, high = E2M1[above - 1], E2M1[above]
    p = (value - low) / (high - low)
    error = (high - low) * math.sqrt(p * (1 - p) / n)
    assert abs(y.mean().item() - sign * value) < 4 * error + 1e-6


# ---------------------------------------------------------------------------------------------- random counters


def counter_bits_of(seed, counters):
    """The mixing function on Python integers of one element."""
    h = (seed * 0x9E3779B1 + 0x7F4A7C15) % 2**32
    for c in counters:
        h ^= c % 2**32
        h = (h ^ (h >> 16)) * 0x85EBCA6B % 2**32
        h = (h ^ (h >> 13)) * 0xC2B2AE35 % 2**32
        h = (h ^ (h >> 16)) * 0x27D4EB2F % 2**32
        h ^= h >> 15
    return h >> 8


def chi_square(values, bins):
    counts = torch.bincount(values.flatten(), minlength=bins).double()
    expected = counts.sum() / bins
    # in standard deviations of a chi-square with bins - 1 degrees of freedom
    return ((((counts - expected) ** 2 / expected).sum() - (bins - 1)) / math.sqrt(2 * (bins - 1))).item()


@given(
    st.integers(0, 2**33 - 1),
    st.lists(st.integers(0, 2**40), min_size=0, max_size=4),
)
def test_counter_bits_equal_the_mixing_function(seed, counters):
    value = formats.counter_bits(seed, *(torch.tensor(c) for c in counters))
    assert value.dtype == torch.int64
    assert value.item() == counter_bits_of(seed, counters)


@pytest.mark.parametrize("seed", [0, 1, 2, 12345, 2**32 - 1])
@pytest.mark.parametrize("axes", ["row", "column", "plane"])
def test_counter_bits_are_uniform(seed, axes):
    line, side = torch.arange(1 << 16), torch.arange(256)
    counters = {
        "row": (line, torch.tensor(7)),
        "column": (torch.tensor(7), line),
        "plane": (side.view(-1, 1), side.view(1, -1)),
    }[axes]
    values = formats.counter_bits(seed, *counters)
    assert values.numel() == 1 << 16
    assert values.min() >= 0
    assert values.max() < 1 << 24
    for shift in (0, 8, 16):
        assert abs(chi_square((values >> shift) & 255, 256)) < 5
    flat = values.flatten()
    pairs = (flat[:-1] >> 20) * 16 + (flat[1:] >> 20)
    assert abs(chi_square(pairs, 256)) < 5, "neighbours are correlated"


def test_counter_bits_change_with_every_bit_of_a_counter():
    i = torch.arange(4096)
    base = formats.counter_bits(1, i, torch.tensor(3))
    for bit in range(20):
        changed = base ^ formats.counter_bits(1, i ^ (1 << bit), torch.tensor(3))
        for out in range(24):
            rate = ((changed >> out) & 1).double().mean().item()
            assert abs(rate - 0.5) < 6 * 0.5 / math.sqrt(4096), (bit, out)


def test_counter_bits_do_not_depend_on_the_shape_around():
    i, j = torch.arange(40).view(-1, 1), torch.arange(24).view(1, -1)
    plane = formats.counter_bits(9, i, j)
    assert plane.shape == (40, 24)
    assert torch.equal(formats.counter_bits(9, i[5:9], j[:, 3:20]), plane[5:9, 3:20])
    assert torch.equal(formats.counter_bits(9, i.t(), j.t()), plane.t())
    assert formats.counter_bits(9, torch.tensor(17), torch.tensor(2)).item() == plane[17, 2].item()


def test_counter_bits_differ_between_seeds_and_positions():
    i = torch.arange(1 << 14)
    streams = [formats.counter_bits(s, i, torch.tensor(c)) for s in (0, 1, 2, 3) for c in (0, 1, 2)]
    streams += [formats.counter_bits(0, torch.tensor(1), i), formats.counter_bits(0, i)]
    for a in range(len(streams)):
        for b in range(a):
            assert (streams[a] == streams[b]).sum() < 8, (a, b)  # about 2^14 / 2^24 by chance


# ------------------------------------------------------------------------------------------------------ nibbles


def test_pack_nibbles_every_pair():
    low, high = torch.meshgrid(torch.arange(16), torch.arange(16), indexing="ij")
    codes = torch.stack((low, high), -1).to(torch.uint8).flatten(1)  # [16, 32]
    packed = formats.pack_nibbles(codes)
    assert packed.dtype == torch.uint8
    assert torch.equal(packed, (low + 16 * high).to(torch.uint8))
    assert torch.equal(formats.unpack_nibbles(packed), codes)


def test_unpack_nibbles_every_byte():
    packed = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(2, 4, 32)
    codes = formats.unpack_nibbles(packed)
    assert codes.shape == (2, 4, 64)
    assert codes[0, 1, :4].tolist() == [0, 2, 1, 2]  # bytes 0x20, 0x21
    assert torch.equal(formats.pack_nibbles(codes), packed)


# ------------------------------------------------------------------------------------------- UE8M0 and exponents


def exponent_inputs(largest):
    """BF16 magnitudes; and the FP32 neighbours of every boundary, largest * 2^k and 2^k."""
    edge = np.concatenate([np.ldexp(np.array([largest, 1.0]), k) for k in range(-160, 130)])
    edge = edge[(edge < 2.0**128) & (edge >= 2.0**-149)].astype(np.float32)
    edge = np.concatenate((edge, np.nextafter(edge, np.float32(0)), np.nextafter(edge, np.float32(np.inf))))
    values = np.concatenate((bf16_values().numpy()[:32768], edge))
    return torch.from_numpy(values[np.isfinite(values)])


@pytest.mark.parametrize("element", LARGEST)
def test_exponent_up_is_the_smallest_that_clamps_nothing(element):
    amax = exponent_inputs(LARGEST[element])
    e = formats.e8m0_exponent(amax, element)
    assert e.dtype == torch.int32
    a, exponent = amax.double().numpy(), e.numpy()
    assert exponent.min() == -126
    assert exponent.max() < 128
    assert (np.ldexp(a, -exponent) <= LARGEST[element]).all()
    smaller = np.ldexp(a, 1 - exponent) <= LARGEST[element]
    assert (exponent[smaller] == -126).all(), "one less would do"
    assert (exponent[a == 0] == -126).all()


@pytest.mark.parametrize("element", LARGEST)
def test_exponent_floor_is_the_reference_conversion(element):
    amax = exponent_inputs(LARGEST[element])
    e = formats.e8m0_exponent(amax, element, "floor").numpy()
    a = amax.double().numpy()
    log = np.where(a > 0, np.frexp(a)[1] - 1, -1000)
    assert np.array_equal(e, np.maximum(log - EMAX[element], -126))
    assert (np.ldexp(a, -e) > LARGEST[element]).any(), "rounding down clamps somewhere"
    assert (np.ldexp(a, -e) < 2 * 2.0 ** EMAX[element]).all()


@pytest.mark.parametrize("rounding", ["up", "floor"])
@pytest.mark.parametrize("element", LARGEST)
def test_exponent_of_infinity_and_every_nan(element, rounding):
    values = bf16_values()
    broken = torch.cat((values[~values.isfinite()].abs(), negative_nans(), torch.tensor([torch.inf])))
    assert (formats.e8m0_exponent(broken, element, rounding) == formats.NAN_EXPONENT).all()


def test_exponent_of_a_nan_out_of_a_vectorised_maximum():
    # a maximum over the first dimension may return NaN with its sign set
    x = torch.rand(32, 64)
    x[7, 5] = torch.nan
    e = formats.e8m0_exponent(x.abs().amax(0), "e4m3")
    assert (e == formats.NAN_EXPONENT).tolist() == [i == 5 for i in range(64)]


def test_exponent_refuses_other_roundings():
    with pytest.raises(ValueError, match=r"rounding must be 'up' or 'floor', got 'nearest'"):
        formats.e8m0_exponent(torch.ones(1), "e4m3", "nearest")


def test_e8m0_every_code():
    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8)
    exponents = formats.decode_e8m0(codes)
    assert exponents.dtype == torch.int32
    assert exponents.tolist() == [*range(-127, 128), formats.NAN_EXPONENT]
    assert torch.equal(formats.encode_e8m0(exponents), codes)

    values = np.ldexp(1.0, exponents.numpy()[:255]).astype(np.float32)
    assert np.array_equal(values, codes[:255].view(torch.float8_e8m0fnu).to(torch.float32).numpy())
    assert np.array_equal(values, codes.numpy()[:255].view(ml_dtypes.float8_e8m0fnu).astype(np.float32))
    assert codes[255:].view(torch.float8_e8m0fnu).to(torch.float32).isnan().all()
    assert np.array_equal(values.astype(ml_dtypes.float8_e8m0fnu).view(np.uint8), codes.numpy()[:255])


def test_pow2_every_exponent():
    e = torch.arange(-126, 128)
    assert np.array_equal(formats.pow2(e).double().numpy(), np.ldexp(1.0, e.numpy()))
    assert (formats.pow2(e) * formats.pow2(-e.clamp(max=126)) == formats.pow2(e - e.clamp(max=126))).all()
    nan = formats.pow2(torch.tensor([formats.NAN_EXPONENT, -formats.NAN_EXPONENT]))
    assert nan.dtype == torch.float32
    assert nan.isnan().all()


def test_log2_every_exponent():
    exponent = np.arange(-126, 128)
    for significand in (1.0, 1.0 + 2.0**-23, 1.5, 2.0 - 2.0**-23):
        x = torch.from_numpy(np.ldexp(significand, exponent).astype(np.float32))
        assert np.array_equal(formats.floor_log2(x).numpy(), exponent)
        assert np.array_equal(formats.ceil_log2(x).numpy(), exponent + (significand > 1))


def test_log2_of_zero_and_subnormals():
    x = torch.tensor([0.0, 2.0**-149, 2.0**-127, 2.0**-126 - 2.0**-149])
    assert formats.ceil_log2(x).tolist() == [-126] * 4
    assert (formats.floor_log2(x) <= -127).all()


# -------------------------------------------------------------------------------------------------------- UE4M3


@pytest.mark.parametrize("kind", KINDS)
def test_round_ue4m3(kind):
    x = inputs(E4M3)[kind].abs()
    rounded = formats.round_ue4m3(x)
    finite = x.isfinite()
    assert rounded[~finite].isnan().all()
    assert np.array_equal(rounded[finite].double().numpy(), E4M3[nearest(x[finite].double().numpy(), E4M3)])


@pytest.mark.parametrize("kind", ["bf16", "fp16", "gauss"])
def test_nvfp4_scale_is_a_sixth_in_fp32(kind):
    amax = inputs(E4M3)[kind].abs() * (6 if kind == "gauss" else 1)
    amax = amax[amax.isfinite()]
    sixth = amax.numpy() / np.float32(6)
    assert sixth.dtype == np.float32
    assert np.array_equal(formats.nvfp4_scale(amax).double().numpy(), E4M3[nearest(sixth.astype(np.float64), E4M3)])
    assert formats.nvfp4_scale(torch.tensor([torch.inf, torch.nan])).isnan().all()


# --------------------------------------------------------------------------------------------- fixed-order sums


def walsh(d):
    i = np.arange(d)
    parity = np.array([[bin(a & b).count("1") & 1 for b in i] for a in i])
    return 1.0 - 2.0 * parity


def butterfly(row):
    """The transform of one row, element by element, in FP32."""
    y, d = row.astype(np.float32).copy(), len(row)
    stride = 1
    while stride < d:
        for i in range(d):
            if i & stride == 0:
                a, b = y[i], y[i + stride]
                y[i], y[i + stride] = np.float32(a + b), np.float32(a - b)
        stride *= 2
    return y * np.float32(1.0 / math.sqrt(d))


DIMS = [1, 2, 4, 16, 32, 64, 96, 128, 256]
POWERS = [d for d in DIMS if d & (d - 1) == 0]


@pytest.mark.parametrize("d", POWERS)
def test_hadamard_is_the_matrix(d):
    x = torch.from_numpy(np.random.default_rng(d).standard_normal((50, d)).astype(np.float32))
    expected = x.double().numpy() @ walsh(d) / math.sqrt(d)
    assert np.abs(formats.hadamard(x).double().numpy() - expected).max() < 3e-6
    assert (formats.hadamard(formats.hadamard(x)) - x).abs().max() < 3e-6


@pytest.mark.parametrize("d", POWERS)
def test_hadamard_is_exact_on_integers_up_to_its_factor(d):
    x = np.random.default_rng(d).integers(-1000, 1000, (20, d))
    expected = (x @ walsh(d)).astype(np.float32) * np.float32(1.0 / math.sqrt(d))
    assert np.array_equal(formats.hadamard(torch.from_numpy(x)).numpy(), expected)


@pytest.mark.parametrize("d", [4, 16, 64, 256])
def test_hadamard_twice_is_exactly_the_input_on_integers_where_the_factor_is_a_power_of_two(d):
    x = torch.from_numpy(np.random.default_rng(d).integers(-1000, 1000, (20, d)).astype(np.float32))
    assert torch.equal(formats.hadamard(formats.hadamard(x)), x)


@pytest.mark.parametrize("d", [16, 32, 128])
def test_hadamard_has_one_order(d):
    x = torch.from_numpy(np.random.default_rng(d).standard_normal((12, d)).astype(np.float32) * 1e3)
    y = formats.hadamard(x)
    for row, expected in zip(x.numpy(), y.numpy(), strict=True):
        assert np.array_equal(butterfly(row), expected)
    assert torch.equal(formats.hadamard(x.view(3, 2, 2, d)), y.view(3, 2, 2, d))
    assert torch.equal(formats.hadamard(x[4]), y[4])
    assert torch.equal(formats.hadamard(x.t().contiguous().t()), y), "strides along d"
    assert torch.equal(formats.hadamard(x[:1].expand(5, d)), y[:1].expand(5, d))
    assert torch.equal(formats.hadamard(x[:, None].expand(12, 3, d)[::2]), y[::2, None].expand(6, 3, d))


def test_hadamard_of_half_precision_is_in_fp32():
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    y = formats.hadamard(x)
    assert y.dtype == torch.float32
    assert torch.equal(y, formats.hadamard(x.float()))


@pytest.mark.parametrize("d", [3, 96, 80])
def test_hadamard_refuses_other_dimensions(d):
    with pytest.raises(ValueError, match=rf"power-of-two head dimension, got {d}"):
        formats.hadamard(torch.zeros(2, d))


def halving_sum(row):
    while len(row) > 1 and len(row) % 2 == 0:
        half = len(row) // 2
        row = [np.float32(a + b) for a, b in zip(row[:half], row[half:], strict=True)]
    total = row[0]
    for x in row[1:]:
        total = np.float32(total + x)
    return total


@pytest.mark.parametrize("n", [1, 2, 3, 5, 6, 7, 8, 12, 31, 32, 64, 80, 96, 128, 256])
def test_tree_sum_has_one_order(n):
    rng = np.random.default_rng(n)
    x = (rng.standard_normal((40, n)) * np.exp2(rng.integers(-8, 8, (40, n)))).astype(np.float32)
    y = formats.tree_sum(torch.from_numpy(x))
    assert y.shape == (40,)
    assert np.array_equal(y.numpy(), np.array([halving_sum(list(row)) for row in x]))
    assert np.allclose(y.numpy(), x.astype(np.float64).sum(-1), rtol=0, atol=1e-3 * np.abs(x).max())
    strided = torch.from_numpy(x).t().contiguous().t()
    assert torch.equal(formats.tree_sum(strided), y)
    assert torch.equal(formats.tree_sum(torch.from_numpy(x).view(8, 5, n)), y.view(8, 5))


def test_tree_sum_order_matters_here():
    x = torch.tensor([1e8, 1.0, -1e8, 1.0])
    assert formats.tree_sum(x).item() == 2.0  # (1e8 - 1e8) + (1 + 1); left to right it would be 1
