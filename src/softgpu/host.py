"""Host memory presented as device tensors, for host code that insists on a GPU.

A DLPack capsule over a torch tensor's own memory says "CUDA device 0"; nothing is copied. Struct layout: DLPack 0.8.
"""

from __future__ import annotations

import ctypes as C


class _Device(C.Structure):
    _fields_ = [("kind", C.c_int32), ("index", C.c_int32)]


class _Type(C.Structure):
    _fields_ = [("code", C.c_uint8), ("bits", C.c_uint8), ("lanes", C.c_uint16)]


class _Tensor(C.Structure):
    _fields_ = [
        ("data", C.c_void_p), ("device", _Device), ("ndim", C.c_int32), ("dtype", _Type),
        ("shape", C.POINTER(C.c_int64)), ("strides", C.POINTER(C.c_int64)), ("byte_offset", C.c_uint64),
    ]  # fmt: skip


class _Managed(C.Structure):
    pass


_DELETER = C.CFUNCTYPE(None, C.POINTER(_Managed))
_Managed._fields_ = [("tensor", _Tensor), ("context", C.c_void_p), ("deleter", _DELETER)]
_CUDA = 2
_alive: dict[int, tuple] = {}


@_DELETER
def _release(managed):
    _alive.pop(C.addressof(managed.contents), None)


def _code(dtype) -> tuple[int, int]:
    import torch

    table = {
        torch.float32: (2, 32), torch.float16: (2, 16), torch.bfloat16: (4, 16), torch.float64: (2, 64),
        torch.int8: (0, 8),
        torch.int16: (0, 16), torch.int32: (0, 32), torch.int64: (0, 64), torch.uint8: (1, 8), torch.bool: (6, 8),
    }  # fmt: skip
    # DLPack 1.1 has codes of their own for the small floats
    for name, entry in (("float8_e4m3fn", (10, 8)), ("float8_e5m2", (12, 8)), ("float8_e8m0fnu", (14, 8))):
        if hasattr(torch, name):
            table[getattr(torch, name)] = entry
    if hasattr(torch, "float4_e2m1fn_x2"):  # two to a byte: travels as bytes
        table[torch.float4_e2m1fn_x2] = (1, 8)
    if dtype not in table:
        raise TypeError(f"tensor dtype {dtype} cannot be handed to a captured launcher")
    return table[dtype]


class DeviceView:
    """A torch CPU tensor that offers itself through DLPack as a CUDA tensor."""

    def __init__(self, tensor):
        self.tensor = tensor

    def __dlpack_device__(self):
        return (_CUDA, 0)

    def __dlpack__(self, **_):
        t = self.tensor
        shape, strides = (C.c_int64 * t.ndim)(*t.shape), (C.c_int64 * t.ndim)(*t.stride())
        managed = _Managed()
        code, bits = _code(t.dtype)
        managed.tensor = _Tensor(t.data_ptr(), _Device(_CUDA, 0), t.ndim, _Type(code, bits, 1), shape, strides, 0)
        managed.deleter = _release
        _alive[C.addressof(managed)] = (managed, shape, strides, t)
        new = C.pythonapi.PyCapsule_New
        new.restype, new.argtypes = C.py_object, [C.c_void_p, C.c_char_p, C.c_void_p]
        return new(C.addressof(managed), b"dltensor", None)


def as_device(value, buffers: list):
    """Convert a launcher argument: tensors to device views (collected in ``buffers``), tuples and lists inside out."""
    if hasattr(value, "untyped_storage"):
        import torch
        import tvm_ffi

        plain = value.detach().as_subclass(torch.Tensor)
        buffers.append(plain)
        return tvm_ffi.from_dlpack(DeviceView(plain))
    if isinstance(value, (tuple, list)):
        return tuple(as_device(v, buffers) for v in value)
    return value
