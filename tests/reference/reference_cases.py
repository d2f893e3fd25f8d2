"""Shared pieces of the reference tests: seeded inputs, direct calls of the reference backend, error measures."""

import dataclasses
import math

import torch

import flamia
from flamia.documents import Documents
from flamia.plan import Plan
from flamia.reference import backend


def relative_rms(x, y):
    """||x - y|| / ||y|| in FP64."""
    x, y = torch.as_tensor(x).double(), torch.as_tensor(y).double()
    return float((x - y).norm() / y.norm())


def cosine(x, y):
    x, y = x.double().flatten(), y.double().flatten()
    return float(x @ y / (x.norm() * y.norm()))


def tokens(length, heads, head_dim, seed, spread=0):
    """BF16 [length, heads, head_dim], Gaussian, each token scaled by a random power of two in 2^±spread."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(length, heads, head_dim, generator=g)
    if spread:
        x = x * torch.exp2(torch.randint(-spread, spread + 1, (length, heads, 1), generator=g).float())
    return x.bfloat16()


def make_plan(recipe, heads_q, heads_kv, head_dim, left=None, right=None, training=True):
    return Plan(
        recipe=flamia.get_recipe(recipe),
        backend="reference",
        kernels=(),
        head_dim=head_dim,
        heads_q=heads_q,
        heads_kv=heads_kv,
        softmax_scale=1 / math.sqrt(head_dim),
        left=left,
        right=right,
        deterministic=True,
        training=training,
    )


@dataclasses.dataclass
class Result:
    """Everything one document's forward and backward give; o32 is the FP32 output before rounding."""

    o: torch.Tensor
    o32: torch.Tensor
    lse2: torch.Tensor
    row_max: torch.Tensor
    dq: torch.Tensor
    dk: torch.Tensor
    dv: torch.Tensor


def run(plan, q, k, v, do, dlse=None, k_offset=None, v_offset=None):
    """The reference backend on one document, without autograd around it."""
    cu_q, cu_k = (torch.tensor([0, x.shape[0]], dtype=torch.int32) for x in (q, k))
    documents = Documents(cu_q, cu_k, q.shape[0], k.shape[0])
    o, centred, _, fw, payloads = backend.run_forward(plan, q, k, v, documents, k_offset, v_offset)
    args = (plan, do, dlse, centred, fw.lse2, fw.row_max, payloads, documents, k_offset)
    return Result(o, fw.o, fw.lse2, fw.row_max, *backend.run_backward(*args))


# Same roundings, but exp2 comes from another library and the FP64 sums run in another order: a last-bit difference
# moves an E4M3 code about once in 10^6 entries, and BF16 outputs by half an ulp (2^-9) where they sit on a tie.
SAME = 2e-4
SAME_BF16 = 1e-3

SHAPES = [(200, 200), (70, 150), (150, 70), (33, 300), (1, 40), (40, 1)]
MASKS = {"full": (None, None), "causal": (None, 0), "window": (40, 0), "band": (20, 30)}
EXACT = dict(exact_operands=True, exact_ds=True, accumulator_scale="causal")


def one_head(*shapes, seed=0, spread=3):
    return [tokens(length, 1, 32, seed + i, spread) for i, length in enumerate(shapes)]


def numpy(x):
    return x[:, 0].double().numpy()


def fp64(q, k, v, do, causal):
    """o, dq, dk, dv by FP64 autograd of the textbook formula."""
    q, k, v = (x.double().requires_grad_() for x in (q, k, v))
    s = torch.einsum("qhd,khd->hqk", q, k) / q.shape[-1] ** 0.5
    if causal:
        s = s.masked_fill(~torch.ones(s.shape[1:], dtype=torch.bool).tril(), -torch.inf)
    o = torch.einsum("hqk,khd->qhd", s.softmax(-1), v)
    return o.detach(), *torch.autograd.grad(o, (q, k, v), do.double())
