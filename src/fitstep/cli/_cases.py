"""The models that `fitstep bench` times, with the data of one epoch: small, of four kinds."""

from collections.abc import Callable
from typing import Any, NamedTuple

import keras
import numpy as np
from keras import layers


class Case(NamedTuple):
    """A compiled model that is made anew each time, and one epoch's rows."""

    name: str
    make: Callable[[], keras.Model]
    x: np.ndarray
    y: np.ndarray
    batch_size: int

    def build(self) -> keras.Model:
        """The model, with the same weights each time."""
        keras.utils.set_random_seed(1)  # before any layer, each of which draws a seed
        return self.make()

    @property
    def steps(self) -> int:
        """The steps of an epoch; the last may be smaller."""
        return -(-len(self.x) // self.batch_size)

    def cut(self, steps: int) -> "Case":
        """The same model on the first so many batches."""
        rows = slice(steps * self.batch_size)
        return self._replace(x=self.x[rows], y=self.y[rows])


def cases() -> list[Case]:
    """An epoch of each takes a third of a second or less with stock Keras, on two cores."""
    generator = np.random.default_rng(0)

    def floats(*shape: int) -> np.ndarray:
        return generator.normal(size=shape).astype("float32")

    digits = generator.integers(0, 10, size=32 * 64)
    words = generator.integers(0, 1000, size=(16 * 64, 32)).astype("int32")
    return [
        Case("MLP 2x64, batch 32", mlp, floats(32 * 2000, 20), floats(32 * 2000, 1), 32),
        Case("CNN 28x28, batch 32", cnn, floats(32 * 64, 28, 28, 1), digits, 32),
        Case("LSTM 64, batch 32", lstm, floats(32 * 192, 32, 16), floats(32 * 192, 1), 32),
        Case("Transformer d=64, batch 16", transformer, words, floats(16 * 64, 1), 16),
    ]


def sequential(stack: list[Any], loss: str) -> keras.Model:
    """A compiled stack of layers."""
    model = keras.Sequential(stack)
    model.compile("adam", loss)
    return model


def mlp() -> keras.Model:
    """Two hidden layers of 64."""
    hidden = [layers.Dense(64, "relu"), layers.Dense(64, "relu")]
    return sequential([layers.Input((20,)), *hidden, layers.Dense(1)], "mse")


def cnn() -> keras.Model:
    """Two convolutions of 16 and 32 filters, with BatchNorm and Dropout."""
    stack: list[Any] = [
        layers.Input((28, 28, 1)),
        layers.Conv2D(16, 3, activation="relu"),
        layers.BatchNormalization(),
        layers.MaxPooling2D(),
        layers.Conv2D(32, 3, activation="relu"),
        layers.MaxPooling2D(),
        layers.Flatten(),
        layers.Dropout(0.2),
        layers.Dense(10, "softmax"),
    ]
    return sequential(stack, "sparse_categorical_crossentropy")


def lstm() -> keras.Model:
    """64 units over 32 times of 16 features."""
    return sequential([layers.Input((32, 16)), layers.LSTM(64), layers.Dense(1)], "mse")


def transformer() -> keras.Model:
    """Two layers of width 64 with four heads, over 32 words."""
    inputs = layers.Input((32,), dtype="int32")
    x = layers.Embedding(1000, 64)(inputs)
    for _ in range(2):
        x = layers.LayerNormalization()(x + layers.MultiHeadAttention(4, 16)(x, x))
        x = layers.LayerNormalization()(x + layers.Dense(64)(layers.Dense(128, "gelu")(x)))
    model = keras.Model(inputs, layers.Dense(1)(layers.GlobalAveragePooling1D()(x)))
    model.compile("adam", "mse")
    return model
