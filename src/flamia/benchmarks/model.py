"""Tokens per second of whole training steps of a model on packed rows, through our attention and through others'."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from flamia.benchmarks import flash_attention
from flamia.benchmarks.timing import paired_eager_seconds, paired_seconds, peak_bytes
from flamia.benchmarks.workloads import Workload, offsets
from flamia.training import GPT, MODELS, Attend, ModelConfig, Row, get_attention, train_step

OURS = "flamia"
WORKLOADS = ("loguni-11-16k", "loguni-29-64k")  # rows of 16,384 and 65,536 tokens
CLIP, RATE = 1.0, 1e-5  # the rate is small, so that all steps see nearly the same weights
# Cosine of all gradients with those through torch's attention. BF16 activations alone give .999; attention in 8 bits
# adds its own few percent to a part of them.
LEAST_COSINE = 0.98


@dataclass(frozen=True)
class Measurement:
    """Training steps of one model through one attention.

    Attributes:
        model, parameters: name and size. workload, tokens, documents: the packed row of a step.
        name: of the attention. timing: "eager" or "graph".
        seconds: median time of a step: forward, backward, clipping, AdamW. tokens_per_s: at that time.
        cosine: of the first step's gradients with those through torch's attention in BF16.
        memory: bytes, the most that a step held beside weights and the optimiser's sums.
        speedup: median over rounds of the fastest peer's time over its own; None without one, and for peers.
        refused: why it did not run; seconds are 0 then.
    """

    model: str
    parameters: int
    workload: str
    tokens: int
    documents: int
    name: str
    timing: str
    seconds: float = 0.0
    tokens_per_s: float = 0.0
    cosine: float = 0.0
    memory: int = 0
    speedup: float | None = None
    refused: str | None = None


# ------------------------------------------------------------------------------------------------------- attentions


def torch_attention(lengths: tuple[int, ...]) -> Attend:
    """torch's attention, one call for each document: no padding, no mask, lengths known to the host."""

    def attend(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_seqlen: int) -> Tensor:
        results = []
        for tensors in zip(q.split(lengths), k.split(lengths), v.split(lengths), strict=True):
            a, b, c = (x.transpose(0, 1).unsqueeze(0) for x in tensors)
            results.append(F.scaled_dot_product_attention(a, b, c, is_causal=True)[0].transpose(0, 1))
        return torch.cat(results)

    return attend


def _flash_attention(lengths: tuple[int, ...]) -> Attend:
    attention = flash_attention.attention(True, max(lengths))
    return lambda q, k, v, cu_seqlens, max_seqlen: attention(q, k, v, cu_seqlens)


# Name: lengths of the documents -> attention.
PEERS: dict[str, Callable[[tuple[int, ...]], Attend]] = {"fa4-bf16": _flash_attention, "sdpa": torch_attention}


def _refuses(name: str, lengths: tuple[int, ...]) -> str | None:
    return flash_attention.missing(len(lengths)) if name == "fa4-bf16" else None


# ------------------------------------------------------------------------------------------------------------ steps


class Steps:
    """A model, its optimiser and one packed row of random tokens; BF16 autocast over FP32 weights."""

    def __init__(self, config: ModelConfig, workload: Workload, device: str, *, capturable: bool = False) -> None:
        generator = torch.Generator(device).manual_seed(0)
        with torch.device(device):
            self.model = GPT(config, generator)
        groups = self.model.parameter_groups(0.1)
        self.optimizer = torch.optim.AdamW(groups, lr=RATE, betas=(0.9, 0.95), fused=True, capturable=capturable)
        shape = (2, workload.tokens)
        tokens, targets = torch.randint(config.vocabulary, shape, generator=generator, device=device)
        self.row = Row(tokens, targets, offsets(list(workload.lengths), device))
        self.longest = max(workload.lengths)

    @property
    def parameters(self) -> int:
        return sum(p.numel() for p in self.model.parameters())

    def run(self, attend: Attend) -> tuple[Tensor, Tensor]:
        """One step: loss and gradient norm, on the device."""
        return train_step(self.model, self.optimizer, self.row, self.longest, attend, clip=CLIP, autocast=True)

    def gradients(self, attend: Attend) -> list[Tensor]:
        """Of every parameter, from a forward and a backward alone."""
        row = self.row
        with torch.autocast(row.tokens.device.type, dtype=torch.bfloat16):
            loss = self.model.loss(row.tokens, row.targets, row.cu_seqlens, self.longest, attend).mean()
        return list(torch.autograd.grad(loss, list(self.model.parameters())))


def cosine(a: list[Tensor], b: list[Tensor]) -> float:
    """Of two lists of tensors, each taken as one vector."""

    def dot(x: list[Tensor], y: list[Tensor]) -> float:
        return math.fsum((s.double() * t.double()).sum().item() for s, t in zip(x, y, strict=True))

    return dot(a, b) / math.sqrt(dot(a, a) * dot(b, b))


def _memory(call: Callable[[], object]) -> int:
    return peak_bytes(lambda: call, lambda made: made())[1]


def iterate(
    models: tuple[str, ...],
    workloads: tuple[Workload, ...],
    peers: tuple[str, ...] = tuple(PEERS),
    recipe: str = "mxfp8",
    rounds: int = 10,
    *,
    graphs: bool = False,
) -> Iterator[Measurement]:
    """Every model of ``flamia.training.MODELS`` that is named, on every row."""
    for name in models:
        for workload in workloads:
            yield from measure(name, MODELS[name], workload, peers, recipe, rounds, graphs=graphs)


def measure(
    name: str,
    config: ModelConfig,
    workload: Workload,
    peers: tuple[str, ...] = tuple(PEERS),
    recipe: str = "mxfp8",
    rounds: int = 10,
    *,
    graphs: bool = False,
    device: str = "cuda",
) -> Iterator[Measurement]:
    """Steps of one model on one row: gradients checked first, then steps timed in turns.

    Raises:
        RuntimeError: gradients through our attention are not those through torch's.
    """
    steps = Steps(config, workload, device, capturable=graphs)
    lengths = workload.lengths
    how = "graph" if graphs else "eager"
    shape = (name, steps.parameters, workload.name, workload.tokens, len(lengths))
    expected = steps.gradients(torch_attention(lengths))
    attends = {OURS: get_attention(recipe)}
    found = {OURS: cosine(steps.gradients(attends[OURS]), expected)}
    if not found[OURS] >= LEAST_COSINE:
        raise RuntimeError(f"gradients of {name} through {OURS} are wrong: cosine {found[OURS]:.4f} with torch's")
    for peer in peers:
        reason = _refuses(peer, lengths)
        if reason is None:
            try:
                attend = PEERS[peer](lengths)
                found[peer] = cosine(steps.gradients(attend), expected)
                if not found[peer] >= LEAST_COSINE:
                    raise RuntimeError(f"its gradients are wrong: cosine {found[peer]:.4f} with torch's")
                attends[peer] = attend
            except Exception as error:  # Whatever keeps another library from a shape is a finding, not the end.
                reason = f"{type(error).__name__}: {error}".splitlines()[0]
        if reason is not None:
            yield Measurement(*shape, peer, how, refused=reason)
    del expected
    calls: dict[str, Callable[[], object]] = {key: partial(steps.run, attend) for key, attend in attends.items()}
    memory = {key: _memory(call) for key, call in calls.items()}
    if graphs:
        # A step leaves nothing in a graph's memory that the next one needs.
        times = paired_seconds(calls, rounds, pool=torch.cuda.graph_pool_handle())
    else:
        times = paired_eager_seconds(calls, rounds)
    medians = {key: statistics.median(seconds) for key, seconds in times.items()}
    best = min((key for key in medians if key != OURS), key=medians.__getitem__, default=None)
    for key, seconds in medians.items():
        speedup = None
        if best is not None and key == OURS:
            speedup = statistics.median(a / b for a, b in zip(times[best], times[key], strict=True))
        rate = workload.tokens / seconds
        yield Measurement(*shape, key, how, seconds, rate, found[key], memory[key], speedup)
