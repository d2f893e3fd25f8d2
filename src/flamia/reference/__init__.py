"""The numeric specification of flamia in plain PyTorch, and the exact attention it is measured against."""
