"""fitstep runs on Keras with the JAX backend: choose it early, or say what is in the way."""

import importlib
import importlib.abc
import importlib.util
import os
import sys
from pathlib import Path
from typing import Any

from fitstep._errors import BackendError

VARIABLE = "KERAS_BACKEND"


def choose_jax() -> None:
    """Make JAX the backend of a Keras that is not imported yet, or check the one that is.

    Only the environment variable counts as a choice: Keras writes "tensorflow" into its own
    configuration file by itself, so what stands there is nobody's wish.

    Raises:
        BackendError: if another backend is live, or asked for by the variable.
    """
    keras: Any = sys.modules.get("keras")
    if hasattr(keras, "backend"):
        live = keras.backend.backend()
        if live != "jax":
            raise BackendError(
                f"fitstep needs Keras on JAX, but Keras was imported before fitstep with the "
                f"backend {live!r} ({_origin(live)}). Put `import fitstep` above `import keras`"
                f"{_unset(live)}, or start Python with {VARIABLE}=jax."
            )
        return
    asked = os.environ.get(VARIABLE)
    if not asked:
        os.environ[VARIABLE] = "jax"
    elif asked != "jax":
        raise BackendError(
            f"fitstep needs Keras on JAX, but the environment variable {VARIABLE} asks for "
            f"{asked!r}. Start Python with {VARIABLE}=jax."
        )


def is_command() -> bool:
    """Whether this process is the command `fitstep`, which checks the backend itself."""
    program = sys.argv[0] if sys.argv else ""
    if program != "-m":
        return Path(program).stem == "fitstep"
    # `python -m fitstep`, also written `-mfitstep` or `-um fitstep`.
    words = sys.orig_argv[1:]
    return any(
        word.startswith("-")
        and (word.endswith("mfitstep") or (word.endswith("m") and after == "fitstep"))
        for word, after in zip(words, [*words[1:], ""], strict=True)
    )


def _origin(live: str) -> str:
    if os.environ.get(VARIABLE) == live:
        return f"from the environment variable {VARIABLE}"
    return "from Keras's configuration file or its default"


def _unset(live: str) -> str:
    return f" and unset {VARIABLE}" if os.environ.get(VARIABLE) == live else ""


def refuse_nnx() -> None:
    """Refuse Keras's NNX mode, in which variables keep their arrays elsewhere.

    Raises:
        BackendError: if the NNX mode is on.
    """
    from keras.config import is_nnx_enabled

    if is_nnx_enabled():
        raise BackendError(
            "fitstep does not support Keras's NNX mode (keras.config.is_nnx_enabled() is true). "
            "Unset KERAS_NNX_ENABLED, or take `nnx_enabled` out of Keras's configuration file."
        )


class _AfterKeras(importlib.abc.MetaPathFinder):
    """Notices the first import of Keras, and registers fitstep's classes once it is through."""

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> Any:
        if fullname != "keras":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _Registering(spec.loader)
        return spec


class _Registering(importlib.abc.Loader):
    """Keras's own loader, with one more thing to do at the end."""

    def __init__(self, loader: Any):
        self._loader = loader

    def create_module(self, spec: Any) -> Any:
        return self._loader.create_module(spec)

    def exec_module(self, module: Any) -> None:
        module.__spec__.loader = module.__loader__ = self._loader
        self._loader.exec_module(module)
        _register()


def register_when_keras_is_there() -> None:
    """Register the classes for saving as soon as Keras is imported, before or after fitstep.

    A saved `fitstep.Model` can then be loaded by `keras.saving.load_model` at once.
    """
    if hasattr(sys.modules.get("keras"), "saving"):
        _register()
    else:
        sys.meta_path.insert(0, _AfterKeras())


def _register() -> None:
    import keras

    if keras.backend.backend() == "jax" and not keras.config.is_nnx_enabled():
        importlib.import_module("fitstep._model")
