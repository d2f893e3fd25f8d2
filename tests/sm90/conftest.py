"""Software devices for kernels."""

from soft_devices import soft_device, soft_device_shuffled  # noqa: F401
