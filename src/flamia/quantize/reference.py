"""Quantizers in plain PyTorch: the twins of the fused device quantizers. T tokens, N heads, D head dimension.

Every function takes a packed tensor and a ``TokenMap``; nothing here reads the device from the host, so the lengths may
change without a change of shape. Statistics never cross a document. Tokens past the last offset are never read and get
zero codes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from flamia import formats
from flamia.documents import TOKEN_BLOCK, column_capacity, column_starts
from flamia.quantize.payloads import (
    E2M1Tokens,
    E4M3Payload,
    GroupedPayload,
    NVFP4Columns,
    NVFP4Rows,
    Payload,
    Spec,
    TensorPayload,
    column_order,
)

NVFP4_GROUP = 16
# V's exponent joins the logit in the folded variant: the floor keeps a weight relative to the row reference below 2^64
# where all of a row's values are zero or tiny. Values up to 2^-74 become zero.
VALUE_MIN_EXPONENT = -64


@dataclass(frozen=True)
class TokenMap:
    """Where the tokens of a packed row go in the padded layout of column payloads.

    Attributes:
        position: int64 [T], place in the padded layout; tokens past the last offset point at ``capacity``.
        document: int64 [T], document of each token (clamped for tokens of none).
        valid: bool [T].
        capacity: padded length C, a multiple of 32 that depends on T and the number of documents only.
        documents: their number.
    """

    position: Tensor
    document: Tensor
    valid: Tensor
    capacity: int
    documents: int

    @classmethod
    def build(cls, cu_seqlens: Tensor, total: int) -> TokenMap:
        """From int32 offsets [documents + 1] of a buffer of ``total`` tokens."""
        documents = cu_seqlens.shape[0] - 1
        token = torch.arange(total, device=cu_seqlens.device)
        cu = cu_seqlens.to(torch.int64)
        document = (torch.searchsorted(cu, token, right=True) - 1).clamp(max=max(documents - 1, 0))
        valid = token < cu[-1]
        capacity = column_capacity(total, documents)
        position = torch.where(valid, column_starts(cu_seqlens)[document] + token - cu[document], capacity)
        return cls(position, document, valid, capacity, documents)

    def pad(self, x: Tensor) -> Tensor:
        """[T, ...] -> [C, ...] with zeros between documents."""
        out = x.new_zeros(self.capacity + 1, *x.shape[1:])
        out[self.position] = torch.where(self.valid.view(-1, *[1] * (x.dim() - 1)), x, 0)
        return out[: self.capacity]

    def unpad(self, y: Tensor) -> Tensor:
        """[C, ...] -> [T, ...]; zeros for tokens of no document."""
        extended = torch.cat((y, y.new_zeros(1, *y.shape[1:])))
        return extended[self.position]


def prepare(x: Tensor, tokens: TokenMap, *, rotate: bool = False, offset: Tensor | None = None) -> Tensor:
    """FP32 copy of x [T, N, D] with the offset [N, D] subtracted, rotated, and zeros outside of documents."""
    y = torch.where(tokens.valid.view(-1, 1, 1), x, 0).to(torch.float32)
    if offset is not None:
        y = torch.where(tokens.valid.view(-1, 1, 1), y - offset.to(torch.float32), 0.0)
    return formats.hadamard(y) if rotate else y


def token_amax(x: Tensor) -> Tensor:
    """max over D of |x| per token, FP32 [N, T], of a prepared tensor."""
    return x.abs().amax(-1).t().contiguous()


def token_blocks(
    x: Tensor,
    tokens: TokenMap,
    *,
    per_token: bool = False,
    columns: str | None = None,
    rounding: str = "up",
    least: int = formats.MIN_EXPONENT,
) -> E4M3Payload:
    """E4M3 codes with one exponent >= ``least`` per 32 tokens of a document x D, or per token (paper 3.1, A.3)."""
    # Codes are made per token and padded afterwards: with documents of one token the padded layout is 32 times longer.
    amax = x.abs().amax(-1)  # [T, N]
    if not per_token:
        block = tokens.position // TOKEN_BLOCK  # tokens of no document share one behind the last
        index = block.view(-1, 1).expand_as(amax)
        tops = amax.new_zeros(tokens.capacity // TOKEN_BLOCK + 1, amax.shape[1])
        amax = tops.scatter_reduce(0, index, amax, "amax")[block]
    exponent = formats.e8m0_exponent(amax, "e4m3", rounding).clamp(min=least)
    codes = formats.encode_e4m3(x * formats.pow2(-exponent).unsqueeze(-1))
    # A block with a NaN or an infinity says so by its exponent. Its codes are zeros: a tile of a tensor core may reach
    # into the next document, and 0 * NaN is NaN.
    finite = exponent != formats.NAN_EXPONENT
    codes = torch.where(tokens.valid.view(-1, 1, 1) & finite.unsqueeze(-1), codes, 0)
    table = torch.where(tokens.valid.view(-1, 1), formats.encode_e8m0(exponent), 0).t().contiguous()
    transposed = columns_of(codes, tokens, columns) if columns else codes.new_empty(0)
    return E4M3Payload(codes, table, transposed)


def columns_of(codes: Tensor, tokens: TokenMap, order: str) -> Tensor:
    """Columns of an ``E4M3Payload`` with these rows: [T, N, D] -> [N, D, C], the tokens of every 32 in ``order``."""
    padded = tokens.pad(codes)
    c, n, d = padded.shape
    blocks = padded.view(c // TOKEN_BLOCK, TOKEN_BLOCK, n, d)[:, column_order(order, codes.device)]
    return blocks.reshape(c, n, d).permute(1, 2, 0).contiguous()


def _nvfp4(groups: Tensor) -> tuple[Tensor, Tensor]:
    # [..., 16] -> E2M1 codes of the same shape, UE4M3 scale codes [...]
    scale = formats.nvfp4_scale(groups.abs().amax(-1))
    s = scale.unsqueeze(-1)
    values = torch.where(s == 0, 0.0, formats.round_e2m1(groups / torch.where(s == 0, 1.0, s)))
    return formats.encode_e2m1(values), formats.encode_e4m3(scale)


def nvfp4_rows(x: Tensor, second_level: bool = False) -> NVFP4Rows:
    """NVFP4 along D in groups of 16 of a prepared tensor; ``second_level`` adds one power of two per token."""
    exponents = torch.empty(0, dtype=torch.uint8, device=x.device)
    if second_level:
        e = formats.e8m0_exponent(x.abs().amax(-1), "nvfp4")
        x = x * formats.pow2(-e).unsqueeze(-1)
        exponents = formats.encode_e8m0(e).t().contiguous()
    codes, scales = _nvfp4(x.unflatten(-1, (-1, NVFP4_GROUP)))
    return NVFP4Rows(formats.pack_nibbles(codes.flatten(-2)), scales, exponents)


def nvfp4_columns(x: Tensor, tokens: TokenMap, second_level: bool = False) -> NVFP4Columns:
    """NVFP4 along tokens in groups of 16 per channel; ``second_level`` adds one power of two per document and head."""
    exponents = torch.empty(0, dtype=torch.uint8, device=x.device)
    if second_level:
        amax = x.new_zeros(max(tokens.documents, 1), x.shape[1])  # one even for no document: tokens index it
        index = tokens.document.view(-1, 1).expand(-1, x.shape[1])
        amax = amax.scatter_reduce(0, index, x.abs().amax(-1), "amax")
        e = formats.e8m0_exponent(amax, "nvfp4")
        x = x * formats.pow2(-e)[tokens.document].unsqueeze(-1)
        exponents = formats.encode_e8m0(e[: tokens.documents]).t().contiguous()
    padded = tokens.pad(x).permute(1, 2, 0).contiguous()  # [N, D, C]
    codes, scales = _nvfp4(padded.unflatten(-1, (-1, NVFP4_GROUP)))
    return NVFP4Columns(formats.pack_nibbles(codes.flatten(-2)), scales, exponents)


def e2m1_tokens(x: Tensor) -> E2M1Tokens:
    """E2M1 codes with one power of two per token and head of a prepared tensor (paper 3.2, the fold)."""
    exponent = formats.e8m0_exponent(x.abs().amax(-1), "e2m1")
    codes = formats.encode_e2m1(formats.round_e2m1(x * formats.pow2(-exponent).unsqueeze(-1)))
    return E2M1Tokens(formats.pack_nibbles(codes), formats.encode_e8m0(exponent).t().contiguous())


def _groups32(groups: Tensor, rounding: str) -> tuple[Tensor, Tensor]:
    exponent = formats.e8m0_exponent(groups.abs().amax(-1), "e4m3", rounding)
    return formats.encode_e4m3(groups * formats.pow2(-exponent).unsqueeze(-1)), formats.encode_e8m0(exponent)


def grouped(x: Tensor, tokens: TokenMap, rounding: str) -> GroupedPayload:
    """Ablation: 1x32 microscaling groups along D for one copy and along tokens for the other."""
    codes, scales = _groups32(x.unflatten(-1, (-1, 32)), rounding)
    columns, column_scales = _groups32(tokens.pad(x).permute(1, 2, 0).contiguous().unflatten(-1, (-1, 32)), rounding)
    return GroupedPayload(codes.flatten(-2), scales, columns.flatten(-2), column_scales)


def per_tensor(x: Tensor) -> TensorPayload:
    """Ablation: one FP32 scale, the maximum of the whole packed tensor over 448."""
    amax = x.abs().amax() if x.numel() else x.new_zeros(())
    scale = amax.view(1) / torch.full_like(amax, formats.E4M3_MAX)
    return TensorPayload(formats.encode_e4m3(torch.where(scale > 0, x / scale, x)), scale)


def make(spec: Spec, x: Tensor, tokens: TokenMap, *, per_token: bool, rounding: str) -> Payload:
    """The payload that ``spec`` asks for, from a prepared tensor."""
    if spec.kind is E4M3Payload:
        least = VALUE_MIN_EXPONENT if spec.source == "v" else formats.MIN_EXPONENT
        return token_blocks(x, tokens, per_token=per_token, columns=spec.columns, rounding=rounding, least=least)
    if spec.kind is NVFP4Rows:
        return nvfp4_rows(x, spec.second_level)
    if spec.kind is NVFP4Columns:
        return nvfp4_columns(x, tokens, spec.second_level)
    if spec.kind is E2M1Tokens:
        return e2m1_tokens(x)
    if spec.kind is GroupedPayload:
        return grouped(x, tokens, rounding)
    return per_tensor(x)


def make_all(
    specs: Sequence[Spec],
    sources: dict[str, Tensor],
    maps: dict[str, TokenMap],
    *,
    per_token: bool,
    rounding: str,
) -> dict[str, Payload]:
    """Every payload of ``specs`` from prepared tensors by source name."""
    return {s.name: make(s, sources[s.source], maps[s.source], per_token=per_token, rounding=rounding) for s in specs}


def dequantize(payload: Payload) -> Tensor:
    """Values FP32 [T, N, D] of a payload's copy along the head dimension.

    Raises:
        TypeError: for a payload without such a copy (``NVFP4Columns``).
    """
    if isinstance(payload, E4M3Payload):
        return formats.decode_e4m3(payload.codes) * _table(payload.exponents)
    if isinstance(payload, (NVFP4Rows, E2M1Tokens)):
        values = formats.decode_e2m1(formats.unpack_nibbles(payload.codes))
        if isinstance(payload, NVFP4Rows):
            values = values * formats.decode_e4m3(payload.scales).repeat_interleave(NVFP4_GROUP, -1)
        return values * _table(payload.exponents) if payload.exponents.numel() else values
    if isinstance(payload, GroupedPayload):
        scale = formats.pow2(formats.decode_e8m0(payload.scales)).repeat_interleave(32, -1)
        return formats.decode_e4m3(payload.codes) * scale
    if isinstance(payload, TensorPayload):
        return formats.decode_e4m3(payload.codes) * payload.scale
    raise TypeError(f"{type(payload).__name__} holds no copy along the head dimension")


def _table(exponents: Tensor) -> Tensor:
    # UE8M0 [N, T] -> FP32 [T, N, 1]
    return formats.pow2(formats.decode_e8m0(exponents)).t().unsqueeze(-1)
