"""A tracer that a step leaves behind is found at the end of the trace, by the name of its attribute."""

import collections
import functools

import jax
import keras
import numpy as np
import pytest
from jax import numpy as jnp

import fitstep as fs
from tests.pains.twins import assert_alive, assert_close, assert_unchanged, everything_of, values_of

FIT = {"batch_size": 35, "epochs": 2, "verbose": 0, "shuffle": False}


class Plain(list):
    """A list that Keras, which copies plain lists to track them, leaves as it is."""


class Box:
    """A plain object of the user's."""

    def __init__(self):
        self.kept = None
        self.queue = collections.deque()


class Keeper(keras.layers.Layer):
    """A layer that may keep what it sees."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.keep = lambda layer, value: None
        self.log = []
        self.seen = None

    def call(self, inputs):
        self.keep(self, inputs)
        return inputs


class Net(keras.Model):
    """The guide's step; `keep` does what a user does with a value of the step."""

    def __init__(self, keep=lambda model, value: None):
        super().__init__()
        self.keep = keep
        self.dense = keras.layers.Dense(4, name="dense")
        self.keeper = Keeper(name="keeper")
        self.head = keras.layers.Dense(1, name="head")
        self.last = None
        self.history_of_losses = []
        self.by_name = {}
        self.box = Box()
        self.ring = Plain()
        self.draw = keras.random.SeedGenerator(1)
        self.schedule = keras.optimizers.schedules.ExponentialDecay(0.05, 1, 1.0)
        self.pair = (Box(), Box())

    def call(self, inputs, training=False):
        return self.head(self.keeper(self.dense(inputs)))

    def train_step(self, state, data):
        tv, ntv, ov, mv = state
        x, y = data

        def objective(tv):
            y_pred, new_ntv = self.stateless_call(tv, ntv, x, training=True)
            return self.compute_loss(x, y, y_pred), new_ntv

        (loss, ntv), grads = jax.value_and_grad(objective, has_aux=True)(tv)
        self.keep(self, loss)
        tv, ov = self.optimizer.stateless_apply(ov, grads, tv)
        return {"objective": loss}, (tv, ntv, ov, mv)


def made(keep=lambda model, value: None):
    keras.utils.set_random_seed(3)
    model = Net(keep)
    model.compile(keras.optimizers.SGD(model.schedule), "mse")
    model(np.zeros((1, 5), "float32"))
    model.optimizer.build(model.trainable_variables)
    return model


def assert_found(model, x, y, name, verb=fs.fit):
    before = everything_of(model)
    arguments = (x,) if verb is fs.predict else (x, y)
    with pytest.raises(fs.FitstepError) as caught:
        verb(model, *arguments, batch_size=35, verbose=0)
    assert name in str(caught.value)
    assert_alive(model)
    assert_unchanged(before)


def on_layer(act):
    def keep(model, value):
        model.keeper.keep = act

    return keep


KEEPS = {
    "attribute": (lambda m, v: setattr(m, "last", v), "last"),
    "new attribute": (lambda m, v: setattr(m, "brand_new", v), "brand_new"),
    "private attribute": (lambda m, v: setattr(m, "_hidden_value", v), "_hidden_value"),
    "list": (lambda m, v: m.history_of_losses.append(v), "history_of_losses"),
    "dict": (lambda m, v: m.by_name.update({"loss": v}), "by_name"),
    "list in a dict": (lambda m, v: m.by_name.setdefault("all", []).append(v), "by_name"),
    "tuple": (lambda m, v: setattr(m, "last", (1, v)), "last"),
    "deep dict": (lambda m, v: m.by_name.update({"a": {"b": {"c": {"d": v}}}}), "by_name"),
    "deque": (lambda m, v: m.box.queue.append(v), "queue"),
    "state": (lambda m, v: setattr(m, "last", fs.State(v, v)), "last"),
    "closure": (lambda m, v: setattr(m, "last", lambda: v), "last"),
    "list within itself": (lambda m, v: (m.ring.append(m.ring), m.ring.append(v)), "ring"),
    "partial": (lambda m, v: setattr(m, "last", functools.partial(max, v)), "last"),
    "bound method": (lambda m, v: setattr(m.box, "kept", v.sum), "kept"),
    "seed generator": (lambda m, v: setattr(m.draw, "last", v), "draw.last"),
    "schedule": (lambda m, v: setattr(m.schedule, "last", v), "last"),
    "object": (lambda m, v: setattr(m.box, "kept", v), "kept"),
    "object in a tuple": (lambda m, v: setattr(m.pair[1], "kept", v), "pair"),
    "layer": (lambda m, v: setattr(m.dense, "seen", v), "seen"),
    "layer's list": (lambda m, v: m.keeper.log.append(v), "log"),
    "optimizer": (lambda m, v: setattr(m.optimizer, "last_loss", v), "last_loss"),
    "metric": (lambda m, v: setattr(m.metrics[0], "last_loss", v), "last_loss"),
    "class": (lambda m, v: setattr(type(m), "on_class", v), "on_class"),
}


@pytest.mark.parametrize("case", KEEPS)
def test_tracer_kept_by_a_step_is_named(rows, case):
    """A value of the step kept anywhere on the model is an error with the attribute's name; mended, it trains."""
    x, y = rows
    keep, name = KEEPS[case]
    model = made(keep)
    try:
        assert_found(model, x, y, name)
    finally:
        if case == "class" and "on_class" in vars(Net):
            del Net.on_class
    model.keep = lambda model, value: None
    twin = made()
    fs.fit(model, x, y, **FIT)
    twin.fit(x, y, **FIT)
    assert_close(values_of(model), values_of(twin))


IN_CALL = {
    "attribute": (lambda layer, v: setattr(layer, "seen", v), "seen"),
    "list": (lambda layer, v: layer.log.append(v), "log"),
    "new attribute": (lambda layer, v: setattr(layer, "attention", v), "attention"),
}


@pytest.mark.parametrize("verb", [fs.fit, fs.evaluate, fs.predict])
@pytest.mark.parametrize("case", IN_CALL)
def test_tracer_kept_by_a_layers_call_is_named_with_the_default_step(rows, case, verb):
    """A layer that keeps its input in `call` is found in `fit`, `evaluate` and `predict` of a stock model."""
    x, y = rows
    keeper = Keeper(name="keeper")
    model = keras.Sequential([keras.Input((5,)), keeper, keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    fs.evaluate(model, x, y, verbose=0)  # builds the metrics before the layer keeps anything
    model.make_test_function(force=True)
    keeper.keep, name = IN_CALL[case]
    model.compile("sgd", "mse")
    assert_found(model, x, y, name, verb)


def test_tracer_kept_in_compute_loss_of_fs_model_is_named(rows):
    """`fs.Model.train_on_batch` and `fit` find what `compute_loss` keeps."""
    x, y = rows

    class Own(fs.Model):
        def __init__(self):
            super().__init__()
            self.dense = keras.layers.Dense(1)

        def call(self, inputs):
            return self.dense(inputs)

        def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
            self.residual = y - y_pred
            return keras.ops.mean(self.residual**2)

    for verb in ("fit", "train_on_batch"):
        model = Own()
        model.compile("sgd")
        model(x)
        with pytest.raises(fs.FitstepError, match="residual"):
            getattr(model, verb)(x, y)
        assert_alive(model)


FINE = {
    "a number": lambda m, v: setattr(m, "last", 3.0),
    "a shape": lambda m, v: setattr(m, "last", jnp.zeros((2,)).shape),
    "a NumPy array": lambda m, v: m.history_of_losses.append(np.zeros(3)),
    "a tracer put away again": lambda m, v: (setattr(m, "last", v), setattr(m, "last", None)),
    "a list emptied again": lambda m, v: (
        m.history_of_losses.append(v),
        m.history_of_losses.clear(),
    ),
    "a function": lambda m, v: setattr(m, "last", lambda: 1),
    "an object that refers to itself": lambda m, v: setattr(m.box, "kept", m.box),
}


@pytest.mark.parametrize("case", FINE)
def test_what_is_no_tracer_may_be_kept(rows, case):
    """Numbers, shapes, arrays, and tracers that are gone when the trace ends, are no error."""
    x, y = rows
    model, twin = made(FINE[case]), made()
    fs.fit(model, x, y, **FIT)
    twin.fit(x, y, **FIT)
    assert_close(values_of(model), values_of(twin))


def test_tracer_of_another_thread_or_trace_is_no_false_alarm(rows):
    """Concrete device arrays kept on the model before the fit are left alone."""
    x, y = rows
    model = made()
    model.last = jnp.ones(3)
    model.by_name["array"] = jnp.ones(2)
    fs.fit(model, x, y, **FIT)
    np.testing.assert_array_equal(model.last, np.ones(3))
    assert_alive(model)


def test_eager_steps_may_keep_their_values(rows):
    """Under `run_eagerly` a kept value is a number or found by name; the model trains or is as before."""
    x, y = rows
    model = made(lambda m, v: setattr(m, "last", v))
    model.compile(keras.optimizers.SGD(0.05), "mse", run_eagerly=True)
    model.optimizer.build(model.trainable_variables)
    try:
        history = fs.fit(model, x, y, **FIT).history
    except fs.FitstepError as error:
        assert "last" in str(error)  # noqa: PT017 - either is right
    else:
        assert float(model.last) > 0
        assert np.isfinite(history["objective"]).all()
    assert_alive(model)
