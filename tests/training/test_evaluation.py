"""The leakage test itself: sizes, errors of the mean, and that it sees a leak."""

import math
import statistics

import pytest
import torch

from flamia.training import Row, Trainer, compare, evaluate, exact_attention
from flamia.training.evaluation import mean_and_error


class Known:
    """Stands in for a model: the loss of a token is what the attention says it is."""

    def loss(self, tokens, targets, cu_seqlens, max_seqlen, attend):
        return attend(tokens)


def rows():
    cu = torch.tensor([0, 5, 40], dtype=torch.int32)
    return [Row(torch.full((40,), float(i)), torch.zeros(40), cu) for i in range(3)]


def test_gap_is_the_mean_difference_and_falls_on_positions():
    def own(tokens):
        losses = tokens + 1
        losses[7] -= 4  # position 2 of the second document
        return losses

    result = evaluate(Known(), rows(), 40, own, lambda tokens: tokens + 1.5, step=9)
    assert result.step == 9
    assert result.exact_rows == (1.5, 2.5, 3.5)
    assert result.own_rows == pytest.approx((0.9, 1.9, 2.9))
    assert (result.own, result.exact) == pytest.approx((1.9, 2.5))
    assert result.gap == pytest.approx(-0.6)
    assert result.gap_standard_error == pytest.approx(0, abs=1e-12)
    assert len(result.gap_by_position) == 32
    assert result.gap_by_position[2] == pytest.approx(-0.5 - 4 / 3)  # positions 2, 2 and 34 of each row
    assert result.gap_by_position[10] == pytest.approx(-0.5)


def test_error_of_the_mean():
    values = [0.1, 0.5, -0.2, 0.9]
    mean, error = mean_and_error(values)
    assert mean == pytest.approx(statistics.mean(values))
    assert error == pytest.approx(statistics.stdev(values) / 2)
    assert math.isnan(mean_and_error([1.0])[1])


def test_runs_are_compared_row_by_row():
    a = evaluate(Known(), rows(), 40, lambda t: t + 1, lambda t: t + 2)
    b = evaluate(Known(), rows(), 40, lambda t: t * 2, lambda t: t)
    difference, error = compare(a, b)
    assert difference == pytest.approx(0)
    assert error == pytest.approx(statistics.stdev([-1, 0, 1]) / math.sqrt(3))
    with pytest.raises(ValueError, match="2 validation rows"):
        compare(a, evaluate(Known(), rows()[:2], 40, lambda t: t, lambda t: t))


def test_a_model_that_sees_the_next_token_is_caught(small):
    """A blatant leak, to be sure that training finds what is there to be found."""

    def peeks(q, k, v, cu_seqlens, max_seqlen):
        return exact_attention(q, k, v, cu_seqlens, max_seqlen) + v.roll(-1, 0)

    trainer = Trainer(small(steps=60, lr=1e-2, tokens=256))
    trainer.attend = peeks
    trainer.exact = exact_attention
    final = trainer.train().final
    assert final.own < final.exact - 0.3
    assert final.gap < -3 * final.gap_standard_error
