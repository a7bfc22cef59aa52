"""What can go wrong when a model is loaded."""

from __future__ import annotations


class ModelLoadError(ValueError):
    """A model cannot be found, read or supported.  The message names the file or tensor and what would be accepted."""
