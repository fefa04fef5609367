"""The models that are timed: those of `fitstep bench`, and five more."""

from typing import Any, NamedTuple

import keras
import numpy as np
from keras import layers

from fitstep.cli._cases import Case, cases, sequential


class Bounds(NamedTuple):
    """What fitstep may take at most, as a ratio to stock `fit`."""

    case: Case
    over_stock: float


def mlp_of_30() -> keras.Model:
    hidden = [layers.Dense(64, "relu"), layers.Dense(64, "relu")]
    return sequential([layers.Input((30,)), *hidden, layers.Dense(1)], "mse")


def wide_mlp() -> keras.Model:
    hidden = [layers.Dense(256, "relu") for _ in range(3)]
    return sequential([layers.Input((64,)), *hidden, layers.Dense(1)], "mse")


def many_variables() -> keras.Model:
    stack: list[Any] = [layers.Input((20,))]
    for _ in range(20):
        stack += [layers.Dense(16, "relu"), layers.BatchNormalization()]
    return sequential([*stack, layers.Dense(1)], "mse")


def gru() -> keras.Model:
    return sequential([layers.Input((32, 16)), layers.GRU(32), layers.Dense(1)], "mse")


def bounded_cases() -> list[Bounds]:
    """All of them. An epoch is a multiple of 16 steps, and a third of a second at most."""
    generator = np.random.default_rng(1)

    def floats(*shape: int) -> np.ndarray:
        return generator.normal(size=shape).astype("float32")

    def case(name: str, build: Any, batch_size: int, steps: int, *features: int) -> Case:
        rows = batch_size * steps
        return Case(name, build, floats(rows, *features), floats(rows, 1), batch_size)

    mlp, cnn, lstm, transformer = cases()
    return [
        Bounds(mlp, 0.20),
        Bounds(case("MLP 30-64-64-1, batch 256", mlp_of_30, 256, 800, 30), 0.55),
        Bounds(case("MLP 3x256, batch 128", wide_mlp, 128, 320, 64), 0.90),
        Bounds(case("20 x Dense+BatchNorm, batch 32", many_variables, 32, 400, 20), 0.25),
        Bounds(cnn, 1.02),
        Bounds(lstm, 1.02),
        Bounds(case("GRU 32, batch 32", gru, 32, 320, 32, 16), 1.02),
        Bounds(transformer, 1.02),
    ]
