"""Attention of others, to time ours beside: FlashAttention-4 and cuDNN, each where it is installed."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flamia.benchmarks import flash_attention
from flamia.benchmarks.workloads import Workload, offsets


@dataclass(frozen=True)
class Prepared:
    """A call to time. run: computes from what has been prepared; output: its result as o [T, heads, D]."""

    run: Callable[[], Any]
    output: Callable[[Any], Tensor]


@dataclass
class Inputs:
    """Packed q [T, heads, D], k, v [T, kv heads, D] in BF16, and their documents, on the device."""

    workload: Workload
    causal: bool
    q: Tensor
    k: Tensor
    v: Tensor
    cu_seqlens: Tensor

    @classmethod
    def make(cls, workload: Workload, causal: bool, seed: int = 0, device: str = "cuda") -> Inputs:
        """Gaussian tensors, the same at every call."""
        generator = torch.Generator(device).manual_seed(seed)
        heads = (workload.heads_q, workload.heads_kv, workload.heads_kv)
        shapes = [(workload.tokens, n, workload.head_dim) for n in heads]
        q, k, v = (torch.randn(s, generator=generator, device=device).to(torch.bfloat16) for s in shapes)
        return cls(workload, causal, q, k, v, offsets(list(workload.lengths), device))

    def batched(self) -> list[Tensor]:
        """q, k, v as views [batch, tokens, heads, D]. Documents must be equally long."""
        return [x.view(len(self.workload.lengths), -1, *x.shape[1:]) for x in (self.q, self.k, self.v)]


@dataclass(frozen=True)
class Peer:
    """Someone's attention forward.

    Attributes:
        name: as tables show it.
        packed: whether it runs packed rows; else batches alone.
        least_cosine: of its output with exact attention on Gaussian inputs; below it is wrong and not timed.
        missing: says what a workload lacks here, or None.
        prepare: inputs -> what is timed.
    """

    name: str
    packed: bool
    least_cosine: float
    missing: Callable[[Workload], str | None]
    prepare: Callable[[Inputs], Prepared]

    def refuses(self, workload: Workload) -> str | None:
        """Why this workload is not run, or None."""
        if not (self.packed or workload.is_batch):
            return "has no packed rows"
        return self.missing(workload)


# ------------------------------------------------------------------------------------------------ FlashAttention-4


def _flash_attention_missing(workload: Workload) -> str | None:
    return flash_attention.missing(len(workload.lengths))


def _flash_attention(inputs: Inputs) -> Prepared:
    q, k, v, cu = inputs.q, inputs.k, inputs.v, inputs.cu_seqlens
    if flash_attention.is_installed():
        attend = flash_attention.attention(inputs.causal, max(inputs.workload.lengths))
        return Prepared(lambda: attend(q, k, v, cu), lambda o: o)
    return Prepared(lambda: flash_attention.forward(q, k, v, cu, inputs.causal), lambda result: result[0])


# ------------------------------------------------------------------------------------------------------------ cuDNN


def _cudnn_missing(_: Workload) -> str | None:
    return None if torch.backends.cudnn.is_available() else "torch has no cuDNN"


def _cudnn_bf16(inputs: Inputs) -> Prepared:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    q, k, v = (x.transpose(1, 2) for x in inputs.batched())
    grouped = q.shape[1] != k.shape[1]

    def run() -> Tensor:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return torch.nn.functional.scaled_dot_product_attention(
                q, k, v, is_causal=inputs.causal, enable_gqa=grouped
            )

    return Prepared(run, lambda o: o.transpose(1, 2).reshape(inputs.q.shape))


def _frontend_missing(workload: Workload) -> str | None:
    if importlib.util.find_spec("cudnn") is None:
        return "nvidia-cudnn-frontend is not installed"
    return _cudnn_missing(workload)


def _cudnn_fp8(inputs: Inputs) -> Prepared:
    """E4M3 with a scale per tensor, set from the data; quantization is not in the time, and its output is E4M3."""
    import cudnn

    f8 = torch.float8_e4m3fn
    scales = [448.0 / float(x.abs().max()) for x in (inputs.q, inputs.k, inputs.v)]
    codes = [(x.float() * s).to(f8).transpose(1, 2) for x, s in zip(inputs.batched(), scales, strict=True)]
    # Outputs are averages of V and smaller than it. Weights are at most 1.
    scale_o, scale_s = scales[2], 256.0
    handle = cudnn.create_handle()
    graph = cudnn.pygraph(
        io_data_type=cudnn.data_type.FP8_E4M3,
        intermediate_data_type=cudnn.data_type.FLOAT,
        compute_data_type=cudnn.data_type.FLOAT,
        handle=handle,
    )
    values: dict[Any, Tensor] = {}

    def tensor(name: str, data: Tensor, kind: Any) -> Any:
        made = graph.tensor(name=name, dim=list(data.shape), stride=list(data.stride()), data_type=kind)
        values[made] = data
        return made

    def scalar(name: str, value: float) -> Any:
        return tensor(name, torch.full((1, 1, 1, 1), value, device="cuda"), cudnn.data_type.FLOAT)

    operands = {n: tensor(n, x, cudnn.data_type.FP8_E4M3) for n, x in zip("qkv", codes, strict=True)}
    factors = {f"descale_{n}": scalar(f"descale_{n}", 1 / s) for n, s in zip("qkv", scales, strict=True)}
    factors |= {"descale_s": scalar("descale_s", 1 / scale_s), "scale_s": scalar("scale_s", scale_s)}
    results = graph.sdpa_fp8(
        **operands,
        **factors,
        scale_o=scalar("scale_o", scale_o),
        generate_stats=True,
        attn_scale=1 / math.sqrt(inputs.workload.head_dim),
        use_causal_mask=inputs.causal,
        name="attention",
    )
    o = torch.empty(inputs.q.shape, dtype=f8, device="cuda")
    batch, heads, length, _ = codes[0].shape
    shaped = o.view(batch, length, heads, -1).transpose(1, 2)
    stats = torch.empty((batch, heads, length, 1), dtype=torch.float32, device="cuda")
    maxima = [torch.empty((1, 1, 1, 1), dtype=torch.float32, device="cuda") for _ in range(2)]
    kinds = [cudnn.data_type.FP8_E4M3, *(cudnn.data_type.FLOAT,) * 3]
    for node, data, kind in zip(results, (shaped, stats, *maxima), kinds, strict=True):
        node.set_output(True).set_dim(list(data.shape)).set_stride(list(data.stride())).set_data_type(kind)
        values[node] = data
    graph.validate()
    graph.build_operation_graph()
    graph.create_execution_plans([cudnn.heur_mode.A])
    graph.check_support()
    graph.build_plans()
    workspace = torch.empty(max(1, graph.get_workspace_size()), dtype=torch.uint8, device="cuda")

    def run() -> Tensor:
        cudnn.set_stream(handle=handle, stream=torch.cuda.current_stream().cuda_stream)
        graph.execute(values, workspace, handle=handle)
        return o

    return Prepared(run, lambda codes: codes.float() / scale_o)


PEERS = {
    peer.name: peer
    for peer in (
        Peer("fa4-bf16", True, 0.9999, _flash_attention_missing, _flash_attention),
        Peer("cudnn-bf16", False, 0.9999, _cudnn_missing, _cudnn_bf16),
        Peer("cudnn-fp8", False, 0.997, _frontend_missing, _cudnn_fp8),
    )
}
