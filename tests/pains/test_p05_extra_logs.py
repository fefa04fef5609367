"""Pain 5: numbers that a stock-contract step adds to its logs are means over the rows.

The example: keras#21314, where the history keeps the last batch's value, for all keys.
"""

from collections.abc import Callable

import jax
import keras
import numpy as np
import pytest
from jax import numpy as jnp
from keras import layers

import fitstep as fs

BATCH = 32  # the fixture's 70 rows make batches of 32, 32 and 6
# float32 sums of 70 numbers in another order than NumPy's float64: a few units of 6e-8.
CLOSE = {"rtol": 2e-6, "atol": 1e-7}


class GuideModel(keras.Model):
    """The step of Keras's guide; a subclass says what it adds to the logs."""

    def __init__(self):
        super().__init__()
        self.dense = layers.Dense(1)
        self.squares = keras.metrics.MeanSquaredError(name="squares")
        self.hits = keras.metrics.Mean(name="hits")
        self.found = keras.metrics.Mean(name="found")

    def call(self, x, training=False):
        return self.dense(x)

    def extra(self, x, y, y_pred, loss, metric):
        return {}

    def updated(self, metric_variables, x, y, y_pred, loss):
        """The metrics' new variables, and a function that gives a metric's value from them."""
        start, new, place = 0, [], {}
        for metric in self.metrics:
            old = metric_variables[start : start + len(metric.variables)]
            start += len(metric.variables)
            if metric.name == "loss":
                old = metric.stateless_update_state(old, loss)
            elif metric.name == "squares":
                old = metric.stateless_update_state(old, y, y_pred)
            elif metric.name == "hits":
                old = metric.stateless_update_state(old, jnp.ravel(y > 0))
            elif metric.name == "found":
                old = metric.stateless_update_state(old, jnp.ravel(y_pred > 0))
            place[metric.name] = (metric, old)
            new += old
        return new, lambda name: place[name][0].stateless_result(place[name][1])

    def objective_of(self, tv, ntv, x, y, training=False):
        y_pred, ntv = self.stateless_call(tv, ntv, x, training=training)
        return self.compute_loss(x, y, y_pred), (y_pred, ntv)

    def train_step(self, state, data):
        tv, ntv, ov, mv = state
        x, y = data
        gradient = jax.value_and_grad(self.objective_of, has_aux=True)
        (loss, (y_pred, ntv)), grads = gradient(tv, ntv, x, y, training=True)
        tv, ov = self.optimizer.stateless_apply(ov, grads, tv)
        mv, metric = self.updated(mv, x, y, y_pred, loss)
        logs = {"loss": metric("loss"), **self.extra(x, y, y_pred, loss, metric)}
        return logs, (tv, ntv, ov, mv)

    def test_step(self, state, data):
        tv, ntv, mv = state
        x, y = data
        loss, (y_pred, ntv) = self.objective_of(tv, ntv, x, y)
        mv, metric = self.updated(mv, x, y, y_pred, loss)
        return {"loss": metric("loss"), **self.extra(x, y, y_pred, loss, metric)}, (tv, ntv, mv)


def built(model, x, *, rate=0.05, **kwargs):
    model(x[:1])
    model.compile(keras.optimizers.SGD(rate), "mse", **kwargs)
    return model


def value_of(variables):
    return [variable.value for variable in variables]


def stepped_by_hand(model, batches, epochs=1):
    """The raw logs of the model's own step, driven by a plain loop: `[(rows, logs), ...]` each epoch."""
    step = jax.jit(model.train_step)
    model.optimizer.build(model.trainable_variables)
    state = tuple(
        value_of(variables)
        for variables in (
            model.trainable_variables,
            model.non_trainable_variables,
            model.optimizer.variables,
            model.metrics_variables,
        )
    )
    seen = []
    for _ in range(epochs):
        state = (*state[:3], [jnp.zeros_like(value) for value in state[3]])
        logged = []
        for x, y in batches:
            logs, state = step(state, (x, y))
            logged.append((len(x), {key: np.asarray(value) for key, value in logs.items()}))
        seen.append(logged)
    return seen


ORACLES = {}


def oracle_of(kind, x, y):
    """Two epochs of a model's step by hand, once for all tests: they all have the same rows."""
    if kind not in ORACLES:
        keras.utils.set_random_seed(3)
        ORACLES[kind] = stepped_by_hand(built(kind(), x), in_batches(x, y), epochs=2)
    return ORACLES[kind]


def in_batches(x, y):
    return [(x[i : i + BATCH], y[i : i + BATCH]) for i in range(0, len(x), BATCH)]


def mean_by_rows(logged, key):
    rows = sum(n for n, _ in logged)
    return sum(n * float(logs[key]) for n, logs in logged) / rows


class Numbers(GuideModel):
    """A mean of the data, a number that depends on the weights, a whole number, a truth value."""

    def extra(self, x, y, y_pred, loss, metric):
        return {
            "x_mean": jnp.mean(x),
            "batch_loss": loss * 2.0,
            "positive": jnp.sum(y > 0),
            "large": jnp.max(y) > 3.0,
        }


WAYS = {
    "compiled": ({}, {}),
    "eager": ({"run_eagerly": True}, {}),
    "no jit": ({"jit_compile": False}, {}),
    "three steps an execution": ({"steps_per_execution": 3}, {}),
    "three steps asked of fit": ({}, {"steps_per_execution": 3}),
}


@pytest.mark.parametrize("way", WAYS)
def test_extra_numbers_are_averaged_over_the_epoch_by_rows(rows, way):
    """In every way to run a step, each epoch's history has the mean over rows, partial batch and all."""
    x, y = rows
    compiled, fitted = WAYS[way]
    oracle = oracle_of(Numbers, x, y)
    keras.utils.set_random_seed(3)
    model = built(Numbers(), x, **compiled)
    history = fs.fit(model, x, y, batch_size=BATCH, epochs=2, shuffle=False, verbose=0, **fitted)
    assert set(history.history) == {"loss", "x_mean", "batch_loss", "positive", "large"}
    for key in ("x_mean", "batch_loss", "positive", "large"):
        expected = [mean_by_rows(logged, key) for logged in oracle]
        np.testing.assert_allclose(history.history[key], expected, **CLOSE)
    # `loss` is a metric of the guide's step: its own value at the end of each epoch.
    np.testing.assert_allclose(
        history.history["loss"], [logged[-1][1]["loss"] for logged in oracle], **CLOSE
    )
    assert history.history["x_mean"][0] == pytest.approx(x.mean(), rel=1e-4)  # by arithmetic


@pytest.mark.parametrize("way", ["compiled", "eager", "three steps an execution"])
def test_evaluate_averages_extra_numbers_by_rows(rows, way):
    """`evaluate` gives the mean over the rows for what `test_step` adds, in every way to run it."""
    x, y = rows
    compiled, asked = WAYS[way]
    model = built(Numbers(), x, **compiled)
    got = fs.evaluate(model, x, y, batch_size=BATCH, verbose=0, return_dict=True, **asked)
    kernel, bias = model.get_weights()[:2]
    losses = [float(np.mean((bx @ kernel + bias - by) ** 2)) for bx, by in in_batches(x, y)]
    counts = [len(bx) for bx, _ in in_batches(x, y)]
    positive = [int((by > 0).sum()) for _, by in in_batches(x, y)]
    large = [by.max() > 3.0 for _, by in in_batches(x, y)]
    assert got["x_mean"] == pytest.approx(
        np.average([bx.mean() for bx, _ in in_batches(x, y)], weights=counts), rel=1e-4
    )
    np.testing.assert_allclose(got["batch_loss"], 2 * np.average(losses, weights=counts), **CLOSE)
    np.testing.assert_allclose(got["positive"], np.average(positive, weights=counts), **CLOSE)
    np.testing.assert_allclose(got["large"], np.average(large, weights=counts), **CLOSE)


def test_validation_logs_are_averaged_by_rows(rows):
    """`val_` keys are the means over the validation rows, each epoch anew."""
    x, y = rows
    model = built(Numbers(), x, rate=0.0)  # weights stand still: one NumPy value serves all epochs
    history = fs.fit(
        model, x[:40], y[:40], batch_size=16, epochs=3, verbose=0,
        validation_data=(x[40:], y[40:]), validation_batch_size=20,
    ).history  # fmt: skip
    kernel, bias = model.get_weights()[:2]
    parts = [(x[40:60], y[40:60]), (x[60:], y[60:])]
    losses = [2 * float(np.mean((bx @ kernel + bias - by) ** 2)) for bx, by in parts]
    np.testing.assert_allclose(
        history["val_batch_loss"], [np.average(losses, weights=[20, 10])] * 3, **CLOSE
    )
    positive = [int((by > 0).sum()) for _, by in parts]
    np.testing.assert_allclose(
        history["val_positive"], [np.average(positive, weights=[20, 10])] * 3, **CLOSE
    )


@pytest.mark.filterwarnings("ignore:.*is compiled once more")  # for the third size
def test_a_number_of_a_generator_with_batches_of_all_sizes_is_weighted_by_their_rows(rows):
    """Batches of 3, 40 and 9 rows weigh 3, 40 and 9; the rest of an infinite source doesn't count."""
    x, y = rows

    def source():
        while True:
            for start, stop in ((0, 3), (3, 43), (43, 52)):
                yield x[start:stop], y[start:stop]

    model = built(Numbers(), x)
    history = fs.fit(model, source(), steps_per_epoch=3, epochs=2, shuffle=False, verbose=0).history
    expected = np.average([x[:3].mean(), x[3:43].mean(), x[43:52].mean()], weights=[3, 40, 9])
    np.testing.assert_allclose(history["x_mean"], [expected] * 2, rtol=1e-5)
    expected = np.average(
        [(y[a:b] > 0).sum() for a, b in ((0, 3), (3, 43), (43, 52))], weights=[3, 40, 9]
    )
    np.testing.assert_allclose(history["positive"], [expected] * 2, **CLOSE)


class FromMetrics(GuideModel):
    """Logs that are functions of metrics, in all the ways one writes them."""

    def extra(self, x, y, y_pred, loss, metric):
        precision, recall = metric("hits"), metric("found")

        @jax.jit
        def nested(a, b):
            return 2 * a * b / (a + b)

        return {
            "renamed": metric("squares"),
            "rmse": jnp.sqrt(metric("squares")),
            "harmonic": 2 * precision * recall / (precision + recall),
            "nested": nested(precision, recall),
            "branched": jax.lax.cond(recall > 2.0, lambda v: v, lambda v: v + 1.0, recall),
            "looped": jax.lax.fori_loop(0, 3, lambda _, total: total + recall, 0.0),
            "checkpointed": jax.checkpoint(jnp.square)(recall),
            "vmapped": jax.vmap(lambda v: v * 2.0)(recall[None])[0],
        }


@pytest.mark.parametrize("way", ["compiled", "eager", "three steps an execution"])
def test_logs_made_from_metrics_keep_the_metrics_value(rows, way):
    """Renamed, sqrt of one, F1 of two, in a nested jit, a branch, a loop: the value at the epoch's end."""
    x, y = rows
    compiled, fitted = WAYS[way]
    oracle = oracle_of(FromMetrics, x, y)
    keras.utils.set_random_seed(3)
    model = built(FromMetrics(), x, **compiled)
    history = fs.fit(model, x, y, batch_size=BATCH, epochs=2, shuffle=False, verbose=0, **fitted)
    expected = {key: [logged[-1][1][key] for logged in oracle] for key in oracle[0][0][1]}
    wrong = {
        key: (history.history[key], values)
        for key, values in expected.items()
        if not np.allclose(history.history[key], values, **CLOSE)
    }
    assert not wrong


def test_evaluate_keeps_the_value_of_logs_made_from_metrics(rows):
    """RMSE and F1 of `evaluate` are those of all rows, not means of running values."""
    x, y = rows
    model = built(FromMetrics(), x)
    got = fs.evaluate(model, x, y, batch_size=BATCH, verbose=0, return_dict=True)
    kernel, bias = model.get_weights()[:2]
    predicted = x @ kernel + bias
    np.testing.assert_allclose(got["rmse"], np.sqrt(np.mean((predicted - y) ** 2)), **CLOSE)
    hits, found = (y > 0).mean(), (predicted > 0).mean()
    np.testing.assert_allclose(got["harmonic"], 2 * hits * found / (hits + found), **CLOSE)
    np.testing.assert_allclose(got["nested"], got["harmonic"], **CLOSE)


class Wrapped(GuideModel):
    """Updates its metrics and reads them within one call, which `wrap` puts into something."""

    wrap: Callable

    def train_step(self, state, data):
        tv, ntv, ov, mv = state
        x, y = data
        gradient = jax.value_and_grad(self.objective_of, has_aux=True)
        (loss, (y_pred, ntv)), grads = gradient(tv, ntv, x, y, training=True)
        tv, ov = self.optimizer.stateless_apply(ov, grads, tv)

        def measured(mv):
            mv, metric = self.updated(mv, x, y, y_pred, loss)
            return mv, {"loss": metric("loss"), "rmse": jnp.sqrt(metric("squares"))}

        mv, logs = self.wrap(measured, list(mv))
        return {**logs, "x_mean": jnp.mean(x)}, (tv, ntv, ov, mv)


WRAPS = {
    "jit": lambda measured, mv: jax.jit(measured)(mv),
    "checkpoint": lambda measured, mv: jax.checkpoint(measured)(mv),
}


@pytest.mark.parametrize("wrap", WRAPS)
def test_metrics_updated_and_read_inside_another_program_keep_their_value(rows, wrap):
    """A metric whose update and value both come out of a jit or a checkpoint."""
    x, y = rows
    kind = type("Inside", (Wrapped,), {"wrap": staticmethod(WRAPS[wrap])})
    keras.utils.set_random_seed(3)
    oracle = stepped_by_hand(built(kind(), x), in_batches(x, y))[0]
    keras.utils.set_random_seed(3)
    model = built(kind(), x)
    history = fs.fit(model, x, y, batch_size=BATCH, shuffle=False, verbose=0).history
    np.testing.assert_allclose(history["loss"], [oracle[-1][1]["loss"]], **CLOSE)
    np.testing.assert_allclose(history["rmse"], [oracle[-1][1]["rmse"]], **CLOSE)
    np.testing.assert_allclose(history["x_mean"], [mean_by_rows(oracle, "x_mean")], **CLOSE)


class Varying(GuideModel):
    """A log that only batches of some size have, as a deviation that one row doesn't have."""

    def extra(self, x, y, y_pred, loss, metric):
        return {"x_mean": jnp.mean(x), **({"y_std": jnp.std(y)} if len(x) == BATCH else {})}


@pytest.mark.parametrize("way", ["compiled", "eager"])
def test_a_log_that_only_some_batches_have_harms_no_other(rows, way):
    """The mean of the others is over all rows, and of this one over the rows that have it."""
    x, y = rows
    model = built(Varying(), x, **WAYS[way][0])
    history = fs.fit(model, x, y, batch_size=BATCH, epochs=2, shuffle=False, verbose=0).history
    parts = in_batches(x, y)
    expected = np.average([bx.mean() for bx, _ in parts], weights=[32, 32, 6])
    np.testing.assert_allclose(history["x_mean"], [expected] * 2, rtol=1e-5)
    if "y_std" in history:  # the logs of the last batch don't have it
        np.testing.assert_allclose(
            history["y_std"], [np.mean([by.std() for _, by in parts[:2]])] * 2, rtol=1e-5
        )


class FreshMetric(GuideModel):
    """The value of a metric on this batch alone, and one of the metric's value before the batch."""

    def extra(self, x, y, y_pred, loss, metric):
        fresh = [jnp.zeros(v.shape, v.dtype) for v in self.squares.variables]
        return {
            "this_batch": self.squares.stateless_result(
                self.squares.stateless_update_state(fresh, y, y_pred)
            )
        }


def test_a_metric_used_as_a_function_of_one_batch_is_averaged(rows):
    """A metric updated from zeros in each step is a number of the batch: its mean is the whole's."""
    x, y = rows
    model = built(FreshMetric(), x, rate=0.0)
    history = fs.fit(model, x, y, batch_size=BATCH, verbose=0).history
    kernel, bias = model.get_weights()[:2]
    np.testing.assert_allclose(
        history["this_batch"], [np.mean((x @ kernel + bias - y) ** 2)], **CLOSE
    )


class Halves(GuideModel):
    """Numbers in half precision and plain Python numbers."""

    def extra(self, x, y, y_pred, loss, metric):
        return {
            "half": jnp.asarray(0.1, "bfloat16") + jnp.mean(x).astype("bfloat16"),
            "constant": 0.25,
            "count": 3,
        }


def test_half_precision_numbers_are_averaged_in_float32_and_python_numbers_are_taken(rows):
    """The mean of bfloat16 numbers over 35 batches is right to float32; constants stay constants."""
    x, y = rows
    model = built(Halves(), x)
    history = fs.fit(model, x, y, batch_size=2, shuffle=False, verbose=0).history
    halves = [
        float(jnp.asarray(0.1, "bfloat16") + jnp.mean(x[i : i + 2]).astype("bfloat16"))
        for i in range(0, 70, 2)
    ]
    # one unit in the last place of a bfloat16 input is 2^-8 of it, random over 35 batches; a sum
    # kept in bfloat16 would be off by more than 1 %.
    np.testing.assert_allclose(history["half"], [np.mean(halves)], rtol=2e-3)
    np.testing.assert_allclose(history["constant"], [0.25], **CLOSE)
    np.testing.assert_allclose(history["count"], [3], **CLOSE)


class Vector(GuideModel):
    def extra(self, x, y, y_pred, loss, metric):
        return {"profile": jnp.mean(x, axis=0)}


def test_a_vector_among_the_extra_logs_is_an_error_that_names_it_and_leaves_the_model(rows):
    """What is no number has no place in a history: the key is named, no weight moves."""
    x, y = rows
    model = built(Vector(), x)
    before = model.get_weights()
    with pytest.raises((fs.StateError, fs.DataError, ValueError), match="profile"):
        fs.fit(model, x, y, verbose=0)
    for old, new in zip(before, model.get_weights(), strict=True):
        np.testing.assert_array_equal(old, new)
    assert int(model.optimizer.iterations) == 0


class PerClass(keras.Model):
    """The default steps, and a metric whose value is a vector, computed by the step itself."""

    def __init__(self):
        super().__init__()
        self.dense = layers.Dense(3, activation="softmax")
        self.f1 = keras.metrics.F1Score(average=None, name="f1")

    def call(self, x, training=False):
        return self.dense(x)

    def test_step(self, state, data):
        tv, ntv, mv = state
        x, y = data
        y_pred, ntv = self.stateless_call(tv, ntv, x)
        old = mv[-len(self.f1.variables) :]
        new = self.f1.stateless_update_state(old, y, y_pred)
        return {"by_class": self.f1.stateless_result(new)}, (tv, ntv, [*mv[: -len(new)], *new])


def test_a_metric_may_give_a_vector(rows):
    """A log that comes from a metric may have any shape, and is the metric's value over all rows."""
    x, _ = rows
    y = np.eye(3, dtype="float32")[np.arange(70) % 3]
    model = PerClass()
    model(x[:1])
    model.compile("sgd", "categorical_crossentropy")
    model.f1.update_state(y[:2], y[:2])  # builds the metric's variables
    model.f1.reset_state()
    got = fs.evaluate(model, x, y, batch_size=BATCH, verbose=0, return_dict=True)
    said, truth = np.argmax(model.predict(x, verbose=0), axis=1), np.argmax(y, axis=1)
    expected = [
        2 * ((said == k) & (truth == k)).sum() / max(1, (said == k).sum() + (truth == k).sum())
        for k in range(3)
    ]
    np.testing.assert_allclose(got["by_class"], expected, rtol=1e-5, atol=1e-6)


def test_a_nested_evaluate_does_not_disturb_the_running_means(rows):
    """A callback that evaluates the same model in mid-epoch changes no training number."""
    x, y = rows
    inner = []

    def nested(batch, logs):
        inner.append(fs.evaluate(model, x[:9], y[:9], batch_size=4, verbose=0, return_dict=True))

    histories = []
    for callbacks in ([], [keras.callbacks.LambdaCallback(on_train_batch_end=nested)]):
        keras.utils.set_random_seed(3)
        model = built(Numbers(), x)
        histories.append(
            fs.fit(
                model, x, y, batch_size=BATCH, epochs=2, shuffle=False, verbose=0,
                callbacks=callbacks,
            ).history
        )  # fmt: skip
    assert len(inner) == 6
    assert inner[0]["positive"] == pytest.approx(
        np.average([(y[0:4] > 0).sum(), (y[4:8] > 0).sum(), (y[8:9] > 0).sum()], weights=[4, 4, 1])
    )
    for key, values in histories[0].items():
        np.testing.assert_allclose(histories[1][key], values, **CLOSE, err_msg=key)


def test_callbacks_hear_the_epochs_mean_and_evaluate_lists_it_in_keras_order(rows):
    """`on_epoch_end` gets what the history gets; the list of `evaluate` has the order Keras gives."""
    x, y = rows
    heard = []
    keep = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: heard.append(dict(logs)))
    model = built(Numbers(), x)
    history = fs.fit(
        model, x, y, batch_size=BATCH, epochs=2, verbose=0, callbacks=[keep],
        validation_data=(x[:7], y[:7]),
    ).history  # fmt: skip
    assert heard == [{key: values[i] for key, values in history.items()} for i in range(2)]
    # In one batch of all rows the last value is the mean: there stock Keras is right.
    stock = model.evaluate(x, y, batch_size=70, verbose=0)
    ours = fs.evaluate(model, x, y, batch_size=70, verbose=0)
    np.testing.assert_allclose(ours, stock, **CLOSE)


@pytest.mark.parametrize("how", [{}, {"run_eagerly": True}])
def test_a_number_of_the_batch_alone_is_averaged_too(how):
    """The rows of a batch, whatever their type: 16, 16, 16 and 2 weigh as many rows each."""

    class Counting(keras.Sequential):
        def train_step(self, state, data):
            n = data[0].shape[0]
            return {"a": n, "b": float(n), "c": np.float32(n), "d": jnp.float32(n)}, state

        test_step = train_step

    model = Counting([keras.layers.Dense(1)])
    model.compile("sgd", "mse", **how)
    x = np.ones((50, 2), "float32")
    expected = (3 * 16 * 16 + 2 * 2) / 50
    history = fs.fit(model, x, x[:, :1], batch_size=16, verbose=0).history
    assert {name: values[0] for name, values in history.items()} == pytest.approx(
        dict.fromkeys("abcd", expected)
    )
    logs = fs.evaluate(model, x, x[:, :1], batch_size=16, verbose=0, return_dict=True)
    assert logs == pytest.approx(dict.fromkeys("abcd", expected))


def test_an_infinite_number_stays_what_it_is():
    """A log that is the same in every batch is its own mean, also where arithmetic would lose it."""

    class Clipping(keras.Sequential):
        def train_step(self, state, data):
            logs, state = super().train_step(state, data)
            return {**logs, "clip": float("inf")}, state

    model = Clipping([keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    history = fs.fit(model, np.ones((50, 2)), np.ones((50, 1)), batch_size=16, verbose=0).history
    assert history["clip"] == [float("inf")]


@pytest.mark.parametrize("way", [{}, {"run_eagerly": True}], ids=["compiled", "eager"])
@pytest.mark.parametrize(
    ("numbers", "mean"),
    [
        ([np.inf, 1, 1, 1], np.inf),
        ([1, -np.inf, 1, 1], -np.inf),
        ([1, np.inf, -np.inf, 1], np.nan),
        ([1, np.nan, np.inf, 1], np.nan),
    ],
)
def test_the_mean_of_numbers_with_an_infinity_is_that_of_numpy(numbers, mean, way):
    """One infinite batch makes the epoch's mean infinite, two of opposite signs make it NaN."""

    class Reports(keras.Sequential):
        def train_step(self, state, data):
            logs, state = super().train_step(state, data)
            return {**logs, "number": data[0][0, 0]}, state

    model = Reports([keras.layers.Dense(1)])
    model.compile("sgd", "mse", **way)
    x = np.repeat(np.asarray(numbers, "float32"), 4)[:, None]
    y = np.zeros((16, 1), "float32")
    history = fs.fit(model, x, y, batch_size=4, shuffle=False, verbose=0).history
    np.testing.assert_array_equal(history["number"], [mean])


def test_a_metric_may_give_a_constant_array():
    """A vector that belongs to a metric's result is the metric's, and not averaged."""

    class Curve(keras.metrics.Mean):
        def update_state(self, y, y_pred, sample_weight=None):
            super().update_state(y_pred)

        def result(self):
            return {"mean": super().result(), "thresholds": jnp.linspace(0.0, 1.0, 3)}

    class Own(keras.Sequential):
        def train_step(self, state, data):
            return super().train_step(state, data)

    model = Own([keras.layers.Dense(1)])
    model.compile("sgd", "mse", metrics=[Curve()])
    history = fs.fit(model, np.ones((50, 2)), np.ones((50, 1)), batch_size=16, verbose=0).history
    np.testing.assert_allclose(history["thresholds"][0], [0.0, 0.5, 1.0])
