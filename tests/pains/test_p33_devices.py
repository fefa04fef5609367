"""Pain 33: `keras.distribution` with a step of one's own.

The example: keras#22256, where a step that returns tuples fails with pytree errors, and what is not
Keras's own is not divided among the devices.
"""

import math

import jax
import keras
import numpy as np
import pytest
from keras import distribution as kd
from keras import layers

import fitstep as fs
from fitstep.engine import _loop, _runner
from fitstep.engine._live import record_of

pytestmark = pytest.mark.usefixtures("equal_programs_compiled_once")

BATCH = 32  # the fixture's 70 rows make batches of 32, 32 and 6
# Sums over devices are made in another order: some units of 6e-8, grown over a few steps.
CLOSE = {"rtol": 1e-5, "atol": 1e-5}


# --- distributions ----------------------------------------------------------------------------


def data_parallel(devices):
    return kd.DataParallel(devices=kd.list_devices()[:devices])


def model_parallel(rows, columns):
    """`rows` groups of devices take a part of the batch each, within which `hidden` is divided."""
    devices = kd.list_devices()[: rows * columns]
    layout = kd.LayoutMap(kd.DeviceMesh((rows, columns), ("batch", "model"), devices))
    layout[".*hidden.*kernel"] = (None, "model")
    layout[".*hidden.*bias"] = ("model",)
    return kd.ModelParallel(layout_map=layout, batch_dim_name="batch")


DISTRIBUTIONS = {
    "data 4": lambda: data_parallel(4),
    "data 8": lambda: data_parallel(8),
    "model 2x2": lambda: model_parallel(2, 2),
    "model 2x4": lambda: model_parallel(2, 4),
}
every_distribution = pytest.mark.parametrize("distribution", DISTRIBUTIONS)
four_and_eight = pytest.mark.parametrize("distribution", ["data 4", "model 2x4"])


def set_to(name):
    kd.set_distribution(DISTRIBUTIONS[name]() if name else None)


# --- models -----------------------------------------------------------------------------------


def regularised():
    """Batch normalisation, dropout with a seed generator, an extra loss."""
    x = keras.Input((5,))
    h = layers.Dense(8, "tanh", kernel_regularizer="l2", name="hidden")(x)
    h = layers.BatchNormalization(momentum=0.8)(h)
    h = layers.Dropout(0.3)(h)
    return keras.Model(x, layers.Dense(1, name="out")(h))


def two_heads():
    x = keras.Input((5,))
    h = layers.Dense(8, "tanh", name="hidden")(x)
    return keras.Model(
        x,
        {
            "value": layers.Dense(1, name="value")(h),
            "sign": layers.Dense(1, "sigmoid", name="sign")(h),
        },
    )


class OwnStep(keras.Model):
    """The stock contract with tuples in the state, a second metric, a seed, an extra log."""

    traces = 0

    def __init__(self):
        super().__init__()
        self.hidden = layers.Dense(8, "tanh", name="hidden")
        self.norm = layers.BatchNormalization(momentum=0.8)
        self.drop = layers.Dropout(0.2)
        self.out = layers.Dense(1, name="out")
        self.second = keras.metrics.MeanSquaredError(name="second")

    def call(self, x, training=False):
        h = self.norm(self.hidden(x), training=training)
        return self.out(self.drop(h, training=training))

    def updated(self, metrics, loss, y, y_pred):
        at, new, results = 0, [], {}
        for metric in self.metrics:
            own = metrics[at : at + len(metric.variables)]
            at += len(own)
            if metric.name == "loss":
                own = metric.stateless_update_state(own, loss)
                results["loss"] = metric.stateless_result(own)
            elif metric is self.second:
                own = metric.stateless_update_state(own, y, y_pred)
                results["second"] = metric.stateless_result(own)
            new += own
        return tuple(new), results

    def objective_of(self, trainable, rest, x, y, weight, training):
        y_pred, rest = self.stateless_call(trainable, rest, x, training=training)
        return self.compute_loss(x, y, y_pred, weight), (y_pred, rest)

    def train_step(self, state, data):
        type(self).traces += 1
        trainable, rest, optimizer, metrics = state
        x, y, weight = keras.utils.unpack_x_y_sample_weight(data)
        gradients_of = jax.value_and_grad(self.objective_of, has_aux=True)
        (loss, (y_pred, rest)), grads = gradients_of(trainable, rest, x, y, weight, True)
        trainable, optimizer = self.optimizer.stateless_apply(optimizer, grads, trainable)
        metrics, logs = self.updated(metrics, loss, y, y_pred)
        logs["size"] = sum(keras.ops.sum(grad**2) for grad in grads)
        return logs, (tuple(trainable), tuple(rest), tuple(optimizer), metrics)

    def test_step(self, state, data):
        trainable, rest, metrics = state
        x, y, weight = keras.utils.unpack_x_y_sample_weight(data)
        loss, (y_pred, rest) = self.objective_of(trainable, rest, x, y, weight, False)
        metrics, logs = self.updated(metrics, loss, y, y_pred)
        logs["largest"] = keras.ops.max(keras.ops.abs(y_pred))
        return logs, (tuple(trainable), tuple(rest), metrics)


def own_step(optimizer="adam", **kwargs):
    model = OwnStep()
    model(np.zeros((1, 5), "float32"))
    model.compile(optimizer, "mse", **kwargs)
    return model


class Parts(keras.utils.PyDataset):
    """Arrays in batches, of which the last is smaller; targets by name."""

    def __init__(self, x, y):
        super().__init__()
        self.x, self.y = x, y

    def __len__(self):
        return math.ceil(len(self.x) / BATCH)

    def __getitem__(self, index):
        rows = slice(index * BATCH, (index + 1) * BATCH)
        return self.x[rows], {name: target[rows] for name, target in self.y.items()}


# --- scripts: what a user would write, without a word of devices ------------------------------


def all_of(model):
    """The values of the weights, of the optimizer's and the metrics' variables."""
    variables = [*model.variables, *model.optimizer.variables, *model.metrics_variables]
    return [np.asarray(variable.value) for variable in variables]


def default_step(x, y):
    """The default step, averaged weights, validation data, evaluation and prediction."""
    model = regularised()
    model.compile(keras.optimizers.Adam(0.01, use_ema=True), "mse", metrics=["mae"])
    ran = fs.fit(model, x, y, epochs=2, validation_data=(x[:33], y[:33]), verbose=0)
    scores = fs.evaluate(model, x, y, return_dict=True, verbose=0)
    return ran.history, scores, fs.predict(model, x, verbose=0), all_of(model)


def tuples_and_extra_logs(x, y):
    """A step of one's own, with averages that are no metrics, weights, an early stop."""
    model = own_step()
    stop = keras.callbacks.EarlyStopping("val_loss", min_delta=100.0, patience=1)
    ran = fs.fit(
        model,
        x,
        y,
        epochs=4,
        sample_weight=np.linspace(0.1, 2.0, len(x)).astype("float32"),
        validation_split=0.3,
        callbacks=[stop],
        verbose=0,
    )
    assert len(ran.epoch) == 2
    return ran.history, fs.evaluate(model, x, y, return_dict=True, verbose=0), all_of(model)


def accumulation(x, y):
    """Gradients of several batches in one update, class weights, several steps for callbacks."""
    model = regularised()
    adam = keras.optimizers.Adam(0.01, gradient_accumulation_steps=2)
    model.compile(adam, "binary_crossentropy", steps_per_execution=2)
    weights = {0: 0.5, 1: 2.0}
    ran = fs.fit(model, x, (y > 0) * 1.0, epochs=3, class_weight=weights, verbose=0)
    return ran.history, all_of(model)


def several_outputs(x, y):
    """Two outputs with a loss each, from a data set, then from a generator."""
    model = two_heads()
    model.compile("adam", {"value": "mse", "sign": "binary_crossentropy"})
    data = Parts(x, {"value": y, "sign": (y > 0).astype("float32")})
    first = fs.fit(model, data, epochs=2, shuffle=False, verbose=0).history
    generator = (data[index] for index in (0, 1, 2, 1))
    second = fs.fit(model, generator, steps_per_epoch=4, shuffle=False, verbose=0).history
    return first, second, fs.predict(model, x, batch_size=20, verbose=0), all_of(model)


def own_loop(x, y):
    """`fs.steps`, single batches, a state that is captured and put back."""
    model = fs.Sequential(
        [
            keras.Input((5,)),
            layers.Dense(8, "tanh", name="hidden"),
            layers.Dropout(0.3),
            layers.Dense(1, name="out"),
        ]
    )
    model.compile("adam", "mse", metrics=["mae"])
    seen = [float(logs["loss"]) for logs in fs.steps(model, (x, y), epochs=2)]
    before = fs.capture(model)
    seen += [model.train_on_batch(x[:8], y[:8]), model.test_on_batch(x[:5], y[:5])]
    seen += [model.predict_on_batch(x[:3]), all_of(model)]
    fs.restore(model, before)
    seen += [model.train_on_batch(x[:8], y[:8]), all_of(model)]
    return seen, fs.predict(model, x, verbose=0)


def eagerly(x, y):
    """The same step op by op."""
    model = own_step(run_eagerly=True)
    return fs.fit(model, x, y, verbose=0).history, all_of(model)


SCRIPTS = [default_step, tuples_and_extra_logs, accumulation, several_outputs, own_loop, eagerly]
_on_one_device = {}


def run(script, distribution, rows):
    """What a script gives under a distribution."""
    set_to(distribution)
    keras.utils.set_random_seed(3)
    return script(*rows)


def close(got, want, **tolerance):
    tolerance = {**CLOSE, **tolerance}
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, **tolerance), got, want)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.__name__)
@four_and_eight
def test_a_script_gives_on_several_devices_what_it_gives_on_one(script, distribution, rows):
    """History, metrics, weights, optimizer and outputs are those of one device to 1e-5."""
    if script not in _on_one_device:
        _on_one_device[script] = run(script, None, rows)
    close(run(script, distribution, rows), _on_one_device[script])


@every_distribution
def test_the_default_step_gives_what_stock_fit_gives(distribution, rows):
    """Where stock `fit` works at all, with rows that the devices divide, the figures are the same."""
    x, y = (part[:64] for part in rows)
    ends = []
    for fit in (fs.fit, keras.Model.fit):
        set_to(distribution)
        keras.utils.set_random_seed(3)
        model = regularised()
        model.compile("adam", "mse", metrics=["mae"])
        ran = fit(model, x, y, epochs=2, validation_data=(x, y), shuffle=False, verbose=0)
        ends.append((ran.history, all_of(model)))
    close(*ends)


# --- where the arrays lie ---------------------------------------------------------------------


def lies(model):
    """How every variable lies on the devices, by its path, and its dimensions."""
    variables = [*model.variables, *model.optimizer.variables, *model.metrics_variables]
    return {v.path: (v.value.sharding, len(v.shape)) for v in variables}


@pytest.mark.parametrize(
    ("distribution", "eager"), [*((name, False) for name in DISTRIBUTIONS), ("model 2x2", True)]
)
def test_variables_stay_where_they_are(distribution, eager, rows):
    """Weights, slots, metrics and seeds lie after training as they did before; slots as their weights."""
    set_to(distribution)
    x, y = rows
    adam = keras.optimizers.Adam(0.01, use_ema=True, gradient_accumulation_steps=2)
    model = own_step(adam, run_eagerly=eager)
    adam.build(model.trainable_variables)
    before = lies(model)
    fs.fit(model, x, y, epochs=1 if eager else 2, validation_data=(x, y), verbose=0)
    fs.evaluate(model, x, y, verbose=0)
    fs.predict(model, x, verbose=0)
    after = lies(model)
    for path, (sharding, dimensions) in before.items():
        assert after[path][0].is_equivalent_to(sharding, dimensions), path
    kernel = model.hidden.kernel.value
    parts = {"data 4": 1, "data 8": 1, "model 2x2": 2, "model 2x4": 4}[distribution]
    assert {s.data.shape for s in kernel.addressable_shards} == {(5, 8 // parts)}
    weights = model.trainable_variables
    kinds = [adam._momentums, adam._velocities]
    kinds += [adam._model_variables_moving_average, adam._accumulated_gradients]
    for slots in kinds:
        for slot, weight in zip(slots, weights, strict=True):
            here, there = slot.value.sharding, weight.value.sharding
            assert here.is_equivalent_to(there, len(weight.shape)), slot.path
    devices = kd.distribution().device_mesh.devices.size
    assert {len(sharding.device_set) for sharding, _ in after.values()} == {devices}


class Assigns(keras.callbacks.Callback):
    """Writes to the model in mid-epoch in all ways: by Keras, by a state, as a bare array."""

    def __init__(self, state):
        super().__init__()
        self.state = state

    def on_train_batch_end(self, batch, logs=None):
        kernel = self.model.hidden.kernel
        if batch == 0:
            self.model.set_weights([0.9 * weight for weight in self.model.get_weights()])
        elif batch == 1:
            fs.restore(self.model, self.state)
        elif batch == 2:
            kernel._value = jax.numpy.asarray(np.asarray(kernel._value) + 1.0)


@pytest.mark.filterwarnings("ignore:A callback wrote to a metric")
@four_and_eight
def test_what_a_callback_assigns_is_divided_like_what_it_replaces(distribution, rows):
    """Assigned weights and a state from a model on one device train on, divided as before."""
    x, y = rows
    ends, states = [], []
    for where in (None, distribution):
        set_to(where)
        keras.utils.set_random_seed(3)
        model = own_step()
        states.append(fs.capture(model))
        fs.fit(model, x, y, batch_size=16, callbacks=[Assigns(states[0])], verbose=0)
        ends.append(all_of(model))
        lie = model.hidden.kernel.value.sharding
    assert lie.is_equivalent_to(model.hidden.kernel._layout.backend_layout, 2)
    close(*ends[::-1])
    # And back: a state of several devices into a model on one.
    kd.set_distribution(None)
    model = own_step()
    fs.restore(model, states[1])
    close(fs.capture(model).trainable, states[1].trainable)
    fs.fit(model, x, y, verbose=0)
    assert len(model.hidden.kernel.value.sharding.device_set) == 1


# --- many steps in one execution --------------------------------------------------------------


@pytest.mark.parametrize("most", [2, 7, 16])
def test_many_steps_in_one_execution_give_the_same_bits(most, monkeypatch):
    """On four devices, too, how many steps share an execution changes no bit."""
    generator = np.random.default_rng(0)
    x = generator.normal(size=(300, 5)).astype("float32")
    y = x.sum(axis=1, keepdims=True)
    ends = []
    for steps in (1, most):
        for module in (_runner, _loop):
            monkeypatch.setattr(module, "MOST_STEPS", steps)
        set_to("data 4")
        keras.utils.set_random_seed(3)
        model = own_step()
        ran = fs.fit(model, x, y, batch_size=16, epochs=2, validation_split=0.2, verbose=0)
        ends.append((ran.history, fs.predict(model, x, batch_size=16, verbose=0), all_of(model)))
    assert record_of(model).choices["train"].steps == min(most, 15)
    jax.tree.map(np.testing.assert_array_equal, *ends)


def test_a_chunk_is_brought_to_the_devices_once(monkeypatch, rows):
    """Arrays are handed over once for each execution, not for each step."""
    from fitstep._keras._devices import Devices

    set_to("data 4")
    x, y = np.repeat(rows[0], 10, axis=0), np.repeat(rows[1], 10, axis=0)
    model = own_step()
    placed, executed = [], []
    place, execute = Devices.placed, _runner.Runner._execute
    monkeypatch.setattr(
        Devices, "placed", lambda self, *a, **k: placed.append(1) or place(self, *a, **k)
    )
    monkeypatch.setattr(
        _runner.Runner, "_execute", lambda self, *a: executed.append(1) or execute(self, *a)
    )
    fs.fit(model, x, y, batch_size=32, epochs=2, verbose=0)
    assert len(placed) == len(executed) < 2 * -(-len(x) // 32)


# --- programs ---------------------------------------------------------------------------------


def test_equal_distributions_share_programs_and_others_do_not(rows):
    """One trace for each shape of batch and each distribution, however often it is set."""
    x, y = rows
    set_to("data 4")
    keras.utils.set_random_seed(3)
    model = own_step()
    fs.fit(model, x, y, verbose=0)
    OwnStep.traces, seen = 0, []
    for distribution in ("data 4", "model 2x2", None, "data 4", "model 2x2", None):
        set_to(distribution)
        fs.fit(model, x, y, verbose=0)
        seen.append(OwnStep.traces)
    assert seen[0] == 0
    assert seen[2:] == [seen[2]] * 4
    keras.utils.set_random_seed(3)
    set_to(None)
    other = own_step()
    for _ in range(7):
        fs.fit(other, x, y, verbose=0)
    close(model.get_weights(), other.get_weights(), rtol=1e-4, atol=1e-4)


# --- a model that was made elsewhere ----------------------------------------------------------


def trained_before():
    model = own_step()
    fs.fit(model, np.ones((8, 5)), np.ones((8, 1)), verbose=0)
    return model


def saved_and_loaded_before(path):
    model = regularised()
    model.compile("adam", "mse")
    model.optimizer.build(model.trainable_variables)
    model.save(path)
    return keras.models.load_model(path)


USES = {
    "fit": lambda model, x, y: fs.fit(model, x, y, verbose=0),
    "evaluate": lambda model, x, y: fs.evaluate(model, x, y, verbose=0),
    "predict": lambda model, x, y: fs.predict(model, x, verbose=0),
    "steps": lambda model, x, y: list(fs.steps(model, (x, y))),
}
MADE = {
    "before any": (None, "data 4", "lies on cpu:0 "),
    "before model parallel": (None, "model 2x2", "lies on cpu:0 "),
    "on fewer devices": ("data 4", "data 8", "lies on cpu:0, cpu:1, cpu:2, cpu:3 "),
    "on more devices": ("model 2x4", "data 4", "lies on cpu:0, cpu:1, cpu:2, cpu:3, cpu:4,"),
}


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("made", MADE)
def test_a_model_made_elsewhere_is_refused_by_name(made, use, rows):
    """The error names a variable, both places and the remedy; nothing has changed; the remedy works."""
    before, now, where = MADE[made]
    x, y = rows
    set_to(before)
    model = own_step()
    weights, slots = model.get_weights(), len(model.optimizer.variables)
    set_to(now)
    with pytest.raises(fs.StateError) as caught:
        USES[use](model, x, y)
    for part in ("`hidden/kernel`", where, "Expected: cpu:0, cpu:1", "set_distribution", "clone"):
        assert part in str(caught.value)
    jax.tree.map(np.testing.assert_array_equal, model.get_weights(), weights)
    if use != "predict":
        assert len(model.optimizer.variables) == slots
    # The model still works where it was made.
    set_to(before)
    USES[use](model, x, y)


def test_the_remedy_of_the_error_works(rows):
    """`clone_model` and `set_weights` under the distribution give a model that trains as on one device."""
    x, y = rows[0], {"value": rows[1], "sign": (rows[1] > 0).astype("float32")}
    losses = {"value": "mse", "sign": "binary_crossentropy"}
    keras.utils.set_random_seed(3)
    # No dropout: a clone has a seed of its own.
    model = two_heads()
    model.compile("sgd", losses)
    weights = model.get_weights()
    set_to("model 2x2")
    with pytest.raises(fs.StateError, match="hidden/kernel"):
        fs.fit(model, x, y, verbose=0)
    new = keras.models.clone_model(model)
    new.set_weights(model.get_weights())
    new.compile("sgd", losses)
    jax.tree.map(np.testing.assert_array_equal, new.get_weights(), weights)
    got = fs.fit(new, x, y, verbose=0).history
    assert {s.data.shape for s in new.get_layer("hidden").kernel.value.addressable_shards} == {
        (5, 4)
    }
    kd.set_distribution(None)
    close(got, fs.fit(model, x, y, verbose=0).history)


def test_a_model_trained_or_loaded_before_is_refused(tmp_path, rows):
    """Training or loading before the distribution was set makes no difference to the error."""
    x, y = rows
    for model in (trained_before(), saved_and_loaded_before(tmp_path / "model.keras")):
        set_to("data 4")
        with pytest.raises(
            fs.StateError, match=r"`hidden/kernel` lies on cpu:0 .*Expected: cpu:0,"
        ):
            fs.fit(model, x, y, verbose=0)
        kd.set_distribution(None)
        fs.fit(model, x, y, verbose=0)


@pytest.mark.parametrize("part", ["optimizer", "metrics", "seed"])
def test_a_part_made_before_is_refused_by_its_name(part, rows):
    """An optimizer, metrics or a seed generator alone on one device are named, with their remedy."""
    x, y = rows
    adam, error = keras.optimizers.Adam(), keras.metrics.MeanAbsoluteError(name="error")
    drop = layers.Dropout(0.2, name="drop")
    set_to("data 4")
    model = keras.Sequential([drop, layers.Dense(1)] if part == "seed" else [layers.Dense(1)])
    model.compile(
        adam if part == "optimizer" else "adam",
        "mse",
        metrics=[error] if part == "metrics" else None,
    )
    name, remedy = {
        "optimizer": ("iterations", "call `compile` again, with a new optimizer"),
        "metrics": ("error", "call `compile` again, with a new optimizer and new metrics"),
        "seed": ("drop", "clone_model"),
    }[part]
    with pytest.raises(fs.StateError, match=rf"`[\w/]*{name}[\w/]*` lies on cpu:0") as caught:
        fs.fit(model, x, y, verbose=0)
    assert remedy in str(caught.value)
    if part != "seed":
        model.compile("adam", "mse", metrics=["mae"])
        fs.fit(model, x, y, verbose=0)


def test_single_batches_are_predicted_where_the_model_is(rows):
    """As in Keras, `predict_on_batch` does not divide its rows, so a model made elsewhere predicts."""
    x, _ = rows
    model = fs.Sequential([keras.Input((5,)), layers.Dense(8, name="hidden")])
    want = model.predict_on_batch(x[:6])
    for distribution in DISTRIBUTIONS:
        set_to(distribution)
        close(model.predict_on_batch(x[:6]), want)
    assert len(model.variables[0].value.sharding.device_set) == 1
    set_to("data 4")
    model = keras.models.clone_model(model)
    model = fs.Model(model.inputs, model.outputs)
    want = model.predict_on_batch(x[:6])
    set_to("data 8")
    close(model.predict_on_batch(x[:6]), want)


def test_one_device_is_as_good_as_none(rows):
    """A distribution over the one device that the model is on changes nothing."""
    x, y = rows
    ends = []
    for distribution in (None, data_parallel(1)):
        kd.set_distribution(None)
        keras.utils.set_random_seed(3)
        model = own_step()
        fs.fit(model, x, y, verbose=0)
        kd.set_distribution(distribution)
        ends.append((fs.fit(model, x, y, verbose=0).history, fs.predict(model, x, verbose=0)))
    close(*ends)


def test_another_mesh_of_the_same_devices_will_do(rows):
    """As in Keras, a model made under one mesh trains and predicts under another of its devices."""
    x, y = rows
    want = None
    for before, now in ((None, None), ("data 4", "model 2x2"), ("model 2x2", "data 4")):
        set_to(before)
        keras.utils.set_random_seed(3)
        model = own_step()
        set_to(now)
        got = fs.fit(model, x, y, verbose=0).history, fs.predict(model, x, verbose=0)
        want = want or got
        close(got, want)


@pytest.mark.parametrize("compiled", ["before", "after"])
@four_and_eight
def test_a_model_works_on_after_the_distribution_was_unset(distribution, compiled, rows):
    """Built on several devices, it trains, evaluates and predicts there with what one device gives."""
    x, y = rows
    ends = []
    for before in (None, distribution):
        set_to(before)
        keras.utils.set_random_seed(3)
        model = own_step()
        if compiled == "before":
            fs.fit(model, x, y, verbose=0)
        lay = model.hidden.kernel.value.sharding
        kd.set_distribution(None)
        if compiled == "after":
            model.compile("adam", "mse")
        ran = fs.fit(model, x, y, epochs=2, validation_data=(x, y), verbose=0)
        assert model.hidden.kernel.value.sharding.is_equivalent_to(lay, 2)
        seen = [ran.history, fs.evaluate(model, x, y, verbose=0), fs.predict(model, x, verbose=0)]
        state = fs.capture(model)
        fs.restore(model, state)
        seen += [fs.fit(model, x, y, verbose=0).history]
        ends.append(seen)
    close(*ends)
