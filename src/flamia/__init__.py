"""flamia: low-precision softmax attention that people train with."""

__version__ = "0.1.0"
