"""What a callback reads in mid-epoch, through any handle, is true; what it writes takes effect."""

import functools
import itertools
import warnings

import jax
import keras
import numpy as np
import pytest
from jax import numpy as jnp

import fitstep as fs
from tests.pains.twins import (
    CountSteps,
    assert_alive,
    assert_close,
    assert_same,
    count_of,
    counting_mlp,
    values_of,
)

# Five batches of 14 rows, one program.
FIT = {"batch_size": 14, "epochs": 2, "verbose": 0, "shuffle": False}
RATE = 0.05


def linear(optimizer=None):
    """A linear model whose every step NumPy can follow."""
    keras.utils.set_random_seed(4)
    model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(1, use_bias=False)])
    model.compile(optimizer or keras.optimizers.SGD(RATE), "mse")
    return model


class Follow:
    """The linear model's run in float64, with `write` called where the callback writes."""

    def __init__(self, kernel, x, y):
        self.kernel = np.array(kernel, "float64")
        self.x, self.y, self.rate, self.moment = x.astype("float64"), y.astype("float64"), RATE, 0.0
        self.momentum = 0.0
        self.seen = []

    def run(self, write=None, epochs=2):
        for epoch in range(epochs):
            for batch in range(5):
                xs, ys = self.x[batch * 14 : batch * 14 + 14], self.y[batch * 14 : batch * 14 + 14]
                gradient = 2.0 / 14 * xs.T @ (xs @ self.kernel - ys)
                self.moment = self.momentum * self.moment - self.rate * gradient
                self.kernel = self.kernel + self.moment
                if write is not None:
                    write(self, epoch, batch)
                self.seen.append(self.kernel.copy())
        return self.kernel


class AtBatch(keras.callbacks.Callback):
    """Calls `act` once, after batch 2 of epoch 1, as `on_train_batch_end` does."""

    def __init__(self, act):
        super().__init__()
        self.act, self.epoch = act, None

    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch

    def on_train_batch_end(self, batch, logs=None):
        if self.epoch == 1 and batch == 2:
            self.act(self.model)


# --- reads -------------------------------------------------------------------------------------

READS = {
    "value": lambda model: np.array(model.layers[0].kernel.value),
    "asarray": lambda model: np.array(model.layers[0].kernel),
    "ops": lambda model: keras.ops.convert_to_numpy(model.layers[0].kernel),
    "get_weights": lambda model: model.get_weights()[0],
    "layer.get_weights": lambda model: model.layers[0].get_weights()[0],
    "weights": lambda model: np.array(model.trainable_variables[0].value),
    "call": lambda model: np.asarray(model(np.eye(5, dtype="float32"))),
    "predict": lambda model: model.predict(np.eye(5, dtype="float32"), verbose=0),
    "fs.predict": lambda model: fs.predict(model, np.eye(5, dtype="float32"), verbose=0),
    "predict_on_batch": lambda model: model.predict_on_batch(np.eye(5, dtype="float32")),
    "state tree": lambda model: jax.tree.leaves(
        model.get_state_tree(value_format="numpy_array")["trainable_variables"]
    )[0],
    "capture": lambda model: np.array(next(iter(fs.capture(model).trainable.values()))),
    "clone": lambda model: (lambda c: (c.set_weights(model.get_weights()), c.get_weights()[0])[1])(
        keras.models.clone_model(model)
    ),
}


@pytest.mark.parametrize("way", READS)
@pytest.mark.parametrize("captured", [False, True])
def test_weights_read_in_mid_epoch_are_the_true_ones(rows, way, captured):
    """After every batch each way to read gives the kernel that NumPy gives, `self.model` or captured."""
    x, y = rows
    model = linear()
    follow = Follow(model.layers[0].kernel.value, x, y)
    seen = []

    class Read(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            seen.append(READS[way](model if captured else self.model))

    fs.fit(model, x, y, callbacks=[Read()], **(FIT | {"epochs": 1}))
    follow.run(epochs=1)
    np.testing.assert_allclose(seen, follow.seen, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(model.get_weights()[0], follow.kernel, rtol=1e-4, atol=1e-5)


def test_every_hook_reads_the_true_count_of_steps(rows):
    """In each hook the model's counter and the optimizer's are those of the steps done by then."""
    x, y = rows
    model = counting_mlp()
    layer = next(i for i in model.layers if isinstance(i, CountSteps))
    seen = []

    def see(name):
        def hook(self, *args, **kwargs):
            seen.append((name, int(layer.count.value), int(model.optimizer.iterations.value)))

        return hook

    hooks = [
        f"on_{what}"
        for what in [
            "train_begin",
            "epoch_begin",
            "train_batch_begin",
            "train_batch_end",
            "test_begin",
            "test_batch_begin",
            "test_batch_end",
            "test_end",
            "epoch_end",
            "train_end",
        ]
    ]
    callback = type("See", (keras.callbacks.Callback,), {hook: see(hook) for hook in hooks})()
    fs.fit(model, x, y, validation_data=(x[:35], y[:35]), callbacks=[callback], **FIT)
    expected, steps = [("on_train_begin", 0)], 0
    for _ in range(2):
        expected.append(("on_epoch_begin", steps))
        for _ in range(5):
            expected.append(("on_train_batch_begin", steps))
            steps += 1
            expected.append(("on_train_batch_end", steps))
        expected.append(("on_test_begin", steps))
        for _ in range(3):  # 14, 14 and 7 rows
            expected += [("on_test_batch_begin", steps), ("on_test_batch_end", steps)]
        expected += [("on_test_end", steps), ("on_epoch_end", steps)]
    expected.append(("on_train_end", steps))
    assert [(name, count) for name, count, _ in seen] == expected
    assert all(count == iterations for _, count, iterations in seen)


def test_array_taken_in_one_hook_reads_in_the_next(rows):
    """A NumPy view taken of a weight in one hook keeps its numbers while training goes on."""
    x, y = rows
    model = linear()
    start = model.get_weights()[0].copy()
    held = []

    class Hold(keras.callbacks.Callback):
        def on_train_begin(self, logs=None):
            held.append(np.asarray(model.layers[0].kernel.value))

        def on_train_batch_end(self, batch, logs=None):
            held.append(np.asarray(model.layers[0].kernel.value))

    follow = Follow(start, x, y)
    follow.run(epochs=1)
    fs.fit(model, x, y, callbacks=[Hold()], **(FIT | {"epochs": 1}))
    np.testing.assert_array_equal(held[0], start)
    np.testing.assert_allclose(held[1:], follow.seen, rtol=1e-4, atol=1e-5)


# --- writes ------------------------------------------------------------------------------------

NEW = np.linspace(-1, 1, 5).reshape(5, 1)
WRITES = {
    "assign": lambda model: model.layers[0].kernel.assign(NEW.astype("float32")),
    "assign float64": lambda model: model.layers[0].kernel.assign(NEW),
    "assign jax": lambda model: model.layers[0].kernel.assign(jnp.asarray(NEW, "float32")),
    "assign list": lambda model: model.layers[0].kernel.assign(NEW.tolist()),
    "assign_add": lambda model: model.layers[0].kernel.assign_add(NEW - model.get_weights()[0]),
    "set_weights": lambda model: model.set_weights([NEW]),
    "_value": lambda model: setattr(model.layers[0].kernel, "_value", jnp.asarray(NEW, "float32")),
    "state tree": lambda model: model.set_state_tree(
        {
            "trainable_variables": jax.tree.map(
                lambda _: NEW.astype("float32"), model.get_state_tree()["trainable_variables"]
            )
        }
    ),
    "restore": lambda model: fs.restore(
        model,
        (lambda s: s.replace(trainable={k: jnp.asarray(NEW, "float32") for k in s.trainable}))(
            fs.capture(model)
        ),
    ),
}


@pytest.mark.parametrize("way", WRITES)
def test_weights_written_in_mid_epoch_take_effect(rows, way):
    """A write after batch 2 of epoch 1 is what batch 3 trains from, in every way to write."""
    x, y = rows
    model = linear()

    def write(follow, epoch, batch):
        if (epoch, batch) == (1, 2):
            follow.kernel = NEW.copy()

    expected = Follow(model.layers[0].kernel.value, x, y).run(write)
    with warnings.catch_warnings():
        if way == "restore":  # which writes the metrics, too: these stay the engine's
            warnings.filterwarnings("ignore", "A callback wrote to a metric")
        fs.fit(model, x, y, callbacks=[AtBatch(WRITES[way])], **FIT)
    np.testing.assert_allclose(model.get_weights()[0], expected, rtol=1e-4, atol=1e-5)
    assert model.layers[0].kernel.dtype == "float32"
    assert model.layers[0].kernel.value.dtype == np.float32
    assert_alive(model)


def test_weights_loaded_from_a_file_in_mid_epoch_take_effect(rows, tmp_path):
    """`save_weights` in one batch and `load_weights` in a later one go back to the saved values."""
    x, y = rows
    model = linear()
    path = str(tmp_path / "w.weights.h5")

    class SaveLoad(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch == 1:
                self.model.save_weights(path)
            if batch == 3:
                self.model.load_weights(path)

    kept = {}

    def write(follow, epoch, batch):
        if batch == 1:
            kept["kernel"] = follow.kernel.copy()
        if batch == 3:
            follow.kernel = kept["kernel"]

    expected = Follow(model.layers[0].kernel.value, x, y).run(write)
    fs.fit(model, x, y, callbacks=[SaveLoad()], **FIT)
    np.testing.assert_allclose(model.get_weights()[0], expected, rtol=1e-4, atol=1e-5)


RATES = {
    "property": lambda model: setattr(model.optimizer, "learning_rate", 0.01),
    "assign": lambda model: model.optimizer.learning_rate.assign(0.01),
    "assign array": lambda model: model.optimizer.learning_rate.assign(np.float64(0.01)),
    "variable": lambda model: model.optimizer.variables[1].assign(0.01),
}


@pytest.mark.parametrize("way", RATES)
def test_learning_rate_written_in_mid_epoch_takes_effect(rows, way):
    """The rate changed after batch 2 of epoch 1 is the one that batch 3 uses."""
    x, y = rows
    model = linear()

    def write(follow, epoch, batch):
        if (epoch, batch) == (1, 2):
            follow.rate = 0.01

    expected = Follow(model.layers[0].kernel.value, x, y).run(write)
    fs.fit(model, x, y, callbacks=[AtBatch(RATES[way])], **FIT)
    np.testing.assert_allclose(model.get_weights()[0], expected, rtol=1e-4, atol=1e-5)


def test_moments_cleared_in_mid_epoch_take_effect(rows):
    """The optimizer's momentum set to zero by a callback is zero for the next batch."""
    x, y = rows
    model = linear(keras.optimizers.SGD(RATE, momentum=0.9))

    def act(model):
        momenta = model.optimizer.variables[-1]
        momenta.assign(np.zeros(momenta.shape))

    def write(follow, epoch, batch):
        if (epoch, batch) == (1, 2):
            follow.moment = 0.0

    follow = Follow(model.layers[0].kernel.value, x, y)
    follow.momentum = 0.9
    fs.fit(model, x, y, callbacks=[AtBatch(act)], **FIT)
    np.testing.assert_allclose(model.get_weights()[0], follow.run(write), rtol=1e-4, atol=1e-5)


def test_counter_of_the_optimizer_written_in_mid_epoch_moves_the_schedule(rows):
    """`optimizer.iterations` set by a callback is where a schedule goes on."""
    x, y = rows
    schedule = keras.optimizers.schedules.InverseTimeDecay(RATE, 1, 1.0)
    model = linear(keras.optimizers.SGD(schedule))
    follow = Follow(model.layers[0].kernel.value, x, y)
    steps = [0]

    def write(follow, epoch, batch):
        steps[0] += 1
        if (epoch, batch) == (1, 2):
            steps[0] = 50
        follow.rate = RATE / (1 + steps[0])

    expected = follow.run(write)
    fs.fit(model, x, y, callbacks=[AtBatch(lambda m: m.optimizer.iterations.assign(50))], **FIT)
    assert int(model.optimizer.iterations.value) == 52
    np.testing.assert_allclose(model.get_weights()[0], expected, rtol=1e-4, atol=1e-5)


HOOKS = {
    # hook: the steps done when it first runs in the second epoch
    "on_train_batch_begin": 5,
    "on_epoch_begin": 5,
    "on_test_begin": 10,
    "on_test_batch_end": 10,
    "on_test_end": 10,
    "on_epoch_end": 10,
}


@pytest.mark.parametrize("hook", HOOKS)
def test_a_write_in_any_hook_takes_effect(rows, hook):
    """A write in a hook of the second epoch, validation's too, is where the next step starts."""
    x, y = rows
    model = linear()
    kernel = model.layers[0].kernel

    class Write(keras.callbacks.Callback):
        epoch, done = None, False

        def on_epoch_begin(self, epoch, logs=None):
            self.epoch = epoch

    def act(self, *args, **kwargs):
        if hook == "on_epoch_begin":
            self.epoch = args[0]
        if self.epoch == 1 and not self.done:
            self.done = True
            kernel.assign(NEW)

    setattr(Write, hook, act)

    def write(follow, epoch, batch):
        if epoch * 5 + batch + 1 == HOOKS[hook]:
            follow.kernel = NEW.copy()

    expected = Follow(kernel.value, x, y).run(write, epochs=3)
    fs.fit(
        model,
        x,
        y,
        validation_data=(x[:28], y[:28]),
        callbacks=[Write()],
        **(FIT | {"epochs": 3}),
    )
    np.testing.assert_allclose(model.get_weights()[0], expected, rtol=1e-4, atol=1e-5)


def test_a_write_during_validation_changes_what_it_measures(rows):
    """Weights put in at `on_test_begin` (averages, say) are those that validation measures."""
    x, y = rows
    model = linear()

    class Swap(keras.callbacks.Callback):
        def on_test_begin(self, logs=None):
            self.kept = self.model.get_weights()
            self.model.set_weights([NEW])

        def on_test_end(self, logs=None):
            self.model.set_weights(self.kept)

    expected = Follow(model.layers[0].kernel.value, x, y).run()
    history = fs.fit(model, x, y, validation_data=(x, y), callbacks=[Swap()], **FIT).history
    np.testing.assert_allclose(history["val_loss"], [np.mean((x @ NEW - y) ** 2)] * 2, rtol=1e-4)
    np.testing.assert_allclose(model.get_weights()[0], expected, rtol=1e-4, atol=1e-5)


def test_moving_statistics_written_in_mid_epoch_take_effect(rows):
    """A BatchNormalization's moving mean set by a callback decays from there, as by arithmetic."""
    x, y = rows
    norm = keras.layers.BatchNormalization(momentum=0.5)
    model = keras.Sequential([keras.Input((5,)), norm, keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    fs.fit(
        model, x, y, callbacks=[AtBatch(lambda m: norm.moving_mean.assign(np.full(5, 8.0)))], **FIT
    )
    mean = np.full(5, 8.0)
    for batch in (3, 4):
        mean = 0.5 * mean + 0.5 * x[batch * 14 : batch * 14 + 14].mean(axis=0)
    np.testing.assert_allclose(np.asarray(norm.moving_mean.value), mean, rtol=1e-4)


def test_seed_written_in_mid_epoch_takes_effect(rows):
    """A dropout seed put back by a callback gives the same mask again."""
    x, y = rows
    drop = keras.layers.Dropout(0.5, seed=3)
    masks = []

    class Keep(keras.layers.Layer):
        def build(self, input_shape):
            self.kept = self.add_weight(
                shape=(14, 5), initializer="zeros", trainable=False, name="kept"
            )

        def call(self, inputs):
            self.kept.assign(keras.ops.cast(inputs != 0, "float32"))
            return inputs

    keep = Keep()
    inputs = keras.Input((5,), batch_size=14)
    model = keras.Model(inputs, keras.layers.Dense(1)(keep(drop(inputs))))
    model.compile("sgd", "mse")
    state = drop.seed_generator.state
    start = np.array(state.value)

    class Back(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            masks.append(np.array(keep.kept.value))
            if batch == 1:
                state.assign(start)

    fs.fit(model, x, y, callbacks=[Back()], **(FIT | {"epochs": 1}))
    assert (masks[0] != masks[1]).any()
    assert_same([masks[2], masks[3]], [masks[0], masks[1]])
    assert (masks[4] != masks[0]).any()


def test_a_write_to_a_training_metric_is_not_taken_over_and_said_once(rows):
    """Training metrics belong to the engine: a callback's reset changes no log, and is warned of once."""
    x, y = rows
    expected = fs.fit(linear(), x, y, **FIT).history["loss"]
    model = linear()

    class Reset(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            for variable in self.model.metrics_variables:
                variable.assign(np.full(variable.shape, 100.0))

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        history = fs.fit(model, x, y, callbacks=[Reset()], **FIT).history
    np.testing.assert_allclose(history["loss"], expected, rtol=1e-6)
    about = [str(each.message) for each in caught if "metric" in str(each.message)]
    assert len(about) == 1


def test_a_layer_frozen_and_thawed_by_a_callback(rows):
    """A layer frozen for one epoch by a callback stands still in it, and moves before and after."""
    x, y = rows
    model = counting_mlp()
    layer = model.layers[1]
    seen = []

    class Freeze(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            layer.trainable = epoch != 1
            seen.append((np.array(layer.kernel.value), np.array(model.layers[2].kernel.value)))

    fs.fit(model, x, y, callbacks=[Freeze()], **(FIT | {"epochs": 3}))
    seen.append((np.array(layer.kernel.value), np.array(model.layers[2].kernel.value)))
    moved = [(one[0] != other[0]).any() for one, other in itertools.pairwise(seen)]
    others = [(one[1] != other[1]).all() for one, other in itertools.pairwise(seen)]
    assert moved == [True, False, True]
    assert others == [True, True, True]
    assert count_of(model) == int(model.optimizer.iterations.value) == 15


def test_stop_training_set_in_mid_epoch_stops_where_stock_stops(rows):
    """`model.stop_training = True` in a batch hook ends the epoch and the fit as stock `fit` does."""
    x, y = rows
    counts = []
    for fit in (fs.fit, keras.Model.fit):
        keras.utils.set_random_seed(2)
        model = counting_mlp()
        act = AtBatch(lambda m: setattr(m, "stop_training", True))
        history = fit(model, x, y, callbacks=[act], **(FIT | {"epochs": 4}))
        counts.append((count_of(model), len(history.epoch)))
    assert counts[0] == counts[1]


# --- nested runs -------------------------------------------------------------------------------

NESTED = {
    "fs.evaluate": lambda model, x, y: fs.evaluate(model, x, y, batch_size=35, verbose=0),
    "fs.predict": lambda model, x, y: fs.predict(model, x, verbose=0),
    "evaluate": lambda model, x, y: model.evaluate(x, y, batch_size=35, verbose=0),
    "predict": lambda model, x, y: model.predict(x, verbose=0),
    "test_on_batch": lambda model, x, y: model.test_on_batch(x, y),
    "call in training": lambda model, x, y: model(x),
    "summary": lambda model, x, y: model.summary(print_fn=lambda *args, **kwargs: None),
    "get_metrics_result": lambda model, x, y: model.get_metrics_result(),
}


def run_with_nested(hook, way, kind, rows):
    """The history and the weights of a fit in which each call of `hook` runs `way`, if any."""
    x, y = rows
    keras.utils.set_random_seed(2)
    layers = [keras.Input((5,)), CountSteps(), keras.layers.Dense(4), keras.layers.Dense(1)]
    model = (fs if kind != "plain" else keras).Sequential(layers)
    model.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"])
    calls = []

    def run(self, *args, **kwargs):
        calls.append(hook)
        if way is not None:
            NESTED[way](self.model, x[:35], y[:35])

    nested = type("Nested", (keras.callbacks.Callback,), {hook: run})()
    fit = functools.partial(fs.fit, model) if kind == "plain" else model.fit
    history = fit(x, y, validation_data=(x[:28], y[:28]), callbacks=[nested], **FIT)
    assert calls
    return history.history, values_of(model)


def assert_disturbs_nothing(hook, way, kind, rows):
    history, weights = run_with_nested(hook, None, kind, rows)
    disturbed, disturbed_weights = run_with_nested(hook, way, kind, rows)
    assert history == disturbed
    assert_same(weights, disturbed_weights)


@pytest.mark.parametrize("way", NESTED)
@pytest.mark.parametrize("kind", ["plain", "fs.Sequential"])
def test_nested_runs_in_a_batch_hook_disturb_nothing(rows, way, kind):
    """A nested pass after each batch leaves history and weights as they are without it."""
    assert_disturbs_nothing("on_train_batch_end", way, kind, rows)


@pytest.mark.parametrize("way", ["fs.evaluate", "evaluate", "predict", "test_on_batch"])
@pytest.mark.parametrize("kind", ["plain", "fs.Sequential"])
@pytest.mark.parametrize(
    "hook",
    [
        "on_train_begin",
        "on_epoch_begin",
        "on_train_batch_begin",
        "on_epoch_end",
        "on_train_end",
    ],
)
def test_nested_runs_in_any_hook_disturb_nothing(rows, hook, way, kind):
    """So does one in each other hook of training, also before an epoch's first step."""
    assert_disturbs_nothing(hook, way, kind, rows)


@pytest.mark.parametrize("inner", ["fs", "stock"])
def test_nested_fit_in_a_callback_trains_from_the_present_weights(rows, inner):
    """A nested `fit` of the same model starts at today's weights, and the outer run goes on from its end."""
    x, y = rows
    model = linear()
    extra = (x[:14], y[:14])

    class Nested(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            if epoch == 0:
                kwargs = {"batch_size": 14, "verbose": 0, "shuffle": False}
                if inner == "fs":
                    fs.fit(self.model, *extra, **kwargs)
                else:
                    self.model.fit(*extra, **kwargs)

    def write(follow, epoch, batch):
        if (epoch, batch) == (0, 4):
            xs, ys = follow.x[:14], follow.y[:14]
            follow.kernel = follow.kernel - RATE * 2 / 14 * xs.T @ (xs @ follow.kernel - ys)

    expected = Follow(model.layers[0].kernel.value, x, y).run(write)
    fs.fit(model, x, y, callbacks=[Nested()], **FIT)
    np.testing.assert_allclose(model.get_weights()[0], expected, rtol=1e-4, atol=1e-5)
    assert int(model.optimizer.iterations.value) == 11


def test_nested_fit_of_another_model_that_shares_a_layer(rows):
    """A second model that shares a layer, trained in a callback, changes the layer for both."""
    x, y = rows
    keras.utils.set_random_seed(3)
    shared = keras.layers.Dense(1, use_bias=False)
    inputs = keras.Input((5,))
    one, two = keras.Model(inputs, shared(inputs)), keras.Model(inputs, 2.0 * shared(inputs))
    for each in (one, two):
        each.compile(keras.optimizers.SGD(RATE), "mse")
    kernel = np.array(shared.kernel.value)

    class Other(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch == 4:
                fs.fit(two, x[:14], y[:14], batch_size=14, verbose=0)

    def write(follow, epoch, batch):
        if batch == 4:
            xs, ys = follow.x[:14], follow.y[:14]
            error = 2 / 14 * xs.T @ (2 * xs @ follow.kernel - ys)
            follow.kernel = follow.kernel - RATE * 2 * error

    expected = Follow(kernel, x, y).run(write)
    fs.fit(one, x, y, callbacks=[Other()], **FIT)
    np.testing.assert_allclose(np.asarray(shared.kernel.value), expected, rtol=1e-4, atol=1e-5)


def test_two_runs_of_two_models_one_inside_the_other_keep_apart(rows):
    """A model trained wholly inside another's callback equals the same model trained alone."""
    x, y = rows
    inner, alone, outer = counting_mlp(), counting_mlp(), counting_mlp()
    for one, other in zip(alone.variables, inner.variables, strict=True):
        one.assign(np.array(other.value))
    alone.fit(x, y, **FIT)

    class Inner(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            if epoch == 0:
                fs.fit(inner, x, y, **FIT)

    fs.fit(outer, x, y, callbacks=[Inner()], **FIT)
    assert_close(values_of(inner), values_of(alone))
    assert count_of(outer) == count_of(inner) == 10
