"""What all tests share: the backend, fixed seeds, eight devices, and small models and data."""

import os
import signal

os.environ["KERAS_BACKEND"] = "jax"
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Nothing that a test does depends on an earlier run, or stays in the user's folders.
os.environ["FITSTEP_CACHE"] = "0"
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
)

import jax
import keras
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache

from fitstep.engine import _runner

# A shell starts background jobs with Ctrl-C ignored, and what is ignored stays so in children.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def _fixed_seed():
    """Every test starts from the same seed and from Keras's defaults."""
    keras.utils.set_random_seed(7)
    yield
    keras.distribution.set_distribution(None)


@pytest.fixture(autouse=True)
def _no_machine_is_too_slow(monkeypatch):
    """How many steps share an execution doesn't depend on what else the machine does."""
    monkeypatch.setattr(_runner, "LONGEST", 1e9)


@pytest.fixture
def rows():
    """70 rows of 5 features and a target that depends on them: two batches of 32 and one of 6."""
    generator = np.random.default_rng(0)
    x = generator.normal(size=(70, 5)).astype("float32")
    y = (x.sum(axis=1, keepdims=True) + 0.1 * generator.normal(size=(70, 1))).astype("float32")
    return x, y


@pytest.fixture(scope="module")
def equal_programs_compiled_once(tmp_path_factory):
    """For tests that make the same small programs again: halves their time, keeps their bits."""
    names = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
    before = [getattr(jax.config, name) for name in names]
    for name, value in zip(names, (str(tmp_path_factory.mktemp("programs")), 0), strict=True):
        jax.config.update(name, value)
    compilation_cache.reset_cache()
    yield
    for name, value in zip(names, before, strict=True):
        jax.config.update(name, value)
    compilation_cache.reset_cache()
