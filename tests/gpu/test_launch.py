"""Row preparation from a folder, through the CUDA driver: the bits of Triton's launches, anywhere torch launches."""

import dataclasses
import os
import subprocess
import sys
import threading
import time

import pytest
import torch

pytest.importorskip("triton")

from flamia import compiler, driver, launch
from flamia.backends import call_launches
from flamia.documents import Documents
from flamia.plan import Plan
from flamia.quantize.columns import columns_of
from flamia.quantize.finish import finish_dq
from flamia.quantize.lists import work_lists
from flamia.quantize.prepare import prepare_backward, prepare_forward
from flamia.quantize.tail import clear_tail, finish_forward
from flamia.recipe import Recipe

TOKENS, HEADS, DIM = 3000, 4, 64
PLAN = Plan(Recipe(variant="folded"), "sm90", (), DIM, HEADS, HEADS, 0.125, None, 0, False, True)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A folder with all launches of the plan for this device."""
    folder = tmp_path_factory.mktemp("launches")
    launches = call_launches(PLAN, torch.bfloat16, driver.target(torch.cuda.current_device()))
    for one in launches:
        compiler.compile_to(one, folder)
    compiler.write_index(folder, [compiler.index_entry(one) for one in launches])
    return folder


@pytest.fixture
def ready(made, monkeypatch):
    """Launches come from the folder, and Triton's JIT is out of reach."""

    def refuse(kernel):
        raise AssertionError(f"{kernel} is left to the JIT")

    def use():
        monkeypatch.setenv("FLAMIA_KERNELS", str(made))
        monkeypatch.setattr(launch, "_jit", refuse)
        monkeypatch.setattr(launch, "_found", {})
        monkeypatch.setattr(launch, "_called", {})

    monkeypatch.delenv("FLAMIA_KERNELS", raising=False)
    return use


@pytest.fixture
def inputs():
    g = torch.Generator("cuda").manual_seed(0)
    q, k, v, do, o = (torch.randn(TOKENS, HEADS, DIM, generator=g, device="cuda").bfloat16() for _ in range(5))
    lse2 = torch.randn(HEADS, TOKENS, generator=g, device="cuda")
    cu = torch.tensor([0, 1001, 1001, TOKENS - 7], dtype=torch.int32, device="cuda")
    return q, k, v, do, o, lse2, Documents(cu, cu, TOKENS, TOKENS)


def whole(q, k, v, do, o, lse2, documents):
    """Every tensor that row preparation of a call makes; what the attention kernels would fill has fixed numbers."""
    lists = work_lists(documents, None, 0)
    operands = prepare_forward(PLAN, q, k, v, lists, columns=True)
    rows = prepare_forward(PLAN, q, k, v, lists, columns=True, later=("q", "k")).payloads
    later = [columns_of(rows["q"].codes[:, 1:3], lists.q, "mma"), columns_of(rows["k"].codes, lists.k, "pairs")]
    row_max, tail = lse2 - 1, [x.clone() for x in (o, lse2, lse2)]
    lse = finish_forward(*tail, documents.cu_seqlens_q)
    gradients = prepare_backward(PLAN, do, lse, o, lse2, row_max, operands.payloads, documents, lists, columns=True)
    accumulator = gradients.accumulator.clone()
    gradients.accumulator.copy_(torch.arange(accumulator.numel(), device="cuda").view_as(accumulator) % 97)
    dq, dk, dv = (o.clone() for _ in range(3))
    finish_dq(PLAN, gradients, operands.k_maxima, operands.v_maxima, documents, lists.q, dq, fragments=True)
    clear_tail(dk, dv, documents.cu_seqlens_k)
    payloads = [*operands.payloads.items.values(), *gradients.payloads.values()]
    parts = [getattr(p, f.name) for p in payloads for f in dataclasses.fields(p)]
    constants = [gradients.delta, gradients.norm, gradients.maxima, gradients.addend, gradients.unit, gradients.b]
    tables = [*(x for side in (lists.q, lists.k) for x in (side.blocks, side.groups, side.column_starts))]
    tables += [x for work in (lists.forward, lists.backward) for x in (work.items, work.count, work.claims, work.total)]
    return [*tables, *parts, *later, *tail, lse, accumulator, *constants, dq, dk, dv]


def same(ours, theirs):
    for n, (x, y) in enumerate(zip(ours, theirs, strict=True)):
        assert torch.equal(x.nan_to_num(7e4), y.nan_to_num(7e4)) if x.is_floating_point() else torch.equal(x, y), n


def elsewhere(x):
    """The same numbers an odd number of elements past an aligned address, a row in steps of an odd stride."""
    tokens, heads, dim = x.shape
    flat = x.new_empty(tokens * (heads * dim + 3) + 1)
    view = flat[1:].view(tokens, heads * dim + 3)[:, : heads * dim].unflatten(1, (heads, dim))
    return view.copy_(x)


@pytest.mark.parametrize("place", [lambda x: x, elsewhere], ids=["aligned", "odd"])
def test_the_bits_of_tritons_launches(ready, inputs, place):
    *tensors, lse2, documents = inputs
    theirs = whole(*tensors, lse2, documents)
    ready()
    same(whole(*map(place, tensors), lse2, documents), theirs)


def test_streams_graphs_and_threads(ready, inputs):
    theirs = whole(*inputs)
    ready()
    launch.preload(call_launches(PLAN, torch.bfloat16, driver.target(torch.cuda.current_device())))
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        ours = whole(*inputs)
    stream.synchronize()
    same(ours, theirs)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = whole(*inputs)
    for x in captured:
        x.fill_(1)
    graph.replay()
    same(captured, theirs)
    found = []
    thread = threading.Thread(target=lambda: found.extend(whole(*inputs)))
    thread.start()
    thread.join()
    same(found, theirs)


FIRST_CALL = """
import sys, time
from importlib.abc import MetaPathFinder
import torch
torch.cuda.init()  # torch itself asks whether there is a Triton
class Refuse(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("triton", "cutlass"):
            raise ModuleNotFoundError(name, name=name)
sys.meta_path.insert(0, Refuse())
import flamia
q, k, v = (torch.randn(1000, 2, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
cu = torch.tensor([0, 1000], dtype=torch.int32, device="cuda")
o = (q @ q.transpose(1, 2)).sum()  # what torch itself starts up
torch.cuda.synchronize()
start = time.perf_counter()
o = flamia.flash_attn_varlen_func(q, k, v, cu, causal=True)
o.sum().backward()
torch.cuda.synchronize()
print(time.perf_counter() - start)
"""


@pytest.mark.skipif(not os.environ.get("FLAMIA_KERNELS"), reason="needs a folder of ready kernels: FLAMIA_KERNELS")
def test_the_first_call_of_a_process_takes_less_than_a_second():
    """The folder must have the kernels of mxfp8, D = 128, MHA, causal, with the backward."""
    start = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", FIRST_CALL], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    print(f"first call {done.stdout.strip()} s, the whole process {time.perf_counter() - start:.1f} s")
    assert float(done.stdout) < 1
