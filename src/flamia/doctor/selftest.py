"""A few milliseconds of real attention, through the public calls, held against FP64."""

from __future__ import annotations

import time
from typing import Any

import torch

# MXFP8's cosines on Gaussian tokens are near 0.998; a wrong scale, mask or head mapping falls far below this.
FLOOR = 0.99


def self_test(device: str = "cpu") -> dict[str, Any]:
    """Run one causal forward and backward in MXFP8 (64 tokens, 4 query and 2 key heads of 64) and judge it.

    Two questions: are o, dq, dk, dv those of exact attention (cosines above 0.99), and does replacing the
    second half of the tokens leave the first half of o bitwise as it was, in the recipe that promises it?

    Returns `device`, `passed`, `cosine` (by tensor), `causal`, `seconds`, `error` (what was raised, or None).
    """
    result: dict[str, Any] = {"device": device, "passed": False, "cosine": {}, "causal": None, "error": None}
    started = time.perf_counter()
    try:
        q, k, v, do = _inputs(device)
        result["cosine"] = _cosines(q, k, v, do)
        result["causal"] = _is_causal(q, k, v)
        result["passed"] = result["causal"] and min(result["cosine"].values()) > FLOOR
    except Exception as error:  # Whatever is wrong with this machine is the doctor's finding, not its end.
        result["error"] = f"{type(error).__name__}: {error}"
    result["seconds"] = round(time.perf_counter() - started, 2)
    return result


def _inputs(device: str) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    drawn = [torch.randn(1, 64, heads, 64, generator=generator) for heads in (4, 2, 2, 4)]
    return [tensor.to(device, torch.bfloat16) for tensor in drawn]


def _ours(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, recipe: str) -> torch.Tensor:
    import flamia

    # Off the CPU, "auto" means native kernels; the reference has to be asked for by name.
    backend = "auto" if q.device.type == "cpu" else "reference"
    o: Any = flamia.flash_attn_func(q, k, v, causal=True, recipe=recipe, backend=backend)
    return o


def _cosines(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, do: torch.Tensor) -> dict[str, float]:
    leaves = [tensor.clone().requires_grad_() for tensor in (q, k, v)]
    o = _ours(*leaves, recipe="mxfp8")
    ours = (o.detach(), *torch.autograd.grad(o, leaves, do))

    leaves = [tensor.double().requires_grad_() for tensor in (q, k, v)]
    o = _textbook(*leaves)
    exact = (o.detach(), *torch.autograd.grad(o, leaves, do.double()))

    pairs = zip(("o", "dq", "dk", "dv"), ours, exact, strict=True)
    return {name: round(_cosine(x.double(), y), 5) for name, x, y in pairs}


def _cosine(x: torch.Tensor, y: torch.Tensor) -> float:
    return torch.cosine_similarity(x.flatten(), y.flatten(), dim=0).item()


def _textbook(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Causal softmax attention of [B, S, H, D] with grouped heads, in the precision of the inputs."""
    group = q.shape[2] // k.shape[2]
    q, k, v = (x.transpose(1, 2) for x in (q, k.repeat_interleave(group, 2), v.repeat_interleave(group, 2)))
    scores = q @ k.mT * q.shape[-1] ** -0.5
    future = torch.ones_like(scores[0, 0], dtype=torch.bool).triu(1)
    return (scores.masked_fill(future, float("-inf")).softmax(-1) @ v).transpose(1, 2)


def _is_causal(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> bool:
    half = q.shape[1] // 2
    # Other tokens, and larger ones: a scale that is shared with the future would move.
    other = [torch.cat([x[:, :half], 8 * x[:, half:].flip(1)], dim=1) for x in (q, k, v)]
    before = _ours(q, k, v, recipe="mxfp8-exact")
    after = _ours(*other, recipe="mxfp8-exact")
    return torch.equal(before[:, :half], after[:, :half])
