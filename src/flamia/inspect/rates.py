"""What the units of an SM do per clock, and how many SMs at which clock a chip has.

Sources: CUDA C++ Programming Guide, "Arithmetic Instructions", compute capabilities 9.0 and 10.0 (lanes per clock and
SM); data sheets of H200, B200 and B300 (dense peaks). The clock is the one that the BF16 peak implies with the SMs and
the rate given here, so that a bound reads as a share of the data sheet's peak. B300 executes exponentials at twice
B200's rate (NVIDIA: 10.7 against 5 teraexponentials per second). These are rates on paper: nothing was measured.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Chip:
    """Rates per SM and clock.

    Attributes:
        sms: multiprocessors. ghz: clock that the dense BF16 peak implies.
        mma: operations (two per multiply-add) by width of the operands' elements in bits.
        exponentials, mufu: lanes of MUFU.EX2, and of MUFU's other functions.
        fma, alu, conversion: lanes of FP32 multiply and add, of integer, logic, compare and select, of conversions.
        shared_bytes: bytes that shared memory moves. issue: warp instructions that are issued.
    """

    name: str
    sms: int
    ghz: float
    mma: dict[int, int]
    exponentials: int
    mufu: int = 16
    fma: int = 128
    alu: int = 64
    conversion: int = 64
    shared_bytes: int = 128
    issue: int = 4


def _clock(peak_tflops: float, sms: int, per_clock: int) -> float:
    return peak_tflops * 1e12 / sms / per_clock / 1e9


CHIPS = {
    "sm_90a": Chip("H200", 132, _clock(989.4, 132, 4096), {16: 4096, 8: 8192}, 16),
    "sm_100a": Chip("B200", 148, _clock(2250, 148, 8192), {16: 8192, 8: 16384, 4: 32768}, 16),
    "sm_103a": Chip("B300", 148, _clock(2250, 148, 8192), {16: 8192, 8: 16384, 4: 49152}, 32),
}
