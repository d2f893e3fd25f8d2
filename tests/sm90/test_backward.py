"""The Hopper backward on a software device, against its twin with the same codes.

The device multiplies exactly and adds in FP32. What is left between kernel and twin: the hardware's 2^x (here exact to
an ulp), which moves a P or dS on the boundary between two codes to the other, 1/16 of that entry; the order of FP16
additions of dQ, 2^-11 of the running sum each; the rounding of dk and dv to BF16, 1.7e-3 RMS.
"""

import itertools
from unittest import mock

import pytest
import torch

pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")
pytest.importorskip("tvm_ffi", reason="needs apache-tvm-ffi")

import cutlass
from cutlass import cute
from reference_cases import make_plan, relative_rms

import flamia
import softgpu
from flamia import formats
from flamia.documents import Documents
from flamia.quantize.finish import fragment_order
from flamia.quantize.payloads import Payloads, backward_specs, forward_specs
from flamia.quantize.reference import TokenMap, dequantize, make_all, prepare, token_amax
from flamia.reference import backend, folded
from flamia.reference.chunks import chunks
from flamia.sm90.backward import Backward, compile_backward
from flamia.sm90.work import Masks
from flamia.worklists import last_section, work_lists
from softgpu.cutedsl import compiling
from softgpu.machine import Launch

_KERNELS = {}


def kernel(device, head_dim, ratio, masks, dtype=torch.bfloat16, **options):
    """The compiled kernel of a call."""
    out = {torch.bfloat16: cutlass.BFloat16, torch.float16: cutlass.Float16}[dtype]
    key = (head_dim, ratio, masks, dtype, tuple(options.items()))
    if key not in _KERNELS:
        with compiling(softgpu.Device(), "sm_90a"):
            made = Backward(head_dim, ratio, masks, rotate=head_dim == 128, **options)
            _KERNELS[key] = compile_backward(made, out, compile=cute.compile)
    _KERNELS[key].device = device
    return _KERNELS[key]


def offsets(lengths):
    return torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32)


EXACT = dict(exact_operands=True, exact_ds=True, accumulator_scale="causal")


class Case:
    """Seeded packed inputs as payloads and numbers, and the twin's gradients."""

    def __init__(
        self, len_q, len_k, heads, kv_heads, head_dim, left=None, right=None, spread=0.0, dlse=False, later=None,
        faint=False, **recipe,
    ):  # fmt: skip
        g = torch.Generator().manual_seed(0)
        total_q, total_k = sum(len_q) + 3, sum(len_k) + 2  # tokens of no document at the end

        def tokens(total, heads):
            size = torch.exp2(torch.randn(total, 1, 1, generator=g) * spread)
            return (torch.randn(total, heads, head_dim, generator=g) * size).bfloat16()

        q, do = tokens(total_q, heads), tokens(total_q, heads)
        k, v = tokens(total_k, kv_heads), tokens(total_k, kv_heads)
        if later is not None:  # another sample, 64 times as large
            for x in (q, k, v, do):
                x[later:] = x[later:].flip(0) * 64
        do[2:9] = 0  # rows that must not set the exponent of their group
        if faint:  # queries 128 to 191 give keys from 128 on weights of 2^-128, later queries ordinary ones
            v *= 2.0**20
            k[:128, :, 0], k[128:, :, 0] = 356, 0
            q[128:192, :, 0], q[192:, :, 0] = 2, 0
        self.plan = plan = make_plan(
            flamia.Recipe(variant="folded", products="hopper", **recipe),
            heads,
            kv_heads,
            head_dim,
            left,
            right,
            training=True,
        )
        documents = self.documents = Documents(offsets(len_q), offsets(len_k), total_q, total_k)
        maps = {name: TokenMap.build(documents.cu_seqlens_q, total_q) for name in ("q", "do")}
        maps |= {name: TokenMap.build(documents.cu_seqlens_k, total_k) for name in "kv"}
        sources = {
            name: prepare(x, maps[name], rotate=plan.rotates and name != "v")
            for name, x in zip("qkv", (q, k, v), strict=True)
        }
        specs = forward_specs(plan.recipe, True, True)
        items = make_all(specs, sources, maps, per_token=plan.per_token, rounding="up")
        self.payloads = Payloads(items, token_amax(sources["k"]), token_amax(sources["v"]))
        forward = folded.forward(plan, self.payloads, documents)
        gradient = torch.randn(heads, total_q, generator=g) if dlse else None
        seen = []

        def capture(*arguments):
            seen.append(arguments)
            return folded_backward(*arguments)

        def with_columns(specs, *arguments, **options):
            return make_all(backward_specs(plan.recipe, True), *arguments, **options)

        folded_backward = folded.backward
        with mock.patch.object(backend, "make_all", with_columns), mock.patch.object(folded, "backward", capture):
            backend.run_backward(
                plan, do, gradient, forward.o.bfloat16(), forward.lse2, forward.row_max, self.payloads, documents, None
            )
        self.arguments = seen[0]
        self.do = self.arguments[2]["do"]
        self.want = folded.backward(*self.arguments)
        self._numbers()
        self.lists = work_lists(documents, left, right)
        self.window = (left or 0, right or 0)

    def _numbers(self):
        plan, documents = self.plan, self.documents
        shape = (plan.heads_q, documents.total_q)
        self.addend, self.b = torch.full(shape, torch.nan), torch.full(shape, torch.nan)
        self.unit = torch.full(shape, 99, dtype=torch.int32)
        self.power = torch.full(shape, 77, dtype=torch.int32)
        self.token_scale = torch.zeros(shape, dtype=torch.int32)
        cu = documents.cu_seqlens_q.tolist()
        self.document_scale = torch.zeros(shape[0], len(cu) - 1, dtype=torch.int32)
        for chunk in chunks(documents, plan.heads_kv, plan.ratio, plan.head_dim, plan.left, plan.right):
            made = folded._ChunkBackward(plan, chunk, *self.arguments[1:3], *self.arguments[4:])
            power = torch.where(made.live, made.e_t - made.c, 0) + folded.PROBABILITY_SHIFT
            addend = -made.m if made.exact else power - made.m
            chunk.scatter_table(self.addend, torch.where(made.live, addend, -torch.inf), "q")
            chunk.scatter_table(self.power, power, "q")
            chunk.scatter_table(self.b, made.b, "q")
            chunk.scatter_table(self.unit, made.unit, "q")
            chunk.scatter_table(self.token_scale, made.prescale, "q")
        for i, (a, b) in enumerate(itertools.pairwise(cu)):
            if b > a:
                self.document_scale[:, i] = self.token_scale[:, a]

    def run(self, function, dtype=torch.bfloat16, section=1, ctas=2, total=None):
        """dq before its rotation in FP32, dk, dv of the kernel. total: instead of the list's."""
        plan, f8 = self.plan, torch.float8_e4m3fn
        wide = plan.recipe.format == "nvfp4"
        q, k, v = (self.payloads[name] for name in (("q8", "k8", "v") if wide else "qkv"))
        scored = [x.codes.view(f8) for x in (q, k)]
        if wide:
            scored = [dequantize(self.payloads[name]).bfloat16() for name in "qk"]
        dk, dv = (torch.full(v.codes.shape, torch.nan, dtype=dtype) for _ in range(2))
        capacity = q.columns.shape[2]
        accumulator = torch.zeros(plan.heads_q, capacity, plan.head_dim, dtype=torch.float16)
        turns = torch.zeros(plan.heads_q, capacity // 16, 2, dtype=torch.int32)
        causal = plan.recipe.accumulator_scale == "causal"
        lists, documents = self.lists, self.documents
        function(
            *scored, *(x.view(f8) for x in (v.codes, self.do.codes, q.columns, k.columns, self.do.columns)),
            dk, dv, accumulator, turns, self.addend, self.b, self.unit, self.power,
            q.exponents, k.exponents, v.exponents,
            self.token_scale if causal else self.document_scale, lists.backward.items, lists.backward.count,
            lists.backward.claims, lists.backward.total if total is None else torch.tensor([total], dtype=torch.int32),
            documents.cu_seqlens_q, documents.cu_seqlens_k, lists.q.column_starts, lists.k.column_starts,
            plan.score_scale, plan.softmax_scale, *self.window, section, ctas,
        )  # fmt: skip
        assert not lists.backward.claims.any()  # ready for another launch
        slabs = accumulator.view(plan.heads_q, -1, 16 * plan.head_dim)
        rows = slabs[..., fragment_order(plan.head_dim).flatten()].view(accumulator.shape).transpose(0, 1)
        sums = TokenMap.build(documents.cu_seqlens_q, documents.total_q).unpad(rows).float()
        return sums * formats.pow2(-self.token_scale).t().unsqueeze(-1) * plan.softmax_scale, dk, dv

    def check(self, result, tolerance=None):
        used = int(self.documents.cu_seqlens_q[-1]), int(self.documents.cu_seqlens_k[-1])
        dq, dk, dv = self.want
        want = (dq, formats.hadamard(dk) if self.plan.rotates else dk, dv)
        errors = [relative_rms(x[:n], y[:n]) for x, y, n in zip(result, want, (used[0], used[1], used[1]), strict=True)]
        print(errors)
        for error, bound in zip(errors, tolerance or (2e-3, 3e-3, 3e-3), strict=True):
            assert error < bound
        for x in result[1:]:
            assert x[used[1] :].isnan().all()  # keys of no document are not written


CAUSAL, FULL, WINDOW = Masks(False, True), Masks(False, False), Masks(True, True)


def slow(*values):
    """A case for the matrix alone."""
    return pytest.param(*values, marks=pytest.mark.slow)


SHAPES = {
    "one": ([300], [300]),
    "packed": ([129, 0, 31, 127], [129, 5, 31, 127]),
    "unequal": ([33, 1, 100], [150, 1, 20]),
}
FEW = [
    (64, FULL, (None, None), "unequal"),
    (64, CAUSAL, (None, 0), "packed"),
    (64, WINDOW, (50, 30), "unequal"),
    (128, CAUSAL, (None, 0), "packed"),
]
ALL = [
    (head_dim, masks, window, shape)
    for head_dim in (64, 128)
    for masks, window in ((FULL, (None, None)), (CAUSAL, (None, 0)), (WINDOW, (100, 0)), (WINDOW, (50, 30)))
    for shape in SHAPES
]


@pytest.mark.parametrize(
    ("head_dim", "masks", "window", "shape"),
    [*FEW, *(slow(*one) for one in ALL if one not in FEW)],
    ids=str,
)
def test_backward_equals_its_twin(soft_device, head_dim, masks, window, shape):
    case = Case(*SHAPES[shape], 2, 1, head_dim, *window)
    case.check(case.run(kernel(soft_device, head_dim, 2, masks)))


@pytest.mark.parametrize(
    ("heads", "kv_heads", "section"), [(4, 2, 2), (4, 2, 1), slow(1, 1, 1), slow(6, 2, 2), slow(6, 2, 1)], ids=str
)
def test_shared_kv_heads_and_sections(soft_device, heads, kv_heads, section):
    case = Case([140, 60], [140, 60], heads, kv_heads, 64, None, 0)
    case.check(case.run(kernel(soft_device, 64, heads // kv_heads, CAUSAL), section=section, ctas=3))


@pytest.mark.parametrize(("deterministic", "total", "last"), [(False, 1000, 1), (True, 6, 2), slow(True, 0, 3)])
def test_last_sections(soft_device, deterministic, total, last):
    """One kv head, two or all: every item of every head adds once, and in a fixed order none waits for ever."""
    case = Case([140, 60], [140, 60], 3, 3, 64, None, 0)
    longest = int(case.lists.backward.items[0, 3]) + 1
    assert last_section(1, 3, 3, longest, total) == last
    case.check(case.run(kernel(soft_device, 64, 1, CAUSAL, deterministic=deterministic), ctas=3, total=total))


def test_tokens_of_very_different_size(soft_device):
    """Exponents of all operands vary, dS needs new ones often, and lse has a gradient."""
    case = Case([200], [200], 2, 1, 64, None, 0, spread=3, dlse=True)
    case.check(case.run(kernel(soft_device, 64, 2, CAUSAL)))


@pytest.mark.parametrize("exact", [False, slow(True)])
def test_scores_gradients_from_next_to_nothing_to_large(soft_device, exact):
    """The exponent that serves the first queries' dS would take the later ones' out of FP32's range."""
    recipe, options = (EXACT, dict(exact=True, causal_scale=True)) if exact else ({}, {})
    case = Case([256], [256], 2, 1, 64, None, 0, faint=True, **recipe)
    case.check(case.run(kernel(soft_device, 64, 2, CAUSAL, **options)))


def test_fp16_gradients(soft_device):
    # FP16 keeps three bits more than BF16.
    case = Case([140, 60], [140, 60], 2, 1, 64, None, 0)
    case.check(case.run(kernel(soft_device, 64, 2, CAUSAL, torch.float16), torch.float16), (2e-3, 5e-4, 5e-4))


def test_schedule_order_changes_no_bit(soft_device, soft_device_shuffled):
    """dk and dv of one CTA or several, and dq of one."""
    case = Case([100, 70], [100, 70], 2, 1, 64, None, 0)
    first = case.run(kernel(soft_device, 64, 2, CAUSAL), ctas=1)
    again = case.run(kernel(soft_device_shuffled, 64, 2, CAUSAL), ctas=1)
    for x, y in zip(first, again, strict=True):
        assert torch.equal(x.nan_to_num(), y.nan_to_num())


@pytest.mark.parametrize(("masks", "window"), [(CAUSAL, (None, 0)), slow(WINDOW, (150, 200))], ids=str)
def test_deterministic_order(soft_device, masks, window, monkeypatch):
    """dq is the same to the bit whoever comes first. CTAs of the device run one after another until they wait.

    With the accumulator's causal scale, whose exponents are per token.
    """
    monkeypatch.setitem(Launch.__init__.__kwdefaults__, "quantum", 300)  # turns that a waiting warp takes
    case = Case([140, 20], [300, 20], 1, 1, 64, *window, accumulator_scale="causal")
    launch = kernel(soft_device, 64, 1, masks, deterministic=True, causal_scale=True)
    alone = case.run(launch, ctas=1)
    case.check(alone)
    assert torch.equal(alone[0], case.run(launch, ctas=2)[0])


@pytest.mark.parametrize("masks", [CAUSAL, slow(WINDOW)], ids=str)
def test_exact_operands(soft_device, masks):
    case = Case([140, 31], [140, 31], 2, 1, 64, 60 if masks.left else None, 0, spread=2, **EXACT)
    case.check(case.run(kernel(soft_device, 64, 2, masks, exact=True, causal_scale=True)))


NVFP4_FEW = [(64, WINDOW, (50, 30), "unequal", False), (128, CAUSAL, (None, 0), "packed", False)]
NVFP4_ALL = [
    (head_dim, masks, window, shape, exact)
    for head_dim in (64, 128)
    for masks, window in ((FULL, (None, None)), (CAUSAL, (None, 0)), (WINDOW, (50, 30)))
    for shape in SHAPES
    for exact in (False, True)
]


@pytest.mark.parametrize(
    ("head_dim", "masks", "window", "shape", "exact"),
    [*NVFP4_FEW, *(slow(*one) for one in NVFP4_ALL if one not in NVFP4_FEW)],
    ids=str,
)
def test_scores_of_nvfp4(soft_device, head_dim, masks, window, shape, exact):
    recipe, options = (EXACT, dict(exact=True, causal_scale=True)) if exact else ({}, {})
    case = Case(*SHAPES[shape], 2, 1, head_dim, *window, format="nvfp4", **recipe)
    case.check(case.run(kernel(soft_device, head_dim, 2, masks, format="nvfp4", **options)))


def test_later_tokens_do_not_reach_back(soft_device):
    """Exact operands, one CTA: dq of earlier queries keeps its bits when all later tokens become something else."""
    launch = kernel(soft_device, 64, 2, CAUSAL, exact=True, causal_scale=True)
    first, second = (Case([150], [150], 2, 1, 64, None, 0, spread=2, later=later, **EXACT) for later in (None, 75))
    assert torch.equal(first.run(launch, ctas=1)[0][:75], second.run(launch, ctas=1)[0][:75])
    assert not torch.equal(first.want[0][75:], second.want[0][75:])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(head_dim=96), "head_dim must be 64 or 128, got 96"),
        (dict(stages=3), "stages must be 2 or 4, 2 for format='nvfp4' with head_dim=128, got 3"),
        (dict(format="nvfp4", head_dim=128, stages=4), "2 for format='nvfp4' with head_dim=128, got 4"),
        (dict(format="fp4"), "format must be 'mxfp8' or 'nvfp4', got 'fp4'"),
    ],
)
def test_what_no_kernel_is_made_for_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        Backward(**dict(dict(head_dim=64, ratio=1, masks=CAUSAL, rotate=False), **options))
