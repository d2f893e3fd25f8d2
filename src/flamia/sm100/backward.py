"""MXFP8 attention backward on Blackwell, batched and packed: the twin of ``reference.backward.backward``.

A CTA owns 128 keys and walks over the queries that see them, 128 a step and ascending, for every query head of its kv
head (paper 3.5). Two warpgroups turn scores and dP into P and dS, a row of queries per thread and half of the keys per
warpgroup; one warp issues products, one loads tiles by TMA, one brings what a step's queries carry, and four warps add
dQ to global memory in FP16. Scores and dP are unscaled E4M3 products; dV, dK and dQ are block-scaled, and dV and dK
stay in tensor memory until the item is done.
"""

from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float8E4M3FN, Float16, Float32, Int32, Int64, Uint8, const_expr
from cutlass.cute.nvgpu import cpasync
from cutlass.memory import SmemAllocator

from flamia.sm100 import gradients, softmax
from flamia.sm100 import instructions as ptx
from flamia.sm100.gradients import BLOCK, ONE
from flamia.sm100.key_work import KeyItem, KeyTables, key_item_at, turn
from flamia.sm100.memory import BackwardSharedMemory, BackwardTensorMemory
from flamia.sm100.work import TILE, Masks

THREADS = 512
REDUCTION, LOAD, NUMBERS, PRODUCTS = 8, 12, 13, 14  # first warp of each role; warps 0 to 7 compute
COMPUTE_REGISTERS, REDUCTION_REGISTERS, OTHER_REGISTERS = 184, 96, 48
HALF = TILE // 2  # keys of a warpgroup
BLOCKS = HALF // BLOCK
EMULATED = {"sm_100a": 4, "sm_103a": 0}  # pairs of powers of 16 that multiply-adds compute (docs/kernels.md)
# Numbers of a query in shared memory
ADD, FACTOR, LESS, DO = range(4)  # 8 - lse2, c 2^e_Q, -delta, 2^e_dO
# Columns of the scale factors: ``BackwardTensorMemory.scales``
P_SCALE, DO_SCALE, ROW_SCALE, K_SCALE, DS_SCALE, Q_SCALE = range(6)


class Backward:
    """Kernel for one head dimension, GQA ratio and kind of mask.

    Args:
        head_dim: 64 or 128. ratio: query heads per kv head. masks: which sides of the window are bounded.
        rotate: whether dk is rotated back. causal_scale: the accumulator's prescale is per token, not per document.
        deterministic: key tiles add to dq in the order of the list. As CTAs then wait for one another, either all of
            the grid's run at a time or there is one per item and kv head.
        exact: every token has an exponent of its own, and dS for dq one per query and 32 keys.
        arch: target. stages: tiles of Q and of dO in flight.
        emulated: of 16 pairs of powers, those that multiply-adds compute; None: as ``EMULATED`` says.
    """

    def __init__(
        self,
        head_dim: int,
        ratio: int,
        masks: Masks,
        *,
        rotate: bool,
        causal_scale: bool = False,
        deterministic: bool = False,
        exact: bool = False,
        arch: str = "sm_100a",
        stages: int = 3,
        emulated: int | None = None,
    ) -> None:
        if head_dim not in (64, 128):
            raise ValueError(f"head_dim must be 64 or 128, got {head_dim}")
        if arch not in EMULATED:
            raise ValueError(f"arch must be {' or '.join(EMULATED)}, got {arch!r}")
        if stages not in (2, 3):
            raise ValueError(f"stages must be 2 or 3, got {stages}")
        self.emulated = EMULATED[arch] if emulated is None else emulated
        if not 0 <= self.emulated <= 16:
            raise ValueError(f"emulated must be 0 to 16 pairs of 16, got {emulated}")
        self.head_dim, self.ratio, self.masks, self.arch, self.stages = head_dim, ratio, masks, arch, stages
        self.rotate, self.causal_scale, self.deterministic = rotate, causal_scale, deterministic
        self.exact = exact
        self.tensor: Any = BackwardTensorMemory(head_dim)
        self.shared: Any = BackwardSharedMemory(head_dim, stages, exact)
        self.Storage: Any = None

    @cute.jit
    def __call__(
        self,
        mQ: cute.Tensor,  # E4M3 [T, heads, D]
        mK: cute.Tensor,  # E4M3 [Tk, kv heads, D]
        mV: cute.Tensor,  # E4M3 [Tk, kv heads, D]
        mdO: cute.Tensor,  # E4M3 [T, heads, D]
        mdK: cute.Tensor,  # BF16 or FP16 [Tk, kv heads, D]
        mdV: cute.Tensor,  # BF16 or FP16 [Tk, kv heads, D]
        mdQ: cute.Tensor,  # FP16 [heads, C, D], zeros: 16-row slabs in ``triton_finish.fragment_order``
        turns: cute.Tensor,  # int32 [heads, C / 32], zeros; deterministic only, else of any size
        mLse: cute.Tensor,  # FP32 [heads, T], base 2
        mDelta: cute.Tensor,  # FP32 [heads, T]
        eQ: cute.Tensor,  # UE8M0 [heads, T]
        eK: cute.Tensor,  # UE8M0 [kv heads, Tk]
        eV: cute.Tensor,  # UE8M0 [kv heads, Tk]
        edO: cute.Tensor,  # UE8M0 [heads, T]
        prescale: cute.Tensor,  # int32 [heads, documents], or [heads, T] with the causal scale
        items: cute.Tensor,  # int32 [n, 4]
        count: cute.Tensor,  # int32 [1]
        cu_q: cute.Tensor,  # int32 [documents + 1]
        cu_k: cute.Tensor,
        columns_q: cute.Tensor,  # int32 [documents + 1]
        score_scale: Float32,  # softmax_scale * log2 e
        softmax_scale: Float32,
        left: Int32,
        right: Int32,
        section: Int32,
        ctas: Int32,
        stream: cuda.CUstream,
    ):
        d, stages = self.head_dim, self.stages
        # Rows of d bytes, eight to a group, are one swizzle width: 128 or 64 bytes.
        atom = cute.make_composed_layout(
            cute.make_swizzle(3 if d == 128 else 2, 4, 3), 0, cute.make_layout((8, d), stride=(d, 1))
        )
        tile = cute.tile_to_shape(atom, (TILE, d), (0, 1))
        ring = cute.tile_to_shape(atom, (TILE, d, stages), (0, 1, 2))
        # tokens x d x heads
        mQ, mK, mV, mdO = (cute.make_tensor(x.iterator, cute.select(x.layout, [0, 2, 1])) for x in (mQ, mK, mV, mdO))
        load = cpasync.CopyBulkTensorTileG2SOp()
        copies = [cpasync.make_tiled_tma_atom(load, x, tile, (TILE, d)) for x in (mQ, mdO, mK, mV)]
        per_token = TILE if self.exact else 0

        @cute.struct
        class Storage:
            kv_full: cute.struct.MemRange[Int64, 1]
            kv_empty: cute.struct.MemRange[Int64, 1]
            q_full: cute.struct.MemRange[Int64, stages]
            q_empty: cute.struct.MemRange[Int64, stages]
            do_full: cute.struct.MemRange[Int64, stages]
            do_empty: cute.struct.MemRange[Int64, stages]
            n_full: cute.struct.MemRange[Int64, stages]
            n_empty: cute.struct.MemRange[Int64, stages]
            s_full: cute.struct.MemRange[Int64, 2]
            s_read: cute.struct.MemRange[Int64, 2]
            p_full: cute.struct.MemRange[Int64, 1]
            p_empty: cute.struct.MemRange[Int64, 1]
            dp_full: cute.struct.MemRange[Int64, 1]
            ds_full: cute.struct.MemRange[Int64, 1]
            dq_full: cute.struct.MemRange[Int64, 1]
            dq_read: cute.struct.MemRange[Int64, 1]
            dkv_full: cute.struct.MemRange[Int64, 1]
            dkv_read: cute.struct.MemRange[Int64, 1]
            tensor_base: Int32
            numbers: cute.struct.Align[cute.struct.MemRange[Float32, 4 * TILE * stages], 16]
            weights: cute.struct.Align[cute.struct.MemRange[Float32, 2 * per_token * stages], 16]
            key_factors: cute.struct.Align[cute.struct.MemRange[Float32, 2 * per_token], 16]
            q_scales: cute.struct.Align[cute.struct.MemRange[Int32, TILE * stages], 128]
            do_scales: cute.struct.Align[cute.struct.MemRange[Int32, TILE * stages], 128]
            p_scales: cute.struct.Align[cute.struct.MemRange[Int32, TILE], 128]
            k_scales: cute.struct.Align[cute.struct.MemRange[Int32, TILE], 128]
            row_scales: cute.struct.Align[cute.struct.MemRange[Int32, TILE], 128]
            ds_scales: cute.struct.Align[cute.struct.MemRange[Int32, TILE], 128]
            sK: cute.struct.Align[cute.struct.MemRange[Float8E4M3FN, TILE * d], 1024]
            sV: cute.struct.Align[cute.struct.MemRange[Float8E4M3FN, TILE * d], 1024]
            sQ: cute.struct.Align[cute.struct.MemRange[Float8E4M3FN, TILE * d * stages], 1024]
            sdO: cute.struct.Align[cute.struct.MemRange[Float8E4M3FN, TILE * d * stages], 1024]
            sP: cute.struct.Align[cute.struct.MemRange[Uint8, TILE * TILE], 1024]
            sdS: cute.struct.Align[cute.struct.MemRange[Uint8, TILE * TILE], 1024]
            sdQ: cute.struct.Align[cute.struct.MemRange[Float16, TILE * d], 128]

        self.Storage = Storage
        self.shared.check(Storage)
        self.kernel(
            tuple(atom for atom, _ in copies),
            tuple(tensor for _, tensor in copies),
            (mdK, mdV, mdQ, turns),
            (mLse, mDelta, prescale),
            (eQ, edO, eK, eV),
            KeyTables(items, count, cu_q, cu_k, columns_q),
            (score_scale, softmax_scale, left, right, section),
            (tile, ring),
        ).launch(grid=[ctas, 1, 1], block=[THREADS, 1, 1], stream=stream, min_blocks_per_mp=1)

    @cute.kernel
    def kernel(self, atoms, sources, outputs, rows, exponents, tables, scalars, layouts):
        tile, ring = layouts
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp == LOAD:
            for atom in atoms:
                cpasync.prefetch_descriptor(atom)
        storage = SmemAllocator().allocate(self.Storage)
        # Arrivals that complete a phase: products commit once, loads once and by bytes, others once per warp.
        counts = dict(kv_full=2, kv_empty=9, q_full=2, q_empty=1, do_full=2, do_empty=1, n_full=1, n_empty=8)
        counts |= dict(s_full=1, s_read=4, p_full=8, p_empty=1, dp_full=1, ds_full=8, dq_full=1, dq_read=4)
        counts |= dict(dkv_full=1, dkv_read=8)
        barriers = {name: getattr(storage, name).data_ptr() for name in counts}
        if warp == LOAD:
            with cute.arch.elect_one():
                self.init_barriers(barriers, counts)
        cute.arch.mbarrier_init_fence()
        if warp == PRODUCTS:
            cute.arch.alloc_tmem(self.tensor.columns, storage.tensor_base.ptr)
            cute.arch.relinquish_tmem_alloc_permit()
        thread = cute.arch.thread_idx()[0]
        p_scales = storage.p_scales.get_tensor(cute.make_layout(TILE))
        if thread < TILE:
            p_scales[thread] = Int32((ONE - gradients.SHIFT) * 0x01010101)
        cute.arch.fence_view_async_shared()
        ptx.fence_before()
        cute.arch.sync_threads()
        ptx.fence_after()

        sK, sV = (x.get_tensor(tile.outer, swizzle=tile.inner) for x in (storage.sK, storage.sV))
        sQ, sdO = (x.get_tensor(ring.outer, swizzle=ring.inner) for x in (storage.sQ, storage.sdO))
        numbers = storage.numbers.get_tensor(cute.make_layout((self.stages, TILE, 4), stride=(4 * TILE, 4, 1)))
        weights = cute.make_tensor(
            storage.weights.data_ptr(), cute.make_layout((self.stages, TILE, 2), stride=(2 * TILE, 2, 1))
        )
        key_factors = cute.make_tensor(storage.key_factors.data_ptr(), cute.make_layout((2, TILE), stride=(TILE, 1)))
        atom_ring = cute.make_layout((self.stages, TILE), stride=(TILE, 1))
        q_scales, do_scales = (x.get_tensor(atom_ring) for x in (storage.q_scales, storage.do_scales))
        k_scales = storage.k_scales.get_tensor(cute.make_layout(TILE))
        # dS scales by byte: of row 32 a + b, that of block n lies at (b, a, n).
        words = cute.make_layout((32, 4, 4), stride=(16, 4, 1))
        ds_scales = tuple(
            cute.make_tensor(cute.recast_ptr(x.data_ptr(), dtype=Uint8), words)
            for x in (storage.row_scales, storage.ds_scales)
        )
        work = (tables, scalars, outputs[0].shape[1])
        if warp < REDUCTION:
            cute.arch.setmaxregister_increase(COMPUTE_REGISTERS)
            shared = (numbers, weights, key_factors, storage.sP.data_ptr(), storage.sdS.data_ptr(), ds_scales)
            self.compute(shared, exponents, outputs, work, barriers)
        elif warp < LOAD:
            cute.arch.setmaxregister_decrease(REDUCTION_REGISTERS)
            self.reduce(storage.sdQ.data_ptr(), rows[2], outputs, work, barriers)
        else:
            cute.arch.setmaxregister_decrease(OTHER_REGISTERS)
            if warp == LOAD:
                self.load(atoms, sources, (sQ, sdO, sK, sV), work, barriers)
            if warp == NUMBERS:
                self.load_numbers(
                    rows, exponents, (numbers, weights, key_factors, q_scales, do_scales, k_scales), work, barriers
                )
            if warp == PRODUCTS:
                names = ("sQ", "sdO", "sK", "sV", "sP", "sdS", "q_scales", "do_scales", "p_scales", "k_scales")
                names += ("row_scales", "ds_scales")
                starts = {name: Int32(getattr(storage, name).data_ptr().toint()) for name in names}
                self.multiply(starts, work, barriers)
        ptx.fence_before()
        cute.arch.sync_threads()
        ptx.fence_after()
        if ptx.thread_index() // 32 == PRODUCTS:
            base = cute.arch.retrieve_tmem_ptr(Float32, 16, storage.tensor_base.ptr)
            cute.arch.dealloc_tmem(base, self.tensor.columns)

    @cute.jit
    def init_barriers(self, barriers, counts: cutlass.Constexpr):
        """Barriers by name with the arrivals that complete a phase."""
        sizes = dict.fromkeys(("q_full", "q_empty", "do_full", "do_empty", "n_full", "n_empty"), self.stages)
        sizes |= dict(s_full=2, s_read=2)
        for name, count in counts.items():
            for n in range(sizes.get(name, 1)):
                cute.arch.mbarrier_init(barriers[name] + n, count)

    def is_item(self, at, work):
        """Whether ``at`` is one of the list's items, for one of the heads; reads the list's length anew."""
        return at < work[0].count[0] * work[2]

    def item(self, at, work) -> KeyItem:
        tables, (_, _, left, right, section), _ = work
        return key_item_at(at, section, left, right, tables, self.masks)

    def first_key(self, item, half, warp):
        """First of the 64 keys whose P and dS a warp makes, within the document."""
        return item.k0 + HALF * half

    def own_keys(self, item):
        """The item of the keys whose dK and dV this CTA has."""
        return item

    def start(self):
        """First item of this CTA, and how far apart its items are."""
        return cute.arch.block_idx()[0], cute.arch.grid_dim()[0]

    def arrive(self, barrier):
        """Arrive, for a warp, where the product warp waits."""
        ptx.arrive(barrier)

    @cute.jit
    def load(self, atoms, sources, shared, work, barriers):
        """Load warp: tiles of K and V of an item, tiles of Q and dO of a step."""
        d = self.head_dim
        at, items, step = cute.arch.block_idx()[0], Int32(0), Int32(0)
        while self.is_item(at, work):
            item = self.item(at, work)
            if item.first < item.stop:
                cute.arch.mbarrier_wait(barriers["kv_empty"], (items + 1) & 1)
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive_and_expect_tx(barriers["kv_full"], 2 * TILE * d)
                for i in cutlass.range_constexpr(2, 4):
                    tiles = cute.domain_offset((item.k_start + item.k0, 0), sources[i][None, None, item.kv])
                    s, g = self._partition(atoms[i], shared[i], cute.local_tile(tiles, (TILE, d), (0, 0)))
                    cute.copy(atoms[i], g, s, tma_bar_ptr=barriers["kv_full"])
                items += 1
            for h in cutlass.range(self.ratio, unroll=1):
                head = item.kv * self.ratio + h
                rows = [cute.domain_offset((item.q_start, 0), x[None, None, head]) for x in sources[:2]]
                tiles = [cute.local_tile(x, (TILE, d), (None, 0)) for x in rows]
                parts = [self._partition(atoms[i], shared[i], tiles[i]) for i in range(2)]
                for j in cutlass.range(item.first, item.stop, unroll=1):
                    stage, phase = step % self.stages, (step // self.stages + 1) & 1
                    for i in cutlass.range_constexpr(2):
                        name = ("q", "do")[i]
                        cute.arch.mbarrier_wait(barriers[name + "_empty"] + stage, phase)
                        with cute.arch.elect_one():
                            cute.arch.mbarrier_arrive_and_expect_tx(barriers[name + "_full"] + stage, TILE * d)
                        s, g = parts[i]
                        cute.copy(atoms[i], g[None, j], s[None, stage], tma_bar_ptr=barriers[name + "_full"] + stage)
                    step += 1
            at += cute.arch.grid_dim()[0]

    @staticmethod
    def _partition(atom, shared, tiles):
        one = cute.make_layout(1)
        return cpasync.tma_partition(atom, 0, one, cute.group_modes(shared, 0, 2), cute.group_modes(tiles, 0, 2))

    @cute.jit
    def load_numbers(self, rows, exponents, shared, work, barriers):
        """Number warp: what the queries of a step carry, the scale atoms of Q and dO, and those of an item's keys."""
        mLse, mDelta, _ = rows
        eQ, edO, eK, eV = exponents
        numbers, weights, key_factors, q_scales, do_scales, k_scales = shared
        lane = cute.arch.lane_idx()
        at, items, step = cute.arch.block_idx()[0], Int32(0), Int32(0)
        while self.is_item(at, work):
            item = self.item(at, work)
            if item.first < item.stop:
                cute.arch.mbarrier_wait(barriers["kv_empty"], (items + 1) & 1)
                word = Int32(0)
                for b in cutlass.range_constexpr(4):
                    key = item.k0 + BLOCK * b
                    if const_expr(self.exact):
                        token = item.k_start + cutlass.min(key + lane, item.len_k - 1)
                        for i in cutlass.range_constexpr(2):
                            e = Int32((eK, eV)[i][item.kv, token])
                            key_factors[i, BLOCK * b + lane] = ptx.as_float(e << 23)
                        word = word | ONE << 8 * b  # e_K is in dS
                    else:
                        word = word | Int32(eK[item.kv, item.k_start + cutlass.min(key, item.len_k - 1)]) << 8 * b
                for n in cutlass.range_constexpr(4):
                    k_scales[32 * n + lane] = word
                cute.arch.fence_view_async_shared()
                ptx.arrive(barriers["kv_full"])
                items += 1
            for h in cutlass.range(self.ratio, unroll=1):
                head = item.kv * self.ratio + h
                for j in cutlass.range(item.first, item.stop, unroll=1):
                    stage, phase = step % self.stages, (step // self.stages + 1) & 1
                    cute.arch.mbarrier_wait(barriers["n_empty"] + stage, phase)
                    q_word, do_word = Int32(0), Int32(0)
                    for b in cutlass.range_constexpr(4):
                        row = BLOCK * b + lane
                        query = j * TILE + row
                        inside = query < item.len_q
                        token = item.q_start + cutlass.min(query, item.len_q - 1)
                        lse2, delta = mLse[head, token], mDelta[head, token]
                        e_q, e_do = Int32(eQ[head, token]), Int32(edO[head, token])
                        # Rows past the document's end and rows that see no key have no weights and no gradient.
                        live = inside and lse2 != -Float32.inf
                        numbers[stage, row, ADD] = gradients.SHIFT - lse2 if live else -Float32.inf
                        numbers[stage, row, FACTOR] = work[1][0] * ptx.as_float(e_q << 23)
                        numbers[stage, row, LESS] = -delta if live else Float32(0.0)
                        numbers[stage, row, DO] = ptx.as_float(e_do << 23) if live else Float32(0.0)
                        if const_expr(self.exact):
                            tops = [cute.arch.warp_redux_sync(e if inside else Int32(0), "max") for e in (e_q, e_do)]
                            for i in cutlass.range_constexpr(2):
                                weights[stage, row, i] = gradients.relative((e_q, e_do)[i], tops[i])
                            e_q, e_do = tops
                        else:
                            e_q, e_do = (cute.arch.shuffle_sync(e, 0) for e in (e_q, e_do))
                        q_word, do_word = q_word | e_q << 8 * b, do_word | e_do << 8 * b
                    ptx.arrive(barriers["n_full"] + stage)
                    for i in cutlass.range_constexpr(2):
                        name = ("q", "do")[i]
                        cute.arch.mbarrier_wait(barriers[name + "_empty"] + stage, phase)
                        for n in cutlass.range_constexpr(4):
                            (q_scales, do_scales)[i][stage, 32 * n + lane] = (q_word, do_word)[i]
                        cute.arch.fence_view_async_shared()
                        ptx.arrive(barriers[name + "_full"] + stage)
                    step += 1
            at += cute.arch.grid_dim()[0]

    @cute.jit
    def multiply(self, starts, work, barriers):
        """Product warp. A turn n issues half of the scores of step n, dV, dQ and dK of the step before it, the other
        half of the scores, whose columns those three have read from, and dP of step n, which goes where dQ was.
        """
        d, tensor = self.head_dim, self.tensor
        size, atom = TILE * d, 4 * TILE
        at, items, step = cute.arch.block_idx()[0], Int32(0), Int32(0)
        while self.is_item(at, work):
            item = self.item(at, work)
            steps = (item.stop - item.first) * self.ratio
            if steps > 0:
                cute.arch.mbarrier_wait(barriers["kv_full"], items & 1)
                cute.arch.mbarrier_wait(barriers["dkv_read"], (items + 1) & 1)
            for n in cutlass.range(steps + cutlass.min(steps, 1), unroll=1):
                stage, phase = step % self.stages, (step // self.stages) & 1
                before = (step + self.stages - 1) % self.stages
                parity = (step + 1) & 1  # of the step before
                q, do = starts["sQ"] + size * stage, starts["sdO"] + size * stage
                if n < steps:
                    cute.arch.mbarrier_wait(barriers["q_full"] + stage, phase)
                    cute.arch.mbarrier_wait(barriers["s_read"], parity)
                    ptx.fence_after()
                    ptx.score_product(tensor.scores, q, starts["sK"], HALF, d)
                    ptx.commit(barriers["s_full"])
                if n > 0:
                    more = Int32(n > 1)
                    old_q, old_do = starts["sQ"] + size * before, starts["sdO"] + size * before
                    cute.arch.mbarrier_wait(barriers["p_full"], parity)
                    ptx.fence_after()
                    self.copy_scales(P_SCALE, starts["p_scales"], DO_SCALE, starts["do_scales"] + atom * before)
                    ptx.transposed_product(
                        Int32(tensor.dv), starts["sP"], old_do, Int32(tensor.scales(P_SCALE)),
                        Int32(tensor.scales(DO_SCALE)), more, d,
                    )  # fmt: skip
                    ptx.commit(barriers["p_empty"])
                    ptx.commit(barriers["do_empty"] + before)
                    cute.arch.mbarrier_wait(barriers["ds_full"], parity)
                    ptx.fence_after()
                    self.copy_scales(ROW_SCALE, starts["row_scales"], K_SCALE, starts["k_scales"])
                    ptx.value_product(
                        Int32(tensor.dq), Int32(tensor.ds_codes), starts["sK"], Int32(tensor.scales(ROW_SCALE)),
                        Int32(tensor.scales(K_SCALE)), Int32(0), d,
                    )  # fmt: skip
                    ptx.commit(barriers["dq_full"])
                    self.copy_scales(DS_SCALE, starts["ds_scales"], Q_SCALE, starts["q_scales"] + atom * before)
                    ptx.transposed_product(
                        Int32(tensor.dk), starts["sdS"], old_q, Int32(tensor.scales(DS_SCALE)),
                        Int32(tensor.scales(Q_SCALE)), more, d,
                    )  # fmt: skip
                    ptx.commit(barriers["q_empty"] + before)
                if n < steps:
                    # Codes of P of the step before are there: its scores have been read.
                    cute.arch.mbarrier_wait(barriers["s_read"] + 1, parity)
                    ptx.fence_after()
                    ptx.score_product(tensor.scores + HALF, q, starts["sK"] + HALF * d, HALF, d)
                    ptx.commit(barriers["s_full"] + 1)
                    cute.arch.mbarrier_wait(barriers["do_full"] + stage, phase)
                    cute.arch.mbarrier_wait(barriers["dq_read"], parity)
                    ptx.fence_after()
                    ptx.score_product(Int32(tensor.dp), do, starts["sV"], TILE, d)
                    ptx.commit(barriers["dp_full"])
                    step += 1
            if steps > 0:
                ptx.commit(barriers["kv_empty"])
                ptx.commit(barriers["dkv_full"])
                items += 1
            at += cute.arch.grid_dim()[0]

    def copy_scales(self, first, first_atom, second, second_atom):
        """Scale atoms of both operands of a product to tensor memory."""
        ptx.copy_scales(Int32(self.tensor.scales(first)), first_atom)
        ptx.copy_scales(Int32(self.tensor.scales(second)), second_atom)

    @cute.jit
    def compute(self, shared, exponents, outputs, work, barriers):
        """A warpgroup: P and dS of 64 keys of each item, a row of queries per thread; at the end dV or dK."""
        _, _, eK, eV = exponents
        thread = cute.arch.thread_idx()[0]
        half = cute.arch.make_warp_uniform(thread // TILE)
        warp = cute.arch.make_warp_uniform(thread // 32) % 4
        row = thread % TILE
        at, stride = self.start()
        items, step = Int32(0), Int32(0)
        while self.is_item(at, work):
            item = self.item(at, work)
            some = item.first < item.stop
            factors = cute.make_rmem_tensor((2, BLOCKS), Float32)  # 2^e_K and 2^e_V of the warpgroup's blocks
            if const_expr(not self.exact):
                for b in cutlass.range_constexpr(BLOCKS):
                    key = self.first_key(item, half, warp) + BLOCK * b
                    token = item.k_start + cutlass.min(key, item.len_k - 1)
                    factors[0, b] = ptx.as_float(Int32(eK[item.kv, token]) << 23)
                    factors[1, b] = ptx.as_float(Int32(eV[item.kv, token]) << 23)
            elif some:
                cute.arch.mbarrier_wait(barriers["kv_full"], items & 1)
            common = (half, warp, row, factors, item, shared, work[1], barriers)
            for _ in cutlass.range(self.ratio, unroll=1):
                for j in cutlass.range(item.first, item.clear, unroll=1):
                    step = self.step(step, j, True, *common)
                for j in cutlass.range(item.clear, item.clouded, unroll=1):
                    step = self.step(step, j, False, *common)
                if const_expr(self.masks.left):
                    for j in cutlass.range(item.clouded, item.stop, unroll=1):
                        step = self.step(step, j, True, *common)
            if some:
                ptx.arrive(barriers["kv_empty"])
                cute.arch.mbarrier_wait(barriers["dkv_full"], items & 1)
                ptx.fence_after()
                items += 1
            if half == 0:
                self.store(self.tensor.dv, False, some, warp, self.own_keys(item), outputs[1], work[1])
            else:
                self.store(self.tensor.dk, True, some, warp, self.own_keys(item), outputs[0], work[1])
            if some:
                ptx.fence_before()
                self.arrive(barriers["dkv_read"])
            at += stride

    @cute.jit
    def step(
        self, step, j, masked: cutlass.Constexpr, half, warp, row, factors, item, shared, scalars, barriers
    ):  # fmt: skip
        """Codes of P and dS of 128 queries. masked: rows may not see every key. Returns the next step's number."""
        numbers, weights, key_factors, p_pointer, ds_pointer, (row_scales, ds_scales) = shared
        stage, parity = step % self.stages, step & 1
        lane, lanes = row % 32, warp << 21  # lane 32 * warp, in the upper half of an address
        cute.arch.mbarrier_wait(barriers["n_full"] + stage, (step // self.stages) & 1)
        add, factor, less, do = (numbers[stage, row, n] for n in range(4))
        q_weight, do_weight = Float32(1.0), Float32(1.0)
        if const_expr(self.exact):
            q_weight, do_weight = (weights[stage, row, n] for n in range(2))
        ptx.arrive(barriers["n_empty"] + stage)
        cute.arch.mbarrier_wait(barriers["s_full"] + half, parity)
        ptx.fence_after()
        scores: list[Any] = []
        for b in cutlass.range_constexpr(BLOCKS):
            column = self.tensor.scores + HALF * half + BLOCK * b
            scores = [*scores, gradients.pairs(ptx.load_columns(column + lanes, BLOCK))]
        ptx.wait_loads()
        ptx.fence_before()
        ptx.arrive(barriers["s_read"] + half)
        if const_expr(masked):
            seen = softmax.seen_keys(
                j * TILE + row, item.k0 + HALF * half, item.shift, item.len_k, scalars[2], scalars[3], self.masks
            )
        p: list[Any] = []
        for b in cutlass.range_constexpr(BLOCKS):
            s = scores[b]
            if const_expr(self.exact):
                s = gradients.weighted(s, self.of_keys(key_factors, 0, half, b))
                block = gradients.weights(s, factor, add, self.emulated)
            else:
                block = gradients.weights(s, factor * factors[0, b], add, self.emulated)
            p = [*p, gradients.hide(block, seen[b]) if const_expr(masked) else block]
        cute.arch.mbarrier_wait(barriers["p_empty"], (step + 1) & 1)
        for b in cutlass.range_constexpr(BLOCKS):
            block = gradients.scaled(p[b], do_weight) if const_expr(self.exact) else p[b]
            self.store_codes(gradients.codes(block), p_pointer, row, BLOCKS * half + b)
        cute.arch.fence_view_async_shared()
        ptx.arrive(barriers["p_full"])
        cute.arch.mbarrier_wait(barriers["dp_full"], parity)
        # Where codes of dS go are scores of the other warpgroup.
        cute.arch.mbarrier_wait(barriers["s_read"] + 1, parity)
        ptx.fence_after()
        for b in cutlass.range_constexpr(BLOCKS):
            block = BLOCKS * half + b
            dp = gradients.pairs(ptx.load_columns(self.tensor.dp + BLOCK * block + lanes, BLOCK))
            ptx.wait_loads()
            if const_expr(self.exact):
                dp = gradients.weighted(dp, self.of_keys(key_factors, 1, half, b))
                ds = gradients.scores_gradient(dp, p[b], do, less)
                to_dq = gradients.weighted(ds, self.of_keys(key_factors, 0, half, b))
                row_code, scale = gradients.exponent(gradients.largest(to_dq))
                to_dq = gradients.codes(gradients.scaled(to_dq, scale))
                to_dk = gradients.scaled(ds, q_weight)
                top = cute.arch.warp_redux_sync(gradients.largest(to_dk), "max")
                code, scale = gradients.exponent(top)
                to_dk = gradients.codes(gradients.scaled(to_dk, scale))
            else:
                ds = gradients.scores_gradient(dp, p[b], do * factors[1, b], less)
                top = cute.arch.warp_redux_sync(gradients.largest(ds), "max")
                code, scale = gradients.exponent(top)
                to_dq = to_dk = gradients.codes(gradients.scaled(ds, scale))
                row_code = code
            ptx.store_columns(self.tensor.ds_codes + 8 * block + lanes, to_dq)
            self.store_codes(to_dk, ds_pointer, row, block)
            row_scales[lane, warp, block] = Uint8(row_code)
            ds_scales[lane, block, warp] = Uint8(code)
        cute.arch.fence_view_async_shared()
        ptx.wait_stores()
        ptx.fence_before()
        ptx.arrive(barriers["ds_full"])
        return step + 1

    @staticmethod
    def of_keys(key_factors, n, half, b):
        """2^e_K (n = 0) or 2^e_V (n = 1) of the 32 keys of a block."""
        source = key_factors.iterator + (TILE * n + HALF * half + BLOCK * b)
        values = cute.make_rmem_tensor((BLOCK,), Float32)
        cute.autovec_copy(cute.make_tensor(source.align(16), cute.make_layout((BLOCK,))), values)
        return [values[i] for i in range(BLOCK)]

    @staticmethod
    def store_codes(words, pointer, row, block):
        """32 codes of a row, the block's of four, to a tile whose rows of 128 bytes are one swizzle width."""
        base = Int32(pointer.toint()) + row * TILE
        for n in range(2):
            ptx.store_shared(base + (((2 * block + n) ^ row % 8) << 4), words[4 * n : 4 * n + 4])

    @cute.jit
    def reduce(self, pointer, prescale, outputs, work, barriers):
        """Reduction warps: 32 queries of a step's dQ each, times the prescale, in FP16, added to global memory."""
        mdQ, turns = outputs[2], outputs[3]
        d = self.head_dim
        thread = cute.arch.thread_idx()[0] % TILE
        warp, lane = cute.arch.make_warp_uniform(thread // 32), thread % 32
        slab = Int32(pointer.toint()) + warp * (64 * d)
        at, step = cute.arch.block_idx()[0], Int32(0)
        while self.is_item(at, work):
            item = self.item(at, work)
            for h in cutlass.range(self.ratio, unroll=1):
                head = item.kv * self.ratio + h
                for j in cutlass.range(item.first, item.stop, unroll=1):
                    query = j * TILE + BLOCK * warp
                    scales = []
                    for n in cutlass.range_constexpr(4):
                        where = item.document
                        if const_expr(self.causal_scale):
                            where = item.q_start + cutlass.min(query + lane // 4 + 8 * n, item.len_q - 1)
                        scales = [*scales, ptx.as_float((prescale[head, where] + 127) << 23)]
                    before = Int32(0)
                    if const_expr(self.deterministic):
                        before = turn(item, j, work[1][2], work[1][3], self.masks)
                    if lane == 0:
                        cute.arch.cp_async_bulk_wait_group(0, read=True)
                    cute.arch.sync_warp()
                    cute.arch.mbarrier_wait(barriers["dq_full"], step & 1)
                    ptx.fence_after()
                    for s in cutlass.range_constexpr(2):
                        for c in cutlass.range_constexpr(d // 64):
                            column = self.tensor.dq + 64 * c
                            x = ptx.load_fragments(Int32(column) + ((warp * 32 + 16 * s) << 16), 8)
                            ptx.wait_loads()
                            for m in cutlass.range_constexpr(4):
                                words = self.half_words(x[8 * m : 8 * m + 8], scales[2 * s : 2 * s + 2])
                                ptx.store_shared(slab + (((d // 16) * s + 4 * c + m) * 32 + lane) * 16, words)
                    ptx.fence_before()
                    ptx.arrive(barriers["dq_read"])
                    cute.arch.fence_view_async_shared()
                    cute.arch.sync_warp()
                    if lane == 0 and query < item.len_q:
                        place = Int64(head) * mdQ.shape[1] + item.column_q + query
                        if const_expr(self.deterministic):
                            line = turns.iterator + place // BLOCK
                            while ptx.load_acquire(line) != before:
                                pass
                            cute.arch.fence_proxy("async")
                        ptx.bulk_add_half(mdQ.iterator + place * d, slab, 64 * d)
                        cute.arch.cp_async_bulk_commit_group()
                        if const_expr(self.deterministic):
                            cute.arch.cp_async_bulk_wait_group(0, read=False)
                            cute.arch.red(line, Int32(1), op="add", dtype="u32", sem="release", scope="gpu")
                    step += 1
            at += cute.arch.grid_dim()[0]
        if lane == 0:
            cute.arch.cp_async_bulk_wait_group(0, read=True)

    @staticmethod
    def half_words(x, scales):
        """16 columns of fragments, scaled per row, as the four words of ``fragment_order``."""
        pairs = [cute.arch.mul_packed_f32x2(x[2 * n : 2 * n + 2], (scales[n % 2],) * 2) for n in range(4)]
        return [ptx.pack_half(*pair, "f16") for pair in pairs]

    @cute.jit
    def store(self, column: cutlass.Constexpr, to_k: cutlass.Constexpr, some, warp, item, target, scalars):
        """Write a row of dV or dK; rows past the document's end are not written."""
        kind = "bf16" if const_expr(target.element_type is BFloat16) else "f16"
        d = self.head_dim
        key = item.k0 + ptx.thread_index() % TILE
        words = cute.make_rmem_tensor(d // 2, Int32)
        words.fill(0)
        if some:
            x: list[Any] = []
            for c in cutlass.range_constexpr(d // 32):
                x = [*x, *ptx.load_columns(Int32(column + 32 * c) + (warp << 21), 32)]
            ptx.wait_loads()
            if const_expr(to_k):
                x = [value * scalars[1] for value in x]
                if const_expr(self.rotate):
                    x = gradients.rotate_back(x)
            for c in cutlass.range_constexpr(d // 16):
                for n in cutlass.range_constexpr(8 * c, 8 * c + 8):
                    words[n] = ptx.pack_half(x[2 * n], x[2 * n + 1], kind)
        if key < item.len_k:
            address = target[item.k_start + key, item.kv, None].iterator.toint()
            for c in cutlass.range_constexpr(d // 16):
                ptx.store_global(address + 32 * c, [words[8 * c + m] for m in range(8)])


def compile_backward(kernel: Backward, dtype: Any = BFloat16, *, compile: Any = None, options: str = "") -> Any:
    """Compile for the kernel's target and gradients of ``dtype``, without a GPU. Lengths, heads and windows stay free.

    compile: ``cute.compile`` or what stands in for it. Returns a function of the arguments of ``Backward.__call__``
    without the stream, which is torch's current one; keys of no document are not written.
    """
    fake, free = cute.runtime.make_fake_compact_tensor, cute.sym_int32
    tokens, keys, heads, kv_heads = (free() for _ in range(4))
    d = kernel.head_dim

    def packed(kind: Any, *shape: Any, align: int) -> Any:
        return fake(kind, shape, stride_order=tuple(reversed(range(len(shape)))), assumed_align=align)

    def table(kind: Any, *shape: Any) -> Any:
        return packed(kind, *shape, align=kind.width // 8)

    queries, of_keys = ((n, h, d) for n, h in ((tokens, heads), (keys, kv_heads)))
    arguments = [
        *(packed(Float8E4M3FN, *shape, align=16) for shape in (queries, of_keys, of_keys, queries)),
        *(packed(dtype, *of_keys, align=32) for _ in range(2)),
        packed(Float16, heads, cute.sym_int32(divisibility=32), d, align=16),
        table(Int32, free(), free()),
        table(Float32, heads, tokens),
        table(Float32, heads, tokens),
        table(Uint8, heads, tokens),
        table(Uint8, kv_heads, keys),
        table(Uint8, kv_heads, keys),
        table(Uint8, heads, tokens),
        table(Int32, heads, free()),
        packed(Int32, free(), 4, align=16),
        table(Int32, 1),
        *(table(Int32, free()) for _ in range(3)),
    ]
    scalars = [Float32(1.0), Float32(1.0), Int32(0), Int32(0), Int32(1), Int32(1)]
    stream = cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True)
    flags = f"--enable-tvm-ffi --gpu-arch {kernel.arch} {options}".strip()
    return (compile or cute.compile)(kernel, *arguments, *scalars, stream, options=flags)
