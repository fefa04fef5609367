"""A change of the model's Python side between two runs takes effect; none costs a second trace."""

import gc
import queue
import random
import weakref

import jax
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
        self.number = np.float32(1)
        self.buffer = np.ones(3)
        self.flags = {"on"}
        self.traces = 0

    def call(self, x):
        self.traces += 1
        return self.dense(x)

    on_class = 1.0

    @property
    def computed(self):
        return 1.0

    @staticmethod
    def static():
        return 1.0

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        scale = self.plain * self._private * self.settings["scale"] * self.parts[0] * self.array
        scale = scale * self.number * self.buffer[1] * self.on_class * self.computed
        scale = scale * self.static() * (1.0 if "on" in self.flags else 5.0)
        return self.measure(y, y_pred) * scale


def _loss(model):
    return fs.evaluate(model, X, Y, verbose=0, return_dict=True)["loss"]


def _model():
    # A class of its own, for some of the tests change the class.
    model = type("Own", (Scaled,), {})()
    model.compile("sgd")
    model(X)
    return model


CHANGES = {
    "attribute": (lambda m: setattr(m, "plain", 5.0), 20.0),
    "private attribute": (lambda m: setattr(m, "_private", 5.0), 20.0),
    "entry of a dict": (lambda m: m.settings.__setitem__("scale", 5.0), 20.0),
    "entry of a list": (lambda m: m.parts.__setitem__(0, 5.0), 20.0),
    "another array": (lambda m: setattr(m, "array", np.full((), 5.0)), 20.0),
    "another number of NumPy": (lambda m: setattr(m, "number", np.float32(5)), 20.0),
    "a number of NumPy by one of Python": (lambda m: setattr(m, "number", 5.0), 20.0),
    "an array written to in place": (lambda m: m.buffer.__setitem__(1, 5.0), 20.0),
    "a set": (lambda m: m.flags.remove("on"), 20.0),
    "class attribute": (lambda m: setattr(type(m), "on_class", 5.0), 20.0),
    "property": (lambda m: setattr(type(m), "computed", property(lambda self: 5.0)), 20.0),
    "static method": (lambda m: setattr(type(m), "static", staticmethod(lambda: 5.0)), 20.0),
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


def test_nothing_is_traced_again_after_a_run_of_keras_s_own():
    """Stock `predict` and `evaluate` in between leave the programs of a plain model as they are."""
    model = _model()
    fs.fit(model, X, Y, verbose=0)
    model.predict(X, verbose=0)
    model.evaluate(X, Y, verbose=0)
    model.traces = 0
    fs.fit(model, X, Y, verbose=0)
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


class Factor:
    """An object of the user's own: an activation, a constraint, a part of a model."""

    on_class = 1.0

    def __init__(self):
        self.k = 1.0

    def __call__(self, x):
        return x * self.k * self.on_class


class Slotted:
    """One whose attributes are in slots."""

    __slots__ = ("k",)

    def __init__(self):
        self.k = 1.0


class Schedule(keras.optimizers.schedules.LearningRateSchedule):
    """A learning rate that an attribute sets."""

    def __init__(self):
        self.k = 0.0

    def __call__(self, step):
        return self.k


class Measured(keras.metrics.Mean):
    """A metric that an attribute scales."""

    def __init__(self):
        super().__init__(name="measured")
        self.k = 1.0

    def update_state(self, y, y_pred, sample_weight=None):
        super().update_state(y_pred * self.k)


class Deep(keras.Model):
    """A model whose numbers hang on objects of its layers, its optimizer and its metrics."""

    def __init__(self):
        super().__init__()
        self.activation, self.constraint, self.slotted = Factor(), Factor(), Slotted()
        self.dense = keras.layers.Dense(
            1,
            kernel_initializer="ones",
            activation=self.activation,
            kernel_regularizer=keras.regularizers.L2(0.0),
            kernel_constraint=self.constraint,
        )
        self.schedule, self.measured = Schedule(), Measured()
        self.compile(keras.optimizers.SGD(self.schedule), "mse", metrics=[self.measured])

    def call(self, x):
        return self.dense(x) * self.slotted.k


# What is changed, and loss, metric and kernel after a step: on ones, a kernel of ones gives 2.
BELOW = {
    "object of a layer": (lambda m: setattr(m.activation, "k", 2.0), (16.0, 4.0, 1.0)),
    "slot of an object": (lambda m: setattr(m.slotted, "k", 2.0), (16.0, 4.0, 1.0)),
    "class of an object": (lambda m: setattr(Factor, "on_class", 2.0), (16.0, 4.0, 2.0)),
    "regulariser": (lambda m: setattr(m.dense.kernel_regularizer, "l2", 1.0), (6.0, 2.0, 1.0)),
    "constraint": (lambda m: setattr(m.constraint, "k", 0.5), (4.0, 2.0, 0.5)),
    "schedule": (lambda m: setattr(m.schedule, "k", 0.25), (4.0, 2.0, 0.0)),
    "metric": (lambda m: setattr(m.measured, "k", 3.0), (4.0, 6.0, 1.0)),
    "dtype policy": (
        lambda m: setattr(m.dense, "dtype_policy", keras.DTypePolicy("mixed_bfloat16")),
        (4.0, 2.0, 1.0),
    ),
}


@pytest.mark.parametrize(("change", "expected"), BELOW.values(), ids=BELOW)
def test_a_change_below_a_layer_takes_effect(change, expected):
    """What hangs on a layer, the optimizer or a metric is the model's Python side, too."""
    model = Deep()
    fs.fit(model, X, Y, batch_size=8, verbose=0)
    before = fs.predict(model, X, verbose=0).dtype
    change(model)
    try:
        history = fs.fit(model, X, Y, batch_size=8, verbose=0).history
    finally:
        Factor.on_class = 1.0
    kernel = float(model.dense.kernel.value[0, 0])
    assert (history["loss"][0], history["measured"][0], kernel) == pytest.approx(expected)
    assert fs.predict(model, X, verbose=0).dtype == model(X).dtype
    assert before == np.float32


class Holder:
    """An object that only holds things."""


ODD = {
    "a list that grows": lambda m: m.memory.items.append(1.0),
    "a dict that grows": lambda m: m.memory.cache.__setitem__(len(m.memory.cache), 1.0),
    "a queue": lambda m: m.memory.queue.put(1.0),
    "a generator of numbers": lambda m: m.memory.random.random(),
}


@pytest.mark.parametrize("change", ODD.values(), ids=ODD)
def test_data_in_an_object_of_the_models_costs_no_trace(change):
    """A replay memory, a cache or a queue is data, which no program has baked in."""
    model = _model()
    model.memory = Holder()
    model.memory.items, model.memory.cache = [], {}
    model.memory.queue, model.memory.random = queue.Queue(), random.Random(1)
    fs.fit(model, X, Y, verbose=0)
    model.traces = 0
    for _ in range(3):
        change(model)
        fs.fit(model, X, Y, verbose=0)
    assert model.traces == 0


class Raising:
    """An object that cannot be looked at."""

    __slots__ = ("there",)

    def __getattr__(self, name):
        raise RuntimeError("not connected")


@jax.tree_util.register_pytree_node_class
class Unfilled:
    """A pytree that raises until it is filled."""

    def tree_flatten(self):
        raise RuntimeError("not loaded")

    @classmethod
    def tree_unflatten(cls, static, children):
        return cls()


def test_objects_that_cannot_be_looked_at_are_left_alone():
    """What raises when it is touched is no reason not to train."""
    model = _model()
    model.holder = Holder()  # Keras itself looks at what is set on a model
    model.holder.raising = Raising()
    model.unfilled, model.large = Unfilled(), list(range(100_000))
    gone = Holder()
    model.holder.proxy = weakref.proxy(gone)
    del gone
    fs.fit(model, X, Y, verbose=0)
    model.traces = 0
    fs.fit(model, X, Y, verbose=0)
    assert model.traces == 0


@pytest.mark.parametrize("where", ["model", "object"])
def test_what_a_dict_of_the_models_holds_keeps_nothing_alive(where):
    """Neither a key nor a text with attributes is held by what is remembered of the model."""

    class Text(str):
        __slots__ = ("owner",)

    model = _model()
    model.memory = Holder()
    owner = model if where == "model" else model.memory
    owner.by_thing = {model.fit: 1}
    owner.text = Text("a")
    owner.text.owner = model
    fs.fit(model, X, Y, verbose=0)
    reference = weakref.ref(model)
    del model, owner
    gc.collect()
    assert reference() is None
