"""The demo end to end, with few steps: what it writes, what it prints, and when it fails."""

import argparse
import dataclasses
import re

import pytest

pytest.importorskip("typer")
pytest.importorskip("matplotlib")

import typer

from flamia import demo as module
from flamia.training import load_corpus


@pytest.mark.slow
@pytest.mark.parametrize("whole", [False, pytest.param(True, marks=pytest.mark.matrix)])
def test_demo_writes_a_report_of_everything(tmp_path, capsys, monkeypatch, whole):
    if not whole:  # a target of each kind, and one module of text
        monkeypatch.setattr(module, "AUDITED", ("torch-sdpa", "mxfp8", "mxfp8-exact", "leaky-per-tensor"))
        monkeypatch.setattr(module, "TRAINED", ("exact", "mxfp8"))
        monkeypatch.setattr(module, "load_corpus", lambda: load_corpus((argparse.__file__,)))
    module.demo(out=tmp_path / "demo", tokens=128, steps=4)
    html = (tmp_path / "demo" / "report.html").read_text()
    for heading in ("How far from exact", "Does the past see the future", "Does a model train as well"):
        assert heading in html
    assert html.count("<svg") == 3
    for name in (*module.AUDITED, *module.MEASURED, *module.TRAINED, module.LEAKING):
        assert name in html
    printed = capsys.readouterr().out
    assert re.search(r"report: .*report\.html", printed.replace("\n", ""))
    assert "mxfp8, causal" in printed


def test_a_broken_promise_is_an_error(tmp_path, monkeypatch):
    """An audit that finds an exact recipe leaking must end the demo with status 1, after the report is written."""
    monkeypatch.setattr(module, "AUDITED", ("mxfp8-exact",))
    monkeypatch.setattr(module, "_accuracies", lambda console, tokens: [])
    monkeypatch.setattr(module, "_train", lambda console, steps: ([], None))
    monkeypatch.setattr(module, "training_section", lambda results, probe: "")
    monkeypatch.setattr(module.page, "accuracy_section", lambda rows: "")
    monkeypatch.setattr(module, "_summary", lambda *_: None)
    real = module.causality
    monkeypatch.setattr(module, "causality", lambda name, **kw: real(_leaking(name), **kw))
    with pytest.raises(typer.Exit) as error:
        module.demo(out=tmp_path, tokens=64, steps=1)
    assert error.value.exit_code == 1
    assert (tmp_path / "report.html").exists()


def _leaking(name):
    """An attention that calls itself exact and is not."""
    from flamia.audit import get_target

    target, leaky = get_target(name), get_target("leaky-per-tensor")
    return dataclasses.replace(leaky, name=target.name, promise=target.promise)
