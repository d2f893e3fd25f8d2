"""Software devices for kernels."""

from softgpu.pytest_plugin import soft_device, soft_device_shuffled  # noqa: F401
