"""A byte-level GPT on real text, trained through any recipe and judged through exact attention.

`run(TrainConfig.of("tiny", recipe="mxfp8"))` trains and returns a `Result`; `flamia train` does the same from a shell.
"""

from .attention import attention_names, exact_attention, get_attention
from .config import PRESETS, TrainConfig
from .data import Corpus, PackedRows, Row, load_corpus
from .evaluation import Evaluation, compare, evaluate
from .loop import Progress, Report, Result, Trainer, learning_rate, run, train_step
from .model import GPT, MODELS, Attend, ModelConfig

__all__ = [
    "GPT",
    "MODELS",
    "PRESETS",
    "Attend",
    "Corpus",
    "Evaluation",
    "ModelConfig",
    "PackedRows",
    "Progress",
    "Report",
    "Result",
    "Row",
    "TrainConfig",
    "Trainer",
    "attention_names",
    "compare",
    "evaluate",
    "exact_attention",
    "get_attention",
    "learning_rate",
    "load_corpus",
    "run",
    "train_step",
]
