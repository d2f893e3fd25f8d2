"""The numbers that the documentation quotes, measured again.

    python docs/measurements.py                 # all of them, about ten minutes on two CPU cores
    python docs/measurements.py leaks weights   # some of them

Every section prints a Markdown table. Inputs are BF16, from a fixed seed; nothing is downloaded.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import itertools
import math
import time
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

import flamia
from flamia import formats
from flamia.reference import folded, statistics, weights
from flamia.reference.exact import exact_attention, exact_attention_backward
from flamia.reference.exponentials import exp2, mitchell, schraudolph

Row = tuple[object, ...]
ROUTES = ("mxfp8", "nvfp4", "fp4")


def gaussian(tokens: int, heads: int = 2, d: int = 128, *, queries: int | None = None, seed: int = 0) -> list[Tensor]:
    """q, k, v, do: N(0, 1), FP32 [1, tokens, heads, d]."""
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(1, n, heads, d, generator=g) for n in (queries or tokens, tokens, tokens, queries or tokens)]


def cosine(a: Tensor, b: Tensor) -> float:
    a, b = a.detach().double().flatten(), b.double().flatten()
    return float(a @ b / (a.norm() * b.norm()).clamp(min=1e-300))


def ours(x: list[Tensor], recipe: str | flamia.Recipe, **options: object) -> list[Tensor]:
    """o, lse, dq, dk, dv of flamia."""
    q, k, v = (t.bfloat16().requires_grad_() for t in x[:3])
    o, lse = flamia.flash_attn_func(q, k, v, recipe=recipe, return_lse=True, **options)  # type: ignore[arg-type]
    return [o.detach(), lse.detach(), *torch.autograd.grad(o, (q, k, v), x[3].bfloat16())]


def exact(x: list[Tensor], causal: bool) -> list[Tensor]:
    """o, lse, dq, dk, dv in FP64 from the same BF16 operands."""
    q, k, v, do = (t.bfloat16() for t in x)
    o, lse = exact_attention(q, k, v, causal=causal)
    return [o, lse, *exact_attention_backward(q, k, v, do, causal=causal)]


def cosines(a: list[Tensor], b: list[Tensor]) -> list[str]:
    """Of o, dq, dk and dv."""
    return [f"{cosine(a[i], b[i]):.4f}" for i in (0, 2, 3, 4)]


# ---------------------------------------------------------------------------------------------------- accuracy


def accuracy() -> Iterator[Row]:
    """Cosine with FP64 attention, N(0, 1), 4096 tokens, 4 heads of 128"""
    yield "recipe", "mask", "O", "dQ", "dK", "dV", "dS rounded to zero"
    x = gaussian(4096, 4)
    for causal in (True, False):
        e = exact(x, causal)
        for recipe in ("mxfp8", "mxfp8-folded", "nvfp4", "nvfp4-folded", "fp4", "mxfp8-exact"):
            with statistics() as counts:
                got = ours(x, recipe, causal=causal)
            yield recipe, "causal" if causal else "full", *cosines(got, e), f"{100 * counts.ds_zero_fraction:.2f} %"


def means() -> Iterator[Row]:
    """Cosine where V and dO have a mean: V = dO = 1 + 0.1 N(0, 1), 4096 tokens, 2 heads of 128"""
    yield "recipe", "mask", "O", "dQ", "dK", "dV"
    q, k, v, do = gaussian(4096)
    x = [q, k, 1 + 0.1 * v, 1 + 0.1 * do]
    mean = (1 + 0.1 * gaussian(4096, seed=1)[2]).mean((0, 1))  # of another sample
    for causal in (True, False):
        e = exact(x, causal)
        for recipe, options in (("mxfp8-paper", {}), ("mxfp8", {}), ("mxfp8", {"v_offset": mean})):
            name = recipe + (" + v_offset" if options else "")
            yield name, "causal" if causal else "full", *cosines(ours(x, recipe, causal=causal, **options), e)


def rotation() -> Iterator[Row]:
    """Cosine of O with one outlier channel in K, full mask, 1024 tokens, 2 heads of 128"""
    yield "factor of the channel", "mxfp8", "mxfp8, rotate=False", "nvfp4", "nvfp4, rotate=False"
    for factor in (1, 4, 16, 32):
        x = gaussian(1024)
        x[1][..., 5] *= factor
        e = exact_attention(*(t.bfloat16() for t in x[:3]))[0]
        row = []
        for name in ("mxfp8", "nvfp4"):
            for recipe in (flamia.get_recipe(name), flamia.Recipe(format=name, rotate=False)):
                o = flamia.flash_attn_func(*(t.bfloat16() for t in x[:3]), recipe=recipe)
                row.append(f"{cosine(o, e):.4f}")
        yield factor, *row


# ------------------------------------------------------------------------------------------------------- leaks


def change(before: Tensor, after: Tensor, rows: int) -> tuple[float, int]:
    """Largest relative change of the first ``rows`` rows [1, tokens, heads, ...] and how far back it reaches."""
    a, b = before[:, :rows].double(), after[:, :rows].double()
    size = (a - b).abs().amax(-1) / a.abs().amax(-1).clamp(min=1e-30)
    changed = size.amax((0, 2)).nonzero().flatten()
    return float(size.max()), rows - int(changed[0]) if changed.numel() else 0


def perturbed(x: list[Tensor], p: int, future: list[Tensor] | None) -> list[list[Tensor]]:
    """x with token p of K, of V, of Q and of dO times 64; or with every token from p on replaced by another sample."""
    if future is not None:
        return [[torch.cat((t[:, :p], f[:, p:] * s), 1) for t, f in zip(x, future, strict=True)] for s in (1.0, 64.0)]
    result = []
    for i in range(4):
        y = [t.clone() for t in x]
        y[i][:, p] *= 64
        result.append(y)
    return result


def leak_of(recipe: str | flamia.Recipe, tokens: int = 384, position: int = 300) -> list[str]:
    """Largest change and reach of earlier O, lse and dQ: spike of one token, then all later tokens replaced."""
    x = gaussian(tokens)
    before = ours(x, recipe, causal=True)
    row = []
    for future in (None, gaussian(tokens, seed=1)):
        changes = []
        for y in perturbed(x, position, future):
            after = ours(y, recipe, causal=True)
            lse = [t[1].transpose(1, 2).unsqueeze(-1) for t in (before, after)]
            pairs = [(before[0], after[0]), (lse[0], lse[1]), (before[2], after[2])]
            changes.append([change(a, b, position) for a, b in pairs])
        for tensor in range(3):
            size, reach = (max(c[tensor][i] for c in changes) for i in (0, 1))
            row.append("0" if reach == 0 else f"{size:.1e} ({reach})")
    return row


def leaks() -> Iterator[Row]:
    """Largest relative change of rows before token 300 of 384 (rows reached), causal, N(0, 1), 2 heads of 128"""
    yield "recipe", "spike: O", "spike: lse", "spike: dQ", "all later: O", "all later: lse", "all later: dQ"
    for recipe in flamia.recipes():
        yield recipe, *leak_of(recipe)


def options() -> Iterator[Row]:
    """As `leaks`, with one of the exact options left out"""
    yield "recipe", "spike: O", "spike: lse", "spike: dQ", "all later: O", "all later: lse", "all later: dQ"
    full = flamia.get_recipe("mxfp8").exact()
    for name, off in (
        ("mxfp8-exact", {}),
        ("without exact_operands", {"exact_operands": False}),
        ("without exact_ds", {"exact_ds": False}),
        ("without the causal scale", {"accumulator_scale": "sequence"}),
        ("accumulator='fp32' instead of the causal scale", {"accumulator": "fp32", "accumulator_scale": "sequence"}),
    ):
        yield name, *leak_of(dataclasses.replace(full, **off))  # type: ignore[arg-type]
    fp4 = flamia.get_recipe("fp4")
    yield "fp4 with the causal scale (fp4-exact)", *leak_of(fp4.exact())


# ----------------------------------------------------------------------------------------------------- weights


def fold_range() -> Iterator[Row]:
    """One visible group: key A has weight 8/9 and V = 2^-20, key B weight 1/9 and V = 1. O should be 0.1112"""
    yield "recipe", "O, row sum as it is", "O, row sum from the codes alone"
    q, k, v = torch.zeros(1, 1, 1, 32), torch.zeros(1, 2, 1, 32), torch.zeros(1, 2, 1, 32)
    q[..., 0], k[0, 0, 0, 0], v[0, 0], v[0, 1] = 1.0, 3 * math.log(2.0), 2.0**-20, 1.0
    saved = weights.FOLD_RANGE
    for recipe in ("mxfp8-exact", "mxfp8-folded-exact"):
        row = []
        for limit in (saved, 10_000):
            weights.FOLD_RANGE = folded.FOLD_RANGE = limit
            o = flamia.flash_attn_func(q.bfloat16(), k.bfloat16(), v.bfloat16(), softmax_scale=1.0, recipe=recipe)
            row.append(f"{float(o[0, 0, 0, 0]):.4f}")
        weights.FOLD_RANGE = folded.FOLD_RANGE = saved
        yield recipe, *row


def sink() -> Iterator[Row]:
    """One key has half of the weight and V = 0, the others share the rest with V = 0.5. O should be 0.25"""
    yield "keys", "mxfp8", "mxfp8-paper", "p_shift=8, tau=0", "nvfp4", "fp4"
    recipes = ("mxfp8", "mxfp8-paper", flamia.Recipe(p_shift=8, tau=0.0), "nvfp4", "fp4")
    for keys in (1024, 8192, 12288, 24576, 32768, 131072):
        q, k, v = torch.zeros(1, 1, 1, 32), torch.zeros(1, keys, 1, 32), torch.full((1, keys, 1, 32), 0.5)
        q[..., 0], k[0, 0, 0, 0], v[0, 0] = 1.0, math.log(keys - 1), 0.0
        x = [t.bfloat16() for t in (q, k, v)]
        outs = [flamia.flash_attn_func(*x, softmax_scale=1.0, recipe=r) for r in recipes]
        yield keys, *(f"{float(o[0, 0, 0, 0]):.3f}" for o in outs)


def overflow() -> Iterator[Row]:
    """Largest value of the FP16 dQ accumulator where the row sum misses small weights (65504 is the end of FP16)"""
    yield "keys", "mxfp8", "mxfp8-paper", "p_shift=8, tau=0"
    for keys in (4096, 16384, 24576, 65536):
        q, k, v = torch.zeros(1, 1, 1, 32), torch.zeros(1, keys, 1, 32), torch.full((1, keys, 1, 32), -1.5)
        # One key 14.15 binades above the others, dP of opposite signs, and every |K| at its maximum.
        top = 14.15 * math.log(2.0)
        q[..., 0], k[0, 0, 0, 0], v[0, 0], k[..., 1], k[0, 0, 0, 1] = 1.0, top, 1.5, top, -top
        row = []
        for recipe in ("mxfp8", "mxfp8-paper", flamia.Recipe(p_shift=8, tau=0.0)):
            x = [q, k, v, torch.ones_like(q)]
            row.append(_largest_accumulator(x, recipe, softmax_scale=1.0))
        yield keys, *row


def _largest_accumulator(x: list[Tensor], recipe: str | flamia.Recipe, **options: object) -> str:
    from flamia.reference import backward

    largest = 0.0
    real = backward.counters.count_accumulator

    def watch(values: Tensor) -> None:
        nonlocal largest
        largest = max(largest, float(values.abs().max()))
        real(values)

    backward.counters.count_accumulator = watch
    try:
        ours(x, recipe, **options)
    finally:
        backward.counters.count_accumulator = real
    return f"{largest:.3g}"


def headroom() -> Iterator[Row]:
    """The FP16 dQ accumulator: largest value, and the share of its entries that are subnormal; causal, 1024 tokens"""
    yield "inputs", "scale", "largest", "subnormal", "overflows"
    for name, make in INPUTS.items():
        x = make(1024)
        for scale in ("sequence", "causal"):
            recipe = flamia.Recipe(accumulator_scale=scale)
            with statistics() as counts:
                largest = _largest_accumulator(x, recipe, causal=True)
            share = counts.accumulator_subnormal / counts.accumulator_total
            yield name, scale, largest, f"{100 * share:.2f} %", counts.accumulator_overflow


def _outliers(tokens: int) -> list[Tensor]:
    # Independent outlier tokens and channels of K, V and dO, x50 each: x2500 where they meet.
    x = gaussian(tokens)
    for i, t in enumerate(x[1:]):
        t[:, 200 + 37 * i] *= 50
        t[..., 7 + i] *= 50
    return x


INPUTS: dict[str, Callable[[int], list[Tensor]]] = {
    "N(0, 1)": gaussian,
    "K, V, dO times 50": lambda n: [t * (1 if i == 0 else 50) for i, t in enumerate(gaussian(n))],
    "outlier tokens and channels, x2500 where they meet": _outliers,
    "gradients of 2^-20": lambda n: [t * (2.0**-20 if i == 3 else 1) for i, t in enumerate(gaussian(n))],
}


# ------------------------------------------------------------------------------------------------------ ranges


def nvfp4_window() -> Iterator[Row]:
    """Cosine of O where Q is multiplied by c and K divided by c, causal, 512 tokens, 2 heads of 128"""
    yield "c", "mxfp8", "nvfp4", "fp4"
    for c in (1, 16, 128, 512, 1024, 0.05, 0.005, 0.002):
        x = gaussian(512)
        x[0], x[1] = x[0] * c, x[1] / c
        q, k, v = (t.bfloat16() for t in x[:3])
        e = exact_attention(q, k, v, causal=True)[0]
        yield c, *(f"{cosine(flamia.flash_attn_func(q, k, v, causal=True, recipe=r), e):.4f}" for r in ROUTES)


def fp4_values() -> Iterator[Row]:
    """fp4 where V is multiplied by c: cosines of O, dQ; causal, 512 tokens, 2 heads of 128"""
    yield "c", "O, dQ", "O, dQ without the bound on P's scale", "O, dQ of mxfp8"
    saved = weights.FourBitWeights.bump
    for c in (1000, 64, 1, 0.02, 0.005, 0.002, 0.001):
        x = gaussian(512)
        x[2] = x[2] * c
        e = exact(x, True)
        row = []
        for recipe, bump in (("fp4", saved), ("fp4", lambda self, run: None), ("mxfp8", saved)):
            weights.FourBitWeights.bump = bump  # type: ignore[method-assign]
            got = ours(x, recipe, causal=True)
            row.append(f"{cosine(got[0], e[0]):.4f}, {cosine(got[2], e[2]):.4f}")
        weights.FourBitWeights.bump = saved  # type: ignore[method-assign]
        yield c, *row


def second_level() -> Iterator[Row]:
    """fp4 where dO is multiplied by c: cosine of dQ, dV; causal, 512 tokens, 2 heads of 128"""
    from flamia.quantize import payloads

    yield "c", "with the second level", "without it"
    saved = payloads.backward_specs
    for c in (1.0, 2.0**-8, 2.0**-12, 2.0**-20, 2.0**12):
        x = gaussian(512)
        x[3] = x[3] * c
        e = exact(x, True)
        row = []
        for level in (True, False):
            payloads_without = _without_level if not level else saved
            flamia.plan.backward_specs = payloads_without  # type: ignore[attr-defined]
            got = ours(x, "fp4", causal=True)
            row.append(f"{cosine(got[2], e[2]):.4f}, {cosine(got[4], e[4]):.4f}")
        flamia.plan.backward_specs = saved  # type: ignore[attr-defined]
        yield f"2^{int(math.log2(c))}", *row


def _without_level(recipe: flamia.Recipe) -> tuple[object, ...]:
    from flamia.quantize.payloads import backward_specs

    return tuple(dataclasses.replace(spec, second_level=False) for spec in backward_specs(recipe))


# ------------------------------------------------------------------------------------------------ exponentials


def exponentials() -> Iterator[Row]:
    """Ratio of the bit-level exponentials to 2^x, x in (-80, 0]; 4-bit codes that differ from exact rounding"""
    yield "function", "smallest", "largest", "mean", "codes equal to exact rounding"
    x = torch.linspace(-80.0, 0.0, 2_000_001, dtype=torch.float64)
    for name, f in (("Mitchell", mitchell), ("Schraudolph", schraudolph)):
        ratio = f(x).double() / torch.exp2(x)
        same = "-"
        if name == "Mitchell":
            g = torch.Generator().manual_seed(0)
            s = torch.randn(4096, 32, generator=g, dtype=torch.float64) * 1.75
            s = (s - s.amax(-1, keepdim=True)) * math.log2(math.e) + math.log2(6.0)
            equal = formats.round_e2m1(mitchell(s)) == formats.round_e2m1(exp2(s))
            same = f"{100 * float(equal.double().mean()):.1f} %"
        yield name, f"{ratio.min():.4f}", f"{ratio.max():.4f}", f"{ratio.mean():.4f}", same


def approximate() -> Iterator[Row]:
    """Cosine of O with the exact and the approximate exponential, full mask, 1024 tokens, 2 heads of 128"""
    yield "format", "exact", "approximate"
    x = [t.bfloat16() for t in gaussian(1024)[:3]]
    e = exact_attention(*x)[0]
    for base, name in (
        ("mxfp8", "schraudolph"),
        ("mxfp8-folded", "schraudolph"),
        ("nvfp4", "schraudolph"),
        ("fp4", "mitchell"),
    ):
        row = []
        for kind in ("exact", name):
            recipe = dataclasses.replace(flamia.get_recipe(base), exponential=kind, training=False)
            row.append(f"{cosine(flamia.flash_attn_func(*x, recipe=recipe), e):.5f}")
        yield f"{base}, {name}", *row


# ------------------------------------------------------------------------------------------------ bits and speed


def bits() -> Iterator[Row]:
    """SHA-256 of o, lse, dq, dk, dv of documents of 67, 300 and 33 tokens, computed in several ways"""
    yield "recipe", "packed, 1 thread", "packed, 2 threads", "one document at a time", "heads one at a time"
    lengths, threads = (67, 300, 33), torch.get_num_threads()
    x = [t[0] for t in gaussian(sum(lengths))]
    starts = [0, *torch.tensor(lengths).cumsum(0).tolist()]

    def run(part: slice, heads: slice, cu: list[int]) -> list[Tensor]:
        q, k, v, do = (t[part, heads].bfloat16() for t in x)
        q, k, v = (t.requires_grad_() for t in (q, k, v))
        offsets = torch.tensor(cu, dtype=torch.int32)
        o, lse = flamia.flash_attn_varlen_func(q, k, v, offsets, causal=True, recipe=recipe, return_lse=True)
        return [o.detach(), lse.detach().t().unsqueeze(-1), *torch.autograd.grad(o, (q, k, v), do)]

    def digest(tensors: list[Tensor]) -> str:
        return hashlib.sha256(b"".join(t.float().contiguous().numpy().tobytes() for t in tensors)).hexdigest()[:8]

    every = slice(None)
    for recipe in ("mxfp8", "nvfp4", "fp4", "mxfp8-folded", "mxfp8-exact"):
        row = []
        for n in (1, 2):
            torch.set_num_threads(n)
            row.append(digest(run(every, every, starts)))
        torch.set_num_threads(threads)
        parts = [run(slice(a, b), every, [0, b - a]) for a, b in itertools.pairwise(starts)]
        row.append(digest([torch.cat(t) for t in zip(*parts, strict=True)]))
        if recipe == "fp4":
            row.append("not comparable")  # the counters of its random rounding know the head
        else:
            one = [run(every, slice(h, h + 1), starts) for h in range(2)]
            row.append(digest([torch.cat(t, 1) for t in zip(*one, strict=True)]))
        yield recipe, *row


def order() -> Iterator[Row]:
    """Relative RMS change of results (lse: largest, absolute) if every score is off by one FP32 unit or so"""
    from flamia.reference import backward, forward

    yield "recipe", "lse", "O", "dQ", "dK", "dV"
    modules, real = (forward, backward, folded), forward.scaled_scores
    for recipe in ("mxfp8", "mxfp8-exact", "nvfp4", "fp4", "mxfp8-folded"):
        x = gaussian(1024, 2)
        before = ours(x, recipe, causal=True)
        g = torch.Generator().manual_seed(0)

        def disturbed(q: Tensor, k: Tensor, scale: float, visible: Tensor | None, g: torch.Generator = g) -> Tensor:
            s = real(q, k, scale, visible)
            return s * (1 + 2.0**-23 * torch.randn(s.shape, generator=g, dtype=s.dtype))

        try:
            for module in modules:
                module.scaled_scores = disturbed  # type: ignore[attr-defined]
            after = ours(x, recipe, causal=True)
        finally:
            for module in modules:
                module.scaled_scores = real  # type: ignore[attr-defined]
        pairs = [(a.double(), b.double()) for a, b in zip(before, after, strict=True)]
        errors = [float((a - b).norm() / a.norm()) for a, b in pairs]
        lse = float((pairs[1][0] - pairs[1][1]).abs().max())
        yield recipe, f"{lse:.1e}", *(f"{errors[i]:.1e}" for i in (0, 2, 3, 4))


def speed() -> Iterator[Row]:
    """Seconds of the reference, causal, 4 heads of 128"""
    yield "recipe", "tokens", "forward", "forward and backward"
    for recipe in ("mxfp8", "nvfp4", "fp4", "mxfp8-folded"):
        for tokens in (512, 2048):
            x = gaussian(tokens, 4)
            q, k, v = (t.bfloat16() for t in x[:3])
            start = time.perf_counter()
            flamia.flash_attn_func(q, k, v, causal=True, recipe=recipe)
            middle = time.perf_counter()
            ours(x, recipe, causal=True)
            yield recipe, tokens, f"{middle - start:.2f}", f"{time.perf_counter() - middle:.2f}"


SECTIONS: dict[str, Callable[[], Iterator[Row]]] = {
    f.__name__.replace("_", "-"): f
    for f in (
        leaks,
        options,
        fold_range,
        sink,
        overflow,
        headroom,
        nvfp4_window,
        fp4_values,
        second_level,
        exponentials,
        approximate,
        rotation,
        bits,
        order,
        speed,
        means,
        accuracy,
    )
}


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure the numbers that the documentation quotes.")
    parser.add_argument("sections", nargs="*", help=f"some of {', '.join(SECTIONS)}; all of them when left out")
    chosen = parser.parse_args().sections or list(SECTIONS)
    for name in chosen:
        if name not in SECTIONS:
            parser.error(f"unknown section {name!r}: known ones are {', '.join(SECTIONS)}")
    for name in chosen:
        section = SECTIONS[name]
        print(f"\n### {name}\n\n{section.__doc__}\n", flush=True)
        for i, row in enumerate(section()):
            print("| " + " | ".join(map(str, row)) + " |", flush=True)
            if i == 0:
                print("|" + "---|" * len(row), flush=True)


if __name__ == "__main__":
    main()
