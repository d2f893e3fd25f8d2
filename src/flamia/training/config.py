"""What a run is made of: one frozen record, filled from a preset and changed field by field."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from .attention import attention_names
from .model import MODELS, ModelConfig


@dataclass(frozen=True)
class TrainConfig:
    """A training run.  Built by `TrainConfig.of(preset, **changes)`; every field can be changed there.

    Attributes:
        recipe: attention to train through: `exact`, `bf16` or a recipe of flamia.
        steps, tokens, context: optimiser steps, tokens in a step (one packed row), longest document in it.
        seed: of the weights and of the order of the data.
        lr, warmup, final_lr: peak rate of AdamW, steps of linear warm-up, and the fraction of the peak that the
            cosine ends at.
        weight_decay, beta1, beta2, clip: decoupled decay of matrices, Adam's decays, and the gradient norm above
            which gradients are scaled down.
        data: files and folders; none is Python's standard library.
        device: "cpu", "cuda", "cuda:1", or "auto", which is CUDA where there is one.
        backend: of flamia's attention.
        autocast: BF16 for everything outside of attention too; parameters stay FP32.
        eval_every, eval_rows: steps between evaluations (0: only after the last step), and validation rows in one.
        log_every: steps between two reads of the device; every step is logged all the same.
        checkpoint_every: steps between checkpoints (0: only after the last step).  They need `out`.
        out: folder of log.jsonl, config.json, result.json and checkpoint.pt; None writes nothing.
        resume: go on from the checkpoint in `out`.
    """

    preset: str
    model: ModelConfig
    steps: int
    tokens: int
    context: int
    lr: float
    recipe: str = "exact"
    seed: int = 0
    warmup: int = 50
    final_lr: float = 0.0
    weight_decay: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.95
    clip: float = 1.0
    data: tuple[str, ...] = ()
    device: str = "auto"
    backend: str = "auto"
    autocast: bool = False
    eval_every: int = 0
    eval_rows: int = 32
    log_every: int = 10
    checkpoint_every: int = 0
    out: str | None = None
    resume: bool = False

    def __post_init__(self) -> None:
        if self.recipe not in attention_names():
            raise ValueError(f"recipe is {self.recipe!r}; allowed: {', '.join(attention_names())}")
        for name in ("steps", "tokens", "context", "eval_rows", "log_every"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")
        for name in ("warmup", "weight_decay", "eval_every", "checkpoint_every"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} is {getattr(self, name)}; it must not be negative")
        for name in ("lr", "clip"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be positive")
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must lie in [0, 1)")
        if not 0 <= self.final_lr <= 1:
            raise ValueError(f"final_lr is {self.final_lr}; it is a fraction of lr, from 0 to 1")
        if self.resume and self.out is None:
            raise ValueError("resume is set but out is not; name the folder of the run to go on with")
        if self.checkpoint_every and self.out is None:
            raise ValueError("checkpoint_every is set but out is not; name a folder for the checkpoints")

    @staticmethod
    def of(preset: str = "tiny", **changes: Any) -> TrainConfig:
        """A preset's run with `changes`; a change that is None keeps the preset's value.

        Raises ValueError for an unknown preset, an unknown field, or a value that makes no sense.
        """
        if preset not in PRESETS:
            raise ValueError(f"preset is {preset!r}; allowed: {', '.join(PRESETS)}")
        known = {field.name for field in fields(TrainConfig)} - {"preset"}
        for name in changes:
            if name not in known:
                raise ValueError(f"{name!r} is no field of a run; allowed: {', '.join(sorted(known))}")
        return replace(PRESETS[preset], **{name: value for name, value in changes.items() if value is not None})

    def identity(self) -> dict[str, Any]:
        """What a checkpoint and the run that goes on from it must agree on."""
        free = {"steps", "device", "backend", "data", "out", "resume"}
        free |= {name for name in self.as_dict() if name.endswith("_every")} | {"eval_rows"}
        return {name: value for name, value in self.as_dict().items() if name not in free}

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON and checkpoints."""
        return asdict(self) | {"data": list(self.data)}


PRESETS: dict[str, TrainConfig] = {
    "tiny": TrainConfig("tiny", MODELS["tiny"], steps=300, tokens=1024, context=256, lr=3e-3),
    "paper": TrainConfig(
        "paper", MODELS["paper"], steps=6000, tokens=32_768, context=1024, lr=6e-4, warmup=200, final_lr=0.1
    ),
    "1b": TrainConfig(
        "1b",
        MODELS["1b"],
        steps=2000,
        tokens=65_536,
        context=8192,
        lr=3e-4,
        warmup=200,
        final_lr=0.1,
        autocast=True,
        eval_rows=4,
    ),
    "probe": TrainConfig("probe", MODELS["probe"], steps=500, tokens=2048, context=64, lr=3e-3),
}
