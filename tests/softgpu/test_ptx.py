"""The PTX parser."""

from __future__ import annotations

import pytest

import softgpu
from softgpu import flow
from softgpu.dataflow import check_registers
from softgpu.ptx import Imm, Mem, Not, Pair, Reg, Sink, Vec, parse

HEAD = ".version 9.0\n.target sm_90a\n.address_size 64\n"


def kernel(body: str, params: str = ""):
    return next(iter(parse(f"{HEAD}.visible .entry k({params})\n{{\n{body}\n}}\n").kernels.values()))


REGS = ".reg .pred %p<4>; .reg .b32 %r<40>; .reg .b64 %d<9>; .reg .f32 %f<9>;\n"


def test_operand_forms():
    k = kernel(
        REGS + "@!%p1 ld.global.v2.b32 {%r1, _}, [%d2+-8];\nshfl.sync.idx.b32 %r1|%p2, %r3, 0x1f, -1, 0f3F800000;\n"
        "setp.eq.and.b32 %p1, %r1, 3, !%p2;"
    )
    load, shuffle, compare = k.instrs
    assert load.guard == (Reg("%p1", 1), True)
    assert load.operands == [Vec((Reg("%r1", 32), Sink())), Mem(Reg("%d2", 64), -8)]
    assert shuffle.operands[0] == Pair(Reg("%r1", 32), Reg("%p2", 1))
    assert shuffle.operands[2:] == [Imm(31), Imm(-1), Imm(0x3F800000, True)]
    assert compare.operands[3] == Not(Reg("%p2", 1))
    assert load.line == 7
    assert load.text.startswith("@!%p1 ld.global")


def test_tensor_coordinates():
    k = kernel(
        REGS + "cp.async.bulk.tensor.2d.shared::cta.global.tile.mbarrier::complete_tx::bytes "
        "[%r1+16], [%d1, {%r2, %r3}], [%r4];"
    )
    assert k.instrs[0].operands[1] == Mem(Reg("%d1", 64), 0, (Vec((Reg("%r2", 32), Reg("%r3", 32))),))


def test_parameters_are_laid_out_with_their_alignment():
    k = kernel(
        "ret;",
        ".param .u32 a, .param .align 64 .b8 b[128], .param .align 1 .b8 c[3], .param .u64 .ptr .global .align 16 d",
    )
    assert [(p.offset, p.size) for p in k.params.values()] == [(0, 4), (64, 128), (192, 3), (200, 8)]


def test_braces_scope_registers_and_labels():
    k = kernel(REGS + "{ .reg .b32 %r1; L: mov.u32 %r1, 1; bra L; }\nL: mov.u32 %r1, 2; bra L;")
    inner, first, outer, second = k.instrs
    assert inner.operands[0].name != outer.operands[0].name
    assert first.operands != second.operands


@pytest.mark.parametrize(
    ("body", "match"),
    [
        ("mov.u32 %r1, 0;", "not declared"),
        (REGS + "bra NOWHERE;", "label NOWHERE is not defined"),
        (REGS + "@%r1 bra X; X:", "not a predicate"),
        (REGS + "mov.u32 %r1, 0", "not closed"),
    ],
)
def test_errors_name_the_line(body, match):
    with pytest.raises(softgpu.PTXSyntaxError, match=match) as e:
        kernel(body)
    assert e.value.line >= 5


def test_device_functions_are_refused():
    with pytest.raises(softgpu.UnsupportedInstruction, match="device functions"):
        parse(HEAD + ".func helper()\n{ ret; }\n")


def test_local_registers_are_defined_before_use_in_one_block():
    k = kernel(REGS + "mov.u32 %r1, 1;\nadd.u32 %r2, %r1, 1;\n@%p1 mov.u32 %r3, 1;\nbra A;\nA: add.u32 %r4, %r2, %r3;")
    blocks, _ = flow.split(k)
    assert flow.block_local(blocks) == {"%r1", "%r4"}


PRODUCT = "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%r1,%r2,%r3,%r4}, {%r5,%r6,%r7,%r8}, %d1, 1, 1, 1, 0;"


@pytest.mark.parametrize(
    ("tail", "match"),
    [
        ("mov.u32 %r9, %r1; wgmma.wait_group.sync.aligned 0;", "read while"),
        ("mov.u32 %r5, 0; wgmma.wait_group.sync.aligned 0;", "written while"),
        (PRODUCT + "wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 1; mov.u32 %r9, %r1;", "read while"),
        ("@%p1 bra A; wgmma.wait_group.sync.aligned 0; A: mov.u32 %r9, %r1;", "read while"),
        ("wgmma.wait_group.sync.aligned 0; mov.u32 %r9, %r1; mov.u32 %r5, 1;", None),
    ],
)
def test_registers_of_products_in_flight(tail, match):
    blocks, labels = flow.split(kernel(REGS + PRODUCT + "wgmma.commit_group.sync.aligned;" + tail))
    if match is None:
        check_registers(blocks, labels)
        return
    with pytest.raises(softgpu.AsyncRace, match=match):
        check_registers(blocks, labels)
