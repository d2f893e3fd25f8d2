"""Bulk and tensor copies, cp.async, bulk groups (PTX ISA 9.7.9.24 to 9.7.9.27)."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from ..errors import DescriptorError, Misaligned, OutOfBounds
from ..formats import bf16_to_f32, f32_to_bf16
from ..layouts import SWIZZLE_BYTES, TensorMap, swizzle_chunks
from ..memory import OFFSET_MASK, PARAM_WINDOW
from ..ptx import Imm
from ..translate import emits
from .memory import cp_async, cp_async_commit, cp_async_wait

_NOTES = {"L2::cache_hint", "tile", "bulk_group", "mbarrier::complete_tx::bytes"}
_REDUCE_TYPES = {"f32", "f16", "bf16", "u32", "s32", "u64"}


@emits("cp")
def copy(g, i):
    """cp: cp.async with its groups, bulk and tensor copies, bulk reductions."""
    parts = i.parts[1:]
    if parts[0] == "reduce":
        _bulk(g, i, parts[3:], reduce=True)
    elif parts[:2] == ("async", "bulk"):
        rest = parts[2:]
        if rest[0] == "commit_group":
            g.line(f"{g.use(bulk_commit)}(f, {g.mask})")
        elif rest[0] == "wait_group":
            g.line(f"{g.use(bulk_wait)}(f, {i.operands[0].value}, {'read' in rest}, {g.mask})")
        elif rest[0] == "prefetch":
            return
        else:
            _bulk(g, i, rest, reduce=False)
    elif parts[1] == "commit_group":
        g.line(f"{g.use(cp_async_commit)}(f, {g.mask})")
    elif parts[1] in ("wait_group", "wait_all"):
        keep = i.operands[0].value if i.operands else 0
        g.line(f"{g.use(cp_async_wait)}(f, {keep}, {parts[1] == 'wait_all'}, {g.mask})")
    elif parts[1] in ("ca", "cg"):
        extra = [p for p in parts[2:] if p not in ("shared", "shared::cta", "global") and not p.startswith("L2::")]
        if extra:
            raise g.unsupported(f"modifier .{extra[0]} is not supported")
        target, source, size = i.operands[:3]
        filled = g.src(i.operands[3] if len(i.operands) > 3 else Imm(size.value), "u4")
        g.line(
            f"{g.use(cp_async)}(f, {g.address(target)}, {g.address(source, 'u8')}, {size.value}, {filled}, {g.mask})"
        )
    else:
        raise g.unsupported("this copy is not supported")


def _bulk(g, i, parts, reduce: bool):
    """``parts`` after cp.async.bulk or cp.reduce.async.bulk."""
    tensor = parts[0] == "tensor"
    rank = 0
    if tensor:
        rank, parts = int(parts[1][0]), parts[2:]
    to, source, rest = parts[0], parts[1], list(parts[2:])
    multicast = "multicast::cluster" in rest
    group = 2 if "cta_group::2" in rest else 1
    op = None
    kind = None
    if reduce:
        op = next((p for p in rest if p in ("add", "min", "max")), None)
        kind = next((p for p in rest if p in _REDUCE_TYPES), None)
        if op is None or (kind is None and not tensor):
            raise g.unsupported("this reduction is not supported")
    known = _NOTES | {"multicast::cluster", "cta_group::1", "cta_group::2", "noftz", op, kind}
    extra = [p for p in rest if p not in known]
    if extra:
        raise g.unsupported(f"modifier .{extra[0]} is not supported")
    ops = list(i.operands)
    line = (i.line, i.text[:160])
    note = g.use(_Note(line))
    if to.startswith("shared") and source == "global":
        target, source_op = ops[0], ops[1]
        if tensor:
            bar, mask = ops[2], ops[3] if multicast else None
            coords = ", ".join(g.src(c, "s4") for c in source_op.coords[0].items)
            if len(source_op.coords[0].items) != rank:
                raise g.unsupported("the number of coordinates differs from the rank")
            mask_text = g.src(mask, "u2") if multicast else "None"
            g.line(
                f"{g.use(tensor_load)}(f, {note}, {g.address(target)}, {g.address(source_op, 'u8')}, ({coords},), "
                f"{g.address(bar)}, {mask_text}, {group}, {g.mask})"
            )
        else:
            size, bar = ops[2], ops[3]
            mask_text = g.src(ops[4], "u2") if multicast else "None"
            g.line(
                f"{g.use(bulk_load)}(f, {note}, {g.address(target)}, {g.address(source_op, 'u8')}, "
                f"{g.src(size, 'u4')}, "
                f"{g.address(bar)}, {mask_text}, {g.mask})"
            )
    elif to == "global" and source.startswith("shared"):
        target, source_op = ops[0], ops[1]
        if tensor:
            coords = ", ".join(g.src(c, "s4") for c in target.coords[0].items)
            g.line(
                f"{g.use(tensor_store)}(f, {note}, {g.address(target, 'u8')}, ({coords},), "
                f"{g.address(source_op)}, {op!r}, {g.mask})"
            )
        else:
            g.line(
                f"{g.use(bulk_store)}(f, {note}, {g.address(target, 'u8')}, {g.address(source_op)}, "
                f"{g.src(ops[2], 'u4')}, "
                f"{op!r}, {kind!r}, {g.mask})"
            )
    elif to == "shared::cluster" and source.startswith("shared") and not tensor and not reduce:
        g.line(
            f"{g.use(cluster_copy)}(f, {note}, {g.address(ops[0])}, {g.address(ops[1])}, {g.src(ops[2], 'u4')}, "
            f"{g.address(ops[3])}, {g.mask})"
        )
    else:
        raise g.unsupported("this direction is not supported")


class _Note:
    """The instruction an asynchronous operation came from, for diagnoses."""

    def __init__(self, where):
        self.where = where


class Operation:
    """A queued copy: ``run`` once; ``has_read`` tells whether its source buffer is free again."""

    def __init__(self, where, run):
        self.where, self._run, self.has_read = where, run, False

    def __call__(self):
        if not self.has_read:
            self._run()
            self.has_read = True


def _each(f, mask, *vectors):
    for lane in f.select(mask):
        yield (int(lane), *tuple(int(v[0] if v.size == 1 else v[lane]) for v in vectors))


def _map_bytes(f, address: int) -> bytes:
    if address >> 56 == PARAM_WINDOW >> 56:
        at = address & (PARAM_WINDOW - 1)
        return f.cta.launch.params[at : at + 128].tobytes()
    return f.cta.launch.memory.bytes_at(address, 128).tobytes()


@lru_cache(maxsize=1024)
def _decode_map(raw: bytes) -> TensorMap:
    """A tensor map from its 128 bytes."""
    return TensorMap.decode(raw)


def _region(tensor: TensorMap, coords):
    """(box bytes, in-bounds slices of the box, first coordinate and count of the tensor) of one access."""
    inside, start = [], []
    for c, size, box, step in zip(coords, tensor.dims, tensor.box, tensor.steps, strict=True):
        count = -(-box // step)
        first = max(0, -(c // step)) if c < 0 else 0
        last = max(first, min(count, -(-(size - c) // step)))
        inside.append(slice(first, last))
        start.append(c + first * step)
    return inside, start


def _box_shape(tensor: TensorMap):
    return tuple(-(-b // s) for b, s in zip(tensor.box, tensor.steps, strict=True))


def _global_view(f, tensor: TensorMap, start, inside):
    """The in-bounds elements as a strided view, outermost dimension first."""
    counts = [s.stop - s.start for s in inside]
    at = tensor.address + sum(c * s for c, s in zip(start, tensor.strides, strict=True))
    span = (
        sum((n - 1) * step * s for n, step, s in zip(counts, tensor.steps, tensor.strides, strict=True)) + tensor.unit
    )
    flat = f.cta.launch.memory.bytes_at(at, span)
    strides = [step * s for step, s in zip(tensor.steps, tensor.strides, strict=True)]
    base = np.lib.stride_tricks.as_strided(
        flat, shape=(*tuple(reversed(counts)), tensor.unit), strides=(*tuple(reversed(strides)), 1)
    )
    return base


def _chunks(offset: int, size: int, mode: str, what: str) -> np.ndarray:
    """Indices of the 16-byte chunks of a swizzled box at a shared offset."""
    if offset % (128 if mode != "none" else 16):
        raise Misaligned(f"{what}: shared address {offset:#x} is not aligned")
    return swizzle_chunks(np.arange(offset >> 4, (offset + size + 15) >> 4), mode)


def _check_room(cta, offset: int, size: int, what: str) -> None:
    if offset + size > cta.shared.size:
        raise OutOfBounds(
            f"{what}: {size} bytes at shared offset {offset:#x} end beyond the CTA's {cta.shared.size:#x}"
        )


def _inner_bytes(tensor: TensorMap, what: str) -> int:
    shape = _box_shape(tensor)
    inner = shape[0] * tensor.unit
    if tensor.mode != "none" and inner > SWIZZLE_BYTES[tensor.mode]:
        raise DescriptorError(f"{what}: {inner} inner bytes exceed the {tensor.mode} swizzle")
    if inner % 16:
        raise DescriptorError(f"{what}: {inner} inner bytes are not a multiple of 16")
    return inner


def _destinations(f, target: int, bar: int, multicast, group: int):
    """(CTA, shared offset, mbarrier) of every copy of the data."""
    cluster = f.cta.cluster
    if multicast is None:
        cta = cluster.cta_of(target)
        return [(cta, target & OFFSET_MASK, f.cta.mbarrier(bar))]
    out = []
    bar_rank = bar >> 24
    for rank in range(cluster.size):
        if multicast >> rank & 1:
            cta = cluster.ctas[rank]
            owner = rank if group == 1 else (rank & ~1) | (bar_rank & 1)
            out.append((cta, target & OFFSET_MASK, f.cta.mbarrier((owner << 24) | (bar & OFFSET_MASK))))
    return out


def tensor_load(f, note, target, tmap, coords, bar, multicast, group, mask):
    """cp.async.bulk.tensor, global to shared: box at coordinates, zero (or NaN) outside of the tensor."""
    vectors = (target, tmap, bar, *coords) + (() if multicast is None else (multicast,))
    for _, to, at, mbar, *rest in _each(f, mask, *vectors):
        where = rest[: len(coords)]
        tensor = _decode_map(_map_bytes(f, at))
        if len(tensor.dims) != len(coords):
            raise DescriptorError(f"a {len(coords)}d copy uses a tensor map of rank {len(tensor.dims)}")
        where = tensor.place(where)
        _inner_bytes(tensor, "tensor load")
        shape = _box_shape(tensor)
        size = int(np.prod(shape)) * tensor.unit
        places = _destinations(f, to, mbar, None if multicast is None else rest[-1], group)
        plans = []
        for cta, offset, barrier in places:
            _check_room(cta, offset, size, "tensor load")
            chunks = _chunks(offset, size, tensor.mode, "tensor load")
            cta.shared.begin_write(chunks)
            plans.append((cta, chunks, barrier))

        def run(tensor=tensor, where=where, shape=shape, size=size, plans=plans):
            inside, start = _region(tensor, where)
            data = np.zeros((*tuple(reversed(shape)), tensor.unit), np.uint8)
            if tensor.nan_fill:
                data[...] = 255
            if all(s.stop > s.start for s in inside):
                data[tuple(reversed(inside))] = _global_view(f, tensor, start, inside)
            rows = data.reshape(-1, 16)
            for cta, chunks, barrier in plans:
                cta.shared.end_write(chunks)
                cta.shared.chunks[chunks] = rows
                cta.shared.valid_chunks[chunks] = 1
                barrier.transact(-size)

        f.cta.cluster.submit(Operation(note.where, run))


def bulk_load(f, note, target, source, size, bar, multicast, mask):
    """cp.async.bulk, global to shared::cluster."""
    vectors = (target, source, size, bar) + (() if multicast is None else (multicast,))
    for _, to, at, count, mbar, *rest in _each(f, mask, *vectors):
        _check_bulk(to, at, count)
        plans = []
        for cta, offset, barrier in _destinations(f, to, mbar, rest[0] if rest else None, 1):
            _check_room(cta, offset, count, "bulk load")
            chunks = np.arange(offset >> 4, (offset + count) >> 4)
            cta.shared.begin_write(chunks)
            plans.append((cta, chunks, barrier))

        def run(at=at, count=count, plans=plans):
            rows = f.cta.launch.memory.bytes_at(at, count).reshape(-1, 16)
            for cta, chunks, barrier in plans:
                cta.shared.end_write(chunks)
                cta.shared.chunks[chunks] = rows
                cta.shared.valid_chunks[chunks] = 1
                barrier.transact(-count)

        f.cta.cluster.submit(Operation(note.where, run))


def _check_bulk(*values):
    for v in values:
        if v % 16:
            raise Misaligned(f"bulk copy: {v:#x} is not a multiple of 16")


def cluster_copy(f, note, target, source, size, bar, mask):
    """cp.async.bulk, shared::cta to shared::cluster."""
    for _, to, at, count, mbar in _each(f, mask, target, source, size, bar):
        _check_bulk(to & OFFSET_MASK, at & OFFSET_MASK, count)
        from_cta, to_cta = f.cta.cluster.cta_of(at), f.cta.cluster.cta_of(to)
        a, b = at & OFFSET_MASK, to & OFFSET_MASK
        _check_room(from_cta, a, count, "bulk copy")
        _check_room(to_cta, b, count, "bulk copy")
        read, write = np.arange(a >> 4, (a + count) >> 4), np.arange(b >> 4, (b + count) >> 4)
        from_cta.shared.check_fenced(read, from_cta.fences, f.lanes.warp_list, "bulk copy")
        from_cta.shared.begin_read(read)
        to_cta.shared.begin_write(write)
        barrier = f.cta.mbarrier(mbar)

        def run(from_cta=from_cta, to_cta=to_cta, read=read, write=write, count=count, barrier=barrier):
            from_cta.shared.check_valid(read, "bulk copy")
            from_cta.shared.end_read(read)
            to_cta.shared.end_write(write)
            to_cta.shared.chunks[write] = from_cta.shared.chunks[read]
            to_cta.shared.valid_chunks[write] = 1
            barrier.transact(-count)

        f.cta.cluster.submit(Operation(note.where, run))


def _enqueue_store(f, lane: int, operation: Operation) -> None:
    f.gang.bulk_open.setdefault(f.lo + lane, []).append(operation)
    f.cta.cluster.progress += 1


def tensor_store(f, note, tmap, coords, source, op, mask):
    """cp.async.bulk.tensor (or the reducing form), shared to global: only elements inside of the tensor."""
    for lane, at, src, *where in _each(f, mask, tmap, source, *coords):
        tensor = _decode_map(_map_bytes(f, at))
        if len(tensor.dims) != len(coords):
            raise DescriptorError(f"a {len(coords)}d copy uses a tensor map of rank {len(tensor.dims)}")
        where = tensor.place(where)
        _inner_bytes(tensor, "tensor store")
        shape = _box_shape(tensor)
        size = int(np.prod(shape)) * tensor.unit
        cta, offset = f.cta.cluster.cta_of(src), src & OFFSET_MASK
        _check_room(cta, offset, size, "tensor store")
        chunks = _chunks(offset, size, tensor.mode, "tensor store")
        cta.shared.check_fenced(chunks, cta.fences, f.lanes.warp_list, "tensor store")
        cta.shared.begin_read(chunks)

        def run(tensor=tensor, where=where, shape=shape, cta=cta, chunks=chunks):
            cta.shared.end_read(chunks)
            cta.shared.check_valid(chunks, "tensor store")
            inside, start = _region(tensor, where)
            if all(s.stop > s.start for s in inside):
                data = cta.shared.chunks[chunks].reshape((*tuple(reversed(shape)), tensor.unit))
                view = _global_view(f, tensor, start, inside)
                part = data[tuple(reversed(inside))]
                view[...] = part if op is None else _reduced(view, part, op, tensor.kind)

        _enqueue_store(f, lane, Operation(note.where, run))


def bulk_store(f, note, target, source, size, op, kind, mask):
    """cp.async.bulk or cp.reduce.async.bulk, shared to global."""
    for lane, to, src, count in _each(f, mask, target, source, size):
        _check_bulk(to, src & OFFSET_MASK, count)
        cta, offset = f.cta.cluster.cta_of(src), src & OFFSET_MASK
        _check_room(cta, offset, count, "bulk store")
        chunks = np.arange(offset >> 4, (offset + count) >> 4)
        cta.shared.check_fenced(chunks, cta.fences, f.lanes.warp_list, "bulk store")
        cta.shared.begin_read(chunks)

        def run(to=to, count=count, cta=cta, chunks=chunks):
            cta.shared.end_read(chunks)
            cta.shared.check_valid(chunks, "bulk store")
            data = cta.shared.chunks[chunks].reshape(-1)
            view = f.cta.launch.memory.bytes_at(to, count)
            view[...] = data if op is None else _reduced(view, data, op, kind)

        _enqueue_store(f, lane, Operation(note.where, run))


def _reduced(old, new, op, kind):
    """Element-wise ``op`` on raw bytes of a type."""
    old, new = np.ascontiguousarray(old), np.ascontiguousarray(new)
    function = {"add": np.add, "min": np.minimum, "max": np.maximum}[op]
    if kind == "bf16":
        out = f32_to_bf16(function(bf16_to_f32(old.view(np.uint16)), bf16_to_f32(new.view(np.uint16))))
    else:
        dtype = {"f32": np.float32, "f16": np.float16, "u32": np.uint32, "s32": np.int32, "u64": np.uint64}[kind]
        out = function(old.view(dtype), new.view(dtype))
    return out.view(np.uint8).reshape(old.shape)


def bulk_commit(f, mask):
    """Close the bulk group of each thread; from now on the copies may run."""
    for lane in f.select(mask):
        thread = f.lo + int(lane)
        copies = f.gang.bulk_open.pop(thread, [])
        f.gang.bulk_groups.setdefault(thread, []).append(copies)
        for operation in copies:
            f.cta.cluster.submit(operation)


def bulk_wait(f, keep, read, mask):
    """Finish all but the newest ``keep`` groups of each thread."""
    for lane in f.select(mask):
        groups = f.gang.bulk_groups.get(f.lo + int(lane), [])
        while len(groups) > keep:
            for operation in groups.pop(0):
                operation()
    f.cta.cluster.progress += 1
