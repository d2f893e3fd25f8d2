"""Number formats inside Triton kernels: bit for bit what ``flamia.formats`` computes, compiled or interpreted.

Rounding works on the bits of FP32 numbers, which is exact in both worlds; the one exception is E4M3. Compiled code
leaves it to the hardware's conversion (``cvt.rn.satfinite.e4m3x2``: same results, a tenth of the instructions), but
Triton's interpreter loses the carry of that conversion. Kernels that add must be launched ``exact`` so that no product
is fused into a sum.

Tiles. A kernel holds a tile of tokens x D as four chunks of D/4 columns (two of 16 at D = 32, three of 32 at D = 96;
the others are zeros). Every thread then owns the same columns of all chunks, so that the two widest strides of the
butterfly, and the first halvings of a tree sum, are plain additions between registers.
"""

# Kernels take pointers and tiles, which have no Python types.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls

from __future__ import annotations

import os

import triton
import triton.language as tl

COMPILED = tl.constexpr(os.environ.get("TRITON_INTERPRET", "0") != "1")

NAN_BITS = tl.constexpr(0x7FC00000)
INFINITY_BITS = tl.constexpr(0x7F800000)

# format -> (exponent, significand bits) of its largest value, as formats._LARGEST
E4M3_EMAX = tl.constexpr(8)
E4M3_LIMIT = tl.constexpr(0x600000)
E2M1_EMAX = tl.constexpr(2)
E2M1_LIMIT = tl.constexpr(0x400000)
NVFP4_EMAX = tl.constexpr(11)
NVFP4_LIMIT = tl.constexpr(0x280000)


# ------------------------------------------------------------------------------------------------- bits and scales


@triton.jit
def bits(x):
    """FP32 -> its bits, int32."""
    return x.to(tl.int32, bitcast=True)


@triton.jit
def magnitude(x):
    """FP32 -> bits of |x|. They order as the magnitudes do, with NaN above infinity, so that maxima keep a NaN."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def e8m0_exponent(amax, EMAX: tl.constexpr, LIMIT: tl.constexpr):
    """Shared exponent (int32) of blocks whose largest magnitude has the bits ``amax``, rounded up."""
    e = (amax >> 23) - 127 - EMAX + ((amax & 0x7FFFFF) > LIMIT).to(tl.int32)
    return tl.where(amax >= INFINITY_BITS, 128, tl.maximum(e, -126))


@triton.jit
def pow2(e):
    """2^e, FP32, e clamped to [-126, 127]; +-128, the exponent of NaN, gives NaN."""
    value = (tl.minimum(tl.maximum(e, -126), 127) + 127) << 23
    return tl.where((e == 128) | (e == -128), NAN_BITS, value).to(tl.float32, bitcast=True)


@triton.jit
def ceil_log2(x):
    """ceil(log2 x) of non-negative FP32 numbers, int32, at least -126."""
    b = bits(x)
    return tl.maximum(((b >> 23) & 255) - 127 + ((b & 0x7FFFFF) != 0).to(tl.int32), -126)


@triton.jit
def exp2_exact(x):
    """2^x of FP32 numbers rounded to FP32, through FP64, as reference.exponentials.exp2."""
    return tl.exp(x.to(tl.float64) * 0.6931471805599453).to(tl.float32)


# ------------------------------------------------------------------------------------------------- element formats


@triton.jit
def encode_e4m3(y, HARDWARE: tl.constexpr):
    """FP32 -> E4M3 codes (uint8), nearest even, saturating; NaN (and infinity in the bit version) -> 0x7F.

    ``HARDWARE`` takes the chip's conversion, which saturates an infinity: no caller makes one, since a block with an
    infinity is scaled by NaN.
    """
    if HARDWARE:
        return y.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    a = magnitude(y)
    normal = ((a + 0x7FFFF + ((a >> 20) & 1)) >> 20) - 960
    # Below 2^-6 codes count units of 2^-9, which are the last bits of a sum with 2^14.
    small = bits(a.to(tl.float32, bitcast=True) + 16384.0) & 15
    code = tl.where(a < 0x3C800000, small, tl.minimum(normal, 0x7E))
    code = tl.where(a >= INFINITY_BITS, 0x7F, code | ((bits(y) >> 24) & 0x80))
    return code.to(tl.uint8)


@triton.jit
def quarters(x, R: tl.constexpr, W: tl.constexpr):
    """Columns 4i, 4i + 1, 4i + 2 and 4i + 3 of x [R, W], each [R, W / 4]. Registers only where a thread holds all."""
    even, odd = tl.split(tl.reshape(x, (R, W // 4, 2, 2)))
    x0, x2 = tl.split(even)
    x1, x3 = tl.split(odd)
    return x0, x1, x2, x3


@triton.jit
def from_quarters(x0, x1, x2, x3, R: tl.constexpr, W: tl.constexpr):
    """Inverse of ``quarters``."""
    return tl.reshape(tl.join(tl.join(x0, x2), tl.join(x1, x3)), (R, W))


@triton.jit
def e4m3_words(x0, x1, x2, x3):
    """Four FP32 tensors -> their E4M3 codes in one int32 tensor, x0 in the lowest byte.

    Codes travel between threads four at a time: tensors of bytes would be moved byte by byte. The two pairs must not be
    the same: ptxas 12.8 makes one conversion of two equal ones and leaves half of the word undefined.
    """
    if COMPILED:
        return tl.inline_asm_elementwise(
            """{
            .reg .b16 low, high;
            cvt.rn.satfinite.e4m3x2.f32 low, $2, $1;
            cvt.rn.satfinite.e4m3x2.f32 high, $4, $3;
            mov.b32 $0, {low, high};
            }""",
            "=r,f,f,f,f",
            [x0, x1, x2, x3],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )
    else:
        codes = encode_e4m3(tl.join(tl.join(x0, x1), tl.join(x2, x3)), False).to(tl.int32)
        low, high = tl.split(codes)
        c0, c1 = tl.split(low)
        c2, c3 = tl.split(high)
        return c0 | (c1 << 8) | (c2 << 16) | (c3 << 24)


@triton.jit
def e4m3_codes(x):
    """FP32 -> E4M3 codes, int32 0..255. Not ``e4m3_words`` of x four times, whose pairs are the same."""
    if COMPILED:
        return tl.inline_asm_elementwise(
            """{
            .reg .b16 pair, none;
            .reg .f32 zero;
            mov.f32 zero, 0f00000000;
            mov.b16 none, 0;
            cvt.rn.satfinite.e4m3x2.f32 pair, zero, $1;
            mov.b32 $0, {pair, none};
            }""",
            "=r,f",
            [x],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )
    else:
        return encode_e4m3(x, False).to(tl.int32)


@triton.jit
def e4m3_values(words):
    """The FP32 values of the codes in int32 words, lowest byte first."""
    if COMPILED:
        return tl.inline_asm_elementwise(
            """{
            .reg .b16 low, high, a, b, c, d;
            .reg .b32 pair;
            mov.b32 {low, high}, $4;
            cvt.rn.f16x2.e4m3x2 pair, low;
            mov.b32 {a, b}, pair;
            cvt.rn.f16x2.e4m3x2 pair, high;
            mov.b32 {c, d}, pair;
            cvt.f32.f16 $0, a;
            cvt.f32.f16 $1, b;
            cvt.f32.f16 $2, c;
            cvt.f32.f16 $3, d;
            }""",
            "=f,=f,=f,=f,r",
            [words],
            dtype=(tl.float32, tl.float32, tl.float32, tl.float32),
            is_pure=True,
            pack=1,
        )
    else:
        low = tl.join(words & 255, words >> 8 & 255)
        high = tl.join(words >> 16 & 255, words >> 24 & 255)
        v01, v23 = tl.split(decode_e4m3(tl.join(low, high), False))
        v0, v1 = tl.split(v01)
        v2, v3 = tl.split(v23)
        return v0, v1, v2, v3


@triton.jit
def _byte(w0, w1, w2, w3, SHIFT: tl.constexpr):
    b0, b1, b2, b3 = w0 >> SHIFT & 255, w1 >> SHIFT & 255, w2 >> SHIFT & 255, w3 >> SHIFT & 255
    return b0 | (b1 << 8) | (b2 << 16) | (b3 << 24)


@triton.jit
def transpose_bytes(w0, w1, w2, w3):
    """Byte j of word i becomes byte i of word j, of four int32 tensors."""
    if COMPILED:
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 a, b, c, d;
            prmt.b32 a, $4, $5, 0x5140;
            prmt.b32 b, $6, $7, 0x5140;
            prmt.b32 c, $4, $5, 0x7362;
            prmt.b32 d, $6, $7, 0x7362;
            prmt.b32 $0, a, b, 0x5410;
            prmt.b32 $1, a, b, 0x7632;
            prmt.b32 $2, c, d, 0x5410;
            prmt.b32 $3, c, d, 0x7632;
            }""",
            "=&r,=&r,=&r,=&r,r,r,r,r",
            [w0, w1, w2, w3],
            dtype=(tl.int32, tl.int32, tl.int32, tl.int32),
            is_pure=True,
            pack=1,
        )
    else:
        return (
            _byte(w0, w1, w2, w3, 0),
            _byte(w0, w1, w2, w3, 8),
            _byte(w0, w1, w2, w3, 16),
            _byte(w0, w1, w2, w3, 24),
        )


@triton.jit
def decode_e4m3(codes, HARDWARE: tl.constexpr):
    """E4M3 codes (uint8) -> FP32, by the chip's conversion or from the bits."""
    if HARDWARE:
        return codes.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    c = codes.to(tl.int32)
    a = c & 0x7F
    normal = ((a << 20) + 0x3C000000).to(tl.float32, bitcast=True)
    small = a.to(tl.float32) * 0.001953125
    value = tl.where(a < 8, small, normal)
    value = tl.where(a == 0x7F, NAN_BITS, bits(value)) | ((c & 0x80) << 24)
    return value.to(tl.float32, bitcast=True)


@triton.jit
def encode_e2m1(y):
    """FP32 -> E2M1 codes 0..15 (int32), nearest even, saturating at 6, the sign of zero kept."""
    a = tl.minimum(tl.abs(y), 6.0)
    # Codes step by half of the power of two below (1, 2 or 4), which is the last bit of a sum with 2^22 times it. One
    # more power is two more steps: these and the power's own exponent, twice over, make the sum's last bits the code.
    power = bits(tl.maximum(a, 1.0)) & 0x7F800000
    total = tl.fma(power.to(tl.float32, bitcast=True), 4194305.0, a)
    return ((bits(total) + (power >> 22)) & 7) | ((bits(y) >> 28) & 8)


@triton.jit
def decode_e2m1(codes):
    """E2M1 codes 0..15 (int32) -> FP32; zeros lose no sign."""
    a = codes & 7
    normal = ((a << 22) + 0x3F000000).to(tl.float32, bitcast=True)
    value = tl.where(a < 2, a.to(tl.float32) * 0.5, normal)
    return (bits(value) | ((codes & 8) << 28)).to(tl.float32, bitcast=True)


@triton.jit
def _sixth(x):
    """x / 6 within an ulp, and exact where that is a number of few bits: E4M3 codes of it are those of x / 6.

    One correction of a product leaves an error below 2^-42 before the last rounding; FP32 numbers next to 6 ties are
    farther from them than that. Of an infinity the correction makes NaN.
    """
    q = x * 0.1666666716337204
    return tl.fma(tl.fma(q, -6.0, x), 0.1666666716337204, q)


@triton.jit
def _nvfp4_scale(amax):
    """Bits of groups' largest magnitudes -> UE4M3 codes (int32) and scales: not positive where all codes are 0."""
    code = e4m3_codes(_sixth(amax.to(tl.float32, bitcast=True)))
    scale, _, _, _ = e4m3_values(code)
    return code, scale


@triton.jit
def _split_eight(x):
    even, odd = tl.split(x)
    x04, x26 = tl.split(even)
    x15, x37 = tl.split(odd)
    x0, x4 = tl.split(x04)
    x1, x5 = tl.split(x15)
    x2, x6 = tl.split(x26)
    x3, x7 = tl.split(x37)
    return x0, x1, x2, x3, x4, x5, x6, x7


@triton.jit
def eighths(x, R: tl.constexpr, W: tl.constexpr):
    """Columns 8i + j of x [R, W] for j = 0 ... 7, each [R, W / 8]. Registers only where a thread holds all."""
    return _split_eight(tl.reshape(x, (R, W // 8, 2, 2, 2)))


@triton.jit
def largest_of_eight(x0, x1, x2, x3, x4, x5, x6, x7):
    """Bits of the largest magnitude of eight."""
    a = tl.maximum(_larger(x0, x1), _larger(x2, x3), propagate_nan=tl.PropagateNan.ALL)
    b = tl.maximum(_larger(x4, x5), _larger(x6, x7), propagate_nan=tl.PropagateNan.ALL)
    return magnitude(tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL))


_SELECT = "lop3.b32 {}, {}, {}, 0x{:08X}, 0xE4;"  # bits of the first where the mask has ones, else of the second
_FIRST_SUM = 0x4B7FFFFA  # 2^24 - 6, FP32


def _word_assembly(quotient: str) -> str:
    """PTX that makes $0, a word of E2M1 codes of eight quotients; ``quotient`` computes q of x, one of $1 ... $8.

    The code of a magnitude a <= 6 is 2a below 2, a + 2 below 4 and a / 2 + 4 from there, rounded to nearest even. A sum
    whose last bit is worth 1 and, from the next power of two on, 2 makes the last two: a + (2^24 - 4). The smaller of
    it and of 2a + (2^24 - 6), rounded once each, has the bits of a constant plus the code; rounding keeps their order.
    Eight such integers become a word in eight steps, modulo 2^32. Signs are those of x: a permutation of bytes repeats
    the sign of one in the lower and that of another in the upper half of a register, and four of those are merged by
    masks.
    """
    lines = [".reg .f32 q, a, b;", ".reg .b32 i, j, low, m, n;"]
    lines += [f".reg .b32 c{e};" for e in range(8)] + [f".reg .b32 s{e};" for e in range(4)]
    for e in range(8):
        lines += [
            quotient.replace("x", f"${e + 1}"),
            "abs.f32 q, q; min.f32 q, q, 0f40C00000;",  # 6
            f"fma.rn.f32 a, q, 0f40000000, 0f{_FIRST_SUM:08X}; add.rn.f32 b, q, 0f{_FIRST_SUM + 2:08X};",
            f"mov.b32 i, a; mov.b32 j, b; min.s32 c{e}, i, j;",
        ]
    lines += ["mad.lo.s32 low, c7, 16, c6;"] + [f"mad.lo.s32 low, low, 16, c{e};" for e in range(5, -1, -1)]
    lines += [f"sub.s32 low, low, 0x{_FIRST_SUM * 0x11111111 % 2**32:08X};"]
    lines += [f"mov.b32 i, ${e + 1}; mov.b32 j, ${e + 5}; prmt.b32 s{e}, i, j, 0xFFBB;" for e in range(4)]
    lines += [_SELECT.format("m", "s0", "s1", 0x000F000F), _SELECT.format("n", "s2", "s3", 0x0F000F00)]
    lines += [_SELECT.format("m", "m", "n", 0x00FF00FF), _SELECT.format("$0", "m", "low", 0x88888888)]
    return "{" + "\n".join(lines) + "}"


def _short_assembly() -> str:
    """The same for products of $9 and numbers of at most 11 significant bits, as BF16 and FP16 tensors hold.

    FP16 tells such a quotient from a tie, so that two elements at a time are rounded: by sums with 2^11.
    """
    first = 0x67FA  # 2^11 - 6
    lines = [".reg .f32 x, y;", ".reg .b32 a, b, low, m, n, six, two, ma, mb;"]
    lines += [f".reg .b32 c{e}, q{e};" for e in range(4)]
    values = (("six", 0x4600), ("two", 0x4000), ("ma", first), ("mb", first + 2))
    lines += [f"mov.b32 {name}, 0x{bits:04X}{bits:04X};" for name, bits in values]
    for e in range(4):
        lines += [
            f"mul.rn.f32 x, ${e + 1}, $9; mul.rn.f32 y, ${e + 5}, $9; cvt.rn.f16x2.f32 q{e}, y, x;",
            f"abs.f16x2 a, q{e}; min.f16x2 a, a, six;",
            f"fma.rn.f16x2 b, a, two, ma; add.rn.f16x2 a, a, mb; min.f16x2 c{e}, b, a;",
        ]
    lines += ["mad.lo.s32 low, c3, 16, c2; mad.lo.s32 low, low, 16, c1; mad.lo.s32 low, low, 16, c0;"]
    lines += [f"sub.s32 low, low, 0x{first * 0x00010001 * 0x1111 % 2**32:08X};"]  # the sums' leading bits
    lines += ["shr.u32 q0, q0, 12; shr.u32 q1, q1, 8; shr.u32 q2, q2, 4;"]
    lines += [_SELECT.format("m", "q0", "q1", 0x000F000F), _SELECT.format("n", "q2", "q3", 0x0F000F00)]
    lines += [_SELECT.format("m", "m", "n", 0x00FF00FF), _SELECT.format("$0", "m", "low", 0x88888888)]
    return "{" + "\n".join(lines) + "}"


_SHORT = tl.constexpr(_short_assembly())
_DIVIDED = tl.constexpr(_word_assembly("mul.rn.f32 q, x, $10; fma.rn.f32 q, x, $9, q;"))
_SCALED = tl.constexpr(_word_assembly("mul.rn.f32 q, x, $9;"))


@triton.jit
def _encoded_word(x04, x26, x15, x37):
    codes = encode_e2m1(tl.join(tl.join(x04, x26), tl.join(x15, x37)))
    c0, c1, c2, c3, c4, c5, c6, c7 = _split_eight(codes)
    low = c0 | (c1 << 4) | (c2 << 8) | (c3 << 12)
    return low | ((c4 | (c5 << 4) | (c6 << 8) | (c7 << 12)) << 16)


@triton.jit
def e2m1_words(x0, x1, x2, x3, x4, x5, x6, x7, scale, SHORT: tl.constexpr):
    """E2M1 codes of eight tensors times a power of two, one int32 a word, x0 in the lowest four bits.

    SHORT: their numbers have at most 11 significant bits.
    """
    if COMPILED:
        return tl.inline_asm_elementwise(
            _SHORT if SHORT else _SCALED,
            "=r,f,f,f,f,f,f,f,f,f",
            [x0, x1, x2, x3, x4, x5, x6, x7, scale],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )
    else:
        s = scale[:, :, None]
        x04, x26, x15, x37 = tl.join(x0, x4), tl.join(x2, x6), tl.join(x1, x5), tl.join(x3, x7)
        return _encoded_word(x04 * s, x26 * s, x15 * s, x37 * s)


@triton.jit
def e2m1_values(words, R: tl.constexpr, W: tl.constexpr):
    """The FP32 values [R, W] of words [R, W / 8] of E2M1 codes times 2^-6, zeros with their signs.

    With this factor E2M1 is E4M3 of two exponent bits and one mantissa bit, also where it is subnormal.
    """
    v0, v2, v4, v6 = e4m3_values(((words & 0x07070707) << 2) | ((words & 0x08080808) << 4))
    v1, v3, v5, v7 = e4m3_values(((words & 0x70707070) >> 2) | (words & -0x7F7F7F80))
    low = tl.join(tl.join(v0, v4), tl.join(v2, v6))
    high = tl.join(tl.join(v1, v5), tl.join(v3, v7))
    return tl.reshape(tl.join(low, high), (R, W))


@triton.jit
def _reciprocal(x):
    """1 / x as the sum of two numbers, within 2^-44 of it: x has four significant bits, far from the range's ends."""
    r = tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
    return r, tl.fma(r, -x, 1.0) * r


@triton.jit
def _divided_words(x0, x1, x2, x3, x4, x5, x6, x7, scale, SHORT: tl.constexpr):
    """E2M1 codes of eight tensors divided by UE4M3 scales, as words; zeros where the scale is 0 or NaN.

    SHORT: their numbers have at most 11 significant bits.

    Compiled, a quotient x / b is x r + x t, with 1 / b = r + t up to 2^-44 of it, which leaves an error below 2^-42
    before the one rounding that counts. Where b has 4 significant bits and a tie m between two codes 5, FP32 numbers
    next to m b are farther from it than that, so the quotient lies on the side of m that x / b lies on. Of numbers of
    11 bits the same holds for quotients rounded to 11 bits, whose error may be 2^-17 before: x r will do.
    """
    if COMPILED and SHORT:
        r, _ = _reciprocal(scale)
        words = e2m1_words(x0, x1, x2, x3, x4, x5, x6, x7, r, True)
    elif COMPILED:
        r, t = _reciprocal(scale)
        words = tl.inline_asm_elementwise(
            _DIVIDED,
            "=r,f,f,f,f,f,f,f,f,f,f",
            [x0, x1, x2, x3, x4, x5, x6, x7, r, t],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )
    else:
        b = tl.where(scale > 0.0, scale, 1.0)[:, :, None]
        x04, x26, x15, x37 = tl.join(x0, x4), tl.join(x2, x6), tl.join(x1, x5), tl.join(x3, x7)
        words = _encoded_word(x04 / b, x26 / b, x15 / b, x37 / b)
    return tl.where(scale > 0.0, words, 0)


@triton.jit
def nvfp4_columns(x, R: tl.constexpr, W: tl.constexpr, SHORT: tl.constexpr):
    """NVFP4 of x [R, W] with a scale per 16 rows, transposed: code words [W, R / 8], UE4M3 codes (int32) [W, R / 16].

    The rows of a group become tensors of their own, which puts a group into one thread. SHORT: the numbers have at
    most 11 significant bits.
    """
    y = tl.permute(tl.reshape(x, (R // 16, 2, 2, 2, 2, W)), (5, 0, 2, 3, 4, 1))
    y0, y1 = tl.split(y)
    a0, a1, a2, a3, a4, a5, a6, a7 = _split_eight(y0)
    b0, b1, b2, b3, b4, b5, b6, b7 = _split_eight(y1)
    amax = tl.maximum(
        largest_of_eight(a0, a1, a2, a3, a4, a5, a6, a7), largest_of_eight(b0, b1, b2, b3, b4, b5, b6, b7)
    )
    code, scale = _nvfp4_scale(amax)
    first = _divided_words(a0, a1, a2, a3, a4, a5, a6, a7, scale, SHORT)
    second = _divided_words(b0, b1, b2, b3, b4, b5, b6, b7, scale, SHORT)
    return tl.reshape(tl.join(first, second), (W, R // 8)), code


@triton.jit
def eighths_amax(x, R: tl.constexpr, W: tl.constexpr):
    """Bits of the largest magnitude of each 8 columns of x [R, W], int32 [R, W / 8]."""
    x0, x1, x2, x3, x4, x5, x6, x7 = eighths(x, R, W)
    return largest_of_eight(x0, x1, x2, x3, x4, x5, x6, x7)


@triton.jit
def nvfp4_rows(x, amax, R: tl.constexpr, W: tl.constexpr, SHORT: tl.constexpr):
    """NVFP4 of x [R, W] with a scale per 16 columns; amax: ``eighths_amax`` of it; SHORT: as ``nvfp4_columns``.

    Returns code words [R, W / 8], UE4M3 codes (int32) [R, W / 16].
    """
    code, scale = _nvfp4_scale(tl.max(tl.reshape(amax, (R, W // 16, 2)), 2))
    scale = tl.reshape(tl.broadcast_to(scale[:, :, None], (R, W // 16, 2)), (R, W // 8))
    x0, x1, x2, x3, x4, x5, x6, x7 = eighths(x, R, W)
    return _divided_words(x0, x1, x2, x3, x4, x5, x6, x7, scale, SHORT), code


@triton.jit
def widen(x):
    """BF16 or FP16 -> FP32."""
    # One return: Triton looks at the types of all of them, also behind a constant condition.
    y = x.to(tl.float32)
    if COMPILED and x.dtype == tl.bfloat16:
        # A word of two at a time, which the conversion above would first take apart.
        y = tl.inline_asm_elementwise(
            "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xFFFF0000;", "=f,=f,r", [x], dtype=tl.float32, is_pure=True, pack=2
        )
    return y


@triton.jit
def round_to(x, KIND: tl.constexpr):
    """FP32 -> BF16 or FP16, nearest even. Triton's interpreter truncates to BF16, hence the bits."""
    # One return: Triton looks at the types of all of them, also behind a constant condition.
    y = x
    if COMPILED or tl.float16 == KIND:
        y = x.to(KIND)
    else:
        b = bits(x)
        b = tl.where(magnitude(x) > INFINITY_BITS, b | 0x400000, b + 0x7FFF + ((b >> 16) & 1))
        y = (b >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    return y


# ------------------------------------------------------------------------------------------------- tiles


@triton.jit
def _add(a, b):
    return a + b


@triton.jit
def keep(x):
    """x itself. Keeps the compiler from repeating everything before it once per layout that is wanted after it.

    An FP32 sum over an axis of length one: nothing is computed, and a sum is what Triton never recomputes.
    """
    if COMPILED:
        return tl.reduce(tl.reshape(x, (x.shape[0], x.shape[1], 1)), 2, _add)
    else:
        return x


@triton.jit
def _butterfly_chunk(x, R: tl.constexpr, W: tl.constexpr, IN_PLACE: tl.constexpr):
    # Each column fetches its partner and nothing moves: a sum of both less one's own compiles to a register or a
    # shuffle, whichever holds the partner. A product with +-1 is exact, so that the fused sum is the twin's.
    sign = tl.where(tl.arange(0, 2) == 0, 1.0, -1.0)[None, None, :, None]
    for k in tl.static_range(0, 10):
        if (1 << k) < W:
            y = tl.reshape(x, (R, W // (2 << k), 2, 1 << k))
            if COMPILED and IN_PLACE:
                own = bits(y)
                partner = (tl.sum(own, 2, keep_dims=True) - own).to(tl.float32, bitcast=True)
                x = tl.reshape(tl.fma(y, sign, partner), (R, W))
            else:  # the same, in far fewer steps of the interpreter, and for layouts that have to move anyway
                a, b = tl.split(tl.permute(y, (0, 1, 3, 2)))
                x = tl.reshape(tl.permute(tl.join(a + b, a - b), (0, 1, 3, 2)), (R, W))
    return x


@triton.jit
def hadamard(x0, x1, x2, x3, R: tl.constexpr, W: tl.constexpr, D: tl.constexpr, IN_PLACE: tl.constexpr = True):
    """formats.hadamard of a tile in chunks [R, W]: the same additions in the same order.

    IN_PLACE: keeps the tile's layout; otherwise halves are split and joined.
    """
    x0 = _butterfly_chunk(x0, R, W, IN_PLACE)
    x1 = _butterfly_chunk(x1, R, W, IN_PLACE)
    x0, x1 = x0 + x1, x0 - x1
    if D > 2 * W:
        x2 = _butterfly_chunk(x2, R, W, IN_PLACE)
        x3 = _butterfly_chunk(x3, R, W, IN_PLACE)
        x2, x3 = x2 + x3, x2 - x3
        x0, x2 = x0 + x2, x0 - x2
        x1, x3 = x1 + x3, x1 - x3
    # FP32(1 / sqrt(D)), the factor of the twin
    scale: tl.constexpr = 1.0 / D**0.5
    x0, x1 = keep(x0 * scale), keep(x1 * scale)
    if D > 2 * W:
        x2, x3 = keep(x2 * scale), keep(x3 * scale)
    return x0, x1, x2, x3


@triton.jit
def _halve(x, R: tl.constexpr, W: tl.constexpr):
    # first and second half of the columns
    return tl.split(tl.permute(tl.reshape(x, (R, 2, W // 2)), (0, 2, 1)))


@triton.jit
def tree_sum(x0, x1, x2, x3, R: tl.constexpr, W: tl.constexpr, D: tl.constexpr):
    """formats.tree_sum over D of a tile in chunks [R, W] -> [R]: halves added to halves, an odd rest left to right."""
    if D == 3 * W:
        for k in tl.static_range(0, 10):
            if (W >> k) > 1:
                a0, a1 = _halve(x0, R, W >> k)
                b0, b1 = _halve(x1, R, W >> k)
                c0, c1 = _halve(x2, R, W >> k)
                x0, x1, x2 = a0 + b1, a1 + c0, b0 + c1
        return tl.reshape(x0 + x1 + x2, (R,))
    else:
        x = x0 + x1 if D == 2 * W else (x0 + x2) + (x1 + x3)
        for k in tl.static_range(0, 10):
            if (W >> k) > 1:
                x = tl.reduce(tl.reshape(x, (R, 2, W >> (k + 1))), 1, _add)
        return tl.reshape(x, (R,))


@triton.jit
def tile_amax(x0, x1, x2, x3, R: tl.constexpr):
    """Bits of the largest magnitude of each row of a tile, int32 [R]."""
    m = tl.maximum(_larger(x0, x1), _larger(x2, x3), propagate_nan=tl.PropagateNan.ALL)
    return tl.max(magnitude(m), 1)


@triton.jit
def _larger(a, b):
    # A 16-bit type is compared as it is, two at a time: the compiler sees that only the result needs 32 bits.
    a, b = tl.abs(a.to(tl.float32)), tl.abs(b.to(tl.float32))
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def over_tile(m):
    """Maximum of m, for each of its entries."""
    return tl.zeros(m.shape, tl.int32) + tl.max(m, 0)


@triton.jit
def column_token(position, ORDER: tl.constexpr):
    """Token within 32 that ``payloads.COLUMN_ORDERS`` stores at a position. ORDER: 0 natural, 1 mma, 2 pairs."""
    if ORDER == 1:
        half, r = position & 16, position & 15
        return half + 2 * (r // 4) + (r & 1) + 8 * ((r >> 1) & 1)
    elif ORDER == 2:
        half, r = position & 16, position & 15
        return half + r // 2 + 8 * (r & 1)
    else:
        return position
