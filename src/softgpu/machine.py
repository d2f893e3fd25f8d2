"""Grid, clusters, CTAs, warps, and the cooperative scheduler.

Four consecutive warps form a gang that executes as one vector of 128 lanes as long as they agree. Where lanes
part, the gang holds several fragments (a program counter and its lanes); the fragment with the lowest counter
runs first and fragments that meet are merged, so that lanes reconverge at the first common point in text order.
A fragment that waits lets others go ahead (independent thread scheduling, PTX ISA 3.2).

Asynchronous operations are queued. Unless a seed says otherwise they run as late as possible, only when no warp
can go on: that is the order in which a missing wait shows.
"""

from __future__ import annotations

import random
from collections import deque

import numpy as np

from .checks import ALL, Checks, deadlock_report
from .errors import AsyncRace, BarrierMisuse, Deadlock, SoftGPUError
from .memory import (
    OFFSET_MASK,
    RANK_SHIFT,
    RESERVED_SHARED,
    SHARED_BYTES,
    GlobalMemory,
    SharedMemory,
    TensorMemory,
)  # fmt: skip
from .translate import DTYPES, Program

WARP = 32
GANG_WARPS = 4
_BLOCK, _EXIT = -1, -2


class MBarrier:
    """An mbarrier object (PTX ISA 9.7.13.15): phase, pending and expected arrivals, pending bytes."""

    __slots__ = ("cta", "expected", "offset", "pending", "phase", "tx", "waiters")

    def __init__(self, cta: CTA, offset: int, expected: int):
        self.cta, self.offset, self.expected = cta, offset, expected
        self.pending, self.tx, self.phase = expected, 0, 0
        self.waiters: list[Fragment] = []

    def arrive(self, count: int = 1, tx: int = 0) -> None:
        self.tx += tx
        if count > self.pending:
            raise BarrierMisuse(
                f"mbarrier at {self.offset:#x} of CTA rank {self.cta.rank}: {count} arrivals, but only "
                f"{self.pending} of "
                f"{self.expected} are pending in phase {self.phase}"
            )
        self.pending -= count
        self.settle()

    def transact(self, tx: int) -> None:
        """Add expected bytes (positive) or completed bytes (negative)."""
        self.tx += tx
        if abs(self.tx) > (1 << 20) - 1:
            raise BarrierMisuse(
                f"mbarrier at {self.offset:#x}: the transaction count {self.tx} leaves its 20-bit range"
            )
        self.settle()

    def settle(self) -> None:
        self.cta.cluster.progress += 1
        if self.pending == 0 and self.tx == 0:
            self.phase += 1
            self.pending = self.expected
            waiters, self.waiters = self.waiters, []
            for frag in waiters:
                frag.wake()

    def done(self, parity: int) -> bool:
        """True when the phase of that parity has completed."""
        return self.phase & 1 != parity & 1

    def describe(self) -> str:
        return (
            f"mbarrier at shared offset {self.offset:#x} of CTA {self.cta.index} (rank {self.cta.rank}): "
            f"phase {self.phase} "
            f"waits for {self.pending} of {self.expected} arrivals and {self.tx} bytes"
        )


class NamedBarrier:
    """One of the 16 barriers of a CTA (PTX ISA 9.7.13.1): threads arrived and expected in this generation."""

    __slots__ = ("arrived", "expected", "generation", "value", "waiters")

    def __init__(self):
        self.arrived, self.expected, self.generation = 0, 0, 0
        self.waiters: list[Fragment] = []
        self.value = None

    def arrive(self, threads: int, expected: int, ident: int) -> None:
        if self.arrived and expected != self.expected:
            raise BarrierMisuse(
                f"barrier {ident}: {expected} threads expected here, {self.expected} by earlier arrivals"
            )
        self.expected = expected
        self.arrived += threads
        if self.arrived > expected:
            raise BarrierMisuse(f"barrier {ident}: {self.arrived} threads arrived, {expected} are expected")
        if self.arrived == expected:
            self.generation += 1
            self.arrived = 0
            waiters, self.waiters = self.waiters, []
            for frag in waiters:
                frag.wake()

    def describe(self) -> str:
        return f"named barrier: {self.arrived} of {self.expected} threads arrived"


class Lanes:
    """A contiguous range [lo, hi) of a gang's lanes: register views per block, special values."""

    def __init__(self, gang: Gang, lo: int, hi: int):
        self.gang, self.lo, self.hi, self.n = gang, lo, hi, hi - lo
        self.views: dict[tuple, tuple] = {}
        self.lane_ids = np.arange(lo, hi) & 31
        self.warps = gang.first_warp + np.arange(lo, hi) // WARP
        self.warp_list = sorted(set(self.warps.tolist()))
        self.whole = lo % WARP == 0 and hi % WARP == 0

    def view(self, key: tuple) -> np.ndarray:
        kind = key[0]
        gang = self.gang
        if kind == "row":
            _, bits, row, code = key
            return gang.files[bits][row, self.lo : self.hi].view(DTYPES[code])
        if kind == "half":
            _, row, half, code = key
            return gang.files[64][row, self.lo : self.hi].view(DTYPES[code])[half::2]
        if kind == "special" and key[1].startswith("%param."):
            name, _, rest = key[1][7:].partition("+")
            offset, _, size = rest.partition(":")
            at, size = gang.cta.symbol(name) + int(offset), int(size)
            params = gang.cta.launch.params
            if at + size > params.size:
                raise SoftGPUError(f"ld.param of {size} bytes at {at} is outside of the {params.size} parameter bytes")
            return params[at : at + size].copy().view(DTYPES[key[2]])
        if kind == "special":
            value = gang.cta.special(key[1], self)
            return np.asarray(value).astype(DTYPES[key[2]]).reshape(-1)
        return np.array([gang.cta.symbol(key[1])], np.uint64).astype(DTYPES[key[2]])


class Fragment:
    """Lanes of one gang at one program counter."""

    def __init__(self, gang: Gang, pc: int, active: np.ndarray):
        self.gang, self.cta, self.pc = gang, gang.cta, pc
        self.ready = True
        self.parked = False
        self.token = None
        self.expired = False
        self.apart = False
        self.waiting: str | None = None
        self.barrier = None
        self.set_lanes(active)

    def set_lanes(self, active: np.ndarray) -> None:
        on = np.flatnonzero(active)
        self.lo, self.hi = int(on[0]), int(on[-1]) + 1
        self.count = on.size
        self.mask = None if self.count == self.hi - self.lo else active[self.lo : self.hi].copy()
        self.lanes = self.gang.lanes(self.lo, self.hi)
        self.n = self.hi - self.lo

    def active(self) -> np.ndarray:
        """Active lanes as booleans over the whole gang."""
        out = np.zeros(self.gang.size, bool)
        out[self.lo : self.hi] = True if self.mask is None else self.mask
        return out

    def select(self, mask) -> np.ndarray:
        """Indices in [0, n) of the lanes an instruction applies to."""
        if mask is None:
            return np.arange(self.n)
        return np.flatnonzero(np.broadcast_to(mask, self.n))

    def wake(self) -> None:
        self.ready = True
        self.waiting = self.barrier = None

    def block(self, why: str, barrier=None) -> int:
        self.ready = False
        self.waiting, self.barrier = why, barrier
        return _BLOCK

    def branch(self, taken: np.ndarray, target: int, fall: int) -> int:
        """Next block; splits the fragment where its lanes disagree."""
        if taken.size == 1:
            return target if taken[0] else fall
        if self.mask is None:
            n = np.count_nonzero(taken)
        else:
            taken = taken & self.mask
            n = np.count_nonzero(taken)
        if n == self.count:
            return target
        if n == 0:
            return fall
        go = np.zeros(self.gang.size, bool)
        go[self.lo : self.hi] = taken
        stay = self.active() & ~go
        self.gang.fragments.append(Fragment(self.gang, target, go))
        self.set_lanes(stay)
        return fall

    def part(self, keep: np.ndarray) -> None:
        """Keep the lanes in ``keep``; the others become a fragment at the same place."""
        kept = np.zeros(self.gang.size, bool)
        kept[self.lo : self.hi] = keep
        on = self.active()
        other = Fragment(self.gang, self.pc, on & ~kept)
        self.gang.fragments.append(other)
        self.set_lanes(on & kept)
        # not to be merged again before they have passed this block
        self.apart = other.apart = True

    def leave(self, leaving) -> int:
        """``exit``/``ret`` of the lanes in ``leaving`` (None: all)."""
        on = self.active()
        if leaving is not None:
            gone = np.zeros(self.gang.size, bool)
            gone[self.lo : self.hi] = np.broadcast_to(leaving, self.n)
            gone &= on
        else:
            gone = on
        self.gang.exited |= gone
        stay = on & ~gone
        if not stay.any():
            return _EXIT
        self.set_lanes(stay)
        return self.pc + 1


class Gang:
    """Up to four consecutive warps of a CTA with their registers."""

    def __init__(self, cta: CTA, first_warp: int, warps: int, files: dict[int, np.ndarray]):
        self.cta, self.first_warp, self.size = cta, first_warp, warps * WARP
        self.program = cta.cluster.program
        self.files = files
        self._lanes: dict[tuple[int, int], Lanes] = {}
        self.exited = np.zeros(self.size, bool)
        #: cp.async operations per warp: since the last commit, and committed groups
        self.cp_open: dict[int, list] = {}
        self.cp_groups: dict[int, list] = {}
        #: bulk copies per thread: since the last commit, and committed groups
        self.bulk_open: dict[int, list] = {}
        self.bulk_groups: dict[int, list] = {}
        #: thread → generation of the cluster barrier it arrived in
        self.cluster_arrivals: dict[int, int] = {}
        #: wgmma products of the warpgroup: since the last commit, and committed groups
        self.products_open: list = []
        self.product_groups: list = []
        #: tcgen05.st operations per warp that no wait has finished
        self.tensor_stores: dict[int, list] = {}
        self.fragments = [Fragment(self, 0, np.ones(self.size, bool))]

    def lanes(self, lo: int, hi: int) -> Lanes:
        found = self._lanes.get((lo, hi))
        if found is None:
            found = self._lanes[lo, hi] = Lanes(self, lo, hi)
        return found

    def runnable(self) -> bool:
        return any(f.ready for f in self.fragments)

    def run(self, quantum: int) -> bool:
        """Run until every fragment waits, or for ``quantum`` blocks; True when the quantum ended it."""
        program = self.program
        executed = program.executed
        fragments = self.fragments
        cluster = self.cta.cluster
        while quantum > 0:
            frag = None
            for f in fragments:
                if f.ready and (frag is None or f.pc < frag.pc):
                    frag = f
            if frag is None:
                return False
            if len(fragments) > 1:
                self._merge(frag)
            alone = len(fragments) == 1
            while quantum > 0:
                quantum -= 1
                pc = frag.pc
                block = program.blocks[pc]
                if block.together and not frag.parked and self._must_park(frag, block.together):
                    break
                frag.parked = False
                function, needs = program.function(pc, frag.mask is not None)
                lanes = frag.lanes
                key = (pc, frag.mask is not None)
                values = lanes.views.get(key)
                if values is None:
                    values = lanes.views[key] = tuple(map(lanes.view, needs))
                try:
                    following = function(frag, values)
                except SoftGPUError as e:
                    raise self._locate(e, function, block) from None
                if following == _BLOCK:
                    break
                executed[pc] += (frag.n + 31) // 32
                if following == _EXIT:
                    fragments.remove(frag)
                    cluster.progress += 1
                    self._release_parked()
                    break
                frag.pc = following
                frag.apart = False
                if following >= len(program.blocks):
                    raise SoftGPUError("control runs past the end of the kernel")
                if not alone or len(fragments) > 1:
                    break
        return True

    def _locate(self, error: SoftGPUError, function, block) -> SoftGPUError:
        tb = error.__traceback__
        line = None
        while tb is not None:
            if tb.tb_frame.f_code is function.__code__:
                line = function.ptx_lines[tb.tb_lineno - 1]
            tb = tb.tb_next
        for instr in block.instrs:
            if instr.line == line:
                return error.at(line, instr.text)
        return error

    def _merge(self, frag: Fragment) -> None:
        others = [f for f in self.fragments if f is not frag and f.pc == frag.pc and f.token is None and not f.apart]
        others = [f for f in others if f.ready or f.parked]
        if not others or frag.token is not None or frag.apart:
            return
        active = frag.active()
        for other in others:
            active |= other.active()
            self.fragments.remove(other)
        frag.set_lanes(active)
        frag.expired = False

    def _must_park(self, frag: Fragment, together: int) -> bool:
        """Wait for the rest of the warp (or warpgroup) before an instruction that needs it whole."""
        if frag.mask is None and (frag.lanes.whole if together == 1 else frag.count == self.size):
            return False
        span = WARP * together
        on = frag.active()
        want = np.repeat(on.reshape(-1, span).any(1), span) & ~self.exited if self.size % span == 0 else ~self.exited
        if not (want & ~on).any():
            return False
        frag.parked = True
        frag.block("lanes of the same warp" if together == 1 else "the other warps of its warpgroup")
        return True

    def _release_parked(self) -> None:
        for f in self.fragments:
            if f.parked:
                f.parked = False
                f.wake()


class CTA:
    """One thread block: shared and tensor memory, barriers, gangs."""

    def __init__(self, cluster: Cluster, index: tuple[int, int, int], rank: int):
        self.cluster, self.index, self.rank = cluster, index, rank
        self.launch = cluster.launch
        launch = self.launch
        self.base = rank << RANK_SHIFT
        self.shared = SharedMemory(RESERVED_SHARED + launch.static_shared + launch.dynamic_shared, launch.checks)
        self.tensor = TensorMemory(launch.checks)
        self.mbarriers: dict[int, MBarrier] = {}
        self.named = [NamedBarrier() for _ in range(16)]
        threads = launch.threads
        self.warps = -(-threads // WARP)
        self.fences = np.zeros(self.warps, np.int64)
        self.registers: dict[int, int] = {}  # per thread of a warp that has executed setmaxnreg
        self.tensor_queue: deque = deque()
        self.tensor_waiters: list[Fragment] = []
        self.gangs = []
        for first in range(0, self.warps, GANG_WARPS):
            n = min(GANG_WARPS, self.warps - first)
            self.gangs.append(Gang(self, first, n, launch.register_files(n)))
        extra = self.warps * WARP - threads
        if extra:
            gang = self.gangs[-1]
            on = np.arange(gang.size) < gang.size - extra
            gang.exited |= ~on
            gang.fragments[0].set_lanes(on)

    def symbol(self, name: str) -> int:
        """Address of a shared variable (in the shared window) or of a parameter (in the param space)."""
        launch = self.launch
        if name in launch.shared_offsets:
            return self.base + launch.shared_offsets[name]
        param = launch.program.kernel.params.get(name)
        if param is None:
            raise SoftGPUError(f"symbol {name} is not a shared variable or a parameter")
        return param.offset

    def special(self, name: str, lanes: Lanes):
        launch, cluster = self.launch, self.cluster
        key, _, axis = name[1:].partition(".")
        n = "xyz".index(axis) if axis else 0
        if key == "tid":
            linear = lanes.warps * WARP + lanes.lane_ids
            bx, by, _ = launch.block
            return (linear % bx, linear // bx % by, linear // (bx * by))[n]
        simple = {
            "ntid": lambda: launch.block[n], "ctaid": lambda: self.index[n], "nctaid": lambda: launch.grid[n],
            "cluster_ctaid": lambda: self.index[n] % launch.cluster[n], "cluster_nctaid": lambda: launch.cluster[n],
            "clusterid": lambda: self.index[n] // launch.cluster[n],
            "nclusterid": lambda: launch.grid[n] // launch.cluster[n],
            "laneid": lambda: lanes.lane_ids, "warpid": lambda: lanes.warps, "nwarpid": lambda: self.warps,
            "smid": lambda: cluster.number % launch.num_sms, "nsmid": lambda: launch.num_sms, "gridid": lambda: 1,
            "cluster_ctarank": lambda: self.rank, "cluster_nctarank": lambda: cluster.size,
            "is_explicit_cluster": lambda: int(cluster.size > 1),
            "lanemask_eq": lambda: 1 << lanes.lane_ids, "lanemask_lt": lambda: (1 << lanes.lane_ids) - 1,
            "lanemask_le": lambda: (2 << lanes.lane_ids) - 1,
            "lanemask_gt": lambda: 0xFFFFFFFF & ~((2 << lanes.lane_ids) - 1),
            "lanemask_ge": lambda: 0xFFFFFFFF & ~((1 << lanes.lane_ids) - 1),
            "dynamic_smem_size": lambda: launch.dynamic_shared,
            "total_smem_size": lambda: launch.dynamic_shared + launch.static_shared,
        }  # fmt: skip
        if key not in simple:
            raise SoftGPUError(f"special register {name} is not supported")
        return simple[key]()

    def mbarrier(self, address: int) -> MBarrier:
        """The mbarrier at a shared::cluster address."""
        cta = self.cluster.cta_of(address)
        found = cta.mbarriers.get(address & OFFSET_MASK)
        if found is None:
            raise BarrierMisuse(
                f"no mbarrier was initialised at shared address {address:#x}; known: {[hex(a) for a in cta.mbarriers]}"
            )
        return found

    def unfinished(self) -> list[str]:
        """What is still open; for reports."""
        out = []
        if self.tensor.allocations:
            out.append(f"tensor memory still allocated: {self.tensor.allocations}")
        for gang in self.gangs:
            if any(gang.tensor_stores.values()):
                out.append(f"tcgen05.st of warps {sorted(gang.tensor_stores)} with no tcgen05.wait::st")
            if gang.products_open:
                out.append(f"{len(gang.products_open)} wgmma products never committed")
            if gang.product_groups:
                out.append(f"{len(gang.product_groups)} wgmma groups never waited for")
        return out


class Cluster:
    """CTAs that run together, and the engine for asynchronous operations."""

    def __init__(self, launch: Launch, number: int, origin: tuple[int, int, int]):
        self.launch, self.program, self.number = launch, launch.program, number
        cx, cy, cz = launch.cluster
        self.size = cx * cy * cz
        self.progress = 0
        self.barrier_arrived = 0
        self.barrier_generation = 0
        self.barrier_waiters: list[Fragment] = []
        self.copies: deque = deque()
        self.ctas: list[CTA] = []
        for rank in range(self.size):
            at = (origin[0] + rank % cx, origin[1] + rank // cx % cy, origin[2] + rank // (cx * cy))
            self.ctas.append(CTA(self, at, rank))
        self.gangs = [g for c in self.ctas for g in c.gangs]

    def cta_of(self, address: int) -> CTA:
        rank = address >> RANK_SHIFT
        if rank >= self.size:
            raise BarrierMisuse(f"shared::cluster address {address:#x} names CTA rank {rank} of {self.size}")
        return self.ctas[rank]

    def alive(self) -> bool:
        return any(g.fragments for g in self.gangs)

    def submit(self, operation) -> None:
        """Queue an asynchronous copy (a callable); copies are unordered among each other."""
        self.copies.append(operation)
        self.progress += 1

    def asynchronous(self) -> list:
        """Queues with something in flight."""
        queues = [self.copies] if self.copies else []
        return queues + [c.tensor_queue for c in self.ctas if c.tensor_queue]

    def step_asynchronous(self, rng: random.Random | None) -> bool:
        """Run one queued operation; False when nothing is in flight."""
        queues = self.asynchronous()
        if not queues:
            return False
        queue = queues[0] if rng is None else rng.choice(queues)
        if queue is self.copies and rng is not None:
            n = rng.randrange(len(queue))
            queue.rotate(-n)
            operation = queue.popleft()
            queue.rotate(n)
        else:
            operation = queue.popleft()
        try:
            operation()
        except SoftGPUError as e:
            where = getattr(operation, "where", None)
            raise (e.at(*where) if where else e) from None
        self.progress += 1
        return True

    def finish(self) -> None:
        """At the end of every CTA: run what is still queued, and say what the kernel should have waited for.

        Bulk copies that no thread waited for do finish on a chip, although their shared memory may be gone by then, and
        shipped kernels leave some; they are noted. Products and tensor memory left open are errors.
        """
        for cta in self.ctas:
            for gang in cta.gangs:
                for thread, copies in gang.bulk_open.items():
                    if copies:
                        self.launch.note(
                            f"warp {gang.first_warp + thread // WARP} exits with bulk copies never committed"
                        )
                        for operation in copies:
                            self.submit(operation)
                for thread, groups in gang.bulk_groups.items():
                    if any(not op.has_read for group in groups for op in group):
                        self.launch.note(
                            f"warp {gang.first_warp + thread // WARP} exits while its bulk copies read shared memory"
                        )
        while self.step_asynchronous(None):
            pass
        if not self.launch.checks.leaks:
            return
        for cta in self.ctas:
            left = cta.unfinished()
            if left:
                raise SoftGPUError(f"CTA {cta.index} exits with " + "; ".join(left))


class Launch:
    """One kernel launch.

    ``grid``, ``block`` and ``cluster`` are (x, y, z); ``params`` the raw parameter buffer; ``dynamic_shared`` in
    bytes. ``seed`` None runs warps in order and asynchronous operations as late as possible; an integer shuffles
    both. ``num_sms`` is what ``%nsmid`` says.
    """

    def __init__(
        self, program: Program, grid, block, params: bytes, memory: GlobalMemory, *, cluster=(1, 1, 1),
        dynamic_shared: int = 0, seed: int | None = None, checks: Checks = ALL, num_sms: int = 4, quantum: int = 20000,
    ):  # fmt: skip
        self.program, self.grid, self.block, self.cluster = program, tuple(grid), tuple(block), tuple(cluster)
        self.memory, self.checks, self.num_sms, self.quantum = memory, checks, num_sms, quantum
        self.params = np.frombuffer(bytes(params) + bytes(-len(params) % 16), np.uint8)
        self.threads = block[0] * block[1] * block[2]
        self.dynamic_shared = dynamic_shared
        self.rng = None if seed is None else random.Random(seed)
        self.clock = 1
        self.notes: list[str] = []
        self._tell_unwaited_loads()
        self.priorities: dict[int, float] = {}
        self.pool: dict[int, list] = {}
        if any(g % c for g, c in zip(self.grid, self.cluster, strict=True)):
            raise SoftGPUError(f"grid {self.grid} is not a multiple of cluster {self.cluster}")
        want = program.kernel.reqntid
        if want and want != self.block:
            raise SoftGPUError(f"block {self.block} differs from the kernel's .reqntid {want}")
        self.shared_offsets: dict[str, int] = {}
        at = RESERVED_SHARED
        for v in program.kernel.shared.values():
            if v.size:
                at = -(-at // v.align) * v.align
                self.shared_offsets[v.name] = at
                at += v.size
        for v in program.kernel.shared.values():
            if not v.size:
                at = -(-at // v.align) * v.align
                self.shared_offsets.update({w.name: at for w in program.kernel.shared.values() if not w.size})
                break
        self.static_shared = at - RESERVED_SHARED
        if at + dynamic_shared > SHARED_BYTES:
            raise SoftGPUError(f"{at + dynamic_shared} bytes of shared memory requested, an SM has {SHARED_BYTES}")
        cx, cy, cz = self.cluster
        gx, gy, gz = self.grid
        self.origins = deque((x, y, z) for z in range(0, gz, cz) for y in range(0, gy, cy) for x in range(0, gx, cx))
        self.started = 0

    def _tell_unwaited_loads(self) -> None:
        early = self.program.unwaited_loads
        if not early:
            return
        instr, register = early[0]
        if self.checks.tensor_loads:
            raise AsyncRace(
                f"register {register} is used before the tcgen05.ld that fills it is waited for (tcgen05.wait::ld)",
                line=instr.line, text=instr.text[:200],
            )  # fmt: skip
        self.note(
            f"{len(early)} instructions use registers of a tcgen05.ld before tcgen05.wait::ld, "
            f"the first at line {instr.line}"
        )

    def note(self, text: str) -> None:
        """Something odd that is not an error; kept once, in the report."""
        if text not in self.notes:
            self.notes.append(text)

    def tick(self) -> int:
        self.clock += 1
        return self.clock

    def register_files(self, warps: int) -> dict[int, np.ndarray]:
        """Register rows [count, lanes] per width, from a pool; stale values stay, as on a chip."""
        free = self.pool.setdefault(warps, [])
        if free:
            return free.pop()
        lanes = warps * WARP
        return {
            bits: np.zeros((max(1, n), lanes), DTYPES[{1: "p", 16: "u2", 32: "u4", 64: "u8"}[bits]])
            for bits, n in self.program.counts.items()
        }

    def _start(self) -> Cluster:
        origin = self.origins.popleft()
        cluster = Cluster(self, self.started, origin)
        self.started += 1
        return cluster

    def take_pending(self) -> tuple[int, int, int] | None:
        """Give a cluster that has not started away (clusterlaunchcontrol.try_cancel)."""
        return self.origins.popleft() if self.origins else None

    def run(self) -> None:
        """Run every cluster of the grid to its end, raising the first diagnosis."""
        active: list[Cluster] = []
        rounds, last = 0, -1
        with np.errstate(all="ignore"):
            while self.origins or active:
                if not active:
                    active.append(self._start())
                # clusters run one after another; one that only spins lets the next one start beside it
                spinning = [self._advance(c) for c in list(active)]
                for cluster in list(active):
                    if not cluster.alive():
                        cluster.finish()
                        active.remove(cluster)
                        for gang in cluster.gangs:
                            self.pool[gang.size // WARP].append(gang.files)
                if not active or not all(spinning):
                    continue
                if self.origins:
                    active.append(self._start())
                    continue
                progress = sum(c.progress for c in active)
                rounds = rounds + 1 if progress == last else 0
                last = progress
                if rounds > 3:
                    ctas = [c for cluster in active for c in cluster.ctas]
                    raise Deadlock(
                        "livelock: " + deadlock_report(ctas).replace("no warp can run", "warps only spin", 1)
                    )

    def _choose(self, cluster: Cluster, gangs: list[Gang]):
        """The runnable gang, or the cluster for its asynchronous engine, of the highest random priority.

        Priorities last for a while and then change, which starves some agents on purpose (probabilistic concurrency
        testing, Burckhardt and others 2010): most order bugs need only one agent to be late.
        """
        agents = list(gangs) + ([cluster] if cluster.asynchronous() else [])
        if not agents:
            return None
        chosen = max(agents, key=lambda a: self.priorities.setdefault(id(a), self.rng.random()))
        if self.rng.random() < 0.1:
            self.priorities[id(chosen)] = self.rng.random()
        return chosen

    def _advance(self, cluster: Cluster) -> bool:
        """Run a cluster until it ends or only spins (True)."""
        rng = self.rng
        stalls, seen = 0, -1
        expired_rounds = 0
        while cluster.alive():
            gangs = [g for g in cluster.gangs if g.runnable()]
            quantum = self.quantum
            if rng is not None:
                chosen = self._choose(cluster, gangs)
                if chosen is cluster:
                    cluster.step_asynchronous(rng)
                    continue
                if chosen is not None:
                    gangs, quantum = [chosen], rng.choice((1, 1, 3, 50, self.quantum))
            if gangs:
                before = cluster.progress
                expired = [g.run(quantum) for g in gangs]
                if all(expired) and quantum == self.quantum and cluster.progress == before:
                    expired_rounds += 1
                    if cluster.step_asynchronous(rng):
                        expired_rounds = 0
                    elif expired_rounds > 3:
                        return True
                else:
                    expired_rounds = 0
                continue
            if cluster.step_asynchronous(rng):
                continue
            # nothing runs and nothing is in flight: let try_wait time out, then parked lanes go alone, then give up
            if cluster.progress != seen:
                stalls, seen = 0, cluster.progress
            stalls += 1
            woken = False
            for gang in cluster.gangs:
                for frag in gang.fragments:
                    if frag.waiting == "mbarrier" and stalls <= 2:
                        frag.expired = True
                        frag.wake()
                        woken = True
                    elif frag.parked and stalls == 3:
                        frag.ready = True
                        woken = True
            if not woken and stalls > 3:
                raise Deadlock(deadlock_report(cluster.ctas))
        return False
