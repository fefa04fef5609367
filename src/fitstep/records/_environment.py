"""The versions and devices that a run was made with."""

import os
import platform
import sys
from importlib.metadata import PackageNotFoundError, version
from typing import Any

PACKAGES = ("fitstep", "keras", "jax", "jaxlib", "numpy")


def environment() -> dict[str, Any]:
    """What `environment.json` says. Starts JAX's devices if nothing else has."""
    import jax
    import keras

    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "machine": platform.machine(),
        "cpus": os.cpu_count(),
        "packages": {package: version_of(package) for package in PACKAGES},
        "keras_backend": keras.backend.backend(),
        "floatx": keras.backend.floatx(),
        "dtype_policy": keras.config.dtype_policy().name,
        "x64": jax.config.read("jax_enable_x64"),
        "jax_backend": jax.default_backend(),
        "devices": [device.device_kind for device in jax.devices()],
    }


def version_of(package: str) -> str | None:
    """The version of a package, or `None` if it is not there."""
    try:
        return version(package)
    except PackageNotFoundError:  # run from a source tree, or vendored
        return getattr(sys.modules.get(package), "__version__", None)
