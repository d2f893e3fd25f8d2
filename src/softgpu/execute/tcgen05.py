"""Fifth-generation tensor core and tensor memory of sm_100a and sm_103a (PTX ISA 9.7.16).

mma, cp and commit go through one in-order queue per issuing CTA. ``tcgen05.st`` takes effect at ``tcgen05.wait::st``,
as late as allowed. ``tcgen05.ld`` reads at once; uses of its registers before ``wait::ld`` are found in ``dataflow``.
"""

from __future__ import annotations

import re

import numpy as np

from ..errors import BarrierMisuse, DescriptorError, OutOfBounds, TensorMemoryMisuse
from ..formats import DECODE
from ..layouts import (
    InstructionDescriptor,
    MatrixDescriptor,
    operand_bytes,
    operand_granules,
    scale_positions,
    tensor_rows,
)
from ..memory import OFFSET_MASK, RANK_SHIFT
from ..ptx import Imm, Mem, Reg, Vec
from ..translate import emits
from .memory import full_warps
from .tma import _each
from .wgmma import decode

_F16 = {0: "f16", 1: "bf16"}
_MINI = {0: "e4m3", 1: "e5m2", 3: "e2m3", 4: "e3m2", 5: "e2m1"}
#: kind → depth of one product
DEPTH = {"f16": 16, "f8f6f4": 32, "mxf8f6f4": 32, "mxf4": 64, "mxf4nvf4": 64}


@emits("tcgen05")
def tcgen05(g, i):
    """alloc, dealloc, ld, st, wait, mma, cp, commit; ordering fences have no effect."""
    action = i.parts[1]
    group = next((int(p[-1]) for p in i.parts if p.startswith("cta_group")), 1)
    if action == "alloc":
        target, count = i.operands
        g.line(f"if not {g.use(alloc)}(f, {g.address(target)}, {g.src(count, 'u4')}, {group}, {g.mask}): return -1")
    elif action == "dealloc":
        base, count = i.operands
        g.line(f"{g.use(dealloc)}(f, {g.src(base, 'u4')}, {g.src(count, 'u4')}, {g.mask})")
    elif action in ("relinquish_alloc_permit", "fence::before_thread_sync", "fence::after_thread_sync"):
        return
    elif action in ("wait::ld", "wait::st"):
        if action == "wait::st":
            g.line(f"{g.use(wait_st)}(f, {g.mask})")
    elif action == "ld":
        _load(g, i)
    elif action == "st":
        _store(g, i)
    elif action == "mma":
        _mma(g, i, group)
    elif action == "commit":
        _commit(g, i, group)
    elif action == "cp":
        _copy(g, i, group)
    else:
        raise g.unsupported(f"tcgen05.{action} is not supported")


def alloc(f, target, count, group, mask):
    """Allocate columns and write the first one to shared memory; waits while none are free.

    With cta_group::2 both CTAs of the pair allocate together: each waits for the other's request.
    """
    lanes = f.select(mask)
    if not lanes.size:
        return True
    if len({int(w) for w in f.lanes.warps[lanes]}) > 1:
        raise TensorMemoryMisuse("tcgen05.alloc by several warps at once")
    cta, cluster = f.cta, f.cta.cluster
    n = int(np.broadcast_to(count, f.n)[lanes[0]])
    pair = [cta] if group == 1 else [cluster.ctas[cta.rank & ~1], cluster.ctas[cta.rank | 1]]
    if cta.tensor.granted is None:
        cta.tensor.wanted = n
        start = None
        if all(c.tensor.wanted == n for c in pair):
            start = pair[0].tensor.allocate(n)
            if start is not None and group == 2 and pair[1].tensor.allocate(n) != start:
                raise TensorMemoryMisuse("tcgen05.alloc: the two CTAs of the pair have different columns free")
        if start is None:
            f.block(f"tensor memory: {n} columns, allocated are {cta.tensor.allocations}")
            cta.tensor_waiters.append(f)
            return False
        for c in pair:
            c.tensor.granted, c.tensor.wanted = start, None
            waiters, c.tensor_waiters = c.tensor_waiters, []
            for w in waiters:
                w.wake()
    at = int(np.broadcast_to(target, f.n)[lanes[0]]) & OFFSET_MASK
    cta.shared.views[4][at // 4] = cta.tensor.granted
    cta.shared.valid[at : at + 4] = 1
    cta.tensor.granted = None
    cluster.progress += 1
    return True


def dealloc(f, base, count, mask):
    """Give tensor-memory columns back."""
    lanes = f.select(mask)
    for warp in sorted({int(w) for w in f.lanes.warps[lanes]}):
        lane = lanes[f.lanes.warps[lanes] == warp][0]
        f.cta.tensor.free(int(np.broadcast_to(base, f.n)[lane]) & 0xFFFF, int(np.broadcast_to(count, f.n)[lane]))
        f.cta.cluster.progress += 1
    waiters, f.cta.tensor_waiters = f.cta.tensor_waiters, []
    for w in waiters:
        w.wake()


_SHAPES = ("32x32b", "16x128b", "16x256b", "16x32bx2")


def _access(g, i):
    """(shape, repeats) of a load or store."""
    shape = next((p for p in i.parts if p in _SHAPES), None)
    repeat = next((int(p[1:]) for p in i.parts if re.fullmatch(r"x\d+", p)), None)
    allowed = {
        "tcgen05",
        "ld",
        "st",
        "sync",
        "aligned",
        "red",
        "min",
        "max",
        "f32",
        "u32",
        "s32",
        "abs",
        "NaN",
        "b32",
        shape,
        f"x{repeat}",
    }
    extra = [p for p in i.parts if p not in allowed]
    if shape is None or repeat is None or extra:
        raise g.unsupported(f"modifier .{extra[0] if extra else '?'} is not supported")
    return shape, repeat


def _pattern(shape: str, repeat: int, half_split: int):
    """(lane, column) offsets [registers, 32 lanes] from the warp's base (PTX ISA 9.7.16.8.1)."""
    t = np.arange(32)[None, :]
    if shape == "32x32b":
        r = np.arange(repeat)[:, None]
        return np.broadcast_to(t, (repeat, 32)), np.broadcast_to(r, (repeat, 32))
    if shape == "16x32bx2":
        r = np.arange(repeat)[:, None]
        return np.broadcast_to(t % 16, (repeat, 32)), r + t // 16 * half_split
    if shape == "16x128b":
        r = np.arange(2 * repeat)[:, None]
        return t // 4 + 8 * (r % 2), 4 * (r // 2) + t % 4
    r = np.arange(4 * repeat)[:, None]
    return t // 4 + 8 * (r // 2 % 2), 8 * (r // 4) + 2 * (t % 4) + r % 2


def _load(g, i):
    shape, repeat = _access(g, i)
    ops = list(i.operands)
    at = next(n for n, o in enumerate(ops) if isinstance(o, Mem))
    d, source = ops[0], ops[at]
    split = ops[at + 1].value if shape == "16x32bx2" else 0
    items = d.items if isinstance(d, Vec) else (d,)
    red = None
    if "red" in i.parts:
        red = "max" if "max" in i.parts else "min"
        kind = i.parts[-1]
        if kind not in ("f32", "u32", "s32"):
            raise g.unsupported("this reduction type is not supported")
        red = (red, {"f32": "f4", "u32": "u4", "s32": "s4"}[kind], "abs" in i.parts, "NaN" in i.parts)
        reduced = ops[1].items[0] if isinstance(ops[1], Vec) else ops[1]
    lanes, columns = _pattern(shape, repeat, split)
    if len(items) != lanes.shape[0]:
        raise g.unsupported(f"{lanes.shape[0]} registers are expected")
    plan = g.use(Access(lanes, columns, i.text[:100]))
    name = g.tmp()
    g.line(f"{name} = {g.use(load)}(f, {plan}, {g.address(source)}, {g.mask})")
    for n, item in enumerate(items):
        g.dst(item, "u4", f"{name}[{n}]")
    if red:
        g.dst(reduced, red[1], f"{g.use(reduce_rows)}({name}, {red!r})")


def reduce_rows(rows, how):
    """``ld.red``: minimum or maximum over the registers of each thread."""
    op, code, absolute, nan = how
    values = rows.view({"f4": np.float32, "u4": np.uint32, "s4": np.int32}[code])
    if absolute:
        values = np.abs(values)
    if code == "f4" and not nan:
        return (np.fmax if op == "max" else np.fmin).reduce(values, axis=0)
    return (np.maximum if op == "max" else np.minimum).reduce(values, axis=0)


class Access:
    """Lane and column pattern of one load or store."""

    def __init__(self, lanes, columns, text):
        self.lanes, self.columns, self.text = lanes, columns, text
        self.width = int(columns.max()) + 1
        self.simple = bool((lanes == np.arange(32)).all() and (columns == np.arange(columns.shape[0])[:, None]).all())


def _warps(f, address, mask, what):
    """(register slice of the warp, its taddr, warp) of every full warp in the fragment."""
    warps = full_warps(f, mask, what)
    address = np.broadcast_to(address, f.n)
    for start in (32 * warps).tolist():
        base = address[start : start + 32]
        if (base != base[0]).any():
            raise BarrierMisuse(f"{what}: the address differs within a warp")
        yield slice(start, start + 32), int(base[0]), int(f.lanes.warps[start])


def _window(taddr: int, warp: int, plan: Access, what: str):
    """(first lane, first column); a warp reaches the 32 lanes of its number modulo 4 only."""
    lane, column = taddr >> 16, taddr & 0xFFFF
    top = lane + int(plan.lanes.max())
    if lane // 32 != warp % 4 or top // 32 != warp % 4:
        raise TensorMemoryMisuse(f"{what}: warp {warp} cannot reach lanes {lane} to {top}, only {warp % 4 * 32} and up")
    return lane, column


def load(f, plan, address, mask):
    """Registers [n, lanes of the fragment] from tensor memory."""
    tensor = f.cta.tensor
    out = np.zeros((plan.lanes.shape[0], f.n), np.uint32)
    todo = list(_warps(f, address, mask, "tcgen05.ld"))
    if plan.simple and todo and len({t[1] & 0xFFFF for t in todo}) == 1 and len(todo) * 32 == f.n:
        windows = [_window(taddr, warp, plan, "tcgen05.ld") for _, taddr, warp in todo]
        first = windows[0][0]
        if [w[0] for w in windows] == list(range(first, first + f.n, 32)):
            column = windows[0][1]
            tensor.check_range(column, plan.width, "tcgen05.ld")
            tensor.check_valid(slice(first, first + f.n), column, plan.width, "tcgen05.ld")
            return np.ascontiguousarray(tensor.data[first : first + f.n, column : column + plan.width].T)
    for part, taddr, warp in todo:
        lane, column = _window(taddr, warp, plan, "tcgen05.ld")
        tensor.check_range(column, plan.width, "tcgen05.ld")
        rows, cols = lane + plan.lanes, column + plan.columns
        if tensor.checks.uninitialised and not tensor.valid[rows, cols].all():
            tensor.check_valid(slice(lane, lane + int(plan.lanes.max()) + 1), column, plan.width, "tcgen05.ld")
        out[:, part] = tensor.data[rows, cols]
    return out


def _store(g, i):
    shape, repeat = _access(g, i)
    target, value = i.operands[0], i.operands[-1]
    split = i.operands[1].value if shape == "16x32bx2" else 0
    items = value.items if isinstance(value, Vec) else (value,)
    lanes, columns = _pattern(shape, repeat, split)
    if len(items) != lanes.shape[0]:
        raise g.unsupported(f"{lanes.shape[0]} registers are expected")
    plan = g.use(Access(lanes, columns, i.text[:100]))
    texts = ", ".join(g.src(x, "u4") for x in items)
    g.line(f"{g.use(store)}(f, {plan}, {g.address(target)}, ({texts},), {g.mask})")


def store(f, plan, address, values, mask):
    """Queue the write; it happens at wait::st."""
    tensor = f.cta.tensor
    todo = list(_warps(f, address, mask, "tcgen05.st"))
    if not todo:
        return
    data = np.empty((len(values), f.n), np.uint32)
    for n, v in enumerate(values):
        data[n] = v
    for part, taddr, warp in todo:
        lane, column = _window(taddr, warp, plan, "tcgen05.st")
        tensor.check_range(column, plan.width, "tcgen05.st")
        f.gang.tensor_stores.setdefault(warp, []).append((lane + plan.lanes, column + plan.columns, data[:, part]))
    f.cta.cluster.progress += 1


def wait_st(f, mask):
    """Finish the tensor-memory stores of these warps."""
    tensor = f.cta.tensor
    for warp in f.lanes.warp_list:
        for rows, cols, data in f.gang.tensor_stores.pop(warp, ()):
            tensor.data[rows, cols] = data
            tensor.valid[rows, cols] = True


def _mma(g, i, group):
    parts = i.parts[2:]
    kind = next(p[6:] for p in parts if p.startswith("kind::"))
    known = {
        "cta_group::1",
        "cta_group::2",
        f"kind::{kind}",
        "block_scale",
        "block16",
        "block32",
        "scale_vec::1X",
        "scale_vec::2X",
        "scale_vec::4X",
    }
    extra = [p for p in parts if p not in known and not p.startswith("collector::")]
    if extra or kind not in DEPTH:
        raise g.unsupported(f"modifier .{extra[0] if extra else 'kind::' + kind} is not supported")
    scaled = "block_scale" in parts
    block = 0
    if scaled:
        default = {"mxf8f6f4": 32, "mxf4": 32, "mxf4nvf4": 0}[kind]
        block = (
            16
            if "block16" in parts or "scale_vec::4X" in parts
            else 32
            if default or "block32" in parts or "scale_vec::2X" in parts
            else 0
        )
        if not block:
            raise g.unsupported("a scale vector size is expected")
    d, a, b, idesc, *rest = i.operands
    scales = "None, None"
    if scaled:
        scales = ", ".join(g.address(x) for x in rest[:2])
        rest = rest[2:]
    disable = "None"
    if rest and isinstance(rest[0], Vec):
        disable = "(" + ", ".join(g.src(x, "u4") for x in rest.pop(0).items) + ",)"
    enable = rest.pop(0)
    if rest:
        raise g.unsupported("scale-input-d is not supported")
    if isinstance(a, Mem):
        a_text, from_tensor = g.address(a), True
    else:
        a_text, from_tensor = g.src(a, "u8"), False
    keep = g.const(enable.value, "p") if isinstance(enable, Imm) else g.src(enable, "p")
    plan = g.use(Plan(kind, group, block, from_tensor, (i.line, i.text[:120])))
    g.line(
        f"{g.use(mma)}(f, {plan}, {g.address(d)}, {a_text}, {g.src(b, 'u8')}, {g.src(idesc, 'u4')}, {scales}, "
        f"{disable}, "
        f"{keep}, {g.mask})"
    )


class Plan:
    """What is fixed about one tcgen05.mma instruction."""

    def __init__(self, kind, group, block, from_tensor, where):
        self.kind, self.group, self.block, self.from_tensor, self.where = kind, group, block, from_tensor, where


class Side:
    """One CTA's operands of a product: where they lie, and the granules held in flight."""

    def __init__(self, cta, desc, rows, depth_bytes, mn_major, unit, f, what):
        self.shared, self.desc = cta.shared, desc
        self.args = (rows, depth_bytes, mn_major, unit)
        granules = operand_granules(desc, *self.args)
        if int(granules[-1]) * 16 >= cta.shared.size:
            raise OutOfBounds(
                f"{what} descriptor reaches shared offset {int(granules[-1]) * 16:#x} of {cta.shared.size:#x}"
            )
        issuers = f.lanes.warp_list if cta is f.cta else ()
        cta.shared.check_fenced(granules, cta.fences, issuers, "tcgen05.mma")
        cta.shared.begin_read(granules)
        self.granules = granules

    def take(self):
        self.shared.end_read(self.granules)
        self.shared.check_valid(self.granules, "tcgen05.mma")
        unit = self.args[3]
        at = operand_bytes(self.desc, *self.args)
        return self.shared.views[unit][at // unit]


def _operand(raw, kind, name):
    """Raw operand elements to float32; 4-bit kinds hold two elements per byte, low nibble first."""
    if kind == "f16":
        return decode(raw, name)
    if kind in ("mxf4", "mxf4nvf4"):
        out = np.empty((raw.shape[0], raw.shape[1] * 2), np.float32)
        out[:, 0::2] = DECODE["e2m1"][raw & 15]
        out[:, 1::2] = DECODE["e2m1"][raw >> 4]
        return out
    if name in ("e4m3", "e5m2"):
        return DECODE[name][raw]
    raise DescriptorError(f"unpacked {name} operands are not supported")


class Product:
    """One queued tcgen05.mma."""

    def __init__(self, f, plan, d, a, b, bits, sfa, sfb, disable, keep):
        self.where, self.plan, self.keep = plan.where, plan, keep
        idesc = self.idesc = InstructionDescriptor.decode(bits, bool(plan.block))
        cta = f.cta
        if plan.group == 2:
            if cta.cluster.size % 2:
                raise BarrierMisuse("cta_group::2 needs an even cluster")
            pair = [cta.cluster.ctas[cta.rank & ~1], cta.cluster.ctas[cta.rank | 1]]
        else:
            pair = [cta]
        self.pair = pair
        names = _F16 if plan.kind == "f16" else _MINI if plan.kind in ("f8f6f4", "mxf8f6f4") else {1: "e2m1", 5: "e2m1"}
        if idesc.a_format not in names or idesc.b_format not in names:
            raise DescriptorError(
                f"instruction descriptor {bits:#010x}: operand formats {idesc.a_format}, {idesc.b_format} do not "
                f"fit {plan.kind}"
            )
        if idesc.d_format != 1:
            raise DescriptorError(f"instruction descriptor {bits:#010x}: only float32 accumulators are supported")
        self.names = names[idesc.a_format], names[idesc.b_format]
        n, m = idesc.n, idesc.m
        if n == 0 or n > 256 or n % 8 or (m == 128 and plan.group == 1 and n % 16) or (plan.group == 2 and n % 16):
            raise DescriptorError(f"instruction descriptor {bits:#010x}: N = {n} does not fit M = {m}")
        unit = 2 if plan.kind == "f16" else 1
        depth_bytes = 32
        self.rows = [tensor_rows(m, plan.group, r) for r in range(len(pair))]
        self.d_column = d & 0xFFFF
        if d >> 16 and m not in (64, 128):
            raise DescriptorError(f"accumulator lane {d >> 16} is not supported for M = {m}")
        self.d_lane = d >> 16
        if self.d_lane and not (m == 64 and plan.group == 1 and self.d_lane == 16):
            raise DescriptorError(f"accumulator lane {self.d_lane} is not supported for M = {m}")
        width = n // self.rows[0][2]
        m_cta, n_cta = m // len(pair), n // len(pair)
        self.a_column, self.sides_a = None, []
        for c in pair:
            c.tensor.check_range(self.d_column, width, "tcgen05.mma")
        if plan.from_tensor:
            self.a_column, self.a_columns = a & 0xFFFF, depth_bytes // 4
            if a >> 16 and (a >> 16) != self.d_lane:
                raise DescriptorError(f"A operand lane {a >> 16} is not supported")
            if idesc.a_major:
                raise DescriptorError("an A operand in tensor memory must be K-major")
            for c in pair:
                c.tensor.check_range(self.a_column, self.a_columns, "tcgen05.mma")
        else:
            desc = MatrixDescriptor.tcgen05(a)
            self.sides_a = [Side(c, desc, m_cta, depth_bytes, bool(idesc.a_major), unit, f, "the A") for c in pair]
        desc = MatrixDescriptor.tcgen05(b)
        self.sides_b = [Side(c, desc, n_cta, depth_bytes, bool(idesc.b_major), unit, f, "the B") for c in pair]
        self.sf = (sfa, sfb)
        self.disable = disable

    def _scale(self, value, cta, taddr, rows, ident):
        """Multiply operand rows by their block scales from tensor memory."""
        plan = self.plan
        count = value.shape[1] // plan.block
        column, quarter = taddr & 0x3FFFFFFF & 0xFFFF, (taddr >> 16) & 0x3FFF
        if quarter:
            raise DescriptorError(f"scale factors at lane {quarter} are not supported")
        lane, col = scale_positions(rows)
        width = int(col.max()) + 1
        # the first byte of the word comes from the instruction descriptor; the address's top bits repeat it
        cta.tensor.check_range(column, width, "tcgen05.mma (scale factors)")
        if cta.tensor.checks.uninitialised and not cta.tensor.valid[lane, column + col].all():
            cta.tensor.check_valid(slice(0, min(rows, 32)), column, width, "tcgen05.mma (scale factors)")
        words = cta.tensor.data[lane, column + col]
        first = ident
        if first + count > 4:
            raise DescriptorError(f"scale factor id {ident} with {count} scales per row")
        raw = np.ascontiguousarray(words).view(np.uint8).reshape(rows, 4)[:, first : first + count]
        table = DECODE["ue8m0" if self.idesc.scale_ue8m0 else "ue4m3"]
        return value * np.repeat(table[raw], plan.block, axis=1)

    def __call__(self):
        plan, idesc, pair = self.plan, self.idesc, self.pair
        b = np.concatenate([_operand(s.take(), plan.kind, self.names[1]) for s in self.sides_b])
        if plan.block:
            b = self._scale(b, pair[0], self.sf[1], idesc.n, idesc.b_scale_id)
        bt = b.T
        if idesc.a_negate != idesc.b_negate:
            bt = -bt
        for r, cta in enumerate(pair):
            _, lanes, halves = self.rows[r]
            lanes = lanes + self.d_lane
            if plan.from_tensor:
                cta.tensor.check_valid(lanes, self.a_column, self.a_columns, "tcgen05.mma (A operand)")
                words = np.ascontiguousarray(cta.tensor.data[lanes, self.a_column : self.a_column + self.a_columns])
                raw = words.view(np.uint16 if plan.kind == "f16" else np.uint8)
            else:
                raw = self.sides_a[r].take()
            a = _operand(raw, plan.kind, self.names[0])
            if plan.block:
                a = self._scale(a, cta, self.sf[0], a.shape[0], idesc.a_scale_id)
            self._accumulate(cta, lanes, halves, a @ bt, None if self.disable is None else self.disable)

    def _accumulate(self, cta, lanes, halves, product, disable):
        tensor, n = cta.tensor, product.shape[1] // halves
        for h in range(halves):
            part = product[:, h * n : (h + 1) * n]
            at = lanes + 64 * h
            columns = slice(self.d_column, self.d_column + n)
            if disable is not None:
                on = ~disable[at]
                at, part = at[on], part[on]
                if not at.size:
                    continue
            whole = at.size == 128
            index = slice(0, 128) if whole else at
            if self.keep:
                tensor.check_valid(index, self.d_column, n, "tcgen05.mma (accumulator)")
                tensor.floats[index, columns] += part
            else:
                tensor.floats[index, columns] = part
            tensor.valid[index, columns] = True


def mma(f, plan, d, a, b, idesc, sfa, sfb, disable, keep, mask):
    """Queue a product for each issuing thread."""
    vectors = [d, a, b, idesc, np.broadcast_to(keep, f.n)]
    for lane, dv, av, bv, iv, kv in _each(f, mask, *vectors):
        pick = [None if v is None else int(v[0] if v.size == 1 else v[lane]) for v in (sfa, sfb)]
        off = None
        if disable is not None:
            words = np.array([v[0] if v.size == 1 else v[lane] for v in disable], np.uint32)
            if words.any():
                off = np.unpackbits(words.view(np.uint8), bitorder="little").astype(bool)
        f.cta.tensor_queue.append(Product(f, plan, dv, av, bv, iv, *pick, off, bool(kv)))
        f.cta.cluster.progress += 1


def _commit(g, i, group):
    known = {"mbarrier::arrive::one", "shared::cluster", "multicast::cluster", "b64", "cta_group::1", "cta_group::2"}
    extra = [p for p in i.parts[2:] if p not in known]
    if extra:
        raise g.unsupported(f"modifier .{extra[0]} is not supported")
    multicast = "multicast::cluster" in i.parts
    bar = i.operands[0]
    mask = g.src(i.operands[1], "u2") if multicast else "None"
    address = g.address(bar)
    if isinstance(bar.base, Reg) and bar.base.bits == 64:
        address = g.address(bar, "u4")
    g.line(f"{g.use(commit)}(f, {address}, {mask}, {(i.line, i.text[:120])!r}, {g.mask})")


class Commit:
    """Arrive on mbarriers once everything queued before is done."""

    def __init__(self, bars, where):
        self.bars, self.where = bars, where

    def __call__(self):
        for bar in self.bars:
            bar.arrive()


def commit(f, address, multicast, where, mask):
    """Arrive on an mbarrier once every product and copy issued so far is done."""
    cluster = f.cta.cluster
    vectors = (address,) + (() if multicast is None else (multicast,))
    for _, at, *rest in _each(f, mask, *vectors):
        if multicast is None:
            bars = [f.cta.mbarrier(at)]
        else:
            bars = [
                f.cta.mbarrier((r << RANK_SHIFT) | (at & OFFSET_MASK)) for r in range(cluster.size) if rest[0] >> r & 1
            ]
        f.cta.tensor_queue.append(Commit(bars, where))
        cluster.progress += 1


def _copy(g, i, group):
    if "32x128b" not in i.parts or "warpx4" not in i.parts or any(p.startswith("b8x16") for p in i.parts):
        raise g.unsupported("only .32x128b.warpx4 is supported")
    target, desc = i.operands
    g.line(f"{g.use(copy)}(f, {g.address(target)}, {g.src(desc, 'u8')}, {group}, {(i.line, i.text[:120])!r}, {g.mask})")


class Copy:
    """tcgen05.cp 32x128b.warpx4: 32 rows of 16 bytes, the same in all four lane quarters."""

    def __init__(self, f, target, desc, group, where):
        self.where, self.column = where, target & 0xFFFF
        if target >> 16:
            raise DescriptorError(f"tcgen05.cp to lane {target >> 16} is not supported")
        cta = f.cta
        self.ctas = [cta] if group == 1 else [cta.cluster.ctas[cta.rank & ~1], cta.cluster.ctas[cta.rank | 1]]
        descriptor = MatrixDescriptor.tcgen05(desc)
        self.sides = []
        for c in self.ctas:
            c.tensor.check_range(self.column, 4, "tcgen05.cp")
            self.sides.append(Side(c, descriptor, 32, 16, False, 4, f, "the source"))

    def __call__(self):
        for cta, side in zip(self.ctas, self.sides, strict=True):
            data = side.take()
            for quarter in range(4):
                rows = slice(32 * quarter, 32 * quarter + 32)
                cta.tensor.data[rows, self.column : self.column + 4] = data
                cta.tensor.valid[rows, self.column : self.column + 4] = True


def copy(f, target, desc, group, where, mask):
    """Queue a copy from shared memory to tensor memory."""
    for _, to, bits in _each(f, mask, target, desc):
        f.cta.tensor_queue.append(Copy(f, to, bits, group, where))
        f.cta.cluster.progress += 1
