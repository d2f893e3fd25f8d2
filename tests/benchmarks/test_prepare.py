"""What `flamia bench` can show without a GPU: workloads, counted bytes, the table, refusals."""

from collections import Counter
from dataclasses import dataclass

import pytest
import torch

from flamia.benchmarks.prepare import Row, size
from flamia.benchmarks.workloads import PACKINGS, lengths, offsets


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("tokens", [1, 1000, 65536])
def test_lengths_add_up_and_repeat(packing, tokens):
    first = lengths(packing, tokens)
    assert sum(first) == tokens
    assert min(first) >= 1
    assert lengths(packing, tokens) == first


def test_web_rows_are_a_long_tailed_mix():
    documents = lengths("web", 65536)
    assert len(documents) == 225
    assert max(documents) > 5 * 65536 / 225
    assert max(Counter(documents).values()) < 20
    assert offsets([3, 0, 2], "cpu").tolist() == [0, 3, 3, 5]


def test_unknown_packing_is_refused():
    with pytest.raises(ValueError, match="'books' is unknown: it must be one of one, web, tiny"):
        lengths("books", 10)


def test_size_counts_every_tensor_once():
    @dataclass
    class Holder:
        a: torch.Tensor
        b: torch.Tensor

    x, y = torch.zeros(10, dtype=torch.float16), torch.zeros(3, dtype=torch.float64)
    assert size(x, [y, x], Holder(x, torch.zeros(0)), {"k": y}) == 20 + 24


def test_table_shows_what_was_measured(capsys):
    from rich.console import Console

    from flamia.benchmarks.cli import render

    rows = [
        Row("", "", 0, 0, "device copy", 5e-4, 2 << 30, 1.0),
        Row("mxfp8", "web", 65536, 225, "q", 160e-6, 537_000_000, 0.781, 2.5e-3),
        Row("any", "web", 65536, 225, "work lists", 40e-6),
    ]
    Console(width=200).print(render(rows, "a device"))
    text = capsys.readouterr().out
    for word in ("device copy", "4295", "160.0", "3356", "78%", "2500", "40.0", "65,536"):
        assert word in text


@pytest.mark.skipif(torch.cuda.is_available(), reason="it would run the benchmark")
def test_without_a_gpu_the_command_says_so(capsys):
    from flamia.cli import main

    with pytest.raises(SystemExit) as stopped:
        main(["bench", "prepare"])
    assert stopped.value.code == 2
    assert "needs a CUDA device" in capsys.readouterr().err
