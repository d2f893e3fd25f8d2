"""Which checks a run makes, and the deadlock report."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Checks:
    """Switches; all are on by default.

    uninitialised: reads of shared or tensor memory that nothing wrote. proxy_fences: generic writes that the async
    proxy reads without ``fence.proxy.async`` (PTX ISA 8.7, proxies). races: generic accesses to a buffer with an
    asynchronous operation in flight. leaks: barriers, bulk copies or tensor memory left unfinished at exit.

    Off by default, since shipped kernels do it: tensor_loads, a register that ``tcgen05.ld`` fills used before
    ``tcgen05.wait::ld``. Left off, it is a note in the report.
    """

    uninitialised: bool = True
    proxy_fences: bool = True
    races: bool = True
    leaks: bool = True
    tensor_loads: bool = False


ALL = Checks()
NONE = Checks(False, False, False, False)


def deadlock_report(ctas) -> str:
    """Who waits on what: one line per waiting group of lanes, then every mbarrier somebody waits on."""
    lines = ["deadlock: no warp can run and no asynchronous operation is in flight"]
    barriers = {}
    for cta in ctas:
        for gang in cta.gangs:
            for frag in gang.fragments:
                first = gang.first_warp + frag.lo // 32
                last = gang.first_warp + (frag.hi - 1) // 32
                warps = f"warp {first}" if first == last else f"warps {first}-{last}"
                instr = gang.program.blocks[frag.pc].instrs[0]
                lines.append(
                    f"  CTA {cta.index} (rank {cta.rank}) {warps}, {frag.count} lanes: {frag.waiting or 'ready'}"
                    f" at PTX line {instr.line}: {instr.text[:100]}"
                )
                if frag.barrier is not None:
                    barriers[id(frag.barrier)] = frag.barrier
    lines += [f"  {b.describe()}" for b in barriers.values()]
    pending = [f"  CTA {c.index}: {what}" for c in ctas for what in c.unfinished()]
    return "\n".join(lines + pending)
