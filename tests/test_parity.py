"""With the same seed and order of rows, fitstep's run is the run of `keras.Model.fit`."""

import copy
import itertools
import os
import pickle
import random
import subprocess
import sys

import jax
import keras
import numpy as np
import pytest
from keras import layers

import fitstep as fs

pytestmark = pytest.mark.usefixtures("equal_programs_compiled_once")

BATCH = 32
SGD = keras.optimizers.SGD


# --- models -----------------------------------------------------------------------------------


def sequential():
    return keras.Sequential([keras.Input((5,)), layers.Dense(4, "tanh"), layers.Dense(1)])


def regularised():
    """Batch normalisation, dropout, and every kind of extra loss of a layer."""
    x = keras.Input((5,))
    h = layers.Dense(4, kernel_regularizer="l2", bias_regularizer="l1")(x)
    h = layers.BatchNormalization(momentum=0.8)(h)
    h = layers.Dropout(0.3)(h)
    h = layers.Dense(4, "tanh", activity_regularizer="l2")(h)
    h = layers.GaussianNoise(0.1)(h)
    return keras.Model(x, layers.Dense(1, kernel_constraint="max_norm")(h))


@keras.saving.register_keras_serializable(package="fitstep_tests_parity")
class Subclass(keras.Model):
    """`add_loss`, a tracker of its own, dropout."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.hidden = layers.Dense(4, "tanh")
        self.norm = layers.BatchNormalization()
        self.drop = layers.Dropout(0.2)
        self.out = layers.Dense(1)

    def call(self, x, training=False):
        h = self.drop(self.norm(self.hidden(x), training=training), training=training)
        self.add_loss(0.01 * keras.ops.mean(h**2))
        return self.out(h)


def recurrent():
    return keras.Sequential(
        [
            keras.Input((5,)),
            layers.Reshape((5, 1)),
            layers.LSTM(3, recurrent_dropout=0.2),
            layers.Dense(1),
        ]
    )


def convolutional():
    return keras.Sequential(
        [
            keras.Input((5,)),
            layers.Reshape((5, 1)),
            layers.Conv1D(3, 3, activation="relu"),
            layers.Flatten(),
            layers.Dense(1),
        ]
    )


def classifier():
    return keras.Sequential(
        [keras.Input((5,)), layers.Dense(4, "tanh"), layers.Dense(1, "sigmoid")]
    )


def two_heads():
    x = keras.Input((5,))
    h = layers.Dense(4, "tanh")(x)
    return keras.Model(
        x,
        {
            "value": layers.Dense(1, name="value")(h),
            "sign": layers.Dense(1, "sigmoid", name="sign")(h),
        },
    )


# --- two runs ---------------------------------------------------------------------------------


class Log(keras.callbacks.Callback):
    """Every hook with its index and its logs, in the order of the calls."""

    def __init__(self):
        super().__init__()
        self.calls = []
        for phase in ("train", "test", "predict"):
            for end in ("begin", "end"):
                self._listen(f"on_{phase}_{end}", indexed=False)
                self._listen(f"on_{phase}_batch_{end}", indexed=True)
        self._listen("on_epoch_begin", indexed=True)
        self._listen("on_epoch_end", indexed=True)

    def _listen(self, name, *, indexed):
        def hook(index=None, logs=None):
            logs = {key: value for key, value in (logs or {}).items() if key != "outputs"}
            self.calls.append((name, index, {key: float(value) for key, value in logs.items()}))

        setattr(self, name, hook if indexed else lambda logs=None: hook(None, logs))


def run(owner, build, compiled, fitted, x, y):
    keras.utils.set_random_seed(13)
    model = build()
    model.compile(**{key: value() if callable(value) else value for key, value in compiled.items()})
    fitted = {key: value() if callable(value) else value for key, value in fitted.items()}
    fitted = {"epochs": 3, "batch_size": BATCH, "shuffle": False, "verbose": 0, **fitted}
    history = owner(model, x, y, **fitted)
    return history, model


def equal(got, want, exact):
    if exact:
        np.testing.assert_array_equal(got, want)
    else:
        # Another program, or the same fused another way, rounds elsewhere: a few units in the last
        # place of a float32 in each of nine steps; weights near 0 are held to those near 1.
        np.testing.assert_allclose(got, want, rtol=1e-6, atol=2e-7)


def equal_runs(build, compiled, fitted, x, y, *, exact=True):
    stock, stock_model = run(keras.Model.fit, build, compiled, fitted, x, y)
    ours, our_model = run(fs.fit, build, compiled, fitted, x, y)
    assert list(ours.history) == list(stock.history)
    assert ours.epoch == stock.epoch
    assert ours.params == stock.params
    for key, values in stock.history.items():
        equal(ours.history[key], values, exact)
    for got, want in zip(our_model.variables, stock_model.variables, strict=True):
        if "seed_generator" not in want.path:
            equal(np.asarray(got), np.asarray(want), exact)
    for got, want in zip(
        our_model.optimizer.variables, stock_model.optimizer.variables, strict=True
    ):
        equal(np.asarray(got), np.asarray(want), exact)
    return ours, our_model, stock_model


MODELS = {
    "sequential": (sequential, "mse"),
    "regularised functional": (regularised, "mse"),
    "subclass with add_loss": (Subclass, "mse"),
    "recurrent": (recurrent, "mae"),
    "convolutional": (convolutional, "huber"),
}


@pytest.mark.parametrize("kind", MODELS)
def test_models_of_every_kind_give_the_same_bits(rows, kind):
    """Three epochs with Adam, some with a partial batch: history, weights, moments and predictions are Keras's."""
    build, loss = MODELS[kind]
    x, y = (
        rows if kind in ("sequential", "regularised functional") else (rows[0][:64], rows[1][:64])
    )
    compiled = {
        "optimizer": lambda: keras.optimizers.Adam(0.01),
        "loss": loss,
        "metrics": lambda: ["mae"],
    }
    _, ours, stock = equal_runs(build, compiled, {}, x, y)
    np.testing.assert_array_equal(fs.predict(ours, x, verbose=0), stock.predict(x, verbose=0))
    assert fs.evaluate(ours, x, y, verbose=0) == stock.evaluate(x, y, verbose=0)
    got = fs.evaluate(ours, x, y, verbose=0, return_dict=True)
    assert got == stock.evaluate(x, y, verbose=0, return_dict=True)
    assert list(got) == list(stock.evaluate(x, y, verbose=0, return_dict=True))


PLAIN = {"optimizer": lambda: SGD(0.05, momentum=0.9), "loss": "mse", "metrics": lambda: ["mae"]}


def test_several_outputs_with_losses_weights_metrics_and_sample_weights_by_name(rows):
    """Dicts everywhere, sample weights for each output, validation with weights."""
    x, y = rows[0][:64], rows[1][:64]
    targets = {"value": y, "sign": (y > 0).astype("float32")}
    weights = {"value": np.linspace(0, 2, 64), "sign": np.linspace(1, 0, 64)}
    compiled = {
        "optimizer": "rmsprop",
        "loss": lambda: {"value": "mse", "sign": "binary_crossentropy"},
        "loss_weights": lambda: {"value": 0.7, "sign": 2.0},
        "metrics": lambda: {"value": ["mae"], "sign": ["accuracy"]},
        "weighted_metrics": lambda: {"value": ["mse"]},
    }
    fitted = {"sample_weight": weights, "validation_data": (x, targets, weights)}
    _, ours, stock = equal_runs(two_heads, compiled, fitted, x, targets)
    assert fs.evaluate(ours, x, targets, verbose=0) == stock.evaluate(x, targets, verbose=0)


@pytest.mark.parametrize(
    "fitted",
    [
        {"class_weight": {0: 0.5, 1: 3.0}, "validation_split": 0.25},
        {"validation_split": 0.3, "validation_freq": 2, "validation_batch_size": 7},
        {"validation_split": 0.5, "validation_steps": 1, "validation_freq": [1, 3]},
        {"epochs": 5, "initial_epoch": 2},
        {"batch_size": None, "steps_per_epoch": 2},
    ],
    ids=["class weights", "every second epoch", "steps and epochs given", "initial epoch", "steps"],
)
def test_arguments_of_fit_mean_what_they_mean_in_keras(rows, fitted):
    """Class weights, validation by split, steps and frequency, first epoch, steps for an epoch."""
    x, y = rows
    compiled = {
        "optimizer": lambda: SGD(0.1),
        "loss": "binary_crossentropy",
        "metrics": lambda: ["accuracy"],
    }
    equal_runs(classifier, compiled, fitted, x, (y > 0).astype("float32"))


def test_metrics_with_state_of_any_shape(rows):
    """F1 as a number and by class, and AUC, in training and validation, reset at each epoch."""
    x = rows[0][:40]
    y = np.eye(3, dtype="float32")[np.arange(40) % 3]
    compiled = {
        "optimizer": "adam",
        "loss": "categorical_crossentropy",
        "metrics": lambda: [
            keras.metrics.F1Score(average="macro", name="f1"),
            keras.metrics.F1Score(average=None, name="each"),
            keras.metrics.AUC(name="auc", num_thresholds=20),
        ],
    }
    build = lambda: keras.Sequential([keras.Input((5,)), layers.Dense(3, "softmax")])  # noqa: E731
    history, *_ = equal_runs(build, compiled, {"validation_split": 0.2}, x, y)
    assert np.shape(history.history["each"][0]) == (3,)


@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
def test_dtype_policies(rows, policy):
    """Half precision of both kinds, with its scaled loss, is that of Keras."""
    x, y = rows[0][:64], rows[1][:64]

    def build():
        return keras.Sequential(
            [
                keras.Input((5,)),
                layers.Dense(4, "tanh", dtype=policy),
                layers.BatchNormalization(dtype=policy),
                layers.Dense(1, dtype="float32"),
            ]
        )

    optimizer = (
        (
            lambda: keras.optimizers.LossScaleOptimizer(
                keras.optimizers.Adam(0.01), dynamic_growth_steps=4
            )
        )
        if policy == "mixed_float16"
        else "adam"
    )
    compiled = {"optimizer": optimizer, "loss": "mse", "auto_scale_loss": False}
    _, model, _ = equal_runs(build, compiled, {}, x, y)
    if policy == "mixed_float16":
        assert float(model.optimizer.dynamic_scale) != 2.0**15  # it has moved in six steps


@pytest.fixture(scope="module")
def plain_run():
    """Stock Keras's run of the plain model on the rows, which several tests hold theirs against."""
    from tests.conftest import rows

    return run(keras.Model.fit, sequential, PLAIN, {}, *rows.__wrapped__())


@pytest.mark.parametrize(
    ("spe", "fitted"), [(2, {}), (1, {"steps_per_execution": 3}), (2, {"steps_per_execution": 16})]
)
def test_steps_an_execution_compiled_in_or_asked_for(rows, plain_run, fitted, spe):
    """However many steps share an execution, the numbers are those of one step after another."""
    x, y = rows
    stock, stock_model = plain_run
    compiled = {**PLAIN, "steps_per_execution": spe}
    ours, model = run(fs.fit, sequential, compiled, fitted, x, y)
    assert list(ours.history) == list(stock.history)
    for key, values in stock.history.items():
        equal(ours.history[key], values, exact=True)
    for got, want in zip(model.get_weights(), stock_model.get_weights(), strict=True):
        equal(got, want, exact=True)
    assert int(model.optimizer.iterations) == 9


@pytest.mark.parametrize("how", [{"run_eagerly": True}, {"jit_compile": False}])
def test_without_a_compiler(rows, how):
    """Step by step on concrete values: the numbers of Keras in the same mode."""
    x, y = rows
    equal_runs(
        sequential, {**PLAIN, **how}, {"validation_split": 0.2, "epochs": 1}, x, y, exact=False
    )


# --- callbacks --------------------------------------------------------------------------------


def schedule(epoch, rate):
    return rate * 0.5 if epoch else rate


CALLBACKS = {
    "reduce on plateau": lambda path: keras.callbacks.ReduceLROnPlateau(
        "loss", min_delta=10.0, patience=1
    ),
    "scheduler": lambda path: keras.callbacks.LearningRateScheduler(schedule),
    "early stopping": lambda path: keras.callbacks.EarlyStopping(
        "val_loss", min_delta=10.0, patience=2, restore_best_weights=True
    ),
    "swap averaged weights": lambda path: keras.callbacks.SwapEMAWeights(swap_on_epoch=True),
    "stop on NaN": lambda path: keras.callbacks.TerminateOnNaN(),
}


@pytest.mark.parametrize("kind", CALLBACKS)
def test_callbacks_of_keras_that_act_on_the_run(rows, kind, tmp_path):
    """Learning rates, stopping and weights that a callback changes are those of the Keras run."""
    x, y = rows
    if kind == "stop on NaN":
        y = y.copy()
        y[50] = np.nan
    averaged = kind == "swap averaged weights"
    compiled = {**PLAIN, "optimizer": lambda: SGD(0.05, use_ema=averaged, ema_momentum=0.5)}
    fitted = {
        "epochs": 4,
        "validation_split": 0.2,
        "callbacks": lambda: [CALLBACKS[kind](tmp_path)],
    }
    equal_runs(sequential, compiled, fitted, x, y)


def test_schedules_of_the_learning_rate_inside_the_optimizer(rows):
    """A schedule counts the steps as in Keras, and so does gradient accumulation."""
    x, y = rows
    for optimizer in (
        lambda: SGD(keras.optimizers.schedules.CosineDecay(0.1, 7)),
        lambda: keras.optimizers.Adam(
            0.01, gradient_accumulation_steps=2, clipnorm=0.5, weight_decay=0.1
        ),
    ):
        equal_runs(sequential, {"optimizer": optimizer, "loss": "mse"}, {}, x, y)


def test_callbacks_of_keras_that_write_files(rows, tmp_path):
    """CSVLogger, ModelCheckpoint and BackupAndRestore leave the files that Keras leaves."""
    x, y = rows
    made = []
    for name, owner in (("stock", keras.Model.fit), ("ours", fs.fit)):
        folder = tmp_path / name
        folder.mkdir()
        callbacks = [
            keras.callbacks.CSVLogger(str(folder / "log.csv")),
            keras.callbacks.ModelCheckpoint(
                str(folder / "best.keras"), "val_loss", save_best_only=True
            ),
            keras.callbacks.ModelCheckpoint(
                str(folder / "{epoch}-{batch}.weights.h5"), save_weights_only=True, save_freq=2
            ),
            keras.callbacks.BackupAndRestore(str(folder / "backup"), delete_checkpoint=False),
        ]
        _, model = run(
            owner, sequential, PLAIN, {"callbacks": callbacks, "validation_split": 0.3}, x, y
        )
        made.append((folder, model))
    (stock, _), (ours, model) = made
    assert sorted(str(p.relative_to(ours)) for p in ours.rglob("*")) == sorted(
        str(p.relative_to(stock)) for p in stock.rglob("*")
    )
    assert (ours / "log.csv").read_text() == (stock / "log.csv").read_text()
    for name in (path.name for path in ours.glob("*.weights.h5")):
        weights = []
        for folder in (stock, ours):
            model.load_weights(folder / name)
            weights.append(model.get_weights())
        for got, want in zip(*weights, strict=True):
            np.testing.assert_array_equal(got, want)
    best = [keras.models.load_model(folder / "best.keras") for folder in (stock, ours)]
    for got, want in zip(best[1].variables, best[0].variables, strict=True):
        np.testing.assert_array_equal(got, want)
    for got, want in zip(best[1].optimizer.variables, best[0].optimizer.variables, strict=True):
        np.testing.assert_array_equal(got, want)


def test_a_backup_is_taken_up_where_it_was_left(rows, tmp_path):
    """A fit that failed in its third epoch goes on from the backup to what an unbroken run gives."""
    x, y = rows
    whole, whole_model = run(fs.fit, sequential, PLAIN, {"epochs": 4}, x, y)

    def fail(epoch, logs):
        if epoch == 2:
            raise OSError("pulled the plug")

    def backup():
        return keras.callbacks.BackupAndRestore(str(tmp_path / "backup"))

    broken = {
        "epochs": 4,
        "callbacks": lambda: [backup(), keras.callbacks.LambdaCallback(on_epoch_begin=fail)],
    }
    with pytest.raises(OSError, match="pulled"):
        run(fs.fit, sequential, PLAIN, broken, x, y)
    history, model = run(
        fs.fit, sequential, PLAIN, {"epochs": 4, "callbacks": lambda: [backup()]}, x, y
    )
    assert history.epoch == [2, 3]
    np.testing.assert_array_equal(history.history["loss"], whole.history["loss"][2:])
    for got, want in zip(model.get_weights(), whole_model.get_weights(), strict=True):
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize(
    ("compiled", "fitted"),
    [
        ({}, {"validation_split": 0.3, "validation_batch_size": 8, "epochs": 2}),
        ({"steps_per_execution": 2}, {"validation_split": 0.1, "epochs": 2}),
        ({}, {"initial_epoch": 1, "epochs": 2}),
        ({"run_eagerly": True}, {"epochs": 1}),
    ],
    ids=["validation", "two steps an execution", "initial epoch", "eager"],
)
def test_hooks_are_called_in_keras_s_order_with_its_numbers_and_logs(rows, compiled, fitted):
    """Every hook of a callback hears the same index and the same logs at the same place."""
    x, y = rows
    logs = []
    for owner in (keras.Model.fit, fs.fit):
        log = Log()
        run(owner, sequential, {**PLAIN, **compiled}, {**fitted, "callbacks": [log]}, x, y)
        logs.append(log.calls)
    stock, ours = logs
    if compiled.get("steps_per_execution") == 2:
        # Of one step of the validation Keras says that it was the second: this is fitstep's to mend.
        stock = [(n, 0 if (n, i) == ("on_test_batch_end", 1) else i, got) for n, i, got in stock]
    assert [call[:2] for call in ours] == [call[:2] for call in stock]
    for (name, index, got), (_, _, want) in zip(ours, stock, strict=True):
        assert list(got) == list(want), (name, index)
        np.testing.assert_allclose(
            list(got.values()), list(want.values()), rtol=1e-6, err_msg=f"{name} {index}"
        )


def test_hooks_of_evaluate_and_predict_are_keras_s(rows):
    """`evaluate` and `predict` call their hooks as Keras does, outputs included."""
    x, y = rows
    model = sequential()
    model.compile("sgd", "mse", metrics=["mae"])
    logs, outputs = [], []
    for owner in (keras.Model, fs):
        log, seen = Log(), []
        keep = keras.callbacks.LambdaCallback()
        keep.on_predict_batch_end = lambda batch, logs=None, seen=seen: seen.append(logs["outputs"])
        owner.evaluate(model, x, y, batch_size=BATCH, verbose=0, callbacks=[log])
        owner.predict(model, x, batch_size=BATCH, verbose=0, callbacks=[log, keep])
        logs.append(log.calls)
        outputs.append(seen)
    assert logs[1] == logs[0]
    for got, want in zip(*outputs, strict=True):
        np.testing.assert_array_equal(np.asarray(got), np.asarray(want))


class Nested(keras.callbacks.Callback):
    """Evaluates and predicts after each step."""

    def __init__(self, owner, x, y):
        super().__init__()
        self.owner, self.x, self.y, self.heard = owner, x, y, []

    def on_train_batch_end(self, batch, logs=None):
        self.heard.append(self.owner.evaluate(self.model, self.x, self.y, verbose=0)[0])
        self.owner.predict(self.model, self.x, verbose=0)


OWNERS = pytest.mark.parametrize("owner", [fs, keras.Model], ids=["fitstep", "Keras"])


@OWNERS
def test_a_nested_evaluate_changes_no_number(rows, plain_run, owner):
    """An `evaluate` in a callback, ours or Keras's, changes no history and no weight."""
    x, y = rows
    nested = Nested(owner, x[:5], y[:5])
    history, model = run(fs.fit, sequential, PLAIN, {"callbacks": [nested]}, x, y)
    assert len(nested.heard) == 9
    assert history.history == plain_run[0].history
    for got, want in zip(model.get_weights(), plain_run[1].get_weights(), strict=True):
        np.testing.assert_array_equal(got, want)
    made = keras.Model.predict(model, x[:5], verbose=0)
    np.testing.assert_allclose(nested.heard[-1], np.mean((made - y[:5]) ** 2), rtol=1e-5)


@OWNERS
def test_after_a_nested_evaluate_the_metrics_read_true(rows, owner):
    """Another callback reads the epoch's own metrics; after Keras's own run, from the next hook."""
    x, y = rows
    read = []

    class Reader(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            self.logs = logs["loss"]
            read.append(("end", batch, float(self.logs), float(self.model.metrics[0].result())))

        def on_train_batch_begin(self, batch, logs=None):
            if batch:
                result = float(self.model.metrics[0].result())
                read.append(("begin", batch, float(self.logs), result))

    fitted = {"epochs": 1, "callbacks": [Nested(owner, x[:5], y[:5]), Reader()]}
    run(fs.fit, sequential, PLAIN, fitted, x, y)
    assert [entry[:2] for entry in read] == [
        ("end", 0),
        ("begin", 1),
        ("end", 1),
        ("begin", 2),
        ("end", 2),
    ]
    for place, batch, logged, result in read:
        if owner is fs or place == "begin":
            assert result == pytest.approx(logged, rel=1e-6), (place, batch)


@OWNERS
def test_a_nested_evaluate_is_no_write_to_the_metrics(rows, owner):
    """With batch hooks that do nothing, nobody is told of a write to a metric that nobody made."""
    x, y = rows
    idle = keras.callbacks.LambdaCallback(on_train_batch_begin=lambda batch, logs: None)
    nested = Nested(owner, x[:5], y[:5])
    run(
        fs.fit, sequential, PLAIN, {"epochs": 1, "callbacks": [nested, idle]}, x, y
    )  # warnings are errors
    assert len(nested.heard) == 3


# --- our classes beside their twins -----------------------------------------------------------


def ours_functional():
    x = keras.Input((5,))
    return fs.Model(x, layers.Dense(1)(layers.Dropout(0.2)(layers.Dense(4)(x))))


def keras_functional():
    x = keras.Input((5,))
    return keras.Model(x, layers.Dense(1)(layers.Dropout(0.2)(layers.Dense(4)(x))))


def ours_sequential():
    return fs.Sequential([keras.Input((5,)), layers.Dense(4), layers.Dense(1)])


def keras_sequential():
    return keras.Sequential([keras.Input((5,)), layers.Dense(4), layers.Dense(1)])


class Body:
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.hidden = layers.Dense(4)
        self.drop = layers.Dropout(0.2)
        self.out = layers.Dense(1)

    def call(self, x, training=False):
        return self.out(self.drop(self.hidden(x), training=training))


@keras.saving.register_keras_serializable(package="fitstep_tests_parity")
class OurSubclass(Body, fs.Model):
    pass


@keras.saving.register_keras_serializable(package="fitstep_tests_parity")
class KerasSubclass(Body, keras.Model):
    pass


TWINS = {
    "functional": (ours_functional, keras_functional),
    "Sequential": (ours_sequential, keras_sequential),
    "subclass": (OurSubclass, KerasSubclass),
}


@pytest.mark.parametrize("kind", TWINS)
def test_our_classes_do_what_their_twins_do(rows, kind, tmp_path):
    """Fit, evaluate, predict, batch methods, save, load, clone, pickle and deepcopy, step for step."""
    x, y = rows
    ends = []
    for place, build in enumerate(TWINS[kind]):
        keras.utils.set_random_seed(3)
        model = build()
        model.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"])
        seen = [model.fit(x[:32], y[:32], epochs=2, shuffle=False, verbose=0).history]
        seen += [model.evaluate(x[:32], y[:32], verbose=0), model.predict(x, verbose=0)]
        seen += [model.train_on_batch(x[:9], y[:9], return_dict=True)]
        seen += [model.train_on_batch(x[9:18], y[9:18]), model.test_on_batch(x[:9], y[:9])]
        seen += [model.predict_on_batch(x[:3]), model.get_weights()]
        path = tmp_path / f"{place}.keras"
        model.save(path)
        others = [
            keras.models.load_model(path),
            pickle.loads(pickle.dumps(model)),
            copy.deepcopy(model),
        ]
        others.append(keras.models.clone_model(model))
        others[-1].set_weights(model.get_weights())
        for other in others:
            # `clone_model` makes a `keras.Sequential` of every kind of Sequential.
            known = (
                keras.Sequential if other is others[-1] and kind == "Sequential" else type(model)
            )
            assert isinstance(other, known), type(other)
            np.testing.assert_array_equal(other.predict(x, verbose=0), model.predict(x, verbose=0))
        seen += [[np.asarray(v) for v in other.optimizer.variables] for other in others[:3]]
        seen += [others[0].fit(x[:32], y[:32], shuffle=False, verbose=0).history]
        seen += [model.to_json().count("Dense"), len(model.layers), model.count_params()]
        ends.append(seen)
    ours, stock = ends
    assert len(ours) == len(stock)
    for got, want in zip(ours, stock, strict=True):
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7), got, want)


LOAD = """
import json, sys
{imports}
import numpy as np
model = keras.models.load_model(sys.argv[1])
x = np.load(sys.argv[2])
history = model.fit(x, x[:, :1], epochs=1, shuffle=False, verbose=0).history
print(json.dumps([type(model).__name__, isinstance(model, fitstep.Trainer), history["loss"]]))
"""


@pytest.mark.parametrize(
    "imports",
    ["import keras\nimport fitstep", "import fitstep\nimport keras"],
    ids=["Keras first", "fitstep first"],
)
def test_a_saved_model_loads_in_a_fresh_process_with_either_order_of_imports(
    rows, imports, tmp_path
):
    """A functional fs.Model in a file is an fs.Model again, with its optimizer, and goes on."""
    import json

    x, _ = rows
    inputs = keras.Input((5,))
    model = fs.Model(inputs, layers.Dense(1)(layers.Dense(4)(inputs)))
    model.compile(keras.optimizers.Adam(0.01), "mse")
    model.fit(x, x[:, :1], shuffle=False, verbose=0)
    model.save(tmp_path / "m.keras")
    np.save(tmp_path / "x.npy", x)
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    done = subprocess.run(
        [sys.executable, "-c", LOAD.format(imports=imports), tmp_path / "m.keras", tmp_path / "x.npy"],
        env=env, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    expected = model.fit(x, x[:, :1], epochs=1, shuffle=False, verbose=0).history["loss"]
    assert json.loads(done.stdout) == [
        type(model).__name__,
        True,
        pytest.approx(expected, rel=1e-6),
    ]


def test_the_methods_take_keras_s_positions_too(rows):
    """`fit(x, y, 32, 2, 0)` and the like mean for an `fs.Model` what they mean for Keras's."""
    x, y = rows
    model = ours_sequential()
    model.compile("sgd", "mse")
    history = model.fit(x, y, 35, 2, 0)
    assert history.epoch == [0, 1]
    assert int(model.optimizer.iterations) == 4
    assert model.evaluate(x, y, 35, 0) == keras.Model.evaluate(model, x, y, 35, 0)
    np.testing.assert_array_equal(model.predict(x, 35, 0), keras.Model.predict(model, x, 35, 0))


def test_functional_and_subclassed_models_live_in_one_process(rows):
    """Making a functional `fs.Model` changes nothing for classes that are derived from it later."""
    x, y = rows
    first = ours_functional()

    class Later(fs.Model):
        def __init__(self):
            super().__init__()
            self.dense = layers.Dense(1)

        def call(self, x):
            return self.dense(x)

    class Graph(fs.Model):
        """Builds its graph in its constructor."""

        def __init__(self):
            inputs = keras.Input((5,))
            super().__init__(inputs, layers.Dense(1)(inputs))

    for model in (Later(), Graph(), ours_functional(), first):
        model.compile("sgd", "mse")
        assert np.isfinite(model.fit(x, y, batch_size=70, verbose=0).history["loss"][0])
        assert isinstance(model, fs.Model)
        assert model.predict(x, verbose=0).shape == (70, 1)


def test_our_models_nest_in_keras_models_and_hold_them(rows):
    """A model of ours as a layer of Keras's, and the other way round, trains as the flat one."""
    x, y = rows

    def flat():
        return keras.Sequential([keras.Input((5,)), layers.Dense(4), layers.Dense(1)])

    def nested():
        inputs = keras.Input((5,))
        inner = fs.Sequential([keras.Input((5,)), layers.Dense(4)])
        return keras.Model(inputs, layers.Dense(1)(inner(inputs)))

    def around():
        inputs = keras.Input((5,))
        inner = keras.Sequential([keras.Input((5,)), layers.Dense(4)])
        return fs.Model(inputs, layers.Dense(1)(inner(inputs)))

    _, expected = run(keras.Model.fit, flat, PLAIN, {"epochs": 2, "batch_size": 35}, x, y)
    for build in (nested, around):
        model = build()
        _, model = run(fs.fit, build, PLAIN, {"epochs": 2, "batch_size": 35}, x, y)
        for got, want in zip(model.get_weights(), expected.get_weights(), strict=True):
            equal(got, want, exact=False)


# --- randomness -------------------------------------------------------------------------------


def shuffled(x, y, seed, **kwargs):
    keras.utils.set_random_seed(seed)
    model = ours_functional()
    model.compile("sgd", "mse")
    return fs.fit(model, x, y, batch_size=35, epochs=2, verbose=0, **kwargs).history[
        "loss"
    ], model.get_weights()


def test_a_seed_gives_the_same_shuffled_run_and_another_seed_another(rows):
    """`set_random_seed` fixes order, dropout and weights; without shuffling the run differs."""
    first, again, other = (shuffled(*rows, seed) for seed in (4, 4, 5))
    assert first[0] == again[0]
    for got, want in zip(first[1], again[1], strict=True):
        np.testing.assert_array_equal(got, want)
    assert first[0] != other[0]
    assert shuffled(*rows, 4, shuffle=False)[0] != first[0]


def test_other_generators_are_left_alone(rows):
    """NumPy's and Python's global generators stand where they stood, shuffling or not."""
    x, y = rows
    model = sequential()
    model.compile("sgd", "mse")
    np.random.seed(3)  # noqa: NPY002 - the global generator is what is watched
    random.seed(3)
    before = np.random.get_state()[1].copy(), np.random.get_state()[2], random.getstate()  # noqa: NPY002
    for shuffle in (True, "batch", False):
        fs.fit(model, x, y, epochs=2, verbose=0, shuffle=shuffle)
    fs.evaluate(model, x, y, verbose=0)
    fs.predict(model, x, verbose=0)
    after = np.random.get_state()[1], np.random.get_state()[2], random.getstate()  # noqa: NPY002
    np.testing.assert_array_equal(after[0], before[0])
    assert after[1:] == before[1:]


def test_a_run_does_not_depend_on_numpy_s_global_generator(rows):
    """Code of the user's that draws from `np.random` between two runs changes neither of them."""
    losses = []
    for draws in (0, 5):
        keras.utils.set_random_seed(4)
        model = sequential()
        model.compile("sgd", "mse")
        np.random.random(draws)  # noqa: NPY002
        losses.append(fs.fit(model, *rows, epochs=2, verbose=0).history["loss"])
    assert losses[0] == losses[1]


def test_shuffling_visits_every_row_once_an_epoch_in_new_orders():
    """With `shuffle=True` each epoch is another permutation of the rows; `"batch"` keeps batches."""
    x = np.arange(12, dtype="float32")[:, None]
    for shuffle in (True, "batch"):
        seen = []

        class Spy(keras.Model):
            def __init__(self):
                super().__init__()
                self.dense = layers.Dense(1)

            def call(self, x, training=False):
                return self.dense(x)

            def train_step(self, state, data, seen=seen):
                jax.debug.callback(
                    lambda rows: seen.append(rows[:, 0].tolist()), data[0], ordered=True
                )
                return super().train_step(state, data)

        model = Spy()
        model(x[:1])
        model.compile(SGD(0.0), "mse")
        fs.fit(model, x, x, batch_size=4, epochs=3, shuffle=shuffle, verbose=0)
        jax.effects_barrier()
        epochs = [seen[i : i + 3] for i in (0, 3, 6)]
        for epoch in epochs:
            assert sorted(itertools.chain(*epoch)) == list(range(12))
            if shuffle == "batch":
                assert [sorted(batch) for batch in epoch] == [
                    [0, 1, 2, 3],
                    [4, 5, 6, 7],
                    [8, 9, 10, 11],
                ]
        assert epochs[0] != epochs[1] != epochs[2]


def test_a_functional_model_is_made_once_and_named_as_in_keras(monkeypatch):
    """`fs.Model(inputs, outputs)` runs one constructor, and counts names as Keras's own does."""
    x = keras.Input((2,))
    functional = next(
        cls for cls in type(keras.Model(x, x)).__mro__ if cls.__name__ == "Functional"
    )
    constructor, made = functional.__init__, []

    def count(self, *args, **kwargs):
        made.append(type(self))
        constructor(self, *args, **kwargs)

    monkeypatch.setattr(functional, "__init__", count)
    names = []
    for cls in (keras.Model, fs.Model):
        keras.utils.clear_session()
        x = keras.Input((2,))
        models = [cls(x, layers.Dense(1)(x)), cls(x, layers.Dense(1)(x)), cls(x, x, name="own")]
        names.append([model.name for model in models])
    assert names[0] == names[1] == ["functional", "functional_1", "own"]
    assert len(made) == 6
