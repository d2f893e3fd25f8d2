"""Loads, stores, atomics, cp.async, and matrix loads and stores (PTX ISA 9.7.9.8 to 9.7.9.25, 9.7.13, 9.7.15)."""

from __future__ import annotations

import numpy as np

from ..errors import BarrierMisuse, OutOfBounds
from ..memory import OFFSET_MASK, PARAM_WINDOW, RANK_SHIFT, SHARED_WINDOW
from ..ptx import TYPE_BITS, Imm, Reg, Sink, Sym, Vec
from ..translate import DTYPES, emits, type_code

_SPACES = ("global", "shared", "shared::cta", "shared::cluster", "param", "const", "local")
_HINTS = {
    "weak", "relaxed", "acquire", "release", "acq_rel", "volatile", "cta", "cluster", "gpu", "sys", "nc", "ca", "cg",
    "cs", "lu", "cv", "wb", "wt", "L1::evict_last", "L1::evict_first", "L1::no_allocate", "L1::evict_normal",
    "L1::evict_unchanged", "L2::cache_hint", "L2::64B", "L2::128B", "L2::256B", "L2::evict_last", "L2::evict_first",
    "L2::evict_normal", "unified", "mmio",
}  # fmt: skip


def _form(g, parts):
    """(space, vector length, type) of a load or store."""
    space, vector = "generic", 1
    for p in parts[:-1]:
        if p in _SPACES:
            space = p
        elif p in ("v2", "v4", "v8"):
            vector = int(p[1])
        elif p not in _HINTS and not p.startswith("param::"):
            raise g.unsupported(f"modifier .{p} is not supported")
    if parts[-1] not in TYPE_BITS:
        raise g.unsupported(f"type .{parts[-1]} is not supported")
    return space, vector, parts[-1]


@emits("ld", "ldu")
def load(g, i):
    """ld: one to eight registers from global, shared or parameter memory; order and cache modifiers have no effect."""
    space, vector, kind = _form(g, i.parts[1:])
    bits = TYPE_BITS[kind]
    d, source = i.operands[:2]
    if bits == 128:
        items, unit, vector = (d.first, d.second), 8, 2
        code = "u8"
    else:
        items, unit = (d.items if isinstance(d, Vec) else (d,)), bits // 8
        code = f"{kind[0] if kind[0] in 's' else 'u'}{unit}"
    chosen = space.startswith("param") and not isinstance(source.base, (Sym, Imm))  # an address in a register
    if space.startswith("param") and not chosen:
        for n, item in enumerate(items):
            if not isinstance(item, Sink):
                name = g.need(("special", f"%param.{source.base.name}+{source.offset + n * unit}:{unit}", f"u{unit}"))
                text = f"{name}.view(np.{DTYPES[code].name})" if unit > 1 or code[0] == "s" else name
                g.dst(item, code, f"{text}.copy()")
        return
    if space in ("const", "local"):
        raise g.unsupported(f"state space .{space} is not supported")
    narrow = space.startswith("shared")
    address = g.address(source, "u4" if narrow else "u8")
    result = g.tmp()
    call = load_shared if narrow else load_global if space == "global" else load_generic
    if chosen:
        address = f"({address} + {g.const(PARAM_WINDOW, 'u8')})"
    g.line(f"{result} = {g.use(call)}(f, {address}, {unit}, {vector}, {g.mask})")
    for n, item in enumerate(items):
        if not isinstance(item, Sink):
            column = f"{result}[{n}]"
            if code[0] == "s":
                column += f".view(np.{DTYPES[code].name})"
            g.dst(item, code, column)


def _spread(f, mask, columns: np.ndarray) -> list[np.ndarray]:
    """[selected lanes, count] to one vector per column over all lanes of the fragment."""
    if mask is None:
        return list(np.ascontiguousarray(columns.T))
    out = np.zeros((columns.shape[1], f.n), columns.dtype)
    out[:, mask] = columns.T
    return list(out)


def _lanes(f, value, mask):
    """(values of the selected lanes, selection or None for all)."""
    full = np.broadcast_to(value, f.n)
    if mask is None:
        return full, None
    sel = np.flatnonzero(np.broadcast_to(mask, f.n))
    return full[sel], sel


def load_global(f, address, unit, count, mask):
    """``count`` units of ``unit`` bytes per lane from global memory."""
    at, sel = _lanes(f, address, mask)
    if at.size == 0:
        return np.zeros((count, f.n), f"u{unit}")
    return _spread(f, sel, f.cta.launch.memory.load(at, unit, count))


def load_shared(f, address, unit, count, mask):
    """``count`` units of ``unit`` bytes per lane from shared memory, of another CTA of the cluster too."""
    at, sel = _lanes(f, address, mask)
    if at.size == 0:
        return np.zeros((count, f.n), f"u{unit}")
    return _spread(f, sel, _shared_load(f, at, unit, count))


def _shared_load(f, at, unit, count):
    ranks = at >> np.uint32(RANK_SHIFT)
    offset = at & np.uint32(OFFSET_MASK)
    first = int(ranks[0])
    if (ranks == first).all():
        return f.cta.cluster.cta_of(int(at[0])).shared.load(offset, unit, count)
    out = np.empty((at.size, count), f"u{unit}")
    for rank in np.unique(ranks):
        here = ranks == rank
        out[here] = f.cta.cluster.cta_of(int(rank) << RANK_SHIFT).shared.load(offset[here], unit, count)
    return out


def load_generic(f, address, unit, count, mask):
    """A load whose address says which memory it means, lane by lane."""
    at, sel = _lanes(f, address, mask)
    if at.size == 0:
        return np.zeros((count, f.n), f"u{unit}")
    window = int(at[0]) >> 56
    if not ((at >> np.uint64(56)) == window).all():
        raise OutOfBounds("one generic load mixes state spaces")
    if window == SHARED_WINDOW >> 56:
        data = _shared_load(f, at.astype(np.uint32), unit, count)
    elif window == PARAM_WINDOW >> 56:
        start = (at & np.uint64(SHARED_WINDOW - 1)).astype(np.intp)
        params = f.cta.launch.params
        if int(start.max()) + unit * count > params.size:
            raise OutOfBounds("a load is outside of the kernel parameters")
        raw = params[start[:, None] + np.arange(unit * count)]
        data = np.ascontiguousarray(raw).view(f"u{unit}")
    else:
        data = f.cta.launch.memory.load(at, unit, count)
    return _spread(f, sel, data)


@emits("st")
def store(g, i):
    """st: one to eight registers to global, shared or distributed shared memory."""
    asynchronous = "async" in i.parts
    if asynchronous:
        raise g.unsupported("st.async is not supported")
    space, _vector, kind = _form(g, i.parts[1:])
    bits = TYPE_BITS[kind]
    target, value = i.operands[:2]
    if bits == 128:
        items, code = (value.first, value.second), "u8"
    else:
        items, code = (value.items if isinstance(value, Vec) else (value,)), f"u{bits // 8}"
    if space in ("param", "const", "local"):
        raise g.unsupported(f"state space .{space} is not supported")
    narrow = space.startswith("shared")
    address = g.address(target, "u4" if narrow else "u8")
    texts = []
    for x in items:
        if isinstance(x, Reg) and int(code[1]) * 8 < x.bits:
            texts.append(f"{g.src(x, {16: 'u2', 32: 'u4', 64: 'u8'}[x.bits])}.astype(np.{DTYPES[code].name})")
        else:
            texts.append(g.src(x, code))
    call = store_shared if narrow else store_global if space == "global" else store_generic
    g.line(f"{g.use(call)}(f, {address}, ({', '.join(texts)},), {g.mask})")


def _gather(f, values, sel):
    """Column vectors to [selected lanes, count]."""
    n = f.n if sel is None else sel.size
    out = np.empty((n, len(values)), values[0].dtype)
    for k, v in enumerate(values):
        out[:, k] = v if v.size == 1 or sel is None else v[sel]
    return out


def store_global(f, address, values, mask):
    """The values of each lane to global memory."""
    at, sel = _lanes(f, address, mask)
    if at.size:
        f.cta.launch.memory.store(at, _gather(f, values, sel))
        f.cta.cluster.progress += 1


def store_shared(f, address, values, mask):
    """The values of each lane to shared memory, of another CTA of the cluster too."""
    at, sel = _lanes(f, address, mask)
    if at.size:
        _shared_store(f, at, _gather(f, values, sel), sel)


def _shared_store(f, at, data, sel):
    warps = f.lanes.warps if sel is None else f.lanes.warps[sel]
    clock = f.cta.launch.tick()
    ranks = at >> np.uint32(RANK_SHIFT)
    offset = at & np.uint32(OFFSET_MASK)
    f.cta.cluster.progress += 1
    for rank in [int(ranks[0])] if (ranks == ranks[0]).all() else np.unique(ranks):
        here = slice(None) if (ranks == rank).all() else ranks == rank
        cta = f.cta.cluster.cta_of(int(rank) << RANK_SHIFT)
        # a writer in another CTA is not one of that CTA's warps, and its fences are its own
        cta.shared.store(
            offset[here], data[here], warps[here] if cta is f.cta else warps[here] * 0, clock if cta is f.cta else 0
        )


def store_generic(f, address, values, mask):
    """A store whose address says which memory it means, lane by lane."""
    at, sel = _lanes(f, address, mask)
    if not at.size:
        return
    data = _gather(f, values, sel)
    window = int(at[0]) >> 56
    if not ((at >> np.uint64(56)) == window).all():
        raise OutOfBounds("one generic store mixes state spaces")
    if window == SHARED_WINDOW >> 56:
        _shared_store(f, at.astype(np.uint32), data, sel)
    else:
        f.cta.launch.memory.store(at, data)
        f.cta.cluster.progress += 1


_ATOMIC = {
    "add": lambda a, b, c: a + b, "exch": lambda a, b, c: b, "min": lambda a, b, c: min(a, b),
    "max": lambda a, b, c: max(a, b), "and": lambda a, b, c: a & b, "or": lambda a, b, c: a | b,
    "xor": lambda a, b, c: a ^ b, "cas": lambda a, b, c: c if a == b else a,
    "inc": lambda a, b, c: a * 0 if a >= b else a + a.dtype.type(1),
    "add_halves": lambda a, b, c: _add_halves(a, b),
    "dec": lambda a, b, c: b if a == 0 or a > b else a - a.dtype.type(1),
}  # fmt: skip


def _add_halves(a, b):
    """Both FP16 numbers of a word, each rounded to nearest even: FP32 holds enough of a sum of two."""
    return (np.array([a]).view("f2") + np.array([b]).view("f2")).view("u4")[0]


@emits("atom", "red")
def atomic(g, i):
    """atom gives the old value, red does not; lanes take effect in order of their number."""
    if "async" in i.parts:
        raise g.unsupported("red.async is not supported")
    op = next((p for p in i.parts[1:] if p in _ATOMIC), None)
    kind = i.parts[-1]
    vector = next((int(p[1]) for p in i.parts if p in ("v2", "v4")), 1)
    if op is None or kind in ("bf16x2", "f16", "bf16") or (kind == "f16x2" and (op != "add" or "noftz" not in i.parts)):
        raise g.unsupported("this atomic is not supported")
    code = "u4" if kind == "f16x2" else type_code(kind)
    op = "add_halves" if kind == "f16x2" else op
    space = next((p for p in i.parts if p in _SPACES), "generic")
    narrow = space.startswith("shared")
    d = i.operands[0] if i.parts[0] == "atom" else None
    target, values = (i.operands[1], i.operands[2:]) if d is not None else (i.operands[0], i.operands[1:])
    address = g.address(target, "u4" if narrow else "u8")
    if vector > 1:
        texts = [g.src(x, code) for x in values[0].items]
        for n, text in enumerate(texts):
            shift = g.const(n * int(code[1]), "u4" if narrow else "u8")
            g.line(f"{g.use(atomic_each)}(f, {address} + {shift}, '{op}', {text}, None, {narrow}, {g.mask})")
        if d is not None:
            raise g.unsupported("vector atomics with a result are not supported")
        return
    b = g.src(values[0], code)
    c = g.src(values[1], code) if op == "cas" else "None"
    text = f"{g.use(atomic_each)}(f, {address}, '{op}', {b}, {c}, {narrow}, {g.mask})"
    if d is None or isinstance(d, Sink):
        g.line(text)
    else:
        g.dst(d, code, text)


def atomic_each(f, address, op, b, c, shared, mask):
    """Lane by lane, in lane order; gives the old values."""
    address, b = np.broadcast_to(address, f.n), np.broadcast_to(b, f.n)
    c = b if c is None else np.broadcast_to(c, f.n)
    out = np.zeros(f.n, b.dtype)
    size = b.dtype.itemsize
    f.cta.cluster.progress += 1
    for lane in f.select(mask):
        at = int(address[lane])
        if shared or at >> 56 == SHARED_WINDOW >> 56:
            memory = f.cta.cluster.cta_of(at & 0xFFFFFFFF).shared
            index = memory.index(np.array([at & OFFSET_MASK]), size, 1)
            cell = memory.views[size][index[0, 0] : index[0, 0] + 1].view(b.dtype)
        else:
            cell = f.cta.launch.memory.bytes_at(at, size).view(b.dtype)
        out[lane] = cell[0]
        cell[0] = _ATOMIC[op](cell[0], b[lane], c[lane])
    return out


@emits("ldmatrix")
def load_matrix(g, i):
    """ldmatrix: 8×8 tiles of 16-bit elements; lane 8·n + r gives the address of row r of tile n."""
    if "m8n8" not in i.parts or i.parts[-1] != "b16":
        raise g.unsupported("only .m8n8 with .b16 is supported")
    count = int(next(p for p in i.parts if p in ("x1", "x2", "x4"))[1])
    d, source = i.operands
    result = g.tmp()
    g.line(f"{result} = {g.use(ldmatrix)}(f, {g.address(source)}, {count}, {'trans' in i.parts}, {g.mask})")
    items = d.items if isinstance(d, Vec) else (d,)
    for n, item in enumerate(items):
        g.dst(item, "u4", f"{result}[{n}]")


def full_warps(f, mask, what) -> np.ndarray:
    """Which warps of the fragment take part, as numbers from its first lane; each with all of its lanes."""
    if mask is None:
        if not f.lanes.whole:
            raise BarrierMisuse(f"{what} needs every lane of its warps")
        return np.arange(f.n // 32)
    on = np.zeros(f.gang.size, bool)
    on[f.lo : f.hi] = np.broadcast_to(mask, f.n)
    on = on.reshape(-1, 32)
    taking = on.any(1)
    if not on[taking].all():
        raise BarrierMisuse(f"{what} needs every lane of its warps")
    return np.flatnonzero(taking) - f.lo // 32


def ldmatrix(f, address, count, trans, mask):
    """Load 8×8 matrices of 16-bit elements; row addresses come from the lanes (PTX ISA 9.7.15.4.15)."""
    warps = full_warps(f, mask, "ldmatrix")
    out = np.zeros((count, f.n // 32 if f.lanes.whole else 0, 32), np.uint32)
    if not warps.size:
        return np.zeros((count, f.n), np.uint32)
    at = np.broadcast_to(address, f.n).reshape(-1, 32)[warps, : 8 * count]
    rows = _shared_load(f, np.ascontiguousarray(at).ravel(), 8, 2).view(np.uint16).reshape(warps.size, count, 8, 8)
    if trans:
        rows = rows.transpose(0, 1, 3, 2)
    pairs = np.ascontiguousarray(rows).view(np.uint32).reshape(warps.size, count, 32)
    out[:, warps] = pairs.transpose(1, 0, 2)
    return out.reshape(count, f.n)


@emits("stmatrix")
def store_matrix(g, i):
    """stmatrix: the reverse of ldmatrix."""
    if "m8n8" not in i.parts or i.parts[-1] != "b16":
        raise g.unsupported("only .m8n8 with .b16 is supported")
    target, value = i.operands
    items = value.items if isinstance(value, Vec) else (value,)
    texts = ", ".join(g.src(x, "u4") for x in items)
    g.line(f"{g.use(stmatrix)}(f, {g.address(target)}, ({texts},), {'trans' in i.parts}, {g.mask})")


def stmatrix(f, address, values, trans, mask):
    """Store 8×8 matrices of 16-bit elements: the inverse of ``ldmatrix``."""
    warps = full_warps(f, mask, "stmatrix")
    if not warps.size:
        return
    count = len(values)
    data = np.empty((count, f.n), np.uint32)
    for n, v in enumerate(values):
        data[n] = v
    tiles = np.ascontiguousarray(data.reshape(count, -1, 32)[:, warps].transpose(1, 0, 2)).view(np.uint16)
    tiles = tiles.reshape(warps.size, count, 8, 8)
    if trans:
        tiles = tiles.transpose(0, 1, 3, 2)
    rows = np.ascontiguousarray(tiles).view(np.uint64).reshape(-1, 2)
    at = np.ascontiguousarray(np.broadcast_to(address, f.n).reshape(-1, 32)[warps, : 8 * count]).ravel()
    sel = (warps[:, None] * 32 + np.arange(8 * count)).ravel()
    _shared_store(f, at, rows, sel)


def cp_async(f, target, source, size, filled, mask):
    """``cp.async``: copy ``size`` bytes per lane to shared memory, zero beyond ``filled``; runs in its group."""
    to, sel = _lanes(f, target, mask)
    if not to.size:
        return
    at = _lanes(f, source, mask)[0]
    fill = np.broadcast_to(filled, f.n)
    fill = fill if sel is None else fill[sel]
    if (fill > size).any():
        raise OutOfBounds(f"cp.async: source size {int(fill.max())} exceeds the copy size {size}")
    offset = (to & np.uint32(OFFSET_MASK)).astype(np.int64)
    cta = f.cta
    shared = cta.shared
    shared.index(offset, size, 1) if size <= 8 else shared.index(offset, 8, 2)
    # smaller copies share granules, which are the resolution of the race check
    granules = np.unique(offset >> 4) if size == 16 else np.empty(0, np.int64)
    shared.begin_write(granules)
    lanes = f.select(mask)
    memory = f.cta.launch.memory
    to, at, fill = to.copy(), at.copy(), fill.copy()
    warps = f.lanes.warps[lanes].copy()

    def operation():
        shared.end_write(granules)
        for n in range(to.size):
            data = np.zeros(size, np.uint8)
            k = int(fill[n])
            if k:
                data[:k] = memory.bytes_at(int(at[n]), k)
            o = int(offset[n])
            shared.data[o : o + size] = data
            shared.valid[o : o + size] = 1
        # cp.async writes through the generic proxy, as st.shared does
        shared.written_at[offset >> 4] = cta.launch.tick()
        shared.writer[offset >> 4] = warps

    f.gang.cp_open.setdefault(int(f.lanes.warps[lanes[0]]), []).append(operation)


def cp_async_commit(f, mask):
    """Close the group of every warp in the fragment."""
    for warp in f.lanes.warp_list:
        f.gang.cp_groups.setdefault(warp, []).append(f.gang.cp_open.pop(warp, []))


def cp_async_wait(f, keep, everything, mask):
    """Finish all but the newest ``keep`` groups."""
    for warp in f.lanes.warp_list:
        if everything:
            cp_async_commit(f, mask)
        groups = f.gang.cp_groups.setdefault(warp, [])
        while len(groups) > keep:
            for operation in groups.pop(0):
                operation()
    f.cta.cluster.progress += 1
