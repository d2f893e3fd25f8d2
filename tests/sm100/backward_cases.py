"""Inputs of the Blackwell backward with what its twin makes of them, and the kernels to run on them."""

import itertools
from unittest import mock

import cutlass
import torch
from cutlass import cute
from reference_cases import make_plan, relative_rms

import flamia
import softgpu
from flamia import formats
from flamia.documents import TOKEN_BLOCK, Documents, column_capacity
from flamia.quantize.payloads import Payloads, forward_specs
from flamia.quantize.reference import TokenMap, make_all, prepare, token_amax
from flamia.quantize.triton_finish import fragment_order
from flamia.reference import backend
from flamia.reference import backward as twin
from flamia.reference import forward as reference_forward
from flamia.reference.chunks import chunks
from flamia.sm100.backward import Backward, compile_backward
from flamia.worklists import work_lists
from softgpu.cutedsl import compiling

_KERNELS = {}


def kernel(device, head_dim, ratio, masks, dtype=torch.bfloat16, arch="sm_100a", **options):
    """The compiled kernel, to run on ``device``."""
    out = {torch.bfloat16: cutlass.BFloat16, torch.float16: cutlass.Float16}[dtype]
    key = (head_dim, ratio, masks, dtype, arch, tuple(options.items()))
    if key not in _KERNELS:
        with compiling(softgpu.Device(), arch):
            made = Backward(head_dim, ratio, masks, rotate=head_dim == 128, arch=arch, **options)
            _KERNELS[key] = compile_backward(made, out, compile=cute.compile)
    _KERNELS[key].device = device
    return _KERNELS[key]


def offsets(lengths):
    return torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32)


class Case:
    """Seeded packed inputs as payloads, and the twin's gradients.

    spread: tokens differ in size by powers of two of that deviation. dlse: lse has a gradient. edit: changes q, k, v
    and do in place.
    """

    def __init__(
        self,
        len_q,
        len_k,
        heads,
        kv_heads,
        head_dim,
        left=None,
        right=None,
        spread=0.0,
        dlse=False,
        edit=None,
        **recipe,
    ):
        g = torch.Generator().manual_seed(0)
        total_q, total_k = sum(len_q) + 3, sum(len_k) + 2  # tokens of no document at the end

        def tokens(total, heads):
            size = torch.exp2(torch.randn(total, 1, 1, generator=g) * spread)
            return (torch.randn(total, heads, head_dim, generator=g) * size).bfloat16()

        q, do = tokens(total_q, heads), tokens(total_q, heads)
        k, v = tokens(total_k, kv_heads), tokens(total_k, kv_heads)
        # Blocks of different sizes, or a wrong scale would go unseen.
        for x in (q, k, v, do):
            blocks = torch.randint(-2, 3, (len(x) // TOKEN_BLOCK + 1,), generator=g).float().exp2()
            x *= blocks.repeat_interleave(TOKEN_BLOCK)[: len(x), None, None].bfloat16()
        if edit is not None:
            edit(q, k, v, do)
        self.plan = plan = make_plan(flamia.Recipe(**recipe), heads, kv_heads, head_dim, left, right, training=True)
        documents = self.documents = Documents(offsets(len_q), offsets(len_k), total_q, total_k)
        maps = {name: TokenMap.build(documents.cu_seqlens_q, total_q) for name in ("q", "do")}
        maps |= {name: TokenMap.build(documents.cu_seqlens_k, total_k) for name in "kv"}
        sources = {
            name: prepare(x, maps[name], rotate=plan.rotates and name != "v")
            for name, x in zip("qkv", (q, k, v), strict=True)
        }
        items = make_all(forward_specs(plan.recipe, True), sources, maps, per_token=plan.per_token, rounding="up")
        self.payloads = Payloads(items, token_amax(sources["k"]), token_amax(sources["v"]))
        forward = reference_forward.forward(plan, self.payloads, documents)
        gradient = torch.randn(heads, total_q, generator=g) if dlse else None
        with mock.patch.object(backend, "backward", wraps=twin.backward) as called:
            backend.run_backward(
                plan, do, gradient, forward.o.bfloat16(), forward.lse2, forward.row_max, self.payloads, documents, None
            )
        self.arguments = called.call_args.args
        self.want = twin.backward(*self.arguments)
        self.lists = work_lists(documents, left, right)
        self.window = (left or 0, right or 0)
        self.used = int(documents.cu_seqlens_q[-1]), int(documents.cu_seqlens_k[-1])
        self._prescales()

    def _prescales(self):
        plan, documents = self.plan, self.documents
        self.token_scale = torch.zeros(plan.heads_q, documents.total_q, dtype=torch.int32)
        for chunk in chunks(documents, plan.heads_kv, plan.ratio, plan.head_dim, plan.left, plan.right):
            made = twin._ChunkBackward(plan, chunk, *self.arguments[1:3], *self.arguments[4:])
            chunk.scatter_table(self.token_scale, made.prescale.to(torch.int32), "q")
        cu = documents.cu_seqlens_q.tolist()
        self.document_scale = torch.zeros(plan.heads_q, len(cu) - 1, dtype=torch.int32)
        for i, (a, b) in enumerate(itertools.pairwise(cu)):
            if b > a:
                self.document_scale[:, i] = self.token_scale[:, a]

    def run(self, launch, dtype=torch.bfloat16, section=1, ctas=2):
        """dq before its rotation in FP32, dk, dv of the kernel; dk and dv start as NaN."""
        plan, documents, f8 = self.plan, self.documents, torch.float8_e4m3fn
        q, k, v = (self.payloads[name] for name in "qkv")
        _, _, do_payloads, _, lse2, delta, _ = self.arguments
        do = do_payloads["do"]
        dk, dv = (torch.full(v.codes.shape, torch.nan, dtype=dtype) for _ in range(2))
        capacity = column_capacity(documents.total_q, documents.count)
        accumulator = torch.zeros(plan.heads_q, capacity, plan.head_dim, dtype=torch.float16)
        turns = torch.zeros(plan.heads_q, capacity // TOKEN_BLOCK, dtype=torch.int32)
        causal = plan.recipe.accumulator_scale == "causal"
        lists = self.lists
        launch(
            *(x.codes.view(f8) for x in (q, k, v, do)), dk, dv, accumulator, turns, lse2.contiguous(),
            delta.contiguous(), q.exponents, k.exponents, v.exponents, do.exponents,
            self.token_scale if causal else self.document_scale, lists.backward.items, lists.backward.count,
            documents.cu_seqlens_q, documents.cu_seqlens_k, lists.q.column_starts, plan.score_scale,
            plan.softmax_scale, *self.window, section, ctas,
        )  # fmt: skip
        slabs = accumulator.view(plan.heads_q, -1, 16 * plan.head_dim)
        rows = slabs[..., fragment_order(plan.head_dim).flatten()].view(accumulator.shape).transpose(0, 1)
        sums = TokenMap.build(documents.cu_seqlens_q, documents.total_q).unpad(rows).float()
        return sums * formats.pow2(-self.token_scale).t().unsqueeze(-1) * plan.softmax_scale, dk, dv

    def errors(self, result):
        """Relative RMS of dq, dk and dv."""
        dq, dk, dv = self.want
        want = (dq, formats.hadamard(dk) if self.plan.rotates else dk, dv)
        lengths = (self.used[0], self.used[1], self.used[1])
        return [relative_rms(x[:n], y[:n]) for x, y, n in zip(result, want, lengths, strict=True)]

    def check(self, result, tolerance=5e-3):
        errors = self.errors(result)
        assert max(errors) < tolerance, errors
        for x in result[1:]:
            assert x[self.used[1] :].isnan().all()  # keys of no document are not written
