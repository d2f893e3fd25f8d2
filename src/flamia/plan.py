"""What one call will run: the resolved choice of arithmetic, shapes and backend."""

from __future__ import annotations

import math
from dataclasses import dataclass

from flamia.quantize.payloads import Spec, backward_specs, forward_specs
from flamia.recipe import Recipe


@dataclass(frozen=True)
class Plan:
    """A call after its arguments have been checked.

    Attributes:
        recipe: the arithmetic.
        backend: who runs it.
        kernels: names of what runs, in order.
        head_dim: D. heads_q, heads_kv: query and key/value heads.
        softmax_scale: factor of q k^T before the softmax.
        left, right: visible keys on either side of the bottom-right aligned diagonal, None unbounded; causal is
            right = 0.
        deterministic: whether the order of every sum is fixed.
        training: whether payloads for a backward are made.
    """

    recipe: Recipe
    backend: str
    kernels: tuple[str, ...]
    head_dim: int
    heads_q: int
    heads_kv: int
    softmax_scale: float
    left: int | None
    right: int | None
    deterministic: bool
    training: bool

    @property
    def ratio(self) -> int:
        """Query heads per key/value head."""
        return self.heads_q // self.heads_kv

    @property
    def score_scale(self) -> float:
        """softmax_scale * log2 e: scores are kept in base 2."""
        return self.softmax_scale * math.log2(math.e)

    @property
    def rotates(self) -> bool:
        return self.recipe.rotates(self.head_dim)

    @property
    def per_token(self) -> bool:
        """Whether E4M3 operands carry one exponent per token."""
        return bool(self.recipe.exact_operands) and self.recipe.format != "fp4"

    @property
    def reads_token_maxima(self) -> bool:
        """Whether the backward reads maxima of every token of K and V, beside those of documents."""
        return self.training and self.recipe.accumulator_scale == "causal"

    @property
    def forward_specs(self) -> tuple[Spec, ...]:
        return forward_specs(self.recipe, self.training, self.transposes)

    @property
    def backward_specs(self) -> tuple[Spec, ...]:
        return backward_specs(self.recipe, self.transposes)

    @property
    def transposes(self) -> bool:
        """Whether E4M3 operands that are contracted along tokens come as column payloads, too."""
        return self.backend == "sm90"
