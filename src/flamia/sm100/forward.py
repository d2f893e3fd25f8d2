"""MXFP8 attention forward on Blackwell, batched and packed: the twin of ``reference.forward.forward``.

A CTA works on two tiles of 128 queries (paper 3.5). One warp loads tiles by TMA, one assembles scale factors from the
per-token tables, one issues products, two warpgroups do a softmax tile each with a row per thread, and four warps
rescale and store outputs. Scores are unscaled E4M3 products; exponents of q and k are factors of a row and of 32 keys
in the softmax. Values enter block-scaled.
"""

from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float8E4M3FN, Float32, Int32, Int64, Uint8, const_expr
from cutlass.cute.nvgpu import cpasync
from cutlass.memory import SmemAllocator

from flamia.sm100 import instructions as ptx
from flamia.sm100 import softmax
from flamia.sm100.memory import SharedMemory, TensorMemory
from flamia.sm100.work import TILE, Item, Masks, Tables, item_at, pick, position

THREADS = 512
CORRECTION, LOAD, SCALES, PRODUCTS = 8, 12, 13, 14  # first warp of each role; softmax is warps 0 to 7
# Of a thread of softmax, correction and other warps: with these, and no others, nothing is spilled.
REGISTERS, REGISTERS_PER_TOKEN = (200, 64, 48), (192, 80, 48)
HALF = TILE // 2  # keys of half a score product
ONES = 0x7F7F7F7F  # four UE8M0 scales of one
NO_ITEM = 0x7FFFFFFF
COLUMNS = 16  # of tensor memory, that correction warps move at a time
EMULATED = {"sm_100a": 4, "sm_103a": 0}  # pairs of powers of 16 that multiply-adds compute (docs/kernels.md)


class Forward:
    """Kernel for one head dimension, GQA ratio and kind of mask.

    Args:
        head_dim: 64 or 128. ratio: query heads per kv head. masks: which sides of the window are bounded.
        arch: target; sm_103a takes maxima of unmasked tiles with the load of scores, and has powers in plenty.
        p_shift, tau, row_sum: of the recipe. per_token: exponents of k and v differ between the tokens of a block.
        stages: tiles of K and of V in flight.
        dynamic: blocks claim items by cluster launch control; the grid then has a block per item and head. Otherwise
            a grid as large as the device deals them in turns.
        emulated: of 16 pairs of powers, those that multiply-adds compute; None: as ``EMULATED`` says, half of that
            where weights are summed up.
    """

    def __init__(
        self,
        head_dim: int,
        ratio: int,
        masks: Masks,
        *,
        arch: str = "sm_100a",
        p_shift: int = 4,
        tau: float = 4.0,
        row_sum: str = "codes",
        per_token: bool = False,
        dynamic: bool = False,
        stages: int = 4,
        emulated: int | None = None,
    ) -> None:
        if head_dim not in (64, 128):
            raise ValueError(f"head_dim must be 64 or 128, got {head_dim}")
        self.head_dim, self.ratio, self.masks, self.stages = head_dim, ratio, masks, stages
        if arch not in EMULATED:
            raise ValueError(f"arch must be {' or '.join(EMULATED)}, got {arch!r}")
        if row_sum not in ("codes", "weights"):
            raise ValueError(f"row_sum must be 'codes' or 'weights', got {row_sum!r}")
        # Weights that are summed up are in registers for longer.
        usual = EMULATED[arch] // 2 if row_sum == "weights" else EMULATED[arch]
        self.emulated = usual if emulated is None else emulated
        if not 0 <= self.emulated <= 16:
            raise ValueError(f"emulated must be 0 to 16 pairs of 16, got {emulated}")
        # With exponents per token, what the load would compare are not scores yet.
        self.arch, self.load_maxima = arch, arch == "sm_103a" and not per_token
        self.per_token, self.dynamic = per_token, dynamic
        self.factors = TILE if per_token else softmax.BLOCKS  # of a tile of keys
        self.shared = SharedMemory(head_dim, stages, self.factors)
        self.p_shift, self.tau, self.row_sum = p_shift, tau, row_sum
        self.registers = REGISTERS_PER_TOKEN if per_token else REGISTERS
        self.tensor = TensorMemory(head_dim)

    @cute.jit
    def __call__(
        self,
        mQ: cute.Tensor,  # E4M3 [T, heads, D]
        mK: cute.Tensor,  # E4M3 [Tk, kv heads, D]
        mV: cute.Tensor,  # E4M3 [Tk, kv heads, D]
        mO: cute.Tensor,  # BF16 or FP16 [T, heads, D]
        mLse: cute.Tensor,  # FP32 [heads, T], base 2
        mM: cute.Tensor,  # FP32 [heads, T]
        eQ: cute.Tensor,  # UE8M0 [heads, T]
        eK: cute.Tensor,  # UE8M0 [kv heads, Tk]
        eV: cute.Tensor,  # UE8M0 [kv heads, Tk]
        items: cute.Tensor,  # int32 [n, 4]
        count: cute.Tensor,  # int32 [1]
        cu_q: cute.Tensor,  # int32 [documents + 1]
        cu_k: cute.Tensor,
        score_scale: Float32,  # softmax_scale * log2 e
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
        sQ_layout = cute.tile_to_shape(atom, (TILE, d, 2), (0, 1, 2))
        sK_layout = cute.tile_to_shape(atom, (TILE, d, stages), (0, 1, 2))
        # tokens x d x heads
        mQ, mK, mV, mO = (cute.make_tensor(x.iterator, cute.select(x.layout, [0, 2, 1])) for x in (mQ, mK, mV, mO))
        load = cpasync.CopyBulkTensorTileG2SOp()
        tmaQ, tQ = cpasync.make_tiled_tma_atom(load, mQ, tile, (TILE, d))
        tmaK, tK = cpasync.make_tiled_tma_atom(load, mK, tile, (TILE, d))
        tmaV, tV = cpasync.make_tiled_tma_atom(load, mV, tile, (TILE, d))

        @cute.struct
        class Storage:
            q_full: cute.struct.MemRange[Int64, 2]
            q_empty: cute.struct.MemRange[Int64, 2]
            k_full: cute.struct.MemRange[Int64, stages]
            k_empty: cute.struct.MemRange[Int64, stages]
            v_full: cute.struct.MemRange[Int64, stages]
            v_empty: cute.struct.MemRange[Int64, stages]
            e_full: cute.struct.MemRange[Int64, stages]
            e_empty: cute.struct.MemRange[Int64, stages]
            s_full: cute.struct.MemRange[Int64, 2]
            s_read: cute.struct.MemRange[Int64, 2]
            p_full: cute.struct.MemRange[Int64, 2]
            o_full: cute.struct.MemRange[Int64, 2]
            f_full: cute.struct.MemRange[Int64, 8]
            f_empty: cute.struct.MemRange[Int64, 8]
            n_full: cute.struct.MemRange[Int64, 2]
            n_empty: cute.struct.MemRange[Int64, 2]
            claimed: cute.struct.MemRange[Int64, 1]
            next_items: cute.struct.MemRange[Int32, 2]
            tensor_base: Int32
            claim: cute.struct.Align[cute.struct.MemRange[Int32, 4], 16]
            factors: cute.struct.Align[cute.struct.MemRange[Float32, 2 * TILE], 16]
            k_scales: cute.struct.Align[cute.struct.MemRange[Float32, self.factors * stages], 16]
            v_exponents: cute.struct.Align[cute.struct.MemRange[Uint8, self.factors * stages], 16]
            v_tops: cute.struct.Align[cute.struct.MemRange[Int32, 4 * stages], 16]
            ones: cute.struct.Align[cute.struct.MemRange[Int32, TILE], 128]
            v_scales: cute.struct.Align[cute.struct.MemRange[Int32, TILE * stages], 128]
            p_scales: cute.struct.Align[cute.struct.MemRange[Int32, TILE * 2], 128]
            sQ: cute.struct.Align[cute.struct.MemRange[Float8E4M3FN, cute.cosize(sQ_layout)], 1024]
            sK: cute.struct.Align[cute.struct.MemRange[Float8E4M3FN, cute.cosize(sK_layout)], 1024]
            sV: cute.struct.Align[cute.struct.MemRange[Float8E4M3FN, cute.cosize(sK_layout)], 1024]

        self.Storage = Storage
        self.shared.check(Storage)
        self.kernel(
            (tmaQ, tmaK, tmaV),
            (tQ, tK, tV),
            (mO, mLse, mM),
            (eQ, eK, eV),
            Tables(items, count, cu_q, cu_k),
            (score_scale, left, right, section),
            (sQ_layout, sK_layout),
        ).launch(grid=[ctas, 1, 1], block=[THREADS, 1, 1], stream=stream, min_blocks_per_mp=1)

    @cute.kernel
    def kernel(self, atoms, sources, outputs, exponents, tables, scalars, layouts):
        sQ_layout, sK_layout = layouts
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp == LOAD:
            for atom in atoms:
                cpasync.prefetch_descriptor(atom)
        storage = SmemAllocator().allocate(self.Storage)
        names = ("q_full", "q_empty", "k_full", "k_empty", "v_full", "v_empty", "e_full", "e_empty")
        names += ("s_full", "s_read", "p_full", "o_full", "f_full", "f_empty", "n_full", "n_empty", "claimed")
        barriers = {name: getattr(storage, name).data_ptr() for name in names}
        if warp == LOAD:
            with cute.arch.elect_one():
                self._init_barriers(barriers)
        cute.arch.mbarrier_init_fence()
        if warp == PRODUCTS:
            cute.arch.alloc_tmem(self.tensor.columns, storage.tensor_base.ptr)
            cute.arch.relinquish_tmem_alloc_permit()
        thread = cute.arch.thread_idx()[0]
        ones = storage.ones.get_tensor(cute.make_layout(TILE))
        if thread < TILE:
            ones[thread] = Int32(ONES)
        cute.arch.fence_view_async_shared()
        ptx.fence_before()
        cute.arch.sync_threads()
        ptx.fence_after()

        sQ = storage.sQ.get_tensor(sQ_layout.outer, swizzle=sQ_layout.inner)
        sK = storage.sK.get_tensor(sK_layout.outer, swizzle=sK_layout.inner)
        sV = storage.sV.get_tensor(sK_layout.outer, swizzle=sK_layout.inner)
        # Scales by stage, and by tile of queries: factors 2^e_K, e_V and its largest per block; atoms of products.
        ring = cute.make_layout((self.stages, self.factors), stride=(self.factors, 1))
        tops = cute.make_layout((self.stages, softmax.BLOCKS), stride=(softmax.BLOCKS, 1))
        keys = (
            storage.k_scales.get_tensor(ring),
            storage.v_exponents.get_tensor(ring),
            storage.v_tops.get_tensor(tops),
        )
        v_scales = storage.v_scales.get_tensor(cute.make_layout((self.stages, TILE), stride=(TILE, 1)))
        p_scales = storage.p_scales.get_tensor(cute.make_layout((2, TILE), stride=(TILE, 1)))
        factors = storage.factors.get_tensor(cute.make_layout((2, TILE), stride=(TILE, 1)))
        heads = sources[0].shape[2]
        claims = (storage.claim.data_ptr(), storage.next_items.get_tensor(cute.make_layout(2)))
        work = (heads, tables, scalars, claims)
        if warp < CORRECTION:
            cute.arch.setmaxregister_increase(self.registers[0])
            self.softmax(warp // 4, keys, p_scales, factors, exponents[0], outputs, work, barriers)
        elif warp < LOAD:
            cute.arch.setmaxregister_decrease(self.registers[1])
            self.correct(factors, outputs, work, barriers)
        else:
            cute.arch.setmaxregister_decrease(self.registers[2])
            if warp == LOAD:
                self.load(atoms, sources, (sQ, sK, sV), work, barriers)
            if warp == SCALES:
                self.load_scales(exponents, keys, v_scales, work, barriers)
            if warp == PRODUCTS:
                starts = [x.iterator.toint() for x in (sQ, sK, sV, v_scales, p_scales, ones)]
                self.multiply(starts, work, barriers)
        ptx.fence_before()
        cute.arch.sync_threads()
        ptx.fence_after()
        if ptx.thread_index() // 32 == PRODUCTS:
            base = cute.arch.retrieve_tmem_ptr(Float32, 16, storage.tensor_base.ptr)
            cute.arch.dealloc_tmem(base, self.tensor.columns)

    @cute.jit
    def _init_barriers(self, barriers):
        # Arrivals that complete a phase: products commit once, loads once and by bytes, others once per warp.
        counts = dict(q_full=1, q_empty=1, k_full=1, k_empty=1, v_full=2, v_empty=1, e_full=1, e_empty=8)
        counts |= dict(s_full=1, s_read=4, p_full=8, o_full=1, f_full=1, f_empty=1, n_full=1, n_empty=14, claimed=1)
        sizes = dict(q_full=2, q_empty=2, s_full=2, s_read=2, p_full=2, o_full=2, f_full=8, f_empty=8)
        sizes |= dict(n_full=2, n_empty=2, claimed=1)
        for name, count in counts.items():
            for n in range(sizes.get(name, self.stages)):
                cute.arch.mbarrier_init(barriers[name] + n, count)

    def is_item(self, at, work):
        """Whether ``at`` is one of the list's items, for one of the heads; reads the list's length anew."""
        return at < work[1].count[0] * work[0]

    def item(self, at, work) -> Item:
        heads, tables, (_, left, right, section), _ = work
        return item_at(at, heads, self.ratio, section, left, right, tables, self.masks)

    @cute.jit
    def load(self, atoms, sources, shared, work, barriers):
        """Load warp: tiles of Q, K and V."""
        tmaQ, tmaK, tmaV = atoms
        mQ, mK, mV = sources
        sQ, sK, sV = shared
        d = self.head_dim
        turn, tile, queries = Int32(0), Int32(0), Int32(0)
        at = self.first()
        q_phases = cute.make_rmem_tensor(2, Int32)
        q_phases.fill(1)
        while self.is_item(at, work):
            item = self.item(at, work)
            gQ = cute.local_tile(
                cute.domain_offset((item.q_start + item.q0, 0), mQ[None, None, item.head]), (TILE, d), (None, 0)
            )
            gK = cute.local_tile(cute.domain_offset((item.k_start, 0), mK[None, None, item.kv]), (TILE, d), (None, 0))
            gV = cute.local_tile(cute.domain_offset((item.k_start, 0), mV[None, None, item.kv]), (TILE, d), (None, 0))
            tQs, tQg = self._partition(tmaQ, sQ, gQ)
            tKs, tKg = self._partition(tmaK, sK, gK)
            tVs, tVg = self._partition(tmaV, sV, gV)
            for i in cutlass.range_constexpr(2):
                if item.spans[i].first < item.spans[i].stop:
                    cute.arch.mbarrier_wait(barriers["q_empty"] + i, q_phases[i])
                    q_phases[i] = q_phases[i] ^ 1
                    with cute.arch.elect_one():
                        cute.arch.mbarrier_arrive_and_expect_tx(barriers["q_full"] + i, TILE * d)
                    cute.copy(tmaQ, tQg[None, i], tQs[None, i], tma_bar_ptr=barriers["q_full"] + i)
            for j in cutlass.range(item.first, item.stop, unroll=1):
                stage, phase = tile % self.stages, (tile // self.stages + 1) & 1
                cute.arch.mbarrier_wait(barriers["k_empty"] + stage, phase)
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive_and_expect_tx(barriers["k_full"] + stage, TILE * d)
                cute.copy(tmaK, tKg[None, j], tKs[None, stage], tma_bar_ptr=barriers["k_full"] + stage)
                cute.arch.mbarrier_wait(barriers["v_empty"] + stage, phase)
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive_and_expect_tx(barriers["v_full"] + stage, TILE * d)
                cute.copy(tmaV, tVg[None, j], tVs[None, stage], tma_bar_ptr=barriers["v_full"] + stage)
                tile += 1
            turn += 1
            if const_expr(self.dynamic):
                at, queries = self.claim(turn, queries, work, barriers)
            else:
                at = self.following(turn, work, barriers)

    def first(self):
        """A block's first item."""
        block = cute.arch.block_idx()[0]
        return block if self.dynamic else position(Int32(0), block, cute.arch.grid_dim()[0])

    @cute.jit
    def following(self, turn, work, barriers):
        """The item of a block's ``turn``, 1 and up; past the last one a number that is no item."""
        at = Int32(0)
        if const_expr(self.dynamic):
            slot = turn & 1
            cute.arch.mbarrier_wait(barriers["n_full"] + slot, ((turn - 1) >> 1) & 1)
            at = work[3][1][slot]
            ptx.arrive(barriers["n_empty"] + slot)
        else:
            at = position(turn, cute.arch.block_idx()[0], cute.arch.grid_dim()[0])
        return at

    @cute.jit
    def claim(self, turn, queries, work, barriers):
        """Load warp: claim the item of ``turn`` for all roles. Returns it, and the queries made so far."""
        response, items = work[3]
        at, more = Int32(0), Int32(1)
        while more != 0:
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(barriers["claimed"], 16)
                cute.arch.issue_clc_query(barriers["claimed"], response, multicast=False)
            cute.arch.mbarrier_wait(barriers["claimed"], queries & 1)
            block, _, _, valid = cute.arch.clc_response(response)
            cute.arch.fence_view_async_shared()
            queries += 1
            at = block if valid != 0 else Int32(NO_ITEM)
            # Blocks behind the last item have nothing to do; there may be others before them.
            more = Int32(1) if valid != 0 and not self.is_item(block, work) else Int32(0)
        slot = turn & 1
        cute.arch.mbarrier_wait(barriers["n_empty"] + slot, (((turn - 1) >> 1) + 1) & 1)
        items[slot] = at
        ptx.arrive(barriers["n_full"] + slot)
        return at, queries

    @staticmethod
    def _partition(atom, shared, tiles):
        one = cute.make_layout(1)
        return cpasync.tma_partition(atom, 0, one, cute.group_modes(shared, 0, 2), cute.group_modes(tiles, 0, 2))

    @cute.jit
    def load_scales(self, exponents, keys, v_scales, work, barriers):
        """Scale warp: factors 2^e_K of a tile, and the scale atom of V or, per token, its exponents."""
        _, eK, eV = exponents
        k_scales, v_exponents, v_tops = keys
        lane = cute.arch.lane_idx()
        block = lane // 8  # eight lanes to a block of 32 keys
        turn, tile = Int32(0), Int32(0)
        at = self.first()
        while self.is_item(at, work):
            item = self.item(at, work)
            for j in cutlass.range(item.first, item.stop, unroll=1):
                stage, phase = tile % self.stages, (tile // self.stages + 1) & 1
                word = Int32(0)
                if const_expr(self.per_token):
                    tokens = [item.k_start + cutlass.min(j * TILE + 32 * b + lane, item.len_k - 1) for b in range(4)]
                    k, v = ([Int32(e[item.kv, token]) for token in tokens] for e in (eK, eV))
                    cute.arch.mbarrier_wait(barriers["e_empty"] + stage, phase)
                    for b in cutlass.range_constexpr(softmax.BLOCKS):
                        k_scales[stage, 32 * b + lane] = ptx.as_float(k[b] << 23)
                        v_exponents[stage, 32 * b + lane] = Uint8(v[b])
                        v_tops[stage, b] = cute.arch.warp_redux_sync(v[b], "max")
                else:
                    token = item.k_start + cutlass.min(j * TILE + 32 * block, item.len_k - 1)
                    k, v = Int32(eK[item.kv, token]), Int32(eV[item.kv, token])
                    # The exponent of 32 keys is that of all channels: every word of the atom is the same.
                    for b in cutlass.range_constexpr(softmax.BLOCKS):
                        word = word | cute.arch.shuffle_sync(v, 8 * b) << 8 * b
                    cute.arch.mbarrier_wait(barriers["e_empty"] + stage, phase)
                    if lane % 8 == 0:
                        k_scales[stage, block] = ptx.as_float(k << 23)
                ptx.arrive(barriers["e_full"] + stage)
                cute.arch.mbarrier_wait(barriers["v_empty"] + stage, phase)
                if const_expr(not self.per_token):
                    for n in cutlass.range_constexpr(4):
                        v_scales[stage, 32 * n + lane] = word
                cute.arch.fence_view_async_shared()
                ptx.arrive(barriers["v_full"] + stage)
                tile += 1
            turn += 1
            at = self.following(turn, work, barriers)

    @cute.jit
    def multiply(self, starts, work, barriers):
        """Product warp. A step j issues, for either tile of queries, half of the scores of key tile j, the value
        product of the tile before it, and the other half: the codes of weights lie where that half goes.
        """
        sQ, sK, sV, v_scales, p_scales, ones = starts
        d, tensor = self.head_dim, self.tensor
        size = TILE * d
        turn, tile = Int32(0), Int32(0)
        at = self.first()
        items, scored = (cute.make_rmem_tensor(2, Int32) for _ in range(2))  # done so far, of either tile of queries
        items.fill(0)
        scored.fill(0)
        while self.is_item(at, work):
            item = self.item(at, work)
            for j in cutlass.range(item.first, item.stop + cutlass.min(item.stop - item.first, 1), unroll=1):
                stage, phase = tile % self.stages, (tile // self.stages) & 1
                before, before_phase = (tile - 1) % self.stages, ((tile - 1) // self.stages) & 1
                if j < item.stop:
                    cute.arch.mbarrier_wait(barriers["k_full"] + stage, phase)
                if j > item.first:
                    cute.arch.mbarrier_wait(barriers["v_full"] + before, before_phase)
                for i in cutlass.range_constexpr(2):
                    span = item.spans[i]
                    scores = j >= span.first and j < span.stop
                    values = j > span.first and j <= span.stop
                    q, k = sQ + size * i, sK + size * stage
                    if scores:
                        if j == span.first:
                            cute.arch.mbarrier_wait(barriers["q_full"] + i, items[i] & 1)
                        cute.arch.mbarrier_wait(barriers["s_read"] + i, (scored[i] + 1) & 1)
                        ptx.fence_after()
                        ptx.score_product(tensor.scores(i), q, k, HALF, d)
                    if values:
                        cute.arch.mbarrier_wait(barriers["p_full"] + i, (scored[i] + 1) & 1)
                        ptx.fence_after()
                        of_weights, of_values = ones, v_scales + 4 * TILE * before
                        if const_expr(self.per_token):
                            of_weights, of_values = p_scales + 4 * TILE * i, ones
                        ptx.copy_scales(tensor.weight_scales(i), of_weights)
                        ptx.copy_scales(tensor.value_scales(i), of_values)
                        ptx.value_product(
                            tensor.outputs(i), tensor.weights(i), sV + size * before, tensor.weight_scales(i),
                            tensor.value_scales(i), Int32(j - 1 > span.first), d,
                        )  # fmt: skip
                    if scores:
                        ptx.score_product(tensor.scores(i) + HALF, q, k + HALF * d, HALF, d)
                        ptx.commit(barriers["s_full"] + i)
                        scored[i] = scored[i] + 1
                    if scores and j == span.stop - 1:
                        ptx.commit(barriers["q_empty"] + i)
                    if values and j == span.stop:
                        ptx.commit(barriers["o_full"] + i)
                        items[i] = items[i] + 1
                if j > item.first:
                    ptx.commit(barriers["v_empty"] + before)
                if j < item.stop:
                    ptx.commit(barriers["k_empty"] + stage)
                    tile += 1
            turn += 1
            at = self.following(turn, work, barriers)

    @cute.jit
    def softmax(self, i, keys, p_scales, factors, eQ, outputs, work, barriers):
        """Softmax warpgroup i: the tile of queries i of each item, a row per thread."""
        _, mLse, mM = outputs
        thread = cute.arch.thread_idx()[0] % TILE
        warp = thread // 32
        row = cute.make_rmem_tensor(2, Float32)
        counts = cute.make_rmem_tensor(3, Int32)  # key tiles passed, key tiles worked on, factors sent
        counts.fill(0)
        turn = Int32(0)
        at = self.first()
        while self.is_item(at, work):
            item = self.item(at, work)
            span = pick(item.spans, i)
            query = item.q0 + ptx.thread_index()  # warps 0 to 7, 128 queries each
            token = item.q_start + cutlass.min(query, item.len_q - 1)
            q_scale = work[2][0] * ptx.as_float(Int32(eQ[item.head, token]) << 23)
            softmax.reset(row)
            common = (i, warp, thread, row, counts, query, q_scale, item, keys, p_scales, factors, work[2], barriers)
            some = cutlass.min(span.stop - span.first, 1)
            step = self.step_per_token if self.per_token else self.step
            self.skip(item.stop * (1 - some) + span.first * some - item.first, counts, barriers)
            if const_expr(self.masks.left):
                for j in cutlass.range(span.first, span.clear, unroll=1):
                    step(j, True, *common)
            for j in cutlass.range(span.clear, span.clouded, unroll=1):
                step(j, False, *common)
            for j in cutlass.range(span.clouded, span.stop, unroll=1):
                step(j, True, *common)
            self.skip((item.stop - span.stop) * some, counts, barriers)
            total = row[softmax.SUM]
            unseen = total == 0.0
            inverse = Float32(0.0) if unseen else 1.0 / total
            self.send(inverse, i, warp, thread, counts, factors, barriers)
            if query < item.len_q:
                mLse[item.head, token] = -Float32.inf if unseen else row[softmax.M] + (ptx.log2(total) - self.p_shift)
                mM[item.head, token] = Float32(0.0) if unseen else row[softmax.M]
            turn += 1
            at = self.following(turn, work, barriers)

    @cute.jit
    def skip(self, tiles, counts, barriers):
        """Pass over scales of key tiles that only the other tile of queries sees."""
        for _ in cutlass.range(tiles, unroll=1):
            stage, phase = counts[0] % self.stages, (counts[0] // self.stages) & 1
            cute.arch.mbarrier_wait(barriers["e_full"] + stage, phase)
            ptx.arrive(barriers["e_empty"] + stage)
            counts[0] = counts[0] + 1

    @cute.jit
    def step(
        self, j, masked: cutlass.Constexpr, i, warp, thread, row, counts, query, q_scale, item, keys, p_scales, factors,
        scalars, barriers,
    ):  # fmt: skip
        """Softmax of key tile j: scores in tensor memory -> codes of weights. masked: rows may not see every key."""
        lanes = warp << 21  # lane 32 * warp, in the upper half of an address
        stage, phase = counts[0] % self.stages, (counts[0] // self.stages) & 1
        cute.arch.mbarrier_wait(barriers["e_full"] + stage, phase)
        scale = [cute.arch.fmax(q_scale * keys[0][stage, b], softmax.LEAST_FACTOR) for b in range(softmax.BLOCKS)]
        ptx.arrive(barriers["e_empty"] + stage)
        cute.arch.mbarrier_wait(barriers["s_full"] + i, counts[1] & 1)
        ptx.fence_after()
        blocks: list[Any] = []
        tops: list[Any] = []
        for b in cutlass.range_constexpr(softmax.BLOCKS):
            address = self.tensor.scores(i) + softmax.BLOCK * b + lanes
            if const_expr(self.load_maxima and not masked):
                block, top = ptx.load_columns_max(address, softmax.BLOCK)
                blocks, tops = [*blocks, block], [*tops, top]
            else:
                blocks = [*blocks, ptx.load_columns(address, softmax.BLOCK)]
        ptx.wait_loads()
        ptx.fence_before()
        ptx.arrive(barriers["s_read"] + i)
        if const_expr(masked):
            seen = self.seen(j, query, item, scalars)
            blocks = [softmax.hide(block, seen[b]) for b, block in enumerate(blocks)]
        if const_expr(len(tops) == 0):
            tops = [softmax.block_maximum(block) for block in blocks]
        moved, add = softmax.row_reference(tops, scale, row, self.tau, self.p_shift, masked or self.masks.left)
        self.send(moved, i, warp, thread, counts, factors, barriers)
        sums = (Float32(0.0), Float32(0.0))
        for b in cutlass.range_constexpr(softmax.BLOCKS):
            weights = softmax.powers(blocks[b], scale[b], add, self.emulated)
            codes = softmax.codes(weights)
            sums = softmax.add(sums, weights if const_expr(self.row_sum == "weights") else softmax.sums(codes))
            ptx.store_columns(self.tensor.weights(i) + 8 * b + lanes, codes)
        ptx.wait_stores()
        ptx.fence_before()
        ptx.arrive(barriers["p_full"] + i)
        row[softmax.SUM] = row[softmax.SUM] + (sums[0] + sums[1])
        counts[0] = counts[0] + 1
        counts[1] = counts[1] + 1

    @cute.jit
    def step_per_token(
        self, j, masked: cutlass.Constexpr, i, warp, thread, row, counts, query, q_scale, item, keys, p_scales, factors,
        scalars, barriers,
    ):  # fmt: skip
        """``step`` for exponents per token: e_K multiplies the scores, e_V the weights, relative to the largest of the
        32 keys that the row sees; that one is the scale factor of the row's weights. Scores are read twice: with what
        the exponents need, they do not fit into registers.
        """
        lanes = warp << 21
        stage, phase = counts[0] % self.stages, (counts[0] // self.stages) & 1
        cute.arch.mbarrier_wait(barriers["e_full"] + stage, phase)
        cute.arch.mbarrier_wait(barriers["s_full"] + i, counts[1] & 1)
        ptx.fence_after()
        seen: Any = None
        if const_expr(masked):
            seen = self.seen(j, query, item, scalars)
        scale = cute.arch.fmax(q_scale, softmax.LEAST_FACTOR)
        tops: list[Any] = []
        for b in cutlass.range_constexpr(softmax.BLOCKS):
            tops = [*tops, softmax.block_maximum(self.scores_per_token(i, b, lanes, keys, stage, seen))]
        fresh = masked or self.masks.left
        moved, add = softmax.row_reference(tops, [scale] * 4, row, self.tau, self.p_shift, fresh)
        self.send(moved, i, warp, thread, counts, factors, barriers)
        exponents = cute.recast_tensor(keys[1][stage, None], Int32)
        sums, word = (Float32(0.0), Float32(0.0)), Int32(0)
        # Codes of weights go where scores of block 2 are.
        for b in cutlass.range_constexpr(2, 2 + softmax.BLOCKS):
            b = b % softmax.BLOCKS
            s = self.scores_per_token(i, b, lanes, keys, stage, seen)
            weights = softmax.powers(s, scale, add, self.emulated)
            e = [exponents[8 * b + n] for n in range(8)]
            top = softmax.largest_seen(e, ptx.again(seen[b])) if const_expr(masked) else keys[2][stage, b]
            codes, counted = softmax.folded_codes(weights, e, top)
            sums = softmax.add(sums, weights if const_expr(self.row_sum == "weights") else counted)
            word = word | top << 8 * b
            ptx.store_columns(self.tensor.weights(i) + 8 * b + lanes, codes)
        ptx.fence_before()
        ptx.arrive(barriers["s_read"] + i)
        ptx.arrive(barriers["e_empty"] + stage)
        # Rows 32 apart share 16 bytes of a scale atom.
        p_scales[i, 4 * (thread % 32) + warp] = word
        cute.arch.fence_view_async_shared()
        ptx.wait_stores()
        ptx.fence_before()
        ptx.arrive(barriers["p_full"] + i)
        row[softmax.SUM] = row[softmax.SUM] + (sums[0] + sums[1])
        counts[0] = counts[0] + 1
        counts[1] = counts[1] + 1

    def scores_per_token(self, i, b, lanes, keys, stage, seen):
        """Scores of a block times 2^e_K, -inf where a bit of ``seen`` is not set."""
        s = ptx.load_columns(self.tensor.scores(i) + softmax.BLOCK * b + lanes, softmax.BLOCK)
        ptx.wait_loads()
        s = [x * keys[0][stage, softmax.BLOCK * b + n] for n, x in enumerate(s)]
        return s if seen is None else softmax.hide(s, ptx.again(seen[b]))

    def seen(self, j, query, item, scalars):
        _, left, right, _ = scalars
        return softmax.seen_keys(query, j * TILE, item.shift, item.len_k, left, right, self.masks)

    @cute.jit
    def send(self, factor, i, warp, thread, counts, factors, barriers):
        """Hand a row's factor to the correction warp of the same rows."""
        cute.arch.mbarrier_wait(barriers["f_empty"] + 4 * i + warp, (counts[2] + 1) & 1)
        factors[i, thread] = factor
        ptx.arrive(barriers["f_full"] + 4 * i + warp)
        counts[2] = counts[2] + 1

    @cute.jit
    def correct(self, factors, outputs, work, barriers):
        """Correction warps: rescale both output accumulators where a maximum moved; at the end normalise and store."""
        thread = cute.arch.thread_idx()[0] % TILE
        warp = thread // 32
        counts = cute.make_rmem_tensor((2, 2), Int32)  # per tile of queries: factors received, outputs finished
        counts.fill(0)
        turn = Int32(0)
        at = self.first()
        while self.is_item(at, work):
            item = self.item(at, work)
            for j in cutlass.range(item.first, item.stop, unroll=1):
                for i in cutlass.range_constexpr(2):
                    span = item.spans[i]
                    if j >= span.first and j < span.stop:
                        factor = self.receive(i, warp, thread, counts, factors, barriers)
                        if cute.arch.vote_any_sync(factor != 1.0) and j > span.first:
                            self.rescale(i, warp, factor)
                        ptx.arrive(barriers["p_full"] + i)
            for i in cutlass.range_constexpr(2):
                factor = self.receive(i, warp, thread, counts, factors, barriers)
                some = item.spans[i].first < item.spans[i].stop
                if some:
                    cute.arch.mbarrier_wait(barriers["o_full"] + i, counts[i, 1] & 1)
                    ptx.fence_after()
                    counts[i, 1] = counts[i, 1] + 1
                self.store(i, warp, factor, some, item.q0 + TILE * i + thread, item, outputs[0])
                ptx.fence_before()
            turn += 1
            at = self.following(turn, work, barriers)

    @cute.jit
    def receive(self, i: cutlass.Constexpr, warp, thread, counts, factors, barriers):
        cute.arch.mbarrier_wait(barriers["f_full"] + 4 * i + warp, counts[i, 0] & 1)
        factor = factors[i, thread]
        ptx.arrive(barriers["f_empty"] + 4 * i + warp)
        counts[i, 0] = counts[i, 0] + 1
        return factor

    @cute.jit
    def rescale(self, i: cutlass.Constexpr, warp, factor):
        """Multiply a warp's rows of the output accumulator."""
        ptx.fence_after()
        for c in cutlass.range_constexpr(self.head_dim // COLUMNS):
            address = self.tensor.outputs(i) + COLUMNS * c + (warp << 21)
            ptx.store_columns(address, self._scaled(address, factor))
        ptx.wait_stores()
        ptx.fence_before()

    def _scaled(self, address, factor):
        values = ptx.load_columns(address, COLUMNS)
        ptx.wait_loads()
        pairs = [cute.arch.mul_packed_f32x2(values[n : n + 2], (factor, factor)) for n in range(0, COLUMNS, 2)]
        return [x for pair in pairs for x in pair]

    @cute.jit
    def store(self, i: cutlass.Constexpr, warp, inverse, some, query, item, mO):
        """Normalise and write a row of o; rows past the document's end are not written."""
        kind = "bf16" if const_expr(mO.element_type is BFloat16) else "f16"
        token = item.q_start + cutlass.min(query, item.len_q - 1)
        address = mO[token, None, item.head].iterator.toint()
        for c in cutlass.range_constexpr(self.head_dim // COLUMNS):
            words = cute.make_rmem_tensor(COLUMNS // 2, Int32)
            words.fill(0)
            if some:
                values = self._scaled(self.tensor.outputs(i) + COLUMNS * c + (warp << 21), inverse)
                for n in cutlass.range_constexpr(COLUMNS // 2):
                    words[n] = ptx.pack_half(values[2 * n], values[2 * n + 1], kind)
            if query < item.len_q:
                ptx.store_global(address + 2 * COLUMNS * c, [words[m] for m in range(8)])


def compile_forward(kernel: Forward, dtype: Any = BFloat16, *, compile: Any = None, options: str = "") -> Any:
    """Compile for the kernel's target and outputs of ``dtype``, without a GPU. Lengths, heads and windows stay free.

    compile: ``cute.compile`` or what stands in for it. Returns a function of the arguments of ``Forward.__call__``
    without the stream, which is torch's current one; rows of no document are not written.
    """
    fake, free = cute.runtime.make_fake_compact_tensor, cute.sym_int32
    tokens, keys, heads, kv_heads = (free() for _ in range(4))
    d = kernel.head_dim

    def packed(kind: Any, *shape: Any, align: int) -> Any:
        return fake(kind, shape, stride_order=tuple(reversed(range(len(shape)))), assumed_align=align)

    def table(kind: Any, *shape: Any) -> Any:
        return packed(kind, *shape, align=kind.width // 8)

    arguments = [
        packed(Float8E4M3FN, tokens, heads, d, align=16),
        packed(Float8E4M3FN, keys, kv_heads, d, align=16),
        packed(Float8E4M3FN, keys, kv_heads, d, align=16),
        packed(dtype, tokens, heads, d, align=32),
        table(Float32, heads, tokens),
        table(Float32, heads, tokens),
        table(Uint8, heads, tokens),
        table(Uint8, kv_heads, keys),
        table(Uint8, kv_heads, keys),
        packed(Int32, free(), 4, align=16),
        table(Int32, 1),
        table(Int32, free()),
        table(Int32, free()),
    ]
    scalars = [Float32(1.0), Int32(0), Int32(0), Int32(1), Int32(1)]
    stream = cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True)
    flags = f"--enable-tvm-ffi --gpu-arch {kernel.arch} {options}".strip()
    return (compile or cute.compile)(kernel, *arguments, *scalars, stream, options=flags)
