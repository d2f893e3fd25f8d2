"""Packed rows: where documents start, how their tokens are padded in payloads, and which of them look alike."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

TOKEN_BLOCK = 32  # tokens that share an exponent, and the multiple documents are padded to in column payloads


@dataclass(frozen=True)
class Group:
    """Documents of one packed row with equal lengths, computed together by the reference.

    Attributes:
        index: positions of the documents in cu_seqlens, in order.
        starts_q, starts_k: their first query and key tokens in the packed buffers.
        len_q, len_k: their common lengths in tokens.
    """

    index: tuple[int, ...]
    starts_q: tuple[int, ...]
    starts_k: tuple[int, ...]
    len_q: int
    len_k: int

    def split(self, size: int) -> Iterator[Group]:
        """Groups of at most ``size`` documents, in order."""
        for i in range(0, len(self.index), size):
            s = slice(i, i + size)
            yield Group(self.index[s], self.starts_q[s], self.starts_k[s], self.len_q, self.len_k)


@dataclass(frozen=True)
class Documents:
    """Document boundaries of a packed row of queries and a packed row of keys.

    Attributes:
        cu_seqlens_q, cu_seqlens_k: int32 [documents + 1], first entry 0, non-decreasing, on the tensors' device.
        total_q, total_k: tokens in the buffers; those past the last offset belong to no document.
    """

    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    total_q: int
    total_k: int

    @property
    def count(self) -> int:
        return self.cu_seqlens_q.shape[0] - 1

    def host_offsets(self) -> tuple[list[int], list[int]]:
        """Offsets of queries and keys as Python integers, checked. Reads the device: for the reference only.

        Raises:
            ValueError: an offset list that does not start at 0, decreases, or passes the end of its buffer.
        """
        result = []
        for name, cu, total in (
            ("cu_seqlens_q", self.cu_seqlens_q, self.total_q),
            ("cu_seqlens_k", self.cu_seqlens_k, self.total_k),
        ):
            offsets = cu.tolist()
            if offsets[0] != 0:
                raise ValueError(f"{name}[0] is {offsets[0]}: offsets must start at 0")
            for i, (a, b) in enumerate(pairwise(offsets)):
                if b < a:
                    raise ValueError(f"{name}[{i + 1}] = {b} is below {name}[{i}] = {a}: offsets must not decrease")
            if offsets[-1] > total:
                raise ValueError(f"{name}[-1] is {offsets[-1]}, past the {total} tokens of its buffer")
            result.append(offsets)
        return result[0], result[1]

    def check_host(self, max_seqlen_q: int, max_seqlen_k: int) -> None:
        """Check offsets, and lengths against stated maxima (negative: not stated). Reads the device.

        Raises:
            ValueError: as ``host_offsets``, or a document longer than its stated maximum.
        """
        offsets = self.host_offsets()
        for side, cu, most in zip("qk", offsets, (max_seqlen_q, max_seqlen_k), strict=True):
            longest = max((b - a for a, b in pairwise(cu)), default=0)
            if 0 <= most < longest:
                raise ValueError(f"max_seqlen_{side}={most} is below the longest document, {longest} tokens")

    def groups(self) -> list[Group]:
        """Documents grouped by equal (query, key) lengths. Reads the device: for the reference only."""
        q, k = self.host_offsets()
        members: dict[tuple[int, int], list[int]] = {}
        for i in range(len(q) - 1):
            members.setdefault((q[i + 1] - q[i], k[i + 1] - k[i]), []).append(i)
        return [
            Group(tuple(ids), tuple(q[i] for i in ids), tuple(k[i] for i in ids), len_q, len_k)
            for (len_q, len_k), ids in members.items()
        ]


def column_capacity(total: int, documents: int) -> int:
    """Tokens of a column payload: room for every document padded to a multiple of 32, whatever the lengths."""
    return (total + (TOKEN_BLOCK - 1) * documents + TOKEN_BLOCK - 1) // TOKEN_BLOCK * TOKEN_BLOCK


def column_starts(cu_seqlens: Tensor) -> Tensor:
    """First token of each document in a column payload, int64 [documents + 1]: lengths padded to multiples of 32."""
    lengths = cu_seqlens.to(torch.int64).diff()
    padded = (lengths + TOKEN_BLOCK - 1) // TOKEN_BLOCK * TOKEN_BLOCK
    return torch.cat((padded.new_zeros(1), padded.cumsum(0)))
