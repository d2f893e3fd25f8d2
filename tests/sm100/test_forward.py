"""The Blackwell forward on a software device, against its twin with the same codes.

The device multiplies exactly and adds in FP32. What is left between kernel and twin is the powers (within 3e-6 where
multiply-adds compute them), the order of additions, and the rounding of o to 16 bits: 1.7e-3 RMS in BF16. Row sums add
four codes in FP16, two roundings of 2^-11: at most 1.41e-3 in lse2.
"""

import math

import pytest
import torch

pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")
pytest.importorskip("tvm_ffi", reason="needs apache-tvm-ffi")

import cutlass
from cutlass import cute
from reference_cases import make_plan, relative_rms

import flamia
import softgpu
from flamia.documents import Documents
from flamia.quantize.payloads import Payloads
from flamia.quantize.reference import VALUE_MIN_EXPONENT, TokenMap, prepare, token_blocks
from flamia.reference import forward as reference
from flamia.sm100 import kernels
from flamia.sm100.forward import Forward, compile_forward
from flamia.sm100.work import ITEM, Masks
from flamia.worklists import Tiling, work_lists
from softgpu.cutedsl import compiling

_KERNELS = {}


def kernel(device, head_dim, ratio, masks, dtype=torch.bfloat16, arch="sm_100a", **options):
    """The compiled kernel, to run on ``device``."""
    out = {torch.bfloat16: cutlass.BFloat16, torch.float16: cutlass.Float16}[dtype]
    key = (head_dim, ratio, masks, dtype, arch, tuple(options.items()))
    if key not in _KERNELS:
        with compiling(softgpu.Device(), arch):
            made = Forward(head_dim, ratio, masks, arch=arch, **options)
            _KERNELS[key] = compile_forward(made, out, compile=cute.compile)
    _KERNELS[key].device = device
    return _KERNELS[key]


class Case:
    """Seeded packed inputs as payloads, poisoned outputs, and the twin's result."""

    def __init__(
        self, len_q, len_k, heads, kv_heads, head_dim, left=None, right=None, edit=None, exact=False, **recipe
    ):
        g = torch.Generator().manual_seed(0)
        total_q, total_k = sum(len_q) + 3, sum(len_k) + 2  # tokens of no document at the end
        q = torch.randn(total_q, heads, head_dim, generator=g).bfloat16()
        k = torch.randn(total_k, kv_heads, head_dim, generator=g).bfloat16()
        v = torch.randn(total_k, kv_heads, head_dim, generator=g).bfloat16()
        # Blocks of different sizes, or a wrong scale would go unseen.
        k *= torch.exp2(torch.randint(-2, 2, (total_k, 1, 1), generator=g).float()).bfloat16()
        v *= (
            torch.exp2(torch.randint(-6, 6, (total_k // 32 + 1,), generator=g).float())
            .repeat_interleave(32)[:total_k, None, None]
            .bfloat16()
        )
        if edit:
            edit(q, k, v)
        self.cu_q, self.cu_k = (
            torch.tensor([0, *torch.tensor(n).cumsum(0)], dtype=torch.int32) for n in (len_q, len_k)
        )
        documents = Documents(self.cu_q, self.cu_k, total_q, total_k)
        maps = [TokenMap.build(cu, n) for cu, n in ((self.cu_q, total_q), (self.cu_k, total_k))]
        rotate = head_dim == 128
        self.q = token_blocks(prepare(q, maps[0], rotate=rotate), maps[0], per_token=exact)
        self.k = token_blocks(prepare(k, maps[1], rotate=rotate), maps[1], per_token=exact)
        self.v = token_blocks(prepare(v, maps[1]), maps[1], per_token=exact, least=VALUE_MIN_EXPONENT)
        self.list = work_lists(documents, left, right, Tiling(forward=ITEM)).forward
        self.window = (left or 0, right or 0)
        self.scale = math.log2(math.e) / math.sqrt(head_dim)
        plan = make_plan(
            flamia.Recipe(exact_operands=exact, **recipe), heads, kv_heads, head_dim, left, right, training=False
        )
        empty = torch.empty(0)
        payloads = Payloads({"q": self.q, "k": self.k, "v": self.v}, empty, empty)
        self.want = reference.forward(plan, payloads, documents)
        self.heads, self.shape, self.used = heads, (total_q, heads, head_dim), sum(len_q)

    def run(self, launch, dtype=torch.bfloat16, section=1, ctas=2):
        """o, lse2 and row maxima of the kernel; the buffers start as NaN."""
        o = torch.full(self.shape, torch.nan, dtype=dtype)
        lse2, m = (torch.full((self.heads, self.shape[0]), torch.nan) for _ in range(2))
        f8 = torch.float8_e4m3fn
        codes = (self.q.codes.view(f8), self.k.codes.view(f8), self.v.codes.view(f8))
        exponents = (self.q.exponents, self.k.exponents, self.v.exponents)
        work = (self.list.items, self.list.count, self.cu_q, self.cu_k)
        launch(*codes, o, lse2, m, *exponents, *work, self.scale, *self.window, section, ctas)
        return o, lse2, m

    def check(self, result, tolerance=2e-3):
        o, lse2, m = (x.transpose(0, 1)[: self.used] if x.dim() == 2 else x[: self.used] for x in result)
        want_lse, want_m = self.want.lse2.t()[: self.used], self.want.row_max.t()[: self.used]
        # As the kernel stores it: rounding a few large numbers to BF16 may be 2.2e-3 by itself.
        assert relative_rms(o, self.want.o[: self.used].to(o.dtype)) < tolerance
        seen = want_lse.isfinite()
        assert torch.equal(lse2.isfinite(), seen)
        error = (lse2 - want_lse)[seen].abs()
        assert error.max() < 0.05
        # A power that is off by 3e-6 moves a weight near a tie to the next code, 1/16 of itself: few rows notice.
        assert (error > 1.41e-3).sum() <= 2 + len(error) // 100
        # FP32 sums of products whose sizes add up to some 10: 2^-23 of that where they cancel.
        assert torch.allclose(m, want_m, rtol=1e-6, atol=1e-6)
        assert (o[~seen] == 0).all()
        for x in (result[0][self.used :], result[1][:, self.used :], result[2][:, self.used :]):
            assert x.isnan().all()  # rows of no document are not written


CAUSAL, FULL, WINDOW = Masks(False, True), Masks(False, False), Masks(True, True)
LENGTHS = [1, 31, 127, 128, 129, 255, 300, 513]
PACKED = [
    ([300], [300]),
    ([129, 0, 31, 127], [129, 5, 31, 127]),
    ([33, 1, 100], [150, 1, 20]),
    ([400], [100]),
    ([100, 3], [513, 300]),
    ([5, 140, 7], [0, 140, 0]),
]


MASKS = {
    "full": (FULL, (None, None)),
    "causal": (CAUSAL, (None, 0)),
    "left": (WINDOW, (100, 0)),
    "both": (WINDOW, (50, 30)),
    "past": (Masks(True, False), (60, None)),
}


def spread(q, k, v):
    """Tokens of very different sizes."""
    g = torch.Generator().manual_seed(1)
    for x, n in ((q, 3), (k, 3), (v, 8)):
        x *= torch.exp2(torch.randint(-n, n, (x.shape[0], 1, 1), generator=g).float()).bfloat16()


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_100a", "sm_103a"])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("exact", [False, True])
def test_every_mask_and_target(soft_device, arch, head_dim, mask, exact):
    masks, window = MASKS[mask]
    launch = kernel(soft_device, head_dim, 2, masks, arch=arch, **(dict(per_token=True) if exact else {}))
    for len_q, len_k in [*PACKED, *(([n], [n]) for n in LENGTHS), (LENGTHS, LENGTHS), (LENGTHS, LENGTHS[::-1])]:
        case = Case(len_q, len_k, 2, 1, head_dim, *window, edit=spread if exact else None, exact=exact)
        case.check(case.run(launch, ctas=3))


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_100a", "sm_103a"])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("exact", [False, True])
def test_claimed_items_and_schedule_orders_of_every_mask(soft_device, soft_device_shuffled, arch, mask, exact):
    """They change no bit."""
    masks, window = MASKS[mask]
    case = Case([129, 0, 31, 300], [129, 5, 31, 300], 2, 1, 64, *window, edit=spread if exact else None, exact=exact)
    dealt = case.run(kernel(soft_device, 64, 2, masks, arch=arch, per_token=exact), ctas=3)
    case.check(dealt)
    for dynamic, ctas in ((False, 2), (True, 2 * len(case.list.items))):
        launch = kernel(soft_device_shuffled, 64, 2, masks, arch=arch, per_token=exact, dynamic=dynamic)
        for x, y in zip(dealt, case.run(launch, ctas=ctas), strict=True):
            assert torch.equal(x.nan_to_num(), y.nan_to_num())


@pytest.mark.parametrize(("len_q", "len_k"), PACKED, ids=str)
def test_forward_equals_its_twin(soft_device, len_q, len_k):
    case = Case(len_q, len_k, 2, 1, 128, None, 0)
    case.check(case.run(kernel(soft_device, 128, 2, CAUSAL)))


@pytest.mark.parametrize("length", LENGTHS)
def test_lengths_behind_an_odd_offset(soft_device, length):
    case = Case([3, length], [3, length], 2, 1, 128, None, 0)
    case.check(case.run(kernel(soft_device, 128, 2, CAUSAL)))


@pytest.mark.parametrize(("window", "lengths"), [((100, 0), (300, 77)), ((50, 30), (130, 131))], ids=str)
def test_windows(soft_device, window, lengths):
    case = Case(lengths, lengths, 2, 1, 64, *window)
    case.check(case.run(kernel(soft_device, 64, 2, WINDOW)))


def test_unmasked_tiles_take_their_maxima_with_the_load(soft_device):
    case = Case([300, 20], [450, 300], 2, 1, 128, None, 0)
    case.check(case.run(kernel(soft_device, 128, 2, CAUSAL, arch="sm_103a")))
    opcodes = soft_device.reports[-1].opcodes
    assert any(".ld.red." in name for name in opcodes)
    assert sum(n for name, n in opcodes.items() if name.startswith("ex2")) > 0


@pytest.mark.parametrize(("heads", "kv_heads", "section"), [(2, 1, 2), (4, 2, 1), (4, 2, 4)], ids=str)
def test_shared_kv_heads_and_sections(soft_device, heads, kv_heads, section):
    case = Case([140, 300], [140, 300], heads, kv_heads, 128, None, 0)
    case.check(case.run(kernel(soft_device, 128, 2, CAUSAL), section=section, ctas=5))


@pytest.mark.slow
@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (4, 1), (8, 1), (8, 2)], ids=str)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_other_ratios(soft_device, heads, kv_heads, head_dim):
    case = Case([140, 60], [140, 60], heads, kv_heads, head_dim, None, 0)
    case.check(case.run(kernel(soft_device, head_dim, heads // kv_heads, CAUSAL)))


def test_row_sums_of_weights_and_fp16_outputs(soft_device):
    case = Case([200, 40], [200, 40], 1, 1, 64, None, 0, row_sum="weights")
    launch = kernel(soft_device, 64, 1, CAUSAL, torch.float16, row_sum="weights")
    # FP16 keeps three bits more than BF16.
    case.check(case.run(launch, torch.float16), tolerance=3e-4)


@pytest.mark.slow
@pytest.mark.parametrize("options", [dict(p_shift=0, tau=8.0), dict(p_shift=8, tau=0.0), dict(stages=2)], ids=str)
def test_options(soft_device, options):
    recipe = {name: value for name, value in options.items() if name != "stages"}
    case = Case([300], [300], 1, 1, 64, None, 0, **recipe)
    case.check(case.run(kernel(soft_device, 64, 1, CAUSAL, **options)))


@pytest.mark.parametrize("grow", [False, True])
def test_retained_maxima(soft_device, grow):
    """Later keys that are larger move the row reference in every tile; sizes that stay never do."""

    def edit(q, k, v):
        k *= torch.arange(1, 502).pow(2).div(2e4).view(-1, 1, 1) if grow else 0.1

    case = Case([499], [499], 2, 1, 128, None, 0, edit=edit)
    case.check(case.run(kernel(soft_device, 128, 2, CAUSAL)))


def test_zero_queries_and_keys(soft_device):
    """Their exponents are the smallest there are: products of scales underflow, and masked scores must stay -inf."""

    def edit(q, k, v):
        q[:64], k[32:96] = 0, 0

    case = Case([140], [140], 2, 1, 128, None, 0, edit=edit)
    case.check(case.run(kernel(soft_device, 128, 2, CAUSAL)))


@pytest.mark.parametrize(("len_q", "len_k"), [([300], [300]), ([3, 129, 0, 77], [3, 129, 5, 200])], ids=str)
def test_exponents_per_token(soft_device, len_q, len_k):
    case = Case(len_q, len_k, 2, 1, 128, None, 0, edit=spread, exact=True)
    case.check(case.run(kernel(soft_device, 128, 2, CAUSAL, per_token=True)))


@pytest.mark.parametrize(
    ("head_dim", "arch"),
    [(128, "sm_100a"), *(pytest.param(64, arch, marks=pytest.mark.slow) for arch in kernels.ARCHS.values())],
)
def test_exact_operands_hide_later_tokens(soft_device, head_dim, arch):
    """Bitwise: with exponents per token, no row depends on tokens behind it, in the second of two documents."""
    launch, results = kernel(soft_device, head_dim, 2, CAUSAL, per_token=True, arch=arch), []
    for later in (1.0, 1000.0):

        def edit(q, k, v, later=later):
            for x in (q, k, v):
                x[140:] *= later

        results.append(Case([33, 167], [33, 167], 2, 1, head_dim, None, 0, edit=edit, exact=True).run(launch))
    for x, y in zip(*results, strict=True):
        dim = 0 if x.dim() == 3 else 1
        assert torch.equal(x.narrow(dim, 0, 140), y.narrow(dim, 0, 140))
        assert not torch.equal(x.narrow(dim, 140, 60), y.narrow(dim, 140, 60))


def test_claimed_items_give_the_same_bits(soft_device):
    """Cluster launch control deals a block per item and head; blocks behind the last item do nothing."""
    case = Case([300, 70, 500], [300, 70, 500], 2, 1, 128, None, 0)
    dealt = case.run(kernel(soft_device, 128, 2, CAUSAL))
    grid = 2 * len(case.list.items)
    claimed = case.run(kernel(soft_device, 128, 2, CAUSAL, dynamic=True), ctas=grid)
    assert int(case.list.count) < len(case.list.items)
    started = [n for name, n in soft_device.reports[-1].opcodes.items() if name.startswith("tcgen05.alloc")]
    assert 0 < sum(started) < grid
    for x, y in zip(dealt, claimed, strict=True):
        assert torch.equal(x.nan_to_num(), y.nan_to_num())


def test_schedule_order_changes_no_bit(soft_device, soft_device_shuffled):
    case = Case([300, 70], [300, 70], 2, 1, 128, None, 0)
    first = case.run(kernel(soft_device, 128, 2, CAUSAL))
    again = case.run(kernel(soft_device_shuffled, 128, 2, CAUSAL))
    for x, y in zip(first, again, strict=True):
        assert torch.equal(x.nan_to_num(), y.nan_to_num())


def test_a_document_does_not_see_its_neighbours(soft_device):
    """Bitwise: a document at an odd offset, between others that become NaN."""
    case = Case([150, 77, 90], [150, 77, 90], 2, 1, 128, None, 0)
    launch = kernel(soft_device, 128, 2, CAUSAL)
    packed = case.run(launch)
    for payload in (case.q, case.k, case.v):
        for part in (slice(0, 150), slice(227, None)):
            payload.codes[part], payload.exponents[:, part] = 0, 255  # what a NaN makes of a block
    again = case.run(launch)
    for x, y in zip(packed, again, strict=True):
        dim = 0 if x.dim() == 3 else 1
        assert torch.equal(x.narrow(dim, 150, 77), y.narrow(dim, 150, 77))
        assert not torch.equal(x.narrow(dim, 0, 150), y.narrow(dim, 0, 150))
    assert again[0][:150].isnan().all()


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_100a", "sm_103a"])
def test_kernels_of_a_plan(soft_device, arch):
    """What ``flamia compile`` builds."""
    case = Case([200, 31], [200, 31], 2, 2, 64, None, 0, exact=True, edit=spread)
    plan = make_plan(flamia.Recipe(exact_operands=True), 2, 2, 64, None, 0, training=False)
    (name,) = kernels.forward_kernels(plan, torch.bfloat16, arch)
    with compiling(soft_device, arch):
        launch = name.build()
    case.check(case.run(launch, ctas=2 * len(case.list.items)))


def test_what_has_no_kernel_is_refused():
    with pytest.raises(ValueError, match="head_dim must be 64 or 128, got 96"):
        Forward(96, 1, CAUSAL)
    with pytest.raises(ValueError, match="arch must be sm_100a or sm_103a, got 'sm_90a'"):
        Forward(64, 1, CAUSAL, arch="sm_90a")
    with pytest.raises(ValueError, match="row_sum must be 'codes' or 'weights', got 'none'"):
        Forward(64, 1, CAUSAL, row_sum="none")
    with pytest.raises(ValueError, match="emulated must be 0 to 16 pairs of 16, got 17"):
        Forward(64, 1, CAUSAL, emulated=17)
