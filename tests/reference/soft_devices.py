"""Software devices for the tests of our kernels: a fresh one per test, each kernel translated once per process.

Translating a kernel takes as long as running it on the small inputs of a test. Import the fixtures into a
``conftest.py``; ``softgpu.pytest_plugin`` has the same ones for devices that share nothing.
"""

import pytest

from softgpu import Device

_TRANSLATOR = Device()


class SharingDevice(Device):
    """A device that runs what another one has translated."""

    def program(self, ptx, kernel=None):
        return _TRANSLATOR.program(ptx, kernel)


def _finish(request, device):
    """What ran, for the report of a test that fails."""
    lines = [f"{r.kernel}: {r.reached} of {r.instructions} instructions reached" for r in device.reports]
    lines += [f"  note: {note}" for r in device.reports for note in r.notes]
    if lines:
        request.node.add_report_section("teardown", "softgpu", "\n".join(lines))


@pytest.fixture
def soft_device(request):
    """A device with every check on, in-order schedule, asynchronous operations as late as possible."""
    device = SharingDevice()
    yield device
    _finish(request, device)


@pytest.fixture(params=[1, 2], ids=lambda s: f"seed{s}")
def soft_device_shuffled(request):
    """The same in a shuffled order of warps and asynchronous operations, once per seed."""
    device = SharingDevice(seed=request.param)
    yield device
    _finish(request, device)
