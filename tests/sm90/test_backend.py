"""The Hopper backend from q, k and v to o and lse: its launches on a software device, against the reference backend."""

import contextlib
import dataclasses
import itertools
import weakref

import pytest
import torch

pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")
pytest.importorskip("tvm_ffi", reason="needs apache-tvm-ffi")
pytest.importorskip("triton", reason="needs triton")

from reference_cases import make_plan, relative_rms

import flamia
import softgpu
from flamia import bounds, launch
from flamia.documents import Documents, column_capacity
from flamia.quantize.prepare import prepare_backward
from flamia.quantize.reference import dequantize, nvfp4_rows
from flamia.quantize.tail import clear_tail, finish_forward
from flamia.reference import backend as reference
from flamia.sm90 import backend, parts
from flamia.sm90.launches import decode_nvfp4, uneven_documents
from softgpu.cutedsl import compiling

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu runs this on the device")
COMPILED = {}


def slow(*values):
    """A case for the matrix alone."""
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.fixture
def hopper(monkeypatch, soft_device):
    """The backend with CPU tensors: kernels run on a software device, Triton is interpreted."""

    def load(kernel):
        if kernel not in COMPILED:
            with compiling(softgpu.Device(), kernel.arch):
                COMPILED[kernel] = kernel.build()
        COMPILED[kernel].device = soft_device
        return COMPILED[kernel]

    monkeypatch.setattr(backend, "load", load)
    monkeypatch.setattr(backend, "device_sizes", lambda index: (3, 1 << 19))
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())


def native_plan(heads, kv_heads, head_dim, left=None, right=None, training=False, **options):
    recipe = flamia.Recipe(variant="folded", products="hopper", **options)
    plan = make_plan(recipe, heads, kv_heads, head_dim, left, right, training)
    return dataclasses.replace(plan, backend="sm90")


def packed(len_q, len_k, heads, kv_heads, head_dim, tail=0, dtype=torch.bfloat16, seed=0):
    g = torch.Generator().manual_seed(seed)
    totals = (sum(len_q) + tail, sum(len_k) + tail, sum(len_k) + tail)
    q, k, v = (
        torch.randn(n, h, head_dim, generator=g).to(dtype)
        for n, h in zip(totals, (heads, kv_heads, kv_heads), strict=True)
    )
    cu = [torch.tensor([0, *torch.tensor(n).cumsum(0)], dtype=torch.int32) for n in (len_q, len_k)]
    return q, k, v, Documents(*cu, totals[0], totals[1])


@pytest.mark.parametrize(
    ("window", "options"),
    [
        ((None, 0), {}),
        slow((60, 20), {}),
        slow((None, None), dict(row_sum="weights")),
        ((None, 0), dict(exact_operands=True)),
        ((None, 0), dict(format="nvfp4")),
    ],
    ids=str,
)
def test_from_tensors_to_outputs(hopper, window, options):
    plan = native_plan(2, 1, 64, *window, **options)
    q, k, v, documents = packed([140, 0, 33], [150, 5, 20], 2, 1, 64, tail=7)
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
    assert torch.equal(result.row_max, want.row_max)
    assert (o[-7:] == 0).all()
    assert kept == []


def test_documents_whose_values_differ_in_size(hopper):
    plan = native_plan(2, 1, 64, None, 0)
    q, k, v, documents = packed([150, 40], [150, 40], 2, 1, 64)
    v[64:96] *= 2.0**-20
    o, lse, *_ = backend.run_forward(plan, q, k, v, documents)
    want_o, _, want_lse, _, _ = reference.run_forward(plan, q, k, v, documents, None, None)
    assert relative_rms(o, want_o) < 3e-3
    assert (lse - want_lse).abs().max() < 0.05


@pytest.mark.parametrize("lengths", [slow([140]), [70, 5, 90]], ids=["one", "packed"])
@pytest.mark.parametrize("form", ["mxfp8", slow("nvfp4")])
def test_exact_operands_keep_later_tokens_from_earlier_rows(hopper, lengths, form):
    """Every document's second half becomes another sample, its values of sizes from 2^-30 to 2^30."""
    plan = native_plan(2, 1, 64, None, 0, format=form, exact_operands=True)
    q, k, v, documents = packed(lengths, lengths, 2, 1, 64, tail=3)
    first = backend.run_forward(plan, q, k, v, documents)
    later = torch.cat([torch.arange(n) >= n // 2 for n in lengths] + [torch.zeros(3, dtype=torch.bool)])
    sizes = torch.exp2(torch.linspace(-30, 30, len(later))).view(-1, 1, 1)
    for x, y in zip((q, k, v), packed(lengths, lengths, 2, 1, 64, tail=3, seed=1)[:3], strict=True):
        x[later] = (y * sizes if x is v else 64 * y).to(x.dtype)[later]
    second = backend.run_forward(plan, q, k, v, documents)
    assert torch.equal(first[0][~later], second[0][~later])
    assert torch.equal(first[1][:, ~later], second[1][:, ~later])
    assert not torch.equal(first[1][:, later], second[1][:, later])


@pytest.mark.parametrize("form", ["mxfp8", slow("nvfp4")])
def test_what_a_backward_needs_is_kept_in_the_announced_layout(hopper, form):
    plan = native_plan(2, 1, 64, None, 0, training=True, format=form)
    q, k, v, documents = packed([40, 33], [40, 33], 2, 1, 64)
    *_, kept = backend.run_forward(plan, q, k, v, documents)
    announced = backend.empty_kept(plan, q, k, 2)
    assert len(kept) == len(announced)
    for ours, theirs in zip(kept, announced, strict=True):
        assert (ours.shape, ours.dtype, ours.stride()) == (theirs.shape, theirs.dtype, theirs.stride())
    # A custom operator refuses outputs that share memory.
    used = [x.untyped_storage().data_ptr() for x in kept if x.numel()]
    assert len(set(used)) == len(used)
    k_maxima, v_maxima = kept[-2]
    assert torch.equal(v_maxima[0], torch.stack([v[:40].abs().max(), v[40:].abs().max()]).float())
    assert torch.equal(k_maxima[0], torch.stack([k[:40].abs().max(), k[40:].abs().max()]).float())


@pytest.mark.parametrize(
    ("window", "deterministic", "options"),
    [
        ((None, 0), True, {}),
        slow((None, 0), False, {}),
        slow((60, 20), True, dict(accumulator_scale="causal")),
        ((None, 0), False, dict(exact_operands=True, exact_ds=True, accumulator_scale="causal")),
        ((None, 0), True, dict(format="nvfp4")),
        slow(
            (60, 20),
            False,
            dict(format="nvfp4", exact_operands=True, exact_ds=True, accumulator_scale="causal"),
        ),
    ],
    ids=str,
)
def test_from_gradients_of_outputs_to_those_of_inputs(hopper, window, deterministic, options):
    plan = native_plan(2, 1, 64, *window, training=True, **options)
    plan = dataclasses.replace(plan, deterministic=deterministic)
    q, k, v, documents = packed([140, 0, 33], [150, 5, 20], 2, 1, 64, tail=7)
    do, _, _, _ = packed([140, 0, 33], [150, 5, 20], 2, 1, 64, tail=7, seed=1)
    dlse = torch.randn(2, 180, generator=torch.Generator().manual_seed(2))
    for x in (q, k, v, do):
        x[-7:] = torch.nan
    o, _, result, kept = backend.run_forward(plan, q, k, v, documents)
    got = backend.run_backward(plan, do, dlse, o, result.lse2, result.row_max, kept, documents)
    want_o, _, _, want, payloads = reference.run_forward(plan, q, k, v, documents, None, None)
    expected = reference.run_backward(plan, do, dlse, want_o, want.lse2, want.row_max, payloads, documents, None)
    # What test_backward allows the kernel, and two roundings to BF16, 1.1e-3 RMS each; delta has o's flipped codes.
    for name, x, y in zip(("dq", "dk", "dv"), got, expected, strict=True):
        assert x.dtype == torch.bfloat16
        assert relative_rms(x, y) < 6e-3, name
    dq, dk, dv = got
    for x in (dq, dk, dv):
        assert (x[-7:] == 0).all()
    assert (dk[150:155] == 0).all()  # keys of the document without queries
    assert (dv[150:155] == 0).all()


def in_parts(monkeypatch, count):
    """Every backward from here on is so many parts."""
    for module in (parts, backend):
        monkeypatch.setattr(module, "backward_parts", lambda plan, total_q, total_k: count)


@pytest.mark.parametrize(
    ("kv_heads", "head_dim", "window", "deterministic", "options"),
    [
        (4, 64, (None, 0), True, {}),
        slow(2, 64, (None, None), False, {}),
        slow(4, 128, (60, 20), True, dict(accumulator_scale="causal")),
        (2, 64, (None, 0), True, dict(exact_operands=True, exact_ds=True, accumulator_scale="causal")),
        (2, 64, (None, 0), True, dict(format="nvfp4")),
        slow(4, 128, (60, 20), True, dict(format="nvfp4")),
    ],
    ids=str,
)
def test_two_parts_are_the_whole_to_the_bit(hopper, monkeypatch, kv_heads, head_dim, window, deterministic, options):
    n = 2 * kv_heads
    plan = native_plan(n, kv_heads, head_dim, *window, training=True, **options)
    plan = dataclasses.replace(plan, deterministic=deterministic)
    len_q, len_k = [70, 0, 33], [75, 5, 20]
    # With 110 queries tables of heads begin anywhere.
    q, k, v, documents = packed(len_q, len_k, n, kv_heads, head_dim, tail=7)
    do, *_ = packed(len_q, len_k, n, kv_heads, head_dim, tail=7, seed=1)
    do = do.transpose(0, 1).contiguous().transpose(0, 1)
    dlse = torch.randn(n, 110, generator=torch.Generator().manual_seed(2))
    for x in (q, k, v, do):
        x[-7:] = torch.nan
    alive = []

    def prepare(plan, *arguments, **options):
        assert not any(reference() is not None for reference in alive)  # an earlier part's memory serves this one
        gradients = prepare_backward(plan, *arguments, **options)
        made = [gradients.accumulator, gradients.b, gradients.payloads["do"].codes, gradients.payloads["do"].columns]
        if "q8" not in arguments[5].items:
            made += [arguments[5][name].columns for name in "qk"]
        alive.extend(weakref.ref(x) for x in made)
        heads.append((plan.heads_q, plan.heads_kv))
        return gradients

    monkeypatch.setattr(backend, "prepare_backward", prepare)
    results = []
    for count in (1, 2):
        in_parts(monkeypatch, count)
        alive.clear()
        heads = []
        o, _, result, kept = backend.run_forward(plan, q, k, v, documents)
        announced = backend.empty_kept(plan, q, k, 3)
        assert [x.shape for x in kept] == [x.shape for x in announced]
        results.append(backend.run_backward(plan, do, dlse, o, result.lse2, result.row_max, kept, documents))
        assert heads == [(n // count, kv_heads // count)] * count
    for name, whole, split in zip(("dq", "dk", "dv"), *results, strict=True):
        assert split.is_contiguous()
        assert whole.isfinite().all()
        if name != "dq" or deterministic:
            assert torch.equal(whole, split), name
        else:
            assert relative_rms(split, whole) < 2e-3
    assert whole[:75].any(-1).all()  # of every head


def test_what_parts_make_again_is_not_kept(hopper, monkeypatch):
    q, k, v, documents = packed([40, 33], [40, 33], 4, 2, 64)
    bytes_of = {}
    for form in ("mxfp8", "nvfp4"):
        plan = native_plan(4, 2, 64, None, 0, training=True, format=form)
        for count in (1, 2):
            in_parts(monkeypatch, count)
            *_, kept = backend.run_forward(plan, q, k, v, documents)
            bytes_of[form, count] = sum(x.numel() * x.element_size() for x in kept)
            again = "quantize.triton_columns" in backend.kernel_names(plan, "backward", q, documents)
            assert again == (count == 2 and form == "mxfp8")
    assert bytes_of["mxfp8", 1] - bytes_of["mxfp8", 2] == (4 + 2) * 64 * column_capacity(73, 2)
    assert bytes_of["nvfp4", 1] == bytes_of["nvfp4", 2]


@pytest.mark.parametrize(
    ("kv_heads", "options", "count", "expected"),
    [
        (16, {}, 1, 7.5),
        (16, {}, 4, 6.25),
        (16, dict(exact_operands=True, exact_ds=True, accumulator_scale="causal"), 4, 6.25),
        (16, dict(format="nvfp4"), 1, 9.06),
        (16, dict(format="nvfp4"), 4, 7.06),
        (4, {}, 1, 4.875),
        (4, {}, 2, 4.56),
    ],
    ids=str,
)
def test_what_a_training_call_holds_at_its_peak(monkeypatch, kv_heads, options, count, expected):
    """In BF16 tensors of q's size; docs/kernels.md counts them. Nothing is computed, nor memory touched."""
    monkeypatch.setattr(backend, "load", lambda kernel: lambda *arguments: None)
    monkeypatch.setattr(backend, "device_sizes", lambda index: (132, 30 << 20))
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    plan = native_plan(16, kv_heads, 128, None, 0, training=True, **options)
    tokens = 65536
    if count > 1:
        assert parts.backward_parts(plan, tokens, tokens) == count
    else:
        in_parts(monkeypatch, 1)
    q, do = (torch.empty(tokens, 16, 128, dtype=torch.bfloat16) for _ in range(2))
    k, v = (torch.empty(tokens, kv_heads, 128, dtype=torch.bfloat16) for _ in range(2))
    cu = torch.tensor([0, 1000, tokens], dtype=torch.int32)
    documents = Documents(cu, cu, tokens, tokens)
    watched = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True)
    with launch.recording("sm_90a"), watched as profile:
        o, lse, result, kept = backend.run_forward(plan, q, k, v, documents)
        del lse
        backend.run_backward(plan, do, None, o, result.lse2, result.row_max, kept, documents)
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    sizes = [e.nbytes() for e in sorted(events, key=lambda e: e.start_ns())]
    peak = max(itertools.accumulate(sizes)) / (2 * q.numel())
    assert expected <= peak < expected + 0.2  # an FP32 number per token and head is 1/64


@pytest.mark.parametrize(
    ("tokens", "heads", "kv_heads", "options", "expected"),
    [
        (65536, 16, 16, {}, 4),  # 768 MiB in parts of 192
        (65536, 16, 16, dict(exact_operands=True, exact_ds=True), 4),
        (65536, 16, 16, dict(format="nvfp4"), 4),
        (65536, 16, 4, {}, 2),  # 672 MiB; more parts would be too short
        (1 << 20, 16, 4, {}, 4),  # no more than kv heads
        (65536, 12, 12, {}, 3),
        (131072, 14, 7, {}, 7),
        (32768, 16, 16, {}, 2),
        (16384, 16, 16, {}, 1),
        (128, 16, 16, {}, 1),
        (0, 16, 16, {}, 1),
        (65536, 128, 1, {}, 1),  # one kv head is one part
    ],
    ids=str,
)
def test_how_many_parts_there_are(tokens, heads, kv_heads, options, expected):
    plan = native_plan(heads, kv_heads, 128, None, 0, training=True, **options)
    assert parts.backward_parts(plan, tokens, tokens) == expected
    assert heads % expected == kv_heads % expected == 0


@pytest.mark.parametrize(
    "options",
    [slow({}), dict(format="nvfp4"), slow(dict(exact_operands=True, exact_ds=True, accumulator_scale="causal"))],
    ids=str,
)
@pytest.mark.parametrize("neighbour", [slow("other"), slow("huge"), "nan"])
def test_gradients_of_a_document_do_not_see_its_neighbours(hopper, neighbour, options):
    plan = dataclasses.replace(native_plan(2, 1, 64, None, 0, training=True, **options), deterministic=True)
    q, k, v, documents = packed([37, 70, 90], [37, 70, 90], 2, 1, 64)
    do, *_ = packed([37, 70, 90], [37, 70, 90], 2, 1, 64, seed=1)
    mine = slice(37, 107)

    def gradients(q, k, v, do, documents):
        o, _, result, kept = backend.run_forward(plan, q, k, v, documents)
        return backend.run_backward(plan, do, None, o, result.lse2, result.row_max, kept, documents)

    cu = torch.tensor([0, 70], dtype=torch.int32)
    alone = gradients(*(x[mine] for x in (q, k, v, do)), Documents(cu, cu, 70, 70))
    for x in (q, k, v, do):
        fill = {"other": x.flip(0), "huge": 1e4 * x, "nan": torch.full_like(x, torch.nan)}
        x[:37], x[107:] = fill[neighbour][:37], fill[neighbour][107:]
    for name, x, y in zip(("dq", "dk", "dv"), gradients(q, k, v, do, documents), alone, strict=True):
        assert torch.equal(x[mine], y), name


@pytest.mark.parametrize(("len_q", "len_k"), [([0, 0], [5, 0]), ([5, 3], [0, 0]), ([], [])], ids=str)
def test_no_gradient_where_there_is_nothing_to_attend_to(hopper, len_q, len_k):
    plan = native_plan(2, 1, 64, None, 0, training=True)
    q, k, v, documents = packed(len_q, len_k, 2, 1, 64)
    o, _, result, kept = backend.run_forward(plan, q, k, v, documents)
    got = backend.run_backward(plan, torch.ones_like(o), None, o, result.lse2, result.row_max, kept, documents)
    for x, y in zip(got, (q, k, v), strict=True):
        assert x.shape == y.shape
        assert (x == 0).all()


@pytest.mark.parametrize(("len_q", "len_k"), [([0, 0], [5, 0]), ([5, 3], [0, 0]), ([], [])], ids=str)
def test_nothing_to_attend_to(hopper, len_q, len_k):
    plan = native_plan(2, 1, 64, None, 0)
    q, k, v, documents = packed(len_q, len_k, 2, 1, 64)
    o, lse, result, _ = backend.run_forward(plan, q, k, v, documents)
    assert o.shape == q.shape
    assert (o == 0).all()
    assert (lse == -torch.inf).all()
    assert (result.row_max == 0).all()


@pytest.mark.parametrize("form", ["mxfp8", slow("nvfp4")])
@pytest.mark.parametrize("neighbour", ["other", slow("huge"), "nan"])
def test_a_document_does_not_see_its_neighbours(hopper, neighbour, form):
    plan = native_plan(2, 1, 64, None, 0, format=form)
    q, k, v, documents = packed([37, 70, 90], [37, 70, 90], 2, 1, 64)
    mine = slice(37, 107)
    cu = torch.tensor([0, 70], dtype=torch.int32)
    alone = backend.run_forward(plan, q[mine], k[mine], v[mine], Documents(cu, cu, 70, 70))
    for x in (q, k, v):
        fill = {"other": x.flip(0), "huge": 1e4 * x, "nan": torch.full_like(x, torch.nan)}
        x[:37], x[107:] = fill[neighbour][:37], fill[neighbour][107:]
    o, lse, *_ = backend.run_forward(plan, q, k, v, documents)
    assert torch.equal(o[mine], alone[0])
    assert torch.equal(lse[:, mine], alone[1])


def test_lengths_documents_and_heads_compile_nothing(hopper):
    def call(lengths, heads, kv_heads):
        q, k, v, documents = packed(lengths, lengths, heads, kv_heads, 64)
        backend.run_forward(native_plan(heads, kv_heads, 64, None, 0), q, k, v, documents)

    call([40], 2, 1)
    before = set(COMPILED)
    for case in (([33, 1, 0, 7], 2, 1), ([1], 6, 3), ([20] * 4, 4, 2)):
        call(*case)
    assert set(COMPILED) == before


def test_names_of_what_ran():
    q, _, _, documents = packed([3], [3], 4, 2, 128, dtype=torch.float16)
    names = backend.kernel_names(native_plan(4, 2, 128, None, 0), "forward", q, documents)
    attention = [name for name in names if name.startswith("sm90.forward")]
    assert [("careful=True" in name, "ratio=2" in name, "Float16" in name) for name in attention] == [
        (False, True, True),
        (True, True, True),
    ]


# ------------------------------------------------------------------------------------------------- small launches


@pytest.mark.parametrize("spread", [5, 6, 7, 30])
@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.parametrize("lengths", [[70, 0, 5, 300], [1] * 40, [9000], [0]], ids=["packed", "tiny", "one", "none"])
def test_uneven_documents_equal_their_twin(lengths, per_token, spread):
    g = torch.Generator().manual_seed(spread)
    cu = torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32)
    total = int(cu[-1]) + 3
    e = torch.zeros(3, total, dtype=torch.uint8)  # tokens of no document: 0
    for start, stop in zip(cu[:-1].tolist(), cu[1:].tolist(), strict=True):
        drawn = 100 + spread * torch.rand(3, stop - start, generator=g).round()
        if not per_token:
            drawn = drawn[:, ::32].repeat_interleave(32, 1)[:, : stop - start]
        e[:, start:stop] = drawn.to(torch.uint8)
    e[1] = 100
    count = torch.tensor([17], dtype=torch.int32)
    flags, careful = uneven_documents(e, cu, count, per_token=per_token)
    assert torch.equal(flags, bounds.uneven_documents(e, cu))
    assert not flags[1].any()
    assert bool(flags.any()) is (spread > bounds.FOLD_RANGE and max(lengths) > 60)
    assert careful.item() == (17 if flags.any() else 0)


@pytest.mark.parametrize("finite", [False, True])
@pytest.mark.parametrize("shape", [(1, 1, 64), (37, 3, 128), (0, 2, 64)], ids=str)
def test_nvfp4_values_are_exact_in_bf16(shape, finite):
    g = torch.Generator().manual_seed(0)
    x = torch.randn(shape, generator=g) * torch.exp2(4 * torch.randn(*shape[:2], 1, generator=g))
    if shape[0] > 1:
        x[5, 0, 20] = torch.nan
    payload = nvfp4_rows(x)
    got, broken = decode_nvfp4(payload, finite=finite), x.isnan().any(-1)
    assert got.dtype == torch.bfloat16
    nan = 0.0 if finite else 7e7
    assert torch.equal(got.float().nan_to_num(7e7), dequantize(payload).nan_to_num(nan))
    assert torch.equal(got.isnan().any(-1), broken & (not finite))


@pytest.mark.parametrize("head_dim", [64, 128])
def test_nvfp4_values_of_some_heads(head_dim):
    x = torch.randn(37, 6, head_dim, generator=torch.Generator().manual_seed(0))
    whole = nvfp4_rows(x)
    some = dataclasses.replace(whole, codes=whole.codes[:, 1:4], scales=whole.scales[:, 1:4])
    assert torch.equal(decode_nvfp4(some), decode_nvfp4(whole)[:, 1:4])
    assert torch.equal(decode_nvfp4(some).float(), dequantize(whole)[:, 1:4])


@pytest.mark.parametrize("tail", [0, 1, 200])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_finish_writes_lse_and_the_tail(tail, dtype):
    used, heads, dim = 150, 3, 64
    g = torch.Generator().manual_seed(0)
    o = torch.full((used + tail, heads, dim), torch.nan, dtype=dtype)
    lse2, row_max = (torch.full((heads, used + tail), torch.nan) for _ in range(2))
    o[:used] = torch.randn(used, heads, dim, generator=g)
    lse2[:, :used], row_max[:, :used] = torch.randn(2, heads, used, generator=g)
    lse2[0, 7] = -torch.inf
    before = [x.clone() for x in (o[:used], lse2[:, :used], row_max[:, :used])]
    lse = finish_forward(o, lse2, row_max, torch.tensor([0, 100, used], dtype=torch.int32))
    for now, was in zip((o[:used], lse2[:, :used], row_max[:, :used]), before, strict=True):
        assert torch.equal(now, was)
    assert torch.equal(lse[:, :used], before[1] * torch.tensor(2.0).log())
    assert (o[used:] == 0).all()
    assert (row_max[:, used:] == 0).all()
    assert (lse[:, used:] == -torch.inf).all()
    assert (lse2[:, used:] == -torch.inf).all()


@pytest.mark.parametrize("tail", [0, 1, 200])
def test_clear_tail_clears_the_tail(tail):
    a, b = (torch.ones(150 + tail, 3, 64, dtype=torch.bfloat16) for _ in range(2))
    clear_tail(a, b, torch.tensor([0, 100, 150], dtype=torch.int32))
    for x in (a, b):
        assert (x[:150] == 1).all()
        assert (x[150:] == 0).all()
