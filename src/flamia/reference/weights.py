"""How softmax weights become tensor-core operands. One small class per kind of probability operand.

Each turns base-2 scores of a run of key tiles into weights that multiply V in the chunk's FP64 product, and into the
row sums per tile. Shapes: N problems, m query rows, t tiles of w keys, n = t * w keys.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flamia import formats
from flamia.bounds import FOLD_RANGE
from flamia.plan import Plan
from flamia.quantize.payloads import Payloads
from flamia.reference.chunks import Chunk
from flamia.reference.exponentials import exp2, mitchell, schraudolph_mix
from flamia.reference.geometry import BLOCK, Run

FP4_BACKWARD_SHIFT = 11  # 2^11 / 6 <= 448: the normalised P^T of the 4-bit dV, P <= 1
FP4_SCALE_LIMIT = 11  # a4 + exponent at which the UE4M3 scale of P * 2^e would pass 448 (log2(6 * 448) = 11.39)
# Off the diagonal the largest weight of a group comes to about 6.2 units of its scale and saturates at 6: the finer
# grid gains the other weights more than that loses. Rows of few keys, whose largest weight is most of them, gain
# nothing.
FP4_P_UNITS, FP4_DIAGONAL_UNITS = 6.2, 6.0


def group_max(exponents: Tensor, visible: Tensor | None) -> Tensor:
    """Largest exponent among the visible keys of every 32, [N, m or 1, n], int32; 0 where a group shows none.

    exponents: int32 [N, n]; visible: bool [m, n] or None.
    """
    e = exponents.unsqueeze(1)
    width = min(BLOCK, e.shape[-1])
    if visible is not None:
        e = torch.where(visible, e, -1000)
    top = e.unflatten(-1, (-1, width)).amax(-1).repeat_interleave(width, -1)
    return torch.where(top == -1000, 0, top)


def weight_scale(top: Tensor, units: float) -> Tensor:
    """UE4M3 scale (FP32 value) of a group of weights, the largest ``top``: E4M3(top / units), by an FP32 product."""
    return formats.round_ue4m3(top * (1 / units))


def scale_groups(y: Tensor, shift: int, units: float = FP4_DIAGONAL_UNITS) -> Tensor:
    """Values of y (>= 0) in E2M1 with one UE4M3 scale per 32 entries of the last dimension, taken after 2^shift.

    The all-4-bit probability operand: scale = ``weight_scale``(max * 2^shift) * 2^-shift. FP32 in, FP32 out.
    """
    width = min(BLOCK, y.shape[-1])
    groups = (y * 2.0**shift).unflatten(-1, (-1, width))
    scale = weight_scale(groups.amax(-1, keepdim=True), units)
    codes = torch.where(scale == 0, 0.0, formats.round_e2m1(groups / torch.where(scale == 0, 1.0, scale)))
    return (codes * scale).flatten(-2) * 2.0**-shift


class EightBitWeights:
    """E4M3(2^(s - m + a)), with V's per-token exponents folded in before rounding where operands are exact."""

    def __init__(self, plan: Plan, chunk: Chunk, payloads: Payloads) -> None:
        recipe = plan.recipe
        self.shift = recipe.p_shift
        self.codes = recipe.row_sum == "codes"
        self.exp2 = schraudolph_mix if recipe.exponential == "schraudolph" else exp2
        self.values = chunk.token_values(payloads["v"], "k")
        self.exponents = chunk.token_exponents(payloads["v"], "k") if plan.per_token else None  # type: ignore[arg-type]

    def bump(self, run: Run) -> Tensor | None:
        """Power of two to add to the row reference for this run; None: nothing."""
        return None

    def operand(self, run: Run) -> Tensor:
        """V values FP64 [N, n, D] of this run."""
        return self.values[:, run.start : run.stop]

    def __call__(self, scores: Tensor, reference: Tensor, run: Run) -> tuple[Tensor, Tensor]:
        """Weights times 2^a, FP64 [N, m, n], and row sums of them per tile, FP32 [N, m, t].

        scores: FP64 [N, m, n], base 2, -inf where masked; reference: FP32 [N, m, t], finite.
        """
        tiles = reference.shape[-1]
        addend = (self.shift - reference).unsqueeze(-1)
        p = self.exp2(scores.unflatten(-1, (tiles, -1)) + addend).flatten(-2)
        if self.exponents is None:
            rounded = formats.round_e4m3(p).to(torch.float64)
            counted = rounded if self.codes else p
        else:
            e = self.exponents[:, run.start : run.stop]
            fold = (e.unsqueeze(1) - group_max(e, run.visible)).clamp(-120, 120)
            if run.visible is not None:
                fold = torch.where(run.visible, fold, 0)
            weight = formats.pow2(fold)
            rounded = formats.round_e4m3(p * weight).to(torch.float64) / weight
            counted = torch.where(fold >= -FOLD_RANGE, rounded, p.to(torch.float64)) if self.codes else p
        sums = counted.unflatten(-1, (tiles, -1)).sum(-1, dtype=torch.float64).to(torch.float32)
        return rounded, sums


class FourBitWeights:
    """E2M1 with a UE4M3 scale per 32 visible keys; per-key scales of V folded in on diagonal tiles (paper 3.2)."""

    def __init__(self, plan: Plan, chunk: Chunk, payloads: Payloads) -> None:
        recipe = plan.recipe
        self.shift = recipe.p_shift
        self.codes = recipe.row_sum == "codes"
        self.fold = bool(recipe.exact_operands)
        self.approximate = recipe.exponential == "mitchell"
        self.grouped = chunk.token_values(payloads["v_columns"], "k")
        self.keyed = chunk.token_values(payloads["v_tokens"], "k")
        self.exponents = chunk.token_exponents(payloads["v_tokens"], "k")  # type: ignore[arg-type]

    def _folds(self, run: Run) -> bool:
        return self.fold and run.diagonal

    def bump(self, run: Run) -> Tensor | None:
        """Keeps the UE4M3 scale of P * 2^e below its limit, from visible keys only: [N, m], >= 0."""
        if not self._folds(run) or run.visible is None:
            return None
        e = torch.where(run.visible, self.exponents[:, run.start : run.stop].unsqueeze(1), -1000)
        return (e.amax(-1) + self.shift - FP4_SCALE_LIMIT).clamp(min=0)

    def operand(self, run: Run) -> Tensor:
        values = self.keyed if self._folds(run) else self.grouped
        return values[:, run.start : run.stop]

    def __call__(self, scores: Tensor, reference: Tensor, run: Run) -> tuple[Tensor, Tensor]:
        """As ``EightBitWeights``, but not multiplied by 2^a: the scale absorbs it."""
        tiles = reference.shape[-1]
        arguments = (scores.unflatten(-1, (tiles, -1)) - reference.unsqueeze(-1).to(torch.float64)).flatten(-2)
        p = exp2(arguments)
        if self._folds(run):
            e = self.exponents[:, run.start : run.stop].clamp(min=-60)
            weight = formats.pow2(e).unsqueeze(1)
            units = FP4_DIAGONAL_UNITS
            rounded = self._round(p * weight, arguments + e.unsqueeze(1), units).to(torch.float64) / weight
            counted: Tensor = p  # a key with a small V may round to nothing here: its weight still counts
        else:
            rounded = self._round(p, arguments, FP4_P_UNITS).to(torch.float64)
            counted = rounded if self.codes else p
        sums = counted.unflatten(-1, (tiles, -1)).sum(-1, dtype=torch.float64).to(torch.float32)
        return rounded, sums

    def _round(self, p: Tensor, arguments: Tensor, units: float) -> Tensor:
        if not self.approximate:
            return scale_groups(p, self.shift, units)
        width = min(BLOCK, p.shape[-1])
        # The group's maximum is the one exponential left; the others come from the bits of a multiply-add.
        top = p.unflatten(-1, (-1, width)).amax(-1, keepdim=True)
        scale = weight_scale(top * 2.0**self.shift, units)
        safe = torch.where(scale == 0, 1.0, scale)
        log_scale = (torch.log2(safe.to(torch.float64)) - self.shift).to(torch.float32)
        relative = arguments.unflatten(-1, (-1, width)) - log_scale.to(torch.float64)
        codes = torch.where(scale == 0, 0.0, formats.round_e2m1(mitchell(relative)))
        return (codes * scale).flatten(-2) * 2.0**-self.shift


def weights(plan: Plan, chunk: Chunk, payloads: Payloads) -> EightBitWeights | FourBitWeights:
    """The probability operand of this plan."""
    kind = FourBitWeights if plan.recipe.format == "fp4" else EightBitWeights
    return kind(plan, chunk, payloads)
