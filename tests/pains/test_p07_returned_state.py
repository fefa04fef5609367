"""A step that returns a state that does not fit is refused by name, and the model is as before."""

import functools

import jax
import keras
import numpy as np
import pytest
from jax import numpy as jnp

import fitstep as fs
from fitstep._state import PARTS
from tests.pains.twins import (
    assert_alive,
    assert_close,
    assert_same,
    assert_unchanged,
    everything_of,
    values_of,
)

FIT = {"batch_size": 35, "epochs": 2, "verbose": 0, "shuffle": False}


class Returns(keras.Model):
    """The guide's step, whose right `(logs, state)` goes through `change` before it is returned."""

    def __init__(self, change=None):
        super().__init__()
        self.change = change
        self.one = keras.layers.Dense(5, name="one")
        self.norm = keras.layers.BatchNormalization(name="norm")
        self.two = keras.layers.Dense(5, name="two")
        self.head = keras.layers.Dense(1, name="head")

    def call(self, inputs, training=False):
        return self.head(self.two(self.norm(self.one(inputs), training=training)))

    def train_step(self, state, data):
        tv, ntv, ov, mv = state
        x, y = data

        def objective(tv):
            y_pred, new_ntv = self.stateless_call(tv, ntv, x, training=True)
            return self.compute_loss(x, y, y_pred), new_ntv

        (loss, ntv), grads = jax.value_and_grad(objective, has_aux=True)(tv)
        tv, ov = self.optimizer.stateless_apply(ov, grads, tv)
        tracker = self.metrics[0]
        mv = tracker.stateless_update_state(mv, loss, sample_weight=len(x))
        logs = {"loss": tracker.stateless_result(mv)}
        right = (logs, (tv, ntv, ov, mv))
        return right if self.change is None else self.change(*right)


def made(change):
    keras.utils.set_random_seed(3)
    model = Returns(change)
    model.compile(keras.optimizers.Adam(0.01), "mse")
    model(np.zeros((1, 5), "float32"))
    model.optimizer.build(model.trainable_variables)
    return model


def first(part, change):
    """The part with its first element changed."""
    return [change(part[0]), *part[1:]]


def swapped(part, i, j):
    part = list(part)
    part[i], part[j] = part[j], part[i]
    return part


# What a step returns, from the right logs and the four parts; what the message must say.
WRONG = {
    "parts exchanged": (lambda g, s: (g, (s[0], s[2], s[1], s[3])), ["non_trainable", "optimizer"]),
    "parts exchanged at the ends": (lambda g, s: (g, (s[3], s[1], s[2], s[0])), ["trainable"]),
    "kernels of two shapes exchanged": (
        lambda g, s: (g, (swapped(s[0], 0, 6), *s[1:])),
        ["one/kernel", "head/kernel", "exchanged"],
    ),
    "kernel and bias exchanged": (
        lambda g, s: (g, (swapped(s[0], 4, 5), *s[1:])),
        ["two/kernel", "two/bias"],
    ),
    "three parts": (lambda g, s: (g, s[:3]), ["3", "4"]),
    "five parts": (lambda g, s: (g, (*s, [])), ["5", "4"]),
    "one part": (lambda g, s: (g, s[0]), ["4"]),
    "a weight too few": (lambda g, s: (g, (s[0][:-1], *s[1:])), ["trainable", "7", "8"]),
    "a weight too many": (lambda g, s: (g, ([*s[0], s[0][0]], *s[1:])), ["trainable", "9", "8"]),
    "an empty part": (lambda g, s: (g, (s[0], [], *s[2:])), ["non_trainable", "0", "2"]),
    "no optimizer": (lambda g, s: (g, (s[0], s[1], None, s[3])), ["optimizer"]),
    "half precision": (
        lambda g, s: (g, (first(s[0], lambda a: a.astype("float16")), *s[1:])),
        ["one/kernel", "float16", "float32"],
    ),
    "an integer weight": (
        lambda g, s: (g, (first(s[0], lambda a: a.astype("int32")), *s[1:])),
        ["one/kernel", "int32", "float32"],
    ),
    "a float counter": (
        lambda g, s: (
            g,
            (*s[:2], first(s[2], lambda a: a.astype("float32")), s[3]),
        ),
        ["iterations", "float32", "int32"],
    ),
    "an added axis": (
        lambda g, s: (g, (*s[:3], first(s[3], lambda a: a[None]))),
        ["loss", "[1]", "[]"],
    ),
    "a statistic of another shape": (
        lambda g, s: (g, (s[0], first(s[1], lambda a: a[:3]), *s[2:])),
        ["norm/moving_mean", "[3]", "[5]"],
    ),
    "a scalar for logs": (lambda g, s: (g["loss"], s), ["logs", "dict"]),
    "logs and state exchanged": (lambda g, s: (s, g), ["logs"]),
    "logs alone": (lambda g, s: g, ["logs"]),
    "state alone": (lambda g, s: s, ["state"]),
    "nothing": (lambda g, s: None, ["None"]),
    "a string in the state": (
        lambda g, s: (g, (first(s[0], lambda a: "x"), *s[1:])),
        ["one/kernel"],
    ),
    "None in the state": (lambda g, s: (g, (first(s[0], lambda a: None), *s[1:])), ["one/kernel"]),
    "a matrix among the averaged logs": (
        lambda g, s: (g | {"matrix": s[0][0]}, s),
        ["matrix", "[5,5]"],
    ),
    "a string among the logs": (lambda g, s: (g | {"word": "high"}, s), ["word"]),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_return_is_named_and_changes_nothing(rows, case):
    """The error names the field and says expected and got; the mended step trains the same object."""
    x, y = rows
    change, words = WRONG[case]
    model = made(change)
    before = everything_of(model)
    with pytest.raises((fs.StateError, fs.DataError)) as caught:
        fs.fit(model, x, y, **FIT)
    for word in words:
        assert word in str(caught.value)
    assert_alive(model)
    assert_unchanged(before)
    model.change = None
    twin = made(None)
    twin.fit(x, y, **FIT)
    fs.fit(model, x, y, **FIT)
    assert_close(values_of(model), values_of(twin))


def test_two_kernels_of_one_shape_exchanged_are_named(rows):
    """Two updated kernels of one shape returned in each other's place are refused, not accepted in silence."""
    x, y = rows
    model = made(lambda g, s: (g, (swapped(s[0], 0, 4), *s[1:])))
    before = everything_of(model)
    with pytest.raises(fs.StateError) as caught:
        fs.fit(model, x, y, **FIT)
    assert "one/kernel" in str(caught.value)
    assert "two/kernel" in str(caught.value)
    assert_unchanged(before)


RIGHT = {
    "lists": lambda g, s: (g, [list(part) for part in s]),
    "tuples": lambda g, s: (g, tuple(tuple(part) for part in s)),
    "a list of two": lambda g, s: [g, s],
    "NumPy in the state": lambda g, s: (
        g,
        (s[0], s[1], s[2], [*s[3][:1], np.float32(1.0) * np.ones((), "float32")]),
    ),
    "a weak number in the state": lambda g, s: (g, (*s[:3], [s[3][0], jnp.asarray(1.0)])),
}


@pytest.mark.parametrize("case", RIGHT)
def test_right_returns_are_accepted(rows, case):
    """Lists, tuples, NumPy arrays and weakly typed scalars of the right shape are a state."""
    x, y = rows
    model, twin = made(RIGHT[case]), made(None)
    fs.fit(model, x, y, **FIT)
    twin.fit(x, y, **FIT)
    assert_close(values_of(model), values_of(twin))
    assert {v.dtype for v in model.metrics_variables} == {"float32"}


@pytest.mark.parametrize("parts", [1, 2, 4])
def test_test_step_with_another_number_of_parts_is_named(rows, parts):
    """A `test_step` must return three parts; the error says so, also on a validation pass."""
    x, y = rows

    class Net(Returns):
        def test_step(self, state, data):
            return {"loss": jnp.zeros(())}, (*state, [])[:parts] if parts < 3 else (*state, [])

    keras.utils.set_random_seed(3)
    model = Net()
    model.compile(keras.optimizers.Adam(0.01), "mse")
    model(x[:1])
    before = everything_of(model)
    with pytest.raises(fs.StateError, match="3"):
        fs.evaluate(model, x, y, verbose=0)
    assert_unchanged(before)
    with pytest.raises(fs.StateError, match="3"):
        fs.fit(model, x, y, validation_data=(x, y), **FIT)
    assert_alive(model)
    twin = made(None)
    twin.fit(x, y, **(FIT | {"epochs": 1}))
    assert_close(values_of(model), values_of(twin))


def test_test_step_that_returns_the_metrics_in_the_weights_place_is_named(rows):
    """A `test_step` with two parts exchanged is refused by name; no weight changes."""
    x, y = rows

    class Net(Returns):
        def test_step(self, state, data):
            tv, ntv, mv = state
            return {"loss": jnp.zeros(())}, (mv, ntv, tv)

    model = Net()
    model.compile("sgd", "mse")
    model(x[:1])
    before = everything_of(model)
    with pytest.raises(fs.StateError, match="trainable"):
        fs.evaluate(model, x, y, verbose=0)
    assert_unchanged(before)


@pytest.mark.parametrize("what", ["outputs alone", "wrong statistics", "too few statistics"])
def test_predict_step_with_a_wrong_return_is_named(rows, what):
    """A `predict_step` must return outputs and the non-trainable part; the error says which is missing."""
    x, _ = rows

    class Net(Returns):
        def predict_step(self, state, data):
            tv, ntv = state
            xs = data[0] if isinstance(data, (tuple, list)) else data
            out, ntv = self.stateless_call(tv, ntv, xs)
            return {
                "outputs alone": out,
                "wrong statistics": (out, [ntv[0][:2], ntv[1]]),
                "too few statistics": (out, ntv[:1]),
            }[what]

    model = Net()
    model.compile("sgd", "mse")
    model(x[:1])
    before = everything_of(model)
    with pytest.raises(fs.StateError):
        fs.predict(model, x, verbose=0)
    assert_alive(model)
    assert_unchanged(before)


def test_state_that_is_wrong_for_one_shape_of_batch_only_is_named_there(rows):
    """A wrong return for the partial last batch is refused there; the steps before it stay."""
    x, y = rows

    class Net(Returns):
        def train_step(self, state, data):
            logs, (tv, ntv, ov, mv) = super().train_step(state, data)
            if len(data[0]) == 6:
                tv = tv[:-1]
            return logs, (tv, ntv, ov, mv)

    keras.utils.set_random_seed(3)
    model = Net()
    model.compile(keras.optimizers.Adam(0.01), "mse")
    model(x[:1])
    with pytest.raises(fs.StateError, match="trainable"):
        fs.fit(model, x, y, batch_size=32, verbose=0, shuffle=False)
    twin = made(None)
    twin.fit(x[:64], y[:64], batch_size=32, verbose=0, shuffle=False)
    assert_close(values_of(model), values_of(twin))


def test_train_on_batch_of_fs_model_names_the_field_too(rows):
    """`fs.Model.train_on_batch` and `run_eagerly` check what a step returns as `fit` does."""
    x, y = rows

    class Net(fs.Model):
        def __init__(self):
            super().__init__()
            self.dense = keras.layers.Dense(1, name="dense")

        def call(self, inputs):
            return self.dense(inputs)

        def train_step(self, state, data):
            tv, ntv, ov, mv = state
            return {"loss": jnp.zeros(())}, ([tv[0].T, *tv[1:]], ntv, ov, mv)

    for options in ({}, {"run_eagerly": True}, {"jit_compile": False}):
        model = Net()
        model.compile("sgd", "mse", **options)
        model(x[:1])
        before = everything_of(model)
        with pytest.raises(fs.StateError, match="dense/kernel") as caught:
            model.train_on_batch(x, y)
        assert "[1,5]" in str(caught.value)
        assert "[5,1]" in str(caught.value)
        assert_alive(model)
        assert_unchanged(before)


class Logging(keras.Model):
    """The default step with other logs."""

    def __init__(self, logs):
        super().__init__()
        self.dense = keras.layers.Dense(1)
        self.make_logs = logs

    def call(self, x):
        return self.dense(x)

    def train_step(self, state, data):
        logs, state = super().train_step(state, data)
        return self.make_logs(logs), state


EAGER = [{}, {"run_eagerly": True}, {"jit_compile": False}]


@pytest.mark.parametrize("how", EAGER)
def test_a_step_without_logs_trains(rows, how):
    """No logs are no error, however the step is run."""
    x, y = rows
    model = Logging(lambda logs: {})
    model.compile("sgd", "mse", **how)
    fs.fit(model, x, y, verbose=0)
    assert int(model.optimizer.iterations.value) == 3


@pytest.mark.parametrize("how", EAGER)
def test_a_vector_among_the_logs_is_refused_also_where_it_is_constant(rows, how):
    """A log that is no scalar is named, whatever it was computed from."""
    x, y = rows
    model = Logging(lambda logs: {**logs, "both": jnp.ones(2)})
    model.compile("sgd", "mse", **how)
    with pytest.raises(fs.StateError, match="the log 'both' must be a scalar"):
        fs.fit(model, x, y, verbose=0)


def test_the_step_of_another_backend_is_recognised(rows):
    """`train_step(self, data)`, as Keras's guides for TensorFlow and torch write it, is named."""
    x, y = rows

    class Guide(keras.Sequential):
        def train_step(self, data):
            return {}

    model = Guide([keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    with pytest.raises(fs.StateError, match=r"write `def train_step\(self, state, data\)`"):
        fs.fit(model, x, y, verbose=0)


def test_a_state_prints_names_and_shapes():
    """Not the numbers of every weight."""
    state = fs.State(3, 1, {"kernel": jnp.zeros((2, 5))})
    assert repr(state).startswith("State(step=3, seed=1, trainable={kernel: float32[2,5]}, ")


# --- exchanged after an update -------------------------------------------------------------------


class Normed(keras.Model):
    """Two equal layers and their normalisations; `change` rearranges what the step returns."""

    def __init__(self, change, by_hand=False):
        super().__init__()
        self.norm_a, self.norm_b = (keras.layers.BatchNormalization() for _ in range(2))
        self.dense_a, self.dense_b = (keras.layers.Dense(5, "tanh") for _ in range(2))
        self.head = keras.layers.Dense(1)
        self.change, self.by_hand = change, by_hand

    def call(self, x, training=False):
        x = self.dense_a(self.norm_a(x, training=training))
        return self.head(self.dense_b(self.norm_b(x, training=training)))

    def train_step(self, state, data):
        if self.by_hand:
            t, n, o, m = state
            x, y = data
            gradients = jax.grad(
                lambda t: jnp.mean((self.stateless_call(t, n, x, training=True)[0] - y) ** 2)
            )(t)
            logs, new = {}, [[a - 0.01 * g for a, g in zip(t, gradients, strict=True)], n, o, m]
        else:
            logs, new = super().train_step(state, data)
        new = [list(part) for part in new]
        self.change(*new)
        return logs, tuple(new)


EXCHANGED = {
    "means of two layers": ("non_trainable", "norm_a/moving_mean", "norm_b/moving_mean"),
    "mean and variance": ("non_trainable", "norm_a/moving_mean", "norm_a/moving_variance"),
    "two kernels": ("trainable", "dense_a/kernel", "dense_b/kernel"),
    "two biases": ("trainable", "dense_a/bias", "dense_b/bias"),
    "moment and velocity": ("optimizer", "momentums/dense_a/kernel", "velocities/dense_a/kernel"),
    "two moments": ("optimizer", "momentums/dense_a/kernel", "momentums/dense_b/kernel"),
}


@pytest.mark.parametrize(
    ("kind", "by_hand"),
    [(kind, False) for kind in EXCHANGED] + [("two kernels", True), ("two biases", True)],
)
def test_variables_exchanged_after_their_update_are_named(rows, kind, by_hand):
    """Each carries on the other's old value, which the program shows whoever computed the update."""
    x, y = rows
    part, *names = EXCHANGED[kind]
    model = Normed(lambda *parts: None, by_hand)
    model.compile("adam", "mse")
    fs.fit(model, x, y, verbose=0, batch_size=35)  # as it is returned, it is right
    places = [list(getattr(fs.capture(model), part)).index(name) for name in names]

    def exchange(*parts):
        wrong = parts[PARTS.index(part)]
        one, other = places
        wrong[one], wrong[other] = wrong[other], wrong[one]

    model.change = exchange
    before = values_of(model)
    with pytest.raises(fs.StateError, match="exchanged in the returned state"):
        fs.fit(model, x, y, verbose=0, batch_size=35)
    assert_same(values_of(model), before)


def test_variables_that_mix_on_purpose_are_let_pass(rows):
    """An average that takes in the other weights, and weights drawn towards it, are no exchange."""
    x, y = rows

    def mix(t, n, o, m):
        a, b = places
        t[a], t[b] = 0.9 * t[a] + 0.1 * t[b], 0.9 * t[b] + 0.1 * t[a]

    model = Normed(lambda *parts: None)
    model.compile("adam", "mse")
    fs.fit(model, x, y, verbose=0, batch_size=35)
    names = list(fs.capture(model).trainable)
    places = [names.index("dense_a/kernel"), names.index("dense_b/kernel")]
    model.change = mix
    fs.fit(model, x, y, verbose=0, batch_size=35)


class Coupled(keras.Model):
    """Two 2x2 buffers `a` and `b`, which `move` takes on in each step."""

    def __init__(self, move, how="position"):
        super().__init__()
        self.dense = keras.layers.Dense(1)
        self.a = self.add_weight(shape=(2, 2), initializer="ones", trainable=False, name="a")
        self.b = self.add_weight(shape=(2, 2), initializer="zeros", trainable=False, name="b")
        self.move, self.how = move, how

    def call(self, x):
        return self.dense(x)

    def train_step(self, state, data):
        a, b = self.move(self.a.value, self.b.value)
        logs, (t, n, o, m) = super().train_step(state, data)
        if self.how == "assign":
            self.a.assign(a)
            self.b.assign(b)
        elif self.how == "name":
            return logs, state.replace(trainable=t, optimizer=o, metrics=m, non_trainable=[a, b])
        return logs, (t, [a, b] if self.how == "position" else n, o, m)


MATRIX = jnp.array([[0.5, 0.1], [0.2, 0.4]])
COUPLED = {
    "power iteration with momentum": lambda a, b: (b, MATRIX @ b - 0.25 * a),
    "leapfrog": lambda a, b: (b, a + 0.1 * (MATRIX @ b)),
    "mixed": lambda a, b: (0.5 * (MATRIX @ a) + 0.5 * b, 0.5 * (MATRIX @ b) + 0.5 * a),
    "banks": lambda a, b: (0.5 * a.at[0].set(1.0) + 0.5 * b, 0.5 * b.at[0].set(2.0) + 0.5 * a),
    "after a scan": lambda a, b: (
        0.9 * jax.lax.fori_loop(0, 2, lambda i, v: 0.5 * v, a) + 0.1 * b,
        0.9 * jax.lax.fori_loop(0, 2, lambda i, v: 0.5 * v, b) + 0.1 * a,
    ),
}


@pytest.mark.parametrize("kind", COUPLED)
def test_variables_that_are_coupled_are_let_pass(rows, kind):
    """Dynamics in which each value takes in the other's are no exchange; the numbers are right."""
    x, y = rows
    model = Coupled(COUPLED[kind])
    model.compile("sgd", "mse")
    fs.fit(model, x, y, batch_size=35, epochs=2, verbose=0)
    a, b = jnp.ones((2, 2)), jnp.zeros((2, 2))
    for _ in range(4):
        a, b = COUPLED[kind](a, b)
    np.testing.assert_allclose(model.a.value, a, rtol=1e-5)
    np.testing.assert_allclose(model.b.value, b, rtol=1e-5)


@pytest.mark.parametrize("how", ["assign", "name"])
def test_an_exchange_that_is_meant_has_a_way(rows, how):
    """By assignment or by name each variable is spoken of, so nothing is in a wrong place."""
    x, y = rows
    model = Coupled(lambda a, b: (b + 1.0, a + 1.0), how)
    model.compile("sgd", "mse")
    fs.fit(model, x, y, batch_size=70, epochs=3, verbose=0)
    np.testing.assert_array_equal(model.a.value, np.full((2, 2), 3.0))
    np.testing.assert_array_equal(model.b.value, np.full((2, 2), 4.0))


def test_a_layer_may_alternate_two_masks(rows):
    """With Keras's own step nothing is returned in a wrong place, whatever a layer exchanges."""
    x, y = rows

    class Alternating(keras.layers.Layer):
        def build(self, input_shape):
            make = functools.partial(self.add_weight, shape=(5,), trainable=False)
            self.a = make(initializer="ones", name="a")
            self.b = make(initializer="zeros", name="b")

        def call(self, inputs, training=False):
            if training:
                a, b = self.a.value, self.b.value
                self.a.assign(b)
                self.b.assign(a)
            return inputs * self.a

    model = keras.Sequential([keras.Input((5,)), Alternating(), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    fs.fit(model, x, y, batch_size=70, epochs=3, verbose=0)
    np.testing.assert_array_equal(model.layers[0].a.value, np.zeros(5))
    np.testing.assert_array_equal(model.layers[0].b.value, np.ones(5))


def test_a_variable_in_the_place_of_its_value_is_refused(rows):
    """A part made of `keras.Variable`s would train nothing."""
    x, y = rows

    class Typo(keras.Sequential):
        def train_step(self, state, data):
            logs, (_, n, o, m) = super().train_step(state, data)
            return logs, (self.trainable_variables, n, o, m)

    model = Typo([keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    with pytest.raises(fs.StateError, match="variable `dense/kernel` came back as"):
        fs.fit(model, x, y, verbose=0)
