"""Warp-level exchange: shfl, vote, elect, match, redux, activemask (PTX ISA 9.7.9.6, 9.7.13.9 to 9.7.13.14)."""

from __future__ import annotations

import numpy as np

from ..errors import BarrierMisuse
from ..ptx import Pair, Sink
from ..translate import emits, type_code


def _members(f, members, what: str) -> np.ndarray:
    """Active lanes by warp, [warps of the gang, 32]; checks that the named lanes are here."""
    on = f.active().reshape(-1, 32)
    if f.mask is None and f.lanes.whole:
        return on
    named = np.zeros(f.gang.size, np.uint32)
    named[f.lo : f.hi] = np.broadcast_to(members, f.n)
    bits = (named[:, None] >> np.arange(32, dtype=np.uint32)) & np.uint32(1)
    want = np.zeros((f.gang.size // 32, 32), bool)
    for w in range(want.shape[0]):
        if on[w].any():
            lane = w * 32 + int(np.flatnonzero(on[w])[0])
            want[w] = bits[lane].astype(bool)
    missing = want & ~on & ~f.gang.exited.reshape(-1, 32)
    if missing.any():
        warp = int(np.flatnonzero(missing.any(1))[0])
        raise BarrierMisuse(
            f"{what}: lanes {np.flatnonzero(missing[warp]).tolist()} of warp {f.gang.first_warp + warp} are named "
            "by the "
            "member mask and do not take part"
        )
    return on


@emits("elect")
def elect(g, i):
    """elect: one lane of each warp, and a predicate that holds in it."""
    d, members = i.operands
    first, second = d.first, d.second
    name = g.tmp()
    g.line(f"{name} = {g.use(elect_one)}(f, {g.src(members, 'u4')}, {g.mask})")
    if not isinstance(first, Sink):
        g.dst(first, "u4", f"{name}[0]")
    if not isinstance(second, Sink):
        g.dst(second, "p", f"{name}[1]")


def elect_one(f, members, mask):
    """(elected lane, am I the one): the lowest active lane of each warp."""
    on = _members(f, members, "elect.sync")
    leader = on.argmax(1)
    lanes = np.arange(f.lo, f.hi)
    mine = leader[lanes // 32]
    return mine.astype(np.uint32), (lanes % 32 == mine)


@emits("shfl")
def shuffle(g, i):
    """shfl: another lane's value, within segments; the predicate says whether that lane was in range."""
    if i.parts[1] != "sync" or i.parts[-1] != "b32":
        raise g.unsupported("only shfl.sync with .b32 is supported")
    mode = i.parts[2]
    if mode not in ("up", "down", "bfly", "idx"):
        raise g.unsupported(f"mode .{mode} is not supported")
    d, a, b, c, members = i.operands
    first, second = (d.first, d.second) if isinstance(d, Pair) else (d, Sink())
    name = g.tmp()
    args = ", ".join(g.src(x, "u4") for x in (a, b, c, members))
    g.line(f"{name} = {g.use(shfl)}(f, '{mode}', {args}, {g.mask})")
    if not isinstance(first, Sink):
        g.dst(first, "u4", f"{name}[0]")
    if not isinstance(second, Sink):
        g.dst(second, "p", f"{name}[1]")


def shfl(f, mode, a, b, c, members, mask):
    """(value of the source lane, was it in range), PTX ISA 9.7.9.6."""
    _members(f, members, "shfl.sync")
    lanes = np.arange(f.lo, f.hi)
    lane = lanes % 32
    b, c = np.broadcast_to(b, f.n).astype(np.int64) & 31, np.broadcast_to(c, f.n).astype(np.int64)
    clamp, segment = c & 31, (c >> 8) & 31
    top = (lane & segment) | (clamp & ~segment)
    low = lane & segment
    if mode == "up":
        j = lane - b
        ok = j >= top
    elif mode == "down":
        j = lane + b
        ok = j <= top
    elif mode == "bfly":
        j = lane ^ b
        ok = j <= top
    else:
        j = low | (b & ~segment)
        ok = j <= top
    j = np.where(ok, j, lane)
    if a.size == 1:
        return np.broadcast_to(a, f.n).copy(), ok
    full = np.zeros(f.gang.size, a.dtype)
    full[f.lo : f.hi] = a
    return full[lanes - lane + j], ok


@emits("vote")
def vote(g, i):
    """vote: all, any or uni of a predicate over the warp, or its ballot."""
    if i.parts[1] != "sync":
        raise g.unsupported("only vote.sync is supported")
    mode = i.parts[2]
    d, a, members = i.operands
    text = f"{g.use(vote_sync)}(f, '{mode}', {g.src(a, 'p')}, {g.src(members, 'u4')}, {g.mask})"
    if mode == "ballot":
        g.dst(d, "u4", text)
    elif mode in ("any", "all", "uni"):
        g.dst(d, "p", text)
    else:
        raise g.unsupported(f"mode .{mode} is not supported")


def vote_sync(f, mode, a, members, mask):
    """any, all, uni or ballot of a predicate over the member lanes of each warp."""
    on = _members(f, members, "vote.sync")
    full = np.zeros(f.gang.size, bool)
    full[f.lo : f.hi] = a
    named = np.zeros(f.gang.size, np.uint32)
    named[f.lo : f.hi] = np.broadcast_to(members, f.n)
    warps = f.gang.size // 32
    full = full.reshape(warps, 32)
    member = np.zeros((warps, 32), bool)
    for w in range(warps):
        if on[w].any():
            m = int(named.reshape(warps, 32)[w][np.flatnonzero(on[w])[0]])
            member[w] = [(m >> k) & 1 for k in range(32)]
    here = on & member
    if mode == "ballot":
        value = ((full & here).astype(np.uint64) << np.arange(32, dtype=np.uint64)).sum(1).astype(np.uint32)
    elif mode == "any":
        value = (full & here).any(1)
    elif mode == "all":
        value = (full | ~here).all(1)
    else:
        value = (full | ~here).all(1) | ~(full & here).any(1)
    return np.repeat(value, 32)[f.lo : f.hi]


@emits("activemask")
def active_mask(g, i):
    """activemask: lanes of the warp that run this instruction together."""
    g.dst(i.operands[0], "u4", f"{g.use(active_bits)}(f)")


def active_bits(f):
    """Lanes of the warp that run together now."""
    on = f.active().reshape(-1, 32)
    bits = (on.astype(np.uint64) << np.arange(32, dtype=np.uint64)).sum(1).astype(np.uint32)
    return np.repeat(bits, 32)[f.lo : f.hi]


@emits("redux")
def reduce(g, i):
    """redux: a sum, minimum, maximum or bitwise function over the named lanes."""
    op, kind = i.parts[2], i.parts[-1]
    code = type_code(kind)
    if op not in ("add", "min", "max", "and", "or", "xor") or "abs" in i.parts or "NaN" in i.parts:
        raise g.unsupported("this reduction is not supported")
    d, a, members = i.operands
    g.dst(d, code, f"{g.use(redux)}(f, '{op}', {g.src(a, code)}, {g.src(members, 'u4')}, {g.mask})")


def redux(f, op, a, members, mask):
    """Reduce over the active lanes of each warp."""
    on = _members(f, members, "redux.sync")
    full = np.zeros(f.gang.size, a.dtype)
    full[f.lo : f.hi] = a
    function = {
        "add": np.add,
        "min": np.minimum,
        "max": np.maximum,
        "and": np.bitwise_and,
        "or": np.bitwise_or,
        "xor": np.bitwise_xor,
    }[op]
    out = np.zeros(f.gang.size // 32, a.dtype)
    for w in range(out.size):
        if on[w].any():
            out[w] = function.reduce(full.reshape(-1, 32)[w][on[w]])
    return np.repeat(out, 32)[f.lo : f.hi]
