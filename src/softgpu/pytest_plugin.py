"""pytest fixtures: import what you use into a ``conftest.py``.

``soft_device`` is a fresh software GPU with every check on; ``soft_device_shuffled`` runs warps and asynchronous
operations in a shuffled order, once per seed. Both attach the opcode reports of their launches to a failing test. A
kernel is translated once per process, whichever test runs it first: that takes as long as running it on small inputs.
"""

from __future__ import annotations

import pytest

from .driver import Device

_PROGRAMS: dict = {}  # translated kernels by text, of all devices made here


def _device(seed: int | None = None) -> Device:
    device = Device(seed=seed)
    device._programs = _PROGRAMS
    return device


def _finish(request, device: Device) -> None:
    lines = [
        f"{r.kernel}: {r.seconds:.2f} s, {r.reached} of {r.instructions} instructions reached" for r in device.reports
    ]
    notes = [f"  note: {n}" for r in device.reports for n in r.notes]
    if lines:
        request.node.add_report_section("teardown", "softgpu", "\n".join(lines + notes))


@pytest.fixture
def soft_device(request):
    """A fresh ``softgpu.Device``, in-order schedule, asynchronous operations as late as possible."""
    device = _device()
    yield device
    _finish(request, device)


@pytest.fixture(params=[1, 2], ids=lambda s: f"seed{s}")
def soft_device_shuffled(request):
    """A fresh ``softgpu.Device`` per seeded schedule order."""
    device = _device(request.param)
    yield device
    _finish(request, device)
