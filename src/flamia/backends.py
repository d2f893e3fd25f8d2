"""Backends of kernels by name, and the devices that they serve. Their modules ``kernels`` import no compiler."""

from __future__ import annotations

import dataclasses
import importlib
from typing import Any

import torch

from flamia.launch import Launch, recording
from flamia.plan import Plan
from flamia.recipe import Recipe, get_recipe
from flamia.sm90 import kernels as sm90
from flamia.sm100 import kernels as sm100

# Each says which capabilities it serves and for which architecture it compiles there (ARCHS; DEVICES in words), which
# variant of a recipe it computes (VARIANT), why it cannot run a call (``unsupported``) and which kernels a call loads
# (``call_kernels``).
KERNELS: dict[str, Any] = {"sm90": sm90, "sm100": sm100}
BY_CAPABILITY: dict[tuple[int, int], str] = {
    capability: name for name, room in KERNELS.items() for capability in room.ARCHS
}
BY_ARCH: dict[str, str] = {arch: name for name, room in KERNELS.items() for arch in room.ARCHS.values()}


def door(backend: str) -> Any:
    """The module that runs a backend's calls. Imported on first use: it needs packages that flamia does without."""
    return importlib.import_module(f"flamia.{backend}.backend")


def call_launches(plan: Plan, dtype: torch.dtype, arch: str) -> list[Launch]:
    """Every launch of row preparation that calls with this plan may need, whatever their sizes.

    With a plan that trains: of its calls without a gradient, too, which take the same attention kernels.
    """
    with recording(arch) as launches:
        for training in dict.fromkeys((False, plan.training)):
            door(plan.backend).show_launches(dataclasses.replace(plan, training=training), dtype)
    return list(launches)


def native_backend(device: torch.device) -> str | None:
    """The backend that serves a device, None where none does."""
    return BY_CAPABILITY.get(_capability(device)) if device.type == "cuda" else None


def native_target(device: torch.device) -> str:
    """What kernels of a device that has a backend are compiled for."""
    capability = _capability(device)
    target: str = KERNELS[BY_CAPABILITY[capability]].ARCHS[capability]
    return target


def _capability(device: torch.device) -> tuple[int, int]:
    properties = torch.cuda.get_device_properties(device)
    return properties.major, properties.minor


def served() -> str:
    """Which backend serves what, in words."""
    return ", ".join(f"{name!r} serves {room.DEVICES}" for name, room in KERNELS.items())


def native_recipe(recipe: str | Recipe, backend: str) -> Recipe:
    """What a backend takes a recipe for: a name asks for formats, in the variant that the backend computes.

    A name that says folded asks for that one, as a ``Recipe`` asks for its own.
    """
    resolved = get_recipe(recipe)
    if isinstance(recipe, str) and resolved.variant == "block":
        return resolved.with_variant(KERNELS[backend].VARIANT)
    return resolved
