"""What `flamia bench forward` can show without a GPU: workloads, checks before the clock, peers, tables and plots."""

from __future__ import annotations

import dataclasses
import json
import math

import pytest
import torch

from flamia.benchmarks import flash_attention, forward, peers
from flamia.benchmarks.forward import CALL, KERNEL, Row
from flamia.benchmarks.peers import PEERS, Inputs, Peer, Prepared
from flamia.benchmarks.workloads import Workload, batched_workloads, named_workloads, packed_workloads

SMALL = Workload("small", (70, 33, 70), 4, 2, 32)


def textbook(inputs: Inputs) -> torch.Tensor:
    """Exact attention of every document, FP64."""
    o = []
    ratio = inputs.q.shape[1] // inputs.k.shape[1]
    for q, k, v in zip(
        *(x.double().split(inputs.workload.lengths) for x in (inputs.q, inputs.k, inputs.v)), strict=True
    ):
        k, v = (x.repeat_interleave(ratio, 1) for x in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) / math.sqrt(q.shape[2])
        if inputs.causal:
            scores = scores.masked_fill(torch.ones_like(scores[0], dtype=torch.bool).triu(1), -math.inf)
        o.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1), v))
    return torch.cat(o)


def prepared(o: torch.Tensor) -> Prepared:
    return Prepared(lambda: o, lambda result: result)


def test_the_nine_packed_rows():
    rows = packed_workloads()
    assert len(rows) == 9
    by_name = {row.name: row for row in rows}
    assert by_name["equal-1x32k"].lengths == (32768,)
    assert by_name["loguni-11-16k-gqa4"].heads_kv == 4
    assert [row.name for row in rows if row.is_batch] == ["equal-32x512", "equal-8x2k", "equal-4x4k", "equal-1x32k"]
    assert all(row.tokens in (16384, 32768, 65536) for row in rows)
    # 6.796 ms were 647 TFLOP/s by FlashAttention's own count.
    assert by_name["equal-1x32k"].flops(True) / 6.796e-3 == pytest.approx(647e12, rel=1e-3)
    assert by_name["equal-1x32k"].flops(False) == 2 * by_name["equal-1x32k"].flops(True)


def test_workloads_by_name():
    assert named_workloads("all") == packed_workloads() + batched_workloads()
    assert named_workloads("equal-8x2k, equal-8x2k,batched")[0].name == "equal-8x2k"
    assert len(named_workloads("equal-8x2k, equal-8x2k,batched")) == 1 + len(batched_workloads())
    assert all(w.is_batch for w in batched_workloads())
    with pytest.raises(ValueError, match="workloads='equal-9x9' is unknown: it must be one of equal-32x512"):
        named_workloads("equal-9x9")


@pytest.mark.parametrize("causal", [True, False])
def test_sampled_rows_are_exact_attention(causal):
    inputs = Inputs.make(SMALL, causal, device="cpu")
    rows, exact = forward.sampled_attention(inputs)
    assert len(rows) == forward.SAMPLE
    assert len(set(rows.tolist())) > forward.SAMPLE // 2
    assert torch.allclose(exact.double(), textbook(inputs)[rows], atol=1e-6)


@pytest.mark.parametrize("fault", ["nan", "mask", "scale", "head", "one document"])
def test_a_wrong_output_is_not_timed(fault):
    inputs = Inputs.make(SMALL, True, device="cpu")
    right = textbook(inputs).float()
    wrong = right.clone()
    if fault == "nan":
        wrong[3, 1, 5] = math.nan
    elif fault == "mask":
        wrong = textbook(dataclasses.replace(inputs, causal=False)).float()
    elif fault == "scale":
        wrong = textbook(dataclasses.replace(inputs, q=inputs.q * 0.5)).float()
    elif fault == "head":
        wrong = right.roll(1, 1)
    else:
        wrong[70:103] = right[70:103].flip(0)
    good = {"a": (prepared(right), 0.998), "b": (prepared(right.bfloat16()), 0.9999)}
    assert min(forward.check(inputs, good).values()) > 0.9999
    with pytest.raises(RuntimeError, match="c on small, causal"):
        forward.check(inputs, good | {"c": (prepared(wrong), 0.998)})


def test_outputs_are_held_against_each_other_where_no_row_was_sampled(monkeypatch):
    monkeypatch.setattr(forward, "SAMPLE", 1)
    inputs = Inputs.make(SMALL, True, device="cpu")
    right = textbook(inputs).float()
    (row,), _ = forward.sampled_attention(inputs)
    wrong = right.flip(0)
    wrong[row] = right[row]
    with pytest.raises(RuntimeError, match="c and a on small, causal differ: cosine"):
        forward.check(inputs, {"a": (prepared(right), 0.999), "c": (prepared(wrong), 0.999)})


def test_measurements_of_one_workload(monkeypatch):
    inputs = []

    def make(workload, causal, seed=0):
        inputs.append(original(workload, causal, seed, "cpu"))
        return inputs[-1]

    def raising(_):
        raise RuntimeError("no plan\nsecond line")

    original = Inputs.make
    monkeypatch.setattr(Inputs, "make", make)
    answer = lambda inputs, recipe=None: prepared(textbook(inputs).float())  # noqa: E731
    monkeypatch.setattr(forward, "kernel_call", answer)
    monkeypatch.setattr(forward, "whole_call", answer)
    monkeypatch.setattr(
        forward, "paired_seconds", lambda calls, rounds: {n: [(i + 1) * 1e-3] * rounds for i, n in enumerate(calls)}
    )
    table = {
        "fast": Peer("fast", True, 0.9999, lambda _: None, answer),
        "slow": Peer("slow", True, 0.9999, lambda _: None, answer),
        "batches": Peer("batches", False, 0.9999, lambda _: None, answer),
        "absent": Peer("absent", True, 0.9999, lambda _: "is not installed", answer),
        "broken": Peer("broken", True, 0.9999, lambda _: None, raising),
    }
    monkeypatch.setattr(forward, "PEERS", table)
    rows = {row.name: row for row in forward.measure(SMALL, True, tuple(table), "mxfp8", 3)}
    assert rows["batches"].refused == "has no packed rows"
    assert rows["absent"].refused == "is not installed"
    assert rows["broken"].refused == "RuntimeError: no plan"
    assert (rows[KERNEL].seconds, rows[CALL].seconds, rows["fast"].seconds) == (1e-3, 2e-3, 3e-3)
    assert rows[KERNEL].ratio == pytest.approx(1 / 3)
    assert rows[CALL].ratio == pytest.approx(2 / 3)
    assert rows["fast"].ratio is None
    assert rows["slow"].tflops == pytest.approx(SMALL.flops(True) / 4e-3 / 1e12)
    assert rows["slow"].cosine > 0.9999


def test_peers_say_what_they_need(monkeypatch):
    packed, batch = packed_workloads()[4], packed_workloads()[1]
    monkeypatch.delenv("FLAMIA_KERNELS", raising=False)
    monkeypatch.setattr(peers.importlib.util, "find_spec", lambda name: None)
    assert "flash-attn-4 is not installed" in PEERS["fa4-bf16"].refuses(packed)
    assert PEERS["cudnn-bf16"].refuses(packed) == "has no packed rows"
    assert PEERS["cudnn-fp8"].refuses(batch) == "nvidia-cudnn-frontend is not installed"
    monkeypatch.setenv("FLAMIA_KERNELS", "somewhere")
    assert PEERS["fa4-bf16"].refuses(packed) is None


@pytest.mark.slow
@pytest.mark.parametrize("causal", [pytest.param(True, marks=pytest.mark.matrix), False])
def test_flash_attention_as_a_library_takes_the_arguments_it_is_given(monkeypatch, tmp_path, causal):
    """The object that goes into the library, on a software device, called as the benchmark calls the library."""
    pytest.importorskip("flash_attn")
    pytest.importorskip("tvm_ffi")
    from cutlass.cutlass_dsl import CuTeDSL

    import softgpu
    from softgpu.cutedsl import load_compiled

    settings = CuTeDSL._get_dsl().envar
    monkeypatch.setattr(settings, "keep_ptx", True)
    monkeypatch.setattr(settings, "dump_dir", str(tmp_path))
    workload = Workload("small", (70, 33), 2, 1, 64)
    inputs = Inputs.make(workload, causal, device="cpu")

    def load(kernel):
        module, _, function = kernel.builder.partition(":")
        assert module == flash_attention.__name__
        return load_compiled(softgpu.Device(), getattr(flash_attention, function)(kernel.arch, **dict(kernel.options)))

    monkeypatch.setattr(flash_attention, "load", load)
    monkeypatch.setattr(flash_attention, "is_installed", lambda: False)
    call = PEERS["fa4-bf16"].prepare(inputs)
    o = call.output(call.run())
    assert torch.cosine_similarity(o.double().flatten(), textbook(inputs).flatten(), dim=0) > 0.9999


def rows_to_show() -> list[Row]:
    shape = ("equal-8x2k", "causal", 16384, 8, "16/16")
    return [
        Row(*shape, "cudnn-fp8", refused="nvidia-cudnn-frontend is not installed"),
        Row(*shape, KERNEL, 2e-4, 687.2, 0.99881, 0.72),
        Row(*shape, "fa4-bf16", 2.78e-4, 494.4, 0.99999),
        Row("batch-1x16k-16h16", "full", 16384, 1, "16/16", CALL, 1e-3, 1234.0, 0.9985),
    ]


def test_table_shows_what_was_measured(capsys):
    from rich.console import Console

    from flamia.benchmarks.cli import render_forward

    Console(width=200).print(render_forward(rows_to_show(), "a device"))
    text = capsys.readouterr().out
    for word in ("equal-8x2k", "0.200", "687", "0.99881", "0.72", "0.278", "is not installed", "batch-1x16k", "1234"):
        assert word in text


def test_rows_are_json():
    assert json.loads(json.dumps([dataclasses.asdict(row) for row in rows_to_show()]))[1]["ratio"] == 0.72


def test_plot_is_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    from flamia.benchmarks.plots import draw_forward

    draw_forward(rows_to_show(), tmp_path / "plot.svg", "a device")
    text = (tmp_path / "plot.svg").read_text()
    assert text.startswith("<?xml")
    assert len(text) > 10_000
