"""What the tests of `fs.steps` share: a small model, its batches, and the same steps by hand."""

import keras
import numpy as np
from keras import layers

import fitstep as fs
from tests.pains import twins

BATCH = 8
generator = np.random.default_rng(4)
X = generator.normal(size=(30, 3)).astype("float32")  # four batches, the last of 6 rows
Y = (X.sum(axis=1, keepdims=True) + 0.1 * generator.normal(size=(30, 1))).astype("float32")
PAIRS = twins.batches(X, Y, BATCH)


def plain():
    keras.utils.set_random_seed(5)
    model = keras.Sequential([keras.Input((3,)), layers.Dense(4, "tanh"), layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.05, momentum=0.9), "mse", metrics=["mae"])
    return model


def steps(model, data=(X, Y), **options):
    return fs.steps(model, data, **{"batch_size": BATCH, "shuffle": False} | options)


def numbers(logs):
    return {name: float(value) for name, value in logs.items()}


def running_means(batches, epochs):
    """Stock `train_on_batch`, and the mean over the rows since the epoch's start after each step."""
    model, found = plain(), []
    for _ in range(epochs):
        rows, logs = [], []
        for x, y in batches:
            logs.append(model.train_on_batch(x, y, return_dict=True))
            rows.append(len(x))
            found.append({n: np.average([log[n] for log in logs], weights=rows) for n in logs[0]})
    return found, model
