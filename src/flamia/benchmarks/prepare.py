"""How fast rows are prepared: quantizers, finishing launches and work lists, against a device copy in the same run."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flamia.backends import native_backend
from flamia.benchmarks.timing import copy_bandwidth, eager_seconds, graph_seconds
from flamia.benchmarks.workloads import lengths, offsets
from flamia.documents import Documents
from flamia.plan import Plan
from flamia.quantize import reference as twin
from flamia.quantize.payloads import backward_specs, forward_specs
from flamia.recipe import get_recipe

RECIPES = ("mxfp8-folded", "mxfp8", "nvfp4", "fp4")


@dataclass(frozen=True)
class Row:
    """One measurement.

    Attributes:
        recipe, packing, tokens, documents: of the workload.
        work: what was timed.
        seconds: device time in a replayed graph.
        bytes: read plus written, each tensor once; 0 where bytes are not the point.
        share: of the copy's bandwidth; 0 likewise.
        separate: device seconds of the same work as separate torch operations; None: not measured.
    """

    recipe: str
    packing: str
    tokens: int
    documents: int
    work: str
    seconds: float
    bytes: int = 0
    share: float = 0.0
    separate: float | None = None


def size(*things: Any) -> int:
    """Bytes of every tensor in tensors, dataclasses and containers, each storage once."""
    found: dict[int, int] = {}

    def visit(thing: Any) -> None:
        if isinstance(thing, Tensor):
            found[thing.data_ptr()] = max(found.get(thing.data_ptr(), 0), thing.nbytes)
        elif dataclasses.is_dataclass(thing) and not isinstance(thing, type):
            for part in dataclasses.fields(thing):
                visit(getattr(thing, part.name))
        elif isinstance(thing, dict):
            visit(list(thing.values()))
        elif isinstance(thing, (list, tuple)):
            for part in thing:
                visit(part)

    visit(things)
    found.pop(0, None)  # empty tensors
    return sum(found.values())


def iterate_quantizers(
    recipe: str, packing: str, tokens: int, heads: int, head_dim: int, bandwidth: float, separate: bool = True
) -> Iterator[Row]:
    """q, k, v, do and the finishing launches of one recipe, as the device's backend asks for them.

    Only Blackwell's reads E4M3 operands in both directions; elsewhere there are transposed codes.
    """
    from flamia.quantize.finish import finish_dk_dv, finish_dq
    from flamia.quantize.lists import work_lists
    from flamia.quantize.operands import quantize_operand
    from flamia.quantize.prepare import prepare_backward, prepare_forward

    chosen = get_recipe(recipe)
    plan = Plan(chosen, "device", (), head_dim, heads, heads, 1 / math.sqrt(head_dim), None, 0, False, True)
    columns = chosen.format != "fp4" and native_backend(torch.device("cuda")) != "sm100"
    cu = offsets(lengths(packing, tokens), "cuda")
    documents = Documents(cu, cu, tokens, tokens)
    lists = work_lists(documents, None, 0)
    count = documents.count
    generator = torch.Generator("cuda").manual_seed(0)

    def random(dtype: torch.dtype = torch.bfloat16, *shape: int) -> Tensor:
        shape = shape or (tokens, heads, head_dim)
        return torch.randn(shape, generator=generator, device="cuda").to(dtype)

    q, k, v, do, o = (random() for _ in range(5))
    lse2, row_max = random(torch.float32, heads, tokens).abs() + 4, random(torch.float32, heads, tokens)
    maps = twin.TokenMap.build(cu, tokens)
    specs = forward_specs(chosen, True, columns)

    def row(work: str, call: Callable[[], Any], moved: int, apart: Callable[[], Any] | None) -> Row:
        seconds = graph_seconds(call)
        slow = eager_seconds(apart) if apart is not None and separate else None
        return Row(recipe, packing, tokens, count, work, seconds, moved, moved / seconds / bandwidth, slow)

    for name, x in (("q", q), ("k", k), ("v", v)):
        mine = [spec for spec in specs if spec.source == name]
        maxima = None if name == "q" else torch.zeros(heads, count, device="cuda")
        rotate = plan.rotates and name != "v"

        def call(mine: Any = mine, x: Tensor = x, maxima: Any = maxima, rotate: bool = rotate) -> Any:
            return quantize_operand(mine, x, lists.k, rotate=rotate, per_token=plan.per_token, maxima=maxima)

        def apart(mine: Any = mine, x: Tensor = x, name: str = name, rotate: bool = rotate) -> Any:
            source = twin.prepare(x, maps, rotate=rotate)
            amax = None if name == "q" else twin.token_amax(source)
            made = [twin.make(s, source, maps, per_token=plan.per_token, rounding="up") for s in mine]
            return made, amax

        yield row(name, call, size(x, call()), apart)

    payloads = prepare_forward(plan, q, k, v, lists, columns=columns).payloads
    reads = (do, o) if chosen.variant == "block" else (do, o, lse2, row_max, lists.q.groups)

    def gradient() -> Any:
        return prepare_backward(plan, do, None, o, lse2, row_max, payloads, documents, lists, columns=columns)

    def gradient_apart() -> Any:
        from flamia.formats import tree_sum
        from flamia.reference.exponentials import exp2

        source = twin.prepare(do, maps)
        norm = tree_sum(source.abs())
        if chosen.variant == "folded":
            source = source * exp2(row_max - lse2).t().unsqueeze(-1)
        per_token = plan.per_token or chosen.variant == "folded"
        made = [twin.make(s, source, maps, per_token=per_token, rounding="up") for s in backward_specs(chosen, columns)]
        accumulator = torch.zeros(heads, maps.capacity, head_dim, dtype=torch.float16, device="cuda")
        return made, norm, tree_sum(twin.dequantize(made[0]) * o.float()), accumulator

    yield row("do", gradient, size(*reads, gradient()), gradient_apart)

    gradients = gradient()
    gradients.accumulator.normal_(generator=generator)
    maxima = torch.ones(heads, count, device="cuda")
    out = torch.empty_like(q)

    def finish() -> None:
        finish_dq(plan, gradients, maxima, maxima, documents, lists.q, out, fragments=True)

    yield row("dq", finish, q.numel() * 2 + out.nbytes, None)
    sums = random(torch.float32), random(torch.float32)
    dk, dv = torch.empty_like(k), torch.empty_like(v)
    yield row("dk, dv", lambda: finish_dk_dv(plan, *sums, dk, dv), size(*sums, dk, dv), None)


def time_lists(packing: str, tokens: int) -> Row:
    """Work lists and token tables of one packed row, causal."""
    from flamia.quantize.lists import work_lists

    cu = offsets(lengths(packing, tokens), "cuda")
    documents = Documents(cu, cu, tokens, tokens)
    seconds = graph_seconds(lambda: work_lists(documents, None, 0))
    return Row("any", packing, tokens, documents.count, "work lists", seconds)


def iterate(
    recipes: tuple[str, ...] = RECIPES,
    packings: tuple[str, ...] = ("one", "web"),
    tokens: int = 65536,
    heads: int = 16,
    head_dim: int = 128,
    separate: bool = True,
) -> Iterator[Row]:
    """Every row of `flamia bench prepare`; the first is the copy."""
    copied = 1 << 30
    bandwidth = copy_bandwidth(copied)
    yield Row("", "", 0, 0, "device copy", 2 * copied / bandwidth, 2 * copied, 1.0)
    yield time_lists("web", tokens)
    yield time_lists("tiny", 2 * tokens)
    for recipe in recipes:
        for packing in packings:
            yield from iterate_quantizers(recipe, packing, tokens, heads, head_dim, bandwidth, separate)
