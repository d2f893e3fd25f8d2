"""Global, shared, tensor and parameter memory.

Address spaces (PTX ISA 5.1): a global address is the host address of the buffer; a shared address is 32 bits, the
CTA's rank in its cluster in bits 24 and up, so that shared::cta is a window of shared::cluster; a generic address
below 2**56 is global, at 2**56 shared, at 2**57 a kernel parameter.
"""

from __future__ import annotations

import bisect
import ctypes

import numpy as np

from .errors import AsyncRace, Misaligned, MissingProxyFence, OutOfBounds, TensorMemoryMisuse, UninitialisedRead

SHARED_WINDOW = 1 << 56
PARAM_WINDOW = 1 << 57
RANK_SHIFT = 24
OFFSET_MASK = (1 << RANK_SHIFT) - 1
#: Shared memory that the system keeps at the start of the window (1 KiB per CTA since sm_80)
RESERVED_SHARED = 1024
#: Shared memory of one SM in bytes, sm_90 to sm_103
SHARED_BYTES = 228 * 1024
TMEM_LANES, TMEM_COLUMNS = 128, 512
_UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
_ALL_VALID = {1: 0x1, 2: 0x101, 4: 0x01010101, 8: 0x0101010101010101}


class Buffer:
    """One registered range of host memory: ``name`` for messages, [base, end) as addresses."""

    def __init__(self, base: int, size: int, name: str, keep: object = None):
        self.base, self.size, self.end, self.name, self.keep = base, size, base + size, name, keep
        self.bytes = np.frombuffer((ctypes.c_uint8 * size).from_address(base), np.uint8) if size else np.empty(0, "u1")
        self._views: dict[int, tuple[int, np.ndarray]] = {}

    def view(self, size: int) -> tuple[int, np.ndarray]:
        """(address of element 0, elements of ``size`` bytes) over the naturally aligned part."""
        found = self._views.get(size)
        if found is None:
            skip = -self.base % size
            count = max(0, (self.size - skip) // size)
            array = self.bytes[skip : skip + count * size].view(_UNSIGNED[size])
            found = self._views[size] = (self.base + skip, array)
        return found


class GlobalMemory:
    """The buffers a launch may touch; anything else is out of bounds."""

    def __init__(self):
        self.buffers: list[Buffer] = []
        self._bases: list[int] = []
        self._last: Buffer | None = None

    def add(self, base: int, size: int, name: str, keep: object = None) -> None:
        """Register [base, base + size); overlapping ranges become one."""
        if size <= 0:
            return
        end = base + size
        merged = [b for b in self.buffers if b.base < end and base < b.end]
        if merged:
            base = min(base, *(b.base for b in merged))
            end = max(end, *(b.end for b in merged))
            name = "+".join(dict.fromkeys([b.name for b in merged] + [name]))
            keep = [keep] + [b.keep for b in merged]
            self.buffers = [b for b in self.buffers if b not in merged]
        self.buffers.append(Buffer(base, end - base, name, keep))
        self.buffers.sort(key=lambda b: b.base)
        self._bases = [b.base for b in self.buffers]
        self._last = None

    def find(self, address: int, size: int) -> Buffer:
        """The buffer that holds [address, address + size)."""
        last = self._last
        if last is not None and last.base <= address and address + size <= last.end:
            return last
        n = bisect.bisect_right(self._bases, address) - 1
        if n >= 0 and address + size <= self.buffers[n].end:
            self._last = self.buffers[n]
            return self._last
        near = self.buffers[n] if n >= 0 else None
        hint = "" if near is None else f"; the buffer before it, {near.name}, ends {address - near.end} bytes earlier"
        raise OutOfBounds(f"global access of {size} bytes at {address:#x} is outside of every buffer{hint}")

    def _groups(self, address: np.ndarray, size: int):
        """(buffer, selection) pairs that cover all addresses; the selection is None where one buffer does."""
        if (address % size).any():
            bad = int(address[np.flatnonzero(address % size)[0]])
            raise Misaligned(f"global address {bad:#x} is not a multiple of {size}")
        low, high = int(address.min()), int(address.max())
        buffer = self.find(low, size)
        if high + size <= buffer.end:
            yield buffer, None
            return
        left = np.ones(address.size, bool)
        while left.any():
            buffer = self.find(int(address[left].min()), size)
            inside = left & (address >= buffer.base) & (address + np.uint64(size) <= buffer.end)
            yield buffer, inside
            left &= ~inside

    def load(self, address: np.ndarray, unit: int, count: int) -> np.ndarray:
        """Elements [lanes, count] of ``unit`` bytes (unsigned) at uint64 addresses."""
        out = np.empty((address.size, count), _UNSIGNED[unit])
        for buffer, sel in self._groups(address, unit * count):
            base, array = buffer.view(unit)
            at = address if sel is None else address[sel]
            index = ((at - np.uint64(base)) // np.uint64(unit)).astype(np.intp)[:, None] + np.arange(count)
            if sel is None:
                out[...] = array[index]
            else:
                out[sel] = array[index]
        return out

    def store(self, address: np.ndarray, values: np.ndarray) -> None:
        """Write [lanes, count] elements; where lanes collide the highest lane wins."""
        unit = values.dtype.itemsize
        for buffer, sel in self._groups(address, unit * values.shape[1]):
            base, array = buffer.view(unit)
            at = address if sel is None else address[sel]
            index = ((at - np.uint64(base)) // np.uint64(unit)).astype(np.intp)[:, None] + np.arange(values.shape[1])
            array[index] = values if sel is None else values[sel]

    def bytes_at(self, address: int, size: int) -> np.ndarray:
        """A writable byte view of [address, address + size)."""
        buffer = self.find(address, size)
        return buffer.bytes[address - buffer.base : address - buffer.base + size]


class SharedMemory:
    """Shared memory of one CTA with its shadow state.

    ``valid`` says which bytes were written. Per 16-byte granule: when and by which warp the generic proxy last
    wrote it (for ``fence.proxy.async``), and how many asynchronous operations in flight write or read it.
    """

    def __init__(self, size: int, checks):
        self.size = size
        padded = -(-size // 16) * 16
        self.data = np.zeros(padded, np.uint8)
        self.views = {n: self.data.view(t) for n, t in _UNSIGNED.items()}
        self.chunks = self.data.reshape(-1, 16)
        self.valid = np.zeros(padded, np.uint8)
        self.valid_views = {n: self.valid.view(t) for n, t in _UNSIGNED.items()}
        self.valid_chunks = self.valid.reshape(-1, 16)
        granules = padded // 16
        self.written_at = np.zeros(granules, np.int64)
        self.writer = np.zeros(granules, np.int64)
        self.writing = np.zeros(granules, np.int32)
        self.reading = np.zeros(granules, np.int32)
        self.busy = 0
        self.checks = checks

    def index(self, offset: np.ndarray, unit: int, count: int) -> np.ndarray:
        """Element indices [lanes, count] after the bounds and alignment check."""
        size = unit * count
        if offset.size and int(offset.max()) + size > self.size:
            raise OutOfBounds(
                f"shared access of {size} bytes at offset {int(offset.max()):#x} ends beyond the CTA's "
                f"{self.size:#x} bytes"
            )
        if (offset % size).any():
            raise Misaligned(
                f"shared address {int(offset[np.flatnonzero(offset % size)[0]]):#x} is not aligned to {size}"
            )
        first = (offset // unit).astype(np.intp)
        return first[:, None] if count == 1 else first[:, None] + np.arange(count)

    def load(self, offset: np.ndarray, unit: int, count: int) -> np.ndarray:
        index = self.index(offset, unit, count)
        if self.checks.uninitialised and (self.valid_views[unit][index] != _ALL_VALID[unit]).any():
            bad = np.flatnonzero((self.valid_views[unit][index] != _ALL_VALID[unit]).any(1))[0]
            raise UninitialisedRead(f"shared memory at offset {int(offset[bad]):#x} was never written")
        if self.busy and self.checks.races:
            self.check_quiet(offset.astype(np.intp) >> 4, "read", self.writing)
        return self.views[unit][index]

    def store(self, offset: np.ndarray, values: np.ndarray, warps: np.ndarray, clock: int) -> None:
        unit, count = values.dtype.itemsize, values.shape[1]
        index = self.index(offset, unit, count)
        granules = offset.astype(np.intp) >> 4
        if self.busy and self.checks.races:
            self.check_quiet(granules, "written", self.writing)
            self.check_quiet(granules, "written", self.reading)
        self.views[unit][index] = values
        self.valid_views[unit][index] = _ALL_VALID[unit]
        self.written_at[granules] = clock
        self.writer[granules] = warps

    def check_quiet(self, granules: np.ndarray, how: str, counter: np.ndarray) -> None:
        hit = counter[granules]
        if hit.any():
            at = int(np.asarray(granules).ravel()[np.flatnonzero(hit.ravel())[0]]) * 16
            what = "writes" if counter is self.writing else "reads"
            raise AsyncRace(
                f"shared memory at offset {at:#x} is {how} while an asynchronous operation in flight {what} it"
            )

    def check_fenced(self, granules: np.ndarray, fences: np.ndarray, issuers, what: str) -> None:
        """Every generic write under an async read must be older than a proxy fence of its writer or the issuer."""
        if not self.checks.proxy_fences:
            return
        stamp = self.written_at[granules]
        fenced = fences[self.writer[granules]]
        for warp in issuers:
            fenced = np.maximum(fenced, fences[warp])
        late = stamp > fenced
        if late.any():
            g = int(np.asarray(granules).ravel()[np.flatnonzero(late.ravel())[0]])
            raise MissingProxyFence(
                f"{what} reads shared memory at offset {g * 16:#x}, written by warp {int(self.writer[g])} with no "
                "fence.proxy.async since"
            )

    def check_valid(self, granules: np.ndarray, what: str) -> None:
        if self.checks.uninitialised and not self.valid_chunks[granules].all():
            flat = np.asarray(granules).ravel()
            bad = flat[np.flatnonzero(~self.valid_chunks[flat].all(1))[0]]
            raise UninitialisedRead(f"{what} reads shared memory at offset {int(bad) * 16:#x}, which was never written")

    def begin_read(self, granules: np.ndarray) -> None:
        if self.busy and self.checks.races:
            self.check_quiet(granules, "read by an asynchronous operation", self.writing)
        self._add(self.reading, granules, 1)
        self.busy += 1

    def end_read(self, granules: np.ndarray) -> None:
        self._add(self.reading, granules, -1)
        self.busy -= 1

    def begin_write(self, granules: np.ndarray) -> None:
        if self.busy and self.checks.races:
            self.check_quiet(granules, "overwritten by an asynchronous copy", self.writing)
            self.check_quiet(granules, "overwritten by an asynchronous copy", self.reading)
        self._add(self.writing, granules, 1)
        self.busy += 1

    def end_write(self, granules: np.ndarray) -> None:
        self._add(self.writing, granules, -1)
        self.written_at[granules] = 0
        self.busy -= 1

    @staticmethod
    def _add(counter: np.ndarray, granules: np.ndarray, n: int) -> None:
        # granule lists are free of repeats, so plain indexing counts right
        counter[granules] += n


class TensorMemory:
    """Tensor memory of one CTA: 128 lanes × 512 columns of 32 bits (PTX ISA 9.7.16.1)."""

    def __init__(self, checks):
        self.data = np.zeros((TMEM_LANES, TMEM_COLUMNS), np.uint32)
        self.floats = self.data.view(np.float32)
        self.valid = np.zeros((TMEM_LANES, TMEM_COLUMNS), bool)
        self.owner = np.zeros(TMEM_COLUMNS, bool)
        self.allocations: dict[int, int] = {}
        #: columns a warp waits for, and the first column given to it
        self.wanted: int | None = None
        self.granted: int | None = None
        self.checks = checks

    def allocate(self, columns: int) -> int | None:
        """First column of a free aligned range, or None when there is none now."""
        if columns < 32 or columns > TMEM_COLUMNS or columns & (columns - 1):
            raise TensorMemoryMisuse(f"tcgen05.alloc of {columns} columns: must be a power of two from 32 to 512")
        for start in range(0, TMEM_COLUMNS - columns + 1, 32):
            if not self.owner[start : start + columns].any():
                self.owner[start : start + columns] = True
                self.valid[:, start : start + columns] = False
                self.allocations[start] = columns
                return start
        return None

    def free(self, start: int, columns: int) -> None:
        if self.allocations.get(start) != columns:
            raise TensorMemoryMisuse(
                f"tcgen05.dealloc of {columns} columns at {start}: allocated are {self.allocations}"
            )
        del self.allocations[start]
        self.owner[start : start + columns] = False

    def check_range(self, column: int, columns: int, what: str) -> None:
        if column + columns > TMEM_COLUMNS or not self.owner[column : column + columns].all():
            raise TensorMemoryMisuse(
                f"{what} touches tensor memory columns {column} to {column + columns - 1}; allocated are "
                f"{ {s: s + n - 1 for s, n in self.allocations.items()} }"
            )

    def check_valid(self, lanes, column: int, columns: int, what: str) -> None:
        part = self.valid[lanes, column : column + columns]
        if self.checks.uninitialised and not part.all():
            lane, col = (int(x[0]) for x in np.nonzero(~part))
            raise UninitialisedRead(
                f"{what} reads tensor memory column {column + col} (lane {lane} of the access), never written"
            )
