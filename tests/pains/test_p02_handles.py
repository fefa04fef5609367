"""Variables touched through handles, in a step, in a call or around it: right numbers or a named error."""

import types

import jax
import keras
import numpy as np
import pytest
from jax import numpy as jnp

import fitstep as fs
from tests.pains.twins import assert_alive, assert_close, assert_unchanged, everything_of, values_of

FIT = {"batch_size": 35, "epochs": 2, "verbose": 0, "shuffle": False}


class Guide(keras.Model):
    """A plain model with the step of the public guide, and hooks for what a user adds to it."""

    def __init__(self):
        super().__init__()
        self.hidden = keras.layers.Dense(4, activation="tanh", name="hidden")
        self.head = keras.layers.Dense(1, name="head")
        self.draws = keras.random.SeedGenerator(3)
        self.extra = keras.metrics.Mean(name="extra")
        self.counter = self.add_weight(
            shape=(), initializer="zeros", trainable=False, name="counter"
        )

    def call(self, inputs, training=False):
        return self.head(self.hidden(inputs))

    def in_step(self, x, y):
        """What a user does in the step, outside the gradient; returns more logs."""
        return {}

    def in_gradient(self, x, y):
        """What a user adds to the loss, inside `jax.grad`."""
        return 0.0

    def train_step(self, state, data):
        tv, ntv, ov, mv = state
        x, y = data
        logs = self.in_step(x, y)

        def objective(tv):
            y_pred, new_ntv = self.stateless_call(tv, ntv, x, training=True)
            return self.compute_loss(x, y, y_pred) + self.in_gradient(x, y), new_ntv

        (loss, _), grads = jax.value_and_grad(objective, has_aux=True)(tv)
        tv, ov = self.optimizer.stateless_apply(ov, grads, tv)
        return {"objective": loss} | logs, (tv, ntv, ov, mv)


def guide(in_step=None, in_gradient=None, optimizer=None):
    keras.utils.set_random_seed(11)
    model = Guide()
    if in_step is not None:
        model.in_step = types.MethodType(in_step, model)
    if in_gradient is not None:
        model.in_gradient = types.MethodType(in_gradient, model)
    model.compile(optimizer or keras.optimizers.SGD(0.1), "mse")
    model(np.zeros((1, 5), "float32"))
    model.optimizer.build(model.trainable_variables)
    return model


def by_hand(x, y, steps_per_epoch=2, epochs=2, rate=0.1):
    """The plain model's weights before each step and after the last, by NumPy in float64."""
    hidden, bias, head, last = (np.array(v.value, "float64") for v in guide().trainable_variables)
    size = len(x) // steps_per_epoch
    found = [(hidden, bias, head, last)]
    for step in range(steps_per_epoch * epochs):
        start = step % steps_per_epoch * size
        xs, ys = x[start : start + size].astype("float64"), y[start : start + size]
        inner = np.tanh(xs @ hidden + bias)
        error = 2.0 * (inner @ head + last - ys) / len(xs)
        back = (error @ head.T) * (1 - inner**2)
        hidden, bias = hidden - rate * xs.T @ back, bias - rate * back.sum(0)
        head, last = head - rate * inner.T @ error, last - rate * error.sum(0)
        found.append((hidden, bias, head, last))
    return found


def assert_weights_by_hand(model, x, y, **kwargs):
    expected = by_hand(x, y, **kwargs)[-1]
    for variable, value in zip(model.trainable_variables, expected, strict=True):
        # The hand loop sums in another order than XLA, in float32, over several steps.
        np.testing.assert_allclose(np.asarray(variable.value), value, rtol=1e-4, atol=1e-5)


# --- works: in the step ------------------------------------------------------------------------


@pytest.mark.parametrize("value", ["number", "traced"])
def test_metric_updated_in_the_step_counts_every_batch(rows, value):
    """`self.metric.update_state` in a stock step is kept, and read by `result` in the same step."""
    x, y = rows

    def in_step(self, x, y):
        self.extra.update_state(1.0 if value == "number" else jnp.mean(x))
        return {"extra": self.extra.result()}

    model = guide(in_step)
    history = fs.fit(model, x, y, **FIT).history
    np.testing.assert_allclose(
        history["extra"], [1.0, 1.0] if value == "number" else [x.mean()] * 2, rtol=1e-5
    )
    assert_weights_by_hand(model, x, y)
    assert_alive(model)


def test_metric_reset_in_the_step_keeps_the_last_batch(rows):
    """`reset_state` and `update_state` in one step leave that step's value alone."""
    x, y = rows

    def in_step(self, x, y):
        self.extra.reset_state()
        self.extra.update_state(jnp.mean(x))
        return {"extra": self.extra.result()}

    history = fs.fit(guide(in_step), x, y, **FIT).history
    np.testing.assert_allclose(history["extra"], [x[35:].mean()] * 2, rtol=1e-5)


def test_seed_generator_drawn_in_the_step_gives_its_stream(rows):
    """A seed generator used in a stock step draws the numbers that it draws outside, one new each step."""
    x, y = rows

    def in_step(self, x, y):
        return {"draw": keras.random.uniform((), seed=self.draws)}

    model = guide(in_step)
    history = fs.fit(model, x, y, **FIT).history
    outside = keras.random.SeedGenerator(3)
    draws = [float(keras.random.uniform((), seed=outside)) for _ in range(4)]
    np.testing.assert_allclose(history["draw"], [np.mean(draws[:2]), np.mean(draws[2:])], rtol=1e-6)
    np.testing.assert_array_equal(
        np.asarray(model.draws.state.value), np.asarray(outside.state.value)
    )


def test_iterations_and_learning_rate_read_in_the_step_are_todays(rows):
    """The optimizer's counter and rate, read through the optimizer, are those of each step."""
    x, y = rows

    def in_step(self, x, y):
        return {
            "iterations": keras.ops.cast(self.optimizer.iterations, "float32"),
            "rate": keras.ops.convert_to_tensor(self.optimizer.learning_rate),
        }

    class Halve(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            self.model.optimizer.learning_rate = 0.05

    history = fs.fit(guide(in_step), x, y, callbacks=[Halve()], **FIT).history
    np.testing.assert_allclose(history["iterations"], [0.5, 2.5])
    np.testing.assert_allclose(history["rate"], [0.1, 0.05])


def test_scheduled_learning_rate_read_in_the_step_follows_the_schedule(rows):
    """A schedule read through `optimizer.learning_rate` in a step is that of each step."""
    x, y = rows

    def in_step(self, x, y):
        return {"rate": self.optimizer.learning_rate}

    schedule = keras.optimizers.schedules.PolynomialDecay(0.1, 10, 0.0)
    model = guide(in_step, optimizer=keras.optimizers.SGD(schedule))
    history = fs.fit(model, x, y, **FIT).history
    np.testing.assert_allclose(history["rate"], [0.095, 0.075], rtol=1e-5)


def test_weights_read_in_the_step_are_those_before_the_update(rows):
    """A kernel read through a layer in the step is the one that the step starts from."""
    x, y = rows

    def in_step(self, x, y):
        return {"sum": keras.ops.sum(self.hidden.kernel), "out": jnp.mean(self(x))}

    history = fs.fit(guide(in_step), x, y, **FIT).history
    weights = by_hand(x, y)
    sums = [each[0].sum() for each in weights]
    outs = []
    for step in range(4):
        hidden, bias, head, last = weights[step]
        xs = x[step % 2 * 35 : step % 2 * 35 + 35]
        outs.append((np.tanh(xs @ hidden + bias) @ head + last).mean())
    for key, values in (("sum", sums), ("out", outs)):
        # As above: other orders of float32 sums.
        np.testing.assert_allclose(
            history[key], [np.mean(values[:2]), np.mean(values[2:4])], rtol=1e-4, atol=1e-4
        )


def test_own_counter_assigned_in_the_step_counts(rows):
    """`self.counter.assign_add(1)` in a stock step counts every step, or the error names it."""
    x, y = rows

    def in_step(self, x, y):
        self.counter.assign_add(1.0)
        return {}

    model = guide(in_step)
    before = everything_of(model)
    try:
        fs.fit(model, x, y, **FIT)
    except fs.StateError as error:
        assert "counter" in str(error)  # noqa: PT017 - either is right
        assert_unchanged(before)
    else:
        assert float(model.counter.value) == 4.0


def test_losses_of_layers_read_in_the_step_are_todays(rows):
    """A regulariser's loss read from `self.losses` in the step is that of each step's weights."""
    x, y = rows

    def in_step(self, x, y):
        return {"penalty": sum(self.losses)}

    model = guide(in_step)
    model.hidden.kernel_regularizer = keras.regularizers.L2(1.0)
    model.hidden.kernel.regularizer = model.hidden.kernel_regularizer
    start = [np.array(v.value) for v in model.trainable_variables]
    seen = []

    class See(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            seen.append(float(np.square(np.asarray(model.hidden.kernel.value)).sum()))

    history = fs.fit(model, x, y, callbacks=[See()], **FIT).history
    assert seen[0] == pytest.approx(float(np.square(start[0]).sum()), rel=1e-6)
    assert len(set(seen)) == 4
    np.testing.assert_allclose(
        history["penalty"], [np.mean(seen[:2]), np.mean(seen[2:])], rtol=1e-5
    )


# --- an error that names it: in the step -------------------------------------------------------


def assert_named_and_intact(model, x, y, name, remedy, where=None):
    """`fit` raises a StateError with the variable's name and a remedy; nothing has changed."""
    before = everything_of(model)
    with pytest.raises(fs.StateError) as caught:
        fs.fit(model, x, y, **FIT)
    assert name in str(caught.value)
    assert remedy in str(caught.value)
    if where is not None:  # the user's own line is in the traceback
        assert any(entry.name == where for entry in caught.traceback)
    assert_alive(model)
    assert_unchanged(before)
    for method in ("in_step", "in_gradient"):
        model.__dict__.pop(method, None)
    fs.fit(model, x, y, **FIT)
    assert_weights_by_hand(model, x, y)


@pytest.mark.parametrize(
    "term",
    [
        lambda self, x, y: jnp.sum(self.hidden.kernel.value**2),
        lambda self, x, y: keras.ops.sum(self.hidden.kernel**2),
        lambda self, x, y: jnp.mean((self(x) - y) ** 2),
        lambda self, x, y: jnp.mean(self.hidden(x)),
    ],
    ids=["value", "ops", "self", "layer"],
)
def test_weights_read_through_a_handle_inside_the_gradient_are_named(rows, term):
    """A weight that no gradient would reach is named, with what to write instead."""
    x, y = rows

    def in_gradient(self, x, y):
        return term(self, x, y)

    model = guide(in_gradient=in_gradient)
    assert_named_and_intact(model, x, y, "hidden/kernel", "stateless_call", "in_gradient")


def test_optimizer_applied_to_live_variables_in_the_step_is_named(rows):
    """`optimizer.apply` in a step that also returns weights is refused, with a variable's name."""
    x, y = rows

    def in_step(self, x, y):
        self.optimizer.apply([jnp.ones(v.shape) for v in self.trainable_variables])
        return {}

    assert_named_and_intact(guide(in_step), x, y, "kernel", "Do one of the two")


def test_weight_assigned_and_returned_with_other_values_is_named(rows):
    """A weight assigned in the step and returned with another value is refused by name."""
    x, y = rows

    def in_step(self, x, y):
        self.head.bias.assign(self.head.bias + 1.0)
        return {}

    assert_named_and_intact(guide(in_step), x, y, "head/bias", "Do one of the two")


def test_compiled_metrics_updated_and_returned_stale_are_named(rows):
    """`compute_metrics` beside returned old metric values is refused by the metric's name, or works."""
    x, y = rows

    def in_step(self, x, y):
        return self.compute_metrics(x, y, self(x))

    model = guide(in_step)
    model.compile(keras.optimizers.SGD(0.1), "mse", metrics=["mae"])
    before = values_of(model)
    try:
        history = fs.fit(model, x, y, **FIT).history
    except fs.StateError as error:
        assert "mae" in str(error)  # noqa: PT017 - either is right
        assert_close(values_of(model), before)
    else:
        outs = by_hand(x, y)[:2]
        errors = [
            np.abs(np.tanh(xs @ h + b) @ o + c - ys).mean()
            for (h, b, o, c), xs, ys in zip(outs, (x[:35], x[35:]), (y[:35], y[35:]), strict=True)
        ]
        # The hand loop sums in another order than XLA, in float32, over several steps.
        assert history["mae"][0] == pytest.approx(np.mean(errors), rel=1e-4)


@pytest.mark.parametrize(
    "read",
    [
        lambda self: float(self.hidden.kernel.value[0, 0]),
        lambda self: np.asarray(self.hidden.kernel),
        lambda self: self.hidden.get_weights(),
        lambda self: bool(self.hidden.kernel.value[0, 0] > 0),
    ],
    ids=["float", "asarray", "get_weights", "bool"],
)
def test_weight_turned_into_numbers_in_the_step_is_named(rows, read):
    """Where a step needs a weight's numbers while it is traced, the error names the weight."""
    x, y = rows

    def in_step(self, x, y):
        read(self)
        return {}

    model = guide(in_step)
    before = everything_of(model)
    with pytest.raises(Exception) as caught:
        fs.fit(model, x, y, **FIT)
    assert any(entry.name == "in_step" for entry in caught.traceback)
    text = str(caught.value) + "".join(getattr(caught.value, "__notes__", []))
    assert_alive(model)
    assert_unchanged(before)
    assert "hidden/kernel" in text


def test_unseeded_random_numbers_in_the_step_are_refused_with_the_remedy(rows):
    """Numbers drawn without a seed generator would be constants: the error says what to write."""
    x, y = rows

    def in_step(self, x, y):
        return {"noise": keras.random.uniform(())}

    model = guide(in_step)
    before = everything_of(model)
    with pytest.raises(ValueError, match="SeedGenerator"):
        fs.fit(model, x, y, **FIT)
    assert_unchanged(before)


def test_variable_created_in_the_step_is_refused_or_kept_out_of_the_trace(rows):
    """A layer made anew in a step raises a clear error, and no tracer stays behind."""
    x, y = rows

    def in_step(self, x, y):
        self.late = keras.layers.Dense(2, name="late")
        return {"late": jnp.mean(self.late(x))}

    model = guide(in_step)
    before = everything_of(model)
    with pytest.raises(Exception, match=r"late|variable") as caught:
        fs.fit(model, x, y, **FIT)
    assert any(entry.name == "in_step" for entry in caught.traceback) or "late" in str(caught.value)
    assert_unchanged(before)


# --- in `call` and in losses -------------------------------------------------------------------


def assert_metric_named(model, x, y, verb):
    model.reset_metrics()  # as the start of every epoch does
    before = everything_of(model)
    with pytest.raises(fs.StateError, match="level/total") as caught:
        verb(model, x, y, batch_size=35, verbose=0)
    assert "stateless" in str(caught.value)
    assert any(entry.name == "call" for entry in caught.traceback)
    assert_alive(model)
    assert_unchanged(before)


@pytest.mark.parametrize("verb", [fs.fit, fs.evaluate])
def test_metric_updated_in_a_layers_call_is_named(rows, verb):
    """A metric that a layer updates in `call`, whose update stock steps drop, is named; nothing changes."""
    x, y = rows

    class Watch(keras.layers.Layer):
        def __init__(self):
            super().__init__()
            self.level = keras.metrics.Mean(name="level")

        def call(self, inputs):
            self.level.update_state(keras.ops.mean(inputs))
            return inputs

    model = keras.Sequential([keras.Input((5,)), Watch(), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    assert_metric_named(model, x, y, verb)
    np.testing.assert_allclose(
        fs.predict(model, x, verbose=0), model.layers[1](x), rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize("verb", [fs.fit, fs.evaluate])
def test_metric_updated_in_the_models_call_is_named(rows, verb):
    """A metric that a subclass updates in its own `call` is named, and trains once it is moved."""
    x, y = rows

    class Net(keras.Model):
        moved = False

        def __init__(self):
            super().__init__()
            self.dense = keras.layers.Dense(1)
            self.level = keras.metrics.Mean(name="level")

        def call(self, inputs):
            if not self.moved:
                self.level.update_state(keras.ops.mean(inputs))
            return self.dense(inputs)

        def compute_metrics(self, x, y, y_pred, sample_weight=None):
            if self.moved:
                self.level.update_state(keras.ops.mean(x))
            return super().compute_metrics(x, y, y_pred, sample_weight)

    model = Net()
    model.compile("sgd", "mse")
    model(x)
    assert_metric_named(model, x, y, verb)
    model.moved = True
    history = fs.fit(model, x, y, **FIT).history
    np.testing.assert_allclose(history["level"], [x.mean()] * 2, rtol=1e-4, atol=1e-6)


def test_loss_that_reads_a_weight_has_its_gradient(rows):
    """A loss function that reads a layer's kernel through a handle trains as stock does."""
    x, y = rows

    def make():
        keras.utils.set_random_seed(5)
        model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(1)])
        layer = model.layers[0]

        def loss(y_true, y_pred):
            penalty = keras.ops.sum(keras.ops.square(layer.kernel))
            return keras.ops.mean(keras.ops.square(y_true - y_pred), axis=-1) + 0.5 * penalty

        model.compile(keras.optimizers.SGD(0.1), loss)
        return model

    model, rate = make(), 0.1
    kernel, bias = (np.array(v.value, "float64") for v in model.trainable_variables)
    for start in (0, 35):
        xs, ys = x[start : start + 35], y[start : start + 35]
        error = 2.0 * (xs @ kernel + bias - ys) / 35
        kernel, bias = kernel - rate * (xs.T @ error + kernel), bias - rate * error.sum(0)
    fs.fit(model, x, y, **(FIT | {"epochs": 1}))
    np.testing.assert_allclose(np.asarray(model.layers[0].kernel.value), kernel, rtol=1e-4)


def test_metric_function_that_reads_the_learning_rate_is_todays(rows):
    """The old trick of a metric that returns the learning rate shows each epoch's rate."""
    x, y = rows
    optimizer = keras.optimizers.SGD(0.1)

    def rate(y_true, y_pred):
        return keras.ops.convert_to_tensor(optimizer.learning_rate)

    model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(1)])
    model.compile(optimizer, "mse", metrics=[rate])
    schedule = keras.callbacks.LearningRateScheduler(lambda epoch: 0.1 / (epoch + 1))
    history = fs.fit(model, x, y, callbacks=[schedule], **(FIT | {"epochs": 3})).history
    np.testing.assert_allclose(history["rate"], [0.1, 0.05, 0.1 / 3], rtol=1e-5)
    np.testing.assert_allclose(history["learning_rate"], [0.1, 0.05, 0.1 / 3], rtol=1e-5)


def test_layer_that_reads_the_optimizers_counter_in_call_is_annealed(rows):
    """A layer that scales by `optimizer.iterations` sees each step's count, never a constant."""
    x, y = rows
    optimizer = keras.optimizers.SGD(0.1)

    class Anneal(keras.layers.Layer):
        def call(self, inputs):
            return inputs * (1.0 + keras.ops.cast(optimizer.iterations, "float32"))

    def make():
        keras.utils.set_random_seed(5)
        return keras.Sequential(
            [keras.Input((5,)), Anneal(), keras.layers.Dense(1, use_bias=False)]
        )

    model = make()
    model.compile(optimizer, "mse")
    kernel = np.array(model.layers[1].kernel.value, "float64")
    try:
        fs.fit(model, x * 0.1, y, **FIT)
    except fs.StateError as error:
        assert "iterations" in str(error)  # noqa: PT017 - either is right
        return
    for step in range(4):
        part = slice(step % 2 * 35, step % 2 * 35 + 35)
        xs, ys = 0.1 * x[part].astype("float64") * (1.0 + step), y[part]
        kernel = kernel - 0.1 * 2.0 * xs.T @ (xs @ kernel - ys) / 35
    np.testing.assert_allclose(np.asarray(model.layers[1].kernel.value), kernel, rtol=1e-4)


# --- handles kept outside ----------------------------------------------------------------------


def test_handles_kept_outside_the_callback_read_true_values(rows):
    """A kernel, the counter and the rate read in mid-epoch through plain variables are the true ones."""
    x, y = rows
    model = guide()
    kernel, optimizer = model.hidden.kernel, model.optimizer
    seen, counts = [], []

    class See(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            seen.append(np.array(kernel.value, copy=True))
            counts.append((int(optimizer.iterations.value), float(optimizer.learning_rate.value)))

    fs.fit(model, x, y, callbacks=[See()], **FIT)
    for got, expected in zip(seen, by_hand(x, y)[1:], strict=True):
        # The hand loop sums in another order than XLA, in float32, over several steps.
        np.testing.assert_allclose(got, expected[0], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(counts, [(1, 0.1), (2, 0.1), (3, 0.1), (4, 0.1)])


def test_data_source_that_reads_the_model_sees_true_weights(rows):
    """A generator that predicts with the model while it trains gets numbers, and newer ones each time."""
    x, y = rows
    model = guide()
    seen = []

    def data():
        while True:
            seen.append(float(np.mean(np.asarray(model(x[:35])))))
            yield x[:35], y[:35]

    fs.fit(model, data(), steps_per_epoch=8, verbose=0, shuffle=False)
    assert np.isfinite(seen).all()
    assert len(set(seen)) >= 6
    assert_weights_by_hand(model, x[:35], y[:35], steps_per_epoch=1, epochs=8)
    assert_alive(model)


def test_loss_tracker_read_by_a_handle_in_mid_epoch_is_the_running_mean(rows):
    """A metric object kept outside reads, after each batch, what the batch's logs say."""
    x, y = rows
    model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(1)])
    mae = keras.metrics.MeanAbsoluteError(name="mae")
    model.compile("sgd", "mse", metrics=[mae])
    seen = []

    class See(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            seen.append((float(mae.result()), float(logs["mae"])))

    fs.fit(model, x, y, callbacks=[See()], batch_size=14, verbose=0)
    assert len({one for one, _ in seen}) == 5
    for one, other in seen:
        assert one == pytest.approx(other, rel=1e-6)


def test_steps_of_evaluate_and_predict_may_touch_state(rows):
    """`test_step` that updates a metric and `predict_step` that draws a seed work through handles."""
    x, y = rows

    class Net(Guide):
        def test_step(self, state, data):
            tv, ntv, mv = state
            xs, _ = data
            self.extra.update_state(jnp.mean(xs))
            return {"extra": self.extra.result()}, (tv, ntv, mv)

        def predict_step(self, state, data):
            tv, ntv = state
            xs = data[0] if isinstance(data, tuple) else data
            y_pred, ntv = self.stateless_call(tv, ntv, xs)
            return y_pred + 0.0 * self.hidden.kernel.value.sum(), (ntv)

    model = Net()
    model.compile("sgd", "mse")
    result = fs.evaluate(model, x, y, batch_size=35, verbose=0, return_dict=True)
    assert result["extra"] == pytest.approx(float(x.mean()), rel=1e-5)
    np.testing.assert_allclose(fs.predict(model, x, verbose=0), model(x), rtol=1e-5, atol=1e-6)
    assert_alive(model)


def test_an_own_error_from_another_reaches_the_user_as_it_was_raised(rows):
    """What the user raises while a model is built is not exchanged for what it came from."""
    x, y = rows

    class Own(keras.Sequential):
        def compute_metrics(self, *args, **kwargs):
            try:
                return {}["nothing"]
            except KeyError as error:
                raise RuntimeError("my own error") from error

    model = Own([keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    with pytest.raises(RuntimeError, match="my own error"):
        fs.fit(model, x, y, verbose=0)
