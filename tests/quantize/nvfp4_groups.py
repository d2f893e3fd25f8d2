"""Groups of 16 elements for NVFP4, hard to round, and a kernel that quantizes them: run interpreted and compiled."""

import torch
import triton
import triton.language as tl

from flamia import formats
from flamia.quantize import triton_formats as tf

TIES = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
GROUPS = 512  # of a program


@triton.jit
def quantize_groups(x_ptr, words_ptr, scales_ptr, R: tl.constexpr, ROWS: tl.constexpr, SHORT: tl.constexpr):
    i = tl.program_id(0) * R + tl.arange(0, R)
    x = tl.load(x_ptr + i[:, None] * 16 + tl.arange(0, 16)[None, :])
    if ROWS:
        words, scale_codes = tf.nvfp4_rows(x, tf.eighths_amax(x, R, 16), R, 16, SHORT)
    else:
        words, scale_codes = tf.nvfp4_columns(tl.trans(x), 16, R, SHORT)
    tl.store(words_ptr + i[:, None] * 2 + tl.arange(0, 2)[None, :], words)
    tl.store(scales_ptr + i, tl.reshape(scale_codes, (R,)).to(tl.uint8))


def neighbours(x: torch.Tensor, kind: torch.dtype) -> torch.Tensor:
    """x and the numbers of ``kind`` next to it, FP32, in a new last dimension."""
    integers = {torch.float32: torch.int32, torch.float16: torch.int16, torch.bfloat16: torch.int16}[kind]
    bits = x.to(kind).view(integers).unsqueeze(-1) + torch.tensor([-1, 0, 1], dtype=integers)
    return bits.view(kind).to(torch.float32)


def hard_groups(short: bool) -> torch.Tensor:
    """FP32 [groups, 16]: of every magnitude, and with scales or elements that are ties or their neighbours.

    short: numbers of at most 11 significant bits.
    """
    g = torch.Generator().manual_seed(0)
    kinds = (torch.float16, torch.bfloat16) if short else (torch.float32,)
    random = torch.randn(3072, 16, generator=g) * 2.0 ** torch.randint(-40, 30, (3072, 1), generator=g)
    scales = formats.decode_e4m3(torch.arange(1, 127, dtype=torch.uint8))
    groups = [random.to(torch.bfloat16).to(torch.float32) if short else random, torch.zeros(1, 16)]
    for kind in kinds:
        near = torch.cat([neighbours(scales.view(-1, 1) * TIES, kind).flatten(1)] * 2, 1)
        for part in (near[:, :15], near[:, 15:30]):
            exact = torch.cat((part, 6 * scales.view(-1, 1)), 1)  # the largest element makes the scale
            groups += [exact, -exact]
        middle = neighbours((scales[1:] + scales[:-1]) * 3, kind).reshape(-1, 1)
        rest = torch.randn(len(middle), 15, generator=g).to(kind).to(torch.float32)
        groups += [torch.cat((middle, rest), 1)]
    if short:  # every FP16 quotient: with 6 the scale is 1
        every = torch.arange(0x4600).to(torch.int16).view(torch.float16).to(torch.float32)
        every = torch.cat((every, torch.zeros(-len(every) % 15))).view(-1, 15)
        groups += [torch.cat((every, torch.full((len(every), 1), 6.0)), 1)]
    x = torch.cat(groups)
    x[5, 3], x[6, 9], x[7, 0] = torch.nan, torch.inf, -0.0
    return torch.cat((x, torch.zeros(-len(x) % GROUPS, 16)))


def run_groups(rows: bool, short: bool, device: str = "cpu") -> tuple[int, int]:
    """How many bytes of codes and of scales differ from the reference's."""
    from flamia.quantize.reference import _nvfp4

    x = hard_groups(short)
    words = torch.full((len(x), 2), -1, dtype=torch.int32, device=device)
    scales = torch.full((len(x),), 255, dtype=torch.uint8, device=device)
    quantize_groups[(len(x) // GROUPS,)](
        x.to(device), words, scales, GROUPS, rows, short, num_warps=4, enable_fp_fusion=False
    )
    expected, expected_scales = _nvfp4(x)
    wrong = words.cpu().view(torch.uint8) != formats.pack_nibbles(expected)
    return int(wrong.sum()), int((scales.cpu() != expected_scales).sum())
