"""What is shown: the commands, their exit status, JSON lines that others can parse, and a self-contained
page."""

import json
import math
import re
import sys
from dataclasses import dataclass
from xml.etree import ElementTree

import pytest

from flamia import audit
from flamia.audit import CausalityReport, Leak
from flamia.audit.cli import TARGETS
from flamia.audit.report import causality_lines, describe
from flamia.cli import main

SMALL = ["--tokens", "64", "--heads", "1", "--head-dim", "32"]


@dataclass
class Done:
    returncode: int
    stdout: str
    stderr: str


@pytest.fixture
def flamia(capsys, monkeypatch):
    """Run the command line in this process: a new one spends its time on importing torch."""
    monkeypatch.setattr(sys, "path", list(sys.path))

    def run(*words):
        capsys.readouterr()
        status = 0
        try:
            main(words)
        except SystemExit as left:
            status = left.code or 0
        return Done(status, *capsys.readouterr())

    return run


def objects(text):
    def refuse(constant):
        raise ValueError(f"{constant} is not JSON")

    return [json.loads(line, parse_constant=refuse) for line in text.splitlines()]


def test_audit_json_is_one_object_a_line_and_nothing_else(flamia):
    done = flamia("audit", "torch-sdpa", "exact", "leaky-per-tensor", "--json", "--inputs", "gaussian", *SMALL)
    lines = objects(done.stdout)
    assert done.returncode == 0, done.stderr
    assert len(lines) == 5 * 2 + 5 * 3 + 5 * 3  # SDPA returns no lse
    for line in lines:
        assert line["perturbed"] in ("q", "k", "v", "do", "all")
        assert line["tensor"] in ("o", "lse", "dq")
        assert isinstance(line["rows_reached"], int)
        assert line["bitwise_zero"] is (line["rows_reached"] == 0)
        assert isinstance(line["max_rel_change"], float)
        if line["target"] != "leaky-per-tensor":
            assert line["bitwise_zero"]
    assert any(not line["bitwise_zero"] for line in lines if line["target"] == "leaky-per-tensor")


def test_documents_join_the_json_on_request(flamia):
    done = flamia("audit", "exact", "--json", "--isolation", "--inputs", "gaussian", *SMALL)
    lines = [line for line in objects(done.stdout) if line["perturbed"] == "document"]
    assert {line["tensor"] for line in lines} == {"o", "lse", "dq", "dk", "dv"}
    assert all(line["bitwise_zero"] for line in lines)


def test_accuracy_json(flamia):
    done = flamia("accuracy", "--json", "--recipes", "mxfp8,mxfp8+offsets,torch-sdpa", "--inputs", "mean", *SMALL)
    lines = objects(done.stdout)
    assert done.returncode == 0, done.stderr
    assert [(x["recipe"], x["mask"]) for x in lines] == [
        (recipe, mask) for mask in ("causal", "full") for recipe in ("mxfp8", "mxfp8+offsets", "torch-sdpa")
    ]
    for line in lines:
        assert all(0.5 < line[name] <= 1 for name in ("o", "dq", "dk", "dv"))
        assert line["inputs"] == "mean"
        assert set(line["bias"]) == {"o", "dq", "dk", "dv"}
        assert line["offsets"] is (line["recipe"] == "mxfp8+offsets")


def test_a_leaking_function_fails_the_audit_and_a_safe_one_passes(flamia, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(
        "import torch\n"
        "def safe(q, k, v, causal):\n"
        "    q, k, v = (x.transpose(1, 2) for x in (q, k, v))\n"
        "    o = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)\n"
        "    return o.transpose(1, 2)\n"
        "def leaks(q, k, v, causal):\n"
        "    return safe(q, k, v, causal) + v.detach().abs().amax()\n"
    )
    good = flamia("audit", "mine:safe", "--inputs", "gaussian", *SMALL)
    assert good.returncode == 0, good.stderr
    assert "bitwise" in good.stdout
    assert "isolated" in good.stdout
    bad = flamia("audit", "mine:leaks", "--inputs", "gaussian", *SMALL)
    assert bad.returncode == 1
    assert "LEAKS o" in bad.stdout
    assert "not as promised: mine:leaks" in bad.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["audit", "mxfp9"], "target 'mxfp9' is unknown"),
        (["audit", "no_module_of_this_name:f"], "cannot be imported"),
        (["audit", "exact", "--inputs", "foo"], "--inputs 'foo' is unknown; allowed are gaussian"),
        (["audit", "exact", "--inputs", ","], "--inputs is empty"),
        (["accuracy", "--masks", "half"], "--masks 'half' is unknown; allowed are causal, full"),
        (["accuracy", "--recipes", "mxfp9"], "target 'mxfp9' is unknown"),
    ],
)
def test_bad_usage_is_one_line_and_status_2(flamia, words, message):
    done = flamia(*words)
    assert done.returncode == 2
    assert message in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert done.stdout == ""


def test_terminal_tables_fit_eighty_columns():
    from rich.console import Console

    from flamia.audit.report import accuracy_tables, causality_table, isolation_table

    small = {"heads": 1, "head_dim": 32}
    reports = [audit.causality(t, inputs="gaussian", tokens=64, **small) for t in ("leaky-per-tensor", "exact")]
    console = Console(width=80, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(causality_table(reports))
    console.print(isolation_table([audit.isolation("exact", lengths=(9, 5), **small)]))
    for table in accuracy_tables(audit.accuracy(["mxfp8"], tokens=64, **small)):
        console.print(table)
    text = console.export_text()
    assert "…" not in text
    assert re.search(r"leaky-per-tensor +gaussian .*LEAKS o lse dq", " ".join(text.split()))
    assert re.search(r"exact +gaussian +0 +0 +0 +bitwise", text)
    assert re.search(r"mxfp8 +causal +\.99\d\d", text)


def test_the_page_is_self_contained(flamia, tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "audit.html"
    flamia("audit", "exact", "leaky-per-tensor", "--inputs", "gaussian", *SMALL, "--html", str(path))
    text = path.read_text()
    assert "leaky-per-tensor" in text
    assert not re.search(r"""(src|href)=["']?http""", text.replace('xlink:href="#', ""))
    for figure in re.findall(r"<svg.*?</svg>", text, re.DOTALL):
        ElementTree.fromstring(figure)
    assert text.count("<svg") == 1
    ids = re.findall(r'\bid="([^"]+)"', text)
    assert len(ids) == len(set(ids))


def test_names_are_escaped_in_the_page():
    pytest.importorskip("matplotlib")
    from flamia.audit.page import causality_section, page

    leak = Leak("<b>:f", "gaussian", "v", "o", math.inf, 40, 50, 64)
    report = CausalityReport("<b>:f", (leak,), {"o": 0.0}, False, "confined")
    assert "<b>:f" not in page("A <page>", [causality_section([report])])
    (line,) = objects("\n".join(causality_lines(report)))
    assert line["max_rel_change"] is None
    assert line["bitwise_zero"] is False
    assert describe(report) == "LEAKS o"


def test_default_targets_exist():
    assert set(TARGETS) <= set(audit.target_names())
