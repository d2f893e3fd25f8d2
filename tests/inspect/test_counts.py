"""Instructions to units, bytes and products."""

import pytest

from flamia.inspect.counts import count, operand_bytes, packed, products
from flamia.inspect.sass import Code


def read(*lines):
    return Code(
        "".join(f"        /*{16 * n:04x}*/                   {line} ;\n" for n, line in enumerate(lines))
    ).instructions


def test_every_unit():
    got = count(
        read(
            "MUFU.EX2 R1, R1", "MUFU.RCP R1, R1", "I2F.RP R2, R3",
            "FFMA R1, R1, R2, R3", "FFMA2 R4, R4.F32x2.HI_LO, R6.F32x2.HI_LO, R8.F32x2.HI_LO", "FADD2.RM R4, R4, R6",
            "IMAD.MOV.U32 R1, RZ, RZ, R2",
            "FMNMX3 R1, R2, R3, R4, !PT", "LOP3.LUT R1, R2, R3, RZ, 0xc0, !PT", "ISETP.GT.AND P0, PT, R1, R2, PT",
            "F2FP.SATFINITE.E4M3.F32.PACK_AB_MERGE_C R1, R2, R3, RZ",
            "UIADD3 UR4, UR4, 0x1, URZ",
        )
    )  # fmt: skip
    assert got == {
        "issue": 12, "exponentials": 1, "mufu": 2, "fma": 1 + 2 + 2 + 1, "emulated": 2, "alu": 3, "conversion": 1,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("line", "name", "amount"),
    [
        ("LDS R1, [R2]", "shared_bytes", 128),
        ("LDS.128 R4, [R2]", "shared_bytes", 512),
        ("LDS.U8 R4, [R2]", "shared_bytes", 32),
        ("STS.64 [R2], R4", "shared_bytes", 256),
        ("STSM.16.MT88.4 [R2], R4", "shared_bytes", 512),
        ("LDSM.16.M88 R4, [R2]", "shared_bytes", 128),
        ("STL.64 [R1], R4", "local_bytes", 256),
        ("LDL.LU R4, [R1+0x4]", "local_bytes", 128),
        ("LDTM.x32 R4, tmem[UR4]", "columns", 32),
    ],
)
def test_bytes(line, name, amount):
    assert count(read(line))[name] == amount


def test_packed_elements_are_of_the_narrowest_type():
    e4m3, half = "F2FP.SATFINITE.E4M3.F32.PACK_AB_MERGE_C R1, R2, R3, RZ", "F2FP.F16.F32.PACK_AB R1, R2, R3"
    assert packed(read(e4m3, e4m3, half)) == 4
    assert packed(read(half)) == 2
    # codes that are unpacked again are no operand
    assert packed(read("F2FP.F16.E4M3.UNPACK_B R1, R2")) == 0


def test_products():
    hopper = read(
        "QGMMA.64x128x32.F32.E4M3.E4M3 R92, gdesc[UR8], RZ, !UPT",
        "QGMMA.64x136x32.F32.E4M3.E4M3 R24, R156, gdesc[UR8], RZ, !UPT",
        "HGMMA.64x64x16.F32.BF16 R24, gdesc[UR8].tnspB, R24",
    )
    assert products(hopper) == {(8, 64 * 128 * 32): 1, (8, 64 * 136 * 32): 1, (16, 64 * 64 * 16): 1}
    # rows of 32 bytes: 64 of A where it is in shared memory, N of B
    assert operand_bytes(hopper) == 32 * (64 + 128) + 32 * 136 + 32 * (64 + 64)
    blackwell = read(
        "UTCHMMA gdesc[UR20], gdesc[UR10], tmem[UR46], tmem[UR38], idesc[UR39], !UPT",
        "UTCQMMA tmem[UR17], gdesc[UR6], tmem[UR18], tmem[UR58], idesc[UR59], UP0",
        "UTCOMMA.2CTA.BLOCK16 gdesc[UR56], gdesc[UR4], tmem[UR30], tmem[UR60], idesc[UR61], tmem[UR8], UPT",
    )
    assert products(blackwell) == {(16, 128 * 128 * 16): 1, (8, 128 * 128 * 32): 1, (4, 128 * 128 * 64): 1}
    assert operand_bytes(blackwell) == (4096 + 4096) + 4096 + (4096 + 2048)
