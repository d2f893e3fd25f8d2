"""The memory plans: what docs/kernels.md shows is what kernels use, and plans that do not fit are refused."""

import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from flamia.sm100 import memory
from flamia.sm100.memory import SharedMemory, TensorMemory

PAGE = (Path(__file__).parents[2] / "docs" / "kernels.md").read_text(encoding="utf-8")


def rows(heading):
    """Cells of the first table behind ``heading``, without its header."""
    lines = PAGE[PAGE.index(heading) :].splitlines()
    start = next(n for n, line in enumerate(lines) if line.startswith("|"))
    table = []
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            return table
        table.append([cell.strip() for cell in line.strip("|").split("|")])
    return table


def test_tensor_memory_is_as_documented():
    plan, narrow = TensorMemory(128), TensorMemory(64)
    parts = [(plan.scores, 128), (plan.weights, 32), (plan.weight_scales, 4), (plan.value_scales, 4)]
    parts += [(plan.outputs, 128)]
    table = rows("**Tensor memory.**")
    for (start, size), cells in zip(parts, table, strict=True):
        assert cells[:2] == [f"{start(i)} to {start(i) + size - 1}" for i in range(2)], cells
    spans = [f"{narrow.outputs(i)} to {narrow.outputs(i) + 63}" for i in range(2)]
    assert ", ".join(spans) in table[-1][2]


def test_shared_memory_is_as_documented():
    parts = [SharedMemory(d, 4, 4).parts() for d in (128, 64)]
    table = {re.sub(r" \(.*", "", name): [int(x) for x in cells] for name, *cells in rows("**Shared memory**")}
    assert table == {name: [p[name] for p in parts] for name in parts[0]}


def test_plans_that_do_not_fit_are_refused(monkeypatch):
    with pytest.raises(ValueError, match="head_dim 256 needs more than 512 columns"):
        TensorMemory(256)
    monkeypatch.setattr(TensorMemory, "weight_scales", lambda self, i: self.weights(i) + 31)
    with pytest.raises(ValueError, match="columns 64 to 96 of a score tile overlap what follows at 95"):
        TensorMemory(128)


@pytest.mark.parametrize("size", [1000, 300 << 10])
def test_storage_other_than_planned_is_refused(size):
    plan = SharedMemory(128, 4, 4)
    with pytest.raises(ValueError, match=f"head_dim=128, stages=4 take {size} bytes"):
        plan.check(SimpleNamespace(size_in_bytes=lambda: size))
    plan.check(SimpleNamespace(size_in_bytes=lambda: sum(plan.parts().values()) + memory.SLACK))
