"""Cluster launch control (PTX ISA 9.7.17): a running cluster takes the work of one that has not started."""

from __future__ import annotations

import numpy as np

from ..memory import OFFSET_MASK
from ..ptx import Sink, Vec
from ..translate import emits
from .tma import Operation, _each


@emits("clusterlaunchcontrol")
def cluster_launch_control(g, i):
    """try_cancel asks for a waiting cluster's work; query_cancel reads the answer."""
    if i.parts[1] == "try_cancel":
        multicast = any(p.startswith("multicast") for p in i.parts)
        target, bar = i.operands[:2]
        g.line(
            f"{g.use(try_cancel)}(f, {g.address(target)}, {g.address(bar)}, {multicast}, "
            f"{(i.line, i.text)!r}, {g.mask})"
        )
        return
    if i.parts[1] != "query_cancel":
        raise g.unsupported("unknown form")
    d, source = i.operands
    low, high = g.src(source.first, "u8"), g.src(source.second, "u8")
    if i.parts[2] == "is_canceled":
        g.dst(d, "p", f"({high} >> {g.const(63, 'u8')}) == 1")
        return
    axis = i.parts[2].split("::")[1] if "::" in i.parts[2] else "v4"
    shifts = {"x": (low, 0), "y": (low, 32), "z": (high, 0)}
    if axis in shifts:
        word, shift = shifts[axis]
        g.dst(d, "u4", f"({word} >> {g.const(shift, 'u8')}).astype(np.uint32)")
    elif isinstance(d, Vec):
        for item, name in zip(d.items, "xyz", strict=False):
            word, shift = shifts[name]
            if not isinstance(item, Sink):
                g.dst(item, "u4", f"({word} >> {g.const(shift, 'u8')}).astype(np.uint32)")
    else:
        raise g.unsupported("unknown form")


def try_cancel(f, target, bar, multicast, where, mask):
    """Ask for another cluster's work: a 16-byte answer and 16 bytes on the mbarrier, in every CTA with multicast.

    The answer's format is this machine's own: x and y in the low word, z below bit 63 of the high word, which says
    whether there was any.
    """
    cluster = f.cta.cluster
    for _, to, mbar in _each(f, mask, target, bar):
        ctas = cluster.ctas if multicast else [cluster.cta_of(to)]
        bars = [c.mbarrier((c.rank << 24) | (mbar & OFFSET_MASK)) for c in ctas]

        def run(to=to, ctas=ctas, bars=bars):
            origin = cluster.launch.take_pending()
            x, y, z = origin or (0, 0, 0)
            answer = np.array([x | y << 32, z | (1 << 63 if origin else 0)], np.uint64).view(np.uint8)
            for cta, barrier in zip(ctas, bars, strict=True):
                at = to & OFFSET_MASK
                cta.shared.data[at : at + 16] = answer
                cta.shared.valid[at : at + 16] = 1
                barrier.transact(-16)

        cluster.submit(Operation(where, run))
