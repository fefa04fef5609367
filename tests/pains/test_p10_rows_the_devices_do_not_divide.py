"""Pain 10: a number of rows that the devices do not divide.

The example: keras#21167, where `fit`, `evaluate` and `predict` all die on it.
"""

import keras
import numpy as np
import pytest
from keras import distribution as kd
from keras import layers

import fitstep as fs
from fitstep._keras import _devices

pytestmark = pytest.mark.usefixtures("equal_programs_compiled_once")

RATE = 0.05
BATCH = 16
# float32 sums of up to 16 products in another order than NumPy's float64.
CLOSE = {"rtol": 1e-5, "atol": 1e-6}


def data_parallel(devices):
    return kd.DataParallel(devices=kd.list_devices()[:devices])


def linear():
    model = keras.Sequential([keras.Input((3,)), layers.Dense(1, name="dense")])
    model.compile(keras.optimizers.SGD(RATE), "mse", metrics=["mae"])
    return model


def table(rows):
    generator = np.random.default_rng(rows)
    x = generator.normal(size=(rows, 3)).astype("float32")
    return x, (x @ [[1.0], [-2.0], [0.5]] + 0.3).astype("float32")


def descent(weights, x, y, batch, epochs):
    """The history and the weights of gradient descent on the mean squared error, by NumPy."""
    kernel, bias = (weight.astype("float64") for weight in weights)
    history = []
    for _ in range(epochs):
        losses = []
        for start in range(0, len(x), batch):
            bx, by = x[start : start + batch], y[start : start + batch]
            error = bx @ kernel + bias - by
            losses += [float((error**2).mean())] * len(bx)
            kernel = kernel - RATE * 2 * bx.T @ error / len(bx)
            bias = bias - RATE * 2 * error.mean(axis=0)
        history.append(np.mean(losses))
    return history, [kernel, bias]


@pytest.mark.parametrize("devices", [4, 8])
@pytest.mark.parametrize("rows", [1, 3, 5, 30, 33, 70])
def test_every_row_counts_once_in_training_evaluation_and_prediction(rows, devices):
    """No row is dropped or counted twice, whatever the number of rows: NumPy says the same."""
    kd.set_distribution(data_parallel(devices))
    model = linear()
    x, y = table(rows)
    history, weights = descent(model.get_weights(), x, y, BATCH, epochs=2)
    ran = fs.fit(model, x, y, batch_size=BATCH, epochs=2, shuffle=False, verbose=0)
    np.testing.assert_allclose(ran.history["loss"], history, **CLOSE)
    for got, want in zip(model.get_weights(), weights, strict=True):
        np.testing.assert_allclose(got, want, **CLOSE)
    error = x @ weights[0] + weights[1] - y
    scores = fs.evaluate(model, x, y, batch_size=BATCH, verbose=0)
    np.testing.assert_allclose(scores, [(error**2).mean(), np.abs(error).mean()], **CLOSE)
    predicted = fs.predict(model, x, batch_size=BATCH, verbose=0)
    assert predicted.shape == (rows, 1)
    np.testing.assert_allclose(predicted, error + y, **CLOSE)


@pytest.mark.parametrize("batch", [1, 2, 7, 12, 64])
def test_every_size_of_batch_is_taken(batch):
    """Batches that the devices do not divide train as they are, also where all are such."""
    kd.set_distribution(data_parallel(8))
    model = linear()
    x, y = table(26)
    history, weights = descent(model.get_weights(), x, y, batch, epochs=1)
    ran = fs.fit(model, x, y, batch_size=batch, shuffle=False, verbose=0)
    np.testing.assert_allclose(ran.history["loss"], history, **CLOSE)
    predicted = fs.predict(model, x, batch_size=batch, verbose=0)
    np.testing.assert_allclose(predicted, x @ weights[0] + weights[1], **CLOSE)


class Uneven(keras.utils.PyDataset):
    """Batches of all sizes."""

    sizes = (8, 3, 1, 16, 5)

    def __init__(self, x, y):
        super().__init__()
        ends = np.cumsum(self.sizes)[:-1]
        self.parts = list(zip(np.split(x, ends), np.split(y, ends), strict=True))

    def __len__(self):
        return len(self.sizes)

    def __getitem__(self, index):
        return self.parts[index]


@pytest.mark.parametrize("kind", ["PyDataset", "generator"])
@pytest.mark.filterwarnings("ignore:.*is compiled once more")
def test_a_source_may_give_batches_of_any_size(kind):
    """A data set or a generator of uneven batches gives the steps that NumPy makes of them."""
    kd.set_distribution(data_parallel(4))
    model = linear()
    x, y = table(sum(Uneven.sizes))
    want = model.get_weights()
    for bx, by in Uneven(x, y).parts:
        _, want = descent(want, bx, by, len(bx), epochs=1)
    if kind == "PyDataset":
        fs.fit(model, Uneven(x, y), steps_per_epoch=5, shuffle=False, verbose=0)
    else:
        parts = Uneven(x, y).parts
        fs.fit(model, (part for part in parts), steps_per_epoch=5, shuffle=False, verbose=0)
    for got, expected in zip(model.get_weights(), want, strict=True):
        np.testing.assert_allclose(got, expected, **CLOSE)


@pytest.mark.parametrize("rows", [1, 3, 4, 33])
def test_single_batches_of_any_size(rows):
    """`train_on_batch`, `test_on_batch` and `predict_on_batch` take any number of rows."""
    kd.set_distribution(data_parallel(4))
    model = fs.Sequential([keras.Input((3,)), layers.Dense(1)])
    model.compile(keras.optimizers.SGD(RATE), "mse")
    x, y = table(rows)
    history, (kernel, bias) = descent(model.get_weights(), x, y, rows, epochs=1)
    np.testing.assert_allclose(model.train_on_batch(x, y), history[0], **CLOSE)
    predicted = x @ kernel + bias
    np.testing.assert_allclose(model.predict_on_batch(x), predicted, **CLOSE)
    np.testing.assert_allclose(model.test_on_batch(x, y), ((predicted - y) ** 2).mean(), **CLOSE)


@pytest.mark.parametrize("stacked", [False, True])
def test_rows_are_divided_where_they_can_be_and_else_whole_on_each_device(stacked):
    """32 rows go to four devices in parts of 8; 6 rows, or a number, to each of them whole."""
    kd.set_distribution(data_parallel(4))
    stack = (5,) if stacked else ()
    leaves = [np.zeros((*stack, *shape), "float32") for shape in [(32, 3), (6, 3), ()]]
    divided, whole, number = _devices.placed(leaves, stacked=stacked)
    assert {shard.data.shape for shard in divided.addressable_shards} == {(*stack, 8, 3)}
    assert {shard.data.shape for shard in whole.addressable_shards} == {(*stack, 6, 3)}
    assert whole.is_fully_replicated
    assert number.is_fully_replicated
    assert len(whole.sharding.device_set) == len(number.sharding.device_set) == 4
