"""How fast the attention forward is, kernel alone and with quantization, beside others on the same device."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from flamia.attention import flash_attn_varlen_func
from flamia.backends import KERNELS, door, native_backend, native_recipe, served
from flamia.benchmarks.peers import PEERS, Inputs, Prepared
from flamia.benchmarks.timing import paired_seconds
from flamia.benchmarks.workloads import Workload
from flamia.documents import Documents
from flamia.plan import Plan
from flamia.recipe import Recipe, get_recipe

KERNEL, CALL = "flamia kernel", "flamia call"
LEAST_COSINE = {"mxfp8": 0.998, "nvfp4": 0.985}  # of ours with exact attention on Gaussian inputs (docs/numerics.md)
SAMPLE = 32  # queries of each head whose exact output is computed


@dataclass(frozen=True)
class Row:
    """One measurement.

    Attributes:
        workload, mask, tokens, documents, heads: of the shape; heads "16/4" are query and key/value heads.
        name: what ran. "flamia kernel": the attention launches on prepared payloads; "flamia call": everything that a
            call does, work lists and quantization of q, k and v included.
        seconds: median device time of a call. tflops: at that time (4 D heads pairs, half of them where causal).
        cosine: of the output with exact attention on sampled rows.
        ratio: median over rounds of its time over that of the fastest peer; None without one, and for peers.
        refused: why it did not run; seconds are 0 then.
    """

    workload: str
    mask: str
    tokens: int
    documents: int
    heads: str
    name: str
    seconds: float = 0.0
    tflops: float = 0.0
    cosine: float = 0.0
    ratio: float | None = None
    refused: str | None = None


def iterate(
    workloads: tuple[Workload, ...],
    masks: tuple[str, ...] = ("causal", "full"),
    peers: tuple[str, ...] = tuple(PEERS),
    recipe: str = "mxfp8",
    rounds: int = 20,
) -> Iterator[Row]:
    """Rows of every workload and mask.

    Raises:
        RuntimeError: an output is not attention; nothing of that workload has been timed then.
    """
    for workload in workloads:
        for mask in masks:
            yield from measure(workload, mask == "causal", peers, recipe, rounds)


def measure(workload: Workload, causal: bool, peers: tuple[str, ...], recipe: str, rounds: int) -> Iterator[Row]:
    """One workload: ours and every peer that runs it, checked first, then timed in turns."""
    inputs = Inputs.make(workload, causal)
    heads = f"{workload.heads_q}/{workload.heads_kv}"
    shape = (workload.name, "causal" if causal else "full", workload.tokens, len(workload.lengths), heads)
    floor = LEAST_COSINE[get_recipe(recipe).format]
    calls = {KERNEL: (kernel_call(inputs, recipe), floor), CALL: (whole_call(inputs, recipe), floor)}
    for name in peers:
        reason = PEERS[name].refuses(workload)
        if reason is None:
            try:
                prepared = PEERS[name].prepare(inputs)
                prepared.run()
                calls[name] = (prepared, PEERS[name].least_cosine)
            except Exception as error:  # Whatever keeps another library from a shape is a finding, not the end.
                reason = f"{type(error).__name__}: {error}".splitlines()[0]
        if reason is not None:
            yield Row(*shape, name, refused=reason)
    cosines = check(inputs, calls)
    times = paired_seconds({name: prepared.run for name, (prepared, _) in calls.items()}, rounds)
    medians = {name: statistics.median(seconds) for name, seconds in times.items()}
    rivals = [name for name in medians if name in PEERS]
    best = min(rivals, key=medians.__getitem__, default=None)
    for name, seconds in medians.items():
        ratio = None
        if best is not None and name not in PEERS:
            ratio = statistics.median(ours / theirs for ours, theirs in zip(times[name], times[best], strict=True))
        tflops = workload.flops(causal) / seconds / 1e12
        yield Row(*shape, name, seconds, tflops, cosines[name], ratio)


def backend_of(device: torch.device) -> str:
    """The backend whose kernels are timed on a device.

    Raises:
        ValueError: there is none.
    """
    found = native_backend(device)
    if found is None:
        raise ValueError(f"{device} has no kernels to time: {served()}")
    return found


def native(recipe: str | Recipe, q: Tensor, *, training: bool) -> tuple[str, Recipe]:
    """The backend of q's device, and what it computes for a recipe.

    Raises:
        ValueError: there are no kernels for the device, or none for the recipe there.
    """
    backend = backend_of(q.device)
    resolved = native_recipe(recipe, backend)
    reason = KERNELS[backend].unsupported(resolved, q.shape[2], q.dtype, training=training)
    if reason is not None:
        raise ValueError(f"recipes={recipe!r}: {reason}")
    return backend, resolved


def kernel_call(inputs: Inputs, recipe: str) -> Prepared:
    """The attention launches alone: payloads, work lists and outputs are made before."""
    from flamia.quantize.lists import work_lists
    from flamia.quantize.prepare import prepare_forward

    workload, q = inputs.workload, inputs.q
    backend, resolved = native(recipe, q, training=False)
    room = door(backend)
    heads = (workload.heads_q, workload.heads_kv)
    right = 0 if inputs.causal else None
    scale = 1 / math.sqrt(workload.head_dim)
    plan = Plan(resolved, backend, (), workload.head_dim, *heads, scale, None, right, False, False)
    documents = Documents(inputs.cu_seqlens, inputs.cu_seqlens, workload.tokens, workload.tokens)
    lists = work_lists(documents, plan.left, plan.right, room.tiling(plan, documents))
    payloads = prepare_forward(plan, q, inputs.k, inputs.v, lists, columns=plan.transposes).payloads
    result, launch = room.bind_forward(plan, payloads, documents, lists, q.dtype)
    result.o.fill_(torch.nan)
    return Prepared(launch, lambda _: result.o)


def whole_call(inputs: Inputs, recipe: str) -> Prepared:
    """The public call."""

    def run() -> Tensor:
        o = flash_attn_varlen_func(inputs.q, inputs.k, inputs.v, inputs.cu_seqlens, causal=inputs.causal, recipe=recipe)
        assert isinstance(o, Tensor)
        return o

    return Prepared(run, lambda o: o)


def check(inputs: Inputs, calls: dict[str, tuple[Prepared, float]]) -> dict[str, float]:
    """Cosine of each output with exact attention on sampled rows; every output is also compared whole with the others.

    Raises:
        RuntimeError: an output has a NaN, or is farther from exact attention, or from another output, than its numeric
            format explains.
    """
    rows, exact = sampled_attention(inputs)
    outputs: dict[str, tuple[Tensor, float]] = {}
    cosines = {}
    where = f"{inputs.workload.name}, {'causal' if inputs.causal else 'full'}"
    for name, (prepared, floor) in calls.items():
        o = prepared.output(prepared.run()).float()
        if o.shape != inputs.q.shape or not bool(o.isfinite().all()):
            raise RuntimeError(f"{name} on {where} gave something else than finite numbers {tuple(inputs.q.shape)}")
        cosines[name] = _cosine(o[rows], exact)
        if cosines[name] < floor:
            raise RuntimeError(f"{name} on {where} is wrong: its cosine with exact attention is {cosines[name]:.5f}")
        for other, (theirs, theirs_floor) in outputs.items():
            # 1 - cosine is half of a squared error, and independent errors add in squares.
            least = floor + theirs_floor - 1
            if _cosine(o, theirs) < least:
                raise RuntimeError(f"{name} and {other} on {where} differ: cosine {_cosine(o, theirs):.5f}")
        outputs[name] = o, floor
    return cosines


def sampled_attention(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """Tokens drawn at random, int64 [n], and their exact attention outputs, FP32 [n, heads, D]."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(inputs.workload.tokens, (SAMPLE,), generator=generator).tolist()
    q, k, v = inputs.q, inputs.k, inputs.v
    ratio = q.shape[1] // k.shape[1]
    starts = inputs.cu_seqlens.tolist()
    results = []
    for token in tokens:
        document = next(i for i, end in enumerate(starts[1:]) if token < end)
        keys = slice(starts[document], token + 1 if inputs.causal else starts[document + 1])
        keys_of, values_of = (x[keys].double().repeat_interleave(ratio, 1) for x in (k, v))
        scores = torch.einsum("hd,khd->hk", q[token].double(), keys_of) / math.sqrt(q.shape[2])
        results.append(torch.einsum("hk,khd->hd", scores.softmax(-1), values_of))
    return torch.tensor(tokens, device=q.device), torch.stack(results).float()


def _cosine(a: Tensor, b: Tensor) -> float:
    return torch.cosine_similarity(a.flatten(), b.flatten(), dim=0).item()
