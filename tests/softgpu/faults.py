"""Faults on purpose: edits of PTX text, and which diagnoses may answer them."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from softgpu import errors as e


def replace(pattern: str, to: str, nth: int | None = 0) -> Callable[[str], str]:
    """Replace the n-th match of a pattern (None: all of them); fails when there is none."""

    def edit(text: str) -> str:
        found = list(re.finditer(pattern, text, re.M))
        assert found, f"nothing matches {pattern}"
        chosen = found if nth is None else [found[nth]]
        for m in reversed(chosen):
            text = text[: m.start()] + m.expand(to) + text[m.end() :]
        return text

    return edit


@dataclass(frozen=True)
class Fault:
    """``case`` names the recorded launches, ``kernel`` the one to edit; ``answers`` the diagnoses that count.

    A wrong number counts too where ``wrong`` is set. Nothing else passes: not a right result, not a hang.
    """

    name: str
    case: str
    kernel: str
    edit: Callable[[str], str]
    answers: tuple = ()
    wrong: bool = False


ARRIVE = r"^\s*(?:@%p\d+ )?mbarrier\.arrive\.shared\.b64[^;]*;"
HOPPER, BLACKWELL, PAIR = "ForwardSm90", "ForwardSm100", "BackwardSm100"

FAULTS = [
    # synchronization
    Fault("dropped arrive, consumer release", "hopper", HOPPER, replace(ARRIVE, "", None), (e.Deadlock,)),
    Fault("dropped arrive, softmax", "blackwell", BLACKWELL, replace(ARRIVE, "", 3), (e.Deadlock,)),
    Fault(
        "too many expected bytes",
        "hopper",
        HOPPER,
        replace(r"(mbarrier\.arrive\.expect_tx\.shared\.b64 %rd\d+, \[[^\]]*\]), %r\d+;", r"\1, 65536;"),
        (e.Deadlock,),
    ),
    Fault(
        "too few expected bytes",
        "blackwell",
        BLACKWELL,
        replace(r"(mbarrier\.arrive\.expect_tx\.shared\.b64 %rd\d+, \[[^\]]*\]), %r\d+;", r"\1, 64;"),
        (e.Deadlock, e.AsyncRace, e.UninitialisedRead, e.BarrierMisuse),
    ),
    Fault(
        "wrong parity, full barrier",
        "hopper",
        HOPPER,
        replace(r"(mbarrier\.try_wait\.parity\.acquire\.cta\.shared::cta\.b64 %p\d+, \[%r\d+\]), 0;", r"\1, 1;"),
        (e.AsyncRace, e.UninitialisedRead, e.Deadlock),
    ),
    Fault(
        "missing wait for the score tile",
        "blackwell",
        BLACKWELL,
        replace(
            r"mbarrier\.try_wait\.parity\.shared::cta\.b64 P1, \[%r\d+\], %r\d+, \d+;", "setp.eq.u32 P1, 0, 0;", None
        ),
        (e.UninitialisedRead, e.AsyncRace),
        True,
    ),
    Fault(
        "missing wait before the buffer is reused",
        "hopper",
        HOPPER,
        replace(r"mbarrier\.try_wait\.parity\.shared\.b64 P1, \[%r\d+\], %r\d+, \d+;", "setp.eq.u32 P1, 0, 0;", None),
        (e.AsyncRace, e.BarrierMisuse, e.Deadlock),
        True,
    ),
    Fault("dropped named barrier", "hopper", HOPPER, replace(r"^\s*bar\.arrive [^;]*;", "", None), (e.Deadlock,)),
    # proxies and asynchronous groups
    Fault(
        "dropped proxy fence, epilogue",
        "hopper",
        HOPPER,
        replace(r"fence\.proxy\.async\.shared::cta;", "", None),
        (e.MissingProxyFence,),
    ),
    Fault(
        "dropped proxy fence, dS",
        "pair",
        PAIR,
        replace(r"fence\.proxy\.async\.shared::cta;", "", 1),
        (e.MissingProxyFence,),
    ),
    Fault(
        "dropped commit, wgmma",
        "hopper",
        HOPPER,
        replace(r"wgmma\.commit_group\.sync\.aligned;", "", 1),
        (e.SoftGPUError,),
        True,
    ),
    Fault(
        "dropped wait, wgmma",
        "hopper",
        HOPPER,
        replace(r"wgmma\.wait_group\.sync\.aligned\s+0;", "", 0),
        (e.AsyncRace,),
    ),
    Fault(
        "dropped commit, tcgen05",
        "blackwell",
        BLACKWELL,
        replace(r"(?:@%p\d+ )?tcgen05\.commit[^;]*;", "", 0),
        (e.Deadlock,),
    ),
    Fault(
        "dropped wait, tensor-memory stores",
        "blackwell",
        BLACKWELL,
        replace(r"tcgen05\.wait::st\.sync\.aligned;", "", None),
        (e.UninitialisedRead, e.SoftGPUError),
        True,
    ),
    Fault(
        "dropped wait, bulk reduction",
        "pair",
        PAIR,
        replace(r"cp\.async\.bulk\.wait_group\.read\s+3;", "", None),
        (e.AsyncRace,),
    ),
    # descriptors and tensor memory
    Fault(
        "shared-memory descriptor shifted by 16 bytes",
        "blackwell",
        BLACKWELL,
        replace(r"(add\.s32 smem_desc_b_lo, smem_desc_b_lo_start), 0x2;", r"\1, 0x3;", None),
        (),
        True,
    ),
    Fault(
        "wrong swizzle",
        "blackwell",
        BLACKWELL,
        replace(r"mov\.b32 smem_desc_b_hi, 0x40004040;", "mov.b32 smem_desc_b_hi, 0x80004040;", None),
        (e.UninitialisedRead, e.AsyncRace),
        True,
    ),
    Fault(
        "wrong swizzle, tensor map of the kernel's own",
        "hopper",
        HOPPER,
        replace(r"(add\.s64 \s*%rd\d+, %rd\d+), 4611686293305360386;", r"\1, -4611686018427387902;", 0),
        (e.UninitialisedRead, e.OutOfBounds),
        True,
    ),
    Fault(
        "instruction descriptor: B transposed",
        "blackwell",
        BLACKWELL,
        replace(r"0x8200490;", "0x8210490;", None),
        (e.OutOfBounds, e.UninitialisedRead),
        True,
    ),
    Fault(
        "instruction descriptor: float16 for bfloat16",
        "blackwell",
        BLACKWELL,
        replace(r"0x8210490;", "0x8210010;", None),
        (),
        True,
    ),
    Fault(
        "instruction descriptor: half the columns",
        "blackwell",
        BLACKWELL,
        replace(r"0x8200490;", "0x8100490;", None),
        (e.UninitialisedRead,),
        True,
    ),
    Fault(
        "off by one tensor-memory column",
        "blackwell",
        BLACKWELL,
        replace(r"(tcgen05\.ld\.sync\.aligned\.32x32b\.x32\.b32\s+\{[^}]*\}, \[%r\d+)\];", r"\1+1];", 0),
        (e.UninitialisedRead,),
        True,
    ),
    Fault(
        "tensor memory of another warp",
        "blackwell",
        BLACKWELL,
        replace(r"(tcgen05\.ld\.sync\.aligned\.32x32b\.x32\.b32\s+\{[^}]*\}, \[%r\d+)\];", r"\1+2097152];", 0),
        (e.TensorMemoryMisuse,),
    ),
    Fault(
        "dropped deallocation",
        "blackwell",
        BLACKWELL,
        replace(r"(?:@%p\d+ )?tcgen05\.dealloc[^;]*;", "", 0),
        (e.SoftGPUError,),
    ),
    Fault(
        "disable-output-lane mask",
        "pair",
        PAIR,
        replace(r"(collector::a::discard \[%r\d+\], %rd\d+, %rd\d+, %r\d+, \{)%r\d+(,)", r"\g<1>255\2", None),
        (e.UninitialisedRead,),
        True,
    ),
    Fault(
        "store beyond the buffer",
        "blackwell",
        BLACKWELL,
        replace(r"(st\.global\.b32\s+\[%rd\d+)(?:\+\d+)?\]", r"\1+1048576]", None),
        (e.OutOfBounds,),
    ),
]

_SCALED = r"(block_scale\.block32 \[[^\]]*\], %rd\d+, %rd\d+, %r\d+), (\[[^\]]*\]), (\[[^\]]*\]), (%p\d+;)"


def one_scale_id(text: str) -> str:
    """Every product takes the instruction descriptor, and so the scale-factor id, of the first."""
    pattern = r"(block_scale\.block32 \[[^\]]*\], %rd\d+, %rd\d+), (%r\d+)"
    first = re.search(pattern, text).group(2)
    return re.sub(pattern, rf"\1, {first}", text)


#: name → edit of Triton's mxfp8 product and the diagnoses that may answer it; a wrong number always may
SCALE_FAULTS = {
    "scale atoms of A and B exchanged": (replace(_SCALED, r"\1, \3, \2, \4", None), ()),
    "one scale factor id for all depths": (one_scale_id, ()),
    "scale atom one column on": (
        replace(r"(block_scale\.block32 .*\[ %r\d+) \+ 0 \], %p", r"\1 + 1 ], %p", None),
        (e.UninitialisedRead, e.TensorMemoryMisuse),
    ),
}
