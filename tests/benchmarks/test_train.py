"""What `flamia bench train` can show without a GPU: exact gradients, checks before the clock, peers, tables, plots."""

import contextlib
import dataclasses
import json
import math
import sys
import types

import pytest
import torch

from flamia import precompile
from flamia.backends import door
from flamia.benchmarks import cudnn_fp8, flash_attention, forward, timing, train
from flamia.benchmarks.exact import Agreement, Tensors, agreement, exact_gradients
from flamia.benchmarks.forward import CALL, KERNEL
from flamia.benchmarks.peers import Inputs
from flamia.benchmarks.train import CAUSAL_SCALE, Contestant, Row, Summary
from flamia.benchmarks.training_peers import BACKWARD, PEERS, TRAINING, Call, Floors, Peer, TrainingInputs
from flamia.benchmarks.workloads import Workload, packed_workloads

SMALL = Workload("small", (70, 33, 70), 4, 2, 128)
STRICT = Floors(0.9999, 0.9999, 0.9999, 0.9999)


def textbook(inputs: TrainingInputs) -> Tensors:
    """Exact attention of every document and its gradients by autograd, FP64."""
    leaves = [x.double().requires_grad_() for x in (inputs.q, inputs.k, inputs.v)]
    ratio = inputs.q.shape[1] // inputs.k.shape[1]
    o = []
    for q, k, v in zip(*(x.split(inputs.workload.lengths) for x in leaves), strict=True):
        k, v = (x.repeat_interleave(ratio, 1) for x in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) / math.sqrt(q.shape[2])
        if inputs.causal:
            scores = scores.masked_fill(torch.ones_like(scores[0], dtype=torch.bool).triu(1), -math.inf)
        o.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1), v))
    o = torch.cat(o)
    return Tensors(o.detach(), *torch.autograd.grad(o, leaves, inputs.do.double()))


def known(results: Tensors) -> Call:
    return Call(lambda: None, lambda: results)


@pytest.fixture(scope="module")
def inputs() -> TrainingInputs:
    return TrainingInputs.make(SMALL, True, device="cpu")


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("block", [4 * 70 * 5, 4 * 70 * 16 + 3, 1 << 27], ids=["5 rows", "16 rows", "whole"])
def test_exact_gradients_are_those_of_autograd(causal, block):
    inputs = TrainingInputs.make(SMALL, causal, device="cpu")
    exact = exact_gradients(inputs.q, inputs.k, inputs.v, inputs.do, SMALL.lengths, causal, block)
    for x, y in zip(exact, textbook(inputs), strict=True):
        assert x.dtype == torch.float32
        # FP32 sums of 128 and of at most 70 products of numbers around 1.
        assert torch.allclose(x.double(), y, atol=1e-5)


def test_inputs_repeat_and_differ_from_one_another(inputs):
    again = TrainingInputs.make(SMALL, True, device="cpu")
    assert torch.equal(inputs.do, again.do)
    assert inputs.do.shape == inputs.q.shape
    assert abs(torch.cosine_similarity(inputs.do.flatten().float(), inputs.q.flatten().float(), 0)) < 0.05


def test_agreement_of_the_whole_and_of_the_worst_document():
    x = torch.randn(10, 2, 4, generator=torch.Generator().manual_seed(0))
    y = x.clone()
    y[3:5] = -1.5 * y[3:5]
    assert agreement(x, x, (3, 2, 5)) == pytest.approx((1, 1, 0))
    found = agreement(y, x, (3, 2, 5))
    assert found.cosine == pytest.approx(torch.cosine_similarity(x.flatten(), y.flatten(), dim=0).item())
    assert (found.least, found.size) == pytest.approx((-1, 0.5))
    x[3:5] = y[3:5] = 0
    assert agreement(x, y, (3, 2, 5)) == Agreement(pytest.approx(1), pytest.approx(1), 0)
    y[3:5] = 1
    assert math.isnan(agreement(x, y, (3, 2, 5)).least)


@pytest.mark.parametrize("field", ["o", "dq", "dk", "dv"])
@pytest.mark.parametrize(
    "fault", ["nan", "scale of a document", "head", "one document", "shape", "zero document", "half"]
)
def test_wrong_results_are_found(inputs, field, fault):
    exact = textbook(inputs)
    right = getattr(exact, field).float()
    wrong = right.clone()
    if fault == "nan":
        wrong[3, 1, 5] = math.nan
    elif fault == "scale of a document":
        wrong[70:103] *= 0.9 + 0.2 * torch.rand(33, 1, 1, generator=torch.Generator().manual_seed(0))
    elif fault == "head":
        wrong = right.roll(1, 1)
    elif fault == "one document":
        wrong[70:103] = right[70:103].flip(0)
    elif fault == "shape":
        wrong = right[:-1]
    elif fault == "zero document":
        wrong[70:103] = 0
    else:
        wrong = right / 2
    good = Contestant(known(exact), STRICT, None)
    assert train.check(inputs, exact, "good", good) == pytest.approx((1, 1, 1, 1))
    bad = Contestant(known(exact._replace(**{field: wrong})), Floors(0.999, 0.999, 0.999, 0.999), None)
    with pytest.raises(RuntimeError, match=rf"bad on small, causal .*\b{field}\b"):
        train.check(inputs, exact, "bad", bad)


@pytest.fixture
def clock(monkeypatch):
    """Contestants take 1, 2, ... ms in their order, and hold 1, 2, ... KiB."""
    held = iter(range(1, 100))

    def peak_bytes(prepare, run):
        made = prepare()
        run(made)
        return made, 1024 * next(held)

    monkeypatch.setattr(forward, "backend_of", lambda device: "sm90")
    monkeypatch.setattr(train, "peak_bytes", peak_bytes)
    monkeypatch.setattr(
        train,
        "paired_seconds",
        lambda calls, rounds: {n: [(i + 1) * 1e-3] * rounds for i, n in enumerate(calls)},
    )


def test_measurements_of_a_training_call(monkeypatch, clock):
    inputs = TrainingInputs.make(Workload("small", (35, 33), 2, 1, 128), True, device="cpu")

    def raising(_):
        raise RuntimeError("no plan\nsecond line")

    exact = textbook(inputs)
    right = {part: lambda _: known(exact) for part in (TRAINING, BACKWARD)}
    wrong = {TRAINING: lambda _: known(exact._replace(dk=-exact.dk))}

    class Refusing(Peer):
        def refuses(self, workload):
            return {"batches": "has no packed rows"}.get(self.name)

    made = [Refusing(n, STRICT, right) for n in ("fast", "slow", "batches")]
    made += [Refusing("broken", STRICT, {TRAINING: raising}), Refusing("wrong", STRICT, wrong)]
    monkeypatch.setattr(train, "PEERS", {peer.name: peer for peer in made})
    measured = train.measure(inputs, exact, TRAINING, tuple(train.PEERS), "mxfp8", 3, causal_scale=True)
    rows = {row.name: row for row in measured}
    assert rows["batches"].refused == "has no packed rows"
    assert rows["broken"].refused == "RuntimeError: no plan"
    assert rows["wrong"].refused.startswith("RuntimeError: wrong on small, causal is wrong: dk's cosine")
    scaled = CALL + CAUSAL_SCALE
    assert [rows[n].seconds for n in (CALL, scaled, "fast", "slow")] == [1e-3, 2e-3, 3e-3, 4e-3]
    assert [rows[n].memory for n in (CALL, scaled, "fast")] == [1024, 2048, 3072]
    assert [rows[n].speedup for n in (CALL, scaled, "fast", "slow")] == [
        pytest.approx(3),
        pytest.approx(1.5),
        None,
        None,
    ]
    assert [rows[n].cost for n in (CALL, scaled, "fast")] == [None, pytest.approx(1), None]
    assert rows["slow"].tflops == pytest.approx(3.5 * inputs.workload.flops(True) / 4e-3 / 1e12)
    # The public call ran, forward and backward: quantized, so not exact, and near the figures of docs/numerics.md.
    for name in (CALL, scaled):
        found = (rows[name].cosine_o, rows[name].cosine_dq, rows[name].cosine_dk, rows[name].cosine_dv)
        assert found == pytest.approx((0.999, 0.998, 0.998, 0.999), abs=8e-4)


def test_measurements_of_the_backward_alone(monkeypatch, inputs, clock):
    exact = textbook(inputs)
    answer = lambda inputs, recipe: known(exact._replace(o=None))  # noqa: E731
    monkeypatch.setattr(train, "backward_call", answer)
    monkeypatch.setattr(train, "kernel_call", answer)
    monkeypatch.setattr(train, "PEERS", {})
    rows = list(train.measure(inputs, exact, BACKWARD, (), "mxfp8", 3))
    assert [row.name for row in rows] == [CALL, KERNEL]
    for row in rows:
        assert (row.speedup, row.memory, row.cosine_o, row.part) == (None, None, None, "backward")
        assert row.tflops == pytest.approx(2.5 * SMALL.flops(True) / row.seconds / 1e12)


def test_ours_that_are_wrong_end_the_benchmark(monkeypatch, inputs, clock):
    exact = textbook(inputs)
    monkeypatch.setattr(train, "whole_call", lambda inputs, recipe: known(exact._replace(dv=exact.dq[:, :2])))
    monkeypatch.setattr(train, "paired_seconds", lambda calls, rounds: pytest.fail("it was timed"))
    with pytest.raises(RuntimeError, match=f"{CALL} on small, causal is wrong: dv's cosine"):
        list(train.measure(inputs, exact, TRAINING, (), "mxfp8", 3))


def test_every_workload_mask_and_part_is_measured(monkeypatch):
    asked = []
    original = TrainingInputs.make
    monkeypatch.setattr(TrainingInputs, "make", lambda workload, causal: original(workload, causal, device="cpu"))

    def measure(inputs, exact, part, peers, recipe, rounds, causal_scale):
        assert exact.dq.shape == inputs.q.shape
        asked.append((inputs.workload.name, inputs.causal, part, peers, recipe, rounds, causal_scale))
        yield part

    monkeypatch.setattr(train, "measure", measure)
    assert list(train.iterate((SMALL,), ("full", "causal"), ("x",), "nvfp4", 7, causal_scale=True)) == [
        "training",
        "backward",
        "training",
        "backward",
    ]
    assert [(causal, part) for _, causal, part, *_ in asked] == [
        (False, "training"),
        (False, "backward"),
        (True, "training"),
        (True, "backward"),
    ]
    assert {row[3:] for row in asked} == {(("x",), "nvfp4", 7, True)}


def test_peak_memory_counts_what_is_kept_and_the_peak_of_a_later_run(monkeypatch):
    state = {"now": 1000, "peak": 1000, "runs": 0}

    def prepare():
        state["now"] += 30
        return "made"

    def run(made):
        assert made == "made"
        state["runs"] += 1
        state["peak"] = max(state["peak"], state["now"] + (900 if state["runs"] == 1 else 50))
        state["now"] += 500 if state["runs"] == 1 else 0  # a cache that stays

    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: state["now"])
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: state["peak"])
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: state.update(peak=state["now"]))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    assert timing.peak_bytes(prepare, run) == ("made", 80)


# ---------------------------------------------------------------------------------------- kernels, on a software device


@pytest.fixture
def kernels(monkeypatch):
    """Takes CPU tensors for those of a backend's device: kernels run on a software device, Triton is interpreted."""
    for package in ("cutlass", "tvm_ffi", "triton"):
        pytest.importorskip(package)
    if torch.cuda.is_available():
        pytest.skip("Triton is not interpreted where there is a device")
    import softgpu
    from softgpu.cutedsl import compiling

    compiled = {}

    def load(kernel):
        if kernel not in compiled:
            with compiling(softgpu.Device(), kernel.arch):
                compiled[kernel] = kernel.build()
        return compiled[kernel]

    def of(backend):
        room = door(backend)
        monkeypatch.setattr(forward, "backend_of", lambda device: backend)
        monkeypatch.setattr(room, "load", load)
        monkeypatch.setattr(room, "device_sizes", lambda index: (3, 1 << 19))
        if backend == "sm100":
            monkeypatch.setattr(room, "target", lambda index: "sm_103a")

    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    return of


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["sm90", "sm100"])
@pytest.mark.parametrize(
    "name",
    [KERNEL, *(pytest.param(x, marks=pytest.mark.matrix) for x in (CALL, CALL + CAUSAL_SCALE, KERNEL + CAUSAL_SCALE))],
)
def test_the_backward_of_a_call_and_its_kernel_alone(kernels, backend, name):
    kernels(backend)
    inputs = TrainingInputs.make(Workload("small", (40, 33), 2, 1, 64), True, device="cpu")
    call = train.ours("mxfp8", True)[BACKWARD][name](inputs)
    call.run()  # what a timed launch leaves behind must not change the results
    assert call.results().o is None
    # The floors are those of heads of 128; codes of 64 channels are not rotated.
    contestant = Contestant(call, Floors(0.998, 0.997, 0.997, 0.998), None)
    assert train.check(inputs, textbook(inputs), name, contestant)[0] is None


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["sm100", pytest.param("sm90", marks=pytest.mark.matrix)])
def test_the_forward_kernel_alone(kernels, backend):
    kernels(backend)
    inputs = Inputs.make(Workload("small", (40, 33), 2, 1, 64), True, device="cpu")
    assert forward.check(inputs, {KERNEL: (forward.kernel_call(inputs, "mxfp8"), 0.998)})[KERNEL] > 0.998


def test_what_a_device_has_no_kernels_for_is_named(kernels):
    q = torch.empty(3, 2, 64, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"cpu has no kernels to time: 'sm90' serves .*'sm100' serves"):
        forward.native("mxfp8", q, training=True)
    kernels("sm100")
    with pytest.raises(ValueError, match="recipes='nvfp4': format='nvfp4' has no Blackwell kernel"):
        forward.native("nvfp4", q, training=False)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("causal", "kv_heads", "dim"), [(True, 1, 64), pytest.param(False, 2, 128, marks=pytest.mark.matrix)]
)
def test_flash_attention_as_libraries(monkeypatch, tmp_path, causal, kv_heads, dim):
    """The objects that go into the libraries, on a software device, called as the benchmark calls the libraries."""
    pytest.importorskip("flash_attn")
    pytest.importorskip("tvm_ffi")
    from cutlass.cutlass_dsl import CuTeDSL

    import softgpu
    from softgpu.cutedsl import load_compiled

    settings = CuTeDSL._get_dsl().envar
    monkeypatch.setattr(settings, "keep_ptx", True)
    monkeypatch.setattr(settings, "dump_dir", str(tmp_path))
    loaded = {}

    def load(kernel):
        if kernel not in loaded:
            loaded[kernel] = load_compiled(softgpu.Device(), kernel.build())
        return loaded[kernel]

    monkeypatch.setattr(flash_attention, "load", load)
    monkeypatch.setattr(flash_attention, "is_installed", lambda: False)
    inputs = TrainingInputs.make(Workload("small", (70, 33), 2, kv_heads, dim), causal, device="cpu")
    exact = textbook(inputs)
    for part, make in PEERS["fa4-bf16"].calls.items():
        found = train.check(inputs, exact, "fa4", Contestant(make(inputs), PEERS["fa4-bf16"].floors, None))
        assert (found[0] is None) == (part == BACKWARD)
    expected = {flash_attention.forward_kernel(dim, 2 // kv_heads, causal)}
    assert set(loaded) == expected | set(flash_attention.backward_kernels(dim, 2 // kv_heads, causal))


def test_libraries_of_flash_attention_are_compiled_on_demand(monkeypatch, tmp_path):
    built = []
    monkeypatch.setattr(precompile, "build", lambda kernels, out, jobs: built.extend(kernels))
    options = dict(head_dims="128", ratios="1,4", masks="causal", peers=True, jobs=1)
    precompile.compile_kernels(tmp_path, **_defaults(options | dict(backward=True)))
    theirs = [kernel for kernel in built if kernel.source == flash_attention.__name__]
    assert len(theirs) == 2 * 1 + 3 + 4
    assert {dict(k.options).get("part") for k in theirs} == {None, "before", "attention", "dq", "dkv"}
    built.clear()
    precompile.compile_kernels(tmp_path, **_defaults(options | dict(backward=False)))
    assert [k for k in built if k.source == flash_attention.__name__] == theirs[:2]


def test_backwards_with_the_causal_scale_are_compiled_on_demand():
    def select(**options):
        return set(precompile.select("sm_90a", ["mxfp8"], [128], [1], "causal", "bf16", True, **options))

    (added,) = select(causal_scale=True) - select()
    assert dict(added.options)["causal_scale"] is True
    assert added.source == "flamia.sm90.backward"


def _defaults(options: dict) -> dict:
    values = dict(arch="sm_90a", recipes="mxfp8", dtypes="bf16", deterministic=False, causal_scale=False)
    return values | options


def test_flash_attention_says_what_it_lacks(monkeypatch):
    packed = packed_workloads()[4]
    many = Workload("many", (8,) * 257, 1, 1, 128)
    monkeypatch.setattr(flash_attention, "is_installed", lambda: False)
    monkeypatch.delenv("FLAMIA_KERNELS", raising=False)
    assert "flash-attn-4 is not installed" in PEERS["fa4-bf16"].refuses(packed)
    monkeypatch.setenv("FLAMIA_KERNELS", "somewhere")
    assert PEERS["fa4-bf16"].refuses(packed) is None
    assert PEERS["fa4-bf16"].refuses(many) == "its ready libraries run up to 256 documents"
    monkeypatch.setattr(flash_attention, "is_installed", lambda: True)
    assert PEERS["fa4-bf16"].refuses(many) is None


# ------------------------------------------------------------------------------------------------------------ cuDNN


class Node:
    """An output of a graph that does not know yet where it goes."""

    def __getattr__(self, name):
        if name.startswith("set_"):
            return lambda value: self
        raise AttributeError(name)


class Graph:
    """A cuDNN graph in plain PyTorch: scales as the library defines them, exact arithmetic between them."""

    def __init__(self, **options):
        self.node = None

    def tensor(self, name, dim, stride, data_type):
        node = Node()
        node.name = name
        return node

    def sdpa_fp8(self, **arguments):
        self.node, self.arguments, self.outputs = "forward", arguments, [Node() for _ in range(4)]
        return self.outputs

    def sdpa_fp8_backward(self, **arguments):
        self.node, self.arguments, self.outputs = "backward", arguments, [Node() for _ in range(7)]
        return self.outputs

    def get_workspace_size(self):
        return 0

    def __getattr__(self, name):
        if name in ("validate", "build_operation_graph", "create_execution_plans", "check_support", "build_plans"):
            return lambda *_: None
        raise AttributeError(name)

    def execute(self, values, workspace, handle):
        given = {name: values[x] if isinstance(x, Node) else x for name, x in self.arguments.items()}
        into = [values[node] for node in self.outputs]

        def real(name):
            return given[name].double() * given[f"descale_{name}"]

        def store(place, x, scale):
            place.copy_((x * scale).clamp(-448, 448))

        scores = real("q") @ real("k").mT * given["attn_scale"]
        if given["use_causal_mask"]:
            scores = scores.masked_fill(torch.ones_like(scores[0, 0], dtype=torch.bool).triu(1), -math.inf)
        p = scores.softmax(-1)
        if self.node == "forward":
            store(into[0], p @ real("v"), given["scale_o"])
            into[1].copy_(scores.logsumexp(-1, keepdim=True))
            into[2].copy_(p.max()), into[3].copy_((p @ real("v")).abs().max())
            return
        # The codes of P and dS in E4M3 are what their scales are for.
        p_codes = (p * given["scale_s"]).to(torch.float8_e4m3fn).double() * given["descale_s"]
        dp = real("dO") @ real("v").mT
        ds = p * (dp - (real("dO") * real("o")).sum(-1, keepdim=True))
        codes = (ds * given["scale_dP"]).clamp(-448, 448).to(torch.float8_e4m3fn).double() * given["descale_dP"]
        factor = given["attn_scale"]
        gradients = (codes @ real("k") * factor, codes.mT @ real("q") * factor, p_codes.mT @ real("dO"))
        for n, (x, name) in enumerate(zip(gradients, ("dQ", "dK", "dV"), strict=True)):
            store(into[n], x, given[f"scale_{name}"])
            into[3 + n].copy_(x.abs().max())
        into[6].copy_(ds.abs().max())


@pytest.mark.parametrize("causal", [True, False])
def test_cudnn_fp8_is_calibrated_and_its_results_are_scaled_back(monkeypatch, causal):
    module = types.ModuleType("cudnn")
    module.data_type = types.SimpleNamespace(FP8_E4M3="e4m3", FLOAT="float")
    module.heur_mode = types.SimpleNamespace(A="a")
    module.create_handle = lambda: "handle"
    module.set_stream = lambda handle, stream: None
    module.pygraph = Graph
    monkeypatch.setitem(sys.modules, "cudnn", module)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: types.SimpleNamespace(cuda_stream=0))
    inputs = TrainingInputs.make(Workload("small", (48, 48), 2, 2, 64), causal, device="cpu")
    exact = textbook(inputs)
    for part, make in PEERS["cudnn-fp8"].calls.items():
        call = make(inputs)
        if part == BACKWARD:
            call = Call(call.run, lambda results=call.results: results()._replace(o=None))
        found = train.check(inputs, exact, "cudnn", Contestant(call, PEERS["cudnn-fp8"].floors, None))
        assert max(x for x in found if x is not None) < 0.9999
    attention = cudnn_fp8.Attention(*(x.unflatten(0, (2, -1)).transpose(1, 2) for x in _tensors(inputs)), causal)
    attention.calibrate()
    for name, scale in attention.scales.items():
        assert (attention.maxima[name] * scale).item() == pytest.approx(224, rel=0.05)


def _tensors(inputs: TrainingInputs) -> tuple[torch.Tensor, ...]:
    return inputs.q, inputs.k, inputs.v, inputs.do


def test_cudnn_bf16_calls_torch_with_batches(monkeypatch):
    """The operators need a device; stand-ins see what they are given."""
    inputs = TrainingInputs.make(Workload("small", (48, 48), 4, 2, 64), True, device="cpu")
    exact = textbook(inputs)

    def batch(x):
        return x.float().unflatten(0, (2, -1)).transpose(1, 2)

    def forward(q, k, v, bias, wants_lse, dropout, causal, debug):
        assert torch.equal(q.float(), batch(inputs.q))
        assert torch.equal(k.float(), batch(inputs.k))
        assert (bias, wants_lse, dropout, causal, debug) == (None, True, 0.0, True, False)
        return batch(exact.o), "lse", "cu_q", "cu_k", 48, 48, "seed", "offset", "mask"

    def backward(do, q, k, v, o, *rest):
        assert torch.equal(do.float(), batch(inputs.do))
        assert rest == ("lse", "seed", "offset", None, "cu_q", "cu_k", 48, 48, 0.0, True)
        return batch(exact.dq), batch(exact.dk), batch(exact.dv)

    names = dict(_scaled_dot_product_cudnn_attention=forward, _scaled_dot_product_cudnn_attention_backward=backward)
    monkeypatch.setattr(torch.ops, "aten", types.SimpleNamespace(**names))
    results = PEERS["cudnn-bf16"].calls[BACKWARD](inputs).results()
    assert results.o is None
    for name in ("dq", "dk", "dv"):
        assert torch.equal(getattr(results, name), getattr(exact, name).float())


def test_torch_attention_of_batches_is_differentiated(monkeypatch):
    import torch.nn.attention

    monkeypatch.setattr(torch.nn.attention, "sdpa_kernel", lambda backend: contextlib.nullcontext())
    inputs = TrainingInputs.make(Workload("small", (48, 48), 4, 2, 64), True, device="cpu")
    contestant = Contestant(PEERS["cudnn-bf16"].calls[TRAINING](inputs), PEERS["cudnn-bf16"].floors, None)
    assert min(train.check(inputs, textbook(inputs), "sdpa", contestant)) > 0.9999


# ------------------------------------------------------------------------------------------------ what is shown


def rows_to_show() -> list[Row]:
    shape = ("equal-8x2k", "causal", 16384, 8, "16/16", TRAINING)
    batch = ("batch-1x16k-16h16", "full", 16384, 1, "16/16", BACKWARD)
    return [
        Row(*shape, "cudnn-fp8", refused="nvidia-cudnn-frontend is not installed"),
        Row(*shape, CALL, 8e-4, 601.5, 0.99881, 0.99791, 0.99792, 0.99871, 512 << 20, 1.36),
        Row(*shape, CALL + CAUSAL_SCALE, 9e-4, 550.0, 0.9988, 0.9979, 0.9979, 0.9987, 512 << 20, 1.25, 0.083),
        Row(*shape, "fa4-bf16", 1.09e-3, 441.0, 1.0, 1.0, 1.0, 1.0, 480 << 20),
        Row(*batch, KERNEL, 2e-3, 777.0, None, 0.9979, 0.9979, 0.9987, None, 1.5),
        Row(*batch, "fa4-bf16", 3e-3, 500.0, None, 1.0, 1.0, 1.0),
        Row("equal-4x4k", *shape[1:], CALL, 1e-3, 700.0, 0.9988, 0.9979, 0.9979, 0.9987, 512 << 20, 1.7),
    ]


def test_summaries_are_geometric_means():
    found = {(s.group, s.part, s.name): s for s in train.summarize(rows_to_show())}
    assert found["packed", TRAINING, CALL] == Summary(
        "packed", "causal", TRAINING, CALL, 2, pytest.approx(math.sqrt(1.36 * 1.7)), 1.36, "equal-8x2k"
    )
    assert found["batched", BACKWARD, KERNEL].geometric_mean == pytest.approx(1.5)
    assert len(found) == 3
    assert train.summarize([row for row in rows_to_show() if row.speedup is None]) == []


def test_tables_show_what_was_measured(capsys):
    from rich.console import Console

    from flamia.benchmarks.cli import render_summaries, render_train

    Console(width=220).print(render_train(rows_to_show(), "a device"))
    text = capsys.readouterr().out
    words = ("equal-8x2k", "0.800", "602", "0.9988 0.9979 0.9979 0.9987", "512", "1.36", "+8.3%", "is not installed")
    for word in (*words, "- 0.9979 0.9979 0.9987", "777", "1.090", "batch-1x16k"):
        assert word in text
    Console(width=220).print(render_summaries(train.summarize(rows_to_show()), "a device"))
    text = capsys.readouterr().out
    for word in ("2 packed", "1.521", "1.360", "1 batched", "equal-8x2k"):
        assert word in text


def test_rows_are_json():
    assert json.loads(json.dumps([dataclasses.asdict(row) for row in rows_to_show()]))[1]["speedup"] == 1.36


def test_plot_is_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    from flamia.benchmarks.plots import draw_speedups

    draw_speedups(rows_to_show(), tmp_path / "plot.svg", "a device")
    text = (tmp_path / "plot.svg").read_text()
    assert text.startswith("<?xml")
    assert len(text) > 10_000
    with pytest.raises(ValueError, match="no peer ran"):
        draw_speedups([rows_to_show()[0]], tmp_path / "none.svg", "a device")


@pytest.mark.parametrize("option", [["--json"], []])
def test_the_command_prints_rows_and_means(monkeypatch, capsys, tmp_path, option):
    from flamia.cli import main

    asked = []

    def iterate(*positional, **options):
        asked.append((positional, options))
        yield from rows_to_show()

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a device")
    monkeypatch.setattr(train, "iterate", iterate)
    command = ["bench", "train", "--workloads", "equal-8x2k", "--masks", "causal", "--rounds", "4", "--causal-scale"]
    with pytest.raises(SystemExit) as stopped:
        main([*command, *option])
    assert not stopped.value.code
    ((workloads, masks, peers, recipe, rounds), options) = asked[0]
    assert [w.name for w in workloads] == ["equal-8x2k"]
    assert (masks, peers, recipe, rounds) == (("causal",), tuple(PEERS), "mxfp8", 4)
    assert options == {"parts": (TRAINING, BACKWARD), "causal_scale": True}
    printed = capsys.readouterr().out
    if option:
        lines = [json.loads(line) for line in printed.splitlines()]
        assert [line.get("speedup") for line in lines[:2]] == [None, 1.36]
        assert [line["name"] for line in lines if "geometric_mean" in line] == [CALL, CALL + CAUSAL_SCALE, KERNEL]
    else:
        assert "Speed-ups over the fastest peer" in printed
