"""Small texts and small runs."""

import argparse
import json
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flamia.training import ModelConfig, TrainConfig

MODEL = ModelConfig(layers=1, width=64, head_dim=32, hidden=96)


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with three files of real text."""
    folder = tmp_path_factory.mktemp("text")
    for module in (argparse, json, textwrap):
        (folder / f"{module.__name__}.py").write_bytes(Path(module.__file__).read_bytes())
    return str(folder)


@pytest.fixture
def small(text: str) -> Callable[..., TrainConfig]:
    """A run of a second: `small(recipe=..., steps=...)`."""

    def build(**changes: Any) -> TrainConfig:
        defaults = dict(
            model=MODEL, steps=8, tokens=128, context=48, warmup=2, data=(text,), device="cpu", eval_rows=2, log_every=3
        )
        return TrainConfig.of("tiny", **(defaults | changes))

    return build
