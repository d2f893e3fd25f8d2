"""Documents of equal lengths and a few heads at a time, as dense FP64 operands.

FP64 holds every product of the formats exactly, and sums of up to 256 of them: a product of the reference is the exact
sum rounded once to FP32, so it does not depend on a library's order of additions, on batch sizes or on the machine.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from flamia import formats
from flamia.documents import Documents, Group, column_starts
from flamia.quantize.payloads import (
    E2M1Tokens,
    E4M3Payload,
    GroupedPayload,
    NVFP4Columns,
    Payload,
)
from flamia.quantize.reference import dequantize
from flamia.reference.geometry import Geometry, padded_length

_ELEMENTS = 1 << 22  # operand elements per chunk: a few dozen MB of FP64 per operand


@dataclass(frozen=True)
class Chunk:
    """N = documents x kv heads x (query heads per kv head) problems of one shape.

    Attributes:
        group: the documents.
        column_q, column_k: their first tokens in column payloads.
        heads: kv heads [start, stop).
        ratio: query heads per kv head.
        geometry: the mask that they share.
    """

    group: Group
    column_q: tuple[int, ...]
    column_k: tuple[int, ...]
    heads: tuple[int, int]
    ratio: int
    geometry: Geometry
    device: torch.device

    @property
    def count(self) -> int:
        return len(self.group.index) * (self.heads[1] - self.heads[0]) * self.ratio

    def length(self, side: str) -> int:
        return self.group.len_q if side == "q" else self.group.len_k

    def _index(self, side: str) -> Tensor:
        starts = self.group.starts_q if side == "q" else self.group.starts_k
        first = torch.tensor(starts, dtype=torch.int64, device=self.device)
        return first.view(-1, 1) + torch.arange(self.length(side), device=self.device)

    def _head_slice(self, per_query_head: bool) -> slice:
        scale = self.ratio if per_query_head else 1
        return slice(self.heads[0] * scale, self.heads[1] * scale)

    def gather(self, x: Tensor, side: str, per_query_head: bool | None = None) -> Tensor:
        """[T, heads, ...] -> [N, L, ...]; kv heads are repeated for the query heads that share them."""
        per_query_head = side == "q" if per_query_head is None else per_query_head
        y = x[:, self._head_slice(per_query_head)][self._index(side)].transpose(1, 2)  # [G, heads, L, ...]
        if not per_query_head:
            y = y.repeat_interleave(self.ratio, 1)
        y = y.flatten(0, 1)
        extra = padded_length(self.length(side)) - self.length(side)
        return pad(y, (0, 0) * (y.dim() - 2) + (0, extra)) if extra else y

    def table(self, x: Tensor, side: str, per_query_head: bool | None = None) -> Tensor:
        """[heads, T] -> [N, L]."""
        return self.gather(x.t(), side, per_query_head)

    def _columns(self, x: Tensor, side: str, per: int) -> Tensor:
        # [heads, D, C / per] -> [N, D, padded length to 32 / per]
        starts = self.column_q if side == "q" else self.column_k
        length = (self.length(side) + 31) // 32 * 32 // per
        first = torch.tensor(starts, dtype=torch.int64, device=self.device) // per
        index = first.view(-1, 1) + torch.arange(length, device=self.device)
        y = x[self._head_slice(side == "q")][:, :, index].permute(2, 0, 1, 3)  # [G, heads, D, n]
        if side == "k":
            y = y.repeat_interleave(self.ratio, 1)
        return y.flatten(0, 1)

    def documents(self, x: Tensor, side: str = "k") -> Tensor:
        """[heads, documents] -> [N]."""
        index = torch.tensor(self.group.index, dtype=torch.int64, device=self.device)
        y = x[self._head_slice(side == "q")][:, index].t()
        return (y if side == "q" else y.repeat_interleave(self.ratio, 1)).flatten()

    def head_values(self, payload: Payload, side: str) -> Tensor:
        """Values FP64 [N, L, D] of the copy that is contracted along the head dimension."""
        fields = {}
        for f in dataclasses.fields(payload):
            value = getattr(payload, f.name)
            if f.name == "exponents" and value.numel():
                value = self.table(value, side).t()
            elif value.dim() == 3 and "column" not in f.name:
                value = self.gather(value, side)
            fields[f.name] = value
        return dequantize(type(payload)(**fields)).to(torch.float64)

    def token_values(self, payload: Payload, side: str) -> Tensor:
        """Values FP64 [N, L, D] of the copy that is contracted along tokens."""
        length = padded_length(self.length(side))
        if isinstance(payload, NVFP4Columns):
            codes = formats.decode_e2m1(formats.unpack_nibbles(self._columns(payload.codes, side, 2)))
            scales = formats.decode_e4m3(self._columns(payload.scales, side, 16)).to(torch.float64)
            values = codes.to(torch.float64) * scales.repeat_interleave(16, -1)
            if payload.exponents.numel():
                values = _scaled(values, formats.decode_e8m0(self.documents(payload.exponents, side)).view(-1, 1, 1))
            return values.transpose(1, 2)[:, :length].contiguous()
        if isinstance(payload, GroupedPayload):
            e = formats.decode_e8m0(self._columns(payload.column_scales, side, 32)).repeat_interleave(32, -1)
            values = _scaled(formats.decode_e4m3(self._columns(payload.columns, side, 1)), e)
            return values.transpose(1, 2)[:, :length].contiguous()
        return self.head_values(payload, side)

    def code_values(self, payload: E4M3Payload, side: str) -> Tensor:
        """E4M3 codes as FP64 [N, L, D] without their scales."""
        return formats.decode_e4m3(self.gather(payload.codes, side)).to(torch.float64)

    def token_exponents(self, payload: E4M3Payload | E2M1Tokens, side: str) -> Tensor:
        """int32 [N, L]; padding gets the exponent of UE8M0 code 0."""
        return formats.decode_e8m0(self.table(payload.exponents, side))

    def scatter(self, out: Tensor, x: Tensor, side: str, per_query_head: bool | None = None) -> None:
        """Write [N, L, ...] (kv problems: [documents x kv heads, L, ...]) into [T, heads, ...]."""
        per_query_head = side == "q" if per_query_head is None else per_query_head
        y = x[:, : self.length(side)].unflatten(0, (len(self.group.index), -1)).transpose(1, 2)
        out[:, self._head_slice(per_query_head)].index_put_((self._index(side),), y.to(out.dtype))

    def scatter_table(self, out: Tensor, x: Tensor, side: str) -> None:
        """Write [N, L] into [query heads, T]."""
        self.scatter(out.t(), x, side, True)

    def sum_shared(self, x: Tensor) -> Tensor:
        """[N, L, D] -> [documents x kv heads, L, D]: FP32 sum over the query heads of a kv head, ascending."""
        parts = x.unflatten(0, (-1, self.ratio)).unbind(1)
        total = parts[0]
        for part in parts[1:]:
            total = total + part
        return total


def _scaled(values: Tensor, exponent: Tensor) -> Tensor:
    # Exact in FP64 for every pair of exponents; UE8M0's NaN makes everything NaN.
    scale = torch.ldexp(torch.ones_like(exponent, dtype=torch.float64), exponent)
    scale = torch.where(exponent == formats.NAN_EXPONENT, torch.nan, scale)
    return values.to(torch.float64) * scale


def chunks(
    documents: Documents, kv_heads: int, ratio: int, head_dim: int, left: int | None, right: int | None
) -> Iterator[Chunk]:
    """Every document with queries or keys, in pieces of bounded memory. Reads the offsets on the host."""
    column_q = column_starts(documents.cu_seqlens_q).tolist()
    column_k = column_starts(documents.cu_seqlens_k).tolist()
    device = documents.cu_seqlens_q.device
    for group in documents.groups():
        if group.len_q == 0 or group.len_k == 0:
            continue
        longest = max(group.len_q, group.len_k)
        problems = max(1, _ELEMENTS // (longest * head_dim))
        heads = max(1, min(kv_heads, problems // ratio))
        # Whole documents together only when all of their heads fit.
        together = max(1, problems // (ratio * kv_heads)) if heads == kv_heads else 1
        geometry = Geometry(group.len_q, group.len_k, left, right)
        for part in group.split(together):
            cols_q = tuple(column_q[i] for i in part.index)
            cols_k = tuple(column_k[i] for i in part.index)
            for h in range(0, kv_heads, heads):
                span = (h, min(kv_heads, h + heads))
                yield Chunk(part, cols_q, cols_k, span, ratio, geometry, device)
