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
from flamia.quantize.reference import VALUE_MIN_EXPONENT, TokenMap, dequantize, nvfp4_rows, prepare, token_blocks
from flamia.reference import folded
from flamia.sm90.forward import Forward, compile_forward
from flamia.sm90.work import Masks
from flamia.worklists import last_section, work_lists
from softgpu.cutedsl import compiling

_KERNELS = {}


def kernels(device, head_dim, ratio, masks, dtype=torch.bfloat16, **options):
    """The launches of a call: documents with even and with uneven V exponents; one for exact operands or weights."""
    kinds = [False] if options.get("exact") else [True] if options.get("row_sum") == "weights" else [False, True]
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
        self, len_q, len_k, heads, kv_heads, head_dim, left=None, right=None, uneven=False, zeros=False, spread=0.0,
        scale_v=None, later=(), **recipe,
    ):  # fmt: skip
        g = torch.Generator().manual_seed(0)
        total_q, total_k = sum(len_q) + 3, sum(len_k) + 2  # tokens of no document at the end

        def tokens(total, heads):
            size = torch.exp2(torch.randn(total, 1, 1, generator=g) * spread)
            return torch.randn(total, heads, head_dim, generator=g) * size

        q, k, v = tokens(total_q, heads).bfloat16(), tokens(total_k, kv_heads).bfloat16(), tokens(total_k, kv_heads)
        if zeros:
            q.zero_()
            k.zero_()
        for start, stop in later:  # another sample, the values of other sizes
            for x in (q, k, v):
                x[start:stop] = x[start:stop].flip(0)
            v[start:stop] *= torch.exp2(10 * torch.randn(stop - start, 1, 1, generator=g))
        self.cu_q, self.cu_k = (
            torch.tensor([0, *torch.tensor(n).cumsum(0)], dtype=torch.int32) for n in (len_q, len_k)
        )
        if scale_v is not None:
            start, stop, size = scale_v
            v[start:stop] *= size
        if uneven:  # 40 keys of the last document are tiny: their weights vanish from the codes
            start = int(self.cu_k[-2])
            v[start : start + 40] *= 2.0**-20
        documents = Documents(self.cu_q, self.cu_k, total_q, total_k)
        maps = [TokenMap.build(cu, n) for cu, n in ((self.cu_q, total_q), (self.cu_k, total_k))]
        rotate, exact = head_dim == 128, recipe.get("exact_operands", False)
        sources = [prepare(x, tokens, rotate=rotate) for x, tokens in zip((q, k), maps, strict=True)]
        self.wide = recipe.get("format") == "nvfp4"
        if self.wide:
            self.q, self.k = (nvfp4_rows(x) for x in sources)
        else:
            self.q, self.k = (token_blocks(x, tokens, per_token=exact) for x, tokens in zip(sources, maps, strict=True))
        self.v = token_blocks(
            prepare(v.bfloat16(), maps[1]), maps[1], per_token=exact, columns="mma", least=VALUE_MIN_EXPONENT
        )
        self.lists = work_lists(documents, left, right)
        self.window = (left or 0, right or 0)
        self.scale = math.log2(math.e) / math.sqrt(head_dim)
        plan = make_plan(
            flamia.Recipe(variant="folded", products="hopper", **recipe),
            heads,
            kv_heads,
            head_dim,
            left,
            right,
            training=False,
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

    def run(self, launches, dtype=torch.bfloat16, section=1, ctas=2, total=None):
        """o, lse2 and M of the kernels; the buffers start as NaN. total: instead of the list's."""
        o = torch.full(self.shape, torch.nan, dtype=dtype)
        lse2, m = (torch.full((self.heads, self.shape[0]), torch.nan) for _ in range(2))
        f8 = torch.float8_e4m3fn
        if self.wide:
            numbers = [dequantize(x).bfloat16() for x in (self.q, self.k)]
            exponents = [torch.zeros(1, 1, dtype=torch.uint8)] * 2
        else:
            numbers = [x.codes.view(f8) for x in (self.q, self.k)]
            exponents = [self.q.exponents, self.k.exponents]
        codes = (*numbers, self.v.columns.view(f8))
        exponents += [self.v.exponents, self.uneven()]
        items = self.lists.forward
        total = items.total if total is None else torch.tensor([total], dtype=torch.int32)
        work = (items.items, items.count, items.claims, total)
        work += (self.cu_q, self.cu_k, self.lists.k.column_starts)
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
MASKED = [(FULL, (None, None)), (CAUSAL, (None, 0)), (WINDOW, (60, 20))]


def slow(*values):
    """A case for the matrix alone."""
    return pytest.param(*values, marks=pytest.mark.slow)


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


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 2), slow(1, 1), slow(4, 1), slow(6, 2)], ids=str)
@pytest.mark.parametrize("section", [1, 2])
def test_shared_kv_heads_and_sections(soft_device, heads, kv_heads, section):
    if heads % section:
        section = heads
    case = Case([140, 60], [140, 60], heads, kv_heads, 64, None, 0)
    case.check(case.run(kernels(soft_device, 64, heads // kv_heads, CAUSAL), section=section, ctas=3))


@pytest.mark.parametrize(("total", "last"), [(0, 4), (1000, 1), (4, 3)])
def test_last_sections(soft_device, total, last):
    """One head, some or all: every item of every head is computed."""
    case = Case([140, 60], [140, 60], 4, 2, 64, None, 0)
    assert last_section(1, 4, 3, int(case.lists.forward.items[0, 3]) + 1, total) == last
    case.check(case.run(kernels(soft_device, 64, 2, CAUSAL), section=1, ctas=3, total=total))
    assert not case.lists.forward.claims.any()


@pytest.mark.parametrize(("masks", "window"), [slow(*MASKED[0]), *MASKED[1:]], ids=str)
def test_documents_whose_values_differ_in_size(soft_device, masks, window):
    case = Case([150, 200], [150, 200], 2, 1, 64, *window, uneven=True)
    assert case.uneven().tolist() == [[0, 1]]
    case.check(case.run(kernels(soft_device, 64, 2, masks)))


@pytest.mark.parametrize("head_dim", [64, slow(128)])
def test_values_whose_blocks_differ_within_the_range_of_a_column(soft_device, head_dim):
    """The rows of V that sum codes hold another code for every block of 32 keys."""
    case = Case([200], [200], 2, 1, head_dim, None, 0, scale_v=(32, 96, 2.0**-4))
    assert case.uneven().tolist() == [[0]]
    assert len(case.v.exponents[:, :128].unique()) > 1
    case.check(case.run(kernels(soft_device, head_dim, 2, CAUSAL)))


@pytest.mark.parametrize(("masks", "window"), [slow(*MASKED[0]), MASKED[1]], ids=str)
def test_queries_and_keys_that_are_zeros(soft_device, masks, window):
    case = Case([150], [150], 2, 1, 64, *window, zeros=True)
    case.check(case.run(kernels(soft_device, 64, 2, masks)))


def test_row_sums_of_weights(soft_device):
    case = Case([200, 40], [200, 40], 1, 1, 64, None, 0, row_sum="weights")
    case.check(case.run(kernels(soft_device, 64, 1, CAUSAL, row_sum="weights")))


@pytest.mark.parametrize(
    ("masks", "window", "exact"),
    [(*MASKED[1], False), slow(*MASKED[0], False), slow(*MASKED[2], False), *(slow(*m, True) for m in MASKED)],
    ids=str,
)
@pytest.mark.parametrize("spread", [0, 2.5], ids=["even", "uneven"])
def test_schraudolph(soft_device, masks, window, exact, spread):
    """Of the scores' whole range: from a spread of sizes, hundreds below the row's largest."""
    recipe = dict(exponential="schraudolph", exact_operands=exact, training=False)
    case = Case([150, 0, 77], [150, 5, 77], 2, 1, 64, *window, spread=spread, **recipe)
    case.check(case.run(kernels(soft_device, 64, 2, masks, exact=exact, exponential="schraudolph")))


@pytest.mark.parametrize("head_dim", [128, slow(64)])
def test_fp16_outputs(soft_device, head_dim):
    case = Case([130], [130], 1, 1, head_dim, None, 0)
    # FP16 keeps three bits more than BF16.
    case.check(case.run(kernels(soft_device, head_dim, 1, CAUSAL, torch.float16), torch.float16), tolerance=3e-4)


@pytest.mark.slow
@pytest.mark.parametrize("options", [dict(p_shift=0, tau=8.0), dict(p_shift=8, tau=0.0), dict(stages=2)], ids=str)
def test_options(soft_device, options):
    recipe = {name: value for name, value in options.items() if name != "stages"}
    case = Case([300], [300], 1, 1, 64, None, 0, **recipe)
    case.check(case.run(kernels(soft_device, 64, 1, CAUSAL, **options)))


EXACT_SHAPES = [([300], [300]), ([129, 0, 31, 127], [129, 5, 31, 127]), ([33, 1, 100], [150, 1, 20])]
EXACT_MASKS = [(FULL, (None, None)), (CAUSAL, (None, 0)), (WINDOW, (100, 0)), (WINDOW, (50, 30))]
EXACT_FEW = [
    (64, *EXACT_MASKS[3], *EXACT_SHAPES[2]),
    (128, *EXACT_MASKS[1], *EXACT_SHAPES[0]),
    (128, *EXACT_MASKS[1], *EXACT_SHAPES[1]),
]
EXACT_ALL = [(d, *masks, *shape) for d in (64, 128) for masks in EXACT_MASKS for shape in EXACT_SHAPES]


@pytest.mark.parametrize(
    ("head_dim", "masks", "window", "len_q", "len_k"),
    [*EXACT_FEW, *(slow(*one) for one in EXACT_ALL if one not in EXACT_FEW)],
    ids=str,
)
@pytest.mark.parametrize("spread", [0, 1], ids=["even", "uneven"])
def test_exact_operands(soft_device, head_dim, masks, window, len_q, len_k, spread):
    """Tokens of one size, whose codes V's extra columns sum alone, and of sizes that vary by more than FOLD_RANGE."""
    case = Case(len_q, len_k, 2, 1, head_dim, *window, spread=2.5 * spread, exact_operands=True)
    assert bool(case.uneven().any()) is bool(spread)
    case.check(case.run(kernels(soft_device, head_dim, 2, masks, exact=True)))


@pytest.mark.slow
def test_exact_operands_with_row_sums_of_weights(soft_device):
    case = Case([200, 40], [200, 40], 2, 1, 64, None, 0, spread=2.5, row_sum="weights", exact_operands=True)
    case.check(case.run(kernels(soft_device, 64, 2, CAUSAL, row_sum="weights", exact=True)))


NVFP4_FEW = [(128, *EXACT_MASKS[1], False), (64, *EXACT_MASKS[0], True)]
NVFP4_ALL = [(d, *masks, exact) for d in (64, 128) for masks in EXACT_MASKS for exact in (False, True)]


@pytest.mark.parametrize(
    ("head_dim", "masks", "window", "exact"),
    [*NVFP4_FEW, *(slow(*one) for one in NVFP4_ALL if one not in NVFP4_FEW)],
    ids=str,
)
def test_nvfp4(soft_device, head_dim, masks, window, exact):
    case = Case([150, 0, 77], [170, 5, 40], 4, 2, head_dim, *window, format="nvfp4", spread=1, exact_operands=exact)
    case.check(case.run(kernels(soft_device, head_dim, 2, masks, exact=exact, format="nvfp4"), section=2))


@pytest.mark.slow
def test_nvfp4_values_of_very_different_size(soft_device):
    case = Case([150, 200], [150, 200], 1, 1, 64, None, 0, format="nvfp4", uneven=True)
    assert case.uneven().tolist() == [[0, 1]]
    case.check(case.run(kernels(soft_device, 64, 1, CAUSAL, format="nvfp4")))


@pytest.mark.parametrize("size", [2.0**-90, 2.0**-60, 2.0**30, 2.0**66, 2.0**78, 2.0**100], ids="{:.0e}".format)
def test_exact_operands_of_any_size(soft_device, size):
    """V's exponents from the smallest to those that no column serves; a document in which only some tokens are so."""
    case = Case([140, 40], [140, 40], 2, 1, 128, None, 0, spread=1, exact_operands=True, scale_v=(20, 150, size))
    case.check(case.run(kernels(soft_device, 128, 2, CAUSAL, exact=True)))


@pytest.mark.parametrize(("len_q", "seen"), [([150], [(0, 75)]), ([100, 31, 140], [(0, 40), (100, 131), (131, 260)])])
@pytest.mark.parametrize("head_dim", [slow(64), 128])
def test_later_tokens_do_not_reach_back(soft_device, head_dim, len_q, seen):
    """Exact operands: o, lse and M of earlier rows keep their bits when all later tokens become something else."""
    launch = kernels(soft_device, head_dim, 2, CAUSAL, exact=True)
    ends = torch.tensor(len_q).cumsum(0).tolist()
    later = [(stop, end) for (_, stop), end in zip(seen, ends, strict=True)]
    first, second = (
        Case(len_q, len_q, 2, 1, head_dim, None, 0, spread=1, exact_operands=True, later=x) for x in ((), later)
    )
    assert second.uneven().any()
    got, again = first.run(launch), second.run(launch)
    for start, stop in seen:
        for x, y in zip(got, again, strict=True):
            x, y = (z if z.dim() == 3 else z.t() for z in (x, y))
            assert torch.equal(x[start:stop], y[start:stop])
    for start, stop in later:
        assert stop == start or not torch.equal(got[0][start:stop], again[0][start:stop])


def test_schedule_order_changes_no_bit(soft_device, soft_device_shuffled):
    case = Case([260, 70], [260, 70], 2, 1, 64, None, 0)
    first = case.run(kernels(soft_device, 64, 2, CAUSAL))
    again = case.run(kernels(soft_device_shuffled, 64, 2, CAUSAL))
    for x, y in zip(first, again, strict=True):
        assert torch.equal(x.nan_to_num(), y.nan_to_num())


def test_a_document_does_not_see_its_neighbours(soft_device):
    """Bitwise: the same document alone and behind others, at an odd offset."""
    both = Case([150, 77], [150, 77], 2, 1, 64, None, 0)
    launches = kernels(soft_device, 64, 2, CAUSAL)
    packed = both.run(launches)
    both.k.codes[:150], both.v.exponents[:, :150] = 0x7E, 140  # the first document becomes something else
    again = both.run(launches)
    assert torch.equal(packed[0][150:227], again[0][150:227])
    assert not torch.equal(packed[0][:150], again[0][:150])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(head_dim=96), "head_dim must be 64 or 128, got 96"),
        (dict(stages=3), "stages must be 2 or 4, .*got 3"),
        (dict(format="nvfp4", head_dim=128, stages=4), "2 for format='nvfp4' with head_dim=128, got 4"),
        (dict(format="fp4"), "format must be 'mxfp8' or 'nvfp4', got 'fp4'"),
        (dict(exact=True, careful=True), "careful must be False with exact=True"),
        (dict(exponential="mitchell"), "exponential must be 'exact' or 'schraudolph', got 'mitchell'"),
    ],
)
def test_what_no_kernel_is_made_for_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        Forward(**dict(dict(head_dim=64, ratio=1, masks=CAUSAL), **options))
