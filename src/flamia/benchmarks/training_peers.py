"""Attention of others forward and backward: FlashAttention-4 and cuDNN, each where it is installed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flamia.benchmarks import flash_attention
from flamia.benchmarks.cudnn_fp8 import Attention
from flamia.benchmarks.exact import Tensors
from flamia.benchmarks.peers import PEERS as FORWARD
from flamia.benchmarks.peers import Inputs
from flamia.benchmarks.workloads import Workload

TRAINING, BACKWARD = "training", "backward"
PARTS = (TRAINING, BACKWARD)  # forward and backward; backward alone


@dataclass
class TrainingInputs(Inputs):
    """Also do, as q."""

    do: Tensor

    @classmethod
    def make(cls, workload: Workload, causal: bool, seed: int = 0, device: str = "cuda") -> TrainingInputs:
        """Gaussian tensors, the same at every call."""
        inputs = Inputs.make(workload, causal, seed, device)
        generator = torch.Generator(device).manual_seed(seed + 1)
        do = torch.randn(inputs.q.shape, generator=generator, device=device).to(inputs.q.dtype)
        return cls(**vars(inputs), do=do)

    def leaves(self) -> list[Tensor]:
        """q, k and v as tensors that ask for gradients."""
        return [x.detach().requires_grad_() for x in (self.q, self.k, self.v)]

    def packed(self, *tensors: Tensor) -> Tensors:
        """o, dq, dk, dv [batch, heads, tokens, D] in the layout of packed rows; without o, three of them."""
        rows = [x.transpose(1, 2).flatten(0, 1) for x in tensors]
        return Tensors(*rows) if len(rows) == 4 else Tensors(None, *rows)


@dataclass(frozen=True)
class Call:
    """What is timed. run: computes from what has been prepared; results: runs once and returns what came out."""

    run: Callable[[], Any]
    results: Callable[[], Tensors]


def autograd_call(inputs: TrainingInputs, forward: Callable[..., Tensor]) -> Call:
    """Forward and backward of ``forward(q, k, v) -> o``, all packed, as a training step runs them."""
    leaves = inputs.leaves()

    def run() -> Tensors:
        o = forward(*leaves)
        return Tensors(o.detach(), *torch.autograd.grad(o, leaves, inputs.do))

    return Call(run, run)


@dataclass(frozen=True)
class Floors:
    """Least cosines with exact attention on Gaussian inputs, in any document; below, a result is wrong."""

    o: float
    dq: float
    dk: float
    dv: float


@dataclass(frozen=True)
class Peer:
    """Someone's attention.

    Attributes:
        name: as tables and ``peers.PEERS`` have it.
        floors: of its results.
        calls: for each of ``PARTS``, inputs -> what is timed.
    """

    name: str
    floors: Floors
    calls: dict[str, Callable[[TrainingInputs], Call]]

    def refuses(self, workload: Workload) -> str | None:
        """Why this workload is not run, or None."""
        return FORWARD[self.name].refuses(workload)


# ------------------------------------------------------------------------------------------------ FlashAttention-4


def _flash_attention_training(inputs: TrainingInputs) -> Call:
    attend = flash_attention.attention(inputs.causal, max(inputs.workload.lengths))
    return autograd_call(inputs, lambda q, k, v: attend(q, k, v, inputs.cu_seqlens))


def _flash_attention_backward(inputs: TrainingInputs) -> Call:
    q, k, v, do, cu, causal = inputs.q, inputs.k, inputs.v, inputs.do, inputs.cu_seqlens, inputs.causal
    if flash_attention.is_installed():
        from flash_attn.cute import interface

        longest = max(inputs.workload.lengths)
        documents = dict(cu_seqlens_q=cu, cu_seqlens_k=cu, max_seqlen_q=longest, max_seqlen_k=longest)
        o, lse = interface._flash_attn_fwd(q, k, v, **documents, causal=causal, return_lse=True)[:2]

        def run() -> Tensors:
            return Tensors(None, *interface._flash_attn_bwd(q, k, v, o, do, lse, causal=causal, **documents))

        return Call(run, run)
    o, lse = flash_attention.forward(q, k, v, cu, causal)

    def ready() -> Tensors:
        return Tensors(None, *flash_attention.backward(q, k, v, o, lse, do, cu, causal))

    return Call(ready, ready)


# ------------------------------------------------------------------------------------------------------------ cuDNN


def _batched(x: Tensor, inputs: Inputs) -> Tensor:
    """[T, heads, D] -> a view [batch, heads, tokens, D]."""
    return x.unflatten(0, (len(inputs.workload.lengths), -1)).transpose(1, 2)


def _cudnn_bf16_training(inputs: TrainingInputs) -> Call:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    grouped = inputs.q.shape[1] != inputs.k.shape[1]

    def forward(*packed: Tensor) -> Tensor:
        q, k, v = (_batched(x, inputs) for x in packed)
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            o = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=inputs.causal, enable_gqa=grouped)
        return o.transpose(1, 2).flatten(0, 1)

    return autograd_call(inputs, forward)


def _cudnn_bf16_backward(inputs: TrainingInputs) -> Call:
    # The operators under torch's attention: autograd would launch on the stream of the forward, not on the one that
    # is being captured.
    q, k, v, do = (_batched(x, inputs) for x in (inputs.q, inputs.k, inputs.v, inputs.do))
    operators: Any = torch.ops.aten
    o, lse, *lengths, seed, offset, _ = operators._scaled_dot_product_cudnn_attention(
        q, k, v, None, True, 0.0, inputs.causal, False
    )

    def run() -> tuple[Tensor, ...]:
        gradients: tuple[Tensor, ...] = operators._scaled_dot_product_cudnn_attention_backward(
            do, q, k, v, o, lse, seed, offset, None, *lengths, 0.0, inputs.causal
        )
        return gradients

    return Call(run, lambda: inputs.packed(*run()))


def _cudnn_fp8_training(inputs: TrainingInputs) -> Call:
    attention = _calibrated(inputs)

    def run() -> None:
        attention.quantize()
        attention.forward()
        attention.backward()

    def results() -> Tensors:
        run()
        return inputs.packed(*attention.results())

    return Call(run, results)


def _cudnn_fp8_backward(inputs: TrainingInputs) -> Call:
    attention = _calibrated(inputs)
    attention.forward()

    def run() -> None:
        attention.quantize("do")
        attention.backward()

    def results() -> Tensors:
        run()
        return inputs.packed(*attention.results())

    return Call(run, results)


def _calibrated(inputs: TrainingInputs) -> Attention:
    q, k, v, do = (_batched(x, inputs) for x in (inputs.q, inputs.k, inputs.v, inputs.do))
    attention = Attention(q, k, v, do, inputs.causal)
    attention.calibrate()
    return attention


_BF16 = Floors(0.9999, 0.9999, 0.9999, 0.9999)
# Gaussian inputs give .9981, .9974, .9975, .9982 at least, in any document.
_FP8 = Floors(0.997, 0.995, 0.995, 0.997)
PEERS = {
    peer.name: peer
    for peer in (
        Peer("fa4-bf16", _BF16, {TRAINING: _flash_attention_training, BACKWARD: _flash_attention_backward}),
        Peer("cudnn-bf16", _BF16, {TRAINING: _cudnn_bf16_training, BACKWARD: _cudnn_bf16_backward}),
        Peer("cudnn-fp8", _FP8, {TRAINING: _cudnn_fp8_training, BACKWARD: _cudnn_fp8_backward}),
    )
}
