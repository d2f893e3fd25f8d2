"""What quantized tensors look like in memory. T tokens, N heads, D head dimension, C column capacity.

A row payload ``[T, N, D]`` keeps the layout of the input and is contracted along D. A column payload ``[N, D, C]`` has
tokens contiguous and is contracted along tokens; each document starts at a multiple of 32 tokens there
(``documents.column_starts``) and its padding is zero codes, so that groups of tokens never straddle documents and every
tile starts on a 16-byte boundary, in 4 bits too. Scale tables are token-contiguous, one entry per token.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from flamia.documents import column_capacity
from flamia.recipe import Recipe


def _mma_order() -> list[int]:
    # Position 4t + {0,1,2,3} (+16) of an FP8 register operand holds what an FP32 accumulator fragment gives thread t:
    # tokens 2t, 2t+1, 8+2t, 8+2t+1 (+16).
    order = [0] * 32
    for half in (0, 16):
        for t in range(4):
            for i, token in enumerate((2 * t, 2 * t + 1, 8 + 2 * t, 8 + 2 * t + 1)):
                order[half + 4 * t + i] = half + token
    return order


def _pair_order() -> list[int]:
    # 16-bit pairs of tokens g and g + 8, as a transposing matrix store writes them: position 2g + b holds g + 8b.
    return [16 * h + g + 8 * b for h in (0, 1) for g in range(8) for b in (0, 1)]


# Position within 32 consecutive tokens -> token stored there.
COLUMN_ORDERS: dict[str, list[int]] = {
    "natural": list(range(32)),
    "mma": _mma_order(),
    "pairs": _pair_order(),
}


@dataclass
class E4M3Payload:
    """E4M3 codes with a power-of-two scale per token (equal over 32 tokens of a document, or of its own).

    Attributes:
        codes: uint8 [T, N, D].
        exponents: UE8M0 uint8 [N, T].
        columns: the same codes, uint8 [N, D, C], in one of ``COLUMN_ORDERS``, where the backend contracts along tokens
            and cannot transpose; else empty.
    """

    codes: Tensor
    exponents: Tensor
    columns: Tensor


@dataclass
class NVFP4Rows:
    """E2M1 codes with a UE4M3 scale per 16 elements of the head dimension.

    Attributes:
        codes: uint8 [T, N, D/2], two codes a byte, even element low.
        scales: UE4M3 uint8 [T, N, D/16].
        exponents: UE8M0 uint8 [N, T], a second power-of-two level per token for tensors whose magnitude may lie
            outside of UE4M3's range (gradients); empty where there is none.
    """

    codes: Tensor
    scales: Tensor
    exponents: Tensor


@dataclass
class NVFP4Columns:
    """E2M1 codes with a UE4M3 scale per 16 consecutive tokens of a document and channel.

    Attributes:
        codes: uint8 [N, D, C/2], two tokens a byte.
        scales: UE4M3 uint8 [N, D, C/16].
        exponents: UE8M0 uint8 [N, documents], a second power-of-two level per document for gradients; else empty.
    """

    codes: Tensor
    scales: Tensor
    exponents: Tensor


@dataclass
class E2M1Tokens:
    """E2M1 codes with one power-of-two scale per token: the per-key form used on diagonal tiles (paper 3.2).

    Attributes:
        codes: uint8 [T, N, D/2]; exponents: UE8M0 uint8 [N, T].
    """

    codes: Tensor
    exponents: Tensor


@dataclass
class GroupedPayload:
    """Ablation: E4M3 codes quantized once per contraction axis, with a UE8M0 scale per 32 elements along it.

    Attributes:
        codes: uint8 [T, N, D]; scales: UE8M0 uint8 [T, N, D/32].
        columns: uint8 [N, D, C]; column_scales: UE8M0 uint8 [N, D, C/32].
    """

    codes: Tensor
    scales: Tensor
    columns: Tensor
    column_scales: Tensor


@dataclass
class TensorPayload:
    """Ablation: E4M3 codes uint8 [T, N, D] and one FP32 scale [1] for the whole tensor."""

    codes: Tensor
    scale: Tensor


Payload = E4M3Payload | NVFP4Rows | NVFP4Columns | E2M1Tokens | GroupedPayload | TensorPayload


@dataclass(frozen=True)
class Spec:
    """One payload to make: its class, the tensor it comes from, and how.

    Attributes:
        name: key in ``Payloads.items``.
        kind: payload class.
        source: "q", "k", "v" or "do".
        columns: order of the column payload of an ``E4M3Payload``, or None for no such payload.
        second_level: whether NVFP4 payloads carry a second, power-of-two level.
    """

    name: str
    kind: type
    source: str
    columns: str | None = None
    second_level: bool = False


def forward_specs(recipe: Recipe, training: bool, columns: bool = False) -> tuple[Spec, ...]:
    """Payloads of q, k and v. ``training`` adds what only the backward reads; ``columns`` the transposed E4M3 codes."""
    eight = {"block": E4M3Payload, "groups": GroupedPayload, "tensor": TensorPayload}[recipe.operand_scale]

    def order(value: str) -> str | None:
        return value if columns and eight is E4M3Payload else None

    if recipe.format == "fp4":
        specs = [Spec("q", NVFP4Rows, "q"), Spec("k", NVFP4Rows, "k"), Spec("v_columns", NVFP4Columns, "v")]
        specs += [Spec("v_tokens", E2M1Tokens, "v")]
        if training:
            specs += [
                Spec("v", NVFP4Rows, "v"),
                Spec("k_columns", NVFP4Columns, "k"),
                Spec("k_tokens", E2M1Tokens, "k"),
            ]
            specs += [Spec("q_columns", NVFP4Columns, "q")]
        return tuple(specs)
    v = Spec("v", eight, "v", order("mma"))
    if recipe.format == "nvfp4":
        specs = [Spec("q", NVFP4Rows, "q"), Spec("k", NVFP4Rows, "k"), v]
        if training:
            specs += [Spec("q8", eight, "q", order("mma")), Spec("k8", eight, "k", order("pairs"))]
        return tuple(specs)
    q = Spec("q", eight, "q", order("mma") if training else None)
    k = Spec("k", eight, "k", order("pairs") if training else None)
    return (q, k, v)


def backward_specs(recipe: Recipe, columns: bool = False) -> tuple[Spec, ...]:
    """Payloads of do (of do * 2^(row reference - lse) in the folded variant)."""
    if recipe.format == "fp4":
        return (Spec("do", NVFP4Rows, "do", None, True), Spec("do_columns", NVFP4Columns, "do", None, True))
    eight = {"block": E4M3Payload, "groups": GroupedPayload, "tensor": TensorPayload}[recipe.operand_scale]
    return (Spec("do", eight, "do", "mma" if columns and eight is E4M3Payload else None),)


@dataclass
class Payloads:
    """Payloads by name, and the per-token maxima that size the dQ accumulator.

    Attributes:
        items: name -> payload, in the order of the specs.
        k_amax, v_amax: max over D of |k| (after offset and rotation) and |v| per token, FP32 [kv heads, T]; empty where
            no backward reads them (``Plan.reads_token_maxima``).
    """

    items: dict[str, Payload]
    k_amax: Tensor
    v_amax: Tensor

    def __getitem__(self, name: str) -> Payload:
        return self.items[name]

    def flatten(self) -> list[Tensor]:
        """All tensors in a fixed order, for custom operators and ``save_for_backward``."""
        tensors = [self.k_amax, self.v_amax]
        for payload in self.items.values():
            tensors += [getattr(payload, f.name) for f in dataclasses.fields(payload)]
        return tensors

    @classmethod
    def unflatten(cls, specs: Sequence[Spec], tensors: Sequence[Tensor]) -> Payloads:
        """Inverse of ``flatten`` for payloads made from these specs."""
        rest = list(tensors[2:])
        items: dict[str, Payload] = {}
        for spec in specs:
            count = len(dataclasses.fields(spec.kind))
            items[spec.name] = spec.kind(*rest[:count])
            rest = rest[count:]
        if rest:
            raise ValueError(f"{len(rest)} tensors too many for payloads {[s.name for s in specs]}")
        return cls(items, tensors[0], tensors[1])


def empty_payloads(
    specs: Sequence[Spec], q: Tensor, k: Tensor, documents: int, *, token_maxima: bool = True
) -> list[Tensor]:
    """Uninitialised tensors as ``Payloads.flatten`` returns them for training, for packed q and k and their devices.

    token_maxima: whether the tables of maxima per token are made.
    """

    def new(*shape: int, dtype: torch.dtype = torch.uint8) -> Tensor:
        return q.new_empty(shape, dtype=dtype)

    table = (k.shape[1], k.shape[0]) if token_maxima else (0,)
    tensors = [new(*table, dtype=torch.float32) for _ in range(2)]
    for spec in specs:
        t, n, d = (q if spec.source in ("q", "do") else k).shape
        c = column_capacity(t, documents)
        if spec.kind is E4M3Payload:
            columns = new(n, d, c) if spec.columns else new(0)
            tensors += [new(t, n, d), new(n, t), columns]
        elif spec.kind is NVFP4Rows:
            tensors += [new(t, n, d // 2), new(t, n, d // 16), new(n, t) if spec.second_level else new(0)]
        elif spec.kind is NVFP4Columns:
            exponents = new(n, documents) if spec.second_level else new(0)
            tensors += [new(n, d, c // 2), new(n, d, c // 16), exponents]
        elif spec.kind is E2M1Tokens:
            tensors += [new(t, n, d // 2), new(n, t)]
        elif spec.kind is GroupedPayload:
            tensors += [new(t, n, d), new(t, n, d // 32), new(n, d, c), new(n, d, c // 32)]
        else:
            tensors += [new(t, n, d), new(1, dtype=torch.float32)]
    return tensors


def column_order(name: str, device: torch.device) -> Tensor:
    """``COLUMN_ORDERS[name]`` as an int64 index tensor [32]."""
    return torch.tensor(COLUMN_ORDERS[name], dtype=torch.int64, device=device)
