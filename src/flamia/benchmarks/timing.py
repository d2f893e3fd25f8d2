"""Device time and memory of a call, and the bandwidth to measure time by."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeVar

import torch

T = TypeVar("T")


def graph_seconds(call: Callable[[], object], repeats: int = 20, inner: int = 5) -> float:
    """Median device seconds of one call, replayed from a CUDA graph so that launches cost what they cost in training.

    The graph holds ``inner`` calls; what they return is kept until the graph is done.
    """
    captured = Captured(call, inner)
    return _median(captured.graph.replay, repeats) / inner


class Captured:
    """A CUDA graph of ``inner`` calls, warmed up on a stream of its own; what they return is kept with it.

    Graphs with one ``pool`` (``torch.cuda.graph_pool_handle``) share memory: each overwrites what the others left.
    """

    def __init__(self, call: Callable[[], object], inner: int, pool: Any = None) -> None:
        self.inner = inner
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                call()
        torch.cuda.current_stream().wait_stream(stream)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, pool=pool):
            self.kept = [call() for _ in range(inner)]

    def seconds(self) -> float:
        """Device seconds of one call, from one replay."""
        return _event_seconds(self.graph.replay) / self.inner


def paired_seconds(
    calls: Mapping[str, Callable[[], object]], rounds: int, target: float = 4e-3, *, pool: Any = None
) -> dict[str, list[float]]:
    """Device seconds of each call in each round, replayed one after the other, every second round in reverse order.

    Rounds make calls comparable on a device whose clocks move: compare within a round, then take medians. A graph holds
    as many calls as last about ``target`` seconds. ``pool``: memory for all graphs to share.
    """
    graphs = {}
    for name, call in calls.items():
        once = Captured(call, 1, pool)
        once.seconds()
        graphs[name] = Captured(call, max(1, min(50, round(target / once.seconds()))), pool)
        graphs[name].seconds()
    times: dict[str, list[float]] = {name: [] for name in calls}
    for n in range(rounds):
        for name in list(calls) if n % 2 == 0 else reversed(list(calls)):
            times[name].append(graphs[name].seconds())
    return times


def paired_eager_seconds(calls: dict[str, Callable[[], object]], rounds: int, inner: int = 3) -> dict[str, list[float]]:
    """As ``paired_seconds``, launched as usual: ``inner`` calls in a row, so that launches run ahead of the device."""

    def several(call: Callable[[], object]) -> None:
        for _ in range(inner):
            call()

    times: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        call()
    for n in range(rounds):
        for name in list(calls) if n % 2 == 0 else reversed(list(calls)):
            times[name].append(_event_seconds(partial(several, calls[name])) / inner)
    return times


def peak_bytes(prepare: Callable[[], T], run: Callable[[T], object]) -> tuple[T, int]:
    """What ``prepare`` makes, and the most bytes that it and one ``run`` of it hold beside what is there already.

    The first run, which may fill caches that stay, is not the one that is measured.
    """
    before = torch.cuda.memory_allocated()
    made = prepare()
    kept = torch.cuda.memory_allocated() - before
    run(made)
    torch.cuda.synchronize()
    start = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run(made)
    torch.cuda.synchronize()
    return made, kept + torch.cuda.max_memory_allocated() - start


def eager_seconds(call: Callable[[], object], repeats: int = 5) -> float:
    """Median device seconds of one call launched as usual."""
    call()
    return _median(call, repeats)


def _median(call: Callable[[], object], repeats: int) -> float:
    call()
    return statistics.median(_event_seconds(call) for _ in range(repeats))


def _event_seconds(call: Callable[[], object]) -> float:
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    call()
    stop.record()
    stop.synchronize()
    return start.elapsed_time(stop) / 1000


def copy_bandwidth(size: int = 1 << 30) -> float:
    """Bytes per second, read plus written, of a device copy of ``size`` bytes (a multiple of 4): the best of the ways.

    A replayed ``copy_`` is a memcpy node, which on an H200 reaches two thirds of what a kernel does.
    """
    source = torch.empty(size // 4, dtype=torch.int32, device="cuda").random_()
    target = torch.empty_like(source)
    ways: tuple[Callable[[], object], ...] = (
        lambda: target.copy_(source),
        lambda: torch.neg(source, out=target),
        lambda: torch.add(source, 1, out=target),
    )
    return 2 * size / min(f(way) for way in ways for f in (graph_seconds, eager_seconds))
