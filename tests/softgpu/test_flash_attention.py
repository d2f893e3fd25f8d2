"""FlashAttention-4, which nobody here wrote: right against float64 on both architectures, in every schedule order."""

from __future__ import annotations

import itertools
import warnings

import pytest
import torch

pytest.importorskip("flash_attn.cute")

import fa4

pytestmark = pytest.mark.slow

RAGGED = [70, 1, 129, 0, 200]
FP8 = torch.float8_e4m3fn

CASES = {
    "causal GQA": dict(lengths_q=[256], heads=2, heads_kv=1, causal=True, backward=True),
    "full MHA, batch 2": dict(lengths_q=[200, 200], heads=2, heads_kv=2, backward=True),
    "causal GQA, ragged": dict(lengths_q=RAGGED, heads=4, heads_kv=2, causal=True, varlen=True, backward=True),
    "full MHA, ragged": dict(lengths_q=RAGGED, heads=2, heads_kv=2, varlen=True, backward=True),
}
MORE = {
    "one-CTA backward": (
        "sm_100a", "_fa_disable_2cta_enabled", dict(lengths_q=[256], heads=2, heads_kv=1, backward=True),
    ),
    "two-CTA forward": ("sm_100a", None, dict(lengths_q=[512], heads=1, heads_kv=1)),
    "work stealing (cluster launch control)": (
        "sm_100a", "_fa_clc_enabled", dict(lengths_q=[256, 256], heads=3, heads_kv=3, causal=True),
    ),
    "FP8": ("sm_100a", None, dict(lengths_q=[256], heads=2, heads_kv=1, dtype=FP8)),
    "FP8, causal": ("sm_100a", None, dict(lengths_q=[256], heads=2, heads_kv=1, causal=True, dtype=FP8)),
    "sm_103a (ld.red)": ("sm_103a", None, dict(lengths_q=[384], heads=2, heads_kv=1, causal=True)),
}  # fmt: skip
#: what `make test` runs: causal and full, GQA and MHA, batched and ragged, 8 bits, claimed work (matrix: the rest)
FEW = {
    ("sm_90a", "causal GQA, ragged"),
    ("sm_100a", "causal GQA"),
    ("sm_100a", "full MHA, batch 2"),
    ("sm_100a", "work stealing (cluster launch control)"),
    ("sm_100a", "FP8, causal"),
}
#: largest absolute error over the reference's root mean square
BOUNDS = {"o": 0.05, "dq": 0.1, "dk": 0.1, "dv": 0.1, "lse": 1e-4}


def marked(cases):
    return [pytest.param(*case, marks=() if case in FEW else pytest.mark.matrix) for case in cases]


def check(arch, case):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        recorded = fa4.Recorded(arch, **case)
    # FP8: probabilities keep three mantissa bits
    slack = 6 if case.get("dtype") == FP8 else 1
    for name, value in recorded.errors.items():
        assert value < BOUNDS[name] * slack, recorded.errors
    if case.get("dtype") == FP8:
        (q, k, v, _), _ = fa4.make(arch, case["lengths_q"], case["lengths_q"], case["heads"], case["heads_kv"])
        o, _ = fa4.reference(*(t.to(FP8) for t in (q, k, v)), causal=case.get("causal", False))
        difference = recorded.truth["o"].flatten(0, 1).double() - o
        assert difference.pow(2).mean().sqrt() < 0.03 * o.pow(2).mean().sqrt()
    for seed in (1, 2):
        assert set(recorded.again(seed=seed).values()) == {0.0}
    return recorded


@pytest.mark.parametrize(("arch", "name"), marked(itertools.product(("sm_90a", "sm_100a"), CASES)))
def test_forward_and_backward(arch, name):
    check(arch, CASES[name])


@pytest.mark.parametrize(("arch", "name"), marked((arch, name) for name, (arch, _, _) in MORE.items()))
def test_more_kernels(arch, name, monkeypatch):
    _, flag, case = MORE[name]
    if flag:
        monkeypatch.setattr(f"flash_attn.cute.utils.{flag}", True)
    recorded = check(arch, case)
    opcodes = {op for r in recorded.reports for op, n in r.opcodes.items() if n}
    used = {
        "one-CTA backward": "tcgen05.mma.cta_group::1", "two-CTA forward": "tcgen05.mma.cta_group::2",
        "work stealing (cluster launch control)": "clusterlaunchcontrol.try_cancel", "FP8": "kind::f8f6f4",
        "FP8, causal": "kind::f8f6f4", "sm_103a (ld.red)": "tcgen05.ld.red",
    }  # fmt: skip
    assert any(used[name] in op for op in opcodes)


@pytest.mark.matrix
def test_a_tile_takes_less_than_half_a_second(recorded):
    """One 128-query tile over 128 keys, forward, sm_100a, translation done."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        case = fa4.Recorded("sm_100a", lengths_q=[128], heads=1, heads_kv=1)
    device = fa4.Device()
    function, args = case.calls[0]
    again = function.with_ptx(function.ptx, device)
    again(*args)
    again(*args)
    assert device.reports[-1].seconds < 0.5
