"""Backward of the "block" variant: the paper's arithmetic (3.3, 3.4, A.3-A.5), key tiles outermost, ascending.

dS = P (dP - delta) with P = 2^(s - lse2) rebuilt from the forward's operands. dK and dV add one FP32 partial per tile
of 128 queries, ascending; dQ adds one partial per tile of 128 keys, ascending, in FP16 after a power-of-two prescale.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from flamia import formats
from flamia.bounds import ACCUMULATOR_TARGET, lost_weight
from flamia.documents import Documents
from flamia.plan import Plan
from flamia.quantize.payloads import Payloads
from flamia.reference import counters
from flamia.reference.chunks import Chunk, chunks
from flamia.reference.exponentials import exp2
from flamia.reference.forward import scaled_scores, tiles_per_run
from flamia.reference.geometry import BLOCK, TILE, Run, padded_length
from flamia.reference.weights import FP4_BACKWARD_SHIFT, scale_groups

PROBABILITY_SHIFT = 8  # dV's probability operand is E4M3(P * 2^8), P <= 1


def prescale(plan: Plan, chunk: Chunk, do_norm: Tensor, payloads: Payloads) -> Tensor:
    """Exponent p of the dQ accumulator's prescale 2^p, int32 [N, L].

    |sum_j dS_ij K_jc| <= ((1 + 2 lambda) ||dO_i||_1 max|V| + |dlse_i|) max|K|: a mean absolute deviation under the
    weights that the denominator counts, and twice the largest |dP| for the weight lambda that it misses
    (docs/numerics.md). "sequence" takes the maxima over the document, "causal" over the keys that the row sees or that
    come before them.

    do_norm: FP32 [N, L, 2], ||dO_i||_1 and |dlse_i|.
    """
    v_max = chunk.table(payloads.v_amax, "k", False)
    k_max = chunk.table(payloads.k_amax, "k", False)
    norm, dlse = do_norm.unbind(-1)
    if plan.recipe.accumulator_scale == "causal":
        geometry = chunk.geometry
        last = torch.tensor(
            [max(geometry.last_key(i), 0) for i in range(norm.shape[1])], dtype=torch.int64, device=norm.device
        )
        v_max, k_max = v_max.cummax(1).values[:, last], k_max.cummax(1).values[:, last]
        keys = (last + 1).to(torch.float32)
    else:
        norm, dlse, v_max, k_max = (x.amax(1, keepdim=True) for x in (norm, dlse, v_max, k_max))
        keys = torch.full((1,), float(chunk.group.len_k), device=norm.device)
    weight = lost_weight(plan, keys)
    bound = (norm * v_max * weight + dlse * weight) * k_max
    p = ACCUMULATOR_TARGET[plan.recipe.format] - formats.ceil_log2(bound)
    return p.clamp(formats.MIN_EXPONENT, 126).expand(do_norm.shape[:2])


class ChunkStep(Protocol):
    """Backward of one chunk, a key tile at a time."""

    def key_tile(self, k0: int) -> tuple[Tensor, Tensor]:
        """dK and dV of the tile of keys that starts at k0, FP32 [N, w, D]; adds to the dQ accumulator."""

    def finished_dq(self) -> Tensor:
        """dQ after the last tile, FP32 [N, L, D]."""


def over_chunks(
    plan: Plan, documents: Documents, step_of: Callable[[Chunk], ChunkStep]
) -> tuple[Tensor, Tensor, Tensor]:
    """dq FP32 [T, heads, D], dk and dv FP32 [Tk, kv heads, D] of all documents, key tiles ascending."""
    device = documents.cu_seqlens_q.device
    dq = torch.zeros(documents.total_q, plan.heads_q, plan.head_dim, device=device)
    dk = torch.zeros(documents.total_k, plan.heads_kv, plan.head_dim, device=device)
    dv = torch.zeros_like(dk)
    for chunk in chunks(documents, plan.heads_kv, plan.ratio, plan.head_dim, plan.left, plan.right):
        step = step_of(chunk)
        parts = [step.key_tile(k0) for k0 in range(0, padded_length(chunk.group.len_k), TILE)]
        chunk.scatter(dq, step.finished_dq(), "q")
        chunk.scatter(dk, chunk.sum_shared(torch.cat([p[0] for p in parts], 1)), "k")
        chunk.scatter(dv, chunk.sum_shared(torch.cat([p[1] for p in parts], 1)), "k")
    return dq, dk, dv


def backward(
    plan: Plan,
    payloads: Payloads,
    do_payloads: Payloads,
    documents: Documents,
    lse2: Tensor,
    delta: Tensor,
    do_norm: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq FP32 [T, heads, D], dk and dv FP32 [Tk, kv heads, D] before the inverse rotation of dq and dk.

    Args:
        payloads, lse2: of the forward; lse2 FP32 [heads, T].
        do_payloads: of do. delta: FP32 [heads, T], do . o of the quantized do, minus dlse where it is given.
        do_norm: FP32 [heads, T, 2], the L1 norm of do and |dlse|.
    """

    def step(chunk: Chunk) -> _ChunkBackward:
        return _ChunkBackward(plan, chunk, payloads, do_payloads, lse2, delta, do_norm)

    return over_chunks(plan, documents, step)


class _ChunkBackward:
    """Operands of one chunk and the dQ accumulator that its key tiles add to."""

    def __init__(
        self,
        plan: Plan,
        chunk: Chunk,
        payloads: Payloads,
        do_payloads: Payloads,
        lse2: Tensor,
        delta: Tensor,
        do_norm: Tensor,
    ) -> None:
        self.plan, self.chunk, self.recipe = plan, chunk, plan.recipe
        self.fp4 = plan.recipe.format == "fp4"
        self.q = chunk.head_values(payloads["q"], "q")
        self.k = chunk.head_values(payloads["k"], "k")
        self.v = chunk.head_values(payloads["v"], "k")
        self.do = chunk.head_values(do_payloads["do"], "q")
        self.q_exponents = self.k_exponents = self.do_exponents = None
        if self.fp4:
            self.q_tokens = chunk.token_values(payloads["q_columns"], "q")
            self.k_tokens = chunk.token_values(payloads["k_columns"], "k")
            self.k_keyed = chunk.token_values(payloads["k_tokens"], "k")
            self.do_tokens = chunk.token_values(do_payloads["do_columns"], "q")
            self.k_exponents = chunk.token_exponents(payloads["k_tokens"], "k")  # type: ignore[arg-type]
            self.head = _head_index(plan, chunk)
        else:
            eight = ("q8", "k8") if self.recipe.format == "nvfp4" else ("q", "k")
            self.q_tokens = chunk.token_values(payloads[eight[0]], "q")
            self.k_tokens = chunk.token_values(payloads[eight[1]], "k")
            self.do_tokens = chunk.token_values(do_payloads["do"], "q")
            if plan.per_token:
                self.q_exponents = chunk.token_exponents(payloads[eight[0]], "q")  # type: ignore[arg-type]
                self.k_exponents = chunk.token_exponents(payloads[eight[1]], "k")  # type: ignore[arg-type]
                self.do_exponents = chunk.token_exponents(do_payloads["do"], "q")  # type: ignore[arg-type]
        sentinel = chunk.table(lse2, "q")
        self.lse2 = torch.where(sentinel == -torch.inf, torch.inf, sentinel)
        self.delta = chunk.table(delta, "q")
        half = torch.float16 if self.recipe.accumulator == "fp16" else torch.float32
        self.accumulator = torch.zeros(self.q.shape, dtype=half, device=self.q.device)
        if half is torch.float16:
            norm = chunk.gather(do_norm.transpose(0, 1), "q")
            self.prescale = prescale(plan, chunk, norm, payloads)
        else:
            self.prescale = torch.zeros(self.q.shape[:2], dtype=torch.int32, device=self.q.device)

    def key_tile(self, k0: int) -> tuple[Tensor, Tensor]:
        """dK and dV of one tile of keys, FP32 [N, w, D]; adds the tile's partials to the dQ accumulator."""
        k1 = min(k0 + TILE, self.k.shape[1])
        dk = torch.zeros_like(self.k[:, k0:k1], dtype=torch.float32)
        dv = torch.zeros_like(dk)
        for run in self.chunk.geometry.query_runs(k0, k1, tiles_per_run(self.chunk), self.k.device):
            rows = slice(run.start, run.stop)
            s = scaled_scores(self.q[:, rows], self.k[:, k0:k1], self.plan.score_scale, run.visible)
            p = exp2(s - self.lse2[:, rows].unsqueeze(-1))
            dp = torch.bmm(self.do[:, rows], self.v[:, k0:k1].transpose(1, 2)).to(torch.float32)
            ds = p * (dp - self.delta[:, rows].unsqueeze(-1))
            if run.visible is not None:
                ds = torch.where(run.visible, ds, 0.0)
            p_operand = self._probabilities(p, run)
            to_dq, to_dk, k_operand = self._scores_gradient(ds, run, k0, k1)
            height = p.shape[1] // run.tiles
            for t in range(run.tiles):
                piece = slice(t * height, (t + 1) * height)
                tile = slice(run.start + t * height, run.start + (t + 1) * height)
                dv = dv + torch.bmm(p_operand[:, piece].transpose(1, 2), self.do_tokens[:, tile]).to(torch.float32)
                dk = dk + torch.bmm(to_dk[:, piece].transpose(1, 2), self.q_tokens[:, tile]).to(torch.float32)
            self._accumulate(torch.bmm(to_dq, k_operand).to(torch.float32), rows)
        return dk * self.plan.softmax_scale, dv

    def finished_dq(self) -> Tensor:
        """The accumulated dQ, FP32 [N, L, D]: order, prescale and softmax scale undone."""
        counters.count_accumulator(self.accumulator)
        scale = formats.pow2(-self.prescale) * self.plan.softmax_scale
        return self.accumulator.to(torch.float32) * scale.unsqueeze(-1)

    def _accumulate(self, partial: Tensor, rows: slice) -> None:
        scaled = partial * formats.pow2(self.prescale[:, rows]).unsqueeze(-1)
        self.accumulator[:, rows] += scaled.to(self.accumulator.dtype)

    def _probabilities(self, p: Tensor, run: Run) -> Tensor:
        """Operand of dV in P's units, FP64 [N, rows, keys]."""
        if self.fp4:  # groups along queries: a second representation of P (paper 3.4)
            return scale_groups(p.transpose(1, 2).contiguous(), FP4_BACKWARD_SHIFT).transpose(1, 2).to(torch.float64)
        scaled = p * 2.0**PROBABILITY_SHIFT
        if self.do_exponents is None:
            return formats.round_e4m3(scaled).to(torch.float64) * 2.0**-PROBABILITY_SHIFT
        weight = _relative(self.do_exponents[:, run.start : run.stop])
        return formats.round_e4m3(scaled * weight).to(torch.float64) / weight * 2.0**-PROBABILITY_SHIFT

    def _scores_gradient(self, ds: Tensor, run: Run, k0: int, k1: int) -> tuple[Tensor, Tensor, Tensor]:
        """dS as the operand of dQ and as the operand of dK, FP64, and the K values that the former multiplies."""
        if self.fp4:
            to_dq, to_dk, k_operand = self._four_bit(ds, run, k0, k1)
        elif self.recipe.exact_ds:
            weight = 1.0 if self.k_exponents is None else formats.pow2(self.k_exponents[:, k0:k1]).unsqueeze(1)
            to_dq = _block_scaled(ds * weight, 1, BLOCK) / weight
            relative = None if self.q_exponents is None else _relative(self.q_exponents[:, run.start : run.stop])
            to_dk = _block_scaled(ds if relative is None else ds * relative, BLOCK, BLOCK)
            to_dk = to_dk if relative is None else to_dk / relative
            k_operand = self.k_tokens[:, k0:k1]
        else:
            to_dq = to_dk = _block_scaled(ds, BLOCK, BLOCK)
            k_operand = self.k_tokens[:, k0:k1]
        counters.count_ds(ds, to_dq)
        return to_dq, to_dk, k_operand

    def _four_bit(self, ds: Tensor, run: Run, k0: int, k1: int) -> tuple[Tensor, Tensor, Tensor]:
        fold = bool(self.recipe.exact_operands) and run.diagonal
        weight: Tensor | float = 1.0
        if fold:
            assert self.k_exponents is not None
            weight = formats.pow2(self.k_exponents[:, k0:k1].clamp(min=-60)).unsqueeze(1)
        i = torch.arange(run.start, run.stop, device=ds.device).view(1, -1, 1)
        j = torch.arange(k0, k1, device=ds.device).view(1, 1, -1)
        # The row's lse stands in for a step counter: it moves with the inputs, and only earlier tokens move it.
        row = self.lse2[:, run.start : run.stop].contiguous().view(torch.int32).to(torch.int64).unsqueeze(-1)
        to_dq = self._groups(ds * weight, row, i, j, 0).to(torch.float64) / weight
        to_dk = self._groups(ds.mT, row.mT, i.mT, j.mT, 1).mT
        return to_dq, to_dk.to(torch.float64), (self.k_keyed if fold else self.k_tokens)[:, k0:k1]

    def _groups(self, y: Tensor, row: Tensor, i: Tensor, j: Tensor, copy: int) -> Tensor:
        """E2M1 with one UE8M0 scale per 32 entries of the last dimension, stochastically rounded.

        row: bits of lse2, i, j: query and key, broadcastable to y; with seed, head and copy they are the counter.
        """
        groups = y.contiguous().unflatten(-1, (-1, min(BLOCK, y.shape[-1])))
        e = formats.e8m0_exponent(groups.abs().amax(-1, keepdim=True), "e2m1")
        scaled = groups * formats.pow2(-e)
        if self.recipe.stochastic_rounding:
            which = torch.tensor(copy, device=y.device)
            bits = formats.counter_bits(self.recipe.seed, which, self.head.view(-1, 1, 1), i, j, row)
            codes = formats.round_e2m1_stochastic(scaled, bits.view(groups.shape))
        else:
            codes = formats.round_e2m1(scaled)
        return (codes * formats.pow2(e)).flatten(-2)


def _head_index(plan: Plan, chunk: Chunk) -> Tensor:
    # query head of each of the N problems, int64 [N]
    first, last = chunk.heads[0] * plan.ratio, chunk.heads[1] * plan.ratio
    return torch.arange(first, last, device=chunk.device).repeat(len(chunk.group.index))


def _relative(exponents: Tensor) -> Tensor:
    """2^(e - largest e of its 32 tokens), FP32 [N, L, 1]: per-token exponents of an operand contracted along tokens."""
    width = min(BLOCK, exponents.shape[-1])
    top = exponents.unflatten(-1, (-1, width)).amax(-1).repeat_interleave(width, -1)
    return formats.pow2((exponents - top).clamp(min=-60)).unsqueeze(-1)


def _block_scaled(y: Tensor, rows: int, columns: int) -> Tensor:
    """E4M3 with one UE8M0 exponent, rounded up, per rows x columns block: values FP64 of y [N, m, n] FP32."""
    height, width = min(rows, y.shape[1]), min(columns, y.shape[2])
    blocks = y.unflatten(2, (-1, width)).unflatten(1, (-1, height))  # [N, m/h, h, n/w, w]
    e = formats.e8m0_exponent(blocks.abs().amax((2, 4), keepdim=True), "e4m3")
    values = formats.round_e4m3(blocks * formats.pow2(-e)).to(torch.float64) * formats.pow2(e)
    return values.flatten(3, 4).flatten(1, 2)
