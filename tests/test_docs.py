"""The documentation: links resolve, its code runs, its tables are complete, its figures can be drawn."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

import flamia

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.glob("*.md"))]
WRITTEN = [DOCS / name for name in ("user.md", "numerics.md", "kernels.md")]
FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)


def anchors(page: Path) -> set[str]:
    """Anchors of a page's headings, as GitHub makes them."""
    found = set()
    for heading in re.findall(r"^#+ (.+)$", FENCE.sub("", page.read_text(encoding="utf-8")), re.MULTILINE):
        plain = re.sub(r"[^\w\- ]", "", heading.strip().lower().replace("`", ""))
        found.add(plain.replace(" ", "-"))
    return found


def links(page: Path) -> list[str]:
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    return [target for target in re.findall(r"\]\(([^)\s]+)\)", text) if not target.startswith(("http:", "https:"))]


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"docs_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_resolve(page: Path) -> None:
    for target in links(page):
        name, _, anchor = target.partition("#")
        file = page.parent / name if name else page
        assert file.exists(), f"{page.name} links to {target}"
        if anchor:
            assert anchor in anchors(file), f"{page.name} links to {target}; {file.name} has no such heading"


def test_pages_refer_to_each_other() -> None:
    for page in WRITTEN:
        linked = {(page.parent / target.partition("#")[0]).name for target in links(page)}
        assert linked & {other.name for other in WRITTEN if other != page}, page.name


def test_user_page_code_runs() -> None:
    text = (DOCS / "user.md").read_text(encoding="utf-8")
    namespace: dict[str, object] = {}
    blocks = list(re.finditer(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL))
    assert len(blocks) > 8
    for block in blocks:
        line = text[: block.start(1)].count("\n")
        exec(compile("\n" * line + block.group(1), str(DOCS / "user.md"), "exec"), namespace)


def test_user_page_lists_every_recipe() -> None:
    text = (DOCS / "user.md").read_text(encoding="utf-8")
    section = text.split("\n## Recipes\n")[1].split("\n### ")[0]
    listed = re.findall(r"^\| `([^`]+)` \|", section, re.MULTILINE)
    assert sorted(listed) == sorted(flamia.recipes())


def test_user_page_lists_every_option_with_its_default() -> None:
    text = (DOCS / "user.md").read_text(encoding="utf-8")
    table = text.split("\n### Your own\n")[1].split("| option | choices | default |")[1].split("\n\n")[0]
    listed = {name for row in table.splitlines()[2:] for name in re.findall(r"`(\w+)`", row.split("|")[1])}
    options = set(flamia.Recipe.__dataclass_fields__) - {"key"}
    assert listed == options


def test_user_page_lists_every_argument() -> None:
    import inspect

    text = (DOCS / "user.md").read_text(encoding="utf-8")
    table = text.split("| argument | default | meaning |")[1].split("\n\n")[0]
    listed = {name for row in table.splitlines()[2:] for name in re.findall(r"`(\w+)`", row.split("|")[1])}
    keywords = inspect.signature(flamia.flash_attn_func).parameters.values()
    assert listed == {p.name for p in keywords if p.kind is inspect.Parameter.KEYWORD_ONLY}


def test_quoted_constants_are_those_of_the_code() -> None:
    from flamia import bounds, formats
    from flamia.quantize.reference import VALUE_MIN_EXPONENT
    from flamia.reference import backward, exponentials, folded, weights

    text = (DOCS / "numerics.md").read_text(encoding="utf-8")
    target = bounds.ACCUMULATOR_TARGET
    for said in (
        f"FOLD_RANGE = {bounds.FOLD_RANGE}",
        f"at least {VALUE_MIN_EXPONENT} (`VALUE_MIN_EXPONENT`)",
        f"p = {target['mxfp8']} - ceil(log2 bound)`, {target['fp4']} in `fp4`",
        f"E4M3(P * 2^{backward.PROBABILITY_SHIFT})",
        f"max of e_j over visible keys + a - {weights.FP4_SCALE_LIMIT})",
        f"after 2^{weights.FP4_BACKWARD_SHIFT}:",
        f"stays in ({folded.LOWEST:.0f}, {formats.E4M3_MAX:.0f}]",
        f"largest e_T of {folded.PROMOTION} queries",
        f"t = x - {exponentials.SCHRAUDOLPH_OFFSET}",
        f"FP32(252 - {exponentials.MITCHELL_OFFSET})",
        f"clamped at {formats.NVFP4_MAX:.0f}",
    ):
        assert said in text, said


def test_every_measured_section_exists() -> None:
    sections = load(DOCS / "measurements.py").SECTIONS
    quoted: set[str] = set()
    for page in WRITTEN:
        quoted |= set(re.findall(r"\(`([a-z0-9-]+)`[,)]", page.read_text(encoding="utf-8")))
    names = {name for name in quoted if name in sections}
    assert {"leaks", "options", "sink", "overflow", "headroom", "bits", "accuracy"} <= names
    assert quoted - set(sections) <= {"mxfp8", "nvfp4", "fp4", "mxfp8-paper"}


def test_measurements_run() -> None:
    measurements = load(DOCS / "measurements.py")
    title, *rows = list(measurements.fold_range())
    assert len(title) == len(rows[0])
    for _, kept, lost in rows:
        assert abs(float(kept) - 0.1112) < 0.02 < abs(float(lost) - 0.1112)
    assert [row[0] for row in measurements.exponentials()][1:] == ["Mitchell", "Schraudolph"]


@pytest.mark.slow
def test_figures_draw(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(sys, "path", [*sys.path])
    figures = load(DOCS / "figures" / "all.py")
    before = set(sys.modules)
    try:
        paths = figures.main(tmp_path)
    finally:
        for name in set(sys.modules) - before:
            if str(DOCS) in str(getattr(sys.modules[name], "__file__", "")):
                del sys.modules[name]
    drawn = {path.name for path in paths}
    assert drawn == {path.name for path in (DOCS / "figures").glob("*.svg")}
    shown = {Path(target).name for page in WRITTEN for target in links(page) if target.endswith(".svg")}
    assert shown == drawn
    for path in paths:
        assert path.read_text(encoding="utf-8").lstrip().startswith("<?xml")
