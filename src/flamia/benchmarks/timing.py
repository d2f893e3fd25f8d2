"""Device time of a call, and the bandwidth to measure it by."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch


def graph_seconds(call: Callable[[], object], repeats: int = 20, inner: int = 5) -> float:
    """Median device seconds of one call, replayed from a CUDA graph so that launches cost what they cost in training.

    The graph holds ``inner`` calls; what they return is kept until the graph is done.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    kept = []
    with torch.cuda.graph(graph):
        for _ in range(inner):
            kept.append(call())
    return _median(graph.replay, repeats) / inner


def eager_seconds(call: Callable[[], object], repeats: int = 5) -> float:
    """Median device seconds of one call launched as usual."""
    call()
    return _median(call, repeats)


def _median(call: Callable[[], object], repeats: int) -> float:
    times = []
    call()
    for _ in range(repeats):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) / 1000)
    return statistics.median(times)


def copy_bandwidth(size: int = 1 << 30) -> float:
    """Bytes per second, read plus written, of a device copy of ``size`` bytes."""
    source = torch.empty(size, dtype=torch.uint8, device="cuda").random_()
    target = torch.empty_like(source)
    return 2 * size / graph_seconds(lambda: target.copy_(source))
