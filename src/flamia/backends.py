"""Backends of kernels by name, and the devices that they serve. Their modules ``kernels`` import no compiler."""

from __future__ import annotations

import importlib
from typing import Any

from flamia.sm90 import kernels as sm90

# Each says which capabilities it serves (CAPABILITIES, DEVICES in words), for which architecture it compiles (ARCH),
# which variant of a recipe it computes (VARIANT), why it cannot run a call
# (``unsupported``) and which kernels a call loads (``call_kernels``).
KERNELS: dict[str, Any] = {"sm90": sm90}
BY_CAPABILITY: dict[tuple[int, int], str] = {
    capability: name for name, room in KERNELS.items() for capability in room.CAPABILITIES
}


def door(backend: str) -> Any:
    """The module that runs a backend's calls. Imported on first use: it needs packages that flamia does without."""
    return importlib.import_module(f"flamia.{backend}.backend")
