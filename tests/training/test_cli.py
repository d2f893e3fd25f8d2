"""`flamia train`, as typed."""

import dataclasses
import json

import pytest

from flamia.cli import main
from flamia.training import PRESETS, Evaluation, Result
from flamia.training.cli import verdict

SHORT = ["--steps", "4", "--tokens", "64", "--context", "32", "--eval-rows", "2", "--device", "cpu"]


def flamia(capsys, *arguments):
    with pytest.raises(SystemExit) as stopped:
        main(["train", *arguments])
    return stopped.value.code, capsys.readouterr()


def test_a_run_ends_in_a_table_and_can_be_resumed(capsys, text, tmp_path):
    out = ["--out", str(tmp_path / "run"), "--data", text]
    code, printed = flamia(capsys, "--recipe", "leaky-fp4-keys", *SHORT, *out)
    assert code in (0, None), printed.err
    assert "leaky-fp4-keys: 492,416 parameters" in printed.out
    assert "exact attention" in printed.out
    assert "training documents" in printed.err
    lines = (tmp_path / "run" / "log.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 3, 4, 4]
    code, printed = flamia(capsys, "--recipe", "leaky-fp4-keys", *SHORT, *out, "--steps", "6", "--resume")
    assert code in (0, None), printed.err
    assert len((tmp_path / "run" / "log.jsonl").read_text().splitlines()) == 8


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--recipe", "mxfp9"], "recipe is 'mxfp9'; allowed: exact"),
        (["--preset", "huge"], "preset is 'huge'"),
        (["--data", "/nowhere/at/all"], "does not exist"),
        (["--resume"], "out is not"),
        (["--threads", "0"], "threads is 0"),
    ],
)
def test_bad_input_is_one_line_and_status_2(capsys, arguments, message):
    code, printed = flamia(capsys, *SHORT, *arguments)
    assert code == 2
    assert message in printed.err
    assert len(printed.err.strip().splitlines()) == 1


def test_a_diverging_run_is_one_line_and_status_1(capsys, text):
    code, printed = flamia(
        capsys, *SHORT, "--steps", "30", "--recipe", "exact", "--data", text, "--lr", "1e38", "--log-every", "1"
    )
    assert code == 1
    assert "training stopped" in printed.err
    assert "Traceback" not in printed.err


@pytest.mark.parametrize(
    ("recipe", "gap", "error", "words"),
    [
        ("exact", 0.0, 0.0, "its own reference"),
        ("mxfp8", -0.01, 0.001, "read a leak"),
        ("mxfp8", 0.01, 0.001, "rounding noise"),
        ("mxfp8", -0.01, 0.004, "No difference"),
        ("mxfp8", -0.001, 0.0001, "No difference"),
        ("mxfp8", -0.01, float("nan"), "One validation row"),
    ],
)
def test_verdicts(recipe, gap, error, words):
    result = Result(dataclasses.replace(PRESETS["tiny"], recipe=recipe), 1, "text")
    result.evaluations.append(Evaluation(1, 2 + gap, 2.0, gap, error, (), (), ()))
    assert words in verdict(result)
