"""Ctrl-C at any moment ends `fit` with KeyboardInterrupt and leaves the model whole and trainable."""

import gc
import os
import signal
import threading
import time
import weakref

import keras
import numpy as np
import pytest

import fitstep as fs
from tests.pains.twins import CountSteps, assert_alive, assert_close, count_of, values_of

INTERRUPTS = int(os.environ.get("FITSTEP_INTERRUPTS", "100"))
STEPS = 5  # per epoch
RATE = 2.0**-6
# Long enough that no interrupt comes after it, short enough that a lost one is a failure, not a hang.
LONG = {"batch_size": 14, "epochs": 5000, "verbose": 0, "shuffle": False}


class Clock(keras.layers.Layer):
    """A trainable weight whose gradient is 1: SGD moves it by exactly the rate in every update."""

    def build(self, input_shape):
        self.hand = self.add_weight(shape=(), initializer="zeros", name="hand")

    def call(self, inputs):
        self.add_loss(self.hand + 0.0)
        return inputs


def network(kind, wrap=keras.Sequential):
    keras.utils.set_random_seed(2)
    body = {
        "mlp": [keras.layers.Dense(16, activation="relu"), keras.layers.Dense(8)],
        "cnn": [
            keras.layers.Reshape((5, 1)),
            keras.layers.Conv1D(4, 3, padding="same", activation="relu"),
            keras.layers.BatchNormalization(),
            keras.layers.Flatten(),
        ],
    }[kind]
    model = wrap([keras.Input((5,)), CountSteps(), Clock(), *body, keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(RATE, momentum=0.0), "mse", metrics=["mae"])
    return model


def assert_consistent(model):
    """Counter, optimizer, weight and metrics tell of one and the same number of updates."""
    assert_alive(model)
    updates = count_of(model)
    clock = next(layer for layer in model.layers if isinstance(layer, Clock))
    assert int(model.optimizer.iterations.value) == updates
    assert float(clock.hand.value) == -RATE * updates
    return updates


def assert_metrics_belong(model, start):
    """The loss tracker holds the rows of the epoch's updates, for a fit that began at `start` updates."""
    batches = float(model.metrics[0].count.value) / 14
    updates = count_of(model) - start
    # at an epoch's edge all of them or, reset, none; before the first update what was there
    assert batches == updates % STEPS or updates % STEPS == 0


def assert_trainable(model, x, y):
    """The model trains on as a stock twin with the same values does."""
    twin = keras.models.clone_model(model)
    twin.compile(keras.optimizers.SGD(RATE), "mse", metrics=["mae"])
    twin.optimizer.build(twin.trainable_variables)
    for own, other in zip(
        [*twin.variables, *twin.optimizer.variables],
        [*model.variables, *model.optimizer.variables],
        strict=True,
    ):
        own.assign(np.array(other.value, copy=True))
    fs.fit(model, x, y, batch_size=14, verbose=0, shuffle=False)
    twin.fit(x, y, batch_size=14, verbose=0, shuffle=False)
    assert_close(values_of(model), values_of(twin), 1e-3)


def interrupted(delay, run, error=KeyboardInterrupt):
    """Send a real SIGINT from another thread after `delay` seconds, and expect `error` from `run`."""

    def send():
        time.sleep(delay)
        os.kill(os.getpid(), signal.SIGINT)

    sender = threading.Thread(target=send)
    before = signal.getsignal(signal.SIGINT)
    try:
        with pytest.raises(error):
            sender.start()
            run()
            sender.join()  # an interrupt that comes here came too late to say anything
            pytest.fail("the interrupt was lost")
    finally:
        sender.join()
    assert signal.getsignal(signal.SIGINT) is before


@pytest.fixture(autouse=True)
def _no_garbage():
    """Python itself drops what a handler raises while a collector's callback runs: see the last test."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize("kind", ["mlp", "cnn"])
@pytest.mark.parametrize("wrap", [keras.Sequential, fs.Sequential], ids=["plain", "fs"])
def test_interrupts_at_random_moments_lose_nothing(rows, kind, wrap):
    """After each of many real interrupts everything is alive and of one update; the model trains on."""
    x, y = rows
    model = network(kind, wrap)
    fs.fit(model, x, y, batch_size=14, verbose=0)
    generator = np.random.default_rng(5)
    seen = []
    for _ in range(INTERRUPTS):
        start = count_of(model)
        if wrap is keras.Sequential:
            interrupted(generator.uniform(0.0, 0.06), lambda: fs.fit(model, x, y, **LONG))
        else:
            interrupted(generator.uniform(0.0, 0.06), lambda: model.fit(x, y, **LONG))
        seen.append(assert_consistent(model))
        assert_metrics_belong(model, start)
        if float(np.abs(model.get_weights()[1])) > 50.0:  # stay where floats are exact
            model = network(kind, wrap)
            fs.fit(model, x, y, batch_size=14, verbose=0)
    assert len(set(seen)) > 1
    assert_trainable(model, x, y)


@pytest.mark.parametrize("kwargs", [{"donate": False}, {"snapshot": False}, {"batch_hook": True}])
def test_interrupts_lose_nothing_however_memory_is_handled(rows, kwargs):
    """Without donation, without snapshots, and with a callback each batch, an interrupt keeps the last update."""
    x, y = rows
    model = network("mlp")
    options = dict(kwargs)
    if options.pop("batch_hook", False):

        class Read(keras.callbacks.Callback):
            def on_train_batch_end(self, batch, logs=None):
                self.model.get_weights()

        options["callbacks"] = [Read()]
    fs.fit(model, x, y, batch_size=14, verbose=0)
    generator = np.random.default_rng(6)
    for _ in range(max(INTERRUPTS // 12, 5)):
        interrupted(generator.uniform(0.0, 0.06), lambda: fs.fit(model, x, y, **LONG, **options))
        assert_consistent(model)
    assert_trainable(model, x, y)


def test_interrupts_while_tracing_and_compiling_leave_all_as_before(rows):
    """An interrupt in the first second of a fresh model's fit leaves it as built, or trained so far."""
    x, y = rows
    generator = np.random.default_rng(7)
    for _ in range(max(INTERRUPTS // 20, 4)):
        model = network("cnn")
        model.optimizer.build(model.trainable_variables)
        interrupted(generator.uniform(0.0, 0.8), lambda m=model: fs.fit(m, x, y, **LONG))
        assert_consistent(model)
    assert_trainable(model, x, y)


@pytest.mark.parametrize("verb", ["evaluate", "predict"])
def test_interrupts_of_evaluate_and_predict_change_no_weight(rows, verb):
    """An interrupted `evaluate` or `predict` leaves every weight, and runs right the next time."""
    x, y = rows
    x, y = np.tile(x, (2000, 1)), np.tile(y, (2000, 1))
    model = network("mlp")
    fs.fit(model, x[:70], y[:70], batch_size=14, verbose=0)
    before = values_of(model)
    arguments = (x, y) if verb == "evaluate" else (x,)
    run = getattr(fs, verb)
    run(model, *(a[:14] for a in arguments), batch_size=14, verbose=0)
    generator = np.random.default_rng(8)
    for _ in range(max(INTERRUPTS // 12, 5)):
        interrupted(
            generator.uniform(0.0, 0.06),
            lambda: run(model, *arguments, batch_size=14, verbose=0),
        )
        assert_alive(model)
        for got, expected in zip(values_of(model), before, strict=True):
            np.testing.assert_array_equal(got, expected)
    out = model.predict(x[:70], verbose=0)
    got = run(model, *(a[:70] for a in arguments), batch_size=14, verbose=0)
    if verb == "predict":
        np.testing.assert_allclose(got, out, rtol=1e-5, atol=1e-5)
    else:
        assert got[1] == pytest.approx(float(np.abs(out - y[:70]).mean()), rel=1e-4)


def test_interrupts_between_and_inside_train_on_batch(rows):
    """A loop over `fs.Model.train_on_batch` that is interrupted keeps its last update."""
    x, y = rows
    model = network("mlp", fs.Sequential)
    model.train_on_batch(x[:14], y[:14])
    generator = np.random.default_rng(9)

    def loop():
        for _ in range(50_000):
            model.train_on_batch(x[:14], y[:14])

    for _ in range(max(INTERRUPTS // 12, 5)):
        interrupted(generator.uniform(0.0, 0.06), loop)
        assert_consistent(model)


def test_interrupts_during_validation_keep_the_updates(rows):
    """An interrupt in a long validation pass keeps what the epoch trained."""
    x, y = rows
    model = network("mlp")
    data = {"validation_data": (np.tile(x, (200, 1)), np.tile(y, (200, 1)))}
    fs.fit(model, x, y, batch_size=14, verbose=0, validation_data=(x, y))
    generator = np.random.default_rng(10)
    for _ in range(max(INTERRUPTS // 12, 5)):
        interrupted(generator.uniform(0.0, 0.06), lambda: fs.fit(model, x, y, **LONG, **data))
        assert assert_consistent(model) % STEPS in range(STEPS)
    assert_trainable(model, x, y)


class Mine(Exception):
    """What a user's own handler raises."""


@pytest.fixture
def handler():
    """Install a handler for SIGINT, and put back what was there."""
    before = signal.getsignal(signal.SIGINT)
    yield lambda function: signal.signal(signal.SIGINT, function)
    signal.signal(signal.SIGINT, before)


def test_own_handler_that_raises_is_called(rows, handler):
    """A user's handler is called once for each signal, and what it raises ends the fit."""
    x, y = rows
    model = network("mlp")
    fs.fit(model, x, y, batch_size=14, verbose=0)
    calls = []

    def mine(number, frame):
        calls.append((number, frame is not None))
        raise Mine

    handler(mine)
    generator = np.random.default_rng(11)
    for index in range(max(INTERRUPTS // 8, 5)):
        interrupted(generator.uniform(0.0, 0.06), lambda: fs.fit(model, x, y, **LONG), Mine)
        assert calls == [(signal.SIGINT, True)] * (index + 1)
        assert_consistent(model)
    assert signal.getsignal(signal.SIGINT) is mine
    assert_trainable(model, x, y)


def test_own_handler_that_returns_is_called_and_fit_goes_on(rows, handler):
    """A handler that only takes a note is called for each signal while fit runs to its end."""
    x, y = rows
    model = network("mlp")
    calls = []

    def mine(number, frame):
        calls.append(number)
        model.stop_training = len(calls) == 3

    handler(mine)
    done = threading.Event()

    def send():
        for expected in range(1, 4):
            os.kill(os.getpid(), signal.SIGINT)
            while len(calls) < expected and not done.is_set():
                time.sleep(0.001)

    class Start(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            if epoch == 1:
                thread.start()

    thread = threading.Thread(target=send)
    history = fs.fit(model, x, y, callbacks=[Start()], **LONG)
    done.set()
    thread.join()
    assert calls == [signal.SIGINT] * 3
    assert len(history.epoch) < LONG["epochs"]
    assert STEPS * (len(history.epoch) - 1) < assert_consistent(model) <= STEPS * len(history.epoch)


def test_ignored_interrupts_stay_ignored(rows, handler):
    """With SIG_IGN installed nothing stops the fit."""
    x, y = rows
    model = network("mlp")
    handler(signal.SIG_IGN)

    class Kill(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            os.kill(os.getpid(), signal.SIGINT)

    fs.fit(model, x, y, batch_size=14, epochs=2, verbose=0, callbacks=[Kill()])
    assert assert_consistent(model) == 2 * STEPS
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


@pytest.mark.parametrize(
    ("hook", "updates"),
    [
        ("on_train_begin", 0),
        ("on_epoch_begin", 0),
        ("on_train_batch_begin", 0),
        ("on_train_batch_end", 1),
        ("on_test_begin", 5),
        ("on_test_batch_end", 5),
        ("on_epoch_end", 5),
        ("on_train_end", 10),
    ],
)
def test_interrupt_inside_a_callback_comes_at_once(rows, hook, updates):
    """A signal sent in a hook raises there, before the next update."""
    x, y = rows
    model = network("mlp")
    model.optimizer.build(model.trainable_variables)

    def kill(self, *args, **kwargs):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0)  # a moment for the interpreter to notice

    callback = type("Kill", (keras.callbacks.Callback,), {hook: kill})()
    with pytest.raises(KeyboardInterrupt) as caught:
        fs.fit(
            model,
            x,
            y,
            batch_size=14,
            epochs=2,
            verbose=0,
            callbacks=[callback],
            validation_data=(x, y),
        )
    assert any(entry.name == "kill" for entry in caught.traceback)
    assert assert_consistent(model) == updates


def test_interrupt_in_the_data_source_comes_at_once(rows):
    """A signal that arrives while a generator makes its fourth batch raises there."""
    x, y = rows
    model = network("mlp")

    def data():
        for index in range(100):
            if index == 3:
                os.kill(os.getpid(), signal.SIGINT)
                time.sleep(0)
            yield x[:14], y[:14]

    with pytest.raises(KeyboardInterrupt):
        fs.fit(model, data(), steps_per_epoch=50, verbose=0, shuffle=False)
    assert assert_consistent(model) == 3


def test_handler_installed_by_a_callback_stays(rows, handler):
    """A handler that a callback installs in mid-run is the one that is called, and stays after the fit."""
    x, y = rows
    model = network("mlp")
    calls = []

    def mine(number, frame):
        calls.append(number)

    class Install(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch == 1:
                handler(mine)
            if batch == 3:
                os.kill(os.getpid(), signal.SIGINT)

    fs.fit(model, x, y, batch_size=14, verbose=0, callbacks=[Install()])
    assert calls == [signal.SIGINT]
    assert signal.getsignal(signal.SIGINT) is mine
    assert assert_consistent(model) == STEPS


def test_interrupt_of_the_main_thread_while_another_trains(rows):
    """A fit in a worker thread is not stopped by Ctrl-C in the main thread, and ends whole."""
    x, y = rows
    model = network("mlp")
    started = threading.Event()

    class Started(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            if epoch == 1:
                started.set()

    thread = threading.Thread(
        target=lambda: fs.fit(
            model, x, y, batch_size=14, epochs=40, verbose=0, callbacks=[Started()]
        )
    )
    thread.start()
    assert started.wait(60)
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)
        for _ in range(10**7):
            pass
    thread.join()
    assert assert_consistent(model) == 40 * STEPS


def test_many_interrupts_at_once_lose_nothing(rows):
    """A burst of signals, as from an impatient user, leaves a whole model."""
    x, y = rows
    model = network("mlp")
    fs.fit(model, x, y, batch_size=14, verbose=0)
    generator = np.random.default_rng(12)
    for _ in range(max(INTERRUPTS // 12, 5)):
        quiet = threading.Event()

        def send(delay=generator.uniform(0.0, 0.05), quiet=quiet):
            time.sleep(delay)
            for _ in range(5):
                os.kill(os.getpid(), signal.SIGINT)
            quiet.set()

        sender = threading.Thread(target=send)
        sender.start()
        caught = 0
        while not (quiet.is_set() and not sender.is_alive() and caught):
            try:
                fs.fit(model, x, y, **LONG)
                break
            except KeyboardInterrupt:
                caught += 1
        try:
            sender.join()
        except KeyboardInterrupt:
            sender.join()
        assert caught >= 1
        assert_consistent(model)
    assert_trainable(model, x, y)


def test_interrupt_of_a_nested_run_leaves_both_whole(rows):
    """An interrupt in a fit of one model inside a callback of another leaves both whole."""
    x, y = rows
    outer, inner = network("mlp"), network("mlp")
    fs.fit(outer, x, y, batch_size=14, verbose=0)
    fs.fit(inner, x, y, batch_size=14, verbose=0)

    class Inner(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            fs.fit(inner, x, y, batch_size=14, verbose=0)

    generator = np.random.default_rng(13)
    for _ in range(max(INTERRUPTS // 20, 4)):
        interrupted(
            generator.uniform(0.0, 0.1),
            lambda: fs.fit(outer, x, y, callbacks=[Inner()], **LONG),
        )
        assert_consistent(outer)
        assert_consistent(inner)
    assert_trainable(outer, x, y)


class Dying:
    """Sends the signal from its `__del__`."""

    def __del__(self):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("where", ["__del__", "weakref", "collector"])
def test_interrupt_that_python_drops_in_a_finaliser_still_ends_the_fit(rows, where):
    """A Ctrl-C that arrives while a finaliser runs, where Python ignores exceptions, is not forgotten."""
    x, y = rows
    model = network("mlp")

    def kill(*args):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0)

    class Once(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch != 2:
                return
            if where == "__del__":
                Dying()
            elif where == "weakref":
                gone = type("Gone", (), {})()
                reference = weakref.ref(gone, kill)
                del gone
                assert reference() is None
            else:
                gc.callbacks.append(kill)
                try:
                    gc.collect(0)
                finally:
                    gc.callbacks.remove(kill)

    with pytest.raises(KeyboardInterrupt):
        fs.fit(model, x, y, batch_size=14, epochs=3, verbose=0, callbacks=[Once()])
    assert_consistent(model)
