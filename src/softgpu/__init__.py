"""softgpu: a functional CUDA device in software.

Runs compiled PTX of Hopper (sm_90a) and Blackwell (sm_100a, sm_103a) kernels on a CPU and says whether the result is
right, whether the kernel always finishes, and whether it touches only what it may. It says nothing about speed.
"""

from __future__ import annotations

from .checks import ALL, NONE, Checks
from .driver import Device, Report, SoftFunction, run
from .errors import (
    AsyncRace,
    BarrierMisuse,
    Deadlock,
    DescriptorError,
    Misaligned,
    MissingProxyFence,
    OutOfBounds,
    PTXSyntaxError,
    SoftGPUError,
    TensorMemoryMisuse,
    UninitialisedRead,
    UnsupportedInstruction,
)  # fmt: skip
from .ptx import parse

__all__ = [
    "ALL",
    "NONE",
    "AsyncRace",
    "BarrierMisuse",
    "Checks",
    "Deadlock",
    "DescriptorError",
    "Device",
    "Misaligned",
    "MissingProxyFence",
    "OutOfBounds",
    "PTXSyntaxError",
    "Report",
    "SoftFunction",
    "SoftGPUError",
    "TensorMemoryMisuse",
    "UninitialisedRead",
    "UnsupportedInstruction",
    "parse",
    "run",
]
