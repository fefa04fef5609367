"""What all tests share: the backend, fixed seeds, eight devices, and small models and data."""

import os
import signal

os.environ["KERAS_BACKEND"] = "jax"
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import keras
import numpy as np
import pytest

# A shell starts background jobs with Ctrl-C ignored, and what is ignored stays so in children.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def _fixed_seed():
    """Every test starts from the same seed and from Keras's defaults."""
    keras.utils.set_random_seed(7)
    yield
    keras.distribution.set_distribution(None)


@pytest.fixture
def rows():
    """70 rows of 5 features and a target that depends on them: two batches of 32 and one of 6."""
    generator = np.random.default_rng(0)
    x = generator.normal(size=(70, 5)).astype("float32")
    y = (x.sum(axis=1, keepdims=True) + 0.1 * generator.normal(size=(70, 1))).astype("float32")
    return x, y
