"""FlashAttention-4 (flash-attn-4 on PyPI) on a software device, and its float64 reference."""

from __future__ import annotations

import contextlib
import math
import os

import torch

os.environ.setdefault("FLASH_ATTENTION_NUM_SMS", "4")

from softgpu import ALL, Device, SoftFunction
from softgpu.cutedsl import compiling
from softgpu.host import DeviceView

#: what FlashAttention-4 has compiled, one dictionary per cache of its own, by target, multiprocessors and switches
_COMPILED: dict[tuple, list[dict]] = {}


class HostTensor(torch.Tensor):
    """A CPU tensor that says it is on a GPU, for code that only asks."""

    is_cuda = property(lambda self: True)


def host(t: torch.Tensor) -> torch.Tensor:
    return t.as_subclass(HostTensor)


@contextlib.contextmanager
def flash_attention(device: Device, arch: str, edit=None):
    """FlashAttention-4's interface module, compiling for ``arch`` and running on ``device``."""
    import cutlass
    import flash_attn.cute.cute_dsl_utils as utils
    import flash_attn.cute.interface as interface

    class Hardware:
        """Stands in for the driver query of the persistent schedulers."""

        def __init__(self, *_, **__):
            pass

        def get_max_active_clusters(self, cluster_size=1, *_, **__):
            return max(1, device.num_sms // cluster_size)

        def get_device_multiprocessor_count(self):
            return device.num_sms

    original, arch_of, hardware = utils.from_dlpack, interface._get_device_arch, cutlass.utils.HardwareInfo
    number = int("".join(c for c in arch if c.isdigit()))
    functions = ("_flash_attn_fwd", "_flash_attn_bwd", "_bwd_preprocess", "_bwd_postprocess_convert")
    caches = [getattr(interface, name).compile_cache for name in functions]
    saved = [dict(c.cache) for c in caches]
    switches = sorted((n, x) for n, x in vars(interface.utils).items() if n.startswith("_fa_") and isinstance(x, bool))
    kept = (
        [{} for _ in caches] if edit else _COMPILED.setdefault((arch, device.num_sms, *switches), [{} for _ in caches])
    )
    utils.from_dlpack = lambda t, **k: original(DeviceView(t.as_subclass(torch.Tensor)), **k)
    interface._get_device_arch = lambda: number
    cutlass.utils.HardwareInfo = Hardware
    try:
        for c, k in zip(caches, kept, strict=True):
            c.cache.clear()
            c.cache.update(k)
            for function in k.values():
                function.device = device
        with compiling(device, arch, edit):
            yield interface
    finally:
        utils.from_dlpack, interface._get_device_arch, cutlass.utils.HardwareInfo = original, arch_of, hardware
        for c, k, s in zip(caches, kept, saved, strict=True):
            k.update(c.cache)
            c.cache.clear()
            c.cache.update(s)


def reference(q, k, v, do=None, *, causal=False, scale=None):
    """Attention of one document in float64: q [Sq, Hq, D], k and v [Sk, Hkv, D] → o, lse [, dq, dk, dv]."""
    scale = scale or 1 / math.sqrt(q.shape[-1])
    q, k, v = (t.as_subclass(torch.Tensor).double().detach().requires_grad_(do is not None) for t in (q, k, v))
    group = q.shape[1] // k.shape[1]
    kk, vv = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    s = torch.einsum("qhd,khd->hqk", q, kk) * scale
    if causal:
        sq, sk = s.shape[1:]
        s = s.masked_fill(torch.ones(sq, sk).triu(1 + sk - sq).bool(), float("-inf"))
    lse = s.logsumexp(-1)
    o = torch.einsum("hqk,khd->qhd", torch.where(lse[..., None].isinf(), 0.0, (s - lse[..., None]).exp()), vv)
    if do is None:
        return o.detach(), lse.detach()
    grads = torch.autograd.grad(o, (q, k, v), do.as_subclass(torch.Tensor).double())
    return o.detach(), lse.detach(), *grads


def make(arch, lengths_q, lengths_k, heads, heads_kv, dim=128, dtype=torch.bfloat16, seed=0):
    """Packed random q, k, v, dO and their cumulative lengths."""
    g = torch.Generator().manual_seed(seed)
    tq, tk = sum(lengths_q), sum(lengths_k)
    q, k, v, do = (
        torch.randn(n, h, dim, generator=g) for n, h in ((tq, heads), (tk, heads_kv), (tk, heads_kv), (tq, heads))
    )
    cum = [torch.tensor([0, *torch.tensor(x).cumsum(0)], dtype=torch.int32) for x in (lengths_q, lengths_k)]
    return [t.to(dtype) for t in (q, k, v, do)], cum


def run_case(
    device,
    arch,
    *,
    lengths_q,
    lengths_k=None,
    heads=2,
    heads_kv=1,
    dim=128,
    causal=False,
    varlen=False,
    backward=False,
    dtype=torch.bfloat16,
    edit=None,
    interface=None,
    seed=0,
):
    """One call through FlashAttention-4; gives {name: error} and {name: tensor}."""
    lengths_k = lengths_k or lengths_q
    (q, k, v, do), (cq, ck) = make(arch, lengths_q, lengths_k, heads, heads_kv, dim, torch.bfloat16, seed)
    if dtype != torch.bfloat16:
        q, k, v = (t.to(dtype) for t in (q, k, v))
    batch = len(lengths_q)

    def shaped(t, lengths):
        return t if varlen else t.reshape(batch, lengths[0], *t.shape[1:])

    context = contextlib.nullcontext(interface) if interface else flash_attention(device, arch, edit)
    with context as api:
        kw = {}
        if varlen:
            kw = dict(
                cu_seqlens_q=host(cq), cu_seqlens_k=host(ck), max_seqlen_q=max(lengths_q), max_seqlen_k=max(lengths_k)
            )
        args = [host(shaped(q, lengths_q)), host(shaped(k, lengths_k)), host(shaped(v, lengths_k))]
        o, lse, *_ = api._flash_attn_fwd(*args, causal=causal, return_lse=True, **kw)
        out = {"o": o, "lse": lse}
        if backward:
            out["dq"], out["dk"], out["dv"], *_ = api._flash_attn_bwd(
                *args, host(o), host(shaped(do, lengths_q)), host(lse), causal=causal, **kw
            )
    out = {n: t.as_subclass(torch.Tensor) for n, t in out.items()}
    flat = {n: t if varlen else t.flatten(0, 1) for n, t in out.items() if n != "lse"}
    flat["lse"] = out["lse"] if varlen else out["lse"].permute(1, 0, 2).flatten(1)
    worst, power = dict.fromkeys(flat, 0.0), dict.fromkeys(flat, 1e-30)
    for n in range(batch):
        a, b = slice(int(cq[n]), int(cq[n + 1])), slice(int(ck[n]), int(ck[n + 1]))
        want = reference(q[a], k[b], v[b], do[a] if backward else None, causal=causal)
        for name, w in zip(("o", "lse", "dq", "dk", "dv"), want, strict=False):
            got = flat[name][:, a] if name == "lse" else flat[name][b if name in ("dk", "dv") else a]
            if name == "lse":
                assert torch.equal(w.isinf(), got.isinf())
                got, w = got[~w.isinf()], w[~w.isinf()]
            if w.numel():
                worst[name] = max(worst[name], float((got.double() - w).abs().max()))
                power[name] = max(power[name], float(w.pow(2).mean()))
    # largest absolute difference over the root mean square of the largest document's reference
    return {n: worst[n] / power[n] ** 0.5 for n in worst}, out


class Recorded:
    """The launches of one FlashAttention-4 case, to be run again with edited PTX."""

    def __init__(self, arch: str, **case):
        self.device = Device()  # of every run, since it keeps the kernels that it has translated
        self.calls, self._before = [], {}
        original = SoftFunction.__call__
        log, before = self.calls, self._before

        def snapshot(value):
            if hasattr(value, "untyped_storage"):
                raw = torch.empty(0, dtype=torch.uint8).set_(value.detach().as_subclass(torch.Tensor).untyped_storage())
                before.setdefault(raw.data_ptr(), (raw, raw.clone()))
            elif isinstance(value, (tuple, list)):
                for x in value:
                    snapshot(x)

        def call(function, *args):
            snapshot(args)
            log.append((function, args))
            return original(function, *args)

        SoftFunction.__call__ = call
        try:
            self.errors, self.out = run_case(self.device, arch, **case)
        finally:
            SoftFunction.__call__ = original
        self.truth = {n: t.clone() for n, t in self.out.items()}

    @property
    def reports(self):
        """Of the launches of the last run."""
        return self.device.reports

    def text(self, part: str) -> str:
        """PTX of the only function whose kernels' names contain ``part``."""
        found = {f.ptx for f, _ in self.calls if any(part in k for k in f.module_ptx.kernels)}
        assert len(found) == 1
        return found.pop()

    def again(self, part: str | None = None, edit=None, *, seed=None, checks=ALL) -> dict[str, float]:
        """Run every launch again; ``edit`` changes the text of kernels named like ``part``. Gives the largest
        difference of each result over the root mean square of the unedited one."""
        for raw, content in self._before.values():
            raw.copy_(content)
        for t in self.out.values():
            t.fill_(float("nan"))
        self.device.seed, self.device.checks, self.device.reports = seed, checks, []
        for function, args in self.calls:
            if part and any(part in k for k in function.module_ptx.kernels):
                ptx = edit(function.ptx)
                assert ptx != function.ptx
                function = function.with_ptx(ptx)
            function.device = self.device
            function(*args)
        out = {}
        for n, t in self.out.items():
            want = self.truth[n].double()
            finite = want.isfinite()
            diff = (t.double() - want)[finite].abs()
            out[n] = float(diff.nan_to_num(float("inf")).max() / want[finite].pow(2).mean().sqrt())
        return out
