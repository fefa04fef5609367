"""Pain 11: small models run far below the speed of a compiled loop, and strides report wrong numbers.

The example: sixteen steps go to the device at once, and callbacks hear of each with its own logs.
"""

import keras
import numpy as np
import pytest
from keras import layers

import fitstep as fs
from fitstep.engine import _runner

ROWS = 32 * 8 + 5  # eight steps and a partial batch


def dense():
    return keras.Sequential([keras.Input((6,)), layers.Dense(8, "relu"), layers.Dense(1)])


class Hears(keras.callbacks.Callback):
    """Notes the batch hooks; `async_safe` allows steps to run ahead."""

    def __init__(self, *, reads_only):
        super().__init__()
        self.async_safe = reads_only
        self.heard = []

    def on_train_batch_begin(self, batch, logs=None):
        self.heard.append(("begin", batch))

    def on_train_batch_end(self, batch, logs=None):
        self.heard.append(("end", batch, logs))


def fit_dense(*callbacks, rows=ROWS, **options):
    keras.utils.set_random_seed(2)
    model = dense()
    model.compile("sgd", "mse", metrics=["mae"])
    x = np.random.default_rng(0).normal(size=(rows, 6)).astype("float32")
    y = options.pop("y", x[:, :1])
    history = fs.fit(model, x, y, callbacks=list(callbacks), verbose=0, **options)
    return model, history


def test_callbacks_hear_every_step_with_its_own_logs():
    """Those that only read logs get the same calls as those for which each step waits."""
    waited_for, ran_ahead = Hears(reads_only=False), Hears(reads_only=True)
    alone, _ = fit_dense(waited_for, epochs=2)
    together, _ = fit_dense(ran_ahead, epochs=2)
    assert ran_ahead.heard == waited_for.heard
    assert fs.explain(alone).choices[0].steps == 1
    assert "Hears has its own on_train_batch_begin" in fs.explain(alone).choices[0].reason
    assert fs.explain(together).choices[0].steps > 1


@pytest.mark.parametrize(
    ("callback", "together"),
    [
        (lambda folder: keras.callbacks.ModelCheckpoint(f"{folder}/a.keras"), True),
        (lambda folder: keras.callbacks.ModelCheckpoint(f"{folder}/a.keras", save_freq=3), False),
        (lambda folder: keras.callbacks.BackupAndRestore(f"{folder}/b"), True),
        (lambda folder: keras.callbacks.CSVLogger(f"{folder}/log.csv"), True),
        (lambda folder: keras.callbacks.TerminateOnNaN(), True),
        (lambda folder: keras.callbacks.EarlyStopping("loss"), True),
        (lambda folder: keras.callbacks.LearningRateScheduler(lambda epoch: 0.1), True),
        (
            lambda folder: keras.callbacks.LambdaCallback(on_train_batch_end=lambda b, logs: None),
            False,
        ),
        (lambda folder: type("Mine", (keras.callbacks.ModelCheckpoint,), {
            "on_train_batch_end": lambda self, batch, logs=None: None})(f"{folder}/c.keras"), False),
        (lambda folder: type("Stops", (keras.callbacks.TerminateOnNaN,), {
            "on_batch_end": lambda self, batch, logs=None: None})(), False),
    ],
)  # fmt: skip
def test_which_callbacks_let_steps_share_an_execution(callback, together, tmp_path):
    """Keras's own that act at epochs do; whoever acts after a batch does not."""
    model, _ = fit_dense(callback(tmp_path))
    assert (fs.explain(model).choices[0].steps > 1) == together


def test_training_stops_right_after_the_step_that_is_not_finite():
    """`TerminateOnNaN`: as many steps as Keras makes, not those that were dispatched with them."""

    def fit(run):
        keras.utils.set_random_seed(2)
        model = dense()
        model.compile("sgd", "mse")
        x = np.random.default_rng(0).normal(size=(32 * 40, 6)).astype("float32")
        y = x[:, :1].copy()
        y[32 * 21 + 3] = np.nan
        options = {"shuffle": False, "verbose": 0, "epochs": 3}
        run(model, x, y, callbacks=[keras.callbacks.TerminateOnNaN()], **options)
        return model

    stock = fit(lambda model, *args, **kwargs: model.fit(*args, **kwargs))
    ours = fit(fs.fit)
    assert int(stock.optimizer.iterations) == 22
    assert int(ours.optimizer.iterations) == 22
    assert len(ours.history.history.get("loss", [])) == len(stock.history.history.get("loss", []))
    assert fs.explain(ours).choices[0].steps == 16


@pytest.mark.parametrize("stride", [2, 7])
def test_within_a_stride_no_step_is_left_out_after_one_that_is_not_finite(stride):
    """As in Keras the callback is asked after the stride, whose steps are all made."""
    y = np.zeros((32 * 40, 1), "float32")
    y[32 * 9] = np.nan  # in the tenth step
    hook = keras.callbacks.TerminateOnNaN()
    model, _ = fit_dense(hook, rows=32 * 40, y=y, steps_per_execution=stride, shuffle=False)
    assert int(model.optimizer.iterations) == -(-10 // stride) * stride


@pytest.mark.parametrize("moment", ["on_train_begin", "on_epoch_begin"])
def test_a_stop_asked_for_before_the_first_step_lets_one_step_run(moment):
    """As in Keras, which looks after each step."""

    def fit(run):
        model = dense()
        model.compile("sgd", "mse")

        def stop(*_, **__):
            model.stop_training = True

        hook = keras.callbacks.LambdaCallback(**{moment: stop})
        run(model, np.ones((ROWS, 6)), np.ones((ROWS, 1)), callbacks=[hook], epochs=2, verbose=0)
        return model

    assert (
        int(fit(lambda model, *args, **kwargs: model.fit(*args, **kwargs)).optimizer.iterations)
        == 1
    )
    ours = fit(fs.fit)
    assert int(ours.optimizer.iterations) == 1
    assert "`stop_training` was set" in fs.explain(ours).choices[0].reason


@pytest.mark.parametrize("verb", ["evaluate", "predict"])
def test_a_stop_asked_for_before_an_evaluation_or_prediction_lets_one_step_run(verb):
    """One batch of 32 rows is predicted; the evaluation is that of its rows."""
    model, _ = fit_dense()
    rows, one = np.arange(ROWS * 6).reshape(ROWS, 6) / 1000, np.ones((ROWS, 1))

    class Stops(keras.callbacks.Callback):
        def on_test_begin(self, logs=None):
            self.model.stop_evaluating = True

        def on_predict_begin(self, logs=None):
            self.model.stop_predicting = True

    if verb == "predict":
        assert len(fs.predict(model, rows, callbacks=[Stops()], verbose=0)) == 32
    else:
        logs = fs.evaluate(model, rows, one, callbacks=[Stops()], verbose=0, return_dict=True)
        assert logs == fs.evaluate(model, rows[:32], one[:32], verbose=0, return_dict=True)


def test_without_that_callback_training_goes_on_after_a_nan_as_in_keras():
    """All 40 steps are made, whatever the loss."""
    y = np.full((32 * 40, 1), np.nan, "float32")
    model, _ = fit_dense(rows=32 * 40, y=y)
    assert int(model.optimizer.iterations) == 40


@pytest.mark.parametrize(
    ("rows", "executions"), [(32 * 40, [16, 16, 8]), (32 * 5, [5]), (32, [1]), (ROWS, [8, 1])]
)
def test_few_executions_make_an_epoch(rows, executions, monkeypatch):
    """Sixteen steps an execution, what is left over in one more, and a partial batch in its own."""
    counts = []
    execute = _runner.Runner.execute

    def noted(self, chunk, **options):
        counts.append(chunk.count)
        return execute(self, chunk, **options)

    monkeypatch.setattr(_runner.Runner, "execute", noted)
    monkeypatch.setattr(_runner, "UNTIMED", 16)  # also before the first was timed
    model, _ = fit_dense(rows=rows)
    assert counts == executions
    counts.clear()
    fs.evaluate(model, np.ones((rows, 6)), np.ones((rows, 1)), verbose=0)
    fs.predict(model, np.ones((rows, 6)), verbose=0)
    assert counts == executions * 2


@pytest.mark.parametrize("stride", [1, 2, 5, 16, 100])
def test_a_stride_reports_true_step_numbers_and_the_logs_of_its_last_step(stride):
    """Of nine steps each call names the last one made, with the running means up to there."""
    alone, strided = Hears(reads_only=False), Hears(reads_only=False)
    fit_dense(alone, shuffle=False)
    fit_dense(strided, shuffle=False, steps_per_execution=stride)
    logs = {event[1]: event[2] for event in alone.heard if event[0] == "end"}
    ends = sorted({*range(stride - 1, 9, stride), 8})
    assert [event for event in strided.heard if event[0] == "end"] == [
        ("end", step, logs[step]) for step in ends
    ]
    assert [event[1] for event in strided.heard if event[0] == "begin"] == [*range(0, 9, stride)]
