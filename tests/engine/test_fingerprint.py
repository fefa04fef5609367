"""A change of the model's Python side between two runs takes effect; none costs a second trace."""

import keras
import numpy as np
import pytest

import fitstep as fs

X = np.ones((8, 2), "float32")
Y = np.zeros((8, 1), "float32")


class Scaled(keras.Model):
    """A model whose loss is scaled by whatever the test has put on it."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(1, kernel_initializer="ones")
        self.plain = 1.0
        self._private = 1.0
        self.settings = {"scale": 1.0}
        self.parts = [1.0]
        self.measure = keras.losses.MeanSquaredError()
        self.array = np.ones(())
        self.traces = 0

    def call(self, x):
        self.traces += 1
        return self.dense(x)

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        scale = self.plain * self._private * self.settings["scale"] * self.parts[0] * self.array
        return self.measure(y, y_pred) * scale


def _loss(model):
    return fs.evaluate(model, X, Y, verbose=0, return_dict=True)["loss"]


def _model():
    model = Scaled()
    model.compile("sgd")
    model(X)
    return model


CHANGES = {
    "attribute": (lambda m: setattr(m, "plain", 5.0), 20.0),
    "private attribute": (lambda m: setattr(m, "_private", 5.0), 20.0),
    "entry of a dict": (lambda m: m.settings.__setitem__("scale", 5.0), 20.0),
    "entry of a list": (lambda m: m.parts.__setitem__(0, 5.0), 20.0),
    "another array": (lambda m: setattr(m, "array", np.full((), 5.0)), 20.0),
    "another object": (lambda m: setattr(m, "measure", keras.losses.MeanAbsoluteError()), 2.0),
}


@pytest.mark.parametrize(("change", "expected"), CHANGES.values(), ids=CHANGES)
def test_what_was_baked_in_is_not_stale(change, expected):
    """The squared error is 4; five times that, or the absolute error, once the model has changed."""
    model = _model()
    assert _loss(model) == pytest.approx(4.0)
    change(model)
    assert _loss(model) == pytest.approx(expected)


def test_nothing_is_traced_again_without_a_change():
    """Fits, evaluations and predictions of the same shapes are traced once each."""
    model = _model()

    def all_three():
        fs.fit(model, X, Y, verbose=0, epochs=2, validation_data=(X, Y))
        fs.evaluate(model, X, Y, verbose=0)
        fs.predict(model, X, verbose=0)

    all_three()
    model.traces = 0
    all_three()
    assert model.traces == 0


def test_an_attribute_that_a_callback_sets_costs_no_trace_within_the_run():
    """Not even with a validation, which is a run within the run."""
    model = _model()
    note = keras.callbacks.LambdaCallback(
        on_epoch_begin=lambda epoch, logs: setattr(model, "epoch", epoch)
    )
    model.traces = 0
    fs.fit(model, X, Y, verbose=0, epochs=5, validation_data=(X, Y), callbacks=[note])
    assert model.traces == 2


def test_the_seed_of_a_later_run_reaches_the_step():
    """`state.key` follows `keras.utils.set_random_seed` without another trace."""

    class Drawing(Scaled):
        def train_step(self, state, data):
            logs, new = super().train_step(state, data)
            return {**logs, "seed": state.seed.astype("float32")}, new

    model = Drawing()
    model.compile("sgd")
    seeds = []
    for seed in (3, 4):
        keras.utils.set_random_seed(seed)
        seeds += fs.fit(model, X, Y, verbose=0).history["seed"]
    assert seeds == [3.0, 4.0]
