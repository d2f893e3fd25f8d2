"""Control flow, barriers, memories, asynchronous copies, and every diagnosis."""

from __future__ import annotations

import numpy as np
import pytest

import softgpu
from kernels import run, source
from softgpu import Device

AT = "\tmul.wide.u32 %d20, %r0, 4; add.s64 %d21, %d0, %d20;\n"


def test_lanes_part_and_meet_again():
    out = np.zeros(128, np.uint32)
    body = (
        AT
        + """
	mov.u32 %r1, 0; and.b32 %r2, %r0, 7;
LOOP:
	setp.ge.u32 %p1, %r1, %r2;
	@%p1 bra DONE;
	add.u32 %r1, %r1, 1;
	and.b32 %r3, %r1, 1; setp.eq.u32 %p2, %r3, 0;
	@%p2 bra LOOP;
	add.u32 %r4, %r4, 10;
	bra LOOP;
DONE:
	elect.sync %r5|%p3, -1;
	selp.b32 %r6, 1000, 0, %p3;
	add.u32 %r7, %r1, %r6;
	st.global.u32 [%d21], %r7;"""
    )
    run(body, out, threads=128)
    assert (out == np.arange(128) % 8 + np.where(np.arange(128) % 32 == 0, 1000, 0)).all()


def test_vector_reductions_of_fp16_pairs_round_each_number():
    """Every lane adds eight numbers to 16 bytes of its own, twice."""
    rng = np.random.default_rng(0)
    first, second = (rng.normal(0, 100, (32, 8)).astype(np.float16) for _ in range(2))
    out = np.full((32, 8), 2048, np.float16)
    body = """
	mul.wide.u32 %d20, %r0, 16; add.s64 %d21, %d0, %d20; add.s64 %d22, %d1, %d20;
	ld.global.v4.b32 {%r1, %r2, %r3, %r4}, [%d22];
	red.relaxed.gpu.global.add.noftz.v4.f16x2 [%d21], {%r1, %r2, %r3, %r4};"""
    run(body, out, first.view(np.uint32))
    expected = np.full((32, 8), 2048, np.float16) + first
    assert (out == expected).all()
    run(body, out, second[::-1].copy().view(np.uint32))
    assert (out == expected + second[::-1]).all()


def test_scopes_of_braces_have_their_own_names():
    out = np.zeros(32, np.uint32)
    body = (
        AT
        + """
	mov.u32 %r1, 5;
	{ .reg .b32 x; .reg .pred p;
	mov.u32 x, 7; setp.eq.u32 p, x, 7; @p bra HERE; mov.u32 %r1, 0; HERE: add.u32 %r1, %r1, x; }
	{ .reg .b32 x; mov.u32 x, 9; bra HERE; HERE: add.u32 %r1, %r1, x; }
	st.global.u32 [%d21], %r1;"""
    )
    run(body, out)
    assert (out == 21).all()


@pytest.mark.parametrize("seed", [None, 1, 2, 3])
def test_shared_memory_reduction(seed):
    out = np.zeros(1, np.uint32)
    body = """
	mov.u32 %r1, dynamic; shl.b32 %r2, %r0, 2; add.u32 %r3, %r1, %r2; st.shared.u32 [%r3], %r0;
	mov.u32 %r4, 128;
STEP:
	bar.sync 0;
	setp.ge.u32 %p1, %r0, %r4;
	@%p1 bra NEXT;
	shl.b32 %r5, %r4, 2; add.u32 %r6, %r3, %r5; ld.shared.u32 %r7, [%r6]; ld.shared.u32 %r8, [%r3];
	add.u32 %r8, %r8, %r7; st.shared.u32 [%r3], %r8;
NEXT:
	shr.u32 %r4, %r4, 1; setp.ne.u32 %p2, %r4, 0;
	@%p2 bra STEP;
	setp.ne.u32 %p3, %r0, 0;
	@%p3 bra END;
	ld.shared.u32 %r9, [%r1]; st.global.u32 [%d0], %r9;
END:"""
    run(body, out, threads=256, shared=1024, device=Device(seed=seed))
    assert out[0] == 255 * 128


def test_one_block_may_wait_for_another():
    out = np.zeros(2, np.uint32)
    body = """
	mov.u32 %r1, %ctaid.x; setp.ne.u32 %p1, %r1, 0; setp.ne.u32 %p3, %r0, 0;
	@%p3 bra END;
	@%p1 bra SECOND;
WAIT:
	ld.acquire.gpu.global.u32 %r2, [%d0]; setp.eq.u32 %p2, %r2, 0;
	@%p2 bra WAIT;
	st.global.u32 [%d0+4], %r2;
	bra END;
SECOND:
	atom.global.add.u32 %r3, [%d0], 42;
END:"""
    run(body, out, grid=2)
    assert out.tolist() == [42, 42]


def test_distributed_shared_memory():
    out = np.zeros(4, np.uint32)
    body = """
	mov.u32 %r1, dynamic; mov.u32 %r2, %cluster_ctarank; mul.lo.u32 %r3, %r2, 11; st.shared.u32 [%r1], %r3;
	barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;
	xor.b32 %r4, %r2, 1; mapa.shared::cluster.u32 %r5, %r1, %r4; ld.shared::cluster.u32 %r6, [%r5];
	mul.wide.u32 %d5, %r2, 4; add.s64 %d6, %d0, %d5; st.global.u32 [%d6], %r6;
	barrier.cluster.arrive; barrier.cluster.wait;"""
    run(body, out, grid=4, cluster=4, shared=128)
    assert out.tolist() == [11, 0, 33, 22]


BULK = """
	mov.u32 %r1, dynamic; add.u32 %r2, %r1, 1024;
	setp.ne.u32 %p1, %r0, 0;
	@%p1 bra GO;
	mbarrier.init.shared.b64 [%r2], 1;
	fence.mbarrier_init.release.cluster;
	mbarrier.arrive.expect_tx.shared.b64 _, [%r2], {bytes};
	cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r1], [%d0], 128, [%r2];
GO:
	bar.sync 0;
WAIT:
	mbarrier.try_wait.parity.shared.b64 %p2, [%r2], {parity};
	@!%p2 bra WAIT;
	shl.b32 %r3, %r0, 2; add.u32 %r4, %r1, %r3; ld.shared.u32 %r5, [%r4];
	add.u32 %r5, %r5, 1; st.shared.u32 [%r4], %r5;
	{fence}
	bar.sync 0;
	@%p1 bra END;
	cp.async.bulk.global.shared::cta.bulk_group [%d1], [%r1], 128;
	cp.async.bulk.commit_group;
	cp.async.bulk.wait_group 0;
END:"""


def bulk(bytes=128, parity=0, fence="fence.proxy.async.shared::cta;", **kw):
    x, y = np.arange(32, dtype=np.uint32), np.zeros(32, np.uint32)
    run(BULK.format(bytes=bytes, parity=parity, fence=fence), x, y, shared=2048, **kw)
    return x, y


@pytest.mark.parametrize("seed", [None, 1, 2])
def test_bulk_copies_there_and_back(seed):
    x, y = bulk(device=Device(seed=seed))
    assert (y == x + 1).all()


def test_deadlock_says_who_waits_on_what():
    with pytest.raises(softgpu.Deadlock, match=r"warp 0, 32 lanes: mbarrier[\s\S]*0 of 1 arrivals and 16 bytes"):
        bulk(bytes=144)


def test_reading_before_the_copy_is_complete():
    with pytest.raises(softgpu.UninitialisedRead, match="never written"):
        bulk(parity=1)


def test_missing_proxy_fence():
    with pytest.raises(softgpu.MissingProxyFence, match="written by warp 0") as e:
        bulk(fence="")
    assert "cp.async.bulk.global" in e.value.text


def test_checks_can_be_switched_off():
    _, y = bulk(fence="", device=Device(checks=softgpu.Checks(proxy_fences=False)))
    assert y[0] == 1


def test_writing_under_a_copy_in_flight():
    body = """
	mov.u32 %r1, dynamic; shl.b32 %r2, %r0, 2; add.u32 %r3, %r1, %r2; st.shared.u32 [%r3], %r0;
	fence.proxy.async.shared::cta; bar.sync 0; setp.ne.u32 %p1, %r0, 0;
	@%p1 bra SKIP;
	cp.async.bulk.global.shared::cta.bulk_group [%d0], [%r1], 128; cp.async.bulk.commit_group;
SKIP:
	bar.sync 0;
	st.shared.u32 [%r3], 0;"""
    with pytest.raises(softgpu.AsyncRace, match="in flight reads it"):
        run(body, np.zeros(32, np.uint32), shared=2048)


@pytest.mark.parametrize(
    ("text", "error", "match"),
    [
        ("ld.global.u32 %r1, [%d0+4096];", softgpu.OutOfBounds, "outside of every buffer"),
        ("ld.global.u32 %r1, [%d0+2];", softgpu.Misaligned, "multiple of 4"),
        ("mov.u32 %r1, dynamic; ld.shared.u32 %r2, [%r1];", softgpu.UninitialisedRead, "never written"),
        ("mov.u32 %r1, dynamic; st.shared.u32 [%r1+65536], 0;", softgpu.OutOfBounds, "beyond the CTA"),
        ("bar.sync 1, 64;", softgpu.Deadlock, "named barrier: 32 of 64"),
        ("mov.u32 %r1, dynamic; mbarrier.arrive.shared.b64 _, [%r1];", softgpu.BarrierMisuse, "no mbarrier"),
        ("add.sat.s32 %r1, %r0, %r0;", softgpu.UnsupportedInstruction, "modifier .sat"),
        ("tex.2d.v4.f32.s32 {%r1}, [%r2];", softgpu.UnsupportedInstruction, "opcode tex"),
        ("trap;", softgpu.SoftGPUError, "trap"),
        ("L: bra L;", softgpu.Deadlock, "livelock"),
    ],
)  # fmt: skip
def test_diagnoses_name_the_instruction(text, error, match):
    with pytest.raises(error, match=match) as e:
        run(text, np.zeros(32, np.uint32), shared=128)
    if error is not softgpu.Deadlock:
        assert e.value.text in text
        assert source(text, 1).split("\n")[e.value.line - 1].strip() == text.strip()


def test_tensor_memory_rules():
    alloc = """
	mov.u32 %r1, dynamic;
	tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r1], {n};
	ld.shared.u32 %r2, [%r1];
	{body}
	tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r2, {n};"""
    out = np.zeros(64, np.uint32)

    def go(body, n=32):
        run(AT + alloc.format(body=body, n=n), out, shared=128, target="sm_100a")

    write = "tcgen05.st.sync.aligned.32x32b.x1.b32 [%r2], {%r0}; tcgen05.wait::st.sync.aligned;"
    go(write + "tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r5}, [%r2]; st.global.u32 [%d21], %r5;")
    assert (out[:32] == np.arange(32)).all()
    with pytest.raises(softgpu.UninitialisedRead, match="column 1 "):
        go(write + "tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r5}, [%r2+1];")
    with pytest.raises(softgpu.TensorMemoryMisuse, match="touches"):
        go(write + "tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r5}, [%r2+32];")
    with pytest.raises(softgpu.TensorMemoryMisuse, match="cannot reach"):
        go("tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r5}, [%r2+2097152];")
    with pytest.raises(softgpu.TensorMemoryMisuse, match="power of two"):
        go("", 48)
    with pytest.raises(softgpu.SoftGPUError, match=r"no tcgen05\.wait::st"):
        go("tcgen05.st.sync.aligned.32x32b.x1.b32 [%r2], {%r0};")


def test_tensor_loads_used_before_their_wait():
    # a loop: the load of one turn is used in the next, over the back edge
    text = """
	mov.u32 %r1, dynamic;
	tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r1], 32;
	ld.shared.u32 %r2, [%r1];
	tcgen05.st.sync.aligned.32x32b.x1.b32 [%r2], {{%r0}};
	tcgen05.wait::st.sync.aligned;
	mov.u32 %r5, 7;
	mov.u32 %r3, 0;
	AGAIN: st.global.u32 [%d21], %r5;
	tcgen05.ld.sync.aligned.32x32b.x1.b32 {{%r5}}, [%r2];
	{wait}
	add.u32 %r3, %r3, 1;
	setp.lt.u32 %p1, %r3, 2;
	@%p1 bra AGAIN;
	tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r2, 32;"""
    strict = softgpu.Checks(tensor_loads=True)

    def go(wait, checks):
        out = np.zeros(32, np.uint32)
        device = Device(checks=checks)
        report = run(AT + text.format(wait=wait), out, shared=128, target="sm_100a", device=device)
        assert (out == np.arange(32)).all()
        return report

    assert go("tcgen05.wait::ld.sync.aligned;", strict).notes == []
    with pytest.raises(softgpu.AsyncRace, match=r"%r5 is used before the tcgen05\.ld") as e:
        go("", strict)
    assert "st.global.u32 [%d21], %r5" in e.value.text
    # shipped kernels do it: said, not refused
    notes = go("", softgpu.ALL).notes
    assert len(notes) == 1
    assert "2 instructions use registers of a tcgen05.ld before tcgen05.wait::ld" in notes[0]


def test_warps_cannot_ask_for_more_registers_than_there_are():
    body = """
	setp.lt.u32 %p1, %r0, 128;
	@%p1 bra PRODUCER;
	setmaxnreg.inc.sync.aligned.u32 240;
	bra DONE;
PRODUCER:
	setmaxnreg.dec.sync.aligned.u32 {};
DONE:
	ret;"""
    run(body.format(24), threads=384)
    with pytest.raises(softgpu.Deadlock, match=r"setmaxnreg asks for 65536 registers.*168 a thread, 64512, at most"):
        run(body.format(32), threads=384)


def test_report_counts_opcodes():
    out = np.zeros(64, np.uint32)
    report = run(
        AT + "\tsetp.eq.u32 %p1, %r0, %r0; @%p1 bra OVER; mul.lo.u32 %r1, %r0, 3;\nOVER: st.global.u32 [%d21], %r0;",
        out,
        threads=64,
    )
    assert report.opcodes["st.global.u32"] == 2
    assert report.opcodes["mul.lo.u32"] == 0
    assert [i.op for i in report.unreached] == ["mul.lo.u32"]
    assert "never: line" in str(report)


def test_scale_factors_are_copied_to_all_four_quarters():
    out = np.zeros((128, 4), np.uint32)
    data = np.arange(128, dtype=np.uint32) * 16777619
    body = """
	mov.u32 %r1, dynamic; add.u32 %r2, %r1, 1024; add.u32 %r3, %r1, 1032;
	setp.ge.u32 %p1, %r0, 32; setp.ne.u32 %p2, %r0, 0;
	shl.b32 %r4, %r0, 2; add.u32 %r5, %r1, %r4; mul.wide.u32 %d5, %r0, 4; add.s64 %d6, %d0, %d5;
	ld.global.u32 %r6, [%d6]; st.shared.u32 [%r5], %r6;
	fence.proxy.async.shared::cta;
	@%p1 bra READY;
	tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r3], 32;
	@%p2 bra READY;
	mbarrier.init.shared.b64 [%r2], 1;
READY:
	bar.sync 0;
	ld.shared.u32 %r7, [%r3];
	@%p2 bra WAIT;
	shr.u32 %r8, %r1, 4; cvt.u64.u32 %d7, %r8; or.b64 %d8, %d7, 70403103916032;
	or.b64 %d9, %d8, 34359738368;
	tcgen05.cp.cta_group::1.32x128b.warpx4 [%r7], %d9;
	tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%r2];
WAIT:
	mbarrier.try_wait.parity.shared.b64 %p3, [%r2], 0;
	@!%p3 bra WAIT;
	and.b32 %r9, %r0, 96; shl.b32 %r10, %r9, 16; add.u32 %r11, %r7, %r10;
	tcgen05.ld.sync.aligned.32x32b.x4.b32 {%r20, %r21, %r22, %r23}, [%r11];
	tcgen05.wait::ld.sync.aligned;
	mul.wide.u32 %d10, %r0, 16; add.s64 %d11, %d1, %d10; st.global.v4.b32 [%d11], {%r20, %r21, %r22, %r23};
	bar.sync 0;
	@%p1 bra END;
	tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r7, 32;
END:"""
    run(body, data, out, threads=128, shared=2048, target="sm_100a")
    assert (out.reshape(4, 32, 4) == data.reshape(32, 4)).all()


def test_fixtures_give_devices_of_both_orders(soft_device, soft_device_shuffled):
    assert soft_device.seed is None
    assert soft_device_shuffled.seed in (1, 2)
    for device in (soft_device, soft_device_shuffled):
        x, y = bulk(device=device)
        assert (y == x + 1).all()
        assert len(device.reports) == 1
