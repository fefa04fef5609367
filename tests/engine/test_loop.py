"""The order of a run, as it is written down in the loop."""

import threading
import warnings

import keras
import numpy as np
import pytest

import fitstep as fs
from fitstep._keras import _callbacks


class Recorder(keras.callbacks.Callback):
    """Notes every hook with its number."""

    def __init__(self, events):
        super().__init__()
        for kind in ("train", "test", "predict"):
            for moment in ("begin", "end"):
                self._note(events, f"on_{kind}_{moment}")
                self._note(events, f"on_{kind}_batch_{moment}")
        for moment in ("begin", "end"):
            self._note(events, f"on_epoch_{moment}")

    def _note(self, events, hook):
        def noted(*args, logs=None):
            number = args[:1] if args and isinstance(args[0], int) else ()
            events.append((hook.removeprefix("on_"), *number))

        setattr(self, hook, noted)


class Stepper(keras.Model):
    """A model that notes when its steps run, which they do eagerly."""

    def __init__(self, events):
        super().__init__()
        self.dense = keras.layers.Dense(1)
        self.note = events.append  # a list would become a copy that Keras tracks

    def call(self, x):
        return self.dense(x)

    def train_step(self, state, data):
        self.note(("train step",))
        return super().train_step(state, data)

    def test_step(self, state, data):
        self.note(("test step",))
        return super().test_step(state, data)

    def reset_metrics(self):
        self.note(("metrics reset",))
        super().reset_metrics()


def _events(fit, rows=5, **options):
    events: list = []
    model = Stepper(events)
    model.compile("sgd", "mse", run_eagerly=True)
    x = np.ones((rows, 3), "float32")
    events.clear()
    fit(model, x, x[:, :1], callbacks=[Recorder(events)], verbose=0, **options)
    return events


def test_the_order_of_a_training_run():
    """An epoch: metrics reset, begin, steps between their hooks, validation, end."""
    x = np.ones((2, 3), "float32")
    events = _events(fs.fit, batch_size=3, epochs=1, validation_data=(x, x[:, :1]))
    assert events == [
        ("train_begin",),
        ("metrics reset",),
        ("epoch_begin", 0),
        ("train_batch_begin", 0),
        ("train step",),
        ("train_batch_end", 0),
        ("train_batch_begin", 1),
        ("train step",),
        ("train_batch_end", 1),
        ("test_begin",),
        ("metrics reset",),
        ("test_batch_begin", 0),
        ("test step",),
        ("test_batch_end", 0),
        ("test_end",),
        ("epoch_end", 0),
        ("train_end",),
    ]


@pytest.mark.parametrize("steps_per_execution", [1, 2])
def test_the_order_is_that_of_keras(steps_per_execution):
    """The same hooks, numbers, steps and resets in the same order as `keras.Model.fit`."""

    def stock(model, *args, **kwargs):
        model.steps_per_execution = steps_per_execution
        model.fit(*args, **kwargs)

    def ours(model, *args, **kwargs):
        fs.fit(model, *args, steps_per_execution=steps_per_execution, **kwargs)

    x = np.ones((4, 3), "float32")
    options = {"batch_size": 1, "epochs": 2, "validation_data": (x, x[:, :1]), "validation_freq": 2}
    assert _events(ours, rows=6, **options) == _events(stock, rows=6, **options)


@pytest.mark.parametrize("steps_per_execution", [1, 2])
@pytest.mark.parametrize("steps_per_epoch", [4, 7, 8, 12])
def test_the_order_is_that_of_keras_where_steps_do_not_match_the_data(
    steps_per_epoch, steps_per_execution
):
    """Of 8 rows, 4, 7, 8 or 12 steps an epoch: no step is announced that does not come."""

    def stock(model, *args, **kwargs):
        model.steps_per_execution = steps_per_execution
        model.fit(*args, **kwargs)

    def ours(model, *args, **kwargs):
        fs.fit(model, *args, steps_per_execution=steps_per_execution, **kwargs)

    options = {"rows": 8, "batch_size": 1, "epochs": 2, "steps_per_epoch": steps_per_epoch}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of data that ends
        events = _events(ours, **options)
        assert len([e for e in events if e[0] == "train_batch_begin"]) == len(
            [e for e in events if e[0] == "train_batch_end"]
        )
        if steps_per_epoch % steps_per_execution == 0:  # Keras's own strides run beyond an epoch
            assert events == _events(stock, **options)


def test_a_stride_that_the_data_cuts_short_ends_with_its_last_step():
    """Of 5 steps, two between the calls, the callbacks hear of the steps 1, 3 and 4, not 5."""
    events = _events(fs.fit, batch_size=1, steps_per_execution=2)
    assert [event for event in events if event[0] == "train_batch_end"] == [
        ("train_batch_end", 1),
        ("train_batch_end", 3),
        ("train_batch_end", 4),
    ]


class ReadsLogs(keras.callbacks.Callback):
    """Keeps the logs of each batch; `async_safe` says in Keras that it does nothing else."""

    async_safe = True

    def __init__(self):
        super().__init__()
        self.seen = []

    def on_train_batch_end(self, batch, logs=None):
        self.seen.append((batch, logs, threading.current_thread()))


def fit_of_forty_steps(callback, **options):
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    x = np.random.default_rng(0).normal(size=(40, 3)).astype("float32")
    fs.fit(model, x, x[:, :1], batch_size=1, shuffle=False, callbacks=[callback], **options)
    return callback


@pytest.mark.parametrize("verbose", [0, 2])
def test_callbacks_that_only_read_logs_get_all_of_them_in_order(verbose, capsys):
    """Their calls may come late, but each comes, in order, from this thread, before the epoch ends."""
    callback = ReadsLogs()
    counts = []
    callback.on_epoch_end = lambda epoch, logs=None: counts.append(len(callback.seen))
    fit_of_forty_steps(callback, epochs=2, verbose=verbose)
    prompt = ReadsLogs()
    prompt.async_safe = False
    fit_of_forty_steps(prompt, epochs=2, verbose=verbose)
    assert counts == [40, 80]
    assert [batch for batch, _, _ in callback.seen] == [*range(40), *range(40)]
    assert callback.seen == prompt.seen
    assert {thread for _, _, thread in callback.seen} == {threading.current_thread()}


def test_a_late_hook_lags_no_more_than_its_bound():
    """Logs that are never computed wait, the oldest is called when more than the bound do."""
    callback = ReadsLogs()
    hooks = _callbacks.BatchHooks(keras.callbacks.CallbackList([callback]), "train")
    computed = {"is": False}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_callbacks, "_is_computed", lambda values: computed["is"])
        for step in range(_callbacks.LAG + 3):
            hooks.end(step, {"loss": step})
        assert [step for step, _, _ in callback.seen] == [0, 1, 2]
        computed["is"] = True
        hooks.end(99, {"loss": 99})
    assert [step for step, _, _ in callback.seen] == [*range(_callbacks.LAG + 3), 99]


def test_an_error_of_a_late_callback_ends_the_fit_and_keeps_the_model():
    """An `async_safe` callback that raises ends the fit with its own error, as a prompt one does."""

    class Fails(ReadsLogs):
        def on_train_batch_end(self, batch, logs=None):
            if batch == 7:
                raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError, match="mine"):
        fit_of_forty_steps(Fails(), verbose=0)
