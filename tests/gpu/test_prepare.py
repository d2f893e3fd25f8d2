"""Row preparation at full size on the device: the twins' bits, no host synchronisation, replay with other lengths."""

import dataclasses
import math

import pytest
import torch

pytest.importorskip("triton")

from flamia.benchmarks.workloads import lengths, offsets
from flamia.documents import Documents
from flamia.plan import Plan
from flamia.quantize import reference as twin
from flamia.quantize.finish import finish_dk_dv, finish_dq
from flamia.quantize.lists import work_lists
from flamia.quantize.payloads import Payloads, backward_specs, forward_specs
from flamia.quantize.prepare import prepare_backward, prepare_forward
from flamia.recipe import get_recipe
from flamia.reference import backend, folded
from flamia.worklists import work_lists as lists_twin

HEADS, DIM = 16, 128


def same(ours, theirs, name):
    assert ours.dtype == theirs.dtype, name
    if ours.is_floating_point():
        ours, theirs = ours.contiguous().view(torch.int32), theirs.contiguous().view(torch.int32)
    assert torch.equal(ours, theirs), f"{name}: {int((ours != theirs).sum())} of {ours.numel()} differ"


def same_payloads(ours, theirs):
    for key in theirs:
        for part in dataclasses.fields(theirs[key]):
            same(getattr(ours[key], part.name), getattr(theirs[key], part.name), f"{key}.{part.name}")


def same_lists(ours, theirs):
    for side in ("q", "k"):
        for part in ("blocks", "groups", "column_starts"):
            same(getattr(getattr(ours, side), part), getattr(getattr(theirs, side), part), f"{side}.{part}")
    for side in ("forward", "backward"):
        for part in ("items", "count"):
            same(getattr(getattr(ours, side), part), getattr(getattr(theirs, side), part), f"{side}.{part}")


class Row:
    """A packed row whose scale varies from token to token."""

    def __init__(self, packing, tokens, seed=0, tail=0):
        g = torch.Generator("cuda").manual_seed(seed)
        self.tokens = tokens
        self.cu = offsets(lengths(packing, tokens - tail), "cuda")
        self.documents = Documents(self.cu, self.cu, tokens, tokens)

        def tensor():
            x = torch.randn(tokens, HEADS, DIM, generator=g, device="cuda")
            x *= 2.0 ** torch.randint(-3, 4, (tokens, 1, 1), generator=g, device="cuda")
            return x.to(torch.bfloat16)

        self.q, self.k, self.v, self.do, self.o = (tensor() for _ in range(5))
        self.lse2 = torch.randn(HEADS, tokens, generator=g, device="cuda") * 2 + 5
        self.row_max = self.lse2 - torch.rand(HEADS, tokens, generator=g, device="cuda") * 9
        self.dlse = torch.randn(HEADS, tokens, generator=g, device="cuda")
        self.lse2[:, int(self.cu[-1]) :], self.row_max[:, int(self.cu[-1]) :] = -torch.inf, 0.0


def plan_of(recipe):
    return Plan(get_recipe(recipe), "device", (), DIM, HEADS, HEADS, 1 / math.sqrt(DIM), None, 0, False, True)


def forward_twin(plan, row, columns):
    tokens = twin.TokenMap.build(row.cu, row.tokens)
    items, amax = {}, {}
    for name in "qkv":  # one source at a time: each is an FP32 copy of its tensor
        source = twin.prepare(getattr(row, name), tokens, rotate=plan.rotates and name != "v")
        specs = [s for s in forward_specs(plan.recipe, True, columns) if s.source == name]
        options = dict(per_token=plan.per_token, rounding="up")
        items |= twin.make_all(specs, {name: source}, {name: tokens}, **options)
        amax[name] = twin.token_amax(source)
    return Payloads(items, amax["k"], amax["v"])


def gradients_twin(plan, row, payloads, columns, monkeypatch):
    """What the reference hands to its backward."""
    seen = {}

    def capture(plan, payloads, do_payloads, documents, *rest):
        seen["items"], seen["delta"], seen["norms"] = do_payloads.items, rest[-2], rest[-1]
        return tuple(torch.zeros(1, 1, DIM, device="cuda") for _ in range(3))

    make_all = backend.make_all
    monkeypatch.setattr(backend, "make_all", lambda _, *a, **o: make_all(backward_specs(plan.recipe, columns), *a, **o))
    monkeypatch.setattr(backend, "backward", capture)
    monkeypatch.setattr(folded, "backward", capture)
    backend.run_backward(plan, row.do, row.dlse, row.o, row.lse2, row.row_max, payloads, row.documents, None)
    return seen


@pytest.mark.parametrize("packing", ["one", "web"])
@pytest.mark.parametrize("tokens", [16384, 65536])
@pytest.mark.parametrize("recipe", ["mxfp8-folded", "mxfp8", "nvfp4", "fp4", "mxfp8-folded-exact"])
def test_full_size_gives_the_twins_bits(recipe, tokens, packing, monkeypatch):
    row, plan = Row(packing, tokens, tail=3), plan_of(recipe)
    lists = work_lists(row.documents, None, 0)
    same_lists(lists, lists_twin(row.documents, None, 0))
    ours = prepare_forward(plan, row.q, row.k, row.v, lists, columns=True)
    theirs = forward_twin(plan, row, True)
    same_payloads(ours.payloads.items, theirs.items)
    for name in ("k_amax", "v_amax"):
        table = getattr(theirs, name)
        same(getattr(ours.payloads, name), table if plan.reads_token_maxima else table.new_empty(0), name)
    made = prepare_backward(
        plan, row.do, row.dlse, row.o, row.lse2, row.row_max, ours.payloads, row.documents, lists, columns=True
    )
    seen = gradients_twin(plan, row, theirs, True, monkeypatch)
    same_payloads(made.payloads, seen["items"])
    same(made.delta, seen["delta"].contiguous(), "delta")
    same(made.norm, seen["norms"][..., 0].contiguous(), "norm")
    assert not made.accumulator.any()


@pytest.mark.parametrize("packing", ["web", "tiny"])
def test_lists_of_many_documents(packing):
    tokens = 65536 if packing == "web" else 131072
    cu = offsets(lengths(packing, tokens), "cuda")
    documents = Documents(cu, cu, tokens, tokens)
    same_lists(work_lists(documents, None, 0), lists_twin(documents, None, 0))


def whole(plan, row, lists, outputs):
    """Preparation of one training call, forward and backward, without the attention between."""
    made = prepare_forward(plan, row.q, row.k, row.v, lists, columns=True)
    gradients = prepare_backward(
        plan, row.do, row.dlse, row.o, row.lse2, row.row_max, made.payloads, row.documents, lists, columns=True
    )
    dq, dk, dv, sums = outputs
    finish_dq(plan, gradients, made.k_maxima, made.v_maxima, row.documents, lists.q, dq, fragments=True)
    finish_dk_dv(plan, sums, sums, dk, dv)
    return made, gradients


@pytest.mark.parametrize("recipe", ["mxfp8-folded", "mxfp8-folded-exact", "nvfp4", "fp4"])
def test_one_graph_serves_other_lengths_without_synchronising(recipe):
    tokens, plan = 4096, plan_of(recipe)
    row = Row("web", tokens)
    documents = row.documents.count
    outputs = (
        *(torch.empty_like(row.q) for _ in range(3)),
        torch.ones(tokens, HEADS, DIM, device="cuda"),
    )

    def call():
        lists = work_lists(row.documents, None, 0)
        return lists, *whole(plan, row, lists, outputs)

    call()  # compiles
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        call()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        lists, made, gradients = call()
    other = sorted(torch.randint(0, tokens + 1, (documents - 1,)).tolist())
    row.cu.copy_(torch.tensor([0, *other, tokens], dtype=torch.int32))
    graph.replay()
    torch.cuda.synchronize()
    fresh_lists, fresh, fresh_gradients = call()
    same_lists(lists, fresh_lists)
    same_lists(lists, lists_twin(row.documents, None, 0))
    same_payloads(made.payloads.items, fresh.payloads.items)
    same_payloads(made.payloads.items, forward_twin(plan, row, True).items)
    same_payloads(gradients.payloads, fresh_gradients.payloads)
    for part in ("delta", "norm", "maxima", "prescale", "addend", "unit", "b", "power"):
        same(getattr(gradients, part), getattr(fresh_gradients, part), part)


def test_a_new_packing_compiles_nothing():
    from flamia.quantize import triton_gradients, triton_lists, triton_operands

    plan = plan_of("mxfp8-folded")
    kernels = (triton_lists._fill_kernel, triton_operands._operand_kernel, triton_gradients._gradient_kernel)

    def compiled():
        return [sum(len(cache[0]) for cache in kernel.device_caches.values()) for kernel in kernels]

    def run(packing, tokens):
        row = Row(packing, tokens)
        lists = work_lists(row.documents, None, 0)
        outputs = (*(torch.empty_like(row.q) for _ in range(3)), torch.ones(tokens, HEADS, DIM, device="cuda"))
        whole(plan, row, lists, outputs)

    run("web", 4096)
    before = compiled()
    for packing, tokens in (("web", 4096 + 77), ("one", 1001), ("one", 16), ("tiny", 33)):
        run(packing, tokens)
    assert compiled() == before
