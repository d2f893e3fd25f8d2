"""The Blackwell forward on a software device, against its twin with the same codes."""

import math

import pytest
import torch

pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")
pytest.importorskip("tvm_ffi", reason="needs apache-tvm-ffi")

import cutlass
from cutlass import cute
from reference_cases import make_plan, relative_rms

import flamia
import softgpu
from flamia.documents import Documents
from flamia.quantize.payloads import Payloads
from flamia.quantize.reference import VALUE_MIN_EXPONENT, TokenMap, prepare, token_blocks
from flamia.reference import forward as reference
from flamia.sm100.forward import Forward, compile_forward
from flamia.sm100.work import ITEM, Masks
from flamia.worklists import Tiling, work_lists
from softgpu.cutedsl import compiling

_KERNELS = {}


def kernel(device, head_dim, ratio, masks, dtype=torch.bfloat16, arch="sm_100a", **options):
    """The compiled kernel, to run on ``device``."""
    out = {torch.bfloat16: cutlass.BFloat16, torch.float16: cutlass.Float16}[dtype]
    key = (head_dim, ratio, masks, dtype, arch, tuple(options.items()))
    if key not in _KERNELS:
        with compiling(softgpu.Device(), arch):
            made = Forward(head_dim, ratio, masks, arch=arch, **options)
            _KERNELS[key] = compile_forward(made, out, compile=cute.compile)
    _KERNELS[key].device = device
    return _KERNELS[key]


class Case:
    """Seeded packed inputs as payloads, poisoned outputs, and the twin's result."""

    def __init__(self, len_q, len_k, heads, kv_heads, head_dim, left=None, right=None, **recipe):
        g = torch.Generator().manual_seed(0)
        total_q, total_k = sum(len_q) + 3, sum(len_k) + 2  # tokens of no document at the end
        q = torch.randn(total_q, heads, head_dim, generator=g).bfloat16()
        k = torch.randn(total_k, kv_heads, head_dim, generator=g).bfloat16()
        v = torch.randn(total_k, kv_heads, head_dim, generator=g).bfloat16()
        # Blocks of different sizes, or a wrong scale would go unseen.
        k *= torch.exp2(torch.randint(-2, 2, (total_k, 1, 1), generator=g).float()).bfloat16()
        v *= (
            torch.exp2(torch.randint(-6, 6, (total_k // 32 + 1,), generator=g).float())
            .repeat_interleave(32)[:total_k, None, None]
            .bfloat16()
        )
        self.cu_q, self.cu_k = (
            torch.tensor([0, *torch.tensor(n).cumsum(0)], dtype=torch.int32) for n in (len_q, len_k)
        )
        documents = Documents(self.cu_q, self.cu_k, total_q, total_k)
        maps = [TokenMap.build(cu, n) for cu, n in ((self.cu_q, total_q), (self.cu_k, total_k))]
        rotate = head_dim == 128
        self.q = token_blocks(prepare(q, maps[0], rotate=rotate), maps[0])
        self.k = token_blocks(prepare(k, maps[1], rotate=rotate), maps[1])
        self.v = token_blocks(prepare(v, maps[1]), maps[1], least=VALUE_MIN_EXPONENT)
        self.list = work_lists(documents, left, right, Tiling(forward=ITEM)).forward
        self.window = (left or 0, right or 0)
        self.scale = math.log2(math.e) / math.sqrt(head_dim)
        plan = make_plan(flamia.Recipe(**recipe), heads, kv_heads, head_dim, left, right, training=False)
        empty = torch.empty(0)
        payloads = Payloads({"q": self.q, "k": self.k, "v": self.v}, empty, empty)
        self.want = reference.forward(plan, payloads, documents)
        self.heads, self.shape, self.used = heads, (total_q, heads, head_dim), sum(len_q)

    def run(self, launch, dtype=torch.bfloat16, section=1, ctas=2):
        """o, lse2 and row maxima of the kernel; the buffers start as NaN."""
        o = torch.full(self.shape, torch.nan, dtype=dtype)
        lse2, m = (torch.full((self.heads, self.shape[0]), torch.nan) for _ in range(2))
        f8 = torch.float8_e4m3fn
        codes = (self.q.codes.view(f8), self.k.codes.view(f8), self.v.codes.view(f8))
        exponents = (self.q.exponents, self.k.exponents, self.v.exponents)
        work = (self.list.items, self.list.count, self.cu_q, self.cu_k)
        launch(*codes, o, lse2, m, *exponents, *work, self.scale, *self.window, section, ctas)
        return o, lse2, m

    def check(self, result, tolerance=2e-3):
        o, lse2, m = (x.transpose(0, 1)[: self.used] if x.dim() == 2 else x[: self.used] for x in result)
        want_lse, want_m = self.want.lse2.t()[: self.used], self.want.row_max.t()[: self.used]
        assert relative_rms(o, self.want.o[: self.used]) < tolerance
        seen = want_lse.isfinite()
        assert torch.equal(lse2.isfinite(), seen)
        error = (lse2 - want_lse)[seen].abs()
        assert error.max() < 0.05
        assert (error > 7.1e-4).sum() <= 2
        assert torch.allclose(m, want_m, rtol=1e-6, atol=0)
        assert (o[~seen] == 0).all()
        for x in (result[0][self.used :], result[1][:, self.used :], result[2][:, self.used :]):
            assert x.isnan().all()  # rows of no document are not written


CAUSAL, FULL, WINDOW = Masks(False, True), Masks(False, False), Masks(True, True)
