"""The machine as flamia sees it: Python, torch, memory, CUDA devices, backends, optional packages."""

from __future__ import annotations

import os
import platform
import sys
from dataclasses import asdict
from typing import Any

import torch

from flamia.backends import KERNELS
from flamia.doctor.packages import OPTIONAL_PACKAGES
from flamia.doctor.selftest import self_test

GIB = 2**30
NOTES = {
    "sm90": "mxfp8 and nvfp4 and their -exact forms",
    "sm100": "mxfp8 and mxfp8-exact, which have run on a software device alone",
}


def collect(run_self_test: bool = True) -> dict[str, Any]:
    """Gather everything that `flamia doctor` shows, as values that JSON can hold. Memory is in GiB.

    Keys: `flamia`, `python`, `torch`, `system`, `cuda` (a list), `backends`, `packages`, `self_test` (an
    entry for the CPU and for each CUDA device; none if `run_self_test` is False), `ok` (no self-test failed).
    """
    import flamia

    devices = _cuda_devices()
    where = ["cpu", *(f"cuda:{index}" for index in range(len(devices)))]
    tests = [self_test(device) for device in where] if run_self_test else []
    return {
        "flamia": flamia.__version__,
        "python": {"version": platform.python_version(), "executable": sys.executable},
        "torch": {
            "version": torch.__version__,
            "cuda_build": torch.version.cuda,
            "threads": torch.get_num_threads(),
        },
        "system": {
            "platform": platform.platform(),
            "processor": _processor(),
            "cores": _usable_cores(),
            **_memory(),
        },
        "cuda": devices,
        "backends": _backends(),
        "packages": [{**asdict(package), "version": package.version()} for package in OPTIONAL_PACKAGES],
        "self_test": tests,
        "ok": all(test["passed"] for test in tests),
    }


def _usable_cores() -> int:
    # This process's share of the machine, where the system can tell it from the whole machine.
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _processor() -> str:
    try:
        with open("/proc/cpuinfo") as lines:
            for line in lines:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _memory() -> dict[str, float | None]:
    """Total and available memory in GiB; None for what the system has no cheap way to say."""
    found: dict[str, float | None] = {"memory_gib": None, "available_gib": None}
    try:
        with open("/proc/meminfo") as lines:
            kib = {name: int(rest.split()[0]) for name, _, rest in (line.partition(":") for line in lines)}
        found["memory_gib"] = round(kib["MemTotal"] * 1024 / GIB, 1)
        found["available_gib"] = round(kib["MemAvailable"] * 1024 / GIB, 1)
    except (OSError, KeyError):
        if "SC_PHYS_PAGES" in getattr(os, "sysconf_names", {}):
            total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
            found["memory_gib"] = round(total / GIB, 1)
    return found


def _cuda_devices() -> list[dict[str, Any]]:
    if not torch.cuda.is_available():
        return []
    properties = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    return [
        {
            "name": device.name,
            "compute_capability": f"{device.major}.{device.minor}",
            "memory_gib": round(device.total_memory / GIB, 1),
        }
        for device in properties
    ]


def _backends() -> list[dict[str, Any]]:
    found = {package.module: package.version() for package in OPTIONAL_PACKAGES if package.extra == "gpu"}
    lacking = [] if found["tvm_ffi"] else ["tvm_ffi"]
    compilers = [name for name in ("triton", "cutlass") if not found[name]]
    if compilers and not os.environ.get("FLAMIA_KERNELS"):
        lacking.append(f"{' and '.join(compilers)} (or FLAMIA_KERNELS, a folder of ready kernels)")
    here = {device["compute_capability"] for device in _cuda_devices()}
    backends = [
        {"name": "reference", "runs_here": True, "note": "plain PyTorch, on CPU and CUDA tensors: right, not fast"}
    ]
    for name, room in KERNELS.items():
        served = bool(here & {f"{major}.{minor}" for major, minor in room.ARCHS})
        note = f"{room.DEVICES}: kernels of {NOTES[name]}"
        if not served:
            note += "; there is no such device"
        elif lacking:
            note += f"; lacks {', '.join(lacking)}"
        backends.append({"name": name, "runs_here": served and not lacking, "note": note})
    return backends
