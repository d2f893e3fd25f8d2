"""The Blackwell backward by pairs of CTAs: 256 keys of a document per pair (paper 3.5.3), ``Backward``'s arithmetic.

Every product is one of the pair. Of a step's 128 queries each CTA has 64 with all keys, as rows of scores, dP and dQ,
and in dV and dK its own 128 keys with all queries. So P and dS change hands through distributed shared memory; of Q, dO
and K a CTA reads rows for the former products and half of the channels for the latter. Operands cross the pair, which
is less shared memory to read per product than one CTA has, and dQ leaves half as often.
"""

from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float8E4M3FN, Float16, Float32, Int32, Int64, Uint8, const_expr
from cutlass.cute.nvgpu import cpasync, tcgen05
from cutlass.memory import SmemAllocator

from flamia.sm100 import gradients, softmax
from flamia.sm100 import instructions as ptx
from flamia.sm100.backward import (
    ADD,
    BLOCKS,
    DO,
    FACTOR,
    HALF,
    LESS,
    LOAD,
    NUMBERS,
    PRODUCTS,
    REDUCTION,
    THREADS,
    Backward,
)
from flamia.sm100.gradients import BLOCK, ONE
from flamia.sm100.key_work import KeyItem, KeyTables, key_item_at
from flamia.sm100.memory import PairSharedMemory, PairTensorMemory
from flamia.sm100.work import TILE, Masks

COMPUTE_REGISTERS, REDUCTION_REGISTERS, OTHER_REGISTERS = 176, 80, 80
ITEM = 2 * TILE  # keys of an item of the work list
# Columns of the scale factors: ``PairTensorMemory.scales``
P_SCALE, DO_SCALE, ROW_SCALE, K_SCALE, DS_SCALE, Q_SCALE = 0, 1, 2, 4, 6, 7


class PairBackward(Backward):
    """Kernel for one head dimension, GQA ratio and kind of mask; arguments as ``Backward`` has them, for which dq is
    added to in no fixed order and exponents are those of blocks. Its work list has items of 256 keys
    (``Tiling(backward=256)``), its grid an even number of CTAs.
    """

    def __init__(
        self,
        head_dim: int,
        ratio: int,
        masks: Masks,
        *,
        rotate: bool,
        causal_scale: bool = False,
        arch: str = "sm_100a",
        stages: int = 3,
        emulated: int | None = None,
    ) -> None:
        super().__init__(
            head_dim,
            ratio,
            masks,
            rotate=rotate,
            causal_scale=causal_scale,
            arch=arch,
            stages=stages,
            emulated=emulated,
        )
        self.tensor = PairTensorMemory(head_dim)
        self.shared = PairSharedMemory(head_dim, stages)

    @cute.jit
    def __call__(
        self,
        mQ: cute.Tensor,
        mK: cute.Tensor,
        mV: cute.Tensor,
        mdO: cute.Tensor,
        mdK: cute.Tensor,
        mdV: cute.Tensor,
        mdQ: cute.Tensor,
        turns: cute.Tensor,
        mLse: cute.Tensor,
        mDelta: cute.Tensor,
        eQ: cute.Tensor,
        eK: cute.Tensor,
        eV: cute.Tensor,
        edO: cute.Tensor,
        prescale: cute.Tensor,
        items: cute.Tensor,
        count: cute.Tensor,
        cu_q: cute.Tensor,
        cu_k: cute.Tensor,
        columns_q: cute.Tensor,
        score_scale: Float32,
        softmax_scale: Float32,
        left: Int32,
        right: Int32,
        section: Int32,
        ctas: Int32,
        stream: cuda.CUstream,
    ):
        d, stages = self.head_dim, self.stages
        f8 = Float8E4M3FN
        # tokens x d x heads
        mQ, mK, mV, mdO = (cute.make_tensor(x.iterator, cute.select(x.layout, [0, 2, 1])) for x in (mQ, mK, mV, mdO))
        atoms, sources, layouts = self.copies({"K": mK, "V": mV, "Kc": mK, "Q": mQ, "Qc": mQ, "dO": mdO, "dOc": mdO})

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
            numbers: cute.struct.Align[cute.struct.MemRange[Float32, 4 * HALF * stages], 16]
            q_scales: cute.struct.Align[cute.struct.MemRange[Int32, TILE * stages], 128]
            do_scales: cute.struct.Align[cute.struct.MemRange[Int32, TILE * stages], 128]
            p_scales: cute.struct.Align[cute.struct.MemRange[Int32, TILE], 128]
            k_scales: cute.struct.Align[cute.struct.MemRange[Int32, 2 * TILE], 128]
            row_scales: cute.struct.Align[cute.struct.MemRange[Int32, 2 * TILE], 128]
            ds_scales: cute.struct.Align[cute.struct.MemRange[Int32, TILE], 128]
            sK: cute.struct.Align[cute.struct.MemRange[f8, TILE * d], 1024]
            sV: cute.struct.Align[cute.struct.MemRange[f8, TILE * d], 1024]
            sKc: cute.struct.Align[cute.struct.MemRange[f8, TILE * d], 1024]
            sQ: cute.struct.Align[cute.struct.MemRange[f8, HALF * d * stages], 1024]
            sQc: cute.struct.Align[cute.struct.MemRange[f8, HALF * d * stages], 1024]
            sdO: cute.struct.Align[cute.struct.MemRange[f8, HALF * d * stages], 1024]
            sdOc: cute.struct.Align[cute.struct.MemRange[f8, HALF * d * stages], 1024]
            sP: cute.struct.Align[cute.struct.MemRange[Uint8, TILE * TILE], 1024]
            sdS: cute.struct.Align[cute.struct.MemRange[Uint8, TILE * TILE], 1024]
            sRows: cute.struct.Align[cute.struct.MemRange[Uint8, TILE * TILE], 1024]
            sdQ: cute.struct.Align[cute.struct.MemRange[Float16, HALF * d], 128]

        self.Storage = Storage
        self.shared.check(Storage)
        self.kernel(
            atoms,
            sources,
            (mdK, mdV, mdQ, turns),
            (mLse, mDelta, prescale),
            (eQ, edO, eK, eV),
            KeyTables(items, count, cu_q, cu_k, columns_q),
            (score_scale, softmax_scale, left, right, section),
            layouts,
        ).launch(
            grid=[ctas, 1, 1], block=[THREADS, 1, 1], cluster=[2, 1, 1], stream=stream, min_blocks_per_mp=1
        )  # fmt: skip

    def copies(self, tensors):
        """Copy atoms, their sources and the layouts in shared memory, by name; c: half of the channels."""
        d = self.head_dim
        shapes = {"K": (TILE, d), "V": (TILE, d), "Kc": (ITEM, d // 2)}
        shapes |= {"Q": (HALF, d), "Qc": (TILE, d // 2), "dO": (HALF, d), "dOc": (TILE, d // 2)}
        load = cpasync.CopyBulkTensorTileG2SOp(tcgen05.CtaGroup.TWO)
        atoms, sources, layouts = {}, {}, {}
        for name, shape in shapes.items():
            tile = layouts[name] = cute.tile_to_shape(self._atom(shape[1]), shape, (0, 1))
            atoms[name], sources[name] = cpasync.make_tiled_tma_atom(load, tensors[name], tile, shape)
            if name[0] not in "KV":
                layouts[name] = cute.tile_to_shape(self._atom(shape[1]), (*shape, self.stages), (0, 1, 2))
        return atoms, sources, layouts

    @staticmethod
    def _atom(width):
        # Rows of ``width`` bytes, eight to a group, are one swizzle width.
        bits = {128: 3, 64: 2, 32: 1}[width]
        return cute.make_composed_layout(
            cute.make_swizzle(bits, 4, 3), 0, cute.make_layout((8, width), stride=(width, 1))
        )

    @cute.kernel
    def kernel(self, atoms, sources, outputs, rows, exponents, tables, scalars, layouts):
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp == LOAD:
            for atom in atoms.values():
                cpasync.prefetch_descriptor(atom)
        storage = SmemAllocator().allocate(self.Storage)
        # Arrivals that complete a phase. Products commit once, on both CTAs; loads come once and by bytes and number
        # warps of both where the first CTA's product warp waits; others come once per warp, of both CTAs there.
        counts = dict(kv_full=3, kv_empty=9, q_full=3, q_empty=1, do_full=3, do_empty=1, n_full=1, n_empty=8)
        counts |= dict(s_full=1, s_read=8, p_full=16, p_empty=1, dp_full=1, ds_full=16, dq_full=1, dq_read=8)
        counts |= dict(dkv_full=1, dkv_read=16)
        barriers = {name: getattr(storage, name).data_ptr() for name in counts}
        if warp == LOAD:
            with cute.arch.elect_one():
                self.init_barriers(barriers, counts)
        cute.arch.mbarrier_init_fence()
        if warp == PRODUCTS:
            cute.arch.alloc_tmem(self.tensor.columns, storage.tensor_base.ptr, is_two_cta=True)
            cute.arch.relinquish_tmem_alloc_permit(is_two_cta=True)
        thread = cute.arch.thread_idx()[0]
        p_scales = storage.p_scales.get_tensor(cute.make_layout(TILE))
        row_scales = storage.row_scales.get_tensor(cute.make_layout(2 * TILE))
        if thread < TILE:
            p_scales[thread] = Int32((ONE - gradients.SHIFT) * 0x01010101)
        if thread < 2 * TILE:
            row_scales[thread] = Int32(ONE * 0x01010101)  # an atom is 128 rows, of which 64 are used
        cute.arch.fence_view_async_shared()
        ptx.fence_before()
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()
        ptx.fence_after()

        shared = {}
        for name, layout in layouts.items():
            shared[name] = getattr(storage, "s" + name).get_tensor(layout.outer, swizzle=layout.inner)
        numbers = storage.numbers.get_tensor(cute.make_layout((self.stages, HALF, 4), stride=(4 * HALF, 4, 1)))
        atom_ring = cute.make_layout((self.stages, TILE), stride=(TILE, 1))
        q_scales, do_scales = (x.get_tensor(atom_ring) for x in (storage.q_scales, storage.do_scales))
        k_scales = storage.k_scales.get_tensor(cute.make_layout((2, TILE), stride=(TILE, 1)))
        names = ("sQ", "sdO", "sK", "sV", "sQc", "sdOc", "sKc", "sP", "sdS", "sRows", "q_scales", "do_scales")
        names += ("p_scales", "k_scales", "row_scales", "ds_scales")
        starts = {name: Int32(getattr(storage, name).data_ptr().toint()) for name in names}
        work = (tables, scalars, outputs[0].shape[1])
        if warp < REDUCTION:
            cute.arch.setmaxregister_increase(COMPUTE_REGISTERS)
            self.compute((numbers, starts), exponents, outputs, work, barriers)
        elif warp < LOAD:
            cute.arch.setmaxregister_decrease(REDUCTION_REGISTERS)
            self.reduce(storage.sdQ.data_ptr(), rows[2], outputs, work, barriers)
        else:
            cute.arch.setmaxregister_decrease(OTHER_REGISTERS)
            if warp == LOAD:
                self.load(atoms, sources, shared, work, barriers)
            if warp == NUMBERS:
                self.load_numbers(rows, exponents, (numbers, q_scales, do_scales, k_scales), work, barriers)
            if warp == PRODUCTS and cute.arch.block_idx_in_cluster() == 0:
                self.multiply(starts, work, barriers)
        # Neither CTA leaves while the other may still reach into it.
        ptx.fence_before()
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()
        ptx.fence_after()
        if ptx.thread_index() // 32 == PRODUCTS:
            base = cute.arch.retrieve_tmem_ptr(Float32, 16, storage.tensor_base.ptr)
            cute.arch.dealloc_tmem(base, self.tensor.columns, is_two_cta=True)

    def item(self, at, work) -> KeyItem:
        tables, (_, _, left, right, section), _ = work
        return key_item_at(at, section, left, right, tables, self.masks, ITEM)

    def first_key(self, item, half, warp):
        return item.k0 + TILE * (warp // 2) + HALF * half

    def own_keys(self, item):
        return item._replace(k0=item.k0 + TILE * cute.arch.block_idx_in_cluster())

    def start(self):
        return cute.arch.block_idx()[0] // 2, cute.arch.grid_dim()[0] // 2

    def arrive(self, barrier):
        ptx.arrive_first(barrier, stored=False)

    @cute.jit
    def load(self, atoms, sources, shared, work, barriers):
        """Load warp. Copies of both CTAs complete on the first one's barriers."""
        d = self.head_dim
        rank = cute.arch.block_idx_in_cluster()
        at, stride = self.start()
        items, step = Int32(0), Int32(0)
        while self.is_item(at, work):
            item = self.item(at, work)
            if item.first < item.stop:
                cute.arch.mbarrier_wait(barriers["kv_empty"], (items + 1) & 1)
                if rank == 0:
                    with cute.arch.elect_one():
                        cute.arch.mbarrier_arrive_and_expect_tx(barriers["kv_full"], 6 * TILE * d)
                for name in ("K", "V", "Kc"):
                    tiles = cute.domain_offset((item.k_start + item.k0, 0), sources[name][None, None, item.kv])
                    shape = (ITEM, d // 2) if const_expr(name == "Kc") else (TILE, d)
                    place = (0, rank) if const_expr(name == "Kc") else (rank, 0)
                    s, g = self._partition(atoms[name], shared[name], cute.local_tile(tiles, shape, place))
                    cute.copy(atoms[name], g, s, tma_bar_ptr=barriers["kv_full"])
                items += 1
            for h in cutlass.range(self.ratio, unroll=1):
                head = item.kv * self.ratio + h
                names = ("Q", "Qc", "dO", "dOc")
                rows = {n: cute.domain_offset((item.q_start, 0), sources[n][None, None, head]) for n in names}
                tiles = {
                    n: cute.local_tile(x, (TILE, d // 2), (None, rank)) if n[-1] == "c"
                    else cute.local_tile(x, (HALF, d), (None, 0))
                    for n, x in rows.items()
                }  # fmt: skip
                parts = {n: self._partition(atoms[n], shared[n], x) for n, x in tiles.items()}
                for j in cutlass.range(item.first, item.stop, unroll=1):
                    stage, phase = step % self.stages, (step // self.stages + 1) & 1
                    for name, pair in (("q", ("Q", "Qc")), ("do", ("dO", "dOc"))):
                        cute.arch.mbarrier_wait(barriers[name + "_empty"] + stage, phase)
                        bar = barriers[name + "_full"] + stage
                        if rank == 0:
                            with cute.arch.elect_one():
                                cute.arch.mbarrier_arrive_and_expect_tx(bar, 2 * TILE * d)
                        for n, place in zip(pair, (2 * j + rank, j), strict=True):
                            s, g = parts[n]
                            cute.copy(atoms[n], g[None, place], s[None, stage], tma_bar_ptr=bar)
                    step += 1
            at += stride

    @cute.jit
    def load_numbers(self, rows, exponents, shared, work, barriers):
        """Number warp: what this CTA's 64 queries of a step carry, and scale atoms for all queries and keys."""
        mLse, mDelta, _ = rows
        eQ, edO, eK, _ = exponents
        numbers, q_scales, do_scales, k_scales = shared
        lane, rank = cute.arch.lane_idx(), cute.arch.block_idx_in_cluster()
        at, stride = self.start()
        items, step = Int32(0), Int32(0)
        while self.is_item(at, work):
            item = self.item(at, work)
            if item.first < item.stop:
                cute.arch.mbarrier_wait(barriers["kv_empty"], (items + 1) & 1)
                for i in cutlass.range_constexpr(2):
                    word = Int32(0)
                    for b in cutlass.range_constexpr(4):
                        key = cutlass.min(item.k0 + TILE * i + BLOCK * b, item.len_k - 1)
                        word = word | Int32(eK[item.kv, item.k_start + key]) << 8 * b
                    for n in cutlass.range_constexpr(4):
                        k_scales[i, 32 * n + lane] = word
                cute.arch.fence_view_async_shared()
                ptx.arrive_first(barriers["kv_full"])
                items += 1
            for h in cutlass.range(self.ratio, unroll=1):
                head = item.kv * self.ratio + h
                for j in cutlass.range(item.first, item.stop, unroll=1):
                    stage, phase = step % self.stages, (step // self.stages + 1) & 1
                    cute.arch.mbarrier_wait(barriers["n_empty"] + stage, phase)
                    for b in cutlass.range_constexpr(2):
                        row = BLOCK * b + lane
                        query = j * TILE + HALF * rank + row
                        token = item.q_start + cutlass.min(query, item.len_q - 1)
                        lse2, delta = mLse[head, token], mDelta[head, token]
                        # Rows past the document's end and rows that see no key have no weights and no gradient.
                        live = query < item.len_q and lse2 != -Float32.inf
                        e_q, e_do = Int32(eQ[head, token]), Int32(edO[head, token])
                        numbers[stage, row, ADD] = gradients.SHIFT - lse2 if live else -Float32.inf
                        numbers[stage, row, FACTOR] = work[1][0] * ptx.as_float(e_q << 23)
                        numbers[stage, row, LESS] = -delta if live else Float32(0.0)
                        numbers[stage, row, DO] = ptx.as_float(e_do << 23) if live else Float32(0.0)
                    ptx.arrive(barriers["n_full"] + stage)
                    q_word, do_word = Int32(0), Int32(0)
                    for b in cutlass.range_constexpr(4):
                        token = item.q_start + cutlass.min(j * TILE + BLOCK * b, item.len_q - 1)
                        q_word = q_word | Int32(eQ[head, token]) << 8 * b
                        do_word = do_word | Int32(edO[head, token]) << 8 * b
                    for i in cutlass.range_constexpr(2):
                        name = ("q", "do")[i]
                        cute.arch.mbarrier_wait(barriers[name + "_empty"] + stage, phase)
                        for n in cutlass.range_constexpr(4):
                            (q_scales, do_scales)[i][stage, 32 * n + lane] = (q_word, do_word)[i]
                        cute.arch.fence_view_async_shared()
                        ptx.arrive_first(barriers[name + "_full"] + stage)
                    step += 1
            at += stride

    @cute.jit
    def multiply(self, starts, work, barriers):
        """Product warp of the first CTA, for both; a turn as in ``Backward.multiply``."""
        d, tensor = self.head_dim, self.tensor
        size, atom = HALF * d, 4 * TILE
        at, stride = self.start()
        items, step = Int32(0), Int32(0)
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
                    ptx.score_product(tensor.scores, q, starts["sK"], TILE, d, ctas=2)
                    ptx.commit_both(barriers["s_full"])
                if n > 0:
                    more = Int32(n > 1)
                    old_q, old_do = starts["sQc"] + size * before, starts["sdOc"] + size * before
                    cute.arch.mbarrier_wait(barriers["p_full"], parity)
                    ptx.fence_after()
                    self.copy_scales(P_SCALE, starts["p_scales"], DO_SCALE, starts["do_scales"] + atom * before)
                    ptx.transposed_product(
                        Int32(tensor.dv), starts["sP"], old_do, Int32(tensor.scales(P_SCALE)),
                        Int32(tensor.scales(DO_SCALE)), more, d, ctas=2,
                    )  # fmt: skip
                    ptx.commit_both(barriers["p_empty"])
                    ptx.commit_both(barriers["do_empty"] + before)
                    cute.arch.mbarrier_wait(barriers["ds_full"], parity)
                    ptx.fence_after()
                    for i in cutlass.range_constexpr(2):
                        self.copy_scales(
                            ROW_SCALE + i, starts["row_scales"] + atom * i, K_SCALE + i, starts["k_scales"] + atom * i
                        )  # fmt: skip
                    ptx.pair_product(
                        Int32(tensor.dq), starts["sRows"], starts["sKc"], Int32(tensor.scales(ROW_SCALE)),
                        Int32(tensor.scales(K_SCALE)), d,
                    )  # fmt: skip
                    ptx.commit_both(barriers["dq_full"])
                    self.copy_scales(DS_SCALE, starts["ds_scales"], Q_SCALE, starts["q_scales"] + atom * before)
                    ptx.transposed_product(
                        Int32(tensor.dk), starts["sdS"], old_q, Int32(tensor.scales(DS_SCALE)),
                        Int32(tensor.scales(Q_SCALE)), more, d, ctas=2,
                    )  # fmt: skip
                    ptx.commit_both(barriers["q_empty"] + before)
                if n < steps:
                    cute.arch.mbarrier_wait(barriers["s_read"] + 1, parity)
                    ptx.fence_after()
                    ptx.score_product(tensor.scores + HALF, q, starts["sK"] + HALF * d, TILE, d, ctas=2)
                    ptx.commit_both(barriers["s_full"] + 1)
                    cute.arch.mbarrier_wait(barriers["do_full"] + stage, phase)
                    cute.arch.mbarrier_wait(barriers["dq_read"], parity)
                    ptx.fence_after()
                    ptx.score_product(Int32(tensor.dp), do, starts["sV"], ITEM, d, ctas=2)
                    ptx.commit_both(barriers["dp_full"])
                    step += 1
            if steps > 0:
                ptx.commit_both(barriers["kv_empty"])
                ptx.commit_both(barriers["dkv_full"])
                items += 1
            at += stride

    def copy_scales(self, first, first_atom, second, second_atom):
        ptx.copy_scales(Int32(self.tensor.scales(first)), first_atom, ctas=2)
        ptx.copy_scales(Int32(self.tensor.scales(second)), second_atom, ctas=2)

    @cute.jit
    def step(
        self, step, j, masked: cutlass.Constexpr, half, warp, row, factors, item, shared, scalars, barriers
    ):  # fmt: skip
        """Codes of P and dS of this CTA's 64 queries and 64 keys per warp, to the CTA that has the keys."""
        numbers, starts = shared
        stage, parity = step % self.stages, step & 1
        rank = cute.arch.block_idx_in_cluster()
        lane, lanes, part = row % 32, warp << 21, warp // 2  # part: which 128 of the pair's keys
        block = warp % 2  # of queries
        row = BLOCK * block + lane
        cute.arch.mbarrier_wait(barriers["n_full"] + stage, (step // self.stages) & 1)
        add, factor, less, do = (numbers[stage, row, n] for n in range(4))
        ptx.arrive(barriers["n_empty"] + stage)
        cute.arch.mbarrier_wait(barriers["s_full"] + half, parity)
        ptx.fence_after()
        scores: list[Any] = []
        for b in cutlass.range_constexpr(BLOCKS):
            column = self.tensor.scores + HALF * half + BLOCK * b
            scores = [*scores, gradients.pairs(ptx.load_columns(column + lanes, BLOCK))]
        ptx.wait_loads()
        ptx.fence_before()
        self.arrive(barriers["s_read"] + half)
        query = j * TILE + HALF * rank + row
        if const_expr(masked):
            first = self.first_key(item, half, warp)
            seen = softmax.seen_keys(query, first, item.shift, item.len_k, scalars[2], scalars[3], self.masks)
        p: list[Any] = []
        for b in cutlass.range_constexpr(BLOCKS):
            weights = gradients.weights(scores[b], factor * factors[0, b], add, self.emulated)
            p = [*p, gradients.hide(weights, seen[b]) if const_expr(masked) else weights]
        cute.arch.mbarrier_wait(barriers["p_empty"], (step + 1) & 1)
        codes = ptx.in_cluster(starts["sP"], part)
        for b in cutlass.range_constexpr(BLOCKS):
            self.store_codes(gradients.codes(p[b]), codes, HALF * rank + row, BLOCKS * half + b)
        cute.arch.fence_proxy("async.shared", space="cluster")
        ptx.arrive_first(barriers["p_full"])
        cute.arch.mbarrier_wait(barriers["dp_full"], parity)
        # The upper scores came after the products that read dS of the step before.
        cute.arch.mbarrier_wait(barriers["s_full"] + 1, parity)
        ptx.fence_after()
        codes, scales = ptx.in_cluster(starts["sdS"], part), ptx.in_cluster(starts["ds_scales"], part)
        for b in cutlass.range_constexpr(BLOCKS):
            keys = BLOCKS * half + b
            dp = gradients.pairs(ptx.load_columns(self.tensor.dp + BLOCK * keys + lanes, BLOCK))
            ptx.wait_loads()
            ds = gradients.scores_gradient(dp, p[b], do * factors[1, b], less)
            code, scale = gradients.exponent(cute.arch.warp_redux_sync(gradients.largest(ds), "max"))
            words = gradients.codes(gradients.scaled(ds, scale))
            self.store_codes(words, codes, HALF * rank + row, keys)
            self.store_codes(words, starts["sRows"] + HALF * TILE * part, row, keys, "cta")
            # Rows 32 apart share 16 bytes of a scale atom.
            ptx.store_byte(scales + 16 * lane + 4 * keys + 2 * rank + block, code)
            rows = starts["row_scales"] + 4 * TILE * part + 16 * lane + 4 * block + keys
            ptx.store_byte(ptx.in_cluster(rows, rank), code)
        ptx.fence_before()
        cute.arch.fence_proxy("async.shared", space="cluster")
        ptx.arrive_first(barriers["ds_full"])
        return step + 1

    @staticmethod
    def store_codes(words, base, row, block, space="cluster"):
        """32 codes of a row, the block's of four, to a tile whose rows of 128 bytes are one swizzle width."""
        for n in range(2):
            place = base + row * TILE + (((2 * block + n) ^ row % 8) << 4)
            ptx.store_shared(place, words[4 * n : 4 * n + 4], space=space)

    @cute.jit
    def reduce(self, pointer, prescale, outputs, work, barriers):
        """Reduction warps: 32 of this CTA's 64 queries and half of the channels each, as in ``Backward.reduce``."""
        mdQ = outputs[2]
        d = self.head_dim
        thread = cute.arch.thread_idx()[0] % TILE
        warp, lane = cute.arch.make_warp_uniform(thread // 32), thread % 32
        rank = cute.arch.block_idx_in_cluster()
        slab = Int32(pointer.toint()) + warp * (32 * d)  # twice 16 queries of half of the channels
        at, stride = self.start()
        step = Int32(0)
        while self.is_item(at, work):
            item = self.item(at, work)
            for h in cutlass.range(self.ratio, unroll=1):
                head = item.kv * self.ratio + h
                for j in cutlass.range(item.first, item.stop, unroll=1):
                    query = j * TILE + HALF * rank + BLOCK * (warp % 2)
                    scales = []
                    for n in cutlass.range_constexpr(4):
                        where = item.document
                        if const_expr(self.causal_scale):
                            where = item.q_start + cutlass.min(query + lane // 4 + 8 * n, item.len_q - 1)
                        scales = [*scales, ptx.as_float((prescale[head, where] + 127) << 23)]
                    if lane == 0:
                        cute.arch.cp_async_bulk_wait_group(0, read=True)
                    cute.arch.sync_warp()
                    cute.arch.mbarrier_wait(barriers["dq_full"], step & 1)
                    ptx.fence_after()
                    for s in cutlass.range_constexpr(2):
                        x = ptx.load_fragments(Int32(self.tensor.dq) + ((warp * 32 + 16 * s) << 16), d // 16)
                        ptx.wait_loads()
                        for m in cutlass.range_constexpr(d // 32):
                            words = self.half_words(x[8 * m : 8 * m + 8], scales[2 * s : 2 * s + 2])
                            ptx.store_shared(slab + (((d // 32) * s + m) * 32 + lane) * 16, words)
                    ptx.fence_before()
                    self.arrive(barriers["dq_read"])
                    cute.arch.fence_view_async_shared()
                    cute.arch.sync_warp()
                    if lane == 0 and query < item.len_q:
                        place = (Int64(head) * mdQ.shape[1] + item.column_q + query) * d + 8 * d * (warp // 2)
                        for s in cutlass.range_constexpr(2):
                            ptx.bulk_add_half(mdQ.iterator + (place + 16 * d * s), slab + 16 * d * s, 16 * d)
                        cute.arch.cp_async_bulk_commit_group()
                    step += 1
            at += stride
        if lane == 0:
            cute.arch.cp_async_bulk_wait_group(0, read=True)
