"""The CUDA driver, as far as launching a compiled kernel needs it: ``libcuda.so.1`` through ctypes.

A kernel is loaded as a library, which serves every device; its function belongs to one device.
"""

from __future__ import annotations

import ctypes
import threading
from functools import lru_cache
from typing import Any

import torch

_BUFFER, _BUFFER_SIZE, _END = 1, 2, 0  # CU_LAUNCH_PARAM_BUFFER_POINTER, CU_LAUNCH_PARAM_BUFFER_SIZE, their end
_MOST_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_SHARED = 48 << 10  # bytes of dynamic shared memory that need no permission
_thread = threading.local()


class DriverError(RuntimeError):
    """A call of the CUDA driver that failed."""


def current() -> tuple[int, int]:
    """Torch's current device and the handle of its current stream there."""
    device = torch.cuda.current_device()
    return device, torch.cuda.current_stream(device).cuda_stream


@lru_cache(maxsize=64)
def target(device: int) -> str:
    """What kernels of a device are compiled for, such as "sm_90a"."""
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}a"


def load(image: bytes, name: str) -> int:
    """The kernel of that name in a cubin (or PTX): a handle for ``function``. Stays loaded.

    Raises:
        DriverError: not an image for this machine, or without that kernel.
    """
    library, kernel = ctypes.c_void_p(), ctypes.c_void_p()
    _call("cuLibraryLoadData", ctypes.byref(library), image, None, None, 0, None, None, 0, what=name)
    _call("cuLibraryGetKernel", ctypes.byref(kernel), library, name.encode(), what=name)
    assert kernel.value
    return kernel.value


def function(kernel: int, device: int, shared: int, name: str) -> int:
    """The function of a kernel on a device, which must be current, loaded there now rather than at its first launch.

    shared: bytes of dynamic shared memory of its launches.
    """
    _bind(device)
    made = ctypes.c_void_p()
    _call("cuKernelGetFunction", ctypes.byref(made), ctypes.c_void_p(kernel), what=name)
    if shared > _SHARED:
        _call("cuFuncSetAttribute", made, _MOST_SHARED, shared, what=name)
    assert made.value
    return made.value


def launch(
    function: int, grid: tuple[int, ...], threads: int, shared: int, stream: int, parameters: bytes, name: str
) -> None:
    """Launch on a stream of the function's device, which must be current. parameters: as a C struct holds them."""
    _bind(None)
    buffer = ctypes.create_string_buffer(parameters, len(parameters))
    size = ctypes.c_size_t(len(parameters))
    extra = (ctypes.c_void_p * 5)(_BUFFER, ctypes.addressof(buffer), _BUFFER_SIZE, ctypes.addressof(size), _END)
    x, y, z = (*grid, 1, 1)[:3]
    _call(
        "cuLaunchKernel",
        *(ctypes.c_void_p(function), x, y, z, threads, 1, 1, shared, ctypes.c_void_p(stream), None, extra),
        what=name,
    )


def _bind(device: int | None) -> None:
    # Torch makes a device current at once, but a thread of its own may not have called it yet. None: torch's current.
    if getattr(_thread, "bound", False):
        return
    context = ctypes.c_void_p()
    _call("cuCtxGetCurrent", ctypes.byref(context), what="the current context")
    if not context.value:
        index = torch.cuda.current_device() if device is None else device
        handle = ctypes.c_int()
        _call("cuDeviceGet", ctypes.byref(handle), index, what=f"device {index}")
        _call("cuDevicePrimaryCtxRetain", ctypes.byref(context), handle, what=f"device {index}")
        _call("cuCtxSetCurrent", context, what=f"device {index}")
    _thread.bound = True


@lru_cache(maxsize=1)
def _library() -> Any:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise DriverError(f"kernels need the CUDA driver, libcuda.so.1: {error}") from error


def _call(call: str, *arguments: Any, what: str) -> None:
    library = _library()
    try:
        entry = getattr(library, call)
    except AttributeError as error:
        raise DriverError(f"the CUDA driver has no {call}: kernels need one for CUDA 12 or later") from error
    code = entry(*arguments)
    if code:
        text = ctypes.c_char_p()
        library.cuGetErrorString(code, ctypes.byref(text))
        said = text.value.decode() if text.value else "unknown"
        raise DriverError(f"{call} of {what} failed: {said} (CUDA error {code})")
