"""Which keys a query sees, in tiles of 128 queries by 128 keys counted from the start of a document."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

TILE = 128
BLOCK = 32


def padded_length(length: int) -> int:
    """Length rounded up to whole blocks of 32; a document shorter than a block is one block of its own length."""
    return length if length <= BLOCK else (length + BLOCK - 1) // BLOCK * BLOCK


@dataclass(frozen=True)
class Run:
    """Consecutive tiles [start, stop) along keys (or queries) that are processed together.

    Attributes:
        start, stop: multiples of 128 from the document's start, but for the padded end of the document.
        visible: bool [rows, columns] of one tile at the edge of the mask, None where every pair is visible.
        diagonal: whether some row's later keys are masked inside (a scale group may hold invisible later keys).
    """

    start: int
    stop: int
    visible: Tensor | None
    diagonal: bool

    @property
    def tiles(self) -> int:
        return max(1, (self.stop - self.start) // TILE)


@dataclass(frozen=True)
class Geometry:
    """Mask of one document: query i sees keys i + shift - left ... i + shift + right, shift = len_k - len_q.

    Attributes:
        len_q, len_k: tokens.
        left, right: window in keys on either side of the bottom-right aligned diagonal; None is unbounded.
    """

    len_q: int
    len_k: int
    left: int | None
    right: int | None

    @property
    def shift(self) -> int:
        return self.len_k - self.len_q

    def last_key(self, query: int) -> int:
        """Last visible key of a query, -1 or less where it sees none to its left."""
        last = self.len_k - 1
        return last if self.right is None else min(last, query + self.shift + self.right)

    def first_key(self, query: int) -> int:
        return 0 if self.left is None else max(0, query + self.shift - self.left)

    def visible(self, q0: int, q1: int, k0: int, k1: int, device: torch.device) -> Tensor | None:
        """bool [q1 - q0, k1 - k0], or None where all pairs are visible."""
        full = q1 <= self.len_q and k1 <= self.len_k
        full = full and k1 - 1 <= self.last_key(q0) and k0 >= self.first_key(q1 - 1)
        if full:
            return None
        i = torch.arange(q0, q1, device=device).view(-1, 1)
        j = torch.arange(k0, k1, device=device).view(1, -1)
        see = (i < self.len_q) & (j < self.len_k)
        if self.right is not None:
            see &= j <= i + self.shift + self.right
        if self.left is not None:
            see &= j >= i + self.shift - self.left
        return see

    def _diagonal(self, q0: int, k1: int) -> bool:
        return self.right is not None and min(k1, self.len_k) - 1 > q0 + self.shift + self.right

    def key_runs(self, q0: int, q1: int, most: int, device: torch.device) -> Iterator[Run]:
        """Tiles of keys that queries [q0, q1) see, ascending; unmasked neighbours joined up to ``most`` tiles."""
        first, last = self.first_key(q0), self.last_key(min(q1, self.len_q) - 1)
        if last < first:
            return
        end = padded_length(self.len_k)
        edges = [(k, min(k + TILE, end)) for k in range(first // TILE * TILE, last + 1, TILE)]
        masks = [self.visible(q0, q1, k0, k1, device) for k0, k1 in edges]
        flags = [self._diagonal(q0, k1) for _, k1 in edges]
        yield from _join(edges, masks, flags, most)

    def query_runs(self, k0: int, k1: int, most: int, device: torch.device, *, around: bool = False) -> Iterator[Run]:
        """Tiles of queries that see keys [k0, k1), ascending; unmasked neighbours joined up to ``most`` tiles.

        around: begin with query tile n of m for key tile n modulo m and go around; all keys must see all queries.
        """
        last_real = min(k1, self.len_k) - 1
        first = 0 if self.right is None else max(0, k0 - self.shift - self.right)
        last = self.len_q - 1 if self.left is None else min(self.len_q - 1, last_real - self.shift + self.left)
        if last < first:
            return
        end = padded_length(self.len_q)
        edges = [(q, min(q + TILE, end)) for q in range(first // TILE * TILE, last + 1, TILE)]
        masks = [self.visible(q0, q1, k0, k1, device) for q0, q1 in edges]
        flags = [self._diagonal(q0, k1) for q0, _ in edges]
        n = k0 // TILE % len(edges) if around else 0
        edges, masks, flags = edges[n:] + edges[:n], masks[n:] + masks[:n], flags[n:] + flags[:n]
        yield from _join(edges, masks, flags, most)


def _join(edges: list[tuple[int, int]], masks: list[Tensor | None], flags: list[bool], most: int) -> Iterator[Run]:
    i = 0
    while i < len(edges):
        j = i + 1
        if masks[i] is None and edges[i][1] - edges[i][0] == TILE:
            while (
                j < len(edges)
                and j - i < most
                and masks[j] is None
                and edges[j][0] == edges[j - 1][1]
                and flags[j] == flags[i]
                and edges[j][1] - edges[j][0] == TILE
            ):
                j += 1
        yield Run(edges[i][0], edges[j - 1][1], masks[i], flags[i])
        i = j
