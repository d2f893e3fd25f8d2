"""Packed rows to time: how long their documents are."""

from __future__ import annotations

import math
import random

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
