"""Losses that stay as they are: what a commit's `Numerics: unchanged` means.

`python tests/golden/test_golden.py` writes them anew, for a commit that says `Numerics: changed`.
"""

import json
from pathlib import Path

import keras
import numpy as np
import pytest
from keras import layers

import fitstep as fs

FILE = Path(__file__).with_name("losses.json")


def _dense():
    return [
        layers.Input((6,)),
        layers.Dense(16, "relu", kernel_regularizer="l2"),
        layers.BatchNormalization(),
        layers.Dropout(0.25),
        layers.Dense(1),
    ], (6,)


def _convolutional():
    return [
        layers.Input((8, 8, 1)),
        layers.Conv2D(4, 3, activation="relu"),
        layers.MaxPooling2D(),
        layers.Flatten(),
        layers.Dense(1),
    ], (8, 8, 1)


def _recurrent():
    return [layers.Input((5, 3)), layers.LSTM(8), layers.Dense(1)], (5, 3)


MODELS = {"dense": _dense, "convolutional": _convolutional, "recurrent": _recurrent}


def losses(name: str) -> list[float]:
    """The losses of three shuffled epochs from a fixed seed, with a partial last batch."""
    keras.utils.set_random_seed(11)
    stack, shape = MODELS[name]()
    model = keras.Sequential(stack)
    model.compile("adam", "mse")
    generator = np.random.default_rng(3)
    x = generator.normal(size=(70, *shape)).astype("float32")
    y = x.reshape(70, -1).sum(axis=1, keepdims=True)
    return fs.fit(model, x, y, epochs=3, verbose=0).history["loss"]


@pytest.mark.parametrize("name", MODELS)
def test_losses_are_those_on_file(name):
    """Seeds, shuffling, the order of updates and of sums are what they were."""
    # Processors and versions of XLA differ in the last bits of float32 sums, 6e-8 each.
    np.testing.assert_allclose(losses(name), json.loads(FILE.read_text())[name], rtol=1e-5)


if __name__ == "__main__":
    FILE.write_text(json.dumps({name: losses(name) for name in MODELS}, indent=2) + "\n")
