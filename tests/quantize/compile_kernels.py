"""Compile every device launch of row preparation for a list of chips, on a machine without any of them.

Run as a script, in a process that does not interpret Triton: host code runs on CPU tensors, each launch is compiled
instead of run, and one JSON line per kernel and chip says what came out.
"""

import json
import os
import re
import subprocess
import sys
import tempfile

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from flamia.launch import TYPES

TOOLS = os.path.join(os.path.dirname(triton.__file__), "backends", "nvidia", "bin")
CHIPS = [int(word) for word in sys.argv[2].split(",")] if len(sys.argv) > 2 else [90, 100, 103]
seen = set()
label = ""


def describe(kernel, arguments, options):
    names = kernel.arg_names
    values = dict(zip(names, arguments, strict=False)) | {k: v for k, v in options.items() if k in names}
    signature, constants, aligned = {}, {}, {}
    for parameter in kernel.params:
        value = values[parameter.name]
        if parameter.is_constexpr:
            signature[parameter.name], constants[parameter.name] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            signature[parameter.name] = TYPES[value.dtype]
            if not parameter.do_not_specialize_on_alignment:
                aligned[(parameter.num,)] = [["tt.divisibility", 16]]
        elif isinstance(value, float):
            signature[parameter.name] = "fp32"
        elif value == 1 and not parameter.do_not_specialize:
            signature[parameter.name], constants[parameter.name] = "constexpr", 1
        else:
            signature[parameter.name] = "i64" if abs(value) >= 2**31 else "i32"
            if value % 16 == 0 and not parameter.do_not_specialize:
                aligned[(parameter.num,)] = [["tt.divisibility", 16]]
    return signature, constants, aligned


def conversions(sass):
    """E4M3 conversions in machine code: for each, whether both halves of its register are defined.

    A conversion fills the lower half and takes the upper one from its last operand: zero, or an earlier conversion.
    """
    made, whole = set(), []
    for line in sass.splitlines():
        found = re.search(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([\w.]+)\s(.*);", line)
        registers = re.findall(r"\bR(?:Z|\d+)\b", found[2]) if found else []
        if found and found[1].startswith("F2FP.SATFINITE.E4M3"):
            whole.append(registers[-1] == "RZ" or registers[-1] in made)
            made.add(registers[0])
        else:
            made.difference_update(registers[:1])
    return whole


def compile_instead(kernel, *arguments, grid, warmup, **options):
    signature, constants, aligned = describe(kernel, arguments, options)
    key = (kernel.__name__, str(sorted(signature.items())), str(sorted(map(str, constants.items()))))
    if key in seen:
        return
    seen.add(key)
    flags = {k: v for k, v in options.items() if k in ("num_warps", "num_stages", "enable_fp_fusion", "maxnreg")}
    for chip in CHIPS:
        source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=aligned)
        compiled = triton.compile(source, target=GPUTarget("cuda", chip, 32), options=flags)
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(compiled.asm["cubin"])
            file.flush()
            usage = subprocess.run([f"{TOOLS}/cuobjdump", "-res-usage", file.name], capture_output=True, text=True)
            # Machine code is read for its conversions; where PTX has none, the disassembler's half second is saved.
            sass = ""
            if "e4m3x2" in compiled.asm["ptx"]:
                sass = subprocess.run([f"{TOOLS}/nvdisasm", "-c", file.name], capture_output=True, text=True).stdout
        found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", usage.stdout)
        registers, stack, local = (int(n) for n in found.groups()) if found else (-1, -1, -1)
        ptx = compiled.asm["ptx"]
        record = {
            "label": label,
            "kernel": kernel.__name__,
            "chip": chip,
            "target": re.search(r"\.target (\w+)", ptx).group(1),
            "registers": registers,
            "stack": stack,
            "local": local,
            "shared": compiled.metadata.shared,
            "warps": flags.get("num_warps", 4),
            # without a rounding of its own, free to be fused
            "fusible": len(re.findall(r"^\s*(?:add|sub|mul)(?:\.ftz)?\.f32", ptx, re.M)),
            # layout conversions that move bytes
            "byte_moves": len(re.findall(r"st\.shared\S*\.[bsu]8\b", ptx)),
            "e4m3": len(whole := conversions(sass)),
            "undefined": whole.count(False),
            "wide_loads": len(re.findall(r"ld\.global\S*\.v4\.b32", ptx)),
        }
        print(json.dumps(record), flush=True)


def main():
    global label
    from flamia.documents import Documents
    from flamia.plan import Plan
    from flamia.quantize import lists as device_lists
    from flamia.quantize.columns import columns_of
    from flamia.quantize.finish import finish_dk_dv, finish_dq
    from flamia.quantize.prepare import prepare_backward, prepare_forward
    from flamia.recipe import get_recipe

    # Only the launches must not happen; what they would have filled stays uninitialised.
    JITFunction.run = compile_instead
    tokens, heads = 256, 16
    cu = torch.tensor([0, 100, tokens], dtype=torch.int32)
    documents = Documents(cu, cu, tokens, tokens)
    placed, device_lists._PLACED = device_lists._PLACED, 0
    device_lists.work_lists(documents, None, 0)  # as for very many items
    device_lists._PLACED = placed
    for name in sys.argv[1].split(","):
        recipe, _, dim = name.partition(":")
        dim = int(dim or 128)
        label = name
        plan = Plan(get_recipe(recipe), "device", (), dim, heads, heads, dim**-0.5, None, 0, False, True)
        lists = device_lists.work_lists(documents, None, 0)
        q, k, v, do, o = (torch.zeros(tokens, heads, dim, dtype=torch.bfloat16) for _ in range(5))
        table = torch.zeros(heads, tokens)
        made = prepare_forward(plan, q, k, v, lists, columns=True)
        gradients = prepare_backward(plan, do, table, o, table, table, made.payloads, documents, lists, columns=True)
        finish_dq(
            plan, gradients, made.k_maxima, made.v_maxima, documents, lists.q, torch.empty_like(q), fragments=True
        )
        sums = torch.zeros(tokens, heads, dim)
        finish_dk_dv(plan, sums, sums, torch.empty_like(k), torch.empty_like(v))
        columns_of(torch.zeros(tokens, heads, dim, dtype=torch.uint8)[:, 2:6], lists.q, "pairs")


if __name__ == "__main__":
    main()
