"""A static report of compiled kernels: registers, spills, memories, and what one 128×128 tile of the hot loop costs.

Nothing here runs a kernel or needs a GPU. ``subjects`` lists the kernels, ``build`` compiles one in a process of its
own, ``sass`` reads machine code into blocks and loops, ``counts`` sorts instructions by the unit that executes them,
``rates`` holds what those units do per clock, ``report`` turns counts into bounds.
"""

from __future__ import annotations

from flamia.inspect.report import Report, inspect_kernel
from flamia.inspect.subjects import SUBJECTS, Subject

__all__ = ["SUBJECTS", "Report", "Subject", "inspect_kernel"]
