"""Which Hopper kernels there are: names for ``compiler``, and the functions that build them. Imports no DSL."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from flamia.compiler import Kernel, make_kernel
from flamia.plan import Plan
from flamia.recipe import Recipe

ARCH, VARIANT = "sm_90a", "folded"
ARCHS, DEVICES = {(9, 0): ARCH}, "Hopper (9.0)"
HEAD_DIMS, FORMATS = (64, 128), ("mxfp8", "nvfp4")
DTYPES = {torch.bfloat16: "BFloat16", torch.float16: "Float16"}


def forward_kernels(plan: Plan, dtype: torch.dtype, arch: str = ARCH) -> tuple[Kernel, ...]:
    """The launches of a forward, in order: even documents, then uneven ones.

    One for exact operands, and for row sums of weights.
    """
    recipe = plan.recipe
    kinds = (False,) if plan.per_token else (True,) if recipe.row_sum == "weights" else (False, True)
    return tuple(
        make_kernel(
            "flamia.sm90.kernels:build_forward",
            "flamia.sm90.forward",
            arch,
            head_dim=plan.head_dim,
            ratio=plan.ratio,
            left=plan.left is not None,
            right=plan.right is not None,
            dtype=DTYPES[dtype],
            p_shift=recipe.p_shift,
            tau=float(recipe.tau or 0.0),
            row_sum=recipe.row_sum,
            careful=careful,
            exact=plan.per_token,
            exponential=recipe.exponential,
            format=recipe.format,
        )
        for careful in kinds
    )


def build_forward(arch: str, *, dtype: str, left: bool, right: bool, head_dim: int, ratio: int, **options: Any) -> Any:
    """Compile ``sm90.forward.Forward`` for outputs of ``cutlass.<dtype>``."""
    import cutlass

    from flamia.sm90.forward import Forward, compile_forward
    from flamia.sm90.work import Masks

    kernel = Forward(head_dim, ratio, Masks(left, right), **options)
    return compile_forward(kernel, getattr(cutlass, dtype), arch=arch)


def backward_kernels(plan: Plan, dtype: torch.dtype, arch: str = ARCH) -> tuple[Kernel, ...]:
    """The launch of a backward."""
    return (
        make_kernel(
            "flamia.sm90.kernels:build_backward",
            "flamia.sm90.backward",
            arch,
            head_dim=plan.head_dim,
            ratio=plan.ratio,
            left=plan.left is not None,
            right=plan.right is not None,
            dtype=DTYPES[dtype],
            rotate=plan.rotates,
            causal_scale=plan.recipe.accumulator_scale == "causal",
            deterministic=plan.deterministic,
            exact=plan.per_token,
            format=plan.recipe.format,
        ),
    )


def build_backward(arch: str, *, dtype: str, left: bool, right: bool, head_dim: int, ratio: int, **options: Any) -> Any:
    """Compile ``sm90.backward.Backward`` for gradients of ``cutlass.<dtype>``."""
    import cutlass

    from flamia.sm90.backward import Backward, compile_backward
    from flamia.sm90.work import Masks

    kernel = Backward(head_dim, ratio, Masks(left, right), **options)
    return compile_backward(kernel, getattr(cutlass, dtype), arch=arch)


def call_kernels(plan: Plan, dtype: torch.dtype, arch: str = ARCH) -> Iterator[Kernel]:
    """Every kernel that a call with this plan, and its backward where the plan trains, loads."""
    yield from forward_kernels(plan, dtype, arch)
    if plan.training:
        yield from backward_kernels(plan, dtype, arch)


def unsupported(
    recipe: Recipe, head_dim: int, dtype: torch.dtype, *, training: bool, offsets: bool = False
) -> str | None:
    """Why Hopper kernels cannot run a call, naming the option; None where they can."""
    if recipe.format not in FORMATS:
        return f"format={recipe.format!r} has no Hopper kernel, {' and '.join(map(repr, FORMATS))} have"
    if recipe.is_ablation:
        return "ablations of the scales run on the reference alone"
    if recipe.variant != "folded":
        return "variant='block' needs a tensor core with block scales; variant='folded' is what Hopper computes"
    if head_dim not in HEAD_DIMS:
        return f"head_dim={head_dim} has no Hopper kernel, {HEAD_DIMS} have"
    if dtype not in DTYPES:
        return f"dtype {dtype} has no Hopper kernel, torch.bfloat16 and torch.float16 have"
    if offsets:
        return "k_offset and v_offset run on the reference alone"
    lacks = None
    if training and bool(recipe.exact_ds) != bool(recipe.exact_operands):
        lacks = (
            f"exact_ds={recipe.exact_ds} with exact_operands={recipe.exact_operands} has no Hopper backward, "
            "both or neither has"
        )
    elif training and recipe.accumulator != "fp16":
        lacks = f"accumulator={recipe.accumulator!r} has no Hopper backward, 'fp16' has"
    return lacks and f"{lacks}; under torch.no_grad() it runs"
