"""The torch.library operators: registrations, torch.compile, what ran, and refusal of second derivatives."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

import flamia
from flamia import flash_attn_func, flash_attn_varlen_func
from flamia.operators import attention_backward, attention_forward

BACKEND = "aot_eager"
OPTIONS = (0.2, -1, 0, False)  # softmax_scale, left, right, deterministic


def tensors(tokens: int = 40, heads: int = 4, kv: int = 2, d: int = 32, seed: int = 0) -> list[Tensor]:
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(tokens, h, d, generator=g).to(torch.bfloat16) for h in (heads, kv, kv, heads)]


def offsets(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


CU_Q, CU_K = offsets(0, 5, 5, 38), offsets(0, 9, 11, 40)


def forward_arguments(recipe: str, *, training: bool, offset: bool = False, gradients: bool = True) -> tuple[Any, ...]:
    q, k, v, _ = tensors()
    if gradients:
        q, k, v = (x.requires_grad_() for x in (q, k, v))
    shift = torch.ones(2, 32) if offset else None
    key = flamia.get_recipe(recipe).key
    return (q, k, v, CU_Q, CU_K, shift, shift, -1, -1, *OPTIONS, training, key, "reference")


def backward_arguments(recipe: str, *, dlse: bool, offset: bool = False) -> tuple[Any, ...]:
    with torch.no_grad():
        kept = attention_forward(*forward_arguments(recipe, training=True, offset=offset, gradients=False))
    o, lse, *rest = kept
    centred, rest = (rest[0], rest[1:]) if offset else (o, rest)
    lse2, row_max, *payloads = rest
    do = tensors(seed=1)[3]
    shift = torch.ones(2, 32) if offset else None
    through = torch.ones_like(lse) if dlse else None
    key = flamia.get_recipe(recipe).key
    return (do, through, centred, lse2, row_max, payloads, CU_Q, CU_K, shift, 40, 2, *OPTIONS, key, "reference")


# -------------------------------------------------------------------------------------------------- registrations


@pytest.mark.parametrize("recipe", flamia.recipes())
def test_opcheck_of_the_forward(recipe: str):
    """Schema, autograd registration, fake tensors of the right shapes, dtypes and strides, tracing with gradients."""
    torch.library.opcheck(attention_forward, forward_arguments(recipe, training=True))


@pytest.mark.parametrize("recipe", flamia.recipes())
def test_opcheck_of_the_backward(recipe: str):
    torch.library.opcheck(attention_backward, backward_arguments(recipe, dlse=True))


@pytest.mark.parametrize("recipe", ["mxfp8", "fp4", "mxfp8-folded"])
def test_opcheck_of_optional_arguments(recipe: str):
    torch.library.opcheck(attention_forward, forward_arguments(recipe, training=True, offset=True))
    torch.library.opcheck(attention_forward, forward_arguments(recipe, training=False, gradients=False))
    torch.library.opcheck(attention_backward, backward_arguments(recipe, dlse=False))
    torch.library.opcheck(attention_backward, backward_arguments(recipe, dlse=True, offset=True))


@pytest.mark.parametrize("recipe", flamia.recipes())
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("offset", [False, True])
def test_fake_outputs_have_the_layout_of_real_ones(recipe: str, training: bool, offset: bool):
    arguments = forward_arguments(recipe, training=training, offset=offset, gradients=False)
    real = attention_forward(*arguments)
    with torch._subclasses.FakeTensorMode() as mode:
        fake = attention_forward(*(mode.from_tensor(x) if isinstance(x, Tensor) else x for x in arguments))
    assert len(real) == len(fake)
    for i, (x, y) in enumerate(zip(real, fake, strict=True)):
        assert (x.shape, x.dtype, x.device) == (y.shape, y.dtype, y.device), f"output {i}"
        assert x.numel() == 0 or x.stride() == y.stride(), f"output {i}"
        assert x.is_contiguous()
    storages = [x.untyped_storage().data_ptr() for x in real if x.numel()]
    assert len(set(storages)) == len(storages), "outputs share memory"


@pytest.mark.parametrize("offset", [False, True])
@pytest.mark.parametrize("dlse", [False, True])
def test_backward_operator_is_the_gradient(offset: bool, dlse: bool):
    arguments = forward_arguments("mxfp8", training=True, offset=offset)
    o, lse, *_ = attention_forward(*arguments)
    do = tensors(seed=1)[3]
    outputs, through = ((o, lse), (do, torch.ones_like(lse))) if dlse else ((o,), (do,))
    grads = torch.autograd.grad(outputs, arguments[:3], through)
    assert all(map(torch.equal, grads, attention_backward(*backward_arguments("mxfp8", dlse=dlse, offset=offset))))


# ------------------------------------------------------------------------------------------------------- autograd


def test_a_call_imports_no_compiler():
    """Calls of ``torch.library.custom_op`` import torch's, Triton and a computer algebra with it: seconds."""
    program = """
import sys, torch
before = set(sys.modules)
import flamia
q = torch.randn(8, 1, 64, dtype=torch.bfloat16, requires_grad=True)
ends = torch.tensor([0, 8], dtype=torch.int32)
flamia.flash_attn_varlen_func(q, q, q, ends, ends, causal=True).float().sum().backward()
assert q.grad.isfinite().all()
print(*sorted({"torch._dynamo", "triton", "cutlass"} & (set(sys.modules) - before)))
"""
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == ""


def test_second_derivatives_are_refused():
    """A gradient of the gradient would silently lack the dependence on q, k and v: it raises instead."""
    q, k, v, do = (x.requires_grad_() for x in tensors())
    o = flash_attn_varlen_func(q, k, v, CU_Q, CU_K, causal=True)
    dq, dk, dv = torch.autograd.grad(o, (q, k, v), do, create_graph=True)
    for gradient in (dq, dk, dv):
        assert gradient.requires_grad, "a gradient that looks constant would be lost silently"
        with pytest.raises(RuntimeError, match="backward"):
            gradient.float().square().sum().backward(retain_graph=True)
    assert q.grad is None


def test_second_derivative_with_a_constant_do_is_refused_too():
    q, k, v, do = tensors()
    q.requires_grad_()
    o = flash_attn_varlen_func(q, k, v, CU_Q, CU_K)
    (dq,) = torch.autograd.grad(o, q, do, create_graph=True)
    with pytest.raises(RuntimeError, match="backward"):
        torch.autograd.grad(dq.float().square().sum(), q)


def test_backward_of_a_forward_that_kept_nothing_is_refused():
    o, _ = attention_forward(*forward_arguments("mxfp8", training=False))
    with pytest.raises(RuntimeError, match="ran with gradients disabled"):
        o.sum().backward()


def test_several_graphs_do_not_mix():
    """Everything a backward needs travels with its graph, so two graphs may be alive and run in any order."""
    expected, graphs = [], []
    for seed, recipe in ((0, "mxfp8"), (1, "fp4"), (2, "mxfp8-folded")):
        q, k, v, do = tensors(seed=seed)
        q.requires_grad_()
        expected.append(torch.autograd.grad(flash_attn_varlen_func(q, k, v, CU_Q, CU_K, recipe=recipe), q, do)[0])
        graphs.append((flash_attn_varlen_func(q, k, v, CU_Q, CU_K, recipe=recipe), q, do))
    for (o, q, do), right in zip(reversed(graphs), reversed(expected), strict=True):
        assert torch.equal(torch.autograd.grad(o, q, do)[0], right)


# -------------------------------------------------------------------------------------------------------- compile


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def packed_step(recipe: str, **kwargs: Any):
    def step(q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor) -> tuple[Tensor, Tensor]:
        o, lse = flash_attn_varlen_func(
            q * 1.5, k, v, cu_q, cu_k, causal=True, recipe=recipe, return_lse=True, **kwargs
        )
        return o.float().square(), lse

    return step


def outputs_and_gradients(step: Any, inputs: list[Tensor], *rest: Tensor) -> list[Tensor]:
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    o, lse = step(*leaves, *rest)
    seen = torch.where(lse == -torch.inf, 0.0, lse)
    return [o.detach(), lse.detach(), *torch.autograd.grad(o.sum() + seen.sum(), leaves)]


@pytest.mark.parametrize("recipe", flamia.recipes())
def test_compiled_is_eager_bitwise(recipe: str):
    step = packed_step(recipe)
    q, k, v, _ = tensors()
    expected = outputs_and_gradients(step, [q, k, v], CU_Q, CU_K)
    found = outputs_and_gradients(torch.compile(step, fullgraph=True, backend=BACKEND), [q, k, v], CU_Q, CU_K)
    assert all(map(torch.equal, expected, found))


def test_compiled_batched_call_with_offsets_and_window():
    shift = torch.ones(2, 32)

    def step(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return flash_attn_func(
            q, k, v, window_size=(9, None), softmax_scale=0.3, return_lse=True, k_offset=shift, v_offset=shift
        )

    batched = [x.view(2, 20, *x.shape[1:]) for x in tensors()[:3]]
    expected = outputs_and_gradients(step, batched)
    found = outputs_and_gradients(torch.compile(step, fullgraph=True, backend=BACKEND), batched)
    assert all(map(torch.equal, expected, found))


def test_compiled_inference():
    step = packed_step("nvfp4")
    q, k, v, _ = tensors()
    with torch.no_grad():
        expected = step(q, k, v, CU_Q, CU_K)
        found = torch.compile(step, fullgraph=True, backend=BACKEND)(q, k, v, CU_Q, CU_K)
    assert all(map(torch.equal, expected, found))


@pytest.mark.parametrize("recipe", ["mxfp8", "fp4", "nvfp4-folded-exact"])
def test_document_lengths_do_not_recompile(recipe: str):
    counter = CompileCounterWithBackend(BACKEND)
    step = packed_step(recipe)
    compiled = torch.compile(step, fullgraph=True, backend=counter)
    q, k, v, _ = tensors()
    for cu in (offsets(0, 10, 20, 40), offsets(0, 1, 39, 40), offsets(0, 0, 0, 0), offsets(0, 33, 33, 38)):
        expected = outputs_and_gradients(step, [q, k, v], cu, cu)
        assert all(map(torch.equal, expected, outputs_and_gradients(compiled, [q, k, v], cu, cu)))
    assert counter.frame_count == 1


def test_tokens_and_documents_may_be_dynamic():
    counter = CompileCounterWithBackend(BACKEND)
    step = packed_step("mxfp8")
    compiled = torch.compile(step, fullgraph=True, backend=counter, dynamic=True)
    for tokens, cu in ((40, offsets(0, 10, 20, 40)), (57, offsets(0, 57)), (33, offsets(0, 5, 6, 7, 30))):
        q, k, v, _ = tensors(tokens)
        expected = outputs_and_gradients(step, [q, k, v], cu, cu)
        assert all(map(torch.equal, expected, outputs_and_gradients(compiled, [q, k, v], cu, cu)))
    # A list of one document is a size of its own to the compiler (cu of two entries); nothing else may count.
    assert counter.frame_count <= 2


def test_max_seqlen_as_a_tensor_does_not_break_the_graph():
    def step(q: Tensor, k: Tensor, v: Tensor, longest: Tensor) -> Tensor:
        return flash_attn_varlen_func(q, k, v, CU_Q, CU_K, longest, longest)

    q, k, v, _ = tensors()
    counter = CompileCounterWithBackend(BACKEND)
    compiled = torch.compile(step, fullgraph=True, backend=counter)
    for n in (33, 40, 64):
        assert torch.equal(compiled(q, k, v, torch.tensor(n)), step(q, k, v, torch.tensor(n)))
    assert counter.frame_count == 1


def test_max_seqlen_as_an_integer_becomes_dynamic():
    def step(q: Tensor, k: Tensor, v: Tensor, longest: int) -> Tensor:
        return flash_attn_varlen_func(q, k, v, CU_Q, CU_K, longest, longest)

    q, k, v, _ = tensors()
    counter = CompileCounterWithBackend(BACKEND)
    compiled = torch.compile(step, fullgraph=True, backend=counter)
    for n in (33, 40, 64, 65, 1000):
        assert torch.equal(compiled(q, k, v, n), step(q, k, v, n))
    assert counter.frame_count <= 2  # the first value, then any


def test_checkpoint_recomputes_the_same_bits():
    """Activation checkpointing runs the forward twice: the numbers must not depend on when it ran."""
    step = packed_step("fp4")

    def checkpointed(*arguments: Tensor) -> tuple[Tensor, Tensor]:
        return torch.utils.checkpoint.checkpoint(step, *arguments, use_reentrant=False)

    q, k, v, _ = tensors()
    expected = outputs_and_gradients(step, [q, k, v], CU_Q, CU_K)
    assert all(map(torch.equal, expected, outputs_and_gradients(checkpointed, [q, k, v], CU_Q, CU_K)))


# ------------------------------------------------------------------------------------------------------- last_plan


@pytest.mark.parametrize("recipe", flamia.recipes())
def test_last_plan_names_what_ran(recipe: str):
    q, k, v, do = tensors()
    variant = "reference.folded." if "folded" in recipe else "reference."
    with torch.no_grad():
        flash_attn_varlen_func(q, k, v, CU_Q, CU_K, recipe=recipe, softmax_scale=0.5)
    plan = flamia.last_plan()
    assert plan.recipe == flamia.get_recipe(recipe)
    assert plan.backend == "reference"
    assert plan.kernels == ("quantize.reference", variant + "forward")
    assert (plan.head_dim, plan.heads_q, plan.heads_kv, plan.ratio) == (32, 4, 2, 2)
    assert (plan.left, plan.right, plan.softmax_scale, plan.training) == (None, None, 0.5, False)
    o = flash_attn_varlen_func(q.requires_grad_(), k, v, CU_Q, CU_K, recipe=recipe, causal=True, window_size=(7, -1))
    plan = flamia.last_plan()
    assert (plan.left, plan.right, plan.training, plan.deterministic) == (7, 0, True, False)
    assert plan.kernels == ("quantize.reference", variant + "forward")
    o.backward(do)
    plan = flamia.last_plan()
    assert plan.kernels == ("quantize.reference", variant + "backward")
    assert (plan.recipe, plan.left, plan.right) == (flamia.get_recipe(recipe), 7, 0)


def test_last_plan_of_a_compiled_call():
    q, k, v, _ = tensors()
    with torch.no_grad():
        flash_attn_varlen_func(q, k, v, CU_Q, CU_K, recipe="fp4")
        torch.compile(packed_step("nvfp4"), fullgraph=True, backend=BACKEND)(q, k, v, CU_Q, CU_K)
    assert flamia.last_plan().recipe == flamia.get_recipe("nvfp4")


def test_a_refused_call_leaves_the_last_plan():
    q, k, v, _ = tensors()
    with torch.no_grad():
        flash_attn_varlen_func(q, k, v, CU_Q, CU_K, recipe="fp4")
    before = flamia.last_plan()
    with pytest.raises(ValueError, match="must not decrease"):
        flash_attn_varlen_func(q, k, v, offsets(0, 9, 3, 40), CU_K, recipe="mxfp8")
    assert flamia.last_plan() == before
