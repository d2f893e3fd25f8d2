"""Kernels and inputs that tests share with the scripts they run."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
