"""What the tests of sources share: small models, batches of rows, two runs held side by side."""

import warnings

import keras
import numpy as np
import pytest
from keras import layers

import fitstep as fs

BATCH = 32
# Both run the same step program; the last place may differ where XLA fuses another way.
CLOSE = {"rtol": 1e-6, "atol": 1e-7}


def dense():
    model = keras.Sequential([keras.Input((5,)), layers.Dense(3, "tanh"), layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.05, momentum=0.9), "mse", metrics=["mae"])
    return model


def lazy():
    model = keras.Sequential([layers.Dense(3, "tanh"), layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.05, momentum=0.9), "mse", metrics=["mae"])
    return model


def two_inputs():
    a, b = keras.Input((2,), name="a"), keras.Input((3,), name="b")
    both = layers.concatenate([layers.Dense(2)(a), layers.Dense(2)(b)])
    model = keras.Model({"a": a, "b": b}, layers.Dense(1)(both))
    model.compile(keras.optimizers.SGD(0.05), "mse")
    return model


def list_of_inputs():
    a, b = keras.Input((2,), name="a"), keras.Input((3,), name="b")
    model = keras.Model([a, b], layers.Dense(1)(layers.concatenate([a, b])))
    model.compile(keras.optimizers.SGD(0.05), "mse")
    return model


def two_outputs():
    x = keras.Input((5,))
    model = keras.Model(
        x,
        {
            "value": layers.Dense(1, name="value")(x),
            "sign": layers.Dense(1, "sigmoid", name="sign")(x),
        },
    )
    model.compile(
        keras.optimizers.SGD(0.05),
        {"value": "mse", "sign": "binary_crossentropy"},
        loss_weights={"value": 1.0, "sign": 0.3},
        metrics={"sign": ["accuracy"]},
    )
    return model


def embedding():
    model = keras.Sequential(
        [
            keras.Input((5,), dtype="int32"),
            layers.Embedding(7, 2),
            layers.Flatten(),
            layers.Dense(1),
        ]
    )
    model.compile(keras.optimizers.SGD(0.05), "mse")
    return model


class Items(keras.utils.PyDataset):
    """Batches of rows, and a count of what was asked for."""

    def __init__(self, x, y, **kwargs):
        super().__init__(**kwargs)
        self.x, self.y, self.asked, self.ended = x, y, [], 0

    def __len__(self):
        return (len(self.x) + BATCH - 1) // BATCH

    def __getitem__(self, index):
        self.asked.append(index)
        part = slice(index * BATCH, (index + 1) * BATCH)
        return self.x[part], self.y[part]

    def on_epoch_end(self):
        self.ended += 1


def endless(x, y, drawn=None):
    """Batches of 32, 32 and 6 rows for ever; notes in `drawn` what was drawn."""
    count = 0
    while True:
        for start in range(0, len(x), BATCH):
            if drawn is not None:
                drawn.append(count)
            count += 1
            yield x[start : start + BATCH], y[start : start + BATCH]


def equal_runs(build, source, **kwargs):
    """Fit twice from the same seed, by Keras and by fitstep, and hold the runs against each other."""
    results = []
    for train in (keras.Model.fit, fs.fit):
        keras.utils.set_random_seed(21)
        model = build()
        data = source()
        data = data if isinstance(data, tuple) else (data,)
        with warnings.catch_warnings():
            if train is not fs.fit:
                # Keras says so at the end of each epoch of a source of unknown length.
                warnings.filterwarnings("ignore", "Your input ran out of data")
            history = train(model, *data, shuffle=False, verbose=0, **kwargs)
        results.append((history.history, history.epoch, model))
    (stock, stock_epochs, stock_model), (ours, our_epochs, our_model) = results
    assert list(ours) == list(stock)
    assert our_epochs == stock_epochs
    for key, values in stock.items():
        np.testing.assert_allclose(ours[key], values, **CLOSE, err_msg=key)
    for got, want in zip(our_model.get_weights(), stock_model.get_weights(), strict=True):
        np.testing.assert_allclose(got, want, **CLOSE)
    return our_model


def untouched(model, action, kind, match):
    """The action fails as said, and the model and its optimizer are as they were, and train."""
    before = model.get_weights()
    with pytest.raises(kind, match=match) as caught:
        action(model)
    for got, want in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(got, want)
    assert int(model.optimizer.iterations) == 0
    return caught.value
