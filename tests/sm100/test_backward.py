"""The Blackwell backward on a software device, against its twin with the same codes.

The device multiplies exactly and adds in FP32. What is left between kernel and twin: 2^x (exact to an ulp here, within
3e-6 where multiply-adds compute it), which moves a P or dS on the boundary between two codes to the other one, 1/16 of
that entry; the order of FP16 additions of dQ, 2^-11 of the running sum each; the rounding of dk and dv to BF16, 1.7e-3
RMS.
"""

import dataclasses
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
from flamia.documents import TOKEN_BLOCK, Documents, column_capacity
from flamia.quantize.finish import fragment_order
from flamia.quantize.payloads import Payloads, forward_specs
from flamia.quantize.reference import TokenMap, make_all, prepare, token_amax
from flamia.reference import backend
from flamia.reference import backward as twin
from flamia.reference import forward as reference_forward
from flamia.reference.chunks import chunks
from flamia.sm100 import backward_pair, kernels
from flamia.sm100.backward import Backward, compile_backward
from flamia.sm100.backward_pair import PairBackward
from flamia.sm100.work import TILE, Masks
from flamia.worklists import Tiling, work_lists
from softgpu.cutedsl import compiling
from softgpu.machine import Launch

_KERNELS = {}


def kernel(device, head_dim, ratio, masks, dtype=torch.bfloat16, arch="sm_100a", kind=Backward, **options):
    """The compiled kernel, to run on ``device``."""
    out = {torch.bfloat16: cutlass.BFloat16, torch.float16: cutlass.Float16}[dtype]
    key = (head_dim, ratio, masks, dtype, arch, kind, tuple(options.items()))
    if key not in _KERNELS:
        with compiling(softgpu.Device(), arch):
            made = kind(head_dim, ratio, masks, rotate=head_dim == 128, arch=arch, **options)
            _KERNELS[key] = compile_backward(made, out, compile=cute.compile)
    _KERNELS[key].device = device
    return _KERNELS[key]


def offsets(lengths):
    return torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32)


class Case:
    """Seeded packed inputs as payloads, and the twin's gradients.

    spread: tokens differ in size by powers of two of that deviation. dlse: lse has a gradient. edit: changes q, k, v
    and do in place.
    """

    def __init__(
        self,
        len_q,
        len_k,
        heads,
        kv_heads,
        head_dim,
        left=None,
        right=None,
        spread=0.0,
        dlse=False,
        edit=None,
        **recipe,
    ):
        g = torch.Generator().manual_seed(0)
        total_q, total_k = sum(len_q) + 3, sum(len_k) + 2  # tokens of no document at the end

        def tokens(total, heads):
            size = torch.exp2(torch.randn(total, 1, 1, generator=g) * spread)
            return (torch.randn(total, heads, head_dim, generator=g) * size).bfloat16()

        q, do = tokens(total_q, heads), tokens(total_q, heads)
        k, v = tokens(total_k, kv_heads), tokens(total_k, kv_heads)
        # Blocks of different sizes, or a wrong scale would go unseen.
        for x in (q, k, v, do):
            blocks = torch.randint(-2, 3, (len(x) // TOKEN_BLOCK + 1,), generator=g).float().exp2()
            x *= blocks.repeat_interleave(TOKEN_BLOCK)[: len(x), None, None].bfloat16()
        if edit is not None:
            edit(q, k, v, do)
        self.plan = plan = make_plan(flamia.Recipe(**recipe), heads, kv_heads, head_dim, left, right, training=True)
        documents = self.documents = Documents(offsets(len_q), offsets(len_k), total_q, total_k)
        maps = {name: TokenMap.build(documents.cu_seqlens_q, total_q) for name in ("q", "do")}
        maps |= {name: TokenMap.build(documents.cu_seqlens_k, total_k) for name in "kv"}
        sources = {
            name: prepare(x, maps[name], rotate=plan.rotates and name != "v")
            for name, x in zip("qkv", (q, k, v), strict=True)
        }
        items = make_all(forward_specs(plan.recipe, True), sources, maps, per_token=plan.per_token, rounding="up")
        self.payloads = Payloads(items, token_amax(sources["k"]), token_amax(sources["v"]))
        forward = reference_forward.forward(plan, self.payloads, documents)
        gradient = torch.randn(heads, total_q, generator=g) if dlse else None
        with mock.patch.object(backend, "backward", wraps=twin.backward) as called:
            backend.run_backward(
                plan, do, gradient, forward.o.bfloat16(), forward.lse2, forward.row_max, self.payloads, documents, None
            )
        self.arguments = called.call_args.args
        self.want = twin.backward(*self.arguments)
        self.lists, self.pairs = (
            work_lists(documents, left, right, Tiling(backward=keys)) for keys in (TILE, backward_pair.ITEM)
        )
        self.window = (left or 0, right or 0)
        self.used = int(documents.cu_seqlens_q[-1]), int(documents.cu_seqlens_k[-1])
        self._prescales()

    def _prescales(self):
        plan, documents = self.plan, self.documents
        self.token_scale = torch.zeros(plan.heads_q, documents.total_q, dtype=torch.int32)
        for chunk in chunks(documents, plan.heads_kv, plan.ratio, plan.head_dim, plan.left, plan.right):
            made = twin._ChunkBackward(plan, chunk, *self.arguments[1:3], *self.arguments[4:])
            chunk.scatter_table(self.token_scale, made.prescale.to(torch.int32), "q")
        cu = documents.cu_seqlens_q.tolist()
        self.document_scale = torch.zeros(plan.heads_q, len(cu) - 1, dtype=torch.int32)
        for i, (a, b) in enumerate(itertools.pairwise(cu)):
            if b > a:
                self.document_scale[:, i] = self.token_scale[:, a]

    def run(self, launch, dtype=torch.bfloat16, section=1, ctas=2, pairs=False):
        """dq before its rotation in FP32, dk, dv of the kernel; dk and dv start as NaN. pairs: of CTAs."""
        plan, documents, f8 = self.plan, self.documents, torch.float8_e4m3fn
        q, k, v = (self.payloads[name] for name in "qkv")
        _, _, do_payloads, _, lse2, delta, _ = self.arguments
        do = do_payloads["do"]
        dk, dv = (torch.full(v.codes.shape, torch.nan, dtype=dtype) for _ in range(2))
        capacity = column_capacity(documents.total_q, documents.count)
        accumulator = torch.zeros(plan.heads_q, capacity, plan.head_dim, dtype=torch.float16)
        turns = torch.zeros(plan.heads_q, capacity // TOKEN_BLOCK, dtype=torch.int32)
        causal = plan.recipe.accumulator_scale == "causal"
        lists = self.pairs if pairs else self.lists
        launch(
            *(x.codes.view(f8) for x in (q, k, v, do)), dk, dv, accumulator, turns, lse2.contiguous(),
            delta.contiguous(), q.exponents, k.exponents, v.exponents, do.exponents,
            self.token_scale if causal else self.document_scale, lists.backward.items, lists.backward.count,
            documents.cu_seqlens_q, documents.cu_seqlens_k, lists.q.column_starts, plan.score_scale,
            plan.softmax_scale, *self.window, section, ctas,
        )  # fmt: skip
        slabs = accumulator.view(plan.heads_q, -1, 16 * plan.head_dim)
        rows = slabs[..., fragment_order(plan.head_dim).flatten()].view(accumulator.shape).transpose(0, 1)
        sums = TokenMap.build(documents.cu_seqlens_q, documents.total_q).unpad(rows).float()
        return sums * formats.pow2(-self.token_scale).t().unsqueeze(-1) * plan.softmax_scale, dk, dv

    def errors(self, result):
        """Relative RMS of dq, dk and dv; where the twin's is all zeros, as with a single key, the kernel's RMS."""
        dq, dk, dv = self.want
        want = (dq, formats.hadamard(dk) if self.plan.rotates else dk, dv)
        lengths = (self.used[0], self.used[1], self.used[1])
        pairs = [(x[:n], y[:n]) for x, y, n in zip(result, want, lengths, strict=True)]
        return [relative_rms(x, y) if y.any() else x.float().square().mean().sqrt() for x, y in pairs]

    def check(self, result, tolerance=(1e-3, 2e-3, 2e-3)):
        """dq: a few FP16 additions in another order, 2^-11 each; dk and dv: BF16."""
        errors = self.errors(result)
        print(errors)
        for error, bound in zip(errors, tolerance, strict=True):
            assert error < bound, errors
        for x in result[1:]:
            assert x[self.used[1] :].isnan().all()  # keys of no document are not written


CAUSAL, FULL, WINDOW = Masks(False, True), Masks(False, False), Masks(True, True)
MASKS = {
    "full": (FULL, (None, None)),
    "causal": (CAUSAL, (None, 0)),
    "left": (WINDOW, (100, 0)),
    "both": (WINDOW, (50, 30)),
    "past": (Masks(True, False), (60, None)),
}
LENGTHS = [1, 31, 127, 128, 129, 255, 300, 513]
PACKED = [
    ([300], [300]),
    ([129, 0, 31, 127], [129, 5, 31, 127]),
    ([33, 1, 100], [150, 1, 20]),
    ([400], [100]),
    ([100, 3], [513, 300]),
    ([5, 140, 7], [0, 140, 0]),
]
EXACT = dict(exact_operands=True, exact_ds=True, accumulator_scale="causal")
EXACT_KERNEL = dict(exact=True, causal_scale=True)


def equal(first, second):
    return all(torch.equal(x.nan_to_num(), y.nan_to_num()) for x, y in zip(first, second, strict=True))


@pytest.mark.parametrize(
    ("len_q", "len_k"),
    [pytest.param(*one, marks=[] if n in (1, 2, 5) else pytest.mark.slow) for n, one in enumerate(PACKED)],
    ids=str,
)
def test_backward_equals_its_twin(soft_device, len_q, len_k):
    case = Case(len_q, len_k, 2, 1, 128, None, 0)
    case.check(case.run(kernel(soft_device, 128, 2, CAUSAL)))


@pytest.mark.parametrize("mask", ["both", pytest.param("left", marks=pytest.mark.slow)])
def test_windows(soft_device, mask):
    masks, window = MASKS[mask]
    case = Case([300, 20], [300, 77], 2, 1, 64, *window)
    case.check(case.run(kernel(soft_device, 64, 2, masks)))


def test_lengths_behind_odd_offsets(soft_device):
    lengths = [3, 1, 127, 31, 255, 128]
    case = Case(lengths, lengths, 1, 1, 64)
    case.check(case.run(kernel(soft_device, 64, 1, FULL), ctas=3))


@pytest.mark.slow
def test_fp16_gradients(soft_device):
    # FP16 keeps three bits more than BF16.
    case = Case([140, 60], [200, 60], 1, 1, 64)
    case.check(case.run(kernel(soft_device, 64, 1, FULL, torch.float16), torch.float16), (1e-3, 4e-4, 4e-4))


@pytest.mark.parametrize("section", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_shared_kv_heads_and_sections(soft_device, section):
    case = Case([140, 60], [140, 60], 4, 2, 128, None, 0)
    case.check(case.run(kernel(soft_device, 128, 2, CAUSAL), section=section, ctas=3))


def test_tokens_of_very_different_size(soft_device):
    """Exponents of all operands and of dS vary by much, and lse has a gradient."""
    case = Case([200, 70], [200, 70], 2, 1, 128, None, 0, spread=3, dlse=True)
    case.check(case.run(kernel(soft_device, 128, 2, CAUSAL)))


def test_zeros_of_every_operand(soft_device):
    """Their exponents are the smallest there are, and blocks of dS are zeros."""

    def edit(q, k, v, do):
        q[:40], k[32:96], v[64:100], do[100:170] = 0, 0, 0, 0

    case = Case([200], [200], 2, 1, 128, None, 0, edit=edit)
    case.check(case.run(kernel(soft_device, 128, 2, CAUSAL)))


@pytest.mark.parametrize("size", [2.0**-30, pytest.param(2.0**30, marks=pytest.mark.slow)])
def test_gradients_of_any_size(soft_device, size):
    """The prescale keeps FP16's sums in range."""

    def edit(q, k, v, do):
        do *= size

    case = Case([140], [140], 2, 1, 128, None, 0, edit=edit)
    case.check(case.run(kernel(soft_device, 128, 2, CAUSAL)))


def test_schedule_order_changes_no_bit(soft_device, soft_device_shuffled):
    """dk and dv, and dq of one CTA."""
    case = Case([140, 70], [140, 70], 2, 1, 128, None, 0)
    first = case.run(kernel(soft_device, 128, 2, CAUSAL), ctas=1)
    assert equal(first, case.run(kernel(soft_device_shuffled, 128, 2, CAUSAL), ctas=1))


@pytest.mark.parametrize("pairs", [False, True], ids=["one CTA", "pairs"])
def test_a_document_does_not_see_its_neighbours(soft_device, pairs):
    """Bitwise, one CTA or pair: a document at an odd offset, between others that become NaN.

    Documents of one tile of keys: products of a pair that held two of them would multiply zeros by those NaNs.
    """
    lengths = [100, 77, 90] if pairs else [150, 77, 90]
    start, stop = lengths[0], lengths[0] + lengths[1]
    case = Case(lengths, lengths, 1, 1, 64)
    launch = kernel(soft_device, 64, 1, FULL, kind=PairBackward) if pairs else kernel(soft_device, 64, 1, FULL)
    options = dict(ctas=2, pairs=True) if pairs else dict(ctas=1)
    packed = case.run(launch, **options)
    for payload in (*(case.payloads[name] for name in "qkv"), case.arguments[2]["do"]):
        for part in (slice(0, start), slice(stop, None)):
            payload.codes[part], payload.exponents[:, part] = 0, 255  # what a NaN makes of a block
    again = case.run(launch, **options)
    for x, y in zip(packed, again, strict=True):
        assert torch.equal(x[start:stop], y[start:stop])
        assert y[:start].isnan().all()


@pytest.mark.parametrize("mask", ["causal", pytest.param("both", marks=pytest.mark.slow)])
def test_deterministic_order(soft_device, mask, monkeypatch):
    """dq is the same to the bit whoever comes first. CTAs of the device run one after another until they wait.

    With the accumulator's causal scale, whose exponents are per token.
    """
    monkeypatch.setitem(Launch.__init__.__kwdefaults__, "quantum", 300)  # turns that a waiting warp takes
    masks, window = MASKS[mask]
    case = Case([140, 20], [300, 20], 1, 1, 64, *window, accumulator_scale="causal")
    launch = kernel(soft_device, 64, 1, masks, deterministic=True, causal_scale=True)
    alone = case.run(launch, ctas=1)
    case.check(alone)
    assert torch.equal(alone[0], case.run(launch, ctas=2)[0])


def test_exact_operands(soft_device):
    case = Case([3, 140, 31], [3, 140, 31], 2, 1, 128, None, 0, spread=2, dlse=True, **EXACT)
    case.check(case.run(kernel(soft_device, 128, 2, CAUSAL, **EXACT_KERNEL)))


@pytest.mark.parametrize(
    ("head_dim", "arch"),
    [(128, "sm_100a"), *(pytest.param(64, arch, marks=pytest.mark.slow) for arch in kernels.ARCHS.values())],
)
def test_later_tokens_do_not_reach_back(soft_device, head_dim, arch):
    """Exact operands, one CTA: dq of earlier queries keeps its bits when all later tokens become something else."""
    launch, cases = kernel(soft_device, head_dim, 2, CAUSAL, arch=arch, **EXACT_KERNEL), []
    for later in (False, True):

        def edit(q, k, v, do, later=later):
            for x in (q, k, v, do):
                x[75:] = x[75:].flip(0) * 64 if later else x[75:]

        cases.append(Case([19, 131], [19, 131], 2, 1, head_dim, None, 0, spread=2, edit=edit, **EXACT))
    first, second = (case.run(launch, ctas=1)[0] for case in cases)
    assert torch.equal(first[:75], second[:75])
    assert not torch.equal(first[75:], second[75:])


@pytest.mark.parametrize(
    ("head_dim", "heads", "mask"),
    [(64, 1, "full"), *(pytest.param(128, 2, mask, marks=pytest.mark.slow) for mask in ("causal", "both"))],
)
def test_pairs_of_ctas_agree_with_one(soft_device, head_dim, heads, mask):
    """dk and dv to the bit; dq to FP16, in which one CTA's sum has more additions."""
    masks, window = MASKS[mask]
    case = Case([129, 0, 31, 300], [129, 5, 31, 300], heads, 1, head_dim, *window)
    pair = case.run(kernel(soft_device, head_dim, heads, masks, kind=PairBackward), ctas=4, pairs=True)
    case.check(pair)
    one = case.run(kernel(soft_device, head_dim, heads, masks))
    assert equal(pair[1:], one[1:])


@pytest.mark.slow
def test_schedule_order_changes_no_bit_of_a_pair(soft_device, soft_device_shuffled):
    case = Case([300, 70], [300, 70], 2, 1, 128, None, 0, spread=2, dlse=True)
    first = case.run(kernel(soft_device, 128, 2, CAUSAL, kind=PairBackward), pairs=True)
    case.check(first)
    assert equal(first, case.run(kernel(soft_device_shuffled, 128, 2, CAUSAL, kind=PairBackward), pairs=True))


@pytest.mark.slow
@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (4, 1), (8, 1), (8, 2)], ids=str)
def test_pairs_of_ctas_for_other_ratios(soft_device, heads, kv_heads):
    case = Case([140, 60], [140, 60], heads, kv_heads, 64, None, 0, accumulator_scale="causal")
    launch = kernel(soft_device, 64, heads // kv_heads, CAUSAL, kind=PairBackward, causal_scale=True)
    case.check(case.run(launch, ctas=4, section=kv_heads, pairs=True))


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_100a", "sm_103a"])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("exact", [False, True])
def test_every_mask_and_target(soft_device, arch, head_dim, mask, exact):
    """One CTA and, where they can do it, a pair, which agree: dk and dv to the bit, dq to FP16's additions."""
    masks, window = MASKS[mask]
    launch = kernel(soft_device, head_dim, 2, masks, arch=arch, **(EXACT_KERNEL if exact else {}))
    pair = None if exact else kernel(soft_device, head_dim, 2, masks, arch=arch, kind=PairBackward)
    recipe = dict(spread=2.0, **EXACT) if exact else {}
    for len_q, len_k in [*PACKED, *(([n], [n]) for n in LENGTHS), (LENGTHS, LENGTHS), (LENGTHS, LENGTHS[::-1])]:
        case = Case(len_q, len_k, 2, 1, head_dim, *window, **recipe)
        one = case.run(launch, ctas=3)
        case.check(one)
        if pair is not None:
            two = case.run(pair, ctas=4, pairs=True)
            case.check(two)
            assert equal(two[1:], one[1:])


@pytest.mark.slow
@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (2, 2), (4, 1), (8, 1), (8, 2)], ids=str)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_other_ratios(soft_device, heads, kv_heads, head_dim):
    case = Case([140, 60], [140, 60], heads, kv_heads, head_dim, None, 0)
    case.check(case.run(kernel(soft_device, head_dim, heads // kv_heads, CAUSAL)))


@pytest.mark.slow
@pytest.mark.parametrize("options", [dict(stages=2), dict(emulated=0), dict(causal_scale=True)], ids=str)
def test_options(soft_device, options):
    scale = "causal" if "causal_scale" in options else "sequence"
    case = Case([300, 200], [300, 290], 2, 1, 128, None, 0, dlse=True, accumulator_scale=scale)
    case.check(case.run(kernel(soft_device, 128, 2, CAUSAL, **options)))


@pytest.mark.slow
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("exact", [False, True])
def test_schedule_orders_of_deterministic_kernels(soft_device, soft_device_shuffled, mask, exact, monkeypatch):
    """All results, several CTAs."""
    monkeypatch.setitem(Launch.__init__.__kwdefaults__, "quantum", 300)
    masks, window = MASKS[mask]
    case = Case([270, 1, 31], [300, 1, 129], 2, 1, 64, *window, **(EXACT if exact else {}))
    options = dict(deterministic=True, **(EXACT_KERNEL if exact else {}))
    first = case.run(kernel(soft_device, 64, 2, masks, **options), ctas=2)
    case.check(first)
    assert equal(first, case.run(kernel(soft_device_shuffled, 64, 2, masks, **options), ctas=3))


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_100a", "sm_103a"])
def test_kernels_of_a_plan(soft_device, arch):
    """What ``flamia compile`` builds."""
    case = Case([200, 31], [200, 31], 2, 2, 64, None, 0, spread=2, **EXACT)
    (name,) = kernels.backward_kernels(case.plan, torch.bfloat16, arch)
    with compiling(soft_device, arch):
        launch = name.build()
    case.check(case.run(launch))
    case = Case([200, 31], [200, 31], 2, 2, 64, None, 0)
    plan = dataclasses.replace(case.plan, deterministic=False)
    (name,) = kernels.backward_kernels(plan, torch.bfloat16, arch, pairs=True)
    with compiling(soft_device, arch):
        launch = name.build()
    case.check(case.run(launch, pairs=True))


@pytest.mark.slow
def test_both_targets_give_the_same_bits(soft_device):
    case = Case([140, 60], [140, 60], 2, 1, 128, None, 0)
    first, second = (
        case.run(kernel(soft_device, 128, 2, CAUSAL, arch=arch, emulated=4), ctas=1) for arch in ("sm_100a", "sm_103a")
    )
    assert equal(first, second)
    assert relative_rms(first[0][:200], case.want[0][:200]) < 1e-3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(head_dim=96), "head_dim must be 64 or 128, got 96"),
        (dict(arch="sm_90a"), "arch must be sm_100a or sm_103a, got 'sm_90a'"),
        (dict(stages=4), "stages must be 2 or 3, got 4"),
        (dict(emulated=17), "emulated must be 0 to 16 pairs of 16, got 17"),
    ],
)
def test_what_no_kernel_is_made_for_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        Backward(**dict(dict(head_dim=64, ratio=1, masks=CAUSAL, rotate=False), **options))
