"""Barriers, mbarriers and fences (PTX ISA 9.7.13)."""

from __future__ import annotations

import numpy as np

from ..errors import BarrierMisuse
from ..machine import MBarrier
from ..memory import OFFSET_MASK, RANK_SHIFT
from ..ptx import Mem, Sink
from ..translate import emits


@emits("bar", "barrier")
def barrier(g, i):
    """bar and barrier: sync and arrive on the CTA's 16 barriers, within a warp, and of the cluster."""
    parts = [p for p in i.parts[1:] if p not in ("cta", "aligned")]
    if parts[0] == "cluster":
        _cluster_barrier(g, i, parts[1:])
        return
    if parts[0] == "warp":
        g.line(f"if not {g.use(warp_sync)}(f, {g.src(i.operands[0], 'u4')}, {g.mask}): return -1")
        return
    ident = g.src(i.operands[0], "u4") if parts[0] != "red" else None
    if parts[0] == "sync":
        count = g.src(i.operands[1], "u4") if len(i.operands) > 1 else "None"
        g.line(f"if not {g.use(named_sync)}(f, {ident}, {count}, {g.mask}): return -1")
    elif parts[0] == "arrive":
        g.line(f"{g.use(named_arrive)}(f, {ident}, {g.src(i.operands[1], 'u4')}, {g.mask})")
    else:
        raise g.unsupported("barrier reductions are not supported")


def _same(value, f, mask):
    """(first selected lane's value, are all selected lanes equal); (None, True) when no lane is selected."""
    picked = np.broadcast_to(value, f.n)[f.select(mask)]
    if picked.size == 0:
        return None, True
    return int(picked[0]), bool((picked == picked[0]).all())


def _named(f, number: int, count):
    """(barrier, threads expected) of one barrier number; threads that have exited do not count."""
    if number > 15:
        raise BarrierMisuse(f"barrier {number}: a CTA has 16")
    if count is None:
        return f.cta.named[number], f.cta.warps * 32 - sum(int(g.exited.sum()) for g in f.cta.gangs)
    if count % 32:
        raise BarrierMisuse(f"barrier {number}: {count} threads is not a multiple of the warp size")
    return f.cta.named[number], count


def named_sync(f, ident, count, mask):
    """bar.sync: True once the generation this fragment arrived in is complete."""
    if f.token is None:
        number, same = _same(ident, f, mask)
        if number is None:
            return True
        if not same:
            # warps that run in step name different barriers: they part here
            f.part(np.broadcast_to(ident, f.n) == number)
            return False
        bar, expected = _named(f, number, None if count is None else _same(count, f, mask)[0])
        f.token = (bar, bar.generation)
        f.block(f"named barrier {number}", bar)
        bar.waiters.append(f)
        bar.arrive(f.select(mask).size, expected, number)
        f.cta.cluster.progress += 1
    bar, generation = f.token
    if bar.generation == generation:
        return False
    f.token = None
    f.wake()
    return True


def named_arrive(f, ident, count, mask):
    """bar.arrive: count in, do not wait."""
    lanes = f.select(mask)
    idents, counts = np.broadcast_to(ident, f.n), np.broadcast_to(count, f.n)
    for number in np.unique(idents[lanes]):
        here = lanes[idents[lanes] == number]
        bar, expected = _named(f, int(number), int(counts[here[0]]))
        bar.arrive(here.size, expected, int(number))
        f.cta.cluster.progress += 1


def warp_sync(f, members, mask):
    """bar.warp.sync: lanes of the warp gather; fragments merge by the scheduler, so one that is whole may go on."""
    if f.mask is None and f.lanes.whole:
        return True
    on = f.active().reshape(-1, 32)
    named = np.zeros(f.gang.size, np.uint32)
    named[f.lo : f.hi] = np.broadcast_to(members, f.n)
    named = named.reshape(-1, 32)
    for w in range(on.shape[0]):
        if on[w].any():
            m = int(named[w][np.flatnonzero(on[w])[0]])
            want = np.array([(m >> k) & 1 for k in range(32)], bool)
            if (want & ~on[w] & ~f.gang.exited.reshape(-1, 32)[w]).any():
                f.parked = True
                f.block("lanes of the same warp (bar.warp.sync)")
                return False
    return True


def _cluster_barrier(g, i, parts):
    if parts[0] == "arrive":
        g.line(f"{g.use(cluster_arrive)}(f, {g.mask})")
    elif parts[0] == "wait":
        g.line(f"if not {g.use(cluster_wait)}(f, {g.mask}): return -1")
    else:
        raise g.unsupported("unknown form")


def cluster_arrive(f, mask):
    """barrier.cluster.arrive: every thread of the cluster arrives once per generation."""
    cluster = f.cta.cluster
    cluster.barrier_arrived += f.select(mask).size
    cluster.progress += 1
    total = sum(g.size for g in cluster.gangs) - sum(int(g.exited.sum()) for g in cluster.gangs)
    if cluster.barrier_arrived > total:
        raise BarrierMisuse("barrier.cluster.arrive twice without a wait")
    for lane in f.select(mask):
        f.gang.cluster_arrivals[f.lo + int(lane)] = cluster.barrier_generation
    if cluster.barrier_arrived == total:
        cluster.barrier_arrived = 0
        cluster.barrier_generation += 1
        waiters, cluster.barrier_waiters = cluster.barrier_waiters, []
        for w in waiters:
            w.wake()


def cluster_wait(f, mask):
    """barrier.cluster.wait: True once the generation these lanes arrived in is complete."""
    lanes = f.select(mask)
    if not lanes.size:
        return True
    arrived = f.gang.cluster_arrivals
    generations = {arrived.get(f.lo + int(k)) for k in lanes}
    if None in generations:
        raise BarrierMisuse("barrier.cluster.wait without an arrive")
    if max(generations) < f.cta.cluster.barrier_generation:
        return True
    f.cta.cluster.barrier_waiters.append(f)
    f.block("the cluster barrier")
    return False


@emits("mbarrier")
def mbarrier(g, i):
    """init, inval, arrive, expect_tx, complete_tx, test_wait, try_wait on barriers in shared memory."""
    action = i.parts[1]
    known = {
        "shared",
        "shared::cta",
        "shared::cluster",
        "b64",
        "release",
        "acquire",
        "relaxed",
        "cta",
        "cluster",
        "noComplete",
        "expect_tx",
        "parity",
        "noinc",
        "init",
        "inval",
        "arrive",
        "arrive_drop",
        "try_wait",
        "test_wait",
        "complete_tx",
    }
    extra = [p for p in i.parts[1:] if p not in known]
    if extra or "noComplete" in i.parts:
        raise g.unsupported(f"modifier .{'.'.join(extra) or 'noComplete'} is not supported")
    ops = list(i.operands)
    if action == "init":
        g.line(f"{g.use(init)}(f, {g.address(ops[0])}, {g.src(ops[1], 'u4')}, {g.mask})")
    elif action == "inval":
        g.line(f"{g.use(inval)}(f, {g.address(ops[0])}, {g.mask})")
    elif action in ("arrive", "arrive_drop"):
        state = None if isinstance(ops[0], Mem) else ops.pop(0)
        rest = [g.src(x, "u4") for x in ops[1:]]
        expect = "expect_tx" in i.parts
        count = "None" if expect or not rest else rest[0]
        tx = rest[-1] if expect else "None"
        text = f"{g.use(arrive)}(f, {g.address(ops[0])}, {count}, {tx}, {action == 'arrive_drop'}, {g.mask})"
        if state is None or isinstance(state, Sink):
            g.line(text)
        else:
            g.dst(state, "u8", text)
    elif action in ("expect_tx", "complete_tx"):
        sign = "" if action == "expect_tx" else "-"
        g.line(f"{g.use(transact)}(f, {g.address(ops[0])}, {sign}{g.src(ops[1], 's4')}, {g.mask})")
    elif action in ("try_wait", "test_wait"):
        name = g.tmp()
        parity = "parity" in i.parts
        value = g.src(ops[2], "u4" if parity else "u8")
        g.line(f"{name} = {g.use(wait)}(f, {g.address(ops[1])}, {value}, {parity}, {action == 'test_wait'}, {g.mask})")
        g.line(f"if {name} is None: return -1")
        g.dst(ops[0], "p", name)


def init(f, address, count, mask):
    """Make an mbarrier of `count` arrivals; one that is in use already is a misuse."""
    address, count = np.broadcast_to(address, f.n), np.broadcast_to(count, f.n)
    for lane in f.select(mask):
        at, n = int(address[lane]), int(count[lane])
        cta = f.cta.cluster.cta_of(at)
        if at & 7:
            raise BarrierMisuse(f"mbarrier at {at:#x} is not aligned to 8 bytes")
        if not 1 <= n < 1 << 20:
            raise BarrierMisuse(f"mbarrier at {at:#x}: a count of {n} is outside of 1 to 2**20 - 1")
        offset = at & OFFSET_MASK
        old = cta.mbarriers.get(offset)
        if old is not None and old.waiters:
            raise BarrierMisuse(f"{old.describe()}: initialised again while warps wait on it")
        cta.mbarriers[offset] = MBarrier(cta, offset, n)
        cta.cluster.progress += 1


def inval(f, address, mask):
    """Give an mbarrier's memory back."""
    address = np.broadcast_to(address, f.n)
    for lane in f.select(mask):
        f.cta.mbarrier(int(address[lane]))
        at = int(address[lane])
        del f.cta.cluster.cta_of(at).mbarriers[at & OFFSET_MASK]


def _one(value, lanes):
    """The value where it is the same in all the lanes, else None; absent values count as the same."""
    if value is None or value.size == 1:
        return value
    picked = value[lanes]
    return picked[:1] if (picked == picked[0]).all() else None


def arrive(f, address, count, tx, drop, mask):
    """Arrive, with expected bytes first where given; gives the phase as the opaque state."""
    lanes = f.select(mask)
    state = np.zeros(f.n, np.uint64)
    if not lanes.size:
        return state
    at, n, bytes_ = (_one(v, lanes) for v in (address, count, tx))
    if at is not None and (n is None) == (count is None) and (bytes_ is None) == (tx is None):
        groups = [(lanes, at, n, bytes_)]
    else:
        full = [None if v is None else np.broadcast_to(v, f.n) for v in (address, count, tx)]
        groups = [(lanes[k : k + 1], *(None if v is None else v[lane : lane + 1] for v in full))
                  for k, lane in enumerate(lanes)]  # fmt: skip
    for members, at, n, bytes_ in groups:
        bar = f.cta.mbarrier(int(at[0]))
        state[members] = bar.phase
        arrivals = members.size * (1 if n is None else int(n[0]))
        if drop:
            bar.expected -= arrivals
        bar.arrive(arrivals, 0 if bytes_ is None else int(bytes_[0]) * members.size)
    return state


def transact(f, address, tx, mask):
    """Change the bytes that an mbarrier's phase still expects by ``tx``."""
    address, tx = np.broadcast_to(address, f.n), np.broadcast_to(tx, f.n)
    for lane in f.select(mask):
        f.cta.mbarrier(int(address[lane])).transact(int(tx[lane]))


def wait(f, address, value, parity, test, mask):
    """Predicate per lane, or None after the fragment was set to wait.

    ``try_wait`` may come back false after its time limit; that happens here when nothing else can run.
    """
    lanes = f.select(mask)
    out = np.ones(f.n, bool)
    if not lanes.size:
        return out
    expired, f.expired = f.expired, False
    pending = None
    at, goal = _one(address, lanes), _one(value, lanes)
    if at is not None and goal is not None:
        address, value = at, goal
    if address.size == 1 and value.size == 1:
        bar = f.cta.mbarrier(int(address[0]))
        ok = bar.done(int(value[0])) if parity else bar.phase > int(value[0])
        if not ok:
            pending = bar
            out[:] = False
    else:
        address, value = np.broadcast_to(address, f.n), np.broadcast_to(value, f.n)
        seen = {}
        for lane in lanes:
            key = (int(address[lane]), int(value[lane]))
            if key not in seen:
                bar = f.cta.mbarrier(key[0])
                seen[key] = bar.done(key[1]) if parity else bar.phase > key[1]
                if not seen[key]:
                    pending = bar
            out[lane] = seen[key]
    if pending is None or test or expired:
        return out
    pending.waiters.append(f)
    f.block("mbarrier", pending)
    return None


@emits("fence")
def fence(g, i):
    """Only proxy fences act here: memory is otherwise in order."""
    kinds = i.parts[1:]
    if kinds[0] == "proxy":
        if kinds[1] == "async":
            if len(kinds) > 2 and kinds[2] not in ("shared::cta", "shared::cluster", "global"):
                raise g.unsupported("unknown state space")
            g.line(f"{g.use(proxy_fence)}(f)")
        elif kinds[1] in ("alias", "tensormap::generic", "async::generic"):
            g.line(f"{g.use(proxy_fence)}(f)")
        else:
            raise g.unsupported("unknown proxy")
    elif kinds[0] not in ("mbarrier_init", "acq_rel", "sc", "acquire", "release"):
        raise g.unsupported("unknown fence")


def proxy_fence(f):
    """Generic writes of these warps so far become visible to the async proxy."""
    clock = f.cta.launch.tick()
    for warp in f.lanes.warp_list:
        f.cta.fences[warp] = clock


@emits("mapa")
def map_address(g, i):
    """mapa: the address of the same place in the shared memory of another CTA of the cluster."""
    d, a, rank = i.operands
    if i.parts[-1] == "u32":
        value = g.src(a, "u4")
        text = f"({value} & {g.const(OFFSET_MASK, 'u4')}) | ({g.src(rank, 'u4')} << {g.const(RANK_SHIFT, 'u4')})"
        g.dst(d, "u4", text)
    else:
        keep = (0xFF << 56) | OFFSET_MASK
        text = (
            f"({g.src(a, 'u8')} & {g.const(keep, 'u8')}) | "
            f"({g.src(rank, 'u4')}.astype(np.uint64) << {g.const(RANK_SHIFT, 'u8')})"
        )
        g.dst(d, "u8", text)


@emits("getctarank")
def cta_rank(g, i):
    """getctarank: the CTA in the cluster that a shared address belongs to."""
    d, a = i.operands
    if i.parts[-1] == "u32":
        g.dst(d, "u4", f"{g.src(a, 'u4')} >> {g.const(RANK_SHIFT, 'u4')}")
    else:
        g.dst(d, "u4", f"(({g.src(a, 'u8')} >> {g.const(RANK_SHIFT, 'u8')}) & {g.const(255, 'u8')}).astype(np.uint32)")
