"""The "folded" variant: the same operand codes on a machine that has no block-scaled products (Hopper).

Every scale is folded into something that is multiplied anyway, so the arithmetic around the products differs from the
"block" variant (docs/numerics.md, "Folding"): V's exponent joins the logit, the row reference moves in whole steps, dO
enters once as T = dO 2^(M - lse) with one exponent per token, and dS keeps one exponent per 64 keys x 32 queries while
it serves. Base 2 throughout: x is a scaled score, z = x + e_V, R the row reference of z, M that of x.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from flamia import formats
from flamia.bounds import FOLD_RANGE, SUM_MANTISSAS, SUM_WINDOW, SUM_WINDOWS, uneven_documents
from flamia.documents import Documents
from flamia.plan import Plan
from flamia.quantize.payloads import E4M3Payload, Payloads
from flamia.quantize.reference import VALUE_MIN_EXPONENT
from flamia.reference import counters
from flamia.reference.backward import PROBABILITY_SHIFT, over_chunks, prescale
from flamia.reference.chunks import Chunk, chunks
from flamia.reference.exponentials import exp2, schraudolph_mix
from flamia.reference.forward import Forward, log2, scaled_scores, tiles_per_run
from flamia.reference.geometry import BLOCK, TILE, Run, padded_length
from flamia.reference.tensor_core import exact_product, hopper_product

GRID = 4096.0  # the fraction f that a row's references share lies on a grid of 2^-12
PROMOTION = 256  # queries whose dV and dK partials are one tensor-core accumulation, and that share C
KEYS = 64  # keys that share an exponent of dS
LOWEST = 28.0  # a dS exponent is kept while the scaled maximum stays in (28, 448]
HOPPER_SPAN = 64  # queries (dV, dK) or keys (dQ) of one accumulation of the Hopper kernels
_NONE = -1000


def _e4m3(payload: object) -> E4M3Payload:
    assert isinstance(payload, E4M3Payload)
    return payload


# ------------------------------------------------------------------------------------------------------ forward


def forward(plan: Plan, payloads: Payloads, documents: Documents) -> Forward:
    """Attention of every document; ``row_max`` of the result is M. Rows that see no key: o = 0, lse2 = -inf."""
    device = documents.cu_seqlens_q.device
    o = torch.zeros(documents.total_q, plan.heads_q, plan.head_dim, device=device)
    lse2 = torch.full((plan.heads_q, documents.total_q), -torch.inf, device=device)
    row_max = torch.zeros(plan.heads_q, documents.total_q, device=device)
    for chunk in chunks(documents, plan.heads_kv, plan.ratio, plan.head_dim, plan.left, plan.right):
        scores = _Scores(plan, chunk, payloads)
        v = chunk.code_values(_e4m3(payloads["v"]), "k")
        e_v = chunk.token_exponents(_e4m3(payloads["v"]), "k")
        even = None
        if plan.recipe.products == "hopper" and plan.recipe.row_sum == "codes" and not plan.per_token:
            flags = uneven_documents(_e4m3(payloads["v"]).exponents, documents.cu_seqlens_k)
            even = chunk.documents(flags) == 0
        results = []
        for q0 in range(0, padded_length(chunk.group.len_q), TILE):
            m = min(TILE, scores.length - q0)
            rows = _ForwardRows(plan, scores, q0, m, even)
            for run in chunk.geometry.key_runs(q0, q0 + m, tiles_per_run(chunk), device):
                rows.visit(run, v, e_v)
            results.append(rows.finish())
        chunk.scatter(o, torch.cat([r[0] for r in results], 1), "q")
        chunk.scatter_table(lse2, torch.cat([r[1] for r in results], 1), "q")
        chunk.scatter_table(row_max, torch.cat([r[2] for r in results], 1), "q")
    return Forward(o, lse2, row_max)


class _Scores:
    """Scores of a chunk, from whatever the recipe multiplies."""

    def __init__(self, plan: Plan, chunk: Chunk, payloads: Payloads) -> None:
        self.scale = plan.score_scale
        # NVFP4 values are multiplied in BF16 there, into FP32.
        self.hopper = plan.recipe.products == "hopper" and plan.recipe.format == "mxfp8"
        q, k = payloads["q"], payloads["k"]
        if self.hopper:
            q, k = _e4m3(q), _e4m3(k)
            self.q, self.e_q = chunk.code_values(q, "q"), chunk.token_exponents(q, "q")
            self.k, self.e_k = chunk.code_values(k, "k"), chunk.token_exponents(k, "k")
        else:
            self.q, self.k = chunk.head_values(q, "q"), chunk.head_values(k, "k")
        self.length = self.q.shape[1]

    def __call__(self, rows: slice, keys: slice, visible: Tensor | None) -> Tensor:
        """As ``scaled_scores``: FP64 [N, rows, keys], base 2, -inf where masked."""
        q, k = self.q[:, rows], self.k[:, keys]
        if not self.hopper:
            return scaled_scores(q, k, self.scale, visible)
        factor = float(torch.tensor(self.scale, dtype=torch.float32))
        e = (self.e_q[:, rows].unsqueeze(-1) + self.e_k[:, keys].unsqueeze(1)).to(torch.float64)
        s = hopper_product(q, k.transpose(1, 2)).to(torch.float64) * torch.exp2(e) * factor
        return s if visible is None else s.masked_fill(~visible, -torch.inf)


class _ForwardRows:
    """Running state of one tile of m queries from q0 on."""

    def __init__(self, plan: Plan, scores: _Scores, q0: int, m: int, even: Tensor | None) -> None:
        """even: bool [N], problems whose row sums come from the tensor core; None: none."""
        self.plan, self.scores, self.rows, self.even = plan, scores, slice(q0, q0 + m), even
        self.hopper = plan.recipe.products == "hopper"
        self.product = hopper_product if self.hopper else exact_product
        # Groups of eight keys: pairs would be other columns in each thread that holds an accumulator of Hopper's.
        self.power = partial(schraudolph_mix, together=8) if plan.recipe.exponential == "schraudolph" else exp2
        q = scores.q
        n, _, d = q.shape

        def full(value: float, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.full((n, m), value, dtype=dtype, device=q.device)

        self.fraction = full(-torch.inf)  # f; -inf until the row has seen a key
        self.x_max, self.reference, self.total = full(-torch.inf), full(-torch.inf), full(0.0)
        self.top = full(_NONE, torch.int32)  # largest exponent of V among keys seen so far
        self.out = torch.zeros(n, m, d, device=q.device)
        self.pairs = torch.zeros(n, m, len(SUM_MANTISSAS) // 2, device=q.device)  # row sums by the tensor core

    def visit(self, run: Run, v: Tensor, e_v: Tensor) -> None:
        """Add the keys of a run, one tile after the other."""
        x = self.scores(self.rows, slice(run.start, run.stop), run.visible)
        width = x.shape[-1] // run.tiles
        for t in range(run.tiles):
            tile = slice(run.start + t * width, run.start + (t + 1) * width)
            self._tile(x[..., t * width : (t + 1) * width], v[:, tile], e_v[:, tile].unsqueeze(1), run.visible)

    def _tile(self, x: Tensor, v: Tensor, e_v: Tensor, visible: Tensor | None) -> None:
        recipe = self.plan.recipe
        top_x = x.amax(-1).to(torch.float32)
        f = torch.where(self.fraction == -torch.inf, torch.ceil(top_x * GRID) / GRID, self.fraction)
        safe_f = torch.where(f == -torch.inf, 0.0, f)
        top_z = (x + e_v).amax(-1).to(torch.float32)
        stepped = safe_f + torch.ceil(top_z - safe_f)
        first = self.reference == -torch.inf
        moves = first | (top_z - self.reference > (recipe.tau or 0.0))
        now = torch.where(moves, stepped, self.reference)
        safe = torch.where(now == -torch.inf, 0.0, now)
        p = self.power(x + (e_v + recipe.p_shift - safe.unsqueeze(-1)))
        if visible is not None:
            p = torch.where(visible, p, 0.0)  # Schraudolph's smallest value is not zero
        codes = formats.round_e4m3(p).to(torch.float64)
        seen = e_v if visible is None else torch.where(visible, e_v, _NONE)
        self.top = torch.maximum(self.top, seen.amax(-1).to(torch.int32))
        counted = p.to(torch.float64)
        if recipe.row_sum == "codes":
            counted = torch.where(e_v >= self.top.unsqueeze(-1) - FOLD_RANGE, codes, counted)
        sums, pairs = (counted * formats.pow2(-e_v)).sum(-1).to(torch.float32), None
        if self.even is not None:
            pairs = _pair_sums(codes, e_v)
        elif self.hopper and self.plan.per_token and recipe.row_sum == "codes":
            sums = _window_sums(codes, counted, e_v)
        factor = torch.where(now == self.reference, 1.0, exp2(self.reference - now))
        self.out = self.out * factor.unsqueeze(-1) + self.product(codes, v)
        self.total = self.total * factor + sums
        if pairs is not None:
            self.pairs = self.pairs * factor.unsqueeze(-1) + pairs
        self.fraction, self.reference, self.x_max = f, now, torch.maximum(self.x_max, top_x)

    def finish(self) -> tuple[Tensor, Tensor, Tensor]:
        """o [N, m, D], lse2 [N, m], M [N, m]."""
        total, weighed = self.total, torch.ones_like(self.total)
        count = total
        if self.even is not None:
            even, (first, *rest) = self.even.unsqueeze(-1), self.pairs.unbind(-1)
            count = torch.where(even, first * 0.5, total)
            total = torch.where(even, (first + rest[0]) + (rest[1] + rest[2]), total)
            weighed = torch.where(even, sum(1 + m / 8 for m in SUM_MANTISSAS), weighed)
        bad, seen = total.isnan(), total > 0
        inverse = torch.where(seen, weighed / torch.where(seen, total, 1.0), 0.0)
        lse2 = torch.where(seen, self.reference + (log2(count) - self.plan.recipe.p_shift), -torch.inf)
        m = self.fraction + torch.ceil(self.x_max - self.fraction)
        m = torch.where(self.fraction == -torch.inf, 0.0, m)
        inverse, lse2 = torch.where(bad, total, inverse), torch.where(bad, total, lse2)
        return self.out * inverse.unsqueeze(-1), lse2, m


def _pair_sums(codes: Tensor, e_v: Tensor) -> Tensor:
    """Sums FP32 [N, m, 4] of codes times 2^-e_V as Hopper's tensor core makes them: two of ``SUM_MANTISSAS`` together.

    e_v: int32 [N, 1, w], of documents whose exponents vary by at most ``FOLD_RANGE``.
    """
    tops = e_v.amax(-1, keepdim=True)
    column = formats.pow2((tops - e_v).clamp(max=FOLD_RANGE)).transpose(1, 2)
    columns = column * (1 + torch.tensor(SUM_MANTISSAS, device=e_v.device) / 8)
    sums = hopper_product(codes, columns).unflatten(-1, (-1, 2))
    return (sums[..., 0] + sums[..., 1]) * formats.pow2(-tops)


def _window_sums(codes: Tensor, counted: Tensor, e_v: Tensor) -> Tensor:
    """Sums FP32 [N, m] of ``counted`` 2^(-e_V) as Hopper's tensor core makes them of codes, FP64 [N, m, w] both.

    A column per window of exponents, so that no other key decides how a code is cut off; what columns miss is added in
    FP32. e_v: int32 [N, 1, w].
    """
    window, place = (e_v - VALUE_MIN_EXPONENT) // SUM_WINDOW, (e_v - VALUE_MIN_EXPONENT) % SUM_WINDOW
    index = torch.arange(SUM_WINDOWS, device=e_v.device)
    columns = torch.where(window == index.view(-1, 1), formats.pow2(SUM_WINDOW // 2 - place), 0.0)  # [N, windows, w]
    scale = formats.pow2(-(VALUE_MIN_EXPONENT + SUM_WINDOW // 2 + SUM_WINDOW * index.to(torch.int32)))
    sums = (hopper_product(codes, columns.transpose(1, 2)) * scale).sum(-1)
    missing = counted - torch.where(window < SUM_WINDOWS, codes, 0.0)
    return sums + (missing * formats.pow2(-e_v)).sum(-1).to(torch.float32)


# ----------------------------------------------------------------------------------------------------- backward


def backward(
    plan: Plan,
    payloads: Payloads,
    do_payloads: Payloads,
    documents: Documents,
    lse2: Tensor,
    row_max: Tensor,
    delta: Tensor,
    do_norm: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq FP32 [T, heads, D], dk and dv FP32 [Tk, kv heads, D] before the inverse rotation of dq and dk.

    Arguments as ``reference.backward.backward``; ``do_payloads["do"]`` holds T with one exponent per token, row_max M.
    """

    def step(chunk: Chunk) -> _ChunkBackward:
        return _ChunkBackward(plan, chunk, payloads, do_payloads, lse2, row_max, delta, do_norm)

    return over_chunks(plan, documents, step)


class _ChunkBackward:
    """Operands and per-query constants of one chunk, and the dQ accumulator that its key tiles add to."""

    def __init__(
        self,
        plan: Plan,
        chunk: Chunk,
        payloads: Payloads,
        do_payloads: Payloads,
        lse2: Tensor,
        row_max: Tensor,
        delta: Tensor,
        do_norm: Tensor,
    ) -> None:
        self.plan, self.chunk = plan, chunk
        self.exact = bool(plan.recipe.exact_operands)
        self.scores = _Scores(plan, chunk, payloads)
        self.hopper = plan.recipe.products == "hopper"
        self.product = hopper_product if self.hopper else exact_product
        self.span = HOPPER_SPAN if self.hopper else PROMOTION
        eight = ("q8", "k8") if plan.recipe.format == "nvfp4" else ("q", "k")
        q8, k8, v8 = _e4m3(payloads[eight[0]]), _e4m3(payloads[eight[1]]), _e4m3(payloads["v"])
        t8 = _e4m3(do_payloads["do"])
        self.c_q, self.e_q = chunk.code_values(q8, "q"), chunk.token_exponents(q8, "q")
        self.c_k, self.e_k = chunk.code_values(k8, "k"), chunk.token_exponents(k8, "k")
        self.c_v, self.e_v = chunk.code_values(v8, "k"), chunk.token_exponents(v8, "k")
        self.c_t, self.e_t = chunk.code_values(t8, "q"), chunk.token_exponents(t8, "q")
        lse2, self.m = chunk.table(lse2, "q"), chunk.table(row_max, "q")
        # Rows whose T is zero (no key, dO = 0, padding) must not set C. They give nothing, but for a gradient through
        # lse, which is then all of delta: any exponent serves those, C makes the powers below small.
        delta = chunk.table(delta, "q")
        nonzero = (self.c_t != 0).any(-1) | self.c_t.isnan().any(-1)
        self.c = self._group_exponents(nonzero)
        self.e_t = torch.where(nonzero, self.e_t, self.c)
        self.live = nonzero | (delta != 0)
        # B = delta 2^(C - 8 - e_T + M - lse + e_Q): one rounded product, the rest exact powers.
        ratio = exp2(torch.where(lse2 == -torch.inf, -torch.inf, self.m - lse2))
        whole = self.c - PROBABILITY_SHIFT - torch.where(self.live, self.e_t, 0) + self.e_q
        self.unit = torch.where(self.live, self.c - PROBABILITY_SHIFT + self.e_q, 0)
        # Through FP64: the power itself may pass FP32's range where T varies by more than 2^120.
        b = torch.ldexp((delta * ratio).to(torch.float64), whole).to(torch.float32)
        self.b = torch.where(self.live, b, 0.0)
        self.half = torch.float16 if plan.recipe.accumulator == "fp16" else torch.float32
        self.device = self.c_q.device
        self.accumulator = torch.zeros(self.c_q.shape, dtype=self.half, device=self.device)
        self.prescale = torch.zeros(self.c_q.shape[:2], dtype=torch.int32, device=self.device)
        if self.half is torch.float16:
            self.prescale = prescale(plan, chunk, chunk.gather(do_norm.transpose(0, 1), "q"), payloads)

    def _group_exponents(self, nonzero: Tensor) -> Tensor:
        # C: the largest exponent of T in every 256 queries from the document's start, int32 [N, L]
        e = torch.where(nonzero, self.e_t, _NONE)
        parts = [part.amax(1, keepdim=True).expand_as(part) for part in e.split(PROMOTION, 1)]
        c = torch.cat(parts, 1)
        return torch.where(c == _NONE, 0, c)

    def key_tile(self, k0: int) -> tuple[Tensor, Tensor]:
        """dK and dV of one tile of keys, FP32 [N, w, D]; adds the tile's partials to the dQ accumulator."""
        k1 = min(k0 + TILE, self.c_k.shape[1])
        keys = slice(k0, k1)
        promoted = _Promotion(self.c_k[:, keys])
        exponents = [torch.full((self.c_q.shape[0],), _NONE, dtype=torch.int32, device=self.device)] * 2
        # Without a mask tiles of keys begin at different queries: CTAs then do not all read and add to the same ones.
        around = self.plan.left is None and self.plan.right is None and not self.plan.deterministic
        for run in self.chunk.geometry.query_runs(k0, k1, tiles_per_run(self.chunk), self.device, around=around):
            rows = slice(run.start, run.stop)
            p = self._weights(run, rows, keys)
            p_codes = formats.round_e4m3(torch.where(self.live[:, rows].unsqueeze(-1), p, 0.0)).to(torch.float64)
            ds = self._scores_gradient(p, rows, keys)
            if run.visible is not None:
                ds = torch.where(run.visible, ds, 0.0)
            blocks, pairs, exponents = _kept_exponents(ds, exponents)
            to_dk = formats.round_e4m3(ds * formats.pow2(-pairs)).to(torch.float64)
            if self.plan.recipe.exact_ds:
                parts = ds.abs().split(KEYS, -1)
                rows_of = [formats.e8m0_exponent(part.amax(-1, keepdim=True), "e4m3").expand_as(part) for part in parts]
                blocks = torch.cat(rows_of, -1)
            to_dq = formats.round_e4m3(ds * formats.pow2(-blocks)).to(torch.float64)
            counters.count_ds(ds, to_dq)
            scales = _power(blocks - self.e_q[:, rows].unsqueeze(-1))
            self._accumulate(self._dq_partial(to_dq, scales, keys), rows)
            height = min(self.span, TILE, ds.shape[1])
            for start in range(0, ds.shape[1], height):
                q0 = run.start + start
                part, tile = slice(start, start + height), slice(q0, q0 + height)
                # The exponent of a warpgroup's 64 keys is one for 64 queries, so it may be applied behind the product.
                e = pairs[:, start]
                if self.hopper:
                    dk = hopper_product(to_dk[:, part].transpose(1, 2), self.c_q[:, tile]) * _power(e).unsqueeze(-1)
                    dv = hopper_product(p_codes[:, part].transpose(1, 2), self.c_t[:, tile])
                else:
                    scaled = to_dk[:, part] * formats.pow2(pairs[:, part])
                    dk = torch.bmm(scaled.transpose(1, 2), self.c_q[:, tile])
                    dv = torch.bmm(p_codes[:, part].transpose(1, 2), self.c_t[:, tile])
                promoted.add(q0 // self.span, dk, dv, self.c[:, q0])
        dk32, dv32 = promoted.result()
        dk32 = dk32 * formats.pow2(-self.e_k[:, keys]).unsqueeze(-1) * self.plan.softmax_scale
        return dk32, dv32

    def _dq_partial(self, ds: Tensor, scales: Tensor, keys: slice) -> Tensor:
        """Codes of dS [N, m, w], times their scales, times K: FP32 [N, m, D]."""
        if not self.hopper:
            return exact_product(ds * scales, self.c_k[:, keys])
        total = None
        for start in range(0, ds.shape[-1], HOPPER_SPAN):
            part = slice(start, start + HOPPER_SPAN)
            one = hopper_product(ds[..., part], self.c_k[:, keys][:, part]) * scales[..., start, None]
            total = one if total is None else total + one
        assert total is not None
        return total

    def _weights(self, run: Run, rows: slice, keys: slice) -> Tensor:
        """2^(x - M + e_T - C + 8), FP32 [N, rows, keys], zero where masked."""
        x = self.scores(rows, keys, run.visible)
        live, m = self.live[:, rows], self.m[:, rows]
        power = torch.where(live, self.e_t[:, rows] - self.c[:, rows], 0) + PROBABILITY_SHIFT
        if self.exact:  # C comes from later queries too: it must not touch a rounding
            half = power // 2  # in two steps: the power may be below FP32's range, the weight is then zero or subnormal
            p = exp2(x - m.unsqueeze(-1)) * formats.pow2(half).unsqueeze(-1) * formats.pow2(power - half).unsqueeze(-1)
        else:
            p = exp2(x + (power - m).unsqueeze(-1))
        return p if run.visible is None else torch.where(run.visible, p, 0.0)

    def _scores_gradient(self, p: Tensor, rows: slice, keys: slice) -> Tensor:
        """dS 2^(e_Q + e_K), FP32 [N, rows, keys]."""
        dp = self.product(self.c_t[:, rows], self.c_v[:, keys].transpose(1, 2)).to(torch.float64)
        scale = self.unit[:, rows].unsqueeze(-1) + (self.e_k + self.e_v)[:, keys].unsqueeze(1)
        power = torch.ldexp(torch.ones_like(scale, dtype=torch.float64), scale)
        b = self.b[:, rows].unsqueeze(-1) * formats.pow2(self.e_k[:, keys]).unsqueeze(1)
        return p * torch.where(self.live[:, rows].unsqueeze(-1), dp * power - b, 0.0).to(torch.float32)

    def _accumulate(self, partial: Tensor, rows: slice) -> None:
        scaled = partial * formats.pow2(self.prescale[:, rows]).unsqueeze(-1)
        self.accumulator[:, rows] += scaled.to(self.half)

    def finished_dq(self) -> Tensor:
        """The accumulated dQ, FP32 [N, L, D]: prescale and softmax scale undone."""
        counters.count_accumulator(self.accumulator)
        scale = formats.pow2(-self.prescale) * self.plan.softmax_scale
        return self.accumulator.to(torch.float32) * scale.unsqueeze(-1)


class _Promotion:
    """dK and dV of a key tile: one exact partial per 256 queries (Hopper's sums: 64), rounded and added in FP32."""

    def __init__(self, like: Tensor) -> None:
        self.dk, self.dv = (torch.zeros_like(like, dtype=torch.float32) for _ in range(2))
        self.group = -1
        self.partial_dk = self.partial_dv = torch.zeros_like(like)
        self.c = torch.zeros(like.shape[0], dtype=torch.int32, device=like.device)

    def add(self, group: int, dk: Tensor, dv: Tensor, c: Tensor) -> None:
        if group != self.group:
            self._flush()
            self.group, self.c = group, c
            self.partial_dk, self.partial_dv = dk, dv
        else:
            self.partial_dk, self.partial_dv = self.partial_dk + dk, self.partial_dv + dv

    def _flush(self) -> None:
        power = _power(self.c - PROBABILITY_SHIFT).view(-1, 1, 1)
        self.dk = self.dk + self.partial_dk.to(torch.float32)
        self.dv = self.dv + self.partial_dv.to(torch.float32) * power

    def result(self) -> tuple[Tensor, Tensor]:
        self._flush()
        return self.dk, self.dv


def _power(exponent: Tensor) -> Tensor:
    """2^exponent for a sum of exponents, held to FP32's range: it must not pass for the exponent that marks a NaN."""
    return formats.pow2(exponent.clamp(formats.MIN_EXPONENT, 127))


def _kept_exponents(ds: Tensor, exponents: list[Tensor]) -> tuple[Tensor, Tensor, list[Tensor]]:
    """``_kept_column`` of the 64 keys of each half of a tile: exponents int32 [N, m, w], and those in force after."""
    parts = ds.split(KEYS, -1)
    made = [_kept_column(part, e) for part, e in zip(parts, exponents, strict=False)]
    wide = [[e.unsqueeze(-1).expand_as(part) for e in one[:2]] for part, one in zip(parts, made, strict=True)]
    blocks, pairs = (torch.cat([one[i] for one in wide], -1) for i in range(2))
    return blocks, pairs, [one[2] for one in made]


def _kept_column(ds: Tensor, exponent: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Exponents of dS for some keys, kept from one block of 32 queries to the next while they serve.

    ds: FP32 [N, m, w]; exponent: int32 [N], the one in force before, ``_NONE`` before the first gradient. Returns per
    row, int32 [N, m], the exponent of its 32 queries and that of its 64, which is the larger one of two blocks that are
    not zero; and the one in force after.
    """
    height = min(BLOCK, ds.shape[1])
    tops = ds.abs().amax(-1).unflatten(-1, (-1, height)).amax(-1)  # [N, blocks]
    own = formats.e8m0_exponent(tops, "e4m3")
    result = []
    for top, e in zip(tops.unbind(-1), own.unbind(-1), strict=True):
        scaled = top * formats.pow2(-exponent.clamp(-126, 126))
        serves = (exponent != _NONE) & (scaled > LOWEST) & (scaled <= formats.E4M3_MAX)
        exponent = torch.where((top == 0) | serves, exponent, e)
        result.append(torch.where(exponent == _NONE, 0, exponent))
    blocks = torch.stack(result, -1)
    shared = [
        torch.where(t != 0, e, _NONE).amax(-1, keepdim=True).expand_as(e)
        for t, e in zip(tops.split(2, -1), blocks.split(2, -1), strict=True)
    ]
    pairs = torch.cat(shared, -1)
    pairs = torch.where(pairs == _NONE, blocks, pairs)
    return blocks.repeat_interleave(height, -1), pairs.repeat_interleave(height, -1), exponent
