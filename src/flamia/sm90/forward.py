"""MXFP8 and NVFP4 attention forward on Hopper, batched and packed: the twin of ``reference.folded.forward``.

One producer warp loads tiles by TMA, a second one their scales, and two warpgroups of 64 queries each compute. The
warpgroups take turns at the powers, which both of them together would wait for. A tile's partial output is one
accumulation of the tensor core, which keeps 13 bits or so, added to FP32 registers afterwards. The value product has
eight columns more than V, which sum the codes of the weights: 2^(top - e_V), top being the tile's largest e_V, times
1 to 1.875 (``bounds.SUM_MANTISSAS``). With exact operands, nothing may depend on other keys' exponents, so each column
sums the keys whose e_V lies in a window of its own (``softmax.token_column``).
"""

from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as hopper
from cutlass import BFloat16, Float8E4M3FN, Float32, Int32, Int64, Uint8, const_expr
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup
from cutlass.memory import SmemAllocator
from cutlass.tensor_utils import LayoutEnum

from flamia.bounds import SUM_MANTISSAS, SUM_WINDOWS
from flamia.sm90 import softmax
from flamia.sm90.claims import BoardStorage, ask, board_in, claim_items, init_board, posted, take
from flamia.sm90.instructions import arrive_after, arrive_after_all, as_float, lane_here
from flamia.sm90.rows import SLAB, write_rows
from flamia.sm90.work import TILE, Item, Masks, Tables, item_at

SUM_COLUMNS = SUM_WINDOWS  # the least that a value product can have more
THREADS = 384
PRODUCER_REGISTERS, CONSUMER_REGISTERS = 24, 240
Q_STAGES = 2  # tiles of Q in flight: the next item's comes while this one is worked on
FIRST_TURN = 1  # barriers on which the first and the second warpgroup wait for their turn at the powers
UNIT = 8  # scales of a tile in shared memory, FP32: 2^e_K and e_V of its four blocks, and 2^-top (careful: 0)
# The same for exact operands: 2^e_K and e_V + a of every key (``Forward.numbers``), and whether sums need corrections.
K_SCALE, V_EXPONENT, FLAG = (i * softmax.TOKEN_NUMBERS for i in range(3))


class Forward:
    """Kernel for one head dimension, GQA ratio and kind of mask.

    Args:
        head_dim: 64 or 128. ratio: query heads per kv head. masks: which sides of the window are bounded.
        p_shift, tau, row_sum: of the recipe. stages: tiles of K and of V in flight.
        careful: sums rows block by block in registers, for documents whose V exponents vary too much for the column
            that sums codes. A launch of each kind does all items: each passes over the other's. row_sum "weights" is
            one careful launch.
        exact: every token has an exponent of its own. One launch, not careful, does all documents.
        format: "mxfp8", or "nvfp4", whose q and k come as the BF16 numbers that their codes and scales stand for.
        exponential: "exact" or "schraudolph".

    Raises:
        ValueError: a head dimension, number of stages, format, exponential or combination that there is no kernel for.
    """

    def __init__(
        self,
        head_dim: int,
        ratio: int,
        masks: Masks,
        *,
        p_shift: int = 4,
        tau: float = 4.0,
        row_sum: str = "codes",
        careful: bool = False,
        exact: bool = False,
        exponential: str = "exact",
        format: str = "mxfp8",
        stages: int | None = None,
    ) -> None:
        if format not in ("mxfp8", "nvfp4"):
            raise ValueError(f"format must be 'mxfp8' or 'nvfp4', got {format!r}")
        self.wide = format == "nvfp4"  # whether q and k are BF16, without exponents
        if head_dim not in (64, 128):
            raise ValueError(f"head_dim must be 64 or 128, got {head_dim}")
        stages = stages or (2 if self.wide and head_dim == 128 else 4)  # four do not fit there
        if stages not in (2, 4) or (self.wide and head_dim == 128 and stages == 4):
            raise ValueError(f"stages must be 2 or 4, 2 for format='nvfp4' with head_dim=128, got {stages}")
        if exponential not in ("exact", "schraudolph"):
            raise ValueError(f"exponential must be 'exact' or 'schraudolph', got {exponential!r}")
        if exact and careful:
            raise ValueError("careful must be False with exact=True, whose row sums serve every document, got True")
        self.head_dim, self.ratio, self.masks, self.stages = head_dim, ratio, masks, stages
        self.bits = stages.bit_length() - 1
        self.p_shift, self.tau, self.weights = p_shift, tau, row_sum == "weights"
        self.exact, self.careful = exact, careful or (self.weights and not exact)
        self.approximate = exponential == "schraudolph"
        self.scales = FLAG + 4 if exact else 16  # numbers of a tile in shared memory
        self.waiting = 6 * (THREADS - 128) if exact else 0  # and behind them ``held``
        self.value_rows = head_dim + SUM_COLUMNS

    @cute.jit
    def __call__(
        self,
        mQ: cute.Tensor,  # E4M3 (nvfp4: BF16) [T, heads, D]
        mK: cute.Tensor,  # E4M3 (nvfp4: BF16) [Tk, kv heads, D]
        mV: cute.Tensor,  # E4M3 [kv heads, D, C], tokens in "mma" order
        mO: cute.Tensor,  # BF16 or FP16 [T, heads, D]
        mLse: cute.Tensor,  # FP32 [heads, T], base 2
        mM: cute.Tensor,  # FP32 [heads, T]
        eQ: cute.Tensor,  # UE8M0 [heads, T]; nvfp4: of any size
        eK: cute.Tensor,  # UE8M0 [kv heads, Tk]; nvfp4: of any size
        eV: cute.Tensor,  # UE8M0 [kv heads, Tk]
        uneven: cute.Tensor,  # uint8 [kv heads, documents]: e_V varies by more than bounds.FOLD_RANGE
        items: cute.Tensor,  # int32 [n, 4]
        count: cute.Tensor,  # int32 [1]
        claims: cute.Tensor,  # int32 [2]
        total: cute.Tensor,  # int32 [1]
        cu_q: cute.Tensor,  # int32 [documents + 1]
        cu_k: cute.Tensor,
        columns: cute.Tensor,  # int32 [documents + 1]
        score_scale: Float32,  # softmax_scale * log2 e
        left: Int32,
        right: Int32,
        section: Int32,
        ctas: Int32,
        stream: cuda.CUstream,
    ):
        d, stages = self.head_dim, self.stages
        f8, k_major = Float8E4M3FN, OperandMajorMode.K
        kind = BFloat16 if self.wide else f8
        row_atom = self._atom(d, kind)
        column_atom = self._atom(TILE, f8)
        sQ_layout = cute.tile_to_shape(row_atom, (TILE, d, Q_STAGES), (0, 1, 2))
        sK_layout = cute.tile_to_shape(row_atom, (TILE, d, stages), (0, 1, 2))
        sV_layout = cute.tile_to_shape(column_atom, (self.value_rows, TILE, stages), (0, 1, 2))
        sV_box = cute.tile_to_shape(column_atom, (d, TILE), (0, 1))
        # tokens x d x heads, and for V d x tokens x heads
        mQ, mK, mO = (cute.make_tensor(x.iterator, cute.select(x.layout, [0, 2, 1])) for x in (mQ, mK, mO))
        mV = cute.make_tensor(mV.iterator, cute.select(mV.layout, [1, 2, 0]))
        load = cpasync.CopyBulkTensorTileG2SOp()
        tmaQ, tQ = cpasync.make_tiled_tma_atom(load, mQ, cute.select(sQ_layout, [0, 1]), (TILE, d))
        tmaK, tK = cpasync.make_tiled_tma_atom(load, mK, cute.select(sK_layout, [0, 1]), (TILE, d))
        tmaV, tV = cpasync.make_tiled_tma_atom(load, mV, sV_box, (d, TILE))
        mma_qk = hopper.make_trivial_tiled_mma(kind, kind, k_major, k_major, Float32, (2, 1, 1), (64, TILE))
        mma_pv = hopper.make_trivial_tiled_mma(
            f8, f8, k_major, k_major, Float32, (2, 1, 1), (64, self.value_rows), warpgroup.OperandSource.RMEM
        )

        @cute.struct
        class Storage:
            q_full: cute.struct.MemRange[Int64, Q_STAGES]
            q_empty: cute.struct.MemRange[Int64, Q_STAGES]
            k_full: cute.struct.MemRange[Int64, stages]
            k_empty: cute.struct.MemRange[Int64, stages]
            v_full: cute.struct.MemRange[Int64, stages]
            v_empty: cute.struct.MemRange[Int64, stages]
            board: BoardStorage
            scales: cute.struct.Align[cute.struct.MemRange[Float32, stages * self.scales + self.waiting], 128]
            slabs: cute.struct.Align[cute.struct.MemRange[Int32, 8 * SLAB], 128]
            sQ: cute.struct.Align[cute.struct.MemRange[kind, cute.cosize(sQ_layout)], 1024]
            sK: cute.struct.Align[cute.struct.MemRange[kind, cute.cosize(sK_layout)], 1024]
            sV: cute.struct.Align[cute.struct.MemRange[f8, cute.cosize(sV_layout)], 1024]

        self.Storage = Storage
        self.kernel(
            (tmaQ, tmaK, tmaV),
            (tQ, tK, tV),
            (mO, mLse, mM),
            (eQ, eK, eV),
            Tables(items, count, claims, total, cu_q, cu_k, columns, uneven),
            (score_scale, left, right),
            section,
            (mma_qk, mma_pv),
            (sQ_layout, sK_layout, sV_layout, sV_box),
        ).launch(grid=[ctas, 1, 1], block=[THREADS, 1, 1], stream=stream, min_blocks_per_mp=1)

    @staticmethod
    def _atom(row: int, dtype: Any) -> Any:
        kind = hopper.get_smem_layout_atom(LayoutEnum.ROW_MAJOR, dtype, row)
        return warpgroup.make_smem_layout_atom(kind, dtype)

    @cute.kernel
    def kernel(self, atoms, sources, outputs, exponents, tables, scalars, section, mmas, layouts):
        mQ = sources[0]
        sQ_layout, sK_layout, sV_layout, sV_box = layouts
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp == 0:
            for atom in atoms:
                cpasync.prefetch_descriptor(atom)
        storage = SmemAllocator().allocate(self.Storage)
        names = ("q_full", "q_empty", "k_full", "k_empty", "v_full", "v_empty")
        barriers = tuple(getattr(storage, name).data_ptr() for name in names)
        board = board_in(storage.board)
        if warp == 0:
            with cute.arch.elect_one():
                self._init_barriers(barriers)
                init_board(board, 10)  # two warps that load, and eight that compute
        cute.arch.mbarrier_init_fence()
        words = self.value_rows * TILE // 4
        sV_words = cute.make_tensor(
            cute.recast_ptr(storage.sV.data_ptr(), dtype=Int32),
            cute.make_layout((self.stages, words), stride=(words, 1)),
        )
        thread = cute.arch.thread_idx()[0]
        for stage in cutlass.range_constexpr(self.stages):
            if thread < SUM_COLUMNS * TILE // 4:
                sV_words[stage, self.head_dim * TILE // 4 + thread] = Int32(0)
        cute.arch.fence_view_async_shared()
        cute.arch.sync_threads()

        sQ = storage.sQ.get_tensor(sQ_layout.outer, swizzle=sQ_layout.inner)
        sK = storage.sK.get_tensor(sK_layout.outer, swizzle=sK_layout.inner)
        sV = storage.sV.get_tensor(sV_layout.outer, swizzle=sV_layout.inner)
        table = cute.make_layout((self.stages, self.scales), stride=(self.scales, 1))
        scales = cute.make_tensor(storage.scales.data_ptr(), table)
        heads = mQ.shape[2]
        work = (tables.count[0] * heads, heads, tables, scalars, board, section)
        if warp < 4:
            cute.arch.setmaxregister_decrease(PRODUCER_REGISTERS)
            if warp == 0:
                box = cute.make_layout(
                    (*sV_box.outer.shape, self.stages), stride=(*sV_box.outer.stride, self.value_rows * TILE)
                )
                self.load(atoms, sources, sQ, sK, cute.make_tensor(sV.iterator, box), work, barriers)
            if warp == 1:
                load_scales = self.load_token_scales if const_expr(self.exact) else self.load_scales
                load_scales(exponents, scales, sV_words, work, barriers)
            if warp == 2:
                limit, _, _, _, board, section = work

                def describe(at):
                    item = self.item(at, work)
                    return item, self.query_exponent(exponents[0], item, item.q0 + cute.arch.lane_idx() % 4 * 32)

                claim_items(board, limit, heads, section, tables, describe)
        else:
            cute.arch.setmaxregister_increase(CONSUMER_REGISTERS)
            self.compute(mmas, (sQ, sK, sV), scales, exponents[0], outputs, storage.slabs.data_ptr(), work, barriers)

    @cute.jit
    def _init_barriers(self, barriers):
        q_full, q_empty, k_full, k_empty, v_full, v_empty = barriers
        consumers = 8  # warps
        for stage in cutlass.range_constexpr(Q_STAGES):
            cute.arch.mbarrier_init(q_full + stage, 1)
            cute.arch.mbarrier_init(q_empty + stage, consumers)
        for stage in cutlass.range_constexpr(self.stages):
            cute.arch.mbarrier_init(k_full + stage, 2)  # the copy, and the scales
            cute.arch.mbarrier_init(k_empty + stage, consumers)
            cute.arch.mbarrier_init(v_full + stage, 1)
            cute.arch.mbarrier_init(v_empty + stage, consumers)

    def item(self, at, work) -> Item:
        _, heads, tables, (_, left, right), _, _ = work
        kind = "all" if self.weights or self.exact else "uneven" if self.careful else "even"
        return item_at(at, heads, self.ratio, left, right, tables, self.masks, kind)

    @cute.jit
    def load(self, atoms, sources, sQ, sK, sV, work, barriers):
        """Producer warp: tiles of Q, K and V."""
        q_full, q_empty, k_full, k_empty, v_full, v_empty = barriers
        tmaQ, tmaK, tmaV = atoms
        mQ, mK, mV = sources
        d = self.head_dim
        row_bytes = 2 * d if self.wide else d
        n, tile = Int32(0), Int32(0)
        while posted(work[4], n):
            item = Item(*take(work[4], n, len(Item._fields), Int32(0))[0])
            gQ = cute.local_tile(
                cute.domain_offset((item.q_start + item.q0, 0), mQ[None, None, item.head]), (TILE, d), (0, 0)
            )
            gK = cute.local_tile(cute.domain_offset((item.k_start, 0), mK[None, None, item.kv]), (TILE, d), (None, 0))
            gV = cute.local_tile(cute.domain_offset((0, item.column), mV[None, None, item.kv]), (d, TILE), (0, None))
            tQs, tQg = self._partition(tmaQ, sQ, gQ)
            tKs, tKg = self._partition(tmaK, sK, gK)
            tVs, tVg = self._partition(tmaV, sV, gV)
            which = n % Q_STAGES
            cute.arch.mbarrier_wait(q_empty + which, (n // Q_STAGES + 1) & 1)
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(q_full + which, TILE * row_bytes)
            cute.copy(tmaQ, tQg, tQs[None, which], tma_bar_ptr=q_full + which)
            for j in cutlass.range(item.first, item.stop, unroll=1):
                stage, phase = tile & (self.stages - 1), ((tile >> self.bits) + 1) & 1
                cute.arch.mbarrier_wait(k_empty + stage, phase)
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive_and_expect_tx(k_full + stage, TILE * row_bytes)
                cute.copy(tmaK, tKg[None, j], tKs[None, stage], tma_bar_ptr=k_full + stage)
                cute.arch.mbarrier_wait(v_empty + stage, phase)
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive_and_expect_tx(v_full + stage, TILE * d)
                cute.copy(tmaV, tVg[None, j], tVs[None, stage], tma_bar_ptr=v_full + stage)
                tile += 1
            ask(work[4])
            n += 1

    @staticmethod
    def _partition(atom, shared, tiles):
        one = cute.make_layout(1)
        return cpasync.tma_partition(atom, 0, one, cute.group_modes(shared, 0, 2), cute.group_modes(tiles, 0, 2))

    @cute.jit
    def load_scales(self, exponents, scales, sV_words, work, barriers):
        """Producer warp: a tile's scales, and the rows of V that sum the codes.

        Eight lanes to a block of 32 keys.
        """
        _, _, k_full, k_empty, _, v_empty = barriers
        _, eK, eV = exponents
        lane = cute.arch.lane_idx()
        block = lane // 8
        n, tile = Int32(0), Int32(0)
        while posted(work[4], n):
            item = Item(*take(work[4], n, len(Item._fields), Int32(0))[0])
            for j in cutlass.range(item.first, item.stop, unroll=1):
                stage, phase = tile & (self.stages - 1), ((tile >> self.bits) + 1) & 1
                token = item.k_start + cutlass.min(j * TILE + 32 * block, item.len_k - 1)
                k = Int32(127) if const_expr(self.wide) else Int32(eK[item.kv, token])
                v = Int32(eV[item.kv, token])
                broken = v == 255  # a block with a NaN or an infinity: its codes are zeros, its exponent NaN
                top = 0 if broken else v
                for distance in cutlass.range_constexpr(2):
                    top = cutlass.max(top, cute.arch.shuffle_sync_bfly(top, 8 << distance))
                cute.arch.mbarrier_wait(k_empty + stage, phase)
                cute.arch.mbarrier_wait(v_empty + stage, phase)
                code = (cutlass.min(top - v, 7) + 7) << 3  # E4M3 of 2^(top - e_V)
                for row in cutlass.range_constexpr(SUM_COLUMNS):
                    word = (code | SUM_MANTISSAS[row]) * 0x01010101
                    # 16-byte pieces of a row are swizzled by its number.
                    sV_words[stage, (self.head_dim + row) * TILE // 4 + ((lane // 4) ^ row) * 4 + lane % 4] = word
                if lane % 8 == 0:
                    scales[stage, block] = as_float(k << 23)
                    scales[stage, 4 + block] = Float32.nan if broken else Float32(v - 127)
                if lane == 0:
                    scales[stage, UNIT] = Float32(0.0) if const_expr(self.careful) else as_float((254 - top) << 23)
                cute.arch.fence_view_async_shared()
                cute.arch.sync_warp()
                if lane == 0:
                    cute.arch.mbarrier_arrive(k_full + stage)
                tile += 1
            n += 1

    @cute.jit
    def load_token_scales(self, exponents, scales, sV_words, work, barriers):
        """``load_scales`` for exact operands. A lane has four keys: those of a 32-bit word of V's columns.

        They are neighbours in the order of ``numbers``, too.
        """
        _, _, k_full, k_empty, _, v_empty = barriers
        _, eK, eV = exponents
        lane = cute.arch.lane_idx()
        first = lane // 4 * 16 + lane % 4 * 2  # of keys first + {0, 1, 8, 9}
        n, tile = Int32(0), Int32(0)
        while posted(work[4], n):
            item = Item(*take(work[4], n, len(Item._fields), Int32(0))[0])
            keys, values = (e[item.kv, None] for e in (eV if const_expr(self.wide) else eK, eV))  # exponents
            for j in cutlass.range(item.first, item.stop, unroll=1):
                stage, phase = tile & (self.stages - 1), ((tile >> self.bits) + 1) & 1
                # First, so that no register has to keep what waits to be written: there are 24.
                cute.arch.mbarrier_wait(k_empty + stage, phase)
                cute.arch.mbarrier_wait(v_empty + stage, phase)
                columns = []  # of each key the column that sums it, and its code there, in one word
                flag = item.uneven
                k_scale, v_exponent = (
                    self.numbers(scales, start)[None, lane // 4, lane % 4, stage] for start in (K_SCALE, V_EXPONENT)
                )
                for i in cutlass.range_constexpr(4):
                    key = j * TILE + first + 8 * (i // 2) + i % 2
                    token = item.k_start + cutlass.min(key, item.len_k - 1)
                    v = Int32(values[token])
                    if const_expr(not self.wide):
                        k_scale[i] = as_float(Int32(keys[token]) << 23)
                    v_exponent[i] = Float32.nan if v == 255 else Float32(v + (self.p_shift - 127))
                    column, code = softmax.token_column(v)
                    columns.append(column << 8 | code)
                    flag = 1 if column >= SUM_COLUMNS else flag
                flag = cute.arch.vote_any_sync(flag != 0)
                for row in cutlass.range_constexpr(SUM_COLUMNS):
                    word = Int32(0)
                    for i in cutlass.range_constexpr(4):
                        word = word | ((columns[i] & 255) << 8 * i if columns[i] >> 8 == row else Int32(0))
                    # 16-byte pieces of a row are swizzled by its number.
                    sV_words[stage, (self.head_dim + row) * TILE // 4 + ((lane // 4) ^ row) * 4 + lane % 4] = word
                if lane == 0:
                    scales[stage, FLAG] = Float32(1.0) if flag else Float32(0.0)
                cute.arch.fence_view_async_shared()
                cute.arch.sync_warp()
                if lane == 0:
                    cute.arch.mbarrier_arrive(k_full + stage)
                tile += 1
            n += 1

    @cute.jit
    def compute(self, mmas, shared, scales, eQ, outputs, slabs, work, barriers):
        """A warpgroup: 64 queries of each item."""
        q_full, q_empty, k_full, _, v_full, v_empty = barriers
        mma_qk, mma_pv = mmas
        sQ, sK, sV = shared
        thread = cute.arch.thread_idx()[0] - 128
        group = cute.arch.make_warp_uniform(thread // 128)
        lane = thread % 32
        first_row = group * 64 + (thread % 128) // 32 * 16
        threads = cute.make_layout(2, stride=128)
        slice_qk, slice_pv = mma_qk.get_slice(threads(group)), mma_pv.get_slice(threads(group))
        tSrQ = mma_qk.make_fragment_A(slice_qk.partition_A(sQ))
        tSrK = mma_qk.make_fragment_B(slice_qk.partition_B(sK))
        tOrV = mma_pv.make_fragment_B(slice_pv.partition_B(sV))
        tOrP = mma_pv.make_fragment_A(mma_pv.partition_shape_A((TILE, TILE)))
        scores = cute.make_rmem_tensor(mma_qk.partition_shape_C((TILE, TILE)), Float32)
        partial = cute.make_rmem_tensor(mma_pv.partition_shape_C((TILE, self.value_rows)), Float32)
        out = cute.make_rmem_tensor((2, 2, self.head_dim // 8), Float32)
        rows = cute.make_rmem_tensor((2, 8), Float32)
        registers = (scores, partial, out, cute.recast_tensor(tOrP, Int32), rows)
        n, tile = Int32(0), Int32(0)
        if group == 1:
            cute.arch.barrier_arrive(barrier_id=FIRST_TURN, number_of_threads=256)
        while posted(work[4], n):
            fields, e_q = take(work[4], n, len(Item._fields), first_row // 32)
            item = Item(*fields)
            if const_expr(self.exact):
                first_row, lane = self.place_here()
            row = item.q0 + first_row + lane // 4
            softmax.reset(rows)
            out.fill(0.0)
            q_scale = None
            if const_expr(self.exact):
                softmax.hold(self.held(scales), [self.q_scale(eQ, item, work[3][0], row + 8 * r) for r in range(2)])
            else:
                # A warp's rows are half of a block.
                q_scale = work[3][0] * (1.0 if const_expr(self.wide) else as_float(e_q << 23))
            which = n % Q_STAGES
            operands = (mma_qk, mma_pv, tSrQ[None, None, None, which], tSrK, tOrP, tOrV)
            cute.arch.mbarrier_wait(q_full + which, (n // Q_STAGES) & 1)
            if item.first < item.stop:
                # Where rows are masked, exact operands add the lane's part of the row themselves (``refer``).
                place = (item.q0 + first_row if const_expr(self.exact) else row, item.shift, item.len_k)
                common = (operands, registers, scales, barriers, q_scale, place, work[3])
                stage = tile & (self.stages - 1)
                cute.arch.mbarrier_wait(k_full + stage, (tile >> self.bits) & 1)
                self.gemm(mma_qk, scores, operands[2], tSrK[None, None, None, stage])
                warpgroup.wait_group(0)
                bounds = self.weigh(tile, item.first, True, *common)
                self.encode(tile, bounds, *common)
                if const_expr(self.masks.left):
                    for j in cutlass.range(item.first + 1, cutlass.min(item.clear, item.stop), unroll=1):
                        tile = self.step(tile, j, True, *common)
                begin = cutlass.max(item.clear, item.first + 1)
                for j in cutlass.range(begin, cutlass.min(item.clouded, item.stop), unroll=1):
                    tile = self.step(tile, j, False, *common)
                for j in cutlass.range(cutlass.max(item.clouded, begin), item.stop, unroll=1):
                    tile = self.step(tile, j, True, *common)
                stage = tile & (self.stages - 1)
                cute.arch.mbarrier_wait(v_full + stage, (tile >> self.bits) & 1)
                self.gemm(mma_pv, partial, tOrP, tOrV[None, None, None, stage])
                warpgroup.wait_group(0)
                self.promote(out, partial, rows, softmax.NOW, self.unit(scales, stage))
                self.release(v_empty + stage)
                tile += 1
            self.release(q_empty + which)
            if const_expr(self.exact):
                first_row, lane = self.place_here()
                softmax.take_back(rows, self.held(scales))
            if item.mine != 0:
                self.store(out, rows, outputs, item, item.q0 + first_row, lane, slabs + first_row // 16 * SLAB)
            n += 1

    def held(self, scales):
        """Numbers of this thread's rows that wait in shared memory (``softmax.hold``)."""
        first_row, lane = self.place_here()
        start = self.stages * self.scales + 2 * first_row + lane
        threads = THREADS - 128
        return cute.make_tensor(scales.iterator + start, cute.make_layout((2, 3), stride=(threads, 2 * threads)))

    def place_here(self):
        """This warp's first row and the lane, read anew: registers are scarce."""
        return (cute.arch.make_warp_uniform(cute.arch.warp_idx()) - 4) * 16, lane_here()

    @cute.jit
    def step(self, tile, j, masked: cutlass.Constexpr, operands, registers, scales, barriers, q_scale, place, scalars):
        """Scores of key tile j, and beside its powers the value product of the tile before it."""
        _, _, k_full, k_empty, v_full, v_empty = barriers
        mma_qk, mma_pv, tSrQ, tSrK, tOrP, tOrV = operands
        scores, partial, out, _, rows = registers
        common = (operands, registers, scales, barriers, q_scale, place, scalars)
        before, before_phase = tile & (self.stages - 1), (tile >> self.bits) & 1
        tile += 1
        stage, phase = tile & (self.stages - 1), (tile >> self.bits) & 1
        cute.arch.mbarrier_wait(k_full + stage, phase)
        self.gemm(mma_qk, scores, tSrQ, tSrK[None, None, None, stage])
        cute.arch.mbarrier_wait(v_full + before, before_phase)
        warpgroup.wait_group(0)
        scaling, bounds = self.refer(tile, j, masked, *common)
        group = cute.arch.make_warp_uniform((cute.arch.thread_idx()[0] - 128) // 128)
        cute.arch.barrier(barrier_id=FIRST_TURN + group, number_of_threads=256)
        self.gemm(mma_pv, partial, tOrP, tOrV[None, None, None, before])
        s = softmax.view(scores)
        self.powers(s, scaling)
        with cute.arch.elect_one():
            if const_expr(self.exact):
                arrive_after_all(k_empty + stage, [s[1, r, j] for r in range(2) for j in range(1, 16, 2)])
            else:
                last = 14 if self.approximate else 15  # whose powers are the special function unit's
                arrive_after(k_empty + stage, s[1, 0, last], s[1, 1, last])
        cute.arch.barrier_arrive(barrier_id=FIRST_TURN + 1 - group, number_of_threads=256)
        warpgroup.wait_group(0)
        unit = self.unit(scales, before)
        self.release(v_empty + before)
        self.promote(out, partial, rows, softmax.LAST, unit)
        self.encode(tile, bounds, *common)
        return tile

    @cute.jit
    def weigh(self, tile, j, masked: cutlass.Constexpr, operands, registers, scales, barriers, q_scale, place, scalars):
        """Scores of an item's first key tile -> weights, in place; K's stage is free then."""
        s = softmax.view(registers[0])
        scaling, bounds = self.refer(tile, j, masked, operands, registers, scales, barriers, q_scale, place, scalars)
        self.powers(s, scaling)
        self.release(barriers[3] + (tile & (self.stages - 1)))
        return bounds

    @cute.jit
    def refer(self, tile, j, masked: cutlass.Constexpr, operands, registers, scales, barriers, q_scale, place, scalars):
        """Moves the row references on to key tile j; returns how its scores become exponents, and which keys rows see.

        masked: a row may not see every key.
        """
        scores, _, _, _, rows = registers
        row, shift, len_k = place
        _, left, right = scalars
        stage = tile & (self.stages - 1)
        s = softmax.view(scores)
        bounds = None
        if const_expr(masked and self.exact):
            row += lane_here() // 4
        if const_expr(masked):
            bounds = softmax.mask(s, row, j * TILE, shift, len_k, left, right, self.masks)
        if const_expr(masked and self.exact):
            bounds = j * TILE  # ``encode`` makes them of it again where it needs them: registers are scarce
        fresh = masked or self.masks.left
        if const_expr(self.exact):
            v_exponent = self.per_key(scales, V_EXPONENT, stage)
            k_scale = None if const_expr(self.wide) else self.per_key(scales, K_SCALE, stage)
            held = self.held(scales)
            return softmax.token_references(s, rows, held, k_scale, v_exponent, self.tau, self.p_shift, fresh), bounds
        k_scale = [scales[stage, b] for b in range(4)]
        v_exponent = [scales[stage, 4 + b] for b in range(4)]
        return softmax.row_references(s, rows, k_scale, v_exponent, q_scale, self.tau, self.p_shift, fresh), bounds

    @cute.jit
    def powers(self, s, scaling):
        """Scores of a key tile -> weights, in place. scaling: what ``refer`` has returned."""
        if const_expr(self.exact):
            softmax.token_powers(s, scaling, self.approximate)
        else:
            softmax.powers(s, *scaling, self.approximate)

    def q_scale(self, eQ, item, score_scale, row):
        """c 2^e_Q of a query of the document, or of its last."""
        if self.wide:
            return score_scale
        return score_scale * as_float(self.query_exponent(eQ, item, row) << 23)

    def query_exponent(self, eQ, item, row):
        """UE8M0 exponent of a query of the document, or of its last."""
        if self.wide:
            return Int32(0)
        return Int32(eQ[item.head, item.q_start + cutlass.min(row, item.len_q - 1)])

    def numbers(self, scales, start):
        """A table of numbers of keys as [four neighbours, k, thread-column, stage].

        A thread's numbers lie in a row, and 16-byte loads of four thread-columns share no bank.
        """
        layout = cute.make_layout((4, TILE // 16, 4, self.stages), stride=(1, 4, softmax.STRIDE, self.scales))
        return cute.make_tensor(scales.iterator + start, layout)

    def per_key(self, scales, start, stage):
        """A function of k that loads four of this thread's numbers, of its keys in columns 2k and 2k + 1."""
        table, column = self.numbers(scales, start), lane_here() % 4

        def load(k):
            numbers = cute.make_rmem_tensor((4,), Float32)
            cute.autovec_copy(table[None, k, column, stage], numbers)
            return numbers

        return load

    def unit(self, scales, stage):
        """What the sums of codes of a tile are multiplied by; with exact operands per column."""
        if self.exact:
            lane = lane_here()
            return [softmax.column_scale(lane, c) for c in range(2)]
        return scales[stage, UNIT]

    @cute.jit
    def encode(self, tile, bounds, operands, registers, scales, barriers, q_scale, place, scalars):
        """Weights -> codes in the registers that the value product reads."""
        scores, _, _, p, rows = registers
        s = softmax.view(scores)
        stage = tile & (self.stages - 1)
        if const_expr(self.careful):
            v_exponent = [scales[stage, 4 + b] for b in range(4)]
            softmax.note_exponents(rows, v_exponent, bounds)
            softmax.slow_sums(s, rows, v_exponent, self.weights)
        softmax.codes(s, p)
        if const_expr(self.exact):
            # Moved on here and not by ``promote``, so that what is added here need not be kept until then.
            for r in cutlass.range_constexpr(2):
                rows[r, softmax.SUM] = rows[r, softmax.SUM] * rows[r, softmax.NOW]
            if const_expr(self.weights):
                softmax.token_weights(s, rows, self.per_key(scales, V_EXPONENT, stage), self.p_shift)
            # Which documents come here depends on later keys; what they get does not (``token_corrections``).
            elif scales[stage, FLAG] != 0.0:
                seen = self.visible(bounds, place, scalars)
                v_exponents = self.per_key(scales, V_EXPONENT, stage), self.per_key(scales, V_EXPONENT, stage)
                softmax.token_corrections(s, p, rows, self.held(scales), v_exponents, self.p_shift, seen)

    def visible(self, k0, place, scalars):
        """``softmax.visible`` of both rows in the tile from key k0 on; None for None."""
        if k0 is None:
            return None
        row, shift, len_k = place
        _, left, right = scalars
        limits = (k0, shift, len_k, left, right, self.masks)
        return [softmax.visible(row + lane_here() // 4 + 8 * r, *limits) for r in range(2)]

    @cute.jit
    def gemm(self, mma, accumulator, a, b):
        """One product of a warpgroup, committed but not waited for; overwrites the accumulator."""
        warpgroup.fence()
        atom = cute.make_mma_atom(mma.op)
        atom.set(warpgroup.Field.ACCUMULATE, False)
        for k in cutlass.range_constexpr(cute.size(a.shape[2])):
            cute.gemm(atom, accumulator, a[None, None, k], b[None, None, k], accumulator)
            atom.set(warpgroup.Field.ACCUMULATE, True)
        warpgroup.commit_group()

    @cute.jit
    def release(self, barrier):
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(barrier)

    @cute.jit
    def promote(self, out, partial, rows, which: cutlass.Constexpr, unit):
        """out = out * factor + partial, and the same for the row sums."""
        p = cute.make_tensor(partial.iterator, cute.make_layout((2, 2, self.value_rows // 8)))
        for r in cutlass.range_constexpr(2):
            factor = rows[r, which]
            if const_expr(not self.exact):
                sums = rows[r, softmax.EXTRA]
                if const_expr(not self.careful):
                    sums = (p[0, r, self.head_dim // 8] + p[1, r, self.head_dim // 8]) * unit
                rows[r, softmax.SUM] = rows[r, softmax.SUM] * factor + sums
            elif const_expr(not self.weights):
                for c in cutlass.range_constexpr(2):
                    rows[r, softmax.SUM] = rows[r, softmax.SUM] + p[c, r, self.head_dim // 8] * unit[c]
            for j in cutlass.range_constexpr(self.head_dim // 8):
                for c in cutlass.range_constexpr(2):
                    out[c, r, j] = out[c, r, j] * factor + p[c, r, j]

    @cute.jit
    def store(self, out, rows, outputs, item, first, lane, slab):
        """Normalise and write this warp's 16 rows of o, lse2 and M; rows past the document's end are not written."""
        mO, mLse, mM = outputs
        for r in cutlass.range_constexpr(2):
            inverse, lse2, m = softmax.finish(rows, r, self.p_shift, not (self.careful or self.exact))
            i = first + lane // 4 + 8 * r
            if i < item.len_q and lane % 4 == 0:
                mLse[item.head, item.q_start + i] = lse2
                mM[item.head, item.q_start + i] = m
            for j in cutlass.range_constexpr(self.head_dim // 8):
                for c in cutlass.range_constexpr(2):
                    out[c, r, j] = out[c, r, j] * inverse
        start = mO.iterator + (Int64(item.q_start + first) * mO.stride[0] + item.head * self.head_dim)
        parts = cute.make_tensor(out.iterator, cute.make_layout((2, 2, 8, self.head_dim // 64)))
        write_rows(parts, start, mO.stride[0], item.len_q - first, slab)


def compile_forward(
    kernel: Forward, dtype: Any = BFloat16, *, compile: Any = None, arch: str = "sm_90a", options: str = ""
) -> Any:
    """Compile for outputs of ``dtype``; no GPU is needed. Lengths, documents, heads and windows stay free.

    compile: ``cute.compile`` or what stands in for it. Returns a function of the arguments of ``Forward.__call__``
    without the stream, which is torch's current one; rows of no document are not written.
    """
    fake, free = cute.runtime.make_fake_compact_tensor, cute.sym_int32
    tokens, keys, heads, kv_heads, documents = (free() for _ in range(5))
    d, operand = kernel.head_dim, BFloat16 if kernel.wide else Float8E4M3FN

    def packed(kind: Any, *shape: Any, align: int) -> Any:
        return fake(kind, shape, stride_order=tuple(reversed(range(len(shape)))), assumed_align=align)

    def table(kind: Any, *shape: Any) -> Any:
        return packed(kind, *shape, align=kind.width // 8)

    arguments = [
        packed(operand, tokens, heads, d, align=16),
        packed(operand, keys, kv_heads, d, align=16),
        packed(Float8E4M3FN, kv_heads, d, cute.sym_int32(divisibility=32), align=16),
        packed(dtype, tokens, heads, d, align=16),
        table(Float32, heads, tokens),
        table(Float32, heads, tokens),
        table(Uint8, free(), free()) if kernel.wide else table(Uint8, heads, tokens),
        table(Uint8, free(), free()) if kernel.wide else table(Uint8, kv_heads, keys),
        table(Uint8, kv_heads, keys),
        table(Uint8, kv_heads, documents),
        packed(Int32, free(), 4, align=16),
        table(Int32, 1),
        table(Int32, 2),
        table(Int32, 1),
        table(Int32, free()),
        table(Int32, free()),
        table(Int32, free()),
    ]
    scalars = [Float32(1.0), Int32(0), Int32(0), Int32(1), Int32(1)]
    stream = cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True)
    flags = f"--enable-tvm-ffi --gpu-arch {arch} {options}".strip()
    return (compile or cute.compile)(kernel, *arguments, *scalars, stream, options=flags)
