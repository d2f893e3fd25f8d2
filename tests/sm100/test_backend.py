"""The Blackwell backend from q, k and v to gradients: its launches on a software device, against the reference backend.

Which also runs under the public functions, with tensors of the CPU taken for a B200's or B300's.
"""

import contextlib
import dataclasses

import pytest
import torch

pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")
pytest.importorskip("tvm_ffi", reason="needs apache-tvm-ffi")
pytest.importorskip("triton", reason="needs triton")

from reference_cases import make_plan, relative_rms

import flamia
import softgpu
from flamia import attention, operators
from flamia.documents import Documents
from flamia.reference import backend as reference
from flamia.sm100 import backend, kernels
from softgpu.cutedsl import compiling

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="Triton is not interpreted where there is a device")
COMPILED = {}
MULTIPROCESSORS = 3


def slow(*values):
    """A case for the matrix alone."""
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.fixture
def blackwell(monkeypatch, soft_device):
    """The backend with CPU tensors: kernels run on a software device, Triton is interpreted. Sets the target."""

    def load(kernel):
        if kernel not in COMPILED:
            with compiling(softgpu.Device(), kernel.arch):
                COMPILED[kernel] = kernel.build()
        COMPILED[kernel].device = soft_device
        return COMPILED[kernel]

    def of(arch):
        monkeypatch.setattr(backend, "target", lambda index: arch)

    monkeypatch.setattr(backend, "load", load)
    monkeypatch.setattr(backend, "device_sizes", lambda index: (MULTIPROCESSORS, 1 << 19))
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    of("sm_100a")
    return of


def native_plan(heads, kv_heads, head_dim, left=None, right=None, training=False, deterministic=False, **options):
    plan = make_plan(flamia.Recipe(**options), heads, kv_heads, head_dim, left, right, training)
    return dataclasses.replace(plan, backend="sm100", deterministic=deterministic)


def packed(len_q, len_k, heads, kv_heads, head_dim, tail=0, dtype=torch.bfloat16, seed=0):
    g = torch.Generator().manual_seed(seed)
    totals = (sum(len_q) + tail, sum(len_k) + tail, sum(len_k) + tail)
    q, k, v = (
        torch.randn(n, h, head_dim, generator=g).to(dtype)
        for n, h in zip(totals, (heads, kv_heads, kv_heads), strict=True)
    )
    cu = [torch.tensor([0, *torch.tensor(n).cumsum(0)], dtype=torch.int32) for n in (len_q, len_k)]
    return q, k, v, Documents(*cu, totals[0], totals[1])


def gradients(plan, q, k, v, do, dlse, documents):
    o, _, result, kept = backend.run_forward(plan, q, k, v, documents)
    return backend.run_backward(plan, do, dlse, o, result.lse2, result.row_max, kept, documents)


EXACT = dict(exact_operands=True, exact_ds=True, accumulator_scale="causal")
UNEQUAL = ([140, 0, 33], [150, 5, 20])
EQUAL = ([140, 0, 133], [140, 0, 133])


@pytest.mark.parametrize("arch", ["sm_100a", slow("sm_103a")])
@pytest.mark.parametrize(
    ("window", "options"),
    [
        ((None, 0), {}),
        slow((60, 20), {}),
        slow((None, None), dict(row_sum="weights")),
        ((None, 0), dict(exact_operands=True)),
    ],
    ids=str,
)
def test_from_tensors_to_outputs(blackwell, arch, window, options):
    blackwell(arch)
    plan = native_plan(2, 1, 64, *window, **options)
    q, k, v, documents = packed(*UNEQUAL, 2, 1, 64, tail=7)
    q[-7:], k[-7:], v[-7:] = torch.nan, torch.nan, torch.nan
    o, lse, result, kept = backend.run_forward(plan, q, k, v, documents)
    want_o, _, want_lse, want, _ = reference.run_forward(plan, q, k, v, documents, None, None)
    # Both round o to BF16: 2^-9 relative at most each, sqrt(2) * 1.1e-3 RMS together; kernel against twin 2e-3.
    assert relative_rms(o, want_o) < 3e-3
    seen = want_lse.isfinite()
    assert torch.equal(lse.isfinite(), seen)
    assert (lse[~seen] == -torch.inf).all()
    # The bounds of test_forward: a flipped code moves a row that has few keys.
    assert (lse - want_lse)[seen].abs().max() < 0.05
    assert torch.allclose(result.row_max, want.row_max, rtol=1e-6, atol=1e-6)
    assert (o[-7:] == 0).all()
    assert kept == []


def test_items_are_claimed_where_some_see_more_than_others(blackwell, soft_device):
    q, k, v, documents = packed([300, 20], [300, 20], 2, 1, 64)
    for right, claimed in ((0, True), (None, False)):
        backend.run_forward(native_plan(2, 1, 64, None, right), q, k, v, documents)
        claims = [name for name in soft_device.reports[-1].opcodes if name.startswith("clusterlaunchcontrol")]
        assert bool(claims) is claimed


@pytest.mark.parametrize(("heads", "deterministic"), [(1, False), slow(2, True)], ids=str)
def test_what_a_backward_needs_is_kept_in_the_announced_layout(blackwell, heads, deterministic):
    """Items of the backward have 256 keys where pairs of CTAs do it."""
    plan = native_plan(2, 2 // heads, 64, None, 0, training=True, deterministic=deterministic)
    q, k, v, documents = packed([40, 33], [40, 33], 2, 2 // heads, 64)
    *_, kept = backend.run_forward(plan, q, k, v, documents)
    announced = backend.empty_kept(plan, q, k, 2)
    assert len(kept) == len(announced)
    for ours, theirs in zip(kept, announced, strict=True):
        assert (ours.shape, ours.dtype, ours.stride()) == (theirs.shape, theirs.dtype, theirs.stride())
    # A custom operator refuses outputs that share memory.
    used = [x.untyped_storage().data_ptr() for x in kept if x.numel()]
    assert len(set(used)) == len(used)
    assert backend.tiling(plan, documents).backward == (256 if heads == 1 else 128)


@pytest.mark.parametrize("arch", ["sm_100a", slow("sm_103a")])
@pytest.mark.parametrize(
    ("heads", "head_dim", "lengths", "window", "deterministic", "options"),
    [
        ((2, 2), 64, EQUAL, (None, 0), False, {}),  # by pairs of CTAs
        ((2, 1), 64, UNEQUAL, (None, 0), False, {}),
        slow((2, 1), 64, UNEQUAL, (None, 0), True, {}),
        slow((2, 2), 64, EQUAL, (60, 20), False, dict(accumulator_scale="causal")),
        slow((2, 1), 64, UNEQUAL, (60, 20), True, dict(accumulator_scale="causal")),
        slow((2, 2), 64, EQUAL, (None, None), True, {}),
        ((2, 1), 64, UNEQUAL, (None, 0), False, EXACT),
        slow((2, 2), 64, EQUAL, (None, 0), True, EXACT),
        slow((2, 2), 128, EQUAL, (None, 0), False, {}),  # q and k are rotated
        slow((4, 1), 128, UNEQUAL, (None, 0), True, EXACT),
    ],
    ids=str,
)
def test_from_gradients_of_outputs_to_those_of_inputs(
    blackwell, arch, heads, head_dim, lengths, window, deterministic, options
):
    blackwell(arch)
    plan = native_plan(*heads, head_dim, *window, training=True, deterministic=deterministic, **options)
    q, k, v, documents = packed(*lengths, *heads, head_dim, tail=7)
    do = packed(*lengths, *heads, head_dim, tail=7, seed=1)[0]
    dlse = torch.randn(heads[0], len(q), generator=torch.Generator().manual_seed(2))
    for x in (q, k, v, do):
        x[-7:] = torch.nan
    pairs = heads[0] == heads[1] and not deterministic
    assert (backend.tiling(plan, documents).backward == 256) is pairs
    got = gradients(plan, q, k, v, do, dlse, documents)
    want_o, _, _, want, payloads = reference.run_forward(plan, q, k, v, documents, None, None)
    expected = reference.run_backward(plan, do, dlse, want_o, want.lse2, want.row_max, payloads, documents, None)
    # What test_backward allows the kernel, and two roundings to BF16, 1.1e-3 RMS each; delta has o's flipped codes.
    for name, x, y in zip(("dq", "dk", "dv"), got, expected, strict=True):
        assert x.dtype == torch.bfloat16
        assert relative_rms(x, y) < 6e-3, name
        assert (x[-7:] == 0).all()
    names = backend.kernel_names(plan, "backward", do, documents)
    assert [f"backward{'_pair' if pairs else ''}[{arch}]" in name for name in names] == [
        False,
        False,
        True,
        False,
        False,
    ]


def test_inputs_of_any_strides(blackwell):
    """Slices of one tensor with heads first, and channels that are not contiguous; the same bits as copies."""
    plan = native_plan(2, 2, 64, None, 0, training=True, deterministic=True)
    q, k, v, documents = packed([70, 31], [70, 31], 2, 2, 64)
    do = packed([70, 31], [70, 31], 2, 2, 64, seed=1)[0][:, :, :1].expand(-1, -1, 64)  # as that of a sum
    want = gradients(plan, q, k, v, do.contiguous(), None, documents)
    strange = torch.stack((q, k, v), 1).transpose(0, 2).contiguous()  # [heads, 3, T, D]
    q, k, v = (strange[:, i].transpose(0, 1) for i in range(3))
    v = v.transpose(1, 2).contiguous().transpose(1, 2)
    assert v.stride(2) != 1
    assert not q.is_contiguous()
    for x, y in zip(gradients(plan, q, k, v, do, None, documents), want, strict=True):
        assert torch.equal(x, y)


@pytest.mark.parametrize(("len_q", "len_k"), [([0, 0], [5, 0]), ([5, 3], [0, 0]), ([], []), ([3, 0], [0, 7])], ids=str)
@pytest.mark.parametrize("training", [False, True])
def test_nothing_to_attend_to(blackwell, len_q, len_k, training):
    plan = native_plan(2, 1, 64, None, 0, training=training)
    q, k, v, documents = packed(len_q, len_k, 2, 1, 64)
    o, lse, result, kept = backend.run_forward(plan, q, k, v, documents)
    assert o.shape == q.shape
    assert (o == 0).all()
    assert (lse == -torch.inf).all()
    assert (result.row_max == 0).all()
    if training:
        got = backend.run_backward(plan, torch.ones_like(o), None, o, result.lse2, result.row_max, kept, documents)
        for x, y in zip(got, (q, k, v), strict=True):
            assert x.shape == y.shape
            assert (x == 0).all()


@pytest.mark.parametrize("neighbour", [slow("other"), "nan"])
def test_a_document_does_not_see_its_neighbours(blackwell, neighbour):
    plan = native_plan(2, 1, 64, None, 0, training=True, deterministic=True)
    q, k, v, documents = packed([37, 70, 90], [37, 70, 90], 2, 1, 64)
    do, *_ = packed([37, 70, 90], [37, 70, 90], 2, 1, 64, seed=1)
    mine = slice(37, 107)
    cu = torch.tensor([0, 70], dtype=torch.int32)
    alone_of = Documents(cu, cu, 70, 70)
    parts = [x[mine] for x in (q, k, v, do)]
    alone = [*backend.run_forward(plan, *parts[:3], alone_of)[:2], *gradients(plan, *parts, None, alone_of)]
    for x in (q, k, v, do):
        fill = {"other": x.flip(0), "nan": torch.full_like(x, torch.nan)}
        x[:37], x[107:] = fill[neighbour][:37], fill[neighbour][107:]
    o, lse, *_ = backend.run_forward(plan, q, k, v, documents)
    together = [o[mine], lse[:, mine], *(x[mine] for x in gradients(plan, q, k, v, do, None, documents))]
    for name, x, y in zip(("o", "lse", "dq", "dk", "dv"), together, alone, strict=True):
        assert torch.equal(x, y), name


@pytest.mark.parametrize("lengths", [slow([140]), [70, 5, 90]], ids=["one", "packed"])
def test_exact_recipes_keep_later_tokens_from_earlier_rows(blackwell, lengths):
    """Every document's second half becomes another sample, V of sizes from 2^-20 to 2^20; o, lse, dq before it stay."""
    plan = native_plan(2, 1, 64, None, 0, training=True, deterministic=True, **EXACT)
    q, k, v, documents = packed(lengths, lengths, 2, 1, 64, tail=3)
    do = packed(lengths, lengths, 2, 1, 64, tail=3, seed=2)[0]

    def results():
        o, lse, *_ = backend.run_forward(plan, q, k, v, documents)
        return o, lse.t(), gradients(plan, q, k, v, do, None, documents)[0]

    first = results()
    later = torch.cat([torch.arange(n) >= n // 2 for n in lengths] + [torch.zeros(3, dtype=torch.bool)])
    sizes = torch.exp2(torch.linspace(-20, 20, len(later))).view(-1, 1, 1)
    others = [*packed(lengths, lengths, 2, 1, 64, tail=3, seed=1)[:3], packed(lengths, lengths, 2, 1, 64, 3, seed=3)[0]]
    for x, y in zip((q, k, v, do), others, strict=True):
        x[later] = (y * sizes if x is v else 64 * y).to(x.dtype)[later]
    for x, y in zip(first, results(), strict=True):
        assert torch.equal(x[~later], y[~later])
        assert not torch.equal(x[later], y[later])


def test_lengths_documents_and_heads_compile_nothing(blackwell):
    def call(lengths, heads, kv_heads):
        q, k, v, documents = packed(lengths, lengths, heads, kv_heads, 64)
        backend.run_forward(native_plan(heads, kv_heads, 64, None, 0), q, k, v, documents)

    call([40], 2, 1)
    before = set(COMPILED)
    for case in (([33, 1, 0, 7], 2, 1), ([1], 6, 3), ([20] * 4, 4, 2)):
        call(*case)
    assert set(COMPILED) == before


@pytest.mark.parametrize("kind", ["batched", slow("packed")])
def test_the_public_call_runs_the_kernels(blackwell, monkeypatch, kind):
    """From attention through operators and autograd: outputs, gradients, and ``last_plan()``."""
    g = torch.Generator().manual_seed(0)
    shape = (2, 70) if kind == "batched" else (140,)
    q, k, v, do = (torch.randn(*shape, 2, 64, generator=g).bfloat16() for _ in range(4))
    cu = torch.tensor([0, 100, 100, 131], dtype=torch.int64)  # and tokens of no document

    def call(named):
        inputs = [x.clone().requires_grad_() for x in (q, k, v)]
        options = dict(causal=True, return_lse=True, backend=named)
        if kind == "batched":
            o, lse = flamia.flash_attn_func(*inputs, **options)
        else:
            o, lse = flamia.flash_attn_varlen_func(*inputs, cu, **options)
        plan = flamia.last_plan()
        (o * do).sum().backward()
        return [o.detach(), lse.detach(), *(x.grad for x in inputs)], plan, flamia.last_plan()

    want = call("reference")[0]
    native = attention.native_backend
    monkeypatch.setattr(attention, "_backend", lambda named, device: "sm100" if named == "auto" else named)
    got, forward, backward = call("auto")
    assert native(q.device) is None  # or the test above would not stand for a device
    assert (forward.backend, forward.recipe.variant) == ("sm100", "block")
    assert any("sm100.forward[sm_100a]" in name for name in forward.kernels)
    assert any("sm100.backward_pair[sm_100a]" in name for name in backward.kernels)
    for x, y in zip(got, want, strict=True):
        seen = y.isfinite()
        assert torch.equal(x.isfinite(), seen)
        assert relative_rms(x[seen], y[seen]) < 6e-3


def test_warmup_loads_what_any_lengths_may_take(blackwell, monkeypatch):
    """Calls of 128 queries and keys run pairs of CTAs; unequal lengths do not."""
    loaded, launches = [], []
    monkeypatch.setattr(attention, "preload", launches.extend)
    monkeypatch.setattr(attention, "_backend", lambda named, device: "sm100")
    monkeypatch.setattr(attention, "native_target", lambda device: "sm_100a")
    monkeypatch.setattr(attention, "load", lambda kernel: loaded.append(kernel.source.removeprefix("flamia.sm100.")))
    flamia.warmup(2, 2, 64, device="cpu", causal=True)
    assert loaded == ["forward", "backward", "backward_pair"]
    assert {launch.arch for launch in launches} == {"sm_100a"}
    assert "flamia.quantize.triton_gradients:_gradient_kernel" in {launch.kernel for launch in launches}
    loaded.clear()
    flamia.warmup(2, 2, 64, device="cpu", causal=True, training=False)
    assert loaded == ["forward"]


@pytest.mark.parametrize("heads", [(2, 2), slow((2, 1))], ids=str)
def test_operators_announce_what_they_return(blackwell, heads):
    """Fake and real registrations agree, with work lists for pairs of CTAs and for one."""
    q, k, v, documents = packed([40, 33], [40, 33], *heads, 64)
    recipe = flamia.Recipe().key
    sizes, cu = (1 / 8, -1, 0, False), (documents.cu_seqlens_q, documents.cu_seqlens_k)
    checks = ("test_schema", "test_faketensor")
    arguments = (q, k, v, *cu, None, None, -1, -1, *sizes, True, recipe, "sm100")
    torch.library.opcheck(operators.attention_forward, arguments, test_utils=checks)
    with torch.no_grad():
        o, _, lse2, row_max, *kept = operators.attention_forward(*arguments)
    rest = (torch.ones_like(o), None, o, lse2, row_max, kept, *cu, None, len(k), heads[1])
    torch.library.opcheck(operators.attention_backward, (*rest, *sizes, recipe, "sm100"), test_utils=checks)


def test_compiled_calls_with_any_sizes(blackwell, monkeypatch):
    """torch.compile in one graph with sizes as symbols: the choice of pairs, and of their work list, is traced."""
    monkeypatch.setattr(attention, "_backend", lambda named, device: "sm100")
    q, k, v, documents = packed([40, 33], [40, 33], 2, 2, 64)
    cu = documents.cu_seqlens_q

    def attend(q, k, v):
        return flamia.flash_attn_varlen_func(q, k, v, cu, causal=True)

    def results(call):
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        o = call(*leaves)
        return [o.detach(), *torch.autograd.grad(o.square().sum(), leaves)]

    compiled = torch.compile(attend, fullgraph=True, dynamic=True, backend="aot_eager")
    for x, y in zip(results(compiled), results(attend), strict=True):
        assert torch.equal(x, y)


def test_grids_of_the_backward():
    """One CTA or pair for each tile of a row without documents; in a fixed order one for each item."""
    plan = native_plan(4, 2, 128, None, 0, training=True)
    assert backend._backward_grid(plan, 1000, 16384, 128, False, 148) == 2 * 128
    assert backend._backward_grid(plan, 1000, 80000, 128, False, 148) == 2 * 625
    assert backend._backward_grid(plan, 1000, 80000, 256, True, 148) == 2 * 2 * 313
    # At least the device, no more than there may be items.
    assert backend._backward_grid(plan, 1000, 1024, 128, False, 148) == 148
    assert backend._backward_grid(plan, 1000, 1024, 256, True, 148) == 148
    assert backend._backward_grid(plan, 9, 1024, 128, False, 148) == 18
    ordered = dataclasses.replace(plan, deterministic=True)
    assert backend._backward_grid(ordered, 1000, 1024, 128, False, 148) == 2000


def test_targets_of_devices(monkeypatch):
    backend.target.cache_clear()
    capabilities = {0: (10, 0), 1: (10, 3)}
    monkeypatch.setattr(torch.cuda, "get_device_capability", capabilities.__getitem__)
    assert [backend.target(n) for n in capabilities] == ["sm_100a", "sm_103a"]
    assert set(kernels.ARCHS.values()) == {"sm_100a", "sm_103a"}
    backend.target.cache_clear()
