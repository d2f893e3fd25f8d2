"""Does a token's result depend on later tokens? Change the future, compare the past.

Under a causal mask o_i, lse_i and dq_i may depend on tokens up to i only (dq_i also on do_i). dk_j and dv_j
see later queries by right and are not compared. A mask does not guarantee it: a scale that a later token
takes part in re-rounds earlier ones (paper 3.2 and Table 5).

Two kinds of probe, each at several positions p, on two lengths (one of them odd):

* spike: token p of q, of k, of v or of do times 64, which raises the maximum of every scale group it is in;
* all: every token of q, k, v and do from p on replaced by another sample's, as it is, times 64 and divided by
  64, so that maxima which the future takes part in rise, fall or stay.

The rows before p are compared with those of the unchanged operands, bit by bit and in relative size.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ..recipe import Recipe
from .inputs import Sample, make_inputs
from .measures import Change, change
from .targets import Result, Target, get_target

__all__ = ["CAUSAL_TENSORS", "PERTURBED", "CausalityReport", "Leak", "causality", "probes"]

PERTURBED = ("q", "k", "v", "do", "all")
CAUSAL_TENSORS = ("o", "lse", "dq")

# A later token of the same block of 32 is at most this many rows away.
CONFINED_ROWS = 31
# Re-rounding the small entries of a block moves a row of o by a few percent. A larger share lets it read the
# future. Not asked of dq, where rows that are nearly zero beside their neighbours may be rounded to nothing.
CONFINED_CHANGE = 0.1
ORDER = ("exact", "noise", "confined", "leaks")


@dataclass(frozen=True)
class Leak:
    """The worst that one perturbation did to one result, over all positions and lengths.

    Attributes:
        perturbed: what was changed: "q", "k", "v", "do" (one token), or "all" (every token from there on).
        tensor: what was compared: "o", "lse" or "dq".
        max_rel_change: the largest relative change of an earlier row of one head
            (:class:`~.measures.Change`).
        rows_reached: how far the change reached: the largest distance p - i between the first changed token
            and an earlier row that is not bitwise what it was; 0 if there is none.
        position, tokens: the position p and the length of the sequence of the largest change.
    """

    target: str
    inputs: str
    perturbed: str
    tensor: str
    max_rel_change: float
    rows_reached: int
    position: int | None = None
    tokens: int | None = None

    @property
    def bitwise_zero(self) -> bool:
        """No bit of an earlier row changed."""
        return self.rows_reached == 0


@dataclass(frozen=True)
class CausalityReport:
    """All leaks of one target, one per perturbation, tensor and kind of inputs.

    Attributes:
        noise: per tensor, the largest relative change between two runs on the same operands. All zero for a
            target that gives the same bits every time.
        forward_only: the target has no backward; dq could not be compared.
        promise: what the target's name promises (:class:`~.targets.Target`).
    """

    target: str
    leaks: tuple[Leak, ...]
    noise: dict[str, float]
    forward_only: bool
    promise: str

    @property
    def deterministic(self) -> bool:
        return not any(self.noise.values())

    @property
    def verdict(self) -> str:
        """The worst of :meth:`judge` over all leaks."""
        return max(self.verdicts.values(), key=ORDER.index, default="exact")

    @property
    def verdicts(self) -> dict[str, str]:
        """The worst of :meth:`judge` for each of o, lse, dq that was measured."""
        worst: dict[str, str] = {}
        for leak in self.leaks:
            old = worst.get(leak.tensor, "exact")
            worst[leak.tensor] = max(old, self.judge(leak), key=ORDER.index)
        return worst

    def judge(self, leak: Leak) -> str:
        """One leak: "exact" (no bit changed), "noise" (no more than between two runs of a target that is not
        deterministic), "confined" (within 31 rows, and for o and lse by at most a tenth), or "leaks"."""
        if leak.bitwise_zero:
            return "exact"
        if leak.max_rel_change <= 2 * self.noise[leak.tensor]:
            return "noise"
        small = leak.tensor == "dq" or leak.max_rel_change <= CONFINED_CHANGE
        return "confined" if small and leak.rows_reached <= CONFINED_ROWS else "leaks"

    @property
    def flagged(self) -> bool:
        """Some earlier row depends on the future."""
        return self.verdict in ("confined", "leaks")

    @property
    def as_promised(self) -> bool:
        """Whether the target does what its name promises (:class:`~.targets.Target`)."""
        if self.promise == "exact":
            return self.verdict == "exact"
        if self.promise == "leaky":
            return self.flagged
        if self.promise == "output":
            return all(self.verdicts.get(tensor) != "leaks" for tensor in ("o", "lse"))
        return self.verdict != "leaks"

    def worst(self, tensor: str, perturbed: Iterable[str] = PERTURBED) -> Leak | None:
        """The leak with the largest change of `tensor`; None if it was not measured."""
        wanted = set(perturbed)
        chosen = [leak for leak in self.leaks if leak.tensor == tensor and leak.perturbed in wanted]
        return max(chosen, key=lambda leak: (leak.max_rel_change, leak.rows_reached), default=None)


def probes(tokens: int) -> list[tuple[int, tuple[int, ...]]]:
    """The lengths to run and the positions to change in each.

    Inside of a block of 32, at its first and last token, at the edges of a tile of 128, and the last token of
    a length that no tile divides.
    """
    if tokens < 2:
        raise ValueError(f"tokens is {tokens}; a causality audit needs at least 2")
    tile = tokens // 256 * 128  # an edge of tiles near the middle
    wanted = (tile + 45, tile + 95, tile, tile + 127) if tile else (tokens // 2, 31, 32, 13)
    plan = [(tokens, tuple(sorted({p for p in wanted if 0 < p < tokens}) or [tokens - 1]))]
    odd = tokens - 19
    if odd > 64:
        plan.append((odd, (45, odd - 1)))
    return plan


def causality(
    target: str | Target | Recipe | Callable[..., Any],
    *,
    inputs: str | Sequence[str] = ("gaussian", "heavy"),
    tokens: int = 384,
    heads: int | None = 2,
    kv_heads: int | None = None,
    head_dim: int = 128,
    factor: float = 64.0,
    seed: int = 0,
    device: str = "cpu",
    advance: Callable[[], object] | None = None,
) -> CausalityReport:
    """Measure how much of the future the earlier rows of an attention see.

    Args:
        target: a name, `module:function` or a callable (:mod:`flamia.audit.targets`).
        inputs: kinds of inputs (:func:`flamia.audit.make_inputs`).
        tokens: length of the sequence; a second run has 19 fewer.
        heads, kv_heads, head_dim, seed, device: of the inputs.
        factor: what changed tokens are multiplied by.
        advance: called after every run of the target, :func:`runs` times in all.

    Raises:
        ValueError: an unknown target or kind of inputs, a size out of range, or a result of the wrong shape.
    """
    audited = get_target(target)
    names = (inputs,) if isinstance(inputs, str) else tuple(inputs)
    worst: dict[tuple[str, str, str], Leak] = {}
    noise = dict.fromkeys(CAUSAL_TENSORS, 0.0)
    forward_only = False

    def run(operands: Sequence[Tensor]) -> Result:
        q, k, v, do = operands
        result = audited.run(q, k, v, do, causal=True)
        if advance is not None:
            advance()
        return result

    for name, (length, positions) in itertools.product(names, probes(tokens)):
        here, other = (
            make_inputs(name, length, heads, head_dim, kv_heads=kv_heads, seed=s, device=device)
            for s in (seed, seed + 1)
        )
        before = run(here.tensors())
        forward_only |= before.dq is None
        for tensor, seen in _compare(before, run(here.tensors()), None):
            noise[tensor] = max(noise[tensor], seen.max_rel_change)
        for p, what in itertools.product(positions, PERTURBED):
            if p >= here.q.shape[1]:  # captured inputs can be shorter than asked
                continue
            for scale in _scales(what, factor):
                after = run(_perturb(here, other, what, p, scale))
                for tensor, seen in _compare(before, after, p):
                    reached = p - min(seen.rows) if seen.rows else 0
                    size = seen.max_rel_change
                    leak = Leak(audited.name, name, what, tensor, size, reached, p, here.q.shape[1])
                    key = (name, what, tensor)
                    worst[key] = _worse(worst[key], leak) if key in worst else leak
    return CausalityReport(audited.name, tuple(worst.values()), noise, forward_only, audited.promise)


def runs(inputs: Sequence[str], tokens: int) -> int:
    """How many forward and backward passes one :func:`causality` makes at most."""
    each = sum(len(_scales(what, 1.0)) for what in PERTURBED)
    return len(inputs) * sum(2 + len(positions) * each for _, positions in probes(tokens))


def _scales(what: str, factor: float) -> tuple[float, ...]:
    return (1.0, factor, 1 / factor) if what == "all" else (factor,)


def _perturb(here: Sample, other: Sample, what: str, p: int, scale: float) -> list[Tensor]:
    changed = []
    for name, x, y in zip(("q", "k", "v", "do"), here.tensors(), other.tensors(), strict=True):
        x = x.clone()
        if what == "all":
            x[:, p:] = y[:, p:] * scale
        elif what == name:
            x[:, p] *= scale
        changed.append(x)
    return changed


def _compare(before: Result, after: Result, rows: int | None) -> list[tuple[str, Change]]:
    """The changes of the first `rows` rows (None: of all) of every causal tensor that the target has."""
    changes = []
    for tensor in CAUSAL_TENSORS:
        x, y = getattr(before, tensor), getattr(after, tensor)
        if x is not None and y is not None:
            changes.append((tensor, change(x[:, :rows], y[:, :rows], logarithm=tensor == "lse")))
    return changes


def _worse(a: Leak, b: Leak) -> Leak:
    """The larger change of the two, with the longer reach of either."""
    larger = max(a, b, key=lambda leak: leak.max_rel_change)
    return Leak(
        larger.target,
        larger.inputs,
        larger.perturbed,
        larger.tensor,
        larger.max_rel_change,
        max(a.rows_reached, b.rows_reached),
        larger.position,
        larger.tokens,
    )
