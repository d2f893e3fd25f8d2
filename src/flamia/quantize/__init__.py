"""Quantization: payload layouts, their reference twins, and (on a GPU) the fused launches."""
