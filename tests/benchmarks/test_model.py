"""What `flamia bench model` can show without a GPU: steps, checks before the clock, attentions, the table."""

import json
import types

import pytest
import torch

from flamia.benchmarks import model, timing
from flamia.benchmarks.model import OURS, Measurement, Steps, cosine, measure, torch_attention
from flamia.benchmarks.workloads import Workload, offsets
from flamia.training import MODELS, ModelConfig, exact_attention

SMALL = Workload("small", (40, 7, 33), 2, 2, 32)
CONFIG = ModelConfig(layers=2, width=64, head_dim=32, hidden=96, vocabulary=300, recompute=True)


@pytest.fixture
def clock(monkeypatch):
    """Contestants take 1, 2, ... ms in their order, and hold 5 bytes; every call runs once."""

    def paired(calls, rounds, **options):
        for call in calls.values():
            loss, norm = call()
            assert loss.isfinite()
            assert norm.isfinite()
        return {name: [(i + 1) * 1e-3] * rounds for i, name in enumerate(calls)}

    monkeypatch.setattr(model, "paired_eager_seconds", paired)
    monkeypatch.setattr(model, "peak_bytes", lambda prepare, run: (None, 5))
    return paired


def test_a_call_for_each_document_is_exact_attention():
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(80, 2, 32, generator=generator, requires_grad=True) for _ in range(3))
    cu = offsets(list(SMALL.lengths), "cpu")
    o, expected = torch_attention(SMALL.lengths)(q, k, v, cu, 40), exact_attention(q, k, v, cu, 40)
    # FP32, other orders of addition.
    assert torch.allclose(o, expected, atol=1e-5)
    for x, y in zip(*(torch.autograd.grad(x.square().sum(), (q, k, v)) for x in (o, expected)), strict=True):
        assert torch.allclose(x, y, atol=1e-4)


def test_steps_change_the_weights_a_little_and_gradients_do_not():
    steps = Steps(CONFIG, SMALL, "cpu")
    attend = torch_attention(SMALL.lengths)
    before = [p.detach().clone() for p in steps.model.parameters()]
    first, second = steps.gradients(attend), steps.gradients(attend)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(before, steps.model.parameters(), strict=True))
    loss, norm = steps.run(attend)
    # The head starts near zero: the first loss is the logarithm of the vocabulary.
    assert loss.item() == pytest.approx(torch.tensor(300.0).log().item(), abs=0.1)
    assert norm.item() == pytest.approx(sum(g.double().square().sum() for g in first).sqrt().item(), rel=1e-3)
    moved = [(a - b).abs().max().item() for a, b in zip(before, steps.model.parameters(), strict=True)]
    assert min(moved) > 0
    assert max(moved) < 2 * model.RATE
    assert steps.parameters == sum(p.numel() for p in before)


def test_measurements_of_one_model(monkeypatch, clock):
    def raising(lengths):
        raise RuntimeError("no kernel\nsecond line")

    def wrong(lengths):
        return lambda q, k, v, cu, longest: torch_attention(lengths)(q, k, -v, cu, longest)

    peers = {"sdpa": torch_attention, "again": torch_attention, "broken": raising, "wrong": wrong}
    monkeypatch.setattr(model, "PEERS", peers)
    rows = {row.name: row for row in measure("tiny", CONFIG, SMALL, tuple(peers), rounds=3, device="cpu")}
    assert rows["broken"].refused == "RuntimeError: no kernel"
    assert rows["wrong"].refused.startswith("RuntimeError: its gradients are wrong: cosine ")
    assert [rows[name].seconds for name in (OURS, "sdpa", "again")] == [1e-3, 2e-3, 3e-3]
    assert rows[OURS].speedup == pytest.approx(2)
    assert rows["sdpa"].speedup is None
    assert rows["again"].tokens_per_s == pytest.approx(80 / 3e-3)
    assert rows["sdpa"].cosine == pytest.approx(1)
    assert model.LEAST_COSINE < rows[OURS].cosine < 0.99999
    assert {(row.tokens, row.documents, row.timing) for row in rows.values()} == {(80, 3, "eager")}
    assert rows[OURS].memory == 5


def test_graphs_share_their_memory(monkeypatch, clock):
    asked = []

    def paired(calls, rounds, **options):
        asked.append(options)
        return clock(calls, rounds)

    monkeypatch.setattr(model, "paired_seconds", paired)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: "pool")
    # The CPU's AdamW has no capturable form.
    adam = torch.optim.AdamW
    monkeypatch.setattr(torch.optim, "AdamW", lambda *a, capturable, **o: asked.append(capturable) or adam(*a, **o))
    (row,) = measure("tiny", CONFIG, SMALL, (), rounds=2, graphs=True, device="cpu")
    assert asked == [True, {"pool": "pool"}]
    assert (row.timing, row.speedup) == ("graph", None)


def test_wrong_gradients_of_ours_end_the_benchmark(monkeypatch, clock):
    monkeypatch.setattr(model, "get_attention", lambda recipe: lambda q, k, v, cu, longest: v.roll(1, 0))
    with pytest.raises(RuntimeError, match="gradients of tiny through flamia are wrong: cosine"):
        list(measure("tiny", CONFIG, SMALL, device="cpu"))


def test_cosine_of_lists():
    a = [torch.tensor([1.0, 0.0]), torch.tensor([[2.0]])]
    assert cosine(a, [2 * x for x in a]) == pytest.approx(1)
    assert cosine(a, [torch.tensor([1.0, 0.0]), torch.tensor([[-2.0]])]) == pytest.approx(-3 / 5)


def test_eager_calls_take_turns_in_both_orders(monkeypatch):
    log = []

    def event_seconds(call):
        call()
        return 6.0

    monkeypatch.setattr(timing, "_event_seconds", event_seconds)
    calls = {"a": lambda: log.append("a"), "b": lambda: log.append("b")}
    assert timing.paired_eager_seconds(calls, 2, inner=2) == {"a": [3.0, 3.0], "b": [3.0, 3.0]}
    assert "".join(log) == "ab" + "aabb" + "bbaa"


@pytest.mark.parametrize("as_json", [True, False])
def test_the_command_measures_models_on_rows(monkeypatch, capsys, as_json):
    from flamia.cli import main

    asked = []

    def measure(name, config, workload, peers, recipe, rounds, graphs):
        asked.append((name, config, workload.name, peers, recipe, rounds, graphs))
        shape = (name, 75_000_000, workload.name, workload.tokens, 11)
        yield Measurement(*shape, "fa4-bf16", "eager", refused="flash-attn-4 is not installed")
        yield Measurement(*shape, OURS, "eager", 0.05, 327680.0, 0.9991, 3 << 30, 1.234)

    monkeypatch.setattr(model, "measure", measure)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a device")
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit) as stopped:
        main(["bench", "model", "--models", "paper", "--rounds", "3", *(["--json"] if as_json else [])])
    assert not stopped.value.code
    common = ("paper", MODELS["paper"])
    options = (("fa4-bf16", "sdpa"), "mxfp8", 3, False)
    assert asked == [(*common, name, *options) for name in ("loguni-11-16k", "loguni-29-64k")]
    printed = capsys.readouterr().out
    if as_json:
        assert [json.loads(line)["speedup"] for line in printed.splitlines()] == [None, 1.234, None, 1.234]
    else:
        for word in ("paper, 75 M", "loguni-29-64k, 65,536 tokens", "327,680", "0.9991", "1.234", "not installed"):
            assert word in printed


@pytest.mark.parametrize(
    ("option", "message"),
    [
        (["--models", "huge"], "models='huge' is unknown: it must be one of tiny, paper, 1b, probe"),
        (["--recipes", "fp4"], "recipes='fp4' has no kernels to time: its format must be mxfp8 or nvfp4"),
        (["--peers", "cudnn-fp8"], "peers='cudnn-fp8' is unknown: it must be one of fa4-bf16, sdpa"),
    ],
)
def test_unknown_names_are_refused(monkeypatch, capsys, option, message):
    from flamia.cli import main

    monkeypatch.setattr(torch, "cuda", types.SimpleNamespace(is_available=lambda: True))
    with pytest.raises(SystemExit) as stopped:
        main(["bench", "model", *option])
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err
