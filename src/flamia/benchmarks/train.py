"""How fast attention trains, whole calls and the backward alone, beside others on the same device."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flamia.attention import flash_attn_varlen_func
from flamia.backends import door
from flamia.benchmarks.exact import Tensors, agreement, exact_gradients
from flamia.benchmarks.forward import CALL, KERNEL, native
from flamia.benchmarks.timing import paired_seconds, peak_bytes
from flamia.benchmarks.training_peers import (
    BACKWARD,
    PARTS,
    PEERS,
    TRAINING,
    Call,
    Floors,
    TrainingInputs,
    autograd_call,
)
from flamia.benchmarks.workloads import Workload, packed_workloads
from flamia.documents import Documents
from flamia.plan import Plan
from flamia.recipe import Recipe, get_recipe

CAUSAL_SCALE = ", causal scale"  # after the name of ours with accumulator_scale="causal"
# Of ours on Gaussian inputs, in any document; full masks give .9985, .9978, .9978, .9985 and .9897, .9891, .9891, .9897
# at 4096 tokens, short documents no less (docs/numerics.md).
FLOORS = {"mxfp8": Floors(0.998, 0.997, 0.997, 0.998), "nvfp4": Floors(0.985, 0.985, 0.985, 0.985)}
SIZE = 0.03  # of a document's norm; rounding to E4M3 adds 0.3 %, E2M1 1 %
BACKWARD_SHARE = 2.5  # the backward's five products over the forward's two


@dataclass(frozen=True)
class Row:
    """One measurement.

    Attributes:
        workload, mask, tokens, documents, heads: of the shape; heads "16/4" are query and key/value heads.
        part: "training", forward and backward; "backward", alone, from what a forward has left.
        name: what ran. "flamia call": everything that the public call does there, work lists, quantization and
            finishing launches included; "flamia kernel": the launch of the attention backward on prepared operands.
        seconds: median device time of a call.
        tflops: at that time; the forward has 4 D heads pairs, half of them where causal, the backward 2.5 times that.
        cosine_o, cosine_dq, cosine_dk, cosine_dv: with exact attention; None for o where the backward alone ran.
        memory: bytes, the most that a training call held beside its inputs; None for the backward alone.
        speedup: median over rounds of the fastest peer's time over its own; None without one, and for peers.
        cost: with the causal scale, median over rounds of its time over that without, less one; else None.
        refused: why it did not run; seconds are 0 then.
    """

    workload: str
    mask: str
    tokens: int
    documents: int
    heads: str
    part: str
    name: str
    seconds: float = 0.0
    tflops: float = 0.0
    cosine_o: float | None = None
    cosine_dq: float = 0.0
    cosine_dk: float = 0.0
    cosine_dv: float = 0.0
    memory: int | None = None
    speedup: float | None = None
    cost: float | None = None
    refused: str | None = None


@dataclass(frozen=True)
class Summary:
    """The speed-ups of one of ours over a group of workloads.

    Attributes:
        group: "packed" or "batched". mask, part, name: as in rows. workloads: how many had a peer to compare with.
        geometric_mean, least: of the speed-ups. slowest: the workload of the least.
    """

    group: str
    mask: str
    part: str
    name: str
    workloads: int
    geometric_mean: float
    least: float
    slowest: str


@dataclass
class Contestant:
    """A call to check and time, what its results have to reach, and the bytes that a call holds."""

    call: Call
    floors: Floors
    memory: int | None


def iterate(
    workloads: tuple[Workload, ...],
    masks: tuple[str, ...] = ("causal", "full"),
    peers: tuple[str, ...] = tuple(PEERS),
    recipe: str = "mxfp8",
    rounds: int = 20,
    *,
    parts: tuple[str, ...] = PARTS,
    causal_scale: bool = False,
) -> Iterator[Row]:
    """Rows of every workload, mask and part.

    Raises:
        RuntimeError: results of ours that are not attention's; nothing of that workload and part has been timed then.
            A peer's are a reason not to time it.
    """
    for workload in workloads:
        for mask in masks:
            inputs = TrainingInputs.make(workload, mask == "causal")
            exact = exact_gradients(inputs.q, inputs.k, inputs.v, inputs.do, workload.lengths, inputs.causal)
            for part in parts:
                yield from measure(inputs, exact, part, peers, recipe, rounds, causal_scale)


def measure(
    inputs: TrainingInputs,
    exact: Tensors,
    part: str,
    peers: tuple[str, ...],
    recipe: str,
    rounds: int,
    causal_scale: bool = False,
) -> Iterator[Row]:
    """One workload and part: ours and every peer that runs it, checked first, then timed in turns."""
    workload = inputs.workload
    mask, heads = "causal" if inputs.causal else "full", f"{workload.heads_q}/{workload.heads_kv}"
    shape = (workload.name, mask, workload.tokens, len(workload.lengths), heads, part)
    floors = FLOORS[get_recipe(recipe).format]
    contestants = {
        name: _prepare(inputs, part, make, floors) for name, make in ours(recipe, causal_scale)[part].items()
    }
    found = {name: check(inputs, exact, name, contestant) for name, contestant in contestants.items()}
    for name in peers:
        peer = PEERS[name]
        reason = peer.refuses(workload)
        if reason is None:
            try:
                contestant = _prepare(inputs, part, peer.calls[part], peer.floors)
                found[name] = check(inputs, exact, name, contestant)
                contestants[name] = contestant
            except Exception as error:  # Whatever keeps another library from a shape is a finding, not the end.
                reason = f"{type(error).__name__}: {error}".splitlines()[0]
        if reason is not None:
            yield Row(*shape, name, refused=reason)
    times = paired_seconds({name: contestant.call.run for name, contestant in contestants.items()}, rounds)
    medians = {name: statistics.median(seconds) for name, seconds in times.items()}
    best = min((name for name in medians if name in PEERS), key=medians.__getitem__, default=None)
    flops = workload.flops(inputs.causal) * (BACKWARD_SHARE + (part == TRAINING))

    def over(one: str, other: str) -> float:
        return statistics.median(a / b for a, b in zip(times[one], times[other], strict=True))

    for name, seconds in medians.items():
        speedup = over(best, name) if best is not None and name not in PEERS else None
        plain = name.removesuffix(CAUSAL_SCALE)
        cost = over(name, plain) - 1 if plain != name else None
        memory = contestants[name].memory
        yield Row(*shape, name, seconds, flops / seconds / 1e12, *found[name], memory, speedup, cost)


def _prepare(inputs: TrainingInputs, part: str, make: Callable[[TrainingInputs], Call], floors: Floors) -> Contestant:
    if part != TRAINING:
        return Contestant(make(inputs), floors, None)
    call, memory = peak_bytes(lambda: make(inputs), lambda call: call.run())
    return Contestant(call, floors, memory)


def check(
    inputs: TrainingInputs, exact: Tensors, name: str, contestant: Contestant
) -> tuple[float | None, float, float, float]:
    """Cosines of o (None where it is not computed), dq, dk and dv with the exact ones.

    Raises:
        RuntimeError: a result has a NaN, or is farther from the exact one in some document than its format explains.
    """
    workload = inputs.workload
    where = f"{name} on {workload.name}, {'causal' if inputs.causal else 'full'}"
    found: dict[str, float | None] = {"o": None}
    for field, x in contestant.call.results()._asdict().items():
        if x is None:
            continue
        truth = getattr(exact, field)
        if x.shape != truth.shape or not bool(x.isfinite().all()):
            raise RuntimeError(f"{where} gave something else than finite numbers {tuple(truth.shape)} as {field}")
        found[field], least, size = agreement(x, truth, workload.lengths)
        # Negated, since a NaN is no agreement.
        if not least >= getattr(contestant.floors, field):
            raise RuntimeError(f"{where} is wrong: {field}'s cosine with the exact one is {least:.5f} in a document")
        if not size <= SIZE:
            raise RuntimeError(f"{where} is wrong: the norm of {field} is off by {size:.1%} in a document")
    o, dq, dk, dv = (found[field] for field in Tensors._fields)
    assert dq is not None
    assert dk is not None
    assert dv is not None
    return o, dq, dk, dv


def ours(recipe: str, causal_scale: bool) -> dict[str, dict[str, Callable[[TrainingInputs], Call]]]:
    """What of ours is timed in each part: inputs -> call, by name."""
    parts: dict[str, dict[str, Callable[[TrainingInputs], Call]]] = {TRAINING: {}, BACKWARD: {}}
    for suffix in ("", CAUSAL_SCALE) if causal_scale else ("",):
        scaled = _of_device(recipe, causal=bool(suffix))
        parts[TRAINING][CALL + suffix] = _with(whole_call, scaled if suffix else lambda _: recipe)
        parts[BACKWARD][CALL + suffix] = _with(backward_call, scaled)
        parts[BACKWARD][KERNEL + suffix] = _with(kernel_call, scaled)
    return parts


def _of_device(recipe: str, *, causal: bool) -> Callable[[TrainingInputs], Recipe]:
    """Inputs -> what their device computes; causal: with the accumulator's causal scale."""

    def resolve(inputs: TrainingInputs) -> Recipe:
        _, found = native(recipe, inputs.q, training=True)
        return dataclasses.replace(found, accumulator_scale="causal") if causal else found

    return resolve


def _with(
    call: Callable[..., Call], recipe: Callable[[TrainingInputs], str | Recipe]
) -> Callable[[TrainingInputs], Call]:
    return lambda inputs: call(inputs, recipe=recipe(inputs))


def whole_call(inputs: TrainingInputs, recipe: str | Recipe) -> Call:
    """The public call and its gradients through autograd."""

    def forward(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        o = flash_attn_varlen_func(q, k, v, inputs.cu_seqlens, causal=inputs.causal, recipe=recipe)
        assert isinstance(o, Tensor)
        return o

    return autograd_call(inputs, forward)


def _plan(inputs: TrainingInputs, recipe: Recipe) -> tuple[Any, Plan, Documents]:
    """The door of the device's backend, and a call's plan and documents."""
    backend, recipe = native(recipe, inputs.q, training=True)
    workload = inputs.workload
    heads = (workload.heads_q, workload.heads_kv)
    scale, right = 1 / math.sqrt(workload.head_dim), 0 if inputs.causal else None
    plan = Plan(recipe, backend, (), workload.head_dim, *heads, scale, None, right, False, True)
    documents = Documents(inputs.cu_seqlens, inputs.cu_seqlens, workload.tokens, workload.tokens)
    return door(backend), plan, documents


def backward_call(inputs: TrainingInputs, recipe: Recipe) -> Call:
    """All that the backward of a call does; what the forward keeps is made before."""
    room, plan, documents = _plan(inputs, recipe)
    o, _, result, kept = room.run_forward(plan, inputs.q, inputs.k, inputs.v, documents)

    def run() -> Tensors:
        rest = (o, result.lse2, result.row_max, kept, documents)
        return Tensors(None, *room.run_backward(plan, inputs.do, None, *rest))

    return Call(run, run)


def kernel_call(inputs: TrainingInputs, recipe: Recipe) -> Call:
    """The launch of the attention backward alone: operands, work lists and outputs are made before."""
    from flamia.quantize.finish import finish_dq
    from flamia.quantize.lists import work_lists
    from flamia.quantize.prepare import prepare_backward, prepare_forward

    room, plan, documents = _plan(inputs, recipe)
    lists = work_lists(documents, plan.left, plan.right, room.tiling(plan, documents))
    operands = prepare_forward(plan, inputs.q, inputs.k, inputs.v, lists, columns=plan.transposes)
    payloads, maxima = operands.payloads, (operands.k_maxima, operands.v_maxima)
    result = room.forward(plan, payloads, documents, lists, inputs.q.dtype)
    rest = (result.o, result.lse2, result.row_max, payloads, documents, lists)
    gradients = prepare_backward(plan, inputs.do, None, *rest, columns=plan.transposes)
    bound = (payloads, gradients, result.lse2, *maxima)
    dk, dv, launch = room.bind_backward(plan, *bound, documents, lists, inputs.do.dtype)

    def results() -> Tensors:
        # A launch adds to the sums of dQ. Those of the timed launches pile up, which changes no time.
        gradients.accumulator.zero_()
        for x in (dk, dv):
            x.fill_(torch.nan)
        launch()
        dq = torch.full_like(inputs.do, torch.nan)
        finish_dq(plan, gradients, *maxima, documents, lists.q, dq, fragments=True)
        return Tensors(None, dq, dk, dv)

    return Call(launch, results)


def summarize(rows: list[Row]) -> list[Summary]:
    """Geometric means of the speed-ups, of packed rows and of batches apart."""
    packed = {workload.name for workload in packed_workloads()}
    groups: dict[tuple[str, str, str, str], dict[str, float]] = {}
    for row in rows:
        if row.speedup is not None:
            group = "packed" if row.workload in packed else "batched"
            groups.setdefault((group, row.mask, row.part, row.name), {})[row.workload] = row.speedup
    summaries = []
    for key, found in groups.items():
        slowest = min(found, key=found.__getitem__)
        mean = statistics.geometric_mean(found.values())
        summaries.append(Summary(*key, len(found), mean, found[slowest], slowest))
    return summaries
