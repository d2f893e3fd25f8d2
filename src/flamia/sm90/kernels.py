"""Which Hopper kernels there are: names for ``compiler``, and the functions that build them. Imports no DSL."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from flamia.compiler import Kernel, make_kernel
from flamia.plan import Plan

ARCHS = ("sm_90a",)
HEAD_DIMS = (64, 128)
DTYPES = {torch.bfloat16: "BFloat16", torch.float16: "Float16"}


def forward_kernels(plan: Plan, dtype: torch.dtype, arch: str = "sm_90a") -> tuple[Kernel, ...]:
    """The launches of a forward, in order: even documents, then uneven ones; one launch for row sums of weights."""
    recipe = plan.recipe
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
        )
        for careful in ((True,) if recipe.row_sum == "weights" else (False, True))
    )


def build_forward(arch: str, *, dtype: str, left: bool, right: bool, head_dim: int, ratio: int, **options: Any) -> Any:
    """Compile ``sm90.forward.Forward`` for outputs of ``cutlass.<dtype>``."""
    import cutlass

    from flamia.sm90.forward import Forward, compile_forward
    from flamia.sm90.work import Masks

    kernel = Forward(head_dim, ratio, Masks(left, right), **options)
    return compile_forward(kernel, getattr(cutlass, dtype), arch=arch)


def call_kernels(plan: Plan, dtype: torch.dtype) -> Iterator[Kernel]:
    """Every kernel that a call with this plan, and its backward where there is one, loads."""
    yield from forward_kernels(plan, dtype)
