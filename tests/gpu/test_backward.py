"""The Hopper backward through the public calls, on the device: against the reference backend, and what it promises.

On a machine without the DSL: `flamia compile` elsewhere into one folder, and FLAMIA_KERNELS here.

    flamia compile --out FOLDER --ratios 1,4 --recipes mxfp8,mxfp8-exact,nvfp4,nvfp4-exact
    flamia compile --out FOLDER --ratios 4 --masks causal --recipes mxfp8,mxfp8-exact,nvfp4,nvfp4-exact --deterministic
    flamia compile --out FOLDER --head-dims 128 --ratios 3 --masks causal
    flamia compile --out FOLDER --head-dims 128 --ratios 1 --masks causal --dtypes fp16
"""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from torch import Tensor

import flamia
from flamia import flash_attn_func, flash_attn_varlen_func
from flamia.benchmarks.timing import peak_bytes
from flamia.reference.exact import exact_attention_backward

pytest.importorskip("triton")
pytest.importorskip("tvm_ffi")
sm90, parts = (pytest.importorskip(f"flamia.sm90.{name}") for name in ("backend", "parts"))
HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = pytest.mark.skipif(not HOPPER, reason="needs a Hopper device")

# Relative RMS. The twin adds products as the tensor core does (products="hopper"). dq is added up in FP16 in any order,
# 2^-11 of the running sum for each of its key tiles, and a last bit of ex2.approx moves one code of P and dS in some
# 10^5; the order of FP32 sums, which scores of NVFP4 are, no more. Measured with MXFP8: 2.7e-3 at most for dq and dk,
# dk and dv often equal to the bit. Where one such code is most of a row, as for a query of two keys, it moves that row
# by up to a step, 1/8: of so few rows as one in 500 no more is asked.
BOUND, STEP, FEW = 5e-3, 1 / 8, 500


def offsets(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths], device="cuda").cumsum(0).to(torch.int32)


def tensors(total_q: int, total_k: int, heads: int = 4, kv: int = 1, dim: int = 128, seed: int = 0) -> list[Tensor]:
    """q, k, v and do."""
    g = torch.Generator("cuda").manual_seed(seed)
    shapes = ((total_q, heads), (total_k, kv), (total_k, kv), (total_q, heads))
    return [torch.randn(n, h, dim, generator=g, device="cuda").bfloat16() for n, h in shapes]


def gradients(q, k, v, do, cu_q, cu_k=None, *, dlse: Tensor | None = None, **options) -> tuple[Tensor, Tensor, Tensor]:
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    # Memory that launches leave unset would show this.
    poison = torch.full((8 * q.numel(),), torch.nan, device="cuda")
    del poison
    o, lse = flash_attn_varlen_func(*leaves, cu_q, cu_k, return_lse=True, **options)
    outputs, given = ([o], [do]) if dlse is None else ([o, lse], [do, dlse])
    made = torch.autograd.grad(outputs, leaves, given)
    plan = flamia.last_plan()
    assert plan is not None
    assert plan.backend == options.get("backend", "sm90")
    return made


def agree(q, k, v, do, cu_q, cu_k=None, *, recipe="mxfp8", **options) -> None:
    ours = gradients(q, k, v, do, cu_q, cu_k, recipe=recipe, **options)
    twin = dataclasses.replace(flamia.get_recipe(recipe), variant="folded", products="hopper")
    theirs = gradients(q, k, v, do, cu_q, cu_k, recipe=twin, backend="reference", **options)
    for name, x, y in zip(("dq", "dk", "dv"), ours, theirs, strict=True):
        assert (x.dtype, x.shape) == (y.dtype, y.shape)
        assert x.isfinite().all(), name
        error, size = (z.double().norm(dim=-1).flatten() for z in (x.double() - y.double(), y))
        bound = BOUND * size.norm() + 1e-9
        if len(error):
            worst = error.topk(1 + len(error) // FEW).indices
            assert (error[worst] <= STEP * size[worst] + bound).all(), name
            error[worst] = 0
        assert error.norm() <= bound, name


MASKS = {
    "full": {},
    "causal": dict(causal=True),
    "window": dict(window_size=(100, 0)),
    "both sides": dict(window_size=(50, 30)),
}
LENGTHS = {
    "one": ([700], None),
    "packed": ([129, 0, 31, 127, 1, 33, 300], None),
    "unequal": ([33, 1, 100, 0, 257], [150, 1, 20, 9, 513]),
}


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("heads", [(2, 2), (8, 2)], ids=str)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("recipe", ["mxfp8", "mxfp8-exact", "nvfp4", "nvfp4-exact"])
def test_agrees_with_the_reference(dim, heads, mask, lengths, recipe):
    len_q, len_k = LENGTHS[lengths]
    inputs = tensors(sum(len_q) + 3, sum(len_k or len_q) + 3, *heads, dim)
    agree(*inputs, offsets(len_q), offsets(len_k) if len_k else None, recipe=recipe, **MASKS[mask])


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("recipe", ["mxfp8", "nvfp4"])
def test_deterministic_calls_repeat_bit_by_bit_and_agree(dim, recipe):
    inputs, cu = tensors(3000, 3000, 8, 2, dim), offsets([1, 2000, 77, 922])
    options = dict(causal=True, deterministic=True, recipe=recipe)
    agree(*inputs, cu, **options)
    first = gradients(*inputs, cu, **options)
    for _ in range(5):
        for x, y in zip(gradients(*inputs, cu, **options), first, strict=True):
            assert torch.equal(x, y)


@pytest.mark.parametrize("recipe", ["mxfp8", "mxfp8-exact", "nvfp4", "nvfp4-exact"])
def test_parts_of_the_heads_are_the_whole_bit_by_bit(recipe, monkeypatch):
    inputs, cu = tensors(65537, 65537, 16, 4), offsets([1, 40000, 77, 922, 24500])
    options = dict(causal=True, deterministic=True, recipe=recipe)
    split = gradients(*inputs, cu, **options)
    plan = flamia.last_plan()
    assert plan is not None
    assert parts.backward_parts(plan, 65537, 65537) == 2
    for module in (parts, sm90):
        monkeypatch.setattr(module, "backward_parts", lambda plan, total_q, total_k: 1)
    for x, y in zip(gradients(*inputs, cu, **options), split, strict=True):
        assert torch.equal(x, y)


def test_memory_of_a_training_call_in_parts():
    q, k, v, do = tensors(65536, 65536, 16, 16)
    cu = offsets([65536])
    leaves = [x.requires_grad_() for x in (q, k, v)]

    def step(_: None) -> tuple[Tensor, ...]:
        o = flash_attn_varlen_func(*leaves, cu, causal=True, recipe="mxfp8")
        return torch.autograd.grad(o, leaves, do)

    _, peak = peak_bytes(lambda: None, step)
    assert peak < 6.4 * 2 * q.numel()  # BF16 tensors of q's size; docs/kernels.md counts 6.25 and tables


@pytest.mark.parametrize("neighbour", ["other", "huge", "nan"])
@pytest.mark.parametrize("recipe", ["mxfp8", "mxfp8-exact", "nvfp4"])
def test_gradients_of_a_document_do_not_see_its_neighbours(neighbour, recipe):
    inputs, cu, mine = tensors(900, 900), offsets([301, 233, 366]), slice(301, 534)
    options = dict(causal=True, deterministic=True, recipe=recipe)
    alone = gradients(*(x[mine] for x in inputs), offsets([233]), **options)
    for x in inputs:
        fill = {"other": x.flip(0), "huge": 1e4 * x, "nan": torch.full_like(x, torch.nan)}[neighbour]
        x[:301], x[534:] = fill[:301], fill[534:]
    for x, y in zip(gradients(*inputs, cu, **options), alone, strict=True):
        assert torch.equal(x[mine], y)


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("later", ["other", "huge"])
@pytest.mark.parametrize("recipe", ["mxfp8-exact", "nvfp4-exact"])
def test_exact_options_keep_later_tokens_from_earlier_dq(dim, later, recipe):
    """Bitwise: dq of a document's first part when q, k, v and do of everything behind it are replaced."""
    lengths = [1, 700, 333, 128, 438]
    inputs, cu = tensors(1600, 1600, dim=dim), offsets(lengths)
    behind = torch.cat([torch.arange(n) >= 5 * n // 8 for n in lengths]).cuda()
    options = dict(causal=True, deterministic=True, recipe=recipe)
    first, *_ = gradients(*inputs, cu, **options)
    for x, y in zip(inputs, tensors(1600, 1600, dim=dim, seed=1), strict=True):
        x[behind] = y[behind] * (64 if later == "huge" else 1)
    second, *_ = gradients(*inputs, cu, **options)
    assert torch.equal(first[~behind], second[~behind])
    assert not torch.equal(first[behind], second[behind])


@pytest.mark.parametrize("tokens", [4096, 16384])
@pytest.mark.parametrize("mask", ["causal", "full"])
def test_values_and_gradients_with_a_mean(tokens, mask):
    """V = dO = 1 + 0.1 N(0, 1): dS is a small difference of large numbers, which Gaussian data hide.

    o is held against the same codes: that E4M3 rounds such V to -3.2e-3 of its mean is the format's doing.
    """
    q, k, *rest = tensors(tokens, tokens, 2, 2)
    v, do = ((1 + 0.1 * x.float()).bfloat16() for x in rest)
    cu, options = offsets([tokens]), MASKS[mask]
    dq, _, _ = gradients(q, k, v, do, cu, **options)
    want, _, _ = exact_attention_backward(q, k, v, do, cu, **options)
    # The twin on 4096 tokens and one head: 0.963 causal, 0.953 full.
    assert torch.cosine_similarity(dq.double().flatten(), want.flatten(), dim=0) >= 0.94
    o = flash_attn_varlen_func(q, k, v, cu, **options)[-64:].double()
    ends = (offsets([64]), offsets([tokens]))
    same = flash_attn_varlen_func(q[-64:], k, v, *ends, recipe="mxfp8-folded", backend="reference", **options).double()
    assert ((o - same).mean() / same.mean()).abs() < 1e-3


def test_sums_over_32768_queries_have_no_bias():
    """dO = 1 + 0.1 N(0, 1): the tensor core's accumulator truncates, and never promoted loses percents.

    Slope against exact gradients. The twin on 4096 queries: dV -8e-4; dK -3e-3, of which chance is 1e-3.
    """
    queries, keys = 32768, 8192
    q, k, v, do = tensors(queries, keys, 4, 4)
    do = (1 + 0.1 * do.float()).bfloat16()
    cu = (offsets([queries]), offsets([keys]))
    made, exact = gradients(q, k, v, do, *cu), exact_attention_backward(q, k, v, do, *cu)
    for name, x, y in zip(("dk", "dv"), made[1:], exact[1:], strict=True):
        slope = (x.double() * y).sum() / y.pow(2).sum()
        assert abs(slope.item() - 1) < 0.01, name


def test_gradient_through_lse():
    inputs, cu = tensors(500, 500), offsets([150, 350])
    dlse = torch.randn(4, 500, generator=torch.Generator("cuda").manual_seed(3), device="cuda")
    agree(*inputs, cu, causal=True, dlse=dlse)


def test_fp16():
    inputs = [x.half() for x in tensors(500, 500, 2, 2)]
    agree(*inputs, offsets([150, 350]), causal=True)


@pytest.mark.parametrize(
    ("cu_q", "cu_k"),
    [
        ([0, 0, 1208, 2048, 2048], [0, 2538, 4280, 5120, 8192]),
        ([0, 0, 1023], [0, 1, 2045]),
        ([0, 76, 110, 256], [0, 1, 2, 3]),
        ([0, 0], [0, 5]),
        ([0, 5], [0, 0]),
    ],
    ids=["empty", "tiny and empty", "more queries than keys", "no query", "no key"],
)
def test_empty_tiny_and_unequal_documents(cu_q, cu_k):
    inputs = tensors(cu_q[-1], cu_k[-1])
    agree(*inputs, *(torch.tensor(x, dtype=torch.int32, device="cuda") for x in (cu_q, cu_k)), causal=True)


def test_empty_documents_among_single_tokens_and_odd_gqa():
    agree(*tensors(4, 4, 9, 3), offsets([1, 0, 1, 1, 0, 0, 1]), causal=True)


def test_a_poisoned_tail_changes_nothing():
    inputs, cu = tensors(500, 500), offsets([130, 331])
    clean = gradients(*inputs, cu, causal=True, deterministic=True)
    for x in inputs:
        x[461:] = math.nan
    for x, y in zip(gradients(*inputs, cu, causal=True, deterministic=True), clean, strict=True):
        assert torch.equal(x[:461], y[:461])
        assert (x[461:] == 0).all()


def test_strided_gradients():
    q, k, v, do = tensors(500, 500)
    cu = offsets([150, 350])
    options = dict(causal=True, deterministic=True)
    wide = torch.stack((do, do), 1)[:, 0]
    ones = torch.ones((), dtype=torch.bfloat16, device="cuda").expand(do.shape)
    for strided in (wide, ones):
        ours = gradients(q, k, v, strided, cu, **options)
        for x, y in zip(ours, gradients(q, k, v, strided.contiguous(), cu, **options), strict=True):
            assert torch.equal(x, y)


def test_large_logits_and_outliers_are_finite():
    for scale in (3.0, 30.0):
        q, k, v, do = tensors(1024, 1024)
        for x in gradients(scale * q, scale * k, scale * v, do, offsets([1024]), causal=True):
            assert x.isfinite().all()
    q, k, v, do = tensors(1024, 1024)
    q[..., 7] *= 100
    k[..., 7] *= 100
    agree(q, k, v, do, offsets([500, 524]), causal=True)


def test_no_synchronisation_and_replays_with_other_lengths():
    total, capacity = 3000, 9
    q, k, v, do = tensors(total, total)
    for x in (q, k, v):
        x.requires_grad_()
    cu = offsets([total] + [0] * (capacity - 1))

    def step():
        o = flash_attn_varlen_func(q, k, v, cu, causal=True, deterministic=True)
        return torch.autograd.grad(o, (q, k, v), do)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for lengths in ([3000], [1, 0, 500, 33, 129, 2000], [100] * 9):
        cu.copy_(offsets(lengths + [0] * (capacity - len(lengths))))
        for x in captured:
            x.fill_(torch.nan)
        graph.replay()
        for x, y in zip(captured, step(), strict=True):
            assert torch.equal(x, y)


def test_compiled_whole():
    def layer(q, k, v):
        return flash_attn_func(q * 2, k, v, causal=True, deterministic=True).float().pow(2).sum()

    def run(function):
        leaves = [x.view(2, 250, *x.shape[1:]).detach().requires_grad_() for x in tensors(500, 500)[:3]]
        return torch.autograd.grad(function(*leaves), leaves)

    for x, y in zip(run(torch.compile(layer, fullgraph=True)), run(layer), strict=True):
        assert (x.double() - y.double()).norm() <= 1e-3 * y.double().norm()  # fused arithmetic around the call
