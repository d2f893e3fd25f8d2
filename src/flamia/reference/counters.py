"""Counters of what rounding did inside of a reference backward."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from torch import Tensor


@dataclass
class Statistics:
    """Counts over every reference backward inside of one ``statistics()`` block.

    Attributes:
        ds_total: entries of dS that are not zero before rounding.
        ds_zero: those of them that round to zero (of the operand of dQ).
        accumulator_total: entries of the FP16 dQ accumulators.
        accumulator_overflow: those that became infinite or NaN.
        accumulator_subnormal: those that are not zero and below the smallest normal FP16 number.
    """

    ds_total: int = 0
    ds_zero: int = 0
    accumulator_total: int = 0
    accumulator_overflow: int = 0
    accumulator_subnormal: int = 0

    @property
    def ds_zero_fraction(self) -> float:
        return self.ds_zero / self.ds_total if self.ds_total else 0.0


_active: list[Statistics] = []


@contextmanager
def statistics() -> Iterator[Statistics]:
    """Collect ``Statistics`` from reference backwards run inside of the block, on any thread."""
    counts = Statistics()
    _active.append(counts)
    try:
        yield counts
    finally:
        _active.remove(counts)


def count_accumulator(values: Tensor) -> None:
    """Add finished dQ accumulators to every collector in force."""
    for counts in _active:
        counts.accumulator_total += values.numel()
        counts.accumulator_overflow += int((~values.isfinite()).sum())
        counts.accumulator_subnormal += int(((values != 0) & (values.abs() < 2.0**-14)).sum())


def count_ds(ds: Tensor, rounded: Tensor) -> None:
    """Add one piece of dS and its operand of dQ to every collector in force."""
    for counts in _active:
        counts.ds_total += int((ds != 0).sum())
        counts.ds_zero += int(((rounded == 0) & (ds != 0)).sum())
