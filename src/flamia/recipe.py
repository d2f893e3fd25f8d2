"""Recipes: which formats attention runs in, and every option of the paper, as one immutable value."""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from flamia.formats import E4M3_MAX

FORMATS = ("mxfp8", "nvfp4", "fp4")
_CHOICES: dict[str, tuple[Any, ...]] = {
    "format": FORMATS,
    "variant": ("block", "folded"),
    "rotate": (None, True, False),
    "row_sum": ("codes", "weights"),
    "accumulator": ("fp16", "fp32"),
    "accumulator_scale": ("sequence", "causal"),
    "exponential": ("exact", "schraudolph", "mitchell"),
    "operand_scale": ("block", "tensor", "groups"),
    "scale_rounding": ("up", "floor"),
    "products": ("exact", "hopper"),
}
_BOOLS = ("exact_operands", "exact_ds", "stochastic_rounding", "training")


@dataclass(frozen=True)
class Recipe:
    """How attention is quantized. Validated when built; hashable; the same value gives the same numbers.

    Attributes:
        format: "mxfp8" (E4M3 with one power of two per 32 tokens), "nvfp4" (scores in NVFP4, the rest as mxfp8) or
            "fp4" (every operand in 4 bits). Paper 3.4.
        variant: "block" is the paper's arithmetic, with block scales applied by the tensor core. "folded" is the
            arithmetic of a machine without block-scaled products (Hopper): the same operand codes, scales folded into
            the exponent and into dS. mxfp8 and nvfp4 only.
        rotate: normalised Hadamard rotation of q and k before quantization (paper A.2). None: on where the head
            dimension is 128 and the format is mxfp8 or nvfp4, off otherwise. True needs a power-of-two head dimension.
        p_shift: a, the probability operand is E4M3(2^(s - m + a)) (paper B.1), or UE4M3-scaled after 2^a in fp4.
        tau: conditional rescaling threshold in base 2: the retained row maximum is replaced only when exceeded by
            more. a + tau <= log2 448 or the largest weights would saturate silently. 0 in fp4.
        row_sum: "codes": the softmax denominator sums the rounded weights, so that rows of P/l sum to one; "weights":
            it sums the unrounded ones, as the paper does.
        exact_operands: scales that cannot leak from a later token: one exponent per token, folded before rounding; in
            fp4 the per-key scales of diagonal tiles, on by default there (paper 3.2, A.3).
        exact_ds: one exponent of dS per query row instead of per 32x32 block. Always so in fp4.
        accumulator: "fp16" with a power-of-two prescale (paper A.4) or "fp32" for the dQ partial sums.
        accumulator_scale: "sequence": one prescale per document and head; "causal": one per query row from the keys
            that it sees.
        exponential: "exact"; for inference also "schraudolph" (mxfp8, nvfp4) and "mitchell" (fp4), paper 3.7.
        stochastic_rounding: of dS in fp4 (paper A.5), from a counter; ignored by the other formats.
        seed: of the stochastic rounding.
        training: False lifts the ban on approximate exponentials and refuses inputs that need gradients.
        operand_scale: "block" is the method. Ablations that leak: "tensor" (one scale per tensor), "groups" (1x32
            groups along the contraction).
        scale_rounding: "up" is the method; "floor", the OCP reference conversion, clamps and leaks: an ablation.
        products: how the reference adds products of E4M3 codes: "exact" rounds the exact sum once to FP32; "hopper"
            keeps 13 bits as Hopper's tensor core does, over the same spans as the Hopper kernels, which it predicts to
            within rare single codes (slow; variant="folded" only). Kernels ignore it.

    Raises:
        ValueError: when built, for a value outside of its choices or a combination that is unsafe or not defined; the
            message says why and what is allowed.
    """

    format: str = "mxfp8"
    variant: str = "block"
    rotate: bool | None = None
    p_shift: int = 4
    tau: float | None = None
    row_sum: str = "codes"
    exact_operands: bool | None = None
    exact_ds: bool | None = None
    accumulator: str = "fp16"
    accumulator_scale: str = "sequence"
    exponential: str = "exact"
    stochastic_rounding: bool = True
    seed: int = 0
    training: bool = True
    operand_scale: str = "block"
    scale_rounding: str = "up"
    products: str = "exact"
    key: str = field(init=False, repr=False, compare=False, default="")

    def __post_init__(self) -> None:
        for name, allowed in _CHOICES.items():
            value = getattr(self, name)
            # 1 == True in Python, but not here
            if not any(isinstance(value, bool) == isinstance(a, bool) and value == a for a in allowed):
                raise ValueError(
                    f"{name}={value!r} is not supported: it must be one of {', '.join(map(repr, allowed))}"
                )
        fp4 = self.format == "fp4"
        defaults = {"tau": 0.0 if fp4 else 4.0, "exact_operands": fp4, "exact_ds": fp4}
        for name, value in defaults.items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, value)
        for name in _BOOLS:
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name}={getattr(self, name)!r} is not supported: it must be True or False")
        self._check_probabilities()
        object.__setattr__(self, "tau", float(self.tau or 0.0))  # equal recipes have equal keys
        self._check_combination()
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name != "key"}
        object.__setattr__(self, "key", json.dumps(values, sort_keys=True))

    def _check_probabilities(self) -> None:
        a, tau = self.p_shift, self.tau
        if not isinstance(a, int) or isinstance(a, bool) or not 0 <= a <= 8:
            raise ValueError(f"p_shift={a!r} is not supported: it must be an integer from 0 to 8")
        if not isinstance(tau, (int, float)) or isinstance(tau, bool) or not 0 <= tau < math.inf:
            raise ValueError(f"tau={tau!r} is not supported: it must be a number >= 0")
        if self.format == "fp4":
            if tau != 0:
                raise ValueError(
                    f"tau={tau} is not supported by format='fp4': its probabilities are scaled per 32 keys from the "
                    "true row maximum, so tau must be 0"
                )
        elif a + tau > math.log2(E4M3_MAX):
            raise ValueError(
                f"p_shift + tau = {a + tau} is unsafe: weights reach 2^(p_shift + tau) and E4M3 ends at 448, so "
                f"p_shift + tau must be at most log2(448) = {math.log2(E4M3_MAX):.3f}; beyond it the largest weights "
                "would saturate and the output would be wrong without a NaN (paper B.1)"
            )

    def _check_combination(self) -> None:
        fp4 = self.format == "fp4"
        if self.variant == "folded" and (fp4 or self.is_ablation):
            raise ValueError(
                "variant='folded' is not defined for format='fp4' or for ablations of the scales: use variant='block'"
            )
        if self.products == "hopper" and self.variant != "folded":
            raise ValueError(
                f"products='hopper' is not defined for variant={self.variant!r}: it says how Hopper adds E4M3 "
                "products, so variant must be 'folded'"
            )
        if fp4 and not self.exact_ds:
            raise ValueError("exact_ds=False is not defined for format='fp4': dS always has row-wise groups there")
        if fp4 and self.operand_scale != "block":
            raise ValueError(
                f"operand_scale={self.operand_scale!r} is not defined for format='fp4'; its leaking ablation is "
                "exact_operands=False (groups of keys on diagonal tiles)"
            )
        if fp4 and self.scale_rounding != "up":
            raise ValueError(
                f"scale_rounding={self.scale_rounding!r} is not defined for format='fp4': its scales round up or to "
                "nearest; use scale_rounding='up'"
            )
        if self.exact_operands and self.operand_scale != "block":
            raise ValueError(
                f"exact_operands=True contradicts operand_scale={self.operand_scale!r}: per-token scales replace both"
            )
        if self.exact_operands and self.scale_rounding == "floor":
            raise ValueError("exact_operands=True needs scale_rounding='up': rounding down clamps elements")
        wanted = {"exact": FORMATS, "schraudolph": ("mxfp8", "nvfp4"), "mitchell": ("fp4",)}[self.exponential]
        if self.format not in wanted:
            raise ValueError(
                f"exponential={self.exponential!r} is not defined for format={self.format!r}: it serves {wanted} only"
            )
        if self.exponential != "exact" and self.training:
            raise ValueError(
                f"exponential={self.exponential!r} is for inference: the backward would not rebuild the forward's "
                "weights and training diverges (paper 3.7, 4.5); pass training=False"
            )
        if not isinstance(self.seed, int) or isinstance(self.seed, bool) or not 0 <= self.seed < 2**32:
            raise ValueError(f"seed={self.seed!r} is not supported: it must be an integer in [0, 2^32)")

    @property
    def is_ablation(self) -> bool:
        """True where the scales are a known-bad scheme kept for comparison (reference backend only)."""
        fp4_keys = self.format == "fp4" and not self.exact_operands
        return self.operand_scale != "block" or self.scale_rounding == "floor" or fp4_keys

    def with_variant(self, variant: str) -> Recipe:
        """The same formats and options on other tensor cores; itself where that is not defined (ablations, fp4)."""
        if self.format == "fp4" or self.is_ablation:
            return self
        products = self.products if variant == "folded" else "exact"
        return dataclasses.replace(self, variant=variant, products=products)

    def rotates(self, head_dim: int) -> bool:
        """Whether q and k are rotated at this head dimension (resolves ``rotate=None``)."""
        if self.rotate is None:
            return head_dim == 128 and self.format != "fp4"
        return self.rotate

    def exact(self) -> Recipe:
        """This recipe with the three options that together make earlier o, lse and dq independent of later tokens."""
        return dataclasses.replace(self, exact_operands=True, exact_ds=True, accumulator_scale="causal")


def _presets() -> dict[str, Recipe]:
    presets = {
        "mxfp8": Recipe(),
        "nvfp4": Recipe(format="nvfp4"),
        "fp4": Recipe(format="fp4"),
        "mxfp8-folded": Recipe(variant="folded"),
        "nvfp4-folded": Recipe(format="nvfp4", variant="folded"),
    }
    presets |= {f"{name}-exact": recipe.exact() for name, recipe in presets.items()}
    presets["mxfp8-paper"] = Recipe(row_sum="weights")
    presets["leaky-per-tensor"] = Recipe(operand_scale="tensor")
    presets["leaky-floor-1x32"] = Recipe(operand_scale="groups", scale_rounding="floor", exact_ds=True)
    presets["leaky-up-1x32"] = Recipe(operand_scale="groups", exact_ds=True)
    presets["leaky-fp4-keys"] = Recipe(format="fp4", exact_operands=False)
    return presets


_PRESETS = _presets()


def recipes() -> tuple[str, ...]:
    """Names that ``get_recipe`` and ``recipe=`` accept."""
    return tuple(_PRESETS)


def get_recipe(recipe: str | Recipe) -> Recipe:
    """The ``Recipe`` of a name, or the argument itself.

    Raises:
        ValueError: unknown name; the message lists the known ones.
        TypeError: neither a name nor a ``Recipe``.
    """
    if isinstance(recipe, Recipe):
        return recipe
    if not isinstance(recipe, str):
        raise TypeError(f"recipe must be a name or a flamia.Recipe, got {type(recipe).__name__}")
    if recipe not in _PRESETS:
        raise ValueError(f"recipe={recipe!r} is unknown: known names are {', '.join(_PRESETS)}")
    return _PRESETS[recipe]


@lru_cache(maxsize=256)
def recipe_from_key(key: str) -> Recipe:
    """The recipe whose ``Recipe.key`` this is (custom operators carry recipes as strings)."""
    return Recipe(**json.loads(key))
