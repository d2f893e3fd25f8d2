"""Counts to bounds, by hand on small listings and on kernels that are compiled here."""

import json

import pytest

from flamia import cli
from flamia.inspect.build import Binary, dynamic_shared, tensor_memory
from flamia.inspect.rates import CHIPS
from flamia.inspect.report import make_report, per_tile, weights_loop
from flamia.inspect.sass import Code
from flamia.inspect.subjects import SUBJECTS, Subject

EX2, SELECT = "MUFU.EX2 R1, R1", "FSEL R1, R1, R2, P0"
PACK = "F2FP.SATFINITE.E4M3.F32.PACK_AB_MERGE_C R1, R2, R3, RZ"
SUBJECT = Subject("test", ("sm_90a", "sm_100a"), "nobody:nothing")


def listing(*parts):
    """A kernel of loops; strings before a number are repeated so often."""
    text, at = "", 0
    for n, part in enumerate(parts):
        text += f".L_x_{n}:\n"
        lines = [line for line, times in part for _ in range(times)] + [f"@P0 BRA `(.L_x_{n})"]
        for line in lines:
            text += f"        /*{at:04x}*/                   {line} ;\n"
            at += 16
    return Code(text + f"        /*{at:04x}*/                   EXIT ;\n")


HOPPER = listing(
    # masked, then not: both convert 64 elements of a warpgroup's 64 × 128 scores
    [(EX2, 64), (SELECT, 64), (PACK, 32)],
    [
        ("QGMMA.64x128x32.F32.E4M3.E4M3 R92, gdesc[UR8], R92", 4),
        ("QGMMA.64x128x32.F32.E4M3.E4M3 R24, R156, gdesc[UR8], R24", 4),
        (EX2, 66), ("FFMA R1, R1, R2, R3", 100), (SELECT, 2), (PACK, 32), ("STS.128 [R1], R4", 1),
    ],
)  # fmt: skip


def test_unmasked_loop_is_found():
    assert sum(i.opcode == "FSEL" for i in weights_loop(HOPPER.loops).all) == 2
    with pytest.raises(ValueError, match="no loop with exponentials"):
        weights_loop(listing([("FFMA R1, R1, R2, R3", 4)]).loops)


def test_hopper_tile():
    tile, mma = per_tile(SUBJECT, HOPPER, CHIPS["sm_90a"])
    # a tile takes 8 turns of a warp, 2 of a warpgroup
    assert tile["exponentials"] == 8 * 66
    assert tile["fma"] == 8 * 100
    assert tile["conversion"] == 8 * 32
    assert mma == 2 * 2 * 128 * 128 * 128 / 8192
    # operands: 4 products with A (64 rows) and B (128), 4 with B alone, rows of 32 bytes; 512 bytes per STS.128
    assert tile["shared_bytes"] == 2 * (4 * 192 + 4 * 128) * 32 + 8 * 512


def test_blackwell_tile_adds_the_other_warps():
    product = "UTCQMMA gdesc[UR20], gdesc[UR10], tmem[UR46], tmem[UR38], idesc[UR39], UPT"
    code = listing(
        [(product, 16), ("UIADD3 UR4, UR4, 0x1, URZ", 10)],
        [(EX2, 96), ("FADD2.RM R4, R4, R6", 16), (PACK, 64), ("LDTM.x32 R4, tmem[UR4]", 4)],
        [("LDTM.x32 R4, tmem[UR4]", 4), ("FMUL2 R4, R4, R6", 64), ("STTM.x32 tmem[UR4], R4", 4)],
    )
    tile, mma = per_tile(SUBJECT, code, CHIPS["sm_100a"])
    assert mma == 2 * 2 * 128 * 128 * 128 / 16384
    # 4 turns of a softmax warp; half a turn of the issuing warp, which serves two tiles; 4 of a rescaling warp
    assert tile["exponentials"] == 4 * 96
    assert tile["emulated"] == 4 * 32
    assert tile["fma"] == 4 * 32 + 4 * 128
    assert tile["issue"] == 4 * 181 + 27 // 2 + 1 + 4 * 73
    assert tile["shared_bytes"] == 8 * 8192


def test_what_a_turn_may_skip_is_apart():
    # the skipped part converts again, as where an exponent changes: it must not make the tile look larger
    skip = ("@P1 BRA `(.L_x_9)", 1)
    code = listing([(EX2, 64), (PACK, 32), ("QGMMA.64x128x32 R1, gdesc[UR8]", 1), skip, (PACK, 32)])
    text = "\n".join(
        f"        /*00*/ {'@' + i.guard if i.guard else ''} {i.opcode} {i.operands} ;" for i in code.instructions
    )
    before, after = text.rsplit("\n        /*00*/ @P0 BRA", 1)
    code = Code(f".L_x_0:\n{before}\n.L_x_9:\n        /*00*/ @P0 BRA{after}")
    tile, _ = per_tile(SUBJECT, code, CHIPS["sm_90a"])
    assert tile["exponentials"] == 8 * 64
    assert tile["conversion"] == 8 * 32
    assert tile["skippable"] == 8 * 32


def test_report_names_the_lowest_bound():
    binary = Binary("k", HOPPER, 168, 0, 1024, 384, 0, (24, 240))
    report = make_report(SUBJECT, "sm_90a", binary)
    # 8 × 66 instructions of 32 lanes at 16 a clock
    assert report.cycles["mufu"] == 1056
    assert (report.unit, report.bound) == ("mufu", min(report.tflops.values()))
    # 2 × 4 × 128³ operations in 1024 cycles is the dense FP8 peak
    assert report.tflops["mma"] == pytest.approx(2 * 989.4, rel=1e-3)
    assert report.spill_bytes == 0
    assert report.opcodes == {"QGMMA.64x128x32.F32.E4M3.E4M3": 8}
    assert json.loads(json.dumps(report.as_dict()))["registers"] == 168


def test_scaled_products_are_told_apart():
    plain = "UTCQMMA gdesc[UR4], gdesc[UR6], tmem[UR8], tmem[UR10], idesc[UR11], UPT"
    scaled = "UTCQMMA tmem[UR4], gdesc[UR6], tmem[UR8], tmem[UR10], idesc[UR11], tmem[UR12], UPT"
    code = listing([(plain, 3), (scaled, 2)], [(EX2, 64), (PACK, 64)])
    report = make_report(SUBJECT, "sm_100a", Binary("k", code, 128, 0, 0, 512, 512, ()))
    assert report.opcodes == {"UTCQMMA": 3, "UTCQMMA (scaled)": 2}


def test_spills_are_bytes_of_a_thread():
    code = listing(
        [("STL.64 [R1], R4", 2), ("LDL R4, [R1]", 1), (EX2, 8), (PACK, 4), ("QGMMA.64x8x32 R1, gdesc[UR8]", 1)]
    )
    report = make_report(SUBJECT, "sm_90a", Binary("k", code, 168, 16, 0, 384, 0, ()))
    assert (report.spill_bytes, report.loop_spill_bytes) == (2 * 8 + 4, 2 * 8 + 4)
    outside = listing([("STL.64 [R1], R4", 2)], [(EX2, 8), (PACK, 4), ("QGMMA.64x8x32 R1, gdesc[UR8]", 1)])
    report = make_report(SUBJECT, "sm_90a", Binary("k", outside, 168, 16, 0, 384, 0, ()))
    assert (report.spill_bytes, report.loop_spill_bytes) == (16, 0)


def test_sizes_from_texts():
    assert tensor_memory("tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r1], 256;") == 256
    assert tensor_memory("mov.b32 %r7, 512;\ntcgen05.alloc.cta_group::1.sync.aligned.b32 [%r1], %r7;") == 512
    assert tensor_memory("ret;") == 0
    with pytest.raises(ValueError, match="no constant"):
        tensor_memory("tcgen05.alloc.cta_group::1.sync.aligned.b32 [%r1], %r7;")
    ir = """
llvm.func @f() {
    %1 = llvm.mlir.constant(152576 : i64) : i64
    llvm.store %1, %2 : i64, !llvm.ptr
    %3 = llvm.call @_cudaLaunchKernelEx(%4, %5, %6) : (!llvm.ptr, !llvm.ptr, !llvm.ptr) -> i32
"""
    assert dynamic_shared(ir) == 152576
    with pytest.raises(ValueError, match="no launch"):
        dynamic_shared("llvm.func @f()")


def test_subjects_are_distinct_and_their_targets_have_rates():
    assert len({s.name for s in SUBJECTS}) == len(SUBJECTS)
    assert {a for s in SUBJECTS for a in s.archs} == set(CHIPS)


@pytest.mark.parametrize(("words", "match"), [(["sm80"], "is none of"), (["sm90", "--kernels", "x?"], "matches none")])
def test_bad_input(words, match, capsys):
    with pytest.raises(SystemExit) as e:
        cli.main(["inspect", *words])
    assert e.value.code == 2
    assert match in capsys.readouterr().err


def test_table(monkeypatch, capsys):
    report = make_report(SUBJECT, "sm_90a", Binary("k", HOPPER, 168, 0, 1024, 384, 0, (24, 240)))
    monkeypatch.setattr("flamia.inspect.cli.inspect_kernel", lambda subject, arch: report)
    monkeypatch.setenv("COLUMNS", "160")
    with pytest.raises(SystemExit) as e:
        cli.main(["inspect", "sm90", "--kernels", "sm90 forward"])
    assert e.value.code == 0
    out = capsys.readouterr().out
    rows = [line.split() for line in out.splitlines() if "test" in line]
    assert rows[0] == [
        "│",
        "test",
        "│",
        "168",
        "│",
        "24",
        "240",
        "│",
        "0",
        "│",
        "0",
        "│",
        "1024",
        "│",
        "0",
        "│",
        "384",
        "│",
    ]
    assert [n for n in rows[1] if n != "│"][:4] == ["test", "1024", "1056", "200"]
    assert "H200" in out


def test_a_missing_package_is_named_with_its_extra(monkeypatch, capsys):
    monkeypatch.setattr("flamia.inspect.report.find_spec", lambda name: None if name == "flash_attn" else object())
    with pytest.raises(SystemExit) as e:
        cli.main(["inspect", "sm90", "--kernels", "FlashAttention"])
    assert e.value.code == 1
    assert "pip install 'flamia[softgpu]'" in capsys.readouterr().err


@pytest.mark.slow
# the Hopper value product has a ones column, N = 136
@pytest.mark.parametrize(("target", "mma"), [("sm90", 512 + 544), ("sm100", 512)])
def test_our_forwards(target, mma, capsys):
    pytest.importorskip("cutlass")
    pytest.importorskip("triton")
    with pytest.raises(SystemExit) as e:
        cli.main(["inspect", target, "--kernels", f"{target} forward", "--no-peers", "--json"])
    assert e.value.code == 0
    (line,) = capsys.readouterr().out.splitlines()
    report = json.loads(line)
    assert report["cycles"]["mma"] == mma
    exponentials = report["counts"]["exponentials"] + report["counts"]["emulated"]
    assert 128 * 128 <= exponentials < 1.05 * 128 * 128
    # a conversion makes two codes
    assert report["counts"]["conversion"] >= 128 * 128 / 2
    if target == "sm100":  # the score product is unscaled, the value product scaled
        assert set(report["opcodes"]) == {"UTCQMMA", "UTCQMMA (scaled)"}
    assert report["registers"] * report["threads"] <= 65536
    assert 0 < report["smem_bytes"] <= 233472
    assert report["tmem_columns"] == (512 if target == "sm100" else 0)
    assert report["bound"] == min(report["tflops"].values())


def compiled(capsys, target, kernels, *options):
    """Reports of the kernels with these words in their names."""
    with pytest.raises(SystemExit) as e:
        cli.main(["inspect", target, "--kernels", kernels, "--json", *options])
    assert e.value.code == 0
    return {report["kernel"]: report for report in map(json.loads, capsys.readouterr().out.splitlines())}


@pytest.mark.slow
def test_blackwell_backwards(capsys):
    pytest.importorskip("cutlass")
    pytest.importorskip("triton")
    reports = compiled(capsys, "sm100", "sm100 backward", "--no-peers")
    assert len(reports) == 2
    for name, report in reports.items():
        scaled, plain = (f"UTCQMMA{'.2CTA' * ('pairs' in name)}{end}" for end in (" (scaled)", ""))
        assert {scaled, plain} < set(report["opcodes"])
        assert any(opcode.startswith("UBLKRED") and ".ADD.F16" in opcode for opcode in report["opcodes"])
        assert report["spill_bytes"] == 0
        assert report["cycles"]["mma"] == 5 * 256
        exponentials = report["counts"]["exponentials"] + report["counts"]["emulated"]
        assert 128 * 128 <= exponentials < 1.05 * 128 * 128
        assert report["smem_bytes"] <= 232448


@pytest.mark.matrix
@pytest.mark.parametrize("target", ["sm100", "sm103"])
def test_bounds_beside_flash_attention(target, capsys):
    """Counted alike: our forward is bound no lower than theirs in FP8, our backwards 1.3 times as high as in BF16."""
    for module in ("cutlass", "triton", "flash_attn"):
        pytest.importorskip(module)
    forwards = compiled(capsys, target, "forward, MXFP8") | compiled(capsys, target, "forward, FP8")
    bounds = {name: report["bound"] for name, report in forwards.items()}
    assert bounds["flamia sm100 forward, MXFP8 causal"] >= bounds["FlashAttention-4 forward, FP8 causal"]
    reports = compiled(capsys, target, "backward")
    theirs = reports.pop("FlashAttention-4 backward, BF16 causal")["bound"]
    assert len(reports) == 2
    assert all(report["bound"] >= 1.3 * theirs for report in reports.values())
    ours = [*reports.values(), forwards["flamia sm100 forward, MXFP8 causal"]]
    assert [report["spill_bytes"] for report in ours] == [0, 0, 0]
