"""The package as installed: what importing it brings along, what its metadata promises."""

import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

import flamia

ROOT = Path(__file__).parent.parent
# Requirement lines such as `flamia[cli]` and `nvidia-cutlass-dsl[cu13]>=4.4; extra == "gpu"`.
REQUIREMENT = re.compile(r"(?P<name>[A-Za-z0-9._-]+)\s*(\[(?P<extras>[^\]]*)\])?\s*(?P<range>[^;]*)(;(?P<marker>.*))?")


def python(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout


def requirements() -> list[re.Match[str]]:
    found = [REQUIREMENT.fullmatch(line) for line in metadata.requires("flamia") or []]
    assert all(found)
    return [match for match in found if match]


def normalized(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def test_importing_flamia_imports_torch_and_no_extra():
    # torch itself imports some of them where they are installed (numpy), so only what flamia adds counts.
    code = "import sys, torch; before = {*sys.modules}; import flamia; print(*({*sys.modules} - before))"
    added = {name.partition(".")[0] for name in python(code).split()}
    foreign = added - sys.stdlib_module_names - {"flamia", "torch"}
    # torch loads parts of itself, and of its own requirements, only when asked to.
    torch_requires = {"sympy", "mpmath", "networkx", "jinja2", "markupsafe", "typing_extensions", "numpy"}
    assert not foreign - torch_requires, f"import flamia also imports {sorted(foreign)}"
    assert "flamia" in added


def test_importing_flamia_does_not_reach_for_the_extras():
    heavy = [
        "matplotlib",
        "rich",
        "typer",
        "transformers",
        "sentence_transformers",
        "triton",
        "cutlass",
        "hypothesis",
    ]
    blocked = f"import sys; sys.modules.update(dict.fromkeys({heavy!r})); import flamia; print(flamia.__version__)"
    assert python(blocked).strip() == flamia.__version__


def test_importing_flamia_takes_little_longer_than_torch():
    # Both in one process, so that how fast the disk and the machine are today drops out.
    code = (
        "import time; t0 = time.perf_counter(); import torch; t1 = time.perf_counter(); import flamia;"
        "t2 = time.perf_counter(); print(t1 - t0, t2 - t1)"
    )
    tries = []
    for _ in range(3):  # a busy machine may spoil one
        torchs, ours = map(float, python(code).split())
        tries.append((torchs, ours))
        if ours / torchs < 0.35:
            return
    pytest.fail(f"seconds for torch, for flamia: {tries}")


def test_version_is_the_distributions():
    assert metadata.version("flamia") == flamia.__version__


def test_torch_is_the_only_requirement_without_an_extra():
    assert [r["name"] for r in requirements() if "extra ==" not in (r["marker"] or "")] == ["torch"]


def test_ranges_are_loose():
    pinned = [r.group() for r in requirements() if "==" in r["range"] or "<" in r["range"] or "~=" in r["range"]]
    assert not pinned


def test_every_extra_can_be_named():
    extras = set(metadata.metadata("flamia").get_all("Provides-Extra"))
    assert extras == {"cli", "audit", "train", "demo", "gpu", "softgpu", "dev"}


def test_constraints_pin_every_direct_requirement_that_ci_installs():
    pins = {}
    for line in (ROOT / "constraints.txt").read_text().splitlines():
        if line and not line.startswith("#"):
            name, _, version = line.partition(";")[0].partition("==")
            pins[normalized(name)] = version
    assert all(pins.values())
    tested = [r for r in requirements() if "gpu" not in (r["marker"] or "") and r["name"] != "flamia"]
    assert {normalized(r["name"]) for r in tested} <= set(pins)


@pytest.mark.parametrize("text", ["py.typed", "__init__.py", "compiler_shim.c", "benchmarks/workloads.json"])
def test_package_carries(text):
    assert (Path(flamia.__file__).parent / text).is_file()


def test_no_source_file_grows_beyond_800_lines():
    lengths = {path: len(path.read_text().splitlines()) for path in (ROOT / "src").rglob("*.py")}
    assert lengths
    assert not {str(path.relative_to(ROOT)): n for path, n in lengths.items() if n > 800}


def test_readmes_example_runs(capsys):
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    names: dict[str, object] = {}
    exec(compile(code, "README.md", "exec"), names)
    assert names["o"].shape == (512, 8, 128)
    assert names["lse"].shape == (8, 512)
    assert names["q"].grad.isfinite().all()
    assert "mxfp8-exact" in capsys.readouterr().out


def test_readme_names_every_recipe_and_no_other():
    table = (ROOT / "README.md").read_text().partition("## Recipes")[2].partition("## ")[0]
    named = set(re.findall(r"`([a-z0-9-]+)`", table)) - {"-exact"}
    bases = {"mxfp8", "nvfp4", "fp4", "mxfp8-folded", "nvfp4-folded"}
    assert bases <= named
    assert named | {f"{base}-exact" for base in bases} == set(flamia.recipes())
