"""A byte-level GPT over packed rows: RMSNorm, rotary positions, SwiGLU, no biases, untied head.

The model never sees a batch dimension.  A step is one packed row of T tokens holding several
documents back to back; `cu_seqlens` says where each begins.  Attention is an argument of
`forward`, not a part of the model, so the same weights can be evaluated through any recipe.
That is the paper's leakage test (sections 3.2 and 4.5).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from .data import VOCABULARY

Attend = Callable[[Tensor, Tensor, Tensor, Tensor, int], Tensor]
"""(q, k, v [T, H, D], cu_seqlens int32 [documents + 1], max_seqlen) -> o [T, H, D], causal."""


@dataclass(frozen=True)
class ModelConfig:
    """Shape of a GPT.  `width` must be a multiple of `head_dim`, and `head_dim` must be even (rotary)."""

    layers: int
    width: int
    head_dim: int
    hidden: int  # inner width of SwiGLU
    vocabulary: int = VOCABULARY
    window: int | None = None  # keys that a query sees, its own included; None: all earlier ones
    rotary_base: float = 10_000.0
    value_gain: float = 1.0  # factor on the initial value projection
    embedding_spread: float = 0.0  # sigma of the log-normal factor on each initial embedding entry
    recompute: bool = False  # recompute each layer in the backward instead of keeping its activations

    def __post_init__(self) -> None:
        for name in ("layers", "width", "head_dim", "hidden", "vocabulary", "rotary_base", "value_gain"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be positive")
        if self.window is not None and self.window < 1:
            raise ValueError(f"window is {self.window}; it must be at least 1, or None for no limit")
        if self.embedding_spread < 0:
            raise ValueError(f"embedding_spread is {self.embedding_spread}; it must not be negative")
        if self.head_dim % 2:
            raise ValueError(f"head_dim is {self.head_dim}; rotary positions need an even number")
        if self.width % self.head_dim:
            raise ValueError(f"width is {self.width}; it must be a multiple of head_dim ({self.head_dim})")

    @property
    def heads(self) -> int:
        return self.width // self.head_dim


MODELS: dict[str, ModelConfig] = {
    # For a laptop: a few hundred steps take about a minute.
    "tiny": ModelConfig(layers=2, width=128, head_dim=64, hidden=384),
    # The byte-level model of the paper's leakage experiments (section 4.5).
    "paper": ModelConfig(layers=6, width=1024, head_dim=128, hidden=2816),
    # The shape of a Llama of a billion parameters. Text needs 257 entries of its vocabulary; the rest are there so that
    # the head costs what it costs.
    "1b": ModelConfig(
        layers=16, width=2048, head_dim=128, hidden=8192, vocabulary=32_000, rotary_base=500_000.0, recompute=True
    ),
    # Finds a leak within a minute on two cores: two keys a query, so that rounding noise cannot hide what
    # the scale tells, and values large and uneven enough to move the scale from the first step.
    "probe": ModelConfig(layers=1, width=64, head_dim=64, hidden=512, window=2, value_gain=20.0, embedding_spread=1.0),
}


def document_positions(cu_seqlens: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
    """Document index and position inside its document of every row of a packed buffer, both int64 [tokens].

    Runs on the device of `cu_seqlens` without a host synchronisation.  Empty documents and a tail of
    repeated offsets are fine.
    """
    rows = torch.arange(tokens, device=cu_seqlens.device)
    starts = cu_seqlens.long()
    document = torch.bucketize(rows, starts[1:], right=True)
    return document, rows - starts[document.clamp(max=starts.numel() - 2)]


def rotary_table(positions: Tensor, head_dim: int, base: float) -> tuple[Tensor, Tensor]:
    """Cosines and sines, FP32 [T, 1, head_dim / 2], of the rotary angles at `positions` [T]."""
    half = head_dim // 2
    frequencies = base ** (-torch.arange(half, device=positions.device, dtype=torch.float32) / half)
    angles = positions.float()[:, None] * frequencies
    return angles.cos()[:, None], angles.sin()[:, None]


def rotate(x: Tensor, table: tuple[Tensor, Tensor]) -> Tensor:
    """Rotary embedding of x [T, H, D] in FP32 (channel i is paired with channel i + D/2)."""
    cos, sin = table
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


class Attention(nn.Module):
    """Causal self-attention with rotary positions over packed rows [T, width]; the attention itself is the caller's."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.heads, self.head_dim = config.heads, config.head_dim
        self.qkv = nn.Linear(config.width, 3 * config.width, bias=False)
        self.out = nn.Linear(config.width, config.width, bias=False)

    def forward(
        self, x: Tensor, table: tuple[Tensor, Tensor], cu_seqlens: Tensor, max_seqlen: int, attend: Attend
    ) -> Tensor:
        q, k, v = self.qkv(x).view(-1, 3, self.heads, self.head_dim).unbind(1)
        q, k = rotate(q, table), rotate(k, table)
        # Every attention, the exact one too, is given the same BF16 tensors.
        o = attend(q.bfloat16(), k.bfloat16(), v.bfloat16(), cu_seqlens, max_seqlen)
        return self.out(o.to(v.dtype).flatten(1))


class SwiGLU(nn.Module):
    """Gated feed-forward layer on [T, width]: down(silu(gate) * up)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_up = nn.Linear(config.width, 2 * config.hidden, bias=False)
        self.down = nn.Linear(config.hidden, config.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)


class Layer(nn.Module):
    """Attention and feed-forward, each behind an RMSNorm and added to its input."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.width)
        self.attention = Attention(config)
        self.feed_forward_norm = nn.RMSNorm(config.width)
        self.feed_forward = SwiGLU(config)

    def forward(
        self, x: Tensor, table: tuple[Tensor, Tensor], cu_seqlens: Tensor, max_seqlen: int, attend: Attend
    ) -> Tensor:
        x = x + self.attention(self.attention_norm(x), table, cu_seqlens, max_seqlen, attend)
        return x + self.feed_forward(self.feed_forward_norm(x))


class GPT(nn.Module):
    """The model.  Parameters are FP32; attention alone runs on BF16 inputs (autocast may lower the rest)."""

    def __init__(self, config: ModelConfig, generator: torch.Generator | None = None) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocabulary, config.width)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.width)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)
        self.initialise(generator)

    @torch.no_grad()
    def initialise(self, generator: torch.Generator | None = None) -> None:
        """Normal weights of variance 1 / fan-in; what writes to the residual stream is scaled down with depth."""
        nn.init.normal_(self.embedding.weight, generator=generator)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=module.in_features**-0.5, generator=generator)
        for layer in self.layers:
            assert isinstance(layer, Layer)
            for writer in (layer.attention.out, layer.feed_forward.down):
                writer.weight.mul_((2 * self.config.layers) ** -0.5)
            layer.attention.qkv.weight[2 * self.config.width :].mul_(self.config.value_gain)
        spread = torch.randn(self.embedding.weight.shape, generator=generator) * self.config.embedding_spread
        self.embedding.weight.mul_(spread.exp())
        # Logits start near zero, so that the first loss is the logarithm of the vocabulary.
        self.head.weight.mul_(0.1)

    def forward(self, tokens: Tensor, cu_seqlens: Tensor, max_seqlen: int, attend: Attend) -> Tensor:
        """Logits [T, vocabulary] of tokens [T] int64, packed as `cu_seqlens` int32 [documents + 1] says.

        `max_seqlen` is any bound on the longest document.  Positions restart with every document.
        """
        _, positions = document_positions(cu_seqlens, tokens.numel())
        table = rotary_table(positions, self.config.head_dim, self.config.rotary_base)
        x = self.embedding(tokens)
        for layer in self.layers:
            if self.config.recompute and torch.is_grad_enabled():
                # Nothing in a layer is random, and reading the generator's state is refused while a graph is captured.
                arguments = (x, table, cu_seqlens, max_seqlen, attend)
                x = checkpoint(layer, *arguments, use_reentrant=False, preserve_rng_state=False)
            else:
                x = layer(x, table, cu_seqlens, max_seqlen, attend)
        return self.head(self.norm(x))

    def loss(self, tokens: Tensor, targets: Tensor, cu_seqlens: Tensor, max_seqlen: int, attend: Attend) -> Tensor:
        """Cross entropy in nats of every token, FP32 [T]."""
        logits = self(tokens, cu_seqlens, max_seqlen, attend)
        return F.cross_entropy(logits.float(), targets, reduction="none")

    def parameter_groups(self, weight_decay: float) -> list[dict]:
        """AdamW groups: matrices decay; norms and the embedding do not."""
        decayed: list[nn.Parameter] = []
        free: list[nn.Parameter] = []
        for parameter in self.parameters():
            is_matrix = parameter.ndim >= 2 and parameter is not self.embedding.weight
            (decayed if is_matrix else free).append(parameter)
        return [{"params": decayed, "weight_decay": weight_decay}, {"params": free, "weight_decay": 0.0}]
