"""Low-precision softmax attention with FlashAttention's call signatures: batched and packed, differentiable."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from flamia.backends import KERNELS, call_launches, native_backend, native_recipe, native_target, served
from flamia.compiler import load
from flamia.launch import preload
from flamia.operators import attention_forward, last_plan
from flamia.recipe import Recipe, get_recipe, recipes

HEAD_DIMS = (16, 32, 64, 96, 128, 256)
DTYPES = (torch.bfloat16, torch.float16)
BACKENDS = ("auto", "reference", *KERNELS)
Window = Sequence[int | None] | None

_NATIVE = {backend: {name: native_recipe(name, backend) for name in recipes()} for backend in KERNELS}
_REFERENCE = "backend='reference' runs this (plain PyTorch in FP64, for checking numbers, not for speed)"


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    deterministic: bool = False,
    return_lse: bool = False,
    recipe: str | Recipe = "mxfp8",
    backend: str = "auto",
    k_offset: Tensor | None = None,
    v_offset: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of equally long sequences in low precision, forward and backward (paper 3).

    Args:
        q: [batch, Sq, heads, D], BF16 or FP16; D one of ``HEAD_DIMS``.
        k, v: [batch, Sk, kv heads, D], as q; heads a multiple of kv heads.
        softmax_scale: factor of q k^T, > 0; None: 1/sqrt(D).
        causal: query i sees keys up to i + Sk - Sq (aligned bottom right).
        window_size: (left, right) keys seen on either side of that diagonal; -1 or None: unbounded.
        deterministic: fix the order of every sum. The reference always does.
        return_lse: also return the log-sum-exp of the scaled scores.
        recipe: a name from ``flamia.recipes()`` or a ``flamia.Recipe``.
        backend: "auto" (the native kernels of the device, the reference on a CPU), "reference", "sm90" (Hopper) or
            "sm100" (Blackwell). On Hopper a recipe's name stands for its folded variant.
        k_offset, v_offset: [kv heads, D] constants near the channel means of k and v, from earlier steps, removed
            before quantization and added back exactly: they cannot leak (docs/numerics.md). Reference only.

    Returns:
        o [batch, Sq, heads, D] in q's dtype; with return_lse also lse [batch, heads, Sq], FP32, natural log. Both are
        differentiable. Rows that see no key: o = 0, lse = -inf, zero gradients.

    Raises:
        ValueError, TypeError: an argument that is not as above; nothing has been written then.
    """
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor) or x.dim() != 4:
            raise ValueError(f"{name} must be a tensor [batch, tokens, heads, head_dim], got {_describe(x)}")
    batch, len_q = q.shape[:2]
    len_k = k.shape[1]
    if k.shape[0] != batch:
        raise ValueError(f"k must have q's batch size {batch}, got {k.shape[0]}")
    if v.shape != k.shape:
        raise ValueError(f"v must have k's shape {tuple(k.shape)}, got {tuple(v.shape)}")
    cu_q = _equal_offsets(batch, len_q, q.device)
    cu_k = cu_q if len_k == len_q else _equal_offsets(batch, len_k, q.device)
    o, lse = _attention(
        q.reshape(batch * len_q, *q.shape[2:]),
        k.reshape(batch * len_k, *k.shape[2:]),
        v.reshape(batch * len_k, *v.shape[2:]),
        cu_q,
        cu_k,
        (len_q, len_k),
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window_size,
        deterministic=deterministic,
        recipe=recipe,
        backend=backend,
        k_offset=k_offset,
        v_offset=v_offset,
    )
    o = o.reshape(q.shape)
    return (o, lse.reshape(q.shape[2], batch, len_q).transpose(0, 1)) if return_lse else o


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | Tensor | None = None,
    max_seqlen_k: int | Tensor | None = None,
    *,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    deterministic: bool = False,
    return_lse: bool = False,
    recipe: str | Recipe = "mxfp8",
    backend: str = "auto",
    k_offset: Tensor | None = None,
    v_offset: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of documents packed one after the other into rows of tokens (paper 3.6).

    Args:
        q: [T, heads, D]; k, v: [Tk, kv heads, D]. Tokens past the last offset are never read; o is zero there.
        cu_seqlens_q, cu_seqlens_k: int32 or int64 [documents + 1], document boundaries from 0, non-decreasing; empty
            documents are fine. None for keys: those of the queries.
        max_seqlen_q, max_seqlen_k: longest document, an integer or a tensor of one element; optional, never needed.
        Others: as ``flash_attn_func``.

    Returns:
        o [T, heads, D]; with return_lse also lse [heads, T], FP32, natural log.

    Raises:
        ValueError, TypeError: an argument that is not as above; nothing has been written then.
    """
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor) or x.dim() != 3:
            raise ValueError(f"{name} must be a tensor [tokens, heads, head_dim], got {_describe(x)}")
    if v.shape != k.shape:
        raise ValueError(f"v must have k's shape {tuple(k.shape)}, got {tuple(v.shape)}")
    cu_q = _offsets("cu_seqlens_q", cu_seqlens_q, q.device)
    if cu_seqlens_k is None:
        if k.shape[0] != q.shape[0]:
            raise ValueError(
                f"cu_seqlens_k=None means the queries' documents, but k has {k.shape[0]} tokens and q {q.shape[0]}"
            )
        cu_k = cu_q
    else:
        cu_k = _offsets("cu_seqlens_k", cu_seqlens_k, q.device)
    if cu_k.shape != cu_q.shape:
        raise ValueError(
            f"cu_seqlens_k must list as many documents as cu_seqlens_q, {cu_q.shape[0] - 1}, got {cu_k.shape[0] - 1}"
        )
    longest = (_max_seqlen("max_seqlen_q", max_seqlen_q), _max_seqlen("max_seqlen_k", max_seqlen_k))
    o, lse = _attention(
        q,
        k,
        v,
        cu_q,
        cu_k,
        longest,
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window_size,
        deterministic=deterministic,
        recipe=recipe,
        backend=backend,
        k_offset=k_offset,
        v_offset=v_offset,
    )
    return (o, lse) if return_lse else o


def warmup(
    heads_q: int,
    heads_kv: int,
    head_dim: int,
    *,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str = "cuda",
    training: bool = True,
    **options: Any,
) -> None:
    """Compile or load now what calls with these arguments need, so that none waits for it, inside a CUDA graph neither.

    Runs one call on 128 tokens, and its backward if ``training``. What is compiled depends on the ratio of heads, the
    head dimension, the dtype, which sides of the window are bounded, and the recipe; never on lengths or documents.
    Where lengths decide between kernels, all of them are loaded.

    Args:
        heads_q, heads_kv, head_dim: of q, and of k and v.
        dtype: torch.bfloat16 or torch.float16.
        device: where the calls will run.
        options: those of ``flash_attn_varlen_func``: causal, window_size, recipe, backend, deterministic.

    Raises:
        ValueError, TypeError: as the calls would.
    """
    q, k, v = (
        torch.zeros((128, n, head_dim), dtype=dtype, device=device, requires_grad=training)
        for n in (heads_q, heads_kv, heads_kv)
    )
    documents = torch.tensor([0, 128], dtype=torch.int32, device=device)
    with torch.set_grad_enabled(training):
        o = flash_attn_varlen_func(q, k, v, documents, **options)
        assert isinstance(o, Tensor)
        if training:
            o.sum().backward()
    plan = last_plan()
    assert plan is not None
    if plan.backend in KERNELS:
        target = native_target(q.device)
        for kernel in KERNELS[plan.backend].call_kernels(plan, dtype, target):
            load(kernel)
        with torch.cuda.device(q.device):
            preload(call_launches(plan, dtype, target))
    if q.is_cuda:
        torch.cuda.synchronize(q.device)


def _attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    longest: tuple[int, int],
    *,
    softmax_scale: float | None,
    causal: bool,
    window_size: Window,
    deterministic: bool,
    recipe: str | Recipe,
    backend: str,
    k_offset: Tensor | None,
    v_offset: Tensor | None,
) -> tuple[Tensor, Tensor]:
    resolved = get_recipe(recipe)
    _check_tensors(q, k, v)
    head_dim = q.shape[2]
    backend = _backend(backend, q.device)
    if backend in KERNELS and isinstance(recipe, str):
        resolved = _NATIVE[backend][recipe]
    _check_recipe(resolved, head_dim)
    for name, offset in (("k_offset", k_offset), ("v_offset", v_offset)):
        _check_offset(name, offset, k)
    if softmax_scale is None:
        softmax_scale = 1.0 / math.sqrt(head_dim)
    elif not isinstance(softmax_scale, (int, float)) or not 0.0 < softmax_scale < math.inf:
        raise ValueError(f"softmax_scale must be a finite number above 0 or None, got {softmax_scale!r}")
    left, right = _window(window_size)
    training = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    if training and not resolved.training:
        raise ValueError(
            "q, k or v requires a gradient, but this recipe has training=False (its exponential is for inference): "
            "call it under torch.no_grad() or use a recipe with training=True"
        )
    if backend in KERNELS:
        offsets = k_offset is not None or v_offset is not None
        reason = KERNELS[backend].unsupported(resolved, head_dim, q.dtype, training=training, offsets=offsets)
        if reason is not None:
            raise ValueError(f"{reason}; {_REFERENCE}")
    result = attention_forward(
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        k_offset,
        v_offset,
        longest[0],
        longest[1],
        float(softmax_scale),
        left,
        0 if causal else right,
        bool(deterministic),
        training,
        resolved.key,
        backend,
    )
    return result[0], result[1]


def _describe(x: object) -> str:
    return f"shape {tuple(x.shape)}" if isinstance(x, Tensor) else type(x).__name__


def _check_tensors(q: Tensor, k: Tensor, v: Tensor) -> None:
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dtype not in DTYPES:
            raise TypeError(f"{name} must be torch.bfloat16 or torch.float16, got {x.dtype}")
        if x.dtype != q.dtype:
            raise TypeError(f"{name} must have q's dtype {q.dtype}, got {x.dtype}")
        if x.device != q.device:
            raise ValueError(f"{name} must be on q's device {q.device}, got {x.device}")
    if q.device.type not in ("cpu", "cuda"):
        raise ValueError(f"q must be on a CPU or CUDA device, got {q.device}")
    if q.shape[2] not in HEAD_DIMS:
        raise ValueError(f"head_dim={q.shape[2]} is not supported: it must be one of {HEAD_DIMS}")
    if k.shape[2] != q.shape[2]:
        raise ValueError(f"k must have q's head_dim {q.shape[2]}, got {k.shape[2]}")
    if q.shape[1] == 0 or k.shape[1] == 0 or q.shape[1] % k.shape[1]:
        raise ValueError(
            f"the number of query heads must be a multiple of the number of key/value heads, got {q.shape[1]} query "
            f"heads and {k.shape[1]} key/value heads"
        )


def _check_recipe(recipe: Recipe, head_dim: int) -> None:
    if recipe.rotate and head_dim & (head_dim - 1):
        raise ValueError(
            f"rotate=True needs a power-of-two head dimension, got head_dim={head_dim}: use rotate=None or False"
        )
    if recipe.operand_scale == "groups" and head_dim % 32:
        raise ValueError(f"operand_scale='groups' needs a head dimension that is a multiple of 32, got {head_dim}")


def _check_offset(name: str, offset: Tensor | None, k: Tensor) -> None:
    if offset is None:
        return
    if not isinstance(offset, Tensor) or tuple(offset.shape) != tuple(k.shape[1:]):
        raise ValueError(
            f"{name} must be a tensor [kv heads, head_dim] = {tuple(k.shape[1:])}, got {_describe(offset)}"
        )
    if not offset.is_floating_point() or offset.device != k.device:
        raise ValueError(f"{name} must be floating point on {k.device}, got {offset.dtype} on {offset.device}")
    if offset.requires_grad:
        raise ValueError(f"{name} is a constant of earlier steps and has no gradient: pass {name}.detach()")


def _backend(backend: str, device: torch.device) -> str:
    if backend not in BACKENDS:
        raise ValueError(f"backend={backend!r} is unknown: it must be one of {', '.join(map(repr, BACKENDS))}")
    if backend == "reference" or (backend == "auto" and device.type == "cpu"):
        return "reference"
    native = native_backend(device)
    if native is not None and backend in ("auto", native):
        return native
    found = f"device {device}"
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        found = f"{device} of compute capability {properties.major}.{properties.minor}"
    raise ValueError(f"backend={backend!r} has no kernels for {found}: {served()}; {_REFERENCE}")


def _window(window_size: Window) -> tuple[int, int]:
    pair = (-1, -1) if window_size is None else window_size
    if not isinstance(pair, Sequence) or len(pair) != 2:
        raise ValueError(f"window_size must be a pair (left, right) or None, got {window_size!r}")
    sides = []
    for side in pair:
        if side is None:
            side = -1
        if isinstance(side, bool) or not isinstance(side, int) or side < -1:
            raise ValueError(
                f"window_size entries must be integers >= 0, or -1 or None for unbounded, got {window_size!r}"
            )
        sides.append(side)
    return sides[0], sides[1]


def _equal_offsets(count: int, length: int, device: torch.device) -> Tensor:
    if length == 0:
        return torch.zeros(count + 1, dtype=torch.int32, device=device)
    return torch.arange(0, count * length + 1, length, dtype=torch.int32, device=device)


def _offsets(name: str, cu_seqlens: Tensor, device: torch.device) -> Tensor:
    if not isinstance(cu_seqlens, Tensor) or cu_seqlens.dim() != 1 or cu_seqlens.shape[0] < 1:
        raise ValueError(f"{name} must be a tensor [documents + 1], got {_describe(cu_seqlens)}")
    if cu_seqlens.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{name} must be torch.int32 or torch.int64, got {cu_seqlens.dtype}")
    if cu_seqlens.device != device:
        raise ValueError(f"{name} must be on q's device {device}, got {cu_seqlens.device}")
    if cu_seqlens.dtype == torch.int32:
        return cu_seqlens.contiguous()
    # Clamped, so that an offset past 2^31 is refused as past its buffer instead of wrapping around to a small one.
    return cu_seqlens.clamp(-(2**31), 2**31 - 1).to(torch.int32).contiguous()


def _max_seqlen(name: str, value: int | Tensor | None) -> int:
    if value is None:
        return -1
    if isinstance(value, Tensor):
        if value.numel() != 1:
            raise ValueError(f"{name} must be an integer or a tensor of one element, got {_describe(value)}")
        return -1  # reading it would synchronise, and nothing needs it
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"{name} must be an integer >= 0 or None, got {value!r}")
    return value
