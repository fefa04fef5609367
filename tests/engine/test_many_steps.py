"""Many steps in one execution: the same bits as one at a time, in a few programs."""

import gc
import weakref

import jax
import keras
import numpy as np
import pytest
from keras import layers

import fitstep as fs
from fitstep.engine import _loop, _passes, _runner

ROWS = 32 * 8 + 5  # a remainder for every K below, and a partial batch


@pytest.fixture
def steps_together(monkeypatch):
    """Sets how many steps share an execution."""

    def force(count):
        for module in (_runner, _loop):
            monkeypatch.setattr(module, "MOST_STEPS", count)

    return force


def _dense():
    return keras.Sequential(
        [
            keras.Input((6,)),
            layers.Dense(16, "relu"),
            layers.Dense(8, "gelu", kernel_regularizer="l2"),
            layers.Dense(1),
        ]
    )


def _normalised():
    return keras.Sequential(
        [
            keras.Input((6,)),
            layers.Dense(8),
            layers.BatchNormalization(),
            layers.Activation("silu"),
            layers.LayerNormalization(),
            layers.Dropout(0.3),
            layers.GaussianNoise(0.1),
            layers.Dense(1),
        ]
    )


def _recurrent(cell):
    return lambda: keras.Sequential(
        [keras.Input((6,)), layers.Reshape((3, 2)), cell(5, dropout=0.2), layers.Dense(1)]
    )


def _attention():
    inputs = keras.Input((6,))
    x = layers.Dense(8)(layers.Reshape((3, 2))(inputs))
    x = layers.LayerNormalization()(x + layers.MultiHeadAttention(2, 4, dropout=0.1)(x, x))
    return keras.Model(inputs, layers.Dense(1)(layers.GlobalAveragePooling1D()(x)))


def _two_outputs():
    inputs = keras.Input((6,))
    x = layers.Dense(8, "tanh")(inputs)
    return keras.Model(inputs, {"a": layers.Dense(1)(x), "b": layers.Dense(1, "sigmoid")(x)})


class _OwnStep(keras.Sequential):
    """The step of Keras's guide, with a log that is no metric."""

    def train_step(self, state, data):
        x, y, weight = keras.utils.unpack_x_y_sample_weight(data)

        def loss_of(trainable, non_trainable):
            outputs, updated = self.stateless_call(trainable, non_trainable, x, training=True)
            return self.compute_loss(x, y, outputs, weight), (outputs, updated)

        trainable, non_trainable, optimizer, metrics = state
        (loss, (outputs, non_trainable)), gradients = jax.value_and_grad(loss_of, has_aux=True)(
            trainable, non_trainable
        )
        trainable, optimizer = self.optimizer.stateless_apply(optimizer, gradients, trainable)
        logs, new_metrics = {}, []
        start = 0
        for metric in self.metrics:
            end = start + len(metric.variables)
            own = metrics[start:end]
            if metric.name == "loss":
                own = metric.stateless_update_state(own, loss)
            else:
                own = metric.stateless_update_state(own, y, outputs)
            logs[metric.name] = metric.stateless_result(own)
            new_metrics += own
            start = end
        return logs | {"norm": jax.numpy.sqrt(sum((g**2).sum() for g in gradients))}, (
            trainable,
            non_trainable,
            optimizer,
            new_metrics,
        )


MODELS = {
    "dense": _dense,
    "normalised": _normalised,
    "lstm": _recurrent(layers.LSTM),
    "gru": _recurrent(layers.GRU),
    "attention": _attention,
    "two outputs": _two_outputs,
    "own step": lambda: _OwnStep([keras.Input((6,)), layers.Dense(4, "tanh"), layers.Dense(1)]),
}


def _trained(build, **options):
    keras.utils.set_random_seed(3)
    model = build()
    two = len(model.outputs) == 2
    loss = {"a": "mse", "b": "binary_crossentropy"} if two else "mse"
    metrics = {"a": ["mae"], "b": [keras.metrics.AUC(name="auc")]} if two else ["mae"]
    if not two and not isinstance(model, _OwnStep):
        metrics.append(keras.metrics.RootMeanSquaredError())
    model.compile(keras.optimizers.AdamW(1e-3, use_ema=True), loss, metrics=metrics)
    generator = np.random.default_rng(0)
    x = generator.normal(size=(ROWS, 6)).astype("float32")
    y = (x[:, :1] > 0).astype("float32")
    weight = generator.uniform(size=ROWS).astype("float32")
    y = {"a": x[:, 1:2], "b": y} if two else y
    held_out = (x[:70], {k: v[:70] for k, v in y.items()} if two else y[:70])
    history = fs.fit(
        model,
        x,
        y,
        sample_weight=None if isinstance(model, _OwnStep) else weight,
        epochs=3,
        verbose=0,
        validation_data=held_out,
        **options,
    ).history
    predicted = jax.tree.leaves(fs.predict(model, x, verbose=0))
    arrays = [v.numpy() for v in [*model.variables, *model.optimizer.variables]]
    return history, [*arrays, *predicted]


@pytest.fixture(scope="module")
def one_at_a_time():
    """What the models become with one step in an execution; computed once."""
    kept: dict = {}

    def reference(name, **options):
        if name not in kept:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(_loop, "MOST_STEPS", 1)
                kept[name] = _trained(MODELS[name], **options)
        return kept[name]

    return reference


def _assert_same_bits(ours, reference):
    assert ours[0] == reference[0]
    for a, b in zip(ours[1], reference[1], strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.usefixtures("equal_programs_compiled_once")
@pytest.mark.parametrize("count", [2, 7, 16, None])
@pytest.mark.parametrize("name", MODELS)
def test_any_number_of_steps_in_an_execution_gives_the_same_bits(
    name, count, one_at_a_time, steps_together
):
    """History, weights, optimizer and predictions, with remainders, a partial batch and shuffling."""
    if count is not None:
        steps_together(count)
    _assert_same_bits(_trained(MODELS[name]), one_at_a_time(name))


@pytest.mark.parametrize("name", ["dense", "normalised", "own step"])
def test_the_same_bits_on_four_devices(name, steps_together):
    """Under `DataParallel`, whose devices share each batch's rows."""
    devices = keras.distribution.list_devices()[:4]
    keras.distribution.set_distribution(keras.distribution.DataParallel(devices=devices))
    steps_together(1)
    reference = _trained(MODELS[name])
    steps_together(7)
    _assert_same_bits(_trained(MODELS[name]), reference)


@pytest.mark.parametrize("stride", [2, 7, 16, 100])
def test_a_number_of_steps_between_the_calls_changes_no_bit(stride, one_at_a_time):
    """`steps_per_execution` sets how often callbacks hear, and nothing else."""
    ours = _trained(MODELS["normalised"], steps_per_execution=stride)
    _assert_same_bits(ours, one_at_a_time("normalised"))


def test_a_convolution_on_a_cpu_runs_alone_and_keeps_its_bits(monkeypatch):
    """Its steps are not put into a loop, whatever is asked for; the loss is that of one at a time."""

    def fitted(**options):
        keras.utils.set_random_seed(1)
        model = keras.Sequential(
            [keras.Input((8, 8, 1)), layers.Conv2D(2, 3), layers.Flatten(), layers.Dense(1)]
        )
        model.compile("adam", "mse")
        x = np.random.default_rng(0).normal(size=(70, 8, 8, 1)).astype("float32")
        return model, fs.fit(model, x, x[:, 0, 0], verbose=0, batch_size=4, **options).history

    _, reference = fitted()
    for stride in (4, 16):
        model, history = fitted(steps_per_execution=stride)
        assert history == reference
        assert {one.steps for one in fs.explain(model).programs} == {1}
        assert "convolution" in fs.explain(model).choices[0].reason
    keras.utils.set_random_seed(1)


class Waits(keras.callbacks.Callback):
    """Has a batch hook, for which each step waits."""

    def on_train_batch_end(self, batch, logs=None):
        pass


def _fit_dense(*callbacks, rows=ROWS, **options):
    keras.utils.set_random_seed(2)
    model = _dense()
    model.compile("sgd", "mse", metrics=["mae"])
    x = np.random.default_rng(0).normal(size=(rows, 6)).astype("float32")
    y = options.pop("y", x[:, :1])
    history = fs.fit(model, x, y, callbacks=list(callbacks), verbose=0, **options)
    return model, history


@pytest.mark.usefixtures("equal_programs_compiled_once")
@pytest.mark.parametrize("batch_size", [2, 3, 4])
@pytest.mark.parametrize("features", [8, 16])
def test_a_model_that_is_smaller_than_a_kernel_keeps_its_bits(features, batch_size, steps_together):
    """A few hundred bytes a step: XLA would compile the whole loop in another way than the step."""
    x = np.random.default_rng(0).integers(0, 256, (batch_size * 7 + 1, features)).astype("uint8")

    def bits(count):
        steps_together(count)
        keras.utils.set_random_seed(3)
        scaled = layers.Rescaling(1 / 255)
        model = keras.Sequential([keras.Input((features,), dtype="uint8"), scaled, layers.Dense(1)])
        model.compile("sgd", "mse")
        outputs = fs.predict(model, x, batch_size=batch_size, verbose=0)
        logs = fs.evaluate(model, x, x[:, :1] / 255, batch_size=batch_size, verbose=0)
        fs.fit(model, x, x[:, :1] / 255, batch_size=batch_size, verbose=0)
        return [outputs, logs, *model.get_weights()]

    for a, b in zip(bits(7), bits(1), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.usefixtures("equal_programs_compiled_once")
@pytest.mark.parametrize("frozen", [False, True])
def test_the_penalty_of_weights_that_stay_as_they_are_keeps_its_bits(frozen, steps_together):
    """In an evaluation, or of a frozen layer: it does not depend on the step, and is part of it."""
    x = (np.random.default_rng(27).random((12, 16, 1)) * 255).astype("uint8")
    y = np.random.default_rng(28).random((12, 1)).astype("float32")

    def bits(count):
        steps_together(count)
        keras.utils.set_random_seed(4)
        first = layers.Dense(3, "relu", kernel_regularizer="l2", trainable=not frozen)
        inputs = keras.Input((16, 1), dtype="uint8")
        model = keras.Sequential([inputs, first, layers.Flatten(), layers.Dense(1)])
        model.compile(keras.optimizers.SGD(1e-6), "mse", metrics=["mse", "mae"])
        losses = [fs.evaluate(model, x, y, batch_size=1, verbose=0)]
        losses += fs.fit(model, x, y, batch_size=1, epochs=2, verbose=0).history.values()
        return [*losses, *model.get_weights()]

    for a, b in zip(bits(7), bits(1), strict=True):
        np.testing.assert_array_equal(a, b)


def test_one_trace_serves_one_step_and_many():
    """A fit that waits for each step after one that does not runs no Python of the model's again."""
    calls = []

    class Noted(keras.Sequential):
        def train_step(self, state, data):
            calls.append(data[0].shape)
            return super().train_step(state, data)

    model = Noted([keras.Input((6,)), layers.Dense(4, "relu"), layers.Dense(1)])
    model.compile("adam", "mse")
    x = np.ones((64, 6), "float32")
    fs.fit(model, x, x[:, :1], verbose=0)
    assert len(calls) == 1
    fs.fit(model, x, x[:, :1], verbose=0, callbacks=[Waits()])
    fs.fit(model, x, x[:, :1], verbose=0, steps_per_execution=2)
    assert len(calls) == 1
    assert [one.steps for one in fs.explain(model).programs] == [16, 1]


def test_a_kept_trace_does_not_keep_the_model():
    """Custom gradients and callbacks in the step refer to the model; it goes all the same."""

    class Scales(layers.Layer):
        def __init__(self):
            super().__init__()
            self.scale = 2.0

        def call(self, x):
            @keras.ops.custom_gradient
            def scaled(x):
                return x, lambda *args, upstream: self.scale * upstream

            return scaled(x)

    model = keras.Sequential([keras.Input((6,)), Scales(), layers.Dense(1)])
    model.compile("sgd", "mse")
    x = np.ones((64, 6), "float32")
    fs.fit(model, x, x[:, :1], verbose=0)
    fs.predict(model, x, verbose=0)
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None


def test_large_batches_are_stacked_less_and_huge_ones_not_at_all():
    """A stack stays below 32 MiB: 10 MiB a batch leave room for three, 40 MiB for none."""
    for mebibytes, steps in ((10, 3), (40, 1)):
        model = keras.Sequential([keras.Input((mebibytes * 2**18 // 4,)), layers.Dense(1)])
        model.compile("sgd", "mse")
        x = np.zeros((16, mebibytes * 2**18 // 4), "float32")
        fs.fit(model, x, np.zeros((16, 1), "float32"), batch_size=4, verbose=0, donate=True)
        assert fs.explain(model).choices[0].steps == steps
        assert "MiB" in fs.explain(model).choices[0].reason


def test_large_outputs_are_stacked_less_too():
    """A prediction keeps its outputs below 32 MiB an execution: 10 MiB a batch leave room for three."""
    for mebibytes, steps in ((10, 3), (40, 1)):
        wide = layers.Lambda(lambda x, n=mebibytes: keras.ops.repeat(x, n * 2**18 // 4, axis=1))
        model = keras.Sequential([keras.Input((1,)), wide])
        x = np.arange(16, dtype="float32")[:, None]
        outputs = fs.predict(model, x, batch_size=4, verbose=0)
        np.testing.assert_array_equal(outputs[:, [0, -1]], np.hstack([x, x]))
        assert fs.explain(model).choices[0].steps == steps
        assert "outputs" in fs.explain(model).choices[0].reason


@pytest.mark.parametrize(
    "cut",
    [
        {"validate_every": 50, "max_steps": 51},
        {"validate_every": 7, "epochs": 2},
        {"validate_every": 1, "max_steps": 40},
        {"steps_per_epoch": 10, "max_steps": 21, "epochs": 4},
        {"steps_per_epoch": 17, "epochs": 7},
        {"max_steps": 17},
        {"max_steps": 33},
        {"steps_per_execution": 17},
        {"steps_per_execution": 33, "epochs": 2},
    ],
    ids=str,
)
def test_no_step_reads_memory_that_holds_no_rows(cut, monkeypatch, steps_together):
    """Room behind the gathered rows is never a batch, however the steps are cut: it is NaN here."""
    aligned = _passes._aligned

    def poisoned(shape, dtype):
        memory = aligned(shape, dtype)
        memory.fill(np.nan)
        return memory

    monkeypatch.setattr(_passes, "_aligned", poisoned)
    together, history = _fit_dense(rows=8 * 120 + 5, batch_size=8, **cut)
    assert np.isfinite(history.history["loss"]).all()
    steps_together(1)
    alone, reference = _fit_dense(rows=8 * 120 + 5, batch_size=8, **cut)
    assert history.history == reference.history
    for a, b in zip(together.get_weights(), alone.get_weights(), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("view", ["columns", "fortran", "reversed"])
def test_rows_of_a_view_are_the_same(view):
    """Arrays that do not lie row by row are gathered without a copy of the whole, to the same bits."""
    table = np.random.default_rng(0).normal(size=(ROWS, 8)).astype("float32")
    rows = {
        "columns": table[:, :6],
        "fortran": np.asfortranarray(table[:, :6]),
        "reversed": table[::-1, :6],
    }[view]
    weights = []
    for x in (rows, np.ascontiguousarray(rows)):
        keras.utils.set_random_seed(2)
        model = _dense()
        model.compile("sgd", "mse")
        fs.fit(model, x, x[:, :1], verbose=0)
        weights.append(model.get_weights())
    for a, b in zip(*weights, strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_step_that_takes_long_shares_its_execution_with_few(monkeypatch):
    """Executions stay under a tenth of a second, for Ctrl-C and progress bars; no bit changes."""
    counts = []
    execute = _runner.Runner.execute

    def noted(self, chunk, **options):
        counts.append(chunk.count)
        return execute(self, chunk, **options)

    monkeypatch.setattr(_runner.Runner, "execute", noted)
    monkeypatch.setattr(_runner, "LONGEST", 0.0)
    slow, _ = _fit_dense(rows=32 * 40)
    assert counts == [2, *[1] * 38]  # two before a step is timed
    assert fs.explain(slow).choices[0].steps == 1
    assert "ms" in fs.explain(slow).choices[0].reason
    monkeypatch.setattr(_runner, "LONGEST", 1e9)
    counts.clear()
    fast, _ = _fit_dense(rows=32 * 40)
    assert counts == [2, 16, 16, 6]
    for a, b in zip(slow.get_weights(), fast.get_weights(), strict=True):
        np.testing.assert_array_equal(a, b)
