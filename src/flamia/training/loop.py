"""The training loop: AdamW, warm-up and cosine, clipping, checkpoints, a log, and two evaluations.

Nothing in a step waits for the device: losses and gradient norms stay there until the next read, every
`log_every` steps, which also notices a loss that is not finite.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .attention import get_attention
from .config import TrainConfig
from .data import Corpus, PackedRows, Row, load_corpus
from .evaluation import Evaluation, evaluate
from .model import GPT, Attend

VALIDATION_SEED = 20_240  # the same validation rows for every run with the same corpus, tokens and context


@dataclass(frozen=True)
class Report:
    """What a progress callback is told: after every read of the device, and after an evaluation."""

    step: int
    steps: int
    loss: float
    lr: float
    grad_norm: float
    tokens_per_s: float
    evaluation: Evaluation | None = None


Progress = Callable[[Report], None]


@dataclass
class Result:
    """What a run produced.  Lists have one entry a step of this call; a resumed run starts at `first_step`."""

    config: TrainConfig
    parameters: int
    corpus: str
    first_step: int = 0
    losses: list[float] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)
    evaluations: list[Evaluation] = field(default_factory=list)
    seconds: float = 0.0  # in training steps, without evaluations
    tokens_per_s: float = 0.0

    @property
    def final(self) -> Evaluation:
        """The evaluation after the last step: through the training attention and through exact attention."""
        return self.evaluations[-1]

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {"config": self.config.as_dict()}


def learning_rate(config: TrainConfig, step: int) -> float:
    """Rate of step 0, 1, ...: linear up to `lr` over `warmup` steps, then half a cosine down to lr · final_lr."""
    warmup = min(config.warmup, config.steps - 1)
    if step < warmup:
        return config.lr * (step + 1) / warmup
    done = (step - warmup) / max(1, config.steps - 1 - warmup)
    return config.lr * (config.final_lr + (1 - config.final_lr) * 0.5 * (1 + math.cos(math.pi * min(1.0, done))))


def train_step(
    model: GPT,
    optimizer: torch.optim.Optimizer,
    row: Row,
    max_seqlen: int,
    attend: Attend,
    *,
    clip: float,
    autocast: bool,
) -> tuple[Tensor, Tensor]:
    """One optimiser step on a packed row: mean loss and gradient norm before clipping, both still on the device.

    `max_seqlen` bounds the longest document; `autocast` is BF16 outside of attention too.
    """
    with torch.autocast(row.tokens.device.type, dtype=torch.bfloat16, enabled=autocast):
        loss = model.loss(row.tokens, row.targets, row.cu_seqlens, max_seqlen, attend).mean()
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
    optimizer.step()
    return loss.detach(), norm


def run(config: TrainConfig, progress: Progress | None = None, *, corpus: Corpus | None = None) -> Result:
    """Trains as `config` says and evaluates both ways after the last step.

    Args:
        config: the run.
        progress: called with a `Report` every `log_every` steps and after every evaluation.
        corpus: documents, if they are loaded already; otherwise `config.data` is read.

    Raises:
        FloatingPointError: a loss or gradient norm that is not finite; nothing is saved after it.
        ValueError: `out` holds a run and `resume` is not set, or nothing to resume from, or a checkpoint of another
            run, or data that cannot be read as asked.
    """
    return Trainer(config, corpus).train(progress)


class Trainer:
    """A run in progress: the model, its optimiser, where the data stands, and the log."""

    def __init__(self, config: TrainConfig, corpus: Corpus | None = None) -> None:
        self.config = config
        self.device = _device(config.device)
        self.corpus = corpus or load_corpus(config.data)
        self.out = Path(config.out) if config.out is not None else None
        self.attend = get_attention(config.recipe, config.model.window, backend=config.backend)
        self.exact = self.attend if config.recipe == "exact" else get_attention("exact", config.model.window)

        torch.manual_seed(config.seed)
        self.model = GPT(config.model, torch.Generator().manual_seed(config.seed)).to(self.device)
        self.optimizer = torch.optim.AdamW(
            self.model.parameter_groups(config.weight_decay),
            lr=config.lr,
            betas=(config.beta1, config.beta2),
            fused=True,
        )
        packing = {"tokens": config.tokens, "context": config.context}
        self.rows = PackedRows(self.corpus.train, seed=config.seed, **packing)
        validation = PackedRows(self.corpus.validation, seed=VALIDATION_SEED, **packing)
        count = min(config.eval_rows, max(1, validation.predictions // config.tokens))
        self.validation = [next(validation).to(self.device) for _ in range(count)]
        self.step = 0
        self.result = Result(config, sum(p.numel() for p in self.model.parameters()), self.corpus.describe())
        self._open()

    # ------------------------------------------------------------------------------------------ training
    def train(self, progress: Progress | None = None) -> Result:
        config, result = self.config, self.result
        pending: list[tuple[int, float, Tensor, Tensor]] = []
        clock = time.perf_counter()
        while self.step < config.steps:
            lr, loss, norm = self._step()
            pending.append((self.step, lr, loss, norm))
            evaluates = self.step == config.steps or (config.eval_every and self.step % config.eval_every == 0)
            saves = self.step == config.steps or (config.checkpoint_every and self.step % config.checkpoint_every == 0)
            if not (evaluates or saves or self.step % config.log_every == 0):
                continue
            report = self._read(pending, clock)
            pending = []
            if evaluates:
                report = replace(report, evaluation=self.evaluate())
            if saves:
                self.save()
            if progress is not None:
                progress(report)
            clock = time.perf_counter()
        if not result.evaluations:  # resumed after the last step
            self.evaluate()
        result.tokens_per_s = len(result.losses) * config.tokens / result.seconds if result.seconds else 0.0
        if self.out is not None:
            _write(self.out / "result.json", json.dumps(_plain(result.as_dict()), indent=1))
        return result

    def _step(self) -> tuple[float, Tensor, Tensor]:
        lr = learning_rate(self.config, self.step)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        row = next(self.rows).to(self.device)
        config = self.config
        loss, norm = train_step(
            self.model, self.optimizer, row, config.context, self.attend, clip=config.clip, autocast=config.autocast
        )
        self.step += 1
        return lr, loss, norm

    def _read(self, pending: list[tuple[int, float, Tensor, Tensor]], clock: float) -> Report:
        """Brings the losses since the last read to the host, checks and logs them."""
        losses = torch.stack([loss for _, _, loss, _ in pending]).tolist()
        norms = torch.stack([norm for _, _, _, norm in pending]).tolist()
        seconds = time.perf_counter() - clock
        speed = len(pending) * self.config.tokens / seconds
        for (step, lr, _, _), loss, norm in zip(pending, losses, norms, strict=True):
            self._log({"step": step, "loss": loss, "lr": lr, "grad_norm": norm, "tokens_per_s": round(speed, 1)})
            if not (math.isfinite(loss) and math.isfinite(norm)):
                raise FloatingPointError(
                    f"step {step} of recipe {self.config.recipe!r}: loss {loss}, gradient norm {norm}; training "
                    "stopped. The last checkpoint is from before it. Lower lr, or take another recipe or seed"
                )
        self.result.losses += losses
        self.result.grad_norms += norms
        self.result.seconds += seconds
        step, lr, _, _ = pending[-1]
        return Report(step, self.config.steps, losses[-1], lr, norms[-1], speed)

    def evaluate(self) -> Evaluation:
        """Both losses of the present weights on the validation rows; logged and kept in the result."""

        with torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.config.autocast):
            evaluation = evaluate(
                self.model, self.validation, self.config.context, self.attend, self.exact, step=self.step
            )
        self.result.evaluations.append(evaluation)
        self._log(
            {
                "step": self.step,
                "validation_loss": evaluation.own,
                "validation_loss_exact": evaluation.exact,
                "gap": evaluation.gap,
                "gap_standard_error": evaluation.gap_standard_error,
            }
        )
        return evaluation

    # ------------------------------------------------------------------------------------------ files
    def _open(self) -> None:
        if self.out is None:
            return
        saved = self.out / "checkpoint.pt"
        if self.config.resume:
            if not saved.exists():
                raise ValueError(f"out {str(self.out)!r} holds no checkpoint.pt to resume from")
            self._load(saved)
        elif any((self.out / name).exists() for name in ("log.jsonl", "checkpoint.pt")):
            raise ValueError(f"out {str(self.out)!r} already holds a run; resume it or name another folder")
        self.out.mkdir(parents=True, exist_ok=True)
        _write(self.out / "config.json", json.dumps(self.config.as_dict(), indent=1))
        if self.config.resume:
            _cut_log(self.out / "log.jsonl", self.step)

    def _log(self, record: dict[str, Any]) -> None:
        if self.out is not None:
            with open(self.out / "log.jsonl", "a", encoding="utf-8") as file:
                file.write(json.dumps(_plain(record)) + "\n")

    def save(self) -> None:
        """Writes `out`/checkpoint.pt; an interruption leaves the one before it."""
        if self.out is None:
            return
        state = {
            "step": self.step,
            "identity": self.config.identity(),
            "corpus": self.corpus.fingerprint,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "data": self.rows.state_dict(),
            "rng": torch.get_rng_state(),
            "cuda_rng": torch.cuda.get_rng_state_all() if self.device.type == "cuda" else [],
        }
        temporary = self.out / "checkpoint.pt.new"
        torch.save(state, temporary)
        os.replace(temporary, self.out / "checkpoint.pt")

    def _load(self, path: Path) -> None:
        state = torch.load(path, map_location="cpu", weights_only=True)
        asked = self.config.identity() | {"corpus": self.corpus.fingerprint}
        stored = state["identity"] | {"corpus": state["corpus"]}
        other = [name for name in asked if asked[name] != stored.get(name)]
        if other:
            told = "; ".join(f"{name} is {asked[name]!r}, the checkpoint has {stored.get(name)!r}" for name in other)
            raise ValueError(f"{str(path)!r} belongs to another run: {told}")
        if state["step"] > self.config.steps:
            raise ValueError(f"steps is {self.config.steps}; the checkpoint is at step {state['step']} already")
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.rows.load_state_dict(state["data"])
        torch.set_rng_state(state["rng"])
        if state["cuda_rng"] and self.device.type == "cuda":
            torch.cuda.set_rng_state_all(state["cuda_rng"])
        self.step = self.result.first_step = state["step"]


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ValueError(f"device is {name!r}; allowed: auto, cpu, cuda, cuda:N") from error
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"device is {name!r}; allowed: auto, cpu, cuda, cuda:N")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(f"device is {name!r}, but torch sees {torch.cuda.device_count()} CUDA devices here")
    return device


def _plain(value: Any) -> Any:
    """`value` with numbers that JSON lacks (NaN, infinities) as null."""
    if isinstance(value, dict):
        return {key: _plain(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _write(path: Path, text: str) -> None:
    path.write_text(text + "\n", encoding="utf-8")


def _cut_log(path: Path, step: int) -> None:
    """Drops log lines after `step`: steps that were run after the checkpoint and will be run again."""
    if path.exists():
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
        path.write_text("".join(line for line in lines if json.loads(line)["step"] <= step), encoding="utf-8")
