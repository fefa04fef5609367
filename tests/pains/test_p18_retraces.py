"""Pain 18: the user's Python runs at most twice for a batch shape, and never again for that shape.

The example: a last batch of another size makes one more program, not one every epoch.
"""

import jax
import keras
import numpy as np
import pandas as pd
import pytest
from jax import numpy as jnp
from keras import layers

import fitstep as fs

TWICE = 2  # DESIGN 1.4: once to learn the names of the logs, once for the program


class Counting(keras.Model):
    """The default steps, and a note of every time that Python runs one of them, by batch shape."""

    def __init__(self):
        super().__init__()
        self.hidden = layers.Dense(3, "tanh")
        self.drop = layers.Dropout(0.2)
        self.out = layers.Dense(1)
        self.runs = []

    def call(self, x, training=False):
        return self.out(self.drop(self.hidden(x), training=training))

    def train_step(self, state, data):
        COUNTS.append(("train", data[0].shape[0]))
        return super().train_step(state, data)

    def test_step(self, state, data):
        COUNTS.append(("test", data[0].shape[0]))
        return super().test_step(state, data)

    def predict_step(self, state, data):
        first = data[0] if isinstance(data, tuple) else data
        COUNTS.append(("predict", first.shape[0]))
        return super().predict_step(state, data)


COUNTS = []


@pytest.fixture
def model(rows):
    model = Counting()
    model(rows[0][:1])
    model.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"])
    COUNTS.clear()
    return model


def counted(mode):
    shapes = [shape for name, shape in COUNTS if name == mode]
    return {shape: shapes.count(shape) for shape in shapes}


def test_a_partial_batch_costs_one_more_trace_and_no_epoch_costs_any(rows, model):
    """Three epochs with a partial batch: two shapes, each traced at most twice, all in the first."""
    x, y = rows
    after = []
    note = keras.callbacks.LambdaCallback(
        on_epoch_end=lambda epoch, logs: after.append(len(COUNTS))
    )
    fs.fit(model, x, y, epochs=3, verbose=0, callbacks=[note])
    assert set(counted("train")) == {32, 6}
    assert max(counted("train").values()) <= TWICE
    assert after == [after[0]] * 3


def test_fits_evaluations_and_predictions_share_their_programs(rows, model):
    """A whole session again, in another order: the user's Python never runs again."""
    x, y = rows
    fs.fit(model, x, y, epochs=2, verbose=0, validation_data=(x, y))
    fs.evaluate(model, x, y, verbose=0)
    fs.predict(model, x, verbose=0)
    assert {name for name, _ in COUNTS} == {"train", "test", "predict"}
    for mode in ("train", "test", "predict"):
        assert set(counted(mode)) == {32, 6}
        assert max(counted(mode).values()) <= TWICE
    before = len(COUNTS)
    fs.predict(model, x, verbose=0)
    fs.evaluate(model, x, y, verbose=0, return_dict=True)
    fs.fit(model, x[:38], y[:38], verbose=0, validation_data=(x[38:], y[38:]))  # 32 and 6, then 32
    fs.fit(model, x[:64], y[:64], epochs=3, verbose=0, batch_size=32, steps_per_epoch=2)
    assert COUNTS[before:] == []


def test_writes_between_and_during_fits_cost_no_trace(rows, model):
    """`assign`, `set_weights`, a new learning rate, `restore`, from outside or from a callback: none."""
    x, y = rows
    fs.fit(model, x, y, verbose=0)
    fs.evaluate(model, x, y, verbose=0)
    before = len(COUNTS)
    kernel = model.hidden.kernel
    state = fs.capture(model)
    writes = [
        lambda: kernel.assign(np.ones(kernel.shape, "float32")),
        lambda: kernel.assign(
            jnp.ones(kernel.shape, "float64" if jax.config.jax_enable_x64 else None)
        ),
        lambda: model.optimizer.learning_rate.assign(jnp.asarray(0.5)),  # a weakly typed array
        lambda: setattr(model.optimizer, "learning_rate", 0.25),
        lambda: model.set_weights(model.get_weights()),
        lambda: model.optimizer.iterations.assign(7),
    ]
    # A state holds metrics too, which no callback may write: it is restored from outside only.
    for write in (*writes, lambda: fs.restore(model, state)):
        write()
        fs.fit(model, x, y, verbose=0)
    fs.evaluate(model, x, y, verbose=0)
    inside = iter(writes)
    callback = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: next(inside, int)()
    )
    fs.fit(model, x, y, epochs=3, verbose=0, callbacks=[callback])
    assert COUNTS[before:] == []


def test_new_data_of_equal_shape_costs_no_trace_whatever_holds_it(rows, model):
    """NumPy of another width, JAX arrays, a frame, a generator: the same program."""
    x, y = rows
    x, y = x[:64], y[:64]
    fs.fit(model, x, y, verbose=0, shuffle=False)
    before = len(COUNTS)

    def source():
        while True:
            yield x[:32].copy(), y[:32].copy()

    fs.fit(model, x * 2, y + 1, verbose=0)
    fs.fit(model, x.astype("float64"), y.astype("float64"), verbose=0)
    fs.fit(model, jnp.asarray(x), jnp.asarray(y), verbose=0)
    fs.fit(model, pd.DataFrame(x), pd.DataFrame(y), verbose=0)
    fs.fit(model, source(), steps_per_epoch=2, shuffle=False, verbose=0)
    assert COUNTS[before:] == []


def test_another_number_of_steps_an_execution_needs_no_more_than_the_two_runs(rows, model):
    """One step or several in a program: both are made of the same trace or one more."""
    x, y = rows
    x, y = x[:64], y[:64]
    fs.fit(model, x, y, batch_size=8, verbose=0, steps_per_execution=1)
    fs.fit(model, x, y, batch_size=8, verbose=0, steps_per_execution=3)
    fs.fit(model, x, y, batch_size=8, verbose=0)
    assert set(counted("train")) == {8}
    assert counted("train")[8] <= TWICE


def test_a_nested_evaluate_and_callbacks_that_watch_batches_cost_no_trace(rows, model):
    """Evaluating in a callback, and callbacks with batch hooks, use the programs that are there."""
    x, y = rows
    fs.fit(model, x, y, verbose=0, validation_data=(x, y))
    before = len(COUNTS)
    nested = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: fs.evaluate(model, x, y, verbose=0),
    )
    fs.fit(model, x, y, verbose=0, callbacks=[nested], validation_data=(x, y))
    assert COUNTS[before:] == []


def test_many_shapes_are_each_traced_once_and_come_back_for_nothing(rows, model):
    """Rows 8, 5, 3 and again 8, 5, 3: at most two runs each, in the first round."""
    x, y = rows

    def source():
        while True:
            for n in (8, 5, 3):
                yield x[:n], y[:n]

    with pytest.warns(UserWarning, match="compiled once more"):
        fs.fit(model, source(), steps_per_epoch=3, verbose=0, shuffle=False)
    before = len(COUNTS)
    fs.fit(model, source(), steps_per_epoch=6, epochs=2, verbose=0, shuffle=False)
    assert COUNTS[before:] == []
    assert set(counted("train")) == {8, 5, 3}
    assert max(counted("train").values()) <= TWICE


def test_compiling_anew_takes_effect_although_programs_are_kept(rows, model):
    """After `compile` with another loss the next `fit` and `evaluate` use it."""
    x, y = rows
    model.drop.rate = 0.0
    fs.fit(model, x, y, verbose=0)
    fs.evaluate(model, x, y, verbose=0)
    model.compile(keras.optimizers.SGD(0.0), "mae")
    error = np.abs(model.predict(x, verbose=0) - y).mean()
    history = fs.fit(model, x, y, verbose=0).history
    np.testing.assert_allclose(history["loss"], [error], rtol=1e-5)  # a float32 mean of 70
    np.testing.assert_allclose(fs.evaluate(model, x, y, verbose=0), error, rtol=1e-5)


def test_freezing_a_layer_between_fits_takes_effect(rows, model):
    """A layer frozen between two fits stands still, the other goes on, with one trace a shape at most."""
    x, y = rows
    fs.fit(model, x, y, verbose=0)
    COUNTS.clear()
    model.hidden.trainable = False
    frozen, free = np.array(model.hidden.kernel.value), np.array(model.out.kernel.value)
    fs.fit(model, x, y, epochs=2, verbose=0)
    np.testing.assert_array_equal(model.hidden.kernel.value, frozen)
    assert np.all(np.asarray(model.out.kernel.value) != free)
    assert max(counted("train").values()) <= TWICE


def test_one_trace_serves_one_step_and_many(rows, model):
    """First one step in an execution, then 16: the user's Python did not run again."""
    x, y = rows[0][:64], rows[1][:64]
    fs.fit(model, x, y, batch_size=4, steps_per_execution=1, verbose=0)
    listen = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: None)
    fs.fit(model, x, y, batch_size=4, verbose=0, callbacks=[listen])
    fs.fit(model, x, y, batch_size=4, verbose=0)
    assert counted("train")[4] <= TWICE
    assert {one.steps for one in fs.explain(model).programs} == {1, 16}
