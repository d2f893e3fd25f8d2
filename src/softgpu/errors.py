"""What softgpu can say about a kernel that is wrong, or that it cannot run."""

from __future__ import annotations


class SoftGPUError(RuntimeError):
    """Base of every diagnosis.

    ``line`` is the 1-based line of the PTX text that was executing, ``text`` that instruction; both are None
    where no single instruction is to blame (a deadlock, for instance).
    """

    def __init__(self, message: str, *, line: int | None = None, text: str | None = None):
        self.message = message
        self.line = line
        self.text = text
        super().__init__(message)

    def at(self, line: int, text: str) -> SoftGPUError:
        """Fill in the instruction, once, where the raiser did not know it."""
        if self.line is None:
            self.line, self.text = line, text
        return self

    def __str__(self) -> str:
        where = "" if self.line is None else f"\n  at PTX line {self.line}: {self.text}"
        return self.message + where


class PTXSyntaxError(SoftGPUError):
    """The text is not PTX that the parser knows."""


class UnsupportedInstruction(SoftGPUError):
    """An opcode or modifier that softgpu does not implement; nothing is ever guessed."""


class Deadlock(SoftGPUError):
    """Nothing can run and nothing is in flight; the message lists who waits on what."""


class OutOfBounds(SoftGPUError):
    """An access outside of every buffer of its address space."""


class Misaligned(SoftGPUError):
    """An address that is not a multiple of the access size."""


class UninitialisedRead(SoftGPUError):
    """Shared or tensor memory was read where nothing was written before."""


class MissingProxyFence(SoftGPUError):
    """The async proxy read what the generic proxy wrote, with no ``fence.proxy.async`` in between."""


class AsyncRace(SoftGPUError):
    """A buffer was touched while an asynchronous operation on it was in flight."""


class BarrierMisuse(SoftGPUError):
    """An mbarrier, named barrier or cluster barrier used against its rules."""


class TensorMemoryMisuse(SoftGPUError):
    """Tensor memory accessed without allocation, beyond it, or from a warp that cannot reach the lane."""


class DescriptorError(SoftGPUError):
    """A matrix descriptor, instruction descriptor or tensor map with fields that do not make sense."""
