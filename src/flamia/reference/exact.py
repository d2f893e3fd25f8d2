"""Exact softmax attention in plain PyTorch, the yardstick of every accuracy figure.

The products, the softmax and the gradients are evaluated in one precision (FP64 unless asked otherwise) by
the textbook formulas, with s_ij = softmax_scale * q_i.k_j over the keys that query i sees:

    lse_i = ln sum_j exp(s_ij)     P_ij = exp(s_ij - lse_i)     o_i = sum_j P_ij v_j
    dP_ij = do_i.v_j               dS_ij = P_ij (dP_ij - do_i.o_i + dlse_i)
    dq_i = softmax_scale sum_j dS_ij k_j     dk_j = softmax_scale sum_i dS_ij q_i     dv_j = sum_i P_ij do_i

Only a tile of query rows is held at a time, so memory grows with the tokens and not with their square. A
row's keys are processed in one piece: nothing is rescaled, and a row never depends on a key it does not see.

Rows that see no key have o = 0, lse = -inf and zero gradients.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["exact_attention", "exact_attention_backward"]

_TILE_ROWS = 128
_TILE_ELEMENTS = 1 << 22  # scores held at once: 32 MiB in FP64


def exact_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    *,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int | None, int | None] = (-1, -1),
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor]:
    """Exact attention of a batch or of packed documents; differentiable in q, k, v through both results.

    Args:
        q: `[B, Sq, Hq, D]`, or packed `[T, Hq, D]`; any floating dtype.
        k, v: `[B, Sk, Hkv, D]`, or packed `[Tk, Hkv, D]`; Hkv divides Hq.
        cu_seqlens_q: `[documents + 1]` offsets of the packed documents' queries; required for packed tensors.
        cu_seqlens_k: the same for keys; the queries' offsets when left out.
        softmax_scale: factor of q.k; 1/sqrt(D) when left out.
        causal: query i sees keys j <= i + Sk - Sq (aligned at the bottom right).
        window_size: (left, right) keys seen on either side of that position; -1 or None for no limit.
        dtype: precision of the whole evaluation and of the results.

    Returns:
        o, shaped as q, and lse (natural logarithm) `[B, Hq, Sq]`, or `[Hq, T]` if packed, both of `dtype`.

    Raises:
        ValueError: shapes that do not fit together, or offsets that do not ascend from 0 within the buffers.
    """
    call = _Call.check(q, k, v, cu_seqlens_q, cu_seqlens_k, softmax_scale, causal, window_size, dtype)
    if torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v)):
        o, lse = _Exact.apply(q, k, v, call)
        return o, lse
    return _forward(q, k, v, call)


def exact_attention_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    do: Tensor,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    *,
    dlse: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int | None, int | None] = (-1, -1),
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of :func:`exact_attention` in `dtype`: dq, dk, dv, shaped as q, k, v.

    `do` is shaped as q, and the optional `dlse`, the gradient with respect to lse, as the forward's lse. The
    other arguments and the errors are those of :func:`exact_attention`.
    """
    call = _Call.check(q, k, v, cu_seqlens_q, cu_seqlens_k, softmax_scale, causal, window_size, dtype)
    if do.shape != q.shape:
        raise ValueError(f"do has shape {tuple(do.shape)}; it must have q's, {tuple(q.shape)}")
    return _backward(q, k, v, do, dlse, call)


@dataclass(frozen=True)
class _Call:
    """What one call computes: its documents as offsets into the flattened tokens, its mask, its precision."""

    documents: tuple[tuple[int, int, int, int], ...]  # query start and end, key start and end
    scale: float
    left: int  # keys seen before a query's own position; -1 for all
    right: int  # and after it
    dtype: torch.dtype

    @staticmethod
    def check(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_q: Tensor | None,
        cu_k: Tensor | None,
        softmax_scale: float | None,
        causal: bool,
        window_size: tuple[int | None, int | None],
        dtype: torch.dtype,
    ) -> _Call:
        if q.dim() not in (3, 4) or k.dim() != q.dim() or k.shape != v.shape:
            shapes = ", ".join(str(tuple(x.shape)) for x in (q, k, v))
            raise ValueError(f"q, k, v have shapes {shapes}; allowed are [B, S, H, D] or packed [T, H, D], k like v")
        if q.shape[-1] != k.shape[-1] or q.shape[-2] % max(k.shape[-2], 1):
            raise ValueError(
                f"q has {q.shape[-2]} heads of {q.shape[-1]}, k has {k.shape[-2]} of {k.shape[-1]}; "
                "the head dims must agree and the key heads divide the query heads"
            )
        if q.dim() == 4:
            if cu_q is not None or cu_k is not None:
                raise ValueError("cu_seqlens_q and cu_seqlens_k are for packed [T, H, D]; q has 4 dims")
            batch, len_q, len_k = q.shape[0], q.shape[1], k.shape[1]
            if k.shape[0] != batch:
                raise ValueError(f"q has batch {batch} and k has batch {k.shape[0]}; they must agree")
            documents = tuple((b * len_q, (b + 1) * len_q, b * len_k, (b + 1) * len_k) for b in range(batch))
        else:
            if cu_q is None:
                raise ValueError("cu_seqlens_q is missing; packed [T, H, D] tensors need it")
            offsets_q = _offsets("cu_seqlens_q", cu_q, q.shape[0])
            offsets_k = _offsets("cu_seqlens_k", cu_q if cu_k is None else cu_k, k.shape[0])
            if len(offsets_q) != len(offsets_k):
                raise ValueError(
                    f"cu_seqlens_k has {len(offsets_k)} entries and cu_seqlens_q {len(offsets_q)}; they must agree"
                )
            documents = tuple(zip(offsets_q[:-1], offsets_q[1:], offsets_k[:-1], offsets_k[1:], strict=True))
        left, right = (-1 if w is None else int(w) for w in window_size)
        if causal:
            right = 0 if right < 0 else min(right, 0)
        scale = 1 / math.sqrt(q.shape[-1]) if softmax_scale is None else float(softmax_scale)
        return _Call(documents, scale, left, right, dtype)

    def tiles(self, groups: int) -> Iterator[_Tile]:
        """Pieces of query rows, each with the one range of keys that its rows see between them."""
        for q0, q1, k0, k1 in self.documents:
            shift = (k1 - k0) - (q1 - q0)
            rows = max(1, min(_TILE_ROWS, _TILE_ELEMENTS // max(1, groups * (k1 - k0))))
            for r0 in range(0, q1 - q0, rows):
                r1 = min(r0 + rows, q1 - q0)
                lo = 0 if self.left < 0 else max(0, r0 + shift - self.left)
                hi = k1 - k0 if self.right < 0 else min(k1 - k0, r1 + shift + self.right)
                if hi > lo:  # otherwise none of these rows sees a key
                    yield _Tile(q0 + r0, q0 + r1, k0 + lo, k0 + hi, r0 + shift - lo)

    def hidden(self, tile: _Tile, device: torch.device) -> Tensor | None:
        """`[rows, keys]`, true where a query does not see a key; None where it sees them all."""
        if self.left < 0 and self.right < 0:
            return None
        position = torch.arange(tile.q1 - tile.q0, device=device)[:, None] + tile.shift
        key = torch.arange(tile.k1 - tile.k0, device=device)[None, :]
        hidden = torch.zeros(position.shape[0], key.shape[1], dtype=torch.bool, device=device)
        if self.left >= 0:
            hidden |= key < position - self.left
        if self.right >= 0:
            hidden |= key > position + self.right
        return hidden


@dataclass(frozen=True)
class _Tile:
    q0: int
    q1: int
    k0: int
    k1: int
    shift: int  # position of the tile's first query among the tile's keys


def _offsets(name: str, cu: Tensor, tokens: int) -> list[int]:
    offsets = [int(x) for x in cu.tolist()] if cu.dim() == 1 else []
    if len(offsets) < 1 or offsets[0] != 0 or offsets[-1] > tokens:
        raise ValueError(f"{name} must be 1-d offsets from 0 to at most {tokens}, the tokens; it is {cu}")
    if any(b < a for a, b in itertools.pairwise(offsets)):
        raise ValueError(f"{name} must not decrease; it is {offsets}")
    return offsets


class _Heads:
    """Operands as [Hkv, keys, D], q-like ones as [Hkv, G * rows, D], in one precision."""

    def __init__(self, q: Tensor, k: Tensor, dtype: torch.dtype) -> None:
        self.kv, self.groups = k.shape[-2], q.shape[-2] // k.shape[-2]
        self.dim, self.dtype = q.shape[-1], dtype

    def flat(self, x: Tensor) -> Tensor:
        return x.detach().reshape(-1, x.shape[-2], x.shape[-1])

    def rows(self, x_THD: Tensor, tile: _Tile) -> Tensor:
        x = x_THD[tile.q0 : tile.q1].to(self.dtype).unflatten(1, (self.kv, self.groups))
        return x.permute(1, 2, 0, 3).reshape(self.kv, -1, self.dim)

    def keys(self, x_THD: Tensor, tile: _Tile) -> Tensor:
        return x_THD[tile.k0 : tile.k1].to(self.dtype).transpose(0, 1)

    def back(self, x: Tensor) -> Tensor:
        """[Hkv, G * rows, D] back to [rows, Hq, D]."""
        return x.unflatten(1, (self.groups, -1)).permute(2, 0, 1, 3).flatten(1, 2)

    def weights(self, q_rows: Tensor, k_keys: Tensor, call: _Call, tile: _Tile) -> tuple[Tensor, Tensor]:
        """P [Hkv, G * rows, keys] and lse [Hkv, G * rows]; P = 0 exactly where a key is hidden."""
        s = q_rows @ k_keys.transpose(1, 2) * call.scale
        hidden = call.hidden(tile, s.device)
        if hidden is not None:
            s.unflatten(1, (self.groups, -1)).masked_fill_(hidden, -math.inf)
        m = s.amax(-1, keepdim=True)
        m = m.masked_fill(m == -math.inf, 0)  # rows without a key: exp(-inf - 0) = 0 instead of NaN
        p = s.sub_(m).exp_()
        total = p.sum(-1, keepdim=True)
        p /= total.masked_fill(total == 0, 1)
        return p, (m + total.log()).squeeze(-1)


def _forward(q: Tensor, k: Tensor, v: Tensor, call: _Call) -> tuple[Tensor, Tensor]:
    heads = _Heads(q, k, call.dtype)
    q_THD, k_THD, v_THD = heads.flat(q), heads.flat(k), heads.flat(v)
    o = torch.zeros(q_THD.shape, dtype=call.dtype, device=q.device)
    lse = torch.full(q_THD.shape[:2], -math.inf, dtype=call.dtype, device=q.device)
    for tile in call.tiles(q.shape[-2]):
        p, lse_rows = heads.weights(heads.rows(q_THD, tile), heads.keys(k_THD, tile), call, tile)
        o[tile.q0 : tile.q1] = heads.back(p @ heads.keys(v_THD, tile))
        lse[tile.q0 : tile.q1] = heads.back(lse_rows[..., None])[..., 0]
    if q.dim() == 4:
        return o.view(q.shape), lse.view(q.shape[:3]).transpose(1, 2).contiguous()
    return o, lse.t().contiguous()


def _backward(
    q: Tensor, k: Tensor, v: Tensor, do: Tensor | None, dlse: Tensor | None, call: _Call
) -> tuple[Tensor, Tensor, Tensor]:
    heads = _Heads(q, k, call.dtype)
    q_THD, k_THD, v_THD = heads.flat(q), heads.flat(k), heads.flat(v)
    do_THD = torch.zeros_like(q_THD) if do is None else heads.flat(do)
    dlse_TH1 = None if dlse is None else dlse.detach().transpose(-1, -2).reshape(-1, q.shape[-2], 1)
    dq, dk, dv = (torch.zeros(x.shape, dtype=call.dtype, device=x.device) for x in (q_THD, k_THD, v_THD))
    for tile in call.tiles(q.shape[-2]):
        q_rows, do_rows = heads.rows(q_THD, tile), heads.rows(do_THD, tile)
        k_keys, v_keys = heads.keys(k_THD, tile), heads.keys(v_THD, tile)
        p, lse_rows = heads.weights(q_rows, k_keys, call, tile)
        dp = do_rows @ v_keys.transpose(1, 2)
        shift = (do_rows * (p @ v_keys)).sum(-1, keepdim=True)
        if dlse_TH1 is not None:
            rows = dlse_TH1[tile.q0 : tile.q1].to(call.dtype).unflatten(1, (heads.kv, heads.groups))
            shift = shift - rows.permute(1, 2, 0, 3).reshape(shift.shape)
        # A row without a key has lse = -inf, whose gradient means nothing: P = 0 must win over a NaN in it.
        shift = shift.masked_fill(lse_rows[..., None] == -math.inf, 0)
        ds = dp.sub_(shift).mul_(p)
        dq[tile.q0 : tile.q1] = heads.back(ds @ k_keys) * call.scale
        dk[tile.k0 : tile.k1] += (ds.transpose(1, 2) @ q_rows).transpose(0, 1) * call.scale
        dv[tile.k0 : tile.k1] += (p.transpose(1, 2) @ do_rows).transpose(0, 1)
    return dq.view(q.shape), dk.view(k.shape), dv.view(v.shape)


class _Exact(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor, call: _Call):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(q, k, v)
        ctx.call = call
        ctx.set_materialize_grads(False)
        return _forward(q, k, v, call)

    @staticmethod
    def backward(ctx, do: Tensor | None, dlse: Tensor | None):  # type: ignore[no-untyped-def]
        q, k, v = ctx.saved_tensors
        grads = _backward(q, k, v, do, dlse, ctx.call)
        return *(g.to(x.dtype) for g, x in zip(grads, (q, k, v), strict=True)), None
