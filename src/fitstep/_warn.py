"""Warnings that point at the user's own line."""

import inspect
import os
import warnings
from pathlib import Path

import keras

_FOREIGN = tuple(str(Path(package).parent) + os.sep for package in (__file__, keras.__file__))


def warn(message: str) -> None:
    """Warn at the innermost line that is neither fitstep's nor Keras's."""
    level, frame = 1, inspect.currentframe()
    while frame and frame.f_back and frame.f_code.co_filename.startswith(_FOREIGN):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, stacklevel=level)
