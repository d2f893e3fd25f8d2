"""Row preparation compiled for Hopper and run on the software device: how many bits differ from the twins'.

Run as a script, in a process that does not interpret Triton: host code runs on CPU tensors, each launch is compiled and
its PTX executed. Prints one JSON line: name -> elements that differ, for every output.
"""

import dataclasses
import json
import struct
import sys
from unittest import mock

import torch
import triton
from compile_kernels import describe
from nvfp4_groups import run_groups
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

import softgpu
from flamia.documents import Documents
from flamia.plan import Plan
from flamia.quantize import reference as twin
from flamia.quantize.columns import columns_of
from flamia.quantize.finish import document_prescale, finish_dk_dv, finish_dq, fragment_order
from flamia.quantize.payloads import Payloads, backward_specs, forward_specs
from flamia.quantize.prepare import prepare_backward, prepare_forward
from flamia.recipe import get_recipe
from flamia.reference import backend, folded
from flamia.sm90.launches import decode_nvfp4
from flamia.worklists import work_lists

# Layout conversions may move what nobody uses.
device = softgpu.Device(checks=dataclasses.replace(softgpu.ALL, uninitialised=False))
compiled = {}


def launch(kernel, *arguments, grid, warmup, **options):
    signature, constants, aligned = describe(kernel, arguments, options)
    flags = {k: v for k, v in options.items() if k in ("num_warps", "num_stages", "enable_fp_fusion", "maxnreg")}
    key = (kernel.__name__, str(sorted(signature.items())), str(sorted(map(str, constants.items()))))
    if key not in compiled:
        source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=aligned)
        compiled[key] = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=flags)
    made = compiled[key]
    names = kernel.arg_names
    values = dict(zip(names, arguments, strict=False)) | {k: v for k, v in options.items() if k in names}
    passed = [values[p.name] for p in kernel.params if signature[p.name] != "constexpr"]
    layout = device.program(made.asm["ptx"], made.metadata.name).kernel
    parameters = bytearray(layout.param_bytes)
    # Triton adds scratch pointers at the end, which these kernels leave alone.
    for place, value in zip(layout.params.values(), passed, strict=False):
        if isinstance(value, torch.Tensor):
            value = value.data_ptr()
        raw = (
            struct.pack("f", value)
            if isinstance(value, float)
            else value.to_bytes(place.size, "little", signed=value < 0)
        )
        parameters[place.offset : place.offset + place.size] = raw
    storages = {v.untyped_storage().data_ptr(): v.untyped_storage() for v in passed if isinstance(v, torch.Tensor)}
    device.launch(
        made.asm["ptx"],
        (*grid, 1, 1)[:3],
        (32 * flags.get("num_warps", 4), 1, 1),
        bytes(parameters),
        kernel=made.metadata.name,
        buffers=[torch.empty(0, dtype=torch.uint8).set_(s) for s in storages.values() if s.nbytes()],
        dynamic_shared=made.metadata.shared,
    )


def twins(plan, x, lse2, row_max, documents, payloads):
    """What the reference hands to its backward: payloads of do, delta, norms."""
    seen = {}

    def capture(plan, payloads, do_payloads, documents, *rest):
        seen.update(items=do_payloads.items, delta=rest[-2], norm=rest[-1][..., 0])
        return (torch.zeros(t.shape) for t in (x["q"], x["k"], x["v"]))

    def with_columns(specs, *arguments, **options):
        return make_all(backward_specs(plan.recipe, True), *arguments, **options)

    make_all = backend.make_all
    patch = mock.patch.multiple(backend, backward=capture, make_all=with_columns)
    with patch, mock.patch.object(folded, "backward", capture):
        backend.run_backward(plan, x["do"], None, x["o"], lse2, row_max, payloads, documents, None)
    return seen


def main(recipe, dim):
    JITFunction.run = launch
    torch.use_deterministic_algorithms(True)  # fills what is allocated: NaN, or the largest integer
    tokens, heads = 104, 2
    cu = torch.tensor([0, 37, 37, 100], dtype=torch.int32)
    documents = Documents(cu, cu, tokens, tokens)
    plan = Plan(get_recipe(recipe), "device", (), dim, heads, heads, dim**-0.5, None, 0, True, True)
    lists = work_lists(documents, None, 0)
    g = torch.Generator().manual_seed(0)
    x = {}
    for name in ("q", "k", "v", "do", "o"):
        magnitude = 2.0 ** torch.randint(-6, 7, (tokens, 1, 1), generator=g)
        x[name] = (torch.randn(tokens, heads, dim, generator=g) * magnitude).to(torch.bfloat16)
    lse2 = torch.randn(heads, tokens, generator=g) * 3
    row_max = lse2 - torch.rand(heads, tokens, generator=g) * 9
    lse2[:, 100:], row_max[:, 100:] = -torch.inf, 0.0

    made = prepare_forward(plan, x["q"], x["k"], x["v"], lists, columns=True)
    ours = dict(made.payloads.items) | {"k_amax": made.payloads.k_amax, "v_amax": made.payloads.v_amax}
    gradients = prepare_backward(
        plan, x["do"], None, x["o"], lse2, row_max, made.payloads, documents, lists, columns=True
    )
    ours |= dict(gradients.payloads) | {"delta": gradients.delta, "norm": gradients.norm}

    tokens_of = twin.TokenMap.build(cu, tokens)
    sources = {n: twin.prepare(x[n], tokens_of, rotate=plan.rotates and n != "v") for n in "qkv"}
    maps = dict.fromkeys("qkv", tokens_of)
    items = twin.make_all(
        forward_specs(plan.recipe, True, True), sources, maps, per_token=plan.per_token, rounding="up"
    )
    amax = [twin.token_amax(sources[n]) for n in "kv"]
    seen = twins(plan, x, lse2, row_max, documents, Payloads(items, *amax))
    kept = amax if plan.reads_token_maxima else [torch.empty(0)] * 2
    theirs = items | {"k_amax": kept[0], "v_amax": kept[1]}
    theirs |= seen["items"] | {"delta": seen["delta"], "norm": seen["norm"]}

    left = int((gradients.accumulator != 0).sum())
    accumulated = torch.randn(gradients.accumulator.shape, generator=g).to(torch.float16)
    occupied = torch.zeros(tokens_of.capacity + 1, dtype=torch.bool)
    occupied[tokens_of.position] = True
    accumulated[:, ~occupied[:-1]] = 0.0  # where no query is, the backward adds nothing
    ours["dq"] = torch.empty(tokens, heads, dim, dtype=torch.bfloat16)
    slabs = accumulated.unflatten(1, (-1, 16)).flatten(2)
    stored = torch.empty_like(slabs)
    stored[..., fragment_order(dim).flatten()] = slabs
    gradients.accumulator.copy_(stored.view(accumulated.shape))
    finish_dq(plan, gradients, made.k_maxima, made.v_maxima, documents, lists.q, ours["dq"], fragments=True)
    p = gradients.prescale
    if not p.numel():
        p = document_prescale(plan, gradients, made.k_maxima, made.v_maxima, documents)[:, tokens_of.document]
    scale = (twin.formats.pow2(-p) * plan.softmax_scale).t().unsqueeze(-1)
    scaled = tokens_of.unpad(accumulated.transpose(0, 1)).to(torch.float32) * scale
    theirs["dq"] = (twin.formats.hadamard(scaled) if plan.rotates else scaled).to(torch.bfloat16)

    sums = [torch.randn(tokens, heads, dim, generator=g) for _ in range(2)]
    ours["dk"], ours["dv"] = (torch.empty(tokens, heads, dim, dtype=torch.bfloat16) for _ in range(2))
    finish_dk_dv(plan, *sums, ours["dk"], ours["dv"])
    scaled = sums[0] * plan.softmax_scale
    theirs["dk"] = (twin.formats.hadamard(scaled) if plan.rotates else scaled).to(torch.bfloat16)
    theirs["dv"] = sums[1].to(torch.bfloat16)

    codes = torch.randint(0, 256, (tokens, 4, dim), generator=g, dtype=torch.uint8)[:, 1:3]
    ours["columns_of"], theirs["columns_of"] = (
        columns_of(codes, lists.q, "mma"),
        twin.columns_of(codes, tokens_of, "mma"),
    )
    if plan.recipe.format == "nvfp4":
        rows = dataclasses.replace(items["k"], codes=items["k"].codes[:, 1:], scales=items["k"].scales[:, 1:])
        ours["decoded"], theirs["decoded"] = decode_nvfp4(rows), twin.dequantize(rows).to(torch.bfloat16)

    wrong = {"accumulator": left}
    for name, theirs_here in theirs.items():
        parts = [f.name for f in dataclasses.fields(theirs_here)] if dataclasses.is_dataclass(theirs_here) else [""]
        for part in parts:
            a, b = (getattr(t, part) if part else t for t in (ours[name], theirs_here))
            assert (a.shape, a.dtype) == (b.shape, b.dtype), (name, part)
            if a.numel():
                bits = {4: torch.int32, 2: torch.int16, 1: torch.uint8}[a.element_size()]
                wrong[f"{name}.{part}"] = int((a.contiguous().view(bits) != b.contiguous().view(bits)).sum())
    if plan.recipe.format != "mxfp8":
        for rows in (True, False):
            for short in (True, False):
                wrong[f"groups.{rows}.{short}"] = sum(run_groups(rows, short))
    print(json.dumps(wrong))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
