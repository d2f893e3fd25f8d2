"""Hopper kernels in the CuTe DSL: the folded variant on tensor cores that know no block scales (docs/kernels.md)."""
