"""What the doors of the kernel backends share: sizes of a device, and how they look at tensors."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from flamia.quantize.payloads import E4M3Payload, Payloads

L2_SHARE = 0.5  # of the L2 cache, for what CTAs at work at the same time reread


@lru_cache(maxsize=64)
def device_sizes(index: int) -> tuple[int, int]:
    """Multiprocessors, and the bytes of L2 cache to count on."""
    properties = torch.cuda.get_device_properties(index)
    return properties.multi_processor_count, int(properties.L2_cache_size * L2_SHARE)


def along_channels(x: Tensor) -> Tensor:
    """x [T, heads, D] itself where channels are contiguous, as quantizers read them, else a copy."""
    return x if x.shape[2] == 1 or x.stride(2) == 1 else x.contiguous()


def e4m3(payloads: Payloads, name: str) -> E4M3Payload:
    """The payload of that name."""
    payload = payloads[name]
    assert isinstance(payload, E4M3Payload)
    return payload
