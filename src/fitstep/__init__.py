"""Your training step. Keras's `fit`. Nothing lost."""

import importlib
from typing import TYPE_CHECKING, Any

from fitstep import _backend
from fitstep._errors import (
    AlgorithmError,
    BackendError,
    CheckpointError,
    DataError,
    FitstepError,
    NonFiniteError,
    OptimizerError,
    StateError,
)

if TYPE_CHECKING:
    from fitstep._capture import capture, restore
    from fitstep._explain import explain
    from fitstep._fit import evaluate, fit, predict, steps
    from fitstep._model import Model, Sequential, Trainer
    from fitstep._run import Run
    from fitstep._state import State

__version__ = "0.1.0"

__all__ = [
    "AlgorithmError",
    "BackendError",
    "CheckpointError",
    "DataError",
    "FitstepError",
    "Model",
    "NonFiniteError",
    "OptimizerError",
    "Run",
    "Sequential",
    "State",
    "StateError",
    "Trainer",
    "capture",
    "evaluate",
    "explain",
    "fit",
    "predict",
    "restore",
    "steps",
]

# What needs Keras is imported when it is first asked for.
_LAZY = {
    "Model": "_model",
    "Run": "_run",
    "Sequential": "_model",
    "State": "_state",
    "Trainer": "_model",
    "capture": "_capture",
    "evaluate": "_fit",
    "explain": "_explain",
    "fit": "_fit",
    "predict": "_fit",
    "restore": "_capture",
    "steps": "_fit",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'fitstep' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"fitstep.{_LAZY[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


if not _backend.is_command():  # which says it in one line, and answers --help whatever is live
    _backend.choose_jax()
_backend.register_when_keras_is_there()
