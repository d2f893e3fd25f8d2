"""From a compiled kernel to a run: PTX and parameters directly, or an object or library whose own host code runs.

``Device`` holds what stays over launches (SM count, seed, checks, reports); ``launch`` runs one kernel of a PTX
module; ``load`` gives the host code of an object or library as a callable that takes host tensors.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import struct
import tempfile
import time
import weakref
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from .checks import ALL, Checks
from .errors import SoftGPUError
from .library import host_code
from .machine import Launch
from .memory import GlobalMemory
from .ptx import Module, parse
from .translate import Program

#: cudaLaunchAttributeClusterDimension; an attribute is 8 bytes of id and padding, then a 64-byte value
_CLUSTER_ATTRIBUTE, _ATTRIBUTE_BYTES = 4, 72


@dataclass
class Report:
    """One finished launch: names, sizes, seconds, and warp-level executions per opcode."""

    kernel: str
    grid: tuple
    block: tuple
    cluster: tuple
    seconds: float
    opcodes: dict[str, int]
    instructions: int
    reached: int
    unreached: list = field(repr=False, default_factory=list)
    notes: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        top = sorted(self.opcodes.items(), key=lambda x: -x[1])
        lines = [
            f"{self.kernel}: grid {self.grid}, block {self.block}, cluster {self.cluster}, {self.seconds:.2f} s, "
            f"{self.reached} of {self.instructions} instructions reached"
        ]
        lines += [f"  note: {n}" for n in self.notes]
        lines += [f"  {n:>10} {op}" for op, n in top if n]
        lines += [f"  never: line {i.line}: {i.text[:90]}" for i in self.unreached]
        return "\n".join(lines)


class Device:
    """A software GPU.

    num_sms: what ``%nsmid`` and device queries answer. seed: None for the in-order schedule with asynchronous
    operations as late as possible, an int for a shuffled one. checks: which diagnoses are on.
    """

    def __init__(self, *, num_sms: int = 4, seed: int | None = None, checks: Checks = ALL):
        self.num_sms, self.seed, self.checks = num_sms, seed, checks
        self.reports: list[Report] = []
        self.buffers: list[tuple[int, int, str, object]] = []
        # the PTX is kept beside its program, so that a module's id stays its own
        self._programs: dict[tuple[str, str], tuple[Program, str | Module]] = {}

    def register(self, array, name: str = "buffer") -> int:
        """Make a NumPy array or a host tensor reachable by later launches; gives its address."""
        address, size = _extent(array)
        self.buffers.append((address, size, name, array))
        return address

    def program(self, ptx: str | Module, kernel: str | None = None) -> Program:
        """The translated kernel, kept for the next launch. ``kernel`` may be left out when the module has one."""
        key = (hashlib.sha256(ptx.encode()).hexdigest() if isinstance(ptx, str) else str(id(ptx)), kernel or "")
        if key not in self._programs:
            module = parse(ptx) if isinstance(ptx, str) else ptx
            if kernel is None and len(module.kernels) != 1:
                raise ValueError(f"kernel must be named, the module has {sorted(module.kernels)}")
            name = kernel or next(iter(module.kernels))
            if name not in module.kernels:
                raise ValueError(f"kernel {name!r} is not in the module, which has {sorted(module.kernels)}")
            self._programs[key] = (Program(module.kernels[name], module.target), ptx)
        return self._programs[key][0]

    def launch(
        self, ptx: str | Module, grid, block, params: bytes, *, kernel: str | None = None, buffers=(),
        cluster=(1, 1, 1), dynamic_shared: int = 0,
    ) -> Report:  # fmt: skip
        """Run one kernel; ``params`` is the raw parameter buffer (addresses are host addresses)."""
        program = self.program(ptx, kernel)
        memory = GlobalMemory()
        for address, size, name, keep in self.buffers:
            memory.add(address, size, name, keep)
        for n, array in enumerate(buffers):
            address, size = _extent(array)
            memory.add(address, size, f"argument {n}", array)
        if len(params) < program.kernel.param_bytes:
            raise ValueError(f"params has {len(params)} bytes, the kernel takes {program.kernel.param_bytes}")
        before = program.executed.copy()
        start = time.perf_counter()
        launch = Launch(
            program, grid, block, params, memory, cluster=cluster, dynamic_shared=dynamic_shared, seed=self.seed,
            checks=self.checks, num_sms=self.num_sms,
        )  # fmt: skip
        launch.run()
        seconds = time.perf_counter() - start
        ran = program.executed - before
        opcodes: dict[str, int] = {}
        unreached = []
        for b, n in zip(program.blocks, ran.tolist(), strict=True):
            for i in b.instrs:
                opcodes[i.op] = opcodes.get(i.op, 0) + n
                if not n:
                    unreached.append(i)
        total = len(program.kernel.instrs)
        report = Report(
            program.kernel.name,
            tuple(grid),
            tuple(block),
            tuple(cluster),
            seconds,
            opcodes,
            total,
            total - len(unreached),
            unreached,
            launch.notes,
        )
        self.reports.append(report)
        return report

    def load(self, path: str | os.PathLike, ptx: str, function: str = "func") -> SoftFunction:
        """A function of an object exported by the CuTe DSL (``export_to_c(…, export_only_tvm_ffi_symbols=True)``), or
        of a shared library made from one with a shared CUDA runtime (``-lcudart`` or the DSL's own).

        ``ptx`` is the text of its kernels. Needs a C compiler (``cc``) and apache-tvm-ffi.
        """
        return SoftFunction(self, Path(path), ptx, function)


def run(kernel, *args, device: Device | None = None, ptx: str | None = None, function: str = "func") -> Device:
    """Run a compiled kernel once on host tensors; gives the device, whose last report describes the run.

    ``kernel`` is a ``SoftFunction``, what ``cute.compile`` made (with ``--enable-tvm-ffi --keep-ptx``), or the path of
    an object exported by the CuTe DSL or of a shared library made from one (see ``Device.load``), whose PTX is ``ptx``
    or lies beside it with the suffix ``.ptx``.
    """
    device = device or Device()
    if isinstance(kernel, SoftFunction):
        kernel.with_ptx(kernel.ptx, device)(*args)
    elif hasattr(kernel, "export_to_c"):
        from .cutedsl import load_compiled

        load_compiled(device, kernel)(*args)
    elif isinstance(kernel, str | os.PathLike):
        path = Path(kernel)
        device.load(path, path.with_suffix(".ptx").read_text() if ptx is None else ptx, function)(*args)
    else:
        raise TypeError(
            f"kernel must be a compiled function or the path of an object or library, not {type(kernel).__name__}"
        )
    return device


def _extent(array) -> tuple[int, int]:
    """(address, bytes) of a NumPy array or torch tensor's elements, the whole storage for tensors."""
    if hasattr(array, "untyped_storage"):
        storage = array.untyped_storage()
        return storage.data_ptr(), storage.nbytes()
    if isinstance(array, np.ndarray):
        base = array
        while isinstance(base.base, np.ndarray):
            base = base.base
        low, high = np.lib.array_utils.byte_bounds(base)
        return low, high - low
    raise TypeError(f"buffer must be a NumPy array or a torch tensor, not {type(array).__name__}")


_LAUNCH = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_char_p, ctypes.POINTER(ctypes.c_void_p))


class SoftFunction:
    """A host function whose launches run on a software device; call it with host tensors and scalars."""

    def __init__(self, device: Device, library: Path, ptx: str, function: str):
        import tvm_ffi

        self.device, self.ptx, self.function = device, ptx, function
        self.module_ptx = parse(ptx)
        self._folder = tempfile.mkdtemp(prefix="softgpu-")
        self._cleanup = weakref.finalize(self, shutil.rmtree, self._folder, True)
        # every function has host code of its own, since a callback belongs to the whole library
        self._host = host_code(library, Path(self._folder))
        self._capture = self._host.capture
        self._module = tvm_ffi.load_module(str(self._host.library))
        self._refused = ctypes.c_char_p.in_dll(self._capture, "softgpu_refused")
        self._callback = _LAUNCH(self._launch)
        self._capture.softgpu_set_callback(self._callback)
        major, minor = _capability(self.module_ptx.target)
        # cudaDevAttr: 16 multiprocessors, 75/76 capability, 97 shared memory per block (opt-in), 39 threads per SM
        for which, value in ((16, device.num_sms), (75, major), (76, minor), (97, 232448), (39, 2048)):
            self._capture.softgpu_set_attribute(which, value)
        self._function = self._module[function]
        self._error: BaseException | None = None
        self._buffers: list = []

    def with_ptx(self, ptx: str, device: Device | None = None) -> SoftFunction:
        """The same host code with other kernel text, for faults on purpose."""
        return SoftFunction(device or self.device, self._host.source, ptx, self.function)

    def __call__(self, *args):
        from .host import as_device

        self._error = None
        self._refused.value = None
        self._buffers = []
        converted = [as_device(a, self._buffers) for a in args]
        try:
            result = self._function(*converted)
        except Exception:
            self._raise()
            raise
        self._raise()
        return result

    def _raise(self) -> None:
        """What went wrong in a launch, or a call that the captured CUDA runtime does not have."""
        if self._error is not None:
            raise self._error from None
        if self._refused.value:
            raise SoftGPUError(f"the host code asks for {self._refused.value.decode()}, which softgpu does not offer")

    def _launch(self, config, name, parameters) -> int:
        try:
            self._run(config, name.decode(), parameters)
            return 0
        except BaseException as e:
            self._error = e
            return 1

    def _run(self, config: int, name: str, parameters) -> None:
        # cudaLaunchConfig_t: grid, block (3 × u32 each), dynamic shared bytes, stream, attributes, their number
        raw = ctypes.string_at(config, 56)
        gx, gy, gz, bx, by, bz = struct.unpack_from("<6I", raw)
        (shared,) = struct.unpack_from("<Q", raw, 24)
        attributes, count = struct.unpack_from("<QI", raw, 40)
        cluster = (1, 1, 1)
        for n in range(count):
            entry = ctypes.string_at(attributes + _ATTRIBUTE_BYTES * n, _ATTRIBUTE_BYTES)
            kind = struct.unpack_from("<I", entry)[0]
            if kind == _CLUSTER_ATTRIBUTE:
                cluster = struct.unpack_from("<3I", entry, 8)
        kernel = self.module_ptx.kernels.get(name)
        if kernel is None:
            raise SoftGPUError(f"the launcher asks for kernel {name}, the PTX has {sorted(self.module_ptx.kernels)}")
        params = bytearray(kernel.param_bytes)
        for n, p in enumerate(kernel.params.values()):
            params[p.offset : p.offset + p.size] = ctypes.string_at(parameters[n], p.size)
        self.device.launch(
            self.module_ptx, (gx, gy, gz), (bx, by, bz), bytes(params), kernel=name, buffers=self._buffers,
            cluster=cluster, dynamic_shared=shared,
        )  # fmt: skip


def _capability(target: str) -> tuple[int, int]:
    digits = "".join(c for c in target if c.isdigit())
    return int(digits[:-1]), int(digits[-1])
