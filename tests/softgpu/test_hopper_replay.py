"""The measure that compares a GPU with the software device must not be passed by what is broken."""

import math

import pytest
import torch
from hopper_replay import compare


def test_equal_tensors_and_infinities_are_equal():
    x = torch.tensor([1.0, -torch.inf, 0.5])
    assert compare(x, x.clone()) == (0.0, 1.0)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("side", [0, 1])
def test_what_is_not_finite_on_one_side_is_seen(bad, side):
    pair = [torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.0])]
    pair[side][1] = bad
    largest, equal = compare(*pair)
    assert math.isinf(largest)
    assert equal == 0.5


def test_the_largest_difference_is_reported():
    assert compare(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([1.0, 2.25, 3.5])) == (0.5, pytest.approx(1 / 3))
