"""FlashAttention-4's packed BF16 attention as ready libraries, for machines without the DSL; up to 256 documents.

Its launches are those of ``flash_attn.cute.interface``: one forward; backward, one before (delta, log2 of the row sums,
a cleared dQ accumulator), the attention backward, and one that turns the FP32 accumulator of dQ, and with grouped heads
those of dK and dV, into BF16.
"""

from __future__ import annotations

import contextlib
import importlib.util
import math
import os
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from flamia.compiler import Kernel, load, make_kernel

Attend = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
PARTS = ("before", "attention", "dq", "dkv")  # the last with grouped heads only
ARCH = "sm_90a"  # the only one that its libraries are made for
KEYS = 128  # of a tile of its Hopper backward
MOST_DOCUMENTS = 256  # with more it wants a table of tiles, which these libraries are compiled without


def is_installed() -> bool:
    """Whether FlashAttention-4 itself is there, so that its libraries are not needed."""
    return all(importlib.util.find_spec(name) is not None for name in ("flash_attn", "cutlass"))


def missing(documents: int) -> str | None:
    """Why a row of so many documents cannot run, or None."""
    if is_installed():
        return None
    if torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0):
        return "flash-attn-4 is not installed, and ready libraries of it are Hopper's alone"
    if not os.environ.get("FLAMIA_KERNELS"):
        return "flash-attn-4 is not installed, and FLAMIA_KERNELS names no folder made with `flamia compile --peers`"
    if documents > MOST_DOCUMENTS:
        return f"its ready libraries run up to {MOST_DOCUMENTS} documents"
    return None


def queries(head_dim: int, causal: bool) -> int:
    """Queries of a tile of its Hopper backward."""
    if head_dim <= 64:
        return 128
    return 64 if causal else 80


def forward_kernel(head_dim: int, ratio: int, causal: bool, arch: str = ARCH) -> Kernel:
    """The library of the forward."""
    here = "flamia.benchmarks.flash_attention"
    return make_kernel(f"{here}:build_forward", here, arch, head_dim=head_dim, ratio=ratio, causal=causal)


def backward_kernels(head_dim: int, ratio: int, causal: bool, arch: str = ARCH) -> tuple[Kernel, ...]:
    """The libraries of one shape, in the order of their launches."""
    here = "flamia.benchmarks.flash_attention"
    return tuple(
        make_kernel(f"{here}:build_backward", here, arch, head_dim=head_dim, ratio=ratio, causal=causal, part=part)
        for part in (PARTS if ratio > 1 else PARTS[:-1])
    )


def build_forward(arch: str, *, head_dim: int, ratio: int, causal: bool) -> Any:
    """Compile the forward from tensors without storage. No GPU is needed."""
    from flash_attn.cute import interface

    with _compiling(arch) as number:
        q, k, v, _, _, documents = _fakes(head_dim, ratio)
        with _made(interface._flash_attn_fwd.compile_cache.cache) as kernels:
            interface._flash_attn_fwd(q, k, v, **documents, causal=causal, return_lse=True, _arch=number)
            (kernel,) = kernels.values()
            return kernel


def build_backward(arch: str, *, head_dim: int, ratio: int, causal: bool, part: str) -> Any:
    """Compile one launch of the backward from tensors without storage. No GPU is needed."""
    from flash_attn.cute import interface

    config = interface._tile_size_bwd_sm90(head_dim, head_dim, causal, False)
    found = (config.m_block_size, config.n_block_size, config.dKV_swapAB)
    if found != (queries(head_dim, causal), KEYS, False):
        raise RuntimeError(f"FlashAttention-4 has other tiles now, {found}: its libraries would get wrong buffers")
    bf16 = interface.torch2cute_dtype_map[torch.bfloat16]
    threads = 128 * config.num_wg
    with _compiling(arch) as number:
        if part == "before":
            shape = (bf16, head_dim, head_dim, config.m_block_size)
            flags = dict(has_cuseqlens_q=True, has_seqused_q=False, has_dlse=False, has_dq_accum=True)
            flags |= dict(has_scaleP=False, has_lse_log2=True, use_padded_offsets=True, nheads_major=False)
            flags |= dict(pack_gqa=False, has_cu_total_m_blocks=False)
            numbers = dict(qhead_per_kvhead=1, nheads_kv=1, hdim_multiple_of=32)
            return interface._compile_bwd_preprocess(*shape, **flags, **numbers)
        if part in ("dq", "dkv"):
            of_dq = 128 if config.dQ_single_wg else threads
            tile = {
                "dq": (config.m_block_size, of_dq, config.AtomLayoutMdQ, config.dQ_swapAB),
                "dkv": (KEYS, threads, config.AtomLayoutNdKV, config.dKV_swapAB),
            }
            packed = dict(has_cuseqlens_q=True, has_seqused_q=False, has_cu_total_m_blocks=False)
            rest = dict(use_2cta_instrs=False, cluster_size=1, arch=number, learnable_sink_dtype=None)
            return interface._compile_bwd_postprocess(
                bf16, head_dim, *tile[part], **packed, **rest, hdim_multiple_of=32
            )
        q, k, v, o, lse, documents = _fakes(head_dim, ratio)
        with _made(interface._flash_attn_bwd.compile_cache.cache) as kernels:
            interface._flash_attn_bwd(q, k, v, o, o, lse, causal=causal, **documents)
            (kernel,) = kernels.values()
            return kernel


def _fakes(head_dim: int, ratio: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, dict[str, Any]]:
    heads = (8 * ratio, 8, 8, 8 * ratio)
    q, k, v, o = (torch.empty(4096, n, head_dim, dtype=torch.bfloat16, device="cuda") for n in heads)
    lse = torch.empty(8 * ratio, 4096, dtype=torch.float32, device="cuda")
    cu = torch.empty(5, dtype=torch.int32, device="cuda")
    return q, k, v, o, lse, dict(cu_seqlens_q=cu, cu_seqlens_k=cu, max_seqlen_q=2048, max_seqlen_k=2048)


@contextlib.contextmanager
def _made(cache: dict[Any, Any]) -> Iterator[dict[Any, Any]]:
    """FlashAttention-4's cache of one function, empty for as long as the context lasts: then it holds what was made."""
    before = dict(cache)
    cache.clear()
    try:
        yield cache
    finally:
        cache.update(before)


@contextlib.contextmanager
def _compiling(arch: str) -> Iterator[int]:
    """The DSL compiles for ``arch``, and FlashAttention-4 from tensors without storage; yields the number in ``arch``.

    What it would ask the driver, it finds in the environment.
    """
    from cutlass.cutlass_dsl import CuTeDSL
    from flash_attn.cute import interface
    from torch._subclasses.fake_tensor import FakeTensorMode

    number = int("".join(c for c in arch if c.isdigit()))
    told = {"FLASH_ATTENTION_ARCH": f"sm_{number}", "FLASH_ATTENTION_NUM_SMS": "132"}  # an H100's or H200's
    saved = {name: os.environ.get(name) for name in told}
    settings = CuTeDSL._get_dsl().envar
    before, settings.arch = settings.arch, arch
    os.environ.update(told)
    interface._get_device_arch.cache_clear()
    try:
        with FakeTensorMode(allow_non_fake_inputs=True), warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # about arguments that it passes and we do not
            yield number
    finally:
        settings.arch = before
        for name, value in saved.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})
        interface._get_device_arch.cache_clear()


def forward(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """o and lse FP32 [heads, T] through the library. q [T, heads, D], k, v [T, kv heads, D] BF16.

    Raises:
        KernelError: the library is missing, or of other sources.
    """
    launch = load(forward_kernel(q.shape[2], q.shape[1] // k.shape[1], causal))
    o = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty((q.shape[1], q.shape[0]), dtype=torch.float32, device=q.device)
    # Not given: lengths used, pages, window, sink, sparsity; auxiliary data; two sums for many documents.
    gaps = (*(None,) * 7, (None, None), None, None)
    launch(q, k, v, o, lse, 1 / math.sqrt(q.shape[2]), cu_seqlens, cu_seqlens, *gaps)
    return o, lse


def backward(
    q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, do: Tensor, cu_seqlens: Tensor, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv through the libraries. q, o, do [T, heads, D], k, v [T, kv heads, D] BF16; lse FP32 [heads, T].

    Raises:
        KernelError: a library is missing, or of other sources.
    """
    (tokens, heads, dim), kv_heads = q.shape, k.shape[1]
    ratio = heads // kv_heads
    kernels = backward_kernels(dim, ratio, causal)
    before, attention, *after = (load(kernel) for kernel in kernels)
    rows = _padded(tokens, cu_seqlens, queries(dim, causal))
    scale = 1 / math.sqrt(dim)
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))

    def floats(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.float32, device=q.device)

    delta, log2 = floats(heads, rows), floats(heads, rows)
    dq_sum = floats(heads, rows * dim)
    sums = [dk, dv]
    if ratio > 1:
        sums = [floats(kv_heads, _padded(tokens, cu_seqlens, KEYS) * dim).zero_() for _ in range(2)]
    # Not given: lengths used, gradient of lse, row maxima, factors of p; a scale that is read with those alone.
    before(o, do, delta, lse, log2, dq_sum, cu_seqlens, *(None,) * 4, 1.0, None, None)
    # Not given: lengths used, window, semaphores; auxiliary data; sparsity, tiles before each document.
    gaps = (*(None,) * 7, (None, None), None, None)
    attention(q, k, v, do, log2, delta, dq_sum, *sums, scale, cu_seqlens, cu_seqlens, *gaps)
    # Not given: lengths used, sink, tiles before each document.
    after[0](dq_sum, dq, scale, cu_seqlens, None, None, None)
    if ratio > 1:
        for total, out, factor in zip(sums, (dk, dv), (scale, 1.0), strict=True):
            after[1](total, out, factor, cu_seqlens, None, None, None)
    return dq, dk, dv


def _padded(tokens: int, cu_seqlens: Tensor, tile: int) -> int:
    # Every document starts on a tile of its own.
    return (tokens + cu_seqlens.shape[0] * tile - 1) // tile * tile


class _Ready(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, causal: bool) -> Tensor:
        q, k, v = (x if x.stride(2) == 1 else x.contiguous() for x in (q, k, v))
        o, lse = forward(q, k, v, cu_seqlens, causal)
        ctx.save_for_backward(q, k, v, o, lse, cu_seqlens)
        ctx.causal = causal
        return o

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, o, lse, cu_seqlens = ctx.saved_tensors
        do = gradients[0].contiguous()
        return *backward(q, k, v, o, lse, do, cu_seqlens, ctx.causal), None, None


def attention(causal: bool, longest: int) -> Attend:
    """(q, k, v, cu_seqlens) -> o, packed and differentiable: as installed, or else through the libraries.

    longest: tokens of the longest document, which FlashAttention-4 asks for.
    """
    if not is_installed():
        return lambda q, k, v, cu_seqlens: _Ready.apply(q, k, v, cu_seqlens, causal)
    from flash_attn.cute import flash_attn_varlen_func

    def installed(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor) -> Tensor:
        documents = dict(cu_seqlens_q=cu_seqlens, cu_seqlens_k=cu_seqlens, max_seqlen_q=longest, max_seqlen_k=longest)
        o: Tensor = flash_attn_varlen_func(q, k, v, **documents, causal=causal)[0]
        return o

    return installed
