"""The CUDA driver's calls for kernels that a program loads and launches itself, carried out by a software device.

``SoftDriver`` stands for the library object of ctypes: its attributes take what those of
``ctypes.CDLL("libcuda.so.1")`` would, output pointers by ``ctypes.byref``. Images are PTX, which the driver takes as
well as cubins.
"""

from __future__ import annotations

import ctypes

from .driver import Device
from .errors import SoftGPUError
from .ptx import Module, parse

_SUCCESS, _INVALID_VALUE, _INVALID_IMAGE, _NOT_FOUND = 0, 1, 200, 500
_TEXTS = {_INVALID_VALUE: b"invalid argument", _INVALID_IMAGE: b"not PTX", _NOT_FOUND: b"named symbol not found"}
_BUFFER, _BUFFER_SIZE = 1, 2  # CU_LAUNCH_PARAM_BUFFER_POINTER and _SIZE
_MOST_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_SHARED = 48 << 10


class SoftDriver:
    """Launches may touch what ``device.register`` or ``device.buffers`` say. Handles are numbers from 1."""

    def __init__(self, device: Device):
        self.device = device
        self.libraries: list[Module] = []
        self.kernels: list[tuple[Module, str]] = []
        self.shared: dict[int, int] = {}  # most bytes that a function may ask for

    def cuCtxGetCurrent(self, context) -> int:
        context._obj.value = 1
        return _SUCCESS

    def cuLibraryLoadData(self, library, image: bytes, *options) -> int:
        if options != (None, None, 0, None, None, 0):
            raise SoftGPUError(f"cuLibraryLoadData with options {options} is not offered")
        if not image.lstrip().startswith((b"//", b".version")):
            return _INVALID_IMAGE
        self.libraries.append(parse(image.decode()))
        library._obj.value = len(self.libraries)
        return _SUCCESS

    def cuLibraryGetKernel(self, kernel, library, name: bytes) -> int:
        module = self.libraries[library.value - 1]
        if name.decode() not in module.kernels:
            return _NOT_FOUND
        self.kernels.append((module, name.decode()))
        kernel._obj.value = len(self.kernels)
        return _SUCCESS

    def cuKernelGetFunction(self, function, kernel) -> int:
        function._obj.value = kernel.value
        return _SUCCESS

    def cuFuncSetAttribute(self, function, attribute: int, value: int) -> int:
        if attribute != _MOST_SHARED:
            raise SoftGPUError(f"cuFuncSetAttribute of {attribute} is not offered")
        self.shared[function.value] = value
        return _SUCCESS

    def cuLaunchKernel(self, function, gx, gy, gz, bx, by, bz, shared, stream, parameters, extra) -> int:
        if parameters is not None:
            raise SoftGPUError("cuLaunchKernel takes its parameters from a buffer here")
        module, name = self.kernels[function.value - 1]
        key, buffer, size_key, size, end = extra
        if (key, size_key, end) != (_BUFFER, _BUFFER_SIZE, None) or min(gx, gy, gz) < 1:
            return _INVALID_VALUE
        length = ctypes.c_size_t.from_address(size).value
        if length != module.kernels[name].param_bytes or shared > self.shared.get(function.value, _SHARED):
            return _INVALID_VALUE
        raw = ctypes.string_at(buffer, length)
        self.device.launch(module, (gx, gy, gz), (bx, by, bz), raw, kernel=name, dynamic_shared=shared)
        return _SUCCESS

    def cuGetErrorString(self, code: int, text) -> int:
        text._obj.value = _TEXTS.get(code, b"unrecognized error code")
        return _SUCCESS
