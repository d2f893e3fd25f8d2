"""Device preparation against the reference twins, bit for bit: payloads, maxima, delta, constants, gradients.

Triton's interpreter takes a second for a few hundred tokens. So every recipe meets few calls, chosen to have each head
dimension, dtype, head ratio, mask and kind of length; the matrix draws many more.
"""

import os

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before the kernels are defined

pytest.importorskip("triton")

import dataclasses
import math
from unittest import mock

from flamia import formats, launch
from flamia.documents import Documents
from flamia.plan import Plan
from flamia.quantize import reference as twin
from flamia.quantize.columns import columns_of
from flamia.quantize.finish import document_prescale, finish_dk_dv, finish_dq, fragment_order
from flamia.quantize.gradients import running_maxima
from flamia.quantize.lists import work_lists
from flamia.quantize.payloads import COLUMN_ORDERS, Payloads, backward_specs, forward_specs
from flamia.quantize.prepare import prepare_backward, prepare_forward
from flamia.recipe import get_recipe
from flamia.reference import backend, folded
from flamia.reference.backward import prescale
from flamia.reference.chunks import chunks

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PHASES = (Phase.explicit, Phase.generate)  # shrinking takes minutes in the interpreter
many = settings(max_examples=8, phases=PHASES, suppress_health_check=[HealthCheck.too_slow])
RECIPES = ("mxfp8", "mxfp8-exact", "mxfp8-folded", "mxfp8-folded-exact", "nvfp4", "nvfp4-folded", "fp4")
FP4 = pytest.param("fp4", marks=pytest.mark.slow)


def same(ours, theirs, name=""):
    assert ours.shape == theirs.shape, name
    assert ours.dtype == theirs.dtype, name
    if ours.is_floating_point():
        size = {4: torch.int32, 2: torch.int16}[ours.element_size()]
        ours, theirs = ours.contiguous().view(size), theirs.contiguous().view(size)
    assert torch.equal(ours, theirs), f"{name}: {int((ours != theirs).sum())} of {ours.numel()} differ"


def same_payloads(ours, theirs):
    assert list(ours) == list(theirs)
    for key in theirs:
        for part in dataclasses.fields(theirs[key]):
            same(getattr(ours[key], part.name), getattr(theirs[key], part.name), f"{key}.{part.name}")


def offsets(lengths):
    return torch.tensor([0, *lengths], dtype=torch.int64).cumsum(0).to(torch.int32).to(DEVICE)


def plan_of(recipe, head_dim, heads_q, heads_kv, left=None, right=0):
    recipe = get_recipe(recipe) if isinstance(recipe, str) else recipe
    scale = 1 / math.sqrt(head_dim)
    return Plan(recipe, "device", (), head_dim, heads_q, heads_kv, scale, left, right, True, True)


lengths = st.lists(st.one_of(st.integers(0, 5), st.integers(20, 70)), min_size=1, max_size=4)


class Case:
    """Packed tensors with outliers, zeros, one huge and one tiny document, garbage past the last document."""

    def __init__(self, lengths_q, lengths_k, heads_q, heads_kv, dim, dtype, tail, seed, strided=False):
        g = torch.Generator().manual_seed(seed)
        self.documents = Documents(offsets(lengths_q), offsets(lengths_k), sum(lengths_q) + tail, sum(lengths_k) + tail)

        def tensor(tokens, heads, cu):
            wide = torch.randn(tokens, heads + strided, dim + 8 * strided, generator=g) * 0.5
            x = wide[:, strided:, :dim]
            magnitude = torch.randint(-6, 7, (tokens, 1, 1), generator=g)
            x *= 2.0**magnitude
            x[torch.rand(x.shape[:2], generator=g) < 0.1] = 0.0
            x[torch.rand(x.shape, generator=g) < 0.02] *= 30
            x[int(cu[-1]) :] = float("nan")  # belongs to no document: must not be read
            return wide.to(dtype).to(DEVICE)[:, strided:, :dim]

        cu_q, cu_k = self.documents.cu_seqlens_q, self.documents.cu_seqlens_k
        total_q, total_k = self.documents.total_q, self.documents.total_k
        self.q, self.do, self.o = (tensor(total_q, heads_q, cu_q) for _ in range(3))
        self.k, self.v = (tensor(total_k, heads_kv, cu_k) for _ in range(2))
        rows = (heads_q, total_q)
        self.lse2 = (torch.randn(rows, generator=g) * 3).to(DEVICE)
        self.row_max = (self.lse2.cpu() - torch.rand(rows, generator=g) * 9).to(DEVICE)
        unseen = (torch.rand(rows, generator=g) < 0.1).to(DEVICE)
        self.lse2[unseen], self.row_max[unseen] = -torch.inf, 0.0
        self.lse2[:, int(cu_q[-1]) :], self.row_max[:, int(cu_q[-1]) :] = -torch.inf, 0.0
        self.dlse = torch.randn(rows, generator=g).to(DEVICE)

    def maps(self):
        documents = self.documents
        q = twin.TokenMap.build(documents.cu_seqlens_q, documents.total_q)
        k = twin.TokenMap.build(documents.cu_seqlens_k, documents.total_k)
        return {"q": q, "do": q, "k": k, "v": k}

    def forward_twin(self, plan, columns):
        maps = self.maps()
        sources = {
            "q": twin.prepare(self.q, maps["q"], rotate=plan.rotates),
            "k": twin.prepare(self.k, maps["k"], rotate=plan.rotates),
            "v": twin.prepare(self.v, maps["v"]),
        }
        specs = forward_specs(plan.recipe, True, columns)
        items = twin.make_all(specs, sources, maps, per_token=plan.per_token, rounding="up")
        return Payloads(items, twin.token_amax(sources["k"]), twin.token_amax(sources["v"]))


@dataclasses.dataclass(frozen=True)
class Call:
    """What a drawn call has, chosen by hand."""

    lengths_q: tuple[int, ...]
    lengths_k: tuple[int, ...]
    kv: int
    ratio: int
    dim: int
    dtype: torch.dtype
    tail: int
    strided: bool
    columns: bool
    with_dlse: bool
    right: int | None

    def __str__(self):
        return f"d{self.dim}"

    def drawn(self):
        heads = self.kv * self.ratio, self.kv
        case = Case(self.lengths_q, self.lengths_k, *heads, self.dim, self.dtype, self.tail, self.dim, self.strided)
        return case, self.kv, self.ratio, self.dim


CALLS = [
    Call((33, 0), (5, 20), 1, 2, 32, torch.bfloat16, 0, False, True, False, 0),
    Call((1, 20), (1, 20), 1, 1, 64, torch.float16, 5, True, False, True, None),
    Call((7,), (40,), 2, 1, 96, torch.bfloat16, 5, True, False, True, 3),
    Call((3, 33), (3, 33), 1, 2, 128, torch.float16, 0, False, True, True, 0),
]


def pairs(first):
    """Two of the calls for each recipe, in turns; ``first`` is where the turns start."""
    return [
        pytest.param(recipe, call, marks=pytest.mark.slow if recipe == "fp4" else ())
        for n, recipe in enumerate(RECIPES)
        for call in CALLS[(n + first) % 2 :: 2]
    ]


@st.composite
def cases(draw, dims=(32, 64, 96, 128)):
    q = draw(lengths)
    k = q if draw(st.booleans()) else [draw(st.integers(0, 70)) for _ in q]
    kv, ratio = draw(st.sampled_from([(1, 1), (2, 1), (1, 2)]))
    dtype = draw(st.sampled_from([torch.bfloat16, torch.float16]))
    dim, tail = draw(st.sampled_from(dims)), draw(st.sampled_from([0, 5]))
    return Case(q, k, kv * ratio, kv, dim, dtype, tail, draw(st.integers(0, 99)), draw(st.booleans())), kv, ratio, dim


def document_maxima(table, cu):
    pairs = list(zip(cu.tolist(), cu.tolist()[1:], strict=False))
    if not pairs:
        return table.new_zeros(table.shape[0], 0)
    return torch.stack([table[:, a:b].amax(1) if b > a else table.new_zeros(table.shape[0]) for a, b in pairs], 1)


@pytest.mark.parametrize(("recipe", "call"), pairs(0), ids=str)
def test_operands_are_the_twins(recipe, call):
    check_operands(recipe, call.drawn(), call.columns)


@pytest.mark.matrix
@pytest.mark.parametrize("recipe", RECIPES)
@many
@given(cases(), st.booleans())
def test_operands_of_drawn_calls(recipe, drawn, columns):
    check_operands(recipe, drawn, columns)


def check_operands(recipe, drawn, columns):
    case, kv, ratio, dim = drawn
    plan = plan_of(recipe, dim, kv * ratio, kv)
    ours = prepare_forward(plan, case.q, case.k, case.v, work_lists(case.documents, None, 0), columns=columns)
    theirs = case.forward_twin(plan, columns)
    same_payloads(ours.payloads.items, theirs.items)
    for name in ("k_amax", "v_amax"):
        table = getattr(theirs, name)
        same(getattr(ours.payloads, name), table if plan.reads_token_maxima else table.new_empty(0), name)
    same(ours.k_maxima, document_maxima(theirs.k_amax, case.documents.cu_seqlens_k), "k_maxima")
    same(ours.v_maxima, document_maxima(theirs.v_amax, case.documents.cu_seqlens_k), "v_maxima")


@pytest.fixture
def poison():
    """Allocations are filled: NaN, or the largest integer."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize(("lengths", "tail"), [([1, 31, 0, 33, 127], 5), ([], 40), ([0, 0, 0], 33)], ids=str)
@pytest.mark.parametrize("recipe", ["nvfp4", FP4])
def test_padding_and_tokens_of_no_document_are_written(recipe, lengths, tail, poison):
    """Most lengths leave blocks of the column payloads to no token at all."""
    case = Case(lengths, lengths, 1, 1, 32, torch.bfloat16, tail, 0)
    blocks = work_lists(case.documents, None, 0).q.blocks
    assert (blocks[:, 2] == 0).any() == (len(lengths) > 0)
    check_operands(recipe, (case, 1, 1, 32), True)


@pytest.mark.parametrize("rotate", [False, True])
@pytest.mark.parametrize("dim", [32, pytest.param(64, marks=pytest.mark.slow), 128, 256])
def test_rotation_is_a_switch_at_every_head_dimension(rotate, dim):
    case = Case([40], [33], 1, 1, dim, torch.bfloat16, 0, dim)
    recipe = dataclasses.replace(get_recipe("fp4" if dim == 64 else "mxfp8"), rotate=rotate)
    plan = plan_of(recipe, dim, 1, 1)
    ours = prepare_forward(plan, case.q, case.k, case.v, work_lists(case.documents, None, 0), columns=True)
    same_payloads(ours.payloads.items, case.forward_twin(plan, True).items)


@pytest.mark.parametrize("order", COLUMN_ORDERS)
@pytest.mark.parametrize("dim", [32, 64, 96, 128, 256])
def test_columns_of_some_heads_are_the_twins(dim, order):
    case = Case([40, 0, 3, 33], [1], 1, 1, dim, torch.bfloat16, 5, 0)
    g = torch.Generator().manual_seed(dim)
    codes = torch.randint(1, 256, (81, 5, dim), generator=g, dtype=torch.uint8).to(DEVICE)[:, 1:4]
    same(
        columns_of(codes, work_lists(case.documents, None, 0).q, order),
        twin.columns_of(codes, case.maps()["q"], order),
    )


@pytest.mark.parametrize("recipe", ["mxfp8", "nvfp4"])
def test_columns_left_for_later_are_those_made_at_once(recipe):
    case = Case([40, 0, 3], [40, 0, 3], 2, 1, 64, torch.bfloat16, 5, 0)
    plan, lists = plan_of(recipe, 64, 2, 1), work_lists(case.documents, None, 0)
    whole, rest = (
        prepare_forward(plan, case.q, case.k, case.v, lists, columns=True, later=later).payloads.items
        for later in ((), ("q", "k"))
    )
    for name in whole:
        same(rest[name].codes, whole[name].codes, name)
        if recipe == "mxfp8" and name in ("q", "k"):
            assert rest[name].columns.numel() == 0
            order = {"q": "mma", "k": "pairs"}[name]
            tables = lists.q if name == "q" else lists.k
            same(columns_of(rest[name].codes, tables, order), whole[name].columns, name)
    same(rest["v"].columns, whole["v"].columns)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("recipe", ["mxfp8", "nvfp4", FP4])
def test_what_is_not_finite_stays_in_its_blocks_and_is_seen(recipe, value):
    case = Case([40, 20], [40, 20], 1, 1, 64, torch.bfloat16, 0, 0)
    for x in (case.q, case.k, case.v):
        x[3, 0, 7] = value
    plan = plan_of(recipe, 64, 1, 1)
    ours = prepare_forward(plan, case.q, case.k, case.v, work_lists(case.documents, None, 0), columns=True)
    same_payloads(ours.payloads.items, case.forward_twin(plan, True).items)


def gradients_twin(plan, case, payloads, dlse, columns):
    """What the reference hands to its backward: payloads, delta, norm, (norm, |dlse|)."""
    seen = {}

    def capture(plan, payloads, do_payloads, documents, *rest):
        seen["items"], seen["delta"], seen["norms"] = do_payloads.items, rest[-2], rest[-1]
        return (torch.zeros(t.shape, device=DEVICE) for t in (case.q, case.k, case.v))

    def with_columns(specs, *arguments, **options):
        return make_all(backward_specs(plan.recipe, columns), *arguments, **options)

    make_all = backend.make_all
    patch = mock.patch.multiple(backend, backward=capture, make_all=with_columns)
    with patch, mock.patch.object(folded, "backward", capture):
        backend.run_backward(plan, case.do, dlse, case.o, case.lse2, case.row_max, payloads, case.documents, None)
    return seen["items"], seen["delta"], seen["norms"][..., 0], seen["norms"]


def run_gradients(recipe, case, kv, ratio, dim, columns, dlse, right=0):
    plan = plan_of(recipe, dim, kv * ratio, kv, None, right)
    payloads = case.forward_twin(plan, False)
    lists = work_lists(case.documents, None, 0)
    ours = prepare_backward(
        plan, case.do, dlse, case.o, case.lse2, case.row_max, payloads, case.documents, lists, columns=columns
    )
    return plan, payloads, lists, ours, gradients_twin(plan, case, payloads, dlse, columns)


@pytest.mark.parametrize(("recipe", "call"), pairs(1), ids=str)
def test_gradients_are_the_twins(recipe, call):
    check_gradients(recipe, call.drawn(), call.columns, call.with_dlse, call.right)


@pytest.mark.matrix
@pytest.mark.parametrize("recipe", RECIPES)
@many
@given(cases(), st.booleans(), st.booleans(), st.sampled_from([0, None, 3]))
def test_gradients_of_drawn_calls(recipe, drawn, columns, with_dlse, right):
    check_gradients(recipe, drawn, columns, with_dlse, right)


def check_gradients(recipe, drawn, columns, with_dlse, right):
    case, kv, ratio, dim = drawn
    dlse = case.dlse if with_dlse else None
    plan, payloads, _, ours, twins = run_gradients(recipe, case, kv, ratio, dim, columns, dlse, right)
    items, delta, norm, do_norm = twins
    same_payloads(ours.payloads, items)
    same(ours.norm, norm.contiguous(), "norm")
    same(ours.delta, delta.contiguous(), "delta")
    cu = case.documents.cu_seqlens_q
    same(ours.maxima[0], document_maxima(norm, cu), "largest norm")
    same(ours.maxima[1], document_maxima(do_norm[..., 1], cu), "largest dlse")
    assert (ours.accumulator == 0).all()
    if plan.recipe.accumulator_scale == "causal":
        for chunk in chunks(case.documents, kv, ratio, dim, plan.left, plan.right):
            theirs = prescale(plan, chunk, chunk.gather(do_norm.transpose(0, 1), "q"), payloads)
            n = chunk.group.len_q
            same(chunk.table(ours.prescale, "q")[:, :n], theirs[:, :n], "prescale")


FOLDED = ["mxfp8-folded", "mxfp8-folded-exact", "nvfp4-folded"]


@pytest.mark.slow
@pytest.mark.parametrize("recipe", FOLDED)
def test_folded_constants_are_the_twins(recipe):
    """A document longer than the 256 queries that share C, and rows that are dead for each of the reasons."""
    check_constants(recipe, [40, 300], 0)


@pytest.mark.matrix
@pytest.mark.parametrize("recipe", FOLDED)
@many
@given(st.lists(st.sampled_from([1, 40, 256, 300, 520]), min_size=1, max_size=2), st.integers(0, 99))
def test_folded_constants_of_drawn_lengths(recipe, lengths, seed):
    check_constants(recipe, lengths, seed)


def check_constants(recipe, lengths, seed):
    case = Case(lengths, lengths, 2, 1, 32, torch.bfloat16, 3, seed)
    plan, payloads, _, ours, (items, delta, _, do_norm) = run_gradients(recipe, case, 1, 2, 32, False, None)
    empty = torch.empty(0)
    for chunk in chunks(case.documents, 1, 2, 32, None, 0):
        theirs = folded._ChunkBackward(
            plan, chunk, payloads, Payloads(items, empty, empty), case.lse2, case.row_max, delta, do_norm
        )
        n = chunk.group.len_q
        same(chunk.table(ours.unit, "q")[:, :n], theirs.unit[:, :n], "unit")
        same(chunk.table(ours.b, "q")[:, :n], theirs.b[:, :n], "b")
        power = torch.where(theirs.live, theirs.e_t - theirs.c, 0) + folded.PROBABILITY_SHIFT
        addend = -theirs.m if plan.recipe.exact_operands else power - theirs.m
        addend = torch.where(theirs.live, addend, -torch.inf)
        same(chunk.table(ours.addend, "q")[:, :n], addend[:, :n], "addend")
        if plan.recipe.exact_operands:
            same(chunk.table(ours.power, "q")[:, :n], power[:, :n], "power")


def test_running_maxima_restart_at_documents():
    cu = offsets([700, 0, 1, 800, 30])
    g = torch.Generator().manual_seed(0)
    tables = [torch.rand(2, 1540, generator=g).to(DEVICE) for _ in range(2)]
    documents = Documents(cu, cu, 1540, 1540)
    for ours, table in zip(running_maxima(documents, *tables), tables, strict=True):
        for a, b in zip(cu.tolist(), cu.tolist()[1:], strict=False):
            same(ours[:, a:b], table[:, a:b].cummax(1).values if b > a else table[:, a:b])


@pytest.mark.parametrize("recipe", ["mxfp8-folded", FP4])
def test_more_tiles_than_the_second_number_of_a_grid_holds(recipe, monkeypatch):
    """Seven blocks of operands and of columns, three groups of gradients, in layers of two: some programs have none."""
    monkeypatch.setattr(launch, "LAYER", 2)
    assert launch.head_grid(7, 3) == (3, 2, 4)
    case = Case([33, 70, 7], [33, 70, 7], 2, 1, 32, torch.bfloat16, 0, 0)
    drawn = case, 1, 2, 32
    check_operands(recipe, drawn, True)
    check_gradients(recipe, drawn, True, False, 0)
    check_dq(recipe, recipe != "fp4", drawn)
    g = torch.Generator().manual_seed(0)
    codes = torch.randint(1, 256, (110, 2, 32), generator=g, dtype=torch.uint8).to(DEVICE)
    tables = work_lists(case.documents, None, 0).q
    same(columns_of(codes, tables, "mma"), twin.columns_of(codes, case.maps()["q"], "mma"))


SCALES = ["mxfp8", "mxfp8-folded-exact", "nvfp4", FP4]  # of the accumulator: each kind


@pytest.mark.parametrize("recipe", SCALES)
@pytest.mark.parametrize(("fragments", "call"), [(False, CALLS[2]), (True, CALLS[3])], ids=str)
def test_dq_is_the_twins(recipe, fragments, call):
    check_dq(recipe, fragments, call.drawn())


@pytest.mark.matrix
@pytest.mark.parametrize("recipe", SCALES)
@pytest.mark.parametrize("fragments", [False, True])
@many
@given(cases(dims=(32, 96, 128)))
def test_dq_of_drawn_calls(recipe, fragments, drawn):
    check_dq(recipe, fragments, drawn)


def check_dq(recipe, fragments, drawn):
    case, kv, ratio, dim = drawn
    plan, payloads, lists, gradients, (_, _, _, do_norm) = run_gradients(recipe, case, kv, ratio, dim, False, case.dlse)
    k_maxima, v_maxima = (document_maxima(t, case.documents.cu_seqlens_k) for t in (payloads.k_amax, payloads.v_amax))
    g = torch.Generator().manual_seed(1)
    heads, capacity = kv * ratio, gradients.accumulator.shape[1]
    sums = (torch.randn(heads, capacity, dim, generator=g) * 100).to(torch.float16).to(DEVICE)
    maps = case.maps()
    positions = maps["q"].position
    sums[:, capacity - 1] = 0 if capacity and positions.numel() and int(positions.max()) >= capacity else sums[:, -1]
    rows = sums.transpose(0, 1)  # [C, N, D]
    packed = maps["q"].unpad(rows)
    expected = torch.zeros(case.q.shape, device=DEVICE)
    done = torch.zeros(case.q.shape[0], dtype=torch.bool, device=DEVICE)
    for chunk in chunks(case.documents, kv, ratio, dim, plan.left, plan.right):
        p = prescale(plan, chunk, chunk.gather(do_norm.transpose(0, 1), "q"), payloads)
        if plan.recipe.accumulator_scale == "sequence":
            ours = document_prescale(plan, gradients, k_maxima, v_maxima, case.documents)
            heads_of = slice(chunk.heads[0] * ratio, chunk.heads[1] * ratio)
            index = torch.tensor(chunk.group.index, device=DEVICE)
            same(ours[heads_of][:, index].t().flatten(), p[:, 0].contiguous(), "prescale of documents")
        scale = formats.pow2(-p) * plan.softmax_scale
        chunk.scatter(expected, chunk.gather(packed, "q").to(torch.float32) * scale.unsqueeze(-1), "q")
        done[chunk._index("q").flatten()] = True
    expected = (formats.hadamard(expected) if plan.rotates else expected).to(case.q.dtype)
    if fragments:
        stored = torch.empty_like(sums)
        slabs = sums.unflatten(1, (-1, 16)).flatten(2)  # [N, C / 16, 16 D]
        stored = torch.empty_like(slabs)
        stored[..., fragment_order(dim).flatten().to(DEVICE)] = slabs
        sums = stored.view(sums.shape)
    gradients.accumulator.copy_(sums)
    out = torch.full(case.q.shape, float("nan"), dtype=case.q.dtype, device=DEVICE)
    finish_dq(plan, gradients, k_maxima, v_maxima, case.documents, lists.q, out, fragments=fragments)
    same(out[done], expected[done], "dq")
    assert not out.isnan().any()


@pytest.mark.parametrize("ratio", [1, 3])
@pytest.mark.parametrize("dim", [64, 128])
def test_dk_and_dv_are_the_twins(ratio, dim):
    g = torch.Generator().manual_seed(0)
    plan = plan_of("mxfp8", dim, 2 * ratio, 2)
    sums = [torch.randn(70, 2 * ratio, dim, generator=g).to(DEVICE) for _ in range(2)]
    dk, dv = (torch.full((70, 2, dim), float("nan"), dtype=torch.bfloat16, device=DEVICE) for _ in range(2))
    finish_dk_dv(plan, *sums, dk, dv)
    totals = []
    for x in (sums[0] * plan.softmax_scale, sums[1]):
        parts = x.unflatten(1, (2, ratio)).unbind(2)
        total = parts[0]
        for part in parts[1:]:
            total = total + part
        totals.append(total)
    same(dk, (formats.hadamard(totals[0]) if plan.rotates else totals[0]).to(torch.bfloat16), "dk")
    same(dv, totals[1].to(torch.bfloat16), "dv")


def test_bad_input_is_refused():
    case = Case([8], [8], 1, 1, 32, torch.bfloat16, 0, 0)
    lists = work_lists(case.documents, None, 0)
    plan = plan_of("mxfp8", 32, 1, 1)
    with pytest.raises(ValueError, match="head dimension 48"):
        prepare_forward(plan, torch.zeros(8, 1, 48, dtype=torch.bfloat16, device=DEVICE), case.k, case.v, lists)
    with pytest.raises(ValueError, match="contiguous along the head dimension"):
        prepare_forward(plan, case.q.permute(2, 1, 0).contiguous().permute(2, 1, 0), case.k, case.v, lists)
    with pytest.raises(ValueError, match="BF16 or FP16"):
        prepare_forward(plan, case.q.float(), case.k, case.v, lists)
    with pytest.raises(ValueError, match="ablations"):
        prepare_forward(plan_of("leaky-up-1x32", 32, 1, 1), case.q, case.k, case.v, lists)
