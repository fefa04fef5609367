"""The models that are timed, with data: small, convolutional, recurrent, attention, many variables."""

from collections.abc import Callable
from typing import Any, NamedTuple

import keras
import numpy as np
from keras import layers


class Case(NamedTuple):
    """A model to be built anew, and the data of one epoch."""

    name: str
    build: Callable[[], keras.Model]
    x: np.ndarray
    y: np.ndarray
    batch_size: int


def _compiled(stack: list[Any], loss: str) -> keras.Model:
    keras.utils.set_random_seed(1)
    model = keras.Sequential(stack)
    model.compile("adam", loss)
    return model


def mlp() -> keras.Model:
    return _compiled(
        [
            layers.Input((20,)),
            layers.Dense(64, "relu"),
            layers.Dense(64, "relu"),
            layers.Dense(1),
        ],
        "mse",
    )


def cnn() -> keras.Model:
    return _compiled(
        [
            layers.Input((28, 28, 1)),
            layers.Conv2D(16, 3, activation="relu"),
            layers.MaxPooling2D(),
            layers.Conv2D(32, 3, activation="relu"),
            layers.MaxPooling2D(),
            layers.Flatten(),
            layers.Dropout(0.2),
            layers.Dense(10, "softmax"),
        ],
        "sparse_categorical_crossentropy",
    )


def lstm() -> keras.Model:
    return _compiled([layers.Input((32, 16)), layers.LSTM(64), layers.Dense(1)], "mse")


def transformer() -> keras.Model:
    keras.utils.set_random_seed(1)
    inputs = layers.Input((32,), dtype="int32")
    x = layers.Embedding(1000, 64)(inputs)
    for _ in range(2):
        x = layers.LayerNormalization()(x + layers.MultiHeadAttention(4, 16)(x, x))
        x = layers.LayerNormalization()(x + layers.Dense(64)(layers.Dense(128, "gelu")(x)))
    model = keras.Model(inputs, layers.Dense(1)(layers.GlobalAveragePooling1D()(x)))
    model.compile("adam", "mse")
    return model


def many_variables() -> keras.Model:
    stack: list[Any] = [layers.Input((20,))]
    for _ in range(25):
        stack += [layers.Dense(16, "relu"), layers.BatchNormalization()]
    return _compiled([*stack, layers.Dense(1)], "mse")


def cases() -> list[Case]:
    generator = np.random.default_rng(0)

    def floats(*shape: int) -> np.ndarray:
        return generator.normal(size=shape).astype("float32")

    words = generator.integers(0, 1000, size=(16 * 30, 32)).astype("int32")
    digits = generator.integers(0, 10, size=32 * 40)
    return [
        Case("MLP 2x64, batch 32", mlp, floats(32 * 300, 20), floats(32 * 300, 1), 32),
        Case("CNN 28x28, batch 32", cnn, floats(32 * 40, 28, 28, 1), digits, 32),
        Case("LSTM 64, batch 32", lstm, floats(32 * 60, 32, 16), floats(32 * 60, 1), 32),
        Case("Transformer d=64, batch 16", transformer, words, floats(16 * 30, 1), 16),
        Case(
            "25 x Dense+BatchNorm, 302 arrays",
            many_variables,
            floats(32 * 150, 20),
            floats(32 * 150, 1),
            32,
        ),
    ]
