"""What `fitstep doctor` looks at: each respect on its own, so that one broken part hides no other."""

import contextlib
import importlib.util
import json
import os
import platform
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fitstep import __version__, _cache, _cache_folder
from fitstep._backend import VARIABLE
from fitstep.cli import _accelerators
from fitstep.cli._accelerators import Problem
from fitstep.records._environment import version_of

OLDEST = {"keras": "3.15", "jax": "0.10.2"}  # as pyproject.toml has them
OPTIONAL = ("numpy", "optax", "orbax-checkpoint", "flax", "grain")
TITLES: dict[str, str] = {
    "python": "Python",
    "keras": "Keras",
    "jax": "JAX",
    "numpy": "NumPy",
    "orbax-checkpoint": "Orbax",
    "optax": "Optax",
    "flax": "Flax",
    "grain": "Grain",
}

# The settings of JAX that change numbers or speed: what they are by default, and what they do.
_SETTINGS = {
    "jax_enable_x64": (False, "arrays made without Keras may be of 64 bits"),
    "jax_default_matmul_precision": (None, "of every product of matrices"),
    "jax_debug_nans": (False, "every step is searched for NaN, which is slow"),
    "jax_debug_infs": (False, "every step is searched for infinities, which is slow"),
    "jax_disable_jit": (False, "nothing is compiled, which is very slow"),
    "jax_default_device": (None, "where arrays are put"),
    "jax_numpy_dtype_promotion": ("standard", "which dtypes may be mixed"),
}
_VARIABLES = {
    "XLA_FLAGS": "",
    "KERAS_MAX_EPOCHS": "every fit ends after that many epochs",
    "KERAS_MAX_STEPS_PER_EPOCH": "every epoch ends after that many steps",
}


class Part(NamedTuple):
    """What was found in one respect, as JSON, and what is wrong with it."""

    found: Any
    problems: Sequence[Problem] = ()


def examine() -> dict[str, Any]:
    """The report, as JSON. Starts JAX's devices and imports Keras, if they let it."""
    # A training that runs on the same GPU needs the memory that JAX would take at once.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    jax = _jax()
    keras = _keras()
    parts = {
        "versions": _versions(),
        "keras": keras,
        "jax": jax,
        "accelerators": _unused_accelerators(jax.found),
        "settings": _settings(),
        "cache": _compilation_cache(jax.found),
    }
    problems = [problem for part in parts.values() for problem in part.problems]
    report = {name: part.found for name, part in parts.items()}
    return report | {"problems": [problem._asdict() for problem in problems]}


def _versions() -> Part:
    packages = {name: version_of(name) for name in ("keras", "jax", "jaxlib", *OPTIONAL)}
    packages["keras"] = packages["keras"] or version_of("keras-nightly")
    found = {"python": platform.python_version(), "fitstep": __version__, **packages}
    problems = []
    for package, oldest in OLDEST.items():
        there = packages[package]
        if there is not None and _number(there) < _number(oldest):
            what = f"{TITLES[package]} {there} is too old: fitstep needs {oldest} or newer"
            problems.append(Problem(what, f'pip install -U "{package}>={oldest}"'))
    return Part(found, problems)


def _number(version: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", version)[:3]))


def _keras() -> Part:
    asked, origin = _asked()
    found: dict[str, Any] = {"asked": asked, "origin": origin, "live": None}
    problems = []
    if origin == VARIABLE and asked != "jax":
        what = f"{VARIABLE}={asked} asks for another backend than JAX"
        problems.append(Problem(what, set_line(VARIABLE, "jax")))
    imported = _import_keras()
    if isinstance(imported, Problem):
        return Part(found, [*problems, imported])
    found["live"] = live = imported.backend.backend()
    if live != "jax":
        what = f"Keras was imported before fitstep, on the backend {live!r}"
        problems.append(Problem(what, "put `import fitstep` above `import keras`"))
    if imported.config.is_nnx_enabled():
        what = "Keras's NNX mode is on, which fitstep does not support"
        problems.append(Problem(what, _without_nnx()))
    found["floatx"] = imported.config.floatx()
    found["dtype_policy"] = imported.config.dtype_policy().name
    distribution = imported.distribution.distribution()
    found["distribution"] = None if distribution is None else type(distribution).__name__
    return Part(found, problems)


def _asked() -> tuple[str | None, str | None]:
    """The backend that is asked for, and what asks for it: a variable, or Keras's file."""
    if asked := os.environ.get(VARIABLE):
        return asked, VARIABLE
    path = _keras_file()
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        asked = content.get("backend")
    except (OSError, ValueError, AttributeError):
        return None, None
    return (asked, str(path)) if isinstance(asked, str) else (None, None)


def _keras_file() -> Path:
    folder = os.environ.get("KERAS_HOME") or os.path.join("~", ".keras")  # noqa: PTH118
    return Path(os.path.expanduser(folder)) / "keras.json"  # noqa: PTH111 - Path's may raise


def _import_keras() -> Any | Problem:
    """Keras, on JAX if it is not there yet; or what keeps it from being imported."""
    installation = f'pip install "keras>={OLDEST["keras"]}"'
    if "keras" not in sys.modules and importlib.util.find_spec("keras") is None:
        return Problem("Keras is not installed", installation)
    version = version_of("keras")
    if version is not None and _number(version) < _number(OLDEST["keras"]):
        return Problem(f"Keras {version} was not imported", installation)
    try:
        with _asking_for_jax():
            import keras
            import keras.config
            import keras.distribution
    except Exception as error:  # noqa: BLE001 - whatever a broken installation raises
        what = f"Keras cannot be imported: {_one_line(error)}"
        if "NNX" in str(error):
            return Problem(what, _without_nnx())
        if isinstance(error, ValueError) and _keras_file().exists():
            return Problem(what, f"mend or delete {_keras_file()}")
        if isinstance(error, ModuleNotFoundError) and error.name and "." not in error.name:
            return Problem(what, f"pip install {error.name}")
        return Problem(what, installation.replace("install", "install --force-reinstall"))
    return keras


@contextlib.contextmanager
def _asking_for_jax() -> Iterator[None]:
    """For the time of an import: Keras's own choice may be a package that is not there."""
    before = os.environ.get(VARIABLE)
    os.environ[VARIABLE] = "jax"
    try:
        yield
    finally:
        if before is None:
            del os.environ[VARIABLE]
        else:
            os.environ[VARIABLE] = before


def _without_nnx() -> str:
    if os.environ.get("KERAS_NNX_ENABLED"):
        return "unset KERAS_NNX_ENABLED"
    return f"take `nnx_enabled` out of {_keras_file()}"


def _jax() -> Part:
    found: dict[str, Any] = {"backend": None, "devices": []}
    if "jax" not in sys.modules and importlib.util.find_spec("jax") is None:
        return Part(found, [Problem("JAX is not installed", f'pip install "jax>={OLDEST["jax"]}"')])
    try:
        import jax
    except Exception as error:  # noqa: BLE001 - whatever a broken installation raises
        what = f"JAX cannot be imported: {_one_line(error)}"
        return Part(found, [Problem(what, "pip install -U jax jaxlib")])
    try:
        devices = jax.devices()
        found["backend"] = jax.default_backend()
    except Exception as error:  # noqa: BLE001 - whatever a driver makes JAX raise
        chosen = f" on {_chosen()!r}" if _chosen() else ""
        what = f"JAX does not start{chosen}: {_one_line(error)}"
        return Part(found, [Problem(what, _start(_chosen()))])
    found["devices"] = [
        {"platform": device.platform, "kind": device.device_kind, "memory": _memory(device)}
        for device in devices
    ]
    return Part(found)


def _start(chosen: str) -> str:
    """The line that lets JAX start."""
    for accelerator in _accelerators.found():
        gpu = "gpu" in chosen and accelerator.platform in ("cuda", "rocm")
        if gpu or accelerator.platform in chosen:
            return _accelerators.install(accelerator)
    return "unset JAX_PLATFORMS" if chosen else "pip install -U jax jaxlib"


def _memory(device: Any) -> int | None:
    """The bytes that JAX may use on a device; those of the machine for a CPU."""
    with contextlib.suppress(Exception):  # not every device can tell
        return int(device.memory_stats()["bytes_limit"])
    with contextlib.suppress(AttributeError, ValueError, OSError):  # nor every system
        if device.platform == "cpu":
            return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return None


def _chosen() -> str:
    """The platforms that JAX was told to use, or an empty text."""
    jax: Any = sys.modules.get("jax")
    named = [getattr(jax.config, name, None) for name in ("jax_platforms", "jax_platform_name")]
    return next((str(name) for name in named if name), "")


def _unused_accelerators(jax: dict[str, Any]) -> Part:
    accelerators = _accelerators.found()
    names = [accelerator.name for accelerator in accelerators]
    if jax["backend"] != "cpu":
        return Part(names)
    return Part(names, [_accelerators.unused(each, _chosen(), _error_of) for each in accelerators])


def _error_of(platform: str) -> str:
    import jax

    try:
        jax.devices(platform)
    except Exception as error:  # noqa: BLE001 - whatever a driver makes JAX raise
        return _one_line(error)
    return "it is not the first that JAX takes"


def _settings() -> Part:
    jax: Any = sys.modules.get("jax")
    found, problems = {}, []
    for name, (default, about) in _SETTINGS.items():
        value = getattr(getattr(jax, "config", None), name, default)
        if value != default:
            found[name] = {"value": str(value), "about": about}
    for name, about in _VARIABLES.items():
        if os.environ.get(name):
            found[name] = {"value": os.environ[name], "about": about}
    if "jax_numpy_dtype_promotion" in found:
        value = found["jax_numpy_dtype_promotion"]["value"]
        variable = "JAX_NUMPY_DTYPE_PROMOTION"
        remedy = f"unset {variable}" if os.environ.get(variable) else "take that setting out"
        what = f"jax_numpy_dtype_promotion is {value!r}, with which Keras itself fails"
        problems.append(Problem(what, remedy))
    return Part(found, problems)


def _compilation_cache(jax: dict[str, Any]) -> Part:
    if jax["backend"] is None:
        status = _cache.Status(False, None, "JAX does not start")
    else:
        status = _cache.status()
    found = status._asdict() | {"entries": 0, "bytes": 0}
    remedy = str(found.pop("remedy"))
    own = status.on and not status.why
    folder = Path(status.folder) if own and status.folder else cache_root()
    if folder is not None:
        found |= _cache_folder.contents(folder)._asdict()
        found["folder"] = status.folder or str(folder)
    problem = Problem(f"the compilation cache is off: {status.why}", remedy)
    return Part(found, [problem] if remedy else [])


def cache_root() -> Path | None:
    """Where fitstep keeps what is compiled, or `None` if the user has no place for it."""
    with contextlib.suppress(_cache_folder.UnusableError):
        return _cache_folder.root()
    return None


def set_line(variable: str, value: str) -> str:
    """The line that sets a variable in the user's shell."""
    return f"{'set' if os.name == 'nt' else 'export'} {variable}={value}"


def _one_line(error: BaseException) -> str:
    message = " ".join(str(error).split())
    return (
        f"{type(error).__name__}: {message}"[:300] if message else f"{type(error).__name__} in it"
    )
