"""MXFP8 and NVFP4 attention backward on Hopper, batched and packed: the twin of ``reference.folded.backward``.

A CTA owns 128 keys and walks over the queries that see them, 64 at a time and ascending, for every query head of its kv
head. One producer warp loads tiles by TMA, a second one the numbers of queries, and two warpgroups of 64 keys each
compute. Scores are transposed, so that P and dS are register operands of dV and dK; dS goes through shared memory to
dQ, of which each warpgroup makes half of the channels and adds it to global memory in FP16.

The tensor core's accumulator keeps 13 bits or so: dV and dK of a step are partial products that FP32 registers add up.
"""

from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as hopper
from cutlass import BFloat16, Float8E4M3FN, Float16, Float32, Int32, Int64, Uint8, const_expr
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup
from cutlass.memory import SmemAllocator
from cutlass.tensor_utils import LayoutEnum

from flamia.sm90 import gradients
from flamia.sm90.claims import BoardStorage, ask, board_in, claim_items, init_board, posted, take
from flamia.sm90.instructions import (
    add_half,
    as_bits,
    as_float,
    clear_after,
    lane_here,
    load_acquire,
    raise_to,
)
from flamia.sm90.key_work import STEP, KeyItem, KeyTables, around, key_item_at, turn
from flamia.sm90.rows import SLAB, write_rows
from flamia.sm90.work import TILE, Masks

THREADS = 384
PRODUCER_REGISTERS, CONSUMER_REGISTERS = 24, 240
# Numbers of a step in shared memory, 32 bits each: two per query (``gradients.place``), then seven of the step: c 2^e_Q
# and C - 8 + e_Q of its two blocks, 2^(C - 8), how many tiles of keys add to dq before this one.
ADDEND, B, FACTOR, UNIT, DV, NUMBERS = 0, 80, 160, 162, 164, 168
# Exact operands: three more per query, c 2^e_Q, 2^(e_T - C + 8), 2^(e_T + e_Q).
Q_FACTOR, POWER, A, EXACT_NUMBERS = 168, 248, 328, 408
# What is needed a step later, for dq: an exponent per query, how many tiles of keys add before this one.
DQ, TURN, LATE = 0, 64, 72
NONE = -1000


class Backward:
    """Kernel for one head dimension, GQA ratio and kind of mask.

    Args:
        head_dim: 64 or 128. ratio: query heads per kv head. masks: which sides of the window are bounded.
        rotate: whether dk is rotated back. causal_scale: the accumulator's prescale is per token, not per document.
        deterministic: key tiles add to dq in the order of the list.
        exact: every token has an exponent of its own, and dS for dq one per query and 64 keys.
        format: "mxfp8", or "nvfp4", whose scores are products of the BF16 numbers that the forward's codes stand for.
        stages: steps in flight.

    Raises:
        ValueError: a head dimension, format or number of stages that there is no kernel for.
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
        format: str = "mxfp8",
        stages: int | None = None,
    ) -> None:
        if format not in ("mxfp8", "nvfp4"):
            raise ValueError(f"format must be 'mxfp8' or 'nvfp4', got {format!r}")
        if head_dim not in (64, 128):
            raise ValueError(f"head_dim must be 64 or 128, got {head_dim}")
        self.wide = format == "nvfp4"  # whether rows of q and k are BF16, and their exponents those of other codes
        stages = stages or (2 if self.wide and head_dim == 128 else 4)  # four do not fit there
        if stages not in (2, 4) or (self.wide and head_dim == 128 and stages == 4):
            raise ValueError(f"stages must be 2 or 4, 2 for format='nvfp4' with head_dim=128, got {stages}")
        self.head_dim, self.ratio, self.masks, self.stages = head_dim, ratio, masks, stages
        self.rotate, self.causal_scale, self.deterministic = rotate, causal_scale, deterministic
        self.exact, self.rows = exact, EXACT_NUMBERS if exact else NUMBERS
        self.halves = head_dim // 64
        self.sharers = 2  # warps that load numbers; none may wait for more than a stage's next use
        # Without a mask, all CTAs would read and add to the same queries at a time.
        self.around = not (deterministic or masks.left or masks.right)
        self.slab = 16 * head_dim // 2  # FP16 numbers of 16 queries and one warpgroup's channels

    @cute.jit
    def __call__(
        self,
        mQ: cute.Tensor,  # E4M3 (nvfp4: BF16) [T, heads, D]
        mK: cute.Tensor,  # E4M3 (nvfp4: BF16) [Tk, kv heads, D]
        mV: cute.Tensor,  # E4M3 [Tk, kv heads, D]
        mT: cute.Tensor,  # E4M3 [T, heads, D]
        cQ: cute.Tensor,  # E4M3 [heads, D, C], tokens in "mma" order
        cK: cute.Tensor,  # E4M3 [kv heads, D, Ck], tokens in "pairs" order
        cT: cute.Tensor,  # E4M3 [heads, D, C], tokens in "mma" order
        mdK: cute.Tensor,  # BF16 or FP16 [Tk, kv heads, D]
        mdV: cute.Tensor,  # BF16 or FP16 [Tk, kv heads, D]
        mdQ: cute.Tensor,  # FP16 [heads, C, D], zeros: 16-row slabs in ``fragment_order``
        turns: cute.Tensor,  # int32 [heads, C / 16, 2], zeros; deterministic only, else of any size
        addend: cute.Tensor,  # FP32 [heads, T], of ``Gradients``
        b: cute.Tensor,  # FP32 [heads, T]
        unit: cute.Tensor,  # int32 [heads, T]
        outside: cute.Tensor,  # int32 [heads, T]: ``Gradients.power``; exact only, else of any size
        eQ: cute.Tensor,  # UE8M0 [heads, T]
        eK: cute.Tensor,  # UE8M0 [kv heads, Tk]
        eV: cute.Tensor,  # UE8M0 [kv heads, Tk]
        prescale: cute.Tensor,  # int32 [heads, documents], or [heads, T] with the causal scale
        items: cute.Tensor,  # int32 [n, 4]
        count: cute.Tensor,  # int32 [1]
        claims: cute.Tensor,  # int32 [2]
        total: cute.Tensor,  # int32 [1]
        cu_q: cute.Tensor,  # int32 [documents + 1]
        cu_k: cute.Tensor,
        columns_q: cute.Tensor,  # int32 [documents + 1]
        columns_k: cute.Tensor,
        score_scale: Float32,  # softmax_scale * log2 e
        softmax_scale: Float32,
        left: Int32,
        right: Int32,
        section: Int32,
        ctas: Int32,
        stream: cuda.CUstream,
    ):
        d, stages = self.head_dim, self.stages
        f8, k_major = Float8E4M3FN, OperandMajorMode.K
        kind = BFloat16 if self.wide else f8
        scored, rows, steps, keys = self._atom(d, kind), self._atom(d, f8), self._atom(STEP, f8), self._atom(TILE, f8)
        sK_layout, sV_layout = (cute.tile_to_shape(x, (TILE, d), (0, 1)) for x in (scored, rows))
        sQ_layout, sT_layout = (cute.tile_to_shape(x, (STEP, d, stages), (0, 1, 2)) for x in (scored, rows))
        sKc_layout = cute.tile_to_shape(keys, (d, TILE), (0, 1))
        sQc_layout = cute.tile_to_shape(steps, (d, STEP, stages), (0, 1, 2))
        halves_layout = cute.tile_to_shape(steps, (64, STEP, stages * self.halves), (0, 1, 2))
        sdS_layout = cute.tile_to_shape(keys, (STEP, TILE, 2), (0, 1, 2))
        # tokens x d x heads, and d x tokens x heads
        mQ, mK, mV, mT = (cute.make_tensor(x.iterator, cute.select(x.layout, [0, 2, 1])) for x in (mQ, mK, mV, mT))
        cQ, cK, cT = (cute.make_tensor(x.iterator, cute.select(x.layout, [1, 2, 0])) for x in (cQ, cK, cT))
        load = cpasync.CopyBulkTensorTileG2SOp()
        q_step, t_step, step_columns = (cute.select(x, [0, 1]) for x in (sQ_layout, sT_layout, sQc_layout))
        copies = [
            cpasync.make_tiled_tma_atom(load, x, layout, tile)
            for x, layout, tile in (
                (mK, sK_layout, (TILE, d)),
                (mV, sV_layout, (TILE, d)),
                (cK, sKc_layout, (d, TILE)),
                (mQ, q_step, (STEP, d)),
                (mT, t_step, (STEP, d)),
                (cQ, step_columns, (d, STEP)),
                (cT, step_columns, (d, STEP)),
            )
        ]
        mma_s, mma_p = (
            hopper.make_trivial_tiled_mma(x, x, k_major, k_major, Float32, (2, 1, 1), (64, STEP)) for x in (kind, f8)
        )
        mma_kv = hopper.make_trivial_tiled_mma(
            f8, f8, k_major, k_major, Float32, (2, 1, 1), (64, 64), warpgroup.OperandSource.RMEM
        )
        mma_q = hopper.make_trivial_tiled_mma(f8, f8, k_major, k_major, Float32, (1, 2, 1), (64, d // 2))

        @cute.struct
        class Storage:
            kv_full: cute.struct.MemRange[Int64, 1]
            kv_empty: cute.struct.MemRange[Int64, 1]
            full: cute.struct.MemRange[Int64, stages]
            empty: cute.struct.MemRange[Int64, stages]
            ds_full: cute.struct.MemRange[Int64, 2]
            ds_empty: cute.struct.MemRange[Int64, 2]
            board: BoardStorage
            tops: cute.struct.Align[cute.struct.MemRange[Int32, 16], 8]
            shared_e: cute.struct.Align[cute.struct.MemRange[Int32, 8], 8]
            maxima: cute.struct.Align[cute.struct.MemRange[Int32, 640 if self.exact else 4], 16]
            numbers: cute.struct.Align[cute.struct.MemRange[Float32, stages * self.rows], 128]
            late: cute.struct.Align[cute.struct.MemRange[Int32, 2 * stages * LATE], 128]
            sK: cute.struct.Align[cute.struct.MemRange[kind, cute.cosize(sK_layout)], 1024]
            sV: cute.struct.Align[cute.struct.MemRange[f8, cute.cosize(sV_layout)], 1024]
            sKc: cute.struct.Align[cute.struct.MemRange[f8, cute.cosize(sKc_layout)], 1024]
            sQ: cute.struct.Align[cute.struct.MemRange[kind, cute.cosize(sQ_layout)], 1024]
            sT: cute.struct.Align[cute.struct.MemRange[f8, cute.cosize(sT_layout)], 1024]
            sQc: cute.struct.Align[cute.struct.MemRange[f8, cute.cosize(sQc_layout)], 1024]
            sTc: cute.struct.Align[cute.struct.MemRange[f8, cute.cosize(sQc_layout)], 1024]
            sdS: cute.struct.Align[cute.struct.MemRange[f8, cute.cosize(sdS_layout)], 1024]
            slabs: cute.struct.Align[cute.struct.MemRange[Int32, 8 * SLAB], 128]

        self.Storage = Storage
        self.kernel(
            tuple(atom for atom, _ in copies),
            tuple(tensor for _, tensor in copies),
            (mdK, mdV, mdQ, turns),
            (addend, b, unit, outside, prescale),
            (eQ, eK, eV),
            KeyTables(items, count, claims, total, cu_q, cu_k, columns_q, columns_k),
            (score_scale, softmax_scale, left, right),
            section,
            (mma_s, mma_p, mma_kv, mma_q),
            (sK_layout, sV_layout, sKc_layout, sQ_layout, sT_layout, sQc_layout, halves_layout, sdS_layout),
        ).launch(grid=[ctas, 1, 1], block=[THREADS, 1, 1], stream=stream, min_blocks_per_mp=1)

    @staticmethod
    def _atom(columns: int, kind: Any) -> Any:
        return warpgroup.make_smem_layout_atom(hopper.get_smem_layout_atom(LayoutEnum.ROW_MAJOR, kind, columns), kind)

    @cute.kernel
    def kernel(self, atoms, sources, outputs, numbers, exponents, tables, scalars, section, mmas, layouts):
        sK_layout, sV_layout, sKc_layout, sQ_layout, sT_layout, sQc_layout, halves_layout, sdS_layout = layouts
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp == 0:
            for atom in atoms:
                cpasync.prefetch_descriptor(atom)
        storage = SmemAllocator().allocate(self.Storage)
        names = ("kv_full", "kv_empty", "full", "empty", "ds_full", "ds_empty")
        barriers = tuple(getattr(storage, name).data_ptr() for name in names)
        tops = cute.make_tensor(storage.tops.data_ptr(), cute.make_layout((2, 4, 2)))
        # dS exponents of two blocks (exact: what ``maxima`` are relative to), [block, buffer, half of the keys]
        shared_e = cute.make_tensor(storage.shared_e.data_ptr(), cute.make_layout((2, 2, 2)))
        maxima = cute.make_tensor(storage.maxima.data_ptr(), cute.make_layout((80, 4, 2)))
        board = board_in(storage.board)
        if warp == 0:
            with cute.arch.elect_one():
                self._init_barriers(barriers)
                init_board(board, 9 + self.sharers)  # the warps that compute and load
                for i in cutlass.range_constexpr(16):
                    tops[i] = Int32(0)
        if const_expr(self.exact):
            for i in cutlass.range(cute.arch.thread_idx()[0], 640, THREADS, unroll=1):
                maxima[i] = Int32(0)
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()

        def tensor(field, layout):
            return field.get_tensor(layout.outer, swizzle=layout.inner)

        sK, sV, sKc = tensor(storage.sK, sK_layout), tensor(storage.sV, sV_layout), tensor(storage.sKc, sKc_layout)
        sQ, sT = tensor(storage.sQ, sQ_layout), tensor(storage.sT, sT_layout)
        table = cute.make_layout((self.rows, self.stages))
        values = cute.make_tensor(storage.numbers.data_ptr(), table)
        late = cute.make_tensor(storage.late.data_ptr(), cute.make_layout((LATE, 2 * self.stages)))
        heads = outputs[0].shape[1]
        work = (tables.count[0] * heads, tables, scalars, board, heads, section)
        if warp < 4:
            cute.arch.setmaxregister_decrease(PRODUCER_REGISTERS)
            if warp == 0:
                sQc, sTc = (tensor(x, sQc_layout) for x in (storage.sQc, storage.sTc))
                self.load(atoms, sources, (sK, sV, sKc, sQ, sT, sQc, sTc), work, barriers)
            elif warp <= self.sharers:
                self.load_numbers(warp - 1, numbers, exponents[0], values, late, work, barriers)
            else:

                def describe(at):
                    item = self.item(at, work)
                    token = item.k_start + cutlass.min(item.k0 + cute.arch.lane_idx() % 4 * 32, item.len_k - 1)
                    return item, pack_exponents(*(e[item.kv, token] for e in exponents[1:]))

                claim_items(board, work[0], heads, section, tables, describe)
        else:
            cute.arch.setmaxregister_increase(CONSUMER_REGISTERS)
            sQc, sTc = (tensor(x, halves_layout) for x in (storage.sQc, storage.sTc))
            sdS = tensor(storage.sdS, sdS_layout)
            shared = (sK, sV, sKc, sQ, sT, sQc, sTc, sdS)
            plain = (values, late, tops, shared_e, maxima, storage.sdS.data_ptr(), storage.slabs.data_ptr())
            self.compute(mmas, shared, plain, exponents, outputs, work, barriers)

    @cute.jit
    def _init_barriers(self, barriers):
        kv_full, kv_empty, full, empty, ds_full, ds_empty = barriers
        consumers = 8  # warps
        cute.arch.mbarrier_init(kv_full, 1)
        cute.arch.mbarrier_init(kv_empty, consumers)
        for stage in cutlass.range_constexpr(self.stages):
            cute.arch.mbarrier_init(full + stage, 2)  # the copies, and the numbers
            cute.arch.mbarrier_init(empty + stage, consumers)
        for buffer in cutlass.range_constexpr(2):
            cute.arch.mbarrier_init(ds_full + buffer, consumers)
            cute.arch.mbarrier_init(ds_empty + buffer, consumers)

    def item(self, at, work) -> KeyItem:
        _, tables, (_, _, left, right), _, heads, _ = work
        return key_item_at(at, heads, left, right, tables, self.masks)

    def place_of(self, j, item):
        """Which step is the walk's j-th."""
        return around(j, item) if const_expr(self.around) else j

    @cute.jit
    def load(self, atoms, sources, shared, work, barriers):
        """Producer warp: tiles of K and V, and of every step's queries."""
        kv_full, kv_empty, full, empty, _, _ = barriers
        mK, mV, cK, mQ, mT, cQ, cT = sources
        d = self.head_dim
        bytes_of = const_expr(2 if self.wide else 1)  # a number of Q or K
        m, n, tile = Int32(0), Int32(0), Int32(0)
        while posted(work[3], m):
            item = KeyItem(*take(work[3], m, len(KeyItem._fields), Int32(0))[0])
            if item.first < item.stop:
                cute.arch.mbarrier_wait(kv_empty, (n + 1) & 1)
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive_and_expect_tx(kv_full, (2 + bytes_of) * TILE * d)
                for i in cutlass.range_constexpr(2):
                    g = cute.domain_offset((item.k_start + item.k0, 0), (mK, mV)[i][None, None, item.kv])
                    s, g = self._partition(atoms[i], shared[i], cute.local_tile(g, (TILE, d), (0, 0)))
                    cute.copy(atoms[i], g, s, tma_bar_ptr=kv_full)
                g = cute.domain_offset((0, item.column_k + item.k0), cK[None, None, item.kv])
                s, g = self._partition(atoms[2], shared[2], cute.local_tile(g, (d, TILE), (0, 0)))
                cute.copy(atoms[2], g, s, tma_bar_ptr=kv_full)
                n += 1
            for h in cutlass.range(self.ratio, unroll=1):
                head = item.kv * self.ratio + h
                rows = [cute.domain_offset((item.q_start, 0), x[None, None, head]) for x in (mQ, mT)]
                columns = [cute.domain_offset((0, item.column_q), x[None, None, head]) for x in (cQ, cT)]
                tiles = [cute.local_tile(x, (STEP, d), (None, 0)) for x in rows]
                tiles += [cute.local_tile(x, (d, STEP), (0, None)) for x in columns]
                parts = [self._partition(atoms[3 + i], shared[3 + i], tiles[i]) for i in range(4)]
                for j in cutlass.range(item.first, item.stop, unroll=1):
                    stage, step = tile % self.stages, self.place_of(j, item)
                    cute.arch.mbarrier_wait(empty + stage, (tile // self.stages + 1) & 1)
                    with cute.arch.elect_one():
                        cute.arch.mbarrier_arrive_and_expect_tx(full + stage, (3 + bytes_of) * STEP * d)
                    for i in cutlass.range_constexpr(4):
                        s, g = parts[i]
                        cute.copy(atoms[3 + i], g[None, step], s[None, stage], tma_bar_ptr=full + stage)
                    tile += 1
            ask(work[3])
            m += 1

    @staticmethod
    def _partition(atom, shared, tiles):
        one = cute.make_layout(1)
        return cpasync.tma_partition(atom, 0, one, cute.group_modes(shared, 0, 2), cute.group_modes(tiles, 0, 2))

    @cute.jit
    def load_numbers(self, share, numbers, eQ, values, late, work, barriers):
        """Producer warps: what a step's queries bring along, two queries per lane.

        Loads of one step take as long as the step, so the warps take steps in turns. share: which of them this one is.
        """
        empty, full = barriers[3], barriers[2]
        addend, b, unit, outside, prescale = numbers
        lane = cute.arch.lane_idx()
        m, done = Int32(0), Int32(0)
        while posted(work[3], m):
            item = KeyItem(*take(work[3], m, len(KeyItem._fields), Int32(0))[0])
            for h in cutlass.range(self.ratio, unroll=1):
                head = item.kv * self.ratio + h
                ahead = (share - done % self.sharers + self.sharers) % self.sharers  # steps of others before the first
                for j in cutlass.range(item.first + ahead, item.stop, self.sharers, unroll=1):
                    tile = done + j - item.first
                    stage, slot, step = tile % self.stages, tile % (2 * self.stages), self.place_of(j, item)
                    cute.arch.mbarrier_wait(empty + stage, (tile // self.stages + 1) & 1)
                    shared_c = Int32(NONE)
                    for block in cutlass.range(2, unroll=1):
                        query = step * STEP + 32 * block + lane
                        inside = query < item.len_q
                        token = item.q_start + cutlass.min(query, item.len_q - 1)
                        added, less, power = addend[head, token], b[head, token], unit[head, token]
                        e_q = Int32(eQ[head, token]) - 127
                        added = added if inside else -Float32.inf
                        live = added != -Float32.inf
                        u = cute.arch.warp_redux_sync(power if live else Int32(NONE), "max")
                        c = cute.arch.warp_redux_sync(power - e_q if live else Int32(NONE), "max")
                        shared_c = cutlass.max(shared_c, c)
                        where = item.document
                        if const_expr(self.causal_scale):
                            where = token
                        spot = gradients.place(32 * block + lane)
                        scale_q = work[2][0]
                        if const_expr(not self.wide):
                            scale_q = scale_q * gradients.power(e_q)
                        if const_expr(self.exact):
                            apart = outside[head, token]
                            scale = gradients.power(apart)
                            less = less * scale
                            values[Q_FACTOR + spot, stage] = scale_q
                            values[POWER + spot, stage] = scale
                            values[A + spot, stage] = gradients.power(power + apart)
                        values[ADDEND + spot, stage] = added
                        values[B + spot, stage] = less if inside else Float32(0.0)
                        late[DQ + 32 * block + lane, slot] = prescale[head, where] - e_q
                        if lane == 0:
                            values[FACTOR + block, stage] = scale_q
                            values[UNIT + block, stage] = as_float(Int32(0) if u == NONE else u)
                    if lane == 0:
                        values[DV, stage] = gradients.power(shared_c)
                    if const_expr(self.deterministic):
                        rank = turn(item, j, work[2][2], work[2][3], self.masks)
                        if lane == 0:
                            late[TURN, slot] = rank
                    cute.arch.sync_warp()
                    if lane == 0:
                        cute.arch.mbarrier_arrive(full + stage)
                done += cutlass.max(item.stop - item.first, 0)
            m += 1

    @cute.jit
    def compute(self, mmas, shared, plain, exponents, outputs, work, barriers):
        """A warpgroup: 64 keys of each item."""
        kv_full, kv_empty = barriers[:2]
        mma_s, mma_p, mma_kv, mma_q = mmas
        sK, sV, sKc, sQ, sT, sQc, sTc, sdS = shared
        _, eK, eV = exponents
        thread = cute.arch.thread_idx()[0] - 128
        group = cute.arch.make_warp_uniform(thread // 128)
        warp = cute.arch.make_warp_uniform(thread // 32)
        lane = thread % 32
        threads = cute.make_layout(2, stride=128)
        part_s, part_p, part_kv, part_q = (x.get_slice(threads(group)) for x in mmas)
        a_s = [mma_s.make_fragment_A(part_s.partition_A(sK)), mma_p.make_fragment_A(part_p.partition_A(sV))]
        b_s = [mma_s.make_fragment_B(part_s.partition_B(sQ)), mma_p.make_fragment_B(part_p.partition_B(sT))]
        b_kv = [mma_kv.make_fragment_B(part_kv.partition_B(x)) for x in (sTc, sQc)]
        a_q, b_q = mma_q.make_fragment_A(part_q.partition_A(sdS)), mma_q.make_fragment_B(part_q.partition_B(sKc))
        a_kv = [mma_kv.make_fragment_A(mma_kv.partition_shape_A((TILE, STEP))) for _ in range(2)]
        x = [cute.make_rmem_tensor(mma_s.partition_shape_C((TILE, STEP)), Float32) for _ in range(2)]
        q_shape = mma_q.partition_shape_C((STEP, self.head_dim))
        # Accumulators of half the size are registers of their own: the assembler would wait for every product.
        if const_expr(self.head_dim == 128):
            x_q = [cute.make_tensor(part.iterator, cute.make_layout(q_shape)) for part in x]
        else:
            x_q = [cute.make_rmem_tensor(q_shape, Float32) for _ in range(2)]
        sums = [cute.make_rmem_tensor((2, 2, 8, self.halves), Float32) for _ in range(2)]
        words = [cute.recast_tensor(a, Int32) for a in a_kv]
        operands = (mmas, a_s, b_s, a_kv, b_kv, a_q, b_q)
        registers = (x, x_q, sums, words)
        slab = plain[6] + warp * SLAB
        m, n, tile = Int32(0), Int32(0), Int32(0)
        while posted(work[3], m):
            fields, block = take(work[3], m, len(KeyItem._fields), warp // 2)
            item = KeyItem(*fields)
            e_k, e_v = [block & 255] * 2, [block >> 8 & 255] * 2  # of the thread's two keys, in one block
            if const_expr(self.exact):
                tokens = [item.k0 + warp * 16 + lane // 4 + 8 * r for r in range(2)]
                tokens = [item.k_start + cutlass.min(token, item.len_k - 1) for token in tokens]
                e_k, e_v = ([Int32(e[item.kv, token]) for token in tokens] for e in (eK, eV))
            e_k, e_v = ([e - 127 for e in x] for x in (e_k, e_v))
            guess = (block >> 16) - 254 + 16
            for i in cutlass.range_constexpr(2):
                sums[i].fill(0.0)
            if item.first < item.stop:
                cute.arch.mbarrier_wait(kv_full, n & 1)
                place = (item, e_k, e_v, guess, group, warp, lane)
                common = (operands, registers, plain, slab, place, outputs[2:], work[2], barriers)
                for h in cutlass.range(self.ratio, unroll=1):
                    head = item.kv * self.ratio + h
                    kept = self.head(tile, item.first, head, (Int32(0),) * 3, True, False, *common)
                    if const_expr(self.halves == 2):
                        warpgroup.wait_group(0)
                        self.add_dv(tile, 1, registers, plain[0])
                    begin, middle = item.first + 1, cutlass.min(item.clear, item.stop)
                    for j in cutlass.range(begin, middle, unroll=1):
                        tile, kept = self.step(tile, j, head, kept, True, *common)
                    begin, middle = cutlass.max(begin, middle), cutlass.min(item.clouded, item.stop)
                    for j in cutlass.range(begin, middle, unroll=1):
                        tile, kept = self.step(tile, j, head, kept, False, *common)
                    if const_expr(self.masks.left):
                        for j in cutlass.range(cutlass.max(begin, middle), item.stop, unroll=1):
                            tile, kept = self.step(tile, j, head, kept, True, *common)
                    self.products(tile, kept[2], False, *common)
                    self.queries(tile, item.stop - 1, head, False, *common)
                    if const_expr(self.deterministic):
                        self.pass_on(item.stop - 1, head, place, outputs[2:])
                    tile += 1
                self.release(kv_empty)
                n += 1
            self.store(sums, outputs, item, warp, e_k, work[2][1], slab)
            m += 1

    @cute.jit
    def step(self, tile, j, head, kept, masked: cutlass.Constexpr, *common):
        """dK of the last 64 queries, P, dS and dV of the 64 from j, dQ of the last. Returns the next ``tile, kept``."""
        self.products(tile, kept[2], True, *common)
        kept = self.head(tile + 1, j, head, kept, masked, True, *common)
        self.queries(tile, j - 1, head, True, *common)
        return tile + 1, kept

    # Everything but dK and dV shares two accumulators, and one product runs while the one before is added up. The first
    # 64 channels of dV start as soon as P's registers are free, the next scores behind dK. dQ, which takes the codes of
    # both warpgroups, comes a step late, so that neither waits for the other.

    @cute.jit
    def products(
        self, tile, both, more: cutlass.Constexpr, operands, registers, plain, slab, place, targets, scalars, barriers
    ):
        """dK of a step. more: starts the next step's scores as well."""
        mmas, _, _, a_kv, b_kv, _, _ = operands
        x, _, sums, _ = registers
        _, _, full, empty, _, _ = barriers
        stage, factor, halves = tile & (self.stages - 1), gradients.power(both), const_expr(self.halves)
        for n in cutlass.range_constexpr(2 - halves, 2):
            h = n - (2 - halves)
            self.gemm(mmas[2], x[n], a_kv[1], b_kv[1][None, None, None, stage * halves + h], 2)
        if const_expr(halves == 2):
            warpgroup.wait_group(1)
            self.promote(sums[1], x[0], factor, 0)
        if const_expr(more):
            self.scores(tile + 1, operands, registers, full)
        warpgroup.wait_group(1 if more else 0)
        self.release(empty + stage)
        self.promote(sums[1], x[1], factor, halves - 1)

    @cute.jit
    def start_dv(self, tile, h: cutlass.Constexpr, operands, registers):
        """Start dV of 64 channels."""
        mmas, _, _, a_kv, b_kv, _, _ = operands
        b = b_kv[0][None, None, None, (tile & (self.stages - 1)) * self.halves + h]
        self.gemm(mmas[2], registers[0][h], a_kv[0], b, 2)

    @cute.jit
    def add_dv(self, tile, h: cutlass.Constexpr, registers, values):
        """Add dV of 64 channels up."""
        x, _, sums, _ = registers
        self.promote(sums[0], x[h], values[DV, tile & (self.stages - 1)], h)

    @cute.jit
    def queries(
        self, tile, j, head, more: cutlass.Constexpr, operands, registers, plain, slab, place, targets, scalars,
        barriers,
    ):  # fmt: skip
        """dQ of step j. more: the last 64 channels of the next step's dV are under way, and are added up."""
        mmas, _, _, _, _, a_q, b_q = operands
        x_q = registers[1]
        values, late, _, shared_e, maxima, _, _ = plain
        warp, lane = place[5:]
        ds_full, ds_empty = barriers[4:]
        buffer, slot = tile & 1, tile & (2 * self.stages - 1)
        cute.arch.mbarrier_wait(ds_full + buffer, (tile >> 1) & 1)
        for half in cutlass.range_constexpr(2):
            self.gemm(mmas[3], x_q[half], a_q[None, None, None, buffer], b_q, 2, 2 * half)
            if const_expr(half == 0 and more and self.halves == 2):
                warpgroup.wait_group(1)
                self.add_dv(tile + 1, 1, registers, values)
        scale = []
        for half in cutlass.range_constexpr(2):
            rows = [warp % 4 * 16 + lane // 4 + 8 * r for r in range(2)]
            if const_expr(self.exact):
                e = shared_e[0, buffer, half]
                tops = [maxima[gradients.place(rows[r]), tile & 3, half] for r in range(2)]
                found = [e + gradients.row_exponent(tops[r], e) for r in range(2)]
            else:
                found = [shared_e[warp % 4 // 2, buffer, half]] * 2
            scale.append([gradients.power(found[r] + late[DQ + rows[r], slot]) for r in range(2)])
        before = cute.arch.make_warp_uniform(late[TURN, slot]) if const_expr(self.deterministic) else None
        warpgroup.wait_group(0)
        self.release(ds_empty + buffer)
        self.add_dq(gradients.pack_dq(x_q[0], x_q[1], scale), before, j, head, place, targets)

    @cute.jit
    def scores(self, tile, operands, registers, full):
        """Start the scores of a step."""
        mmas, a_s, b_s, _, _, _, _ = operands
        stage = tile & (self.stages - 1)
        cute.arch.mbarrier_wait(full + stage, (tile // self.stages) & 1)
        blocks = const_expr(cute.size(a_s[0].shape[2]))
        self.gemm(mmas[0], registers[0][0], a_s[0], b_s[0][None, None, None, stage], blocks)

    @cute.jit
    def head(
        self, tile, j, head, kept, masked: cutlass.Constexpr, started: cutlass.Constexpr, operands, registers, plain,
        slab, place, targets, scalars, barriers,
    ):  # fmt: skip
        """Codes of P and dS of 64 queries. started: the scores are under way.

        kept: the dS exponent in force, whether it is known, and that of dK's codes; returns the same after this step.
        """
        mmas, a_s, b_s, _, _, _, _ = operands
        x, _, _, words = registers
        values, _, tops, shared_e, maxima, dS_pointer, _ = plain
        item, e_k, e_v, guess, group, warp, lane = place
        _, _, left, right = scalars
        _, _, full, _, ds_full, ds_empty = barriers
        stage = tile & (self.stages - 1)
        buffer, top = tile & 1, tile & 3
        if const_expr(not started):
            self.scores(tile, operands, registers, full)
        self.gemm(mmas[1], x[1], a_s[1], b_s[1][None, None, None, stage], self.head_dim // 32)
        unit = [as_bits(values[UNIT + i, stage]) for i in range(2)]
        held = kept[0] if kept[1] != 0 else unit[0] + guess
        e = cutlass.max(held, cutlass.max(unit[0], unit[1]) + (guess - gradients.HEADROOM))
        k_factor = [Float32(1.0) if const_expr(self.wide) else gradients.power(v) for v in e_k]
        factor = [values[FACTOR + i, stage] * k_factor[0] for i in range(2)]
        warpgroup.wait_group(1)
        p, ds = gradients.view(x[0]), gradients.view(x[1])
        if const_expr(self.exact):
            loaders = [gradients.loader(values, kind, stage, lane) for kind in (Q_FACTOR, ADDEND, POWER, A, B)]
            gradients.exact_weights(p, k_factor, loaders[0], loaders[1])
        else:
            gradients.weights(p, factor, gradients.per_query(values, ADDEND, stage, lane))
        if const_expr(masked):
            row = lane_here() if const_expr(self.exact) else lane  # no register is left to keep what follows from it
            gradients.mask(p, item.k0 + warp * 16 + row // 4, j * STEP, item.shift, item.len_k, left, right, self.masks)
        if const_expr(self.exact):
            gradients.column_codes(p, loaders[2], words[0])
        else:
            gradients.codes(p, words[0])
        # For the next step, by all warps; the wait for dP must not move before the powers.
        clear_after(tops.iterator + (8 * group + 2 * ((top + 1) & 3)), [words[0][i] for i in range(8)])
        warpgroup.wait_group(0)
        row_scale = [gradients.power(v - e) for v in e_k]
        if const_expr(self.exact):
            row_v = [gradients.power(v) for v in e_v]
            found = gradients.exact_gradient(ds, p, row_scale, row_v, loaders[3], loaders[4])
            gradients.raise_row_maxima(ds, maxima.iterator + (320 * group + 80 * top))
            if warp % 4 == 0:
                for i in cutlass.range_constexpr(3):
                    if lane + 32 * i < 80:
                        maxima[lane + 32 * i, (top + 1) & 3, group] = Int32(0)
        else:
            scale = [gradients.power(unit[i] + e_k[0] + e_v[0] - e) for i in range(2)]
            less = gradients.per_query(values, B, stage, lane)
            found = gradients.scores_gradient(ds, p, scale, less, row_scale[0])
        self.start_dv(tile, 0, operands, registers)
        gradients.codes(ds, words[1])
        for i in cutlass.range_constexpr(2):
            raise_to(tops.iterator + (8 * group + 2 * top + i), as_bits(found[i]))
        cute.arch.mbarrier_wait(ds_empty + buffer, ((tile >> 1) + 1) & 1)
        cute.arch.barrier(barrier_id=1 + group, number_of_threads=128)
        found = [as_float(tops[i, top, group]) for i in range(2)]
        first, second, both, known = held, held, held, kept[1]
        # dS row of this lane's query, and of its 16 bytes those of this warp's keys, swizzled
        row = lane_here() if const_expr(self.exact) else lane
        address = Int32(dS_pointer.toint()) + buffer * (STEP * TILE) + row * TILE + ((warp ^ row % 8) << 4)
        changes = known == 0 or e != held or not (gradients.serves(found[0]) and gradients.serves(found[1]))
        if const_expr(self.exact):
            to_dq = cute.make_rmem_tensor((8,), Int32)
            gradients.row_codes(ds, gradients.loader(maxima, 0, 4 * group + top, lane), e, to_dq)
            gradients.store_codes(to_dq, address)
            if warp % 4 == 0 and lane == 0:
                shared_e[0, buffer, group] = e
            if changes:
                first, second, both, known = gradients.kept_exponents(found, e, held, known)
                gradients.scaled_codes(ds, [gradients.power(e - both)] * 2, words[1])
        else:
            if changes:
                first, second, both, known = gradients.kept_exponents(found, e, held, known)
                gradients.scaled_codes(ds, [gradients.power(e - first), gradients.power(e - second)], words[1])
            gradients.store_codes(words[1], address)
            if changes:
                gradients.scaled_codes(ds, [gradients.power(e - both)] * 2, words[1])
            if warp % 4 == 0 and lane == 0:
                shared_e[0, buffer, group], shared_e[1, buffer, group] = first, second
        cute.arch.fence_view_async_shared()
        cute.arch.sync_warp()
        self.release(ds_full + buffer)
        if const_expr(self.halves == 2):
            self.start_dv(tile, 1, operands, registers)
        warpgroup.wait_group(self.halves - 1)
        self.add_dv(tile, 0, registers, values)
        return second, known, both

    @cute.jit
    def gemm(self, mma, accumulator, a, b, blocks: cutlass.Constexpr, first: cutlass.Constexpr = 0):
        """One product of a warpgroup, committed but not waited for; overwrites the accumulator.

        blocks, first: which 32 (BF16: 16) of the contraction.
        """
        warpgroup.fence()
        atom = cute.make_mma_atom(mma.op)
        atom.set(warpgroup.Field.ACCUMULATE, False)
        for k in cutlass.range_constexpr(first, first + blocks):
            cute.gemm(atom, accumulator, a[None, None, k], b[None, None, k], accumulator)
            atom.set(warpgroup.Field.ACCUMULATE, True)
        warpgroup.commit_group()

    @cute.jit
    def release(self, barrier):
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(barrier)

    @cute.jit
    def promote(self, sums, partial, factor, h: cutlass.Constexpr):
        """Add a partial product of 64 channels to its FP32 sums."""
        s, p = sums[None, None, None, h], gradients.view(partial)
        for i in cutlass.range_constexpr(cute.size(p)):
            s[i] = s[i] + p[i] * factor

    @cute.jit
    def add_dq(self, words, before, j, head, place, targets):
        """Add what ``pack_dq`` returns to the accumulator, when it is this tile's turn."""
        item, _, _, _, group, warp, lane = place
        query = self.place_of(j, item) * STEP + warp % 4 * 16
        if const_expr(self.deterministic) and j > item.first:
            self.pass_on(j - 1, head, place, targets)
        if query < item.len_q:
            row = Int64(head) * targets[0].shape[1] + item.column_q + query
            if const_expr(self.deterministic):
                place_in_line = targets[1].iterator + (row // 16 * 2 + group)
                while load_acquire(place_in_line) != before:
                    pass
            own = lane_here() if const_expr(self.exact) else lane
            spot = targets[0].iterator + (row * self.head_dim + group * self.slab + 8 * own)
            for k in cutlass.range_constexpr(cute.size(words.shape[1])):
                add_half(spot + 256 * k, [words[i, k] for i in range(4)])

    @cute.jit
    def pass_on(self, j, head, place, targets):
        """The turn to the next tile, once what was added to step j's queries is there."""
        item, _, _, _, group, warp, lane = place
        query = j * STEP + warp % 4 * 16
        if query < item.len_q:
            cute.arch.fence_acq_rel_gpu()
            cute.arch.sync_warp()
            if lane == 0:
                row = Int64(head) * targets[0].shape[1] + item.column_q + query
                target = targets[1].iterator + (row // 16 * 2 + group)
                cute.arch.red(target, Int32(1), op="add", dtype="u32", sem="release", scope="gpu")

    @cute.jit
    def store(self, sums, outputs, item, warp, e_k, softmax_scale, slab):
        """Write this warp's 16 rows of dk and dv; rows past the document's end are not written."""
        dv, dk = sums
        for r in cutlass.range_constexpr(2):
            factor = gradients.power(-e_k[r]) * softmax_scale
            for i in cutlass.range_constexpr(16):
                for h in cutlass.range_constexpr(self.halves):
                    dk[i % 2, r, i // 2, h] = dk[i % 2, r, i // 2, h] * factor
        if const_expr(self.rotate):
            gradients.rotate_back(dk)
        key = item.k0 + warp * 16
        for i in cutlass.range_constexpr(2):
            stride = outputs[i].stride[0]
            start = outputs[i].iterator + (Int64(item.k_start + key) * stride + item.kv * self.head_dim)
            write_rows((dk, dv)[i], start, stride, item.len_k - key, slab)


def pack_exponents(e_k: Any, e_v: Any) -> Int32:
    """The word of a block of keys on the board: its exponents, and the sum of those of the tile's first block."""
    e_k, e_v = Int32(e_k), Int32(e_v)
    return e_k | e_v << 8 | cute.arch.shuffle_sync(e_k + e_v, 0) << 16


def compile_backward(
    kernel: Backward, dtype: Any = BFloat16, *, compile: Any = None, arch: str = "sm_90a", options: str = ""
) -> Any:
    """Compile for gradients of ``dtype``; no GPU is needed. Lengths, documents, heads and windows stay free.

    compile: ``cute.compile`` or what stands in for it. Returns a function of the arguments of ``Backward.__call__``
    without the stream, which is torch's current one; keys of no document are not written. Rows of Q, K and V and dk and
    dv may be views of some heads of tensors with more of them.
    """
    fake, free = cute.runtime.make_fake_compact_tensor, cute.sym_int32
    tokens, keys, heads, kv_heads = (free() for _ in range(4))
    capacity = cute.sym_int32(divisibility=32)
    d = kernel.head_dim

    def packed(kind: Any, *shape: Any, align: int) -> Any:
        return fake(kind, shape, stride_order=tuple(reversed(range(len(shape)))), assumed_align=align)

    def rows(kind: Any, count: Any, heads: Any) -> Any:
        stride = (cute.sym_int32(divisibility=d), d, 1)
        return cute.runtime.make_fake_tensor(kind, (count, heads, d), stride, assumed_align=16)

    def table(kind: Any, *shape: Any) -> Any:
        return packed(kind, *shape, align=kind.width // 8)

    scored = BFloat16 if kernel.wide else Float8E4M3FN
    columns = packed(Float8E4M3FN, heads, d, capacity, align=16)
    arguments = [
        rows(scored, tokens, heads),
        rows(scored, keys, kv_heads),
        rows(Float8E4M3FN, keys, kv_heads),
        packed(Float8E4M3FN, tokens, heads, d, align=16),
        columns,
        packed(Float8E4M3FN, kv_heads, d, cute.sym_int32(divisibility=32), align=16),
        columns,
        rows(dtype, keys, kv_heads),
        rows(dtype, keys, kv_heads),
        packed(Float16, heads, capacity, d, align=16),
        table(Int32, free(), free(), 2),
        table(Float32, heads, tokens),
        table(Float32, heads, tokens),
        table(Int32, heads, tokens),
        table(Int32, heads, free()),
        table(Uint8, heads, tokens),
        table(Uint8, kv_heads, keys),
        table(Uint8, kv_heads, keys),
        table(Int32, heads, free()),
        packed(Int32, free(), 4, align=16),
        table(Int32, 1),
        table(Int32, 2),
        table(Int32, 1),
        table(Int32, free()),
        table(Int32, free()),
        table(Int32, free()),
        table(Int32, free()),
    ]
    scalars = [Float32(1.0), Float32(1.0), Int32(0), Int32(0), Int32(1), Int32(1)]
    stream = cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True)
    flags = f"--enable-tvm-ffi --gpu-arch {arch} {options}".strip()
    return (compile or cute.compile)(kernel, *arguments, *scalars, stream, options=flags)
