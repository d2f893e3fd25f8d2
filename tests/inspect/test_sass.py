"""Listings to blocks and loops."""

import pytest

from flamia.inspect.sass import Code, Instruction

# A loop (blocks from .L_x_1) with a part that may be skipped, a spin that lies after EXIT, and a loop around it all.
LISTING = """
	.section	.text.kernel,"ax",@progbits
        .global         kernel
.text.kernel:
        /*0000*/                   S2R R0, SR_TID.X ;
.L_x_0:
        /*0010*/                   MOV R1, RZ ;
.L_x_1:
        /*0020*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR4], R3 ;
        /*0030*/              @!P0 BRA `(.L_x_4) ;
.L_x_5:
        /*0040*/                   MUFU.EX2 R4, R4 ;
        /*0050*/                   BRA.DIV UR6, `(.L_x_2) ;
        /*0060*/                   FFMA R5, R4, R5, R6 ;
.L_x_2:
        /*0070*/               @P1 BRA `(.L_x_1) ;
        /*0080*/                   BRA.U !UP0, `(.L_x_0) ;
        /*0090*/                   EXIT ;
.L_x_4:
        /*00a0*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR4], R3 ;
        /*00b0*/              @!P0 BRA `(.L_x_4) ;
        /*00c0*/                   BRA `(.L_x_5) ;
.L_x_6:
        /*00d0*/                   BRA `(.L_x_6);
"""


def test_instructions_and_blocks():
    code = Code(LISTING)
    assert len(code.instructions) == 14
    assert code.instructions[4] == Instruction("", "MUFU.EX2", "R4, R4")
    assert code.instructions[3].guard == "!P0"
    assert code.instructions[5].head == "BRA"
    assert code.starts == [0, 1, 2, 4, 6, 7, 8, 9, 10, 12, 13]
    # block 3 ends in a branch on divergence: both ways
    assert sorted(code.successors[3]) == [4, 5]
    assert code.successors[7] == []


def test_loops_leave_out_the_loops_inside():
    loops = Code(LISTING).loops
    outer, inner, spin = loops
    assert [i.opcode for i in outer.all] == ["MOV", "BRA.U"]
    # the way back from the spin is in some turns only, as is what the divergent branch skips
    assert [i.opcode for i in inner.always] == ["SYNCS.PHASECHK.TRANS64.TRYWAIT", "BRA", "MUFU.EX2", "BRA.DIV", "BRA"]
    assert [i.opcode for i in inner.sometimes] == ["FFMA", "BRA"]
    assert [i.head for i in spin.all] == ["SYNCS", "BRA"]


def test_indirect_branches_have_their_targets():
    code = Code(
        """
        /*0000*/                   BRX R2 -0x790      (*"BRANCH_TARGETS .L_x_1,.L_x_2"*) ;
.L_x_1:
        /*0010*/                   EXIT ;
.L_x_2:
        /*0020*/                   NOP ;
        /*0030*/                   BRA `(.L_x_2) ;
"""
    )
    assert sorted(code.successors[0]) == [1, 2]
    assert len(code.loops) == 1


def test_what_is_no_listing_is_refused():
    with pytest.raises(ValueError, match="text has no instructions"):
        Code("nothing here")
    with pytest.raises(ValueError, match=r"branches to \.L_x_9"):
        Code("        /*0000*/                   BRA `(.L_x_9) ;\n").loops  # noqa: B018
