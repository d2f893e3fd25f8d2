"""Warpgroup matrix products of sm_90a (PTX ISA 9.7.15).

A product runs when its group is waited for: as late as the program allows, so that reading accumulators or
reusing operands too early gives wrong numbers or a diagnosis.
"""

from __future__ import annotations

import re

import numpy as np

from ..errors import BarrierMisuse, OutOfBounds
from ..formats import DECODE, bf16_to_f32
from ..layouts import MatrixDescriptor, operand_bytes, operand_granules
from ..ptx import Imm, Vec
from ..translate import emits

#: type → (bytes, depth of one product)
TYPES = {"bf16": (2, 16), "f16": (2, 16), "e4m3": (1, 32), "e5m2": (1, 32)}
#: type → smallest exponent of a normal code
SMALLEST = {"e4m3": -6, "e5m2": -14}


@emits("wgmma")
def wgmma(g, i):
    """fence, mma_async, commit_group and wait_group, by all 128 threads of a warpgroup."""
    action = i.parts[1]
    if action == "fence":
        g.line(f"{g.use(fence)}(f, {g.mask})")
    elif action == "commit_group":
        g.line(f"{g.use(commit)}(f, {g.mask})")
    elif action == "wait_group":
        g.line(f"{g.use(wait)}(f, {i.operands[0].value}, {g.mask})")
    elif action == "mma_async":
        _product(g, i)
    else:
        raise g.unsupported("unknown form")


def _product(g, i):
    shape = re.fullmatch(r"m64n(\d+)k(\d+)", i.parts[4])
    d_type, a_type, b_type = i.parts[5:8]
    if len(i.parts) != 8 or not shape or d_type != "f32" or a_type not in TYPES or b_type not in TYPES:
        raise g.unsupported("this shape or type is not supported")
    n, k = int(shape.group(1)), int(shape.group(2))
    if k != TYPES[a_type][1] or i.guard is not None:
        raise g.unsupported("the depth does not fit the type")
    d, a, b, scale_d, *rest = i.operands
    rest = [r.value for r in rest]
    signs = ([*rest, 1, 1])[:2]
    transposed = tuple(rest[2:]) if len(rest) > 2 else ()
    if isinstance(a, Vec):
        a_major, b_major = 0, transposed[0] if transposed else 0
        source = ", ".join(g.src(x, "u4") for x in a.items)
        a_text = f"({source},)"
    else:
        a_major, b_major = transposed if transposed else (0, 0)
        a_text = g.src(a, "u8")
    rows = [g.program.rows[r.name][1] for r in d.items]
    if len(rows) != n // 2:
        raise g.unsupported(f"{n // 2} accumulator registers are expected")
    keep = g.const(scale_d.value, "p") if isinstance(scale_d, Imm) else g.src(scale_d, "p")
    plan = g.use(Plan(n, k, a_type, b_type, signs, a_major, b_major, rows, (i.line, i.text[:120])))
    g.line(f"{g.use(mma_async)}(f, {plan}, {a_text}, {g.src(b, 'u8')}, {keep})")


class Plan:
    """What is fixed about one mma_async instruction."""

    def __init__(self, n, k, a_type, b_type, signs, a_major, b_major, rows, where):
        self.n, self.k, self.a_type, self.b_type, self.signs = n, k, a_type, b_type, signs
        self.a_major, self.b_major, self.where = a_major, b_major, where
        first = rows[0]
        self.rows = slice(first, first + len(rows)) if rows == list(range(first, first + len(rows))) else np.array(rows)


def _group_only(f, mask, what):
    if f.mask is not None or f.n != 128 or (mask is not None and not np.broadcast_to(mask, f.n).all()):
        raise BarrierMisuse(f"{what} needs all 128 threads of a warpgroup")


def decode(raw, kind):
    """Raw operand elements to float32."""
    if kind == "bf16":
        return bf16_to_f32(raw)
    if kind == "f16":
        return raw.view(np.float16).astype(np.float32)
    return DECODE[kind][raw]


def fetch(shared, desc, rows, depth_bytes, mn_major, kind, unit):
    """An operand [rows, depth] from shared memory as float32."""
    at = operand_bytes(desc, rows, depth_bytes, mn_major, unit)
    if int(at.max()) + unit > shared.size:
        raise OutOfBounds(f"a matrix descriptor reaches shared offset {int(at.max()):#x} of {shared.size:#x}")
    return decode(shared.views[unit][at // unit], kind)


def _exponents(x, smallest):
    return np.where(x == 0, -200, np.maximum(np.frexp(x)[1] - 1, smallest)).astype(np.int16)


def add_eight_bit(a, b, old, smallest_a, smallest_b):
    """Decoded 8-bit operands a [m, 32] and b [n, 32] on top of old [m, n], as a Hopper chip adds them; float32 [m, n].

    Products and sum are aligned to the largest exponent (of a product: the sum of its factors', subnormal codes having
    the smallest of their type), cut off 13 bits behind it, added, and cut off 13 bits behind the leading bit.
    """
    old = np.broadcast_to(np.float32(old), (a.shape[0], b.shape[0]))
    top = (_exponents(a, smallest_a)[:, None] + _exponents(b, smallest_b)[None]).max(-1).astype(np.int32)
    top = np.maximum(np.maximum(top, np.where(old == 0, -200, np.frexp(old)[1] - 1)), -100)
    unit = np.ldexp(np.float32(1), 13 - top)
    products = a[:, None] * b[None]
    products *= unit[..., None]
    total = np.trunc(products, out=products).sum(-1) + np.trunc(old * unit)
    kept = (total.view(np.uint32) & np.uint32(0xFFFFFC00)).view(np.float32)
    return kept * np.ldexp(np.float32(1), top - 13)


def _single(value, what):
    first = int(value[0])
    if value.size > 1 and (value != value[0]).any():
        raise BarrierMisuse(f"{what} differs between the threads of the warpgroup")
    return first


class Product:
    """One product in flight: the operand buffers are held until it runs."""

    def __init__(self, f, plan, a, b_desc, keep):
        self.f, self.plan, self.keep = f, plan, keep
        self.gang, self.shared = f.gang, f.cta.shared
        unit = TYPES[plan.a_type][0]
        self.unit = unit
        self.b = MatrixDescriptor.wgmma(b_desc)
        self.holds = [operand_granules(self.b, plan.n, 32, bool(plan.b_major), unit)]
        if isinstance(a, tuple):
            self.a_regs, self.a = a, None
        else:
            self.a_regs, self.a = None, MatrixDescriptor.wgmma(_single(a, "the A descriptor"))
            self.holds.append(operand_granules(self.a, 64, 32, bool(plan.a_major), unit))
        for granules in self.holds:
            if int(granules[-1]) * 16 >= self.shared.size:
                raise OutOfBounds(f"a matrix descriptor reaches shared offset {int(granules[-1]) * 16:#x}")
            self.shared.check_fenced(granules, f.cta.fences, f.lanes.warp_list, "wgmma")
            self.shared.check_valid(granules, "wgmma")
            self.shared.begin_read(granules)

    def run(self):
        plan = self.plan
        for granules in self.holds:
            self.shared.end_read(granules)
        b = fetch(self.shared, self.b, plan.n, 32, bool(plan.b_major), plan.b_type, self.unit)
        if self.a is not None:
            a = fetch(self.shared, self.a, 64, 32, bool(plan.a_major), plan.a_type, self.unit)
        else:
            a = self._register_a()
        if plan.signs[0] * plan.signs[1] < 0:
            a = -a
        n = plan.n // 8
        # [warp, half, group, column block, thread, pair] ↔ registers [block, half, pair] × lanes [warp, group, thread]
        file = self.gang.files[32].view(np.float32)
        if self.unit == 1:
            old = 0.0
            if self.keep:
                held = file[plan.rows].reshape(n, 2, 2, 4, 8, 4)
                old = np.ascontiguousarray(held.transpose(3, 1, 4, 0, 5, 2)).reshape(64, plan.n)
            product = add_eight_bit(a, b, old, SMALLEST[plan.a_type], SMALLEST[plan.b_type])
        else:
            product = a @ b.T
        tile = product.reshape(4, 2, 8, n, 4, 2).transpose(3, 1, 5, 0, 2, 4).reshape(plan.n // 2, 128)
        if self.keep and self.unit > 1:
            file[plan.rows] += tile
        else:
            file[plan.rows] = tile

    def _register_a(self):
        """The A tile [64, depth] from four registers (PTX ISA 9.7.15.5.1.2)."""
        regs = np.empty((4, 128), np.uint32)
        for n, r in enumerate(self.a_regs):
            regs[n] = r
        per = 4 // self.unit
        # registers [depth half, row half] × lanes [warp, row, thread] × elements
        raw = regs.view(f"u{self.unit}").reshape(2, 2, 4, 8, 4, per)
        tile = raw.transpose(2, 1, 3, 0, 4, 5).reshape(64, 8 * per)
        return decode(np.ascontiguousarray(tile), self.plan.a_type)


def mma_async(f, plan, a, b, keep):
    """Queue one product of a warpgroup; it takes effect when its group is waited for."""
    _group_only(f, None, "wgmma.mma_async")
    keep = _single(np.broadcast_to(keep, f.n), "scale-d")
    f.gang.products_open.append(Product(f, plan, a, _single(b, "the B descriptor"), bool(keep)))


def fence(f, mask):
    """Register accesses before and after are ordered; nothing to do, registers are written at the wait."""
    _group_only(f, mask, "wgmma.fence")


def commit(f, mask):
    """Close the group of products queued so far."""
    _group_only(f, mask, "wgmma.commit_group")
    gang = f.gang
    gang.product_groups.append(gang.products_open)
    gang.products_open = []


def wait(f, keep, mask):
    """Run all but the newest ``keep`` groups."""
    _group_only(f, mask, "wgmma.wait_group")
    gang = f.gang
    while len(gang.product_groups) > keep:
        for product in gang.product_groups.pop(0):
            product.run()
