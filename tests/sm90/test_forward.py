"""The Hopper forward on a software device, against its twin with the same codes.

The device multiplies exactly and adds in FP32, so what is left between kernel and twin is the hardware's 2^x (here
exact to an ulp), the order of additions, and the rounding of o to 16 bits: 2^-9 relative at most, 1.7e-3 RMS in BF16.
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
from flamia.bounds import FOLD_RANGE
from flamia.documents import Documents
from flamia.quantize.payloads import Payloads
from flamia.quantize.reference import VALUE_MIN_EXPONENT, TokenMap, prepare, token_blocks
from flamia.reference import folded
from flamia.sm90.forward import Forward, compile_forward
from flamia.sm90.work import Masks
from flamia.worklists import work_lists
from softgpu.cutedsl import compiling

_KERNELS = {}


def kernels(device, head_dim, ratio, masks, dtype=torch.bfloat16, **options):
    """The launches of a call: documents with even and with uneven V exponents; one for row sums of weights."""
    kinds = [True] if options.get("row_sum") == "weights" else [False, True]
    out = {torch.bfloat16: cutlass.BFloat16, torch.float16: cutlass.Float16}[dtype]
    key = (head_dim, ratio, masks, dtype, tuple(options.items()))
    if key not in _KERNELS:
        with compiling(softgpu.Device(), "sm_90a"):
            made = [Forward(head_dim, ratio, masks, careful=careful, **options) for careful in kinds]
            _KERNELS[key] = [compile_forward(kernel, out, compile=cute.compile) for kernel in made]
    for function in _KERNELS[key]:
        function.device = device
    return _KERNELS[key]


class Case:
    """Seeded packed inputs as payloads, poisoned outputs, and the twin's result."""

    def __init__(
        self, len_q, len_k, heads, kv_heads, head_dim, left=None, right=None, uneven=False, zeros=False, **recipe
    ):
        g = torch.Generator().manual_seed(0)
        total_q, total_k = sum(len_q) + 3, sum(len_k) + 2  # tokens of no document at the end
        q = torch.randn(total_q, heads, head_dim, generator=g).bfloat16()
        k = torch.randn(total_k, kv_heads, head_dim, generator=g).bfloat16()
        v = torch.randn(total_k, kv_heads, head_dim, generator=g)
        if zeros:
            q.zero_()
            k.zero_()
        self.cu_q, self.cu_k = (
            torch.tensor([0, *torch.tensor(n).cumsum(0)], dtype=torch.int32) for n in (len_q, len_k)
        )
        if uneven:  # 40 keys of the last document are tiny: their weights vanish from the codes
            start = int(self.cu_k[-2])
            v[start : start + 40] *= 2.0**-20
        documents = Documents(self.cu_q, self.cu_k, total_q, total_k)
        maps = [TokenMap.build(cu, n) for cu, n in ((self.cu_q, total_q), (self.cu_k, total_k))]
        rotate = head_dim == 128
        self.q = token_blocks(prepare(q, maps[0], rotate=rotate), maps[0])
        self.k = token_blocks(prepare(k, maps[1], rotate=rotate), maps[1])
        self.v = token_blocks(prepare(v.bfloat16(), maps[1]), maps[1], columns="mma", least=VALUE_MIN_EXPONENT)
        self.lists = work_lists(documents, left, right)
        self.window = (left or 0, right or 0)
        self.scale = math.log2(math.e) / math.sqrt(head_dim)
        plan = make_plan(
            flamia.Recipe(variant="folded", **recipe), heads, kv_heads, head_dim, left, right, training=False
        )
        empty = torch.empty(0)
        payloads = Payloads({"q": self.q, "k": self.k, "v": self.v}, empty, empty)
        self.want = folded.forward(plan, payloads, documents)
        self.heads, self.shape, self.used = heads, (total_q, heads, head_dim), sum(len_q)

    def uneven(self):
        flags = torch.zeros(self.v.exponents.shape[0], self.cu_k.shape[0] - 1, dtype=torch.uint8)
        for i, (a, b) in enumerate(zip(self.cu_k.tolist(), self.cu_k.tolist()[1:], strict=False)):
            e = self.v.exponents[:, a:b].int()
            if b > a:
                flags[:, i] = e.amax(1) - e.amin(1) > FOLD_RANGE
        return flags

    def run(self, launches, dtype=torch.bfloat16, section=1, ctas=2):
        """o, lse2 and M of the kernels; the buffers start as NaN."""
        o = torch.full(self.shape, torch.nan, dtype=dtype)
        lse2, m = (torch.full((self.heads, self.shape[0]), torch.nan) for _ in range(2))
        f8 = torch.float8_e4m3fn
        codes = (self.q.codes.view(f8), self.k.codes.view(f8), self.v.columns.view(f8))
        exponents = (self.q.exponents, self.k.exponents, self.v.exponents, self.uneven())
        work = (self.lists.forward.items, self.lists.forward.count, self.cu_q, self.cu_k, self.lists.k.column_starts)
        for launch in launches:
            launch(*codes, o, lse2, m, *exponents, *work, self.scale, *self.window, section, ctas)
        return o, lse2, m

    def check(self, result, tolerance=2e-3):
        o, lse2, m = (x.transpose(0, 1)[: self.used] if x.dim() == 2 else x[: self.used] for x in result)
        want_lse, want_m = self.want.lse2.t()[: self.used], self.want.row_max.t()[: self.used]
        assert relative_rms(o, self.want.o[: self.used]) < tolerance
        seen = want_lse.isfinite()
        assert torch.equal(lse2.isfinite(), seen)
        # An ulp of 2^x moves a weight that sits on a tie to the next code, 1/16 of itself: a row in some hundred.
        error = (lse2 - want_lse)[seen].abs()
        assert error.max() < 0.05
        assert (error > 2e-4).sum() <= 2
        assert torch.equal(m, want_m)
        assert (o[~seen] == 0).all()
        for x in (result[0][self.used :], result[1][:, self.used :], result[2][:, self.used :]):
            assert x.isnan().all()  # rows of no document are not written


CAUSAL, FULL, WINDOW = Masks(False, True), Masks(False, False), Masks(True, True)


@pytest.mark.slow
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize(
    ("masks", "window"), [(FULL, (None, None)), (CAUSAL, (None, 0)), (WINDOW, (100, 0)), (WINDOW, (50, 30))], ids=str
)
@pytest.mark.parametrize(
    ("len_q", "len_k"),
    [([300], [300]), ([129, 0, 31, 127], [129, 5, 31, 127]), ([33, 1, 100], [150, 1, 20])],
    ids=["one", "packed", "unequal"],
)
def test_forward_equals_its_twin(soft_device, head_dim, masks, window, len_q, len_k):
    case = Case(len_q, len_k, 2, 1, head_dim, *window)
    case.check(case.run(kernels(soft_device, head_dim, 2, masks)))


@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (4, 1), (6, 2)], ids=str)
@pytest.mark.parametrize("section", [1, 2])
def test_shared_kv_heads_and_sections(soft_device, heads, kv_heads, section):
    if heads % section:
        section = heads
    case = Case([140, 60], [140, 60], heads, kv_heads, 64, None, 0)
    case.check(case.run(kernels(soft_device, 64, heads // kv_heads, CAUSAL), section=section, ctas=3))


@pytest.mark.parametrize(("masks", "window"), [(FULL, (None, None)), (CAUSAL, (None, 0)), (WINDOW, (60, 20))], ids=str)
def test_documents_whose_values_differ_in_size(soft_device, masks, window):
    case = Case([150, 200], [150, 200], 1, 1, 64, *window, uneven=True)
    assert case.uneven().tolist() == [[0, 1]]
    case.check(case.run(kernels(soft_device, 64, 1, masks)))


@pytest.mark.parametrize(("masks", "window"), [(FULL, (None, None)), (CAUSAL, (None, 0))], ids=str)
def test_queries_and_keys_that_are_zeros(soft_device, masks, window):
    case = Case([150], [150], 1, 1, 64, *window, zeros=True)
    case.check(case.run(kernels(soft_device, 64, 1, masks)))


def test_row_sums_of_weights(soft_device):
    case = Case([200, 40], [200, 40], 1, 1, 64, None, 0, row_sum="weights")
    case.check(case.run(kernels(soft_device, 64, 1, CAUSAL, row_sum="weights")))


def test_fp16_outputs(soft_device):
    case = Case([130], [130], 1, 1, 64, None, 0)
    # FP16 keeps three bits more than BF16.
    case.check(case.run(kernels(soft_device, 64, 1, CAUSAL, torch.float16), torch.float16), tolerance=3e-4)


@pytest.mark.parametrize("options", [dict(p_shift=0, tau=8.0), dict(p_shift=8, tau=0.0), dict(stages=2)], ids=str)
def test_options(soft_device, options):
    recipe = {name: value for name, value in options.items() if name != "stages"}
    case = Case([300], [300], 1, 1, 64, None, 0, **recipe)
    case.check(case.run(kernels(soft_device, 64, 1, CAUSAL, **options)))


def test_schedule_order_changes_no_bit(soft_device, soft_device_shuffled):
    case = Case([260, 70], [260, 70], 2, 1, 64, None, 0)
    first = case.run(kernels(soft_device, 64, 2, CAUSAL))
    again = case.run(kernels(soft_device_shuffled, 64, 2, CAUSAL))
    for x, y in zip(first, again, strict=True):
        assert torch.equal(x.nan_to_num(), y.nan_to_num())


def test_a_document_does_not_see_its_neighbours(soft_device):
    """Bitwise: the same document alone and behind others, at an odd offset."""
    both = Case([150, 77], [150, 77], 1, 1, 64, None, 0)
    launches = kernels(soft_device, 64, 1, CAUSAL)
    packed = both.run(launches)
    both.k.codes[:150], both.v.exponents[:, :150] = 0x7E, 140  # the first document becomes something else
    again = both.run(launches)
    assert torch.equal(packed[0][150:227], again[0][150:227])
    assert not torch.equal(packed[0][:150], again[0][:150])


def test_head_dims_without_a_kernel_are_refused():
    with pytest.raises(ValueError, match="head_dim must be 64 or 128, got 96"):
        Forward(96, 1, CAUSAL)
