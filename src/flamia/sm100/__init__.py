"""Blackwell kernels in the CuTe DSL, for sm_100a and sm_103a: the paper's kernels (docs/kernels.md)."""
