"""The doctor: what it finds is true of this machine, and its self-test notices attention that is wrong."""

import json
import re
import sys
import types
from importlib import metadata

import pytest
import torch

import flamia
from flamia.doctor import OPTIONAL_PACKAGES, OptionalPackage, collect, self_test
from flamia.doctor.cli import render
from flamia.doctor.packages import extra_that_brings
from flamia.doctor.selftest import FLOOR


@pytest.fixture(scope="module")
def report():
    return collect()


def test_report_is_json(report):
    assert json.loads(json.dumps(report)) == report


def test_report_describes_this_machine(report):
    assert report["flamia"] == flamia.__version__
    assert report["python"]["executable"] == sys.executable
    assert report["torch"] == {
        "version": torch.__version__,
        "cuda_build": torch.version.cuda,
        "threads": torch.get_num_threads(),
    }
    assert report["system"]["cores"] >= 1
    assert len(report["cuda"]) == (torch.cuda.device_count() if torch.cuda.is_available() else 0)


@pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux's")
def test_memory_is_plausible(report):
    system = report["system"]
    assert 0 < system["available_gib"] <= system["memory_gib"]


def test_only_the_reference_claims_to_run_without_a_device(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    backends = collect(run_self_test=False)["backends"]
    assert {backend["name"]: backend["runs_here"] for backend in backends} == {
        "reference": True,
        "sm90": False,
        "sm100": False,
    }


@pytest.mark.parametrize(
    ("capability", "missing", "folder", "running", "said"),
    [
        ((9, 0), (), "", "sm90", "kernels of mxfp8 and nvfp4"),
        ((10, 0), (), "", "sm100", "kernels of mxfp8 and mxfp8-exact"),
        ((10, 3), (), "", "sm100", "kernels of mxfp8 and mxfp8-exact"),
        ((8, 0), (), "", None, "no such device"),
        ((12, 0), (), "", None, "no such device"),
        ((9, 0), ("triton",), "", None, "lacks triton (or FLAMIA_KERNELS"),
        ((9, 0), ("triton", "cutlass"), "ready", "sm90", "kernels of mxfp8 and nvfp4"),
        ((9, 0), ("tvm_ffi",), "ready", None, "lacks tvm_ffi"),
        ((10, 3), ("cutlass",), "", None, "lacks cutlass (or FLAMIA_KERNELS"),
        ((10, 3), ("cutlass",), "ready", "sm100", "Blackwell (10.0, 10.3)"),
    ],
)
def test_kernels_run_where_everything_is_there(monkeypatch, capability, missing, folder, running, said):
    major, minor = capability
    card = types.SimpleNamespace(name="Some GPU", major=major, minor=minor, total_memory=80 * 2**30)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: card)
    monkeypatch.setattr(OptionalPackage, "version", lambda self: None if self.module in missing else "1")
    monkeypatch.setenv("FLAMIA_KERNELS", folder)
    backends = {backend["name"]: backend for backend in collect(run_self_test=False)["backends"]}
    assert {name for name, backend in backends.items() if backend["runs_here"]} == {"reference", running} - {None}
    assert said in backends["sm100" if major >= 10 else "sm90"]["note"]


def test_self_test_passes_here(report):
    assert report["ok"]
    for test in report["self_test"]:
        assert test["passed"], test
        assert test["error"] is None
        assert test["causal"] is True
        assert set(test["cosine"]) == {"o", "dq", "dk", "dv"}
        # Quantized, so not exact: a self-test that compared FP64 with itself would say 1.
        assert all(FLOOR < cosine < 1 for cosine in test["cosine"].values())


def test_self_test_can_be_left_out():
    report = collect(run_self_test=False)
    assert report["self_test"] == []
    assert report["ok"]


def textbook(q, k, v, *, causal=False, recipe=None, backend=None, leak=0.0, scale=None):
    group = q.shape[2] // k.shape[2]
    q, k, v = (x.transpose(1, 2) for x in (q, k.repeat_interleave(group, 2), v.repeat_interleave(group, 2)))
    o = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale)
    return (o + leak * v.mean(2, keepdim=True)).transpose(1, 2)


@pytest.mark.parametrize(
    ("fault", "passes"),
    [
        ({}, True),
        ({"scale": 1.0}, False),
        ({"causal": False}, False),
        ({"leak": 0.01}, False),
    ],
    ids=["right", "wrong scale", "no mask", "leak"],
)
def test_self_test_judges(monkeypatch, fault, passes):
    def attention(q, k, v, **options):
        return textbook(q, k, v, **{**options, **fault})

    monkeypatch.setattr(flamia, "flash_attn_func", attention)
    assert self_test()["passed"] is passes


def test_self_test_reports_an_error_instead_of_raising(monkeypatch):
    def attention(*_, **__):
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(flamia, "flash_attn_func", attention)
    result = self_test()
    assert not result["passed"]
    assert result["error"] == "RuntimeError: no such kernel"


def test_packages_and_extras_agree_with_the_metadata():
    listed = {(package.distribution.lower(), package.extra) for package in OPTIONAL_PACKAGES}
    required = set()
    for line in metadata.requires("flamia") or []:
        name, extra = re.match(r"[\w.-]+", line).group().lower(), re.search(r"extra == ['\"](\w+)['\"]", line)
        if extra and name != "flamia" and extra[1] != "dev":
            required.add((name, extra[1]))
    # A package that two extras bring is listed under one of them.
    assert listed <= required
    assert {name for name, _ in required} == {name for name, _ in listed}


def test_missing_package_has_no_version():
    assert OptionalPackage("no_such_module", "no-such-distribution", "cli", "nothing").version() is None


@pytest.mark.parametrize(
    ("module", "extra"),
    [
        ("matplotlib", "audit"),
        ("typer", "cli"),
        ("cutlass", "gpu"),
        ("numpy", "train"),
        ("flamia", None),
    ],
)
def test_extra_that_brings(module, extra):
    assert extra_that_brings(module) == extra


def test_tables_show_every_finding(report, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    broken = {
        "device": "cuda:7",
        "passed": False,
        "cosine": {},
        "causal": False,
        "error": "E: [x]",
        "seconds": 1,
    }
    card = {"name": "Some GPU", "compute_capability": "9.0", "memory_gib": 80.0}
    missing = {**report["packages"][0], "version": None}
    render({**report, "cuda": [card], "packages": [missing], "self_test": [*report["self_test"], broken]})
    shown = capsys.readouterr().out
    for text in (
        "Some GPU, compute capability 9.0, 80 GiB",
        "missing",
        "flamia[cli]",
        "FAIL",
        "E: [x]",
        "leaks",
    ):
        assert text in shown


def test_cuda_devices_are_listed_with_their_capability(monkeypatch):
    card = types.SimpleNamespace(name="Some GPU", major=9, minor=0, total_memory=80 * 2**30)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: card)
    expected = {"name": "Some GPU", "compute_capability": "9.0", "memory_gib": 80.0}
    assert collect(run_self_test=False)["cuda"] == [expected, expected]


@pytest.mark.gpu
def test_self_test_passes_on_a_cuda_device():
    result = self_test("cuda:0")
    assert result["passed"], result
