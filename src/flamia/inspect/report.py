"""From counts to bounds: what a 128×128 tile of the unmasked hot loop costs each unit of an SM."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from importlib.util import find_spec

from flamia.inspect.build import Binary, build
from flamia.inspect.counts import UNITS, count, operand_bytes, packed, products
from flamia.inspect.rates import CHIPS, Chip
from flamia.inspect.sass import Code, Instruction, Loop
from flamia.inspect.subjects import Subject

TILE = 128
WARPS = 4  # of a warpgroup, and of the warps that reduce dQ
_MASKING = ("FSEL", "SEL", "ISETP", "R2P", "FSETP")
_REDUCTIONS = ("UBLKRED", "UTMAREDG", "RED", "REDG")
_BLACKWELL = ("UTCHMMA", "UTCQMMA", "UTCOMMA")
_NAMED = {*_BLACKWELL, "HGMMA", "QGMMA", "UBLKRED", "UTMAREDG"}


@dataclass(frozen=True)
class Report:
    """One kernel. Everything per tile is for one SM and 128 queries × 128 keys that are all visible.

    Attributes:
        kernel, arch, chip, peer: what was read. ``registers`` per thread at launch, ``roles`` after setmaxnreg.
        spill_bytes: per thread, of all stores to and loads from local memory in the code. loop_spill_bytes: those of
            one turn of the hot loop. stack_bytes: per thread.
        smem_bytes, threads: per CTA. ``tmem_columns``: allocated, of 512.
        opcodes: products and bulk reductions in the whole kernel, by machine instruction.
        counts: lanes of each unit per tile, ``shared_bytes``, ``emulated`` exponentials, ``warp_instructions``, and
            those that may be skipped (``skippable``) and are in nothing else.
        cycles: per tile and unit. tflops: the bound that each unit puts, with every SM busy.
        bound: the lowest of these. unit: whose it is.
    """

    kernel: str
    arch: str
    chip: str
    peer: bool
    registers: int
    roles: tuple[int, ...]
    spill_bytes: int
    loop_spill_bytes: int
    stack_bytes: int
    smem_bytes: int
    tmem_columns: int
    threads: int
    opcodes: dict[str, int]
    counts: dict[str, int]
    cycles: dict[str, float]
    tflops: dict[str, float]
    bound: float
    unit: str

    def as_dict(self) -> dict[str, object]:
        """What ``--json`` prints."""
        return asdict(self)


def inspect_kernel(subject: Subject, arch: str) -> Report:
    """Compile a subject for a target and read it.

    Raises:
        ValueError: arch is not one of the subject's, or the code has no loop that is understood.
        ModuleNotFoundError: a compiler, or the peer's package, is not installed.
        RuntimeError: compiling failed, or did not give exactly one kernel of the subject's symbol.
    """
    if arch not in subject.archs:
        raise ValueError(f"arch {arch!r} is none of {subject.name}, which has {', '.join(subject.archs)}")
    for module in ("cutlass", "tvm_ffi", "triton", *(["flash_attn"] if subject.peer else [])):
        if find_spec(module) is None:
            raise ModuleNotFoundError(f"No module named {module!r}", name=module)
    found = [b for b in build(subject.build, arch) if subject.symbol in b.symbol]
    if len(found) != 1:
        raise RuntimeError(f"{subject.build} compiled {len(found)} kernels named like {subject.symbol!r}, not one")
    return make_report(subject, arch, found[0])


def make_report(subject: Subject, arch: str, binary: Binary) -> Report:
    """The report of a kernel that is compiled already."""
    chip = CHIPS[arch]
    tile, mma = per_tile(subject, binary.code, chip)
    lanes = {unit: getattr(chip, unit) for unit in UNITS}
    cycles = {"mma": mma, **{unit: 32 * tile[unit] / rate for unit, rate in lanes.items()}}
    # one unit executes both kinds of MUFU
    cycles["mufu"] += cycles.pop("exponentials")
    cycles["shared"] = tile["shared_bytes"] / chip.shared_bytes
    cycles["issue"] = tile["issue"] / chip.issue
    flops = subject.products * 2 * TILE * TILE * subject.head_dim
    tflops = {u: flops * chip.sms * chip.ghz * 1e9 / c / 1e12 for u, c in cycles.items() if c}
    unit = min(tflops, key=lambda u: tflops[u])
    local = count(binary.code.instructions)["local_bytes"] // 32
    hot = count(weights_loop(binary.code.loops).all)["local_bytes"] // 32
    counts = {unit: 32 * tile[unit] for unit in (*UNITS, "emulated")}
    counts |= {"shared_bytes": tile["shared_bytes"], "warp_instructions": tile["issue"], "skippable": tile["skippable"]}
    return Report(
        kernel=subject.name,
        arch=arch,
        chip=chip.name,
        peer=subject.peer,
        registers=binary.registers,
        roles=binary.roles,
        spill_bytes=local,
        loop_spill_bytes=hot,
        stack_bytes=binary.stack_bytes,
        smem_bytes=binary.smem_bytes,
        tmem_columns=binary.tmem_columns,
        threads=binary.threads,
        opcodes=dict(sorted(Counter(_named(i) for i in binary.code.instructions if i.head in _NAMED).items())),
        counts=counts,
        cycles={u: round(c, 1) for u, c in cycles.items()},
        tflops={u: round(t, 1) for u, t in tflops.items()},
        bound=round(tflops[unit], 1),
        unit=unit,
    )


def _named(instruction: Instruction) -> str:
    # Blackwell's scaled products have the scales' tensor memory after the instruction descriptor, and no own opcode
    scaled = instruction.head in _BLACKWELL and "tmem[" in instruction.operands.partition("idesc[")[2]
    return instruction.opcode + " (scaled)" * scaled


def per_tile(subject: Subject, code: Code, chip: Chip) -> tuple[Counter[str], float]:
    """(warp instructions and bytes of one tile, cycles of its tensor-core products).

    The loop that makes the weights, and on Blackwell the loops of other warps: the one that issues products, the one
    that rescales o and the one that reduces dQ (one turn of four warps per tile). What a turn may skip is left out: it
    is rare in every kernel here (a rescale, an exponent that changes, the mask of an edge), and counted as
    ``skippable``.
    """
    loop = weights_loop(code.loops)
    elements = packed(loop.always) / subject.payloads
    turns = TILE * TILE / (32 * elements)  # of one warp
    total = _turns(loop, turns)
    own = products(loop.always)
    if own:
        mma = sum(n * 2 * macs / chip.mma[bits] for (bits, macs), n in own.items()) * turns / WARPS
        total["shared_bytes"] += round(operand_bytes(loop.always) * turns / WARPS)
        return total, mma
    issuer = max(code.loops, key=lambda one: sum(products(one.all).values()))
    issued = products(issuer.all)
    if not issued:
        raise ValueError(f"{subject.name}: no loop with tensor-core products")
    macs = subject.products * TILE * TILE * subject.head_dim
    share = macs / sum(n * each for (_, each), n in issued.items())  # of a turn
    mma = share * sum(n * 2 * each / chip.mma[bits] for (bits, each), n in issued.items())
    total["shared_bytes"] += round(share * operand_bytes(issuer.all))
    total += _turns(issuer, share)
    for other in code.loops:
        if other in (loop, issuer):
            continue
        inside = count(other.all)
        if any(i.head in _REDUCTIONS for i in other.all):
            total += _turns(other, WARPS)
        elif inside["columns"] and not inside["exponentials"] and any(i.head == "STTM" for i in other.all):
            total += _turns(other, TILE * subject.head_dim / (32 * inside["columns"]))
    return total, mma


def weights_loop(loops: Iterable[Loop]) -> Loop:
    """The unmasked loop that makes the weights: with exponentials and conversions, and fewest masking instructions
    for what it converts.

    Raises:
        ValueError: there is none.
    """

    def masking(loop: Loop) -> float:
        return sum(i.head in _MASKING for i in loop.always) / packed(loop.always)

    found = [one for one in loops if count(one.always)["exponentials"] >= 8 and packed(one.always)]
    if not found:
        raise ValueError("code has no loop with exponentials and conversions to narrow floats")
    return min(found, key=masking)


def _turns(loop: Loop, times: float) -> Counter[str]:
    """What so many turns count, by name; ``skippable``: warp instructions that they may skip."""
    counts = count(loop.always)
    counts["skippable"] = len(loop.sometimes)
    return Counter({name: round(n * times) for name, n in counts.items()})
