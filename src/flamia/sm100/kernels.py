"""Which Blackwell kernels there are: names for ``compiler``, and the functions that build them. Imports no DSL."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from flamia.compiler import Kernel, make_kernel
from flamia.plan import Plan
from flamia.recipe import Recipe

ARCHS, DEVICES = {(10, 0): "sm_100a", (10, 3): "sm_103a"}, "Blackwell (10.0, 10.3)"  # B200 and B300
VARIANT = "block"
QUERIES = 256  # of an item of the forward's work list
HEAD_DIMS = (64, 128)
LONG_ROW = 32768  # keys from which pairs of CTAs do the backward wherever they can
DTYPES = {torch.bfloat16: "BFloat16", torch.float16: "Float16"}


def claims(plan: Plan) -> bool:
    """Whether blocks claim their items, a block per item and head, rather than being dealt them (paper 3.6.2).

    Causal calls without a window, whose items differ in cost within a document. The paper also claims them where one
    document is much longer than the others, which only lengths would tell.
    """
    return plan.right is not None and plan.left is None


def forward_kernels(plan: Plan, dtype: torch.dtype, arch: str) -> tuple[Kernel, ...]:
    """The launch of a forward."""
    recipe = plan.recipe
    return (
        make_kernel(
            "flamia.sm100.kernels:build_forward",
            "flamia.sm100.forward",
            arch,
            head_dim=plan.head_dim,
            ratio=plan.ratio,
            left=plan.left is not None,
            right=plan.right is not None,
            dtype=DTYPES[dtype],
            p_shift=recipe.p_shift,
            tau=float(recipe.tau or 0.0),
            row_sum=recipe.row_sum,
            per_token=plan.per_token,
            dynamic=claims(plan),
        ),
    )


def build_forward(arch: str, *, dtype: str, left: bool, right: bool, head_dim: int, ratio: int, **options: Any) -> Any:
    """Compile ``sm100.forward.Forward`` for outputs of ``cutlass.<dtype>``."""
    import cutlass

    from flamia.sm100.forward import Forward, compile_forward
    from flamia.sm100.work import Masks

    kernel = Forward(head_dim, ratio, Masks(left, right), arch=arch, **options)
    return compile_forward(kernel, getattr(cutlass, dtype))


def has_pairs(plan: Plan) -> bool:
    """Whether a pair of CTAs can do the backward: dq in any order, exponents of blocks."""
    return not plan.deterministic and not plan.per_token


def takes_pairs(plan: Plan, queries: int, keys: int) -> bool:
    """Whether a pair of CTAs is to do the backward (paper B.3).

    From 32k keys on wherever it can; below, only without GQA and with as many queries as keys. queries, keys: tokens of
    the rows, since the lengths of documents are not on the host.
    """
    return has_pairs(plan) and (keys >= LONG_ROW or (plan.ratio == 1 and queries == keys))


def keys_of_item(pairs: bool) -> int:
    """Keys of an item of the backward's work list. pairs: of CTAs do it."""
    return 256 if pairs else 128


def backward_kernels(plan: Plan, dtype: torch.dtype, arch: str, pairs: bool = False) -> tuple[Kernel, ...]:
    """The launch of a backward. pairs: by pairs of CTAs, whose work list has items of 256 keys.

    Raises:
        ValueError: pairs cannot do it (``has_pairs``).
    """
    if pairs and not has_pairs(plan):
        raise ValueError(
            f"pairs is True with deterministic={plan.deterministic} and exact_operands={plan.recipe.exact_operands}; "
            "pairs of CTAs need both False"
        )
    single = {} if pairs else dict(deterministic=plan.deterministic, exact=plan.per_token)
    return (
        make_kernel(
            "flamia.sm100.kernels:build_backward",
            "flamia.sm100.backward_pair" if pairs else "flamia.sm100.backward",
            arch,
            head_dim=plan.head_dim,
            ratio=plan.ratio,
            left=plan.left is not None,
            right=plan.right is not None,
            dtype=DTYPES[dtype],
            rotate=plan.rotates,
            causal_scale=plan.recipe.accumulator_scale == "causal",
            pairs=pairs,
            **single,
        ),
    )


def build_backward(
    arch: str, *, dtype: str, left: bool, right: bool, head_dim: int, ratio: int, pairs: bool, **options: Any
) -> Any:
    """Compile ``sm100.backward.Backward`` or ``PairBackward`` for gradients of ``cutlass.<dtype>``."""
    import cutlass

    from flamia.sm100.backward import Backward, compile_backward
    from flamia.sm100.backward_pair import PairBackward
    from flamia.sm100.work import Masks

    kind = PairBackward if pairs else Backward
    return compile_backward(kind(head_dim, ratio, Masks(left, right), arch=arch, **options), getattr(cutlass, dtype))


def call_kernels(plan: Plan, dtype: torch.dtype, arch: str) -> Iterator[Kernel]:
    """Every kernel that a call with this plan, and its backward where the plan trains, may load."""
    yield from forward_kernels(plan, dtype, arch)
    if plan.training:
        yield from backward_kernels(plan, dtype, arch)
        if has_pairs(plan):
            yield from backward_kernels(plan, dtype, arch, pairs=True)


def unsupported(
    recipe: Recipe, head_dim: int, dtype: torch.dtype, *, training: bool, offsets: bool = False
) -> str | None:
    """Why Blackwell kernels cannot run a call, naming the option; None where they can."""
    if recipe.format != "mxfp8":
        return f"format={recipe.format!r} has no Blackwell kernel, 'mxfp8' has"
    if recipe.is_ablation:
        return "ablations of the scales run on the reference alone"
    if recipe.variant != "block":
        return f"variant={recipe.variant!r} has no Blackwell kernel, 'block' has"
    if recipe.exponential != "exact":
        return f"exponential={recipe.exponential!r} has no Blackwell kernel, 'exact' has"
    if head_dim not in HEAD_DIMS:
        return f"head_dim={head_dim} has no Blackwell kernel, {HEAD_DIMS} have"
    if dtype not in DTYPES:
        return f"dtype {dtype} has no Blackwell kernel, torch.bfloat16 and torch.float16 have"
    if offsets:
        return "k_offset and v_offset run on the reference alone"
    lacks = None
    if training and bool(recipe.exact_ds) != bool(recipe.exact_operands):
        lacks = (
            f"exact_ds={recipe.exact_ds} with exact_operands={recipe.exact_operands} has no Blackwell backward, "
            "both or neither has"
        )
    elif training and recipe.accumulator != "fp16":
        lacks = f"accumulator={recipe.accumulator!r} has no Blackwell backward, 'fp16' has"
    return lacks and f"{lacks}; under torch.no_grad() it runs"
