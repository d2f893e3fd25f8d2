"""What the audit calls a change and a distance, on tensors small enough to work out by hand."""

import math

import pytest
import torch

from flamia.audit import change, distance


def test_change_is_relative_to_the_row_and_names_the_rows():
    before = torch.tensor([3.0, 4.0]).repeat(1, 5, 2, 1)  # every row has norm 5
    after = before.clone()
    after[0, 1, 1, 0] += 0.5
    after[0, 3, 0, 1] -= 2.0
    seen = change(before, after)
    assert seen.rows == (1, 3)
    assert seen.max_rel_change == pytest.approx(0.4)
    assert not seen.bitwise_zero
    assert change(before, before.clone()).bitwise_zero


def test_rows_that_are_zero_but_for_rounding_are_compared_with_the_floor():
    before = torch.ones(1, 5, 1, 4)
    before[0, 0] = 1e-9
    after = before.clone()
    after[0, 0] = 2e-9
    assert change(before, after).max_rel_change == pytest.approx(1e-9 / 1e-2)


def test_bits_count_even_where_values_agree():
    before = torch.zeros(1, 3, 1, 2)
    seen = change(before, -before)
    assert seen.rows == (0, 1, 2)
    assert seen.max_rel_change == 0
    infinite = torch.full((1, 2, 1, 1), -math.inf)
    assert change(infinite, infinite.clone(), logarithm=True).bitwise_zero
    nan = torch.full((1, 2, 1, 1), math.nan)
    assert change(nan, nan.clone()).bitwise_zero


def test_losing_finiteness_is_an_infinite_change():
    before = torch.ones(1, 2, 1, 2)
    after = before.clone()
    after[0, 1, 0, 0] = math.nan
    assert change(before, after).max_rel_change == math.inf


def test_logarithms_change_absolutely_until_they_are_large():
    before = torch.tensor([0.001, -400.0]).view(1, 2, 1, 1)
    first, second = before.clone(), before.clone()
    first[0, 0] += 0.25
    second[0, 1] += 4
    assert change(before, first, logarithm=True).max_rel_change == pytest.approx(0.25)
    assert change(before, second, logarithm=True).max_rel_change == pytest.approx(0.01)


def test_distance():
    exact = torch.randn(1, 64, 2, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    same = distance(exact, exact)
    assert same.cosine == pytest.approx(1)
    assert (same.relative_error, same.bias) == (0, 0)
    shrunk = distance(0.9 * exact, exact)
    assert shrunk.cosine == pytest.approx(1)
    assert shrunk.relative_error == pytest.approx(0.1)
    assert shrunk.gain == pytest.approx(-0.1)
    shifted = distance(exact + 0.5, exact)
    assert shifted.bias == pytest.approx(0.5 / exact.abs().mean().item())
    flipped = exact.clone()
    flipped[..., 1, :] *= -1
    assert distance(flipped, exact).worst_head == pytest.approx(-1)
    assert math.isnan(distance(exact * math.nan, exact).cosine)
