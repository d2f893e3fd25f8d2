"""Number formats inside Triton kernels against flamia.formats: every FP32 exponent, every code, ties and NaN."""

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before the kernels are defined

triton = pytest.importorskip("triton")
import triton.language as tl  # noqa: E402

from flamia import formats  # noqa: E402
from flamia.quantize import triton_formats as tf  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ON_CHIP = torch.cuda.is_available()


@triton.jit
def _map(x_ptr, out_ptr, n, OPERATION: tl.constexpr, HARDWARE: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i, i < n, 0)
    if OPERATION == "encode_e4m3":
        y = tf.encode_e4m3(x, HARDWARE)
    elif OPERATION == "decode_e4m3":
        y = tf.decode_e4m3(x, HARDWARE)
    elif OPERATION == "encode_e2m1":
        y = tf.encode_e2m1(x)
    elif OPERATION == "decode_e2m1":
        y = tf.decode_e2m1(x)
    elif OPERATION == "ceil_log2":
        y = tf.ceil_log2(x)
    elif OPERATION == "pow2":
        y = tf.pow2(x)
    elif OPERATION == "e4m3":
        y = tf.e8m0_exponent(tf.magnitude(x), tf.E4M3_EMAX, tf.E4M3_LIMIT)
    elif OPERATION == "e2m1":
        y = tf.e8m0_exponent(tf.magnitude(x), tf.E2M1_EMAX, tf.E2M1_LIMIT)
    elif OPERATION == "nvfp4":
        y = tf.e8m0_exponent(tf.magnitude(x), tf.NVFP4_EMAX, tf.NVFP4_LIMIT)
    else:
        y = tf.exp2_exact(x)
    tl.store(out_ptr + i, y, i < n)


def run(operation, x, dtype, hardware=False):
    x = x.to(DEVICE)
    out = torch.empty(x.shape, dtype=dtype, device=DEVICE)
    _map[(triton.cdiv(x.numel(), 4096),)](x, out, x.numel(), operation, hardware, 4096, enable_fp_fusion=False)
    return out.cpu()


def numbers():
    """Random FP32 numbers of every exponent and sign, and the neighbourhoods of every tie of the small formats."""
    generator = torch.Generator().manual_seed(0)
    pattern = torch.randint(0, 1 << 23, (255, 64), generator=generator, dtype=torch.int64)
    x = ((torch.arange(255).view(-1, 1) << 23) | pattern).to(torch.int32).view(torch.float32).flatten()
    values = formats.decode_e4m3(torch.arange(127, dtype=torch.uint8)).double()
    ties = torch.cat(((values[:-1] + values[1:]) / 2, values, torch.tensor([0.25, 0.75, 1.25, 2.5, 3.5, 5.0]))).float()
    near = (ties.view(torch.int32).view(-1, 1) + torch.tensor([-1, 0, 1], dtype=torch.int32)).clamp(min=0)
    x = torch.cat((x, near.view(torch.float32).flatten(), torch.zeros(1)))
    return torch.cat((x, -x))


def same(a, b):
    integers = {torch.float32: torch.int32}.get(a.dtype, a.dtype)
    assert torch.equal(a.view(integers), b.to(a.dtype).view(integers))


@pytest.mark.parametrize("hardware", [False, pytest.param(True, marks=pytest.mark.gpu)])
def test_encode_e4m3(hardware):
    x = numbers()
    same(run("encode_e4m3", x, torch.uint8, hardware), formats.encode_e4m3(x))


def test_encode_e4m3_makes_nan_of_what_is_not_finite():
    bad = torch.tensor([float("nan"), float("inf"), -float("inf")])
    assert run("encode_e4m3", bad, torch.uint8).tolist() == [0x7F] * 3
    if ON_CHIP:
        assert run("encode_e4m3", bad[:1], torch.uint8, True).tolist() == [0x7F]


@pytest.mark.parametrize("hardware", [False, pytest.param(True, marks=pytest.mark.gpu)])
def test_decode_e4m3(hardware):
    codes = torch.arange(256, dtype=torch.uint8)
    ours, theirs = run("decode_e4m3", codes, torch.float32, hardware), formats.decode_e4m3(codes)
    finite = ~theirs.isnan()
    same(ours[finite], theirs[finite])
    assert ours[~finite].isnan().all()


def test_e2m1():
    x = numbers()
    same(run("encode_e2m1", x, torch.int32), formats.encode_e2m1(formats.round_e2m1(x)))
    codes = torch.arange(16, dtype=torch.int32)
    same(run("decode_e2m1", codes, torch.float32), formats.decode_e2m1(codes.to(torch.uint8)))


@pytest.mark.parametrize("element", ["e4m3", "e2m1", "nvfp4"])
def test_shared_exponents(element):
    x = torch.cat((numbers().abs(), torch.tensor([float("inf"), float("nan")])))
    same(run(element, x, torch.int32), formats.e8m0_exponent(x, element))


def test_powers_of_two():
    e = torch.arange(-140, 141, dtype=torch.int32)
    ours, theirs = run("pow2", e, torch.float32), formats.pow2(e)
    finite = ~theirs.isnan()
    same(ours[finite], theirs[finite])
    assert ours[~finite].isnan().all()
    x = numbers().abs()
    same(run("ceil_log2", x, torch.int32), formats.ceil_log2(x))


def test_exact_exponential():
    from flamia.reference.exponentials import exp2

    generator = torch.Generator().manual_seed(0)
    x = torch.cat((torch.randn(8192, generator=generator) * 20, torch.tensor([0.0, -float("inf"), -200.0, 127.5])))
    same(run("exp2", x, torch.float32), exp2(x))


@pytest.mark.parametrize("short", [False, True], ids=["fp32", "11-bit"])
@pytest.mark.parametrize("rows", [True, False], ids=["rows", "columns"])
def test_nvfp4_groups_round_as_divisions_do(rows, short):
    from nvfp4_groups import run_groups

    assert run_groups(rows, short, DEVICE) == (0, 0)


@triton.jit
def _words(x_ptr, words_ptr, moved_ptr, values_ptr, nibbles_ptr, decoded_ptr, R: tl.constexpr):
    i, j = tl.arange(0, R)[:, None], tl.arange(0, 4)[None, :]
    x0, x1, x2, x3 = tf.quarters(tl.load(x_ptr + i * 16 + tl.arange(0, 16)[None, :]), R, 16)
    words = tf.e4m3_words(x0, x1, x2, x3)
    tl.store(words_ptr + i * 4 + j, words)
    v0, v1, v2, v3 = tf.e4m3_values(words)
    values = tf.from_quarters(v0, v1, v2, v3, R, 16)
    tl.store(values_ptr + i * 16 + tl.arange(0, 16)[None, :], values)
    y0, y1, y2, y3, y4, y5, y6, y7 = tf.eighths(values, R, 16)
    nibbles = tf.e2m1_words(y0, y1, y2, y3, y4, y5, y6, y7, tl.full((R, 2), 0.25, tl.float32), True)
    tl.store(nibbles_ptr + i * 2 + tl.arange(0, 2)[None, :], nibbles)
    tl.store(decoded_ptr + i * 16 + tl.arange(0, 16)[None, :], tf.e2m1_values(nibbles, R, 16) * 64.0)
    even, odd = tl.split(tl.reshape(words, (R, 2, 2)))
    w0, w2 = tl.split(even)
    w1, w3 = tl.split(odd)
    c0, c1, c2, c3 = tf.transpose_bytes(w0, w1, w2, w3)
    moved = tl.reshape(tl.join(tl.join(c0, c2), tl.join(c1, c3)), (R, 4))
    tl.store(moved_ptr + i * 4 + j, moved)


def test_words_hold_four_codes_and_change_places():
    """Words of consecutive columns, their values, the transpose of four of them, and eight E2M1 codes a word."""
    x = torch.randn(64, 16, generator=torch.Generator().manual_seed(0)) * 30
    words, moved = (torch.empty(64, 4, dtype=torch.int32, device=DEVICE) for _ in range(2))
    nibbles = torch.empty(64, 2, dtype=torch.int32, device=DEVICE)
    values = torch.full((64, 16), float("nan"), device=DEVICE)
    decoded = torch.full_like(values, float("nan"))
    _words[(1,)](x.to(DEVICE), words, moved, values, nibbles, decoded, 64, enable_fp_fusion=False)
    codes = formats.encode_e4m3(x)
    same(words.cpu().view(torch.uint8), codes)
    same(values.cpu(), formats.decode_e4m3(codes))
    same(moved.cpu().view(torch.uint8).view(64, 4, 4), codes.view(64, 4, 4).transpose(1, 2).contiguous())
    e2m1 = formats.encode_e2m1(formats.round_e2m1(values.cpu() * 0.25))
    same(nibbles.cpu().view(torch.uint8), formats.pack_nibbles(e2m1))
    same(decoded.cpu(), formats.decode_e2m1(e2m1))
