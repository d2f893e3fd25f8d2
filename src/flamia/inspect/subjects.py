"""Which kernels are inspected. A new kernel joins by an entry in ``SUBJECTS``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Subject:
    """A kernel to compile, and what its hot loop works on.

    Attributes:
        name: as the report spells it. archs: targets that it is compiled for.
        build: "module:function", called with the target; what it compiles is read.
        symbol: part of the kernel's name in the binary, where ``build`` compiles several.
        products: matrix products per tile: 2 in a forward, 5 in a backward.
        payloads: times that an element of the tile is converted to an operand: P in a forward, P and dS in a backward.
        head_dim: of q, k and v.
        peer: whether it is somebody else's, to compare with.
    """

    name: str
    archs: tuple[str, ...]
    build: str
    symbol: str = ""
    products: int = 2
    payloads: int = 1
    head_dim: int = 128
    peer: bool = False


_HERE = "flamia.inspect.subjects"
BLACKWELL = ("sm_100a", "sm_103a")
SUBJECTS = (
    Subject("flamia sm90 forward, MXFP8 causal", ("sm_90a",), f"{_HERE}:sm90_forward"),
    Subject(
        "flamia sm90 backward, MXFP8 causal", ("sm_90a",), f"{_HERE}:sm90_backward", products=5, payloads=2
    ),
    Subject("flamia sm100 forward, MXFP8 causal", BLACKWELL, f"{_HERE}:sm100_forward"),
    Subject(
        "flamia sm100 backward, MXFP8 causal", BLACKWELL, f"{_HERE}:sm100_backward", products=5, payloads=2
    ),
    Subject(
        "flamia sm100 backward by pairs, MXFP8 causal", BLACKWELL, f"{_HERE}:sm100_backward_pair", products=5,
        payloads=2,
    ),
    Subject(
        "FlashAttention-4 forward, BF16 causal", ("sm_90a", *BLACKWELL), f"{_HERE}:peer_forward", "ForwardSm", peer=True
    ),
    Subject("FlashAttention-4 forward, FP8 causal", BLACKWELL, f"{_HERE}:peer_forward_fp8", "ForwardSm", peer=True),
    Subject(
        "FlashAttention-4 backward, BF16 causal", ("sm_90a", *BLACKWELL), f"{_HERE}:peer_backward", "BackwardSm",
        products=5, payloads=2, peer=True,
    ),
)  # fmt: skip


def sm90_forward(arch: str) -> None:
    """The Hopper forward for documents with even exponents: causal, defaults of MXFP8."""
    from flamia.sm90.forward import Forward, compile_forward
    from flamia.sm90.work import Masks

    compile_forward(Forward(128, 1, Masks(False, True)), arch=arch)


def sm90_backward(arch: str) -> None:
    """The Hopper backward: causal, defaults of MXFP8."""
    from flamia.sm90.backward import Backward, compile_backward
    from flamia.sm90.work import Masks

    compile_backward(Backward(128, 1, Masks(False, True), rotate=True), arch=arch)


def sm100_forward(arch: str) -> None:
    """The Blackwell forward: causal with claimed items, defaults of MXFP8."""
    from flamia.sm100.forward import Forward, compile_forward
    from flamia.sm100.work import Masks

    compile_forward(Forward(128, 1, Masks(False, True), arch=arch, dynamic=True))


def sm100_backward(arch: str) -> None:
    """The Blackwell backward: causal, defaults of MXFP8."""
    from flamia.sm100.backward import Backward, compile_backward
    from flamia.sm100.work import Masks

    compile_backward(Backward(128, 1, Masks(False, True), rotate=True, arch=arch))


def sm100_backward_pair(arch: str) -> None:
    """The Blackwell backward by pairs of CTAs: causal, defaults of MXFP8."""
    from flamia.sm100.backward import compile_backward
    from flamia.sm100.backward_pair import PairBackward
    from flamia.sm100.work import Masks

    compile_backward(PairBackward(128, 1, Masks(False, True), rotate=True, arch=arch))


def peer_forward(arch: str) -> None:
    """FlashAttention-4's forward: BF16, causal, head dimension 128."""
    _flash_attention("bfloat16")


def peer_forward_fp8(arch: str) -> None:
    """FlashAttention-4's forward: E4M3, causal, head dimension 128."""
    _flash_attention("float8_e4m3fn")


def peer_backward(arch: str) -> None:
    """FlashAttention-4's backward: BF16, causal, head dimension 128."""
    _flash_attention("bfloat16", backward=True)


def _flash_attention(dtype: str, *, backward: bool = False) -> None:
    # fake tensors are its own way to compile without a GPU: nothing is launched
    import cutlass
    import torch
    from flash_attn.cute import interface
    from torch._subclasses.fake_tensor import FakeTensorMode

    class Hardware:
        """Stands in for the driver's answers, which size persistent grids and do not reach the kernel's code."""

        def __init__(self, *_: Any) -> None: ...

        def get_max_active_clusters(self, size: int = 1) -> int:
            return 148 // size

        def get_device_multiprocessor_count(self) -> int:
            return 148

    cutlass.utils.HardwareInfo = Hardware
    with FakeTensorMode():
        shape = (1, 4096, 8, 128)
        q, k, v = (torch.empty(shape, dtype=getattr(torch, dtype), device="cuda") for _ in range(3))
        o, lse, *_ = interface._flash_attn_fwd(q, k, v, causal=True, return_lse=True)
        if backward:
            interface._flash_attn_bwd(q, k, v, o, o, lse, causal=True)
