"""Single instructions against Python integers, NumPy, and fractions."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest

from kernels import lanes, run
from softgpu.formats import DECODE, MINIFLOATS, encode, f32_to_bf16

M32 = 0xFFFFFFFF
RNG = np.random.default_rng(0)
A = RNG.integers(0, 1 << 32, 64, dtype=np.uint64).astype(np.uint32)
B = RNG.integers(0, 1 << 32, 64, dtype=np.uint64).astype(np.uint32)
C = RNG.integers(0, 1 << 32, 64, dtype=np.uint64).astype(np.uint32)
SMALL = RNG.integers(0, 40, 64).astype(np.uint32)


def s32(x):
    return (int(x) ^ 0x80000000) - 0x80000000


@pytest.mark.parametrize(
    ("text", "function"),
    [
        ("add.s32 %r1, %r10, %r11;", lambda a, b: a + b),
        ("sub.u32 %r1, %r10, %r11;", lambda a, b: a - b),
        ("mul.lo.s32 %r1, %r10, %r11;", lambda a, b: a * b),
        ("mul.hi.u32 %r1, %r10, %r11;", lambda a, b: (a * b) >> 32),
        ("mul.hi.s32 %r1, %r10, %r11;", lambda a, b: (s32(a) * s32(b)) >> 32),
        ("mad.lo.s32 %r1, %r10, %r11, 7;", lambda a, b: a * b + 7),
        ("and.b32 %r1, %r10, %r11;", lambda a, b: a & b),
        ("xor.b32 %r1, %r10, %r11;", lambda a, b: a ^ b),
        ("not.b32 %r1, %r10;", lambda a, b: ~a),
        ("max.s32 %r1, %r10, %r11;", lambda a, b: max(s32(a), s32(b))),
        ("min.u32 %r1, %r10, %r11;", min),
        ("min.relu.s32 %r1, %r10, %r11;", lambda a, b: max(min(s32(a), s32(b)), 0)),
        ("max.relu.s32 %r1, %r10, %r11;", lambda a, b: max(s32(a), s32(b), 0)),
        ("div.u32 %r1, %r10, %r11;", lambda a, b: a // b),
        ("rem.u32 %r1, %r10, %r11;", lambda a, b: a % b),
        ("div.s32 %r1, %r10, %r11;", lambda a, b: int(Fraction(s32(a), s32(b)))),
        ("popc.b32 %r1, %r10;", lambda a, b: a.bit_count()),
        ("clz.b32 %r1, %r10;", lambda a, b: 32 - a.bit_length()),
        ("brev.b32 %r1, %r10;", lambda a, b: int(f"{a:032b}"[::-1], 2)),
        ("bfind.u32 %r1, %r10;", lambda a, b: a.bit_length() - 1),
        ("bfe.u32 %r1, %r10, 5, 9;", lambda a, b: (a >> 5) & 511),
        ("bfe.s32 %r1, %r10, 5, 9;", lambda a, b: ((a >> 5) & 511) - (((a >> 13) & 1) << 9)),
        ("bfi.b32 %r1, %r10, %r11, 4, 8;", lambda a, b: (b & ~0xFF0) | ((a & 255) << 4)),
        ("shf.l.wrap.b32 %r1, %r10, %r11, 12;", lambda a, b: ((b << 32 | a) << 12) >> 32),
        ("lop3.b32 %r1, %r10, %r11, %r10, 0x3c;", lambda a, b: a ^ b),
        ("cvt.s32.s8 %r1, %r10;", lambda a, b: (a & 255) - ((a & 128) << 1)),
        ("abs.s32 %r1, %r10;", lambda a, b: abs(s32(a))),
    ],
)
def test_integer(text, function):
    got = lanes(text, A, B)
    assert [int(x) for x in got] == [function(int(a), int(b)) & M32 for a, b in zip(A, B, strict=True)]


@pytest.mark.parametrize("op", ["shl.b32", "shr.u32", "shr.s32"])
def test_shift_amounts_are_clamped(op):
    got = lanes(f"{op} %r1, %r10, %r11;", A, SMALL)
    for a, n, g in zip(A.tolist(), SMALL.tolist(), got.tolist(), strict=True):
        want = a << n if op == "shl.b32" else (a if op == "shr.u32" else s32(a)) >> n
        assert g == want & M32


def test_prmt_selects_and_replicates_signs():
    got = lanes("prmt.b32 %r1, %r10, %r11, 0xB174;", A, B)
    pool = (B.astype(np.uint64) << np.uint64(32)) | A
    byte = lambda n: (pool >> np.uint64(8 * n)) & np.uint64(255)  # noqa: E731
    sign = np.where(byte(3) & np.uint64(128), np.uint64(255), np.uint64(0))
    want = byte(4) | byte(7) << np.uint64(8) | byte(1) << np.uint64(16) | sign << np.uint64(24)
    assert (got == want.astype(np.uint32)).all()


def test_wide_products_and_64_bits():
    got = lanes("mul.wide.s32 %d20, %r10, %r11;", A, B, out=np.int64)
    assert got.tolist() == [s32(a) * s32(b) for a, b in zip(A, B, strict=True)]
    wide = RNG.integers(0, 1 << 63, 64, dtype=np.uint64)
    got = lanes("mul.hi.u64 %d20, %d10, %d10;", wide, out=np.uint64)
    assert got.tolist() == [int(w) ** 2 >> 64 for w in wide]


FLOATS = (RNG.standard_normal(64) * np.exp2(RNG.integers(-20, 20, 64))).astype(np.float32)
OTHERS = RNG.standard_normal(64).astype(np.float32)


def test_fma_rounds_once():
    third = -(FLOATS * OTHERS)
    got = lanes("fma.rn.f32 %r1, %r10, %r11, %r12;", FLOATS, OTHERS, third, out=np.float32)
    exact = [
        Fraction(float(a)) * Fraction(float(b)) + Fraction(float(c))
        for a, b, c in zip(FLOATS, OTHERS, third, strict=True)
    ]
    assert got.tolist() == [np.float32(float(x)) for x in exact]


@pytest.mark.parametrize("mode", ["rm", "rp", "rz"])
def test_directed_rounding(mode):
    got = lanes(f"add.{mode}.f32 %r1, %r10, %r11;", FLOATS, OTHERS, out=np.float32)
    for a, b, g in zip(FLOATS.tolist(), OTHERS.tolist(), got, strict=True):
        exact = Fraction(a) + Fraction(b)
        down = g if Fraction(float(g)) <= exact else np.nextafter(g, np.float32(-np.inf))
        up = g if Fraction(float(g)) >= exact else np.nextafter(g, np.float32(np.inf))
        assert np.nextafter(down, np.float32(np.inf)) >= up
        want = {"rm": down, "rp": up, "rz": down if exact > 0 else up}[mode]
        assert g == want


def test_packed_pairs():
    got = lanes(
        "mov.b64 %d30, {%r10, %r11}; mov.b64 %d31, {%r11, %r10}; fma.rn.f32x2 %d32, %d30, %d31, %d30; "
        "mov.b64 {%r2, %r1}, %d32;",
        FLOATS, OTHERS, out=np.float32,
    )  # fmt: skip
    want = (FLOATS.astype(np.float64) * OTHERS + OTHERS).astype(np.float32)
    assert (got == want).all()


def test_comparisons_with_nan():
    x = np.array([1, np.nan, 2, np.nan] * 8, np.float32)
    y = np.array([1, 1, 1, np.nan] * 8, np.float32)
    for cmp, want in {
        "eq": "1000",
        "ne": "0010",
        "equ": "1101",
        "neu": "0111",
        "ltu": "0101",
        "ge": "1010",
        "nan": "0101",
    }.items():
        got = lanes(f"setp.{cmp}.f32 %p1, %r10, %r11; selp.b32 %r1, 1, 0, %p1;", x, y)
        assert "".join(map(str, got[:4])) == want, cmp


def test_max_ignores_nan_and_takes_three():
    x, y = np.array([np.nan] * 32, np.float32), np.arange(32, dtype=np.float32)
    assert (lanes("max.f32 %r1, %r10, %r11;", x, y, out=np.float32) == y).all()
    got = lanes("max.f32 %r1, %r10, %r11, %r12;", x, y, y[::-1].copy(), out=np.float32, target="sm_100a")
    assert (got == np.maximum(y, y[::-1])).all()


def test_cvt_bf16x2_puts_the_first_operand_high():
    got = lanes("cvt.rn.bf16x2.f32 %r1, %r10, %r11;", FLOATS, OTHERS)
    assert (got == (f32_to_bf16(FLOATS).astype(np.uint32) << 16 | f32_to_bf16(OTHERS))).all()


@pytest.mark.parametrize("name", MINIFLOATS)
def test_minifloats_round_to_the_nearest_even(name):
    table = DECODE[name].astype(np.float64)
    half = len(table) // 2
    grid = table[:half][np.isfinite(table[:half])]
    values = np.concatenate([grid, (grid[1:] + grid[:-1]) / 2, grid * 1.01, [grid[-1] * 3]]).astype(np.float32)
    for v, code in zip(values.tolist(), encode(values, name).tolist(), strict=True):
        distance = np.abs(grid - v)
        best = np.flatnonzero(distance == distance.min())
        want = best[0] if best.size == 1 else best[best % 2 == 0][0]
        assert code == want, (v, code, want)
    assert (encode(-values, name) == encode(values, name) + half).all()


def test_cvt_e4m3x2_and_back():
    got = lanes("cvt.rn.satfinite.e4m3x2.f32 %h1, %r10, %r11; cvt.rn.f16x2.e4m3x2 %r1, %h1;", OTHERS, FLOATS)
    want = [
        DECODE["e4m3"][encode(x, "e4m3")].astype(np.float16).view(np.uint16).astype(np.uint32) for x in (OTHERS, FLOATS)
    ]
    assert (got == (want[0] << 16 | want[1])).all()


def test_float_to_integer_clamps():
    x = np.array([0.5, 1.5, -2.5, 3e9, -3e9, np.nan, np.inf, -0.7] * 4, np.float32)
    got = lanes("cvt.rni.s32.f32 %r1, %r10;", x, out=np.int32)
    assert got[:8].tolist() == [0, 2, -2, 2**31 - 1, -(2**31), 0, 2**31 - 1, -1]


@pytest.mark.parametrize("mode", ["bfly", "down", "up", "idx"])
def test_shuffle(mode):
    x = np.arange(32, dtype=np.uint32) * 7
    c = 0 if mode == "up" else 31
    got = lanes(f"shfl.sync.{mode}.b32 %r1|%p1, %r10, 5, {c}, -1;", x)
    lane = np.arange(32)
    source = {"bfly": lane ^ 5, "down": lane + 5, "up": lane - 5, "idx": lane * 0 + 5}[mode]
    source = np.where((source < 0) | (source > 31), lane, source)
    assert (got == x[source]).all()


def test_vote_and_elect():
    x = np.arange(64, dtype=np.uint32)
    got = lanes("setp.gt.u32 %p1, %r10, 40; vote.sync.ballot.b32 %r1, %p1, -1;", x)
    assert got[0] == 0
    assert got[40] == sum(1 << (k - 32) for k in range(41, 64))
    got = lanes("elect.sync %r2|%p1, -1; selp.b32 %r1, 1, 0, %p1;", x)
    assert np.flatnonzero(got).tolist() == [0, 32]


def test_matrix_loads_are_transposes_of_each_other():
    out = np.zeros((2, 32), np.uint32)
    body = """
	mov.u32 %r1, dynamic; shl.b32 %r2, %r0, 4; add.s32 %r3, %r1, %r2; mul.lo.u32 %r4, %r0, 8;
	add.s32 %r5, %r4, 1; shl.b32 %r6, %r5, 16; or.b32 %r6, %r6, %r4;
	add.s32 %r8, %r6, 131074; add.s32 %r9, %r8, 131074; add.s32 %r10, %r9, 131074;
	st.shared.v4.b32 [%r3], {%r6, %r8, %r9, %r10};
	bar.sync 0;
	ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%r20}, [%r3];
	ldmatrix.sync.aligned.m8n8.x1.trans.shared.b16 {%r21}, [%r3];
	mul.wide.u32 %d5, %r0, 4; add.s64 %d6, %d0, %d5; st.global.b32 [%d6], %r20; st.global.b32 [%d6+128], %r21;"""
    run(body, out, shared=1024)
    tile = np.arange(64, dtype=np.uint16).reshape(8, 8)
    assert (out[0].view(np.uint16).reshape(8, 8) == tile).all()
    assert (out[1].view(np.uint16).reshape(8, 8) == tile.T).all()


def test_stochastic_rounding_is_between_neighbours_and_unbiased():
    n = 4096
    x = np.full(n, 1.30078125, np.float32)
    bits = np.random.default_rng(1).integers(0, 1 << 32, n, dtype=np.uint64).astype(np.uint32)
    table = DECODE["e4m3"]
    parts = [slice(k, k + 1024) for k in range(0, n, 1024)]
    text = "cvt.rs.satfinite.e4m3x4.f32 %r1, {%r10, %r10, %r10, %r10}, %r11;"
    got = np.concatenate([lanes(text, x[p], bits[p], target="sm_100a") for p in parts])
    values = table[got.view(np.uint8).reshape(n, 4)]
    assert set(np.unique(values)) == {1.25, 1.375}
    assert np.abs(values.mean(0) - x[0]).max() < 0.005
    assert (table[lanes(text, x[:64], bits[:64] * 0, target="sm_100a").view(np.uint8)] == 1.25).all()


@pytest.mark.parametrize(("kind", "kept"), [("bf16x2", 7), ("f16x2", 10)])
def test_stochastic_rounding_adds_the_bits_it_is_given(kind, kept):
    x = np.full(64, 1 + 2.0**-kept * 0.625, np.float32)
    count = 23 - kept
    limit = (1 << count) - int(0.625 * (1 << count))
    for random, up in ((0, False), (limit - 1, False), (limit, True), ((1 << count) - 1, True)):
        bits = np.full(64, random << 16, np.uint32)
        got = lanes(f"cvt.rs.{kind}.f32 %r1, %r10, %r10, %r11;", x, bits, target="sm_100a")
        one = 0x3F80 if kind == "bf16x2" else 0x3C00
        assert (got >> 16 == one + up).all()
        assert (got & 0xFFFF == one).all()


@pytest.mark.parametrize("kind", ["bf16", "f16"])
@pytest.mark.parametrize("op", ["max", "min"])
@pytest.mark.parametrize("keep", ["", ".NaN"])
def test_extremes_of_16_bits_with_a_nan(kind, op, keep):
    """A NaN loses against a number, or with .NaN wins; in both halves of a pair and alone."""
    x = np.where(np.arange(64) % 5 == 0, np.nan, RNG.standard_normal(64)).astype(np.float32)
    y = np.where(np.arange(64) % 7 == 0, np.nan, RNG.standard_normal(64)).astype(np.float32)
    pair = f"cvt.rn.{kind}x2.f32 %r20, %r10, %r11; cvt.rn.{kind}x2.f32 %r21, %r11, %r10;"
    halves = "mov.b32 {{%h1, %h2}}, {0};"
    alone = lanes(f"{pair} {halves.format('%r20')} {op}{keep}.{kind} %h3, %h1, %h2; mov.b32 %r1, {{%h3, %h3}};", x, y)
    both = lanes(f"{pair} {op}{keep}.{kind}x2 %r1, %r20, %r21;", x, y)

    def numbers(raw):
        low = (raw & 0xFFFF).astype(np.uint16)
        return (raw << 16).view(np.float32) if kind == "bf16" else low.view(np.float16).astype(np.float32)

    a, b = (numbers(lanes(f"cvt.rn.{kind}x2.f32 %r1, %r10, %r10;", z)) for z in (x, y))
    function = {"max": np.fmax, "min": np.fmin, "max.NaN": np.maximum, "min.NaN": np.minimum}[op + keep]
    for got in (alone, both, both >> np.uint32(16)):
        assert np.array_equal(numbers(got), function(a, b), equal_nan=True)


def test_indexed_branches():
    body = """
targets: .branchtargets first, second, third;
    and.b32 %r20, %r10, 1;
    add.u32 %r20, %r20, %r11;
    mov.u32 %r1, 0;
    brx.idx %r20, targets;
first:
    add.u32 %r1, %r1, 100;
second:
    add.u32 %r1, %r1, 10;
third:
    add.u32 %r1, %r1, 1;
"""
    one = np.arange(64, dtype=np.uint32) // 3 % 2
    got = lanes(body, A, one)
    assert (got == np.array([111, 11, 1])[(A & 1) + one]).all()


def test_parameters_by_an_address_in_a_register():
    pointers = [np.zeros(1, np.uint64) for _ in range(2)]
    body = """
    mov.b32 %r1, p0;
    mov.b32 %r2, p1;
    setp.eq.u32 %p1, %r0, 0;
    selp.b32 %r3, %r1, %r2, %p1;
    ld.param.b64 %d10, [%r3];
    st.global.u64 [%d10], %d10;
"""
    run(body, *pointers, threads=2)
    assert [int(x[0]) for x in pointers] == [x.ctypes.data for x in pointers]
