"""cuDNN's FP8 attention, forward and backward, through nvidia-cudnn-frontend: E4M3 with one scale per tensor."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

LIMIT = 448.0  # the largest E4M3 number
MARGIN = 0.5  # of the limit, for what grows from one step to the next
CODES = torch.float8_e4m3fn
RESULTS = ("o", "dq", "dk", "dv")


class Attention:
    """Attention of BF16 q, k, v with output gradient do, all [batch, heads, tokens, D] in any strides.

    Two graphs over the same buffers. q, k, v and do are cast with scale 1, which costs what any cast with a known scale
    does and suits Gaussian inputs; the other scales follow from the maxima that the graphs report (``calibrate``).
    Outputs stay E4M3.
    """

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, do: Tensor, causal: bool) -> None:
        self.inputs = {"q": q, "k": k, "v": v, "do": do}
        self.codes = {name: torch.empty_like(x, dtype=CODES) for name, x in self.inputs.items()}
        like = {"o": q, "dq": q, "dk": k, "dv": v}
        self.codes |= {name: torch.empty_like(x, dtype=CODES) for name, x in like.items()}
        self.stats = torch.empty((*q.shape[:3], 1), dtype=torch.float32, device=q.device)
        # What a scale multiplies: weights s, output o, gradient of the scores dp, gradients.
        self.scales, self.inverses, self.maxima = (
            {name: torch.ones((1, 1, 1, 1), device=q.device) for name in ("s", "o", "dp", "dq", "dk", "dv")}
            for _ in range(3)
        )
        self.one = torch.ones((1, 1, 1, 1), device=q.device)
        self.options = dict(attn_scale=1 / math.sqrt(q.shape[3]), use_causal_mask=causal)
        self.forward_graph = self._forward_graph()
        self.backward_graph = self._backward_graph()

    def quantize(self, *names: str) -> None:
        """Cast the inputs, or those that are named."""
        for name in names or tuple(self.inputs):
            self.codes[name].copy_(self.inputs[name])

    def forward(self) -> None:
        self.forward_graph.run()

    def backward(self) -> None:
        self.backward_graph.run()

    def calibrate(self) -> None:
        """Set every scale from the data; twice, since maxima of later tensors depend on the scales of earlier ones."""
        self.quantize()
        for _ in range(2):
            self.forward()
            self.backward()
            for name, scale in self.scales.items():
                scale.copy_(MARGIN * LIMIT / self.maxima[name])
                self.inverses[name].copy_(1 / scale)
        self.forward()
        self.backward()

    def results(self) -> list[Tensor]:
        """o, dq, dk, dv as FP32 [batch, heads, tokens, D]."""
        return [self.codes[name].float() * self.inverses[name] for name in RESULTS]

    def _forward_graph(self) -> _Graph:
        graph = _Graph(self.one.device)
        operands = {name: graph.tensor(name, self.codes[name]) for name in "qkv"}
        factors = {f"descale_{name}": graph.tensor(f"descale_{name}", self.one) for name in "qkv"}
        factors |= {"descale_s": graph.tensor("descale_s", self.inverses["s"])}
        factors |= {f"scale_{name}": graph.tensor(f"scale_{name}", self.scales[name]) for name in "so"}
        outputs = graph.graph.sdpa_fp8(**operands, **factors, generate_stats=True, name="forward", **self.options)
        graph.build(outputs, [self.codes["o"], self.stats, self.maxima["s"], self.maxima["o"]])
        return graph

    def _backward_graph(self) -> _Graph:
        graph = _Graph(self.one.device)
        operands = {name: graph.tensor(name, self.codes[name]) for name in ("q", "k", "v", "o")}
        operands |= {"dO": graph.tensor("dO", self.codes["do"]), "stats": graph.tensor("stats", self.stats)}
        known = {"q": self.one, "k": self.one, "v": self.one, "dO": self.one}
        known |= {"o": self.inverses["o"], "s": self.inverses["s"], "dP": self.inverses["dp"]}
        factors = {f"descale_{name}": graph.tensor(f"descale_{name}", value) for name, value in known.items()}
        made = {"s": "s", "dP": "dp", "dQ": "dq", "dK": "dk", "dV": "dv"}
        factors |= {
            f"scale_{theirs}": graph.tensor(f"scale_{theirs}", self.scales[name]) for theirs, name in made.items()
        }
        outputs = graph.graph.sdpa_fp8_backward(**operands, **factors, name="backward", **self.options)
        gradients = ("dq", "dk", "dv")
        maxima = [self.maxima[name] for name in (*gradients, "dp")]
        graph.build(outputs, [*(self.codes[name] for name in gradients), *maxima])
        return graph


class _Graph:
    """A cuDNN graph and the tensors that it reads and writes."""

    def __init__(self, device: torch.device) -> None:
        import cudnn

        self.cudnn: Any = cudnn
        self.device = device
        self.handle = cudnn.create_handle()
        self.graph = cudnn.pygraph(
            io_data_type=cudnn.data_type.FP8_E4M3,
            intermediate_data_type=cudnn.data_type.FLOAT,
            compute_data_type=cudnn.data_type.FLOAT,
            handle=self.handle,
        )
        self.values: dict[Any, Tensor] = {}

    def _kind(self, data: Tensor) -> Any:
        return self.cudnn.data_type.FP8_E4M3 if data.dtype == CODES else self.cudnn.data_type.FLOAT

    def tensor(self, name: str, data: Tensor) -> Any:
        """An input."""
        node = self.graph.tensor(
            name=name, dim=list(data.shape), stride=list(data.stride()), data_type=self._kind(data)
        )
        self.values[node] = data
        return node

    def build(self, nodes: Any, outputs: list[Tensor]) -> None:
        """The outputs, in order, and then the plan."""
        for node, data in zip(nodes, outputs, strict=True):
            node.set_output(True).set_dim(list(data.shape)).set_stride(list(data.stride()))
            node.set_data_type(self._kind(data))
            self.values[node] = data
        self.graph.validate()
        self.graph.build_operation_graph()
        self.graph.create_execution_plans([self.cudnn.heur_mode.A])
        self.graph.check_support()
        self.graph.build_plans()
        size = max(1, self.graph.get_workspace_size())
        self.workspace = torch.empty(size, dtype=torch.uint8, device=self.device)

    def run(self) -> None:
        """Launch on the current stream."""
        self.cudnn.set_stream(handle=self.handle, stream=torch.cuda.current_stream().cuda_stream)
        self.graph.execute(self.values, self.workspace, handle=self.handle)
