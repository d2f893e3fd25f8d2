"""Draw every figure of the documentation from the code: python docs/figures/all.py [folder, by default this one]."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

HERE = Path(__file__).parent
FIGURES = ("formats", "layouts", "leaks", "sink", "accumulator", "exponentials")


def main(folder: Path = HERE) -> list[Path]:
    """Draw all figures into a folder; returns their paths."""
    if str(HERE) not in sys.path:
        sys.path.insert(0, str(HERE))
    folder.mkdir(parents=True, exist_ok=True)
    return [path for name in FIGURES for path in importlib.import_module(name).draw(folder)]


if __name__ == "__main__":
    for path in main(Path(sys.argv[1]) if len(sys.argv) > 1 else HERE):
        print(path)
