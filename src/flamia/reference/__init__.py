"""The numeric specification of flamia in plain PyTorch, and the exact attention it is measured against."""

from flamia.reference.counters import Statistics, statistics

__all__ = ["Statistics", "statistics"]
