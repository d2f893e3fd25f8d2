"""PTX of the fifth-generation tensor core, and arithmetic that the DSL has no function for.

Tensor-memory addresses are 32-bit: lane in the upper half, column in the lower. Shared-memory addresses are 32-bit. A
function that issues to the tensor core is called by a whole warp; one elected lane issues.
"""

from typing import Any

from cutlass import Float32, Int32, Int64
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T, dsl_user_op

# Fields of the instruction descriptor (PTX ISA, "Instruction descriptor"); E4M3 operands are format 0.
_FP32_ACCUMULATOR, _A_MN_MAJOR, _B_MN_MAJOR, _UE8M0 = 1 << 4, 1 << 15, 1 << 16, 1 << 23
_VERSION = 1 << 14  # bits 46 to 48 of a matrix descriptor, in its upper word
_SWIZZLE = {16: 0, 32: 6 << 29, 64: 4 << 29, 128: 2 << 29}  # bytes of a row of the atom -> bits 61 to 63
# Coefficients of the polynomial for 2^x on [0, 1], highest power first, as FP32 bits; the greatest error is 2.9e-6.
_POWER = (0x3C5BFB98, 0x3D55FC34, 0x3E771228, 0x3F316B63, 0x3F800000)


def _asm(result: Any, operands: list[Any], text: str, constraints: str, effects: bool = False) -> Any:
    dialect = llvm.AsmDialect.AD_ATT
    return llvm.inline_asm(
        result, operands, text, constraints, has_side_effects=effects, is_align_stack=False, asm_dialect=dialect
    )


def _shape(m: int, n: int) -> int:
    return (n >> 3) << 17 | (m >> 4) << 24


def _upper(stride: int, row: int) -> int:
    # Upper word of a matrix descriptor: bytes between groups of eight rows (or depths), bytes of a row.
    return stride >> 4 | _VERSION | _SWIZZLE[row]


@dsl_user_op
def score_product(
    d: Int32, q: Int32, k: Int32, keys: int, head_dim: int, *, ctas: int = 1, loc: Any = None, ip: Any = None
) -> None:
    """[128, keys] = q k^T, unscaled: E4M3 codes [128, head_dim] and [keys, head_dim] in shared memory.

    d: tensor memory. q, k: shared addresses of operands whose rows of head_dim bytes are one swizzle width. ctas: 2
    where a pair has half of the rows of q and half of those of k each.
    """
    upper = _upper(8 * head_dim, head_dim)
    descriptor = _FP32_ACCUMULATOR | _shape(128, keys)
    steps = "".join(
        f"\tadd.u32 x, $1, {2 * k};\n\tmov.b64 a, {{x, {upper:#x}}};\n\tadd.u32 x, $2, {2 * k};\n\t"
        f"mov.b64 b, {{x, {upper:#x}}};\n\t"
        f"@one tcgen05.mma.cta_group::{ctas}.kind::f8f6f4 [$0], a, b, {descriptor:#x}, {'p' if k else 'q'};\n"
        for k in range(head_dim // 32)
    )
    text = (
        "{\n\t.reg .pred one, p, q;\n\t.reg .b32 x;\n\t.reg .b64 a, b;\n\telect.sync _|one, -1;\n\t"
        "setp.eq.u32 p, 0, 0;\n\tsetp.ne.u32 q, 0, 0;\n" + steps + "\t}"
    )
    values = [Int32(d), Int32(q) >> 4, Int32(k) >> 4]
    _asm(None, [x.ir_value(loc=loc, ip=ip) for x in values], text, "r,r,r", effects=True)


@dsl_user_op
def value_product(
    d: Int32,
    p: Int32,
    v: Int32,
    scale_p: Int32,
    scale_v: Int32,
    more: Int32,
    head_dim: int,
    *,
    loc: Any = None,
    ip: Any = None,
) -> None:
    """[128, head_dim] = or += p v over 128 keys, block-scaled.

    d, p: tensor memory, accumulator and E4M3 codes [128, 128]. v: shared address of E4M3 codes [128, head_dim], rows
    one swizzle width. scale_p, scale_v: tensor memory, UE8M0 words of four blocks of 32 keys. more: 0 to overwrite d.
    """
    upper = _upper(8 * head_dim, head_dim)
    descriptor = _B_MN_MAJOR | _UE8M0 | _shape(128, head_dim)
    steps = "".join(
        f"\tadd.u32 x, $2, {k * 32 * head_dim >> 4};\n\tmov.b64 b, {{x, {upper:#x}}};\n\tadd.u32 x, $1, {8 * k};\n\t"
        f"or.b32 y, $3, {k << 30:#x};\n\tor.b32 z, $4, {k << 30:#x};\n\t"
        f"@one tcgen05.mma.cta_group::1.kind::mxf8f6f4.block_scale [$0], [x], b, {descriptor | k << 29 | k << 4:#x}, "
        f"[y], [z], {'q' if k else 'p'};\n"
        for k in range(4)
    )
    text = (
        "{\n\t.reg .pred one, p, q;\n\t.reg .b32 x, y, z;\n\t.reg .b64 b;\n\telect.sync _|one, -1;\n\t"
        "setp.ne.u32 p, $5, 0;\n\tsetp.eq.u32 q, 0, 0;\n" + steps + "\t}"
    )
    values = [Int32(d), Int32(p), Int32(v) >> 4, Int32(scale_p), Int32(scale_v), Int32(more)]
    _asm(None, [x.ir_value(loc=loc, ip=ip) for x in values], text, "r,r,r,r,r,r", effects=True)


@dsl_user_op
def transposed_product(
    d: Int32,
    a: Int32,
    b: Int32,
    scale_a: Int32,
    scale_b: Int32,
    more: Int32,
    head_dim: int,
    *,
    ctas: int = 1,
    loc: Any = None,
    ip: Any = None,
) -> None:
    """[128 ctas, head_dim] = or += a^T b over 128 queries, block-scaled.

    d: tensor memory, a row per key. a, b: shared addresses of E4M3 codes [128, 128] and [128, head_dim / ctas] with a
    row per query, which is one swizzle width. scale_a, scale_b: tensor memory, UE8M0 words of four blocks of 32
    queries. more: 0 to overwrite d. ctas: 2 where each of a pair has 128 of the keys and half of the columns of b.
    """
    width = head_dim // ctas
    upper_a, upper_b = _upper(8 * 128, 128), _upper(8 * width, width)
    descriptor = _A_MN_MAJOR | _B_MN_MAJOR | _UE8M0 | _shape(128 * ctas, head_dim)
    steps = "".join(
        f"\tadd.u32 x, $1, {k * 32 * 128 >> 4};\n\tmov.b64 a, {{x, {upper_a:#x}}};\n\t"
        f"add.u32 x, $2, {k * 32 * width >> 4};\n\tmov.b64 b, {{x, {upper_b:#x}}};\n\t"
        f"or.b32 y, $3, {k << 30:#x};\n\tor.b32 z, $4, {k << 30:#x};\n\t"
        f"@one tcgen05.mma.cta_group::{ctas}.kind::mxf8f6f4.block_scale [$0], a, b, "
        f"{descriptor | k << 29 | k << 4:#x}, [y], [z], {'q' if k else 'p'};\n"
        for k in range(4)
    )
    text = (
        "{\n\t.reg .pred one, p, q;\n\t.reg .b32 x, y, z;\n\t.reg .b64 a, b;\n\telect.sync _|one, -1;\n\t"
        "setp.ne.u32 p, $5, 0;\n\tsetp.eq.u32 q, 0, 0;\n" + steps + "\t}"
    )
    values = [Int32(d), Int32(a) >> 4, Int32(b) >> 4, Int32(scale_a), Int32(scale_b), Int32(more)]
    _asm(None, [x.ir_value(loc=loc, ip=ip) for x in values], text, "r,r,r,r,r,r", effects=True)


@dsl_user_op
def pair_product(
    d: Int32,
    a: Int32,
    b: Int32,
    scale_a: Int32,
    scale_b: Int32,
    head_dim: int,
    *,
    loc: Any = None,
    ip: Any = None,
) -> None:
    """[128, head_dim] = a b over the 256 keys of a pair of CTAs, block-scaled; each has 64 of the rows.

    d: tensor memory; lanes 64 and up have the upper half of the columns of the same rows. a: shared address of E4M3
    codes [2, 64, 128], keys contiguous; b: [256, head_dim / 2] with a row per key, one swizzle width. scale_a, scale_b:
    tensor memory, for either 128 keys four columns of UE8M0 words.
    """
    width = head_dim // 2
    upper_a, upper_b = _upper(8 * 128, 128), _upper(8 * width, width)
    descriptor = _B_MN_MAJOR | _UE8M0 | _shape(128, head_dim)
    steps = "".join(
        f"\tadd.u32 x, $1, {(64 * 128 * (k // 4) + 32 * (k % 4)) >> 4};\n\tmov.b64 a, {{x, {upper_a:#x}}};\n\t"
        f"add.u32 x, $2, {k * 32 * width >> 4};\n\tmov.b64 b, {{x, {upper_b:#x}}};\n\t"
        f"add.u32 y, $3, {4 * (k // 4)};\n\tor.b32 y, y, {(k % 4) << 30:#x};\n\t"
        f"add.u32 z, $4, {4 * (k // 4)};\n\tor.b32 z, z, {(k % 4) << 30:#x};\n\t"
        "@one tcgen05.mma.cta_group::2.kind::mxf8f6f4.block_scale [$0], a, b, "
        f"{descriptor | (k % 4) << 29 | (k % 4) << 4:#x}, [y], [z], {'p' if k else 'q'};\n"
        for k in range(8)
    )
    text = (
        "{\n\t.reg .pred one, p, q;\n\t.reg .b32 x, y, z;\n\t.reg .b64 a, b;\n\telect.sync _|one, -1;\n\t"
        "setp.eq.u32 p, 0, 0;\n\tsetp.ne.u32 q, 0, 0;\n" + steps + "\t}"
    )
    values = [Int32(d), Int32(a) >> 4, Int32(b) >> 4, Int32(scale_a), Int32(scale_b)]
    _asm(None, [x.ir_value(loc=loc, ip=ip) for x in values], text, "r,r,r,r,r", effects=True)


@dsl_user_op
def copy_scales(column: Int32, atom: Int32, *, ctas: int = 1, loc: Any = None, ip: Any = None) -> None:
    """A scale atom of 512 bytes, shared address ``atom``, to four columns of tensor memory in all lane quarters; with
    ``ctas`` 2 that of either CTA of a pair to its own.
    """
    text = (
        "{\n\t.reg .pred one;\n\t.reg .b64 a;\n\telect.sync _|one, -1;\n\t"
        f"mov.b64 a, {{$1, {_upper(128, 16):#x}}};\n\t"
        f"@one tcgen05.cp.cta_group::{ctas}.32x128b.warpx4 [$0], a;\n\t}}"
    )
    values = [Int32(column), Int32(atom) >> 4]
    _asm(None, [x.ir_value(loc=loc, ip=ip) for x in values], text, "r,r", effects=True)


@dsl_user_op
def commit(barrier: Any, *, loc: Any = None, ip: Any = None) -> None:
    """Arrive on an mbarrier when everything that this warp has issued to the tensor core is done."""
    text = (
        "{\n\t.reg .pred one;\n\telect.sync _|one, -1;\n\t"
        "@one tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [$0];\n\t}"
    )
    _asm(None, [Int32(barrier.toint()).ir_value(loc=loc, ip=ip)], text, "r", effects=True)


@dsl_user_op
def commit_both(barrier: Any, *, loc: Any = None, ip: Any = None) -> None:
    """``commit`` of a pair of CTAs, on the same barrier of both."""
    text = (
        "{\n\t.reg .pred one;\n\t.reg .b16 both;\n\tmov.b16 both, 3;\n\telect.sync _|one, -1;\n\t"
        "@one tcgen05.commit.cta_group::2.mbarrier::arrive::one.shared::cluster.multicast::cluster.b64 [$0], both;\n\t}"
    )
    _asm(None, [Int32(barrier.toint()).ir_value(loc=loc, ip=ip)], text, "r", effects=True)


@dsl_user_op
def arrive_first(barrier: Any, *, stored: bool = True, loc: Any = None, ip: Any = None) -> None:
    """``arrive`` on the barrier of the first CTA of a cluster.

    stored: to shared memory of the cluster, what whoever waits there is to see; costs a fence of the warp.
    """
    order = ".release.cluster" if stored else ""
    text = (
        "{\n\t.reg .pred one;\n\t.reg .b32 x;\n\tmapa.shared::cluster.u32 x, $0, 0;\n\tbar.warp.sync -1;\n\t"
        f"elect.sync _|one, -1;\n\t@one mbarrier.arrive{order}.shared::cluster.b64 _, [x];\n\t}}"
    )
    _asm(None, [Int32(barrier.toint()).ir_value(loc=loc, ip=ip)], text, "r", effects=True)


@dsl_user_op
def in_cluster(address: Int32, rank: Int32, *, loc: Any = None, ip: Any = None) -> Int32:
    """The shared address of the same place in a CTA of the cluster."""
    values = [Int32(x).ir_value(loc=loc, ip=ip) for x in (address, rank)]
    return Int32(_asm(T.i32(), values, "mapa.shared::cluster.u32 $0, $1, $2;", "=r,r,r"))


@dsl_user_op
def arrive(barrier: Any, *, loc: Any = None, ip: Any = None) -> None:
    """Arrive once on an mbarrier for a whole warp, after all of its lanes; no branch."""
    text = (
        "{\n\t.reg .pred one;\n\tbar.warp.sync -1;\n\telect.sync _|one, -1;\n\t"
        "@one mbarrier.arrive.shared::cta.b64 _, [$0];\n\t}"
    )
    _asm(None, [Int32(barrier.toint()).ir_value(loc=loc, ip=ip)], text, "r", effects=True)


@dsl_user_op
def load_columns(address: Int32, columns: int, *, loc: Any = None, ip: Any = None) -> list[Float32]:
    """One row per lane: ``columns`` (a power of two) FP32 of tensor memory. ``wait_loads`` before use."""
    result = llvm.StructType.get_literal([T.f32()] * columns)
    names = ", ".join(f"${i}" for i in range(columns))
    text = f"tcgen05.ld.sync.aligned.32x32b.x{columns}.b32 {{{names}}}, [${columns}];"
    constraints = "=f," * columns + "r"
    values = _asm(result, [Int32(address).ir_value(loc=loc, ip=ip)], text, constraints, effects=True)
    return [Float32(llvm.extractvalue(T.f32(), values, [i], loc=loc, ip=ip)) for i in range(columns)]


@dsl_user_op
def load_fragments(address: Int32, groups: int, *, loc: Any = None, ip: Any = None) -> list[Float32]:
    """16 rows of 8 ``groups`` columns of tensor memory as the fragments of ``mma``: of eight columns, a thread gets two
    neighbours in row lane / 4 and then two in row lane / 4 + 8. ``wait_loads`` before use.
    """
    count = 4 * groups
    result = llvm.StructType.get_literal([T.f32()] * count)
    names = ", ".join(f"${i}" for i in range(count))
    text = f"tcgen05.ld.sync.aligned.16x256b.x{groups}.b32 {{{names}}}, [${count}];"
    constraints = "=f," * count + "r"
    values = _asm(result, [Int32(address).ir_value(loc=loc, ip=ip)], text, constraints, effects=True)
    return [Float32(llvm.extractvalue(T.f32(), values, [i], loc=loc, ip=ip)) for i in range(count)]


@dsl_user_op
def load_columns_max(address: Int32, columns: int, *, loc: Any = None, ip: Any = None) -> tuple[list[Float32], Float32]:
    """``load_columns`` and the row's maximum over them; sm_103a."""
    result = llvm.StructType.get_literal([T.f32()] * (columns + 1))
    names = ", ".join(f"${i}" for i in range(columns))
    text = f"tcgen05.ld.red.sync.aligned.32x32b.x{columns}.max.f32 {{{names}}}, ${columns}, [${columns + 1}];"
    constraints = "=f," * (columns + 1) + "r"
    values = _asm(result, [Int32(address).ir_value(loc=loc, ip=ip)], text, constraints, effects=True)
    numbers = [Float32(llvm.extractvalue(T.f32(), values, [i], loc=loc, ip=ip)) for i in range(columns + 1)]
    return numbers[:-1], numbers[-1]


@dsl_user_op
def store_columns(address: Int32, values: list[Any], *, loc: Any = None, ip: Any = None) -> None:
    """Words (FP32 or 32-bit) to tensor memory, one row per lane. ``wait_stores`` before anybody reads them."""
    count, real = len(values), isinstance(values[0], Float32)
    names = ", ".join(f"${i + 1}" for i in range(count))
    text = f"tcgen05.st.sync.aligned.32x32b.x{count}.b32 [$0], {{{names}}};"
    words = [x.ir_value(loc=loc, ip=ip) for x in (Int32(address), *values)]
    _asm(None, words, text, "r" + (",f" if real else ",r") * count, effects=True)


@dsl_user_op
def wait_loads(*, loc: Any = None, ip: Any = None) -> None:
    """Until this warp's loads of tensor memory are done."""
    _asm(None, [], "tcgen05.wait::ld.sync.aligned;", "", effects=True)


@dsl_user_op
def wait_stores(*, loc: Any = None, ip: Any = None) -> None:
    """Until this warp's stores to tensor memory are done."""
    _asm(None, [], "tcgen05.wait::st.sync.aligned;", "", effects=True)


@dsl_user_op
def fence_before(*, loc: Any = None, ip: Any = None) -> None:
    """Order earlier accesses to tensor memory before a following arrive."""
    _asm(None, [], "tcgen05.fence::before_thread_sync;", "", effects=True)


@dsl_user_op
def fence_after(*, loc: Any = None, ip: Any = None) -> None:
    """Order later accesses to tensor memory after a preceding wait."""
    _asm(None, [], "tcgen05.fence::after_thread_sync;", "", effects=True)


@dsl_user_op
def pack_e4m3(a: Float32, b: Float32, c: Float32, d: Float32, *, loc: Any = None, ip: Any = None) -> Int32:
    """Four E4M3 codes, nearest even and saturating; a in the lowest byte."""
    text = (
        "{\n\t.reg .b16 lo, hi;\n\tcvt.rn.satfinite.e4m3x2.f32 lo, $2, $1;\n\t"
        "cvt.rn.satfinite.e4m3x2.f32 hi, $4, $3;\n\tmov.b32 $0, {lo, hi};\n\t}"
    )
    return Int32(_asm(T.i32(), [Float32(x).ir_value(loc=loc, ip=ip) for x in (a, b, c, d)], text, "=r,f,f,f,f"))


@dsl_user_op
def sum_codes(a: Int32, b: Int32, *, loc: Any = None, ip: Any = None) -> tuple[Float32, Float32]:
    """Of eight E4M3 codes the sums of the even and of the odd ones: four each, in FP16, two roundings of 2^-11."""
    text = (
        "{\n\t.reg .b16 lo, hi;\n\t.reg .b32 x, y, z, w;\n\tmov.b32 {lo, hi}, $2;\n\t"
        "cvt.rn.f16x2.e4m3x2 x, lo;\n\tcvt.rn.f16x2.e4m3x2 y, hi;\n\tmov.b32 {lo, hi}, $3;\n\t"
        "cvt.rn.f16x2.e4m3x2 z, lo;\n\tcvt.rn.f16x2.e4m3x2 w, hi;\n\tadd.rn.f16x2 x, x, y;\n\t"
        "add.rn.f16x2 z, z, w;\n\tadd.rn.f16x2 x, x, z;\n\tmov.b32 {lo, hi}, x;\n\tcvt.f32.f16 $0, lo;\n\t"
        "cvt.f32.f16 $1, hi;\n\t}"
    )
    result = llvm.StructType.get_literal([T.f32(), T.f32()])
    values = _asm(result, [Int32(x).ir_value(loc=loc, ip=ip) for x in (a, b)], text, "=f,=f,r,r")
    even, odd = (Float32(llvm.extractvalue(T.f32(), values, [i], loc=loc, ip=ip)) for i in range(2))
    return even, odd


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
def max3(a: Float32, b: Float32, c: Float32, *, loc: Any = None, ip: Any = None) -> Float32:
    """Maximum of three; NaN loses."""
    values = [Float32(x).ir_value(loc=loc, ip=ip) for x in (a, b, c)]
    return Float32(_asm(T.f32(), values, "max.f32 $0, $1, $2, $3;", "=f,f,f,f"))


@dsl_user_op
def max_abs(a: Float32, b: Float32, *, loc: Any = None, ip: Any = None) -> Float32:
    """max(a, |b|); a NaN is passed over."""
    text = "{\n\t.reg .f32 t;\n\tabs.f32 t, $2;\n\tmax.f32 $0, $1, t;\n\t}"
    return Float32(_asm(T.f32(), [Float32(x).ir_value(loc=loc, ip=ip) for x in (a, b)], text, "=f,f,f"))


@dsl_user_op
def exp2(a: Float32, *, loc: Any = None, ip: Any = None) -> Float32:
    """2^a within two ulp; subnormal results are zero."""
    return Float32(_asm(T.f32(), [Float32(a).ir_value(loc=loc, ip=ip)], "ex2.approx.ftz.f32 $0, $1;", "=f,f"))


@dsl_user_op
def exp2_pair(a: Float32, b: Float32, *, loc: Any = None, ip: Any = None) -> tuple[Float32, Float32]:
    """2^a and 2^b without the exponential unit, to 2^-18; below -127 as at -127. Both at most 127.

    Adding 1.5 * 2^23 downwards leaves the integer part in the low bits, to be added to the exponent of the power of the
    fraction: a polynomial of degree 4, minimax in relative error on [0, 1] with value one at zero.
    """
    ring = "".join(
        f"\tmov.b32 v, {bits:#x};\n\tmov.b64 k, {{v, v}};\n\tfma.rn.f32x2 y, y, f, k;\n" for bits in _POWER[1:]
    )
    text = (
        "{\n\t.reg .f32 t, u;\n\t.reg .b32 v, i, j, m, n;\n\t.reg .b64 x, r, f, y, k;\n\t"
        "max.f32 t, $2, 0fC2FE0000;\n\tmax.f32 u, $3, 0fC2FE0000;\n\tmov.b64 x, {t, u};\n\t"
        "mov.b32 v, 0x4b400000;\n\tmov.b64 k, {v, v};\n\tadd.rm.f32x2 r, x, k;\n\tsub.rn.f32x2 f, r, k;\n\t"
        f"sub.rn.f32x2 f, x, f;\n\tmov.b32 v, {_POWER[0]:#x};\n\tmov.b64 y, {{v, v}};\n{ring}\t"
        "mov.b64 {i, j}, r;\n\tmov.b64 {m, n}, y;\n\tshl.b32 i, i, 23;\n\tshl.b32 j, j, 23;\n\t"
        "add.s32 i, i, m;\n\tadd.s32 j, j, n;\n\tmov.b32 $0, i;\n\tmov.b32 $1, j;\n\t}"
    )
    result = llvm.StructType.get_literal([T.f32(), T.f32()])
    values = _asm(result, [Float32(x).ir_value(loc=loc, ip=ip) for x in (a, b)], text, "=f,=f,f,f")
    x, y = (Float32(llvm.extractvalue(T.f32(), values, [i], loc=loc, ip=ip)) for i in range(2))
    return x, y


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
def again(word: Int32, *, loc: Any = None, ip: Any = None) -> Int32:
    """The same word, of which the compiler does not know that: what is derived from it is not kept in registers."""
    return Int32(_asm(T.i32(), [Int32(word).ir_value(loc=loc, ip=ip)], "mov.b32 $0, $1;", "=r,r", effects=True))


@dsl_user_op
def thread_index(*, loc: Any = None, ip: Any = None) -> Int32:
    """The thread's number in the block, read anew: no register holds it meanwhile."""
    return Int32(_asm(T.i32(), [], "mov.u32 $0, %tid.x;", "=r", effects=True))


@dsl_user_op
def pack_half(a: Float32, b: Float32, kind: str, *, loc: Any = None, ip: Any = None) -> Int32:
    """Two numbers as ``kind`` "bf16" or "f16", a in the low half."""
    values = [Float32(x).ir_value(loc=loc, ip=ip) for x in (a, b)]
    return Int32(_asm(T.i32(), values, f"cvt.rn.{kind}x2.f32 $0, $2, $1;", "=r,f,f"))


@dsl_user_op
def store_global(address: Int64, words: list[Int32], *, loc: Any = None, ip: Any = None) -> None:
    """Eight 32-bit words to global memory, one whole sector; the address is a multiple of 32."""
    values = [x.ir_value(loc=loc, ip=ip) for x in (Int64(address), *words)]
    text = "st.global.v8.b32 [$0], {$1, $2, $3, $4, $5, $6, $7, $8};"
    _asm(None, values, text, "l" + ",r" * 8, effects=True)


@dsl_user_op
def store_shared(address: Int32, words: list[Int32], *, space: str = "cta", loc: Any = None, ip: Any = None) -> None:
    """Four 32-bit words to shared memory of this CTA or (space "cluster") of one of the cluster; the address is a
    multiple of 16.
    """
    values = [x.ir_value(loc=loc, ip=ip) for x in (Int32(address), *words)]
    _asm(None, values, f"st.shared::{space}.v4.b32 [$0], {{$1, $2, $3, $4}};", "r,r,r,r,r", effects=True)


@dsl_user_op
def store_byte(address: Int32, value: Int32, *, loc: Any = None, ip: Any = None) -> None:
    """The low byte of a word to shared memory of a CTA of the cluster."""
    values = [Int32(x).ir_value(loc=loc, ip=ip) for x in (address, value)]
    _asm(None, values, "st.shared::cluster.b8 [$0], $1;", "r,r", effects=True)


@dsl_user_op
def load_acquire(pointer: Any, *, loc: Any = None, ip: Any = None) -> Int32:
    """A word of global memory, and with it what its writer did before a release on this device."""
    values = [pointer.toint().ir_value(loc=loc, ip=ip)]
    return Int32(_asm(T.i32(), values, "ld.acquire.gpu.global.b32 $0, [$1];", "=r,l", effects=True))


@dsl_user_op
def bulk_add_half(target: Any, source: Int32, size: int, *, loc: Any = None, ip: Any = None) -> None:
    """Add ``size`` bytes of FP16 in shared memory to global memory, asynchronously, in this thread's bulk group."""
    values = [target.toint().ir_value(loc=loc, ip=ip), Int32(source).ir_value(loc=loc, ip=ip)]
    text = f"cp.reduce.async.bulk.global.shared::cta.bulk_group.add.noftz.f16 [$0], [$1], {size};"
    _asm(None, values, text, "l,r", effects=True)
