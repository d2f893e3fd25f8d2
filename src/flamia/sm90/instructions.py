"""PTX that the DSL has no function for, and reductions over the four threads that share a row of an accumulator."""

from typing import Any

import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T, dsl_user_op


def _asm(result: Any, operands: list[Any], text: str, constraints: str, effects: bool = False) -> Any:
    dialect = llvm.AsmDialect.AD_ATT
    return llvm.inline_asm(
        result, operands, text, constraints, has_side_effects=effects, is_align_stack=False, asm_dialect=dialect
    )


@dsl_user_op
def pack_e4m3(a: Float32, b: Float32, c: Float32, d: Float32, *, loc: Any = None, ip: Any = None) -> Int32:
    """Four E4M3 codes, nearest even and saturating; a in the lowest byte."""
    text = (
        "{\n\t.reg .b16 lo, hi;\n\tcvt.rn.satfinite.e4m3x2.f32 lo, $2, $1;\n\t"
        "cvt.rn.satfinite.e4m3x2.f32 hi, $4, $3;\n\tmov.b32 $0, {lo, hi};\n\t}"
    )
    return Int32(_asm(T.i32(), [Float32(x).ir_value(loc=loc, ip=ip) for x in (a, b, c, d)], text, "=r,f,f,f,f"))


@dsl_user_op
def sum_e4m3(word: Int32, *, loc: Any = None, ip: Any = None) -> Float32:
    """Sum of the values of four E4M3 codes: pairs in FP16, exact for codes within a factor 2^6, then FP32."""
    text = (
        "{\n\t.reg .b16 lo, hi, x, y;\n\t.reg .b32 a, b;\n\t.reg .f32 f, g;\n\tmov.b32 {lo, hi}, $1;\n\t"
        "cvt.rn.f16x2.e4m3x2 a, lo;\n\tcvt.rn.f16x2.e4m3x2 b, hi;\n\tadd.rn.f16x2 a, a, b;\n\tmov.b32 {x, y}, a;\n\t"
        "cvt.f32.f16 f, x;\n\tcvt.f32.f16 g, y;\n\tadd.f32 $0, f, g;\n\t}"
    )
    return Float32(_asm(T.f32(), [Int32(word).ir_value(loc=loc, ip=ip)], text, "=f,r"))


@dsl_user_op
def unpack_e4m3(word: Int32, *, loc: Any = None, ip: Any = None) -> list[Float32]:
    """Values of four E4M3 codes, the lowest byte first."""
    text = (
        "{\n\t.reg .b16 lo, hi, x, y;\n\t.reg .b32 a, b;\n\tmov.b32 {lo, hi}, $4;\n\t"
        "cvt.rn.f16x2.e4m3x2 a, lo;\n\tcvt.rn.f16x2.e4m3x2 b, hi;\n\tmov.b32 {x, y}, a;\n\tcvt.f32.f16 $0, x;\n\t"
        "cvt.f32.f16 $1, y;\n\tmov.b32 {x, y}, b;\n\tcvt.f32.f16 $2, x;\n\tcvt.f32.f16 $3, y;\n\t}"
    )
    result = llvm.StructType.get_literal([T.f32()] * 4)
    values = _asm(result, [Int32(word).ir_value(loc=loc, ip=ip)], text, "=f,=f,=f,=f,r")
    return [Float32(llvm.extractvalue(T.f32(), values, [i], loc=loc, ip=ip)) for i in range(4)]


@dsl_user_op
def pack_half(a: Float32, b: Float32, kind: str, *, loc: Any = None, ip: Any = None) -> Int32:
    """Two numbers as ``kind`` "bf16" or "f16", a in the low half."""
    values = [Float32(x).ir_value(loc=loc, ip=ip) for x in (a, b)]
    return Int32(_asm(T.i32(), values, f"cvt.rn.{kind}x2.f32 $0, $2, $1;", "=r,f,f"))


@dsl_user_op
def ceil(a: Float32, *, loc: Any = None, ip: Any = None) -> Float32:
    """Smallest integer not below a."""
    return Float32(_asm(T.f32(), [Float32(a).ir_value(loc=loc, ip=ip)], "cvt.rpi.f32.f32 $0, $1;", "=f,f"))


@dsl_user_op
def exp2(a: Float32, *, loc: Any = None, ip: Any = None) -> Float32:
    """2^a within two ulp; subnormal results are zero."""
    return Float32(_asm(T.f32(), [Float32(a).ir_value(loc=loc, ip=ip)], "ex2.approx.ftz.f32 $0, $1;", "=f,f"))


@dsl_user_op
def schraudolph(a: Float32, *, loc: Any = None, ip: Any = None) -> Float32:
    """2^(a + SCHRAUDOLPH_OFFSET) to 4 %, in FP32 and integer operations: ``reference.exponentials.schraudolph``."""
    text = (
        "{\n\t.reg .f32 y;\n\t.reg .b32 n;\n\tfma.rn.f32 y, $1, 0f43000000, 0f4B403F80;\n\tmov.b32 n, y;\n\t"
        "max.s32 n, n, 0x4B400000;\n\tshl.b32 n, n, 16;\n\tmov.b32 $0, n;\n\t}"
    )
    return Float32(_asm(T.f32(), [Float32(a).ir_value(loc=loc, ip=ip)], text, "=f,f"))


@dsl_user_op
def log2(a: Float32, *, loc: Any = None, ip: Any = None) -> Float32:
    """log2 of a positive number, to about 2^-22."""
    return Float32(_asm(T.f32(), [Float32(a).ir_value(loc=loc, ip=ip)], "lg2.approx.ftz.f32 $0, $1;", "=f,f"))


@dsl_user_op
def as_float(bits: Int32, *, loc: Any = None, ip: Any = None) -> Float32:
    """The FP32 number with these bits; ``byte << 23`` makes a power of two of a UE8M0 code."""
    return Float32(llvm.bitcast(T.f32(), Int32(bits).ir_value(loc=loc, ip=ip), loc=loc, ip=ip))


@dsl_user_op
def as_bits(a: Float32, *, loc: Any = None, ip: Any = None) -> Int32:
    """The bits of an FP32 number."""
    return Int32(llvm.bitcast(T.i32(), Float32(a).ir_value(loc=loc, ip=ip), loc=loc, ip=ip))


@dsl_user_op
def lane_here(*, loc: Any = None, ip: Any = None) -> Int32:
    """The lane, read anew: what follows from it is not kept in registers from before a loop."""
    return Int32(_asm(T.i32(), [], "mov.u32 $0, %laneid;", "=r", effects=True))


@dsl_user_op
def max_abs(a: Float32, b: Float32, *, loc: Any = None, ip: Any = None) -> Float32:
    """max(a, |b|); a NaN is passed over."""
    text = "{\n\t.reg .f32 t;\n\tabs.f32 t, $2;\n\tmax.f32 $0, $1, t;\n\t}"
    return Float32(_asm(T.f32(), [Float32(x).ir_value(loc=loc, ip=ip) for x in (a, b)], text, "=f,f,f"))


@dsl_user_op
def permute_bytes(a: Int32, b: Int32, selector: int, *, loc: Any = None, ip: Any = None) -> Int32:
    """Four of the bytes of a (0 to 3) and b (4 to 7), named by the selector's nibbles, lowest first."""
    values = [Int32(x).ir_value(loc=loc, ip=ip) for x in (a, b)]
    return Int32(_asm(T.i32(), values, f"prmt.b32 $0, $1, $2, {selector:#x};", "=r,r,r"))


@dsl_user_op
def store_matrices(
    address: Int32, a: Int32, b: Int32, c: Int32, d: Int32, transposed: bool = False, *, loc: Any = None, ip: Any = None
) -> None:
    """Four 8x8 matrices of 16 bits to shared memory; lane l gives the address of row l % 8 of matrix l // 8.

    transposed: columns of what threads hold become rows.
    """
    values = [Int32(x).ir_value(loc=loc, ip=ip) for x in (address, a, b, c, d)]
    how = ".trans" if transposed else ""
    text = f"stmatrix.sync.aligned.m8n8.x4{how}.shared::cta.b16 [$0], {{$1, $2, $3, $4}};"
    _asm(None, values, text, "r,r,r,r,r", effects=True)


@dsl_user_op
def clear_after(pointer: Any, words: Any, *, loc: Any = None, ip: Any = None) -> None:
    """Clear 8 bytes of shared memory once ``words`` are there, 32-bit words whose sign bits are never set.

    Like ``arrive_after``: a later wait for the tensor core stays behind the work that makes the words.
    """
    values = [Int32(x).ir_value(loc=loc, ip=ip) for x in (pointer.toint(), *words)]
    joined = "".join(f"or.b32 x, x, ${i};\n\t" for i in range(2, len(values)))
    text = (
        f"{{\n\t.reg .b32 x;\n\tmov.b32 x, $1;\n\t{joined}shr.u32 x, x, 31;\n\tadd.u32 x, x, $0;\n\t"
        "st.shared::cta.v2.b32 [x], {0, 0};\n\t}"
    )
    _asm(None, values, text, ",".join("r" * len(values)), effects=True)


@dsl_user_op
def raise_to(pointer: Any, a: Int32, *, loc: Any = None, ip: Any = None) -> None:
    """Raise a word of shared memory to a, as unsigned numbers."""
    values = [Int32(pointer.toint()).ir_value(loc=loc, ip=ip), Int32(a).ir_value(loc=loc, ip=ip)]
    _asm(None, values, "red.relaxed.cta.shared::cta.max.u32 [$0], $1;", "r,r", effects=True)


@dsl_user_op
def load_acquire(pointer: Any, *, loc: Any = None, ip: Any = None) -> Int32:
    """A word of global memory, and with it what its writer did before a release on this device."""
    values = [pointer.toint().ir_value(loc=loc, ip=ip)]
    return Int32(_asm(T.i32(), values, "ld.acquire.gpu.global.b32 $0, [$1];", "=r,l", effects=True))


@dsl_user_op
def add_half(target: Any, words: Any, *, loc: Any = None, ip: Any = None) -> None:
    """Add eight FP16 numbers, four words, to 16 bytes of global memory."""
    values = [target.toint().ir_value(loc=loc, ip=ip), *(Int32(x).ir_value(loc=loc, ip=ip) for x in words)]
    text = "red.relaxed.gpu.global.add.noftz.v4.f16x2 [$0], {$1, $2, $3, $4};"
    _asm(None, values, text, "l,r,r,r,r", effects=True)


@dsl_user_op
def arrive_after(barrier: Any, a: Float32, b: Float32, *, loc: Any = None, ip: Any = None) -> None:
    """Arrive on an mbarrier once a and b, which are never negative, are there.

    The address takes the sign bit of their minimum, which is zero. The assembler moves a wait for the tensor core up to
    the memory operation before it, so this keeps a later wait behind the powers that run while the tensor core does.
    """
    values = [Int32(barrier.toint()).ir_value(loc=loc, ip=ip), *(Float32(x).ir_value(loc=loc, ip=ip) for x in (a, b))]
    text = (
        "{\n\t.reg .b32 x, y;\n\t.reg .f32 t;\n\tmin.f32 t, $1, $2;\n\tmov.b32 x, t;\n\tshr.u32 x, x, 31;\n\t"
        "add.u32 y, x, $0;\n\tmbarrier.arrive.shared::cta.b64 _, [y];\n\t}"
    )
    _asm(None, values, text, "r,f,f", effects=True)


@dsl_user_op
def arrive_after_all(barrier: Any, numbers: list[Float32], *, loc: Any = None, ip: Any = None) -> None:
    """``arrive_after`` of any count of numbers, which are never negative."""
    values = [Int32(barrier.toint()), *(Float32(x) for x in numbers)]
    moves = "".join(f"mov.b32 y, ${i};\n\tor.b32 x, x, y;\n\t" for i in range(2, len(values)))
    text = (
        f"{{\n\t.reg .b32 x, y;\n\tmov.b32 x, $1;\n\t{moves}shr.u32 x, x, 31;\n\tadd.u32 y, x, $0;\n\t"
        "mbarrier.arrive.shared::cta.b64 _, [y];\n\t}"
    )
    values = [x.ir_value(loc=loc, ip=ip) for x in values]
    _asm(None, values, text, ",".join("r" + "f" * len(numbers)), effects=True)


def quad_max(x: Float32) -> Float32:
    """Maximum over the four threads of a row."""
    for distance in (1, 2):
        x = cute.arch.fmax(x, cute.arch.shuffle_sync_bfly(x, distance))
    return x


def quad_sum(x: Float32) -> Float32:
    """Sum over the four threads of a row."""
    for distance in (1, 2):
        x = x + cute.arch.shuffle_sync_bfly(x, distance)
    return x
