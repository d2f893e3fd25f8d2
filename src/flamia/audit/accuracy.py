"""How far o, dq, dk and dv are from exact attention on the same BF16 operands, in FP64."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ..reference.exact import exact_attention, exact_attention_backward
from .inputs import Sample, make_inputs
from .measures import Distance, distance
from .targets import Target, get_target

__all__ = ["MASKS", "Accuracy", "accuracy", "iterate_accuracy"]

MASKS = ("causal", "full")
ROUTES = ("mxfp8", "nvfp4", "fp4")
# Where v and do have means, what the row sums are taken from and whether the means are quantized decides dq.
MEANS = ("mxfp8", "mxfp8-paper", "mxfp8+offsets", "nvfp4", "fp4")
OFFSETS = "+offsets"


@dataclass(frozen=True)
class Accuracy:
    """The distances of one attention from the exact one.

    Attributes:
        recipe: the name of the target; "+offsets" marks constant offsets of k and v, the channel means of
            another sample of the same inputs ("Offsets" in the numeric contract).
        mask: "causal" or "full".
        o, dq, dk, dv: the :class:`~.measures.Distance` of each; None for the gradients of a forward-only
            target.
        row_sum: what the softmax denominator is summed from, "codes" or "weights"; None for other targets.
        ds_zero_fraction: share of nonzero entries of dS that the reference backward rounded to zero, or None.
        seconds: time of the target's forward and backward.
    """

    recipe: str
    inputs: str
    mask: str
    o: Distance
    dq: Distance | None
    dk: Distance | None
    dv: Distance | None
    row_sum: str | None
    offsets: bool
    ds_zero_fraction: float | None
    tokens: int
    heads: int
    head_dim: int
    seconds: float


def default_recipes(inputs: str) -> tuple[str, ...]:
    """The recipes that are compared on these inputs when none are asked for."""
    return (*(MEANS if inputs in ("mean", "flat") else ROUTES), "torch-sdpa")


def accuracy(
    recipes: str | Callable[..., Any] | Sequence[str | Callable[..., Any]] | None = None,
    *,
    inputs: str | Sequence[str] = ("gaussian",),
    masks: str | Sequence[str] = MASKS,
    tokens: int = 2048,
    heads: int | None = None,
    kv_heads: int | None = None,
    head_dim: int = 128,
    seed: int = 0,
    device: str = "cpu",
) -> list[Accuracy]:
    """Measure attention against exact attention.

    Args:
        recipes: targets (:mod:`flamia.audit.targets`), a recipe's name also with "+offsets"; the three routes
            and SDPA when left out, with the paper's row sums and offsets beside them on inputs that have
            means.
        inputs: kinds of inputs (:func:`flamia.audit.make_inputs`).
        masks: "causal", "full" or both.
        tokens, heads, kv_heads, head_dim, seed, device: of the inputs; heads None is 4, or all of captured
            ones.

    Raises:
        ValueError: an unknown target, kind of inputs or mask, or a size out of range.
    """
    return list(
        iterate_accuracy(
            recipes,
            inputs=inputs,
            masks=masks,
            tokens=tokens,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            seed=seed,
            device=device,
        )
    )


def iterate_accuracy(
    recipes: str | Callable[..., Any] | Sequence[str | Callable[..., Any]] | None = None,
    *,
    inputs: str | Sequence[str] = ("gaussian",),
    masks: str | Sequence[str] = MASKS,
    tokens: int = 2048,
    heads: int | None = None,
    kv_heads: int | None = None,
    head_dim: int = 128,
    seed: int = 0,
    device: str = "cpu",
) -> Iterator[Accuracy]:
    """The results of :func:`accuracy` as they come. Arguments are checked before the first is computed."""
    names = (inputs,) if isinstance(inputs, str) else tuple(inputs)
    chosen_masks = (masks,) if isinstance(masks, str) else tuple(masks)
    for mask in chosen_masks:
        if mask not in MASKS:
            raise ValueError(f"mask {mask!r} is unknown; allowed are {', '.join(MASKS)}")
    targets = {name: [_parse(r) for r in _chosen(recipes, name)] for name in names}
    for name in names:
        here, other = (
            make_inputs(name, tokens, heads, head_dim, kv_heads=kv_heads, seed=s, device=device)
            for s in (seed, seed + 1)
        )
        for mask in chosen_masks:
            exact = _exact(here, mask == "causal")
            for target, offsets in targets[name]:
                yield _measure(target, offsets, here, other, mask, exact)


def _chosen(
    recipes: str | Callable[..., Any] | Sequence[str | Callable[..., Any]] | None, inputs: str
) -> Sequence[str | Callable[..., Any]]:
    if recipes is None:
        return default_recipes(inputs)
    return [recipes] if isinstance(recipes, str) or callable(recipes) else recipes


def _parse(recipe: str | Callable[..., Any]) -> tuple[Target, bool]:
    import flamia

    if not isinstance(recipe, str) or not recipe.endswith(OFFSETS):
        return get_target(recipe), False
    name = recipe.removesuffix(OFFSETS)
    if name not in flamia.recipes():
        raise ValueError(f"{recipe!r}: only recipes take offsets, {', '.join(flamia.recipes())}")
    return get_target(name), True


def _exact(x: Sample, causal: bool) -> dict[str, Tensor]:
    o, _ = exact_attention(x.q, x.k, x.v, causal=causal)
    dq, dk, dv = exact_attention_backward(x.q, x.k, x.v, x.do, causal=causal)
    return {"o": o, "dq": dq, "dk": dk, "dv": dv}


def _measure(
    target: Target, offsets: bool, here: Sample, other: Sample, mask: str, exact: dict[str, Tensor]
) -> Accuracy:
    import flamia

    ours = target.name in flamia.recipes()
    options: dict[str, Any] = {}
    if offsets:
        # From another sample, as a training run would take them from earlier steps: nothing of these tokens.
        options = {"k_offset": other.k.float().mean((0, 1)), "v_offset": other.v.float().mean((0, 1))}
    counting: Any = contextlib.nullcontext()
    if ours:
        from ..reference import statistics

        counting = statistics()
    start = time.perf_counter()
    with counting as counts:
        result = target.run(*here.tensors(), causal=mask == "causal", **options)
    seconds = time.perf_counter() - start
    distances = {}
    for name, reference in exact.items():
        x = getattr(result, name)
        distances[name] = None if x is None else distance(x, reference)
    assert distances["o"] is not None
    _, tokens, heads, head_dim = here.q.shape
    return Accuracy(
        recipe=target.name + (OFFSETS if offsets else ""),
        inputs=here.name,
        mask=mask,
        o=distances["o"],
        dq=distances["dq"],
        dk=distances["dk"],
        dv=distances["dv"],
        row_sum=flamia.get_recipe(target.name).row_sum if ours else None,
        offsets=offsets,
        ds_zero_fraction=counts.ds_zero_fraction if ours and counts.ds_total else None,
        tokens=tokens,
        heads=heads,
        head_dim=head_dim,
        seconds=seconds,
    )
