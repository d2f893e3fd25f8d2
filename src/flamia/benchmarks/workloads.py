"""Packed rows and batches to time: how long their documents are."""

from __future__ import annotations

import json
import math
import random
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

PACKINGS = ("one", "web", "tiny")


def lengths(packing: str, tokens: int) -> list[int]:
    """Document lengths that add up to ``tokens``, the same at every call.

    "one": a single document. "web": a long-tailed mix around 290 tokens on average, as pages of text are (225
    documents in 65,536 tokens). "tiny": documents of one token.

    Raises:
        ValueError: unknown packing.
    """
    if packing == "one":
        return [tokens]
    if packing == "tiny":
        return [1] * tokens
    if packing != "web":
        raise ValueError(f"packing={packing!r} is unknown: it must be one of {', '.join(PACKINGS)}")
    count = max(1, round(tokens * 225 / 65536))
    generator = random.Random(count)
    weights = [math.exp(generator.gauss(0.0, 1.2)) for _ in range(count)]
    total = sum(weights)
    result = [max(1, int(tokens * w / total)) for w in weights]
    longest = result.index(max(result))
    result[longest] += tokens - sum(result)
    return result


def offsets(document_lengths: list[int], device: torch.device | str) -> Tensor:
    """int32 [documents + 1] on the device."""
    return torch.tensor([0, *document_lengths], dtype=torch.int64).cumsum(0).to(torch.int32).to(device)


@dataclass(frozen=True)
class Workload:
    """One shape of attention to time.

    Attributes:
        name: as `flamia bench` knows it.
        lengths: tokens of each document, queries and keys alike.
        heads_q, heads_kv, head_dim: of the tensors.
    """

    name: str
    lengths: tuple[int, ...]
    heads_q: int
    heads_kv: int
    head_dim: int

    @property
    def tokens(self) -> int:
        return sum(self.lengths)

    @property
    def is_batch(self) -> bool:
        """Whether documents are equally long, so that libraries without packed rows can run it."""
        return len(set(self.lengths)) == 1

    def flops(self, causal: bool) -> float:
        """Multiplications and additions of the two products; causal counts half of the square, the usual convention."""
        pairs = sum(n * n for n in self.lengths) / (2 if causal else 1)
        return 4.0 * self.head_dim * self.heads_q * pairs


def packed_workloads() -> tuple[Workload, ...]:
    """The nine packed rows of workloads.json."""
    rows = json.loads(Path(__file__).with_name("workloads.json").read_text(encoding="utf-8"))
    return tuple(
        Workload(row["name"], tuple(row["doc_lens"]), row["heads_q"], row["heads_kv"], row["head_dim"]) for row in rows
    )


def batched_workloads() -> tuple[Workload, ...]:
    """Batches of equally long sequences."""
    shapes = ((1, 16384, 16, 16), (4, 4096, 16, 4), (2, 8192, 64, 8))
    return tuple(
        Workload(f"batch-{batch}x{length // 1024}k-{q}h{kv}", (length,) * batch, q, kv, 128)
        for batch, length, q, kv in shapes
    )


def named_workloads(names: str) -> tuple[Workload, ...]:
    """Workloads by name, with commas; "packed", "batched" and "all" are groups.

    Raises:
        ValueError: unknown name.
    """
    groups = {"packed": packed_workloads(), "batched": batched_workloads()}
    groups["all"] = groups["packed"] + groups["batched"]
    every = {w.name: (w,) for w in groups["all"]} | groups
    chosen: dict[str, Workload] = {}
    for name in (word.strip() for word in names.split(",") if word.strip()):
        if name not in every:
            raise ValueError(f"workloads={name!r} is unknown: it must be one of {', '.join(every)}")
        chosen |= {w.name: w for w in every[name]}
    return tuple(chosen.values())
