"""Who lives where in tensor memory and in shared memory; both plans are checked when a kernel is compiled."""

from dataclasses import dataclass
from typing import Any

TILE = 128
COLUMNS = 512  # of tensor memory, 128 lanes of 32 bits each
SHARED_BYTES = 227 << 10  # what one CTA may have
SLACK = 2048  # barriers, single words, alignment


@dataclass(frozen=True)
class TensorMemory:
    """Columns of tensor memory. Addresses are columns: a CTA that holds all of them starts at zero.

    Scores of tile i are [0, 128) of its 128 columns. Once they are in registers, the upper half becomes the codes of
    the weights and the scale factors of the value product, while the lower half takes the next scores.
    """

    head_dim: int

    def __post_init__(self) -> None:
        spans = [(self.weights(0), 32), (self.weight_scales(0), 4), (self.value_scales(0), 4)]
        for (start, size), (end, _) in zip(spans, [*spans[1:], (self.scores(1), 0)], strict=True):
            if not TILE // 2 <= start <= start + size <= end:
                raise ValueError(f"columns {start} to {start + size} of a score tile overlap what follows at {end}")
        if self.outputs(1) + self.head_dim > COLUMNS:
            raise ValueError(f"head_dim {self.head_dim} needs more than {COLUMNS} columns of tensor memory")

    columns = COLUMNS

    def scores(self, i: int) -> int:
        """FP32, 128 columns."""
        return TILE * i

    def weights(self, i: int) -> int:
        """E4M3, 32 columns."""
        return self.scores(i) + TILE // 2

    def weight_scales(self, i: int) -> int:
        """UE8M0, four columns."""
        return self.weights(i) + 32

    def value_scales(self, i: int) -> int:
        """UE8M0, four columns."""
        return self.weight_scales(i) + 4

    def outputs(self, i: int) -> int:
        """FP32, head_dim columns."""
        return 2 * TILE + self.head_dim * i


@dataclass(frozen=True)
class SharedMemory:
    """Bytes of shared memory: two tiles of queries, and rings of key and value tiles with their scales.

    Attributes:
        stages: of the rings. factors: scales of a tile of keys, one per block or per token.
    """

    head_dim: int
    stages: int
    factors: int

    def parts(self) -> dict[str, int]:
        """Bytes by name; barriers and single words are not listed."""
        tile, atom = TILE * self.head_dim, 4 * TILE
        return {
            "tiles of Q": 2 * tile,
            "tiles of K": self.stages * tile,
            "tiles of V": self.stages * tile,
            "scale atoms of V": self.stages * atom,
            "scale atoms of P": 2 * atom,
            "scale atom of ones": atom,
            "factors of rows": 2 * 4 * TILE,
            "2^e_K": self.stages * 4 * self.factors,
            "e_V": self.stages * self.factors,
        }

    def check(self, storage: Any) -> None:
        """Raise where the storage is not its parts and little more, or is more than a CTA may have."""
        _check(self, storage)


@dataclass(frozen=True)
class BackwardTensorMemory:
    """Columns of tensor memory in the backward; lanes are queries of a step, or keys in dV and dK.

    Once the scores of the upper 64 keys are in registers, their columns become the codes of dS, first operand of dQ,
    and the scale factors of the step's three block-scaled products, while the lower half takes the next scores.
    """

    head_dim: int

    def __post_init__(self) -> None:
        spans = [(self.ds_codes, 32), *((self.scales(n), 4) for n in range(6))]
        for (start, size), (end, _) in zip(spans, [*spans[1:], (self.dp, 0)], strict=True):
            if not TILE // 2 <= start <= start + size <= end:
                raise ValueError(f"columns {start} to {start + size} of the scores overlap what follows at {end}")
        if self.dk + self.head_dim > COLUMNS:
            raise ValueError(f"head_dim {self.head_dim} needs more than {COLUMNS} columns of tensor memory")

    columns = COLUMNS
    scores = 0  # FP32, 128 columns
    ds_codes = TILE // 2  # E4M3, 32 columns
    dp = TILE  # FP32, 128 columns
    dq = TILE  # FP32, head_dim columns, once dP is in registers
    dv = 2 * TILE  # FP32, head_dim columns

    @property
    def dk(self) -> int:
        """FP32, head_dim columns."""
        return self.dv + self.head_dim

    def scales(self, n: int) -> int:
        """UE8M0, four columns each: of P and dO, of dS and K in dQ, of dS and Q in dK."""
        return self.ds_codes + 32 + 4 * n


@dataclass(frozen=True)
class BackwardSharedMemory:
    """Bytes of shared memory in the backward: a tile of keys, rings of query tiles, and what a step leaves.

    Attributes:
        stages: of the rings. exact: exponents per token, which adds weights of queries and factors of keys.
    """

    head_dim: int
    stages: int
    exact: bool

    def parts(self) -> dict[str, int]:
        """Bytes by name; barriers and single words are not listed."""
        tile, atom = TILE * self.head_dim, 4 * TILE
        return {
            "tile of K": tile,
            "tile of V": tile,
            "tiles of Q": self.stages * tile,
            "tiles of dO": self.stages * tile,
            "codes of P": TILE * TILE,
            "codes of dS": TILE * TILE,
            "dQ in FP16": 2 * tile,
            "numbers of queries": self.stages * 4 * 4 * TILE,
            "weights of queries": self.stages * 2 * 4 * TILE if self.exact else 0,
            "2^e_K, 2^e_V": 2 * 4 * TILE if self.exact else 0,
            "scale atoms of Q, dO": 2 * self.stages * atom,
            "scale atoms of P, K, dS": 4 * atom,
        }

    def check(self, storage: Any) -> None:
        """Raise where the storage is not its parts and little more, or is more than a CTA may have."""
        _check(self, storage)


@dataclass(frozen=True)
class PairTensorMemory:
    """``BackwardTensorMemory`` of each of a pair of CTAs. Lanes are the keys of dV and dK; else 64 queries, twice: for
    the first and the second 128 keys in scores and dP, for the lower and the upper half of the channels in dQ.
    """

    head_dim: int

    def __post_init__(self) -> None:
        spans = [(self.scales(n), 4) for n in range(8)]
        for (start, size), (end, _) in zip(spans, [*spans[1:], (self.dp, 0)], strict=True):
            if not TILE // 2 <= start <= start + size <= end:
                raise ValueError(f"columns {start} to {start + size} of the scores overlap what follows at {end}")
        if self.dk + self.head_dim > COLUMNS:
            raise ValueError(f"head_dim {self.head_dim} needs more than {COLUMNS} columns of tensor memory")

    columns = COLUMNS
    scores = 0  # FP32, 128 columns
    dp = TILE  # FP32, 128 columns
    dq = TILE  # FP32, head_dim / 2 columns, once dP is in registers
    dv = 2 * TILE  # FP32, head_dim columns

    @property
    def dk(self) -> int:
        """FP32, head_dim columns."""
        return self.dv + self.head_dim

    def scales(self, n: int) -> int:
        """UE8M0, four columns each: of P and dO, twice of dS in dQ, twice of K, of dS and Q in dK."""
        return TILE // 2 + 4 * n


@dataclass(frozen=True)
class PairSharedMemory:
    """Bytes of shared memory of each of a pair of CTAs: its 128 keys, half of a step's queries, and of all keys and
    queries that the pair has half of the channels.
    """

    head_dim: int
    stages: int

    def parts(self) -> dict[str, int]:
        """Bytes by name; barriers and single words are not listed."""
        tile, atom = TILE * self.head_dim, 4 * TILE
        return {
            "rows of K": tile,
            "rows of V": tile,
            "channels of K": tile,
            "rows of Q": self.stages * tile // 2,
            "channels of Q": self.stages * tile // 2,
            "rows of dO": self.stages * tile // 2,
            "channels of dO": self.stages * tile // 2,
            "codes of P": TILE * TILE,
            "codes of dS": TILE * TILE,
            "codes of dS for dQ": TILE * TILE,
            "dQ in FP16": tile,
            "numbers of queries": self.stages * 4 * 2 * TILE,
            "scale atoms of Q, dO": 2 * self.stages * atom,
            "scale atoms of P, K, dS": 6 * atom,
        }

    def check(self, storage: Any) -> None:
        """Raise where the storage is not its parts and little more, or is more than a CTA may have."""
        _check(self, storage)


def _check(plan: SharedMemory | BackwardSharedMemory | PairSharedMemory, storage: Any) -> None:
    size, parts = storage.size_in_bytes(), sum(plan.parts().values())
    if not parts <= size <= parts + SLACK or size > SHARED_BYTES:
        raise ValueError(
            f"head_dim={plan.head_dim}, stages={plan.stages} take {size} bytes of shared memory where the plan has "
            f"{parts}; a CTA may have {SHARED_BYTES}"
        )
