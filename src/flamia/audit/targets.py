"""What can be audited: flamia's recipes, torch's SDPA, exact attention, and anyone's `module:function`.

A target is called in one of two layouts, FlashAttention's:

* fixed: `f(q, k, v, causal=...)` with q `[B, S, Hq, D]` and k, v `[B, S, Hkv, D]`, all BF16;
* varlen: `f(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal=...)`, packed `[T, H,
  D]`.

It returns o, shaped as q, or a tuple that begins with o and lse (`[B, Hq, S]`, or `[Hq, T]` when packed). A
function that has a parameter `cu_seqlens_q` is taken for varlen, one that has `return_lse` is asked for lse,
and one that has `softmax_scale` gets 1/sqrt(D). Its gradients are taken by autograd; an o that cannot be
differentiated makes a forward-only target.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..recipe import Recipe

__all__ = ["Result", "Target", "get_target", "target_names"]


@dataclass(frozen=True)
class Result:
    """One forward and backward pass in token layout: o, dq, dk, dv as their operands, lse `[..., S, H, 1]`.

    lse is None where the target does not return it; dq, dk, dv are None for a forward-only target.
    """

    o: Tensor
    lse: Tensor | None
    dq: Tensor | None
    dk: Tensor | None
    dv: Tensor | None


@dataclass(frozen=True)
class Target:
    """An attention under audit.

    Attributes:
        name: what reports call it.
        fixed: function of batched tensors, or None.
        packed: function of packed tensors, or None.
        promise: what its name promises: "exact" (no bit of an earlier row changes), "leaky" (the probe must catch
            it), "output" (o and lse confined to 31 rows; dq can reach further through the sequence scale of the
            FP16 accumulator, as the default recipes do), or "confined" (all three confined to 31 rows), which is
            asked of everything else.
    """

    name: str
    fixed: Callable[..., Any] | None = None
    packed: Callable[..., Any] | None = None
    promise: str = "confined"

    def run(self, q: Tensor, k: Tensor, v: Tensor, do: Tensor, *, causal: bool = True, **options: Any) -> Result:
        """Forward and backward of `[B, S, H, D]` operands; every sequence of the batch is a document."""
        if self.fixed is not None:
            return _differentiate(self, self.fixed, (q, k, v), do, causal, (), options)
        batch, length = q.shape[:2]
        cu = torch.arange(0, (batch + 1) * length, length, dtype=torch.int32, device=q.device)
        q, k, v, do = (x.flatten(0, 1) for x in (q, k, v, do))
        flat = self.run_packed(q, k, v, do, cu, causal=causal, **options)

        def batched(x: Tensor | None) -> Tensor | None:
            return None if x is None else x.unflatten(0, (batch, length))

        return Result(
            flat.o.unflatten(0, (batch, length)),
            batched(flat.lse),
            batched(flat.dq),
            batched(flat.dk),
            batched(flat.dv),
        )

    def run_packed(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        do: Tensor,
        cu_seqlens: Tensor,
        *,
        causal: bool = True,
        **options: Any,
    ) -> Result:
        """Forward and backward of packed `[T, H, D]` operands with the same lengths of queries and keys."""
        if self.packed is None:
            raise ValueError(f"target {self.name!r} takes no packed documents (no parameter cu_seqlens_q)")
        longest = int(cu_seqlens.diff().max())
        return _differentiate(
            self, self.packed, (q, k, v), do, causal, (cu_seqlens, cu_seqlens, longest, longest), options
        )


def _differentiate(
    target: Target,
    function: Callable[..., Any],
    operands: tuple[Tensor, Tensor, Tensor],
    do: Tensor,
    causal: bool,
    positional: tuple[Any, ...],
    options: dict[str, Any],
) -> Result:
    q, k, v = (x.detach().clone().requires_grad_() for x in operands)
    accepted = _parameters(function)
    keywords: dict[str, Any] = {"causal": causal, **options}
    if "return_lse" in accepted:
        keywords["return_lse"] = True
    if "softmax_scale" in accepted:
        keywords.setdefault("softmax_scale", q.shape[-1] ** -0.5)
    with torch.enable_grad():
        returned = function(q, k, v, *positional, **keywords)
    o, lse = (returned[0], returned[1]) if isinstance(returned, (tuple, list)) else (returned, None)
    if not isinstance(o, Tensor) or o.shape != q.shape:
        got = tuple(o.shape) if isinstance(o, Tensor) else type(o).__name__
        raise ValueError(f"target {target.name!r} returned o {got}; it must be shaped as q, {tuple(q.shape)}")
    if lse is not None:
        expected = (*q.shape[:-3], q.shape[-2], q.shape[-3])
        if not isinstance(lse, Tensor) or lse.shape != expected:
            got = tuple(lse.shape) if isinstance(lse, Tensor) else type(lse).__name__
            raise ValueError(f"target {target.name!r} returned lse {got}; it must be {expected}")
        lse = lse.detach().transpose(-1, -2).unsqueeze(-1)
    if not o.requires_grad:
        return Result(o.detach(), lse, None, None, None)
    dq, dk, dv = torch.autograd.grad(o, (q, k, v), do.to(o.dtype))
    return Result(o.detach(), lse, dq, dk, dv)


def _parameters(function: Callable[..., Any]) -> frozenset[str]:
    try:
        return frozenset(inspect.signature(function).parameters)
    except (TypeError, ValueError):  # some builtins have no signature
        return frozenset()


def target_names() -> tuple[str, ...]:
    """The named targets: every recipe of flamia, `torch-sdpa` and `exact`."""
    import flamia

    return (*flamia.recipes(), "torch-sdpa", "exact")


def get_target(target: str | Target | Recipe | Callable[..., Any]) -> Target:
    """The target of a name, a `module:function`, a `flamia.Recipe`, or a callable.

    Raises:
        ValueError: an unknown name, or a module or function that cannot be loaded.
        TypeError: neither a string nor something that can be called.
    """
    if isinstance(target, Target):
        return target
    if isinstance(target, Recipe):
        return _from_recipe("Recipe", target)
    if callable(target):
        return _from_function(target, getattr(target, "__name__", type(target).__name__))
    if not isinstance(target, str):
        raise TypeError(f"target is {target!r}; it must be a name, 'module:function', a Recipe or a callable")
    if ":" in target:
        return _from_function(_load(target), target)
    names = target_names()
    if target not in names:
        near = difflib.get_close_matches(target, names, n=1)
        hint = f" (did you mean {near[0]!r}?)" if near else ""
        raise ValueError(f"target {target!r} is unknown{hint}; allowed are {', '.join(names)}, and 'module:function'")
    if target == "torch-sdpa":
        return Target(target, _sdpa, _sdpa_packed)
    if target == "exact":
        return Target(target, _exact, _exact_packed, promise="exact")
    return _from_recipe(target)


def _from_recipe(name: str, recipe: Any = None) -> Target:
    import flamia

    recipe = flamia.get_recipe(name) if recipe is None else recipe

    def fixed(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, return_lse: bool, **options: Any) -> Any:
        return flamia.flash_attn_func(
            q, k, v, causal=causal, return_lse=return_lse, recipe=recipe, deterministic=True, **options
        )

    def packed(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        *,
        causal: bool,
        return_lse: bool,
        **options: Any,
    ) -> Any:
        return flamia.flash_attn_varlen_func(
            q,
            k,
            v,
            cu_seqlens_q,
            cu_seqlens_k,
            max_seqlen_q,
            max_seqlen_k,
            causal=causal,
            return_lse=return_lse,
            recipe=recipe,
            deterministic=True,
            **options,
        )

    leaky, exact = name.startswith("leaky-"), name.endswith("-exact")
    return Target(name, fixed, packed, "leaky" if leaky else "exact" if exact else "output")


def _from_function(function: Callable[..., Any], name: str) -> Target:
    if "cu_seqlens_q" in _parameters(function):
        return Target(name, packed=function)
    return Target(name, fixed=function)


def _load(target: str) -> Callable[..., Any]:
    module_name, _, attribute = target.partition(":")
    if not module_name or not attribute:
        raise ValueError(f"target {target!r} is incomplete; write it as 'module:function'")
    if "" not in sys.path:
        sys.path.insert(0, "")  # a file in the current folder, which an installed command does not look in
    try:
        found: Any = importlib.import_module(module_name)
    except Exception as error:
        raise ValueError(
            f"target {target!r}: module {module_name!r} cannot be imported: {type(error).__name__}: {error}"
        ) from error
    for part in attribute.split("."):
        if not hasattr(found, part):
            near = difflib.get_close_matches(part, dir(found), n=3)
            hint = f"; did you mean {' or '.join(near)}?" if near else ""
            raise ValueError(f"target {target!r}: {module_name!r} has no {attribute!r}{hint}")
        found = getattr(found, part)
    if not callable(found):
        raise ValueError(f"target {target!r} is {type(found).__name__}, which cannot be called")
    function: Callable[..., Any] = found
    return function


def _sdpa(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    o = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=q.shape[1] != k.shape[1])
    return o.transpose(1, 2)


def _sdpa_packed(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    causal: bool,
) -> Tensor:
    """Packed the way SDPA's users pack: one row under a mask of documents."""
    position = torch.arange(q.shape[0], device=q.device)
    document = torch.searchsorted(cu_seqlens_q[1:].contiguous(), position, right=True)
    mask = document[:, None] == document[None, :]
    if causal:
        mask &= position[:, None] >= position[None, :]
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    o = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=q.shape[1] != k.shape[1])
    return o[0].transpose(0, 1)


def _exact(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> tuple[Tensor, Tensor]:
    from ..reference.exact import exact_attention

    return exact_attention(q, k, v, causal=causal)


def _exact_packed(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    causal: bool,
) -> tuple[Tensor, Tensor]:
    from ..reference.exact import exact_attention

    return exact_attention(q, k, v, cu_seqlens_q, cu_seqlens_k, causal=causal)
