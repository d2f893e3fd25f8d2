"""The command `flamia`: it dispatches, imports only what it needs, and says in one line what is missing."""

import json
import subprocess
import sys
import types
from importlib.metadata import distribution

import pytest

import flamia
from flamia import cli


def run(*words: str, block: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    """`flamia WORDS` in a process of its own, in which the modules in `block` cannot be imported."""
    code = f"import sys; sys.modules.update(dict.fromkeys({block!r})); from flamia.cli import main; main()"
    return subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, timeout=120)


def status(*words: str) -> int:
    with pytest.raises(SystemExit) as left:
        cli.main(words)
    return left.value.code or 0


@pytest.fixture
def toy(monkeypatch):
    """A command `toy` whose function the test sets."""
    module = types.ModuleType("flamia_toy_command")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setitem(cli.COMMANDS, "toy", (module.__name__, "toy", "A toy."))

    def define(function):
        module.toy = function

    return define


def test_help_lists_every_command(capsys):
    assert status("--help") == 0
    shown = capsys.readouterr().out
    for name in cli.COMMANDS:
        assert name in shown


@pytest.mark.parametrize("name", list(cli.COMMANDS))
def test_every_command_has_help_of_its_own(name, capsys):
    assert status(name, "--help") == 0
    assert f"flamia {name}" in capsys.readouterr().out


def test_version(capsys):
    assert status("--version") == 0
    assert capsys.readouterr().out == f"flamia {flamia.__version__}\n"


def test_module_and_console_script_are_the_same_command():
    module = subprocess.run([sys.executable, "-m", "flamia", "--version"], capture_output=True, text=True)
    assert module.stdout == f"flamia {flamia.__version__}\n"
    (script,) = [entry for entry in distribution("flamia").entry_points if entry.name == "flamia"]
    assert script.load() is cli.main


def test_doctor_json_is_one_object():
    result = run("doctor", "--json")
    assert result.returncode == 0, result.stderr
    report = json.loads(result.stdout)
    assert report["ok"]
    assert report["self_test"][0]["device"] == "cpu"


def test_doctor_fails_when_its_self_test_does(monkeypatch, capsys):
    monkeypatch.setattr(flamia, "flash_attn_func", None)
    assert status("doctor") == 1
    assert "FAIL" in capsys.readouterr().out


def test_doctor_needs_no_plotting_package():
    result = run("doctor", "--no-self-test", block=("matplotlib", "transformers", "jinja2"))
    assert result.returncode == 0, result.stderr
    assert "This machine" in result.stdout


@pytest.mark.parametrize("package", ["typer", "rich"])
def test_missing_package_is_one_line_that_names_the_extra(package):
    result = run("doctor", block=(package,))
    assert result.returncode == 1
    assert result.stderr == (f"flamia: this needs {package}, which is not installed: pip install 'flamia[cli]'\n")


def test_options_of_a_command_reach_it(toy, capsys):
    def command(tokens: int = 1, causal: bool = False):
        print(tokens, causal)

    toy(command)
    assert status("toy", "--tokens", "5", "--causal") == 0
    assert capsys.readouterr().out == "5 True\n"


def test_only_the_asked_command_is_imported():
    code = "import sys; from flamia.cli import build; build('doctor'); print('flamia.training' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "False\n"


@pytest.mark.parametrize("error", [ValueError, TypeError])
def test_bad_input_is_one_line(toy, capsys, error):
    def command():
        raise error("recipe is 'x': choose mxfp8")

    toy(command)
    assert status("toy") == 2
    assert capsys.readouterr().err == "flamia: recipe is 'x': choose mxfp8\n"


def test_traceback_on_request(toy):
    def command():
        raise ValueError("here")

    toy(command)
    with pytest.raises(ValueError, match="here"):
        cli.main(["--traceback", "toy"])


def test_a_bug_is_not_disguised(toy):
    def command():
        import flamia.no_such_module  # noqa: F401

    toy(command)
    with pytest.raises(ModuleNotFoundError, match="no_such_module"):
        cli.main(["toy"])


@pytest.mark.parametrize("words", [("nosuch",), ("doctor", "--nosuch"), ("--nosuch",)])
def test_bad_usage_exits_with_2(words, capsys):
    assert status(*words) == 2
    assert "nosuch" in capsys.readouterr().err


def test_no_command_shows_help(capsys):
    assert status() in (0, 2)  # it depends on the version of typer
    captured = capsys.readouterr()
    assert "doctor" in captured.out + captured.err
