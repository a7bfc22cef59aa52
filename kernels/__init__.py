"""Tensor operations of a step: one file each, with formula, torch reference, Triton kernel and launcher.

Imports torch and Triton alone (and llvmlite, for the one kernel for CPUs), and torch alone where these are missing.
"""

import importlib.metadata
import warnings

try:
    importlib.metadata.distribution("kernels")
except importlib.metadata.PackageNotFoundError:
    pass
else:
    warnings.warn(
        "the distribution 'kernels' is installed in this environment and has an import package of the same name as "
        "lawful's: give lawful an environment of its own, or uninstall it",
        ImportWarning,
        stacklevel=2,
    )
