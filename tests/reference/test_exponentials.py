"""The bit-level exponentials: ratio bands, mean, windows and clamps of the paper's appendix C."""

import numpy as np
import pytest
import torch
from reference_cases import cosine, fp64, make_plan, run, tokens

import flamia
from flamia.documents import Documents
from flamia.formats import round_e2m1
from flamia.reference import backend
from flamia.reference.exponentials import exp2, mitchell, schraudolph, schraudolph_mix

X = torch.linspace(-20, 0, 200_001, dtype=torch.float64)


def test_exp2_is_correctly_rounded():
    x = torch.cat((X, torch.linspace(-126, 127, 10_001, dtype=torch.float64)))
    want = torch.from_numpy(np.exp2(x.numpy().astype(np.longdouble)).astype(np.float32))
    assert (exp2(x) != want).sum() <= 2  # FP64's own error can move a tie: expected about 10^-8 of the entries
    assert torch.equal(exp2(torch.arange(-126.0, 128.0)), torch.ldexp(torch.ones(254), torch.arange(-126, 128)))
    assert exp2(torch.tensor([-torch.inf])).item() == 0


def test_schraudolph_ratio_and_mean():
    ratio = schraudolph(X).double() / torch.exp2(X)
    assert ratio.min() == pytest.approx(0.9583, abs=5e-4)
    assert ratio.max() == pytest.approx(1.0227, abs=5e-4)
    assert ratio.mean() == pytest.approx(1, abs=5e-4)
    assert torch.equal(schraudolph(X), schraudolph(X).bfloat16().float())


@pytest.mark.parametrize("x", [-128.0, -265.0, -1653.0, -1e6, -torch.inf])
def test_schraudolph_clamps_before_the_shift(x):
    assert schraudolph(torch.tensor([x])).item() == pytest.approx(0, abs=2.0**-126)


@pytest.mark.parametrize("together", [2, 8])
def test_schraudolph_takes_five_of_eight_groups(together):
    x = -torch.rand(1, 128, generator=torch.Generator().manual_seed(0)) * 5
    approximate = (schraudolph_mix(x, together) == schraudolph(x)) & (schraudolph(x) != exp2(x))
    groups = approximate.view(-1, 8, together)
    assert (groups.all(-1).sum(-1) == 5).all()
    assert torch.equal(groups.all(-1), groups.any(-1))


def test_mitchell_ratio_and_window():
    ratio = mitchell(X).double() / torch.exp2(X)
    assert ratio.min() == pytest.approx(0.9530, abs=5e-4)
    assert ratio.max() == pytest.approx(1.0116, abs=5e-4)
    far = mitchell(torch.tensor([-124.5, -200.0, -2400.0, -1e9], dtype=torch.float64))
    assert (far < 2.0**-120).all()
    assert (far >= 0).all()
    window = 123.9 * np.log(2)
    assert window == pytest.approx(85.9, abs=0.1)
    edge = torch.tensor([-123.9], dtype=torch.float64)
    assert mitchell(edge).double().item() == pytest.approx(2.0**-123.9, rel=0.05)


@pytest.mark.parametrize(("std", "share"), [(1.0, 0.981), (1.75, 0.987)])
def test_mitchell_codes_agree_with_exact_rounding(std, share):
    g = torch.Generator().manual_seed(1)
    x = torch.randn(200_000, generator=g, dtype=torch.float64) * std
    groups = (x * np.log2(np.e)).view(-1, 32)
    relative = groups - groups.amax(-1, keepdim=True) + np.log2(6.0)
    same = round_e2m1(mitchell(relative)) == round_e2m1(exp2(relative))
    assert same.float().mean() == pytest.approx(share, abs=0.004)


@pytest.mark.parametrize(
    ("recipe", "least"),
    [
        (flamia.Recipe(exponential="schraudolph", training=False), 0.9983),
        (flamia.Recipe(variant="folded", exponential="schraudolph", training=False), 0.9983),
        (flamia.Recipe(format="fp4", exponential="mitchell", training=False), 0.978),
    ],
    ids=["schraudolph", "schraudolph-folded", "mitchell"],
)
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
def test_inference_accuracy(recipe, least, causal):
    q, k, v = (tokens(512, 2, 64, seed) for seed in range(3))
    q = q * 3  # a score range of a few dozen octaves
    cu = torch.tensor([0, 512], dtype=torch.int32)
    plan = make_plan(recipe, 2, 2, 64, None, 0 if causal else None, training=False)
    o, *_ = backend.run_forward(plan, q, k, v, Documents(cu, cu, 512, 512), None, None)
    want = fp64(q, k, v, torch.zeros_like(q), causal)[0]
    exact = run(make_plan(flamia.Recipe(format=recipe.format), 2, 2, 64, None, 0 if causal else None), q, k, v, q * 0)
    assert cosine(o, want) > min(least, cosine(exact.o, want) - 2e-3)
    assert not torch.equal(o, exact.o)
