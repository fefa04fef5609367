"""What the tests of failures share: models that count their own steps, and what a model must be afterwards."""

import jax
import keras
import numpy as np


class CountSteps(keras.layers.Layer):
    """Passes its input on, and counts the training steps it has seen in a variable."""

    def build(self, input_shape):
        """Make the counter."""
        self.count = self.add_weight(
            shape=(), dtype="int32", initializer="zeros", trainable=False, name="count"
        )

    def call(self, inputs, training=False):
        """Count one step when training."""
        if training:
            self.count.assign_add(1)
        return inputs


class FailAt(keras.layers.Layer):
    """Passes its input on; the running program calls back, and the `at`-th call raises."""

    def __init__(self, at=None, **kwargs):
        super().__init__(**kwargs)
        self.at, self.calls = at, 0

    def call(self, inputs):
        """Add nothing, by way of Python."""

        def zero(_):
            self.calls += 1
            if self.calls == self.at:
                raise RuntimeError("boom at run time")
            return np.zeros((), "float32")

        probe = jax.lax.stop_gradient(inputs.reshape(-1)[0])
        return inputs + jax.pure_callback(zero, jax.ShapeDtypeStruct((), np.float32), probe)


def counting_mlp(*extra, compile_kwargs=None, **layer_kwargs):
    """A small compiled network of dense layers that counts its steps."""
    model = keras.Sequential(
        [
            keras.Input((5,)),
            *extra,
            CountSteps(),
            keras.layers.Dense(8, activation="tanh"),
            keras.layers.Dense(1),
        ],
        **layer_kwargs,
    )
    model.compile(
        **{"optimizer": keras.optimizers.Adam(0.01), "loss": "mse", "metrics": ["mae"]}
        | (compile_kwargs or {})
    )
    return model


def count_of(model):
    """How many training steps the model's own counter has seen."""
    (layer,) = [i for i in model.layers if isinstance(i, CountSteps)]
    return int(np.asarray(layer.count.value))


def all_variables(model):
    """Every variable of a model, its optimizer's and its metrics' included, each once."""
    found = [*model.variables, *model.metrics_variables]
    if getattr(model, "optimizer", None) is not None:
        found += model.optimizer.variables
    return list({id(variable): variable for variable in found}.values())


def values_of(model):
    """Copies of the weights and of the optimizer's variables."""
    optimizer = model.optimizer.variables if model.optimizer is not None else []
    return [np.array(variable.value, copy=True) for variable in [*model.variables, *optimizer]]


def everything_of(model):
    """All variables, those of the metrics included, each with a copy of its value."""
    return [(variable, np.array(variable.value, copy=True)) for variable in all_variables(model)]


def assert_unchanged(before):
    """Every variable of `everything_of` still has the same bits."""
    for variable, value in before:
        np.testing.assert_array_equal(np.asarray(variable.value), value, variable.path)


def assert_same(got, expected):
    """The same bits, part by part."""
    assert len(got) == len(expected)
    for one, other in zip(got, expected, strict=True):
        np.testing.assert_array_equal(one, other)


def assert_close(got, expected, tolerance=2e-5):
    """Equal but for the rounding of two differently compiled programs."""
    assert len(got) == len(expected)
    for one, other in zip(got, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=tolerance, atol=tolerance)


def assert_alive(model):
    """Every variable holds a real array, concrete and not deleted."""
    for variable in all_variables(model):
        array = variable._value
        assert array is not None, f"{variable.path} is empty"
        assert not isinstance(array, jax.core.Tracer), f"{variable.path} holds a tracer"
        assert not (isinstance(array, jax.Array) and array.is_deleted()), variable.path
        np.asarray(array)


def batches(x, y, size):
    """The batches in order, as `shuffle=False` makes them."""
    return [(x[i : i + size], y[i : i + size]) for i in range(0, len(x), size)]


def trace_of(twin, x, y, size, epochs):
    """The values of a stock model before and after each update, one stock `train_on_batch` each."""
    values = [values_of(twin)]
    for _ in range(epochs):
        for batch in batches(x, y, size):
            twin.train_on_batch(*batch)
            values.append(values_of(twin))
    return values


def copy_values(model, twin):
    """Give a second model the weights and the optimizer's variables of the first."""
    model.optimizer.build(model.trainable_variables)
    twin.optimizer.build(twin.trainable_variables)
    for own, other in zip(
        [*twin.variables, *twin.optimizer.variables],
        [*model.variables, *model.optimizer.variables],
        strict=True,
    ):
        own.assign(np.array(other.value, copy=True))


def twin_of(model, make):
    """A second model made by `make` with the values of the first."""
    twin = make()
    copy_values(model, twin)
    return twin
